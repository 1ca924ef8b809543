"""`vitrail data check DATA`: what a set is worth, before anyone trains on it."""

import json as json_module
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitrail.cli import show
from vitrail.errors import DataError, UsageError

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset

_SHOWN = 20
_LONG = 20_000  # images
COMPARISON = 0.002  # seconds of a core, of an image with those of another dataset (docs/experiments/duplicates.md)
_LEFT = "as they cannot be read or are more than the 200,000 that are decoded without --all"


def main(
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    against: Annotated[str | None, tyro.conf.arg(metavar="OTHER")] = None,
    everything: Annotated[bool, tyro.conf.arg(name="all")] = False,
    skip_bad: bool = False,
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("data_report.json"),
    json: bool = False,
) -> None:
    """Decode every image once; name the bad ones, count classes, find copies inside and across splits.

    Up to 200,000 images are decoded whole. Of a larger set so many, drawn at random, are, and the rest are known by
    their headers, unless --all decodes them too. What was compared is stated. The whole report goes to a JSON file,
    from which `data pack --leave-out` knows what to leave out.

    Args:
        data: A folder, a .csv or .jsonl, shards, a set that was got, or hf:ORG/NAME.
        against: A set whose validation and test images should not occur in this one; without such, all of its images.
        everything: Decode all images of a set of more than 200,000, and compare all of them with OTHER's.
        skip_bad: End with exit code 0 although some images are bad.
        out: Where the report goes; an earlier one is replaced.
        json: Print the report as JSON.
    """
    from vitrail.data.check import check, keep_held_out
    from vitrail.data.examine import LIMIT, examine
    from vitrail.data.sources import open_data
    from vitrail.files import replacing

    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file for the report")
    dataset = open_data(data)
    other = None if against is None else keep_held_out(open_data(against))
    images = sum(map(len, dataset.splits.values()))
    show.note(f"data: {dataset.name}")
    if images > LIMIT:
        show.note(_coverage(dataset, images, everything=everything))
    with show.progress("looking at images") as progress:
        seen = examine(dataset, progress=progress, limit=images if everything else LIMIT)
        against_seen = None if other is None else examine(other, progress=progress)
    if len(seen.fingerprinted) > _LONG:
        show.note("looking for copies (two minutes for 100,000 images)")
    report = check(seen, against_seen)
    if json:
        show.as_json(report)
    else:
        show.table([*_rows(report), ("report", str(out))])
    with replacing(out, overwrite=True) as fresh:  # last: where it cannot be written, the result was shown
        fresh.write_text(json_module.dumps(report, indent=1))
    across = report["duplicates"]["across_splits"]
    copies = f", {show.plural(across, 'group')} of copies across splits" if across else ""
    count, bad = show.plural(images, "image"), len(report["bad"])
    show.note(f"{count}, {f'{bad:,} of them' if bad else 'none'} bad{copies}; report: {out}")
    if report["bad"] and not skip_bad:
        raise DataError(
            f"{show.plural(len(report['bad']), 'bad image')} in {data}, named in {out}. Repair, remove or leave out:"
            f" vitrail data pack {data} OUT --leave-out {out} (--skip-bad ends this command with 0 all the same)"
        )


