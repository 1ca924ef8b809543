"""Fewer bits on the command line: chosen by the file, forced by an option, told to the user."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests import model_factory
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import write_image_folder
from vitrail import Classifier, load, save
from vitrail.model.quantized import describe_cpu
from vitrail.serving.batching import BatchQueue
from vitrail.serving.served_model import start_model
from vitrail.weights.precision_measurements import PrecisionMeasurement

FASTER = PrecisionMeasurement(
    processor=describe_cpu(), precision="bfloat16", threads=2, speedup=1.9, images=500, top1_agreement=0.998,
    confident_agreement=1.0, confident_images=400, mean_probability_change=0.002,
    data="photos",
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(
        model_factory.build_trained(model_factory.build_vit(), precision_measurements=(FASTER,)),
        tmp_path / "model.safetensors",
    )
    return tmp_path / "model.safetensors"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_image_folder(tmp_path / "pictures", each=2)


def test_predict_computes_as_the_file_says_and_says_so_once(model: Path, pictures: Path, capsys: Capture) -> None:
    command = ("predict", str(model), str(pictures), "--device", "cpu", "--json")
    code, chosen, error = vitrail(*command, capsys=capsys)
    assert code == 0
    assert (
        error.count("computing in bfloat16, which the model's file records as faster here with the same predictions")
        == 1
    )
    _, exact, error = vitrail(*command, "--precision", "float32", capsys=capsys)
    assert "computing" not in error
    paths = [json.loads(line)["image"] for line in exact.splitlines()]
    for out, precision in ((chosen, "bfloat16"), (exact, "float32")):
        predictions = Classifier(load(model), device="cpu", precision=precision)(paths, top=1)
        for line, [(label, probability)] in zip(out.splitlines(), predictions, strict=True):
            [prediction] = json.loads(line)["predictions"]
            assert prediction == {"label": label, "probability": pytest.approx(probability, abs=1e-6)}
    assert chosen != exact


def test_a_file_of_rows_is_not_continued_in_another_precision(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    command = ("predict", str(model), str(pictures), "--device", "cpu", "--out", str(tmp_path / "rows.csv"))
    assert vitrail(*command, capsys=capsys)[0] == 0
    before = (tmp_path / "rows.csv").read_bytes()
    code, _, error = vitrail(*command, "--precision", "float32", capsys=capsys)
    assert code == 2
    assert "was begun with --precision bfloat16, not float32" in error
    assert vitrail(*command, "--precision", "bfloat16", capsys=capsys)[0] == 0, "the same one, forced"
    assert (tmp_path / "rows.csv").read_bytes() == before


def test_features_and_attention_stay_as_they_are(model: Path, pictures: Path, tmp_path: Path, capsys: Capture) -> None:
    plain = tmp_path / "plain.safetensors"
    save(dataclasses.replace(load(model), precision_measurements=()), plain)
    embedded = [
        vitrail("predict", str(item), str(pictures), "--device", "cpu", "--embed", capsys=capsys)
        for item in (model, plain)
    ]
    assert embedded[0][1] == embedded[1][1]
    assert "computing" not in embedded[0][2]
    for item in (model, plain):
        overlays = ("--attention", str(tmp_path / item.stem))
        assert vitrail("predict", str(item), str(pictures), "--device", "cpu", *overlays, capsys=capsys)[0] == 0
    drawn = [{path.name: path.read_bytes() for path in (tmp_path / item.stem).iterdir()} for item in (model, plain)]
    assert drawn[0] == drawn[1] != {}


def test_info_tells_what_was_measured_and_what_this_cpu_would_use(model: Path, capsys: Capture) -> None:
    code, out, _ = vitrail("info", str(model), capsys=capsys)
    assert code == 0
    assert "bfloat16: 1.90 times float32's speed, the same class for 99.80% of 500 images of photos," in " ".join(
        out.split()
    )
    assert "bfloat16 by default; --precision changes it" in " ".join(out.split())
    facts = json.loads(vitrail("info", str(model), "--json", capsys=capsys)[1])
    assert facts["precision"] == "bfloat16"
    assert facts["precision_measurements"] == [dataclasses.asdict(FASTER)]


def test_a_served_model_tells_its_precision_and_still_explains(model: Path) -> None:
    queue = BatchQueue(max_batch=4, capacity=8, deadline=1.0)
    try:
        served = start_model("model", Classifier(load(model), device="cpu"), queue)
        served.warmup.result()
        assert served.describe()["precision"] == "bfloat16"
        pixels = served.classifier.make_input(
            model_factory.draw_images(served.classifier.model.config, 1).mul(40).byte()[0]
        )
        assert served.compute_rollouts([pixels]).shape == (1, 4, 4)
        assert served.compute_attention([pixels], 1)[0].shape == (4, 17, 16)
    finally:
        queue.close()
