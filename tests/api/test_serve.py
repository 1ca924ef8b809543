"""`vitrail.serve`: a server in the background that answers as `predict` does, and ends."""

import json
import os
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

import vitrail
from vitrail.errors import UsageError

MODEL = "model.safetensors"
IMAGE = Path("photos/test/rose/0.png")


def post_image(url: str) -> bytes:
    request = urllib.request.Request(f"{url}/v1/predict", IMAGE.read_bytes(), {"Content-Type": "image/png"})
    with urllib.request.urlopen(request, timeout=30) as response:
        content: bytes = response.read()
    return content


def test_a_server_answers_in_the_background_until_it_is_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    with vitrail.serve(MODEL, port=0, device="cpu") as server:
        assert repr(server) == f"Server({server.url!r}, running)"
        assert f'<a href="{server.url}" target="_blank">{server.url}</a> is running' in server._repr_html_()
        answer = json.loads(post_image(server.url))
    (expected,) = vitrail.predict(MODEL, IMAGE)
    assert str(expected.label) in json.dumps(answer)
    assert repr(server) == f"Server({server.url!r}, stopped)"
    server.stop()  # a second time changes nothing
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{server.url}/healthz", timeout=5)
    assert "vitrail serve" not in {thread.name for thread in threading.enumerate()}
    assert capfd.readouterr().out == ""


def test_the_command_and_serve_answer_the_same_bytes() -> None:
    command = [sys.executable, "-m", "vitrail", "serve", MODEL, "--device", "cpu", "--port", "0"]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # as torch has here
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=alone) as running:
        assert running.stdout is not None
        try:
            from_command = post_image(running.stdout.readline().strip())
        finally:
            running.terminate()
    with vitrail.serve(MODEL, port=0, device="cpu") as server:
        assert post_image(server.url) == from_command


@pytest.mark.parametrize("package", ["fastapi", "python_multipart", "uvicorn"])
def test_without_its_packages_serve_is_a_name_and_its_call_says_what_to_install(package: str) -> None:
    """In a fresh process, as `from vitrail import *`, `help` and an editor's completion meet it."""
    script = f"""
import sys
sys.modules["{package}"] = None
import inspect, pydoc, vitrail
from vitrail import *
assert callable(serve) and Server.__name__ == "Server"
inspect.getmembers(vitrail)
pydoc.render_doc(vitrail)
try:
    serve("{MODEL}", port=0)
except vitrail.errors.UsageError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"serving needs {package}: pip install 'vitrail[serve]'\n"


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no option 'prot': did you mean port\?"):
        vitrail.serve(MODEL, prot=1)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"^batch is 0; it must be above 0"):
        vitrail.serve(MODEL, batch=0)
    with pytest.raises(UsageError, match="name the models"):
        vitrail.serve([])
