"""transformers as oracle: its models computed by ours, ours read and answered by its pipeline."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from tests import model_factory
from tests.model_factory import VARIANTS
from vitrail import Classifier
from vitrail.config import PreprocessConfig
from vitrail.data.decode import decode
from vitrail.data.transforms import make_eval_input, normalize
from vitrail.errors import ModelError, UsageError
from vitrail.weights.load import load, save

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ViT": (ViTForImageClassification, ViTConfig, {}),
    "ViT with epsilon 1e-6": (ViTForImageClassification, ViTConfig, {"layer_norm_eps": 1e-6}),
    "ViT with tanh GELU": (ViTForImageClassification, ViTConfig, {"hidden_act": "gelu_new"}),
    "ViT without qkv bias": (ViTForImageClassification, ViTConfig, {"qkv_bias": False}),
    "ViT of one channel": (ViTForImageClassification, ViTConfig, {"num_channels": 1}),
    "DeiT": (DeiTForImageClassification, DeiTConfig, {}),
    "DeiT with teacher": (DeiTForImageClassificationWithTeacher, DeiTConfig, {}),
    "DINOv2": (Dinov2ForImageClassification, Dinov2Config, {"mlp_ratio": 2}),
    "DINOv2 with registers": (Dinov2WithRegistersForImageClassification, Dinov2WithRegistersConfig, {"mlp_ratio": 2}),
}


def build_transformers_model(kind: str) -> Any:
    """One of transformers' models with random weights in every parameter, larger than its own initialisation."""
    model_class, config_class, change = MODELS[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**SMALL | change)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    return model


def make_images(model: Any) -> Tensor:
    channels = model.config.num_channels
    return torch.randn(3, channels, 32, 32, generator=torch.Generator().manual_seed(1))


def assert_equal_logits(ours: Tensor, expected: Tensor) -> None:
    assert ours.abs().max() > 0.1
    assert (ours - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_transformers_own(kind: str, tmp_path: Path) -> None:
    model = build_transformers_model(kind)
    model.save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model")
    images = make_images(model)
    with torch.no_grad():
        assert_equal_logits(loaded.model(images), model(images).logits)
    assert loaded.origin.format == "transformers"
    assert loaded.labels is None  # LABEL_0 is no name


@pytest.mark.parametrize("kind", MODELS)
def test_names_of_version_4_and_of_version_5_in_memory_load_alike(kind: str, tmp_path: Path) -> None:
    model = build_transformers_model(kind)
    model.save_pretrained(tmp_path / "model")
    files, memory = load_file(tmp_path / "model" / "model.safetensors"), model.state_dict()
    assert any("attention.attention.query" in name for name in files)  # version 4's names
    if not kind.startswith("DINO"):  # renamed in memory by later versions 5 only
        assert any("attention.q_proj" in name for name in memory)  # version 5's
    before = load(tmp_path / "model")
    save_file({name: tensor.contiguous() for name, tensor in memory.items()}, tmp_path / "model" / "model.safetensors")
    after = load(tmp_path / "model")
    assert before.model.config == after.model.config
    for name, tensor in before.model.state_dict().items():
        assert torch.equal(tensor, after.model.state_dict()[name]), name


@pytest.mark.parametrize("kind", ["ViT", "DeiT with teacher", "DINOv2", "DINOv2 with registers"])
def test_another_resolution_equals_transformers_own(kind: str, tmp_path: Path) -> None:
    """Positions are resampled by the operator of each family."""
    model = build_transformers_model(kind)
    model.save_pretrained(tmp_path / "model")
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    options = {} if kind.startswith("DINO") else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        assert_equal_logits(load(tmp_path / "model").model(images), model(images, **options).logits)


def test_a_model_without_a_head_gives_the_poolers_output(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ViTModel(ViTConfig(**SMALL)).eval()
    model.save_pretrained(tmp_path / "model")
    loaded, images = load(tmp_path / "model"), make_images(model)
    with torch.no_grad():
        out = model(images)
        torch.testing.assert_close(loaded.model(images), out.pooler_output, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(loaded.model.encode(images), out.last_hidden_state, atol=1e-5, rtol=1e-5)


def test_a_model_without_head_and_pooler_gives_its_class_token(tmp_path: Path) -> None:
    """As facebook/dino-vits16."""
    torch.manual_seed(0)
    model = ViTModel(ViTConfig(**SMALL), add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path / "model")
    loaded, images = load(tmp_path / "model"), make_images(model)
    with torch.no_grad():
        expected = model(images).last_hidden_state[:, 0]
        torch.testing.assert_close(loaded.model(images), expected, atol=1e-5, rtol=1e-5)


def test_dinov2_without_a_head_gives_its_class_token_and_says_what_it_left_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Dinov2Model(Dinov2Config(**SMALL | {"mlp_ratio": 2})).eval()
    model.save_pretrained(tmp_path / "model")
    loaded, images = load(tmp_path / "model"), make_images(model)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), model(images).pooler_output, atol=1e-5, rtol=1e-5)
    assert "embeddings.mask_token: left out" in loaded.origin.changes[0]


def test_a_pooler_beside_a_classifier_is_left_out_and_said(tmp_path: Path) -> None:
    """transformers' classifier does not read it."""
    model = build_transformers_model("ViT")
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    pooler = {"vit.pooler.dense.weight": torch.ones(48, 48), "vit.pooler.dense.bias": torch.ones(48)}
    save_file(load_file(path) | pooler, path, metadata={"format": "pt"})
    loaded, images = load(tmp_path / "model"), make_images(model)
    with torch.no_grad():
        assert_equal_logits(loaded.model(images), model(images).logits)
    assert "pooler.dense.weight: left out, the classifier does not read the pooler" in loaded.origin.changes


def test_a_crop_is_taken_where_transformers_takes_it(tmp_path: Path) -> None:
    """Short side 40, crop 33: the corner falls on 3.5, which rounds to 4 here and to 3 there."""
    preprocess = PreprocessConfig(size=(33, 33), resize=(40,), interpolation="bilinear", crop_rounding="down")
    ours = model_factory.build_trained(model_factory.build_vit(patch=11, image_size=(33, 33)), preprocess=preprocess)
    save(ours, tmp_path / "model", "transformers")
    assert load(tmp_path / "model").preprocess == preprocess
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 47, 3), dtype=np.uint8))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model")
    theirs_pixels = processor(picture, return_tensors="pt")["pixel_values"][0]
    pixels = normalize(make_eval_input(decode(picture), preprocess), preprocess)
    torch.testing.assert_close(pixels, theirs_pixels, atol=1e-5, rtol=1e-5)


