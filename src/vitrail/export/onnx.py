"""Models in ONNX: one .onnx file, or above 2 GB with the weights in an .onnx.data beside it."""

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
from onnxruntime.capi import onnxruntime_pybind11_state as ort
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.quant_utils import add_pre_process_metadata
from torch import Tensor

from vitrail.export import graph, onnx_float16
from vitrail.export.graph import GraphRunner
from vitrail.weights.trained import Trained

READ_ERRORS = (
    DecodeError, ort.Fail, ort.InvalidArgument, ort.InvalidGraph, ort.InvalidProtobuf, ort.NoSuchFile,
    ort.NotImplemented, ort.RuntimeException,
)  # fmt: skip
"""Raised for files that are damaged, or that need what is not installed."""
OPSET = 20  # the first with a GELU; ONNX Runtime reads it since 1.17


def write(trained: Trained, path: Path) -> None:
    """Write the model in float32, for batches of any size."""
    with _silence_torch_warnings():
        program = torch.onnx.export(
            graph.export_program(trained),
            input_names=[graph.INPUT_NAME],
            output_names=list(graph.get_output_names(trained)),
            dynamic_shapes=({0: "batch"},),
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props.update(graph.build_metadata(trained))
    program.save(path)


@contextlib.contextmanager
def _silence_torch_warnings() -> Iterator[None]:
    """Silence torch's warnings about its own code and about a torchvision that is not installed."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")

    def is_relevant(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("torchvision is not installed")

    logger.addFilter(is_relevant)
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            yield
    finally:
        logger.removeFilter(is_relevant)


def quantize(source: Path, path: Path) -> list[GraphRunner]:
    """Write the float32 model `source` with the weights of its matrix products in int8, a scale for each output.

    Activations are rounded to 8 bits too, by their range in each batch, so no calibration images are needed. The patch
    embedding stays in float32, and so do the parts of the last block that compute only the head's tokens.
    """
    model = onnx.load(source)
    del model.graph.value_info[:]  # partly of weights that are transposed here; all of it is inferred again
    add_pre_process_metadata(model)  # torch has folded constants; without this the root logger advises to do so
    quantize_dynamic(
        model,
        path,
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=source.with_suffix(".onnx.data").exists(),
    )
    return [load_runner(path)]


def convert_to_float16(source: Path, path: Path) -> list[GraphRunner]:
    """Write the float32 model `source` with products in float16; return it and a float32 graph that rounds alike.

    On a CPU, ONNX Runtime omits most of the file's rounding, and with it what overflows on a GPU.
    """
    rounded = path.with_name(f"rounded-{path.name}")
    onnx_float16.convert(source, path)
    onnx_float16.convert(source, rounded, rounding_only=True)
    return [load_runner(path), load_runner(rounded)]


def add_metadata(path: Path, name: str, value: Any) -> None:
    """Add a JSON value to a file's metadata."""
    model = onnx.load(path, load_external_data=False)
    model.metadata_props.add(key=name, value=json.dumps(value, ensure_ascii=False))
    onnx.save(model, path)


def read_metadata(path: Path) -> dict[str, str]:
    """Read a file's metadata."""
    return {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}


def load_runner(path: Path) -> GraphRunner:
    """Open a file as a function, on the CPU with as many threads as torch has."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run_graph(pixels: Tensor) -> dict[str, Tensor]:
        outputs = session.run(names, {graph.INPUT_NAME: pixels.numpy()})
        return {name: torch.from_numpy(values) for name, values in zip(names, outputs, strict=True)}

    return run_graph
