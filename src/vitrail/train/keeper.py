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
from vitrail.data.dataset import BAD_SHARE
from vitrail.data.digest import DataDigest
from vitrail.data.loader import Batch
from vitrail.errors import DataError
from vitrail.evaluate import probe
from vitrail.evaluate.classify import Counts, classify
from vitrail.model.build import Model
from vitrail.model.masked import MaskedViT, encoder
from vitrail.plurals import plural
from vitrail.train import distributed, sharding
from vitrail.train import state as states
from vitrail.train.deadline import Deadline, PlannedSteps
from vitrail.train.distributed import ALONE, Group
from vitrail.train.log import Book
from vitrail.train.loop import Moment
from vitrail.train.reconstruction import Reconstruction, Shown, reconstruct
from vitrail.train.signals import Requests, StoppedError
from vitrail.train.step import DivergedError, Learner, State, inputs, precision, uncompiled
from vitrail.train.task import Task
from vitrail.weights.load import save
from vitrail.weights.trained import Origin, Trained

_EVALUATION_BATCH = 256
UNREADABLE = "unreadable.txt"
"""The images that a run met and left out, one a line."""
_KEPT_VIEWS = 2**30  # bytes of evaluation images that are kept from one evaluation to the next


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The state of a run after an evaluation."""

    moment: Moment
    train_loss: float
    val: Counts | Reconstruction
    images_per_second: float

    @property
    def shown(self) -> Shown | None:
        """A few images of a masked run, and what was told of them."""
        return self.val.shown if isinstance(self.val, Reconstruction) else None

    @property
    def validation(self) -> str:
        """What the images held out say, in a few words."""
        if isinstance(self.val, Counts):
            return f"validation {self.val.top1:.1%}"
        right = "" if self.val.top1 is None else f", {self.val.top1:.1%} of the colours"
        return f"validation {self.val.mean_loss:.3f}{right}"

    def __str__(self) -> str:
        moment = self.moment
        left = moment.seconds / moment.step * (moment.steps - moment.step)
        return (
            f"epoch {moment.epoch:.4g}: loss {self.train_loss:.3f}, {self.validation},"
            f" {self.images_per_second:,.0f} images/s, {left:,.0f} s left"
        )


@dataclasses.dataclass
class Keeper:
    """The course of one run."""

    task: Task
    folder: Path
    book: Book
    state: State
    after_step: Callable[[Moment], None]
    after_epoch: Callable[[Evaluated], None]
    writer: states.Writer
    save_every: float
    """Seconds from one checkpoint to the next; there is one after the last step too."""
    data: DataDigest | None = None
    """What the images are, by which a resumed run knows them; the process that leads has it."""
    asked: Requests = dataclasses.field(default_factory=Requests)
    planned: PlannedSteps = dataclasses.field(default_factory=lambda: PlannedSteps(0))
    """How many steps there are."""
    deadline: Deadline | None = None
    """By when the run must have ended, where its steps are decided by time."""

    best: float | None = None
    """The highest accuracy on val so far."""
    kept: dict[str, Any] | None = None
    """What val said of the best weights of a masked model: their file has no heads that could be asked again."""
    loss: float = 0.0
    """Summed over the images since the last evaluation."""
    images: int = 0
    period: int = 0
    """Evaluations that the epochs so far have called for."""
    seconds: float = 0.0
    """Of training so far, that before an interruption included."""
    before: float = 0.0
    """Of it, before the interruption."""
    evaluated: float = 0.0
    """The time of the last evaluation."""
    saved: float = dataclasses.field(default_factory=time.monotonic)
    """When the last checkpoint was taken."""
    views: list[Batch] = dataclasses.field(default_factory=list)
    unreadable: dict[str, None] = dataclasses.field(default_factory=dict)
    """Images that could not be read and were left out, in the order in which they were met."""

    def stepped(self, moment: Moment) -> None:
        """Take note of a step; evaluate where an epoch that is due ends, or the run; save where it is time."""
        outcome, self.seconds = moment.outcome, self.before + moment.seconds
        if self.deadline is not None:
            self.replan(self.deadline, moment.step)
        moment = moment._replace(seconds=self.seconds, steps=self.planned.total(moment.step))
        self.loss += outcome.loss * outcome.images
        self.images += outcome.images
        self.book.step(moment.step, {"train/step_loss": outcome.loss, "train/gradient": outcome.norm, "lr": outcome.lr})
        self.after_step(moment)
        period = int(moment.epoch) // self.task.every
        if period > self.period or moment.step == moment.steps:
            self.period = period
            self.evaluate(moment)
        self.writer.check()
        late = self.task.group.leads and time.monotonic() - self.saved >= self.save_every
        asked, due = divmod(distributed.agreed(2 * (self.asked.signal or 0) + late, self.task.device), 2)
        if (self.task.group.leads or self.task.sharded) and (due or asked or moment.step == moment.steps):
            self.checkpoint(moment)
        if asked:
            self.writer.wait()
            distributed.wait()  # or the first to end would have torchrun end those that still write
            raise StoppedError(
                f"{signal.Signals(asked).name}: stopped after step {moment.step:,} of {moment.steps:,}, the state is"
                " saved; the same command with --resume goes on",
                asked,
            )
        if self.deadline is not None:
            self.deadline.begin_step()

    @property
    def trained_images(self) -> int:
        """Images that were trained on so far, those seen again counted again."""
        step, plan = self.state.step, self.task.plan
        whole = self.deadline is not None or self.task.decisions or step < plan.steps
        return step * plan.batch if whole else plan.total

    def replan(self, deadline: Deadline, step: int) -> None:
        """Decide again how many steps there are, by the clock of the process that leads."""
        deadline.end_step()
        steps = deadline.replan(step, self.planned.total(step)) if self.task.group.leads else 0
        before = self.planned.total(step)
        self.planned.change(step, distributed.agreed(steps, self.task.device))
        if self.planned.total(step) != before:
            self.book.event("plan", step=step, steps=self.planned.total(step), elapsed=deadline.elapsed)

    def recall_unreadable(self) -> None:
        """Read the images that were left out before an interruption."""
        path = self.folder / UNREADABLE
        self.unreadable = dict.fromkeys(path.read_text("utf-8").splitlines() if path.is_file() else ())

    def list_unreadable(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        """The batches; images left out of them are listed in the folder, and refused where they are many."""
        with contextlib.closing(batches) if isinstance(batches, Generator) else contextlib.nullcontext():
            for batch in batches:
                if batch.left_out:
                    self._leave_out(batch.left_out)
                yield batch

    def _leave_out(self, names: Iterable[str]) -> None:
        lines = (repr(name)[1:-1] if "\n" in name else name for name in names)
        found = [line for line in dict.fromkeys(lines) if line not in self.unreadable]
        self.unreadable |= dict.fromkeys(found)
        if found and self.folder.is_dir():  # on another machine than that of the process that leads it need not be
            with (self.folder / UNREADABLE).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(f"{line}\n" for line in found)
        images = sum(len(split) for split in self.task.dataset.splits.values())
        if len(self.unreadable) > BAD_SHARE * images:
            first = next(iter(self.unreadable))
            raise DataError(
                f"{plural(len(self.unreadable), 'image')} of {images:,} cannot be read, such as {first}: more than"
                f" {BAD_SHARE:.0%} are too many"
            )

    def heeding(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of what is measured after the last step, until a signal asks for an end."""
        for batch in self.list_unreadable(batches):
            if self.asked.signal is not None:
                raise StoppedError(
                    f"{self.asked.signal.name}: stopped after the last step, the state is saved; the same command with"
                    " --resume measures the weights",
                    self.asked.signal,
                )
            yield batch

    def evaluate(self, moment: Moment) -> None:
        """Measure, write, and keep the weights if they are the best so far."""
        begun = time.perf_counter()
        loss, rate = self.loss / self.images, self.images / max(moment.seconds - self.evaluated, 1e-9)
        with averaged(self.state) as model:
            val = self.measured(model)
            if not math.isfinite(val.mean_loss):  # the next step would see it, but the last has none
                raise DivergedError(
                    f"after step {moment.step:,} the loss of the validation images is {val.mean_loss}; the weights"
                    f" before are kept. Try a lower learning rate than {self.task.recipe.optimiser.lr}, or a longer"
                    " warm-up"
                )
            self.keep(model, moment, good=self.good(val))
            if self.task.probe:
                self.probed(model, moment)
        found = Evaluated(moment, loss, val, rate)
        self.loss, self.images = 0.0, 0
        row = (moment.epoch, moment.seconds, loss, val.top1, val.top5, val.mean_loss, moment.outcome.lr)
        self.book.row(moment.step, row)
        self.book.say(str(found))
        self.after_epoch(found)
        taken = time.perf_counter() - begun
        self.evaluated = moment.seconds + taken
        if self.deadline is not None:
            self.deadline.end_evaluation(taken)

    def good(self, val: Counts | Reconstruction) -> bool:
        """Whether the weights of which val says this are the best so far; then it is remembered."""
        last = self.task.everything  # with val trained on, there is nothing to choose by
        if isinstance(val, Counts):
            score = val.macro if self.task.recipe.balanced and val.by_class else val.top1
            self.best = score if self.best is None else max(score, self.best)
            return last or score >= self.best - doubt(self.best, val.images)
        found = last or self.kept is None or val.mean_loss <= self.kept["loss"]
        if found:
            self.kept = {"images": val.images, "patches": val.patches, "loss": val.mean_loss}
            self.kept |= {"top1": val.top1, "top5": val.top5}
        return found

    def measured(self, model: Learner) -> Counts | Reconstruction:
        """What the validation images say, those of other ranks included."""
        task = self.task
        batches = in_step(model, self.val(), task) if task.sharded else self.val()
        with uncompiled(model), precision(task.device):
            if isinstance(model, MaskedViT):
                return reconstruct(model, batches, task.preprocess, over_ranks=distributed.summed)
            return classify(
                model, batches, task.preprocess, over_ranks=lambda counts: distributed.counted(counts, task.device)
            )

    def probed(self, model: Learner, moment: Moment) -> None:
        """Tell what the features are worth to a classifier that learns from few images."""
        task = self.task
        with uncompiled(model):
            score = probe.few_shot(
                encoder(model),
                task.dataset.splits["train"],
                task.dataset.splits["val"],
                task.preprocess,
                task.dataset.classes,
                shots=task.probe,
                workers=task.workers,
                rank=task.group.rank,
                world=task.group.world,
                over_ranks=lambda rows: distributed.completed(rows, task.device),
            )
        self.book.event("probe", step=moment.step, shots=task.probe, top1=score.top1, std=score.std)
        self.book.step(moment.step, {f"metrics/accuracy_{task.probe}_shot": score.top1})
        self.book.say(f"{task.probe}-shot: {score.top1:.2%} ± {score.std:.2%}")

    def keep(self, model: Learner, moment: Moment, *, good: bool) -> None:
        """Write the last weights, and where they are good the best."""
        if not (self.task.group.leads or self.task.sharded):
            return
        copied = sharding.copied(model)
        if copied is None:
            return
        last = self.folder / "weights" / "last.safetensors"
        save(self.trained(copied, moment), last, overwrite=True)
        if good:
            with files.replacing(last.with_name("best.safetensors"), overwrite=True) as fresh:
                shutil.copyfile(last, fresh)

    def checkpoint(self, moment: Moment) -> None:
        """Take a snapshot of everything and hand it to the thread that writes it."""
        snapshot = self.writer.take(self.state)
        weights = self.state.model.state_dict() if self.task.sharded else snapshot.tensors["model"]
        self.book.event("checkpoint", step=moment.step, loss=moment.outcome.loss, weights=states.digest(weights))
        facts = {name: getattr(self, name) for name in _REMEMBERED}
        facts |= {"files": self.book.sizes(), "machine": machine(self.task)}
        facts |= {} if self.data is None else {"data": self.data._asdict()}
        if self.deadline is not None:
            facts |= {"decisions": list(self.planned.decisions), "elapsed": self.deadline.elapsed}
        self.writer.give(dataclasses.replace(snapshot, facts=facts))
        self.saved = time.monotonic()

    def resume(self, snapshot: states.Snapshot) -> None:
        """Go back to where a snapshot was taken, the run's files too."""
        states.restore(self.state, snapshot)
        for name in _REMEMBERED:
            setattr(self, name, snapshot.facts.get(name))  # an older version knew nothing of `kept`
        self.before = self.seconds
        if not self.task.decisions:
            recorded = snapshot.facts.get("decisions", ())
            self.planned.decisions = [(step, steps) for step, steps in recorded if step <= snapshot.step]
        if self.deadline is not None:
            self.deadline.resume(snapshot.facts.get("elapsed", 0.0))
        self.book.cut(snapshot.facts["files"])

    def val(self) -> Iterator[Batch]:
        """This rank's validation images, from memory after the first time where they are not too many."""
        if self.views:
            yield from self.views
            return
        size = self.task.preprocess.size
        total = len(self.task.dataset.splits["val"]) * len(self.task.preprocess.mean) * size[0] * size[1]
        views = []
        for batch in self.list_unreadable(evaluation_batches(self.task, "val", self.task.group)):
            if total <= _KEPT_VIEWS:
                views.append(batch._replace(pixels=batch.pixels.to(self.task.device)))
            yield batch
        self.views = views  # whoever stops before the end has not seen all

    def trained(self, model: Model, moment: Moment) -> Trained:
        """The weights with all that is needed to use them."""
        task, what, how = self.task, "trained", self.task.recipe.masked
        if how is not None:
            what = f"pre-trained without labels ({how.kind}, {how.target})"
        assumptions: tuple[str, ...] = ()
        changes: tuple[str, ...] = ()
        if task.start is not None:
            what = f"{task.start.origin.name}, fine-tuned"
            assumptions, changes = task.start.origin.assumptions, task.start.origin.changes
        name = f"{what} on {task.dataset.name}, step {moment.step} of {moment.steps}"
        licence = task.start.origin.licence if task.start else None
        origin = Origin(format="vitrail", name=name, licence=licence, assumptions=assumptions, changes=changes)
        if how is not None:
            return Trained(model, task.preprocess, None, origin)
        return Trained(model, task.preprocess, task.dataset.classes, origin, several=task.dataset.several)


