"""`vitrail zero-shot`: the file it writes, what it prints, and its exit codes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import model_factory, text_towers
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import make_image
from vitrail import load, save


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with labels.txt, cat.jpg and an image tower."""
    monkeypatch.chdir(tmp_path)
    Path("labels.txt").write_text("cat\ndog\n")
    make_image(0).save("cat.jpg")
    save(model_factory.build_trained(model_factory.build_vit(classes=0)), "tower.safetensors")


def test_a_whole_clip_and_a_list_of_labels_become_a_model_that_predicts(capsys: Capture) -> None:
    text_towers.write_clip(Path("clip"))
    capsys.readouterr()
    templates = ("--templates", "a photo of a {}.", "art of the {}!")
    code, out, err = vitrail("zero-shot", "clip", "labels.txt", *templates, "--device", "cpu", capsys=capsys)
    assert (code, err) == (0, "model: clip\n")
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert lines[-2:] == [["labels", "2"], ["written", "labels.safetensors"]]
    assert "clip by transformers, templates 'a photo of a {}.', 'art of the {}!'" in lines[-4][1]
    assert lines[-3][1] == "head: scale 12.1825, a softmax"
    code, out, _ = vitrail("predict", "labels.safetensors", "cat.jpg", "--top", "2", "--json", capsys=capsys)
    assert code == 0
    assert {row["label"] for row in json.loads(out)["predictions"]} == {"cat", "dog"}
    code, out, _ = vitrail("info", "labels.safetensors", capsys=capsys)
    assert "head: scale 12.1825, a softmax" in out


def test_json_says_what_was_written(capsys: Capture) -> None:
    np.save("texts.npy", np.eye(2, 32, dtype=np.float32))
    options = ("--text-vectors", "texts.npy", "--scale", "50", "--bias", "-2", "--out", "pets.safetensors", "--json")
    code, out, _ = vitrail("zero-shot", "tower.safetensors", "labels.txt", *options, capsys=capsys)
    assert code == 0
    assert json.loads(out) == {
        "written": "pets.safetensors",
        "labels": ["cat", "dog"],
        "changes": ["head.weight (2, 32): vectors of texts, texts.npy", "head: scale 50, bias -2, sigmoids"],
        "multi_label": True,
    }
    assert load("pets.safetensors").labels == ("cat", "dog")
    code, _, err = vitrail("zero-shot", "tower.safetensors", "labels.txt", *options, capsys=capsys)
    assert (code, "pets.safetensors exists already" in err) == (2, True)
    assert vitrail("zero-shot", "tower.safetensors", "labels.txt", *options, "--overwrite", capsys=capsys)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("tower.safetensors", "labels.txt"), 2, "tower.safetensors has no text tower: name the folder or Hub name"),
        (("tower.safetensors", "nothing.txt"), 2, "'nothing.txt' must be a text file with one per line"),
        (("tower.safetensors", "labels.txt", "--out", "pets.onnx"), 2, "call it pets.safetensors"),
        (("tower.safetensors", "labels.txt", "--text-vectors", "texts.npy"), 4, "texts.npy cannot be read"),
        (("tower.safetensors", "labels.txt", "--text-vectors", "x.npy", "--text", "clip"), 2, "omit --text and --temp"),
        (("clip", "labels.txt"), 2, "needs transformers: pip install 'vitrail[zero-shot]'. Or give vectors of the"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], code: int, message: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if arguments[0] == "clip":
        text_towers.write_clip(Path("clip"))
        capsys.readouterr()
        monkeypatch.setitem(sys.modules, "transformers", None)
    ended, out, err = vitrail("zero-shot", *arguments, capsys=capsys)
    assert (ended, out) == (code, "")
    assert message in err
    assert err.removeprefix(f"model: {arguments[0]}\n").count("\n") == 1
    assert not Path("labels.safetensors").exists()
