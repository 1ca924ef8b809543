"""`vitrail convert` for other runtimes: what it prints, what it measures and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import model_factory
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import write_image_folder
from tests.export import runtime
from vitrail import Classifier, load, save
from vitrail.api import conversion as convert
from vitrail.config import LoRAConfig
from vitrail.data.sources import open_dataset
from vitrail.evaluation.statistics import measure_agreement
from vitrail.weights.peft_export import build_adapter, write_adapter


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One block, so that it is quickly exported, and a head that is sure of some images."""
    path, network = tmp_path / "model.safetensors", model_factory.build_vit(depth=1)
    with torch.no_grad():
        network.head.weight.mul_(4)
    save(model_factory.build_trained(network), path)
    return path


@pytest.mark.parametrize(
    ("target_format", "suffix"), [("onnx", ".onnx"), ("torch-export", ".pt2"), ("openvino", ".xml")]
)
def test_exporting_leaks_no_warning_of_another_package(
    target_format: str, suffix: str, model: Path, tmp_path: Path
) -> None:
    """Without torchvision, too, of which torch would speak."""
    pytest.importorskip(
        {"onnx": "onnxscript"}.get(target_format, "openvino"), reason=f"the extra `{target_format}` is not installed"
    )
    arguments = ["convert", str(model), str(tmp_path / f"out{suffix}"), "--to", target_format]
    hide = "import sys; sys.modules['torchvision'] = None"
    code = f"{hide}; from vitrail.cli import main; sys.exit(main({arguments!r}))"
    command = [sys.executable, "-W", "default", "-c", code]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (completed.returncode, completed.stderr) == (0, f"model: {model}\n")


def test_the_difference_is_told(model: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "out.pt2"
    code, out, _ = vitrail("convert", str(model), str(path), "--to", "torch-export", capsys=capsys)
    assert code == 0
    assert out.splitlines()[0].startswith("difference  ")
    assert out.splitlines()[0].endswith("from float32 in vitrail; 1e-05 is allowed")
    assert out.splitlines()[1] == f"written     {path} (torch-export)"
    code, out, _ = vitrail(
        "convert", str(model), str(path), "--to", "torch-export", "--image-size", "48", "--overwrite", "--json",
        capsys=capsys,
    )  # fmt: skip
    facts = json.loads(out)
    assert facts["difference"] <= facts["allowed"] == 1e-5
    assert any("pos_embed" in change for change in facts["changes"])
    pixels = torch.randint(0, 256, (2, 3, 48, 48), dtype=torch.uint8)
    assert torch.export.load(path).module()(pixels)["logits"].shape == (2, 7)


def test_int8_is_measured_and_the_file_says_what_was_found(model: Path, tmp_path: Path, capsys: Capture) -> None:
    onnxruntime = runtime("onnxruntime")
    data, path = write_image_folder(tmp_path / "pictures", each=30), tmp_path / "out.onnx"
    command = ("convert", str(model), str(path), "--to", "onnx", "--int8", "--measure", str(data), "--json")
    code, out, _ = vitrail(*command, capsys=capsys)
    assert code == 0
    result = json.loads(out)["int8"]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["int8"]) == result
    assert json.loads(facts["labels"]) == [f"kind {index}" for index in range(7)]
    expected = measure_expected(session, model, data)
    assert expected == {name: result[name] for name in expected}
    assert 0 < result["mean_probability_change"] < 0.1
    assert result["speed"] > 0
    assert result["data"] == "pictures"
    assert list_int8_weights(path)


