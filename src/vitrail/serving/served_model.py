"""A served model: its name, its queue, and what it computes from model inputs.

B inputs  C channels   S image side   H heads   N tokens   n = R K patches in R rows and K columns   L classes
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.shards import encode_png
from vitrail.data.transforms import normalize
from vitrail.errors import UsageError
from vitrail.inference.classifier import Classifier, rank_labels
from vitrail.model.vit import ViT, attention_maps
from vitrail.serving.batching import BatchQueue
from vitrail.serving.upload_decoding import InputSpec
from vitrail.visualization.attention import compute_rollout
from vitrail.visualization.image_grids import color_attention, overlay_attention
from vitrail.weights.trained import is_label_predicted

_OPACITY_RANGE = (0.35, 0.75)  # of the overlay where attention is least and greatest; the same as in script.js
_QUANTILE_RANGE = (0.05, 0.99)  # of the patches: one outlier would leave all others dark
CONFIG_FILE = "config.json"
_SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin")
# of files and folders that say nothing: the folder above them has the name
_GENERIC_NAMES = ("best", "last", "model", "weights", "checkpoints", "snapshots", "blobs")
_LIST_NAMES = ("list", "labels", "train", "data", "images", "metadata")  # of a dataset: its folder has the name
_HASH = re.compile(r"[0-9a-f]{16,}")


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """One model, computed by one thread."""

    name: str
    classifier: Classifier
    queue: BatchQueue
    warmup: Future[Any]  # the first pass; once it is done, requests run at full speed

    @property
    def input_spec(self) -> InputSpec:
        """How images are decoded for this model."""
        return InputSpec(self.classifier.preprocess, self.classifier.model.config.channels)

    @property
    def is_ready(self) -> bool:
        return self.warmup.done() and self.warmup.exception() is None

    def rank_labels(self, probabilities: Tensor, top: int) -> dict[str, Any]:
        """Probabilities (L,) -> the `top` labels, and whether the first is below the model's threshold.

        A multi-label model with thresholds adds the other labels above theirs, and marks which are predicted.
        """
        classifier = self.classifier
        if classifier.label_thresholds:
            return {"model": self.name, "predictions": self._mark_labels(probabilities, top), "unsure": False}
        [ranked] = rank_labels(probabilities[None], classifier.labels, top)
        predictions = [{"label": label, "probability": value} for label, value in ranked]
        return {"model": self.name, "predictions": predictions, "unsure": ranked[0][1] < classifier.threshold}

    def _mark_labels(self, probabilities: Tensor, top: int) -> list[dict[str, Any]]:
        """The `top` labels and all predicted ones, each with its threshold and whether it is predicted."""
        thresholds, labels = self.classifier.label_thresholds, self.classifier.labels
        predicted = is_label_predicted(probabilities, thresholds).tolist()
        values, order = (column.tolist() for column in probabilities.sort(descending=True))
        return [
            {
                "label": labels[index],
                "probability": value,
                "threshold": thresholds[index],
                "predicted": predicted[index],
            }
            for rank, (value, index) in enumerate(zip(values, order, strict=True))
            if rank < top or predicted[index]
        ]

    def compute_rollouts(self, inputs: Sequence[Tensor]) -> NDArray[np.float32]:
        """(B, R, K): how much of each patch reaches the head."""
        return compute_rollout(self.classifier.model, self._normalize_inputs(inputs))

    def compute_attention(self, inputs: Sequence[Tensor], layer: int) -> list[NDArray[np.uint8]]:
        """For each input (H, 1 + n, n): what the class token and then each patch attend to in a layer, counted from 1.

        Each row is scaled to its greatest value, so that a byte suffices. Without a class token the first row is the
        mean of all patches.
        """
        model, depth = self.classifier.model, self.depth
        if not 1 <= layer <= depth:
            raise UsageError(f"layer is {layer}; {self.name} has {depth}, counted from 1")
        for _, maps in zip(range(layer), attention_maps(model, self._normalize_inputs(inputs)), strict=False):
            attention = maps  # (B, H, N, N)
        assert isinstance(model, ViT)
        prefix = model.config.num_prefix_tokens
        patches = attention[:, :, prefix:, prefix:]
        first = attention[:, :, :1, prefix:] if model.config.class_token else patches.mean(dim=2, keepdim=True)
        rows = torch.cat([first, patches], dim=2)
        rows = rows / rows.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        return list((rows * 255).round().to(torch.uint8).cpu().numpy())

    def _normalize_inputs(self, inputs: Sequence[Tensor]) -> Tensor:
        return normalize(torch.stack(list(inputs)).to(self.classifier.device), self.classifier.preprocess)

    @property
    def depth(self) -> int:
        """Attention layers; a ResNet has none."""
        model = self.classifier.model
        return model.config.depth if isinstance(model, ViT) else 0

    def describe(self) -> dict[str, Any]:
        """The model's entry of /v1/models."""
        model, preprocess = self.classifier.model, self.classifier.preprocess
        config = model.config if isinstance(model, ViT) else None
        return {
            "name": self.name,
            "classes": model.config.classes,
            "input": list(preprocess.size),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "grid": list(config.compute_grid(preprocess.size)) if config else None,
            "layers": self.depth,
            "heads": config.heads if config else 0,
            "multi_label": self.classifier.multi_label,
            "threshold": self.classifier.threshold,
            "has_label_thresholds": bool(self.classifier.label_thresholds),
            "precision": self.classifier.precision,
        }


