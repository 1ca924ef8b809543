"""Models in torch.export's .pt2 files, which run without vitrail and compile for servers without Python."""

from pathlib import Path

import torch
from torch import Tensor

from vitrail.export import graph
from vitrail.export.graph import GraphRunner
from vitrail.weights.trained import Trained


def write(trained: Trained, path: Path) -> None:
    """Write the model, its metadata as extra files of the archive."""
    torch.export.save(graph.export_program(trained), path, extra_files=graph.build_metadata(trained))


def load_runner(path: Path) -> GraphRunner:
    """Open a file as a function, on the CPU."""
    module = torch.export.load(path).module()

    @torch.inference_mode()
    def run_graph(pixels: Tensor) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = module(pixels)
        return outputs

    return run_graph
