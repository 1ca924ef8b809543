"""`vitrail plan RECIPE`: what a run will take before it runs, or the script that runs it on a cluster."""

import dataclasses
import difflib
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import tyro

from vitrail import presets, recipes
from vitrail.cli import runs, show
from vitrail.cli.list import H200
from vitrail.config import Masked, Optimiser, Recipe, Schedule, ViTConfig, sides
from vitrail.errors import UsageError

if TYPE_CHECKING:
    from vitrail.model.build import Config
    from vitrail.model.memory import Parts


class Gpu(NamedTuple):
    memory: float
    """Bytes, as the data sheet counts them: a GB is 1e9, which is somewhat less than there is."""
    peak: float
    """FLOP/s of dense matrix products in bf16, as the data sheet has it."""


GPUS = {
    "a100": Gpu(80e9, 312e12),
    "h100": Gpu(80e9, 989e12),
    "h200": Gpu(141e9, 989e12),
    "b200": Gpu(180e9, 2250e12),
    "l40s": Gpu(48e9, 362e12),
    "rtx4090": Gpu(24e9, 165e12),
    "tpuv3": Gpu(16 * 2**30, 61.5e12),  # a core, of which a chip has two: what the paper counts its costs in
}
EFFICIENCY = H200 / GPUS["h200"].peak  # of the peak, assumed: `vitrail list recipes` counts with the same
TPU = "tpuv3"
USABLE = 0.9  # of a GPU's memory: the rest is for gradients of activations and for CUDA itself


class Published(NamedTuple):
    exaflops: float
    core_days: float | None = None
    """Of a TPUv3, where the paper's headline table has the system."""


