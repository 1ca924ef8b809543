"""Evaluate frozen features with classifiers so simple that only the features decide how accurate they are.

    n images   D features   L classes   k neighbors

few-shot    the paper's: ridge regression from a few images of each class
kNN         the k nearest neighbors vote
linear      the same ridge regression from all images
logistic    logistic regression from all images
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.config import BiTConfig, PreprocessConfig
from vitrail.data.dataset import Split
from vitrail.data.randomness import sample_indices
from vitrail.errors import DataError, UsageError
from vitrail.evaluation import calibration, features
from vitrail.evaluation.linear_classifiers import (
    DRAFT_GRADIENT_TOLERANCE,
    GRADIENT_TOLERANCE,
    Features,
    LinearHead,
    compute_knn_votes,
    solve_logistic,
    solve_ridge,
)
from vitrail.evaluation.statistics import Interval, wilson_interval
from vitrail.model.vit import Model
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.weights.trained import Trained, assemble_model

DEFAULT_SHOTS = (1, 5, 10, 25)
DEFAULT_SEEDS = 3
DEFAULT_LAMBDA = 2.0**10
LAMBDA_GRID = tuple(2.0**power for power in range(-10, 21, 2))
DEFAULT_K = 20
L2_GRID = tuple(10.0 ** (-half / 2) for half in range(11))
"""Penalties on half the squared weights, relative to the mean loss; the greatest first."""

_BATCH_SIZE = 256  # images of a batch, in training
_HOLDOUT_SHARE = 0.2  # of train, to choose settings by where val is the test split
_MAX_TEMPERATURE_LOGITS = 2**26  # that a temperature is fitted to, at most


class ProbeSplits(NamedTuple):
    """The images of a probe, by their use."""

    tuning_train: Features
    """Trained on while settings are chosen."""
    tuning_val: Features
    """Settings are chosen by these."""
    train: Features
    """Trained on with the chosen settings."""
    test: Features


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeScore:
    """The accuracy of one kind of classifier."""

    method: str
    train_images: int
    correct: tuple[int, ...]
    """Correct test images, for each draw of training images."""
    test_images: int
    setting: tuple[str, float]
    """The name of its one setting, and its value."""
    shots: int | None = None

    @property
    def top1(self) -> float:
        """The accuracy, averaged over the draws."""
        return statistics.mean(self.correct) / self.test_images

    @property
    def std(self) -> float | None:
        """The standard deviation of the accuracy over the draws; None for a single draw."""
        return statistics.stdev(self.correct) / self.test_images if len(self.correct) > 1 else None

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval over the choice of test images, for a single draw."""
        return wilson_interval(self.correct[0], self.test_images) if len(self.correct) == 1 else None

    def to_dict(self) -> dict[str, Any]:
        """The scores as JSON has them."""
        return {
            "top1": self.top1,
            "std": self.std,
            "interval": self.interval,
            "seeds": len(self.correct),
            "correct": list(self.correct),
        }


class FittedProbe(NamedTuple):
    """A linear classifier, and its accuracy when it was chosen."""

    score: ProbeScore
    head: LinearHead
    tuning_score: float
    """The accuracy on `tuning_val`, before training on it."""
    temperature: float
    """Of its logits, fitted to `tuning_val` in the same way."""


Solver = Callable[[Features, int, Sequence[float]], list[LinearHead]]
"""(training images, number of classes, penalties) -> a head for each penalty."""


# --- splits and draws ------------------------------------------------------------------------------------------------


def split_features(splits: Mapping[str, Features], *, train_on_val: bool = False) -> ProbeSplits:
    """Assign train and the dataset's other splits to their uses: test is evaluated, and val chooses settings.

    Without test (or val), the other one is evaluated, and a fifth of each class of train chooses settings. With
    `train_on_val`, the chosen settings are trained on val too.
    """
    train = splits["train"]
    if len(splits) == 3:
        val, test = splits["val"], splits["test"]
        return ProbeSplits(train, val, train.concatenate(val) if train_on_val else train, test)
    (evaluated,) = (features for name, features in splits.items() if name != "train")
    held_out = choose_holdout(train.targets)
    return ProbeSplits(train.select(~held_out), train.select(held_out), train, evaluated)


def choose_holdout(targets: Tensor) -> Tensor:
    """bool (n,): a fifth of each class, at least one image of a class with two; or a fifth of multi-label images."""
    held_out = torch.zeros(len(targets), dtype=torch.bool)
    if targets.ndim == 2:
        count = min(max(1, round(_HOLDOUT_SHARE * len(targets))), len(targets) - 1)
        held_out[sample_indices(count, len(targets), "held out images")] = True
        for column in targets.cpu().T:
            if column.any() and not (column & ~held_out).any():
                held_out[column.nonzero()[0]] = False  # each class keeps an image to learn from
        return held_out
    for label, rows in _group_by_class(targets):
        count = min(max(1, round(_HOLDOUT_SHARE * len(rows))), len(rows) - 1)
        held_out[rows[sample_indices(count, len(rows), f"held out {label}")]] = True
    return held_out


