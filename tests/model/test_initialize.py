"""The first weights: their scales by hand, and that they are a function of the seed."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests import model_factory
from vitrail.model.initialize import initialize_weights
from vitrail.model.vit import ViT
from vitrail.weights.trained import create


def build_vit(seed: int = 0, **changes: object) -> ViT:
    return initialize_weights(ViT(model_factory.build_config(**changes)), torch.Generator().manual_seed(seed))


def test_scales_are_those_of_the_papers_code() -> None:
    model = build_vit(width=256, mlp=512, patch=8, image_size=(64, 64), layer_scale=True, registers=2)
    block = model.blocks[0]
    for kernel in block.attn.qkv.weight.chunk(3):  # each of query, key and value is Xavier-uniform on its own
        bound = math.sqrt(6 / (256 + 256))
        assert kernel.abs().max() <= bound
        assert kernel.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert block.mlp.fc1.weight.std().item() == pytest.approx(math.sqrt(2 / (256 + 512)), rel=0.02)
    assert block.mlp.fc1.bias.std().item() == pytest.approx(1e-6, rel=0.2)
    assert model.patch_embed.proj.weight.std().item() == pytest.approx(math.sqrt(1 / (3 * 8 * 8)), rel=0.02)
    assert model.patch_embed.proj.weight.abs().max() <= 2 * math.sqrt(1 / (3 * 8 * 8)) / 0.8796 * 1.001
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.get_parameter("reg_token").std().item() == pytest.approx(1e-6, rel=0.2)
    for zero in (model.get_parameter("cls_token"), model.head.weight, model.head.bias, block.attn.qkv.bias):
        assert not zero.any()
    assert (block.ls1.gamma == 1e-5).all()
    assert (block.norm1.weight == 1).all()


@pytest.mark.parametrize("change", model_factory.VARIANTS.values(), ids=model_factory.VARIANTS)
def test_every_parameter_is_set(change: dict[str, object]) -> None:
    """Built on NaNs, nothing is left of them."""
    model = ViT(model_factory.build_config(**change))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialize_weights(model, torch.Generator().manual_seed(0))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_the_weights_are_a_function_of_the_seed() -> None:
    first, again, other = build_vit(0), build_vit(0), build_vit(1)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not torch.equal(first.blocks[0].attn.qkv.weight, other.blocks[0].attn.qkv.weight)


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    create("ti16", image_size=32, num_classes=10)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_fresh_head_says_nothing_and_its_bias_can_be_set() -> None:
    model = create("ti16", image_size=32, num_classes=10).eval()
    assert not model(torch.randn(2, 3, 32, 32)).any()
    biased = initialize_weights(ViT(model_factory.build_config()), torch.Generator().manual_seed(0), head_bias=-10.0)
    assert isinstance(biased.head, nn.Linear)
    assert (biased.head.bias == -10).all()


def test_mimetic_products_are_those_stated_of_every_head() -> None:
    """0.7 Z + 0.7 I to the rank of a head, nearest by Eckart and Young, and 0.4 Z - 0.4 I whole; Z drawn here again.

    The normal matrices are the last that are drawn: a head's for its queries and keys each, then the block's other.
    """
    config, width, rank = model_factory.build_config(), 32, 8
    generator = torch.Generator().manual_seed(0)
    plain = initialize_weights(ViT(config), generator)
    model = initialize_weights(ViT(config), torch.Generator().manual_seed(0), mimetic=True)

    def noise() -> Tensor:
        return torch.empty(width, width).normal_(0.0, width**-0.5, generator=generator)

    for block in model.blocks:
        query, key, value = block.attn.qkv.weight.detach().chunk(3)  # (D, D) each, rows are outputs
        for head in range(config.heads):
            rows = slice(head * rank, (head + 1) * rank)
            product = query[rows].mT @ key[rows]  # W_q W_k^T of this head, (D, D)
            wanted = 0.7 * noise() + 0.7 * torch.eye(width)
            assert torch.linalg.matrix_rank(product.double(), rtol=1e-5) == rank
            values = torch.linalg.svdvals(wanted.double())
            distance = torch.linalg.matrix_norm((product - wanted).double()).item()
            assert distance == pytest.approx(values[rank:].square().sum().sqrt().item(), rel=1e-5)
            torch.testing.assert_close(torch.linalg.svdvals(product.double())[:rank], values[:rank], rtol=1e-5, atol=0)
        product = value.mT @ block.attn.proj.weight.detach().mT  # W_v W_proj
        torch.testing.assert_close(product, 0.4 * noise() - 0.4 * torch.eye(width), rtol=0, atol=1e-5)
    for name, parameter in model.named_parameters():
        mimicked = name.endswith(("attn.qkv.weight", "attn.proj.weight"))
        assert torch.equal(parameter, plain.get_parameter(name)) != mimicked, name


def test_mimetic_tokens_attend_to_those_like_themselves() -> None:
    """Whatever was drawn: queries and keys of a token agree, and its value is taken away from it."""
    model = initialize_weights(
        ViT(model_factory.build_config(width=256, heads=4)), torch.Generator().manual_seed(1), mimetic=True
    )
    for block in model.blocks:
        query, key, value = block.attn.qkv.weight.detach().chunk(3)
        for head in range(4):
            rows = slice(64 * head, 64 * head + 64)
            trace = (query[rows] * key[rows]).sum().item()  # of W_q W_k^T
            assert trace > 0.7 * 64  # that of 0.7 I cut down to the head's rank
        product = block.attn.proj.weight.detach() @ value
        assert product.diagonal().mean().item() == pytest.approx(-0.4, abs=0.01)
        assert (product - torch.diag(product.diagonal())).std().item() == pytest.approx(0.4 / 16, rel=0.02)


def test_the_hidden_head_and_attention_pool_follow_flax_defaults() -> None:
    hidden = build_vit(width=256, hidden_head=True)
    assert hidden.pre_logits.fc.weight.std().item() == pytest.approx(256**-0.5, rel=0.02)
    pool = build_vit(width=256, pool="map", class_token=False).attn_pool
    assert pool.latent.abs().max() <= math.sqrt(6 / 257)
    assert pool.kv.weight.std().item() == pytest.approx(math.sqrt(2 / 512), rel=0.02)
