"""Simple classifiers on frozen features: ridge regression, logistic regression, k nearest neighbors.

    n images   m images to classify   D features   L classes   k neighbors

ridge       least squares to -1 and 1, in closed form
logistic    multinomial logistic regression with an L2 penalty, by L-BFGS; of multi-label images one binary regression
            for each class
kNN         the k images with the greatest cosine similarity vote, each with exp(similarity / temperature), for each of
            their labels

scikit-learn has all of these, but neither on a GPU nor in constant memory beside the features; the tests compare.
Regressions are solved in float64 and give a float32 head for raw features; that head is evaluated.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UsageError

KNN_TEMPERATURE = 0.07  # of the neighbors' votes (Wu et al. 2018)
_BIAS_FEATURE = 100.0  # a constant feature for the bias: so large that the penalty hardly holds it back
_STD_EPSILON = 1e-5
_CHUNK_ELEMENTS = 2**24  # float64 values that a chunk of images may become
_CHUNK_SIMILARITIES = 2**26  # similarities in memory at a time
_LBFGS_STEPS = 2000  # at most
GRADIENT_TOLERANCE = 1e-7  # L-BFGS ends when the largest gradient of the mean loss is below it
DRAFT_GRADIENT_TOLERANCE = 1e-5  # the same where penalties are only compared


class Features(NamedTuple):
    """The features and classes of images."""

    values: Tensor  # float32 (n, D)
    targets: Tensor  # int64 (n,), or bool (n, L) of multi-label images

    @property
    def multi_label(self) -> bool:
        """Whether images may have several labels."""
        return self.targets.ndim == 2

    def select(self, indices: Tensor) -> "Features":
        """The images at these indices."""
        indices = indices.to(self.targets.device)
        return Features(self.values[indices], self.targets[indices])

    def concatenate(self, other: "Features") -> "Features":
        """These images, then the others."""
        return Features(torch.cat([self.values, other.values]), torch.cat([self.targets, other.targets]))

    def iterate_chunks(self, num_classes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Values and targets in chunks, which bound the memory of computations on them."""
        rows = max(1, _CHUNK_ELEMENTS // max(self.values.shape[1], num_classes))
        return zip(self.values.split(rows), self.targets.split(rows), strict=True)


class LinearHead(NamedTuple):
    """A linear layer."""

    weight: Tensor  # float32 (L, D)
    bias: Tensor  # float32 (L,)

    def compute_logits(self, values: Tensor) -> Tensor:
        """(m, D) -> (m, L)."""
        return F.linear(values, self.weight, self.bias)

    def count_correct(self, features: Features) -> int:
        """How many images of one label each it classifies correctly."""
        chunks = features.iterate_chunks(len(self.bias))
        return sum(int((self.compute_logits(values).argmax(dim=1) == targets).sum()) for values, targets in chunks)


class Standardizer(NamedTuple):
    """Scales features to mean 0 and variance 1 over the training images, each by itself or all alike."""

    mean: Tensor  # float64 (D,)
    std: Tensor  # float64 (D,)

    @classmethod
    def fit(cls, train: Features, *, per_feature: bool = True) -> "Standardizer":
        """Compute mean and standard deviation; the paper's authors add 1e-5 to the latter.

        A deviation of a few images is noise: between one image of each of two classes, every feature differs by the
        same two deviations of its own. Without `per_feature` all are scaled by the mean variance.
        """
        images = len(train.values)
        mean = train.values.mean(dim=0, dtype=torch.float64)
        variance = torch.zeros_like(mean)
        for values, _ in train.iterate_chunks(1):
            variance += (values.double() - mean).square().sum(dim=0) / images
        variance = variance if per_feature else variance.mean().expand_as(variance)
        return cls(mean, variance.sqrt() + _STD_EPSILON)

    def __call__(self, values: Tensor) -> Tensor:
        """float64 (n, D)."""
        return (values.double() - self.mean) / self.std

    def fold_into_head(self, weight: Tensor, bias: Tensor) -> LinearHead:
        """The head for raw features that equals weight (L, D) and bias (L,) on standardized ones."""
        weight = weight / self.std
        return LinearHead(weight.float(), (bias - weight @ self.mean).float())


# --- ridge regression ------------------------------------------------------------------------------------------------


def solve_ridge(
    train: Features,
    num_classes: int,
    penalties: Sequence[float],
    *,
    dual: bool | None = None,
    per_feature: bool = True,
) -> list[LinearHead]:
    """For each penalty the least-squares map from standardized features to 1 for the true class and -1 for the others.

    Primal solves D equations, dual n; the default is whichever is fewer. `per_feature` is the standardizer's.
    """
    if min(penalties) <= 0:
        raise UsageError(f"lambda is {min(penalties):g}; it must be above 0")
    standardizer = Standardizer.fit(train, per_feature=per_feature)
    columns = train.values.shape[1] + 1
    dual = len(train.values) < columns if dual is None else dual
    solve = _solve_dual if dual else _solve_primal
    return [
        standardizer.fold_into_head(solution[:-1].mT, _BIAS_FEATURE * solution[-1])
        for solution in solve(train, standardizer, num_classes, penalties)
    ]


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
    """The solution x of (gram + penalty I) x = targets."""
    system = gram + penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.cholesky_solve(targets, torch.linalg.cholesky(system))


def _make_sign_targets(targets: Tensor, num_classes: int) -> Tensor:
    """float64 (n, L): 1 for the true class or classes, -1 for the others."""
    return 2 * _make_rows(targets, num_classes).double() - 1


def _make_rows(targets: Tensor, num_classes: int) -> Tensor:
    """(n, L): 1 or true for the true class or classes."""
    return targets if targets.ndim == 2 else F.one_hot(targets, num_classes)


# --- logistic regression ---------------------------------------------------------------------------------------------


def solve_logistic(
    train: Features, num_classes: int, penalties: Sequence[float], *, gradient_tolerance: float = GRADIENT_TOLERANCE
) -> list[LinearHead]:
    """For each penalty the head with the least mean cross-entropy plus penalty / 2 times its squared weights.

    For multi-label images it is the binary cross-entropy, summed over classes.
    The weights are those of standardized features, and the bias is not penalized. Give penalties from the greatest to
    the least: each search starts where the previous one ended.
    """
    standardizer = Standardizer.fit(train)
    features = train.values.shape[1]
    weight = train.values.new_zeros(num_classes, features + 1, dtype=torch.float64, requires_grad=True)  # bias last
    heads = []
    for penalty in penalties:
        optimizer = torch.optim.LBFGS(
            [weight], max_iter=_LBFGS_STEPS, tolerance_grad=gradient_tolerance, tolerance_change=1e-12, history_size=20,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def evaluate_loss(penalty: float = penalty) -> float:
            loss, weight.grad = _compute_loss_and_gradient(weight.detach(), train, standardizer, penalty)
            return loss

        optimizer.step(evaluate_loss)
        heads.append(standardizer.fold_into_head(weight.detach()[:, :-1], weight.detach()[:, -1]))
    return heads


def _compute_loss_and_gradient(
    weight: Tensor, train: Features, standardizer: Standardizer, penalty: float
) -> tuple[float, Tensor]:
    """The penalized mean loss and its gradient, by hand: autograd would keep all images in float64."""
    images = len(train.values)
    gradient = penalty * weight
    gradient[:, -1] = 0
    loss = penalty / 2 * weight[:, :-1].square().sum()
    for values, targets in train.iterate_chunks(len(weight)):
        x = F.pad(standardizer(values), (0, 1), value=1.0)
        logits = x @ weight.mT
        if train.multi_label:
            loss += F.binary_cross_entropy_with_logits(logits, targets.double(), reduction="sum") / images
            errors = logits.sigmoid() - targets.double()
        else:
            log_probabilities = logits.log_softmax(dim=1)
            loss -= log_probabilities.gather(1, targets[:, None]).sum() / images
            errors = log_probabilities.exp()
            errors.scatter_add_(1, targets[:, None], errors.new_full((len(x), 1), -1.0))
        gradient += errors.mT @ x / images
    return float(loss), gradient


# --- nearest neighbors -----------------------------------------------------------------------------------------------


def compute_knn_votes(train: Features, values: Tensor, num_classes: int, k: int) -> Iterator[Tensor]:
    """(m, L), in chunks: the votes of each image's k nearest training images, which sum to 1.

    A neighbor votes for each of its labels; those of a multi-label image are averages of 0 and 1, class by class.
    """
    train_values, labels = F.normalize(train.values, dim=1), train.targets.to(train.values.dtype)
    for chunk in values.split(max(1, _CHUNK_SIMILARITIES // max(len(train_values), num_classes))):
        nearest = (F.normalize(chunk, dim=1) @ train_values.mT).topk(k, dim=1)
        weight = (nearest.values / KNN_TEMPERATURE).softmax(dim=1)  # (chunk, k)
        if train.multi_label:
            yield weight.new_zeros(len(chunk), len(train_values)).scatter_(1, nearest.indices, weight) @ labels
        else:
            yield weight.new_zeros(len(chunk), num_classes).scatter_add_(1, train.targets[nearest.indices], weight)
