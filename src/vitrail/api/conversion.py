"""Read and write formats, and adapt weights to another task: `vitrail.convert`."""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from vitrail import presets
from vitrail.api import notebook
from vitrail.api.keyword_errors import name_keywords
from vitrail.api.models import AnyModel, get_model_name, load_trained
from vitrail.api.options import build_options, document_options
from vitrail.api.progress import NoteCollector, Progress, choose_progress
from vitrail.config import Resample
from vitrail.config.model import expand_image_size
from vitrail.data.dataset import Dataset, Split
from vitrail.data.loader import iter_eval_batches
from vitrail.data.sources import DataSource, open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.evaluation import precision_benchmark
from vitrail.evaluation.statistics import measure_agreement
from vitrail.export import export
from vitrail.export.graph import GraphRunner
from vitrail.runtime import devices
from vitrail.runtime.workers import Notify, ShowProgress
from vitrail.training.finetune import PreprocessName
from vitrail.weights.adapt import adapt
from vitrail.weights.formats import WeightsFormat, check_adapter_destination, check_destination
from vitrail.weights.load import is_preset, save
from vitrail.weights.peft_adapters import merge_adapter, read_adapter
from vitrail.weights.peft_export import ADAPTER_FORMATS, AdapterFormat, write_adapter
from vitrail.weights.trained import Trained, require_preprocess, resolve_labels

__all__ = ["Conversion", "ConvertKeywords", "convert"]

TargetFormat = Literal[WeightsFormat, "onnx", "torch-export", "openvino", AdapterFormat]
MAX_MEASURED_IMAGES = 1000
_FORMATS_BY_SUFFIX: dict[str, TargetFormat] = {".onnx": "onnx", ".pt2": "torch-export", ".xml": "openvino"}
_BATCH_SIZE = 16
_MAX_PRECISION_SECONDS = 120.0  # for the comparison of precisions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How a model is written."""

    destination: Path
    to: TargetFormat = "vitrail"
    adapter: str | Path | None = None
    """A LoRA adapter that is merged into the model: its folder, or hf:ORG/NAME."""
    classes: int | None = None
    """Classes of a zero head that replaces the model's."""
    labels: str | None = None
    """Class names: imagenet1k, or a text file with one per line."""
    image_size: tuple[int, ...] | None = None
    """Height and width, or one side; positions are resampled."""
    patch: int | None = None
    """Side of the patches; their kernels are resized."""
    channels: int | None = None
    """Input channels."""
    resample: Resample | None = None
    """How to resample positions; None: as in the library the weights come from."""
    preprocess: PreprocessName | None = None
    """Mean, std and interpolation."""
    int8: bool = False
    """For onnx: store the weights in 8 bits."""
    measure: DataSource | None = None
    """Images on which lower precisions are compared with float32."""
    overwrite: bool = False
    """Replace the destination if it exists."""
    progress: Progress = True


class ConvertKeywords(TypedDict, total=False):
    """What `convert` takes by keyword, besides `to` and `image_size`."""

    adapter: str | Path | None
    """A LoRA adapter, of PEFT or of a run, that is merged into the model: its folder, or hf:ORG/NAME."""
    classes: int | None
    """Classes of a zero head that replaces the model's."""
    labels: str | None
    """Class names: imagenet1k, or a text file with one per line."""
    patch: int | None
    """Side of the patches; their kernels are resized."""
    channels: int | None
    """Input channels."""
    resample: Resample | None
    """How to resample positions; by default as in the library the weights come from."""
    preprocess: PreprocessName | None
    """Mean, std and interpolation for weights that do not state them, or state wrong ones."""
    int8: bool
    """For onnx: store the weights in 8 bits."""
    measure: DataSource | None
    """Images on which lower precisions are compared with float32."""
    overwrite: bool
    """Replace the destination if it exists."""
    progress: Progress
    """Whether a bar is shown, or a function that shows progress."""


@dataclasses.dataclass(frozen=True, repr=False)
class Conversion:
    """A model that was written, and what was changed or lost.

    `vitrail.convert` returns it.

        conversion = vitrail.convert("model.safetensors", "model-timm", "timm")
        print(conversion.path, conversion.changes, conversion.notes)
    """

    path: Path
    record: dict[str, Any]
    """What was changed, what the format cannot hold, and what was measured."""

    @property
    def changes(self) -> list[str]:
        """What was changed in the weights, a sentence each."""
        return list(self.record["changes"])

    @property
    def notes(self) -> list[str]:
        """What the format cannot hold, a sentence each."""
        return list(self.record["notes"])

    def __repr__(self) -> str:
        lost = "".join(f"; {note}" for note in (*self.changes, *self.notes))
        return f"Conversion({str(self.path)!r}, {self.record['format']}{lost})"

    def _repr_html_(self) -> str:
        rows = {"written": str(self.path), "format": self.record["format"]}
        if "difference" in self.record:
            rows["difference"] = f"{self.record['difference']:.1e} from vitrail's own float32"
        if "int8" in self.record:
            rows["int8 agrees"] = f"on {self.record['int8']['top1_agreement']:.2%} of the images"
        return notebook.wrap_html(notebook.render_table(rows), *notebook.render_notes((*self.changes, *self.notes)))


