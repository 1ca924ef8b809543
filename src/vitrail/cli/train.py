"""`vitrail train RECIPE --data DATA`: a model from nothing."""

import dataclasses
from typing import Annotated

import tyro

from vitrail import recipes
from vitrail.cli import output, runs
from vitrail.config import MaskedTarget, Recipe
from vitrail.errors import UsageError


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
    track: runs.Tracker | None = None,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Train a model from random weights by a named recipe, and keep the best weights by validation accuracy.

    Recipes called mpp and mae learn without labels, from any folder of images: their weights have no head, and
    `finetune` and `probe` take them. The best are those of the lowest validation loss.

    Args:
        recipe: One of those that `vitrail list recipes` shows.
        data: A folder, a .csv or .jsonl, shards, a set that was got, digits, or hf:ORG/NAME.
        out: The run's folder; runs/train, runs/train-2, ... by default. s3://bucket/NAME: runs/NAME, copied.
        epochs: Passes over the training images, in place of the recipe's.
        batch: Images in a step, in place of the recipe's.
        lr: Learning rate at its top, in place of the recipe's.
        warmup: Steps of warm-up, in place of the recipe's; a shorter run or a smaller dataset has a shorter one.
        settings: Other settings in place of the recipe's: positions, pool, hidden_head, depth, width, optimizer,
            weight_decay, decay, dropout, mixup and all others; a wrong name lists them.
        target: What is to be told of hidden patches, in place of the recipe's (mpp and mae).
        balanced: Let every class count alike, however many images it has.
        strict: Refuse unreadable images and empty class folders, rather than leave out up to a tenth of the images.
        everything: Train on the validation images too, once all choices are made; the last weights are kept then.
        probe: Also tell at each evaluation how well a linear classifier learns from so many images a class.
        seed: Of weights, order, augmentation and dropout.
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
    from vitrail.data.sources import open_dataset
    from vitrail.runtime.workers import count_available_cores
    from vitrail.train.training_run import TrainingRun

    if deterministic:
        runs.enable_determinism()
    named = recipes.override_settings(recipes.get_recipe(recipe), settings)
    chosen = runs.override_recipe(_set_masked_target(named, target), epochs=epochs, batch=batch, lr=lr, warmup=warmup)
    with runs.join_processes(device) as (group, found):
        dataset = open_dataset(data)
        runs.print_dataset_notes(dataset)
        if chosen.masked is None:
            runs.check_classes(dataset, strict=strict, train_on_val=train_on_val)
        if warmup is None and "train" in dataset.splits:
            chosen = runs.shorten_warmup(chosen, len(dataset.splits["train"]))
        task = TrainingRun(
            recipe=runs.choose_loss(dataclasses.replace(chosen, logit_adjustment=balanced), dataset),
            dataset=dataset,
            seed=seed,
            group=group,
            device=found,
            workers=max(0, count_available_cores() - 1) if workers is None else workers,
            micro_batches=micro_batches,
            recompute=recompute,
            shard=shard,
            train_on_val=train_on_val,
            probe_shots=probe,
        )
        if dry_run:
            runs.print_dry_run(task, as_json=json)
            return
        folder, resume = runs.choose_run_folder("train", out, group, resume=resume, overwrite=overwrite)
        dataset, report = runs.check_images(dataset, data, strict=strict)
        if chosen.masked is None:
            runs.check_classes(dataset, train_on_val=train_on_val)
        task = dataclasses.replace(task, dataset=dataset)
        result = runs.train_and_report(
            task,
            folder,
            out=out,
            data=data,
            track=track,
            report=report,
            resume=resume,
            overwrite=overwrite,
            save_every=save_every,
            verify_every=verify_every,
        )
        if result is None:
            return
        facts = runs.collect_result_facts(task, result, folder)
        output.print_json(facts) if json else print(runs.summarize_result(facts))


def _set_masked_target(recipe: Recipe, target: MaskedTarget | None) -> Recipe:
    """The recipe with another target of its hidden patches, if one is given."""
    if target is None:
        return recipe
    if recipe.masked is None:
        raise UsageError(f"--target {target} is for recipes that hide patches, such as mpp-cifar10: leave it away")
    return dataclasses.replace(recipe, masked=dataclasses.replace(recipe.masked, target=target))
