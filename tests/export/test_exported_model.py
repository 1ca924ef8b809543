"""Exported files are opened with what their metadata state, those of earlier versions too."""

from pathlib import Path

import pytest

from tests import model_factory
from tests.export import runtime
from vitrail.errors import ModelError
from vitrail.export import graph
from vitrail.export.export import ExportFormat, export_model, open_exported_model


@pytest.mark.parametrize(("form", "name"), [("onnx", "model.onnx"), ("openvino", "model.xml")])
@pytest.mark.parametrize("keys", ["new", "old"])
def test_metadata_of_this_and_of_earlier_versions_are_read(
    form: ExportFormat, name: str, keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime(f"vitrail.export.{form}")
    trained = model_factory.build_trained(
        model_factory.build_vit(depth=1),
        multi_label=True,
        temperature=1.5,
        threshold=0.25,
        label_thresholds=(0.5, 0.25, 0.75, 0.5, 0.5, 0.5, 0.1),
    )
    if keys == "old":
        old_keys = {new: old for old, new in graph.OLD_METADATA_KEYS.items()}
        metadata = {old_keys.get(key, key): value for key, value in graph.build_metadata(trained).items()}
        assert {"several", "normalised"} <= metadata.keys()
        monkeypatch.setattr(graph, "build_metadata", lambda _: metadata)
    export_model(trained, tmp_path / name, form)
    exported = open_exported_model(tmp_path / name)
    assert (exported.preprocess, exported.labels) == (trained.preprocess, trained.labels)
    assert (exported.multi_label, exported.temperature, exported.threshold) == (True, 1.5, 0.25)
    assert exported.label_thresholds == trained.label_thresholds


def test_an_onnx_file_that_the_runtime_cannot_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """HardSwish of doubles is valid ONNX, and ONNX Runtime has none."""
    onnx = runtime("onnx")
    names = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, [1]) for name in ("x", "y")]
    node = onnx.helper.make_node("HardSwish", ["x"], ["y"])
    foreign = onnx.helper.make_graph([node], "foreign", names[:1], names[1:])
    opset = [onnx.helper.make_opsetid("", 14)]
    onnx.save(onnx.helper.make_model(foreign, opset_imports=opset, ir_version=8), tmp_path / "foreign.onnx")
    with pytest.raises(ModelError, match=r"foreign\.onnx cannot be read: .*NOT_IMPLEMENTED"):
        open_exported_model(tmp_path / "foreign.onnx")
