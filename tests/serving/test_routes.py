"""The routes, against the functions whose results they carry."""

import base64
import dataclasses
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

from tests import model_factory
from tests.serving import serving
from tests.serving.serving import make_image_file, post_image
from vitrail.data.transforms import normalize
from vitrail.inference.classifier import Classifier
from vitrail.model.vit import attention_maps
from vitrail.serving import routes, server
from vitrail.serving.limits import RequestLimits
from vitrail.serving.request_handling import Service
from vitrail.visualization.attention import compute_rollout
from vitrail.visualization.image_grids import overlay_attention


def test_predictions_are_the_classifiers(client: TestClient, service: Service) -> None:
    classify = service.models["small"].classifier
    for seed in range(5):
        [found] = post_image(client, "/v1/predict?top=3", make_image_file(seed)).json()["results"]
        pairs = [(each["label"], each["probability"]) for each in found["predictions"]]
        assert pairs == classify([make_image_file(seed)], top=3)[0]
        assert (found["model"], found["unsure"]) == ("small", False)


def test_several_images_are_answered_in_their_order(client: TestClient, service: Service) -> None:
    images = [
        make_image_file(seed, format=kind) for seed, kind in enumerate(("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"))
    ]
    files = [("image", (f"{number}.bin", image)) for number, image in enumerate(images)]
    found = client.post("/v1/predict?model=other&top=1", files=files).json()["results"]
    expected = service.models["other"].classifier(images, top=1)
    assert [each["predictions"][0]["label"] for each in found] == [answer[0][0] for answer in expected]
    assert [each["predictions"][0]["probability"] for each in found] == pytest.approx([a[0][1] for a in expected])


def test_the_model_gets_the_very_pixels_that_predict_gives_it(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    classify, seen = service.models["small"].classifier, []

    def noted(views: list[torch.Tensor]) -> torch.Tensor:
        seen.extend(views)
        return torch.ones(len(views), 7) / 7

    monkeypatch.setattr(classify, "predict_proba", noted)
    for seed, size in enumerate([(1, 1), (33, 200), (224, 31), (500, 375)]):
        assert post_image(client, "/v1/predict", make_image_file(seed, size, "JPEG")).status_code == 200
        assert torch.equal(seen[-1], classify.make_input(make_image_file(seed, size, "JPEG")))


def test_below_the_threshold_the_model_is_unsure() -> None:
    for threshold, unsure in ((0.0, False), (1.0, True)):
        served = server.make_service({"m": serving.build_classifier(threshold=threshold)}, deadline=60)
        [found] = post_image(TestClient(routes.build_app(served)), "/v1/predict", make_image_file()).json()["results"]
        assert found["unsure"] is unsure
        assert len(found["predictions"]) == 5
        served.close()


def test_a_model_with_label_thresholds_marks_the_labels_above_them() -> None:
    """Thresholds of 0 and 1: the least likely label is predicted and the likeliest is not."""
    trained = dataclasses.replace(model_factory.build_trained(model_factory.build_vit()), multi_label=True)
    order = Classifier(trained, device="cpu").predict_proba([make_image_file()])[0].argsort().tolist()
    thresholds = tuple(0.0 if index == order[0] else 1.0 for index in range(7))
    classifier = Classifier(dataclasses.replace(trained, label_thresholds=thresholds), device="cpu")
    service = server.make_service({"m": classifier}, deadline=60)
    client = TestClient(routes.build_app(service))
    [found] = post_image(client, "/v1/predict?top=2", make_image_file()).json()["results"]
    rows = [(row["label"], row["threshold"], row["predicted"]) for row in found["predictions"]]
    names = classifier.labels
    assert rows == [(names[order[-1]], 1, False), (names[order[-2]], 1, False), (names[order[0]], 0, True)]
    assert found["unsure"] is False
    [model] = client.get("/v1/models").json()["models"]
    assert model["has_label_thresholds"] is True
    service.close()


def test_embeddings_are_what_the_head_reads(client: TestClient, service: Service) -> None:
    [found] = post_image(client, "/v1/embed", make_image_file()).json()["results"]
    expected = service.models["small"].classifier.extract_features([make_image_file()])[0]
    assert found["embedding"] == expected.tolist()


def _input(classify: Classifier, image: bytes) -> torch.Tensor:
    return normalize(classify.make_input(image)[None], classify.preprocess)


def test_the_explanation_is_the_rollout_over_what_the_model_saw(client: TestClient, service: Service) -> None:
    classify = service.models["small"].classifier
    answer = post_image(client, "/v1/explain", make_image_file())
    assert answer.headers["content-type"] == "image/png"
    expected = overlay_attention(
        classify.make_input(make_image_file()), compute_rollout(classify.model, _input(classify, make_image_file()))[0]
    )
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(answer.content))), expected)


