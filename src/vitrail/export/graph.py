"""The graph of an exported file: resized uint8 pixels in, logits and probabilities out.

B images   C channels   S image side   L classes   D features
"""

import copy
import dataclasses
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrail.config import ModelConfig
from vitrail.model.resnet import BiT, BiTStem
from vitrail.model.vit import Model, ViT
from vitrail.weights.adapt import adapt
from vitrail.weights.trained import Trained, assemble_model, logits_to_probabilities, require_preprocess

INPUT_NAME = "pixels"
REQUIRED_METADATA = ("labels", "pixels", "normalization", "multi_label", "temperature", "threshold")
"""The entries of the metadata that running a file needs."""
THRESHOLDS_KEY = "label_thresholds"  # of a multi-label model that has them
OLD_METADATA_KEYS = {"normalised": "normalization", "several": "multi_label"}  # of version 0.1.0

GraphRunner = Callable[[Tensor], dict[str, Tensor]]
"""An opened file as a function: pixels, uint8 (B, C, S, S) -> its outputs by name."""


class ExportGraph(nn.Module):
    """uint8 (B, C, S, S) -> logits and probabilities (B, L), or features (B, D) where the model has no head.

    Normalization is inside, so that the software that feeds it cannot get it wrong.
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
        outputs = self.model((pixels.float() / 255 - self.mean) / self.std)
        return name_outputs(outputs, self.model.config, self.temperature, self.multi_label)


def name_outputs(outputs: Tensor, config: ModelConfig, temperature: float, multi_label: bool) -> dict[str, Tensor]:
    """Name a model's outputs: logits over temperature and their probabilities, or features where it has no head."""
    if not config.classes:
        return {"features": outputs}
    logits = outputs / temperature
    return {"logits": logits, "probabilities": logits_to_probabilities(logits, multi_label=multi_label)}


class PaddingFreeBiTStem(nn.Module):
    """BiT's stem, whose pooling pads with zeros, without a padding operator.

    ONNX Runtime (1.31 at least) merges that operator into the pooling, which pads with the least value instead.
    """

    border: Tensor

    def __init__(self, stem: BiTStem, size: tuple[int, int]) -> None:
        super().__init__()
        self.conv = stem.conv
        least = torch.full((1, 1, *(-(-side // 2) for side in size)), torch.finfo(torch.float32).min)
        self.register_buffer("border", F.max_pool2d(F.pad(least, (1, 1, 1, 1)), 3, 2))  # 0 where a window touches it

    def forward(self, images: Tensor) -> Tensor:
        return torch.maximum(F.max_pool2d(self.conv(images), 3, 2, padding=1), self.border)


def export_program(trained: Trained, transform: Callable[[Model], Model] = lambda model: model) -> ExportedProgram:
    """Trace a model for batches of any size; weights are shared. `transform` changes parts of it for a runtime."""
    graph = ExportGraph(prepare_for_export(trained))
    graph.model = transform(graph.model)
    if isinstance(graph.model, ViT):  # kept from here on, so that the trace has their angles as a constant
        graph.model.compute_rotary(graph.model.config.grid, torch.device("cpu"))
    shape = (2, trained.model.config.channels, *require_preprocess(trained).size)  # a batch of 1 would become constant
    with torch.no_grad():
        program = torch.export.export(
            graph, (torch.zeros(shape, dtype=torch.uint8),), dynamic_shapes=({0: Dim("batch", min=1)},)
        )
    program.example_inputs = None  # a file would hold them as a pickle
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def get_output_names(trained: Trained) -> tuple[str, ...]:
    """The names of the outputs, in order."""
    return ("logits", "probabilities") if trained.model.config.classes else ("features",)


def build_metadata(trained: Trained) -> dict[str, str]:
    """Build a file's metadata, JSON values by name: how an image becomes pixels and what the outputs mean."""
    preprocess = dataclasses.asdict(require_preprocess(trained))
    normalization = {name: preprocess.pop(name) for name in ("mean", "std")}
    metadata = {
        "labels": trained.labels,
        "pixels": {"channels": trained.model.config.channels, **preprocess},
        "normalization": normalization,  # inside the graph; for the record
        "multi_label": trained.multi_label,
        "temperature": trained.temperature,  # logits are divided by it already
        "threshold": trained.threshold,
        **({THRESHOLDS_KEY: trained.label_thresholds} if trained.label_thresholds else {}),
        "origin": dataclasses.asdict(trained.origin),
        "vitrail": version("vitrail"),
    }
    return {name: json.dumps(value, ensure_ascii=False) for name, value in metadata.items()}


def prepare_for_export(trained: Trained) -> Trained:
    """Return the model on the CPU in eval mode; the caller's own is not changed."""
    model = trained.model
    if model.training or next(model.parameters()).device.type != "cpu":
        trained = dataclasses.replace(trained, model=copy.deepcopy(model).cpu().eval())
    return trained


def _fix_image_size(trained: Trained, size: tuple[int, int]) -> Model:
    """Return the model at one image size, in operators that every runtime computes alike; weights are shared."""
    model = trained.model
    if isinstance(model, BiT):
        model = assemble_model(model.config, model.state_dict())
        assert isinstance(model, BiT)
        model.register_module("stem", PaddingFreeBiTStem(model.stem, size))
        return model
    if model.config.image_size != size:
        model = adapt(trained, image_size=size).model  # once, instead of for every batch
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


def write(trained: Trained, path: Path) -> None:
    """Write a .pt2 file of torch.export, which runs without vitrail; the metadata are extra files of the archive."""
    torch.export.save(export_program(trained), path, extra_files=build_metadata(trained))


def load_runner(path: Path) -> GraphRunner:
    """Open a .pt2 file as a function, on the CPU."""
    module = torch.export.load(path).module()

    @torch.inference_mode()
    def run_graph(pixels: Tensor) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = module(pixels)
        return outputs

    return run_graph
