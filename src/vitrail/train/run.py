"""A whole run in its folder: what was to be done, how it went, the weights, and what they do on images held out.

    runs/NAME/  config.json  results.csv  events.jsonl  run.log  weights/best.safetensors  weights/last.safetensors
                per_class.csv  predictions.csv  checkpoints/step-00001234/

A masked run, which learns without labels, has no tables of answers, and weights without a head.
Columns and names of files are those people's scripts already know. Drawing is left to whoever has figures.
"""

import contextlib
import copy
import dataclasses
import json
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail import files, locks
from vitrail.config import upgrade_run_config
from vitrail.data import loader
from vitrail.data.dataset_digest import DataDigest, check_unchanged, digest_dataset
from vitrail.data.loader import Batch, BatchPlan
from vitrail.errors import UsageError, VitrailError
from vitrail.evaluate import calibration as calibrate
from vitrail.evaluate import precision_benchmark, prediction_tables
from vitrail.evaluate.predictions import Counts, Predictions, count_predictions, iterate_logits, predict_batches
from vitrail.formatting import pluralize
from vitrail.model.build import Model
from vitrail.runtime import distributed, signals
from vitrail.runtime.distributed import ProcessGroup
from vitrail.runtime.signals import StoppedError
from vitrail.train import checkpoint as states
from vitrail.train import loop
from vitrail.train.deadline import MAX_PRECISION_SECONDS, MAX_PRECISION_SHARE, Deadline, PlannedSteps
from vitrail.train.loop import StepEnd
from vitrail.train.run_log import Logger, RunLog
from vitrail.train.step import DivergedError, build_train_state
from vitrail.train.step_verification import MISMATCH_FILES as MISMATCHES
from vitrail.train.step_verification import StepVerification
from vitrail.train.trainer import UNREADABLE, Trainer, ValidationResult, describe_machine, iterate_split_batches
from vitrail.train.training_run import TrainingRun, make_run_config
from vitrail.weights import native
from vitrail.weights.load import load, save
from vitrail.weights.trained import Trained

