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
from vitrail.cli import output
from vitrail.config import Recipe
from vitrail.errors import DataError, UsageError, VitrailError
from vitrail.formatting import format_duration as format_duration
from vitrail.remote import RemoteError
from vitrail.report import image_sheets

if TYPE_CHECKING:
    import torch

    from vitrail.data.dataset import Dataset
    from vitrail.evaluate.predictions import Counts
    from vitrail.runtime.distributed import ProcessGroup
    from vitrail.train.deadline import Deadline
    from vitrail.train.loop import StepEnd
    from vitrail.train.run import PretrainingResult, RunResult
    from vitrail.train.run_log import Logger
    from vitrail.train.trainer import ValidationResult
    from vitrail.train.training_run import TrainingRun

Tracker = Literal["tensorboard"]
_TRAINING_COMMANDS = ("demo", "finetune", "train")  # the verbs that make a run
_MAX_SCANNED_IMAGES = 20_000  # images that are looked at before a run: a minute at most
_UNEXPECTED_ERRORS = (
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
)  # what a file may lead to that no check knows
_MIN_STEPS_PER_WARMUP_STEP = 5  # a fifth of the run: a recipe's warm-up beyond that was meant for more images
_GRID_IMAGES = 16  # images in the picture of a batch
_WORST_IMAGES = 24  # images in the picture of the greatest losses


def choose_next_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is free."""
    for number in itertools.count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            return folder
    raise AssertionError


def choose_run_folder(
    name: str, out: str | Path | None, group: "ProcessGroup", *, resume: bool, overwrite: bool
) -> tuple[Path, bool]:
    """The folder of a run and whether it is gone on with, the same for all processes."""
    from vitrail import locks
    from vitrail.runtime import distributed
    from vitrail.train.run import LOCK_FILE, is_torchrun_restart

    if resume and overwrite:
        raise UsageError("--resume goes on with a run and --overwrite removes it; give one of them")
    given = None if out is None else _resolve_local_folder(str(out))

    def choose_on_rank0() -> tuple[Path, bool]:
        folder = given or _find_last_folder(name)
        if folder is not None and is_torchrun_restart(folder, group):
            return folder, True
        if given is not None and (resume or overwrite):
            locks.check_lock(given / LOCK_FILE, str(given))  # before anything is fetched into it
        if given and isinstance(out, str) and remote.is_remote(out):
            _prepare_remote(out.rstrip("/"), given, resume=resume, overwrite=overwrite)
        return _resolve_folder(name, given, resume=resume, overwrite=overwrite), resume

    return distributed.run_on_rank0(choose_on_rank0)


def _prepare_remote(url: str, folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Fetch what a run goes on from, or refuse a URL that is taken."""
    from vitrail.train import upload

    if resume:
        upload.download_runs(url, folder, output.print_note)
    else:
        upload.check_url_free(url, overwrite=overwrite)
    output.print_note(f"the run works in {folder} and is copied to {url}")


def _find_last_folder(name: str) -> Path | None:
    """The youngest of runs/NAME, runs/NAME-2, ..."""
    taken = [path for path in Path("runs").glob(f"{name}*") if re.fullmatch(rf"{name}(-\d+)?", path.name)]
    return max(taken, key=lambda path: path.stat().st_mtime, default=None)


def _resolve_folder(name: str, out: Path | None, *, resume: bool, overwrite: bool) -> Path:
    """The folder that was given, the last of its name where it is to go on, else the next that is free."""
    from vitrail import locks
    from vitrail.train.run import LOCK_FILE, list_run_files

    folder = out
    if folder is None:
        last = _find_last_folder(name)
        folder = last if resume and last is not None else Path("runs") / name if overwrite else choose_next_folder(name)
    if resume or overwrite:
        locks.check_lock(folder / LOCK_FILE, str(folder))
    if resume and not folder.exists():
        output.print_note(f"{folder} is not there yet, so there is nothing to resume: a new run")
    if overwrite and folder.is_dir() and not all(is_run_folder(run) for run in _list_runs(folder)):
        raise UsageError(f"{folder} is no run to overwrite: choose another name with --out")
    if folder.is_file() or (folder.is_dir() and list_run_files(folder) and not resume and not overwrite):
        raise UsageError(
            f"{folder} exists already; go on with it (--resume), replace it (--overwrite) or choose another (--out)"
        )
    return folder


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is one that `train` or `finetune` wrote."""
    from vitrail.train.checkpoint import is_run_config

    try:
        return not folder.is_symlink() and is_run_config((folder / "config.json").read_bytes())
    except OSError:
        return False


def _list_runs(folder: Path) -> list[Path]:
    """The folder, or all that it holds where that are the runs of several seeds."""
    from vitrail.train.run import list_run_files

    inside = list_run_files(folder)
    return inside if inside and all(path.name.startswith("seed-") for path in inside) else [folder] if inside else []


@contextlib.contextmanager
def join_processes(device: str | None) -> Iterator[tuple["ProcessGroup", "torch.device"]]:
    """This process's place among those that torchrun started, and its device; only the first one is heard."""
    from vitrail.runtime import distributed

    with distributed.join_process_group(device) as (group, found), contextlib.ExitStack() as stack:
        if not group.is_rank0:
            silence = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        yield group, found


