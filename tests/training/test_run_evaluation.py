"""Masked runs: they learn from images alone and leave a ViT. Any run's end: precisions measured on its best weights."""

import dataclasses
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.data.image_files import encode_image, make_image, write_image_folder
from tests.runtime.test_distributed import read_weights, start_ranks, wait_for_ranks
from tests.training.test_resume import kill_run
from tests.training.test_trainer import build_finetune_run, run_training
from tests.training.test_training_run import CPU, build_recipe
from vitrail.config import AugmentConfig, MaskedConfig, OptimizerConfig, ScheduleConfig
from vitrail.data.dataset import Dataset
from vitrail.data.sources import open_dataset
from vitrail.data.transforms import normalize
from vitrail.errors import DataError, ModelError, StoppedError, UsageError
from vitrail.evaluation.probe import measure_few_shot
from vitrail.files import compute_sha256
from vitrail.inference.precision import list_available_precisions
from vitrail.model.masked import MaskedViT
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.training import checkpoint, loop, trainer
from vitrail.training.loop import iterate_split_batches
from vitrail.training.run_evaluation import evaluate_masked
from vitrail.training.run_results import MaskedCounts, PretrainingResult, ValidationResult
from vitrail.training.time_estimate import estimate_run
from vitrail.training.trainer import Trainer
from vitrail.training.training_run import TrainingRun, adapt_to_dataset, make_run_config
from vitrail.weights.load import load, save

MPP = MaskedConfig(kind="mpp", mask_ratio=0.5, target="mean-color")
MAE = MaskedConfig(kind="mae", mask_ratio=0.75, target="normalized-pixels")
KINDS = pytest.mark.parametrize("masked", [MPP, MAE], ids=["mpp", "mae"])
SGD = OptimizerConfig(kind="sgd", lr=0.1, weight_decay=0.01, clip=1.0)


def task(
    masked: MaskedConfig = MPP,
    *,
    group: ProcessGroup = SINGLE_PROCESS,
    changes: dict[str, Any] | None = None,
    **more: Any,
) -> TrainingRun:
    """Six steps of 103 digits, of which the last has 85; 16 patches each."""
    fields: dict[str, Any] = {
        "batch": 103,
        "epochs": 600 / 1439,
        "masked": masked,
        "schedule": ScheduleConfig(warmup=3),
    }
    made = build_recipe(**(fields | (changes or {})))
    return TrainingRun(**({"recipe": made, "dataset": open_dataset("digits"), "device": CPU, "group": group} | more))


def pretrain_run(task: TrainingRun, folder: Path, **options: Any) -> PretrainingResult:
    result = Trainer(task, folder, **options).run()
    assert isinstance(result, PretrainingResult)
    return result


def losses(folder: Path) -> list[float]:
    """Of training and validation, at the last evaluation."""
    rows = [line.split(",") for line in (folder / "results.csv").read_text().splitlines()]
    return [float(rows[-1][rows[0].index(name)]) for name in ("train/loss", "val/loss")]


def sums(folder: Path) -> list[str]:
    return [compute_sha256(folder / "weights" / f"{name}.safetensors") for name in ("best", "last")]


# --- the same weights, however they are computed ---------------------------------------------------------------------


@KINDS
def test_a_run_that_is_stopped_or_has_workers_ends_with_the_same_bits(tmp_path: Path, masked: MaskedConfig) -> None:
    """With all that draws or remembers: dropout, stochastic depth, augmentation, an average of weights."""
    changes = {
        "dropout": 0.1,
        "stochastic_depth": 0.2,
        "ema": 0.9,
        "augment": AugmentConfig(crop="pad", randaugment=(1, 5)),
    }
    whole = pretrain_run(task(masked, changes=changes), tmp_path / "whole", save_every_seconds=0.0)

    def ask(moment: Any) -> None:
        if moment.step in (1, 4):
            os.kill(os.getpid(), signal.SIGTERM)

    for step in (1, 4):
        with pytest.raises(StoppedError, match=f"stopped after step {step} of 6"):
            pretrain_run(task(masked, changes=changes), tmp_path / "stopped", after_step=ask, resume=True)
    again = pretrain_run(task(masked, changes=changes, workers=1), tmp_path / "stopped", resume=True)
    assert sums(tmp_path / "stopped") == sums(tmp_path / "whole")
    assert dataclasses.replace(again, seconds=0) == dataclasses.replace(whole, seconds=0)
    assert pretrain_run(task(masked, changes=changes, seed=1), tmp_path / "other").loss != whole.loss
    assert sums(tmp_path / "other")[1] != sums(tmp_path / "whole")[1]


