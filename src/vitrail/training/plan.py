"""Estimate what a run takes before it starts: FLOPs, memory, time, disk and traffic; and the SLURM script that runs it.

Recipes are checked and the script is written without torch; only the estimate itself imports it.
"""

import dataclasses
import difflib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrail import presets, recipes
from vitrail.config import ModelConfig, OptimizerConfig, Recipe, ScheduleConfig
from vitrail.config.model import expand_image_size
from vitrail.errors import UsageError

if TYPE_CHECKING:
    from vitrail.model.cost import TrainingMemory


class GpuSpec(NamedTuple):
    """A GPU by its data sheet."""

    memory: float
    """Bytes, as the data sheet counts them: a GB is 1e9, which is somewhat less than there is."""
    peak_flops: float
    """FLOP/s of dense matrix products in bf16."""


GPUS = {
    "a100": GpuSpec(80e9, 312e12),
    "h100": GpuSpec(80e9, 989e12),
    "h200": GpuSpec(141e9, 989e12),
    "b200": GpuSpec(180e9, 2250e12),
    "l40s": GpuSpec(48e9, 362e12),
    "rtx4090": GpuSpec(24e9, 165e12),
    "tpuv3": GpuSpec(16 * 2**30, 61.5e12),  # a core, of which a chip has two: the unit of the paper's costs
}
TPU_NAME = "tpuv3"
H200_FLOPS = 3e14  # FLOP/s of training a ViT in bf16, about two fifths of what its matrix products reach
DEFAULT_EFFICIENCY = H200_FLOPS / GPUS["h200"].peak_flops  # the assumed share of the peak
USABLE_MEMORY_SHARE = 0.9  # of a GPU's memory: the rest is for gradients of activations and for CUDA itself


class PublishedCost(NamedTuple):
    """The cost that the paper states of a system."""

    exaflops: float
    core_days: float | None = None
    """Of a TPUv3, where the paper's headline table has the system."""


