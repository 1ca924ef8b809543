"""`vitrail info` on presets and files."""

import json
from pathlib import Path

from tests import model_factory
from tests.cli.test_cli import Capture, run
from vitrail.weights.load import save


def test_info_on_a_preset(capsys: Capture) -> None:
    code, out, _ = run("info", "b16", capsys=capsys)
    assert code == 0
    assert "86,567,656" in out
    assert "17.56 G" in out
    code, out, _ = run("info", "b16", "--json", capsys=capsys)
    facts = json.loads(out)
    assert facts["parameters"] == 86_567_656
    assert facts["architecture"]["heads"] == 12
    assert facts["warnings"] == ["a preset has random weights"]


def test_info_on_a_file_tells_all_it_knows(tmp_path: Path, capsys: Capture) -> None:
    path = str(tmp_path / "model.safetensors")
    save(model_factory.build_trained(model_factory.build_vit()), path)
    code, out, _ = run("info", path, capsys=capsys)
    assert code == 0
    assert "file " in out
    assert "kind 0; kind 1; kind 2; ..." in out
    assert "not stated by the source" in out
    code, out, _ = run("convert", path, str(tmp_path / "new.safetensors"), "--classes", "3", capsys=capsys)
    code, out, _ = run("info", str(tmp_path / "new.safetensors"), "--json", capsys=capsys)
    facts = json.loads(out)
    assert any("head: all zeros" in text for text in facts["warnings"])
    assert any("labels: unnamed" in text for text in facts["warnings"])
    assert any(text == "head.weight (7, 32): removed" for text in facts["origin"]["changes"])


def test_info_names_the_parts_of_a_model(tmp_path: Path, capsys: Capture) -> None:
    changes = model_factory.VARIANTS["gated-normed"] | model_factory.VARIANTS["rotary-index"]
    model = model_factory.build_vit(**changes, norm_pre=True, projection=24, normalize_features=True)
    save(model_factory.build_trained(model), tmp_path / "model.safetensors")
    _, out, _ = run("info", str(tmp_path / "model.safetensors"), capsys=capsys)
    assert "gated MLP 64" in out
    assert "resampled by bilinear-corners; rotary by index places, base 10000" in out
    assert "7 classes, pool class, projection to 24, features of length 1" in out
    assert "SiLU, LayerNorm epsilon 1e-06, also before the blocks and in attention and in the MLP" in out


def test_info_prints_what_was_assumed(tmp_path: Path, capsys: Capture) -> None:
    save(
        model_factory.build_trained(model_factory.build_vit(width=64, heads=1, gelu="erf")),
        tmp_path / "bare.safetensors",
        "timm",
    )
    code, out, _ = run("info", str(tmp_path / "bare.safetensors"), capsys=capsys)
    assert code == 0
    assert "heads: 1, assumed from width 64 / 64" in out
    assert "preprocessing: unknown" in out


def test_control_characters_in_names_are_not_printed(tmp_path: Path, capsys: Capture) -> None:
    labels = ("\x1b[2Jgone", "two\nlines", *"cdefg")
    save(model_factory.build_trained(model_factory.build_vit(), labels=labels), tmp_path / "model.safetensors")
    code, out, _ = run("info", str(tmp_path / "model.safetensors"), capsys=capsys)
    assert code == 0
    assert "\x1b" not in out
    assert "two\N{REPLACEMENT CHARACTER}lines" in out
