"""vitrail: Vision Transformers, whole. `import vitrail` is quick; torch is imported with the first name used."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail.config import PreprocessConfig
    from vitrail.inference.classifier import Classifier
    from vitrail.model.vit import attention_maps
    from vitrail.weights.adapt import adapt
    from vitrail.weights.load import load, save
    from vitrail.weights.trained import Trained, create

__version__ = "0.1.0"
__all__ = ["Classifier", "PreprocessConfig", "Trained", "adapt", "attention_maps", "create", "load", "save"]

_HOMES = {
    "Classifier": "vitrail.inference.classifier",
    "PreprocessConfig": "vitrail.config",
    "Trained": "vitrail.weights.trained",
    "adapt": "vitrail.weights.adapt",
    "attention_maps": "vitrail.model.vit",
    "create": "vitrail.weights.trained",
    "load": "vitrail.weights.load",
    "save": "vitrail.weights.load",
}


_OLD_NAMES = {"Preprocess": "PreprocessConfig"}  # for one release


def __getattr__(name: str) -> object:
    name = _OLD_NAMES.get(name, name)
    if name not in _HOMES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
