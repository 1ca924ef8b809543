"""Tar files of any origin in WebDataset's naming, read at random through an index made by one walk over their headers.

A sample is what shares a name up to the first dot: an image, and beside it a .cls with a class's number or name, or a
.json with label or labels. Members are read in place and never extracted; an archive with a link, a device or a path
that leads outside is refused.

ImageNet's archives are read as they are given out: of a tar of class tars, and of tars named by a WordNet id, the tar's
name is the class; its validation images have the labels of the devkit beside them (`imagenet.py`).
"""

import contextlib
import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, cast

import numpy as np

from vitrail import remote
from vitrail.data import holdout, imagenet, sample_table
from vitrail.data.dataset import SPLITS, UNLABELED, Dataset, build_splits
from vitrail.data.folder import SPLIT_NAMES
from vitrail.data.image_headers import IMAGE_SUFFIXES, get_image_suffixes
from vitrail.data.sample_table import Array, encode_text_column
from vitrail.data.shards import ShardStore
from vitrail.data.tar_headers import TarError, TarMember, walk_members
from vitrail.errors import DataError
from vitrail.files import open_regular_file

_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_CLASSES = 1_000_000  # of numbers: every one up to the greatest is a class, named or not


def is_tar_pattern(name: str) -> bool:
    """Whether a name stands for tar files: one, a glob, or WebDataset's {000..127}."""
    return name.endswith(".tar")


def open_tars(pattern: str, *, holdout_fraction: float | None = 0.1) -> Dataset:
    """Tar files of any origin, by pattern; their index is kept in the cache. Without a share all images are train."""
    paths = find_tars(pattern)
    folder, files = _split_common_folder(paths)
    devkit = [] if isinstance(folder, str) else [str(path) for path in [imagenet.find_devkit(folder)] if path]
    source = " ".join(
        ["tars 2", str(folder), *files, str(holdout_fraction), *get_image_suffixes()[len(IMAGE_SUFFIXES) :], *devkit]
    )
    rows = sample_table.load_or_build_table(
        source, lambda: [*paths, *devkit], lambda: _build_columns(folder, files, holdout_fraction)
    )
    return Dataset(
        name=pattern,
        classes=tuple(rows.metadata["classes"]),
        splits=build_splits(ShardStore(folder, files, rows), rows["split"]),
        generated_splits=tuple(rows.metadata["made_up"]),
        notes=tuple(rows.metadata["notes"]),
    )


def find_tars(pattern: str) -> list[str]:
    """The tar files of a pattern, sorted: paths or URLs."""
    paths = sorted({found for one in expand_braces(pattern) for found in _list_existing(one)})
    if not paths:
        raise DataError(f"no file is named {pattern}")
    return paths


def _split_common_folder(paths: Sequence[str]) -> tuple[Path | str, tuple[str, ...]]:
    """The folder that all paths or URLs lie in, and what they are called there."""
    if not remote.is_remote(paths[0]):
        folder = Path(os.path.commonpath([Path(path).parent.resolve() for path in paths]))
        return folder, tuple(os.path.relpath(path, folder) for path in paths)
    scheme, _, _ = paths[0].partition("://")
    inside = [path.removeprefix(f"{scheme}://") for path in paths]
    shared = os.path.commonpath([path.rpartition("/")[0] for path in inside])
    return f"{scheme}://{shared}", tuple(os.path.relpath(path, shared) for path in inside)


def expand_braces(pattern: str) -> list[str]:
    """a{08..10}.tar -> a08.tar, a09.tar, a10.tar."""
    found = _BRACES.search(pattern)
    if not found:
        return [pattern]
    first, last = found.groups()
    if int(last) < int(first) or int(last) - int(first) > 10_000_000:
        raise DataError(f"{pattern}: {found.group()} must count upwards, to at most ten million")
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [one for number in numbers for one in expand_braces(pattern.replace(found.group(), number, 1))]


def _list_existing(path: str) -> list[str]:
    far = remote.is_remote(path)
    if any(character in path for character in "*?["):
        return remote.glob(path) if far else glob.glob(path)  # noqa: PTH207, the pattern may be absolute
    if not far and not Path(path).is_file():  # a store says so when it is asked for the file
        raise DataError(f"{path} does not exist")
    return [path]


class _TarSample(NamedTuple):
    """One sample as a foreign shard holds it."""

    name: str
    offset: int
    size: int
    labels: tuple[str, ...] | None


