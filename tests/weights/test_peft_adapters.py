"""PEFT as oracle: its adapters merged by us give the weights and logits of its own merge."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import model_factory
from tests.conftest import peer
from tests.weights.test_timm import build_timm_model, write_timm_folder
from tests.weights.test_transformers import build_transformers_model, make_images
from tests.weights.test_transformers_families import MODELS, build_model, draw_images
from vitrail.errors import ModelError
from vitrail.weights.load import load, save
from vitrail.weights.peft_adapters import apply_adapter, read_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.*(invalid shape|fan_in_fan_out)")
QV = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]
KINDS: dict[str, dict[str, Any]] = {
    "queries and values": {"target_modules": QV},
    "all layers, alpha": {"target_modules": ALL, "lora_alpha": 5},
    "rank-stabilized": {"target_modules": QV, "use_rslora": True, "lora_alpha": 8},
    "DoRA": {"target_modules": ALL, "use_dora": True},
    "rank and alpha by pattern": {
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 2, r"layers?\.1\.mlp\.fc1": 7},
        "alpha_pattern": {"v_proj": 9, "fc2": 1},
    },
    "some layers": {"target_modules": QV, "layers_to_transform": [1], "layers_pattern": ["layers", "layer"]},
    "a head of its own": {"target_modules": QV, "modules_to_save": ["classifier"]},
    "head and norm": {"target_modules": ["fc2"], "modules_to_save": ["classifier", "layernorm"]},
    "biases of its layers": {"target_modules": QV, "bias": "lora_only"},
    "all biases and a head": {"target_modules": QV, "bias": "all", "modules_to_save": ["classifier"]},
    "biases of the addition": {"target_modules": ALL, "lora_bias": True},
    "a convolution": {"target_modules": ["projection", "q_proj"]},
    "a convolution with DoRA": {"target_modules": ["projection"], "use_dora": True},
    "transposed, which PEFT ignores here": {"target_modules": QV, "fan_in_fan_out": True},
    "initialized in another way": {"target_modules": QV, "init_lora_weights": "gaussian", "lora_dropout": 0.1},
}
TIMM_KINDS: dict[str, dict[str, Any]] = {
    "fused": {"target_modules": ["qkv"]},
    "all layers, DoRA, a head": {
        "target_modules": ["qkv", "attn.proj", "fc1", "fc2"],
        "use_dora": True,
        "modules_to_save": ["head"],
    },
    "rank-stabilized, a convolution": {"target_modules": ["qkv", "proj"], "use_rslora": True, "bias": "all"},
}


def build_peft_model(model: Any, config: dict[str, Any]) -> Any:
    """A copy of the model with PEFT's adapter, of which everything that is trained is random."""
    peft = peer("peft")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**{"r": 4} | config)).eval()
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return adapted


Read = Callable[[Any, Tensor], Tensor]


def compute_logits(model: Any, images: Tensor) -> Tensor:
    output = model(images)
    logits: Tensor = getattr(output, "logits", output)
    return logits


def compute_merged_logits(adapted: Any, images: Tensor) -> Tensor:
    return compute_logits(copy.deepcopy(adapted).merge_and_unload(), images)


def check_merge(
    adapted: Any, base: Path, adapter: Path, images: Tensor, kind: str | None = None, read: Read = compute_logits
) -> None:
    """Our merge of base and adapter has the weights of PEFT's merge, and computes what PEFT's adapter computes.

    The base stays as it is. `kind` is that of timm's model. `read` computes the output to compare.
    """
    trained = load(base)
    before = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    merged = apply_adapter(trained, read_adapter(adapter), "adapter")
    assert all(torch.equal(before[name], tensor) for name, tensor in trained.model.state_dict().items())
    with torch.no_grad():
        ours, plain = merged.model(images), trained.model(images)
        expected = read(adapted, images)
    theirs, folder = adapted.merge_and_unload(), adapter.with_name("merged")
    theirs.save_pretrained(folder) if kind is None else write_timm_folder(theirs, kind, folder)
    wanted, tensors = load(folder).model.state_dict(), merged.model.state_dict()
    assert tensors.keys() == wanted.keys()
    assert max((tensors[name] - wanted[name]).abs().max().item() for name in wanted) <= 1e-6
    assert ours.shape != plain.shape or (ours - plain).abs().max() > 0.1, "the adapter changes nothing"
    assert (ours - expected).abs().max() <= 5e-5 * expected.abs().max().clamp(min=1)
    assert merged.origin.changes[-1].startswith("adapter adapter: LoRA of rank ")


