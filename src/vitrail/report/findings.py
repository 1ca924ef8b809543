"""What a run's predictions show first: the weakest classes, the commonest confusion, and what to do next."""

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from vitrail.formatting import pluralize
from vitrail.report.run_facts import RunFacts

MAX_WEAKEST = 3
"""Classes named on the first screen."""
_MAX_SUGGESTIONS = 3  # of advice, beside how the model is used
_MIN_EPOCHS = 2  # a run with a time limit below it needed more
_SHORT_SHARE = 0.5  # of the median: a class with fewer training images is short of them


class ClassRow(NamedTuple):
    """One class."""

    name: str
    train_images: int | None
    """Training images, where they are counted."""
    images: int
    right: int
    score: float
    """The share of its images that is right; of a multi-label run F1."""
    predicted: int
    """Images that were given the label."""
    average_precision: float | None = None


class ConfusedPair(NamedTuple):
    """One class taken for another."""

    label: str
    predicted: str
    times: int
    images: int
    """Of the true class."""


class Suggestion(NamedTuple):
    """Something to do next, and the command for it, where there is one."""

    text: str
    command: str = ""


def list_classes(facts: RunFacts) -> list[ClassRow]:
    """Every class that has images, the weakest first."""
    if facts.multi_label_metrics is not None:
        rows = [ClassRow(*row) for row in facts.label_rows if row[2]]
    else:
        images = Counter(answer.label for answer in facts.predictions)
        predicted = Counter(answer.predicted for answer in facts.predictions)
        right = Counter(answer.label for answer in facts.predictions if answer.right)
        trained = facts.train_counts
        rows = [
            ClassRow(name, trained.get(name), number, right[name], right[name] / number, predicted[name])
            for name, number in images.items()
        ]
    return sorted(rows, key=lambda row: (row.score, -row.images, row.name))


def list_confusions(facts: RunFacts) -> list[ConfusedPair]:
    """What is taken for what, the commonest first; nothing where images may have several labels."""
    if not facts.is_single_label:
        return []
    images = Counter(answer.label for answer in facts.predictions)
    taken = Counter((answer.label, answer.predicted) for answer in facts.predictions if not answer.right)
    return [ConfusedPair(label, said, times, images[label]) for (label, said), times in taken.most_common()]


def find_weakest(classes: list[ClassRow]) -> list[ClassRow]:
    """The few classes of which most is wrong."""
    return [row for row in classes[:MAX_WEAKEST] if row.score < 1]


def make_suggestions(facts: RunFacts, classes: list[ClassRow], confusions: list[ConfusedPair]) -> list[Suggestion]:
    """What to do next, the most useful first, and how the model is used."""
    use = Suggestion(
        "Use it, or try it in a browser (RUN is the folder of this page):",
        "vitrail predict RUN IMAGES; vitrail serve RUN",
    )
    return [*list(_suggest_improvements(facts, classes, confusions))[:_MAX_SUGGESTIONS], use]


def _suggest_improvements(
    facts: RunFacts, classes: list[ClassRow], confusions: list[ConfusedPair]
) -> Iterator[Suggestion]:
    result = facts.result
    if result is None:
        return
    if facts.is_measured_on_train:
        yield Suggestion(
            "Measure it on images that it has not seen:", "vitrail evaluate RUN/weights/best.safetensors DATA"
        )
    best = max(facts.baselines, key=lambda each: each.right, default=None)
    if best is not None and result.interval[0] <= best.right / result.images:
        yield Suggestion(f"Do not use it yet: it is not clearly better than {best.name}.")
    timed = any(word.partition("=")[0] == "--minutes" for word in facts.command or ())
    trained = next(iter(facts.epochs.get("epoch", ())[-1:]), None)
    if timed and trained is not None and trained < _MIN_EPOCHS:
        yield Suggestion(f"Give it more --minutes: there was time for {pluralize(float(f'{trained:.2g}'), 'epoch')}.")
    elif _was_improving(facts):
        epochs = facts.config["recipe"]["epochs"]
        longer = "more --minutes" if timed else f"--epochs {max(2, round(2 * epochs))} instead of {epochs:.3g}"
        yield Suggestion(f"Train longer: the validation loss was still falling at the end. Try {longer}.")
    if (facts.data_report or {}).get("duplicates", {}).get("across_splits", 0):
        yield Suggestion("Remove the duplicates that stand in two splits; this names them:", "vitrail data check DATA")
    weakest = find_weakest(classes)
    if short := next((row for row in weakest if _has_few_images(row, classes)), None):
        yield Suggestion(
            f"Add training images of {short.name}: it has {short.train_images:,}, fewer than most classes."
        )
    if confusions:
        pair = confusions[0]
        yield Suggestion(
            f"Look at images of {pair.label} and {pair.predicted}: are the labels right, and could you tell them apart?"
        )
    elif weakest:
        yield Suggestion(f"Look at images of {weakest[0].name}: are all its labels there, and right?")


def _was_improving(facts: RunFacts) -> bool:
    """Whether the last evaluation has the least loss of several."""
    losses = [loss for loss in facts.epochs.get("val/loss", ()) if loss == loss]
    return len(losses) > 1 and losses[-1] == min(losses) < losses[-2] and not facts.config["train_on_val"]


def _has_few_images(row: ClassRow, classes: list[ClassRow]) -> bool:
    counts = [each.train_images for each in classes if each.train_images is not None]
    return row.train_images is not None and row.train_images < _SHORT_SHARE * statistics.median(counts)
