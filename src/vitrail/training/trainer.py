"""A run from its first step to its result, in one folder (`run_folder`).

`Trainer.run` opens the folder, resumes from a checkpoint if there is one, and trains. Between steps it evaluates, saves
weights and writes checkpoints; after the last one it measures the best weights. The methods stand in that order.
Drawing figures and writing the report are left to the caller.
"""

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.dataset_digest import DataDigest, digest_dataset
from vitrail.data.loader import Batch
from vitrail.errors import DivergedError, StoppedError, VitrailError
from vitrail.evaluation import probe
from vitrail.evaluation.predictions import Counts, evaluate_batches
from vitrail.formatting import pluralize
from vitrail.model.masked import MaskedViT, get_encoder
from vitrail.runtime import distributed, signals
from vitrail.runtime.signals import StopRequest
from vitrail.training import checkpoint as checkpoints
from vitrail.training import loop, run_folder, run_weights
from vitrail.training.checkpoint import Checkpoint, CheckpointWriter
from vitrail.training.loop import (
    UNREADABLE_FILE,
    PlannedSteps,
    StepEnd,
    UnreadableImages,
    iterate_split_batches,
    iterate_train_batches,
    pad_to_slowest_rank,
)
from vitrail.training.run_evaluation import evaluate_best_weights, evaluate_masked
from vitrail.training.run_results import (
    Logger,
    MaskedCounts,
    PretrainingResult,
    RunLog,
    RunResult,
    ValidationResult,
    standard_error,
)
from vitrail.training.step import TrainableModel, TrainState, disable_compile, make_autocast, use_averaged_weights
from vitrail.training.step_verification import StepVerification
from vitrail.training.time_estimate import Deadline, limit_precision_seconds
from vitrail.training.training_run import TrainingRun, describe_machine

SAVE_EVERY_SECONDS = 600.0
_MAX_CACHED_BYTES = 2**30  # bytes of validation images that are kept from one evaluation to the next
_CHECKPOINTED_FIELDS = {  # field -> its key in checkpoints of version 0.1
    "best_score": "best",
    "best_masked_metrics": "kept",
    "loss_sum": "loss",
    "images_since_evaluation": "images",
    "evaluations_due": "period",
    "training_seconds": "seconds",
    "last_evaluation_seconds": "evaluated",
}


