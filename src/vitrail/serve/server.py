"""Serve models on a socket until a signal asks to stop."""

import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import uvicorn

from vitrail.config import Precision
from vitrail.errors import UsageError
from vitrail.inference.classifier import Classifier
from vitrail.runtime.workers import count_available_cores
from vitrail.serve import routes
from vitrail.serve.batching import BatchQueue
from vitrail.serve.connections import (
    ACCEPT_BACKLOG,
    ConnectionRegistry,
    HttpConnection,
    Listener,
    limit_log_rate,
    raise_connection_limit,
)
from vitrail.serve.decoder_processes import DecoderPool
from vitrail.serve.hosts import AllowedHosts
from vitrail.serve.limits import RequestLimits
from vitrail.serve.metrics import ServerMetrics
from vitrail.serve.request_handling import Service
from vitrail.serve.served_model import choose_names, start_model
from vitrail.serve.uploads import Uploads
from vitrail.weights.load import load

GRACE_SECONDS = 25  # for accepted requests after a stop signal; with the end of all threads at most 30


def load_service(
    models: Sequence[str],
    *,
    device: str | None = None,
    precision: Precision | None = None,
    max_batch: int = 32,
    capacity: int = 64,
    deadline: float = 1.0,
    limits: RequestLimits | None = None,
    key: str | None = None,
    hosts: AllowedHosts | None = None,
) -> Service:
    """Load MODELs and start their first pass."""
    classifiers = [
        Classifier(load(model), device=device, batch_size=max_batch, precision=precision) for model in models
    ]
    return make_service(
        dict(zip(choose_names(models), classifiers, strict=True)),
        capacity=capacity,
        deadline=deadline,
        limits=limits,
        key=key,
        hosts=hosts,
    )


def make_service(
    classifiers: dict[str, Classifier],
    *,
    capacity: int = 64,
    deadline: float = 1.0,
    limits: RequestLimits | None = None,
    key: str | None = None,
    hosts: AllowedHosts | None = None,
) -> Service:
    """The same for models that are loaded already."""
    metrics, models = ServerMetrics(), {}
    for name, classifier in classifiers.items():
        queue = BatchQueue(
            max_batch=classifier.batch_size,
            capacity=capacity,
            deadline=deadline,
            on_batch=partial(_count_batch, metrics, name),
        )
        models[name] = start_model(name, classifier, queue)
    batch = min(classifier.batch_size for classifier in classifiers.values())
    limits = (limits or RequestLimits())._replace(max_images=min(capacity, batch))
    input_specs = list(dict.fromkeys(each.input_spec for each in models.values()))
    decoders = DecoderPool(
        input_specs, limits, max(2, count_available_cores()), metrics
    )  # one of them for large images
    threads = ThreadPoolExecutor(count_available_cores(), thread_name_prefix="draw")
    return Service(models, limits, metrics, Uploads(limits), decoders, threads, key, hosts)


def _count_batch(metrics: ServerMetrics, model: str, images: int) -> None:
    metrics.increment("vitrail_images_total", images, model=model)
    metrics.observe("vitrail_batch_images", images, model=model)


def open_listener(host: str, port: int) -> socket.socket:
    """Bind the listening socket, before models are loaded: a taken port is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # unnamed, asyncio leaves Nagle on: 40 ms
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error}. Try another --port, 0 for any") from error
    return listener


def get_url(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(service: Service) -> uvicorn.Server:
    """The uvicorn server of a service, to be run with a listening socket."""
    connections = raise_connection_limit()
    service.uploads.max_open = max(1, connections // 2)  # the other half is for requests without a body
    limit_log_rate()
    config = uvicorn.Config(
        routes.build_app(service),
        http=partial(HttpConnection, ConnectionRegistry(connections)),  # type: ignore[arg-type]  # uvicorn calls it only
        loop="asyncio",
        ws="none",
        lifespan="off",
        proxy_headers=False,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=ACCEPT_BACKLOG,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return uvicorn.Server(config)


def serve_until_stopped(service: Service, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; requests accepted by then are answered."""
    with contextlib.closing(service), _ignore_signals():
        make_server(service).run(sockets=[listener])


@contextlib.contextmanager
def _ignore_signals() -> Iterator[None]:
    """Give stop signals an empty handler: uvicorn handles them, and raises them again once it has stopped."""
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
