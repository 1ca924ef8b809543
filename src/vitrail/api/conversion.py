"""Read and write formats, and adapt weights to another task: `vitrail.convert`."""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args

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
from vitrail.errors import DataError, ModelError, UsageError
from vitrail.evaluation import precision_benchmark
from vitrail.evaluation.statistics import measure_agreement
from vitrail.export import export
from vitrail.export.graph import GraphRunner
from vitrail.formatting import pluralize
from vitrail.runtime import devices
from vitrail.runtime.workers import Notify, ShowProgress
from vitrail.training.finetune import PreprocessName
from vitrail.weights.adapt import adapt, round_to_float16
from vitrail.weights.formats import WeightsFormat, check_adapter_destination, check_destination
from vitrail.weights.load import is_preset, save
from vitrail.weights.peft_adapters import merge_adapter, read_adapter
from vitrail.weights.peft_export import ADAPTER_FORMATS, AdapterFormat, write_adapter
from vitrail.weights.precision_measurements import MIN_BFLOAT16_AGREEMENT, MIN_IMAGES
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
    float16: bool = False
    """For vitrail: store the weights in 16 bits. For onnx: compute matrix products in float16, for GPUs; refused where
    the predictions change."""
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
    float16: bool
    """For vitrail: store the weights in 16 bits. For onnx: compute matrix products in float16, for GPUs; refused where
    the predictions change."""
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
        for precision in get_args(export.LowerPrecision):
            if precision in self.record:
                agreement = self.record[precision]["top1_agreement"]
                rows[f"{precision} agrees"] = f"on {agreement:.2%} of the images"
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
    if (
        dataset is not None
        and built.to == "onnx"
        and built.float16
        and (count := len(_select_images(dataset))) < MIN_IMAGES
    ):
        raise DataError(f"float16 is measured on {MIN_IMAGES} images or more, and {dataset.name} has {count}")
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
    to, measure, precision = options.to, options.measure, _get_lower_precision(options)
    if options.int8 and options.float16:
        raise UsageError("--int8 and --float16 are two precisions of a file: give one of them")
    if precision and to != "onnx":
        formats = "onnx" if options.int8 else "onnx and vitrail"
        raise UsageError(f"--{precision} is for {formats}, not for {to}: add --to onnx")
    if precision and measure is None:
        raise UsageError(f"--{precision} changes the predictions; name images to measure how much: --measure DATA")
    if measure is not None and not precision and to != "vitrail":
        raise UsageError(f"--measure is not for {to}: add --to onnx and --int8 or --float16, or omit --to")


def _get_lower_precision(options: ConvertOptions) -> export.LowerPrecision | None:
    """The precision of a graph; a vitrail file in float16 is computed in float32 like any other."""
    return "int8" if options.int8 else "float16" if options.float16 and options.to != "vitrail" else None


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
    adapted = adapt(
        trained,
        classes=options.classes,
        labels=None if options.labels is None else resolve_labels(options.labels),
        image_size=None if options.image_size is None else expand_image_size(options.image_size),
        patch=options.patch,
        channels=options.channels,
        operator=options.resample,
    )
    return round_to_float16(adapted) if options.float16 and options.to == "vitrail" else adapted


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
    if dataset is not None and (precision := _get_lower_precision(options)):

        def measure(runners: list[GraphRunner]) -> dict[str, Any]:
            return _compare_with_float32(runners, trained, dataset, choose_progress(options.progress))

        parity, comparison = export.export_in_precision(trained, path, precision, measure, overwrite=overwrite)
        return {"notes": [], **parity._asdict(), precision: comparison}
    if dataset is not None:
        trained = _measure_precisions(trained, dataset, choose_progress(options.progress))
        notes = _save(trained, options, "vitrail")
        measurements = [dataclasses.asdict(measurement) for measurement in trained.precision_measurements]
        return {"notes": notes, "precision_measurements": measurements}
    match to:
        case "onnx" | "torch-export" | "openvino":
            return {"notes": [], **export.export_model(trained, path, to, overwrite=overwrite)._asdict()}
        case "peft" | "peft-v4" | "peft-timm":
            raise AssertionError("_convert_adapter writes adapters")
        case _:
            return {"notes": _save(trained, options, to)}


def _save(trained: Trained, options: ConvertOptions, to: WeightsFormat) -> list[str]:
    """Write a file or folder of weights, in 16 bits where the options say so; return what the format cannot hold."""
    if options.float16:
        trained = dataclasses.replace(trained, model=trained.model.half())  # of a copy, whose weights are rounded
    return save(trained, options.destination, to, overwrite=options.overwrite)


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


def _compare_with_float32(
    runners: list[GraphRunner], trained: Trained, dataset: Dataset, progress: ShowProgress
) -> dict[str, Any]:
    """The agreement of a file with float32 in ONNX Runtime on this machine: of int8 with its speed, of float16 checked.

    Of float16 the graph that rounds as a GPU does is reported, and the file itself checked by the same rule.
    """
    probabilities: list[list[Tensor]] = [[] for _ in runners]
    speedups = []
    for number, pixels in enumerate(_iterate_inputs(trained, dataset, progress)):
        seconds = [0.0] * len(runners)
        for index in sorted(range(len(runners)), reverse=number % 2 == 1):  # other load on the machine slows all alike
            start = time.perf_counter()
            probabilities[index].append(runners[index](pixels)["probabilities"])
            seconds[index] = time.perf_counter() - start
        speedups.append(seconds[0] / seconds[1])
    data = Path(dataset.name).name
    float32, *lower = map(torch.cat, probabilities)
    if len(lower) > 1:
        comparisons = [_check_float16(float32, candidate, data) for candidate in lower]
        return comparisons[-1]
    return {"data": data, **measure_agreement(float32, lower[0])._asdict(), "speed": statistics.median(speedups)}


def _check_float16(reference: Tensor, candidate: Tensor, data: str) -> dict[str, Any]:
    """The agreement of float16 with float32, or an error where it is too small."""
    agreement = measure_agreement(reference, candidate)
    change = float((candidate - reference).abs().max())
    overflown = int((~candidate.isfinite()).any(dim=1).sum())
    if overflown or agreement.top1_agreement < MIN_BFLOAT16_AGREEMENT:
        cause = f"probabilities change by up to {change:.4f}"
        if overflown:
            cause = f"values exceed its range, 65,504, for {pluralize(overflown, 'image')}"
        raise ModelError(
            f"nothing was written: float16 predicts float32's class for {agreement.top1_agreement:.2%} of"
            f" {pluralize(agreement.images, 'image')} of {data}, and {MIN_BFLOAT16_AGREEMENT:.1%} are required; {cause}"
            ". Without --float16 the file is float32"
        )
    return {"data": data, **agreement._asdict(), "max_probability_change": change}
