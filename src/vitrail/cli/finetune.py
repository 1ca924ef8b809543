"""`vitrail finetune DATA --model M`: fine-tune a trained model on your own images."""

import os
import statistics
import time
from typing import Annotated, Any, Literal

import tyro

from vitrail import recipes
from vitrail.cli import output, runs


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
    track: Literal["tensorboard"] | None = None,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Fine-tune a model on new images and classes: a zero head replaces its own, and all layers are trained.

    Args:
        data: A folder, a .csv or .jsonl, shards, a downloaded dataset, digits, or hf:ORG/NAME.
        model: A file or folder of any known format, hf:ORG/NAME or timm:NAME.
        recipe: default works best for most datasets, paper is the paper's (SGD at 384 pixels), bit is BiT-HyperRule.
        image_size: Resolution instead of the model's (the paper's: 384); positions are resampled.
        minutes: The time limit of each run, everything included; it trains for as long as fits, up to 100 epochs.
        epochs: Passes over the training images, instead of the recipe's.
        batch: Images in a step, instead of the recipe's.
        lr: The peak learning rate, instead of the recipe's.
        warmup: Steps of warm-up, instead of the recipe's.
        replan: Repeat the step planning of a run with --minutes; its report has the command.
        layers: Layers below the head that are trained; 0 for the head alone.
        keep_head: Keep the model's own head, which must have the data's classes, in any order.
        from_scratch: Start from a preset's random weights (--model s16), which have learned nothing.
        preprocess: Mean, std and interpolation for weights that do not state them.
        balanced: Give every class the same weight, however many images it has.
        strict: Refuse unreadable images and empty class folders, instead of leaving out up to a tenth of the images.
        train_on_val: Train on the validation images too, once all choices are made; then the last weights are kept.
        number_of_runs: Repeat with the next seeds, and print mean and standard deviation.
        out: The run's folder; runs/finetune, runs/finetune-2, ... by default. s3://bucket/NAME: runs/NAME, copied.
        seed: The seed of order, augmentation and dropout.
        device: cpu, cuda or mps; the best available by default.
        workers: Processes that prepare images; one for each core but one by default.
        micro_batches: Parts in which a step is computed, if all of it does not fit in memory.
        recompute: Recompute activations in the backward pass instead of keeping them: less memory, a third slower.
        shard: Shard the model over the processes that torchrun starts, instead of copying it to each (FSDP).
        resume: Resume an interrupted run from its newest intact checkpoint: the same command again.
        overwrite: Replace the run in that folder.
        save_every: Minutes between checkpoints, which are written in the background.
        deterministic: Make a GPU compute the same bits in every run; somewhat slower.
        verify_every: Compute one in so many steps twice, and stop if the results differ; 0 for none.
        track: Also write the numbers of every step for tensorboard (extra `track`), in the run's folder.
        dry_run: Show what would be done, the cost and the first batch, and train nothing.
        json: Print the result as JSON.
    """
    start_time = time.monotonic()
    if minutes is not None:  # torch's threads wait for each other asleep: spinning, they waste a busy machine's time
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is loaded
    from vitrail.train.finetune import FinetuneOptions, check_initial_model, finetune, plan_finetuning
    from vitrail.train.recipe_overrides import RecipeOverrides
    from vitrail.train.run_execution import RunOptions, join_run_processes

    options = FinetuneOptions(
        recipe=recipe,
        overrides=RecipeOverrides(epochs=epochs, batch=batch, lr=lr, warmup=warmup),
        image_size=image_size,
        minutes=minutes,
        replan=replan,
        trainable_layers=layers,
        keep_head=keep_head,
        from_scratch=from_scratch,
        preprocess=preprocess,
        number_of_runs=number_of_runs,
        run=RunOptions(
            out=out,
            resume=resume,
            overwrite=overwrite,
            save_every=save_every,
            verify_every=verify_every,
            track=track,
            seed=seed,
            device=device,
            workers=workers,
            micro_batches=micro_batches,
            recompute=recompute,
            shard=shard,
            deterministic=deterministic,
            strict=strict,
            balanced=balanced,
            train_on_val=train_on_val,
        ),
    )
    with runs.silence_other_ranks():
        if dry_run:
            model = check_initial_model(model, options, output.print_note)
            with join_run_processes(options.run, runs.make_callbacks()) as (group, group_device, callbacks):
                plan = plan_finetuning(
                    data, model, options, group, group_device, callbacks, start_time=start_time, dry_run=True
                )
                runs.print_dry_run(plan.run, as_json=json)
            return
        results = finetune(data, model, options, runs.make_callbacks(), start_time=start_time)
        if results:
            _print_results(results, as_json=json)


def _print_results(results: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print the result of each run, and their mean."""
    from vitrail.train.run_results import summarize_result

    top1 = [facts["top1"] for facts in results]
    deviation = statistics.stdev(top1) if len(results) > 1 else None
    if as_json:
        summary = {"mean": statistics.mean(top1), "std": deviation, "n": len(results), "runs": results}
        output.print_json(results[0] if deviation is None else summary)
        return
    for facts in results:
        print(summarize_result(facts))
    if deviation is not None:
        mean = f"{statistics.mean(top1):.2%} ± {deviation:.2%}"
        print(f"{results[0]['split']}: {mean} (mean and standard deviation of {len(results)} runs)")
