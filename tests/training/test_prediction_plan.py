"""The plan of a prediction, by hand."""

from pathlib import Path

import pytest

from tests import model_factory
from tests.training.test_plan import Capture, expect_refusal, plan_facts
from vitrail import presets, save
from vitrail.cli import main
from vitrail.model import cost


def test_time_and_sizes_by_hand(capsys: Capture) -> None:
    options = ["b16", "--predict", "100000000", "--gpu", "h100", "--gpus", "8", "--efficiency", "0.4"]
    result = plan_facts(*options, capsys=capsys)
    flops = 2 * cost.count_multiply_adds(presets.get_preset_config("b16", classes=1000))
    assert result["flops_per_image"] == flops == pytest.approx(35.1e9, rel=0.01)  # 17.6 G multiply-adds: table of DeiT
    assert result["seconds"] == pytest.approx(1e8 * flops / (8 * 0.4 * 989e12))
    assert result["images_per_second"] == pytest.approx(1e8 / result["seconds"])
    assert result["gpu_hours"] == pytest.approx(8 * result["seconds"] / 3600)
    assert result["decoding_cores"] == pytest.approx(result["images_per_second"] / 600)
    assert (result["row_bytes"], result["bytes"]) == (120, 12_000_000_000)
    embedded = plan_facts(*options, "--embed", "--float16", capsys=capsys)
    assert (embedded["features"], embedded["row_bytes"]) == (768, 100 + 2 * 768)
    assert main(["plan", *options, "--embed"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) < 110
    assert "768 features per image, 3,172 bytes with its path" in out


def test_a_file_is_planned_as_what_it_holds(tmp_path: Path, capsys: Capture) -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    save(trained, tmp_path / "m.safetensors")
    result = plan_facts(str(tmp_path / "m.safetensors"), "--predict", "10", "--embed", capsys=capsys)
    assert result["parameters"] == sum(parameter.numel() for parameter in trained.model.parameters())
    assert result["features"] == 32


def test_what_belongs_to_training_or_to_nothing_is_refused(capsys: Capture) -> None:
    for options, reason in (
        (["--predict", "10", "--epochs", "3"], "--epochs is for training"),
        (["--predict", "10", "--sbatch"], "`vitrail predict --sbatch N` prints the job"),
        (["--predict", "0"], "--predict is 0"),
        (["--predict", "10", "--float16"], "add --embed"),
        (["--embed"], "add --predict N"),
    ):
        assert reason in expect_refusal("b16", *options, capsys=capsys)
