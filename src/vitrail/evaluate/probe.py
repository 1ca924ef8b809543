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

from vitrail.config import BiTConfig, Preprocess
from vitrail.data import draws
from vitrail.data.dataset import Split
from vitrail.data.loader import evaluation_batches
from vitrail.data.order import permuted
from vitrail.errors import DataError, UsageError
from vitrail.evaluate import calibrate, features
from vitrail.evaluate.intervals import Interval, wilson
from vitrail.model.build import Model
from vitrail.weights.trained import Trained, assemble

SHOTS = (1, 5, 10, 25)
SEEDS = 3
LAMBDA = 2.0**10
LAMBDAS = tuple(2.0**power for power in range(-10, 21, 2))
NEIGHBOURS = 20
TEMPERATURE = 0.07  # of the neighbours' votes (Wu et al. 2018)
PENALTIES = tuple(10.0 ** (-half / 2) for half in range(11))
"""Of half the squared weights, beside the mean loss; the greatest first."""

_CONSTANT = 100.0  # the feature that makes the bias: so large that the ridge hardly holds it back
_EPSILON = 1e-5
_HELD_OUT = 0.2  # of train, to choose settings by where val is what is measured
_NUMBERS = 2**24  # that images are turned into at once, in float64
_PAIRS = 2**26  # similarities that exist at once
_LOGITS = 2**26  # that a temperature is fitted to, at most
_STEPS = 2000  # of L-BFGS, at most
_FLAT = 1e-7  # the largest slope of the mean loss at which it ends
_ROUGH = 1e-5  # and where penalties are only compared


