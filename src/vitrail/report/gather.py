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
from vitrail.errors import DataError, UsageError
from vitrail.evaluate import intervals
from vitrail.evaluate.classify import CONFUSED
from vitrail.evaluate.intervals import Interval
from vitrail.spreadsheet import unquote_cell
from vitrail.train.log import COLUMNS
from vitrail.train.state import is_configuration


class Answer(NamedTuple):
    """What the model said of an image: a row of predictions.csv."""

    image: str
    label: str
    said: str
    probability: float
    right: bool
    """Of several labels: whether all are there, and no other."""


class Baseline(NamedTuple):
    """What something much simpler gets right, on the same images."""

    name: str
    right: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
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
        return intervals.wilson(self.right, self.images)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labels:
    """What multi-label predictions are worth, beside exact match, which is the share of right ones."""

    micro_f1: float
    macro_f1: float
    mean_average_precision: float
    calibration_error: float
    bins: list[tuple[int, float, int]]
    """Labels, the sum of their probabilities and how many of them are true, in bins of equal width."""


LabelRow = tuple[str, int | None, int, int, float, int, float | None]
"""Class, training images, images, right ones, F1, predicted ones and average precision."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
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
class Facts:
    """A run."""

    name: str
    """Of its folder."""
    config: Mapping[str, Any]
    """config.json as it is."""
    epochs: Mapping[str, tuple[float, ...]]
    """The columns of results.csv."""
    result: Result | None
    """None while the run has not ended, and where it learned without labels."""
    pretrained: Pretrained | None
    """What it came to without labels."""
    labels: Labels | None
    """What a multi-label run came to, beside `result`."""
    label_rows: tuple[LabelRow, ...]
    """Its classes."""
    reconstruction: Path | None
    """The picture of hidden patches and what was told of them."""
    answers: tuple[Answer, ...]
    baselines: tuple[Baseline, ...]
    """The simplest first."""
    trained_images: Mapping[str, int]
    """Training images of each class, where per_class.csv counts them."""
    data_report: Mapping[str, Any] | None
    command: tuple[str, ...] | None
    """What was typed behind `vitrail`; None where no event says it."""
    decisions: tuple[tuple[int, int], ...]
    """(step, steps): how a run with a time limit was planned again as it went."""
    given_in: str | None
    """The folder it was typed in."""
    ended: float | None
    """Seconds since 1970 at the last event."""
    missing: tuple[str, ...]
    """What is not there and why, a sentence each."""

    @property
    def ended_well(self) -> bool:
        """Whether there is a result of either kind."""
        return self.result is not None or self.pretrained is not None

    @property
    def seconds(self) -> float | None:
        """Of training, its evaluations included."""
        found = self.result or self.pretrained
        return None if found is None else found.seconds

    @property
    def masked(self) -> Mapping[str, Any] | None:
        """What was hidden of images, where the run learned without labels."""
        return self.config["recipe"].get("masked")

    @property
    def data(self) -> str:
        """What the set is called, without the folders it lies in."""
        return called(self.config["data"])

    @property
    def model(self) -> str:
        """What the model is called: a preset, or the weights that were begun with."""
        start = self.config["model"]
        return str(self.config["recipe"]["model"]) if start is None else self.plain(start["name"])

    @property
    def measured_on_training(self) -> bool:
        """Whether the result is of images that were trained on."""
        return bool(self.config["everything"]) and self.result is not None and self.result.split == "val"

    @property
    def chosen_on_measured(self) -> bool:
        """Whether the weights that are kept were chosen by the images that the result is of."""
        return self.result is not None and self.result.split == "val" and not self.config["everything"]

    @property
    def multi_label(self) -> bool:
        """Whether images may have several labels."""
        return _several(self.config, self.trained_images) and not self.masked

    @property
    def one_label(self) -> bool:
        """Whether images have one class each, so that it is known what is taken for what."""
        return bool(self.answers) and not self.multi_label

    @property
    def macro(self) -> float | None:
        """The share that is right of each class, averaged over the classes that have images."""
        if not self.one_label:
            return None
        images = Counter(answer.label for answer in self.answers)
        right = Counter(answer.label for answer in self.answers if answer.right)
        return sum(right[label] / count for label, count in images.items()) / len(images)

    def mistakes(self) -> list[Answer]:
        """The wrong answers, the surest first."""
        return sorted((answer for answer in self.answers if not answer.right), key=lambda answer: -answer.probability)

    def plain(self, sentence: str) -> str:
        """A sentence of the run without the folders of the machine it ran on."""
        return _plain(self.config, sentence)


_ROOT = r"(?:(?:file://[\w.-]*|~)?/|[A-Za-z]:[\\/]|\\\\)"
_FOLDERS = re.compile(
    rf"(?:^|(?<=['\"])){_ROOT}(?:(?:[^\\/:;,'\"]+|[^\s\\/]+)[\\/])+"  # where a path begins for certain: with spaces
    rf"|(?<![\w:/.~-]){_ROOT}(?:[^\s\\/]+[\\/])+"
)


def without_folders(sentence: str) -> str:
    """A sentence in which paths are the names of their files: where those lie on a machine is nobody's business.

    Of a path with spaces a part stays, unless the sentence begins with it or it stands in quotes.
    """
    return _FOLDERS.sub("", sentence)


def _plain(config: Mapping[str, Any], sentence: str) -> str:
    data = str(config["data"])
    return without_folders(sentence.replace(data, called(data)))


def called(name: str) -> str:
    """What a set or file is called: the last part of a path, two of shards; what is elsewhere keeps its whole name."""
    if name.startswith(("hf:", "timm:")) or (remote.is_remote(name) and not name.startswith("file:")):
        return name
    parts = [part for part in re.split(r"[\\/]", name) if part]
    return "/".join(parts[-2 if name.endswith(".tar") else -1 :]) or name


def called_in_set(image: str) -> str:
    """What an image is called: its place in the set, or the last part of a path of its own."""
    return called(image) if re.match(_ROOT, image) else image


def gather(folder: Path) -> Facts:
    """The facts of a run, ended or not."""
    config = configuration(folder)
    events = _events(folder / "events.jsonl")
    end, pretrained, command = (_last(events, kind) for kind in ("end", "pretrained", "command"))
    answers = () if end is None else tuple(_answers(folder / "predictions.csv"))
    trained_images = {} if end is None else _trained_images(folder / "per_class.csv")
    several = _several(config, trained_images)
    labels = _filled(Labels, event, folder) if several and end and (event := _last(events, "multi_label")) else None
    if several and labels is None:
        end, answers = None, ()  # what counts as right was not exact match yet
    picture = folder / "reconstruction.jpg"
    return Facts(
        name=folder.resolve().name,
        config=config,
        epochs=_columns(folder / "results.csv"),
        result=None if end is None else _filled(Result, end, folder),
        pretrained=None if pretrained is None else _filled(Pretrained, pretrained, folder),
        labels=labels,
        label_rows=() if labels is None else tuple(_label_rows(folder / "per_class.csv")),
        reconstruction=picture if picture.is_file() else None,
        answers=answers,
        baselines=tuple(_baselines(answers, trained_images, events, several=several)),
        trained_images=trained_images,
        data_report=_report(folder / "data_report.json"),
        command=None if command is None else tuple(command["arguments"]),
        decisions=tuple((event["step"], event["steps"]) for event in events if event["event"] == "plan"),
        given_in=None if command is None else command["folder"],
        ended=events[-1]["at"] if events else None,
        missing=tuple(_missing(folder, config, events, several=several)),
    )


def configuration(folder: Path) -> dict[str, Any]:
    """The config.json of a run."""
    path = folder / "config.json"
    if not path.is_file() or not is_configuration(path.read_bytes()):
        seeds = sorted(each.parent.name for each in folder.glob("seed-*/config.json"))
        if seeds:
            raise UsageError(f"{folder} holds the runs of several seeds; give one: vitrail report {folder / seeds[0]}")
        raise UsageError(f"{folder} is no run: it has no config.json that train, finetune or demo wrote")
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def _several(config: Mapping[str, Any], trained_images: Mapping[str, int]) -> bool:
    """Whether images may have several labels. Runs of earlier versions do not say: those of one label count by class,
    unless the classes are too many for that.
    """
    guess = not trained_images and len(config["classes"]) <= CONFUSED
    return bool(config.get("several", guess))


@contextlib.contextmanager
def _sound(where: str, advice: str) -> Iterator[None]:
    """Say which file is damaged, and what to do."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, csv.Error) as error:  # a cell that is not there is None
        raise DataError(f"{where} is damaged ({error}): {advice}") from error


