"""Images to batches of model inputs, which are loaded while the model computes the batches before.

A CPU's threads load one batch ahead: they share the cores with the model. A GPU is fed by processes, since Python lets
one thread at a time work between the decoders' calls; but few images are loaded by threads there too, sooner than
processes start.

    B images of a batch   C channels   S image side
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrail.config import PreprocessConfig
from vitrail.data.decode import decode
from vitrail.data.image_paths import ImageRef
from vitrail.data.loader_workers import iterate_loader
from vitrail.data.transforms import make_eval_input
from vitrail.errors import DataError
from vitrail.inference.prediction_rows import PredictionItem
from vitrail.runtime import workers

_THREADED_BATCHES = 2  # before processes start
_PART_IMAGES = 64  # that a process loads at a time: many processes share a batch, so the first one is soon complete
_PREFETCHED_PARTS = 2  # of each process; 64 inputs of 224 pixels are 10 MB


class LoadedBatch(NamedTuple):
    """Images and their model inputs."""

    items: Sequence[PredictionItem]
    parts: tuple[Tensor, ...]
    """uint8 (b, C, S, S) each, one after the other: the images that can be read, in order."""
    errors: dict[int, str]
    """Index of each image that cannot be read, and why."""

    @property
    def readable_items(self) -> list[PredictionItem]:
        """The items that have inputs."""
        return [item for index, item in enumerate(self.items) if index not in self.errors]


class InputLoader(NamedTuple):
    """How an image becomes a model input."""

    preprocess: PreprocessConfig
    channels: int

    def load(self, image: ImageRef) -> Tensor | DataError:
        """uint8 (C, S, S), or why the image cannot be read."""
        try:
            return make_eval_input(decode(image.read(), self.channels, name=image.name), self.preprocess)
        except DataError as error:
            return error

    def stack(self, inputs: Sequence[Tensor | DataError]) -> tuple[Tensor, dict[int, str]]:
        """uint8 (b, C, S, S) of the images that can be read, and the errors of the others by their index."""
        readable = [each.numpy() for each in inputs if not isinstance(each, DataError)]
        errors = {index: str(each) for index, each in enumerate(inputs) if isinstance(each, DataError)}
        shape = (0, self.channels, *self.preprocess.size)
        # NumPy's copy: torch would wait for its threads to wake.
        return torch.from_numpy(np.stack(readable) if readable else np.empty(shape, np.uint8)), errors


def iterate_input_batches(
    loader: InputLoader,
    batches: Iterable[Sequence[PredictionItem]],
    *,
    batch_size: int,
    threads: int,
    processes: int = 0,
    total: int = 0,
) -> Generator[LoadedBatch, None, None]:
    """Yield batches of at most `batch_size` with their inputs, in order: loaded by `processes`, or if 0 by threads.

    Threads load the first batches too unless `total`, the number of images where it is known, is worth processes. How
    many batches are taken ahead depends on these numbers alone, so ranks may communicate to make them.
    """
    batches = iter(batches)
    threaded_batches = 0 if total > _THREADED_BATCHES * batch_size else _THREADED_BATCHES
    first = itertools.islice(batches, threaded_batches) if processes else batches
    yield from _load_in_threads(loader, first, threads)
    following = next(batches, None)
    if following is not None:
        yield from _load_in_processes(loader, itertools.chain([following], batches), batch_size, processes)


def _load_in_threads(
    loader: InputLoader, batches: Iterable[Sequence[PredictionItem]], threads: int
) -> Iterator[LoadedBatch]:
    for batch in workers.prefetch_batches(lambda item: loader.load(item.image), batches, threads):
        pixels, errors = loader.stack([inputs for _, inputs in batch])
        yield LoadedBatch([item for item, _ in batch], (pixels,), errors)


class _InputParts(Dataset[Any]):
    """Parts of batches, as a dataset for torch's DataLoader."""

    def __init__(self, loader: InputLoader) -> None:
        self.loader = loader

    def __getitems__(self, images: list[ImageRef]) -> tuple[Tensor, dict[int, str]]:
        return self.loader.stack([self.loader.load(image) for image in images])


def _load_in_processes(
    loader: InputLoader, batches: Iterable[Sequence[PredictionItem]], batch_size: int, processes: int
) -> Generator[LoadedBatch, None, None]:
    pending: deque[Sequence[PredictionItem]] = deque()  # batches that are being loaded
    starts = range(0, batch_size, _PART_IMAGES)  # of a batch's parts; those of a short one may be empty

    def iterate_parts() -> Iterator[list[ImageRef]]:
        for batch in batches:
            pending.append(batch)
            yield from ([item.image for item in batch[start : start + _PART_IMAGES]] for start in starts)

    data_loader = DataLoader(
        _InputParts(loader),
        batch_sampler=iterate_parts(),  # torch iterates it once
        num_workers=processes,
        collate_fn=_keep_part,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=_PREFETCHED_PARTS,
    )
    with contextlib.closing(iterate_loader(data_loader)) as parts:
        for part in parts:
            batch = pending.popleft()
            loaded = [part, *itertools.islice(parts, len(starts) - 1)]
            errors = {
                number * _PART_IMAGES + index: error
                for number, (_, part_errors) in enumerate(loaded)
                for index, error in part_errors.items()
            }
            yield LoadedBatch(batch, tuple(pixels for pixels, _ in loaded), errors)


def _keep_part(part: Any) -> Any:
    return part