def test_alone_the_rollout_is_a_veil_that_is_densest_where_there_is_most(client: TestClient, service: Service) -> None:
    classify = service.models["small"].classifier
    veil = Image.open(io.BytesIO(post_image(client, "/v1/explain?background=none", make_image_file()).content))
    assert (veil.mode, veil.size) == ("RGBA", (32, 32))
    found = compute_rollout(classify.model, _input(classify, make_image_file()))[0]  # (4, 4): patches of 8 pixels
    row, column = np.unravel_index(found.argmax(), found.shape)
    least = np.unravel_index(found.argmin(), found.shape)
    red, opacity = (np.asarray(veil)[..., channel].astype(int) for channel in (0, 3))
    assert red[8 * row + 4, 8 * column + 4] > 200 > 60 > red[8 * least[0] + 4, 8 * least[1] + 4]
    assert opacity[8 * row + 4, 8 * column + 4] > opacity[8 * least[0] + 4, 8 * least[1] + 4]


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_attention_is_each_layers_own_scaled_to_bytes(client: TestClient, service: Service, layer: int) -> None:
    classify = service.models["small"].classifier
    found = post_image(client, f"/v1/attention?layer={layer}", make_image_file()).json()
    assert (found["heads"], found["grid"], found["layer"]) == (4, [4, 4], layer)
    maps = np.frombuffer(base64.b64decode(found["maps"]), np.uint8).reshape(4, 17, 16)
    expected = list(attention_maps(classify.model, _input(classify, make_image_file())))[layer - 1][0, :, :, 1:].numpy()
    expected = expected / expected.max(axis=-1, keepdims=True)
    assert np.abs(maps / 255 - expected).max() < 0.5 / 255 + 1e-5


