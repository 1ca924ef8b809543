"""What pre-training is worth where labels are few: from scratch, masked patch prediction, MAE, supervised.

    python bench/pretraining.py DATA --recipe tiny-imagenet --work FOLDER [--minutes 9]
        [--pretraining-steps 20000] [--steps 3000] [--seeds 3] [--rates 5e-4 2e-3] [--shares 0.01 0.1 1]
        [--arms scratch mpp-mean-color mpp-4x4-colors mpp-pixels mae supervised] [--device cuda] [--workers 4]

The classes of DATA are divided, every second one to either half. The recipe's model is pre-trained on the training
images of one half: without labels (mpp with each of its targets, mae) or with them; from scratch it is not. Then each
arm learns the other half from a share of its labels, with the recipe's own augmentation and the same number of steps.
Held-out images of these classes are divided again: by one part the weights of a run are chosen, and of the first seed's
rates the one that all other seeds take; the other part is what the table is of. Means and deviations are over seeds,
which draw the labels too.

A process takes one run after the other that is neither done nor taken, so any number of them may work on one FOLDER,
and any of them may be ended at any time: a run goes on from its checkpoint. After --minutes a process saves and ends.
Each finished run is a line of FOLDER/results.jsonl, and every process ends with the table of those that are done.
"""

import argparse
import contextlib
import csv
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail import recipes
from vitrail.config import MaskedConfig, Recipe, ScheduleConfig
from vitrail.data.dataset import Dataset, Split
from vitrail.data.sources import open_dataset
from vitrail.errors import DivergedError, StoppedError
from vitrail.runtime.devices import resolve_device
from vitrail.training.run_results import RunResult
from vitrail.training.trainer import Trainer
from vitrail.training.training_run import TrainingRun, adapt_to_dataset
from vitrail.weights.load import load

ARMS = {
    "scratch": None,
    "mpp-mean-color": recipes.MPP,
    "mpp-4x4-colors": dataclasses.replace(recipes.MPP, target="4x4-colors"),
    "mpp-pixels": dataclasses.replace(recipes.MPP, target="pixels"),
    "mae": recipes.MAE,
    "supervised": None,
}
_PATIENCE = 5.0  # seconds until a process looks again for a run that it can take


@dataclasses.dataclass(frozen=True)
class Job:
    """A run: pre-training of an arm, or what it learns then from a share of the labels."""

    arm: str
    share: float | None = None
    rate: float | None = None
    """None for the one that did best with the first seed."""
    seed: int = 0

    @property
    def name(self) -> str:
        """Of its folder and lock."""
        rate = "" if self.rate is None else f"-{self.rate:g}"
        return self.arm if self.share is None else f"{self.arm}-{self.share:g}{rate}-seed{self.seed}"

    @property
    def start(self) -> str | None:
        """The run whose weights it begins with."""
        return None if self.share is None or self.arm == "scratch" else self.arm

    def list_needed_jobs(self, rates: list[float]) -> set[str]:
        """The runs that must be done before it."""
        before = set() if self.start is None else {self.start}
        if self.share is not None and self.rate is None:
            before |= {dataclasses.replace(self, rate=rate, seed=0).name for rate in rates}
        return before


def list_jobs(options: argparse.Namespace) -> list[Job]:
    """All runs, those that others wait for first."""
    before = [Job(arm) for arm in options.arms if arm != "scratch"]
    grid = [
        Job(arm, share, rate, seed)
        for seed in range(options.seeds)
        for share in options.shares
        for arm in options.arms
        for rate in (options.rates if seed == 0 else [None])
    ]
    return before + grid


# --- the images ------------------------------------------------------------------------------------------------------


def select_half(dataset: Dataset, split: str, which: int) -> Split:
    """The images of a split that show every second class, from the first or the second on."""
    whole = dataset.splits[split]
    rows = np.asarray(whole.rows)
    return Split(whole.store, rows[whole.store.table["label"][rows] % 2 == which])