def sample_shots(targets: Tensor, class_names: Sequence[str], shots: int, seed: int) -> Tensor:
    """(L * shots,): the indices of drawn images, `shots` of each class; more shots include those of fewer.

    An image with several labels may be drawn for each of them, and is listed once.
    """
    check_shots(targets, class_names, shots)
    draws = [
        rows[sample_indices(shots, len(rows), f"few-shot {label}", seed)] for label, rows in _group_by_class(targets)
    ]
    rows = np.concatenate(draws)
    return torch.from_numpy(np.unique(rows) if targets.ndim == 2 else rows)


def check_shots(targets: Tensor, class_names: Sequence[str], shots: int) -> None:
    """Raise an error if a class has fewer images than shots."""
    if shots < 1:
        raise UsageError(f"--shots is {shots}; it must be at least 1")
    counts = count_per_class(targets, len(class_names))
    smallest = int(counts.argmin())
    if counts[smallest] < shots:
        raise DataError(
            f"{shots}-shot takes {shots} training images of each class, and {class_names[smallest]} has"
            f" {int(counts[smallest])}: give fewer shots, or add images"
        )


def count_per_class(targets: Tensor, num_classes: int) -> Tensor:
    """int64 (L,): the images of each class."""
    return targets.sum(dim=0).cpu() if targets.ndim == 2 else torch.bincount(targets.cpu(), minlength=num_classes)


def _group_by_class(targets: Tensor) -> Iterator[tuple[int, np.ndarray[tuple[int], np.dtype[np.int64]]]]:
    """Each class that has images, and their rows."""
    if targets.ndim == 2:
        columns = enumerate(targets.cpu().numpy().T)
        yield from ((label, np.flatnonzero(column)) for label, column in columns if column.any())
        return
    labels = targets.cpu().numpy()
    order = np.argsort(labels, kind="stable")
    classes, starts = np.unique(labels[order], return_index=True)
    yield from zip(classes.tolist(), np.split(order, starts[1:]), strict=True)


# --- scores ----------------------------------------------------------------------------------------------------------


def score_few_shot(
    splits: ProbeSplits,
    class_names: Sequence[str],
    shots: int,
    *,
    seeds: int = DEFAULT_SEEDS,
    penalty: float | None = DEFAULT_LAMBDA,
) -> ProbeScore:
    """The score of ridge regressions from `shots` images a class; a penalty of None is chosen on `tuning_val`."""

    def draw(images: Features, count: int) -> list[Features]:
        return [images.select(sample_shots(images.targets, class_names, count, seed)) for seed in range(seeds)]

    train_draws = draw(splits.train, shots)
    if penalty is None:
        images_per_class = splits.tuning_train.targets.bincount(minlength=len(class_names))
        tuning_draws = draw(splits.tuning_train, min(shots, int(images_per_class.min())))  # some are held out
        correct_by_draw = [
            [head.count_correct(splits.tuning_val) for head in solve_ridge(images, len(class_names), LAMBDA_GRID)]
            for images in tuning_draws
        ]
        correct = [sum(counts) for counts in zip(*correct_by_draw, strict=True)]
        penalty = choose_penalty(LAMBDA_GRID, correct, splits.tuning_val)
    return _score_ridge_draws(train_draws, splits.test, len(class_names), shots, penalty)


def _score_ridge_draws(
    train_draws: Sequence[Features], test: Features, num_classes: int, shots: int, penalty: float
) -> ProbeScore:
    heads = [solve_ridge(train, num_classes, [penalty])[0] for train in train_draws]
    return ProbeScore(
        method="few-shot",
        shots=shots,
        train_images=shots * num_classes,
        correct=tuple(head.count_correct(test) for head in heads),
        test_images=len(test.targets),
        setting=("lambda", penalty),
    )


def score_knn(splits: ProbeSplits, num_classes: int, k: int = DEFAULT_K) -> ProbeScore:
    """The score of the k nearest neighbors, or of all training images where there are fewer."""
    k = min(k, len(splits.train.targets))
    votes = compute_knn_votes(splits.train, splits.test.values, num_classes, k)
    predicted = torch.cat([chunk.argmax(dim=1) for chunk in votes])
    correct = int((predicted == splits.test.targets).sum())
    return _make_score("kNN", ("k", k), splits, correct)


def fit_linear(splits: ProbeSplits, num_classes: int, penalty: float | None = DEFAULT_LAMBDA) -> FittedProbe:
    """A ridge regression from all images; a penalty of None is chosen on `tuning_val`."""
    penalties = LAMBDA_GRID if penalty is None else [penalty]
    return _fit_best_penalty(splits, num_classes, "linear", "lambda", penalties, solve_ridge, solve_ridge)


def fit_logistic(
    splits: ProbeSplits,
    num_classes: int,
    *,
    draft_tolerance: float = DRAFT_GRADIENT_TOLERANCE,
    tolerance: float = GRADIENT_TOLERANCE,
) -> FittedProbe:
    """A logistic regression from all images, with the penalty chosen on `tuning_val`.

    The searches end when no gradient is above the tolerance.
    """
    draft = partial(solve_logistic, gradient_tolerance=draft_tolerance)
    solve = partial(solve_logistic, gradient_tolerance=tolerance)
    return _fit_best_penalty(splits, num_classes, "logistic", "L2", L2_GRID, draft, solve)


