"""The demo on a tiny model: its files, its result, and how it ends early."""

import json
from pathlib import Path

import pytest

from tests.model_factory import build_trained, build_vit
from vitrail.api import demo
from vitrail.api.demo import DemoSettings, run_demo
from vitrail.errors import StoppedError, UsageError
from vitrail.training.learning_curve import CurveSettings
from vitrail.training.run_execution import RunCallbacks
from vitrail.weights.trained import Trained

pytest.importorskip("skimage")
QUICK = CurveSettings(shots=(1, 2), draws=2, scratch_draws=1, scratch_steps=2, scratch_batch=2)
SETTINGS = DemoSettings(
    curve=QUICK,
    counterexample=CurveSettings(shots=(1, 2), draws=2, scratch_draws=0),
    counterexample_images=4,
    epochs=1,
)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return build_trained(build_vit(classes=7, image_size=(16, 16), patch=8))


def test_the_folder_holds_figures_numbers_the_run_and_a_page_that_needs_nothing_else(tiny: Trained) -> None:
    notes: list[str] = []
    result = run_demo(None, model=tiny, settings=SETTINGS, callbacks=RunCallbacks(notify=notes.append))
    assert result.folder == Path("runs/demo")
    written = {path.name for path in result.folder.iterdir()}
    assert written >= {
        "learning_curve.png", "learning_curve.csv", "learning_curve_digits.png", "learning_curve_digits.csv",
        "photos.png", "demo.json", "report.html", "finetune",
    }  # fmt: skip
    facts = json.loads((result.folder / "demo.json").read_text())
    assert [each["images_per_class"] for each in facts["curves"]["faces"]["from scratch"]] == [1, 2]
    assert set(facts["curves"]["digits"]) == {"built-in", "nearest neighbor"}
    assert facts["finetuned"]["images"] == 70
    assert set(facts["finetuned"]["baselines"]) == {"built-in", "nearest neighbor"}
    assert {name: len(labels) for name, labels in facts["photos"].items()} == dict.fromkeys(
        ("cat", "coffee", "rocket", "portrait", "palace", "flower"), 5
    )
    page = (result.folder / "report.html").read_text()
    assert "http" not in page
    assert "<script" not in page
    assert page.count("data:image/webp") == 2 * 6 + 2
    assert 'href="finetune/report.html"' in page
    again = run_demo(None, model=tiny, settings=SETTINGS, callbacks=RunCallbacks())
    assert again.folder == Path("runs/demo-2")
    assert [curve.scores for curve in again.curves] == [curve.scores for curve in result.curves]


def test_a_folder_in_use_or_a_url_is_refused_before_anything_is_computed(tiny: Trained, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    for out, reason in (("used", "used exists already"), ("s3://bucket/demo", "is remote")):
        with pytest.raises(UsageError, match=reason):
            run_demo(out, model=tiny, callbacks=RunCallbacks())


def test_an_interruption_says_what_to_do(tiny: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "classify_photos", interrupt)
    with pytest.raises(StoppedError, match=r"stopped after \d+ s; runs/demo has what was finished. `vitrail demo`"):
        run_demo(None, model=tiny, settings=SETTINGS, callbacks=RunCallbacks())
    assert (Path("runs/demo") / "learning_curve.png").is_file()
