"""The job of `vitrail train --sbatch` and `--kubernetes`: the same command, with its run folder, on a cluster."""

import dataclasses
import re
from pathlib import PurePath, PurePosixPath

from vitrail.cli.arguments.training import TrainArguments
from vitrail.cli.options import JobOptions
from vitrail.cli.signature import format_command
from vitrail.data.memory import DIGITS_NAME, FACES_NAME
from vitrail.data.sources import HUB_PREFIX
from vitrail.errors import UsageError
from vitrail.recipes import RECIPE_SUFFIXES
from vitrail.remote import is_remote
from vitrail.training.plan import format_sbatch_script
from vitrail.training.pretrain import PretrainingOptions, choose_recipe
from vitrail.training.train_job import DATA_VOLUME, RUNS_VOLUME, format_train_job


def make_job(arguments: TrainArguments, options: PretrainingOptions) -> str:
    """Write the SLURM script or the TrainJob that runs this command, and resumes it when it is started again."""
    job = arguments.job
    _check_job(arguments)
    if not _is_recipe_file(arguments.recipe):
        choose_recipe(arguments.recipe, options)  # a mistake is an error now, not when the job starts
    out = arguments.run.out or f"runs/{PurePath(arguments.recipe).stem}"
    name = _name_job(out)
    if job.sbatch:
        command = _format_train_command(arguments, out)
        return format_sbatch_script(name, command, nodes=job.nodes, gpus=job.gpus, data=arguments.data)
    _check_files(arguments)
    out, data = _find_in_pod(out, RUNS_VOLUME), arguments.data
    if data not in (DIGITS_NAME, FACES_NAME) and not data.startswith(HUB_PREFIX):
        data = _find_in_pod(data, DATA_VOLUME)
    command = _format_train_command(arguments, out)
    return format_train_job(name, command, nodes=job.nodes, gpus=job.gpus, data=data, out=out)


def _check_job(arguments: TrainArguments) -> None:
    """Refuse what no job can do."""
    job = arguments.job
    job.check_one_job()
    if not (job.sbatch or job.kubernetes):
        raise UsageError(
            "--nodes and --gpus are for the job that --sbatch or --kubernetes prints: add one of them. On one machine,"
            " `torchrun --nproc-per-node N -m vitrail train RECIPE --data DATA` trains on N GPUs"
        )
    if min(job.nodes, job.gpus) < 1:
        raise UsageError(f"--nodes is {job.nodes} and --gpus {job.gpus}; each must be at least 1")
    if arguments.run.overwrite:
        raise UsageError(
            "a job resumes its run when it is started again, and --overwrite would remove that run: omit it, and name"
            " a new folder with --out"
        )


def _is_recipe_file(recipe: str) -> bool:
    return PurePath(recipe).suffix.lower() in RECIPE_SUFFIXES


def _check_files(arguments: TrainArguments) -> None:
    """Refuse files that are in no volume of the pods."""
    learning = arguments.learning
    files = [learning.class_weights, learning.relabel]
    for path in [str(file) for file in files if file] + [arguments.recipe] * _is_recipe_file(arguments.recipe):
        if not PurePosixPath(path).is_relative_to(DATA_VOLUME) and not PurePosixPath(path).is_relative_to(RUNS_VOLUME):
            raise UsageError(
                f"the pods do not see {path}: copy it into the volume `runs`, and give the path that they see,"
                f" {RUNS_VOLUME}/{PurePath(path).name}"
            )


def _find_in_pod(path: str, volume: str) -> str:
    """Where the pods find a path: a URL or a path below the volume as it is, any other by its last part."""
    if is_remote(path):
        return path
    absolute = PurePosixPath(RUNS_VOLUME).parent / path  # where the image works
    return str(absolute if absolute.is_relative_to(volume) else PurePosixPath(volume, absolute.name))


def _name_job(out: str) -> str:
    """The run folder's name in the letters, digits and hyphens that SLURM and Kubernetes accept."""
    name = re.sub("[^a-z0-9]+", "-", PurePosixPath(out).name.lower()).strip("-")[:40].rstrip("-")
    return name if name[:1].isalpha() else f"train-{name}".rstrip("-")


def _format_train_command(arguments: TrainArguments, out: str) -> list[str]:
    """The command of a job, which resumes the run in `out`, without its data."""
    run = dataclasses.replace(arguments.run, out=out, resume=True)
    arguments = dataclasses.replace(arguments, run=run, job=JobOptions())
    return ["vitrail", *format_command("train", arguments, without=["--data"])]
