"""transformers' folders: config.json, preprocessor_config.json and model.safetensors (or pytorch_model.bin).

The table of model types is `transformers_families.FAMILIES`. Of models of images and texts, the image model is read.
What transformers has no class for, such as a classifier on DINOv3 or on SigLIP's attention pooling, is not written.
"""

import re
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vitrail.config import ViTConfig, from_json
from vitrail.errors import ModelError
from vitrail.model.vit import ViT
from vitrail.weights import foreign_format, hub, tensor_files
from vitrail.weights.foreign_format import ForeignModelInfo
from vitrail.weights.tensor_files import ModelFiles
from vitrail.weights.trained import Tensors, Trained
from vitrail.weights.transformers_families import (
    BEIT_NAMES,
    CLIP_NAMES,
    DINOV2_NAMES,
    DINOV3_NAMES,
    FAMILIES,
    Family,
    convert_from_own,
    convert_to_own,
    has_qkv_bias,
)
from vitrail.weights.transformers_preprocess import PROCESSOR_FILES, parse_processor, read_processor, write_processor

FORMAT: Final = "transformers"
MODEL_TYPES = tuple(FAMILIES)
GELU_FORMS = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "quick_gelu": "quick"}
ACTIVATIONS = {"erf": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}
PATCH_KERNELS = ("patch_embeddings.projection.weight", "embeddings.patch_embeddings.weight",
                 "embeddings.patch_embedding.weight")  # fmt: skip
