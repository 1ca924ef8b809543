"""A model sharded over ranks with torch's FSDP2: each rank holds some rows of every tensor.

A sharded tensor is a DTensor of which rank r holds the rows that `torch.chunk` would give it, maybe none; everything
else is whole on every rank. What works elementwise (averages, optimizers) uses `to_local`; what needs a whole matrix
uses `to_full_tensor`, which all ranks must call together.

torch's modules for it take as long to import as half of torch, so a single process does not import them.
"""

import copy
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from vitrail.model import lora
from vitrail.model.masked import MaskedViT, get_encoder
from vitrail.model.resnet import BiTUnit, HybridUnit
from vitrail.model.vit import Block, Model, build_model
from vitrail.runtime import distributed
from vitrail.training.distillation import PROJECTION_NAME

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SHARDED_UNITS = (Block, BiTUnit, HybridUnit)  # gathered one at a time; a stage of a ResNet can be most of it


def shard_model(model: Model | MaskedViT, device: torch.device) -> None:
    """Shard the model over all ranks, in place and unit by unit, so that a device never holds all of it.

    On a GPU units are sent in bf16, the type in which autocast multiplies, and gradients are summed in float32. What is
    outside of units stays float32, and inputs are not cast: the residual stream is float32, as without sharding.
    Prefetching is torch's own: the host is ahead of the device, so the next unit is sent while this one computes, and
    backward passes visit units in reverse order.
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
    # The rest is resharded after a forward pass, too: evaluation has no backward pass, and would leave old weights.
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), reshard_after_forward=True)


def is_sharded(model: nn.Module) -> bool:
    """Whether the model's tensors are sharded over ranks."""
    if not distributed.is_distributed():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether the tensor is sharded, so that this rank holds only some of its rows."""
    if not distributed.is_distributed():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def set_gradient_sync(model: nn.Module, *, sync: bool) -> None:
    """Let the next backward pass sum gradients over ranks, or keep them for a later one that does."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(sync)
    model.set_is_last_backward(sync)


def to_local(tensor: Tensor) -> Tensor:
    """The rows that this rank holds, in the same memory; all of them if the tensor is not sharded."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def get_local_rows(tensor: Tensor) -> range:
    """The indices of the rows that this rank holds."""
    count = len(tensor)
    if not is_dtensor(tensor):
        return range(count)
    most = -(-count // tensor.device_mesh.size())
    first = min(tensor.device_mesh.get_local_rank() * most, count)
    return range(first, min(first + most, count))


def shard_like(local_rows: Tensor, like: Tensor) -> Tensor:
    """The tensor of which this rank holds `local_rows`, on the device of `like` and sharded like it."""
    local_rows = local_rows.to(like.device)
    if not is_dtensor(like):
        return local_rows
    return type(like).from_local(
        local_rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def to_full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def copy_full_model(model: Model | MaskedViT) -> Model | None:
    """A whole copy of the model on the CPU, in eval mode; of a sharded model on rank 0 only, None on others.

    Of a masked model it is the ViT alone, of a student the model without its map to a teacher's features; LoRA's
    updates are merged into their layers.
    """
    encoder = get_encoder(model)
    if not is_sharded(model) and not lora.has_lora(model):
        full_model = copy.deepcopy(encoder).cpu().eval()
        if hasattr(full_model, PROJECTION_NAME):
            delattr(full_model, PROJECTION_NAME)
        return full_model
    tensors = copy_full_tensors(encoder.state_dict())
    if tensors is None:
        return None
    with torch.device("meta"):
        full_model = build_model(encoder.config)
    merged = lora.merge_tensors(encoder, tensors)
    kept = {name: tensor for name, tensor in merged.items() if not name.startswith(f"{PROJECTION_NAME}.")}
    full_model.load_state_dict(kept, assign=True)
    return full_model.eval()


def copy_full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Whole copies of tensors on the CPU; if they are sharded, on rank 0 only, and None on others."""
    copies: dict[str, Tensor] = {}
    is_other_rank = any(map(is_dtensor, tensors.values())) and torch.distributed.get_rank() > 0
    for name, tensor in tensors.items():
        full_tensor = to_full_tensor(tensor.detach())  # one at a time: a device may not hold all
        if not is_other_rank:
            copies[name] = full_tensor.to("cpu", copy=True)
    return None if is_other_rank else copies
