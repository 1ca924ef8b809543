"""Findings from a run's predictions: the weakest classes, the most confused pairs, and what to do next."""

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from vitrail.formatting import pluralize
from vitrail.report.run_facts import ClassRow, RunFacts

MAX_WEAKEST = 3  # the most classes named on the first screen
_MAX_SUGGESTIONS = 3  # besides how to use the model
_MIN_EPOCHS = 2  # a run with a time limit that trained for less needs more time
_SHORT_SHARE = 0.5  # of the median: a class with fewer training images needs more


class ConfusedPair(NamedTuple):
    """One class predicted as another."""

    label: str
    predicted: str
    times: int
    images: int  # of the true class


class Suggestion(NamedTuple):
    """A next step, and the command for it if there is one."""

    text: str
    command: str = ""


def list_classes(facts: RunFacts) -> list[ClassRow]:
    """List every class that has images, the weakest first."""
    if facts.multi_label_metrics is not None:
        rows = [row for row in facts.label_rows if row.images]
    else:
        predicted = Counter(prediction.predicted for prediction in facts.predictions)
        correct = Counter(prediction.label for prediction in facts.predictions if prediction.correct)
        rows = [
            ClassRow(name, facts.train_counts.get(name), count, correct[name], correct[name] / count, predicted[name])
            for name, count in facts.image_counts.items()
        ]
    return sorted(rows, key=lambda row: (row.score, -row.images, row.name))


def list_confusions(facts: RunFacts) -> list[ConfusedPair]:
    """List the confused pairs, the most frequent first; none for a multi-label run."""
    if not facts.is_single_label:
        return []
    images = facts.image_counts
    pairs = Counter((record.label, record.predicted) for record in facts.predictions if not record.correct)
    return [ConfusedPair(*pair, times, images[pair[0]]) for pair, times in pairs.most_common()]


def list_label_confusions(facts: RunFacts) -> list[ConfusedPair]:
    """List the labels missed where another was added, in the same image, the most frequent first."""
    if not facts.is_multi_label:
        return []
    images: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    for record in facts.predictions:
        labels, predicted = (set(filter(None, text.split(" | "))) for text in (record.label, record.predicted))
        images.update(labels)
        pairs.update((missed, extra) for missed in labels - predicted for extra in predicted - labels)
    ordered = sorted(pairs.items(), key=lambda pair: (-pair[1], pair[0]))
    return [ConfusedPair(*pair, times, images[pair[0]]) for pair, times in ordered]


def find_weakest(classes: list[ClassRow]) -> list[ClassRow]:
    """The few classes with the lowest scores."""
    return [row for row in classes[:MAX_WEAKEST] if row.score < 1]


def make_suggestions(facts: RunFacts, classes: list[ClassRow], confusions: list[ConfusedPair]) -> list[Suggestion]:
    """Suggest next steps, the most useful first, and how to use the model."""
    use = Suggestion(
        "Use the model, or try it in a browser (RUN is the folder of this page):",
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
            "Evaluate it on images that it was not trained on:", "vitrail evaluate RUN/weights/best.safetensors DATA"
        )
    best = max(facts.baselines, key=lambda baseline: baseline.correct, default=None)
    if best is not None and result.interval[0] <= best.correct / result.images:
        yield Suggestion(f"Do not use it yet: it is not clearly better than {best.name}.")
    timed = any(word.partition("=")[0] == "--minutes" for word in facts.command or ())
    trained_epochs = next(iter(facts.epochs.get("epoch", ())[-1:]), None)
    if timed and trained_epochs is not None and trained_epochs < _MIN_EPOCHS:
        epochs_done = pluralize(float(f"{trained_epochs:.2g}"), "epoch")
        yield Suggestion(f"Give it more --minutes: there was time for {epochs_done}.")
    elif result.correct == result.images:
        yield Suggestion(
            f"Add test images: all {result.images:,} are correct, so only more can tell how good it is, or improve it."
        )
    elif _was_improving(facts):
        epochs = facts.config["recipe"]["epochs"]
        longer = "more --minutes" if timed else f"--epochs {max(2, round(2 * epochs))} instead of {epochs:.3g}"
        yield Suggestion(f"Train longer: the validation loss was still falling at the end. Try {longer}.")
    if (facts.data_report or {}).get("duplicates", {}).get("across_splits", 0):
        yield Suggestion("Remove the duplicates across splits; this lists them:", "vitrail data check DATA")
    weakest = find_weakest(classes)
    if short := next((row for row in weakest if _has_few_images(row, classes)), None):
        few = f"{short.train_images:,}, fewer than most classes"
        yield Suggestion(f"Add training images of {short.name}: it has {few}.")
    if confusions:
        pair = confusions[0]
        yield Suggestion(
            f"Look at images of {pair.label} and {pair.predicted}: are the labels right, and can you tell them apart?"
        )
    elif weakest:
        yield Suggestion(f"Look at images of {weakest[0].name}: are all labels present and right?")


def _was_improving(facts: RunFacts) -> bool:
    """Whether the last of several evaluations has the lowest loss."""
    losses = [loss for loss in facts.epochs.get("val/loss", ()) if loss == loss]
    return len(losses) > 1 and losses[-1] == min(losses) < losses[-2] and not facts.config["train_on_val"]


def _has_few_images(row: ClassRow, classes: list[ClassRow]) -> bool:
    counts = [other.train_images for other in classes if other.train_images is not None]
    return row.train_images is not None and row.train_images < _SHORT_SHARE * statistics.median(counts)
