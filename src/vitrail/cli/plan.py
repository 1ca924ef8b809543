"""`vitrail plan RECIPE`: the cost of a run before it starts, or the job that runs it on a cluster."""

import dataclasses
import math
from typing import Any

from vitrail import presets
from vitrail.cli import output
from vitrail.cli.arguments.training import PlanArguments
from vitrail.errors import UsageError
from vitrail.formatting import format_bytes, format_count, format_duration, format_rate, pluralize
from vitrail.training import plan
from vitrail.training.train_job import make_train_job


def run(arguments: PlanArguments) -> None:
    """Print the estimate or the job."""
    machine = plan.PlannedMachine(
        gpu=arguments.gpu,
        nodes=arguments.job.nodes,
        gpus=arguments.job.gpus,
        micro_batches=arguments.micro_batches,
        recompute=arguments.recompute,
        shard=arguments.shard,
        efficiency=plan.DEFAULT_EFFICIENCY if arguments.efficiency is None else arguments.efficiency,
    )
    if arguments.predict is not None:
        _plan_prediction(arguments, machine)
        return
    if arguments.embed or arguments.float16:
        raise UsageError("--embed and --float16 are for the prediction of many images: add --predict N")
    recipe, images = plan.choose_recipe(
        arguments.name,
        epochs=arguments.epochs,
        steps=arguments.steps,
        batch=arguments.batch,
        data_images=arguments.data_images,
    )
    arguments.job.check_one_job()
    script = plan.make_sbatch_script(arguments.name, recipe, machine) if arguments.job.sbatch else None
    train_job = make_train_job(arguments.name, recipe, machine) if arguments.job.kubernetes else None
    if (script or train_job) and not arguments.output.json:
        print(script or train_job, end="")
        return
    published = plan.find_published_cost(arguments.name, recipe, images)
    facts = {
        "name": arguments.name,
        **plan.plan_run(recipe, images, machine, classes=arguments.classes),
        "paper": None if published is None else published._asdict(),
        "sbatch": script,
        "kubernetes": train_job,
    }
    if arguments.output.json:
        output.print_json(facts)
    else:
        _print_plan(facts)


def _plan_prediction(arguments: PlanArguments, machine: plan.PlannedMachine) -> None:
    """Print what predicting so many images takes."""
    job = arguments.job
    training = ("epochs", "steps", "batch", "data_images")
    named = [f"--{name.replace('_', '-')}" for name in training if getattr(arguments, name) is not None]
    named += ["--sbatch"] * job.sbatch + ["--kubernetes"] * job.kubernetes
    if named:
        advice = "; `vitrail predict --sbatch N` prints the job" if job.sbatch or job.kubernetes else ""
        raise UsageError(f"{', '.join(named)} is for training, and --predict is given: omit one{advice}")
    assert arguments.predict is not None
    from vitrail.training import prediction_plan
    from vitrail.weights import load

    is_preset = load.find_model_path(arguments.name) is None and presets.has_preset(arguments.name)
    config = presets.get_preset_config(arguments.name) if is_preset else load.load(arguments.name).model.config
    if is_preset:
        config = dataclasses.replace(config, classes=arguments.classes)
    facts = {"model": arguments.name} | prediction_plan.plan_prediction(
        config, arguments.predict, machine, embed=arguments.embed, float16=arguments.float16
    )
    if arguments.output.json:
        output.print_json(facts)
        return
    rate, cores = format_rate(facts["images_per_second"]), math.ceil(facts["decoding_cores"])
    values = f"{facts['features']:,} features" if arguments.embed else "a label"
    decoding = f"at {prediction_plan.IMAGES_PER_CORE} JPEGs of 256 pixels per second and core (assumed)"
    output.print_table(
        [
            ("model", facts["model"]),
            ("machine", _describe_machine(facts["machine"])),
            ("parameters", format_count(facts["parameters"])),
            ("FLOPs", f"{facts['flops_per_image'] / 1e9:,.1f} G per image, in bfloat16 (assumed)"),
            ("time", f"{format_duration(facts['seconds'])}, {_format_number(facts['gpu_hours'])} GPU-hours, {rate}"),
            ("decoding", f"{pluralize(cores, 'core')} to keep up, {decoding}"),
            (
                "output",
                f"{format_bytes(facts['bytes'])}: {values} per image, {facts['row_bytes']:,} bytes with its path",
            ),
        ]
    )


