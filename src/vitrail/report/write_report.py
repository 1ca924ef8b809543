"""Write report.html and README.md, the model card, into a run's folder: when training ends, or again later."""

import shlex
from pathlib import Path

import torch
from jinja2 import TemplateError

from vitrail.data.dataset import Dataset
from vitrail.errors import DataError, VitrailError
from vitrail.files import write_atomically
from vitrail.report import result_files
from vitrail.report.html_report import render_page
from vitrail.report.model_card import build_card
from vitrail.report.model_figures import ModelFigures, find_run_images, make_model_figures
from vitrail.report.run_facts import RunFacts, gather_facts
from vitrail.runtime.workers import Notify
from vitrail.training.run_results import PretrainingResult, RunResult
from vitrail.training.time_estimate import Deadline
from vitrail.training.training_run import TrainingRun
from vitrail.weights.load import load
from vitrail.weights.trained import Trained

REPORT_FILE, CARD_FILE = "report.html", "README.md"
NO_TIME_NOTE = "The run's time limit left no time for figures of the model: `vitrail report RUN` draws them."
_REPORT_ERRORS = (
    VitrailError, OSError, MemoryError, RuntimeError, TemplateError,
    ArithmeticError, LookupError, TypeError, ValueError,  # what a file may lead to that no check knows
)  # fmt: skip


def write_run_outputs(
    run: TrainingRun, result: RunResult | PretrainingResult, folder: Path, deadline: Deadline | None, notify: Notify
) -> None:
    """Draw the figures of a finished run, and write its report and card."""
    result_files.draw_run_images(run, result, folder)
    write_run_report(run, folder, deadline, notify)


def write_run_report(run: TrainingRun, folder: Path, deadline: Deadline | None, notify: Notify) -> None:
    """Write a finished run's report and card. An error here is reported and costs the run nothing."""
    command = shlex.join(["vitrail", "report", str(folder)])
    try:
        has_time = deadline is None or deadline.seconds_left > deadline.figure_seconds
        write_report(folder, run.dataset, run.device, with_figures=has_time)
        notify(f"report: {folder / REPORT_FILE}")
        if not has_time:
            notify(f"note: no time was left for the report's figures of the model: `{command}` draws them")
    except _REPORT_ERRORS as error:
        notify(f"warning: the report is not written ({' '.join(str(error).split())}); `{command}` does it")


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
