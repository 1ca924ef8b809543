"""The Python of docs/exporting.md, run as it stands."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import model_factory
from tests.data.image_files import make_image
from tests.export import runtime
from vitrail import Classifier, save
from vitrail.export.export import export_model


def test_what_the_page_tells_to_run_answers_as_vitrail_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime("onnxruntime")
    monkeypatch.chdir(tmp_path)
    trained = model_factory.build_trained(model_factory.build_vit(depth=1))
    save(trained, "model.safetensors")
    export_model(trained, Path("out.onnx"), "onnx")
    make_image(1).save("cat.jpg")
    make_image(2).save("dog.jpg")
    text = (Path(__file__).parents[2] / "docs" / "exporting.md").read_text()
    first, *rest = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    named: dict[str, Any] = {}
    exec(first, named)
    pixels, probabilities = named["pixels"], named["probabilities"]
    classifier = Classifier(trained, device="cpu")
    assert np.abs(probabilities - classifier.predict_proba(["cat.jpg", "dog.jpg"]).numpy()).max() < 1e-5
    exec("\n".join(rest), named)
    assert np.array_equal(named["pixels"], pixels)
    assert np.array_equal(named["probabilities"], probabilities)
    expected = [answer[0][0] for answer in classifier(["cat.jpg", "dog.jpg"])]
    assert capsys.readouterr().out == f"{expected}\n"
