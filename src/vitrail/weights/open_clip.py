"""open_clip's folders: open_clip_config.json, and the weights of an image and a text tower under OpenAI's names.

The image tower is read: OpenAI's own network, or one of timm's behind `visual.trunk.`. A state dict alone is refused,
since it does not tell QuickGELU from GELU. Nothing is written: open_clip loads no model without its text tower.
"""

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from vitrail.config import PreprocessConfig, ViTConfig, from_json
from vitrail.config.model import expand_image_size
from vitrail.errors import ModelError, UsageError
from vitrail.weights import foreign_format, tensor_files, timm, timm_tensors
from vitrail.weights.foreign_format import ForeignModelInfo, TensorNameMap
from vitrail.weights.tensor_files import ModelFiles
from vitrail.weights.trained import Tensors, Trained

FORMAT: Final = "open_clip"
IMAGE_TOWER = "visual."
TRUNK = "trunk."
OPENAI_MEAN, OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TENSOR_NAMES = TensorNameMap(
    layer_pattern=re.compile(r"transformer\.resblocks\.(\d+)\."),
    layer_template="transformer.resblocks.{}.",
    top_prefixes={
        "class_embedding": "cls_token",
        "conv1.": "patch_embed.proj.",
        "positional_embedding": "pos_embed",
        "ln_pre.": "norm_pre.",
        "ln_post.": "norm.",
        "proj": "projection.weight",
    },
    block_prefixes={
        "ln_1.": "norm1.",
        "attn.in_proj_": "attn.qkv.",
        "attn.out_proj.": "attn.proj.",
        "ls_1.gamma": "ls1.gamma",
        "ln_2.": "norm2.",
        "mlp.c_fc.": "mlp.fc1.",
        "mlp.c_proj.": "mlp.fc2.",
        "ls_2.gamma": "ls2.gamma",
    },
)
REFUSED_SETTINGS = (  # of vision_cfg, where they are on
    "attentional_pool", "qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc",
)  # fmt: skip


def recognize(model_files: ModelFiles) -> bool:
    """Whether a file has the names of CLIP's image tower; `read` then asks for the config that it lacks."""
    names = model_files.tensors.keys()
    is_openai = {"visual.conv1.weight", "visual.class_embedding"} <= names
    return is_openai or f"{IMAGE_TOWER}{TRUNK}patch_embed.proj.weight" in names


def read(model_files: ModelFiles) -> Trained:
    """Read the image tower of the model in a folder."""
    path, settings = model_files.path, model_files.config
    if settings is None:
        raise ModelError(
            f"{path} is a CLIP model that does not state its GELU (OpenAI's and most of MetaCLIP's and DFN's are"
            " QuickGELU, LAION's and DataComp's are not). Give a folder with it, called open_clip_model.safetensors or"
            ' open_clip_pytorch_model.bin, and open_clip_config.json: {"model_cfg": the JSON of its architecture in'
            " open_clip}"
        )
    architecture = tensor_files.get_section(settings, "model_cfg", path)
    vision = tensor_files.get_section(architecture, "vision_cfg", path)
    tower, notes = select_image_tower(model_files.tensors)
    if isinstance(vision.get("layers"), list):
        raise ModelError(f"{path} has a ResNet of OpenAI's as its image tower; only ViTs are read")
    if refused := next((name for name in REFUSED_SETTINGS if vision.get(name)), None):  # before its tensors' names
        raise ModelError(f"{path} was built with {refused}={vision[refused]!r:.40}, which is not read")
    if vision.get("timm_model_name"):
        tensors, info = read_trunk(tower, vision, path)
    else:
        tensors = convert_tensors(tower)
        config = infer_config(tensors, architecture, path)
        info = ForeignModelInfo(config=config)
        if config.pool == "mean-norm":
            tensors = {re.sub(r"^norm\.", "fc_norm.", name): tensor for name, tensor in tensors.items()}
    assert isinstance(info.config, ViTConfig)  # the other readers return ResNets too
    preprocessing = tensor_files.get_section(settings, "preprocess_cfg", path)
    preprocess, sentences = parse_preprocess_config(preprocessing, info.config)
    info = dataclasses.replace(info, preprocess=preprocess, assumptions=(*info.assumptions, *sentences))
    return foreign_format.build_trained(FORMAT, model_files, tensors, info, notes)


