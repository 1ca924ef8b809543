"""Corruption, targets, gradients and cost of masked models, by hand, by painted images and by torch's own counter."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests import model_factory
from tests.model_factory import STEM, VARIANTS
from vitrail import presets
from vitrail.config import MaskedConfig, MaskedTarget, PreprocessConfig, ViTConfig
from vitrail.config.training import MASK_TOKEN, UNCHANGED_PATCH
from vitrail.data.batch_augment import draw_masked_patches
from vitrail.data.randomness import CounterRNG
from vitrail.data.transforms import normalize
from vitrail.errors import UsageError
from vitrail.model import cost
from vitrail.model.masked import (
    MaskedViT,
    build_decoder_config,
    compute_masked_losses,
    corrupt_patches,
    count_outputs_per_patch,
    initialize_masked_heads,
)
from vitrail.model.vit import ViT, patchify

UNTRAINED = ("vit.attn_pool.", "vit.pre_logits.", "vit.projection.")
TARGETS: tuple[MaskedTarget, ...] = ("mean-color", "4x4-colors", "pixels", "normalized-pixels")
MASKABLE = {name: change for name, change in VARIANTS.items() if name not in ("grey", "distilled")}
UNFIT_FOR_MAE = (
    "relative",
    "every-layer",
    "every-layer-shared",
    "2d-every-layer",
    "sincos-shared",
    "hybrid",
    *("rotary-normalized", "rotary-index", "rotary-mean", "bias-table", "bias-table-mean"),
)  # for mae


def masked_config(kind: Any = "mpp", target: MaskedTarget = "mean-color") -> MaskedConfig:
    return MaskedConfig(kind=kind, mask_ratio=0.5 if kind == "mpp" else 0.75, target=target)


def build_preprocess(config: ViTConfig) -> PreprocessConfig:
    values = (0.4, 0.5, 0.6)[: config.channels]
    return PreprocessConfig(
        size=config.image_size, resize=config.image_size, mean=values, std=(0.3, 0.2, 0.25)[: len(values)]
    )


def build_masked_vit(masked: MaskedConfig | None = None, seed: int = 0, **changes: Any) -> MaskedViT:
    """A small masked model; its head is not zero, so that gradients reach everything."""
    vit = model_factory.build_vit(seed, **({"classes": 0} | changes))
    model = MaskedViT(vit, masked or masked_config(), build_preprocess(vit.config))
    initialize_masked_heads(model, torch.Generator().manual_seed(seed))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(seed + 1))
    return model.eval()


def random_bytes(config: ViTConfig, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, config.channels, *config.image_size), dtype=torch.uint8, generator=generator)


def build_batch(model: MaskedViT, count: int = 3) -> tuple[Tensor, Tensor]:
    """Images, for mpp one more, and their masking."""
    config = model.vit.config
    pixels = random_bytes(config, count + (model.decoder is None))
    masking = draw_masked_patches(CounterRNG(0, np.arange(count)), model.masked, math.prod(config.grid))
    return normalize(pixels, build_preprocess(config)), torch.from_numpy(masking)


# --- masking ---------------------------------------------------------------------------------------------------------


def test_corruption_by_hand() -> None:
    """Three patches of width 2: masked, replaced by the next image's patch 0, itself."""
    patches = torch.arange(3 * 3 * 2.0).reshape(3, 3, 2)
    token = torch.tensor([[[-1.0, -2.0]]])
    replacements = torch.tensor([[MASK_TOKEN, 0, UNCHANGED_PATCH], [2, MASK_TOKEN, UNCHANGED_PATCH]])
    expected = torch.tensor([[[-1, -2], [6, 7], [4, 5]], [[16, 17], [-1, -2], [10, 11]]])
    same = torch.nn.Identity()
    assert torch.equal(corrupt_patches(patches, replacements, same, token), expected.float())
    alone = corrupt_patches(
        patches[:2], replacements, same, token
    )  # without a partner, the last image's next is the first
    assert torch.equal(alone[0], expected[0].float())
    assert alone[1].tolist() == [[4, 5], [-1, -2], [10, 11]]


