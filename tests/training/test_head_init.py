"""The head that starts from a probe: it is the regression's, calibrated, and the run begins with what it knows."""

import dataclasses
from pathlib import Path

import pytest
import torch
from sklearn.linear_model import RidgeClassifier

from tests.training.test_trainer import build_finetune_run, run_training
from vitrail.evaluation import features
from vitrail.evaluation.linear_classifiers import Features
from vitrail.training.head_init import fit_head, solve_head
from vitrail.training.loop import iterate_split_batches


def blobs(images: int, classes: int = 4, seed: int = 0, spread: float = 2.0) -> Features:
    """Classes that lie in clouds, which overlap."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, 12, generator=torch.Generator().manual_seed(9))
    targets = torch.arange(images) % classes
    return Features(centres[targets] + spread * torch.randn(images, 12, generator=generator), targets)


def test_the_head_is_right_as_often_as_scikit_learns_ridge_classifier() -> None:
    learned, others = blobs(400), blobs(2000, seed=1)
    head = solve_head(learned, 4)
    peer = RidgeClassifier(alpha=100.0).fit(learned.values.numpy(), learned.targets.numpy())
    expected = peer.score(others.values.numpy(), others.targets.numpy())
    assert head.count_correct(others) / 2000 == pytest.approx(expected, abs=0.01)
    assert expected > 0.5


def test_the_heads_logits_are_as_sure_as_they_are_right() -> None:
    others = blobs(4000, seed=1)
    head = solve_head(blobs(800), 4)
    losses = {
        scale: float(torch.nn.functional.cross_entropy(scale * head.compute_logits(others.values), others.targets))
        for scale in (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
    }
    assert losses[1.0] < 1.06 * min(losses.values())
    assert losses[1.0] < min(losses[0.25], losses[4.0]) / 1.1


def test_one_image_a_class_leaves_the_head_at_zero() -> None:
    head = solve_head(blobs(4), 4)
    assert not head.weight.any()
    assert not head.bias.any()


def test_a_run_begins_with_the_regression_of_its_own_features(tmp_path: Path) -> None:
    task = build_finetune_run(tmp_path, changes={"head_init": "probe", "epochs": 1})
    fitted = fit_head(task)
    assert task.initial_model is not None
    assert fitted.initial_model is not None
    assert fitted.initial_model.origin == task.initial_model.origin  # config.json and a resumed run compare it
    values = features.extract_features(
        task.initial_model.model,
        iterate_split_batches(task, "train"),
        task.preprocess,
        num_images=len(task.train_split),
    )
    expected = solve_head(Features(values, features.read_labels(task.train_split)), len(task.dataset.classes))
    state = fitted.initial_model.model.state_dict()
    torch.testing.assert_close(state["head.weight"], expected.weight)
    torch.testing.assert_close(state["head.bias"], expected.bias)
    others = {name for name in state if not name.startswith("head")}
    assert all(torch.equal(state[name], task.initial_model.model.state_dict()[name]) for name in others)
    run_training(fitted, tmp_path / "run")


def test_of_many_images_only_the_first_are_looked_at(tmp_path: Path) -> None:
    task = build_finetune_run(tmp_path, changes={"head_init": "probe", "epochs": 1})
    seen: list[int] = []
    fit_head(task, 4, progress=lambda _, total: seen.append(total))
    assert set(seen) == {4}
    fit_head(dataclasses.replace(task), 10**9, progress=lambda _, total: seen.append(total))
    assert seen[-1] == len(task.train_split)
