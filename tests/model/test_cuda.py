"""The same model on a GPU."""

from typing import Any

import pytest
import torch

from tests import model_factory
from tests.model_factory import VARIANTS
from vitrail import Classifier
from vitrail.model.vit import ViT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here: `make cuda`")


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch lets cuDNN round convolutions to TF32 by default, which moves a hybrid's logits by 3e-3."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_the_cpus(change: dict[str, Any]) -> None:
    model = model_factory.build_vit(**change)
    images = model_factory.draw_images(model.config)
    odd = model_factory.draw_images(model.config, size=(40, 16))  # positions are resampled on the CPU either way
    with torch.no_grad():
        expected = model(images), model(odd)
        model.cuda()
        outputs = model(images.cuda()).cpu(), model(odd.cuda()).cpu()
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_a_bf16_training_step_has_finite_gradients_for_every_parameter(change: dict[str, Any]) -> None:
    """With stochastic depth, dropout and the class-token-only last block, whose single query cuDNN must not get."""
    torch.manual_seed(0)
    model = (
        ViT(model_factory.build_config(**change)).set_regularization(dropout=0.1, stochastic_depth=0.3).cuda().train()
    )
    model.load_state_dict(model_factory.build_vit(**change).state_dict())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(model_factory.draw_images(model.config, count=16).cuda()).float().square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_a_resnet_computes_and_trains_there_too() -> None:
    model = model_factory.build_bit()
    images = model_factory.draw_images(model.config, count=4, size=(64, 64))
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(model.cuda()(images.cuda()).cpu(), expected, atol=1e-4, rtol=1e-4)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model.train()(images.cuda()).float().square().mean()
    loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["plain", "norm-mean", "map", "distilled", "registers", "hybrid"])
def test_a_compiled_model_computes_the_same(kind: str) -> None:
    model = model_factory.build_vit(**VARIANTS[kind]).cuda()
    images = model_factory.draw_images(model.config, count=4).cuda()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model)(images), model(images), atol=1e-4, rtol=1e-4)


def test_the_classifier_takes_the_gpu_by_itself() -> None:
    classify = Classifier(model_factory.build_trained(model_factory.build_vit()))
    assert classify.device.type == "cuda"
    assert next(classify.model.parameters()).is_cuda
