"""A training run as a value: recipe, dataset, initial weights, seed and machine, checked before it is computed."""

import copy
import dataclasses
import functools
import json
import math
import platform
from typing import Any, Literal

import torch

from vitrail.config import MaskedConfig, ModelConfig, PreprocessConfig, Recipe, ViTConfig, to_json
from vitrail.data import randomness
from vitrail.data.dataset import Dataset, Split
from vitrail.data.decode import get_jpeg_decoder_name
from vitrail.data.loader import BatchPlan, TrainingData
from vitrail.data.randomness import SampleOrder
from vitrail.errors import DataError, UsageError
from vitrail.evaluation import features, probe
from vitrail.formatting import pluralize
from vitrail.model import cost, lora, masked
from vitrail.model.masked import MaskedViT
from vitrail.model.vit import Model, ViT
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.runtime.workers import Notify
from vitrail.training import distillation, fsdp, optimizer, schedule
from vitrail.training.distillation import Distillation
from vitrail.training.losses import LossFunction, warn_about_mean
from vitrail.training.plan import build_config
from vitrail.training.step import TrainableModel, TrainState, build_train_state
from vitrail.weights.adapt import ZERO_HEAD, adapt, reorder_head
from vitrail.weights.trained import Origin, Trained, create_random, require_preprocess

