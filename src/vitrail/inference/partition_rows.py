"""Features as NumPy partitions with a table of their rows, in the folders that clip-retrieval writes.

    FOLDER/img_emb/img_emb_00000.npy             (n, D), NaN where an image cannot be read
    FOLDER/metadata/metadata_00000.parquet       image_path, error

embedding_reader, autofaiss and clip-retrieval's own index read this layout (Beaumont, 2022). They sort the partitions
by name, so numbers have leading zeros. A partition is complete with its table, which is written last: a command
continues after the last complete one.
"""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vitrail import files, locks
from vitrail.inference.parquet_rows import import_pyarrow
from vitrail.inference.prediction_rows import PredictionRow, StoredImage, WriteRows, WrittenRows, make_valid_text

PARTITION_IMAGES = 16_384  # at least, and a multiple of the batch; memory holds a partition, 50 MB of 768 features


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionRows:
    """A folder of partitions."""

    folder: Path
    features: int
    batch: int
    dtype: str = "<f4"

    @property
    def unit(self) -> int:
        """Images of a partition: whole batches."""
        return self.batch * math.ceil(PARTITION_IMAGES / self.batch)

    def get_paths(self, number: int) -> tuple[Path, Path]:
        """The matrix and the table of a partition."""
        matrix = self.folder / "img_emb" / f"img_emb_{number:05}.npy"
        return matrix, self.folder / "metadata" / f"metadata_{number:05}.parquet"

    def list_files(self) -> list[Path]:
        """The files of all partitions, matrices first; of a folder that holds others, these too, so that it is kept."""
        return sorted(path for path in self.folder.rglob("*") if path.is_file() and not path.name.startswith("."))

    def iterate_stored(self) -> Iterator[StoredImage]:
        """The images of complete partitions."""
        for number in range(self.count_partitions()):
            yield from (StoredImage(name, error is not None) for name, error in self._read_table(number))

    @contextlib.contextmanager
    def open_writer(self, written: WrittenRows) -> Iterator[WriteRows]:
        """Open a function that collects rows and writes a partition when there are enough."""
        import_pyarrow()
        number, waiting = math.ceil(written.images / self.unit), list[PredictionRow]()
        with locks.hold_lock(self.folder.with_name(f".{self.folder.name}.lock"), str(self.folder)):

            def write(rows: Sequence[PredictionRow]) -> None:
                nonlocal number
                waiting.extend(rows)
                while len(waiting) >= self.unit:
                    self._write_partition(number, waiting[: self.unit])
                    number += 1
                    del waiting[: self.unit]

            yield write
            if waiting or number == 0:
                self._write_partition(number, waiting)

    def write_merged(self, parts: "Sequence[PartitionRows]") -> None:
        """Copy the partitions of all parts, numbered anew."""
        sources = [part.get_paths(number) for part in parts for number in range(part.count_partitions())]
        for number, paths in enumerate(sources):
            for source, target in zip(paths, self.get_paths(number), strict=True):
                files.make_folder(target.parent)
                shutil.copyfile(source, target)

    def _write_partition(self, number: int, rows: Sequence[PredictionRow]) -> None:
        pa, parquet = import_pyarrow()
        matrix_path, table_path = self.get_paths(number)
        missing = np.full(self.features, np.nan, dtype=self.dtype)
        features = [missing if row.features is None else row.features.astype(self.dtype) for row in rows]
        table = pa.table(
            {
                "image_path": pa.array([make_valid_text(row.image) for row in rows], pa.string()),
                "error": pa.array([make_valid_text(row.error) if row.error else None for row in rows], pa.string()),
            }
        )
        with files.write_atomically(matrix_path, overwrite=True) as fresh:
            np.save(fresh, np.stack(features) if rows else np.empty((0, self.features), self.dtype))
        with files.write_atomically(table_path, overwrite=True) as fresh:
            parquet.write_table(table, fresh)

    def count_partitions(self) -> int:
        """Partitions that are complete."""
        number = 0
        while all(path.exists() for path in self.get_paths(number)):
            number += 1
        return number

    def _read_table(self, number: int) -> list[tuple[str, str | None]]:
        _, parquet = import_pyarrow()
        table = parquet.read_table(self.get_paths(number)[1])
        return list(zip(*(table.column(name).to_pylist() for name in ("image_path", "error")), strict=True))
