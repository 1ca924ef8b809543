"""The forward pass, by its properties and against itself."""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import model_factory
from tests.conftest import peer
from tests.model_factory import VARIANTS
from vitrail.errors import UsageError
from vitrail.model.positions import compute_relative_bias
from vitrail.model.vit import (
    Block,
    GatedMlp,
    QuickGELU,
    ViT,
    add_residual,
    attention_maps,
    crop_remainder,
    patchify,
)

LAST_BLOCK = {
    name: change for name, change in VARIANTS.items() if change.get("pool", "class") == "class" and name != "relative"
}


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_computes_logits_at_its_own_and_at_another_size(change: dict[str, Any]) -> None:
    model = model_factory.build_vit(**change)
    own = model(model_factory.draw_images(model.config))
    other = model(model_factory.draw_images(model.config, size=(40, 16)))
    assert own.shape == other.shape == (2, model.config.classes or model.config.num_features)
    assert torch.isfinite(own).all()
    assert torch.isfinite(other).all()


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_every_parameter_matters(change: dict[str, Any]) -> None:
    """Each parameter gets a gradient from the logits, so none is dead or left out."""
    model = model_factory.build_vit(**change)
    model(model_factory.draw_images(model.config)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name != "blocks.2.attn.offsets":  # between patches only, which the class token no longer reads
            assert parameter.grad.abs().max() > 0, name


@given(first=st.integers(0, 15), second=st.integers(0, 15), seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_swapping_two_patches_without_positions_swaps_their_tokens(first: int, second: int, seed: int) -> None:
    model = model_factory.build_vit(seed, positions="none")
    images = model_factory.draw_images(model.config, seed=seed)
    swapped = images.clone()
    (a, b), (c, d) = divmod(first, 4), divmod(second, 4)
    squares = [
        (slice(None), slice(None), slice(8 * r, 8 * r + 8), slice(8 * k, 8 * k + 8)) for r, k in ((a, b), (c, d))
    ]
    swapped[squares[0]], swapped[squares[1]] = images[squares[1]], images[squares[0]]
    order = list(range(17))
    order[1 + first], order[1 + second] = order[1 + second], order[1 + first]
    with torch.no_grad():
        torch.testing.assert_close(model.encode(swapped), model.encode(images)[:, order], atol=1e-5, rtol=1e-5)


def test_with_positions_the_order_of_patches_matters() -> None:
    for positions in ("learned-1d", "learned-2d", "sincos-2d", "relative"):
        model = model_factory.build_vit(positions=positions)
        images = model_factory.draw_images(model.config)
        moved = images.roll(8, dims=3)  # every patch one to the right, the last to the front
        with torch.no_grad():
            assert (model(images) - model(moved)).abs().max() > 1e-3, positions


@pytest.mark.parametrize("change", LAST_BLOCK.values(), ids=LAST_BLOCK)
def test_the_last_block_for_the_class_token_alone_equals_the_full_one(change: dict[str, Any]) -> None:
    model = model_factory.build_vit(**change)
    images = model_factory.draw_images(model.config)
    with torch.no_grad():
        short, full = model.encode(images, model.num_head_tokens), model.encode(images)
    assert short.shape[1] == 1 + model.config.distillation_token
    assert full.shape[1] == model.config.num_prefix_tokens + model.config.grid[0] * model.config.grid[1]
    torch.testing.assert_close(short, full[:, : short.shape[1]], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "rotary-normalized", "rotary-index", "bias-table", "gated-normed", "clip"])
def test_the_last_block_for_the_class_token_alone_has_the_full_ones_gradients(kind: str) -> None:
    model = model_factory.build_vit(**VARIANTS[kind]).double()
    images = model_factory.draw_images(model.config).double()
    model(images).square().sum().backward()
    short = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.head(model.pool(model.encode(images))).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(short[name], parameter.grad, msg=name)


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_attention_maps_reproduce_the_fused_output(change: dict[str, Any]) -> None:
    """Maps times values, projected, is what each block's attention gave."""
    model = model_factory.build_vit(**change)
    images = model_factory.draw_images(model.config)
    recorded: list[tuple[Tensor, Tensor]] = []
    hooks = [
        block.attn.register_forward_hook(lambda _, inputs, output: recorded.append((inputs[0], output)))
        for block in model.blocks
        if isinstance(block, Block)
    ]
    maps = list(attention_maps(model, images))
    rotary = model.compute_rotary(model.config.grid, images.device)
    for hook in hooks:
        hook.remove()
    assert len(maps) == model.config.depth
    tokens = model.config.num_prefix_tokens + model.config.grid[0] * model.config.grid[1]
    for block, attention, (tokens_in, out) in zip(model.blocks, maps, recorded, strict=True):
        assert isinstance(block, Block)
        assert attention.shape == (2, model.config.heads, tokens, tokens)
        torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:-1]))
        with torch.no_grad():
            values = block.attn.project_qkv(tokens_in, rotary=rotary)[2]
            mixed = block.attn.proj(block.attn.norm((attention @ values).transpose(1, 2).flatten(2)))
        torch.testing.assert_close(mixed, out, atol=1e-5, rtol=1e-5)


