"""`vitrail study`: the folder, what is printed, and the cost of a model (whole studies: tests/studies)."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_cli import Capture, run
from vitrail.cli import study
from vitrail.cli.options import StudyOptions
from vitrail.errors import UsageError


def test_help_is_answered_without_torch() -> None:
    script = (
        "import sys; from vitrail.cli import main\n"
        "for verb in ('ablate', 'sweep', 'vtab', 'table'):\n"
        "    try: main(['study', verb, '--help'])\n"
        "    except SystemExit as stop: assert not stop.code\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (("sweep", "./photos/", "model.safetensors"), "runs/sweep-photos-model.safetensors"),
        (("sweep", "s3://bucket/a set", "hf:google/vit"), "runs/sweep-a-set-vit"),
        (("ablate", "../..", "digits"), "runs/ablate--digits"),
    ],
)
def test_a_study_is_named_after_its_arguments(words: tuple[str, ...], folder: str) -> None:
    assert study.choose_study_folder(None, *words) == Path(folder)
    assert study.choose_study_folder(Path("mine"), *words) == Path("mine")


def test_negative_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--workers is -1; it must be 0 or more"):
        study.make_runner(tmp_path, 0, StudyOptions(workers=-1))


def test_an_accuracy_has_its_deviation_where_there_are_several_runs() -> None:
    assert study.format_accuracy({"mean": 0.5, "std": None, "n": 1}) == "50.00%"
    assert study.format_accuracy({"mean": 0.5, "std": 0.0125, "n": 3}) == "50.00% ± 1.25% (n = 3)"


def test_sweeps_print_every_rate_and_mark_the_chosen_one(capsys: Capture) -> None:
    summary = {"validation": {"0.01": 0.5, "0.03": 0.75, "0.1": None}, "lr": 0.03, "mean": 0.7, "std": None}
    study._print_sweep(summary | {"n": 1, "images": 1}, Path("runs/sweep"))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "learning rate validation",
        "0.01 50.00%",
        "0.03 75.00% (chosen)",
        "0.1 diverged",
        "test: 70.00%, of 1 image (runs/sweep/study.png)",
    ]


def test_a_cost_is_a_number_of_core_days_or_a_recipe() -> None:
    entry = study._make_cost_entry("b16=230", ["b16"])
    assert (entry.model, entry.facts) == ("b16", {"model": "b16", "core_days": 230.0})
    assert study._make_cost_entry("b16=vit-b16-jft", ["b16"]).facts["core_days"] > 1
    for text, message in (("b16", "give MODEL=RECIPE"), ("l16=3", "of the columns b16"), ("b16=-3", "above 0")):
        with pytest.raises(UsageError, match=message):
            study._make_cost_entry(text, ["b16"])


def test_a_folder_that_is_no_study_ends_with_3(tmp_path: Path, capsys: Capture) -> None:
    code, _, error = run("study", "table", str(tmp_path), capsys=capsys)
    assert (code, f"{tmp_path} is not a study" in error) == (3, True), error
