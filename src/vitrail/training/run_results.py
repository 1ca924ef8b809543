"""The results of a run: numbers of its evaluations and its end, for programs and for people, and its log.

    results.csv   a row for each evaluation, with columns that existing scripts know
    events.jsonl  a line for each event
    run.log       the same for people to read

Any other destination is a `Logger` of two methods; `trackers` has TensorBoard, Weights & Biases and MLflow.
"""

import csv
import dataclasses
import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from vitrail.evaluation.label_metrics import measure_labels
from vitrail.evaluation.predictions import Counts, Predictions
from vitrail.evaluation.statistics import wilson_interval
from vitrail.formatting import format_rate, pluralize, strip_control_characters
from vitrail.training.loop import StepEnd
from vitrail.training.training_run import TrainingRun

__all__ = ["Logger", "MaskedCounts", "ValidationResult"]

RESULT_COLUMNS = (
    "epoch", "time", "train/loss", "metrics/accuracy_top1", "metrics/accuracy_top5", "val/loss", "lr/pg0",
)  # fmt: skip
FINAL_PREFIX = "final/"
"""Begins the names of the numbers that a finished run sends to its loggers."""
_TRUNCATED_FILES = ("results.csv", "events.jsonl")
_MACRO_GAP = 0.02  # the mean over classes is mentioned where it is this far below the accuracy


class MaskedExamples(NamedTuple):
    """A few images with predicted and target patches, on the CPU."""

    pixels: Tensor  # uint8 (B, C, S, S), or one more: the partner that patches may be taken from
    masking: Tensor  # int64 (B, 2, N)
    predicted_patches: Tensor  # uint8 (B, M, C, p, p): the masked patches as predicted
    target_patches: Tensor  # uint8 (B, M, C, p, p): the masked patches themselves


@dataclasses.dataclass(frozen=True)
class MaskedCounts:
    """Sums over held-out images, of a run without labels.

    `ValidationResult.val` is one.

        from vitrail.training.run_results import MaskedCounts

        print(MaskedCounts(images=4, patches=32, loss=2.0, num_colors=0, correct=0, correct_top5=0).mean_loss)
    """

    images: int
    patches: int
    """Masked ones."""
    loss: float
    """The mean over an image's masked patches, summed over images."""
    num_colors: int
    """Colors to predict; 0 where the target is pixels."""
    correct: int
    correct_top5: int
    examples: MaskedExamples | None = None

    @property
    def mean_loss(self) -> float:
        """The mean loss of an image."""
        return self.loss / self.images

    @property
    def top1(self) -> float | None:
        """The share of colors predicted correctly."""
        return self.correct / self.num_colors if self.num_colors else None

    @property
    def top5(self) -> float | None:
        """The share of colors among the five most likely predictions."""
        return self.correct_top5 / self.num_colors if self.num_colors else None


