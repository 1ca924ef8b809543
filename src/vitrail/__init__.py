"""Vision Transformers in PyTorch. `import vitrail` is quick; torch is imported with the first name used."""

import importlib
from typing import TYPE_CHECKING

from vitrail import errors as errors  # light, and needed to catch what the functions raise
from vitrail.runtime.waiting_threads import let_threads_sleep as _let_threads_sleep

if TYPE_CHECKING:
    from vitrail.api.checked_functions import adapt, create, load, load_recipe, save
    from vitrail.api.conversion import Conversion, convert
    from vitrail.api.evaluation import Evaluation, ProbeResult, evaluate, probe
    from vitrail.api.figures import Figures, figures
    from vitrail.api.prediction import dense, embed, predict
    from vitrail.api.prediction_list import Prediction, PredictionList
    from vitrail.api.run import Run
    from vitrail.api.scoring import Decoder, Scorer
    from vitrail.api.search import Neighbor, SearchResult, index, search
    from vitrail.api.serve import Server, serve
    from vitrail.api.suspects import Suspects, suspects
    from vitrail.api.training import distill, finetune, train
    from vitrail.api.zero_shot import zero_shot
    from vitrail.config import PreprocessConfig, Recipe
    from vitrail.inference.classifier import Classifier
    from vitrail.inference.feature_index import FeatureIndex
    from vitrail.model.vit import attention_maps
    from vitrail.training.loop import StepEnd
    from vitrail.training.losses import LossFunction
    from vitrail.training.run_results import Logger, ValidationResult
    from vitrail.weights.trained import Trained

__version__ = "0.1.0"
_HOMES = {  # the module of each public name
    "Classifier": "inference.classifier",
    "Conversion": "api.conversion",
    "Decoder": "api.scoring",
    "Evaluation": "api.evaluation",
    "FeatureIndex": "inference.feature_index",
    "Figures": "api.figures",
    "Logger": "training.run_results",
    "LossFunction": "training.losses",
    "Neighbor": "api.search",
    "Prediction": "api.prediction_list",
    "PredictionList": "api.prediction_list",
    "PreprocessConfig": "config",
    "ProbeResult": "api.evaluation",
    "Recipe": "config",
    "Run": "api.run",
    "Scorer": "api.scoring",
    "SearchResult": "api.search",
    "Server": "api.serve",
    "StepEnd": "training.loop",
    "Suspects": "api.suspects",
    "Trained": "weights.trained",
    "ValidationResult": "training.run_results",
    "adapt": "api.checked_functions",
    "attention_maps": "model.vit",
    "convert": "api.conversion",
    "create": "api.checked_functions",
    "dense": "api.prediction",
    "distill": "api.training",
    "embed": "api.prediction",
    "evaluate": "api.evaluation",
    "figures": "api.figures",
    "finetune": "api.training",
    "index": "api.search",
    "load": "api.checked_functions",
    "load_recipe": "api.checked_functions",
    "predict": "api.prediction",
    "probe": "api.evaluation",
    "save": "api.checked_functions",
    "search": "api.search",
    "serve": "api.serve",
    "suspects": "api.suspects",
    "train": "api.training",
    "zero_shot": "api.zero_shot",
}
__all__ = [
    "Classifier",
    "Conversion",
    "Decoder",
    "Evaluation",
    "FeatureIndex",
    "Figures",
    "Logger",
    "LossFunction",
    "Neighbor",
    "Prediction",
    "PredictionList",
    "PreprocessConfig",
    "ProbeResult",
    "Recipe",
    "Run",
    "Scorer",
    "SearchResult",
    "Server",
    "StepEnd",
    "Suspects",
    "Trained",
    "ValidationResult",
    "adapt",
    "attention_maps",
    "convert",
    "create",
    "dense",
    "distill",
    "embed",
    "errors",
    "evaluate",
    "figures",
    "finetune",
    "index",
    "load",
    "load_recipe",
    "predict",
    "probe",
    "save",
    "search",
    "serve",
    "suspects",
    "train",
    "zero_shot",
]
_OLD_NAMES = {"Preprocess": "PreprocessConfig"}  # for one release


def __getattr__(name: str) -> object:
    name = _OLD_NAMES.get(name, name)
    if name not in _HOMES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    _let_threads_sleep()
    return getattr(importlib.import_module(f"vitrail.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
