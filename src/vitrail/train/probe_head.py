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
from vitrail.data.loader import evaluation_batches
from vitrail.data.workers import Progress, silent
from vitrail.evaluate import calibrate, features, probe
from vitrail.evaluate.probe import Features, Head
from vitrail.train import distributed
from vitrail.train.task import Task

_BATCH = 256


def fit_head(task: Task, images: int | None = None, *, progress: Progress = silent) -> Task:
    """The run with a head fitted to the features of its training images, in place of the zero head.

    Of so many images at most, those that training sees first.
    """
    start = task.start
    assert start is not None, "random weights have no features worth a probe"
    group, classes = task.group, len(task.dataset.classes)
    split = task.split
    if images is not None and images < len(split):
        some = task.training.order.samples(np.arange(max(images, 1)))
        split = Split(split.store, np.asarray(split.rows)[np.sort(some)])
    model = start.model.to(task.device)
    batches = evaluation_batches(
        split,
        task.preprocess,
        batch=_BATCH,
        classes=classes,
        rank=group.rank,
        world=group.world,
        workers=task.workers,
        skip_bad=task.dataset.unchecked,
    )
    values = features.extract(
        model,
        batches,
        task.preprocess,
        images=len(split),
        over_ranks=lambda rows: distributed.completed(rows, task.device),
        progress=progress,
    )
    model.cpu()
    learned = Features(values, features.labels(split))
    if task.dataset.unchecked:  # the rows of images that cannot be read have nothing in them
        learned = learned.some(values.any(dim=1).nonzero()[:, 0])
    head = solve_head(learned, classes)
    fitted = probe.with_head(start, head, task.dataset.classes, 1.0, "")
    return dataclasses.replace(task, start=dataclasses.replace(fitted, origin=start.origin))


def solve_head(learned: Features, classes: int) -> Head:
    """The ridge regression with the best penalty, its outputs scaled to logits that are as sure as they are right.

    Penalty and scale are those under which a fifth of each class, which a draft has not learned from, is likeliest.
    """
    held = probe.held_out(learned.targets)
    draft, choice = learned.some((~held).nonzero()[:, 0]), learned.some(held.nonzero()[:, 0])
    if not len(choice.targets):  # one image a class
        return Head(learned.values.new_zeros(classes, learned.values.shape[1]), learned.values.new_zeros(classes))
    found = [_scale(each.logits(choice.values), choice.targets) for each in probe.ridge(draft, classes, probe.LAMBDAS)]
    (_, scale), penalty = min(zip(found, probe.LAMBDAS, strict=True))
    (head,) = probe.ridge(learned, classes, [penalty])
    return Head(head.weight * scale, head.bias * scale)


def _scale(outputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """The least mean loss of a multiple of the outputs, and that multiple."""
    spread = float(outputs.std(dim=1).mean()) or 1.0  # a great penalty makes outputs small, and only their ratios count
    scale = 1 / spread / calibrate.temperature(outputs / spread, targets, deviation=math.inf)
    return float(F.cross_entropy(outputs * scale, targets)), scale
