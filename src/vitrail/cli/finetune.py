"""`vitrail finetune DATA`: fine-tune a trained model on your own images."""

import statistics
from typing import Any

from vitrail import cli
from vitrail.cli import output, training_output
from vitrail.cli.arguments.training import FinetuneArguments
from vitrail.runtime.distributed import silence_other_ranks
from vitrail.training.finetune import FinetuneOptions, check_initial_model, finetune, plan_finetuning
from vitrail.training.run_execution import join_run_processes
from vitrail.training.run_results import summarize_result


def run(arguments: FinetuneArguments) -> None:
    """Fine-tune, once or with several seeds, and print the results."""
    options = training_output.build_command_options(FinetuneOptions, arguments)
    with silence_other_ranks():
        if arguments.run.dry_run:
            _print_dry_run(arguments, options)
            return
        callbacks = training_output.make_callbacks()
        results = finetune(arguments.data, arguments.model, options, callbacks, start_time=cli.start_time)
        if results:
            _print_results(results, as_json=arguments.output.json)


def _print_dry_run(arguments: FinetuneArguments, options: FinetuneOptions) -> None:
    model = check_initial_model(arguments.model, options, output.print_note)
    with join_run_processes(options.run, training_output.make_callbacks()) as (group, device, callbacks):
        plan = plan_finetuning(
            arguments.data, model, options, group, device, callbacks, start_time=cli.start_time, dry_run=True
        )
        training_output.print_dry_run(plan.run, as_json=arguments.output.json)


def _print_results(results: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print the result of each run, and their mean."""
    top1 = [facts["top1"] for facts in results]
    deviation = statistics.stdev(top1) if len(results) > 1 else None
    if as_json:
        summary = {"mean": statistics.mean(top1), "std": deviation, "n": len(results), "runs": results}
        output.print_json(results[0] if deviation is None else summary)
        return
    for facts in results:
        print(summarize_result(facts))
    if deviation is not None:
        mean = f"{statistics.mean(top1):.2%} ± {deviation:.2%}"
        print(f"{results[0]['split']}: {mean} (mean and standard deviation of {len(results)} runs)")
