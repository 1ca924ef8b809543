"""A new head that starts from a probe: the best linear classifier of the model's features before training.

A zero head spends the first steps on what a closed-form regression finds at once, and passes noise to the layers below
while it learns (Kumar et al. 2022, linear probing and then fine-tuning). The probe takes one forward pass over the
training images, prepared as for evaluation.
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.dataset import Split
from vitrail.evaluation import calibration, features, probe
from vitrail.evaluation.linear_classifiers import Features, LinearHead, solve_ridge
from vitrail.runtime import distributed
from vitrail.runtime.workers import ProgressCallback, ShowProgress, ignore_progress
from vitrail.training.checkpoint import list_checkpoints
from vitrail.training.loop import iterate_split_batches
from vitrail.training.training_run import TrainingRun

_MAX_PROBE_SHARE = 0.25  # of a run's time may be spent on the features that its head starts from
_MIN_PROBE_IMAGES_PER_CLASS = 4  # on average


def start_head_from_probe(run: TrainingRun, folder: Path, *, resume: bool, show_progress: ShowProgress) -> TrainingRun:
    """The run with a head fitted to its features, if its recipe asks for it and no checkpoint is resumed.

    It uses a quarter of the run's time at most, but a few images of each class.
    """
    has_checkpoint = distributed.run_on_rank0(lambda: resume and bool(list_checkpoints(folder / "checkpoints")))
    if has_checkpoint or run.recipe.head_init is None:
        return run
    max_images = max(
        round(_MAX_PROBE_SHARE * 3 * run.plan.total_samples),  # a training image costs three forward passes
        _MIN_PROBE_IMAGES_PER_CLASS * len(run.dataset.classes),
    )
    with show_progress("features for the head") as progress:
        return fit_head(run, max_images, progress=progress)


def fit_head(
    run: TrainingRun, max_images: int | None = None, *, progress: ProgressCallback = ignore_progress
) -> TrainingRun:
    """The run with a head fitted to the features of its training images, instead of the zero head.

    It uses `max_images` at most, those that training sees first.
    """
    start = run.initial_model
    assert start is not None, "random weights have no features worth a probe"
    split = run.train_split
    if max_images is not None and max_images < len(split):
        indices = run.training_data.order.get_sample_indices(np.arange(max(max_images, 1)))
        split = Split(split.store, np.asarray(split.rows)[np.sort(indices)])
    model = start.model.to(run.device)
    batches = iterate_split_batches(run, split, run.group)
    values = features.extract_features(model, batches, run.preprocess, num_images=len(split), progress=progress)
    model.cpu()
    train_features = Features(values, features.read_labels(split))
    if run.dataset.skip_bad:  # the rows of images that cannot be read are zero
        train_features = train_features.select(values.any(dim=1).nonzero()[:, 0])
    head = solve_head(train_features, len(run.dataset.classes))
    fitted = probe.replace_head(start, head, run.dataset.classes, 1.0, "")
    return dataclasses.replace(run, initial_model=dataclasses.replace(fitted, origin=start.origin))


def solve_head(train_features: Features, classes: int) -> LinearHead:
    """The ridge regression with the best penalty, its outputs scaled to calibrated logits.

    Penalty and scale have the lowest loss on a fifth of each class that a first fit has not seen.
    """
    held_out = probe.choose_holdout(train_features.targets)
    draft, choice = train_features.select((~held_out).nonzero()[:, 0]), train_features.select(held_out.nonzero()[:, 0])
    if not len(choice.targets):  # one image a class
        return LinearHead(
            train_features.values.new_zeros(classes, train_features.values.shape[1]),
            train_features.values.new_zeros(classes),
        )
    scores = [
        _fit_scale(head.compute_logits(choice.values), choice.targets)
        for head in solve_ridge(draft, classes, probe.LAMBDA_GRID)
    ]
    (_, scale), penalty = min(zip(scores, probe.LAMBDA_GRID, strict=True))
    (head,) = solve_ridge(train_features, classes, [penalty])
    return LinearHead(head.weight * scale, head.bias * scale)


def _fit_scale(outputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """The lowest mean loss of a multiple of the outputs, and that multiple."""
    spread = float(outputs.std(dim=1).mean()) or 1.0  # a large penalty makes outputs small, and only their ratios count
    scale = 1 / spread / calibration.fit_temperature(outputs / spread, targets, prior_std=math.inf)
    return float(F.cross_entropy(outputs * scale, targets)), scale