def test_attention_maps_come_one_layer_at_a_time() -> None:
    model = model_factory.build_vit()
    ran: list[int] = []
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
    maps = attention_maps(model, model_factory.draw_images(model.config))
    next(maps)
    assert ran == []
    next(maps)
    assert ran == [0]


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_hooks_observe_the_forward_pass(change: dict[str, Any]) -> None:
    """Embedding, branches, attention weights and encoder output of `encode`, without repeating any of it."""
    model = model_factory.build_vit(**change)
    images = model_factory.draw_images(model.config)
    outputs: dict[str, Tensor] = {}
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attn.fused = False
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: outputs.update({name: output}))
    with torch.no_grad():
        encoded = model.encode(images)
        x, _, _ = model.embed(images)
    prefix = model.config.num_prefix_tokens
    assert outputs["patch_embed"].shape[1] == x.shape[1] - prefix
    assert torch.equal(outputs["norm"], encoded)
    for i in range(1, model.config.depth):
        before, after = outputs[f"blocks.{i - 1}"], outputs[f"blocks.{i}"]
        if model.config.positions_at == "stem":
            torch.testing.assert_close(before + outputs[f"blocks.{i}.ls1"] + outputs[f"blocks.{i}.ls2"], after)
    weights = [outputs[f"blocks.{i}.attn.softmax"] for i in range(model.config.depth)]
    for observed, expected in zip(weights, attention_maps(model, images), strict=True):
        torch.testing.assert_close(observed, expected)


def test_attention_weights_can_be_observed_with_their_gradients() -> None:
    model = model_factory.build_vit(pool="map", class_token=False)
    weights: list[Tensor] = []
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attn.fused = False
        block.attn.softmax.register_forward_hook(lambda _, __, output: weights.append(output))
    model.attn_pool.softmax.register_forward_hook(lambda _, __, output: weights.append(output))
    logits = model(model_factory.draw_images(model.config))
    gradients = torch.autograd.grad(logits.sum(), weights)
    assert [gradient.shape for gradient in gradients] == [(2, 4, 16, 16)] * 3 + [(2, 4, 1, 16)]
    fused = model_factory.build_vit(pool="map", class_token=False)
    torch.testing.assert_close(logits, fused(model_factory.draw_images(model.config)), atol=1e-5, rtol=1e-5)


def test_patches_are_cut_as_the_convolution_reads_them() -> None:
    model = model_factory.build_vit(channels=5, image_size=(24, 40))
    images = model_factory.draw_images(model.config)
    with torch.no_grad():
        convolved = model.patch_embed.proj(images).flatten(2).mT
        torch.testing.assert_close(model.patch_embed(images), convolved, atol=1e-5, rtol=1e-5)


