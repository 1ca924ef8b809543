"""`vitrail.figures`: the command's arrays and numbers, and the figures in a notebook."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import vitrail
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as run_command
from vitrail.errors import UsageError

MODEL = "model.safetensors"


def test_the_command_and_figures_compute_the_same_arrays(capsys: Capture) -> None:
    arguments = (MODEL, "photos/test", "--num-images", "1", "--out", "command", "--device", "cpu", "--json")
    code, out, err = run_command("figures", *arguments, capsys=capsys)
    assert code == 0, err
    drawn = vitrail.figures(MODEL, "photos/test", num_images=1, out="python", device="cpu")
    assert capsys.readouterr().out == ""
    facts = json.loads(out)
    assert (facts["files"], facts["numbers"]) == (drawn.files, json.loads(json.dumps(drawn.numbers)))
    arrays = [name for name in drawn.files if name.endswith(".npz")]
    assert arrays
    for name in arrays:
        with np.load(Path("command", name)) as theirs, np.load(drawn.folder / name) as ours:
            assert theirs.files == ours.files
            assert all(theirs[key].tobytes() == ours[key].tobytes() for key in theirs.files), name
    assert "distance.png" in repr(drawn)
    assert "'python'" in repr(drawn)
    assert "/" not in repr(drawn)  # the pictures of single images, which may be many
    assert f" and {sum('/' in name or not name.endswith('.png') for name in drawn.files)} more)" in repr(drawn)
    html = drawn._repr_html_()
    shown = [name for name in drawn.files if name.endswith(".png") and "/" not in name]
    assert html.count("<img") == len(shown) > 2
    assert html.count("data:image/") == len(shown)


def test_figures_of_images_in_memory_are_those_of_their_files() -> None:
    paths = sorted(Path("photos/test").glob("*/*.png"))[:3]
    pixels = [np.array(Image.open(path)) for path in paths]
    tensors = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    forms: list[Any] = [[Image.fromarray(each) for each in pixels], tensors, TensorDataset(tensors, torch.arange(3))]
    expected = vitrail.figures(MODEL, paths, device="cpu").numbers["attention"]
    for form in forms:
        assert vitrail.figures(MODEL, form, device="cpu").numbers["attention"] == expected


def test_wrong_arguments_are_refused_before_a_folder_is_made() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"num_images": -1}, r"^num_images is -1"),
        ({"boxes": "boxes.json"}, "give the images too"),
        ({"images": [5]}, r"^images\[0\] is of type int; an image is a path"),
    ]
    for options, message in wrong:
        with pytest.raises(UsageError, match=message):
            vitrail.figures(MODEL, **options)
    assert not Path("runs").exists()
