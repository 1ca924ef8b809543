"""An index of features on disk, searched by cosine similarity (`vitrail index`, `vitrail search`).

    INDEX/features.npy    float16 or float32 (n, D): the features of each readable image, scaled to length 1
    INDEX/names.bin       the names of the rows, UTF-8, one after another
    INDEX/name_ends.npy   int64 (n,): where each name ends
    INDEX/index.json      the version, the model (its digest, config and preprocessing), the kind of features, counts

It is written in one pass over the files of features, with a block of them in memory, and read through memory maps: n
rows of D float16 features take 2 n D bytes of disk, and 8 bytes and the name of each.
"""

import contextlib
import json
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from vitrail import files
from vitrail.config import PreprocessConfig, from_json, to_json
from vitrail.config.features import FeatureKind, describe_features, list_feature_kinds
from vitrail.errors import DataError, UsageError
from vitrail.inference.cosine_search import Neighbors, Rows, find_nearest, normalize_rows
from vitrail.inference.feature_files import MODEL_KEYS, FeatureBlock, FeatureFile
from vitrail.inference.row_files import upgrade_model_config
from vitrail.runtime.workers import ProgressCallback, ignore_progress
from vitrail.weights.tensor_files import digest_tensors
from vitrail.weights.trained import Trained

__all__ = ["FeatureIndex", "IndexDtype"]

IndexDtype = Literal["float16", "float32"]
_FEATURES, _NAMES, _NAME_ENDS, _RECORD = "features.npy", "names.bin", "name_ends.npy", "index.json"
_MATRICES = (_FEATURES, _NAMES, _NAME_ENDS)
_RECORD_KEYS = ("images", "width", "dtype", "left_out", "model", "features")
_ADVICE = "vitrail index FEATURES --out INDEX writes one"


class FeatureIndex(NamedTuple):
    """An index that is open: its record, and maps of its files.

    `vitrail.index` returns one.

        vitrail.embed("model.safetensors", "photos", out="features.npy")
        index = vitrail.index("features.npy", "photos.index")
        print(len(index.rows), index.get_name(0), index.find_row(index.get_name(1)))
    """

    path: Path
    record: Mapping[str, Any]
    rows: Rows
    name_ends: NDArray[np.int64]
    names: mmap.mmap | bytes

    def get_name(self, row: int) -> str:
        """The name of the image of a row."""
        start = int(self.name_ends[row - 1]) if row else 0
        return self.names[start : int(self.name_ends[row])].decode(errors="surrogateescape")

    def find_row(self, name: str) -> int | None:
        """The first row of that name; None where there is none."""
        encoded, position = name.encode(errors="surrogateescape"), -1
        while encoded and (position := self.names.find(encoded, position + 1)) >= 0:
            row = int(np.searchsorted(self.name_ends, position, side="right"))
            start = int(self.name_ends[row - 1]) if row else 0
            if (position, position + len(encoded)) == (start, int(self.name_ends[row])):
                return row
        return None

    def find_nearest(
        self,
        queries: NDArray[np.float32],
        top: int,
        *,
        device: str | torch.device = "cpu",
        progress: ProgressCallback = ignore_progress,
    ) -> Neighbors:
        """The `top` rows nearest to each query (Q, D), by cosine similarity; ties in the order of the rows."""
        return find_nearest(self.rows, queries, top, device=device, progress=progress)


