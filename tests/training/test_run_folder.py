"""A run's folder belongs to one process, and a process removes only what it made itself."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.image_files import write_image_folder
from tests.faults.test_workers import end, start
from tests.test_locks import holder
from tests.training.test_resume import digest_weights
from vitrail.cli import main
from vitrail.errors import UsageError
from vitrail.training import run_folder

Attacked = Callable[[str, str], None]
SHORT = ("train", "digits", "--epochs", "1", "--warmup", "1", "--device", "cpu", "--workers", "0", "--seed", "3")


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.05)


@pytest.mark.attack
def test_a_finished_run_without_checkpoints_is_not_removed_where_its_images_are_gone(
    tmp_path: Path, attacked: Attacked, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, run = write_image_folder(tmp_path / "photos", "train", "val", each=12), tmp_path / "run"
    command = [*SHORT, "--data", str(photos), "--batch", "8", "--out", str(run)]
    assert main(command) == 0
    shutil.rmtree(run / "checkpoints")
    (run / "weights" / "last.safetensors").unlink()
    before = contents(run)
    assert main([*command, "--resume"]) == 2
    assert "is a finished run whose checkpoints were removed, so there is nothing to resume" in capsys.readouterr().err
    assert contents(run) == before
    for image in photos.rglob("*.*"):
        image.unlink()
    (run / "events.jsonl").unlink()  # nothing says any more that it was finished
    assert main([*command, "--resume"]) in (2, 3)
    assert contents(run).keys() >= before.keys() - {"events.jsonl", "results.csv"}
    attacked("--resume of a finished run without checkpoints, its images gone", "refused, every file kept")


@pytest.mark.attack
@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
def test_a_second_process_is_refused_and_changes_nothing(tmp_path: Path, attacked: Attacked, option: str) -> None:
    """Two Ctrl-C end the second as quickly as they can, and still cost the first nothing."""
    run = tmp_path / "run"
    assert main([*SHORT, "--data", "digits", "--out", str(tmp_path / "whole")]) == 0
    command = [sys.executable, "-m", "vitrail", *SHORT, "--data", "digits", "--save-every", "0", "--out", str(run)]
    pipe, environment = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as first:
        wait_for(run / "checkpoints")
        first.send_signal(signal.SIGSTOP)  # it stays where it is while others come
        try:
            second = start(*SHORT, "--data", "digits", "--out", run, option)
            said = end(second)
            assert second.returncode == 2, said
            assert f"{run} is in use by process {first.pid} on " in said
            third = start(*SHORT, "--data", "digits", "--out", run, option)
            time.sleep(1)
            for _ in range(2):
                third.send_signal(signal.SIGINT)
                time.sleep(0.2)
            end(third)
        finally:
            first.send_signal(signal.SIGCONT)
        said = first.communicate(timeout=120)[1]
    assert first.returncode == 0, said
    assert digest_weights(run) == digest_weights(tmp_path / "whole")
    assert not (run / ".lock").exists()
    attacked(
        f"a second process with {option} in a running folder, and two Ctrl-C", "refused by name, the first ends well"
    )


def test_a_run_that_was_killed_leaves_a_lock_that_nobody_minds(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*SHORT, "--data", "digits", "--save-every", "0", "--out", run)
    wait_for(run / "checkpoints")
    process.kill()
    process.communicate()
    assert (run / ".lock").exists()
    assert main([*SHORT, "--data", "digits", "--out", str(run), "--resume"]) == 0
    assert main([*SHORT, "--data", "digits", "--out", str(tmp_path / "whole")]) == 0
    assert digest_weights(run) == digest_weights(tmp_path / "whole")


def test_a_run_that_is_refused_leaves_an_empty_folder_as_it_was(tmp_path: Path) -> None:
    """One that it made itself is removed."""
    photos = write_image_folder(tmp_path / "photos", "train", "val", each=12)
    for image in photos.rglob("*.*"):
        image.write_bytes(b"no image")
    (tmp_path / "mine").mkdir()
    for name in ("mine", "new"):
        assert main([*SHORT, "--data", str(photos), "--batch", "8", "--out", str(tmp_path / name)]) == 3
    assert list((tmp_path / "mine").iterdir()) == []
    assert not (tmp_path / "new").exists()


def test_the_runs_of_several_seeds_are_locked_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished seed is not free for another process while the next one is trained."""
    with holder(tmp_path / ".lock", "with") as process:
        (tmp_path / "seed-0").mkdir()
        (tmp_path / "seed-0" / "config.json").write_text('{"recipe": {}, "steps": 1, "preprocess": {}}')
        command = ["finetune", "digits", "--model", "ti16", "--from-scratch", "--runs", "2", "--out", str(tmp_path)]
        assert main([*command, "--overwrite"]) == 2
        process.kill()
    assert f"{tmp_path} is in use by process {process.pid}" in capsys.readouterr().err
    assert (tmp_path / "seed-0" / "config.json").exists()


def test_other_words_about_the_model_do_not_make_it_another_run(tmp_path: Path) -> None:
    """Assumptions and changes are sentences, which another version may word differently; its name is the model's."""
    config = {"recipe": {"epochs": 1}, "model": {"name": "x", "assumptions": ["heads: 3, as has"], "changes": ["a"]}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    run_folder._check_same_config(path, config | {"model": {"name": "x", "assumptions": ["heads: 3, as in"]}})
    with pytest.raises(UsageError, match=r"another model\.name: x, not y"):
        run_folder._check_same_config(path, config | {"model": {"name": "y"}})


def test_a_run_of_a_version_that_did_not_record_how_images_are_resized_is_the_same_run(tmp_path: Path) -> None:
    """Its preprocessing for training records it."""
    path, recipe = tmp_path / "config.json", {"epochs": 1, "resize": 1.25}
    for preprocess in (None, {"resize": [40, 40]}):
        path.write_text(json.dumps({"recipe": recipe, "train_preprocess": preprocess}))
        current = {"recipe": recipe | {"resize_whole_image": preprocess is not None}, "train_preprocess": preprocess}
        run_folder._check_same_config(path, current)
    with pytest.raises(UsageError, match="another train_preprocess"):
        run_folder._check_same_config(path, current | {"train_preprocess": None})