def test_what_the_model_sees_is_said_as_a_part_of_the_image() -> None:
    """Of 100 x 50 pixels, resized to a short side of 40, the middle 32 x 32 are kept: 0.4 of 80 and 0.8 of 40."""
    trained = model_factory.build_trained(model_factory.build_vit())
    assert trained.preprocess is not None
    served = server.make_service(
        {
            "m": Classifier(
                model_factory.build_trained(
                    model_factory.build_vit(), preprocess=dataclasses.replace(trained.preprocess, resize=(40,))
                ),
                device="cpu",
            )
        },
        deadline=60,
    )
    [found] = post_image(TestClient(routes.build_app(served)), "/v1/predict", make_image_file(size=(100, 50))).json()[
        "results"
    ]
    assert found["crop"] == pytest.approx([0.3, 0.1, 0.7, 0.9])
    served.close()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "content", "headers", "status", "words"),
    [
        ("/v1/predict", b"hello", {}, 400, "not an image of a known format"),
        ("/v1/predict", b"", {}, 400, "not an image of a known format"),
        ("/v1/predict", make_image_file()[:200], {}, 400, "cannot be decoded"),
        ("/v1/predict", make_image_file(), {"content-type": "text/plain"}, 415, "'text/plain' is no type of image"),
        ("/v1/predict", make_image_file(), {"content-type": "application/json"}, 415, "is no type of image"),
        ("/v1/predict?model=none", make_image_file(), {}, 404, "there is no model 'none'; /v1/models lists"),
        ("/v1/predict?top=0", make_image_file(), {}, 422, "top: Input should be greater than or equal to 1"),
        ("/v1/attention?layer=4", make_image_file(), {}, 422, "layer is 4; small has 3, counted from 1"),
        ("/v1/attention", make_image_file(), {}, 422, "layer: Field required"),
        ("/v1/explain?background=red", make_image_file(), {}, 422, "background: Input should be 'image' or 'none'"),
        ("/v1/predict", b"x", {"content-type": "multipart/form-data"}, 400, "state its boundary"),
        ("/v1/predict", b"x", {"content-type": "multipart/form-data; boundary=b"}, 400, "damaged"),
        ("/v1/predict", b"--b\r\n", {"content-type": "multipart/form-data; boundary=b"}, 400, "too early"),
        ("/nothing", b"", {}, 404, "Not Found"),
    ],
)
def test_a_refusal_is_one_sentence_with_its_status(
    client: TestClient, path: str, content: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    answer = post_image(client, path, content, **headers)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert words in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_a_form_field_that_is_no_file_is_refused(client: TestClient) -> None:
    answer = client.post("/v1/predict", data={"top": "3"}, files={"image": ("a.png", make_image_file())})
    assert answer.status_code == 422
    assert "a field of the form is no file" in answer.json()["error"]


def test_size_is_refused_by_its_header_before_a_byte_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    served = serving.build_service(limits=RequestLimits(max_megabytes=0.01))
    client = TestClient(routes.build_app(served))
    answer = post_image(client, "/v1/predict", b"x" * 20_000)
    assert (answer.status_code, answer.json()["error"]) == (413, "a request may have 0.01 MB")
    monkeypatch.setattr(served.decoders, "decode", None)  # not reached
    answer = client.post("/v1/predict", content=iter([b"x" * 6000] * 2), headers={"content-type": "image/png"})
    assert answer.status_code == 413  # one that does not say its size is counted
    monkeypatch.undo()
    served.close()


def test_pixels_are_refused_before_they_are_decoded() -> None:
    served = serving.build_service(limits=RequestLimits(max_megapixels=0.01))
    client = TestClient(routes.build_app(served))
    assert post_image(client, "/v1/predict", make_image_file(size=(100, 100))).status_code == 200
    answer = post_image(client, "/v1/predict", make_image_file(size=(101, 100)))
    assert answer.status_code == 413
    assert answer.json()["error"] == "the image has 101 x 100 pixels; at most 0.01 million are decoded"
    served.close()


def test_a_bug_is_answered_without_a_trace_of_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(views: list[torch.Tensor]) -> torch.Tensor:
        raise RuntimeError(f"planted in {__file__}")

    monkeypatch.setattr(service.models["small"].classifier, "predict_proba", failing)
    answer = post_image(
        TestClient(routes.build_app(service), raise_server_exceptions=False), "/v1/predict", make_image_file()
    )
    assert answer.status_code == 500
    assert answer.json() == {"error": "the server failed; its log says why"}


def test_a_model_without_head_or_attention_says_so() -> None:
    headless = Classifier(model_factory.build_trained(model_factory.build_vit(classes=0)), device="cpu")
    residual = Classifier(model_factory.build_trained(model_factory.build_bit()), device="cpu")
    served = server.make_service({"headless": headless, "resnet": residual}, deadline=60)
    client = TestClient(routes.build_app(served))
    answer = post_image(client, "/v1/predict?model=headless", make_image_file())
    assert (answer.status_code, answer.json()["error"][:22]) == (422, "the model has no head,")
    assert post_image(client, "/v1/embed?model=headless", make_image_file()).status_code == 200
    answer = post_image(client, "/v1/explain?model=resnet", make_image_file())
    assert (answer.status_code, "has no attention" in answer.json()["error"]) == (422, True)
    assert client.get("/v1/models").json()["models"][1]["layers"] == 0
    served.close()


# --- the rest --------------------------------------------------------------------------------------------------------


def test_ready_when_every_model_has_computed_once(service: Service, client: TestClient) -> None:
    for served in service.models.values():
        served.warmup.result(20)
    assert client.get("/readyz").status_code == 200
    assert client.get("/healthz").text == "ok\n"


def test_the_schema_names_every_route_and_its_problems(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    wanted = {
        "/v1/predict",
        "/v1/embed",
        "/v1/explain",
        "/v1/attention",
        "/v1/models",
        "/v1/search",
        "/v1/thumbnail",
        "/v1/classes",
        "/healthz",
        "/readyz",
    }
    assert wanted | {"/metrics"} == set(schema["paths"])
    predict = schema["paths"]["/v1/predict"]["post"]
    assert set(predict["requestBody"]["content"]) == {"image/*", "multipart/form-data"}
    assert {"200", "400", "401", "404", "413", "415", "422", "503"} <= set(predict["responses"])


def test_the_page_is_strict_and_asks_nobody_else(client: TestClient) -> None:
    for path, (name, _) in routes.PAGE_FILES.items():
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        outside = re.findall(r"(?:https?:)?//[\w.]+", answer.text.replace("http://www.w3.org/2000/svg", ""))
        assert outside == [], name
    page = client.get("/").text
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", page)
    used = set(re.findall(r'(?:src|href)="(/[^"#]+)"', page))
    assert used - {"/docs"} <= set(routes.PAGE_FILES)


def test_the_classes_of_a_model_are_listed(client: TestClient, service: Service) -> None:
    answer = client.get("/v1/classes?model=other").json()
    assert answer == {"model": "other", "classes": list(service.models["other"].classifier.labels)}
    assert client.get("/v1/classes?model=none").status_code == 404


def test_answers_hold_no_path_of_the_machine(client: TestClient) -> None:
    texts = [client.get("/v1/models").text, post_image(client, "/v1/predict", b"x").text, client.get("/metrics").text]
    texts += [json.dumps(client.get("/openapi.json").json()["components"])]
    assert not any(str(Path(__file__).parents[2]) in text or "Traceback" in text for text in texts)
