"""What happens between the steps of a run: evaluation, the weights that are kept, checkpoints, and words about it."""

import contextlib
import dataclasses
import math
import platform
import shutil
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from vitrail import files
from vitrail.data import loader
from vitrail.data.dataset import MAX_BAD_FRACTION
from vitrail.data.dataset_digest import DataDigest
from vitrail.data.loader import Batch
from vitrail.errors import DataError
from vitrail.evaluate import probe
from vitrail.evaluate.predictions import Counts, all_reduce_counts, evaluate_batches
from vitrail.formatting import pluralize
from vitrail.model.build import Model
from vitrail.model.masked import MaskedViT, get_encoder
from vitrail.runtime import distributed
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.runtime.signals import StoppedError, StopRequest
from vitrail.train import checkpoint as states
from vitrail.train import fsdp
from vitrail.train.deadline import Deadline, PlannedSteps
from vitrail.train.loop import StepEnd
from vitrail.train.masked_evaluation import MaskedCounts, MaskedExamples, evaluate_masked
from vitrail.train.run_log import RunLog
from vitrail.train.step import DivergedError, TrainableModel, TrainState, disable_compile, make_autocast, select_inputs
from vitrail.train.training_run import TrainingRun
from vitrail.weights.load import save
from vitrail.weights.trained import Origin, Trained

_EVAL_BATCH_SIZE = 256
UNREADABLE = "unreadable.txt"
"""The images that a run met and left out, one a line."""
_MAX_CACHED_BYTES = 2**30  # bytes of evaluation images that are kept from one evaluation to the next


@dataclasses.dataclass(frozen=True)
class ValidationResult:
    """The state of a run after an evaluation."""

    step_end: StepEnd
    train_loss: float
    val: Counts | MaskedCounts
    images_per_second: float

    @property
    def examples(self) -> MaskedExamples | None:
        """A few images of a masked run, and what was told of them."""
        return self.val.examples if isinstance(self.val, MaskedCounts) else None

    @property
    def val_summary(self) -> str:
        """What the images held out say, in a few words."""
        if isinstance(self.val, Counts):
            return f"validation {self.val.top1:.1%}"
        right = "" if self.val.top1 is None else f", {self.val.top1:.1%} of the colours"
        return f"validation {self.val.mean_loss:.3f}{right}"

    def __str__(self) -> str:
        moment = self.step_end
        left = moment.seconds / moment.step * (moment.steps - moment.step)
        return (
            f"epoch {moment.epoch:.4g}: loss {self.train_loss:.3f}, {self.val_summary},"
            f" {self.images_per_second:,.0f} images/s, {left:,.0f} s left"
        )


