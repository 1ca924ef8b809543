"""transformers' folders: config.json, preprocessor_config.json and model.safetensors (or pytorch_model.bin).

ViT and DeiT are read and written, DINOv2 (with or without registers) is read. Files have the tensor names of version
4; the state dict of a version 5 model in memory has others. Both are read.
"""

import re
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vitrail.config import PreprocessConfig, ViTConfig, from_json
from vitrail.errors import ModelError, UsageError
from vitrail.weights import foreign_format, hub, tensor_files
from vitrail.weights.foreign_format import ForeignModelInfo
from vitrail.weights.tensor_files import ModelFiles
from vitrail.weights.trained import Tensors, Trained

FORMAT: Final = "transformers"
PROCESSOR_FILE = "preprocessor_config.json"
MODEL_TYPES = ("vit", "deit", "dinov2", "dinov2_with_registers")
RESAMPLE_OPERATORS = {"dinov2_with_registers": "bicubic-antialias"}  # all others: bicubic
GELU_FORMS = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
INTERPOLATION_CODES = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers

TENSOR_NAMES = foreign_format.TensorNameMap(
    layer_pattern=re.compile(r"(?:encoder\.layer|layers)\.(\d+)\."),
    layer_template="encoder.layer.{}.",
    top_prefixes={
        "embeddings.cls_token": "cls_token",
        "embeddings.distillation_token": "dist_token",
        "embeddings.register_tokens": "reg_token",
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.patch_embeddings.projection.": "patch_embed.proj.",
        "layernorm.": "norm.",
        "pooler.dense.": "pre_logits.fc.",
        "classifier.": "head.",
        "cls_classifier.": "head.",
        "distillation_classifier.": "head_dist.",
    },
    block_prefixes={
        "layernorm_before.": "norm1.",  # ViT and DeiT, in files
        "attention.attention.query.": "attn.q.",
        "attention.attention.key.": "attn.k.",
        "attention.attention.value.": "attn.v.",
        "attention.output.dense.": "attn.proj.",
        "layernorm_after.": "norm2.",
        "intermediate.dense.": "mlp.fc1.",
        "output.dense.": "mlp.fc2.",
        "norm1.": "norm1.",  # DINOv2, and version 5 in memory
        "attention.q_proj.": "attn.q.",
        "attention.k_proj.": "attn.k.",
        "attention.v_proj.": "attn.v.",
        "attention.o_proj.": "attn.proj.",
        "layer_scale1.lambda1": "ls1.gamma",
        "norm2.": "norm2.",
        "mlp.fc1.": "mlp.fc1.",
        "mlp.fc2.": "mlp.fc2.",
        "layer_scale2.lambda1": "ls2.gamma",
    },
)


def recognize(model_files: ModelFiles) -> bool:
    """Whether a file has transformers' tensor names; `read` then asks for the config.json that it lacks."""
    return any(name.endswith("embeddings.patch_embeddings.projection.weight") for name in model_files.tensors)


def read(model_files: ModelFiles) -> Trained:
    """Read the model in a folder."""
    folder, settings = model_files.path, model_files.config
    if settings is None:
        raise ModelError(f"{folder} is a transformers file without its config.json; give the folder that holds both")
    get_model_type(settings, folder)
    tensors, dropped = convert_tensors(model_files.tensors)
    processor_path = folder / PROCESSOR_FILE
    processor = tensor_files.read_json(processor_path) if processor_path.exists() else None
    info = read_info(tensors, settings, processor, folder)
    return foreign_format.build_trained(FORMAT, model_files, tensors, info, tuple(dropped))