@dataclasses.dataclass(frozen=True)
class ValidationResult:
    """An evaluation during a run.

    `on_evaluation` gets one.

        vitrail.train("digits", data="digits", epochs=5, on_evaluation=lambda result: print(result.val_summary))
    """

    step_end: StepEnd
    train_loss: float
    val: Counts | MaskedCounts
    images_per_second: float

    @property
    def examples(self) -> MaskedExamples | None:
        """A few images of a masked run, with their predicted patches."""
        return self.val.examples if isinstance(self.val, MaskedCounts) else None

    @property
    def val_summary(self) -> str:
        """The validation result in a few words."""
        if isinstance(self.val, Counts):
            return f"validation {self.val.top1:.1%}"
        color_accuracy = "" if self.val.top1 is None else f", {self.val.top1:.1%} of the colors"
        return f"validation {self.val.mean_loss:.3f}{color_accuracy}"

    def __repr__(self) -> str:
        return f"ValidationResult({self})"

    def __str__(self) -> str:
        step_end = self.step_end
        seconds_left = step_end.seconds / step_end.step * (step_end.steps - step_end.step)
        return (
            f"epoch {step_end.epoch:.4g}: loss {self.train_loss:.3f}, {self.val_summary},"
            f" {format_rate(self.images_per_second)}, {seconds_left:,.0f} s of training left"
        )


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of a supervised run: of its best weights, on held-out images."""

    split: str
    """The split it was measured on: test, or val where there is no test."""
    counts: Counts
    predictions: Predictions
    temperature: float
    calibration_error: float
    """Of the predictions, with that temperature."""
    seconds: float
    """Of training, its evaluations included."""
    epochs: float
    label_thresholds: tuple[float, ...] = ()
    """The probability above which each label of multi-label images is predicted."""


@dataclasses.dataclass(frozen=True)
class PretrainingResult:
    """The result of a masked run: of its best weights, on val."""

    images: int
    patches: int
    """Masked ones."""
    loss: float
    top1: float | None
    """Of the colors to predict, where the target is colors."""
    top5: float | None
    seconds: float
    """Of training, its evaluations included."""
    epochs: float


def collect_result_facts(run: TrainingRun, result: RunResult | PretrainingResult, folder: Path) -> dict[str, Any]:
    """The result of a run as a JSON object, for programs."""
    trained_images = round(result.epochs * len(run.train_split))
    if isinstance(result, PretrainingResult):
        facts = {"folder": str(folder), "split": "val", **dataclasses.asdict(result)}
        return facts | {"trained_images": trained_images, "seed": run.seed}
    counts, report, adapter = result.counts, folder / "report.html", folder / "weights" / "adapter"
    labels = measure_labels(result.predictions).to_dict() if result.predictions.multi_label else None
    return {
        "folder": str(folder),
        "report": str(report) if report.exists() else None,
        **({"adapter": str(adapter)} if adapter.exists() else {}),
        "split": result.split,
        "images": counts.images,
        "correct": counts.correct,
        "top1": counts.top1,
        "interval": list(wilson_interval(counts.correct, counts.images)),
        "top5": counts.top5,
        "weakest": find_weakest_class(counts, run.dataset.classes),
        "macro": counts.macro_accuracy if counts.has_confusion else None,
        "trained_on": run.train_on_val and result.split == "val",
        "loss": counts.mean_loss,
        "temperature": result.temperature,
        "calibration_error": result.calibration_error,
        "multi_label_metrics": labels,
        "label_thresholds": dict(zip(run.dataset.classes, result.label_thresholds, strict=True)) if labels else None,
        "epochs": result.epochs,
        "trained_images": trained_images,
        "seconds": result.seconds,
        "seed": run.seed,
    }


def standard_error(accuracy: float, images: int) -> float:
    """The standard error of an accuracy measured on so many images.

    Within it one accuracy is as good as another, and later weights, trained longer and at a lower learning rate, are
    the better guess: with ten images to choose by, chance would choose.
    """
    return math.sqrt(accuracy * (1 - accuracy) / images)


def find_weakest_class(counts: Counts, classes: Sequence[str]) -> dict[str, Any] | None:
    """The class with the lowest accuracy, and the class it is most often confused with; None without a mistake."""
    if not counts.has_confusion or counts.correct == counts.images:
        return None
    images, correct = counts.confusion.sum(dim=1), counts.confusion.diagonal()
    accuracy = (correct / images.clamp(min=1)).masked_fill(images == 0, 2.0)
    worst = int(accuracy.argmin())
    wrong = counts.confusion[worst].clone()
    wrong[worst] = 0
    taken_for = classes[int(wrong.argmax())] if wrong.any() else None
    share, count = float(accuracy[worst]), int(images[worst])
    return {"class": classes[worst], "accuracy": share, "images": count, "taken_for": taken_for}


def summarize_result(facts: dict[str, Any]) -> str:
    """One line for people, from the facts of a run (`collect_result_facts`)."""
    folder = facts["folder"]
    if "patches" in facts:
        color_accuracy = "" if facts["top1"] is None else f", {facts['top1']:.1%} of the colors correct"
        text = f"{facts['split']}: loss {facts['loss']:.3f} of {facts['patches']:,} masked patches{color_accuracy}"
        return f"{text} ({folder}/weights/best.safetensors)"
    report = f"; report: {facts['report']}" if facts["report"] else ""
    adapter = f"; adapter: {facts['adapter']}" if "adapter" in facts else ""
    return (
        f"{strip_control_characters(_summarize_accuracy(facts))}; weights: {folder}/weights/best.safetensors{adapter}"
        f"{report}; next: vitrail predict {shlex.quote(folder)} IMAGES, vitrail serve {shlex.quote(folder)}"
    )


def _summarize_accuracy(facts: dict[str, Any]) -> str:
    images = pluralize(facts["images"], "image" if facts["trained_on"] else f"{facts['split']} image")
    label_metrics = facts.get("multi_label_metrics")
    text = f"{facts['top1']:.1%} of {images} {'have exactly their labels' if label_metrics else 'correct'}"
    low, high = facts["interval"]
    text += " (on images that were trained on)" if facts["trained_on"] else f" ({100 * low:.1f} to {100 * high:.1f})"
    if label_metrics:
        text += f", F1 {label_metrics['micro_f1']:.1%}, mAP {label_metrics['mean_average_precision']:.1%}"
    if facts["macro"] is not None and facts["macro"] < facts["top1"] - _MACRO_GAP:
        text += f", {facts['macro']:.1%} of a class on average"
    if weakest := facts["weakest"]:
        confusion = f", taken for {weakest['taken_for']}" if weakest["taken_for"] else ""
        text += f"; weakest: {weakest['class']}, {weakest['accuracy']:.0%}{confusion}"
    return text


@runtime_checkable
class Logger(Protocol):
    """A destination for a run's numbers, besides its folder: any object with these two methods.

    Pass one as `track`:

        class PrintingLogger:
            def log_scalars(self, step, values):
                print(step, values)

            def close(self):
                print("done")

        vitrail.train("digits", data="digits", epochs=5, track=PrintingLogger())
    """

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers by name, after so many steps."""
        ...

    def close(self) -> None:
        """Write what is left; called when the run ends, also by an error."""
        ...


