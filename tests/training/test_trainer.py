"""A whole run: what lies in its folder agrees, the right weights are kept, it can be repeated, and it learns."""

import csv
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from tests import model_factory
from tests.training.test_training_run import (
    CPU,
    build_digits_run,
    build_finetune_recipe,
    build_recipe,
    build_small_model,
    open_images,
)
from vitrail.config import AugmentConfig, OptimizerConfig, ScheduleConfig
from vitrail.data.dataset import Dataset
from vitrail.data.sources import open_dataset
from vitrail.data.transforms import normalize
from vitrail.errors import DataError, DivergedError, UsageError
from vitrail.evaluation.predictions import Counts
from vitrail.evaluation.probe import measure_few_shot
from vitrail.files import compute_sha256
from vitrail.inference.classifier import Classifier
from vitrail.training import trainer
from vitrail.training.run_results import RESULT_COLUMNS, RunResult
from vitrail.training.trainer import Trainer
from vitrail.training.training_run import TrainingRun, adapt_to_dataset
from vitrail.weights.load import load


def run_training(task: TrainingRun, folder: Path, **options: Any) -> RunResult:
    result = Trainer(task, folder, **options).run()
    assert isinstance(result, RunResult)
    return result


def build_finetune_run(
    root: Path, dataset: Dataset | None = None, model: Any = None, changes: Any = None, **more: Any
) -> TrainingRun:
    """A run of fine-tuning on a few pictures; a step is an epoch."""
    dataset = dataset or open_images(root)
    chosen = build_finetune_recipe(**({"batch": len(dataset.splits["train"])} | (changes or {})))
    return TrainingRun(
        recipe=chosen,
        dataset=dataset,
        initial_model=adapt_to_dataset(model or build_small_model(), dataset, chosen),
        device=CPU,
        **more,
    )


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def read_kept_step(path: Path) -> int:
    """The step that a file of weights was written after, by its own words."""
    name = load(path).origin.name
    return int(name.split("step ")[1].split(" of ")[0])


# --- the folder ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingRun, Path, RunResult]:
    """A run of four epochs over the digits, with an average of the weights."""
    task = build_digits_run({"epochs": 4, "ema": 0.9, "optimizer": OptimizerConfig(kind="muon", lr=1e-2, clip=1.0)})
    path = tmp_path_factory.mktemp("whole") / "run"
    return task, path, run_training(task, path)


def test_a_mean_as_the_loss_gives_one_warning_and_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    """nn.CrossEntropyLoss() is one; halving a sum is none, and the check changes no bit."""
    losses = {"mean": nn.CrossEntropyLoss(), "sum": nn.CrossEntropyLoss(reduction="sum")}
    notes: dict[str, list[str]] = {}
    for name, loss in losses.items():
        task = build_digits_run({"epochs": 0.1, "label_smoothing": 0.0}, loss_function=loss)
        notes[name] = []
        run_training(task, tmp_path / name, notify=notes[name].append)
    assert sum("looks like a mean over the images" in note for note in notes["mean"]) == 1
    assert not any("mean" in note for note in notes["sum"])
    run_training(build_digits_run({"epochs": 0.1, "label_smoothing": 0.0}), tmp_path / "own")
    states = [load_file(tmp_path / name / "weights" / "last.safetensors") for name in ("sum", "own")]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


def test_results_and_events_tell_the_same_story(whole: tuple[TrainingRun, Path, RunResult]) -> None:
    _, path, result = whole
    table, told = read_rows(path / "results.csv"), read_events(path)
    assert tuple(table[0]) == RESULT_COLUMNS
    assert [event["event"] for event in told] == ["epoch"] * 4 + ["checkpoint", "end"]
    steps = [event["step"] for event in told[:-2]]
    assert steps == [math.ceil(epoch * 1439 / 64) for epoch in (1, 2, 3, 4)]
    for row, event in zip(table, told, strict=False):
        for name in RESULT_COLUMNS:
            assert float(row[name]) == pytest.approx(event[name], rel=1e-5)
        assert event["epoch"] == pytest.approx(min(event["step"] * 64, 4 * 1439) / 1439)
    assert float(table[-1]["train/loss"]) < float(table[0]["train/loss"])
    end = told[-1]
    counts = result.counts
    assert (end["split"], end["images"], end["correct"]) == (result.split, counts.images, counts.correct)
    assert (end["top1"], end["loss"]) == (counts.top1, counts.mean_loss)
    assert end["temperature"] == load(path / "weights" / "best.safetensors").temperature == result.temperature
    log = (path / "run.log").read_text().splitlines()
    assert len(log) == 5
    assert log[-1].endswith(f"test: {counts.top1:.2%} of 179 images correct; temperature {result.temperature:.3f}")
    config = json.loads((path / "config.json").read_text())
    assert (config["steps"], config["seed"], config["images"]) == (90, 0, {"train": 1439, "val": 179, "test": 179})
    assert config["recipe"]["optimizer"]["kind"] == "muon"
    assert config["classes"] == list("0123456789")


