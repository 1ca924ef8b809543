"""What a model, its preprocessing and a training run are: frozen values, without torch.

A configuration states everything but the weights, down to the GELU form, so a file that carries it computes what its
authors' code computes. What only training uses (dropout, stochastic depth) is part of the recipe, not of the model.
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
    ViTConfig,
    check_patches,
    compute_grid,
    expand_image_size,
)
from vitrail.config.preprocess import CropRounding, Interpolation, PreprocessConfig
from vitrail.config.serialization import from_json, parse_field, to_json, upgrade_keys, upgrade_run_config
from vitrail.config.training import (
    MASK_TOKEN,
    UNCHANGED_PATCH,
    AugmentConfig,
    MaskedConfig,
    MaskedTarget,
    OptimizerConfig,
    Recipe,
    ScheduleConfig,
)

__all__ = [
    "MASK_TOKEN",
    "UNCHANGED_PATCH",
    "AugmentConfig",
    "BiTConfig",
    "ConvConfig",
    "CropRounding",
    "Interpolation",
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
    "ScheduleConfig",
    "ViTConfig",
    "check_patches",
    "compute_grid",
    "expand_image_size",
    "from_json",
    "parse_field",
    "to_json",
    "upgrade_keys",
    "upgrade_run_config",
]
