"""Files of the authors' own: what is written is what was read, and what no authors' code computes is refused."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests import model_factory
from tests.model_factory import VARIANTS
from tests.weights.test_original_families import FILES, build_timm_model
from vitrail.errors import ModelError
from vitrail.model.vit import ViT
from vitrail.weights.load import load, save

WRITTEN = ("DINOv2", "DINOv2 with registers", "DINOv2, giant", "DINOv3", "DINOv3, split SwiGLU", "DeiT III", "EVA-02",
           "EVA-02, packed", "EVA-02 of CLIP", "perception encoder")  # fmt: skip


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_was_read_is_written_under_the_same_names(kind: str, tmp_path: Path) -> None:
    """Only buffers and what pre-training alone reads differ."""
    architecture, change, rename = FILES[kind]
    model = build_timm_model(architecture, **change)
    if kind == "perception encoder":
        torch.nn.init.zeros_(model.head.bias)
    theirs = rename(model.state_dict())
    torch.save(theirs, tmp_path / "model.pth")
    loaded = load(tmp_path / "model.pth")
    notes = save(loaded, tmp_path / "again.pth", "original")
    assert "architecture: written for" in notes[0]
    assert not any("resample" in note for note in notes)
    again = load(tmp_path / "again.pth")
    images = model_factory.draw_images(loaded.model.config, size=(32, 32))
    with torch.no_grad():
        assert torch.equal(again.model(images), loaded.model(images))
    assert again.model.config == loaded.model.config
    written = torch.load(tmp_path / "again.pth", weights_only=True)
    inner = next((theirs[key] for key in ("model", "module") if key in theirs), theirs)
    left_out = ("local_cls_norm", "rope.", "text.", "logit_scale", "transformer.resblocks.0.ln_1.bias")
    expected = {name for name in inner if not name.startswith(left_out) and ".rope." not in name}
    assert written.get("model", written).keys() == {name for name in expected if "visual.rope" not in name}


@pytest.mark.parametrize("kind", ["DINOv2 with registers", "DINOv3, split SwiGLU"])
def test_a_linear_head_is_written_above_the_backbone(kind: str, tmp_path: Path) -> None:
    architecture, change, rename = FILES[kind]
    torch.save(rename(build_timm_model(architecture, **change).state_dict()), tmp_path / "model.pth")
    config = dataclasses.replace(load(tmp_path / "model.pth").model.config, pool="class-mean", classes=7)
    ours = model_factory.fill_parameters(ViT(config), 0)
    with torch.no_grad():
        for block in ours.blocks:
            block.attn.qkv.bias[config.width : 2 * config.width] = 0
    save(model_factory.build_trained(ours), tmp_path / "head.pth", "original")
    assert "linear_head.weight" in torch.load(tmp_path / "head.pth", weights_only=True)
    images = model_factory.draw_images(config, size=(32, 32))
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "head.pth").model(images), ours(images))


@pytest.mark.parametrize("variant", ["plain", "map", "sincos", "distilled", "relative", "hybrid"])
def test_a_model_that_no_authors_code_computes_is_refused_with_each_reason(variant: str, tmp_path: Path) -> None:
    ours = model_factory.build_trained(model_factory.build_vit(**VARIANTS[variant]))
    with pytest.raises(ModelError, match="the original format cannot hold this model") as refusal:
        save(ours, tmp_path / "model.pth", "original")
    assert variant == "hybrid" or "DINOv3 (" in str(refusal.value)
    assert not (tmp_path / "model.pth").exists()


def test_a_file_of_i_jepa_says_which_of_its_networks_was_read(tmp_path: Path) -> None:
    architecture, change, rename = FILES["I-JEPA"]
    torch.save(rename(build_timm_model(architecture, **change).state_dict()), tmp_path / "model.pth")
    origin = load(tmp_path / "model.pth").origin
    assert origin.format == "original"
    assert any("only the section 'encoder'" in change for change in origin.changes)


def test_names_that_two_makers_use_are_read_only_with_what_tells_them_apart(tmp_path: Path) -> None:
    """Tensors of DeiT III outside of its .pth might be of timm's RoPE ViTs, which compute something else."""
    architecture, change, rename = FILES["DeiT III"]
    theirs = rename(build_timm_model(architecture, **change).state_dict())
    torch.save(theirs, tmp_path / "model.pth")
    torch.save(theirs["model"], tmp_path / "alone.pth")
    with pytest.raises(ModelError, match="names of timm's RoPE ViTs and of the authors' DeiT III"):
        load(tmp_path / "alone.pth")
    with pytest.raises(ModelError, match=r"DeiT III in a \.pth alone"):
        save(load(tmp_path / "model.pth"), tmp_path / "again.safetensors", "original")
