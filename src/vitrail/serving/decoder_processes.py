"""A pool of decoder processes that can be killed: no image can block the server, whatever is in it.

An image may take `RequestLimits.decode_seconds` to decode. If others wait and every decoder has had its image for more
than `SLICE_SECONDS`, the image that started last is given up for them. So all decoders but one may work on large images
for as long as those may take, and the last is never held for longer than a slice. Small images are decoded first:
whoever slows the server down by large ones waits behind all others.
"""

import asyncio
import collections
import errno
import math
import signal
import socket
import time
from collections.abc import Sequence
from multiprocessing import util
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Literal

import torch

from vitrail.runtime.workers import get_process_context, hide_main_module
from vitrail.serving import upload_decoding
from vitrail.serving.limits import BusyError, RefusedError, RequestLimits
from vitrail.serving.metrics import ServerMetrics
from vitrail.serving.upload_decoding import BOX_FORMAT, JOB_HEADER, REPLY_HEADER, InputSpec, ModelInput
from vitrail.visualization.crops import Box

SLICE_SECONDS = 0.3  # that every image gets: a photo of 12 megapixels takes 0.2
MAX_SMALL_PIXELS = 4e6  # pixels: decoded in less than a tenth of a second
_START_SECONDS = 60  # for a decoder to start, on the busiest machine
_MAX_MESSAGE_BYTES = 10_000  # of a decoder's error
_SECONDS_MOMENTUM = 0.7  # weight of the earlier seconds in their moving average, at each image
_MAX_JPEG_MARKERS = 64  # before the one with the size
_JPEG_FRAME_MARKERS = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # the markers with the size


class _DecoderProcess:
    """A decoder process, and the server's end of the socket to it."""

    def __init__(self, input_specs: Sequence[InputSpec], limits: RequestLimits) -> None:
        context = start_forkserver()  # again, if it died
        self.socket, theirs = socket.socketpair()
        with theirs:
            run, arguments = upload_decoding.run_decoder, (theirs, input_specs, limits)
            self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # each kind of context has one
                target=run, args=arguments, name="decoder", daemon=True
            )
            with hide_main_module():
                self.process.start()
        # at exit at the latest, before multiprocessing would join the process
        self.kill = util.Finalize(self, _kill_process, (self.process, self.socket), exitpriority=0)
        self.socket.settimeout(_START_SECONDS)
        if self.socket.recv(1) != upload_decoding.READY:
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


def _kill_process(process: BaseProcess, ours: socket.socket) -> None:
    ours.close()
    if process.is_alive():
        process.kill()


def start_forkserver() -> BaseContext:
    """Start the process that decoders are forked from, where the system has it, and return the decoders' context.

    Stop signals are blocked there, and so do nothing to decoders until these ignore them.
    """
    return get_process_context(["vitrail.serving.upload_decoding"], [signal.SIGINT, signal.SIGTERM])


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
                decoded = await self._decode_with(decoder, content, input_spec, name)
            finally:
                seconds = time.monotonic() - start
                self._mean_seconds = _SECONDS_MOMENTUM * self._mean_seconds + (1 - _SECONDS_MOMENTUM) * seconds
            return decoded, seconds
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
        try:
            await asyncio.wait({turn}, timeout=max_wait)
        except asyncio.CancelledError:
            if turn.done():  # in the moment of its turn
                self._release()
            else:
                waiting.remove(turn)
            raise
        if not turn.done():
            waiting.remove(turn)
            raise BusyError(f"no decoder was free within {max_wait:g} s", self.expected_wait)

    def _release(self) -> None:
        if waiting := self._small or self._large:
            waiting.popleft().set_result(None)
        else:
            self._free += 1

    def _give_up_latest(self) -> None:
        """Give up the image that began last where others wait and all decoders have had theirs for a slice."""
        if not (self._small or self._large) or len(self._running) < self.count:
            return
        latest = max(self._running, key=lambda running: running.start)
        if time.monotonic() - latest.start >= SLICE_SECONDS:
            latest.give_up()


# --- pixels by the first bytes ---------------------------------------------------------------------------------------


def estimate_pixels(file: memoryview) -> float:
    """Width times height, to decode small images first; infinity if the first bytes do not tell, as in a TIFF.

    Pillow knows more formats and cases, but its time is in the hands of the file.
    """
    head = bytes(file[:32])
    if len(head) < 32:
        return 0
    if head.startswith(b"\x89PNG"):
        return _parse_integer(head[16:20], "big") * _parse_integer(head[20:24], "big")
    if head.startswith(b"GIF8"):
        return _parse_integer(head[6:8]) * _parse_integer(head[8:10])
    if head.startswith(b"BM"):
        return abs(_parse_integer(head[18:22], signed=True) * _parse_integer(head[22:26], signed=True))
    if head.startswith(b"RIFF"):
        return _estimate_webp(head)
    return _estimate_jpeg(file) if head.startswith(b"\xff\xd8") else math.inf


def _estimate_webp(head: bytes) -> float:
    match head[12:16]:
        case b"VP8X":
            return (1 + _parse_integer(head[24:27])) * (1 + _parse_integer(head[27:30]))
        case b"VP8L":
            sides = _parse_integer(head[21:25])
            return (1 + sides % 2**14) * (1 + (sides >> 14) % 2**14)
        case b"VP8 ":
            return (_parse_integer(head[26:28]) % 2**14) * (_parse_integer(head[28:30]) % 2**14)
    return math.inf


def _estimate_jpeg(file: memoryview) -> float:
    offset = 2
    for _ in range(_MAX_JPEG_MARKERS):
        segment = bytes(file[offset : offset + 9])  # a marker, its length, bits of a sample, height, width
        if len(segment) < 9 or segment[0] != 0xFF:
            break
        if segment[1] in _JPEG_FRAME_MARKERS:
            return _parse_integer(segment[5:7], "big") * _parse_integer(segment[7:9], "big")
        offset += 2 + _parse_integer(segment[2:4], "big")
    return math.inf


def _parse_integer(part: bytes, order: Literal["little", "big"] = "little", *, signed: bool = False) -> int:
    return int.from_bytes(part, order, signed=signed)