def convert_tensors(tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
    """Put tensors under the model's own names; return a sentence on each that it does not use."""
    base = re.compile(rf"^({'|'.join(MODEL_TYPES)})\.")
    inner = {base.sub("", name): tensor for name, tensor in tensors.items()}
    unused = {"embeddings.mask_token": "only pre-training uses it"}
    if any(name.endswith("classifier.weight") for name in inner):
        unused |= dict.fromkeys(("pooler.dense.weight", "pooler.dense.bias"), "the classifier does not read the pooler")
    dropped = [f"{name}: left out, {reason}" for name, reason in unused.items() if inner.pop(name, None) is not None]
    own = foreign_format.fuse_qkv(TENSOR_NAMES.rename_tensors(inner))
    if "reg_token" in own:  # only the class token has a position among the prefix tokens: add it to the token
        token, position = (own.get(name, torch.empty(0)) for name in ("cls_token", "pos_embed"))
        if not token.ndim == position.ndim == 3 or token.shape[2] != position.shape[2]:
            raise ModelError("the file has registers, but no class token and positions of one width beside them")
        own |= {"cls_token": token + position[:, :1], "pos_embed": position[:, 1:]}
    return own, dropped


def read_info(
    tensors: Tensors, settings: dict[str, Any], processor: dict[str, Any] | None, path: Path
) -> ForeignModelInfo:
    """Read everything that a folder states, for tensors under the model's own names."""
    config = infer_config(tensors, settings, path)
    preprocess, sentences = _parse_preprocess_config(processor)
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


def infer_config(tensors: Tensors, settings: dict[str, Any], path: Path) -> ViTConfig:
    """Infer the function that these weights compute, by config.json."""
    kind = get_model_type(settings, path)
    if settings.get("use_swiglu_ffn"):
        raise ModelError(f"{path} has SwiGLU layers, which no plain ViT has")
    activation = settings.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in GELU_FORMS:
        raise ModelError(f"{path} uses the activation {activation!r}; a plain ViT has one of {', '.join(GELU_FORMS)}")
    if "pre_logits.fc.weight" in tensors and settings.get("pooler_act", "tanh") != "tanh":
        raise ModelError(f"{path} has a pooler with {settings['pooler_act']!r}; the paper's hidden layer has tanh")
    fields = foreign_format.infer_fields(tensors, path)
    image = settings.get("image_size", 224)
    dino = kind.startswith("dinov2")
    registers = foreign_format.count_tokens(tensors, "reg_token", path) if dino else 0
    fields |= {
        "heads": settings.get("num_attention_heads", 12),
        "image_size": (image, image) if isinstance(image, int) else image,
        "registers": registers,
        "pool": "class-mean" if dino and fields["classes"] else "class",
        "prefix_positions": not registers,  # see convert_tensors
        "resample": RESAMPLE_OPERATORS.get(kind, "bicubic"),
        "qkv_bias": settings.get("qkv_bias", True),
        "layer_scale": dino,
        "gelu": GELU_FORMS[activation],
        "norm_eps": settings.get("layer_norm_eps", 1e-12 if not dino else 1e-6),
    }
    return from_json(ViTConfig, fields)


def _parse_preprocess_config(processor: dict[str, Any] | None) -> tuple[PreprocessConfig | None, list[str]]:
    """Parse the preprocessing in preprocessor_config.json; where that fails, return None and why."""
    if processor is None:
        return None, ["preprocessing: unknown, the folder has no preprocessor_config.json"]
    try:
        resize = _parse_size(processor["size"]) if processor.get("do_resize", True) else None
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
            "interpolation": INTERPOLATION_CODES[processor.get("resample", _get_default_resample(processor))],
            "crop_rounding": "nearest" if crop == resize else "down",
            "mean": processor["image_mean"],
            "std": processor["image_std"],
        }
        return from_json(PreprocessConfig, fields), []
    except (KeyError, TypeError, ValueError) as error:
        return None, [f"preprocessing: unknown, preprocessor_config.json does not state it in full ({error})"]


def _get_default_resample(processor: dict[str, Any]) -> int:
    """transformers' default where the file does not state it: bilinear for ViT, bicubic for DeiT and DINOv2."""
    kind = processor.get("image_processor_type") or processor.get("feature_extractor_type") or "ViT"
    return 2 if str(kind).startswith("ViT") else 3


def _parse_size(size: Any) -> tuple[int, ...]:
    """Parse a size: one side (the shortest), or height and width."""
    if isinstance(size, int):  # written before version 4.25
        return size, size
    return (size["shortest_edge"],) if "shortest_edge" in size else (size["height"], size["width"])


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
    config, tensors, notes = foreign_format.convert_positions_to_table(
        foreign_format.require_vit(FORMAT, trained.model), prefix=True
    )
    if config.classes and config.hidden_head:
        raise ModelError("the transformers format cannot hold this model: its classifiers have no hidden layer")
    settings = _build_config_json(config, trained.labels)
    notes += foreign_format.check_round_trip(FORMAT, config, infer_config(tensors, settings, foreign_format.DRAFT_PATH))
    renamed = {_get_file_tensor_name(name, config): tensor for name, tensor in foreign_format.split_qkv(tensors)}
    path.mkdir()
    tensor_files.write_json(path / "config.json", settings)
    tensor_files.write_tensors(path / "model.safetensors", renamed, {})
    if not config.classes and not config.hidden_head:
        notes.append("pooler: none was written, so transformers adds a random one; read last_hidden_state[:, 0]")
    if trained.origin.license is not None:
        (path / "README.md").write_text(hub.format_front_matter(trained.origin.license), encoding="utf-8")
    notes += foreign_format.describe_lost_origin(FORMAT, trained.origin)
    return notes + _write_processor_json(trained.preprocess, path / PROCESSOR_FILE)


def _write_processor_json(preprocess: PreprocessConfig | None, path: Path) -> list[str]:
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


def _get_file_tensor_name(own: str, config: ViTConfig) -> str:
    """Return the name that one of the model's tensors has in a file."""
    theirs = TENSOR_NAMES.to_foreign_name(own)
    if theirs.startswith("classifier."):
        return f"cls_{theirs}" if config.distillation_head else theirs
    if theirs.startswith("distillation_classifier.") or not config.classes:
        return theirs
    return f"{'deit' if config.distillation_token else 'vit'}.{theirs}"


def _build_config_json(config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
    family = "DeiT" if config.distillation_token else "ViT"
    task = "Model" if not config.classes else "ForImageClassification"
    labels = _list_default_labels(config.classes) if labels is None else labels
    return {
        "architectures": [f"{family}{task}{'WithTeacher' if config.distillation_head else ''}"],
        "model_type": family.lower(),
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp,
        "hidden_act": "gelu" if config.gelu == "erf" else "gelu_pytorch_tanh",
        "layer_norm_eps": config.norm_eps,
        "image_size": config.image_size[0] if config.image_size[0] == config.image_size[1] else list(config.image_size),
        "patch_size": config.patch,
        "num_channels": config.channels,
        "qkv_bias": config.qkv_bias,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pooler_act": "tanh",
        "pooler_output_size": config.width,
        "dtype": "float32",
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }


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
