"""What every training command does: options of a run, training with progress and upload, and its files at the end.

`pretrain` and `finetune` build a `TrainingRun` and call `execute_run`. Drawing and the report stand above this package,
so the caller passes them in (`RunCallbacks.write_report`).
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitrail.config import PreprocessConfig, Recipe
from vitrail.data.dataset import Dataset
from vitrail.data.relabel import relabel_dataset
from vitrail.data.sources import DataSource, advise_data_check, open_dataset
from vitrail.errors import ChangedDataError, DataError, RemoteError, UsageError
from vitrail.evaluation.label_metrics import measure_labels
from vitrail.evaluation.prediction_tables import write_label_scores
from vitrail.formatting import format_rate
from vitrail.runtime import distributed
from vitrail.runtime.distributed import ProcessGroup
from vitrail.runtime.workers import Notify, ShowProgress, count_loader_workers, hide_progress, ignore_note
from vitrail.training import run_folder, upload
from vitrail.training.class_weights import ClassWeights, resolve_class_weights
from vitrail.training.dataset_checks import warn_about_imbalance
from vitrail.training.loop import StepEnd
from vitrail.training.losses import LossFunction
from vitrail.training.run_results import (
    PretrainingResult,
    RunLog,
    RunResult,
    ValidationResult,
)
from vitrail.training.step_verification import TOLERANCE, is_deterministic
from vitrail.training.time_estimate import Deadline
from vitrail.training.trackers import Track, list_trackers, open_loggers
from vitrail.training.trainer import Trainer
from vitrail.training.training_run import TrainingRun
from vitrail.visualization import image_grids
from vitrail.weights.trained import Trained

WriteReport = Callable[[TrainingRun, RunResult | PretrainingResult, Path, Deadline | None, Notify], None]
"""Draws a finished run's figures and writes its report; called with the run, its result, folder and deadline."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCallbacks:
    """How a run reports to its caller; by default it is silent and writes no report."""

    notify: Notify = ignore_note
    show_progress: ShowProgress = hide_progress
    write_report: WriteReport = lambda *_: None
    on_step: Callable[[StepEnd], None] = lambda _: None
    on_evaluation: Callable[[ValidationResult], None] = lambda _: None
    command: Sequence[str] = ()
    """The command line that started the run, to be logged with it."""


