"""timm's folders and bare files: read, written, and where timm is installed computed by timm itself."""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests import model_factory
from tests.conftest import peer
from tests.model_factory import VARIANTS
from vitrail import presets
from vitrail.config import ConvConfig, PreprocessConfig
from vitrail.errors import ModelError
from vitrail.weights import timm
from vitrail.weights.load import load, save
from vitrail.weights.trained import Origin

HELD = ("plain", "erf", "no-bias", "headless", "norm-mean", "mean-norm", "map", "registers", "placed-registers",
        "distilled", "layer-scale", "no-positions", "2d", "sincos", "wide", "grey", "gated", "gated-normed",
        "drop-remainder")  # fmt: skip
BARE = ("erf", "no-bias", "norm-mean", "mean-norm", "map", "registers", "placed-registers", "distilled", "layer-scale",
        "2d", "sincos", "grey", "drop-remainder")  # fmt: skip
SMALL: dict[str, Any] = {"embed_dim": 64, "depth": 3, "num_heads": 4, "img_size": 32, "patch_size": 8, "num_classes": 5}
WIDE: dict[str, Any] = {"img_size": (24, 40)}  # which tells rows from columns
PE_POOL: dict[str, Any] = {"attn_pool_num_heads": 2, "mlp_ratio": 3}  # the pooling's MLP stays at four times the width
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("vit_base_patch16_224", {}),
    "avg-pool": ("vit_base_patch16_224", {"global_pool": "avg"}),
    "avg-pool with class token and norm first": ("vit_base_patch16_224", {"global_pool": "avg", "fc_norm": False}),
    "avg-pool without class token": ("vit_base_patch16_224", {"global_pool": "avg", "class_token": False}),
    "registers": ("vit_base_patch16_224", {"reg_tokens": 4, "no_embed_class": True}),
    "placed registers": ("vit_base_patch16_224", {"reg_tokens": 4}),
    "registers, avg-pool": ("vit_base_patch16_224", {"reg_tokens": 1, "class_token": False, "global_pool": "avg"}),
    "layer scale": ("vit_base_patch16_224", {"init_values": 1e-5}),
    "class token without position": ("vit_base_patch16_224", {"no_embed_class": True}),
    "attention pooling": ("vit_base_patch16_siglip_224", {}),
    "attention pooling, tanh": ("vit_base_patch32_siglip_256", {}),
    "no qkv bias": ("vit_base_patch16_224", {"qkv_bias": False}),
    "distilled": ("deit_base_distilled_patch16_224", {}),
    "not square": ("vit_base_patch16_224", {"img_size": (24, 40)}),
    "pixels left over": ("vit_so400m_patch14_siglip_384", {"img_size": (30, 37)}),
    "attention pooling of registers too": ("test_vit3", {}),
    "packed SwiGLU": ("vit_giant_patch14_dinov2", {"mlp_ratio": 3}),
    "packed SwiGLU and registers": ("vit_giant_patch14_reg4_dinov2", WIDE | {"mlp_ratio": 3}),
    "CLIP": ("vit_base_patch16_clip_224", WIDE),
    "CLIP, quick GELU": ("vit_base_patch16_clip_quickgelu_224", {}),
    "EVA-01": ("eva_giant_patch14_224", {}),
    "EVA-01 of CLIP": ("eva_giant_patch14_clip_224", WIDE),
    "EVA-02, packed": ("eva02_tiny_patch14_224", WIDE),
    "EVA-02, split": ("eva02_base_patch14_448", WIDE | {"mlp_ratio": 2.7}),
    "EVA-02 of CLIP": ("eva02_base_patch16_clip_224", WIDE),
    "DINOv3 without biases": ("vit_base_patch16_dinov3", WIDE),
    "DINOv3": ("vit_base_patch16_dinov3_qkvb", WIDE),
    "DINOv3, class token": ("vit_base_patch16_dinov3_qkvb", WIDE | {"global_pool": "token"}),
    "DINOv3, split SwiGLU": ("vit_small_plus_patch16_dinov3_qkvb", WIDE | {"mlp_ratio": 2.9}),
    "DINOv3, largest": ("vit_7b_patch16_dinov3", WIDE),
    "LingBot": ("vit_base_patch16_lingbot", WIDE),
    "perception encoder": ("vit_pe_core_base_patch16_224", WIDE | PE_POOL),
    "perception encoder without class token": ("vit_pe_core_gigantic_patch14_448", WIDE | PE_POOL),
    "axial RoPE": ("vit_base_patch16_rope_224", WIDE),
    "axial RoPE and positions": ("vit_base_patch16_rope_ape_224", WIDE),
    "RoPE with registers": ("vit_betwixt_patch16_rope_reg4_gap_256", WIDE),
    "RoPE with registers, no biases": ("vit_mediumd_patch16_rope_reg1_gap_256", WIDE),
    "BEiT": ("beit_base_patch16_224", {}),
    "BEiTv2": ("beitv2_base_patch16_224", {}),
    "BEiT, not square": ("beit_base_patch16_224", WIDE),
    "BEiT, class token": ("beit_base_patch16_224", {"global_pool": "token"}),
    "FlexiViT": ("flexivit_small", {}),
    "DeiT III": ("deit3_small_patch16_224", {}),
}


