"""Facts of a run, read from its folder: configuration, training curves, predictions and metrics.

Nothing here computes what the folder already holds, and nothing needs the images or the weights.
"""

import contextlib
import csv
import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vitrail import remote
from vitrail.config.serialization import upgrade_result_keys, upgrade_run_config
from vitrail.data.audit import upgrade_report
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.predictions import MAX_CONFUSION_CLASSES
from vitrail.evaluation.statistics import Interval, wilson_interval
from vitrail.formatting import unquote_cell
from vitrail.training.run_results import RESULT_COLUMNS
from vitrail.training.training_run import is_run_config


class PredictionRecord(NamedTuple):
    """The prediction for one image: a row of predictions.csv."""

    image: str
    label: str
    predicted: str
    probability: float
    correct: bool  # for a multi-label run: whether exactly the image's labels are predicted


class Baseline(NamedTuple):
    """A much simpler classifier, and how many of the same images it classifies correctly."""

    name: str
    correct: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalMetrics:
    """Metrics of the best weights."""

    split: str
    images: int
    correct: int
    top5: float
    loss: float
    temperature: float
    calibration_error: float
    seconds: float  # of training, including evaluation

    @property
    def top1(self) -> float:
        """The accuracy."""
        return self.correct / self.images

    @property
    def interval(self) -> Interval:
        """The 95 % confidence interval of the accuracy."""
        return wilson_interval(self.correct, self.images)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiLabelMetrics:
    """Metrics of multi-label predictions, besides exact match, which is the accuracy."""

    micro_f1: float
    macro_f1: float
    mean_average_precision: float
    calibration_error: float
    bins: list[tuple[int, float, int]]
    """For each of the bins of equal width: labels, the sum of their probabilities, and how many are true."""
    precision: float | None = None  # unknown of runs of earlier versions, as is the recall
    recall: float | None = None


class ClassRow(NamedTuple):
    """The results of one class."""

    name: str
    train_images: int | None  # None if they were not counted
    images: int
    correct: int
    score: float  # recall; F1 for a multi-label run
    predicted: int  # images predicted as this class
    average_precision: float | None = None
    threshold: float | None = None  # the probability above which the label is predicted


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingMetrics:
    """Metrics of the best weights of a run without labels."""

    split: str
    images: int
    patches: int  # masked ones, whose content is predicted
    loss: float
    top1: float | None  # the accuracy of predicted colors, if colors are the target
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Everything the report says about a run."""

    name: str  # of its folder
    config: Mapping[str, Any]  # config.json, with current keys
    epochs: Mapping[str, tuple[float, ...]]  # the columns of results.csv
    result: FinalMetrics | None  # None until the run has ended, and for a run without labels
    pretraining: PretrainingMetrics | None  # the result of a run without labels
    multi_label_metrics: MultiLabelMetrics | None  # more metrics of a multi-label run, besides `result`
    label_rows: tuple[ClassRow, ...]  # the classes of a multi-label run
    reconstruction: Path | None  # the picture of masked patches and their predictions
    predictions: tuple[PredictionRecord, ...]
    baselines: tuple[Baseline, ...]  # the simplest first
    train_counts: Mapping[str, int]  # training images of each class, if per_class.csv counts them
    data_report: Mapping[str, Any] | None
    command: tuple[str, ...] | None  # the arguments after `vitrail`; None if no event recorded them
    replanned_steps: tuple[tuple[int, int], ...]  # (step, total steps): the changes of plan of a run with a time limit
    working_folder: str | None  # the folder in which the command ran
    end_time: float | None  # seconds since 1970 at the last event
    missing: tuple[str, ...]  # what is missing and why, one sentence each

    @property
    def has_result(self) -> bool:
        """Whether there is a result of either kind."""
        return self.result is not None or self.pretraining is not None

    @property
    def seconds(self) -> float | None:
        """The duration of training, including evaluation."""
        metrics = self.result or self.pretraining
        return None if metrics is None else metrics.seconds

    @property
    def masked(self) -> Mapping[str, Any] | None:
        """The masking options of a run without labels."""
        return self.config["recipe"].get("masked")

    @property
    def data(self) -> str:
        """The dataset's name, without its folders."""
        return get_short_name(self.config["data"])

    @property
    def model(self) -> str:
        """The model's name: a preset, or the initial weights."""
        start = self.config["model"]
        return str(self.config["recipe"]["model"]) if start is None else self.clean_text(start["name"])

    @property
    def is_measured_on_train(self) -> bool:
        """Whether the result is on training images."""
        return bool(self.config["train_on_val"]) and self.result is not None and self.result.split == "val"

    @property
    def is_selected_on_test(self) -> bool:
        """Whether the best weights were selected on the images of the result."""
        return self.result is not None and self.result.split == "val" and not self.config["train_on_val"]

    @property
    def is_multi_label(self) -> bool:
        """Whether an image can have several labels."""
        return _is_multi_label(self.config, self.train_counts) and not self.masked

    @property
    def is_single_label(self) -> bool:
        """Whether every image has one class, so that there is a confusion matrix."""
        return bool(self.predictions) and not self.is_multi_label

    @property
    def image_counts(self) -> Counter[str]:
        """The evaluated images of each class."""
        return Counter(prediction.label for prediction in self.predictions)

    @property
    def macro_accuracy(self) -> float | None:
        """The accuracy of each class, averaged over the classes that have images."""
        if not self.is_single_label:
            return None
        correct = Counter(prediction.label for prediction in self.predictions if prediction.correct)
        images = self.image_counts
        return sum(correct[label] / count for label, count in images.items()) / len(images)

    def list_mistakes(self) -> list[PredictionRecord]:
        """List the wrong predictions, the most confident first."""
        mistakes = [prediction for prediction in self.predictions if not prediction.correct]
        return sorted(mistakes, key=lambda mistake: -mistake.probability)

    def clean_text(self, sentence: str) -> str:
        """Remove the folders of the run's machine from a sentence."""
        return _clean_text(self.config, sentence)