def enable_determinism() -> None:
    """Let a GPU add in one order, for which some of torch's kernels are slower."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def override_recipe(
    recipe: Recipe, *, epochs: float | None, batch: int | None, lr: float | None, warmup: int | None
) -> Recipe:
    """The recipe with what was given in its place; a shorter run has a shorter warm-up."""
    given: dict[str, Any] = {name: value for name, value in (("epochs", epochs), ("batch", batch)) if value is not None}
    if lr is not None:
        scale = lr / recipe.optimizer.lr
        others = {
            name: getattr(recipe.optimizer, name) * scale
            for name in ("head_lr", "adam_lr")
            if getattr(recipe.optimizer, name) is not None
        }
        given["optimizer"] = dataclasses.replace(recipe.optimizer, lr=lr, **others)
    new = dataclasses.replace(recipe, **given)
    length = min(1.0, new.epochs / new.batch * recipe.batch / recipe.epochs)
    if warmup is None:
        warmup = round(recipe.schedule.warmup * length)
    return dataclasses.replace(new, schedule=dataclasses.replace(recipe.schedule, warmup=warmup))


def shorten_warmup(recipe: Recipe, images: int) -> Recipe:
    """The recipe with a tenth of the run as warm-up, where its own was meant for a far larger dataset."""
    steps = math.ceil(recipe.epochs * images / recipe.batch)
    warmup = recipe.schedule.warmup
    if warmup <= steps / _MIN_STEPS_PER_WARMUP_STEP:
        return recipe
    shorter = steps // 10
    output.print_note(
        f"note: the recipe's warm-up of {warmup:,} steps is for a larger dataset; of this run's"
        f" {output.pluralize(steps, 'step')} {shorter:,} {'is' if shorter == 1 else 'are'} taken (--warmup changes it)"
    )
    return dataclasses.replace(recipe, schedule=dataclasses.replace(recipe.schedule, warmup=shorter))


def print_dataset_notes(dataset: "Dataset") -> None:
    """What is worth knowing of the data before it is learned."""
    for note in dataset.notes:
        output.print_note(f"{'warning' if 'left out' in note else 'note'}: {note}")
    if dataset.multi_label:
        output.print_note("note: images may have several labels, so each class is a question of its own (loss sigmoid)")
    numbers = [int(name) for name in dataset.classes if name.isdecimal()]
    if len(numbers) == len(dataset.classes) and numbers != sorted(numbers):
        first = ", ".join(dataset.classes[:4])
        output.print_note(
            f"warning: classes are in the order of their names ({first}, ...), so output 2 is not class 2"
        )


def check_classes(dataset: "Dataset", *, strict: bool = False, train_on_val: bool = False) -> None:
    """Refuse labels that leave nothing to choose or may be none, and with `strict` class folders without an image.

    With `everything` val is trained on too.
    """
    empty = dataset.empty_classes
    if strict and empty:
        raise DataError(
            f"{output.pluralize(len(empty), 'class folder')} of {dataset.name} without an image, such as {empty[0]}:"
            " remove them, or omit --strict"
        )
    if dataset.layout_warning:
        raise DataError(dataset.layout_warning)
    learned = [split for name, split in dataset.splits.items() if name == "train" or (train_on_val and name == "val")]
    counts = [
        sum(column) for column in zip(*(split.count_per_class(len(dataset.classes)) for split in learned), strict=True)
    ]
    bare = [name for name, count in zip(dataset.classes, counts, strict=False) if not count]
    if bare:
        without = f"{output.pluralize(len(bare), 'class')} of {dataset.name} without a training image"
        raise DataError(f"{without}, such as {bare[0]}: add some, or remove the class")
    if len(dataset.classes) != 1:
        return
    (name,) = dataset.classes
    if not dataset.multi_label:
        raise DataError(
            f"{dataset.name} has one class, {name}, and a classifier needs two or more{_suggest_subfolder(dataset, name)}"
        )
    if all(split.count_per_class(1)[0] == len(split) for split in dataset.splits.values()):
        raise DataError(f"every image of {dataset.name} has the label {name}: add images without it, with empty labels")


def _suggest_subfolder(dataset: "Dataset", name: str) -> str:
    """What may have been meant by a dataset of one class: the folders in its folder, or images without labels."""
    paths = (
        split.get_image_name(place)
        for split in dataset.splits.values()
        for place in range(min(len(split), _MAX_SCANNED_IMAGES))
    )
    inner = sorted({path.split("/")[1] for path in paths if path.startswith(f"{name}/") and path.count("/") > 1})
    if len(inner) > 1:
        more = " ..." if len(inner) > 3 else ""
        return f"; {name} holds the folders {', '.join(inner[:3])}{more}: did you mean {dataset.name}/{name}?"
    return ": one subfolder each. Without labels: vitrail train mae-... (vitrail list recipes)"


def choose_loss(recipe: Recipe, dataset: "Dataset") -> Recipe:
    """The recipe with the loss that the data asks for."""
    return dataclasses.replace(recipe, loss="sigmoid") if dataset.multi_label else recipe


def warn_about_imbalance(run: "TrainingRun") -> None:
    """Say where accuracy alone would mislead."""
    from vitrail.train.training_run import IMBALANCE_THRESHOLD

    if run.imbalance >= IMBALANCE_THRESHOLD and not run.dataset.multi_label:
        names, counts = run.dataset.classes, run.class_counts
        most, least = max(range(len(counts)), key=counts.__getitem__), min(range(len(counts)), key=counts.__getitem__)
        advice = "" if run.recipe.logit_adjustment else "; --balanced lets every class count alike"
        output.print_note(
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
    from vitrail.data.dataset import without_images
    from vitrail.runtime import distributed

    reports: list[dict[str, Any]] = []

    def scan_on_rank0() -> list[tuple[str, str]] | None:
        report = _scan_images(dataset, data, seconds)
        reports.extend([] if report is None else [report])
        return None if report is None else _check_bad_images(report["bad"], dataset, data, strict=strict)

    bad = distributed.run_on_rank0(scan_on_rank0)
    if bad is None:
        return dataclasses.replace(dataset, skip_bad=not strict), None
    return without_images(dataset, set(bad)) if bad else dataset, reports[0] if reports else None


class _OutOfTimeError(Exception):
    """Looking at the images takes longer than it may."""


def _scan_images(dataset: "Dataset", data: str, seconds: float) -> dict[str, Any] | None:
    from vitrail.data.audit import audit_dataset
    from vitrail.data.image_scan import scan_dataset

    images = sum(len(split) for split in dataset.splits.values())
    if images > _MAX_SCANNED_IMAGES:
        output.print_note(
            f"note: {images:,} images are not looked at one by one before training: vitrail data check {data}"
        )
        return None
    end = time.monotonic() + seconds
    with output.show_progress("looking at images") as progress:

        def report_or_stop(done: int, total: int) -> None:
            progress(done, total)
            if done < total and time.monotonic() > end:
                raise _OutOfTimeError(f"{done:,} of {output.pluralize(total, 'image')}")

        try:
            report = audit_dataset(scan_dataset(dataset, progress=report_or_stop))
        except _OutOfTimeError as looked_at:
            output.print_note(f"note: there was time to look at {looked_at} before training: vitrail data check {data}")
            return None
    if across := report["duplicates"]["across_splits"]:
        output.print_note(
            f"warning: {output.pluralize(across, 'group')} of copies across splits, so results look too good:"
            f" vitrail data check {data}"
        )
    return report


def _check_bad_images(
    bad: Sequence[dict[str, str]], dataset: "Dataset", data: str, *, strict: bool
) -> list[tuple[str, str]]:
    """Split and name of the images to leave out; refused where they are many, or with `strict` any."""
    from vitrail.data.dataset import MAX_BAD_FRACTION

    if not bad:
        return []
    images = sum(len(split) for split in dataset.splits.values())
    first = f"{output.pluralize(len(bad), 'image')} of {images:,} cannot be read, such as {bad[0]['name']}: {bad[0]['reason']}"
    if strict or len(bad) > MAX_BAD_FRACTION * images:
        rule = "--strict takes none" if strict else f"more than {MAX_BAD_FRACTION:.0%} are too many"
        raise DataError(
            f"{first}; {rule}. `vitrail data check {data}` names every bad image, and how to leave them out"
        )
    them = "it" if len(bad) == 1 else "them"
    output.print_note(f"warning: {first}; left out, and listed in data_report.json (--strict refuses {them})")
    return [(each["split"], each["name"]) for each in bad]


def train_and_report(
    run: "TrainingRun",
    folder: Path,
    *,
    data: str,
    out: str | None = None,
    track: Tracker | None = None,
    report: dict[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    save_every: float = 10,
    baselines: Mapping[str, int] | None = None,
    deadline: "Deadline | None" = None,
    verify_every: int = 0,
) -> "RunResult | PretrainingResult | None":
    """Train and show how far it is: a bar on a terminal, a line an evaluation everywhere; then draw what it came to.

    Of several processes the first has the result, and does all this. `baselines` say what simpler ways get right.
    """
    from vitrail.data.dataset_digest import ChangedDataError
    from vitrail.figures import reconstruction_images
    from vitrail.runtime import distributed
    from vitrail.train.run import lock_run_folder, run_training
    from vitrail.train.step_verification import TOLERANCE, is_deterministic

    if not 0 <= save_every < math.inf:
        raise UsageError(f"--save-every is {save_every}; give minutes, 0 for every step")
    if verify_every < 0:
        raise UsageError(f"--verify-every is {verify_every}; give a number of steps, 0 for never")
    if verify_every and not is_deterministic(run.device):
        output.print_note(
            f"note: a GPU adds in any order, so --verify-every lets gradients differ by {TOLERANCE:.0%} of their norm;"
            " with --deterministic it compares every bit"
        )
    warn_about_imbalance(run)
    if run.shard and not run.is_sharded:
        output.print_note(
            "note: --shard changes nothing in one process, which has to hold the whole model; torchrun starts more"
        )
    accuracy, remembered = "", False

    def show_step(moment: "StepEnd") -> None:
        nonlocal remembered
        if not remembered and run.group.is_rank0:
            log_command(folder)
        remembered = True
        rate = moment.step * run.recipe.batch / max(moment.seconds, 1e-9)
        progress(moment.step, moment.steps, f"loss {moment.result.loss:.3f}{accuracy}, {rate:,.0f} images/s")

    def show_evaluation(found: "ValidationResult") -> None:
        nonlocal accuracy
        accuracy = f", {found.val_summary}"
        output.print_note(str(found))
        if found.examples is not None and run.group.is_rank0:
            reconstruction_images.draw_reconstruction(*found.examples, folder / "reconstruction.jpg")

    with contextlib.ExitStack() as stack:
        distributed.run_on_rank0(lambda: stack.enter_context(lock_run_folder(folder)))
        saved = stack.enter_context(upload_checkpoints(folder, out, run.group, anew=overwrite and not resume))
        with output.show_progress("training") as progress:
            try:
                result = run_training(
                    run,
                    folder,
                    after_step=show_step,
                    after_evaluation=show_evaluation,
                    make_loggers=_choose_loggers(track),
                    resume=resume,
                    save_every_seconds=save_every * 60,
                    after_checkpoint=saved,
                    notify=output.print_note,
                    contents_digest="" if report is None else report["contents"],
                    overwrite=overwrite and not resume and is_run_folder(folder),
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
        draw_run_figures(run, result, folder)
        write_multi_label_scores(run, result, folder)
        write_run_report(run, folder, baselines or {}, None if resume else deadline)
        return result


def log_command(folder: Path) -> None:
    """Write down the command that a run goes by, for whoever wants it again."""
    from vitrail.train.run_log import RunLog

    if sys.argv[1:2] and sys.argv[1] in _TRAINING_COMMANDS:  # not where main is called from Python
        RunLog(folder).log_event("command", arguments=sys.argv[1:], folder=str(Path.cwd()))


def write_multi_label_scores(run: "TrainingRun", result: "RunResult | PretrainingResult", folder: Path) -> None:
    """Write what a multi-label run's predictions are worth, as an event and class by class."""
    from vitrail.evaluate.multi_label import measure_labels
    from vitrail.evaluate.prediction_tables import write_label_scores as write_classes
    from vitrail.train.run import RunResult
    from vitrail.train.run_log import RunLog

    if isinstance(result, RunResult) and result.predictions.multi_label:
        found = measure_labels(result.predictions)
        RunLog(folder).log_event("multi_label", **found.to_dict())
        write_classes(found, run.dataset.classes, folder / "per_class.csv", run.class_counts)


