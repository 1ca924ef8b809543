"""Recipes as files: TOML to edit, and JSON, such as a run's own config.json."""

import dataclasses
import difflib
import json
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from vitrail.config import Recipe, from_json, to_json
from vitrail.config.field_docstrings import read_field_docstrings
from vitrail.config.serialization import upgrade_run_config
from vitrail.errors import UsageError
from vitrail.recipes.finetuning import FinetuneKind, set_lora
from vitrail.recipes.overrides import check_model_settings, list_model_settings
from vitrail.recipes.pretraining import get_recipe

RECIPE_SUFFIXES = (".toml", ".json")
_NONE = "none"  # TOML has no null
_COMMENT_COLUMN, _MAX_WIDTH = 32, 120


def load_recipe(name: str | Path) -> Recipe:
    """The built-in recipe of that name, or the recipe in a .toml or .json file; a run's config.json is one.

    A path wins over a name only when it ends in .toml or .json.

        recipe = vitrail.load_recipe("digits")
        same = vitrail.load_recipe("runs/train/config.json")
    """
    path = Path(name)
    if path.suffix.lower() not in RECIPE_SUFFIXES:
        return get_recipe(str(name))
    values = _read_values(path)
    try:
        return check_recipe(_restore_none(values.get("recipe", values) if isinstance(values, dict) else values))
    except UsageError as error:
        raise UsageError(f"{path}: {error} (`vitrail recipe show NAME` prints a complete recipe)") from error


def load_finetune_recipe(recipe: str | Path | Recipe, lora: int | None = None) -> Recipe | None:
    """A recipe of the user's own, from a file or a value, with LoRA of that rank; None where a kind chooses one."""
    if isinstance(recipe, str) and recipe in get_args(FinetuneKind):
        return None
    if isinstance(recipe, str | Path) and Path(recipe).suffix.lower() not in RECIPE_SUFFIXES:
        kinds = get_args(FinetuneKind)
        close = difflib.get_close_matches(str(recipe), kinds, n=1)
        raise UsageError(
            f"the recipe is {str(recipe)!r:.80}; fine-tuning takes {', '.join(kinds)}, or a .toml or .json file"
            + (f"; did you mean {close[0]}?" if close else "")
        )
    own = check_recipe(recipe) if isinstance(recipe, Recipe) else load_recipe(recipe)
    if own.model is not None:
        name, call = recipe, f"vitrail train {recipe} --data DATA"
        if isinstance(recipe, Recipe):
            name, call = "the recipe", "vitrail.train(recipe, data)"
        raise UsageError(f"{name} trains {own.model} from random weights: {call}")
    return set_lora(own, lora)


def check_recipe(recipe: Recipe | Any) -> Recipe:
    """The recipe of a value or of its JSON, refused if a field has the wrong type or a setting is none of its model."""
    return check_model_settings(from_json(Recipe, to_json(recipe) if isinstance(recipe, Recipe) else recipe))


def find_loss_function(name: str | Path | Recipe) -> str | None:
    """The name of the loss that replaced the recipe's in the run whose config.json is given."""
    if isinstance(name, Recipe) or Path(name).suffix.lower() != ".json":
        return None
    values = _read_values(Path(name))
    return values.get("loss_function") if isinstance(values, dict) else None


def _read_values(path: Path) -> Any:
    """The content of a recipe file, or of a run's config.json under today's names."""
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except FileNotFoundError:
        options = " --json" if path.suffix.lower() == ".json" else ""
        raise UsageError(f"{path} does not exist; `vitrail recipe show NAME{options} > {path}` writes one") from None
    except (ValueError, RecursionError) as error:  # of either format
        raise UsageError(f"{path} cannot be read: {error}") from None
    is_run = isinstance(values, dict) and isinstance(values.get("recipe"), dict)
    return upgrade_run_config(values) if is_run else values


def _restore_none(values: Any) -> Any:
    """Values with None instead of "none"; `settings` stay as they are, where it may name positions."""
    if not isinstance(values, dict):
        return None if values == _NONE else values
    return {name: value if name == "settings" else _restore_none(value) for name, value in values.items()}


def format_recipe(recipe: Recipe, name: str) -> str:
    """A recipe as TOML: every field, its meaning beside it."""
    train = "vitrail finetune DATA --model MODEL --recipe" if recipe.model is None else "vitrail train"
    usage = f"{train} my.toml" + ("" if recipe.model is None else " --data DATA")
    head = [f"# {name}: {recipe.source}", *([f"# {recipe.result}"] if recipe.result else []), f"# Use it: {usage}", ""]
    return "\n".join([*head, *_format_table(recipe, to_json(recipe), "")]) + "\n"


def _format_table(config: Any, values: Mapping[str, Any], title: str) -> Iterator[str]:
    """The lines of a dataclass: its own fields first, then its tables."""
    if title:
        yield from ("", f"[{title}]")
    docstrings = read_field_docstrings(type(config))
    meanings = {name: text.replace("None", _NONE) for name, text in docstrings.items()}
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    for name, value in values.items():
        if name not in tables and not (value is None and defaults[name] is None):
            yield from _add_comment(f"{name} = {_format_value(value)}", meanings.get(name, ""))
        elif name not in tables:
            yield from _add_comment(f"# {name} =", meanings.get(name, "not set"))
    for name, value in tables.items():
        if name == "settings":
            yield from ("", *_add_comment(f"[{name}]", meanings[name]))
            if config.model is not None:
                yield from _comment(f"{config.model} has {', '.join(list_model_settings(config.model))}.", _MAX_WIDTH)
            yield from (f"{setting} = {_format_value(choice)}" for setting, choice in value.items())
        else:
            yield from _format_table(getattr(config, name), value, name)


def _add_comment(line: str, comment: str) -> Iterator[str]:
    """A line with a comment beside it, which continues below; or above it where the line is too long."""
    comments = _comment(comment, _MAX_WIDTH - _COMMENT_COLUMN)
    if not comments:
        yield line
    elif len(line) >= _COMMENT_COLUMN:
        yield from (*comments, line)
    else:
        yield f"{line:{_COMMENT_COLUMN}}{comments[0]}"
        yield from (" " * _COMMENT_COLUMN + text for text in comments[1:])


def _comment(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _format_value(value: Any) -> str:
    """JSON's notation is TOML's too, for strings, numbers, booleans and lists; None becomes "none".

    A configuration among a model's settings becomes an inline table, without what is None.
    """
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_format_value(item)}' for key, item in value.items() if item is not None)}}}"
    text = json.dumps(_NONE if value is None else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # which TOML does not allow in a string
