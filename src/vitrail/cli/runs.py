"""What `train`, `finetune` and `demo` share: a run's folder, its progress, its pictures, and what it will take."""

import contextlib
import csv
import dataclasses
import itertools
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail import remote
from vitrail.cli import sheets, show
from vitrail.config import Recipe
from vitrail.errors import DataError, UsageError, VitrailError
from vitrail.remote import RemoteError

if TYPE_CHECKING:
    import torch

    from vitrail.data.dataset import Dataset
    from vitrail.evaluate.classify import Counts
    from vitrail.train.deadline import Deadline
    from vitrail.train.distributed import Group
    from vitrail.train.keeper import Evaluated
    from vitrail.train.log import Logger
    from vitrail.train.loop import Moment
    from vitrail.train.run import Pretrained, Result
    from vitrail.train.task import Task

Track = Literal["tensorboard"]
_TRAINING = ("demo", "finetune", "train")  # the verbs that make a run
_CHECKED = 20_000  # images that are looked at before a run: a minute at most
_ODD = (ArithmeticError, LookupError, TypeError, ValueError)  # what a file may lead to that no check knows
_LONGEST_WARMUP = 5  # a fifth of the run: a recipe's warm-up beyond that was meant for more images
_SHOWN = 16  # images in the picture of a batch
_WORST = 24  # images in the picture of the greatest losses


def next_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is free."""
    for number in itertools.count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            return folder
    raise AssertionError


def place(name: str, out: str | Path | None, group: "Group", *, resume: bool, overwrite: bool) -> tuple[Path, bool]:
    """The folder of a run and whether it is gone on with, the same for all processes."""
    from vitrail import locks
    from vitrail.train import distributed
    from vitrail.train.run import LOCK, started_again

    if resume and overwrite:
        raise UsageError("--resume goes on with a run and --overwrite removes it; give one of them")
    given = None if out is None else _here(str(out))

    def found() -> tuple[Path, bool]:
        folder = given or _last(name)
        if folder is not None and started_again(folder, group):
            return folder, True
        if given is not None and (resume or overwrite):
            locks.check_lock(given / LOCK, str(given))  # before anything is fetched into it
        if given and isinstance(out, str) and remote.is_remote(out):
            _look_there(out.rstrip("/"), given, resume=resume, overwrite=overwrite)
        return _place(name, given, resume=resume, overwrite=overwrite), resume

    return distributed.led(found)


def _look_there(url: str, folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Fetch what a run goes on from, or refuse a URL that is taken."""
    from vitrail.train import mirror

    if resume:
        mirror.fetch(url, folder, show.note)
    else:
        mirror.check_free(url, overwrite=overwrite)
    show.note(f"the run works in {folder} and is copied to {url}")


def _last(name: str) -> Path | None:
    """The youngest of runs/NAME, runs/NAME-2, ..."""
    taken = [path for path in Path("runs").glob(f"{name}*") if re.fullmatch(rf"{name}(-\d+)?", path.name)]
    return max(taken, key=lambda path: path.stat().st_mtime, default=None)


def _place(name: str, out: Path | None, *, resume: bool, overwrite: bool) -> Path:
    """The folder that was given, the last of its name where it is to go on, else the next that is free."""
    from vitrail import locks
    from vitrail.train.run import LOCK, list_run

    folder = out
    if folder is None:
        last = _last(name)
        folder = last if resume and last is not None else Path("runs") / name if overwrite else next_folder(name)
    if resume or overwrite:
        locks.check_lock(folder / LOCK, str(folder))
    if resume and not folder.exists():
        show.note(f"{folder} is not there yet, so there is nothing to resume: a new run")
    if overwrite and folder.is_dir() and not all(is_run(run) for run in _runs(folder)):
        raise UsageError(f"{folder} is no run to overwrite: choose another name with --out")
    if folder.is_file() or (folder.is_dir() and list_run(folder) and not resume and not overwrite):
        raise UsageError(
            f"{folder} exists already; go on with it (--resume), replace it (--overwrite) or choose another (--out)"
        )
    return folder


def is_run(folder: Path) -> bool:
    """Whether a folder is one that `train` or `finetune` wrote."""
    from vitrail.train.state import is_configuration

    try:
        return not folder.is_symlink() and is_configuration((folder / "config.json").read_bytes())
    except OSError:
        return False


