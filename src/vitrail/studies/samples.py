"""The images of a VTAB task: 1,000 to train on, 800 and 200, and its test.

    ROOT/TASK/  train800.txt  val200.txt  test.txt  images/...     VTAB's own draw, as lists: `images/1.png 7` a line

That is how the benchmark is passed on. A set as its makers publish it, or as `vitrail data get` stores it, is drawn
from here: the numbers are then of other images than the paper's, and say so.
"""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from vitrail.data import public, shards
from vitrail.data.dataset import SPLITS, Dataset, Split, from_column
from vitrail.data.folder import Files
from vitrail.data.order import Order
from vitrail.data.shards import Sample
from vitrail.data.sources import open_data
from vitrail.data.table import Table, texts
from vitrail.errors import DataError
from vitrail.files import cache_home
from vitrail.plurals import plural
from vitrail.studies import raw, tasks
from vitrail.studies.raw import Integers, Labelled

LISTS = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}
DRAWN = {"train": 800, "val": 200}
Kind = Literal["lists", "raw", "public"]


def kind(task: str, root: Path) -> Kind | None:
    """In what form a task's images are here: lists before all others, None where there are none."""
    if (root / task / LISTS["test"]).is_file():
        return "lists"
    if raw.place(task, root) is not None:
        return "raw"
    name = tasks.named(task).public
    return "public" if name is not None and public.home(name).exists() else None


def opened(task: str, root: Path, seed: int) -> Dataset:
    """The images of a task; `seed` is of the draw, where it is not VTAB's own."""
    match kind(task, root):
        case "lists":
            return _listed(task, root / task)
        case "raw":
            folder = raw.place(task, root)
            assert folder is not None
            return _raw(task, folder, seed)
        case "public":
            return _public(task, seed)
    known = tasks.named(task)
    raise DataError(f"{root / task} has no {LISTS['test']}, and {known.title} is not here otherwise: {known.source}")


def _listed(task: str, root: Path) -> Dataset:
    """The set that VTAB's lists describe."""
    paths: list[str] = []
    labels: list[int] = []
    splits: list[int] = []
    classes = tasks.named(task).classes
    for split, name in LISTS.items():
        for number, line in enumerate(_lines(root / name), start=1):
            path, _, label = line.strip().rpartition(" ")
            if not path or not label.isdecimal() or int(label) >= classes:
                raise DataError(
                    f"{root / name}, line {number} is {line!r:.80}; it must be a path and 0 to {classes - 1}"
                )
            paths.append(path)
            labels.append(int(label))
            splits.append(SPLITS.index(split))
    rows = np.array(labels, dtype=np.int32)
    return _files(task, root, paths, rows, np.array(splits, dtype=np.int8), _short(splits))


def _lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not lines:
        raise DataError(f"{path} lists no image")
    return lines


def _files(
    task: str, root: Path, paths: list[str], labels: "np.ndarray", splits: "np.ndarray", notes: tuple[str, ...]
) -> Dataset:
    store = Files(root.resolve(), Table({**texts("path", paths), "label": labels.astype(np.int32), "split": splits}))
    return Dataset(name=str(root.resolve()), classes=_names(task), splits=from_column(store, splits), notes=notes)


def _names(task: str) -> tuple[str, ...]:
    return tuple(str(number) for number in range(tasks.named(task).classes))


def _short(splits: list[int]) -> tuple[str, ...]:
    """A note where there are other than 800 and 200 images."""
    counts = [splits.count(SPLITS.index(split)) for split in DRAWN]
    return () if counts == list(DRAWN.values()) else (f"{counts[0]} + {counts[1]} training images, not 800 + 200",)


# --- draws of our own ------------------------------------------------------------------------------------------------


def _raw(task: str, folder: Path, seed: int) -> Dataset:
    """A draw out of a set as its makers publish it; images that are in an array become shards in the cache, once."""
    stored = cache_home() / "vtab" / f"{task}-{_stamp(folder, seed)}"
    if stored.exists():
        return _noted(shards.open_set(stored), seed)
    found = raw.read(task, folder)
    rows = {split: _drawn(getattr(found, split), number, seed) for split, number in DRAWN.items()} | {
        "test": found.test
    }
    _check(task, found, rows)
    if found.pixels is not None:
        shards.write(stored, _pictures(found, rows), classes=_names(task), origin={"set": task, "seed": seed})
        return _noted(shards.open_set(stored), seed)
    splits = np.repeat(np.arange(len(SPLITS), dtype=np.int8), [len(rows[split]) for split in SPLITS])
    order = np.concatenate([rows[split] for split in SPLITS])
    paths = [found.paths[row] for row in order.tolist()]
    notes = (*found.notes, *_short(splits.tolist()))
    return _noted(_files(task, found.root, paths, found.labels[order], splits, notes), seed)


def _check(task: str, found: Labelled, rows: dict[str, Integers]) -> None:
    classes = tasks.named(task).classes
    for split, some in rows.items():
        if not len(some):
            raise DataError(f"{found.root} has no image for {split}")
        labels = found.labels[some]
        if labels.min() < 0 or labels.max() >= classes:
            raise DataError(
                f"{found.root}: {split} has labels {labels.min()} to {labels.max()} of {plural(classes, 'class')}"
            )


def _pictures(found: Labelled, rows: dict[str, Integers]) -> Iterator[Sample]:
    """Images of an array, as PNG, one split after the other."""
    assert found.pixels is not None
    for split in SPLITS:
        for row in rows[split].tolist():
            file = io.BytesIO()
            Image.fromarray(found.pixels[row] * np.uint8(255 // found.white)).save(file, "PNG", compress_level=1)
            yield Sample(split, f"{row:06d}.png", file.getvalue(), (int(found.labels[row]),))


def _public(task: str, seed: int) -> Dataset:
    """A draw out of a set that `vitrail data get` stored."""
    known = tasks.named(task)
    assert known.public is not None
    whole = open_data(known.public)
    splits = {
        split: Split(part.store, np.asarray(part.rows)[_drawn(np.arange(len(part)), DRAWN.get(split), seed)])
        for split, part in whole.splits.items()
    }
    return _noted(Dataset(name=whole.name, classes=whole.classes, splits=splits), seed)


def _drawn(rows: Integers, number: int | None, seed: int) -> Integers:
    """So many of the rows at random, in their order; all of them for None."""
    if number is None or len(rows) <= number:
        return np.sort(rows)
    return np.sort(rows[Order(seed=seed, count=len(rows)).samples(np.arange(number))])


def _noted(dataset: Dataset, seed: int) -> Dataset:
    note = f"the training images are a draw of vitrail's own (seed {seed}), not VTAB's"
    return Dataset(name=dataset.name, classes=dataset.classes, splits=dataset.splits, notes=(note, *dataset.notes))


def _stamp(folder: Path, seed: int) -> str:
    """A word for a folder's files as they are, and the draw."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    return hashlib.sha256(repr((str(folder.resolve()), files, seed)).encode()).hexdigest()[:16]
