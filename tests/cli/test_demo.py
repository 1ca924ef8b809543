"""`vitrail demo` as a user calls it, with a tiny model in the place of the built-in one."""

import functools
import json
from pathlib import Path

import pytest

from tests.api.test_demo import SETTINGS
from tests.model_factory import build_trained, build_vit
from vitrail.api.demo import run_demo
from vitrail.cli import demo, main

pytest.importorskip("skimage")


@pytest.fixture(autouse=True)
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = build_trained(build_vit(classes=7, image_size=(16, 16), patch=8))
    monkeypatch.setattr(demo, "run_demo", functools.partial(run_demo, model=model, settings=SETTINGS))


def test_a_table_reads_well_and_ends_with_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Faces or background: 196 photos tested, accuracy in %"
    assert " ".join(lines[1].split()) == "images of each class built-in from scratch nearest neighbor"
    assert [line.split()[0] for line in lines[2:4]] == ["1", "2"]
    assert len({len(line) for line in lines[1:4]}) == 1
    assert max(map(len, lines)) <= 120
    assert lines[-1] == "report      runs/demo/report.html"


def test_json_is_the_result_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", "--out", "here"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["report"] == "here/report.html"
    assert set(facts["curves"]) == {"faces", "digits"}
