"""`vitrail data check DATA`: what a set is worth, before anyone trains on it."""

import json as json_module
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitrail.cli import output
from vitrail.errors import DataError, UsageError

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset

_MAX_LISTED = 20
_SLOW_COMPARISON_IMAGES = 20_000  # images
COMPARISON_SECONDS = (
    0.002  # seconds of a core, of an image with those of another dataset (docs/experiments/duplicates.md)
)
_NOT_COMPARED_REASON = "as they cannot be read or are more than the 200,000 that are decoded without --all"


def main(
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    against: Annotated[str | None, tyro.conf.arg(metavar="OTHER")] = None,
    decode_all: Annotated[bool, tyro.conf.arg(name="all")] = False,
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
        decode_all: Decode all images of a set of more than 200,000, and compare all of them with OTHER's.
        skip_bad: End with exit code 0 although some images are bad.
        out: Where the report goes; an earlier one is replaced.
        json: Print the report as JSON.
    """
    from vitrail.data.audit import audit_dataset, keep_eval_splits
    from vitrail.data.image_scan import MAX_DECODED_IMAGES, scan_dataset
    from vitrail.data.sources import open_dataset
    from vitrail.files import write_atomically

    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file for the report")
    dataset = open_dataset(data)
    other = None if against is None else keep_eval_splits(open_dataset(against))
    images = sum(map(len, dataset.splits.values()))
    output.print_note(f"data: {dataset.name}")
    if images > MAX_DECODED_IMAGES:
        output.print_note(_describe_coverage(dataset, images, decode_all=decode_all))
    with output.show_progress("looking at images") as progress:
        seen = scan_dataset(dataset, progress=progress, max_decoded=images if decode_all else MAX_DECODED_IMAGES)
        against_seen = None if other is None else scan_dataset(other, progress=progress)
    if len(seen.fingerprinted_images) > _SLOW_COMPARISON_IMAGES:
        output.print_note("looking for copies (two minutes for 100,000 images)")
    report = audit_dataset(seen, against_seen)
    if json:
        output.print_json(report)
    else:
        output.print_table([*_format_report(report), ("report", str(out))])
    with write_atomically(out, overwrite=True) as fresh:  # last: where it cannot be written, the result was shown
        fresh.write_text(json_module.dumps(report, indent=1))
    across = report["duplicates"]["across_splits"]
    copies = f", {output.pluralize(across, 'group')} of copies across splits" if across else ""
    count, bad = output.pluralize(images, "image"), len(report["bad"])
    output.print_note(f"{count}, {f'{bad:,} of them' if bad else 'none'} bad{copies}; report: {out}")
    if report["bad"] and not skip_bad:
        raise DataError(
            f"{output.pluralize(len(report['bad']), 'bad image')} in {data}, named in {out}. Repair, remove or leave out:"
            f" vitrail data pack {data} OUT --leave-out {out} (--skip-bad ends this command with 0 all the same)"
        )


def _describe_coverage(dataset: "Dataset", images: int, *, decode_all: bool) -> str:
    """How many images of a large dataset are decoded and compared, and what all of them would take."""
    from vitrail.data.image_scan import BASE_BYTES, BYTES_PER_IMAGE, MAX_DECODED_IMAGES, time_image
    from vitrail.runtime.workers import count_available_cores

    each, cores = time_image(dataset), count_available_cores()
    hours = images * (each + COMPARISON_SECONDS) / cores / 3600
    cost = (
        f"about {hours:,.1f} hours on {output.pluralize(cores, 'core')}, at {1000 * each:.1f} ms to decode an image here and"
        f" {1000 * COMPARISON_SECONDS:.0f} ms to compare it, and {output.format_bytes(BASE_BYTES + images * BYTES_PER_IMAGE)} of memory"
    )
    if decode_all:
        return f"note: all {images:,} images are decoded and compared: {cost}"
    share = MAX_DECODED_IMAGES / images
    return (
        f"note: {MAX_DECODED_IMAGES:,} of {images:,} images ({share:.1%}), drawn at random, are decoded and compared; --all does it"
        f" with all of them: {cost}"
    )


def _format_report(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The report in lines."""
    images, sizes, color = report["images"], report["sizes"], report["color"]
    yield "images", ", ".join(f"{split} {output.format_count(number)}" for split, number in images.items())
    for note in report["notes"]:
        yield "note", note
    earlier = (
        f", {output.format_count(report['from_earlier_check'])} of them before" if report["from_earlier_check"] else ""
    )
    headers = (
        f"; of {output.format_count(report['headers_only'])} more only the header" if report["headers_only"] else ""
    )
    yield "decoded", f"{output.format_count(report['decoded'])}{earlier}{headers}"
    yield from _format_classes(report)
    yield (
        "formats",
        ", ".join(f"{name} {output.format_count(number)}" for name, number in report["formats"].items()) or "none",
    )
    yield "sizes", ", ".join(f"{side} {v['min']} to {v['max']} (median {v['median']})" for side, v in sizes.items())
    if color["mean"]:
        mean, std = (" ".join(f"{value:.4f}" for value in color[name]) for name in ("mean", "std"))
        yield "colour", f"mean {mean}, std {std} ({color['split']}); {output.format_count(color['gray'])} grey"
    yield from _format_duplicates(report)
    yield "bad", output.format_count(len(report["bad"]))
    yield from _list_first_lines([f"{_format_image(row)}: {row['reason']}" for row in report["bad"]])


def _format_classes(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    classes = report["classes"]
    if not classes:
        yield "classes", "none: the images have no labels"
        return
    split = "train" if "train" in report["images"] else next(iter(report["images"]))
    by_size = sorted(classes, key=lambda row: row[split])
    least, most = by_size[0], by_size[-1]
    kind = ", of which an image may have several" if report["multi_label"] else ""
    span = f"{least[split]:,} ({least['name']}) to {most[split]:,} ({most['name']})"
    yield "classes", f"{output.format_count(len(classes))}{kind}; images in a class of {split}: {span}"
    if report["layout_warning"]:
        yield "warning", report["layout_warning"]
    empty = [row["name"] for row in classes if not row[split]]
    if empty:
        yield "warning", f"{output.pluralize(len(empty), 'class')} without an image in {split}: {', '.join(empty[:5])}"
    elif most[split] > 10 * least[split]:
        yield "warning", f"strong imbalance: {most['name']} has {most[split] / least[split]:.0f} times {least['name']}"


def _format_duplicates(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    found = report["duplicates"]
    near = found["near"]
    alike = f"{output.pluralize(near, 'group')} that {'looks' if near == 1 else 'look'} the same"
    shown = f"{output.pluralize(found['exact'], 'group')} of equal files, {alike}"
    yield "copies", f"{shown}; compared {_format_part(found['compared'], found['total'], 'image')}"
    if found["across_splits"]:
        yield (
            "warning",
            f"{output.pluralize(found['across_splits'], 'group')} of these across splits: results look too good",
        )
        across = [group for group in found["groups"] if len({image["split"] for image in group["images"]}) > 1]
        yield from _list_first_lines(
            [f"{group['kind']}: {', '.join(map(_format_image, group['images'][:4]))}" for group in across]
        )
    if found["different_labels"]:
        yield "warning", f"{output.pluralize(found['different_labels'], 'group')} of these with different labels"
    if "against" in report:
        other = report["against"]
        number = len(other["matches"])
        count = f"{output.pluralize(number, 'image')} {'shows' if number == 1 else 'show'}"
        shown = f"{count} what one of its {_format_part(other['compared'], other['total'])} shows"
        compared = _format_part(other["searched"], other["searched_total"], "image")
        yield "against", f"{other['data']}: {shown}; compared {compared}"
        if left := other["searched_total"] - other["searched"]:
            was = "was" if left == 1 else "were"
            yield "warning", f"{output.pluralize(left, 'image')} {was} not compared with it, {_NOT_COMPARED_REASON}"
        yield from _list_first_lines(
            [f"{row['kind']}: {_format_image(row)} = {row['matched_name']}" for row in other["matches"]]
        )


def _format_part(number: int, whole: int, noun: str = "") -> str:
    total = output.pluralize(whole, noun) if noun else f"{whole:,}"
    return total if number == whole else f"{number:,} of {total}"


def _format_image(row: dict[str, Any]) -> str:
    return f"{row['split']}: {row['name']}"


def _list_first_lines(lines: list[str]) -> Iterator[tuple[str, str]]:
    """The first few lines, and how many more there are."""
    for line in lines[:_MAX_LISTED]:
        yield "", line
    if len(lines) > _MAX_LISTED:
        yield "", f"... and {len(lines) - _MAX_LISTED:,} more in the report"
