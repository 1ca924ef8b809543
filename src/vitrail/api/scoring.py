"""A model as a callable class for engines that map functions over batches of rows: Ray Data, Spark, multiprocessing.

A `Scorer` is built from names and numbers alone. It loads its model where it is first called, so it travels to a worker
as a few hundred bytes, and a process loads a model once. A `Decoder` prepares the model's inputs on other workers.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.api.models import load_trained
from vitrail.api.prediction import open_classifier
from vitrail.api.prediction_files import PredictOptions
from vitrail.config import Precision, PreprocessConfig
from vitrail.config.features import FeatureKind, count_features
from vitrail.data.image_paths import ImageRef
from vitrail.errors import DataError, UsageError
from vitrail.inference.bulk_prediction import (
    AnyClassifier,
    BulkSettings,
    avoid_tf32,
    check_supported,
    start_rows,
)
from vitrail.inference.classifier import Classifier
from vitrail.inference.input_batches import InputLoader, LoadedBatch
from vitrail.inference.prediction_rows import PredictionItem, PredictionRow
from vitrail.runtime import cpu_threads, devices, workers
from vitrail.runtime.distributed import SINGLE_PROCESS
from vitrail.runtime.workers import ignore_note
from vitrail.weights.trained import require_preprocess

__all__ = ["Decoder", "Scorer"]

PIXELS, ERROR = "pixels", "error"
Columns = Mapping[str, Sequence[Any] | NDArray[Any]]


class Scorer:
    """Labels or features for batches of rows: a callable class for Ray Data, Spark and multiprocessing.

    A batch is a dictionary of columns, as Ray Data gives it with `batch_format="numpy"`, or a pandas DataFrame, as
    Spark's `mapInPandas` does. The result has the same columns and rows, and these besides:

    - `label` and `probability`, or with `top` above 1 `labels` and `probabilities`, lists with the likeliest first;
    - with `features`, `features` instead: float32 (n, D), NaN where there are none;
    - `error`: why an image cannot be read, else empty. One bad image is never an exception.

    A cell is the bytes of an image file, a path or URL, an array uint8 (H, W, 3), a struct of bytes and path, or a
    model input of a `Decoder`. The model is loaded at the first call in a process, and pickling leaves it out.

        scorer = vitrail.Scorer("model.safetensors", top=2)
        batch = scorer({"bytes": [open("cat.jpg", "rb").read(), b"no image"]})
        print(batch["labels"][0], batch["probabilities"][0], batch["error"][1])

    Arguments:

    - `model`: A name or a path that every worker can open, also of an exported file.
    - `top`: Labels per image.
    - `features`: True for the features that the model's head reads, or one of the kinds of `vitrail.embed`.
    - `normalize`: Scale each image's features to length 1.
    - `column`: The column with the images.
    - `device`: cpu, cuda or mps; the best device available by default.
    - `precision`: Of the computation, as in `vitrail.predict`.
    - `batch`: Images computed at once; a batch of more rows is computed in parts. 64 by default, or 256 on a GPU.
    - `threads`: Threads that decode images.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        top: int = 1,
        features: bool | FeatureKind = False,
        normalize: bool = False,
        column: str = "bytes",
        device: str | None = None,
        precision: Precision | None = None,
        batch: int | None = None,
        threads: int = 1,
    ) -> None:
        self.model, self.column, self.top, self.threads = _check_model(model), column, top, threads
        kind: FeatureKind = "default" if isinstance(features, bool) else features
        self.options = PredictOptions(
            top=top,
            embed=bool(features),
            features=kind,
            normalize=normalize,
            device=device,
            precision=precision,
            batch=batch,
        )
        if threads < 1:
            raise UsageError(f"threads is {threads}; it must be at least 1")

    def __call__(self, batch: Any) -> Any:
        """The batch with the columns of the result: a dictionary for a dictionary, a DataFrame for a DataFrame."""
        classifier = _load_classifier(self.model, self.options, _stamp(self.model))
        loader = InputLoader(classifier.preprocess, classifier.channels)
        images = _list_images(batch, self.column)
        size = classifier.batch_size
        parts = [images[start : start + size] for start in range(0, len(images), size)]
        settings = BulkSettings(top=self.options.top, embed=self.options.embed)
        rows = list[PredictionRow]()
        with avoid_tf32() if self.options.embed else contextlib.nullcontext():
            for loaded in workers.prefetch_batches(functools.partial(_load, loader), parts, self.threads):
                pixels, errors = loader.stack([inputs for _, inputs in loaded])
                items = [PredictionItem(image) for image, _ in loaded]
                rows += start_rows(classifier, LoadedBatch(items, (pixels,), errors), settings)()
        columns = self._collect_features(rows, classifier) if self.options.embed else self._collect_labels(rows)
        return _add_columns(batch, columns | {ERROR: _make_column([row.error for row in rows])})

    def _collect_labels(self, rows: Sequence[PredictionRow]) -> dict[str, NDArray[Any]]:
        if self.top > 1:
            return {
                "labels": _make_column([[label for label, _ in row.labels] if row.labels else None for row in rows]),
                "probabilities": _make_column([[value for _, value in row.labels] or None for row in rows]),
            }
        probabilities = [row.labels[0][1] if row.labels else np.nan for row in rows]
        return {
            "label": _make_column([row.labels[0][0] if row.labels else None for row in rows]),
            "probability": np.array(probabilities, dtype=np.float32),
        }

    def _collect_features(self, rows: Sequence[PredictionRow], classifier: AnyClassifier) -> dict[str, NDArray[Any]]:
        assert isinstance(classifier, Classifier), "an exported file is refused"
        width = count_features(classifier.model.config, self.options.features)
        features = np.full((len(rows), width), np.nan, dtype=np.float32)
        for row, values in zip(rows, features, strict=True):
            if row.features is not None:
                values[:] = row.features
        return {"features": features}


