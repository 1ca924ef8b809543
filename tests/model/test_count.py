"""Parameters and multiply-adds against published figures, a closed form and torch's own counter."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests import making
from tests.making import VARIANTS
from vitrail import presets
from vitrail.model import count
from vitrail.model.vit import ViT

EXACT = {  # counted on the authors' own code: preset, image side -> parameters with 1000 classes
    ("ti16", 224): 5_717_416,
    ("ti16", 384): 5_790_376,
    ("b16", 224): 86_567_656,
    ("b16", 384): 86_859_496,
    ("l16", 224): 304_326_632,
    ("l16", 384): 304_715_752,
    ("h14", 224): 632_045_800,
}
MILLIONS = {  # timm's tables
    ("s16", 224): 22.05,
    ("s16", 384): 22.20,
    ("s32", 224): 22.88,
    ("s32", 384): 22.92,
    ("b32", 224): 88.22,
    ("b32", 384): 88.30,
    ("l32", 384): 306.63,
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
    assert count.parameters(presets.vit(name, image_size=(side, side))) == EXACT[name, side]


@pytest.mark.parametrize(("name", "side"), MILLIONS)
def test_parameters_equal_timms_tables(name: str, side: int) -> None:
    found = count.parameters(presets.vit(name, image_size=(side, side)))
    assert round(found / 1e6, 2) == MILLIONS[name, side]


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_has_the_parameters_of_the_papers_equations(name: str) -> None:
    """Fails with a KeyError for a preset whose size nobody wrote into the table above."""
    size = name.rstrip("0123456789")
    assert count.parameters(presets.vit(name)) == closed_form(*SIZES[size], p=int(name[len(size) :]))


@pytest.mark.parametrize(("name", "giga"), [("b16", 17.58), ("l16", 61.6), ("h14", 167.4)])
def test_multiply_adds_equal_the_published(name: str, giga: float) -> None:
    assert count.multiply_adds(presets.vit(name)) / 1e9 == pytest.approx(giga, rel=0.005)


@pytest.mark.parametrize(
    ("name", "epochs", "exaflops"),
    [("b32", 7, 55), ("b16", 7, 224), ("l32", 7, 196), ("l16", 7, 783), ("l16", 14, 1567), ("h14", 14, 4262)],
)
def test_training_on_jft_costs_the_papers_exaflops(name: str, epochs: int, exaflops: float) -> None:
    found = count.training_flops(presets.vit(name), images=303_000_000 * epochs) / 1e18
    assert found == pytest.approx(exaflops, rel=0.03)


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
        counted -= count.multiply_adds(making.config(**change | {"distillation_head": False, "classes": 0}))
    assert logits.shape[0] == 1
    assert counted == count.multiply_adds(config)
