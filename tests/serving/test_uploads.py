"""Bodies: how they are read, what they hold, and which files are in them."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable

import pytest

from tests.serving import attacks, serving
from tests.serving.client import Client
from tests.serving.serving import make_image_file
from tests.serving.test_fuzz import form
from vitrail.serving import routes
from vitrail.serving.limits import RefusedError, RequestLimits
from vitrail.serving.uploads import MAX_FULL_BODIES, find_files

FORM = "multipart/form-data; boundary=edge"
HEAD = b'Content-Disposition: form-data; name="image"; filename="a"'


def cut(content: bytes, content_type: str = FORM, most: int = 8) -> list[bytes]:
    return [content[place] for place in find_files(content, len(content), content_type, most)]


def test_the_files_of_a_form_are_cut_out_as_they_are() -> None:
    files = [b"", b"\r\n", b"--edge", b"\r\n--edg", make_image_file(), b"\r\n\r\n--"]
    assert cut(form(files)) == files
    assert cut(form(files) + b"what follows the end") == files
    assert cut(b'--edge\r\ncontent-disposition:form-data;filename="b"\r\nX: y\r\n\r\nc\r\n--edge--') == [b"c"]


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"", 400, "too early"),
        (b"--", 400, "too early"),
        (b"--edg", 400, "too early"),
        (b"--edge", 400, "too early"),
        (b"--edge\r", 400, "too early"),
        (b"--edge\r\n", 400, "too early"),
        (b"--edge\r\n" + HEAD + b"\r\n\r\nfile", 400, "too early"),
        (b"--edge--", 422, "no file"),
        (b"--else\r\n", 400, "damaged"),
        (b"--edgeX\r\n" + HEAD + b"\r\n\r\n\r\n--edge--", 400, "damaged"),
        (b"--edge\r\n" + HEAD + b"\r\n\r\nfile\r\n--edgeXX", 400, "damaged"),
        (b"--edge\r\n" + b"X: y\r\n" * 9 + HEAD + b"\r\n\r\n\r\n--edge--", 400, "more than 8 headers"),
        (b"--edge\r\nX: " + b"y" * 9000 + b"\r\n" + HEAD + b"\r\n\r\n\r\n--edge--", 400, "damaged"),
        (b'--edge\r\nContent-Disposition: form-data; name="top"\r\n\r\n3\r\n--edge--', 422, "is no file"),
        (b"--edge\r\n\r\nfile\r\n--edge--", 422, "is no file"),
        (form([b"x"] * 9), 413, "a request may have 8 images, and this one has more"),
    ],
)
def test_a_form_that_is_none_is_refused(content: bytes, status: int, words: str) -> None:
    with pytest.raises(RefusedError, match=words) as refused:
        cut(content)
    assert refused.value.status == status


@pytest.mark.parametrize("content_type", ["multipart/form-data", f"multipart/form-data; boundary={'e' * 300}"])
def test_a_boundary_is_named_and_short(content_type: str) -> None:
    with pytest.raises(RefusedError, match="state its boundary") as refused:
        cut(form([b"x"]), content_type)
    assert refused.value.status == 400


@pytest.mark.attack
@pytest.mark.parametrize(
    ("attack", "content"),
    [
        ("a form of 322,637 parts", attacks.make_form(322_637)),
        ("a form of a million headers", b"--edge\r\n" + b"X: y\r\n" * 1_000_000),
        ("a form of 20 MB that is almost delimiters", form([b"\r\n--edg" * 3_000_000])),
    ],
    ids=["parts", "headers", "delimiters"],
)
def test_a_large_form_takes_no_time(attack: str, content: bytes, attacked: Callable[[str, str], None]) -> None:
    start = time.perf_counter()
    with contextlib.suppress(RefusedError):
        cut(content)
    seconds = time.perf_counter() - start
    attacked(attack, f"cut or refused in {seconds * 1e3:.0f} ms")
    assert seconds < 1


def test_memory_of_bodies_is_shared_and_given_back() -> None:
    """Of so many large bodies that come slowly, those beyond the memory are refused; then all is as it was."""
    served = serving.build_service(limits=RequestLimits(max_megabytes=0.25))
    size = served.limits.max_bytes
    with serving.run_server(served) as (host, port, _), contextlib.ExitStack() as opened:
        halves = []
        for _ in range(MAX_FULL_BODIES):
            raw = opened.enter_context(socket.create_connection((host, port)))
            raw.sendall(b"POST /v1/predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + bytes(size - 1))
            halves.append(raw)
        end = time.monotonic() + 10
        while served.uploads.held_bytes < MAX_FULL_BODIES * (size - 1) and time.monotonic() < end:
            time.sleep(0.01)
        assert served.uploads.held_bytes == MAX_FULL_BODIES * (size - 1)
        reply = asyncio.run(Client(host, port).ask("/v1/predict", make_image_file()))
        assert (reply.status, b"MB of images are being read" in reply.body) == (503, True)
        assert asyncio.run(Client(host, port).ask("/healthz")).status == 200
        for raw in halves:
            raw.sendall(b"x")
            assert raw.recv(100).split()[1] in (b"400", b"503")
        assert served.uploads.held_bytes == served.uploads.open_count == 0
        assert asyncio.run(Client(host, port).ask("/v1/predict", make_image_file())).status == 200


@pytest.mark.attack
def test_a_body_that_comes_too_slowly_is_408(attacked: Callable[[str, str], None]) -> None:
    served = serving.build_service(limits=RequestLimits(upload_seconds=0.3))
    with serving.run_server(served) as (host, port, _), socket.create_connection((host, port)) as raw:
        raw.sendall(b"POST /v1/predict HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nhalf")
        start = time.monotonic()
        answer = raw.recv(1000)
        seconds = time.monotonic() - start
    assert answer.startswith(b"HTTP/1.1 408")
    assert 0.2 < seconds < 3
    assert served.uploads.held_bytes == served.uploads.open_count == 0
    attacked("a body that never ends, 0.3 s allowed", f"408 after {seconds:.1f} s")


@pytest.mark.attack
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/v1/predict", "content-length: 99999999", b"413"),
        ("/v1/predict", "content-length: 1000\r\ncontent-type: text/html", b"415"),
        ("/v1/predict", "content-length: 1000\r\nauthorization: Bearer \xff\xe9", b"401"),
        ("/nothing", "content-length: 1000", b"404"),
    ],
)
def test_a_refusal_does_not_wait_for_the_body(
    connection: str,
    path: str,
    header: str,
    status: bytes,
    monkeypatch: pytest.MonkeyPatch,
    attacked: Callable[[str, str], None],
) -> None:
    monkeypatch.setattr(routes, "DRAIN_SECONDS", 0.3)
    served = serving.build_service(key="sesame" if status == b"401" else None)
    with serving.run_server(served) as (host, port, _), socket.create_connection((host, port)) as raw:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\n{header}\r\n\r\n"
        start = time.monotonic()
        raw.sendall(head.encode("latin-1"))
        raw.settimeout(10)
        answer = b""
        while not answer.endswith(b"}"):
            answer += raw.recv(1000)
        seconds = time.monotonic() - start
        assert answer.split()[1] == status
        assert seconds < 1
        if connection == "close":
            assert raw.recv(1) == b""  # and is closed, though the body never came
            assert time.monotonic() - start < 5
    attacked(f"{status.decode()} to one who never sends his body ({connection})", f"after {seconds * 1e3:.0f} ms")
