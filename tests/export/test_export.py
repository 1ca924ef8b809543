"""Exported files, each run in its own runtime: they say what vitrail says, or are not written."""

import functools
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import model_factory
from tests.export import runtime
from vitrail import files
from vitrail.config import RotaryConfig
from vitrail.errors import ModelError, UsageError
from vitrail.export import export, graph
from vitrail.export.export import (
    EXPORT_FORMATS,
    ExportFormat,
    check_export_destination,
    export_in_precision,
    export_model,
)
from vitrail.export.graph import ExportGraph, GraphRunner
from vitrail.weights.trained import Trained

onnxruntime, openvino = runtime("onnxruntime"), runtime("openvino")
onnx_files, openvino_files = runtime("vitrail.export.onnx"), runtime("vitrail.export.openvino")

RUN: dict[ExportFormat, Callable[[Path], GraphRunner]] = {
    "onnx": onnx_files.load_runner,
    "torch-export": graph.load_runner,
    "openvino": openvino_files.load_runner,
}
LABELS = ("Käfer", 'a "b" <c>', "\U0001f41e", *"defg")


def make_models() -> dict[str, Trained]:
    """Every kind of network, each way to read its output and to place its patches; small and shallow."""
    return {
        "class token": model_factory.build_trained(
            model_factory.build_vit(depth=1, registers=2), labels=LABELS, temperature=1.5
        ),
        "mean": model_factory.build_trained(
            model_factory.build_vit(depth=1, pool="mean-norm", positions="relative"), multi_label=True
        ),
        "map": model_factory.build_trained(
            model_factory.build_vit(depth=1, pool="map", class_token=False, positions="sincos-2d", gelu="erf")
        ),
        "hybrid without a head": model_factory.build_trained(
            model_factory.build_vit(depth=1, stem=model_factory.STEM, patch=2, classes=0)
        ),
        "rotary and gated": model_factory.build_trained(
            model_factory.build_vit(
                depth=1,
                rotary=RotaryConfig(places="index", reference=(5, 6), offset=1, order="xy"),
                gated_mlp=True,
                mlp_norm=True,
                attention_norm=True,
                norm_pre=True,
                projection=24,
            )
        ),
        "rotary and biases": model_factory.build_trained(
            model_factory.build_vit(
                depth=1,
                rotary=RotaryConfig(places="normalized"),
                positions="relative-bias",
                gelu="quick",
                pool="map",
                pool_heads=2,
                pool_prefix=True,
                normalize_features=True,
            )
        ),
        "resnet": model_factory.build_trained(model_factory.build_bit(), threshold=0.4),
    }


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of MODELS is traced once for all formats, which is half of what an export takes."""
    monkeypatch.setattr(graph, "export_program", export_program_once)


MODELS, export_program_once = make_models(), functools.lru_cache(graph.export_program)


def make_small_model(**changes: Any) -> Trained:
    return model_factory.build_trained(model_factory.build_vit(depth=1), **changes)


def make_path(folder: Path, form: ExportFormat) -> Path:
    return folder / f"model{EXPORT_FORMATS[form].suffix}"


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("form", EXPORT_FORMATS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_file_says_what_vitrail_says_of_batches_of_any_size(kind: str, form: ExportFormat, tmp_path: Path) -> None:
    trained, path = MODELS[kind], make_path(tmp_path, form)
    result = export_model(trained, path, form)
    assert result.difference <= result.allowed == export.MAX_DIFFERENCE
    run = RUN[form](path)
    for batch in (1, 3, 5):
        pixels = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8)
        outputs, expected = run(pixels), export.compute_reference_outputs(trained, pixels)
        assert tuple(outputs) == tuple(expected)
        for name, values in expected.items():
            torch.testing.assert_close(outputs[name], values, rtol=1e-5, atol=1e-5)
    metadata = graph.build_metadata(trained)
    assert {
        name: json.loads(text) for name, text in read_metadata(path, form, list(metadata)).items() if name in metadata
    } == {name: json.loads(text) for name, text in metadata.items()}
    for file in tmp_path.iterdir():
        assert str(Path(__file__).parents[2]).encode() not in file.read_bytes(), "a path of this machine"


def read_metadata(path: Path, form: ExportFormat, names: list[str]) -> dict[str, str]:
    """A file's metadata as its own runtime reads them."""
    if form == "onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        assert [tuple(entry.shape) for entry in session.get_inputs()] == [("batch", 3, 32, 32)]
        return dict(session.get_modelmeta().custom_metadata_map)
    if form == "openvino":
        model = openvino.Core().read_model(path)
        return {name: model.get_rt_info(["vitrail", name]).astype(str) for name in names}
    extra = dict.fromkeys(names, "")
    torch.export.load(path, extra_files=extra)
    return extra


