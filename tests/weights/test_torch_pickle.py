"""Model files that ask for more memory than they hold: refused in one line, before it is taken."""

import io
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import model_factory
from vitrail.errors import ModelError
from vitrail.weights import tensor_files
from vitrail.weights.load import load, save
from vitrail.weights.torch_pickle import PickleError, check_pickle

Attacked = Callable[[str, str], None]
LOADED = """
import resource, sys
from pathlib import Path
from vitrail.errors import ModelError
from vitrail.weights.load import load
def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024
before = resident()
for path in sys.argv[1:]:
    try:
        load(path)
        print("loaded", path)
    except ModelError as error:
        print(str(error).replace("\\n", "NEWLINE"))
print(resident() - before)
"""


def load_all(*paths: Path) -> tuple[list[str], int]:
    """What is said of each file, and by how many MB loading them raised the greatest memory of a process."""
    command = [sys.executable, "-W", "ignore", "-c", LOADED, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    *lines, memory = done.stdout.splitlines()
    return lines, int(memory)


def write_torch_file(path: Path, content: bytes) -> Path:
    """A .pth with a pickle of one's own."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/data/0", bytes(64))
    return path


def number(value: int) -> bytes:
    return b"\x8a" + bytes([len(raw := pickle.encode_long(value))]) + raw


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def call(name: str, arguments: bytes) -> bytes:
    return b"c" + name.replace(" ", "\n").encode() + b"\n(" + arguments + b"tR"


LIST = b"](" + b"K\x01" * 20_000 + b"e"
STORED = b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + number(10**11) + b"tQ"
SIZE = b"(" + number(10**6) + number(10**6) + b"t(" + number(10**6) + b"K\x01t"
PICKLES = {
    "bytearray(6,000,000,000)": call("__builtin__ bytearray", number(6 * 10**9)),
    "bytearray, by its other name": call("builtins bytearray", number(6 * 10**9)),
    "a storage of 10^10 numbers": call("torch FloatStorage", number(10**10)),
    "a tensor of 10^10 numbers": call("torch FloatTensor", number(10**10)),
    "a tensor of 10^10 numbers, of any type": call("torch Tensor", number(10**10)),
    "a quantized tensor": call("torch._utils _rebuild_qtensor", STORED + b"K\x00" + SIZE),
    "a storage behind another call": call("torch._tensor _rebuild_from_type_v2", b"ctorch\nFloatStorage\n"),
    "a new object": b"c__builtin__\nbytearray\n(" + number(6 * 10**9) + b"t\x81",
    "one text encoded 20,000 times": text(b"a" * 100_000)
    + b"q\x00"
    + text(b"latin1")
    + b"q\x01"
    + b"".join(b"c_codecs\nencode\nh\x00h\x01\x86R" for _ in range(20_000)),
    "one list made 20,000 sets": LIST + b"q\x00" + b"".join(b"c__builtin__\nset\nh\x00\x85R" for _ in range(20_000)),
    "numbers that its file does not hold": b"}("
    + text(b"a")
    + call("torch._utils _rebuild_tensor_v2", STORED + b"K\x00" + SIZE + b"\x89ccollections\nOrderedDict\n)R")
    + b"u",
    "a stack that is empty": b"tR",
    "an instruction of a later protocol": b"\x95" + struct.pack("<Q", 2**60),
    "a text of 2^60 bytes": b"\x8d" + struct.pack("<Q", 2**60),
}


@pytest.mark.attack
def test_pickles_that_would_allocate_are_refused_before_they_do(tmp_path: Path, attacked: Attacked) -> None:
    paths = [
        write_torch_file(tmp_path / f"{place}.pth", b"\x80\x02" + content + b".")
        for place, content in enumerate(PICKLES.values())
    ]
    assert all(path.stat().st_size < 1_000_000 for path in paths)
    lines, memory = load_all(*paths)
    for path, line in zip(paths, lines, strict=True):
        assert line.startswith(str(path)), line
        assert "NEWLINE" not in line
    assert memory < 150  # torch's own modules, loaded at first use
    attacked(
        f"{len(PICKLES)} .pth files whose pickles allocate: bytearray(6e9), storages, one text encoded 20,000 times",
        f"each refused in one line; memory grew by {memory} MB",
    )


def test_every_pickle_that_torch_reads_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    """Whatever training scripts put beside a state dict, and every type of tensor."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    noted = torch.nn.Parameter(torch.ones(2))
    noted.note = 3  # type: ignore[attr-defined]
    types = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool)
    beside: dict[str, Any] = {
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "best": (0.5, None, True, -1, 2**70, "x", b"\0\xff", {1, 2}, 1j, torch.Size([2]), torch.float16),
        "types": {str(kind): torch.zeros(2, dtype=kind) for kind in types},
        "device": torch.device("cpu"),
        "noted": noted,
        "rng": torch.get_rng_state(),
    }
    torch.save({"model": model.state_dict()} | beside, tmp_path / "model.pth")
    assert torch.load(tmp_path / "model.pth", weights_only=True)["epoch"] == 3
    with pytest.raises(ModelError, match=r"holds torch\.int64, not floating"):  # BatchNorm counts by it
        tensor_files.read_tensors(tmp_path / "model.pth")
    del model[1]
    torch.save({"model": model.state_dict()} | beside, tmp_path / "model.pth")
    assert tensor_files.read_tensors(tmp_path / "model.pth").tensors.keys() == {"0.weight", "0.bias"}


