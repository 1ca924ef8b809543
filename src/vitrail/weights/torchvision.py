"""torchvision's state dicts: class-token ViTs with erf GELU and epsilon 1e-6, nothing but tensors in the file."""

import re
from pathlib import Path
from typing import Final

from vitrail.config import ViTConfig, from_json
from vitrail.errors import ModelError
from vitrail.weights import foreign_format, tensor_files
from vitrail.weights.foreign_format import ForeignModelInfo
from vitrail.weights.tensor_files import ModelFiles
from vitrail.weights.trained import Tensors, Trained

FORMAT: Final = "torchvision"
TENSOR_NAMES = foreign_format.TensorNameMap(
    layer_pattern=re.compile(r"encoder\.layers\.encoder_layer_(\d+)\."),
    layer_template="encoder.layers.encoder_layer_{}.",
    top_prefixes={
        "class_token": "cls_token",
        "encoder.pos_embedding": "pos_embed",
        "conv_proj.": "patch_embed.proj.",
        "encoder.ln.": "norm.",
        "heads.pre_logits.": "pre_logits.fc.",
        "heads.head.": "head.",
    },
    block_prefixes={
        "ln_1.": "norm1.",
        "self_attention.in_proj_": "attn.qkv.",
        "self_attention.out_proj.": "attn.proj.",
        "ln_2.": "norm2.",
        "mlp.0.": "mlp.fc1.",
        "mlp.3.": "mlp.fc2.",
        "mlp.linear_1.": "mlp.fc1.",  # files from before torchvision 0.13
        "mlp.linear_2.": "mlp.fc2.",
    },
)


def recognize(model_files: ModelFiles) -> bool:
    """Whether a file has torchvision's tensor names."""
    return {"conv_proj.weight", "encoder.ln.weight"} <= model_files.tensors.keys()


def read(model_files: ModelFiles) -> Trained:
    """Read the model in a state dict."""
    tensors = TENSOR_NAMES.rename_tensors(model_files.tensors)
    return foreign_format.build_trained(FORMAT, model_files, tensors, read_info(tensors, model_files.path))


def read_info(tensors: Tensors, path: Path) -> ForeignModelInfo:
    """Infer everything from the tensors, which have the model's own names."""
    fields = foreign_format.infer_fields(tensors, path)
    heads, sentence = foreign_format.guess_heads(fields["width"], fields["depth"])
    positions = foreign_format.count_tokens(tensors, "pos_embed", path)
    side = foreign_format.find_square_side(positions - 1)
    if not side:
        raise ModelError(f"{path}: its {positions} positions are not one class token and a square grid")
    fields |= {
        "heads": heads,
        "image_size": (side * fields["patch"], side * fields["patch"]),
        "resample": "bicubic-corners",
        "gelu": "erf",
    }
    unknown = "preprocessing: unknown, a torchvision file does not state it"
    return ForeignModelInfo(config=from_json(ViTConfig, fields), assumptions=(sentence, unknown))


def write(trained: Trained, path: Path) -> list[str]:
    """Write the state dict that torchvision's VisionTransformer loads; the notes say what it loses."""
    model = foreign_format.require_vit(FORMAT, trained.model)
    if not model.config.classes or model.config.channels != 3:
        raise ModelError("the torchvision format cannot hold this model: its ViT always has a head and three channels")
    config, tensors, notes = foreign_format.convert_positions_to_table(model, prefix=True)
    notes += foreign_format.check_round_trip(FORMAT, config, read_info(tensors, foreign_format.DRAFT_PATH).config)
    renamed = {TENSOR_NAMES.to_foreign_name(name): tensor for name, tensor in tensors.items()}
    tensor_files.write_tensors(path, renamed, {})
    return [*notes, "a torchvision file has no place for preprocessing, labels and origin: they were left out"]