@pytest.mark.parametrize("change", MASKABLE.values(), ids=MASKABLE)
def test_exchanging_patches_is_exchanging_embeddings(change: dict[str, Any]) -> None:
    """The paper corrupts embeddings; so does this, computed from the other end."""
    model = build_masked_vit(**change)
    images, masking = build_batch(model)
    embed = model.vit.patch_embed
    embeddings, replacements = embed(images), masking[:, 1]
    expected = embeddings[:-1].clone()
    for image, place in (replacements != UNCHANGED_PATCH).nonzero().tolist():
        other = int(replacements[image, place])
        expected[image, place] = model.mask_token[0, 0] if other == MASK_TOKEN else embeddings[image + 1, other]
    corrupted = corrupt_patches(embed.extract_patches(images), replacements, embed.project, model.mask_token)
    torch.testing.assert_close(corrupted, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("change", MASKABLE.values(), ids=MASKABLE)
def test_what_is_masked_is_not_seen_and_what_is_kept_is(change: dict[str, Any]) -> None:
    """Pixels of a masked patch change no prediction (but through a hybrid's stem); those of a kept one change all."""
    model = build_masked_vit(**change)
    images, masking = build_batch(model)
    replacements = masking[0, 1]
    side = model.vit.config.stride
    across = model.vit.config.grid[1]

    def changed(patch: int) -> Tensor:
        row, column = divmod(patch, across)
        other = images.clone()
        other[0, :, row * side : (row + 1) * side, column * side : (column + 1) * side] += 1.0
        return model(other, masking)[0]

    with torch.no_grad():
        before = model(images, masking)[0]
        if model.vit.config.stem is None:
            assert torch.equal(changed(int((replacements == MASK_TOKEN).nonzero()[0])), before)
        assert not torch.allclose(changed(int((replacements == UNCHANGED_PATCH).nonzero()[0])), before, atol=1e-4)


@pytest.mark.parametrize("change", [{}, {"pool": "norm-mean", "class_token": False, "positions": "sincos-2d"}])
def test_an_autoencoder_predicts_masked_patches_from_the_visible_ones_alone(change: dict[str, Any]) -> None:
    model = build_masked_vit(masked_config("mae", "pixels"), **change)
    images, masking = build_batch(model)
    patches = patchify(images, 8).clone()
    order = masking[:, 0]
    for index in range(len(images)):
        patches[index, order[index, : model.num_masked]] = torch.randn(model.num_masked, patches.shape[-1])
    grid, side = model.vit.config.grid, 8
    other = patches.reshape(-1, *grid, 3, side, side).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)
    with torch.no_grad():
        before = model(images, masking)
        assert torch.allclose(model(other, masking), before, atol=1e-5)
        other[:, :, :, :] += 1.0
        assert not torch.allclose(model(other, masking), before, atol=1e-2)


def test_an_autoencoders_order_does_not_matter() -> None:
    """Predictions follow the order of the masked patches, and the order of the visible ones changes nothing."""
    model = build_masked_vit(masked_config("mae", "pixels"))
    images, masking = build_batch(model)
    hidden, visible = masking[:, 0].tensor_split([model.num_masked], dim=1)
    turned = torch.stack([torch.cat([hidden.flip(1), visible.flip(1)], dim=1), masking[:, 1]], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model(images, turned).flip(1), model(images, masking), atol=1e-5, rtol=1e-5)


# --- targets ---------------------------------------------------------------------------------------------------------


def paint_squares(squares: Tensor, side: int) -> Tensor:
    """uint8 (B, C, R, K) -> images of squares of `side` pixels."""
    return squares.repeat_interleave(side, dim=-2).repeat_interleave(side, dim=-1)


