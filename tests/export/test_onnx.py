"""ONNX files: weights beside the graph, int8 and metadata."""

import json
from pathlib import Path

import pytest
import torch

from tests import model_factory
from tests.export import runtime
from vitrail.errors import UsageError
from vitrail.export import export, graph
from vitrail.export.export import check_export_destination, export_model

onnx = runtime("vitrail.export.onnx")


def test_weights_above_2_gb_lie_beside_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.onnx._internal.exporter import _onnx_program as exporter

    monkeypatch.setattr(exporter, "_LARGE_MODEL_THRESHOLD", 1000)  # bytes
    trained = model_factory.build_trained(model_factory.build_vit(depth=1))
    export_model(trained, tmp_path / "model.onnx", "onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    (tmp_path / "model.onnx").rename(tmp_path / "kept.onnx")
    with pytest.raises(UsageError, match=r"model\.onnx\.data exists already"):
        check_export_destination(tmp_path / "model.onnx", "onnx")
    export.check_parity(onnx.load_runner(tmp_path / "kept.onnx"), trained)


def test_int8_rounds_the_matrix_products_and_keeps_the_patch_embedding_and_the_metadata(tmp_path: Path) -> None:
    """At a published width: of smaller models the exporter folds the patches' weights into a matrix product."""
    trained = model_factory.build_trained(model_factory.build_vit(depth=1, width=192, heads=3, mlp=768, patch=16))
    exact, rounded = tmp_path / "model.onnx", tmp_path / "int8.onnx"
    onnx.write(trained, exact)
    onnx.quantize(exact, rounded)
    quantized = onnx.onnx.load(rounded).graph
    weights = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in quantized.initializer}
    kinds = onnx.onnx.TensorProto
    assert weights["model.patch_embed.proj.weight"] == (kinds.FLOAT, (192, 3, 16, 16))
    assert weights["model.head.weight_quantized"] == (kinds.INT8, (192, 7))
    shapes = [shape for kind, shape in weights.values() if kind == kinds.INT8 and len(shape) == 2]
    assert sorted(shapes) == [(192, 7), (192, 192), (192, 768), (768, 192)]
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    outputs, expected = onnx.load_runner(rounded)(pixels), onnx.load_runner(exact)(pixels)
    assert outputs.keys() == expected.keys()
    difference = (outputs["probabilities"] - expected["probabilities"]).abs().max()
    assert 0 < difference < 0.05
    assert onnx.read_metadata(rounded).items() >= graph.build_metadata(trained).items()


def test_a_value_is_added_to_the_metadata_and_nothing_else_changes(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.write(model_factory.build_trained(model_factory.build_vit(depth=1)), path)
    before, pixels = onnx.read_metadata(path), torch.full((1, 3, 32, 32), 7, dtype=torch.uint8)
    expected = onnx.load_runner(path)(pixels)
    onnx.add_metadata(path, "parity", {"Käfer": [1, 0.5]})
    added = onnx.read_metadata(path)
    assert json.loads(added.pop("parity")) == {"Käfer": [1, 0.5]}
    assert added == before
    outputs = onnx.load_runner(path)(pixels)
    assert all(torch.equal(outputs[name], values) for name, values in expected.items())


@pytest.mark.parametrize("content", [b"", b"no graph", b"\x08\x0a\x3a\xff"], ids=["empty", "text", "truncated"])
def test_what_is_no_graph_raises_an_error_that_readers_know(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(onnx.READ_ERRORS):
        onnx.load_runner(path)