@dataclasses.dataclass
class Trainer:
    """Trains one run: `Trainer(training_run, folder).run()`.

    With `resume` the folder may hold the same run, which continues from its newest checkpoint, as it also does where
    torchrun restarts the processes. With `overwrite` the folder is cleared once nothing can be refused any more.
    """

    training_run: TrainingRun
    folder: Path
    after_step: Callable[[StepEnd], None] = lambda _: None
    after_evaluation: Callable[[ValidationResult], None] = lambda _: None
    after_checkpoint: Callable[[Path], None] = lambda _: None
    notify: Callable[[str], None] = lambda _: None
    make_loggers: Callable[[Path], Sequence[Logger]] = lambda _: ()
    resume: bool = False
    overwrite: bool = False
    save_every_seconds: float = SAVE_EVERY_SECONDS
    """Seconds from one checkpoint to the next; there is one after the last step too."""
    verify_every: int = 0
    """Steps from one that is computed twice to the next; 0 for none."""
    deadline: Deadline | None = None
    """When the run must end; its number of steps is then decided by time, and logged."""
    contents_digest: str = ""
    """The digest of the images' contents, where they were read before."""

    state: TrainState = dataclasses.field(init=False)
    log: RunLog = dataclasses.field(init=False)
    checkpoint_writer: CheckpointWriter = dataclasses.field(init=False)
    planned_steps: PlannedSteps = dataclasses.field(init=False)
    unreadable_images: UnreadableImages = dataclasses.field(init=False)
    data_digest: DataDigest | None = None
    """Identifies the images when the run is resumed; on rank 0 only."""
    stop_request: StopRequest = dataclasses.field(default_factory=StopRequest)
    best_score: float | None = None
    """The highest accuracy on val so far."""
    best_masked_metrics: dict[str, Any] | None = None
    """Of a masked model's best weights on val: their file has no heads to measure again."""
    loss_sum: float = 0.0
    """Summed over the images since the last evaluation."""
    images_since_evaluation: int = 0
    evaluations_due: int = 0
    """Evaluations that the epochs so far have called for."""
    training_seconds: float = 0.0
    """Of training so far, the time before an interruption included."""
    seconds_before_resume: float = 0.0
    last_evaluation_seconds: float = 0.0
    """`training_seconds` at the end of the last evaluation."""
    last_checkpoint_time: float = dataclasses.field(default_factory=time.monotonic)
    cached_val_batches: list[Batch] = dataclasses.field(default_factory=list)

    def run(self) -> RunResult | PretrainingResult | None:
        """Train, save the best and the last weights, and measure the best on test, or else on val.

        Rank 0 writes the files and returns the result; other ranks return None.
        """
        run = self.training_run
        self.state = run.build_state(notify=self.notify)  # before the folder: what is refused here needs none
        with contextlib.ExitStack() as stack:
            self._open_folder(stack)
            try:
                with signals.catch_stop_signals(self._announce_stop) as self.stop_request:
                    self._train()
                    return self._finish()
            except BaseException as error:
                if run.group.is_rank0:
                    with contextlib.suppress(OSError):  # a full disk has no room for it, and its own error must show
                        self._log_early_end(error)
                raise

    def _announce_stop(self, stop_signal: signal.Signals) -> None:
        """Tell at once that a signal was received: a step may take a while."""
        again = "; Ctrl-C again stops at once, without it" if stop_signal == signal.SIGINT else ""
        self.notify(f"{stop_signal.name}: saving a checkpoint after this step{again}")

    # --- open the folder, resume --------------------------------------------------------------------------------------

    def _open_folder(self, stack: contextlib.ExitStack) -> None:
        """Lock and open the folder, the log and the checkpoint writer, and resume; `stack` closes them."""
        run, folder, is_rank0 = self.training_run, self.folder, self.training_run.group.is_rank0
        stack.enter_context(checkpoints.explain_full_disk(folder, lambda: checkpoints.compute_size(self.state)))
        distributed.run_on_rank0(lambda: stack.enter_context(run_folder.lock_run_folder(folder)))
        shards = run.group.world_size if run.is_sharded else 1
        sizes = [shards * size for size in checkpoints.estimate_size(self.state)]
        distributed.run_on_rank0(lambda: checkpoints.check_disk_space(folder, *sizes))
        if self.overwrite and is_rank0:
            run_folder.clear_run_folder(folder)
        is_new = not run_folder.has_run_files(folder)
        self.data_digest = digest_dataset(run.dataset, self.contents_digest) if is_rank0 else None
        checkpoint = run_folder.open_run_folder(run, folder, self.data_digest, resume=self.resume, notify=self.notify)
        if is_rank0 and is_new:
            stack.push(partial(run_folder.discard_empty_run, folder))
        self.log = RunLog(folder, self.make_loggers(folder)) if is_rank0 else RunLog(None)
        stack.enter_context(contextlib.closing(self.log))
        all_gather = distributed.make_all_gather() if run.is_sharded else checkpoints.all_gather_single
        self.checkpoint_writer = CheckpointWriter(folder / "checkpoints", all_gather, after_write=self.after_checkpoint)
        stack.enter_context(contextlib.closing(self.checkpoint_writer))
        self.unreadable_images = UnreadableImages(folder, sum(len(split) for split in run.dataset.splits.values()))
        self.unreadable_images.load()
        self.planned_steps = PlannedSteps(run.plan.total_steps, list(run.decisions))
        if checkpoint is not None:
            self._restore(checkpoint)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Return to the state of a checkpoint, the run's files included."""
        checkpoints.restore_state(self.state, checkpoint)
        for name, old_name in _CHECKPOINTED_FIELDS.items():
            setattr(self, name, checkpoint.facts.get(name, checkpoint.facts.get(old_name)))
        self.seconds_before_resume = self.training_seconds
        if not self.training_run.decisions:
            recorded = checkpoint.facts.get("decisions", ())
            self.planned_steps.decisions = [(step, steps) for step, steps in recorded if step <= checkpoint.step]
        if self.deadline is not None:
            self.deadline.resume(checkpoint.facts.get("elapsed", 0.0))
        self.log.truncate(checkpoint.facts["files"])
        self.log.write_line(f"resumed after step {checkpoint.step:,}")

    # --- steps --------------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Compute the steps that are left."""
        run = self.training_run
        decided_steps = [steps for _, steps in self.planned_steps.decisions]
        plan = run.make_plan_up_to(max([0 if self.deadline is None else self.deadline.max_steps, *decided_steps]))
        batches = self.unreadable_images.watch(iterate_train_batches(run, self.state.step, plan))
        with contextlib.closing(batches):
            verification = None
            if self.verify_every:
                verification = StepVerification(self.verify_every, self.folder, run.group.rank)
            if self.deadline is not None:
                self.deadline.begin_step()
            loop.train_steps(
                self.state,
                batches,
                run.training_data,
                plan,
                run.recipe,
                after_step=self.finish_step,
                planned_steps=self.planned_steps,
                verification=verification,
            )

    def finish_step(self, step_end: StepEnd) -> None:
        """Log a step; evaluate at the end of an epoch that is due, or of the run; write a checkpoint if it is time."""
        run, result = self.training_run, step_end.result
        self.training_seconds = self.seconds_before_resume + step_end.seconds
        if self.deadline is not None:
            self._replan(self.deadline, step_end.step)
        step_end = step_end._replace(seconds=self.training_seconds, steps=self.planned_steps.get_total(step_end.step))
        self.loss_sum += result.loss * result.images
        self.images_since_evaluation += result.images
        self.log.log_step(
            step_end.step, {"train/step_loss": result.loss, "train/gradient": result.grad_norm, "lr": result.lr}
        )
        self.after_step(step_end)
        evaluations_due = int(step_end.epoch) // run.eval_every_epochs
        if evaluations_due > self.evaluations_due or step_end.step == step_end.steps:
            self.evaluations_due = evaluations_due
            self._evaluate(step_end)
        self._save_or_stop(step_end)
        if self.deadline is not None:
            self.deadline.begin_step()

    def _replan(self, deadline: Deadline, step: int) -> None:
        """Decide again how many steps there are, by rank 0's clock."""
        deadline.end_step()
        before = self.planned_steps.get_total(step)
        steps = deadline.replan(step, before) if self.training_run.group.is_rank0 else 0
        self.planned_steps.set_total(step, distributed.all_reduce_max(steps, self.training_run.device))
        if self.planned_steps.get_total(step) != before:
            self.log.log_event("plan", step=step, steps=self.planned_steps.get_total(step), elapsed=deadline.elapsed)

    @property
    def trained_images(self) -> int:
        """Images trained on so far, counted once for each time."""
        step, plan = self.state.step, self.training_run.plan
        has_full_steps = self.deadline is not None or self.training_run.decisions or step < plan.total_steps
        return step * plan.batch_size if has_full_steps else plan.total_samples

    # --- evaluate -----------------------------------------------------------------------------------------------------

    def _evaluate(self, step_end: StepEnd) -> None:
        """Measure the weights on val, log the result, and save the weights."""
        run = self.training_run
        start = time.perf_counter()
        train_loss = self.loss_sum / self.images_since_evaluation
        train_seconds = max(step_end.seconds - self.last_evaluation_seconds, 1e-9)
        with use_averaged_weights(self.state) as model:
            val = self._compute_val_metrics(model)
            if not math.isfinite(val.mean_loss):  # the next step would notice, but the last has none
                raise DivergedError(
                    f"after step {step_end.step:,} the loss of the validation images is {val.mean_loss}; the weights"
                    f" before are kept. Try a lower learning rate than {run.recipe.optimizer.lr}, or a"
                    " longer warm-up"
                )
            is_best = self.update_best(val)
            run_weights.save_weights(run, model, self.folder, step_end, is_best=is_best)
            if run.probe_shots:
                self._run_probe(model, step_end)
        result = ValidationResult(step_end, train_loss, val, self.images_since_evaluation / train_seconds)
        self.loss_sum, self.images_since_evaluation = 0.0, 0
        row = (step_end.epoch, step_end.seconds, train_loss, val.top1, val.top5, val.mean_loss, step_end.result.lr)
        self.log.log_evaluation(step_end.step, row)
        self.log.write_line(str(result))
        self.after_evaluation(result)
        seconds = time.perf_counter() - start
        self.last_evaluation_seconds = step_end.seconds + seconds
        if self.deadline is not None:
            self.deadline.end_evaluation(seconds)

    def _compute_val_metrics(self, model: TrainableModel) -> Counts | MaskedCounts:
        """The metrics of the validation images of all ranks."""
        run = self.training_run
        batches = self._iterate_val_batches()
        if run.is_sharded:
            batches = pad_to_slowest_rank(model, batches, run)
        with disable_compile(model), make_autocast(run.device):
            if isinstance(model, MaskedViT):
                return evaluate_masked(model, batches, run.preprocess, reduce_ranks=distributed.all_reduce_sum)
            return evaluate_batches(model, batches, run.preprocess)

    def _iterate_val_batches(self) -> Iterator[Batch]:
        """This rank's validation images, from memory after the first time if they fit."""
        if self.cached_val_batches:
            yield from self.cached_val_batches
            return
        run = self.training_run
        size = run.preprocess.size
        total_bytes = len(run.dataset.splits["val"]) * len(run.preprocess.mean) * size[0] * size[1]
        batches = []
        for batch in self.unreadable_images.watch(iterate_split_batches(run, "val", run.group)):
            if total_bytes <= _MAX_CACHED_BYTES:
                batches.append(batch._replace(pixels=batch.pixels.to(run.device)))
            yield batch
        self.cached_val_batches = batches  # not reached by a caller who stops early

    def _run_probe(self, model: TrainableModel, step_end: StepEnd) -> None:
        """Log the accuracy of a few-shot linear classifier on the model's features."""
        run, shots = self.training_run, self.training_run.probe_shots
        with disable_compile(model):
            score = probe.measure_few_shot(
                get_encoder(model),
                run.dataset.splits["train"],
                run.dataset.splits["val"],
                run.preprocess,
                run.dataset.classes,
                shots=shots,
                workers=run.workers,
                group=run.group,
            )
        self.log.log_event("probe", step=step_end.step, shots=shots, top1=score.top1, std=score.std)
        self.log.log_step(step_end.step, {f"metrics/accuracy_{shots}_shot": score.top1})
        self.log.write_line(f"{shots}-shot: {score.top1:.2%} ± {score.std:.2%}")

    # --- choose weights -----------------------------------------------------------------------------------------------

    def update_best(self, val: Counts | MaskedCounts) -> bool:
        """Whether the weights with these validation metrics are the best so far; then remember the metrics."""
        keep_last = self.training_run.train_on_val  # once val is trained on, there is nothing to choose by
        if isinstance(val, Counts):
            use_macro = self.training_run.recipe.logit_adjustment and val.has_confusion
            score = val.macro_accuracy if use_macro else val.top1
            self.best_score = score if self.best_score is None else max(score, self.best_score)
            return keep_last or score >= self.best_score - standard_error(self.best_score, val.images)
        best = self.best_masked_metrics
        is_best = keep_last or best is None or val.mean_loss <= best["loss"]
        if is_best:
            self.best_masked_metrics = {"images": val.images, "patches": val.patches, "loss": val.mean_loss}
            self.best_masked_metrics |= {"top1": val.top1, "top5": val.top5}
        return is_best

    # --- checkpoint ---------------------------------------------------------------------------------------------------

    def _save_or_stop(self, step_end: StepEnd) -> None:
        """Write a checkpoint if it is time, after the last step, or if the run was asked to stop; then stop."""
        run = self.training_run
        self.checkpoint_writer.raise_errors()
        self.stop_request.restore_handlers()
        is_late = run.group.is_rank0 and time.monotonic() - self.last_checkpoint_time >= self.save_every_seconds
        request = distributed.all_reduce_max(2 * (self.stop_request.signal or 0) + is_late, run.device)
        stop_signal, is_due = divmod(request, 2)
        if (run.group.is_rank0 or run.is_sharded) and (is_due or stop_signal or step_end.step == step_end.steps):
            self.save_checkpoint(step_end)
        if stop_signal:
            self.checkpoint_writer.wait()
            distributed.barrier()  # or the first to exit would have torchrun kill those that still write
            raise StoppedError(
                f"{signal.Signals(stop_signal).name}: stopped after step {step_end.step:,} of {step_end.steps:,}, the"
                f" checkpoint is saved in {self.folder}; the same command with --resume continues",
                stop_signal,
            )

    def save_checkpoint(self, step_end: StepEnd) -> None:
        """Copy the whole state and have a thread write it."""
        checkpoint = self.checkpoint_writer.capture(self.state)
        copied = {} if self.training_run.is_sharded else checkpoint.tensors["model"]  # on the CPU already
        digest = checkpoints.digest_weights(self.state.model.state_dict() | copied)
        self.log.log_event("checkpoint", step=step_end.step, loss=step_end.result.loss, weights=digest)
        facts = {name: getattr(self, name) for name in _CHECKPOINTED_FIELDS} | {"weights": digest}
        facts |= {"files": self.log.get_file_sizes(), "machine": describe_machine(self.training_run)}
        facts |= {} if self.data_digest is None else {"data": self.data_digest._asdict()}
        if self.deadline is not None:
            facts |= {"decisions": list(self.planned_steps.decisions), "elapsed": self.deadline.elapsed}
        self.checkpoint_writer.submit(dataclasses.replace(checkpoint, facts=facts))
        self.last_checkpoint_time = time.monotonic()

    # --- finish -------------------------------------------------------------------------------------------------------

    def _finish(self) -> RunResult | PretrainingResult | None:
        """Measure the best weights, on rank 0, and report images that could not be read."""
        self.checkpoint_writer.wait()
        results: list[RunResult | PretrainingResult] = []
        distributed.run_on_rank0(lambda: results.append(self._compute_result()))
        if results:
            self.log.log_result(self.state.step, results[0])
        if names := list(self.unreadable_images.names):
            self.notify(
                f"warning: {pluralize(len(names), 'image')} cannot be read, such as {names[0]}; left out during the"
                f" run, and listed in {UNREADABLE_FILE}"
            )
        return results[0] if results else None

    def _compute_result(self) -> RunResult | PretrainingResult:
        run = self.training_run
        seconds, epochs = self.training_seconds, self.trained_images / len(run.train_split)
        if run.recipe.masked is None:
            get_seconds = partial(limit_precision_seconds, seconds, self.deadline)
            batches = self._iterate_until_stopped
            return evaluate_best_weights(
                run, self.folder, self.log, batches, get_seconds, seconds=seconds, epochs=epochs
            )
        metrics = self.best_masked_metrics  # the weights have no head to calibrate
        assert metrics is not None, "there is an evaluation after the last step"
        result = PretrainingResult(**metrics, seconds=seconds, epochs=epochs)
        self.log.log_event("pretrained", split="val", **metrics, seconds=seconds)
        color_accuracy = "" if result.top1 is None else f", {result.top1:.2%} of the colors correct"
        self.log.write_line(f"val: loss {result.loss:.4f} of {result.patches:,} masked patches{color_accuracy}")
        return result

    def _iterate_until_stopped(self, split: str) -> Iterator[Batch]:
        """All images of a split, not only this rank's, until a signal asks the run to stop."""
        run = self.training_run
        is_cached = split == "val" and run.group.world_size == 1
        batches = self._iterate_val_batches() if is_cached else iterate_split_batches(run, split)
        for batch in self.unreadable_images.watch(batches):
            if self.stop_request.signal is not None:
                raise StoppedError(
                    f"{self.stop_request.signal.name}: stopped after the last step, the checkpoint is saved; the same"
                    " command with --resume measures the weights",
                    self.stop_request.signal,
                )
            yield batch

    def _log_early_end(self, error: BaseException) -> None:
        """Log why the run ended early."""
        run, step = self.training_run, self.state.step
        reason = str(error) if isinstance(error, VitrailError) else type(error).__name__
        facts: dict[str, Any] = {}
        if isinstance(error, DivergedError):
            parts = run.plan.list_micro_batches(step)
            rows = run.training_data.order.get_sample_indices(np.arange(parts[0].start, parts[-1].stop))
            facts = {"step": step, "batch": [run.train_split.get_image_name(row) for row in rows.tolist()]}
        if isinstance(error, StoppedError) and error.is_final:
            (self.folder / run_folder.STOPPED_FILE).write_text(f"{reason}\n")  # if torchrun restarts, exit at once
        self.log.log_event("stopped", reason=reason, **facts)
        self.log.write_line(f"stopped: {reason}")
