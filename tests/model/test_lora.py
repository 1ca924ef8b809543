"""Low-rank updates: what they compute, what they train, and the plain model that they merge into."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import model_factory
from tests.model_factory import VARIANTS
from vitrail.config import LoRAConfig
from vitrail.errors import UsageError
from vitrail.model import lora
from vitrail.model.vit import Model, ViT

CONFIGS = {
    "qkv": {"rank": 4},
    "attention": {"rank": 3, "layers": "attention", "alpha": 5.0},
    "mlp": {"rank": 2, "layers": "mlp", "rank_stabilized": True},
    "all": {"rank": 2, "layers": "all", "dora": True},
}
CHOICES = pytest.mark.parametrize("config", [LoRAConfig(**each) for each in CONFIGS.values()], ids=CONFIGS)


def add(model: Model, config: LoRAConfig, seed: int = 0) -> Model:
    """A copy of the model with updates that add nothing yet."""
    added = copy.deepcopy(model)
    lora.add_lora(added, config, torch.Generator().manual_seed(seed))
    return added


def move(model: Model) -> Model:
    """Change everything that is trained."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def merge(model: Model, plain: Model) -> Model:
    """A copy of `plain` with the merged weights."""
    merged = copy.deepcopy(plain)
    merged.load_state_dict(lora.merge_tensors(model, dict(model.state_dict())))
    return merged


@CHOICES
def test_updates_start_with_what_the_model_computed(config: LoRAConfig) -> None:
    model = model_factory.build_vit()
    images = model_factory.draw_images(model.config)
    with torch.no_grad():
        torch.testing.assert_close(add(model, config)(images), model(images), atol=2e-6, rtol=0)


@CHOICES
@pytest.mark.parametrize("variant", ["plain", "no-bias", "map", "relative", "registers", "distilled", "hybrid"])
def test_the_merged_model_computes_the_same(variant: str, config: LoRAConfig) -> None:
    """Also in double precision, where nothing but an error could differ."""
    plain = model_factory.build_vit(**VARIANTS[variant]).double()
    moved = move(add(plain, config))
    images = model_factory.draw_images(plain.config).double()
    with torch.no_grad():
        before, expected, found = plain(images), moved(images), merge(moved, plain)(images)
    assert (expected - before).abs().max() > 0.05
    torch.testing.assert_close(found, expected, atol=1e-6 if config.dora else 1e-12, rtol=0)  # DoRA's norms are float32


def test_every_token_of_the_encoder_and_attention_weights_have_the_updates() -> None:
    plain = model_factory.build_vit()
    moved = move(add(plain, LoRAConfig(rank=4)))
    assert isinstance(moved, ViT)
    merged, images = merge(moved, plain), model_factory.draw_images(plain.config)
    assert isinstance(merged, ViT)
    with torch.no_grad():
        torch.testing.assert_close(moved.encode(images), merged.encode(images), atol=1e-5, rtol=0)
        x, _, grid = moved.embed(images)
        attentions = [next(iter(model.blocks)).attn for model in (moved, merged)]
        weights: list[Tensor] = [attention.compute_weights(x, grid) for attention in attentions]
    torch.testing.assert_close(weights[0], weights[1], atol=1e-5, rtol=0)


@CHOICES
def test_nothing_but_updates_and_head_has_a_gradient(config: LoRAConfig) -> None:
    model = move(add(model_factory.build_vit(), config))
    model(model_factory.draw_images(model.config)).square().sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    names = ("lora_A", "lora_B", *(["magnitude"] if config.dora else []))
    added = {
        f"blocks.{i}.{layer}.{name}" for i in range(3) for layer in lora.LAYER_NAMES[config.layers] for name in names
    }
    assert trained == added | {"head.weight", "head.bias"}


def test_the_norm_of_dora_is_a_constant_in_the_gradient() -> None:
    """As by hand: of y = m / n (W + s B A) x, with n the row's norm, the gradient of B is m / n s (A x)."""
    layer = lora.LoRALinear(nn.Linear(3, 2, bias=False), LoRAConfig(rank=1, alpha=0.5, dora=True))
    assert layer.magnitude is not None
    with torch.no_grad():
        layer.lora_A.normal_(generator=torch.Generator().manual_seed(0))
        layer.magnitude.mul_(3)
    x = torch.tensor([[1.0, -2.0, 0.5]])
    layer(x).sum().backward()
    assert layer.lora_B.grad is not None
    torch.testing.assert_close(layer.lora_B.grad, (3 * 0.5 * (x @ layer.lora_A.T)).expand(2, 1))


def test_a_row_of_zeros_is_no_division_by_zero() -> None:
    linear = nn.Linear(3, 2)
    nn.init.zeros_(linear.weight)
    layer = lora.LoRALinear(linear, LoRAConfig(rank=1, dora=True))
    nn.init.ones_(layer.lora_A)
    assert torch.isfinite(layer(torch.ones(1, 3))).all()


def test_a_is_drawn_by_the_seed_within_its_bounds() -> None:
    model, config = model_factory.build_vit(), LoRAConfig(rank=8, layers="all")
    first, again, other = (dict(add(model, config, seed).named_parameters()) for seed in (1, 1, 2))
    drawn = [name for name in first if name.endswith("lora_A")]
    assert len(drawn) == 12
    for name in drawn:
        bound = first[name].shape[1] ** -0.5
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
        assert 0.8 * bound < first[name].abs().max() <= bound
    assert len({first[name].flatten()[0].item() for name in drawn}) == 12


@pytest.mark.parametrize(
    ("fields", "scale"),
    [({}, 1.0), ({"alpha": 8.0}, 0.5), ({"rank_stabilized": True}, 4.0), ({"alpha": 2, "rank_stabilized": True}, 0.5)],
)
def test_the_scale_is_alpha_over_the_rank_or_its_root(fields: dict[str, Any], scale: float) -> None:
    assert LoRAConfig(rank=16, **fields).scale == scale


def test_a_resnet_is_refused() -> None:
    with pytest.raises(UsageError, match="a ResNet has none: omit --lora"):
        add(model_factory.build_bit(), LoRAConfig(rank=4))
