"""Solvers against closed forms, scikit-learn and hand-computed cases."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.evaluation import linear_classifiers
from vitrail.evaluation.linear_classifiers import (
    Features,
    LinearHead,
    Standardizer,
    compute_knn_votes,
    solve_logistic,
    solve_ridge,
)
from vitrail.evaluation.probe import LAMBDA_GRID


def make_features(images: int, width: int, *, classes: int = 4, seed: int = 0, spread: float = 2.0) -> Features:
    """Features around a center for each class, of different scales and far from 0."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    targets = torch.arange(images) % classes
    values = centers[targets] + spread * torch.randn(images, width, generator=generator)
    return Features(values * torch.linspace(0.1, 3, width) + 5, targets)


# --- ridge -----------------------------------------------------------------------------------------------------------


def test_ridge_by_hand() -> None:
    """Two images at 0 and 2, standardized -s and s: the first class's weight is -2s / (2s^2 + lambda), the bias 0."""
    train = Features(torch.tensor([[0.0], [2.0]]), torch.tensor([0, 1]))
    (head,) = solve_ridge(train, 2, [2.0])
    s = 1 / (1 + 1e-5)
    slope = -2 * s / (2 * s * s + 2.0) * s  # of the feature as it is, which is 1 too large and s too small
    torch.testing.assert_close(head.weight, torch.tensor([[slope], [-slope]]))
    torch.testing.assert_close(head.bias, torch.tensor([-slope, slope]))
    assert head.count_correct(train) == 2


def test_features_scaled_alike_keep_their_proportions() -> None:
    """Of one image of each class a feature's own deviation is its difference, and every feature counts as much."""
    train = Features(torch.tensor([[0.0, 0.0], [10.0, 0.1]]), torch.tensor([0, 1]))
    noisy = Features(torch.tensor([[1.0, 0.09]]), torch.tensor([0]))  # near the first image but for a small feature
    (alike,) = solve_ridge(train, 2, [1.0], per_feature=False)
    (each,) = solve_ridge(train, 2, [1.0])
    assert alike.count_correct(noisy) == 1
    assert abs(float(alike.weight[0, 0])) == pytest.approx(100 * abs(float(alike.weight[0, 1])), rel=1e-3)
    ratio = abs(float(each.weight[0, 1])) / abs(float(each.weight[0, 0]))
    assert ratio == pytest.approx(100, rel=1e-2)  # ten times as far apart, divided by deviations likewise, twice


def predict_closed_form(train: Features, classes: int, penalty: float, values: Tensor) -> np.ndarray:
    """The paper's evaluator in NumPy."""
    x, y = train.values.double().numpy(), 2.0 * np.eye(classes)[train.targets.numpy()] - 1
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5

    def pad_features(raw: np.ndarray) -> np.ndarray:
        return np.pad((raw - mean) / std, ((0, 0), (0, 1)), constant_values=100.0)

    a = pad_features(x)
    weight = np.linalg.solve(a.T @ a + penalty * np.eye(a.shape[1]), a.T @ y)
    outputs: np.ndarray = pad_features(values.double().numpy()) @ weight
    return outputs


@pytest.mark.parametrize("images", [4, 11, 12, 13, 14, 200])
@pytest.mark.parametrize("penalty", [2.0**-10, 1.0, 2.0**10])
def test_ridge_is_the_closed_form_in_both_of_its_forms(images: int, penalty: float) -> None:
    train, test_values = make_features(images, 12), make_features(50, 12, seed=7).values
    expected = predict_closed_form(train, 4, penalty, test_values)
    for dual in (False, True, None):
        (head,) = solve_ridge(train, 4, [penalty], dual=dual)
        np.testing.assert_allclose(
            head.compute_logits(test_values).numpy(), expected, atol=2e-5 * np.abs(expected).max()
        )


@pytest.mark.parametrize("images", [5, 13, 100])
def test_primal_and_dual_are_equal(images: int) -> None:
    train = make_features(images, 12)
    standardizer = Standardizer.fit(train)
    pairs = zip(
        linear_classifiers._solve_primal(train, standardizer, 4, LAMBDA_GRID),
        linear_classifiers._solve_dual(train, standardizer, 4, LAMBDA_GRID),
        strict=True,
    )
    for primal, dual in pairs:
        torch.testing.assert_close(primal, dual, atol=1e-6, rtol=0)


