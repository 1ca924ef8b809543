"""A new head that starts from a probe: the best linear classifier of the features that the model has before training.

A zero head spends the first steps on what a regression in closed form knows at once, and passes noise down to the
layers below while it learns (Kumar et al. 2022, linear probing and then fine-tuning). The probe takes one forward pass
over the training images, as evaluation sees them.
"""

import dataclasses

from vitrail.data.loader import evaluation_batches
from vitrail.data.workers import Progress, silent
from vitrail.evaluate import calibrate, features, probe
from vitrail.evaluate.probe import Features, Head
from vitrail.train import distributed
from vitrail.train.task import Task

CHANGE = "a head that starts from a ridge regression of its features"
_BATCH = 256


def fit_head(task: Task, *, progress: Progress = silent) -> Task:
    """The run with a head fitted to the features of its training images, in place of the zero head."""
    start = task.start
    assert start is not None, "random weights have no features worth a probe"
    group, split, classes = task.group, task.split, len(task.dataset.classes)
    model = start.model.to(task.device)
    batches = evaluation_batches(
        split, task.preprocess, batch=_BATCH, classes=classes, rank=group.rank, world=group.world, workers=task.workers
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
    head = solve_head(Features(values, features.labels(split)), classes)
    return dataclasses.replace(task, start=probe.with_head(start, head, task.dataset.classes, 1.0, CHANGE))


def solve_head(learned: Features, classes: int) -> Head:
    """The ridge regression with the best penalty, its outputs scaled to logits that are as sure as they are right.

    Penalty and scale are chosen by a fifth of each class that a draft has not learned from.
    """
    held = probe.held_out(learned.targets)
    draft, choice = learned.some((~held).nonzero()[:, 0]), learned.some(held.nonzero()[:, 0])
    if not len(choice.targets):  # one image a class
        return Head(learned.values.new_zeros(classes, learned.values.shape[1]), learned.values.new_zeros(classes))
    drafts = probe.ridge(draft, classes, probe.LAMBDAS)
    right = [each.right(choice) for each in drafts]
    best = max(range(len(drafts)), key=lambda place: (right[place], probe.LAMBDAS[place]))
    temperature = calibrate.temperature(drafts[best].logits(choice.values), choice.targets)
    (head,) = probe.ridge(learned, classes, [probe.LAMBDAS[best]])
    return Head(head.weight / temperature, head.bias / temperature)
