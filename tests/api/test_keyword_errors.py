"""Errors of `import vitrail` name keywords, those of the commands options."""

import importlib
import inspect
from pathlib import Path
from typing import Any, Literal

import pytest

import vitrail
from tests.api.conftest import make_trained
from vitrail.api.keyword_errors import (
    OTHER_NAMES,
    keep_option_names,
    list_keywords,
    name_keywords,
    rename_option,
    rename_options,
)
from vitrail.api.progress import NoteCollector
from vitrail.cli import COMMANDS
from vitrail.cli.signature import Option, list_options
from vitrail.errors import UsageError

KEYWORDS: dict[str, Any] = {
    "resume": bool,
    "top": int,
    "out": str | Path | None,
    "to": Literal["onnx", "timm"] | None,
    "model": str | None,
    "penalty": float,
}
ONLY_COMMAND = {  # options of a command that its function does not have
    "train": {"--dry-run"},
    "distill": {"--dry-run"},
    "finetune": {"--dry-run", "--runs"},  # several runs have no one Run
    "predict": {
        "--embed",
        "--features",
        "--normalize",
        "--attention",
        "--format",
        "--fetch-urls",
        "--float16",
        "--part",
        "--sbatch",
    },  # four of embed
    "search": {"--format"},
}


@pytest.mark.parametrize(
    ("message", "renamed"),
    [
        ("--save-every is -1", "save_every is -1"),
        ("give --resume or another --out", "give resume=True or another out"),
        ("resume it with --resume (or --overwrite)", "resume it with resume=True (or overwrite)"),
        ("`vitrail train digits --resume` continues", "`vitrail train digits --resume` continues"),
        ("run vitrail info x --json: --top is 0", "run vitrail info x --json: top is 0"),
        ("hf download ORG/NAME --local-dir FOLDER", "hf download ORG/NAME --local-dir FOLDER"),
        ("a file called my--resume and -- alone", "a file called my--resume and -- alone"),
        ("the same command with --resume continues", "the same call with resume=True continues"),
        ("--lambda is -1 and --layers 3", "penalty is -1 and trainable_layers 3"),
        ("add --to onnx --resume, or --to timm.", 'add to="onnx" resume=True, or to="timm".'),
        ("say --to vitrail or --to timm", 'say to vitrail or to="timm"'),
        ("--to says how", "to says how"),
        ("(--model timm:vit_small.in1k, a file)", '(model="timm:vit_small.in1k", a file)'),
        ("give a preset (--model s16)", 'give a preset (model="s16")'),
        ("--out runs/a must be empty", 'out="runs/a" must be empty'),
        ("--out names another folder", "out names another folder"),
        ("--top 3 shows more; --top N", "top=3 shows more; top=N"),
    ],
)
def test_options_become_keywords_and_commands_stay(message: str, renamed: str) -> None:
    assert rename_options(message, KEYWORDS) == renamed


def test_a_command_gets_messages_with_its_options() -> None:
    @name_keywords
    def fail(*, resume: bool = False, notify: Any = None) -> None:
        NoteCollector(notify)("note: --resume")
        raise UsageError(f"--resume is {resume}")

    notes: list[str] = []
    with pytest.raises(UsageError, match=r"^resume=True is False$"):
        fail(notify=notes.append)
    with keep_option_names(), pytest.raises(UsageError, match=r"^--resume is False$"):
        fail(notify=notes.append)
    assert notes == ["note: resume=True", "note: --resume"]


def list_command_options(command: str) -> list[Option]:
    module, _, name = COMMANDS[command].arguments.partition(".")
    arguments = getattr(importlib.import_module(f"vitrail.cli.arguments.{module}"), name)
    return [option for option in list_options(arguments) if not option.is_positional and option.name != "--json"]


@pytest.mark.parametrize("command", sorted(set(COMMANDS) & set(vitrail.__all__)))
def test_every_option_of_a_command_is_a_keyword_of_its_function(command: str) -> None:
    keywords = list_keywords(getattr(vitrail, command).__wrapped__)
    names = {option.name for option in list_command_options(command)}
    without = {name for name in names if rename_option(name.removeprefix("--"), keywords) not in keywords}
    assert without == ONLY_COMMAND.get(command, set())


@pytest.mark.parametrize("command", sorted(set(COMMANDS) & set(vitrail.__all__)))
def test_a_command_and_its_function_have_the_same_defaults(command: str) -> None:
    function = getattr(vitrail, command)
    parameters, keywords = inspect.signature(function).parameters, list_keywords(function.__wrapped__)
    compared = 0
    for option in list_command_options(command):
        if option.name not in ONLY_COMMAND.get(command, set()) and not option.is_required:
            name = rename_option(option.name.removeprefix("--"), keywords)
            assert parameters[name].default == option.default, option.name
            compared += 1
    assert compared >= 2


def test_every_other_name_is_needed() -> None:
    functions = [getattr(vitrail, name).__wrapped__ for name in vitrail.__all__ if name.islower() and name in COMMANDS]
    functions += [vitrail.save.__wrapped__, vitrail.adapt.__wrapped__]  # type: ignore[attr-defined]
    taken = {name for function in functions for name in list_keywords(function)}
    assert {name for name in OTHER_NAMES.values() if not name.startswith("vitrail.")} <= taken
    options = {option.name.removeprefix("--") for name in COMMANDS for option in list_command_options(name)}
    assert set(OTHER_NAMES) <= options


def test_a_folder_in_use_is_answered_with_keywords(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(UsageError) as raised:
        vitrail.train("digits", "digits", out=tmp_path / "run")
    assert "--" not in str(raised.value)


def test_functions_of_lower_layers_name_keywords_too() -> None:
    trained = make_trained()
    with pytest.raises(UsageError, match=r'call it x.safetensors, or say format="transformers" or format="timm"$'):
        vitrail.save(trained, "x")
    with pytest.raises(UsageError, match=r"choose another name or overwrite it \(overwrite=True\)$"):
        vitrail.save(trained, "model.safetensors")
    with pytest.raises(UsageError, match="penalty is -1; it must be above 0"):
        vitrail.probe("model.safetensors", "photos", penalty=-1)
    with pytest.raises(UsageError, match=r'name a trained model \(model="timm:vit_small_\S+", a file'):
        vitrail.finetune("photos", "s16")


@pytest.mark.parametrize(
    ("function", "name", "nearest"),
    [
        (vitrail.evaluate, "spilt", "split"),
        (vitrail.probe, "shts", "shots"),
        (vitrail.figures, "num_image", "num_images"),
    ],
)
def test_an_unknown_keyword_is_answered_with_the_nearest(function: Any, name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=rf"there is no option '{name}': did you mean {nearest}\?"):
        function("model.safetensors", "photos", **{name: 3})
