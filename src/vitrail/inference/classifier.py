"""A model in use: images in; labels, probabilities or features out. What the command line, the server and others call.

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
from vitrail.export.exported_model import ExportedModel
from vitrail.inference import compute
from vitrail.model.quantized import describe_cpu
from vitrail.runtime import devices
from vitrail.weights.precision_measurements import choose_precision
from vitrail.weights.trained import Trained, require_preprocess

UNSURE = "unsure"

RankedLabels = list[tuple[str, float]]


class Classifier:
    """What a model says of images, which are prepared as its file says.

    An image is a path, the bytes of a file, a Pillow image, an array uint8 (H, W) or (H, W, C), or a view that was made
    of one by `view`. Any number of threads may call one classifier: nothing in it changes once it is made.

    On a CPU answers are computed in the precision that the file's measurements show to be best there, or in the one
    that is given. Features are float32 unless another is given, and `model`, the weights themselves, always is.
    """

    def __init__(
        self,
        trained: Trained,
        *,
        device: str | torch.device | None = None,
        batch_size: int = 32,
        precision: Precision | None = None,
    ) -> None:
        preprocess = require_preprocess(trained)
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; it must be at least 1")
        self.device = devices.resolve_device(device)
        self.batch_size = batch_size
        self.preprocess = preprocess
        self.temperature = trained.temperature
        self.multi_label = trained.multi_label
        self.threshold = trained.threshold
        self.labels = trained.labels or tuple(f"class {index}" for index in range(trained.model.config.classes))
        model = trained.model
        if model.training or next(model.parameters()).device != self.device:
            model = copy.deepcopy(model)  # the caller's own stays where and how it is
        self.model = model.to(self.device).eval()
        here = dataclasses.replace(trained, model=self.model)
        self.precision: Precision = precision or "float32"
        if precision is None and self.device.type == "cpu":
            self.precision = choose_precision(
                trained.precision_measurements, describe_cpu(), compute.list_available_precisions(here)
            )
        self._functions = compute.build_inference_functions(here, self.precision)
        exact = self._functions if self.precision in (precision, "float32") else compute.build_inference_functions(here)
        self._compute_features = exact.features

    def __call__(self, images: Sequence[ImageSource | Tensor], top: int = 5) -> list[RankedLabels]:
        """For each image its `top` labels, the likeliest first, with their probabilities; computed in batches.

        Where the likeliest is below the file's threshold, "unsure" stands before them with its probability.
        """
        if isinstance(images, str | bytes | Path | Image.Image | np.ndarray):
            raise UsageError("give a list of images, also for a single one: classify([image])")
        self._check_prediction_request(top)
        starts = range(0, len(images), self.batch_size)
        batches = (images[start : start + self.batch_size] for start in starts)
        return [answer for batch in batches for answer in self.predict(batch, top)]

    def make_input(self, image: ImageSource | Tensor, *, name: str | None = None) -> Tensor:
        """What the model sees of an image, uint8 (C, S, S); a view stays as it is. Errors call the image `name`."""
        if not isinstance(image, Tensor):
            return make_eval_input(decode(image, self.model.config.channels, name=name), self.preprocess)
        shape = (self.model.config.channels, *self.preprocess.size)
        if image.dtype != torch.uint8 or tuple(image.shape) != shape:
            raise DataError(f"a tensor is a view, uint8 {shape}, not {image.dtype} {tuple(image.shape)}")
        return image

    def predict(self, images: Sequence[ImageSource | Tensor], top: int = 5) -> list[RankedLabels]:
        """The same as a call, for one batch of any size."""
        self._check_prediction_request(top)
        return _rank_labels(self.predict_proba(images), self.labels, top, self.threshold)

    def predict_proba(self, images: Sequence[ImageSource | Tensor]) -> Tensor:
        """One batch of images -> (B, L) on the CPU; where several labels may be right, each has one of its own."""
        self._check_prediction_request()
        return self._functions.probabilities(self._make_inputs(images))

    def extract_features(self, images: Sequence[ImageSource | Tensor]) -> Tensor:
        """One batch of images -> what the head reads of them, float32 (B, D) on the CPU."""
        return self._compute_features(self._make_inputs(images))

    def _make_inputs(self, images: Sequence[ImageSource | Tensor]) -> Tensor:
        """uint8 (B, C, S, S) on the device."""
        views = [self.make_input(image).cpu().numpy() for image in images]
        shape = (0, self.model.config.channels, *self.preprocess.size)
        pixels = np.stack(views) if views else np.empty(shape, np.uint8)  # torch would wait for its threads to wake
        return torch.from_numpy(pixels).to(self.device)  # as uint8, which is four times lighter than float32

    def _check_prediction_request(self, top: int = 1) -> None:
        if not self.labels:
            raise UsageError("the model has no head, so it gives features and no labels")
        if top < 1:
            raise UsageError(f"top is {top}; it must be at least 1")


class ExportedClassifier:
    """What an exported file says of images, run by its own runtime on the CPU."""

    def __init__(self, exported: ExportedModel, *, batch_size: int = 32) -> None:
        self.path, self.preprocess, self.batch_size = exported.path, exported.preprocess, batch_size
        self.labels, self.threshold = exported.labels, exported.threshold
        self._run, self._channels = exported.run, exported.channels

    def make_input(self, image: ImageSource, *, name: str | None = None) -> Tensor:
        """What the graph is fed of an image, uint8 (C, S, S)."""
        return make_eval_input(decode(image, self._channels, name=name), self.preprocess)

    def predict(self, inputs: Sequence[Tensor], top: int = 5) -> list[RankedLabels]:
        """For each view its `top` labels, the likeliest first, with their probabilities."""
        return _rank_labels(self._run(torch.stack(list(inputs)))["probabilities"], self.labels, top, self.threshold)


def _rank_labels(probabilities: Tensor, labels: Sequence[str], top: int, threshold: float) -> list[RankedLabels]:
    """The `top` labels of each row, the likeliest first; "unsure" before them where that is below the threshold."""
    best = probabilities.topk(min(top, len(labels)), dim=1)
    found = []
    for values, classes in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        answer = [(labels[index], value) for index, value in zip(classes, values, strict=True)]
        found.append([(UNSURE, answer[0][1]), *answer] if answer[0][1] < threshold else answer)
    return found
