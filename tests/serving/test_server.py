"""Services made of models, their socket, and their end; connections that say nothing, too little, or come in crowds."""

import asyncio
import contextlib
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from fastapi.testclient import TestClient

from tests import model_factory
from tests.serving import serving
from tests.serving.client import Client
from tests.serving.serving import make_image_file
from vitrail import load, save
from vitrail.errors import UsageError
from vitrail.serving import server as run
from vitrail.serving.limits import RequestLimits

IMAGE = make_image_file(size=(224, 224), format="JPEG")


def test_more_images_than_a_batch_are_refused(client: TestClient) -> None:
    answer = client.post("/v1/predict", files=[("image", ("a.png", make_image_file()))] * 9)
    assert (answer.status_code, answer.json()["error"]) == (413, "a request may have 8 images, and this one has more")


def test_a_port_that_is_taken_is_said_at_once() -> None:
    with run.open_listener("127.0.0.1", 0) as listener:
        listener.listen()
        with pytest.raises(UsageError, match="Try another --port, 0 for any"):
            run.open_listener(*listener.getsockname())


def test_a_stop_answers_what_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    classify, go, started = serving.build_classifier(), threading.Event(), threading.Event()

    def waiting(views: list[torch.Tensor]) -> torch.Tensor:
        started.set()
        assert go.wait(20)
        return torch.ones(len(views), 7) / 7

    monkeypatch.setattr(classify, "predict_proba", waiting)
    served = run.make_service({"m": classify}, deadline=30)
    with serving.run_server(served) as (host, port, server):

        async def stopped() -> list[int]:
            client = Client(host, port)
            asked = [asyncio.create_task(client.ask("/v1/predict", IMAGE)) for _ in range(5)]
            while not started.is_set() or served.models["m"].queue.accepted_images < 5:
                await asyncio.sleep(0.005)
            server.should_exit = True
            while True:  # nobody new is let in
                try:
                    _, writer = await asyncio.open_connection(host, port)
                    writer.close()
                    await asyncio.sleep(0.01)
                except ConnectionRefusedError:
                    break
            go.set()
            return [reply.status for reply in await asyncio.gather(*asked)]

        assert asyncio.run(stopped()) == [200] * 5


def test_answers_do_not_wait_for_an_acknowledgement() -> None:
    """asyncio switches Nagle's algorithm off only for sockets that say they are TCP; else small answers take 40 ms."""
    served = serving.build_service()
    with serving.run_server(served) as (host, port, _):

        async def asked() -> list[float]:
            client = Client(host, port)
            with served.models["small"].queue.acquire(64):
                return [(await client.ask("/v1/predict", IMAGE)).seconds for _ in range(30)]

        assert min(asyncio.run(asked())[5:]) < 0.03


def test_models_are_loaded_under_their_names_with_all_settings(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        save(model_factory.build_trained(model_factory.build_vit()), tmp_path / f"{name}.safetensors")
    models = [str(tmp_path / "cats.safetensors"), str(tmp_path / "dogs.safetensors")]
    classifiers = run.build_classifiers(models, map(load, models), device="cpu", batch_size=4)
    limits = RequestLimits(max_megabytes=3)
    service = run.make_service(classifiers, capacity=6, deadline=9.0, limits=limits, key="sesame")
    assert list(service.models) == ["cats", "dogs"]
    for served in service.models.values():
        assert (served.classifier.batch_size, served.queue.capacity, served.queue.deadline) == (4, 6, 9.0)
    assert (service.limits.max_megabytes, service.limits.max_images, service.key) == (3, 4, "sesame")
    service.close()


@pytest.mark.parametrize(("capacity", "most"), [(64, 4), (3, 3)])
def test_a_request_has_no_more_images_than_the_smallest_batch_and_the_queue(capacity: int, most: int) -> None:
    classifiers = {"large": serving.build_classifier(batch_size=8), "small": serving.build_classifier(batch_size=4)}
    service = run.make_service(classifiers, capacity=capacity)
    assert service.limits.max_images == most
    service.close()


@pytest.mark.parametrize(
    ("address", "url"),
    [(("127.0.0.1", 80), "http://127.0.0.1:80"), (("::1", 8000, 0, 0), "http://[::1]:8000")],
)
def test_the_url_is_that_of_the_socket(address: tuple[str, int], url: str) -> None:
    assert run.get_url(Mock(spec=socket.socket, getsockname=lambda: address)) == url


# --- connections -----------------------------------------------------------------------------------------------------

HALF = b"GET /healthz HTTP/1.1\r\nhost: x\r\nsome-he"


@pytest.fixture
def small_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server that waits for headers for half a second and has room for ten connections."""
    monkeypatch.setattr(run, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(run, "MAX_CONNECTIONS", 10)
    served = serving.build_service()
    with serving.run_server(served) as (host, port, _):
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
def test_headers_must_come_in_time(small_server: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(small_server) as raw:
        start = time.monotonic()
        raw.sendall(sent)
        if sent.startswith(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"):
            assert raw.recv(1000).startswith(b"HTTP/1.1 200")
            raw.sendall(b"ader: ")  # it goes on, and does not end
        assert is_closed(raw)
        assert time.monotonic() - start < 3


def test_a_refused_body_does_not_hold_its_connection(small_server: tuple[str, int]) -> None:
    with socket.create_connection(small_server) as raw:
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
    small_server: tuple[str, int], attacked: Callable[[str, str], None]
) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(40):
            crowd.enter_context(socket.create_connection(small_server)).sendall(HALF)
        replies = [asyncio.run(Client(*small_server).ask("/healthz")) for _ in range(5)]
        replies.append(asyncio.run(Client(*small_server).ask("/v1/predict", make_image_file())))
    assert {reply.status for reply in replies} == {200}
    slowest = max(reply.seconds for reply in replies)
    attacked("40 half-sent headers, room for 10 connections", f"/healthz and an image within {slowest * 1e3:.0f} ms")


def test_a_connection_with_a_request_is_not_ended_for_others(small_server: tuple[str, int]) -> None:
    with contextlib.ExitStack() as crowd, socket.create_connection(small_server) as raw:
        raw.sendall(b"POST /v1/predict HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nhalf")
        time.sleep(0.05)
        for _ in range(40):
            crowd.enter_context(socket.create_connection(small_server)).sendall(HALF)
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
    assert run.raise_connection_limit() == connections
    assert limits == ([] if raised is None else [(raised, hard)])


def test_a_log_passes_so_many_lines_a_second_and_counts_the_others() -> None:
    limit, passed = run.LogRateLimit(lines=3), []
    for second, count in ((1, 10), (2, 1), (5, 2)):
        for number in range(count):
            record = logging.makeLogRecord({"msg": "line %d", "args": (number,), "created": second + 0.5})
            if limit.filter(record):
                passed.append(record.getMessage())
    assert passed == ["line 0", "line 1", "line 2", "line 0 (7 lines before it were dropped)", "line 0", "line 1"]
