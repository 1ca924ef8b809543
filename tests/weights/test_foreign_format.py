"""What the readers and writers of foreign formats share: names, sizes, fused tensors and the round trip."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import model_factory
from vitrail.config import Resample
from vitrail.errors import ModelError
from vitrail.weights import foreign_format
from vitrail.weights.trained import Origin

NAMES = foreign_format.TensorNameMap(
    layer_pattern=re.compile(r"layers\.(\d+)\."),
    layer_template="layers.{}.",
    top_prefixes={"norm.": "norm.", "classifier.": "head.", "old_classifier.": "head."},
    block_prefixes={"attention.": "attn.", "ff.": "mlp."},
)
PATH = Path("model.pth")


@pytest.mark.parametrize(
    ("theirs", "own"),
    [
        ("norm.weight", "norm.weight"),
        ("classifier.bias", "head.bias"),
        ("layers.11.attention.qkv.weight", "blocks.11.attn.qkv.weight"),
        ("layers.0.ff.fc1.bias", "blocks.0.mlp.fc1.bias"),
    ],
)
def test_names_are_replaced_both_ways(theirs: str, own: str) -> None:
    assert NAMES.to_own_name(theirs) == own
    assert NAMES.to_foreign_name(own) == theirs
    assert list(NAMES.rename_tensors({theirs: torch.zeros(1)})) == [own]


def test_of_two_names_with_one_meaning_the_first_is_written_and_a_file_has_one() -> None:
    assert NAMES.to_own_name("old_classifier.bias") == "head.bias"
    assert NAMES.to_foreign_name("head.bias") == "classifier.bias"
    both = {"classifier.bias": torch.zeros(1), "old_classifier.bias": torch.zeros(1)}
    with pytest.raises(ModelError, match=r"two tensors for 'head\.bias', one of them 'old_classifier\.bias'"):
        NAMES.rename_tensors(both)


@pytest.mark.parametrize("name", ["elsewhere.weight", "layers.0.elsewhere", "layers.x.ff.fc1.bias"])
def test_a_tensor_without_a_place_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=f"this model has no place for: '{name}'"):
        NAMES.to_own_name(name)
    with pytest.raises(ModelError, match=r"it has no place for 'blocks\.0\.ls1\.gamma'"):
        NAMES.to_foreign_name("blocks.0.ls1.gamma")


def test_fusing_inverts_splitting() -> None:
    tensors = model_factory.build_vit().state_dict()
    split = dict(foreign_format.split_qkv(tensors))
    assert len(split) == len(tensors) + 3 * 2 * 2
    assert split["blocks.1.attn.k.weight"].equal(tensors["blocks.1.attn.qkv.weight"][32:64])
    fused = foreign_format.fuse_qkv(split)
    assert fused.keys() == tensors.keys()
    assert all(fused[name].equal(tensor) for name, tensor in tensors.items())


def test_a_query_without_its_key_or_of_another_shape_is_refused() -> None:
    split = dict(foreign_format.split_qkv(model_factory.build_vit(depth=1).state_dict()))
    name = "blocks.0.attn.k.weight"
    with pytest.raises(ModelError, match=r"of .* have the shapes \[\(32, 32\), \(3,\), \(32, 32\)\]"):
        foreign_format.fuse_qkv(split | {name: torch.zeros(3)})
    del split[name]
    with pytest.raises(ModelError, match=f"the tensor of 'blocks.0.attn.q.weight' but not of '{name}'"):
        foreign_format.fuse_qkv(split)


def test_sizes_are_read_off_the_tensors() -> None:
    tensors = model_factory.build_vit(registers=2).state_dict()
    sizes = {"width": 32, "depth": 3, "mlp": 64, "patch": 8, "channels": 3, "classes": 7}
    heads = {"hidden_head": False, "distillation_token": False, "distillation_head": False}
    assert foreign_format.infer_fields(tensors, PATH) == sizes | heads
    assert foreign_format.count_tokens(tensors, "reg_token", PATH) == 2
    assert foreign_format.count_tokens(tensors, "dist_token", PATH) == 0
    assert foreign_format.infer_fields(model_factory.build_vit(classes=0).state_dict(), PATH)["classes"] == 0


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("patch_embed.proj.weight", torch.zeros(32, 3, 8, 4), "patches of 8 x 4 pixels; only square"),
        ("patch_embed.proj.weight", torch.zeros(32), "no 4-dimensional tensor for 'patch_embed.proj.weight'"),
        ("blocks.5.mlp.fc1.weight", torch.zeros(64, 32), r"its blocks are numbered \[0, 1, 2, 5\]"),
    ],
)
def test_tensors_of_no_plain_vit_are_refused_with_the_file(name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ModelError, match=rf"^model\.pth .*{message}"):
        foreign_format.infer_fields(model_factory.build_vit().state_dict() | {name: tensor}, PATH)


def test_heads_are_those_of_the_published_size_or_of_64_channels_or_unknown() -> None:
    assert foreign_format.guess_heads(192, 12) == (3, "heads: 3, as in the published size of width 192 and depth 12")
    assert foreign_format.guess_heads(128, 2) == (2, "heads: 2, assumed from width 128 / 64")
    with pytest.raises(ModelError, match="how many heads a ViT of width 100 has"):
        foreign_format.guess_heads(100, 2)


def test_only_square_numbers_of_patches_have_a_grid() -> None:
    sides = [foreign_format.find_square_side(patches) for patches in (-1, 0, 1, 15, 16)]
    assert sides == [0, 0, 1, 0, 4]


def test_units_are_counted_and_a_gap_is_refused() -> None:
    tensors = model_factory.build_bit().state_dict()
    assert foreign_format.count_units(tensors, "stages.", PATH) == (1, 2)
    assert foreign_format.count_units({}, "stages.", PATH) == ()
    with pytest.raises(ModelError, match="the units of its stages are not numbered in turn"):
        foreign_format.count_units(tensors | {"stages.1.blocks.4.x": torch.zeros(1)}, "stages.", PATH)


@pytest.mark.parametrize("kind", ["no-positions", "2d", "sincos", "registers"])
def test_positions_become_a_table_and_the_logits_stay(kind: str) -> None:
    model = model_factory.build_vit(**model_factory.VARIANTS[kind])
    config, tensors, notes = foreign_format.convert_positions_to_table(model, prefix=True)
    assert (config.positions, config.prefix_positions, len(notes)) == ("learned-1d", True, 1)
    assert notes[0].startswith(f"positions: {model.config.positions} were stored as one learned table")
    table = type(model)(config).eval()
    table.load_state_dict(tensors)
    images = model_factory.draw_images(config)
    with torch.inference_mode():
        torch.testing.assert_close(table(images), model(images), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["relative", "every-layer"])
def test_positions_that_no_table_replaces_stay(kind: str) -> None:
    model = model_factory.build_vit(**model_factory.VARIANTS[kind])
    config, tensors, notes = foreign_format.convert_positions_to_table(model, prefix=True)
    assert (config, notes) == (model.config, [])
    assert tensors.keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"norm_eps": 1e-3}, "norm_eps is 1e-06, and would be read as 0.001"), ({"heads": 2}, "heads is 4")],
)
def test_a_model_that_would_be_read_as_another_is_not_written(change: dict[str, Any], message: str) -> None:
    wanted = model_factory.build_config()
    with pytest.raises(ModelError, match=f"the x format cannot hold this model: {message}"):
        foreign_format.check_round_trip("x", wanted, dataclasses.replace(wanted, **change))
    assert foreign_format.check_round_trip("x", wanted, wanted) == []


def test_a_stems_field_is_named_with_it_and_another_resampling_only_noted() -> None:
    wanted = model_factory.build_config(stem=model_factory.STEM, patch=2)
    held = dataclasses.replace(wanted, stem=dataclasses.replace(model_factory.STEM, norm_eps=1e-5))
    with pytest.raises(ModelError, match=r"stem\.norm_eps is 1e-06, and would be read as 1e-05"):
        foreign_format.check_round_trip("x", wanted, held)
    other: Resample = "bicubic-antialias"
    notes = foreign_format.check_round_trip("x", wanted, dataclasses.replace(wanted, resample=other))
    assert notes == [f"resample: at other image sizes x uses {other}, this model {wanted.resample}"]


def test_only_a_plain_vit_is_a_vit() -> None:
    model = model_factory.build_vit()
    assert foreign_format.require_vit("x", model) is model
    for other, kind in (
        (model_factory.build_bit(), "ResNet"),
        (model_factory.build_vit(stem=model_factory.STEM, patch=2), "hybrid"),
    ):
        with pytest.raises(ModelError, match=f"the x format cannot hold this model: it has no place for a {kind}"):
            foreign_format.require_vit("x", other)


def test_what_of_an_origin_is_lost_is_said() -> None:
    origin = Origin(format="random", name="test")
    assert foreign_format.describe_lost_origin("x", origin) == []
    changed = dataclasses.replace(origin, assumptions=("heads",), changes=("positions",))
    notes = foreign_format.describe_lost_origin("x", changed)
    assert notes == ["origin: x has no place for the assumptions and changes"]
