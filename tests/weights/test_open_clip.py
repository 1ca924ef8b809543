"""open_clip's folders: its own small models where it is installed, and CLIP of transformers under OpenAI's names."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests import model_factory
from tests.conftest import peer
from vitrail.errors import ModelError, UsageError
from vitrail.weights.load import load, save

VISION = {"image_size": 32, "patch_size": 8, "width": 48, "layers": 2, "head_width": 16, "mlp_ratio": 2.0}
TEXT = {"context_length": 8, "vocab_size": 99, "width": 32, "heads": 2, "layers": 1}
CLIPA = {"no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True, "norm_kwargs": {"eps": 1e-6},
         "act_kwargs": {"approximate": "tanh"}}  # fmt: skip
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "OpenAI": (True, {}),
    "LAION": (False, {}),
    "CLIPA": (False, CLIPA),
    "mean of normed patches": (False, {"pool_type": "avg"}),
    "layer scale": (False, {"ls_init_value": 0.1}),
    "sin-cos": (False, {"pos_embed_type": "sin_cos_2d"}),
    "not square": (True, {"image_size": [32, 48]}),
    "a remainder": (True, {"image_size": 38}),
}
PREPROCESS = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7], "interpolation": "bilinear", "resize_mode": "squash"}


def fill(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = ("ln_" in name or "norm" in name) and name.endswith("weight")
            parameter.normal_(float(is_scale), 0.3)
    return model.eval()


def write_folder(path: Path, tensors: dict[str, Tensor], architecture: dict[str, Any], **more: Any) -> Path:
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "open_clip_model.safetensors")
    (path / "open_clip_config.json").write_text(json.dumps({"model_cfg": architecture} | more))
    return path


def assert_equal_outputs(ours: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max()
    assert scale > 0.1
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() / scale.clamp(min=1) <= 1e-5


@pytest.mark.parametrize("kind", VARIANTS)
def test_features_equal_open_clips_own(kind: str, tmp_path: Path) -> None:
    open_clip: Any = peer("open_clip")
    quick, change = VARIANTS[kind]
    model = fill(open_clip.model.CLIP(24, VISION | change, TEXT, quick_gelu=quick))
    architecture = {"embed_dim": 24, "quick_gelu": quick, "vision_cfg": VISION | change, "text_cfg": TEXT}
    loaded = load(write_folder(tmp_path / "clip", model.state_dict(), architecture))
    images = torch.randn(2, 3, *loaded.model.config.image_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_equal_outputs(loaded.model(images), model.encode_image(images))
    assert loaded.origin.format == "open_clip"
    assert "transformer: 12 tensors left out, no part of the image model" in loaded.origin.changes


@pytest.mark.parametrize(
    ("architecture", "projection", "size"),
    [
        ("vit_base_patch16_siglip_224", "none", 224),
        ("vit_base_patch14_dinov2", "linear", 230),
        ("vit_tiny_patch16_224", "", 224),
        ("vit_tiny_patch16_224", "linear", 64),
    ],
)
def test_features_of_timms_trunks_equal_open_clips_own(
    architecture: str, projection: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Networks of one block, at their full width."""
    open_clip, timm = peer("open_clip"), peer("timm")
    pool = "map" if "siglip" in architecture else "token"
    vision = {"timm_model_name": architecture, "timm_pool": pool, "timm_proj": projection, "image_size": size}
    one_block = functools.partial(timm.create_model, depth=1, img_size=size)
    monkeypatch.setattr(open_clip.timm_model.timm, "create_model", one_block)
    model: Any = open_clip.timm_model.TimmModel(architecture, 24, image_size=size, pool=pool, proj=projection)
    fill(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1 if parameter.ndim > 1 else 1)
    tensors = {f"visual.{name}": tensor for name, tensor in model.state_dict().items()}
    loaded = load(write_folder(tmp_path / "clip", tensors, {"embed_dim": 24, "vision_cfg": vision}))
    images = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_equal_outputs(loaded.model(images), model(images))


OPENAI_NAMES = {
    r"^vision_model\.embeddings\.class_embedding$": "visual.class_embedding",
    r"^vision_model\.embeddings\.patch_embedding\.": "visual.conv1.",
    r"^vision_model\.embeddings\.position_embedding\.weight$": "visual.positional_embedding",
    r"^vision_model\.pre_layrnorm\.": "visual.ln_pre.",
    r"^vision_model\.post_layernorm\.": "visual.ln_post.",
    r"^vision_model\.encoder\.layers\.(\d+)\.layer_norm(\d)\.": r"visual.transformer.resblocks.\1.ln_\2.",
    r"^vision_model\.encoder\.layers\.(\d+)\.self_attn\.out_proj\.": r"visual.transformer.resblocks.\1.attn.out_proj.",
    r"^vision_model\.encoder\.layers\.(\d+)\.mlp\.fc1\.": r"visual.transformer.resblocks.\1.mlp.c_fc.",
    r"^vision_model\.encoder\.layers\.(\d+)\.mlp\.fc2\.": r"visual.transformer.resblocks.\1.mlp.c_proj.",
}


