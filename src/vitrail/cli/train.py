"""`vitrail train RECIPE --data DATA`: train a model from random weights."""

from vitrail.cli import output, training_output
from vitrail.cli.arguments.training import TrainArguments
from vitrail.cli.options import JobOptions
from vitrail.cli.training_job import make_job
from vitrail.runtime.distributed import silence_other_ranks
from vitrail.training.pretrain import PretrainingOptions, build_pretraining_run, choose_recipe, pretrain
from vitrail.training.run_execution import join_run_processes
from vitrail.training.run_results import summarize_result


def run(arguments: TrainArguments) -> None:
    """Train, and print the result; or print the job that does so on a cluster."""
    options = training_output.build_command_options(PretrainingOptions, arguments)
    if arguments.job != JobOptions():
        print(make_job(arguments, options), end="")
        return
    with silence_other_ranks():
        if arguments.run.dry_run:
            _print_dry_run(arguments, options)
            return
        facts = pretrain(arguments.recipe, arguments.data, options, training_output.make_callbacks())
        if facts:
            output.print_json(facts) if arguments.output.json else print(summarize_result(facts))


def _print_dry_run(arguments: TrainArguments, options: PretrainingOptions) -> None:
    recipe = choose_recipe(arguments.recipe, options)
    with join_run_processes(options.run, training_output.make_callbacks()) as (group, device, callbacks):
        training_run = build_pretraining_run(recipe, arguments.data, options, group, device, callbacks)
        training_output.print_dry_run(training_run, as_json=arguments.output.json)
