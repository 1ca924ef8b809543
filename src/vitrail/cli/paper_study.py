"""`vitrail study data-size|compute|size|resolution|positions|head|shape|optimizer`: the paper's experiments, small."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitrail import recipes
from vitrail.cli import output, training_output
from vitrail.cli.arguments.studies import PaperStudyArguments
from vitrail.cli.study import choose_study_folder, format_accuracy, make_runner
from vitrail.config import Recipe, to_json
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError
from vitrail.formatting import format_count, pluralize
from vitrail.studies import grid, pretraining_study, sweep
from vitrail.studies.grid import Cell, CellResult
from vitrail.studies.paper_studies import PAPER_STUDIES
from vitrail.studies.pretraining_study import VAL_SHARE, PretrainingStudy, StudyData
from vitrail.training.dataset_checks import check_classes
from vitrail.training.recipe_overrides import RecipeOverrides, override_recipe, shorten_warmup
from vitrail.visualization import plots

_DEFAULT_RECIPES = {"imagenet": "vit-b16-imagenet", "imagenet21k": "vit-b16-i21k", "jft": "vit-b16-jft"}
_CLASS_COUNTS = {"imagenet": 1000, "imagenet21k": 21_841, "jft": 18_291}


def run_study(name: str, arguments: PaperStudyArguments) -> None:
    """Run the study, or print its plan."""
    is_plan = arguments.plan or arguments.data in _DEFAULT_RECIPES
    if is_plan:
        data = transfer_data = _describe_known_data(arguments.data)
    else:
        data, transfer_data = _open_data(name, arguments)
    planned = pretraining_study.plan_study(
        name,
        tuple(model for text in arguments.models for model in text.split(",") if model),
        _choose_recipe(arguments, data.images["train"]),
        data,
        transfer_data,
        transfer_epochs=arguments.transfer_epochs,
        runs=arguments.study.number_of_runs,
        seed=arguments.study.seed,
        micro_batches=arguments.study.micro_batches,
    )
    if is_plan:
        _print_plan(planned, arguments)
        return
    folder = choose_study_folder(arguments.study.out, name, arguments.data)
    with grid.open_study(folder, to_json(planned)) as lock:
        results = _run_stages(planned, folder, make_runner(folder, lock, arguments.study))
        summary = pretraining_study.summarize_study(planned, results)
        _plot_summary(summary, folder / "study.png")
        if arguments.output.json:
            output.print_json(summary | {"folder": str(folder)})
        else:
            _print_summary(summary, folder / "study.png")
        grid.check_failures(results, folder)


run_data_size = partial(run_study, "data-size")
run_compute = partial(run_study, "compute")
run_size = partial(run_study, "size")
run_resolution = partial(run_study, "resolution")
run_positions = partial(run_study, "positions")
run_head = partial(run_study, "head")
run_shape = partial(run_study, "shape")
run_optimizer = partial(run_study, "optimizer")


def _choose_recipe(arguments: PaperStudyArguments, images: int) -> Recipe:
    """The recipe of all variants, with the warm-up that fits so many images unless it is set."""
    recipe = recipes.load_recipe(arguments.recipe or _DEFAULT_RECIPES.get(arguments.data, "tiny-imagenet-study"))
    recipe = override_recipe(recipe, RecipeOverrides(epochs=arguments.epochs, batch=arguments.batch))
    recipe = shorten_warmup(recipe, images, output.print_note, option="--set warmup=STEPS")
    return recipes.override_settings(recipe, arguments.settings, recipes.ABLATION_RESERVED)


def _open_data(name: str, arguments: PaperStudyArguments) -> tuple[StudyData, StudyData]:
    """The dataset to pre-train on, and the one to transfer to; what is fine-tuned is measured on test."""
    dataset = open_dataset(arguments.data, holdout_fraction=VAL_SHARE)
    training_output.print_dataset_notes(dataset)
    check_classes(dataset)
    for part in ("train", "val"):
        if part not in dataset.splits:
            raise DataError(f"{dataset.name} has no {part}; a study trains on train and chooses on val")
    if dataset.multi_label:
        raise DataError(f"{dataset.name} has several labels per image, and a study compares accuracies")
    data = pretraining_study.describe_data(arguments.data, dataset)
    paper_study, other = PAPER_STUDIES[name], arguments.transfer_data or arguments.data
    if not paper_study.transfers and other == arguments.data:
        return data, data
    transfer_dataset, share = sweep.open_sweep_dataset(other)
    training_output.print_dataset_notes(transfer_dataset)
    check_classes(transfer_dataset)
    val_is_test = sweep.is_val_test(transfer_dataset)
    return data, pretraining_study.describe_data(other, transfer_dataset, share, val_is_test=val_is_test)


def _describe_known_data(name: str) -> StudyData:
    """A dataset to plan for: opened, or known by its size."""
    if name in _DEFAULT_RECIPES:
        images = {"train": recipes.TRAIN_IMAGE_COUNTS[name]}
        return StudyData(name=name, title=name, images=images, classes=_CLASS_COUNTS[name])
    dataset = open_dataset(name, holdout_fraction=VAL_SHARE)
    if "train" not in dataset.splits:
        raise DataError(f"{dataset.name} has no train split to plan for")
    return pretraining_study.describe_data(name, dataset)


def _run_stages(
    planned: PretrainingStudy, folder: Path, run: Callable[[Sequence[Cell]], list[CellResult]]
) -> list[CellResult]:
    """The results of all cells: learning rates, pre-training, transfer."""
    tried = run(pretraining_study.list_rate_cells(planned))
    rates = pretraining_study.choose_rates(planned, tried)
    trained = run(pretraining_study.list_pretraining_cells(planned, rates))
    return [*tried, *trained, *run(pretraining_study.list_transfer_cells(planned, folder, trained))]


def _plot_summary(summary: dict[str, Any], path: Path) -> None:
    """Draw the last measure of each variant over the study's axis, or all measures as bars."""
    variants = {name: facts for name, facts in summary["variants"].items() if facts["measures"]}
    if not variants:
        return
    measures = list(next(iter(variants.values()))["measures"])
    points = {
        measure: {name: facts["measures"][measure] for name, facts in variants.items() if measure in facts["measures"]}
        for measure in measures
    }
    title = f"{summary['study']}, {summary['dataset']}"
    if not summary["x_name"]:
        groups = {
            measure: {name: (point["mean"], point["std"]) for name, point in by_name.items()}
            for measure, by_name in points.items()
        }
        plots.plot_accuracy_bars(groups, path, title=title)
        return
    curves: dict[str, list[tuple[float, float, float | None]]] = {}
    for name, point in points[measures[-1]].items():
        curves.setdefault(variants[name]["curve"], []).append((variants[name]["x"], point["mean"], point["std"]))
    plots.plot_accuracy_curves(curves, path, title=f"{title}: {measures[-1]}", x_name=summary["x_name"])


