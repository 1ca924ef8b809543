"""transformers' preprocessor_config.json: read into a PreprocessConfig, and written from one."""

from pathlib import Path
from typing import Any

from vitrail.config import PreprocessConfig, ViTConfig, from_json
from vitrail.errors import UsageError
from vitrail.weights import tensor_files

INTERPOLATION_CODES = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
BILINEAR_PROCESSORS = ("ViT", "DINOv3", "Siglip2")  # how their names start; the others' default is bicubic


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")  # the second: of version 5, beside a tokenizer


def read_processor(folder: Path) -> dict[str, Any] | None:
    """Read what a folder states of its preprocessing; None where it has no such file."""
    for name in PROCESSOR_FILES:
        if (folder / name).exists():
            processor = tensor_files.read_json(folder / name)
            return tensor_files.get_section(processor, "image_processor", folder) or processor
    return None


def parse_processor(processor: dict[str, Any] | None, config: ViTConfig) -> tuple[PreprocessConfig | None, list[str]]:
    """Parse the preprocessing in preprocessor_config.json, and say what differs; None and why where that fails."""
    if processor is None:
        return None, ["preprocessing: unknown, the folder has no preprocessor_config.json"]
    processor = {key: value for key, value in processor.items() if value is not None}
    sentences = []
    if "max_num_patches" in processor:  # NaFlex
        processor |= {"size": {"height": config.image_size[0], "width": config.image_size[1]}}
        processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} | processor
        size = " x ".join(map(str, config.image_size))
        sentences.append(
            f"preprocessing: every image is resized to {size}; transformers keeps its shape, in up to"
            f" {processor['max_num_patches']} patches"
        )
    if _get_kind(processor).startswith("DINOv3"):
        sentences.append(
            "preprocessing: transformers resizes pixels as floating-point numbers, vitrail 8-bit ones, which rounds"
            " them to one of 256 levels"
        )
    try:
        return _parse_fields(processor), sentences
    except (KeyError, TypeError, ValueError) as error:
        return None, [f"preprocessing: unknown, preprocessor_config.json does not state it in full ({error})"]


def _parse_fields(processor: dict[str, Any]) -> PreprocessConfig:
    kind = _get_kind(processor)
    resize = _parse_size(processor["size"], kind) if processor.get("do_resize", True) else None
    has_crop = processor.get("do_center_crop", "crop_size" in processor)
    crop = _parse_size(processor["crop_size"]) if has_crop else resize
    if resize is None or crop is None or not processor.get("do_normalize", True):
        raise UsageError("do_resize and do_normalize must be on")
    factor = processor.get("rescale_factor", 1 / 255)
    if not processor.get("do_rescale", True) or abs(factor * 255 - 1) > 1e-6:
        raise UsageError(f"rescale_factor is {factor}")
    fields = {
        "size": crop if len(crop) == 2 else crop * 2,
        "resize": resize,
        "interpolation": INTERPOLATION_CODES[processor.get("resample", _get_default_resample(kind))],
        "crop_rounding": "nearest" if crop == resize else "down",
        "mean": processor["image_mean"],
        "std": processor["image_std"],
    }
    return from_json(PreprocessConfig, fields)


def _get_kind(processor: dict[str, Any]) -> str:
    return str(processor.get("image_processor_type") or processor.get("feature_extractor_type") or "ViT")


def _get_default_resample(kind: str) -> int:
    """transformers' default where the file does not state it."""
    return 2 if kind.startswith(BILINEAR_PROCESSORS) else 3


def _parse_size(size: Any, kind: str = "") -> tuple[int, ...]:
    """Parse a size: one side (the shortest), or height and width."""
    if isinstance(size, int):  # written before version 4.25
        return (size,) if kind.startswith("CLIP") else (size, size)
    return (size["shortest_edge"],) if "shortest_edge" in size else (size["height"], size["width"])


def write_processor(preprocess: PreprocessConfig | None, path: Path) -> list[str]:
    """Write preprocessor_config.json; the notes say where transformers would prepare images differently."""
    if preprocess is None:
        return [f"preprocessing: unknown, so no {path.name} was written"]
    if preprocess.interpolation not in INTERPOLATION_CODES.values():
        return [
            f"preprocessing: transformers cannot resize by {preprocess.interpolation}, so no {path.name} was written"
        ]
    tensor_files.write_json(path, _build_processor_json(preprocess))
    if preprocess.crop_rounding == "nearest" and preprocess.size != preprocess.resize:
        return ["preprocessing: transformers rounds the crop's corner down, this model to the nearest pixel"]
    return []


def _build_processor_json(preprocess: PreprocessConfig) -> dict[str, Any]:
    processor: dict[str, Any] = {
        "do_resize": True,
        "resample": {name: number for number, name in INTERPOLATION_CODES.items()}[preprocess.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }
    crop: dict[str, int] = {"height": preprocess.size[0], "width": preprocess.size[1]}
    if preprocess.resize == preprocess.size:
        return processor | {"image_processor_type": "ViTImageProcessor", "size": crop}
    kind, size = "BitImageProcessor", {"shortest_edge": preprocess.resize[0]}
    if len(preprocess.resize) == 2:
        kind, size = "DeiTImageProcessor", {"height": preprocess.resize[0], "width": preprocess.resize[1]}
    return processor | {"do_center_crop": True, "crop_size": crop, "image_processor_type": kind, "size": size}
