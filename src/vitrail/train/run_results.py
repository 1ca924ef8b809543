"""What a run's evaluations and its end show: numbers, the facts for programs, and one sentence for people."""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.evaluate.multi_label import measure_labels
from vitrail.evaluate.predictions import Counts, Predictions
from vitrail.evaluate.statistics import wilson_interval
from vitrail.formatting import pluralize, strip_control_characters
from vitrail.train.loop import StepEnd
from vitrail.train.masked_evaluation import MaskedCounts, MaskedExamples
from vitrail.train.training_run import TrainingRun

_MACRO_GAP = 0.02  # the mean over classes is mentioned where it is this far below the accuracy


@dataclasses.dataclass(frozen=True)
class ValidationResult:
    """An evaluation during a run."""

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

    def __str__(self) -> str:
        step_end = self.step_end
        seconds_left = step_end.seconds / step_end.step * (step_end.steps - step_end.step)
        return (
            f"epoch {step_end.epoch:.4g}: loss {self.train_loss:.3f}, {self.val_summary},"
            f" {self.images_per_second:,.0f} images/s, {seconds_left:,.0f} s left"
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
    counts, report = result.counts, folder / "report.html"
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
        "multi_label_metrics": (
            measure_labels(result.predictions).to_dict() if result.predictions.multi_label else None
        ),
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
    images, right = counts.confusion.sum(dim=1), counts.confusion.diagonal()
    accuracy = (right / images.clamp(min=1)).masked_fill(images == 0, 2.0)
    worst = int(accuracy.argmin())
    wrong = counts.confusion[worst].clone()
    wrong[worst] = 0
    taken_for = classes[int(wrong.argmax())] if wrong.any() else None
    return {
        "class": classes[worst],
        "right": float(accuracy[worst]),
        "images": int(images[worst]),
        "taken_for": taken_for,
    }


def summarize_result(facts: dict[str, Any]) -> str:
    """One line for people, from the facts of a run (`collect_result_facts`)."""
    folder = facts["folder"]
    if "patches" in facts:
        color_accuracy = "" if facts["top1"] is None else f", {facts['top1']:.1%} of the colors right"
        text = f"{facts['split']}: loss {facts['loss']:.3f} of {facts['patches']:,} masked patches{color_accuracy}"
        return f"{text} ({folder}/weights/best.safetensors)"
    report = f"; report: {facts['report']}" if facts["report"] else ""
    return (
        f"{strip_control_characters(_summarize_accuracy(facts))}; weights: {folder}/weights/best.safetensors{report};"
        f" next: vitrail predict {shlex.quote(folder)} IMAGES, vitrail serve {shlex.quote(folder)}"
    )


def _summarize_accuracy(facts: dict[str, Any]) -> str:
    images = pluralize(facts["images"], "image" if facts["trained_on"] else f"{facts['split']} image")
    label_metrics = facts.get("multi_label_metrics")
    text = f"{facts['top1']:.1%} of {images} {'have exactly their labels' if label_metrics else 'right'}"
    low, high = facts["interval"]
    text += " (on images that were trained on)" if facts["trained_on"] else f" ({100 * low:.1f} to {100 * high:.1f})"
    if label_metrics:
        text += f", F1 {label_metrics['micro_f1']:.1%}, mAP {label_metrics['mean_average_precision']:.1%}"
    if facts["macro"] is not None and facts["macro"] < facts["top1"] - _MACRO_GAP:
        text += f", {facts['macro']:.1%} of a class on average"
    if weakest := facts["weakest"]:
        confusion = f", taken for {weakest['taken_for']}" if weakest["taken_for"] else ""
        text += f"; weakest: {weakest['class']}, {weakest['right']:.0%}{confusion}"
    return text