PAPER_COSTS = {  # Dosovitskiy et al. 2021, tables 2 and 6
    "vit-b32-jft": PublishedCost(55),
    "vit-b16-jft": PublishedCost(224),
    "vit-l32-jft": PublishedCost(196),
    "vit-l16-jft": PublishedCost(783),
    "vit-l16-jft-14": PublishedCost(1567, 680),
    "vit-h14-jft": PublishedCost(4262, 2500),
    "bit-r50x1-jft": PublishedCost(50),
    "bit-r50x2-jft": PublishedCost(199),
    "bit-r101x1-jft": PublishedCost(96),
    "bit-r152x1-jft": PublishedCost(141),
    "bit-r152x2-jft": PublishedCost(563),
    "bit-r152x2-jft-14": PublishedCost(1126),
    "bit-r200x3-jft": PublishedCost(3306),
    "r50-b32-jft": PublishedCost(106),
    "r50-b16-jft": PublishedCost(274),
    "r50-l32-jft": PublishedCost(246),
    "r50-l16-jft": PublishedCost(859),
    "r50-l16-jft-14": PublishedCost(1668),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedMachine:
    """The machine of a planned run, and how it computes."""

    gpu: str
    nodes: int = 1
    gpus: int = 1
    """GPUs per node."""
    micro_batches: int = 1
    recompute: bool = False
    shard: bool = False
    efficiency: float = DEFAULT_EFFICIENCY

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise UsageError(f"there is no GPU {self.gpu!r:.80} in the table; choose one of {', '.join(GPUS)}")
        if min(self.nodes, self.gpus, self.micro_batches) < 1:
            raise UsageError(
                f"--nodes is {self.nodes}, --gpus {self.gpus} and --micro-batches {self.micro_batches};"
                " each must be at least 1"
            )
        if not 0 < self.efficiency <= 1:
            raise UsageError(f"--efficiency is {self.efficiency}; it is a share of the peak, above 0 and at most 1")

    @property
    def devices(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus


# --- the run ---------------------------------------------------------------------------------------------------------


def choose_recipe(
    name: str,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int | None = None,
    data_images: int | None = None,
) -> tuple[Recipe, int]:
    """Return the recipe of that name or for that preset, with the values that replace its own, and its image count."""
    recipe = _find_recipe(name)
    if epochs is not None and steps is not None:
        raise UsageError("--epochs and --steps both set the length of the run; give one of them")
    for option, number in (("--steps", steps), ("--batch", batch), ("--data-images", data_images)):
        if number is not None and number < 1:
            raise UsageError(f"{option} is {number}; it must be at least 1")
    images = recipes.TRAIN_IMAGE_COUNTS.get(recipe.data or "") if data_images is None else data_images
    if images is None:
        raise UsageError(f"{name} does not name a dataset of known size: give --data-images N")
    if steps is not None:
        epochs = steps * (batch or recipe.batch) / images
    overrides: dict[str, Any] = {"epochs": epochs, "batch": batch}
    return dataclasses.replace(recipe, **{key: value for key, value in overrides.items() if value is not None}), images


def _find_recipe(name: str) -> Recipe:
    if name in recipes.RECIPES or Path(name).suffix.lower() in recipes.RECIPE_SUFFIXES:
        recipe = recipes.load_recipe(name)
        if recipe.model is None:
            raise UsageError(f"{name} names no model, so nothing can be counted: give a recipe of `vitrail train`")
        return recipe
    if presets.has_preset(name):
        optimizer, schedule = OptimizerConfig(lr=1e-3), ScheduleConfig()
        recipe = Recipe(model=name, epochs=300, optimizer=optimizer, schedule=schedule, source="vitrail")
        return dataclasses.replace(recipe, image_size=None, data="imagenet")
    close = difflib.get_close_matches(name.lower(), [*recipes.RECIPES, *presets.list_presets()], n=3)
    suggestion = f"did you mean {' or '.join(close)}? " if close else ""
    raise UsageError(
        f"there is no recipe or preset {name!r:.80}: {suggestion}`vitrail list recipes` and `vitrail list` show them"
    )


def find_published_cost(name: str, recipe: Recipe, images: int) -> PublishedCost | None:
    """Return the paper's cost, if the recipe is one of the paper's systems and unchanged."""
    if name not in PAPER_COSTS or recipe != recipes.RECIPES[name]:
        return None
    assert recipe.data is not None
    return PAPER_COSTS[name] if images == recipes.TRAIN_IMAGE_COUNTS[recipe.data] else None


# --- its cost --------------------------------------------------------------------------------------------------------


def plan_run(recipe: Recipe, images: int, machine: PlannedMachine, *, classes: int = 1000) -> dict[str, Any]:
    """Estimate what the run takes; the keys are those of `vitrail plan --json`."""
    from vitrail.model import cost

    config = build_config(recipe, classes)
    flops_per_image = cost.count_training_flops(config, 1, recipe.masked)
    devices, total_images = machine.devices, round(recipe.epochs * images)
    micro_batch = -(-recipe.batch // (devices * machine.micro_batches))
    whole, sharded = _estimate_memory(config, recipe, machine, micro_batch)
    flops = flops_per_image * total_images
    flops_per_second = devices * machine.efficiency * GPUS[machine.gpu].peak_flops
    seconds = flops * (4 / 3 if machine.recompute else 1) / flops_per_second  # a fourth forward pass beside three
    return {
        "model": recipe.model,
        "machine": dataclasses.asdict(machine) | {"devices": devices, "peak": GPUS[machine.gpu].peak_flops},
        "parameters": cost.count_parameters(config, recipe.masked),
        "flops_per_image": flops_per_image,
        "images": total_images,
        "epochs": recipe.epochs,
        "batch": recipe.batch,
        "micro_batch": micro_batch,
        "steps": -(-total_images // recipe.batch),
        "exaflops": flops / 1e18,
        "seconds": seconds,
        "gpu_days": seconds * devices / 86_400,
        "memory": {
            "whole": dataclasses.asdict(whole) | {"total": whole.total},
            "sharded": dataclasses.asdict(sharded) | {"total": sharded.total},
            "available": round(GPUS[machine.gpu].memory),
        },
        "disk": {
            "checkpoint": whole.weights + whole.optimizer + whole.ema,
            "weights": 4 * cost.count_parameters(config),
        },
        "traffic": compute_traffic(whole.weights, machine),
    }


def count_core_days(name: str) -> float:
    """Estimate the TPUv3-core-days of a recipe or preset, at the share of the peak that is assumed of GPUs."""
    recipe, images = choose_recipe(name)
    return float(plan_run(recipe, images, PlannedMachine(gpu=TPU_NAME))["gpu_days"])


def count_recipe_flops(recipe: Recipe) -> float:
    """Count the FLOPs of the whole run on the recipe's own dataset."""
    from vitrail.model import cost

    assert recipe.data is not None
    images = round(recipe.epochs * recipes.TRAIN_IMAGE_COUNTS[recipe.data])
    return cost.count_training_flops(build_config(recipe), images, recipe.masked)


def compute_traffic(weights: int, machine: PlannedMachine) -> int:
    """Compute the bytes that each GPU sends in a step, in rings: gradients are summed and distributed.

    Sharded weights are gathered before each forward and each backward pass, in bf16 and so half as large, and gradients
    are reduced where they belong.
    """
    rounds = machine.micro_batches + 1 if machine.shard else 2
    return round(rounds * weights * (machine.devices - 1) / machine.devices)


def build_config(recipe: Recipe, classes: int | None = None) -> ModelConfig:
    """The configuration of the recipe's preset; with `classes`, for a dataset of so many."""
    assert recipe.model is not None
    changes = dict(recipe.settings)
    if recipe.image_size is not None:
        changes["image_size"] = expand_image_size(recipe.image_size)
    if classes is not None:
        changes["classes"] = classes if recipe.masked is None else 0
    return presets.get_preset_config(recipe.model, **changes)


def _estimate_memory(
    config: ModelConfig, recipe: Recipe, machine: PlannedMachine, micro_batch: int
) -> "tuple[TrainingMemory, TrainingMemory]":
    """The memory of one GPU, with the model whole and sharded over all of them."""
    from vitrail.model import cost

    settings: dict[str, Any] = {
        "optimizer": recipe.optimizer.kind,
        "ema": recipe.ema > 0,
        "dropout": recipe.dropout,
        "stochastic_depth": recipe.stochastic_depth,
        "recompute": machine.recompute,
    }
    models = cost.list_memory_equivalents(config, recipe.masked)  # together they hold what training holds
    whole, sharded = (
        _add_memory(
            [cost.estimate_training_memory(model, images=micro_batch, shards=shards, **settings) for model in models]
        )
        for shards in (1, machine.devices)
    )
    if machine.micro_batches > 1:  # gradients of micro-batches are kept whole until the last one's are sent
        sharded = dataclasses.replace(sharded, gradients=whole.gradients)
    return whole, sharded


def _add_memory(parts: Sequence["TrainingMemory"]) -> "TrainingMemory":
    """The memory of several models on one device."""
    names = [field.name for field in dataclasses.fields(parts[0])]
    return dataclasses.replace(parts[0], **{name: sum(getattr(part, name) for part in parts) for name in names})


# --- its script ------------------------------------------------------------------------------------------------------

_SBATCH_TEMPLATE = """\
#!/bin/bash
# {usage}
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# One task per GPU. Five minutes before the time limit each gets SIGUSR1. The run then saves a checkpoint and exits with
# code 75, the job is requeued, and --resume continues from the checkpoint. Set the time limit as you need it.
data={data}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# exec: the signal must reach the run itself. A task that has ended must not end those that still save.
code=0
srun --kill-on-bad-exit=0 bash -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
  exec "$@"
' task {command} --data "$data" || code=$?

if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def make_sbatch_script(name: str, recipe: Recipe, machine: PlannedMachine) -> str:
    """Write a SLURM script that trains by the recipe, and resumes after its time limit."""
    check_has_job("--sbatch", name, machine)
    command = build_train_command(name, recipe, machine, out=f"runs/{name}")
    return format_sbatch_script(name, command, nodes=machine.nodes, gpus=machine.gpus)


def format_sbatch_script(name: str, command: Sequence[str], *, nodes: int, gpus: int, data: str | None = None) -> str:
    """Write the SLURM script of a training command without its data, which is the script's argument by default."""
    usage = "sbatch NAME.sbatch DATA" if data is None else "sbatch NAME.sbatch"
    value = f"${{1:?name the data to train on: {usage}}}" if data is None else shlex.quote(data)
    return _SBATCH_TEMPLATE.format(
        usage=usage, name=name, nodes=nodes, gpus=gpus, command=shlex.join(command), data=value
    )


def check_has_job(option: str, name: str, machine: PlannedMachine) -> None:
    """Refuse to plan the job of a preset, of a file, or on a machine that only counts costs."""
    if Path(name).suffix.lower() in recipes.RECIPE_SUFFIXES:
        raise UsageError(f"{name} is a file: `vitrail train {name} --data DATA {option}` prints its job")
    if name not in recipes.RECIPES:
        raise UsageError(f"{option} is for a recipe, and {name} is a preset: `vitrail list recipes` shows them")
    if machine.gpu == TPU_NAME:
        raise UsageError(f"{option} is for GPUs, and tpuv3 only counts costs as the paper does: name a GPU with --gpu")


def build_train_command(name: str, recipe: Recipe, machine: PlannedMachine, *, out: str) -> list[str]:
    """The command that starts the planned run or resumes it, without its data."""
    own = recipes.RECIPES[name]
    command = ["vitrail", "train", name, "--out", out, "--resume"]
    if recipe.epochs != own.epochs:
        command += ["--epochs", str(recipe.epochs)]
    if recipe.batch != own.batch:
        command += ["--batch", str(recipe.batch)]
    if machine.micro_batches > 1:
        command += ["--micro-batches", str(machine.micro_batches)]
    return command + ["--recompute"] * machine.recompute + ["--shard"] * machine.shard
