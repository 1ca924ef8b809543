"""The templates of the HTML pages, which lie beside this file."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from vitrail.report import fact_rows
from vitrail.visualization.plots import make_printable


@lru_cache
def load_template(name: str) -> jinja2.Template:
    """A template whose text is escaped, and in which an unknown name is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "percent": fact_rows.format_percent,
        "interval": fact_rows.format_interval,
        "shape": lambda sides: fact_rows.format_shape(*sides),
        "signed": fact_rows.format_signed,
        "printable": make_printable,
        "probability": fact_rows.format_probability,
        "type_name": lambda block: type(block).__name__,
    }
    environment.filters |= filters
    return environment.get_template(name)
