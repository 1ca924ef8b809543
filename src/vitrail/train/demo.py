"""The demo: a small Vision Transformer learns handwritten digits beside a nearest neighbor by pixels."""

from pathlib import Path
from typing import NamedTuple

import torch

from vitrail import recipes
from vitrail.data.dataset import Dataset
from vitrail.data.loader import load_resident_images
from vitrail.data.sources import open_dataset
from vitrail.evaluate.predictions import Counts
from vitrail.formatting import pluralize
from vitrail.runtime.distributed import SINGLE_PROCESS
from vitrail.train.dataset_checks import check_images
from vitrail.train.run_execution import RunCallbacks, RunOptions, execute_run
from vitrail.train.run_folder import choose_run_folder
from vitrail.train.run_results import RunResult
from vitrail.train.training_run import TrainingRun


class DemoResult(NamedTuple):
    """The result of the demo."""

    folder: Path
    counts: Counts
    nearest_neighbor: int
    """Test digits that the nearest neighbor classifies correctly."""

    def list_mistakes(self) -> list[str]:
        """Which digit was read as which, the most frequent first."""
        confusion = self.counts.confusion.clone().fill_diagonal_(0)
        mistakes = sorted(
            (int(count), true, predicted)
            for true, row in enumerate(confusion)
            for predicted, count in enumerate(row)
            if count
        )
        return [
            f"{true} read as {predicted}{f' {count} times' if count > 1 else ''}"
            for count, true, predicted in reversed(mistakes)
        ]


def run_demo(out: str | None, *, resume: bool, callbacks: RunCallbacks) -> DemoResult:
    """Train the recipe digits on the CPU in a run folder; it takes two minutes."""
    dataset, recipe = open_dataset("digits"), recipes.get_recipe("digits")
    folder, resume = choose_run_folder(
        "demo", out, SINGLE_PROCESS, resume=resume, overwrite=False, notify=callbacks.notify
    )
    images, epochs = len(dataset.splits["train"]), pluralize(recipe.epochs, "epoch")
    callbacks.notify(f"training {recipe.model} on {images:,} digits for {epochs}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing by a second thread, and loses much on a busy machine
    try:
        run = TrainingRun(recipe=recipe, dataset=dataset, device=torch.device("cpu"))
        nearest_neighbor = _count_nearest_neighbor_correct(dataset)
        _, audit = check_images(dataset, "digits", notify=callbacks.notify, show_progress=callbacks.show_progress)
        result = execute_run(
            run,
            folder,
            "digits",
            RunOptions(),
            callbacks,
            resume=resume,
            audit=audit,
            baselines={"nearest neighbor by pixels": nearest_neighbor},
        )
    finally:
        torch.set_num_threads(threads)
    assert isinstance(result, RunResult), "the demo is one process, and has labels"
    return DemoResult(folder, result.counts, nearest_neighbor)


def _count_nearest_neighbor_correct(dataset: Dataset) -> int:
    """Test digits whose most similar training digit has the same label: the simplest baseline."""
    splits = (
        load_resident_images(dataset.splits[name], channels=1, num_classes=10, device="cpu")
        for name in ("train", "test")
    )
    (train, train_labels), (test, test_labels) = (images for images in splits if images is not None)
    nearest = torch.cdist(test.flatten(1).float(), train.flatten(1).float()).argmin(dim=1)
    return int((train_labels[nearest] == test_labels).sum())
