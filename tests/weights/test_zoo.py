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
from vitrail.weights import timm_tensors
from vitrail.weights.load import load, save

SMALL: dict[str, Any] = {"embed_dim": 96, "depth": 2, "num_heads": 2, "num_classes": 5}
NO_GROUPS: dict[str, Any] = {"num_kv_heads": 1}  # instead of a number for each block of the full depth
ZOO = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text(encoding="utf-8")
MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva", "beit")


def list_refused_patterns() -> list[str]:
    """The first column of the table of refused architectures."""
    section = ZOO.partition("## Refused today")[2].partition("\n## ")[0]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    return re.findall(r"`([^`]+)`", " ".join(cells))


def list_architectures(timm: Any) -> list[str]:
    """Timm's plain ViTs, DeiTs, hybrids, EVAs, BEiTs and BiT ResNets that have published weights."""
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
def test_what_a_file_does_not_state_is_known_by_its_architecture() -> None:
    """At full size, without memory: a Hub folder names its architecture, and seldom its heads or the epsilon."""
    timm = peer("timm")
    for name in (name for name in list_architectures(timm) if not is_refused(name) and "_bit" not in name):
        with torch.device("meta"):
            model = timm.create_model(name)
        tensors = timm_tensors.rename_tensors(model.state_dict())
        if "head.bias" in tensors:
            tensors["head.bias"] = torch.ones(len(tensors["head.bias"]))  # whose values tell a projection
        settings = {"architecture": name, "num_classes": model.num_classes, "global_pool": model.global_pool}
        settings["pretrained_cfg"] = {"input_size": list(model.pretrained_cfg["input_size"])}
        config: Any = timm_format.infer_architecture(tensors, settings, Path(name)).config
        assert config.heads == model.blocks[0].attn.num_heads, name
        assert config.norm_eps == model.blocks[0].norm1.eps, name
        assert (config.rotary is not None) == (getattr(model, "rope", None) is not None), name
        if config.pool == "map":
            assert (config.pool_heads or config.heads) == model.attn_pool.num_heads, name


@pytest.mark.slow
def test_every_architecture_is_computed_alike_when_it_is_small_or_refused(tmp_path: Path) -> None:
    """Two blocks of width 96 and two heads, with random values in every parameter; read, written and read by timm."""
    timm = peer("timm")
    names = [
        name for name in list_architectures(timm) if "_bit" not in name and not re.search(r"_r(26|50)?_s|_mci_", name)
    ]
    equal = 0
    for index, architecture in enumerate(names):
        torch.manual_seed(0)
        model = timm.create_model(architecture, **SMALL | (NO_GROUPS if "sapiens2" in architecture else {})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(float("norm" in name and name.endswith("weight")), 0.2)
        folder = write_folder(model, architecture, tmp_path / str(index))
        if is_refused(architecture):
            with pytest.raises(ModelError):
                load(folder)
            continue
        loaded = load(folder)
        images = torch.randn(1, 3, *loaded.model.config.image_size)
        save(loaded, tmp_path / f"{index}-again", "timm")
        again = timm.create_model(f"local-dir:{tmp_path / f'{index}-again'}", pretrained=True).eval()
        with torch.no_grad():
            expected = model(images)
            bound = 1e-5 * expected.abs().max().clamp(min=1)
            assert (loaded.model(images) - expected).abs().max() <= bound, architecture
            assert (again(images) - expected).abs().max() <= bound, architecture
        equal += 1
    print(f"{equal} architectures of timm {timm.__version__} equal when small, {len(names) - equal} refused")
    assert equal > len(names) - equal


def build_shallow_model(timm: Any, architecture: str) -> Any:
    """Timm's network with random weights in every parameter; a ViT has two of its blocks."""
    torch.manual_seed(0)
    is_resnet = "_bit" in architecture
    change = {} if is_resnet else {"depth": 2} | (NO_GROUPS if "sapiens2" in architecture else {})
    model = timm.create_model(architecture, **change).eval()
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