def _coverage(dataset: "Dataset", images: int, *, everything: bool) -> str:
    """How many images of a large dataset are decoded and compared, and what all of them would take."""
    from vitrail.data.examine import BASE_MEMORY, LIMIT, MEMORY, time_image
    from vitrail.data.workers import available

    each, cores = time_image(dataset), available()
    hours = images * (each + COMPARISON) / cores / 3600
    cost = (
        f"about {hours:,.1f} hours on {show.plural(cores, 'core')}, at {1000 * each:.1f} ms to decode an image here and"
        f" {1000 * COMPARISON:.0f} ms to compare it, and {show.size(BASE_MEMORY + images * MEMORY)} of memory"
    )
    if everything:
        return f"note: all {images:,} images are decoded and compared: {cost}"
    share = LIMIT / images
    return (
        f"note: {LIMIT:,} of {images:,} images ({share:.1%}), drawn at random, are decoded and compared; --all does it"
        f" with all of them: {cost}"
    )


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The report in lines."""
    images, sizes, colour = report["images"], report["sizes"], report["colour"]
    yield "images", ", ".join(f"{split} {show.count(number)}" for split, number in images.items())
    for note in report["notes"]:
        yield "note", note
    earlier = f", {show.count(report['from_earlier_check'])} of them before" if report["from_earlier_check"] else ""
    headers = f"; of {show.count(report['headers_only'])} more only the header" if report["headers_only"] else ""
    yield "decoded", f"{show.count(report['decoded'])}{earlier}{headers}"
    yield from _classes(report)
    yield "formats", ", ".join(f"{name} {show.count(number)}" for name, number in report["formats"].items()) or "none"
    yield "sizes", ", ".join(f"{side} {v['least']} to {v['most']} (median {v['median']})" for side, v in sizes.items())
    if colour["mean"]:
        mean, std = (" ".join(f"{value:.4f}" for value in colour[name]) for name in ("mean", "std"))
        yield "colour", f"mean {mean}, std {std} ({colour['of']}); {show.count(colour['grey'])} grey"
    yield from _copies(report)
    yield "bad", show.count(len(report["bad"]))
    yield from _listed([f"{_image(row)}: {row['reason']}" for row in report["bad"]])


def _classes(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    classes = report["classes"]
    if not classes:
        yield "classes", "none: the images have no labels"
        return
    split = "train" if "train" in report["images"] else next(iter(report["images"]))
    by_size = sorted(classes, key=lambda row: row[split])
    least, most = by_size[0], by_size[-1]
    kind = ", of which an image may have several" if report["several_labels"] else ""
    span = f"{least[split]:,} ({least['name']}) to {most[split]:,} ({most['name']})"
    yield "classes", f"{show.count(len(classes))}{kind}; images in a class of {split}: {span}"
    if report["question"]:
        yield "warning", report["question"]
    empty = [row["name"] for row in classes if not row[split]]
    if empty:
        yield "warning", f"{show.plural(len(empty), 'class')} without an image in {split}: {', '.join(empty[:5])}"
    elif most[split] > 10 * least[split]:
        yield "warning", f"strong imbalance: {most['name']} has {most[split] / least[split]:.0f} times {least['name']}"


def _copies(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    found = report["duplicates"]
    near = found["near"]
    alike = f"{show.plural(near, 'group')} that {'looks' if near == 1 else 'look'} the same"
    shown = f"{show.plural(found['exact'], 'group')} of equal files, {alike}"
    yield "copies", f"{shown}; compared {_part(found['compared'], found['of'], 'image')}"
    if found["across_splits"]:
        yield "warning", f"{show.plural(found['across_splits'], 'group')} of these across splits: results look too good"
        across = [group for group in found["groups"] if len({image["split"] for image in group["images"]}) > 1]
        yield from _listed([f"{group['kind']}: {', '.join(map(_image, group['images'][:4]))}" for group in across])
    if found["different_labels"]:
        yield "warning", f"{show.plural(found['different_labels'], 'group')} of these with different labels"
    if "against" in report:
        other = report["against"]
        number = len(other["found"])
        count = f"{show.plural(number, 'image')} {'shows' if number == 1 else 'show'}"
        shown = f"{count} what one of its {_part(other['compared'], other['of'])} shows"
        compared = _part(other["searched"], other["searched_of"], "image")
        yield "against", f"{other['data']}: {shown}; compared {compared}"
        if left := other["searched_of"] - other["searched"]:
            was = "was" if left == 1 else "were"
            yield "warning", f"{show.plural(left, 'image')} {was} not compared with it, {_LEFT}"
        yield from _listed([f"{row['kind']}: {_image(row)} = {row['shows']}" for row in other["found"]])


def _part(number: int, whole: int, noun: str = "") -> str:
    total = show.plural(whole, noun) if noun else f"{whole:,}"
    return total if number == whole else f"{number:,} of {total}"


def _image(row: dict[str, Any]) -> str:
    return f"{row['split']}: {row['name']}"


def _listed(lines: list[str]) -> Iterator[tuple[str, str]]:
    """The first few lines, and how many more there are."""
    for line in lines[:_SHOWN]:
        yield "", line
    if len(lines) > _SHOWN:
        yield "", f"... and {len(lines) - _SHOWN:,} more in the report"