def _build_columns(
    folder: Path | str, files: Sequence[str], holdout_fraction: float | None
) -> tuple[Mapping[str, Array], dict[str, Any]]:
    """The columns of foreign shards: one walk over the headers."""
    if isinstance(folder, Path):
        entries = [list(iter_samples(folder / file)) for file in files]
    else:
        entries = list(remote.map_concurrently(lambda file: list(iter_samples(remote.join_url(folder, file))), files))
    notes = _label_imagenet(folder, files, entries)
    flat = [entry for shard in entries for entry in shard]
    if not flat:
        raise DataError(f"{folder}/{files[0]} (of {len(files)}) holds no image ({', '.join(get_image_suffixes())})")
    labelled = [entry.labels is not None for entry in flat]
    if any(labelled) != all(labelled):
        name = flat[labelled.index(False)].name
        raise DataError(f"{name} has neither .cls nor .json with a label beside it, while other images have")
    names = _list_classes({label for entry in flat for label in entry.labels or ()})
    place = {name: number for number, name in enumerate(names)}
    first = np.array([place[entry.labels[0]] if entry.labels else UNLABELED for entry in flat], dtype=np.int32)
    columns: dict[str, Array] = {
        "shard": np.repeat(np.arange(len(files), dtype=np.int32), [len(shard) for shard in entries]),
        "offset": np.array([entry.offset for entry in flat], dtype=np.int64),
        "size": np.array([entry.size for entry in flat], dtype=np.int64),
        "label": first,
        **encode_text_column("name", (entry.name for entry in flat)),
    }
    if any(entry.labels is not None and len(entry.labels) != 1 for entry in flat):
        columns["label"] = np.array([place[label] for entry in flat for label in entry.labels or ()], dtype=np.int32)
        columns["label.ends"] = np.cumsum([len(entry.labels or ()) for entry in flat], dtype=np.int64)
    if holdout_fraction is None:
        columns["split"] = np.full(len(flat), SPLITS.index("train"), dtype=np.int8)
        return columns, {"classes": names, "made_up": (), "notes": notes}
    given = np.array([_parse_split(file) for file in files], dtype=np.int8)[columns["shard"]]
    if holdout.NO_SPLIT in given and (given != holdout.NO_SPLIT).any():
        raise DataError(f"some shards are named after a split and some are not, such as {files[0]}: name all or none")
    split = holdout.complete_splits(
        given,
        np.zeros_like(first) if "label.ends" in columns else first,
        lambda row: f"{files[columns['shard'][row]]}:{flat[row].name}",
        identity=str(folder),
        holdout_fraction=holdout_fraction,
    )
    columns["split"] = split.column
    return columns, {"classes": names, "made_up": split.generated_splits, "notes": [*split.notes, *notes]}


def _label_imagenet(folder: Path | str, files: Sequence[str], entries: list[list[_TarSample]]) -> list[str]:
    """Give images of ImageNet's archives the labels that stand elsewhere; sentences on what was changed or is missing.

    Where no image has a label, validation images may lack the devkit's, and test images stay.
    """
    notes = []
    for place, (file, shard) in enumerate(zip(files, entries, strict=True)):
        wnid = PurePosixPath(file).stem
        if imagenet.WORDNET_ID.fullmatch(wnid) and all(entry.labels is None for entry in shard):
            entries[place] = [entry._replace(labels=(wnid,)) for entry in shard]
    labelled = any(entry.labels is not None for shard in entries for entry in shard)
    validation = _find_shards(entries, imagenet.VAL_IMAGE_NAME)
    if validation and (missing := imagenet.explain_missing_labels(folder)):
        if labelled:
            raise DataError(missing)
        notes.append(missing)
    elif validation and isinstance(folder, Path):
        known, labelled = imagenet.read_validation_labels(folder), True
        for place in validation:
            labels = imagenet.label_validation([_get_base_name(entry) for entry in entries[place]], known)
            entries[place] = [
                entry._replace(labels=(label,)) for entry, label in zip(entries[place], labels, strict=True)
            ]
            notes.append(f"{files[place]}: the labels of {len(labels):,} validation images are the devkit's")
    for place in _find_shards(entries, imagenet.TEST_IMAGE_NAME) if labelled else ():
        count, entries[place] = len(entries[place]), []
        notes.append(f"{files[place]}: {count:,} test images have no published labels and were left out")
    return notes


def _find_shards(entries: Sequence[Sequence[_TarSample]], pattern: re.Pattern[str]) -> list[int]:
    """The places of the shards whose images all have no label and a name of that pattern."""
    return [
        place
        for place, shard in enumerate(entries)
        if shard and all(entry.labels is None and pattern.fullmatch(_get_base_name(entry)) for entry in shard)
    ]


def _get_base_name(entry: _TarSample) -> str:
    return entry.name.rpartition("/")[2]


def _list_classes(labels: set[str]) -> list[str]:
    """Numbers are places in the head, whether all of them occur or not; names stand in their own order."""
    if not all(label.isascii() and label.isdigit() for label in labels):
        return sorted(labels)
    count = max(map(int, labels), default=-1) + 1
    return [str(number) for number in range(count)]


def _parse_split(file: str) -> int:
    """train-000.tar, x-val-3.tar and test/0.tar say their split."""
    words = re.split(r"[^a-z]+", file.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), holdout.NO_SPLIT)


