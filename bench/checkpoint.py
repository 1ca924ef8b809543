"""What checkpoints cost a run: the time of a step with one save every 30 seconds, against the same run without.

    python bench/checkpoint.py [--device cuda] [--model b16] [--save-every 30] [--seconds 600] [--threads 1]

One run in one process, whose periods take turns: one begins with a checkpoint, taken and given to the thread that
writes it as in any run, the next has none. A ratio is of two periods that follow each other, and the table shows
medians. Wall time is what a user waits; CPU time counts the writing thread too, and is what it would come to with no
core to spare. Below it each part of one save by itself: what stops the steps, and what goes on beside them.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitrail.config import AugmentConfig, OptimizerConfig, Recipe, ScheduleConfig
from vitrail.data.sources import open_dataset
from vitrail.training import checkpoint, loop
from vitrail.training.loop import StepEnd, iterate_train_batches
from vitrail.training.run_results import RunLog
from vitrail.training.step import build_train_state
from vitrail.training.trainer import Trainer
from vitrail.training.training_run import TrainingRun

IMAGES, CLASSES = 200, 10


class Enough(Exception):  # noqa: N818  # no error
    """Ends a run that has been measured."""


@dataclasses.dataclass
class Period:
    """Some seconds of the run."""

    saves: bool
    start: float
    cpu: float
    steps: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    blocked: float = 0.0
    """Of it, the time in which a checkpoint was taken and nothing was computed."""


class Periods:
    """What is called after each step: it begins a period where the one before has lasted long enough."""

    def __init__(self, trainer: Trainer, options: argparse.Namespace) -> None:
        self.trainer, self.length = trainer, options.save_every
        self.count = 2 * max(1, round(options.seconds / options.save_every / 2))
        self.done: list[Period] = []
        self.now: Period | None = None
        self.warm = 5
        """Steps that are not measured: memory is allocated, kernels are chosen."""

    def count_step(self, step_end: StepEnd) -> None:
        """Count a step."""
        if self.warm:
            self.warm -= 1
            return
        now = time.perf_counter()
        if self.now is not None:
            self.now.steps += 1
            if now - self.now.start < self.length:
                return
            self.trainer.checkpoint_writer.wait()  # a save that takes longer than a period costs what it takes
            self.now.seconds = time.perf_counter() - self.now.start
            self.now.cpu_seconds = time.process_time() - self.now.cpu
            self.done.append(self.now)
            if len(self.done) == self.count:
                raise Enough
        pair, second = divmod(len(self.done), 2)
        self.now = Period((pair + second) % 2 == 0, time.perf_counter(), time.process_time())  # yes no, no yes, yes no
        if self.now.saves:
            self.trainer.save_checkpoint(step_end)
            self.now.blocked = time.perf_counter() - self.now.start


def write_images(folder: Path, side: int) -> Path:
    """A folder of images of noise."""
    generator = np.random.default_rng(0)
    for number in range(IMAGES):
        path = folder / f"class{number % CLASSES}" / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(path)
    return folder


def build_run(options: argparse.Namespace, folder: Path) -> TrainingRun:
    """A run that would never end."""
    device = torch.device(options.device)
    side, batch = (224, 64) if device.type == "cuda" else (32, 16)
    recipe = Recipe(
        model=options.model or ("b16" if device.type == "cuda" else "s16"),
        image_size=side,
        batch=batch,
        epochs=10**6,
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.1, clip=1.0),
        schedule=ScheduleConfig(decay="linear"),
        augment=AugmentConfig(crop="squash", flip=False),
        source="bench/checkpoint.py",
    )
    return TrainingRun(recipe=recipe, dataset=open_dataset(str(write_images(folder, side))), device=device, workers=0)


def build_trainer(folder: Path, run: TrainingRun) -> Trainer:
    """The course of the run, which saves when it is told to."""
    (folder / "weights").mkdir(parents=True)
    trainer = Trainer(run, folder, save_every_seconds=math.inf)
    trainer.state = build_train_state(
        run.build_model(), run.recipe, run.class_counts, cuda_graph=run.can_use_cuda_graph
    )
    trainer.log, trainer.checkpoint_writer = RunLog(folder), checkpoint.CheckpointWriter(folder / "checkpoints")
    return trainer


def time_parts(trainer: Trainer, folder: Path) -> dict[str, float]:
    """Seconds of each part of a save by itself, the median of three."""
    state = trainer.state

    def time_work(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    snapshot, steps = checkpoint.copy_state(state, {}), itertools.count(10**7)
    return {
        "stops the steps: digest of the weights": time_work(
            lambda: checkpoint.digest_weights(snapshot.tensors["model"])
        ),
        "stops the steps: copy of the state": time_work(lambda: trainer.checkpoint_writer.capture(state)),
        "beside the steps: write, hash, sync": time_work(
            lambda: checkpoint.write_checkpoint(folder, dataclasses.replace(snapshot, step=next(steps)))
        ),
    }


def print_table(
    run: TrainingRun, trainer: Trainer, periods: list[Period], split: dict[str, float], length: float
) -> None:
    """Print the table."""
    name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "CPU"
    million = sum(parameter.numel() for parameter in trainer.state.model.parameters()) / 1e6
    size = checkpoint.copy_state(trainer.state, {}).num_bytes
    print(
        f"{run.recipe.model}, {million:.0f} M parameters, batch {run.recipe.batch}, {name},"
        f" {torch.get_num_threads()} threads, torch {torch.__version__}; a checkpoint of {size / 1e6:,.0f} MB every"
        f" {length:g} s, {len(periods) // 2} pairs of periods"
    )
    pairs = [sorted(pair, key=lambda period: period.saves) for pair in zip(periods[::2], periods[1::2], strict=True)]
    for clock in ("seconds", "cpu_seconds"):
        ratios = [getattr(two, clock) / two.steps / (getattr(one, clock) / one.steps) - 1 for one, two in pairs]
        low, middle, high = statistics.quantiles(ratios) if len(ratios) > 1 else ratios * 3
        what = "wall time" if clock == "seconds" else "CPU time "
        print(f"{what} of a step with saves over without: {middle:+.2%} (half of the pairs {low:+.2%} to {high:+.2%})")
    blocked = [period.blocked for period in periods if period.saves]
    stopped, beside = statistics.median(blocked), list(split.values())[-1]
    print(
        f"steps stopped for {stopped:.3f} s a save: {stopped / length:.2%} with a core to spare for the writing,"
        f" {(stopped + beside) / length:.2%} with none"
    )
    for part, seconds in split.items():
        print(f"{part:40} {seconds:7.3f} s")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="a preset: s16 on the CPU, b16 on a GPU")
    parser.add_argument("--save-every", type=float, default=30.0, help="seconds; the length of a period")
    parser.add_argument("--seconds", type=float, default=600.0, help="in all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to save: the disk that is measured")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = build_run(options, Path(folder) / "images")
        trainer = build_trainer(Path(folder) / "run", run)
        periods = Periods(trainer, options)
        with contextlib.closing(trainer.checkpoint_writer), contextlib.suppress(Enough):
            batches = iterate_train_batches(run)
            loop.train_steps(
                trainer.state, batches, run.training_data, run.plan, run.recipe, after_step=periods.count_step
            )
        print_table(run, trainer, periods.done, time_parts(trainer, Path(folder) / "parts"), options.save_every)


if __name__ == "__main__":
    main()
