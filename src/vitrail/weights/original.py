"""The files that the authors of models published beside their own code: Meta's .pth files, EVA's, BEiT's.

What a family's authors call their tensors, and what their code computes, is in original_families. A model is written
for the first family whose files, read back, give the same model. Files of masked autoencoders, I-JEPA, BEiT and EVA-01
have timm's names, and are written as such: `--to timm FILE.pth`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.errors import ModelError, UsageError
from vitrail.weights import foreign_format, tensor_files, timm_config, timm_tensors
from vitrail.weights.formats import TORCH_SUFFIXES
from vitrail.weights.original_families import (
    BIAS_MASK,
    FAMILIES,
    PERIODS,
    compute_periods,
    convert_model,
    identify_family,
    rename_to_theirs,
)
from vitrail.weights.tensor_files import SECTION, ModelFiles
from vitrail.weights.trained import Tensors, Trained

FORMAT: Final = "original"
_WRAPPED = ("deit3", "eva02")  # whose code looks for a state dict under "model"


def recognize(model_files: ModelFiles) -> bool:
    """Whether a file has tensor names of the authors' own that timm's reader does not know."""
    return identify_family(model_files.tensors, model_files.content.metadata.get(SECTION)) is not None


def read(model_files: ModelFiles) -> Trained:
    """Read the model in a file of its authors."""
    section = model_files.content.metadata.get(SECTION)
    name = identify_family(model_files.tensors, section)
    assert name is not None  # as recognize said
    own, info, changes = convert_model(name, model_files.tensors, model_files.path)
    if section == "encoder":
        changes.append("only the section 'encoder' of the file was read, not the predictor or the target encoder")
    return foreign_format.build_trained(FORMAT, model_files, own, info, tuple(changes))


def write(trained: Trained, path: Path) -> list[str]:
    """Write the file that the authors' code of the model's family loads; the notes say what it loses."""
    model = foreign_format.require_vit(FORMAT, trained.model)
    config = timm_config.drop_ineffective_fields(model.config)
    name, tensors, held = _find_family(config, dict(model.state_dict()))
    if name == "deit3" and path.suffix not in TORCH_SUFFIXES:
        raise ModelError("the original format holds DeiT III in a .pth alone: its names outside of one are Naver's too")
    if name in _WRAPPED and path.suffix in TORCH_SUFFIXES:
        torch.save({"model": {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}}, path)
    else:
        tensor_files.write_tensors(path, tensors, {})
    return [
        f"architecture: written for {FAMILIES[name].title}, whose authors' code computes the same",
        *foreign_format.check_round_trip(FORMAT, config, held),
        "a file of the authors has no place for preprocessing, labels and origin: they were left out",
    ]


def _find_family(config: ViTConfig, tensors: Tensors) -> tuple[str, dict[str, Tensor], ViTConfig]:
    """Find the family whose file of this model reads back as the same; return its tensors and the config read."""
    reasons = []
    for name, convert in _WRITERS.items():
        try:
            theirs = convert(config, dict(tensors))
            _, info, _ = convert_model(name, theirs, foreign_format.DRAFT_PATH)
            assert isinstance(info.config, ViTConfig)
            foreign_format.check_round_trip(FORMAT, config, info.config)
            if identify_family(theirs, "model" if name in _WRAPPED else None) != name:
                raise ModelError("its tensors would be taken for another family's")
        except (ModelError, UsageError) as error:
            reasons.append(f"{FAMILIES[name].title} ({str(error).rpartition(': ')[2]})")
        else:
            return name, theirs, info.config
    raise ModelError(f"the original format cannot hold this model: it is not {', not '.join(reasons)}")


def _to_dinov2(config: ViTConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if config.gated_mlp:
        tensors = rename_to_theirs({".mlp.w12.": ".mlp.fc1.", ".mlp.w3.": ".mlp.fc2."}, tensors)
    if config.registers and "pos_embed" in tensors and not config.prefix_positions:
        tensors["pos_embed"] = torch.cat([torch.zeros(1, 1, config.width), tensors["pos_embed"]], dim=1)
    return _add_linear_head(config, rename_to_theirs({"register_tokens": "reg_token"}, tensors))


def _to_dinov3(config: ViTConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if foreign_format.has_key_bias(tensors):
        raise ModelError("its keys have biases")
    if config.gated_mlp:
        split = timm_tensors.split_gates(tensors)
        tensors = rename_to_theirs(
            {".mlp.w1.": ".mlp.fc1_g.", ".mlp.w2.": ".mlp.fc1_x.", ".mlp.w3.": ".mlp.fc2."}, split
        )
    masks = {}
    for name in tensors:
        if name.endswith(".attn.qkv.bias"):
            mask = torch.ones(3, config.width)
            mask[1] = 0
            masks[name.replace(".attn.qkv.bias", BIAS_MASK)] = mask.flatten()
    periods = compute_periods(config.width // config.heads).float()
    is_rounded = config.rotary is not None and config.rotary.bfloat16_periods
    tensors = rename_to_theirs({"storage_tokens": "reg_token"}, tensors)
    tensors |= masks | {PERIODS: periods.bfloat16() if is_rounded else periods}
    return _add_linear_head(config, tensors)


def _add_linear_head(config: ViTConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the mask token, which nothing but pre-training reads, and name a linear head and what is below it."""
    tensors["mask_token"] = torch.zeros(1, config.width)
    if not config.classes:
        return tensors
    return {
        f"linear_{name}" if name.startswith("head.") else f"backbone.{name}": tensor for name, tensor in tensors.items()
    }