def _runs(folder: Path) -> list[Path]:
    """The folder, or all that it holds where that are the runs of several seeds."""
    from vitrail.train.run import list_run

    inside = list_run(folder)
    return inside if inside and all(path.name.startswith("seed-") for path in inside) else [folder] if inside else []


@contextlib.contextmanager
def process(device: str | None) -> Iterator[tuple["Group", "torch.device"]]:
    """This process's place among those that torchrun started, and its device; only the first one is heard."""
    from vitrail.train import distributed

    with distributed.joined(device) as (group, found), contextlib.ExitStack() as stack:
        if not group.leads:
            silence = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        yield group, found


def be_deterministic() -> None:
    """Let a GPU add in one order, for which some of torch's kernels are slower."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def changed(recipe: Recipe, *, epochs: float | None, batch: int | None, lr: float | None, warmup: int | None) -> Recipe:
    """The recipe with what was given in its place; a shorter run has a shorter warm-up."""
    given: dict[str, Any] = {name: value for name, value in (("epochs", epochs), ("batch", batch)) if value is not None}
    if lr is not None:
        scale = lr / recipe.optimiser.lr
        others = {
            name: getattr(recipe.optimiser, name) * scale
            for name in ("head_lr", "adam_lr")
            if getattr(recipe.optimiser, name) is not None
        }
        given["optimiser"] = dataclasses.replace(recipe.optimiser, lr=lr, **others)
    new = dataclasses.replace(recipe, **given)
    length = min(1.0, new.epochs / new.batch * recipe.batch / recipe.epochs)
    if warmup is None:
        warmup = round(recipe.schedule.warmup * length)
    return dataclasses.replace(new, schedule=dataclasses.replace(recipe.schedule, warmup=warmup))


def fit_warmup(recipe: Recipe, images: int) -> Recipe:
    """The recipe with a tenth of the run as warm-up, where its own was meant for a far larger dataset."""
    steps = math.ceil(recipe.epochs * images / recipe.batch)
    warmup = recipe.schedule.warmup
    if warmup <= steps / _LONGEST_WARMUP:
        return recipe
    shorter = steps // 10
    show.note(
        f"note: the recipe's warm-up of {warmup:,} steps is for a larger dataset; of this run's"
        f" {show.plural(steps, 'step')} {shorter:,} {'is' if shorter == 1 else 'are'} taken (--warmup changes it)"
    )
    return dataclasses.replace(recipe, schedule=dataclasses.replace(recipe.schedule, warmup=shorter))


def tell_of(dataset: "Dataset") -> None:
    """What is worth knowing of the data before it is learned."""
    for note in dataset.notes:
        show.note(f"{'warning' if 'left out' in note else 'note'}: {note}")
    if dataset.several:
        show.note("note: images may have several labels, so each class is a question of its own (loss sigmoid)")
    numbers = [int(name) for name in dataset.classes if name.isdecimal()]
    if len(numbers) == len(dataset.classes) and numbers != sorted(numbers):
        first = ", ".join(dataset.classes[:4])
        show.note(f"warning: classes are in the order of their names ({first}, ...), so output 2 is not class 2")


def check_classes(dataset: "Dataset", *, strict: bool = False, everything: bool = False) -> None:
    """Refuse labels that leave nothing to choose or may be none, and with `strict` class folders without an image.

    With `everything` val is trained on too.
    """
    empty = dataset.empty_classes
    if strict and empty:
        raise DataError(
            f"{show.plural(len(empty), 'class folder')} of {dataset.name} without an image, such as {empty[0]}:"
            " remove them, or omit --strict"
        )
    if dataset.question:
        raise DataError(dataset.question)
    learned = [split for name, split in dataset.splits.items() if name == "train" or (everything and name == "val")]
    counts = [sum(column) for column in zip(*(split.counts(len(dataset.classes)) for split in learned), strict=True)]
    bare = [name for name, count in zip(dataset.classes, counts, strict=False) if not count]
    if bare:
        without = f"{show.plural(len(bare), 'class')} of {dataset.name} without a training image"
        raise DataError(f"{without}, such as {bare[0]}: add some, or remove the class")
    if len(dataset.classes) != 1:
        return
    (name,) = dataset.classes
    if not dataset.several:
        raise DataError(
            f"{dataset.name} has one class, {name}, and a classifier needs two or more{_look_inside(dataset, name)}"
        )
    if all(split.counts(1)[0] == len(split) for split in dataset.splits.values()):
        raise DataError(f"every image of {dataset.name} has the label {name}: add images without it, with empty labels")


def _look_inside(dataset: "Dataset", name: str) -> str:
    """What may have been meant by a dataset of one class: the folders in its folder, or images without labels."""
    paths = (split.name(place) for split in dataset.splits.values() for place in range(min(len(split), _CHECKED)))
    inner = sorted({path.split("/")[1] for path in paths if path.startswith(f"{name}/") and path.count("/") > 1})
    if len(inner) > 1:
        more = " ..." if len(inner) > 3 else ""
        return f"; {name} holds the folders {', '.join(inner[:3])}{more}: did you mean {dataset.name}/{name}?"
    return ": one subfolder each. Without labels: vitrail train mae-... (vitrail list recipes)"


def fitting(recipe: Recipe, dataset: "Dataset") -> Recipe:
    """The recipe with the loss that the data asks for."""
    return dataclasses.replace(recipe, loss="sigmoid") if dataset.several else recipe


def warn_of_imbalance(task: "Task") -> None:
    """Say where accuracy alone would mislead."""
    from vitrail.train.task import IMBALANCE

    if task.imbalance >= IMBALANCE and not task.dataset.several:
        names, counts = task.dataset.classes, task.counts
        most, least = max(range(len(counts)), key=counts.__getitem__), min(range(len(counts)), key=counts.__getitem__)
        advice = "" if task.recipe.balanced else "; --balanced lets every class count alike"
        show.note(
            f"warning: {names[most]} has {counts[most]:,} training images and {names[least]} {counts[least]:,}, so look"
            f" at the average over classes beside the accuracy{advice}"
        )


def check_images(
    dataset: "Dataset", data: str, *, strict: bool = False, seconds: float = math.inf
) -> tuple["Dataset", dict[str, Any] | None]:
    """The dataset without the images that cannot be read, and what there is to know of it before it is trained on.

    Of so many that it would take long, or more than `seconds`, there is no report, and unless `strict` training leaves
    out those it meets. The process that leads looks at them.
    """
    from vitrail.data.dataset import less
    from vitrail.train import distributed

    reports: list[dict[str, Any]] = []

    def look() -> list[tuple[str, str]] | None:
        report = _examine(dataset, data, seconds)
        reports.extend([] if report is None else [report])
        return None if report is None else _check_bad(report["bad"], dataset, data, strict=strict)

    bad = distributed.led(look)
    if bad is None:
        return dataclasses.replace(dataset, unchecked=not strict), None
    return less(dataset, set(bad)) if bad else dataset, reports[0] if reports else None


class _OutOfTimeError(Exception):
    """Looking at the images takes longer than it may."""


def _examine(dataset: "Dataset", data: str, seconds: float) -> dict[str, Any] | None:
    from vitrail.data.check import check
    from vitrail.data.examine import examine

    images = sum(len(split) for split in dataset.splits.values())
    if images > _CHECKED:
        show.note(f"note: {images:,} images are not looked at one by one before training: vitrail data check {data}")
        return None
    end = time.monotonic() + seconds
    with show.progress("looking at images") as progress:

        def in_time(done: int, total: int) -> None:
            progress(done, total)
            if done < total and time.monotonic() > end:
                raise _OutOfTimeError(f"{done:,} of {show.plural(total, 'image')}")

        try:
            report = check(examine(dataset, progress=in_time))
        except _OutOfTimeError as looked_at:
            show.note(f"note: there was time to look at {looked_at} before training: vitrail data check {data}")
            return None
    if across := report["duplicates"]["across_splits"]:
        show.note(
            f"warning: {show.plural(across, 'group')} of copies across splits, so results look too good:"
            f" vitrail data check {data}"
        )
    return report


def _check_bad(bad: Sequence[dict[str, str]], dataset: "Dataset", data: str, *, strict: bool) -> list[tuple[str, str]]:
    """Split and name of the images to leave out; refused where they are many, or with `strict` any."""
    from vitrail.data.dataset import BAD_SHARE

    if not bad:
        return []
    images = sum(len(split) for split in dataset.splits.values())
    first = (
        f"{show.plural(len(bad), 'image')} of {images:,} cannot be read, such as {bad[0]['name']}: {bad[0]['reason']}"
    )
    if strict or len(bad) > BAD_SHARE * images:
        rule = "--strict takes none" if strict else f"more than {BAD_SHARE:.0%} are too many"
        raise DataError(
            f"{first}; {rule}. `vitrail data check {data}` names every bad image, and how to leave them out"
        )
    them = "it" if len(bad) == 1 else "them"
    show.note(f"warning: {first}; left out, and listed in data_report.json (--strict refuses {them})")
    return [(each["split"], each["name"]) for each in bad]


def trained(
    task: "Task",
    folder: Path,
    *,
    data: str,
    out: str | None = None,
    track: Track | None = None,
    report: dict[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    save_every: float = 10,
    baselines: Mapping[str, int] | None = None,
    deadline: "Deadline | None" = None,
    verify_every: int = 0,
) -> "Result | Pretrained | None":
    """Train and show how far it is: a bar on a terminal, a line an evaluation everywhere; then draw what it came to.

    Of several processes the first has the result, and does all this. `baselines` say what simpler ways get right.
    """
    from vitrail.data.digest import ChangedDataError
    from vitrail.figures import reconstruction
    from vitrail.train import distributed
    from vitrail.train.run import lock_run, run
    from vitrail.train.verification import TOLERANCE, is_bitwise

    if not 0 <= save_every < math.inf:
        raise UsageError(f"--save-every is {save_every}; give minutes, 0 for every step")
    if verify_every < 0:
        raise UsageError(f"--verify-every is {verify_every}; give a number of steps, 0 for never")
    if verify_every and not is_bitwise(task.device):
        show.note(
            f"note: a GPU adds in any order, so --verify-every lets gradients differ by {TOLERANCE:.0%} of their norm;"
            " with --deterministic it compares every bit"
        )
    warn_of_imbalance(task)
    if task.shard and not task.sharded:
        show.note(
            "note: --shard changes nothing in one process, which has to hold the whole model; torchrun starts more"
        )
    accuracy, remembered = "", False

    def stepped(moment: "Moment") -> None:
        nonlocal remembered
        if not remembered and task.group.leads:
            remember(folder)
        remembered = True
        rate = moment.step * task.recipe.batch / max(moment.seconds, 1e-9)
        progress(moment.step, moment.steps, f"loss {moment.outcome.loss:.3f}{accuracy}, {rate:,.0f} images/s")

    def evaluated(found: "Evaluated") -> None:
        nonlocal accuracy
        accuracy = f", {found.validation}"
        show.note(str(found))
        if found.shown is not None and task.group.leads:
            reconstruction.draw(*found.shown, folder / "reconstruction.jpg")

    with contextlib.ExitStack() as stack:
        distributed.led(lambda: stack.enter_context(lock_run(folder)))
        saved = stack.enter_context(copied(folder, out, task.group, anew=overwrite and not resume))
        with show.progress("training") as progress:
            try:
                result = run(
                    task,
                    folder,
                    after_step=stepped,
                    after_epoch=evaluated,
                    loggers=_loggers(track),
                    resume=resume,
                    save_every=save_every * 60,
                    saved=saved,
                    tell=show.note,
                    contents="" if report is None else report["contents"],
                    overwrite=overwrite and not resume and is_run(folder),
                    deadline=deadline,
                    verify_every=verify_every,
                )
            except (RemoteError, ChangedDataError):
                raise
            except DataError as error:
                advice = f"`vitrail data check {data}` names every bad image, and how to leave them out"
                raise DataError(f"{error}. {advice}") from error
        if result is None:
            return None
        if report is not None:
            (folder / "data_report.json").write_text(json.dumps(report, indent=1) + "\n")
        draw(task, result, folder)
        write_label_scores(task, result, folder)
        page(task, folder, baselines or {}, None if resume else deadline)
        return result


def remember(folder: Path) -> None:
    """Write down the command that a run goes by, for whoever wants it again."""
    from vitrail.train.log import Book

    if sys.argv[1:2] and sys.argv[1] in _TRAINING:  # not where main is called from Python
        Book(folder).event("command", arguments=sys.argv[1:], folder=str(Path.cwd()))


def write_label_scores(task: "Task", result: "Result | Pretrained", folder: Path) -> None:
    """Write what a multi-label run's predictions are worth, as an event and class by class."""
    from vitrail.evaluate.multi_label import measure_labels
    from vitrail.evaluate.tables import write_label_scores as write_classes
    from vitrail.train.log import Book
    from vitrail.train.run import Result

    if isinstance(result, Result) and result.answers.multi_label:
        found = measure_labels(result.answers)
        Book(folder).event("multi_label", **found.facts())
        write_classes(found, task.dataset.classes, folder / "per_class.csv", task.counts)


