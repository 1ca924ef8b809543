"""Fine-tune a trained model on a dataset: what `vitrail finetune` calls."""

import contextlib
import dataclasses
import itertools
import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch

from vitrail import presets, recipes
from vitrail.config import PreprocessConfig, Recipe, ViTConfig
from vitrail.data.dataset import Dataset
from vitrail.data.image_headers import read_header
from vitrail.data.image_scan import measure_median_short_side
from vitrail.data.randomness import sample_indices
from vitrail.data.sources import DataSource, get_data_name
from vitrail.errors import DataError, UsageError
from vitrail.formatting import format_duration, pluralize
from vitrail.model.cost import count_training_flops
from vitrail.runtime import distributed
from vitrail.runtime.distributed import ProcessGroup
from vitrail.runtime.workers import Notify, ignore_note
from vitrail.training import recipe_overrides, run_folder
from vitrail.training.dataset_checks import check_classes, check_images, list_dataset_notes
from vitrail.training.head_init import start_head_from_probe
from vitrail.training.recipe_overrides import RecipeOverrides
from vitrail.training.run_execution import SILENT, RunCallbacks, RunOptions, execute_run, join_run_processes
from vitrail.training.run_results import collect_result_facts
from vitrail.training.time_estimate import Deadline, build_deadline
from vitrail.training.training_run import TrainingRun, adapt_to_dataset
from vitrail.weights import builtin
from vitrail.weights.load import describe_license, is_preset, load
from vitrail.weights.trained import Trained

PreprocessName = Literal["imagenet", "inception", "torchvision"]
MAX_EPOCHS = 100  # of a run with a time limit, unless the recipe has more
_SUGGESTED_MODEL = "timm:vit_small_patch16_224.augreg_in21k"
_MAX_CHECK_SHARE = 0.15  # of the minutes may be spent on checking the images
_MEDIAN_SAMPLE = 101  # images whose median is taken for the usual size


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """How a model is fine-tuned."""

    recipe: recipes.FinetuneKind | str | Path | Recipe = "default"
    """A kind, which chooses by the number of images; a .toml or .json file; or a recipe without a model."""
    settings: Sequence[str] | Mapping[str, Any] = ()
    """Other settings of the recipe: NAME=VALUE, or values by name."""
    overrides: RecipeOverrides = dataclasses.field(default_factory=RecipeOverrides)
    image_size: int | None = None
    """Resolution instead of the model's; positions are resampled."""
    minutes: float | None = None
    """The time limit of each run, everything included; it decides the epochs."""
    replan: str | None = None
    """How a run with a time limit was planned again, to repeat it: STEP:STEPS,..."""
    trainable_layers: int | None = None
    """Layers below the head that are trained; 0 for the head alone, None for all."""
    lora: int | None = None
    """The rank of LoRA's updates, which are trained instead of layers; other settings of it are lora.NAME."""
    keep_head: bool = False
    from_scratch: bool = False
    """Start from a preset's random weights."""
    preprocess: PreprocessName | None = None
    """Mean, std and interpolation for weights that do not state them."""
    number_of_runs: int = 1
    """Runs with consecutive seeds."""
    run: RunOptions = dataclasses.field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        if self.number_of_runs < 1:
            raise UsageError(f"--runs is {self.number_of_runs}; it must be at least 1")
        decides_epochs = self.overrides.epochs is not None or self.replan is not None
        if self.minutes is not None and (decides_epochs or not 0 < self.minutes < math.inf):
            raise UsageError(
                f"--minutes is {self.minutes:g}; it must be above 0"
                if not decides_epochs
                else "--minutes decides the epochs; give --minutes, or --epochs (and --replan with it), not both"
            )
        if self.lora is not None and self.trainable_layers is not None:
            raise UsageError("--lora trains updates of frozen layers, and --layers the layers themselves: give one")


DEFAULT_OPTIONS = FinetuneOptions()