def _print_summary(summary: dict[str, Any], figure: Path) -> None:
    print(f"{summary['question']}\n")
    measures = list(dict.fromkeys(name for facts in summary["variants"].values() for name in facts["measures"]))
    rows = [("variant", "parameters", "training images", "exaFLOPs", *measures)]
    for name, facts in summary["variants"].items():
        cells = (format_accuracy(facts["measures"][each]) if each in facts["measures"] else "-" for each in measures)
        images = f"{facts['training_images']:,}"
        rows.append((name, format_count(facts["parameters"]), images, f"{facts['exaflops']:.3g}", *cells))
    output.print_table(rows, right=(1, 2, 3))
    print()
    for comparison in summary["comparisons"]:
        interval = comparison["interval"]
        spread = "" if interval is None else f" (95 % interval {100 * interval[0]:+.2f} to {100 * interval[1]:+.2f})"
        points = f"{100 * comparison['difference']:+.2f} points{spread}"
        names = f"{comparison['variant']} - {comparison['baseline']}, {comparison['measure']}"
        print(f"{names}: {points}: {comparison['verdict']}")
    print(f"\nthe paper: {summary['paper']}\nexpected:  {summary['expectation']}\n({figure})")


def _print_plan(planned: PretrainingStudy, arguments: PaperStudyArguments) -> None:
    """Print what the pre-training runs take; transfer is left out, as it is little beside them."""
    gpu, images = arguments.gpu, planned.data.images["train"]
    rows = [
        {
            "variant": variant.name,
            "runs": planned.runs + len(variant.rates),
            **pretraining_study.describe_cost(planned, variant, gpu),
        }
        for variant in planned.variants
    ]
    if arguments.output.json:
        output.print_json({"study": planned.study, "data": planned.data.title, "images": images, "plan": rows})
        return
    days = f"{gpu}-days"
    table = [("variant", "runs", "parameters", "steps", "exaFLOPs", days, "TPUv3-core-days")]
    for row in rows:
        numbers = (f"{row[key]:,.3g}" for key in ("exaflops", "gpu_days", "tpuv3_core_days"))
        table.append((row["variant"], f"{row['runs']}", format_count(row["parameters"]), f"{row['steps']:,}", *numbers))
    output.print_table(table, right=range(1, len(table[0])))
    total = sum(row["runs"] * row["gpu_days"] for row in rows)
    runs = pluralize(sum(row["runs"] for row in rows), "run")
    title = f"{planned.data.title} ({pluralize(images, 'image')})"
    print(f"\n{runs} on {title}: {total:,.3g} {days}, transfer not counted")
    print(f"the paper: {PAPER_STUDIES[planned.study].paper}")
