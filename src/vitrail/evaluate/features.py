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
from vitrail.config import Preprocess, ViTConfig, to_json
from vitrail.data import index
from vitrail.data.dataset import UNLABELLED, Split
from vitrail.data.folder import Files
from vitrail.data.loader import Batch
from vitrail.data.shards import Shards
from vitrail.data.transforms import normalise
from vitrail.data.workers import Progress, silent
from vitrail.errors import DataError, ModelError
from vitrail.model.build import Model
from vitrail.plurals import plural
from vitrail.weights import storage

HEADS = ("head.", "head_dist.")  # the tensors that features do not depend on
_VERSION = 2
_NAME = "features"


def alone(values: Tensor) -> Tensor:
    """The features of all ranks where there is one."""
    return values


def extract(
    model: Model,
    batches: Iterable[Batch],
    preprocess: Preprocess,
    *,
    images: int,
    over_ranks: Callable[[Tensor], Tensor] = alone,
    progress: Progress = silent,
) -> Tensor:
    """(n, D), float32 on the CPU: the features of `images` images, each in the row that its batch says.

    Of several processes each has batches of its own, and `over_ranks` sums the rows, which are 0 where others compute
    them. The model is left in eval mode.
    """
    device = next(model.parameters()).device
    model.eval()
    values = torch.zeros(images, model.config.features)
    # TF32, which cuDNN would round a ResNet's convolutions to, has three digits
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=torch.backends.cudnn.deterministic, allow_tf32=False)
    done, before = 0, None
    with torch.inference_mode(), exact:
        for batch in batches:
            found = model.features(normalise(batch.pixels.to(device, non_blocking=True), preprocess))
            if before is not None:  # a batch late: to wait for this one would leave a GPU idle until the next is sent
                values[before[0]] = before[1].float().cpu()
            before = batch.positions, found
            done += len(found)
            progress(done, images)
        if before is not None:
            values[before[0]] = before[1].float().cpu()
    values = over_ranks(values)
    if not values.isfinite().all():
        raise ModelError(
            "the model's features are not all finite: its weights, or the mean and std of its images, are wrong"
        )
    return values


def labels(split: Split) -> Tensor:
    """int64 (n,): the class of each image."""
    if split.several:
        raise DataError("probes are of images with one label each, and these may have several")
    found = np.asarray(split.store.table["label"])[np.asarray(split.rows)].astype(np.int64)
    if len(bare := np.flatnonzero(found == UNLABELLED)):
        raise DataError(
            f"{plural(len(bare), 'image')} without a label, such as {split.name(int(bare[0]))}: add it, or remove them"
        )
    return torch.from_numpy(found)


# --- the cache -------------------------------------------------------------------------------------------------------


def of_model(model: Model) -> str:
    """A digest of all that the features depend on in a model: everything but its head."""
    config = dataclasses.replace(model.config, classes=0)
    if isinstance(config, ViTConfig):
        config = dataclasses.replace(config, distillation_head=False)
    found = hashlib.sha256(json.dumps(to_json(config), sort_keys=True).encode())
    tensors = model.state_dict()
    for name in sorted(tensors):
        if not name.startswith(HEADS):
            found.update(name.encode())
            found.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def of_images(split: Split) -> str:
    """A digest that changes when an image, its name or its place does."""
    found, stamps = hashlib.sha256(), dict[str, list[int]]()

    def stamp(path: str) -> list[int]:
        if path not in stamps:
            stamps[path] = index.stamp(path)
        return stamps[path]

    store, content = split.store, b""
    for place, row in enumerate(np.asarray(split.rows).tolist()):
        if isinstance(store, Shards):
            mark = [*stamp(f"{store.folder}/{store.files[store.table['shard'][row]]}"), int(store.table["offset"][row])]
        elif isinstance(store, Files) and isinstance(store.root, str):
            mark = stamp(store.root)  # of all that lies below, in one request
        else:
            source = split.read(place)
            mark = index.stamp(str(source)) if isinstance(source, Path) else []
            content = (
                b"" if isinstance(source, Path) else source.tobytes() if isinstance(source, Image.Image) else source
            )
        found.update(f"{split.name(place)} {mark} {len(content)}\n".encode(errors="surrogateescape") + content)
    return found.hexdigest()


def place(model: str, images: str, preprocess: Preprocess) -> Path:
    """The file for the features of a model (`of_model`) of a split (`of_images`)."""
    view = json.dumps(to_json(preprocess), sort_keys=True)
    name = hashlib.sha256(f"{_VERSION} {model} {images} {view}".encode()).hexdigest()
    return files.cache_home() / "features" / f"{name[:32]}.safetensors"


def recall(path: Path) -> Tensor | None:
    """What was kept there; None where nothing was, or it is damaged."""
    try:
        return storage.read(path).tensors[_NAME] if path.exists() else None
    except (ModelError, KeyError):
        return None


def keep(path: Path, values: Tensor) -> None:
    """Keep features for the next time."""
    try:
        with files.replacing(path, overwrite=True) as fresh:
            storage.write(fresh, {_NAME: values}, {})
    except OSError:
        return  # a cache that cannot be written costs time, not the result
