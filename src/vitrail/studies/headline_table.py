"""The headline table: accuracies of finished studies next to the paper's (Dosovitskiy et al. 2021, table 2)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitrail import recipes
from vitrail.errors import UsageError
from vitrail.evaluation import label_matching
from vitrail.formatting import pluralize
from vitrail.studies import grid, sweep, vtab

UNPUBLISHED_NOTE = "weights never published"
VTAB_ROW, COST_ROW = "VTAB (19 tasks)", "TPUv3-core-days"


class PaperColumn(NamedTuple):
    """A column of the paper's table, in percent, with ± where the paper states it."""

    title: str
    cells: tuple[str, ...]
    is_unpublished: bool = False


# fmt: off
ROWS = ("ImageNet", "ImageNet ReaL", "CIFAR-10", "CIFAR-100", "Oxford-IIIT Pets", "Oxford Flowers-102", VTAB_ROW,
        COST_ROW)
PAPER_COLUMNS = (
    PaperColumn("ViT-H/14 (JFT)", ("88.55 ± 0.04", "90.72 ± 0.05", "99.50 ± 0.06", "94.55 ± 0.04", "97.56 ± 0.03",
                                 "99.68 ± 0.02", "77.63 ± 0.23", "2.5k"), is_unpublished=True),
    PaperColumn("ViT-L/16 (JFT)", ("87.76 ± 0.03", "90.54 ± 0.03", "99.42 ± 0.03", "93.90 ± 0.05", "97.32 ± 0.11",
                                 "99.74 ± 0.00", "76.28 ± 0.46", "0.68k"), is_unpublished=True),
    PaperColumn("ViT-L/16 (I21k)", ("85.30 ± 0.02", "88.62 ± 0.05", "99.15 ± 0.03", "93.25 ± 0.05", "94.67 ± 0.15",
                                  "99.61 ± 0.02", "72.72 ± 0.21", "0.23k")),
    PaperColumn("BiT-L (R152x4)", ("87.54 ± 0.02", "90.54", "99.37 ± 0.06", "93.51 ± 0.08", "96.62 ± 0.23",
                                 "99.63 ± 0.03", "76.29 ± 1.70", "9.9k"), is_unpublished=True),
    PaperColumn("Noisy Student (EffNet-L2)", ("88.4 / 88.5", "90.55", "-", "-", "-", "-", "-", "12.3k")),
)
# fmt: on
_PAPER_DATASETS = {  # a row -> the pattern of its dataset's name, and the number of test images
    "ImageNet": (r"imagenet-?(1k|2012)?|ilsvrc-?(2012)?", 50_000),
    "CIFAR-10": (r"cifar-?10", 10_000),
    "CIFAR-100": (r"cifar-?100", 10_000),
    "Oxford-IIIT Pets": (r"(oxford-?)?(iiit-?)?pets?", 3_669),
    "Oxford Flowers-102": (r"(oxford-?)?flowers-?(102)?", 6_149),
}


class TableEntry(NamedTuple):
    """One cell of the table, from a study."""

    row: str
    model: str
    text: str
    note: str
    """How it differs from the paper's experiment; empty if it does not."""
    facts: dict[str, Any]


def read_entry(folder: Path) -> TableEntry:
    """The table entry of a study's folder."""
    study = grid.read_study(folder)
    results = list(grid.read_results(folder).values())
    if study["study"] == "sweep":
        row, facts = _get_row_name(study["dataset"]), sweep.summarize_sweep(study, results)
        notes = _list_sweep_notes(study, facts, row)
    elif study["study"] == "vtab":
        row, facts = VTAB_ROW, vtab.summarize_vtab(study, results)
        notes = _list_vtab_notes(study, facts)
    else:
        raise UsageError(f"{folder} is a study {study['study']!r}; the table has rows for sweep and vtab")
    if facts["mean"] is None:
        raise UsageError(f"{folder} has no result on test yet; the command that started it continues it")
    return TableEntry(row, _get_model_name(study["model"]), format_mean_and_std(facts), "; ".join(notes), facts)


def _list_sweep_notes(study: Mapping[str, Any], facts: Mapping[str, Any], row: str) -> Iterator[str]:
    """How a sweep differs from the paper's."""
    if facts["n"] < study["runs"]:
        yield f"{facts['n']} of {study['runs']} runs"
    yield from _list_recipe_notes(study, compute_paper_steps(study["images"]["train"] + study["images"]["val"]))
    if study.get("val_is_test"):
        yield f"{study['share']:.0%} of train held out to choose by, evaluated on val"
    if row in _PAPER_DATASETS and facts["images"] != (paper_images := _PAPER_DATASETS[row][1]):
        yield f"{facts['images']:,} test images, not {paper_images:,}"


