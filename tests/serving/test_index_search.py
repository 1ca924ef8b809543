"""A served index: neighbors as the search finds them, and thumbnails of its own images alone."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from tests.serving import indexes, serving
from tests.serving.serving import make_image_file, post_image
from vitrail.errors import UsageError
from vitrail.inference.feature_index import FeatureIndex
from vitrail.serving import routes
from vitrail.serving.index_search import MAX_OPEN_THUMBNAILS
from vitrail.serving.request_handling import Service


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indexed")


@pytest.fixture(scope="module")
def index(folder: Path) -> FeatureIndex:
    return indexes.build_index(folder, seed=1)  # of the second model


@pytest.fixture(scope="module")
def service(index: FeatureIndex, folder: Path) -> Iterator[Service]:
    service = serving.build_service(index=index, image_root=folder / "images")
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(service: Service) -> TestClient:
    return TestClient(routes.build_app(service))


def test_neighbors_are_those_of_the_features_product(client: TestClient, index: FeatureIndex, service: Service) -> None:
    images = [make_image_file(5), make_image_file(1000)]
    files = [("image", (f"{number}.png", image)) for number, image in enumerate(images)]
    results = client.post("/v1/search?top=4", files=files).json()["results"]
    features = service.models["other"].classifier.extract_features(images).numpy()
    scores = features / np.linalg.norm(features, axis=1, keepdims=True) @ index.rows.T
    for result, own in zip(results, scores, strict=True):
        assert result["model"] == "other"
        assert [each["row"] for each in result["neighbors"]] == np.argsort(-own)[:4].tolist()
        assert [each["similarity"] for each in result["neighbors"]] == pytest.approx(-np.sort(-own)[:4], abs=1e-6)
        assert [each["image"] for each in result["neighbors"]] == [
            index.get_name(each["row"]) for each in result["neighbors"]
        ]
    assert results[0]["neighbors"][0] == {
        "row": 5, "image": "photos/5.png", "similarity": pytest.approx(1, abs=1e-6), "thumbnail": True,
    }  # fmt: skip


def test_an_index_of_other_features_is_searched_by_these(tmp_path: Path) -> None:
    index = indexes.build_index(tmp_path, kind="mean")
    service = serving.build_service(index=index)
    [result] = post_image(TestClient(routes.build_app(service)), "/v1/search?top=1", make_image_file(3)).json()[
        "results"
    ]
    [neighbor] = result["neighbors"]
    assert (neighbor["row"], neighbor["thumbnail"]) == (3, False)  # no root, no thumbnails
    assert neighbor["similarity"] == pytest.approx(1, abs=1e-6)
    service.close()


def test_a_thumbnail_is_what_the_model_saw(client: TestClient, service: Service, folder: Path) -> None:
    response = client.get("/v1/thumbnail?row=7")
    assert (response.status_code, response.headers["content-type"]) == (200, "image/png")
    expected = service.models["other"].classifier.make_input(folder / "images" / "photos" / "7.png")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(response.content))), expected.permute(1, 2, 0).numpy())
    assert service.open_thumbnails == 0


@pytest.mark.parametrize("name", indexes.OUTSIDE)
def test_nothing_outside_the_root_and_no_link_out_of_it_is_shown(
    client: TestClient, index: FeatureIndex, name: str
) -> None:
    row = len(index.rows) - len(indexes.OUTSIDE) + indexes.OUTSIDE.index(name)
    assert index.get_name(row) == name
    response = client.get(f"/v1/thumbnail?row={row}")
    assert (response.status_code, response.json()) == (404, {"error": f"row {row} has no thumbnail"})


@pytest.mark.parametrize(("query", "status"), [("row=19", 404), ("row=-1", 422), ("row=photos/1.png", 422), ("", 422)])
def test_a_request_names_a_row_and_nothing_else(client: TestClient, query: str, status: int) -> None:
    assert client.get(f"/v1/thumbnail?{query}").status_code == status


def test_a_file_too_large_or_damaged_by_now_is_refused(folder: Path, service: Service, client: TestClient) -> None:
    path = folder / "images" / "photos" / "2.png"
    content = path.read_bytes()
    path.write_bytes(b"no image")
    assert client.get("/v1/thumbnail?row=2").status_code == 400
    path.write_bytes(b"x" * (service.limits.max_bytes + 1))
    assert client.get("/v1/thumbnail?row=2").status_code == 413
    path.write_bytes(content)
    assert client.get("/v1/thumbnail?row=2").status_code == 200


def test_limits_slots_and_keys_hold_as_for_other_routes(
    client: TestClient, service: Service, index: FeatureIndex
) -> None:
    assert client.post("/v1/search?top=101", content=make_image_file()).status_code == 422
    assert post_image(client, "/v1/search", b"no image").status_code == 400
    assert service.index is not None
    for queue in (service.models["other"].queue, service.index.queue):
        with queue.acquire(64):
            response = post_image(client, "/v1/search", make_image_file())
        assert (response.status_code, response.json()["error"]) == (503, "too busy: all 64 slots are taken")
    service.open_thumbnails = MAX_OPEN_THUMBNAILS
    assert client.get("/v1/thumbnail?row=1").status_code == 503
    service.open_thumbnails = 0
    locked = serving.build_service(index=index, key="sesame")
    stranger = TestClient(routes.build_app(locked))
    assert post_image(stranger, "/v1/search", make_image_file()).status_code == 401
    assert stranger.get("/v1/thumbnail?row=1").status_code == 401
    locked.close()


def test_models_say_how_many_images_can_be_searched(client: TestClient, index: FeatureIndex) -> None:
    models = client.get("/v1/models").json()["models"]
    assert {model["name"]: model["indexed_images"] for model in models} == {"small": 0, "other": len(index.rows)}


def test_without_an_index_there_is_nothing_to_search() -> None:
    service = serving.build_service()
    client = TestClient(routes.build_app(service))
    for response in (post_image(client, "/v1/search", make_image_file()), client.get("/v1/thumbnail?row=0")):
        assert (response.status_code, response.json()) == (404, {"error": "no index is served; --index adds one"})
    service.close()


def test_an_index_of_another_model_and_a_root_that_is_none_are_refused(tmp_path: Path, index: FeatureIndex) -> None:
    other = indexes.build_index(tmp_path, seed=2)
    with pytest.raises(UsageError, match="holds the features of another model: serve the one of weights"):
        serving.build_service(index=other)
    with pytest.raises(UsageError, match="is no folder; the names in the index are paths below it"):
        serving.build_service(index=index, image_root=tmp_path / "none")