def test_float16_is_measured_and_refused_where_it_changes_predictions(tmp_path: Path, capsys: Capture) -> None:
    """Rounding changes the probabilities of the first model a little; hidden values of the second exceed 65,504."""
    onnx = runtime("onnx")
    data, path = write_image_folder(tmp_path / "pictures", "val", each=50), tmp_path / "out.onnx"
    for name, scale in (("small", 1.0), ("large", 1e3)):
        network = model_factory.build_vit(depth=1, classes=2)
        with torch.no_grad():
            network.head.weight.mul_(4)
            network.blocks[0].norm2.weight.mul_(scale)
            network.blocks[0].mlp.fc1.weight.mul_(scale)
            network.blocks[0].mlp.fc2.weight.mul_(1 / scale**2)
        save(model_factory.build_trained(network), tmp_path / f"{name}.safetensors")
    command = ("--to", "onnx", "--float16", "--measure", str(data))
    code, out, err = vitrail("convert", str(tmp_path / "large.safetensors"), str(path), *command, capsys=capsys)
    assert (code, out) == (4, "")
    assert "nothing was written: float16 predicts float32's class for" in err
    assert "99.5% are required; values exceed its range, 65,504, for 100 images" in err
    assert not path.exists()
    code, out, _ = vitrail("convert", str(tmp_path / "small.safetensors"), str(path), *command, "--json", capsys=capsys)
    assert code == 0
    result = json.loads(out)["float16"]
    assert result["images"] == 100
    assert result["top1_agreement"] >= 0.995
    assert 0 < result["mean_probability_change"] <= result["max_probability_change"] < 0.01
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(metadata["float16"]) == result
    assert onnx.TensorProto.FLOAT16 in {tensor.data_type for tensor in onnx.load(path).graph.initializer}
    few = write_image_folder(tmp_path / "few", "val", each=49)
    code, _, err = vitrail(
        "convert", "no-model", str(tmp_path / "no.onnx"), "--float16", "--measure", str(few), capsys=capsys
    )
    assert (code, f"float16 is measured on 100 images or more, and {few} has 98" in err) == (3, True), err


def test_precisions_are_measured_into_vitrails_own_file(model: Path, tmp_path: Path, capsys: Capture) -> None:
    data, path = write_image_folder(tmp_path / "pictures", each=30), tmp_path / "out.safetensors"
    code, out, _ = vitrail("convert", str(model), str(path), "--measure", str(data), "--json", capsys=capsys)
    assert code == 0
    measurements = load(path).precision_measurements
    assert [item["precision"] for item in json.loads(out)["precision_measurements"]] == [
        item.precision for item in measurements
    ]
    assert "bfloat16" in {item.precision for item in measurements}
    val = len(open_dataset(str(data)).splits["val"])
    assert all(0 < item.images <= val for item in measurements), measurements  # of what is slow, the first batch alone
    _, out, _ = vitrail("info", str(path), capsys=capsys)
    assert out.count("\nmeasured ") == len(measurements)
    headless = tmp_path / "headless.safetensors"
    save(model_factory.build_trained(model_factory.build_vit(depth=1, classes=0), labels=None), headless)
    code, _, err = vitrail("convert", str(headless), str(path), "--measure", str(data), "--overwrite", capsys=capsys)
    assert (code, "the model has no head" in err) == (2, True)


def list_int8_weights(path: Path) -> list[str]:
    """The names of weights in 8 bits."""
    onnx = runtime("onnx")
    graph = onnx.load(path).graph
    return [item.name for item in graph.initializer if item.data_type == onnx.TensorProto.INT8]


def measure_expected(session: Any, model: Path, data: Path) -> dict[str, Any]:
    """What int8 changes, of the images of val one by one, and against vitrail itself."""
    classify, split = Classifier(load(model), device="cpu"), open_dataset(str(data)).splits["val"]
    images = [split.read_image(index) for index in range(len(split))]
    inputs = [classify.make_input(image)[None].numpy() for image in images]
    predictions = torch.cat(
        [torch.from_numpy(session.run(["probabilities"], {"pixels": pixels})[0]) for pixels in inputs]
    )
    agreement = measure_agreement(torch.cat([classify.predict_proba([image]) for image in images]), predictions)
    return {
        "images": len(images),
        "top1_agreement": agreement.top1_agreement,
        "confident_images": agreement.confident_images,
    }