def build_timm_model(kind: str, **more: Any) -> Any:
    timm = peer("timm")
    name, change = THEIRS[kind]
    torch.manual_seed(0)
    model = timm.create_model(name, **SMALL | change | more).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in parameter_name and parameter_name.endswith("weight") else 0.0, 0.3)
    return model


def write_timm_folder(model: Any, kind: str, path: Path, **more: Any) -> Path:
    """The folder that timm's save_for_hf writes, made by hand since its own function goes through the Hub."""
    name, change = THEIRS[kind]
    path.mkdir()
    save_file(model.state_dict(), path / "model.safetensors")
    arguments = {key: value for key, value in (SMALL | change | more).items() if key != "num_classes"}
    arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
    settings = {
        "architecture": name,
        "num_classes": 5,
        "global_pool": model.global_pool,
        "model_args": arguments,
        "pretrained_cfg": {**model.pretrained_cfg, "tag": "", "input_size": [3, *model.patch_embed.img_size]},
    }
    (path / "config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("kind", THEIRS)
def test_logits_equal_timms_own(kind: str, tmp_path: Path) -> None:
    model = build_timm_model(kind)
    loaded = load(write_timm_folder(model, kind, tmp_path / "model"))
    images = model_factory.draw_images(loaded.model.config)
    with torch.no_grad():
        ours, expected = loaded.model(images), model(images)
        features = model.forward_head(model.forward_features(images), pre_logits=True)
    assert ours.abs().max() > 0.1
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    if kind != "distilled":
        difference = (loaded.model.compute_features(images) - features).abs().max()
        assert difference <= 1e-5 * features.abs().max().clamp(min=1)


@pytest.mark.parametrize("kind", sorted(THEIRS.keys() - {"BEiT, not square"}))
def test_what_we_read_timm_gets_back(kind: str, tmp_path: Path) -> None:
    timm = peer("timm")
    model = build_timm_model(kind)
    loaded = load(write_timm_folder(model, kind, tmp_path / "model"))
    save(loaded, tmp_path / "again", "timm")
    again = timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True).eval()
    images = model_factory.draw_images(loaded.model.config)
    with torch.no_grad():
        expected = model(images)
        assert (again(images) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    assert load(tmp_path / "again").model.config == loaded.model.config


@pytest.mark.parametrize("kind", HELD)
def test_what_we_write_timm_builds_and_computes_alike(kind: str, tmp_path: Path) -> None:
    timm = peer("timm")
    ours = model_factory.build_trained(model_factory.build_vit(**VARIANTS[kind]))
    save(ours, tmp_path / "model", "timm")
    model = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    images = model_factory.draw_images(ours.model.config)
    with torch.no_grad():
        assert (model(images) - ours.model(images)).abs().max() <= 1e-5
    assert ours.preprocess is not None
    their_view = timm.data.resolve_model_data_config(model)
    assert tuple(their_view["mean"]) == ours.preprocess.mean
    assert tuple(their_view["input_size"]) == (ours.model.config.channels, *ours.model.config.image_size)


@pytest.mark.parametrize("kind", HELD)
def test_a_folder_reads_back_to_identical_logits(kind: str, tmp_path: Path) -> None:
    ours = model_factory.build_trained(model_factory.build_vit(**VARIANTS[kind]))
    save(ours, tmp_path / "model", "timm")
    again = load(tmp_path / "model")
    images = model_factory.draw_images(ours.model.config)
    with torch.no_grad():
        assert torch.equal(again.model(images), ours.model(images))
    assert (again.labels, again.preprocess) == (ours.labels, ours.preprocess)


@pytest.mark.parametrize("kind", sorted(VARIANTS.keys() - set(HELD)))
def test_what_timm_cannot_hold_is_refused_and_nothing_is_written(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the timm format cannot hold this model"):
        save(model_factory.build_trained(model_factory.build_vit(**VARIANTS[kind])), tmp_path / "model", "timm")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", sorted(VARIANTS))
def test_a_bare_file_holds_only_what_its_reader_would_see(kind: str, tmp_path: Path) -> None:
    """A head count, tanh GELU or shape that the tensors do not show is refused; all else computes the same."""
    change = {"width": 64, "heads": 1, "gelu": "erf"} | VARIANTS[kind] | ({"gelu": "tanh"} if kind == "plain" else {})
    ours, path = model_factory.build_trained(model_factory.build_vit(**change)), tmp_path / "model.safetensors"
    if kind not in (*BARE, "headless"):
        with pytest.raises(ModelError):
            save(ours, path, "timm")
        assert not path.exists()
        return
    notes = save(ours, path, "timm")
    assert "no place for preprocessing, labels and origin" in notes[-1]
    again = load(path)
    images = model_factory.draw_images(ours.model.config)
    with torch.no_grad():
        assert torch.equal(again.model(images), ours.model(images))
    assert again.preprocess is None
    assert again.labels is None
    assert any("heads: 1, assumed from width 64 / 64" in text for text in again.origin.assumptions)


def test_heads_that_a_bare_file_cannot_tell_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="heads is 4, and would be read as 1"):
        save(
            model_factory.build_trained(model_factory.build_vit(width=64, gelu="erf")),
            tmp_path / "model.safetensors",
            "timm",
        )


@pytest.mark.parametrize(
    ("size", "resize"),
    [((224, 224), (256,)), ((224, 224), (248,)), ((384, 384), (384,)), ((256, 224), (300, 280)), ((37, 37), (41,))],
)
def test_preprocessing_survives_timms_crop_fraction(
    size: tuple[int, int], resize: tuple[int, ...], tmp_path: Path
) -> None:
    model = model_factory.build_vit(patch=math.gcd(*size), image_size=size, positions="none", depth=1)
    preprocess = PreprocessConfig(size=size, resize=resize)
    notes = save(model_factory.build_trained(model, preprocess=preprocess), tmp_path / "model", "timm")
    again = load(tmp_path / "model").preprocess
    assert (again == preprocess) or any("timm cannot state" in note for note in notes)
    if len(resize) == 1:
        assert again == preprocess


def write_settings(tmp_path: Path, **change: Any) -> Path:
    save(model_factory.build_trained(model_factory.build_vit(gelu="erf")), tmp_path / "model", "timm")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_args": {"qk_norm": True}}, "built with qk_norm=True"),
        ({"model_args": {"num_heads": "4"}}, "heads is '4'"),
        ({"model_args": []}, None),
        ({"model_args": [1]}, "'model_args' in its JSON is not an object"),
        ({"pretrained_cfg": "none"}, "'pretrained_cfg' in its JSON is not an object"),
        ({"pretrained_cfg": [1], "model_args": {"num_heads": 4, "img_size": 32}}, "'pretrained_cfg' in its JSON"),
        ({"model_args": {"num_heads": 4, "act_layer": "silu"}}, "activation 'silu'"),
        ({"architecture": "vit_pe_spatial_base_patch16_512"}, "no norm after its last block"),
        ({"architecture": "vit_base_patch16_rope_mixed_224"}, "rotary positions of its own in each layer"),
        ({"model_args": {"num_heads": 4, "use_rot_pos_emb": True, "rope_type": "mixed"}}, "of type 'mixed'"),
        ({"model_args": {"num_heads": 4, "use_post_norm": True}}, "built with use_post_norm=True"),
        ({"model_args": {"num_heads": 4, "scale_mlp": True}}, "scale_mlp is True, the tensors False"),
        ({"model_args": {"num_heads": 4, "global_pool": "max"}}, "global_pool is 'max'"),
        ({"model_args": {"num_heads": 4, "global_pool": "map"}}, "global_pool is 'map'"),
        ({"architecture": "vit_base_patch16_rpn_224"}, "post-normalized blocks"),
    ],
)
def test_a_config_that_is_no_plain_vit_is_refused(change: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    folder = write_settings(tmp_path, **change)
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize("pool", ["token", "max", "avgmax"])
def test_a_norm_after_pooling_goes_with_average_pooling_only(pool: str, tmp_path: Path) -> None:
    save(model_factory.build_trained(model_factory.build_vit(gelu="erf", pool="mean-norm")), tmp_path / "model", "timm")
    path = tmp_path / "model" / "config.json"
    settings = json.loads(path.read_text())
    settings["model_args"]["global_pool"] = pool
    path.write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=f"global_pool is '{pool}'"):
        load(tmp_path / "model")


