"""Hostile and damaged files: refused in one line, no code run, nothing written."""

import io
import json
import os
import pickle
import random
import struct
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import model_factory
from vitrail.errors import ModelError
from vitrail.weights.formats import WeightsFormat
from vitrail.weights.load import load, save

WATCHED = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect", "shutil.rmtree", "os.remove")


class Watch:
    """An audit hook cannot be removed, so one is installed for good and switched on and off."""

    events: ClassVar[list[str]] = []
    on = False
    installed = False

    @classmethod
    def hook(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if not cls.on:
            return
        writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if event in WATCHED or writes:
            cls.events.append(f"{event} {arguments!r:.80}")


@contextmanager
def assert_no_side_effects() -> Iterator[None]:
    """No process is started, no socket opened, no file written or removed."""
    if not Watch.installed:
        sys.addaudithook(Watch.hook)
        Watch.installed = True
    Watch.events, Watch.on = [], True
    try:
        yield
    finally:
        Watch.on = False
    assert Watch.events == []


def assert_refused(path: Path, message: str | None = None) -> None:
    with assert_no_side_effects(), pytest.raises(ModelError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/vitrail-was-here",)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_pickle_that_holds_code_is_not_run(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    torch.save({"state_dict": {"weight": torch.ones(2)}, "args": Attack()}, path)
    assert_refused(path, "holds Python objects other than tensors")
    assert not Path("/tmp/vitrail-was-here").exists()


def test_a_bare_or_old_pickle_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(pickle.dumps(Attack()))
    assert_refused(path, "no zip archive")
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert_refused(path, "saved before torch 1.6")


def test_a_state_dict_under_the_usual_keys_is_found_and_others_are_not(tmp_path: Path) -> None:
    model = model_factory.build_vit(width=64, heads=1, gelu="erf")
    path = tmp_path / "model.pth"
    for wrapped in (
        {"model": model.state_dict(), "epoch": 3},
        {"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}},
    ):
        torch.save(wrapped, path)
        assert torch.equal(load(path).model.head.weight, model.head.weight)
    torch.save({"weights": {"a": torch.ones(1)}}, path)
    assert_refused(path, "the entry 'weights' is not a named tensor")
    torch.save([torch.ones(1)], path)
    assert_refused(path, "expected a map of names to tensors")
    torch.save({"a": torch.eye(2).to_sparse()}, path)
    assert_refused(path, "sparse, quantized or empty")


def test_a_tensor_that_claims_more_than_the_file_holds_is_refused(tmp_path: Path) -> None:
    """An expanded view says 4 TB and stores four bytes: its shape fits no model, and nothing is allocated for it."""
    model = model_factory.build_vit(width=64, heads=1, gelu="erf")
    huge = torch.zeros(1).expand(10**6, 10**6)
    torch.save(model.state_dict() | {"head.weight": huge}, tmp_path / "model.pth")
    assert_refused(tmp_path / "model.pth", "claims more than the file holds")
    torch.save(model.state_dict() | {"head.weight": torch.empty(7, 64, device="meta")}, tmp_path / "model.pth")
    assert_refused(tmp_path / "model.pth", "sparse, quantized or empty|damaged")


def is_loadable(path: Path) -> bool:
    """Whether the file loads; any other error than ours fails the test."""
    try:
        load(path)
    except ModelError as error:
        if "\n" in str(error):
            pytest.fail(f"more than one line: {error}")
        return False
    return True


def write_header_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_crafted_safetensors_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert_refused(path, "its header claims 4611686018427387904 of 10 bytes")
    path.write_bytes(b"")
    assert_refused(path, "its header claims")
    path.write_bytes(b"PK\x03\x04")
    assert_refused(path)
    for header in (b"[" * 100_000, b"\xff\xfe", b"{", b"[]", b'{"a": NaN', b"<!DOCTYPE html><html>"):
        assert_refused(write_header_file(path, header), "damaged")
    assert_refused(write_header_file(path, {"__metadata__": {"vitrail": 1}}), "not a map of strings")
    assert_refused(write_header_file(path, {"__metadata__": []}), "not a map of strings")
    assert_refused(write_header_file(path, {"a": tensor | {"shape": [2**40]}}, b"1234"), "damaged")
    assert_refused(write_header_file(path, {"a": tensor | {"shape": [2**62, 2**62]}}, b"1234"), "damaged")
    assert_refused(write_header_file(path, {"a": tensor | {"shape": [-1]}}, b"1234"), "damaged")
    assert_refused(write_header_file(path, {"a": tensor | {"data_offsets": [0, 2**60]}}, b"1234"), "damaged")
    assert_refused(write_header_file(path, {"a": tensor | {"dtype": "F31"}}, b"1234"), "damaged")
    assert_refused(write_header_file(path, {"a": tensor, "b": tensor}, b"1234"), "damaged")
    assert_refused(write_header_file(path, {"a": tensor}, b"1234"), "it holds a, ...")
    assert_refused(write_header_file(path, {}), "no tensors")
    assert_refused(write_header_file(path, {"__metadata__": {"vitrail": "{"}}), "not JSON")
    assert_refused(write_header_file(path, {"__metadata__": {"vitrail": '{"version": 1}'}}), "lacks the field")
    assert_refused(write_header_file(path, {"a": tensor | {"shape": [0, 2**63], "data_offsets": [0, 0]}}), "damaged")
    assert_refused(write_header_file(path, {"__metadata__": {"vitrail": '{"labels": "\\ud800"}'}}), "not JSON")


def test_a_thousand_flipped_or_cut_files_are_refused_or_harmless(tmp_path: Path) -> None:
    """A flipped header byte or a cut file never crashes. A flip inside the weights is a weight: it may load."""
    good = tmp_path / "good.safetensors"
    save(model_factory.build_trained(model_factory.build_vit(depth=1)), good)
    content = good.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    generator, path = random.Random(0), tmp_path / "model.safetensors"
    loaded = 0
    for i in range(1000):
        broken = bytearray(content)
        if i % 4 == 0:
            del broken[generator.randrange(len(broken)) :]
        else:
            broken[generator.randrange(end)] ^= 1 << generator.randrange(8)
        path.write_bytes(broken)
        loaded += is_loadable(path)
    assert loaded < 400  # labels, names and numbers whose change leaves a valid model


def test_a_thousand_flipped_or_cut_torch_files_are_refused_or_harmless(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(model_factory.build_vit(depth=1, width=64, heads=1, mlp=8, gelu="erf").state_dict(), buffer)
    content, generator, path = buffer.getvalue(), random.Random(0), tmp_path / "model.pth"
    for i in range(1000):
        broken = bytearray(content)
        if i % 4 == 0:
            del broken[generator.randrange(len(broken)) :]
        else:
            for _ in range(3):
                broken[generator.randrange(len(broken))] ^= 1 << generator.randrange(8)
        path.write_bytes(broken)
        is_loadable(path)


def test_a_zip_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 10**7)
    assert_refused(path, "holds compressed entries")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"0" * 100)
    assert_refused(path)


SHAPES = [(), (1,), (2, 3), (1, 0, 64), (3, 3, 3, 3), (64, 3, 0, 0), (1, 17, 63)]


@pytest.mark.parametrize("format_name", ["timm", "transformers", "torchvision"])
def test_any_tensor_of_any_shape_is_refused_or_fits(format_name: WeightsFormat, tmp_path: Path) -> None:
    """Every tensor of a foreign file in turn gets a wrong shape, another type, or is gone: one line each time."""
    model = model_factory.build_vit(width=64, heads=1, depth=1, gelu="erf")
    target = tmp_path / ("model.pth" if format_name == "torchvision" else "model")
    save(model_factory.build_trained(model), target, format_name)
    path = target if target.is_file() else target / "pytorch_model.bin"
    tensors = torch.load(target, weights_only=True) if target.is_file() else load_file(target / "model.safetensors")
    if target.is_dir():
        (target / "model.safetensors").unlink()
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        torch.save(rest, path)
        assert_refused(target)
        for shape in SHAPES:
            torch.save(rest | {name: torch.zeros(shape)}, path)
            assert_refused(target)
        torch.save(rest | {name: tensors[name].bool()}, path)
        assert_refused(target, "not floating-point numbers")


def test_registers_without_their_neighbours_are_refused(tmp_path: Path) -> None:
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    model = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**sizes))
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    for name in ("embeddings.cls_token", "embeddings.position_embeddings", "embeddings.register_tokens"):
        for shape in SHAPES:
            save_file(tensors | {name: torch.zeros(shape)}, path)
            assert_refused(tmp_path / "model")
    save_file({name: tensor for name, tensor in tensors.items() if "cls_token" not in name}, path)
    assert_refused(tmp_path / "model", "registers, but no class token")


