"""The table of formats: every row fits its module, names that do not fit are refused, and logits survive each pair."""

import inspect
import sys
from pathlib import Path
from subprocess import run
from typing import Any, get_args

import pytest
import torch

from tests import model_factory
from tests.model_factory import VARIANTS
from vitrail.config import ConvConfig
from vitrail.errors import ModelError, UsageError
from vitrail.weights import formats, timm
from vitrail.weights.formats import WeightsFormat
from vitrail.weights.load import load, save


def test_every_format_has_a_row_and_every_row_a_module_with_its_functions() -> None:
    assert set(formats.FORMATS) == set(get_args(WeightsFormat))
    for name in formats.FORMATS:
        module = formats.import_format(name)
        for function in ("recognize", "read", "write"):
            expected = inspect.signature(getattr(formats.FormatModule, function)).parameters
            parameters = inspect.signature(getattr(module, function)).parameters
            assert list(parameters) == list(expected)[1:], (name, function)


def test_the_table_needs_no_torch() -> None:
    script = "import sys; from vitrail.weights import formats; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", script]).returncode == 0


def test_a_config_of_no_format_is_refused_with_the_keys_that_would_tell(tmp_path: Path) -> None:
    save(model_factory.build_trained(model_factory.build_vit(gelu="erf")), tmp_path / "model", "timm")
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"neither model_type \(transformers\) nor architecture \(timm\)"):
        load(tmp_path / "model")


def test_a_folder_that_holds_anything_else_is_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.jpg").write_text("a photograph")
    for target, format_name in ((folder, "timm"), (folder, "transformers")):
        with pytest.raises(UsageError, match=r"holds 'a\.jpg' and is no model to overwrite"):
            save(model_factory.build_trained(model_factory.build_vit()), target, format_name, overwrite=True)
    assert (folder / "a.jpg").read_text() == "a photograph"


def test_a_refusal_makes_no_folders(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        save(
            model_factory.build_trained(model_factory.build_vit()), tmp_path / "deep" / "down" / "model", "torchvision"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_one_model_file_is_that_model(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "one" / "best.safetensors")
    assert load(tmp_path / "one").labels is not None
    save(model_factory.build_trained(model_factory.build_vit(1)), tmp_path / "one" / "last.safetensors")
    with pytest.raises(ModelError, match=r"2 weights files \(best\.safetensors, last\.safetensors\)"):
        load(tmp_path / "one")


def test_names_and_formats_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    whole = model_factory.build_trained(model_factory.build_vit())
    with pytest.raises(UsageError, match=r"one \.safetensors file"):
        save(whole, tmp_path / "model")
    for format_name in ("timm", "transformers"):
        with pytest.raises(UsageError, match=r"model is a folder.*: call it .*/model, or say --to google"):
            save(whole, tmp_path / "model.npz", format_name)
    with pytest.raises(UsageError, match="there is no format 'jax'"):
        save(whole, tmp_path / "model", "jax")


TIMM_STEM = ConvConfig(units=(), norm_eps=1e-5, standardization="sqrt(var + eps)", standardization_eps=1e-8)


MODELS: dict[str, tuple[Any, set[str]]] = {  # a model, and the formats that hold it beside the native one
    "ViT, tanh": (lambda: model_factory.build_vit(), {"google", "timm", "transformers"}),
    "ViT, erf": (
        lambda: model_factory.build_vit(width=64, heads=1, gelu="erf"),
        {"timm", "bare timm", "transformers", "torchvision"},
    ),
    "ViT, attention pooling": (lambda: model_factory.build_vit(**VARIANTS["map"]), {"google", "timm"}),
    "Google's hybrid": (lambda: model_factory.build_vit(stem=model_factory.STEM, patch=2), {"google"}),
    "timm's hybrid": (lambda: model_factory.build_vit(stem=TIMM_STEM, patch=2), {"timm"}),
    "Google's BiT": (lambda: model_factory.build_bit(), {"google"}),
    "timm's BiT": (
        lambda: model_factory.build_bit(conv=ConvConfig(units=(3, 4, 6, 3), **timm.NUMERICS)),
        {"timm", "bare timm"},
    ),
}


FILES = {"vitrail": "a.safetensors", "google": "a.npz", "timm": "timm", "bare timm": "b.safetensors",
         "transformers": "hf", "torchvision": "a.pth"}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_every_pair_of_formats_that_holds_a_model_keeps_its_logits(kind: str, tmp_path: Path) -> None:
    make, held = MODELS[kind]
    ours = model_factory.build_trained(make())
    images = model_factory.draw_images(ours.model.config)
    writable = set()
    with torch.no_grad():
        logits = ours.model(images)
        for first in FILES:
            try:
                save(ours, tmp_path / f"1-{FILES[first]}", first.removeprefix("bare "))
            except ModelError:
                continue
            writable.add(first)
            middle = load(tmp_path / f"1-{FILES[first]}")
            assert torch.equal(middle.model(images), logits), first
            for second in held | {"vitrail"}:
                save(middle, tmp_path / f"2-{FILES[second]}", second.removeprefix("bare "), overwrite=True)
                assert torch.equal(load(tmp_path / f"2-{FILES[second]}").model(images), logits), (first, second)
    assert writable == held | {"vitrail"}
