"""The families of transformers: tiny random models of its own classes, computed by ours, and written back."""

import hashlib
import io
import itertools
import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
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
    "DINOv3, every bias": "DINOv3ViTModel",
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


def write_model(kind: str, path: Path, **settings: Any) -> Path:
    """A folder whose config.json also has these settings, in its image section where it has one."""
    build_model(kind).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config.get("vision_config", config).update(settings)
    (path / "config.json").write_text(json.dumps(config))
    return path


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace the tensors of a folder's file."""
    file = path / "model.safetensors"
    save_file(change({name: tensor.clone() for name, tensor in load_file(file).items()}), file)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("DINOv3, gated", {"hidden_act": "gelu"}, "gated MLP with 'gelu'; only 'silu'"),
        ("DINOv3", {"use_gated_mlp": True}, "differ on gated MLPs"),
        ("DINOv3", {"query_bias": False}, r"'blocks\.0\.attn\.q\.bias', which models with its config\.json lack"),
        ("DINOv3", {"key_bias": True}, r"not of 'blocks\.0\.attn\.k\.bias'"),
        ("DINOv3", {"num_register_tokens": 0}, r"registers, and its config\.json states none"),
        ("DINOv3", {"layer_norm_eps": 2}, "norm_eps is 2"),
        ("BEiT", {"use_absolute_position_embeddings": True}, "absolute positions and relative biases"),
        ("BEiT", {"use_relative_position_bias": False}, "no place for"),
        ("BEiT", {"image_size": [32, 40]}, "swaps the sides"),
        ("CLIP", {"hidden_act": "relu"}, "activation 'relu'"),
        ("SigLIP, image tower", {"image_size": 48}, "pos_embed"),
        ("SigLIP, image tower", {"image_size": "big"}, "image_size"),
        ("SigLIP 2, NaFlex", {"num_patches": 25}, "16 positions for 25 patches"),
        ("SigLIP 2, NaFlex", {"patch_size": 7}, "no patches of 7 x 7"),
    ],
)
def test_a_config_that_contradicts_its_tensors_is_refused(
    kind: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        load(write_model(kind, tmp_path / "model", **settings))


@pytest.mark.parametrize("kind", ["DINOv3, gated", "SigLIP 2, NaFlex", "CLIP", "BEiT"])
def test_a_hostile_config_or_tensor_is_refused_in_one_line_or_makes_no_difference(kind: str, tmp_path: Path) -> None:
    folder = write_model(kind, tmp_path / "model")
    path, file = folder / "config.json", folder / "model.safetensors"
    config, tensors = json.loads(path.read_text()), load_file(file)
    refused = 0
    for value, key in itertools.product(("x", -1, []), config.get("vision_config", config)):
        changed = {key: value}
        nested = {"vision_config": config["vision_config"] | changed} if "vision_config" in config else changed
        path.write_text(json.dumps(config | nested))
        refused += is_refused(folder)
    path.write_text(json.dumps(config))
    for shape, name in itertools.product(((), (3, 5)), sorted(tensors)[::4]):
        save_file(tensors | {name: torch.zeros(shape)}, file)
        refused += is_refused(folder)
    assert refused > 20


def is_refused(folder: Path) -> bool:
    try:
        load(folder)
    except ModelError as error:
        return "\n" not in str(error)
    return False


def test_clips_own_classifier_is_refused_by_name(tmp_path: Path) -> None:
    fill(transformers.CLIPForImageClassification(build_pair("CLIP"))).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"a CLIPForImageClassification, .* no norm follows"):
        load(tmp_path / "model")


def test_the_text_tower_is_left_out_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    siglip = load(write_model("SigLIP", tmp_path / "siglip")).origin.changes
    assert siglip == (
        "logit_bias: 1 tensors left out, no part of the image model",
        "logit_scale: 1 tensors left out, no part of the image model",
        "text_model: 22 tensors left out, no part of the image model",
    )
    classifier = load(write_model("SigLIP, classifier", tmp_path / "classifier")).origin.changes
    assert "head.probe: left out, the classifier does not read the pooler" in classifier
    beit = load(write_model("BEiT, one table for all layers", tmp_path / "beit"))
    assert beit.origin.changes == ("relative_position_bias_table: copied into each of 2 layers, which shared one",)
    assert len({block.attn.relative_position_bias_table.data_ptr() for block in beit.model.blocks}) == 2