@pytest.mark.parametrize(
    "change", [{}, {"stem": STEM, "patch": 2}, {"patch": 16}], ids=["patch 8", "hybrid", "patch 16"]
)
def test_mean_colors_of_painted_images_are_exact(change: dict[str, Any]) -> None:
    """Squares of one color each, every brightness among them: the top three bits of red, green and blue."""
    model = build_masked_vit(**change)
    config = model.vit.config
    shape = (3, *config.grid)
    squares = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, *shape), dtype=np.uint8))
    squares[:8, 0, 0, 0] = torch.tensor([0, 31, 32, 63, 64, 223, 224, 255], dtype=torch.uint8)
    masking = torch.from_numpy(draw_masked_patches(CounterRNG(0, np.arange(40)), model.masked, math.prod(config.grid)))
    targets = model.compute_targets(normalize(paint_squares(squares, config.stride), build_preprocess(config)), masking)
    red, green, blue = (squares[:, channel].flatten(1).long() // 32 for channel in range(3))
    expected = (64 * red + 8 * green + blue).gather(1, masking[:, 0, : model.num_masked])
    assert targets.shape == (40, model.num_masked, 1)
    assert torch.equal(targets[..., 0], expected)


@pytest.mark.parametrize("side", [4, 6, 7, 14, 16, 32])
def test_a_mean_on_the_edge_of_two_colors_belongs_to_the_brighter(side: int) -> None:
    """Every square's bytes add up to the first sum of a level, and with one of them less by one to the level below."""
    model = build_masked_vit(patch=side, image_size=(2 * side, 2 * side))
    generator = np.random.default_rng(side)
    at = generator.integers(1, 8, (200, 3, 2, 2))  # the level, 32 at a byte
    noise = generator.integers(-31, 32, (200, 3, 2, 2, side * side // 2))
    middle = np.zeros((*at.shape, side * side % 2), dtype=noise.dtype)
    squares = 32 * at[..., None] + np.concatenate([noise, -noise, middle], axis=-1)
    clipped = squares.clip(0, 255)
    squares = np.where((clipped != squares).any(axis=-1, keepdims=True), 32 * at[..., None], squares)

    def quantize(squares: Any) -> Tensor:
        pixels = squares.reshape(200, 3, 2, 2, side, side).transpose(0, 1, 2, 4, 3, 5)
        images = torch.from_numpy(pixels.reshape(200, 3, 2 * side, 2 * side).astype(np.uint8))
        return model.quantize_colors(normalize(images, build_preprocess(model.vit.config)), side)

    red, green, blue = at[:, 0], at[:, 1], at[:, 2]
    assert torch.equal(quantize(squares), torch.from_numpy(64 * red + 8 * green + blue))
    squares[..., 0] -= 1
    assert torch.equal(quantize(squares), torch.from_numpy(64 * (red - 1) + 8 * (green - 1) + blue - 1))


def test_small_colors_are_those_of_a_sixteenth_of_a_patch_in_raster_order() -> None:
    model = build_masked_vit(masked_config(target="4x4-colors"))
    squares = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (2, 3, 16, 16), dtype=np.uint8))
    _, masking = build_batch(model, 2)
    targets = model.compute_targets(normalize(paint_squares(squares, 2), build_preprocess(model.vit.config)), masking)
    digits = squares.long() // 32
    whole = digits[:, 0] * 64 + digits[:, 1] * 8 + digits[:, 2]  # (2, 16, 16): four cells a patch, four patches a side
    for image in range(2):
        for place, patch in enumerate(masking[image, 0, : model.num_masked].tolist()):
            row, column = divmod(patch, 4)
            own = whole[image, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4]
            assert targets[image, place].tolist() == own.flatten().tolist()


def test_pixels_are_those_that_were_decoded_whatever_the_normalization() -> None:
    plain, normal = (
        build_masked_vit(masked_config(target="pixels")),
        build_masked_vit(masked_config(target="normalized-pixels")),
    )
    pixels = random_bytes(plain.vit.config, 2)
    masking = build_batch(plain, 2)[1]
    images = normalize(pixels, build_preprocess(plain.vit.config))
    expected = patchify(pixels.float() / 255, 8)[torch.arange(2)[:, None], masking[:, 0, :8]]
    assert torch.equal(plain.compute_targets(images, masking), expected)
    targets = normal.compute_targets(images, masking)
    torch.testing.assert_close(targets.mean(dim=-1), torch.zeros(2, 8), atol=1e-5, rtol=0)
    torch.testing.assert_close(targets.std(dim=-1), torch.ones(2, 8), atol=1e-4, rtol=0)
    assert torch.equal(targets.argsort(dim=-1), expected.argsort(dim=-1))


@pytest.mark.parametrize("target", TARGETS)
def test_rendered_targets_are_the_image_again(target: MaskedTarget) -> None:
    """An image whose colors lie in the middle of their levels comes back from its targets to the level."""
    model = build_masked_vit(masked_config(target=target))
    side = {"mean-color": 8, "4x4-colors": 2}.get(target, 1)
    levels = np.random.default_rng(2).integers(0, 8, (2, 3, 32 // side, 32 // side))
    pixels = paint_squares(torch.from_numpy((levels * 32 + 16).astype(np.uint8)), side)
    images, masking = normalize(pixels, build_preprocess(model.vit.config)), build_batch(model, 2)[1]
    rendered = model.render_patches(model.compute_targets(images, masking), images, masking)
    assert rendered.shape[3:] == ({"mean-color": 1, "4x4-colors": 4}.get(target, 8),) * 2
    scale = 8 // rendered.shape[-1]
    whole = rendered.repeat_interleave(scale, dim=-1).repeat_interleave(scale, dim=-2)
    own = patchify(pixels, 8)[torch.arange(2)[:, None], masking[:, 0, :8]].unflatten(-1, (3, 8, 8))
    assert torch.equal(whole, own)


def test_a_prediction_is_rendered_as_its_likeliest_color() -> None:
    model = build_masked_vit()
    images, masking = build_batch(model, 2)
    targets = model.compute_targets(images, masking)
    predictions = torch.zeros(2, model.num_masked, 512).scatter(2, targets, 1.0)
    assert torch.equal(
        model.render_patches(predictions, images, masking), model.render_patches(targets, images, masking)
    )


# --- loss and gradients ----------------------------------------------------------------------------------------------


def test_losses_by_hand() -> None:
    """Equal logits cost log 512; a squared error is averaged over patches and pixels; each image by itself."""
    classes = torch.tensor([[[3], [500]], [[0], [1]]])
    assert compute_masked_losses(torch.zeros(2, 2, 512), classes).tolist() == pytest.approx([math.log(512)] * 2)
    confident = torch.zeros(2, 2, 512)
    confident[0, 0, 3] = confident[0, 1, 500] = 100.0
    assert compute_masked_losses(confident, classes).tolist() == pytest.approx([0, math.log(512)], abs=1e-5)
    assert compute_masked_losses(torch.zeros(1, 1, 32), torch.zeros(1, 1, 4, dtype=torch.int64)).item() == (
        pytest.approx(math.log(8))
    )
    pixels = torch.tensor([[[1.0, 3.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 2.0]]])
    assert compute_masked_losses(torch.zeros(2, 2, 2), pixels).tolist() == [2.5, 1.0]


@pytest.mark.parametrize("change", MASKABLE.values(), ids=MASKABLE)
def test_only_output_tokens_of_masked_patches_get_a_gradient(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of kept patches among them; none reaches a prefix token or a patch that was left alone."""
    model = build_masked_vit(**change)
    images, masking = build_batch(model)
    outputs: list[Tensor] = []
    run_blocks = ViT.run_blocks

    def record_output(*arguments: Any) -> Tensor:
        outputs.append(run_blocks(*arguments))
        outputs[0].retain_grad()
        return outputs[0]

    monkeypatch.setattr(ViT, "run_blocks", record_output)
    compute_masked_losses(model(images, masking), model.compute_targets(images, masking)).sum().backward()
    assert outputs[0].grad is not None
    reached = outputs[0].grad.abs().sum(dim=-1) > 0  # (B, N)
    expected = torch.zeros_like(reached)
    expected.scatter_(1, masking[:, 0, : model.num_masked] + model.vit.config.num_prefix_tokens, True)
    assert torch.equal(reached, expected)
    assert (masking[:, 1].gather(1, masking[:, 0, : model.num_masked]) == UNCHANGED_PATCH).any()


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("kind", ["mpp", "mae"])
def test_every_kind_of_vit_learns_in_every_parameter(kind: str, change: dict[str, Any]) -> None:
    """All but what pools, which waits for labels: a parameter without a gradient would stop several processes."""
    name = next(name for name, variant in VARIANTS.items() if variant is change)
    change = change | {"classes": 0, "distillation_head": False}
    if kind == "mae" and name in UNFIT_FOR_MAE:
        with pytest.raises(UsageError, match="mae omits patches"):
            build_masked_vit(masked_config(kind), **change)
        return
    model = build_masked_vit(masked_config(kind), **change).train()
    images, masking = build_batch(model)
    compute_masked_losses(model(images, masking), model.compute_targets(images, masking)).sum().backward()
    for path, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, path
        assert parameter.requires_grad == (not path.startswith(UNTRAINED)), path


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["mpp", "mae"])
def test_pixels_that_fill_no_patch_are_neither_read_nor_predicted(kind: str, target: MaskedTarget) -> None:
    model = build_masked_vit(masked_config(kind, target), drop_remainder=True, image_size=(36, 39))
    images, masking = build_batch(model)
    assert images.shape[2:] == (36, 39)
    cropped = images[:, :, :32, :32]
    assert torch.equal(model(images, masking), model(cropped, masking))
    assert torch.equal(model.compute_targets(images, masking), model.compute_targets(cropped, masking))


@pytest.mark.parametrize(("kind", "target"), [*(("mpp", target) for target in TARGETS), ("mae", "normalized-pixels")])
def test_every_target_is_learned(kind: str, target: MaskedTarget) -> None:
    """Two images by heart: the loss falls to two thirds of what it is at the start."""
    model = build_masked_vit(masked_config(kind, target)).train()
    torch.nn.init.zeros_(model.head.weight)
    images, masking = build_batch(model, 2)
    targets = model.compute_targets(images, masking)
    optimizer, first = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0), 0.0
    for step in range(50):
        loss = compute_masked_losses(model(images, masking), targets).mean()
        first = float(loss.detach()) if not step else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if target in ("mean-color", "4x4-colors"):
        assert first == pytest.approx(math.log(512))
    assert float(loss.detach()) < first * 2 / 3


# --- sizes and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["b16", "l16", "h14"])
def test_the_decoder_is_that_of_the_paper(name: str) -> None:
    config = presets.get_preset_config(name)
    assert isinstance(config, ViTConfig)
    light = build_decoder_config(config)
    assert (light.width, light.depth, light.heads, light.mlp) == (512, 8, 16, 2048)
    small = build_decoder_config(model_factory.build_config())
    assert (small.width, small.depth, small.heads) == (32, 2, 1)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["mpp", "mae"])
@pytest.mark.parametrize("change", [{}, {"class_token": False, "pool": "norm-mean"}, {"registers": 4}])
def test_multiply_adds_equal_torchs_counter(kind: str, target: MaskedTarget, change: dict[str, Any]) -> None:
    model = build_masked_vit(masked_config(kind, target), **change).to("meta")
    config, partner = model.vit.config, int(kind == "mpp")
    images = torch.empty(1, 3, *config.image_size, device="meta")
    masking = torch.zeros(1, 2, math.prod(config.grid), dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images, masking)
    assert counter.get_total_flops() // 2 == cost.count_multiply_adds(config, masked_config(kind, target))
    assert cost.count_parameters(config, masked_config(kind, target)) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert len(cost.list_memory_equivalents(config, masked_config(kind, target))) == 2 - partner


def test_a_model_that_cannot_be_masked_is_refused() -> None:
    vit = model_factory.build_config(classes=0)
    for config, masked, reason in (
        (model_factory.build_bit().config, masked_config(), "this recipe's model is a ResNet"),
        (
            model_factory.build_config(patch=14, image_size=(28, 28)),
            masked_config(target="4x4-colors"),
            "14 pixels do not divide into 4 x 4",
        ),
        (dataclasses.replace(vit, channels=5), masked_config(), "5 channels at 3 bits are too many colors"),
        (model_factory.build_config(patch=32), masked_config(), "masks 0 of 1 patches"),
    ):
        with pytest.raises(UsageError, match=reason):
            count_outputs_per_patch(config, masked)
    assert count_outputs_per_patch(dataclasses.replace(vit, channels=1), masked_config()) == 8
    assert [count_outputs_per_patch(vit, masked_config(target=target)) for target in TARGETS] == [
        512,
        16 * 512,
        192,
        192,
    ]
