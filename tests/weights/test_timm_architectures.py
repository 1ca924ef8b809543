"""What an architecture's name states, and rotary positions in timm's vocabulary."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vitrail.config import RotaryConfig
from vitrail.errors import ModelError
from vitrail.weights import timm_architectures

PATH = Path("model")
DINOV3 = RotaryConfig(places="normalized")
EVA02 = RotaryConfig(places="index", base=10_000, reference=(16, 16))
PE_LARGE = RotaryConfig(places="index", base=10_000, reference=(24, 24), offset=1, order="xy")


@pytest.mark.parametrize(
    ("name", "rotary"),
    [
        ("vit_base_patch16_224", None),
        ("vit_huge_plus_patch16_dinov3_qkvb", DINOV3),
        ("vit_giant_patch16_lingbot", DINOV3),
        ("eva02_large_patch14_448", EVA02),
        ("vit_betwixt_patch16_rope_reg4_gap_256", EVA02),
        ("vit_large_patch16_rope_ape_224", RotaryConfig(places="index", order="xy")),
        ("vit_pe_core_large_patch14_336", PE_LARGE),
        ("vit_pe_core_gigantic_patch14_448", RotaryConfig(places="index", base=10_000, reference=(32, 32), order="xy")),
    ],
)  # fmt: skip
def test_rotary_positions_follow_from_the_name_and_are_stated_as_they_are_read(
    name: str, rotary: RotaryConfig | None
) -> None:
    arguments = timm_architectures.resolve_arguments(name, {}, PATH)
    assert timm_architectures.parse_rotary(arguments, PATH) == rotary
    stated = timm_architectures.list_rotary_arguments(rotary)
    assert timm_architectures.parse_rotary(stated, PATH) == rotary


def test_stated_arguments_replace_those_of_the_name() -> None:
    stated = {"rope_temperature": 50.0, "ref_feat_shape": [3, 4], "rope_grid_indexing": "xy"}
    arguments = timm_architectures.resolve_arguments("eva02_base_patch14_224", stated, PATH)
    expected = RotaryConfig(places="index", base=50, reference=(3, 4), order="xy")
    assert timm_architectures.parse_rotary(arguments, PATH) == expected
    assert timm_architectures.resolve_arguments("vit_base_patch16_clip_quickgelu_224", {"act_layer": "gelu"}, PATH) == {
        "norm_eps": 1e-5,
        "act_layer": "gelu",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_type": "mixed"}, "of type 'mixed'"),
        ({"rope_type": "dinov3"}, "rope_rotate_half=False"),
        ({"rope_rotate_half": True}, "rope_rotate_half=True"),
        ({"rope_grid_indexing": "yx"}, "not those of any published ViT"),
        ({"rope_grid_offset": 0.5}, "not those of any published ViT"),
        ({"ref_feat_shape": [3]}, "not those of any published ViT"),
        ({"ref_feat_shape": "14"}, "not those of any published ViT"),
        ({"rope_temperature": "hot"}, "not those of any published ViT"),
        ({"rope_type": "dinov3", "rope_rotate_half": True, "rope_grid_offset": 1}, "with an offset of 1"),
    ],
)
def test_other_rotary_positions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        timm_architectures.parse_rotary({"use_rot_pos_emb": True} | change, PATH)


@pytest.mark.parametrize(
    ("stated", "is_known"),
    [({"qk_norm": False}, True), ({"qk_norm": True}, False), ({"final_norm": True}, True), ({"gated": True}, False)],
)
def test_arguments_that_change_nothing_are_known(stated: dict[str, Any], is_known: bool) -> None:
    if is_known:
        assert timm_architectures.resolve_arguments("", stated, PATH) == stated
        return
    with pytest.raises(ModelError, match="which no plain ViT has"):
        timm_architectures.resolve_arguments("", stated, PATH)


def test_tensors_without_positions_have_rotary_ones_of_the_family_that_their_tokens_tell() -> None:
    one = torch.ones(1)
    block = {"blocks.0.ls1.gamma": one}
    for tokens, rotary in (
        (("cls_token", "reg_token"), DINOV3),
        (("reg_token",), EVA02),
        (("cls_token",), RotaryConfig(places="index", order="xy")),
    ):
        arguments, sentences = timm_architectures.guess_arguments(block | dict.fromkeys(tokens, one), PATH)
        assert timm_architectures.parse_rotary(arguments, PATH) == rotary
        assert "as of timm's" in sentences[0]
    arguments, sentences = timm_architectures.guess_arguments(block | {"pos_embed": one}, PATH)
    assert (arguments, sentences) == ({}, ["GELU: the erf form, timm's default"])