def _describe_machine(machine: dict[str, Any]) -> str:
    nodes = f"{machine['nodes']} nodes of " if machine["nodes"] > 1 else ""
    share = f"{machine['efficiency']:.0%} of {machine['peak'] / 1e12:,.0f} TFLOP/s each (assumed)"
    return f"{nodes}{machine['gpus']} x {machine['gpu']} at {share}"


def _print_plan(facts: dict[str, Any]) -> None:
    machine, disk = facts["machine"], facts["disk"]
    epochs = pluralize(facts["epochs"], "epoch")
    checkpoint, weights = format_bytes(disk["checkpoint"]), format_bytes(disk["weights"])
    exaflops, days = _format_totals(facts)
    rows = [
        ("run", facts["name"] if facts["name"] == facts["model"] else f"{facts['name']}: {facts['model']}"),
        ("machine", _describe_machine(machine)),
        ("parameters", format_count(facts["parameters"])),
        ("FLOPs", f"{facts['flops_per_image'] / 1e9:,.1f} G to train on an image, {exaflops}"),
        ("steps", f"{facts['steps']:,} with a batch of {facts['batch']:,}, {epochs}"),
        ("time", f"{format_duration(facts['seconds'])}, {days}"),
        ("disk", f"{checkpoint} per checkpoint, {weights} for the weights"),
    ]
    if machine["devices"] > 1:
        rows.append(("traffic", f"{format_bytes(facts['traffic'])} from each GPU per step"))
    output.print_table(rows)
    _print_memory(facts)


def _format_totals(facts: dict[str, Any]) -> tuple[str, str]:
    """The total FLOPs and device-days, beside the paper's where it states them."""
    paper = facts["paper"]
    unit = "TPUv3-core-days" if facts["machine"]["gpu"] == plan.TPU_NAME else "GPU-days"
    exaflops, days = f"{_format_number(facts['exaflops'])} exaFLOPs", f"{_format_number(facts['gpu_days'])} {unit}"
    if paper is not None:
        exaflops += f" (the paper: {paper['exaflops']:,})"
        days += f" (the paper: {paper['core_days']:,} TPUv3-core-days)" if paper["core_days"] else ""
    return exaflops, days


def _print_memory(facts: dict[str, Any]) -> None:
    whole, sharded = facts["memory"]["whole"], facts["memory"]["sharded"]
    rows = [
        (part.replace("_", " "), format_bytes(whole[part]), format_bytes(sharded[part]))
        for part in whole
        if whole[part]
    ]
    header, columns = ("memory", "per GPU", "with --shard"), 3 if facts["machine"]["devices"] > 1 else 2
    print()
    output.print_table([row[:columns] for row in (header, *rows)], right=range(1, columns))
    print(f"\n{_describe_fit(facts)}")


def _describe_fit(facts: dict[str, Any]) -> str:
    """Describe whether the run fits in memory, and what would make it fit."""
    machine, memory, micro_batch = facts["machine"], facts["memory"], facts["micro_batch"]
    parts = memory["sharded" if machine["shard"] else "whole"]
    free = plan.USABLE_MEMORY_SHARE * memory["available"] - (parts["total"] - parts["activations"])
    verb = "takes" if micro_batch == 1 else "take"
    needed = f"{pluralize(micro_batch, 'image')} at once {verb} {format_bytes(parts['total'])}"
    device = f"a {'core' if machine['gpu'] == plan.TPU_NAME else 'GPU'} of {format_bytes(memory['available'])}"
    if parts["activations"] <= free:
        return f"{needed} of {device}."
    image_bytes = parts["activations"] // micro_batch
    if free < image_bytes:
        return f"{needed}, and not even one fits {device}: --recompute, or --shard on several, takes less."
    device_batch = -(-facts["batch"] // machine["devices"])
    return f"{needed}, too much for {device}: --micro-batches {-(-device_batch // int(free / image_bytes))} fits."


def _format_number(value: float) -> str:
    """Three digits, or all before the point where there are more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