@pytest.mark.parametrize(("change", "pretrained"), [({"img_size": 64}, {}), ({}, {"input_size": [3, 64, 64]})])
def test_a_stated_size_that_the_positions_contradict_is_overruled_and_said(
    change: dict[str, Any], pretrained: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_settings(tmp_path, model_args={"num_heads": 4} | change, pretrained_cfg=pretrained)
    loaded = load(folder)
    assert loaded.model.config.image_size == (32, 32)
    assert any("image size: from the 4 x 4 positions" in text for text in loaded.origin.assumptions)


@pytest.mark.parametrize("value", [5, True, {}, "224", [3], [3, 0, 0], [3, "a", "b"], None])
def test_an_input_size_that_is_none_is_passed_over(value: object, tmp_path: Path) -> None:
    folder = write_settings(tmp_path, model_args={"num_heads": 4}, pretrained_cfg={"input_size": value})
    assert load(folder).model.config.image_size == (32, 32)


@pytest.mark.parametrize(
    ("name", "heads"), [("vit_giantopt_patch16_siglip_256", 16), ("vit_base_patch16_gap_224", 16), ("test_vit", 2)]
)
def test_architectures_with_heads_of_their_own_are_known(name: str, heads: int, tmp_path: Path) -> None:
    model = model_factory.build_vit(width=64, heads=heads, gelu="tanh" if "giantopt" in name else "erf")
    save(model_factory.build_trained(model), tmp_path / "model", "timm")
    path = tmp_path / "model" / "config.json"
    settings = json.loads(path.read_text()) | {"architecture": name, "model_args": {}}
    path.write_text(json.dumps(settings))
    assert load(tmp_path / "model").model.config == dataclasses.replace(model.config, resample="bicubic-antialias")


@pytest.mark.parametrize("change", [{"registers": 2}, {"prefix_positions": False}, {"positions": "sincos-2d"}])
def test_timms_distilled_model_is_not_written_where_it_has_another_form(change: dict[str, Any], tmp_path: Path) -> None:
    distilled = model_factory.build_vit(distillation_token=True, distillation_head=True, **change)
    with pytest.raises(ModelError, match="timm's ViT has no"):
        save(model_factory.build_trained(distilled), tmp_path / "model", "timm")


def test_a_dot_in_a_folders_name_is_part_of_it(tmp_path: Path) -> None:
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "tiny.in1k", "timm")
    assert load(tmp_path / "tiny.in1k").labels is not None