SILENT = RunCallbacks()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how a run is computed."""

    out: str | Path | None = None
    """The run's folder, or the URL that it is uploaded to; by default runs/COMMAND, runs/COMMAND-2, ..."""
    resume: bool = False
    must_resume: bool = False
    """Whether there must be a run to resume; a command that is given again and again starts one."""
    overwrite: bool = False
    save_every: float = 10
    """Minutes from one checkpoint to the next; 0 for one after every step."""
    verify_every: int = 0
    """Steps from one that is computed twice to the next; 0 for none."""
    track: Track = ()
    """Where the numbers of every step are logged besides the run folder."""
    seed: int = 0
    device: str | None = None
    workers: int | None = None
    """Processes that prepare images; by default one for each core but one."""
    micro_batches: int = 1
    recompute: bool = False
    shard: bool = False
    deterministic: bool = False
    strict: bool = False
    """Refuse unreadable images and empty class folders."""
    balanced: bool = False
    """Give every class the same weight (logit adjustment)."""
    train_on_val: bool = False
    relabel: Path | None = None
    """Decisions on label errors (suspects.csv), applied to the dataset before anything else."""
    class_weights: ClassWeights | None = None
    """What multiplies the loss of each class's labels: a mapping, or a CSV or JSON file."""
    loss_function: LossFunction | None = None
    """A loss that replaces the recipe's."""
    teacher: Trained | None = None
    """A model whose predictions or features are learned too (`recipe_overrides.set_distillation`)."""

    def __post_init__(self) -> None:
        if not 0 <= self.save_every < math.inf:
            raise UsageError(f"--save-every is {self.save_every}; give minutes, 0 for every step")
        if self.verify_every < 0:
            raise UsageError(f"--verify-every is {self.verify_every}; give a number of steps, 0 for never")
        list_trackers(self.track)  # refuses what is none

    def choose_folder(self, command: str, group: ProcessGroup, notify: Notify) -> tuple[Path, bool]:
        """The folder of the run, and whether a run in it is resumed."""
        out = None if self.out is None else str(self.out)
        return run_folder.choose_run_folder(
            command,
            out,
            group,
            resume=self.resume,
            overwrite=self.overwrite,
            must_resume=self.must_resume,
            notify=notify,
        )

    def open_dataset(self, data: DataSource) -> Dataset:
        """The dataset to train on, with its labels corrected; one for a student has some."""
        dataset = relabel_dataset(open_dataset(data), self.relabel)
        if self.teacher is not None and not dataset.classes:
            raise DataError(
                f"{dataset.name} has no labels, which name a student's outputs and validate it. The teacher's"
                f" predictions may be the labels: `vitrail predict TEACHER {dataset.name} --top 1 --out labels.csv`,"
                " then `vitrail distill TEACHER --data labels.csv --set distillation.weight=1`"
            )
        return dataset

    def build_run(
        self,
        recipe: Recipe,
        dataset: Dataset,
        group: ProcessGroup,
        device: torch.device,
        *,
        initial_model: Trained | None = None,
        train_preprocess: PreprocessConfig | None = None,
        probe_shots: int = 0,
        decisions: tuple[tuple[int, int], ...] = (),
    ) -> TrainingRun:
        """The run of a recipe on a dataset with these options."""
        return TrainingRun(
            recipe=recipe,
            dataset=dataset,
            initial_model=initial_model,
            train_preprocess=train_preprocess,
            probe_shots=probe_shots,
            decisions=decisions,
            group=group,
            device=device,
            seed=self.seed,
            workers=count_loader_workers(self.workers),
            micro_batches=self.micro_batches,
            recompute=self.recompute,
            shard=self.shard,
            train_on_val=self.train_on_val,
            class_weights=self._resolve_class_weights(recipe, dataset),
            loss_function=self.loss_function,
            teacher=self.teacher,
        )

    def _resolve_class_weights(self, recipe: Recipe, dataset: Dataset) -> tuple[float, ...]:
        if self.class_weights is None:
            return ()
        if recipe.masked is not None or not dataset.classes:
            raise UsageError("--class-weights is for labels, and this run learns without: omit it")
        return resolve_class_weights(self.class_weights, dataset.classes)


@contextlib.contextmanager
def join_run_processes(
    options: RunOptions, callbacks: RunCallbacks
) -> Iterator[tuple[ProcessGroup, torch.device, RunCallbacks]]:
    """Join the processes of a run; the callbacks are those of rank 0, and do nothing on other ranks."""
    if options.deterministic:
        enable_determinism()
    with distributed.join_process_group(options.device) as (group, device):
        yield group, device, callbacks if group.is_rank0 else SILENT


