"""A served index: the images most similar to an uploaded one, and thumbnails of images that the index names."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail import files
from vitrail.errors import DataError, UsageError
from vitrail.inference.classifier import Classifier
from vitrail.inference.feature_index import FeatureIndex, choose_feature_kind, is_model_of
from vitrail.serving.batching import BatchFunction, BatchQueue
from vitrail.serving.limits import RefusedError
from vitrail.weights.trained import Trained

MAX_NEIGHBORS = 100
MAX_OPEN_THUMBNAILS = 8  # whose files are in memory at once


@dataclasses.dataclass(frozen=True)
class ServedIndex:
    """An index, searched by one thread, with the model of its features."""

    index: FeatureIndex
    model: str  # its name among the served models
    extract_features: BatchFunction
    device: torch.device
    queue: BatchQueue
    image_root: Path | None = None  # below which thumbnails are read; none are without it

    def search(self, features: Sequence[Tensor]) -> list[list[dict[str, Any]]]:
        """The nearest images of each (D,), as the response has them."""
        queries = torch.stack(list(features)).numpy()
        found = self.index.find_nearest(queries, MAX_NEIGHBORS, device=self.device)
        return [
            [self._describe(row, similarity) for row, similarity in zip(*each, strict=True)]
            for each in zip(found.rows.tolist(), found.similarities.tolist(), strict=True)
        ]

    def _describe(self, row: int, similarity: float) -> dict[str, Any]:
        name = self.index.get_name(row).encode(errors="surrogateescape").decode(errors="replace")
        return {"row": row, "image": name, "similarity": similarity, "thumbnail": self.find_file(row) is not None}

    def find_file(self, row: int) -> Path | None:
        """The file of a row's image, if the index names one below the root, links followed; no request names a path."""
        if self.image_root is None or not 0 <= row < len(self.index.rows):
            return None
        try:
            root = self.image_root.resolve(strict=True)
            path = (root / self.index.get_name(row)).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):  # it is gone, or no path; RuntimeError is a loop of links
            return None
        return path if path.is_relative_to(root) and path.is_file() else None

    def read_file(self, row: int, max_bytes: int) -> bytes:
        """The bytes of a row's image."""
        path = self.find_file(row)
        if path is None:
            raise RefusedError(404, f"row {row} has no thumbnail")
        try:
            with files.open_regular_file(path, name=f"the image of row {row}") as file:
                content = file.read(max_bytes + 1)
        except (OSError, DataError) as error:
            raise RefusedError(404, f"row {row} has no thumbnail") from error
        if len(content) > max_bytes:
            raise RefusedError(413, f"the image of row {row} is larger than a request may be")
        return content


def serve_index(
    index: FeatureIndex, classifiers: Mapping[str, Classifier], queue: BatchQueue, image_root: Path | None = None
) -> ServedIndex:
    """Serve an index with the one of the served models whose features it holds."""
    if image_root is not None and not image_root.is_dir():
        raise UsageError(f"--image-root {image_root} is no folder; the names in the index are paths below it")
    for name, classifier in classifiers.items():
        trained = Trained(classifier.model, classifier.preprocess)
        if is_model_of(index.record, trained):
            kind, precision = choose_feature_kind(index.record, trained), index.record["precision"]
            build = functools.partial(Classifier, device=classifier.device, batch_size=classifier.batch_size)
            extract = build(trained, precision=precision, features=kind).extract_features
            return ServedIndex(index, name, extract, classifier.device, queue, image_root)
    where = index.record["model_name"] or f"the one of weights {index.record['model']['weights'][:12]}"
    raise UsageError(f"--index {index.path} holds the features of another model: serve {where} too")
