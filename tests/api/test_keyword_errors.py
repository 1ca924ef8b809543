"""Errors of `import vitrail` name keywords, those of the commands options."""

from pathlib import Path
from typing import Any

import pytest

import vitrail
from vitrail.api.keyword_errors import name_keywords, rename_options
from vitrail.errors import UsageError


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
    ],
)
def test_options_become_keywords_and_commands_stay(message: str, renamed: str) -> None:
    assert rename_options(message, {"resume"}) == renamed


def test_a_caller_with_notify_gets_the_message_of_the_command() -> None:
    @name_keywords
    def fail(*, resume: bool = False, notify: object = None) -> None:
        raise UsageError(f"--resume is {resume}")

    with pytest.raises(UsageError, match=r"^resume=True is False$"):
        fail()
    with pytest.raises(UsageError, match=r"^--resume is False$"):
        fail(notify=print)


def test_a_folder_in_use_is_answered_with_keywords(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(UsageError) as raised:
        vitrail.train("digits", "digits", out=tmp_path / "run")
    assert "--" not in str(raised.value)


@pytest.mark.parametrize(
    ("function", "name", "nearest"),
    [(vitrail.evaluate, "spilt", "split"), (vitrail.probe, "shts", "shots"), (vitrail.figures, "picture", "pictures")],
)
def test_an_unknown_keyword_is_answered_with_the_nearest(function: Any, name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=rf"there is no option '{name}': did you mean {nearest}\?"):
        function("model.safetensors", "photos", **{name: 3})
