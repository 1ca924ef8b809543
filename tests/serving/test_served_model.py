"""A served model: its names, its results as the routes carry them, and its pictures."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import model_factory
from vitrail.data.transforms import normalize
from vitrail.errors import UsageError
from vitrail.inference.classifier import Classifier
from vitrail.model.vit import attention_maps
from vitrail.serving import routes
from vitrail.serving.batching import BatchQueue
from vitrail.serving.request_handling import Service
from vitrail.serving.served_model import choose_names, render_rollout, start_model
from vitrail.visualization.plots import get_heat_colormap


def test_the_veil_has_the_colors_of_the_report() -> None:
    attention = np.array([[0.0, 0.0], [0.0, 1.0]], dtype=np.float32)
    png = render_rollout(torch.zeros(3, 32, 32, dtype=torch.uint8), attention, over_image=False)
    pixels = np.asarray(Image.open(io.BytesIO(png)))
    colors = {tuple(color) for color in get_heat_colormap().tolist()}
    assert {tuple(color) for color in pixels[..., :3].reshape(-1, 3).tolist()} <= colors
    assert pixels[-1, -1, 3] > pixels[0, 0, 3]
    script = (routes.PAGE_FOLDER / "script.js").read_text()
    [stops] = re.findall(r"const HEAT = (\[\[.*?\]\]);", script)
    for place, stop in enumerate(json.loads(stops)):
        assert get_heat_colormap()[round(255 * place / 8)].tolist() == pytest.approx(stop, abs=3)
        assert "rgb({} {} {})".format(*stop) in (routes.PAGE_FOLDER / "style.css").read_text()  # the legend's


def test_names_are_short_different_and_no_paths(tmp_path: Path) -> None:
    models = [
        "runs/cats/weights/best.safetensors", str(tmp_path / "cats.safetensors"), "hf:google/vit-base@main",
        "b16", "b16", "deit_tiny_patch16_224.in1k/", "model.npz",
    ]  # fmt: skip
    names = choose_names(models)
    assert names[:5] == ["cats", "cats 2", "vit-base@main", "b16", "b16 2"]
    assert names[5] == "deit_tiny_patch16_224.in1k"
    assert len(set(names)) == len(names)
    assert not any("/" in name for name in names)


@pytest.mark.parametrize(
    ("data", "name"),
    [("/home/me/photos", "photos"), ("/home/me/birds/list.csv", "birds"), ("/data/fungi.jsonl", "fungi"),
     ("hf:org/cats", "cats"), ("hf:org/pets:cfg@main", "pets"), ("hf:org/pets@v1.0", "pets"),
     ("/data/jft/x-{000..127}.tar", "jft"), ("/data/shards/*.tar", "shards"), ("/data/owls/[0-9]?.tar", "owls"),
     (None, "finetune-3"), (r"C:\pets", "pets")],
)  # fmt: skip
def test_a_run_is_called_by_its_dataset(tmp_path: Path, data: str | None, name: str) -> None:
    folder = tmp_path / "finetune-3"
    (folder / "weights").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"data": data}))
    assert choose_names([str(folder), str(folder / "weights" / "best.safetensors")]) == [name, f"{name} 2"]


def test_a_hash_is_no_name(tmp_path: Path) -> None:
    digest = "0123456789abcdef" * 4
    cached = tmp_path / "models--org--vit" / "snapshots" / digest[:40] / "model.safetensors"
    assert choose_names([str(cached), f"hf:org/vit@{digest[:40]}", str(tmp_path / "cats" / digest)]) == [
        "models--org--vit", "vit", "cats",
    ]  # fmt: skip


def test_a_model_is_ready_once_its_first_pass_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = Classifier(model_factory.build_trained(model_factory.build_vit()), device="cpu")
    queue = BatchQueue(max_batch=8, capacity=8, deadline=60)
    served = start_model("m", classifier, queue)
    assert served.warmup.result(20).shape == (1, 7)
    assert served.is_ready

    def fail(_: object) -> torch.Tensor:
        raise RuntimeError("planted")

    monkeypatch.setattr(classifier, "predict_proba", fail)
    broken = start_model("m", classifier, queue)
    assert isinstance(broken.warmup.exception(20), RuntimeError)
    assert not broken.is_ready
    queue.close()


def test_without_a_class_token_the_first_row_of_attention_is_the_mean_of_all_patches() -> None:
    model = model_factory.build_vit(class_token=False, pool="norm-mean")
    queue = BatchQueue(max_batch=8, capacity=8, deadline=60)
    served = start_model("m", Classifier(model_factory.build_trained(model), device="cpu"), queue)
    pixels = torch.arange(3 * 32 * 32).reshape(3, 32, 32).to(torch.uint8)
    [maps] = served.compute_attention([pixels], 2)
    assert maps.shape == (4, 17, 16)
    attention = list(attention_maps(model, normalize(pixels[None], served.classifier.preprocess)))[1][0].numpy()
    rows = np.concatenate([attention.mean(axis=1, keepdims=True), attention], axis=1)
    assert np.abs(maps / 255 - rows / rows.max(axis=2, keepdims=True)).max() < 0.5 / 255 + 1e-5
    for layer in (0, 4):
        with pytest.raises(UsageError, match=f"layer is {layer}; m has 3, counted from 1"):
            served.compute_attention([], layer)
    queue.close()


def test_a_model_describes_itself_in_the_fields_of_the_schema(service: Service) -> None:
    facts = service.models["small"].describe()
    assert set(facts) | {"indexed_images"} == set(routes.ModelInfo.model_fields)  # which the service counts
    expected = {"name": "small", "classes": 7, "input": [32, 32], "grid": [4, 4], "layers": 3, "heads": 4}
    assert {name: facts[name] for name in expected} == expected
