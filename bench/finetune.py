"""Fine-tuning a DeiT-Tiny for equal minutes: vitrail's defaults, transformers' example and timm's published settings.

    python bench/finetune.py --model MODEL --flowers DATA --cifar DATA --log runs.jsonl [--minutes 0.5]
        [--sets flowers,cifar10-10,cifar10-100] [--contenders vitrail,transformers,timm,...] [--seeds 0 1 2]

MODEL is a timm folder (config.json, model.safetensors); flowers a folder with train/CLASS/* and test/CLASS/*; CIFAR-10
such a folder or a dataset that vitrail packed, of which 10 and 100 training images a class are drawn, always the
same ones. No network is needed. Each run is a line of the log, and one that is there is not done again.

The minutes are of training. vitrail's --minutes counts its start, test and report too, for which --overhead is added;
the table says how long each trained.

Everybody starts from the same weights and sees the same images. vitrail is the command line with nothing set but the
minutes; it holds out a tenth of train to choose the best epoch by, the peers train on all of it and keep their last
weights. The hyper-parameters of the peers and where they were published stand in bench/peers.py. A peer runs twice: for
as many of its epochs as the minutes allow, and for its own published number where that fits into them; the better of
all runs of a library counts as its result. Accuracy is of the test split. Nothing here is chosen by it.
"""

import argparse
import dataclasses
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import (
    TIMM,
    TRANSFORMERS,
    Job,
    allow_torchvision,
    test_with_timm,
    test_with_transformers,
    train_with_timm,
    train_with_transformers,
)
from PIL import Image

from vitrail.data.dataset import Dataset
from vitrail.data.decode import decode
from vitrail.data.sources import open_dataset

FITTED, PUBLISHED = "as many epochs as fit", "published epochs"
CONTENDERS = ("vitrail", *TRANSFORMERS, *TIMM)
Run = dict[str, Any]


# --- the datasets ----------------------------------------------------------------------------------------------------


