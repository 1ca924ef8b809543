"""What a run's predictions show first: the weakest classes, the commonest confusion, and what to do next."""

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from vitrail.plurals import plural
from vitrail.report.gather import Facts

WEAKEST = 3
"""Classes named on the first screen."""
_STEPS = 3  # of advice, beside how the model is used
_FEW_EPOCHS = 2  # a run with a time limit below it needed more
_SHORT = 0.5  # of the median: a class with fewer training images is short of them


class ClassRow(NamedTuple):
    """One class."""

    name: str
    trained: int | None
    """Training images, where they are counted."""
    images: int
    right: int
    score: float
    """The share of its images that is right; of a multi-label run F1."""
    predicted: int
    """Images that were given the label."""
    average_precision: float | None = None


class Confusion(NamedTuple):
    """One class taken for another."""

    label: str
    predicted: str
    times: int
    images: int
    """Of the true class."""


class Step(NamedTuple):
    """Something to do next, and the command for it, where there is one."""

    text: str
    command: str = ""


def list_classes(facts: Facts) -> list[ClassRow]:
    """Every class that has images, the weakest first."""
    if facts.labels is not None:
        rows = [ClassRow(*row) for row in facts.label_rows if row[2]]
    else:
        images = Counter(answer.label for answer in facts.answers)
        predicted = Counter(answer.said for answer in facts.answers)
        right = Counter(answer.label for answer in facts.answers if answer.right)
        trained = facts.trained_images
        rows = [
            ClassRow(name, trained.get(name), number, right[name], right[name] / number, predicted[name])
            for name, number in images.items()
        ]
    return sorted(rows, key=lambda row: (row.score, -row.images, row.name))


def list_confusions(facts: Facts) -> list[Confusion]:
    """What is taken for what, the commonest first; nothing where images may have several labels."""
    if not facts.one_label:
        return []
    images = Counter(answer.label for answer in facts.answers)
    taken = Counter((answer.label, answer.said) for answer in facts.answers if not answer.right)
    return [Confusion(label, said, times, images[label]) for (label, said), times in taken.most_common()]


def find_weakest(classes: list[ClassRow]) -> list[ClassRow]:
    """The few classes of which most is wrong."""
    return [row for row in classes[:WEAKEST] if row.score < 1]


def suggest_steps(facts: Facts, classes: list[ClassRow], confusions: list[Confusion]) -> list[Step]:
    """What to do next, the most useful first, and how the model is used."""
    use = Step(
        "Use it, or try it in a browser (RUN is the folder of this page):",
        "vitrail predict RUN IMAGES; vitrail serve RUN",
    )
    return [*list(_improve(facts, classes, confusions))[:_STEPS], use]


def _improve(facts: Facts, classes: list[ClassRow], confusions: list[Confusion]) -> Iterator[Step]:
    result = facts.result
    if result is None:
        return
    if facts.measured_on_training:
        yield Step("Measure it on images that it has not seen:", "vitrail evaluate RUN/weights/best.safetensors DATA")
    best = max(facts.baselines, key=lambda each: each.right, default=None)
    if best is not None and result.interval[0] <= best.right / result.images:
        yield Step(f"Do not use it yet: it is not clearly better than {best.name}.")
    timed = any(word.partition("=")[0] == "--minutes" for word in facts.command or ())
    trained = next(iter(facts.epochs.get("epoch", ())[-1:]), None)
    if timed and trained is not None and trained < _FEW_EPOCHS:
        yield Step(f"Give it more --minutes: there was time for {plural(float(f'{trained:.2g}'), 'epoch')}.")
    elif _was_improving(facts):
        epochs = facts.config["recipe"]["epochs"]
        longer = "more --minutes" if timed else f"--epochs {max(2, round(2 * epochs))} instead of {epochs:.3g}"
        yield Step(f"Train longer: the validation loss was still falling at the end. Try {longer}.")
    if (facts.data_report or {}).get("duplicates", {}).get("across_splits", 0):
        yield Step("Remove the duplicates that stand in two splits; this names them:", "vitrail data check DATA")
    weakest = find_weakest(classes)
    if short := next((row for row in weakest if _is_short(row, classes)), None):
        yield Step(f"Add training images of {short.name}: it has {short.trained:,}, fewer than most classes.")
    if confusions:
        pair = confusions[0]
        yield Step(
            f"Look at images of {pair.label} and {pair.predicted}: are the labels right, and could you tell them apart?"
        )
    elif weakest:
        yield Step(f"Look at images of {weakest[0].name}: are all its labels there, and right?")


def _was_improving(facts: Facts) -> bool:
    """Whether the last evaluation has the least loss of several."""
    losses = [loss for loss in facts.epochs.get("val/loss", ()) if loss == loss]
    return len(losses) > 1 and losses[-1] == min(losses) < losses[-2] and not facts.config["everything"]


def _is_short(row: ClassRow, classes: list[ClassRow]) -> bool:
    counts = [each.trained for each in classes if each.trained is not None]
    return row.trained is not None and row.trained < _SHORT * statistics.median(counts)
