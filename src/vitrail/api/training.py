"""Train from Python: `vitrail.train`, `vitrail.finetune` and `vitrail.distill`."""

import contextlib
import dataclasses
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Unpack

import torch

from vitrail.api.keyword_errors import name_keywords
from vitrail.api.models import AnyModel, get_model_name, load_trained
from vitrail.api.options import FinetuneKeywords, RunKeywords, TrainKeywords, build_options, document_options
from vitrail.api.progress import NoteCollector, Progress, choose_progress
from vitrail.api.run import Run
from vitrail.config import Recipe
from vitrail.data.sources import DataSource
from vitrail.errors import StoppedError
from vitrail.report.write_report import write_run_outputs
from vitrail.runtime.workers import Notify
from vitrail.training import distill as distillation
from vitrail.training import finetune as finetuning
from vitrail.training import pretrain as pretraining
from vitrail.training.distill import DistillOptions
from vitrail.training.finetune import FinetuneOptions
from vitrail.training.loop import StepEnd
from vitrail.training.losses import LossFunction
from vitrail.training.pretrain import PretrainingOptions
from vitrail.training.run_execution import RunCallbacks
from vitrail.training.run_results import ValidationResult

OnStep = Callable[[StepEnd], None]
OnEvaluation = Callable[[ValidationResult], None]


@document_options(FinetuneOptions)
@name_keywords
def finetune(
    data: DataSource,
    model: AnyModel | None = None,
    *,
    minutes: float | None = None,
    recipe: str | Path | Recipe = "default",
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    loss: LossFunction | None = None,
    progress: Progress = True,
    notify: Notify | None = None,
    **options: Unpack[FinetuneKeywords],
) -> Run:
    """Fine-tune a trained model on your images, in a run folder: `vitrail finetune` from Python, with its defaults.

    Interrupted (Ctrl-C), it saves a checkpoint and raises `StoppedError`; the same call with `resume=True` and the
    folder as `out` continues.

        run = vitrail.finetune("photos", model="timm:vit_small_patch16_224.augreg_in21k", minutes=10)
        run.accuracy, run.report

    Arguments:

    - `data`: A folder or any other DATA of the commands, a list of (image, label), a pair of (images, labels), a torch
      Dataset, or a dict of those for train, val and test.
    - `model`: The model to start from: a name, a path, a `Run` or a `Trained`; by default `builtin`, the small
      pre-trained ViT inside the package.
    - `minutes`: Limit for the time of everything.
    - `recipe`: "default", "paper", "bit", a recipe file, or a `Recipe`.
    - `on_step`: Called with a `StepEnd` after each step.
    - `on_evaluation`: Called with a `ValidationResult` after each evaluation.
    - `loss`: A function of logits and targets that replaces the recipe's loss (see `vitrail.training.losses`).
    - `progress`: Whether a bar is shown, or a function that shows progress.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    if model is not None:
        get_model_name(model)  # refuses what is none
    notes = NoteCollector(notify)
    own = {"minutes": minutes, "recipe": recipe, "loss_function": loss, "must_resume": True}
    built = build_options(FinetuneOptions, own | options)
    initial = str(model.weights) if isinstance(model, Run) else model
    with _explain_early_interrupt(on_step) as count_step, _restore_global_state():
        callbacks = _make_callbacks(notes, progress, count_step, on_evaluation)
        (facts,) = finetuning.finetune(data, initial, built, callbacks)
    return Run(Path(facts["folder"]), tuple(notes))


@document_options(PretrainingOptions)
@name_keywords
def train(
    recipe: str | Path | Recipe,
    data: DataSource,
    *,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    loss: LossFunction | None = None,
    progress: Progress = True,
    notify: Notify | None = None,
    **options: Unpack[TrainKeywords],
) -> Run:
    """Train a model from random weights by a recipe, in a run folder: `vitrail train` from Python, with its defaults.

        run = vitrail.train("digits", data="digits", epochs=5)

    Arguments:

    - `recipe`: A name (`vitrail list recipes`), a file that `vitrail recipe show` printed, a run's config.json, or a
      `Recipe`.
    - `data`: As in `finetune`; without labels for a recipe that predicts masked patches.
    - `on_step`: Called with a `StepEnd` after each step.
    - `on_evaluation`: Called with a `ValidationResult` after each evaluation.
    - `loss`: A function of logits and targets that replaces the recipe's loss (see `vitrail.training.losses`).
    - `progress`: Whether a bar is shown, or a function that shows progress.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    notes = NoteCollector(notify)
    built = build_options(PretrainingOptions, {"loss_function": loss, "must_resume": True, **options})
    with _explain_early_interrupt(on_step) as count_step, _restore_global_state():
        callbacks = _make_callbacks(notes, progress, count_step, on_evaluation)
        facts = pretraining.pretrain(recipe, data, built, callbacks)
    return Run(Path(facts["folder"]), tuple(notes))