def select_image_tower(tensors: Tensors) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors of the image tower without their prefix, and a sentence on the others."""
    tower = {name.removeprefix(IMAGE_TOWER): t for name, t in tensors.items() if name.startswith(IMAGE_TOWER)}
    others = Counter(name.split(".")[0] for name in tensors if not name.startswith(IMAGE_TOWER))
    notes = (f"{part}: {count} tensors left out, no part of the image model" for part, count in sorted(others.items()))
    return tower, tuple(notes)


def convert_tensors(tower: Tensors) -> dict[str, Tensor]:
    """Put the tensors of OpenAI's network under the model's own names."""
    own = TENSOR_NAMES.rename_tensors(tower)
    for name, axes in (("cls_token", (None, None)), ("pos_embed", (None,))):
        if name in own and own[name].ndim == 3 - len(axes):
            own[name] = own[name][axes]
    if "projection.weight" in own and own["projection.weight"].ndim == 2:
        own["projection.weight"] = own["projection.weight"].mT
    return foreign_format.add_zero_biases(own, ("patch_embed.proj", "projection"))


def infer_config(tensors: Tensors, architecture: dict[str, Any], path: Path) -> ViTConfig:
    """Infer the function of OpenAI's network, with the variants that open_clip's config states."""
    vision = tensor_files.get_section(architecture, "vision_cfg", path)
    fields = foreign_format.infer_fields(tensors, path)
    width, pool = fields["width"], vision.get("pool_type", "tok")
    if pool not in ("tok", "avg"):
        raise ModelError(f"{path} pools its tokens by {pool!r:.40}; 'tok' and 'avg' are read")
    late_norm = pool == "avg" and bool(vision.get("final_ln_after_pool"))
    head_width = vision.get("head_width", 64)
    if not isinstance(head_width, int) or head_width < 1 or width % head_width:
        raise ModelError(f"{path} is damaged: heads of width {head_width!r:.40} in a model of width {width}")
    fields |= {
        "heads": width // head_width,
        "pool": "mean-norm" if late_norm else "norm-mean" if pool == "avg" else "class",
        "projection": foreign_format.count_rows(tensors, "projection.weight", path),
        "resample": "bicubic-antialias",
        "layer_scale": "blocks.0.ls1.gamma" in tensors,
        "norm_pre": not vision.get("no_ln_pre", False),
        "gelu": _parse_gelu(architecture, vision, path),
        "norm_eps": (tensor_files.get_section(vision, "norm_kwargs", path)).get("eps", 1e-5),
    }
    return _set_image_size(from_json(ViTConfig, fields | {"image_size": [fields["patch"]] * 2}), vision, path)


def _parse_gelu(architecture: dict[str, Any], vision: dict[str, Any], path: Path) -> str:
    options = tensor_files.get_section(vision, "act_kwargs", path)
    if architecture.get("quick_gelu", False):
        return "quick"
    if options not in ({}, {"approximate": "none"}, {"approximate": "tanh"}):
        raise ModelError(f"{path} uses a GELU with {options!r:.80}; only approximate='tanh' is read")
    return "tanh" if options.get("approximate") == "tanh" else "erf"


def _set_image_size(config: ViTConfig, vision: dict[str, Any], path: Path) -> ViTConfig:
    """Set the image size that vision_cfg states; pixels that fill no patch are left unread."""
    size: Any = vision.get("image_size", 224)
    sides = [size] if isinstance(size, int) else size
    if not isinstance(sides, list) or not all(type(side) is int and side >= config.patch for side in sides):
        raise ModelError(f"{path} is damaged: its image size is {size!r:.40}")
    image_size = expand_image_size(tuple(sides))
    whole = not any(side % config.patch for side in image_size)
    return dataclasses.replace(config, image_size=image_size, drop_remainder=not whole)


def read_trunk(
    tower: dict[str, Tensor], vision: dict[str, Any], path: Path
) -> tuple[dict[str, Tensor], ForeignModelInfo]:
    """Read a tower that is one of timm's networks, and its projection: timm's head, or a layer after it."""
    if vision.get("timm_pool") in ("abs_attn", "rot_attn"):
        raise ModelError(f"{path} pools its trunk by {vision['timm_pool']!r}, which is not read")
    trunk = {name.removeprefix(TRUNK): tensor for name, tensor in tower.items() if name.startswith(TRUNK)}
    rest = {name: tensor for name, tensor in tower.items() if not name.startswith(TRUNK)}
    for leaf in ("weight", "bias"):
        for projection in (trunk.pop(f"head.{leaf}", None), rest.pop(f"head.proj.{leaf}", None)):
            if projection is not None:
                rest[f"projection.{leaf}"] = projection
    size: Any = vision.get("image_size", 224)
    sides = [size, size] if isinstance(size, int) else size
    settings = {
        "architecture": vision["timm_model_name"],
        "global_pool": vision.get("timm_pool") or None,
        "pretrained_cfg": {"input_size": [3, *sides] if isinstance(sides, list) else None},
    }
    tensors = timm_tensors.rename_tensors(trunk)
    info = timm.infer_architecture(tensors, settings, path)
    if not isinstance(info.config, ViTConfig):
        raise ModelError(f"{path} has a {vision['timm_model_name']!r:.80} as its trunk, and only ViTs are read")
    config = _set_image_size(info.config, vision, path)
    config = dataclasses.replace(config, projection=foreign_format.count_rows(rest, "projection.weight", path))
    tensors = foreign_format.add_zero_biases(tensors | rest, ("projection",))
    return tensors, dataclasses.replace(info, config=config)


def parse_preprocess_config(stated: dict[str, Any], config: ViTConfig) -> tuple[PreprocessConfig | None, list[str]]:
    """Parse preprocess_cfg, with open_clip's defaults; where that fails, return None and why."""
    mode, size = stated.get("resize_mode", "shortest"), config.image_size
    try:
        if mode not in ("shortest", "squash") or (mode == "shortest" and size[0] != size[1]):
            raise UsageError(f"resize_mode {mode!r} for {size[0]} x {size[1]}")
        fields = {
            "size": size,
            "resize": size[:1] if mode == "shortest" else size,
            "interpolation": stated.get("interpolation") or "bicubic",
            "mean": stated.get("mean") or OPENAI_MEAN,
            "std": stated.get("std") or OPENAI_STD,
        }
        return from_json(PreprocessConfig, fields), []
    except (TypeError, ValueError) as error:
        return None, [f"preprocessing: unknown, open_clip_config.json states one that is not read ({error})"]


def write(trained: Trained, path: Path) -> list[str]:  # noqa: ARG001
    """Refuse to write: open_clip's classes load no folder without a text tower."""
    raise ModelError(
        "open_clip's folders hold a text tower too, which vitrail's models do not have: write a CLIP or SigLIP image"
        " tower with --to transformers"
    )