CLASSES = {  # model type -> its class without a head, and the one with a classifier
    "vit": ("ViTModel", "ViTForImageClassification"),
    "deit": ("DeiTModel", "DeiTForImageClassification"),
    "dinov2": ("Dinov2Model", "Dinov2ForImageClassification"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
    "dinov3_vit": ("DINOv3ViTModel", None),
    "beit": ("BeitModel", "BeitForImageClassification"),
    "ijepa": ("IJepaModel", "IJepaForImageClassification"),
    "clip_vision_model": ("CLIPVisionModel", None),
    "siglip_vision_model": ("SiglipVisionModel", None),
}
HEADS = ("classifier.", "distillation_classifier.", "visual_projection.")  # which no prefix stands before


def recognize(model_files: ModelFiles) -> bool:
    """Whether a file has transformers' tensor names; `read` then asks for the config.json that it lacks."""
    return any(name.endswith(PATCH_KERNELS) for name in model_files.tensors)


def read(model_files: ModelFiles) -> Trained:
    """Read the model in a folder."""
    folder, settings = model_files.path, model_files.config
    if settings is None:
        raise ModelError(f"{folder} is a transformers file without its config.json; give the folder that holds both")
    tensors, notes = convert_tensors(model_files.tensors, settings, folder)
    info = read_info(tensors, settings, read_processor(folder), folder)
    return foreign_format.build_trained(FORMAT, model_files, tensors, info, tuple(notes))


def convert_tensors(tensors: Tensors, settings: dict[str, Any], path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Put tensors under the model's own names; return a sentence on each that it does not use as it is."""
    family = FAMILIES[get_model_type(settings, path)]
    own, notes = convert_to_own(tensors, family, get_image_settings(settings, path))
    if "head.weight" in own and family.fields.get("norm_pre"):
        raise ModelError(
            f"{path} is a CLIPForImageClassification, whose classifier reads the mean of patches that no norm follows;"
            " train a head on the CLIP model instead: vitrail finetune PHOTOS --model CLIP"
        )
    if "head.weight" in own and "projection.weight" in own:
        raise ModelError(f"{path} has both a classifier and a projection; none of transformers' classes has")
    return own, notes


def read_info(
    tensors: Tensors, settings: dict[str, Any], processor: dict[str, Any] | None, path: Path
) -> ForeignModelInfo:
    """Read everything that a folder states, for tensors under the model's own names."""
    config = infer_config(tensors, settings, path)
    preprocess, sentences = parse_processor(processor, config)
    labels = _parse_labels(settings, config.classes)
    if labels is None and config.classes and settings.get("id2label"):
        sentences.append("labels: unnamed, id2label in config.json does not name every class")
    return ForeignModelInfo(
        config=config,
        preprocess=preprocess,
        labels=None if labels == _list_default_labels(config.classes) else labels,
        assumptions=tuple(sentences),
    )


def get_model_type(settings: dict[str, Any], path: Path) -> str:
    """Return the kind of model in config.json, or refuse one that is not supported."""
    kind = settings.get("model_type")
    if kind not in MODEL_TYPES:
        raise ModelError(f"{path} has the model_type {kind!r:.80}; {', '.join(MODEL_TYPES)} are read")
    return str(kind)


def get_image_settings(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return what config.json states of the image model: all of it, or the section of a model with a text tower."""
    section = tensor_files.get_section(settings, "vision_config", path) if "vision_config" in settings else settings
    return FAMILIES[get_model_type(settings, path)].defaults | section


def infer_config(tensors: Tensors, settings: dict[str, Any], path: Path) -> ViTConfig:
    """Infer the function that these weights compute, by config.json."""
    kind = get_model_type(settings, path)
    family, stated = FAMILIES[kind], get_image_settings(settings, path)
    if "pre_logits.fc.weight" in tensors and stated.get("pooler_act", "tanh") != "tanh":
        raise ModelError(f"{path} has a pooler with {stated['pooler_act']!r}; the paper's hidden layer has tanh")
    fields = foreign_format.infer_fields(tensors, path)
    _, mlp = foreign_format.get_dimensions(tensors, "blocks.0.mlp.fc2.weight", 2, path)
    gated = fields["mlp"] == 2 * mlp
    fields |= {
        "mlp": mlp,
        "heads": stated.get("num_attention_heads", 12),
        "registers": foreign_format.count_tokens(tensors, "reg_token", path),
        "prefix_positions": "reg_token" not in tensors,  # their class token's position is folded into it
        "resample": family.resample,
        "qkv_bias": has_qkv_bias(family, stated),
        "gelu": _parse_activation(stated, path, gated=gated),
        "gated_mlp": gated,
        "norm_eps": stated["layer_norm_eps"],
        "projection": foreign_format.count_rows(tensors, "projection.weight", path),
        **_infer_image_size(tensors, stated, fields["patch"], path),
        **family.fields,
    }
    if family.names is BEIT_NAMES:
        fields |= _infer_beit_fields(stated, path)
    if family.names is DINOV3_NAMES:
        fields["rotary"] = {"places": "normalized", "base": stated.get("rope_theta", 100.0)}
    fields["pool"] = _infer_pool(tensors, fields, family)
    return from_json(ViTConfig, fields)


def _parse_activation(stated: dict[str, Any], path: Path, *, gated: bool) -> str:
    """Parse the activation of an MLP that is not gated; a gated one has SiLU, and no GELU to state."""
    if gated != bool(stated.get("use_swiglu_ffn") or stated.get("use_gated_mlp")):
        raise ModelError(f"{path} is damaged: config.json and the tensors differ on gated MLPs (SwiGLU)")
    activation = stated.get("hidden_act", "gelu")
    if gated and stated.get("use_gated_mlp") and activation not in ("silu", "swish"):
        raise ModelError(f"{path} has a gated MLP with {activation!r:.40}; only 'silu' is read")
    if gated:
        return "erf"
    if not isinstance(activation, str) or activation not in GELU_FORMS:
        raise ModelError(f"{path} uses the activation {activation!r:.40}; a ViT has one of {', '.join(GELU_FORMS)}")
    return GELU_FORMS[activation]


def _infer_image_size(tensors: Tensors, stated: dict[str, Any], patch: int, path: Path) -> dict[str, Any]:
    """The image size; a remainder that fills no patch is left unread, as their convolutions do."""
    image = stated.get("image_size", 224)
    if "num_patches" in stated:  # NaFlex
        count = foreign_format.count_tokens(tensors, "pos_embed", path)
        if count != stated["num_patches"] or not foreign_format.find_square_side(count):
            raise ModelError(f"{path} is damaged: {count} positions for {stated['num_patches']!r:.40} patches")
        image = foreign_format.find_square_side(count) * patch
    sides = [image, image] if isinstance(image, int) else image
    whole = isinstance(sides, list) and all(type(side) is int and side % patch == 0 for side in sides)
    return {"image_size": sides, "drop_remainder": not whole}


def _infer_beit_fields(stated: dict[str, Any], path: Path) -> dict[str, Any]:
    """BEiT's positions and layer scale, which its config.json switches on and off."""
    absolute = stated.get("use_absolute_position_embeddings", False)
    relative = stated.get("use_relative_position_bias") or stated.get("use_shared_relative_position_bias")
    if absolute and relative:
        raise ModelError(f"{path} has absolute positions and relative biases; a model here has one of them")
    size = stated.get("image_size", 224)
    if relative and isinstance(size, list) and len(set(size)) > 1:
        raise ModelError(f"{path} is for {size} pixels; transformers swaps the sides of such tables of biases")
    scaled = stated.get("layer_scale_init_value", 0.1)
    return {
        "positions": "relative-bias" if relative else "learned-1d" if absolute else "none",
        "resample": "bilinear" if relative else "bicubic",
        "layer_scale": bool(isinstance(scaled, (int, float)) and scaled > 0),
    }


def _infer_pool(tensors: Tensors, fields: dict[str, Any], family: Family) -> str:
    if "attn_pool.latent" in tensors:
        return "map"
    if "fc_norm.weight" in tensors:
        return "mean-norm"
    if not fields.get("class_token", True):
        return "norm-mean"
    return "class-mean" if family.names is DINOV2_NAMES and fields["classes"] else "class"


def _parse_labels(settings: dict[str, Any], classes: int) -> tuple[str, ...] | None:
    labels = settings.get("id2label")
    if not isinstance(labels, dict) or labels.keys() != {str(index) for index in range(classes)}:
        return None
    return tuple(str(labels[str(index)]) for index in range(classes)) or None


def _list_default_labels(classes: int) -> tuple[str, ...]:
    """The labels that transformers writes for classes without names."""
    return tuple(f"LABEL_{index}" for index in range(classes))


def write(trained: Trained, path: Path) -> list[str]:
    """Write a folder that transformers' own classes load; the notes say what it loses."""
    model = foreign_format.require_vit(FORMAT, trained.model)
    kind = choose_model_type(model.config)
    family = FAMILIES[kind]
    config, tensors, notes = _convert_positions(model, family)
    if config.classes and CLASSES[kind][1] is None:
        raise ModelError(
            f"the transformers format cannot hold this model: {CLASSES[kind][0]} has no variant with a classifier;"
            " keep it in vitrail's own format"
        )
    if config.classes and config.hidden_head:
        raise ModelError("the transformers format cannot hold this model: its classifiers have no hidden layer")
    if kind == "beit" and config.qkv_bias:
        tensors, key_notes = foreign_format.drop_key_biases(tensors)
        notes += key_notes
    settings = _build_config_json(config, kind, trained.labels)
    if kind == "dinov3_vit":  # whose files have biases of keys only where config.json says so
        settings["key_bias"] = config.qkv_bias and foreign_format.has_key_bias(tensors)
    written = convert_from_own(tensors, config, family, settings)
    notes += _check_written(written, config, tensors, settings)
    prefix = _get_file_prefix(config, kind)
    written = {name if name.startswith(HEADS) else prefix + name: tensor for name, tensor in written.items()}
    if config.distillation_head:
        written = {re.sub("^classifier", "cls_classifier", name): tensor for name, tensor in written.items()}
    path.mkdir()
    tensor_files.write_json(path / "config.json", settings)
    tensor_files.write_tensors(path / "model.safetensors", written, {})
    if kind in ("vit", "deit") and not config.classes and not config.hidden_head:
        notes.append("pooler: none was written, so transformers adds a random one; read last_hidden_state[:, 0]")
    if trained.origin.license is not None:
        (path / "README.md").write_text(hub.format_front_matter(trained.origin.license), encoding="utf-8")
    notes += foreign_format.describe_lost_origin(FORMAT, trained.origin)
    return notes + write_processor(trained.preprocess, path / PROCESSOR_FILES[0])


def choose_model_type(config: ViTConfig) -> str:
    """Choose the model type that may hold a config; whether it does is checked by reading what is written."""
    if config.rotary:
        return "dinov3_vit"
    if config.norm_pre or config.projection:
        return "clip_vision_model"
    if config.pool == "map":
        return "siglip_vision_model"
    if config.positions == "relative-bias" or config.pool == "mean-norm":
        return "beit"
    if not config.class_token:
        return "ijepa"
    if config.layer_scale or config.gated_mlp or config.registers:
        return "dinov2_with_registers" if config.registers else "dinov2"
    return "deit" if config.distillation_token else "vit"


def _convert_positions(model: ViT, family: Family) -> tuple[ViTConfig, dict[str, Tensor], list[str]]:
    """Store positions as the family does: a table, for all tokens where it has registers' siblings none."""
    config = model.config
    if config.positions == "relative-bias" and config.image_size[0] != config.image_size[1]:
        raise ModelError("the transformers format cannot hold this model: BEiT's classes swap the sides of such tables")
    optional = family.names is BEIT_NAMES and config.positions == "none"
    if family.fields.get("positions") == "none" or config.positions == "relative-bias" or optional:
        return config, dict(model.state_dict()), []
    prefix = config.class_token and not config.registers
    if not prefix and config.prefix_positions and config.num_positioned_prefix_tokens:
        raise ModelError("the transformers format cannot hold this model: prefix_positions is True beside registers")
    return foreign_format.convert_positions_to_table(model, prefix=prefix)


def _check_written(written: Tensors, config: ViTConfig, tensors: Tensors, settings: dict[str, Any]) -> list[str]:
    """Refuse to write what `read` would not get back: another function, or other numbers."""
    held, _ = convert_tensors(written, settings, foreign_format.DRAFT_PATH)
    notes = foreign_format.check_round_trip(FORMAT, config, infer_config(held, settings, foreign_format.DRAFT_PATH))
    for name, tensor in tensors.items():
        if name not in held or not torch.equal(held[name], tensor):
            raise ModelError(
                f"the transformers format cannot hold this model: {settings['architectures'][0]} has no {name!r}"
            )
    return notes


def _get_file_prefix(config: ViTConfig, kind: str) -> str:
    """Return what the names of a task's model start with."""
    return f"{FAMILIES[kind].prefix}." if config.classes or FAMILIES[kind].names is CLIP_NAMES else ""


def _build_config_json(config: ViTConfig, kind: str, labels: tuple[str, ...] | None) -> dict[str, Any]:
    labels = _list_default_labels(config.classes) if labels is None else labels
    square = config.image_size[0] == config.image_size[1]
    settings = {
        "architectures": [_get_class_name(config, kind)],
        "model_type": kind,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp,
        "hidden_act": ACTIVATIONS[config.gelu],
        "layer_norm_eps": config.norm_eps,
        "image_size": config.image_size[0] if square else list(config.image_size),
        "patch_size": config.patch,
        "num_channels": config.channels,
        "dtype": "float32",
    }
    if FAMILIES[kind].names is not CLIP_NAMES:
        settings |= {"id2label": {str(index): label for index, label in enumerate(labels)}}
        settings |= {"label2id": {label: index for index, label in enumerate(labels)}}
    return settings | _build_family_settings(config, kind)


def _build_family_settings(config: ViTConfig, kind: str) -> dict[str, Any]:
    """What config.json states in models of one type alone."""
    match kind:
        case "dinov2" | "dinov2_with_registers":
            ratio = _find_mlp_ratio(config)
            mlp = {"mlp_ratio": ratio, "use_swiglu_ffn": config.gated_mlp, "qkv_bias": config.qkv_bias}
            registers = config.registers
            return mlp | ({"num_register_tokens": registers} if registers else {"use_mask_token": False})
        case "dinov3_vit":
            return {
                "hidden_act": "silu" if config.gated_mlp else ACTIVATIONS[config.gelu],
                "use_gated_mlp": config.gated_mlp,
                "rope_theta": config.rotary.base if config.rotary else 100.0,
                "num_register_tokens": config.registers,
                "query_bias": config.qkv_bias,
                "value_bias": config.qkv_bias,
            }
        case "beit":
            return {
                "use_relative_position_bias": config.positions == "relative-bias",
                "use_absolute_position_embeddings": config.positions == "learned-1d",
                "use_mean_pooling": config.pool == "mean-norm",
                "layer_scale_init_value": 0.1 if config.layer_scale else 0.0,
            }
        case "clip_vision_model":
            return {"projection_dim": config.projection or 512}
        case "siglip_vision_model":
            return {}
    settings = {"qkv_bias": config.qkv_bias, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return settings | {"pooler_act": "tanh", "pooler_output_size": config.width}


def _find_mlp_ratio(config: ViTConfig) -> int:
    """Find the ratio from which DINOv2's classes compute the width of the MLP."""
    for ratio in range(1, 65):
        hidden = config.width * ratio
        if (hidden * 2 // 3 + 7) // 8 * 8 == config.mlp if config.gated_mlp else hidden == config.mlp:
            return ratio
    raise ModelError(f"the transformers format cannot hold this model: DINOv2 has no MLP of width {config.mlp}")


def _get_class_name(config: ViTConfig, kind: str) -> str:
    if config.distillation_head:
        return "DeiTForImageClassificationWithTeacher"
    if config.projection:
        return "CLIPVisionModelWithProjection"
    bare, classifier = CLASSES[kind]
    return classifier if config.classes and classifier else bare
