"""`vitrail plan RECIPE`: what a run will take before it runs, or the script that runs it on a cluster."""

import dataclasses
import difflib
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import tyro

from vitrail import presets, recipes
from vitrail.cli import output
from vitrail.cli.list import H200_FLOPS
from vitrail.config import MaskedConfig, OptimizerConfig, Recipe, ScheduleConfig, ViTConfig, expand_image_size
from vitrail.errors import UsageError
from vitrail.formatting import format_duration
from vitrail.train.recipe_overrides import RecipeOverrides, override_recipe

if TYPE_CHECKING:
    from vitrail.model.build import ModelConfig
    from vitrail.model.memory import TrainingMemory


class GpuSpec(NamedTuple):
    memory: float
    """Bytes, as the data sheet counts them: a GB is 1e9, which is somewhat less than there is."""
    peak_flops: float
    """FLOP/s of dense matrix products in bf16, as the data sheet has it."""


GPUS = {
    "a100": GpuSpec(80e9, 312e12),
    "h100": GpuSpec(80e9, 989e12),
    "h200": GpuSpec(141e9, 989e12),
    "b200": GpuSpec(180e9, 2250e12),
    "l40s": GpuSpec(48e9, 362e12),
    "rtx4090": GpuSpec(24e9, 165e12),
    "tpuv3": GpuSpec(16 * 2**30, 61.5e12),  # a core, of which a chip has two: what the paper counts its costs in
}
DEFAULT_EFFICIENCY = (
    H200_FLOPS / GPUS["h200"].peak_flops
)  # of the peak, assumed: `vitrail list recipes` counts with the same
TPU_NAME = "tpuv3"
USABLE_MEMORY_SHARE = 0.9  # of a GPU's memory: the rest is for gradients of activations and for CUDA itself


class PublishedCost(NamedTuple):
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
    """What a run is computed on, and how."""

    gpu: str
    nodes: int
    gpus: int
    """Of a node."""
    micro_batches: int
    recompute: bool
    shard: bool
    efficiency: float

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


def main(
    recipe_name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE|MODEL")],
    gpu: str = "h200",
    nodes: Annotated[int, tyro.conf.arg(metavar="N")] = 1,
    gpus: Annotated[int, tyro.conf.arg(metavar="N")] = 1,
    epochs: Annotated[float | None, tyro.conf.arg(metavar="N")] = None,
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    data_images: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    classes: Annotated[int, tyro.conf.arg(metavar="N")] = 1000,
    micro_batches: Annotated[int, tyro.conf.arg(metavar="N")] = 1,
    recompute: bool = False,
    shard: bool = False,
    efficiency: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None,
    sbatch: bool = False,
    json: bool = False,
) -> None:
    """Say what a run will take: FLOPs, memory by part, hours, GPU-days, disk and traffic; nothing is computed.

    Args:
        what: A recipe that `vitrail list recipes` shows, or a preset such as b16.
        gpu: a100, h100, h200, b200, l40s, rtx4090, or tpuv3 for the cores that the paper counts its costs in.
        nodes: Machines.
        gpus: GPUs of each.
        epochs: Passes over the training images, in place of the recipe's; 300 for a preset.
        steps: The same in steps.
        batch: Images in a step over all GPUs, in place of the recipe's; 4096 for a preset.
        data_images: Training images in the set, in place of the recipe's own; ImageNet's for a preset.
        classes: Outputs of the head.
        micro_batches: Parts in which a GPU computes its share of a step.
        recompute: Compute activations again in the backward pass rather than keep them.
        shard: Divide weights, gradients and averages over the GPUs.
        efficiency: What the run reaches of the GPU's peak; 0.3 is assumed, 300 TFLOP/s of an H200.
        sbatch: Print a SLURM script instead, which goes on where its time limit stopped it.
        json: Print JSON.
    """
    machine = PlannedMachine(
        gpu=gpu,
        nodes=nodes,
        gpus=gpus,
        micro_batches=micro_batches,
        recompute=recompute,
        shard=shard,
        efficiency=DEFAULT_EFFICIENCY if efficiency is None else efficiency,
    )
    recipe, images = choose_recipe(recipe_name, epochs=epochs, steps=steps, batch=batch, data_images=data_images)
    text = make_sbatch_script(recipe_name, recipe, machine) if sbatch else None
    if text is not None and not json:
        print(text, end="")
        return
    found = {"what": recipe_name} | plan_run(recipe, images, machine, classes=classes) | {"paper": None, "sbatch": text}
    if recipe_name in PAPER_COSTS and recipe == recipes.RECIPES[recipe_name] and data_images is None:
        found["paper"] = PAPER_COSTS[recipe_name]._asdict()
    if json:
        output.print_json(found)
    else:
        _print_plan(found)


