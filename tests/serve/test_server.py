"""Services made of models, their socket, and their end."""

import asyncio
import socket
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from fastapi.testclient import TestClient

from tests import making
from tests.serve import serving
from tests.serve.client import Client
from tests.serve.serving import picture
from vitrail import save
from vitrail.errors import UsageError
from vitrail.serve import server as run
from vitrail.serve.limits import RequestLimits

IMAGE = picture(size=(224, 224), format="JPEG")


def test_more_images_than_a_batch_are_refused(client: TestClient) -> None:
    answer = client.post("/v1/predict", files=[("image", ("a.png", picture()))] * 9)
    assert (answer.status_code, answer.json()["error"]) == (413, "a request may have 8 images, and this one has more")


def test_a_port_that_is_taken_is_said_at_once() -> None:
    with run.open_listener("127.0.0.1", 0) as listener:
        listener.listen()
        with pytest.raises(UsageError, match="Try another --port, 0 for any"):
            run.open_listener(*listener.getsockname())


def test_a_stop_answers_what_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    classify, go, started = serving.classifier(), threading.Event(), threading.Event()

    def waiting(views: list[torch.Tensor]) -> torch.Tensor:
        started.set()
        assert go.wait(20)
        return torch.ones(len(views), 7) / 7

    monkeypatch.setattr(classify, "predict_proba", waiting)
    served = run.make_service({"m": classify}, deadline=30)
    with serving.running(served) as (host, port, server):

        async def stopped() -> list[int]:
            client = Client(host, port)
            asked = [asyncio.create_task(client.ask("/v1/predict", IMAGE)) for _ in range(5)]
            while not started.is_set() or served.models["m"].queue.accepted_images < 5:
                await asyncio.sleep(0.005)
            server.should_exit = True
            while True:  # nobody new is let in
                try:
                    _, writer = await asyncio.open_connection(host, port)
                    writer.close()
                    await asyncio.sleep(0.01)
                except ConnectionRefusedError:
                    break
            go.set()
            return [reply.status for reply in await asyncio.gather(*asked)]

        assert asyncio.run(stopped()) == [200] * 5


def test_answers_do_not_wait_for_an_acknowledgement() -> None:
    """asyncio switches Nagle's algorithm off only for sockets that say they are TCP; else small answers take 40 ms."""
    served = serving.service()
    with serving.running(served) as (host, port, _):

        async def asked() -> list[float]:
            client = Client(host, port)
            with served.models["small"].queue.acquire(64):
                return [(await client.ask("/v1/predict", IMAGE)).seconds for _ in range(30)]

        assert min(asyncio.run(asked())[5:]) < 0.03


def test_models_are_loaded_under_their_names_with_all_settings(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        save(making.trained(making.vit()), tmp_path / f"{name}.safetensors")
    service = run.load_service(
        [str(tmp_path / "cats.safetensors"), str(tmp_path / "dogs.safetensors")],
        device="cpu", max_batch=4, capacity=6, deadline=9.0, limits=RequestLimits(max_megabytes=3), key="sesame",
    )  # fmt: skip
    assert list(service.models) == ["cats", "dogs"]
    for served in service.models.values():
        assert (served.classifier.batch_size, served.queue.capacity, served.queue.deadline) == (4, 6, 9.0)
    assert (service.limits.max_megabytes, service.limits.max_images, service.key) == (3, 4, "sesame")
    service.close()


@pytest.mark.parametrize(("capacity", "most"), [(64, 4), (3, 3)])
def test_a_request_has_no_more_images_than_the_smallest_batch_and_the_queue(capacity: int, most: int) -> None:
    classifiers = {"large": serving.classifier(batch_size=8), "small": serving.classifier(batch_size=4)}
    service = run.make_service(classifiers, capacity=capacity)
    assert service.limits.max_images == most
    service.close()


@pytest.mark.parametrize(
    ("address", "url"),
    [(("127.0.0.1", 80), "http://127.0.0.1:80"), (("::1", 8000, 0, 0), "http://[::1]:8000")],
)
def test_the_url_is_that_of_the_socket(address: tuple[str, int], url: str) -> None:
    assert run.get_url(Mock(spec=socket.socket, getsockname=lambda: address)) == url
