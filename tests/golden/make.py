"""Files as version 0.1.0 writes them, for tests/test_golden.py to read with every later version.

    PYTHONPATH=src python tests/golden/make.py NEW_FOLDER

made everything beside this file, by that version, on an x86 CPU with one thread. It must not be made again by a newer
one: the files would no longer be those that people have. A new format gets a new folder and tests of its own.

    photos/, faulty_report.json     images, three of them faulty, and the report of `data check` that says so
    shards/                         the others, packed (`data pack --leave-out`)
    *.safetensors                   models: labels, temperature and threshold; several labels; measured precisions;
                                    pre-trained by masked patches; with the head of a probe
    run/                            a finished run on `digits`, its checkpoints removed
    stopped/, stopped_masked/       runs on `digits` that were stopped by SIGTERM, to resume
    ended/, ended_masked/           the last weights that they end with
    homes/                          what is kept outside: what is held out of `digits`, with one image moved from val to
                                    test, and the features of `digits`
    study/                          `study sweep` of two rates, all of whose cells have ended
    rows.*, matrix.*                predictions that were cut short, and what says of which command they are
    expected.json                   what came of all that
"""

import csv
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitrail

CLASSES = ("circle", "cross", "plain")
TINY = ("width=16", "depth=2", "mlp=32", "heads=2")
RUN = ("--seed", "0", "--device", "cpu", "--workers", "0")
DIGITS = ("train", "digits", "--data", "digits", *RUN, "--epochs", "2")
COMMANDS = {
    "run": (*DIGITS, "--set", *TINY, "dropout=0.1"),
    "stopped": (*DIGITS, "--set", *TINY, "dropout=0.1", "ema=0.9"),
    "stopped_masked": ("train", "mpp-cifar10", "--data", "digits", *RUN, "--epochs", "4", "--batch", "128", "--set",
                       *TINY, "image_size=8", "patch=2", "channels=1"),
}  # fmt: skip
PROBE = ("probe", "masked.safetensors", "digits", "--methods", "knn", "linear", "--device", "cpu", "--workers", "0")
SWEEP = ("study", "sweep", "digits", "--model", "masked.safetensors", "--rates", "0.01", "0.03", "--steps", "4",
         "--batch", "32", "--image-size", "8", "--runs", "1", "--out", "study", "--device", "cpu", "--workers", "0",
         "--json")  # fmt: skip
PREDICT = ("predict", "labels.safetensors", "shards", "--batch", "5", "--device", "cpu", "--precision", "float32")
ROWS = {"rows.csv": ("--top", "2"), "rows.jsonl": ("--top", "2"), "matrix.npy": ("--embed",)}


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.chdir(folder)
    homes = {f"XDG_{name}_HOME": str(folder / "homes" / name.lower()) for name in ("DATA", "CACHE")}
    os.environ |= homes | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    expected: dict[str, Any] = {"version": vitrail.__version__}
    draw_photos()
    write_models()
    run("data", "check", "photos", "--skip-bad", "--out", "faulty_report.json")
    run("data", "pack", "photos", "shards", "--leave-out", "faulty_report.json")
    train(expected)
    keep_masked(expected)
    run("convert", "run", "precision.safetensors", "--measure", "digits")
    expected["measured"] = json.loads(run("info", "precision.safetensors", "--json"))["tried"]
    expected["measured beside"] = write_measurements(expected["measured"])
    models = ("labels", "several", "precision", "probed")
    expected["predictions"] = {name: predict(f"{name}.safetensors") for name in models}
    expected["features"] = {name: embed(f"{name}.safetensors") for name in ("labels", "masked")}
    evaluated = run("evaluate", "labels.safetensors", "shards", "--split", "all", "--device", "cpu", "--json")
    expected["evaluate"] = {name: json.loads(evaluated)["models"][0][name] for name in ("images", "right")}
    expected["sweep"] = json.loads(run(*SWEEP))
    expected["rows"] = {name: begin_rows(name) for name in ROWS}
    tidy()
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def run(*arguments: str, code: int = 0) -> str:
    """What a command prints."""
    done = subprocess.run([sys.executable, "-m", "vitrail", *arguments], capture_output=True, text=True)
    if done.returncode != code:
        raise RuntimeError(f"{arguments} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def draw_photos() -> None:
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[:16, :18]
    shapes = ((rows - 8) ** 2 + (columns - 9) ** 2 < 30, (abs(rows - 8) < 2) | (abs(columns - 9) < 2), rows < 0)
    for split, count in (("train", 4), ("val", 3), ("test", 3)):
        for name, shape in zip(CLASSES, shapes, strict=True):
            folder = Path("photos", split, name)
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 8, (16, 18, 3)) * 12 + 120 * shape[..., None]
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    same = Path("photos/train/circle/0.png").read_bytes()
    Path("photos/val/circle/copy.png").write_bytes(same)
    Path("photos/train/cross/cut.png").write_bytes(same[:200])
    Path("photos/train/plain/none.png").write_bytes(b"no image")


