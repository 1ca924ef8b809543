"""A server under attack: whoever behaves is answered in time, its memory stays within its bound, and it can be stopped.

The suite attacks small servers with files that ask a decoder to sleep; what is marked `soak` is the attack itself.
"""

import asyncio
import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import model_factory
from tests.serving import attacks, serving
from tests.serving.attacks import Server, find_processes, serve_process, watch_memory
from tests.serving.client import Client, Reply, quantile
from tests.serving.serving import make_image_file
from tests.serving.test_decoder_processes import is_running, wait_until
from vitrail import save
from vitrail.runtime.workers import count_available_cores
from vitrail.serving import decoder_processes, upload_decoding
from vitrail.serving import server as run
from vitrail.serving.limits import RequestLimits
from vitrail.serving.upload_decoding import compute_memory_limit
from vitrail.serving.uploads import MAX_FULL_BODIES

GOOD = [make_image_file(seed, (224, 224), "JPEG") for seed in range(4)]
FORM = "multipart/form-data; boundary=edge"


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.safetensors"
    save(model_factory.build_trained(model_factory.build_vit()), path)
    return path


# --- slow images -----------------------------------------------------------------------------------------------------


async def ask_beside_attackers(
    host: str, port: int, slow: Sequence[bytes], *, attackers: int, seconds: float
) -> tuple[list[Reply], list[Reply], list[Reply]]:
    """Replies to attackers, of whom each sends a slow image as soon as the last is answered; to good clients, ten
    times a second; and to /healthz."""
    end = time.monotonic() + seconds
    client = Client(host, port)

    async def attack(number: int) -> list[Reply]:
        replies: list[Reply] = []
        while time.monotonic() < end:
            replies.append(await client.ask("/v1/predict", slow[number % len(slow)]))
            if replies[-1].status == 503:
                await asyncio.sleep(0.05)
            number += 1
        return replies

    async def ask_often(path: str, images: Sequence[bytes]) -> list[Reply]:
        replies = list[asyncio.Task[Reply]]()
        while time.monotonic() < end:
            replies.append(asyncio.create_task(client.ask(path, images[len(replies) % len(images)])))
            await asyncio.sleep(0.1)
        return list(await asyncio.gather(*replies))

    good, health, *bad = await asyncio.gather(
        ask_often("/v1/predict", GOOD), ask_often("/healthz", [b""]), *map(attack, range(attackers))
    )
    await client.close()
    return [reply for replies in bad for reply in replies], good, health


def describe(replies: Sequence[Reply]) -> str:
    counts = {status: sum(reply.status == status for reply in replies) for status in {each.status for each in replies}}
    return ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))


@pytest.mark.attack
def test_slow_images_leave_the_server_to_others(
    monkeypatch: pytest.MonkeyPatch, attacked: Callable[[str, str], None]
) -> None:
    """Four clients send images of half a minute, all the time; a tenth of the usual times is allowed."""
    monkeypatch.setattr(upload_decoding, "run_decoder", attacks.run_test_decoder)
    monkeypatch.setattr(decoder_processes, "SLICE_SECONDS", 0.05)
    served = serving.build_service(limits=RequestLimits(decode_seconds=1.0), deadline=5.0)
    with serving.run_server(served) as (host, port, _):
        file = b"sleep 30".ljust(40)  # of which no size is seen, so that it is taken for large
        slow, good, health = asyncio.run(ask_beside_attackers(host, port, [file], attackers=4, seconds=3))
    answered = [reply for reply in good if reply.status == 200]
    assert answered  # with one queue for all none is; how many depends on what else the machine does
    attacked(
        "4 clients send images that take 30 s to decode, always (small times)",
        f"they get {describe(slow)}; others {describe(good)}, 200 within {max(r.seconds for r in answered):.2f} s",
    )
    assert {reply.status for reply in slow} <= {413, 503}
    assert {reply.status for reply in good} <= {200, 503}
    assert {reply.status for reply in health} == {200}


@pytest.mark.attack
@pytest.mark.soak
def test_slow_images_of_every_kind_beside_a_good_client(
    deit_tiny: Path, tmp_path: Path, attacked: Callable[[str, str], None]
) -> None:
    """JPEGs of 8,000 scans and of 4 million markers, 16-bit PNGs of 50 megapixels: three attackers for 30 seconds."""
    slow = [attacks.make_slow_jpeg(), attacks.make_jpeg_of_markers(), attacks.make_wide_png()]
    with serve_process(deit_tiny, tmp_path, "--batch", "8", "--deadline", "0.6") as server:
        asyncio.run(ask_beside_attackers("127.0.0.1", server.port, slow, attackers=0, seconds=3))  # warm
        bad, good, health = asyncio.run(ask_beside_attackers("127.0.0.1", server.port, slow, attackers=3, seconds=30))
        stopped = server.stop()
    answered = [reply for reply in good if reply.status == 200]
    late, sick = quantile(answered, 0.99), quantile(health, 0.99)
    attacked(
        "3 clients send JPEGs of 8,000 scans or 4 million markers and PNGs of 50 megapixels, for 30 s",
        f"they get {describe(bad)}; others {describe(good)}, p99 {late:.2f} s; /healthz p99 {sick * 1e3:.0f} ms",
    )
    assert {reply.status for reply in bad} <= {200, 400, 413, 503}
    assert {reply.status for reply in good} <= {200, 503}
    assert len(answered) > len(good) / 2
    assert late <= 1
    assert {reply.status for reply in health} == {200}
    assert stopped < 30