class Decoder:
    """Model inputs for batches of rows: decoding as a step of its own, for workers without a GPU.

    It replaces the column of images by `pixels`, uint8 (n, 3, S, S) as the model's preprocessing has it, and adds
    `error`: why an image cannot be read, else empty. A `Scorer` with column="pixels" takes both. Batches and cells are
    those of `Scorer`.

        decode = vitrail.Decoder("model.safetensors", column="bytes")
        score = vitrail.Scorer("model.safetensors", column="pixels")
        batch = decode({"bytes": [open("cat.jpg", "rb").read()]})
        print(batch["pixels"].shape, score(batch)["label"])

    Arguments:

    - `model`: The model whose inputs are made: a name or a path that every worker can open.
    - `column`: The column with the images, which the result does not have.
    - `threads`: Threads that decode images.
    """

    def __init__(self, model: str | Path, *, column: str = "bytes", threads: int = 1) -> None:
        self.model, self.column, self.threads = _check_model(model), column, threads
        if threads < 1:
            raise UsageError(f"threads is {threads}; it must be at least 1")

    def __call__(self, batch: Any) -> Any:
        """The batch with `pixels` and `error` instead of its column of images."""
        preprocess, channels = _load_preprocess(self.model, _stamp(self.model))
        loader, images = InputLoader(preprocess, channels), _list_images(batch, self.column)
        pixels = np.zeros((len(images), channels, *preprocess.size), dtype=np.uint8)
        errors = [""] * len(images)  # no nulls: a batch of nulls alone has no type that engines could join
        for loaded in workers.prefetch_batches(functools.partial(_load, loader), [images], self.threads):
            for index, (_, inputs) in enumerate(loaded):
                if isinstance(inputs, DataError):
                    errors[index] = str(inputs)
                else:
                    pixels[index] = inputs.numpy()
        kept = batch.drop(columns=self.column) if _is_frame(batch) else {**batch}
        if not _is_frame(batch):
            del kept[self.column]
        return _add_columns(kept, {PIXELS: pixels, ERROR: _make_column(errors)})


