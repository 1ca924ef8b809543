"""Files in remote stores, named by URL: s3://bucket/shards/000.tar.

fsspec finds the library of each store (s3fs for S3, the extra `remote`), which handles its protocol and credentials.
These libraries retry transient failures up to a limit (AWS_MAX_ATTEMPTS for S3). A request that still fails becomes an
error that names the file. No other module of vitrail connects to a store.
"""

import contextlib
import hashlib
import os
import posixpath
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from vitrail.errors import DataError, RemoteError, UsageError

_SCHEME_PATTERN = re.compile(r"[a-z][a-z0-9+.-]+://")
_MAX_CONCURRENT_REQUESTS = 10  # as many as s3fs has connections; a store answers a request in 20 to 100 ms
_BLOCK_BYTES = 4 * 2**20  # block size of sequential reads
_VERSION_FIELDS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "created")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class RemoteFile(NamedTuple):
    """A file as its store describes it."""

    size: int
    version_tag: str
    """Changes with the content."""


def is_remote(name: str) -> bool:
    """Whether a name is a URL."""
    return _SCHEME_PATTERN.match(name) is not None


def join_url(url: str, name: str) -> str:
    """The URL of `name` below a folder; `..` in the name is resolved."""
    scheme, _, path = f"{url.rstrip('/')}/{name}".partition("://")
    return f"{scheme}://{posixpath.normpath(path) if './' in name else path}"


def read(url: str, start: int = 0, size: int | None = None) -> bytes:
    """Read a file, or a range of its bytes, with one request."""
    with _connect(url) as (system, path):
        return system.cat_file(path, start=start, end=None if size is None else start + size)


@contextlib.contextmanager
def open_for_reading(url: str) -> Iterator[tuple[IO[bytes], int]]:
    """Open a file for sequential reading, possibly with gaps; yield it and its size."""
    with (
        _connect(url) as (system, path),
        system.open(path, "rb", block_size=_BLOCK_BYTES, cache_type="readahead") as file,
    ):
        yield file, file.size


@contextlib.contextmanager
def open_for_random_access(url: str) -> Iterator[IO[bytes]]:
    """Open a file of which some ranges are read, with one request each."""
    with _connect(url) as (system, path), system.open(path, "rb", cache_type="none") as file:
        yield file


def list_files(url: str) -> dict[str, RemoteFile]:
    """All files below a folder by relative name; for the URL of a file, that file under an empty name."""
    with _connect(url) as (system, path):
        path = path.rstrip("/")
        listing = sorted(system.find(path, detail=True).items())
        infos = {name: info for name, info in listing if info["type"] == "file" and not name.endswith("/")}
    return {name[len(path) :].lstrip("/"): _build_remote_file(info) for name, info in infos.items()}


def glob(pattern: str) -> list[str]:
    """The URLs that match a pattern with *, ? or []."""
    with _connect(pattern) as (system, path):
        return sorted(system.unstrip_protocol(name) for name in system.glob(path))


def is_file(url: str) -> bool:
    """Whether the URL is that of a file."""
    with _connect(url) as (system, path):
        return bool(system.isfile(path))


def compute_stamp(url: str) -> list[int]:
    """Numbers that change when a file, or any file below a folder, changes."""
    files = list_files(url)
    if not files:
        raise DataError(f"{url} does not exist")
    digest = hashlib.sha256(repr(sorted(files.items())).encode(errors="surrogateescape")).digest()
    return [0, sum(file.size for file in files.values()), int.from_bytes(digest[:6])]


def copy_from_remote(url: str, path: Path) -> None:
    """Download a file."""
    with _connect(url) as (system, name):
        system.get_file(name, str(path))


def copy_to_remote(path: Path, url: str) -> None:
    """Upload a file; on an object store it appears whole or not at all."""
    with _connect(url) as (system, name):
        system.put_file(str(path), name)


def remove(url: str) -> None:
    """Delete a file, or everything below a folder."""
    with _connect(url) as (system, name):
        system.rm(name, recursive=True)


def map_concurrently(function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """Map a function over items with concurrent requests; the results keep the order of the items."""
    with ThreadPoolExecutor(_MAX_CONCURRENT_REQUESTS) as pool:
        yield from pool.map(function, items)


# --- clients ---------------------------------------------------------------------------------------------------------

_filesystems: dict[tuple[int, str], Any] = {}


def _open_filesystem(url: str) -> tuple[Any, str]:
    """This process's client for a store, and the path of the file in it.

    A client owns a thread and sockets. A forked process can neither use nor close them, so it creates its own clients
    and keeps references to the inherited ones, which fsspec's own cache would drop.
    """
    key = os.getpid(), "/".join(url.split("/")[:3])  # scheme://store
    if key not in _filesystems:
        import fsspec  # type: ignore[import-untyped]  # torch depends on it

        scheme = url.partition("://")[0]
        try:
            options = {"auto_mkdir": True} if scheme == "file" else {}  # other stores need no folders
            _filesystems[key], _ = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
        except ImportError as error:
            is_s3 = scheme in ("s3", "s3a")
            library = "s3fs: pip install 'vitrail[remote]'" if is_s3 else f"a library that is not installed: {error}"
            raise UsageError(f"{scheme}:// needs {library}") from error
        except ValueError as error:
            raise UsageError(f"{url}: {error}; an example of a supported URL is s3://bucket/name") from error
    return _filesystems[key], _filesystems[key]._strip_protocol(url)


@contextlib.contextmanager
def _connect(url: str) -> Iterator[tuple[Any, str]]:
    """Yield what `_open_filesystem` returns; turn the library's errors into ones of one line that name the URL."""
    try:
        yield _open_filesystem(url)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DataError(f"{url} does not exist") from error
    except PermissionError as error:
        raise RemoteError(f"{url} may not be accessed with these credentials ({_format_error(error)})") from error
    except _list_connection_errors() as error:
        raise RemoteError(f"{url} cannot be reached: {_format_error(error)}") from error


def _list_connection_errors() -> tuple[type[BaseException], ...]:
    """The connection errors of the imported libraries, and OSError."""
    names = (("botocore.exceptions", "BotoCoreError"), ("aiohttp", "ClientError"))
    return OSError, *(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)


def _format_error(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _build_remote_file(file_info: dict[str, Any]) -> RemoteFile:
    version_tag = next((str(file_info[name]) for name in _VERSION_FIELDS if file_info.get(name)), "")
    return RemoteFile(int(file_info["size"] or 0), version_tag)