@document_options(ConvertOptions)
@name_keywords
def convert(
    source: AnyModel,
    destination: str | Path,
    to: TargetFormat | None = None,
    *,
    image_size: int | tuple[int, ...] | None = None,
    notify: Notify | None = None,
    **options: Unpack[ConvertKeywords],
) -> Conversion:
    """Write a model in another format, or adapted to another task: `vitrail convert` from Python.

    What a format cannot hold is refused, or listed in `notes`.

        vitrail.convert("model.safetensors", "model-hf", "transformers")
        vitrail.convert("model.safetensors", "flowers.safetensors", classes=102, image_size=384)

    Arguments:

    - `source`: The model: a name, a path, a `Run` or a `Trained`. For the formats `peft`, `peft-v4` and `peft-timm`
      the folder of an adapter.
    - `destination`: The file or folder to write.
    - `to`: The format; by default the suffixes .onnx, .pt2 and .xml choose those runtimes, and any other name vitrail's
      own format.
    - `image_size`: New resolution, one side or height and width; positions are resampled.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    size = (image_size,) if isinstance(image_size, int) else image_size
    values = {"destination": Path(destination), "to": to or _choose_format(Path(destination)), "image_size": size}
    built = build_options(ConvertOptions, {**values, **options})
    _check_measure_options(built)
    _check_target(built)  # before a large model is read or written
    if built.to in ADAPTER_FORMATS:
        return _convert_adapter(source, built)
    dataset = None if built.measure is None else _open_measure_dataset(built.measure)
    trained = _load_source(source, NoteCollector(notify))
    before = len(trained.origin.changes)
    if built.adapter is not None:
        trained = merge_adapter(trained, built.adapter)
    trained = _adapt(trained, built)
    facts = {
        "written": str(built.destination),
        "format": built.to,
        "changes": list(trained.origin.changes[before:]),
        **_write_model(trained, built, dataset),
    }
    return Conversion(built.destination, facts)


def _convert_adapter(source: AnyModel, options: ConvertOptions) -> Conversion:
    """Write an adapter under the names of another library or version."""
    path, to = options.destination, options.to
    allowed = ConvertOptions(destination=path, to=to, overwrite=options.overwrite, progress=options.progress)
    if options != allowed or not isinstance(source, str | Path):
        raise UsageError(f"{to} is for adapters alone: vitrail convert ADAPTER DST --to {to}")
    assert to in ADAPTER_FORMATS
    write_adapter(read_adapter(Path(source)), path, to, overwrite=options.overwrite)
    return Conversion(path, {"written": str(path), "format": to, "changes": [], "notes": []})


def _choose_format(destination: Path) -> TargetFormat:
    return _FORMATS_BY_SUFFIX.get(destination.suffix.lower(), "vitrail")


def _check_measure_options(options: ConvertOptions) -> None:
    to, int8, measure = options.to, options.int8, options.measure
    if int8 and to != "onnx":
        raise UsageError(f"--int8 is for onnx, not for {to}: add --to onnx")
    if int8 and measure is None:
        raise UsageError("--int8 changes the predictions; name images to measure how much: --measure DATA")
    if measure is not None and not int8 and to != "vitrail":
        raise UsageError(f"--measure is not for {to}: add --to onnx --int8, or omit --to")


def _check_target(options: ConvertOptions) -> None:
    path, to, overwrite = options.destination, options.to, options.overwrite
    match to:
        case "onnx" | "torch-export" | "openvino":
            export.check_export_destination(path, to, overwrite=overwrite)
        case "peft" | "peft-v4" | "peft-timm":
            check_adapter_destination(path, overwrite=overwrite)
        case _:
            check_destination(path, to, overwrite=overwrite)


def _load_source(source: AnyModel, notify: Notify) -> Trained:
    trained = load_trained(source, notify)
    random = isinstance(source, str) and is_preset(source)
    notify(f"model: preset {source}, random weights" if random else f"model: {get_model_name(source)}")
    return trained


def _adapt(trained: Trained, options: ConvertOptions) -> Trained:
    if options.preprocess is not None:
        trained = _override_preprocess(trained, options.preprocess)
    return adapt(
        trained,
        classes=options.classes,
        labels=None if options.labels is None else resolve_labels(options.labels),
        image_size=None if options.image_size is None else expand_image_size(options.image_size),
        patch=options.patch,
        channels=options.channels,
        operator=options.resample,
    )


def _override_preprocess(trained: Trained, name: str) -> Trained:
    config = trained.model.config
    preprocess = presets.build_preprocess_config(name, config.image_size, config.channels)
    changes = (*trained.origin.changes, f"preprocess: {name}, given by hand")
    origin = dataclasses.replace(trained.origin, changes=changes)
    return dataclasses.replace(
        trained, preprocess=preprocess, origin=origin, precision_measurements=(), activation_ranges=()
    )


def _write_model(trained: Trained, options: ConvertOptions, dataset: Dataset | None) -> dict[str, Any]:
    """Write the file, and return what is known of it."""
    path, to, overwrite = options.destination, options.to, options.overwrite
    if dataset is not None and to == "onnx":

        def compare_int8(float32: GraphRunner, int8: GraphRunner) -> dict[str, Any]:
            return _compare_int8_with_float32(float32, int8, trained, dataset, choose_progress(options.progress))

        parity, comparison = export.export_int8_model(trained, path, compare_int8, overwrite=overwrite)
        return {"notes": [], **parity._asdict(), "int8": comparison}
    if dataset is not None:
        trained = _measure_precisions(trained, dataset, choose_progress(options.progress))
        notes = save(trained, path, overwrite=overwrite)
        measurements = [dataclasses.asdict(measurement) for measurement in trained.precision_measurements]
        return {"notes": notes, "precision_measurements": measurements}
    match to:
        case "onnx" | "torch-export" | "openvino":
            return {"notes": [], **export.export_model(trained, path, to, overwrite=overwrite)._asdict()}
        case "peft" | "peft-v4" | "peft-timm":
            raise AssertionError("_convert_adapter writes adapters")
        case _:
            return {"notes": save(trained, path, to, overwrite=overwrite)}


# --- comparing precisions --------------------------------------------------------------------------------------------


def _open_measure_dataset(data: DataSource) -> Dataset:
    dataset = open_dataset(data)
    if not {"val", "test"} & dataset.splits.keys():
        raise DataError(f"{dataset.name} has neither val nor test to measure on")
    return dataset


def _select_images(dataset: Dataset) -> Split:
    """At most MAX_MEASURED_IMAGES of val, or of test where there is no val, evenly: they may be sorted by class."""
    split = dataset.splits.get("val", dataset.splits.get("test"))
    assert split is not None
    return Split(split.store, np.asarray(split.rows)[:: -(-len(split) // MAX_MEASURED_IMAGES)])


def _iterate_inputs(trained: Trained, dataset: Dataset, progress: ShowProgress) -> Iterator[Tensor]:
    """Batches of model inputs of the images to measure on, with progress."""
    preprocess = require_preprocess(trained)
    split, done = _select_images(dataset), 0
    with progress("measuring") as report:
        for batch in iter_eval_batches(split, preprocess, batch_size=_BATCH_SIZE, num_classes=len(dataset.classes)):
            yield batch.pixels
            done += len(batch.pixels)
            report(done, len(split))


def _measure_precisions(trained: Trained, dataset: Dataset, progress: ShowProgress) -> Trained:
    """The model with the agreement and the speed of every precision on this machine."""
    if not trained.model.config.classes:
        raise UsageError("precisions are compared by predictions, and the model has no head: omit --measure")
    return precision_benchmark.measure_on_devices(
        trained,
        devices.find_best_device(),
        lambda: _iterate_inputs(trained, dataset, progress),
        seconds=_MAX_PRECISION_SECONDS,
        data=Path(dataset.name).name,
    )


def _compare_int8_with_float32(
    float32: GraphRunner, int8: GraphRunner, trained: Trained, dataset: Dataset, progress: ShowProgress
) -> dict[str, Any]:
    """The agreement of int8 with float32, and its speedup, in ONNX Runtime on this machine."""
    runners = (float32, int8)
    probabilities: tuple[list[Tensor], list[Tensor]] = ([], [])
    speedups = []
    for number, pixels in enumerate(_iterate_inputs(trained, dataset, progress)):
        seconds = [0.0, 0.0]
        for index in ((0, 1), (1, 0))[number % 2]:  # by turns, so that other load on the machine slows both alike
            start = time.perf_counter()
            probabilities[index].append(runners[index](pixels)["probabilities"])
            seconds[index] = time.perf_counter() - start
        speedups.append(seconds[0] / seconds[1])
    agreement = measure_agreement(torch.cat(probabilities[0]), torch.cat(probabilities[1]))
    return {"data": Path(dataset.name).name, **agreement._asdict(), "speed": statistics.median(speedups)}
