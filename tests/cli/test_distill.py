"""`vitrail distill`: students of both kinds, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

import vitrail as vitrail_api
from tests import model_factory
from tests.api.conftest import write_pictures
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import make_image
from vitrail import load, save
from vitrail.data.sources import open_dataset
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


def build_student() -> str:
    """The path of another model of the two classes."""
    trained = model_factory.build_trained(model_factory.build_vit(classes=2), labels=("rose", "tulip"))
    save(trained, "student.safetensors")
    return "student.safetensors"


def test_a_trained_student_learns_by_the_settings_given(teacher: Path, capsys: Capture) -> None:
    command = ("distill", str(teacher), "--model", build_student(), "--data", "photos", *HERE)
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


def test_images_without_labels_are_learned_by_the_teachers_predictions(teacher: Path, capsys: Capture) -> None:
    """The error names the two commands, and the accuracy is the agreement with the teacher."""
    Path("images").mkdir()
    for number in range(24):
        make_image(number, (32, 32)).save(f"images/{number}.png")
    student = build_student()
    command = ("distill", str(teacher), "--model", student, *HERE)
    code, _, err = vitrail(*command, "--data", "images", capsys=capsys)
    assert code == 3
    assert "--top 1 --out labels.csv`, then `vitrail distill TEACHER --data labels.csv --set" in err
    predict = ("predict", str(teacher), "images", "--top", "1", "--out", "labels.csv", "--workers", "0")
    assert vitrail(*predict, capsys=capsys)[0] == 0
    code, out, err = vitrail(
        *command, "--data", "labels.csv", "--set", "distillation.weight=1", "--json", capsys=capsys
    )
    assert code == 0, err
    facts = json.loads(out)
    test = open_dataset("labels.csv").splits["test"]
    images = [Path(test.get_image_name(index)) for index in range(len(test))]
    student_labels, teacher_labels = (
        [prediction.label for prediction in vitrail_api.predict(model, images)] for model in (facts["folder"], teacher)
    )
    agreement = sum(map(str.__eq__, student_labels, teacher_labels)) / len(test)
    assert facts["top1"] == pytest.approx(agreement)


def test_a_dry_run_names_the_teacher_and_trains_nothing(teacher: Path, capsys: Capture) -> None:
    command = ("distill", str(teacher), "--model", build_student(), "--data", "photos", "--dry-run", *HERE)
    code, out, err = vitrail(*command, capsys=capsys)
    assert code == 0, err
    assert "distillation of the kind soft, temperature 3, weight 0.5" in out
    assert not Path("runs/distill").exists()


def test_a_setting_of_distillation_needs_a_teacher(teacher: Path, capsys: Capture) -> None:
    command = ("train", "digits", "--data", "photos", "--set", "distillation.temperature=2")
    code, _, err = vitrail(*command, capsys=capsys)
    assert (code, "`vitrail distill TEACHER` adds it" in err) == (2, True)
