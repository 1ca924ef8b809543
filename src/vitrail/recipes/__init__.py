"""Training runs by name, recipes for fine-tuning, and settings that override a recipe's own.

Weight decay is PyTorch's, which is multiplied by the learning rate: the authors' 1e-4 at a rate of 1e-3 is 0.1 here.
"""

from vitrail.recipes.finetuning import FinetuneKind, build_finetune_recipe, choose_finetune_size, set_lora
from vitrail.recipes.overrides import ABLATION_RESERVED, TRANSFER_RESERVED, override_settings
from vitrail.recipes.pretraining import (
    AUGREG_LEVELS,
    MAE,
    MPP,
    RECIPES,
    TRAIN_IMAGE_COUNTS,
    build_masked_recipe,
    get_recipe,
)
from vitrail.recipes.recipe_file import (
    RECIPE_SUFFIXES,
    check_recipe,
    find_loss_function,
    format_recipe,
    load_finetune_recipe,
    load_recipe,
)

__all__ = [
    "ABLATION_RESERVED",
    "AUGREG_LEVELS",
    "MAE",
    "MPP",
    "RECIPES",
    "RECIPE_SUFFIXES",
    "TRAIN_IMAGE_COUNTS",
    "TRANSFER_RESERVED",
    "FinetuneKind",
    "build_finetune_recipe",
    "build_masked_recipe",
    "check_recipe",
    "choose_finetune_size",
    "find_loss_function",
    "format_recipe",
    "get_recipe",
    "load_finetune_recipe",
    "load_recipe",
    "override_settings",
    "set_lora",
]
