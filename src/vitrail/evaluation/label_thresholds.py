"""The probability above which a label is predicted: for each class the one of greatest F1 on validation images.

n images   L classes

A class with few images of its own would get the threshold of a lucky image, so it gets the common threshold, that of
greatest F1 over all labels. docs/multi-label.md has the measurements behind `MIN_POSITIVES`.
"""

import numpy as np
from numpy.typing import NDArray

MIN_POSITIVES = 8
"""Validation images with the label, below which a class gets the common threshold."""


def choose_label_thresholds(
    probabilities: NDArray[np.float32], truths: NDArray[np.bool_], *, min_positives: int = MIN_POSITIVES
) -> tuple[float, ...]:
    """The threshold of each class, from the labels' probabilities and which are true, (n, L) each."""
    common = choose_common_threshold(probabilities, truths)
    return tuple(
        find_best_threshold(scores, truth) if truth.sum() >= min_positives else common
        for scores, truth in zip(probabilities.T, truths.T, strict=True)
    )


def choose_common_threshold(probabilities: NDArray[np.float32], truths: NDArray[np.bool_]) -> float:
    """The threshold of greatest F1 over all labels of all images; one half where no image has a label."""
    return find_best_threshold(probabilities.ravel(), truths.ravel()) if truths.any() else 0.5


def find_best_threshold(scores: NDArray[np.float32], truths: NDArray[np.bool_]) -> float:
    """The threshold above which predictions have the greatest F1, (n,) each; the highest of equals.

    It lies halfway between the scores that it divides.
    """
    order = np.argsort(-scores, kind="stable")
    ordered, hits = scores[order].astype(np.float32), truths[order].cumsum()
    last = np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1)  # of each group of equal scores
    best = int(np.argmax(2 * hits[last] / (last + 1 + truths.sum())))
    above, below = ordered[last[best]], ordered[last[best] + 1] if last[best] + 1 < len(ordered) else np.float32(0)
    middle = (above + below) / 2
    return float(middle if middle < above else below)
