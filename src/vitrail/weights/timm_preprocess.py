"""The preprocessing and the labels in timm's config.json."""

import dataclasses
import math
import re
from typing import Any

from vitrail.config import PreprocessConfig, from_json
from vitrail.errors import UsageError
from vitrail.weights.trained import list_imagenet1k_labels

INTERPOLATION_NAMES = {"box": "area"}  # the one that timm names differently


def parse_preprocess_config(pretrained: dict[str, Any]) -> tuple[PreprocessConfig | None, list[str]]:
    """Parse the preprocessing; where that fails, return None and why."""
    try:
        height, width = pretrained["input_size"][1:]
        fraction, mode = float(pretrained["crop_pct"]), pretrained.get("crop_mode", "center")
        if mode not in ("center", "squash") or (mode == "center" and height != width):
            raise UsageError(f"crop_mode {mode!r} for {height} x {width}")
        scaled = (math.floor(height / fraction), math.floor(width / fraction))
        fields = {name: pretrained[name] for name in ("interpolation", "mean", "std")}
        fields["interpolation"] = INTERPOLATION_NAMES.get(fields["interpolation"], fields["interpolation"])
        fields |= {"size": (height, width), "resize": scaled[:1] if mode == "center" else scaled}
        return from_json(PreprocessConfig, fields), []
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        return None, [f"preprocessing: unknown, config.json does not state it in full ({error})"]


def parse_labels(settings: dict[str, Any], pretrained: dict[str, Any], classes: int) -> tuple[str, ...] | None:
    """Parse the class names: those stated, or ImageNet's where the weights' tag says so."""
    stated = settings.get("label_names") or pretrained.get("label_names")
    if isinstance(stated, list) and len(stated) == classes and all(isinstance(label, str) for label in stated):
        return tuple(stated)
    tag = str(pretrained.get("tag") or "")
    if classes == 1000 and re.search(r"(^|_)in1k$", tag):  # "augreg_in21k_ft_in1k": the head is ImageNet's
        return list_imagenet1k_labels()
    return None


def format_preprocess_config(preprocess: PreprocessConfig) -> dict[str, Any]:
    """Format the preprocessing for timm; the crop fraction is chosen so that timm's rounding gives the same sizes."""
    side, scaled = preprocess.size[0], preprocess.resize[0]
    fraction = round(side / scaled, 3)
    if math.floor(side / fraction) != scaled:
        fraction = side / (scaled + 0.5)
    return {
        "interpolation": "box" if preprocess.interpolation == "area" else preprocess.interpolation,
        "crop_pct": fraction,
        "crop_mode": "center" if len(preprocess.resize) == 1 else "squash",
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
    }


def describe_lost_preprocess(preprocess: PreprocessConfig | None, settings: dict[str, Any]) -> list[str]:
    """Note the fields of the preprocessing that config.json cannot state exactly."""
    held, _ = parse_preprocess_config(settings["pretrained_cfg"])
    if preprocess is None or held == preprocess:
        return []
    names = [field.name for field in dataclasses.fields(PreprocessConfig)]
    differ = [name for name in names if getattr(held, name, None) != getattr(preprocess, name)]
    return [f"preprocessing: timm cannot state this model's {', '.join(differ)}; the nearest was written"]
