"""A pool of decoder processes that can be killed: no image can block the server, whatever is in it.

An image may take `RequestLimits.decode_seconds` to decode. If others wait and every decoder has had its image for more
than `SLICE_SECONDS`, the image that started last is given up for them. So all decoders but one may work on large images
for as long as those may take, and the last is never held for longer than a slice. Small images are decoded first:
whoever slows the server down by large ones waits behind all others.
"""

import asyncio
import collections
import contextlib
import errno
import math
import multiprocessing
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker, util

import torch

from vitrail.figures.crops import Box
from vitrail.serve.batching import BusyError
from vitrail.serve.image_sizes import estimate_pixels
from vitrail.serve.limits import RefusedError, RequestLimits
from vitrail.serve.metrics import ServerMetrics
from vitrail.serve.upload_decoding import (
    BOX_FORMAT,
    JOB_HEADER,
    READY,
    REPLY_HEADER,
    InputSpec,
    ModelInput,
    run_decoder,
)

SLICE_SECONDS = 0.3  # that every image gets: a photo of 12 megapixels takes 0.2
MAX_SMALL_PIXELS = 4e6  # pixels: decoded in less than a tenth of a second
_START_SECONDS = 60  # for a decoder to start, on the busiest machine
_MAX_MESSAGE_BYTES = 10_000  # of a decoder's error
_SECONDS_MOMENTUM = 0.7  # weight of the earlier seconds in their moving average, at each image


class _DecoderProcess:
    """A decoder process, and the server's end of the socket to it."""

    def __init__(self, input_specs: Sequence[InputSpec], limits: RequestLimits) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = _start_process(theirs, input_specs, limits)
        self.kill = util.Finalize(self, partial(_kill_process, self.process, self.socket), exitpriority=0)
        """Runs at exit at the latest, before multiprocessing would join the process."""
        self.socket.settimeout(_START_SECONDS)
        if self.socket.recv(1) != READY:
            raise ConnectionResetError(errno.ECONNRESET, "it died")
        self.socket.setblocking(False)

    async def send_job(self, spec_index: int, input_spec: InputSpec, name: str, content: memoryview) -> ModelInput:
        """Send a job and read its reply; an OSError if the reply is invalid."""
        loop, title = asyncio.get_running_loop(), name.encode()
        await loop.sock_sendall(self.socket, JOB_HEADER.pack(spec_index, len(title), len(content)) + title)
        await loop.sock_sendall(self.socket, content)
        status, length, size = REPLY_HEADER.unpack(await self._read(REPLY_HEADER.size))
        if status in (400, 413) and length <= _MAX_MESSAGE_BYTES and not size:
            raise RefusedError(status, (await self._read(length)).decode(errors="replace"))
        if (status, length, size) != (200, BOX_FORMAT.size, math.prod(input_spec.shape)):
            raise OSError("a decoder sent an invalid reply")
        text = await self._read(length)
        pixels = torch.frombuffer(await self._read(size), dtype=torch.uint8)
        return ModelInput(pixels.reshape(input_spec.shape), Box(*BOX_FORMAT.unpack(text)))

    async def _read(self, size: int) -> bytearray:
        loop, content, done = asyncio.get_running_loop(), bytearray(size), 0
        while done < size:
            count = await loop.sock_recv_into(self.socket, memoryview(content)[done:])
            if not count:
                raise ConnectionResetError("a decoder died")
            done += count
        return content


def _kill_process(process: multiprocessing.process.BaseProcess, ours: socket.socket) -> None:
    ours.close()
    if process.is_alive():
        process.kill()


def start_forkserver() -> None:
    """Start the process that decoders are forked from, and let it preload their modules.

    The server itself has threads, which a fork does not survive.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["vitrail.serve.upload_decoding"])
    resource_tracker.ensure_running()  # first: it would undo the blocked signals
    with _block_signals():  # inherited: until decoders ignore them, stop signals do nothing
        forkserver.ensure_running()


def _start_process(
    theirs: socket.socket, input_specs: Sequence[InputSpec], limits: RequestLimits
) -> multiprocessing.process.BaseProcess:
    start_forkserver()  # again, if it died
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=run_decoder, args=(theirs, input_specs, limits), name="decoder", daemon=True)
    process.start()
    return process


@contextlib.contextmanager
def _block_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _RunningDecode:
    """An image that is being decoded."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self.timeout, self.start, self.is_given_up = timeout, time.monotonic(), False

    def give_up(self) -> None:
        if not self.timeout.expired():
            self.is_given_up = True
            self.timeout.reschedule(asyncio.get_running_loop().time())


