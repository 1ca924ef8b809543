"""`vitrail convert SRC DST --to FORMAT`: read and write formats, and adapt weights to another task."""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail import presets
from vitrail.cli import output
from vitrail.cli.arguments.models import ConvertArguments
from vitrail.config import expand_image_size
from vitrail.data.dataset import Dataset, Split
from vitrail.data.loader import iter_eval_batches
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.evaluate import precision_benchmark
from vitrail.evaluate.statistics import measure_agreement
from vitrail.export import export
from vitrail.export.graph import GraphRunner
from vitrail.formatting import pluralize
from vitrail.weights import hub
from vitrail.weights.adapt import adapt
from vitrail.weights.formats import check_destination
from vitrail.weights.labels import resolve_labels
from vitrail.weights.load import find_model_path, load, save
from vitrail.weights.precision_measurements import PrecisionMeasurement
from vitrail.weights.trained import Trained, require_preprocess

MAX_MEASURED_IMAGES = 1000
_BATCH_SIZE = 16
_MAX_PRECISION_SECONDS = 120.0  # for the comparison of precisions


def run(arguments: ConvertArguments) -> None:
    """Convert the model and list the changes."""
    _check_measure_options(arguments)
    _check_target(arguments)  # before a large model is read or written
    dataset = None if arguments.measure is None else _open_measure_dataset(arguments.measure)
    trained = _load_source(arguments.source)
    before = len(trained.origin.changes)
    trained = _adapt(trained, arguments)
    facts = {
        "written": str(arguments.destination),
        "format": arguments.to,
        "changes": list(trained.origin.changes[before:]),
        **_write_model(trained, arguments, dataset),
    }
    if arguments.output.json:
        output.print_json(facts)
    else:
        _print_result(facts)


def _check_measure_options(arguments: ConvertArguments) -> None:
    to, int8, measure = arguments.to, arguments.int8, arguments.measure
    if int8 and to != "onnx":
        raise UsageError(f"--int8 is for onnx, not for {to}: add --to onnx")
    if int8 and measure is None:
        raise UsageError("--int8 changes the predictions; name images to measure how much: --measure DATA")
    if measure is not None and not int8 and to != "vitrail":
        raise UsageError(f"--measure is not for {to}: add --to onnx --int8, or omit --to")


def _check_target(arguments: ConvertArguments) -> None:
    path, to, overwrite = arguments.destination, arguments.to, arguments.overwrite
    match to:
        case "onnx" | "torch-export" | "openvino":
            export.check_export_destination(path, to, overwrite=overwrite)
        case _:
            check_destination(path, to, overwrite=overwrite)


def _load_source(source: str) -> Trained:
    trained = load(source)
    is_preset = find_model_path(source) is None and not hub.is_remote(source)
    output.print_note(f"model: preset {source}, random weights" if is_preset else f"model: {source}")
    return trained


def _adapt(trained: Trained, arguments: ConvertArguments) -> Trained:
    if arguments.preprocess is not None:
        trained = _override_preprocess(trained, arguments.preprocess)
    return adapt(
        trained,
        classes=arguments.classes,
        labels=None if arguments.labels is None else resolve_labels(arguments.labels),
        image_size=None if arguments.image_size is None else expand_image_size(arguments.image_size),
        patch=arguments.patch,
        channels=arguments.channels,
        operator=arguments.resample,
    )


def _override_preprocess(trained: Trained, name: str) -> Trained:
    config = trained.model.config
    preprocess = presets.build_preprocess_config(name, config.image_size, config.channels)
    changes = (*trained.origin.changes, f"preprocess: {name}, given by hand")
    origin = dataclasses.replace(trained.origin, changes=changes)
    return dataclasses.replace(
        trained, preprocess=preprocess, origin=origin, precision_measurements=(), activation_ranges=()
    )


def _write_model(trained: Trained, arguments: ConvertArguments, dataset: Dataset | None) -> dict[str, Any]:
    """Write the file, and return what is known of it."""
    path, to, overwrite = arguments.destination, arguments.to, arguments.overwrite
    if dataset is not None and to == "onnx":

        def compare_int8(float32: GraphRunner, int8: GraphRunner) -> dict[str, Any]:
            return _compare_int8_with_float32(float32, int8, trained, dataset)

        parity, comparison = export.export_int8_model(trained, path, compare_int8, overwrite=overwrite)
        return {"notes": [], **parity._asdict(), "int8": comparison}
    if dataset is not None:
        trained = _measure_precisions(trained, dataset)
        notes = save(trained, path, overwrite=overwrite)
        measurements = [dataclasses.asdict(measurement) for measurement in trained.precision_measurements]
        return {"notes": notes, "precision_measurements": measurements}
    match to:
        case "onnx" | "torch-export" | "openvino":
            return {"notes": [], **export.export_model(trained, path, to, overwrite=overwrite)._asdict()}
        case _:
            return {"notes": save(trained, path, to, overwrite=overwrite)}


