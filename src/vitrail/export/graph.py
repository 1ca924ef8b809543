"""What an exported file computes: pixels as they come from an image in, logits and probabilities out.

B images   C channels   S image side   L classes   D features
"""

import copy
import dataclasses
import json
from collections.abc import Callable
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrail.config import PreprocessConfig
from vitrail.errors import UsageError
from vitrail.model.build import Model
from vitrail.model.resnet import BiT, BiTStem
from vitrail.model.vit import ViT
from vitrail.weights.adapt import adapt
from vitrail.weights.trained import Trained, assemble_model, require_trained

INPUT_NAME = "pixels"
REQUIRED_METADATA = ("labels", "pixels", "normalised", "several", "temperature", "threshold")
"""The entries of `metadata` that a file is run by."""

GraphRunner = Callable[[Tensor], dict[str, Tensor]]
"""An opened file: pixels, uint8 (B, C, S, S) -> its outputs by name."""


class ExportGraph(nn.Module):
    """uint8 (B, C, S, S) -> logits and probabilities (B, L), or features (B, D) where the model has no head.

    Other software feeds it, which must not get the normalisation wrong: that is inside.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        preprocess = require_preprocess(trained)
        self.model = _fix_image_size(trained, preprocess.size)
        self.temperature, self.multi_label = trained.temperature, trained.multi_label
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(preprocess, name)).reshape(-1, 1, 1))

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        found = self.model((pixels.float() / 255 - self.mean) / self.std)
        if not self.model.config.classes:
            return {"features": found}
        logits = found / self.temperature
        return {"logits": logits, "probabilities": logits.sigmoid() if self.multi_label else logits.softmax(dim=-1)}


class PaddingFreeBiTStem(nn.Module):
    """BiT's stem, whose pooling sees a border of zeros, without an operator that pads.

    ONNX Runtime, 1.31 at least, merges that operator into the pooling, whose own border is never the largest.
    """

    border: Tensor

    def __init__(self, stem: BiTStem, size: tuple[int, int]) -> None:
        super().__init__()
        self.conv = stem.conv
        least = torch.full((1, 1, *(-(-side // 2) for side in size)), torch.finfo(torch.float32).min)
        self.register_buffer("border", F.max_pool2d(F.pad(least, (1, 1, 1, 1)), 3, 2))  # 0 where a window sees it

    def forward(self, images: Tensor) -> Tensor:
        return torch.maximum(F.max_pool2d(self.conv(images), 3, 2, padding=1), self.border)


def export_program(trained: Trained, transform: Callable[[Model], Model] = lambda model: model) -> ExportedProgram:
    """The graph of a model, for batches of any size; it shares the model's weights. A runtime may change its parts."""
    graph, channels, size = (
        ExportGraph(prepare_for_export(trained)),
        trained.model.config.channels,
        require_preprocess(trained).size,
    )
    graph.model = transform(graph.model)
    example = torch.zeros((2, channels, *size), dtype=torch.uint8)  # of two: a one would be taken for a constant
    with torch.no_grad():
        found = torch.export.export(graph, (example,), dynamic_shapes=({0: Dim("batch", min=1)},))
    found.example_inputs = None  # a file would hold them as a pickle
    for node in found.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return found


def get_output_names(trained: Trained) -> tuple[str, ...]:
    """What comes out, in this order."""
    return ("logits", "probabilities") if trained.model.config.classes else ("features",)


def build_metadata(trained: Trained) -> dict[str, str]:
    """What a file says beside its graph, each a JSON value: how an image becomes pixels and what the outputs mean."""
    preprocess = dataclasses.asdict(require_preprocess(trained))
    normalised = {name: preprocess.pop(name) for name in ("mean", "std")}
    facts = {
        "labels": trained.labels,
        "pixels": {"channels": trained.model.config.channels, **preprocess},
        "normalised": normalised,  # inside; for the record
        "several": trained.multi_label,
        "temperature": trained.temperature,  # logits are divided by it already
        "threshold": trained.threshold,
        "origin": dataclasses.asdict(trained.origin),
        "vitrail": version("vitrail"),
    }
    return {name: json.dumps(value, ensure_ascii=False) for name, value in facts.items()}


def require_preprocess(trained: Trained) -> PreprocessConfig:
    """How images are prepared, or an error that says how to state it."""
    preprocess = require_trained(trained).preprocess
    if preprocess is None:
        raise UsageError(
            "the weights do not say how images must be prepared, and the graph does a part of that:"
            " add --preprocess imagenet (or inception, torchvision)"
        )
    return preprocess


def prepare_for_export(trained: Trained) -> Trained:
    """The model on the CPU, in eval mode; the caller's own stays where and how it is."""
    model = trained.model
    if model.training or next(model.parameters()).device.type != "cpu":
        trained = dataclasses.replace(trained, model=copy.deepcopy(model).cpu().eval())
    return trained


def _fix_image_size(trained: Trained, size: tuple[int, int]) -> Model:
    """The model at one image size, in a form that every runtime computes alike; weights are shared, not copied."""
    model = trained.model
    if isinstance(model, BiT):
        model = assemble_model(model.config, model.state_dict())
        assert isinstance(model, BiT)
        model.register_module("stem", PaddingFreeBiTStem(model.stem, size))
        return model
    if model.config.image_size != size:
        model = adapt(trained, image_size=size).model  # once and for all, as the model would for every batch
        assert isinstance(model, ViT)
    if model.config.positions != "sincos-2d":
        return model
    config = dataclasses.replace(
        model.config,
        positions="learned-1d",
        positions_at="stem" if model.config.positions_at == "stem" else "every-layer-shared",
        prefix_positions=True,
    )
    return assemble_model(config, model.state_dict() | {"pos_embed": model.compute_positions(config.grid)})