def finetune(
    data: DataSource,
    model: str | Path | Trained | None,
    options: FinetuneOptions = DEFAULT_OPTIONS,
    callbacks: RunCallbacks = SILENT,
    *,
    start_time: float | None = None,
    baselines: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Fine-tune a model in a run folder; return the facts of each run's result.

    `baselines` are test images that simpler methods classify correctly, for the report. A new zero head replaces the
    model's own; without a model, `builtin` is fine-tuned. The time limit counts from `start_time` (time.monotonic), by
    default now.
    """
    start_time = time.monotonic() if start_time is None else start_time
    model = check_initial_model(model, options, callbacks.notify)
    results = []
    with contextlib.ExitStack() as stack:
        group, device, callbacks = stack.enter_context(join_run_processes(options.run, callbacks))
        plan = plan_finetuning(data, model, options, group, device, callbacks, start_time=start_time)
        distributed.run_on_rank0(lambda: stack.enter_context(run_folder.lock_run_folder(plan.folder)))  # of all seeds
        deadline = plan.deadline
        for run, folder in _repeat_with_seeds(plan, options.number_of_runs, callbacks.notify):
            run = start_head_from_probe(run, folder, resume=plan.resume, show_progress=callbacks.show_progress)
            result = execute_run(
                run,
                folder,
                get_data_name(data),
                options.run,
                callbacks,
                resume=plan.resume,
                audit=plan.audit,
                deadline=deadline,
                baselines=baselines,
            )
            if result is not None:
                results.append(collect_result_facts(run, result, folder))
            deadline = deadline and dataclasses.replace(deadline, start_time=time.monotonic())
        return distributed.run_on_rank0(lambda: results)


def check_initial_model(
    model: str | Path | Trained | None, options: FinetuneOptions, notify: Notify
) -> str | Path | Trained:
    """The MODEL to start from, by default `builtin`; refused unless it is trained or may have random weights."""
    if isinstance(model, Trained | Path):
        return model
    if model is None:
        if options.from_scratch:
            raise UsageError("--from-scratch starts from the random weights of a preset: name one, such as --model s16")
        notify(
            f"starting from the built-in {builtin.SUMMARY}. Larger models gain: from 10 photos of each class, a probe"
            " of DeiT-Tiny at 224 pixels gets 74.4 % of Flowers-102, of the built-in model 67.5 %. To start from one:"
            f" --model {_SUGGESTED_MODEL}"
        )
        return builtin.NAME
    if is_preset(model) and not (options.from_scratch or options.run.resume):
        raise UsageError(
            f"{model} is a preset, whose weights are random and have learned nothing: name a trained model (--model"
            f" {_SUGGESTED_MODEL}, a file, a run's folder), or add --from-scratch to start with random weights"
        )
    if options.from_scratch and not is_preset(model):
        raise UsageError(f"--from-scratch is for presets, and {model} is none: omit it, or give a preset (--model s16)")
    if options.from_scratch:
        notify(f"warning: {model} starts with random weights, which have learned nothing")
    return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetunePlan:
    """A run that is ready to start."""

    run: TrainingRun
    folder: Path
    resume: bool
    audit: dict[str, Any] | None
    deadline: Deadline | None


def plan_finetuning(
    data: DataSource,
    model: str | Path | Trained,
    options: FinetuneOptions,
    group: ProcessGroup,
    device: torch.device,
    callbacks: RunCallbacks,
    *,
    start_time: float,
    dry_run: bool = False,
) -> FinetunePlan:
    """Choose the folder, check data and model, and build the run; a dry run reads no images and uses no folder."""
    run_options, notify = options.run, callbacks.notify
    own_recipe = recipes.load_finetune_recipe(options.recipe, options.lora)
    recipe_overrides.warn_about_own_loss(options.recipe, run_options.loss_function, notify)
    kind = cast(recipes.FinetuneKind, options.recipe)  # where there is no recipe of the user's own
    base_recipe = own_recipe or recipes.build_finetune_recipe(kind, 1, 1, lora=options.lora)
    base_recipe = recipe_overrides.set_distillation(base_recipe, run_options.teacher)
    recipe_overrides.override_settings(base_recipe, options.settings, options.overrides)  # typos first
    if base_recipe.lora is not None and options.from_scratch:
        raise UsageError("LoRA adds to the layers of a trained model, and random weights have learned nothing: omit it")
    used_options = dataclasses.replace(run_options, out=None) if dry_run else run_options
    folder, resume = used_options.choose_folder("finetune" if run_options.teacher is None else "distill", group, notify)
    dataset, audit = run_options.open_dataset(data), None
    for note in list_dataset_notes(dataset):
        notify(note)
    check_classes(dataset, strict=run_options.strict, train_on_val=run_options.train_on_val)
    trained = model if isinstance(model, Trained) else load(model)  # report a typo before every image is read
    license_note = None if isinstance(model, Trained) else describe_license(model, trained)
    if license_note is not None:
        notify(license_note)
    initial_model = set_preprocess(trained, options.preprocess)
    if dry_run:
        dataset = dataclasses.replace(dataset, skip_bad=not run_options.strict)  # a run would leave them out
    else:
        name = get_data_name(data)
        dataset, audit = _check_finetune_images(dataset, name, folder, options, callbacks, resume=resume)
    median_pixels = compute_median_pixels(dataset) if options.recipe == "bit" else 0
    builder = _RunBuilder(dataset, initial_model, options, own_recipe, group, device, median_pixels)
    run, deadline = builder.build_run(builder.build_recipe(options.overrides.epochs)), None
    if own_recipe is not None:
        recipe_overrides.warn_about_large_batch(run.recipe, len(run.train_split), notify)
    if options.minutes is not None:
        config_path = next(folder.glob("**/config.json"), None) if resume else None
        run, deadline = _fit_to_time(builder, run, options.minutes, start_time, config_path, notify)
    return FinetunePlan(run=run, folder=folder, resume=resume, audit=audit, deadline=deadline)


def _check_finetune_images(
    dataset: Dataset, data: str, folder: Path, options: FinetuneOptions, callbacks: RunCallbacks, *, resume: bool
) -> tuple[Dataset, dict[str, Any] | None]:
    """The dataset without bad images and its audit; a time limit also limits the time for that."""
    seconds = math.inf
    if options.minutes is not None and not (options.run.strict or resume):
        seconds = options.minutes * 60 * _MAX_CHECK_SHARE
    checked, audit = check_images(
        dataset,
        data,
        strict=options.run.strict,
        seconds=seconds,
        notify=callbacks.notify,
        show_progress=callbacks.show_progress,
    )
    if resume and distributed.run_on_rank0(lambda: _is_trained_on_all(folder, dataset)):
        checked = dataclasses.replace(dataset, skip_bad=not options.run.strict)  # the run had no time to check them
    check_classes(checked, train_on_val=options.run.train_on_val)
    return checked, audit


def _is_trained_on_all(folder: Path, dataset: Dataset) -> bool:
    """Whether the run in the folder uses all images of the dataset, by its config.json."""
    config_path = next(folder.glob("**/config.json"), None)
    images = None if config_path is None else run_folder.read_run_config(config_path).get("images")
    return images == {name: len(split) for name, split in dataset.splits.items()}


@dataclasses.dataclass(frozen=True)
class _RunBuilder:
    """Builds recipes and runs of one dataset and model."""

    dataset: Dataset
    initial_model: Trained
    options: FinetuneOptions
    own_recipe: Recipe | None
    group: ProcessGroup
    device: torch.device
    median_pixels: int
    """Of a training image, by which BiT's rule chooses the resolution; other recipes do not need it."""

    def build_recipe(self, epochs: float | None, image_size: int | None = None) -> Recipe:
        """The recipe for these epochs; `image_size` is used where the options have none."""
        options = self.options
        recipe = recipe_overrides.set_distillation(self._choose_base_recipe(epochs), options.run.teacher)
        recipe = recipe_overrides.override_settings(recipe, options.settings, options.overrides)
        sizes = (options.image_size, image_size, recipe.image_size)
        recipe = dataclasses.replace(
            recipe,
            trainable_layers=(
                recipe.trainable_layers if options.trainable_layers is None else options.trainable_layers
            ),
            logit_adjustment=recipe.logit_adjustment or options.run.balanced,
            image_size=next((size for size in sizes if size is not None), None),
        )
        if options.keep_head:  # it is trained already, like the rest
            recipe = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, head_lr=None))
        if options.keep_head or options.from_scratch or self.dataset.multi_label or recipe.distillation is not None:
            recipe = dataclasses.replace(recipe, head_init=None)
        recipe = recipe_overrides.override_recipe(recipe, dataclasses.replace(options.overrides, epochs=None))
        return recipe_overrides.choose_loss(recipe, self.dataset)

    def _choose_base_recipe(self, epochs: float | None) -> Recipe:
        """The user's own recipe, or the one that the options' kind chooses for the dataset and the model."""
        images = len(self.dataset.splits["train"]) if "train" in self.dataset.splits else 1
        if self.own_recipe is not None:
            recipe = recipe_overrides.override_recipe(self.own_recipe, RecipeOverrides(epochs=epochs))
            return recipe_overrides.shorten_warmup(recipe, images, ignore_note)
        config = self.initial_model.model.config
        stride = config.stride if isinstance(config, ViTConfig) else 1
        kind = cast(recipes.FinetuneKind, self.options.recipe)
        return recipes.build_finetune_recipe(
            kind, images, stride, epochs=epochs, pixels=self.median_pixels, lora=self.options.lora
        )

    def build_run(self, recipe: Recipe) -> TrainingRun:
        """The run of a recipe."""
        initial_model = adapt_to_dataset(self.initial_model, self.dataset, recipe, keep_head=self.options.keep_head)
        train_preprocess = None
        if recipe.resize_whole_image:
            initial_model, train_preprocess = use_whole_images(initial_model, recipe)
        return self.options.run.build_run(
            recipe,
            self.dataset,
            self.group,
            self.device,
            initial_model=initial_model,
            train_preprocess=train_preprocess,
            decisions=parse_decisions(self.options.replan),
        )


