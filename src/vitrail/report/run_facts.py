"""A run's folder as plain values: what was trained on what, how it went and what it came to.

Nothing is computed here that the folder already has, and nothing of it needs the images or the weights.
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
from vitrail.config import upgrade_run_config
from vitrail.data.audit import upgrade_report
from vitrail.errors import DataError, UsageError
from vitrail.evaluate.predictions import MAX_CONFUSION_CLASSES
from vitrail.evaluate.statistics import Interval, wilson_interval
from vitrail.formatting import unquote_cell
from vitrail.train.checkpoint import is_run_config
from vitrail.train.run_log import RESULT_COLUMNS


class PredictionRecord(NamedTuple):
    """What the model said of an image: a row of predictions.csv."""

    image: str
    label: str
    predicted: str
    probability: float
    right: bool
    """Of several labels: whether all are there, and no other."""


class Baseline(NamedTuple):
    """What something much simpler gets right, on the same images."""

    name: str
    right: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalMetrics:
    """What the kept weights came to."""

    split: str
    images: int
    right: int
    top5: float
    loss: float
    temperature: float
    calibration_error: float
    seconds: float
    """Of training, its evaluations included."""

    @property
    def top1(self) -> float:
        """The share that is right."""
        return self.right / self.images

    @property
    def interval(self) -> Interval:
        """Where that share lies for other images of the same kind, in 95 of 100 cases."""
        return wilson_interval(self.right, self.images)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiLabelMetrics:
    """What multi-label predictions are worth, beside exact match, which is the share of right ones."""

    micro_f1: float
    macro_f1: float
    mean_average_precision: float
    calibration_error: float
    bins: list[tuple[int, float, int]]
    """Labels, the sum of their probabilities and how many of them are true, in bins of equal width."""


LabelMetricsRow = tuple[str, int | None, int, int, float, int, float | None]
"""Class, training images, images, right ones, F1, predicted ones and average precision."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingMetrics:
    """What the kept weights of a run without labels came to."""

    split: str
    images: int
    patches: int
    """Hidden ones, whose looks were to be told."""
    loss: float
    top1: float | None
    """The share of colours that is right, where colours were to be told."""
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run."""

    name: str
    """Of its folder."""
    config: Mapping[str, Any]
    """config.json as it is."""
    epochs: Mapping[str, tuple[float, ...]]
    """The columns of results.csv."""
    result: FinalMetrics | None
    """None while the run has not ended, and where it learned without labels."""
    pretraining: PretrainingMetrics | None
    """What it came to without labels."""
    multi_label_metrics: MultiLabelMetrics | None
    """What a multi-label run came to, beside `result`."""
    label_rows: tuple[LabelMetricsRow, ...]
    """Its classes."""
    reconstruction: Path | None
    """The picture of hidden patches and what was told of them."""
    predictions: tuple[PredictionRecord, ...]
    baselines: tuple[Baseline, ...]
    """The simplest first."""
    train_counts: Mapping[str, int]
    """Training images of each class, where per_class.csv counts them."""
    data_report: Mapping[str, Any] | None
    command: tuple[str, ...] | None
    """What was typed behind `vitrail`; None where no event says it."""
    replanned_steps: tuple[tuple[int, int], ...]
    """(step, steps): how a run with a time limit was planned again as it went."""
    working_folder: str | None
    """The folder it was typed in."""
    end_time: float | None
    """Seconds since 1970 at the last event."""
    missing: tuple[str, ...]
    """What is not there and why, a sentence each."""

    @property
    def has_result(self) -> bool:
        """Whether there is a result of either kind."""
        return self.result is not None or self.pretraining is not None

    @property
    def seconds(self) -> float | None:
        """Of training, its evaluations included."""
        found = self.result or self.pretraining
        return None if found is None else found.seconds

    @property
    def masked(self) -> Mapping[str, Any] | None:
        """What was hidden of images, where the run learned without labels."""
        return self.config["recipe"].get("masked")

    @property
    def data(self) -> str:
        """What the set is called, without the folders it lies in."""
        return get_short_name(self.config["data"])

    @property
    def model(self) -> str:
        """What the model is called: a preset, or the weights that were begun with."""
        start = self.config["model"]
        return str(self.config["recipe"]["model"]) if start is None else self.clean_text(start["name"])

    @property
    def is_measured_on_train(self) -> bool:
        """Whether the result is of images that were trained on."""
        return bool(self.config["train_on_val"]) and self.result is not None and self.result.split == "val"

    @property
    def is_selected_on_test(self) -> bool:
        """Whether the weights that are kept were chosen by the images that the result is of."""
        return self.result is not None and self.result.split == "val" and not self.config["train_on_val"]

    @property
    def is_multi_label(self) -> bool:
        """Whether images may have several labels."""
        return _is_multi_label(self.config, self.train_counts) and not self.masked

    @property
    def is_single_label(self) -> bool:
        """Whether images have one class each, so that it is known what is taken for what."""
        return bool(self.predictions) and not self.is_multi_label

    @property
    def macro_accuracy(self) -> float | None:
        """The share that is right of each class, averaged over the classes that have images."""
        if not self.is_single_label:
            return None
        images = Counter(answer.label for answer in self.predictions)
        right = Counter(answer.label for answer in self.predictions if answer.right)
        return sum(right[label] / count for label, count in images.items()) / len(images)

    def list_mistakes(self) -> list[PredictionRecord]:
        """The wrong answers, the surest first."""
        return sorted(
            (answer for answer in self.predictions if not answer.right), key=lambda answer: -answer.probability
        )

    def clean_text(self, sentence: str) -> str:
        """A sentence of the run without the folders of the machine it ran on."""
        return _clean_text(self.config, sentence)


_PATH_ROOT = r"(?:(?:file://[\w.-]*|~)?/|[A-Za-z]:[\\/]|\\\\)"
_FOLDER_PATH = re.compile(
    rf"(?:^|(?<=['\"])){_PATH_ROOT}(?:(?:[^\\/:;,'\"]+|[^\s\\/]+)[\\/])+"  # where a path begins for certain: with spaces
    rf"|(?<![\w:/.~-]){_PATH_ROOT}(?:[^\s\\/]+[\\/])+"
)


def strip_folders(sentence: str) -> str:
    """A sentence in which paths are the names of their files: where those lie on a machine is nobody's business.

    Of a path with spaces a part stays, unless the sentence begins with it or it stands in quotes.
    """
    return _FOLDER_PATH.sub("", sentence)


def _clean_text(config: Mapping[str, Any], sentence: str) -> str:
    data = str(config["data"])
    return strip_folders(sentence.replace(data, get_short_name(data)))


def get_short_name(name: str) -> str:
    """What a set or file is called: the last part of a path, two of shards; what is elsewhere keeps its whole name."""
    if name.startswith(("hf:", "timm:")) or (remote.is_remote(name) and not name.startswith("file:")):
        return name
    parts = [part for part in re.split(r"[\\/]", name) if part]
    return "/".join(parts[-2 if name.endswith(".tar") else -1 :]) or name


def get_image_name(image: str) -> str:
    """What an image is called: its place in the set, or the last part of a path of its own."""
    return get_short_name(image) if re.match(_PATH_ROOT, image) else image


def gather_facts(folder: Path) -> RunFacts:
    """The facts of a run, ended or not."""
    config = read_config(folder)
    events = _read_events(folder / "events.jsonl")
    end, pretrained, command = (_find_last_event(events, kind) for kind in ("end", "pretrained", "command"))
    answers = () if end is None else tuple(_read_predictions(folder / "predictions.csv"))
    trained_images = {} if end is None else _read_train_counts(folder / "per_class.csv")
    several = _is_multi_label(config, trained_images)
    labels = (
        _parse_event(MultiLabelMetrics, event, folder)
        if several and end and (event := _find_last_event(events, "multi_label"))
        else None
    )
    if several and labels is None:
        end, answers = None, ()  # what counts as right was not exact match yet
    picture = folder / "reconstruction.jpg"
    return RunFacts(
        name=folder.resolve().name,
        config=config,
        epochs=_read_columns(folder / "results.csv"),
        result=None if end is None else _parse_event(FinalMetrics, end, folder),
        pretraining=None if pretrained is None else _parse_event(PretrainingMetrics, pretrained, folder),
        multi_label_metrics=labels,
        label_rows=() if labels is None else tuple(_read_label_rows(folder / "per_class.csv")),
        reconstruction=picture if picture.is_file() else None,
        predictions=answers,
        baselines=tuple(_list_baselines(answers, trained_images, events, multi_label=several)),
        train_counts=trained_images,
        data_report=_read_data_report(folder / "data_report.json"),
        command=None if command is None else tuple(command["arguments"]),
        replanned_steps=tuple((event["step"], event["steps"]) for event in events if event["event"] == "plan"),
        working_folder=None if command is None else command["folder"],
        end_time=events[-1]["at"] if events else None,
        missing=tuple(_list_missing(folder, config, events, multi_label=several)),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a run."""
    path = folder / "config.json"
    if not path.is_file() or not is_run_config(path.read_bytes()):
        seeds = sorted(each.parent.name for each in folder.glob("seed-*/config.json"))
        if seeds:
            raise UsageError(f"{folder} holds the runs of several seeds; give one: vitrail report {folder / seeds[0]}")
        raise UsageError(f"{folder} is no run: it has no config.json that train, finetune or demo wrote")
    return upgrade_run_config(json.loads(path.read_bytes()))


