"""The classifiers of `probe` for multi-label images, measured by mean average precision and F1.

    n images   D features   L classes   k neighbors

few-shot    ridge regressions to 1 and -1 for each label, from images drawn for each class
kNN         each label's share of the votes of the k nearest neighbors
linear      the same ridge regressions from all images
logistic    a logistic regression for each label from all images

Penalties are chosen by mean average precision and thresholds by F1, both on `tuning_val`.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.evaluation import label_metrics, probe
from vitrail.evaluation.label_thresholds import choose_label_thresholds
from vitrail.evaluation.linear_classifiers import (
    DRAFT_GRADIENT_TOLERANCE,
    Features,
    LinearHead,
    compute_knn_votes,
    solve_logistic,
    solve_ridge,
)
from vitrail.evaluation.probe import ProbeSplits, Solver
from vitrail.evaluation.statistics import Interval, bootstrap_interval
from vitrail.weights.trained import is_label_predicted, logits_to_probabilities


class LabelMetrics(NamedTuple):
    """The scores of one classifier's predictions."""

    mean_average_precision: float
    micro_f1: float
    macro_f1: float
    exact_match: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelProbeScore:
    """The scores of one kind of classifier."""

    method: str
    train_images: int
    draws: tuple[LabelMetrics, ...]
    """For each draw of training images."""
    setting: tuple[str, float]
    """The name of its one setting, and its value."""
    shots: int | None = None
    interval: Interval | None = None
    """The 95 % interval of the mean average precision over the choice of test images, for a single draw."""

    def to_dict(self) -> dict[str, Any]:
        """The scores as JSON has them, averaged over the draws; `std` and `interval` are of mAP."""
        averages = {name: statistics.mean(column) for name, column in self._name_columns().items()}
        precisions = [draw.mean_average_precision for draw in self.draws]
        return averages | {
            "std": statistics.stdev(precisions) if len(precisions) > 1 else None,
            "interval": self.interval,
            "seeds": len(self.draws),
            "draws": [draw._asdict() for draw in self.draws],
        }

    def _name_columns(self) -> dict[str, tuple[float, ...]]:
        return dict(zip(LabelMetrics._fields, zip(*self.draws, strict=True), strict=True))


class FittedLabelProbe(NamedTuple):
    """A linear classifier of labels, and its scores."""

    score: LabelProbeScore
    head: LinearHead
    tuning_score: float
    """The mean average precision on `tuning_val`, before training on it."""
    temperature: float
    """Of its logits, fitted to `tuning_val` in the same way."""
    label_thresholds: tuple[float, ...]
    """The probability above which each label is predicted, chosen there too."""


def score_few_shot(
    splits: ProbeSplits,
    class_names: Sequence[str],
    shots: int,
    *,
    seeds: int = probe.DEFAULT_SEEDS,
    penalty: float | None = probe.DEFAULT_LAMBDA,
) -> LabelProbeScore:
    """The score of ridge regressions from `shots` images a class; a penalty of None is chosen on `tuning_val`."""
    num_classes, tuning_targets = len(class_names), splits.tuning_train.targets
    tuning_shots = min(shots, max(1, int(probe.count_per_class(tuning_targets, num_classes).min())))
    train_draws, tuning_draws = (
        [images.select(probe.sample_shots(images.targets, class_names, count, seed)) for seed in range(seeds)]
        for images, count in ((splits.train, shots), (splits.tuning_train, tuning_shots))
    )
    penalties = probe.LAMBDA_GRID if penalty is None else (penalty,)
    drafts = [solve_ridge(images, num_classes, penalties) for images in tuning_draws]
    scores = [sum(_score_tuning(head, splits.tuning_val) for head in heads) for heads in zip(*drafts, strict=True)]
    chosen = probe.choose_penalty(penalties, scores, splits.tuning_val)
    draws = []
    for train, heads in zip(train_draws, drafts, strict=True):
        _, thresholds = _fit_outputs(heads[penalties.index(chosen)], splits.tuning_val, temperature=1.0)
        (head,) = solve_ridge(train, num_classes, [chosen])
        draws.append(_measure(_compute_probabilities(head, splits.test, 1.0), splits.test, thresholds))
    images = round(statistics.mean(len(train.targets) for train in train_draws))
    return LabelProbeScore(
        method="few-shot", shots=shots, train_images=images, draws=tuple(draws), setting=("lambda", chosen)
    )


