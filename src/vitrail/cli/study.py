"""`vitrail study ablate|sweep|table|vtab`: the paper's experiments."""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail import recipes
from vitrail.cli import output, training_output
from vitrail.cli.arguments.studies import (
    AblateArguments,
    FindingsArguments,
    SweepArguments,
    TableArguments,
    VtabArguments,
)
from vitrail.cli.options import StudyOptions
from vitrail.config import to_json
from vitrail.data.sources import open_dataset
from vitrail.errors import UsageError
from vitrail.files import write_atomically
from vitrail.formatting import pluralize
from vitrail.runtime.workers import count_available_cores
from vitrail.studies import ablation, findings, grid, headline_table, sweep, vtab
from vitrail.studies.grid import Cell, CellResult
from vitrail.studies.headline_table import TableEntry
from vitrail.studies.sweep import Sweep
from vitrail.studies.vtab_tasks import get_task
from vitrail.training import plan
from vitrail.training.dataset_checks import check_classes
from vitrail.training.finetune import set_preprocess
from vitrail.training.recipe_overrides import RecipeOverrides, choose_loss, override_recipe, shorten_warmup
from vitrail.visualization import plots
from vitrail.weights.load import check_loadable, load


def choose_study_folder(out: Path | None, *words: str) -> Path:
    """The folder that was given, or one named after these words: the same command finds it again."""
    if out is not None:
        return out
    parts = (re.sub(r"[^\w.]+", "-", word.rstrip("/").rpartition("/")[2]).strip("-.") for word in words)
    return Path("runs") / "-".join(parts)


