"""PEFT's LoRA adapters: read, and merged into the model that they were trained on.

    adapter_config.json  adapter_model.safetensors (or .bin)

    r rank   I inputs   O outputs   A (r, I)   B (O, r)   s scale

An adapter names layers as they were called in memory where it was trained: in timm, in transformers from 5.9 on, or
before. Each name tells its family, and is mapped to the model's own. PEFT itself reads only names of the transformers
installed beside it.
What an adapter's configuration says is either known to leave this merge as it is, or refused by its name.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.config import PreprocessConfig, ViTConfig, from_json
from vitrail.config.model import Pool
from vitrail.config.training import compute_lora_scale
from vitrail.errors import ModelError, UsageError
from vitrail.formatting import pluralize
from vitrail.model.lora import merge_weight
from vitrail.weights import foreign_format, hub, tensor_files, timm_tensors
from vitrail.weights.adapt import adapt
from vitrail.weights.formats import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILES
from vitrail.weights.trained import Tensors, Trained, assemble_model
from vitrail.weights.transformers_families import (
    BEIT_NAMES,
    CLIP_NAMES,
    DINOV3_NAMES,
    FAMILIES,
    OUTSIDE_IMAGE_MODEL,
    SHARED_TABLES,
    join_gate,
    split_gate,
    split_pool_query,
)

KEY_PREFIX = "base_model.model."
HEADER_KEY = "vitrail_adapter"
"""In the header of a file that vitrail wrote: an `AdapterHeader`."""
MODEL_TYPES_BY_PREFIX = {f"{family.prefix}.": kind for kind, family in reversed(FAMILIES.items())}
BACKBONE_PREFIX = re.compile(rf"^(?:{'|'.join(map(re.escape, MODEL_TYPES_BY_PREFIX))})")
EVA02 = "eva02"
"""The family of timm's models whose queries, keys, values and gates are layers of their own; transformers has none."""
OWN_PREFIXES = ("blocks.", "patch_embed.", "norm.", "fc_norm.", "attn_pool.", "pre_logits.", "head.", "head_dist.")
_READ_FIELDS = {
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights",
    "base_model_name_or_path",
}  # fmt: skip
_IRRELEVANT_FIELDS = {  # to the merged weights: they decide where and how training started, or are seen in the file
    "auto_mapping", "bias", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_bias", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Those that leave the base as it is; PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA and later ones may not."""
_ADDED_KEY = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_magnitude_vector)(?:\.weight)?")