def set_preprocess(trained: Trained, preprocess: str | None) -> Trained:
    """The model with the named preprocessing, which must not contradict the one it states."""
    if preprocess is None:
        return trained
    config, own = trained.model.config, trained.preprocess
    named = presets.build_preprocess_config(preprocess, config.image_size, config.channels)
    if own is not None and (own.mean, own.std) != (named.mean, named.std):
        raise UsageError(
            f"these weights were trained with mean {own.mean} and std {own.std}, and --preprocess {preprocess} has"
            f" {named.mean} and {named.std}: omit it. (vitrail convert overrides a file that is wrong)"
        )
    return trained if own is not None else dataclasses.replace(trained, preprocess=named)


def compute_median_pixels(dataset: Dataset) -> int:
    """The pixels of a typical training image: the median of up to 101, by their headers; bad ones do not count."""
    split = dataset.splits.get("train") or next(iter(dataset.splits.values()))
    pixels = []
    for index in sample_indices(_MEDIAN_SAMPLE, len(split), "pixels").tolist():
        with contextlib.suppress(DataError, OSError):
            image = split.read_image(index)
            if isinstance(image, Path | bytes):
                header = read_header(image, name=split.get_image_name(index))
                pixels.append(header.width * header.height)
            else:
                pixels.append(image.width * image.height)
    return int(statistics.median(pixels or [224 * 224]))


