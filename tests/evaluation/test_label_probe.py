"""Probes of multi-label images against scikit-learn and by hand; the test images decide nothing."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn import metrics
from sklearn.linear_model import LogisticRegression

from vitrail.evaluation import label_probe, probe
from vitrail.evaluation.label_thresholds import choose_label_thresholds
from vitrail.evaluation.linear_classifiers import (
    Features,
    Standardizer,
    compute_knn_votes,
    solve_logistic,
    solve_ridge,
)
from vitrail.evaluation.probe import ProbeSplits

NAMES = ("a", "b", "c", "d")


def make_features(images: int, *, seed: int, width: int = 8) -> Features:
    """Sums of a center for each label, with noise; the first label is frequent, the last rare."""
    draws = torch.Generator().manual_seed(seed)
    targets = torch.rand(images, 4, generator=draws) < torch.tensor([0.6, 0.5, 0.4, 0.2])
    centers = torch.randn(4, width, generator=torch.Generator().manual_seed(9))
    noise = torch.randn(images, width, generator=draws)
    return Features(targets.float() @ centers * 1.5 + noise, targets)


@pytest.fixture
def splits() -> ProbeSplits:
    train, val, test = make_features(120, seed=0), make_features(60, seed=1), make_features(80, seed=2)
    return ProbeSplits(train, val, train, test)


def test_logistic_is_one_of_scikit_learns_for_each_label() -> None:
    train, penalty = make_features(90, seed=3), 0.01
    (head,) = solve_logistic(train, 4, [penalty])
    x = Standardizer.fit(train)(train.values).numpy()
    for label in range(4):
        reference = LogisticRegression(C=1 / (penalty * len(x)), tol=1e-9, max_iter=5000)
        reference.fit(x, train.targets[:, label].numpy())
        expected = reference.decision_function(x)
        assert head.compute_logits(train.values)[:, label].numpy() == pytest.approx(expected, abs=1e-3)


def test_ridge_learns_each_label_as_if_it_were_alone() -> None:
    train = make_features(50, seed=4)
    (head,) = solve_ridge(train, 4, [8.0])
    for label in range(4):
        (alone,) = solve_ridge(Features(train.values, train.targets[:, label].long()), 2, [8.0])
        torch.testing.assert_close(head.weight[label], alone.weight[1])
        torch.testing.assert_close(head.bias[label], alone.bias[1])


def test_a_neighbor_votes_for_each_of_its_labels() -> None:
    train = Features(torch.tensor([[1.0, 0], [0.0, 1]]), torch.tensor([[True, True, False], [False, True, False]]))
    (votes,) = compute_knn_votes(train, torch.tensor([[1.0, 1.0]]), 3, 2)
    torch.testing.assert_close(votes, torch.tensor([[0.5, 1.0, 0.0]]))


def test_shots_are_drawn_for_each_label_and_listed_once() -> None:
    targets = make_features(100, seed=5).targets
    rows = probe.sample_shots(targets, NAMES, 6, seed=0)
    assert len(set(rows.tolist())) == len(rows) <= 24
    assert (targets[rows].sum(dim=0) >= 6).all()
    assert probe.count_per_class(targets, 4).tolist() == targets.sum(dim=0).tolist()


def test_a_fifth_is_held_out_and_each_class_keeps_an_image() -> None:
    targets = torch.zeros(50, 50, dtype=torch.bool)
    targets.fill_diagonal_(True)
    targets[:, 0] = True
    held_out = probe.choose_holdout(targets[:, :1])
    assert int(held_out.sum()) == 10
    assert targets[~probe.choose_holdout(targets)].any(dim=0).all()


def test_the_scores_of_a_fitted_probe_are_those_of_its_head(splits: ProbeSplits) -> None:
    for fitted in (label_probe.fit_linear(splits, 4, None), label_probe.fit_logistic(splits, 4)):
        probabilities = (fitted.head.compute_logits(splits.test.values) / fitted.temperature).sigmoid().numpy()
        truths = splits.test.targets.numpy()
        predicted = probabilities > np.array(fitted.label_thresholds, np.float32)
        (scores,) = fitted.score.draws
        expected = metrics.average_precision_score(truths, probabilities, average="macro")
        assert scores.mean_average_precision == pytest.approx(expected)
        assert scores.micro_f1 == pytest.approx(metrics.f1_score(truths, predicted, average="micro"))
        assert scores.exact_match == pytest.approx(metrics.accuracy_score(truths, predicted))
        low, high = fitted.score.interval or (1.0, 0.0)
        assert low < scores.mean_average_precision < high
        assert scores.mean_average_precision > 0.7, "the features tell the labels apart"


def test_the_test_images_choose_nothing(splits: ProbeSplits) -> None:
    wrong = splits._replace(test=splits.test._replace(targets=~splits.test.targets))
    for fit in (label_probe.fit_logistic, lambda images, classes: label_probe.fit_linear(images, classes, None)):
        first, second = fit(splits, 4), fit(wrong, 4)
        assert (first.temperature, first.label_thresholds) == (second.temperature, second.label_thresholds)
        assert torch.equal(first.head.weight, second.head.weight)


def test_neighbors_are_judged_at_thresholds_of_val(splits: ProbeSplits) -> None:
    score = label_probe.score_knn(splits, 4, 5)
    votes = [
        torch.cat(list(compute_knn_votes(splits.train, images.values, 4, 5))).numpy()
        for images in (splits.tuning_val, splits.test)
    ]
    thresholds = choose_label_thresholds(votes[0], splits.tuning_val.targets.numpy())
    truths, predicted = splits.test.targets.numpy(), votes[1] > np.array(thresholds, np.float32)
    assert score.draws[0].macro_f1 == pytest.approx(metrics.f1_score(truths, predicted, average="macro"))
    assert score.setting == ("k", 5)


def test_few_shot_scores_are_averaged_over_the_draws(splits: ProbeSplits) -> None:
    score = label_probe.score_few_shot(splits, NAMES, 3, seeds=4)
    facts = score.to_dict()
    precisions = [draw.mean_average_precision for draw in score.draws]
    assert (facts["seeds"], facts["interval"]) == (4, None)
    assert facts["mean_average_precision"] == pytest.approx(np.mean(precisions))
    assert facts["std"] == pytest.approx(np.std(precisions, ddof=1))
    assert label_probe.score_few_shot(splits, NAMES, 3, seeds=1, penalty=None).setting[0] == "lambda"
    assert dataclasses.asdict(label_probe.score_few_shot(splits, NAMES, 3, seeds=4)) == dataclasses.asdict(score)
