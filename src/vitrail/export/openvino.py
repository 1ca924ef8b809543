"""OpenVINO's form of a model: a graph in memory, or an .xml with its weights in a .bin beside it.

B images   N tokens   D width   H heads   K = D/H
"""

import copy
import warnings
from pathlib import Path
from typing import TypeGuard

import openvino
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.export import graph as graphs
from vitrail.export.graph import GraphRunner
from vitrail.model.build import Model
from vitrail.model.positions import Grid
from vitrail.model.vit import Attention
from vitrail.weights.trained import Trained

READ_ERRORS: tuple[type[Exception], ...] = ()
"""What is raised of files that are damaged, besides RuntimeError."""
_RT_INFO_SECTION = "vitrail"  # of a model's runtime information


class SplitQKVAttention(nn.Module):
    """Attention with products of their own for queries, keys and values, and its scale in the queries' weights.

    OpenVINO splits one product's result, scales a part and moves all of it: a tenth of the time in int8.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        config = attention.config
        self.heads, self.proj = config.heads, attention.proj
        weights = list(attention.qkv.weight.detach().split(config.width))
        biases = list(torch.zeros(3 * config.width).split(config.width))
        if attention.qkv.bias is not None:
            biases = list(attention.qkv.bias.detach().split(config.width))
        scale = (config.width // config.heads) ** -0.5
        weights[0], biases[0] = weights[0] * scale, biases[0] * scale
        self.weights = nn.ParameterList(weights)
        self.biases = nn.ParameterList(biases)

    def forward(self, x: Tensor, _: Grid, queries: int | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D), or only the first `queries` tokens of it."""
        inputs = (x if queries is None else x[:, :queries], x, x)
        products = map(F.linear, inputs, self.weights, self.biases)
        q, k, v = (found.unflatten(-1, (self.heads, -1)).transpose(1, 2) for found in products)  # (B, H, N, K)
        found: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2))
        return found


def can_split_qkv(part: object) -> TypeGuard[Attention]:
    """Whether a model's attention takes that form: not where positions belong to it."""
    return isinstance(part, Attention) and part.config.positions != "relative"


def build_openvino_model(trained: Trained) -> openvino.Model:
    """The model in float32, for batches of any size; inputs, outputs and metadata are those of every exported file."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of torch, about what openvino calls
        found = openvino.convert_model(graphs.export_program(trained, _split_attention))
    found.reshape([-1, trained.model.config.channels, *graphs.require_preprocess(trained).size])
    for output, name in zip(found.outputs, graphs.get_output_names(trained), strict=True):
        output.get_tensor().set_names({name})
    for name, value in graphs.build_metadata(trained).items():
        found.set_rt_info(value, [_RT_INFO_SECTION, name])
    return found


def _split_attention(model: Model) -> Model:
    """The model with its attentions in that form; all other weights are shared, not copied."""
    instead = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(
        model, instead | {id(part): SplitQKVAttention(part) for part in model.modules() if can_split_qkv(part)}
    )


def write(trained: Trained, path: Path) -> None:
    """Write the .xml and, beside it, the .bin."""
    openvino.save_model(build_openvino_model(trained), path, compress_to_fp16=False)


def read_metadata(path: Path) -> dict[str, str]:
    """What a file says beside its graph."""
    with path.open("rb") as file:
        if b"<net" not in file.read(1000):  # OpenVINO would try it as whatever else it knows
            raise ValueError("it is no graph of OpenVINO's")
    found = openvino.Core().read_model(path)
    places = (
        [_RT_INFO_SECTION, name] for name in graphs.REQUIRED_METADATA if found.has_rt_info([_RT_INFO_SECTION, name])
    )
    return {name: found.get_rt_info([part, name]).astype(str) for part, name in places}


def load_runner(path: Path) -> GraphRunner:
    """How a file is run: on the CPU in float32, whatever else it has, with as many threads as torch has."""
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.Core().compile_model(path, "CPU", settings)

    def run_graph(pixels: Tensor) -> dict[str, Tensor]:
        found = compiled(pixels.numpy())
        return {output.any_name: torch.from_numpy(found[output].copy()) for output in compiled.outputs}

    return run_graph