def enable_determinism() -> None:
    """Make a GPU add in one order, for which some of torch's kernels are slower."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def execute_run(
    run: TrainingRun,
    folder: Path,
    data: str,
    options: RunOptions,
    callbacks: RunCallbacks,
    *,
    resume: bool,
    audit: dict[str, Any] | None = None,
    deadline: Deadline | None = None,
    baselines: Mapping[str, int] | None = None,
) -> RunResult | PretrainingResult | None:
    """Train in a folder, upload it if asked to, and write its audit, scores, figures and report.

    Rank 0 returns the result, other ranks None. `audit` is what `check_images` found. `baselines` are images that
    simpler methods classify correctly, by the method's name.
    """
    _print_run_notes(run, options, callbacks.notify)
    with contextlib.ExitStack() as stack:
        distributed.run_on_rank0(lambda: stack.enter_context(run_folder.lock_run_folder(folder)))
        replace = options.overwrite and not resume
        url = run_folder.make_upload_url(folder, None if options.out is None else str(options.out))
        after_checkpoint = stack.enter_context(
            upload.upload_checkpoints(folder, url, run.group, replace=replace, notify=callbacks.notify)
        )
        with callbacks.show_progress("training") as progress:
            reporter = _StepReporter(run, folder, callbacks, progress)
            trainer = Trainer(
                run,
                folder,
                after_step=reporter.report_step,
                after_evaluation=reporter.report_evaluation,
                after_checkpoint=after_checkpoint,
                notify=callbacks.notify,
                make_loggers=lambda folder: open_loggers(options.track, folder, callbacks.notify),
                resume=resume,
                overwrite=replace and run_folder.is_run_folder(folder),
                save_every_seconds=options.save_every * 60,
                verify_every=options.verify_every,
                deadline=deadline,
                contents_digest="" if audit is None else audit["contents"],
            )
            with _advise_on_data_error(data):
                result = trainer.run()
        if result is None:
            return None
        _write_result_files(run, result, folder, audit, baselines or {})
        callbacks.write_report(run, result, folder, None if resume else deadline, callbacks.notify)
        return result


def _print_run_notes(run: TrainingRun, options: RunOptions, notify: Notify) -> None:
    if options.verify_every and not is_deterministic(run.device):
        notify(
            f"note: a GPU adds in any order, so --verify-every lets gradients differ by {TOLERANCE:.0%} of their norm;"
            " with --deterministic it compares every bit"
        )
    warn_about_imbalance(run, notify)
    if run.shard and not run.is_sharded:
        notify("note: --shard changes nothing in one process, which must hold the whole model; torchrun starts more")


@dataclasses.dataclass
class _StepReporter:
    """Reports each step and evaluation of a run."""

    run: TrainingRun
    folder: Path
    callbacks: RunCallbacks
    progress: Callable[..., None]
    val_summary: str = ""
    has_logged_command: bool = False

    def report_step(self, step_end: StepEnd) -> None:
        if not self.has_logged_command and self.run.group.is_rank0 and self.callbacks.command:
            RunLog(self.folder).log_event("command", arguments=list(self.callbacks.command), folder=str(Path.cwd()))
        self.has_logged_command = True
        rate = step_end.step * self.run.recipe.batch / max(step_end.seconds, 1e-9)
        text = f"loss {step_end.result.loss:.3f}{self.val_summary}, {format_rate(rate)}; then test and report"
        self.progress(step_end.step, step_end.steps, text)
        self.callbacks.on_step(step_end)

    def report_evaluation(self, result: ValidationResult) -> None:
        self.val_summary = f", {result.val_summary}"
        self.callbacks.notify(str(result))
        self.callbacks.on_evaluation(result)
        if result.examples is not None and self.run.group.is_rank0:
            image_grids.draw_reconstruction(*result.examples, self.folder / "reconstruction.jpg")


@contextlib.contextmanager
def _advise_on_data_error(data: str) -> Iterator[None]:
    """Add to an error of an image the command that finds all of them."""
    try:
        yield
    except (RemoteError, ChangedDataError):
        raise
    except DataError as error:
        raise DataError(f"{error}.{advise_data_check(data)}") from error


def _write_result_files(
    run: TrainingRun,
    result: RunResult | PretrainingResult,
    folder: Path,
    audit: dict[str, Any] | None,
    baselines: Mapping[str, int],
) -> None:
    """Write data_report.json, and scores of labels and baselines to the log."""
    if audit is not None:
        (folder / "data_report.json").write_text(json.dumps(audit, indent=1) + "\n")
    if isinstance(result, RunResult) and result.predictions.multi_label:
        scores = measure_labels(result.predictions)
        RunLog(folder).log_event("multi_label", **scores.to_dict())
        thresholds, path = result.label_thresholds, folder / "per_class.csv"
        write_label_scores(scores, run.dataset.classes, thresholds, path, run.class_counts)
    for name, correct in baselines.items():
        RunLog(folder).log_event("baseline", name=name, correct=correct)
