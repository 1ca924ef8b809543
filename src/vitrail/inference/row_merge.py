"""Parts of a file of rows, as `--part` writes them, merged to the file that a single command would have written."""

import dataclasses
import itertools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vitrail import files, remote
from vitrail.data.image_parts import Part, find_part_names, parse_part
from vitrail.errors import DataError, UsageError
from vitrail.formatting import join_first_names, pluralize
from vitrail.inference.prediction_rows import WrittenRows
from vitrail.inference.row_files import FINISHED, MODEL_NAME, RowFile, read_record

PART, LISTING = "--part", "listing"
"""The keys of a part's record: which it is, and the digest of the list that was divided."""


class FinishedPart(NamedTuple):
    """A part all of whose rows are written."""

    part: Part
    file: RowFile
    images: int
    failed: int


class MergedRows(NamedTuple):
    """What was merged."""

    parts: int
    images: int
    failed: int


def find_parts(out: Path) -> list[Path]:
    """The parts of a file, beside it."""
    names = {path.name: path for path in out.parent.iterdir()} if out.parent.is_dir() else {}
    parts = find_part_names(out.name, list(names))
    if not parts:
        raise UsageError(f"{out.parent} has no parts of {out.name}, such as {out.stem}-00001-of-00128{out.suffix}")
    counts = sorted({part.of for part in parts})
    if len(counts) > 1:
        raise UsageError(f"{out.parent} has parts of {out.name} of several counts, {counts}: name those to merge")
    return [names[parts[part]] for part in sorted(parts)]


def download_parts(url: str, folder: Path) -> None:
    """Download the parts of an uploaded file, and the files beside them, where the folder does not have them."""
    parent, _, name = url.rpartition("/")
    listing = remote.list_files(parent)
    parts = find_part_names(name, [path.partition("/")[0] for path in listing])
    stems = {Path(part).stem for part in parts.values()}
    for path, file in listing.items():
        target = folder / path
        if path.partition("/")[0].partition(".")[0] not in stems or (
            target.exists() and target.stat().st_size == file.size
        ):
            continue
        with files.write_atomically(target, overwrite=True) as fresh:
            remote.copy_from_remote(remote.join_url(parent, path), fresh)


def merge_parts(out: Path, paths: Sequence[Path], *, url: str | None = None, overwrite: bool = False) -> MergedRows:
    """Merge finished parts of the same command, all of them, to a whole that appears complete or not at all.

    With a URL it is uploaded there.
    """
    parts = sorted((_read_part(path) for path in paths), key=lambda each: each.part)
    _check_complete(parts)
    _check_same_command(parts)
    for each in parts:
        _check_count(each.file, each.images)
    command = {key: value for key, value in parts[0].file.command.items() if key not in (PART, LISTING)}
    whole = dataclasses.replace(parts[0].file, path=out, command=command, url=url)
    if not overwrite:
        whole.check_url_free()
    for path in (whole.path, whole.record_path, *whole.store.list_files()):
        files.check_path_free(path, overwrite=overwrite)
    files.make_folder(out.parent)
    result = MergedRows(len(parts), sum(each.images for each in parts), sum(each.failed for each in parts))
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        staged = dataclasses.replace(whole, path=staging / out.name)
        staged.store.write_merged([each.file.store for each in parts])
        _check_count(staged, result.images)
        staged.record_finished(WrittenRows(result.images, result.failed))
        _move_into_place(staged, whole)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    whole.upload()
    return result


def _read_part(path: Path) -> FinishedPart:
    record = read_record(path.with_name(f"{path.name}.json"))
    if record is None or PART not in record:
        raise UsageError(f"{path} is no part: none of its record says so; name files that `predict --part` wrote")
    finished = record.pop(FINISHED, None)
    if finished is None or not path.exists():
        raise UsageError(f"{path} is unfinished: repeat its command, with --part {record[PART]}, to complete it")
    file = RowFile(
        path=path,
        row_format=record["format"],
        command=record,
        batch=record["--batch"],
        ranks=finished["ranks"],
        features=finished["features"],
        float16=record["--float16"],
        attention=record["--attention"] is not None,
        is_finished=True,
    )
    return FinishedPart(parse_part(record[PART]), file, finished["images"], finished["failed"])


def _check_complete(parts: Sequence[FinishedPart]) -> None:
    """Refuse a missing part, and one that is given twice."""
    for first, second in itertools.pairwise(parts):
        if first.part == second.part:
            raise UsageError(f"{first.file.path} and {second.file.path} are both part {first.part}: name one of them")
    count = parts[0].part.of
    missing = sorted(set(range(1, count + 1)) - {each.part.number for each in parts})
    if missing:
        names = join_first_names([f"{number}/{count}" for number in missing])
        raise UsageError(f"{pluralize(len(missing), 'part')} of {count:,} missing: run --part {names}")


def _check_same_command(parts: Sequence[FinishedPart]) -> None:
    """Refuse parts of several models, options or lists of images."""
    first = parts[0].file
    for other in (each.file for each in parts[1:]):
        for key in sorted((first.command.keys() | other.command.keys()) - {PART, MODEL_NAME}):
            if first.command.get(key) != other.command.get(key):
                what = {"model": "another model", LISTING: "another list of images"}.get(key, f"another {key}")
                raise UsageError(f"{other.path} was made with {what} than {first.path}: make both with the same")


def _check_count(file: RowFile, images: int) -> None:
    count = sum(1 for _ in file.store.iterate_stored())
    if count != images:
        raise DataError(
            f"{file.path} has {pluralize(count, 'image')}, and its record says {images:,}: it is damaged; remove it and"
            " repeat its command"
        )


def _move_into_place(staged: RowFile, whole: RowFile) -> None:
    """Rename what was written, the file of that name last."""
    companions = [path.name for path in staged.path.parent.iterdir() if path != staged.path]
    for name in (*companions, staged.path.name):
        source, target = staged.path.with_name(name), whole.path.with_name(name)
        for path in [source, *source.rglob("*")] if source.is_dir() else [source]:
            files.fsync_path(path)
        if target.is_dir():
            shutil.rmtree(target)
        source.replace(target)
    files.fsync_path(whole.path.parent)
