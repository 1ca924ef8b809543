"""Which Host and Origin headers a server accepts.

A page of another site can make a browser call this machine: by a name that resolves to 127.0.0.1 (DNS rebinding), or by
a form. The page cannot choose the headers Host and Origin, which the browser sends.
"""

import dataclasses
import ipaddress
import re
from collections.abc import Iterable, Sequence

from vitrail.serve.limits import RefusedError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
OPEN_PATHS = ("/healthz", "/readyz")  # health probes use any address, and learn nothing
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)(?::\d*)?")


@dataclasses.dataclass(frozen=True)
class AllowedHosts:
    """A server's host names: those given, and those of loopback if it listens on loopback alone."""

    names: frozenset[str]
    """From --host-name; an Origin may have them too, whatever a proxy makes of Host."""
    address: str
    """Where the server listens."""

    def check_request(self, path: str, method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse a request to another host, or from another site's page."""
        values = {name: value.decode("latin-1").strip().lower() for name, value in headers}
        host, origin = values.get(b"host", ""), values.get(b"origin")
        if path not in OPEN_PATHS and not self._is_allowed(host):
            raise RefusedError(421, f"this server is not called {host!r:.80}; --host-name adds a name")
        if origin is not None and (method == "POST" or path.startswith("/v1/")):
            site = origin.partition("://")[2]
            if site != host and _strip_port(site) not in self.names:
                raise RefusedError(403, f"pages of {origin!r:.80} may not call this server; --host-name adds a name")

    def _is_allowed(self, host: str) -> bool:
        if not self.names and not _is_loopback(self.address):
            return True  # no --host-name was given
        return _strip_port(host) in {*self.names, *LOOPBACK_NAMES, _bracket_ipv6(self.address)}


def make_allowed_hosts(address: str, names: Sequence[str]) -> AllowedHosts:
    """The allowed host names of a server that listens at an address."""
    return AllowedHosts(frozenset(name.lower() for name in names), address)


def _strip_port(host: str) -> str:
    """A host without its port; empty if it is no host."""
    match = _HOST.fullmatch(host)
    return match[1] if match else ""


def _bracket_ipv6(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
