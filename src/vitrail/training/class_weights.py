"""Weights of classes in the loss, given by the user: a mapping, or a CSV or JSON file.

    class,weight          {"rose": 3, "tulip": 0.5}
    rose,3
    tulip,0.5

A class that is not named has the weight 1. Weights are used as they are, without normalization.
"""

import csv
import difflib
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.errors import DataError, UsageError

ClassWeights = Mapping[str, float] | str | Path
_COLUMNS = ("class", "weight")


def resolve_class_weights(weights: ClassWeights, classes: Sequence[str]) -> tuple[float, ...]:
    """The weight of each class, in the order of `classes`."""
    if isinstance(weights, Mapping):
        where, by_name = "class_weights", dict(weights)
    else:
        where, by_name = f"--class-weights {weights}", _read_weights(Path(weights))
    if not by_name:
        raise UsageError(f"{where} names no class: give name and weight of one or more, or omit it")
    known = set(classes)
    for name, weight in by_name.items():
        if name not in known:
            close = difflib.get_close_matches(str(name), classes, n=1)
            suggestion = f": did you mean {close[0]!r}?" if close else f"; its classes are such as {classes[0]!r}"
            raise UsageError(f"{where} names the class {name!r}, which the data does not have{suggestion}")
        is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not is_number or not 0 < float(weight) < math.inf:
            raise UsageError(f"{where} gives {name!r} the weight {weight!r}; it must be a finite number above 0")
    return tuple(float(by_name.get(name, 1.0)) for name in classes)


def _read_weights(path: Path) -> dict[str, Any]:
    """The weights in a file by class, as they are written there."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"--class-weights {path} cannot be read: {reason}") from None
    return _parse_json(text, path) if path.suffix == ".json" else _parse_csv(text, path)


def _parse_json(text: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text, object_pairs_hook=lambda pairs: _refuse_duplicates(pairs, path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f'{path} must hold an object of weights by class, such as {{"rose": 3, "tulip": 0.5}}')
    return content


def _parse_csv(text: str, path: Path) -> dict[str, Any]:
    rows = csv.DictReader(text.splitlines())
    if not set(_COLUMNS) <= set(rows.fieldnames or ()):
        header = ", ".join(rows.fieldnames or ()) or "nothing"
        raise DataError(f"{path} must have the columns class and weight in its first line, which has {header}")
    pairs = [(row["class"], _parse_number(row["weight"])) for row in rows]
    return _refuse_duplicates(pairs, path)


def _parse_number(cell: str | None) -> float | str | None:
    """The number in a cell; what is none stays as it is, for the error that names its class."""
    try:
        return float(cell or "")
    except ValueError:
        return cell


def _refuse_duplicates(pairs: Sequence[tuple[str, Any]], path: Path) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{path} gives {duplicate!r} two weights: remove one")
    return dict(pairs)
