"""A model in use: images in, labels and probabilities out. What the command line and others call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.data.decode import Source, decode
from vitrail.data.transforms import evaluation_view, normalise
from vitrail.errors import UsageError
from vitrail.model import device as devices
from vitrail.weights.trained import Trained


class Classifier:
    """Labels for images, prepared as the model file says."""

    def __init__(self, trained: Trained, *, device: str | torch.device | None = None, batch_size: int = 32) -> None:
        if trained.preprocess is None:
            raise UsageError(
                "the weights do not say how images must be prepared. Name it once:"
                " vitrail convert MODEL OUT.safetensors --preprocess imagenet (or inception)"
            )
        if not trained.model.config.classes:
            raise UsageError("the model has no head, so it gives features and no labels")
        self.device = torch.device(device) if device is not None else devices.best()
        self.batch_size = batch_size
        self.preprocess = trained.preprocess
        self.labels = trained.labels or tuple(f"class {index}" for index in range(trained.model.config.classes))
        self.model = trained.model.to(self.device).eval()

    def __call__(self, images: Sequence[Source], top: int = 5) -> list[list[tuple[str, float]]]:
        """For each image its `top` labels, the likeliest first, with their probabilities."""
        answers = []
        for start in range(0, len(images), self.batch_size):
            for row in self.probabilities(images[start : start + self.batch_size]):
                best = row.topk(min(top, len(row)))
                pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
                answers.append([(self.labels[index], value) for value, index in pairs])
        return answers

    @torch.inference_mode()
    def probabilities(self, images: Sequence[Source]) -> Tensor:
        """One batch of images -> (B, L) on the CPU."""
        channels = self.model.config.channels
        views = [evaluation_view(decode(image, channels), self.preprocess) for image in images]
        pixels = torch.stack(views).to(self.device)  # uint8 travels, four times lighter than float32
        return self.model(normalise(pixels, self.preprocess)).float().softmax(dim=-1).cpu()