_REFUSED_LAYERS = {
    OUTSIDE_IMAGE_MODEL: "it is no part of the image model",
    re.compile(r"head\.attention\.(?!in_proj_|out_proj\.)"): "PEFT adds to torch's MultiheadAttention in its own way",
    re.compile("|".join(map(re.escape, SHARED_TABLES))): "all layers share it",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankAddition:
    """What an adapter adds to one layer."""

    lora_a: Tensor
    """(r, I), or (r, C, P, P) of a convolution."""
    lora_b: Tensor
    """(O, r), or (O, r, 1, 1)."""
    alpha: float
    magnitude: Tensor | None = None
    """(O,), or (1, O, 1, 1): the norm of each row, with DoRA."""
    bias: Tensor | None = None
    """(O,): added to the bias, scaled like the product."""

    @property
    def rank(self) -> int:
        """The rank of the product."""
        return len(self.lora_a)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterHeader:
    """What PEFT's files have no place for; without it the base's own hold."""

    labels: tuple[str, ...] | None = None
    multi_label: bool = False
    preprocess: PreprocessConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter under the model's own names.

    `attn.q`, `attn.k` and `attn.v` are thirds of `attn.qkv`. `mlp.gate` and `mlp.up` are halves of a gated MLP's
    `mlp.fc1`, and `mlp.up` alone may be a plain MLP's.
    """

    additions: Mapping[str, LowRankAddition]
    """By the layer's path, such as blocks.0.attn.qkv."""
    replaced: Tensors
    """Whole tensors that replace the base's, by name: a new head, trained biases."""
    rank_stabilized: bool = False
    family: str = "vit"
    """The model type of transformers whose names its layers had or will have, or `EVA02`."""
    gated: bool = False
    """Whether its names, or its base, tell that the MLPs are gated."""
    backbone: str = "vit."
    """What transformers calls the part of its model that has the blocks; empty where it is the whole model."""
    base: str | None = None
    """The model that it was trained on."""
    header: AdapterHeader = AdapterHeader()

    def compute_scale(self, addition: LowRankAddition) -> float:
        """The factor of the addition's product."""
        return compute_lora_scale(addition.alpha, addition.rank, rank_stabilized=self.rank_stabilized)


# --- read -------------------------------------------------------------------------------------------------------------


def read_adapter(folder: Path) -> Adapter:
    """Read the adapter in a folder that PEFT or vitrail wrote."""
    config_path = folder / ADAPTER_CONFIG_FILE
    if not config_path.is_file():
        below = sorted(path.parent for path in folder.glob(f"*/{ADAPTER_CONFIG_FILE}")) if folder.is_dir() else []
        advice = f": give {below[0]}" if below else ", which PEFT's save_pretrained writes"
        raise ModelError(f"{folder} is no adapter: it has no {ADAPTER_CONFIG_FILE}{advice}")
    weights = next((folder / name for name in ADAPTER_WEIGHTS_FILES if (folder / name).is_file()), None)
    if weights is None:
        raise ModelError(f"{folder} has an {ADAPTER_CONFIG_FILE} but no {' or '.join(ADAPTER_WEIGHTS_FILES)}")
    config = tensor_files.read_json(config_path)
    check_config(config, config_path)
    content = tensor_files.read_tensors(weights)
    base = config.get("base_model_name_or_path")
    return Adapter(
        **_parse_tensors(content.tensors, config, weights),
        rank_stabilized=bool(config.get("use_rslora")),
        base=base if isinstance(base, str) and base else None,
        header=_parse_header(content.metadata, weights),
    )


def _parse_header(metadata: Mapping[str, str], path: Path) -> AdapterHeader:
    if HEADER_KEY not in metadata:
        return AdapterHeader()
    try:
        return from_json(AdapterHeader, tensor_files.parse_json(metadata[HEADER_KEY], path))
    except UsageError as error:
        raise ModelError(f"{path} is damaged: {error}") from error


def check_config(config: dict[str, Any], path: Path) -> None:
    """Refuse an adapter that is more than the sum W + s B A, or whose base was changed before it was trained."""
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path} is of the peft_type {config.get('peft_type')!r:.80}; LORA is read")
    initialization = config.get("init_lora_weights", True)
    if initialization not in _INITIALIZATIONS:
        raise ModelError(
            f"{path} has init_lora_weights={initialization!r:.80}, which may change the base's weights. Save it as an"
            " ordinary adapter with PEFT: save_pretrained(FOLDER, path_initial_model_for_weight_conversion=...)"
        )
    for name in sorted(config.keys() - _READ_FIELDS - _IRRELEVANT_FIELDS):
        if config[name] not in (None, False, 0, "", [], {}):
            raise ModelError(
                f"{path} has {name}={config[name]!r:.80}, which is not supported: it may change what is computed."
                " Merge the adapter with PEFT (merge_and_unload) and convert the result"
            )