def _fit_best_penalty(
    splits: ProbeSplits,
    num_classes: int,
    method: str,
    penalty_name: str,
    penalties: Sequence[float],
    solve_draft: Solver,
    solve: Solver,
) -> FittedProbe:
    """Choose the best penalty by less exact drafts, then solve for its head."""
    drafts = solve_draft(splits.tuning_train, num_classes, penalties)
    correct = [head.count_correct(splits.tuning_val) for head in drafts]
    penalty = choose_penalty(penalties, correct, splits.tuning_val)
    (head,) = solve(splits.train, num_classes, [penalty])
    score = _make_score(method, (penalty_name, penalty), splits, head.count_correct(splits.test))
    temperature = fit_head_temperature(drafts[penalties.index(penalty)], splits.tuning_val)
    return FittedProbe(score, head, max(correct) / max(1, len(splits.tuning_val.targets)), temperature)


def _make_score(method: str, setting: tuple[str, float], splits: ProbeSplits, correct: int) -> ProbeScore:
    """The score of a classifier of all training images."""
    train_images, test_images = len(splits.train.targets), len(splits.test.targets)
    return ProbeScore(
        method=method, train_images=train_images, correct=(correct,), test_images=test_images, setting=setting
    )


def fit_head_temperature(head: LinearHead, tuning_val: Features) -> float:
    """The temperature of the head's logits, fitted to evenly spaced images where there are very many."""
    step = max(1, len(tuning_val.targets) * len(head.bias) // _MAX_TEMPERATURE_LOGITS)
    logits, targets = head.compute_logits(tuning_val.values[::step]).cpu(), tuning_val.targets[::step].cpu()
    # a regression's outputs are not logits yet, so the prior does not apply
    return calibration.fit_temperature(logits, targets, prior_std=math.inf)


def choose_penalty(penalties: Sequence[float], scores: Sequence[float], tuning_val: Features) -> float:
    """The penalty with the greatest score, such as the most correct images; the greatest of equals."""
    if len(penalties) > 1 and not len(tuning_val.targets):
        raise DataError(
            "there is no image to choose a setting by: no val, and no class with two training images. Add images, or"
            " name the setting (--lambda) and the methods, few-shot or knn (--methods)"
        )
    return max(zip(scores, penalties, strict=True))[1]


# --- in training, and as a model's head ------------------------------------------------------------------------------


def measure_few_shot(
    model: Model,
    train: Split,
    test: Split,
    preprocess: PreprocessConfig,
    class_names: Sequence[str],
    *,
    shots: int = 10,
    seeds: int = DEFAULT_SEEDS,
    workers: int = 0,
    group: ProcessGroup = SINGLE_PROCESS,
) -> ProbeScore:
    """The paper's few-shot accuracy of a model, for use during training; the model is left in eval mode.

    Only the images drawn from `train` are read, the same at every call. Each rank computes a share of the images, and
    all ranks get the score.
    """
    targets = features.read_labels(train)
    rows = torch.cat([sample_shots(targets, class_names, shots, seed) for seed in range(seeds)])
    unique_rows, positions = rows.unique(return_inverse=True)

    def extract_split(split: Split) -> Features:
        values = features.extract_split_features(model, split, preprocess, group, batch=_BATCH_SIZE, workers=workers)
        return Features(values, features.read_labels(split))

    drawn = extract_split(Split(train.store, np.asarray(train.rows)[unique_rows.numpy()]))
    train_draws = [drawn.select(draw) for draw in positions.split(len(class_names) * shots)]
    return _score_ridge_draws(train_draws, extract_split(test), len(class_names), shots, DEFAULT_LAMBDA)


def replace_head(
    trained: Trained,
    head: LinearHead,
    labels: tuple[str, ...],
    temperature: float,
    change: str,
    *,
    label_thresholds: tuple[float, ...] = (),
) -> Trained:
    """The model with this head instead of its own; a hidden layer before it stays, since the head reads its output.

    With thresholds of labels it is a multi-label model.
    """
    config = dataclasses.replace(trained.model.config, classes=len(labels))
    if isinstance(config, BiTConfig):
        head_tensors = {"head.fc.weight": head.weight[:, :, None, None], "head.fc.bias": head.bias}
    else:
        config = dataclasses.replace(config, distillation_head=False)
        head_tensors = {"head.weight": head.weight, "head.bias": head.bias}
    tensors = {
        name: tensor.detach().cpu()
        for name, tensor in {**trained.model.state_dict(), **head_tensors}.items()
        if name in head_tensors or not name.startswith(features.HEAD_PREFIXES)
    }
    model = assemble_model(config, tensors)
    origin = dataclasses.replace(trained.origin, changes=(*trained.origin.changes, change))
    multi_label = bool(label_thresholds)
    return Trained(
        model,
        trained.preprocess,
        labels,
        origin,
        temperature,
        multi_label=multi_label,
        label_thresholds=label_thresholds,
    )
