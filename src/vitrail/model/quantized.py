"""A ViT computed in fewer bits on the CPU: bfloat16, or int8 with a scale for each output and each token.

    B images   C channels   S image side   P patch side   N tokens   D inputs of a layer   O outputs

The blocks' matrix products are nearly all of a ViT's work, and they are lowered: norms, attention, the residual stream
and the head stay float32. In int8 a weight is round(w / s), with s = max |w| / 127 of its output, and an input
round(x / t) with a step t of its token, found anew for each batch; their products are summed as whole numbers. So are
those of patches with the embedding's weights, where an input is a pixel's byte as it is.
torch's own quantisation is on its way out, and its compiler wants a C++ compiler where it runs: this calls oneDNN's
product of bytes as torch ships it, or is not there where torch does not. What is left to torch are passes over memory,
each as long as a tenth of a product, so there are as few as it has operators for.
"""

import copy
import functools
import platform

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Precision, PreprocessConfig
from vitrail.errors import UsageError
from vitrail.model.build import Model
from vitrail.model.vit import Attention, Mlp, ViT, patchify

_TINY = torch.finfo(torch.float32).tiny
_INT8_MAX = 127  # of a weight's byte; -128 is left out: the range is as long on both sides
_ZERO_POINT = 128  # what stands for 0 in the unsigned bytes that inputs are,
_GELU_ZERO_POINT = 32  # and where they are a GELU's outputs, which lie
_GELU_MIN = -0.17  # above this
_ROUNDING_OFFSET = 1.5 * 2**23  # a float32 near it is a whole number, and its last byte that number's


def describe_cpu() -> str:
    """What this CPU's speed depends on, such as x86_64-avx512-vnni: where it is the same, so is what was measured."""
    names = {"vnni": "_is_vnni_supported", "bf16": "_is_avx512_bf16_supported", "amx": "_is_amx_tile_supported"}
    known = [name for name, test in names.items() if getattr(torch.cpu, test, bool)()]
    return "-".join([platform.machine().lower(), torch.backends.cpu.get_cpu_capability().lower(), *known])


class Int8Linear(nn.Module):
    """A linear layer whose weights are bytes, with no other copy of them."""

    def __init__(self, linear: nn.Linear, *, after_gelu: bool = False) -> None:
        super().__init__()
        weight = linear.weight.detach()  # (O, D)
        whole, self.scale = _quantize_weight(weight)
        self.packed = torch.ops.onednn.qlinear_prepack(whole, None)
        self.bias = torch.zeros(len(weight)) if linear.bias is None else linear.bias.detach().clone()
        self.after_gelu = after_gelu
        self.zero_point = _GELU_ZERO_POINT if after_gelu else _ZERO_POINT
        self.offset = torch.full((weight.shape[1],), _ROUNDING_OFFSET + self.zero_point)  # (D,)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> float32 (..., O). What a GELU gave is written over."""
        if not x.numel():
            return x.new_zeros((*x.shape[:-1], len(self.scale)))
        step = self._compute_token_scale(x)
        # To add _WHOLE is to round, and the last byte of the sum is what is wanted: one pass for what would be three.
        whole = torch.addcmul(self.offset, x, 1 / step, out=x if self.after_gelu else None)
        out = _multiply_int8(whole.view(torch.int32).to(torch.uint8), self.zero_point, self.packed, self.scale)
        return torch.addcmul(self.bias, out, step, out=out)

    def _compute_token_scale(self, x: Tensor) -> Tensor:
        """(..., 1): of how much a byte counts one, for each token, so that all its inputs have one."""
        most = x.amax(dim=-1, keepdim=True)
        if self.after_gelu:
            return most.div_(255 - _GELU_ZERO_POINT).clamp_(min=-_GELU_MIN / _GELU_ZERO_POINT)
        return torch.maximum(most, -x.amin(dim=-1, keepdim=True)).div_(_INT8_MAX).clamp_(min=_TINY)


class InPlaceGELU(nn.Module):
    """The erf form, in place of its input.

    It takes torch a fifth of the tanh form's time; they differ by less than 0.0005, which is some hundredths of what
    int8 then rounds to.
    """

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.gelu_(x)
        return found


class Int8PatchEmbed(nn.Module):
    """The embedding of patches that are cut from images as bytes."""

    def __init__(self, embedding: nn.Conv2d, preprocess: PreprocessConfig) -> None:
        super().__init__()
        whole, scale, self.bias = quantize_patch_embed(embedding, preprocess)
        self.patch = embedding.kernel_size[0]
        self.packed = torch.ops.onednn.qlinear_prepack(whole.flatten(1), None)
        self.scale = scale / 255

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, C, S, S) -> float32 (B, N, O)."""
        patches = patchify(images, self.patch)
        if not patches.numel():
            return self.bias.new_zeros((*patches.shape[:-1], len(self.bias)))
        return _multiply_int8(patches, 0, self.packed, self.scale).add_(self.bias)


def quantize_patch_embed(patch_embed: nn.Conv2d, preprocess: PreprocessConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Weights int8 (O, C, P, P), of how much each counts one (O,), and biases (O,) for patches of pixels from 0 to 1.

    mean and std are in them, so that nothing else is rounded. The mean is taken from what the rounded weights give:
    what rounding changes is multiplied with pixels around 0, as it would be without all this.
    """
    assert patch_embed.bias is not None
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (preprocess.mean, preprocess.std))
    weight = patch_embed.weight.detach() / std
    whole, scale = _quantize_weight(weight.flatten(1))
    whole = whole.view_as(weight)
    return whole, scale, patch_embed.bias.detach() - (whole * mean).sum((1, 2, 3)) * scale


