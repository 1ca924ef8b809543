"""vitrail's own file: what goes in comes out, versions are honoured, damage is named."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests import model_factory
from tests.model_factory import VARIANTS
from vitrail.config import PreprocessConfig
from vitrail.errors import ModelError, UsageError
from vitrail.weights import tensor_files
from vitrail.weights.load import load, save
from vitrail.weights.trained import Origin


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_save_and_load_is_the_identity(change: dict[str, Any], tmp_path: Path) -> None:
    before = model_factory.build_trained(model_factory.build_vit(**change))
    save(before, tmp_path / "model.safetensors")
    after = load(tmp_path / "model.safetensors")
    assert after.model.config == before.model.config
    assert (after.preprocess, after.labels, after.origin) == (before.preprocess, before.labels, before.origin)
    written, read = before.model.state_dict(), after.model.state_dict()
    assert written.keys() == read.keys()
    assert all(torch.equal(written[name], read[name]) for name in written)
    images = model_factory.draw_images(before.model.config)
    with torch.no_grad():
        assert torch.equal(before.model(images), after.model(images))


@given(
    labels=st.none() | st.lists(st.text(min_size=1), min_size=7, max_size=7).map(tuple),
    resize=st.tuples(st.integers(32, 99)) | st.tuples(st.integers(32, 99), st.integers(32, 99)),
    mean=st.tuples(*[st.floats(-1, 1)] * 3),
    license_name=st.none() | st.text(),
    changes=st.lists(st.text(), max_size=3).map(tuple),
)
@settings(max_examples=30, deadline=None)
def test_any_words_and_numbers_survive(
    tmp_path_factory: pytest.TempPathFactory,
    labels: tuple[str, ...] | None,
    resize: tuple[int, ...],
    mean: tuple[float, ...],
    license_name: str | None,
    changes: tuple[str, ...],
) -> None:
    path = tmp_path_factory.mktemp("native") / "model.safetensors"
    preprocess = PreprocessConfig(size=(32, 32), resize=resize, mean=mean, std=(0.1, 1.0, 2.0), interpolation="lanczos")
    origin = Origin(format="timm", name="näme", sha256="0" * 64, license=license_name, changes=changes)
    before = model_factory.build_trained(model_factory.build_vit(), labels=labels, preprocess=preprocess, origin=origin)
    save(before, path)
    after = load(path)
    assert (after.preprocess, after.labels, after.origin) == (preprocess, labels, origin)


@given(temperature=st.floats(1e-3, 1e3))
@settings(max_examples=20, deadline=None)
def test_any_temperature_survives(tmp_path_factory: pytest.TempPathFactory, temperature: float) -> None:
    path = tmp_path_factory.mktemp("native") / "model.safetensors"
    save(model_factory.build_trained(model_factory.build_vit(), temperature=temperature), path)
    assert load(path).temperature == temperature


def test_label_thresholds_survive_and_a_file_without_them_does_not_name_them(tmp_path: Path) -> None:
    thresholds = (0.5, 0.25, 1.0, 0.0, 1 / 3, 0.1, 0.9)
    model = model_factory.build_vit()
    save(
        model_factory.build_trained(model, multi_label=True, label_thresholds=thresholds), tmp_path / "new.safetensors"
    )
    assert load(tmp_path / "new.safetensors").label_thresholds == thresholds
    save(model_factory.build_trained(model, multi_label=True), tmp_path / "old.safetensors")
    assert load(tmp_path / "old.safetensors").label_thresholds == ()
    assert b"label_thresholds" not in (tmp_path / "old.safetensors").read_bytes()


def test_two_saves_are_equal_byte_for_byte(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(model_factory.build_trained(model_factory.build_vit()), tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_weights_lie_where_vectors_can_be_read_whole_wherever_a_file_has_them(tmp_path: Path) -> None:
    """Else products of small matrices end in other bits than those of the model that was saved, on some CPUs."""
    path = tmp_path / "model.safetensors"
    save(model_factory.build_trained(model_factory.build_vit(classes=7)), path)
    with safe_open(path, "pt") as file:
        words = file.metadata()
    save_file({name: tensor.clone() for name, tensor in load_file(path).items()}, path, words)  # in another order
    assert any(tensor.data_ptr() % 64 for tensor in load_file(path).values())
    for name, parameter in load(path).model.named_parameters():
        assert parameter.data_ptr() % 64 == 0, name


def test_a_file_has_its_weights_there_so_that_they_are_mapped_and_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(model_factory.build_trained(model_factory.build_vit(classes=7)), path)
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    del header["__metadata__"]
    places = [entry["data_offsets"] for entry in header.values()]
    even = [start for start, end in places if (end - start) % 64 == 0]
    assert len(even) == len(places) - 1, "all but the head's bias of 7 classes"
    assert all((8 + size + start) % 64 == 0 for start in even)


def test_the_header_is_one_json_value_beside_format_pt(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(model_factory.build_trained(model_factory.build_vit()), path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata.keys() == {"format", "vitrail"}
    assert metadata["format"] == "pt"
    header = json.loads(metadata["vitrail"])
    assert header.keys() == {
        "version",
        "architecture",
        "preprocess",
        "labels",
        "origin",
        "temperature",
        "multi_label",
        "threshold",
    }
    assert header["version"] == 1
    assert header["architecture"]["gelu"] == "tanh"


def test_an_existing_file_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(model_factory.build_trained(model_factory.build_vit(0)), path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"exists already; .*--overwrite"):
        save(model_factory.build_trained(model_factory.build_vit(1)), path)
    assert path.read_bytes() == before
    save(model_factory.build_trained(model_factory.build_vit(1)), path, overwrite=True)
    assert path.read_bytes() != before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def rewrite_header(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A native file whose header was changed by hand."""
    path = tmp_path / "model.safetensors"
    save(model_factory.build_trained(model_factory.build_vit()), path, overwrite=True)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["vitrail"])
    change(header)
    save_file(load_file(path), path, metadata={"format": "pt", "vitrail": json.dumps(header)})
    return path