def write_run_report(
    run: "TrainingRun", folder: Path, baselines: Mapping[str, int], deadline: "Deadline | None" = None
) -> None:
    """Write the run's report and card. The run has ended well: what goes wrong here is said and costs it nothing."""
    from jinja2 import TemplateError

    from vitrail.report.write_report import REPORT_FILE, write_report
    from vitrail.train.run_log import RunLog

    try:
        for name, right in baselines.items():
            RunLog(folder).log_event("baseline", name=name, right=right)
        figures = deadline is None or deadline.seconds_left > deadline.figure_seconds
        write_report(folder, run.dataset, run.device, with_figures=figures)
        output.print_note(f"report: {folder / REPORT_FILE}")
        if not figures:
            command = shlex.join(["vitrail", "report", str(folder)])
            output.print_note(f"note: no time was left for the report's figures of the model: `{command}` draws them")
    except (VitrailError, OSError, MemoryError, RuntimeError, TemplateError, *_UNEXPECTED_ERRORS) as error:
        command = shlex.join(["vitrail", "report", str(folder)])
        output.print_note(f"warning: the report is not written ({' '.join(str(error).split())}); `{command}` does it")


@contextlib.contextmanager
def upload_checkpoints(
    folder: Path, out: str | None, group: "ProcessGroup", *, anew: bool
) -> Iterator[Callable[[Path], None]]:
    """What is to be called with each finished checkpoint: of an --out that is a URL it copies it there.

    At the end all of the run's folder is copied.
    """
    from vitrail.runtime import distributed
    from vitrail.runtime.signals import StoppedError
    from vitrail.train import upload

    if out is None or not remote.is_remote(out):
        yield lambda _: None
        return
    try:
        if not group.is_rank0:
            yield lambda _: None
            return
        url = _make_upload_url(folder, out)
        if anew:
            upload.remove_upload(url)
        with contextlib.closing(upload.RunUploader(folder, url, output.print_note)) as copy:
            yield copy.submit
            copy.finish()
    except StoppedError:
        distributed.barrier()  # the first that ends would have torchrun end the one that still copies
        raise


