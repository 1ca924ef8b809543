"""Optimizers: which parameters have weight decay, which learning rate each has, and by what rule they are updated.

Kernels alone decay: of linear layers and convolutions, standardised ones included. Biases, norms, tokens, positions,
offsets, layer scales and LoRA's matrices do not. The decay of a step is its learning rate times `weight_decay`, under
every rule.

Muon (Jordan et al. 2024) is written here, because torch.optim.Muon orthogonalises one matrix after the other, takes no
parameters but matrices, and rounds to bf16 on the CPU too. Here all matrices of one shape go through one chain of
batched products, and AdamW moves the rest within the same object.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import SGD, AdamW, Optimizer

from vitrail.config import OptimizerConfig
from vitrail.errors import ModelError, UsageError
from vitrail.model.masked import MaskedViT
from vitrail.model.vit import GatedMlp, Model, ViT
from vitrail.training import fsdp
from vitrail.training.fsdp import to_local

__all__ = ["build_optimizer", "build_param_groups", "clip_gradients", "set_lr"]

FUSED_DEVICES = ("cpu", "cuda", "mps")  # devices on which torch has one kernel for a whole group's step
BLOCK_PREFIXES = ("blocks.", "vit.blocks.", "decoder.blocks.")  # of a ViT, or of one that is masked
EMBEDDING_MODULES = (
    "patch_embed", "cls_token", "dist_token", "reg_token", "pos_embed", "pos_embed_y", "pos_embed_x", "norm_pre",
    "stem",
)  # fmt: skip

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steepest at 0, so five iterations do
NEWTON_SCHULZ_ITERATIONS = 5
MUON_UPDATE_RMS = 0.2  # Liu et al. 2025: a Muon step as large as AdamW's, so one learning rate and decay serve both

ParamGroup = dict[str, Any]


def build_optimizer(model: Model | MaskedViT, config: OptimizerConfig, *, capturable: bool = False) -> Optimizer:
    """The optimizer of all parameters that are not frozen, at their peak learning rates.

    With `capturable` its step may become part of a CUDA graph: learning rates are then on the device. Not for sgd.

        from vitrail.config import OptimizerConfig
        from vitrail.training.optimizer import build_optimizer, clip_gradients, set_lr

        model = vitrail.load("model.safetensors").model
        optimizer = build_optimizer(model, OptimizerConfig(kind="adam", lr=1e-3))
        model(torch.zeros(1, 3, 32, 32)).sum().backward()
        print(clip_gradients(model.parameters(), 1.0))
        set_lr(optimizer, 0.5)  # half of the peak
        optimizer.step()
    """
    groups = build_param_groups(model, config)
    if not groups:
        raise UsageError("every parameter is frozen; leave one to train")
    device = groups[0]["params"][0][1].device
    fused = device.type in FUSED_DEVICES
    betas = (config.beta1, config.beta2)
    if capturable:
        for group in groups:
            group["lr"] = torch.tensor(group["lr"], device=device)
    if config.kind == "adam":
        return AdamW(groups, betas=betas, eps=config.eps, fused=fused, capturable=capturable)
    if config.kind == "muon":
        if not any(group["matrices"] for group in groups):
            raise UsageError(
                "muon moves the matrices of a Transformer's blocks, and none is left to train; choose adam"
            )
        return Muon(groups, momentum=config.momentum, betas=betas, eps=config.eps, fused=fused, capturable=capturable)
    for group in groups:  # torch's SGD would add its weight decay to the gradient, and so to the momentum
        group["decoupled"] = group.pop("weight_decay")
    sharded = fsdp.is_sharded(model)  # there is no fused SGD for tensors that are
    optimizer = SGD(groups, momentum=config.momentum, fused=fused and not sharded, foreach=sharded or None)
    optimizer.register_step_pre_hook(_decay_param_groups)
    return optimizer


def build_param_groups(model: Model | MaskedViT, config: OptimizerConfig) -> list[ParamGroup]:
    """Parameter groups of equal weight decay, learning rate and update rule; frozen parameters are in none.

    Any optimizer of PyTorch takes them:

        from vitrail.config import OptimizerConfig
        from vitrail.training.optimizer import build_param_groups

        groups = build_param_groups(vitrail.create("ti16"), OptimizerConfig(kind="adam", lr=1e-3, weight_decay=0.1))
        print([(len(group["params"]), group["weight_decay"]) for group in groups])
    """
    groups: dict[tuple[bool, int, int], ParamGroup] = {}
    gated = {name for name, module in model.named_modules() if isinstance(module, GatedMlp)}
    for owner, module in model.named_modules():
        for name, parameter in module.named_parameters(owner, recurse=False):
            if not parameter.requires_grad:
                continue
            kernel = name.endswith(".weight") and isinstance(module, nn.Linear | nn.Conv2d)
            # Maps that are stored in one matrix, such as query, key and value: each is orthogonalized by itself.
            stacked = 3 if name.endswith(".qkv.weight") else 2 if name.removesuffix(".fc1.weight") in gated else 1
            matrices = stacked if config.kind == "muon" and kernel and name.startswith(BLOCK_PREFIXES) else 0
            # a masked recipe refuses layer decay
            level = 0 if config.layer_decay == 1 or isinstance(model, MaskedViT) else layers_below_head(model, name)
            top = (config.lr if matrices or config.adam_lr is None else config.adam_lr) * config.layer_decay**level
            if config.head_lr is not None and name.startswith(("head.", "head_dist.")):
                top, level = config.head_lr, -1
            fresh = {
                "params": [],
                "top": top,
                "lr": top,
                "weight_decay": config.weight_decay if kernel else 0.0,
                "matrices": matrices,
            }
            groups.setdefault((kernel, matrices, level), fresh)["params"].append((name, parameter))
    return list(groups.values())


def layers_below_head(model: Model, name: str) -> int:
    """Layers from a parameter up to the head: 0 for the head, 1 for the last block, most for embedding and positions.

    The blocks of a BiT ResNet are its units; a hybrid's convolutions belong to its embedding.
    """
    parts = name.split(".")
    units = (model.config.depth,) if isinstance(model, ViT) else model.config.conv.units
    if parts[0] in EMBEDDING_MODULES:
        return sum(units) + 1
    if parts[0] == "blocks":
        return sum(units) - int(parts[1])
    if parts[0] == "stages":
        return sum(units[int(parts[1]) :]) - int(parts[3])
    return 0


def set_lr(optimizer: Optimizer, lr_scale: float) -> None:
    """Set every group's learning rate to `lr_scale` times its peak."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr_scale * group["top"])
        else:
            group["lr"] = lr_scale * group["top"]


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients down to a norm of `max_norm` if it is larger; return the norm before.

    The norm stays on the device: nothing waits for it here. If it is not finite, neither are the gradients afterwards,
    so the caller must check it before the step.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = fsdp.to_full_tensor(get_total_norm(gradients))
    if max_norm is not None:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def get_optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors, as `PARAMETER/momentum_buffer` and the like, ready for a file."""
    return {
        f"{name}/{kind}": value
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_state(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load what `get_optimizer_state` returned: the next steps are bit-identical."""
    fresh = optimizer.state_dict()
    numbers = {
        name: number
        for group in fresh["param_groups"]
        for name, number in zip(group["param_names"], group["params"], strict=True)
    }
    states: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        if name not in numbers:
            raise ModelError(f"the training state holds {key!r:.80}, but no such parameter is trained here")
        states.setdefault(numbers[name], {})[kind] = tensor.clone()
    if states and (missing := [name for name, number in numbers.items() if number not in states]):
        raise ModelError(f"the training state lacks {missing[0]!r}, which is trained here")
    optimizer.load_state_dict(fresh | {"state": states})


