"""`vitrail.predict` and `vitrail.embed`: the command's rows and features, and images in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as run_command
from vitrail.errors import DataError, UsageError

MODEL = "model.safetensors"


def test_the_command_and_predict_write_the_same_rows(capfd: Capture) -> None:
    code, _, _ = run_command("predict", MODEL, "photos", "--top", "2", "--out", "command.csv", capsys=capfd)
    assert code == 0
    predictions = vitrail.predict(MODEL, "photos", top=2, out="python.csv")
    assert Path("python.csv").read_bytes() == Path("command.csv").read_bytes()
    assert capfd.readouterr().out == ""
    assert len(predictions) == 30
    assert all(len(prediction.labels) == 2 for prediction in predictions)
    with pytest.raises(UsageError, match=r"python.csv exists: give another `out`"):
        vitrail.predict(MODEL, "photos", out="python.csv")
    with pytest.raises(UsageError, match="no known suffix"):
        vitrail.predict(MODEL, "photos", out="rows.npy")


def test_the_command_and_embed_give_the_same_features(capsys: Capture) -> None:
    assert run_command("predict", MODEL, "photos", "--embed", "--out", "features.npy", capsys=capsys)[0] == 0
    features = vitrail.embed(MODEL, "photos")
    assert features.dtype == np.float32
    assert np.array_equal(features, np.load("features.npy"))


def test_images_in_memory_are_predicted_like_their_files() -> None:
    paths = sorted(Path("photos/test").glob("*/*.png"))
    images = [Image.open(path).copy() for path in paths]
    expected = [prediction.labels for prediction in vitrail.predict(MODEL, paths)]
    forms: list[Any] = [
        images,
        [path.read_bytes() for path in paths],
        np.stack([np.asarray(image) for image in images]),
    ]
    for form in (*forms, iter(images)):
        predictions = vitrail.predict(MODEL, form)
        assert [prediction.labels for prediction in predictions] == expected
        assert predictions[0].image == "image 0"
    for one in (images[0], paths[0], str(paths[0]), paths[0].read_bytes(), np.asarray(images[0])):
        (prediction,) = vitrail.predict(MODEL, one)
        assert prediction.labels == expected[0]
    gray = np.zeros((3, 8, 8), np.uint8)
    assert vitrail.embed(MODEL, gray).shape == (3, 32)
    assert vitrail.embed(MODEL, gray[0]).shape == (1, 32)


def test_an_unreadable_image_is_named_in_its_row_and_an_error_of_embed() -> None:
    Path("broken.jpg").write_bytes(b"no image")
    predictions = vitrail.predict(MODEL, ["broken.jpg", "photos/test/rose/0.png"])
    broken, readable = predictions
    assert (broken.label, broken.probability, broken.labels) == (None, None, [])
    assert "broken.jpg" in broken.error
    assert readable.label in ("rose", "tulip")
    assert not readable.error
    assert "1 cannot be read" in repr(predictions)
    with pytest.raises(DataError, match=r"broken.jpg"):
        vitrail.embed(MODEL, ["broken.jpg"])
    with pytest.raises(DataError, match="no images"):
        vitrail.embed(MODEL, [])


def test_an_exported_file_predicts_labels_alone() -> None:
    pytest.importorskip("onnxruntime")
    vitrail.convert(MODEL, "model.onnx", "onnx")
    for model in ("model.onnx", Path("model.onnx")):
        labels = [prediction.label for prediction in vitrail.predict(model, "photos/test")]
        assert labels == [prediction.label for prediction in vitrail.predict(MODEL, "photos/test")]
    with pytest.raises(UsageError, match=r"^vitrail.embed is for models"):
        vitrail.embed(Path("model.onnx"), "photos/test")


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no option 'bath': did you mean batch\?"):
        vitrail.predict(MODEL, "photos", bath=3)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="no option 'attention'"):
        vitrail.embed(MODEL, "photos", attention="rollouts")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"^top is 0"):
        vitrail.predict(MODEL, "photos", top=0)