def _make_upload_url(folder: Path, out: str) -> str:
    """Where the copy of a run is, or of one of several seeds."""
    return "/".join([out.rstrip("/"), *folder.relative_to(_resolve_local_folder(out)).parts])


def _resolve_local_folder(out: str) -> Path:
    """The folder that a run works in: the one given, or of a URL that of the same path below runs."""
    if not remote.is_remote(out):
        return Path(out)
    parts = [part for part in out.partition("://")[2].split("/") if part]
    if not parts or {".", ".."} & set(parts):
        raise UsageError(f"{out!r:.200} names no folder: give a path below it, such as {out.rstrip('/')}/runs/NAME")
    return Path("runs", *parts)


def _choose_loggers(track: Tracker | None) -> Any:
    def make_loggers(folder: Path) -> Sequence["Logger"]:
        from vitrail.train.run_log import TensorBoardLogger

        return [TensorBoardLogger(folder / "tensorboard")]

    return make_loggers if track == "tensorboard" else lambda _: ()


def summarize_result(facts: dict[str, Any]) -> str:
    """What a run came to, in a line."""
    if "patches" in facts:
        right = "" if facts["top1"] is None else f", {facts['top1']:.1%} of the colours right"
        text = f"{facts['split']}: loss {facts['loss']:.3f} of {facts['patches']:,} hidden patches{right}"
        return f"{text} ({facts['folder']}/weights/best.safetensors)"
    what = output.pluralize(facts["images"], "image" if facts["trained_on"] else f"{facts['split']} image")
    labels = facts.get("labels")
    text = f"{facts['top1']:.1%} of {what} {'have exactly their labels' if labels else 'right'}"
    text += " (on images that were trained on)" if facts["trained_on"] else _format_interval(facts["interval"])
    if labels:
        text += f", F1 {labels['micro_f1']:.1%}, mAP {labels['mean_average_precision']:.1%}"
    if facts["macro"] is not None and facts["macro"] < facts["top1"] - 0.02:
        text += f", {facts['macro']:.1%} of a class on average"
    if weakest := facts["weakest"]:
        taken = f", taken for {weakest['taken_for']}" if weakest["taken_for"] else ""
        text += f"; weakest: {weakest['class']}, {weakest['right']:.0%}{taken}"
    folder = facts["folder"]
    report = f"; report: {facts['report']}" if facts["report"] else ""
    return (
        f"{output.strip_control_characters(text)}; weights: {folder}/weights/best.safetensors{report};"
        f" next: vitrail predict {shlex.quote(folder)} IMAGES, vitrail serve {shlex.quote(folder)}"
    )


