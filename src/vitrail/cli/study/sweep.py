"""`vitrail study sweep DATA --model M`: a row of the paper's headline table, for one model and one set."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vitrail.cli import output, runs, study
from vitrail.plurals import pluralize

if TYPE_CHECKING:
    from vitrail.studies.sweep import Sweep


def main(
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    model: Annotated[str, tyro.conf.arg(metavar="MODEL")],
    rates: Annotated[tuple[float, ...], tyro.conf.arg(metavar="RATE...")] = (),
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    image_size: Annotated[int | None, tyro.conf.arg(metavar="SIDE")] = None,
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE...")] = (),
    number_of_runs: Annotated[int, tyro.conf.arg(name="runs", metavar="N")] = 3,
    preprocess: Literal["imagenet", "inception", "torchvision"] | None = None,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    seed: int = 0,
    device: str | None = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    micro_batches: Annotated[int, tyro.conf.arg(metavar="N")] = 1,
    json: bool = False,
) -> None:
    """Choose the learning rate on val, train on all of train over several seeds, and measure on test.

    Interrupted, the same command goes on; what has ended is not run again. Every GPU takes a run at a time.

    Args:
        data: A folder, a .csv or .jsonl, shards, a set that was got, digits, or hf:ORG/NAME; with a test.
        model: A file or folder of any known format, hf:ORG/NAME or timm:NAME.
        rates: Learning rates to try, in place of the paper's four for a set of this size.
        steps: Of each run, in place of the paper's; a shorter run has a shorter warm-up.
        batch: Images in a step, in place of 512.
        image_size: Resolution, in place of 384.
        settings: Other settings in place of the recipe's: optimizer, weight_decay, decay, dropout, mixup and others.
        number_of_runs: Seeds at the chosen rate, for mean and standard deviation.
        preprocess: Mean, std and interpolation for weights that do not state them.
        out: The study's folder; runs/sweep-DATA-MODEL by default.
        seed: The first one, and that of the runs at different rates.
        device: cpu, cuda:1 or the like; all GPUs there are unless told otherwise.
        workers: Processes of each run that prepare images; the cores shared out unless told otherwise.
        micro_batches: Parts in which a step is computed, where all of it does not fit in memory.
        json: Print the result as JSON.
    """
    from vitrail.config import to_json
    from vitrail.studies import grid, sweep
    from vitrail.train.dataset_checks import check_classes
    from vitrail.train.finetune import set_preprocess
    from vitrail.weights.load import check_loadable, load

    check_loadable(model)
    dataset, share = sweep.open_sweep_dataset(data)
    runs.print_dataset_notes(dataset)
    check_classes(dataset)
    planned = sweep.plan_sweep(
        *(data, dataset, share, model, set_preprocess(load(model), preprocess)),
        rates=rates,
        steps=steps,
        batch=batch,
        image_size=image_size,
        settings=settings,
        runs=number_of_runs,
        seed=seed,
        micro_batches=micro_batches,
        preprocess=preprocess,
    )
    folder = study.choose_study_folder(out, "sweep", data, model)
    with grid.open_study(folder, to_json(planned)) as lock:
        run = study.make_runner(folder, lock, device, workers)
        tried = run(sweep.list_rate_cells(planned))
        grid.check_failures(tried, folder)
        lr = sweep.choose_learning_rate(tried)
        output.print_note(f"val chose the learning rate {lr:g}; test is looked at from here on")
        found = tried + run(sweep.list_test_cells(planned, lr))
        summary = sweep.summarize_sweep(to_json(planned), found)
        draw_sweep(planned, summary, folder)
        output.print_json(summary | {"folder": str(folder)}) if json else _print_summary(summary, folder)
        grid.check_failures(found, folder)


def draw_sweep(planned: "Sweep", summary: dict[str, Any], folder: Path) -> None:
    """The accuracies by rate and on test, as a picture."""
    from vitrail.figures import plots

    groups = {"validation": {lr: (top1, None) for lr, top1 in summary["validation"].items() if top1 is not None}}
    if summary["mean"] is not None:
        groups["test"] = {f"{summary['lr']:g}, n = {summary['n']}": (summary["mean"], summary["std"])}
    model, data = (name.rstrip("/").rpartition("/")[2] for name in (planned.model, planned.data))
    plots.plot_accuracy_bars(groups, folder / "study.png", title=f"{model} on {data} by learning rate")


def _print_summary(summary: dict[str, Any], folder: Path) -> None:
    rows = [("learning rate", "validation")]
    for lr, top1 in summary["validation"].items():
        mark = " (chosen)" if summary["lr"] is not None and float(lr) == summary["lr"] else ""
        rows.append((lr, "diverged" if top1 is None else f"{top1:.2%}{mark}"))
    output.print_table(rows)
    if summary["mean"] is not None:
        print(
            f"test: {study.format_accuracy(summary)}, of {pluralize(summary['images'], 'image')} ({folder}/study.png)"
        )
