"""Adapters that we write, loaded by PEFT, and read back by us."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests import model_factory
from tests.conftest import peer
from tests.weights.test_peft_adapters import (
    FAMILY_KINDS,
    KINDS,
    V4_NAMES,
    compute_logits,
    rename_as_in_v4,
    save_transformers,
)
from tests.weights.test_timm import build_timm_model, write_timm_folder
from tests.weights.test_transformers import build_transformers_model, make_images
from tests.weights.test_transformers_families import MODELS, build_model, draw_images
from vitrail.config import LoRAConfig
from vitrail.errors import ModelError
from vitrail.model import lora
from vitrail.model.vit import ViT
from vitrail.weights.load import load, save
from vitrail.weights.peft_adapters import apply_adapter, read_adapter
from vitrail.weights.peft_export import AdapterFormat, build_adapter, choose_format, write_adapter
from vitrail.weights.trained import Origin, Trained

pytestmark = pytest.mark.filterwarnings("ignore:.*(invalid shape|fan_in_fan_out)")
CONFIGS = {
    "qkv": LoRAConfig(rank=4),
    "attention, alpha": LoRAConfig(rank=3, alpha=7.5, layers="attention"),
    "mlp, rank-stabilized": LoRAConfig(rank=4, layers="mlp", rank_stabilized=True),
    "all, DoRA": LoRAConfig(rank=2, layers="all", dora=True),
}


def train(trained: Trained, config: LoRAConfig) -> tuple[ViT, dict[str, Tensor]]:
    """A copy of the model as a run leaves it, everything that it trains moved at random; and those tensors."""
    model, generator = copy.deepcopy(trained.model), torch.Generator().manual_seed(3)
    lora.add_lora(model, config, generator)
    assert isinstance(model, ViT)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model, {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def write_trained(trained: Trained, config: LoRAConfig, folder: Path, format: AdapterFormat) -> ViT:  # noqa: A002
    """Write the adapter of such a run; the model with the additions."""
    model, tensors = train(trained, config)
    write_adapter(build_adapter(tensors, config, trained, trained.origin), folder, format)
    return model


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["ViT", "DeiT", "DeiT with teacher", "DINOv2", "DINOv2 with registers"])
def test_peft_loads_what_we_write_on_transformers_own_model(name: str, config: str, tmp_path: Path) -> None:
    peft, theirs = peer("peft"), build_transformers_model(name)
    theirs.save_pretrained(tmp_path / "base")
    trained = load(tmp_path / "base")
    assert choose_format(trained) == "peft"
    ours = write_trained(trained, CONFIGS[config], tmp_path / "adapter", "peft")
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    images = make_images(theirs)
    with torch.no_grad():
        expected = ours(images)
        assert (compute_logits(loaded, images) - expected).abs().max() <= 2e-5
        assert (compute_logits(loaded.merge_and_unload(), images) - expected).abs().max() <= 2e-5
        assert (trained.model(images) - expected).abs().max() > 0.1


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["plain", "registers, avg-pool"])
def test_peft_loads_what_we_write_on_timms_own_model(kind: str, config: str, tmp_path: Path) -> None:
    peft, theirs = peer("peft"), build_timm_model(kind)
    trained = load(write_timm_folder(theirs, kind, tmp_path / "base"))
    assert choose_format(trained) == "peft-timm"
    ours = write_trained(trained, CONFIGS[config], tmp_path / "adapter", "peft-timm")
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    images = model_factory.draw_images(ours.config)
    with torch.no_grad():
        assert (loaded(images) - ours(images)).abs().max() <= 2e-5


@pytest.mark.parametrize("config", ["all, DoRA", "attention, alpha"])
@pytest.mark.parametrize(
    "family",
    [
        "DINOv2, giant", "DINOv3", "DINOv3, gated", "CLIP, image tower",
        "SigLIP, image tower", "BEiT", "I-JEPA, classifier", "MSN",
    ],
)  # fmt: skip
def test_peft_loads_what_we_write_on_each_family(family: str, config: str, tmp_path: Path) -> None:
    peft, theirs, read = peer("peft"), build_model(family), MODELS[family][2]
    theirs.save_pretrained(tmp_path / "base")
    trained, images = load(tmp_path / "base"), draw_images(family, (32, 32))
    ours = write_trained(trained, CONFIGS[config], tmp_path / "adapter", "peft")
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected, plain = ours(images), trained.model(images)
        scale = expected.abs().max().clamp(min=1)
        assert (read(loaded.get_base_model(), images) - expected).abs().max() <= 5e-5 * scale
        assert (plain - expected).abs().max() > 0.1


NOT_HELD = {  # name and format -> what is lost on the way
    ("DINOv3", "peft-timm"): r"nothing for 'blocks\.0\.attn\.k\.bias'",
    ("BEiT, biases", "peft-timm"): r"nothing for 'blocks\.0\.attn\.k\.bias'",
    ("BEiT, tables", "peft"): r"no place for 'blocks\.0\.attn",
    ("BEiT, tables", "peft-v4"): r"no place for 'blocks\.0\.attn",
    ("CLIP, projected", "peft-timm"): r"nothing for 'blocks\.0\.attn\.k\.bias'",
    ("SigLIP, attention pooling", "peft"): "no place for 'attn_pool",
    ("SigLIP, attention pooling", "peft-v4"): "no place for 'attn_pool",
    ("DINOv3, one half of the gated MLP", "peft-timm"): r"adds \(4, 48\) and \(96, 4\) to 'blocks\.0\.mlp\.fc1'",
}


@pytest.mark.parametrize("format", ["peft", "peft-v4", "peft-timm"])
@pytest.mark.parametrize("name", sorted(FAMILY_KINDS))
def test_adapters_of_families_are_the_same_under_other_names(name: str, format: AdapterFormat, tmp_path: Path) -> None:  # noqa: A002
    family, kind = FAMILY_KINDS[name]
    _, base, adapter = save_transformers(build_model(family), kind, tmp_path)
    if (name, format) in NOT_HELD:
        with pytest.raises(ModelError, match=NOT_HELD[name, format]):
            _write_and_load(base, adapter, tmp_path / "other", format)
        return
    wanted, found = load(base, adapter), _write_and_load(base, adapter, tmp_path / "other", format)
    tensors = found.model.state_dict()
    for own, tensor in wanted.model.state_dict().items():
        torch.testing.assert_close(tensors[own], tensor, atol=1e-5 if format == "peft-timm" else 0, rtol=0)
    if format == "peft":
        theirs, ours = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "other"))
        assert theirs.keys() == ours.keys()


def _write_and_load(base: Path, adapter: Path, folder: Path, format: AdapterFormat) -> Trained:  # noqa: A002
    write_adapter(read_adapter(adapter), folder, format)
    return load(base, folder)


def test_a_trained_bias_of_clips_projection_is_refused(tmp_path: Path) -> None:
    build_model("CLIP, projected image tower").save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match="a bias that visual_projection lacks"):
        write_trained(load(tmp_path / "base"), CONFIGS["qkv"], tmp_path / "adapter", "peft")


def test_gated_mlps_that_transformers_lacks_are_refused(tmp_path: Path) -> None:
    for kind, family in (("EVA-02, split", "eva02"), ("EVA-02, packed", "vit")):
        trained = load(write_timm_folder(build_timm_model(kind), kind, tmp_path / family))
        with pytest.raises(ModelError, match=f"no model of the family '{family}' with such layers"):
            write_trained(trained, CONFIGS["qkv"], tmp_path / "adapter", "peft")


@pytest.mark.parametrize("config", ["all, DoRA", "attention, alpha"])
@pytest.mark.parametrize(
    "kind",
    [
        "DINOv3", "DINOv3 without biases", "DINOv3, split SwiGLU", "EVA-02, packed", "EVA-02, split", "BEiT", "CLIP",
        "packed SwiGLU", "perception encoder", "axial RoPE",
    ],
)  # fmt: skip
def test_peft_merges_what_we_write_on_timms_families(kind: str, config: str, tmp_path: Path) -> None:
    """Merged, since timm passes by the adapter's layer where query and value biases are apart from it."""
    peft, theirs = peer("peft"), build_timm_model(kind)
    trained = load(write_timm_folder(theirs, kind, tmp_path / "base"))
    assert choose_format(trained) == "peft-timm"
    ours = write_trained(trained, CONFIGS[config], tmp_path / "adapter", "peft-timm")
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").merge_and_unload().eval()
    images = model_factory.draw_images(ours.config)
    with torch.no_grad():
        expected = ours(images)
        assert (loaded(images) - expected).abs().max() <= 5e-5 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("format", ["peft", "peft-v4", "peft-timm"])
