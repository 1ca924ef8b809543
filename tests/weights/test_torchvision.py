"""torchvision's state dicts: read, written, and where torchvision is installed computed by it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import model_factory
from tests.conftest import peer
from tests.model_factory import VARIANTS
from vitrail.errors import ModelError, UsageError
from vitrail.weights.load import load, save

HELD = ("erf", "hidden-head", "no-positions", "2d", "sincos")
SIZE = {"width": 64, "heads": 1, "gelu": "erf"}  # a head count that the tensors show


def build_torchvision_model(**change: Any) -> Any:
    peer("torchvision")
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    arguments = {"image_size": 32, "patch_size": 8, "num_layers": 3, "num_heads": 1, "hidden_dim": 64, "mlp_dim": 96}
    model = VisionTransformer(**arguments | {"num_classes": 5} | change).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if ".ln" in name and name.endswith("weight") else 0.0, 0.2)
    return model


@pytest.mark.parametrize("change", [{}, {"representation_size": 64}], ids=["plain", "hidden head"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_logits_equal_torchvisions_own(change: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    model, path = build_torchvision_model(**change), tmp_path / f"model{suffix}"
    if suffix == ".pth":
        torch.save(model.state_dict(), path)
    else:
        from safetensors.torch import save_file

        save_file(model.state_dict(), path)
    loaded = load(path)
    images = model_factory.draw_images(loaded.model.config)
    with torch.no_grad():
        ours, expected = loaded.model(images), model(images)
    assert ours.abs().max() > 0.1
    assert (ours - expected).abs().max() <= 1e-5
    assert loaded.origin.format == "torchvision"
    assert loaded.preprocess is None


@pytest.mark.parametrize("kind", HELD)
def test_what_we_write_torchvision_computes_alike(kind: str, tmp_path: Path) -> None:
    ours = model_factory.build_trained(model_factory.build_vit(**SIZE | VARIANTS[kind]))
    save(ours, tmp_path / "model.pth", "torchvision")
    config = ours.model.config
    change = {"representation_size": 64} if config.hidden_head else {}
    model = build_torchvision_model(mlp_dim=config.mlp, num_classes=config.classes, **change)
    model.load_state_dict(torch.load(tmp_path / "model.pth", weights_only=True))
    images = model_factory.draw_images(config)
    with torch.no_grad():
        assert (model(images) - ours.model(images)).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", HELD)
def test_a_file_reads_back_to_identical_logits(kind: str, tmp_path: Path) -> None:
    ours = model_factory.build_trained(model_factory.build_vit(**SIZE | VARIANTS[kind]))
    notes = save(ours, tmp_path / "model.safetensors", "torchvision")
    assert "no place for preprocessing, labels and origin" in notes[-1]
    again, images = load(tmp_path / "model.safetensors"), model_factory.draw_images(ours.model.config)
    with torch.no_grad():
        torch.testing.assert_close(again.model(images), ours.model(images), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", sorted(VARIANTS.keys() - set(HELD)))
def test_what_torchvision_cannot_hold_is_refused_and_nothing_is_written(kind: str, tmp_path: Path) -> None:
    change = SIZE | VARIANTS[kind] | ({"gelu": "tanh"} if kind == "plain" else {})
    with pytest.raises(ModelError, match=r"cannot hold this model|positions are not one class token and a square grid"):
        save(model_factory.build_trained(model_factory.build_vit(**change)), tmp_path / "model.pth", "torchvision")
    assert list(tmp_path.iterdir()) == []


def test_old_names_of_the_mlp_load_alike(tmp_path: Path) -> None:
    ours = model_factory.build_trained(model_factory.build_vit(**SIZE))
    save(ours, tmp_path / "new.pth", "torchvision")
    tensors = torch.load(tmp_path / "new.pth", weights_only=True)
    both = "encoder.layers.encoder_layer_0.mlp.linear_1.weight"
    torch.save(tensors | {both: torch.zeros(64, 64)}, tmp_path / "both.pth")
    with pytest.raises(ModelError, match=r"two tensors for 'blocks\.0\.mlp\.fc1\.weight'"):
        load(tmp_path / "both.pth")
    old = {n.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): t for n, t in tensors.items()}
    assert old.keys() != tensors.keys()
    torch.save(old, tmp_path / "old.pth")
    images = model_factory.draw_images(ours.model.config)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "old.pth").model(images), ours.model(images))


def test_a_folder_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"call it .*model\.pth"):
        save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model", "torchvision")
