"""The examples in the docstrings of all public names run as they stand, on small stand-ins of the files they name."""

import dataclasses
import inspect
import re
import shutil
import textwrap
from pathlib import Path

import pytest
import torch

import vitrail
from tests.data.image_files import make_image
from vitrail.training.finetune import _SUGGESTED_MODELS

SMALLER = {  # the same examples, in a second
    f'model="{_SUGGESTED_MODELS[0]}", minutes=10': 'model="model.safetensors", epochs=1, batch=8, workers=0',
    'data="digits", epochs=5': 'data="digits", epochs=0.1, workers=0',
    'train(recipe, "digits")': 'train(recipe, "digits", workers=0)',
}


def find_examples(name: str) -> list[str]:
    """The indented blocks of a public name's docstring."""
    text = inspect.getdoc(getattr(vitrail, name)) or ""
    return [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n?|\n(?=    ))+", text, re.MULTILINE)]


@pytest.mark.parametrize("name", vitrail.__all__)
def test_the_examples_of_a_docstring_run(
    name: str, tmp_path: Path, tuned_run: Path, digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = find_examples(name)
    assert examples, f"vitrail.{name} has no example"
    for number, image in enumerate(("cat.jpg", "dog.jpg")):
        make_image(number).save(tmp_path / image)
    shutil.copytree(tuned_run, tmp_path / "runs" / "finetune")
    shutil.copytree(digits_run, tmp_path / "runs" / "train")
    namespace = {"vitrail": vitrail, "torch": torch, "dataclasses": dataclasses}
    for example in examples:
        for full, small in SMALLER.items():
            example = example.replace(full, small)
        exec(example, namespace)
    expected = sum(example.count("print(") for example in examples)
    assert bool(capsys.readouterr().out) == bool(expected)