def write_models() -> None:
    """Models with random weights that are nowhere zero."""
    model: Any = vitrail.create("ti4", image_size=16, num_classes=3, width=16, depth=2, mlp=32, heads=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3, generator=generator)
    preprocess = vitrail.Preprocess(size=(16, 16), resize=(18,), mean=(0.4, 0.45, 0.5), std=(0.3, 0.25, 0.2))
    trained: Any = vitrail.Trained(model.eval(), preprocess, CLASSES, temperature=1.7, threshold=0.6)
    vitrail.save(trained, "labels.safetensors")
    vitrail.save(dataclasses.replace(trained, several=True, threshold=0.0), "several.safetensors")


def train(expected: dict[str, Any]) -> None:
    """A run that ends, two that are stopped, and what those come to when they are resumed."""
    found = json.loads(run(*COMMANDS["run"], "--out", "run", "--json"))
    expected["run"] = {name: found[name] for name in ("images", "right", "temperature")}
    shutil.rmtree("run/checkpoints")
    for name in ("stopped", "stopped_masked"):
        command = (*COMMANDS[name], "--out", name, "--save-every", "0")
        running = subprocess.Popen([sys.executable, "-m", "vitrail", *command])
        while running.poll() is None and last_step(name) < 30:  # of 45: few are left in which CPUs could differ
            time.sleep(0.01)
        running.send_signal(signal.SIGTERM)
        assert running.wait() == 75, "it is stopped before its end"
        assert last_step(name) < 43
        for older in sorted(Path(name, "checkpoints").glob("step-*"))[:-1]:
            shutil.rmtree(older)
        shutil.copytree(name, f"{name}-resumed")
        run(*COMMANDS[name], "--out", f"{name}-resumed", "--resume")
        ended = Path(name.replace("stopped", "ended"))
        ended.mkdir()
        shutil.copy(f"{name}-resumed/weights/last.safetensors", ended)
        expected[name] = {"evaluations": len(Path(f"{name}-resumed/results.csv").read_text().splitlines()) - 1}
        if name == "stopped_masked":
            shutil.copy(f"{name}-resumed/weights/best.safetensors", "masked.safetensors")
        shutil.rmtree(f"{name}-resumed")


def last_step(run: str) -> int:
    """That of the newest checkpoint."""
    return max((int(path.parent.name[5:]) for path in Path(run).glob("checkpoints/step-*/manifest.json")), default=0)


def keep_masked(expected: dict[str, Any]) -> None:
    """What probes find, features that are kept, and what is held out with one image moved."""
    (held,) = Path("homes/data/vitrail/splits").glob("digits-*.csv")
    rows = list(csv.reader(held.open()))
    next(row for row in rows if row[1] == "val")[1] = "test"
    with held.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    expected["held out"] = sum(row[1] == "test" for row in rows)
    found = json.loads(run(*PROBE, "--save", "probed.safetensors", "--json"))
    expected["probe"] = found


def write_measurements(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measurements beside a run's weights, as larger models get them, of which none is faster anywhere."""
    content = Path("run/weights/best.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]["vitrail"]
    kept = [each | {"speed": 0.5} for each in measured]
    text = json.dumps({"model": hashlib.sha256(header.encode()).hexdigest(), "precision_measurements": kept})
    Path("run/weights/best.precision.json").write_text(text)
    return kept


def predict(model: str) -> list[list[Any]]:
    """Image, label and probability of each row."""
    text = run("predict", model, "shards", "--top", "3", "--format", "csv", "--precision", "float32", "--device", "cpu")
    return [[row["image"], row["label"], float(row["probability"])] for row in csv.DictReader(text.splitlines())]


def embed(model: str) -> list[list[float]]:
    run("predict", model, "shards", "--embed", "--out", "features.npy", "--device", "cpu")
    values: list[list[float]] = np.load("features.npy").tolist()
    for path in Path().glob("*features.*"):
        path.unlink()
    return values


def begin_rows(name: str) -> str:
    """Predictions cut off within a row; their whole text before that, of a matrix that of the names."""
    run(*PREDICT, *ROWS[name], "--out", name)
    path = Path(name)
    text = path.with_suffix(".csv") if path.suffix == ".npy" else path
    if path.suffix == ".npy":
        np.save("matrix-whole.npy", np.load(path))
        path.write_bytes(path.read_bytes()[:-100])
    whole = text.read_text()
    text.write_text(whole[: 2 * len(whole) // 3])
    return whole


def tidy() -> None:
    """Leave only what is read again."""
    for pattern in ("*.png", "*.jpg", "report.html", "README.md", ".lock", ".*.lock"):
        for path in [path for path in Path().rglob(pattern) if "photos" not in path.parts]:
            path.unlink()
    for path in Path("study").glob("cells/*/run"):
        shutil.rmtree(path)
    for folder in (Path("runs"), Path("homes/cache/matplotlib"), *Path("homes/cache/vitrail").glob("[!f]*")):
        shutil.rmtree(folder, ignore_errors=True)  # of caches, only features do not depend on times of change


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
