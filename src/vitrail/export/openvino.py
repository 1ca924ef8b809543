"""Models in OpenVINO: a graph in memory, or an .xml with the weights in a .bin beside it.

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
from vitrail.model.positions import Grid, rotate
from vitrail.model.vit import Attention, Model
from vitrail.weights.trained import Trained, require_preprocess

READ_ERRORS: tuple[type[Exception], ...] = ()
"""Raised for damaged files, besides RuntimeError."""
_RT_INFO_SECTION = "vitrail"  # of a model's runtime information


class SplitQKVAttention(nn.Module):
    """Attention with separate projections of queries, keys and values, and its scale in the queries' weights.

    Of a fused projection OpenVINO splits the result, scales a part and moves all of it: a tenth of the time in int8.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        config = attention.config
        self.config, self.norm, self.proj = config, attention.norm, attention.proj
        bias = torch.zeros(3 * config.width) if attention.qkv.bias is None else attention.qkv.bias.detach()
        scale = (config.width // config.heads) ** -0.5
        self.weights, self.biases = (
            nn.ParameterList([queries * scale, keys, values])
            for queries, keys, values in (attention.qkv.weight.detach().chunk(3), bias.chunk(3))
        )

    def forward(self, x: Tensor, _: Grid, queries: int | None = None, rotary: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D), or only the first `queries` tokens of it."""
        inputs = (x if queries is None else x[:, :queries], x, x)
        products = map(F.linear, inputs, self.weights, self.biases)
        q, k, v = (product.unflatten(-1, (self.config.heads, -1)).transpose(1, 2) for product in products)
        q, k = rotate(q, rotary, self.config), rotate(k, rotary, self.config)  # each (B, H, N, K)
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2)
        tokens: Tensor = self.proj(self.norm(out))
        return tokens


def can_split_qkv(part: object) -> TypeGuard[Attention]:
    """Whether a part is an attention that `SplitQKVAttention` can replace: one whose logits get no positions."""
    return isinstance(part, Attention) and not part.config.has_attention_bias


def build_openvino_model(trained: Trained) -> openvino.Model:
    """Build the float32 graph for batches of any size, with the inputs, outputs and metadata of any exported file."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch's, about openvino's calls
        model = openvino.convert_model(graphs.export_program(trained, _split_attention))
    model.reshape([-1, trained.model.config.channels, *require_preprocess(trained).size])
    for output, name in zip(model.outputs, graphs.get_output_names(trained), strict=True):
        output.get_tensor().set_names({name})
    for name, value in graphs.build_metadata(trained).items():
        model.set_rt_info(value, [_RT_INFO_SECTION, name])
    return model


def _split_attention(model: Model) -> Model:
    """Replace the attentions of a model by `SplitQKVAttention`; all other weights are shared, not copied."""
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    memo |= {id(part): SplitQKVAttention(part) for part in model.modules() if can_split_qkv(part)}
    return copy.deepcopy(model, memo)


def write(trained: Trained, path: Path) -> None:
    """Write the .xml and, beside it, the .bin."""
    openvino.save_model(build_openvino_model(trained), path, compress_to_fp16=False)


def read_metadata(path: Path) -> dict[str, str]:
    """Read the entries of a file's metadata that running it needs."""
    with path.open("rb") as file:
        if b"<net" not in file.read(1000):  # OpenVINO would try other formats that it knows
            raise ValueError("it is no graph of OpenVINO")
    model = openvino.Core().read_model(path)
    names = (*graphs.REQUIRED_METADATA, graphs.THRESHOLDS_KEY, *graphs.OLD_METADATA_KEYS)
    present = [name for name in names if model.has_rt_info([_RT_INFO_SECTION, name])]
    return {name: model.get_rt_info([_RT_INFO_SECTION, name]).astype(str) for name in present}


def load_runner(path: Path) -> GraphRunner:
    """Open a file as a function: on the CPU in float32, even where it has bfloat16, with torch's number of threads."""
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.Core().compile_model(path, "CPU", settings)

    def run_graph(pixels: Tensor) -> dict[str, Tensor]:
        values = compiled(pixels.numpy())
        return {output.any_name: torch.from_numpy(values[output].copy()) for output in compiled.outputs}

    return run_graph
