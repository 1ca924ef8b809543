"""The functions of `import vitrail` refuse a wrong argument with its name, its value and what it takes."""

import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import vitrail
from tests.api.conftest import make_trained
from vitrail.api.argument_checks import check_argument, check_option_names
from vitrail.config import Recipe
from vitrail.errors import UsageError

MODEL, DATA = "model.safetensors", "photos"
NO_MODEL = "a model is a name, a path, a vitrail.Run or a vitrail.Trained, not int"
PIXELS = np.zeros((8, 8, 3), np.uint8)
Size = int | tuple[int, ...] | None
Method = Literal["knn", "linear"]


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (int, "3", "x is '3', of type str; it takes an integer"),
        (int, True, "x is True, of type bool; it takes an integer"),
        (float | None, "y", "x is 'y', of type str; it takes a number or None"),
        (bool, 1, "x is 1, of type int; it takes True or False"),
        (str | Path | None, 3, "x is 3, of type int; it takes a string, a path or None"),
        (Path | Recipe, 3, "x is 3, of type int; it takes a path or a vitrail.Recipe"),
        (Callable[[str], None], 3, "x is 3, of type int; it takes a function"),
        (Size, [8, "8"], "x[1] is '8', of type str; it takes an integer"),
        (Size, "8", "x is '8', of type str; it takes an integer, a tuple or None"),
        (Sequence[str], "name", "x is 'name', of type str; it takes a list"),
        (Mapping[str, Any], {3: 1}, "a key of x is 3, of type int; it takes a string"),
        (Method | None, "liner", "x is 'liner'; it takes 'knn', 'linear' or None; did you mean 'linear'?"),
        (Method | Sequence[Method], ["kn"], "x[0] is 'kn'; it takes 'knn' or 'linear'; did you mean 'knn'?"),
        (Method | Sequence[Method], "zz", "x is 'zz'; it takes 'knn', 'linear' or a list of these"),
        (Method, 3, "x is 3, of type int; it takes 'knn' or 'linear'"),
    ],
)
def test_a_value_of_another_type_or_choice_is_refused(hint: Any, value: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        check_argument("x", value, hint)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("hint", "value", "converted"),
    [
        (int, np.int64(3), 3),
        (float, np.float32(0.5), 0.5),
        (float, 3, 3),
        (Path | None, "here", Path("here")),
        (str | Path, "here", "here"),
        (Size, [8, np.int64(16)], (8, 16)),
        (Sequence[int], range(2), (0, 1)),
        (Any, object, object),
        (Sequence[str] | torch.Tensor, 3, 3),  # left to the code that handles it
    ],
)
def test_a_value_that_is_meant_is_taken_as_pythons_own(hint: Any, value: Any, converted: Any) -> None:
    checked = check_argument("x", value, hint)
    assert checked == converted
    assert type(checked) is type(converted)


def test_a_device_of_torch_is_taken_by_its_name() -> None:
    assert check_argument("device", torch.device("cuda:1"), str | None) == "cuda:1"
    with pytest.raises(UsageError, match="of type device; it takes a string"):
        check_argument("out", torch.device("cpu"), str | None)


