"""One step: however it is divided it is the same step, dropout depends on the step alone, and a NaN moves nothing."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import model_factory
from vitrail.config import AugmentConfig, OptimizerConfig, Recipe, ScheduleConfig
from vitrail.errors import DivergedError
from vitrail.training.losses import compute_logit_adjustment
from vitrail.training.step import TrainState, build_train_state, train_step

RECIPE = Recipe(
    model="ti8",
    batch=8,
    epochs=1,
    optimizer=OptimizerConfig(lr=1e-2, clip=1.0),
    schedule=ScheduleConfig(decay="constant"),
    augment=AugmentConfig(),
    source="test",
)


def draw_batch(count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 32, 32, generator=generator), torch.arange(count) % 7


def run_step(parts: list[tuple[Tensor, Tensor]], recipe: Recipe = RECIPE, steps: int = 1, **changes: Any) -> TrainState:
    model = model_factory.build_vit()
    model.set_regularization(dropout=recipe.dropout, stochastic_depth=recipe.stochastic_depth)
    state = build_train_state(model, recipe)
    for _ in range(steps):
        train_step(state, parts, recipe, **({"step_images": 8, "steps": 10, "seed": 0} | changes))
    return state


def copy_weights(state: TrainState) -> list[Tensor]:
    return [parameter.detach() for parameter in state.model.parameters()]


def test_training_does_without_the_attention_whose_gradient_may_be_no_number() -> None:
    """cuDNN's, torch's first choice on some GPUs: docs/experiments."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    build_train_state(model_factory.build_vit(), RECIPE)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("cut", [(8,), (4, 4), (2, 2, 2, 2), (1, 7), (3, 0, 5)])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_micro_batches_make_one_batch(cut: tuple[int, ...], loss: Any) -> None:
    """Gradients of any division agree with the whole's to 1e-6; SGD, which shows gradients as they are."""
    images, targets = draw_batch()
    recipe = dataclasses.replace(RECIPE, loss=loss, optimizer=OptimizerConfig(kind="sgd", lr=0.1))
    whole = copy_weights(run_step([(images, targets)], recipe))
    parts = list(zip(images.split(list(cut)), targets.split(list(cut)), strict=True))
    for one, two in zip(whole, copy_weights(run_step(parts, recipe)), strict=True):
        assert torch.allclose(one, two, atol=1e-6, rtol=0)


def test_dropout_depends_on_seed_and_step_and_on_nothing_left_over() -> None:
    images, targets = draw_batch()
    recipe = dataclasses.replace(RECIPE, dropout=0.3, stochastic_depth=0.3)
    torch.manual_seed(1)
    one = copy_weights(run_step([(images, targets)], recipe, steps=3))
    torch.manual_seed(99)
    torch.rand(1000)
    two = copy_weights(run_step([(images, targets)], recipe, steps=3))
    other = copy_weights(run_step([(images, targets)], recipe, steps=3, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_stops_before_anything_moves(bad: float) -> None:
    images, targets = draw_batch()
    images[3, 0, 0, 0] = bad
    state = build_train_state(model_factory.build_vit(), RECIPE)
    before = [tensor.clone() for tensor in copy_weights(state)]
    with pytest.raises(DivergedError, match="step 0: the loss is nan") as caught:
        train_step(state, [(images, targets)], RECIPE, step_images=8, steps=10, seed=0)
    assert caught.value.exit_code == 6
    assert state.step == 0
    assert all(torch.equal(a, b) for a, b in zip(before, copy_weights(state), strict=True))


def test_the_learning_rate_is_the_schedules() -> None:
    recipe = dataclasses.replace(RECIPE, schedule=ScheduleConfig(decay="linear", warmup=2))
    state = build_train_state(model_factory.build_vit(), recipe)
    rates = [train_step(state, [draw_batch()], recipe, step_images=8, steps=6, seed=0).lr for _ in range(6)]
    assert rates == pytest.approx([0, 0.005, 0.01, 0.0075, 0.005, 0.0025])


def test_the_average_follows() -> None:
    recipe = dataclasses.replace(RECIPE, ema=0.5)
    state = run_step([draw_batch()], recipe, steps=2)
    assert state.ema is not None
    moved = [not torch.equal(state.ema.tensors[name], value) for name, value in state.model.named_parameters()]
    assert any(moved)


@pytest.mark.parametrize("warmup", [False, True])
def test_the_average_by_its_recursion(warmup: bool) -> None:
    """Without a warm-up 0.75 is kept in every step; with one (1 + t) / (10 + t) of the t-th, while that is less."""
    recipe = dataclasses.replace(RECIPE, ema=0.75, ema_warmup=warmup)
    model = model_factory.build_vit()
    state = build_train_state(model, recipe)
    assert state.ema is not None
    expected = {name: value.detach().double() for name, value in model.named_parameters()}
    for step in range(1, 4):
        train_step(state, [draw_batch()], recipe, step_images=8, steps=10, seed=0)
        kept = (1 + step) / (10 + step) if warmup else 0.75
        for name, value in model.named_parameters():
            expected[name] = kept * expected[name] + (1 - kept) * value.detach().double()
            torch.testing.assert_close(state.ema.tensors[name].double(), expected[name], atol=1e-6, rtol=0)


COUNTS = (50, 1, 2, 3, 20, 10, 4)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_a_balanced_step_is_that_of_a_model_whose_head_says_the_classes_sizes(loss: Any) -> None:
    """Offsets added to the logits are a bias that does not learn: they shift the head's bias and nothing else."""
    recipe = dataclasses.replace(RECIPE, loss=loss, optimizer=OptimizerConfig(kind="sgd", lr=0.1))
    balanced = dataclasses.replace(recipe, logit_adjustment=True)
    state, shifted = (
        build_train_state(model_factory.build_vit(), balanced, COUNTS),
        build_train_state(model_factory.build_vit(), recipe, COUNTS),
    )
    assert shifted.logit_adjustment is None
    added = compute_logit_adjustment(torch.tensor(COUNTS), loss)
    with torch.no_grad():
        shifted.model.head.bias += added
    cut = [3, 5]  # micro-batches have them each
    parts = list(zip(*(each.split(cut) for each in draw_batch()), strict=True))
    for _ in range(2):
        one = train_step(state, parts, balanced, step_images=8, steps=10, seed=0)
        two = train_step(shifted, parts, recipe, step_images=8, steps=10, seed=0)
        assert (one.loss, one.grad_norm) == pytest.approx((two.loss, two.grad_norm), rel=1e-5)
    with torch.no_grad():
        shifted.model.head.bias -= added
    for ours, theirs in zip(copy_weights(state), copy_weights(shifted), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_the_offsets_are_no_part_of_the_model() -> None:
    """Neither its answers nor its tensors know them."""
    recipe = dataclasses.replace(RECIPE, logit_adjustment=True)
    state = build_train_state(model_factory.build_vit(), recipe, COUNTS)
    assert state.logit_adjustment is not None
    assert state.logit_adjustment.tolist() == pytest.approx([math.log(count / 90) for count in COUNTS])
    plain, images = model_factory.build_vit(), draw_batch()[0]
    assert state.model.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(state.model.eval()(images), plain(images))
    assert build_train_state(model_factory.build_vit(), RECIPE, COUNTS).logit_adjustment is None
