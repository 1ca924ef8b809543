"""`vitrail.evaluate` and `vitrail.probe`: the commands' numbers and tables, and how results are shown."""

import base64
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

import vitrail
from tests.api.conftest import FAST, HERE, make_trained
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as run_command
from tests.data.image_files import make_image, write_image_folder
from vitrail.errors import DataError, UsageError

TIMED = ("seconds", "images_per_second", "folder", "cached")  # and what a second call need not compute again


def drop_times(value: Any) -> Any:
    if isinstance(value, list):
        return [drop_times(item) for item in value]
    if isinstance(value, dict):
        return {name: drop_times(item) for name, item in value.items() if name not in TIMED}
    return value


def test_the_command_and_evaluate_write_the_same_tables(tuned_run: Path, capsys: Capture) -> None:
    model = str(tuned_run)
    arguments = ("evaluate", model, "photos", "--against", "model.safetensors", "--out", "command", "--json", *HERE)
    code, out, _ = run_command(*arguments, capsys=capsys)
    assert code == 0
    evaluation = vitrail.evaluate(model, "photos", against="model.safetensors", out="python", **FAST)
    assert capsys.readouterr().out == ""
    assert evaluation.folder == Path("python")
    tables = sorted(path.name for path in Path("command").rglob("*.csv"))
    assert tables
    assert sorted(path.name for path in Path("python").rglob("*")) == sorted(
        path.name for path in Path("command").rglob("*")
    )
    for path in Path("command").rglob("*.csv"):
        assert path.read_bytes() == Path("python", path.relative_to("command")).read_bytes(), path
    assert drop_times(json.loads(out)) == drop_times(json.loads(json.dumps(evaluation.metrics)))


def test_an_evaluation_has_the_numbers_of_its_confusion_matrix(tuned_run: Path) -> None:
    evaluation = vitrail.evaluate(vitrail.Run(tuned_run), "photos", split="val", **FAST)
    confusion = evaluation.confusion
    assert confusion is not None
    assert confusion.sum() == 10
    assert evaluation.accuracy == np.trace(confusion) / 10
    assert evaluation.per_class == {"rose": confusion[0, 0] / 5, "tulip": confusion[1, 1] / 5}
    low, high = evaluation.interval
    assert low <= evaluation.accuracy <= high
    assert (evaluation.classes, evaluation.folder) == (("rose", "tulip"), None)
    assert not Path("runs").exists()


def test_an_evaluation_shows_its_numbers_with_escaped_names() -> None:
    images = [(np.full((32, 32, 3), 40 * number, np.uint8), number % 2) for number in range(6)]
    data = {"test": [(pixels, ("<b>", "tulip")[label]) for pixels, label in images]}
    evaluation = vitrail.evaluate(make_trained(labels=("<b>", "tulip")), data, **FAST)
    accuracy = f"{evaluation.accuracy:.1%} of 6 images correct"
    assert repr(evaluation).startswith("Evaluation(test on images in memory: ")
    assert accuracy in repr(evaluation)
    html = evaluation._repr_html_()
    assert accuracy in html
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert html.count("<img") == (evaluation.accuracy < 1)


def test_an_evaluation_shows_how_often_its_probabilities_are_right() -> None:
    evaluation = vitrail.evaluate(make_trained(), "photos", **FAST)
    error = evaluation.results[0].metrics.calibration_error
    html = evaluation._repr_html_()
    assert f"how often a probability is right, calibration error {error:.1%}" in html
    counts = [int(number) for number in re.findall(r"(\d+) predictions, [\d.]+% correct", html)]
    assert sum(counts) == 10  # the test images, in bins


def test_a_probe_draws_its_few_shot_accuracy_by_shots(capsys: Capture) -> None:
    for shots, lines in (([1, 2, 5], 1), ([5], 0)):
        result = vitrail.probe("model.safetensors", "photos", methods="few-shot", shots=shots, **FAST)
        html = result._repr_html_()
        assert html.count("<figcaption>few-shot accuracy") == lines
        assert html.count('class="dot point s0"') == 3 * lines
    assert capsys.readouterr().out == ""