def _quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(O, D) -> int8 (O, D), and of how much each counts one (O,)."""
    scale = (weight.abs().amax(dim=1) / _INT8_MAX).clamp_(min=_TINY)
    return (weight / scale[:, None]).round_().to(torch.int8), scale


def _multiply_int8(x: Tensor, zero_point: int, packed: Tensor, scale: Tensor) -> Tensor:
    """uint8 (..., D) less zero, times packed int8 (O, D), summed exactly, times scale (O,): float32 (..., O)."""
    nothing: list[float] = []
    centred = torch.zeros(len(scale), dtype=torch.int32)  # weights are
    found: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, zero_point, packed, scale, centred, None, 1.0, 0, torch.float32, "none", nothing, ""
    )
    return found


class BFloat16Linear(nn.Module):
    """A linear layer with weights, inputs and outputs in bfloat16, sums in float32."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().bfloat16())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> bfloat16 (..., O)."""
        return F.linear(x.bfloat16(), self.weight, self.bias)


def convert_precision(model: Model, precision: Precision, preprocess: PreprocessConfig) -> Model:
    """The model with its blocks in another precision: a copy for inference, and the caller's own stays as it is.

    In int8 one that cuts images into patches reads them as bytes (`reads_bytes`), so it knows how they are prepared.
    """
    if reason := explain_unsupported(model, precision):
        raise UsageError(f"{precision} cannot be: {reason}")
    if precision == "float32":
        return model
    assert isinstance(model, ViT)
    instead: dict[int, nn.Module] = {}  # what a copy finds here it takes, so no weight is copied to be thrown away
    for part in model.blocks.modules():
        if isinstance(part, Mlp) and precision == "int8":
            instead[id(part.act)] = InPlaceGELU()
            instead[id(part.fc2)] = Int8Linear(part.fc2, after_gelu=True)
        elif isinstance(part, nn.Linear) and id(part) not in instead:  # an Mlp comes before its parts
            instead[id(part)] = Int8Linear(part) if precision == "int8" else BFloat16Linear(part)
    if precision == "int8" and model.config.stem is None:
        instead[id(model.patch_embed)] = Int8PatchEmbed(model.patch_embed.proj, preprocess)
    return copy.deepcopy(model, instead).eval().requires_grad_(False)


def has_uint8_input(model: Model) -> bool:
    """Whether a model takes images as bytes, uint8 (B, C, S, S), rather than normalised."""
    return isinstance(model, ViT) and isinstance(model.patch_embed, Int8PatchEmbed)


@torch.inference_mode()
def measure_activation_ranges(model: ViT, images: Tensor) -> tuple[float, ...]:
    """Least and greatest of what each block multiplies, on images (B, C, S, S), for runtimes with fixed scales.

    In each block that is what the first layer reads, queries, keys, and what the other three layers read.
    """
    found: list[float] = []

    def record_range(values: Tensor) -> None:
        found.extend(float(end) for end in values.aminmax())

    def record_layer_input(_: nn.Module, inputs: tuple[Tensor]) -> None:
        record_range(inputs[0])

    def record_queries_and_keys(_: nn.Module, __: object, output: Tensor) -> None:
        queries, keys, _values = output.chunk(3, dim=-1)
        record_range(queries)
        record_range(keys)

    layers = [part for part in model.blocks.modules() if isinstance(part, nn.Linear)]
    attentions = [part for part in model.blocks.modules() if isinstance(part, Attention)]
    hooks = [layer.register_forward_pre_hook(record_layer_input) for layer in layers]
    hooks += [attention.qkv.register_forward_hook(record_queries_and_keys) for attention in attentions]
    try:
        model.encode(images)
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(found)


def explain_unsupported(model: Model, precision: Precision) -> str | None:
    """Why the model cannot be computed so by torch on this machine, or None."""
    if precision == "float32":
        return None
    if precision == "openvino-int8":
        return "that is another runtime's"
    if not isinstance(model, ViT):
        return "matrix products are computed in fewer bits, and a ResNet has convolutions"
    if precision == "int8" and next(model.parameters()).device.type != "cpu":
        return "it is for the CPU (--device cpu)"
    if precision == "int8" and not has_exact_int8_products():
        return "this CPU or this torch has no exact product of bytes (VNNI)"
    return None


@functools.cache
def has_exact_int8_products() -> bool:
    """Whether sums of products of bytes are exact here, shown by the largest there can be.

    Where oneDNN has no VNNI it adds pairs of products in 16 bits, which the largest exceed, and says nothing of it.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return False
    weight = torch.full((32, 256), _INT8_MAX, dtype=torch.int8)
    x = torch.full((16, 256), _ZERO_POINT + _INT8_MAX, dtype=torch.uint8)
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        found = _multiply_int8(x, _ZERO_POINT, packed, torch.ones(32))
    except RuntimeError:  # the name is there wherever torch is, what it calls is not
        return False
    return bool((found == 256 * _INT8_MAX**2).all())