def test_a_pickle_of_endless_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.weights.torch_pickle.MAX_OPCODES", 100)
    with pytest.raises(PickleError, match="over 100 instructions"):
        check_pickle(b"\x80\x02" + b"N" * 200 + b".")


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    """Which of them is looked at and which is loaded would be another question."""
    path = write_torch_file(tmp_path / "model.pth", b"\x80\x02}.")
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    with pytest.raises(ModelError, match="two entries of one name"):
        load(path)


@pytest.mark.attack
def test_an_npz_whose_array_claims_a_header_of_2_gib_is_refused_unread(tmp_path: Path, attacked: Attacked) -> None:
    path = tmp_path / "model.npz"
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    length = 2**31 - 2**16
    start = b"\x93NUMPY\x02\x00" + struct.pack("<I", length)
    packed, check = packer.compress(start), zlib.crc32(start)
    for _ in range(length // 2**16):
        packed += packer.compress(bytes(2**16))
    packed += packer.flush()
    name, size = b"a.npy", len(start) + length
    fields = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 33, check, len(packed), size, len(name), 0)
    local = b"PK\3\4" + fields + name + packed
    central = b"PK\1\2" + struct.pack("<H", 20) + fields + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)
    path.write_bytes(local + central + end)
    assert path.stat().st_size < 3_000_000
    [line], memory = load_all(path)
    assert line.startswith(f"{path} is damaged")
    assert memory < 150
    attacked("a 2-MB .npz whose array claims a header of 2 GiB", f"refused; memory grew by {memory} MB")


def test_an_npz_header_of_every_version_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for version in ((1, 0), (2, 0), (3, 0)):
            file = io.BytesIO()
            np.lib.format.write_array(file, np.ones((2, 3), np.float32), version=version)
            archive.writestr(f"{version[0]}.npy", file.getvalue())
    assert set(tensor_files.read_npz_headers(tmp_path / "a.npz").values()) == {tensor_files.ArrayHeader((2, 3), "<f4")}


@pytest.mark.attack
def test_a_header_that_would_allocate_positions_or_layers_is_refused(tmp_path: Path, attacked: Attacked) -> None:
    plain = model_factory.build_vit(positions="sincos-2d", patch=1, width=8, heads=1, image_size=(16, 16), classes=2)
    path = tmp_path / "model.safetensors"
    save(model_factory.build_trained(plain, labels=None), path)
    whole = path.read_bytes()
    paths = []
    for place, (before, after) in enumerate(
        (
            (b'\\"image_size\\": [16, 16]', b'\\"image_size\\": [16384, 16384]'),
            (b'\\"depth\\": 3', b'\\"depth\\": 1024'),
            (b'\\"width\\": 8', b'\\"width\\": 65536'),
            (b'\\"mlp\\": 64', b'\\"mlp\\": 1048576'),
            (b'\\"classes\\": 2', b'\\"classes\\": 10000000'),
            (b'\\"registers\\": 0', b'\\"registers\\": 4096'),
        )
    ):
        header = int.from_bytes(whole[:8], "little")
        text_of = whole[8 : 8 + header]
        assert before in text_of, before
        changed = text_of.replace(before, after)
        paths.append(tmp_path / f"{place}.safetensors")
        paths[-1].write_bytes(len(changed).to_bytes(8, "little") + changed + whole[8 + header :])
    lines, memory = load_all(*paths)
    for path, line in zip(paths, lines, strict=True):
        assert line.startswith(f"{path} is damaged"), line
        assert "NEWLINE" not in line
    assert memory < 150
    attacked(
        "headers with 16384 x 16384 positions at patch 1, 1,024 layers, a width of 65,536, 10^7 classes",
        f"each refused; memory grew by {memory} MB",
    )