def save_transformers(model: Any, kind: dict[str, Any], root: Path) -> tuple[Any, Path, Path]:
    """PEFT's model, the folder of the base, and that of the adapter."""
    adapted = build_peft_model(model, kind)
    model.save_pretrained(root / "base")
    adapted.save_pretrained(root / "adapter")
    return adapted, root / "base", root / "adapter"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ViT", "DINOv2"])
def test_transformers_adapters_merge_as_in_peft(name: str, kind: str, tmp_path: Path) -> None:
    model = build_transformers_model(name)
    adapted, base, adapter = save_transformers(model, KINDS[kind], tmp_path)
    check_merge(adapted, base, adapter, make_images(model))


@pytest.mark.parametrize("name", ["DeiT", "DINOv2 with registers", "ViT without qkv bias"])
def test_other_models_of_transformers_take_adapters(name: str, tmp_path: Path) -> None:
    model = build_transformers_model(name)
    kind = KINDS["all layers, alpha"] | {"modules_to_save": ["classifier"]}
    adapted, base, adapter = save_transformers(model, kind, tmp_path)
    check_merge(adapted, base, adapter, make_images(model))


DINOV3 = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
CLIP = ["q_proj", "k_proj", "v_proj", "fc1", "fc2", "patch_embedding"]
FAMILY_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DINOv3": ("DINOv3", {"target_modules": [*DINOV3, "patch_embeddings"], "bias": "all"}),
    "DINOv3, gated": ("DINOv3, gated", {"target_modules": [*DINOV3, "gate_proj"], "use_dora": True}),
    "DINOv3, one half of the gated MLP": ("DINOv3, gated", {"target_modules": ["up_proj"]}),
    "DINOv3, 7B": ("DINOv3, 7B", {"target_modules": ["q_proj", "v_proj", "gate_proj"], "lora_alpha": 9}),
    "DINOv2, giant": (
        "DINOv2, giant",
        {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"], "modules_to_save": ["classifier"]},
    ),
    "CLIP's image tower beside the other": (
        "CLIP",
        {"target_modules": r"vision_model.*(q_proj|fc1)|visual_projection"},
    ),
    "CLIP": ("CLIP, image tower", {"target_modules": [*CLIP, "out_proj"], "use_rslora": True}),
    "CLIP, projected": (
        "CLIP, projected image tower",
        {"target_modules": ["q_proj", "visual_projection"], "bias": "lora_only"},
    ),
    "CLIP's projection alone": ("CLIP, projected image tower", {"target_modules": ["visual_projection"]}),
    "SigLIP": ("SigLIP, image tower", {"target_modules": CLIP, "bias": "all"}),
    "SigLIP, attention pooling": ("SigLIP, image tower", {"target_modules": QV, "modules_to_save": ["head"]}),
    "SigLIP, classifier": ("SigLIP, classifier", {"target_modules": QV, "modules_to_save": ["classifier"]}),
    "BEiT": ("BEiT", {"target_modules": ALL, "modules_to_save": ["classifier", "layernorm"]}),
    "BEiT, biases": ("BEiT", {"target_modules": QV, "bias": "all"}),
    "BEiT, tables": ("BEiT", {"target_modules": QV, "modules_to_save": ["relative_position_bias"]}),
    "data2vec": ("data2vec", {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}),
    "I-JEPA": ("I-JEPA, classifier", {"target_modules": ALL, "modules_to_save": ["classifier"]}),
    "MAE": ("MAE", {"target_modules": QV}),
    "MSN": ("MSN", {"target_modules": ALL, "use_dora": True}),
}


