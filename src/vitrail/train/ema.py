"""The exponential moving average of a model's weights, which often predicts better than the weights themselves.

The paper's ImageNet results use it with a decay of 0.9999, as Polyak averaging. torch's AveragedModel keeps a second
module and a counter in its buffers; this keeps tensors under the model's own names, which is all that a file stores.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from vitrail.errors import ModelError
from vitrail.train.fsdp import to_local


class ModelEMA:
    """The average of a model's parameters from now on, and its buffers as they are.

    `tensors` are updated in place, so a model that was given them by `load_state_dict(tensors, assign=True)` always
    computes with the average.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self.buffers = {name: model.get_buffer(name) for name in model.state_dict() if name not in self.parameters}
        averages = {name: parameter.detach().float().clone() for name, parameter in self.parameters.items()}
        self.tensors = averages | {name: buffer.clone() for name, buffer in self.buffers.items()}
        """float32 averages and copies of buffers, by the model's names."""

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Keep `decay` of the average and take the rest from the model as it is now."""
        averages = [to_local(self.tensors[name]) for name in self.parameters]
        current = [to_local(parameter).float() for parameter in self.parameters.values()]  # no copy where it is float32
        torch._foreach_lerp_(averages, current, 1 - decay)
        for name, buffer in self.buffers.items():
            self.tensors[name].copy_(buffer)

    @contextlib.contextmanager
    @torch.no_grad()
    def apply_to_model(self) -> Iterator[None]:
        """Within the block, the model computes with the average."""
        original = {name: parameter.clone() for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.tensors[name])
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.copy_(original[name])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load stored averages."""
        if different := sorted(tensors.keys() ^ self.tensors.keys()):
            raise ModelError(f"the stored averages are of another model: {different[0]!r} is in only one of them")
        for name, average in self.tensors.items():
            average.copy_(tensors[name])


def compute_warmup_decay(decay: float, updates: int) -> float:
    """The decay after so many updates: small at first, so that a model from scratch soon forgets its start.

    min(decay, (1 + t) / (10 + t)) is what TensorFlow's ExponentialMovingAverage does; 0.9999 is reached at 89,990.
    """
    return min(decay, (1 + updates) / (10 + updates))