def test_the_accuracy_can_be_counted_again_from_the_tables(whole: tuple[TrainingRun, Path, RunResult]) -> None:
    task, path, result = whole
    said = read_rows(path / "predictions.csv")
    counts = result.counts
    right = [row["label"] == row["predicted"] for row in said]
    assert [row["correct"] == "1" for row in said] == right
    assert (len(said), sum(right)) == (counts.images, counts.correct)
    assert sum(float(row["loss"]) for row in said) / len(said) == pytest.approx(counts.mean_loss, abs=1e-5)
    split = task.dataset.splits["test"]
    assert [row["image"] for row in said] == [split.get_image_name(index) for index in range(len(split))]
    for row in read_rows(path / "per_class.csv"):
        name = row["class"]
        own = [line for line in said if line["label"] == name]
        called = [line for line in said if line["predicted"] == name]
        true = sum(line["predicted"] == name for line in own)
        assert (int(row["images"]), int(row["correct"])) == (len(own), true)
        assert int(row["train_images"]) == task.class_counts[int(name)]
        assert float(row["recall"]) == pytest.approx(true / len(own), abs=1e-6)
        assert row["precision"] == (f"{true / len(called):.6f}" if called else "")


def test_what_predict_says_is_what_the_run_wrote_down(whole: tuple[TrainingRun, Path, RunResult]) -> None:
    """The probabilities too: the temperature that was fitted is the one that is used."""
    task, path, result = whole
    best = load(path / "weights" / "best.safetensors")
    assert best.labels == tuple("0123456789")
    assert result.temperature != 1
    split = task.dataset.splits["test"]
    answers = Classifier(best, device="cpu")([split.read_image(index) for index in range(len(split))], top=1)
    for row, ((label, probability),) in zip(read_rows(path / "predictions.csv"), answers, strict=True):
        assert label == row["predicted"]
        assert probability == pytest.approx(float(row["probability"]), abs=2e-6)
    raw = (
        Classifier(dataclasses.replace(best, temperature=1.0), device="cpu").predict_proba([split.read_image(0)]).max()
    )
    assert float(raw) != pytest.approx(answers[0][0][1], abs=1e-4)


def test_the_same_run_gives_the_same_bytes_with_workers_too(tmp_path: Path) -> None:
    sums = []
    changes = {"dropout": 0.1, "ema": 0.9, "augment": AugmentConfig(crop="pad", flip=False, mixup=0.2)}
    for number, more in enumerate(({}, {"workers": 2}, {"seed": 1})):
        run_training(build_digits_run(changes, **more), tmp_path / str(number))
        sums.append(compute_sha256(tmp_path / str(number) / "weights" / "last.safetensors"))
    assert sums[0] == sums[1] != sums[2]


def test_a_probe_at_each_evaluation_tells_what_features_are_worth_and_changes_nothing(tmp_path: Path) -> None:
    plain = build_digits_run({"epochs": 2.0})
    run_training(plain, tmp_path / "plain")
    probed = dataclasses.replace(plain, probe_shots=3)
    run_training(probed, tmp_path / "probed")
    found = [event for event in read_events(tmp_path / "probed") if event["event"] == "probe"]
    evaluations = [event["step"] for event in read_events(tmp_path / "probed") if event["event"] == "epoch"]
    assert [event["step"] for event in found] == evaluations
    last, splits = load(tmp_path / "probed" / "weights" / "last.safetensors"), probed.dataset.splits
    again = measure_few_shot(
        last.model, splits["train"], splits["val"], probed.preprocess, probed.dataset.classes, shots=3
    )
    assert (found[-1]["shots"], found[-1]["top1"]) == (3, pytest.approx(again.top1))
    same = {compute_sha256(tmp_path / name / "weights" / "last.safetensors") for name in ("plain", "probed")}
    assert len(same) == 1
    with pytest.raises(DataError, match="training images of each class"):
        dataclasses.replace(plain, probe_shots=10**6)


def test_what_is_fine_tuned_remembers_where_it_came_from(tmp_path: Path) -> None:
    task = build_finetune_run(tmp_path, changes={"epochs": 2, "image_size": 16})
    result = run_training(task, tmp_path / "run")
    assert result.split == "test"
    last = load(tmp_path / "run" / "weights" / "last.safetensors")
    assert last.origin.name == f"test, fine-tuned on {task.dataset.name}, step 2 of 2"
    assert any(change.startswith("pos_embed") for change in last.origin.changes)
    assert last.preprocess == task.preprocess
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["name"] == "test"


