"""Downloads from a server on loopback that breaks in every way, and package managers played by scripts."""

import contextlib
import hashlib
import http.client
import io
import itertools
import resource
import shutil
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from vitrail.data import download
from vitrail.data.download import ExpectedFile
from vitrail.errors import DataError, FetchError
from vitrail.locks import hold_lock

CONTENT = np.random.default_rng(0).bytes(1_000_000)


def described(name: str, content: bytes) -> ExpectedFile:
    return ExpectedFile(name, len(content), hashlib.sha256(content).hexdigest())


FILE = described("set.bin", CONTENT)


class Handler(BaseHTTPRequestHandler):
    """/name gives a file; /cut/name half of what is missing each time; /rangeless/name ignores ranges; and so on."""

    files: ClassVar[dict[str, bytes]]
    asked: ClassVar[list[tuple[str, str | None]]]
    protocol_version = "HTTP/1.1"
    released: ClassVar[threading.Event]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Range"]))
        *way, name = self.path.strip("/").split("/")
        if "moved" in way:
            self.send_response(302)
            self.send_header("Location", f"/{name}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif name not in self.files:
            self.send_error(404)
        else:
            self.give(self.files[name], way)

    def give(self, content: bytes, way: list[str]) -> None:
        self.close_connection = True
        start = int((self.headers["Range"] or "bytes=0-")[6:-1]) if "rangeless" not in way else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if "unmeasured" not in way:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        self.wfile.write(body[: (len(body) + 1) // 2 if {"cut", "hang"} & set(way) else None])
        if "hang" in way:
            self.wfile.flush()
            self.released.wait(10)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(files: dict[str, bytes]) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """A server's address, and the list of what it was asked for."""
    asked: list[tuple[str, str | None]] = []
    released = threading.Event()
    bound = type("Bound", (Handler,), {"files": files, "asked": asked, "released": released})
    server = ThreadingHTTPServer(("127.0.0.1", 0), bound)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", asked
    finally:
        released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def closed_port() -> str:
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"


def ignore_progress(*_: object) -> None:
    pass


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_file_comes_whole_and_tells_how_far_it_is(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with serving({"set.bin": CONTENT}) as (url, _):
        path = download.download_file(f"{url}set.bin", FILE, tmp_path / "new", lambda *now: told.append(now))
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["set.bin"]
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert all(before < after for before, after in itertools.pairwise(told))


def test_a_connection_that_breaks_is_taken_up_where_it_broke(tmp_path: Path) -> None:
    small = CONTENT[:20]  # halved at each try: 10, 15, 18, 19, 20
    with serving({"set.bin": small}) as (url, asked):
        path = download.download_file(f"{url}cut/set.bin", described("set.bin", small), tmp_path, ignore_progress)
    assert path.read_bytes() == small
    assert [ask[1] for ask in asked] == [None, "bytes=10-", "bytes=15-", "bytes=18-", "bytes=19-"]


def test_a_connection_that_always_breaks_is_given_up_and_continued_next_time(tmp_path: Path) -> None:
    with serving({"set.bin": CONTENT}) as (url, asked):
        with pytest.raises(FetchError, match=r"broke 5 times, the last at 968,750 bytes \(closed by the server\)"):
            download.download_file(f"{url}cut/set.bin", FILE, tmp_path, ignore_progress)
        assert names(tmp_path) == ["set.bin.part"]
        assert download.download_file(f"{url}set.bin", FILE, tmp_path, ignore_progress).read_bytes() == CONTENT
    assert asked[-1] == ("/set.bin", "bytes=968750-")


@pytest.mark.parametrize("way", ["", "rangeless/", "unmeasured/", "moved/"])
def test_what_an_earlier_attempt_left_is_continued_or_replaced(tmp_path: Path, way: str) -> None:
    (tmp_path / "set.bin.part").write_bytes(CONTENT[:400_000])
    with serving({"set.bin": CONTENT}) as (url, asked):
        assert download.download_file(f"{url}{way}set.bin", FILE, tmp_path, ignore_progress).read_bytes() == CONTENT
    assert asked[-1][1] == "bytes=400000-"


def test_a_part_that_is_whole_is_only_verified(tmp_path: Path) -> None:
    (tmp_path / "set.bin.part").write_bytes(CONTENT)
    assert download.download_file(closed_port(), FILE, tmp_path, ignore_progress).read_bytes() == CONTENT


def test_other_bytes_are_named_and_deleted(tmp_path: Path) -> None:
    other = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    with serving({"set.bin": other}) as (url, _), pytest.raises(FetchError) as caught:
        download.download_file(f"{url}set.bin", FILE, tmp_path, ignore_progress)
    assert FILE.sha256 in str(caught.value)
    assert hashlib.sha256(other).hexdigest() in str(caught.value)
    assert names(tmp_path) == []


def test_a_damaged_part_costs_one_failure_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "set.bin.part").write_bytes(b"?" * 400_000)
    with serving({"set.bin": CONTENT}) as (url, _):
        with pytest.raises(FetchError, match="sha256"):
            download.download_file(f"{url}set.bin", FILE, tmp_path, ignore_progress)
        assert download.download_file(f"{url}set.bin", FILE, tmp_path, ignore_progress).read_bytes() == CONTENT


@pytest.mark.parametrize("size", [999_999, 1_000_001])
def test_a_file_of_another_size_is_refused_before_it_is_received(tmp_path: Path, size: int) -> None:
    with serving({"set.bin": (CONTENT + b"more")[:size]}) as (url, _):
        with pytest.raises(FetchError, match=f"Content-Length {size}, not 1000000"):
            download.download_file(f"{url}set.bin", FILE, tmp_path, ignore_progress)
        assert (tmp_path / "set.bin.part").stat().st_size == 0
        (tmp_path / "set.bin.part").write_bytes(CONTENT[:10])
        with pytest.raises(FetchError, match=f"Content-Range bytes 10-{size - 1}/{size}, not bytes 10-999999/1000000"):
            download.download_file(f"{url}set.bin", FILE, tmp_path, ignore_progress)


def test_a_file_longer_than_it_says_is_not_received_without_end(tmp_path: Path) -> None:
    with (
        serving({"set.bin": CONTENT * 30}) as (url, _),
        pytest.raises(FetchError, match=r"has 1,\d{3},\d{3} bytes, not"),
    ):
        download.download_file(f"{url}unmeasured/set.bin", FILE, tmp_path, ignore_progress)


def test_what_is_not_there_is_said_with_its_reason(tmp_path: Path) -> None:
    with serving({}) as (url, _), pytest.raises(FetchError, match=r"/set\.bin answered 404 Not Found"):
        download.download_file(f"{url}set.bin", FILE, tmp_path, ignore_progress)
    with pytest.raises(FetchError, match=r"cannot be reached .*refused"):
        download.download_file(closed_port(), FILE, tmp_path, ignore_progress)


def test_a_server_that_falls_silent_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.05)
    with serving({"set.bin": CONTENT}) as (url, _), pytest.raises(FetchError, match="timed out"):
        download.download_file(f"{url}hang/set.bin", FILE, tmp_path, ignore_progress)


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        ("https://a.org/x", "https://b.org/x", True),
        ("http://a.org/x", "https://b.org/x", True),
        ("http://a.org/x", "http://b.org/x", True),
        ("https://a.org/x", "http://a.org/x", False),
        ("http://a.org/x", "ftp://a.org/x", False),
    ],
)
def test_no_redirection_leads_to_less_security(old: str, new: str, allowed: bool) -> None:
    def follow() -> urllib.request.Request | None:
        headers = http.client.HTTPMessage()
        return download._NoDowngradeRedirectHandler().redirect_request(
            urllib.request.Request(old), io.BytesIO(), 302, "", headers, new
        )

    if allowed:
        request = follow()
        assert request is not None
        assert request.full_url == new
    else:
        with pytest.raises(FetchError, match="less secure"):
            follow()


