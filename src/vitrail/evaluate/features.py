"""What a model's head reads of each image, computed once and kept.

    n images   B images of a batch   D features

The features are `model.features`: the pooled output of the encoder and, where the model has the pre-training head's
hidden layer, what that layer makes of it (tanh included), as the paper's authors take them. They are float32 on every
device.

They are kept in the cache under a digest of the weights, the images and the preprocessing. Images in files count as
unchanged while their names, sizes and times of change are; all others are read.
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
from vitrail.data import index
from vitrail.data.dataset import UNLABELED, Split
from vitrail.data.folder import FileStore
from vitrail.data.loader import Batch
from vitrail.data.shards import ShardStore
from vitrail.data.transforms import normalize
from vitrail.errors import DataError, ModelError
from vitrail.formatting import pluralize
from vitrail.model.build import Model
from vitrail.runtime.workers import ProgressCallback, ignore_progress
from vitrail.weights import tensor_files

HEAD_PREFIXES = ("head.", "head_dist.")  # the tensors that features do not depend on
_VERSION = 2
_TENSOR_NAME = "features"


def identity(values: Tensor) -> Tensor:
    """The features of all ranks where there is one."""
    return values


def extract_features(
    model: Model,
    batches: Iterable[Batch],
    preprocess: PreprocessConfig,
    *,
    num_images: int,
    reduce_ranks: Callable[[Tensor], Tensor] = identity,
    progress: ProgressCallback = ignore_progress,
) -> Tensor:
    """(n, D), float32 on the CPU: the features of `images` images, each in the row that its batch says.

    Of several processes each has batches of its own, and `over_ranks` sums the rows, which are 0 where others compute
    them. The model is left in eval mode.
    """
    device = next(model.parameters()).device
    model.eval()
    values = torch.zeros(num_images, model.config.num_features)
    # TF32, which cuDNN would round a ResNet's convolutions to, has three digits
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=torch.backends.cudnn.deterministic, allow_tf32=False)
    done, before = 0, None
    with torch.inference_mode(), exact:
        for batch in batches:
            found = model.compute_features(normalize(batch.pixels.to(device, non_blocking=True), preprocess))
            if before is not None:  # a batch late: to wait for this one would leave a GPU idle until the next is sent
                values[before[0]] = before[1].float().cpu()
            before = batch.positions, found
            done += len(found)
            progress(done, num_images)
        if before is not None:
            values[before[0]] = before[1].float().cpu()
    values = reduce_ranks(values)
    if not values.isfinite().all():
        raise ModelError(
            "the model's features are not all finite: its weights, or the mean and std of its images, are wrong"
        )
    return values


def read_labels(split: Split) -> Tensor:
    """int64 (n,): the class of each image."""
    if split.multi_label:
        raise DataError("probes are of images with one label each, and these may have several")
    found = np.asarray(split.store.table["label"])[np.asarray(split.rows)].astype(np.int64)
    if len(bare := np.flatnonzero(found == UNLABELED)):
        raise DataError(
            f"{pluralize(len(bare), 'image')} without a label, such as {split.get_image_name(int(bare[0]))}: add it, or remove them"
        )
    return torch.from_numpy(found)


# --- the cache -------------------------------------------------------------------------------------------------------


def digest_model(model: Model) -> str:
    """A digest of all that the features depend on in a model: everything but its head."""
    config = dataclasses.replace(model.config, classes=0)
    if isinstance(config, ViTConfig):
        config = dataclasses.replace(config, distillation_head=False)
    found = hashlib.sha256(json.dumps(to_json(config), sort_keys=True).encode())
    tensors = model.state_dict()
    for name in sorted(tensors):
        if not name.startswith(HEAD_PREFIXES):
            found.update(name.encode())
            found.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def digest_images(split: Split) -> str:
    """A digest that changes when an image, its name or its place does."""
    found, stamps = hashlib.sha256(), dict[str, list[int]]()

    def read_stamp(path: str) -> list[int]:
        if path not in stamps:
            stamps[path] = index.read_stamp(path)
        return stamps[path]

    store, content = split.store, b""
    for place, row in enumerate(np.asarray(split.rows).tolist()):
        if isinstance(store, ShardStore):
            mark = [
                *read_stamp(f"{store.folder}/{store.files[store.table['shard'][row]]}"),
                int(store.table["offset"][row]),
            ]
        elif isinstance(store, FileStore) and isinstance(store.root, str):
            mark = read_stamp(store.root)  # of all that lies below, in one request
        else:
            source = split.read_image(place)
            mark = index.read_stamp(str(source)) if isinstance(source, Path) else []
            content = (
                b"" if isinstance(source, Path) else source.tobytes() if isinstance(source, Image.Image) else source
            )
        found.update(
            f"{split.get_image_name(place)} {mark} {len(content)}\n".encode(errors="surrogateescape") + content
        )
    return found.hexdigest()


def build_cache_path(model_digest: str, images_digest: str, preprocess: PreprocessConfig) -> Path:
    """The file for the features of a model (`of_model`) of a split (`of_images`)."""
    view = json.dumps(to_json(preprocess), sort_keys=True)
    name = hashlib.sha256(f"{_VERSION} {model_digest} {images_digest} {view}".encode()).hexdigest()
    return files.get_cache_home() / "features" / f"{name[:32]}.safetensors"


def load_cached_features(path: Path) -> Tensor | None:
    """What was kept there; None where nothing was, or it is damaged."""
    try:
        return tensor_files.read_tensors(path).tensors[_TENSOR_NAME] if path.exists() else None
    except (ModelError, KeyError):
        return None


def cache_features(path: Path, values: Tensor) -> None:
    """Keep features for the next time."""
    try:
        with files.write_atomically(path, overwrite=True) as fresh:
            tensor_files.write_tensors(fresh, {_TENSOR_NAME: values}, {})
    except OSError:
        return  # a cache that cannot be written costs time, not the result
