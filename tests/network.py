"""Commands run under a watch for the network: what Python opens, and whatever any code sends.

An audit hook sees what Python does, and not what compiled code does by itself. So where the system allows it the
command runs in a network namespace of its own in which every address is this machine: each packet that anybody sends is
counted by its one interface, and refused.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

OWN_FOLDERS = {"vitrail", "matplotlib", "fontconfig"}  # in caches and homes: ours, and those of drawing

_HOOK = """
import os, sys

def note(event, values):
    if event == "socket.getaddrinfo" or event in ("socket.bind", "socket.connect") and isinstance(values[1], tuple):
        with open(os.environ["SOCKETS"], "a") as file:  # by workers too; paths are sockets of this machine alone
            print(event, values[0] if event == "socket.getaddrinfo" else values[1], file=file)

sys.addaudithook(note)
"""

_NAMESPACE = """
ip link set lo up && ip route add local 0.0.0.0/0 dev lo && ip -6 route add local ::/0 dev lo || exit 99
log=$1; shift
"$@"
code=$?
awk '$1 == "lo:" && $11 > 0 { print $11 " packets were sent" }' /proc/net/dev > "$log"
exit $code
"""


@functools.cache
def has_namespaces() -> bool:
    """Whether commands can be given a network of their own: on Linux, with iproute2, where the system allows it."""
    try:
        return subprocess.run(_isolate(["true"], Path(os.devnull)), capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _isolate(command: Sequence[str], log: Path) -> list[str]:
    return ["unshare", "--map-root-user", "--net", "sh", "-c", _NAMESPACE, "sh", str(log), *command]


class Watched(NamedTuple):
    """How a command ended, and whom it tried to reach."""

    code: int
    out: str
    err: str
    contacts: list[str]
    """Names looked up and addresses connected to or listened on by Python; packets sent by anybody."""
    strangers: list[str]
    """Folders in the home and its caches that are neither vitrail's nor matplotlib's."""


def run_watched(arguments: Sequence[str], folder: Path) -> Watched:
    """Run Python with these arguments in `folder`, in a home of its own."""
    watch, home = folder / "watch", folder / "watch" / "home"
    home.mkdir(parents=True, exist_ok=True)
    (watch / "sitecustomize.py").write_text(_HOOK)
    for log in ("sockets", "packets"):
        (watch / log).unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, (str(watch), os.environ.get("PYTHONPATH"))))
    homes = {"HOME": home, "XDG_CACHE_HOME": home / ".cache", "XDG_DATA_HOME": home / ".local" / "share"}
    variables = {
        "PYTHONPATH": path,
        "SOCKETS": watch / "sockets",
        "CI": "",
        "OMP_NUM_THREADS": "1",
        **homes,
    }  # libraries report less in CI
    command = [sys.executable, *arguments]
    ended = subprocess.run(
        _isolate(command, watch / "packets") if has_namespaces() else command,
        cwd=folder,
        env=os.environ | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    logs = [watch / name for name in ("sockets", "packets")]
    contacts = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
    entries = [*home.glob(".cache/*"), *home.glob(".local/share/*"), *home.glob(".config/*"), *home.iterdir()]
    known = OWN_FOLDERS | {".cache", ".local", ".config"}
    strangers = [str(path.relative_to(home)) for path in entries if path.name not in known]
    return Watched(ended.returncode, ended.stdout, ended.stderr, contacts, strangers)
