"""The job of `vitrail train`: it runs the command that was typed, and nothing is read to print it."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.training.test_plan import read_task, run_script, write_script
from tests.training.test_train_job import check_schema, read_job
from vitrail.cli.arguments.training import TrainArguments
from vitrail.cli.parsing import parse_arguments

OPTIONS = (
    "--epochs", "3", "--batch", "64", "--set", "depth=3", "augment.mixup=0.2", "--recompute", "--shard",
    "--micro-batches", "2", "--seed", "7", "--probe", "5", "--track", "wandb", "--track", "tensorboard",
)  # fmt: skip
COMMAND = ("train", "vit-b16-imagenet", "--data", "a set/my photos", *OPTIONS)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without data or recipes."""
    monkeypatch.chdir(tmp_path)


def parse_job(words: list[str]) -> Any:
    assert words[0] == "train"
    return parse_arguments("train", TrainArguments, words[1:])


def run_job(folder: Path, *command: str, capsys: Capture) -> Any:
    """The arguments with which the task of the SLURM script starts vitrail."""
    completed = run_script(write_script(folder, command=command, capsys=capsys))
    assert completed.returncode == 0, completed.stderr
    return parse_job(read_task(folder)[1])


def read_arguments(*command: str, capsys: Capture) -> Any:
    """The arguments with which the pods start vitrail."""
    return parse_job(read_job(*command, capsys=capsys)["spec"]["trainer"]["args"])


def test_the_script_runs_the_command_that_was_typed(tmp_path: Path, capsys: Capture) -> None:
    expected = parse_job([*COMMAND, "--out", "runs/vit-b16-imagenet", "--resume"])
    assert run_job(tmp_path, *COMMAND, "--nodes", "2", "--gpus", "8", capsys=capsys) == expected
    script = (tmp_path / "job.sbatch").read_text()
    for line in ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--job-name=vit-b16-imagenet"):
        assert f"#SBATCH {line}\n" in script
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_script_trains_by_a_recipe_file_in_the_folder_that_is_named(tmp_path: Path, capsys: Capture) -> None:
    arguments = run_job(tmp_path, "train", "recipes/my.toml", "--data", "it's $HOME", capsys=capsys)
    assert (arguments.recipe, arguments.data) == ("recipes/my.toml", "it's $HOME")
    assert arguments.run.out == "runs/my"
    command = ("train", "digits", "--data", "digits", "--out", "/scratch/2027 Lärche")
    assert run_job(tmp_path, *command, capsys=capsys).run.out == "/scratch/2027 Lärche"
    assert "#SBATCH --job-name=train-2027-l-rche\n" in (tmp_path / "job.sbatch").read_text()


def test_the_train_job_runs_the_command_on_its_volumes(capsys: Capture) -> None:
    expected = parse_job([*COMMAND, "--out", "/work/runs/vit-b16-imagenet", "--resume", "--data", "/data/my photos"])
    job = read_job(*COMMAND, "--nodes", "2", "--gpus", "8", capsys=capsys)
    trainer = job["spec"]["trainer"]
    assert parse_job(trainer["args"]) == expected
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert vitrail(*COMMAND, "--kubernetes", capsys=capsys)[1].partition("apiVersion")[0].endswith(
        "The run reads /data/my photos and writes /work/runs/vit-b16-imagenet.\n"
    )  # fmt: skip


def test_the_train_job_of_a_command_fits_kubeflows_schema(capsys: Capture) -> None:
    job = read_job(*COMMAND, "--gpus", "2", "--out", "runs/True", capsys=capsys)
    assert job["metadata"]["name"] == "true"
    assert check_schema(job).to_dict()["spec"]["trainer"]["numProcPerNode"] == 2


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        ("photos/", "/data/photos"),
        ("/mnt/x-{000..127}.tar", "/data/x-{000..127}.tar"),
        ("/data/all/photos", "/data/all/photos"),
        ("cifar10", "/data/cifar10"),
        ("digits", "digits"),
        ("faces", "faces"),
        ("hf:org/name", "hf:org/name"),
        ("s3://bucket/photos", "s3://bucket/photos"),
    ],
)
def test_data_is_in_the_volume_unless_it_is_no_path(data: str, seen: str, capsys: Capture) -> None:
    assert read_arguments("train", "digits", "--data", data, capsys=capsys).data == seen


@pytest.mark.parametrize(
    ("out", "seen"),
    [
        ("runs/a/b", "/work/runs/a/b"),
        ("/scratch/b", "/work/runs/b"),
        ("/work/runs/a/b", "/work/runs/a/b"),
        ("s3://bucket/b", "s3://bucket/b"),
    ],
)
def test_the_run_is_written_to_the_volume_or_uploaded(out: str, seen: str, capsys: Capture) -> None:
    assert read_arguments("train", "digits", "--data", "digits", "--out", out, capsys=capsys).run.out == seen


def test_files_must_be_in_a_volume(capsys: Capture) -> None:
    for command in (
        ("my.toml",), ("digits", "--relabel", "runs/suspects/my.toml"), ("digits", "--class-weights", "/etc/my.toml"),
    ):  # fmt: skip
        code, out, err = vitrail("train", *command, "--data", "photos", "--kubernetes", capsys=capsys)
        assert (code, out) == (2, "")
        assert f"the pods do not see {command[-1]}: copy it into the volume `runs`" in err
        assert err.endswith(" /work/runs/my.toml\n")
    words = ("train", "/work/runs/my.toml", "--data", "photos", "--relabel", "/data/suspects.csv")
    arguments = read_arguments(*words, capsys=capsys)
    assert (arguments.recipe, str(arguments.learning.relabel)) == ("/work/runs/my.toml", "/data/suspects.csv")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--gpus", "8"], "--nodes and --gpus are for the job that --sbatch or --kubernetes prints"),
        (["--sbatch", "--kubernetes"], "--sbatch and --kubernetes print two different jobs: give one of them"),
        (["--sbatch", "--nodes", "0"], "--nodes is 0 and --gpus 1; each must be at least 1"),
        (["--sbatch", "--overwrite"], "--overwrite would remove that run"),
        (["--sbatch", "--set", "optimizer.lrr=1"], "optimizer.lrr"),
        (["--sbatch", "--probe", "-1"], "--probe is -1"),
    ],
)
def test_what_no_job_can_do_is_refused(options: list[str], reason: str, capsys: Capture) -> None:
    code, out, err = vitrail("train", "vit-b16-imagenet", "--data", "photos", *options, capsys=capsys)
    assert (code, out, reason in err, err.count("\n")) == (2, "", True, 1), err