def page(task: "Task", folder: Path, baselines: Mapping[str, int], deadline: "Deadline | None" = None) -> None:
    """Write the run's report and card. The run has ended well: what goes wrong here is said and costs it nothing."""
    from jinja2 import TemplateError

    from vitrail.report.write import PAGE, write
    from vitrail.train.log import Book

    try:
        for name, right in baselines.items():
            Book(folder).event("baseline", name=name, right=right)
        figures = deadline is None or deadline.left > deadline.figure_seconds
        write(folder, task.dataset, task.device, figures=figures)
        show.note(f"report: {folder / PAGE}")
        if not figures:
            command = shlex.join(["vitrail", "report", str(folder)])
            show.note(f"note: no time was left for the report's figures of the model: `{command}` draws them")
    except (VitrailError, OSError, MemoryError, RuntimeError, TemplateError, *_ODD) as error:
        command = shlex.join(["vitrail", "report", str(folder)])
        show.note(f"warning: the report is not written ({' '.join(str(error).split())}); `{command}` does it")


@contextlib.contextmanager
def copied(folder: Path, out: str | None, group: "Group", *, anew: bool) -> Iterator[Callable[[Path], None]]:
    """What is to be called with each finished checkpoint: of an --out that is a URL it copies it there.

    At the end all of the run's folder is copied.
    """
    from vitrail.train import distributed, mirror
    from vitrail.train.signals import StoppedError

    if out is None or not remote.is_remote(out):
        yield lambda _: None
        return
    try:
        if not group.leads:
            yield lambda _: None
            return
        url = _url(folder, out)
        if anew:
            mirror.clear(url)
        with contextlib.closing(mirror.Mirror(folder, url, show.note)) as copy:
            yield copy.give
            copy.finish()
    except StoppedError:
        distributed.wait()  # the first that ends would have torchrun end the one that still copies
        raise


