"""The convolutional networks by hand and by their properties; Google's and timm's own are in tests/weights."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests import model_factory
from vitrail.config import ConvConfig
from vitrail.errors import UsageError
from vitrail.model.initialize import initialize_weights
from vitrail.model.resnet import BiT, StandardizedConv2d, pad_same
from vitrail.model.vit import ViT, attention_maps
from vitrail.weights.load import load, save
from vitrail.weights.trained import create


@pytest.mark.parametrize(
    ("kernel", "stride", "size", "before", "after"),
    [(7, 2, 224, 2, 3), (3, 2, 112, 0, 1), (3, 2, 7, 1, 1), (3, 1, 9, 1, 1), (1, 2, 8, 0, 0), (1, 2, 7, 0, 0)],
)
def test_same_padding_is_tensorflows(kernel: int, stride: int, size: int, before: int, after: int) -> None:
    padded = pad_same(torch.ones(1, 1, size, size), kernel, stride)
    assert padded.shape[2:] == (size + before + after,) * 2
    assert padded[0, 0, :before].sum() == 0
    assert padded[0, 0, before, before] == 1


def test_standardization_by_hand() -> None:
    """The kernel (1, 3) has mean 2 and variance 1; the two forms differ where a kernel is faint."""
    for form, faint in (("std + eps", 1e-3 / (1e-3 + 1e-2)), ("sqrt(var + eps)", 1e-3 / (1e-6 + 1e-2) ** 0.5)):
        config = ConvConfig(units=(1,), norm_eps=1e-5, standardization=form, standardization_eps=1e-2)
        layer = StandardizedConv2d(config, 2, 1, 1, same=True)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([1e-3, 3e-3]).reshape(1, 2, 1, 1))
            torch.testing.assert_close(layer.standardize_weight().flatten(), torch.tensor([-faint, faint]))


def test_scaling_or_shifting_a_kernel_changes_nothing() -> None:
    model = model_factory.build_bit()
    images = model_factory.draw_images(model.config)
    with torch.no_grad():
        before = model(images)
        model.stages[0].blocks[0].conv2.weight.mul_(100).add_(3)
        torch.testing.assert_close(model(images), before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [(32, 32), (33, 47), (64, 40), (224, 224)])
def test_a_resnet_takes_any_size(size: tuple[int, int]) -> None:
    model = model_factory.build_bit()
    with torch.no_grad():
        feature_map = model.compute_feature_map(model_factory.draw_images(model.config, size=size))
    assert feature_map.shape[2:] == tuple(-(-side // 8) for side in size)  # stem 4, two stages: 8
    assert model(model_factory.draw_images(model.config, size=size)).shape == (2, 7)


def test_a_hybrids_patches_are_cut_from_the_feature_map() -> None:
    model = model_factory.build_vit(stem=model_factory.STEM, patch=2)
    images = model_factory.draw_images(model.config)
    with torch.no_grad():
        assert model.patch_embed.backbone is not None
        features = model.patch_embed.backbone(images)
        assert features.shape == (2, 256, 8, 8)
        expected = F.conv2d(features, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=2)
        torch.testing.assert_close(model.patch_embed(images), expected.flatten(2).mT, atol=1e-5, rtol=1e-5)
    with pytest.raises(UsageError, match="patches of 8 x 8 pixels; the nearest is 32 x 32"):
        model(torch.zeros(1, 3, 36, 32))


def test_fresh_convolutions_start_as_the_authors_do() -> None:
    hybrid = initialize_weights(
        ViT(model_factory.build_config(stem=model_factory.STEM, patch=2)), torch.Generator().manual_seed(0)
    )
    unit = hybrid.patch_embed.backbone.stages[0].blocks[0]
    assert not unit.norm3.weight.any()  # each unit starts as its shortcut
    assert (unit.norm1.weight == 1).all()
    resnet = create("bit-r50x1", num_classes=3)
    assert isinstance(resnet, BiT)
    assert not resnet.eval()(torch.randn(1, 3, 64, 64)).any()
    with pytest.raises(UsageError, match="neither dropout nor stochastic depth"):
        create("bit-r50x1", dropout=0.1)


def test_every_parameter_of_a_resnet_is_set_and_matters() -> None:
    model = BiT(model_factory.build_bit().config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialize_weights(model, torch.Generator().manual_seed(0))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    model = model_factory.build_bit()
    model(model_factory.draw_images(model.config, size=(64, 64))).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0, name


def test_a_resnet_saves_loads_and_adapts(tmp_path: Path) -> None:
    from vitrail.weights.adapt import adapt

    before = model_factory.build_trained(model_factory.build_bit())
    save(before, tmp_path / "model.safetensors")
    after = load(tmp_path / "model.safetensors")
    assert after.model.config == before.model.config
    images = model_factory.draw_images(before.model.config)
    with torch.no_grad():
        assert torch.equal(after.model(images), before.model(images))
        grey = adapt(before, channels=1, classes=2, image_size=64)
        assert not grey.model(images[:, :1]).any()
        kernel, whole = (
            grey.model.stem.conv.standardize_weight(),
            before.model.stem.conv.standardize_weight().sum(1, keepdim=True),
        )
    for one, three in zip(kernel, whole, strict=True):  # the same pattern; standardization sets its scale
        assert F.cosine_similarity(one.flatten(), three.flatten(), dim=0) > 1 - 1e-5
    assert "head.fc.weight (7, 512, 1, 1): removed" in grey.origin.changes
    assert "image_size: [32, 32] -> [64, 64]" in grey.origin.changes
    with pytest.raises(UsageError, match="classes is -1"):
        adapt(before, classes=-1)
    for change in ({"patch": 8}, {"operator": "bicubic"}):
        with pytest.raises(UsageError, match="a ResNet has no"):
            adapt(before, **change)
    for format_name, name in (("transformers", "a"), ("torchvision", "a.pth")):
        with pytest.raises(Exception, match="no place for a ResNet"):
            save(before, tmp_path / name, format_name)


def test_a_resnet_has_no_attention_to_show() -> None:
    model = model_factory.build_bit()
    with pytest.raises(UsageError, match="a BiT has no attention"):
        next(attention_maps(model, model_factory.draw_images(model.config)))
