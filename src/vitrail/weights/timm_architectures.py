"""What the name of a timm architecture states beside its tensors: the arguments that timm's own code builds it with.

The vocabulary is that of timm's constructors (`VisionTransformer`, `Eva`, `Beit`), so that `model_args` in a
config.json replaces what the name states. Ours are `norm_eps`, which timm passes inside of `norm_layer`, `is_eva`, and
`resample`, which timm chooses when it loads a file.
"""

import math
import re
from pathlib import Path
from typing import Any

from vitrail.config import RotaryConfig
from vitrail.errors import ModelError
from vitrail.weights.trained import Tensors

_EVA = r"eva02_|eva_giant_|vit_\w+_(rope|dinov3|lingbot)|vit_pe_"
STEM_ARCHITECTURES = {  # units of a hybrid's stem -> the architecture that timm builds with it
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
_ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (  # a later row replaces what an earlier one states
    (_EVA, {"is_eva": True, "pool_include_prefix": True}),
    (r"vit_\w+_clip_", {"norm_eps": 1e-5}),
    (r"vit_\w+_clip_quickgelu_", {"act_layer": "quick_gelu"}),
    (
        r"vit_(base_patch32_siglip|large_patch16_siglip_(gap_)?512|so400m_patch16_siglip|giantopt_patch16_siglip)",
        {"act_layer": "gelu_tanh"},
    ),
    (r"eva02_|vit_\w+_rope_reg\d_gap_", {"use_rot_pos_emb": True, "ref_feat_shape": 16}),
    (
        r"vit_\w+_rope_(ape_)?224",
        {"use_rot_pos_emb": True, "rope_temperature": 100, "rope_grid_indexing": "xy", "global_pool": "token"},
    ),
    (
        r"vit_\w+_(dinov3|lingbot)",
        {
            "use_rot_pos_emb": True,
            "rope_type": "dinov3",
            "rope_temperature": 100,
            "rope_rotate_half": True,
            "norm_eps": 1e-5,
            "global_pool": "avg",
        },
    ),
    (r"vit_\w+_lingbot", {"global_pool": "token"}),
    (
        r"vit_pe_",
        {
            "use_rot_pos_emb": True,
            "ref_feat_shape": 32,
            "rope_grid_offset": 1,
            "rope_grid_indexing": "xy",
            "attn_pool_num_heads": 8,
            "norm_eps": 1e-5,
        },
    ),
    (r"vit_pe_core_(tiny|small|large)_", {"ref_feat_shape": 24}),
    (r"vit_pe_core_base_", {"ref_feat_shape": 14}),
    (r"vit_pe_core_gigantic_", {"rope_grid_offset": 0}),
    (r"flexivit_", {"resample": "bilinear"}),
    # heads that neither a published size nor width / 64 tells
    (r"vit_giantopt_patch16_siglip|vit_base_patch16_gap_224|vit_pe_\w+_gigantic_", {"num_heads": 16}),
    (r"vit_7b_patch16_dinov3", {"num_heads": 32}),
    (r"vit_huge_plus_patch16_dinov3", {"num_heads": 20}),
    (r"test_vit2?$", {"num_heads": 2}),
    (r"test_vit[34]$", {"num_heads": 3}),
    (r"test_vit3$", {"pool_include_prefix": True}),
)
_REFUSED = {  # part of an architecture's name -> what its tensors and model_args do not state
    "_rpn_": "post-normalized blocks",
    "eva02_enormous_": "post-normalized blocks",
    "_rope_mixed_": "rotary positions of its own in each layer",
    "sapiens2": "grouped queries with norms",
    "beit3_": "a norm inside MLPs that have no gate",
    "vit_intern300m_": "no norm after its last block",
    "vit_pe_lang_": "no norm after its last block",
    "vit_pe_spatial_": "no norm after its last block",
    "aimv2_": "RMS norms without biases",
    "vit_dlittle_": "differential attention",
    "vit_dwee_": "differential attention",
    "vit_dpwee_": "differential attention and parallel branches",
    "vit_pwee_": "parallel branches",
    "_xp_": "parallel branches",
    "_18x2_": "parallel branches",
    "vit_base_mci_": "a convolutional stem with batch norm",
}
_KNOWN = {  # arguments that the tensors, the function below or nothing but training depends on
    "img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias",
    "init_values", "class_token", "no_embed_class", "reg_tokens", "global_pool", "fc_norm", "act_layer", "pos_embed",
    "dynamic_img_size", "drop_rate", "drop_path_rate", "weight_init", "pre_norm", "pool_include_prefix",
    "num_reg_tokens", "qkv_fused", "swiglu_mlp", "swiglu_align_to", "scale_mlp", "scale_attn_inner", "attn_type",
    "use_abs_pos_emb", "use_rot_pos_emb", "rope_type", "rope_grid_offset", "rope_grid_indexing", "rope_temperature",
    "rope_rotate_half", "rope_shift_coords", "rope_jitter_coords", "rope_rescale_coords", "ref_feat_shape",
    "use_pre_transformer_norm", "use_fc_norm", "attn_pool_num_heads", "attn_pool_mlp_ratio", "use_rel_pos_bias",
}  # fmt: skip
_KNOWN_BY_DEFAULT = {  # known where they are what timm does anyway
    "final_norm": (True,), "use_post_transformer_norm": (True, None), "use_post_norm": (False,), "qk_norm": (False,),
    "num_kv_heads": (None,), "attn_only_layer_scale": (False,), "use_shared_rel_pos_bias": (False,),
    "scale_attn_norm": (False,), "scale_mlp_norm": (False,), "proj_bias": (True,), "dynamic_img_pad": (False,),
}  # fmt: skip
_GELU_FORMS = {"gelu": "erf", "gelu_tanh": "tanh", "quick_gelu": "quick"}


def resolve_arguments(name: str, stated: dict[str, Any], path: Path) -> dict[str, Any]:
    """The arguments that an architecture's name states, replaced by those of `model_args`; refuse what no ViT has."""
    for argument, value in sorted(stated.items()):
        if argument not in _KNOWN and value not in _KNOWN_BY_DEFAULT.get(argument, ()):
            raise ModelError(f"{path} was built with {argument}={value!r:.40}, which no plain ViT has")
    for part, what in _REFUSED.items():
        if part in name:
            raise ModelError(f"{path} is {name} with {what}, which no plain ViT has")
    arguments: dict[str, Any] = {}
    for pattern, named in _ARGUMENTS:
        if re.match(pattern, name):
            arguments |= named
    return arguments | stated


def guess_arguments(tensors: Tensors, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Guess the arguments of tensors without a config.json, which do not show rotary positions; say what is assumed."""
    name = _guess_name(tensors)
    if not name:
        return {}, ["GELU: the erf form, timm's default"]
    if name == "vit_pe_core_":  # in all published sizes the reference grid is the model's own
        has_class_token, positions = "cls_token" in tensors, tensors["pos_embed"].shape[1]
        own = {
            "ref_feat_shape": math.isqrt(max(positions - has_class_token, 0)),
            "rope_grid_offset": int(has_class_token),
        }
    else:
        own = {}
    sentence = f"architecture: GELU, epsilon and rotary positions as of timm's {name}, the tensors do not state them"
    return resolve_arguments(name, own, path), [sentence]


def _guess_name(tensors: Tensors) -> str:
    """The architecture whose numerics these tensors have; empty for a plain ViT."""
    fc1, fc2 = (tensors.get(f"blocks.0.mlp.{layer}.weight") for layer in ("fc1", "fc2"))
    is_gated = fc1 is not None and fc2 is not None and fc1.ndim == fc2.ndim == 2 and len(fc1) == 2 * fc2.shape[1]
    has_positions = "pos_embed" in tensors or "blocks.0.attn.relative_position_bias_table" in tensors
    has_scales = "blocks.0.ls1.gamma" in tensors
    if not has_positions and has_scales:
        without_registers = "vit_base_patch16_rope_224" if "cls_token" in tensors else ""
        with_registers = "vit_base_patch16_dinov3" if "cls_token" in tensors else "vit_base_patch16_rope_reg1_gap_256"
        return with_registers if "reg_token" in tensors else without_registers
    if has_positions and is_gated and not has_scales:
        is_clip = "blocks.0.attn.norm.weight" in tensors
        return "eva02_base_patch16_clip_224" if is_clip else "eva02_base_patch14_224"
    if "norm_pre.weight" not in tensors:
        return ""
    is_pe = "attn_pool.latent" in tensors and "pos_embed" in tensors and tensors["pos_embed"].ndim == 3
    return "vit_pe_core_" if is_pe else "vit_base_patch16_clip_224"


def parse_gelu(arguments: dict[str, Any], path: Path) -> str:
    """The form of GELU."""
    activation = arguments.get("act_layer") or "gelu"
    if not isinstance(activation, str) or activation not in _GELU_FORMS:
        choices = ", ".join(map(repr, _GELU_FORMS))
        raise ModelError(f"{path} uses the activation {activation!r}; a plain ViT has one of {choices}")
    return _GELU_FORMS[activation]


def parse_rotary(arguments: dict[str, Any], path: Path) -> RotaryConfig | None:
    """The rotary positions; None where there are none."""
    if not arguments.get("use_rot_pos_emb"):
        return None
    kind, half = arguments.get("rope_type") or "cat", bool(arguments.get("rope_rotate_half"))
    if kind not in ("cat", "dinov3") or half != (kind == "dinov3"):
        raise ModelError(f"{path} has rotary positions of type {kind!r:.40} with rope_rotate_half={half}; not read")
    indexing, offset = arguments.get("rope_grid_indexing", "ij"), arguments.get("rope_grid_offset") or 0
    base, reference = arguments.get("rope_temperature", 10_000), arguments.get("ref_feat_shape")
    sides = [reference, reference] if isinstance(reference, int) else reference
    is_grid = sides is None or (isinstance(sides, list) and [type(side) for side in sides] == [int, int])
    if indexing not in ("ij", "xy") or not is_grid or type(base) not in (int, float) or offset not in range(16_384):
        raise ModelError(f"{path}: its rotary positions are not those of any published ViT")
    if kind == "dinov3" and offset:
        raise ModelError(f"{path} has DINOv3's rotary positions with an offset of {offset}; not read")
    return RotaryConfig(
        places="normalized" if kind == "dinov3" else "index",
        base=float(base),
        reference=None if sides is None or kind == "dinov3" else (sides[0], sides[1]),
        offset=int(offset),
        order="yx" if indexing == "ij" else "xy",
    )


def list_rotary_arguments(rotary: RotaryConfig | None) -> dict[str, Any]:
    """The arguments with which timm's `Eva` builds these rotary positions: the inverse of `parse_rotary`."""
    if rotary is None:
        return {"use_rot_pos_emb": False}
    is_normalized = rotary.places == "normalized"
    return {
        "use_rot_pos_emb": True,
        "rope_type": "dinov3" if is_normalized else "cat",
        "rope_rotate_half": is_normalized,
        "rope_temperature": rotary.base,
        "rope_grid_offset": float(rotary.offset),
        "rope_grid_indexing": "ij" if rotary.order == "yx" else "xy",
        "ref_feat_shape": None if rotary.reference is None else list(rotary.reference),
    }
