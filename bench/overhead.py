"""What a trainer costs over a bare loop: images a second of vitrail's loop and of transformers' Trainer beside it.

    python bench/overhead.py [--device cuda] [--rounds 80] [--steps 1] [--threads 1]

The bare loop is forward, cross entropy, backward, clipping, AdamW's step and zeroed gradients on tensors that are
already on the device. The trainers get the same network, weights, batch size, optimizer (fused AdamW), clipping and
precision (float32 on the CPU, bf16 autocast on CUDA), each through its own loader: once from files, which are decoded
in every step, and once from images in memory. All contenders take turns of a few steps in one process, each in a thread
that sleeps while the others work; a ratio is of two turns of one round, and the table shows medians. On the CPU with
one thread the clock is CPU time, which neighbors on the machine do not lengthen.
"""

import argparse
import dataclasses
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import allow_torchvision
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset as TorchDataset

import vitrail
from vitrail.config import AugmentConfig, OptimizerConfig, PreprocessConfig, Recipe, ScheduleConfig
from vitrail.data import loader
from vitrail.data.dataset import Split
from vitrail.data.loader import BatchPlan, TrainingData
from vitrail.data.randomness import SampleOrder
from vitrail.data.sources import open_dataset
from vitrail.data.transforms import normalize
from vitrail.model.vit import Model
from vitrail.training import loop
from vitrail.training.step import build_train_state

CLASSES, IMAGES = 10, 1280
BARE = "bare loop"
LR, DECAY, CLIP = 1e-4, 0.1, 1.0


@dataclasses.dataclass(frozen=True)
class Case:
    """What all contenders train."""

    device: torch.device
    model: str
    side: int
    batch: int
    steps: int
    """In a turn."""
    rounds: int
    threads: int
    workers: int
    split: Split
    pixels: Tensor
    targets: Tensor

    @property
    def total(self) -> int:
        """Steps in all; the first turn is not counted: memory is allocated, optimizers make their state."""
        return self.steps * (self.rounds + 1)

    @property
    def view(self) -> PreprocessConfig:
        """The images have the network's size already, so that nothing is resized."""
        return PreprocessConfig(size=(self.side, self.side), resize=(self.side, self.side))

    def build_network(self) -> Model:
        """The same weights for everybody."""
        torch.manual_seed(0)
        return vitrail.create(self.model, image_size=self.side, num_classes=CLASSES).to(self.device).train()


class Turns:
    """A contender's turns: it works for some steps, then waits in the middle of its loop while the others work."""

    def __init__(self, case: Case, way: Callable[["Turns"], None]) -> None:
        self.case, self.way = case, way
        self.now = choose_clock(case)
        self.seconds: list[float] = []
        self.failure: BaseException | None = None
        self._done, self._begun = 0, 0.0
        self._go, self._over = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._work, daemon=True).start()

    def take(self) -> None:
        """Let it work for one turn."""
        self._go.release()
        self._over.acquire()
        if self.failure is not None:
            raise self.failure

    def step(self) -> None:
        """The contender says that it made a step."""
        self._done += 1
        if self._done % self.case.steps:
            return
        if self.case.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(self.now() - self._begun)
        self._over.release()
        self._wait()

    def _work(self) -> None:
        torch.set_num_threads(self.case.threads)  # holds for the thread that says so
        try:
            self._wait()
            self.way(self)
        except BaseException as error:  # noqa: BLE001  # raised again by `take`, in the thread that waits for it
            self.failure = error
        self._over.release()

    def _wait(self) -> None:
        self._go.acquire()
        self._begun = self.now()


def choose_clock(case: Case) -> Callable[[], float]:
    """CPU time where nothing but one thread of this process computes, else wall-clock time."""
    alone = case.device.type == "cpu" and case.threads == 1 and not case.workers
    return time.process_time if alone else time.perf_counter


# --- the contenders --------------------------------------------------------------------------------------------------