_REMEMBERED = ("best", "kept", "loss", "images", "period", "seconds", "evaluated")


def machine(task: Task) -> dict[str, Any]:
    """What the bits of a run depend on beside its configuration."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(task.device) if task.device.type == "cuda" else task.device.type,
        "threads": torch.get_num_threads(),
        "processes": task.group.world,
        "sharded": task.sharded,
    }


def doubt(share: float, images: int) -> float:
    """The standard error of a share of so many images.

    Within it one accuracy is as good as another, and the later weights, learned longer and at a lower rate, are the
    better guess: with ten images to choose by, chance would choose.
    """
    return math.sqrt(share * (1 - share) / images)


@contextlib.contextmanager
def averaged(state: State) -> Iterator[Learner]:
    """The model; where there is an average, it has those weights while the block lasts."""
    with contextlib.nullcontext() if state.average is None else state.average.in_place():
        yield state.model


def in_step(model: Learner, batches: Iterator[Batch], task: Task) -> Iterator[Batch]:
    """The batches, and then forward passes of nothing for as long as another rank has batches left.

    Each pass of a model that is sharded needs all ranks, and their shares of the images may differ.
    """
    for batch in batches:
        if len(batch.targets):  # of nothing, nothing is computed
            distributed.agreed(1, task.device)
            yield batch
    pixels = torch.zeros(1, len(task.preprocess.mean), *task.preprocess.size, device=task.device)
    hiding = torch.zeros(1, 2, task.patches, dtype=torch.int64, device=task.device)
    while distributed.agreed(0, task.device):
        model(*inputs(model, pixels, hiding))


def evaluation_batches(task: Task, split: str, group: Group = ALONE) -> Iterator[Batch]:
    """The images of a split, or a rank's share of them; of a masked run with what is hidden of them."""
    if task.recipe.masked is not None:
        return loader.masked_batches(
            task.dataset.splits[split],
            task.preprocess,
            task.recipe.masked,
            task.patches,
            batch=_EVALUATION_BATCH,
            rank=group.rank,
            world=group.world,
            workers=task.workers,
            skip_bad=task.dataset.unchecked,
        )
    return loader.evaluation_batches(
        task.dataset.splits[split],
        task.preprocess,
        batch=_EVALUATION_BATCH,
        classes=len(task.dataset.classes),
        rank=group.rank,
        world=group.world,
        workers=task.workers,
        skip_bad=task.dataset.unchecked,
    )