def make_runner(
    folder: Path, lock: tuple[int, ...], options: StudyOptions
) -> Callable[[Sequence[Cell]], list[CellResult]]:
    """A function that computes cells of the study in the folder, on the devices that were named."""
    if options.workers is not None and options.workers < 0:
        raise UsageError(f"--workers is {options.workers}; it must be 0 or more")
    grid.check_positive(parallel=options.parallel)
    devices = grid.list_devices(options.device, options.parallel)
    default = max(0, count_available_cores() // len(devices) - 1)
    workers = default if options.workers is None else options.workers

    def run_cells(cells: Sequence[Cell]) -> list[CellResult]:
        results = grid.run_cells(cells, folder, lock=lock, devices=devices, workers=workers, notify=output.print_note)
        return list(results.values())

    return run_cells


def format_accuracy(summary: Mapping[str, Any]) -> str:
    """The mean and, of several runs, the standard deviation."""
    if summary["std"] is None:
        return f"{summary['mean']:.2%}"
    return f"{summary['mean']:.2%} ± {summary['std']:.2%} (n = {summary['n']})"


# --- study ablate ----------------------------------------------------------------------------------------------------


def run_ablation(arguments: AblateArguments) -> None:
    """`vitrail study ablate RECIPE --data DATA --variants NAME=VALUE...`: the paper's appendix D."""
    data, options = arguments.data, arguments.study
    recipe = recipes.load_recipe(arguments.recipe)
    changed = recipes.override_settings(recipe, arguments.settings, recipes.ABLATION_RESERVED)
    keeps_warmup = changed.schedule.warmup == recipe.schedule.warmup
    ablation.list_variants(changed, arguments.variants)  # refuses a wrong setting before the data is opened
    dataset = open_dataset(data, holdout_fraction=ablation.VAL_SHARE)
    training_output.print_dataset_notes(dataset)
    check_classes(dataset)
    recipe = override_recipe(recipe, RecipeOverrides(epochs=arguments.epochs, batch=arguments.batch))
    if "train" in dataset.splits and keeps_warmup:
        images = len(dataset.splits["train"])
        recipe = shorten_warmup(recipe, images, output.print_note, option="--set warmup=STEPS")
    recipe = recipes.override_settings(recipe, arguments.settings, recipes.ABLATION_RESERVED)
    recipe = choose_loss(recipe, dataset)
    planned = ablation.plan_ablation(
        data,
        dataset,
        arguments.recipe,
        ablation.list_variants(recipe, arguments.variants),
        runs=options.number_of_runs,
        seed=options.seed,
        micro_batches=options.micro_batches,
    )
    folder = choose_study_folder(options.out, "ablate", data, arguments.recipe)
    with grid.open_study(folder, to_json(planned)) as lock:
        results = make_runner(folder, lock, options)(ablation.list_ablation_cells(planned))
        summary = ablation.summarize_ablation(to_json(planned), results)
        bars = {
            name: (variant["mean"], variant["std"]) for name, variant in summary["variants"].items() if variant["n"]
        }
        if bars:
            title = f"variants of {arguments.recipe}"
            plots.plot_accuracy_bars({"validation": bars}, folder / "study.png", title=title)
        if arguments.output.json:
            output.print_json(summary | {"folder": str(folder)})
        else:
            _print_ablation(summary, folder)
        grid.check_failures(results, folder)


def _print_ablation(summary: dict[str, Any], folder: Path) -> None:
    rows = [
        (name, format_accuracy(variant) if variant["n"] else "diverged")
        for name, variant in summary["variants"].items()
    ]
    output.print_table([("variant", "validation"), *rows])
    print(f"\nof {summary['images']:,} validation images ({folder}/study.png)")


# --- study sweep -----------------------------------------------------------------------------------------------------


def run_sweep(arguments: SweepArguments) -> None:
    """`vitrail study sweep DATA --model M`: a row of the paper's headline table, for one model and one dataset."""
    data, model, options, transfer = arguments.data, arguments.model, arguments.study, arguments.transfer
    check_loadable(model)
    dataset, val_share = sweep.open_sweep_dataset(data)
    training_output.print_dataset_notes(dataset)
    check_classes(dataset)
    planned = sweep.plan_sweep(
        data,
        dataset,
        val_share,
        model,
        set_preprocess(load(model), transfer.preprocess),
        rates=arguments.rates,
        steps=transfer.steps,
        batch=transfer.batch,
        image_size=transfer.image_size,
        settings=transfer.settings,
        runs=options.number_of_runs,
        seed=options.seed,
        micro_batches=options.micro_batches,
        preprocess=transfer.preprocess,
    )
    folder = choose_study_folder(options.out, "sweep", data, model)
    with grid.open_study(folder, to_json(planned)) as lock:
        run_cells = make_runner(folder, lock, options)
        rate_results = run_cells(sweep.list_rate_cells(planned))
        grid.check_failures(rate_results, folder)
        lr = sweep.choose_learning_rate(rate_results)
        output.print_note(f"val chose the learning rate {lr:g}; from here on test is used")
        results = rate_results + run_cells(sweep.list_test_cells(planned, lr))
        summary = sweep.summarize_sweep(to_json(planned), results)
        draw_sweep(planned, summary, folder)
        if arguments.output.json:
            output.print_json(summary | {"folder": str(folder)})
        else:
            _print_sweep(summary, folder)
        grid.check_failures(results, folder)


def draw_sweep(planned: Sweep, summary: dict[str, Any], folder: Path) -> None:
    """Plot the accuracies by learning rate and on test."""
    groups = {"validation": {lr: (top1, None) for lr, top1 in summary["validation"].items() if top1 is not None}}
    if summary["mean"] is not None:
        groups["test"] = {f"{summary['lr']:g}, n = {summary['n']}": (summary["mean"], summary["std"])}
    model, data = (name.rstrip("/").rpartition("/")[2] for name in (planned.model, planned.data))
    plots.plot_accuracy_bars(groups, folder / "study.png", title=f"{model} on {data} by learning rate")


def _print_sweep(summary: dict[str, Any], folder: Path) -> None:
    rows = [("learning rate", "validation")]
    for lr, top1 in summary["validation"].items():
        mark = " (chosen)" if summary["lr"] is not None and float(lr) == summary["lr"] else ""
        rows.append((lr, "diverged" if top1 is None else f"{top1:.2%}{mark}"))
    output.print_table(rows)
    if summary["mean"] is not None:
        images = pluralize(summary["images"], "image")
        print(f"test: {format_accuracy(summary)}, of {images} ({folder}/study.png)")


# --- study table -----------------------------------------------------------------------------------------------------


def print_table(arguments: TableArguments) -> None:
    """`vitrail study table STUDY...`: the paper's headline table, with columns of your own."""
    entries = [headline_table.read_entry(folder) for folder in arguments.studies]
    if arguments.real is not None:
        entries += headline_table.read_real_entries(arguments.studies, arguments.real)
    entries += [_make_cost_entry(text, [entry.model for entry in entries]) for text in arguments.cost]
    rows, notes = headline_table.build_table(entries)
    if arguments.csv is not None:
        with write_atomically(arguments.csv) as fresh, fresh.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
    if arguments.output.json:
        header, *lines = rows
        cells = {line[0]: dict(zip(header[1:], line[1:], strict=True)) for line in lines}
        output.print_json({"table": cells, "notes": notes, "studies": [entry.facts for entry in entries]})
    else:
        print(headline_table.render_markdown(rows, notes))


def _make_cost_entry(text: str, models: list[str]) -> TableEntry:
    """The entry of a model's cost, given as a number of core-days or as a recipe."""
    model, equals, value = text.rpartition("=")
    if not equals or model not in models:
        known = ", ".join(dict.fromkeys(models)) or "none: give studies"
        raise UsageError(f"--cost is {text!r:.80}; give MODEL=RECIPE or MODEL=CORE-DAYS, of the columns {known}")
    try:
        days, note = float(value), ""
    except ValueError:
        days, peak = plan.count_core_days(value), plan.GPUS[plan.TPU_NAME].peak_flops
        note = f"planned for {value}, at {plan.DEFAULT_EFFICIENCY:.0%} of {peak / 1e12:g} TFLOP/s a core"
    if not 0 < days < float("inf"):
        raise UsageError(f"--cost {text}: core-days must be above 0")
    facts = {"model": model, "core_days": days}
    return TableEntry(headline_table.COST_ROW, model, headline_table.format_core_days(days), note, facts)


# --- study vtab ------------------------------------------------------------------------------------------------------


def run_vtab(arguments: VtabArguments) -> None:
    """`vitrail study vtab MODEL --data-root DIR`: the 19 tasks of VTAB-1k."""
    model, root, options, transfer = arguments.model, arguments.data_root, arguments.study, arguments.transfer
    check_loadable(model)
    available, missing = vtab.find_tasks(root, arguments.tasks, options.seed)
    for name in missing:
        task = get_task(name)
        output.print_note(f"missing: {task.title}, {root / name}/train800.txt and so on; from {task.source}")
    planned = vtab.plan_vtab(
        root,
        available,
        model,
        set_preprocess(load(model), transfer.preprocess),
        steps=transfer.steps,
        batch=transfer.batch,
        image_size=transfer.image_size,
        settings=transfer.settings,
        runs=options.number_of_runs,
        seed=options.seed,
        micro_batches=options.micro_batches,
        preprocess=transfer.preprocess,
    )
    folder = choose_study_folder(options.out, "vtab", model)
    with grid.open_study(folder, to_json(planned)) as lock:
        results = make_runner(folder, lock, options)(vtab.list_vtab_cells(planned))
        summary = vtab.summarize_vtab(to_json(planned), results)
        if summary["tasks"]:
            title = f"{model.rpartition('/')[2]} on VTAB-1k"
            plots.plot_accuracy_bars(vtab.group_by_task_group(summary), folder / "study.png", title=title)
            if arguments.output.json:
                facts = {"missing": missing, "paper": vtab.PAPER_ACCURACIES, "folder": str(folder)}
                output.print_json(summary | facts)
            else:
                _print_vtab(summary, folder)
        grid.check_failures(results, folder)


def _print_vtab(summary: dict[str, Any], folder: Path) -> None:
    rows = [("task", "group", "top-1", "training images")]
    for name, result in summary["tasks"].items():
        draw = "VTAB's" if result["draw"] == "VTAB" else "our own draw"
        rows.append((get_task(name).title, get_task(name).group, format_accuracy(result), draw))
    output.print_table(rows)
    print()
    number = len(summary["tasks"])
    total = "all 19 tasks" if number == summary["of"] else f"{number} of {summary['of']} tasks"
    means = [(group, f"{mean:.2%}") for group, mean in summary["groups"].items()]
    if summary["mean"] is not None:
        means.append((total, format_accuracy(summary)))
    means += [(f"the paper, {name}", f"{share:.2f}% of 19 tasks") for name, share in vtab.PAPER_ACCURACIES.items()]
    output.print_table(means)
    output.print_note(f"figure: {folder}/study.png")


# --- study paper -----------------------------------------------------------------------------------------------------


def print_findings(arguments: FindingsArguments) -> None:
    """`vitrail study paper`: the paper's findings, one line each."""
    if arguments.output.json:
        output.print_json({"findings": [finding._asdict() for finding in findings.FINDINGS]})
    else:
        print(findings.render_findings(), end="")
