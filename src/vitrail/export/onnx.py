"""ONNX's form of a model: one .onnx file, or above 2 GB its weights in an .onnx.data beside it."""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from google.protobuf.message import DecodeError
from onnxruntime.capi.onnxruntime_pybind11_state import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    InvalidProtobuf,
    NoSuchFile,
    NotImplemented,  # noqa: A004
    RuntimeException,
)
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.quant_utils import add_pre_process_metadata
from torch import Tensor

from vitrail.export import graph
from vitrail.export.graph import GraphRunner
from vitrail.weights.trained import Trained

READ_ERRORS = (
    *(DecodeError, Fail, InvalidArgument, InvalidGraph, InvalidProtobuf, NoSuchFile, NotImplemented, RuntimeException),
)
"""What is raised of files that are damaged, or made by others for what is not here."""
OPSET = 20  # the first with a GELU; ONNX Runtime reads it since 1.17


def write(trained: Trained, path: Path) -> None:
    """Write the model in float32, for batches of any size."""
    names = list(graph.get_output_names(trained))
    with _silence_torch_warnings():
        found = torch.onnx.export(
            graph.export_program(trained),
            input_names=[graph.INPUT_NAME],
            output_names=names,
            dynamic_shapes=({0: "batch"},),
            opset_version=OPSET,
            verbose=False,
        )
    assert found is not None
    found.model.metadata_props.update(graph.build_metadata(trained))
    found.save(path)


@contextlib.contextmanager
def _silence_torch_warnings() -> Iterator[None]:
    """Keep back what torch says of its own code, and of operators of a torchvision that is not installed."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")

    def is_ours(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("torchvision is not installed")

    logger.addFilter(is_ours)
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            yield
    finally:
        logger.removeFilter(is_ours)


def quantize(source: Path, path: Path) -> None:
    """Write the float32 model `source` with the weights of its matrix products in int8, a scale for each output.

    What they are multiplied with is rounded to 8 bits too, by its range in each batch, so no images are needed for it.
    The patch embedding stays in float32, and so do the parts of the last block that compute the head's tokens alone.
    """
    large = source.with_suffix(".onnx.data").exists()
    model = onnx.load(source)
    del model.graph.value_info[:]  # some of it is of weights that are transposed here; all of it is inferred anew
    add_pre_process_metadata(model)  # torch has folded its constants; else the root logger gets the advice to do so
    quantize_dynamic(
        model,
        path,
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=large,
    )


def add_metadata(path: Path, name: str, value: Any) -> None:
    """Add a JSON value to a file's metadata."""
    found = onnx.load(path, load_external_data=False)
    found.metadata_props.add(key=name, value=json.dumps(value, ensure_ascii=False))
    onnx.save(found, path)


def read_metadata(path: Path) -> dict[str, str]:
    """What a file says beside its graph."""
    return {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}


def load_runner(path: Path) -> GraphRunner:
    """How a file is run, on the CPU with as many threads as torch has."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run_graph(pixels: Tensor) -> dict[str, Tensor]:
        found = session.run(names, {graph.INPUT_NAME: pixels.numpy()})
        return {name: torch.from_numpy(values) for name, values in zip(names, found, strict=True)}

    return run_graph