# --- comparing precisions --------------------------------------------------------------------------------------------


def _open_measure_dataset(data: str) -> Dataset:
    dataset = open_dataset(data)
    if not {"val", "test"} & dataset.splits.keys():
        raise DataError(f"{dataset.name} has neither val nor test to measure on")
    return dataset


def _select_images(dataset: Dataset) -> Split:
    """At most MAX_MEASURED_IMAGES of val, or of test where there is no val, evenly: they may be sorted by class."""
    split = dataset.splits.get("val", dataset.splits.get("test"))
    assert split is not None
    return Split(split.store, np.asarray(split.rows)[:: -(-len(split) // MAX_MEASURED_IMAGES)])


def _iterate_inputs(trained: Trained, dataset: Dataset) -> Iterator[Tensor]:
    """Batches of model inputs of the images to measure on, with progress."""
    preprocess = require_preprocess(trained)
    split, done = _select_images(dataset), 0
    with output.show_progress("measuring") as report:
        for batch in iter_eval_batches(split, preprocess, batch_size=_BATCH_SIZE, num_classes=len(dataset.classes)):
            yield batch.pixels
            done += len(batch.pixels)
            report(done, len(split))


def _measure_precisions(trained: Trained, dataset: Dataset) -> Trained:
    """The model with the agreement and the speed of every precision on this machine."""
    if not trained.model.config.classes:
        raise UsageError("precisions are compared by predictions, and the model has no head: omit --measure")
    return precision_benchmark.measure_precisions(
        trained, _iterate_inputs(trained, dataset), seconds=_MAX_PRECISION_SECONDS, data=Path(dataset.name).name
    )


def _compare_int8_with_float32(
    float32: GraphRunner, int8: GraphRunner, trained: Trained, dataset: Dataset
) -> dict[str, Any]:
    """The agreement of int8 with float32, and its speedup, in ONNX Runtime on this machine."""
    runners = (float32, int8)
    probabilities: tuple[list[Tensor], list[Tensor]] = ([], [])
    speedups = []
    for number, pixels in enumerate(_iterate_inputs(trained, dataset)):
        seconds = [0.0, 0.0]
        for index in ((0, 1), (1, 0))[number % 2]:  # by turns, so that other load on the machine slows both alike
            start = time.perf_counter()
            probabilities[index].append(runners[index](pixels)["probabilities"])
            seconds[index] = time.perf_counter() - start
        speedups.append(seconds[0] / seconds[1])
    agreement = measure_agreement(torch.cat(probabilities[0]), torch.cat(probabilities[1]))
    return {"data": Path(dataset.name).name, **agreement._asdict(), "speed": statistics.median(speedups)}


# --- as text ---------------------------------------------------------------------------------------------------------


def _print_result(facts: dict[str, Any]) -> None:
    rows = [("changed", change) for change in facts["changes"]] + [("note", note) for note in facts["notes"]]
    if "difference" in facts:
        allowed = f"{facts['allowed']:.0e} is allowed"
        rows.append(("difference", f"{facts['difference']:.1e} from vitrail's own float32; {allowed}"))
    if "int8" in facts:
        rows += _format_int8(facts["int8"])
    for measurement in facts.get("precision_measurements", ()):
        rows.append(("measured", PrecisionMeasurement(**measurement).describe()))
    output.print_table([*rows, ("written", f"{facts['written']} ({facts['format']})")])


def _format_int8(facts: dict[str, Any]) -> list[tuple[str, str]]:
    images = f"{pluralize(facts['images'], 'image')} of {facts['data']}"
    confident = ""
    if facts["confident_agreement"] is not None:
        confident = (
            f", {facts['confident_agreement']:.2%} where it is sure ({pluralize(facts['confident_images'], 'image')})"
        )
    return [
        ("int8 agrees", f"with float32's prediction on {facts['top1_agreement']:.2%} of {images}{confident}"),
        ("int8 changes", f"the probability of that prediction by {facts['mean_probability_change']:.4f} on average"),
        ("int8 speed", f"{facts['speed']:.2f} times float32's, ONNX Runtime on this machine"),
    ]