def test_a_resnet_is_fine_tuned_too(tmp_path: Path) -> None:
    task = build_finetune_run(
        tmp_path,
        model=model_factory.build_trained(model_factory.build_bit()),
        changes={"epochs": 3, "trainable_layers": 1},
    )
    run_training(task, tmp_path / "run")
    assert task.initial_model is not None
    before, after = (
        trained.model.state_dict()
        for trained in (task.initial_model, load(tmp_path / "run" / "weights" / "last.safetensors"))
    )
    moved = {name.partition(".blocks.")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"stages.1", "norm.weight", "norm.bias", "head.fc.weight", "head.fc.bias"}


def test_without_test_images_the_validation_images_are_measured(tmp_path: Path) -> None:
    dataset = open_images(tmp_path)
    dataset = dataclasses.replace(dataset, splits={name: dataset.splits[name] for name in ("train", "val")})
    result = run_training(build_finetune_run(tmp_path, dataset, changes={"epochs": 2}), tmp_path / "run")
    assert (result.split, result.counts.images) == ("val", 8)
    assert {Path(row["image"]).parts[-3] for row in read_rows(tmp_path / "run" / "predictions.csv")} == {"val"}


# --- which weights are kept ------------------------------------------------------------------------------------------


def fake_evaluations(monkeypatch: pytest.MonkeyPatch, found: Iterator[Counts]) -> None:
    """Let the evaluations of a run find these counts, whatever its weights are."""
    monkeypatch.setattr(trainer, "evaluate_batches", lambda *_, **__: next(found))


@pytest.mark.parametrize(
    ("right", "kept"),
    [
        ((50, 90, 85, 80), 2),  # the standard error of 90 of 100 is 3
        ((50, 90, 88, 80), 3),
        ((90, 50, 93, 91, 89), 4),  # of 93 it is 2.55
        ((93, 91, 92, 80), 3),
        ((100, 100, 99), 2),  # there is no doubt about all
        ((0, 0, 0), 3),
        ((60, 70, 80), 3),
        ((80, 70, 60), 1),
    ],
)
def test_the_latest_weights_within_a_standard_error_of_the_best_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: tuple[int, ...], kept: int
) -> None:
    none = torch.zeros(2, 2, dtype=torch.int64)
    fake_evaluations(monkeypatch, (Counts(100, number, 100, 1.0, none) for number in right))
    run_training(
        build_finetune_run(tmp_path, changes={"epochs": len(right) * 4}), tmp_path / "run"
    )  # evaluated every fourth epoch
    assert read_kept_step(tmp_path / "run" / "weights" / "best.safetensors") == kept * 4
    assert read_kept_step(tmp_path / "run" / "weights" / "last.safetensors") == len(right) * 4


