"""`vitrail.predict`, `embed` and `dense`: the command's rows and features, and images in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

import vitrail
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as run_command
from vitrail.api.images import list_images
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
        vitrail.predict(MODEL, "photos", out="rows.txt")
    with pytest.raises(UsageError, match="holds features alone: it takes"):
        vitrail.predict(MODEL, "photos", out="rows.npy")


def test_the_command_and_embed_give_the_same_features(capsys: Capture) -> None:
    assert run_command("predict", MODEL, "photos", "--embed", "--out", "features.npy", capsys=capsys)[0] == 0
    features = vitrail.embed(MODEL, "photos")
    assert features.dtype == np.float32
    assert np.array_equal(features, np.load("features.npy"))
    assert np.array_equal(vitrail.embed(MODEL, "photos", out="half.npy", float16=True), features)
    assert np.array_equal(np.load("half.npy"), features.astype(np.float16))
    assert run_command("predict", MODEL, "photos", "--embed", "--float16", "--out", "c.npy", capsys=capsys)[0] == 0
    assert Path("c.npy.json").read_bytes() == Path("half.npy.json").read_bytes()


def test_features_are_chosen_by_name() -> None:
    paths = sorted(Path("photos/test").glob("*/*.png"))
    own = vitrail.embed(MODEL, paths)
    assert np.array_equal(vitrail.embed(MODEL, paths, features="class"), own)
    both = vitrail.embed(MODEL, paths, features="class-mean")
    np.testing.assert_allclose(both, np.hstack([own, vitrail.embed(MODEL, paths, features="mean")]), atol=1e-5)
    unit = vitrail.embed(MODEL, paths, features="mean", normalize=True)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-5)
    with pytest.raises(UsageError, match=r'^features="map": the model has no attention pooling; it has class, '):
        vitrail.embed(MODEL, paths, features="map")
    with pytest.raises(UsageError, match="features is 'cls'"):
        vitrail.embed(MODEL, paths, features="cls")


def test_dense_features_are_of_each_patch_and_at_any_size() -> None:
    paths = sorted(Path("photos/test").glob("*/*.png"))
    features = vitrail.dense(MODEL, paths, batch=3)
    assert features.shape == (10, 4, 4, 32)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features.mean(axis=(1, 2)), vitrail.embed(MODEL, paths, features="mean"), atol=1e-5)
    np.testing.assert_allclose(vitrail.dense(MODEL, Image.open(paths[0])), features[:1], atol=1e-5)
    larger = vitrail.dense(MODEL, paths, image_size=(64, 40))
    assert larger.shape == (10, 8, 5, 32)
    adapted = vitrail.adapt(vitrail.load(MODEL), image_size=(64, 40))
    np.testing.assert_allclose(vitrail.dense(adapted, paths), larger, atol=1e-5)
    with pytest.raises(DataError, match="does not exist"):
        vitrail.dense(MODEL, "phtos")
    with pytest.raises(UsageError, match="70 x 64 does not divide into patches"):
        vitrail.dense(MODEL, paths, image_size=(70, 64))


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


class Lazy(Dataset[tuple[Tensor, int]]):
    """As a torchvision dataset with ToTensor; it counts what is read, and has no end of its own."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths, self.reads = paths, 0

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return torch.from_numpy(np.array(Image.open(self.paths[index]))).permute(2, 0, 1) / 255, 0


def test_tensors_and_torch_datasets_are_predicted_like_files() -> None:
    paths = sorted(Path("photos/test").glob("*/*.png"))
    expected = [prediction.labels for prediction in vitrail.predict(MODEL, paths)]
    pixels = torch.from_numpy(np.stack([np.array(Image.open(path)) for path in paths])).permute(0, 3, 1, 2)
    pairs: Any = [(image, "rose") for image in pixels]
    forms: list[Any] = [pixels, pixels / 255, (pixels / 255).numpy(), list(pixels), Lazy(paths), pairs]
    for form in forms:
        assert [prediction.labels for prediction in vitrail.predict(MODEL, form)] == expected
        assert np.array_equal(vitrail.embed(MODEL, form), vitrail.embed(MODEL, paths))
    for one in (pixels[0], pixels[0] / 255, (pixels[0] / 255).numpy()):
        (prediction,) = vitrail.predict(MODEL, one)
        assert prediction.labels == expected[0]
    with pytest.raises(DataError, match=r"^image 1 has values from .* floats are from 0 to 1"):
        vitrail.predict(MODEL, [pixels[0], pixels[0] / 127])


def test_a_torch_dataset_is_not_held_in_memory() -> None:
    lazy = Lazy(sorted(Path("photos").glob("*/*/*.png")))
    listed = list_images(lazy)
    assert (len(listed), lazy.reads) == (30, 0)


@pytest.mark.parametrize("call", [vitrail.predict, vitrail.embed])
def test_a_path_that_does_not_exist_or_holds_no_image_is_an_error(call: Any) -> None:
    Path("empty").mkdir()
    with pytest.raises(DataError, match=r"^phtos does not exist; did you mean photos\?$"):
        call(MODEL, "phtos")
    with pytest.raises(DataError, match=r"^nothing.jpg does not exist"):
        call(MODEL, ["photos/test/rose/0.png", Path("nothing.jpg")])
    with pytest.raises(DataError, match=r"^empty holds no image"):
        call(MODEL, "empty")
    with pytest.raises(DataError, match=r"^no file matches photos/\*.gif"):
        call(MODEL, "photos/*.gif")


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
