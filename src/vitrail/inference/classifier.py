"""A model in use: images in; labels, probabilities or features out. The commands, the server and Python users call it.

B images of a batch   C channels   S image side   L classes   D features
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.config import Precision
from vitrail.config.features import AnyFeatureKind
from vitrail.data.decode import ImageSource, decode
from vitrail.data.transforms import make_eval_input
from vitrail.errors import DataError, UsageError
from vitrail.export.export import ExportedModel
from vitrail.inference.precision import build_inference_functions, list_available_precisions
from vitrail.model.quantized import describe_processor
from vitrail.runtime import devices
from vitrail.weights.precision_measurements import choose_precision
from vitrail.weights.trained import Trained, is_label_predicted, require_preprocess

UNSURE = "unsure"
NO_LABEL = "no label"

RankedLabels = list[tuple[str, float]]
"""Labels and their probabilities, the likeliest first."""


class Classifier:
    """A model that classifies images, which it preprocesses as its file says.

    An image is a path, the bytes of a file, a Pillow image, an array uint8 (H, W) or (H, W, C), or a model input from
    `make_input`. Any number of threads may call one classifier: it never changes once it is created.

    It computes predictions in the precision that the file's measurements show to be best on this CPU or GPU, or in
    `precision`. Features are float32 unless `precision` is given, and `model`, the weights themselves, always is.
    `features` chooses what `extract_features` gives, as in `vitrail.embed`, or "dense" as in `vitrail.dense`, and
    `normalize` scales it to length 1. With `compile_batches` torch compiles the model for batches of `batch_size`,
    which takes a while at the first one.

        classifier = vitrail.Classifier(vitrail.load("model.safetensors"))
        print(classifier.predict(["cat.jpg", "dog.jpg"], top=2))
    """

    def __init__(
        self,
        trained: Trained,
        *,
        device: str | torch.device | None = None,
        batch_size: int = 32,
        precision: Precision | None = None,
        compile_batches: bool = False,
        features: AnyFeatureKind = "default",
        normalize: bool = False,
    ) -> None:
        self.preprocess = require_preprocess(trained)
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; it must be at least 1")
        self.device = devices.resolve_device(device)
        self.batch_size, self.channels = batch_size, trained.model.config.channels
        self.temperature = trained.temperature
        self.multi_label = trained.multi_label
        self.threshold, self.label_thresholds = trained.threshold, trained.label_thresholds
        self.labels = trained.labels or tuple(f"class {index}" for index in range(trained.model.config.classes))
        model = trained.model
        if model.training or next(model.parameters()).device != self.device:
            model = copy.deepcopy(model)  # the caller's model keeps its device and mode
        self.model = model.to(self.device).eval()
        on_device = dataclasses.replace(trained, model=self.model)
        self.precision: Precision = precision or "float32"
        if precision is None:
            available, processor = list_available_precisions(on_device), describe_processor(self.device)
            self.precision = choose_precision(trained.precision_measurements, processor, available)
        compiled_batch = batch_size if compile_batches else 0
        self.features, self.normalize = features, normalize
        build_functions = partial(build_inference_functions, on_device, features=features, normalize_features=normalize)
        functions = build_functions(self.precision, compiled_batch=compiled_batch)
        exact = functions if self.precision in (precision, "float32") else build_functions()
        self._compute_probabilities, self._compute_features = functions.probabilities, exact.features

    def __call__(self, images: Sequence[ImageSource | Tensor], top: int | None = 5) -> list[RankedLabels]:
        """The `top` labels of each image with their probabilities, the likeliest first; computed in batches.

        Where the likeliest is below the file's threshold, "unsure" comes before them with its probability. With a
        `top` of None an image gets all labels above the thresholds of a multi-label model, or one where it has none.
        """
        if isinstance(images, str | bytes | Path | Image.Image | np.ndarray):
            raise UsageError("give a list of images, also for a single one: classify([image])")
        self._check_request(top)
        predictions = list[RankedLabels]()
        for start in range(0, len(images), self.batch_size):
            predictions += self.predict(images[start : start + self.batch_size], top)
        return predictions

    def make_input(self, image: ImageSource | Tensor, *, name: str | None = None) -> Tensor:
        """The model input of an image, uint8 (C, S, S); an input is returned as it is. Errors call the image `name`."""
        if not isinstance(image, Tensor):
            return make_eval_input(decode(image, self.channels, name=name), self.preprocess)
        shape = (self.channels, *self.preprocess.size)
        if image.dtype != torch.uint8 or tuple(image.shape) != shape:
            raise DataError(f"a tensor must be a model input, uint8 {shape}, not {image.dtype} {tuple(image.shape)}")
        return image

    def predict(self, images: Sequence[ImageSource | Tensor], top: int | None = 5) -> list[RankedLabels]:
        """The same as a call, for one batch of any size."""
        self._check_request(top)
        return self.start_prediction([self._stack_inputs(images)], top)()

    def predict_proba(self, images: Sequence[ImageSource | Tensor]) -> Tensor:
        """One batch of images -> probabilities (B, L) on the CPU; independent of each other for a multi-label model."""
        self._check_request()
        return self._compute_probabilities(self._stack_inputs(images)).cpu()

    def extract_features(self, images: Sequence[ImageSource | Tensor]) -> Tensor:
        """One batch of images -> features on the CPU: by default the head's input, float32 (B, D)."""
        return self._compute_features(self._stack_inputs(images)).cpu()

    def start_prediction(self, parts: Sequence[Tensor], top: int | None) -> Callable[[], list[RankedLabels]]:
        """Compute the `top` labels of inputs, uint8 (b, C, S, S) each; call the result to wait for a GPU."""
        return _start_ranking(self._compute_probabilities(self._join_parts(parts)), self, top)

    def start_features(self, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Compute the features of inputs, uint8 (b, C, S, S) each; call the result to wait for a GPU."""
        wait = devices.start_copy_to_cpu(self._compute_features(self._join_parts(parts)))
        return lambda: wait()[0]

    def _join_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """uint8 (B, C, S, S) on the device, without waiting for it."""
        on_device = [part.to(self.device, non_blocking=True) for part in parts]
        return on_device[0] if len(on_device) == 1 else torch.cat(on_device)

    def _stack_inputs(self, images: Sequence[ImageSource | Tensor]) -> Tensor:
        """uint8 (B, C, S, S) on the device."""
        inputs = [self.make_input(image).cpu().numpy() for image in images]
        shape = (0, self.channels, *self.preprocess.size)
        pixels = np.stack(inputs) if inputs else np.empty(shape, np.uint8)  # torch would wait for its threads to wake
        return torch.from_numpy(pixels).to(self.device)  # as uint8, a quarter of float32's bytes

    def _check_request(self, top: int | None = 1) -> None:
        if not self.labels:
            raise UsageError("the model has no head, so it computes features but no labels")
        if top is not None and top < 1:
            raise UsageError(f"top is {top}; it must be at least 1")


class ExportedClassifier:
    """An exported file that classifies images, run by its own runtime on the CPU."""

    def __init__(self, exported: ExportedModel, *, batch_size: int = 32) -> None:
        self.path, self.preprocess, self.batch_size = exported.path, exported.preprocess, batch_size
        self.labels, self.threshold = exported.labels, exported.threshold
        self.label_thresholds = exported.label_thresholds
        self._run, self.channels = exported.run, exported.channels
        self.device = torch.device("cpu")

    def start_prediction(self, parts: Sequence[Tensor], top: int | None) -> Callable[[], list[RankedLabels]]:
        """Compute the `top` labels of inputs, uint8 (b, C, S, S) each; the result gives them."""
        return _start_ranking(self._run(torch.cat(list(parts)))["probabilities"], self, top)


def _start_ranking(
    probabilities: Tensor, classifier: Classifier | ExportedClassifier, top: int | None
) -> Callable[[], list[RankedLabels]]:
    """Rank the labels of (B, L); call the result to wait for a GPU."""
    labels, thresholds = classifier.labels, classifier.label_thresholds
    is_by_threshold = top is None and bool(thresholds)
    ranked = probabilities.topk(len(labels) if is_by_threshold else min(top or 1, len(labels)), dim=1)
    masks = [is_label_predicted(probabilities, thresholds).gather(1, ranked.indices)] if is_by_threshold else []
    wait = devices.start_copy_to_cpu(ranked.values, ranked.indices, *masks)

    def finish() -> list[RankedLabels]:
        values, classes, *is_predicted = wait()
        if not is_predicted:
            return _list_predictions(values, classes, labels, classifier.threshold)
        rows = zip(_list_predictions(values, classes, labels), is_predicted[0].tolist(), strict=True)
        return [list(itertools.compress(row, mask)) for row, mask in rows]

    return finish


def rank_labels(probabilities: Tensor, labels: Sequence[str], top: int) -> list[RankedLabels]:
    """The `top` labels of each row of (B, L)."""
    best = probabilities.topk(min(top, len(labels)), dim=1)
    return _list_predictions(best.values, best.indices, labels)


def _list_predictions(
    probabilities: Tensor, classes: Tensor, labels: Sequence[str], threshold: float = 0.0
) -> list[RankedLabels]:
    """The labels of each row of (B, top), after "unsure" where the likeliest is below the threshold."""
    predictions = list[RankedLabels]()
    for values, indices in zip(probabilities.tolist(), classes.tolist(), strict=True):
        ranked = [(labels[index], value) for value, index in zip(values, indices, strict=True)]
        predictions.append([(UNSURE, values[0]), *ranked] if values[0] < threshold else ranked)
    return predictions
