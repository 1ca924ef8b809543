"""`vitrail demo`: a Vision Transformer learns handwritten digits, from nothing, on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING

from vitrail import recipes
from vitrail.cli import runs, show

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset
    from vitrail.evaluate.classify import Counts


def main(out: Path | None = None, resume: bool = False, json: bool = False) -> None:
    """Train a small ViT on 1,439 real digits of 8 x 8 pixels, and let it read 179 others. Takes two minutes.

    Args:
        out: The run's folder; runs/demo, runs/demo-2, ... unless told otherwise.
        resume: Go on with a demo that was interrupted.
        json: Print JSON.
    """
    import torch

    from vitrail.data.sources import open_data
    from vitrail.train.distributed import ALONE
    from vitrail.train.run import Result
    from vitrail.train.task import Task

    dataset = open_data("digits")
    folder, resume = runs.place("demo", out, ALONE, resume=resume, overwrite=False)
    recipe = recipes.named("digits")
    show.note(
        f"training {recipe.model} on {len(dataset.splits['train']):,} digits for {show.plural(recipe.epochs, 'epoch')}"
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing by a second thread, and loses much on a busy machine
    try:
        task = Task(recipe=recipe, dataset=dataset, device=torch.device("cpu"))
        nearest, (_, report) = _nearest_neighbour(dataset), runs.check_images(dataset, "digits")
        others = {"nearest neighbour by pixels": nearest}
        trained = runs.trained(task, folder, data="digits", resume=resume, report=report, baselines=others)
    finally:
        torch.set_num_threads(before)
    assert isinstance(trained, Result), "the demo is one process, and has labels"
    result = trained.counts
    if json:
        facts = {"folder": str(folder), "images": result.images, "right": result.right, "nearest_neighbour": nearest}
        show.as_json(facts)
        return
    show.table(
        [
            ("vision transformer", f"{result.right} of {result.images} test digits right ({result.top1:.1%})"),
            ("nearest neighbour", f"{nearest} of {result.images} ({nearest / result.images:.1%}), by pixels"),
            ("mistakes", "; ".join(_mistakes(result)) or "none"),
            ("run", str(folder)),
            ("report", f"{folder}/report.html"),
        ]
    )


def _mistakes(result: "Counts") -> list[str]:
    """What was taken for what, the most frequent first."""
    confusion = result.confusion.clone().fill_diagonal_(0)
    pairs = sorted(((int(count), true, said) for true, row in enumerate(confusion) for said, count in enumerate(row)))
    return [
        f"{true} read as {said}{f' {count} times' if count > 1 else ''}" for count, true, said in pairs[::-1] if count
    ]


def _nearest_neighbour(dataset: "Dataset") -> int:
    """Test digits that the most similar training digit names rightly: the simplest of baselines."""
    import torch

    from vitrail.data.loader import resident

    splits = (resident(dataset.splits[name], channels=1, classes=10, device="cpu") for name in ("train", "test"))
    (train, labels), (test, truth) = (found for found in splits if found is not None)
    nearest = torch.cdist(test.flatten(1).float(), train.flatten(1).float()).argmin(dim=1)
    return int((labels[nearest] == truth).sum())
