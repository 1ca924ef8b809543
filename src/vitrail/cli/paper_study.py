"""`vitrail study data-size|compute|size|resolution|positions|head|shape|optimizer`: the paper's experiments, small."""

from functools import partial
from typing import Any

from vitrail import recipes
from vitrail.cli import output, training_output
from vitrail.cli.arguments.studies import PaperStudyArguments
from vitrail.cli.study import choose_study_folder, format_accuracy
from vitrail.config import Recipe, to_json
from vitrail.data.dataset import Dataset
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.formatting import format_count, pluralize
from vitrail.runtime.workers import count_available_cores
from vitrail.studies import grid, pretraining_study
from vitrail.studies.grid import CellResult
from vitrail.studies.paper_studies import PAPER_STUDIES, PaperStudy
from vitrail.studies.pretraining_study import VAL_SHARE, PretrainingStudy
from vitrail.training.dataset_checks import check_classes
from vitrail.training.recipe_overrides import RecipeOverrides, choose_loss, override_recipe
from vitrail.visualization import plots

_DEFAULT_RECIPES = {"imagenet": "vit-b16-imagenet", "imagenet21k": "vit-b16-i21k", "jft": "vit-b16-jft"}
_CLASS_COUNTS = {"imagenet": 1000, "imagenet21k": 21_841, "jft": 18_291}


def run_study(name: str, arguments: PaperStudyArguments) -> None:
    """Run the study, or print its plan."""
    paper_study = PAPER_STUDIES[name]
    recipe = _choose_recipe(arguments)
    if arguments.plan or arguments.data in _DEFAULT_RECIPES:
        _print_plan(name, paper_study, recipe, arguments)
        return
    dataset, transfer = _open(arguments.data), _open(arguments.transfer_data or arguments.data)
    planned = pretraining_study.plan_study(
        name,
        paper_study,
        _split_models(arguments.models),
        choose_loss(recipe, dataset),
        (arguments.data, dataset),
        (arguments.transfer_data or arguments.data, transfer),
        transfer_epochs=arguments.transfer_epochs,
        runs=arguments.number_of_runs,
        seed=arguments.seed,
        micro_batches=arguments.micro_batches,
    )
    folder = choose_study_folder(arguments.out, name, arguments.data)
    with grid.open_study(folder, to_json(planned)) as lock:
        results = _run_stages(planned, folder, lock, arguments)
        summary = pretraining_study.summarize_study(planned, paper_study, results)
        plot_summary(summary, paper_study, folder / "study.png")
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


def _choose_recipe(arguments: PaperStudyArguments) -> Recipe:
    name = arguments.recipe or _DEFAULT_RECIPES.get(arguments.data, "tiny-imagenet-study")
    recipe = recipes.load_recipe(name)
    recipe = override_recipe(recipe, RecipeOverrides(epochs=arguments.epochs, batch=arguments.batch))
    return recipes.override_settings(recipe, arguments.settings, recipes.ABLATION_RESERVED)


def _split_models(models: tuple[str, ...]) -> tuple[str, ...]:
    """The names, which may be joined by commas."""
    return tuple(name for text in models for name in text.split(",") if name)


def _open(data: str) -> Dataset:
    dataset = open_dataset(data, holdout_fraction=VAL_SHARE)
    training_output.print_dataset_notes(dataset)
    check_classes(dataset)
    for part in ("train", "val"):
        if part not in dataset.splits:
            raise DataError(f"{dataset.name} has no {part}; a study trains on train and chooses on val")
    return dataset


