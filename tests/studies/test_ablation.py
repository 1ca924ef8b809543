"""`vitrail study ablate`: variants of a recipe over the same seeds, compared on val."""

import json
from pathlib import Path

import pytest

from tests import model_factory
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import write_image_folder
from vitrail.data.sources import open_dataset
from vitrail.errors import UsageError
from vitrail.recipes import get_recipe
from vitrail.studies import ablation
from vitrail.weights.load import save


def test_every_variant_has_every_seed_and_only_its_own_settings_differ() -> None:
    variants = ablation.list_variants(get_recipe("digits"), ["positions=none", "pool=norm-mean+lr=0.003"])
    dataset = open_dataset("digits")
    study = ablation.plan_ablation("digits", dataset, "digits", variants, runs=2, seed=3, micro_batches=1)
    cells = ablation.list_ablation_cells(study)
    assert len({cell.name for cell in cells}) == 6
    assert [cell.seed for cell in cells] == [3, 3, 3, 4, 4, 4]
    assert {cell.eval_split for cell in cells} == {"val"}
    plain, bare, pooled = (cell.recipe for cell in cells[:3])
    assert plain == get_recipe("digits")
    assert bare.settings == plain.settings | {"positions": "none"}
    assert (pooled.settings["pool"], pooled.optimizer.lr) == ("norm-mean", 0.003)
    results = [
        {"variant": "positions=none", "status": "done", "top1": top1} for top1 in (0.5, 0.7)
    ] + [{"variant": "unchanged", "status": "diverged"}]  # fmt: skip
    description = {"variants": variants, "dataset": "digits", "recipe": "digits", "images": {"val": 179}}
    summary = ablation.summarize_ablation(description, results)["variants"]
    assert summary["positions=none"]["mean"] == pytest.approx(0.6)
    assert summary["positions=none"]["std"] == pytest.approx(0.1 * 2**0.5)
    assert summary["unchanged"]["n"] == 0


def test_invalid_variants_are_refused_before_anything_is_read() -> None:
    for variants, message in (
        ((), "give settings such as"),
        (("depth=2", "depth=2"), "each once"),
        (("dept=2",), "did you mean depth"),
        (("epochs=2",), "epochs cannot be set here: give --epochs N"),
    ):
        with pytest.raises(UsageError, match=message):
            ablation.list_variants(get_recipe("digits"), variants)
    with pytest.raises(UsageError, match="without labels"):
        ablation.list_variants(get_recipe("mpp-cifar10"), ["depth=2"])


def test_one_class_and_folders_that_may_be_no_classes_are_refused_before_a_run(tmp_path: Path, capsys: Capture) -> None:
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.safetensors")
    years, one_class = (
        write_image_folder(tmp_path / "years", "2023", "2024"),
        write_image_folder(tmp_path / "one", classes=("rose",), each=20),
    )
    for data, message in ((years, "are these the classes?"), (one_class, "has one class, rose")):
        for study in (
            ("ablate", "digits", "--data", str(data), "--variants", "depth=1"),
            ("sweep", str(data), "--model", str(tmp_path / "model.safetensors")),
        ):
            code, _, err = vitrail("study", *study, "--out", str(tmp_path / "study"), capsys=capsys)
            assert (code, message in err) == (3, True), err
    assert not (tmp_path / "study").exists()


def test_the_command_trains_variants_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = ("--set", "schedule.warmup=3", "depth=1", "width=12", "mlp=12")
    options = (*settings, "--epochs", "0.2", "--runs", "1", "--workers", "0")
    command = ("study", "ablate", "digits", "--data", "digits", "--variants", "positions=none", *options)
    code, out, err = vitrail(*command, "--device", "cpu", "--json", capsys=capsys)
    assert code == 0, err
    summary = json.loads(out)
    assert set(summary["variants"]) == {"unchanged", "positions=none"}
    assert all(variant["n"] == 1 for variant in summary["variants"].values())
    config = tmp_path / "runs" / "ablate-digits-digits" / "cells" / "1-positions-none-seed-0" / "run" / "config.json"
    assert json.loads(config.read_text())["recipe"]["settings"]["positions"] == "none"
    assert json.loads(config.read_text())["recipe"]["schedule"]["warmup"] == 3  # however short the run is
    code, out, err = vitrail(*command, "--device", "cpu", capsys=capsys)
    assert code == 0
    assert "positions=none" in out
    assert "seed-0" not in err  # nothing is run again