def test_a_vitrail_file_in_float16_has_half_the_size_and_is_float32_again_when_loaded(
    tmp_path: Path, capsys: Capture
) -> None:
    trained = model_factory.build_trained(model_factory.build_vit(width=64))
    source, path = tmp_path / "source.safetensors", tmp_path / "half.safetensors"
    save(trained, source)
    code, out, err = vitrail("convert", str(source), str(path), "--float16", capsys=capsys)
    assert code == 0, err
    assert "weights: rounded to float16" in out
    assert path.stat().st_size < 0.6 * source.stat().st_size
    stored, loaded = load_file(path), load(path).model.state_dict()
    for name, tensor in trained.model.state_dict().items():
        nearest = torch.from_numpy(tensor.numpy().astype(np.float16))  # NumPy rounds to nearest
        assert torch.equal(stored[name], nearest), name
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], nearest.float()), name
    vitrail("convert", str(path), str(tmp_path / "again.safetensors"), "--float16", capsys=capsys)
    assert all(map(torch.equal, load_file(tmp_path / "again.safetensors").values(), stored.values()))


def test_weights_beyond_float16_are_refused(tmp_path: Path, capsys: Capture) -> None:
    network = model_factory.build_vit()
    with torch.no_grad():
        network.head.weight[0, 0] = 1e5
    save(model_factory.build_trained(network), tmp_path / "large.safetensors")
    path = tmp_path / "half.safetensors"
    code, _, err = vitrail("convert", str(tmp_path / "large.safetensors"), str(path), "--float16", capsys=capsys)
    assert (code, path.exists()) == (4, False)
    assert "weights of 'head.weight' are beyond float16's range, 65,504" in err


def test_precisions_are_measured_on_the_rounded_weights(tmp_path: Path, capsys: Capture) -> None:
    source, path = tmp_path / "source.safetensors", tmp_path / "half.safetensors"
    save(model_factory.build_trained(model_factory.build_vit(depth=1, classes=2)), source)
    data = write_image_folder(tmp_path / "pictures", "val", each=4)
    options = ("--float16", "--measure", str(data))
    code, _, err = vitrail("convert", str(source), str(path), *options, capsys=capsys)
    assert code == 0, err
    assert load(path).precision_measurements
    assert load_file(path)["head.weight"].dtype == torch.float16