def test_an_evaluation_shows_its_worst_mistakes_while_their_images_exist(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", "test", classes=("rose", "tulip"), each=3)
    evaluation = vitrail.evaluate(make_trained(labels=("rose", "tulip")), root, **FAST)
    wrong = (~evaluation.results[0].evaluation.predictions.correct).sum()
    assert wrong > 0  # random weights
    (picture,) = re.findall(
        r'<figcaption>worst mistakes</figcaption><img [^>]*base64,([^"]+)"', evaluation._repr_html_()
    )
    with Image.open(io.BytesIO(base64.b64decode(picture))) as shown:
        assert shown.width <= 900
    shutil.rmtree(root)
    assert "worst mistakes" not in evaluation._repr_html_()


class Tensors(Dataset[tuple[Tensor, int]]):
    """As a torchvision dataset with ToTensor, and perhaps Normalize."""

    def __init__(self, mean: float = 0.0) -> None:
        self.mean = mean

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.array(make_image(index, (32, 32)))
        return torch.from_numpy(pixels).permute(2, 0, 1) / 255 - self.mean, index % 2


def test_tensors_of_floats_are_measured_as_their_uint8() -> None:
    images = [(make_image(index, (32, 32)), index % 2) for index in range(6)]
    evaluations = [vitrail.evaluate(make_trained(), {"test": data}, **FAST) for data in (images, Tensors())]
    of_images, of_floats = (evaluation.results[0].evaluation.predictions for evaluation in evaluations)
    assert torch.equal(of_images.probabilities, of_floats.probabilities)


def test_unreadable_images_of_memory_get_the_reason_and_no_command_that_cannot_see_them() -> None:
    rule = r"such as 000000.png has values from -0.5 to 0.5; floats are from 0 to 1"
    data = Tensors(mean=0.5)
    splits: Any = {"train": data, "val": data}
    calls: dict[str, Callable[[], object]] = {
        "evaluate": lambda: vitrail.evaluate(make_trained(), {"test": data}, **FAST),
        "evaluate some": lambda: vitrail.evaluate(make_trained(), {"test": [Tensors()[0], data[0]]}, **FAST),
        "probe": lambda: vitrail.probe(make_trained(), splits, methods="knn", **FAST),
        "finetune": lambda: vitrail.finetune(splits, make_trained(), **FAST),
    }
    for name, call in calls.items():
        with pytest.raises(DataError, match=r"has values from .* floats are from 0 to 1") as raised:
            call()
        assert "data check" not in str(raised.value), name
    with pytest.raises(DataError, match=f"^none of 6 images can be read, {rule}"):
        calls["evaluate"]()


def test_wrong_arguments_of_evaluate_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^batch is 0"):
        vitrail.evaluate("model.safetensors", "photos", batch=0)
    with pytest.raises(UsageError, match=r"^abstain is 2"):
        vitrail.evaluate("model.safetensors", "photos", abstain=2)
    with pytest.raises(UsageError, match="must be a local folder that is new or empty"):
        vitrail.evaluate("model.safetensors", "photos", out="photos")


def test_the_command_and_probe_give_the_same_scores(capsys: Capture) -> None:
    arguments = ("probe", "model.safetensors", "photos", "--methods", "few-shot", "knn", "--shots", "5", "--k", "3")
    code, out, err = run_command(*arguments, "--json", *HERE, capsys=capsys)
    assert code == 0, err
    options: dict[str, Any] = {"methods": ["few-shot", "knn"], "shots": [5], "k": 3, **FAST}
    result = vitrail.probe("model.safetensors", "photos", **options)
    assert result is not None
    assert drop_times(json.loads(out)) == drop_times(json.loads(json.dumps(result.metrics)))
    assert result.scores.keys() == {"5-shot", "kNN"}
    for shown in (repr(result), result._repr_html_()):
        for name, accuracy in result.scores.items():
            assert name in shown
            assert f"{accuracy:.1%}" in shown
