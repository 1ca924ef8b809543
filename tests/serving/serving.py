"""Small services, images for them, and a server on loopback."""

import contextlib
import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from fastapi.testclient import TestClient
from PIL import Image

from tests import model_factory
from vitrail.inference.classifier import Classifier
from vitrail.serving import server as run
from vitrail.serving.request_handling import Service


def build_classifier(seed: int = 0, batch_size: int = 8, **changes: Any) -> Classifier:
    return Classifier(
        model_factory.build_trained(model_factory.build_vit(seed), **changes), device="cpu", batch_size=batch_size
    )


def build_service(**settings: Any) -> Service:
    """Two small models that may wait long."""
    return run.make_service(
        {"small": build_classifier(0), "other": build_classifier(1)}, **({"deadline": 60.0} | settings)
    )


def make_image_file(seed: int = 0, size: tuple[int, int] = (50, 40), format: str = "PNG") -> bytes:  # noqa: A002
    """A file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def post_image(client: TestClient, path: str, content: bytes, **headers: str) -> Any:
    return client.post(path, content=content, headers={"content-type": "image/png", **headers})


@contextlib.contextmanager
def run_server(served: Service) -> Iterator[tuple[str, int, Any]]:
    """Host and port of a server in a thread, and the server, which stops when `should_exit` is set."""
    with run.open_listener("127.0.0.1", 0) as listener:
        listener.listen()
        host, port = listener.getsockname()
        server = run.make_server(served)
        served.decoders.start()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield host, port, server
        finally:
            server.should_exit = True
            thread.join()
            served.close()
