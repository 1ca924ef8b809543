"""Decoders that hang, die, lie or grow, and those who wait for them."""

import asyncio
import io
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.serving import attacks, serving
from tests.serving.serving import make_image_file
from vitrail.serving import decoder_processes, upload_decoding
from vitrail.serving.decoder_processes import DecoderPool, estimate_pixels
from vitrail.serving.limits import BusyError, RefusedError, RequestLimits
from vitrail.serving.metrics import ServerMetrics
from vitrail.serving.upload_decoding import InputSpec, ModelInput, compute_memory_limit

CLASSIFIER = serving.build_classifier()
RECIPE = InputSpec(CLASSIFIER.preprocess, 3)
LIMITS = RequestLimits(max_megabytes=1, max_megapixels=5, decode_seconds=1.0)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecoderPool]:
    """Two decoders that do what files ask of them."""
    monkeypatch.setattr(upload_decoding, "run_decoder", attacks.run_test_decoder)
    pool = DecoderPool([RECIPE], LIMITS, 2, ServerMetrics())
    pool.start()
    yield pool
    pool.close()


async def decode(pool: DecoderPool, file: bytes, patience: float = 30) -> ModelInput:
    return (await pool.decode(memoryview(file), RECIPE, "the image", patience))[0]


def is_running(number: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_pixels_come_back_to_the_bit(pool: DecoderPool) -> None:
    files = [make_image_file(seed, (30 + seed, 90)) for seed in range(12)]

    async def decode_all() -> list[ModelInput]:
        return await asyncio.gather(*(decode(pool, file) for file in files))

    for decoded, file in zip(asyncio.run(decode_all()), files, strict=True):
        assert torch.equal(decoded.pixels, CLASSIFIER.make_input(file))


@pytest.mark.attack
def test_a_decoder_that_takes_too_long_is_killed_and_replaced(
    pool: DecoderPool, attacked: Callable[[str, str], None]
) -> None:
    numbers = [each.process.pid for each in pool._idle]
    start = time.monotonic()
    with pytest.raises(RefusedError, match=r"the image takes longer to decode than 1 s") as refused:
        asyncio.run(decode(pool, b"sleep 60"))
    seconds = time.monotonic() - start
    assert refused.value.status == 413
    assert wait_until(lambda: sum(is_running(number) for number in numbers if number) == 1)
    for _ in range(3):
        assert asyncio.run(decode(pool, make_image_file())).pixels.shape == RECIPE.shape
    attacked("an image that takes a minute to decode, 1 s allowed", f"413 after {seconds:.1f} s, decoder killed")


@pytest.mark.attack
@pytest.mark.parametrize(("file", "status"), [(b"die", 400), (b"lie", 400), (b"grow 2000000000", 413)])
def test_a_decoder_that_dies_lies_or_grows_costs_its_own_request_alone(
    pool: DecoderPool, file: bytes, status: int, attacked: Callable[[str, str], None]
) -> None:
    async def decode_both() -> tuple[object, object]:
        return await asyncio.gather(decode(pool, file), decode(pool, make_image_file()), return_exceptions=True)

    refused, decoded = asyncio.run(decode_both())
    assert isinstance(refused, RefusedError)
    assert isinstance(decoded, ModelInput)
    assert refused.status == status
    assert asyncio.run(decode(pool, make_image_file())).pixels.shape == RECIPE.shape
    attacked(f"an image that makes its decoder {file.split()[0].decode()}", f"{status}; the next is decoded")


def test_a_decoder_may_have_the_memory_that_is_documented(pool: DecoderPool) -> None:
    decoded = asyncio.run(decode(pool, b"grow %d" % (compute_memory_limit(LIMITS) - 40_000_000)))
    assert decoded.pixels.shape == RECIPE.shape


def test_who_waits_too_long_for_a_decoder_is_told_so(pool: DecoderPool) -> None:
    async def decode_three() -> list[object]:
        slow = [asyncio.create_task(decode(pool, b"sleep 0.3")) for _ in range(2)]
        await asyncio.sleep(0.05)
        late = asyncio.create_task(decode(pool, make_image_file(), patience=0.05))
        return await asyncio.gather(late, *slow, return_exceptions=True)

    late, *slow = asyncio.run(decode_three())
    assert isinstance(late, BusyError)
    assert all("not an image of a known format" in str(error) for error in slow)
    assert (pool._free, len(pool._idle), len(pool._small), len(pool._large)) == (2, 2, 0, 0)


def test_slow_images_leave_one_decoder_to_the_others(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are slow the later is given up when a third waits; the earlier has all of its time."""
    monkeypatch.setattr(decoder_processes, "SLICE_SECONDS", 0.05)
    pool.limits = LIMITS._replace(decode_seconds=8.0)

    async def decode_three() -> tuple[tuple[object, object], float]:
        first = asyncio.create_task(decode(pool, b"sleep 60"))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(decode(pool, b"sleep 60"))
        await asyncio.sleep(0.01)
        start = time.monotonic()
        await decode(pool, make_image_file())
        seconds = time.monotonic() - start
        return await asyncio.gather(first, second, return_exceptions=True), seconds

    (first, second), seconds = asyncio.run(decode_three())
    assert isinstance(first, RefusedError)
    assert isinstance(second, BusyError)
    assert seconds < 7  # before the first is given up, on a busy machine too


def test_small_images_come_before_large_ones(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one decoder, so that images end in the order in which they get it."""
    monkeypatch.setattr(decoder_processes, "SLICE_SECONDS", 30)
    pool.count = pool._free = 1
    pool.limits = LIMITS._replace(decode_seconds=30)

    async def decode_many() -> list[str]:
        order: list[str] = []

        async def note(name: str, file: bytes) -> None:
            await decode(pool, file)
            order.append(name)

        large = [note("large", attacks.make_wide_png(2100)) for _ in range(2)]
        small = [note("small", make_image_file()) for _ in range(4)]
        await pool._acquire(pool._small, max_wait=30)  # as an image does that is being decoded
        waiting = asyncio.gather(*large, *small)
        while len(pool._small) + len(pool._large) < 6:
            await asyncio.sleep(0)
        pool._release()
        await waiting
        return order

    assert asyncio.run(decode_many()) == [*["small"] * 4, *["large"] * 2]


def test_alone_a_slow_image_has_all_of_its_time(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_processes, "SLICE_SECONDS", 0.05)

    async def decode_two() -> list[object]:
        return await asyncio.gather(*(decode(pool, b"sleep 0.3") for _ in range(2)), return_exceptions=True)

    assert all("not an image of a known format" in str(error) for error in asyncio.run(decode_two()))


def test_who_leaves_gives_his_decoder_back(pool: DecoderPool) -> None:
    async def leave(wait: Callable[[], Coroutine[Any, Any, ModelInput]]) -> None:
        tasks = [asyncio.create_task(wait()) for _ in range(5)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave(lambda: decode(pool, b"sleep 60")))
    assert (pool._free, len(pool._small), len(pool._large), len(pool._running)) == (2, 0, 0, 0)
    assert asyncio.run(decode(pool, make_image_file())).pixels.shape == RECIPE.shape


def test_decoders_leave_signals_to_the_server_and_end_when_closed(pool: DecoderPool) -> None:
    numbers = [each.process.pid or 0 for each in pool._idle]
    asyncio.run(decode(pool, make_image_file()))
    for number in numbers:
        os.kill(number, signal.SIGTERM)
        os.kill(number, signal.SIGINT)
    for _ in range(2):
        assert asyncio.run(decode(pool, make_image_file())).pixels.shape == RECIPE.shape
    assert all(map(is_running, numbers))
    pool.close()
    assert wait_until(lambda: not any(map(is_running, numbers)))


# --- pixels by the first bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
@pytest.mark.parametrize("size", [(500, 375), (33, 1000), (16, 16)])
def test_the_size_is_seen_in_the_first_bytes(format: str, size: tuple[int, int]) -> None:  # noqa: A002
    assert estimate_pixels(memoryview(make_image_file(0, size, format))) == size[0] * size[1]


@pytest.mark.parametrize("settings", [{"lossless": True}, {"lossless": True, "exact": True}, {"quality": 30}])
def test_webp_has_three_kinds_of_heads(settings: dict[str, int]) -> None:
    for mode in ("RGB", "RGBA"):
        file = io.BytesIO()
        Image.new(mode, (300, 200)).save(file, "WEBP", **settings)
        assert estimate_pixels(memoryview(file.getvalue())) == 60_000


def test_what_is_not_seen_at_once_is_taken_for_large() -> None:
    markers = attacks.make_jpeg_of_markers(1000)
    for file in (make_image_file(format="TIFF"), markers, b"x" * 100, b"\xff\xd8" * 50, b"RIFF" * 10):
        assert estimate_pixels(memoryview(file)) == math.inf
    assert estimate_pixels(memoryview(b"")) == 0
    assert estimate_pixels(memoryview(attacks.make_slow_jpeg(3000, 1))) == 9e6