def test_counting_buffers_of_old_files_are_skipped(tmp_path: Path) -> None:
    folder = write_model("CLIP", tmp_path / "model")
    before = load(folder).model.state_dict()
    counts = {f"{tower}.embeddings.position_ids": torch.arange(17)[None] for tower in ("vision_model", "text_model")}
    edit_tensors(folder, lambda tensors: tensors | counts)
    after = load(folder).model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    edit_tensors(folder, lambda tensors: tensors | {"vision_model.steps": torch.arange(3)})
    with pytest.raises(ModelError, match=r"holds torch\.int64"):
        load(folder)


def test_what_config_json_leaves_out_is_the_familys_default(tmp_path: Path) -> None:
    """Published files state little: google/siglip-base-patch16-224 no more than this."""
    model = fill(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(num_hidden_layers=1)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1 if parameter.ndim > 1 else 1)  # of full width, where larger ones hide in rounding
    model.save_pretrained(tmp_path / "model")
    settings = {"model_type": "siglip", "vision_config": {"model_type": "siglip_vision_model"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    loaded, images = load(tmp_path / "model"), torch.randn(1, 3, 224, 224)
    config = loaded.model.config
    assert (config.heads, config.gelu, config.norm_eps, config.image_size) == (12, "tanh", 1e-6, (224, 224))
    with torch.no_grad():
        assert_equal_outputs(loaded.model(images), model(images).pooler_output)


def test_a_beit_before_fine_tuning_is_read_with_its_norm_after_the_mean(tmp_path: Path) -> None:
    config = build_config("Beit", use_mask_token=True, vocab_size=11, **SHARED)
    model = fill(transformers.BeitForMaskedImageModeling(config))
    model.save_pretrained(tmp_path / "model")
    loaded, images = load(tmp_path / "model"), draw_images("BEiT")
    with torch.no_grad():
        patches = model.beit(images).last_hidden_state[:, 1:]
        assert_equal_outputs(loaded.model(images), model.layernorm(patches.mean(dim=1)))
    assert [sentence.partition(":")[0] for sentence in loaded.origin.changes] == [
        "lm_head", "embeddings.mask_token", "relative_position_bias_table", "layernorm",
    ]  # fmt: skip


def test_the_decoder_of_an_mae_is_left_out(tmp_path: Path) -> None:
    config = build_config("ViTMAE", mask_ratio=0.0, decoder_hidden_size=32, decoder_num_attention_heads=2,
                          decoder_num_hidden_layers=1, decoder_intermediate_size=64)  # fmt: skip
    model = fill(transformers.ViTMAEForPreTraining(config))
    model.save_pretrained(tmp_path / "model")
    loaded, images = load(tmp_path / "model"), draw_images("MAE", (32, 32))
    with torch.no_grad():
        assert_equal_outputs(loaded.model(images), model.vit(images).last_hidden_state[:, 0])


def test_a_model_in_shards_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    model = build_model("DINOv3")
    model.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 2
    loaded, images = load(tmp_path / "model"), draw_images("DINOv3")
    with torch.no_grad():
        assert_equal_outputs(loaded.model(images), model(images).pooler_output)
    joined = hashlib.sha256(b"".join(shard.read_bytes() for shard in shards)).hexdigest()
    assert loaded.origin.sha256 == joined
    tensors = load_file(shards[1])
    save_file(tensors | {next(iter(load_file(shards[0]))): torch.ones(1)}, shards[1])
    with pytest.raises(ModelError, match="is in another shard too"):
        load(tmp_path / "model")
    shards[1].unlink()
    with pytest.raises(ModelError, match="no weights: neither"):
        load(tmp_path / "model")


def test_tensors_with_and_without_a_prefix_are_refused(tmp_path: Path) -> None:
    folder = write_model("SigLIP, image tower", tmp_path / "model")
    edit_tensors(folder, lambda tensors: tensors | {"vision_model.head.probe": torch.zeros(1, 1, 48)})
    with pytest.raises(ModelError, match=r"two tensors for 'head\.probe'"):
        load(folder)


def test_a_bare_file_of_any_family_asks_for_its_folder(tmp_path: Path) -> None:
    for kind in ("DINOv3", "SigLIP", "BEiT"):
        folder = write_model(kind, tmp_path / kind)
        with pytest.raises(ModelError, match=r"without its config\.json"):
            load(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary": RotaryConfig(places="normalized"), "positions": "none"}, "DINOv3ViTModel has no variant with a"),
        ({"pool": "map", "class_token": False}, "SiglipVisionModel has no variant with a classifier"),
        (
            {"rotary": RotaryConfig(places="index"), "positions": "none", "classes": 0, "layer_scale": True},
            "rotary.places is 'index'",
        ),
        ({"norm_pre": True, "classes": 0}, r"CLIPVisionModel has no 'patch_embed\.proj\.bias'"),
        ({"normalize_features": True}, "normalize_features is True"),
        ({"gated_mlp": True, "pool": "class-mean", "layer_scale": True, "mlp": 100}, "no MLP of width 100"),
        ({"registers": 2, "pool": "class-mean", "layer_scale": True}, "prefix_positions is True beside registers"),
    ],
)
def test_what_no_class_of_transformers_computes_is_not_written(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        save(model_factory.build_trained(model_factory.build_vit(**change)), tmp_path / "model", "transformers")
    assert list(tmp_path.iterdir()) == []


def test_a_fine_tuned_beit_is_written_without_the_key_biases_that_no_softmax_sees(tmp_path: Path) -> None:
    ours = load(write_model("BEiT", tmp_path / "model"))
    with torch.no_grad():
        for block in ours.model.blocks:
            block.attn.qkv.bias[48:96].normal_()
    notes = save(ours, tmp_path / "written", "transformers")
    assert "attn.k.bias: left out, since no softmax depends on it" in notes
    model = transformers.BeitForImageClassification.from_pretrained(tmp_path / "written").eval()
    images = draw_images("BEiT", (32, 32))
    with torch.no_grad():
        assert_equal_outputs(ours.model(images), model(images).logits)


GOLDEN = {  # the first features of COCO's image 39769 at 224 x 224, as the converter of transformers states them
    "small": ("vits16", (0.463561, -0.415609, 0.408236, -0.126613, -0.286636)),
    "base": ("vitb16", (1.034643, -0.180609, -0.341018, -0.066376, -0.011383)),
    "large": ("vitl16", (0.484527, -0.582214, 0.480636, 0.592040, 0.945166)),
}


@pytest.mark.skipif(
    "VITRAIL_TEST_NETWORK" not in os.environ,
    reason="it downloads DINOv3 from the Hub, where its terms must have been accepted: set VITRAIL_TEST_NETWORK=1",
)
@pytest.mark.parametrize("size", GOLDEN)
def test_dinov3s_published_features_are_reached(size: str) -> None:
    name, golden = GOLDEN[size]
    trained = load(f"hf:facebook/dinov3-{name}-pretrain-lvd1689m")
    with urllib.request.urlopen("http://images.cocodataset.org/val2017/000000039769.jpg", timeout=60) as answer:
        picture = Image.open(io.BytesIO(answer.read())).convert("RGB")
    preprocess = trained.preprocess
    assert preprocess is not None
    pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)[None] / 255
    pixels = F.interpolate(pixels, (224, 224), mode="bilinear", antialias=True)  # in floating point, as theirs
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    with torch.no_grad():
        features = trained.model((pixels - mean) / std)[0, :5]
    torch.testing.assert_close(features, torch.tensor(golden), atol=1e-3, rtol=1e-3)


def test_every_family_is_tested_here_or_in_the_first_file() -> None:
    tested = {build().model_type for _, build, _ in MODELS.values()}
    elsewhere = {"vit", "deit", "dinov2_with_registers"}
    towers = {kind for kind in FAMILIES if kind == "metaclip_2_vision_model"}  # one class for both
    assert FAMILIES.keys() == tested | elsewhere | towers
