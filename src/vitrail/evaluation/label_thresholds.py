"""The probability above which a label is predicted: for each class one of great F1 on validation images.

n images   L classes   C candidates

With few images of a class, the threshold of greatest F1 is that of a lucky image. So the counts of all labels together,
scaled to `COMMON_IMAGES` images with a label, are added to the class's own. A class with few images then gets nearly
the common threshold, one with hundreds its own. docs/multi-label.md has the measurements behind the number.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COMMON_IMAGES = 40.0
"""As many images with a label all labels together count for, when a class's threshold is chosen."""


class ThresholdCounts(NamedTuple):
    """Scores in rising order, from which predicted labels are counted at any threshold."""

    scores: NDArray[np.float32]
    true_scores: NDArray[np.float32]  # those of labels that are true

    @classmethod
    def sort(cls, scores: NDArray[np.float32], truths: NDArray[np.bool_]) -> "ThresholdCounts":
        """Sort scores, of any shape, of labels that are true or not."""
        return cls(np.sort(scores, axis=None), np.sort(scores[truths]))

    def list_candidates(self) -> NDArray[np.float32]:
        """Thresholds halfway between scores that differ, and one below all of them; the highest first."""
        distinct = np.unique(self.scores)
        below, above = np.append(np.float32(0), distinct[:-1]), distinct
        middle = (below + above) / 2
        return np.where(middle < above, middle, below)[::-1]

    def count_above(self, thresholds: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Labels above each threshold, (C,), and those of them that are true."""
        predicted, hits = (
            len(scores) - np.searchsorted(scores, thresholds, side="right")
            for scores in (self.scores, self.true_scores)
        )
        return predicted, hits


def choose_label_thresholds(
    probabilities: NDArray[np.float32], truths: NDArray[np.bool_], *, common_images: float = COMMON_IMAGES
) -> tuple[float, ...]:
    """The threshold of each class, from the labels' probabilities and which are true, (n, L) each."""
    if not truths.any():
        return (0.5,) * truths.shape[1]
    common, best_common = ThresholdCounts.sort(probabilities, truths), choose_common_threshold(probabilities, truths)
    weight, thresholds = common_images / len(common.true_scores), []
    for scores, truth in zip(probabilities.T, truths.T, strict=True):
        own = ThresholdCounts.sort(scores, truth)
        candidates = np.append(own.list_candidates(), np.float32(best_common))
        (predicted, hits), (all_predicted, all_hits) = own.count_above(candidates), common.count_above(candidates)
        positives = max(truth.sum() + common_images, 1)
        f1 = 2 * (hits + weight * all_hits) / (predicted + weight * all_predicted + positives)
        thresholds.append(float(candidates[np.argmax(f1)]))
    return tuple(thresholds)


def choose_common_threshold(probabilities: NDArray[np.float32], truths: NDArray[np.bool_]) -> float:
    """The threshold of greatest F1 over all labels of all images, the highest of equals; one half without a label."""
    if not truths.any():
        return 0.5
    counts = ThresholdCounts.sort(probabilities, truths)
    candidates = counts.list_candidates()
    predicted, hits = counts.count_above(candidates)
    return float(candidates[np.argmax(2 * hits / (predicted + truths.sum()))])