def _format_interval(interval: Sequence[float]) -> str:
    return f" ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})"


def find_weakest_class(counts: "Counts", classes: Sequence[str]) -> dict[str, Any] | None:
    """The class of which least is right, and what it is most often taken for; None where nothing is wrong."""
    if not counts.has_confusion or counts.correct == counts.images:
        return None
    images, right = counts.confusion.sum(dim=1), counts.confusion.diagonal()
    share = (right / images.clamp(min=1)).masked_fill(images == 0, 2.0)
    worst = int(share.argmin())
    wrong = counts.confusion[worst].clone()
    wrong[worst] = 0
    taken_for = classes[int(wrong.argmax())] if wrong.any() else None
    return {"class": classes[worst], "right": float(share[worst]), "images": int(images[worst]), "taken_for": taken_for}


def collect_result_facts(run: "TrainingRun", result: "RunResult | PretrainingResult", folder: Path) -> dict[str, Any]:
    """What a run came to, for programs."""
    from vitrail.evaluate.multi_label import measure_labels
    from vitrail.evaluate.statistics import wilson_interval
    from vitrail.train.run import PretrainingResult

    if isinstance(result, PretrainingResult):
        found = {"folder": str(folder), "split": "val", **dataclasses.asdict(result)}
        return found | {"trained": round(result.epochs * len(run.train_split)), "seed": run.seed}
    counts, report = result.counts, folder / "report.html"
    labels = measure_labels(result.predictions).to_dict() if result.predictions.multi_label else None
    return {
        "folder": str(folder),
        "report": str(report) if report.exists() else None,
        "split": result.split,
        "images": counts.images,
        "right": counts.correct,
        "top1": counts.top1,
        "interval": list(wilson_interval(counts.correct, counts.images)),
        "top5": counts.top5,
        "weakest": find_weakest_class(counts, run.dataset.classes),
        "macro": counts.macro_accuracy if counts.has_confusion else None,
        "trained_on": run.train_on_val and result.split == "val",
        "loss": counts.mean_loss,
        "temperature": result.temperature,
        "calibration_error": result.calibration_error,
        "labels": labels,
        "epochs": result.epochs,
        "trained": round(result.epochs * len(run.train_split)),
        "seconds": result.seconds,
        "seed": run.seed,
    }


