"""Low-rank updates of frozen linear layers: LoRA (Hu et al. 2022), rsLoRA and DoRA.

    r rank   I inputs   O outputs   A (r, I)   B (O, r)   s scale

A layer computes (W + s B A) x + b, as W x + s B (A x) + b. W is frozen: it has neither a gradient nor moments in the
optimizer, and the sum is never formed. With DoRA (Liu et al. 2024) each row of the sum is rescaled to a trained norm.

`LoRALinear` is no nn.Linear: code that reads a layer's weight directly, such as the kernel of GELU or the last block's
single query, first asks whether it is one, and otherwise calls it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from vitrail.config import LoRAConfig
from vitrail.errors import UsageError
from vitrail.model.vit import Block, Model, ViT

LAYER_NAMES = {
    "qkv": ("attn.qkv",),
    "attention": ("attn.qkv", "attn.proj"),
    "mlp": ("mlp.fc1", "mlp.fc2"),
    "all": ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"),
}
"""The layers of a block that each choice of `LoRAConfig.layers` means."""
ADDED_NAMES = ("lora_A", "lora_B", "magnitude")
"""The parameters that a layer has besides its weight and bias."""
HEAD_PREFIXES = ("head.", "head_dist.", "pre_logits.", "projection.")  # trained as well, the norm before them is not


class LoRALinear(nn.Module):
    """A linear layer with a low-rank update, under the layer's own tensor names and three more."""

    magnitude: nn.Parameter | None

    def __init__(self, linear: nn.Linear, config: LoRAConfig) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = linear.weight, linear.bias, config.scale
        outputs, inputs = linear.weight.shape
        self.lora_A = nn.Parameter(linear.weight.new_empty(config.rank, inputs))
        self.lora_B = nn.Parameter(linear.weight.new_zeros(outputs, config.rank))
        magnitude = nn.Parameter(compute_row_norms(linear.weight.detach())) if config.dora else None
        self.register_parameter("magnitude", magnitude)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        update = F.linear(F.linear(x, self.lora_A), self.lora_B)
        if self.magnitude is None:
            return torch.add(F.linear(x, self.weight, self.bias), update, alpha=self.scale)
        out = torch.add(F.linear(x, self.weight), update, alpha=self.scale) * self._compute_row_factors()
        return out if self.bias is None else out + self.bias

    def _compute_row_factors(self) -> Tensor:
        """(O,): what the rows of the sum are multiplied by; their norms are taken as constants, as in the paper."""
        assert self.magnitude is not None
        with torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
            weight, lora_a, lora_b = (tensor.float() for tensor in (self.weight, self.lora_A, self.lora_B))
            norms = compute_row_norms(add_product(weight, lora_a, lora_b, self.scale))
        return self.magnitude / norms


def add_product(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """(O, I): W + s B A."""
    return weight + (lora_b @ lora_a) * scale


def compute_row_norms(weight: Tensor) -> Tensor:
    """(O,): the length of each row; that of a row of zeros is tiny instead, to be divided by."""
    return torch.linalg.vector_norm(weight, dim=1).clamp(min=torch.finfo(weight.dtype).tiny)


def merge_weight(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float, magnitude: Tensor | None) -> Tensor:
    """(O, I): the weight of the plain layer that computes the same."""
    merged = add_product(weight, lora_a, lora_b, scale)
    return merged if magnitude is None else (magnitude / compute_row_norms(merged))[:, None] * merged


def add_lora(model: Model, config: LoRAConfig, generator: Generator) -> None:
    """Replace layers by those with low-rank updates, in place, and freeze all but the updates and the head.

    A is drawn from `generator` as PEFT and the authors draw it, uniform within 1 / sqrt(inputs). B is zero, so the
    model computes what it did.
    """
    if not isinstance(model, ViT):
        raise UsageError("lora adds to the linear layers of blocks, and a ResNet has none: omit --lora")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(HEAD_PREFIXES))
    for block in model.blocks:
        assert isinstance(block, Block)
        for name in LAYER_NAMES[config.layers]:
            part, _, attribute = name.partition(".")
            linear = block.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            largest = 1 / math.sqrt(linear.in_features)
            added = LoRALinear(linear, config)
            with torch.no_grad():
                added.lora_A.uniform_(-largest, largest, generator=generator)
            setattr(block.get_submodule(part), attribute, added)


def merge_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the plain model that computes the same; `tensors` are those of `model`, whole."""
    merged = dict(tensors)
    for path, layer in model.named_modules():
        if isinstance(layer, LoRALinear):
            added = {name: merged.pop(f"{path}.{name}", None) for name in ADDED_NAMES}
            lora_a, lora_b = added["lora_A"], added["lora_B"]
            assert lora_a is not None
            assert lora_b is not None
            weight = merged[f"{path}.weight"]
            merged[f"{path}.weight"] = merge_weight(weight, lora_a, lora_b, layer.scale, added["magnitude"])
    return merged


def has_lora(model: nn.Module) -> bool:
    """Whether some layer has a low-rank update."""
    return any(isinstance(module, LoRALinear) for module in model.modules())
