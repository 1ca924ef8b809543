"""`vitrail recipe show`: a recipe as a file to edit."""

from typing import cast, get_args

from vitrail import recipes
from vitrail.cli import output
from vitrail.cli.arguments.models import ShowRecipeArguments
from vitrail.config import to_json


def show_recipe(arguments: ShowRecipeArguments) -> None:
    """Print a recipe as TOML, or as JSON."""
    name = arguments.recipe
    kinds = get_args(recipes.FinetuneKind)
    if name in kinds:
        recipe = recipes.build_finetune_recipe(cast(recipes.FinetuneKind, name), arguments.images, patch=16)
    else:
        recipe = recipes.load_recipe(name)
    output.print_json(to_json(recipe)) if arguments.output.json else print(recipes.format_recipe(recipe, name), end="")
