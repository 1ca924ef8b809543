"""Probes against closed forms, scikit-learn and hand-computed cases; what is measured decides nothing."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import making
from vitrail.config import PreprocessConfig
from vitrail.data.loader import iter_eval_batches
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.evaluate import calibration, features, probe
from vitrail.evaluate.intervals import wilson_interval
from vitrail.evaluate.probe import Features, LinearHead, ProbeSplits
from vitrail.model.build import Model

NAMES = ("a", "b", "c", "d")


def clouds(images: int, width: int, *, classes: int = 4, seed: int = 0, spread: float = 2.0) -> Features:
    """Features around a centre for each class, of different scales and far from 0."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    targets = torch.arange(images) % classes
    values = centres[targets] + spread * torch.randn(images, width, generator=generator)
    return Features(values * torch.linspace(0.1, 3, width) + 5, targets)


def parts(*, spread: float = 2.0) -> ProbeSplits:
    draft, choice, measured = (
        clouds(images, 12, seed=seed, spread=spread) for images, seed in ((60, 1), (40, 2), (80, 3))
    )
    return ProbeSplits(draft, choice, draft, measured)


# --- ridge -----------------------------------------------------------------------------------------------------------


def test_ridge_by_hand() -> None:
    """Two images, at 0 and 2: whitened -s and s, so the first class's weight is -2s / (2s^2 + lambda), the bias 0."""
    learned = Features(torch.tensor([[0.0], [2.0]]), torch.tensor([0, 1]))
    (head,) = probe.fit_ridge(learned, 2, [2.0])
    s = 1 / (1 + 1e-5)
    slope = -2 * s / (2 * s * s + 2.0) * s  # of the feature as it is, which is 1 too large and s too small
    torch.testing.assert_close(head.weight, torch.tensor([[slope], [-slope]]))
    torch.testing.assert_close(head.bias, torch.tensor([-slope, slope]))
    assert head.count_correct(learned) == 2


def closed_form(learned: Features, classes: int, penalty: float, values: Tensor) -> np.ndarray:
    """The paper's evaluator in NumPy."""
    x, y = learned.values.double().numpy(), 2.0 * np.eye(classes)[learned.targets.numpy()] - 1
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5

    def padded(raw: np.ndarray) -> np.ndarray:
        return np.pad((raw - mean) / std, ((0, 0), (0, 1)), constant_values=100.0)

    a = padded(x)
    weight = np.linalg.solve(a.T @ a + penalty * np.eye(a.shape[1]), a.T @ y)
    found: np.ndarray = padded(values.double().numpy()) @ weight
    return found


