"""`vitrail.train` and `vitrail.finetune`: the commands' runs, data from memory, callbacks, losses, interruptions."""

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

import vitrail
from tests.api.conftest import FAST, HERE, SHORT, SHORT_HERE, make_trained
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as run_command
from tests.data.image_files import make_image
from vitrail.errors import DataError, StoppedError, UsageError
from vitrail.recipes import build_finetune_recipe
from vitrail.training import losses
from vitrail.training.loop import StepEnd
from vitrail.training.losses import softmax_cross_entropy
from vitrail.training.run_results import ValidationResult
from vitrail.weights.load import load

DIGITS: dict[str, Any] = {"epochs": 0.2, **FAST}


def read_weights(folder: Path | str) -> bytes:
    return (Path(folder) / "weights" / "best.safetensors").read_bytes()


def read_state(folder: Path | str) -> dict[str, Tensor]:
    return load(Path(folder)).model.state_dict()


def read_results(folder: Path | str) -> list[dict[str, Any]]:
    """The events of a run without times and the command."""
    timed = {"at", "seconds", "machine", "time", "images_per_second", "speed", "folder"}
    lines = (Path(folder) / "events.jsonl").read_text().splitlines()
    events = [{key: value for key, value in json.loads(line).items() if key not in timed} for line in lines]
    return [event for event in events if event["event"] in ("evaluation", "epoch", "checkpoint", "end")]


def drop_times(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in numbers.items() if name != "seconds"}


# --- the command and Python -------------------------------------------------------------------------------------------


def test_the_command_and_train_give_the_same_bytes(digits_run: Path, capsys: Capture) -> None:
    arguments = ("train", "digits", "--data", "digits", "--epochs", "0.2", "--out", "command", *HERE)
    assert run_command(*arguments, capsys=capsys)[0] == 0
    assert read_weights("command") == read_weights(digits_run)
    assert read_results("command") == read_results(digits_run)
    assert read_results("command")[-1]["event"] == "end"
    command, python = vitrail.Run("command"), vitrail.Run(digits_run)
    assert drop_times(command.metrics) == drop_times(python.metrics)
    assert {**command.config, "notes": []} == {**python.config, "notes": []}  # which name this test's own folders
    assert {name: values for name, values in command.history.items() if name != "time"} == {
        name: values for name, values in python.history.items() if name != "time"
    }


def test_the_command_and_finetune_give_the_same_bytes(capsys: Capture) -> None:
    arguments = ("finetune", "./photos", "--model", "model.safetensors", "--out", "command", *SHORT_HERE)
    assert run_command(*arguments, capsys=capsys)[0] == 0
    run = vitrail.finetune("./photos", Path("model.safetensors"), out="python", **SHORT)
    assert read_weights("command") == read_weights(run.folder)
    assert read_results("command") == read_results(run.folder)
    assert run.config == vitrail.Run("command").config


def test_a_run_is_a_model_to_start_from(tuned_run: Path) -> None:
    start = vitrail.Run(tuned_run)
    run = vitrail.finetune("./photos", start, keep_head=True, lr=1e-12, **SHORT | {"epochs": 0.4})
    assert run.config["model"]["name"] == start.trained.origin.name
    before, after = read_state(tuned_run), read_state(run.folder)
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    with pytest.raises(UsageError, match=r"a model is a name, a path, a vitrail.Run or a vitrail.Trained, not int"):
        vitrail.finetune("./photos", 5)


def test_options_that_do_not_exist_are_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no option 'epochz': did you mean epochs\?"):
        vitrail.train("digits", "digits", epochz=1)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"no option 'minuts': did you mean minutes\?"):
        vitrail.finetune("photos", "model.safetensors", minuts=1)  # type: ignore[call-arg]
    for hidden in ({"number_of_runs": 2}, {"loss_function": softmax_cross_entropy}):
        with pytest.raises(UsageError, match="there is no option"):
            vitrail.finetune("photos", "model.safetensors", **hidden)
    assert not Path("runs").exists()


