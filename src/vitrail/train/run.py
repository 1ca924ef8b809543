"""A whole run in its folder: what was to be done, how it went, the weights, and what they do on images held out.

    runs/NAME/  config.json  results.csv  events.jsonl  run.log  weights/best.safetensors  weights/last.safetensors
                per_class.csv  predictions.csv

Columns and names of files are those people's scripts already know. Drawing is left to whoever has figures.
"""

import copy
import csv
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vitrail.data import loader
from vitrail.data.loader import Batch
from vitrail.errors import UsageError, VitrailError
from vitrail.evaluate import calibrate
from vitrail.evaluate.classify import Answers, Counts, answers, classify, outputs
from vitrail.model.build import Model
from vitrail.train import loop
from vitrail.train.log import Book, Logger
from vitrail.train.loop import Moment
from vitrail.train.step import State, begin, precision, uncompiled
from vitrail.train.task import Task, described
from vitrail.weights.load import load, save
from vitrail.weights.trained import Origin, Trained

_EVALUATION_BATCH = 256
_KEPT_VIEWS = 2**30  # bytes of evaluation images that are kept from one evaluation to the next
_CALIBRATION = 2**27  # logits that a temperature is fitted to, at most


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The state of a run after an evaluation."""

    moment: Moment
    train_loss: float
    val: Counts
    images_per_second: float

    def __str__(self) -> str:
        moment = self.moment
        left = moment.seconds / moment.step * (moment.steps - moment.step)
        return (
            f"epoch {moment.epoch:.4g}: loss {self.train_loss:.3f}, validation {self.val.top1:.1%},"
            f" {self.images_per_second:,.0f} images/s, {left:,.0f} s left"
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run came to."""

    split: str
    """Where it was measured: test, or val where there is no test."""
    counts: Counts
    answers: Answers
    temperature: float
    calibration_error: float
    """Of the answers, with that temperature."""
    seconds: float
    """Of training, its evaluations included."""
    epochs: float


def run(
    task: Task,
    folder: Path,
    *,
    after_step: Callable[[Moment], None],
    after_epoch: Callable[[Evaluated], None],
    loggers: Callable[[Path], Sequence[Logger]] = lambda _: (),
) -> Result:
    """Train, keep the best and the last weights in a new folder, and measure the best on test, or else on val."""
    if folder.exists():
        raise UsageError(f"{folder} exists already; choose another name with --out")
    model = task.model()
    (folder / "weights").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(described(task), indent=1) + "\n")
    book = Book(folder, loggers(folder))
    keeper = _Keeper(
        task, folder, book, begin(model, task.recipe, task.counts, recorded=task.recorded), after_step, after_epoch
    )
    try:
        loop.run(keeper.state, feed(task), task.training, task.plan, task.recipe, after_step=keeper.stepped)
        assert keeper.last is not None, "the last step is always evaluated"
        return keeper.finished(keeper.last)
    except BaseException as error:
        if keeper.best is None:  # nothing was learned yet that could be lost, and the name is free again
            book.close()
            shutil.rmtree(folder)
        else:
            reason = str(error) if isinstance(error, VitrailError) else type(error).__name__
            book.event("stopped", reason=reason)
            book.say(f"stopped: {reason}")
        raise
    finally:
        book.close()


