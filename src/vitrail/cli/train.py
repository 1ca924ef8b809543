"""`vitrail train RECIPE --data DATA`: train a model from random weights."""

from typing import Annotated, Literal

import tyro

from vitrail.cli import output, runs
from vitrail.config import MaskedTarget


def main(
    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")],
    data: Annotated[str, tyro.conf.arg(metavar="DATA")],
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None,
    epochs: Annotated[float | None, tyro.conf.arg(metavar="N")] = None,
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    lr: Annotated[float | None, tyro.conf.arg(metavar="RATE")] = None,
    warmup: Annotated[int | None, tyro.conf.arg(metavar="STEPS")] = None,
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE...")] = (),
    target: MaskedTarget | None = None,
    balanced: bool = False,
    strict: bool = False,
    train_on_val: bool = False,
    probe: Annotated[int, tyro.conf.arg(metavar="SHOTS")] = 0,
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
    """Train a model from random weights by a named recipe, and keep the best weights by validation accuracy.

    Recipes called mpp and mae learn without labels, from any folder of images: their weights have no head, and are for
    `finetune` and `probe`. The best weights are those with the lowest validation loss.

    Args:
        recipe: A name from `vitrail list recipes`.
        data: A folder, a .csv or .jsonl, shards, a downloaded dataset, digits, or hf:ORG/NAME.
        out: The run's folder; runs/train, runs/train-2, ... by default. s3://bucket/NAME: runs/NAME, copied.
        epochs: Passes over the training images, instead of the recipe's.
        batch: Images in a step, instead of the recipe's.
        lr: The peak learning rate, instead of the recipe's.
        warmup: Steps of warm-up, instead of the recipe's; a shorter run or a smaller dataset has a shorter one.
        settings: Other settings instead of the recipe's: positions, pool, hidden_head, depth, width, optimizer,
            weight_decay, decay, dropout, mixup and all others; a wrong name lists them.
        target: The prediction target of masked patches, instead of the recipe's (mpp and mae).
        balanced: Give every class the same weight, however many images it has.
        strict: Refuse unreadable images and empty class folders, instead of leaving out up to a tenth of the images.
        train_on_val: Train on the validation images too, once all choices are made; then the last weights are kept.
        probe: At each evaluation, also measure a linear classifier fitted to so many images of each class.
        seed: The seed of weights, order, augmentation and dropout.
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
    from vitrail.train.pretrain import PretrainingOptions, build_pretraining_run, choose_recipe, pretrain
    from vitrail.train.recipe_overrides import RecipeOverrides
    from vitrail.train.run_execution import RunOptions, join_run_processes
    from vitrail.train.run_results import summarize_result

    options = PretrainingOptions(
        overrides=RecipeOverrides(epochs=epochs, batch=batch, lr=lr, warmup=warmup),
        settings=settings,
        target=target,
        probe_shots=probe,
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
            chosen = choose_recipe(recipe, options)
            with join_run_processes(options.run, runs.make_callbacks()) as (group, group_device, callbacks):
                run = build_pretraining_run(chosen, data, options, group, group_device, callbacks)
                runs.print_dry_run(run, as_json=json)
            return
        facts = pretrain(recipe, data, options, runs.make_callbacks())
        if facts is not None:
            output.print_json(facts) if json else print(summarize_result(facts))