def test_a_masked_run_that_is_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    made = task(changes={"epochs": 1.0, "dropout": 0.1})
    pretrain_run(made, tmp_path / "whole", save_every_seconds=0.0)
    statuses = [kill_run(made, tmp_path / "killed", seconds) for seconds in (0.15, 0.25, 0.35)]
    assert any(os.WIFSIGNALED(status) for status in statuses)
    pretrain_run(made, tmp_path / "killed", save_every_seconds=0.0, resume=True)
    assert sums(tmp_path / "killed") == sums(tmp_path / "whole")


@KINDS
def test_ranks_parts_and_shards_compute_what_one_process_computes(
    tmp_path: Path, masked: MaskedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is hidden, and by which patch of which image, does not depend on who computes it."""
    monkeypatch.setattr(loop, "_EVAL_BATCH_SIZE", 90)  # so that ranks have different numbers of batches
    changes = {"optimizer": SGD, "ema": 0.9}
    pretrain_run(task(masked, changes=changes), tmp_path / "one")
    ways: dict[str, dict[str, Any]] = {"two": {"micro_batches": 2}, "sharded": {"shard": True, "micro_batches": 2}}
    for name, way in ways.items():

        def work(group: ProcessGroup, name: str = name, way: dict[str, Any] = way) -> None:
            result = Trainer(
                task(masked, group=group, changes=changes, **way),
                tmp_path / name,
            ).run()
            assert (result is None) == (group.rank > 0)

        assert wait_for_ranks(start_ranks(2, work)) == [0, 0]
    pretrain_run(task(masked, changes=changes, micro_batches=5), tmp_path / "parts")
    for name in (*ways, "parts"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
        torch.testing.assert_close(read_weights(tmp_path / name), read_weights(tmp_path / "one"), atol=1e-5, rtol=0)


def test_a_rank_without_an_image_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    few = {"optimizer": SGD, "epochs": 104 / 1439, "schedule": ScheduleConfig()}  # 103 images, and then one
    pretrain_run(task(changes=few), tmp_path / "one")

    def work(group: ProcessGroup) -> None:
        Trainer(task(group=group, changes=few), tmp_path / "two").run()

    assert wait_for_ranks(start_ranks(2, work)) == [0, 0]
    torch.testing.assert_close(read_weights(tmp_path / "two"), read_weights(tmp_path / "one"), atol=1e-5, rtol=0)


def test_a_checkpoint_holds_the_heads_and_the_weights_that_are_kept_do_not(tmp_path: Path) -> None:
    made = task(MAE, changes={"optimizer": OptimizerConfig(kind="muon", lr=3e-3)})
    pretrain_run(made, tmp_path / "run")
    newest = checkpoint.read_newest_checkpoint(tmp_path / "run" / "checkpoints", print)
    assert newest is not None
    names, model = newest.tensors["model"].keys(), made.build_model()
    assert isinstance(model, MaskedViT)
    assert names == model.state_dict().keys()
    assert {name.partition(".")[0] for name in names} == {"vit", "decoder", "head", "mask_token"}
    kept = load(tmp_path / "run" / "weights" / "last.safetensors").model.state_dict()
    assert kept.keys() == {name.removeprefix("vit.") for name in names if name.startswith("vit.")}
    assert all(torch.equal(kept[name], newest.tensors["model"][f"vit.{name}"]) for name in kept)
    moved = newest.tensors["optimizer"]
    assert "decoder.blocks.0.attn.qkv.weight/momentum_buffer" in moved  # muon's, as the encoder's are
    assert "vit.blocks.0.attn.qkv.weight/momentum_buffer" in moved
    assert "head.weight/exp_avg" in moved


@KINDS
def test_activations_computed_again_are_the_same_run(tmp_path: Path, masked: MaskedConfig) -> None:
    """To rounding: of a block without dropout, which is what recomputing repeats."""
    losses = [pretrain_run(task(masked, recompute=again), tmp_path / str(again)).loss for again in (False, True)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# --- what is written -------------------------------------------------------------------------------------------------


@KINDS
def test_the_tables_tell_what_was_measured_and_the_lowest_loss_is_kept(
    tmp_path: Path, masked: MaskedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter((2.0, 1.0, 1.5))

    def with_loss(*arguments: Any, **options: Any) -> MaskedCounts:
        counts = evaluate_masked(*arguments, **options)
        return dataclasses.replace(counts, loss=next(told) * counts.images)

    monkeypatch.setattr(trainer, "evaluate_masked", with_loss)
    seen: list[ValidationResult] = []
    changes = {"epochs": 3.0, "batch": 480}
    result = pretrain_run(task(masked, changes=changes), tmp_path / "run", after_evaluation=seen.append)
    assert [evaluation.val.mean_loss for evaluation in seen] == [2.0, 1.0, 1.5]
    lines = [line.split(",") for line in (tmp_path / "run" / "results.csv").read_text().splitlines()]
    colours = masked.target == "mean-color"
    for line, evaluation in zip(lines[1:], seen, strict=True):
        row = dict(zip(lines[0], line, strict=True))
        assert float(row["val/loss"]) == pytest.approx(evaluation.val.mean_loss)
        assert (row["metrics/accuracy_top1"] != "") == colours
        if colours:
            assert float(row["metrics/accuracy_top1"]) == pytest.approx(evaluation.val.top1, rel=1e-5)
            assert evaluation.val.top1 <= evaluation.val.top5
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["epoch"] * 3 + ["checkpoint", "pretrained"]
    assert events[-1]["loss"] == result.loss == 1.0
    assert result.top1 == seen[1].val.top1
    hidden = {"mpp": 8, "mae": 12}[masked.kind]
    assert (result.images, result.patches) == (179, 179 * hidden)
    best, last = (load(tmp_path / "run" / "weights" / f"{name}.safetensors") for name in ("best", "last"))
    assert ("step 6 of 9" in best.origin.name, "step 9 of 9" in last.origin.name) == (True, True)
    assert best.origin.name.startswith(f"pre-trained without labels ({masked.kind}, {masked.target}) on digits")
    assert (best.labels, best.model.config.classes) == (None, 0)
    assert not (tmp_path / "run" / "predictions.csv").exists()
    assert make_run_config(task(masked))["recipe"]["masked"]["kind"] == masked.kind


def test_a_run_begun_before_recipes_could_be_masked_goes_on(tmp_path: Path) -> None:
    """A field that a configuration does not have is one that was not set; any other difference is still one."""
    from tests.training.test_training_run import build_digits_run

    made = build_digits_run({})
    Trainer(made, tmp_path / "run").run()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["recipe"].pop("masked") is None
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert Trainer(made, tmp_path / "run", resume=True).run() is not None
    with pytest.raises(UsageError, match=r"was started with another recipe\.masked: None, not \{'kind': 'mpp'"):
        pretrain_run(
            task(changes={"batch": 64, "epochs": 1.0, "schedule": ScheduleConfig(warmup=2)}),
            tmp_path / "run",
            resume=True,
        )


# --- what it is worth ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """3,400 windows of 16 x 16 pixels out of two real photos at half their size, in folders and without labels.

    The photos are cut into upright strips, every fourth of which is for val, so that no pixel is in both.
    """
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    halves: list[Any] = [Image.fromarray(image).reduce(2) for image in load_sample_images().images]
    for split, count in (("train", 3000), ("val", 400)):
        (root / split).mkdir()
        for number in range(count):
            image = halves[number % 2]
            strips = [strip for strip in range(image.width // 32) if (strip % 4 == 3) == (split == "val")]
            left = 32 * int(generator.choice(strips)) + int(generator.integers(0, 17))
            top = int(generator.integers(0, image.height - 15))
            image.crop((left, top, left + 16, top + 16)).save(root / split / f"{number}.png")
    return open_dataset(str(root))


def test_the_loss_falls_below_the_entropy_of_the_colours_on_real_images(photos: Dataset, tmp_path: Path) -> None:
    """Knowing how frequent each colour is in the very images held out costs their entropy; the patches around tell
    more than that."""
    settings = {"width": 64, "depth": 2, "mlp": 128, "heads": 2}
    optimizer, schedule = OptimizerConfig(kind="muon", lr=5e-3, clip=1.0), ScheduleConfig(warmup=5)
    changes = {"model": "ti4", "settings": settings, "image_size": 16, "batch": 60, "epochs": 1.0}
    changes |= {"augment": AugmentConfig(crop="squash"), "optimizer": optimizer, "schedule": schedule}
    made = task(changes=changes, dataset=photos)
    assert photos.classes == ()
    result = pretrain_run(made, tmp_path / "run")
    counts = torch.zeros(512)
    model = made.build_model()
    assert isinstance(model, MaskedViT)
    for batch in iterate_split_batches(made, "val"):
        targets = model.compute_targets(normalize(batch.pixels, made.preprocess), batch.targets)
        counts += torch.bincount(targets.flatten(), minlength=512)
    shares = counts[counts > 0] / counts.sum()
    entropy = float(-(shares * shares.log()).sum())
    assert entropy > 2  # there is something to tell
    assert result.loss < entropy - 0.5


@KINDS
def test_evaluation_is_the_same_in_batches_of_any_size(masked: MaskedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    made = task(masked)
    model = made.build_model()
    assert isinstance(model, MaskedViT)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    counts = []
    for size in (256, 64, 7):
        monkeypatch.setattr(loop, "_EVAL_BATCH_SIZE", size)
        counts.append(evaluate_masked(model, iterate_split_batches(made, "val"), made.preprocess))
    assert counts[0].images == 179
    assert counts[0].examples is not None
    assert len(counts[0].examples.masking) == 6
    for other in counts[1:]:
        assert other.mean_loss == pytest.approx(counts[0].mean_loss, rel=1e-6)
        assert (other.correct, other.correct_top5, other.patches) == (
            counts[0].correct,
            counts[0].correct_top5,
            179 * model.num_masked,
        )


def test_scores_by_hand() -> None:
    """A head of nothing but a bias tells every patch the same colours, so the scores are the shares of these."""
    made = task()
    model = made.build_model()
    assert isinstance(model, MaskedViT)
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([3.0, 2.9, 2.8, 2.7, 2.6, -9, -9, -9]))
    counts = evaluate_masked(model, iterate_split_batches(made, "val"), made.preprocess)
    targets = torch.cat(
        [
            model.compute_targets(normalize(batch.pixels, made.preprocess), batch.targets).flatten()
            for batch in iterate_split_batches(made, "val")
        ]
    )
    assert counts.top1 == pytest.approx(float((targets == 0).float().mean()))
    assert counts.top5 == pytest.approx(float((targets < 5).float().mean()))
    assert counts.mean_loss == pytest.approx(float(-model.head.bias.detach().log_softmax(0)[targets].mean()), rel=1e-5)


@KINDS
def test_what_was_learned_is_fine_tuned_and_probed_as_any_model(tmp_path: Path, masked: MaskedConfig) -> None:
    made = task(masked, probe_shots=2)
    pretrain_run(made, tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    told = next(event for event in events if event["event"] == "probe")
    best = load(tmp_path / "run" / "weights" / "best.safetensors")
    splits = made.dataset.splits
    again = measure_few_shot(best.model, splits["train"], splits["val"], made.preprocess, made.dataset.classes, shots=2)
    assert told["top1"] == pytest.approx(again.top1)
    tuned = build_recipe(model=None, settings={}, image_size=None)
    start = adapt_to_dataset(best, made.dataset, tuned)
    assert start.model.config.classes == 10
    assert all(torch.equal(start.model.state_dict()[name], value) for name, value in best.model.state_dict().items())
    result = Trainer(
        TrainingRun(recipe=tuned, dataset=made.dataset, initial_model=start, device=CPU),
        tmp_path / "tuned",
    ).run()
    assert result is not None
    assert load(tmp_path / "tuned" / "weights" / "last.safetensors").origin.name.startswith(
        "pre-trained without labels"
    )


def test_images_without_labels_are_enough_and_what_needs_labels_is_refused(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / "photos").mkdir(exist_ok=True)
        (tmp_path / "photos" / f"{number}.jpg").write_bytes(encode_image(make_image(number)))
    dataset = open_dataset(str(tmp_path / "photos"))
    settings = {"width": 32, "depth": 1, "mlp": 64, "heads": 2}
    small = {
        "model": "ti4",
        "settings": settings,
        "image_size": 8,
        "batch": 8,
        "epochs": 1.0,
        "schedule": ScheduleConfig(),
    }
    result = pretrain_run(task(changes=small, dataset=dataset), tmp_path / "run")
    assert result.images == len(dataset.splits["val"])
    with pytest.raises(DataError, match="has no labels for --probe to learn from"):
        task(changes=small, dataset=dataset, probe_shots=1)
    with pytest.raises(DataError, match="has no labels to learn"):
        task(changes=small | {"masked": None}, dataset=dataset)
    empty = write_image_folder(tmp_path / "set", "train", "val", each=3)
    (empty / "train" / "orchid").mkdir()
    assert (
        task(changes=small | {"batch": 4}, dataset=open_dataset(str(empty))).plan.total_steps == 2
    )  # no class needs an image


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"augment": AugmentConfig(mixup=0.2)}, "mixup is for learning from labels, and this recipe is masked"),
        ({"label_smoothing": 0.1}, "label_smoothing is for learning from labels"),
        ({"logit_adjustment": True}, "logit_adjustment is for learning from labels"),
        ({"trainable_layers": 2}, "layers is for learning from labels"),
        ({"optimizer": OptimizerConfig(lr=1e-3, layer_decay=0.75)}, "layer_decay is for learning from labels"),
        ({"model": None}, "a masked recipe starts from random weights"),
        ({"model": "bit-r50x1", "settings": {"channels": 1}}, "masked pre-training needs a ViT or a hybrid"),
        ({"model": "ti8"}, "a mask_ratio of 50% masks 0 of 1 patches"),
    ],
)
def test_what_cannot_be_learned_without_labels_is_refused_before_it(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        task(changes=changes)


@KINDS
def test_an_estimate_counts_what_a_masked_step_keeps(masked: MaskedConfig) -> None:
    made = task(masked, changes={"batch": 64})
    estimate = estimate_run(made)
    assert 0 < estimate.seconds < math.inf
    assert estimate.memory_bytes > 64 * 1000


@pytest.fixture(autouse=True)
def _without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """To translate a model for it takes seconds."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)


def test_a_large_model_is_measured_when_it_is_made_and_its_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.evaluation.precision_benchmark.MIN_MULTIPLY_ADDS", 0)
    task = build_finetune_run(tmp_path)
    run_training(task, tmp_path / "run")
    best, last = (load(tmp_path / "run" / "weights" / f"{name}.safetensors") for name in ("best", "last"))
    assert {tried.precision for tried in best.precision_measurements} == set(list_available_precisions(best)) - {
        "float32",
        "openvino-int8",
    }
    val = len(task.dataset.splits["val"])
    assert all(1 <= tried.images <= val for tried in best.precision_measurements)
    assert best.activation_ranges
    assert not last.precision_measurements, "it is not the one that is used"
    log = (tmp_path / "run" / "run.log").read_text()
    assert all(tried.describe() in log for tried in best.precision_measurements)


@pytest.mark.attack
@pytest.mark.parametrize("small", [0, 5 * 10**8], ids=["measured", "too small to be measured"])
def test_equal_runs_leave_equal_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attacked: Callable[[str, str], None], small: int
) -> None:
    """Speeds are never measured twice alike, so they lie beside the weights."""
    monkeypatch.setattr("vitrail.evaluation.precision_benchmark.MIN_MULTIPLY_ADDS", small)
    task = build_finetune_run(tmp_path)
    for name in ("one", "two"):
        run_training(task, tmp_path / name)
    files = [(tmp_path / name / "weights" / "best.safetensors") for name in ("one", "two")]
    assert bool(load(files[0]).precision_measurements) == (small == 0)
    assert files[0].with_name("best.precision.json").exists() == (small == 0)
    assert files[0].read_bytes() == files[1].read_bytes()
    attacked("the same run twice", "the same bytes of best.safetensors")