def test_a_file_from_before_temperatures_has_that_of_one(tmp_path: Path) -> None:
    path = rewrite_header(tmp_path, lambda header: header.pop("temperature"))
    with safe_open(path, "pt") as file:
        assert "temperature" not in json.loads(file.metadata()["vitrail"])
    assert load(path).temperature == 1.0


def test_keys_of_version_0_1_0_are_read(tmp_path: Path) -> None:
    """And are written no more: the header has the names of the fields."""
    facts = {"cpu": "x86_64-avx2", "threads": 2, "images": 500, "data": "photos", "precision": "int8"}
    agreement = {"speed": 2.5, "top1": 0.996, "sure": 0.995, "sure_images": 400, "change": 0.01}

    def rename_keys(header: dict[str, Any]) -> None:
        assert header.pop("multi_label") is False
        header["origin"]["licence"] = header["origin"].pop("license")
        header["origin"]["licence"] = "mit"
        header |= {"several": True, "tried": [facts | agreement], "ranges": [-1.5, 2.0] * 18}

    trained = load(rewrite_header(tmp_path, rename_keys))
    assert (trained.multi_label, trained.origin.license, trained.activation_ranges) == (True, "mit", (-1.5, 2.0) * 18)
    (measurement,) = trained.precision_measurements
    assert (measurement.speedup, measurement.top1_agreement, measurement.confident_images) == (2.5, 0.996, 400)
    assert (measurement.confident_agreement, measurement.mean_probability_change) == (0.995, 0.01)
    save(trained, tmp_path / "new.safetensors")
    header = tensor_files.read_safetensors_metadata(tmp_path / "new.safetensors")["vitrail"]
    assert not {f'"{key}"' for key in ("several", "tried", "ranges", "licence", *agreement)} & set(
        re.findall(r'"\w+"', header)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(version=2), "format version 2, and this vitrail reads 1 at most: pip install"),
        (lambda h: h.update(version=0), "format version is 0"),
        (lambda h: h.update(version=True), "format version is True"),
        (lambda h: h.pop("version"), "format version is None"),
        (lambda h: h.pop("origin"), "lacks the field 'origin'"),
        (lambda h: h.update(extra=1), "has no field 'extra'"),
        (lambda h: h["architecture"].update(kind="cnn"), "kind is 'cnn'"),
        (lambda h: h["architecture"].update(depth=10**9), "depth is 1000000000; it must be from 1 to 1024"),
        (lambda h: h["architecture"].update(width="32"), "width is '32'"),
        (lambda h: h["architecture"].update(width=True), "width is True"),
        (lambda h: h["architecture"].update(heads=5), "width 32 is not a multiple of heads 5"),
        (lambda h: h["architecture"].update(heads=0), "heads is 0"),
        (lambda h: h["architecture"].update(gelu="slow"), "gelu is 'slow'"),
        (lambda h: h["architecture"].update(image_size=[32]), "image_size is"),
        (lambda h: h["architecture"].update(patch=7), "does not divide into patches of 7"),
        (lambda h: h["architecture"].update(norm_eps=float("nan")), "norm_eps is nan"),
        (lambda h: h["architecture"].update(norm_eps=10**300), "norm_eps is 1000"),
        (lambda h: h["architecture"].update(unknown=1), "has no field 'unknown'"),
        (lambda h: h["architecture"].update(depth=4), "lacks the tensor 'blocks.3"),
        (lambda h: h["architecture"].update(depth=2), "no place for: 'blocks.2"),
        (lambda h: h["architecture"].update(mlp=65), "needs"),
        (lambda h: h["preprocess"].update(std=[0.5, 0.5, 0.0]), "std"),
        (lambda h: h["preprocess"].update(mean=[0.5], std=[0.5]), "1 channel and the model 3"),
        (lambda h: h["preprocess"].update(size=[10**6, 10**6]), "resize is"),
        (lambda h: h.update(labels=["one"]), "1 label given for a head of 7"),
        (lambda h: h.update(labels=[1] * 7), "labels is 1"),
        (lambda h: h.update(labels="seven"), "labels is 'seven'"),
        (lambda h: h.update(origin=None), "must be an object"),
        (lambda h: h.update(temperature=0), "temperature is 0.0; it must be from 0.001 to 1000"),
        (lambda h: h.update(temperature=1e-320), "temperature is 1e-320"),
        (lambda h: h.update(temperature=1e300), "temperature is 1e+300"),
        (lambda h: h.update(temperature=-1.0), "temperature is -1.0"),
        (lambda h: h["preprocess"].update(std=[1e-300, 0.5, 0.5]), "std must be from"),
        (lambda h: h["preprocess"].update(std=[float("nan"), 0.5, 0.5]), "std must be from"),
        (lambda h: h["preprocess"].update(mean=[1e300, 0.5, 0.5]), "mean is 1e+300"),
        (lambda h: h["preprocess"].update(size=[16384, 16384], resize=[16384]), "patches"),
        (lambda h: h["preprocess"].update(resize=[10**9]), "resize"),
        (lambda h: h["architecture"].update(image_size=[10**6, 10**6]), "image_size is 1000000"),
        (lambda h: h["architecture"].update(image_size=[16384, 16384], patch=1), "268,435,456 patches"),
        (lambda h: h["architecture"].update(depth=1024, width=65536, heads=1024, mlp=1048576), "lacks the tensor"),
        (lambda h: h["architecture"].update(classes=10_000_000), "needs (10000000,)"),
        (lambda h: h.update(threshold=1e300), "threshold is"),
        (lambda h: h.update(temperature=float("nan")), "temperature is nan"),
        (lambda h: h.update(temperature="warm"), "temperature is 'warm'"),
    ],
)
def test_a_header_that_lies_is_refused_in_one_line(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        load(rewrite_header(tmp_path, change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
