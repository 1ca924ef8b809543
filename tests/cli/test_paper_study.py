"""The commands of the studies of pre-training: the plan, a whole small study, and its resumption."""

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import write_image_folder
from vitrail.cli import paper_study
from vitrail.cli.arguments.studies import PaperStudyArguments
from vitrail.studies.paper_studies import PAPER_STUDIES


def test_a_plan_counts_what_a_cluster_would_need(capsys: Capture) -> None:
    command = ("study", "data-size", "--data", "imagenet21k", "--models", "b16,l16", "--runs", "1", "--json")
    code, out, err = vitrail(*command, capsys=capsys)
    assert code == 0, err
    plan = json.loads(out)["plan"]
    assert [row["variant"] for row in plan] == [
        f"{model}, {part}%" for model in ("b16", "l16") for part in (10, 30, 100)
    ]
    assert len({row["steps"] for row in plan}) == 1
    own = json.loads(vitrail("plan", "vit-b16-i21k", "--classes", "21841", "--json", capsys=capsys)[1])
    assert plan[2]["exaflops"] == pytest.approx(own["exaflops"])


@pytest.mark.slow
def test_a_study_pretrains_transfers_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = ("--set", "schedule.warmup=3", "depth=1", "width=12", "mlp=12")
    options = (*settings, "--epochs", "0.2", "--transfer-epochs", "0.1", "--runs", "1", "--workers", "0")
    command = ("study", "resolution", "--data", "digits", "--recipe", "digits", "--models", "ti2", *options)
    code, out, err = vitrail(*command, "--device", "cpu", "--parallel", "2", "--json", capsys=capsys)
    assert code == 0, err
    summary = json.loads(out)
    measures = summary["variants"]["ti2"]["measures"]
    assert list(measures) == ["val", *(transfer.name for transfer in PAPER_STUDIES["resolution"].transfers)]
    assert (tmp_path / summary["folder"] / "study.png").is_file()
    code, again, err = vitrail(*command, "--device", "cpu", capsys=capsys)
    assert code == 0, err
    assert "started on" not in err  # every cell is done
    assert "the paper: section 3.2" in again


def test_val_is_the_test_of_transfer_where_there_is_no_other(tmp_path: Path, capsys: Capture) -> None:
    """As for Tiny-ImageNet and ImageNet as they are stored: what is fine-tuned is not chosen on what measures it."""
    data = write_image_folder(tmp_path / "photos", "train", "val", each=20)
    arguments = PaperStudyArguments(data=str(data))
    plain, transfer = paper_study._open_data("resolution", arguments)
    assert (plain.images, plain.val_is_test) == ({"train": 40, "val": 40}, False)
    assert transfer.val_is_test
    assert transfer.cell_data == {"name": str(data), "share": 0.1, "val_is_test": True}
    assert transfer.images["test"] == 40
    assert transfer.images["train"] + transfer.images["val"] == 40
    assert paper_study._open_data("positions", arguments)[1].cell_data == {"name": str(data), "share": 0.1}


def test_a_recipe_for_more_images_warms_up_for_fewer_steps_unless_they_are_set(capsys: Capture) -> None:
    short = paper_study._choose_recipe(PaperStudyArguments(data="photos"), images=2_000)
    assert short.schedule.warmup < 2_000 * 30 / 512 / 4
    assert "warm-up of 500 steps is for a larger dataset" in capsys.readouterr().err
    fixed = paper_study._choose_recipe(PaperStudyArguments(data="photos", settings=("warmup=7",)), images=2_000)
    assert fixed.schedule.warmup == 7