def choose_recipe(
    recipe_name: str, *, epochs: float | None, steps: int | None, batch: int | None, data_images: int | None
) -> tuple[Recipe, int]:
    """The recipe of that name, or one for that preset, with what was given in its place; and its training images."""
    if recipe_name in recipes.RECIPES:
        recipe = recipes.RECIPES[recipe_name]
    elif presets.has_preset(recipe_name):
        recipe = Recipe(
            model=recipe_name,
            image_size=None,
            epochs=300,
            optimizer=OptimizerConfig(lr=1e-3),
            schedule=ScheduleConfig(),
            data="imagenet",
            source="vitrail",
        )
    else:
        close = difflib.get_close_matches(recipe_name.lower(), [*recipes.RECIPES, *presets.list_presets()], n=3)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        raise UsageError(
            f"there is no recipe or preset {recipe_name!r:.80}: {meant}`vitrail list recipes` and `vitrail list` show them"
        )
    if epochs is not None and steps is not None:
        raise UsageError("--epochs and --steps both say how long; give one of them")
    for name, number in (("--steps", steps), ("--batch", batch), ("--data-images", data_images)):
        if number is not None and number < 1:
            raise UsageError(f"{name} is {number}; it must be at least 1")
    assert recipe.data is not None
    images = recipes.TRAIN_IMAGE_COUNTS[recipe.data] if data_images is None else data_images
    if steps is not None:
        epochs = steps * (batch or recipe.batch) / images
    return override_recipe(recipe, RecipeOverrides(epochs=epochs, batch=batch)), images


