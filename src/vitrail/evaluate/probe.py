"""What features are worth: classifiers so simple that only the features decide how good they are.

    n images   m images to answer for   D features   L classes   k neighbours

few-shot    the paper's: ridge regression to -1 and 1, in closed form, from a few images of each class
kNN         the k images with the greatest cosine similarity vote, each with exp(similarity / temperature)
linear      the same ridge regression from all images
logistic    multinomial logistic regression with an L2 penalty, by L-BFGS

scikit-learn has all of these, but neither on a GPU nor in constant memory beside the features; the tests compare.
Regressions are solved in float64 and give a head for features as they are, in float32: what is measured is that head.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.config import BiTConfig, PreprocessConfig
from vitrail.data import counter_rng
from vitrail.data.dataset import Split
from vitrail.data.loader import iter_eval_batches
from vitrail.data.order import permute_indices
from vitrail.errors import DataError, UsageError
from vitrail.evaluate import calibration, features
from vitrail.evaluate.intervals import Interval, wilson_interval
from vitrail.model.build import Model
from vitrail.weights.trained import Trained, assemble_model

DEFAULT_SHOTS = (1, 5, 10, 25)
DEFAULT_SEEDS = 3
DEFAULT_LAMBDA = 2.0**10
LAMBDA_GRID = tuple(2.0**power for power in range(-10, 21, 2))
DEFAULT_K = 20
KNN_TEMPERATURE = 0.07  # of the neighbours' votes (Wu et al. 2018)
L2_GRID = tuple(10.0 ** (-half / 2) for half in range(11))
"""Of half the squared weights, beside the mean loss; the greatest first."""

_BIAS_FEATURE = 100.0  # the feature that makes the bias: so large that the ridge hardly holds it back
_STD_EPSILON = 1e-5
_HOLDOUT_SHARE = 0.2  # of train, to choose settings by where val is what is measured
_CHUNK_ELEMENTS = 2**24  # that images are turned into at once, in float64
_CHUNK_SIMILARITIES = 2**26  # similarities that exist at once
_MAX_TEMPERATURE_LOGITS = 2**26  # that a temperature is fitted to, at most
_LBFGS_STEPS = 2000  # of L-BFGS, at most
_GRADIENT_TOLERANCE = 1e-7  # the largest slope of the mean loss at which it ends
_DRAFT_GRADIENT_TOLERANCE = 1e-5  # and where penalties are only compared


class Features(NamedTuple):
    """Images as a probe sees them."""

    values: Tensor  # float32 (n, D)
    targets: Tensor  # int64 (n,)

    def select(self, indices: Tensor) -> "Features":
        """Those at the places given."""
        indices = indices.to(self.targets.device)
        return Features(self.values[indices], self.targets[indices])

    def concatenate(self, other: "Features") -> "Features":
        """Both, one after the other."""
        return Features(torch.cat([self.values, other.values]), torch.cat([self.targets, other.targets]))

    def iterate_chunks(self, num_classes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Values and targets of some at a time, so that what is made of them takes little memory."""
        rows = max(1, _CHUNK_ELEMENTS // max(self.values.shape[1], num_classes))
        return zip(self.values.split(rows), self.targets.split(rows), strict=True)


class ProbeSplits(NamedTuple):
    """The images of a probe, by what they are for."""

    tuning_train: Features
    """Learned from while settings are chosen."""
    tuning_val: Features
    """Settings are chosen by these."""
    train: Features
    """Learned from once they are."""
    test: Features


class LinearHead(NamedTuple):
    """A linear layer."""

    weight: Tensor  # float32 (L, D)
    bias: Tensor  # float32 (L,)

    def compute_logits(self, values: Tensor) -> Tensor:
        """(m, D) -> (m, L)."""
        return F.linear(values, self.weight, self.bias)

    def count_correct(self, features: Features) -> int:
        """How many images it is right on."""
        chunks = features.iterate_chunks(len(self.bias))
        return sum(int((self.compute_logits(values).argmax(dim=1) == targets).sum()) for values, targets in chunks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeScore:
    """How good one kind of classifier is."""

    method: str
    train_images: int
    """Images that it learned from."""
    correct: tuple[int, ...]
    """Images that it is right on, for each draw of those it learned from."""
    test_images: int
    """Images that were measured."""
    setting: tuple[str, float]
    """What its one number is called, and what it was."""
    shots: int | None = None

    @property
    def top1(self) -> float:
        """The share that is right, on average over the draws."""
        return statistics.mean(self.correct) / self.test_images

    @property
    def std(self) -> float | None:
        """The standard deviation of the share over the draws, where there are several."""
        return statistics.stdev(self.correct) / self.test_images if len(self.correct) > 1 else None

    @property
    def interval(self) -> Interval | None:
        """95 % for the choice of images that were measured, where there is one draw."""
        return wilson_interval(self.correct[0], self.test_images) if len(self.correct) == 1 else None


class FittedProbe(NamedTuple):
    """A linear classifier, and how good it was when it was chosen."""

    score: ProbeScore
    head: LinearHead
    tuning_correct: int
    """Of the images that settings are chosen by, before it learned from them."""
    temperature: float
    """Of its logits, fitted to these images likewise."""


Solver = Callable[[Features, int, Sequence[float]], list[LinearHead]]
"""Heads for so many classes, one for each penalty."""


# --- which images are for what ---------------------------------------------------------------------------------------


def split_features(splits: Mapping[str, Features], *, train_on_val: bool = False) -> ProbeSplits:
    """What is learned from, chosen by and measured: test is measured and val chosen by.

    Without a test split val is measured, and a fifth of each class of train is chosen by. With `everything`, val is
    learned from too once settings are chosen.
    """
    train, val, test = (splits.get(name) for name in ("train", "val", "test"))
    if train is None or (val is None and test is None):
        raise DataError(f"a probe needs the split train, and test or val; there is {', '.join(splits) or 'none'}")
    if train_on_val and (test is None or val is None):
        raise UsageError("--everything learns from val too: that takes a val, and a test to measure on")
    if val is not None and test is not None:
        return ProbeSplits(train, val, train.concatenate(val) if train_on_val else train, test)
    held = choose_holdout(train.targets)
    measured = test if test is not None else val
    assert measured is not None
    return ProbeSplits(train.select((~held).nonzero()[:, 0]), train.select(held.nonzero()[:, 0]), train, measured)


def choose_holdout(targets: Tensor) -> Tensor:
    """bool (n,): a fifth of each class, at least one image of those with two or more."""
    held = torch.zeros(len(targets), dtype=torch.bool)
    for label, places in _group_by_class(targets):
        count = min(max(1, round(_HOLDOUT_SHARE * len(places))), len(places) - 1)
        held[places[permute_indices(np.arange(count), len(places), counter_rng.derive_key(0, f"held out {label}"))]] = (
            True
        )
    return held


def sample_shots(targets: Tensor, class_names: Sequence[str], shots: int, seed: int) -> Tensor:
    """(L * shots,): which images are taken, `shots` of each class; of more shots the first are the same."""
    check_shots(targets, class_names, shots)
    found = [
        places[permute_indices(np.arange(shots), len(places), counter_rng.derive_key(seed, f"few-shot {label}"))]
        for label, places in _group_by_class(targets)
    ]
    return torch.from_numpy(np.concatenate(found))


def check_shots(targets: Tensor, class_names: Sequence[str], shots: int) -> None:
    """Refuse more shots than a class has images."""
    if shots < 1:
        raise UsageError(f"--shots is {shots}; it must be at least 1")
    counts = torch.bincount(targets.cpu(), minlength=len(class_names))
    least = int(counts.argmin())
    if counts[least] < shots:
        raise DataError(
            f"{shots}-shot takes {shots} training images of each class, and {class_names[least]} has {int(counts[least])}:"
            " give fewer shots, or add images"
        )


def _group_by_class(targets: Tensor) -> Iterator[tuple[int, np.ndarray[tuple[int], np.dtype[np.int64]]]]:
    """Each class that has images, and where they are."""
    numbers = targets.cpu().numpy()
    order = np.argsort(numbers, kind="stable")
    classes, starts = np.unique(numbers[order], return_index=True)
    yield from zip(classes.tolist(), np.split(order, starts[1:]), strict=True)


# --- the classifiers -------------------------------------------------------------------------------------------------


class Standardizer(NamedTuple):
    """What gives each feature mean 0 and variance 1 over the images that are learned from."""

    mean: Tensor  # float64 (D,)
    std: Tensor  # float64 (D,)

    @classmethod
    def fit(cls, train: Features) -> "Standardizer":
        """By mean and standard deviation, to which the paper's authors add 1e-5."""
        images = len(train.values)
        mean = train.values.mean(dim=0, dtype=torch.float64)
        variance = torch.zeros_like(mean)
        for values, _ in train.iterate_chunks(1):
            variance += (values.double() - mean).square().sum(dim=0) / images
        return cls(mean, variance.sqrt() + _STD_EPSILON)

    def __call__(self, values: Tensor) -> Tensor:
        """float64 (n, D)."""
        return (values.double() - self.mean) / self.std

    def fold_into_head(self, weight: Tensor, bias: Tensor) -> LinearHead:
        """The head that makes of features as they are what (L, D) and (L,) make of whitened ones."""
        weight = weight / self.std
        return LinearHead(weight.float(), (bias - weight @ self.mean).float())


def fit_ridge(
    train: Features, num_classes: int, penalties: Sequence[float], *, dual: bool | None = None
) -> list[LinearHead]:
    """For each penalty the least-squares map from whitened features to 1 for the true class and -1 for the others.

    Primal, a system of D equations, or dual, one of n: whichever is smaller unless told.
    """
    if min(penalties) <= 0:
        raise UsageError(f"lambda is {min(penalties):g}; it must be above 0")
    white = Standardizer.fit(train)
    columns = train.values.shape[1] + 1
    dual = len(train.values) < columns if dual is None else dual
    solutions = (
        _solve_dual(train, white, num_classes, penalties)
        if dual
        else _solve_primal(train, white, num_classes, penalties)
    )
    return [white.fold_into_head(found[:-1].mT, _BIAS_FEATURE * found[-1]) for found in solutions]


def _solve_primal(
    train: Features, standardizer: Standardizer, num_classes: int, penalties: Sequence[float]
) -> Iterator[Tensor]:
    """(D + 1, L) for each penalty."""
    columns = train.values.shape[1] + 1
    gram = train.values.new_zeros(columns, columns, dtype=torch.float64)
    cross = gram.new_zeros(columns, num_classes)
    for values, targets in train.iterate_chunks(num_classes):
        x = F.pad(standardizer(values), (0, 1), value=_BIAS_FEATURE)
        gram += x.mT @ x
        cross += x.mT @ _make_sign_targets(targets, num_classes)
    for penalty in penalties:
        yield _solve_regularized(gram, penalty, cross)


def _solve_dual(
    train: Features, standardizer: Standardizer, num_classes: int, penalties: Sequence[float]
) -> Iterator[Tensor]:
    """(D + 1, L) for each penalty."""
    x = F.pad(standardizer(train.values), (0, 1), value=_BIAS_FEATURE)
    gram, signs = x @ x.mT, _make_sign_targets(train.targets, num_classes)
    for penalty in penalties:
        yield x.mT @ _solve_regularized(gram, penalty, signs)


def _solve_regularized(gram: Tensor, penalty: float, targets: Tensor) -> Tensor:
    """The solution of (gram + penalty I) x = right."""
    system = gram + penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.cholesky_solve(targets, torch.linalg.cholesky(system))


def _make_sign_targets(targets: Tensor, num_classes: int) -> Tensor:
    """float64 (n, L): 1 for the true class, -1 for the others."""
    return 2 * F.one_hot(targets, num_classes).double() - 1


def solve_logistic(
    train: Features, num_classes: int, penalties: Sequence[float], *, gradient_tolerance: float = _GRADIENT_TOLERANCE
) -> list[LinearHead]:
    """For each penalty the head with the least mean loss of a softmax plus penalty / 2 times its squared weights.

    The weights are of whitened features, the bias is free. Penalties are best given from the greatest to the least:
    each search begins where the one before ended.
    """
    white = Standardizer.fit(train)
    features = train.values.shape[1]
    weight = train.values.new_zeros(num_classes, features + 1, dtype=torch.float64, requires_grad=True)  # bias last
    heads = []
    for penalty in penalties:
        search = torch.optim.LBFGS(
            [weight], max_iter=_LBFGS_STEPS, tolerance_grad=gradient_tolerance, tolerance_change=1e-12, history_size=20,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def evaluate_loss(penalty: float = penalty) -> float:
            loss, weight.grad = _compute_loss_and_gradient(weight.detach(), train, white, penalty)
            return loss

        search.step(evaluate_loss)
        heads.append(white.fold_into_head(weight.detach()[:, :-1], weight.detach()[:, -1]))
    return heads


def _compute_loss_and_gradient(
    weight: Tensor, train: Features, standardizer: Standardizer, penalty: float
) -> tuple[float, Tensor]:
    """The penalised mean loss and its gradient, by hand: a graph would keep all images in float64."""
    images = len(train.values)
    slope = penalty * weight
    slope[:, -1] = 0
    loss = penalty / 2 * weight[:, :-1].square().sum()
    for values, targets in train.iterate_chunks(len(weight)):
        x = F.pad(standardizer(values), (0, 1), value=1.0)
        logs = (x @ weight.mT).log_softmax(dim=1)
        loss -= logs.gather(1, targets[:, None]).sum() / images
        errors = logs.exp()
        errors.scatter_add_(1, targets[:, None], errors.new_full((len(x), 1), -1.0))
        slope += errors.mT @ x / images
    return float(loss), slope


def compute_knn_votes(train: Features, values: Tensor, num_classes: int, k: int) -> Iterator[Tensor]:
    """(m, L), in chunks: what the k nearest of the images that were learned say of each, in shares that sum to 1."""
    known = F.normalize(train.values, dim=1)
    for chunk in values.split(max(1, _CHUNK_SIMILARITIES // max(len(known), num_classes))):
        nearest = (F.normalize(chunk, dim=1) @ known.mT).topk(k, dim=1)
        weight = (nearest.values / KNN_TEMPERATURE).softmax(dim=1)  # (chunk, k)
        yield weight.new_zeros(len(chunk), num_classes).scatter_add_(1, train.targets[nearest.indices], weight)


# --- their scores ----------------------------------------------------------------------------------------------------


def score_few_shot(
    splits: ProbeSplits,
    class_names: Sequence[str],
    shots: int,
    *,
    seeds: int = DEFAULT_SEEDS,
    penalty: float | None = DEFAULT_LAMBDA,
) -> ProbeScore:
    """Of ridge regressions from `shots` images a class; None chooses the penalty."""
    chosen = [
        splits.train.select(sample_shots(splits.train.targets, class_names, shots, seed)) for seed in range(seeds)
    ]
    if penalty is None:
        fewer = min(
            shots, int(splits.tuning_train.targets.bincount(minlength=len(class_names)).min())
        )  # where some are held out
        drafts = [
            splits.tuning_train.select(sample_shots(splits.tuning_train.targets, class_names, fewer, seed))
            for seed in range(seeds)
        ]
        by_draw = [
            [head.count_correct(splits.tuning_val) for head in fit_ridge(draft, len(class_names), LAMBDA_GRID)]
            for draft in drafts
        ]
        penalty = _choose_penalty(LAMBDA_GRID, [sum(right) for right in zip(*by_draw, strict=True)], splits.tuning_val)
    return _score_ridge_draws(chosen, splits.test, len(class_names), shots, penalty)


def _score_ridge_draws(
    train_draws: Sequence[Features], test: Features, num_classes: int, shots: int, penalty: float
) -> ProbeScore:
    right = tuple(fit_ridge(some, num_classes, [penalty])[0].count_correct(test) for some in train_draws)
    images, setting = len(test.targets), ("lambda", penalty)
    return ProbeScore(
        method="few-shot",
        shots=shots,
        train_images=shots * num_classes,
        correct=right,
        test_images=images,
        setting=setting,
    )


def score_knn(splits: ProbeSplits, num_classes: int, k: int = DEFAULT_K) -> ProbeScore:
    """Of the k nearest neighbours, or all images where there are fewer."""
    if k < 1:
        raise UsageError(f"--k is {k}; it must be at least 1")
    k, images = min(k, len(splits.train.targets)), len(splits.test.targets)
    said = torch.cat(
        [chunk.argmax(dim=1) for chunk in compute_knn_votes(splits.train, splits.test.values, num_classes, k)]
    )
    right = int((said == splits.test.targets).sum())
    return ProbeScore(
        method="kNN", train_images=len(splits.train.targets), correct=(right,), test_images=images, setting=("k", k)
    )


def fit_linear(splits: ProbeSplits, num_classes: int, penalty: float | None = DEFAULT_LAMBDA) -> FittedProbe:
    """A ridge regression from all images; None chooses the penalty."""
    return _fit_best_penalty(
        "linear", fit_ridge, fit_ridge, splits, num_classes, "lambda", LAMBDA_GRID if penalty is None else [penalty]
    )


def fit_logistic(splits: ProbeSplits, num_classes: int) -> FittedProbe:
    """A logistic regression from all images, with the best penalty."""
    return _fit_best_penalty(
        "logistic",
        partial(solve_logistic, gradient_tolerance=_DRAFT_GRADIENT_TOLERANCE),
        solve_logistic,
        splits,
        num_classes,
        "L2",
        L2_GRID,
    )


def _fit_best_penalty(
    method: str,
    solve_draft: Solver,
    solve: Solver,
    splits: ProbeSplits,
    num_classes: int,
    penalty_name: str,
    penalties: Sequence[float],
) -> FittedProbe:
    """The head with the best penalty, solved after it was chosen among drafts."""
    drafts = solve_draft(splits.tuning_train, num_classes, penalties)
    right = [head.count_correct(splits.tuning_val) for head in drafts]
    penalty = _choose_penalty(penalties, right, splits.tuning_val)
    (head,) = solve(splits.train, num_classes, [penalty])
    learned, images = len(splits.train.targets), len(splits.test.targets)
    score = ProbeScore(
        method=method,
        train_images=learned,
        correct=(head.count_correct(splits.test),),
        test_images=images,
        setting=(penalty_name, penalty),
    )
    return FittedProbe(
        score, head, max(right), _fit_head_temperature(drafts[penalties.index(penalty)], splits.tuning_val)
    )


def _fit_head_temperature(head: LinearHead, tuning_val: Features) -> float:
    """Of the head's logits, by as many images as it needs, from all over the split."""
    step = max(1, len(tuning_val.targets) * len(head.bias) // _MAX_TEMPERATURE_LOGITS)
    logits, targets = head.compute_logits(tuning_val.values[::step]).cpu(), tuning_val.targets[::step].cpu()
    return calibration.fit_temperature(logits, targets, prior_std=math.inf)  # outputs of a regression are no logits yet


def _choose_penalty(penalties: Sequence[float], correct: Sequence[int], tuning_val: Features) -> float:
    """The penalty with the most right answers, the greatest of equals."""
    if len(penalties) > 1 and not len(tuning_val.targets):
        raise DataError(
            "there is no image to choose a setting by: no val, and no class with two training images. Add images, or"
            " name the settings (--lambda) and the methods (--methods few-shot knn)"
        )
    return max(zip(correct, penalties, strict=True))[1]


# --- in training, and as a model -------------------------------------------------------------------------------------


def measure_few_shot(
    model: Model,
    train: Split,
    test: Split,
    preprocess: PreprocessConfig,
    class_names: Sequence[str],
    *,
    shots: int = 10,
    seeds: int = DEFAULT_SEEDS,
    batch: int = 256,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    reduce_ranks: Callable[[Tensor], Tensor] = features.identity,
) -> ProbeScore:
    """The paper's few-shot accuracy of a model as it is, for use during training; the model is left in eval mode.

    Only the images that are drawn from `train` are looked at, the same at every call. Of several ranks each looks at
    its share, and all have the score.
    """
    targets = features.read_labels(train)
    rows = torch.cat([sample_shots(targets, class_names, shots, seed) for seed in range(seeds)])
    wanted, places = rows.unique(return_inverse=True)

    def extract_split(split: Split) -> Features:
        batches = iter_eval_batches(
            split,
            preprocess,
            batch_size=batch,
            num_classes=len(class_names),
            rank=rank,
            world_size=world,
            workers=workers,
        )
        values = features.extract_features(model, batches, preprocess, num_images=len(split), reduce_ranks=reduce_ranks)
        return Features(values, features.read_labels(split))

    some = extract_split(Split(train.store, np.asarray(train.rows)[wanted.numpy()]))
    chosen = [some.select(part) for part in places.split(len(class_names) * shots)]
    return _score_ridge_draws(chosen, extract_split(test), len(class_names), shots, DEFAULT_LAMBDA)


def replace_head(
    trained: Trained, head: LinearHead, labels: tuple[str, ...], temperature: float, change: str
) -> Trained:
    """The model with this head in place of its own; a hidden layer before it stays, for the head reads its output."""
    config, tensors = trained.model.config, dict(trained.model.state_dict())
    for name in [name for name in tensors if name.startswith(features.HEAD_PREFIXES)]:
        del tensors[name]
    weight, bias = head.weight.cpu(), head.bias.cpu()
    if isinstance(config, BiTConfig):
        config = dataclasses.replace(config, classes=len(labels))
        tensors |= {"head.fc.weight": weight[:, :, None, None], "head.fc.bias": bias}
    else:
        config = dataclasses.replace(config, classes=len(labels), distillation_head=False)
        tensors |= {"head.weight": weight, "head.bias": bias}
    model = assemble_model(config, {name: tensor.detach().cpu() for name, tensor in tensors.items()})
    origin = dataclasses.replace(trained.origin, changes=(*trained.origin.changes, change))
    return Trained(model, trained.preprocess, labels, origin, temperature)
