"""The images of a request, refused by size before they are read and by pixels before they are decoded."""

import asyncio
from typing import NamedTuple

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from torch import Tensor

from vitrail.data.decode import opened
from vitrail.errors import DataError
from vitrail.figures.boxes import Box, seen
from vitrail.predict import Classifier

PATIENCE = 30.0  # seconds in which a body must have come
RAW = ("image/", "application/octet-stream", "application/x-www-form-urlencoded")  # the last is what curl says of bytes
FORM = "multipart/form-data"


class RefusedError(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Limits(NamedTuple):
    """What is read and decoded at most."""

    megabytes: float = 20.0
    megapixels: float = 50.0
    images: int = 32


class View(NamedTuple):
    """An image as a model sees it."""

    pixels: Tensor  # uint8 (C, S, S)
    within: Box  # of the image, from 0 to 1


def kind(request: Request) -> str:
    """What the body is said to be; refused where it is said to be neither an image nor a form."""
    said = request.headers.get("content-type", RAW[1])
    name = said.partition(";")[0].strip().lower()
    if name != FORM and not name.startswith(RAW):
        raise RefusedError(415, f"{name or 'nothing'!r:.80} is no type of image: send image/*, or {FORM} with files")
    return said


async def body(request: Request, limits: Limits) -> bytes:
    """All that was sent, if it is not too much and comes in time."""
    most = int(limits.megabytes * 2**20)
    too_large = RefusedError(413, f"a request may have {limits.megabytes:g} MB")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise too_large
    found = bytearray()
    try:
        async with asyncio.timeout(PATIENCE):
            async for chunk in request.stream():
                found += chunk
                if len(found) > most:
                    raise too_large
    except TimeoutError:
        raise RefusedError(408, f"the body did not come within {PATIENCE:g} s") from None
    return bytes(found)


def images(content: bytes, said: str, limits: Limits) -> list[bytes]:
    """The files of a body: itself, or those of a form."""
    if not said.lower().startswith(FORM):
        return [content]
    files = _files(content, said)
    if not files:
        raise RefusedError(422, "the form has no file")
    if len(files) > limits.images:
        raise RefusedError(413, f"a request may have {limits.images} images, and this one has {len(files)}")
    return files


def view(content: bytes, classifier: Classifier, limits: Limits, name: str = "the image") -> View:
    """What a model sees of a file."""
    try:
        found = opened(content, name=name)
        if found.height * found.width > limits.megapixels * 1e6:
            size = f"{found.width} x {found.height} pixels"
            raise RefusedError(413, f"{name} has {size}; at most {limits.megapixels:g} million are decoded")
        pixels = classifier.view(content, name=name)
    except DataError as error:
        raise RefusedError(400, str(error)) from error
    box = seen(found.height, found.width, classifier.preprocess)
    return View(
        pixels,
        Box(box.left / found.width, box.top / found.height, box.right / found.width, box.bottom / found.height),
    )


def _files(content: bytes, said: str) -> list[bytes]:
    """The files of a form in their order. A field that is no file is refused: it would be ignored in silence."""
    boundary = parse_options_header(said)[1].get(b"boundary")
    if not boundary:
        raise RefusedError(400, "the form does not say what its boundary is")
    files: list[bytearray] = []
    header, disposition, ended = bytearray(), bytearray(), False

    def begin() -> None:
        files.append(bytearray())
        disposition.clear()

    def value(data: bytes, start: int, end: int) -> None:
        if header.lower() == b"content-disposition":
            disposition.extend(data[start:end])

    def complete() -> None:
        if b"filename" not in parse_options_header(bytes(disposition))[1]:
            raise RefusedError(422, "a field of the form is no file; send images only, and options in the address")

    def end() -> None:
        nonlocal ended
        ended = True

    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": begin,
            "on_header_begin": header.clear,
            "on_header_field": lambda data, start, end: header.extend(data[start:end]),
            "on_header_value": value,
            "on_headers_finished": complete,
            "on_part_data": lambda data, start, end: files[-1].extend(data[start:end]),
            "on_end": end,
        },
    )
    try:
        parser.write(content)
        parser.finalize()
    except FormParserError as error:
        raise RefusedError(400, "the form is damaged") from error
    if not ended:
        raise RefusedError(400, "the form ends too early")
    return [bytes(file) for file in files]
