"""`vitrail data check|get|list|pack|remove`: datasets, before anyone trains on them."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from vitrail.api.models import load_trained
from vitrail.cli import output
from vitrail.cli.arguments.data import (
    CheckArguments,
    GetArguments,
    ListDatasetsArguments,
    PackArguments,
    RemoveArguments,
)
from vitrail.data import image_scan, public_datasets
from vitrail.data.audit import EmbeddingPairs, audit_dataset, keep_eval_splits, read_excluded_images
from vitrail.data.dataset import Dataset, without_images
from vitrail.data.imagenet import describe_release
from vitrail.data.pack import pack
from vitrail.data.relabel import relabel_dataset
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.feature_duplicates import DEFAULT_THRESHOLD, extract_scan_features, find_feature_duplicates
from vitrail.files import get_data_home, write_atomically
from vitrail.formatting import format_bytes, format_count, pluralize
from vitrail.inference.cosine_search import check_threshold
from vitrail.runtime.devices import resolve_device
from vitrail.runtime.workers import count_available_cores, count_loader_workers
from vitrail.weights.trained import Trained

_MAX_LISTED = 20
_SLOW_COMPARISON_IMAGES = 20_000
COMPARISON_SECONDS = 0.002  # of one core, to compare an image with another dataset (docs/experiments/duplicates.md)
_NOT_COMPARED_REASON = "as they cannot be read or are more than the 200,000 that are decoded without --all"

Rows = Iterator[tuple[str, str]]


# --- data check ------------------------------------------------------------------------------------------------------


def check_dataset(arguments: CheckArguments) -> None:
    """`vitrail data check DATA`: print what is wrong with a dataset, and write the report."""
    data, out = arguments.data, arguments.out
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file for the report")
    dataset = open_dataset(data)
    num_images = sum(map(len, dataset.splits.values()))
    report = _audit(dataset, num_images, arguments)
    if arguments.output.json:
        output.print_json(report)
    else:
        output.print_table([*_format_report(report), ("report", str(out))])
    with write_atomically(out, overwrite=True) as fresh:  # last: where it cannot be written, the result was shown
        fresh.write_text(json.dumps(report, indent=1))
    images, bad = pluralize(num_images, "image"), len(report["bad"])
    across = report["duplicates"]["across_splits"]
    duplicates = f", {pluralize(across, 'group')} of duplicates across splits" if across else ""
    output.print_note(f"{images}, {f'{bad:,} of them' if bad else 'none'} bad{duplicates}; report: {out}")
    if bad and not arguments.skip_bad:
        raise DataError(
            f"{pluralize(bad, 'bad image')} in {data}, named in {out}. Repair, remove or leave out:"
            f" vitrail data pack {data} OUT --leave-out {out} (--skip-bad exits with 0 anyway)"
        )


def _audit(dataset: Dataset, num_images: int, arguments: CheckArguments) -> dict[str, Any]:
    trained = _load_embedding_model(arguments)
    other = None if arguments.against is None else keep_eval_splits(open_dataset(arguments.against))
    output.print_note(f"data: {dataset.name}")
    max_decoded = num_images if arguments.decode_all else image_scan.MAX_DECODED_IMAGES
    if num_images > image_scan.MAX_DECODED_IMAGES:
        output.print_note(_describe_coverage(dataset, num_images, decode_all=arguments.decode_all))
    with output.show_progress("reading images") as progress:
        scan = image_scan.scan_dataset(dataset, progress=progress, max_decoded=max_decoded)
        other_scan = None if other is None else image_scan.scan_dataset(other, progress=progress)
    if len(scan.fingerprinted_images) > _SLOW_COMPARISON_IMAGES:
        output.print_note("looking for duplicates (two minutes for 100,000 images)")
    pairs = None if trained is None else _find_embedding_pairs(scan, trained, arguments)
    return audit_dataset(scan, other_scan, pairs)


def _load_embedding_model(arguments: CheckArguments) -> Trained | None:
    """The model of --embedding, loaded before the images are read; None without the option."""
    if arguments.threshold is not None:
        if arguments.embedding is None:
            raise UsageError(f"--threshold {arguments.threshold:g} is of pairs by features: add --embedding MODEL")
        check_threshold(arguments.threshold)
    if arguments.embedding is None:
        return None
    trained = load_trained(arguments.embedding, output.print_note)
    return dataclasses.replace(trained, model=trained.model.to(resolve_device(arguments.compute.device)))


def _find_embedding_pairs(scan: image_scan.DatasetScan, trained: Trained, arguments: CheckArguments) -> EmbeddingPairs:
    """The probable duplicates by the features of a model."""
    assert arguments.embedding is not None
    batch, workers = arguments.compute.batch, count_loader_workers(arguments.compute.workers)
    threshold = DEFAULT_THRESHOLD if arguments.threshold is None else arguments.threshold
    with output.show_progress("computing features") as progress:
        found = extract_scan_features(trained, scan, batch=batch, workers=workers, progress=progress)
    device = next(trained.model.parameters()).device
    with output.show_progress("comparing features") as progress:
        pairs = find_feature_duplicates(found.values, threshold, device=device, progress=progress)
    return EmbeddingPairs(
        arguments.embedding, threshold, len(found.images), found.images[pairs.rows], pairs.similarities
    )


def _describe_coverage(dataset: Dataset, num_images: int, *, decode_all: bool) -> str:
    """How many images of a large dataset are decoded and compared, and what all of them would take."""
    seconds, cores = image_scan.time_image(dataset), count_available_cores()
    hours = num_images * (seconds + COMPARISON_SECONDS) / cores / 3600
    memory = format_bytes(image_scan.BASE_BYTES + num_images * image_scan.BYTES_PER_IMAGE)
    cost = (
        f"about {hours:,.1f} hours on {pluralize(cores, 'core')}, at {1000 * seconds:.1f} ms to decode an image"
        f" here and {1000 * COMPARISON_SECONDS:.0f} ms to compare it, and {memory} of memory"
    )
    if decode_all:
        return f"note: all {num_images:,} images are decoded and compared: {cost}"
    sample = image_scan.MAX_DECODED_IMAGES
    return (
        f"note: a random sample of {sample:,} of {num_images:,} images ({sample / num_images:.1%}) is decoded and"
        f" compared; --all takes all of them: {cost}"
    )


def _format_report(report: dict[str, Any]) -> Rows:
    sizes, color = report["sizes"], report["color"]
    yield "images", _format_counts(report["images"])
    for note in report["notes"]:
        yield "note", note
    cached, headers = report["from_earlier_check"], report["headers_only"]
    earlier = f", {format_count(cached)} of them in an earlier check" if cached else ""
    more = f"; of {format_count(headers)} more only the header" if headers else ""
    yield "decoded", f"{format_count(report['decoded'])}{earlier}{more}"
    yield from _format_classes(report)
    yield "formats", _format_counts(report["formats"]) or "none"
    yield "sizes", ", ".join(f"{side} {v['min']} to {v['max']} (median {v['median']})" for side, v in sizes.items())
    if color["mean"]:
        mean, std = (" ".join(f"{value:.4f}" for value in color[name]) for name in ("mean", "std"))
        yield "color", f"mean {mean}, std {std} ({color['split']}); {format_count(color['gray'])} gray"
    yield from _format_duplicates(report)
    yield "bad", format_count(len(report["bad"]))
    yield from _list_first_lines([f"{_format_image(row)}: {row['reason']}" for row in report["bad"]])


def _format_classes(report: dict[str, Any]) -> Rows:
    classes = report["classes"]
    if not classes:
        yield "classes", "none: the images have no labels"
        return
    split = "train" if "train" in report["images"] else next(iter(report["images"]))
    by_size = sorted(classes, key=lambda row: row[split])
    smallest, largest = by_size[0], by_size[-1]
    kind = ", of which an image may have several" if report["multi_label"] else ""
    span = f"{smallest[split]:,} ({smallest['name']}) to {largest[split]:,} ({largest['name']})"
    span = f"{largest[split]:,}" if smallest[split] == largest[split] else span
    yield "classes", f"{format_count(len(classes))}{kind}; images per class of {split}: {span}"
    if report["layout_warning"]:
        yield "warning", report["layout_warning"]
    if len(classes) == 1 and not report["multi_label"]:
        yield "warning", "one class: a classifier needs two or more, one subfolder each"
    empty = [row["name"] for row in classes if not row[split]]
    if empty:
        yield (
            "warning",
            f"{pluralize(len(empty), 'class')} without an image in {split}: {', '.join(empty[:5])}",
        )
    elif largest[split] > 10 * smallest[split]:
        ratio = f"{largest[split] / smallest[split]:.0f} times"
        yield "warning", f"strong imbalance: {largest['name']} has {ratio} the images of {smallest['name']}"


def _format_duplicates(report: dict[str, Any]) -> Rows:
    duplicates = report["duplicates"]
    exact, near = pluralize(duplicates["exact"], "group"), pluralize(duplicates["near"], "group")
    compared = _format_part(duplicates["compared"], duplicates["total"], "image")
    yield "duplicates", f"{exact} of identical files, {near} of near-duplicates; compared {compared}"
    if duplicates["across_splits"]:
        groups = pluralize(duplicates["across_splits"], "group")
        yield "warning", f"{groups} of these across splits: results will look too good"
        across = [group for group in duplicates["groups"] if len({image["split"] for image in group["images"]}) > 1]
        yield from _list_first_lines(
            [f"{group['kind']}: {', '.join(map(_format_image, group['images'][:4]))}" for group in across]
        )
    if duplicates["different_labels"]:
        yield (
            "warning",
            f"{pluralize(duplicates['different_labels'], 'group')} of these with different labels",
        )
    if "embedding" in report:
        yield from _format_embedding(report["embedding"])
    if "against" in report:
        yield from _format_against(report["against"])


def _format_embedding(embedding: dict[str, Any]) -> Rows:
    new, known = pluralize(embedding["new_pairs"], "more pair"), embedding["also_by_fingerprints"]
    shown = f"{new} with a score of {embedding['threshold']:g} or more, beside {known:,} of the above"
    yield "by features", f"{shown}; compared {pluralize(embedding['compared'], 'image')}"
    if embedding["across_splits"]:
        yield "warning", f"{pluralize(embedding['across_splits'], 'pair')} of these across splits: look at them"
    yield from _list_first_lines(
        [f"{pair['score']:.2f}: {' = '.join(map(_format_image, pair['images']))}" for pair in embedding["pairs"]]
    )


def _format_against(against: dict[str, Any]) -> Rows:
    matches = against["matches"]
    images = f"{pluralize(len(matches), 'image')} {'matches' if len(matches) == 1 else 'match'}"
    shown = f"{images} one of its {_format_part(against['compared'], against['total'])}"
    compared = _format_part(against["searched"], against["searched_total"], "image")
    yield "against", f"{against['data']}: {shown}; compared {compared}"
    if missing := against["searched_total"] - against["searched"]:
        verb = "was" if missing == 1 else "were"
        yield "warning", f"{pluralize(missing, 'image')} {verb} not compared with it, {_NOT_COMPARED_REASON}"
    yield from _list_first_lines([f"{row['kind']}: {_format_image(row)} = {row['matched_name']}" for row in matches])


def _format_part(number: int, whole: int, noun: str = "") -> str:
    total = pluralize(whole, noun) if noun else f"{whole:,}"
    return total if number == whole else f"{number:,} of {total}"


def _format_image(row: dict[str, Any]) -> str:
    return f"{row['split']}: {row['name']}"


def _list_first_lines(lines: list[str]) -> Rows:
    """The first lines, and how many more there are."""
    for line in lines[:_MAX_LISTED]:
        yield "", line
    if len(lines) > _MAX_LISTED:
        yield "", f"... and {len(lines) - _MAX_LISTED:,} more in the report"


# --- data pack -------------------------------------------------------------------------------------------------------


def pack_dataset(arguments: PackArguments) -> None:
    """`vitrail data pack DATA OUT`: write tar shards with an index."""
    out = arguments.out
    dataset = open_dataset(arguments.data)
    _print_pack_notes(dataset)
    before = sum(map(len, dataset.splits.values()))
    dataset = relabel_dataset(dataset, arguments.relabel)
    if dataset.label_changes is not None:
        output.print_note(f"note: {dataset.label_changes.summary}, by {arguments.relabel}")
    if arguments.leave_out is not None:
        dataset = without_images(dataset, read_excluded_images(arguments.leave_out, dataset))
    if arguments.leave_out is not None or dataset.label_changes is not None:
        for sentence in _describe_empty_classes(dataset):
            output.print_note(f"warning: {sentence}")
    try:
        with output.show_progress("writing shards") as progress:
            pack(dataset, out, progress=progress)
    except KeyboardInterrupt:
        output.print_note("repeat the command to continue where it stopped")
        raise
    images = {name: len(split) for name, split in dataset.splits.items()}
    excluded = before - sum(images.values())
    shards = list(out.glob("*.tar"))
    num_bytes = sum(path.stat().st_size for path in shards)
    if arguments.output.json:
        output.print_json({"written": str(out), "images": images, "left_out": excluded, "bytes": num_bytes})
        return
    rows = [("images", _format_counts(images))]
    if excluded or arguments.leave_out is not None:
        rows.append(("left out", format_count(excluded)))
    size = f"{pluralize(len(shards), 'shard')}, {format_bytes(num_bytes)}"
    output.print_table([*rows, ("written", f"{out} ({size})")])


def _print_pack_notes(dataset: Dataset) -> None:
    output.print_note(f"data: {dataset.name}")
    for note in filter(None, (*dataset.notes, describe_release(dataset.classes))):
        output.print_note(f"note: {note}")
    if dataset.layout_warning:
        output.print_note(f"warning: {dataset.layout_warning}")


def _describe_empty_classes(dataset: Dataset) -> Iterator[str]:
    """The splits in which a class has no image left."""
    for name, split in dataset.splits.items():
        counts = split.count_per_class(len(dataset.classes))
        empty = [label for label, count in zip(dataset.classes, counts, strict=True) if not count]
        if empty:
            yield f"{name} has no image of {', '.join(empty[:5])}{' ...' if len(empty) > 5 else ''}"


# --- data get, list, remove ------------------------------------------------------------------------------------------


def get_dataset(arguments: GetArguments) -> None:
    """`vitrail data get NAME`: download a public dataset."""
    name = arguments.name
    with output.show_progress(f"downloading {name}", of_bytes=True) as progress:
        folder = public_datasets.download_dataset(name, arguments.files, progress=progress, note=output.print_note)
    stored = next(one for one in public_datasets.list_downloaded_datasets() if one.name == name)
    if arguments.output.json:
        output.print_json({"name": name, "folder": str(folder), "images": dict(stored.images), "bytes": stored.bytes})
        return
    images = _format_counts({split: number for split, number in stored.images.items() if number})
    terms = public_datasets.PUBLIC_DATASETS[name].terms
    output.print_table([("images", images), ("terms", terms), ("stored", f"{folder} ({format_bytes(stored.bytes)})")])


def list_datasets(arguments: ListDatasetsArguments) -> None:
    """`vitrail data list`: show the public datasets, and those downloaded."""
    downloaded = {stored.name: stored for stored in public_datasets.list_downloaded_datasets()}
    home = get_data_home() / "data"
    if arguments.output.json:
        rows = [
            {
                "name": name,
                "description": public.description,
                "terms": public.terms,
                "images": dict(public.splits),
                "stored_bytes": downloaded[name].bytes if name in downloaded else None,
            }
            for name, public in public_datasets.PUBLIC_DATASETS.items()
        ]
        output.print_json({"folder": str(home), "datasets": rows})
        return
    table = [("name", "description", "images", "downloaded", "terms")]
    for name, public in public_datasets.PUBLIC_DATASETS.items():
        size = format_bytes(downloaded[name].bytes) if name in downloaded else "-"
        table.append((name, public.description, format_count(sum(public.splits.values())), size, public.terms))
    output.print_table(table, right=(2, 3))
    print(f"\nvitrail data get NAME downloads one into {home}; vitrail data remove NAME deletes it.")


def remove_dataset(arguments: RemoveArguments) -> None:
    """`vitrail data remove NAME`: delete a downloaded dataset."""
    name = arguments.name
    sizes = {stored.name: stored.bytes for stored in public_datasets.list_downloaded_datasets()}
    public_datasets.remove_dataset(name)
    if arguments.output.json:
        output.print_json({"removed": name, "bytes": sizes.get(name, 0)})
        return
    output.print_table([("removed", f"{name} ({format_bytes(sizes.get(name, 0))})")])


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {format_count(number)}" for name, number in counts.items())
