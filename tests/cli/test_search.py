"""`vitrail index` and `vitrail search`: what they print, and what they refuse."""

import csv
import io
import json
from pathlib import Path

import pytest

import vitrail
from tests import model_factory
from tests.cli.test_cli import Capture, run
from tests.data.image_files import write_image_folder
from vitrail.weights.load import save


@pytest.fixture
def indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> list[str]:
    """The names of the images in photos.index, made by the commands."""
    monkeypatch.chdir(tmp_path)
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.safetensors")
    write_image_folder(tmp_path / "photos", each=4)
    (tmp_path / "photos" / "bad.jpg").write_bytes(b"\xff\xd8\xff and no more")
    code, *_ = run("predict", "model.safetensors", "photos", "--embed", "--out", "features.npy", capsys=capsys)
    assert code == 3
    code, out, err = run("index", "features.npy", "--out", "photos.index", capsys=capsys)
    assert (code, "left out: 1 image without features" in err) == (0, True)
    facts = dict(line.split(maxsplit=1) for line in out.splitlines())
    index = vitrail.index("features.npy", "again.index")
    assert facts["images"] == str(len(index.rows))
    assert facts["features"] == "class, 32 per image, float16"
    assert facts["model"] == str(tmp_path / "model.safetensors")
    assert facts["written"].startswith("photos.index (")
    return [index.get_name(row) for row in range(len(index.rows))]


def test_rows_are_csv_json_lines_or_a_table(indexed: list[str], capsys: Capture) -> None:
    queries = [indexed[2], indexed[5]]
    results = vitrail.search("photos.index", list(queries), top=3)
    code, out, _ = run("search", "photos.index", *queries, "--top", "3", capsys=capsys)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    expected = [(result.image, str(rank), n.image, f"{n.similarity:.6f}", "")
                for result in results for rank, n in enumerate(result.neighbors, 1)]  # fmt: skip
    assert [tuple(row.values()) for row in rows] == expected
    _, out, _ = run("search", "photos.index", *queries, "--top", "3", "--json", capsys=capsys)
    objects = [json.loads(line) for line in out.splitlines()]
    assert objects == [{"image": r.image, "neighbors": [n._asdict() for n in r.neighbors]} for r in results]
    _, out, _ = run("search", "photos.index", *queries, "--top", "1", "--format", "table", capsys=capsys)
    similarity, neighbor, image = out.splitlines()[0].split()
    assert (neighbor, image) == (queries[0], queries[0])
    assert float(similarity) == pytest.approx(1, abs=1e-3)


def test_an_unreadable_image_has_its_row_and_exit_code_3(indexed: list[str], capsys: Capture) -> None:
    code, out, err = run("search", "photos.index", "photos/bad.jpg", indexed[0], "--top", "1", capsys=capsys)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert (code, [row["rank"] for row in rows]) == (3, ["", "1"])
    assert "photos/bad.jpg" in rows[0]["error"]
    assert "1 of 2 images cannot be read; the error column says why" in err
    _, out, _ = run("search", "photos.index", "photos/bad.jpg", "--json", capsys=capsys)
    assert json.loads(out).keys() == {"image", "error"}


def test_names_are_searched_without_the_model(indexed: list[str], capsys: Capture) -> None:
    Path("model.safetensors").unlink()
    code, out, _ = run("search", "photos.index", indexed[1], "--by-name", "--top", "2", capsys=capsys)
    assert (code, [row["rank"] for row in csv.DictReader(io.StringIO(out))]) == (0, ["1", "2"])
    code, _, err = run("search", "photos.index", indexed[1], capsys=capsys)
    assert (code, "which is gone: add --model MODEL" in err) == (2, True)


def test_index_as_json_and_what_is_refused(indexed: list[str], capsys: Capture) -> None:
    _, out, _ = run("index", "features.npy", "--out", "third.index", "--json", capsys=capsys)
    facts = json.loads(out)
    assert (facts["images"], facts["left_out"], facts["dtype"]) == (len(indexed), 1, "float16")
    code, _, err = run("index", "features.npy", "--out", "photos.index", capsys=capsys)
    assert (code, "exists already" in err) == (2, True)
    assert run("index", "features.npy", "--out", "photos.index", "--overwrite", capsys=capsys)[0] == 0
    assert "name the images" in run("search", "photos.index", capsys=capsys)[2]
    both = ("search", "photos.index", indexed[0], "--json", "--format", "csv")
    assert "--format csv was given too" in run(*both, capsys=capsys)[2]
    assert "--top is 0" in run("search", "photos.index", indexed[0], "--top", "0", capsys=capsys)[2]
