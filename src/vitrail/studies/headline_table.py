"""The headline table: accuracies of finished studies beside the paper's (Dosovitskiy et al. 2021, table 2)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitrail import recipes
from vitrail.errors import UsageError
from vitrail.evaluate import label_matching
from vitrail.formatting import pluralize
from vitrail.studies import grid, sweep, vtab

UNPUBLISHED_NOTE = "weights never published"
VTAB_ROW, COST_ROW = "VTAB (19 tasks)", "TPUv3-core-days"


class PaperColumn(NamedTuple):
    """A column of the paper's table, in percent; ± where it states one."""

    title: str
    cells: tuple[str, ...]
    is_unpublished: bool = False


ROWS = (
    "ImageNet",
    "ImageNet ReaL",
    "CIFAR-10",
    "CIFAR-100",
    "Oxford-IIIT Pets",
    "Oxford Flowers-102",
    VTAB_ROW,
    COST_ROW,
)
# fmt: off
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
_PAPER_TEST_IMAGES = {  # test images of the paper's sets
    "ImageNet": 50_000,
    "CIFAR-10": 10_000,
    "CIFAR-100": 10_000,
    "Oxford-IIIT Pets": 3_669,
    "Oxford Flowers-102": 6_149,
}
_DATASET_PATTERNS = {  # what a set's name says
    r"imagenet-?(1k|2012)?|ilsvrc-?(2012)?": "ImageNet",
    r"cifar-?10": "CIFAR-10",
    r"cifar-?100": "CIFAR-100",
    r"(oxford-?)?(iiit-?)?pets?": "Oxford-IIIT Pets",
    r"(oxford-?)?flowers-?(102)?": "Oxford Flowers-102",
}


class TableEntry(NamedTuple):
    """What a study adds to the table."""

    row: str
    model: str
    text: str
    note: str
    """How it differs from what the paper did; empty where it does not."""
    facts: dict[str, Any]


def read_entry(folder: Path) -> TableEntry:
    """The row and column of a study's folder, and what stands there."""
    study = grid.read_study(folder)
    records = list(grid.read_results(folder).values())
    if study["study"] == "sweep":
        row, facts = _get_row_name(study["dataset"]), sweep.summarize_sweep(study, records)
        notes = _list_sweep_notes(study, facts, row)
    elif study["study"] == "vtab":
        row, facts = VTAB_ROW, vtab.summarize_vtab(study, records)
        notes = _list_vtab_notes(study, facts)
    else:
        raise UsageError(f"{folder} is a study {study['study']!r}; the table has rows for sweep and vtab")
    if facts["mean"] is None:
        raise UsageError(f"{folder} has no result on test yet; the command that began it goes on")
    return TableEntry(row, _get_model_name(study["model"]), format_mean_and_std(facts), "; ".join(notes), facts)


def _list_sweep_notes(study: Mapping[str, Any], facts: Mapping[str, Any], row: str) -> Iterator[str]:
    """What a sweep did otherwise than the paper."""
    if facts["n"] < study["runs"]:
        yield f"{facts['n']} of {study['runs']} runs"
    yield from _list_recipe_notes(study, compute_paper_steps(study["images"]["train"] + study["images"]["val"]))
    if study.get("val_is_test"):
        yield f"{study['share']:.0%} of train held out to choose by, measured on val"
    if facts["images"] != (whole := _PAPER_TEST_IMAGES.get(row, facts["images"])):
        yield f"{facts['images']:,} test images, not {whole:,}"


