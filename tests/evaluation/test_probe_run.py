"""A probe from Python, without the command line (the command: tests/cli/test_probe.py)."""

from pathlib import Path

import torch

from tests import model_factory
from tests.data.image_files import write_image_folder
from vitrail.data.sources import open_dataset
from vitrail.evaluation.probe_run import ProbeSettings, run_probe


def test_a_probe_returns_the_scores_of_its_methods(tmp_path: Path) -> None:
    dataset = open_dataset(str(write_image_folder(tmp_path / "images", "train", "val", "test", each=4)))
    trained = model_factory.build_trained(model_factory.build_vit(classes=2), labels=dataset.classes)
    settings = ProbeSettings(
        device=torch.device("cpu"), methods=("knn", "linear"), k=1, save=tmp_path / "probed.safetensors"
    )
    facts = run_probe(trained, dataset, "images", settings)
    assert facts is not None
    assert [score["method"] for score in facts["scores"]] == ["kNN", "linear"]
    assert facts["saved"]["path"] == str(tmp_path / "probed.safetensors")
    assert (tmp_path / "probed.safetensors").is_file()
