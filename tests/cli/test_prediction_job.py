"""The SLURM script of `vitrail predict --sbatch`: run by bash, with stand-ins for srun, scontrol and vitrail."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from vitrail.cli.arguments.evaluation import PredictArguments
from vitrail.cli.parsing import parse_arguments

COMMAND = [
    "predict", "model file.safetensors", "shards/x-{000..127}.tar", "--embed", "--float16", "--out", "s3://b/rows.parquet",
    "--features", "mean", "--batch", "512", "--workers", "7",
]  # fmt: skip


def run_task(folder: Path, script: str, code: int) -> tuple[int, list[str]]:
    """The exit code of a task in which vitrail ends with that code, and the commands that it ran."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    for name, end in (("vitrail", f"exit {code}"), ("scontrol", "exit 0"), ("srun", 'shift; exec "$@"')):
        path = folder / name
        path.write_text(f'#!/bin/bash\nprintf "%q " {name} "$@" >> {log}\necho >> {log}\n{end}\n')
        path.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "77"}
    process = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert process.stderr == ""
    return process.returncode, log.read_text().splitlines()


def test_a_task_predicts_its_part_and_requeues_itself_when_it_was_stopped(tmp_path: Path, capsys: Capture) -> None:
    code, script, _ = vitrail(*COMMAND, "--sbatch", "128", capsys=capsys)
    assert (code, "#SBATCH --array=1-128\n" in script) == (0, True)
    (merge,) = (line for line in script.splitlines() if "--wrap" in line)
    assert shlex.split(shlex.split(merge.partition("&&")[2])[-1]) == ["vitrail", "merge", "s3://b/rows.parquet"]
    for code, expected in ((0, 0), (3, 0), (2, 2), (75, 75)):
        exit_code, lines = run_task(tmp_path, script, code)
        assert exit_code == expected
        _, command, *rest = [shlex.split(line) for line in lines]
        assert command == ["vitrail", *command[1:-2], "--part", "3/128"]
        assert parse_arguments("predict", PredictArguments, command[2:-2]) == parse_arguments(
            "predict", PredictArguments, COMMAND[1:]
        )
        assert rest == ([["scontrol", "requeue", "77_3"]] if code == 75 else [])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["photos"], "--sbatch needs a file for the rows"),
        (["-", "--out", "x.csv"], "--sbatch has no standard input"),
        (["photos", "--out", "x.csv", "--part", "1/2"], "--sbatch makes the parts itself"),
    ],
)
def test_what_no_job_can_do_is_refused(options: list[str], reason: str, capsys: Capture) -> None:
    code, _, err = vitrail("predict", "m.safetensors", *options, "--sbatch", "2", capsys=capsys)
    assert (code, reason in err) == (2, True), err
    assert "--sbatch is 0" in vitrail("predict", "m", "a", "--out", "x.csv", "--sbatch", "0", capsys=capsys)[2]
