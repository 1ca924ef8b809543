"""The moving average by hand, and as something that is stored and computed with."""

import pytest
import torch
from torch import Tensor, nn

from tests import model_factory
from vitrail.errors import ModelError
from vitrail.model.vit import build_model
from vitrail.training.optimizer import ModelEMA, compute_warmup_decay

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Counted(nn.Module):
    """One parameter, one buffer of whole numbers, and one that is not stored."""

    seen: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def set_to(model: Counted, *values: float) -> None:
    with torch.no_grad():
        model.weight.copy_(torch.tensor(values))


@pytest.mark.parametrize("device", DEVICES)
def test_the_average_by_hand(device: str) -> None:
    model = Counted().to(device)
    average = ModelEMA(model)
    assert average.tensors["weight"].tolist() == [1.0, 2.0]
    set_to(model, 5.0, -2.0)
    average.update(0.75)
    assert average.tensors["weight"].tolist() == [2.0, 1.0]
    set_to(model, 0.0, 0.0)
    model.seen += 3
    average.update(0.5)
    assert average.tensors["weight"].tolist() == [1.0, 0.5]
    assert average.tensors["seen"].item() == 3
    assert average.tensors.keys() == model.state_dict().keys()
    assert model.weight.tolist() == [0.0, 0.0]


def test_small_steps_are_not_lost_where_the_model_is_bf16() -> None:
    """A thousandth of the way from 1 to 2 is less than bf16 can add to 1."""
    model = Counted(torch.bfloat16)
    average = ModelEMA(model)
    set_to(model, 2.0, 3.0)
    for _ in range(3):
        average.update(0.999)
    assert average.tensors["weight"].dtype is torch.float32
    torch.testing.assert_close(average.tensors["weight"], torch.tensor([1.0, 2.0]) + 1 - 0.999**3)


def test_a_model_that_was_given_the_tensors_computes_with_the_average() -> None:
    model = model_factory.build_vit()
    average = ModelEMA(model)
    other = build_model(model.config).eval()
    other.load_state_dict(average.tensors, assign=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    average.update(0.5)
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(parameter, 1.5 * model.get_parameter(name))  # half of 1 and half of 0.5


def test_going_on_from_what_was_stored_is_as_if_it_had_never_stopped() -> None:
    model, resumed = model_factory.build_vit(), model_factory.build_vit()
    whole = ModelEMA(model)
    with torch.no_grad():
        model.patch_embed.proj.weight.add_(1.0)
        whole.update(0.9)
        stored = {name: tensor.clone() for name, tensor in whole.tensors.items()}
        model.patch_embed.proj.weight.add_(1.0)
        resumed.load_state_dict(model.state_dict())
    again = ModelEMA(resumed)
    again.load(stored)
    whole.update(0.9)
    again.update(0.9)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in whole.tensors.items())


def test_averages_of_another_model_are_refused() -> None:
    with pytest.raises(ModelError, match="another model: 'scratch'"):
        ModelEMA(Counted()).load({"weight": torch.zeros(2), "seen": torch.tensor(0), "scratch": torch.zeros(3)})


def test_the_decay_warms_up_by_hand() -> None:
    assert compute_warmup_decay(0.9999, 0) == 0.1
    assert compute_warmup_decay(0.9999, 8) == 0.5
    assert compute_warmup_decay(0.9999, 89_989) < 0.9999 == compute_warmup_decay(0.9999, 89_991)
    assert compute_warmup_decay(0.3, 8) == 0.3
