"""More than a server can do, and its end: on loopback, over real connections."""

import asyncio
import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.serving import serving
from tests.serving.client import RESET, offer_load, quantile
from tests.serving.serving import make_image_file
from vitrail.serving import server as run
from vitrail.serving.limits import RequestLimits

IMAGES = [make_image_file(seed, (224, 224), "JPEG") for seed in range(8)]


def test_overload_is_refused_at_once_and_nothing_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that computes forty images a second is offered 160."""
    classify = serving.build_classifier(batch_size=4)

    def slow(views: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(0.1)
        return torch.ones(len(views), 7) / 7

    monkeypatch.setattr(classify, "predict_proba", slow)
    served = run.make_service({"slow": classify}, capacity=16, deadline=1.0)
    with serving.run_server(served) as (host, port, _):
        replies, health = asyncio.run(offer_load(host, port, IMAGES, rate=160, seconds=1.5))
    counts = collections.Counter(reply.status for reply in replies)
    assert set(counts) == {200, 503}, counts
    assert counts[200] >= 30
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies if reply.status == 503)
    assert {reply.status for reply in health} == {200}
    assert served.models["slow"].queue.accepted_images == 0


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_a_refused_upload_is_answered_and_not_reset(connection: str) -> None:
    """A megabyte and a half that is too large, or finds no room, by a client that reads when it has sent it all."""
    served = serving.build_service(limits=RequestLimits(max_megabytes=2))
    with serving.run_server(served) as (host, port, _):
        for held, size, status in ((64, 1_500_000, b"503"), (0, 3_000_000, b"413")):
            with contextlib.ExitStack() as full, socket.create_connection((host, port)) as raw:
                if held:
                    full.enter_context(served.models["small"].queue.acquire(held))
                head = f"POST /v1/predict HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\ncontent-length: {size}\r\n"
                raw.sendall(head.encode() + b"\r\n")
                time.sleep(0.05)
                with contextlib.suppress(ConnectionError):
                    raw.sendall(bytes(size))
                assert raw.recv(100).split()[1] == status


def test_a_client_that_asks_before_sending_is_refused_without_being_let_send() -> None:
    """What curl does with large files: Expect: 100-continue."""
    served = serving.build_service(limits=RequestLimits(max_megabytes=1))
    with serving.run_server(served) as (host, port, _), socket.create_connection((host, port)) as raw:
        raw.sendall(b"POST /v1/predict HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9999999\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[tuple[str, int]]:
    """Host and port of `vitrail serve` in a process of its own, which must end well."""
    command = [sys.executable, "-m", "vitrail", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as running:
        assert running.stdout is not None
        host, _, port = running.stdout.readline().strip().removeprefix("http://").rpartition(":")
        try:
            yield host, int(port)
        finally:
            running.send_signal(signal.SIGTERM)
    assert running.returncode == 0


@pytest.mark.soak
def test_four_times_what_it_can_do(deit_tiny: Path, soaked: Callable[[int, str, str, str], None]) -> None:
    with process(str(deit_tiny), "--device", "cpu", "--batch", "8", "--deadline", "0.6") as (host, port):
        asyncio.run(offer_load(host, port, IMAGES, rate=5, seconds=5))  # warm
        probe, _ = asyncio.run(offer_load(host, port, IMAGES, rate=400, seconds=5))
        capacity = sum(reply.status == 200 for reply in probe) / 5
        replies, health = asyncio.run(offer_load(host, port, IMAGES, rate=4 * capacity, seconds=30))
    accepted = [reply for reply in replies if reply.status == 200]
    refused = [reply for reply in replies if reply.status == 503]
    resets = sum(reply.status == RESET for reply in (*replies, *health))
    slow, late, sick = (quantile(replies, 0.99) for replies in (accepted, refused, health))
    reached = f"{slow:.2f} s, {late * 1e3:.0f} and {sick * 1e3:.0f} ms, {resets} resets at {4 * capacity:.0f}/s"
    soaked(13, "overload is refused", "accepted p99 1 s, 503 and /healthz p99 50 ms, no resets", reached)
    assert len(accepted) + len(refused) == len(replies)
    assert all("retry-after" in reply.headers for reply in refused)
    assert resets == 0
    assert slow <= 1
    assert late <= 0.05
    assert sick <= 0.05
