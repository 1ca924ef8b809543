"""What is accepted as a model: a name, a path, a Run and a Trained, everywhere."""

import dataclasses
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitrail
from tests import model_factory
from tests.api.conftest import FAST
from vitrail.api.models import choose_distinct_name, get_model_name, load_trained
from vitrail.errors import UsageError
from vitrail.weights.load import load, save
from vitrail.weights.trained import Origin


def make_model(kind: str, folder: Path) -> Any:
    kinds = {"name": str, "path": Path, "run": vitrail.Run, "trained": load}
    return kinds[kind](folder)


KINDS = ["name", "path", "run", "trained"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_model_is_evaluated_probed_predicted_embedded_and_converted(kind: str, tuned_run: Path) -> None:
    model, reference = make_model(kind, tuned_run), load(tuned_run)
    assert vitrail.evaluate(model, "photos", **FAST).accuracy == vitrail.Run(tuned_run).accuracy
    assert vitrail.probe(model, "photos", methods=["knn"], k=3, **FAST).scores.keys() == {"kNN"}
    assert len(vitrail.predict(model, "photos/test")) == 10
    assert np.array_equal(vitrail.embed(model, "photos/test"), vitrail.embed(reference, "photos/test"))
    assert (
        vitrail.convert(model, "copy.safetensors").path.read_bytes()
        == (tuned_run / "weights" / "best.safetensors").read_bytes()
    )


@pytest.mark.parametrize(("first", "second"), [("name", "run"), ("path", "trained"), ("trained", "trained")])
def test_any_models_are_drawn_side_by_side(first: str, second: str, tuned_run: Path) -> None:
    models = [make_model(kind, tuned_run) for kind in (first, second)]
    drawn = vitrail.figures(models[0], against=models[1], out="figures", device="cpu")
    expected = {"trained": "fl<b>wers, step 5 of 5"}  # the end of where it came from
    names = drawn.record["models"]
    assert names[0] == expected.get(first, "tuned")
    same_title = (first, second) != ("path", "trained")
    assert names[1] == (f"{get_model_name(models[1])} (2)" if same_title else expected[second])
    assert {"filters.png", "positions.png"} <= drawn.files.keys()


def test_models_of_all_kinds_are_served_together(tuned_run: Path) -> None:
    models = [make_model(kind, tuned_run) for kind in KINDS]
    with vitrail.serve(models, port=0, device="cpu") as server:
        page = urllib.request.urlopen(server.url + "/v1/models").read().decode()
    assert page.count("wers") >= 3  # named for their data
    assert "wers, step 5 of 5" in page  # where the Trained came from


def test_two_models_in_memory_of_one_name_are_compared(tuned_run: Path) -> None:
    trained = load(tuned_run)
    evaluation = vitrail.evaluate(trained, "photos", against=[load(tuned_run), tuned_run, str(tuned_run)], **FAST)
    names = [model["model"] for model in evaluation.metrics["models"]]
    assert names == [trained.origin.name, f"{trained.origin.name} (2)", str(tuned_run)]  # a path counts once
    assert len(evaluation.metrics["comparisons"]) == 2


def test_what_is_no_model_is_refused() -> None:
    for function in (vitrail.evaluate, vitrail.predict, vitrail.figures):
        with pytest.raises(
            UsageError, match=r"a model is a name, a path, a vitrail.Run or a vitrail.Trained, not dict"
        ):
            function({}, "photos")
    with pytest.raises(UsageError, match="not a Trained"):
        vitrail.evaluate(load("model.safetensors"), "photos", abstain=0.9)


def test_distinct_names_are_numbered() -> None:
    assert choose_distinct_name("a", ()) == "a"
    assert choose_distinct_name("a", ("a", "a (2)")) == "a (3)"
    trained = load("model.safetensors")
    assert load_trained(trained) is trained


def test_the_license_of_somebody_elses_model_is_named_before_it_is_used(tmp_path: Path) -> None:
    """A folder of another library and its copy under a name of the Hub; not vitrail's own file, whose maker saw it."""
    trained = model_factory.build_trained(model_factory.build_vit(gelu="erf"))
    origin = Origin(format="timm", name="theirs", license="cc-by-nc-4.0")
    trained = dataclasses.replace(trained, origin=origin)
    save(trained, tmp_path / "folder", "timm")
    save(trained, tmp_path / "own.safetensors")
    notes: list[str] = []
    load_trained(str(tmp_path / "folder"), notes.append)
    assert notes == ["license: folder states cc-by-nc-4.0"]
    load_trained(tmp_path / "own.safetensors", notes.append)
    load_trained(trained, notes.append)
    assert len(notes) == 1
    vitrail.predict(tmp_path / "folder", [np.zeros((32, 40, 3), np.uint8)], notify=notes.append)
    assert notes.count("license: folder states cc-by-nc-4.0") == 2
