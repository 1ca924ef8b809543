"""The batches that a run reads: of training, of evaluation, and what happens to images that cannot be read."""

import contextlib
import dataclasses
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import torch

from vitrail.data import loader
from vitrail.data.dataset import MAX_BAD_FRACTION
from vitrail.data.loader import Batch, BatchPlan
from vitrail.errors import DataError
from vitrail.formatting import pluralize
from vitrail.runtime import distributed
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.train.step import TrainableModel, select_inputs
from vitrail.train.training_run import TrainingRun

UNREADABLE_FILE = "unreadable.txt"
"""The images that a run could not read and left out, one a line."""
_EVAL_BATCH_SIZE = 256


def iterate_train_batches(
    run: TrainingRun, start: int = 0, plan: BatchPlan | None = None
) -> Generator[Batch, None, None]:
    """The run's micro-batches: from images resident on the GPU where they are small, else from worker processes."""
    training, plan = run.training_data, plan or run.plan
    if run.device.type == "cuda":
        resident_images = loader.load_resident_images(
            training.split,
            channels=len(run.preprocess.mean),
            num_classes=training.num_classes,
            device=run.device,
            workers=run.workers,
            skip_bad=training.skip_bad,
        )
        if resident_images is not None:
            return loader.iter_resident_train_batches(training, plan, *resident_images, start_step=start)
    return loader.iter_train_batches(training, plan, start_step=start, workers=run.workers)


def iterate_split_batches(run: TrainingRun, split: str, group: ProcessGroup = SINGLE_PROCESS) -> Iterator[Batch]:
    """The images of a split, or a rank's share of them; for a masked run with their masks."""
    if run.recipe.masked is not None:
        return loader.iter_masked_eval_batches(
            run.dataset.splits[split],
            run.preprocess,
            run.recipe.masked,
            run.num_patches,
            batch_size=_EVAL_BATCH_SIZE,
            rank=group.rank,
            world_size=group.world_size,
            workers=run.workers,
            skip_bad=run.dataset.skip_bad,
        )
    return loader.iter_eval_batches(
        run.dataset.splits[split],
        run.preprocess,
        batch_size=_EVAL_BATCH_SIZE,
        num_classes=len(run.dataset.classes),
        rank=group.rank,
        world_size=group.world_size,
        workers=run.workers,
        skip_bad=run.dataset.skip_bad,
    )


def pad_to_slowest_rank(model: TrainableModel, batches: Iterator[Batch], run: TrainingRun) -> Iterator[Batch]:
    """The batches, then blank forward passes for as long as another rank has batches left.

    Every forward pass of a sharded model needs all ranks, and their numbers of batches may differ.
    """
    for batch in batches:
        if len(batch.targets):  # an empty batch is not computed
            distributed.all_reduce_max(1, run.device)
            yield batch
    pixels = torch.zeros(1, len(run.preprocess.mean), *run.preprocess.size, device=run.device)
    masking = torch.zeros(1, 2, run.num_patches, dtype=torch.int64, device=run.device)
    while distributed.all_reduce_max(0, run.device):
        model(*select_inputs(model, pixels, masking))


@dataclasses.dataclass
class UnreadableImages:
    """The images that a run left out because they cannot be read, listed in its folder."""

    folder: Path
    total_images: int
    names: dict[str, None] = dataclasses.field(default_factory=dict)
    """In the order in which they were met."""

    def load(self) -> None:
        """Read the images that were left out before an interruption."""
        path = self.folder / UNREADABLE_FILE
        self.names = dict.fromkeys(path.read_text("utf-8").splitlines() if path.is_file() else ())

    def watch(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        """The batches; list the images left out of them, and raise a DataError when they are too many."""
        with contextlib.closing(batches) if isinstance(batches, Generator) else contextlib.nullcontext():
            for batch in batches:
                if batch.skipped_images:
                    self._add(batch.skipped_images)
                yield batch

    def _add(self, names: Iterable[str]) -> None:
        lines = (repr(name)[1:-1] if "\n" in name else name for name in names)
        new_names = [line for line in dict.fromkeys(lines) if line not in self.names]
        self.names |= dict.fromkeys(new_names)
        if new_names and self.folder.is_dir():  # on another machine than rank 0's it may not exist
            with (self.folder / UNREADABLE_FILE).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(f"{line}\n" for line in new_names)
        if len(self.names) > MAX_BAD_FRACTION * self.total_images:
            raise DataError(
                f"{pluralize(len(self.names), 'image')} of {self.total_images:,} cannot be read, such as"
                f" {next(iter(self.names))}: more than {MAX_BAD_FRACTION:.0%} are too many"
            )
