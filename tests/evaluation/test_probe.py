"""Probes against closed forms and hand-computed cases; the test images decide nothing."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import model_factory
from tests.evaluation.test_linear_classifiers import make_features, predict_closed_form
from vitrail.config import PreprocessConfig
from vitrail.data.loader import iter_eval_batches
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError
from vitrail.evaluation import calibration, features, probe
from vitrail.evaluation.linear_classifiers import Features, compute_knn_votes, solve_ridge
from vitrail.evaluation.probe import ProbeSplits
from vitrail.evaluation.statistics import wilson_interval
from vitrail.model.vit import Model
from vitrail.runtime import distributed

NAMES = ("a", "b", "c", "d")


def make_splits(*, spread: float = 2.0) -> ProbeSplits:
    tuning_train, tuning_val, test = (
        make_features(images, 12, seed=seed, spread=spread) for images, seed in ((60, 1), (40, 2), (80, 3))
    )
    return ProbeSplits(tuning_train, tuning_val, tuning_train, test)


# --- which images ----------------------------------------------------------------------------------------------------


def test_a_draw_has_so_many_different_images_of_each_class() -> None:
    targets = make_features(40, 2).targets[torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    rows = probe.sample_shots(targets, NAMES, 3, seed=0)
    assert sorted(targets[rows].tolist()) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert len(set(rows.tolist())) == 12
    assert set(rows.tolist()) < set(probe.sample_shots(targets, NAMES, 5, seed=0).tolist())
    assert set(rows.tolist()) != set(probe.sample_shots(targets, NAMES, 3, seed=1).tolist())
    assert sorted(probe.sample_shots(targets, NAMES, 10, seed=2).tolist()) == list(range(40))


def test_what_is_drawn_of_a_class_does_not_depend_on_the_others() -> None:
    targets = make_features(40, 2).targets
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


def test_test_is_evaluated_and_val_chooses_settings() -> None:
    train, val, test = make_features(40, 3), make_features(12, 3, seed=1), make_features(20, 3, seed=2)
    splits = probe.split_features({"train": train, "val": val, "test": test})
    assert splits == ProbeSplits(train, val, train, test)
    with_val = probe.split_features({"train": train, "val": val, "test": test}, train_on_val=True)
    assert torch.equal(with_val.train.values, torch.cat([train.values, val.values]))
    assert torch.equal(with_val.train.targets, torch.cat([train.targets, val.targets]))
    assert (with_val.tuning_train, with_val.tuning_val, with_val.test) == (train, val, test)


@pytest.mark.parametrize("name", ["val", "test"])
def test_without_a_split_to_choose_by_a_fifth_of_train_is(name: str) -> None:
    train, evaluated = make_features(40, 3), make_features(12, 3, seed=1)
    splits = probe.split_features({"train": train, name: evaluated})
    assert (splits.train, splits.test) == (train, evaluated)
    assert splits.tuning_val.targets.bincount().tolist() == [2, 2, 2, 2]
    both = torch.cat([splits.tuning_train.values, splits.tuning_val.values])
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, train.values.tolist()))


def test_of_a_class_with_one_image_none_is_held_out() -> None:
    held_out = probe.choose_holdout(torch.tensor([0, 1, 1, 2, 2, 2]))
    assert held_out.tolist()[0] is False
    assert (int(held_out[1:3].sum()), int(held_out[3:].sum())) == (1, 1)
    single_images = Features(torch.randn(4, 3), torch.arange(4))
    splits = probe.split_features({"train": single_images, "test": single_images})
    with pytest.raises(DataError, match="no image to choose a setting by"):
        probe.fit_logistic(splits, 4)
    assert probe.fit_linear(splits, 4).score.setting == ("lambda", 1024.0)


# --- scores ----------------------------------------------------------------------------------------------------------


def test_a_few_shot_score_is_of_the_closed_form_over_the_draws() -> None:
    splits = make_splits()
    score = probe.score_few_shot(splits, NAMES, 5, seeds=2)
    expected = []
    for seed in range(2):
        train = splits.train.select(probe.sample_shots(splits.train.targets, NAMES, 5, seed))
        predicted = predict_closed_form(train, 4, 1024.0, splits.test.values).argmax(axis=1)
        expected.append(int((predicted == splits.test.targets.numpy()).sum()))
    assert score.correct == tuple(expected)
    assert (score.train_images, score.test_images, score.shots) == (20, 80, 5)
    assert score.top1 == pytest.approx(np.mean(expected) / 80)
    assert score.std == pytest.approx(np.std(expected, ddof=1) / 80)
    assert score.interval is None
    single_draw = probe.score_few_shot(splits, NAMES, 5, seeds=1)
    assert (single_draw.std, single_draw.interval) == (None, wilson_interval(expected[0], 80))


@pytest.mark.parametrize("k", [1, 5, 20])
def test_a_knn_score_counts_the_images_with_the_most_votes_for_their_class(k: int) -> None:
    splits = make_splits()
    votes = torch.cat([*compute_knn_votes(splits.train, splits.test.values, 4, k)])
    score = probe.score_knn(splits, 4, k)
    assert score.correct == (int((votes.argmax(dim=1) == splits.test.targets).sum()),)
    assert score.setting == ("k", k)
    assert probe.score_knn(splits, 4, 1000).setting == ("k", 60)


def test_the_penalty_with_the_most_correct_tuning_images_is_chosen() -> None:
    splits = make_splits(spread=4)
    correct = [head.count_correct(splits.tuning_val) for head in solve_ridge(splits.tuning_train, 4, probe.LAMBDA_GRID)]
    assert len(set(correct)) > 1
    fitted = probe.fit_linear(splits, 4, None)
    assert correct[probe.LAMBDA_GRID.index(fitted.score.setting[1])] == max(correct) == 40 * fitted.tuning_score
    fixed = probe.fit_linear(splits, 4)
    assert fixed.score.setting == ("lambda", 1024.0)
    assert 40 * fixed.tuning_score == correct[probe.LAMBDA_GRID.index(1024.0)]


def test_the_test_images_decide_nothing() -> None:
    splits = make_splits(spread=4)
    mislabeled = splits._replace(test=Features(splits.test.values.flip(0), splits.test.targets.roll(1)))
    for fit in (probe.fit_logistic, lambda images, classes: probe.fit_linear(images, classes, None)):
        first, second = fit(splits, 4), fit(mislabeled, 4)
        assert first.score.setting == second.score.setting
        assert torch.equal(first.head.weight, second.head.weight)
        assert (first.tuning_score, first.temperature) == (second.tuning_score, second.temperature)
        assert first.score.correct != second.score.correct
    scores = [probe.score_few_shot(images, NAMES, 5, penalty=None) for images in (splits, mislabeled)]
    assert scores[0].setting == scores[1].setting


def test_the_final_head_learns_from_all_and_the_temperature_from_images_it_has_not_seen() -> None:
    splits = make_splits(spread=4)
    with_val = splits._replace(train=splits.tuning_train.concatenate(splits.tuning_val))
    fitted = probe.fit_linear(with_val, 4)
    (draft,), (final,) = (solve_ridge(train, 4, [1024.0]) for train in (with_val.tuning_train, with_val.train))
    assert torch.equal(fitted.head.weight, final.weight)
    assert fitted.score.train_images == 100
    logits = draft.compute_logits(splits.tuning_val.values)
    assert fitted.temperature == calibration.fit_temperature(logits, splits.tuning_val.targets, prior_std=math.inf)


# --- models ----------------------------------------------------------------------------------------------------------


def test_the_score_in_training_is_that_of_all_features_though_only_drawn_images_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset, model = open_dataset("digits"), model_factory.build_vit(channels=1)
    preprocess = PreprocessConfig(size=(32, 32), resize=(32, 32), mean=(0.5,), std=(0.5,))
    counts: list[int] = []

    def record_count(values: Tensor, _: torch.device) -> Tensor:
        counts.append(len(values))
        return values

    monkeypatch.setattr(distributed, "all_reduce_rows", record_count)
    train, val = dataset.splits["train"], dataset.splits["val"]
    score = probe.measure_few_shot(model, train, val, preprocess, dataset.classes, shots=2, seeds=2)
    assert 20 < counts[0] <= 40
    assert counts[1] == len(val)

    def extract_all(name: str) -> Features:
        split = dataset.splits[name]
        batches = iter_eval_batches(split, preprocess, batch_size=256, num_classes=10)
        return Features(
            features.extract_features(model, batches, preprocess, num_images=len(split)), features.read_labels(split)
        )

    all_train, test = extract_all("train"), extract_all("val")
    expected = probe.score_few_shot(ProbeSplits(all_train, test, all_train, test), dataset.classes, 2, seeds=2)
    assert score == expected


MODELS: dict[str, Callable[[], Model]] = {
    "plain": model_factory.build_vit,
    "hidden layer": lambda: model_factory.build_vit(hidden_head=True),
    "distilled": lambda: model_factory.build_vit(distillation_token=True, distillation_head=True),
    "without head": lambda: model_factory.build_vit(classes=0),
    "BiT": model_factory.build_bit,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_a_probes_head_predicts_what_the_probe_predicts(name: str) -> None:
    trained = model_factory.build_trained(MODELS[name]())
    images = model_factory.draw_images(trained.model.config, 6)
    with torch.no_grad():
        values = trained.model.compute_features(images)
        (head,) = solve_ridge(Features(values, torch.arange(6) % 3), 3, [1.0])
        replaced = probe.replace_head(trained, head, ("x", "y", "z"), 0.5, "head: new")
        torch.testing.assert_close(replaced.model(images), head.compute_logits(values))
    assert (replaced.labels, replaced.temperature, replaced.origin.changes[-1]) == (("x", "y", "z"), 0.5, "head: new")
    assert replaced.preprocess == trained.preprocess
    assert dataclasses.asdict(replaced.model.config)["classes"] == 3