def test_what_was_measured_is_of_the_weights_it_lies_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.evaluation.precision_benchmark.MIN_MULTIPLY_ADDS", 0)
    run_training(build_finetune_run(tmp_path), tmp_path / "run")
    best = tmp_path / "run" / "weights" / "best.safetensors"
    measured, beside = load(best), best.with_name("best.precision.json")
    save(measured, tmp_path / "alone.safetensors")
    assert load(tmp_path / "alone.safetensors").precision_measurements == measured.precision_measurements, (
        "a file that is written by itself has it inside"
    )
    save(dataclasses.replace(measured, precision_measurements=(), temperature=2.0), best, overwrite=True)
    assert load(best).precision_measurements == (), "other weights took their place"
    text = beside.read_text()
    for damaged in (
        "{",
        "[]",
        "null",
        text.replace('"speedup": ', '"speedup": "x'),
        text.replace('"processor"', '"x"'),
    ):
        save(dataclasses.replace(measured, precision_measurements=()), best, overwrite=True)
        beside.write_text(damaged)
        with pytest.raises(ModelError, match=r"best\.precision\.json"):
            load(best)
    content = json.loads(text)
    for wrong in (None, 3, {"speedup": 1}, [None]):
        beside.write_text(json.dumps(content | {"precision_measurements": wrong}))
        with pytest.raises(ModelError, match=r"best\.precision\.json is damaged: .* Remove it"):
            load(best)
