"""What a run is: recipe, data, weights to begin with, seed and machine, checked before anything is computed."""

import copy
import dataclasses
import functools
import math
import platform
from typing import Any, Literal

import torch

from vitrail import presets
from vitrail.config import MaskedConfig, ModelConfig, PreprocessConfig, Recipe, ViTConfig, expand_image_size, to_json
from vitrail.data import counter_rng
from vitrail.data.dataset import Dataset, Split
from vitrail.data.decode import get_jpeg_decoder_name
from vitrail.data.loader import BatchPlan, TrainingData
from vitrail.data.order import SampleOrder
from vitrail.errors import DataError, UsageError
from vitrail.evaluate import features, probe
from vitrail.formatting import pluralize
from vitrail.model import cost as count
from vitrail.model import masked
from vitrail.model.build import Model
from vitrail.model.masked import MaskedViT
from vitrail.model.vit import ViT
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.train import fsdp, optimizer, schedule
from vitrail.train.step import TrainableModel
from vitrail.weights.adapt import adapt, reorder_head
from vitrail.weights.trained import Trained, create_random, require_preprocess

MAX_EVALUATION_SHARE = 0.1  # of the time of training, at most
MAX_EVALUATIONS = 100  # at most, so that a long run does not spend itself on writing weights
IMBALANCE_THRESHOLD = 10  # the largest class over the smallest from which accuracy alone misleads
MIN_COMPILE_FLOPS = 2e16  # about two minutes of an H200: below it, compiling costs more than it saves


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run; with the same versions and threads it gives the same weights."""

    recipe: Recipe
    dataset: Dataset
    initial_model: Trained | None = None
    """The weights to begin with, made to fit the data (`fitted`); None for random ones of the recipe's preset."""
    seed: int = 0
    group: ProcessGroup = SINGLE_PROCESS
    """Which of how many processes computes it; not what is computed."""
    device: torch.device
    workers: int = 0
    micro_batches: int = 1
    train_on_val: bool = False
    """Whether val is trained on too, once all choices are made: then the last weights are kept, as they are."""
    recompute: bool = False
    """Whether activations are computed again in the backward pass rather than kept."""
    shard: bool = False
    """Whether several processes divide the model among them, rather than have all of it each."""
    compile_blocks: bool | None = None
    """Whether blocks are compiled; None to decide by the length of the run."""
    eval_split: Literal["test", "val"] | None = None
    """The split that the result is of; None for test where there is one. With val, test is not read at all."""
    train_preprocess: PreprocessConfig | None = None
    """What training's crops are cut from, where that is not evaluation's view; of the same size, mean and std."""
    probe_shots: int = 0
    """Images a class from which each evaluation also tells what the features are worth (few-shot); 0 for not at all."""
    decisions: tuple[tuple[int, int], ...] = ()
    """(step, steps): how a run to repeat, which had to end on time, was planned again (`deadline.PlannedSteps`)."""
    allow_empty_classes: bool = False
    """Whether a class may be without a training image, as in a benchmark's draw of few images from many classes."""

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
            raise UsageError(
                f"{pluralize(self.recipe.epochs, 'epoch')} of {pluralize(len(self.train_split), 'image')}: not one step; give more"
            )
        if self.workers < 0:
            raise UsageError(f"workers is {self.workers}; it must be 0 or more")
        if self.eval_split is not None and self.eval_split not in dataset.splits:
            raise DataError(
                f"{dataset.name} has no {self.eval_split} to measure on; it has {', '.join(dataset.splits)}"
            )
        if self.probe_shots and self.shard:
            raise UsageError("--probe needs the whole model in each process: leave it away, or --shard")
        if self.probe_shots and not dataset.classes:
            raise DataError(f"{dataset.name} has no labels for --probe to learn from: leave it away")
        if self.probe_shots:
            probe.check_shots(features.read_labels(dataset.splits["train"]), dataset.classes, self.probe_shots)
        schedule.lr_scale(self.recipe.schedule, 0, self.plan.total_steps)  # refuses a warm-up longer than the run
        if (self.initial_model is None) == (self.recipe.model is None):
            raise UsageError("a recipe names a preset, or is for fine-tuning and is given a model: one of both")
        if self.initial_model is not None and self.initial_model.labels != dataset.classes:
            raise UsageError("the model's classes are not those of the data; train.task.fitted makes them so")
        if self.recipe.masked is not None:
            masked.count_outputs_per_patch(self.config, self.recipe.masked)  # refuses a model that cannot be taught so

    def _check_labels(self) -> None:
        """Refuse what cannot be learned from, or stored with the weights."""
        dataset = self.dataset
        if not dataset.classes:
            raise DataError(f"{dataset.name} has no labels to learn")
        if dataset.multi_label and self.recipe.loss != "sigmoid":
            raise UsageError(
                "images with several labels are learned with the loss sigmoid, and this recipe has softmax"
            )
        empty = [name for name, number in zip(dataset.classes, self.class_counts, strict=True) if not number]
        if empty and not self.allow_empty_classes:
            raise DataError(
                f"{pluralize(len(empty), 'class')} without a training image, such as {empty[0]}: add some or remove it"
            )
        if self.recipe.logit_adjustment and dataset.multi_label:
            raise UsageError("--balanced is for images of one label each, and these may have several")
        for name in dataset.classes:
            if not name.isascii() and name.encode(errors="replace").decode() != name:
                raise DataError(f"the class {name!r} has no valid name in UTF-8: rename its folder")

    @functools.cached_property
    def class_counts(self) -> list[int]:
        """Training images of each class."""
        counted: list[int] = self.train_split.count_per_class(len(self.dataset.classes)).tolist()
        return counted

    @property
    def plan(self) -> BatchPlan:
        """The steps."""
        total = round(self.recipe.epochs * len(self.train_split))
        rank, world = self.group.rank, self.group.world_size
        return BatchPlan(
            batch_size=self.recipe.batch,
            total_positions=total,
            rank=rank,
            world_size=world,
            micro_batches=self.micro_batches,
        )

    def make_plan_up_to(self, steps: int) -> BatchPlan:
        """The plan; where the number of steps may change, one of whole steps and as many as there may ever be."""
        if not (steps or self.decisions):
            return self.plan
        most = max(steps, self.plan.total_steps, *(total for _, total in self.decisions))
        return dataclasses.replace(self.plan, total_positions=most * self.recipe.batch)

    @functools.cached_property
    def train_split(self) -> Split:
        """The images that are trained on."""
        train, val = self.dataset.splits["train"], self.dataset.splits["val"]
        return train.merge(val) if self.train_on_val else train

    @property
    def eval_every_epochs(self) -> int:
        """Epochs from one evaluation to the next: one, unless evaluation would take long beside training."""
        cost = len(self.dataset.splits["val"]) / (
            3 * MAX_EVALUATION_SHARE * len(self.train_split)
        )  # training on an image costs three forward passes
        return max(1, math.ceil(cost), math.ceil(self.recipe.epochs / MAX_EVALUATIONS))

    @functools.cached_property
    def preprocess(self) -> PreprocessConfig:
        """The view that training's evaluation, and every later command, takes of an image."""
        if self.initial_model is not None:
            assert self.initial_model.preprocess is not None, "`fitted` refuses a model without"
            return self.initial_model.preprocess
        config = self.build_preset_config()
        size, channels = config.image_size, config.channels
        whole = self.recipe.augment.crop in ("pad", "squash")  # training sees whole images, so evaluation does too
        resize = size if whole else (round(size[0] * (self.recipe.resize or 8 / 7)),)
        return PreprocessConfig(size=size, resize=resize, mean=(0.5,) * channels, std=(0.5,) * channels)

    @property
    def training_data(self) -> TrainingData:
        """What training sees."""
        return TrainingData(
            split=self.train_split,
            order=SampleOrder(
                seed=self.seed, num_samples=len(self.train_split), shard_sizes=self.train_split.count_per_shard()
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
        """Outputs of the model's head; none where it learns without labels."""
        return len(self.dataset.classes) if self.recipe.masked is None else 0

    @property
    def num_patches(self) -> int:
        """Of an image, where the model cuts it into some."""
        return math.prod(self.config.grid) if isinstance(self.config, ViTConfig) else 0

    def build_preset_config(self) -> ModelConfig:
        """The configuration of the recipe's preset, for this data."""
        recipe = self.recipe
        assert recipe.model is not None
        size = {} if recipe.image_size is None else {"image_size": expand_image_size(recipe.image_size)}
        return presets.get_preset_config(recipe.model, classes=self.num_classes, **size, **recipe.settings)

    def build_model(self) -> TrainableModel:
        """The network before its first step, on the device."""
        recipe = self.recipe
        if self.initial_model is not None:
            made = copy.deepcopy(self.initial_model.model)
        else:
            assert recipe.model is not None
            made = create_random(
                recipe.model,
                image_size=recipe.image_size,
                num_classes=self.num_classes,
                seed=self.seed,
                head_bias=recipe.head_bias,
                mimetic=recipe.mimetic,
                **recipe.settings,
            ).model
        if isinstance(made, ViT):
            made.set_regularization(dropout=recipe.dropout, stochastic_depth=recipe.stochastic_depth)
            made.recompute = self.recompute
        elif recipe.dropout or recipe.stochastic_depth or self.recompute:
            raise UsageError("a ResNet has neither dropout nor stochastic depth, and keeps its activations")
        if recipe.trainable_layers is not None:
            for name, parameter in made.named_parameters():
                head = name.startswith(("head.", "head_dist.", "pre_logits."))  # the norm before it is none
                parameter.requires_grad_(
                    optimizer.layers_below_head(made, name) <= recipe.trainable_layers
                    if recipe.trainable_layers
                    else head
                )
        return self._place_on_device(made if recipe.masked is None else self._add_masked_heads(made, recipe.masked))

    def _add_masked_heads(self, model: Model, config: MaskedConfig) -> MaskedViT:
        """The model with all that it is taught with."""
        assert isinstance(model, ViT), "another is refused before anything is computed"
        generator = torch.Generator().manual_seed(counter_rng.derive_key(self.seed, "masked heads") >> 1)
        return masked.initialize_masked_heads(MaskedViT(model, config, self.preprocess), generator)

    def _place_on_device(self, model: TrainableModel) -> TrainableModel:
        """The model on the device, or this process's part of it, compiled if that is worth the while."""
        if not self.is_sharded:
            model = model.to(self.device)
        if isinstance(model, ViT | MaskedViT) and self.is_compiled:
            model.compile_blocks()
        if self.is_sharded:
            fsdp.shard_model(model, self.device)
        return model

    @property
    def is_sharded(self) -> bool:
        """Whether the model is divided: one process has nobody to share it with."""
        return self.shard and self.group.world_size > 1

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are compiled."""
        if self.compile_blocks is not None:
            return self.compile_blocks
        return self.device.type == "cuda" and self.flops > MIN_COMPILE_FLOPS

    @property
    def can_use_cuda_graph(self) -> bool:
        """Whether a step is recorded once and replayed: on a GPU, where nothing in it waits for the host."""
        recipe = self.recipe
        waits = self.recompute or recipe.stochastic_depth or recipe.optimizer.kind == "sgd"
        whole = self.micro_batches == 1 and self.group.world_size == 1 and isinstance(self.config, ViTConfig)
        return self.device.type == "cuda" and whole and not waits

    @property
    def config(self) -> ModelConfig:
        """What the model is."""
        return self.initial_model.model.config if self.initial_model is not None else self.build_preset_config()

    @property
    def flops(self) -> int:
        """Of the whole run's forward and backward passes."""
        return count.count_training_flops(self.config, self.plan.total_positions, self.recipe.masked)

    @property
    def imbalance(self) -> float:
        """Images of the largest class for each of the smallest, where that matters."""
        return max(self.class_counts) / min(self.class_counts) if self.recipe.masked is None else 1.0


def adapt_to_dataset(trained: Trained, dataset: Dataset, recipe: Recipe, *, keep_head: bool = False) -> Trained:
    """The model with a zero head for the data's classes and the recipe's resolution, ready to be fine-tuned.

    With `keep_head` its own head stays, which must know these classes; its rows are put into the data's order.
    """
    require_preprocess(trained)
    size = recipe.image_size
    if keep_head:
        fresh = adapt(reorder_head(trained, dataset.classes), image_size=size)
    else:
        fresh = adapt(trained, classes=len(dataset.classes), labels=dataset.classes, image_size=size)
    assert fresh.preprocess is not None
    if recipe.resize is not None:
        view = dataclasses.replace(fresh.preprocess, resize=(round(min(fresh.preprocess.size) * recipe.resize),))
        fresh = dataclasses.replace(fresh, preprocess=view)
    return fresh


def make_run_config(run: TrainingRun) -> dict[str, Any]:
    """config.json: everything that decides the result."""
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
        **({"decisions": [list(each) for each in run.decisions]} if run.decisions else {}),
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
