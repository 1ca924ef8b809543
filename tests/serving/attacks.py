"""Requests made to hurt a server, and what its processes cost the machine."""

import contextlib
import http.client
import io
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from vitrail.data.decode import decode
from vitrail.serving import upload_decoding
from vitrail.serving.limits import RequestLimits
from vitrail.serving.upload_decoding import InputSpec, ModelInput


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


def run_test_decoder(connection: socket.socket, recipes: Sequence[InputSpec], limits: RequestLimits) -> None:
    """A decoder of which a file can ask for anything: `sleep SECONDS`, `die`, `lie`, `grow BYTES`."""
    plain = upload_decoding.decode_input

    def make_input(content: bytes, input_spec: InputSpec, limits: RequestLimits, name: str = "") -> ModelInput:
        match content[:100].split():
            case [b"sleep", seconds]:
                time.sleep(float(seconds))
            case [b"die"]:
                os.kill(os.getpid(), signal.SIGSEGV)
            case [b"lie"]:
                connection.sendall(b"\xff" * 1000)
            case [b"grow", size]:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(
                        upload_decoding, "decode", lambda *_, **__: (bytearray(int(size)), decode(make_jpeg()))[1]
                    )
                    return plain(make_jpeg(), input_spec, limits, name)
        return plain(content, input_spec, limits, name)

    upload_decoding.decode_input = make_input
    upload_decoding.run_decoder(connection, recipes, limits)


def make_jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (50, 40), "red").save(file, "JPEG")
    return file.getvalue()


# --- a server as a process -------------------------------------------------------------------------------------------


class Server(NamedTuple):
    """`vitrail serve` in a process of its own."""

    process: "subprocess.Popen[str]"
    port: int
    log: Path

    def connect(self, seconds: float = 10) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=seconds)

    def ask(self, path: str, body: bytes | None = None, content_type: str = "image/png") -> tuple[int, str, float]:
        """Status, text and seconds of an answer."""
        start = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET" if body is None else "POST", path, body, {"content-type": content_type})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text, time.monotonic() - start

    def stop(self, number: int = signal.SIGTERM) -> float:
        """Send a signal, and the seconds until the process has ended."""
        start = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(60)
        return time.monotonic() - start


def wait_for_answer(connection: socket.socket) -> float:
    """When an answer begins or the connection ends, by the monotonic clock."""
    connection.settimeout(60)
    with contextlib.suppress(ConnectionError):
        connection.recv(1)
    return time.monotonic()


@contextlib.contextmanager
def serve_process(model: Path, folder: Path, *options: str, descriptors: int | None = None) -> Iterator[Server]:
    """A server that listens, with so many descriptors at most; killed at the end if it has not ended."""
    log = folder / "log"
    command = [sys.executable, "-m", "vitrail", "serve", str(model), "--device", "cpu", "--port", "0", *options]
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    with log.open("w") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as process:
        assert process.stdout is not None
        try:
            yield Server(process, int(process.stdout.readline().rpartition(":")[2]), log)
        finally:
            process.kill()


def find_processes(root: int) -> list[int]:
    """A process and all that descend from it."""
    found = [root]
    for number in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{number}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def measure_memory(processes: Iterable[int]) -> int:
    """Bytes of some processes, what they share counted once."""
    total = 0
    for number in processes:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{number}/smaps_rollup").read_text()
            total += 1024 * int(text.partition("\nPss:")[2].split()[0])
    return total


@contextlib.contextmanager
def watch_memory(root: int) -> Iterator[list[int]]:
    """The bytes of a process and its descendants, five times a second until the end."""
    found, stop = [measure_memory(find_processes(root))], threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            found.append(measure_memory(find_processes(root)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
