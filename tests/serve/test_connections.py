"""Connections that say nothing, too little, or come in crowds; and a log that stays small."""

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.serve import serving
from tests.serve.client import Client
from tests.serve.serving import picture
from vitrail.serve import connections
from vitrail.serve.connections import LogRateLimit, raise_connection_limit

HALF = b"GET /healthz HTTP/1.1\r\nhost: x\r\nsome-he"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server that waits for headers for half a second and has room for ten connections."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 10)
    served = serving.service()
    with serving.running(served) as (host, port, _):
        yield host, port


def is_closed(raw: socket.socket, seconds: float = 5) -> bool:
    """Whether the other side closes or resets a connection meanwhile."""
    raw.settimeout(seconds)
    try:
        while raw.recv(1000):
            pass
        return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("sent", [b"", HALF, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" + HALF])
def test_headers_must_come_in_time(server: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(server) as raw:
        start = time.monotonic()
        raw.sendall(sent)
        if sent.startswith(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"):
            assert raw.recv(1000).startswith(b"HTTP/1.1 200")
            raw.sendall(b"ader: ")  # it goes on, and does not end
        assert is_closed(raw)
        assert time.monotonic() - start < 3


def test_a_refused_body_does_not_hold_its_connection(server: tuple[str, int]) -> None:
    with socket.create_connection(server) as raw:
        raw.sendall(b"POST /v1/predict HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 413")
        end, closed = time.monotonic() + 5, False
        while not closed and time.monotonic() < end:
            try:
                raw.sendall(b"x")
                time.sleep(0.05)
            except ConnectionError:
                closed = True
        assert closed


@pytest.mark.attack
def test_a_crowd_of_half_sent_headers_keeps_nobody_out(
    server: tuple[str, int], attacked: Callable[[str, str], None]
) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(40):
            crowd.enter_context(socket.create_connection(server)).sendall(HALF)
        replies = [asyncio.run(Client(*server).ask("/healthz")) for _ in range(5)]
        replies.append(asyncio.run(Client(*server).ask("/v1/predict", picture())))
    assert {reply.status for reply in replies} == {200}
    slowest = max(reply.seconds for reply in replies)
    attacked("40 half-sent headers, room for 10 connections", f"/healthz and an image within {slowest * 1e3:.0f} ms")


def test_a_connection_with_a_request_is_not_ended_for_others(server: tuple[str, int]) -> None:
    with contextlib.ExitStack() as crowd, socket.create_connection(server) as raw:
        raw.sendall(b"POST /v1/predict HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nhalf")
        time.sleep(0.05)
        for _ in range(40):
            crowd.enter_context(socket.create_connection(server)).sendall(HALF)
        time.sleep(0.8)  # longer than headers may take
        raw.sendall(bytes(996))
        raw.settimeout(10)
        assert raw.recv(1000).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "connections"),
    [
        (1024, 1024, 1024, 768),
        (256, 1_000_000, 1256, 1000),
        (1024, resource.RLIM_INFINITY, 1256, 1000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 1000),
        (1_000_000, 1_000_000, None, 1000),
        (64, 64, 64, 1),
    ],
)
def test_connections_fit_into_the_descriptors_there_may_be(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, connections: int
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert raise_connection_limit() == connections
    assert limits == ([] if raised is None else [(raised, hard)])


def test_a_log_passes_so_many_lines_a_second_and_counts_the_others() -> None:
    limit, passed = LogRateLimit(lines=3), []
    for second, count in ((1, 10), (2, 1), (5, 2)):
        for number in range(count):
            record = logging.makeLogRecord({"msg": "line %d", "args": (number,), "created": second + 0.5})
            if limit.filter(record):
                passed.append(record.getMessage())
    assert passed == ["line 0", "line 1", "line 2", "line 0 (7 lines before it were dropped)", "line 0", "line 1"]