def plan_run(recipe: Recipe, images: int, machine: PlannedMachine, *, classes: int = 1000) -> dict[str, Any]:
    """What the run takes; its keys are those of --json."""
    from vitrail.model import cost, memory

    assert recipe.model is not None
    size = {} if recipe.image_size is None else {"image_size": expand_image_size(recipe.image_size)}
    config = presets.get_preset_config(
        recipe.model, classes=classes if recipe.masked is None else 0, **size, **recipe.settings
    )
    models, parameters, each = _count_training_cost(config, recipe.masked)
    devices, total = machine.devices, round(recipe.epochs * images)
    part = -(-recipe.batch // (devices * machine.micro_batches))
    settings: dict[str, Any] = {
        "optimizer": recipe.optimizer.kind,
        "average": recipe.ema > 0,
        "dropout": recipe.dropout,
        "stochastic_depth": recipe.stochastic_depth,
        "recompute": machine.recompute,
    }
    whole, sharded = (
        _add_parts([memory.estimate_training_memory(model, images=part, shards=shards, **settings) for model in models])
        for shards in (1, devices)
    )
    if machine.micro_batches > 1:  # gradients of parts are kept whole until the last part's are sent
        sharded = dataclasses.replace(sharded, gradients=whole.gradients)
    flops = each * total
    rate = devices * machine.efficiency * GPUS[machine.gpu].peak_flops
    seconds = flops * (4 / 3 if machine.recompute else 1) / rate  # one more forward pass beside three
    weights = whole.weights
    return {
        "model": recipe.model,
        "machine": dataclasses.asdict(machine) | {"devices": devices, "peak": GPUS[machine.gpu].peak_flops},
        "parameters": parameters,
        "flops_per_image": each,
        "images": total,
        "epochs": recipe.epochs,
        "batch": recipe.batch,
        "micro_batch": part,
        "steps": -(-total // recipe.batch),
        "exaflops": flops / 1e18,
        "seconds": seconds,
        "gpu_days": seconds * devices / 86_400,
        "memory": {
            "whole": dataclasses.asdict(whole) | {"total": whole.total},
            "sharded": dataclasses.asdict(sharded) | {"total": sharded.total},
            "available": round(GPUS[machine.gpu].memory),
        },
        "disk": {"checkpoint": weights + whole.optimizer + whole.ema, "weights": 4 * cost.count_parameters(config)},
        "traffic": compute_traffic(weights, machine),
    }


def _count_training_cost(
    config: "ModelConfig", masked: MaskedConfig | None
) -> tuple[tuple["ModelConfig", ...], int, int]:
    """Models that together hold what is held in training, their parameters, the FLOPs of training on an image."""
    from vitrail.model import cost
    from vitrail.model import masked as masking

    if masked is None:
        return (config,), cost.count_parameters(config), cost.count_training_flops(config, 1)
    assert isinstance(config, ViTConfig)
    models, parameters = (
        masking.list_memory_equivalents(config, masked),
        masking.count_masked_parameters(config, masked),
    )
    return models, parameters, masking.count_masked_training_flops(config, masked, 1)


def _add_parts(parts: Sequence["TrainingMemory"]) -> "TrainingMemory":
    """What several models hold on one device."""
    names = [field.name for field in dataclasses.fields(parts[0])]
    return dataclasses.replace(parts[0], **{name: sum(getattr(part, name) for part in parts) for name in names})


def count_core_days(recipe_name: str) -> float:
    """TPUv3-core-days of a recipe or preset, at the share of their peak that is assumed of GPUs."""
    machine = PlannedMachine(
        gpu=TPU_NAME, nodes=1, gpus=1, micro_batches=1, recompute=False, shard=False, efficiency=DEFAULT_EFFICIENCY
    )
    recipe, images = choose_recipe(recipe_name, epochs=None, steps=None, batch=None, data_images=None)
    return float(plan_run(recipe, images, machine)["gpu_days"])


def compute_traffic(weights: int, machine: PlannedMachine) -> int:
    """Bytes that each GPU sends in a step, in rings: gradients are summed and handed round.

    Sharded weights are gathered before each forward and each backward pass, in bf16 and so half as large, and gradients
    summed where they belong.
    """
    rounds = machine.micro_batches + 1 if machine.shard else 2
    return round(rounds * weights * (machine.devices - 1) / machine.devices)


# --- as text ---------------------------------------------------------------------------------------------------------


def _print_plan(plan: dict[str, Any]) -> None:
    machine, paper, disk = plan["machine"], plan["paper"], plan["disk"]
    unit = "TPUv3-core-days" if machine["gpu"] == TPU_NAME else "GPU-days"
    exaflops, days = f"{_format_number(plan['exaflops'])} exaFLOPs", f"{_format_number(plan['gpu_days'])} {unit}"
    if paper is not None:
        exaflops += f" (the paper: {paper['exaflops']:,})"
        days += f" (the paper: {paper['core_days']:,} TPUv3-core-days)" if paper["core_days"] else ""
    nodes = f"{machine['nodes']} nodes of " if machine["nodes"] > 1 else ""
    share = f"{machine['efficiency']:.0%} of {machine['peak'] / 1e12:,.0f} TFLOP/s each, an assumption"
    rows = [
        ("run", plan["what"] if plan["what"] == plan["model"] else f"{plan['what']}: {plan['model']}"),
        ("machine", f"{nodes}{machine['gpus']} x {machine['gpu']} at {share}"),
        ("parameters", output.format_count(plan["parameters"])),
        ("FLOPs", f"{plan['flops_per_image'] / 1e9:,.1f} G to train on an image, {exaflops}"),
        (
            "steps",
            f"{plan['steps']:,} of {output.pluralize(plan['batch'], 'image')}, {output.pluralize(plan['epochs'], 'epoch')}",
        ),
        ("time", f"{format_duration(plan['seconds'])}, {days}"),
        (
            "disk",
            f"{output.format_bytes(disk['checkpoint'])} a checkpoint, {output.format_bytes(disk['weights'])} the weights",
        ),
    ]
    if machine["devices"] > 1:
        rows.append(("traffic", f"{output.format_bytes(plan['traffic'])} from each GPU in a step"))
    output.print_table(rows)
    _print_memory(plan)


def _print_memory(plan: dict[str, Any]) -> None:
    whole, sharded = plan["memory"]["whole"], plan["memory"]["sharded"]
    rows = [
        (part, output.format_bytes(whole[part]), output.format_bytes(sharded[part])) for part in whole if whole[part]
    ]
    header, columns = ("memory", "whole", "--shard"), 3 if plan["machine"]["devices"] > 1 else 2
    print()
    output.print_table([row[:columns] for row in (header, *rows)], right=range(1, columns))
    print(f"\n{_describe_fit(plan)}")


def _describe_fit(plan: dict[str, Any]) -> str:
    """Whether it fits, and what would make it."""
    machine, memory = plan["machine"], plan["memory"]
    parts = memory["sharded" if machine["shard"] else "whole"]
    room = USABLE_MEMORY_SHARE * memory["available"] - (parts["total"] - parts["activations"])
    images = plan["micro_batch"]
    at_once = f"{output.pluralize(images, 'image')} at once {'takes' if images == 1 else 'take'} {output.format_bytes(parts['total'])}"
    available = f"a {'core' if machine['gpu'] == TPU_NAME else 'GPU'} of {output.format_bytes(memory['available'])}"
    if parts["activations"] <= room:
        return f"{at_once} of {available}."
    each = parts["activations"] // plan["micro_batch"]
    if room < each:
        return f"{at_once}, and not even one fits {available}: --recompute, or --shard on several, takes less."
    share = -(-plan["batch"] // machine["devices"])
    return f"{at_once}, too much for {available}: --micro-batches {-(-share // int(room / each))} fits."


def _format_number(value: float) -> str:
    """Three digits, or all before the point where there are more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- as a script -----------------------------------------------------------------------------------------------------

_SBATCH_TEMPLATE = """\
#!/bin/bash
# sbatch NAME.sbatch DATA
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

# One task a GPU. Five minutes before the time limit each gets SIGUSR1, upon which a run saves its state and ends with
# exit code 75; the job then goes back into the queue, and --resume goes on from the state. The limit is yours to set.
data=${{1:?say what to train on: sbatch NAME.sbatch DATA}}
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
    """A SLURM script that trains by the recipe, and goes on after its time limit."""
    if name not in recipes.RECIPES:
        raise UsageError(f"--sbatch is for a recipe, and {name} is a preset: `vitrail list recipes` shows them")
    if machine.gpu == TPU_NAME:
        raise UsageError("--sbatch is for GPUs, and a tpuv3 only counts costs as the paper does: name a GPU with --gpu")
    own = recipes.RECIPES[name]
    command = ["vitrail", "train", name, "--out", f"runs/{name}", "--resume"]
    if recipe.epochs != own.epochs:
        command += ["--epochs", str(recipe.epochs)]
    if recipe.batch != own.batch:
        command += ["--batch", str(recipe.batch)]
    if machine.micro_batches > 1:
        command += ["--micro-batches", str(machine.micro_batches)]
    command += ["--recompute"] * machine.recompute + ["--shard"] * machine.shard
    return _SBATCH_TEMPLATE.format(name=name, nodes=machine.nodes, gpus=machine.gpus, command=shlex.join(command))
