"""`vitrail recipe show`: a recipe as a file to edit."""

import difflib
from typing import cast, get_args

from vitrail import recipes
from vitrail.cli import output
from vitrail.cli.arguments.models import ShowRecipeArguments
from vitrail.config import to_json
from vitrail.errors import UsageError


def show_recipe(arguments: ShowRecipeArguments) -> None:
    """Print a recipe as TOML, or as JSON."""
    name = arguments.recipe
    kinds = get_args(recipes.FinetuneKind)
    if name in kinds:
        recipe = recipes.build_finetune_recipe(cast(recipes.FinetuneKind, name), arguments.images, patch=16)
    elif name not in recipes.RECIPES and (close := difflib.get_close_matches(name, kinds, n=1)):
        raise UsageError(f"there is no recipe {name!r:.80}: did you mean {close[0]}, which fine-tunes?")
    else:
        recipe = recipes.load_recipe(name)
    output.print_json(to_json(recipe)) if arguments.output.json else print(recipes.format_recipe(recipe, name), end="")
