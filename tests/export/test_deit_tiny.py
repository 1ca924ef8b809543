"""A real ViT in ONNX Runtime on real images, if the development data is there."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.export import runtime
from vitrail import Classifier, load
from vitrail.export import export
from vitrail.export.export import export_model

onnxruntime = runtime("onnxruntime")


@pytest.mark.slow
def test_onnx_runtime_agrees_on_500_photographs(data: Path, deit_tiny: Path, tmp_path: Path) -> None:
    """As docs/exporting.md feeds it: the same likeliest class everywhere, and logits within the rule."""
    with tarfile.open(data / "imagenet_samples.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    photographs, trained = sorted(tmp_path.rglob("*.jpg")), load(deit_tiny)
    assert len(photographs) == 500
    export_model(trained, tmp_path / "deit.onnx", "onnx")
    classifier = Classifier(trained, device="cpu")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(tmp_path / "deit.onnx", options, providers=["CPUExecutionProvider"])
    for start in range(0, 500, 20):
        pixels = np.stack([classifier.make_input(path).numpy() for path in photographs[start : start + 20]])
        logits, probabilities = session.run(["logits", "probabilities"], {"pixels": pixels})
        expected = export.compute_reference_outputs(trained, torch.from_numpy(pixels))
        assert np.array_equal(logits.argmax(axis=1), expected["logits"].argmax(dim=1).numpy())
        largest = float(expected["logits"].abs().max())
        assert np.abs(logits - expected["logits"].numpy()).max() <= 1e-5 * max(1, largest)
        assert np.abs(probabilities - expected["probabilities"].numpy()).max() <= 1e-5