# --- pictures --------------------------------------------------------------------------------------------------------


def draw_run_figures(run: "TrainingRun", result: "RunResult | PretrainingResult", folder: Path) -> None:
    """The pictures of a run's folder."""
    from vitrail.evaluate.calibration import count_bins
    from vitrail.figures import plots
    from vitrail.train.run import PretrainingResult

    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {name: [float(row[name] or "nan") for row in rows] for name in rows[0]}
    plots.plot_training_curves(columns, folder / "results.png")
    draw_first_batch(run, folder / "train_batch0.jpg")
    if isinstance(result, PretrainingResult):
        return
    said = result.predictions
    if result.counts.has_confusion:
        confusion, names = result.counts.confusion.numpy(), run.dataset.classes
        plots.plot_confusion_matrix(confusion, names, folder / "confusion_matrix.png")
        plots.plot_confusion_matrix(confusion, names, folder / "confusion_matrix_normalized.png", normalize=True)
    binned = count_bins(*said.calibration_pairs)
    plots.plot_reliability(
        binned.counts, binned.correct, folder / "reliability.png", calibration_error=result.calibration_error
    )
    split, some = run.dataset.splits[result.split], range(min(_GRID_IMAGES, len(said.images)))
    classes, preprocess = run.dataset.classes, run.preprocess
    worst = said.losses.argsort(descending=True)[:_WORST_IMAGES].tolist()
    image_sheets.draw_prediction_sheet(split, classes, preprocess, said, some, folder / "val_batch0_pred.jpg")
    image_sheets.draw_labeled_sheet(
        split, classes, preprocess, said.images[list(some)].tolist(), folder / "val_batch0_labels.jpg"
    )
    image_sheets.draw_prediction_sheet(split, classes, preprocess, said, worst, folder / "top_losses.jpg")