@document_options(DistillOptions)
@name_keywords
def distill(
    teacher: AnyModel,
    data: DataSource,
    model: AnyModel | None = None,
    *,
    recipe: str | Path | Recipe = "default",
    image_size: int | None = None,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    progress: Progress = True,
    notify: Notify | None = None,
    **options: Unpack[RunKeywords],
) -> Run:
    """Train a student that learns labels and what a teacher predicts: `vitrail distill` from Python, with its defaults.

        run = vitrail.distill("runs/finetune", model="ti16", data="photos")
        hard = {"distillation.kind": "hard", "distillation.weight": 0.7}
        run = vitrail.distill(run, model="model.safetensors", data="photos", settings=hard)

    Arguments:

    - `teacher`: The model to learn from: a name, a path, a `Run` or a `Trained`.
    - `data`: As in `finetune`, with labels.
    - `model`: The student: a trained model as in `finetune`, or a preset, whose weights are random; None for a recipe
      that names a preset.
    - `recipe`: A recipe of `finetune` for the student, or one of `train`, which names its own preset.
    - `image_size`: Resolution of a student that is fine-tuned; positions are resampled.
    - `on_step`: Called with a `StepEnd` after each step.
    - `on_evaluation`: Called with a `ValidationResult` after each evaluation.
    - `progress`: Whether a bar is shown, or a function that shows progress.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    if model is not None:
        get_model_name(model)  # refuses what is none
    notes = NoteCollector(notify)
    built = build_options(DistillOptions, {"recipe": recipe, "image_size": image_size, "must_resume": True, **options})
    student = str(model.weights) if isinstance(model, Run) else model
    with _explain_early_interrupt(on_step) as count_step, _restore_global_state():
        callbacks = _make_callbacks(notes, progress, count_step, on_evaluation)
        facts = distillation.distill(load_trained(teacher, notes), data, student, built, callbacks)
    return Run(Path(facts["folder"]), tuple(notes))


@contextlib.contextmanager
def _explain_early_interrupt(on_step: OnStep | None) -> Iterator[OnStep]:
    """Yield what is called after a step; Ctrl-C before the first is an error that says how to go on."""
    has_stepped = False

    def count_step(step_end: StepEnd) -> None:
        nonlocal has_stepped
        has_stepped = True
        if on_step is not None:
            on_step(step_end)

    try:
        yield count_step
    except KeyboardInterrupt:
        if has_stepped:
            raise
        message = "SIGINT: stopped before the first step, so this call trained nothing; the same call starts again"
        raise StoppedError(message, signal.SIGINT) from None


@contextlib.contextmanager
def _restore_global_state() -> Iterator[None]:
    """Leave torch's global random numbers and the filters of warnings as they were before the run."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        yield


def _make_callbacks(
    notes: NoteCollector, progress: Progress, on_step: OnStep, on_evaluation: OnEvaluation | None
) -> RunCallbacks:
    callbacks = RunCallbacks(notify=notes, show_progress=choose_progress(progress), write_report=write_run_outputs)
    return dataclasses.replace(
        callbacks,
        on_step=on_step,
        on_evaluation=on_evaluation or callbacks.on_evaluation,
    )
