"""Serve models on a socket until a signal asks to stop.

uvicorn limits requests, not connections, and waits forever for a request's headers. When all file descriptors are in
use, asyncio logs a traceback for every connection it cannot accept. So connections are limited here, and headers have a
deadline.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitrail.config import Precision
from vitrail.errors import UsageError
from vitrail.inference.classifier import Classifier
from vitrail.inference.feature_index import FeatureIndex
from vitrail.runtime.workers import count_available_cores
from vitrail.serving import routes
from vitrail.serving.batching import BatchQueue
from vitrail.serving.decoder_processes import DecoderPool
from vitrail.serving.index_search import serve_index
from vitrail.serving.limits import AllowedHosts, RequestLimits
from vitrail.serving.metrics import ServerMetrics
from vitrail.serving.request_handling import Service
from vitrail.serving.served_model import choose_names, start_model
from vitrail.serving.uploads import Uploads
from vitrail.weights.trained import Trained

GRACE_SECONDS = 25  # for accepted requests after a stop signal; with the end of all threads at most 30
HEADER_SECONDS = 10  # for the headers of a request, and for the rest of a refused body
MAX_CONNECTIONS = 1000
BACKLOG = 1024  # connections that the system queues while the server is busy
ACCEPT_BACKLOG = 32  # connections accepted in one turn of the event loop; an aborted one lives for four turns more
_RESERVED_DESCRIPTORS = 128 + 4 * ACCEPT_BACKLOG  # for models, decoders, the log, and aborted connections
_MAX_QUERIES = 64  # images searched for at once
_MAX_LOG_LINES = 20  # of a logger in a second


def build_classifiers(
    names: Sequence[str],
    models: Iterable[Trained],
    *,
    device: str | None = None,
    batch_size: int = 32,
    precision: Precision | None = None,
) -> dict[str, Classifier]:
    """Build the classifiers of models, by the names under which they are served."""
    return {
        name: Classifier(model, device=device, batch_size=batch_size, precision=precision)
        for name, model in zip(choose_names(names), models, strict=True)
    }


def make_service(
    classifiers: dict[str, Classifier],
    *,
    capacity: int = 64,
    deadline: float = 1.0,
    limits: RequestLimits | None = None,
    key: str | None = None,
    hosts: AllowedHosts | None = None,
    index: FeatureIndex | None = None,
    image_root: Path | None = None,
) -> Service:
    """The service of some models, whose first pass it starts, and perhaps of an index of one model's features."""
    searched = None
    if index is not None:
        index_queue = BatchQueue(max_batch=_MAX_QUERIES, capacity=capacity, deadline=deadline)
        searched = serve_index(index, classifiers, index_queue, image_root)
    metrics, models = ServerMetrics(), {}
    for name, classifier in classifiers.items():
        count, batch = partial(_count_batch, metrics, name), classifier.batch_size
        queue = BatchQueue(max_batch=batch, capacity=capacity, deadline=deadline, on_batch=count)
        models[name] = start_model(name, classifier, queue)
    max_images = min(capacity, *(classifier.batch_size for classifier in classifiers.values()))
    limits = (limits or RequestLimits())._replace(max_images=max_images)
    input_specs = list(dict.fromkeys(each.input_spec for each in models.values()))
    decoders = DecoderPool(input_specs, limits, max(2, count_available_cores()), metrics)  # one is for large images
    threads = ThreadPoolExecutor(count_available_cores(), thread_name_prefix="draw")
    return Service(models, limits, metrics, Uploads(limits), decoders, threads, key, hosts, searched)


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
        http=partial(HttpConnection, {}, connections),  # type: ignore[arg-type]  # uvicorn calls it only
        loop="asyncio",
        ws="none",
        lifespan="off",
        proxy_headers=False,
        log_config=None,  # uvicorn's would close the handlers of the whole process, and with them a caller's streams
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=ACCEPT_BACKLOG,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return uvicorn.Server(config)


def serve_until_stopped(service: Service, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; requests accepted by then are answered."""
    with contextlib.closing(service):
        # uvicorn handles these signals, and raises them again once it has stopped
        before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            make_server(service).run(sockets=[listener])
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


# --- connections -----------------------------------------------------------------------------------------------------


class Listener(socket.socket):
    """A socket with a long backlog, though asyncio accepts few at a time: it uses one number for both."""

    def listen(self, _: int = BACKLOG, /) -> None:
        super().listen(BACKLOG)


def raise_connection_limit() -> int:
    """Raise the limit of file descriptors as far as the system allows; how many connections fit into it."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return MAX_CONNECTIONS
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    needed = MAX_CONNECTIONS + _RESERVED_DESCRIPTORS
    if soft < needed:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    return max(1, min(MAX_CONNECTIONS, soft - _RESERVED_DESCRIPTORS))


class HttpConnection(H11Protocol):
    """uvicorn's HTTP connection with a deadline for headers and a limit on their number.

    It inherits because uvicorn offers no other hook. All connections share `idle`, the longest idle first.
    """

    def __init__(self, idle: "dict[HttpConnection, None]", max_connections: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._idle, self._max_connections = idle, max_connections
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > self._max_connections:
            oldest = next(iter(self._idle))  # a new connection is idle too, so there always is one
            del self._idle[oldest]
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_wait()
        elif self._deadline is None:  # the next request begins, or a refused body goes on; uvicorn's timer ends here
            self._await_request()

    def on_response_complete(self) -> None:
        self._mark_idle()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def _mark_idle(self) -> None:
        self._idle.pop(self, None)
        self._idle[self] = None

    def _await_request(self) -> None:
        self._mark_idle()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _end_wait(self) -> None:
        self._idle.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class LogRateLimit(logging.Filter):
    """Pass so many lines a second, and count those that were dropped."""

    def __init__(self, lines: int = _MAX_LOG_LINES) -> None:
        super().__init__()
        self._lines, self._second, self._count = lines, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        second, dropped = int(record.created), self._count - self._lines
        if second != self._second:
            if dropped > 0:
                record.msg = f"{record.getMessage()} ({dropped} lines before it were dropped)"
                record.args = None
            self._second, self._count = second, 0
        self._count += 1
        return self._count <= self._lines


def limit_log_rate() -> None:
    """Limit log lines, so that bad requests cannot fill the disk."""
    for name in ("asyncio", "uvicorn.error"):
        logger = logging.getLogger(name)
        if not any(isinstance(each, LogRateLimit) for each in logger.filters):
            logger.addFilter(LogRateLimit())
