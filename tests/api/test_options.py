"""The keyword arguments of `train`, `finetune` and `distill` are the options of the commands."""

import inspect
import re
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitrail
from vitrail.api.argument_checks import list_kinds
from vitrail.api.conversion import ConvertKeywords, ConvertOptions
from vitrail.api.keyword_errors import list_keywords
from vitrail.api.options import FinetuneKeywords, RunKeywords, TrainKeywords, build_options, list_option_names
from vitrail.api.prediction import PredictKeywords
from vitrail.api.serve import ServeKeywords, ServeOptions
from vitrail.config.field_docstrings import read_field_docstrings
from vitrail.errors import UsageError
from vitrail.training.distill import DistillOptions
from vitrail.training.finetune import FinetuneOptions
from vitrail.training.pretrain import PretrainingOptions

ONLY_COMMAND = {"number_of_runs", "loss_function", "must_resume", "teacher"}  # Python has one Run, `loss`, no scripts
ONLY_PYTHON = {"teacher", "data", "model", "on_step", "on_evaluation", "loss", "progress", "notify", "options"}
CASES: Any = [
    (vitrail.finetune, FinetuneKeywords, FinetuneOptions),
    (vitrail.train, TrainKeywords, PretrainingOptions),
    (vitrail.distill, RunKeywords, DistillOptions),
]


@pytest.mark.parametrize(("function", "keywords", "options"), CASES)
def test_the_keywords_are_the_options(function: Any, keywords: Any, options: Any) -> None:
    parameters = inspect.signature(function.__wrapped__).parameters
    named = set(parameters) - ONLY_PYTHON
    if function is vitrail.train:
        named -= {"recipe"}  # there it is the first argument
    names = set(keywords.__annotations__)
    assert not names & named
    assert names | named == set(list_option_names(options)) - ONLY_COMMAND
    for name in named:
        assert parameters[name].default == getattr(options(), name)


FUNCTIONS = [
    "train",
    "finetune",
    "distill",
    "evaluate",
    "probe",
    "predict",
    "embed",
    "index",
    "search",
    "figures",
    "convert",
    "serve",
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_lists_every_argument_with_its_type_its_default_and_a_text(name: str) -> None:
    function = getattr(vitrail, name)
    parameters = inspect.signature(function).parameters
    assert set(parameters) == set(list_keywords(function.__wrapped__))
    texts = dict(re.findall(r"^- `(\w+)`: (\S.+)", inspect.getdoc(function) or "", re.MULTILINE))
    assert list(texts) == list(parameters)
    for parameter in list(parameters.values())[1:]:
        assert parameter.annotation is not parameter.empty, parameter
        assert (parameter.kind is parameter.KEYWORD_ONLY) <= (parameter.default is not parameter.empty), parameter


def test_an_option_of_a_nested_group_has_its_default_in_the_signature() -> None:
    parameters = inspect.signature(vitrail.finetune).parameters
    assert (parameters["save_every"].default, parameters["epochs"].default, parameters["seed"].default) == (10, None, 0)
    assert parameters["save_every"].annotation is float
    assert inspect.signature(vitrail.serve).parameters["queue"].default == 64
    assert "- `save_every`: Minutes from one checkpoint to the next." in (vitrail.train.__doc__ or "")


@pytest.mark.parametrize("kind", [FinetuneOptions, PretrainingOptions, DistillOptions])
def test_without_keywords_the_options_are_the_default(kind: Any) -> None:
    assert build_options(kind, {}) == kind()


def test_flat_values_reach_their_nested_options() -> None:
    built = build_options(FinetuneOptions, {"epochs": 3, "seed": 7, "keep_head": True})
    assert (built.overrides.epochs, built.run.seed, built.keep_head) == (3, 7, True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"minutes": "3"}, "minutes is '3', of type str; it takes a number or None"),
        ({"seed": True}, "seed is True, of type bool; it takes an integer"),
        ({"seed": 1.5}, "seed is 1.5, of type float; it takes an integer"),
        ({"keep_head": "yes"}, "keep_head is 'yes', of type str; it takes True or False"),
        ({"out": 3}, "out is 3, of type int; it takes a string, a path or None"),
        ({"loss_function": 3}, "loss_function is 3, of type int; it takes a function or None"),
    ],
)
def test_a_value_of_another_type_is_refused(value: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        build_options(FinetuneOptions, value)
    assert str(raised.value) == message


def test_numbers_of_numpy_integers_and_strings_for_paths_are_taken() -> None:
    built = build_options(FinetuneOptions, {"minutes": np.float32(3), "out": "here", "seed": np.int64(4)})
    assert (built.minutes, built.run.seed) == (3, 4)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no option 'seeed': did you mean seed\?"):
        build_options(FinetuneOptions, {"seeed": 1})


@pytest.mark.parametrize(
    ("keywords", "options", "others"),
    [(ConvertKeywords, ConvertOptions, {"destination", "to", "image_size"}), (ServeKeywords, ServeOptions, set())],
)
def test_typed_keywords_have_the_hints_and_docstrings_of_the_options(
    keywords: Any, options: Any, others: set[str]
) -> None:
    hints, keyword_hints = typing.get_type_hints(options), typing.get_type_hints(keywords)
    assert keyword_hints.keys() == hints.keys() - others
    for name, hint in keyword_hints.items():
        kinds = set(list_kinds(hints[name]))
        assert set(list_kinds(hint)) == kinds | ({str} if Path in kinds else set()), name
    for kind in (keywords, FinetuneKeywords, TrainKeywords, PredictKeywords):
        documented = [each for base in (kind, RunKeywords) for each in read_field_docstrings(base)]
        assert set(kind.__annotations__) <= set(documented), kind