def test_a_large_set_is_sampled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are sorted by class, and the first of them would all be of one."""
    dataset = open_dataset(str(write_image_folder(tmp_path / "pictures", each=40)))
    whole = dataset.splits["val"]
    monkeypatch.setattr(convert, "MAX_MEASURED_IMAGES", 3)
    selected = convert._select_images(dataset)
    assert 2 <= len(selected) <= 3
    assert selected.get_image_name(0) == whole.get_image_name(0)
    assert {selected.get_labels(index) for index in range(len(selected))} == {
        whole.get_labels(index) for index in range(len(whole))
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "onnx", "--int8"], "name images to measure how much: --measure DATA"),
        (["--to", "openvino", "--int8", "--measure", "."], "--int8 is for onnx, not for openvino: add --to onnx"),
        (["--to", "timm", "--float16"], "--float16 is for onnx and vitrail, not for timm"),
        (["--to", "vitrail", "--int8"], "--int8 is for onnx, not for vitrail"),
        (["--to", "onnx", "--measure", "."], "--measure is not for onnx: add --to onnx and --int8 or --float16"),
        (["--to", "onnx", "--int8", "--float16"], "--int8 and --float16 are two precisions of a file"),
        (["--to", "onnx", "--float16"], "--float16 changes the predictions; name images to measure how much"),
        (["--to", "onnx"], "onnx writes a .onnx file; call it"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_model_is_read(
    options: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    code, out, err = vitrail("convert", "no-model", str(tmp_path / "out.safetensors"), *options, capsys=capsys)
    assert (code, out) == (2, "")
    assert message in err


def test_a_model_without_preprocessing_is_refused_with_the_option_that_helps(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "bare.safetensors"
    save(model_factory.build_trained(model_factory.build_vit(depth=1), preprocess=None), path)
    command = ("convert", str(path), str(tmp_path / "out.pt2"), "--to", "torch-export")
    code, _, err = vitrail(*command, capsys=capsys)
    assert (code, "--preprocess imagenet (or inception, torchvision)" in err) == (2, True)
    assert "does not say how images must be prepared" in err
    assert vitrail(*command, "--preprocess", "imagenet", capsys=capsys)[0] == 0


def test_convert_lists_each_change_and_note(tmp_path: Path, capsys: Capture) -> None:
    source, target = str(tmp_path / "a.safetensors"), str(tmp_path / "b")
    save(model_factory.build_trained(model_factory.build_vit()), source)
    options = ["--to", "timm", "--classes", "3", "--image-size", "48", "--patch", "16", "--channels", "1"]
    code, out, err = vitrail("convert", source, target, *options, capsys=capsys)
    assert code == 0
    for name in ("head.weight", "pos_embed", "patch_embed.proj.weight", "preprocess.size", "preprocess.mean"):
        assert name in out
    assert f"written  {target} (timm)" in out
    assert f"model: {source}" in err
    config = load(Path(target)).model.config
    assert (config.classes, config.image_size, config.patch, config.channels) == (3, (48, 48), 16, 1)


def test_convert_names_classes_and_preprocessing(tmp_path: Path, capsys: Capture) -> None:
    save(
        model_factory.build_trained(model_factory.build_vit(width=64, heads=1, gelu="erf")),
        tmp_path / "bare.safetensors",
        "timm",
    )
    (tmp_path / "names.txt").write_text("\n".join("abcdefg"))
    options = ["--labels", str(tmp_path / "names.txt"), "--preprocess", "imagenet", "--json"]
    code, out, _ = vitrail(
        "convert", str(tmp_path / "bare.safetensors"), str(tmp_path / "new.safetensors"), *options, capsys=capsys
    )
    assert code == 0
    assert json.loads(out)["changes"] == ["preprocess: imagenet, given by hand", "labels: none -> 7 names"]
    loaded = load(tmp_path / "new.safetensors")
    assert loaded.labels == tuple("abcdefg")
    assert loaded.preprocess is not None
    assert loaded.preprocess.mean == (0.485, 0.456, 0.406)


def test_an_adapter_is_written_under_other_names(tmp_path: Path, capsys: Capture) -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    tensors = {"blocks.1.attn.qkv.lora_A": torch.randn(2, 32), "blocks.1.attn.qkv.lora_B": torch.randn(96, 2)}
    adapter = build_adapter(tensors, LoRAConfig(rank=2), trained, trained.origin)
    write_adapter(adapter, tmp_path / "peft", "peft")
    prefixes = {
        "peft-timm": "blocks.1.attn.qkv.",
        "peft-v4": "vit.encoder.layer.1.attention.attention.query.",
        "peft": "vit.layers.1.attention.q_proj.",
    }
    for name, prefix in prefixes.items():
        target = tmp_path / f"as-{name}"
        command = ("convert", str(tmp_path / "peft"), str(target), "--to", name)
        code, out, _ = vitrail(*command, capsys=capsys)
        assert (code, f"{target} ({name})" in out) == (0, True)
        assert f"base_model.model.{prefix}lora_A.weight" in load_file(target / "adapter_model.safetensors")
        code, _, err = vitrail(*command, capsys=capsys)
        assert (code, "exists" in err) == (2, True)
    (target / "notes.txt").write_text("mine")
    code, _, err = vitrail(*command, "--overwrite", capsys=capsys)
    assert (code, "holds 'notes.txt' and is no adapter to overwrite" in err) == (2, True)
    code, _, err = vitrail(*command[:2], str(tmp_path / "out.safetensors"), "--to", "peft", capsys=capsys)
    assert (code, f"an adapter is a folder: call it {tmp_path / 'out'}" in err) == (2, True)


def test_formats_of_adapters_take_no_model_and_no_other_option(tmp_path: Path, capsys: Capture) -> None:
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.safetensors")
    for source, options, code, message in (
        (tmp_path / "model.safetensors", [], 4, "is no adapter: it has no adapter_config.json"),
        (tmp_path, ["--classes", "3"], 2, "peft is for adapters alone: vitrail convert ADAPTER DST --to peft"),
    ):
        found = vitrail("convert", str(source), str(tmp_path / "out"), "--to", "peft", *options, capsys=capsys)
        assert (found[0], message in found[2]) == (code, True), found[2]
