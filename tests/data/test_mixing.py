"""Mixup and cutmix: Beta's law, mixes by hand, and that splitting a batch changes no bit."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from vitrail.config import AugmentConfig, PreprocessConfig
from vitrail.data.batch_augment import MixParams, apply_mix, draw_beta, draw_mix
from vitrail.data.randomness import CounterRNG
from vitrail.data.transforms import normalize

SIZE = (31, 45)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def draw_mixes(augment: AugmentConfig, count: int = 300, size: tuple[int, int] = SIZE) -> list[MixParams]:
    drawn = [draw_mix(0, 1000 * batch, augment, size) for batch in range(count)]
    return [mix for mix in drawn if mix is not None]


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 2.0])
def test_beta_has_betas_moments_and_law(alpha: float) -> None:
    values = draw_beta(CounterRNG(0, np.arange(4000)), "mixup", alpha)
    variance, fourth = 1 / (4 * (2 * alpha + 1)), 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))
    error = 4 / np.sqrt(4000)  # four standard errors
    assert abs(values.mean() - 0.5) < error * np.sqrt(variance)
    assert abs(((values - 0.5) ** 2).mean() - variance) < error * np.sqrt(fourth - variance**2)
    assert abs(((values - 0.5) ** 4).mean() - fourth) < error * fourth
    assert stats.kstest(values, stats.beta(alpha, alpha).cdf).pvalue > 0.001


def test_a_tiny_alpha_gives_shares_of_nearly_all_or_nothing() -> None:
    values = draw_beta(CounterRNG(0, np.arange(200)), "mixup", 1e-4)
    assert np.isfinite(values).all()
    assert ((values < 0.01) | (values > 0.99)).mean() > 0.95
    assert 0.35 < values.mean() < 0.65


def test_mixup_keeps_the_greater_weight_for_the_sample_itself() -> None:
    lams = np.array([mix.lam for mix in draw_mixes(AugmentConfig(mixup=0.5))])
    assert all(mix.box is None for mix in draw_mixes(AugmentConfig(mixup=0.5)))
    assert (lams >= 0.5).all()
    assert stats.kstest(lams, lambda x: 2 * stats.beta(0.5, 0.5).cdf(x) - 1).pvalue > 0.001


def test_lambda_of_cutmix_is_the_fraction_of_pixels_left() -> None:
    """Images of 0 with partners of 1: what is not pasted over is the share, at any clipping."""
    pixels, lams = torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 1, *SIZE), []
    for mix in draw_mixes(AugmentConfig(cutmix=1.0)):
        image, target = apply_mix(pixels, torch.tensor([0, 1]), mix, 2)
        assert float(1 - image.mean()) == pytest.approx(mix.lam, abs=1e-6)
        assert target.tolist()[0] == pytest.approx([mix.lam, 1 - mix.lam])
        lams.append(mix.lam)
    assert min(lams) < 0.3
    assert max(lams) > 0.95


def test_a_cutmix_box_has_the_images_shape_and_any_centre() -> None:
    boxes = np.array([mix.box for mix in draw_mixes(AugmentConfig(cutmix=1.0), 1000, (100, 200))])
    top, left, bottom, right = boxes.T
    unclipped = (top > 0) & (left > 0) & (bottom < 100) & (right < 200)
    assert unclipped.sum() > 100
    assert np.abs(2 * (bottom - top) - (right - left))[unclipped].max() <= 4  # sides are rounded to even numbers
    assert (top == 0).any()
    assert (right == 200).any()
    assert np.corrcoef((top + bottom)[unclipped], (left + right)[unclipped])[0, 1] < 0.2


def test_where_both_are_set_each_takes_half_of_the_batches_as_it_would_alone() -> None:
    both = draw_mixes(AugmentConfig(mixup=0.2, cutmix=1.0))
    upped = [mix.box is None for mix in both]
    assert 120 < sum(upped) < 180
    alone = zip(draw_mixes(AugmentConfig(mixup=0.2)), draw_mixes(AugmentConfig(cutmix=1.0)), strict=True)
    assert both == [mixup if up else cutmix for up, (mixup, cutmix) in zip(upped, alone, strict=True)]


def test_nothing_is_drawn_where_neither_is_set() -> None:
    assert draw_mix(0, 0, AugmentConfig(), SIZE) is None


def test_mixup_by_hand() -> None:
    pixels = torch.tensor([0, 100, 200], dtype=torch.uint8)[:, None, None, None]
    images, targets = apply_mix(pixels, torch.tensor([2, 0, 0]), MixParams(0.75, None), 3)
    assert images.flatten().tolist() == [25.0, 125.0]
    assert targets.tolist() == [[0.25, 0.0, 0.75], [1.0, 0.0, 0.0]]


def test_cutmix_by_hand() -> None:
    pixels = torch.stack([torch.zeros(1, 2, 3), torch.ones(1, 2, 3)])
    images, targets = apply_mix(pixels, torch.tensor([[1.0, 1, 0], [0, 1, 1]]), MixParams(2 / 3, (0, 1, 2, 2)), 3)
    assert images.tolist() == [[[[0, 1, 0], [0, 1, 0]]]]
    torch.testing.assert_close(targets, torch.tensor([[2 / 3, 1, 1 / 3]]))
    assert pixels[0].sum() == 0  # the original is unchanged


@pytest.mark.parametrize("kind", ["float", "bytes", "bfloat16", "probabilities"])
@pytest.mark.parametrize("augment", [AugmentConfig(mixup=0.8), AugmentConfig(cutmix=1.0)])
def test_however_a_global_batch_is_split_its_samples_are_mixed_alike(augment: AugmentConfig, kind: str) -> None:
    """Every way to cut 6 samples into ranks and micro-batches gives the bits of the whole."""
    pixels, targets = noise(6, 3, *SIZE), torch.arange(6) % 4
    pixels = {"bytes": (50 * pixels).to(torch.uint8), "bfloat16": pixels.bfloat16()}.get(kind, pixels)
    targets = noise(6, 4).softmax(dim=1) if kind == "probabilities" else targets
    mix = draw_mix(0, 60, augment, SIZE)
    assert mix is not None

    def part(start: int, count: int) -> tuple[Tensor, Tensor]:
        indices = torch.arange(start, start + count + 1) % 6  # and the partner of the last
        return apply_mix(pixels[indices], targets[indices], mix, 4)

    whole = part(0, 6)
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, 6), count) for count in range(6)):
        edges = [0, *cuts, 6]
        parts = [part(start, end - start) for start, end in itertools.pairwise(edges)]
        assert torch.equal(torch.cat([images for images, _ in parts]), whole[0])
        assert torch.equal(torch.cat([soft for _, soft in parts]), whole[1])
    assert torch.allclose(whole[1].sum(dim=1), torch.ones(6))


def test_mixing_bytes_then_normalizing_equals_mixing_normalized_images() -> None:
    preprocess = PreprocessConfig(size=SIZE, resize=SIZE, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    pixels = (50 * noise(4, 3, *SIZE)).to(torch.uint8)
    for mix in (MixParams(0.7, None), MixParams(0.5, (3, 4, 20, 30))):
        late = normalize(apply_mix(pixels, torch.zeros(4, dtype=torch.long), mix, 2)[0], preprocess)
        early = apply_mix(normalize(pixels, preprocess), torch.zeros(4, dtype=torch.long), mix, 2)[0]
        torch.testing.assert_close(late, early, atol=2e-6, rtol=1e-5)
