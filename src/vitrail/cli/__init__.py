"""The command line: `vitrail VERB what --options`.

Results go to stdout, everything else to stderr. A verb is the function `main` of the module of its name (`data check`
is data/audit.py), which is imported when the verb is called, and torch only when it runs: `--help` and a typo are
answered at once.
"""

import difflib
import errno
import importlib
import os
import re
import sys
import warnings
from collections.abc import Sequence

from vitrail.errors import UsageError, VitrailError

COMMANDS = {
    "convert": "write a model in another format, or fitted to another task",
    "data check": "find bad files, copies and leaks in a set of images",
    "data get": "fetch a public set by name",
    "data list": "show the public sets, and those that are here",
    "data pack": "write a set as tar shards with an index",
    "data remove": "delete a set that was got",
    "demo": "let a small model learn to read digits, here and now",
    "evaluate": "measure how often models are right, how sure that is and where they are wrong",
    "figures": "show what a model has learned and where it looks",
    "finetune": "fit a model that has learned before to images of your own",
    "info": "show what a model is, costs, expects and where it came from",
    "list": "show the presets and the formats, or the recipes",
    "plan": "say what a run will take before it runs",
    "probe": "measure a model's features by few-shot, kNN and linear classifiers",
    "predict": "label images, a row for each",
    "push": "upload a model to the Hugging Face Hub, with its card",
    "report": "write a run as one HTML file to read, print or send",
    "serve": "answer over HTTP, with a page that shows what models see",
    "study ablate": "train variants of a recipe, and compare them on val",
    "study sweep": "transfer a model to a set as the paper did: the rate chosen on val, then test",
    "study table": "put finished studies beside the paper's headline table",
    "study vtab": "fine-tune a model on the 19 tasks of VTAB-1k",
    "train": "train a model from random weights by a named recipe",
}
OUT_OF_SPACE_EXIT_CODE = 5
INTERRUPTED_EXIT_CODE = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    warnings.filterwarnings("ignore", module="PIL")  # of damaged files, which are named by errors of our own
    try:
        _run_command(arguments)
        sys.stdout.flush()
    except VitrailError as error:
        verb = getattr(error, "command", "")
        print(f"vitrail{f' {verb}' if verb else ''}: {error}", file=sys.stderr)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        print("vitrail: out of memory", file=sys.stderr)
        return OUT_OF_SPACE_EXIT_CODE
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        print(f"vitrail: {'no space left on the disk: ' if full else ''}{error}", file=sys.stderr)
        return OUT_OF_SPACE_EXIT_CODE if full else UsageError.exit_code
    except KeyboardInterrupt:
        print("vitrail: interrupted", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    return 0


def _run_command(arguments: Sequence[str]) -> None:
    if not arguments:
        raise UsageError(f"say what to do: {', '.join(COMMANDS)}. `vitrail --help` explains them")
    verb, *rest = arguments
    if rest and f"{verb} {rest[0]}" in COMMANDS:
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    if verb in ("-h", "--help", "help"):
        print(_format_help(COMMANDS))
    elif (group := _list_subcommands(verb)) and not rest:
        raise UsageError(f"say what to do: {', '.join(group)}. `vitrail {verb} --help` explains them")
    elif group and rest[0] in ("-h", "--help"):
        print(_format_help(group))
    elif verb == "--version":
        from vitrail import __version__

        print(f"vitrail {__version__}")
    elif verb not in COMMANDS:
        wanted = " ".join([verb, *rest[:1]]) if _list_subcommands(verb) else verb
        close = difflib.get_close_matches(wanted, COMMANDS, n=1)
        meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}."
        raise UsageError(f"no command {wanted}; {meant} `vitrail --help` explains them")
    else:
        if os.environ.get("NO_COLOR"):
            os.environ["TERM"] = "dumb"  # the one switch that tyro knows
        function = importlib.import_module(f"vitrail.cli.{verb.replace(' ', '.')}").main
        positional, named = importlib.import_module("vitrail.cli.parsing").parse_arguments(verb, function, rest)
        function(*positional, **named)


def _list_subcommands(word: str) -> dict[str, str]:
    """The verbs of two words that begin with this one."""
    return {verb: text for verb, text in COMMANDS.items() if verb.startswith(f"{word} ")}


def _format_help(verbs: dict[str, str]) -> str:
    lines = [f"  {verb:13}{text}" for verb, text in verbs.items()]
    return "\n".join(
        [
            "usage: vitrail VERB ...",
            "",
            "Vision Transformers, whole.",
            "",
            *lines,
            "",
            "`vitrail VERB --help` shows its options.",
        ]
    )