def test_area_is_called_box(tmp_path: Path) -> None:
    preprocess = PreprocessConfig(size=(32, 32), resize=(36,), interpolation="area", mean=(0.4,) * 3, std=(0.3,) * 3)
    save(model_factory.build_trained(model_factory.build_vit(), preprocess=preprocess), tmp_path / "model", "timm")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["pretrained_cfg"]["interpolation"] == "box"
    assert load(tmp_path / "model").preprocess == preprocess


def test_what_a_folder_cannot_say_is_noted(tmp_path: Path) -> None:
    origin = Origin(format="timm", name="a", license="mit", assumptions=("one",), changes=("two",))
    trained = model_factory.build_trained(model_factory.build_vit(), origin=origin)
    for format_name in ("timm", "transformers"):
        notes = save(trained, tmp_path / format_name, format_name)
        assert any("resample: at other image sizes" in note for note in notes)
        assert f"origin: {format_name} has no place for the assumptions and changes" in notes
        assert load(tmp_path / format_name).origin.license == "mit"


def test_imagenet_names_are_given_only_where_the_origin_says_so(tmp_path: Path) -> None:
    model = model_factory.build_vit(classes=1000, gelu="erf")
    for tag, named in (
        ("augreg_in21k_ft_in1k", True),
        ("in1k", True),
        ("in21k", False),
        ("plain1k", False),
        (None, False),
    ):
        folder = tmp_path / str(tag)
        save(model_factory.build_trained(model, labels=None), folder, "timm")
        settings = json.loads((folder / "config.json").read_text())
        settings["pretrained_cfg"] |= {"tag": tag, "license": "mit"}
        (folder / "config.json").write_text(json.dumps(settings))
        loaded = load(folder)
        assert (loaded.labels is not None) == named, tag
        assert loaded.origin.license == "mit"
    assert load(tmp_path / "in1k").labels[1] == "goldfish, Carassius auratus"