def test_our_adapter_merges_into_its_base_bit_for_bit(config: str, format: AdapterFormat, tmp_path: Path) -> None:  # noqa: A002
    """With everything that PEFT's files have no place for: labels, preprocessing and resolution."""
    base = model_factory.build_trained(model_factory.build_vit(classes=3))
    save(base, tmp_path / "base.safetensors")
    start = model_factory.build_trained(model_factory.build_vit(seed=5, classes=7))
    start.model.load_state_dict(base.model.state_dict() | _get_head(start.model))
    model, tensors = train(start, CONFIGS[config])
    write_adapter(build_adapter(tensors, CONFIGS[config], start, start.origin), tmp_path / "adapter", format)
    merged = load(tmp_path / "base.safetensors", tmp_path / "adapter")
    wanted = lora.merge_tensors(model, dict(model.state_dict()))
    found = merged.model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (merged.labels, merged.preprocess) == (start.labels, start.preprocess)
    images = model_factory.draw_images(model.config)
    with torch.no_grad():
        torch.testing.assert_close(merged.model(images), model(images), atol=5e-6, rtol=0)


def _get_head(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name.startswith("head.")}


def test_an_adapter_brings_its_resolution(tmp_path: Path) -> None:
    base = model_factory.build_trained(model_factory.build_vit())
    larger = model_factory.build_trained(model_factory.build_vit(image_size=(48, 48)))
    _, tensors = train(larger, CONFIGS["qkv"])
    write_adapter(build_adapter(tensors, CONFIGS["qkv"], larger, base.origin), tmp_path / "adapter")
    merged = apply_adapter(base, read_adapter(tmp_path / "adapter"), "adapter")
    assert merged.model.config.image_size == (48, 48)
    assert merged.preprocess == larger.preprocess


