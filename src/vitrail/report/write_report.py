"""Write report.html and README.md, the model card, into a run's folder."""

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
NO_TIME_NOTE = "The run's time limit left no time for figures of the model: `vitrail report RUN` draws them."


def write_report(
    folder: Path, dataset: Dataset | str, device: torch.device, out: Path | None = None, *, with_figures: bool = True
) -> RunFacts:
    """Write a run's report, and its model card if the run has ended and has none; return the facts of the run.

    `dataset` may be a sentence that says why its images cannot be shown. An existing card stays: it may have been
    edited. `with_figures=False` omits the figures that the model must compute.
    """
    facts = gather_facts(folder)
    weights = folder / "weights" / "best.safetensors"
    trained = load(weights) if weights.is_file() else None
    card = None if trained is None else build_card(trained, facts)
    figures = _make_figures(facts, trained, dataset, device) if with_figures else NO_TIME_NOTE
    page = render_page(facts, trained, figures, card)
    with write_atomically(out or folder / REPORT_FILE, overwrite=True) as temporary:
        temporary.write_text(page, encoding="utf-8")
    if card is not None and facts.has_result and not (folder / CARD_FILE).exists():
        with write_atomically(folder / CARD_FILE) as temporary:
            temporary.write_text(card.to_markdown(), encoding="utf-8")
    return facts


def _make_figures(
    facts: RunFacts, trained: Trained | None, dataset: Dataset | str, device: torch.device
) -> ModelFigures | str:
    if trained is None:
        return "There are no weights yet."
    if isinstance(dataset, str):
        return make_model_figures(facts, trained, dataset, device)
    try:
        return make_model_figures(facts, trained, find_run_images(facts, dataset), device)
    except DataError as error:  # an image is missing or has changed
        return make_model_figures(
            facts, trained, f"The images cannot be shown: {facts.clean_text(str(error))}.", device
        )