def use_whole_images(trained: Trained, recipe: Recipe) -> tuple[Trained, PreprocessConfig]:
    """The model with inputs of whole images, and the larger preprocessing that training cuts its crops from."""
    assert trained.preprocess is not None
    assert recipe.resize is not None
    preprocess = dataclasses.replace(trained.preprocess, resize=trained.preprocess.size)
    larger = tuple(round(side * recipe.resize) for side in preprocess.size)
    return dataclasses.replace(trained, preprocess=preprocess), dataclasses.replace(preprocess, resize=larger)


def parse_decisions(replan: str | None) -> tuple[tuple[int, int], ...]:
    """3:5,4:6 -> ((3, 5), (4, 6))."""
    matches = [re.fullmatch(r"(\d+):(\d+)", text) for text in replan.split(",")] if replan else []
    pairs = [(int(match[1]), int(match[2])) for match in matches if match]
    is_ordered = all(before[0] < after[0] <= before[1] for before, after in itertools.pairwise(pairs))
    if len(pairs) < len(matches) or not is_ordered or any(step > steps for step, steps in pairs):
        raise UsageError(f"--replan is {replan!r:.80}; give STEP:STEPS,... as the report of a run with --minutes does")
    return tuple(pairs)


# --- a time limit -----------------------------------------------------------------------------------------------------