_PATH_ROOT = r"(?:(?:file://[\w.-]*|~)?/|[A-Za-z]:[\\/]|\\\\)"
_FOLDER_PATH = re.compile(
    rf"(?:^|(?<=['\"])){_PATH_ROOT}(?:(?:[^\\/:;,'\"]+|[^\s\\/]+)[\\/])+"  # spaces only where a path surely begins
    rf"|(?<![\w:/.~-]){_PATH_ROOT}(?:[^\s\\/]+[\\/])+"
)


def strip_folders(sentence: str) -> str:
    """Replace the paths in a sentence by their file names: the folders of a machine are private.

    Part of a path with spaces stays, unless the sentence begins with it or it is in quotes.
    """
    return _FOLDER_PATH.sub("", sentence)


def _clean_text(config: Mapping[str, Any], sentence: str) -> str:
    data = str(config["data"])
    return strip_folders(sentence.replace(data, get_short_name(data)))


def get_short_name(name: str) -> str:
    """The last part of a path, or the last two for shards; names on the Hub and remote addresses stay whole."""
    if name.startswith(("hf:", "timm:")) or (remote.is_remote(name) and not name.startswith("file:")):
        return name
    parts = [part for part in re.split(r"[\\/]", name) if part]
    return "/".join(parts[-2 if name.endswith(".tar") else -1 :]) or name


def get_image_name(image: str) -> str:
    """An image's path in its dataset, or the last part of an absolute path."""
    return get_short_name(image) if re.match(_PATH_ROOT, image) else image