@dataclasses.dataclass
class _Keeper:
    """What happens between the steps of a run: evaluation, weights, words."""

    task: Task
    folder: Path
    book: Book
    state: State
    after_step: Callable[[Moment], None]
    after_epoch: Callable[[Evaluated], None]
    best: float | None = None
    """The highest accuracy on val so far."""
    last: Evaluated | None = None
    losses: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    counted: int = 0
    since: float = 0.0
    views: list[Batch] = dataclasses.field(default_factory=list)

    def stepped(self, moment: Moment) -> None:
        """Take note of a step, and evaluate where an epoch that is due ends, or the run."""
        outcome = moment.outcome
        self.losses.append((outcome.loss * outcome.images, outcome.images))
        self.book.step(moment.step, {"train/step_loss": outcome.loss, "train/gradient": outcome.norm, "lr": outcome.lr})
        self.after_step(moment)
        period = int(moment.epoch) // self.task.every
        if period > self.counted or moment.step == moment.steps:
            self.counted = period
            self.evaluate(moment)

    def evaluate(self, moment: Moment) -> None:
        """Measure, write, and keep the weights if they are the best so far."""
        images = sum(number for _, number in self.losses)
        loss = sum(value for value, _ in self.losses) / images
        rate = images / max(moment.seconds - self.since, 1e-9)
        model, device = _evaluated_model(self.state), self.task.device
        with uncompiled(model), precision(device):
            val = classify(model, self.val(), self.task.preprocess)
        found = Evaluated(moment, loss, val, rate)
        self.losses.clear()
        trained = self.trained(model, moment)
        save(trained, self.folder / "weights" / "last.safetensors", overwrite=True)
        score = val.macro if self.task.recipe.balanced and not self.task.dataset.several else val.top1
        self.best = score if self.best is None else max(score, self.best)
        if score >= self.best - _doubt(self.best, val.images) or self.task.everything:
            save(trained, self.folder / "weights" / "best.safetensors", overwrite=True)
        row = (moment.epoch, moment.seconds, loss, val.top1, val.top5, val.mean_loss, moment.outcome.lr)
        self.book.row(moment.step, row)
        self.book.say(str(found))
        self.last = found
        self.after_epoch(found)
        self.since = moment.seconds

    def finished(self, last: Evaluated) -> Result:
        """The best weights calibrated on val, and measured on test."""
        task, path = self.task, self.folder / "weights" / "best.safetensors"
        split = "test" if "test" in task.dataset.splits else "val"
        best = load(path)
        model = best.model.to(task.device)
        temperature = 1.0 if task.everything else calibrate.temperature(*self.logits(model))
        save(dataclasses.replace(best, temperature=temperature), path, overwrite=True)
        images = self.val() if split == "val" else _batches(task, split)
        counts, said = answers(model, images, task.preprocess, temperature=temperature)
        error = calibrate.expected_calibration_error(said.probabilities[:, 0], said.right)
        result = Result(split, counts, said, temperature, error, last.moment.seconds, last.moment.epoch)
        facts = {"images": counts.images, "right": counts.right, "top1": counts.top1, "top5": counts.top5}
        calibration = {"loss": counts.mean_loss, "temperature": temperature, "calibration_error": error}
        self.book.event("end", split=split, **facts, **calibration, seconds=result.seconds)
        self.book.say(f"{split}: {counts.top1:.2%} of {counts.images:,} images right; temperature {temperature:.3f}")
        write_predictions(task, result, self.folder / "predictions.csv")
        if not task.dataset.several:
            write_classes(task, counts, self.folder / "per_class.csv")
        return result

    def logits(self, model: Model) -> tuple[Tensor, Tensor]:
        """Logits and targets of as many validation images as a temperature needs, on the CPU."""
        limit = max(1, _CALIBRATION // len(self.task.dataset.classes))
        logits, targets, count = [], [], 0
        for some, true, _ in outputs(model, self.val(), self.task.preprocess):
            logits.append(some.cpu())
            targets.append(true.cpu())
            count += len(some)
            if count >= limit:
                break
        return torch.cat(logits), torch.cat(targets)

    def val(self) -> Iterator[Batch]:
        """The validation images, from memory after the first time where they are not too many."""
        if self.views:
            yield from self.views
            return
        size = self.task.preprocess.size
        total = len(self.task.dataset.splits["val"]) * len(self.task.preprocess.mean) * size[0] * size[1]
        for batch in _batches(self.task, "val"):
            if total <= _KEPT_VIEWS:
                self.views.append(batch._replace(pixels=batch.pixels.to(self.task.device)))
            yield batch

    def trained(self, model: Model, moment: Moment) -> Trained:
        """The weights with all that is needed to use them."""
        task, what = self.task, "trained"
        changes: tuple[str, ...] = ()
        if task.start is not None:
            what = f"{task.start.origin.name}, fine-tuned"
            changes = task.start.origin.changes
        name = f"{what} on {task.dataset.name}, step {moment.step} of {moment.steps}"
        licence = task.start.origin.licence if task.start else None
        origin = Origin(format="vitrail", name=name, licence=licence, changes=changes)
        return Trained(copy.deepcopy(model).cpu().eval(), task.preprocess, task.dataset.classes, origin)


def _doubt(share: float, images: int) -> float:
    """The standard error of a share of so many images.

    Within it one accuracy is as good as another, and the later weights, learned longer and at a lower rate, are the
    better guess: with ten images to choose by, chance would choose.
    """
    return math.sqrt(share * (1 - share) / images)


def feed(task: Task, start: int = 0) -> Iterator[Batch]:
    """The run's micro-batches: of images that live on the GPU where they are small, else from worker processes."""
    training = task.training
    if task.device.type == "cuda":
        found = loader.resident(
            training.split,
            channels=len(task.preprocess.mean),
            classes=training.classes,
            device=task.device,
            workers=task.workers,
        )
        if found is not None:
            return loader.resident_batches(training, task.plan, *found, start=start)
    return loader.training_batches(training, task.plan, start=start, workers=task.workers)


def write_predictions(task: Task, result: Result, path: Path) -> None:
    """A row for each image: its name, labels, what the model said, how sure it was and how wrong."""
    split, names = task.dataset.splits[result.split], task.dataset.classes
    said = result.answers
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "label", "predicted", "probability", "loss", "right"))
        columns = (said.images, said.classes[:, 0], said.probabilities[:, 0], said.losses, said.right)
        for image, first, probability, loss, right in zip(*(column.tolist() for column in columns), strict=True):
            label = " | ".join(names[index] for index in split.labels(image))
            row = (split.name(image), label, names[first], f"{probability:.6f}", f"{loss:.6f}", int(right))
            writer.writerow(row)


def write_classes(task: Task, counts: Counts, path: Path) -> None:
    """A row for each class: how many of its images were found, and how many answers of that name were true."""
    confusion = counts.confusion
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(("class", "train_images", "images", "right", "recall", "precision"))
        for index, name in enumerate(task.dataset.classes):
            images, right = int(confusion[index].sum()), int(confusion[index, index])
            said = int(confusion[:, index].sum())
            shares = (f"{right / total:.6f}" if total else "" for total in (images, said))
            writer.writerow((name, task.counts[index], images, right, *shares))


def _evaluated_model(state: State) -> Model:
    """The average's model where there is one, else the model itself."""
    if state.average is None:
        return state.model
    averaged = copy.deepcopy(state.model)
    averaged.load_state_dict(state.average.tensors)
    return averaged


def _batches(task: Task, split: str) -> Iterator[Batch]:
    return loader.evaluation_batches(
        task.dataset.splits[split],
        task.preprocess,
        batch=_EVALUATION_BATCH,
        classes=len(task.dataset.classes),
        workers=task.workers,
    )
