"""Confident learning by hand, and beside the authors' package."""

import numpy as np
import torch
from torch import Tensor

from tests.conftest import peer
from vitrail.evaluation import confident_learning as learning

PROBABILITIES = torch.tensor(
    [
        [0.9, 0.1, 0.0],  # labeled 0
        [0.7, 0.3, 0.0],  # labeled 0
        [0.2, 0.75, 0.05],  # labeled 0: reaches only the threshold of 1
        [0.2, 0.8, 0.0],  # labeled 1
        [0.4, 0.6, 0.0],  # labeled 1: reaches none
        [0.65, 0.0, 0.35],  # labeled 2: reaches those of 0 and 2, and 0 is the more probable
        [0.3, 0.3, 0.4],  # labeled 2
    ],
    dtype=torch.float64,
)
LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 2])


def draw_probabilities(seed: int, classes: int = 6, images: int = 400) -> tuple[Tensor, Tensor]:
    """Probabilities of a fair classifier, and labels of which a fifth are wrong."""
    generator = np.random.default_rng(seed)
    truth = generator.integers(classes, size=images)
    logits = generator.normal(size=(images, classes)) + 2.5 * np.eye(classes)[truth]
    labels = np.where(generator.random(images) < 0.2, generator.integers(classes, size=images), truth)
    return torch.from_numpy(logits).softmax(dim=1), torch.from_numpy(labels)


def test_thresholds_and_the_joint_by_hand() -> None:
    thresholds = learning.compute_thresholds(PROBABILITIES, LABELS)
    torch.testing.assert_close(thresholds, torch.tensor([0.6, 0.7, 0.375], dtype=torch.float64))
    confident = learning.choose_confident_classes(PROBABILITIES, thresholds)
    assert confident.tolist() == [0, 0, 1, 1, learning.NOT_CONFIDENT, 0, 2]
    joint = learning.count_confident_joint(confident, LABELS, 3)
    assert joint.tolist() == [[2, 1, 0], [0, 1, 0], [1, 0, 1]]
    assert learning.flag_label_errors(PROBABILITIES, LABELS).nonzero()[:, 0].tolist() == [2, 5]


def test_scores_and_likely_labels_by_hand() -> None:
    assert learning.compute_self_confidence(PROBABILITIES, LABELS).tolist() == [0.9, 0.7, 0.2, 0.8, 0.6, 0.35, 0.4]
    margins = learning.compute_normalized_margin(PROBABILITIES, LABELS)
    torch.testing.assert_close(margins[:3], torch.tensor([0.9, 0.7, 0.225], dtype=torch.float64))
    assert learning.find_likely_labels(PROBABILITIES, LABELS).tolist() == [1, 1, 1, 0, 0, 0, 0]


def test_a_class_without_images_has_no_confident_ones() -> None:
    probabilities, labels = draw_probabilities(0)
    labels[labels == 5] = 4
    thresholds = learning.compute_thresholds(probabilities, labels)
    assert thresholds[5] == torch.inf
    assert not (learning.choose_confident_classes(probabilities, thresholds) == 5).any()


def test_scores_are_those_of_cleanlab() -> None:
    rank = peer("cleanlab.rank")
    probabilities, labels = draw_probabilities(1)
    scores = {
        "self_confidence": learning.compute_self_confidence(probabilities, labels),
        "normalized_margin": learning.compute_normalized_margin(probabilities, labels),
    }
    for method, own in scores.items():
        theirs = rank.get_label_quality_scores(labels.numpy(), probabilities.numpy(), method=method)
        np.testing.assert_allclose(own.numpy(), theirs, atol=1e-12)


def test_joint_and_label_errors_are_those_of_cleanlab() -> None:
    """They differ in images whose most probable class of all is none of the several that are reached."""
    count, find = peer("cleanlab.count"), peer("cleanlab.filter")
    for seed in range(5):
        probabilities, labels = draw_probabilities(seed)
        thresholds = learning.compute_thresholds(probabilities, labels)
        np.testing.assert_allclose(
            thresholds.numpy(), count.get_confident_thresholds(labels.numpy(), probabilities.numpy()), atol=1e-12
        )
        reached = probabilities >= thresholds
        most_probable = reached.gather(1, probabilities.argmax(dim=1, keepdim=True))[:, 0]
        same = (reached.sum(dim=1) < 2) | most_probable
        probabilities, labels = probabilities[same], labels[same]
        confident = learning.choose_confident_classes(probabilities, thresholds)
        own = learning.count_confident_joint(confident, labels, 6).numpy()
        theirs = count.compute_confident_joint(
            labels.numpy(), probabilities.numpy(), thresholds=thresholds.numpy(), calibrate=False
        )
        np.testing.assert_array_equal(own, theirs)
        if bool(same.all()):
            issues = find.find_label_issues(
                labels.numpy(), probabilities.numpy(), filter_by="confident_learning", n_jobs=1
            )
            assert learning.flag_label_errors(probabilities, labels).tolist() == issues.tolist()


def test_the_errors_planted_in_separable_classes_are_found() -> None:
    """With probabilities that are nearly certain, the label errors are the wrong labels, each of them."""
    truth = torch.arange(60) % 4
    probabilities = torch.full((60, 4), 0.01, dtype=torch.float64).scatter(1, truth[:, None], 0.97)
    labels = truth.clone()
    labels[[3, 17, 40]] = (truth[[3, 17, 40]] + 1) % 4
    assert learning.flag_label_errors(probabilities, labels).nonzero()[:, 0].tolist() == [3, 17, 40]
    assert torch.equal(learning.find_likely_labels(probabilities, labels)[[3, 17, 40]], truth[[3, 17, 40]])