def _url(folder: Path, out: str) -> str:
    """Where the copy of a run is, or of one of several seeds."""
    return "/".join([out.rstrip("/"), *folder.relative_to(_here(out)).parts])


def _here(out: str) -> Path:
    """The folder that a run works in: the one given, or of a URL that of the same path below runs."""
    if not remote.is_remote(out):
        return Path(out)
    parts = [part for part in out.partition("://")[2].split("/") if part]
    if not parts or {".", ".."} & set(parts):
        raise UsageError(f"{out!r:.200} names no folder: give a path below it, such as {out.rstrip('/')}/runs/NAME")
    return Path("runs", *parts)


def _loggers(track: Track | None) -> Any:
    def made(folder: Path) -> Sequence["Logger"]:
        from vitrail.train.log import TensorBoard

        return [TensorBoard(folder / "tensorboard")]

    return made if track == "tensorboard" else lambda _: ()


def sentence(found: dict[str, Any]) -> str:
    """What a run came to, in a line."""
    if "patches" in found:
        right = "" if found["top1"] is None else f", {found['top1']:.1%} of the colours right"
        text = f"{found['split']}: loss {found['loss']:.3f} of {found['patches']:,} hidden patches{right}"
        return f"{text} ({found['folder']}/weights/best.safetensors)"
    what = show.plural(found["images"], "image" if found["trained_on"] else f"{found['split']} image")
    labels = found.get("labels")
    text = f"{found['top1']:.1%} of {what} {'have exactly their labels' if labels else 'right'}"
    text += " (on images that were trained on)" if found["trained_on"] else _interval(found["interval"])
    if labels:
        text += f", F1 {labels['micro_f1']:.1%}, mAP {labels['mean_average_precision']:.1%}"
    if found["macro"] is not None and found["macro"] < found["top1"] - 0.02:
        text += f", {found['macro']:.1%} of a class on average"
    if weakest := found["weakest"]:
        taken = f", taken for {weakest['taken_for']}" if weakest["taken_for"] else ""
        text += f"; weakest: {weakest['class']}, {weakest['right']:.0%}{taken}"
    folder = found["folder"]
    report = f"; report: {found['report']}" if found["report"] else ""
    return (
        f"{show.printable(text)}; weights: {folder}/weights/best.safetensors{report};"
        f" next: vitrail predict {shlex.quote(folder)} IMAGES, vitrail serve {shlex.quote(folder)}"
    )


