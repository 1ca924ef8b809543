"""Connections: how many there are, and how long one may take to say what it wants.

uvicorn limits requests, not connections, and waits for a request's headers for ever. When all descriptors are taken,
asyncio writes a trace to the log for every connection it cannot accept.
"""

import asyncio
import logging
import resource
import socket
import sys
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10  # for the headers of a request, and for the rest of a body that was refused
MAX_CONNECTIONS = 1000
BACKLOG = 1024  # connections that the system holds while we are busy
ACCEPT_BACKLOG = (
    32  # connections accepted in one turn of the event loop; one that is ended for another has four turns left
)
_RESERVED_DESCRIPTORS = (
    128 + 4 * ACCEPT_BACKLOG
)  # descriptors that are no connections: models, decoders, the log; and those on their way
_MAX_LOG_LINES = 20  # of a logger in a second


class Listener(socket.socket):
    """A socket at which many may wait, though asyncio accepts few at a time: it takes both for one number."""

    def listen(self, _: int = BACKLOG, /) -> None:
        super().listen(BACKLOG)


def raise_connection_limit() -> int:
    """How many connections there may be, once this process may have as many descriptors as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    wanted = MAX_CONNECTIONS + _RESERVED_DESCRIPTORS
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return max(1, min(MAX_CONNECTIONS, soft - _RESERVED_DESCRIPTORS))


class ConnectionRegistry:
    """Those connections that have no request now, the one that has waited longest first; and how many there may be."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._waiting: dict[HttpConnection, None] = {}

    def add(self, connection: "HttpConnection") -> None:
        self.remove(connection)
        self._waiting[connection] = None

    def remove(self, connection: "HttpConnection") -> None:
        self._waiting.pop(connection, None)

    def abort_oldest(self) -> None:
        """Make room for another; there is always one that waits, since a new one does."""
        oldest = next(iter(self._waiting))
        self.remove(oldest)
        oldest.transport.abort()


class HttpConnection(H11Protocol):
    """uvicorn's connection, with a deadline for headers and a place among so many others.

    It inherits, because uvicorn has no other way to be told.
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
    """Lets so many lines a second pass, and says how many it kept back."""

    def __init__(self, lines: int = _MAX_LOG_LINES) -> None:
        super().__init__()
        self._lines, self._second, self._count = lines, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        second, kept_back = int(record.created), self._count - self._lines
        if second != self._second:
            if kept_back > 0:
                record.msg = f"{record.getMessage()} ({kept_back} lines before it were left out)"
                record.args = None
            self._second, self._count = second, 0
        self._count += 1
        return self._count <= self._lines


def limit_log_rate() -> None:
    """Let nobody fill the disk by what he sends: a line for every bad request is too much of them."""
    for name in ("asyncio", "uvicorn.error"):
        logger = logging.getLogger(name)
        if not any(isinstance(each, LogRateLimit) for each in logger.filters):
            logger.addFilter(LogRateLimit())