def start_model(name: str, classifier: Classifier, queue: BatchQueue) -> ServedModel:
    """Start a model: its first pass has begun."""
    blank = torch.zeros((classifier.model.config.channels, *classifier.preprocess.size), dtype=torch.uint8)
    compute = classifier.predict_proba if classifier.labels else classifier.extract_features
    return ServedModel(name, classifier, queue, queue.thread.submit(compute, [blank]))


def choose_names(models: Sequence[str]) -> list[str]:
    """Choose short, unique names for MODELs: the dataset's name for a run, else the file's; no paths, no hashes."""
    names: list[str] = []
    for model in models:
        name = _read_dataset_name(Path(model)) or _make_file_name(model)
        number = 1 + sum(each.rpartition(" ")[0] == name or each == name for each in names)
        names.append(name if number == 1 else f"{name} {number}")
    return names


def _read_dataset_name(model: Path) -> str | None:
    """The name of the dataset that a run (or weights in its folder) was trained on; None where there is no run."""
    folder = next((each for each in (model, *model.parents[:2]) if (each / CONFIG_FILE).is_file()), None)
    if folder is None or not (folder / "weights").is_dir():
        return None
    try:
        data = json.loads((folder / CONFIG_FILE).read_bytes())["data"]
        hub = re.match(r"hf:([^:@]+)", data)  # and a configuration or revision
    except (ValueError, KeyError, TypeError):  # it is no run's, or DATA is no string
        return None
    parts = [part for part in re.split(r"[\\/]", hub[1] if hub else data) if part]
    stems = [re.sub(r"\.(csv|tsv|jsonl|ndjson|tar)$", "", part) for part in parts]
    return next((stem for stem in reversed(stems) if stem not in _LIST_NAMES and not set(stem) & set("*?[{")), None)


def _make_file_name(model: str) -> str:
    path = Path(model.partition(":")[2] if model.startswith(("hf:", "timm:")) else Path(model).absolute())
    stem = path.with_suffix("" if path.suffix in _SUFFIXES else path.suffix)
    parts = [re.sub(rf"@{_HASH.pattern}$", "", part) for part in stem.parts if part != "/"]
    return next((part for part in reversed(parts) if part not in _GENERIC_NAMES and not _HASH.fullmatch(part)), model)


def render_thumbnail(pixels: Tensor) -> bytes:
    """A PNG of a model input, uint8 (C, S, S)."""
    values = pixels.permute(1, 2, 0).numpy()
    return encode_png(Image.fromarray(values[..., 0] if values.shape[2] == 1 else values), compress_level=3)


def render_rollout(pixels: Tensor, rollout: NDArray[np.float32], *, over_image: bool) -> bytes:
    """A PNG of a rollout (R, K) over the crop that the model saw; or alone, as an overlay for it."""
    if over_image:
        colors = overlay_attention(pixels, rollout)
    else:
        low, high = np.quantile(rollout, _QUANTILE_RANGE)
        size = pixels.shape[2], pixels.shape[1]
        colors = color_attention(rollout, size, limits=(low, high), opacity_range=_OPACITY_RANGE)
    return encode_png(Image.fromarray(colors), compress_level=3)
