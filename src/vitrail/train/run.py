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
from vitrail.data import loader
from vitrail.data.digest import DataDigest, check_unchanged, digest_dataset
from vitrail.data.loader import Batch, Plan
from vitrail.errors import UsageError, VitrailError
from vitrail.evaluate import calibrate, precision, tables
from vitrail.evaluate.classify import Answers, Counts, asked, outputs, total
from vitrail.model.build import Model
from vitrail.plurals import plural
from vitrail.train import distributed, loop, signals
from vitrail.train import state as states
from vitrail.train.deadline import PRECISION, PRECISION_SHARE, Deadline, PlannedSteps
from vitrail.train.distributed import Group
from vitrail.train.keeper import UNREADABLE, Evaluated, Keeper, evaluation_batches, machine
from vitrail.train.log import Book, Logger
from vitrail.train.loop import Moment
from vitrail.train.signals import StoppedError
from vitrail.train.step import DivergedError, begin
from vitrail.train.task import Task, described
from vitrail.train.verification import FILES as MISMATCHES
from vitrail.train.verification import Verification
from vitrail.weights import native
from vitrail.weights.load import load, save
from vitrail.weights.trained import Trained

SAVE_EVERY = 600.0  # seconds
STOPPED = "stopped"
LOCK = ".lock"
FINISHED = ("end", "pretrained")  # events
STARTED_BY = "torchrun"
_CALIBRATION = 2**27  # logits that a temperature is fitted to, at most
_LEAST_PRECISION = 1.0  # seconds: less says nothing
_SAME = (
    "recipe", "model", "data", "images", "classes", "preprocess", "view", "everything", "measured", "seed", "steps",
    "micro_batches", "decisions",
)  # fmt: skip


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


@dataclasses.dataclass(frozen=True)
class Pretrained:
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


