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

from vitrail.config import AugmentConfig, MaskedConfig, PreprocessConfig
from vitrail.data import gpu_augment, masking, mixing
from vitrail.data.augment import make_train_inputs
from vitrail.data.counter_rng import CounterRNG
from vitrail.data.dataset import Split
from vitrail.data.decode import decode, open_image
from vitrail.data.loader_workers import iterate_loader
from vitrail.data.order import SampleOrder
from vitrail.data.transforms import make_eval_input, normalize
from vitrail.errors import DataError, UsageError, VitrailError
from vitrail.remote import RemoteError

IntArray = NDArray[np.int64]
_MAX_SKIPPED_IMAGES = 100
_MAX_RESIDENT_PIXELS = 128 * 128  # pixels; larger ones are mostly photos, of all sizes
_MAX_RESIDENT_BYTES = 4 * 2**30
_CHUNK_IMAGES = 512
_AUGMENT_CHUNK_BYTES = 2**26  # of views that are made together


class Batch(NamedTuple):
    """Images of consecutive positions (training) or indices (evaluation)."""

    pixels: Tensor
    """uint8 (B, C, S, S); where images need their neighbour, one more: the partner of the last."""
    targets: Tensor
    """Classes (B,), or shares (B, L) where an image may have several; -1 where it has none. Of masked training what is
    hidden, (B, 2, N): `masking.drawn`."""
    positions: Tensor  # (B,)
    skipped_images: tuple[str, ...] = ()
    """Images that could not be read and were replaced by their neighbours, if that was asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Which positions are computed when, and by whom."""

    batch_size: int
    """Images in a step, over all ranks."""
    total_positions: int
    """Positions in all; the last step may be short."""
    rank: int = 0
    world_size: int = 1
    micro_batches: int = 1
    """Parts in which a rank computes its share of a step."""

    def __post_init__(self) -> None:
        if (
            self.batch_size < 1
            or self.total_positions < 0
            or not 0 <= self.rank < self.world_size
            or self.micro_batches < 1
        ):
            raise UsageError(f"{self} cannot be: a batch has an image at least, a rank lies below the world size")

    @property
    def total_steps(self) -> int:
        """Steps in all."""
        return -(-self.total_positions // self.batch_size)

    def get_step_size(self, step: int) -> int:
        """Images in a step, over all ranks."""
        return min(self.batch_size, self.total_positions - step * self.batch_size)

    def list_micro_batches(self, step: int) -> list[range]:
        """The positions of each of this rank's micro-batches; a part of a short step may be empty."""
        first, size, count = step * self.batch_size, self.get_step_size(step), self.world_size * self.micro_batches
        cuts = [first + size * part // count for part in range(count + 1)]
        mine = range(self.rank * self.micro_batches, (self.rank + 1) * self.micro_batches)
        return [range(cuts[part], cuts[part + 1]) for part in mine]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What training sees, whoever computes it."""

    split: Split
    order: SampleOrder
    augment: AugmentConfig
    preprocess: PreprocessConfig
    seed: int
    num_classes: int
    masked: MaskedConfig | None = None
    """What is hidden of an image and to be told, in place of its classes."""
    num_patches: int = 0
    """Of an image, where some are hidden."""
    skip_bad: bool = False
    """Show an image's neighbour where it cannot be read, rather than stop."""

    @property
    def has_mixing(self) -> bool:
        """Whether images are mixed."""
        return bool(self.augment.mixup or self.augment.cutmix)

    @property
    def has_partner(self) -> bool:
        """Whether a part needs the partner of its last image too: to mix it in, or to take patches of."""
        return self.has_mixing or _has_patch_replacement(self.masked)

    def get_positions(self, plan: BatchPlan, step: int, part: range) -> IntArray:
        """The positions to load for a micro-batch."""
        if self.has_partner and part:
            first = step * plan.batch_size
            return mixing.list_positions_with_partner(first, plan.get_step_size(step), part.start, len(part))
        return np.arange(part.start, part.stop)


def iter_train_batches(
    training_data: TrainingData, plan: BatchPlan, *, start_step: int = 0, workers: int = 0
) -> Generator[Batch, None, None]:
    """This rank's micro-batches from step `start` on, in order."""
    line = (
        training_data.get_positions(plan, step, part).tolist()
        for step in range(start_step, plan.total_steps)
        for part in plan.list_micro_batches(step)
    )
    return _iter_loader_batches(partial(_load_train_batch, training_data), line, workers)


def iter_eval_batches(
    split: Split,
    preprocess: PreprocessConfig,
    *,
    batch_size: int,
    num_classes: int,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    skip_bad: bool = False,
) -> Iterator[Batch]:
    """Each image of this rank's share once, in order; the last batch may be short."""
    first, last = len(split) * rank // world_size, len(split) * (rank + 1) // world_size
    line = (list(range(start, min(start + batch_size, last))) for start in range(first, last, batch_size))
    return _iter_loader_batches(partial(_load_eval_batch, split, preprocess, num_classes, skip_bad), line, workers)


def iter_masked_eval_batches(
    split: Split,
    preprocess: PreprocessConfig,
    masked: MaskedConfig,
    num_patches: int,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    skip_bad: bool = False,
) -> Iterator[Batch]:
    """The same with what is hidden of each image, always the same patches, and with the partner of each batch's last.

    An image's partner is the next of the split, so batches and ranks change nothing. With `skip_bad` the next image
    that can be read stands for one that cannot.
    """
    first, last = len(split) * rank // world_size, len(split) * (rank + 1) // world_size
    partner = 1 if _has_patch_replacement(masked) else 0
    ends = ((start, min(start + batch_size, last)) for start in range(first, last, batch_size))
    line = ([index % len(split) for index in range(start, end + partner)] for start, end in ends)
    return _iter_loader_batches(
        partial(_load_masked_batch, split, preprocess, masked, num_patches, skip_bad), line, workers
    )


def _has_patch_replacement(masked: MaskedConfig | None) -> bool:
    """Whether hidden patches may be replaced by those of the next image."""
    return masked is not None and masked.kind == "mpp"


def prepare_train_batch(batch: Batch, training_data: TrainingData, plan: BatchPlan, step: int) -> tuple[Tensor, Tensor]:
    """Normalised images and targets of a training batch, mixed if training mixes, on the device of its pixels.

    Where patches of a partner may be taken, there is one image more than targets.
    """
    images = normalize(batch.pixels, training_data.preprocess)
    if training_data.masked is not None:
        return images, batch.targets[: len(images) - 1] if training_data.has_partner else batch.targets
    if not training_data.has_mixing:
        return images, batch.targets
    if not len(images):
        return images, images.new_zeros((0, training_data.num_classes))
    mix = mixing.draw_mix(
        training_data.seed, step * plan.batch_size, training_data.augment, training_data.preprocess.size
    )
    assert mix is not None, "one of mixup and cutmix is set"
    return mixing.apply_mix(images, batch.targets, mix, training_data.num_classes)


# --- sets that live on the device ------------------------------------------------------------------------------------


def load_resident_images(
    split: Split,
    *,
    channels: int,
    num_classes: int,
    device: torch.device | str,
    workers: int = 0,
    skip_bad: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """All images of a split, uint8 (n, C, H, W), and their targets, on the device; None if that is not for them.

    It is for images that are small, all of one size, and no more than a few gigabytes together; with `skip_bad` all
    must be readable too.
    """
    with contextlib.suppress(*([DataError] if skip_bad else [])):
        return _resident(split, channels, num_classes, device, workers)
    return None


def _resident(
    split: Split, channels: int, classes: int, device: torch.device | str, workers: int
) -> tuple[Tensor, Tensor] | None:
    shape = _decode_image(split, 0, channels).shape
    if shape[1] * shape[2] > _MAX_RESIDENT_PIXELS or len(split) * shape.numel() > _MAX_RESIDENT_BYTES:
        return None
    pixels = torch.empty((len(split), *shape), dtype=torch.uint8)
    line = (list(range(start, min(start + _CHUNK_IMAGES, len(split)))) for start in range(0, len(split), _CHUNK_IMAGES))
    for batch in _iter_loader_batches(partial(_load_whole_images, split, shape, classes), line, workers):
        if not len(batch.pixels):
            return None
        pixels[batch.positions] = batch.pixels
    return pixels.to(device), _build_targets(split, np.arange(len(split)), classes).to(device)


def iter_resident_train_batches(
    training_data: TrainingData, plan: BatchPlan, pixels: Tensor, targets: Tensor, *, start_step: int = 0
) -> Generator[Batch, None, None]:
    """`training_batches` of images that live on a device, augmented there, those of several batches at once.

    What an operation costs the host does not depend on how many images it is for, and small batches do not fill a GPU.
    """
    size = training_data.preprocess.size
    together = (
        max(1, _AUGMENT_CHUNK_BYTES // (pixels.shape[1] * size[0] * size[1] * plan.batch_size)) * plan.micro_batches
    )
    parts = (
        training_data.get_positions(plan, step, part)
        for step in range(start_step, plan.total_steps)
        for part in plan.list_micro_batches(step)
    )
    while some := list(itertools.islice(parts, together)):
        positions = np.concatenate(some)
        rows = torch.from_numpy(training_data.order.get_sample_indices(positions)).to(pixels.device, non_blocking=True)
        draws = CounterRNG(training_data.seed, positions)
        views = gpu_augment.make_train_inputs(pixels[rows], draws, training_data.augment, training_data.preprocess)
        cuts = [len(part) for part in some]
        told = (
            targets[rows] if training_data.masked is None else _draw_masks(training_data, positions).to(pixels.device)
        )
        columns = (views.split(cuts), told.split(cuts), torch.from_numpy(positions).split(cuts))
        yield from map(Batch, *columns)


def _load_whole_images(split: Split, shape: torch.Size, num_classes: int, indices: IntArray) -> Batch:
    """The images as they are, or none where one has another shape."""
    found = zip(indices.tolist(), split.read_images(indices.tolist()), strict=True)
    images = [decode(source, shape[0], name=split.get_image_name(index)) for index, source in found]
    alike = all(image.shape == shape for image in images)
    pixels = torch.stack(images) if alike else torch.empty((0, *shape), dtype=torch.uint8)
    return Batch(pixels, _build_targets(split, indices, num_classes), torch.from_numpy(indices))


# --- what a worker does ----------------------------------------------------------------------------------------------


class _BatchDataset(Dataset[Any]):
    """A function from a list of positions to a batch, in the form torch's DataLoader takes."""

    def __init__(self, load_batch: partial[Batch]) -> None:
        self.load_batch = load_batch

    def __getitems__(self, positions: list[int]) -> "Batch | _WorkerFailure":
        try:
            return self.load_batch(np.array(positions, dtype=np.int64))
        except VitrailError as error:  # DataLoader would wrap it in its own traceback
            return _WorkerFailure(error)


@dataclasses.dataclass(frozen=True)
class _WorkerFailure:
    """A worker's error on its way to the process that reports it."""

    error: VitrailError


def _iter_loader_batches(
    load_batch: partial[Batch], index_batches: Iterable[list[int]], workers: int
) -> Generator[Batch, None, None]:
    loader = DataLoader(
        _BatchDataset(load_batch),
        batch_sampler=index_batches,
        num_workers=workers,
        collate_fn=_identity_collate,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if workers else None,
    )
    with contextlib.closing(iterate_loader(loader)) as batches:
        for batch in batches:
            if isinstance(batch, _WorkerFailure):
                raise batch.error
            yield batch


def _identity_collate(batch: Any) -> Any:
    return batch


def _load_train_batch(training_data: TrainingData, positions: IntArray) -> Batch:
    rows = training_data.order.get_sample_indices(positions)
    left_out: list[str] = []
    try:
        pixels = _load_train_inputs(training_data, positions, rows)
    except DataError as error:
        if not training_data.skip_bad or isinstance(error, RemoteError):  # a store that does not answer is no bad image
            raise

        def look(row: int) -> None:
            _load_train_inputs(training_data, np.zeros(1, dtype=np.int64), np.array([row]))

        rows = np.array(
            [_find_readable_row(training_data.split, row, look, left_out) for row in rows.tolist()], dtype=np.int64
        )
        pixels = _load_train_inputs(training_data, positions, rows)
    known = training_data.masked is None
    targets = (
        _build_targets(training_data.split, rows, training_data.num_classes)
        if known
        else _draw_masks(training_data, positions)
    )
    return Batch(pixels, targets, torch.from_numpy(positions), tuple(left_out))


def _draw_masks(training_data: TrainingData, positions: IntArray) -> Tensor:
    """What is hidden of the images at these positions."""
    assert training_data.masked is not None
    return torch.from_numpy(
        masking.draw_masked_patches(
            CounterRNG(training_data.seed, positions), training_data.masked, training_data.num_patches
        )
    )


def _load_masked_batch(
    split: Split,
    preprocess: PreprocessConfig,
    masked: MaskedConfig,
    num_patches: int,
    skip_bad: bool,
    indices: IntArray,
) -> Batch:
    left_out: list[str] = []
    try:
        views = torch.stack(_load_eval_inputs(split, preprocess, indices.tolist()))
    except DataError as error:
        if not skip_bad or isinstance(error, RemoteError):
            raise

        def look(row: int) -> None:
            _load_eval_inputs(split, preprocess, [row])

        rows = [_find_readable_row(split, row, look, left_out) for row in indices.tolist()]
        views = torch.stack(_load_eval_inputs(split, preprocess, rows))
    own = indices[:-1] if _has_patch_replacement(masked) else indices
    hidden = masking.draw_masked_patches(CounterRNG(masking.EVAL_SEED, own), masked, num_patches)
    return Batch(views, torch.from_numpy(hidden), torch.from_numpy(own), tuple(left_out))


def _load_train_inputs(training_data: TrainingData, positions: IntArray, rows: IntArray) -> Tensor:
    """The augmented images of these rows at these positions."""
    split, preprocess, channels = training_data.split, training_data.preprocess, len(training_data.preprocess.mean)
    if not len(rows):
        return torch.empty((0, channels, *preprocess.size), dtype=torch.uint8)
    found = zip(rows.tolist(), split.read_images(rows.tolist()), strict=True)
    images = {index: open_image(source, name=split.get_image_name(row)) for index, (row, source) in enumerate(found)}
    sizes = np.array([(image.height, image.width) for image in images.values()], dtype=np.int64)

    def load_image(index: int, rows: int) -> Tensor:
        return images.pop(index).decode_pixels(channels, rows)  # Pillow keeps what it decoded for as long as it is kept

    return make_train_inputs(
        load_image, sizes, CounterRNG(training_data.seed, positions), training_data.augment, preprocess
    )


def _load_eval_batch(
    split: Split, preprocess: PreprocessConfig, num_classes: int, skip_bad: bool, indices: IntArray
) -> Batch:
    left_out: list[str] = []
    views: list[Tensor] = []
    try:
        views = _load_eval_inputs(split, preprocess, indices.tolist())
    except DataError as error:
        if not skip_bad or isinstance(error, RemoteError):
            raise
        kept = []
        for index in indices.tolist():
            try:
                views += _load_eval_inputs(split, preprocess, [index])
                kept.append(index)
            except RemoteError:
                raise
            except DataError:
                left_out.append(split.get_image_name(index))
        indices = np.array(kept, dtype=np.int64)
    shape = (0, len(preprocess.mean), *preprocess.size)
    pixels = torch.stack(views) if views else torch.empty(shape, dtype=torch.uint8)
    return Batch(pixels, _build_targets(split, indices, num_classes), torch.from_numpy(indices), tuple(left_out))


def _load_eval_inputs(split: Split, preprocess: PreprocessConfig, indices: list[int]) -> list[Tensor]:
    found = zip(indices, split.read_images(indices), strict=True)
    channels = len(preprocess.mean)
    return [
        make_eval_input(decode(source, channels, name=split.get_image_name(row)), preprocess) for row, source in found
    ]


def _find_readable_row(split: Split, row: int, look: Callable[[int], None], skipped_images: list[str]) -> int:
    """The row, or the next one that can be read, which `look` tries."""
    for attempt in range(_MAX_SKIPPED_IMAGES):
        here = (row + attempt) % len(split)
        try:
            look(here)
        except RemoteError:
            raise
        except DataError:
            skipped_images.append(split.get_image_name(here))
        else:
            return here
    raise DataError(
        f"{_MAX_SKIPPED_IMAGES} images after {split.get_image_name(row)} cannot be read either: vitrail data check shows why"
    )


def _decode_image(split: Split, index: int, channels: int) -> Tensor:
    """The image, or an error that names it as the set does."""
    return decode(split.read_image(index), channels, name=split.get_image_name(index))


def _build_targets(split: Split, rows: IntArray, num_classes: int) -> Tensor:
    """Classes (B,), or shares (B, L) where an image may have several."""
    labels = [split.get_labels(row) for row in rows.tolist()]
    if not split.multi_label:
        return torch.tensor([row[0] if row else -1 for row in labels], dtype=torch.int64)
    shares = torch.zeros(len(labels), num_classes)
    for place, row in enumerate(labels):
        shares[place, list(row)] = 1
    return shares
