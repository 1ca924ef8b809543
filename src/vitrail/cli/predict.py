"""`vitrail predict MODEL PATHS...`: what images show, a row for each, in their order."""

import contextlib
import csv
import io
import itertools
import json as codec
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import tyro

from vitrail import files, remote
from vitrail.cli import runs, show
from vitrail.errors import DataError, UsageError

if TYPE_CHECKING:
    from vitrail.predict import Answer, Classifier
    from vitrail.train.distributed import Group


def main(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATHS")],
    top: Annotated[int, tyro.conf.arg(metavar="N")] = 1,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    batch: Annotated[int, tyro.conf.arg(metavar="N")] = 64,
    device: str | None = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    json: bool = False,
) -> None:
    """Label images. One that cannot be read is named in its row, the others go on, and the exit code is then 3.

    Args:
        model: A file or folder of any known format, hf:ORG/NAME, timm:NAME, or a preset.
        paths: Images, folders of images, or - for a list of paths on standard input, one a line.
        top: Labels for each image.
        out: A file for the rows; standard output unless told otherwise.
        batch: Images at once.
        device: cpu, cuda or mps; the best there is unless told otherwise.
        workers: Threads that read images; one for each core unless told otherwise.
        json: An object for each image, one a line, in place of CSV.
    """
    if top < 1 or batch < 1:
        raise UsageError(f"--top is {top} and --batch {batch}; both must be at least 1")
    if not paths:
        raise UsageError("say which images: files, folders, or - for a list on standard input")
    if out is not None and (remote.is_remote(str(out)) or out.exists()):
        raise UsageError(f"--out {out} must be a file here that does not exist yet")
    with runs.process(device) as (group, there):
        from vitrail.data.workers import available
        from vitrail.predict import Classifier
        from vitrail.train import distributed
        from vitrail.weights.load import load

        classifier = Classifier(load(model), device=there, batch_size=batch)
        threads = max(1, available() if workers is None else workers)
        images = distributed.led(lambda: list(_images(paths)))
        rows = _answered(classifier, images, group, top, threads)
        failed = _write(rows, len(images), out, as_json=json) if group.leads else sum(1 for _ in rows)
    if group.leads and failed:
        raise DataError(f"{failed:,} of {len(images):,} images cannot be read; their rows say why")


def _images(paths: Sequence[str]) -> Iterator[str]:
    """The images that are meant, those of a folder in the order of their names."""
    from vitrail.data.dataset import SUFFIXES

    given = itertools.chain.from_iterable(sys.stdin.read().split("\n") if path == "-" else (path,) for path in paths)
    for name in given:
        if not name.strip():
            continue
        path = Path(name)
        if not path.is_dir():
            yield name  # where it does not exist, its row will say so
            continue
        found = sorted(str(each) for each in path.rglob("*") if each.suffix.lower() in SUFFIXES and each.is_file())
        if not found:
            raise DataError(f"{path} holds no image: {', '.join(SUFFIXES)} are known")
        yield from found


def _answered(
    classifier: "Classifier", images: Sequence[str], group: "Group", top: int, threads: int
) -> Iterator[tuple[str, "Answer | DataError"]]:
    """Each image with its answer, in order; of every few batches each process computes one."""
    from vitrail.train import distributed

    exchange: Callable[[Any], list[Any]] = distributed.exchange() if group.world > 1 else lambda mine: [mine]
    size = classifier.batch_size
    for start in range(0, len(images), size * group.world):
        first = start + group.rank * size
        mine = images[first : first + size]
        answers = itertools.chain.from_iterable(exchange(classifier.each(mine, top, threads=threads)))
        yield from zip(images[start : start + size * group.world], answers, strict=True)


def _write(rows: Iterator[tuple[str, "Answer | DataError"]], total: int, out: Path | None, *, as_json: bool) -> int:
    """How many images could not be read, after all rows are written."""
    from vitrail.predict import UNSURE

    failed = 0
    with contextlib.ExitStack() as stack:
        file: TextIO = sys.stdout
        if out is not None:
            fresh = stack.enter_context(files.replacing(out))
            file = stack.enter_context(fresh.open("w", newline="", encoding="utf-8", errors="surrogateescape"))
        elif isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="surrogateescape")  # a file's name may be no valid text
        report = stack.enter_context(show.progress("predicting"))
        table = csv.writer(file)
        if not as_json:
            table.writerow(("image", "rank", "label", "probability", "error"))
        for number, (image, answer) in enumerate(rows, 1):
            failed += isinstance(answer, DataError)
            if as_json:
                row: dict[str, Any] = {"image": image}
                row |= {"error": str(answer)} if isinstance(answer, DataError) else {"labels": answer}
                file.write(codec.dumps(row) + "\n")
            elif isinstance(answer, DataError):
                table.writerow((image, "", "", "", str(answer)))
            else:
                first = 0 if answer[0][0] == UNSURE else 1
                for rank, (label, probability) in enumerate(answer, first):
                    table.writerow((image, rank, label, f"{probability:.6f}", ""))
            report(number, total)
    return failed