def _interval(found: Sequence[float]) -> str:
    return f" ({100 * found[0]:.1f} to {100 * found[1]:.1f})"


def find_weakest(counts: "Counts", classes: Sequence[str]) -> dict[str, Any] | None:
    """The class of which least is right, and what it is most often taken for; None where nothing is wrong."""
    if not counts.by_class or counts.right == counts.images:
        return None
    images, right = counts.confusion.sum(dim=1), counts.confusion.diagonal()
    share = (right / images.clamp(min=1)).masked_fill(images == 0, 2.0)
    worst = int(share.argmin())
    wrong = counts.confusion[worst].clone()
    wrong[worst] = 0
    taken_for = classes[int(wrong.argmax())] if wrong.any() else None
    return {"class": classes[worst], "right": float(share[worst]), "images": int(images[worst]), "taken_for": taken_for}


def facts(task: "Task", result: "Result | Pretrained", folder: Path) -> dict[str, Any]:
    """What a run came to, for programs."""
    from vitrail.evaluate.intervals import wilson
    from vitrail.evaluate.multi_label import measure_labels
    from vitrail.train.run import Pretrained

    if isinstance(result, Pretrained):
        found = {"folder": str(folder), "split": "val", **dataclasses.asdict(result)}
        return found | {"trained": round(result.epochs * len(task.split)), "seed": task.seed}
    counts, report = result.counts, folder / "report.html"
    labels = measure_labels(result.answers).facts() if result.answers.multi_label else None
    return {
        "folder": str(folder),
        "report": str(report) if report.exists() else None,
        "split": result.split,
        "images": counts.images,
        "right": counts.right,
        "top1": counts.top1,
        "interval": list(wilson(counts.right, counts.images)),
        "top5": counts.top5,
        "weakest": find_weakest(counts, task.dataset.classes),
        "macro": counts.macro if counts.by_class else None,
        "trained_on": task.everything and result.split == "val",
        "loss": counts.mean_loss,
        "temperature": result.temperature,
        "calibration_error": result.calibration_error,
        "labels": labels,
        "epochs": result.epochs,
        "trained": round(result.epochs * len(task.split)),
        "seconds": result.seconds,
        "seed": task.seed,
    }