@pytest.mark.parametrize(("returned", "kind"), [(0.5, "float"), (torch.zeros(2), r"a tensor of shape \(2,\)")])
def test_a_loss_that_is_no_scalar_tensor_is_refused(returned: Any, kind: str) -> None:
    with pytest.raises(UsageError, match=f"the loss function returned {kind}; it must return the sum over the images"):
        vitrail.train("digits", "digits", loss=lambda *_: returned, **DIGITS)


def test_a_loss_without_a_gradient_is_refused() -> None:
    with pytest.raises(UsageError, match="a tensor without a gradient"):
        vitrail.train("digits", "digits", loss=lambda logits, _: logits.detach().sum(), **DIGITS)


def test_callbacks_that_are_no_functions_are_refused() -> None:
    for name in ("on_step", "on_evaluation"):
        with pytest.raises(UsageError, match=f"{name} is 3, of type int; it takes a function or None"):
            vitrail.train("digits", "digits", **{name: 3})
    assert not Path("runs").exists()


# --- data from memory -------------------------------------------------------------------------------------------------


class Pictures(Dataset[Any]):
    """A torch Dataset of a folder, with labels as numbers and names of classes, as torchvision's."""

    classes = ("rose", "tulip")

    def __init__(self, split: str) -> None:
        self.paths = sorted(Path("photos", split).glob("*/*.png"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path = self.paths[index]
        return Image.open(path).copy(), self.classes.index(path.parent.name)


def make_data(kind: str) -> Any:
    """The pictures of photos/, as Python objects."""
    splits = {name: Pictures(name) for name in ("train", "val", "test")}
    if kind == "datasets":
        return splits
    pairs = {name: [split[index] for index in range(len(split))] for name, split in splits.items()}
    named = {name: [(image, Pictures.classes[label]) for image, label in each] for name, each in pairs.items()}
    if kind == "pairs":
        return named
    arrays = {name: np.stack([np.asarray(image) for image, _ in each]) for name, each in pairs.items()}
    labels = {name: [label for _, label in each] for name, each in named.items()}
    return {name: (arrays[name], labels[name]) for name in splits}


@pytest.mark.parametrize("kind", ["datasets", "pairs", "arrays"])
def test_images_in_memory_give_the_weights_of_a_folder_with_the_same_pixels(kind: str, tuned_run: Path) -> None:
    trained, untouched = make_trained(), make_trained().model.state_dict()
    run = vitrail.finetune(make_data(kind), trained, **SHORT)
    ours, folders = read_state(run.folder), read_state(tuned_run)
    assert all(torch.equal(ours[name], folders[name]) for name in folders)
    assert drop_times(run.metrics) == drop_times(vitrail.Run(tuned_run).metrics)
    assert run.config["classes"] == ["rose", "tulip"]
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in trained.model.state_dict().items())


def test_a_list_without_splits_is_held_out_like_a_folder() -> None:
    data = [sample for split in make_data("pairs").values() for sample in split]
    run = vitrail.finetune(data, make_trained(), **SHORT | {"epochs": 1})
    assert sum(run.config["images"].values()) == len(data) == 30
    assert run.config["images"]["test"] == run.metrics["images"] > 0
    assert any("held out" in note for note in run.notes)
    again = vitrail.evaluate(run, data, **FAST)
    assert again.accuracy == run.accuracy  # the same images are held out again


def test_what_is_no_image_or_label_is_refused() -> None:
    with pytest.raises(DataError, match="3 images and 2 labels"):
        vitrail.finetune((np.zeros((3, 8, 8), np.uint8), [0, 1]), make_trained())
    with pytest.raises(UsageError, match="not ndarray and NoneType"):
        vitrail.finetune((np.zeros((3, 8, 8), np.uint8), None), make_trained())
    with pytest.raises(UsageError, match="has no split 'dev'"):
        vitrail.finetune({"dev": [(Image.new("L", (8, 8)), 0)]}, make_trained())
    with pytest.raises(UsageError, match="not int"):
        vitrail.finetune(5, make_trained())


# --- callbacks and losses ---------------------------------------------------------------------------------------------


def test_metrics_of_images_with_several_labels_are_numbers() -> None:
    rows = [f"{path},{path.parent.name};{'small' if number % 2 else 'large'}" for number, path in
            enumerate(sorted(Path("photos").glob("*/*/*.png")))]  # fmt: skip
    Path("list.csv").write_text("\n".join(["path,labels", *rows]))
    metrics = vitrail.finetune("list.csv", "model.safetensors", **SHORT | {"epochs": 1}).metrics
    assert {"top1", "micro_f1", "mean_average_precision"} <= metrics.keys()
    assert "bins" not in metrics
    assert metrics["correct"] or metrics["interval"][0] == 0.0


def test_callbacks_are_called_after_each_step_and_evaluation_and_nothing_is_printed(
    capfd: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="vitrail")
    steps: list[StepEnd] = []
    evaluations: list[ValidationResult] = []
    run = vitrail.train("digits", "digits", on_step=steps.append, on_evaluation=evaluations.append, **DIGITS)
    assert all(isinstance(step, StepEnd) for step in steps)
    assert [step.step for step in steps] == list(range(1, run.config["steps"] + 1))
    assert {step.steps for step in steps} == {run.config["steps"]}
    assert all(step.result.images > 0 and np.isfinite(step.result.loss) for step in steps)
    assert len(evaluations) == len(run.history["epoch"]) > 0
    assert repr(evaluations[0]) == f"ValidationResult({evaluations[0]})"
    assert all(isinstance(evaluation, ValidationResult) for evaluation in evaluations)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    logged = [record.getMessage() for record in caplog.records if record.name == "vitrail"]
    assert str(evaluations[0]) in logged
    assert set(run.notes) <= set(logged)
    assert any(note.startswith("note: no val and test given") for note in run.notes)


def halve_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Half of the usual loss."""
    return softmax_cross_entropy(logits, targets) / 2


SGD = {
    "optimizer.kind": "sgd", "optimizer.momentum": 0.0, "optimizer.weight_decay": 0.0, "optimizer.clip": None,
    "label_smoothing": 0.0, "ema": 0.0, "augment.mixup": 0.0, "augment.cutmix": 0.0, "dropout": 0.0,
    "stochastic_depth": 0.0,
}  # fmt: skip


def test_half_of_the_loss_at_twice_the_learning_rate_gives_the_same_weights() -> None:
    options: dict[str, Any] = {"settings": SGD, "warmup": 0, **DIGITS, "epochs": 0.1}
    usual = vitrail.train("digits", "digits", lr=0.01, out="usual", **options)
    halved = vitrail.train("digits", "digits", lr=0.02, out="halved", loss=halve_softmax, **options)
    other = vitrail.train("digits", "digits", lr=0.02, out="other", **options)
    states = [read_state(run.folder) for run in (usual, halved, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])  # halving is exact
    assert not all(torch.equal(states[1][name], states[2][name]) for name in states[0])
    assert halved.config["loss_function"] == f"{__name__}.halve_softmax"
    assert "loss_function" not in usual.config


def test_a_loss_is_given_logits_and_targets_and_an_object_has_the_name_of_its_class() -> None:
    class Watching:
        def __init__(self) -> None:
            self.shapes: set[tuple[Sequence[int], Sequence[int]]] = set()

        def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
            self.shapes.add((tuple(logits.shape), tuple(targets.shape)))
            return losses.softmax_cross_entropy(logits, targets)

    loss, settings = Watching(), {"augment.mixup": 0.0, "augment.cutmix": 0.0}
    run = vitrail.finetune("photos", make_trained(), loss=loss, settings=settings, **SHORT | {"epochs": 0.4})
    assert loss.shapes == {((4, 2), (4,)), ((2, 2), (2,))}  # once of halves, to see whether it is a sum
    assert run.config["loss_function"].endswith("Watching")


def stop_after(step: int, number: int | None) -> Any:
    def on_step(end: StepEnd) -> None:
        if end.step == step:
            if number is None:
                raise KeyboardInterrupt
            os.kill(os.getpid(), number)

    return on_step


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, None])
def test_an_interrupted_run_resumes_to_the_same_bytes(number: int | None, digits_run: Path) -> None:
    options = DIGITS | {"save_every": 0 if number is None else 10}  # an exception of a callback saves nothing
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt if number is None else StoppedError) as raised:
        vitrail.train("digits", "digits", out="run", on_step=stop_after(3, number), **options)
    assert signal.getsignal(signal.SIGINT) is handler
    assert number is None or "resume=True" in str(raised.value)
    interrupted = vitrail.Run("run")
    assert (interrupted.metrics, interrupted.accuracy, interrupted.report) == ({}, None, None)
    steps: list[StepEnd] = []
    run = vitrail.train("digits", "digits", out="run", resume=True, on_step=steps.append, **DIGITS)
    assert steps[0].step == (3 if number is None else 4)
    assert run.folder == Path("run")
    assert read_weights(run.folder) == read_weights(digits_run)


class InterruptedImages(Dataset[tuple[Image.Image, int]]):
    """Ctrl-C comes while the images are read, before the first step."""

    targets = tuple(index % 2 for index in range(8))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        raise KeyboardInterrupt


def test_an_interrupt_before_the_first_step_says_that_the_same_call_starts_again() -> None:
    splits: Any = {"train": InterruptedImages(), "val": InterruptedImages()}
    with pytest.raises(StoppedError, match=r"before the first step, .* trained nothing; the same call starts again"):
        vitrail.finetune(splits, make_trained(), out="run", **SHORT)
    assert not Path("run").exists()


@pytest.mark.parametrize("callback", ["on_step", "on_evaluation"])
def test_a_callback_stops_a_run_with_its_checkpoint_and_weights(callback: str) -> None:
    def stop(_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(StoppedError):
        vitrail.train("digits", "digits", out="run", **{callback: stop}, **DIGITS)
    assert any(Path("run", "checkpoints").iterdir())
    assert (callback == "on_step") or vitrail.Run("run").trained.labels is not None
    assert vitrail.train("digits", "digits", out="run", resume=True, **DIGITS).accuracy is not None


def test_a_run_to_resume_must_exist() -> None:
    for out in ("mistyped", None):
        with pytest.raises(UsageError, match=r"does not exist, so there is nothing to resume; without resume=True it"):
            vitrail.train("digits", "digits", out=out, resume=True, **DIGITS)
    assert not Path("mistyped").exists()


def test_a_run_leaves_random_numbers_and_warnings_as_they_were() -> None:
    torch.manual_seed(7)
    expected, filters = torch.rand(3), list(warnings.filters)
    torch.manual_seed(7)
    vitrail.finetune("photos", "model.safetensors", **SHORT | {"epochs": 0.4})
    assert torch.equal(torch.rand(3), expected)
    assert warnings.filters == filters


def test_resuming_with_another_loss_is_refused() -> None:
    with pytest.raises(StoppedError):
        vitrail.train("digits", "digits", out="run", on_step=stop_after(2, signal.SIGINT), **DIGITS)
    with pytest.raises(UsageError, match=r"another loss_function: None, not .*halve_softmax"):
        vitrail.train("digits", "digits", out="run", resume=True, loss=halve_softmax, **DIGITS)


SCRIPT = """
import pathlib, vitrail
with open("bodies", "a") as file:
    file.write("once\\n")
run = vitrail.finetune("photos", "model.safetensors", epochs=1, batch=4, workers=2, device="cpu")
assert run.accuracy is not None
"""


def test_a_script_without_a_main_guard_runs_its_body_once() -> None:
    Path("script.py").write_text(SCRIPT)
    ended = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert Path("bodies").read_text() == "once\n"
    assert ended.stdout == ""
    assert len(list(Path("runs").iterdir())) == 1


@pytest.mark.parametrize("kind", ["default", "paper", "bit"])
def test_a_kind_and_the_file_that_shows_it_give_the_same_bytes(kind: str, capsys: Capture) -> None:
    """On images that are not square, of which BiT's rule resizes both sides; as large as `recipe show` assumes."""
    for path in Path("photos").glob("*/*/*.png"):
        make_image(int(path.stem), (200, 64)).save(path)
    Path("my.toml").write_text(run_command("recipe", "show", kind, "--images", "10", capsys=capsys)[1])
    options: dict[str, Any] = SHORT | {"epochs": 4, "image_size": 32}
    named = vitrail.finetune("photos", "model.safetensors", recipe=kind, **options)
    shown = vitrail.finetune("photos", "model.safetensors", recipe="my.toml", **options)
    assert read_weights(named.folder) == read_weights(shown.folder)
    assert {**named.config, "notes": []} == {**shown.config, "notes": []}
    assert (named.config["train_preprocess"] is not None) == (kind == "bit")
    if kind == "bit":
        again = vitrail.finetune("photos", "model.safetensors", recipe=named.folder / "config.json", **options)
        assert read_weights(again.folder) == read_weights(named.folder)


def test_recipes_are_names_files_and_values(digits_run: Path) -> None:
    """The recipe in a run's config.json, as a value, trains as the name did."""
    recipe = vitrail.load_recipe(digits_run / "config.json")
    assert isinstance(recipe, vitrail.Recipe)
    assert read_weights(vitrail.train(recipe, "digits", **FAST).folder) == read_weights(digits_run)
    with pytest.raises(UsageError, match=r"fine-tuning takes .*; did you mean default\?$"):
        vitrail.finetune("photos", "model.safetensors", recipe="defalt")
    with pytest.raises(UsageError, match=r"from random weights: vitrail\.train\(recipe, data\)$"):
        vitrail.finetune("photos", "model.safetensors", recipe=recipe)
    with pytest.raises(UsageError, match=r"for fine-tuning, .*: vitrail\.finetune\(data, model, recipe=recipe\)$"):
        vitrail.train(build_finetune_recipe("paper", 10, 16), "digits")
    with pytest.raises(UsageError, match="the recipe default is for fine-tuning"):
        vitrail.train("default", "digits")


def test_a_recipe_whose_fields_have_wrong_types_is_refused() -> None:
    digits, paper = vitrail.load_recipe("digits"), build_finetune_recipe("paper", 10, 16)
    with pytest.raises(UsageError, match="AugmentConfig must be an object of fields, not None"):
        vitrail.train(dataclasses.replace(digits, augment=None), "digits")
    with pytest.raises(UsageError, match="image_size is '3'; it must be an integer"):
        vitrail.finetune("photos", "model.safetensors", recipe=dataclasses.replace(paper, image_size="3"))
    assert not Path("runs").exists()


def test_the_learning_rate_is_given_once() -> None:
    for name in ("lr", "optimizer.lr"):
        with pytest.raises(UsageError, match=f"{name} cannot be set here: lr sets it already; give one of them"):
            vitrail.train("digits", "digits", lr=1e-3, settings={name: 5e-3})
        with pytest.raises(UsageError, match=f"{name} cannot be set here"):
            vitrail.finetune("photos", "model.safetensors", lr=1e-3, settings={name: 5e-3})


def test_a_run_with_a_loss_of_its_own_says_so_as_a_recipe() -> None:
    first = vitrail.finetune("photos", "model.safetensors", loss=halve_softmax, **SHORT)
    recipe, warning = first.folder / "config.json", f"was trained with the loss {__name__}.halve_softmax"
    again = vitrail.finetune("photos", "model.safetensors", recipe=recipe, **SHORT)
    assert any(warning in note for note in again.notes)
    assert not any(warning in note for note in first.notes)
