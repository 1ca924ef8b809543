"""OpenVINO's form of a model: a graph in memory, or an .xml with its weights in a .bin beside it."""

import warnings
from pathlib import Path

import openvino
import torch
from torch import Tensor

from vitrail.export import graph as graphs
from vitrail.export.graph import Run
from vitrail.weights.trained import Trained


def graph(trained: Trained) -> openvino.Model:
    """The model in float32, for batches of any size; inputs, outputs and metadata are those of every exported file."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of torch, about what openvino calls
        found = openvino.convert_model(graphs.program(trained))
    found.reshape([-1, trained.model.config.channels, *graphs.prepared(trained).size])
    for output, name in zip(found.outputs, graphs.outputs(trained), strict=True):
        output.get_tensor().set_names({name})
    for name, value in graphs.metadata(trained).items():
        found.set_rt_info(value, ["vitrail", name])
    return found


def write(trained: Trained, path: Path) -> None:
    """Write the .xml and, beside it, the .bin."""
    openvino.save_model(graph(trained), path, compress_to_fp16=False)


def run(path: Path) -> Run:
    """How a file is run: on the CPU in float32, whatever else it has, with as many threads as torch has."""
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.Core().compile_model(path, "CPU", settings)

    def answered(pixels: Tensor) -> dict[str, Tensor]:
        found = compiled(pixels.numpy())
        return {output.any_name: torch.from_numpy(found[output].copy()) for output in compiled.outputs}

    return answered
