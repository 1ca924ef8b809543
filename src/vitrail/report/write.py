"""report.html and README.md of a run's folder."""

from pathlib import Path

import torch

from vitrail.data.dataset import Dataset
from vitrail.errors import DataError
from vitrail.files import replacing
from vitrail.report.card import card
from vitrail.report.gather import Facts, gather
from vitrail.report.inside import Inside, found, look
from vitrail.report.page import page
from vitrail.weights.load import load
from vitrail.weights.trained import Trained

PAGE, CARD = "report.html", "README.md"
NO_TIME = "The run's time limit left none for figures of the model: vitrail report RUN draws them."


def write(
    folder: Path, dataset: Dataset | str, device: torch.device, out: Path | None = None, *, figures: bool = True
) -> Facts:
    """Write a run's page, and its card where the run has ended and has none; what was found in the folder.

    In place of the set may stand a sentence that says why its images cannot be shown. A card that is there stays: it
    may have been edited. Without `figures` the page has none that the model must compute.
    """
    facts = gather(folder)
    weights = folder / "weights" / "best.safetensors"
    trained = load(weights) if weights.is_file() else None
    described = None if trained is None else card(trained, facts)
    inside = _inside(facts, trained, dataset, device) if figures else NO_TIME
    text = page(facts, trained, inside, described)
    with replacing(out or folder / PAGE, overwrite=True) as fresh:
        fresh.write_text(text, encoding="utf-8")
    if described is not None and facts.ended_well and not (folder / CARD).exists():
        with replacing(folder / CARD) as fresh:
            fresh.write_text(described.markdown(), encoding="utf-8")
    return facts


def _inside(facts: Facts, trained: Trained | None, dataset: Dataset | str, device: torch.device) -> Inside | str:
    if trained is None:
        return "No weights have been kept yet."
    if isinstance(dataset, str):
        return look(facts, trained, dataset, device)
    try:
        return look(facts, trained, found(facts, dataset), device)
    except DataError as error:  # an image is not there, or not what it was
        return look(facts, trained, f"The images cannot be shown: {facts.plain(str(error))}.", device)
