"""The authors' own files: timm's networks with the tensors renamed as Meta, BAAI and Microsoft call them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import model_factory
from tests.conftest import peer
from vitrail.errors import ModelError
from vitrail.weights.load import load, save

SMALL: dict[str, Any] = {"embed_dim": 128, "depth": 3, "num_heads": 2, "img_size": 32, "patch_size": 8}
Rename = Callable[[dict[str, Tensor]], Any]


def build_timm_model(architecture: str, **change: Any) -> Any:
    """A small network with random values in every parameter."""
    timm = peer("timm")
    torch.manual_seed(0)
    model = timm.create_model(architecture, **SMALL | change).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name and name.endswith("weight")), 0.3)
    return model


def replace_names(tensors: dict[str, Tensor], *parts: tuple[str, str]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in parts:
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def to_dinov2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"mask_token": torch.randn(1, 128)}


def to_dinov2_with_registers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The class token's position is stored in the table, and timm adds it to the token."""
    position = torch.randn(1, 1, 128)
    registers = {
        "cls_token": tensors["cls_token"] - position,
        "pos_embed": torch.cat([position, tensors["pos_embed"]], dim=1),
        "mask_token": torch.randn(1, 128),
    }
    return replace_names(tensors | registers, ("reg_token", "register_tokens"))