class Muon(Optimizer):
    """Orthogonalized momentum for groups whose `matrices` says how many each parameter holds; AdamW where it is 0."""

    def __init__(
        self,
        groups: list[ParamGroup],
        *,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
        capturable: bool = False,
    ) -> None:
        # it completes the groups, which both share
        self.adam = AdamW(groups, betas=betas, eps=eps, fused=fused, capturable=capturable)
        super().__init__(groups, {"momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # there is no closure
        """Update every parameter that has a gradient."""
        matrices: list[tuple[Tensor, slice]] = []
        moved: list[Tensor] = []  # whole: where they are sharded, every rank computes with all of them
        rates: list[float | Tensor] = []
        for group in self.param_groups:
            if group["matrices"] and (trained := _filter_with_gradient(group["params"])):
                _apply_weight_decay(trained, group["lr"] * group["weight_decay"])
                for parameter, direction in zip(
                    trained, self._update_momentum(trained, group["momentum"]), strict=True
                ):
                    matrices += _split_matrices(parameter, group["matrices"])
                    moved += fsdp.to_full_tensor(fsdp.shard_like(direction, parameter)).chunk(group["matrices"])
                    rates += [group["lr"]] * group["matrices"]
        for (matrix, rows), direction, lr in zip(matrices, orthogonalize(moved), rates, strict=True):
            rate = lr * MUON_UPDATE_RMS * max(direction.shape) ** 0.5
            if isinstance(rate, Tensor):
                matrix.sub_(direction[rows].float() * rate)
            else:
                matrix.add_(direction[rows], alpha=-rate)
        # Loading a state makes new groups and a new state, so they are handed over in each step.
        self.adam.state = self.state
        self.adam.param_groups = [group for group in self.param_groups if not group["matrices"]]
        self.adam.step()

    def _update_momentum(self, trained: list[Tensor], momentum: float) -> Iterable[Tensor]:
        """The update direction of each parameter: the average of its gradients in Nesterov's form.

        For sharded parameters, the rows of this rank.
        """
        gradients = [to_local(parameter.grad) for parameter in trained if parameter.grad is not None]
        for parameter in trained:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        averages = [to_local(self.state[parameter]["momentum_buffer"]) for parameter in trained]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        return torch._foreach_lerp(gradients, averages, momentum)


def _split_matrices(parameter: Tensor, count: int) -> Iterator[tuple[Tensor, slice]]:
    """For each matrix in a parameter, the rows that this rank holds, maybe none, and their place in the matrix."""
    local, rows, height = to_local(parameter), fsdp.get_local_rows(parameter), len(parameter) // count
    for top in range(0, len(parameter), height):
        first = max(rows.start, top)
        last = max(first, min(rows.stop, top + height))
        yield local[first - rows.start : last - rows.start], slice(first - top, last - top)


def orthogonalize(matrices: list[Tensor]) -> list[Tensor]:
    """Each matrix with its singular values brought near 1; matrices of one shape, transposed or not, in one batch."""
    wide = [matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT for matrix in matrices]
    results = list(wide)
    for shape in dict.fromkeys(matrix.shape for matrix in wide):
        indices = [index for index, matrix in enumerate(wide) if matrix.shape == shape]
        batch = newton_schulz(torch.stack([wide[index] for index in indices]))
        for index, result in zip(indices, batch, strict=True):
            results[index] = result
    return [
        result if result.shape == matrix.shape else result.mT for result, matrix in zip(results, matrices, strict=True)
    ]


def newton_schulz(matrices: Tensor) -> Tensor:
    """(M, R, C), R <= C, to singular values near 1: those above 0.3 % of a matrix's norm lie from 0.68 to 1.21 then.

    On CUDA it is bf16, for tensor cores; what that rounds away is far less than the width of the band.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # no singular value is above the norm
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT  # (M, R, R)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # a x + (b g + c g g) x
    return x


def _filter_with_gradient(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def _decay_param_groups(optimizer: Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        _apply_weight_decay(_filter_with_gradient(group["params"]), group["lr"] * group["decoupled"])


def _apply_weight_decay(parameters: list[Tensor], rate: float | Tensor) -> None:
    if parameters and (isinstance(rate, Tensor) or rate):
        torch._foreach_mul_([to_local(parameter) for parameter in parameters], 1 - rate)


class ModelEMA:
    """The average of a model's trained parameters from now on, and its buffers as they are.

    `tensors` are updated in place, so a model that was given them by `load_state_dict(tensors, assign=True)` always
    computes with the average.
    """

    def __init__(self, model: nn.Module) -> None:
        every = dict(model.named_parameters())
        self.parameters = {name: parameter for name, parameter in every.items() if parameter.requires_grad}
        self.frozen_names = every.keys() - self.parameters.keys()
        self.buffers = {name: model.get_buffer(name) for name in model.state_dict() if name not in every}
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
        """Load stored averages; older checkpoints hold those of frozen parameters too."""
        if different := sorted((tensors.keys() - self.frozen_names) ^ self.tensors.keys()):
            raise ModelError(f"the stored averages are of another model: {different[0]!r} is in only one of them")
        for name, average in self.tensors.items():
            average.copy_(tensors[name])


def compute_warmup_decay(decay: float, updates: int) -> float:
    """The decay after so many updates: small at first, so that a model from scratch soon forgets its start.

    min(decay, (1 + t) / (10 + t)) is what TensorFlow's ExponentialMovingAverage does; 0.9999 is reached at 89,990.
    """
    return min(decay, (1 + updates) / (10 + updates))
