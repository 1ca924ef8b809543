"""Small Parquet files of images, for tests of everything that reads them; without pyarrow their tests skip."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.image_files import encode_image, make_image


def write_table(path: Path, columns: dict[str, Any], rows: int = 4, features: dict[str, Any] | None = None) -> Path:
    """A Parquet file with `rows` in each row group, and Hugging Face's description of its columns where it is given."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'vitrail[parquet]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(columns)
    if features:
        info = json.dumps({"info": {"features": features}}).encode()
        table = table.replace_schema_metadata({b"huggingface": info})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=rows)
    return path


def make_cells(count: int, start: int = 0) -> list[bytes]:
    return [encode_image(make_image(start + number)) for number in range(count)]


def write_hub_files(root: Path) -> dict[str, list[bytes]]:
    """Two files of train and one of test, as Hugging Face writes them."""
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    images = {}
    for number, (name, count) in enumerate(
        [("train-00000-of-00002", 9), ("train-00001-of-00002", 7), ("test-00000-of-00001", 6)]
    ):
        images[name] = make_cells(count, 100 * number)
        cells = [{"bytes": image, "path": f"{index}.jpg"} for index, image in enumerate(images[name])]
        labels = [index % 2 for index in range(count)]
        write_table(root / "data" / f"{name}.parquet", {"image": cells, "label": labels}, features=features)
    return images