def test_an_interrupted_download_is_continued(tmp_path: Path) -> None:
    def interrupt(now: int, total: int) -> None:
        if now > total // 2:
            raise KeyboardInterrupt

    with serving({"set.bin": CONTENT}) as (url, asked):
        with pytest.raises(KeyboardInterrupt):
            download.download_file(f"{url}set.bin", FILE, tmp_path, interrupt)
        kept = (tmp_path / "set.bin.part").read_bytes()
        assert len(CONTENT) // 2 < len(kept) < len(CONTENT)
        assert download.download_file(f"{url}set.bin", FILE, tmp_path, ignore_progress).read_bytes() == CONTENT
        assert asked[-1] == ("/set.bin", f"bytes={len(kept)}-")


def test_a_full_disk_ends_all_attempts_and_leaves_what_fits(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with serving({"set.bin": CONTENT}) as (url, _):
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
        try:
            with pytest.raises(DataError, match="cannot be written") as caught:
                download.download_file(f"{url}set.bin", FILE, tmp_path, ignore_progress)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not isinstance(caught.value, FetchError)  # another mirror would not help
        assert (tmp_path / "set.bin.part").read_bytes() == CONTENT[:600_000]
        assert download.download_file(f"{url}set.bin", FILE, tmp_path, ignore_progress).read_bytes() == CONTENT


def test_a_file_that_will_not_fit_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=999_999))
    with pytest.raises(DataError, match=r"needs 1,000,000 bytes and has 999,999 free; XDG_CACHE_HOME"):
        download.download_file(closed_port(), FILE, tmp_path, ignore_progress)


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    """Nor two threads of one."""
    with hold_lock(tmp_path / ".set.bin.lock", "the file"), ThreadPoolExecutor(1) as pool:
        other = pool.submit(download.download_file, closed_port(), FILE, tmp_path, ignore_progress)
        with pytest.raises(DataError, match=r"set\.bin\.part is being downloaded by another process"):
            other.result()


