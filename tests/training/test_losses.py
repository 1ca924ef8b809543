"""Losses against torch's own and against their formulas; what adds up; what an image without a label does."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests import model_factory
from vitrail.training.losses import (
    compute_logit_adjustment,
    sigmoid_cross_entropy,
    smooth_labels,
    softmax_cross_entropy,
    warn_about_mean,
)

Loss = Callable[..., Tensor]
LOSSES = [softmax_cross_entropy, sigmoid_cross_entropy]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
B, L = 6, 11


def logits(scale: float = 4.0, device: str = "cpu") -> Tensor:
    return (scale * torch.randn(B, L, generator=torch.Generator().manual_seed(0))).to(device)


def classes(device: str = "cpu") -> Tensor:
    return torch.randint(L, (B,), generator=torch.Generator().manual_seed(1)).to(device)


def shares(device: str = "cpu") -> Tensor:
    return torch.rand(B, L, generator=torch.Generator().manual_seed(2)).softmax(dim=-1).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_is_torchs(smoothing: float, device: str) -> None:
    for targets in (classes(device), shares(device)):
        expected = F.cross_entropy(logits(device=device), targets, reduction="sum", label_smoothing=smoothing)
        torch.testing.assert_close(softmax_cross_entropy(logits(device=device), targets, smoothing), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sigmoid_of_one_label_is_torchs_of_a_row(smoothing: float, device: str) -> None:
    """On the label 1 - s + s / L is asked for, elsewhere s / L."""
    rows = F.one_hot(classes(device), L) * (1 - smoothing) + smoothing / L
    expected = F.binary_cross_entropy_with_logits(logits(device=device), rows, reduction="sum")
    torch.testing.assert_close(sigmoid_cross_entropy(logits(device=device), classes(device), smoothing), expected)
    one_hot = F.one_hot(classes(device), L)
    torch.testing.assert_close(sigmoid_cross_entropy(logits(device=device), one_hot, smoothing), expected)


def test_the_losses_by_hand() -> None:
    """Two images, three classes. Softmax of equal logits is 1/3; a sigmoid at 0 is 1/2, and log 3 is that of 3/4."""
    flat = torch.tensor([[0.0, 0.0, 0.0], [0.0, math.log(3), 0.0]])
    targets = torch.tensor([2, 1])
    assert softmax_cross_entropy(flat, targets).item() == pytest.approx(math.log(3) + math.log(5 / 3))
    assert sigmoid_cross_entropy(flat, targets).item() == pytest.approx(5 * math.log(2) + math.log(4 / 3))
    both = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assert softmax_cross_entropy(flat, both).item() == pytest.approx(2 * math.log(3))
    assert sigmoid_cross_entropy(flat, both).item() == pytest.approx(5 * math.log(2) + math.log(4))


def test_smoothing_moves_labels_and_adds_none() -> None:
    rows = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[0.85, 0.05, 0.05, 0.05], [0.9, 0.9, 0.1, 0.1], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(smooth_labels(rows, 0.2), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_image_without_a_label_adds_nothing_at_all(loss: Loss, smoothing: float, device: str) -> None:
    targets = classes(device)
    targets[[1, 4]] = -1
    kept = [0, 2, 3, 5]
    free = logits(device=device).requires_grad_()
    total = loss(free, targets, smoothing)
    total.backward()
    torch.testing.assert_close(total, loss(logits(device=device)[kept], targets[kept], smoothing))
    assert free.grad is not None
    assert not free.grad[[1, 4]].any()
    assert free.grad[kept].any(dim=1).all()
    assert loss(free, torch.full_like(targets, -1), smoothing).item() == 0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("wrong", [-2, L])
def test_an_index_that_is_no_class_is_an_error(loss: Loss, wrong: int) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        loss(logits(), torch.full((B,), wrong))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_sum_is_float32_of_what_the_logits_hold(loss: Loss, dtype: torch.dtype) -> None:
    low = logits().to(dtype)
    for targets in (classes(), shares()):
        found = loss(low, targets, 0.1)
        assert found.dtype is torch.float32
        assert torch.equal(found, loss(low.float(), targets, 0.1))


@pytest.mark.parametrize("loss", LOSSES)
def test_huge_logits_stay_finite_and_their_gradients_are_probability_minus_target(loss: Loss) -> None:
    free = logits(scale=200.0).requires_grad_()
    loss(free, classes()).backward()
    probability = free.detach().softmax(dim=-1) if loss is softmax_cross_entropy else free.detach().sigmoid()
    assert free.grad is not None
    torch.testing.assert_close(free.grad, probability - F.one_hot(classes(), L), atol=1e-6, rtol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_empty_part_of_a_batch_adds_nothing(loss: Loss) -> None:
    empty = torch.zeros(0, L, requires_grad=True)
    assert loss(empty, torch.zeros(0, dtype=torch.int64)).item() == 0
    assert loss(empty, torch.zeros(0, L), 0.1).item() == 0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("cuts", [[8], [4, 4], [2, 2, 2, 2], [3, 3, 2]])
def test_parts_of_a_batch_give_the_loss_and_gradients_of_the_whole(loss: Loss, cuts: list[int]) -> None:
    model = model_factory.build_vit()
    images = model_factory.draw_images(model.config, count=8)
    targets = torch.arange(8) % 7
    whole = loss(model(images), targets) / 8
    expected = torch.autograd.grad(whole, list(model.parameters()))
    total = 0.0
    for part, answers in zip(images.split(cuts), targets.split(cuts), strict=True):
        piece = loss(model(part), answers) / 8
        piece.backward()
        total += piece.item()
    assert total == pytest.approx(whole.item(), rel=1e-6)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-6)


def test_offsets_by_hand() -> None:
    """90 and 10 of 100: logarithms of the shares for softmax, of the odds for sigmoids."""
    counts = torch.tensor([90, 10])
    for found, expected in (
        (compute_logit_adjustment(counts, "softmax"), [math.log(0.9), math.log(0.1)]),
        (compute_logit_adjustment(counts, "sigmoid"), [math.log(9), -math.log(9)]),
    ):
        assert found.dtype is torch.float32
        assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("name", "loss"), [("softmax", softmax_cross_entropy), ("sigmoid", sigmoid_cross_entropy)])
def test_with_offsets_nothing_is_learned_from_how_many_images_a_class_has(name: str, loss: Loss) -> None:
    """90 images of one class and 10 of another, all alike: the logits become equal, which they do not without."""
    targets = torch.tensor([0] * 90 + [1] * 10)
    learned = []
    for added in (compute_logit_adjustment(torch.tensor([90, 10]), name), torch.zeros(2)):
        free = torch.tensor([1.0, -2.0], requires_grad=True)
        optimizer = torch.optim.LBFGS([free], max_iter=100, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

        def closure(free: Tensor = free, added: Tensor = added, optimizer: torch.optim.LBFGS = optimizer) -> float:
            optimizer.zero_grad()
            total = loss((free + added).expand(100, 2), targets) / 100
            total.backward()
            return total.item()

        optimizer.step(closure)
        learned.append((free[0] - free[1]).item())
    assert learned[0] == pytest.approx(0, abs=1e-3)
    assert learned[1] == pytest.approx(math.log(9) if name == "softmax" else 2 * math.log(9), abs=1e-3)


def test_with_offsets_an_informative_input_is_answered_as_if_classes_were_of_equal_size() -> None:
    """Bayes: a sign seen in 3/5 of a class of 90 and in 4/5 of one of 10 speaks for the second, by 3 to 4."""
    seen, unseen = torch.tensor([54, 8]), torch.tensor([36, 2])
    logits = torch.stack([seen / (seen + unseen), unseen / (seen + unseen)]).log().requires_grad_()  # of equal classes
    targets = torch.tensor([0] * 54 + [1] * 8 + [0] * 36 + [1] * 2)
    inputs = torch.tensor([0] * 62 + [1] * 38)
    softmax_cross_entropy(
        logits[inputs] + compute_logit_adjustment(torch.tensor([90, 10]), "softmax"), targets
    ).backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-4  # the loss is convex: this is its optimum
    assert logits[0].argmax() == 1
    assert logits[0].diff().exp().item() == pytest.approx(4 / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("images", [2, 5, 64])
def test_a_mean_as_the_loss_is_noticed_once_and_a_sum_never(images: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = (4 * torch.randn(images, L, generator=generator)).to(dtype).requires_grad_()
    for targets in (torch.randint(L, (images,), generator=generator), torch.rand(images, L, generator=generator)):
        notes: list[str] = []
        mean, total = (
            warn_about_mean(torch.nn.CrossEntropyLoss(reduction=name), notes.append) for name in ("mean", "sum")
        )
        for loss in (total, mean, total, mean):
            loss(outputs, targets).backward()
        assert len(notes) == 1
        assert notes[0].startswith("warning: the loss function looks like a mean over the images")


def test_one_image_cannot_show_whether_a_loss_is_a_mean() -> None:
    mean = warn_about_mean(torch.nn.CrossEntropyLoss(), pytest.fail)
    assert float(mean(torch.zeros(1, L), torch.zeros(1, dtype=torch.int64))) == pytest.approx(math.log(L))


# --- class weights ---------------------------------------------------------------------------------------------------

WEIGHTS = torch.linspace(0.5, 3, L)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_of_both_losses_are_torchs(smoothing: float, device: str) -> None:
    """`weight` of a cross-entropy, `pos_weight` of a binary one."""
    weights, outputs = WEIGHTS.to(device), logits(device=device)
    for targets in (classes(device), shares(device)):
        expected = F.cross_entropy(outputs, targets, weights, reduction="sum", label_smoothing=smoothing)
        torch.testing.assert_close(softmax_cross_entropy(outputs, targets, smoothing, weights), expected)
        rows = F.one_hot(targets, L) if targets.ndim == 1 else targets
        rows = rows * (1 - smoothing) + smoothing * rows.sum(dim=1, keepdim=True) / L
        expected = F.binary_cross_entropy_with_logits(outputs, rows, pos_weight=weights, reduction="sum")
        torch.testing.assert_close(sigmoid_cross_entropy(outputs, targets, smoothing, weights), expected)


def test_class_weights_by_hand() -> None:
    """Equal logits: a softmax gives 1/2, so the loss is w log 2 and the gradient of the true logit -w/2.

    Of the sigmoids, the true label's has the loss w log 2 and the gradient -w/2, the other's log 2 and 1/2.
    """
    weights, targets = torch.tensor([3.0, 0.5]), torch.tensor([0, 1])
    for loss, rows in ((softmax_cross_entropy, [[-1.5, 1.5], [0.25, -0.25]]), (sigmoid_cross_entropy, None)):
        for form in (targets, F.one_hot(targets).float()):
            outputs = torch.zeros(2, 2, requires_grad=True)
            value = loss(outputs, form, 0.0, weights)
            value.backward()
            others = 0.0 if rows else 2.0
            assert value.item() == pytest.approx((3.5 + others) * math.log(2), rel=1e-6)
            assert outputs.grad is not None
            assert outputs.grad.tolist() == (rows or [[-1.5, 0.5], [0.5, -0.25]])


@pytest.mark.parametrize("loss", LOSSES)
def test_an_image_of_weight_two_counts_as_two_and_one_without_a_label_as_none(loss: Loss) -> None:
    weights, outputs, targets = torch.ones(L), logits(), torch.arange(B)
    weights[0] = 2
    twice = loss(outputs, targets, 0.0, weights) - loss(outputs, targets)
    own = F.softplus(-outputs[0, 0]) if loss is sigmoid_cross_entropy else loss(outputs[:1], targets[:1])
    torch.testing.assert_close(twice, own)
    targets[0] = -1
    torch.testing.assert_close(loss(outputs, targets, 0.0, weights), loss(outputs[1:], targets[1:]))