# --- models ----------------------------------------------------------------------------------------------------------


def _check_model(model: str | Path) -> str:
    if not isinstance(model, str | Path):
        kind = type(model).__name__
        raise UsageError(f"a worker loads its own model, so give a name or a path that it can open, not a {kind}")
    return str(model)


def _stamp(model: str) -> int:
    """When a local model was last changed; 0 where it is no local file."""
    try:
        return Path(model).stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=2)
def _load_classifier(model: str, options: PredictOptions, _stamp: int) -> AnyClassifier:
    """The model of a process, which tasks that follow each other share."""
    cpu_threads.keep_freed_memory()
    device = devices.resolve_device(options.device)
    classifier = open_classifier(model, options, device, SINGLE_PROCESS, ignore_note, total=0)
    if isinstance(classifier, Classifier):
        check_supported(classifier, embed=options.embed, attention=False)
    return classifier


@functools.lru_cache(maxsize=2)
def _load_preprocess(model: str, _stamp: int) -> tuple[PreprocessConfig, int]:
    """The preprocessing of a model and its channels; its weights are dropped."""
    trained = load_trained(model)
    return require_preprocess(trained), trained.model.config.channels


# --- columns ---------------------------------------------------------------------------------------------------------


def _is_frame(batch: Any) -> bool:
    """Whether a batch is a DataFrame, of pandas or like it."""
    return hasattr(batch, "columns") and hasattr(batch, "assign")


def _list_images(batch: Any, column: str) -> list[ImageRef]:
    """The images of a batch, each with its path as its name where there is a column `path`."""
    if not isinstance(batch, Mapping) and not _is_frame(batch):
        raise UsageError(
            f"a batch is a dictionary of columns or a pandas DataFrame, not {type(batch).__name__}: with Ray Data give"
            ' batch_format="numpy"'
        )
    names = list(batch.columns if _is_frame(batch) else batch)
    if column not in names:
        raise UsageError(f"the batch has no column {column}; column= chooses one of {', '.join(map(str, names))}")
    cells = list(batch[column])
    paths = list(batch["path"]) if "path" in names else [None] * len(cells)
    errors = list(batch[ERROR]) if column == PIXELS and ERROR in names else [None] * len(cells)
    return [_make_ref(*row) for row in zip(range(len(cells)), cells, paths, errors, strict=True)]


def _make_ref(index: int, cell: Any, path: Any, error: Any) -> ImageRef:
    name = path if isinstance(path, str) else f"image {index}"
    if isinstance(error, str) and error:
        return ImageRef(name, "", error=error)
    if isinstance(cell, Mapping):
        cell = cell.get("bytes") if cell.get("bytes") is not None else cell.get("path")
    if cell is None:
        return ImageRef(name, "", error=f"{name} is empty")
    if isinstance(cell, str):
        return ImageRef(cell, cell)
    return ImageRef(name, "", content=bytes(cell) if isinstance(cell, bytearray | memoryview) else cell)


def _load(loader: InputLoader, image: ImageRef) -> torch.Tensor | DataError:
    """The model input of an image; an array that is one already stays as it is."""
    content, shape = image.content, (loader.channels, *loader.preprocess.size)
    if isinstance(content, np.ndarray) and content.dtype == np.uint8 and content.shape == shape:
        return torch.from_numpy(np.array(content))
    return loader.load(image)


def _make_column(values: Sequence[Any]) -> NDArray[Any]:
    """A column of objects, of which NumPy does not make a matrix."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _add_columns(batch: Any, columns: Mapping[str, NDArray[Any]]) -> Any:
    if _is_frame(batch):
        return batch.assign(**{name: list(values) for name, values in columns.items()})
    return {**batch, **columns}