def test_positions_by_hand() -> None:
    """A 2-D position is its column's half concatenated with its row's; an every-layer table is added layer by layer."""
    model = model_factory.build_vit(positions="learned-2d", image_size=(16, 24))
    table = model.compute_positions((2, 3))
    assert table is not None
    with torch.no_grad():
        expected = torch.cat([model.pos_embed_x[0, 2], model.pos_embed_y[0, 1]])
    torch.testing.assert_close(table[0, 1 + 1 * 3 + 2], expected)
    assert (table[0, 0] == 0).all()  # the class token has none

    shared, every = (
        model_factory.build_vit(positions_at="every-layer-shared"),
        model_factory.build_vit(positions_at="every-layer"),
    )
    every.load_state_dict(shared.state_dict() | {"pos_embed": shared.pos_embed.detach().expand(3, -1, -1)})
    images = model_factory.draw_images(shared.config)
    with torch.no_grad():
        torch.testing.assert_close(every(images), shared(images))


def test_relative_positions_by_hand() -> None:
    """The logit gains query . offset(query index - key index), scaled like the rest; prefix tokens gain nothing."""
    model = model_factory.build_vit(positions="relative", image_size=(16, 24), depth=1)
    attention = model.blocks[0].attn
    q, k = (torch.randn(1, 4, 7, 8, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    with torch.no_grad():
        added = attention.compute_logits(q, k, (2, 3)) - q @ k.mT * 8**-0.5
        by_hand = torch.zeros(1, 4, 7, 7)
        for head in range(4):
            for i in range(6):
                for j in range(6):
                    offset = attention.offsets[i - j + 5, 8 * head : 8 * head + 8]
                    by_hand[0, head, 1 + i, 1 + j] = q[0, head, 1 + i] @ offset * 8**-0.5
    torch.testing.assert_close(added, by_hand, atol=1e-5, rtol=1e-5)


def test_a_bias_table_is_added_to_the_scaled_logits() -> None:
    model = model_factory.build_vit(positions="relative-bias", image_size=(16, 24), depth=1)
    attention = model.blocks[0].attn
    q, k = (torch.randn(1, 4, 7, 8, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    with torch.no_grad():
        added = attention.compute_logits(q, k, (2, 3)) - q @ k.mT * 8**-0.5
        biases = compute_relative_bias(attention.relative_position_bias_table, (2, 3), model.config)
        torch.testing.assert_close(added, biases[None], atol=1e-6, rtol=1e-5)
        first = attention.compute_logits(q[:, :, :1], k, (2, 3)) - q[:, :, :1] @ k.mT * 8**-0.5
        torch.testing.assert_close(first, biases[None, :, :1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
def test_a_gated_mlp_by_hand(norm: bool) -> None:
    """The first half of the first layer's outputs is the gate; a norm stands before the last layer."""
    block = model_factory.build_vit(gated_mlp=True, mlp_norm=norm, mlp=48).blocks[0]
    assert isinstance(block.mlp, GatedMlp)
    mlp, x = block.mlp, torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weight, bias = mlp.fc1.weight, mlp.fc1.bias
        gate, value = x @ weight[:48].T + bias[:48], x @ weight[48:].T + bias[48:]
        product = gate / (1 + (-gate).exp()) * value
        if norm:
            centered = product - product.mean(dim=-1, keepdim=True)
            product = centered / (centered.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
            product = product * mlp.norm.weight + mlp.norm.bias
        torch.testing.assert_close(mlp(x), product @ mlp.fc2.weight.T + mlp.fc2.bias, atol=1e-5, rtol=1e-5)


def test_quick_gelu_is_near_gelu_and_that_of_transformers() -> None:
    peer("transformers")
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 1001)
    torch.testing.assert_close(QuickGELU()(x), ACT2FN["quick_gelu"](x))
    assert (QuickGELU()(x) - nn.functional.gelu(x)).abs().max().item() == pytest.approx(0.0203, abs=1e-4)


def test_pixels_that_fill_no_patch_are_not_read() -> None:
    """Neither by the float model, nor by one in int8, whose patches are bytes."""
    model = model_factory.build_vit(drop_remainder=True)
    images = model_factory.draw_images(model.config, size=(39, 29))
    with torch.no_grad():
        torch.testing.assert_close(model(images), model(images[:, :, :32, :24]))
    assert torch.equal(crop_remainder(images, model.config), images[:, :, :32, :24])
    with pytest.raises(UsageError, match="39 x 29 does not divide"):
        model_factory.build_vit()(images)


def test_features_of_length_one_are_what_the_head_reads() -> None:
    model = model_factory.build_vit(projection=24, normalize_features=True)
    plain = model_factory.build_vit(projection=24)
    plain.load_state_dict(model.state_dict())
    images = model_factory.draw_images(model.config)
    with torch.no_grad():
        features = model.compute_features(images)
        assert features.shape == (2, 24)
        torch.testing.assert_close(features.norm(dim=-1), torch.ones(2))
        scaled = plain.compute_features(images)
        torch.testing.assert_close(features, scaled / scaled.norm(dim=-1, keepdim=True))
        torch.testing.assert_close(model(images), model.head(features))


def test_the_residual_stream_is_float32_under_autocast() -> None:
    """Also where nothing in float32 is joined to or added to the patches."""
    model = model_factory.build_vit(positions="none", class_token=False, pool="norm-mean")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        x, _, _ = model.embed(model_factory.draw_images(model.config))
    assert x.dtype == torch.float32


def test_distillation_averages_both_heads() -> None:
    model = model_factory.build_vit(distillation_token=True, distillation_head=True)
    images = model_factory.draw_images(model.config)
    with torch.no_grad():
        tokens = model.encode(images)
        expected = (model.head(tokens[:, 0]) + model.head_dist(tokens[:, 1])) / 2
        torch.testing.assert_close(model(images), expected, atol=1e-6, rtol=1e-6)


def test_dropout_stands_where_the_paper_has_it() -> None:
    """After every dense layer but the qkv projections, and after adding positions; nowhere inside the attention."""
    model = ViT(model_factory.build_config()).set_regularization(dropout=0.1)
    placed = [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p == 0.1]
    assert placed == ["pos_drop", *(f"blocks.{i}.{part}" for i in range(3) for part in ("attn.proj_drop", "mlp.drop"))]


def test_dropout_and_stochastic_depth_rest_outside_training() -> None:
    plain = model_factory.build_vit()
    noisy = ViT(plain.config).set_regularization(dropout=0.5, stochastic_depth=0.5)
    noisy.load_state_dict(plain.state_dict())
    images = model_factory.draw_images(plain.config)
    with torch.no_grad():
        assert torch.equal(noisy.eval()(images), plain(images))
        assert not torch.equal(noisy.train()(images), plain(images))


@given(batch=st.integers(1, 9), rate=st.sampled_from([0.1, 0.5, 0.9]), seed=st.integers(0, 999))
@settings(max_examples=50, deadline=None)
def test_stochastic_depth_computes_only_the_samples_it_keeps(batch: int, rate: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.arange(1.0, batch + 1).reshape(batch, 1, 1)
    computed: list[Tensor] = []

    def branch(kept: Tensor) -> Tensor:
        computed.append(kept)
        return kept * 10

    out = add_residual(x, branch, rate)
    kept = set(computed[0].flatten().tolist())
    expected = [v + (v * 10 / (1 - rate) if v in kept else 0) for v in x.flatten().tolist()]
    torch.testing.assert_close(out.flatten(), torch.tensor(expected))
    assert abs(len(kept) - batch * (1 - rate)) < 1


def test_stochastic_depth_drops_each_sample_with_its_probability() -> None:
    """Also in a batch of one, where whole batches must be dropped at times: 4 deviations of 4,000 draws."""
    torch.manual_seed(0)
    for batch in (1, 3):
        counts = torch.zeros(batch)
        for _ in range(4000):
            counts += add_residual(torch.zeros(batch, 1, 1), lambda kept: torch.ones_like(kept) * 0.7, 0.3).flatten()
        assert (counts / 4000 - 0.7).abs().max() < 4 * (0.3 * 0.7 / 4000) ** 0.5


def test_stochastic_depth_with_no_survivor_still_gives_every_parameter_a_gradient() -> None:
    torch.manual_seed(0)
    model = ViT(model_factory.build_config()).set_regularization(stochastic_depth=0.99)
    model.load_state_dict(model_factory.build_vit().state_dict())
    for _ in range(5):
        model.zero_grad(set_to_none=True)
        model.train()(model_factory.draw_images(model.config, count=1)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "kind",
    ["plain", "norm-mean", "map", "distilled", "relative", "every-layer", "layer-scale", "rotary-index", "bias-table",
     "gated-normed"],
)  # fmt: skip
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_blocks_computed_again_give_the_same_loss_and_gradients(kind: str, noise: float) -> None:
    """With dropout and stochastic depth too, whose draws are made again."""
    model = model_factory.build_vit(**VARIANTS[kind]).set_regularization(dropout=noise, stochastic_depth=noise).train()
    images = model_factory.draw_images(model.config, count=4)
    runs = list[int]()
    model.blocks[1].register_forward_pre_hook(lambda *_: runs.append(1))
    results = []
    for recompute in (False, True):
        model.recompute = recompute
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        loss = model(images).square().sum()
        loss.backward()
        after = torch.rand(3)  # whoever draws next is not disturbed either
        results.append([loss.detach(), after, *(parameter.grad for parameter in model.parameters())])
    assert len(runs) == 1 + 2
    assert all(map(torch.equal, *results))
    with torch.no_grad():
        model(images)
    assert len(runs) == 1 + 2 + 1


@pytest.mark.parametrize(
    ("stochastic_depth", "parts"), [(0.0, ["Block"] * 3), (0.5, ["Block", *["Attention", "Mlp"] * 2])]
)
def test_compiled_blocks_belong_to_the_model_and_not_to_its_copies(
    monkeypatch: pytest.MonkeyPatch, stochastic_depth: float, parts: list[str]
) -> None:
    """What torch compiles is counted and run as it is; the first block's stochastic depth is 0."""
    compiled = list[str]()

    def record_call(function: MethodType) -> Callable[..., Tensor]:
        def run(*arguments: Any) -> Tensor:
            compiled.append(type(function.__self__).__name__)
            return function(*arguments)

        return run

    monkeypatch.setattr(torch, "compile", record_call)
    model = model_factory.build_vit().set_regularization(stochastic_depth=stochastic_depth)
    images = model_factory.draw_images(model.config)
    with torch.no_grad():
        expected = model(images)
        assert not model.is_compiled
        model.compile_blocks()
        assert model.is_compiled
        assert torch.equal(copy.deepcopy(model)(images), expected)
        assert compiled == []
        assert torch.equal(model(images), expected)
    assert compiled == parts


@pytest.mark.parametrize("kind", ["rotary-index", "bias-table", "gated-normed"])
def test_a_block_is_one_graph_for_torchs_compiler(kind: str) -> None:
    """Captured whole, and run without generated code."""
    model = model_factory.build_vit(**VARIANTS[kind])
    with torch.no_grad():
        x, _, grid = model.embed(model_factory.draw_images(model.config))
        rotary = model.compute_rotary(grid, x.device)
        compiled = torch.compile(model.blocks[0], backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, grid, None, rotary), model.blocks[0](x, grid, None, rotary))


def test_a_size_that_does_not_fit_the_patch_is_refused_with_the_nearest_that_does() -> None:
    model = model_factory.build_vit()
    with pytest.raises(UsageError, match=r"33 x 47 .* patches of 8 x 8 pixels; the nearest is 32 x 48"):
        model(torch.zeros(1, 3, 33, 47))
    with pytest.raises(UsageError, match=r"\(batch, 3, height, width\), not \(1, 1, 32, 32\)"):
        model(torch.zeros(1, 1, 32, 32))
    with pytest.raises(UsageError, match=r"dropout is 1\.0"):
        ViT(model.config).set_regularization(dropout=1.0)


def test_patches_of_one_color_are_cut_in_raster_order() -> None:
    image = torch.arange(6.0).reshape(1, 1, 2, 3).repeat_interleave(4, 2).repeat_interleave(4, 3)
    assert patchify(image, 4)[0].unique(dim=1).flatten().tolist() == [0, 1, 2, 3, 4, 5]
