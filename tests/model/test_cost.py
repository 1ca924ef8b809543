"""Parameters and multiply-adds against published figures, a closed form and torch's own counter.

The memory of training against what autograd saves, and against numbers by hand.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests import model_factory
from tests.conftest import peer
from tests.model_factory import VARIANTS
from vitrail import presets
from vitrail.config import MaskedConfig, ViTConfig
from vitrail.errors import UsageError
from vitrail.model import cost
from vitrail.model.vit import Model, ViT, build_model

EXACT = {  # counted on the authors' own code: preset, image side -> parameters with 1000 classes
    ("ti16", 224): 5_717_416,
    ("ti16", 384): 5_790_376,
    ("b16", 224): 86_567_656,
    ("b16", 384): 86_859_496,
    ("l16", 224): 304_326_632,
    ("l16", 384): 304_715_752,
    ("h14", 224): 632_045_800,
    ("r-ti16", 224): 6_337_704,
    ("r-ti16", 384): 6_355_944,
    ("r26-s32", 224): 36_431_912,
    ("r26-s32", 384): 36_468_392,
    ("r50-b16", 224): 98_659_112,
    ("r50-b16", 384): 98_950_952,
    ("r50-l32", 224): 328_994_856,
    ("r50-l32", 384): 329_092_136,
}
MILLIONS = {  # timm's tables
    ("s16", 224): 22.05,
    ("s16", 384): 22.20,
    ("s32", 224): 22.88,
    ("s32", 384): 22.92,
    ("b32", 224): 88.22,
    ("b32", 384): 88.30,
    ("l32", 384): 306.63,
    ("bit-r50x1", 224): 25.55,
    ("bit-r50x3", 224): 217.32,
    ("bit-r101x1", 224): 44.54,
    ("bit-r101x3", 224): 387.93,
    ("bit-r152x2", 224): 236.34,
    ("bit-r152x4", 224): 936.53,
}
PRESET_OF_EACH_FAMILY = (
    "dinov2-s14", "dinov3-s16plus", "clip-b32", "siglip-b16", "eva02-ti14", "beit-b16", "pe-core-ti16",
)  # fmt: skip
UNITS = {  # of each stage, by the number of layers; a hybrid /16 moves the fourth stage's into the third
    "r": (),
    "r26": (2, 2, 2, 2),
    "r50": (3, 4, 6, 3),
    "r101": (3, 4, 23, 3),
    "r152": (3, 8, 36, 3),
    "r200": (3, 24, 36, 3),
}


class Family(NamedTuple):
    """What a preset of a family is measured by."""

    parameters: int
    timm_name: str
    absent_bias: Literal["none", "k", "patch"] = "none"
    timm_arguments: dict[str, int] | None = None


FAMILIES = {  # parameters with 1000 classes, timm's model, the biases that it lacks and a preset has
    "dinov2-s14": Family(22_013_800, "vit_small_patch14_dinov2"),
    "dinov2-b14": Family(86_493_928, "vit_base_patch14_dinov2"),
    "dinov2-l14": Family(304_252_904, "vit_large_patch14_dinov2"),
    "dinov2-g14": Family(1_136_306_664, "vit_giant_patch14_dinov2"),
    "dinov2-reg-s14": Family(22_014_952, "vit_small_patch14_reg4_dinov2"),
    "dinov2-reg-b14": Family(86_496_232, "vit_base_patch14_reg4_dinov2"),
    "dinov2-reg-l14": Family(304_255_976, "vit_large_patch14_reg4_dinov2"),
    "dinov2-reg-g14": Family(1_136_311_272, "vit_giant_patch14_reg4_dinov2"),
    "eupe-ti16": Family(5_684_968, "vit_tiny_patch16_dinov3_qkvb", "k"),
    "dinov3-s16": Family(21_985_768, "vit_small_patch16_dinov3_qkvb", "k"),
    "dinov3-s16plus": Family(29_082_088, "vit_small_plus_patch16_dinov3_qkvb", "k"),
    "dinov3-b16": Family(86_437_864, "vit_base_patch16_dinov3_qkvb", "k"),
    "dinov3-l16": Family(304_178_152, "vit_large_patch16_dinov3_qkvb", "k"),
    "dinov3-l16plus": Family(
        404_939_752, "vit_small_plus_patch16_dinov3_qkvb", "k", {"embed_dim": 1024, "depth": 24, "num_heads": 16}
    ),
    "dinov3-h16plus": Family(841_913_320, "vit_huge_plus_patch16_dinov3_qkvb", "k"),
    "dinov3-7b16": Family(6_720_127_976, "vit_7b_patch16_dinov3"),
    "clip-b32": Family(88_363_496, "vit_base_patch32_clip_quickgelu_224", "patch"),
    "clip-b16": Family(86_706_920, "vit_base_patch16_clip_quickgelu_224", "patch"),
    "clip-l14": Family(304_737_000, "vit_large_patch14_clip_quickgelu_224", "patch"),
    "clip-h14": Family(633_104_104, "vit_huge_patch14_clip_224", "patch"),
    "clip-g14": Family(1_013_673_064, "vit_giant_patch14_clip_224", "patch"),
    "clip-bigg14": Family(1_846_191_208, "vit_gigantic_patch14_clip_224", "patch"),
    "siglip-b16": Family(93_653_224, "vit_base_patch16_siglip_224"),
    "siglip-l16": Family(316_919_784, "vit_large_patch16_siglip_256"),
    "siglip-so400m14": Family(428_833_704, "vit_so400m_patch14_siglip_224"),
    "siglip-so400m16": Family(428_971_944, "vit_so400m_patch16_siglip_256"),
    "siglip-g16": Family(1_164_613_096, "vit_giantopt_patch16_siglip_256"),
    "eva-g14": Family(1_012_611_432, "eva_giant_patch14_224", "k"),
    "eva02-ti14": Family(5_697_448, "eva02_tiny_patch14_224", "k"),
    "eva02-s14": Family(22_010_728, "eva02_small_patch14_224", "k"),
    "eva02-b14": Family(86_536_936, "eva02_base_patch14_448", "k"),
    "eva02-l14": Family(304_318_376, "eva02_large_patch14_448", "k"),
    "eva02-clip-b16": Family(86_785_256, "eva02_base_patch16_clip_224", "k"),
    "eva02-clip-l14": Family(304_898_728, "eva02_large_patch14_clip_224", "k"),
    "mae-b16": Family(86_567_656, "vit_base_patch16_224"),
    "mae-l16": Family(304_326_632, "vit_large_patch16_224"),
    "mae-h14": Family(632_045_800, "vit_huge_patch14_224"),
    "ijepa-h14": Family(632_043_240, "vit_huge_patch14_gap_224"),
    "ijepa-g16": Family(1_012_777_576, "vit_giant_patch16_gap_224"),
    "deit3-s16": Family(22_059_496, "deit3_small_patch16_224"),
    "deit3-m16": Family(38_849_512, "deit3_medium_patch16_224"),
    "deit3-b16": Family(86_585_320, "deit3_base_patch16_224"),
    "deit3-l16": Family(304_374_760, "deit3_large_patch16_224"),
    "deit3-h14": Family(632_126_440, "deit3_huge_patch14_224"),
    "beit-b16": Family(86_540_200, "beit_base_patch16_224", "k"),
    "beit-l16": Family(304_455_144, "beit_large_patch16_224", "k"),
    "pe-core-ti16": Family(6_654_248, "vit_pe_core_tiny_patch16_384", "patch"),
    "pe-core-s16": Family(24_296_552, "vit_pe_core_small_patch16_384", "patch"),
    "pe-core-b16": Family(94_699_752, "vit_pe_core_base_patch16_224", "patch"),
    "pe-core-l14": Family(318_178_280, "vit_pe_core_large_patch14_336", "patch"),
    "pe-core-g14": Family(1_883_316_456, "vit_pe_core_gigantic_patch14_448", "patch"),
}
SIZES = {  # layers, width, MLP width: the paper's table 1 and its successors
    "ti": (12, 192, 768),
    "s": (12, 384, 1536),
    "m": (12, 512, 2048),
    "b": (12, 768, 3072),
    "l": (24, 1024, 4096),
    "so400m": (27, 1152, 4304),
    "h": (32, 1280, 5120),
    "g": (40, 1408, 6144),
    "bigg": (48, 1664, 8192),
}


def closed_form(layers: int, d: int, mlp: int, p: int, side: int = 224, k: int = 1000) -> int:
    """The paper's equations counted by hand."""
    n = (side // p) ** 2
    z0 = 3 * p * p * d + d + d + (n + 1) * d  # (1): E with its bias, x_class, E_pos
    msa = 2 * d + 4 * (d * d + d)  # (2): LN, then query, key, value and output
    feed_forward = 2 * d + (d * mlp + mlp) + (mlp * d + d)  # (3): LN, two layers
    y = 2 * d  # (4): LN
    return z0 + layers * (msa + feed_forward) + y + d * k + k


@pytest.mark.parametrize(("name", "side"), EXACT)
def test_parameters_equal_the_authors(name: str, side: int) -> None:
    assert cost.count_parameters(presets.get_preset_config(name, image_size=(side, side))) == EXACT[name, side]


@pytest.mark.parametrize(("name", "side"), MILLIONS)
def test_parameters_equal_timms_tables(name: str, side: int) -> None:
    parameters = cost.count_parameters(presets.get_preset_config(name, image_size=(side, side)))
    assert round(parameters / 1e6, 2) == MILLIONS[name, side]


def bottlenecks(units: tuple[int, ...], factor: int = 1, *, post_activation: bool) -> int:
    """A ResNet's stages counted by hand; a norm has a scale and a bias."""
    total, inputs = 0, 64 * factor
    for stage, stage_units in enumerate(units):
        width = 64 * factor * 2**stage
        for unit in range(stage_units):
            total += inputs * width + 9 * width * width + width * 4 * width  # 1 x 1, 3 x 3, 1 x 1
            total += 2 * (width + width + (4 * width if post_activation else inputs))  # three norms
            if unit == 0:
                total += inputs * 4 * width + (2 * 4 * width if post_activation else 0)  # the projection
            inputs = 4 * width
    return total


def hybrid_form(name: str) -> int:
    resnet, transformer = name.split("-")
    size = transformer.rstrip("0123456789")
    layers, d, mlp = SIZES[size]
    units, patch, n = UNITS[resnet], 1, 49  # 7 x 7 places at stride 32
    if resnet == "r":
        patch = 8
    elif transformer.endswith("16"):
        units, n = (3, 4, 9), 196
    features = 256 * 2 ** (len(units) - 1) if units else 64
    plain = closed_form(layers, d, mlp, p=16)
    own_embedding = (patch * patch * features * d) - (3 * 16 * 16 * d) + (n - 196) * d
    return plain + own_embedding + 49 * 3 * 64 + 2 * 64 + bottlenecks(units, post_activation=True)


def resnet_form(name: str, k: int = 1000) -> int:
    layers, factor = name.removeprefix("bit-").split("x")
    width, features = 64 * int(factor), 2048 * int(factor)
    return (
        49 * 3 * width
        + bottlenecks(UNITS[layers], int(factor), post_activation=False)
        + 2 * features
        + features * k
        + k
    )


@pytest.mark.parametrize("name", presets.list_presets())
def test_every_preset_has_the_parameters_of_the_papers_equations(name: str) -> None:
    """Fails with a KeyError for a preset whose size nobody wrote into the tables above."""
    if name in FAMILIES:
        expected = FAMILIES[name].parameters
    elif name.startswith("bit-"):
        expected = resnet_form(name)
    elif "-" in name:
        expected = hybrid_form(name)
    else:
        size = name.rstrip("0123456789")
        expected = closed_form(*SIZES[size], p=int(name[len(size) :]))
    assert cost.count_parameters(presets.get_preset_config(name)) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_timms_parameters_and_the_biases_that_it_lacks(name: str) -> None:
    """Those of keys, a width in each layer, or that of the patches; both without a head."""
    timm = peer("timm")
    config = presets.get_preset_config(name, classes=0)
    assert isinstance(config, ViTConfig)
    arguments: dict[str, Any] = (FAMILIES[name].timm_arguments or {}) | {"img_size": config.image_size}
    with torch.device("meta"):
        theirs = timm.create_model(FAMILIES[name].timm_name, num_classes=config.projection, **arguments)
    absent = {"none": 0, "k": config.depth * config.width, "patch": config.width}[FAMILIES[name].absent_bias]
    assert cost.count_parameters(config) - absent == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.parametrize(("layers", "giga"), [("50", 3.8), ("101", 7.6), ("152", 11.3)])
def test_resnets_cost_what_he_et_al_state_and_the_later_stride(layers: str, giga: float) -> None:
    """He et al. 2016 stride in a stage's first 1 x 1 convolution, BiT in the 3 x 3 behind it.

    So in BiT the first 1 x 1 of stages 2, 3 and 4 still sees the larger map, four times the places. That is the whole
    difference: three quarters of those three convolutions.
    """
    ours = cost.count_multiply_adds(presets.get_preset_config(f"bit-r{layers}x1"))
    maps = [(56, 256, 128), (28, 512, 256), (14, 1024, 512)]
    later = sum(side * side * inputs * width * 3 // 4 for side, inputs, width in maps)
    assert later == 231_211_008  # 0.23 G, for all three depths
    assert (ours - later) / 1e9 == pytest.approx(giga, rel=0.03)


@pytest.mark.parametrize(("name", "giga"), [("b16", 17.58), ("l16", 61.6), ("h14", 167.4)])
def test_multiply_adds_equal_the_published(name: str, giga: float) -> None:
    assert cost.count_multiply_adds(presets.get_preset_config(name)) / 1e9 == pytest.approx(giga, rel=0.005)


@pytest.mark.parametrize(
    ("name", "epochs", "exaflops"),
    [("b32", 7, 55), ("b16", 7, 224), ("l32", 7, 196), ("l16", 7, 783), ("l16", 14, 1567), ("h14", 14, 4262)],
)
def test_training_on_jft_costs_the_papers_exaflops(name: str, epochs: int, exaflops: float) -> None:
    counted = cost.count_training_flops(presets.get_preset_config(name), images=303_000_000 * epochs) / 1e18
    assert counted == pytest.approx(exaflops, rel=0.03)


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_multiply_adds_equal_torchs_counter(change: dict[str, Any]) -> None:
    config = model_factory.build_config(**change)
    with torch.device("meta"):
        model = ViT(config)
        images = torch.empty(1, config.channels, *config.image_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        logits = model.head(model.pool(model.encode(images)))
        if config.distillation_head:
            model.head_dist(model.encode(images)[:, 1])
    counted = counter.get_total_flops() // 2
    if config.distillation_head:  # the encoder ran twice
        counted -= cost.count_multiply_adds(
            model_factory.build_config(**change | {"distillation_head": False, "classes": 0})
        )
    assert logits.shape[0] == 1
    assert counted == cost.count_multiply_adds(config)


@pytest.mark.parametrize("name", ["bit-r50x1", "bit-r101x3", "r50-b16", "r26-s32", "r-ti16", *PRESET_OF_EACH_FAMILY])
def test_multiply_adds_of_presets_equal_torchs_counter(name: str) -> None:
    config = presets.get_preset_config(name)
    with torch.device("meta"):
        model = build_model(config)
        images = torch.empty(1, 3, *config.image_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if isinstance(model, ViT):
            model.head(model.pool(model.encode(images)))
        else:
            model(images)
    assert counter.get_total_flops() // 2 == cost.count_multiply_adds(config)


# --- memory of training ----------------------------------------------------------------------------------------------

# On the CPU group norm and softmax take bf16 as it comes, and dropout's mask is a number of its input's kind.
ON_CPU = {"bf16": cost.ElementSizes(matmul=2, norm=2, mask=2), "float32": cost.ElementSizes(matmul=4, norm=4, mask=4)}
LARGER: dict[str, Any] = {"width": 96, "mlp": 160, "heads": 4, "image_size": (64, 64), "depth": 3}


def count_saved_bytes(model: Model, images: Tensor, *, bf16: bool) -> int:
    """Bytes of the storages that autograd saves, without weights, with pixels."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # alive, so that no address is given twice

    def keep(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage

    def refuse(_: object) -> Tensor:
        raise AssertionError("there is no backward pass")

    model.train()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    with torch.autograd.graph.saved_tensors_hooks(keep, refuse), autocast:
        model(images)
    return sum(storage.nbytes() for storage in storages.values()) + images.nbytes


def check_saved_bytes(model: Model, precision: str, **rates: float) -> None:
    """Check that the bytes counted for 8 images are those that autograd saves."""
    activations = cost.count_activation_bytes(model.config, sizes=ON_CPU[precision], **rates)
    counted = cost.count_weight_copy_bytes(model.config, ON_CPU[precision]) + 8 * activations
    saved = count_saved_bytes(model, model_factory.draw_images(model.config, 8), bf16=precision == "bf16")
    assert counted == pytest.approx(saved, rel=0.03)


@pytest.mark.parametrize("precision", ON_CPU)
@pytest.mark.parametrize("change", model_factory.VARIANTS.values(), ids=model_factory.VARIANTS)
def test_a_vit_keeps_what_autograd_saves(change: dict[str, Any], precision: str) -> None:
    model = model_factory.build_vit(**(LARGER | change))
    check_saved_bytes(model, precision)


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_a_masked_model_takes_the_memory_of_a_model_without_its_head(change: dict[str, Any]) -> None:
    config = model_factory.build_config(**change)
    [equivalent] = cost.list_memory_equivalents(config, MaskedConfig(kind="mpp", mask_ratio=0.5, target="pixels"))
    assert isinstance(equivalent, ViTConfig)
    assert (equivalent.pool, equivalent.projection, equivalent.hidden_head) == ("norm-mean", 0, False)
    assert equivalent.classes == config.channels * config.stride**2
    assert (equivalent.rotary, equivalent.gated_mlp, equivalent.grid) == (config.rotary, config.gated_mlp, config.grid)


@pytest.mark.parametrize("precision", ON_CPU)
def test_a_resnet_keeps_what_autograd_saves(precision: str) -> None:
    model = model_factory.build_bit(image_size=(64, 64))
    check_saved_bytes(model, precision)


@pytest.mark.parametrize("precision", ON_CPU)
def test_a_hybrid_of_several_stages_keeps_what_autograd_saves(precision: str) -> None:
    stem = dataclasses.replace(model_factory.STEM, units=(1, 2))
    model = model_factory.build_vit(stem=stem, patch=1, image_size=(64, 64))
    check_saved_bytes(model, precision)


@pytest.mark.parametrize("precision", ON_CPU)
def test_dropout_keeps_its_masks(precision: str) -> None:
    model = model_factory.build_vit(**LARGER | {"depth": 6}).set_regularization(dropout=0.1)
    check_saved_bytes(model, precision, dropout=0.1)


def test_branches_that_are_dropped_keep_nothing() -> None:
    """At 8 images the rates 0, 1/4 and 1/2 leave whole numbers of them, so nothing is left to chance."""
    model = model_factory.build_vit(**LARGER | {"pool": "norm-mean"}).set_regularization(stochastic_depth=0.5)
    check_saved_bytes(model, "float32", stochastic_depth=0.5)


def test_b16_keeps_what_the_derivation_says() -> None:
    """By hand, in bf16 on a GPU: 20 D + 4 M + 4 H + 16 bytes a token and block, the last of which has one query."""
    n, d, m, h = 197, 768, 3072, 12
    block = n * (20 * d + 4 * m + 4 * h + 16)
    one = n * (4 * d + 8 + 2 * d + 4 * d) + 2 * d + 6 * h * n + 2 * d  # norm, input, k, v; q; softmax; output
    one += 4 * d + 8 + 2 * d + 4 * m  # norm and MLP of the class token
    embedding = 3 * 224 * 224 * 4 + 196 * 768 * 2
    head = 4 * d + 8 + 2 * d
    assert (
        cost.count_activation_bytes(presets.get_preset_config("b16"))
        == embedding + 11 * block + one + head
        == 62_508_384
    )


def test_recomputing_keeps_each_blocks_input_and_one_block() -> None:
    config = presets.get_preset_config("b16", pool="norm-mean", class_token=False)
    tokens, d, depth = 196, 768, 12
    block = tokens * (20 * d + 4 * 3072 + 4 * 12 + 16)
    saved_bytes = cost.count_activation_bytes(config) - cost.count_activation_bytes(config, recompute=True)
    assert saved_bytes == (depth - 1) * block - depth * tokens * d * 4


def test_the_parts_of_b16_by_hand() -> None:
    parameters = 86_567_656
    parts = cost.estimate_training_memory(presets.get_preset_config("b16"), optimizer="adam", ema=True, images=64)
    assert (parts.weights, parts.gradients, parts.optimizer, parts.ema) == (
        4 * parameters,
        4 * parameters,
        8 * parameters,
        4 * parameters,
    )
    assert parts.weight_copies == 2 * (12 * (4 * 768**2 + 2 * 768 * 3072) + 768 * 1000)
    assert parts.activations == 64 * 62_508_384
    assert parts.total == 20 * parameters + parts.weight_copies + parts.activations
    plain = cost.estimate_training_memory(presets.get_preset_config("b16"), optimizer="sgd", ema=False, images=64)
    assert (plain.optimizer, plain.ema) == (4 * parameters, 0)


def test_sharding_divides_the_state_and_puts_two_blocks_together() -> None:
    settings: dict[str, Any] = {"optimizer": "adam", "ema": True, "images": 64}
    whole = cost.estimate_training_memory(presets.get_preset_config("b16"), **settings)
    shard = cost.estimate_training_memory(presets.get_preset_config("b16"), **settings, shards=8)
    block = 4 * (768**2 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    assert shard.weights == whole.weights // 8
    assert shard.optimizer == whole.optimizer // 8
    assert shard.weight_copies - whole.weight_copies == 2 * 4 * block
    assert shard.activations == whole.activations


def test_a_resnet_has_nothing_to_recompute() -> None:
    with pytest.raises(UsageError, match="keeps its activations"):
        cost.count_activation_bytes(presets.get_preset_config("bit-r50x1"), recompute=True)