@dataclasses.dataclass
class Trainer:
    """The course of one run."""

    run: TrainingRun
    folder: Path
    log: RunLog
    state: TrainState
    after_step: Callable[[StepEnd], None]
    after_evaluation: Callable[[ValidationResult], None]
    checkpoint_writer: states.CheckpointWriter
    save_every_seconds: float
    """Seconds from one checkpoint to the next; there is one after the last step too."""
    data_digest: DataDigest | None = None
    """What the images are, by which a resumed run knows them; the process that leads has it."""
    stop_request: StopRequest = dataclasses.field(default_factory=StopRequest)
    planned_steps: PlannedSteps = dataclasses.field(default_factory=lambda: PlannedSteps(0))
    """How many steps there are."""
    deadline: Deadline | None = None
    """By when the run must have ended, where its steps are decided by time."""

    best_score: float | None = None
    """The highest accuracy on val so far."""
    best_masked_metrics: dict[str, Any] | None = None
    """What val said of the best weights of a masked model: their file has no heads that could be asked again."""
    loss_sum: float = 0.0
    """Summed over the images since the last evaluation."""
    images_since_evaluation: int = 0
    evaluations_due: int = 0
    """Evaluations that the epochs so far have called for."""
    training_seconds: float = 0.0
    """Of training so far, that before an interruption included."""
    seconds_before_resume: float = 0.0
    """Of it, before the interruption."""
    last_evaluation_seconds: float = 0.0
    """The time of the last evaluation."""
    last_checkpoint_time: float = dataclasses.field(default_factory=time.monotonic)
    """When the last checkpoint was taken."""
    val_batches: list[Batch] = dataclasses.field(default_factory=list)
    unreadable: dict[str, None] = dataclasses.field(default_factory=dict)
    """Images that could not be read and were left out, in the order in which they were met."""

    def finish_step(self, step_end: StepEnd) -> None:
        """Take note of a step; evaluate where an epoch that is due ends, or the run; save where it is time."""
        outcome, self.training_seconds = step_end.result, self.seconds_before_resume + step_end.seconds
        if self.deadline is not None:
            self.replan(self.deadline, step_end.step)
        step_end = step_end._replace(seconds=self.training_seconds, steps=self.planned_steps.get_total(step_end.step))
        self.loss_sum += outcome.loss * outcome.images
        self.images_since_evaluation += outcome.images
        self.log.log_step(
            step_end.step, {"train/step_loss": outcome.loss, "train/gradient": outcome.grad_norm, "lr": outcome.lr}
        )
        self.after_step(step_end)
        period = int(step_end.epoch) // self.run.eval_every_epochs
        if period > self.evaluations_due or step_end.step == step_end.steps:
            self.evaluations_due = period
            self.evaluate(step_end)
        self.checkpoint_writer.raise_errors()
        late = self.run.group.is_rank0 and time.monotonic() - self.last_checkpoint_time >= self.save_every_seconds
        asked, due = divmod(distributed.all_reduce_max(2 * (self.stop_request.signal or 0) + late, self.run.device), 2)
        if (self.run.group.is_rank0 or self.run.is_sharded) and (due or asked or step_end.step == step_end.steps):
            self.save_checkpoint(step_end)
        if asked:
            self.checkpoint_writer.wait()
            distributed.barrier()  # or the first to end would have torchrun end those that still write
            raise StoppedError(
                f"{signal.Signals(asked).name}: stopped after step {step_end.step:,} of {step_end.steps:,}, the state is"
                " saved; the same command with --resume goes on",
                asked,
            )
        if self.deadline is not None:
            self.deadline.begin_step()

    @property
    def trained_images(self) -> int:
        """Images that were trained on so far, those seen again counted again."""
        step, plan = self.state.step, self.run.plan
        whole = self.deadline is not None or self.run.decisions or step < plan.total_steps
        return step * plan.batch_size if whole else plan.total_positions

    def replan(self, deadline: Deadline, step: int) -> None:
        """Decide again how many steps there are, by the clock of the process that leads."""
        deadline.end_step()
        steps = deadline.replan(step, self.planned_steps.get_total(step)) if self.run.group.is_rank0 else 0
        before = self.planned_steps.get_total(step)
        self.planned_steps.set_total(step, distributed.all_reduce_max(steps, self.run.device))
        if self.planned_steps.get_total(step) != before:
            self.log.log_event("plan", step=step, steps=self.planned_steps.get_total(step), elapsed=deadline.elapsed)

    def recall_unreadable(self) -> None:
        """Read the images that were left out before an interruption."""
        path = self.folder / UNREADABLE
        self.unreadable = dict.fromkeys(path.read_text("utf-8").splitlines() if path.is_file() else ())

    def list_unreadable(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        """The batches; images left out of them are listed in the folder, and refused where they are many."""
        with contextlib.closing(batches) if isinstance(batches, Generator) else contextlib.nullcontext():
            for batch in batches:
                if batch.skipped_images:
                    self._leave_out(batch.skipped_images)
                yield batch

    def _leave_out(self, names: Iterable[str]) -> None:
        lines = (repr(name)[1:-1] if "\n" in name else name for name in names)
        found = [line for line in dict.fromkeys(lines) if line not in self.unreadable]
        self.unreadable |= dict.fromkeys(found)
        if found and self.folder.is_dir():  # on another machine than that of the process that leads it need not be
            with (self.folder / UNREADABLE).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(f"{line}\n" for line in found)
        images = sum(len(split) for split in self.run.dataset.splits.values())
        if len(self.unreadable) > MAX_BAD_FRACTION * images:
            first = next(iter(self.unreadable))
            raise DataError(
                f"{pluralize(len(self.unreadable), 'image')} of {images:,} cannot be read, such as {first}: more than"
                f" {MAX_BAD_FRACTION:.0%} are too many"
            )

    def stop_on_signal(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of what is measured after the last step, until a signal asks for an end."""
        for batch in self.list_unreadable(batches):
            if self.stop_request.signal is not None:
                raise StoppedError(
                    f"{self.stop_request.signal.name}: stopped after the last step, the state is saved; the same command with"
                    " --resume measures the weights",
                    self.stop_request.signal,
                )
            yield batch

    def evaluate(self, step_end: StepEnd) -> None:
        """Measure, write, and keep the weights if they are the best so far."""
        begun = time.perf_counter()
        loss, rate = (
            self.loss_sum / self.images_since_evaluation,
            self.images_since_evaluation / max(step_end.seconds - self.last_evaluation_seconds, 1e-9),
        )
        with use_averaged_weights(self.state) as model:
            val = self.compute_val_metrics(model)
            if not math.isfinite(val.mean_loss):  # the next step would see it, but the last has none
                raise DivergedError(
                    f"after step {step_end.step:,} the loss of the validation images is {val.mean_loss}; the weights"
                    f" before are kept. Try a lower learning rate than {self.run.recipe.optimizer.lr}, or a longer"
                    " warm-up"
                )
            self.save_weights(model, step_end, is_best=self.update_best(val))
            if self.run.probe_shots:
                self.run_probe(model, step_end)
        found = ValidationResult(step_end, loss, val, rate)
        self.loss_sum, self.images_since_evaluation = 0.0, 0
        row = (step_end.epoch, step_end.seconds, loss, val.top1, val.top5, val.mean_loss, step_end.result.lr)
        self.log.log_evaluation(step_end.step, row)
        self.log.write_line(str(found))
        self.after_evaluation(found)
        taken = time.perf_counter() - begun
        self.last_evaluation_seconds = step_end.seconds + taken
        if self.deadline is not None:
            self.deadline.end_evaluation(taken)

    def update_best(self, val: Counts | MaskedCounts) -> bool:
        """Whether the weights of which val says this are the best so far; then it is remembered."""
        last = self.run.train_on_val  # with val trained on, there is nothing to choose by
        if isinstance(val, Counts):
            score = val.macro_accuracy if self.run.recipe.logit_adjustment and val.has_confusion else val.top1
            self.best_score = score if self.best_score is None else max(score, self.best_score)
            return last or score >= self.best_score - standard_error(self.best_score, val.images)
        found = last or self.best_masked_metrics is None or val.mean_loss <= self.best_masked_metrics["loss"]
        if found:
            self.best_masked_metrics = {"images": val.images, "patches": val.patches, "loss": val.mean_loss}
            self.best_masked_metrics |= {"top1": val.top1, "top5": val.top5}
        return found

    def compute_val_metrics(self, model: TrainableModel) -> Counts | MaskedCounts:
        """What the validation images say, those of other ranks included."""
        task = self.run
        batches = (
            pad_to_slowest_rank(model, self.iterate_val_batches(), task)
            if task.is_sharded
            else self.iterate_val_batches()
        )
        with disable_compile(model), make_autocast(task.device):
            if isinstance(model, MaskedViT):
                return evaluate_masked(model, batches, task.preprocess, over_ranks=distributed.all_reduce_sum)
            return evaluate_batches(
                model,
                batches,
                task.preprocess,
                reduce_ranks=lambda counts: all_reduce_counts(counts, task.device),
            )

    def run_probe(self, model: TrainableModel, step_end: StepEnd) -> None:
        """Tell what the features are worth to a classifier that learns from few images."""
        task = self.run
        with disable_compile(model):
            score = probe.measure_few_shot(
                get_encoder(model),
                task.dataset.splits["train"],
                task.dataset.splits["val"],
                task.preprocess,
                task.dataset.classes,
                shots=task.probe_shots,
                workers=task.workers,
                rank=task.group.rank,
                world=task.group.world_size,
                reduce_ranks=lambda rows: distributed.all_reduce_rows(rows, task.device),
            )
        self.log.log_event("probe", step=step_end.step, shots=task.probe_shots, top1=score.top1, std=score.std)
        self.log.log_step(step_end.step, {f"metrics/accuracy_{task.probe_shots}_shot": score.top1})
        self.log.write_line(f"{task.probe_shots}-shot: {score.top1:.2%} ± {score.std:.2%}")

    def save_weights(self, model: TrainableModel, step_end: StepEnd, *, is_best: bool) -> None:
        """Write the last weights, and where they are good the best."""
        if not (self.run.group.is_rank0 or self.run.is_sharded):
            return
        copied = fsdp.copy_full_model(model)
        if copied is None:
            return
        last = self.folder / "weights" / "last.safetensors"
        save(self.build_trained(copied, step_end), last, overwrite=True)
        if is_best:
            with files.write_atomically(last.with_name("best.safetensors"), overwrite=True) as fresh:
                shutil.copyfile(last, fresh)

    def save_checkpoint(self, step_end: StepEnd) -> None:
        """Take a snapshot of everything and hand it to the thread that writes it."""
        snapshot = self.checkpoint_writer.capture(self.state)
        weights = self.state.model.state_dict() if self.run.is_sharded else snapshot.tensors["model"]
        self.log.log_event(
            "checkpoint", step=step_end.step, loss=step_end.result.loss, weights=states.digest_tensors(weights)
        )
        facts = {name: getattr(self, name) for name in _CHECKPOINTED_FIELDS}
        facts |= {"files": self.log.get_file_sizes(), "machine": describe_machine(self.run)}
        facts |= {} if self.data_digest is None else {"data": self.data_digest._asdict()}
        if self.deadline is not None:
            facts |= {"decisions": list(self.planned_steps.decisions), "elapsed": self.deadline.elapsed}
        self.checkpoint_writer.submit(dataclasses.replace(snapshot, facts=facts))
        self.last_checkpoint_time = time.monotonic()

    def resume(self, checkpoint: states.Checkpoint) -> None:
        """Go back to where a snapshot was taken, the run's files too."""
        states.restore_state(self.state, checkpoint)
        for name, old_name in _CHECKPOINTED_FIELDS.items():
            setattr(self, name, checkpoint.facts.get(name, checkpoint.facts.get(old_name)))
        self.seconds_before_resume = self.training_seconds
        if not self.run.decisions:
            recorded = checkpoint.facts.get("decisions", ())
            self.planned_steps.decisions = [(step, steps) for step, steps in recorded if step <= checkpoint.step]
        if self.deadline is not None:
            self.deadline.resume(checkpoint.facts.get("elapsed", 0.0))
        self.log.truncate(checkpoint.facts["files"])

    def iterate_val_batches(self) -> Iterator[Batch]:
        """This rank's validation images, from memory after the first time where they are not too many."""
        if self.val_batches:
            yield from self.val_batches
            return
        size = self.run.preprocess.size
        total = len(self.run.dataset.splits["val"]) * len(self.run.preprocess.mean) * size[0] * size[1]
        views = []
        for batch in self.list_unreadable(iterate_split_batches(self.run, "val", self.run.group)):
            if total <= _MAX_CACHED_BYTES:
                views.append(batch._replace(pixels=batch.pixels.to(self.run.device)))
            yield batch
        self.val_batches = views  # whoever stops before the end has not seen all

    def build_trained(self, model: Model, step_end: StepEnd) -> Trained:
        """The weights with all that is needed to use them."""
        task, what, how = self.run, "trained", self.run.recipe.masked
        if how is not None:
            what = f"pre-trained without labels ({how.kind}, {how.target})"
        assumptions: tuple[str, ...] = ()
        changes: tuple[str, ...] = ()
        if task.initial_model is not None:
            what = f"{task.initial_model.origin.name}, fine-tuned"
            assumptions, changes = task.initial_model.origin.assumptions, task.initial_model.origin.changes
        name = f"{what} on {task.dataset.name}, step {step_end.step} of {step_end.steps}"
        licence = task.initial_model.origin.license if task.initial_model else None
        origin = Origin(format="vitrail", name=name, license=licence, assumptions=assumptions, changes=changes)
        if how is not None:
            return Trained(model, task.preprocess, None, origin)
        return Trained(model, task.preprocess, task.dataset.classes, origin, multi_label=task.dataset.multi_label)


_CHECKPOINTED_FIELDS = {  # field -> its key in checkpoints of earlier versions
    "best_score": "best",
    "best_masked_metrics": "kept",
    "loss_sum": "loss",
    "images_since_evaluation": "images",
    "evaluations_due": "period",
    "training_seconds": "seconds",
    "last_evaluation_seconds": "evaluated",
}


def describe_machine(run: TrainingRun) -> dict[str, Any]:
    """What the bits of a run depend on beside its configuration."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else run.device.type,
        "threads": torch.get_num_threads(),
        "processes": run.group.world_size,
        "sharded": run.is_sharded,
    }


def standard_error(accuracy: float, images: int) -> float:
    """The standard error of a share of so many images.

    Within it one accuracy is as good as another, and the later weights, learned longer and at a lower rate, are the
    better guess: with ten images to choose by, chance would choose.
    """
    return math.sqrt(accuracy * (1 - accuracy) / images)


@contextlib.contextmanager
def use_averaged_weights(state: TrainState) -> Iterator[TrainableModel]:
    """The model; where there is an average, it has those weights while the block lasts."""
    with contextlib.nullcontext() if state.ema is None else state.ema.apply_to_model():
        yield state.model


def pad_to_slowest_rank(model: TrainableModel, batches: Iterator[Batch], run: TrainingRun) -> Iterator[Batch]:
    """The batches, and then forward passes of nothing for as long as another rank has batches left.

    Each pass of a model that is sharded needs all ranks, and their shares of the images may differ.
    """
    for batch in batches:
        if len(batch.targets):  # of nothing, nothing is computed
            distributed.all_reduce_max(1, run.device)
            yield batch
    pixels = torch.zeros(1, len(run.preprocess.mean), *run.preprocess.size, device=run.device)
    hiding = torch.zeros(1, 2, run.num_patches, dtype=torch.int64, device=run.device)
    while distributed.all_reduce_max(0, run.device):
        model(*select_inputs(model, pixels, hiding))


def iterate_split_batches(run: TrainingRun, split: str, group: ProcessGroup = SINGLE_PROCESS) -> Iterator[Batch]:
    """The images of a split, or a rank's share of them; of a masked run with what is hidden of them."""
    if run.recipe.masked is not None:
        return loader.iter_masked_eval_batches(
            run.dataset.splits[split],
            run.preprocess,
            run.recipe.masked,
            run.num_patches,
            batch_size=_EVAL_BATCH_SIZE,
            rank=group.rank,
            world_size=group.world_size,
            workers=run.workers,
            skip_bad=run.dataset.skip_bad,
        )
    return loader.iter_eval_batches(
        run.dataset.splits[split],
        run.preprocess,
        batch_size=_EVAL_BATCH_SIZE,
        num_classes=len(run.dataset.classes),
        rank=group.rank,
        world_size=group.world_size,
        workers=run.workers,
        skip_bad=run.dataset.skip_bad,
    )