def gather_facts(folder: Path) -> RunFacts:
    """Read the facts of a run, whether it has ended or not."""
    config = read_config(folder)
    events = _read_events(folder / "events.jsonl")
    end, pretrained, command = (_find_last_event(events, kind) for kind in ("end", "pretrained", "command"))
    predictions = () if end is None else tuple(_read_predictions(folder / "predictions.csv"))
    train_counts = {} if end is None else _read_train_counts(folder / "per_class.csv")
    multi_label = _is_multi_label(config, train_counts)
    metrics_event = _find_last_event(events, "multi_label") if multi_label and end else None
    metrics = None if metrics_event is None else _parse_event(MultiLabelMetrics, metrics_event, folder)
    if multi_label and metrics is None:
        end, predictions = None, ()  # an older version, which did not count exact matches
    reconstruction = folder / "reconstruction.jpg"
    return RunFacts(
        name=folder.resolve().name,
        config=config,
        epochs=_read_columns(folder / "results.csv"),
        result=None if end is None else _parse_event(FinalMetrics, end, folder),
        pretraining=None if pretrained is None else _parse_event(PretrainingMetrics, pretrained, folder),
        multi_label_metrics=metrics,
        label_rows=() if metrics is None else tuple(_read_label_rows(folder / "per_class.csv")),
        reconstruction=reconstruction if reconstruction.is_file() else None,
        predictions=predictions,
        baselines=tuple(_list_baselines(predictions, train_counts, events, multi_label=multi_label)),
        train_counts=train_counts,
        data_report=_read_data_report(folder / "data_report.json"),
        command=None if command is None else tuple(command["arguments"]),
        replanned_steps=tuple((event["step"], event["steps"]) for event in events if event["event"] == "plan"),
        working_folder=None if command is None else command["folder"],
        end_time=events[-1]["at"] if events else None,
        missing=tuple(_list_missing(folder, config, events, multi_label=multi_label)),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a run."""
    path = folder / "config.json"
    if not path.is_file() or not is_run_config(path.read_bytes()):
        seeds = sorted(config.parent.name for config in folder.glob("seed-*/config.json"))
        if seeds:
            raise UsageError(f"{folder} holds runs of several seeds; give one: vitrail report {folder / seeds[0]}")
        raise UsageError(f"{folder} is not a run: it has no config.json from train, finetune or demo")
    return upgrade_run_config(json.loads(path.read_bytes()))


def _is_multi_label(config: Mapping[str, Any], train_counts: Mapping[str, int]) -> bool:
    """Whether an image can have several labels.

    Runs of earlier versions do not say. Their single-label runs count training images by class, unless there are too
    many classes.
    """
    guess = not train_counts and len(config["classes"]) <= MAX_CONFUSION_CLASSES
    return bool(config.get("multi_label", guess))


@contextlib.contextmanager
def _report_damage(where: str, advice: str) -> Iterator[None]:
    """Turn a parsing error into one that names the damaged file and what to do."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, csv.Error) as error:  # a missing cell is None
        raise DataError(f"{where} is damaged ({error}): {advice}") from error


_REMEASURE_ADVICE = "rerun the command with --resume to measure again"


def _read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events, one dictionary each; the last line of a killed run may be incomplete, and is ignored."""
    if not path.is_file():
        return []
    text = path.read_text(errors="replace")
    events = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        with _report_damage(f"{path}, line {number}", "repair or remove the line"):
            event = upgrade_result_keys(json.loads(line))
            events.append({"at": event["at"], "event": event["event"], **event})
    return events


def _find_last_event(events: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((event for event in reversed(events) if event["event"] == kind), None)


T = TypeVar("T", FinalMetrics, PretrainingMetrics, MultiLabelMetrics)


def _parse_event(kind: type[T], event: Mapping[str, Any], folder: Path) -> T:
    """Build a dataclass from the fields of an event."""
    with _report_damage(f"the event {event['event']!r} in {folder / 'events.jsonl'}", _REMEASURE_ADVICE):
        needed = [
            field for field in dataclasses.fields(kind) if field.name in event or field.default is dataclasses.MISSING
        ]
        return kind(**{field.name: event[field.name] for field in needed})


def _read_predictions(path: Path) -> Iterator[PredictionRecord]:
    for line, row in enumerate(_read_rows(path), 2):
        with _report_damage(f"{path}, line {line}", _REMEASURE_ADVICE):
            probability, correct = float(row["probability"]), bool(int(row["correct"]))
            yield PredictionRecord(row["image"], row["label"], row["predicted"], probability, correct)


def _read_train_counts(path: Path) -> dict[str, int]:
    with _report_damage(str(path), _REMEASURE_ADVICE):
        return {row["class"]: int(row["train_images"]) for row in _read_rows(path) if "train_images" in row}


def _read_label_rows(path: Path) -> Iterator[ClassRow]:
    for line, row in enumerate(_read_rows(path), 2):
        with _report_damage(f"{path}, line {line}", _REMEASURE_ADVICE):
            train_images = int(row["train_images"]) if "train_images" in row else None
            numbers = int(row["images"]), int(row["correct"]), float(row["f1"]), int(row["predicted"])
            precision = float(row["average_precision"]) if row["average_precision"] else None
            threshold = float(row["threshold"]) if "threshold" in row else None
            yield ClassRow(row["class"], train_images, *numbers, precision, threshold)


def _read_columns(path: Path) -> dict[str, tuple[float, ...]]:
    rows = list(_read_rows(path))
    if rows and not path.read_bytes().endswith(b"\n"):
        rows.pop()  # the run was killed while writing it
    columns: dict[str, tuple[float, ...]] = {}
    advice = "repair it, or remove the file for a report without curves"
    for name in RESULT_COLUMNS if rows else ():
        with _report_damage(f"the column {name} of {path}", advice):
            columns[name] = tuple(math.nan if row[name] == "" else float(row[name]) for row in rows)
    return columns


def _read_rows(path: Path) -> Iterator[dict[str, str]]:
    if path.is_file():
        with (
            path.open(newline="", encoding="utf-8", errors="surrogateescape") as file,
            _report_damage(str(path), "remove it"),
        ):
            for row in csv.DictReader(file):
                cells = {name: unquote_cell(cell) if isinstance(cell, str) else cell for name, cell in row.items()}
                yield upgrade_result_keys(cells)


_REPORT_KEYS = ("decoded", "headers_only", "bad", "classes", "sizes", "formats", "color", "duplicates")


def _read_data_report(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    with _report_damage(str(path), f"write it again with `vitrail data check DATA --out {path}`"):
        report = upgrade_report(json.loads(path.read_text()))
        return {name: report[name] for name in _REPORT_KEYS}


def _list_baselines(
    predictions: tuple[PredictionRecord, ...],
    train_counts: Mapping[str, int],
    events: list[dict[str, Any]],
    *,
    multi_label: bool,
) -> Iterator[Baseline]:
    """The most frequent class, or combination of labels, for every image, and the baselines in the run's events."""
    labels = [prediction.label for prediction in predictions]
    images = Counter(" | ".join(sorted(label.split(" | "))) for label in labels) if multi_label else Counter(labels)
    if images:
        in_training = None if multi_label else max(train_counts, key=train_counts.__getitem__, default=None)
        most_frequent = images.most_common(1)[0][0] if in_training is None else in_training
        where = "here" if in_training is None else "in training"
        kind = "combination of labels" if multi_label else "class"
        quoted = f"“{most_frequent}”" if most_frequent else "no label"
        yield Baseline(f"always {quoted}, the most frequent {kind} {where}", images[most_frequent])
    measured = {event["name"]: event["correct"] for event in events if event["event"] == "baseline"}
    yield from (Baseline(name, correct) for name, correct in measured.items())


def _list_missing(
    folder: Path, config: Mapping[str, Any], events: list[dict[str, Any]], *, multi_label: bool
) -> Iterator[str]:
    if multi_label and _find_last_event(events, "end") and not _find_last_event(events, "multi_label"):
        yield (
            "This run was evaluated by an earlier version, which accepted any one label of an image. Rerun the command"
            " with --resume to measure again."
        )
    if not (_find_last_event(events, "end") or _find_last_event(events, "pretrained")):
        last_step = max((event["step"] for event in events if "step" in event), default=0)
        stopped = _find_last_event(events, "stopped")
        reason = "" if stopped is None else f" ({_clean_text(config, str(stopped['reason']).split(';')[0])})"
        yield (
            f"The run has not ended: its last recorded step is {last_step:,} of {config['steps']:,}{reason}. There is"
            " no result yet; rerun the command with --resume to continue."
        )
    elif _find_last_event(events, "end") and not (folder / "predictions.csv").is_file():
        yield "There is no predictions.csv, so no predictions are shown; rerun the command with --resume to make them."
    if not (folder / "weights" / "best.safetensors").is_file():
        yield "There are no weights, so the model is not shown."
