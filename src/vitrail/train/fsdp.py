"""A model divided over ranks: each holds some rows of every tensor, and blocks are put together while they compute.

It is torch's FSDP2. A tensor that is divided is a DTensor of which rank r holds the rows that `torch.chunk` would give
it, maybe none; everything else is whole on every rank. What works on single numbers (averages, optimizers) works on
`local` rows; what needs a matrix asks for the `whole`, which all ranks must do together.

torch's modules for it take as long to import as half of torch, so a process that is alone leaves them away.
"""

import copy
import warnings
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from vitrail.model.build import Model, build_model
from vitrail.model.masked import MaskedViT, get_encoder
from vitrail.model.resnet import BiTUnit, HybridUnit
from vitrail.model.vit import Block
from vitrail.runtime import distributed

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SHARDED_UNITS = (Block, BiTUnit, HybridUnit)  # what is put together at a time; a stage of a ResNet can be most of it


def shard_model(model: Model | MaskedViT, device: torch.device) -> None:
    """Divide the model over all ranks, in place and unit by unit, so that a device never holds all of it.

    On a GPU units are sent in bf16, the kind in which autocast multiplies, and gradients are added up in float32. What
    is outside of them stays float32, and inputs are not cast: the residual stream is float32 as it is without sharding.
    Prefetching is torch's own: the host is ahead of the device, so the next unit is sent while this one computes, and
    backward passes go through units in the reverse of their order.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    sent = torch.bfloat16 if device.type == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=sent, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in model.modules():
        if isinstance(module, SHARDED_UNITS):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    # A ResNet's logits are a view, which nobody here writes into.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    # The rest too is divided again after a forward pass: evaluation has no backward pass, and would leave old weights.
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), reshard_after_forward=True)


def is_sharded(model: nn.Module) -> bool:
    """Whether its tensors are divided over ranks."""
    if not distributed.is_distributed():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether this rank holds some of its rows alone."""
    if not distributed.is_distributed():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def set_gradient_sync(model: nn.Module, *, sync: bool) -> None:
    """Let the next backward pass add gradients up over ranks, or keep them, whole, for the one that will."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(sync)
    model.set_is_last_backward(sync)


def to_local(tensor: Tensor) -> Tensor:
    """The rows that this rank holds, in the same memory; all of them where the tensor is not divided."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def get_local_rows(tensor: Tensor) -> range:
    """Which rows this rank holds."""
    count = len(tensor)
    if not is_dtensor(tensor):
        return range(count)
    most = -(-count // tensor.device_mesh.size())
    first = min(tensor.device_mesh.get_local_rank() * most, count)
    return range(first, min(first + most, count))


def shard_like(local_rows: Tensor, like: Tensor) -> Tensor:
    """The tensor of which this rank holds the rows `mine`, on the device of `like` and divided like it."""
    local_rows = local_rows.to(like.device)
    if not is_dtensor(like):
        return local_rows
    return type(like).from_local(
        local_rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def to_full_tensor(tensor: Tensor) -> Tensor:
    """All rows of all ranks, on each."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def copy_full_model(model: Model | MaskedViT) -> Model | None:
    """A whole copy of the model on the CPU, in eval mode; of a model that is sharded rank 0 has it, the others None.

    Of a masked one it is the ViT alone.
    """
    kept = get_encoder(model)
    if not is_sharded(model):
        return copy.deepcopy(kept).cpu().eval()
    leads = torch.distributed.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    for name, tensor in kept.state_dict().items():
        put_together = to_full_tensor(tensor)  # one at a time: a device may not hold all
        if leads:
            tensors[name] = put_together.cpu()
    if not leads:
        return None
    with torch.device("meta"):
        made = build_model(kept.config)
    made.load_state_dict(tensors, assign=True)
    return made.eval()
