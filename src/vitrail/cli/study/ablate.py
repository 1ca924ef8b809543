"""`vitrail study ablate RECIPE --data DATA --variants NAME=VALUE...`: the paper's appendix D."""

from pathlib import Path
from typing import Annotated, Any

import tyro

from vitrail import recipes
from vitrail.cli import output, runs, study


def main(
    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")],
    data: Annotated[str, tyro.conf.arg(metavar="DATA")],
    variants: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE...")],
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE...")] = (),
    epochs: Annotated[float | None, tyro.conf.arg(metavar="N")] = None,
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    number_of_runs: Annotated[int, tyro.conf.arg(name="runs", metavar="N")] = 3,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    seed: int = 0,
    device: str | None = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    micro_batches: Annotated[int, tyro.conf.arg(metavar="N")] = 1,
    json: bool = False,
) -> None:
    """Train a recipe and its variants from random weights over several seeds, and compare them on val.

    Interrupted, the same command goes on; what has ended is not run again. Every GPU takes a run at a time.

    Args:
        recipe: One of those that `vitrail list recipes` shows.
        data: A folder, a .csv or .jsonl, shards, a downloaded dataset, digits, or hf:ORG/NAME.
        variants: A setting each, such as positions=none positions=learned-2d depth=6; + joins several.
        settings: Settings of all variants in place of the recipe's, as in `train`.
        epochs: Passes over the training images, in place of the recipe's.
        batch: Images in a step, in place of the recipe's.
        number_of_runs: Seeds of each variant, for mean and standard deviation.
        out: The study's folder; runs/ablate-DATA-RECIPE by default.
        seed: The first one.
        device: cpu, cuda:1 or the like; all GPUs there are unless told otherwise.
        workers: Processes of each run that prepare images; the cores shared out unless told otherwise.
        micro_batches: Parts in which a step is computed, where all of it does not fit in memory.
        json: Print the result as JSON.
    """
    from vitrail.config import to_json
    from vitrail.data.sources import open_dataset
    from vitrail.figures import plots
    from vitrail.studies import ablation, grid
    from vitrail.train.dataset_checks import check_classes
    from vitrail.train.recipe_overrides import RecipeOverrides, choose_loss, override_recipe, shorten_warmup

    named = recipes.override_settings(recipes.get_recipe(recipe), settings)
    ablation.list_variants(named, variants)  # refuses a wrong setting before the data is opened
    dataset = open_dataset(data, holdout_fraction=ablation.VAL_SHARE)
    runs.print_dataset_notes(dataset)
    check_classes(dataset)
    named = choose_loss(override_recipe(named, RecipeOverrides(epochs=epochs, batch=batch)), dataset)
    if "train" in dataset.splits:
        named = shorten_warmup(named, len(dataset.splits["train"]), output.print_note)
    planned = ablation.plan_ablation(
        *(data, dataset, recipe, ablation.list_variants(named, variants)),
        runs=number_of_runs,
        seed=seed,
        micro_batches=micro_batches,
    )
    folder = study.choose_study_folder(out, "ablate", data, recipe)
    with grid.open_study(folder, to_json(planned)) as lock:
        found = study.make_runner(folder, lock, device, workers)(ablation.list_ablation_cells(planned))
        summary = ablation.summarize_ablation(to_json(planned), found)
        bars = {name: (one["mean"], one["std"]) for name, one in summary["variants"].items() if one["n"]}
        if bars:
            plots.plot_accuracy_bars({"validation": bars}, folder / "study.png", title=f"variants of {recipe}")
        output.print_json(summary | {"folder": str(folder)}) if json else _print_summary(summary, folder)
        grid.check_failures(found, folder)


def _print_summary(summary: dict[str, Any], folder: Path) -> None:
    rows = [("variant", "validation")]
    rows += [
        (name, study.format_accuracy(one) if one["n"] else "diverged") for name, one in summary["variants"].items()
    ]
    output.print_table(rows)
    print(f"\nof {summary['images']:,} validation images ({folder}/study.png)")
