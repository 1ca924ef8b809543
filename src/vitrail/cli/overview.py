"""`vitrail --help`: the commands by group, and the first ones to try."""

from collections.abc import Mapping

from vitrail.cli import Command

EXAMPLES = (
    "vitrail demo",
    "vitrail finetune photos --model hf:google/vit-base-patch16-224 --minutes 10",
    "vitrail predict runs/finetune holiday/*.jpg --top 3",
)


def format_overview(groups: Mapping[str, Mapping[str, Command]]) -> str:
    """The commands by group, and examples."""
    usage = "usage: vitrail COMMAND [arguments] [options]"
    lines = [usage, "", "Train, fine-tune, inspect and serve Vision Transformers."]
    for title, commands in groups.items():
        lines += ["", f"{title}:", *_format_summaries(commands)]
    lines += ["", "examples:", *(f"  {example}" for example in EXAMPLES)]
    return "\n".join([*lines, "", "`vitrail COMMAND --help` shows an example and all options of a command."])


def format_subcommands(verb: str, commands: Mapping[str, Command]) -> str:
    """The commands that begin with a verb, such as data, and an example of each."""
    head = [f"usage: vitrail {verb} COMMAND [arguments] [options]", ""]
    examples = ["", "examples:", *(f"  {command.example}" for command in commands.values())]
    tail = ["", f"`vitrail {verb} COMMAND --help` shows all options of a command."]
    return "\n".join([*head, *_format_summaries(commands), *examples, *tail])


def _format_summaries(commands: Mapping[str, Command]) -> list[str]:
    return [f"  {verb:18}{command.summary}" for verb, command in commands.items()]
