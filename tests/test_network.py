"""No command reaches for the network unless it is given a remote name: every verb and extra, compiled code included."""

import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tests import text_towers
from tests.data.image_files import write_image_folder
from tests.network import has_namespaces, run_watched
from tests.test_readme import list_watched_commands
from vitrail.cli import COMMANDS, main
from vitrail.config import PreprocessConfig

OTHERS = {  # what no page of tests/test_readme.py shows, the extras among it, and how it ends
    "demo --help": 0,  # it is run in tests/cli/test_demo.py
    "train digits --data digits --epochs 0.1 --warmup 1 --track tensorboard --out runs/tracked": 0,
    "study ablate digits --data digits --variants depth=1 --epochs 0.1 --out runs/ablation": 0,
    "data list": 0,
    "data remove cifar10": 2,  # which is not there
    "list": 0,
    "finetune photos --model tiny.safetensors --recipe paper --image-size 32 --batch 4 --epochs 1 --warmup 1": 0,
    "train mpp-cifar10 --data photos --epochs 0.5 --batch 4 --warmup 1 --out runs/mpp": 0,
    "study vtab tiny.safetensors --data-root nowhere": 3,  # it is run in tests/studies/test_vtab.py
    "push tiny.safetensors hf:ORG/NAME --dry-run": 0,
    "convert tiny.safetensors tiny.onnx --to onnx": 0,
    "convert tiny.safetensors tiny.onnx --to onnx --int8 --measure photos": 0,
    "convert tiny.safetensors tiny.xml --to openvino": 0,
    "convert tiny.safetensors tiny.pt2 --to torch-export": 0,
    "convert tiny.safetensors measured.safetensors --measure photos": 0,  # by torch and by OpenVINO
    "merge rows.csv": 0,
    "index features.npy --out new.index": 0,
    "search photos.index photos --top 2": 0,
    "data suspects photos --model tiny.safetensors --folds 2 --split train --out suspects": 0,
    "study paper": 0,
    "study table": 0,
    "distill tiny.safetensors --model tiny.safetensors --data photos --set distillation.kind=features --epochs 1"
    " --batch 4 --warmup 1 --out runs/student": 0,
    "study resolution --data photos --plan": 0,  # it is run in tests/cli/test_paper_study.py
    **{
        f"study {name} --data imagenet21k": 0
        for name in ("data-size", "compute", "size", "positions", "head", "shape", "optimizer")
    },
    "zero-shot tiny.safetensors labels.txt --text-vectors texts.npy --scale 100": 0,  # a text tower is run below
}
REMOTE = {"data get", "serve"}  # one is given a remote name; the other listens, once (tests/cli/test_serve.py)


def prepare_rows(verb: str, folder: Path) -> None:
    """What commands before this one write."""
    predict = ["predict", f"{folder}/tiny.safetensors", f"{folder}/photos", "--device", "cpu"]
    if verb == "merge":
        assert main([*predict, "--part", "1/1", "--out", f"{folder}/rows.csv"]) == 0
    if verb in ("index", "search"):
        assert main([*predict, "--embed", "--out", f"{folder}/features.npy"]) == 0
    if verb == "search":
        assert main(["index", f"{folder}/features.npy", "--out", f"{folder}/photos.index"]) == 0


@pytest.mark.attack
@pytest.mark.parametrize("command", OTHERS)
def test_no_command_or_extra_reaches_for_the_network(
    tmp_path: Path, attacked: Callable[[str, str], None], command: str
) -> None:
    model = vitrail.create("ti16", image_size=32, num_classes=3, depth=1, width=32, heads=1, mlp=64)
    view = PreprocessConfig(size=(32, 32), resize=(36,))
    vitrail.save(vitrail.Trained(model, view, ("a", "b", "c")), tmp_path / "tiny.safetensors")
    write_image_folder(tmp_path / "photos", "train", "val", "test", each=4)
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    np.save(tmp_path / "texts.npy", np.eye(2, 32))
    prepare_rows(command.partition(" ")[0], tmp_path)
    ended = run_watched(["-m", "vitrail", *shlex.split(command)], tmp_path)
    assert ended.code == OTHERS[command], ended.err
    assert not ended.contacts
    assert not ended.strangers
    how = "compiled code included" if has_namespaces() else "as far as Python sees"
    attacked(f"a library that reports to its makers: {command}", f"no name looked up, nothing connected to, {how}")


@pytest.mark.attack
def test_a_text_tower_in_a_folder_reaches_for_nothing(tmp_path: Path, attacked: Callable[[str, str], None]) -> None:
    """By transformers, without torchvision, which need not fit torch here."""
    text_towers.write_clip(tmp_path / "clip")
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    script = "import sys; sys.modules['torchvision'] = None; from vitrail.cli import main; sys.exit(main(sys.argv[1:]))"
    ended = run_watched(["-c", script, "zero-shot", "clip", "labels.txt"], tmp_path)
    assert ended.code == 0, ended.err
    assert not ended.contacts
    assert not ended.strangers
    attacked("a library that reports to its makers: zero-shot clip labels.txt", "no name looked up")


def test_every_verb_is_watched_here_or_on_a_page() -> None:
    commands = [*list_watched_commands(), *(f"vitrail {command}" for command in OTHERS)]
    unseen = {verb for verb in COMMANDS if not any(command.startswith(f"vitrail {verb}") for command in commands)}
    assert unseen <= REMOTE


def test_the_watch_sees_a_socket_of_python_in_a_fork(tmp_path: Path) -> None:
    script = "import os, socket; os.fork() or socket.socket().connect_ex(('127.0.0.1', 9)); os.wait()"
    assert "socket.connect ('127.0.0.1', 9)" in run_watched(["-c", script], tmp_path).contacts


def test_the_watch_sees_a_socket_of_compiled_code(tmp_path: Path) -> None:
    """As ONNX Runtime's is, which no audit hook sees."""
    if not has_namespaces():
        pytest.skip("no network namespace can be made here (unshare, iproute2): packets of compiled code are not seen")
    address = "struct.pack('=H', 2) + bytes([0, 9, 127, 0, 0, 1]) + bytes(8)"
    script = f"import ctypes, struct; c = ctypes.CDLL(None); c.connect(c.socket(2, 1, 0), {address}, 16)"
    ended = run_watched(["-c", script], tmp_path)
    assert ended.contacts == ["2 packets were sent"]  # one, and the refusal of it