class Features(NamedTuple):
    """Images as a probe sees them."""

    values: Tensor  # float32 (n, D)
    targets: Tensor  # int64 (n,)

    def some(self, places: Tensor) -> "Features":
        """Those at the places given."""
        places = places.to(self.targets.device)
        return Features(self.values[places], self.targets[places])

    def joined(self, other: "Features") -> "Features":
        """Both, one after the other."""
        return Features(torch.cat([self.values, other.values]), torch.cat([self.targets, other.targets]))

    def chunks(self, classes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Values and targets of some at a time, so that what is made of them takes little memory."""
        rows = max(1, _NUMBERS // max(self.values.shape[1], classes))
        return zip(self.values.split(rows), self.targets.split(rows), strict=True)


class Parts(NamedTuple):
    """The images of a probe, by what they are for."""

    draft: Features
    """Learned from while settings are chosen."""
    choice: Features
    """Settings are chosen by these."""
    final: Features
    """Learned from once they are."""
    measured: Features


class Head(NamedTuple):
    """A linear layer."""

    weight: Tensor  # float32 (L, D)
    bias: Tensor  # float32 (L,)

    def logits(self, values: Tensor) -> Tensor:
        """(m, D) -> (m, L)."""
        return F.linear(values, self.weight, self.bias)

    def right(self, of: Features) -> int:
        """How many images it is right on."""
        chunks = of.chunks(len(self.bias))
        return sum(int((self.logits(values).argmax(dim=1) == targets).sum()) for values, targets in chunks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """How good one kind of classifier is."""

    method: str
    learned: int
    """Images that it learned from."""
    right: tuple[int, ...]
    """Images that it is right on, for each draw of those it learned from."""
    images: int
    """Images that were measured."""
    setting: tuple[str, float]
    """What its one number is called, and what it was."""
    shots: int | None = None

    @property
    def top1(self) -> float:
        """The share that is right, on average over the draws."""
        return statistics.mean(self.right) / self.images

    @property
    def std(self) -> float | None:
        """The standard deviation of the share over the draws, where there are several."""
        return statistics.stdev(self.right) / self.images if len(self.right) > 1 else None

    @property
    def interval(self) -> Interval | None:
        """95 % for the choice of images that were measured, where there is one draw."""
        return wilson(self.right[0], self.images) if len(self.right) == 1 else None


class Fitted(NamedTuple):
    """A linear classifier, and how good it was when it was chosen."""

    score: Score
    head: Head
    right: int
    """Of the images that settings are chosen by, before it learned from them."""
    temperature: float
    """Of its logits, fitted to these images likewise."""


Solver = Callable[[Features, int, Sequence[float]], list[Head]]
"""Heads for so many classes, one for each penalty."""


# --- which images are for what ---------------------------------------------------------------------------------------


def parts(splits: Mapping[str, Features], *, everything: bool = False) -> Parts:
    """What is learned from, chosen by and measured: test is measured and val chosen by.

    Without a test split val is measured, and a fifth of each class of train is chosen by. With `everything`, val is
    learned from too once settings are chosen.
    """
    train, val, test = (splits.get(name) for name in ("train", "val", "test"))
    if train is None or (val is None and test is None):
        raise DataError(f"a probe needs the split train, and test or val; there is {', '.join(splits) or 'none'}")
    if everything and (test is None or val is None):
        raise UsageError("--everything learns from val too: that takes a val, and a test to measure on")
    if val is not None and test is not None:
        return Parts(train, val, train.joined(val) if everything else train, test)
    held = held_out(train.targets)
    measured = test if test is not None else val
    assert measured is not None
    return Parts(train.some((~held).nonzero()[:, 0]), train.some(held.nonzero()[:, 0]), train, measured)


def held_out(targets: Tensor) -> Tensor:
    """bool (n,): a fifth of each class, at least one image of those with two or more."""
    held = torch.zeros(len(targets), dtype=torch.bool)
    for label, places in _by_class(targets):
        count = min(max(1, round(_HELD_OUT * len(places))), len(places) - 1)
        held[places[permuted(np.arange(count), len(places), draws.key(0, f"held out {label}"))]] = True
    return held


def drawn(targets: Tensor, names: Sequence[str], shots: int, seed: int) -> Tensor:
    """(L * shots,): which images are taken, `shots` of each class; of more shots the first are the same."""
    check_shots(targets, names, shots)
    found = [
        places[permuted(np.arange(shots), len(places), draws.key(seed, f"few-shot {label}"))]
        for label, places in _by_class(targets)
    ]
    return torch.from_numpy(np.concatenate(found))


def check_shots(targets: Tensor, names: Sequence[str], shots: int) -> None:
    """Refuse more shots than a class has images."""
    if shots < 1:
        raise UsageError(f"--shots is {shots}; it must be at least 1")
    counts = torch.bincount(targets.cpu(), minlength=len(names))
    least = int(counts.argmin())
    if counts[least] < shots:
        raise DataError(
            f"{shots}-shot takes {shots} training images of each class, and {names[least]} has {int(counts[least])}:"
            " give fewer shots, or add images"
        )


def _by_class(targets: Tensor) -> Iterator[tuple[int, np.ndarray[tuple[int], np.dtype[np.int64]]]]:
    """Each class that has images, and where they are."""
    numbers = targets.cpu().numpy()
    order = np.argsort(numbers, kind="stable")
    classes, starts = np.unique(numbers[order], return_index=True)
    yield from zip(classes.tolist(), np.split(order, starts[1:]), strict=True)


# --- the classifiers -------------------------------------------------------------------------------------------------


class Whitening(NamedTuple):
    """What gives each feature mean 0 and variance 1 over the images that are learned from."""

    mean: Tensor  # float64 (D,)
    std: Tensor  # float64 (D,)

    @classmethod
    def of(cls, learned: Features) -> "Whitening":
        """By mean and standard deviation, to which the paper's authors add 1e-5."""
        images = len(learned.values)
        mean = learned.values.mean(dim=0, dtype=torch.float64)
        variance = torch.zeros_like(mean)
        for values, _ in learned.chunks(1):
            variance += (values.double() - mean).square().sum(dim=0) / images
        return cls(mean, variance.sqrt() + _EPSILON)

    def __call__(self, values: Tensor) -> Tensor:
        """float64 (n, D)."""
        return (values.double() - self.mean) / self.std

    def folded(self, weight: Tensor, bias: Tensor) -> Head:
        """The head that makes of features as they are what (L, D) and (L,) make of whitened ones."""
        weight = weight / self.std
        return Head(weight.float(), (bias - weight @ self.mean).float())


def ridge(learned: Features, classes: int, penalties: Sequence[float], *, dual: bool | None = None) -> list[Head]:
    """For each penalty the least-squares map from whitened features to 1 for the true class and -1 for the others.

    Primal, a system of D equations, or dual, one of n: whichever is smaller unless told.
    """
    if min(penalties) <= 0:
        raise UsageError(f"lambda is {min(penalties):g}; it must be above 0")
    white = Whitening.of(learned)
    columns = learned.values.shape[1] + 1
    dual = len(learned.values) < columns if dual is None else dual
    solutions = _dual(learned, white, classes, penalties) if dual else _primal(learned, white, classes, penalties)
    return [white.folded(found[:-1].mT, _CONSTANT * found[-1]) for found in solutions]


def _primal(learned: Features, white: Whitening, classes: int, penalties: Sequence[float]) -> Iterator[Tensor]:
    """(D + 1, L) for each penalty."""
    columns = learned.values.shape[1] + 1
    gram = learned.values.new_zeros(columns, columns, dtype=torch.float64)
    cross = gram.new_zeros(columns, classes)
    for values, targets in learned.chunks(classes):
        x = F.pad(white(values), (0, 1), value=_CONSTANT)
        gram += x.mT @ x
        cross += x.mT @ _signs(targets, classes)
    for penalty in penalties:
        yield _solved(gram, penalty, cross)


def _dual(learned: Features, white: Whitening, classes: int, penalties: Sequence[float]) -> Iterator[Tensor]:
    """(D + 1, L) for each penalty."""
    x = F.pad(white(learned.values), (0, 1), value=_CONSTANT)
    gram, signs = x @ x.mT, _signs(learned.targets, classes)
    for penalty in penalties:
        yield x.mT @ _solved(gram, penalty, signs)


def _solved(gram: Tensor, penalty: float, right: Tensor) -> Tensor:
    """The solution of (gram + penalty I) x = right."""
    system = gram + penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.cholesky_solve(right, torch.linalg.cholesky(system))


def _signs(targets: Tensor, classes: int) -> Tensor:
    """float64 (n, L): 1 for the true class, -1 for the others."""
    return 2 * F.one_hot(targets, classes).double() - 1


def logistic(learned: Features, classes: int, penalties: Sequence[float], *, flat: float = _FLAT) -> list[Head]:
    """For each penalty the head with the least mean loss of a softmax plus penalty / 2 times its squared weights.

    The weights are of whitened features, the bias is free. Penalties are best given from the greatest to the least:
    each search begins where the one before ended.
    """
    white = Whitening.of(learned)
    features = learned.values.shape[1]
    weight = learned.values.new_zeros(classes, features + 1, dtype=torch.float64, requires_grad=True)  # bias last
    heads = []
    for penalty in penalties:
        search = torch.optim.LBFGS(
            [weight], max_iter=_STEPS, tolerance_grad=flat, tolerance_change=1e-12, history_size=20,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def measure(penalty: float = penalty) -> float:
            loss, weight.grad = _loss(weight.detach(), learned, white, penalty)
            return loss

        search.step(measure)
        heads.append(white.folded(weight.detach()[:, :-1], weight.detach()[:, -1]))
    return heads


def _loss(weight: Tensor, learned: Features, white: Whitening, penalty: float) -> tuple[float, Tensor]:
    """The penalised mean loss and its gradient, by hand: a graph would keep all images in float64."""
    images = len(learned.values)
    slope = penalty * weight
    slope[:, -1] = 0
    loss = penalty / 2 * weight[:, :-1].square().sum()
    for values, targets in learned.chunks(len(weight)):
        x = F.pad(white(values), (0, 1), value=1.0)
        logs = (x @ weight.mT).log_softmax(dim=1)
        loss -= logs.gather(1, targets[:, None]).sum() / images
        errors = logs.exp()
        errors.scatter_add_(1, targets[:, None], errors.new_full((len(x), 1), -1.0))
        slope += errors.mT @ x / images
    return float(loss), slope


def votes(learned: Features, values: Tensor, classes: int, k: int) -> Iterator[Tensor]:
    """(m, L), in chunks: what the k nearest of the images that were learned say of each, in shares that sum to 1."""
    known = F.normalize(learned.values, dim=1)
    for chunk in values.split(max(1, _PAIRS // max(len(known), classes))):
        nearest = (F.normalize(chunk, dim=1) @ known.mT).topk(k, dim=1)
        weight = (nearest.values / TEMPERATURE).softmax(dim=1)  # (chunk, k)
        yield weight.new_zeros(len(chunk), classes).scatter_add_(1, learned.targets[nearest.indices], weight)


# --- their scores ----------------------------------------------------------------------------------------------------


def score_few_shot(
    of: Parts, names: Sequence[str], shots: int, *, seeds: int = SEEDS, penalty: float | None = LAMBDA
) -> Score:
    """Of ridge regressions from `shots` images a class; None chooses the penalty."""
    chosen = [of.final.some(drawn(of.final.targets, names, shots, seed)) for seed in range(seeds)]
    if penalty is None:
        fewer = min(shots, int(of.draft.targets.bincount(minlength=len(names)).min()))  # where some are held out
        drafts = [of.draft.some(drawn(of.draft.targets, names, fewer, seed)) for seed in range(seeds)]
        by_draw = [[head.right(of.choice) for head in ridge(draft, len(names), LAMBDAS)] for draft in drafts]
        penalty = _best(LAMBDAS, [sum(right) for right in zip(*by_draw, strict=True)], of.choice)
    return _few_shot(chosen, of.measured, len(names), shots, penalty)


def _few_shot(chosen: Sequence[Features], measured: Features, classes: int, shots: int, penalty: float) -> Score:
    right = tuple(ridge(some, classes, [penalty])[0].right(measured) for some in chosen)
    images, setting = len(measured.targets), ("lambda", penalty)
    return Score(method="few-shot", shots=shots, learned=shots * classes, right=right, images=images, setting=setting)


def score_neighbours(of: Parts, classes: int, k: int = NEIGHBOURS) -> Score:
    """Of the k nearest neighbours, or all images where there are fewer."""
    if k < 1:
        raise UsageError(f"--k is {k}; it must be at least 1")
    k, images = min(k, len(of.final.targets)), len(of.measured.targets)
    said = torch.cat([chunk.argmax(dim=1) for chunk in votes(of.final, of.measured.values, classes, k)])
    right = int((said == of.measured.targets).sum())
    return Score(method="kNN", learned=len(of.final.targets), right=(right,), images=images, setting=("k", k))


def fit_linear(of: Parts, classes: int, penalty: float | None = LAMBDA) -> Fitted:
    """A ridge regression from all images; None chooses the penalty."""
    return _fitted("linear", ridge, ridge, of, classes, "lambda", LAMBDAS if penalty is None else [penalty])


def fit_logistic(of: Parts, classes: int) -> Fitted:
    """A logistic regression from all images, with the best penalty."""
    return _fitted("logistic", partial(logistic, flat=_ROUGH), logistic, of, classes, "L2", PENALTIES)


def _fitted(
    method: str,
    draft: Solver,
    solve: Solver,
    of: Parts,
    classes: int,
    name: str,
    penalties: Sequence[float],
) -> Fitted:
    """The head with the best penalty, solved after it was chosen among drafts."""
    drafts = draft(of.draft, classes, penalties)
    right = [head.right(of.choice) for head in drafts]
    penalty = _best(penalties, right, of.choice)
    (head,) = solve(of.final, classes, [penalty])
    learned, images = len(of.final.targets), len(of.measured.targets)
    score = Score(
        method=method, learned=learned, right=(head.right(of.measured),), images=images, setting=(name, penalty)
    )
    return Fitted(score, head, max(right), _temperature(drafts[penalties.index(penalty)], of.choice))


def _temperature(head: Head, choice: Features) -> float:
    """Of the head's logits, by as many images as it needs, from all over the split."""
    step = max(1, len(choice.targets) * len(head.bias) // _LOGITS)
    logits, targets = head.logits(choice.values[::step]).cpu(), choice.targets[::step].cpu()
    return calibrate.temperature(logits, targets, deviation=math.inf)  # outputs of a regression are no logits yet


def _best(penalties: Sequence[float], right: Sequence[int], choice: Features) -> float:
    """The penalty with the most right answers, the greatest of equals."""
    if len(penalties) > 1 and not len(choice.targets):
        raise DataError(
            "there is no image to choose a setting by: no val, and no class with two training images. Add images, or"
            " name the settings (--lambda) and the methods (--methods few-shot knn)"
        )
    return max(zip(right, penalties, strict=True))[1]


# --- in training, and as a model -------------------------------------------------------------------------------------


def few_shot(
    model: Model,
    train: Split,
    measured: Split,
    preprocess: Preprocess,
    names: Sequence[str],
    *,
    shots: int = 10,
    seeds: int = SEEDS,
    batch: int = 256,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    over_ranks: Callable[[Tensor], Tensor] = features.alone,
) -> Score:
    """The paper's few-shot accuracy of a model as it is, for use during training; the model is left in eval mode.

    Only the images that are drawn from `train` are looked at, the same at every call. Of several ranks each looks at
    its share, and all have the score.
    """
    targets = features.labels(train)
    rows = torch.cat([drawn(targets, names, shots, seed) for seed in range(seeds)])
    wanted, places = rows.unique(return_inverse=True)

    def looked_at(split: Split) -> Features:
        batches = evaluation_batches(
            split, preprocess, batch=batch, classes=len(names), rank=rank, world=world, workers=workers
        )
        values = features.extract(model, batches, preprocess, images=len(split), over_ranks=over_ranks)
        return Features(values, features.labels(split))

    some = looked_at(Split(train.store, np.asarray(train.rows)[wanted.numpy()]))
    chosen = [some.some(part) for part in places.split(len(names) * shots)]
    return _few_shot(chosen, looked_at(measured), len(names), shots, LAMBDA)


def with_head(trained: Trained, head: Head, labels: tuple[str, ...], temperature: float, change: str) -> Trained:
    """The model with this head in place of its own; a hidden layer before it stays, for the head reads its output."""
    config, tensors = trained.model.config, dict(trained.model.state_dict())
    for name in [name for name in tensors if name.startswith(features.HEADS)]:
        del tensors[name]
    weight, bias = head.weight.cpu(), head.bias.cpu()
    if isinstance(config, BiTConfig):
        config = dataclasses.replace(config, classes=len(labels))
        tensors |= {"head.fc.weight": weight[:, :, None, None], "head.fc.bias": bias}
    else:
        config = dataclasses.replace(config, classes=len(labels), distillation_head=False)
        tensors |= {"head.weight": weight, "head.bias": bias}
    model = assemble(config, {name: tensor.detach().cpu() for name, tensor in tensors.items()})
    origin = dataclasses.replace(trained.origin, changes=(*trained.origin.changes, change))
    return Trained(model, trained.preprocess, labels, origin, temperature)
