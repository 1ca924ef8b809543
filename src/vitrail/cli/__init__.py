"""The command line: `vitrail VERB ARGUMENTS --options`.

Results go to stdout, everything else to stderr. A row of `COMMANDS` names a verb's arguments, a dataclass below
cli/arguments/ that imports no torch, and its body, a function of cli/. The body's module is imported only after the
arguments were parsed, so `--help` and mistakes are answered at once.
"""

import difflib
import errno
import importlib
import os
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitrail.errors import INTERRUPTED_EXIT_CODE, OUT_OF_SPACE_EXIT_CODE, UsageError, VitrailError


class Command(NamedTuple):
    """A row of the table of commands."""

    summary: str
    body: str
    """MODULE.FUNCTION below vitrail.cli; the function takes the parsed arguments."""
    arguments: str
    """MODULE.CLASS below vitrail.cli.arguments."""


COMMANDS = {
    "convert": Command(
        "write a model in another format, or adapt it to another task", "convert.run", "models.ConvertArguments"
    ),
    "data check": Command(
        "find bad files, duplicates and leaks in a dataset", "data.check_dataset", "data.CheckArguments"
    ),
    "data get": Command("download a public dataset by name", "data.get_dataset", "data.GetArguments"),
    "data list": Command(
        "show the public datasets, and those downloaded", "data.list_datasets", "data.ListDatasetsArguments"
    ),
    "data pack": Command("write a dataset as tar shards with an index", "data.pack_dataset", "data.PackArguments"),
    "data remove": Command("delete a downloaded dataset", "data.remove_dataset", "data.RemoveArguments"),
    "demo": Command("train a small model to read digits, here and now", "demo.run", "training.DemoArguments"),
    "evaluate": Command(
        "measure the accuracy of models, its uncertainty and their mistakes",
        "evaluate.run",
        "evaluation.EvaluateArguments",
    ),
    "figures": Command(
        "draw what a model has learned and what it attends to", "figures.run", "evaluation.FiguresArguments"
    ),
    "finetune": Command("fine-tune a trained model on your own images", "finetune.run", "training.FinetuneArguments"),
    "info": Command("show a model's architecture, cost, preprocessing and origin", "info.run", "models.InfoArguments"),
    "list": Command("show the presets and the formats, or the recipes", "list.run", "models.ListArguments"),
    "plan": Command("estimate the cost of a run before it starts", "plan.run", "training.PlanArguments"),
    "probe": Command(
        "measure a model's features by few-shot, kNN and linear classifiers",
        "probe.run",
        "evaluation.ProbeArguments",
    ),
    "predict": Command("label images, one row for each", "predict.run", "evaluation.PredictArguments"),
    "push": Command("upload a model to the Hugging Face Hub, with its model card", "push.run", "models.PushArguments"),
    "report": Command(
        "write a run as one HTML file to read, print or send", "report.run", "evaluation.ReportArguments"
    ),
    "serve": Command(
        "serve models over HTTP, with a page that shows their attention", "serve.run", "models.ServeArguments"
    ),
    "study ablate": Command(
        "train variants of a recipe, and compare them on val", "study.run_ablation", "studies.AblateArguments"
    ),
    "study sweep": Command(
        "transfer a model to a dataset as the paper did: learning rate chosen on val, then test",
        "study.run_sweep",
        "studies.SweepArguments",
    ),
    "study table": Command(
        "print finished studies beside the paper's headline table", "study.print_table", "studies.TableArguments"
    ),
    "study vtab": Command("fine-tune a model on the 19 tasks of VTAB-1k", "study.run_vtab", "studies.VtabArguments"),
    "train": Command("train a model from random weights by a named recipe", "train.run", "training.TrainArguments"),
}
start_time = time.monotonic()
"""When `main` was called, by time.monotonic(): time limits count from here, before torch is imported."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    global start_time
    start_time = time.monotonic()
    arguments = sys.argv[1:] if arguments is None else arguments
    warnings.filterwarnings("ignore", module="PIL")  # about damaged files, which our own errors name
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
    except BrokenPipeError:  # the reader of our output has closed it
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
        raise UsageError(f"name a command: {', '.join(COMMANDS)}. `vitrail --help` explains them")
    verb, *rest = arguments
    if rest and f"{verb} {rest[0]}" in COMMANDS:
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    subcommands = {name: command for name, command in COMMANDS.items() if name.startswith(f"{verb} ")}
    if verb in COMMANDS:
        _run_verb(verb, rest)
    elif verb in ("-h", "--help", "help"):
        print(_format_help(COMMANDS))
    elif verb == "--version":
        print(f"vitrail {importlib.import_module('vitrail').__version__}")
    elif subcommands and not rest:
        raise UsageError(f"name a command: {', '.join(subcommands)}. `vitrail {verb} --help` explains them")
    elif subcommands and rest[0] in ("-h", "--help"):
        print(_format_help(subcommands))
    else:
        requested = " ".join([verb, *rest[:1]]) if subcommands else verb
        close = difflib.get_close_matches(requested, COMMANDS, n=1)
        suggestion = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}."
        raise UsageError(f"no command {requested}; {suggestion} `vitrail --help` explains them")


def _run_verb(verb: str, rest: Sequence[str]) -> None:
    """Parse the arguments, then import the body and call it."""
    if os.environ.get("NO_COLOR"):
        os.environ["TERM"] = "dumb"  # the one switch that tyro knows
    parsing = importlib.import_module("vitrail.cli.parsing")
    command = COMMANDS[verb]
    arguments = parsing.parse_arguments(verb, _import_attribute("vitrail.cli.arguments", command.arguments), rest)
    if getattr(arguments, "minutes", None) is not None:  # threads that spin for each other waste a busy machine's time
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch reads it once, when the body imports it
    _import_attribute("vitrail.cli", command.body)(arguments)


def _import_attribute(package: str, name: str) -> Any:
    module, _, attribute = name.partition(".")
    return getattr(importlib.import_module(f"{package}.{module}"), attribute)


def _format_help(commands: Mapping[str, Command]) -> str:
    lines = [f"  {verb:13}{command.summary}" for verb, command in commands.items()]
    head = ["usage: vitrail VERB ...", "", "Vision Transformers, whole.", ""]
    return "\n".join([*head, *lines, "", "`vitrail VERB --help` shows its options."])
