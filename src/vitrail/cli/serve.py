"""`vitrail serve MODEL [MODEL...]`: a page for people and an HTTP API for programs."""

from functools import partial

from vitrail.api.serve import ServeOptions, serve_until_stopped
from vitrail.cli import output
from vitrail.cli.arguments.models import ServeArguments


def run(arguments: ServeArguments) -> None:
    """Serve the models until a signal, and print the address."""
    options = ServeOptions(**{name: value for name, value in vars(arguments).items() if name != "models"})
    serve_until_stopped(arguments.models, options, output.print_note, partial(print, flush=True))
