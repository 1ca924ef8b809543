"""A tour of the package below the working directory, run by test_portability.py as if on Windows."""

import json
import signal
import sys
import urllib.request
from pathlib import Path

import vitrail
from vitrail import files
from vitrail.cli import main
from vitrail.errors import LockedError, StoppedError
from vitrail.locks import check_lock, hold_lock
from vitrail.training.loop import StepEnd

OPTIONS = {"batch": 8, "device": "cpu", "progress": False}


def stop_after_three_steps(step_end: StepEnd) -> None:
    if step_end.step == 3:
        signal.raise_signal(signal.SIGINT)


def run(*arguments: str) -> None:
    code = main(arguments)
    assert code == 0, (arguments, code)


def take_tour() -> None:
    """Pack (by a pool of processes), train (with a loader's process), stop, resume, and use the model."""
    assert vars(files)["os"].name == "nt", "sitecustomize.py was not imported"
    assert not hasattr(vars(files)["os"], "fork")
    run("data", "pack", "photos", "shards")
    vitrail.train("digits", "shards", epochs=2, out="whole", workers=0, **OPTIONS)
    try:
        vitrail.train("digits", "shards", epochs=2, out="stopped", workers=1, on_step=stop_after_three_steps, **OPTIONS)
        raise AssertionError("it was not stopped")
    except StoppedError:
        pass
    vitrail.train("digits", "shards", epochs=2, out="stopped", resume=True, workers=0, **OPTIONS)
    run("predict", "whole", "photos/test", "--format", "csv", "--out", "predictions.csv")
    run("evaluate", "whole", "shards", "--workers", "0")
    run("convert", "whole", "exported.pt2", "--to", "torch-export")
    run("convert", "whole", "timm-model", "--to", "timm")
    with vitrail.serve("whole", port=0) as server:
        image = next(Path("photos").rglob("*.png")).read_bytes()
        request = urllib.request.Request(f"{server.url}/v1/predict", image, {"Content-Type": "image/png"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)
    check_locks()


def check_locks() -> None:
    with hold_lock(Path("lock"), "the folder"):
        check_lock(Path("lock"), "the folder")
    assert not Path("lock").exists()
    try:
        check_lock(Path(sys.argv[1]), "the folder of the test")
        raise AssertionError("the test holds it")
    except LockedError:
        pass


if __name__ == "__main__":
    take_tour()
