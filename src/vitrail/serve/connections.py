"""Connections: a limit on their number, and a deadline for a request's headers.

uvicorn limits requests, not connections, and waits forever for a request's headers. When all file descriptors are in
use, asyncio logs a traceback for every connection it cannot accept.
"""

import asyncio
import logging
import resource
import socket
import sys
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10  # for the headers of a request, and for the rest of a refused body
MAX_CONNECTIONS = 1000
BACKLOG = 1024  # connections that the system queues while the server is busy
ACCEPT_BACKLOG = 32  # connections accepted in one turn of the event loop; an aborted one lives for four turns more
_RESERVED_DESCRIPTORS = 128 + 4 * ACCEPT_BACKLOG  # for models, decoders, the log, and aborted connections
_MAX_LOG_LINES = 20  # of a logger in a second


class Listener(socket.socket):
    """A socket with a long backlog, though asyncio accepts few at a time: it uses one number for both."""

    def listen(self, _: int = BACKLOG, /) -> None:
        super().listen(BACKLOG)


def raise_connection_limit() -> int:
    """Raise the limit of file descriptors as far as the system allows; how many connections fit into it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    needed = MAX_CONNECTIONS + _RESERVED_DESCRIPTORS
    if soft < needed:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return max(1, min(MAX_CONNECTIONS, soft - _RESERVED_DESCRIPTORS))


class ConnectionRegistry:
    """Idle connections, the longest idle first, and the most connections there may be."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._waiting: dict[HttpConnection, None] = {}

    def add(self, connection: "HttpConnection") -> None:
        self.remove(connection)
        self._waiting[connection] = None

    def remove(self, connection: "HttpConnection") -> None:
        self._waiting.pop(connection, None)

    def abort_oldest(self) -> None:
        """Close the longest idle connection; a new one is idle too, so there always is one."""
        oldest = next(iter(self._waiting))
        self.remove(oldest)
        oldest.transport.abort()


class HttpConnection(H11Protocol):
    """uvicorn's HTTP connection with a deadline for headers and a limit on their number.

    It inherits because uvicorn offers no other hook.
    """

    def __init__(self, registry: ConnectionRegistry, **settings: Any) -> None:
        super().__init__(**settings)
        self._registry = registry
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > self._registry.max_connections:
            self._registry.abort_oldest()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._registry.remove(self)
            self._stop_deadline()
        elif self._deadline is None:  # the next request begins, or a refused body goes on; uvicorn's timer ends here
            self._await_request()

    def on_response_complete(self) -> None:
        self._registry.add(self)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.remove(self)
        self._stop_deadline()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._registry.add(self)
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_deadline(self) -> None:
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
