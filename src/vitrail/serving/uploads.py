"""Uploads: how request bodies are read, how much memory they may take, and which files they hold.

All bodies share a budget of bytes, counted as they arrive. Each lies in pages of its own, which go back to the system
once the body is decoded; the allocator would keep them, and copy them as the body grows. A form is cut at its
delimiters without a copy, up to the first file too many. python-multipart copies every file and calls back for every
part, of which 300,000 took 11 to 24 s; here it parses headers only.
"""

import asyncio
import contextlib
import mmap
from collections.abc import Iterator

from fastapi import Request
from python_multipart.multipart import parse_options_header

from vitrail.formatting import pluralize
from vitrail.serving.limits import BusyError, RefusedError, RequestLimits

RAW_TYPES = ("image/", "application/octet-stream", "application/x-www-form-urlencoded")  # the last is curl's for bytes
FORM_TYPE = "multipart/form-data"
MAX_FULL_BODIES = 16  # bodies of the largest size that there is memory for; of smaller ones more
_MAX_BOUNDARY_BYTES = 70  # bytes of it, as RFC 2046 has it
_MAX_PART_HEADERS, _MAX_HEADER_BYTES = 8, 8192  # of one part of a form


class Uploads:
    """The memory of all uploads. Only the event loop's thread uses it."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.max_open = 500  # requests that may upload at once
        self.open_count = 0  # requests whose body is being read or decoded
        self.held_bytes = 0  # bytes they hold

    @contextlib.contextmanager
    def open(self, request: Request) -> Iterator["Upload"]:
        """Memory for the body of a request; one that is too long is refused before a byte is read."""
        declared = request.headers.get("content-length", "")
        size = int(declared[:20]) if declared.isdecimal() else self.limits.max_bytes
        if size > self.limits.max_bytes:
            raise _make_size_error(self.limits)
        if self.open_count >= self.max_open:
            raise BusyError(f"{self.open_count} requests are being read", 1)
        upload = Upload(self, size)
        try:
            yield upload
        finally:
            upload.close()


class Upload:
    """The body of one request."""

    def __init__(self, uploads: Uploads, size: int) -> None:
        self._uploads, self.size = uploads, 0
        self._memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # else its first byte may take 2 MB
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._files: list[memoryview] = []
        uploads.open_count += 1

    async def read_body(self, request: Request) -> None:
        """Read the whole body, within its limits of size and time."""
        seconds = self._uploads.limits.upload_seconds
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():
                    self._append(chunk)
        except TimeoutError:
            raise RefusedError(408, f"the body did not arrive within {seconds:g} s") from None

    def _append(self, chunk: bytes) -> None:
        uploads, end = self._uploads, self.size + len(chunk)
        if end > len(self._memory):
            raise _make_size_error(uploads.limits)
        if uploads.held_bytes + len(chunk) > MAX_FULL_BODIES * uploads.limits.max_bytes:
            raise BusyError(f"{uploads.held_bytes / 2**20:.0f} MB of images are being read", 1)
        self._memory[self.size : end] = chunk
        self.size = end
        uploads.held_bytes += len(chunk)

    def split_files(self, content_type: str) -> list[memoryview]:
        """The files of the body: itself, or those of a form."""
        if content_type.lower().startswith(FORM_TYPE):
            ranges = find_files(self._memory, self.size, content_type, self._uploads.limits.max_images)
        else:
            ranges = [slice(0, self.size)]
        body = memoryview(self._memory)
        self._files = [body, *(body[each] for each in ranges)]
        return self._files[1:]

    def close(self) -> None:
        """Free the memory; safe to call twice."""
        if self._memory.closed:
            return
        for file in reversed(self._files):
            file.release()
        self._memory.close()
        self._uploads.open_count -= 1
        self._uploads.held_bytes -= self.size


def _make_size_error(limits: RequestLimits) -> RefusedError:
    return RefusedError(413, f"a request may have {limits.max_megabytes:g} MB")


def check_content_type(request: Request) -> str:
    """The content type, which must be an image or a form."""
    content_type = request.headers.get("content-type", RAW_TYPES[1])
    name = content_type.partition(";")[0].strip().lower()
    if name != FORM_TYPE and not name.startswith(RAW_TYPES):
        problem = f"{name or 'nothing'!r:.80} is no type of image"
        raise RefusedError(415, f"{problem}: send image/*, or {FORM_TYPE} with files")
    return content_type


def find_files(content: mmap.mmap | bytes, size: int, content_type: str, max_files: int) -> list[slice]:
    """Byte ranges of a form's files, in order. A field that is no file is refused, not ignored."""
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary or len(boundary) > _MAX_BOUNDARY_BYTES:
        raise RefusedError(400, f"the form does not state its boundary, in at most {_MAX_BOUNDARY_BYTES} characters")
    delimiter, files = b"\r\n--" + boundary, list[slice]()
    damaged, cut = RefusedError(400, "the form is damaged"), RefusedError(400, "the form ends too early")
    start = len(delimiter) - 2  # the first delimiter begins no new line
    if content[:start] != delimiter[2 : 2 + size]:
        raise damaged
    while content[start : start + 2] != b"--":
        if start + 2 > size:
            raise cut
        if content[start : start + 2] != b"\r\n":
            raise damaged
        if len(files) == max_files:
            raise RefusedError(413, f"a request may have {pluralize(max_files, 'image')}, and this one has more")
        first = content.find(b"\r\n\r\n", start, min(size, start + _MAX_HEADER_BYTES)) + 4
        if first < 4:
            raise cut if size < start + _MAX_HEADER_BYTES else damaged
        _check_part_headers(content[start:first])
        last = content.find(delimiter, first, size)
        if last < 0:
            raise cut
        files.append(slice(first, last))
        start = last + len(delimiter)
    if not files:
        raise RefusedError(422, "the form has no file")
    return files


def _check_part_headers(block: bytes) -> None:
    lines = block.strip(b"\r\n").split(b"\r\n")
    if len(lines) > _MAX_PART_HEADERS:
        raise RefusedError(400, f"a part of the form has more than {_MAX_PART_HEADERS} headers")
    pairs = (line.partition(b":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if b"filename" not in parse_options_header(headers.get(b"content-disposition"))[1]:
        raise RefusedError(422, "a field of the form is no file; send only images, and options in the URL")
