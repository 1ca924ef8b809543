"""`vitrail study vtab MODEL --data-root DIR`: the 19 tasks of VTAB-1k."""

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitrail.cli import output, study


def main(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    data_root: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK...")] = (),
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    image_size: Annotated[int | None, tyro.conf.arg(metavar="SIDE")] = None,
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE...")] = (),
    number_of_runs: Annotated[int, tyro.conf.arg(name="runs", metavar="N")] = 1,
    preprocess: Literal["imagenet", "inception", "torchvision"] | None = None,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    seed: int = 0,
    device: str | None = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    micro_batches: Annotated[int, tyro.conf.arg(metavar="N")] = 1,
    json: bool = False,
) -> None:
    """Fine-tune a model on 1,000 images of each task, and give the mean accuracy by task, by group and over all.

    Interrupted, the same command goes on; what has ended is not run again. Every GPU takes a run at a time.

    Args:
        model: A file or folder of any known format, hf:ORG/NAME or timm:NAME.
        data_root: DIR/TASK/train800.txt, val200.txt and test.txt, as the benchmark is passed on; or sets as published.
        tasks: Some of them, by the names of their folders, in place of all that are there.
        steps: Of each run, in place of 2,500; a shorter run has a shorter warm-up.
        batch: Images in a step, in place of 512.
        image_size: Resolution, in place of 384.
        settings: Other settings in place of the recipe's: optimizer, weight_decay, decay, dropout, mixup and others.
        number_of_runs: Seeds, for mean and standard deviation.
        preprocess: Mean, std and interpolation for weights that do not state them.
        out: The study's folder; runs/vtab-MODEL by default.
        seed: The first one, and that of the draw of 1,000 images from sets that come without VTAB's.
        device: cpu, cuda:1 or the like; all GPUs there are unless told otherwise.
        workers: Processes of each run that prepare images; the cores shared out unless told otherwise.
        micro_batches: Parts in which a step is computed, where all of it does not fit in memory.
        json: Print the result as JSON.
    """
    from vitrail.config import to_json
    from vitrail.figures import plots
    from vitrail.studies import grid, vtab
    from vitrail.studies.vtab_tasks import get_task
    from vitrail.train.finetune import set_preprocess
    from vitrail.weights.load import check_loadable, load

    check_loadable(model)
    there, missing = vtab.find_tasks(data_root, tasks, seed)
    for name in missing:
        output.print_note(
            f"missing: {get_task(name).title}, {data_root / name}/train800.txt and so on; from {get_task(name).source}"
        )
    planned = vtab.plan_vtab(
        *(data_root, there, model, set_preprocess(load(model), preprocess)),
        steps=steps,
        batch=batch,
        image_size=image_size,
        settings=settings,
        runs=number_of_runs,
        seed=seed,
        micro_batches=micro_batches,
        preprocess=preprocess,
    )
    folder = study.choose_study_folder(out, "vtab", model)
    with grid.open_study(folder, to_json(planned)) as lock:
        found = study.make_runner(folder, lock, device, workers)(vtab.list_vtab_cells(planned))
        summary = vtab.summarize_vtab(to_json(planned), found)
        if summary["tasks"]:
            plots.plot_accuracy_bars(
                vtab.group_by_task_group(summary), folder / "study.png", title=f"{model.rpartition('/')[2]} on VTAB-1k"
            )
            facts = summary | {"missing": missing, "paper": vtab.PAPER_ACCURACIES, "folder": str(folder)}
            output.print_json(facts) if json else _print_summary(summary, vtab.PAPER_ACCURACIES, folder)
        grid.check_failures(found, folder)


def _print_summary(summary: dict[str, Any], paper: dict[str, float], folder: Path) -> None:
    from vitrail.studies.vtab_tasks import get_task

    rows = [("task", "group", "top-1", "training images")]
    for name, found in summary["tasks"].items():
        draw = "VTAB's" if found["draw"] == "VTAB" else "a draw of our own"
        rows.append((get_task(name).title, get_task(name).group, study.format_accuracy(found), draw))
    output.print_table(rows)
    print()
    number = len(summary["tasks"])
    total = "all 19 tasks" if number == summary["of"] else f"{number} of {summary['of']} tasks"
    means = [(group, f"{mean:.2%}") for group, mean in summary["groups"].items()]
    if summary["mean"] is not None:
        means.append((total, study.format_accuracy(summary)))
    means += [(f"the paper, {name}", f"{share:.2f}% of 19 tasks") for name, share in paper.items()]
    output.print_table(means)
    output.print_note(f"drawn: {folder}/study.png")
