"""Random access to WebDataset tars of any origin, through an index built in one pass over their headers.

A sample is the members that share a name up to the first dot: an image, and a .cls with the number or name of a class,
or a .json with label or labels. Members are read in place and never extracted. An archive with a link, a device or a
path that leads outside is refused.

ImageNet's archives are read as they are distributed. In a tar of class tars, or a tar named by a WordNet ID, the tar's
name is the class. Validation images take their labels from the devkit beside them (`imagenet.py`).
"""

import contextlib
import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import numpy as np

from vitrail import remote
from vitrail.data import holdout, imagenet, sample_table
from vitrail.data.archives import TarError, TarMember, check_member, walk_members
from vitrail.data.dataset import SPLITS, Dataset, build_dataset
from vitrail.data.folder import SPLIT_NAMES
from vitrail.data.image_headers import IMAGE_SUFFIXES, get_image_suffixes
from vitrail.data.sample_table import Array, encode_label_columns, encode_text_column
from vitrail.data.shards import ShardStore
from vitrail.errors import DataError
from vitrail.files import open_regular_file

_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_CLASSES = 1_000_000  # labels that are numbers: every number up to the largest is a class


def is_tar_pattern(name: str) -> bool:
    """Whether a name stands for tar files: one file, a glob, or WebDataset's {000..127}."""
    return name.endswith(".tar")


def open_tars(pattern: str, *, holdout_fraction: float | None = 0.1) -> Dataset:
    """Open the tars of a pattern; their index is cached. If `holdout_fraction` is None, all images are train."""
    paths = find_tars(pattern)
    folder, files = split_common_folder(paths)
    devkit = [] if isinstance(folder, str) else [str(path) for path in [imagenet.find_devkit(folder)] if path]
    source = " ".join(
        ["tars 2", str(folder), *files, str(holdout_fraction), *get_image_suffixes()[len(IMAGE_SUFFIXES) :], *devkit]
    )
    table = sample_table.load_or_build_table(
        source, lambda: [*paths, *devkit], lambda: _build_columns(folder, files, holdout_fraction)
    )
    return build_dataset(pattern, ShardStore(folder, files, table))


def find_tars(pattern: str) -> list[str]:
    """The paths or URLs of the tars that match a pattern, sorted."""
    paths = sorted({path for expanded in expand_braces(pattern) for path in list_matches(expanded)})
    if not paths:
        raise DataError(f"no file matches {pattern}")
    return paths


def split_common_folder(paths: Sequence[str]) -> tuple[Path | str, tuple[str, ...]]:
    """The common folder of all paths or URLs, and their names relative to it."""
    if not remote.is_remote(paths[0]):
        folder = Path(os.path.commonpath([Path(path).parent.resolve() for path in paths]))
        return folder, tuple(os.path.relpath(path, folder) for path in paths)
    scheme, _, _ = paths[0].partition("://")
    keys = [path.removeprefix(f"{scheme}://") for path in paths]
    shared = os.path.commonpath([key.rpartition("/")[0] for key in keys])
    return f"{scheme}://{shared}", tuple(os.path.relpath(key, shared) for key in keys)


def expand_braces(pattern: str) -> list[str]:
    """a{08..10}.tar -> a08.tar, a09.tar, a10.tar."""
    braces = _BRACES.search(pattern)
    if not braces:
        return [pattern]
    first, last = braces.groups()
    if int(last) < int(first) or int(last) - int(first) > 10_000_000:
        raise DataError(f"{pattern}: {braces.group()} must count upwards, over at most ten million numbers")
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [path for number in numbers for path in expand_braces(pattern.replace(braces.group(), number, 1))]


def list_matches(pattern: str) -> list[str]:
    """The paths or URLs that match a glob; a plain path is returned as it is, and must exist if it is local."""
    is_remote = remote.is_remote(pattern)
    if any(character in pattern for character in "*?["):
        return remote.glob(pattern) if is_remote else glob.glob(pattern)  # noqa: PTH207, it may be absolute
    if not is_remote and not Path(pattern).is_file():  # a store reports a missing file when it is read
        raise DataError(f"{pattern} does not exist")
    return [pattern]


class _TarSample(NamedTuple):
    """One image of a tar, with its labels if it has any."""

    name: str
    offset: int
    size: int
    labels: tuple[str, ...] | None