def write_index(
    sources: Sequence[FeatureFile],
    out: Path,
    *,
    version: str,
    dtype: IndexDtype = "float16",
    overwrite: bool = False,
    progress: ProgressCallback = ignore_progress,
) -> FeatureIndex:
    """Write the index of files of features, whole or not at all."""
    width, total, record = sources[0].width, sum(source.num_rows for source in sources), sources[0].record
    if overwrite and out.exists() and not (out / _RECORD).is_file():
        raise UsageError(f"{out} is no index, so it is not overwritten: choose another --out")
    done = images = 0
    with files.write_atomically(out, overwrite=overwrite) as fresh:
        fresh.mkdir()
        with contextlib.ExitStack() as stack:
            rows, names, ends = (stack.enter_context((fresh / name).open("xb")) for name in _MATRICES)
            _write_header(rows, np.dtype(dtype), (0, width))
            _write_header(ends, np.dtype(np.int64), (0,))
            for source in sources:
                if source.width != width:
                    raise DataError(f"{source.path} has rows of {source.width} features, not {width} as the first file")
                for block in source.iterate_blocks():
                    images += _append_block(block, np.dtype(dtype), rows, names, ends)
                    done += len(block.names)
                    progress(done, total)
            _write_header(rows, np.dtype(dtype), (images, width))
            _write_header(ends, np.dtype(np.int64), (images,))
        if not images:
            raise DataError(f"{sources[0].path} has no image that could be read, so there is nothing to index")
        facts: dict[str, Any] = {
            "vitrail": version,
            "images": images,
            "width": width,
            "dtype": dtype,
            "left_out": done - images,
            "model_name": record.get("model_name"),
            "model": {key: record["model"][key] for key in MODEL_KEYS},
            "features": record["--features"],
            "precision": record.get("--precision", "float32"),
        }
        (fresh / _RECORD).write_text(json.dumps(facts, indent=1))
    return open_index(out)


def _append_block(block: FeatureBlock, dtype: np.dtype[Any], rows: IO[bytes], names: IO[bytes], ends: IO[bytes]) -> int:
    """Append the readable rows of a block, scaled to length 1; return how many."""
    normalized = normalize_rows(block.features)
    chosen = np.flatnonzero(block.readable & np.isfinite(normalized).all(axis=1))
    encoded = [block.names[row].encode(errors="surrogateescape") for row in chosen]
    ends.write((names.tell() + np.cumsum([len(name) for name in encoded], dtype=np.int64)).tobytes())
    names.write(b"".join(encoded))
    rows.write(normalized[chosen].astype(dtype).tobytes())
    return len(chosen)


def _write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Write or replace the header of a matrix; NumPy leaves room in it for the number of rows to grow."""
    file.seek(0)
    header = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy_format.write_array_header_1_0(file, header)


def open_index(path: Path) -> FeatureIndex:
    """Open an index; refuse a damaged one."""
    if not path.exists():
        raise DataError(f"{path} does not exist{files.suggest_path(path)}; {_ADVICE}")
    try:
        record = json.loads((path / _RECORD).read_text())
        rows = np.load(path / _FEATURES, mmap_mode="r", allow_pickle=False)
        ends = np.load(path / _NAME_ENDS, mmap_mode="r", allow_pickle=False)
        with (path / _NAMES).open("rb") as file:
            size = (path / _NAMES).stat().st_size
            names = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        is_whole = (
            set(_RECORD_KEYS) <= record.keys()
            and rows.shape == (record["images"], record["width"])
            and rows.dtype == np.dtype(record["dtype"])
            and ends.shape == (len(rows),)
            and int(ends[-1]) == size
        )
    except (OSError, ValueError, EOFError, AttributeError, TypeError, IndexError) as error:
        raise DataError(f"{path} is no index ({error}); {_ADVICE}") from error
    if not is_whole:
        raise DataError(f"{path} is damaged: its files do not fit its {_RECORD}; {_ADVICE}")
    return FeatureIndex(path, record, rows, ends, names)


# --- the model of an index -------------------------------------------------------------------------------------------


def is_model_of(record: Mapping[str, Any], trained: Trained) -> bool:
    """Whether the features of an index are this model's: the same weights, architecture and preprocessing."""
    recorded = record["model"]
    config = json.loads(json.dumps(to_json(trained.model.config)))  # which makes lists of tuples
    return (
        upgrade_model_config(recorded["config"]) == config
        and from_json(PreprocessConfig, recorded["preprocess"]) == trained.preprocess
        and digest_tensors(trained.model.state_dict()) == recorded["weights"]
    )


def choose_feature_kind(record: Mapping[str, Any], trained: Trained) -> FeatureKind:
    """The kind of the model's features that an index holds."""
    config = trained.model.config
    kinds: tuple[FeatureKind, ...] = ("default", *list_feature_kinds(config))
    for kind in kinds:
        if describe_features(config, kind) == record["features"]:
            return kind
    raise DataError(f"the index holds {record['features']} features, which its model does not have; {_ADVICE}")
