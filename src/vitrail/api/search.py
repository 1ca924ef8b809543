"""Index the features of images and search them from Python: `vitrail.index` and `vitrail.search`."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from vitrail import __version__
from vitrail.api.images import Images, list_images
from vitrail.api.keyword_errors import name_keywords
from vitrail.api.models import AnyModel, get_model_name, load_trained
from vitrail.api.options import document_options
from vitrail.api.prediction import PredictKeywords, collect_rows
from vitrail.api.prediction_files import PredictOptions
from vitrail.api.progress import NoteCollector, Progress, choose_progress
from vitrail.errors import DataError, UsageError
from vitrail.formatting import pluralize
from vitrail.inference.feature_files import list_feature_files
from vitrail.inference.feature_index import (
    FeatureIndex,
    IndexDtype,
    choose_feature_kind,
    is_model_of,
    open_index,
    write_index,
)
from vitrail.runtime.devices import resolve_device
from vitrail.runtime.workers import Notify
from vitrail.weights.trained import Trained

__all__ = ["Neighbor", "SearchResult", "index", "search"]


class Neighbor(NamedTuple):
    """An image of an index that is near to a query.

    A `SearchResult` holds several.

        vitrail.embed("model.safetensors", "photos", out="features.npy")
        vitrail.index("features.npy", "photos.index")
        neighbor = vitrail.search("photos.index", "cat.jpg", top=3)[0].neighbors[0]
        print(neighbor.image, neighbor.similarity, neighbor.row)
    """

    image: str
    similarity: float
    """Cosine, from -1 to 1."""
    row: int
    """Its row in the index."""


class SearchResult(NamedTuple):
    """The images of an index nearest to one image; none, and a reason in `error`, where it cannot be read.

    `vitrail.search` returns one for each image.

        vitrail.embed("model.safetensors", "photos", out="features.npy")
        vitrail.index("features.npy", "photos.index")
        for result in vitrail.search("photos.index", ["cat.jpg", "dog.jpg"]):
            print(result.image, result.error or result.neighbors[0].image)
    """

    image: str
    neighbors: tuple[Neighbor, ...]
    """The most similar first; equal ones in the order of the index."""
    error: str = ""


@name_keywords
def index(
    features: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    dtype: IndexDtype = "float16",
    overwrite: bool = False,
    progress: Progress = True,
    notify: Notify | None = None,
) -> FeatureIndex:
    """Make features searchable by `vitrail.search`: `vitrail index` from Python, with its defaults.

        vitrail.embed("model.safetensors", "photos", out="features.npy")
        print(vitrail.index("features.npy", "photos.index").record["images"])

    Arguments:

    - `features`: A file of features of `embed` or `vitrail predict --embed`, .npy or .parquet; a folder of such files,
      or a list.
    - `out`: The folder to write.
    - `dtype`: "float16" takes half the space; similarities then differ by less than 0.001.
    - `overwrite`: Replace the index of that name.
    - `progress`: Whether a bar is shown, or a function that shows progress.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    notes, named = NoteCollector(notify), [features] if isinstance(features, str | Path) else features
    sources = list_feature_files([Path(each) for each in named])
    with choose_progress(progress)("indexing") as report:
        written = write_index(
            sources, Path(out), version=__version__, dtype=dtype, overwrite=overwrite, progress=report
        )
    if left_out := written.record["left_out"]:
        notes(f"left out: {pluralize(left_out, 'image')} without features, which could not be read")
    return written


@document_options(PredictOptions)
@name_keywords
def search(
    index: FeatureIndex | str | Path,
    images: Images,
    *,
    top: int = 20,
    by_name: bool = False,
    model: AnyModel | None = None,
    progress: Progress = True,
    notify: Notify | None = None,
    **options: Unpack[PredictKeywords],
) -> list[SearchResult]:
    """Find the images of an index that are nearest to each image: `vitrail search` from Python, with its defaults.

    An unreadable image is named in its result.

        vitrail.embed("model.safetensors", "photos", out="features.npy")
        photos = vitrail.index("features.npy", "photos.index")
        for neighbor in vitrail.search(photos, "cat.jpg", top=3)[0].neighbors:
            print(neighbor.similarity, neighbor.image)
        vitrail.search(photos, neighbor.image, by_name=True)

    Arguments:

    - `index`: A `FeatureIndex`, or the folder of one.
    - `images`: As in `predict`.
    - `top`: Images found for each.
    - `by_name`: Take `images` as names of images in the index, whose features it has; no model is needed.
    - `model`: Where the model of the index is now; by default, where it was.
    - `progress`: Whether a bar is shown, or a function that shows progress.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    opened = index if isinstance(index, FeatureIndex) else open_index(Path(index))
    if top < 1:
        raise UsageError(f"--top is {top}; it must be at least 1")
    if by_name:
        names, queries = _find_queries(opened, images)
        found = _find_neighbors(opened, queries, top, options.get("device"), progress)
        return [SearchResult(name, each) for name, each in zip(names, found, strict=True)]
    notes = NoteCollector(notify)
    trained = load_index_model(opened, model, notes)
    embed_options = PredictOptions(embed=True, features=choose_feature_kind(opened.record, trained), **options)
    if options.get("precision") is None and opened.record["precision"] != "float32":
        notes(f"computing in {opened.record['precision']}, as the index")
        embed_options = PredictOptions(**vars(embed_options) | {"precision": opened.record["precision"]})
    rows = collect_rows(trained, list_images(images), embed_options, notes, progress)
    readable = [row.features for row in rows if row.features is not None]
    if not readable:
        return [SearchResult(row.image, (), row.error) for row in rows]
    neighbors = iter(_find_neighbors(opened, np.stack(readable), top, options.get("device"), progress))
    return [SearchResult(row.image, () if row.error else next(neighbors), row.error) for row in rows]


def _find_queries(index: FeatureIndex, names: Images) -> tuple[list[str], NDArray[np.float32]]:
    """The names of images in an index, and their features."""
    listed, rows = list_images(names), []
    for name in listed:
        row = index.find_row(str(name)) if isinstance(name, str | Path) else None
        if row is None:
            raise DataError(f"{index.path} has no image called {name!r:.200}: give a name as the search shows it")
        rows.append(row)
    return [str(name) for name in listed], np.asarray(index.rows[rows], dtype=np.float32).reshape(len(rows), -1)


def _find_neighbors(
    index: FeatureIndex, queries: NDArray[np.float32], top: int, device: str | None, progress: Progress
) -> "list[tuple[Neighbor, ...]]":
    with choose_progress(progress)("searching") as report:
        found = index.find_nearest(queries, top, device=resolve_device(device), progress=report)
    return [
        tuple(Neighbor(index.get_name(row), similarity, row) for row, similarity in zip(*each, strict=True))
        for each in zip(found.rows.tolist(), found.similarities.tolist(), strict=True)
    ]


def load_index_model(index: FeatureIndex, model: AnyModel | None, notify: Notify) -> Trained:
    """The model whose features an index holds: the one given, or the one that its record names; no other."""
    if model is None:
        name: str | None = index.record["model_name"]
        if name is None:
            raise UsageError(f"{index.path} does not record where its model is: add --model MODEL")
        if Path(name).is_absolute() and not Path(name).exists():
            raise UsageError(f"the model of {index.path} was {name}, which is gone: add --model MODEL")
        model = name
    trained = load_trained(model, notify)
    if not is_model_of(index.record, trained):
        raise UsageError(
            f"{get_model_name(model)} is not the model of {index.path}, whose weights have the digest"
            f" {index.record['model']['weights'][:12]}: features of two models cannot be compared"
        )
    return trained
