"""timm's tensor names and the model's own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import model_factory
from tests.weights.test_timm import build_timm_model
from vitrail.errors import ModelError
from vitrail.weights import timm_tensors
from vitrail.weights.load import load


def test_a_bias_table_that_layers_share_is_given_to_each(tmp_path: Path) -> None:
    model = build_timm_model("BEiT", use_shared_rel_pos_bias=True, use_rel_pos_bias=False, num_heads=1)
    save_file(model.state_dict(), tmp_path / "alone.safetensors")
    loaded = load(tmp_path / "alone.safetensors").model
    images = model_factory.draw_images(loaded.config)
    with torch.no_grad():
        assert (loaded(images) - model(images)).abs().max() <= 1e-5 * model(images).abs().max().clamp(min=1)


def test_biases_and_halves_that_eva_keeps_apart_are_joined() -> None:
    q, v, gate, value = (torch.randn(2) for _ in range(4))
    own = timm_tensors.rename_tensors(
        {
            "blocks.0.attn.q_bias": q,
            "blocks.0.attn.v_bias": v,
            "blocks.0.mlp.fc1_g.bias": gate,
            "blocks.0.mlp.fc1_x.bias": value,
            "blocks.0.gamma_2": q,
            "blocks.0.attn.relative_position_index": torch.zeros(2),
        }
    )
    assert own.keys() == {"blocks.0.attn.qkv.bias", "blocks.0.mlp.fc1.bias", "blocks.0.ls2.gamma"}
    assert torch.equal(own["blocks.0.attn.qkv.bias"], torch.cat([q, torch.zeros(2), v]))
    assert torch.equal(own["blocks.0.mlp.fc1.bias"], torch.cat([gate, value]))
    split = timm_tensors.split_gates(own)
    assert torch.equal(split["blocks.0.mlp.fc1_g.bias"], gate)
    assert torch.equal(split["blocks.0.mlp.fc1_x.bias"], value)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("blocks.0.mlp.fc1_g.bias",), "but not the values beside it"),
        (("blocks.0.gamma_1", "blocks.0.ls1.gamma"), "two tensors for"),
        (("blocks.0.attn.q_proj.weight", "blocks.0.attn.v_proj.weight"), "but not of 'blocks.0.attn.k.weight'"),
        (("blocks.0.attn.q_bias",), "but not of 'blocks.0.attn.v.bias'"),
    ],
)
def test_tensors_without_their_other_half_are_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        timm_tensors.rename_tensors({name: torch.ones(2, 2) for name in names})


def test_only_a_head_with_weights_and_no_biases_is_a_projection() -> None:
    zeros, ones = torch.zeros(2), torch.ones(2, 3)
    assert timm_tensors.is_projection({"head.weight": ones, "head.bias": zeros})
    assert not timm_tensors.is_projection({"head.weight": ones, "head.bias": zeros + 1})
    assert not timm_tensors.is_projection({"head.weight": ones * 0, "head.bias": zeros})  # a new head
    assert not timm_tensors.is_projection({})
