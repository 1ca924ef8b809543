"""All figures from Python, and their folder (the command: tests/cli/test_figures.py)."""

import json
from pathlib import Path

import pytest

from tests import model_factory
from tests.data.image_files import write_image_folder
from vitrail.visualization import all_figures
from vitrail.visualization.all_figures import FigureModel
from vitrail.visualization.attention_images import FigureImage
from vitrail.visualization.figure_folder import RECORD_FILE, FigureFolder, claim_folder
from vitrail.weights.load import load, save


def test_figures_of_a_model_are_drawn_and_recorded(tmp_path: Path) -> None:
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.safetensors")
    root = write_image_folder(tmp_path / "images", each=2)
    names, image_arguments = all_figures.split_models_and_images(str(tmp_path / "model.safetensors"), [str(root)])
    images = all_figures.list_images(image_arguments)
    models = all_figures.prepare_models([FigureModel(name, load(name)) for name in names], device_name="cpu")
    figure_folder = FigureFolder(claim_folder(str(tmp_path / "out")), [model.name for model in models])
    figure_folder.clear()
    weights = all_figures.draw_weight_figures(models, figure_folder)
    all_figures.draw_image_figures(models, images, {}, figure_folder, weights=weights, num_drawn=1)
    facts = figure_folder.write_record(complete=True)
    assert facts == json.loads((tmp_path / "out" / RECORD_FILE).read_text())
    assert facts["numbers"]["attention"]["model"]["images"] == 4
    assert all((tmp_path / "out" / name).is_file() for name in facts["files"])
    assert claim_folder(str(tmp_path / "out")) == tmp_path / "out"


@pytest.mark.parametrize("number", [0, 1, 3, 10, 99])
def test_images_are_spread_evenly(number: int) -> None:
    images = [FigureImage(str(index), Path) for index in range(10)]
    names = [int(image.name) for image in all_figures.spread_evenly(images, number)]
    assert len(names) == min(number, 10)
    assert names == sorted(set(names))