MAX_EVALUATION_SHARE = 0.1  # of the time of training, at most
MAX_EVALUATIONS = 100  # at most, so that a long run does not spend its time on writing weights
IMBALANCE_THRESHOLD = 10  # the largest class over the smallest from which accuracy alone misleads
MIN_COMPILE_FLOPS = 2e16  # about two minutes of an H200: below it, compiling costs more than it saves


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run; with the same versions and threads it gives the same weights, bit for bit."""

    recipe: Recipe
    dataset: Dataset
    initial_model: Trained | None = None
    """The weights to start from (`adapt_to_dataset`); None for random ones of the recipe's preset."""
    teacher: Trained | None = None
    """The model to learn from, if the recipe has a distillation."""
    seed: int = 0
    group: ProcessGroup = SINGLE_PROCESS
    """Which of how many processes computes it; it does not change the result."""
    device: torch.device
    workers: int = 0
    micro_batches: int = 1
    train_on_val: bool = False
    """Whether val is trained on too, once all choices are made: then the last weights are kept, uncalibrated."""
    recompute: bool = False
    """Whether activations are recomputed in the backward pass instead of kept."""
    shard: bool = False
    """Whether the model is sharded over the processes (FSDP), instead of copied to each."""
    compile_blocks: bool | None = None
    """Whether blocks are compiled; None to decide by the length of the run."""
    eval_split: Literal["test", "val"] | None = None
    """The split that the result is measured on; None for test where there is one. With val, test is not read."""
    train_preprocess: PreprocessConfig | None = None
    """Preprocessing before training's crops, where it differs from evaluation's; of the same size, mean and std."""
    probe_shots: int = 0
    """Images of each class for the few-shot probe at each evaluation; 0 for none."""
    decisions: tuple[tuple[int, int], ...] = ()
    """(step, steps): how a run with a time limit was planned again, to repeat it (`loop.PlannedSteps`)."""
    loss_function: LossFunction | None = None
    """A loss that replaces the recipe's; only its name is recorded."""
    class_weights: tuple[float, ...] = ()
    """What multiplies the loss of each class's labels, one a class; empty for 1."""
    allow_empty_classes: bool = False
    """Whether a class may have no training image, as in a benchmark's few images of many classes."""

    def __post_init__(self) -> None:
        dataset = self.dataset
        if "train" not in dataset.splits or "val" not in dataset.splits:
            raise DataError(
                f"{dataset.name} has the splits {', '.join(dataset.splits)}; train and val are needed. Add a val, or"
                " images: of classes with three and more, some are held out for it"
            )
        if self.recipe.masked is None:
            self._check_labels()
        if self.plan.total_steps < 1:
            epochs, images = pluralize(self.recipe.epochs, "epoch"), pluralize(len(self.train_split), "image")
            raise UsageError(f"{epochs} of {images}: not one step; give more")
        if self.workers < 0:
            raise UsageError(f"workers is {self.workers}; it must be 0 or more")
        if self.eval_split is not None and self.eval_split not in dataset.splits:
            raise DataError(
                f"{dataset.name} has no {self.eval_split} to measure on; it has {', '.join(dataset.splits)}"
            )
        if self.probe_shots and self.shard:
            raise UsageError("--probe needs the whole model in each process: omit it, or --shard")
        if self.probe_shots and not dataset.classes:
            raise DataError(f"{dataset.name} has no labels for --probe to learn from: omit it")
        if self.probe_shots:
            probe.check_shots(features.read_labels(dataset.splits["train"]), dataset.classes, self.probe_shots)
        schedule.lr_scale(self.recipe.schedule, 0, self.plan.total_steps)  # refuses a warm-up longer than the run
        if (self.initial_model is None) == (self.recipe.model is None):
            raise UsageError("a recipe names a preset, or is for fine-tuning and is given a model: one of both")
        if self.initial_model is not None and self.initial_model.labels != dataset.classes:
            raise UsageError(
                "the model's classes are not those of the data; training.training_run.adapt_to_dataset changes them"
            )
        distillation.check_run(self)
        if self.recipe.masked is not None:
            masked.count_outputs_per_patch(self.config, self.recipe.masked)  # refuses a model that cannot be trained so

    def _check_labels(self) -> None:
        """Refuse labels that cannot be learned, or stored with the weights."""
        dataset = self.dataset
        if not dataset.classes:
            raise DataError(
                f"{dataset.name} has no labels to learn: sort the images into one folder per class, or list them with"
                " labels"
            )
        if dataset.multi_label and self.recipe.loss != "sigmoid":
            raise UsageError(
                "images with several labels are learned with the loss sigmoid, and this recipe has softmax"
            )
        empty = [name for name, number in zip(dataset.classes, self.class_counts, strict=True) if not number]
        if empty and not self.allow_empty_classes:
            raise DataError(
                f"{pluralize(len(empty), 'class')} without a training image, such as {empty[0]}: add some or remove it"
            )
        if self.class_weights and self.recipe.logit_adjustment:
            raise UsageError("--balanced and --class-weights both say how much a class counts: omit one of them")
        if self.class_weights and self.loss_function is not None:
            raise UsageError("class weights are for the recipe's loss, which `loss` replaces: omit one of them")
        if self.recipe.logit_adjustment and dataset.multi_label:
            raise UsageError("--balanced is for images of one label each, and these may have several")
        for name in dataset.classes:
            if not name.isascii() and name.encode(errors="replace").decode() != name:
                raise DataError(f"the class {name!r} has no valid name in UTF-8: rename its folder")

    @functools.cached_property
    def class_counts(self) -> list[int]:
        """Training images of each class."""
        counts: list[int] = self.train_split.count_per_class(len(self.dataset.classes)).tolist()
        return counts

    @property
    def plan(self) -> BatchPlan:
        """The steps and their images."""
        return BatchPlan(
            batch_size=self.recipe.batch,
            total_samples=round(self.recipe.epochs * len(self.train_split)),
            rank=self.group.rank,
            world_size=self.group.world_size,
            micro_batches=self.micro_batches,
        )

    def make_plan_up_to(self, steps: int) -> BatchPlan:
        """The plan; if the number of steps may change, one of full steps, as many as there may ever be."""
        if not (steps or self.decisions):
            return self.plan
        most = max(steps, self.plan.total_steps, *(total for _, total in self.decisions))
        return dataclasses.replace(self.plan, total_samples=most * self.recipe.batch)

    @functools.cached_property
    def train_split(self) -> Split:
        """The training images, with val if it is trained on."""
        train, val = self.dataset.splits["train"], self.dataset.splits["val"]
        return train.merge(val) if self.train_on_val else train

    @property
    def eval_every_epochs(self) -> int:
        """Epochs from one evaluation to the next: one, unless evaluation would take too large a share of the time."""
        # training on an image costs three forward passes
        cost = len(self.dataset.splits["val"]) / (3 * MAX_EVALUATION_SHARE * len(self.train_split))
        return max(1, math.ceil(cost), math.ceil(self.recipe.epochs / MAX_EVALUATIONS))

    @functools.cached_property
    def preprocess(self) -> PreprocessConfig:
        """How images are prepared in training's evaluation and every later command."""
        if self.initial_model is not None:
            assert self.initial_model.preprocess is not None, "`adapt_to_dataset` refuses a model without"
            return self.initial_model.preprocess
        config = self.config
        size, channels = config.image_size, config.channels
        whole = self.recipe.augment.crop in ("pad", "squash")  # training sees whole images, so evaluation does too
        resize = size if whole else (round(size[0] * (self.recipe.resize or 8 / 7)),)
        return PreprocessConfig(size=size, resize=resize, mean=(0.5,) * channels, std=(0.5,) * channels)

    @property
    def training_data(self) -> TrainingData:
        """Everything the loader needs to make training batches."""
        return TrainingData(
            split=self.train_split,
            order=SampleOrder(
                seed=self.seed,
                num_samples=len(self.train_split),
                shard_sizes=self.train_split.count_per_shard(),
                shard_window=self.train_split.shard_window,
            ),
            augment=self.recipe.augment,
            preprocess=self.train_preprocess or self.preprocess,
            seed=self.seed,
            num_classes=len(self.dataset.classes),
            masked=self.recipe.masked,
            num_patches=self.num_patches,
            skip_bad=self.dataset.skip_bad,
        )

    @property
    def num_classes(self) -> int:
        """Outputs of the model's head; 0 where it learns without labels."""
        return len(self.dataset.classes) if self.recipe.masked is None else 0

    @property
    def num_patches(self) -> int:
        """Patches of an image; 0 for a model without patches."""
        return math.prod(self.config.grid) if isinstance(self.config, ViTConfig) else 0

    def build_model(self) -> TrainableModel:
        """The model before its first step, on the device."""
        recipe = self.recipe
        if self.initial_model is not None:
            model = copy.deepcopy(self.initial_model.model)
        else:
            assert recipe.model is not None
            model = create_random(
                recipe.model,
                image_size=recipe.image_size,
                num_classes=self.num_classes,
                seed=self.seed,
                head_bias=recipe.head_bias,
                mimetic=recipe.mimetic,
                **recipe.settings,
            ).model
        if isinstance(model, ViT):
            model.set_regularization(dropout=recipe.dropout, stochastic_depth=recipe.stochastic_depth)
            model.recompute = self.recompute
        elif recipe.dropout or recipe.stochastic_depth or self.recompute:
            raise UsageError("a ResNet has neither dropout nor stochastic depth, and keeps its activations")
        if recipe.trainable_layers is not None:
            for name, parameter in model.named_parameters():
                is_head = name.startswith(lora.HEAD_PREFIXES)
                is_near = optimizer.layers_below_head(model, name) <= recipe.trainable_layers
                parameter.requires_grad_(is_near if recipe.trainable_layers else is_head)
        if recipe.lora is not None:
            lora.add_lora(model, recipe.lora, self._make_generator("lora"))
        if self.teacher is not None and recipe.distillation is not None and recipe.distillation.kind == "features":
            distillation.add_projection(model, self.teacher.model, self._make_generator("distillation"))
        return self._place_on_device(model if recipe.masked is None else self._add_masked_heads(model, recipe.masked))

    def build_state(self, model: TrainableModel | None = None, *, notify: Notify | None = None) -> TrainState:
        """The state before the first step, of a new model or of this one; `notify` is told of a loss that is a mean."""
        model = self.build_model() if model is None else model
        loss_function = self.loss_function
        if loss_function is not None and notify is not None and self.group.is_rank0:
            loss_function = warn_about_mean(loss_function, notify)
        return build_train_state(
            model,
            self.recipe,
            self.class_counts,
            class_weights=self.class_weights,
            loss_function=loss_function,
            distillation=self._build_distillation(),
            cuda_graph=self.can_use_cuda_graph,
        )

    def _build_distillation(self) -> Distillation | None:
        """The teacher on the device, with the loss that it adds."""
        if self.teacher is None or self.recipe.distillation is None:
            return None
        built = Distillation(self.teacher, self.recipe.distillation, self.dataset.classes, self.preprocess)
        if self.is_compiled:
            built.compile_blocks()
        return built.to(self.device)

    def _add_masked_heads(self, model: Model, config: MaskedConfig) -> MaskedViT:
        """The model with the heads and decoder of masked training."""
        assert isinstance(model, ViT), "another is refused before anything is computed"
        generator = self._make_generator("masked heads")
        return masked.initialize_masked_heads(MaskedViT(model, config, self.preprocess), generator)

    def _make_generator(self, purpose: str) -> torch.Generator:
        """The random numbers of what is initialized besides the model, by the run's seed."""
        return torch.Generator().manual_seed(randomness.derive_key(self.seed, purpose) >> 1)

    def _place_on_device(self, model: TrainableModel) -> TrainableModel:
        """The model on the device, or this process's shard of it, compiled if that is worthwhile."""
        if not self.is_sharded:
            model = model.to(self.device)
        if isinstance(model, ViT | MaskedViT) and self.is_compiled:
            model.compile_blocks()
        if self.is_sharded:
            fsdp.shard_model(model, self.device)
        return model

    @property
    def is_sharded(self) -> bool:
        """Whether the model is sharded; a single process cannot shard it."""
        return self.shard and self.group.world_size > 1

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are compiled."""
        if self.compile_blocks is not None:
            return self.compile_blocks
        return self.device.type == "cuda" and self.flops > MIN_COMPILE_FLOPS

    @property
    def can_use_cuda_graph(self) -> bool:
        """Whether a step is recorded once and replayed: on a GPU, if nothing in it waits for the host."""
        recipe = self.recipe
        waits = self.recompute or recipe.stochastic_depth or recipe.optimizer.kind == "sgd"
        whole = self.micro_batches == 1 and self.group.world_size == 1 and isinstance(self.config, ViTConfig)
        return self.device.type == "cuda" and whole and not waits

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        if self.initial_model is not None:
            return self.initial_model.model.config
        return build_config(self.recipe, self.num_classes)

    @property
    def flops(self) -> int:
        """The operations of all forward and backward passes."""
        return cost.count_training_flops(self.config, self.plan.total_samples, self.recipe.masked)

    @property
    def imbalance(self) -> float:
        """Images of the largest class over those of the smallest; 1 for a masked run."""
        return max(self.class_counts) / min(self.class_counts) if self.recipe.masked is None else 1.0


def adapt_to_dataset(trained: Trained, dataset: Dataset, recipe: Recipe, *, keep_head: bool = False) -> Trained:
    """The model with a zero head for the dataset's classes and the recipe's resolution, ready to be fine-tuned.

    With `keep_head` it keeps its own head, which must have these classes; its rows are reordered like the dataset's.
    """
    require_preprocess(trained)
    size = recipe.image_size
    if keep_head:
        adapted = adapt(reorder_head(trained, dataset.classes), image_size=size)
    else:
        adapted = adapt(trained, classes=len(dataset.classes), labels=dataset.classes, image_size=size)
        if recipe.head_init == "probe":
            adapted = _describe_probe_head(adapted)
    assert adapted.preprocess is not None
    if recipe.resize is not None:
        resize = (round(min(adapted.preprocess.size) * recipe.resize),)
        adapted = dataclasses.replace(adapted, preprocess=dataclasses.replace(adapted.preprocess, resize=resize))
    return adapted


def _describe_probe_head(trained: Trained) -> Trained:
    """The model whose changes say that a probe will replace the zeros of its head."""
    changes = [change.replace(ZERO_HEAD, "new, from a probe of the features") for change in trained.origin.changes]
    return dataclasses.replace(trained, origin=dataclasses.replace(trained.origin, changes=tuple(changes)))


def build_trained(run: TrainingRun, model: Model, step: int, steps: int) -> Trained:
    """The weights after `step` of `steps` with everything needed to use them, and where they come from."""
    masked_config, initial = run.recipe.masked, run.initial_model
    description, inherited = "trained", Origin(format="vitrail", name="")
    if masked_config is not None:
        description = f"pre-trained without labels ({masked_config.kind}, {masked_config.target})"
    if initial is not None:
        description, inherited = f"{initial.origin.name}, fine-tuned", initial.origin
    if run.recipe.lora is not None:
        description += f" with {run.recipe.lora.summary}"
    if run.teacher is not None:
        description += f" (teacher: {run.teacher.origin.name})"
    origin = Origin(
        format="vitrail",
        name=f"{description} on {run.dataset.name}, step {step} of {steps}",
        license=inherited.license,
        assumptions=inherited.assumptions,
        changes=inherited.changes,
    )
    if masked_config is not None:
        return Trained(model, run.preprocess, None, origin)
    return Trained(model, run.preprocess, run.dataset.classes, origin, multi_label=run.dataset.multi_label)


def describe_machine(run: TrainingRun) -> dict[str, Any]:
    """What the bits of a run depend on besides its configuration."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else run.device.type,
        "threads": torch.get_num_threads(),
        "processes": run.group.world_size,
        "sharded": run.is_sharded,
    }


