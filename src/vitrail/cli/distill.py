"""`vitrail distill TEACHER --model STUDENT --data DATA`: train a model with a teacher."""

from vitrail import cli
from vitrail.api.models import load_trained
from vitrail.cli import output, training_output
from vitrail.cli.arguments.training import DistillArguments
from vitrail.runtime.distributed import silence_other_ranks
from vitrail.training.distill import DistillOptions, distill, plan_distillation
from vitrail.training.run_results import summarize_result


def run(arguments: DistillArguments) -> None:
    """Train the student, and print the result."""
    options = training_output.build_command_options(DistillOptions, arguments)
    with silence_other_ranks():
        teacher, callbacks = load_trained(arguments.teacher_name, output.print_note), training_output.make_callbacks()
        if arguments.run.dry_run:
            with plan_distillation(teacher, arguments.data, arguments.model, options, callbacks) as training_run:
                training_output.print_dry_run(training_run, as_json=arguments.output.json)
            return
        facts = distill(teacher, arguments.data, arguments.model, options, callbacks, start_time=cli.start_time)
        if facts:
            output.print_json(facts) if arguments.output.json else print(summarize_result(facts))
