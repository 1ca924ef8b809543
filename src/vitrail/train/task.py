"""What a run is: recipe, data, weights to begin with, seed and machine, checked before anything is computed."""

import copy
import dataclasses
import functools
import math
import platform
from typing import Any, Literal

import torch

from vitrail import presets
from vitrail.config import Masked, Preprocess, Recipe, ViTConfig, sides, to_json
from vitrail.data import draws
from vitrail.data.dataset import Dataset, Split
from vitrail.data.decode import decoder
from vitrail.data.loader import Plan, Training
from vitrail.data.order import Order
from vitrail.errors import DataError, ModelError, UsageError
from vitrail.evaluate import features, probe
from vitrail.model import count, masked
from vitrail.model.build import Config, Model
from vitrail.model.masked import MaskedViT
from vitrail.model.vit import ViT
from vitrail.plurals import plural
from vitrail.train import optimizer, schedule, sharding
from vitrail.train.distributed import ALONE, Group
from vitrail.train.step import Learner
from vitrail.weights.adapt import adapt, reordered
from vitrail.weights.trained import Trained, random

EVALUATION_SHARE = 0.1  # of the time of training, at most
EVALUATIONS = 100  # at most, so that a long run does not spend itself on writing weights
IMBALANCE = 10  # the largest class over the smallest from which accuracy alone misleads
COMPILED_FLOPS = 2e16  # about two minutes of an H200: below it, compiling costs more than it saves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A run; with the same versions and threads it gives the same weights."""

    recipe: Recipe
    dataset: Dataset
    start: Trained | None = None
    """The weights to begin with, made to fit the data (`fitted`); None for random ones of the recipe's preset."""
    seed: int = 0
    group: Group = ALONE
    """Which of how many processes computes it; not what is computed."""
    device: torch.device
    workers: int = 0
    micro_batches: int = 1
    everything: bool = False
    """Whether val is trained on too, once all choices are made: then the last weights are kept, as they are."""
    recompute: bool = False
    """Whether activations are computed again in the backward pass rather than kept."""
    shard: bool = False
    """Whether several processes divide the model among them, rather than have all of it each."""
    compiled: bool | None = None
    """Whether blocks are compiled; None to decide by the length of the run."""
    measured: Literal["test", "val"] | None = None
    """The split that the result is of; None for test where there is one. With val, test is not read at all."""
    view: Preprocess | None = None
    """What training's crops are cut from, where that is not evaluation's view; of the same size, mean and std."""
    probe: int = 0
    """Images a class from which each evaluation also tells what the features are worth (few-shot); 0 for not at all."""
    decisions: tuple[tuple[int, int], ...] = ()
    """(step, steps): how a run to repeat, which had to end on time, was planned again (`deadline.PlannedSteps`)."""
    sparse: bool = False
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
        if self.plan.steps < 1:
            raise UsageError(
                f"{plural(self.recipe.epochs, 'epoch')} of {plural(len(self.split), 'image')}: not one step; give more"
            )
        if self.workers < 0:
            raise UsageError(f"workers is {self.workers}; it must be 0 or more")
        if self.measured is not None and self.measured not in dataset.splits:
            raise DataError(f"{dataset.name} has no {self.measured} to measure on; it has {', '.join(dataset.splits)}")
        if self.probe and self.shard:
            raise UsageError("--probe needs the whole model in each process: leave it away, or --shard")
        if self.probe and not dataset.classes:
            raise DataError(f"{dataset.name} has no labels for --probe to learn from: leave it away")
        if self.probe:
            probe.check_shots(features.labels(dataset.splits["train"]), dataset.classes, self.probe)
        schedule.share(self.recipe.schedule, 0, self.plan.steps)  # refuses a warm-up longer than the run
        if (self.start is None) == (self.recipe.model is None):
            raise UsageError("a recipe names a preset, or is for fine-tuning and is given a model: one of both")
        if self.start is not None and self.start.labels != dataset.classes:
            raise UsageError("the model's classes are not those of the data; train.task.fitted makes them so")
        if self.recipe.masked is not None:
            masked.outputs(self.config, self.recipe.masked)  # refuses a model that cannot be taught so

    def _check_labels(self) -> None:
        """Refuse what cannot be learned from, or stored with the weights."""
        dataset = self.dataset
        if not dataset.classes:
            raise DataError(f"{dataset.name} has no labels to learn")
        if dataset.several and self.recipe.loss != "sigmoid":
            raise UsageError(
                "images with several labels are learned with the loss sigmoid, and this recipe has softmax"
            )
        empty = [name for name, number in zip(dataset.classes, self.counts, strict=True) if not number]
        if empty and not self.sparse:
            raise DataError(
                f"{plural(len(empty), 'class')} without a training image, such as {empty[0]}: add some or remove it"
            )
        if self.recipe.balanced and dataset.several:
            raise UsageError("--balanced is for images of one label each, and these may have several")
        for name in dataset.classes:
            if not name.isascii() and name.encode(errors="replace").decode() != name:
                raise DataError(f"the class {name!r} has no valid name in UTF-8: rename its folder")

    @functools.cached_property
    def counts(self) -> list[int]:
        """Training images of each class."""
        counted: list[int] = self.split.counts(len(self.dataset.classes)).tolist()
        return counted

    @property
    def plan(self) -> Plan:
        """The steps."""
        total = round(self.recipe.epochs * len(self.split))
        rank, world = self.group.rank, self.group.world
        return Plan(batch=self.recipe.batch, total=total, rank=rank, world=world, micro_batches=self.micro_batches)

    def plan_up_to(self, steps: int) -> Plan:
        """The plan; where the number of steps may change, one of whole steps and as many as there may ever be."""
        if not (steps or self.decisions):
            return self.plan
        most = max(steps, self.plan.steps, *(total for _, total in self.decisions))
        return dataclasses.replace(self.plan, total=most * self.recipe.batch)

    @functools.cached_property
    def split(self) -> Split:
        """The images that are trained on."""
        train, val = self.dataset.splits["train"], self.dataset.splits["val"]
        return train.joined(val) if self.everything else train

    @property
    def every(self) -> int:
        """Epochs from one evaluation to the next: one, unless evaluation would take long beside training."""
        cost = len(self.dataset.splits["val"]) / (
            3 * EVALUATION_SHARE * len(self.split)
        )  # training on an image costs three forward passes
        return max(1, math.ceil(cost), math.ceil(self.recipe.epochs / EVALUATIONS))

    @functools.cached_property
    def preprocess(self) -> Preprocess:
        """The view that training's evaluation, and every later command, takes of an image."""
        if self.start is not None:
            assert self.start.preprocess is not None, "`fitted` refuses a model without"
            return self.start.preprocess
        config = self.preset()
        size, channels = config.image_size, config.channels
        whole = self.recipe.augment.crop in ("pad", "squash")  # training sees whole images, so evaluation does too
        resize = size if whole else (round(size[0] * (self.recipe.resize or 8 / 7)),)
        return Preprocess(size=size, resize=resize, mean=(0.5,) * channels, std=(0.5,) * channels)

    @property
    def training(self) -> Training:
        """What training sees."""
        return Training(
            split=self.split,
            order=Order(seed=self.seed, count=len(self.split), shards=self.split.shards()),
            augment=self.recipe.augment,
            preprocess=self.view or self.preprocess,
            seed=self.seed,
            classes=len(self.dataset.classes),
            masked=self.recipe.masked,
            patches=self.patches,
            skip_bad=self.dataset.unchecked,
        )

    @property
    def classes(self) -> int:
        """Outputs of the model's head; none where it learns without labels."""
        return len(self.dataset.classes) if self.recipe.masked is None else 0

    @property
    def patches(self) -> int:
        """Of an image, where the model cuts it into some."""
        return math.prod(self.config.grid) if isinstance(self.config, ViTConfig) else 0

    def preset(self) -> Config:
        """The configuration of the recipe's preset, for this data."""
        recipe = self.recipe
        assert recipe.model is not None
        size = {} if recipe.image_size is None else {"image_size": sides(recipe.image_size)}
        return presets.config(recipe.model, classes=self.classes, **size, **recipe.settings)

    def model(self) -> Learner:
        """The network before its first step, on the device."""
        recipe = self.recipe
        if self.start is not None:
            made = copy.deepcopy(self.start.model)
        else:
            assert recipe.model is not None
            made = random(
                recipe.model,
                image_size=recipe.image_size,
                num_classes=self.classes,
                seed=self.seed,
                head_bias=recipe.head_bias,
                mimetic=recipe.mimetic,
                **recipe.settings,
            ).model
        if isinstance(made, ViT):
            made.regularise(dropout=recipe.dropout, stochastic_depth=recipe.stochastic_depth)
            made.recompute = self.recompute
        elif recipe.dropout or recipe.stochastic_depth or self.recompute:
            raise UsageError("a ResNet has neither dropout nor stochastic depth, and keeps its activations")
        if recipe.layers is not None:
            for name, parameter in made.named_parameters():
                head = name.startswith(("head.", "head_dist.", "pre_logits."))  # the norm before it is none
                parameter.requires_grad_(optimizer.height(made, name) <= recipe.layers if recipe.layers else head)
        return self._placed(made if recipe.masked is None else self._masked(made, recipe.masked))

    def _masked(self, made: Model, how: Masked) -> MaskedViT:
        """The model with all that it is taught with."""
        assert isinstance(made, ViT), "another is refused before anything is computed"
        generator = torch.Generator().manual_seed(draws.key(self.seed, "masked heads") >> 1)
        return masked.initialise_heads(MaskedViT(made, how, self.preprocess), generator)

    def _placed(self, made: Learner) -> Learner:
        """The model on the device, or this process's part of it, compiled if that is worth the while."""
        if not self.sharded:
            made = made.to(self.device)
        if isinstance(made, ViT | MaskedViT) and self.compiles:
            made.compile_blocks()
        if self.sharded:
            sharding.shard(made, self.device)
        return made

    @property
    def sharded(self) -> bool:
        """Whether the model is divided: one process has nobody to share it with."""
        return self.shard and self.group.world > 1

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled."""
        if self.compiled is not None:
            return self.compiled
        return self.device.type == "cuda" and self.flops > COMPILED_FLOPS

    @property
    def recorded(self) -> bool:
        """Whether a step is recorded once and replayed: on a GPU, where nothing in it waits for the host."""
        recipe = self.recipe
        waits = self.recompute or recipe.stochastic_depth or recipe.optimiser.kind == "sgd"
        whole = self.micro_batches == 1 and self.group.world == 1 and isinstance(self.config, ViTConfig)
        return self.device.type == "cuda" and whole and not waits

    @property
    def config(self) -> Config:
        """What the model is."""
        return self.start.model.config if self.start is not None else self.preset()

    @property
    def flops(self) -> int:
        """Of the whole run's forward and backward passes."""
        config, how = self.config, self.recipe.masked
        if how is None:
            return count.training_flops(config, self.plan.total)
        assert isinstance(config, ViTConfig)
        return masked.training_flops(config, how, self.plan.total)

    @property
    def imbalance(self) -> float:
        """Images of the largest class for each of the smallest, where that matters."""
        return max(self.counts) / min(self.counts) if self.recipe.masked is None else 1.0