def _to_deit3(_config: ViTConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return rename_to_theirs({".gamma_1": ".ls1.gamma", ".gamma_2": ".ls2.gamma"}, tensors)


def _to_eva02(config: ViTConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if foreign_format.has_key_bias(tensors):
        raise ModelError("its keys have biases")
    theirs = rename_to_theirs(FAMILIES["eva02"].names, timm_tensors.to_timm_names(config, tensors, "Eva"))
    if not config.mlp_norm:
        return theirs
    for name in [name for name in theirs if name.endswith(".attn.qkv.weight")]:
        parts = zip("qkv", theirs.pop(name).chunk(3), strict=True)
        theirs |= {name.replace(".qkv.", f".{part}_proj."): piece for part, piece in parts}
    return theirs


def _to_eva02_clip(config: ViTConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"visual.{name}": tensor for name, tensor in _to_eva02(config, tensors).items()}


def _to_pe(config: ViTConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if config.projection:
        weight, bias = tensors.pop("projection.weight"), tensors.pop("projection.bias")
        if bias.any():
            raise ModelError("its projection has a bias")
        tensors["proj"] = weight.mT.contiguous()
    if timm_tensors.PATCH_BIAS in tensors and tensors.pop(timm_tensors.PATCH_BIAS).any():
        raise ModelError("its patch embedding has a bias")
    for kind in ("weight", "bias") if config.pool == "map" else ():
        parts = [tensors.pop(f"attn_pool.{part}.{kind}") for part in ("q", "kv")]
        tensors[f"attn_pool.qkv.{kind}"] = torch.cat(parts)
    for name, dimensions in (("pos_embed", 1), ("cls_token", 2)):
        if name in tensors:
            tensors[name] = tensors[name].flatten(0, dimensions - 1)[0]
    tensors = {re.sub(r"^norm\.", "ln_post.", name): tensor for name, tensor in tensors.items()}
    pooling = {name: tensors.pop(name) for name in list(tensors) if name.startswith("attn_pool.")}
    theirs = rename_to_theirs(
        {key: new for key, new in FAMILIES["pe"].names.items() if "attn_pool" not in key}, tensors
    )
    return {f"visual.{name}": tensor for name, tensor in theirs.items()} | _name_pooling(pooling)


def _name_pooling(pooling: Tensors) -> dict[str, Tensor]:
    """Attention pooling under the names of the perception encoder."""
    parts = {"latent": "probe", "qkv.": "attn.in_proj_", "proj.": "attn.out_proj.", "norm.": "layernorm."}
    parts |= {"mlp.fc1.": "mlp.c_fc.", "mlp.fc2.": "mlp.c_proj."}
    named = {}
    for name, tensor in pooling.items():
        part = name.removeprefix("attn_pool.")
        own = next(own for own in parts if part.startswith(own))
        named[f"visual.attn_pool.{parts[own]}{part.removeprefix(own)}"] = tensor
    return named


_WRITERS: dict[str, Callable[[ViTConfig, dict[str, Tensor]], dict[str, Tensor]]] = {
    "dinov2": _to_dinov2,
    "dinov3": _to_dinov3,
    "deit3": _to_deit3,
    "eva02": _to_eva02,
    "eva02-clip": _to_eva02_clip,
    "pe": _to_pe,
}
