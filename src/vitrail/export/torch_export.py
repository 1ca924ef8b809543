"""torch's own form of a model: a .pt2 file, which runs without vitrail, and compiles for servers without Python."""

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
    """How a file is run, on the CPU."""
    module = torch.export.load(path).module()

    @torch.inference_mode()
    def run_graph(pixels: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = module(pixels)
        return found

    return run_graph