class DecoderPool:
    """As many decoders as cores, started on demand. Only the event loop's thread uses them."""

    def __init__(
        self, input_specs: Sequence[InputSpec], limits: RequestLimits, count: int, metrics: ServerMetrics
    ) -> None:
        self.input_specs, self.limits, self.count, self._metrics = input_specs, limits, count, metrics
        self._idle: list[_DecoderProcess] = []
        self._free = count
        self._small: collections.deque[asyncio.Future[None]] = collections.deque()
        self._large: collections.deque[asyncio.Future[None]] = collections.deque()
        self._running: list[_RunningDecode] = []
        self._mean_seconds = 0.0  # that an image takes

    def start(self) -> None:
        """Start all decoders now; otherwise each starts with its first image."""
        while len(self._idle) < self._free:
            self._idle.append(_DecoderProcess(self.input_specs, self.limits))

    def close(self) -> None:
        """Kill all decoders, also in the middle of an image."""
        while self._idle:
            self._idle.pop().kill()

    @property
    def expected_wait(self) -> float:
        """Seconds until the images that wait now get a decoder."""
        return (len(self._small) + len(self._large)) * self._mean_seconds / self.count

    def check_capacity(self, max_wait: float) -> None:
        """Raise `BusyError` if one more image would wait for longer."""
        if self.expected_wait > max_wait:
            raise BusyError(f"what is to be decoded takes longer than {max_wait:g} s", self.expected_wait)

    async def decode(
        self, content: memoryview, input_spec: InputSpec, name: str, max_wait: float
    ) -> tuple[ModelInput, float]:
        """Decode an image, waiting at most `max_wait` for a decoder; the model input and the seconds it took."""
        await self._acquire(self._small if estimate_pixels(content) <= MAX_SMALL_PIXELS else self._large, max_wait)
        try:
            decoder = self._idle.pop() if self._idle else await self._start_replacement()
            start = time.monotonic()
            try:
                return await self._decode_with(decoder, content, input_spec, name), time.monotonic() - start
            finally:
                seconds = time.monotonic() - start
                self._mean_seconds = _SECONDS_MOMENTUM * self._mean_seconds + (1 - _SECONDS_MOMENTUM) * seconds
        finally:
            self._release()

    async def _decode_with(
        self, decoder: _DecoderProcess, content: memoryview, input_spec: InputSpec, name: str
    ) -> ModelInput:
        running, reason = _RunningDecode(asyncio.timeout(self.limits.decode_seconds)), "cancelled"
        self._running.append(running)
        timer = asyncio.get_running_loop().call_later(SLICE_SECONDS + 0.01, self._give_up_latest)
        try:
            async with running.timeout:
                decoded = await decoder.send_job(self.input_specs.index(input_spec), input_spec, name, content)
            reason = ""
            return decoded
        except RefusedError:
            reason = ""
            raise
        except TimeoutError:
            reason = "busy" if running.is_given_up else "slow"
            if running.is_given_up:
                raise BusyError(f"{name} takes long to decode, and other images wait", self.expected_wait) from None
            message = f"{name} takes longer to decode than {self.limits.decode_seconds:g} s"
            raise RefusedError(413, message) from None
        except OSError:
            reason = "died"
            raise RefusedError(400, f"{name} cannot be decoded: it crashed the decoder") from None
        finally:
            timer.cancel()
            self._running.remove(running)
            if reason:
                decoder.kill()
                self._metrics.increment("vitrail_decoders_replaced_total", reason=reason)
            else:
                self._idle.append(decoder)

    async def _start_replacement(self) -> _DecoderProcess:
        """Start a new decoder in another thread, since that takes some milliseconds."""
        try:
            return await asyncio.to_thread(_DecoderProcess, self.input_specs, self.limits)
        except OSError as error:
            raise BusyError(f"no decoder can be started: {error.strerror}", self.expected_wait) from error

    async def _acquire(self, waiting: collections.deque[asyncio.Future[None]], max_wait: float) -> None:
        """Wait for a free decoder, first come, first served."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        self._give_up_latest()
        entered = False
        try:
            await asyncio.wait({turn}, timeout=max_wait)
            entered = turn.done()
        finally:
            if not entered and turn.done():  # it was cancelled in the moment of its turn
                self._release()
            elif not entered:
                waiting.remove(turn)
        if not entered:
            raise BusyError(f"no decoder was free within {max_wait:g} s", self.expected_wait)

    def _release(self) -> None:
        waiting = self._small or self._large
        if waiting:
            waiting.popleft().set_result(None)
        else:
            self._free += 1

    def _give_up_latest(self) -> None:
        """Give up the image that began last where others wait and all decoders have had theirs for a slice."""
        now = time.monotonic()
        if not (self._small or self._large) or len(self._running) < self.count:
            return
        if all(now - running.start >= SLICE_SECONDS for running in self._running):
            max(self._running, key=lambda running: running.start).give_up()