# --- pictures --------------------------------------------------------------------------------------------------------


def draw(task: "Task", result: "Result | Pretrained", folder: Path) -> None:
    """The pictures of a run's folder."""
    from vitrail.figures import draw as drawing
    from vitrail.train.run import Pretrained

    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {name: [float(row[name] or "nan") for row in rows] for name in rows[0]}
    drawing.results(columns, folder / "results.png")
    first_batch(task, folder / "train_batch0.jpg")
    if isinstance(result, Pretrained):
        return
    said = result.answers
    if result.counts.by_class:
        confusion, names = result.counts.confusion.numpy(), task.dataset.classes
        drawing.confusion(confusion, names, folder / "confusion_matrix.png")
        drawing.confusion(confusion, names, folder / "confusion_matrix_normalized.png", normalised=True)
    sure, true = said.claims
    drawing.reliability(sure.numpy(), true.numpy(), folder / "reliability.png", error=result.calibration_error)
    split, some = task.dataset.splits[result.split], range(min(_SHOWN, len(said.images)))
    classes, preprocess = task.dataset.classes, task.preprocess
    worst = said.losses.argsort(descending=True)[:_WORST].tolist()
    sheets.answered(split, classes, preprocess, said, some, folder / "val_batch0_pred.jpg")
    sheets.labelled(split, classes, preprocess, said.images[list(some)].tolist(), folder / "val_batch0_labels.jpg")
    sheets.answered(split, classes, preprocess, said, worst, folder / "top_losses.jpg")


