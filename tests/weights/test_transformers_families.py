"""The families of transformers: tiny random models of its own classes, computed by ours, and written back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import model_factory
from vitrail.config import RotaryConfig
from vitrail.errors import ModelError
from vitrail.weights.load import load, save
from vitrail.weights.transformers_families import FAMILIES

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}
TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}
NAFLEX = {name: value for name, value in SMALL.items() if name != "image_size"} | {"num_patches": 16}
RELATIVE, SHARED = {"use_relative_position_bias": True}, {"use_shared_relative_position_bias": True}


def build_pair(family: str, **change: Any) -> Any:
    """The config of an image and a text tower."""
    config: Any = getattr(transformers, f"{family}Config")
    vision = NAFLEX if family == "Siglip2" else SMALL
    return config(vision_config=vision | change, text_config=TEXT, **{"projection_dim": 24} if "lip" in family else {})


def build_config(name: str, **change: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**SMALL | change)


def read_logits(model: Any, images: Tensor) -> Tensor:
    return model(images, interpolate_pos_encoding=True).logits


def read_plain_logits(model: Any, images: Tensor) -> Tensor:
    return model(images).logits


def read_pooled(model: Any, images: Tensor) -> Tensor:
    return model(images, interpolate_pos_encoding=True).pooler_output


def read_plain_pooled(model: Any, images: Tensor) -> Tensor:
    return model(images).pooler_output


def read_embeds(model: Any, images: Tensor) -> Tensor:
    return model(images, interpolate_pos_encoding=True).image_embeds


def read_mean(model: Any, images: Tensor) -> Tensor:
    return model(images, interpolate_pos_encoding=True).last_hidden_state.mean(dim=1)


def read_class_token(model: Any, images: Tensor) -> Tensor:
    return model(images, interpolate_pos_encoding=True).last_hidden_state[:, 0]


def read_tower(model: Any, images: Tensor) -> Tensor:
    """The features of a whole model's image tower, projected where it has a projection."""
    pooled = read_pooled(model.vision_model, images)
    return model.visual_projection(pooled) if hasattr(model, "visual_projection") else pooled