@pytest.mark.parametrize("name", FAMILY_KINDS)
def test_adapters_of_each_family_merge_as_in_peft(name: str, tmp_path: Path) -> None:
    family, kind = FAMILY_KINDS[name]
    adapted, base, adapter = save_transformers(build_model(family), kind, tmp_path)
    read = MODELS[family][2]

    def read_adapted(model: Any, images: Tensor) -> Tensor:
        return read(model.get_base_model(), images)

    check_merge(adapted, base, adapter, draw_images(family, (32, 32)), read=read_adapted)


@pytest.mark.parametrize("kind", TIMM_KINDS)
@pytest.mark.parametrize("name", ["plain", "registers, avg-pool", "layer scale"])
def test_timm_adapters_merge_as_in_peft(name: str, kind: str, tmp_path: Path) -> None:
    model = build_timm_model(name)
    adapted = build_peft_model(model, TIMM_KINDS[kind])
    adapted.save_pretrained(tmp_path / "adapter")
    base = write_timm_folder(model, name, tmp_path / "base")
    check_merge(adapted, base, tmp_path / "adapter", model_factory.draw_images(load(base).model.config), name)


TIMM_FAMILY_KINDS: dict[str, dict[str, Any]] = {
    "DINOv3 without biases": {"target_modules": ["qkv", "attn.proj", "fc1", "fc2"], "modules_to_save": ["head"]},
    "DINOv3": {"target_modules": ["qkv", "fc2"], "bias": "all"},
    "DINOv3, split SwiGLU": {"target_modules": ["attn.proj", "fc1_g", "fc1_x"], "use_dora": True},
    "EVA-02, packed": {"target_modules": ["qkv", "fc1"]},
    "EVA-02, split": {"target_modules": ["q_proj", "v_proj", "fc1_g"], "bias": "lora_only"},
    "packed SwiGLU": {"target_modules": ["qkv", "fc1"], "modules_to_save": ["head"]},
    "BEiT": {"target_modules": ["qkv", "fc1"], "bias": "all"},
    "perception encoder": {"target_modules": ["qkv", "fc1"]},
    "axial RoPE": {"target_modules": ["qkv", "fc1"]},
    "CLIP": {"target_modules": ["qkv", "attn.proj"], "modules_to_save": ["head"]},
}