def _fit_to_time(
    builder: _RunBuilder, run: TrainingRun, minutes: float, start_time: float, config_path: Path | None, notify: Notify
) -> tuple[TrainingRun, Deadline]:
    """The run with as many epochs as fit into the minutes, or those of the run to resume; and its deadline."""
    notify("timing a few steps")
    deadline = build_deadline(run, minutes * 60, start_time, max_epochs=max(MAX_EPOCHS, run.recipe.epochs))

    def plan_on_rank0() -> tuple[float, int | None]:
        if config_path is not None:
            recipe = run_folder.read_run_config(config_path)["recipe"]
            return float(recipe["epochs"]), recipe["image_size"]
        options = builder.options
        can_choose_size = options.image_size is None and options.recipe == "default"
        return plan_length(
            run, deadline, can_choose_size=can_choose_size, warmup=options.overrides.warmup or 0, notify=notify
        )

    epochs, image_size = distributed.run_on_rank0(plan_on_rank0)
    planned = builder.build_run(builder.build_recipe(epochs, image_size))
    cost = count_training_flops(planned.config, 1) / count_training_flops(run.config, 1)
    scaled = deadline.scale_image_cost(cost)
    return planned, dataclasses.replace(scaled, eval_every_epochs=planned.eval_every_epochs)


def plan_length(
    run: TrainingRun, deadline: Deadline, *, can_choose_size: bool, warmup: int, notify: Notify
) -> tuple[float, int | None]:
    """Epochs and, if it may be chosen, the image size of a run that must end in time."""
    image_size = None
    minutes = pluralize(deadline.budget_seconds / 60, "minute")
    if can_choose_size and isinstance(run.config, ViTConfig) and run.config.image_size[0] == run.config.image_size[1]:
        image_size, deadline = _choose_image_size(run, run.config, deadline)
        if image_size != run.config.image_size[0]:
            notify(
                f"{minutes}: images of {image_size} pixels, the model's are {run.config.image_size[0]} (--image-size"
                " changes it)"
            )
    steps = deadline.fit_steps(0)
    if steps < 1:
        step_seconds = deadline.seconds_per_image * deadline.batch_size
        seconds_after = deadline.estimate_seconds_after(is_evaluated=False)
        notify(
            f"warning: {minutes} {'is' if deadline.budget_seconds == 60 else 'are'} too short: a step takes about"
            f" {format_duration(step_seconds)}, and what follows training {format_duration(seconds_after)} (validation,"
            f" {pluralize(deadline.test_images, 'test image')}, the report); one step is trained"
        )
    epochs = max(steps, warmup + 1) * deadline.batch_size / deadline.train_images
    reason = ", which take less: more would not help" if steps == deadline.max_steps else ""
    notify(f"{minutes}: about {pluralize(float(f'{epochs:.3g}'), 'epoch')}{reason}; corrected during the run")
    return epochs, image_size


def _choose_image_size(run: TrainingRun, config: ViTConfig, deadline: Deadline) -> tuple[int, Deadline]:
    """The image size that is best for the time left, and the deadline with the cost of such images."""
    image_size = recipes.choose_finetune_size(
        config.image_size[0],
        config.stride,
        images=deadline.train_images,
        photo_size=measure_median_short_side(run.train_split),
        epochs=deadline.fit_steps(0) * deadline.batch_size / deadline.train_images,
    )
    smaller = dataclasses.replace(config, image_size=(image_size, image_size))
    cost = count_training_flops(smaller, 1) / count_training_flops(config, 1)
    return image_size, deadline.scale_image_cost(cost)


def _repeat_with_seeds(plan: FinetunePlan, count: int, notify: Notify) -> Iterator[tuple[TrainingRun, Path]]:
    """The run with consecutive seeds, each in a folder of its own."""
    if count == 1:
        yield plan.run, plan.folder
        return
    for seed in range(plan.run.seed, plan.run.seed + count):
        notify(f"seed {seed}, the last is {plan.run.seed + count - 1}")
        yield dataclasses.replace(plan.run, seed=seed), plan.folder / f"seed-{seed}"
