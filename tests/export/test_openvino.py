"""OpenVINO files in float32: the attention they are written with, and what is read from them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import model_factory
from tests.export import runtime
from vitrail.export import export, graph
from vitrail.model.vit import Attention

openvino = runtime("vitrail.export.openvino")


@pytest.mark.parametrize("change", [{}, {"qkv_bias": False}], ids=["bias", "no bias"])
@pytest.mark.parametrize("queries", [None, 2])
def test_split_projections_compute_the_same_attention(change: dict[str, Any], queries: int | None) -> None:
    attention = model_factory.build_vit(**change).blocks[0].attn
    tokens = torch.randn(2, 17, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = attention(tokens, (4, 4), queries)
        split = openvino.SplitQKVAttention(attention)(tokens, (4, 4), queries)
    assert split.shape == (2, queries or 17, 32)
    torch.testing.assert_close(split, expected, rtol=1e-5, atol=1e-5)


def test_only_attention_without_relative_positions_is_split_and_the_model_stays_whole() -> None:
    model = model_factory.build_vit()
    split = openvino._split_attention(model)
    assert not any(isinstance(part, Attention) for part in split.modules())
    assert all(openvino.can_split_qkv(block.attn) for block in model.blocks)
    assert split.blocks[0].mlp.fc1.weight is model.blocks[0].mlp.fc1.weight
    relative = model_factory.build_vit(positions="relative")
    assert not openvino.can_split_qkv(relative.blocks[0].attn)
    assert isinstance(openvino._split_attention(relative).blocks[0].attn, Attention)


def test_a_file_is_a_graph_and_its_weights_with_metadata(tmp_path: Path) -> None:
    trained, path = (
        model_factory.build_trained(model_factory.build_vit(depth=1), temperature=1.5),
        tmp_path / "model.xml",
    )
    openvino.write(trained, path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.bin", "model.xml"]
    metadata = graph.build_metadata(trained)
    assert openvino.read_metadata(path) == {name: metadata[name] for name in graph.REQUIRED_METADATA}
    assert export.check_parity(openvino.load_runner(path), trained).difference <= export.MAX_DIFFERENCE


@pytest.mark.parametrize("content", [b"", b"ONNX", b"<html>"])
def test_what_is_no_graph_is_refused_before_openvino_tries_it(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.xml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="it is no graph of OpenVINO"):
        openvino.read_metadata(path)