@pytest.mark.parametrize(
    "key", ["hidden_act", "image_size", "num_attention_heads", "layer_norm_eps", "id2label", "pooler_act"]
)
@pytest.mark.parametrize("value", [[], {}, "x", -1, 10**30, None, True, 1.5])
def test_any_value_in_a_transformers_config_is_refused_or_harmless(key: str, value: object, tmp_path: Path) -> None:
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model", "transformers")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    is_loadable(tmp_path / "model")


@pytest.mark.parametrize("key", ["size", "crop_size", "resample", "image_mean", "rescale_factor", "do_resize"])
@pytest.mark.parametrize("value", [[], {}, "x", -1, 10**30, None, True, 1.5])
def test_any_value_in_a_preprocessor_config_leaves_it_known_or_unknown(key: str, value: object, tmp_path: Path) -> None:
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model", "transformers")
    path = tmp_path / "model" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    loaded = load(tmp_path / "model")
    known = loaded.preprocess is not None
    assert known != any(text.startswith("preprocessing: unknown") for text in loaded.origin.assumptions)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"model_type": []}', '{"architecture": 3}', "{}", "\x00", '{"model_type": {"a": 1}}']
)
def test_a_folder_with_a_broken_config_is_refused(text: str, tmp_path: Path) -> None:
    save(model_factory.build_trained(model_factory.build_vit(gelu="erf")), tmp_path / "model", "timm")
    (tmp_path / "model" / "config.json").write_text(text)
    assert_refused(tmp_path / "model")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nothing.safetensors", "does not exist")
    assert_refused(tmp_path, r"has no config\.json and no weights file")
    (tmp_path / "config.json").write_text('{"architecture": "vit_base_patch16_224"}')
    assert_refused(tmp_path, r"has a config\.json but no weights: neither model\.safetensors nor pytorch_model\.bin")
    (tmp_path / "model.xyz").write_text("")
    assert_refused(tmp_path / "model.xyz", r"has the suffix '\.xyz'")


def test_integers_in_place_of_weights_are_refused(tmp_path: Path) -> None:
    model = model_factory.build_vit(width=64, heads=1, gelu="erf")
    torch.save(model.state_dict() | {"head.bias": torch.zeros(7, dtype=torch.int64)}, tmp_path / "model.pth")
    assert_refused(tmp_path / "model.pth", r"'head\.bias' holds torch\.int64")