def select_upstream(dataset: Dataset) -> Dataset:
    """What is pre-trained on: one half of the classes."""
    held = "test" if "test" in dataset.splits else "val"
    splits = {"train": select_half(dataset, "train", 0), "val": select_half(dataset, held, 0)}
    return dataclasses.replace(dataset, splits=splits)


def select_downstream(dataset: Dataset, share: float, seed: int) -> Dataset:
    """The other half: a share of each class's training images, and two parts of those held out."""
    train = select_half(dataset, "train", 1)
    labels = train.store.table["label"][train.rows]
    generator = np.random.default_rng([seed, round(share * 1e6)])
    kept = [
        generator.permutation(train.rows[labels == label])[: max(1, round(share * int((labels == label).sum())))]
        for label in np.unique(labels)
    ]
    held = select_half(dataset, "test" if "test" in dataset.splits else "val", 1)
    parts = {"train": np.sort(np.concatenate(kept)), "val": held.rows[0::2], "test": held.rows[1::2]}
    return dataclasses.replace(dataset, splits={name: Split(train.store, rows) for name, rows in parts.items()})


# --- the runs --------------------------------------------------------------------------------------------------------


def set_steps(recipe: Recipe, steps: int, images: int) -> Recipe:
    """The recipe for so many steps."""
    return dataclasses.replace(
        recipe, epochs=steps * recipe.batch / images, schedule=ScheduleConfig(warmup=steps // 20)
    )


def build_pretraining_run(job: Job, dataset: Dataset, options: argparse.Namespace) -> TrainingRun:
    """An arm's run on the first half of the classes."""
    some, base = select_upstream(dataset), recipes.get_recipe(options.recipe)
    masked: MaskedConfig | None = ARMS[job.arm]
    if masked is not None:
        base = recipes.build_masked_recipe(base, masked, images=len(some.splits["train"]), epochs=1)
    recipe = set_steps(base, options.pretraining_steps, len(some.splits["train"]))
    return TrainingRun(
        recipe=recipe,
        dataset=some,
        device=resolve_device(options.device),
        workers=options.workers,
        allow_empty_classes=True,
    )


def build_finetuning_run(job: Job, dataset: Dataset, options: argparse.Namespace) -> TrainingRun:
    """What an arm learns of the second half."""
    assert job.share is not None
    some, base = select_downstream(dataset, job.share, job.seed), recipes.get_recipe(options.recipe)
    rate = job.rate or choose_rate(job, read_results(options.work), options.rates)
    base = dataclasses.replace(base, optimizer=dataclasses.replace(base.optimizer, lr=rate))
    recipe, start = set_steps(base, options.steps, len(some.splits["train"])), None
    if job.start is not None:
        recipe = dataclasses.replace(recipe, model=None, settings={}, image_size=None, mimetic=False)
        start = adapt_to_dataset(load(options.work / "runs" / job.start / "weights" / "best.safetensors"), some, recipe)
    return TrainingRun(
        recipe=recipe,
        dataset=some,
        initial_model=start,
        seed=job.seed,
        device=resolve_device(options.device),
        workers=options.workers,
        eval_split="test",
        allow_empty_classes=True,
    )


def run_job(job: Job, dataset: Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """The result of a run; of fine-tuning, only that is kept."""
    run = (build_pretraining_run if job.share is None else build_finetuning_run)(job, dataset, options)
    folder = options.work / "runs" / job.name
    facts = {
        "job": job.name,
        **dataclasses.asdict(job),
        "steps": run.plan.total_steps,
        "images": len(run.train_split),
    }
    try:
        result = Trainer(run, folder, after_evaluation=lambda now: print_progress(job, str(now)), resume=True).run()
    except DivergedError as error:
        return facts | {"val": 0.0, "test": 0.0, "diverged": str(error)}
    assert result is not None
    facts |= {"seconds": result.seconds, "device": str(run.device)}
    if isinstance(result, RunResult):
        facts |= {"val": read_best_accuracy(folder), "test": result.counts.top1, "tested": result.counts.images}
    shutil.rmtree(folder / "checkpoints")
    if job.share is not None:
        shutil.rmtree(folder)
    return facts


def choose_rate(job: Job, finished: dict[str, dict[str, Any]], rates: list[float]) -> float:
    """The rate that did best on the images to choose by, with the first seed."""
    return max(rates, key=lambda rate: finished[dataclasses.replace(job, rate=rate, seed=0).name]["val"])


def read_best_accuracy(folder: Path) -> float:
    """The best accuracy on the images to choose by."""
    with (folder / "results.csv").open(newline="") as file:
        return max(float(row["metrics/accuracy_top1"]) for row in csv.DictReader(file))


def print_progress(job: Job, sentence: str) -> None:
    """A line of progress."""
    print(f"{job.name}: {sentence}", file=sys.stderr, flush=True)


# --- many processes --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Whether nobody else has it; then nobody else gets it while the block lasts."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def read_results(work: Path) -> dict[str, dict[str, Any]]:
    """The finished runs by name."""
    path = work / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["job"]: record for record in map(json.loads, lines)}


def append_result(work: Path, record: dict[str, Any]) -> None:
    """One more finished run."""
    with (work / "results.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(record) + "\n")


def run_jobs(dataset: Dataset, options: argparse.Namespace) -> None:
    """Take one run after the other until all are done."""
    all_jobs = list_jobs(options)
    while left := [job for job in all_jobs if job.name not in read_results(options.work)]:
        for job in left:
            if job.list_needed_jobs(options.rates) - read_results(options.work).keys():
                continue
            with try_lock(options.work / "locks" / job.name) as mine:
                if mine and job.name not in read_results(options.work):
                    append_result(options.work, run_job(job, dataset, options))
                    break
        else:
            time.sleep(_PATIENCE)  # all that is left is being worked on, or waits for it


def print_table(options: argparse.Namespace) -> None:
    """Print the accuracy of each arm and share, at the rate that did best with the first seed."""
    finished = read_results(options.work)
    print(f"{'':18}" + "".join(f"{share:>28.0%}" for share in options.shares))
    for arm in options.arms:
        cells = []
        for share in options.shares:
            job = Job(arm, share, seed=1)
            if job.list_needed_jobs(options.rates) - finished.keys():
                cells.append("")
                continue
            best = choose_rate(job, finished, options.rates)
            names = [Job(arm, share, best).name, *(Job(arm, share, seed=seed).name for seed in range(1, options.seeds))]
            accuracies = [100 * finished[name]["test"] for name in names if name in finished]
            spread = f" ± {statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
            cells.append(f"{statistics.mean(accuracies):.2f}{spread} (n={len(accuracies)}, {best:g})")
        print(f"{arm:18}" + "".join(f"{cell:>28}" for cell in cells))


def parse_options() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--pretraining-steps", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 2e-3])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.1, 1.0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=4)
    return parser.parse_args()


def check_study(options: argparse.Namespace) -> None:
    """See to it that a folder holds runs of one study alone."""
    (options.work / "locks").mkdir(parents=True, exist_ok=True)
    study = {name: getattr(options, name) for name in ("data", "recipe", "pretraining_steps", "steps")}
    path = options.work / "study.json"
    with try_lock(options.work / "locks" / "study"):
        if not path.exists():
            path.write_text(json.dumps(study) + "\n")
    if json.loads(path.read_text()) != study:
        raise SystemExit(f"{options.work} holds another study, of {path.read_text().strip()}; choose another --work")


def main() -> int:
    """Work for as long as is allowed, and print the table."""
    options = parse_options()
    check_study(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(StoppedError.exit_code))  # a run has a handler of its own
    if options.minutes is not None:
        end = threading.Timer(60 * options.minutes, os.kill, (os.getpid(), signal.SIGTERM))
        end.daemon = True
        end.start()
    try:
        run_jobs(open_dataset(options.data), options)
    except StoppedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        print_table(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
