"""Tests of exported files, each in its own runtime."""

from types import ModuleType

import pytest


def runtime(name: str) -> ModuleType:
    """A module that needs a runtime, or a skip that says how to get it."""
    return pytest.importorskip(name, reason=f"{name} cannot be imported: pip install 'vitrail[onnx,openvino]'")