def draw_first_batch(run: "TrainingRun", path: Path) -> None:
    """The first training images as the model sees them, before they are mixed."""
    from vitrail.data.loader import BatchPlan, iter_train_batches
    from vitrail.figures import image_grids

    training = run.training_data
    count = min(_GRID_IMAGES, run.plan.get_step_size(0))
    batch = next(iter_train_batches(training, BatchPlan(batch_size=count, total_positions=count)))
    rows = training.order.get_sample_indices(batch.positions.numpy()).tolist()[:count]
    image_grids.write_image_grid(
        batch.pixels[:count],
        [image_sheets.format_labels(training.split, run.dataset.classes, row) for row in rows],
        path,
    )


# --- what a run will take --------------------------------------------------------------------------------------------


def print_dry_run(run: "TrainingRun", *, as_json: bool) -> None:
    """Show what would be done and what it would take, and draw the first batch."""
    from vitrail.train.time_estimate import estimate_run
    from vitrail.train.training_run import make_run_config

    output.print_note("timing a few steps")
    found = estimate_run(run)
    picture = Path("runs") / "dry-run" / "train_batch0.jpg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_first_batch(run, picture)
    if as_json:
        output.print_json(make_run_config(run) | {"estimate": dataclasses.asdict(found), "picture": str(picture)})
        return
    recipe, plan, view = run.recipe, run.plan, run.preprocess
    optimizer, schedule = recipe.optimizer, recipe.schedule
    how = ["sharded"] * run.is_sharded + ["compiled"] * run.is_compiled
    output.print_table(
        [
            ("data", f"{run.dataset.name}: " + ", ".join(f"{k} {len(v):,}" for k, v in run.dataset.splits.items())),
            _describe_targets(run),
            ("model", run.initial_model.origin.name if run.initial_model else f"{recipe.model}, random weights"),
            ("input", f"{view.size[0]} x {view.size[1]} pixels, mean {view.mean}, std {view.std}"),
            (
                "steps",
                f"{plan.total_steps:,} of {output.pluralize(plan.batch_size, 'image')}, {output.pluralize(recipe.epochs, 'epoch')}",
            ),
            ("optimizer", f"{optimizer.kind}, learning rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}"),
            ("schedule", f"{output.pluralize(schedule.warmup, 'step')} of warm-up, then {schedule.decay}"),
            ("augmentation", _describe_augmentation(recipe)),
            ("device", ", ".join([str(run.device), output.pluralize(plan.micro_batches, "micro-batch"), *how])),
            ("time", f"about {format_duration(found.seconds)} at {found.images_per_second:,.0f} images/s"),
            (
                "memory",
                f"about {output.format_bytes(found.memory_bytes)} of {output.format_bytes(found.available_bytes)}{_suggest_micro_batches(run, found)}",
            ),
            ("first batch", str(picture)),
        ]
    )
    print("\n--json shows the whole configuration. Nothing was trained.")


def _describe_targets(run: "TrainingRun") -> tuple[str, str]:
    """What there is to learn."""
    masked, counts = run.recipe.masked, run.class_counts
    if masked is None:
        return (
            "classes",
            f"{len(run.dataset.classes):,}, with {min(counts):,} to {output.pluralize(max(counts), 'image')}",
        )
    hidden = masked.count_masked(run.num_patches)
    return "hidden", f"{hidden} of {run.num_patches} patches ({masked.kind}), to tell: {masked.target}"


def _describe_augmentation(recipe: Recipe) -> str:
    default = {field.name: field.default for field in dataclasses.fields(recipe.augment)}
    parts = [recipe.augment.crop + " crop"]
    for name, value in dataclasses.asdict(recipe.augment).items():
        if name != "crop" and value != default[name]:
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def _suggest_micro_batches(run: "TrainingRun", estimate: Any) -> str:
    if estimate.memory <= estimate.available * 0.9:
        return ""
    parts = -(-estimate.memory * run.micro_batches * 10 // (estimate.available * 8))
    return f": too much. --micro-batches {parts} computes a step in parts"