def to_dinov2_giant(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return replace_names(to_dinov2(tensors), (".mlp.fc1.", ".mlp.w12."), (".mlp.fc2.", ".mlp.w3."))


def to_dinov3(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Biases of keys are masked, whatever they hold; the periods are those of float32."""
    theirs = {"mask_token": torch.randn(1, 128), "local_cls_norm.weight": torch.randn(128)}
    theirs["rope_embed.periods"] = 100 ** (torch.arange(16) / 16)
    for name, tensor in tensors.items():
        if name.endswith("q_bias"):
            garbage = torch.full((128,), float("nan"))
            bias = torch.cat([tensor, garbage, tensors[name.replace("q_bias", "v_bias")]])
            theirs[name.replace("q_bias", "qkv.bias")] = bias
            theirs[name.replace("q_bias", "qkv.bias_mask")] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(128)
        elif not name.endswith("v_bias"):
            theirs[name] = tensor
    names = [("reg_token", "storage_tokens"), ("gamma_1", "ls1.gamma"), ("gamma_2", "ls2.gamma")]
    names += [("mlp.fc1_g", "mlp.w1"), ("mlp.fc1_x", "mlp.w2")]
    is_gated = any("fc1_g" in name for name in tensors)
    return replace_names(theirs, *names, *([("mlp.fc2", "mlp.w3")] if is_gated else []))


def to_mae_visualize(tensors: dict[str, Tensor]) -> dict[str, Any]:
    decoder = {"mask_token": torch.randn(1, 1, 64), "decoder_embed.weight": torch.randn(64, 128)}
    return {"model": tensors | decoder | {"decoder_blocks.0.norm1.bias": torch.randn(64)}, "epoch": 400}


def to_ijepa(tensors: dict[str, Tensor]) -> dict[str, Any]:
    encoder = {f"module.{name}": tensor for name, tensor in tensors.items()}
    other = {"module.predictor_embed.weight": torch.randn(2, 2)}
    return {"encoder": encoder, "predictor": other, "target_encoder": encoder, "opt": {"state": {}}, "epoch": 300}


def to_deit3(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {"model": replace_names(tensors, ("ls1.gamma", "gamma_1"), ("ls2.gamma", "gamma_2"))}


def to_eva02(tensors: dict[str, Tensor]) -> dict[str, Any]:
    names = [
        ("mlp.fc1_g.", "mlp.w1."),
        ("mlp.fc1_x.", "mlp.w2."),
        ("mlp.fc2.", "mlp.w3."),
        ("mlp.norm.", "mlp.ffn_ln."),
    ]
    names += [("attn.q_proj.bias", "attn.q_bias"), ("attn.v_proj.bias", "attn.v_bias"), ("mlp.fc1.", "mlp.w12.")]
    buffers = {"rope.freqs_cos": torch.randn(16, 32), "blocks.0.attn.rope.freqs_sin": torch.randn(16, 32)}
    return {"module": replace_names(tensors, *names, ("attn.norm.", "attn.inner_attn_ln.")) | buffers}


def to_eva02_pretrained(tensors: dict[str, Tensor]) -> dict[str, Any]:
    theirs = replace_names(to_eva02(tensors)["module"], ("fc_norm.", "norm."))
    heads = {
        "mask_token": torch.randn(1, 1, 128),
        "lm_head.weight": torch.randn(9, 128),
        "lm_head.bias": torch.randn(9),
    }
    return {"model": theirs | heads}


def to_eva01_pretrained(tensors: dict[str, Tensor]) -> dict[str, Any]:
    head = {"lm_head.weight": torch.randn(9, 128), "mask_token": torch.randn(1, 1, 128)}
    return {"model": replace_names(tensors, ("fc_norm.", "norm.")) | head}


def to_eva02_clip(tensors: dict[str, Tensor]) -> dict[str, Any]:
    visual = {f"visual.{name}": tensor for name, tensor in to_eva02(tensors)["module"].items()}
    return visual | {"logit_scale": torch.ones(()), "text.token_embedding.weight": torch.randn(9, 8)}


def to_beit(tensors: dict[str, Tensor]) -> dict[str, Any]:
    index = {"blocks.0.attn.relative_position_index": torch.zeros(17, 17, dtype=torch.int64)}
    return {"model": tensors | index}


def to_beit_pretrained(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """One table for all layers, and the norm before pooling."""
    theirs = replace_names(tensors, ("fc_norm.", "norm."))
    heads = {
        "mask_token": torch.randn(1, 1, 128),
        "lm_head.weight": torch.randn(9, 128),
        "lm_head.bias": torch.randn(9),
    }
    return {"model": theirs | heads | {"cls_pt_layers.0.norm1.bias": torch.randn(128)}}


def to_pe(tensors: dict[str, Tensor]) -> dict[str, Any]:
    theirs = dict(tensors)
    theirs["proj"] = theirs.pop("head.weight").T.contiguous()
    del theirs["head.bias"]
    theirs |= {"pos_embed": theirs["pos_embed"][0], "cls_token": theirs["cls_token"][0, 0]}
    for kind in ("weight", "bias"):
        packed = torch.cat([theirs.pop(f"attn_pool.{part}.{kind}") for part in ("q", "kv")])
        theirs[f"attn_pool.attn.in_proj_{kind}"] = packed
    names = [("patch_embed.proj", "conv1"), ("pos_embed", "positional_embedding"), ("cls_token", "class_embedding")]
    names += [
        ("norm_pre.", "ln_pre."),
        ("attn_pool.norm.", "attn_pool.layernorm."),
        ("norm1.", "ln_1."),
        ("norm2.", "ln_2."),
    ]
    names += [("attn_pool.latent", "attn_pool.probe"), ("attn_pool.proj.", "attn_pool.attn.out_proj.")]
    names += [("attn.qkv.", "attn.in_proj_"), ("attn.proj.", "attn.out_proj."), ("mlp.fc1.", "mlp.c_fc.")]
    names += [("mlp.fc2.", "mlp.c_proj."), ("blocks.", "transformer.resblocks.")]
    theirs = replace_names(theirs, *names)
    theirs = {f"ln_post.{name[5:]}" if name.startswith("norm.") else name: tensor for name, tensor in theirs.items()}
    visual = {f"visual.{name}": tensor for name, tensor in theirs.items()}
    return visual | {"logit_scale": torch.ones(()), "transformer.resblocks.0.ln_1.bias": torch.randn(8)}


CLASS_TOKEN = {"num_classes": 0, "global_pool": "token"}
WIDE_GIANT = {"mlp_ratio": 3, "num_classes": 0}
PE_SIZE = {"attn_pool_num_heads": 8, "ref_feat_shape": (4, 4), "num_classes": 6}
FILES: dict[str, tuple[str, dict[str, Any], Rename]] = {
    "DINOv2": ("vit_base_patch14_dinov2", {"num_classes": 0}, to_dinov2),
    "DINOv2 with registers": ("vit_base_patch14_reg4_dinov2", {"num_classes": 0}, to_dinov2_with_registers),
    "DINOv2, giant": ("vit_giant_patch14_dinov2", WIDE_GIANT, to_dinov2_giant),
    "DINOv3": ("vit_base_patch16_dinov3_qkvb", CLASS_TOKEN, to_dinov3),
    "DINOv3, split SwiGLU": (
        "vit_huge_plus_patch16_dinov3_qkvb",
        {"num_classes": 0, "global_pool": "token"},
        to_dinov3,
    ),
    "DINOv3 without biases": ("vit_7b_patch16_dinov3", CLASS_TOKEN, to_dinov3),
    "MAE, fine-tuned": ("vit_base_patch16_224", {"global_pool": "avg", "num_classes": 5}, lambda own: {"model": own}),
    "MAE with its decoder": ("vit_base_patch16_224", {"num_classes": 0}, to_mae_visualize),
    "I-JEPA": ("vit_huge_patch14_gap_224", {"num_classes": 0}, to_ijepa),
    "DeiT III": ("deit3_base_patch16_224", {"num_classes": 5}, to_deit3),
    "EVA-02": ("eva02_base_patch14_224", {"num_classes": 5, "mlp_ratio": 2.7}, to_eva02),
    "EVA-02, packed": ("eva02_tiny_patch14_224", {"num_classes": 5}, to_eva02),
    "EVA-02, pre-trained": ("eva02_base_patch14_224", {"num_classes": 0}, to_eva02_pretrained),
    "EVA-02 of CLIP": ("eva02_base_patch16_clip_224", {"num_classes": 5}, to_eva02_clip),
    "EVA-01, pre-trained": ("eva_giant_patch14_224", {"num_classes": 0}, to_eva01_pretrained),
    "BEiT": ("beit_base_patch16_224", {"num_classes": 5}, to_beit),
    "BEiT, pre-trained": (
        "beit_base_patch16_224",
        {"num_classes": 0, "use_shared_rel_pos_bias": True, "use_rel_pos_bias": False},
        to_beit_pretrained,
    ),
    "perception encoder": ("vit_pe_core_base_patch16_224", PE_SIZE, to_pe),
}


@pytest.mark.parametrize("kind", FILES)
def test_features_equal_those_of_the_network_that_the_file_is_of(kind: str, tmp_path: Path) -> None:
    architecture, change, rename = FILES[kind]
    model = build_timm_model(architecture, **change)
    if kind == "perception encoder":
        torch.nn.init.zeros_(model.head.bias)
    torch.save(rename(model.state_dict()), tmp_path / "model.pth")
    loaded = load(tmp_path / "model.pth")
    config = loaded.model.config
    size = (24, 40) if config.positions == "none" else None  # tells rows from columns
    if size:
        model = build_resized(model, architecture, change, size)
    images = model_factory.draw_images(config, size=size or (32, 32))
    with torch.no_grad():
        expected = model(images)
        assert (loaded.model(images) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    assert expected.abs().max() > 0.1
    assert loaded.preprocess is None
    assert any("preprocessing: unknown" in sentence for sentence in loaded.origin.assumptions)


def build_resized(model: Any, architecture: str, change: dict[str, Any], size: tuple[int, int]) -> Any:
    """The same weights in a network for another size of images."""
    resized = build_timm_model(architecture, **change | {"img_size": size})
    resized.load_state_dict(model.state_dict())
    return resized


def test_periods_of_bfloat16_are_kept_and_stated(tmp_path: Path) -> None:
    """timm computes them in float32: the features differ, and equal timm's once its periods are rounded."""
    model = build_timm_model("vit_base_patch16_dinov3_qkvb", num_classes=0, global_pool="token")
    theirs = to_dinov3(model.state_dict())
    theirs["rope_embed.periods"] = theirs["rope_embed.periods"].bfloat16()
    torch.save(theirs, tmp_path / "model.pth")
    loaded = load(tmp_path / "model.pth")
    assert loaded.model.config.rotary.bfloat16_periods
    assert any("periods in bfloat16, as the file stores them" in text for text in loaded.origin.assumptions)
    images = model_factory.draw_images(loaded.model.config, size=(32, 32))
    with torch.no_grad():
        difference = (loaded.model(images) - model(images)).abs().max()
        assert difference > 1e-4
        model.rope.periods.copy_(model.rope.periods.bfloat16().float())
        expected = model(images)
        assert (loaded.model(images) - expected).abs().max() <= 1e-5 * expected.abs().max()
    with pytest.raises(ModelError, match=r"rotary\.bfloat16_periods is True"):
        save(loaded, tmp_path / "model-timm", "timm")


@pytest.mark.parametrize(("inputs", "message"), [(256, None), (640, "reads several layers")])
def test_a_linear_head_reads_class_token_and_mean(inputs: int, message: str | None, tmp_path: Path) -> None:
    model = build_timm_model("vit_base_patch14_dinov2", num_classes=0)
    head = torch.nn.Linear(inputs, 7)
    theirs = {f"backbone.{name}": tensor for name, tensor in to_dinov2(model.state_dict()).items()}
    torch.save(theirs | {f"linear_head.{k}": v for k, v in head.state_dict().items()}, tmp_path / "model.pth")
    if message:
        with pytest.raises(ModelError, match=message):
            load(tmp_path / "model.pth")
        return
    loaded = load(tmp_path / "model.pth").model
    assert (loaded.config.pool, loaded.config.classes) == ("class-mean", 7)
    images = model_factory.draw_images(loaded.config)
    with torch.no_grad():
        tokens = model.forward_features(images)
        expected = head(torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1))
        assert (loaded(images) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


def change_dinov3(tensors: dict[str, Tensor], name: str, value: Tensor) -> dict[str, Tensor]:
    return {**to_dinov3(tensors), name: value}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rope_embed.periods", torch.arange(16.0), "are not those of DINOv3"),
        ("rope_embed.periods", torch.arange(8.0), "are not those of DINOv3"),
        ("blocks.1.attn.qkv.bias_mask", torch.ones(384), "is not 1 for queries and values and 0 for keys"),
        ("cls_norm.weight", torch.ones(128), "has a tensor this model has no place for: 'cls_norm.weight'"),
        ("linear_head.weight", torch.ones(1000, 128), "reads several layers"),
    ],
)
def test_a_dinov3_file_of_another_kind_is_refused(name: str, value: Tensor, message: str, tmp_path: Path) -> None:
    model = build_timm_model("vit_base_patch16_dinov3_qkvb", num_classes=0, global_pool="token")
    torch.save(change_dinov3(model.state_dict(), name, value), tmp_path / "model.pth")
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "model.pth")


