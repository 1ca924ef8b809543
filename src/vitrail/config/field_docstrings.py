"""What the fields of a dataclass mean: the docstring below each, which Python itself does not keep."""

import ast
import functools
import inspect
import sys
from collections.abc import Mapping


def read_field_docstrings(kind: type) -> Mapping[str, str]:
    """The docstring below each field of a dataclass, on one line."""
    return _read_module_docstrings(kind.__module__)[kind.__qualname__]


@functools.cache
def _read_module_docstrings(module: str) -> dict[str, dict[str, str]]:
    """The docstrings of fields by class; a module is parsed once for all of its classes."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: _read_class_docstrings(node) for node in body if isinstance(node, ast.ClassDef)}


def _read_class_docstrings(definition: ast.ClassDef) -> dict[str, str]:
    sentences = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            sentences[field.target.id] = " ".join(str(text.value.value).split())
    return sentences
