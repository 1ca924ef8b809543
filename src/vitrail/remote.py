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

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+://")
_AT_ONCE = 10  # requests on their way, as many as s3fs has connections: a store takes 20 to 100 ms to answer one
_BLOCK = 4 * 2**20  # bytes that a file read from front to back is fetched by
_MARKS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "created")
Item = TypeVar("Item")
Result = TypeVar("Result")


class RemoteError(DataError):
    """A store that does not answer, or not as it should."""


class File(NamedTuple):
    """What a store says of a file."""

    size: int
    mark: str
    """Changes when the content does."""


def is_remote(name: str) -> bool:
    """Whether a name has a scheme."""
    return _SCHEME.match(name) is not None


def joined(url: str, name: str) -> str:
    """The URL of what is called `name` in a folder, or by way of .. beside it."""
    scheme, _, path = f"{url.rstrip('/')}/{name}".partition("://")
    return f"{scheme}://{posixpath.normpath(path) if './' in name else path}"


def read(url: str, start: int = 0, size: int | None = None) -> bytes:
    """The bytes of a file, or a range of them, by one request."""
    with _named(url):
        system, path = _opened(url)
        return system.cat_file(path, start=start, end=None if size is None else start + size)


@contextlib.contextmanager
def reading(url: str) -> Iterator[tuple[IO[bytes], int]]:
    """A file to read from front to back, leaving out what is not needed, and its size."""
    with _named(url):
        system, path = _opened(url)
        with system.open(path, "rb", block_size=_BLOCK, cache_type="readahead") as file:
            yield file, file.size


def find(url: str) -> dict[str, File]:
    """Every file below a folder by its name there; of a file itself, that one under an empty name."""
    with _named(url):
        system, path = _opened(url)
        path = path.rstrip("/")
        found = system.find(path, detail=True)
        return {
            name[len(path) :].lstrip("/"): _file(facts)
            for name, facts in sorted(found.items())
            if facts["type"] == "file" and not name.endswith("/")
        }


def glob(pattern: str) -> list[str]:
    """The URLs that a pattern with *, ? or [] names."""
    with _named(pattern):
        system, path = _opened(pattern)
        return sorted(system.unstrip_protocol(name) for name in system.glob(path))


def is_file(url: str) -> bool:
    """Whether there is a file of that name."""
    with _named(url):
        system, path = _opened(url)
        return bool(system.isfile(path))


def stamp(url: str) -> list[int]:
    """Numbers that change when a file does, or any file below a folder."""
    files = find(url)
    if not files:
        raise DataError(f"{url} does not exist")
    digest = hashlib.sha256(repr(sorted(files.items())).encode(errors="surrogateescape")).digest()
    return [0, sum(file.size for file in files.values()), int.from_bytes(digest[:6])]


def fetch(url: str, path: Path) -> None:
    """Copy a file from there to here."""
    with _named(url):
        system, name = _opened(url)
        system.get_file(name, str(path))


def send(path: Path, url: str) -> None:
    """Copy a file from here to there; on an object store it appears whole or not at all."""
    with _named(url):
        system, name = _opened(url)
        system.put_file(str(path), name)


def remove(url: str) -> None:
    """Delete a file, or all below a folder."""
    with _named(url):
        system, name = _opened(url)
        system.rm(name, recursive=True)


def at_once(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The results in the order of the items, several on their way together."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(function, items)


# --- the stores ------------------------------------------------------------------------------------------------------

_systems: dict[tuple[int, str], Any] = {}


def _opened(url: str) -> tuple[Any, str]:
    """This process's client for a store, and what the file is called there.

    A client is a thread and sockets. A process forked from this one can use neither, nor may it close them, so it
    makes clients of its own and leaves those it inherited where they are. fsspec's own cache would let go of them.
    """
    place = re.match(r"[^:]+://[^/]*", url)
    assert place is not None
    key = os.getpid(), place[0]
    if key not in _systems:
        import fsspec  # type: ignore[import-untyped]  # torch depends on it

        scheme = url.partition("://")[0]
        try:
            options = {"auto_mkdir": True} if scheme == "file" else {}  # elsewhere a folder is where its files are
            _systems[key], _ = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
        except ImportError as error:
            known = scheme in ("s3", "s3a")
            needs = "s3fs: pip install 'vitrail[remote]'" if known else f"a library that is not here: {error}"
            raise UsageError(f"{scheme}:// is read through {needs}") from error
        except ValueError as error:
            raise UsageError(f"{url}: {error}; s3://bucket/name is one that is known") from error
    return _systems[key], _systems[key]._strip_protocol(url)


@contextlib.contextmanager
def _named(url: str) -> Iterator[None]:
    """Whatever goes wrong with a file is said in one line that begins with its name."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DataError(f"{url} does not exist") from error
    except PermissionError as error:
        raise RemoteError(f"{url} is not for these credentials to use ({_words(error)})") from error
    except _failures() as error:
        raise RemoteError(f"{url} cannot be reached: {_words(error)}") from error


def _failures() -> tuple[type[BaseException], ...]:
    """What the libraries raise of connections beside OSError; those that were not imported raise nothing."""
    names = (("botocore.exceptions", "BotoCoreError"), ("aiohttp", "ClientError"))
    return OSError, *(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _file(facts: dict[str, Any]) -> File:
    return File(int(facts["size"] or 0), next((str(facts[name]) for name in _MARKS if facts.get(name)), ""))