# --- package managers ----------------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes a shell script the only program of its name; without one there is none."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def install(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return install


PACKAGE = described("thing-1.0.tgz", b"package")


def test_an_npm_package_is_packed_without_running_its_scripts(
    tmp_path: Path, program: Callable[[str, str], None]
) -> None:
    program("npm", f'echo "$@" > {tmp_path}/arguments; pwd > {tmp_path}/where; printf package > thing-1.0.tgz')
    path = download.download_package("npm", "thing@1.0", PACKAGE, tmp_path / "downloads")
    assert path.read_bytes() == b"package"
    assert names(path.parent) == ["thing-1.0.tgz"]
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:2] == ["pack", "thing@1.0"]
    assert {"--ignore-scripts", "--pack-destination=."} <= set(arguments)
    assert Path((tmp_path / "where").read_text().strip()).parent == tmp_path / "downloads"


def test_a_package_with_other_bytes_is_deleted(tmp_path: Path, program: Callable[[str, str], None]) -> None:
    program("npm", "printf PACKAGE > thing-1.0.tgz")
    with pytest.raises(FetchError, match=r"npm pack thing@1\.0: the downloaded file has the sha256"):
        download.download_package("npm", "thing@1.0", PACKAGE, tmp_path / "downloads")
    assert names(tmp_path / "downloads") == []


def test_what_a_package_manager_complains_of_is_said(tmp_path: Path, program: Callable[[str, str], None]) -> None:
    program("npm", "echo 'npm warn x\nnpm error code E\nnpm error network request to r failed, reason: no' >&2; exit 1")
    with pytest.raises(FetchError, match=r"failed \(npm error network request to r failed, reason: no\)"):
        download.download_package("npm", "thing@1.0", PACKAGE, tmp_path / "downloads")
    program("apt-get", "echo 'E: Unable to locate package thing' >&2; exit 100")
    with pytest.raises(FetchError, match=r"apt-get download thing failed \(E: Unable.*\); `apt-get update`"):
        download.download_package("apt", "thing", PACKAGE, tmp_path / "downloads")
    program("apt-get", "exit 3")
    with pytest.raises(FetchError, match=r"failed \(exit code 3\)$"):
        download.download_package("apt", "thing", PACKAGE, tmp_path / "downloads")
    program("apt-get", "true")
    with pytest.raises(FetchError, match="downloaded 0 files"):
        download.download_package("apt", "thing", PACKAGE, tmp_path / "downloads")
    assert names(tmp_path / "downloads") == []


@pytest.mark.usefixtures("program")
def test_a_missing_package_manager_is_named(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="npm is not installed"):
        download.download_package("npm", "thing@1.0", PACKAGE, tmp_path / "downloads")
    with pytest.raises(FetchError, match="apt-get is not installed"):
        download.download_package("apt", "thing", PACKAGE, tmp_path / "downloads")
