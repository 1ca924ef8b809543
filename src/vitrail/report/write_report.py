"""report.html and README.md of a run's folder."""

from pathlib import Path

import torch

from vitrail.data.dataset import Dataset
from vitrail.errors import DataError
from vitrail.files import write_atomically
from vitrail.report.html_report import render_page
from vitrail.report.model_card import build_card
from vitrail.report.model_figures import ModelFigures, find_run_images, make_model_figures
from vitrail.report.run_facts import RunFacts, gather_facts
from vitrail.weights.load import load
from vitrail.weights.trained import Trained

REPORT_FILE, CARD_FILE = "report.html", "README.md"
NO_TIME_NOTE = "The run's time limit left none for figures of the model: vitrail report RUN draws them."


def write_report(
    folder: Path, dataset: Dataset | str, device: torch.device, out: Path | None = None, *, with_figures: bool = True
) -> RunFacts:
    """Write a run's page, and its card where the run has ended and has none; what was found in the folder.

    In place of the set may stand a sentence that says why its images cannot be shown. A card that is there stays: it
    may have been edited. Without `figures` the page has none that the model must compute.
    """
    facts = gather_facts(folder)
    weights = folder / "weights" / "best.safetensors"
    trained = load(weights) if weights.is_file() else None
    described = None if trained is None else build_card(trained, facts)
    inside = _make_figures(facts, trained, dataset, device) if with_figures else NO_TIME_NOTE
    text = render_page(facts, trained, inside, described)
    with write_atomically(out or folder / REPORT_FILE, overwrite=True) as fresh:
        fresh.write_text(text, encoding="utf-8")
    if described is not None and facts.has_result and not (folder / CARD_FILE).exists():
        with write_atomically(folder / CARD_FILE) as fresh:
            fresh.write_text(described.to_markdown(), encoding="utf-8")
    return facts


def _make_figures(
    facts: RunFacts, trained: Trained | None, dataset: Dataset | str, device: torch.device
) -> ModelFigures | str:
    if trained is None:
        return "No weights have been kept yet."
    if isinstance(dataset, str):
        return make_model_figures(facts, trained, dataset, device)
    try:
        return make_model_figures(facts, trained, find_run_images(facts, dataset), device)
    except DataError as error:  # an image is not there, or not what it was
        return make_model_figures(
            facts, trained, f"The images cannot be shown: {facts.clean_text(str(error))}.", device
        )
