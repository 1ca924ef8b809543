"""Decode an uploaded file to a model input, in a process that can be killed if it takes too long or too much memory.

This is the decoder's side; `decoder_processes.py` is the server's. The server sends jobs, and the decoder replies:

    job: index of the input spec, length of the name, length of the file; the name; the file
    reply: status, length of the text, length of the pixels; the text (a crop box, or the error); the pixels

A file may make a decoder do anything, so replies are plain numbers and text, which cannot harm the server.
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
from vitrail.serving.limits import RefusedError, RequestLimits
from vitrail.visualization.crops import Box, compute_crop_box

READY = b"+"  # sent once, when a decoder can start
JOB_HEADER = struct.Struct("!IIQ")
REPLY_HEADER = struct.Struct("!HII")
BOX_FORMAT = struct.Struct("!4d")
BYTES_PER_PIXEL = 20  # the most that decoding needs is 17, of a WebP (tests/data/test_image_headers.py)
SPARE_BYTES = 64 * 2**20  # for the rest: modules that Pillow loads late, compressed data, the resized image
_NICENESS = 10  # above that of the computing threads: slow images must not delay them


class InputSpec(NamedTuple):
    """The preprocessing and channels of a model's input."""

    preprocess: PreprocessConfig
    channels: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, S, S)."""
        return (self.channels, *self.preprocess.size)


class ModelInput(NamedTuple):
    """An image as the model gets it."""

    pixels: Tensor  # uint8 (C, S, S)
    crop: Box  # of the image, from 0 to 1


def compute_memory_limit(limits: RequestLimits) -> int:
    """Bytes that a decoder may allocate for the file and its pixels."""
    return int(limits.max_megapixels * 1e6 * BYTES_PER_PIXEL) + 2 * limits.max_bytes + SPARE_BYTES


def decode_input(content: bytes, input_spec: InputSpec, limits: RequestLimits, name: str = "the image") -> ModelInput:
    """Decode a file and crop it as every other command does."""
    try:
        image = open_image(content, name=name)
        height, width = image.height * image.reduction, image.width * image.reduction
        if height * width > limits.max_megapixels * 1e6:
            size = f"{width} x {height} pixels"
            raise RefusedError(413, f"{name} has {size}; at most {limits.max_megapixels:g} million are decoded")
        pixels = make_eval_input(decode(content, input_spec.channels, name=name), input_spec.preprocess)
    except DataError as error:
        raise RefusedError(400, str(error)) from error
    except MemoryError as error:
        raise RefusedError(413, f"{name} takes too much memory to decode") from error
    box = compute_crop_box(image.height, image.width, input_spec.preprocess)
    edges = box.left / image.width, box.top / image.height, box.right / image.width, box.bottom / image.height
    return ModelInput(pixels, Box(*edges))


def run_decoder(connection: socket.socket, input_specs: Sequence[InputSpec], limits: RequestLimits) -> None:
    """Decode jobs until the server closes its end or dies."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the server ends decoders
        signal.signal(number, signal.SIG_IGN)
    set_alarm = getattr(signal, "setitimer", None)  # which Windows lacks
    if set_alarm is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # Pillow's about odd files: anyone could fill the log with them
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    get_jpeg_decoder_name()  # tries simplejpeg now, before the memory limit and the first image
    _limit_memory(limits)
    with contextlib.suppress(ConnectionError), connection, connection.makefile("rwb") as stream:
        connection.sendall(READY)
        while len(head := stream.read(JOB_HEADER.size)) == JOB_HEADER.size:
            # The server kills a decoder that takes too long; if the server has died, the alarm does.
            if set_alarm is not None:
                set_alarm(signal.ITIMER_REAL, limits.decode_seconds + 1)
            number, length, size = JOB_HEADER.unpack(head)
            name, content = stream.read(length).decode(), stream.read(size)
            if len(content) == size:
                stream.write(_make_reply(content, input_specs[number], limits, name))
                stream.flush()
            if set_alarm is not None:
                set_alarm(signal.ITIMER_REAL, 0)


def _make_reply(content: bytes, input_spec: InputSpec, limits: RequestLimits, name: str) -> bytes:
    try:
        decoded = decode_input(content, input_spec, limits, name)
    except RefusedError as error:
        text = str(error).encode()
        return REPLY_HEADER.pack(error.status, len(text), 0) + text
    pixels = decoded.pixels.numpy().tobytes()
    return REPLY_HEADER.pack(200, BOX_FORMAT.size, len(pixels)) + BOX_FORMAT.pack(*decoded.crop) + pixels


def _limit_memory(limits: RequestLimits) -> None:
    """Limit this process's address space, on Linux."""
    if sys.platform == "linux":
        import resource  # which Windows lacks

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + compute_memory_limit(limits)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
