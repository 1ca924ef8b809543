"""What a server accepts: limits of a request, Host and Origin headers, and the errors that refuse one.

A page of another site can make a browser call this machine: by a name that resolves to 127.0.0.1 (DNS rebinding), or by
a form. The page cannot choose the headers Host and Origin, which the browser sends.
"""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
OPEN_PATHS = ("/healthz", "/readyz")  # health probes use any address, and learn nothing
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)(?::\d*)?")


class RefusedError(Exception):
    """A refused request: the status code and the message of its response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BusyError(Exception):
    """No room, or no time, for a request, and the seconds after which to retry."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = max(1.0, retry_seconds)  # Retry-After counts whole seconds


class RequestLimits(NamedTuple):
    """The most that is read and decoded."""

    max_megabytes: float = 20.0  # of one request
    max_megapixels: float = 50.0  # of one image
    max_images: int = 32  # of one request
    upload_seconds: float = 30.0  # in which a body must arrive
    decode_seconds: float = 10.0  # to decode one image: 50 megapixels took 0.9 to 3.8 s on one core

    @property
    def max_bytes(self) -> int:
        """Of one request."""
        return int(self.max_megabytes * 2**20)


class AllowedHosts(NamedTuple):
    """A server's host names: those given, and loopback's. Any if none is given and it listens beyond loopback."""

    address: str  # where the server listens
    names: Sequence[str]  # from --host-name; an Origin may have them too, whatever a proxy makes of Host

    def check_request(self, path: str, method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse a request to another host, or from another site's page."""
        values = {name: value.decode("latin-1").strip().lower() for name, value in headers}
        host, origin = values.get(b"host", ""), values.get(b"origin")
        names = {name.lower() for name in self.names}
        is_open = path in OPEN_PATHS or not (names or ipaddress.ip_address(self.address).is_loopback)
        own_address = f"[{self.address}]" if ":" in self.address else self.address
        if not is_open and _strip_port(host) not in {*names, *LOOPBACK_NAMES, own_address}:
            raise RefusedError(421, f"this server is not called {host!r:.80}; --host-name adds a name")
        if origin is not None and (method == "POST" or path.startswith("/v1/")):
            site = origin.partition("://")[2]
            if site != host and _strip_port(site) not in names:
                raise RefusedError(403, f"pages of {origin!r:.80} may not call this server; --host-name adds a name")


def _strip_port(host: str) -> str:
    """A host without its port; empty if it is no host."""
    match = _HOST.fullmatch(host)
    return match[1] if match else ""
