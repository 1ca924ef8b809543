"""Every command and the Python of the README, run in order in one folder; what it prints is what it says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_readmes_commands_print_what_it_says_and_its_python_runs(tmp_path: Path) -> None:
    for block in blocks("console"):
        for command, expected in re.findall(r"^\$ vitrail (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            arguments = [sys.executable, "-m", "vitrail", *shlex.split(command)]
            found = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
            assert found.returncode == 0, found.stderr
            assert found.stdout == expected, command
    for block in blocks("python"):
        found = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr


def test_the_readme_has_commands_to_test() -> None:
    assert sum(block.count("$ vitrail") for block in blocks("console")) >= 5
    assert len(blocks("python")) == 1
