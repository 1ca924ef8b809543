"""A new head that starts from a probe: the best linear classifier of the features that the model has before training.

A zero head spends the first steps on what a regression in closed form knows at once, and passes noise down to the
layers below while it learns (Kumar et al. 2022, linear probing and then fine-tuning). The probe takes one forward pass
over the training images, as evaluation sees them.
"""

import dataclasses
import math

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.dataset import Split
from vitrail.data.loader import iter_eval_batches
from vitrail.evaluate import calibration, features, probe
from vitrail.evaluate.linear_classifiers import Features, LinearHead, solve_ridge
from vitrail.runtime import distributed
from vitrail.runtime.workers import ProgressCallback, ignore_progress
from vitrail.train.training_run import TrainingRun

_BATCH_SIZE = 256


def fit_head(
    run: TrainingRun, max_images: int | None = None, *, progress: ProgressCallback = ignore_progress
) -> TrainingRun:
    """The run with a head fitted to the features of its training images, in place of the zero head.

    Of so many images at most, those that training sees first.
    """
    start = run.initial_model
    assert start is not None, "random weights have no features worth a probe"
    group, classes = run.group, len(run.dataset.classes)
    split = run.train_split
    if max_images is not None and max_images < len(split):
        some = run.training_data.order.get_sample_indices(np.arange(max(max_images, 1)))
        split = Split(split.store, np.asarray(split.rows)[np.sort(some)])
    model = start.model.to(run.device)
    batches = iter_eval_batches(
        split,
        run.preprocess,
        batch_size=_BATCH_SIZE,
        num_classes=classes,
        rank=group.rank,
        world_size=group.world_size,
        workers=run.workers,
        skip_bad=run.dataset.skip_bad,
    )
    values = features.extract_features(
        model,
        batches,
        run.preprocess,
        num_images=len(split),
        reduce_ranks=lambda rows: distributed.all_reduce_rows(rows, run.device),
        progress=progress,
    )
    model.cpu()
    learned = Features(values, features.read_labels(split))
    if run.dataset.skip_bad:  # the rows of images that cannot be read have nothing in them
        learned = learned.select(values.any(dim=1).nonzero()[:, 0])
    head = solve_head(learned, classes)
    fitted = probe.replace_head(start, head, run.dataset.classes, 1.0, "")
    return dataclasses.replace(run, initial_model=dataclasses.replace(fitted, origin=start.origin))


def solve_head(train_features: Features, classes: int) -> LinearHead:
    """The ridge regression with the best penalty, its outputs scaled to logits that are as sure as they are right.

    Penalty and scale are those under which a fifth of each class, which a draft has not learned from, is likeliest.
    """
    held = probe.choose_holdout(train_features.targets)
    draft, choice = train_features.select((~held).nonzero()[:, 0]), train_features.select(held.nonzero()[:, 0])
    if not len(choice.targets):  # one image a class
        return LinearHead(
            train_features.values.new_zeros(classes, train_features.values.shape[1]),
            train_features.values.new_zeros(classes),
        )
    found = [
        _fit_scale(each.compute_logits(choice.values), choice.targets)
        for each in solve_ridge(draft, classes, probe.LAMBDA_GRID)
    ]
    (_, scale), penalty = min(zip(found, probe.LAMBDA_GRID, strict=True))
    (head,) = solve_ridge(train_features, classes, [penalty])
    return LinearHead(head.weight * scale, head.bias * scale)


def _fit_scale(outputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """The least mean loss of a multiple of the outputs, and that multiple."""
    spread = float(outputs.std(dim=1).mean()) or 1.0  # a great penalty makes outputs small, and only their ratios count
    scale = 1 / spread / calibration.fit_temperature(outputs / spread, targets, prior_std=math.inf)
    return float(F.cross_entropy(outputs * scale, targets)), scale