def run_bare_loop(case: Case, turns: Turns) -> None:
    """Nothing but the arithmetic."""
    model = case.build_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    images, targets = normalize(case.pixels, case.view), case.targets
    for step in range(case.total):
        first = step * case.batch % (len(images) - case.batch)
        rows = slice(first, first + case.batch)
        with torch.autocast(case.device.type, torch.bfloat16, enabled=case.device.type == "cuda"):
            logits = model(images[rows])
        F.cross_entropy(logits.float(), targets[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.step()


def run_vitrail(case: Case, turns: Turns, *, in_memory: bool) -> None:
    """vitrail's loop."""
    recipe = Recipe(
        model=case.model,
        image_size=case.side,
        batch=case.batch,
        epochs=1,
        optimizer=OptimizerConfig(lr=LR, weight_decay=DECAY, clip=CLIP),
        schedule=ScheduleConfig(decay="linear"),
        augment=AugmentConfig(crop="squash", flip=False),
        source="bench/overhead.py",
    )
    training = TrainingData(
        split=case.split,
        order=SampleOrder(seed=0, num_samples=len(case.split)),
        augment=recipe.augment,
        preprocess=case.view,
        seed=0,
        num_classes=CLASSES,
    )
    plan = BatchPlan(batch_size=case.batch, total_samples=case.batch * case.total)
    state = build_train_state(case.build_network(), recipe)
    if in_memory:
        batches = loader.iter_resident_train_batches(training, plan, case.pixels, case.targets)
    else:
        batches = loader.iter_train_batches(training, plan, workers=case.workers)
    loop.train_steps(state, batches, training, plan, recipe, after_step=lambda _: turns.step())


class Images(TorchDataset[dict[str, Any]]):
    """Images as transformers' example gives them to the Trainer: normalized one by one, decoded each time or once."""

    def __init__(self, case: Case, *, in_memory: bool) -> None:
        self.case = case
        self.decoded = [self.decode(index) for index in range(len(self))] if in_memory else None

    def __len__(self) -> int:
        return len(self.case.split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = self.decode(index) if self.decoded is None else self.decoded[index]
        return {"pixel_values": normalize(pixels, self.case.view), "labels": self.case.split.get_labels(index)[0]}

    def decode(self, index: int) -> Tensor:
        """uint8 (3, S, S)."""
        source = self.case.split.read_image(index)
        assert isinstance(source, Path), "the images are files"
        return torch.from_numpy(np.array(Image.open(source).convert("RGB"))).permute(2, 0, 1)


class WithLoss(nn.Module):
    """A network that answers as the Trainer expects."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(pixel_values)
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


def run_transformers(case: Case, turns: Turns, *, in_memory: bool) -> None:
    """transformers' Trainer, without evaluating, saving and reporting."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):  # type: ignore[misc]  # mypy does not see into transformers
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.step()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=case.batch,
            max_steps=case.total,
            learning_rate=LR,
            weight_decay=DECAY,
            max_grad_norm=CLIP,
            lr_scheduler_type="linear",
            optim="adamw_torch_fused",
            bf16=case.device.type == "cuda",
            use_cpu=case.device.type == "cpu",
            dataloader_num_workers=case.workers,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        model = WithLoss(case.build_network())
        images = Images(case, in_memory=in_memory)
        trainer = Trainer(model=model, args=arguments, train_dataset=images, callbacks=[Steps()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()


# --- the table -------------------------------------------------------------------------------------------------------


def write_images(folder: Path, side: int) -> Split:
    """Images of smooth colors as PNG files, and the training split that vitrail sees in them."""
    generator = np.random.default_rng(0)
    for number in range(IMAGES):
        small = Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        path = folder / "train" / f"class{number % CLASSES}" / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        small.resize((side, side), Image.Resampling.BICUBIC).save(path)
    return open_dataset(str(folder)).splits["train"]


def build_case(options: argparse.Namespace, folder: Path) -> Case:
    """A step takes a third of a second on one core, a twentieth on a large GPU."""
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    side = 128 if cuda else 64
    split = write_images(folder, side)
    resident = loader.load_resident_images(split, channels=3, num_classes=CLASSES, device=device)
    assert resident is not None, "the images are small and of one size"
    return Case(
        device=device,
        model="b16" if cuda else "ti16",
        side=side,
        batch=512 if cuda else 32,
        steps=options.steps or (30 if cuda else 1),  # on a GPU loaders work ahead, also in others' turns: by few steps
        rounds=options.rounds or (15 if cuda else 80),
        threads=options.threads,
        workers=options.workers,
        split=split,
        pixels=resident[0],
        targets=resident[1],
    )


def measure_case(case: Case) -> dict[str, list[float]]:
    """Seconds of every turn, by contender."""
    ways: dict[str, Callable[[Turns], None]] = {
        BARE: lambda turns: run_bare_loop(case, turns),
        "vitrail, from files": lambda turns: run_vitrail(case, turns, in_memory=False),
        "vitrail, in memory": lambda turns: run_vitrail(case, turns, in_memory=True),
        "Trainer, from files": lambda turns: run_transformers(case, turns, in_memory=False),
        "Trainer, in memory": lambda turns: run_transformers(case, turns, in_memory=True),
    }
    contenders = {name: Turns(case, way) for name, way in ways.items()}
    order = list(contenders.values())
    for _ in range(case.rounds + 1):
        for turns in order:
            turns.take()
        order = order[1:] + order[:1]  # nobody always follows the same one
    return {name: turns.seconds[1:] for name, turns in contenders.items()}


def print_table(case: Case, seconds: dict[str, list[float]]) -> None:
    """Print the table."""
    import transformers

    def compute_ratios(name: str, base: str) -> list[float]:
        """Quartiles of the ratio of both times."""
        return statistics.quantiles(a / b for a, b in zip(seconds[name], seconds[base], strict=True))

    name = torch.cuda.get_device_name(case.device) if case.device.type == "cuda" else "CPU"
    print(
        f"{case.model} at {case.side} pixels, batch {case.batch}, {name}, {case.threads} threads,"
        f" {case.workers} workers, torch {torch.__version__}, transformers {transformers.__version__}\n"
        f"medians of {case.rounds} rounds of {case.steps} steps, {choose_clock(case).__name__}"
    )
    for contender, values in seconds.items():
        low, middle, high = (ratio - 1 for ratio in compute_ratios(contender, BARE))
        trainer = contender.replace("vitrail", "Trainer")
        beside = f"  {compute_ratios(trainer, contender)[1]:.3f}x as fast as Trainer" if trainer != contender else ""
        print(
            f"{contender:20} {case.batch * case.steps / statistics.median(values):8.1f} images/s"
            f"  time over the bare loop {middle:+.1%} (half of the rounds {low:+.1%} to {high:+.1%}){beside}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, help="80 on the CPU, 15 on a GPU")
    parser.add_argument("--steps", type=int, help="of a contender in a round: 1 on the CPU, 30 on a GPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="processes that decode, for both trainers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    allow_torchvision()
    with tempfile.TemporaryDirectory() as folder:
        case = build_case(options, Path(folder))
        print_table(case, measure_case(case))


if __name__ == "__main__":
    main()