def _parse_tensors(tensors: Tensors, config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The tensors by what they are and by the model's own names."""
    parts: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    for key, tensor in sorted(tensors.items()):  # X.bias before X.modules_to_save.bias, which is the trained one
        if not key.startswith(KEY_PREFIX):
            raise ModelError(f"{path} is no adapter: its tensor {key!r:.120} does not start with {KEY_PREFIX}")
        name = key.removeprefix(KEY_PREFIX)
        if match := _ADDED_KEY.fullmatch(name):
            parts.setdefault(match[1], {})[match[2]] = tensor
        elif "lora_" in name:
            raise ModelError(f"{path} has a tensor that is not supported: {name!r:.120}")
        elif ".original_module." not in name:
            replaced[to_own_name(re.sub(r"\.(?:modules_to_save|base_layer)\.", ".", name), path)] = tensor
    if not parts and not replaced:
        raise ModelError(f"{path} is damaged: it holds no tensors")
    split_pool_query(replaced)
    additions = {
        to_own_name(f"{name}.", path).removesuffix("."): _build_addition(name, part, config, path)
        for name, part in parts.items()
    }
    return {"additions": additions, "replaced": replaced, **_recognize_family(parts or replaced)}


def to_own_name(name: str, path: Path) -> str:
    """The model's own name of a layer's tensor, which any version of transformers or timm named."""
    bare = BACKBONE_PREFIX.sub("", name)
    for pattern, reason in _REFUSED_LAYERS.items():
        if pattern.match(bare):
            raise ModelError(
                f"{path} changes {name!r:.120}, which is not supported: {reason}. Merge the adapter with PEFT"
                " (merge_and_unload) and convert the result"
            )
    own = CLIP_NAMES.find_own_name(bare)  # before timm's, whose head has no layers
    if own is not None:
        return own
    if name.startswith(OWN_PREFIXES):
        own = timm_tensors.rename_in_block(name)
        return own.replace(".mlp.fc1_g.", ".mlp.gate.").replace(".mlp.fc1_x.", ".mlp.up.")
    own = BEIT_NAMES.find_own_name(bare)  # before DINOv3's, whose patch embedding has no layers
    return own or DINOV3_NAMES.find_own_name(bare) or BEIT_NAMES.to_own_name(bare)


def _recognize_family(names: Iterable[str]) -> dict[str, Any]:
    """The fields of an `Adapter` that the names of its layers tell."""
    text = "\n".join(names)
    gated = re.search(r"\.mlp\.(?:gate_proj|weights_in|weights_out|fc1_g|fc1_x)\b", text) is not None
    backbone = max((match[0] for name in names if (match := BACKBONE_PREFIX.match(name))), default="")
    if backbone:
        family = MODEL_TYPES_BY_PREFIX[backbone]
    elif re.search(r"^blocks\.\d+\.attn\.[qkv]_proj\b", text, re.MULTILINE):
        family = EVA02
    elif gated and "blocks." in text:
        family = "dinov3_vit"
    else:
        family = next((kind for kind in ("dinov3_vit", "clip") if _has_layers_of(kind, names)), "vit")
        is_timm = family == "vit" and any(name.startswith(OWN_PREFIXES) for name in names)
        backbone = "vit." if is_timm else ""
    return {"family": family, "gated": gated, "backbone": backbone}


def _has_layers_of(kind: str, names: Iterable[str]) -> bool:
    own_names = ("visual_projection",) if kind == "clip" else ()
    return any(FAMILIES[kind].names.layer_pattern.match(name) or name.startswith(own_names) for name in names)


def _build_addition(name: str, part: Mapping[str, Tensor], config: dict[str, Any], path: Path) -> LowRankAddition:
    """What is added to the layer that the adapter calls `name`."""
    lora_a, lora_b, magnitude = (part.get(key) for key in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"))
    if lora_a is None or lora_b is None or (magnitude is None) == bool(config.get("use_dora")):
        raise ModelError(f"{path} is damaged: of {name!r:.120} it holds {', '.join(part)}")
    rank = _get_by_pattern(tensor_files.get_section(config, "rank_pattern", path), name, config.get("r"), path)
    alphas = tensor_files.get_section(config, "alpha_pattern", path)
    alpha = _get_by_pattern(alphas, name, config.get("lora_alpha"), path)
    if not isinstance(alpha, int | float) or lora_a.ndim < 2 or (len(lora_a), lora_b.shape[1:2]) != (rank, (rank,)):
        shapes = f"{tuple(lora_a.shape)} and {tuple(lora_b.shape)}"
        raise ModelError(
            f"{path} is damaged: {name!r:.120} has {shapes}, and its rank is {rank!r}, its alpha {alpha!r}"
        )
    return LowRankAddition(lora_a=lora_a, lora_b=lora_b, alpha=alpha, magnitude=magnitude, bias=part.get("lora_B.bias"))


def _get_by_pattern(patterns: Mapping[str, Any], name: str, default: Any, path: Path) -> Any:
    """The value of the first pattern that matches the end of a layer's name, as PEFT chooses it."""
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        except re.error as error:
            raise ModelError(f"{path} is damaged: {pattern!r:.80} is no regular expression ({error})") from None
    return default


def merge_adapter(trained: Trained, adapter: str | Path) -> Trained:
    """The model with the adapter in a folder, or with that of hf:ORG/NAME[@REVISION], merged into it."""
    if isinstance(adapter, str) and adapter.startswith("hf:"):
        folder = hub.download_adapter(adapter)
        return apply_adapter(trained, read_adapter(folder), f"{adapter.partition('@')[0]}@{folder.name}")
    return apply_adapter(trained, read_adapter(Path(adapter)), Path(adapter).resolve().name)


# --- merge ------------------------------------------------------------------------------------------------------------


def apply_adapter(trained: Trained, adapter: Adapter, name: str) -> Trained:
    """The model with the adapter called `name` merged into it; `trained` stays as it is."""
    fitted = _fit_base(trained, adapter)
    if "head" in adapter.additions and "projection.weight" in fitted.model.state_dict():  # timm calls it the head
        additions = {"projection" if path == "head" else path: each for path, each in adapter.additions.items()}
        adapter = dataclasses.replace(adapter, additions=additions)
    tensors, config = dict(fitted.model.state_dict()), fitted.model.config
    names = [*(f"{path}.weight" for path in adapter.additions), *adapter.replaced]
    if any(re.search(r"\.attn\.[qkv]\.", each) for each in names):
        tensors = dict(foreign_format.split_qkv(tensors))
    if any(re.search(r"\.mlp\.(?:gate|up)\.", each) for each in names):
        tensors = split_gate(tensors, gated=isinstance(config, ViTConfig) and config.gated_mlp)
    for each in names:
        if each not in tensors:
            raise ModelError(f"the adapter {name} is for another model: {trained.origin.name} has no {each!r}")
    for each, tensor in adapter.replaced.items():
        _check_shape(each, tensor, tensors[each])
        tensors[each] = tensor
    for path, addition in adapter.additions.items():
        _merge_addition(tensors, path, addition, adapter.compute_scale(addition))
    join_gate(tensors)
    heads = sorted(each for each in adapter.replaced if "head" in each)
    ranks = "-".join(str(rank) for rank in sorted({addition.rank for addition in adapter.additions.values()}))
    change = f"adapter {name}: LoRA of rank {ranks} merged into {pluralize(len(adapter.additions), 'layer')}"
    change += f", {', '.join(heads)} replaced" if heads else ""
    return dataclasses.replace(
        fitted,
        model=assemble_model(config, foreign_format.fuse_qkv(tensors)),
        origin=dataclasses.replace(fitted.origin, changes=(*fitted.origin.changes, change)),
        temperature=1.0,
        threshold=0.0,
        label_thresholds=(),
        precision_measurements=(),
        activation_ranges=(),
    )


def _fit_base(trained: Trained, adapter: Adapter) -> Trained:
    """The base with the classes, labels and preprocessing of the adapter, the new head still zero."""
    head, header, config = adapter.replaced.get("head.weight"), adapter.header, trained.model.config
    size = None if header.preprocess is None else header.preprocess.size
    if head is not None and isinstance(config, ViTConfig):
        trained = _fit_pool(trained, config, head, adapter.family)
        if len(head) != config.classes or config.hidden_head:
            labels = trained.labels if len(head) == config.classes else None
            if config.distillation_head and "head_dist.weight" not in adapter.replaced:
                raise ModelError("the base has a distillation head and the adapter, which has other classes, none")
            trained = adapt(trained, classes=len(head), labels=labels, image_size=size)
    if size is not None:
        trained = adapt(trained, image_size=size)
    return dataclasses.replace(
        trained,
        labels=trained.labels if header.labels is None else header.labels,
        preprocess=trained.preprocess if header.preprocess is None else header.preprocess,
        multi_label=trained.multi_label if header.labels is None else header.multi_label,
        label_thresholds=(),
    )


def _fit_pool(trained: Trained, config: ViTConfig, head: Tensor, family: str) -> Trained:
    """The model whose features are what the classifier of transformers reads."""
    is_clip = family != EVA02 and FAMILIES[family].names is CLIP_NAMES
    if is_clip and config.norm_pre:
        raise ModelError(
            "the adapter has the classifier of a CLIPForImageClassification, which reads the mean of patches that no"
            " norm follows; train a head on the CLIP model instead: vitrail finetune PHOTOS --model CLIP"
        )
    if is_clip and config.pool == "map":
        return _change_pool(trained, "norm-mean")
    if head.ndim == 2 and head.shape[1] == 2 * config.width and config.pool == "class":
        return _change_pool(trained, "class-mean")
    return trained


def _change_pool(trained: Trained, pool: Pool) -> Trained:
    """The model without a head whose features are pooled in another way."""
    bare = adapt(trained, classes=0)
    assert isinstance(bare.model.config, ViTConfig)
    config = dataclasses.replace(bare.model.config, pool=pool)
    tensors = {name: tensor for name, tensor in bare.model.state_dict().items() if not name.startswith("attn_pool.")}
    change = f"pool: {bare.model.config.pool} -> {pool}"
    origin = dataclasses.replace(bare.origin, changes=(*bare.origin.changes, change))
    return dataclasses.replace(bare, model=assemble_model(config, tensors), origin=origin)


def _merge_addition(tensors: dict[str, Tensor], path: str, addition: LowRankAddition, scale: float) -> None:
    """Replace a layer's weight, and a bias that is added to, by their sums."""
    weight = tensors[f"{path}.weight"].float()
    lora_a, lora_b = addition.lora_a.float().flatten(1), addition.lora_b.float().flatten(1)
    if addition.lora_a.shape[1:] != weight.shape[1:] or len(lora_b) != len(weight):
        shapes = f"{tuple(addition.lora_a.shape)} and {tuple(addition.lora_b.shape)}"
        raise ModelError(f"the adapter adds {shapes} to {path!r}, whose weight is {tuple(weight.shape)}")
    magnitude = None if addition.magnitude is None else addition.magnitude.float().flatten()
    if magnitude is not None:
        _check_shape(f"{path}.lora_magnitude_vector", magnitude, weight.flatten(1)[:, 0])
    tensors[f"{path}.weight"] = merge_weight(weight.flatten(1), lora_a, lora_b, scale, magnitude).view_as(weight)
    if addition.bias is not None:
        bias = tensors.get(f"{path}.bias")
        if bias is None:
            raise ModelError(f"the adapter adds to the bias of {path!r}, which has none")
        _check_shape(f"{path}.lora_B.bias", addition.bias, bias)
        tensors[f"{path}.bias"] = bias + addition.bias.float() * scale


def _check_shape(name: str, tensor: Tensor, wanted: Tensor) -> None:
    if tensor.shape != wanted.shape:
        shapes = f"{tuple(tensor.shape)}, and the base has {tuple(wanted.shape)}"
        raise ModelError(f"the adapter's {name!r} has the shape {shapes}")