def _build_columns(
    folder: Path | str, files: Sequence[str], holdout_fraction: float | None
) -> tuple[Mapping[str, Array], dict[str, Any]]:
    """The columns and metadata of the tars' table, from one pass over their headers."""
    shards = _list_samples(folder, files)
    notes = _label_imagenet(folder, files, shards)
    samples = [sample for shard in shards for sample in shard]
    _check_labels(samples, f"{folder}/{files[0]} (of {len(files)})")
    classes = _list_classes({label for sample in samples for label in sample.labels or ()})
    class_index = {name: number for number, name in enumerate(classes)}
    labels = ([class_index[label] for label in sample.labels or ()] for sample in samples)
    multi_label = any(sample.labels is not None and len(sample.labels) != 1 for sample in samples)
    columns: dict[str, Array] = {
        "shard": np.repeat(np.arange(len(files), dtype=np.int32), [len(shard) for shard in shards]),
        "offset": np.array([sample.offset for sample in samples], dtype=np.int64),
        "size": np.array([sample.size for sample in samples], dtype=np.int64),
        **encode_text_column("name", (sample.name for sample in samples)),
        **encode_label_columns(labels, multi_label=multi_label),
    }
    if holdout_fraction is None:
        train = np.full(len(samples), SPLITS.index("train"), dtype=np.int8)
        split = holdout.CompletedSplits(train, (), ())
    else:
        split_column = np.array([parse_split(file) for file in files], dtype=np.int8)[columns["shard"]]
        if holdout.NO_SPLIT in split_column and (split_column != holdout.NO_SPLIT).any():
            raise DataError(
                f"some shards are named after a split and others are not, such as {files[0]}: name all or none"
            )
        split = holdout.complete_splits(
            split_column,
            columns,
            lambda row: f"{files[columns['shard'][row]]}:{samples[row].name}",
            identity=str(folder),
            holdout_fraction=holdout_fraction,
        )
    return columns | {"split": split.column}, split.build_metadata(classes, notes)


def _list_samples(folder: Path | str, files: Sequence[str]) -> list[list[_TarSample]]:
    """The samples of each tar."""
    if isinstance(folder, Path):
        return [list(iter_samples(folder / file)) for file in files]
    return list(remote.map_concurrently(lambda file: list(iter_samples(remote.join_url(folder, file))), files))


def _check_labels(samples: Sequence[_TarSample], source: str) -> None:
    """Refuse tars without an image, and those where only a part of the images has labels."""
    if not samples:
        raise DataError(f"{source} holds no image ({', '.join(get_image_suffixes())})")
    unlabeled = [sample.name for sample in samples if sample.labels is None]
    if 0 < len(unlabeled) < len(samples):
        raise DataError(f"{unlabeled[0]} has neither a .cls nor a .json with a label, while other images have one")


def _label_imagenet(folder: Path | str, files: Sequence[str], shards: list[list[_TarSample]]) -> list[str]:
    """Add the labels of ImageNet's archives to their samples, in place; return notes on what changed or is missing.

    If no image has a label, validation images may lack the devkit, and test images are kept.
    """
    notes = []
    for number, (file, shard) in enumerate(zip(files, shards, strict=True)):
        wnid = PurePosixPath(file).stem
        if imagenet.WORDNET_ID.fullmatch(wnid) and all(sample.labels is None for sample in shard):
            shards[number] = [sample._replace(labels=(wnid,)) for sample in shard]
    has_labels = any(sample.labels is not None for shard in shards for sample in shard)
    validation = _find_shards(shards, imagenet.VAL_IMAGE_NAME)
    if validation and (missing := imagenet.explain_missing_labels(folder)):
        if has_labels:
            raise DataError(missing)
        notes.append(missing)
    elif validation and isinstance(folder, Path):
        devkit_labels, has_labels = imagenet.read_validation_labels(folder), True
        for number in validation:
            labels = imagenet.label_validation([_get_base_name(sample) for sample in shards[number]], devkit_labels)
            labeled = zip(shards[number], labels, strict=True)
            shards[number] = [sample._replace(labels=(label,)) for sample, label in labeled]
            notes.append(f"{files[number]}: the labels of {len(labels):,} validation images come from the devkit")
    for number in _find_shards(shards, imagenet.TEST_IMAGE_NAME) if has_labels else ():
        count, shards[number] = len(shards[number]), []
        notes.append(f"{files[number]}: {count:,} test images have no published labels and were left out")
    return notes


def _find_shards(shards: Sequence[Sequence[_TarSample]], pattern: re.Pattern[str]) -> list[int]:
    """The numbers of the shards whose images all have no label and a name that matches the pattern."""
    return [
        number
        for number, shard in enumerate(shards)
        if shard and all(sample.labels is None and pattern.fullmatch(_get_base_name(sample)) for sample in shard)
    ]


