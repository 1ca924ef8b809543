"""`vitrail.index` and `vitrail.search`, against products of the features themselves."""

import dataclasses
import inspect
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tests.api.conftest import make_trained
from vitrail.api.search import SearchResult
from vitrail.cli.arguments.search import IndexArguments, SearchArguments
from vitrail.cli.signature import list_options
from vitrail.errors import DataError, UsageError
from vitrail.weights.load import save


def embed_photos(**options: object) -> np.ndarray:
    """The features of photos/, written too."""
    features = vitrail.embed("model.safetensors", "photos", out="features.npy", device="cpu", **options)
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def list_neighbors(result: SearchResult) -> list[str]:
    return [neighbor.image for neighbor in result.neighbors]


@pytest.mark.parametrize("kind", ["default", "mean"])
def test_neighbors_are_those_of_the_features_product(kind: str) -> None:
    features = embed_photos(features=kind)
    index = vitrail.index("features.npy", "photos.index", dtype="float32")
    names = [index.get_name(row) for row in range(len(index.rows))]
    assert np.array_equal(np.load("features.npy").shape, features.shape)
    images = sorted(Path("photos/test").rglob("*.png"))
    results = vitrail.search(index, images, top=4, device="cpu")
    for image, result in zip(images, results, strict=True):
        scores = features @ features[names.index(str(image))]
        assert [neighbor.row for neighbor in result.neighbors] == np.argsort(-scores)[:4].tolist()
        assert [neighbor.similarity for neighbor in result.neighbors] == pytest.approx(-np.sort(-scores)[:4], abs=1e-6)
        assert (result.image, result.neighbors[0].image) == (str(image), str(image))


def test_names_in_the_index_are_searched_without_the_model() -> None:
    embed_photos()
    index = vitrail.index("features.npy", "photos.index")
    name = index.get_name(3)
    Path("model.safetensors").unlink()
    [by_name] = vitrail.search("photos.index", name, by_name=True, top=5)
    assert (by_name.image, by_name.neighbors[0].row, len(by_name.neighbors)) == (name, 3, 5)
    with pytest.raises(DataError, match=r"photos\.index has no image called 'none\.jpg'"):
        vitrail.search(index, ["none.jpg"], by_name=True)
    with pytest.raises(UsageError, match=r"which is gone: add model=MODEL"):
        vitrail.search("photos.index", name)


def test_the_model_may_move_but_not_change() -> None:
    embed_photos()
    vitrail.index("features.npy", "photos.index")
    before = vitrail.search("photos.index", "photos/test/rose/0.png")
    Path("model.safetensors").rename("moved.safetensors")
    assert vitrail.search("photos.index", "photos/test/rose/0.png", model="moved.safetensors") == before
    save(make_trained(), Path("again.safetensors"))
    assert vitrail.search("photos.index", "photos/test/rose/0.png", model=vitrail.load("again.safetensors")) == before
    model = vitrail.load("moved.safetensors").model
    next(model.parameters()).data += 1
    changed = dataclasses.replace(make_trained(), model=model)
    with pytest.raises(UsageError, match=r"is not the model of photos\.index.*two models cannot be compared"):
        vitrail.search("photos.index", "photos/test/rose/0.png", model=changed)


def test_features_of_a_model_in_memory_name_no_place_for_it() -> None:
    vitrail.embed(make_trained(), "photos", out="features.npy")
    index = vitrail.index("features.npy", "photos.index")
    assert index.record["model_name"] is None
    with pytest.raises(UsageError, match="does not record where its model is: add model=MODEL"):
        vitrail.search(index, "photos/test/rose/0.png")
    assert len(vitrail.search(index, "photos/test/rose/0.png", model="model.safetensors")[0].neighbors) == 20


def test_an_unreadable_image_is_named_in_its_result() -> None:
    embed_photos()
    vitrail.index("features.npy", "photos.index")
    Path("bad.png").write_bytes(b"\x89PNG and no more")
    bad, good = vitrail.search("photos.index", ["bad.png", "photos/test/rose/0.png"], top=1)
    assert (bad.neighbors, "bad.png" in bad.error) == ((), True)
    assert (good.error, list_neighbors(good)) == ("", ["photos/test/rose/0.png"])
    assert vitrail.search("photos.index", "bad.png")[0].neighbors == ()


def test_left_out_images_are_noted() -> None:
    embed_photos()
    matrix = np.load("features.npy")
    matrix[4] = np.nan
    np.save("features.npy", matrix)
    notes: list[str] = []
    assert vitrail.index("features.npy", "photos.index", notify=notes.append).record["left_out"] == 1
    assert notes == ["left out: 1 image without features, which could not be read"]


def test_commands_and_functions_have_the_same_defaults() -> None:
    for function, arguments in ((vitrail.index, IndexArguments), (vitrail.search, SearchArguments)):
        parameters = inspect.signature(function).parameters
        options = {option.name.lstrip("-").replace("-", "_"): option for option in list_options(arguments)}
        shared = parameters.keys() & options.keys() - {"out"}
        assert {"dtype", "overwrite"} <= shared or {"top", "by_name", "model", "batch", "device", "workers"} <= shared
        assert {name: parameters[name].default for name in shared} == {name: options[name].default for name in shared}
