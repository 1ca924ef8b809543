"""Batches for training and evaluation: worker processes read, decode and augment them; none of them decides the order.

    step s of training holds the positions  s * batch_size ... (s + 1) * batch_size - 1
    a rank computes a consecutive part of them, in consecutive micro-batches

Order, augmentation, mixing and masking are functions of the position (`randomness`, `augment`, `batch_augment`). So
workers, ranks, micro-batches and the step of a resume change no sample. torch's DataLoader moves the batches.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrail.config import AugmentConfig, MaskedConfig, PreprocessConfig
from vitrail.data import batch_augment
from vitrail.data.augment import make_train_inputs
from vitrail.data.dataset import Split
from vitrail.data.decode import decode, open_image
from vitrail.data.loader_workers import iterate_loader
from vitrail.data.randomness import CounterRNG, IntArray, SampleOrder
from vitrail.data.transforms import make_eval_input, normalize
from vitrail.errors import DataError, RemoteError, UsageError, VitrailError

__all__ = ["Batch", "BatchPlan", "TrainingData", "iter_eval_batches", "iter_train_batches", "prepare_train_batch"]

_MAX_SKIPPED_IMAGES = 100
_MAX_RESIDENT_PIXELS = 128 * 128  # pixels; larger images are mostly photos, of all sizes
_MAX_RESIDENT_BYTES = 4 * 2**30
_CHUNK_IMAGES = 512
_AUGMENT_CHUNK_BYTES = 2**26  # of inputs that are augmented together


class Batch(NamedTuple):
    """Images of consecutive positions (training) or indices (evaluation)."""

    pixels: Tensor
    """uint8 (B, C, S, S). Where images need their neighbor, one image more: the partner of the last."""
    targets: Tensor
    """Classes (B,), -1 for none, or multi-hot (B, L) where an image may have several labels. In masked training
    (B, 2, N), as `draw_masked_patches` returns it."""
    positions: Tensor  # (B,)
    skipped_images: tuple[str, ...] = ()
    """Names of unreadable images that were skipped, where that is allowed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How a run's samples are divided into steps, ranks and micro-batches."""

    batch_size: int
    """Images in a step, over all ranks."""
    total_samples: int
    """Samples of the whole run; the last batch may be smaller."""
    rank: int = 0
    world_size: int = 1
    micro_batches: int = 1
    """Parts in which a rank computes its share of a step."""

    def __post_init__(self) -> None:
        is_valid_rank = 0 <= self.rank < self.world_size
        if self.batch_size < 1 or self.total_samples < 0 or not is_valid_rank or self.micro_batches < 1:
            raise UsageError(
                f"{self} is impossible: batches and micro-batches are 1 or more, the rank is below the world size"
            )

    @property
    def total_steps(self) -> int:
        """Steps in all."""
        return -(-self.total_samples // self.batch_size)

    def get_batch_size(self, step: int) -> int:
        """Return the number of images in a step, over all ranks."""
        return min(self.batch_size, self.total_samples - step * self.batch_size)

    def list_micro_batches(self, step: int) -> list[range]:
        """List the positions of each of this rank's micro-batches; in a short step some may be empty."""
        first, size, count = step * self.batch_size, self.get_batch_size(step), self.world_size * self.micro_batches
        bounds = [first + size * part // count for part in range(count + 1)]
        own_parts = range(self.rank * self.micro_batches, (self.rank + 1) * self.micro_batches)
        return [range(bounds[part], bounds[part + 1]) for part in own_parts]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data of a training run, the same for every rank.

    Batches are read by a plan, and augmented as `augment` says:

        from vitrail.config import AugmentConfig
        from vitrail.data import loader
        from vitrail.data.randomness import SampleOrder
        from vitrail.data.sources import open_dataset

        train = open_dataset("photos").splits["train"]
        data = loader.TrainingData(
            split=train, order=SampleOrder(seed=0, num_samples=len(train)), augment=AugmentConfig(),
            preprocess=vitrail.PreprocessConfig(size=(32, 32), resize=(36,)), seed=0, num_classes=2,
        )
        plan = loader.BatchPlan(batch_size=4, total_samples=2 * len(train))  # two epochs
        for step, batch in enumerate(loader.iter_train_batches(data, plan)):  # each is a Batch
            images, targets = loader.prepare_train_batch(batch, data, plan, step)
    """

    split: Split
    order: SampleOrder
    augment: AugmentConfig
    preprocess: PreprocessConfig
    seed: int
    num_classes: int
    masked: MaskedConfig | None = None
    """Which patches are masked and predicted, instead of classes."""
    num_patches: int = 0
    """Patches of an image, for masked training."""
    skip_bad: bool = False
    """Replace an unreadable image by its next readable neighbor, instead of stopping."""

    @property
    def has_mixing(self) -> bool:
        """Whether images are mixed."""
        return bool(self.augment.mixup or self.augment.cutmix)

    @property
    def has_partner(self) -> bool:
        """Whether a micro-batch needs the partner of its last image too: to mix it in, or to take patches from it."""
        return self.has_mixing or _has_patch_replacement(self.masked)

    def iter_positions(self, plan: BatchPlan, start_step: int) -> Iterator[IntArray]:
        """Yield the positions to load for each of this rank's micro-batches, from `start_step` on."""
        for step in range(start_step, plan.total_steps):
            first, size = step * plan.batch_size, plan.get_batch_size(step)
            for part in plan.list_micro_batches(step):
                count = len(part) + (self.has_partner and len(part) > 0)
                yield first + np.arange(part.start - first, part.start - first + count) % size


def iter_train_batches(
    training_data: TrainingData, plan: BatchPlan, *, start_step: int = 0, workers: int = 0
) -> Generator[Batch, None, None]:
    """Yield this rank's micro-batches from `start_step` on, in order."""
    positions = (positions.tolist() for positions in training_data.iter_positions(plan, start_step))
    return _iter_loader_batches(partial(_load_train_batch, training_data), positions, workers)


def iter_eval_batches(
    split: Split,
    preprocess: PreprocessConfig,
    *,
    batch_size: int,
    num_classes: int,
    masked: MaskedConfig | None = None,
    num_patches: int = 0,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    skip_bad: bool = False,
) -> Iterator[Batch]:
    """Yield each image of this rank's share once, in order; the last batch may be short.

    With `skip_bad`, unreadable images are omitted. With `masked`, the targets are masks, always of the same patches; a
    batch then holds the partner of its last image, the next of the split, so batches and ranks change nothing, and
    `skip_bad` replaces an unreadable image by the next readable one.

        from vitrail.data.loader import iter_eval_batches
        from vitrail.data.sources import open_dataset

        dataset, trained = open_dataset("photos"), vitrail.load("model.safetensors")
        for batch in iter_eval_batches(dataset.splits["val"], trained.preprocess, batch_size=64, num_classes=2):
            print(batch.pixels.shape, batch.targets)
    """
    partners = 1 if _has_patch_replacement(masked) else 0
    index_batches = (
        [index % len(split) for index in range(part.start, part.stop + partners)]
        for part in _split_into_ranges(len(split), batch_size, rank, world_size)
    )
    load_batch = (
        partial(_load_eval_batch, split, preprocess, num_classes, skip_bad)
        if masked is None
        else partial(_load_masked_batch, split, preprocess, masked, num_patches, skip_bad)
    )
    return _iter_loader_batches(load_batch, index_batches, workers)


def _split_into_ranges(count: int, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[range]:
    """Yield a rank's share of 0 .. count - 1 in ranges of `batch_size`; the last may be short."""
    first, last = count * rank // world_size, count * (rank + 1) // world_size
    return (range(start, min(start + batch_size, last)) for start in range(first, last, batch_size))


def _has_patch_replacement(masked: MaskedConfig | None) -> bool:
    """Tell whether patches of the next image may replace masked ones."""
    return masked is not None and masked.kind == "mpp"


def prepare_train_batch(batch: Batch, training_data: TrainingData, plan: BatchPlan, step: int) -> tuple[Tensor, Tensor]:
    """Return normalized images and targets, mixed if training mixes, on the device of the batch's pixels.

    Where patches of a partner may be taken, there is one image more than targets.
    """
    images = normalize(batch.pixels, training_data.preprocess)
    if training_data.masked is not None:
        return images, batch.targets[: len(images) - 1] if training_data.has_partner else batch.targets
    if not training_data.has_mixing:
        return images, batch.targets
    if not len(images):
        return images, images.new_zeros((0, training_data.num_classes))
    first, size = step * plan.batch_size, training_data.preprocess.size
    mix = batch_augment.draw_mix(training_data.seed, first, training_data.augment, size)
    assert mix is not None, "one of mixup and cutmix is enabled"
    return batch_augment.apply_mix(images, batch.targets, mix, training_data.num_classes)


# --- datasets held in the device's memory ----------------------------------------------------------------------------


def load_resident_images(
    split: Split,
    *,
    channels: int,
    num_classes: int,
    device: torch.device | str,
    workers: int = 0,
    skip_bad: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """Load all images of a split, uint8 (n, C, H, W), and their targets onto the device; None if they do not qualify.

    Images qualify if they are small, all of one size, and at most a few gigabytes together. With `skip_bad`, a split
    with an unreadable image does not qualify either.
    """
    with contextlib.suppress(*([DataError] if skip_bad else [])):
        shape = decode(split.read_image(0), channels, name=split.get_image_name(0)).shape
        if shape[1] * shape[2] > _MAX_RESIDENT_PIXELS or len(split) * shape.numel() > _MAX_RESIDENT_BYTES:
            return None
        pixels = torch.empty((len(split), *shape), dtype=torch.uint8)
        load_batch = partial(_load_whole_images, split, shape)
        index_batches = map(list, _split_into_ranges(len(split), _CHUNK_IMAGES))
        for batch in _iter_loader_batches(load_batch, index_batches, workers):
            if not len(batch.pixels):
                return None
            pixels[batch.positions] = batch.pixels
        return pixels.to(device), _build_targets(split, np.arange(len(split)), num_classes).to(device)
    return None


def iter_resident_train_batches(
    training_data: TrainingData, plan: BatchPlan, pixels: Tensor, targets: Tensor, *, start_step: int = 0
) -> Generator[Batch, None, None]:
    """Yield what `iter_train_batches` does, for images on a device, augmented there, several batches at once.

    An operation costs the host the same for any number of images, and small batches do not fill a GPU.
    """
    height, width = training_data.preprocess.size
    step_bytes = pixels.shape[1] * height * width * plan.batch_size
    chunk_parts = max(1, _AUGMENT_CHUNK_BYTES // step_bytes) * plan.micro_batches
    parts = training_data.iter_positions(plan, start_step)
    while chunk := list(itertools.islice(parts, chunk_parts)):
        positions = np.concatenate(chunk)
        rows = torch.from_numpy(training_data.order.get_sample_indices(positions)).to(pixels.device, non_blocking=True)
        rng = CounterRNG(training_data.seed, positions)
        inputs = batch_augment.make_train_inputs(pixels[rows], rng, training_data.augment, training_data.preprocess)
        masks = _draw_masks(training_data, positions)
        chunk_targets = targets[rows] if masks is None else masks.to(pixels.device)
        sizes = [len(part) for part in chunk]
        yield from map(Batch, inputs.split(sizes), chunk_targets.split(sizes), torch.from_numpy(positions).split(sizes))


def _load_whole_images(split: Split, shape: torch.Size, indices: IntArray) -> Batch:
    """Load images without a crop and without targets; no pixels where one has another shape."""
    images = [decode(source, shape[0], name=name) for name, source in split.read_images(indices.tolist())]
    same_shape = all(image.shape == shape for image in images)
    pixels = torch.stack(images) if same_shape else torch.empty((0, *shape), dtype=torch.uint8)
    return Batch(pixels, torch.empty(0), torch.from_numpy(indices))


# --- the work of a worker process ------------------------------------------------------------------------------------


class _BatchDataset(Dataset[Any]):
    """A function from a list of positions to a batch, as a dataset for torch's DataLoader."""

    def __init__(self, load_batch: partial[Batch]) -> None:
        self.load_batch = load_batch

    def __getitems__(self, positions: list[int]) -> Batch | VitrailError:
        try:
            return self.load_batch(np.array(positions, dtype=np.int64))
        except VitrailError as error:  # returned: DataLoader would wrap it in its own traceback
            return error


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
            if isinstance(batch, VitrailError):
                raise batch
            yield batch


def _identity_collate(batch: Any) -> Any:
    return batch


def _load_train_batch(training_data: TrainingData, positions: IntArray) -> Batch:
    split, rows = training_data.split, training_data.order.get_sample_indices(positions)
    load_inputs = partial(_load_train_inputs, training_data)
    pixels, rows, skipped = _load_readable(load_inputs, split, positions, rows, training_data.skip_bad)
    masks = _draw_masks(training_data, positions)
    targets = _build_targets(split, rows, training_data.num_classes) if masks is None else masks
    return Batch(pixels, targets, torch.from_numpy(positions), skipped)


def _load_train_inputs(training_data: TrainingData, positions: IntArray, rows: IntArray) -> Tensor:
    """Load and augment the images of these rows at these positions."""
    split, preprocess, channels = training_data.split, training_data.preprocess, len(training_data.preprocess.mean)
    if not len(rows):
        return torch.empty((0, channels, *preprocess.size), dtype=torch.uint8)
    sources = enumerate(split.read_images(rows.tolist()))
    images = {index: open_image(source, name=name) for index, (name, source) in sources}
    sizes = np.array([(image.height, image.width) for image in images.values()], dtype=np.int64)

    def load_image(index: int, min_rows: int) -> Tensor:
        return images.pop(index).decode_pixels(channels, min_rows)  # popped: Pillow's image holds its decoded pixels

    rng = CounterRNG(training_data.seed, positions)
    return make_train_inputs(load_image, sizes, rng, training_data.augment, preprocess)


def _draw_masks(training_data: TrainingData, positions: IntArray) -> Tensor | None:
    """Draw the masked patches of the images at these positions, in masked training."""
    if training_data.masked is None:
        return None
    rng = CounterRNG(training_data.seed, positions)
    return torch.from_numpy(batch_augment.draw_masked_patches(rng, training_data.masked, training_data.num_patches))


def _load_masked_batch(
    split: Split,
    preprocess: PreprocessConfig,
    masked: MaskedConfig,
    num_patches: int,
    skip_bad: bool,
    indices: IntArray,
) -> Batch:
    load_inputs = partial(_load_eval_inputs, split, preprocess)
    pixels, _, skipped = _load_readable(load_inputs, split, indices, indices, skip_bad)
    positions = indices[:-1] if _has_patch_replacement(masked) else indices
    masks = batch_augment.draw_masked_patches(CounterRNG(batch_augment.EVAL_SEED, positions), masked, num_patches)
    return Batch(pixels, torch.from_numpy(masks), torch.from_numpy(positions), skipped)


def _load_eval_batch(
    split: Split, preprocess: PreprocessConfig, num_classes: int, skip_bad: bool, indices: IntArray
) -> Batch:
    load_inputs, readable = partial(_load_eval_inputs, split, preprocess), indices
    pixels = _load_if_readable(load_inputs, indices, indices, skip_bad)
    if pixels is None:
        readable = indices[[_load_if_readable(load_inputs, index, index) is not None for index in indices[:, None]]]
        pixels = load_inputs(readable, readable)
    skipped = tuple(split.get_image_name(index) for index in np.setdiff1d(indices, readable).tolist())
    return Batch(pixels, _build_targets(split, readable, num_classes), torch.from_numpy(readable), skipped)


def _load_eval_inputs(split: Split, preprocess: PreprocessConfig, _: IntArray, rows: IntArray) -> Tensor:
    """Load and center-crop the images of these rows; their positions change nothing."""
    channels = len(preprocess.mean)
    images = (decode(source, channels, name=name) for name, source in split.read_images(rows.tolist()))
    inputs = [make_eval_input(image, preprocess) for image in images]
    return torch.stack(inputs) if inputs else torch.empty((0, channels, *preprocess.size), dtype=torch.uint8)


_InputLoader = Callable[[IntArray, IntArray], Tensor]  # positions (B,), rows (B,) -> uint8 (B, C, S, S)


def _load_readable(
    load_inputs: _InputLoader, split: Split, positions: IntArray, rows: IntArray, skip_bad: bool
) -> tuple[Tensor, IntArray, tuple[str, ...]]:
    """Load the inputs of these rows; return them, the rows, and the names of skipped images.

    With `skip_bad`, the next readable row replaces an unreadable one.
    """
    inputs = _load_if_readable(load_inputs, positions, rows, skip_bad)
    if inputs is not None:
        return inputs, rows, ()
    skipped: list[str] = []
    pairs = zip(positions.tolist(), rows.tolist(), strict=True)
    replaced = [_find_readable_row(load_inputs, split, position, row, skipped) for position, row in pairs]
    rows = np.array(replaced, dtype=np.int64)
    return load_inputs(positions, rows), rows, tuple(skipped)


def _find_readable_row(load_inputs: _InputLoader, split: Split, position: int, row: int, skipped: list[str]) -> int:
    """Return the row, or the next readable one; add the names of those between to `skipped`."""
    for attempt in range(_MAX_SKIPPED_IMAGES):
        candidate = (row + attempt) % len(split)
        if _load_if_readable(load_inputs, np.array([position]), np.array([candidate])) is not None:
            return candidate
        skipped.append(split.get_image_name(candidate))
    raise DataError(
        f"{split.get_image_name(row)} and the {_MAX_SKIPPED_IMAGES - 1} images after it cannot be read: `vitrail data"
        " check` shows why"
    )


def _load_if_readable(
    load_inputs: _InputLoader, positions: IntArray, rows: IntArray, skip_bad: bool = True
) -> Tensor | None:
    """Load inputs; None where an image is bad and may be skipped. A store that does not answer is not a bad image."""
    try:
        return load_inputs(positions, rows)
    except DataError as error:
        if not skip_bad or isinstance(error, RemoteError):
            raise
        return None


def _build_targets(split: Split, rows: IntArray, num_classes: int) -> Tensor:
    """Build classes (B,), or multi-hot targets (B, L) where an image may have several labels."""
    labels = [split.get_labels(row) for row in rows.tolist()]
    if not split.multi_label:
        return torch.tensor([classes[0] if classes else -1 for classes in labels], dtype=torch.int64)
    targets = torch.zeros(len(labels), num_classes)
    for row, classes in enumerate(labels if num_classes else ()):  # 0 where features alone are computed
        targets[row, list(classes)] = 1
    return targets
