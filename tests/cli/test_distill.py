"""`vitrail distill`: students of both kinds, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests import model_factory
from tests.api.conftest import write_pictures
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from vitrail import load, save
from vitrail.training.distillation import PROJECTION_NAME

HERE = ("--workers", "0", "--device", "cpu", "--epochs", "1", "--batch", "4")


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of the two classes of ./photos."""
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "photos")
    network = model_factory.build_vit(seed=1, classes=2, depth=1)
    save(model_factory.build_trained(network, labels=("rose", "tulip")), "teacher.safetensors")
    return Path("teacher.safetensors")


def test_a_trained_student_learns_by_the_settings_given(teacher: Path, capsys: Capture) -> None:
    save(
        model_factory.build_trained(model_factory.build_vit(classes=2), labels=("rose", "tulip")), "student.safetensors"
    )
    command = ("distill", str(teacher), "--model", "student.safetensors", "--data", "photos", *HERE)
    settings = ("--set", "distillation.kind=features", "distillation.weight=0.8")
    code, out, err = vitrail(*command, *settings, "--json", capsys=capsys)
    assert code == 0, err
    folder = Path(json.loads(out)["folder"])
    assert folder == Path("runs/distill")
    config = json.loads((folder / "config.json").read_text())
    assert config["recipe"]["distillation"] == {"kind": "features", "temperature": 3.0, "weight": 0.8}
    assert config["teacher"]["name"]
    assert not any(PROJECTION_NAME in name for name in load(folder).model.state_dict())


def test_a_student_of_a_recipe_has_a_distillation_token(teacher: Path, capsys: Capture) -> None:
    tokens = ("distillation.kind=token", "distillation_token=true", "distillation_head=true", "channels=3")
    command = ("distill", str(teacher), "--recipe", "digits", "--data", "photos", *HERE, "--set", *tokens, "--json")
    code, out, err = vitrail(*command, capsys=capsys)
    assert code == 0, err
    config = load(json.loads(out)["folder"]).model.config
    assert dataclasses.asdict(config)["distillation_head"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "name the student with --model"),
        (("--recipe", "digits", "--model", "ti16"), "names its own preset"),
        (("--recipe", "digits", "--set", "distillation.kind=token"), "no distillation token"),
        (("--recipe", "digits", "--set", "distillation.weight=2"), "above 0 and at most 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    options: tuple[str, ...], message: str, teacher: Path, capsys: Capture
) -> None:
    code, _, err = vitrail("distill", str(teacher), "--data", "photos", *options, capsys=capsys)
    assert (code, message in err) == (2, True), err
    assert not Path("runs").exists()


def test_a_setting_of_distillation_needs_a_teacher(teacher: Path, capsys: Capture) -> None:
    command = ("train", "digits", "--data", "photos", "--set", "distillation.temperature=2")
    code, _, err = vitrail(*command, capsys=capsys)
    assert (code, "`vitrail distill TEACHER` adds it" in err) == (2, True)
