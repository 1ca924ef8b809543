"""`vitrail.distill`: the command's run, students of every kind, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import vitrail
from tests import model_factory
from tests.api.conftest import make_trained, write_pictures
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as run_command
from vitrail.errors import DataError, UsageError
from vitrail.recipes import build_finetune_recipe

SHORT: dict[str, Any] = {"epochs": 1, "batch": 4, "workers": 0, "device": "cpu", "progress": False}
HERE = ("--epochs", "1", "--batch", "4", "--workers", "0", "--device", "cpu")
TOKENS = {"distillation_token": True, "distillation_head": True}


@pytest.fixture(autouse=True)
def _photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "photos")
    vitrail.save(make_teacher(), "teacher.safetensors")
    vitrail.save(make_trained(), "student.safetensors")


def make_teacher() -> vitrail.Trained:
    network = model_factory.build_vit(seed=1, classes=2, depth=1)
    return model_factory.build_trained(network, labels=("rose", "tulip"))


def test_the_command_and_the_function_give_the_same_bytes(capsys: Capture) -> None:
    command = ("distill", "teacher.safetensors", "--model", "student.safetensors", "--data", "./photos")
    assert run_command(*command, "--out", "command", *HERE, capsys=capsys)[0] == 0
    run = vitrail.distill("teacher.safetensors", "./photos", "student.safetensors", out="python", **SHORT)
    assert run.config == vitrail.Run("command").config
    assert run.weights.read_bytes() == vitrail.Run("command").weights.read_bytes()
    assert run.config["recipe"]["distillation"] == {"kind": "soft", "temperature": 3.0, "weight": 0.5}


def test_teachers_and_students_may_be_runs_and_values() -> None:
    first = vitrail.distill(make_teacher(), "photos", make_trained(), out="first", **SHORT)
    recipe = build_finetune_recipe("default", 10, 16)
    second = vitrail.distill(first, "photos", model=first, recipe=recipe, out="second", **SHORT)
    assert second.config["teacher"]["weights"] != first.config["teacher"]["weights"]
    assert second.config["model"]["name"] == first.trained.origin.name
    assert f"(teacher: {first.trained.origin.name})" in second.trained.origin.name
    assert "distillation of the kind soft, temperature 3, weight 0.5" in second.report.read_text(encoding="utf-8")


def test_a_short_run_of_a_student_with_a_token_keeps_its_head() -> None:
    """A head from a probe, which short runs start with, would replace both of its heads."""
    student = make_trained()
    network = model_factory.build_vit(classes=2, **TOKENS)
    student = dataclasses.replace(student, model=network)
    settings = {"distillation.kind": "token"}
    run = vitrail.distill("teacher.safetensors", "photos", student, settings=settings, **SHORT)
    assert run.config["recipe"]["head_init"] is None
    assert run.trained.model.config.distillation_head


def test_a_run_resumes_with_its_teacher_alone() -> None:
    vitrail.distill("teacher.safetensors", "photos", "student.safetensors", out="run", **SHORT)
    again: dict[str, Any] = {"out": "run", "resume": True, **SHORT}
    with pytest.raises(UsageError, match="teacher"):
        vitrail.distill("student.safetensors", "photos", "student.safetensors", **again)
    assert vitrail.distill("teacher.safetensors", "photos", "student.safetensors", **again).metrics


def test_what_a_student_cannot_learn_from_is_refused() -> None:
    teacher = "teacher.safetensors"
    with pytest.raises(UsageError, match="name the student with model"):
        vitrail.distill(teacher, "photos")
    with pytest.raises(UsageError, match="the recipe digits names its own preset and resolution: omit model"):
        vitrail.distill(teacher, "photos", "student.safetensors", recipe="digits")
    with pytest.raises(UsageError, match=r"class_weights is for labels, and at distillation\.weight=1 none is learned"):
        vitrail.distill(
            teacher, "photos", "student.safetensors", class_weights={"rose": 2.0},
            settings={"distillation.weight": 1.0}, **SHORT,
        )  # fmt: skip
    with pytest.raises(UsageError, match="a model is a name, a path"):
        vitrail.distill(5, "photos", "student.safetensors")
    with pytest.raises(DataError, match="has no labels, which name a student's outputs"):
        vitrail.distill(teacher, "photos/val/rose", "student.safetensors", **SHORT)
