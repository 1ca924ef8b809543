"""`vitrail COMMAND --help`: a sentence, an example that parses, and every option in its group."""

import importlib
import shlex
from typing import Any, get_args

import pytest

from tests.cli.test_cli import Capture, run
from vitrail.cli import COMMANDS, Command, overview, parsing
from vitrail.cli.arguments.training import FinetuneRecipe
from vitrail.cli.help import format_command_help
from vitrail.cli.signature import list_options
from vitrail.recipes import FinetuneKind

LAST_GROUP = "compute"


def get_signature(verb: str) -> type[Any]:
    module, _, name = COMMANDS[verb].arguments.partition(".")
    signature: type[Any] = getattr(importlib.import_module(f"vitrail.cli.arguments.{module}"), name)
    return signature


def format_help(verb: str) -> str:
    return format_command_help(verb, COMMANDS[verb], get_signature(verb))


def list_headings(text: str) -> list[str]:
    return [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]


def split_command_line(line: str) -> tuple[str, list[str]]:
    """The command of a line of the shell, and its arguments; a redirection ends them."""
    program, *words = shlex.split(line.partition(" > ")[0])
    assert program == "vitrail"
    verb = next(verb for verb in (" ".join(words[:2]), words[0]) if verb in COMMANDS)
    return verb, words[len(verb.split()) :]


@pytest.mark.parametrize(
    ("verb", "line"),
    [*((verb, command.example) for verb, command in COMMANDS.items()), *(("", line) for line in overview.EXAMPLES)],
)
def test_every_example_parses(verb: str, line: str) -> None:
    named, arguments = split_command_line(line)
    assert named == verb or not verb
    parsing.parse_arguments(named, get_signature(named), arguments)


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_is_a_sentence_an_example_and_every_option_in_80_columns(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = format_help(verb)
    usage, sentence, example = text.split("\n\n")[:3]
    assert usage.startswith(f"usage: vitrail {verb}")
    assert sentence.endswith(".")
    assert sentence.count(". ") == 0
    assert example == f"example:\n  {COMMANDS[verb].example}"
    words = " ".join(text.split())
    for option in list_options(get_signature(verb)):
        assert option.help
        assert f"\n  {option.name}" in text
        assert option.help in words, f"{option.name} of {verb}"
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


@pytest.mark.parametrize("verb", COMMANDS)
def test_common_options_come_first_and_compute_last(verb: str) -> None:
    headings = [title for title in list_headings(format_help(verb)) if title not in ("example", "arguments")]
    assert headings[0] == "options"
    assert len(set(headings)) == len(headings)
    assert LAST_GROUP not in headings[:-1]


def test_the_groups_of_finetune() -> None:
    text = format_help("finetune")
    titles = ["example", "arguments", "options", "recipe", "model", "data", "run folder", "compute"]
    assert list_headings(text) == titles
    common = text.partition("\noptions:\n")[2].partition("\n\n")[0]
    names = [line.split()[0] for line in common.splitlines() if line.startswith("  --")]
    assert names == ["--model", "--minutes", "--epochs", "--runs", "--out", "--resume", "--dry-run", "--json"]


def test_defaults_choices_and_what_is_required_are_stated() -> None:
    words = {verb: " ".join(format_help(verb).split()) for verb in ("train", "serve", "convert", "study vtab")}
    assert "usage: vitrail train RECIPE --data DATA [options]" in words["train"]
    assert "faces, or hf:ORG/NAME. (required)" in words["train"]
    assert "--port N Port to listen on; 0 takes any free one and prints it. (default: 8000)" in words["serve"]
    assert "One of bilinear-corners, bilinear," in words["convert"]
    assert "for the mean and standard deviation. (default: 1)" in words["study vtab"]  # 3 in the other studies
    assert "(default: None)" not in " ".join(words.values())


@pytest.mark.parametrize("columns", ["20", "80", "300"])
def test_help_fits_the_terminal_within_reason(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = [line for line in format_help("finetune").splitlines() if not line.startswith("  vitrail ")]
    assert max(map(len, lines)) <= {"20": 60, "80": 80, "300": 100}[columns]


def test_help_is_found_anywhere_before_two_dashes(capsys: Capture) -> None:
    for arguments in (["info", "-h"], ["info", "b16", "--json", "--help"]):
        code, out, _ = run(*arguments, capsys=capsys)
        assert (code, out.startswith("usage: vitrail info MODEL")) == (0, True)
    assert run("info", "--", "--help", capsys=capsys)[0] != 0


@pytest.mark.parametrize("group", ["data", "study", "recipe"])
def test_the_help_of_a_group_has_an_example_of_each_command(group: str, capsys: Capture) -> None:
    code, out, _ = run(group, "--help", capsys=capsys)
    commands = {verb: command for verb, command in COMMANDS.items() if verb.startswith(f"{group} ")}
    assert (code, len(commands) > 0) == (0, True)
    assert all(command.summary in out and f"  {command.example}\n" in out for command in commands.values())


def test_the_recipes_of_finetune_are_those_of_the_package() -> None:
    assert get_args(FinetuneRecipe) == get_args(FinetuneKind)


def test_a_command_is_a_row_of_the_table() -> None:
    assert all(isinstance(command, Command) and command.summary for command in COMMANDS.values())
