"""`vitrail.serve`: a server in the background that answers as `predict` does, and ends."""

import json
import threading
import urllib.request
from pathlib import Path

import pytest

import vitrail
from vitrail.errors import UsageError

MODEL = "model.safetensors"


def test_a_server_answers_in_the_background_until_it_is_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    image = Path("photos/test/rose/0.png")
    with vitrail.serve(MODEL, port=0, device="cpu") as server:
        assert repr(server) == f"Server({server.url!r}, running)"
        request = urllib.request.Request(f"{server.url}/v1/predict", image.read_bytes(), {"Content-Type": "image/png"})
        answer = json.loads(urllib.request.urlopen(request).read())
    (expected,) = vitrail.predict(MODEL, image)
    assert str(expected.label) in json.dumps(answer)
    assert repr(server) == f"Server({server.url!r}, stopped)"
    server.stop()  # a second time changes nothing
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{server.url}/healthz", timeout=5)
    assert "vitrail serve" not in {thread.name for thread in threading.enumerate()}
    assert capfd.readouterr().out == ""


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no option 'prot': did you mean port\?"):
        vitrail.serve(MODEL, prot=1)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"^batch is 0; it must be above 0"):
        vitrail.serve(MODEL, batch=0)
    with pytest.raises(UsageError, match="name the models"):
        vitrail.serve([])