def run(
    task: Task,
    folder: Path,
    *,
    after_step: Callable[[Moment], None],
    after_epoch: Callable[[Evaluated], None],
    loggers: Callable[[Path], Sequence[Logger]] = lambda _: (),
    resume: bool = False,
    save_every: float = SAVE_EVERY,
    saved: Callable[[Path], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
    contents: str = "",
    overwrite: bool = False,
    deadline: Deadline | None = None,
    verify_every: int = 0,
) -> Result | Pretrained | None:
    """Train, keep the best and the last weights in the folder, and measure the best on test, or else on val.

    The folder is new, or with `resume` one in which the same run was begun: it goes on from its newest checkpoint, as
    it does where torchrun starts the processes again. Of several processes the first one writes the files and has the
    result, the others have None. `contents` is a digest of the images' contents, where they were read before. With
    `overwrite` the folder is cleared once nothing can be refused any more. With a `deadline` the run's steps are
    decided again as it goes, and logged. `verify_every` so many steps one is computed twice; 0 is never.
    """
    leads = task.group.leads
    state = begin(task.model(), task.recipe, task.counts, recorded=task.recorded)  # what it refuses needs no folder
    with contextlib.ExitStack() as stack:
        stack.enter_context(states.room(folder, lambda: states.size(state)))
        distributed.led(lambda: stack.enter_context(lock_run(folder)))
        parts = task.group.world if task.sharded else 1
        distributed.led(lambda: states.check_room(folder, *(parts * size for size in states.estimate_size(state))))
        if overwrite and leads:
            clear_run(folder)
        new = not _begun(folder)
        data = digest_dataset(task.dataset, contents) if leads else None
        snapshot = _opened(task, folder, data, resume=resume, tell=tell)
        if leads and new:
            stack.push(partial(_discard, folder))
        book = stack.enter_context(contextlib.closing(Book(folder, loggers(folder)) if leads else Book(None)))
        exchange = distributed.exchange() if task.sharded else states.alone
        writer = stack.enter_context(contextlib.closing(states.Writer(folder / "checkpoints", exchange, written=saved)))
        keeper = Keeper(task, folder, book, state, after_step, after_epoch, writer, save_every, data)
        keeper.recall_unreadable()
        keeper.planned, keeper.deadline = PlannedSteps(task.plan.steps, list(task.decisions)), deadline
        if snapshot is not None:
            keeper.resume(snapshot)
            book.say(f"resumed after step {snapshot.step:,}")
            del snapshot  # it maps files that are soon to be removed
        try:
            with signals.requests() as keeper.asked:
                decided = [steps for _, steps in keeper.planned.decisions]
                plan = task.plan_up_to(max([0 if deadline is None else deadline.most_steps, *decided]))
                with contextlib.closing(keeper.list_unreadable(feed(task, state.step, plan))) as steps:
                    if deadline is not None:
                        deadline.begin_step()
                    loop.run(
                        state,
                        steps,
                        task.training,
                        plan,
                        task.recipe,
                        after_step=keeper.stepped,
                        planned=keeper.planned,
                        verification=Verification(verify_every, folder, task.group.rank) if verify_every else None,
                    )
                del steps  # the images that live on the GPU
                writer.wait()
                results: list[Result | Pretrained] = []
                finished = _finished if task.recipe.masked is None else _pretrained
                distributed.led(lambda: results.append(finished(keeper)))
                if unreadable := list(keeper.unreadable):
                    tell(
                        f"warning: {plural(len(unreadable), 'image')} cannot be read, such as {unreadable[0]}; left out"
                        f" as the run went, and listed in {UNREADABLE}"
                    )
        except BaseException as error:
            if leads:
                with contextlib.suppress(OSError):  # a full disk has no room for words, and its own error is to be seen
                    _ended(keeper, error)
            raise
        return results[0] if results else None


def _opened(
    task: Task, folder: Path, data: DataDigest | None, *, resume: bool, tell: Callable[[str], None]
) -> states.Snapshot | None:
    """The checkpoint to go on from, the same on every rank, or None and a folder that is ready for a new run."""
    if task.group.restarts and (folder / STOPPED).exists():
        raise StoppedError(f"{folder} was stopped and its state is saved; the same command with --resume goes on")
    found: list[states.Snapshot] = []

    def prepared() -> int | None:
        assert data is not None, "the process that leads has it"
        snapshot = _prepared(task, folder, data, resume=resume, tell=tell)
        found.extend([] if snapshot is None else [snapshot])
        return None if snapshot is None else snapshot.step

    step = distributed.led(prepared)
    if step is not None and not found:
        found.append(states.read(folder / "checkpoints" / states.name(step), checked=False))
    return found[0] if found else None


def _prepared(
    task: Task, folder: Path, data: DataDigest, *, resume: bool, tell: Callable[[str], None]
) -> states.Snapshot | None:
    """The same, as the process that leads sees to it."""
    config, wanted = folder / "config.json", json.loads(json.dumps(described(task)))
    begun = _begun(folder)
    again = started_again(folder, task.group)
    if begun and not (resume or again):
        raise UsageError(f"{folder} exists already; go on with it (--resume), or choose another name with --out")
    if begun and not (again or config.is_file()):
        raise UsageError(f"{folder} is no run: it has no config.json. Choose another name with --out")
    if config.is_file():
        _check_same(config, wanted)
    files.make(folder)
    for hidden in (".config.json.*", "weights/.*.safetensors.*", "checkpoints/.step-*"):
        for left in folder.glob(hidden):  # by a process that was killed as it wrote
            shutil.rmtree(left)
    if task.group.agents:  # before there is anything else: a group that is lost here is started again
        with (folder / STARTED_BY).open("a") as file:
            file.write("".join(f"{agent}\n" for agent in task.group.agents))
    if config.is_file():
        snapshot = states.newest(folder / "checkpoints", lambda reason: tell(f"warning: {reason}"))
        if snapshot is not None:
            tell(f"resuming {folder} after step {snapshot.step:,}. {_promise(task, snapshot, data)}")
            (folder / STOPPED).unlink(missing_ok=True)
            return snapshot
        if _is_finished(folder):
            raise UsageError(
                f"{folder} is a finished run whose checkpoints were removed, so there is nothing to resume. --overwrite"
                " begins anew, --out names another folder"
            )
        tell(f"{folder} has no checkpoint yet, so the run begins anew")
        (folder / STOPPED).unlink(missing_ok=True)
        for name in ("results.csv", "events.jsonl"):
            (folder / name).unlink(missing_ok=True)
    with files.replacing(config, overwrite=True) as fresh:
        fresh.write_text(json.dumps(wanted, indent=1) + "\n")
    return None


def _begun(folder: Path) -> bool:
    """Whether there is more than a run leaves that was killed before its configuration was written."""
    if not folder.is_dir():
        return folder.exists()
    return any(not path.name.startswith((".config.json.", STARTED_BY)) for path in list_run(folder))


def _is_finished(folder: Path) -> bool:
    """Whether a run came to its end, by its own record: then its weights are worth keeping."""
    events = folder / "events.jsonl"
    with contextlib.suppress(ValueError):  # a line that was being written
        lines = map(json.loads, events.read_text().splitlines() if events.is_file() else ())
        return any(isinstance(line, dict) and line.get("event") in FINISHED for line in lines)
    return False


def started_again(folder: Path, group: Group) -> bool:
    """Whether a torchrun of this group has worked on the folder's run, or its runs, before: it lost a process or node,
    or got one, and has started all of them again with the command that began the run.
    """
    before = [*folder.glob(STARTED_BY), *folder.glob(f"*/{STARTED_BY}")]
    return any(agent in path.read_text().splitlines() for path in before for agent in group.agents)


def _check_same(config: Path, wanted: dict[str, Any]) -> None:
    """Refuse to go on with a run by another configuration than it was begun with."""
    before, now = _stated(_configuration(config)), _stated(wanted)
    for each in (before, now):
        each["recipe"].pop("head", None)  # what it started from matters no more
    for key in _SAME:
        if before.get(key) != now.get(key):
            difference = _difference(key, before.get(key), now.get(key))
            raise UsageError(f"{config.parent} was begun with another {difference}")


def _stated(value: Any) -> Any:
    """The fields of a configuration that are set: a version that does not know a field yet leaves it away."""
    if not isinstance(value, dict):
        return value
    return {name: _stated(field) for name, field in value.items() if field is not None}


def _configuration(config: Path) -> dict[str, Any]:
    """The configuration that a run was begun with."""
    try:
        found = json.loads(config.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict) or "recipe" not in found:
        raise UsageError(f"{config} is damaged or of no run; --overwrite begins anew, --out names another folder")
    return found


def _difference(key: str, before: Any, now: Any) -> str:
    """The innermost field that differs, and both of its values."""
    while isinstance(before, dict) and isinstance(now, dict):
        inner = next(name for name in (before | now) if before.get(name) != now.get(name))
        key, before, now = f"{key}.{inner}", before.get(inner), now.get(inner)
    return f"{key}: {before!s:.60}, not {now!s:.60}. Give the same command again, with --resume"


def _promise(task: Task, snapshot: states.Snapshot, data: DataDigest) -> str:
    """Whether the run will be the one it would have been, to the bit; refused where its images are others."""
    before, now = snapshot.facts["machine"], machine(task)
    different = [f"{name} {before[name]} -> {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    if recorded := snapshot.facts.get("data"):  # an older version wrote none
        different += filter(
            None,
            [
                check_unchanged(
                    DataDigest(*(recorded.get(field, "") for field in DataDigest._fields)), data, task.dataset.name
                )
            ],
        )
    if different:
        return f"Not to the bit what it would have been: {', '.join(different)}"
    if "elapsed" in snapshot.facts:
        return (
            "How many steps follow depends on the time that is left; the report will have the command that repeats it"
        )
    if task.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return "Its weights will be those of a run without interruption, to the bit"
    return "Not to the bit: a GPU adds in any order (--deterministic)"


@contextlib.contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Hold a run's folder against other processes while the block lasts; it is made where it is missing.

    One that was made here and is empty in the end is removed again.
    """
    made = not folder.exists()
    files.make(folder)
    try:
        with locks.hold_lock(folder / LOCK, str(folder)):
            yield
    finally:
        if made:
            with contextlib.suppress(OSError):  # it holds a run now
                folder.rmdir()


def clear_run(folder: Path) -> None:
    """Remove all that a run's folder holds but its lock."""
    for path in list_run(folder):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def list_run(folder: Path) -> list[Path]:
    """What a run's folder holds beside its lock."""
    return [path for path in folder.iterdir() if path.name != LOCK]


def _discard(folder: Path, error: type[BaseException] | None, *_: object) -> None:
    """Clear the folder of a run that was begun here and ended before there was anything to lose."""
    learned = (folder / "weights" / "last.safetensors").exists() or states.found(folder / "checkpoints")
    if error is not None and not learned and not any(folder.glob(MISMATCHES)):
        with contextlib.suppress(OSError):
            clear_run(folder)


def _ended(keeper: Keeper, error: BaseException) -> None:
    """Write down why a run ended early."""
    folder, book = keeper.folder, keeper.book
    reason = str(error) if isinstance(error, VitrailError) else type(error).__name__
    facts: dict[str, Any] = {}
    if isinstance(error, DivergedError):
        task, step = keeper.task, keeper.state.step
        parts = task.plan.parts(step)
        rows = task.training.order.samples(np.arange(parts[0].start, parts[-1].stop))
        facts = {"step": step, "batch": [task.split.name(row) for row in rows.tolist()]}
    if isinstance(error, StoppedError) and error.for_good:
        (folder / STOPPED).write_text(f"{reason}\n")  # where torchrun starts the group again, it leaves at once
    book.event("stopped", reason=reason, **facts)
    book.say(f"stopped: {reason}")


def feed(task: Task, start: int = 0, plan: Plan | None = None) -> Generator[Batch, None, None]:
    """The run's micro-batches: of images that live on the GPU where they are small, else from worker processes."""
    training, plan = task.training, plan or task.plan
    if task.device.type == "cuda":
        found = loader.resident(
            training.split,
            channels=len(task.preprocess.mean),
            classes=training.classes,
            device=task.device,
            workers=task.workers,
            skip_bad=training.skip_bad,
        )
        if found is not None:
            return loader.resident_batches(training, plan, *found, start=start)
    return loader.training_batches(training, plan, start=start, workers=task.workers)


def _finished(keeper: Keeper) -> Result:
    """The best weights calibrated on val, and measured on test."""
    task, folder = keeper.task, keeper.folder
    path = folder / "weights" / "best.safetensors"
    split = task.measured or ("test" if "test" in task.dataset.splits else "val")
    best = load(path)
    model = best.model.to(task.device)
    temperature = 1.0 if task.everything else calibrate.temperature(*_logits(keeper, model))
    best = _tried(keeper, dataclasses.replace(best, temperature=temperature))
    save(dataclasses.replace(best, tried=()), path, overwrite=True)
    native.write_measurements(path, best.tried)
    images = _val(keeper) if split == "val" else evaluation_batches(task, split)
    said = asked(
        model,
        keeper.heeding(images),
        task.preprocess,
        temperature=temperature,
        classes=len(task.dataset.classes),
        several=task.dataset.several,
    )
    counts = total(said, len(task.dataset.classes))
    error = calibrate.expected_calibration_error(*said.claims)
    result = Result(split, counts, said, temperature, error, keeper.seconds, keeper.trained_images / len(task.split))
    facts = {"images": counts.images, "right": counts.right, "top1": counts.top1, "top5": counts.top5}
    calibration = {"loss": counts.mean_loss, "temperature": temperature, "calibration_error": error}
    keeper.book.event("end", split=split, **facts, **calibration, seconds=result.seconds)
    keeper.book.say(
        f"{split}: {counts.top1:.2%} of {plural(counts.images, 'image')} right; temperature {temperature:.3f}"
    )
    names = task.dataset.classes
    tables.write_predictions(task.dataset.splits[split], names, names, said, folder / "predictions.csv")
    if counts.by_class:
        tables.write_classes(counts, names, folder / "per_class.csv", task.counts)
    return result


def _tried(keeper: Keeper, best: Trained) -> Trained:
    """The best weights with what fewer bits do to them on this machine's CPU, where that could matter."""
    if keeper.task.everything or not precision.worthwhile(best):  # of images that it learned it is too sure
        return best
    seconds = min(PRECISION, PRECISION_SHARE * keeper.seconds)
    if keeper.deadline is not None:
        seconds = min(seconds, keeper.deadline.precision_seconds)
        if seconds < _LEAST_PRECISION:
            keeper.book.say("no time was left to compare precisions: vitrail convert --measure does it")
            return best
    views = (batch.pixels for batch in keeper.heeding(_val(keeper)))
    here = dataclasses.replace(best, model=copy.deepcopy(best.model).cpu())  # on a GPU it has still to be measured
    data = f"{Path(keeper.task.dataset.name).name} (val)"
    found = precision.measured(here, views, seconds=seconds, data=data)
    for tried in found.tried:
        keeper.book.say(tried.told())
    return found


def _pretrained(keeper: Keeper) -> Pretrained:
    """What val said of the best weights; they have no head that could be calibrated."""
    task, kept = keeper.task, keeper.kept
    assert kept is not None, "there is an evaluation after the last step"
    result = Pretrained(**kept, seconds=keeper.seconds, epochs=keeper.trained_images / len(task.split))
    keeper.book.event("pretrained", split="val", **kept, seconds=result.seconds)
    right = "" if result.top1 is None else f", {result.top1:.2%} of the colours right"
    keeper.book.say(f"val: loss {result.loss:.4f} of {result.patches:,} hidden patches{right}")
    return result


def _val(keeper: Keeper) -> Iterator[Batch]:
    """All validation images, not only this rank's."""
    return keeper.val() if keeper.task.group.world == 1 else evaluation_batches(keeper.task, "val")


def _logits(keeper: Keeper, model: Model) -> tuple[Tensor, Tensor]:
    """Logits and targets of as many validation images as a temperature needs, on the CPU."""
    limit = max(1, _CALIBRATION // len(keeper.task.dataset.classes))
    logits, targets, count = [], [], 0
    for some, true, _ in outputs(model, keeper.heeding(_val(keeper)), keeper.task.preprocess):
        logits.append(some.cpu())
        targets.append(true.cpu())
        count += len(some)
        if count >= limit:
            break
    return torch.cat(logits), torch.cat(targets)