_AGAIN = "the run's command with --resume measures it again"


def _events(path: Path) -> list[dict[str, Any]]:
    """What happened, a dictionary each; the last line of a run that was killed may be half of one."""
    if not path.is_file():
        return []
    text = path.read_text(errors="replace")
    events = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        with _sound(f"{path}, line {number}", "repair or remove the line"):
            event = json.loads(line)
            events.append({"at": event["at"], "event": event["event"], **event})
    return events


def _last(events: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((event for event in reversed(events) if event["event"] == kind), None)


T = TypeVar("T", Result, Pretrained, Labels)


def _filled(kind: type[T], event: Mapping[str, Any], folder: Path) -> T:
    """The fields of an event that a dataclass has."""
    with _sound(f"the event {event['event']!r} in {folder / 'events.jsonl'}", _AGAIN):
        return kind(**{field.name: event[field.name] for field in dataclasses.fields(kind)})


def _answers(path: Path) -> Iterator[Answer]:
    for line, row in enumerate(_rows(path), 2):
        with _sound(f"{path}, line {line}", _AGAIN):
            sure, right = float(row["probability"]), bool(int(row["right"]))
            yield Answer(row["image"], row["label"], row["predicted"], sure, right)


def _trained_images(path: Path) -> dict[str, int]:
    with _sound(str(path), _AGAIN):
        return {row["class"]: int(row["train_images"]) for row in _rows(path) if "train_images" in row}


def _label_rows(path: Path) -> Iterator[LabelRow]:
    for line, row in enumerate(_rows(path), 2):
        with _sound(f"{path}, line {line}", _AGAIN):
            trained = int(row["train_images"]) if "train_images" in row else None
            numbers = int(row["images"]), int(row["right"]), float(row["f1"]), int(row["predicted"])
            precision = float(row["average_precision"]) if row["average_precision"] else None
            yield row["class"], trained, *numbers, precision


def _columns(path: Path) -> dict[str, tuple[float, ...]]:
    rows = list(_rows(path))
    if rows and not path.read_bytes().endswith(b"\n"):
        rows.pop()  # the run was killed as it wrote
    columns: dict[str, tuple[float, ...]] = {}
    for name in COLUMNS if rows else ():
        with _sound(f"the column {name} of {path}", "repair it, or remove the file: the report goes without curves"):
            columns[name] = tuple(math.nan if row[name] == "" else float(row[name]) for row in rows)
    return columns


def _rows(path: Path) -> Iterator[dict[str, str]]:
    if path.is_file():
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file, _sound(str(path), "remove it"):
            for row in csv.DictReader(file):
                yield {name: unquote_cell(cell) if isinstance(cell, str) else cell for name, cell in row.items()}


_REPORTED = ("decoded", "headers_only", "bad", "classes", "sizes", "formats", "colour", "duplicates")


def _report(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    with _sound(str(path), f"`vitrail data check DATA --out {path}` writes it anew"):
        found = json.loads(path.read_text())
        return {name: found[name] for name in _REPORTED}


def _baselines(
    answers: tuple[Answer, ...], trained_images: Mapping[str, int], events: list[dict[str, Any]], *, several: bool
) -> Iterator[Baseline]:
    """The commonest class, or set of labels, for every image, and what the run's events tell of others."""
    images = Counter(" | ".join(sorted(answer.label.split(" | "))) if several else answer.label for answer in answers)
    if images:
        learned = None if several else max(trained_images, key=trained_images.__getitem__, default=None)
        commonest = images.most_common(1)[0][0] if learned is None else learned
        where = "here" if learned is None else "in training"
        what = "set of labels" if several else "class"
        always = f"“{commonest}”" if commonest else "no label"
        yield Baseline(f"always {always}: no {what} is commoner {where}", images[commonest])
    told = {event["name"]: event["right"] for event in events if event["event"] == "baseline"}
    yield from (Baseline(name, right) for name, right in told.items())


def _missing(folder: Path, config: Mapping[str, Any], events: list[dict[str, Any]], *, several: bool) -> Iterator[str]:
    if several and _last(events, "end") and not _last(events, "multi_label"):
        yield (
            "This run was measured by an earlier version, for which any one label of an image was enough. The same"
            " command with --resume measures it again."
        )
    if not (_last(events, "end") or _last(events, "pretrained")):
        reached = max((event["step"] for event in events if "step" in event), default=0)
        stopped = _last(events, "stopped")
        why = "" if stopped is None else f" ({_plain(config, str(stopped['reason']).split(';')[0])})"
        yield (
            f"The run has not ended: it was seen after step {reached:,} of {config['steps']:,}{why}. There is no result"
            " yet; the same command with --resume goes on."
        )
    elif _last(events, "end") and not (folder / "predictions.csv").is_file():
        yield "There is no predictions.csv, so no answer is shown; the same command with --resume measures again."
    if not (folder / "weights" / "best.safetensors").is_file():
        yield "There are no weights, so nothing is shown of the model."
