"""`vitrail train RECIPE --data DATA`: train a model from random weights."""

from vitrail.cli import output, training_output
from vitrail.cli.arguments.training import TrainArguments
from vitrail.cli.processes import silence_other_ranks
from vitrail.train.pretrain import PretrainingOptions, build_pretraining_run, choose_recipe, pretrain
from vitrail.train.run_execution import join_run_processes
from vitrail.train.run_results import summarize_result


def run(arguments: TrainArguments) -> None:
    """Train, and print the result."""
    options = PretrainingOptions(
        overrides=training_output.build_overrides(arguments.overrides),
        settings=arguments.settings,
        target=arguments.target,
        probe_shots=arguments.probe,
        run=training_output.build_run_options(arguments.run, arguments.compute, arguments.learning),
    )
    with silence_other_ranks():
        if arguments.run.dry_run:
            _print_dry_run(arguments, options)
            return
        facts = pretrain(arguments.recipe, arguments.data, options, training_output.make_callbacks())
        if facts is not None:
            output.print_json(facts) if arguments.output.json else print(summarize_result(facts))


def _print_dry_run(arguments: TrainArguments, options: PretrainingOptions) -> None:
    recipe = choose_recipe(arguments.recipe, options)
    with join_run_processes(options.run, training_output.make_callbacks()) as (group, device, callbacks):
        training_run = build_pretraining_run(recipe, arguments.data, options, group, device, callbacks)
        training_output.print_dry_run(training_run, as_json=arguments.output.json)