class RunLog:
    """Writes the text files of a run's folder and calls the loggers; without a folder it writes no files."""

    def __init__(self, folder: Path | None, loggers: Sequence[Logger] = ()) -> None:
        self.folder = folder
        self.loggers = loggers
        if folder is not None and not (folder / "results.csv").exists():
            with (folder / "results.csv").open("w", newline="") as file:
                csv.writer(file).writerow(RESULT_COLUMNS)

    def get_file_sizes(self) -> dict[str, int]:
        """The sizes of the files that a resumed run truncates."""
        if self.folder is None:
            return {}
        return {name: path.stat().st_size if (path := self.folder / name).exists() else 0 for name in _TRUNCATED_FILES}

    def truncate(self, sizes: Mapping[str, int]) -> None:
        """Remove what was written after a checkpoint: it will be written again."""
        if self.folder is None:
            return
        for name in _TRUNCATED_FILES:
            with (self.folder / name).open("ab") as file:
                file.truncate(sizes[name])

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step to the loggers; they are too many for the text files."""
        for logger in self.loggers:
            logger.log_scalars(step, values)

    def log_evaluation(self, step: int, values: Sequence[float | None]) -> None:
        """Write a row of results.csv; None is an empty cell."""
        if self.folder is None:
            return
        with (self.folder / "results.csv").open("a", newline="") as file:
            csv.writer(file).writerow("" if value is None else f"{value:.6g}" for value in values)
        named = dict(zip(RESULT_COLUMNS, values, strict=True))
        self.log_event("epoch", step=step, **named)
        known = {name: value for name, value in named.items() if value is not None}
        self.log_step(step, {name: value for name, value in known.items() if name not in ("epoch", "time")})

    def log_result(self, step: int, result: RunResult | PretrainingResult) -> None:
        """Send the result of the run to the loggers; log_event writes it to the text files."""
        values: dict[str, float | None]
        if isinstance(result, RunResult):
            counts = result.counts
            values = {"accuracy_top1": counts.top1, "accuracy_top5": counts.top5, "loss": counts.mean_loss}
            values["calibration_error"] = result.calibration_error
        else:
            values = {"accuracy_top1": result.top1, "accuracy_top5": result.top5, "loss": result.loss}
        known = {f"{FINAL_PREFIX}{name}": value for name, value in values.items() if value is not None}
        self.log_step(step, known)

    def log_event(self, event: str, **facts: Any) -> None:
        """Write a line of events.jsonl."""
        if self.folder is None:
            return
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"at": time.time(), "event": event, **facts}) + "\n")

    def write_line(self, sentence: str) -> None:
        """Write a line of run.log."""
        if self.folder is None:
            return
        with (self.folder / "run.log").open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n")

    def close(self) -> None:
        """Close the loggers."""
        for logger in self.loggers:
            logger.close()
