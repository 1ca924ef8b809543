"""A model in use: images in, labels and probabilities out. What the command line and others call."""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from vitrail.data.decode import Source, decode
from vitrail.data.transforms import evaluation_view, normalise
from vitrail.errors import DataError, UsageError
from vitrail.model import device as devices
from vitrail.weights.trained import Trained, require

UNSURE = "unsure"

Answer = list[tuple[str, float]]


class Classifier:
    """Labels for images, prepared as the model file says."""

    def __init__(self, trained: Trained, *, device: str | torch.device | None = None, batch_size: int = 32) -> None:
        preprocess = require(trained).preprocess
        if preprocess is None:
            raise UsageError(
                "the weights do not say how images must be prepared. Name it once:"
                " vitrail convert MODEL OUT.safetensors --preprocess imagenet (or inception, torchvision)"
            )
        if not trained.model.config.classes:
            raise UsageError("the model has no head, so it gives features and no labels")
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; it must be at least 1")
        self.device = devices.named(device)
        self.batch_size = batch_size
        self.preprocess = preprocess
        self.temperature = trained.temperature
        self.several = trained.several
        self.threshold = trained.threshold
        self.labels = trained.labels or tuple(f"class {index}" for index in range(trained.model.config.classes))
        model = trained.model
        if model.training or next(model.parameters()).device != self.device:
            model = copy.deepcopy(model)  # the caller's own stays where and how it is
        self.model = model.to(self.device).eval()

    def __call__(self, images: Sequence[Source], top: int = 5) -> list[Answer]:
        """For each image its `top` labels, the likeliest first, with their probabilities.

        Where the likeliest is below the file's threshold, "unsure" stands before them with its probability.
        """
        if isinstance(images, str | bytes | Path | Image.Image):
            raise UsageError("give a list of images, also for a single one: classify([image])")
        if top < 1:
            raise UsageError(f"top is {top}; it must be at least 1")
        starts = range(0, len(images), self.batch_size)
        batches = (map(self.view, images[start : start + self.batch_size]) for start in starts)
        return [answer for views in batches for answer in self._said(list(views), top)]

    def each(self, images: Sequence[Source], top: int = 5, *, threads: int = 1) -> list[Answer | DataError]:
        """The same for images of which some may be unreadable: of those the reason. Threads decode the images."""

        def view(image: Source) -> Tensor | DataError:
            try:
                return self.view(image)
            except DataError as error:
                return error

        with ThreadPoolExecutor(threads) as pool:
            views = list(pool.map(view, images))
        readable = [each for each in views if isinstance(each, Tensor)]
        said = iter(self._said(readable, top) if readable else [])
        return [next(said) if isinstance(each, Tensor) else each for each in views]

    def view(self, image: Source) -> Tensor:
        """What the model sees of an image, uint8 (C, S, S)."""
        return evaluation_view(decode(image, self.model.config.channels), self.preprocess)

    def _said(self, views: Sequence[Tensor], top: int) -> list[Answer]:
        """The labels of one batch of views."""
        answers = []
        for row in self._computed(views):
            best = row.topk(min(top, len(row)))
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            answer = [(self.labels[index], value) for value, index in pairs]
            answers.append([(UNSURE, answer[0][1]), *answer] if answer[0][1] < self.threshold else answer)
        return answers

    def probabilities(self, images: Sequence[Source]) -> Tensor:
        """One batch of images -> (B, L) on the CPU."""
        return self._computed([self.view(image) for image in images])

    @torch.inference_mode()
    def _computed(self, views: Sequence[Tensor]) -> Tensor:
        pixels = torch.stack(list(views)).to(self.device)  # uint8 travels, four times lighter than float32
        logits = self.model(normalise(pixels, self.preprocess)).float()
        logits = logits / self.temperature
        return (logits.sigmoid() if self.several else logits.softmax(dim=-1)).cpu()