def prepare_dataset(name: str, options: argparse.Namespace) -> Path:
    """The folder of a dataset, written unless it is there: NAME, or NAME-EACH for so many training images a class."""
    base, _, each = name.partition("-")
    source = {"flowers": options.flowers, "cifar10": options.cifar}.get(base)
    if source is None:
        raise SystemExit(f"{name}: give --{'cifar' if base == 'cifar10' else base} DATA, or omit it from --sets")
    limit = options.test_limit
    folder = Path(options.work) / (name if limit is None else f"{name}-test{limit}")
    if not folder.exists():
        dataset = open_dataset(str(source))
        write_split(dataset, "train", folder, int(each) if each else None)
        if "val" in dataset.generated_splits and not each:  # it is vitrail's alone, which holds it out of train again
            write_split(dataset, "val", folder, None)
        write_split(dataset, "test", folder, None if limit is None else limit // len(dataset.classes))
    return folder


def write_split(dataset: Dataset, name: str, folder: Path, per_class: int | None) -> None:
    """The images of a split in class folders, all of them or so many a class, drawn by a fixed seed."""
    split = dataset.splits[name]
    labels = np.array([split.get_labels(index)[0] for index in range(len(split))])
    for number, label in enumerate(dataset.classes):
        indices = np.flatnonzero(labels == number)
        if per_class is not None:
            indices = np.sort(np.random.default_rng([0, number]).permutation(indices)[:per_class])
        to = folder / ("test" if name == "test" else "train") / label
        to.mkdir(parents=True, exist_ok=True)
        for index in indices.tolist():
            source, target = split.read_image(index), to / Path(split.get_image_name(index)).name
            if isinstance(source, Path):
                shutil.copyfile(source, target)
            else:
                pixels = decode(source, 3, name=split.get_image_name(index)).permute(1, 2, 0).numpy()
                Image.fromarray(pixels).save(target.with_suffix(".png"))


# --- the runs --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Log:
    """Runs as lines of JSON."""

    path: Path

    def list_runs(self) -> list[Run]:
        """Those that were done."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def find(self, wanted: Run) -> Run | None:
        """The run of this dataset, contender, rule, seed and minutes."""
        return next((run for run in self.list_runs() if wanted.items() <= run.items()), None)

    def add(self, run: Run) -> None:
        """One more."""
        with self.path.open("a") as file:
            file.write(json.dumps(run) + "\n")


def train_with_vitrail(job: Job, model: Path, overhead: float) -> Run:
    """The command line, with its own defaults."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["finetune", job.data, "--model", model, "--minutes", job.minutes + overhead, "--seed", job.seed]
        command += ["--device", job.device, "--workers", job.workers, "--out", Path(folder) / "run", "--json"]
        done = subprocess.run([sys.executable, "-m", "vitrail", *map(str, command)], stdout=subprocess.PIPE, check=True)
    facts = json.loads(done.stdout)
    return {key: facts.get(key) for key in ("top1", "correct", "images", "seconds", "epochs", "trained")}


def train_with_peer(job: Job, contender: str, *, published: bool) -> Run:
    """A peer, for its published number of epochs or for as many as fit."""
    if contender in TRANSFORMERS:
        arguments = TRANSFORMERS[contender]
        trained = train_with_transformers(job, arguments, arguments.epochs if published else None)
        correct, images = test_with_transformers(job, trained)
    else:
        settings = TIMM[contender]
        trained = train_with_timm(job, settings, settings.total if published else None)
        correct, images = test_with_timm(job, trained)
    return {
        "top1": correct / images,
        "correct": correct,
        "images": images,
        "seconds": trained.seconds,
        "epochs": trained.epochs,
        "trained": trained.images,
    }


def list_rules(contender: str, log: Log, named: Run) -> Iterator[str]:
    """How long a contender trains: to the end of the minutes, and its published number where that is less."""
    yield FITTED
    if contender != "vitrail":
        fitted = log.find(named | {"rule": FITTED})
        published = TRANSFORMERS[contender].epochs if contender in TRANSFORMERS else TIMM[contender].total
        if fitted is not None and published < fitted["epochs"]:
            yield PUBLISHED


def compare(options: argparse.Namespace, log: Log) -> None:
    """Do what is not in the log yet."""
    converted = Path(options.work) / "transformers"
    if not converted.exists():
        command = ["convert", options.model, converted, "--to", "transformers"]
        subprocess.run([sys.executable, "-m", "vitrail", *map(str, command)], check=True, stdout=subprocess.DEVNULL)
    device = torch.device(options.device)
    for name in options.sets:
        folder = prepare_dataset(name, options)
        for seed in options.seeds:
            for contender in options.contenders:
                named: Run = {"set": folder.name, "contender": contender, "seed": seed, "minutes": options.minutes}
                job = Job(
                    data=folder,
                    timm_model=options.model,
                    transformers_model=converted,
                    minutes=options.minutes,
                    seed=seed,
                    device=device,
                    workers=options.workers,
                )
                for rule in list_rules(contender, log, named):
                    key = named | {"rule": rule}
                    if log.find(key) is not None:
                        continue
                    peer = contender != "vitrail"
                    facts = (
                        train_with_peer(job, contender, published=rule == PUBLISHED)
                        if peer
                        else train_with_vitrail(job, options.model, options.overhead)
                    )
                    log.add(key | facts | collect_versions(device))
                    print(f"{key}: {facts['top1']:.4f}", file=sys.stderr)


def collect_versions(device: torch.device) -> Run:
    """What a figure needs beside it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    facts = {package: metadata.version(package) for package in ("torch", "timm", "transformers")}
    return {"device": name, "python": platform.python_version(), **facts}


# --- the table -------------------------------------------------------------------------------------------------------


def print_table(runs: list[Run]) -> None:
    """Print mean and deviation over seeds of every dataset and contender, and who is ahead."""
    for name in dict.fromkeys(run["set"] for run in runs):
        rows: dict[tuple[str, str], list[Run]] = {}
        for run in runs:
            if run["set"] == name:
                rows.setdefault((run["contender"], run["rule"]), []).append(run)
        facts = {
            key: join_values(rows, key) for key in ("images", "minutes", "device", "torch", "timm", "transformers")
        }
        print(
            f"\n{name}, {facts['images']} test images, {facts['minutes']} minutes, {facts['device']},"
            f" torch {facts['torch']}, timm {facts['timm']}, transformers {facts['transformers']}"
        )
        for (contender, rule), done in rows.items():
            values = [run["top1"] for run in done]
            spread = statistics.stdev(values) if len(values) > 1 else float("nan")
            print(
                f"  {contender:20} {rule:22} {statistics.mean(values):7.2%} +- {spread:5.2%}  n = {len(done)}"
                f"  {format_mean(done, 'epochs'):>8} epochs  {format_mean(done, 'trained'):>9} images"
                f"  {format_mean(done, 'seconds'):>7} s"
            )
        print_distance({key: statistics.mean(run["top1"] for run in done) for key, done in rows.items()})


def join_values(rows: dict[tuple[str, str], list[Run]], key: str) -> str:
    """What the runs say of themselves, which should be one thing."""
    return " or ".join(sorted({str(run[key]) for done in rows.values() for run in done}))


def format_mean(done: list[Run], key: str) -> str:
    """The mean of a number that some contenders do not tell."""
    values = [run[key] for run in done if run.get(key) is not None]
    return f"{statistics.mean(values):,.1f}" if values else "-"


def print_distance(means: dict[tuple[str, str], float]) -> None:
    """Print vitrail's distance to the best result of each library."""
    ours = means.get(("vitrail", FITTED))
    for library in ("transformers", "timm"):
        theirs = [mean for (contender, _), mean in means.items() if contender.startswith(library)]
        if ours is not None and theirs:
            apart = 100 * (ours - max(theirs))
            print(f"  vitrail is {abs(apart):.2f} points {'ahead of' if apart > 0 else 'behind'} {library}'s best")


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--flowers", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "vitrail-finetune")
    parser.add_argument("--sets", type=lambda text: text.split(","), default="flowers,cifar10-10,cifar10-100")
    parser.add_argument("--contenders", type=lambda text: text.split(","), default=",".join(CONTENDERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=0.5)
    parser.add_argument("--overhead", type=float, default=0.5, help="minutes that vitrail has beside training")
    parser.add_argument("--test-limit", type=int, help="test images, evenly over classes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    unknown = [name for name in options.contenders if name not in CONTENDERS]
    if unknown:
        parser.error(f"there is no contender {unknown[0]}; there are {', '.join(CONTENDERS)}")
    allow_torchvision()
    log = Log(options.log)
    compare(options, log)
    print_table([run for run in log.list_runs() if run["minutes"] == options.minutes])


if __name__ == "__main__":
    main()
