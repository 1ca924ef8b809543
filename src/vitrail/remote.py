"""Files that lie elsewhere, by names with a scheme: s3://bucket/shards/000.tar.

fsspec knows the stores, and the library of each (s3fs for S3, the extra `remote`) its protocol, its credentials and
when to ask again: a request that fails in passing is repeated by them, up to a limit (AWS_MAX_ATTEMPTS for S3). What
fails all the same is an error that names the file. Nothing else in vitrail speaks to a store.
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

from vitrail.errors import DataError, UsageError

_SCHEME_PATTERN = re.compile(r"[a-z][a-z0-9+.-]+://")
_MAX_CONCURRENT_REQUESTS = (
    10  # requests on their way, as many as s3fs has connections: a store takes 20 to 100 ms to answer one
)
_BLOCK_BYTES = 4 * 2**20  # bytes that a file read from front to back is fetched by
_VERSION_FIELDS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "created")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class RemoteError(DataError):
    """A store that does not answer, or not as it should."""


class RemoteFile(NamedTuple):
    """What a store says of a file."""

    size: int
    version_tag: str
    """Changes when the content does."""


def is_remote(name: str) -> bool:
    """Whether a name has a scheme."""
    return _SCHEME_PATTERN.match(name) is not None


def join_url(url: str, name: str) -> str:
    """The URL of what is called `name` in a folder, or by way of .. beside it."""
    scheme, _, path = f"{url.rstrip('/')}/{name}".partition("://")
    return f"{scheme}://{posixpath.normpath(path) if './' in name else path}"


def read(url: str, start: int = 0, size: int | None = None) -> bytes:
    """The bytes of a file, or a range of them, by one request."""
    with _wrap_remote_errors(url):
        system, path = _open_filesystem(url)
        return system.cat_file(path, start=start, end=None if size is None else start + size)


@contextlib.contextmanager
def open_for_reading(url: str) -> Iterator[tuple[IO[bytes], int]]:
    """A file to read from front to back, leaving out what is not needed, and its size."""
    with _wrap_remote_errors(url):
        system, path = _open_filesystem(url)
        with system.open(path, "rb", block_size=_BLOCK_BYTES, cache_type="readahead") as file:
            yield file, file.size


def list_files(url: str) -> dict[str, RemoteFile]:
    """Every file below a folder by its name there; of a file itself, that one under an empty name."""
    with _wrap_remote_errors(url):
        system, path = _open_filesystem(url)
        path = path.rstrip("/")
        found = system.find(path, detail=True)
        return {
            name[len(path) :].lstrip("/"): _build_remote_file(facts)
            for name, facts in sorted(found.items())
            if facts["type"] == "file" and not name.endswith("/")
        }


def glob(pattern: str) -> list[str]:
    """The URLs that a pattern with *, ? or [] names."""
    with _wrap_remote_errors(pattern):
        system, path = _open_filesystem(pattern)
        return sorted(system.unstrip_protocol(name) for name in system.glob(path))


def is_file(url: str) -> bool:
    """Whether there is a file of that name."""
    with _wrap_remote_errors(url):
        system, path = _open_filesystem(url)
        return bool(system.isfile(path))


def compute_stamp(url: str) -> list[int]:
    """Numbers that change when a file does, or any file below a folder."""
    files = list_files(url)
    if not files:
        raise DataError(f"{url} does not exist")
    digest = hashlib.sha256(repr(sorted(files.items())).encode(errors="surrogateescape")).digest()
    return [0, sum(file.size for file in files.values()), int.from_bytes(digest[:6])]


def copy_from_remote(url: str, path: Path) -> None:
    """Copy a file from there to here."""
    with _wrap_remote_errors(url):
        system, name = _open_filesystem(url)
        system.get_file(name, str(path))


def copy_to_remote(path: Path, url: str) -> None:
    """Copy a file from here to there; on an object store it appears whole or not at all."""
    with _wrap_remote_errors(url):
        system, name = _open_filesystem(url)
        system.put_file(str(path), name)


def remove(url: str) -> None:
    """Delete a file, or all below a folder."""
    with _wrap_remote_errors(url):
        system, name = _open_filesystem(url)
        system.rm(name, recursive=True)


def map_concurrently(function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """The results in the order of the items, several on their way together."""
    with ThreadPoolExecutor(_MAX_CONCURRENT_REQUESTS) as pool:
        yield from pool.map(function, items)


# --- the stores ------------------------------------------------------------------------------------------------------

_filesystems: dict[tuple[int, str], Any] = {}


def _open_filesystem(url: str) -> tuple[Any, str]:
    """This process's client for a store, and what the file is called there.

    A client is a thread and sockets. A process forked from this one can use neither, nor may it close them, so it
    makes clients of its own and leaves those it inherited where they are. fsspec's own cache would let go of them.
    """
    place = re.match(r"[^:]+://[^/]*", url)
    assert place is not None
    key = os.getpid(), place[0]
    if key not in _filesystems:
        import fsspec  # type: ignore[import-untyped]  # torch depends on it

        scheme = url.partition("://")[0]
        try:
            options = {"auto_mkdir": True} if scheme == "file" else {}  # elsewhere a folder is where its files are
            _filesystems[key], _ = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
        except ImportError as error:
            known = scheme in ("s3", "s3a")
            needs = "s3fs: pip install 'vitrail[remote]'" if known else f"a library that is not here: {error}"
            raise UsageError(f"{scheme}:// is read through {needs}") from error
        except ValueError as error:
            raise UsageError(f"{url}: {error}; s3://bucket/name is one that is known") from error
    return _filesystems[key], _filesystems[key]._strip_protocol(url)


@contextlib.contextmanager
def _wrap_remote_errors(url: str) -> Iterator[None]:
    """Whatever goes wrong with a file is said in one line that begins with its name."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DataError(f"{url} does not exist") from error
    except PermissionError as error:
        raise RemoteError(f"{url} is not for these credentials to use ({_format_error(error)})") from error
    except _list_connection_errors() as error:
        raise RemoteError(f"{url} cannot be reached: {_format_error(error)}") from error


def _list_connection_errors() -> tuple[type[BaseException], ...]:
    """What the libraries raise of connections beside OSError; those that were not imported raise nothing."""
    names = (("botocore.exceptions", "BotoCoreError"), ("aiohttp", "ClientError"))
    return OSError, *(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)


def _format_error(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _build_remote_file(file_info: dict[str, Any]) -> RemoteFile:
    return RemoteFile(
        int(file_info["size"] or 0), next((str(file_info[name]) for name in _VERSION_FIELDS if file_info.get(name)), "")
    )