def _list_vtab_notes(study: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    """What a run of the benchmark did otherwise than the paper."""
    if len(facts["tasks"]) < facts["of"]:
        yield f"{len(facts['tasks'])} of {facts['of']} tasks"
    yield from _list_recipe_notes(study, vtab.DEFAULT_STEPS)
    if own := sum(task["draw"] != "VTAB" for task in facts["tasks"].values()):
        yield f"{own} tasks on draws of vitrail's own"


def _list_recipe_notes(study: Mapping[str, Any], steps: int) -> Iterator[str]:
    recipe = study["recipe"]
    if study["steps"] != steps or recipe["batch"] != 512 or abs(recipe["image_size"] - 384) > 16:
        yield f"{study['steps']:,} steps of {pluralize(recipe['batch'], 'image')} at {recipe['image_size']} pixels"
    if study.get("settings"):
        yield ", ".join(study["settings"])


def compute_paper_steps(images: int) -> int:
    """The steps that the paper's recipe takes for a set of so many training images."""
    made = recipes.build_finetune_recipe("paper", images, 1)
    return round(made.epochs * images / made.batch)


def read_real_entries(folders: Sequence[Path], path: Path) -> list[TableEntry]:
    """The row of ReaL labels (Beyer et al. 2020), of the sweeps of ImageNet: from what their runs on test predicted."""
    found = []
    for folder in folders:
        study = grid.read_study(folder)
        if study["study"] != "sweep" or _get_row_name(study["dataset"]) != ROWS[0]:
            continue
        facts = sweep.summarize_sweep(study, list(grid.read_results(folder).values()))
        done = [
            name
            for name, record in grid.read_results(folder).items()
            if (record["stage"], record["status"], record["lr"]) == ("test", "done", facts["lr"])
        ]
        shares = [
            label_matching.compute_real_accuracy(folder / grid.CELLS_FOLDER / name / "run" / "predictions.csv", path)
            for name in done
        ]
        summary = sweep.compute_mean_and_std(shares)
        notes = "; ".join(_list_sweep_notes(study, facts, ROWS[0]))
        found.append(
            TableEntry(
                ROWS[1],
                _get_model_name(study["model"]),
                format_mean_and_std(summary),
                notes,
                summary | {"real": str(path)},
            )
        )
    if not found:
        raise UsageError(f"--real {path} is for sweeps of ImageNet, and none of the studies is one")
    return found


def format_core_days(days: float) -> str:
    """Core-days as the paper writes them: 680 -> 0.68k."""
    return f"{days / 1000:.2g}k" if days >= 10 else f"{days:.2g}"


def _get_row_name(name: str) -> str:
    """The paper's name of a set, or its own."""
    last = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    return next((title for form, title in _DATASET_PATTERNS.items() if re.fullmatch(form, last)), last)


def _get_model_name(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def format_mean_and_std(summary: Mapping[str, Any]) -> str:
    """Mean and standard deviation as the paper writes them."""
    text = f"{100 * summary['mean']:.2f}"
    return text if summary["std"] is None else f"{text} ± {100 * summary['std']:.2f}"


def build_table(entries: Sequence[TableEntry]) -> tuple[list[list[str]], list[str]]:
    """The table's rows, the first its heads, and the notes that its cells refer to."""
    models = list(dict.fromkeys(one.model for one in entries))
    own = dict.fromkeys(one.row for one in entries if one.row not in ROWS)
    titles = [*ROWS[:-2], *own, VTAB_ROW, COST_ROW]
    notes: list[str] = []
    cells: dict[tuple[str, str], str] = {}
    for one in entries:
        if (one.row, one.model) in cells:
            raise UsageError(f"two studies are of {one.model} on {one.row}; give one of them")
        if one.note and one.note not in notes:
            notes.append(one.note)
        mark = f" [{notes.index(one.note) + 1}]" if one.note else ""
        cells[one.row, one.model] = one.text + mark
    heads = [
        "",
        *models,
        *(f"{each.title}, {UNPUBLISHED_NOTE}" if each.is_unpublished else each.title for each in PAPER_COLUMNS),
    ]
    rows = [heads]
    for title in titles:
        published = [each.cells[ROWS.index(title)] if title in ROWS else "-" for each in PAPER_COLUMNS]
        rows.append([title, *(cells.get((title, model), "-") for model in models), *published])
    return rows, notes


def render_markdown(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """The table as text that is a table."""
    lines = ["| " + " | ".join(_escape_cell(cell) for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join([*lines, *(f"\n[{number}] {note}" for number, note in enumerate(notes, start=1))])


def _escape_cell(text: str) -> str:
    return text.replace("|", r"\|")