class Shifted(ExportGraph):
    """A graph that normalizes with a mean which is wrong by half a gray level."""

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        self.mean += 0.5 / 255


def test_a_file_that_says_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "ExportGraph", Shifted)
    path = tmp_path / "model.pt2"
    path.write_text("what was there before")
    with pytest.raises(ModelError, match=r"nothing was written: .* differs from vitrail's own float32 by .*e-0[1-4]"):
        export_model(make_small_model(), path, "torch-export", overwrite=True)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {path.name: "what was there before"}


def test_a_pt2_holds_no_pickle(tmp_path: Path) -> None:
    export_model(make_small_model(), tmp_path / "model.pt2", "torch-export")
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        others = {name: archive.read(name) for name in archive.namelist() if "/weights/weight_" not in name}
    assert [name for name, content in others.items() if content.startswith((b"PK", b"\x80"))] == []


# --- two files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO's writer replaced by one that writes a model's label to both files."""

    def write_both_files(trained: Trained, path: Path) -> None:
        assert trained.labels is not None
        path.write_text(trained.labels[0])
        path.with_suffix(".bin").write_text(trained.labels[0])

    monkeypatch.setattr(openvino_files, "write", write_both_files)
    monkeypatch.setattr(
        openvino_files,
        "load_runner",
        lambda _: lambda pixels: export.compute_reference_outputs(make_small_model(), pixels),
    )


def read_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.usefixtures("two_files")
def test_graph_and_weights_are_replaced_together(tmp_path: Path) -> None:
    for label in ("old", "new"):
        export_model(make_small_model(labels=(label, *"bcdefg")), tmp_path / "model.xml", "openvino", overwrite=True)
        assert read_files(tmp_path) == {"model.xml": label, "model.bin": label}


@pytest.mark.usefixtures("two_files")
def test_a_crash_between_the_two_leaves_no_graph_with_the_weights_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_model(make_small_model(labels=("old", *"bcdefg")), tmp_path / "model.xml", "openvino")

    def crash(*_: object, **__: object) -> None:
        raise OSError("crash")

    monkeypatch.setattr(files, "_rename_into_place", crash)
    with pytest.raises(OSError, match="crash"):
        export_model(make_small_model(labels=("new", *"bcdefg")), tmp_path / "model.xml", "openvino", overwrite=True)
    assert read_files(tmp_path) == {"model.bin": "new"}


@pytest.mark.parametrize("name", ["model.xml", "model.bin"])
def test_neither_file_is_replaced_unasked(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=f"{name} exists already"):
        export_model(make_small_model(), tmp_path / "model.xml", "openvino")
    assert (tmp_path / name).read_text() == "mine"


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "name", "better"),
    [("onnx", "a.safetensors", "a.onnx"), ("torch-export", "a", "a.pt2"), ("openvino", "a.bin", "a.xml")],
)
def test_a_name_that_does_not_suit_is_refused(form: ExportFormat, name: str, better: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"call it .*/{better}$"):
        check_export_destination(tmp_path / name, form)


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_what_is_there_stays(form: ExportFormat, tmp_path: Path) -> None:
    path = make_path(tmp_path, form)
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        check_export_destination(path, form)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        check_export_destination(path, form, overwrite=True)


@pytest.mark.parametrize(
    ("form", "missing"), [("onnx", "onnxscript"), ("onnx", "onnxruntime"), ("openvino", "openvino")]
)
def test_a_missing_runtime_is_named_with_its_extra(
    form: ExportFormat, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=rf"--to {form} needs {missing}: pip install 'vitrail\[{form}\]'"):
        check_export_destination(make_path(tmp_path, form), form)


@pytest.mark.parametrize(
    ("model", "reason"), [(model_factory.build_bit(), "a ResNet"), (model_factory.build_vit(classes=0), "no head")]
)
def test_int8_is_refused_where_it_has_no_meaning(model: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason):
        export_in_precision(model_factory.build_trained(model), tmp_path / "model.onnx", "int8", lambda _: {})
    assert not list(tmp_path.iterdir())
