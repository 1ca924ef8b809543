"""`vitrail demo`: a Vision Transformer learns handwritten digits, from nothing, on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING

from vitrail import recipes
from vitrail.cli import output, runs

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset
    from vitrail.evaluate.predictions import Counts


def main(out: Path | None = None, resume: bool = False, json: bool = False) -> None:
    """Train a small ViT on 1,439 real digits of 8 x 8 pixels, and let it read 179 others. Takes two minutes.

    Args:
        out: The run's folder; runs/demo, runs/demo-2, ... unless told otherwise.
        resume: Go on with a demo that was interrupted.
        json: Print JSON.
    """
    import torch

    from vitrail.data.sources import open_dataset
    from vitrail.runtime.distributed import SINGLE_PROCESS
    from vitrail.train.run import RunResult
    from vitrail.train.training_run import TrainingRun

    dataset = open_dataset("digits")
    folder, resume = runs.choose_run_folder("demo", out, SINGLE_PROCESS, resume=resume, overwrite=False)
    recipe = recipes.get_recipe("digits")
    output.print_note(
        f"training {recipe.model} on {len(dataset.splits['train']):,} digits for {output.pluralize(recipe.epochs, 'epoch')}"
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing by a second thread, and loses much on a busy machine
    try:
        task = TrainingRun(recipe=recipe, dataset=dataset, device=torch.device("cpu"))
        nearest, (_, report) = _count_nearest_neighbor_right(dataset), runs.check_images(dataset, "digits")
        others = {"nearest neighbour by pixels": nearest}
        trained = runs.train_and_report(task, folder, data="digits", resume=resume, report=report, baselines=others)
    finally:
        torch.set_num_threads(before)
    assert isinstance(trained, RunResult), "the demo is one process, and has labels"
    result = trained.counts
    if json:
        facts = {"folder": str(folder), "images": result.images, "right": result.correct, "nearest_neighbour": nearest}
        output.print_json(facts)
        return
    output.print_table(
        [
            ("vision transformer", f"{result.correct} of {result.images} test digits right ({result.top1:.1%})"),
            ("nearest neighbour", f"{nearest} of {result.images} ({nearest / result.images:.1%}), by pixels"),
            ("mistakes", "; ".join(_list_mistakes(result)) or "none"),
            ("run", str(folder)),
            ("report", f"{folder}/report.html"),
        ]
    )


def _list_mistakes(counts: "Counts") -> list[str]:
    """What was taken for what, the most frequent first."""
    confusion = counts.confusion.clone().fill_diagonal_(0)
    pairs = sorted(((int(count), true, said) for true, row in enumerate(confusion) for said, count in enumerate(row)))
    return [
        f"{true} read as {said}{f' {count} times' if count > 1 else ''}" for count, true, said in pairs[::-1] if count
    ]


def _count_nearest_neighbor_right(dataset: "Dataset") -> int:
    """Test digits that the most similar training digit names rightly: the simplest of baselines."""
    import torch

    from vitrail.data.loader import load_resident_images

    splits = (
        load_resident_images(dataset.splits[name], channels=1, num_classes=10, device="cpu")
        for name in ("train", "test")
    )
    (train, labels), (test, truth) = (found for found in splits if found is not None)
    nearest = torch.cdist(test.flatten(1).float(), train.flatten(1).float()).argmin(dim=1)
    return int((labels[nearest] == truth).sum())
