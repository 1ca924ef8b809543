"""An exported file opened: how it is run, and what it says of itself."""

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.config import Preprocess, from_json
from vitrail.errors import ModelError, UsageError
from vitrail.export.graph import READ, Run
from vitrail.export.write import FORMS, Format

_RUN: tuple[Format, ...] = ("onnx", "openvino")  # a .pt2 holds pickles


class Exported(NamedTuple):
    """A file that `vitrail convert --to onnx` or `--to openvino` wrote."""

    path: Path
    run: Run
    preprocess: Preprocess
    channels: int
    labels: tuple[str, ...]
    several: bool
    temperature: float
    threshold: float


def is_exported(name: str) -> bool:
    """Whether a MODEL is an exported file, by its ending."""
    return Path(name).suffix in {form.suffix for form in FORMS.values()} and Path(name).is_file()


def read(path: Path) -> Exported:
    """Open a file with its runtime, which computes on the CPU."""
    format = next((name for name in _RUN if FORMS[name].suffix == path.suffix), None)  # noqa: A001
    if format is None:
        raise UsageError(
            f"{path} is for torch.export.load (docs/exporting.md); give an .onnx, an .xml, or the model it was made of"
        )
    try:
        module = importlib.import_module(FORMS[format].module)
    except ImportError as error:
        raise UsageError(f"{path} needs {error.name}: pip install 'vitrail[{format}]'") from None
    try:
        facts = {name: json.loads(value) for name, value in module.read_metadata(path).items() if name in READ}
        run = module.run(path)
    except (RuntimeError, ValueError, OSError, *module.DAMAGE) as error:
        raise ModelError(f"{path} cannot be read: {' '.join(str(error).split()):.300}") from error
    return _describe(path, facts, run, format)


def _describe(path: Path, facts: dict[str, Any], run: Run, format: Format) -> Exported:  # noqa: A002
    if not set(READ) <= facts.keys():
        raise ModelError(
            f"{path} does not say how images are prepared and what its outputs mean, as files do that vitrail exports:"
            f" vitrail convert MODEL {path.name} --to {format}"
        )
    try:
        pixels = dict(facts["pixels"])
        channels = int(pixels.pop("channels"))
        preprocess = from_json(Preprocess, pixels | facts["normalised"])
        labels = tuple(str(label) for label in facts["labels"] or ())
        numbers = float(facts["temperature"]), float(facts["threshold"])
        several = facts["several"] is True
    except (UsageError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    return Exported(path, run, preprocess, channels, labels, several, *numbers)
