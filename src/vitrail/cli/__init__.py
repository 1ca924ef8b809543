"""The command line: `vitrail VERB ARGUMENTS --options`.

Results go to stdout, everything else to stderr. A row of `COMMANDS` names a verb's arguments, a dataclass below
cli/arguments/ that imports no torch, and its body, a function of cli/. The body's module is imported only after the
arguments were parsed, so `--help` and mistakes are answered at once.
"""

import difflib
import errno
import importlib
import itertools
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from vitrail.errors import INTERRUPTED_EXIT_CODE, OUT_OF_SPACE_EXIT_CODE, UsageError, VitrailError
from vitrail.runtime.waiting_threads import let_threads_sleep


class Command(NamedTuple):
    """A row of the table of commands."""

    summary: str
    body: str
    """MODULE.FUNCTION below vitrail.cli; the function takes the parsed arguments."""
    arguments: str
    """MODULE.CLASS below vitrail.cli.arguments."""
    example: str


COMMAND_GROUPS = {
    "start here": {
        "demo": Command(
            "show what the built-in model can do, in two minutes", "demo.run", "training.DemoArguments", "vitrail demo"
        ),
        "finetune": Command(
            "fine-tune a pretrained model on your own images",
            "finetune.run",
            "training.FinetuneArguments",
            "vitrail finetune photos --model hf:google/vit-base-patch16-224 --minutes 10",
        ),
        "predict": Command(
            "classify images, or write their features or attention maps",
            "predict.run",
            "evaluation.PredictArguments",
            "vitrail predict runs/finetune holiday/*.jpg --top 3",
        ),
        "serve": Command(
            "serve models over HTTP, with a web page to try them",
            "serve.run",
            "models.ServeArguments",
            "vitrail serve runs/finetune --port 8080",
        ),
        "report": Command(
            "write a run as one HTML page to read, print or send",
            "report.run",
            "evaluation.ReportArguments",
            "vitrail report runs/finetune --out report.html",
        ),
    },
    "train and measure": {
        "train": Command(
            "train a model from random weights",
            "train.run",
            "training.TrainArguments",
            "vitrail train cifar10 --data cifar10 --epochs 50 --out runs/cifar10",
        ),
        "distill": Command(
            "train a model to predict what a larger one predicts",
            "distill.run",
            "training.DistillArguments",
            "vitrail distill runs/finetune --model ti16 --data photos",
        ),
        "plan": Command(
            "estimate the time, memory and cost of a training run",
            "plan.run",
            "training.PlanArguments",
            "vitrail plan vit-b16-imagenet --gpu h100 --gpus 8",
        ),
        "evaluate": Command(
            "measure accuracy and calibration, and list the mistakes",
            "evaluate.run",
            "evaluation.EvaluateArguments",
            "vitrail evaluate runs/finetune photos --against runs/finetune-2",
        ),
        "probe": Command(
            "measure features by few-shot, kNN and linear classifiers",
            "probe.run",
            "evaluation.ProbeArguments",
            "vitrail probe hf:google/vit-base-patch16-224 photos --methods few-shot knn",
        ),
        "figures": Command(
            "draw attention maps and the paper's figures of a model",
            "figures.run",
            "evaluation.FiguresArguments",
            "vitrail figures runs/finetune holiday/*.jpg --out figures",
        ),
    },
    "large collections": {
        "merge": Command(
            "merge the parts that predict --part wrote to one file",
            "merge.run",
            "evaluation.MergeArguments",
            "vitrail merge rows.parquet",
        ),
        "index": Command(
            "make the features of images searchable",
            "index.run",
            "search.IndexArguments",
            "vitrail index features.npy --out photos.index",
        ),
        "search": Command(
            "find the images of an index most similar to yours",
            "search.run",
            "search.SearchArguments",
            "vitrail search photos.index cat.jpg --top 20",
        ),
    },
    "models and formats": {
        "list": Command(
            "list the model presets and weight formats, or the recipes",
            "list.run",
            "models.ListArguments",
            "vitrail list recipes",
        ),
        "info": Command(
            "show a model's architecture, size, preprocessing and origin",
            "info.run",
            "models.InfoArguments",
            "vitrail info hf:google/vit-base-patch16-224",
        ),
        "recipe show": Command(
            "print a recipe as a TOML file to edit and train with",
            "recipe.show_recipe",
            "models.ShowRecipeArguments",
            "vitrail recipe show cifar10 > my.toml",
        ),
        "convert": Command(
            "convert a model to another format, resolution or patch size",
            "convert.run",
            "models.ConvertArguments",
            "vitrail convert runs/finetune model.onnx --to onnx",
        ),
        "zero-shot": Command(
            "make a classifier of any labels from a CLIP or SigLIP",
            "zero_shot.run",
            "models.ZeroShotArguments",
            "vitrail zero-shot hf:openai/clip-vit-base-patch32 labels.txt",
        ),
        "push": Command(
            "upload a model and its model card to the Hugging Face Hub",
            "push.run",
            "models.PushArguments",
            "vitrail push runs/finetune hf:you/my-photos --private",
        ),
    },
    "data": {
        "data list": Command(
            "list the public datasets, and those downloaded",
            "data.list_datasets",
            "data.ListDatasetsArguments",
            "vitrail data list",
        ),
        "data get": Command(
            "download a public dataset", "data.get_dataset", "data.GetArguments", "vitrail data get cifar10"
        ),
        "data check": Command(
            "find bad files, duplicates and leaks between splits",
            "data.check_dataset",
            "data.CheckArguments",
            "vitrail data check photos --out data_report.json",
        ),
        "data suspects": Command(
            "rank likely label errors, on a page to decide about each",
            "suspects.run",
            "data.SuspectsArguments",
            "vitrail data suspects photos --model hf:google/vit-base-patch16-224",
        ),
        "data pack": Command(
            "pack a dataset into tar shards (WebDataset)",
            "data.pack_dataset",
            "data.PackArguments",
            "vitrail data pack photos photos-shards",
        ),
        "data remove": Command(
            "delete a downloaded dataset", "data.remove_dataset", "data.RemoveArguments", "vitrail data remove cifar10"
        ),
    },
    "studies": {
        "study sweep": Command(
            "choose the learning rate on val, then measure on test",
            "study.run_sweep",
            "studies.SweepArguments",
            "vitrail study sweep cifar10 --model hf:google/vit-base-patch16-224-in21k",
        ),
        "study ablate": Command(
            "train variants of a recipe, and compare them on val",
            "study.run_ablation",
            "studies.AblateArguments",
            "vitrail study ablate digits --data digits --variants positions=none depth=6",
        ),
        "study vtab": Command(
            "fine-tune a model on the 19 tasks of VTAB-1k",
            "study.run_vtab",
            "studies.VtabArguments",
            "vitrail study vtab hf:google/vit-base-patch16-224-in21k --data-root vtab",
        ),
        "study table": Command(
            "print finished studies beside the paper's main table",
            "study.print_table",
            "studies.TableArguments",
            "vitrail study table runs/sweep-cifar10 --csv table.csv",
        ),
        "study paper": Command(
            "list the paper's findings beside what was measured here",
            "study.print_findings",
            "studies.FindingsArguments",
            "vitrail study paper > findings.md",
        ),
        "study data-size": Command(
            "compare architectures by the number of pre-training images",
            "paper_study.run_data_size",
            "studies.PaperStudyArguments",
            "vitrail study data-size --data tiny-imagenet --parallel 4",
        ),
        "study compute": Command(
            "compare architectures by their pre-training compute",
            "paper_study.run_compute",
            "studies.PaperStudyArguments",
            "vitrail study compute --data tiny-imagenet --parallel 4",
        ),
        "study size": Command(
            "compare sizes of ViT on few images without augmentation",
            "paper_study.run_size",
            "studies.PaperStudyArguments",
            "vitrail study size --data tiny-imagenet",
        ),
        "study resolution": Command(
            "fine-tune at a higher resolution, with resampled positions",
            "paper_study.run_resolution",
            "studies.PaperStudyArguments",
            "vitrail study resolution --data tiny-imagenet",
        ),
        "study positions": Command(
            "compare kinds of position embeddings",
            "paper_study.run_positions",
            "studies.PaperStudyArguments",
            "vitrail study positions --data tiny-imagenet --runs 3",
        ),
        "study head": Command(
            "compare class token, average and attention pooling",
            "paper_study.run_head",
            "studies.PaperStudyArguments",
            "vitrail study head --data tiny-imagenet",
        ),
        "study shape": Command(
            "vary depth, width, MLP and patch",
            "paper_study.run_shape",
            "studies.PaperStudyArguments",
            "vitrail study shape --data tiny-imagenet",
        ),
        "study optimizer": Command(
            "compare Adam and SGD for pre-training a ResNet",
            "paper_study.run_optimizer",
            "studies.PaperStudyArguments",
            "vitrail study optimizer --data tiny-imagenet",
        ),
    },
}
"""The commands, in the order of `vitrail --help`."""
_MIN_SIMILARITY = 0.65  # of an unknown command to one that is suggested: eval to evaluate, but not precision to recipe
COMMANDS = {verb: command for commands in COMMAND_GROUPS.values() for verb, command in commands.items()}
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
        raise UsageError(
            f"name a command, such as {', '.join(COMMAND_GROUPS['start here'])}. `vitrail --help` lists all"
        )
    verb, *rest = arguments
    if rest and f"{verb} {rest[0]}" in COMMANDS:
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    subcommands = {name: command for name, command in COMMANDS.items() if name.startswith(f"{verb} ")}
    if verb in COMMANDS:
        _run_verb(verb, rest)
    elif verb in ("-h", "--help", "help"):
        print(_import_attribute("vitrail.cli", "overview.format_overview")(COMMAND_GROUPS))
    elif verb == "--version":
        print(f"vitrail {importlib.import_module('vitrail').__version__}")
    elif subcommands and not rest:
        raise UsageError(f"name a command: {', '.join(subcommands)}. `vitrail {verb} --help` says more")
    elif subcommands and rest[0] in ("-h", "--help"):
        print(_import_attribute("vitrail.cli", "overview.format_subcommands")(verb, subcommands))
    else:
        requested = " ".join([verb, *rest[:1]]) if subcommands else verb
        close = difflib.get_close_matches(requested, COMMANDS, n=1, cutoff=_MIN_SIMILARITY)
        suggestion = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"no command {requested}; {suggestion}`vitrail --help` lists all")


def _run_verb(verb: str, rest: Sequence[str]) -> None:
    """Parse the arguments, then import the body and call it; or print the help."""
    command = COMMANDS[verb]
    signature = _import_attribute("vitrail.cli.arguments", command.arguments)
    if {"-h", "--help"} & set(itertools.takewhile(lambda argument: argument != "--", rest)):
        print(_import_attribute("vitrail.cli", "help.format_command_help")(verb, command, signature))
        return
    arguments = importlib.import_module("vitrail.cli.parsing").parse_arguments(verb, signature, rest)
    is_timed = verb == "demo" or getattr(arguments, "minutes", None) is not None  # whatever else the machine does
    let_threads_sleep(always=is_timed)  # before the body imports torch
    body = _import_attribute("vitrail.cli", command.body)
    with _import_attribute("vitrail.api", "keyword_errors.keep_option_names")():
        body(arguments)


def _import_attribute(package: str, name: str) -> Any:
    module, _, attribute = name.partition(".")
    return getattr(importlib.import_module(f"{package}.{module}"), attribute)
