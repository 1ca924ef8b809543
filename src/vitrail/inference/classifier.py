"""A model in use: images in; labels, probabilities or features out. The commands, the server and Python users call it.

B images of a batch   C channels   S image side   L classes   D features
"""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.config import Precision
from vitrail.data.decode import ImageSource, decode
from vitrail.data.transforms import make_eval_input
from vitrail.errors import DataError, UsageError
from vitrail.export.export import ExportedModel
from vitrail.inference.precision import build_inference_functions, list_available_precisions
from vitrail.model.quantized import describe_cpu
from vitrail.runtime import devices
from vitrail.weights.precision_measurements import choose_precision
from vitrail.weights.trained import Trained, require_preprocess

UNSURE = "unsure"

RankedLabels = list[tuple[str, float]]
"""Labels and their probabilities, the likeliest first."""


class Classifier:
    """A model that classifies images, which it preprocesses as its file says.

    An image is a path, the bytes of a file, a Pillow image, an array uint8 (H, W) or (H, W, C), or a model input from
    `make_input`. Any number of threads may call one classifier: it never changes once it is created.

    On a CPU it computes predictions in the precision that the file's measurements show to be best there, or in
    `precision`. Features are float32 unless `precision` is given, and `model`, the weights themselves, always is.

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
    ) -> None:
        self.preprocess = require_preprocess(trained)
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; it must be at least 1")
        self.device = devices.resolve_device(device)
        self.batch_size = batch_size
        self.temperature = trained.temperature
        self.multi_label = trained.multi_label
        self.threshold = trained.threshold
        self.labels = trained.labels or tuple(f"class {index}" for index in range(trained.model.config.classes))
        model = trained.model
        if model.training or next(model.parameters()).device != self.device:
            model = copy.deepcopy(model)  # the caller's model keeps its device and mode
        self.model = model.to(self.device).eval()
        on_device = dataclasses.replace(trained, model=self.model)
        self.precision: Precision = precision or "float32"
        if precision is None and self.device.type == "cpu":
            available = list_available_precisions(on_device)
            self.precision = choose_precision(trained.precision_measurements, describe_cpu(), available)
        functions = build_inference_functions(on_device, self.precision)
        exact = functions if self.precision in (precision, "float32") else build_inference_functions(on_device)
        self._compute_probabilities, self._compute_features = functions.probabilities, exact.features

    def __call__(self, images: Sequence[ImageSource | Tensor], top: int = 5) -> list[RankedLabels]:
        """The `top` labels of each image with their probabilities, the likeliest first; computed in batches.

        Where the likeliest is below the file's threshold, "unsure" comes before them with its probability.
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
            return make_eval_input(decode(image, self.model.config.channels, name=name), self.preprocess)
        shape = (self.model.config.channels, *self.preprocess.size)
        if image.dtype != torch.uint8 or tuple(image.shape) != shape:
            raise DataError(f"a tensor must be a model input, uint8 {shape}, not {image.dtype} {tuple(image.shape)}")
        return image

    def predict(self, images: Sequence[ImageSource | Tensor], top: int = 5) -> list[RankedLabels]:
        """The same as a call, for one batch of any size."""
        self._check_request(top)
        return _list_predictions(self.predict_proba(images), self.labels, top, self.threshold)

    def predict_proba(self, images: Sequence[ImageSource | Tensor]) -> Tensor:
        """One batch of images -> probabilities (B, L) on the CPU; independent of each other for a multi-label model."""
        self._check_request()
        return self._compute_probabilities(self._stack_inputs(images))

    def extract_features(self, images: Sequence[ImageSource | Tensor]) -> Tensor:
        """One batch of images -> the head's input, float32 (B, D) on the CPU."""
        return self._compute_features(self._stack_inputs(images))

    def _stack_inputs(self, images: Sequence[ImageSource | Tensor]) -> Tensor:
        """uint8 (B, C, S, S) on the device."""
        inputs = [self.make_input(image).cpu().numpy() for image in images]
        shape = (0, self.model.config.channels, *self.preprocess.size)
        pixels = np.stack(inputs) if inputs else np.empty(shape, np.uint8)  # torch would wait for its threads to wake
        return torch.from_numpy(pixels).to(self.device)  # as uint8, a quarter of float32's bytes

    def _check_request(self, top: int = 1) -> None:
        if not self.labels:
            raise UsageError("the model has no head, so it computes features but no labels")
        if top < 1:
            raise UsageError(f"top is {top}; it must be at least 1")


class ExportedClassifier:
    """An exported file that classifies images, run by its own runtime on the CPU."""

    def __init__(self, exported: ExportedModel, *, batch_size: int = 32) -> None:
        self.path, self.preprocess, self.batch_size = exported.path, exported.preprocess, batch_size
        self.labels, self.threshold = exported.labels, exported.threshold
        self._run, self._channels = exported.run, exported.channels

    def make_input(self, image: ImageSource, *, name: str | None = None) -> Tensor:
        """The graph's input of an image, uint8 (C, S, S)."""
        return make_eval_input(decode(image, self._channels, name=name), self.preprocess)

    def predict(self, inputs: Sequence[Tensor], top: int = 5) -> list[RankedLabels]:
        """The `top` labels of each input with their probabilities, the likeliest first."""
        probabilities = self._run(torch.stack(list(inputs)))["probabilities"]
        return _list_predictions(probabilities, self.labels, top, self.threshold)


def rank_labels(probabilities: Tensor, labels: Sequence[str], top: int) -> list[RankedLabels]:
    """The `top` labels of each row of (B, L)."""
    best = probabilities.topk(min(top, len(labels)), dim=1)
    rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [[(labels[index], value) for value, index in zip(values, classes, strict=True)] for values, classes in rows]


def _list_predictions(probabilities: Tensor, labels: Sequence[str], top: int, threshold: float) -> list[RankedLabels]:
    """The `top` labels of each row, after "unsure" where the likeliest is below the threshold."""
    rows = rank_labels(probabilities, labels, top)
    return [[(UNSURE, ranked[0][1]), *ranked] if ranked[0][1] < threshold else ranked for ranked in rows]
