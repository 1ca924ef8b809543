"""Lines of rows by hand (how files of them are continued: test_row_files.py, whole commands: cli/test_predict.py)."""

from pathlib import Path

import numpy as np

from vitrail.inference.prediction_rows import PredictionRow, WrittenRows
from vitrail.inference.text_rows import MatrixRows, format_header, format_row

GOOD = PredictionRow("a.jpg", labels=[("rose", 0.75), ("=tulip", 0.25)])
BAD = PredictionRow("b.jpg", error="is not an image")


def test_lines_by_hand() -> None:
    assert format_header("csv", attention=True) == "image,rank,label,probability,error,attention\r\n"
    assert format_header("jsonl", attention=False) == ""
    assert format_row(GOOD, "csv") == "a.jpg,1,rose,0.750000,\r\na.jpg,2,'=tulip,0.250000,\r\n"
    assert format_row(GOOD._replace(labels=[("unsure", 0.75), *GOOD.labels], attention="a.png"), "csv") == (
        "a.jpg,0,unsure,0.750000,,a.png\r\na.jpg,1,rose,0.750000,,a.png\r\na.jpg,2,'=tulip,0.250000,,a.png\r\n"
    )
    assert format_row(GOOD._replace(labels=GOOD.labels[:1]), "jsonl") == (
        '{"image": "a.jpg", "predictions": [{"label": "rose", "probability": 0.75}]}\n'
    )
    assert format_row(BAD, "csv") == "b.jpg,,,,is not an image\r\n"
    assert format_row(BAD, "jsonl") == '{"image": "b.jpg", "error": "is not an image"}\n'
    assert format_row(GOOD, "names") == "a.jpg,\r\n"


def test_a_matrix_may_be_half_as_wide(tmp_path: Path) -> None:
    values = np.linspace(-2, 2, 12, dtype=np.float32).reshape(4, 3)
    for dtype in ("<f4", "<f2"):
        store = MatrixRows(path=tmp_path / f"{dtype[1:]}.npy", features=3, unit=2, dtype=dtype)
        with store.open_writer(WrittenRows()) as write:
            write([PredictionRow(f"{number}.jpg", features=row) for number, row in enumerate(values)])
        assert np.array_equal(np.load(store.path), values.astype(dtype))
        assert [image.image for image in store.iterate_stored()] == [f"{number}.jpg" for number in range(4)]