def test_ridge_is_scikit_learns() -> None:
    from sklearn.linear_model import Ridge

    train, test_values = make_features(200, 12), make_features(50, 12, seed=7).values
    standardizer = Standardizer.fit(train)
    padded = [
        np.pad(standardizer(values).numpy(), ((0, 0), (0, 1)), constant_values=100.0)
        for values in (train.values, test_values)
    ]
    model = Ridge(alpha=1024.0, fit_intercept=False, solver="svd")
    model.fit(padded[0], 2.0 * np.eye(4)[train.targets.numpy()] - 1)
    (head,) = solve_ridge(train, 4, [1024.0])
    np.testing.assert_allclose(head.compute_logits(test_values).numpy(), model.predict(padded[1]), atol=1e-5)


def test_standardized_features_have_mean_0_and_deviation_1_and_a_constant_one_stays_finite() -> None:
    train = make_features(100, 12)
    train.values[:, 3] = 7.0
    standardized = Standardizer.fit(train)(train.values)
    expected = torch.ones(12, dtype=torch.float64)
    expected[3] = 0
    torch.testing.assert_close(standardized.mean(dim=0), torch.zeros(12, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(standardized.std(dim=0, correction=0), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("solve", [solve_ridge, solve_logistic])
def test_many_images_are_taken_in_chunks(
    solve: Callable[..., list[LinearHead]], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = make_features(100, 12)
    whole = solve(train, 4, [0.1])[0]
    monkeypatch.setattr(linear_classifiers, "_CHUNK_ELEMENTS", 7 * 12)
    chunked = solve(train, 4, [0.1])[0]
    torch.testing.assert_close(chunked.weight, whole.weight, atol=1e-5, rtol=0)
    assert chunked.count_correct(train) == whole.count_correct(train)


def test_a_penalty_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="lambda is 0; it must be above 0"):
        solve_ridge(make_features(8, 3), 4, [0.0])


# --- logistic regression and neighbors -------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [1.0, 0.01, 1e-4])
def test_logistic_is_scikit_learns(penalty: float) -> None:
    from sklearn.linear_model import LogisticRegression

    train, test_values = make_features(120, 12), make_features(50, 12, seed=7).values
    standardizer = Standardizer.fit(train)
    model = LogisticRegression(C=1 / (penalty * 120), tol=1e-10, max_iter=10_000)
    model.fit(standardizer(train.values).numpy(), train.targets.numpy())
    (head,) = solve_logistic(train, 4, [penalty])
    probabilities = head.compute_logits(test_values).double().softmax(dim=1)
    np.testing.assert_allclose(probabilities.numpy(), model.predict_proba(standardizer(test_values).numpy()), atol=1e-4)


def test_each_penalty_of_a_path_gives_what_it_gives_alone() -> None:
    train = make_features(120, 12)
    path = solve_logistic(train, 4, [1.0, 0.1, 0.01])
    for penalty, head in zip([1.0, 0.1, 0.01], path, strict=True):
        (alone,) = solve_logistic(train, 4, [penalty])
        torch.testing.assert_close(
            head.compute_logits(train.values), alone.compute_logits(train.values), atol=1e-4, rtol=0
        )


def test_neighbors_by_hand() -> None:
    """Of three on a circle two vote: similarities 1 and cos 60 degrees, weighed by exp(similarity / 0.07)."""
    train = Features(torch.tensor([[2.0, 0.0], [1.0, 3.0**0.5], [-1.0, 0.0]]), torch.tensor([1, 0, 0]))
    (votes,) = compute_knn_votes(train, torch.tensor([[5.0, 0.0]]), 2, 2)
    share = 1 / (1 + np.exp(-0.5 / 0.07))
    torch.testing.assert_close(votes, torch.tensor([[1 - share, share]], dtype=torch.float32))


@pytest.mark.parametrize("k", [1, 5, 20])
def test_neighbors_are_scikit_learns(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    train, test = make_features(100, 12), make_features(30, 12, seed=7)
    unit = [values / values.norm(dim=1, keepdim=True) for values in (train.values, test.values)]
    model = KNeighborsClassifier(k, metric="cosine", weights=lambda away: np.exp((1 - away) / 0.07))
    model.fit(unit[0].numpy(), train.targets.numpy())
    expected = model.predict_proba(unit[1].numpy())
    for pairs, chunks in ((2**26, 1), (700, 5)):
        monkeypatch.setattr(linear_classifiers, "_CHUNK_SIMILARITIES", pairs)
        votes = [*compute_knn_votes(train, test.values, 4, k)]
        assert len(votes) == chunks
        np.testing.assert_allclose(torch.cat(votes).numpy(), expected, atol=1e-4)
