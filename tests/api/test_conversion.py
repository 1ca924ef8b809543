"""`vitrail.convert`: the command's files, and what was changed or lost."""

from pathlib import Path

import pytest

import vitrail
from tests.api.conftest import make_trained
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as run_command
from vitrail.errors import UsageError
from vitrail.weights.load import load

MODEL = "model.safetensors"


@pytest.mark.parametrize("to", ["vitrail", "timm", "transformers"])
def test_the_command_and_convert_write_the_same_files(to: str, capsys: Capture) -> None:
    suffix = ".safetensors" if to == "vitrail" else ""
    options = ("--classes", "3", "--image-size", "48")
    code, _, err = run_command("convert", MODEL, f"command{suffix}", "--to", to, *options, capsys=capsys)
    assert code == 0, err
    conversion = vitrail.convert(MODEL, f"python{suffix}", to, classes=3, image_size=48)
    assert capsys.readouterr().out == ""
    ours, theirs = conversion.path, Path(f"command{suffix}")
    names = [path.relative_to(theirs) for path in theirs.rglob("*")] if theirs.is_dir() else [Path()]
    assert names
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    assert load(conversion.path).model.config.classes == 3


def test_changes_and_notes_are_shown_and_escaped() -> None:
    trained = make_trained(temperature=2.0)
    conversion = vitrail.convert(trained, "to<b>", "timm")
    assert conversion.changes == []
    (note,) = [note for note in conversion.notes if note.startswith("temperature")]
    assert note in repr(conversion)
    html = conversion._repr_html_()
    assert note in html
    assert "to&lt;b&gt;" in html
    assert "<b>" not in html
    changed = vitrail.convert(trained, "three.safetensors", classes=3)
    assert "temperature: 2 -> 1" in changed.changes
    assert "temperature: 2 -&gt; 1" in changed._repr_html_()


def test_the_caller_is_told_the_model_through_notify() -> None:
    sentences: list[str] = []
    vitrail.convert("ti16", "random.safetensors", classes=2, image_size=32, notify=sentences.append)
    assert sentences == ["model: preset ti16, random weights"]


def test_the_suffix_chooses_the_runtime() -> None:
    conversion = vitrail.convert(MODEL, "model.pt2")
    assert conversion.record["format"] == "torch-export"


def test_wrong_options_are_refused_before_anything_is_read() -> None:
    with pytest.raises(UsageError, match=r"^to is 'tim'; it takes 'vitrail', .* or None; did you mean 'timm'\?$"):
        vitrail.convert("nothing.safetensors", "x.safetensors", "tim")
    with pytest.raises(UsageError, match=r"no option 'clases': did you mean classes\?"):
        vitrail.convert("nothing.safetensors", "x.safetensors", clases=3)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"^int8=True is for onnx, not for vitrail: add to=\"onnx\"$"):
        vitrail.convert("nothing.safetensors", "x.safetensors", int8=True)
    with pytest.raises(UsageError, match="exists"):
        vitrail.convert("nothing.safetensors", MODEL)
