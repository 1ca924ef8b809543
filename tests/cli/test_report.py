"""`vitrail report` as a user calls it, and what train and finetune leave."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import TemplateError

from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.report.run_folders import isolate_home as alone
from tests.report.run_folders import write_run_folder as written
from vitrail.cli import main, output
from vitrail.report import write_report
from vitrail.report.run_facts import gather_facts

DIGITS = ("train", "digits", "--data", "digits", "--workers", "0", "--device", "cpu", "--epochs", "0.2")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on digits, as its command leaves it."""
    folder = tmp_path_factory.mktemp("digits")
    with alone(folder / "home"), pytest.MonkeyPatch.context() as patch:
        arguments = [*DIGITS, "--out", str(folder / "run")]
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["vitrail", *arguments])
        assert main(arguments) == 0
    return folder / "run"


def test_a_run_ends_with_its_report_and_remembers_its_command(digits: Path) -> None:
    assert (digits / "report.html").stat().st_size < 1_000_000
    assert (digits / "README.md").exists()
    facts = gather_facts(digits)
    assert facts.command == (*DIGITS, "--out", str(digits))
    assert facts.working_folder == str(digits.parent)
    assert "vitrail train digits --data digits --workers 0 --device cpu --epochs 0.2" in (
        digits / "report.html"
    ).read_text(encoding="utf-8")


def test_the_command_writes_the_page_again_byte_for_byte(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    code, out, _ = vitrail("report", str(digits), "--out", "again.html", capsys=capsys)
    assert code == 0
    assert out.startswith("again.html, ")
    assert (tmp_path / "again.html").read_bytes() == (digits / "report.html").read_bytes()
    code, out, _ = vitrail("report", str(digits), "--out", "again.html", "--json", capsys=capsys)
    size = (tmp_path / "again.html").stat().st_size
    assert json.loads(out) == {"report": "again.html", "bytes": size, "missing": []}


def test_data_that_moved_is_noted_and_given_by_name(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(digits, moved)
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"data": "/nowhere/digits"}))
    code, _, err = vitrail("report", str(moved), capsys=capsys)
    assert code == 0
    assert "the data was not found (/nowhere/digits does not exist" in err
    assert "--data says where it is" in err
    assert "The images are not shown" in (moved / "report.html").read_text()
    code, _, err = vitrail("report", str(moved), "--data", "digits", capsys=capsys)
    assert (code, err) == (0, "")
    assert "The images are not shown" not in (moved / "report.html").read_text()
    code, _, err = vitrail("report", str(moved), "--data", "/nowhere/else", capsys=capsys)
    assert (code, "/nowhere/else does not exist" in err) == (3, True)


def test_an_interrupted_run_is_told_of_and_shown(tmp_path: Path, capsys: Capture) -> None:
    written(tmp_path / "half", ended=False)
    code, out, err = vitrail("report", "half", capsys=capsys)
    assert code == 0
    assert "note: The run has not ended: its last recorded step is 10 of 20" in err
    assert out.startswith("half/report.html, ")


def test_what_is_no_run_is_refused_in_a_line(tmp_path: Path, capsys: Capture) -> None:
    for arguments, predictions in (
        (("nothing",), "nothing is no folder"),
        ((str(tmp_path),), "is not a run: it has no config.json"),
        ((str(written(tmp_path / "run")), "--out", str(tmp_path)), "is a folder; name a file for the report"),
    ):
        code, out, err = vitrail("report", *arguments, capsys=capsys)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert predictions in err


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError("planted")])
def test_a_report_that_fails_does_not_lose_the_run(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(write_report, "write_report", fails)
    code, out, err = vitrail(*DIGITS, "--out", "run", capsys=capsys)
    assert code == 0
    assert "; weights: run/weights/best.safetensors; next: vitrail predict run IMAGES" in out
    assert f"warning: the report is not written ({error}); `vitrail report run` does it" in err
    assert not (tmp_path / "run" / "report.html").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert vitrail("report", "run", capsys=capsys)[0] == 0
    assert (tmp_path / "run" / "README.md").exists()


@pytest.mark.parametrize(
    "error",
    [
        KeyError("decoded"), ZeroDivisionError("by zero"), RuntimeError("CUDA error:\nout of luck"), TypeError("none"),
        UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates"), TemplateError("undefined"),
    ],
)  # fmt: skip
def test_whatever_a_report_meets_is_a_warning_of_one_line(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(write_report, "write_report", fails)
    task: Any = SimpleNamespace(dataset=None, device=None)
    write_report.write_run_report(task, tmp_path / "my run", None, output.print_note)
    predictions = capsys.readouterr().err
    assert predictions.count("\n") == 1
    assert predictions.startswith("warning: the report is not written (")
    assert f"`vitrail report '{tmp_path}/my run'` does it" in predictions


def test_a_run_begun_before_it_was_written_down_whether_images_have_several_labels_goes_on(
    digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(digits, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config.pop("multi_label") is False
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    code, _, err = vitrail(*DIGITS, "--out", "run", "--resume", capsys=capsys)
    assert (code, "resuming run after step" in err) == (0, True)