@pytest.mark.parametrize("format", ["peft", "peft-v4", "peft-timm"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "bias" not in kind or "head" in kind or "addition" in kind])
def test_an_adapter_of_peft_is_the_same_under_other_names(kind: str, format: AdapterFormat, tmp_path: Path) -> None:  # noqa: A002
    _, base, adapter = save_transformers(build_transformers_model("ViT"), KINDS[kind], tmp_path)
    write_adapter(read_adapter(adapter), tmp_path / "other", format)
    wanted, found = (load(base, folder).model.state_dict() for folder in (adapter, tmp_path / "other"))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6 if format == "peft-timm" else 0, rtol=0)


def test_peft_loads_queries_and_values_of_transformers_in_timm(tmp_path: Path) -> None:
    """One fused layer with a block for each, of different ranks and scales."""
    peft, theirs = peer("peft"), build_timm_model("plain")
    base = write_timm_folder(theirs, "plain", tmp_path / "base")
    save(load(base), tmp_path / "hf", "transformers")
    transformers = peer("transformers")
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path / "hf")
    kind: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}, "use_rslora": True}
    adapted, _, adapter = save_transformers(model.eval(), kind, tmp_path)
    write_adapter(read_adapter(adapter), tmp_path / "timm", "peft-timm")
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "timm").eval()
    images = make_images(model)
    with torch.no_grad():
        assert (loaded(images) - adapted(images).logits).abs().max() <= 2e-5


@pytest.mark.parametrize("name", V4_NAMES)
def test_old_names_are_those_of_transformers_before_5_9(name: str, tmp_path: Path) -> None:
    model = build_transformers_model(name)
    _, _, adapter = save_transformers(model, KINDS["all layers, alpha"], tmp_path)
    write_adapter(read_adapter(adapter), tmp_path / "old", "peft-v4")
    rename_as_in_v4(adapter, name)
    wanted, found = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "old"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("kind", [{"use_dora": True}, {"lora_bias": True}, {"bias": "lora_only"}])
def test_what_timms_fused_layer_cannot_hold_is_refused(kind: dict[str, Any], tmp_path: Path) -> None:
    model = build_transformers_model("ViT")
    _, _, adapter = save_transformers(model, KINDS["queries and values"] | kind, tmp_path)
    with pytest.raises(ModelError, match=r"it has nothing for 'blocks\.0\.attn\.k"):
        write_adapter(read_adapter(adapter), tmp_path / "timm", "peft-timm")
    assert not (tmp_path / "timm").exists()


def test_the_base_is_named_where_it_is_a_model_of_the_hub() -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    _, tensors = train(trained, CONFIGS["qkv"])
    names = {
        "hf:org/name@0123abc": "org/name",
        "in-memory model, from hf:org/name@0123abc": "org/name",
        "hf:org/name@0123abc, fine-tuned on photos, step 3 of 3": None,
        "model.safetensors": None,
    }
    for name, base in names.items():
        origin = Origin(format="transformers", name=name)
        assert build_adapter(tensors, CONFIGS["qkv"], trained, origin).base == base


def test_models_that_transformers_lacks_have_timms_names() -> None:
    pooled = model_factory.build_trained(model_factory.build_vit(pool="norm-mean"))
    plain = model_factory.build_trained(model_factory.build_vit())
    native = dataclasses.replace(plain, origin=Origin(format="vitrail", name="x"))
    assert [choose_format(each) for each in (pooled, plain, native)] == ["peft-timm", "peft", "peft"]


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("BEiT", "peft"), ("I-JEPA", "peft"), ("DINOv2, giant", "peft"), ("DINOv3", "peft-timm"), ("CLIP", "peft-timm"),
        ("SigLIP", "peft-timm"),
    ],
)  # fmt: skip
def test_families_without_a_classifier_in_transformers_have_timms_names(
    family: str,
    names: AdapterFormat,
    tmp_path: Path,
) -> None:
    build_model(family).save_pretrained(tmp_path / "base")
    assert choose_format(load(tmp_path / "base")) == names