HELD = ("plain", "erf", "no-bias", "headless", "hidden-headless", "no-positions", "2d", "sincos", "wide", "grey",
        "epsilon", "distilled", "distillation-token", "mean-norm", "norm-mean")  # fmt: skip


@pytest.mark.parametrize("kind", HELD)
def test_what_we_write_transformers_computes_alike(kind: str, tmp_path: Path) -> None:
    ours = model_factory.build_trained(model_factory.build_vit(**VARIANTS[kind]))
    save(ours, tmp_path / "model", "transformers")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path / "model").eval()
    images = model_factory.draw_images(ours.model.config)
    with torch.no_grad():
        out, expected = model(images), ours.model(images)
    result = out.logits if hasattr(out, "logits") else out.pooler_output if kind == "hidden-headless" else out[0][:, 0]
    assert (result - expected).abs().max() <= 1e-5
    again = load(tmp_path / "model")
    with torch.no_grad():
        torch.testing.assert_close(again.model(images), expected, atol=1e-6, rtol=1e-6)
    assert again.labels == ours.labels
    assert again.preprocess == ours.preprocess


@pytest.mark.parametrize("kind", sorted(VARIANTS.keys() - set(HELD)))
def test_what_transformers_cannot_hold_is_refused_and_nothing_is_written(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the transformers format cannot hold this model|no place for"):
        save(model_factory.build_trained(model_factory.build_vit(**VARIANTS[kind])), tmp_path / "model", "transformers")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resize", [(32, 32), (40,), (40, 44)])
def test_transformers_pipeline_reads_what_we_write_and_answers_alike(resize: tuple[int, ...], tmp_path: Path) -> None:
    """A photograph-like image, larger than the crop, through their whole pipeline and ours."""
    ours = model_factory.build_trained(model_factory.build_vit(gelu="erf"))
    assert ours.preprocess is not None
    preprocess = type(ours.preprocess)(
        size=(32, 32), resize=resize, interpolation="bilinear", mean=(0.4,) * 3, std=(0.3,) * 3
    )
    ours = type(ours)(model=ours.model, preprocess=preprocess, labels=ours.labels, origin=ours.origin)
    save(ours, tmp_path / "model", "transformers")
    coarse = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((120, 120), Image.Resampling.BICUBIC)
    pipeline = transformers.pipeline("image-classification", model=str(tmp_path / "model"), device="cpu")
    expected = {answer["label"]: answer["score"] for answer in pipeline(picture, top_k=7)}
    [answer] = Classifier(ours, device="cpu")([picture], top=7)
    assert [label for label, _ in answer] == list(expected)
    for label, probability in answer:
        assert probability == pytest.approx(expected[label], abs=5e-3)  # their resize may round a pixel by one


def test_an_old_folder_with_a_bin_file_and_an_integer_size_loads(tmp_path: Path) -> None:
    model = build_transformers_model("ViT")
    model.save_pretrained(tmp_path / "model")
    torch.save(load_file(tmp_path / "model" / "model.safetensors"), tmp_path / "model" / "pytorch_model.bin")
    (tmp_path / "model" / "model.safetensors").unlink()
    old = {"size": 32, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": True}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(old))
    (tmp_path / "model" / "README.md").write_text("---\ntags: [vision]\nlicense: apache-2.0\n---\n# A model\n")
    loaded = load(tmp_path / "model")
    assert loaded.preprocess is not None
    assert loaded.preprocess.resize == loaded.preprocess.size == (32, 32)
    assert loaded.preprocess.interpolation == "bilinear"
    assert loaded.origin.license == "apache-2.0"
    for kind, expected in (("DeiTFeatureExtractor", "bicubic"), ("ViTFeatureExtractor", "bilinear")):
        silent = {key: value for key, value in old.items() if key != "resample"} | {"feature_extractor_type": kind}
        (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(silent))
        preprocess = load(tmp_path / "model").preprocess
        assert preprocess is not None
        assert preprocess.interpolation == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "swin"}, "model_type 'swin'"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"num_attention_heads": 5}, "48 is not a multiple of heads 5"),
        ({"num_attention_heads": "4"}, "heads is '4'"),
        ({"image_size": 40}, "needs"),
        ({"use_swiglu_ffn": True}, "SwiGLU"),
    ],
)
def test_a_config_that_does_not_fit_its_weights_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    build_transformers_model("ViT").save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "model")


def test_a_bare_file_asks_for_its_folder_and_a_file_name_for_a_folder(tmp_path: Path) -> None:
    build_transformers_model("ViT").save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"without its config\.json; give the folder"):
        load(tmp_path / "model" / "model.safetensors")
    with pytest.raises(UsageError, match="a transformers model is a folder"):
        save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.safetensors", "transformers")
