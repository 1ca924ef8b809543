"""ONNX files with products in float16, against numpy's own float16, and values that float16 cannot hold."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import model_factory
from tests.export import runtime
from vitrail.config import RotaryConfig
from vitrail.weights.trained import Trained

onnx, onnx_files = runtime("onnx"), runtime("vitrail.export.onnx")
FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
MODELS = {
    "class token": model_factory.build_trained(model_factory.build_vit(depth=1), temperature=1.5),
    "gated and rotary": model_factory.build_trained(
        model_factory.build_vit(
            depth=1, pool="map", gated_mlp=True, rotary=RotaryConfig(places="normalized"), gelu="quick"
        )
    ),
    "resnet": model_factory.build_trained(model_factory.build_bit()),
}


def write_all(trained: Trained, folder: Path) -> tuple[Any, list[Any]]:
    """The float32 file's runner, and those of the float16 file and of the graph that rounds."""
    onnx_files.write(trained, folder / "model.onnx")
    float32 = onnx_files.load_runner(folder / "model.onnx")
    return float32, onnx_files.convert_to_float16(folder / "model.onnx", folder / "half.onnx")


def make_pixels() -> torch.Tensor:
    return torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", MODELS)
def test_the_graph_that_rounds_computes_what_numpy_computes_in_float16(kind: str, tmp_path: Path) -> None:
    """ONNX's reference implementation has real float16, which no CPU of ONNX Runtime has."""
    from onnx.reference import ReferenceEvaluator

    float32, [file, rounding] = write_all(MODELS[kind], tmp_path)
    pixels = make_pixels()
    [logits, _] = ReferenceEvaluator(str(tmp_path / "half.onnx")).run(None, {"pixels": pixels.numpy()})
    exact, rounded = float32(pixels)["logits"], rounding(pixels)["logits"]
    assert logits.dtype == "float32"
    losses = [(values - exact).abs().mean() / exact.abs().mean() for values in (torch.from_numpy(logits), rounded)]
    assert 1e-5 < min(losses) <= max(losses) < min(3 * min(losses), torch.tensor(0.01))
    assert (file(pixels)["logits"] - exact).abs().max() < 0.01 * exact.abs().max()


def test_products_are_float16_and_the_residual_stream_norms_and_softmax_are_not(tmp_path: Path) -> None:
    write_all(MODELS["class token"], tmp_path)
    model = onnx.load(tmp_path / "half.onnx")
    onnx.checker.check_model(model, full_check=True)
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    kinds: dict[str, set[int]] = {}
    for node in graph.node:
        kinds.setdefault(node.op_type, set()).update(types[name] for name in node.output)
    assert kinds["MatMul"] == kinds["Gemm"] == kinds["Gelu"] == {FLOAT16}
    assert kinds["LayerNormalization"] == kinds["Softmax"] == {FLOAT}
    residual = {node.output[0] for node in graph.node if node.op_type == "Add" and types[node.output[0]] == FLOAT}
    assert len(residual) == 3, "the positions, and the two sums of a block"
    weights = {tensor.data_type for tensor in graph.initializer if math.prod(tensor.dims) >= 32 * 32}
    assert weights == {FLOAT16}
    assert {value.type.tensor_type.elem_type for value in graph.output} == {FLOAT}


def test_a_value_above_65504_is_not_finite_in_the_graph_that_rounds(tmp_path: Path) -> None:
    """The file itself, on a CPU, would hide it."""
    float32, [file, rounding] = write_all(model_factory.build_trained(build_overflowing_vit()), tmp_path)
    pixels = make_pixels()
    assert float32(pixels)["logits"].isfinite().all()
    assert not rounding(pixels)["logits"].isfinite().any()
    assert file(pixels)["logits"].isfinite().all(), "rounds on this CPU: the other graph is needed no more"


def build_overflowing_vit() -> Any:
    """The MLP's hidden values reach millions, and its second layer makes them small again."""
    model = model_factory.build_vit(depth=1)
    with torch.no_grad():
        model.blocks[0].norm2.weight.mul_(1e3)
        model.blocks[0].mlp.fc1.weight.mul_(1e3)
        model.blocks[0].mlp.fc2.weight.mul_(1e-6)
    return model
