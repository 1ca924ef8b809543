"""`vitrail convert SRC DST --to FORMAT`: formats in and out, and weights made to fit another task."""

import dataclasses
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vitrail import presets
from vitrail.cli import output
from vitrail.config import Resample, expand_image_size
from vitrail.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from vitrail.data.dataset import Dataset, Split
    from vitrail.export.graph import GraphRunner
    from vitrail.weights.trained import Trained

TargetFormat = Literal["vitrail", "google", "timm", "transformers", "torchvision", "onnx", "torch-export", "openvino"]
PreprocessName = Literal["imagenet", "inception", "torchvision"]
MAX_MEASURED_IMAGES = 1000  # images at most
_BATCH_SIZE = 16
_MAX_PRECISION_SECONDS = 120.0  # of comparing precisions, at most


def main(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    destination: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    to: TargetFormat = "vitrail",
    classes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    labels: Annotated[str | None, tyro.conf.arg(metavar="NAMES")] = None,
    image_size: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="HEIGHT [WIDTH]")] = None,
    patch: Annotated[int | None, tyro.conf.arg(metavar="SIDE")] = None,
    channels: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    resample: Resample | None = None,
    preprocess: PreprocessName | None = None,
    int8: bool = False,
    measure: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None,
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Write a model in another format, or fitted to another task. What changes is listed.

    Args:
        source: A file or folder of any known format, hf:ORG/NAME[@REVISION], timm:NAME, or a preset such as b16.
        destination: The file or folder to write.
        to: The format. timm and transformers write folders, timm also a bare .safetensors, torchvision a .pth,
            google an .npz. For other runtimes: onnx an .onnx, torch-export a .pt2, openvino an .xml and a .bin.
        classes: Replace the head by a zero one with so many classes.
        labels: Class names: imagenet1k, or a text file with one on each line.
        image_size: New resolution, one side or height and width; positions are resampled.
        patch: New patch side (a hybrid's counts places of its feature map); kernels are resized as FlexiViT does.
        channels: New number of input channels.
        resample: Resample positions this way rather than as the weights' origin does.
        preprocess: Mean, std and interpolation for weights that do not state them.
        int8: Of onnx: keep the weights in 8 bits, a third of the size; --measure says what that changes.
        measure: Images on which lower precisions are compared with float32 on this CPU: a folder, a .csv or .jsonl,
            shards, hf:ORG/NAME, ... Of vitrail the file then says which is the fastest that answers alike.
        overwrite: Replace the destination if it exists.
        json: Print JSON.
    """
    from vitrail.weights import labels as known_labels
    from vitrail.weights.adapt import adapt

    _check_measure_options(to, int8=int8, measure=measure)
    _check_target(destination, to, overwrite=overwrite)  # before a large model is read or made
    dataset = None if measure is None else _open_measure_dataset(measure)
    trained = _load_source(source)
    before = len(trained.origin.changes)
    if preprocess is not None:
        trained = _set_preprocess(trained, preprocess)
    trained = adapt(
        trained,
        classes=classes,
        labels=None if labels is None else known_labels.resolve_labels(labels),
        image_size=None if image_size is None else expand_image_size(image_size),
        patch=patch,
        channels=channels,
        operator=resample,
    )
    found = _write_model(trained, destination, to, dataset, overwrite=overwrite)
    found = {"written": str(destination), "format": to, "changes": list(trained.origin.changes[before:]), **found}
    output.print_json(found) if json else _print_result(found)


def _check_measure_options(to: TargetFormat, *, int8: bool, measure: str | None) -> None:
    if int8 and to != "onnx":
        raise UsageError(f"--int8 is of onnx, not of {to}: add --to onnx")
    if int8 and measure is None:
        raise UsageError("--int8 changes what the model says; name images to measure how much: --measure DATA")
    if measure is not None and not int8 and to != "vitrail":
        raise UsageError(f"--measure has no place in {to}: add --to onnx --int8, or leave --to away")


def _check_target(path: Path, to: TargetFormat, *, overwrite: bool) -> None:
    from vitrail.export import export
    from vitrail.weights.formats import check_destination

    match to:
        case "onnx" | "torch-export" | "openvino":
            export.check_export_destination(path, to, overwrite=overwrite)
        case _:
            check_destination(path, to, overwrite=overwrite)


def _load_source(source: str) -> "Trained":
    from vitrail.weights import hub
    from vitrail.weights.load import find_model_path, load

    trained = load(source)
    preset = find_model_path(source) is None and not hub.is_remote(source)
    output.print_note(f"model: preset {source}, random weights" if preset else f"model: {source}")
    return trained


def _set_preprocess(trained: "Trained", preprocess: PreprocessName) -> "Trained":
    config = trained.model.config
    view = presets.build_preprocess_config(preprocess, config.image_size, config.channels)
    sentence = f"preprocess: {preprocess}, given by hand"
    origin = dataclasses.replace(trained.origin, changes=(*trained.origin.changes, sentence))
    return dataclasses.replace(trained, preprocess=view, origin=origin, precision_measurements=(), activation_ranges=())


def _write_model(
    trained: "Trained", path: Path, to: TargetFormat, dataset: "Dataset | None", *, overwrite: bool
) -> dict[str, Any]:
    """Write the file, and tell what came of it."""
    from vitrail.export import export
    from vitrail.weights.load import save

    if dataset is not None and to == "onnx":

        def compare_int8(float32: "GraphRunner", int8: "GraphRunner") -> dict[str, Any]:
            return _compare_int8_with_float32(float32, int8, trained, dataset)

        parity, int8 = export.export_int8_model(trained, path, compare_int8, overwrite=overwrite)
        return {"notes": [], **parity._asdict(), "int8": int8}
    if dataset is not None:
        trained = _measure_precisions(trained, dataset)
        notes = save(trained, path, overwrite=overwrite)
        return {"notes": notes, "tried": [dataclasses.asdict(tried) for tried in trained.precision_measurements]}
    match to:
        case "onnx" | "torch-export" | "openvino":
            return {"notes": [], **export.export_model(trained, path, to, overwrite=overwrite)._asdict()}
        case _:
            return {"notes": save(trained, path, to, overwrite=overwrite)}


def _open_measure_dataset(data: str) -> "Dataset":
    from vitrail.data.sources import open_dataset

    dataset = open_dataset(data)
    if not {"val", "test"} & dataset.splits.keys():
        raise DataError(f"{dataset.name} has neither val nor test to measure on")
    return dataset


def _select_images(dataset: "Dataset") -> "Split":
    """At most MEASURED images of val, or of test where there is no val, taken evenly: they may be sorted by class."""
    import numpy as np

    from vitrail.data.dataset import Split

    split = dataset.splits.get("val", dataset.splits.get("test"))
    assert split is not None
    return Split(split.store, np.asarray(split.rows)[:: -(-len(split) // MAX_MEASURED_IMAGES)])


def _iterate_inputs(trained: "Trained", dataset: "Dataset") -> "Iterator[Tensor]":
    """Batches of what the model sees of the images to measure on, with progress."""
    from vitrail.data.loader import iter_eval_batches
    from vitrail.weights.trained import require_preprocess

    preprocess = require_preprocess(trained)
    split, done = _select_images(dataset), 0
    with output.show_progress("measuring") as report:
        for batch in iter_eval_batches(split, preprocess, batch_size=_BATCH_SIZE, num_classes=len(dataset.classes)):
            yield batch.pixels
            done += len(batch.pixels)
            report(done, len(split))


def _measure_precisions(trained: "Trained", dataset: "Dataset") -> "Trained":
    """The model with what every precision says of the images, and how quickly, on this machine."""
    from vitrail.evaluate import precision_benchmark

    if not trained.model.config.classes:
        raise UsageError("precisions are measured by answers, and the model has no head: leave --measure away")
    return precision_benchmark.measure_precisions(
        trained, _iterate_inputs(trained, dataset), seconds=_MAX_PRECISION_SECONDS, data=Path(dataset.name).name
    )


def _compare_int8_with_float32(
    float32: "GraphRunner", int8: "GraphRunner", trained: "Trained", dataset: "Dataset"
) -> dict[str, Any]:
    """How far int8 agrees with float32, and how many times faster it is, in ONNX Runtime on this machine."""
    import torch

    from vitrail.evaluate.statistics import measure_agreement

    both = (float32, int8)
    said: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    faster = []
    for number, pixels in enumerate(_iterate_inputs(trained, dataset)):
        seconds = [0.0, 0.0]
        for which in ((0, 1), (1, 0))[number % 2]:  # by turns, so that what else runs here meets both
            begun = time.perf_counter()
            said[which].append(both[which](pixels)["probabilities"])
            seconds[which] = time.perf_counter() - begun
        faster.append(seconds[0] / seconds[1])
    found = measure_agreement(torch.cat(said[0]), torch.cat(said[1]))
    return {"data": Path(dataset.name).name, **found._asdict(), "speed": statistics.median(faster)}


def _print_result(result: dict[str, Any]) -> None:
    rows = [("changed", change) for change in result["changes"]] + [("note", text) for text in result["notes"]]
    if "difference" in result:
        allowed = f"{result['allowed']:.0e} is allowed"
        rows.append(("difference", f"{result['difference']:.1e} from vitrail's own float32; {allowed}"))
    if "int8" in result:
        int8 = result["int8"]
        sure = (
            ""
            if int8["confident_agreement"] is None
            else f", {int8['confident_agreement']:.2%} where it is sure"
            f" ({output.pluralize(int8['confident_images'], 'image')})"
        )
        rows += [
            (
                "int8 agrees",
                f"with float32's answer on {int8['top1_agreement']:.2%} of"
                f" {output.pluralize(int8['images'], 'image')} of {int8['data']}{sure}",
            ),
            ("int8 changes", f"the probability of that answer by {int8['mean_probability_change']:.4f} on average"),
            ("int8 speed", f"{int8['speed']:.2f} times float32's, ONNX Runtime on this machine"),
        ]
    for tried in result.get("tried", ()):
        from vitrail.weights.precision_measurements import PrecisionMeasurement

        rows.append(("measured", PrecisionMeasurement(**tried).describe()))
    output.print_table([*rows, ("written", f"{result['written']} ({result['format']})")])