def test_preprocessing_that_is_not_stated_is_unknown_and_said(tmp_path: Path) -> None:
    folder = write_settings(
        tmp_path, pretrained_cfg={"input_size": [3, 32, 32], "crop_mode": "border", "crop_pct": 1.0}
    )
    loaded = load(folder)
    assert loaded.preprocess is None
    assert "preprocessing: unknown" in loaded.origin.assumptions[-1]


HYBRIDS = ("vit_tiny_r_s16_p8_224", "vit_small_r26_s32_224", "vit_base_r50_s16_224", "vit_large_r50_s32_224")


def fill_weights(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    return model.eval()


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_equal_timms_hybrids_and_back(name: str, tmp_path: Path) -> None:
    """Also on faint images, where the epsilons of group norm and standardisation show."""
    timm = peer("timm")
    torch.manual_seed(0)
    arguments = {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": 64}
    model = fill_weights(timm.create_model(name, num_classes=5, **arguments))
    (tmp_path / "model").mkdir()
    save_file(model.state_dict(), tmp_path / "model" / "model.safetensors")
    settings = {"architecture": name, "num_classes": 5, "model_args": arguments, "pretrained_cfg": model.pretrained_cfg}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    loaded = load(tmp_path / "model")
    assert loaded.model.config.stem is not None
    for scale in (1.0, 1e-3):
        images = model_factory.draw_images(loaded.model.config) * scale
        with torch.no_grad():
            expected = model(images)
            # In float64, since some CPUs' convolutions alone are off by that much; kernels are standardised in float32.
            ours, theirs = (copy.deepcopy(network).double()(images.double()) for network in (loaded.model, model))
            assert (ours - theirs).abs().max() <= 1e-4
    save(loaded, tmp_path / "again", "timm")
    theirs_again = timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(theirs_again(images), expected)
        assert torch.equal(load(tmp_path / "again").model(images), loaded.model(images))
    timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True, in_chans=1)  # it finds the first kernels
    settings["architecture"] = "vit_base_patch16_224"
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="vit_base_patch16_224 has the stem None"):
        load(tmp_path / "model")