@pytest.mark.parametrize("images", [4, 11, 12, 13, 14, 200])
@pytest.mark.parametrize("penalty", [2.0**-10, 1.0, 2.0**10])
def test_ridge_is_the_closed_form_in_both_of_its_forms(images: int, penalty: float) -> None:
    learned, asked = clouds(images, 12), clouds(50, 12, seed=7).values
    expected = closed_form(learned, 4, penalty, asked)
    for dual in (False, True, None):
        (head,) = probe.fit_ridge(learned, 4, [penalty], dual=dual)
        np.testing.assert_allclose(head.compute_logits(asked).numpy(), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("images", [5, 13, 100])
def test_primal_and_dual_are_equal(images: int) -> None:
    learned = clouds(images, 12)
    white = probe.Standardizer.fit(learned)
    pairs = zip(
        probe._solve_primal(learned, white, 4, probe.LAMBDA_GRID),
        probe._solve_dual(learned, white, 4, probe.LAMBDA_GRID),
        strict=True,
    )
    for primal, dual in pairs:
        torch.testing.assert_close(primal, dual, atol=1e-6, rtol=0)


def test_ridge_is_scikit_learns() -> None:
    from sklearn.linear_model import Ridge

    learned, asked = clouds(200, 12), clouds(50, 12, seed=7).values
    white = probe.Standardizer.fit(learned)
    padded = [
        np.pad(white(values).numpy(), ((0, 0), (0, 1)), constant_values=100.0) for values in (learned.values, asked)
    ]
    model = Ridge(alpha=1024.0, fit_intercept=False, solver="svd")
    model.fit(padded[0], 2.0 * np.eye(4)[learned.targets.numpy()] - 1)
    (head,) = probe.fit_ridge(learned, 4, [1024.0])
    np.testing.assert_allclose(head.compute_logits(asked).numpy(), model.predict(padded[1]), atol=1e-5)


def test_whitened_features_have_mean_0_and_deviation_1_and_one_that_never_varies_stays_finite() -> None:
    learned = clouds(100, 12)
    learned.values[:, 3] = 7.0
    white = probe.Standardizer.fit(learned)(learned.values)
    expected = torch.ones(12, dtype=torch.float64)
    expected[3] = 0
    torch.testing.assert_close(white.mean(dim=0), torch.zeros(12, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(white.std(dim=0, correction=0), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("solve", [probe.fit_ridge, probe.solve_logistic])
def test_many_images_are_taken_in_chunks(
    solve: Callable[..., list[LinearHead]], monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = clouds(100, 12)
    whole = solve(learned, 4, [0.1])[0]
    monkeypatch.setattr(probe, "_CHUNK_ELEMENTS", 7 * 12)
    chunked = solve(learned, 4, [0.1])[0]
    torch.testing.assert_close(chunked.weight, whole.weight, atol=1e-5, rtol=0)
    assert chunked.count_correct(learned) == whole.count_correct(learned)


def test_a_penalty_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="lambda is 0; it must be above 0"):
        probe.fit_ridge(clouds(8, 3), 4, [0.0])


# --- the others ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [1.0, 0.01, 1e-4])
def test_logistic_is_scikit_learns(penalty: float) -> None:
    from sklearn.linear_model import LogisticRegression

    learned, asked = clouds(120, 12), clouds(50, 12, seed=7).values
    white = probe.Standardizer.fit(learned)
    model = LogisticRegression(C=1 / (penalty * 120), tol=1e-10, max_iter=10_000)
    model.fit(white(learned.values).numpy(), learned.targets.numpy())
    (head,) = probe.solve_logistic(learned, 4, [penalty])
    found = head.compute_logits(asked).double().softmax(dim=1)
    np.testing.assert_allclose(found.numpy(), model.predict_proba(white(asked).numpy()), atol=1e-4)


def test_each_penalty_of_a_path_gives_what_it_gives_alone() -> None:
    learned = clouds(120, 12)
    path = probe.solve_logistic(learned, 4, [1.0, 0.1, 0.01])
    for penalty, head in zip([1.0, 0.1, 0.01], path, strict=True):
        (alone,) = probe.solve_logistic(learned, 4, [penalty])
        torch.testing.assert_close(
            head.compute_logits(learned.values), alone.compute_logits(learned.values), atol=1e-4, rtol=0
        )


def test_neighbours_by_hand() -> None:
    """Of three on a circle two vote: similarities 1 and cos 60 degrees, weighed by exp(similarity / 0.07)."""
    learned = Features(torch.tensor([[2.0, 0.0], [1.0, 3.0**0.5], [-1.0, 0.0]]), torch.tensor([1, 0, 0]))
    (found,) = probe.compute_knn_votes(learned, torch.tensor([[5.0, 0.0]]), 2, 2)
    share = 1 / (1 + np.exp(-0.5 / 0.07))
    torch.testing.assert_close(found, torch.tensor([[1 - share, share]], dtype=torch.float32))


@pytest.mark.parametrize("k", [1, 5, 20])
def test_neighbours_are_scikit_learns(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    learned, asked = clouds(100, 12), clouds(30, 12, seed=7)
    unit = [values / values.norm(dim=1, keepdim=True) for values in (learned.values, asked.values)]
    model = KNeighborsClassifier(k, metric="cosine", weights=lambda away: np.exp((1 - away) / 0.07))
    model.fit(unit[0].numpy(), learned.targets.numpy())
    expected = model.predict_proba(unit[1].numpy())
    for pairs, chunks in ((2**26, 1), (700, 5)):
        monkeypatch.setattr(probe, "_CHUNK_SIMILARITIES", pairs)
        found = [*probe.compute_knn_votes(learned, asked.values, 4, k)]
        assert len(found) == chunks
        np.testing.assert_allclose(torch.cat(found).numpy(), expected, atol=1e-4)
    of = ProbeSplits(learned, asked, learned, asked)
    score = probe.score_knn(of, 4, k)
    assert score.correct == (int((expected.argmax(axis=1) == asked.targets.numpy()).sum()),)
    assert score.setting == ("k", k)
    assert probe.score_knn(of, 4, 1000).setting == ("k", 100)


# --- which images ----------------------------------------------------------------------------------------------------


def test_a_draw_has_so_many_different_images_of_each_class() -> None:
    targets = clouds(40, 2).targets[torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    rows = probe.sample_shots(targets, NAMES, 3, seed=0)
    assert sorted(targets[rows].tolist()) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert len(set(rows.tolist())) == 12
    assert set(rows.tolist()) < set(probe.sample_shots(targets, NAMES, 5, seed=0).tolist())
    assert set(rows.tolist()) != set(probe.sample_shots(targets, NAMES, 3, seed=1).tolist())
    assert sorted(probe.sample_shots(targets, NAMES, 10, seed=2).tolist()) == list(range(40))


def test_what_is_drawn_of_a_class_does_not_depend_on_the_others() -> None:
    targets = clouds(40, 2).targets
    more = torch.cat([targets, torch.full((9,), 2)])
    rows = set(probe.sample_shots(targets, NAMES, 3, seed=0).tolist())
    changed = {row for row in rows if targets[row] != 2} - set(probe.sample_shots(more, NAMES, 3, seed=0).tolist())
    assert not changed


def test_more_shots_than_a_class_has_images_are_refused() -> None:
    targets = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3])
    assert len(probe.sample_shots(targets, NAMES, 2, seed=0)) == 8
    with pytest.raises(DataError, match="3-shot takes 3 training images of each class, and c has 2"):
        probe.sample_shots(targets, NAMES, 3, seed=0)
    with pytest.raises(DataError, match=r"1-shot takes 1 .* and e has 0"):
        probe.sample_shots(targets, (*NAMES, "e"), 1, seed=0)


def test_test_is_measured_and_val_chosen_by() -> None:
    train, val, test = clouds(40, 3), clouds(12, 3, seed=1), clouds(20, 3, seed=2)
    of = probe.split_features({"train": train, "val": val, "test": test})
    assert of == ProbeSplits(train, val, train, test)
    every = probe.split_features({"train": train, "val": val, "test": test}, train_on_val=True)
    assert torch.equal(every.train.values, torch.cat([train.values, val.values]))
    assert torch.equal(every.train.targets, torch.cat([train.targets, val.targets]))
    assert (every.tuning_train, every.tuning_val, every.test) == (train, val, test)


@pytest.mark.parametrize("measured", ["val", "test"])
def test_without_a_split_to_choose_by_a_fifth_of_train_is(measured: str) -> None:
    train, other = clouds(40, 3), clouds(12, 3, seed=1)
    of = probe.split_features({"train": train, measured: other})
    assert (of.train, of.test) == (train, other)
    assert of.tuning_val.targets.bincount().tolist() == [2, 2, 2, 2]
    both = torch.cat([of.tuning_train.values, of.tuning_val.values])
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, train.values.tolist()))
    with pytest.raises(UsageError, match="--everything"):
        probe.split_features({"train": train, measured: other}, train_on_val=True)


def test_of_a_class_with_one_image_none_is_held_out() -> None:
    held = probe.choose_holdout(torch.tensor([0, 1, 1, 2, 2, 2]))
    assert held.tolist()[0] is False
    assert (int(held[1:3].sum()), int(held[3:].sum())) == (1, 1)
    few = Features(torch.randn(4, 3), torch.arange(4))
    of = probe.split_features({"train": few, "test": few})
    with pytest.raises(DataError, match="no image to choose a setting by"):
        probe.fit_logistic(of, 4)
    assert probe.fit_linear(of, 4).score.setting == ("lambda", 1024.0)


# --- scores ----------------------------------------------------------------------------------------------------------


def test_a_few_shot_score_is_of_the_closed_form_over_the_draws() -> None:
    of = parts()
    found = probe.score_few_shot(of, NAMES, 5, seeds=2)
    expected = []
    for seed in range(2):
        learned = of.train.select(probe.sample_shots(of.train.targets, NAMES, 5, seed))
        said = closed_form(learned, 4, 1024.0, of.test.values).argmax(axis=1)
        expected.append(int((said == of.test.targets.numpy()).sum()))
    assert found.correct == tuple(expected)
    assert (found.train_images, found.test_images, found.shots) == (20, 80, 5)
    assert found.top1 == pytest.approx(np.mean(expected) / 80)
    assert found.std == pytest.approx(np.std(expected, ddof=1) / 80)
    assert found.interval is None
    alone = probe.score_few_shot(of, NAMES, 5, seeds=1)
    assert (alone.std, alone.interval) == (None, wilson_interval(expected[0], 80))


def test_the_penalty_with_the_most_right_of_the_choice_is_taken() -> None:
    of = parts(spread=4)
    right = [head.count_correct(of.tuning_val) for head in probe.fit_ridge(of.tuning_train, 4, probe.LAMBDA_GRID)]
    assert len(set(right)) > 1
    fitted = probe.fit_linear(of, 4, None)
    assert right[probe.LAMBDA_GRID.index(fitted.score.setting[1])] == max(right) == fitted.tuning_correct
    fixed = probe.fit_linear(of, 4)
    assert fixed.score.setting == ("lambda", 1024.0)
    assert fixed.tuning_correct == right[probe.LAMBDA_GRID.index(1024.0)]


def test_what_is_measured_decides_nothing() -> None:
    of = parts(spread=4)
    wrong = of._replace(test=Features(of.test.values.flip(0), of.test.targets.roll(1)))
    for fit in (probe.fit_logistic, lambda images, classes: probe.fit_linear(images, classes, None)):
        one, other = fit(of, 4), fit(wrong, 4)
        assert one.score.setting == other.score.setting
        assert torch.equal(one.head.weight, other.head.weight)
        assert (one.tuning_correct, one.temperature) == (other.tuning_correct, other.temperature)
        assert one.score.correct != other.score.correct
    shots = [probe.score_few_shot(images, NAMES, 5, penalty=None) for images in (of, wrong)]
    assert shots[0].setting == shots[1].setting


def test_the_final_head_learns_from_all_and_the_temperature_from_images_it_has_not_seen() -> None:
    of = parts(spread=4)
    every = of._replace(train=of.tuning_train.concatenate(of.tuning_val))
    found = probe.fit_linear(every, 4)
    (draft,), (final,) = (probe.fit_ridge(learned, 4, [1024.0]) for learned in (every.tuning_train, every.train))
    assert torch.equal(found.head.weight, final.weight)
    assert found.score.train_images == 100
    logits = draft.compute_logits(of.tuning_val.values)
    assert found.temperature == calibration.fit_temperature(logits, of.tuning_val.targets, prior_std=math.inf)


# --- models ----------------------------------------------------------------------------------------------------------


def test_in_training_it_is_the_score_of_all_features_though_only_drawn_images_are_looked_at() -> None:
    dataset, model = open_dataset("digits"), making.vit(channels=1)
    view = PreprocessConfig(size=(32, 32), resize=(32, 32), mean=(0.5,), std=(0.5,))
    seen: list[int] = []

    def watched(values: Tensor) -> Tensor:
        seen.append(len(values))
        return values

    train, val = dataset.splits["train"], dataset.splits["val"]
    found = probe.measure_few_shot(model, train, val, view, dataset.classes, shots=2, seeds=2, reduce_ranks=watched)
    assert 20 < seen[0] <= 40
    assert seen[1] == len(val)

    def all_of(name: str) -> Features:
        split = dataset.splits[name]
        batches = iter_eval_batches(split, view, batch_size=256, num_classes=10)
        return Features(
            features.extract_features(model, batches, view, num_images=len(split)), features.read_labels(split)
        )

    learned, measured = all_of("train"), all_of("val")
    expected = probe.score_few_shot(ProbeSplits(learned, measured, learned, measured), dataset.classes, 2, seeds=2)
    assert found == expected


MODELS: dict[str, Callable[[], Model]] = {
    "plain": making.vit,
    "hidden layer": lambda: making.vit(hidden_head=True),
    "distilled": lambda: making.vit(distillation_token=True, distillation_head=True),
    "without head": lambda: making.vit(classes=0),
    "BiT": making.bit,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_a_probes_head_says_what_the_probe_says(name: str) -> None:
    trained = making.trained(MODELS[name]())
    images = making.images(trained.model.config, 6)
    with torch.no_grad():
        values = trained.model.compute_features(images)
        (head,) = probe.fit_ridge(Features(values, torch.arange(6) % 3), 3, [1.0])
        made = probe.replace_head(trained, head, ("x", "y", "z"), 0.5, "head: new")
        torch.testing.assert_close(made.model(images), head.compute_logits(values))
    assert (made.labels, made.temperature, made.origin.changes[-1]) == (("x", "y", "z"), 0.5, "head: new")
    assert made.preprocess == trained.preprocess
    assert dataclasses.asdict(made.model.config)["classes"] == 3