def _get_base_name(sample: _TarSample) -> str:
    return sample.name.rpartition("/")[2]


def _list_classes(labels: set[str]) -> list[str]:
    """The classes of these labels: sorted names or, if all are numbers, every number up to the largest."""
    if not all(label.isascii() and label.isdigit() for label in labels):
        return sorted(labels)
    count = max(map(int, labels), default=-1) + 1
    return [str(number) for number in range(count)]


def parse_split(file: str) -> int:
    """The split in a file name such as train-000.tar, x-val-3.tar or test/0.tar."""
    words = re.split(r"[^a-z]+", file.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), holdout.NO_SPLIT)


def iter_samples(path: Path | str) -> Iterator[_TarSample]:
    """The images of one tar, each with the labels that share its name up to the first dot.

    In a tar of tars, each inner tar is a class and holds its images.
    """
    sample: _TarSample | None = None
    labels: tuple[str, ...] | None = None
    key = ""
    for member, content in iter_files(path):
        if member.name.lower().endswith(".tar"):
            yield from _iter_class_samples(path, member)
            continue
        stem, dot, suffix = member.name.rpartition("/")[2].partition(".")
        member_key = member.name[: len(member.name) - len(dot + suffix)] if stem or dot else member.name
        if member_key != key:
            if sample:
                yield sample._replace(labels=labels)
            sample, labels, key = None, None, member_key
        if f".{suffix.lower()}".endswith(get_image_suffixes()):
            if sample:
                raise DataError(f"{path} holds two images named {key}: {sample.name} and {member.name}")
            sample = _TarSample(member.name, member.offset_data, member.size, None)
        elif suffix in ("cls", "json"):
            labels = _parse_labels(content(), suffix, f"{path}:{member.name}", labels)
    if sample:
        yield sample._replace(labels=labels)


def _iter_class_samples(path: Path | str, archive: TarMember) -> Iterator[_TarSample]:
    """The images of a class tar inside a tar; their offsets are those in the outer tar."""
    stem = PurePosixPath(archive.name).stem
    label = _parse_label(stem, f"{path}:{archive.name}")
    with _open_tar(path) as (file, _):
        for member in _iter_checked_files(file, archive.size, f"{path}:{archive.name}", start=archive.offset_data):
            if member.name.lower().endswith(get_image_suffixes()):
                offset = archive.offset_data + member.offset_data
                yield _TarSample(f"{stem}/{member.name}", offset, member.size, (label,))


def iter_files(path: Path | str) -> Iterator[tuple[TarMember, Callable[[], bytes]]]:
    """The files in a tar, each with a function that reads it; links, devices and outside paths are refused."""
    with _open_tar(path) as (file, length):
        for member in _iter_checked_files(file, length, path):
            yield member, partial(_read_label_file, file, member, path)


def _iter_checked_files(file: IO[bytes], length: int, name: Path | str, *, start: int = 0) -> Iterator[TarMember]:
    try:
        for member in walk_members(file, length, start=start):
            if not member.is_folder:
                check_member(name, member.name, is_file=member.is_file)
                yield member
    except TarError as error:
        raise DataError(f"{name} {error}") from error


@contextlib.contextmanager
def _open_tar(path: Path | str) -> Iterator[tuple[IO[bytes], int]]:
    """Open a local or remote file; yield it and its size."""
    if isinstance(path, Path):
        with open_regular_file(path) as file:
            yield file, os.fstat(file.fileno()).st_size
    else:
        with remote.open_for_reading(path) as opened:
            yield opened


def _read_label_file(file: IO[bytes], member: TarMember, path: Path | str) -> bytes:
    if member.size > 2**20:
        raise DataError(f"{path}:{member.name} has {member.size:,} bytes; the limit for labels is 1 MiB")
    file.seek(member.offset_data)
    return file.read(member.size)


def _parse_labels(
    content: bytes, suffix: str, where: str, known_labels: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """The labels in a .cls, or in a .json under label, labels or cls; `known_labels` if a .json has none of these."""
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
        raise DataError(f"{where}: {value!r:.80} is not a label")
    return tuple(dict.fromkeys(_parse_label(str(item), where) for item in items))


def _parse_label(text: str, where: str) -> str:
    """The name of a class, or its number without leading zeros."""
    if not (text.isascii() and text.isdigit()):
        return text
    number = text.lstrip("0") or "0"
    if len(number) >= len(str(_MAX_CLASSES)):  # as text: Python is slow with many digits, or refuses them
        raise DataError(
            f"{where}: the label is {number:.20}; as the number of a class it must be below {_MAX_CLASSES:,}"
        )
    return number