def test_logits_equal_timms_bit_and_back(tmp_path: Path) -> None:
    timm = peer("timm")
    torch.manual_seed(0)
    model = fill_weights(timm.create_model("resnetv2_50x1_bit", num_classes=5))
    (tmp_path / "model").mkdir()
    save_file(model.state_dict(), tmp_path / "model" / "model.safetensors")
    settings = {"architecture": "resnetv2_50x1_bit", "num_classes": 5, "pretrained_cfg": model.pretrained_cfg}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    loaded = load(tmp_path / "model")
    assert loaded.model.config.image_size == (224, 224)
    for size, scale in ((96, 1.0), (65, 1e-3)):
        images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1)) * scale
        with torch.no_grad():
            expected = model(images)
            assert (loaded.model(images) - expected).abs().max() <= 1e-4 * expected.abs().max()
    save(loaded, tmp_path / "again", "timm")
    theirs_again = timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(theirs_again(images), expected)


def test_googles_numerics_are_not_timms(tmp_path: Path) -> None:
    """The same tensors would compute another function there."""
    stem = ConvConfig(units=(2, 2, 2, 2), **presets.HYBRID_NUMERICS)
    hybrid = model_factory.build_vit(stem=stem, patch=1, image_size=(64, 64))
    with pytest.raises(ModelError, match=r"stem\.norm_eps is 1e-06, and would be read as 1e-05"):
        save(model_factory.build_trained(hybrid), tmp_path / "hybrid", "timm")
    resnet = model_factory.build_bit(conv=ConvConfig(units=(3, 4, 6, 3), **presets.BIT_NUMERICS))
    with pytest.raises(ModelError, match=r"conv\.standardization_eps is 1e-10"):
        save(model_factory.build_trained(resnet), tmp_path / "resnet", "timm")
    with pytest.raises(ModelError, match="no name for a ResNet of units"):
        save(model_factory.build_trained(model_factory.build_bit()), tmp_path / "resnet", "timm")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_pool": "max"}, "a BiT ResNet averages"),
        ({"model_args": {"global_pool": "max"}}, "a BiT ResNet averages"),
        ({"model_args": {"act_layer": "silu"}}, "built with act_layer='silu'"),
        ({"model_args": [1]}, "not an object"),
        ({"num_classes": 99}, "differ in the number of classes"),
        ({"architecture": ["x_bit"]}, "those of BiT are read"),
        ({"architecture": "resnetv2_50"}, "those of BiT are read"),
    ],
)
def test_a_config_that_is_no_bit_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    conv = ConvConfig(units=(3, 4, 6, 3), **timm.NUMERICS)
    save(model_factory.build_trained(model_factory.build_bit(conv=conv)), tmp_path / "model", "timm")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "model")


def test_a_stem_under_both_its_names_is_refused(tmp_path: Path) -> None:
    tensors = model_factory.build_vit(stem=ConvConfig(units=(), **timm.NUMERICS), patch=2).state_dict()
    double = {"patch_embed.backbone.conv.weight": tensors["patch_embed.backbone.stem.conv.weight"].clone()}
    save_file(tensors | double, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="two tensors for"):
        load(tmp_path / "model.safetensors")