def score_knn(splits: ProbeSplits, num_classes: int, k: int = probe.DEFAULT_K) -> LabelProbeScore:
    """The score of the k nearest neighbors, or of all training images where there are fewer."""

    def vote(train: Features, images: Features) -> Tensor:
        votes = compute_knn_votes(train, images.values, num_classes, min(k, len(train.targets)))
        return torch.cat([*votes, images.values.new_zeros(0, num_classes)]).clamp(max=1).float().cpu()

    thresholds = _choose_thresholds(vote(splits.tuning_train, splits.tuning_val), splits.tuning_val)
    setting = ("k", min(k, len(splits.train.targets)))
    return _make_score("kNN", setting, splits, vote(splits.train, splits.test), thresholds)


def fit_linear(splits: ProbeSplits, num_classes: int, penalty: float | None = probe.DEFAULT_LAMBDA) -> FittedLabelProbe:
    """Ridge regressions from all images; a penalty of None is chosen on `tuning_val`."""
    penalties = probe.LAMBDA_GRID if penalty is None else (penalty,)
    return _fit_best_penalty(splits, num_classes, ("linear", "lambda"), penalties, solve_ridge, solve_ridge)


def fit_logistic(splits: ProbeSplits, num_classes: int) -> FittedLabelProbe:
    """Logistic regressions from all images, with the penalty chosen on `tuning_val`."""
    draft = partial(solve_logistic, gradient_tolerance=DRAFT_GRADIENT_TOLERANCE)
    return _fit_best_penalty(splits, num_classes, ("logistic", "L2"), probe.L2_GRID, draft, solve_logistic)


def _fit_best_penalty(
    splits: ProbeSplits,
    num_classes: int,
    names: tuple[str, str],
    penalties: Sequence[float],
    solve_draft: Solver,
    solve: Solver,
) -> FittedLabelProbe:
    """Choose the best penalty by less exact drafts, then solve for its head; `names` are of method and penalty."""
    drafts = solve_draft(splits.tuning_train, num_classes, penalties)
    scores = [_score_tuning(head, splits.tuning_val) for head in drafts]
    penalty = probe.choose_penalty(penalties, scores, splits.tuning_val)
    temperature, thresholds = _fit_outputs(drafts[penalties.index(penalty)], splits.tuning_val)
    (head,) = solve(splits.train, num_classes, [penalty])
    probabilities = _compute_probabilities(head, splits.test, temperature)
    score = _make_score(names[0], (names[1], penalty), splits, probabilities, thresholds)
    return FittedLabelProbe(score, head, max(scores), temperature, thresholds)


def _score_tuning(head: LinearHead, tuning_val: Features) -> float:
    scores = head.compute_logits(tuning_val.values).double().cpu().numpy()
    return label_metrics.mean_average_precision(scores, tuning_val.targets.cpu().numpy())


def _fit_outputs(
    head: LinearHead, tuning_val: Features, *, temperature: float | None = None
) -> tuple[float, tuple[float, ...]]:
    """The temperature of the head's logits, fitted unless it is given, and the thresholds of its probabilities."""
    if temperature is None:
        temperature = probe.fit_head_temperature(
            head, Features(tuning_val.values, tuning_val.targets.to(tuning_val.values.dtype))
        )
    probabilities = _compute_probabilities(head, tuning_val, temperature)
    return temperature, _choose_thresholds(probabilities, tuning_val)


def _choose_thresholds(probabilities: Tensor, images: Features) -> tuple[float, ...]:
    return choose_label_thresholds(probabilities.numpy(), images.targets.cpu().numpy())


def _compute_probabilities(head: LinearHead, images: Features, temperature: float) -> Tensor:
    """float32 (n, L) on the CPU."""
    return logits_to_probabilities(head.compute_logits(images.values).cpu(), temperature, multi_label=True)


def _measure(probabilities: Tensor, images: Features, thresholds: Sequence[float]) -> LabelMetrics:
    predicted, truths = is_label_predicted(probabilities, thresholds).numpy(), images.targets.cpu().numpy()
    return LabelMetrics(
        label_metrics.mean_average_precision(probabilities.double().numpy(), truths),
        label_metrics.micro_f1(predicted, truths),
        label_metrics.macro_f1(predicted, truths),
        float((predicted == truths).all(axis=1).mean()),
    )


def _make_score(
    method: str,
    setting: tuple[str, float],
    splits: ProbeSplits,
    probabilities: Tensor,
    thresholds: Sequence[float],
) -> LabelProbeScore:
    """The score of a classifier of all training images."""
    scores, truths = probabilities.double().numpy(), splits.test.targets.cpu().numpy()

    def measure(rows: NDArray[np.int64]) -> float:
        return label_metrics.mean_average_precision(scores[rows], truths[rows])

    low, high = bootstrap_interval(measure, len(truths))
    return LabelProbeScore(
        method=method,
        train_images=len(splits.train.targets),
        draws=(_measure(probabilities, splits.test, thresholds),),
        setting=setting,
        interval=(max(0.0, low), min(1.0, high)),
    )
