"""What training commands share: option groups as options of a run, callbacks, notes and dry runs."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from vitrail.api.options import build_options, list_option_names
from vitrail.cli import output
from vitrail.cli.arguments.training import DistillArguments, FinetuneArguments, TrainArguments
from vitrail.config import Recipe
from vitrail.data.dataset import Dataset
from vitrail.formatting import format_bytes, format_duration, format_rate, pluralize
from vitrail.report.result_files import draw_first_batch
from vitrail.report.write_report import write_run_outputs
from vitrail.training.dataset_checks import list_dataset_notes
from vitrail.training.run_execution import RunCallbacks
from vitrail.training.time_estimate import RunEstimate, estimate_run
from vitrail.training.training_run import TrainingRun, make_run_config

T = TypeVar("T")
_TRAINING_COMMANDS = ("distill", "finetune", "train")


def build_command_options(kind: type[T], arguments: TrainArguments | FinetuneArguments | DistillArguments) -> T:
    """The options of a run from a command's arguments, which have the same names."""
    fields: list[tuple[Any, str]] = [(arguments, field.name) for field in dataclasses.fields(arguments)]
    values: dict[str, Any] = {}
    for holder, name in fields:
        value = getattr(holder, name)
        if dataclasses.is_dataclass(value):
            fields += [(value, field.name) for field in dataclasses.fields(value)]
        else:
            values[name] = value
    return build_options(kind, {name: value for name, value in values.items() if name in list_option_names(kind)})


def make_callbacks() -> RunCallbacks:
    """Callbacks that print notes and progress, and write the report."""
    is_command = sys.argv[1:2] and sys.argv[1] in _TRAINING_COMMANDS  # not where main is called from Python
    return RunCallbacks(
        notify=output.print_note,
        show_progress=output.show_progress,
        write_report=write_run_outputs,
        command=sys.argv[1:] if is_command else (),
    )


def print_dataset_notes(dataset: Dataset) -> None:
    """Print what to know of a dataset."""
    for note in list_dataset_notes(dataset):
        output.print_note(note)


def print_dry_run(run: TrainingRun, *, as_json: bool) -> None:
    """Print what a run would do and take, and draw its first batch."""
    output.print_note("timing a few steps")
    estimate = estimate_run(run)
    picture = Path("runs") / "dry-run" / "train_batch0.jpg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_first_batch(run, picture)
    if as_json:
        output.print_json(make_run_config(run) | {"estimate": dataclasses.asdict(estimate), "picture": str(picture)})
        return
    output.print_table([*_describe_run(run), *_describe_estimate(run, estimate), ("first batch", str(picture))])
    print("\n--json shows the whole configuration. Nothing was trained.")


def _describe_run(run: TrainingRun) -> Iterator[tuple[str, str]]:
    recipe, plan, preprocess = run.recipe, run.plan, run.preprocess
    optimizer, schedule = recipe.optimizer, recipe.schedule
    yield "data", f"{run.dataset.name}: " + ", ".join(f"{k} {len(v):,}" for k, v in run.dataset.splits.items())
    yield _describe_targets(run)
    yield "model", run.initial_model.origin.name if run.initial_model else f"{recipe.model}, random weights"
    if run.teacher is not None and recipe.distillation is not None:
        yield "teacher", f"{run.teacher.origin.name}; {recipe.distillation.summary}"
    height, width = preprocess.size
    mean, std = (" ".join(f"{value:g}" for value in values) for values in (preprocess.mean, preprocess.std))
    yield "input", f"{height} x {width} pixels, mean {mean}, std {std}"
    yield "steps", f"{plan.total_steps:,} with a batch of {plan.batch_size:,}, {pluralize(recipe.epochs, 'epoch')}"
    rates = f"learning rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}"
    yield "optimizer", f"{optimizer.kind}, {rates}"
    if recipe.lora is not None:
        yield "trained", f"the head and {recipe.lora.summary}"
    yield "schedule", f"{pluralize(schedule.warmup, 'step')} of warm-up, then {schedule.decay}"
    yield "augmentation", _describe_augmentation(recipe)
    modes = ["sharded"] * run.is_sharded + ["compiled"] * run.is_compiled
    yield "device", ", ".join([str(run.device), pluralize(plan.micro_batches, "micro-batch"), *modes])


def _describe_targets(run: TrainingRun) -> tuple[str, str]:
    masked, counts = run.recipe.masked, run.class_counts
    if masked is None:
        fewest = "" if min(counts) == max(counts) else f"{min(counts):,} to "
        return "classes", f"{len(run.dataset.classes):,}, with {fewest}{pluralize(max(counts), 'image')} each"
    masked_patches = masked.count_masked(run.num_patches)
    return "masked", f"{masked_patches} of {run.num_patches} patches ({masked.kind}), target: {masked.target}"


def _describe_augmentation(recipe: Recipe) -> str:
    defaults = {field.name: field.default for field in dataclasses.fields(recipe.augment)}
    parts = [recipe.augment.crop + " crop"]
    for name, value in dataclasses.asdict(recipe.augment).items():
        if name != "crop" and value != defaults[name]:
            parts.append(f"no {name}" if value is False else f"{name} {value}")
    return ", ".join(parts)


def _describe_estimate(run: TrainingRun, estimate: RunEstimate) -> Iterator[tuple[str, str]]:
    yield "time", f"about {format_duration(estimate.seconds)} at {format_rate(estimate.images_per_second)}"
    needed, available = format_bytes(estimate.memory_bytes), format_bytes(estimate.available_bytes)
    yield "memory", f"needs about {needed}, {available} available{_suggest_micro_batches(run, estimate)}"


def _suggest_micro_batches(run: TrainingRun, estimate: RunEstimate) -> str:
    if estimate.memory_bytes <= estimate.available_bytes * 0.9:
        return ""
    parts = -(-estimate.memory_bytes * run.micro_batches * 10 // (estimate.available_bytes * 8))
    return f"; --micro-batches {parts} computes a step in parts"