def _is_multi_label(config: Mapping[str, Any], train_counts: Mapping[str, int]) -> bool:
    """Whether images may have several labels. Runs of earlier versions do not say: those of one label count by class,
    unless the classes are too many for that.
    """
    guess = not train_counts and len(config["classes"]) <= MAX_CONFUSION_CLASSES
    return bool(config.get("multi_label", guess))


@contextlib.contextmanager
def _report_damage(where: str, advice: str) -> Iterator[None]:
    """Say which file is damaged, and what to do."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, csv.Error) as error:  # a cell that is not there is None
        raise DataError(f"{where} is damaged ({error}): {advice}") from error


_REMEASURE_ADVICE = "the run's command with --resume measures it again"


def _read_events(path: Path) -> list[dict[str, Any]]:
    """What happened, a dictionary each; the last line of a run that was killed may be half of one."""
    if not path.is_file():
        return []
    text = path.read_text(errors="replace")
    events = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        with _report_damage(f"{path}, line {number}", "repair or remove the line"):
            event = json.loads(line)
            events.append({"at": event["at"], "event": event["event"], **event})
    return events


def _find_last_event(events: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((event for event in reversed(events) if event["event"] == kind), None)


T = TypeVar("T", FinalMetrics, PretrainingMetrics, MultiLabelMetrics)


def _parse_event(kind: type[T], event: Mapping[str, Any], folder: Path) -> T:
    """The fields of an event that a dataclass has."""
    with _report_damage(f"the event {event['event']!r} in {folder / 'events.jsonl'}", _REMEASURE_ADVICE):
        return kind(**{field.name: event[field.name] for field in dataclasses.fields(kind)})


def _read_predictions(path: Path) -> Iterator[PredictionRecord]:
    for line, row in enumerate(_read_rows(path), 2):
        with _report_damage(f"{path}, line {line}", _REMEASURE_ADVICE):
            sure, right = float(row["probability"]), bool(int(row["right"]))
            yield PredictionRecord(row["image"], row["label"], row["predicted"], sure, right)


def _read_train_counts(path: Path) -> dict[str, int]:
    with _report_damage(str(path), _REMEASURE_ADVICE):
        return {row["class"]: int(row["train_images"]) for row in _read_rows(path) if "train_images" in row}


def _read_label_rows(path: Path) -> Iterator[LabelMetricsRow]:
    for line, row in enumerate(_read_rows(path), 2):
        with _report_damage(f"{path}, line {line}", _REMEASURE_ADVICE):
            trained = int(row["train_images"]) if "train_images" in row else None
            numbers = int(row["images"]), int(row["right"]), float(row["f1"]), int(row["predicted"])
            precision = float(row["average_precision"]) if row["average_precision"] else None
            yield row["class"], trained, *numbers, precision


def _read_columns(path: Path) -> dict[str, tuple[float, ...]]:
    rows = list(_read_rows(path))
    if rows and not path.read_bytes().endswith(b"\n"):
        rows.pop()  # the run was killed as it wrote
    columns: dict[str, tuple[float, ...]] = {}
    for name in RESULT_COLUMNS if rows else ():
        with _report_damage(
            f"the column {name} of {path}", "repair it, or remove the file: the report goes without curves"
        ):
            columns[name] = tuple(math.nan if row[name] == "" else float(row[name]) for row in rows)
    return columns


def _read_rows(path: Path) -> Iterator[dict[str, str]]:
    if path.is_file():
        with (
            path.open(newline="", encoding="utf-8", errors="surrogateescape") as file,
            _report_damage(str(path), "remove it"),
        ):
            for row in csv.DictReader(file):
                yield {name: unquote_cell(cell) if isinstance(cell, str) else cell for name, cell in row.items()}


_REPORT_KEYS = ("decoded", "headers_only", "bad", "classes", "sizes", "formats", "color", "duplicates")


def _read_data_report(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    with _report_damage(str(path), f"`vitrail data check DATA --out {path}` writes it anew"):
        report = upgrade_report(json.loads(path.read_text()))
        return {name: report[name] for name in _REPORT_KEYS}


def _list_baselines(
    predictions: tuple[PredictionRecord, ...],
    train_counts: Mapping[str, int],
    events: list[dict[str, Any]],
    *,
    multi_label: bool,
) -> Iterator[Baseline]:
    """The commonest class, or set of labels, for every image, and what the run's events tell of others."""
    images = Counter(
        " | ".join(sorted(answer.label.split(" | "))) if multi_label else answer.label for answer in predictions
    )
    if images:
        learned = None if multi_label else max(train_counts, key=train_counts.__getitem__, default=None)
        commonest = images.most_common(1)[0][0] if learned is None else learned
        where = "here" if learned is None else "in training"
        what = "set of labels" if multi_label else "class"
        always = f"“{commonest}”" if commonest else "no label"
        yield Baseline(f"always {always}: no {what} is commoner {where}", images[commonest])
    told = {event["name"]: event["right"] for event in events if event["event"] == "baseline"}
    yield from (Baseline(name, right) for name, right in told.items())


def _list_missing(
    folder: Path, config: Mapping[str, Any], events: list[dict[str, Any]], *, multi_label: bool
) -> Iterator[str]:
    if multi_label and _find_last_event(events, "end") and not _find_last_event(events, "multi_label"):
        yield (
            "This run was measured by an earlier version, for which any one label of an image was enough. The same"
            " command with --resume measures it again."
        )
    if not (_find_last_event(events, "end") or _find_last_event(events, "pretrained")):
        reached = max((event["step"] for event in events if "step" in event), default=0)
        stopped = _find_last_event(events, "stopped")
        why = "" if stopped is None else f" ({_clean_text(config, str(stopped['reason']).split(';')[0])})"
        yield (
            f"The run has not ended: it was seen after step {reached:,} of {config['steps']:,}{why}. There is no result"
            " yet; the same command with --resume goes on."
        )
    elif _find_last_event(events, "end") and not (folder / "predictions.csv").is_file():
        yield "There is no predictions.csv, so no answer is shown; the same command with --resume measures again."
    if not (folder / "weights" / "best.safetensors").is_file():
        yield "There are no weights, so nothing is shown of the model."
