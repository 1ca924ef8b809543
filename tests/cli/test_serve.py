"""`vitrail serve` as a process."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import model_factory
from tests.serving.serving import make_image_file
from vitrail import save
from vitrail.cli import main
from vitrail.serving import server

WATCHED = """
import socket, sys
events = []
def note(name, values):
    if name not in ("socket.bind", "socket.connect", "socket.getaddrinfo"):
        return
    if getattr(values[0], "family", None) != socket.AF_UNIX:  # those join the server and its decoders
        events.append((name, values[1:]))
sys.addaudithook(note)
from vitrail.cli import main
code = main(["serve", *sys.argv[1:]])
print(events, flush=True)
sys.exit(code)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "flowers.safetensors"
    save(model_factory.build_trained(model_factory.build_vit()), path)
    return str(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_and_opens_one_socket(model: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", WATCHED, model, "--device", "cpu", "--port", "0"]
    pipe, alone = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=alone) as running:
        assert running.stdout is not None
        url = running.stdout.readline().strip()
        try:
            request = urllib.request.Request(f"{url}/v1/predict", make_image_file(), {"content-type": "image/png"})
            with urllib.request.urlopen(request, timeout=20) as prediction:
                assert b'"model":"flowers"' in prediction.read()
        finally:
            running.send_signal(number)
            out, err = running.communicate(timeout=20)
    assert url.startswith("http://127.0.0.1:")
    assert running.returncode == 0
    assert err.splitlines()[-1] == "stopped; all accepted requests were answered"
    assert "Traceback" not in err
    assert out.strip() == "[('socket.bind', (('127.0.0.1', 0),))]"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch", "0"], "--batch is 0; it must be above 0"),
        (["--deadline", "nan"], "--deadline is nan"),
        (["--host", "nowhere.invalid"], "cannot listen on nowhere.invalid:8000"),
        (["--port", "99999"], "cannot listen on 127.0.0.1:99999"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    model: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", model, *options]) == 2
    assert words in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with server.open_listener("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["serve", "there/is/no/such/model", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_an_empty_key_is_no_key(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("\n")
    assert main(["serve", model, "--api-key-file", str(tmp_path / "key")]) == 2
    monkeypatch.setenv("VITRAIL_API_KEY", "")
    assert main(["serve", model]) == 2
    assert capsys.readouterr().err.count("is empty; write one, or omit it") == 2


@pytest.mark.parametrize("key", ["gl\u00fcck", "two\nlines", "\udcff"])
def test_a_key_that_no_header_carries_is_refused(
    model: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_bytes(key.encode("utf-8", "surrogateescape"))
    assert main(["serve", model, "--api-key-file", str(tmp_path / "key")]) == 2
    monkeypatch.setenv("VITRAIL_API_KEY", key)
    assert main(["serve", model]) == 2
    assert capsys.readouterr().err.count("has characters that a header cannot carry; use printable ASCII") == 2


@pytest.mark.attack
def test_a_foreign_host_is_refused_and_a_named_one_served(model: str, attacked: Callable[[str, str], None]) -> None:
    command = [sys.executable, "-m", "vitrail", "serve", model, "--device", "cpu", "--port", "0"]
    command += ["--host-name", "images.example", "--host-name", "other.example"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        assert running.stdout is not None
        url = running.stdout.readline().strip()
        try:
            for host, status in (("images.example", 200), ("other.example:1", 200), ("evil.example", 421)):
                request = urllib.request.Request(f"{url}/v1/models", headers={"host": host})
                try:
                    facts = urllib.request.urlopen(request, timeout=20).status
                except urllib.error.HTTPError as error:
                    facts = error.code
                assert (host, facts) == (host, status)
        finally:
            running.send_signal(signal.SIGTERM)
    attacked("a request for evil.example to a server on loopback", "421")


def test_a_missing_extra_is_named_with_its_line(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastapi" or "vitrail.serving" in name]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("vitrail.cli.serve", "vitrail.api.serve"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("vitrail.serving", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve", model]) == 2
    assert "serving needs fastapi: pip install 'vitrail[serve]'" in capsys.readouterr().err


def test_a_model_that_cannot_be_served_ends_with_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "there/is/no/such.safetensors", "--port", "0"]) == 4
    assert main(["serve"]) == 2
    assert "name the models" in capsys.readouterr().err
