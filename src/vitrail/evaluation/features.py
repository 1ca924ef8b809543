"""The features of images, which a model's head reads: computed once, then cached.

    n images   B images of a batch   D features

They are `model.compute_features`: the encoder's pooled output, passed through the pre-training head's hidden layer
(with its tanh) if the model has one, as the paper's authors do. They are float32 on every device.

The cache key is a digest of the weights, the images and the preprocessing. Image files count as unchanged while their
names, sizes and modification times are; all other images are read.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail import files
from vitrail.config import PreprocessConfig, ViTConfig, to_json
from vitrail.config.features import AnyFeatureKind, count_features
from vitrail.data.dataset import Split
from vitrail.data.dataset_digest import read_file_stamps
from vitrail.data.folder import FileStore
from vitrail.data.loader import Batch, iter_eval_batches
from vitrail.data.sample_table import UNLABELED, read_stamp
from vitrail.data.shards import ShardStore
from vitrail.data.transforms import normalize
from vitrail.errors import DataError, ModelError
from vitrail.formatting import pluralize
from vitrail.model.features import compute_features
from vitrail.model.vit import Model
from vitrail.runtime import distributed
from vitrail.runtime.devices import finish_one_late, start_copy_to_cpu
from vitrail.runtime.distributed import ProcessGroup
from vitrail.runtime.workers import ProgressCallback, ignore_progress
from vitrail.weights import tensor_files

HEAD_PREFIXES = ("head.", "head_dist.")  # tensors that do not affect the features
_VERSION = 2
_TENSOR_NAME = "features"


def extract_features(
    model: Model,
    batches: Iterable[Batch],
    preprocess: PreprocessConfig,
    *,
    num_images: int,
    dense_grid: tuple[int, int] | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Tensor:
    """(n, D), float32 on the CPU: the features of `num_images` images, each in the row of its position.

    With `dense_grid`, the rows and columns of patches: (n, rows, columns, D), their dense features.
    Each rank has its own batches, and gets the rows of all. The model is left in eval mode.
    """
    device = next(model.parameters()).device
    model.eval()
    kind: AnyFeatureKind = "default" if dense_grid is None else "dense"
    values = torch.zeros(num_images, *(dense_grid or ()), count_features(model.config, kind))
    # cuDNN would compute a ResNet's convolutions in TF32, which has three digits
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=torch.backends.cudnn.deterministic, allow_tf32=False)
    done = 0

    def start(batch: Batch) -> Callable[[], tuple[Tensor, Tensor]]:
        inputs = normalize(batch.pixels.to(device, non_blocking=True), preprocess)
        computed = compute_features(model, inputs, kind)
        wait = start_copy_to_cpu(computed.float())
        return lambda: (batch.positions, wait()[0])

    with torch.inference_mode(), exact:
        for positions, rows in finish_one_late(start(batch) for batch in batches):
            values[positions] = rows
            done += len(rows)
            progress(done, num_images)
    values = distributed.all_reduce_rows(values, device)  # 0 where other ranks compute them
    if not values.isfinite().all():
        raise ModelError(
            "the model's features are not all finite: its weights, or the mean and std of its images, are wrong"
        )
    return values


def extract_split_features(
    model: Model,
    split: Split,
    preprocess: PreprocessConfig,
    group: ProcessGroup,
    *,
    batch: int,
    workers: int,
    dense_grid: tuple[int, int] | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Tensor:
    """(n, D): the features of a split's images, of which each rank computes a share."""
    rank, world_size = group.rank, group.world_size
    batches = iter_eval_batches(
        split, preprocess, batch_size=batch, num_classes=0, rank=rank, world_size=world_size, workers=workers
    )
    return extract_features(model, batches, preprocess, num_images=len(split), dense_grid=dense_grid, progress=progress)


def read_labels(split: Split, num_classes: int | None = None) -> Tensor:
    """int64 (n,): the class of each image; bool (n, L) for multi-label images, whose `num_classes` must be given."""
    if split.multi_label:
        if num_classes is None:
            raise DataError("a probe during training needs images with one label each, and these may have several")
        targets = torch.zeros(len(split), num_classes, dtype=torch.bool)
        for row in range(len(split)):
            targets[row, list(split.get_labels(row))] = True
        return targets
    labels = np.asarray(split.store.table["label"])[np.asarray(split.rows)].astype(np.int64)
    if len(unlabeled := np.flatnonzero(labels == UNLABELED)):
        example = split.get_image_name(int(unlabeled[0]))
        raise DataError(
            f"{pluralize(len(unlabeled), 'image')} without a label, such as {example}: add it, or remove them"
        )
    return torch.from_numpy(labels)


# --- the cache -------------------------------------------------------------------------------------------------------


_LATER_FIELDS = {  # of a ViT's config, which caches of earlier versions do not know
    "attention_norm", "drop_remainder", "gated_mlp", "mlp_norm", "norm_pre", "normalize_features", "pool_heads",
    "pool_mlp", "pool_prefix", "projection", "rotary",
}  # fmt: skip


def digest_model(model: Model) -> str:
    """A digest of everything in a model that affects its features: all but the head."""
    config = dataclasses.replace(model.config, classes=0)
    if isinstance(config, ViTConfig):
        config = dataclasses.replace(config, distillation_head=False)
    fields = {name: value for name, value in to_json(config).items() if value or name not in _LATER_FIELDS}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    tensors = model.state_dict()
    for name in sorted(tensors):
        if not name.startswith(HEAD_PREFIXES):  # not `digest_tensors`: caches of earlier versions stay in use
            digest.update(name.encode())
            digest.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_images(split: Split) -> str:
    """A digest that changes when an image, its name or its position does."""
    digest, store, rows = hashlib.sha256(), split.store, np.asarray(split.rows).tolist()
    stamps = read_file_stamps(store, rows)
    if isinstance(store, ShardStore):
        offsets = store.table["offset"][rows].tolist()
        stamps = [[*stamp, offset] for stamp, offset in zip(stamps, offsets, strict=True)]
    elif isinstance(store, FileStore) and isinstance(store.root, str):
        stamps = [read_stamp(store.root)] * len(rows)  # of all files below, in one request
    for position, stamp in enumerate(stamps):
        source = b"" if stamp else split.read_image(position)
        content = source.tobytes() if isinstance(source, Image.Image) else b"" if isinstance(source, Path) else source
        line = f"{split.get_image_name(position)} {stamp} {len(content)}\n"
        digest.update(line.encode(errors="surrogateescape") + content)
    return digest.hexdigest()


def build_cache_path(model_digest: str, images_digest: str, preprocess: PreprocessConfig) -> Path:
    """The cache file of a model's features of a split."""
    settings = json.dumps(to_json(preprocess), sort_keys=True)
    name = hashlib.sha256(f"{_VERSION} {model_digest} {images_digest} {settings}".encode()).hexdigest()
    return files.get_cache_home() / "features" / f"{name[:32]}.safetensors"


def load_cached_features(path: Path) -> Tensor | None:
    """The cached features; None if there are none or the file is damaged."""
    try:
        return tensor_files.read_tensors(path).tensors[_TENSOR_NAME] if path.exists() else None
    except (ModelError, KeyError):
        return None


def cache_features(path: Path, values: Tensor) -> None:
    """Write features to the cache."""
    try:
        with files.write_atomically(path, overwrite=True) as temporary:
            tensor_files.write_tensors(temporary, {_TENSOR_NAME: values}, {})
    except OSError:
        return  # a cache that cannot be written costs time, not the result