SAVE_EVERY_SECONDS = 600.0  # seconds
STOPPED_FILE = "stopped"
LOCK_FILE = ".lock"
FINISHED_EVENTS = ("end", "pretrained")  # events
TORCHRUN_FILE = "torchrun"
_MAX_CALIBRATION_LOGITS = 2**27  # logits that a temperature is fitted to, at most
_MIN_PRECISION_SECONDS = 1.0  # seconds: less says nothing
_RESUME_KEYS = (
    "recipe", "model", "data", "images", "classes", "preprocess", "train_preprocess", "train_on_val", "eval_split", "seed", "steps",
    "micro_batches", "decisions",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run came to."""

    split: str
    """Where it was measured: test, or val where there is no test."""
    counts: Counts
    predictions: Predictions
    temperature: float
    calibration_error: float
    """Of the answers, with that temperature."""
    seconds: float
    """Of training, its evaluations included."""
    epochs: float


@dataclasses.dataclass(frozen=True)
class PretrainingResult:
    """What a masked run came to: of its best weights, on val."""

    images: int
    patches: int
    """Hidden ones."""
    loss: float
    top1: float | None
    """Of the colours to tell, where the target is colours."""
    top5: float | None
    seconds: float
    """Of training, its evaluations included."""
    epochs: float


def run_training(
    run: TrainingRun,
    folder: Path,
    *,
    after_step: Callable[[StepEnd], None],
    after_evaluation: Callable[[ValidationResult], None],
    make_loggers: Callable[[Path], Sequence[Logger]] = lambda _: (),
    resume: bool = False,
    save_every_seconds: float = SAVE_EVERY_SECONDS,
    after_checkpoint: Callable[[Path], None] = lambda _: None,
    notify: Callable[[str], None] = lambda _: None,
    contents_digest: str = "",
    overwrite: bool = False,
    deadline: Deadline | None = None,
    verify_every: int = 0,
) -> RunResult | PretrainingResult | None:
    """Train, keep the best and the last weights in the folder, and measure the best on test, or else on val.

    The folder is new, or with `resume` one in which the same run was begun: it goes on from its newest checkpoint, as
    it does where torchrun starts the processes again. Of several processes the first one writes the files and has the
    result, the others have None. `contents` is a digest of the images' contents, where they were read before. With
    `overwrite` the folder is cleared once nothing can be refused any more. With a `deadline` the run's steps are
    decided again as it goes, and logged. `verify_every` so many steps one is computed twice; 0 is never.
    """
    leads = run.group.is_rank0
    state = build_train_state(
        run.build_model(), run.recipe, run.class_counts, cuda_graph=run.can_use_cuda_graph
    )  # what it refuses needs no folder
    with contextlib.ExitStack() as stack:
        stack.enter_context(states.explain_full_disk(folder, lambda: states.compute_size(state)))
        distributed.run_on_rank0(lambda: stack.enter_context(lock_run_folder(folder)))
        parts = run.group.world_size if run.is_sharded else 1
        distributed.run_on_rank0(
            lambda: states.check_disk_space(folder, *(parts * size for size in states.estimate_size(state)))
        )
        if overwrite and leads:
            clear_run_folder(folder)
        new = not _has_run_files(folder)
        data = digest_dataset(run.dataset, contents_digest) if leads else None
        snapshot = _open_run(run, folder, data, resume=resume, notify=notify)
        if leads and new:
            stack.push(partial(_discard_empty_run, folder))
        book = stack.enter_context(contextlib.closing(RunLog(folder, make_loggers(folder)) if leads else RunLog(None)))
        exchange = distributed.make_all_gather() if run.is_sharded else states.all_gather_single
        writer = stack.enter_context(
            contextlib.closing(states.CheckpointWriter(folder / "checkpoints", exchange, after_write=after_checkpoint))
        )
        keeper = Trainer(run, folder, book, state, after_step, after_evaluation, writer, save_every_seconds, data)
        keeper.recall_unreadable()
        keeper.planned_steps, keeper.deadline = PlannedSteps(run.plan.total_steps, list(run.decisions)), deadline
        if snapshot is not None:
            keeper.resume(snapshot)
            book.write_line(f"resumed after step {snapshot.step:,}")
            del snapshot  # it maps files that are soon to be removed
        try:
            with signals.catch_stop_signals() as keeper.stop_request:
                decided = [steps for _, steps in keeper.planned_steps.decisions]
                plan = run.make_plan_up_to(max([0 if deadline is None else deadline.max_steps, *decided]))
                with contextlib.closing(keeper.list_unreadable(iterate_train_batches(run, state.step, plan))) as steps:
                    if deadline is not None:
                        deadline.begin_step()
                    loop.train_steps(
                        state,
                        steps,
                        run.training_data,
                        plan,
                        run.recipe,
                        after_step=keeper.finish_step,
                        planned_steps=keeper.planned_steps,
                        verification=StepVerification(verify_every, folder, run.group.rank) if verify_every else None,
                    )
                del steps  # the images that live on the GPU
                writer.wait()
                results: list[RunResult | PretrainingResult] = []
                finished = _finish_supervised if run.recipe.masked is None else _finish_pretraining
                distributed.run_on_rank0(lambda: results.append(finished(keeper)))
                if unreadable := list(keeper.unreadable):
                    notify(
                        f"warning: {pluralize(len(unreadable), 'image')} cannot be read, such as {unreadable[0]}; left out"
                        f" as the run went, and listed in {UNREADABLE}"
                    )
        except BaseException as error:
            if leads:
                with contextlib.suppress(OSError):  # a full disk has no room for words, and its own error is to be seen
                    _log_early_end(keeper, error)
            raise
        return results[0] if results else None


def _open_run(
    run: TrainingRun, folder: Path, data: DataDigest | None, *, resume: bool, notify: Callable[[str], None]
) -> states.Checkpoint | None:
    """The checkpoint to go on from, the same on every rank, or None and a folder that is ready for a new run."""
    if run.group.restart_count and (folder / STOPPED_FILE).exists():
        raise StoppedError(f"{folder} was stopped and its state is saved; the same command with --resume goes on")
    found: list[states.Checkpoint] = []

    def prepare_on_rank0() -> int | None:
        assert data is not None, "the process that leads has it"
        snapshot = _prepare_folder(run, folder, data, resume=resume, notify=notify)
        found.extend([] if snapshot is None else [snapshot])
        return None if snapshot is None else snapshot.step

    step = distributed.run_on_rank0(prepare_on_rank0)
    if step is not None and not found:
        found.append(states.read_checkpoint(folder / "checkpoints" / states.format_checkpoint_name(step), verify=False))
    return found[0] if found else None


def _prepare_folder(
    run: TrainingRun, folder: Path, data: DataDigest, *, resume: bool, notify: Callable[[str], None]
) -> states.Checkpoint | None:
    """The same, as the process that leads sees to it."""
    config, wanted = folder / "config.json", json.loads(json.dumps(make_run_config(run)))
    begun = _has_run_files(folder)
    again = is_torchrun_restart(folder, run.group)
    if begun and not (resume or again):
        raise UsageError(f"{folder} exists already; go on with it (--resume), or choose another name with --out")
    if begun and not (again or config.is_file()):
        raise UsageError(f"{folder} is no run: it has no config.json. Choose another name with --out")
    if config.is_file():
        _check_same_config(config, wanted)
    files.make_folder(folder)
    for hidden in (".config.json.*", "weights/.*.safetensors.*", "checkpoints/.step-*"):
        for left in folder.glob(hidden):  # by a process that was killed as it wrote
            shutil.rmtree(left)
    if run.group.agents:  # before there is anything else: a group that is lost here is started again
        with (folder / TORCHRUN_FILE).open("a") as file:
            file.write("".join(f"{agent}\n" for agent in run.group.agents))
    if config.is_file():
        snapshot = states.read_newest_checkpoint(folder / "checkpoints", lambda reason: notify(f"warning: {reason}"))
        if snapshot is not None:
            notify(f"resuming {folder} after step {snapshot.step:,}. {_describe_resume(run, snapshot, data)}")
            (folder / STOPPED_FILE).unlink(missing_ok=True)
            return snapshot
        if _is_finished_run(folder):
            raise UsageError(
                f"{folder} is a finished run whose checkpoints were removed, so there is nothing to resume. --overwrite"
                " begins anew, --out names another folder"
            )
        notify(f"{folder} has no checkpoint yet, so the run begins anew")
        (folder / STOPPED_FILE).unlink(missing_ok=True)
        for name in ("results.csv", "events.jsonl"):
            (folder / name).unlink(missing_ok=True)
    with files.write_atomically(config, overwrite=True) as fresh:
        fresh.write_text(json.dumps(wanted, indent=1) + "\n")
    return None


def _has_run_files(folder: Path) -> bool:
    """Whether there is more than a run leaves that was killed before its configuration was written."""
    if not folder.is_dir():
        return folder.exists()
    return any(not path.name.startswith((".config.json.", TORCHRUN_FILE)) for path in list_run_files(folder))


def _is_finished_run(folder: Path) -> bool:
    """Whether a run came to its end, by its own record: then its weights are worth keeping."""
    events = folder / "events.jsonl"
    with contextlib.suppress(ValueError):  # a line that was being written
        lines = map(json.loads, events.read_text().splitlines() if events.is_file() else ())
        return any(isinstance(line, dict) and line.get("event") in FINISHED_EVENTS for line in lines)
    return False


def is_torchrun_restart(folder: Path, group: ProcessGroup) -> bool:
    """Whether a torchrun of this group has worked on the folder's run, or its runs, before: it lost a process or node,
    or got one, and has started all of them again with the command that began the run.
    """
    before = [*folder.glob(TORCHRUN_FILE), *folder.glob(f"*/{TORCHRUN_FILE}")]
    return any(agent in path.read_text().splitlines() for path in before for agent in group.agents)


def _check_same_config(config: Path, options: dict[str, Any]) -> None:
    """Refuse to go on with a run by another configuration than it was begun with."""
    before, now = _drop_unset(_read_config(config)), _drop_unset(options)
    for each in (before, now):
        each["recipe"].pop("head_init", None)  # what it started from matters no more
    for key in _RESUME_KEYS:
        if before.get(key) != now.get(key):
            difference = _describe_difference(key, before.get(key), now.get(key))
            raise UsageError(f"{config.parent} was begun with another {difference}")


def _drop_unset(value: Any) -> Any:
    """The fields of a configuration that are set: a version that does not know a field yet leaves it away."""
    if not isinstance(value, dict):
        return value
    return {name: _drop_unset(field) for name, field in value.items() if field is not None}


def _read_config(config: Path) -> dict[str, Any]:
    """The configuration that a run was begun with."""
    try:
        found = json.loads(config.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict) or "recipe" not in found:
        raise UsageError(f"{config} is damaged or of no run; --overwrite begins anew, --out names another folder")
    return upgrade_run_config(found)


def _describe_difference(key: str, before: Any, now: Any) -> str:
    """The innermost field that differs, and both of its values."""
    while isinstance(before, dict) and isinstance(now, dict):
        inner = next(name for name in (before | now) if before.get(name) != now.get(name))
        key, before, now = f"{key}.{inner}", before.get(inner), now.get(inner)
    return f"{key}: {before!s:.60}, not {now!s:.60}. Give the same command again, with --resume"


def _describe_resume(run: TrainingRun, checkpoint: states.Checkpoint, data: DataDigest) -> str:
    """Whether the run will be the one it would have been, to the bit; refused where its images are others."""
    before, now = checkpoint.facts["machine"], describe_machine(run)
    different = [f"{name} {before[name]} -> {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    if recorded := checkpoint.facts.get("data"):  # an older version wrote none
        different += filter(
            None,
            [
                check_unchanged(
                    DataDigest(*(recorded.get(field, "") for field in DataDigest._fields)), data, run.dataset.name
                )
            ],
        )
    if different:
        return f"Not to the bit what it would have been: {', '.join(different)}"
    if "elapsed" in checkpoint.facts:
        return (
            "How many steps follow depends on the time that is left; the report will have the command that repeats it"
        )
    if run.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return "Its weights will be those of a run without interruption, to the bit"
    return "Not to the bit: a GPU adds in any order (--deterministic)"


@contextlib.contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Hold a run's folder against other processes while the block lasts; it is made where it is missing.

    One that was made here and is empty in the end is removed again.
    """
    made = not folder.exists()
    files.make_folder(folder)
    try:
        with locks.hold_lock(folder / LOCK_FILE, str(folder)):
            yield
    finally:
        if made:
            with contextlib.suppress(OSError):  # it holds a run now
                folder.rmdir()


def clear_run_folder(folder: Path) -> None:
    """Remove all that a run's folder holds but its lock."""
    for path in list_run_files(folder):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def list_run_files(folder: Path) -> list[Path]:
    """What a run's folder holds beside its lock."""
    return [path for path in folder.iterdir() if path.name != LOCK_FILE]


def _discard_empty_run(folder: Path, error: type[BaseException] | None, *_: object) -> None:
    """Clear the folder of a run that was begun here and ended before there was anything to lose."""
    learned = (folder / "weights" / "last.safetensors").exists() or states.list_checkpoints(folder / "checkpoints")
    if error is not None and not learned and not any(folder.glob(MISMATCHES)):
        with contextlib.suppress(OSError):
            clear_run_folder(folder)


def _log_early_end(trainer: Trainer, error: BaseException) -> None:
    """Write down why a run ended early."""
    folder, book = trainer.folder, trainer.log
    reason = str(error) if isinstance(error, VitrailError) else type(error).__name__
    facts: dict[str, Any] = {}
    if isinstance(error, DivergedError):
        task, step = trainer.run, trainer.state.step
        parts = task.plan.list_micro_batches(step)
        rows = task.training_data.order.get_sample_indices(np.arange(parts[0].start, parts[-1].stop))
        facts = {"step": step, "batch": [task.train_split.get_image_name(row) for row in rows.tolist()]}
    if isinstance(error, StoppedError) and error.is_final:
        (folder / STOPPED_FILE).write_text(f"{reason}\n")  # where torchrun starts the group again, it leaves at once
    book.log_event("stopped", reason=reason, **facts)
    book.write_line(f"stopped: {reason}")


def iterate_train_batches(
    run: TrainingRun, start: int = 0, plan: BatchPlan | None = None
) -> Generator[Batch, None, None]:
    """The run's micro-batches: of images that live on the GPU where they are small, else from worker processes."""
    training, plan = run.training_data, plan or run.plan
    if run.device.type == "cuda":
        found = loader.load_resident_images(
            training.split,
            channels=len(run.preprocess.mean),
            num_classes=training.num_classes,
            device=run.device,
            workers=run.workers,
            skip_bad=training.skip_bad,
        )
        if found is not None:
            return loader.iter_resident_train_batches(training, plan, *found, start_step=start)
    return loader.iter_train_batches(training, plan, start_step=start, workers=run.workers)


def _finish_supervised(trainer: Trainer) -> RunResult:
    """The best weights calibrated on val, and measured on test."""
    task, folder = trainer.run, trainer.folder
    path = folder / "weights" / "best.safetensors"
    split = task.eval_split or ("test" if "test" in task.dataset.splits else "val")
    best = load(path)
    model = best.model.to(task.device)
    temperature = 1.0 if task.train_on_val else calibrate.fit_temperature(*_collect_val_logits(trainer, model))
    best = _measure_precisions(trainer, dataclasses.replace(best, temperature=temperature))
    save(dataclasses.replace(best, precision_measurements=()), path, overwrite=True)
    native.write_measurements(path, best.precision_measurements)
    images = _iterate_all_val_batches(trainer) if split == "val" else iterate_split_batches(task, split)
    said = predict_batches(
        model,
        trainer.stop_on_signal(images),
        task.preprocess,
        temperature=temperature,
        num_classes=len(task.dataset.classes),
        multi_label=task.dataset.multi_label,
    )
    counts = count_predictions(said, len(task.dataset.classes))
    error = calibrate.expected_calibration_error(*said.calibration_pairs)
    result = RunResult(
        split,
        counts,
        said,
        temperature,
        error,
        trainer.training_seconds,
        trainer.trained_images / len(task.train_split),
    )
    facts = {"images": counts.images, "right": counts.correct, "top1": counts.top1, "top5": counts.top5}
    calibration = {"loss": counts.mean_loss, "temperature": temperature, "calibration_error": error}
    trainer.log.log_event("end", split=split, **facts, **calibration, seconds=result.seconds)
    trainer.log.write_line(
        f"{split}: {counts.top1:.2%} of {pluralize(counts.images, 'image')} right; temperature {temperature:.3f}"
    )
    names = task.dataset.classes
    prediction_tables.write_predictions(task.dataset.splits[split], names, names, said, folder / "predictions.csv")
    if counts.has_confusion:
        prediction_tables.write_class_table(counts, names, folder / "per_class.csv", task.class_counts)
    return result


def _measure_precisions(trainer: Trainer, best: Trained) -> Trained:
    """The best weights with what fewer bits do to them on this machine's CPU, where that could matter."""
    if trainer.run.train_on_val or not precision_benchmark.is_worth_measuring(
        best
    ):  # of images that it learned it is too sure
        return best
    seconds = min(MAX_PRECISION_SECONDS, MAX_PRECISION_SHARE * trainer.training_seconds)
    if trainer.deadline is not None:
        seconds = min(seconds, trainer.deadline.precision_seconds)
        if seconds < _MIN_PRECISION_SECONDS:
            trainer.log.write_line("no time was left to compare precisions: vitrail convert --measure does it")
            return best
    views = (batch.pixels for batch in trainer.stop_on_signal(_iterate_all_val_batches(trainer)))
    here = dataclasses.replace(best, model=copy.deepcopy(best.model).cpu())  # on a GPU it has still to be measured
    data = f"{Path(trainer.run.dataset.name).name} (val)"
    found = precision_benchmark.measure_precisions(here, views, seconds=seconds, data=data)
    for tried in found.precision_measurements:
        trainer.log.write_line(tried.describe())
    return found


def _finish_pretraining(trainer: Trainer) -> PretrainingResult:
    """What val said of the best weights; they have no head that could be calibrated."""
    task, kept = trainer.run, trainer.best_masked_metrics
    assert kept is not None, "there is an evaluation after the last step"
    result = PretrainingResult(
        **kept, seconds=trainer.training_seconds, epochs=trainer.trained_images / len(task.train_split)
    )
    trainer.log.log_event("pretrained", split="val", **kept, seconds=result.seconds)
    right = "" if result.top1 is None else f", {result.top1:.2%} of the colours right"
    trainer.log.write_line(f"val: loss {result.loss:.4f} of {result.patches:,} hidden patches{right}")
    return result


def _iterate_all_val_batches(trainer: Trainer) -> Iterator[Batch]:
    """All validation images, not only this rank's."""
    return (
        trainer.iterate_val_batches()
        if trainer.run.group.world_size == 1
        else iterate_split_batches(trainer.run, "val")
    )


def _collect_val_logits(trainer: Trainer, model: Model) -> tuple[Tensor, Tensor]:
    """Logits and targets of as many validation images as a temperature needs, on the CPU."""
    limit = max(1, _MAX_CALIBRATION_LOGITS // len(trainer.run.dataset.classes))
    logits, targets, count = [], [], 0
    for some, true, _ in iterate_logits(
        model, trainer.stop_on_signal(_iterate_all_val_batches(trainer)), trainer.run.preprocess
    ):
        logits.append(some.cpu())
        targets.append(true.cpu())
        count += len(some)
        if count >= limit:
            break
    return torch.cat(logits), torch.cat(targets)
