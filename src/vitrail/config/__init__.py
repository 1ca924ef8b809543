"""What a model, its preprocessing and a training run are: frozen values, without torch.

A configuration states everything but the weights, down to the GELU form, so a file that carries it computes what its
authors' code computes. What only training uses (dropout, stochastic depth) is part of the recipe, not of the model.

    from vitrail.config import AugmentConfig, OptimizerConfig, ScheduleConfig, from_json, to_json

    recipe = dataclasses.replace(
        vitrail.load_recipe("digits"),
        optimizer=OptimizerConfig(kind="adam", lr=1e-3, weight_decay=0.05),
        schedule=ScheduleConfig(warmup=100, decay="cosine"),
        augment=AugmentConfig(crop="pad", flip=False),
    )
    assert from_json(vitrail.Recipe, to_json(recipe)) == recipe
"""

from vitrail.config.model import (
    BiTConfig,
    ConvConfig,
    ModelConfig,
    Pool,
    Positions,
    PositionsAt,
    Precision,
    Resample,
    RotaryConfig,
    ViTConfig,
)
from vitrail.config.preprocess import CropRounding, Interpolation, PreprocessConfig
from vitrail.config.serialization import from_json, to_json
from vitrail.config.training import (
    AugmentConfig,
    DistillationConfig,
    LoRAConfig,
    MaskedConfig,
    MaskedTarget,
    OptimizerConfig,
    Recipe,
    ScheduleConfig,
)

__all__ = [
    "AugmentConfig",
    "BiTConfig",
    "ConvConfig",
    "CropRounding",
    "DistillationConfig",
    "Interpolation",
    "LoRAConfig",
    "MaskedConfig",
    "MaskedTarget",
    "ModelConfig",
    "OptimizerConfig",
    "Pool",
    "Positions",
    "PositionsAt",
    "Precision",
    "PreprocessConfig",
    "Recipe",
    "Resample",
    "RotaryConfig",
    "ScheduleConfig",
    "ViTConfig",
    "from_json",
    "to_json",
]