@pytest.mark.parametrize("kind", ["CLIP", "EVA-01 of CLIP", "EVA-02 of CLIP", "perception encoder"])
def test_a_head_without_biases_is_the_projection_of_clip(kind: str, tmp_path: Path) -> None:
    """Its numbers are timm's logits; a fine-tuned head, which has biases or a tag that says so, keeps its classes."""
    timm = peer("timm")
    model = build_timm_model(kind)
    fine_tuned = load(write_timm_folder(model, kind, tmp_path / "fine-tuned")).model.config
    assert (fine_tuned.classes, fine_tuned.projection) == (5, 0)
    torch.nn.init.zeros_(model.head.bias)
    folder = write_timm_folder(model, kind, tmp_path / "model")
    loaded = load(folder)
    assert (loaded.model.config.classes, loaded.model.config.projection) == (0, 5)
    images = model_factory.draw_images(loaded.model.config)
    with torch.no_grad():
        expected = model(images)
        assert (loaded.model(images) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    save(loaded, tmp_path / "again", "timm")
    again = timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True).eval()
    with torch.no_grad():
        assert (again(images) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    assert load(tmp_path / "again").model.config == loaded.model.config
    settings = json.loads((folder / "config.json").read_text())
    settings["pretrained_cfg"]["tag"] = "laion2b_ft_in1k"
    (folder / "config.json").write_text(json.dumps(settings))
    assert load(folder).model.config.classes == 5


BARE_ARCHITECTURES = ("CLIP", "EVA-01", "EVA-02, split", "EVA-02 of CLIP", "DINOv3", "DINOv3, split SwiGLU",
                      "perception encoder", "axial RoPE", "RoPE with registers", "BEiT", "packed SwiGLU",
                      "DeiT III")  # fmt: skip


@pytest.mark.parametrize("kind", BARE_ARCHITECTURES)
def test_a_bare_file_is_read_where_its_tensors_tell_the_family(kind: str, tmp_path: Path) -> None:
    """Heads are width / 64 there, and the size of images is that of the positions, or 224 without positions."""
    size = {"img_size": 224, "patch_size": 16, "depth": 2, "embed_dim": 128, "num_heads": 2}
    pool = {"attn_pool_num_heads": 8, "ref_feat_shape": (14, 14)} if kind == "perception encoder" else {}
    model = build_timm_model(kind, **size | pool)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.7  # sums over many patches stay small
    save_file(model.state_dict(), tmp_path / "alone.safetensors")
    loaded = load(tmp_path / "alone.safetensors")
    images = model_factory.draw_images(loaded.model.config, count=1)
    with torch.no_grad():
        expected = model(images)
        assert (loaded.model(images) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    if loaded.model.config.rotary or loaded.model.config.norm_pre:
        assert any("as of timm's" in sentence for sentence in loaded.origin.assumptions)


@pytest.mark.parametrize(
    ("kind", "size"),
    [("EVA-02, split", (40, 56)), ("FlexiViT", (48, 48)), ("DINOv3", (40, 24)), ("perception encoder", (32, 48)),
     ("axial RoPE", (40, 24)), ("packed SwiGLU and registers", (40, 48))],
)  # fmt: skip
def test_at_other_sizes_positions_are_those_of_a_network_that_timm_builds_for_the_size(
    kind: str, size: tuple[int, int], tmp_path: Path
) -> None:
    timm = peer("timm")
    model = build_timm_model(kind, img_size=32)
    folder = write_timm_folder(model, kind, tmp_path / "model", img_size=32)
    loaded = load(folder)
    resized = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=size).eval()
    images = model_factory.draw_images(loaded.model.config, size=size)
    with torch.no_grad():
        expected = resized(images)
        assert (loaded.model(images) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


def test_images_with_pixels_left_over_are_prepared_at_their_own_size(tmp_path: Path) -> None:
    """As for vit_so400m_patch14_siglip_384: 27 x 27 patches of 14 leave 6 pixels unread."""
    model = build_timm_model("pixels left over", img_size=30)
    loaded = load(write_timm_folder(model, "pixels left over", tmp_path / "model", img_size=30))
    assert loaded.preprocess is not None
    assert loaded.preprocess.size == loaded.model.config.image_size == (30, 30)
    assert loaded.model.config.grid == (3, 3)
    save(loaded, tmp_path / "again", "timm")
    assert load(tmp_path / "again").preprocess == loaded.preprocess