def flatten_patches(model: Any, images: Tensor) -> dict[str, Tensor]:
    """The inputs of NaFlex: rows of patches, each with its channels last."""
    side, (rows, columns) = 8, (images.shape[2] // 8, images.shape[3] // 8)
    patches = images.unflatten(3, (columns, side)).unflatten(2, (rows, side)).permute(0, 2, 4, 3, 5, 1)
    count = len(images)
    return {
        "pixel_values": patches.reshape(count, rows * columns, -1),
        "pixel_attention_mask": torch.ones(count, rows * columns, dtype=torch.long),
        "spatial_shapes": torch.tensor([[rows, columns]] * count),
    }


def read_naflex(model: Any, images: Tensor) -> Tensor:
    out = getattr(model, "vision_model", model)(**flatten_patches(model, images))
    return out.pooler_output


def read_naflex_logits(model: Any, images: Tensor) -> Tensor:
    return model(**flatten_patches(model, images)).logits


Build = Callable[[], Any]
Read = Callable[[Any, Tensor], Tensor]
MODELS: dict[str, tuple[str, Build, Read]] = {  # class, its config, and what ours must compute
    "DINOv2, giant": (
        "Dinov2ForImageClassification",
        lambda: build_config("Dinov2", use_swiglu_ffn=True, mlp_ratio=2),
        read_plain_logits,
    ),
    "DINOv2 with registers, giant": (
        "Dinov2WithRegistersModel",
        lambda: build_config("Dinov2WithRegisters", use_swiglu_ffn=True, mlp_ratio=2),
        read_plain_pooled,
    ),
    "DINOv3": ("DINOv3ViTModel", lambda: build_config("DINOv3ViT", num_register_tokens=4), read_plain_pooled),
    "DINOv3, gated": (
        "DINOv3ViTModel",
        lambda: build_config("DINOv3ViT", num_register_tokens=2, use_gated_mlp=True, hidden_act="silu"),
        read_plain_pooled,
    ),
    "DINOv3, 7B": (
        "DINOv3ViTModel",
        lambda: build_config(
            "DINOv3ViT", num_register_tokens=4, use_gated_mlp=True, hidden_act="silu", query_bias=False,
            value_bias=False, mlp_bias=False, proj_bias=False,
        ),
        read_plain_pooled,
    ),
    "DINOv3, every bias": ("DINOv3ViTModel", lambda: build_config("DINOv3ViT", key_bias=True), read_plain_pooled),
    "SigLIP, image tower": ("SiglipVisionModel", lambda: build_config("SiglipVision"), read_pooled),
    "SigLIP": ("SiglipModel", lambda: build_pair("Siglip"), read_tower),
    "SigLIP, a size that patches do not divide": (
        "SiglipVisionModel",
        lambda: build_config("SiglipVision", image_size=38),
        read_plain_pooled,
    ),
    "SigLIP, classifier": ("SiglipForImageClassification", lambda: build_pair("Siglip"), read_logits),
    "SigLIP 2, NaFlex image tower": (
        "Siglip2VisionModel",
        lambda: transformers.Siglip2VisionConfig(**NAFLEX),
        read_naflex,
    ),
    "SigLIP 2, NaFlex": ("Siglip2Model", lambda: build_pair("Siglip2"), read_naflex),
    "SigLIP 2, NaFlex classifier": ("Siglip2ForImageClassification", lambda: build_pair("Siglip2"), read_naflex_logits),
    "CLIP": ("CLIPModel", lambda: build_pair("CLIP"), read_tower),
    "CLIP, erf GELU": ("CLIPModel", lambda: build_pair("CLIP", hidden_act="gelu"), read_tower),
    "CLIP, projected image tower": (
        "CLIPVisionModelWithProjection",
        lambda: build_config("CLIPVision", projection_dim=24),
        read_embeds,
    ),
    "CLIP, image tower": ("CLIPVisionModel", lambda: build_config("CLIPVision"), read_pooled),
    "MetaCLIP 2": ("MetaClip2Model", lambda: build_pair("MetaClip2"), read_tower),
    "BEiT": ("BeitForImageClassification", lambda: build_config("Beit", **RELATIVE), read_plain_logits),
    "BEiT, one table for all layers": ("BeitModel", lambda: build_config("Beit", **SHARED), read_plain_pooled),
    "BEiT, absolute positions": (
        "BeitForImageClassification",
        lambda: build_config("Beit", use_absolute_position_embeddings=True, layer_scale_init_value=0.0),
        read_plain_logits,
    ),
    "BEiT, class token": (
        "BeitForImageClassification",
        lambda: build_config("Beit", use_mean_pooling=False, **RELATIVE),
        read_plain_logits,
    ),
    "data2vec": (
        "Data2VecVisionForImageClassification",
        lambda: build_config("Data2VecVision", **RELATIVE),
        read_plain_logits,
    ),
    "I-JEPA, classifier": ("IJepaForImageClassification", lambda: build_config("IJepa"), read_logits),
    "I-JEPA": ("IJepaModel", lambda: build_config("IJepa"), read_mean),
    "MAE": ("ViTMAEModel", lambda: build_config("ViTMAE", mask_ratio=0.0), read_class_token),
    "MSN": ("ViTMSNForImageClassification", lambda: build_config("ViTMSN"), read_logits),
}  # fmt: skip
ONE_SIZE = ("SigLIP, a size that patches do not divide",)
WRITTEN = {  # models that ours writes back, and the class that then loads them
    "DINOv2, giant": "Dinov2ForImageClassification",
    "DINOv2 with registers, giant": "Dinov2WithRegistersModel",
    "DINOv3": "DINOv3ViTModel",
    "DINOv3, gated": "DINOv3ViTModel",
    "SigLIP, image tower": "SiglipVisionModel",
    "SigLIP": "SiglipVisionModel",
    "SigLIP, a size that patches do not divide": "SiglipVisionModel",
    "SigLIP, classifier": "IJepaForImageClassification",
    "CLIP": "CLIPVisionModelWithProjection",
    "CLIP, erf GELU": "CLIPVisionModelWithProjection",
    "CLIP, projected image tower": "CLIPVisionModelWithProjection",
    "CLIP, image tower": "CLIPVisionModel",
    "MetaCLIP 2": "CLIPVisionModelWithProjection",
    "BEiT": "BeitForImageClassification",
    "BEiT, one table for all layers": "BeitModel",
    "BEiT, absolute positions": "BeitForImageClassification",
    "BEiT, class token": "BeitForImageClassification",
    "data2vec": "BeitForImageClassification",
    "I-JEPA, classifier": "IJepaForImageClassification",
    "I-JEPA": "IJepaModel",
    "MAE": "ViTModel",
    "MSN": "ViTForImageClassification",
}


def fill(model: Any) -> Any:
    """Give every parameter random values, larger than the library's own, which hide scales and biases."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
    return model.eval()


def build_model(kind: str) -> Any:
    name, build, _ = MODELS[kind]
    return fill(getattr(transformers, name)(build()))


def draw_images(kind: str, size: tuple[int, int] = (32, 48)) -> Tensor:
    size = (38, 38) if kind in ONE_SIZE else size
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def assert_equal_outputs(ours: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max()
    assert scale > 0.1
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() / scale.clamp(min=1) <= 1e-5


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_equal_transformers_own_also_for_images_that_are_not_square(kind: str, tmp_path: Path) -> None:
    model = build_model(kind)
    model.save_pretrained(tmp_path / "model")
    loaded, read = load(tmp_path / "model"), MODELS[kind][2]
    assert loaded.origin.format == "transformers"
    for size in ((32, 32), (32, 48), (24, 32)):
        images = draw_images(kind, size)
        with torch.no_grad():
            assert_equal_outputs(loaded.model(images), read(model, images))


@pytest.mark.parametrize("kind", MODELS)
def test_names_of_files_and_names_in_memory_load_alike(kind: str, tmp_path: Path) -> None:
    model = build_model(kind)
    model.save_pretrained(tmp_path / "model")
    before = load(tmp_path / "model")
    memory = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(memory, tmp_path / "model" / "model.safetensors")
    after = load(tmp_path / "model")
    assert before.model.config == after.model.config
    for name, tensor in before.model.state_dict().items():
        assert torch.equal(tensor, after.model.state_dict()[name]), name


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_we_write_transformers_loads_strictly_and_computes_alike(kind: str, tmp_path: Path) -> None:
    build_model(kind).save_pretrained(tmp_path / "model")
    ours = load(tmp_path / "model")
    save(ours, tmp_path / "written", "transformers")
    settings = json.loads((tmp_path / "written" / "config.json").read_text())
    assert settings["architectures"] == [WRITTEN[kind]]
    options: dict[str, Any] = {} if WRITTEN[kind] not in ("IJepaModel", "ViTModel") else {"add_pooling_layer": False}
    model, report = getattr(transformers, WRITTEN[kind]).from_pretrained(
        tmp_path / "written", output_loading_info=True, **options
    )
    assert {name: keys for name, keys in report.items() if keys} == {}
    images = draw_images(kind, (32, 32))
    with torch.no_grad():
        out, expected = model.eval()(images), ours.model(images)
    if hasattr(out, "logits"):
        result = out.logits
    elif hasattr(out, "image_embeds"):
        result = out.image_embeds
    elif WRITTEN[kind] == "IJepaModel":
        result = out.last_hidden_state.mean(dim=1)
    else:
        result = out.last_hidden_state[:, 0] if out.pooler_output is None else out.pooler_output
    assert_equal_outputs(expected, result)
    again = load(tmp_path / "written")
    with torch.no_grad():
        assert_equal_outputs(again.model(images), expected)
