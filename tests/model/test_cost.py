"""Parameters and multiply-adds against published figures, a closed form and torch's own counter."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests import making
from tests.making import VARIANTS
from vitrail import presets
from vitrail.model import cost
from vitrail.model.build import build_model
from vitrail.model.vit import ViT

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
UNITS = {  # of each stage, by the number of layers; a hybrid /16 moves the fourth stage's into the third
    "r": (),
    "r26": (2, 2, 2, 2),
    "r50": (3, 4, 6, 3),
    "r101": (3, 4, 23, 3),
    "r152": (3, 8, 36, 3),
    "r200": (3, 24, 36, 3),
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
    if name.startswith("bit-"):
        expected = resnet_form(name)
    elif "-" in name:
        expected = hybrid_form(name)
    else:
        size = name.rstrip("0123456789")
        expected = closed_form(*SIZES[size], p=int(name[len(size) :]))
    assert cost.count_parameters(presets.get_preset_config(name)) == expected


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
    config = making.config(**change)
    with torch.device("meta"):
        model = ViT(config)
        images = torch.empty(1, config.channels, *config.image_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        logits = model.head(model.pool(model.encode(images)))
        if config.distillation_head:
            model.head_dist(model.encode(images)[:, 1])
    counted = counter.get_total_flops() // 2
    if config.distillation_head:  # the encoder ran twice
        counted -= cost.count_multiply_adds(making.config(**change | {"distillation_head": False, "classes": 0}))
    assert logits.shape[0] == 1
    assert counted == cost.count_multiply_adds(config)


@pytest.mark.parametrize("name", ["bit-r50x1", "bit-r101x3", "r50-b16", "r26-s32", "r-ti16"])
def test_multiply_adds_of_convolutions_equal_torchs_counter(name: str) -> None:
    config = presets.get_preset_config(name)
    with torch.device("meta"):
        model = build_model(config)
        images = torch.empty(1, 3, 224, 224)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if isinstance(model, ViT):
            model.head(model.pool(model.encode(images)))
        else:
            model(images)
    assert counter.get_total_flops() // 2 == cost.count_multiply_adds(config)