def fitted(trained: Trained, dataset: Dataset, recipe: Recipe, *, keep_head: bool = False) -> Trained:
    """The model with a zero head for the data's classes and the recipe's resolution, ready to be fine-tuned.

    With `keep_head` its own head stays, which must know these classes; its rows are put into the data's order.
    """
    if trained.preprocess is None:
        raise ModelError(
            "the weights do not say how images must be prepared: name it with --preprocess imagenet"
            " (or inception, torchvision)"
        )
    size = recipe.image_size
    if keep_head:
        fresh = adapt(reordered(trained, dataset.classes), image_size=size)
    else:
        fresh = adapt(trained, classes=len(dataset.classes), labels=dataset.classes, image_size=size)
    assert fresh.preprocess is not None
    if recipe.resize is not None:
        view = dataclasses.replace(fresh.preprocess, resize=(round(min(fresh.preprocess.size) * recipe.resize),))
        fresh = dataclasses.replace(fresh, preprocess=view)
    return fresh


def described(task: Task) -> dict[str, Any]:
    """config.json: everything that decides the result."""
    plan = task.plan
    return {
        "recipe": to_json(task.recipe),
        "model": None if task.start is None else to_json(task.start.origin),
        "data": task.dataset.name,
        "images": {name: len(split) for name, split in task.dataset.splits.items()},
        "classes": list(task.dataset.classes),
        "several": task.dataset.several,
        "notes": list(task.dataset.notes),
        "preprocess": to_json(task.preprocess),
        "view": None if task.view is None else to_json(task.view),
        "everything": task.everything,
        "measured": task.measured,
        "seed": task.seed,
        "steps": plan.steps,
        **({"decisions": [list(each) for each in task.decisions]} if task.decisions else {}),
        "micro_batches": plan.micro_batches,
        "world": plan.world,
        "sharded": task.sharded,
        "recompute": task.recompute,
        "compiled": task.compiles,
        "device": str(task.device),
        "threads": torch.get_num_threads(),
        "jpeg_decoder": decoder(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
