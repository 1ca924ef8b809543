"""docs/zoo.md: what it says of timm's published weights, checked against timm's own tables and networks."""

import fnmatch
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import peer
from vitrail.errors import ModelError
from vitrail.weights import timm as timm_format
from vitrail.weights.load import load

ZOO = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text(encoding="utf-8")
MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit")


def list_refused_patterns() -> list[str]:
    """The first column of the table of refused architectures."""
    section = ZOO.partition("## Refused today")[2].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    return re.findall(r"`([^`]+)`", " ".join(cells))


def list_architectures(timm: Any) -> list[str]:
    """Timm's plain ViTs, DeiTs, hybrids and BiT ResNets that have published weights."""
    names = {tag.partition(".")[0] for tag in timm.list_pretrained()}
    homes = {name: timm.models.model_entrypoint(name).__module__.rpartition(".")[2] for name in names}
    plain = {name for name, home in homes.items() if home in MODULES or (home == "resnetv2" and "_bit" in name)}
    return sorted(plain)


def is_refused(architecture: str) -> bool:
    return any(fnmatch.fnmatch(architecture, pattern) for pattern in list_refused_patterns())


def test_every_name_is_published_by_timm_under_the_stated_license() -> None:
    timm = peer("timm")
    architectures, published = set(list_architectures(timm)), set(timm.list_pretrained())
    rows = re.findall(r"^\|[^|]*\| `vitrail [^`|]*timm:([^`]+)` \| ([^|]+?) \|", ZOO, re.MULTILINE)
    assert len(rows) >= 21
    for name, license_name in rows:
        assert name in published
        assert name.partition(".")[0] in architectures
        assert not is_refused(name.partition(".")[0])
        assert timm.get_pretrained_cfg(name).license == license_name.lower(), name
    assert all(any(fnmatch.fnmatch(name, pattern) for name in architectures) for pattern in list_refused_patterns())


@pytest.mark.slow
def test_the_number_of_heads_is_known_wherever_a_file_does_not_state_it() -> None:
    """At full size, without memory: a Hub folder names its architecture, and seldom its heads."""
    timm = peer("timm")
    for name in (name for name in list_architectures(timm) if not is_refused(name) and "_bit" not in name):
        with torch.device("meta"):
            model = timm.create_model(name)
        tensors = timm_format.rename_tensors(model.state_dict())
        settings = {"architecture": name, "num_classes": model.num_classes, "global_pool": model.global_pool}
        config: Any = timm_format.infer_architecture(tensors, settings, Path(name)).config
        assert config.heads == model.blocks[0].attn.num_heads, name


def build_shallow_model(timm: Any, architecture: str) -> Any:
    """Timm's network with random weights in every parameter; a ViT has two of its blocks."""
    torch.manual_seed(0)
    is_resnet = "_bit" in architecture
    model = timm.create_model(architecture, **({} if is_resnet else {"depth": 2})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = "norm" in name and name.endswith("weight")
            parameter.normal_(float(is_scale), 0.1 if parameter.ndim == 1 or is_resnet else 0.02)
    return model


def write_folder(model: Any, architecture: str, path: Path) -> Path:
    path.mkdir()
    save_file(model.state_dict(), path / "model.safetensors")
    settings = {"architecture": architecture, "num_classes": model.num_classes, "pretrained_cfg": model.pretrained_cfg}
    if hasattr(model, "blocks"):  # a published size is known by its depth too, which is two here
        heads = getattr(getattr(model.blocks[0], "attn", None), "num_heads", None)
        settings |= {"global_pool": model.global_pool, "model_args": {"num_heads": heads} if heads else {}}
    (path / "config.json").write_text(json.dumps(settings, default=str))
    return path


@pytest.mark.soak
def test_every_architecture_of_timm_is_computed_alike_or_refused(tmp_path: Path) -> None:
    timm = peer("timm")
    equal = 0
    for index, architecture in enumerate(list_architectures(timm)):
        model = build_shallow_model(timm, architecture)
        folder = write_folder(model, architecture, tmp_path / str(index))
        if is_refused(architecture):
            with pytest.raises(ModelError):
                load(folder)
        else:
            loaded = load(folder).model
            side = (224, 224) if "_bit" in architecture else loaded.config.image_size
            images = torch.randn(1, 3, *side)
            with torch.no_grad():
                expected = model(images)
                difference = (loaded(images) - expected).abs().max() / expected.abs().max().clamp(min=1)
            assert difference <= (1e-4 if "_bit" in architecture or "_r" in architecture else 1e-5), architecture
            equal += 1
        (folder / "model.safetensors").unlink()
    print(f"{equal} architectures of timm {timm.__version__} equal, {len(list_architectures(timm)) - equal} refused")