@pytest.mark.parametrize("name", TIMM_FAMILY_KINDS)
def test_adapters_of_timms_families_merge_as_in_peft(name: str, tmp_path: Path) -> None:
    """Compared after PEFT's merge: timm adds query and value biases past the layer of the adapter, which it skips."""
    model = build_timm_model(name)
    adapted = build_peft_model(model, TIMM_FAMILY_KINDS[name])
    adapted.save_pretrained(tmp_path / "adapter")
    base = write_timm_folder(model, name, tmp_path / "base")
    images = model_factory.draw_images(load(base).model.config)
    check_merge(adapted, base, tmp_path / "adapter", images, name, compute_merged_logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_multiplied_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build_transformers_model("ViT")
    adapted, base, adapter = save_transformers(model, KINDS["queries and values"], tmp_path)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(parameter.to(dtype))
    path = adapter / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    check_merge(adapted, base, adapter, make_images(model))


V4_NAMES = {
    "ViT": {
        r"vit\.layers\.": "vit.encoder.layer.",
        r"attention\.q_proj": "attention.attention.query",
        r"attention\.v_proj": "attention.attention.value",
        r"attention\.k_proj": "attention.attention.key",
        r"attention\.o_proj": "attention.output.dense",
        r"mlp\.fc1": "intermediate.dense",
        r"mlp\.fc2": "output.dense",
    },
    "DINOv2": {
        r"attention\.q_proj": "attention.attention.query",
        r"attention\.v_proj": "attention.attention.value",
        r"attention\.k_proj": "attention.attention.key",
        r"attention\.o_proj": "attention.output.dense",
    },
}


def rename_as_in_v4(adapter: Path, name: str) -> None:
    """Give an adapter the names that it would have had in transformers before 5.9."""

    def rename(text: str) -> str:
        for pattern, replacement in V4_NAMES[name].items():
            text = re.sub(pattern, replacement, text)
        return text

    path = adapter / "adapter_model.safetensors"
    save_file({rename(key): tensor for key, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("name", V4_NAMES)
@pytest.mark.parametrize("kind", ["all layers, alpha", "DoRA", "a head of its own", "biases of its layers"])
def test_names_before_transformers_5_9_are_read(name: str, kind: str, tmp_path: Path) -> None:
    """PEFT itself refuses them beside today's transformers."""
    model = build_transformers_model(name)
    adapted, base, adapter = save_transformers(model, KINDS[kind], tmp_path)
    rename_as_in_v4(adapter, name)
    check_merge(adapted, base, adapter, make_images(model))


V4_FAMILY_NAMES: dict[str, tuple[str, str]] = {  # names in memory, and before transformers 5.9
    "DINOv3": (r"model\.model\.", "model."),
    "CLIP, image tower": (r"model\.encoder", "model.vision_model.encoder"),
    "SigLIP, image tower": (r"model\.encoder", "model.vision_model.encoder"),
    "BEiT": (r"beit\.layers\.(\d)\.attention\.([qv])_proj", r"beit.encoder.layer.\1.attention.attention.\2"),
}


@pytest.mark.parametrize("family", V4_FAMILY_NAMES)
def test_names_of_families_before_transformers_5_9_are_read(family: str, tmp_path: Path) -> None:
    _, base, adapter = save_transformers(build_model(family), KINDS["queries and values"], tmp_path)
    wanted = load(base, adapter).model.state_dict()
    path, (pattern, replacement) = adapter / "adapter_model.safetensors", V4_FAMILY_NAMES[family]
    tensors = load_file(path)
    renamed = {re.sub(pattern, replacement, key): tensor for key, tensor in tensors.items()}
    renamed = {key.replace(".q.lora", ".query.lora").replace(".v.lora", ".value.lora"): renamed[key] for key in renamed}
    assert not renamed.keys() & tensors.keys()
    save_file(renamed, path)
    found = load(base, adapter).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_classifier_on_siglip_reads_the_mean_of_patches(tmp_path: Path) -> None:
    """Its base is the whole model, which has attention pooling and no classifier."""
    model = build_model("SigLIP, classifier")
    adapted, _, adapter = save_transformers(model, FAMILY_KINDS["SigLIP, classifier"][1], tmp_path)
    whole = build_model("SigLIP")
    whole.vision_model.load_state_dict(model.vision_model.state_dict(), strict=False)
    whole.save_pretrained(tmp_path / "whole")
    assert load(tmp_path / "whole").model.config.pool == "map"
    check_merge(adapted, tmp_path / "whole", adapter, draw_images("SigLIP", (32, 32)))


@pytest.mark.parametrize(
    ("family", "kind", "message"),
    [
        (
            "CLIP",
            {"target_modules": ["q_proj"]},
            r"changes 'text_model\.encoder\.layers\.0.*no part of the image model",
        ),
        ("CLIP", {"target_modules": ["text_projection"]}, "changes 'text_projection.*merge_and_unload"),
        ("SigLIP, image tower", {"target_modules": ["attention"]}, r"changes 'head\.attention.*in its own way"),
        (
            "BEiT, one table for all layers",
            {"target_modules": QV, "modules_to_save": ["shared_position_bias"]},
            "bias_table.*all layers share it",
        ),
        ("SigLIP 2, NaFlex image tower", {"target_modules": ["patch_embedding"]}, r"adds \(4, 192\).*patch_embed"),
        ("CLIP, image tower", {"target_modules": QV, "modules_to_save": ["embeddings"]}, r"has the shape \(48,\)"),
    ],
)
def test_what_an_image_model_has_no_place_for_is_refused(
    family: str, kind: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, base, adapter = save_transformers(build_model(family), kind, tmp_path)
    with pytest.raises(ModelError, match=message):
        load(base, adapter)


def test_a_projection_that_the_base_lacks_is_refused(tmp_path: Path) -> None:
    _, _, adapter = save_transformers(
        build_model("CLIP, projected image tower"), {"target_modules": ["visual_projection"]}, tmp_path
    )
    build_model("CLIP, image tower").save_pretrained(tmp_path / "bare")
    with pytest.raises(ModelError, match=r"bare has no 'projection\.weight'"):
        load(tmp_path / "bare", adapter)


def test_a_classifier_of_transformers_on_clip_is_refused(tmp_path: Path) -> None:
    """It reads patches that no norm follows."""
    _, base, adapter = save_transformers(build_model("CLIP"), {"target_modules": r"vision_model.*q_proj"}, tmp_path)
    path = adapter / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.classifier.weight": torch.ones(5, 48)}, path)
    with pytest.raises(ModelError, match="the classifier of a CLIPForImageClassification"):
        load(base, adapter)


def test_an_adapter_of_the_bare_backbone_is_read(tmp_path: Path) -> None:
    """Trained on a ViTModel: no prefix before its layers."""
    model = build_transformers_model("ViT")
    adapted, base, adapter = save_transformers(model, KINDS["queries and values"], tmp_path)
    path = adapter / "adapter_model.safetensors"
    save_file({key.replace(".vit.", "."): tensor for key, tensor in load_file(path).items()}, path)
    check_merge(adapted, base, adapter, make_images(model))


def test_a_new_head_brings_its_number_of_classes_and_takes_the_labels_away(tmp_path: Path) -> None:
    """As the usual recipe has it: the base has another head, which the trained one replaces."""
    model = build_transformers_model("ViT")
    _, base, adapter = save_transformers(model, KINDS["a head of its own"], tmp_path)
    trained = load(base)
    other = model_factory.build_trained(model_factory.build_vit(classes=9, depth=3, width=48, mlp=96))
    save(other, tmp_path / "other.safetensors")
    merged = load(tmp_path / "other.safetensors", adapter)
    assert (merged.model.config.classes, merged.labels) == (5, None)
    assert torch.equal(
        merged.model.state_dict()["head.weight"],
        load_file(adapter / "adapter_model.safetensors")["base_model.model.classifier.weight"],
    )
    assert any("head.weight (9, 48)" in change for change in merged.origin.changes)
    assert trained.labels == load(base, adapter).labels


def test_a_head_that_reads_class_token_and_mean_changes_the_pooling(tmp_path: Path) -> None:
    """DINOv2's backbone has no head, and its classifier in transformers reads both."""
    model = build_transformers_model("DINOv2")
    adapted, _, adapter = save_transformers(model, KINDS["a head of its own"], tmp_path)
    model.dinov2.save_pretrained(tmp_path / "backbone")
    assert load(tmp_path / "backbone").model.config.pool == "class"
    check_merge(adapted, tmp_path / "backbone", adapter, make_images(model))


def change_config(adapter: Path, **fields: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "the peft_type 'IA3'; LORA is read"),
        ({"peft_type": None}, "the peft_type None"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4', which may change the base's"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights='corda'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights='lora_ga'"),
        ({"init_lora_weights": "of next year"}, "init_lora_weights='of next year'"),
        ({"use_qalora": True}, "use_qalora=True, which is not supported"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora="),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens="),
        ({"arrow_config": {"top_k": 3}}, "arrow_config="),
        ({"velora_config": {"num_groups": 1}}, "velora_config="),
        ({"monteclora_config": {"a": 1}}, "monteclora_config="),
        ({"kasa_config": {"a": 1}}, "kasa_config="),
        ({"trainable_token_indices": [0]}, "trainable_token_indices="),
        ({"target_parameters": ["a.weight"]}, "target_parameters="),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
        ({"of_next_year": 1}, "of_next_year=1"),
        ({"r": 8}, "its rank is 8"),
        ({"lora_alpha": None}, "its alpha None"),
        ({"use_dora": True}, "of 'vit.layers.0.attention.q_proj' it holds lora_A.weight, lora_B.weight"),
        ({"rank_pattern": {"(": 3}}, "'\\(' is no regular expression"),
        ({"alpha_pattern": 3}, "'alpha_pattern' in its JSON is not an object"),
    ],
)
def test_what_is_more_than_a_sum_is_refused_by_its_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, base, adapter = save_transformers(build_transformers_model("ViT"), KINDS["queries and values"], tmp_path)
    load(base, adapter)
    change_config(adapter, **fields)
    with pytest.raises(ModelError, match=message):
        load(base, adapter)


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        (
            "vit.layers.0.attention.q_proj.lora_embedding_A",
            (4, 48),
            "not supported: 'vit.layers.0.attention.q_proj.lora",
        ),
        ("vit.layers.0.attention.gate.lora_A.weight", (4, 48), "no place for: 'layers.0.attention.gate.'"),
        ("vit.layers.9.attention.q_proj.base_layer.bias", (48,), "has no 'blocks.9.attn.q.bias'"),
        ("vit.layers.0.attention.q_proj.base_layer.bias", (47,), "has the shape \\(47,\\), and the base has \\(48,\\)"),
        ("vit.unknown.weight", (48,), "no place for: 'unknown.weight'"),
    ],
)
def test_tensors_that_the_base_has_no_place_for_are_refused(
    key: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    _, base, adapter = save_transformers(build_transformers_model("ViT"), KINDS["queries and values"], tmp_path)
    path = adapter / "adapter_model.safetensors"
    save_file(load_file(path) | {f"base_model.model.{key}": torch.ones(shape)}, path)
    with pytest.raises(ModelError, match=message):
        load(base, adapter)


def test_an_adapter_for_another_width_is_refused(tmp_path: Path) -> None:
    _, _, adapter = save_transformers(build_transformers_model("ViT"), KINDS["queries and values"], tmp_path)
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "other.safetensors")
    with pytest.raises(
        ModelError, match=r"adds \(4, 48\) and \(48, 4\) to 'blocks.0.attn.q', whose weight is \(32, 32\)"
    ):
        load(tmp_path / "other.safetensors", adapter)


def test_an_adapter_alone_is_no_model_and_names_the_command(tmp_path: Path) -> None:
    _, base, adapter = save_transformers(build_transformers_model("ViT"), KINDS["queries and values"], tmp_path)
    change_config(adapter, base_model_name_or_path="org/base")
    for given in (adapter, adapter / "adapter_model.safetensors"):
        with pytest.raises(ModelError, match=f"vitrail convert hf:org/base OUT.safetensors --adapter {adapter}"):
            load(given)
    with pytest.raises(ModelError, match=f"{base} is no adapter: it has no adapter_config.json"):
        load(base, base)
    with pytest.raises(ModelError, match=f"give {adapter}"):
        load(base, tmp_path)


def test_a_pickle_is_read_without_running_it(tmp_path: Path) -> None:
    model = build_transformers_model("ViT")
    adapted, base, adapter = save_transformers(model, KINDS["queries and values"], tmp_path)
    path = adapter / "adapter_model.safetensors"
    torch.save(load_file(path), adapter / "adapter_model.bin")
    path.unlink()
    check_merge(adapted, base, adapter, make_images(model))
    torch.save({"base_model.model.x": Path}, adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match="holds Python objects other than tensors"):
        load(base, adapter)
