"""The examples in the docstrings of all public names run as they stand, on small stand-ins of the files they name."""

import dataclasses
import importlib
import inspect
import re
import shutil
import textwrap
from pathlib import Path

import pytest
import torch

import vitrail
from tests.data.image_files import make_image
from vitrail.training.finetune import _SUGGESTED_MODEL

SMALLER = {  # the same examples, in a second
    f'model="{_SUGGESTED_MODEL}", minutes=10': 'model="model.safetensors", epochs=1, batch=8, workers=0',
    'model="ti16", data="photos"': 'model="model.safetensors", data="photos", epochs=1, batch=8, workers=0',
    "settings=hard": "settings=hard, epochs=1, batch=8, workers=0",
    'data="digits", epochs=5': 'data="digits", epochs=0.1, workers=0',
    '"model.safetensors", minutes=10': '"model.safetensors", epochs=1, workers=0',
    'train(recipe, "digits")': 'train(recipe, "digits", workers=0)',
}


ROOT = Path(__file__).parents[2]
WITH_EXAMPLE_OF = {  # a name -> the name whose example uses it
    "Batch": "vitrail.data.loader.TrainingData",
    "BatchPlan": "vitrail.data.loader.TrainingData",
    "Dataset": "vitrail.data.sources.open_dataset",
    "LossFunction": "vitrail.training.losses.softmax_cross_entropy",
    "SampleOrder": "vitrail.data.loader.TrainingData",
    "Split": "vitrail.data.sources.open_dataset",
    "StepResult": "vitrail.training.step.build_train_state",
    "TrainState": "vitrail.training.step.build_train_state",
    "clip_gradients": "vitrail.training.optimizer.build_optimizer",
    "iter_train_batches": "vitrail.data.loader.TrainingData",
    "prepare_train_batch": "vitrail.data.loader.TrainingData",
    "set_lr": "vitrail.training.optimizer.build_optimizer",
    "train_step": "vitrail.training.step.build_train_state",
}
KEYWORDS = {
    "RunKeywords",
    "TrainKeywords",
    "PredictKeywords",
    "ConvertKeywords",
    "ServeKeywords",
}  # as FinetuneKeywords
MODULES_WITH_ONE_EXAMPLE = ("vitrail.config", "vitrail.errors")


def list_documented_names() -> list[tuple[str, str]]:
    """The module and the name of everything that docs/api.md lists."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = []
    for module in re.findall(r"<!-- automodule: (\S+)", text):
        names += [(module, name) for name in importlib.import_module(module).__all__]
    for module, listed in re.findall(r"<!-- (?:automembers|documented): (\S+) (.+?) -->", text):
        names += [(module, name) for name in listed.split(", ")]
    return names


NAMES = list_documented_names()


def test_what_the_reference_lists_is_exported_by_its_module() -> None:
    assert len(NAMES) >= 90
    for module, name in NAMES:
        assert name in importlib.import_module(module).__all__, (module, name)
        assert hasattr(importlib.import_module(module), name), (module, name)


def find_examples(value: object) -> list[str]:
    """The indented blocks of a docstring."""
    text = inspect.getdoc(value) or ""
    return [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n?|\n(?=    ))+", text, re.MULTILINE)]


def find_place_of_example(module: str, name: str) -> str:
    """The name whose docstring has the example of a public name."""
    if module in MODULES_WITH_ONE_EXAMPLE:
        return module
    if name in KEYWORDS:
        return "vitrail.api.options.FinetuneKeywords"
    return WITH_EXAMPLE_OF.get(name, f"{module}.{name}")


def read_examples(place: str) -> list[str]:
    module, _, name = place.rpartition(".")
    value = importlib.import_module(place) if place in MODULES_WITH_ONE_EXAMPLE else None
    return find_examples(value or getattr(importlib.import_module(module), name))


def test_an_example_of_several_names_uses_each() -> None:
    for name, place in WITH_EXAMPLE_OF.items():
        assert re.search(rf"\b{name}\b", "".join(read_examples(place))), name


@pytest.mark.parametrize("place", sorted({find_place_of_example(*each) for each in NAMES}))
def test_the_examples_of_a_docstring_run(
    place: str, tmp_path: Path, tuned_run: Path, digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = read_examples(place)
    assert examples, f"{place} has no example"
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