# --- memory ----------------------------------------------------------------------------------------------------------


def find_bound(idle: int, limits: RequestLimits, connections: int) -> int:
    """The bytes that docs/serving.md, "Memory", allows: more than a server has when nobody asks, by so much."""
    bodies, pixels = MAX_FULL_BODIES * limits.max_bytes, max(2, count_available_cores()) * compute_memory_limit(limits)
    return idle + bodies + pixels + connections * 2**18 + 2**26


def attack_memory(server: Server, limits: RequestLimits, connections: int, seconds: float) -> tuple[int, int]:
    """The bytes before, and the most there are while large forms and bodies come slowly, then with 16-bit PNGs."""
    server.ask("/v1/predict", GOOD[0])
    time.sleep(0.5)
    side = int((limits.max_megapixels * 1e6) ** 0.5)
    png, end = attacks.make_wide_png(side), time.monotonic() + seconds
    room = limits.max_bytes - 200
    bodies = [(FORM, attacks.make_form(1, os.urandom(room))), ("image/png", os.urandom(room))]
    with contextlib.ExitStack() as opened, watch_memory(server.process.pid) as samples:
        held = []
        for number in range(connections):
            content_type, body = bodies[number % 2]
            raw = opened.enter_context(server.connect())
            head = f"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\n"
            with contextlib.suppress(OSError):  # refused, and closed
                raw.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body[:-1])
            held.append((raw, body[-1:]))
        images = [threading.Thread(target=repeat, args=(server, png, end)) for _ in range(6)]
        for thread in images:
            thread.start()
        time.sleep(seconds / 2)
        for raw, last in held:
            with contextlib.suppress(OSError):
                raw.sendall(last)
        for thread in images:
            thread.join()
    return samples[0], max(samples)


def repeat(server: Server, body: bytes, end: float) -> None:
    while time.monotonic() < end:
        status, _, _ = server.ask("/v1/predict", body)
        assert status in (200, 413, 503)


@pytest.mark.attack
def test_memory_stays_within_its_bound(small_model: Path, tmp_path: Path, attacked: Callable[[str, str], None]) -> None:
    limits = RequestLimits(max_megabytes=8, max_megapixels=2)
    with serve_process(small_model, tmp_path, "--max-megabytes", "8", "--max-megapixels", "2") as server:
        idle, most = attack_memory(server, limits, connections=64, seconds=2)
        assert server.ask("/v1/predict", GOOD[0])[0] in (200, 503)
        server.stop()
    bound = find_bound(idle, limits, 64)
    attacked(
        "64 slow forms and bodies of 8 MB, then PNGs of 2 megapixels and 16 bits",
        f"{most / 1e6:.0f} MB, {idle / 1e6:.0f} before; the bound is {bound / 1e6:.0f}",
    )
    assert most <= bound


@pytest.mark.attack
@pytest.mark.soak
def test_memory_stays_within_its_bound_at_full_size(
    deit_tiny: Path, tmp_path: Path, attacked: Callable[[str, str], None]
) -> None:
    with serve_process(deit_tiny, tmp_path) as server:
        idle, most = attack_memory(server, RequestLimits(), connections=200, seconds=20)
        server.stop()
    bound = find_bound(idle, RequestLimits(), 200)
    attacked(
        "200 slow forms and bodies of 20 MB, then PNGs of 50 megapixels and 16 bits",
        f"{most / 1e9:.2f} GB, {idle / 1e9:.2f} before; the bound is {bound / 1e9:.2f}",
    )
    assert most <= bound


# --- connections -----------------------------------------------------------------------------------------------------


def hold_headers(server: Server, count: int) -> Iterator[socket.socket]:
    for _ in range(count):
        raw = server.connect()
        with contextlib.suppress(OSError):
            raw.sendall(b"GET / HTTP/1.1\r\nho")
        yield raw


@pytest.mark.attack
@pytest.mark.parametrize(
    ("descriptors", "seconds"), [(256, 1), pytest.param(1024, 40, marks=pytest.mark.soak)], ids=["256", "1024"]
)
def test_half_sent_headers_up_to_the_descriptors_keep_nobody_out(
    small_model: Path, tmp_path: Path, descriptors: int, seconds: float, attacked: Callable[[str, str], None]
) -> None:
    with serve_process(small_model, tmp_path, descriptors=descriptors) as server:
        server.ask("/v1/predict", GOOD[0])
        end, held, health = time.monotonic() + seconds, list[socket.socket](), list[float]()
        while time.monotonic() < end or not health:
            for raw in held:
                raw.close()
            held = list(hold_headers(server, descriptors + 76))
            for _ in range(5):
                status, _, took = server.ask("/healthz")
                assert status == 200
                health.append(took)
        assert server.ask("/v1/predict", GOOD[0])[0] == 200
        for raw in held:
            raw.close()
        server.stop()
        log = server.log.read_text()
    attacked(
        f"{descriptors + 76} half-sent headers, {descriptors} descriptors, again and again for {seconds:g} s",
        f"/healthz within {max(health) * 1e3:.0f} ms, {len(log)} bytes of log",
    )
    assert max(health) < 2
    assert len(log) < 2000