def test_a_balanced_run_is_judged_by_the_average_over_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First 95 of 100 are right, but none of the 5 tulips; then 80, four tulips among them."""
    found = [torch.tensor([[95, 0], [5, 0]]), torch.tensor([[76, 19], [1, 4]])]
    for balanced, kept in ((False, 4), (True, 8)):
        counts = [Counts(100, int(table.diagonal().sum()), 100, 1.0, table) for table in found]
        fake_evaluations(monkeypatch, iter(counts))
        path = tmp_path / f"run {balanced}"
        run_training(build_finetune_run(tmp_path, changes={"epochs": 8, "logit_adjustment": balanced}), path)
        assert read_kept_step(path / "weights" / "best.safetensors") == kept


def test_a_run_on_train_and_val_keeps_the_last_weights_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = torch.zeros(2, 2, dtype=torch.int64)
    fake_evaluations(monkeypatch, (Counts(100, number, 100, 1.0, none) for number in (90, 50, 40)))
    result = run_training(build_finetune_run(tmp_path, changes={"epochs": 6}, train_on_val=True), tmp_path / "run")
    assert result.temperature == 1
    best, last = (load(tmp_path / "run" / "weights" / f"{name}.safetensors") for name in ("best", "last"))
    assert best.temperature == 1
    assert read_kept_step(tmp_path / "run" / "weights" / "best.safetensors") == 12  # two steps an epoch: 16 images
    tensors = last.model.state_dict()
    assert all(torch.equal(tensors[name], value) for name, value in best.model.state_dict().items())


# --- several labels --------------------------------------------------------------------------------------------------


def open_colored_images(root: Path) -> Dataset:
    """Pictures that are red, green and blue or not, each with the names of those that it is; black has none."""
    root.mkdir()
    lines = []
    for number in range(8 * 24):
        parts = [(number >> place) & 1 for place in range(3)]
        shade = 160 + 8 * (number // 16)
        Image.new("RGB", (8, 8), tuple(part * shade for part in parts)).save(root / f"{number}.png")
        labels = [name for name, part in zip(("red", "green", "blue"), parts, strict=True) if part]
        split = "val" if number < 32 else "test" if number < 64 else "train"
        lines.append(json.dumps({"path": f"{number}.png", "labels": labels, "split": split}))
    (root / "list.jsonl").write_text("\n".join(lines) + "\n")
    return open_dataset(str(root / "list.jsonl"))


def test_several_labels_are_learned_as_questions_of_their_own(tmp_path: Path) -> None:
    dataset = open_colored_images(tmp_path / "set")
    assert dataset.classes == ("blue", "green", "red")
    settings = {"width": 32, "depth": 1, "mlp": 64, "heads": 2}
    chosen = build_recipe(
        model="ti4",
        settings=settings,
        batch=32,
        epochs=15,
        loss="sigmoid",
        optimizer=OptimizerConfig(lr=1e-2, clip=1.0),
        augment=AugmentConfig(crop="squash"),
    )
    result = run_training(TrainingRun(recipe=chosen, dataset=dataset, device=CPU), tmp_path / "run")
    said = read_rows(tmp_path / "run" / "predictions.csv")
    assert result.counts.images == len(said) == 32
    unlabeled = [row for row in said if not row["label"]]
    assert len(unlabeled) == 4  # black ones are judged too: right where none is predicted
    assert result.counts.correct == sum(row["predicted"] == row["label"] for row in said)
    assert result.counts.top1 > 0.95
    assert not (tmp_path / "run" / "per_class.csv").exists()
    best = load(tmp_path / "run" / "weights" / "best.safetensors")
    split = dataset.splits["test"]
    pixels = torch.stack([torch.tensor(list(Image.open(split.read_image(row)).getpixel((0, 0)))) for row in range(32)])
    views = pixels[:, :, None, None].expand(32, 3, 8, 8).to(torch.uint8)
    assert best.preprocess is not None
    with torch.inference_mode():
        logits = best.model(normalize(views, best.preprocess))
    truth = torch.tensor([[place in split.get_labels(row) for place in range(3)] for row in range(32)])
    assert ((logits > 0) == truth).float().mean() > 0.95  # all of an image's labels, not its likeliest alone
    scores = (logits / best.temperature).sigmoid()
    together = scores.maximum(1 - scores).prod(dim=1)  # that all labels are right
    assert together.tolist() == pytest.approx([float(row["probability"]) for row in said], abs=1e-5)


# --- runs that end early ---------------------------------------------------------------------------------------------


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match=r"exists already; .*--out"):
        run_training(build_finetune_run(tmp_path), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["letter.txt"]


def test_a_run_that_fails_before_its_first_evaluation_leaves_no_folder(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        run_training(build_finetune_run(tmp_path, changes={"epochs": 8}), tmp_path / "run", after_step=fail)
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    muon = {"trainable_layers": 0, "optimizer": OptimizerConfig(kind="muon", lr=1e-3)}
    with pytest.raises(UsageError, match="muon moves the matrices of a Transformer's blocks, and none is left"):
        run_training(build_finetune_run(tmp_path, changes=muon), tmp_path / "run")
    with pytest.raises(UsageError, match="a ResNet has neither dropout nor stochastic depth"):
        run_training(
            build_finetune_run(
                tmp_path, model=model_factory.build_trained(model_factory.build_bit()), changes={"dropout": 0.1}
            ),
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_a_run_that_diverges_later_keeps_what_it_learned_and_says_why(tmp_path: Path) -> None:
    """The rate is 0 in step 0, which is evaluated, and then far too high."""
    optimizer, schedule = OptimizerConfig(kind="sgd", lr=1e25, clip=None), ScheduleConfig(decay="constant", warmup=5)
    dataset = open_images(tmp_path, each=6)
    dataset = dataclasses.replace(dataset, splits=dataset.splits | {"val": dataset.splits["val"].drop_images(range(9))})
    task = build_finetune_run(tmp_path, dataset, changes={"epochs": 9, "optimizer": optimizer, "schedule": schedule})
    assert task.eval_every_epochs == 1
    with pytest.raises(DivergedError, match="nothing was updated"):
        run_training(task, tmp_path / "run")
    stopped = read_events(tmp_path / "run")[-1]
    assert stopped["event"] == "stopped"
    assert "the loss is" in stopped["reason"]
    names = [task.train_split.get_image_name(row) for row in range(len(task.train_split))]
    assert sorted(stopped["batch"]) == sorted(names)  # of that step: here all
    last = (tmp_path / "run" / "run.log").read_text().splitlines()[-1]
    assert last.endswith(f"stopped: {stopped['reason']}")
    assert len(read_rows(tmp_path / "run" / "results.csv")) >= 1
    assert load(tmp_path / "run" / "weights" / "best.safetensors").labels == dataset.classes
    assert not (tmp_path / "run" / "predictions.csv").exists()