def iter_samples(path: Path | str) -> Iterator[_TarSample]:
    """The images of one tar, each with what stands beside it under the same name up to the first dot.

    In a tar of tars, each with the images of the class that it is named after.
    """
    entry: _TarSample | None = None
    labels: tuple[str, ...] | None = None
    key = ""
    for member, content in iter_files(path):
        if member.name.lower().endswith(".tar"):
            yield from _iter_class_samples(path, member)
            continue
        stem, dot, suffix = member.name.rpartition("/")[2].partition(".")
        here = member.name[: len(member.name) - len(dot + suffix)] if stem or dot else member.name
        if here != key:
            if entry:
                yield entry._replace(labels=labels)
            entry, labels, key = None, None, here
        if f".{suffix.lower()}".endswith(get_image_suffixes()):
            if entry:
                raise DataError(f"{path} holds two images named {here}: {entry.name} and {member.name}")
            entry = _TarSample(member.name, member.offset_data, member.size, None)
        elif suffix in ("cls", "json"):
            labels = _parse_labels(content(), suffix, f"{path}:{member.name}", labels)
    if entry:
        yield entry._replace(labels=labels)


def _iter_class_samples(path: Path | str, archive: TarMember) -> Iterator[_TarSample]:
    """The images of a class tar inside a tar, read in place: where they begin is counted in the outer one."""
    stem = PurePosixPath(archive.name).stem
    label = _parse_label(stem, f"{path}:{archive.name}")
    with _open_tar(path) as (file, _):
        inner = cast(IO[bytes], _FileSlice(file, archive.offset_data, archive.size))
        try:
            for member in walk_members(inner, archive.size):
                if member.is_folder:
                    continue
                _check_member(member, f"{path}:{archive.name}")
                if member.name.lower().endswith(get_image_suffixes()):
                    start = archive.offset_data + member.offset_data
                    yield _TarSample(f"{stem}/{member.name}", start, member.size, (label,))
        except TarError as error:
            raise DataError(f"{path}:{archive.name} {error}") from error


class _FileSlice:
    """A part of an open file, as a file: what `walk_members` needs of one."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self.file, self.start, self.size, self.position = file, start, size, 0

    def seek(self, place: int) -> None:
        """Go to a place of the part."""
        self.position = place

    def read(self, size: int) -> bytes:
        """The bytes from there on, as far as the part goes."""
        self.file.seek(self.start + self.position)
        return self.file.read(max(0, min(size, self.size - self.position)))


def iter_files(path: Path | str) -> Iterator[tuple[TarMember, Callable[[], bytes]]]:
    """The files in a tar, each with a function that reads it; anything that could lead outside is refused."""
    with _open_tar(path) as (file, length):
        try:
            for member in walk_members(file, length):
                if not member.is_folder:
                    _check_member(member, path)
                    yield member, partial(_read_label_file, file, member, path)
        except TarError as error:
            raise DataError(f"{path} {error}") from error


@contextlib.contextmanager
def _open_tar(path: Path | str) -> Iterator[tuple[IO[bytes], int]]:
    """A file, here or elsewhere, and its size."""
    if isinstance(path, Path):
        with open_regular_file(path) as file:
            yield file, os.fstat(file.fileno()).st_size
    else:
        with remote.open_for_reading(path) as found:
            yield found


def _check_member(member: TarMember, path: Path | str) -> None:
    parts = PurePosixPath(member.name)
    if not member.is_file:
        raise DataError(f"{path} holds {member.name!r:.120}, which is a link or device and no file")
    if parts.is_absolute() or ".." in parts.parts or "\0" in member.name:
        raise DataError(f"{path} holds {member.name!r:.120}, a path that leads outside of it")


def _read_label_file(file: IO[bytes], member: TarMember, path: Path | str) -> bytes:
    if member.size > 2**20:
        raise DataError(f"{path}:{member.name} has {member.size:,} bytes; labels have at most 1 MiB")
    file.seek(member.offset_data)
    return file.read(member.size)


def _parse_labels(
    content: bytes, suffix: str, where: str, known_labels: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """What a .cls says, or a .json under label or labels; a .json without them says nothing."""
    try:
        text = content.decode()
        value: Any = json.loads(text) if suffix == "json" else text.strip()
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} cannot be read: {error}") from error
    if isinstance(value, dict):
        value = value.get("labels", value.get("label", value.get("cls")))
    if value is None:
        return known_labels
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int) and not isinstance(item, bool) and item != "" for item in items):
        raise DataError(f"{where}: {value!r:.80} is no label")
    return tuple(dict.fromkeys(_parse_label(str(item), where) for item in items))


def _parse_label(text: str, where: str) -> str:
    """A class's name, or its number without zeros in front."""
    if not (text.isascii() and text.isdigit()):
        return text
    number = text.lstrip("0") or "0"
    if len(number) >= len(
        str(_MAX_CLASSES)
    ):  # before it is a number: Python takes long for many digits, or refuses them
        raise DataError(
            f"{where}: the label is {number:.20}; a number is a class, and there are {_MAX_CLASSES:,} at most"
        )
    return number