def first_batch(task: "Task", path: Path) -> None:
    """The first training images as the model sees them, before they are mixed."""
    from vitrail.data.loader import Plan, training_batches
    from vitrail.figures import pictures

    training = task.training
    count = min(_SHOWN, task.plan.size(0))
    batch = next(training_batches(training, Plan(batch=count, total=count)))
    rows = training.order.samples(batch.positions.numpy()).tolist()[:count]
    pictures.grid(batch.pixels[:count], [sheets.label(training.split, task.dataset.classes, row) for row in rows], path)


# --- what a run will take --------------------------------------------------------------------------------------------


def dry_run(task: "Task", *, as_json: bool) -> None:
    """Show what would be done and what it would take, and draw the first batch."""
    from vitrail.train.estimate import estimate
    from vitrail.train.task import described

    show.note("timing a few steps")
    found = estimate(task)
    picture = Path("runs") / "dry-run" / "train_batch0.jpg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    first_batch(task, picture)
    if as_json:
        show.as_json(described(task) | {"estimate": dataclasses.asdict(found), "picture": str(picture)})
        return
    recipe, plan, view = task.recipe, task.plan, task.preprocess
    optimiser, schedule = recipe.optimiser, recipe.schedule
    how = ["sharded"] * task.sharded + ["compiled"] * task.compiles
    show.table(
        [
            ("data", f"{task.dataset.name}: " + ", ".join(f"{k} {len(v):,}" for k, v in task.dataset.splits.items())),
            _learned(task),
            ("model", task.start.origin.name if task.start else f"{recipe.model}, random weights"),
            ("input", f"{view.size[0]} x {view.size[1]} pixels, mean {view.mean}, std {view.std}"),
            ("steps", f"{plan.steps:,} of {show.plural(plan.batch, 'image')}, {show.plural(recipe.epochs, 'epoch')}"),
            ("optimiser", f"{optimiser.kind}, learning rate {optimiser.lr:g}, weight decay {optimiser.weight_decay:g}"),
            ("schedule", f"{show.plural(schedule.warmup, 'step')} of warm-up, then {schedule.decay}"),
            ("augmentation", _augmentation(recipe)),
            ("device", ", ".join([str(task.device), show.plural(plan.micro_batches, "micro-batch"), *how])),
            ("time", f"about {duration(found.seconds)} at {found.images_per_second:,.0f} images/s"),
            ("memory", f"about {show.size(found.memory)} of {show.size(found.available)}{_advice(task, found)}"),
            ("first batch", str(picture)),
        ]
    )
    print("\n--json shows the whole configuration. Nothing was trained.")


def _learned(task: "Task") -> tuple[str, str]:
    """What there is to learn."""
    masked, counts = task.recipe.masked, task.counts
    if masked is None:
        return "classes", f"{len(task.dataset.classes):,}, with {min(counts):,} to {show.plural(max(counts), 'image')}"
    hidden = masked.hidden(task.patches)
    return "hidden", f"{hidden} of {task.patches} patches ({masked.kind}), to tell: {masked.target}"


def _augmentation(recipe: Recipe) -> str:
    default = {field.name: field.default for field in dataclasses.fields(recipe.augment)}
    parts = [recipe.augment.crop + " crop"]
    for name, value in dataclasses.asdict(recipe.augment).items():
        if name != "crop" and value != default[name]:
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def _advice(task: "Task", found: Any) -> str:
    if found.memory <= found.available * 0.9:
        return ""
    parts = -(-found.memory * task.micro_batches * 10 // (found.available * 8))
    return f": too much. --micro-batches {parts} computes a step in parts"


def duration(seconds: float) -> str:
    """93784 -> 26 h 3 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60:,} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes / 1440:,.1f} days"
