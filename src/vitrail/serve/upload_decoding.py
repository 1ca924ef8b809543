"""An image file to a model input, in a process of its own: one that takes too long, or too much memory, can be ended.

This is the decoder's side; `decoders.py` is the server's. The server sends jobs, and the decoder answers:

    job: number of the recipe, length of the name, length of the file; the name; the file
    answer: status, length of the text, length of the pixels; the text (a box, or why not); the pixels

A file may make a decoder do anything, so what it answers is plain numbers and text, which cannot do anything there.
"""

import contextlib
import os
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from vitrail.config import PreprocessConfig
from vitrail.data.decode import decode, get_jpeg_decoder_name, open_image
from vitrail.data.transforms import make_eval_input
from vitrail.errors import DataError
from vitrail.figures.crops import Box, compute_crop_box
from vitrail.serve.limits import RefusedError, RequestLimits

READY = b"+"  # said once, when a decoder can begin
JOB_HEADER = struct.Struct("!IIQ")
REPLY_HEADER = struct.Struct("!HII")
BOX_FORMAT = struct.Struct("!4d")
BYTES_PER_PIXEL = 20  # the most that decoding needs is 17, of a WebP (tests/data/test_image_headers.py)
SPARE_BYTES = 64 * 2**20  # bytes for the rest: modules that Pillow loads late, compressed data, the resized image
_NICE = 10  # above that of the threads that compute (compute.give_way): slow images must not keep them waiting


class InputSpec(NamedTuple):
    """How a model wants its images."""

    preprocess: PreprocessConfig
    channels: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a model input: (C, S, S)."""
        return (self.channels, *self.preprocess.size)


class ModelInput(NamedTuple):
    """An image as a model sees it."""

    pixels: Tensor  # uint8 (C, S, S)
    crop: Box  # of the image, from 0 to 1


def compute_memory_limit(limits: RequestLimits) -> int:
    """Bytes that a decoder may have beyond those it begins with: the file, and its pixels."""
    return int(limits.max_megapixels * 1e6 * BYTES_PER_PIXEL) + 2 * limits.max_bytes + SPARE_BYTES


def decode_input(content: bytes, input_spec: InputSpec, limits: RequestLimits, name: str = "the image") -> ModelInput:
    """Decode a file and crop it as every other command does."""
    try:
        found = open_image(content, name=name)
        height, width = found.height * found.reduction, found.width * found.reduction
        if height * width > limits.max_megapixels * 1e6:
            size = f"{width} x {height} pixels"
            raise RefusedError(413, f"{name} has {size}; at most {limits.max_megapixels:g} million are decoded")
        pixels = make_eval_input(decode(content, input_spec.channels, name=name), input_spec.preprocess)
    except DataError as error:
        raise RefusedError(400, str(error)) from error
    except MemoryError as error:
        raise RefusedError(413, f"{name} takes too much memory to decode") from error
    box = compute_crop_box(found.height, found.width, input_spec.preprocess)
    edges = box.left / found.width, box.top / found.height, box.right / found.width, box.bottom / found.height
    return ModelInput(pixels, Box(*edges))


def run_decoder(connection: socket.socket, input_specs: Sequence[InputSpec], limits: RequestLimits) -> None:
    """Do jobs until the server closes its end, which it also does by dying."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole group: the server decides when we end
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # Pillow's about odd files: anyone could fill the log with them
    os.nice(_NICE)
    get_jpeg_decoder_name()  # which tries simplejpeg: before the limit, and before there is an image to wait for it
    _limit_memory(limits)
    with contextlib.suppress(ConnectionError), connection, connection.makefile("rwb") as stream:
        connection.sendall(READY)
        while len(head := stream.read(JOB_HEADER.size)) == JOB_HEADER.size:
            # The server kills a decoder that takes too long. Where it has died meanwhile the alarm does.
            signal.setitimer(signal.ITIMER_REAL, limits.decode_seconds + 1)
            number, length, size = JOB_HEADER.unpack(head)
            name, content = stream.read(length).decode(), stream.read(size)
            if len(content) == size:
                stream.write(_make_reply(content, input_specs[number], limits, name))
                stream.flush()
            signal.setitimer(signal.ITIMER_REAL, 0)


def _make_reply(content: bytes, input_spec: InputSpec, limits: RequestLimits, name: str) -> bytes:
    try:
        made = decode_input(content, input_spec, limits, name)
    except RefusedError as error:
        text = str(error).encode()
        return REPLY_HEADER.pack(error.status, len(text), 0) + text
    pixels = made.pixels.numpy().tobytes()
    return REPLY_HEADER.pack(200, BOX_FORMAT.size, len(pixels)) + BOX_FORMAT.pack(*made.crop) + pixels


def _limit_memory(limits: RequestLimits) -> None:
    """Let the system refuse memory beyond the limit, where it counts addresses: on Linux."""
    if sys.platform == "linux":
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + compute_memory_limit(limits)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