def _list_vtab_notes(study: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    """How a run of VTAB differs from the paper's."""
    if len(facts["tasks"]) < facts["of"]:
        yield f"{len(facts['tasks'])} of {facts['of']} tasks"
    yield from _list_recipe_notes(study, vtab.DEFAULT_STEPS)
    if own_draws := sum(task["draw"] != "VTAB" for task in facts["tasks"].values()):
        yield f"{own_draws} tasks on vitrail's own draws"


def _list_recipe_notes(study: Mapping[str, Any], steps: int) -> Iterator[str]:
    recipe = study["recipe"]
    if study["steps"] != steps or recipe["batch"] != 512 or abs(recipe["image_size"] - 384) > 16:
        yield f"{study['steps']:,} steps of {pluralize(recipe['batch'], 'image')} at {recipe['image_size']} pixels"
    if study.get("settings"):
        yield ", ".join(study["settings"])


def compute_paper_steps(images: int) -> int:
    """The number of steps of the paper's recipe for a number of training images."""
    recipe = recipes.build_finetune_recipe("paper", images, 1)
    return round(recipe.epochs * images / recipe.batch)


def read_real_entries(folders: Sequence[Path], path: Path) -> list[TableEntry]:
    """The entries for ReaL labels (Beyer et al. 2020), from the predictions of ImageNet sweeps' runs on test."""
    studies = [(folder, grid.read_study(folder)) for folder in folders]
    entries = [
        _make_real_entry(folder, study, path)
        for folder, study in studies
        if study["study"] == "sweep" and _get_row_name(study["dataset"]) == ROWS[0]
    ]
    if not entries:
        raise UsageError(f"--real {path} is for sweeps of ImageNet, and none of the studies is one")
    return entries


def _make_real_entry(folder: Path, study: Mapping[str, Any], path: Path) -> TableEntry:
    results = grid.read_results(folder)
    facts = sweep.summarize_sweep(study, list(results.values()))
    accuracies = [
        label_matching.compute_real_accuracy(folder / grid.CELLS_FOLDER / name / "run" / "predictions.csv", path)
        for name, result in results.items()
        if (result["stage"], result["status"], result["lr"]) == ("test", "done", facts["lr"])
    ]
    summary = grid.compute_mean_and_std(accuracies)
    notes = "; ".join(_list_sweep_notes(study, facts, ROWS[0]))
    model, text = _get_model_name(study["model"]), format_mean_and_std(summary)
    return TableEntry(ROWS[1], model, text, notes, summary | {"real": str(path)})


def format_core_days(days: float) -> str:
    """Core-days as the paper writes them: 680 -> 0.68k."""
    return f"{days / 1000:.2g}k" if days >= 10 else f"{days:.2g}"


def _get_row_name(name: str) -> str:
    """The paper's name for a dataset, or its own."""
    last_part = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    rows = (row for row, (pattern, _) in _PAPER_DATASETS.items() if re.fullmatch(pattern, last_part))
    return next(rows, last_part)


def _get_model_name(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def format_mean_and_std(summary: Mapping[str, Any]) -> str:
    """Mean and standard deviation as the paper writes them."""
    text = f"{100 * summary['mean']:.2f}"
    return text if summary["std"] is None else f"{text} ± {100 * summary['std']:.2f}"


def build_table(entries: Sequence[TableEntry]) -> tuple[list[list[str]], list[str]]:
    """The rows of the table, the header first, and the notes to which its cells refer."""
    models = list(dict.fromkeys(entry.model for entry in entries))
    other_rows = dict.fromkeys(entry.row for entry in entries if entry.row not in ROWS)
    titles = [*ROWS[:-2], *other_rows, VTAB_ROW, COST_ROW]
    notes: list[str] = []
    cells: dict[tuple[str, str], str] = {}
    for entry in entries:
        if (entry.row, entry.model) in cells:
            raise UsageError(f"two studies are of {entry.model} on {entry.row}; give one of them")
        if entry.note and entry.note not in notes:
            notes.append(entry.note)
        reference = f" [{notes.index(entry.note) + 1}]" if entry.note else ""
        cells[entry.row, entry.model] = entry.text + reference
    paper_titles = (f"{c.title}, {UNPUBLISHED_NOTE}" if c.is_unpublished else c.title for c in PAPER_COLUMNS)
    rows = [["", *models, *paper_titles]]
    for title in titles:
        published = [column.cells[ROWS.index(title)] if title in ROWS else "-" for column in PAPER_COLUMNS]
        rows.append([title, *(cells.get((title, model), "-") for model in models), *published])
    return rows, notes


def render_markdown(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """The table and its notes as Markdown."""
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join([*lines, *(f"\n[{number}] {note}" for number, note in enumerate(notes, start=1))])