def test_a_mask_that_was_never_set_is_read_as_that_of_keys(tmp_path: Path) -> None:
    model = build_timm_model("vit_base_patch16_dinov3_qkvb", num_classes=0, global_pool="token")
    unset = change_dinov3(model.state_dict(), "blocks.0.attn.qkv.bias_mask", torch.full((384,), float("nan")))
    torch.save(unset, tmp_path / "model.pth")
    loaded = load(tmp_path / "model.pth").model
    images = model_factory.draw_images(loaded.config, size=(32, 32))
    with torch.no_grad():
        assert (loaded(images) - model(images)).abs().max() <= 1e-5 * model(images).abs().max()


def test_a_perception_encoder_without_a_last_norm_is_refused(tmp_path: Path) -> None:
    tensors = {"conv1.weight": torch.zeros(8, 3, 4, 4), "transformer.resblocks.0.ls_1.gamma": torch.zeros(8)}
    torch.save(tensors, tmp_path / "model.pth")
    with pytest.raises(ModelError, match="no norm after its last block"):
        load(tmp_path / "model.pth")


@pytest.mark.parametrize(
    ("kind", "resample"),
    [("DINOv2", "bicubic-offset"), ("DINOv2 with registers", "bicubic-antialias"), ("DeiT III", "bicubic"),
     ("perception encoder", "bilinear"), ("BEiT", "bilinear")],
)  # fmt: skip
def test_positions_are_resampled_as_the_authors_do(kind: str, resample: str, tmp_path: Path) -> None:
    architecture, change, rename = FILES[kind]
    torch.save(rename(build_timm_model(architecture, **change).state_dict()), tmp_path / "model.pth")
    assert load(tmp_path / "model.pth").model.config.resample == resample


@pytest.mark.parametrize(
    "kind", ["DINOv2 with registers", "DINOv3", "EVA-02", "BEiT, pre-trained", "perception encoder"]
)
@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.zeros(0), torch.zeros(1, 1, 1, 1, 1)])
def test_a_tensor_of_another_shape_is_refused_wherever_it_is(kind: str, value: Tensor, tmp_path: Path) -> None:
    architecture, change, rename = FILES[kind]
    theirs = rename(build_timm_model(architecture, **change | {"depth": 1}).state_dict())
    tensors = next((theirs[key] for key in ("model", "module") if key in theirs), theirs)
    unread = (
        "mask_token",
        "local_cls_norm",
        "lm_head",
        "cls_pt_layers",
        "rope.",
        "text.",
        "logit_scale",
        "transformer.",
    )
    for name in tensors:
        if not name.startswith(unread) and ".rope." not in name and "relative_position_index" not in name:
            torch.save(tensors | {name: value}, tmp_path / "model.pth")
            with pytest.raises(ModelError):
                load(tmp_path / "model.pth")
