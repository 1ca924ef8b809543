"""What a disk may hold after the power was cut: the calls that a save made, and how much of them was there by then.

A file has the bytes that it had when it was last synced, a folder the names. What was done since then may have reached
the disk or not: names before data, data before names, some of each. POSIX promises no more, so no more is assumed,
though file systems keep more than that.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A line of the shim's log."""

    name: str
    fields: tuple[str, ...]
    data: bytes


def calls(log: Path) -> Iterator[Call]:
    """What a process did, in order."""
    content = log.read_bytes()
    start = 0
    while start < len(content):
        end = content.index(b"\n", start)
        name, *fields = content[start:end].decode().split("\t")
        start, size = end + 1, int(fields[2]) if name == "write" else 0
        yield Call(name, tuple(fields), content[start : start + size])
        start += size


Change = tuple[Any, Any]


@dataclasses.dataclass(eq=False)
class File:
    """Its bytes when it was last synced, and the changes since: a place and data, or a size and None."""

    kept: bytes = b""
    since: list[Change] = dataclasses.field(default_factory=list)

    def after(self, changes: list[Change]) -> bytes:
        """Its bytes, if so much of what was done since has reached the disk."""
        if not changes:
            return self.kept
        content = bytearray(self.kept)
        for place, data in changes:
            if data is None:
                content[place:] = bytes(max(0, place - len(content)))
            else:
                content.extend(bytes(max(0, place - len(content))))
                content[place : place + len(data)] = data
        return bytes(content)


@dataclasses.dataclass(eq=False)
class Folder:
    """Its names when it was last synced, and the changes since: a name and what it stands for, or None."""

    kept: dict[str, "File | Folder"] = dataclasses.field(default_factory=dict)
    since: list[Change] = dataclasses.field(default_factory=list)

    def after(self, changes: list[Change]) -> dict[str, "File | Folder"]:
        """Its names, if so much of what was done since has reached the disk."""
        found = dict(self.kept)
        for name, node in changes:
            found.pop(name, None)
            if node is not None:
                found[name] = node
        return found


class Disk:
    """A folder and what was done below it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.top = _read(self.root)

    def do(self, call: Call) -> None:
        """Make a call."""
        fields = call.fields
        if call.name in ("create", "mkdir"):
            self._name(fields[0], File() if call.name == "create" else Folder())
        elif call.name in ("unlink", "rmdir"):
            self._name(fields[0], None)
        elif call.name == "rename":
            node = self._find(fields[0])
            self._name(fields[0], None)
            self._name(fields[1], node)
        elif call.name == "sync":
            synced = self._find(fields[0])
            if isinstance(synced, File):
                synced.kept = synced.after(synced.since)
            else:
                synced.kept = synced.after(synced.since)
            synced.since = []
        else:
            file = self._find(fields[0])
            assert isinstance(file, File)
            file.since.append((int(fields[1]), call.data if call.name == "write" else None))

    def _find(self, path: str) -> File | Folder:
        node: File | Folder = self.top
        for part in Path(path).relative_to(self.root).parts:
            assert isinstance(node, Folder)
            node = node.after(node.since)[part]
        return node

    def _name(self, path: str, node: File | Folder | None) -> None:
        folder = self._find(str(Path(path).parent))
        assert isinstance(folder, Folder)
        folder.since.append((Path(path).name, node))


def _read(path: Path) -> Folder:
    """A folder as it is, all of it on the disk."""
    return Folder({each.name: _read(each) if each.is_dir() else File(each.read_bytes()) for each in path.iterdir()})


Tree = dict[str, bytes | None]  # what each path holds; None is a folder
Loss = Callable[[File | Folder, random.Random], list[Change]]


def nothing(node: File | Folder, _: random.Random) -> list[Change]:
    """Nothing that was not synced is on the disk."""
    return []


def all_of_it(node: File | Folder, _: random.Random) -> list[Change]:
    """Everything is on the disk, as where a process is killed and the machine runs on."""
    return list(node.since)


def names(node: File | Folder, _: random.Random) -> list[Change]:
    """Names are on the disk and data is not."""
    return list(node.since) if isinstance(node, Folder) else []


def data(node: File | Folder, _: random.Random) -> list[Change]:
    """Data is on the disk and names are not."""
    return list(node.since) if isinstance(node, File) else []


def names_and_half(node: File | Folder, _: random.Random) -> list[Change]:
    """Names are on the disk, and the first half of the data."""
    if isinstance(node, Folder):
        return list(node.since)
    left, found = sum(len(data or b"") for _, data in node.since) // 2, []
    for place, content in node.since:
        found.append((place, None if content is None else content[:left]))
        left -= len(content or b"")
        if left <= 0:
            break
    return found


def some(node: File | Folder, draws: random.Random) -> list[Change]:
    """Some of the names, in order, for each folder; any of the writes."""
    if isinstance(node, Folder):
        return node.since[: draws.randint(0, len(node.since))]
    return [change for change in node.since if draws.random() < 0.5]


LOSSES = (nothing, all_of_it, names, data, names_and_half, some, some)


def remains(node: Folder, loss: Loss, draws: random.Random, prefix: str = "") -> Tree:
    """What is found on the disk."""
    found: Tree = {}
    for name, child in node.after(loss(node, draws)).items():
        if isinstance(child, File):
            found[prefix + name] = child.after(loss(child, draws))
        else:
            found |= {prefix + name: None} | remains(child, loss, draws, f"{prefix}{name}/")
    return found


def tree(root: Path) -> Tree:
    """What a folder really holds."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in sorted(root.rglob("*"))
    }


def lay_out(found: Tree, root: Path) -> None:
    """Write what was found on the disk to a folder."""
    root.mkdir(parents=True)
    for name in sorted(found):
        content = found[name]
        if content is None:
            (root / name).mkdir(exist_ok=True)
        else:
            (root / name).write_bytes(content)
