"""A service on a socket, until it is asked to stop."""

import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import uvicorn

from vitrail.config import Precision
from vitrail.data.workers import available
from vitrail.errors import UsageError
from vitrail.predict import Classifier
from vitrail.serve import app
from vitrail.serve.batching import Queue
from vitrail.serve.connections import ACCEPTED, Connection, Connections, Listener, count_connections, limit_logs
from vitrail.serve.decoders import Decoders
from vitrail.serve.hosts import Hosts
from vitrail.serve.limits import Limits
from vitrail.serve.metrics import Metrics
from vitrail.serve.models import named, served
from vitrail.serve.service import Service
from vitrail.serve.uploads import Uploads
from vitrail.weights.load import load

GRACE = 25  # seconds for what was accepted, once a stop is asked for; with the end of all threads at most 30


def service(
    models: Sequence[str],
    *,
    device: str | None = None,
    precision: Precision | None = None,
    batch: int = 32,
    room: int = 64,
    deadline: float = 1.0,
    limits: Limits | None = None,
    key: str | None = None,
    hosts: Hosts | None = None,
) -> Service:
    """MODELs, loaded and warming up."""
    classifiers = [Classifier(load(model), device=device, batch_size=batch, precision=precision) for model in models]
    return of_classifiers(
        dict(zip(named(models), classifiers, strict=True)),
        room=room,
        deadline=deadline,
        limits=limits,
        key=key,
        hosts=hosts,
    )


def of_classifiers(
    classifiers: dict[str, Classifier],
    *,
    room: int = 64,
    deadline: float = 1.0,
    limits: Limits | None = None,
    key: str | None = None,
    hosts: Hosts | None = None,
) -> Service:
    """The same of models that are loaded."""
    metrics, found = Metrics(), {}
    for name, classifier in classifiers.items():
        queue = Queue(batch=classifier.batch_size, room=room, deadline=deadline, counted=partial(_count, metrics, name))
        found[name] = served(name, classifier, queue)
    batch = min(classifier.batch_size for classifier in classifiers.values())
    limits = (limits or Limits())._replace(images=min(room, batch))
    recipes = list(dict.fromkeys(each.recipe for each in found.values()))
    decoders = Decoders(recipes, limits, max(2, available()), metrics)  # one of them for large images
    threads = ThreadPoolExecutor(available(), thread_name_prefix="draw")
    return Service(found, limits, metrics, Uploads(limits), decoders, threads, key, hosts)


def _count(metrics: Metrics, model: str, images: int) -> None:
    metrics.count("vitrail_images_total", images, model=model)
    metrics.observe("vitrail_batch_images", images, model=model)


def listening(host: str, port: int) -> socket.socket:
    """The one socket there is, bound before models are loaded: a port that is taken is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # unnamed, asyncio leaves Nagle on: 40 ms
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise UsageError(f"nothing can be served at {host}:{port}: {error}. Try another --port, 0 for any") from error
    return found


def address(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server(service: Service) -> uvicorn.Server:
    """What answers requests, once it is run with a listening socket."""
    connections = count_connections()
    service.uploads.most = max(1, connections // 2)  # the others are for those who ask something else
    limit_logs()
    config = uvicorn.Config(
        app.build(service),
        http=partial(Connection, Connections(connections)),  # type: ignore[arg-type]  # uvicorn calls it only
        loop="asyncio",
        ws="none",
        lifespan="off",
        proxy_headers=False,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=ACCEPTED,
        timeout_graceful_shutdown=GRACE,
    )
    return uvicorn.Server(config)


def run(service: Service, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; what was accepted by then is answered."""
    with contextlib.closing(service), _quiet():
        server(service).run(sockets=[listener])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Signals that do nothing themselves: uvicorn stops by them, and raises them once more when it has."""
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
