"""By which names a server may be called, and from which pages.

A page of another site can let a browser ask this machine: under a name that it resolves to 127.0.0.1 (DNS rebinding),
or by a form. What the browser says of it, the headers Host and Origin, cannot be chosen by the page.
"""

import dataclasses
import ipaddress
import re
from collections.abc import Iterable, Sequence

from vitrail.serve.limits import RefusedError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
OPEN_PATHS = ("/healthz", "/readyz")  # probes call a machine by any address, and learn nothing
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)(?::\d*)?")


@dataclasses.dataclass(frozen=True)
class AllowedHosts:
    """The names of a server: those it was given, and where it listens on loopback alone, those of loopback."""

    names: frozenset[str]
    """As --host-name has them: an Origin may have them too, whatever a proxy makes of Host."""
    address: str
    """Where the server listens."""

    def check_request(self, path: str, method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse a request for another host, or from a page of one."""
        found = {name: value.decode("latin-1").strip().lower() for name, value in headers}
        host, origin = found.get(b"host", ""), found.get(b"origin")
        if path not in OPEN_PATHS and not self._is_allowed(host):
            raise RefusedError(421, f"this server is not called {host!r:.80}; --host-name adds a name")
        if origin is not None and (method == "POST" or path.startswith("/v1/")):
            from_where = origin.partition("://")[2]
            if from_where != host and _strip_port(from_where) not in self.names:
                raise RefusedError(403, f"pages of {origin!r:.80} may not ask this server; --host-name adds a name")

    def _is_allowed(self, host: str) -> bool:
        if not self.names and not _is_loopback(self.address):
            return True  # nobody said what it is called
        return _strip_port(host) in {*self.names, *LOOPBACK_NAMES, _bracket_ipv6(self.address)}


def make_allowed_hosts(address: str, names: Sequence[str]) -> AllowedHosts:
    """The names by which a server at an address may be called."""
    return AllowedHosts(frozenset(name.lower() for name in names), address)


def _strip_port(host: str) -> str:
    """A host without its port; nothing of what is none."""
    found = _HOST.fullmatch(host)
    return found[1] if found else ""


def _bracket_ipv6(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
