"""Which folders a walk enters, where folders link to one another.

Links are followed: train/cat and val/cat may lead to one folder. But 8 folders with links to each other have 109,600
paths, so a walk enters no folder within itself, and none through links more often than any sensible layout asks for.
"""

import os
from collections import Counter
from collections.abc import Iterator

from vitrail.plurals import pluralize

VISIT_LIMIT = 16  # through links, in one walk

InodeKey = tuple[int, int]
"""Device and inode."""


class FolderVisits:
    """The folders that one walk has entered."""

    def __init__(self) -> None:
        self._through_links: Counter[InodeKey] = Counter()
        self.skipped_folders: list[str] = []
        """Paths of folders that were not entered once more."""

    def enter(self, folder: str, ancestors: tuple[InodeKey, ...], *, through_link: bool) -> tuple[InodeKey, ...] | None:
        """The folders above whatever is in this one; None where it is not to be entered.

        `above` says how the walk came here, and `linked` whether through any link.
        """
        status = os.stat(folder)  # noqa: PTH116, a million paths as plain text
        here = (status.st_dev, status.st_ino)
        if here in ancestors:
            return None  # a circle, which holds nothing new
        if through_link:
            self._through_links[here] += 1
            if self._through_links[here] > VISIT_LIMIT:
                self.skipped_folders.append(folder)
                return None
        return (*ancestors, here)

    def describe(self) -> str:
        """What was left out, in words; nothing where nothing was."""
        if not self.skipped_folders:
            return ""
        return (
            f"{pluralize(len(self.skipped_folders), 'link')} left out, to folders that were listed {VISIT_LIMIT} times through"
            f" others, such as {self.skipped_folders[0]}"
        )


def walk_folders(root: str, visits: FolderVisits) -> Iterator[tuple[str, list[os.DirEntry[str]] | OSError]]:
    """Each folder below a folder, itself first, with its entries by name, or why they cannot be listed.

    What begins with a dot is hidden.
    """
    waiting: list[tuple[str, tuple[InodeKey, ...], bool]] = [(root, (), False)]
    while waiting:
        folder, above, linked = waiting.pop()
        try:
            within = visits.enter(folder or ".", above, through_link=linked)
            if within is None:
                continue
            with os.scandir(folder or ".") as scanned:
                entries = sorted((entry for entry in scanned if not entry.name.startswith(".")), key=_get_entry_name)
        except OSError as error:
            yield folder, error
            continue
        yield folder, entries
        inner = [entry for entry in entries if is_folder(entry)]
        paths = (os.path.join(folder, entry.name) for entry in reversed(inner))  # noqa: PTH118
        links = (linked or entry.is_symlink() for entry in reversed(inner))
        waiting.extend((path, within, link) for path, link in zip(paths, links, strict=True))


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _get_entry_name(entry: os.DirEntry[str]) -> str:
    return entry.name