def build_openai_tensors() -> tuple[Any, dict[str, Tensor]]:
    """A CLIP model of transformers, and its image tower under OpenAI's names."""
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 96,
              "image_size": 32, "patch_size": 8}  # fmt: skip
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = fill(transformers.CLIPModel(transformers.CLIPConfig(vision_config=vision, text_config=text)))
    theirs, renamed = model.state_dict(), {}
    for name, tensor in theirs.items():
        for pattern, replacement in OPENAI_NAMES.items():
            if re.match(pattern, name):
                renamed[re.sub(pattern, replacement, name)] = tensor
    for layer in range(2):
        for leaf in ("weight", "bias"):
            start = f"vision_model.encoder.layers.{layer}.self_attn"
            joined = torch.cat([theirs[f"{start}.{part}_proj.{leaf}"] for part in "qkv"])
            renamed[f"visual.transformer.resblocks.{layer}.attn.in_proj_{leaf}"] = joined
    renamed |= {"visual.proj": theirs["visual_projection.weight"].mT, "logit_scale": theirs["logit_scale"]}
    return model, renamed


def test_openais_names_compute_what_transformers_does(tmp_path: Path) -> None:
    model, tensors = build_openai_tensors()
    architecture = {"quick_gelu": True, "vision_cfg": {"image_size": 32}}
    loaded = load(write_folder(tmp_path / "clip", tensors, architecture, preprocess_cfg=PREPROCESS))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.visual_projection(model.vision_model(images).pooler_output)
        assert_equal_outputs(loaded.model(images), expected)
    preprocess = loaded.preprocess
    assert preprocess is not None
    assert (preprocess.resize, preprocess.interpolation, preprocess.mean) == ((32, 32), "bilinear", (0.1, 0.2, 0.3))
    save(loaded, tmp_path / "written", "transformers")
    again = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "written").eval()
    with torch.no_grad():
        assert_equal_outputs(again(images).image_embeds, expected)


def test_a_pickle_of_parallel_training_is_read_and_defaults_are_open_clips(tmp_path: Path) -> None:
    _, tensors = build_openai_tensors()
    folder = write_folder(tmp_path / "clip", tensors, {"vision_cfg": {"image_size": 32}})
    (folder / "open_clip_model.safetensors").unlink()
    content = {"epoch": 3, "state_dict": {f"module.{name}": tensor for name, tensor in tensors.items()}}
    torch.save(content, folder / "open_clip_pytorch_model.bin")
    loaded = load(folder)
    assert loaded.model.config.gelu == "erf"
    assert loaded.model.config.norm_eps == 1e-5
    assert loaded.preprocess is not None
    assert (loaded.preprocess.resize, loaded.preprocess.interpolation) == ((32,), "bicubic")
    assert loaded.preprocess.mean[0] == pytest.approx(0.48145466)


def test_transformers_config_wins_beside_open_clips(tmp_path: Path) -> None:
    """Repositories of LAION hold both."""
    model, tensors = build_openai_tensors()
    folder = write_folder(tmp_path / "clip", tensors, {"quick_gelu": True, "vision_cfg": {"image_size": 32}})
    model.save_pretrained(folder)
    assert load(folder).origin.format == "transformers"
    (folder / "model.safetensors").unlink()
    assert load(folder).origin.format == "open_clip"


def test_a_bare_state_dict_asks_for_the_folder_that_states_its_gelu(tmp_path: Path) -> None:
    _, tensors = build_openai_tensors()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "ViT-B-32.safetensors")
    with pytest.raises(ModelError, match=r"does not state its GELU.*open_clip_config\.json"):
        load(tmp_path / "ViT-B-32.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": [3, 4, 6, 3]}, "a ResNet of OpenAI's"),
        ({"attentional_pool": True}, "attentional_pool=True"),
        ({"qk_norm": True}, "qk_norm=True"),
        ({"pool_type": "none"}, "pools its tokens by 'none'"),
        ({"head_width": 0}, "heads of width 0"),
        ({"head_width": 60}, "heads of width 60"),
        ({"act_kwargs": {"alpha": 1}}, "GELU with"),
        ({"no_ln_pre": True}, "no place for: 'norm_pre"),
        ({"image_size": 48}, "pos_embed"),
        ({"image_size": "32"}, "image size is '32'"),
        ({"timm_model_name": "vit_base_patch16_224"}, "no 4-dimensional tensor"),
    ],
)
def test_other_towers_are_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, tensors = build_openai_tensors()
    folder = write_folder(tmp_path / "clip", tensors, {"vision_cfg": {"image_size": 32} | change})
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_coca_is_refused_by_its_pooling_though_its_tensors_have_no_place_either(tmp_path: Path) -> None:
    _, tensors = build_openai_tensors()
    pooling = {"visual.attn_pool.query": torch.randn(4, 8), "visual.attn_pool.attn.in_proj_bias": torch.randn(24)}
    folder = write_folder(
        tmp_path / "coca", tensors | pooling, {"vision_cfg": {"image_size": 32, "attentional_pool": True}}
    )
    with pytest.raises(ModelError, match="attentional_pool=True"):
        load(folder)


def test_it_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a CLIP or SigLIP image tower with --to transformers"):
        save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model", "open_clip")
    with pytest.raises(UsageError, match=r"or say --to google$"):
        save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.npz", "open_clip")
    assert list(tmp_path.iterdir()) == []
