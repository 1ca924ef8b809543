"""Batches, on time: read, decoded and augmented by worker processes, in an order that none of them decides.

    step s of training holds the positions  s * batch ... s * batch + batch - 1
    a rank computes a consecutive share of them, in consecutive micro-batches

Order, augmentation, mixing and masking are functions of the position (`order`, `augment`, `mixing`, `masking`), so
workers, ranks, micro-batches and the step at which a run goes on change no sample. torch's DataLoader moves them.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrail.config import Augment, Masked, Preprocess
from vitrail.data import batched, masking, mixing
from vitrail.data.augment import training_views
from vitrail.data.dataset import Split
from vitrail.data.decode import decode, opened
from vitrail.data.draws import Draws
from vitrail.data.loader_workers import iterate_loader
from vitrail.data.order import Order
from vitrail.data.transforms import evaluation_view, normalise
from vitrail.errors import DataError, UsageError, VitrailError
from vitrail.remote import RemoteError

Integers = NDArray[np.int64]
_TRIES = 100
_SMALL = 128 * 128  # pixels; larger ones are mostly photos, of all sizes
_RESIDENT_BYTES = 4 * 2**30
_CHUNK = 512
_VIEW_BYTES = 2**26  # of views that are made together


class Batch(NamedTuple):
    """Images of consecutive positions (training) or indices (evaluation)."""

    pixels: Tensor
    """uint8 (B, C, S, S); where images need their neighbour, one more: the partner of the last."""
    targets: Tensor
    """Classes (B,), or shares (B, L) where an image may have several; -1 where it has none. Of masked training what is
    hidden, (B, 2, N): `masking.drawn`."""
    positions: Tensor  # (B,)
    left_out: tuple[str, ...] = ()
    """Images that could not be read and were replaced by their neighbours, if that was asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Which positions are computed when, and by whom."""

    batch: int
    """Images in a step, over all ranks."""
    total: int
    """Positions in all; the last step may be short."""
    rank: int = 0
    world: int = 1
    micro_batches: int = 1
    """Parts in which a rank computes its share of a step."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.total < 0 or not 0 <= self.rank < self.world or self.micro_batches < 1:
            raise UsageError(f"{self} cannot be: a batch has an image at least, a rank lies below the world size")

    @property
    def steps(self) -> int:
        """Steps in all."""
        return -(-self.total // self.batch)

    def size(self, step: int) -> int:
        """Images in a step, over all ranks."""
        return min(self.batch, self.total - step * self.batch)

    def parts(self, step: int) -> list[range]:
        """The positions of each of this rank's micro-batches; a part of a short step may be empty."""
        first, size, count = step * self.batch, self.size(step), self.world * self.micro_batches
        cuts = [first + size * part // count for part in range(count + 1)]
        mine = range(self.rank * self.micro_batches, (self.rank + 1) * self.micro_batches)
        return [range(cuts[part], cuts[part + 1]) for part in mine]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What training sees, whoever computes it."""

    split: Split
    order: Order
    augment: Augment
    preprocess: Preprocess
    seed: int
    classes: int
    masked: Masked | None = None
    """What is hidden of an image and to be told, in place of its classes."""
    patches: int = 0
    """Of an image, where some are hidden."""
    skip_bad: bool = False
    """Show an image's neighbour where it cannot be read, rather than stop."""

    @property
    def mixes(self) -> bool:
        """Whether images are mixed."""
        return bool(self.augment.mixup or self.augment.cutmix)

    @property
    def partnered(self) -> bool:
        """Whether a part needs the partner of its last image too: to mix it in, or to take patches of."""
        return self.mixes or _takes_patches(self.masked)

    def positions(self, plan: Plan, step: int, part: range) -> Integers:
        """The positions to load for a micro-batch."""
        if self.partnered and part:
            first = step * plan.batch
            return mixing.partnered(first, plan.size(step), part.start, len(part))
        return np.arange(part.start, part.stop)


def training_batches(
    training: Training, plan: Plan, *, start: int = 0, workers: int = 0
) -> Generator[Batch, None, None]:
    """This rank's micro-batches from step `start` on, in order."""
    line = (
        training.positions(plan, step, part).tolist() for step in range(start, plan.steps) for part in plan.parts(step)
    )
    return _loaded(partial(_training_batch, training), line, workers)


def evaluation_batches(
    split: Split,
    preprocess: Preprocess,
    *,
    batch: int,
    classes: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    skip_bad: bool = False,
) -> Iterator[Batch]:
    """Each image of this rank's share once, in order; the last batch may be short."""
    first, last = len(split) * rank // world, len(split) * (rank + 1) // world
    line = (list(range(start, min(start + batch, last))) for start in range(first, last, batch))
    return _loaded(partial(_evaluation_batch, split, preprocess, classes, skip_bad), line, workers)


def masked_batches(
    split: Split,
    preprocess: Preprocess,
    masked: Masked,
    patches: int,
    *,
    batch: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    skip_bad: bool = False,
) -> Iterator[Batch]:
    """The same with what is hidden of each image, always the same patches, and with the partner of each batch's last.

    An image's partner is the next of the split, so batches and ranks change nothing. With `skip_bad` the next image
    that can be read stands for one that cannot.
    """
    first, last = len(split) * rank // world, len(split) * (rank + 1) // world
    partner = 1 if _takes_patches(masked) else 0
    ends = ((start, min(start + batch, last)) for start in range(first, last, batch))
    line = ([index % len(split) for index in range(start, end + partner)] for start, end in ends)
    return _loaded(partial(_masked_batch, split, preprocess, masked, patches, skip_bad), line, workers)


def _takes_patches(masked: Masked | None) -> bool:
    """Whether hidden patches may be replaced by those of the next image."""
    return masked is not None and masked.kind == "mpp"


def prepared(batch: Batch, training: Training, plan: Plan, step: int) -> tuple[Tensor, Tensor]:
    """Normalised images and targets of a training batch, mixed if training mixes, on the device of its pixels.

    Where patches of a partner may be taken, there is one image more than targets.
    """
    images = normalise(batch.pixels, training.preprocess)
    if training.masked is not None:
        return images, batch.targets[: len(images) - 1] if training.partnered else batch.targets
    if not training.mixes:
        return images, batch.targets
    if not len(images):
        return images, images.new_zeros((0, training.classes))
    mix = mixing.drawn_mix(training.seed, step * plan.batch, training.augment, training.preprocess.size)
    assert mix is not None, "one of mixup and cutmix is set"
    return mixing.mixed(images, batch.targets, mix, training.classes)


# --- sets that live on the device ------------------------------------------------------------------------------------


def resident(
    split: Split, *, channels: int, classes: int, device: torch.device | str, workers: int = 0, skip_bad: bool = False
) -> tuple[Tensor, Tensor] | None:
    """All images of a split, uint8 (n, C, H, W), and their targets, on the device; None if that is not for them.

    It is for images that are small, all of one size, and no more than a few gigabytes together; with `skip_bad` all
    must be readable too.
    """
    with contextlib.suppress(*([DataError] if skip_bad else [])):
        return _resident(split, channels, classes, device, workers)
    return None


def _resident(
    split: Split, channels: int, classes: int, device: torch.device | str, workers: int
) -> tuple[Tensor, Tensor] | None:
    shape = _decoded(split, 0, channels).shape
    if shape[1] * shape[2] > _SMALL or len(split) * shape.numel() > _RESIDENT_BYTES:
        return None
    pixels = torch.empty((len(split), *shape), dtype=torch.uint8)
    line = (list(range(start, min(start + _CHUNK, len(split)))) for start in range(0, len(split), _CHUNK))
    for batch in _loaded(partial(_whole_images, split, shape, classes), line, workers):
        if not len(batch.pixels):
            return None
        pixels[batch.positions] = batch.pixels
    return pixels.to(device), _targets(split, np.arange(len(split)), classes).to(device)


def resident_batches(
    training: Training, plan: Plan, pixels: Tensor, targets: Tensor, *, start: int = 0
) -> Generator[Batch, None, None]:
    """`training_batches` of images that live on a device, augmented there, those of several batches at once.

    What an operation costs the host does not depend on how many images it is for, and small batches do not fill a GPU.
    """
    size = training.preprocess.size
    together = max(1, _VIEW_BYTES // (pixels.shape[1] * size[0] * size[1] * plan.batch)) * plan.micro_batches
    parts = (training.positions(plan, step, part) for step in range(start, plan.steps) for part in plan.parts(step))
    while some := list(itertools.islice(parts, together)):
        positions = np.concatenate(some)
        rows = torch.from_numpy(training.order.samples(positions)).to(pixels.device, non_blocking=True)
        draws = Draws(training.seed, positions)
        views = batched.training_views(pixels[rows], draws, training.augment, training.preprocess)
        cuts = [len(part) for part in some]
        told = targets[rows] if training.masked is None else _hidden(training, positions).to(pixels.device)
        columns = (views.split(cuts), told.split(cuts), torch.from_numpy(positions).split(cuts))
        yield from map(Batch, *columns)


def _whole_images(split: Split, shape: torch.Size, classes: int, indices: Integers) -> Batch:
    """The images as they are, or none where one has another shape."""
    found = zip(indices.tolist(), split.read_all(indices.tolist()), strict=True)
    images = [decode(source, shape[0], name=split.name(index)) for index, source in found]
    alike = all(image.shape == shape for image in images)
    pixels = torch.stack(images) if alike else torch.empty((0, *shape), dtype=torch.uint8)
    return Batch(pixels, _targets(split, indices, classes), torch.from_numpy(indices))


# --- what a worker does ----------------------------------------------------------------------------------------------


class _Samples(Dataset[Any]):
    """A function from a list of positions to a batch, in the form torch's DataLoader takes."""

    def __init__(self, function: partial[Batch]) -> None:
        self.function = function

    def __getitems__(self, positions: list[int]) -> "Batch | _Failed":
        try:
            return self.function(np.array(positions, dtype=np.int64))
        except VitrailError as error:  # DataLoader would wrap it in its own traceback
            return _Failed(error)


@dataclasses.dataclass(frozen=True)
class _Failed:
    """A worker's error on its way to the process that reports it."""

    error: VitrailError


def _loaded(function: partial[Batch], line: Iterable[list[int]], workers: int) -> Generator[Batch, None, None]:
    loader = DataLoader(
        _Samples(function),
        batch_sampler=line,
        num_workers=workers,
        collate_fn=_unchanged,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if workers else None,
    )
    with contextlib.closing(iterate_loader(loader)) as batches:
        for batch in batches:
            if isinstance(batch, _Failed):
                raise batch.error
            yield batch


def _unchanged(batch: Any) -> Any:
    return batch


def _training_batch(training: Training, positions: Integers) -> Batch:
    rows = training.order.samples(positions)
    left_out: list[str] = []
    try:
        pixels = _views(training, positions, rows)
    except DataError as error:
        if not training.skip_bad or isinstance(error, RemoteError):  # a store that does not answer is no bad image
            raise

        def look(row: int) -> None:
            _views(training, np.zeros(1, dtype=np.int64), np.array([row]))

        rows = np.array([_readable(training.split, row, look, left_out) for row in rows.tolist()], dtype=np.int64)
        pixels = _views(training, positions, rows)
    known = training.masked is None
    targets = _targets(training.split, rows, training.classes) if known else _hidden(training, positions)
    return Batch(pixels, targets, torch.from_numpy(positions), tuple(left_out))


def _hidden(training: Training, positions: Integers) -> Tensor:
    """What is hidden of the images at these positions."""
    assert training.masked is not None
    return torch.from_numpy(masking.drawn(Draws(training.seed, positions), training.masked, training.patches))


def _masked_batch(
    split: Split, preprocess: Preprocess, masked: Masked, patches: int, skip_bad: bool, indices: Integers
) -> Batch:
    left_out: list[str] = []
    try:
        views = torch.stack(_evaluation_views(split, preprocess, indices.tolist()))
    except DataError as error:
        if not skip_bad or isinstance(error, RemoteError):
            raise

        def look(row: int) -> None:
            _evaluation_views(split, preprocess, [row])

        rows = [_readable(split, row, look, left_out) for row in indices.tolist()]
        views = torch.stack(_evaluation_views(split, preprocess, rows))
    own = indices[:-1] if _takes_patches(masked) else indices
    hidden = masking.drawn(Draws(masking.EVALUATION_SEED, own), masked, patches)
    return Batch(views, torch.from_numpy(hidden), torch.from_numpy(own), tuple(left_out))


def _views(training: Training, positions: Integers, rows: Integers) -> Tensor:
    """The augmented images of these rows at these positions."""
    split, preprocess, channels = training.split, training.preprocess, len(training.preprocess.mean)
    if not len(rows):
        return torch.empty((0, channels, *preprocess.size), dtype=torch.uint8)
    found = zip(rows.tolist(), split.read_all(rows.tolist()), strict=True)
    images = {index: opened(source, name=split.name(row)) for index, (row, source) in enumerate(found)}
    sizes = np.array([(image.height, image.width) for image in images.values()], dtype=np.int64)

    def load(index: int, rows: int) -> Tensor:
        return images.pop(index).pixels(channels, rows)  # Pillow keeps what it decoded for as long as it is kept

    return training_views(load, sizes, Draws(training.seed, positions), training.augment, preprocess)


def _evaluation_batch(split: Split, preprocess: Preprocess, classes: int, skip_bad: bool, indices: Integers) -> Batch:
    left_out: list[str] = []
    views: list[Tensor] = []
    try:
        views = _evaluation_views(split, preprocess, indices.tolist())
    except DataError as error:
        if not skip_bad or isinstance(error, RemoteError):
            raise
        kept = []
        for index in indices.tolist():
            try:
                views += _evaluation_views(split, preprocess, [index])
                kept.append(index)
            except RemoteError:
                raise
            except DataError:
                left_out.append(split.name(index))
        indices = np.array(kept, dtype=np.int64)
    shape = (0, len(preprocess.mean), *preprocess.size)
    pixels = torch.stack(views) if views else torch.empty(shape, dtype=torch.uint8)
    return Batch(pixels, _targets(split, indices, classes), torch.from_numpy(indices), tuple(left_out))


def _evaluation_views(split: Split, preprocess: Preprocess, indices: list[int]) -> list[Tensor]:
    found = zip(indices, split.read_all(indices), strict=True)
    channels = len(preprocess.mean)
    return [evaluation_view(decode(source, channels, name=split.name(row)), preprocess) for row, source in found]


def _readable(split: Split, row: int, look: Callable[[int], None], left_out: list[str]) -> int:
    """The row, or the next one that can be read, which `look` tries."""
    for attempt in range(_TRIES):
        here = (row + attempt) % len(split)
        try:
            look(here)
        except RemoteError:
            raise
        except DataError:
            left_out.append(split.name(here))
        else:
            return here
    raise DataError(f"{_TRIES} images after {split.name(row)} cannot be read either: vitrail data check shows why")


def _decoded(split: Split, index: int, channels: int) -> Tensor:
    """The image, or an error that names it as the set does."""
    return decode(split.read(index), channels, name=split.name(index))


def _targets(split: Split, rows: Integers, classes: int) -> Tensor:
    """Classes (B,), or shares (B, L) where an image may have several."""
    labels = [split.labels(row) for row in rows.tolist()]
    if not split.several:
        return torch.tensor([row[0] if row else -1 for row in labels], dtype=torch.int64)
    shares = torch.zeros(len(labels), classes)
    for place, row in enumerate(labels):
        shares[place, list(row)] = 1
    return shares