def test_an_unknown_name_gets_the_nearest_or_all() -> None:
    with pytest.raises(UsageError, match=r"no option 'bach': did you mean batch\?"):
        check_option_names(["bach"], ["lr", "batch"])
    with pytest.raises(UsageError, match="no option 'zzzz': there are batch, lr"):
        check_option_names(["zzzz"], ["lr", "batch"])


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    # types
    "evaluate batch": (lambda v: v.evaluate(MODEL, DATA, batch="3"), "batch is '3', of type str; it takes an integer"),
    "evaluate workers": (lambda v: v.evaluate(MODEL, DATA, workers="2"), "workers is '2', of type str"),
    "evaluate abstain": (lambda v: v.evaluate(MODEL, DATA, abstain="x"), "abstain is 'x', of type str"),
    "evaluate model": (lambda v: v.evaluate(5, DATA), NO_MODEL),
    "evaluate data": (lambda v: v.evaluate(MODEL, 5), "data is a name, .* not int"),
    "evaluate against": (lambda v: v.evaluate(MODEL, DATA, against=5), NO_MODEL),
    "evaluate against list": (lambda v: v.evaluate(MODEL, DATA, against=[5]), NO_MODEL),
    "evaluate notify": (lambda v: v.evaluate(MODEL, DATA, notify=3), "notify is 3, of type int; it takes a function"),
    "evaluate nothing": (lambda v: v.evaluate(MODEL), "vitrail.evaluate: missing a required argument: 'data'"),
    "predict top": (lambda v: v.predict(MODEL, DATA, top="3"), "top is '3', of type str; it takes an integer"),
    "predict number": (
        lambda v: v.predict(MODEL, 5),
        "an image is a path, .* give one, a list of them or a torch Dataset, not int",
    ),
    "predict None": (lambda v: v.predict(MODEL, None), "an image is a path, .*, not NoneType"),
    "predict dict": (lambda v: v.predict(MODEL, {"test": [PIXELS]}), "an image is a path, .*, not dict"),
    "predict numbers": (lambda v: v.predict(MODEL, [PIXELS, 5]), r"images\[1\] is of type int; an image is a path"),
    "predict model": (lambda v: v.predict(None, DATA), NO_MODEL.replace("int", "NoneType")),
    "embed model": (lambda v: v.embed(5, DATA), NO_MODEL),
    "figures num_images": (lambda v: v.figures(MODEL, DATA, num_images="3"), "num_images is '3', of type str"),
    "figures images": (lambda v: v.figures(MODEL, 5), "an image is a path, .*, not int"),
    "figures against": (lambda v: v.figures(MODEL, against=5), NO_MODEL),
    "probe shots": (lambda v: v.probe(MODEL, DATA, shots=[1, "x"]), r"shots\[1\] is 'x', of type str"),
    "probe penalty": (lambda v: v.probe(MODEL, DATA, penalty="x"), "penalty is 'x'; it takes 'auto' or a number"),
    "probe model": (lambda v: v.probe(5, DATA), NO_MODEL),
    "serve model": (lambda v: v.serve(5), NO_MODEL),
    "serve port": (lambda v: v.serve(MODEL, port="x"), "port is 'x', of type str; it takes an integer"),
    "serve host_name": (lambda v: v.serve(MODEL, host_name="x"), "host_name is 'x', of type str; it takes a list"),
    "Run": (lambda v: v.Run(5), "folder is 5, of type int; it takes a string or a path"),
    "load": (lambda v: v.load(5), "model is 5, of type int; it takes a string or a path"),
    "load_recipe": (lambda v: v.load_recipe(5), "name is 5, of type int; it takes a string or a path"),
    "save": (lambda v: v.save(make_trained(), 5), "path is 5, of type int; it takes a string or a path"),
    "train recipe": (lambda v: v.train(5, "digits"), "recipe is 5, of type int; .* or a vitrail.Recipe"),
    "train data": (lambda v: v.train("digits", None), "data is a name, .* not NoneType"),
    "train settings": (lambda v: v.train("digits", "digits", settings={1: 2}), "a key of settings is 1, of type int"),
    "train shots": (lambda v: v.train("digits", "digits", probe_shots=-1), "probe_shots is -1; give images per class"),
    "finetune model": (lambda v: v.finetune(DATA, 5), NO_MODEL),
    "finetune epochs": (lambda v: v.finetune(DATA, MODEL, epochs="3"), "epochs is '3', of type str; it takes a number"),
    "convert destination": (lambda v: v.convert(MODEL, 5), "destination is 5, of type int"),
    "convert model": (lambda v: v.convert(5, "x.safetensors"), NO_MODEL),
    "convert measure": (lambda v: v.convert(MODEL, "x.safetensors", measure=5), "data is a name, .* not int"),
    "adapt name": (lambda v: v.adapt(make_trained(), clases=3), r"no option 'clases': did you mean classes\?"),
    "adapt labels": (lambda v: v.adapt(make_trained(), labels="ab"), "labels is 'ab', of type str; it takes a tuple"),
    "create name": (lambda v: v.create(5), "name is 5, of type int; it takes a string"),
    "create depth": (lambda v: v.create("ti16", depth="5"), "depth is '5'; it must be an integer"),
    "create patch": (lambda v: v.create("ti16", patch="x"), "patch is 'x'; it must be an integer"),
    # choices
    "predict precision": (lambda v: v.predict(MODEL, DATA, precision="float23"), "did you mean 'float32'"),
    "embed precision": (lambda v: v.embed(MODEL, DATA, precision="fp16"), "precision is 'fp16'; it takes 'float32', "),
    "serve precision": (lambda v: v.serve(MODEL, precision="fp16"), "precision is 'fp16'; it takes 'float32', "),
    "evaluate split": (lambda v: v.evaluate(MODEL, DATA, split="tset"), "split is 'tset'; .*; did you mean 'test'"),
    "probe methods": (lambda v: v.probe(MODEL, DATA, methods=["kn"]), r"methods\[0\] is 'kn'; .*; did you mean 'knn'"),
    "train target": (lambda v: v.train("digits", "digits", target="pixel"), "did you mean 'pixels'"),
    "save format": (lambda v: v.save(make_trained(), "x", "tim"), "format is 'tim'; it takes .* did you mean 'timm'"),
    "adapt operator": (lambda v: v.adapt(make_trained(), operator="x"), "operator is 'x'; it takes 'bilinear"),
    "embed columns": (lambda v: v.embed(MODEL, ([PIXELS], ["rose"])), r"images\[0\] is of type list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_a_usage_error(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(UsageError, match=message):
        call(vitrail)
    assert not Path("runs").exists()


def test_every_public_function_is_checked() -> None:
    functions = {name for name in vitrail.__all__ if name.islower()} - {
        "attention_maps",
        "errors",
    }  # of tensors; a module
    assert {name for name in functions if not hasattr(getattr(vitrail, name), "__wrapped__")} == set()


def test_one_method_or_number_of_shots_stands_for_a_list() -> None:
    options: dict[str, Any] = {"device": "cpu", "workers": 0}
    assert set(typing.cast(Any, vitrail.probe(MODEL, DATA, methods="knn", **options)).scores) == {"kNN"}
    few_shot = vitrail.probe(MODEL, DATA, methods="few-shot", shots=2, **options)
    assert few_shot is not None
    assert set(few_shot.scores) == {"2-shot"}