def is_run_config(text: str | bytes) -> bool:
    """Whether the text of a config.json is that of a run."""
    try:
        config = json.loads(text)
    except ValueError:
        return False
    return isinstance(config, dict) and {"recipe", "steps", "preprocess"} <= config.keys()


def _get_qualified_name(function: LossFunction) -> str:
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"


def make_run_config(run: TrainingRun) -> dict[str, Any]:
    """The content of config.json: everything that decides the result."""
    plan = run.plan
    return {
        "recipe": to_json(run.recipe),
        "model": None if run.initial_model is None else to_json(run.initial_model.origin),
        "data": run.dataset.name,
        "images": {name: len(split) for name, split in run.dataset.splits.items()},
        "classes": list(run.dataset.classes),
        "multi_label": run.dataset.multi_label,
        "notes": list(run.dataset.notes),
        "preprocess": to_json(run.preprocess),
        "train_preprocess": None if run.train_preprocess is None else to_json(run.train_preprocess),
        "train_on_val": run.train_on_val,
        "eval_split": run.eval_split,
        "seed": run.seed,
        "steps": plan.total_steps,
        **({} if run.teacher is None else {"teacher": distillation.describe_teacher(run.teacher)}),
        **(
            {"class_weights": dict(zip(run.dataset.classes, run.class_weights, strict=True))}
            if run.class_weights
            else {}
        ),
        **({} if run.loss_function is None else {"loss_function": _get_qualified_name(run.loss_function)}),
        **({} if run.dataset.label_changes is None else {"relabel": run.dataset.label_changes._asdict()}),
        **({"decisions": [list(decision) for decision in run.decisions]} if run.decisions else {}),
        "micro_batches": plan.micro_batches,
        "world_size": plan.world_size,
        "sharded": run.is_sharded,
        "recompute": run.recompute,
        "compiled": run.is_compiled,
        "device": str(run.device),
        "threads": torch.get_num_threads(),
        "jpeg_decoder": get_jpeg_decoder_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