PAPER = {  # Dosovitskiy et al. 2021, tables 2 and 6
    "vit-b32-jft": Published(55),
    "vit-b16-jft": Published(224),
    "vit-l32-jft": Published(196),
    "vit-l16-jft": Published(783),
    "vit-l16-jft-14": Published(1567, 680),
    "vit-h14-jft": Published(4262, 2500),
    "bit-r50x1-jft": Published(50),
    "bit-r50x2-jft": Published(199),
    "bit-r101x1-jft": Published(96),
    "bit-r152x1-jft": Published(141),
    "bit-r152x2-jft": Published(563),
    "bit-r152x2-jft-14": Published(1126),
    "bit-r200x3-jft": Published(3306),
    "r50-b32-jft": Published(106),
    "r50-b16-jft": Published(274),
    "r50-l32-jft": Published(246),
    "r50-l16-jft": Published(859),
    "r50-l16-jft-14": Published(1668),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
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
    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE|MODEL")],
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
    machine = Machine(
        gpu=gpu,
        nodes=nodes,
        gpus=gpus,
        micro_batches=micro_batches,
        recompute=recompute,
        shard=shard,
        efficiency=EFFICIENCY if efficiency is None else efficiency,
    )
    recipe, images = chosen(what, epochs=epochs, steps=steps, batch=batch, data_images=data_images)
    text = script(what, recipe, machine) if sbatch else None
    if text is not None and not json:
        print(text, end="")
        return
    found = {"what": what} | planned(recipe, images, machine, classes=classes) | {"paper": None, "sbatch": text}
    if what in PAPER and recipe == recipes.RECIPES[what] and data_images is None:
        found["paper"] = PAPER[what]._asdict()
    if json:
        show.as_json(found)
    else:
        _print(found)


def chosen(
    what: str, *, epochs: float | None, steps: int | None, batch: int | None, data_images: int | None
) -> tuple[Recipe, int]:
    """The recipe of that name, or one for that preset, with what was given in its place; and its training images."""
    if what in recipes.RECIPES:
        recipe = recipes.RECIPES[what]
    elif presets.exists(what):
        recipe = Recipe(
            model=what,
            image_size=None,
            epochs=300,
            optimiser=Optimiser(lr=1e-3),
            schedule=Schedule(),
            data="imagenet",
            source="vitrail",
        )
    else:
        close = difflib.get_close_matches(what.lower(), [*recipes.RECIPES, *presets.names()], n=3)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        raise UsageError(
            f"there is no recipe or preset {what!r:.80}: {meant}`vitrail list recipes` and `vitrail list` show them"
        )
    if epochs is not None and steps is not None:
        raise UsageError("--epochs and --steps both say how long; give one of them")
    for name, number in (("--steps", steps), ("--batch", batch), ("--data-images", data_images)):
        if number is not None and number < 1:
            raise UsageError(f"{name} is {number}; it must be at least 1")
    assert recipe.data is not None
    images = recipes.IMAGES[recipe.data] if data_images is None else data_images
    if steps is not None:
        epochs = steps * (batch or recipe.batch) / images
    return runs.changed(recipe, epochs=epochs, batch=batch, lr=None, warmup=None), images


def planned(recipe: Recipe, images: int, machine: Machine, *, classes: int = 1000) -> dict[str, Any]:
    """What the run takes; its keys are those of --json."""
    from vitrail.model import count, memory

    assert recipe.model is not None
    size = {} if recipe.image_size is None else {"image_size": sides(recipe.image_size)}
    config = presets.config(recipe.model, classes=classes if recipe.masked is None else 0, **size, **recipe.settings)
    models, parameters, each = _trained(config, recipe.masked)
    devices, total = machine.devices, round(recipe.epochs * images)
    part = -(-recipe.batch // (devices * machine.micro_batches))
    settings: dict[str, Any] = {
        "optimiser": recipe.optimiser.kind,
        "average": recipe.ema > 0,
        "dropout": recipe.dropout,
        "stochastic_depth": recipe.stochastic_depth,
        "recompute": machine.recompute,
    }
    whole, sharded = (
        _added([memory.parts(model, images=part, shards=shards, **settings) for model in models])
        for shards in (1, devices)
    )
    if machine.micro_batches > 1:  # gradients of parts are kept whole until the last part's are sent
        sharded = dataclasses.replace(sharded, gradients=whole.gradients)
    flops = each * total
    rate = devices * machine.efficiency * GPUS[machine.gpu].peak
    seconds = flops * (4 / 3 if machine.recompute else 1) / rate  # one more forward pass beside three
    weights = whole.weights
    return {
        "model": recipe.model,
        "machine": dataclasses.asdict(machine) | {"devices": devices, "peak": GPUS[machine.gpu].peak},
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
        "disk": {"checkpoint": weights + whole.optimizer + whole.average, "weights": 4 * count.parameters(config)},
        "traffic": traffic(weights, machine),
    }


def _trained(config: "Config", masked: Masked | None) -> tuple[tuple["Config", ...], int, int]:
    """Models that together hold what is held in training, their parameters, the FLOPs of training on an image."""
    from vitrail.model import count
    from vitrail.model import masked as masking

    if masked is None:
        return (config,), count.parameters(config), count.training_flops(config, 1)
    assert isinstance(config, ViTConfig)
    models, parameters = masking.stand_ins(config, masked), masking.parameters(config, masked)
    return models, parameters, masking.training_flops(config, masked, 1)


def _added(parts: Sequence["Parts"]) -> "Parts":
    """What several models hold on one device."""
    names = [field.name for field in dataclasses.fields(parts[0])]
    return dataclasses.replace(parts[0], **{name: sum(getattr(part, name) for part in parts) for name in names})


def count_core_days(what: str) -> float:
    """TPUv3-core-days of a recipe or preset, at the share of their peak that is assumed of GPUs."""
    machine = Machine(gpu=TPU, nodes=1, gpus=1, micro_batches=1, recompute=False, shard=False, efficiency=EFFICIENCY)
    recipe, images = chosen(what, epochs=None, steps=None, batch=None, data_images=None)
    return float(planned(recipe, images, machine)["gpu_days"])


def traffic(weights: int, machine: Machine) -> int:
    """Bytes that each GPU sends in a step, in rings: gradients are summed and handed round.

    Sharded weights are gathered before each forward and each backward pass, in bf16 and so half as large, and gradients
    summed where they belong.
    """
    rounds = machine.micro_batches + 1 if machine.shard else 2
    return round(rounds * weights * (machine.devices - 1) / machine.devices)


# --- as text ---------------------------------------------------------------------------------------------------------


def _print(found: dict[str, Any]) -> None:
    machine, paper, disk = found["machine"], found["paper"], found["disk"]
    unit = "TPUv3-core-days" if machine["gpu"] == TPU else "GPU-days"
    exaflops, days = f"{_number(found['exaflops'])} exaFLOPs", f"{_number(found['gpu_days'])} {unit}"
    if paper is not None:
        exaflops += f" (the paper: {paper['exaflops']:,})"
        days += f" (the paper: {paper['core_days']:,} TPUv3-core-days)" if paper["core_days"] else ""
    nodes = f"{machine['nodes']} nodes of " if machine["nodes"] > 1 else ""
    share = f"{machine['efficiency']:.0%} of {machine['peak'] / 1e12:,.0f} TFLOP/s each, an assumption"
    rows = [
        ("run", found["what"] if found["what"] == found["model"] else f"{found['what']}: {found['model']}"),
        ("machine", f"{nodes}{machine['gpus']} x {machine['gpu']} at {share}"),
        ("parameters", show.count(found["parameters"])),
        ("FLOPs", f"{found['flops_per_image'] / 1e9:,.1f} G to train on an image, {exaflops}"),
        (
            "steps",
            f"{found['steps']:,} of {show.plural(found['batch'], 'image')}, {show.plural(found['epochs'], 'epoch')}",
        ),
        ("time", f"{runs.duration(found['seconds'])}, {days}"),
        ("disk", f"{show.size(disk['checkpoint'])} a checkpoint, {show.size(disk['weights'])} the weights"),
    ]
    if machine["devices"] > 1:
        rows.append(("traffic", f"{show.size(found['traffic'])} from each GPU in a step"))
    show.table(rows)
    _print_memory(found)


def _print_memory(found: dict[str, Any]) -> None:
    whole, sharded = found["memory"]["whole"], found["memory"]["sharded"]
    rows = [(part, show.size(whole[part]), show.size(sharded[part])) for part in whole if whole[part]]
    header, columns = ("memory", "whole", "--shard"), 3 if found["machine"]["devices"] > 1 else 2
    print()
    show.table([row[:columns] for row in (header, *rows)], right=range(1, columns))
    print(f"\n{_fitting(found)}")


def _fitting(found: dict[str, Any]) -> str:
    """Whether it fits, and what would make it."""
    machine, memory = found["machine"], found["memory"]
    parts = memory["sharded" if machine["shard"] else "whole"]
    room = USABLE * memory["available"] - (parts["total"] - parts["activations"])
    images = found["micro_batch"]
    at_once = f"{show.plural(images, 'image')} at once {'takes' if images == 1 else 'take'} {show.size(parts['total'])}"
    available = f"a {'core' if machine['gpu'] == TPU else 'GPU'} of {show.size(memory['available'])}"
    if parts["activations"] <= room:
        return f"{at_once} of {available}."
    each = parts["activations"] // found["micro_batch"]
    if room < each:
        return f"{at_once}, and not even one fits {available}: --recompute, or --shard on several, takes less."
    share = -(-found["batch"] // machine["devices"])
    return f"{at_once}, too much for {available}: --micro-batches {-(-share // int(room / each))} fits."


def _number(value: float) -> str:
    """Three digits, or all before the point where there are more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- as a script -----------------------------------------------------------------------------------------------------

_SCRIPT = """\
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


def script(name: str, recipe: Recipe, machine: Machine) -> str:
    """A SLURM script that trains by the recipe, and goes on after its time limit."""
    if name not in recipes.RECIPES:
        raise UsageError(f"--sbatch is for a recipe, and {name} is a preset: `vitrail list recipes` shows them")
    if machine.gpu == TPU:
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
    return _SCRIPT.format(name=name, nodes=machine.nodes, gpus=machine.gpus, command=shlex.join(command))