# --- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.attack
def test_a_stop_does_not_wait_for_ever_and_counts_what_it_did_not_answer(
    monkeypatch: pytest.MonkeyPatch, attacked: Callable[[str, str], None]
) -> None:
    monkeypatch.setattr(upload_decoding, "run_decoder", attacks.run_test_decoder)
    monkeypatch.setattr(run, "GRACE_SECONDS", 0.5)
    served = serving.build_service(limits=RequestLimits(decode_seconds=60))
    answers: list[bytes] = []

    def send(head: bytes, body: bytes) -> None:
        with socket.create_connection((host, port), timeout=20) as raw:
            raw.sendall(b"POST /v1/predict HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n" + body)
            answers.append(raw.recv(1000))

    with serving.run_server(served) as (host, port, server):
        threads = [threading.Thread(target=send, args=(b"content-length: 8", b"sleep 60"))]
        threads += [threading.Thread(target=send, args=(b"content-length: 1000", b"half"))]
        for thread in threads:
            thread.start()
        assert wait_until(lambda: served.uploads.open_count == 2 and served.models["small"].queue.accepted_images == 1)
        numbers = find_processes(os.getpid())
        start = time.monotonic()
        server.should_exit = True
        for thread in threads:
            thread.join()
    seconds = time.monotonic() - start
    assert served.unanswered_requests == 2
    assert [answer.split()[1] for answer in answers] == [b"503", b"503"]
    assert seconds < 5
    assert served.uploads.held_bytes == served.uploads.open_count == 0
    assert wait_until(lambda: len(find_processes(os.getpid())) <= len(numbers) - 2)
    attacked("a stop while an image decodes for a minute (0.5 s of grace)", f"stopped after {seconds:.1f} s, 2 counted")


@pytest.mark.attack
def test_no_decoder_outlives_a_killed_server(
    small_model: Path, tmp_path: Path, attacked: Callable[[str, str], None]
) -> None:
    with serve_process(small_model, tmp_path) as server:
        server.ask("/v1/predict", GOOD[0])
        numbers = find_processes(server.process.pid)
        assert len(numbers) >= 4  # the server, what decoders are forked from, and two of them
        server.stop(9)
        ended = wait_until(lambda: not any(map(is_running, numbers)), 10)
    attacked("SIGKILL to the server", f"{len(numbers)} processes ended")
    assert ended


@pytest.mark.attack
@pytest.mark.soak
def test_sigterm_under_slow_images_and_bodies(
    small_model: Path, tmp_path: Path, attacked: Callable[[str, str], None]
) -> None:
    """Bodies that end too late are given up after the grace; exit 0, and the log counts them.

    The end of a process takes seconds on a busy machine. So an idle server is stopped just after, and only what this
    one takes beyond the grace and beyond the other's end is limited.
    """
    with serve_process(small_model, tmp_path) as server, contextlib.ExitStack() as opened:
        server.ask("/v1/predict", GOOD[0])
        for body in (attacks.make_slow_jpeg(), attacks.make_wide_png(), attacks.make_slow_jpeg()):
            raw = opened.enter_context(server.connect())
            head = b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
            raw.sendall(head + body)
        half_bodies = [opened.enter_context(server.connect()) for _ in range(3)]
        for raw in half_bodies:
            raw.sendall(b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nhalf")
        time.sleep(0.5)
        numbers = find_processes(server.process.pid)
        with ThreadPoolExecutor() as pool:
            start = time.monotonic()
            grace_ends = [pool.submit(attacks.wait_for_answer, raw) for raw in half_bodies]
            seconds = server.stop()
            grace = [each.result() - start for each in grace_ends]
        log = server.log.read_text()
    (tmp_path / "idle").mkdir()
    with serve_process(small_model, tmp_path / "idle") as idle:
        idle.ask("/v1/predict", GOOD[0])
        idle_seconds = idle.stop()
    match = re.search(r"stopped; (\d+) requests not answered within 25 s", log)
    last = log.splitlines()[-1]
    attacked(
        "SIGTERM under slow images and 3 bodies that never end",
        f"exit 0 after {seconds:.1f} s, {idle_seconds:.1f} s of which an idle server takes too; {last}",
    )
    assert server.process.returncode == 0
    assert min(grace) >= run.GRACE_SECONDS
    assert max(grace) < run.GRACE_SECONDS + 5
    assert seconds - max(grace) < 5 + idle_seconds
    assert match is not None
    assert int(match[1]) == 3
    assert wait_until(lambda: not any(map(is_running, numbers)))