def _run_stages(
    planned: PretrainingStudy, folder: Any, lock: tuple[int, ...], arguments: PaperStudyArguments
) -> list[CellResult]:
    """The results of all cells: learning rates, pre-training, transfer."""
    grid.check_positive(parallel=arguments.parallel)
    devices = grid.list_devices(arguments.device, arguments.parallel)
    default = max(0, count_available_cores() // len(devices) - 1)
    workers = default if arguments.workers is None else arguments.workers

    def run(cells: list[grid.Cell]) -> list[CellResult]:
        results = grid.run_cells(cells, folder, lock=lock, devices=devices, workers=workers, notify=output.print_note)
        return list(results.values())

    tried = run(pretraining_study.list_rate_cells(planned))
    rates = pretraining_study.choose_rates(planned, tried)
    trained = run(pretraining_study.list_pretraining_cells(planned, rates))
    return [*tried, *trained, *run(pretraining_study.list_transfer_cells(planned, folder, trained))]


def plot_summary(summary: dict[str, Any], paper_study: PaperStudy, path: Any) -> None:
    """Draw the last measure of each variant: over the study's axis, or as bars."""
    variants = {name: facts for name, facts in summary["variants"].items() if facts["measures"]}
    if not variants:
        return
    measure = list(next(iter(variants.values()))["measures"])[-1]
    title = f"{summary['study']}: {measure}, {summary['dataset']}"
    if not paper_study.x_name:
        measures = list(next(iter(variants.values()))["measures"])
        groups = {
            measure: {
                name: (facts["measures"][measure]["mean"], facts["measures"][measure]["std"])
                for name, facts in variants.items()
                if measure in facts["measures"]
            }
            for measure in measures
        }
        plots.plot_accuracy_bars(groups, path, title=f"{summary['study']}, {summary['dataset']}")
        return
    curves: dict[str, list[tuple[float, float, float | None]]] = {}
    for facts in variants.values():
        if measure in facts["measures"]:
            mean, deviation = facts["measures"][measure]["mean"], facts["measures"][measure]["std"]
            curves.setdefault(facts["curve"], []).append((facts["x"], mean, deviation))
    plots.plot_accuracy_curves(curves, path, title=title, x_name=paper_study.x_name)


def _print_summary(summary: dict[str, Any], figure: Any) -> None:
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


def _print_plan(name: str, paper_study: PaperStudy, recipe: Recipe, arguments: PaperStudyArguments) -> None:
    """Print what the pre-training runs take."""
    images, classes = _count_images(arguments.data)
    planned = PretrainingStudy(
        study=name,
        data=arguments.data,
        dataset=arguments.data,
        images={"train": images},
        classes=classes,
        transfer_data=arguments.transfer_data or arguments.data,
        transfer_images=images,
        recipe=recipe,
        variants=paper_study.build_variants(_split_models(arguments.models) or paper_study.models),
        few_shot=paper_study.few_shot,
        transfers=paper_study.transfers,
        transfer_epochs=arguments.transfer_epochs,
        runs=paper_study.runs if arguments.number_of_runs is None else arguments.number_of_runs,
        seed=arguments.seed,
    )
    rows = pretraining_study.plan_cost(planned, arguments.gpu)
    if arguments.output.json:
        output.print_json({"study": name, "data": arguments.data, "images": images, "plan": rows})
        return
    days = f"{arguments.gpu}-days"
    table = [("variant", "runs", "parameters", "steps", "exaFLOPs", days, "TPUv3-core-days")]
    for row in rows:
        numbers = (f"{row[key]:,.3g}" for key in ("exaflops", "gpu_days", "tpuv3_core_days"))
        table.append((row["variant"], f"{row['runs']}", format_count(row["parameters"]), f"{row['steps']:,}", *numbers))
    output.print_table(table, right=range(1, len(table[0])))
    total = sum(row["runs"] * row["gpu_days"] for row in rows)
    runs = pluralize(sum(row["runs"] for row in rows), "run")
    print(f"\n{runs} on {arguments.data} ({pluralize(images, 'image')}): {total:,.3g} {days}, transfer not counted")
    print(f"the paper: {paper_study.paper}")


def _count_images(data: str) -> tuple[int, int]:
    """Training images and classes of a dataset, opened or known by its size."""
    if data in _DEFAULT_RECIPES:
        return recipes.TRAIN_IMAGE_COUNTS[data], _CLASS_COUNTS[data]
    dataset = open_dataset(data, holdout_fraction=VAL_SHARE)
    if "train" not in dataset.splits:
        raise UsageError(f"{dataset.name} has no train split to plan for")
    return len(dataset.splits["train"]), len(dataset.classes)
