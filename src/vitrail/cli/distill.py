"""`vitrail distill TEACHER --model STUDENT --data DATA`: train a model with a teacher."""

import dataclasses
from typing import Any, TypeVar, get_args

from vitrail import cli, recipes
from vitrail.api.models import load_trained
from vitrail.cli import output, training_output
from vitrail.cli.arguments.training import DistillArguments
from vitrail.errors import UsageError
from vitrail.runtime.distributed import silence_other_ranks
from vitrail.training.finetune import FinetuneOptions, check_initial_model, finetune, plan_finetuning
from vitrail.training.pretrain import PretrainingOptions, build_pretraining_run, choose_recipe, pretrain
from vitrail.training.run_execution import join_run_processes
from vitrail.training.run_results import summarize_result
from vitrail.weights.load import is_preset

OptionsT = TypeVar("OptionsT", FinetuneOptions, PretrainingOptions)


def run(arguments: DistillArguments) -> None:
    """Train the student, and print the result."""
    with silence_other_ranks():
        facts = _finetune_student(arguments) if _is_for_finetuning(arguments.recipe) else _train_student(arguments)
        if facts:
            output.print_json(facts) if arguments.output.json else print(summarize_result(facts))


def _is_for_finetuning(recipe: str) -> bool:
    return recipe in get_args(recipes.FinetuneKind) or recipes.load_recipe(recipe).model is None


def _finetune_student(arguments: DistillArguments) -> dict[str, Any] | None:
    """Train a trained model or a preset further; the facts of the result."""
    options = _add_teacher(training_output.build_command_options(FinetuneOptions, arguments), arguments)
    if arguments.model is None:
        raise UsageError("name the student with --model: a trained model, or a preset such as ti16; or give a --recipe")
    options = dataclasses.replace(options, from_scratch=is_preset(arguments.model))
    callbacks = training_output.make_callbacks()
    if arguments.run.dry_run:
        model = check_initial_model(arguments.model, options, output.print_note)
        with join_run_processes(options.run, callbacks) as (group, device, callbacks):
            plan = plan_finetuning(
                arguments.data, model, options, group, device, callbacks, start_time=cli.start_time, dry_run=True
            )
            training_output.print_dry_run(plan.run, as_json=arguments.output.json)
        return None
    results = finetune(arguments.data, arguments.model, options, callbacks, start_time=cli.start_time)
    return results[0] if results else None


def _train_student(arguments: DistillArguments) -> dict[str, Any] | None:
    """Train the preset of a recipe from random weights; the facts of the result."""
    if arguments.model is not None or arguments.image_size is not None:
        raise UsageError(
            f"the recipe {arguments.recipe} names its own preset and resolution: omit --model, --image-size"
        )
    options = _add_teacher(training_output.build_command_options(PretrainingOptions, arguments), arguments)
    callbacks = training_output.make_callbacks()
    if arguments.run.dry_run:
        recipe = choose_recipe(arguments.recipe, options)
        with join_run_processes(options.run, callbacks) as (group, device, callbacks):
            training_run = build_pretraining_run(recipe, arguments.data, options, group, device, callbacks)
            training_output.print_dry_run(training_run, as_json=arguments.output.json)
        return None
    return pretrain(arguments.recipe, arguments.data, options, callbacks)


def _add_teacher(options: OptionsT, arguments: DistillArguments) -> OptionsT:
    teacher = load_trained(arguments.teacher_name, output.print_note)
    return dataclasses.replace(options, run=dataclasses.replace(options.run, teacher=teacher))
