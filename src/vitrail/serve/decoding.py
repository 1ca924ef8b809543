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

from vitrail.config import Preprocess
from vitrail.data.decode import decode, decoder, opened
from vitrail.data.transforms import evaluation_view
from vitrail.errors import DataError
from vitrail.figures.boxes import Box, seen
from vitrail.serve.limits import Limits, RefusedError

READY = b"+"  # said once, when a decoder can begin
JOB = struct.Struct("!IIQ")
REPLY = struct.Struct("!HII")
BOX = struct.Struct("!4d")
BYTES_PER_PIXEL = 20  # the most that decoding needs is 17, of a WebP (tests/data/test_hostile_images.py)
SPARE = 64 * 2**20  # bytes for the rest: modules that Pillow loads late, compressed data, the resized image
_NICE = 10  # above that of the threads that compute (compute.give_way): slow images must not keep them waiting


class Recipe(NamedTuple):
    """How a model wants its images."""

    preprocess: Preprocess
    channels: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a model input: (C, S, S)."""
        return (self.channels, *self.preprocess.size)


class ModelInput(NamedTuple):
    """An image as a model sees it."""

    pixels: Tensor  # uint8 (C, S, S)
    within: Box  # of the image, from 0 to 1


def memory_limit(limits: Limits) -> int:
    """Bytes that a decoder may have beyond those it begins with: the file, and its pixels."""
    return int(limits.megapixels * 1e6 * BYTES_PER_PIXEL) + 2 * limits.bytes + SPARE


def make_input(content: bytes, recipe: Recipe, limits: Limits, name: str = "the image") -> ModelInput:
    """Decode a file and crop it as every other command does."""
    try:
        found = opened(content, name=name)
        height, width = found.height * found.reduction, found.width * found.reduction
        if height * width > limits.megapixels * 1e6:
            size = f"{width} x {height} pixels"
            raise RefusedError(413, f"{name} has {size}; at most {limits.megapixels:g} million are decoded")
        pixels = evaluation_view(decode(content, recipe.channels, name=name), recipe.preprocess)
    except DataError as error:
        raise RefusedError(400, str(error)) from error
    except MemoryError as error:
        raise RefusedError(413, f"{name} takes too much memory to decode") from error
    box = seen(found.height, found.width, recipe.preprocess)
    edges = box.left / found.width, box.top / found.height, box.right / found.width, box.bottom / found.height
    return ModelInput(pixels, Box(*edges))


def run_decoder(connection: socket.socket, recipes: Sequence[Recipe], limits: Limits) -> None:
    """Do jobs until the server closes its end, which it also does by dying."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole group: the server decides when we end
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # Pillow's about odd files: anyone could fill the log with them
    os.nice(_NICE)
    decoder()  # which tries simplejpeg: before the limit, and before there is an image to wait for it
    _limit_memory(limits)
    with contextlib.suppress(ConnectionError), connection, connection.makefile("rwb") as stream:
        connection.sendall(READY)
        while len(head := stream.read(JOB.size)) == JOB.size:
            # The server kills a decoder that takes too long. Where it has died meanwhile the alarm does.
            signal.setitimer(signal.ITIMER_REAL, limits.decode_seconds + 1)
            number, length, size = JOB.unpack(head)
            name, content = stream.read(length).decode(), stream.read(size)
            if len(content) == size:
                stream.write(_reply(content, recipes[number], limits, name))
                stream.flush()
            signal.setitimer(signal.ITIMER_REAL, 0)


def _reply(content: bytes, recipe: Recipe, limits: Limits, name: str) -> bytes:
    try:
        made = make_input(content, recipe, limits, name)
    except RefusedError as error:
        text = str(error).encode()
        return REPLY.pack(error.status, len(text), 0) + text
    pixels = made.pixels.numpy().tobytes()
    return REPLY.pack(200, BOX.size, len(pixels)) + BOX.pack(*made.within) + pixels


def _limit_memory(limits: Limits) -> None:
    """Let the system refuse memory beyond the limit, where it counts addresses: on Linux."""
    if sys.platform == "linux":
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory_limit(limits)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
