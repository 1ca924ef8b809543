"""From a request to its results: keys, queue slots, and files that are decoded several at a time."""

import asyncio
import json
import re
import socket
import time

import pytest
import torch
from fastapi.testclient import TestClient

from tests.serving import serving
from tests.serving.client import Client
from tests.serving.serving import make_image_file, post_image
from vitrail.serving import routes
from vitrail.serving.decoder_processes import SLICE_SECONDS
from vitrail.serving.limits import RefusedError
from vitrail.serving.request_handling import Service
from vitrail.serving.upload_decoding import ModelInput
from vitrail.visualization.crops import Box


def test_without_its_key_a_server_says_nothing_of_models() -> None:
    served = serving.build_service(key="sesame")
    client = TestClient(routes.build_app(served))
    for key in (None, "Bearer wrong", "sesam", "Bearer ", "Bearer sesame2", "Bearer s\u00e9same"):
        headers = {} if key is None else {"authorization": key.encode()}
        for answer in (
            client.get("/v1/models", headers=headers),
            client.get("/metrics", headers=headers),
            client.post("/v1/predict", content=make_image_file(), headers=headers),
        ):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "small" not in answer.text
    assert client.get("/v1/models", headers={"authorization": "Bearer sesame"}).status_code == 200
    assert client.get("/healthz").status_code == client.get("/").status_code == 200
    served.close()


def test_a_model_is_found_by_its_name_and_the_first_without_one(service: Service) -> None:
    assert service.get_model(None) is service.models["small"]
    assert service.get_model("other") is service.models["other"]
    with pytest.raises(RefusedError, match="there is no model 'none'; /v1/models lists them"):
        service.get_model("none")


def test_a_bad_image_among_several_is_named_by_its_number(client: TestClient) -> None:
    files = [("image", ("a.png", make_image_file())), ("image", ("b.jpg", b"text"))]
    assert client.post("/v1/predict", files=files).json()["error"].startswith("image 2 is not an image")
    answer = client.post("/v1/explain", files=[files[0]] * 2)
    assert (answer.status_code, answer.json()["error"][:19]) == (422, "this route takes on")


def test_a_full_queue_is_503_with_a_time_to_come_again(service: Service, client: TestClient) -> None:
    with service.models["small"].queue.acquire(64):
        answer = post_image(client, "/v1/predict", make_image_file())
        assert client.get("/healthz").status_code == 200
    assert answer.status_code == 503
    assert answer.json() == {"error": "too busy: all 64 slots are taken"}
    assert int(answer.headers["retry-after"]) >= 1
    assert post_image(client, "/v1/predict", make_image_file()).status_code == 200


def test_metrics_count_what_was_asked(client: TestClient) -> None:
    def value(line: str) -> float:
        match = re.search(rf"^{re.escape(line)} (.+)$", client.get("/metrics").text, re.MULTILINE)
        return float(match[1]) if match else 0.0

    images, refused = 'vitrail_images_total{model="other"}', 'vitrail_requests_total{route="/v1/embed",status="400"}'
    before = value(images), value(refused)
    post_image(client, "/v1/predict?model=other", make_image_file())
    post_image(client, "/v1/embed", b"text")
    assert (value(images), value(refused)) == (before[0] + 1, before[1] + 1)
    assert value('vitrail_queue_images{model="other"}') == 0


def test_one_who_leaves_gives_his_place_back() -> None:
    served = serving.build_service()
    with serving.run_server(served) as (host, port, _):
        for _ in range(5):
            with socket.create_connection((host, port)) as raw:
                raw.sendall(b"POST /v1/predict HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nhalf")
        until = time.monotonic() + 10
        while served.uploads.open_count and time.monotonic() < until:
            time.sleep(0.01)
        assert served.uploads.open_count == served.uploads.held_bytes == 0
        reply = asyncio.run(Client(host, port).ask("/v1/predict", make_image_file()))
        assert reply.status == 200
        assert len(json.loads(reply.body)["results"]) == 1


def test_after_a_file_is_refused_no_other_is_decoded(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    async def refuse(file: memoryview, spec: object, name: str, deadline: float) -> tuple[ModelInput, float]:
        names.append(name)
        raise RefusedError(400, f"{name} is planted")

    monkeypatch.setattr(service.decoders, "decode", refuse)
    monkeypatch.setattr(service.decoders, "count", 2)
    response = client.post("/v1/predict", files=[("image", ("a.png", b"x"))] * 6)
    assert (response.status_code, response.json()) == (400, {"error": "image 1 is planted"})
    assert len(names) <= 2
    assert service.models["small"].queue.accepted_images == service.uploads.held_bytes == 0


@pytest.mark.parametrize("seconds", [SLICE_SECONDS / 2, SLICE_SECONDS + 3])
def test_decoding_a_large_image_does_not_count_as_waiting(
    service: Service, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    decoded = ModelInput(torch.zeros(3, 32, 32, dtype=torch.uint8), Box(0, 0, 1, 1))

    async def decode(*_: object) -> tuple[ModelInput, float]:
        return decoded, seconds

    monkeypatch.setattr(service.decoders, "decode", decode)
    model = service.models["small"]

    async def measure_delay() -> float:
        with model.queue.acquire(1) as slot:
            before = slot.deadline
            assert await service._decode_files([memoryview(b"x")], model, slot) == [decoded]
            return slot.deadline - before

    assert asyncio.run(measure_delay()) == pytest.approx(max(0.0, seconds - SLICE_SECONDS), abs=1e-6)
