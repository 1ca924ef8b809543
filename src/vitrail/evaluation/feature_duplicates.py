"""Near-duplicates by a model's features: what the fingerprints of `data/duplicates.py` miss, such as rotated images.

Features of a photo's subject are alike whoever took the photo, so a plain cosine cannot tell a rotated duplicate from
another picture of the same flower. Two corrections make duplicates stand out (docs/experiments/duplicates.md):

1. Whitening, by the mean and the principal components of the dataset's own features (Jegou and Chum 2012): directions
   in which all images differ count less. Variances get a floor, which is higher the fewer images there are.
2. Score normalization, as in copy detection (Douze et al. 2021): half of each image's mean similarity to its next
   neighbors is subtracted, halved again for the pair. An image in a crowd of similar ones needs more to be a duplicate.

    n images   D features
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.data.dataset import Split
from vitrail.data.image_scan import DECODED, DatasetScan
from vitrail.data.randomness import IntArray
from vitrail.errors import UsageError
from vitrail.evaluation import features
from vitrail.inference.cosine_search import SimilarPairs, find_similar_pairs, normalize_rows
from vitrail.runtime.distributed import SINGLE_PROCESS
from vitrail.runtime.workers import ProgressCallback, ignore_progress
from vitrail.weights.trained import Trained, require_preprocess

DEFAULT_THRESHOLD = 0.5
_MIN_FLOOR = 0.03  # of the mean variance, added to that of each principal component
_CROWD = 5  # neighbors after the first, whose mean similarity says how crowded an image is
_CROWD_WEIGHT = 0.25  # of each of the two images
_BLOCK = 2048


def whiten_features(image_features: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, D): the features, scaled to length 1, whitened by their own principal components and scaled again."""
    rows = normalize_rows(image_features).astype(np.float64)
    centered = rows - rows.mean(axis=0)
    variances, components = np.linalg.eigh(centered.T @ centered / len(rows))
    floor = max(_MIN_FLOOR, rows.shape[1] / len(rows)) * variances.mean()
    if not floor > 0:  # all images are equal
        return rows.astype(np.float32)
    whitened = normalize_rows(centered @ components / np.sqrt(np.maximum(variances, 0) + floor))
    return np.nan_to_num(whitened)  # an image in the very middle is near to none


def measure_crowding(rows: NDArray[np.float32], device: str | torch.device = "cpu") -> NDArray[np.float32]:
    """(n,): the mean similarity of each row to its second to sixth neighbor; the first may be its duplicate."""
    values, count = torch.from_numpy(rows).to(device), min(2 + _CROWD, len(rows))
    crowding = np.zeros(len(rows), dtype=np.float32)
    for start in range(0, len(rows), _BLOCK):
        block = values[start : start + _BLOCK]
        best = (block @ values.T).topk(count, dim=1).values[:, 2:]  # without itself and its first neighbor
        crowding[start : start + len(block)] = best.mean(dim=1).cpu().numpy() if best.shape[1] else 0
    return crowding


def find_feature_duplicates(
    image_features: NDArray[np.float32],
    threshold: float = DEFAULT_THRESHOLD,
    *,
    device: str | torch.device = "cpu",
    progress: ProgressCallback = ignore_progress,
) -> SimilarPairs:
    """Pairs of images that are probably duplicates, by features (n, D), the likeliest first."""
    if len(image_features) < 2:
        return SimilarPairs(np.empty((0, 2), dtype=np.int64), np.empty(0, dtype=np.float32))
    rows = whiten_features(image_features)
    offsets = _CROWD_WEIGHT * measure_crowding(rows, device)
    return find_similar_pairs(rows, threshold, offsets=offsets, device=device, progress=progress)


# --- of a dataset ----------------------------------------------------------------------------------------------------


class ScanFeatures(NamedTuple):
    """The features of a scan's decoded images, and the indices of these images."""

    values: NDArray[np.float32]  # (m, D)
    images: IntArray  # (m,)


def extract_scan_features(
    trained: Trained,
    scan: DatasetScan,
    *,
    batch: int = 64,
    workers: int = 0,
    progress: ProgressCallback = ignore_progress,
) -> ScanFeatures:
    """Compute the features of all images that the scan decoded, or take them from the cache."""
    preprocess, digest = require_preprocess(trained), features.digest_model(trained.model)
    decoded = scan.fingerprinted_images[scan.image_facts["status"][scan.fingerprinted_images] == DECODED]
    values, done = list[NDArray[np.float32]](), 0

    def report(done_in_split: int, _: int) -> None:
        progress(done + done_in_split, len(decoded))

    for number, split in enumerate(scan.dataset.splits.values()):
        indices = scan.index_in_split[decoded[scan.split_index[decoded] == number]]
        readable = Split(split.store, np.asarray(split.rows)[indices])
        path = features.build_cache_path(digest, features.digest_images(readable), preprocess)
        found = features.load_cached_features(path)
        if found is None:
            found = features.extract_split_features(
                trained.model, readable, preprocess, SINGLE_PROCESS, batch=batch, workers=workers, progress=report
            )
            features.cache_features(path, found)
        values.append(found.numpy())
        done += len(indices)
    if not done:
        raise UsageError(f"{scan.dataset.name} has no image that could be decoded, so none has features")
    return ScanFeatures(np.concatenate(values), decoded)
