"""`vitrail finetune DATA --model M`: a model that has learned before, on images of your own."""

import contextlib
import dataclasses
import itertools
import json as json_module
import math
import os
import re
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vitrail import presets, recipes
from vitrail.cli import output, runs
from vitrail.config import PreprocessConfig, Recipe, ViTConfig
from vitrail.errors import UsageError

_SUGGESTED_MODELS = ("timm:vit_small_patch16_224.augreg_in21k", "hf:google/vit-base-patch16-224-in21k")
_MAX_CHECK_SHARE = 0.15  # of the minutes may be spent on looking at the images
_MAX_PROBE_SHARE = 0.25  # of a run's time may be spent on the features that its head starts from
_MIN_PROBE_IMAGES_PER_CLASS = 4  # of a class on average, at least
MAX_EPOCHS = 100  # what --minutes makes of a run, unless the recipe has more

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset
    from vitrail.train.deadline import Deadline
    from vitrail.train.training_run import TrainingRun
    from vitrail.weights.trained import Trained


def main(
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    model: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None,
    recipe: recipes.FinetuneKind = "default",
    image_size: Annotated[int | None, tyro.conf.arg(metavar="SIDE")] = None,
    minutes: Annotated[float | None, tyro.conf.arg(metavar="N")] = None,
    epochs: Annotated[float | None, tyro.conf.arg(metavar="N")] = None,
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    lr: Annotated[float | None, tyro.conf.arg(metavar="RATE")] = None,
    warmup: Annotated[int | None, tyro.conf.arg(metavar="STEPS")] = None,
    replan: Annotated[str | None, tyro.conf.arg(metavar="STEP:STEPS,...")] = None,
    layers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    keep_head: bool = False,
    from_scratch: bool = False,
    preprocess: Literal["imagenet", "inception", "torchvision"] | None = None,
    balanced: bool = False,
    strict: bool = False,
    train_on_val: bool = False,
    number_of_runs: Annotated[int, tyro.conf.arg(name="runs", metavar="N")] = 1,
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None,
    seed: int = 0,
    device: str | None = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    micro_batches: Annotated[int, tyro.conf.arg(metavar="N")] = 1,
    recompute: bool = False,
    shard: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    save_every: Annotated[float, tyro.conf.arg(metavar="MINUTES")] = 10,
    deterministic: bool = False,
    verify_every: Annotated[int, tyro.conf.arg(metavar="STEPS")] = 0,
    track: runs.Tracker | None = None,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Fit a model to new images and classes: a zero head in place of its own, and all of it trained on.

    Args:
        data: A folder, a .csv or .jsonl, shards, a set that was got, digits, or hf:ORG/NAME.
        model: A file or folder of any known format, hf:ORG/NAME or timm:NAME.
        recipe: default is what works best for most sets, paper is the paper's: SGD at 384 pixels, bit is BiT-HyperRule.
        image_size: Resolution in place of the model's (the paper's: 384); positions are resampled.
        minutes: The time limit of each run, everything included; it trains for as long as fits, up to 100 epochs.
        epochs: Passes over the training images, in place of the recipe's.
        batch: Images in a step, in place of the recipe's.
        lr: Learning rate at its top, in place of the recipe's.
        warmup: Steps until it is there, in place of the recipe's.
        replan: Repeat how a run with --minutes was planned again as it went; its report has the command.
        layers: How many layers below the head learn; 0 for the head alone.
        keep_head: Go on with the model's own head, which must have the data's classes, in any order.
        from_scratch: Begin with a preset's random weights (--model s16), which have learned nothing.
        preprocess: Mean, std and interpolation for weights that do not state them.
        balanced: Let every class count alike, however many images it has.
        strict: Refuse unreadable images and empty class folders, rather than leave out up to a tenth of the images.
        everything: Train on the validation images too, once all choices are made; the last weights are kept then.
        number_of_runs: Repeat with the next seeds, and give mean and standard deviation.
        out: The run's folder; runs/finetune, runs/finetune-2, ... by default. s3://bucket/NAME: runs/NAME, copied.
        seed: Of order, augmentation and dropout.
        device: cpu, cuda or mps; the best there is unless told otherwise.
        workers: Processes that prepare images; one for each core but one unless told otherwise.
        micro_batches: Parts in which a step is computed, where all of it does not fit in memory.
        recompute: Compute activations again in the backward pass rather than keep them: less memory, a third slower.
        shard: Divide the model over the processes that torchrun starts, rather than copy it to each (FSDP).
        resume: Go on with a run that was interrupted, from its newest whole checkpoint: the same command again.
        overwrite: Replace the run of that name.
        save_every: How often the whole state is written to the run's folder, in the background.
        deterministic: Let a GPU compute the same bits in every run; somewhat slower.
        verify_every: Compute one in so many steps twice, and stop where that gives two results; 0 for none.
        track: Send the numbers of every step to tensorboard too (extra `track`), in the run's folder.
        dry_run: Show what would be done, what it would take and the first batch, and train nothing.
        json: Print the result as JSON.
    """
    began = time.monotonic()
    if minutes is not None:  # torch's threads wait for each other asleep: spinning, they waste a busy machine's time
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is loaded
    from vitrail.data.sources import open_dataset
    from vitrail.model.cost import count_training_flops
    from vitrail.runtime import distributed
    from vitrail.runtime.workers import count_available_cores
    from vitrail.train.run import lock_run_folder
    from vitrail.train.training_run import TrainingRun, adapt_to_dataset
    from vitrail.weights.load import load

    model = _check_initial_model(model, from_scratch=from_scratch, resume=resume)
    if number_of_runs < 1:
        raise UsageError(f"--runs is {number_of_runs}; it must be at least 1")
    if minutes is not None and (epochs is not None or replan is not None or not 0 < minutes < math.inf):
        raise UsageError(
            "--minutes decides the epochs and must be above 0; give --minutes, or --epochs (and --replan with it)"
        )
    if deterministic:
        runs.enable_determinism()
    trained = partial(
        runs.train_and_report, out=out, data=data, track=track, save_every=save_every, verify_every=verify_every
    )
    with contextlib.ExitStack() as stack, runs.join_processes(device) as (group, found):
        folder, resume = runs.choose_run_folder(
            "finetune", None if dry_run else out, group, resume=resume, overwrite=overwrite
        )
        dataset, report = open_dataset(data), None
        runs.print_dataset_notes(dataset)
        runs.check_classes(dataset, strict=strict, train_on_val=train_on_val)
        start = set_preprocess(load(model), preprocess)  # what is mistyped is said before every image is looked at
        config = start.model.config
        if not dry_run:
            limited = minutes is not None and not (strict or resume)
            seconds = minutes * 60 * _MAX_CHECK_SHARE if minutes is not None and limited else math.inf
            whole = dataset
            dataset, report = runs.check_images(dataset, data, strict=strict, seconds=seconds)
            if resume and distributed.run_on_rank0(lambda: _is_trained_on_all(folder, whole)):
                dataset = dataclasses.replace(
                    whole, skip_bad=not strict
                )  # there was no time to look for bad images then
            runs.check_classes(dataset, train_on_val=train_on_val)
        stride = config.stride if isinstance(config, ViTConfig) else 1
        pixels = compute_median_pixels(dataset) if recipe == "bit" else 0

        def build_recipe(epochs: float | None, side: int | None = None) -> Recipe:
            images = len(dataset.splits.get("train", "?"))
            made = recipes.build_finetune_recipe(recipe, images, stride, epochs=epochs, pixels=pixels)
            size = next((each for each in (image_size, side) if each is not None), made.image_size)
            made = dataclasses.replace(made, trainable_layers=layers, logit_adjustment=balanced, image_size=size)
            if keep_head:  # it has learned before, like the rest
                made = dataclasses.replace(made, optimizer=dataclasses.replace(made.optimizer, head_lr=None))
            if keep_head or from_scratch or dataset.multi_label:
                made = dataclasses.replace(made, head_init=None)
            return runs.choose_loss(runs.override_recipe(made, epochs=None, batch=batch, lr=lr, warmup=warmup), dataset)

        def build_run(chosen: Recipe) -> TrainingRun:
            fresh, view = adapt_to_dataset(start, dataset, chosen, keep_head=keep_head), None
            if recipe == "bit":
                fresh, view = use_whole_images(fresh, chosen)
            return TrainingRun(
                recipe=chosen,
                dataset=dataset,
                initial_model=fresh,
                train_preprocess=view,
                seed=seed,
                group=group,
                device=found,
                workers=max(0, count_available_cores() - 1) if workers is None else workers,
                micro_batches=micro_batches,
                recompute=recompute,
                shard=shard,
                train_on_val=train_on_val,
                decisions=_parse_decisions(replan),
            )

        task, deadline = build_run(build_recipe(epochs)), None
        if minutes is not None:
            deadline = _time_and_build_deadline(task, minutes, began)
            begun = next(folder.glob("**/config.json"), None) if resume else None
            choose = image_size is None and recipe == "default"
            plan = partial(_plan_run, task, deadline, choose_side=choose, warmup=warmup or 0)
            length, side = distributed.run_on_rank0(lambda: plan() if begun is None else _read_plan(begun))
            timed, task = task, build_run(build_recipe(length, side))
            cost = count_training_flops(task.config, 1) / count_training_flops(timed.config, 1)
            deadline = dataclasses.replace(deadline.scale_image_cost(cost), eval_every_epochs=task.eval_every_epochs)
        if dry_run:
            runs.print_dry_run(task, as_json=json)
            return
        distributed.run_on_rank0(lambda: stack.enter_context(lock_run_folder(folder)))  # of several runs too
        results = []
        for one, place in _repeat_with_seeds(task, folder, number_of_runs):
            one = _start_head_from_probe(one, place, resume=resume)
            result = trained(one, place, report=report, resume=resume, overwrite=overwrite, deadline=deadline)
            if result is not None:
                results.append(runs.collect_result_facts(one, result, place))
            deadline = deadline and dataclasses.replace(deadline, start_time=time.monotonic())
        if results:
            _print_results(results, as_json=json)


def _print_results(results: list[dict[str, Any]], *, as_json: bool) -> None:
    """What the runs came to, each and together."""
    top1 = [found["top1"] for found in results]
    deviation = statistics.stdev(top1) if len(results) > 1 else None
    if as_json:
        summary = {"mean": statistics.mean(top1), "std": deviation, "n": len(results), "runs": results}
        output.print_json(results[0] if deviation is None else summary)
        return
    for found in results:
        print(runs.summarize_result(found))
    if deviation is not None:
        mean = f"{statistics.mean(top1):.2%} ± {deviation:.2%}"
        print(f"{results[0]['split']}: {mean} (mean and standard deviation of {len(results)} runs)")


def _check_initial_model(model: str | None, *, from_scratch: bool, resume: bool) -> str:
    """The MODEL to start from, if it is one that has learned, or may be without."""
    from vitrail.weights import hub
    from vitrail.weights.load import is_preset

    if model is None:
        runs_here = [str(path.parents[1]) for path in sorted(Path("runs").glob("*/weights/best.safetensors"))]
        places = {"runs": runs_here, "the Hub's cache": hub.list_cached()}
        known = [f"{', '.join(names[:5])} ({place})" for place, names in places.items() if names]
        raise UsageError(
            f"say which trained model to start from: --model {_SUGGESTED_MODELS[0]} or {_SUGGESTED_MODELS[1]} (fetched from the Hub; extra"
            f" `hub`), a file, or a run's folder. On this machine, without the network:"
            f" {'; '.join(known) or 'none yet'}"
        )
    if is_preset(model) and not (from_scratch or resume):
        raise UsageError(
            f"{model} is a preset, whose weights are random and have learned nothing: name a trained model (--model"
            f" {_SUGGESTED_MODELS[0]}, a file, a run's folder), or add --from-scratch to begin with random weights"
        )
    if from_scratch and not is_preset(model):
        raise UsageError(f"--from-scratch is for presets, and {model} is none: omit it, or give a preset (--model s16)")
    if from_scratch:
        output.print_note(f"warning: {model} begins with random weights, which have learned nothing")
    return model


def set_preprocess(trained: "Trained", preprocess: str | None) -> "Trained":
    """The model with the preprocessing that was named, which must not contradict the one it states."""
    if preprocess is None:
        return trained
    config, own = trained.model.config, trained.preprocess
    named = presets.build_preprocess_config(preprocess, config.image_size, config.channels)
    if own is not None and (own.mean, own.std) != (named.mean, named.std):
        raise UsageError(
            f"these weights were trained with mean {own.mean} and std {own.std}, and --preprocess {preprocess} has"
            f" {named.mean} and {named.std}: leave it away. (vitrail convert overrules a file that is wrong)"
        )
    return trained if own is not None else dataclasses.replace(trained, preprocess=named)


def compute_median_pixels(dataset: "Dataset") -> int:
    """The pixels of a usual training image: the median of up to 101, by their headers; bad ones do not count."""
    import numpy as np

    from vitrail.data import counter_rng
    from vitrail.data.image_headers import read_header
    from vitrail.data.order import permute_indices
    from vitrail.errors import DataError

    split = dataset.splits.get("train") or next(iter(dataset.splits.values()))
    sizes = []
    for image in permute_indices(np.arange(min(101, len(split))), len(split), counter_rng.derive_key(0, "pixels")):
        with contextlib.suppress(DataError, OSError):
            source = split.read_image(int(image))
            if isinstance(source, Path | bytes):
                header = read_header(source, name=split.get_image_name(int(image)))
                sizes.append(header.width * header.height)
            else:
                sizes.append(source.width * source.height)
    return int(statistics.median(sizes or [224 * 224]))


def use_whole_images(trained: "Trained", recipe: Recipe) -> tuple["Trained", "PreprocessConfig"]:
    """The model with views of whole images, and the larger ones that training cuts its crops of."""
    assert trained.preprocess is not None
    assert recipe.resize is not None
    view = dataclasses.replace(trained.preprocess, resize=trained.preprocess.size)
    room = tuple(round(side * recipe.resize) for side in view.size)
    return dataclasses.replace(trained, preprocess=view), dataclasses.replace(view, resize=room)


def _parse_decisions(replan: str | None) -> tuple[tuple[int, int], ...]:
    """3:5,4:6 -> ((3, 5), (4, 6))."""
    found = [re.fullmatch(r"(\d+):(\d+)", each) for each in replan.split(",")] if replan else []
    pairs = [(int(each[1]), int(each[2])) for each in found if each]
    ordered = all(before[0] < after[0] <= before[1] for before, after in itertools.pairwise(pairs))
    if len(pairs) < len(found) or not ordered or any(step > steps for step, steps in pairs):
        raise UsageError(f"--replan is {replan!r:.80}; give STEP:STEPS,... as the report of a run with --minutes does")
    return tuple(pairs)


def _time_and_build_deadline(run: "TrainingRun", minutes: float, start_time: float) -> "Deadline":
    """By when the run must have ended."""
    from vitrail.train.time_estimate import build_deadline

    output.print_note("timing a few steps")
    return build_deadline(run, minutes * 60, start_time, max_epochs=max(MAX_EPOCHS, run.recipe.epochs))


def _plan_run(run: "TrainingRun", deadline: "Deadline", *, choose_side: bool, warmup: int) -> tuple[float, int | None]:
    """Epochs and, where it is to be chosen, the image side for a run that has to end in time."""
    from vitrail.data.image_scan import measure_median_short_side
    from vitrail.model.cost import count_training_flops

    config, side = run.config, None
    minutes = output.pluralize(deadline.budget_seconds / 60, "minute")
    if choose_side and isinstance(config, ViTConfig) and config.image_size[0] == config.image_size[1]:
        own = config.image_size[0]
        epochs = deadline.fit_steps(0) * deadline.batch_size / deadline.train_images
        photo = measure_median_short_side(run.train_split)
        side = recipes.choose_finetune_size(
            own, config.stride, images=deadline.train_images, photo_size=photo, epochs=epochs
        )
        smaller = dataclasses.replace(config, image_size=(side, side))
        deadline = deadline.scale_image_cost(count_training_flops(smaller, 1) / count_training_flops(config, 1))
        if side != own:
            output.print_note(f"{minutes}: images of {side} pixels, the model's are {own} (--image-size changes it)")
    steps = deadline.fit_steps(0)
    if steps < 1:
        after, step = (
            deadline.estimate_seconds_after(is_evaluated=False),
            deadline.seconds_per_image * deadline.batch_size,
        )
        output.print_note(
            f"warning: {minutes} {'is' if deadline.budget_seconds == 60 else 'are'} too short: a step takes about"
            f" {runs.format_duration(step)}, and what follows training {runs.format_duration(after)} (the images held out,"
            f" {output.pluralize(deadline.test_images, 'test image')}, the report); one step is trained"
        )
    epochs = max(steps, warmup + 1) * deadline.batch_size / deadline.train_images
    less = ", which take less: more would not help" if steps == deadline.max_steps else ""
    output.print_note(
        f"{minutes}: about {output.pluralize(float(f'{epochs:.3g}'), 'epoch')}{less}; corrected as the run goes"
    )
    return epochs, side


def _is_trained_on_all(folder: Path, dataset: "Dataset") -> bool:
    """Whether a run that was begun has all images of the dataset, by its config.json."""
    begun = next(folder.glob("**/config.json"), None)
    images = None if begun is None else json_module.loads(begun.read_text()).get("images")
    return images == {name: len(split) for name, split in dataset.splits.items()}


def _read_plan(config_path: Path) -> tuple[float, int | None]:
    """Epochs and image side of a run that was begun, by its config.json."""
    recipe = json_module.loads(config_path.read_text())["recipe"]
    return float(recipe["epochs"]), recipe["image_size"]


def _start_head_from_probe(run: "TrainingRun", folder: Path, *, resume: bool) -> "TrainingRun":
    """The run with a head that starts from a probe, where its recipe says so and nothing was trained yet.

    A quarter of the run's time is for that, and a few images a class.
    """
    from vitrail.runtime import distributed
    from vitrail.train import checkpoint
    from vitrail.train.head_init import fit_head

    trained = distributed.run_on_rank0(lambda: resume and bool(checkpoint.list_checkpoints(folder / "checkpoints")))
    if trained or run.recipe.head_init is None:
        return run
    with output.show_progress("features for the head") as progress:
        images = max(
            round(_MAX_PROBE_SHARE * 3 * run.plan.total_positions),
            _MIN_PROBE_IMAGES_PER_CLASS * len(run.dataset.classes),
        )
        return fit_head(run, images, progress=progress)


def _repeat_with_seeds(run: "TrainingRun", folder: Path, count: int) -> Iterator[tuple["TrainingRun", Path]]:
    """The same run with several seeds, each in a folder of its own."""
    if count == 1:
        yield run, folder
        return
    for seed in range(run.seed, run.seed + count):
        output.print_note(f"seed {seed}, the last is {run.seed + count - 1}")
        yield dataclasses.replace(run, seed=seed), folder / f"seed-{seed}"
