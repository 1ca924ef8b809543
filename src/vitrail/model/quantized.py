"""A ViT in lower precision on the CPU: bfloat16, or int8 with a scale for each output and each token.

    B images   C channels   S image side   P patch side   N tokens   D inputs of a layer   O outputs

Only the blocks' matrix products, nearly all of a ViT's work, are quantized: norms, attention, the residual stream and
the head stay float32. In int8 a weight is round(w / s), with s = max |w| / 127 of its output. An input is round(x / t),
with a scale t of its token, computed anew for each batch. Their products are summed as integers. So are those of
patches with the embedding's weights, where an input is a pixel's byte itself.
torch's own quantization is deprecated, and its compiler needs a C++ compiler where it runs. So this calls oneDNN's int8
product as torch ships it, and is unavailable where torch does not. The rest are passes over memory, each as long as a
tenth of a product, so there are as few as torch has operators for.
"""

import copy
import functools
import platform

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Precision, PreprocessConfig
from vitrail.errors import UsageError
from vitrail.model.positions import rotate_packed
from vitrail.model.vit import Attention, Mlp, Model, PatchEmbed, ViT, crop_remainder, patchify

_TINY = torch.finfo(torch.float32).tiny
_INT8_MAX = 127  # of a weight; -128 is unused, so that the range is symmetric
_ZERO_POINT = 128  # the byte that stands for 0 in unsigned inputs
_GELU_ZERO_POINT = 32  # the same for inputs that are a GELU's outputs
_GELU_MIN = -0.17  # a GELU's outputs lie above it
_ROUNDING_OFFSET = 1.5 * 2**23  # a float32 near it is an integer, whose last byte is that of its mantissa


def describe_cpu() -> str:
    """The CPU features that speed depends on, such as x86_64-avx512-vnni; measurements hold where they are equal."""
    tests = {"vnni": "_is_vnni_supported", "bf16": "_is_avx512_bf16_supported", "amx": "_is_amx_tile_supported"}
    features = [name for name, test in tests.items() if getattr(torch.cpu, test, bool)()]
    return "-".join([platform.machine().lower(), torch.backends.cpu.get_cpu_capability().lower(), *features])


def describe_processor(device: torch.device) -> str:
    """The CPU's features or the GPU's name, such as cuda-nvidia-h200."""
    if device.type != "cuda":
        return describe_cpu() if device.type == "cpu" else device.type
    return f"cuda-{torch.cuda.get_device_name(device).lower().replace(' ', '-')}"


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and no other copy of them."""

    def __init__(self, linear: nn.Linear, *, after_gelu: bool = False) -> None:
        super().__init__()
        weight = linear.weight.detach()  # (O, D)
        quantized, self.scale = _quantize_weight(weight)
        self.packed = torch.ops.onednn.qlinear_prepack(quantized, None)
        self.bias = torch.zeros(len(weight)) if linear.bias is None else linear.bias.detach().clone()
        self.after_gelu = after_gelu
        self.zero_point = _GELU_ZERO_POINT if after_gelu else _ZERO_POINT
        self.offset = torch.full((weight.shape[1],), _ROUNDING_OFFSET + self.zero_point)  # (D,)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> float32 (..., O). A GELU's outputs are overwritten."""
        if not x.numel():
            return x.new_zeros((*x.shape[:-1], len(self.scale)))
        token_scale = self._compute_token_scale(x)
        # Adding _ROUNDING_OFFSET rounds, and the last byte of the sum is the result: one pass instead of three.
        rounded = torch.addcmul(self.offset, x, 1 / token_scale, out=x if self.after_gelu else None)
        out = _multiply_int8(rounded.view(torch.int32).to(torch.uint8), self.zero_point, self.packed, self.scale)
        return torch.addcmul(self.bias, out, token_scale, out=out)

    def _compute_token_scale(self, x: Tensor) -> Tensor:
        """(..., 1): the value of one integer step, shared by all inputs of a token."""
        largest = x.amax(dim=-1, keepdim=True)
        if self.after_gelu:
            return largest.div_(255 - _GELU_ZERO_POINT).clamp_(min=-_GELU_MIN / _GELU_ZERO_POINT)
        return torch.maximum(largest, -x.amin(dim=-1, keepdim=True)).div_(_INT8_MAX).clamp_(min=_TINY)


class InPlaceGELU(nn.Module):
    """The erf form of GELU, which overwrites its input.

    torch takes a fifth of the tanh form's time for it. They differ by less than 0.0005, a few hundredths of the int8
    step that follows.
    """

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten.gelu_(x)
        return out


class Int8PatchEmbed(nn.Module):
    """The int8 patch embedding of uint8 images."""

    def __init__(self, embedding: PatchEmbed, preprocess: PreprocessConfig) -> None:
        super().__init__()
        self.config = embedding.config
        quantized, scale, self.bias = quantize_patch_embed(embedding.proj, preprocess)
        self.packed = torch.ops.onednn.qlinear_prepack(quantized.flatten(1), None)
        self.scale = scale / 255

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, C, S, S) -> float32 (B, N, O)."""
        patches = patchify(crop_remainder(images, self.config), self.config.patch)
        if not patches.numel():
            return self.bias.new_zeros((*patches.shape[:-1], len(self.bias)))
        return _multiply_int8(patches, 0, self.packed, self.scale).add_(self.bias)


def quantize_patch_embed(patch_embed: nn.Conv2d, preprocess: PreprocessConfig) -> tuple[Tensor, Tensor, Tensor]:
    """int8 weights (O, C, P, P), their scales (O,) and biases (O,) for patches of pixels from 0 to 1.

    mean and std are folded in, so nothing else is rounded. The mean's part of the bias uses the rounded weights, so the
    rounding error is multiplied with pixels around 0, as it is with normalized inputs.
    """
    assert patch_embed.bias is not None
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (preprocess.mean, preprocess.std))
    weight = patch_embed.weight.detach() / std
    flat, scale = _quantize_weight(weight.flatten(1))
    quantized = flat.view_as(weight)
    return quantized, scale, patch_embed.bias.detach() - (quantized * mean).sum((1, 2, 3)) * scale


def _quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(O, D) -> int8 (O, D) and the scale of each output (O,)."""
    scale = (weight.abs().amax(dim=1) / _INT8_MAX).clamp_(min=_TINY)
    return (weight / scale[:, None]).round_().to(torch.int8), scale


def _multiply_int8(x: Tensor, zero_point: int, packed: Tensor, scale: Tensor) -> Tensor:
    """uint8 (..., D) minus zero_point, times packed int8 (O, D), summed exactly, times scale (O,): float32 (..., O)."""
    weight_zero_points = torch.zeros(len(scale), dtype=torch.int32)
    out: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, zero_point, packed, scale, weight_zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out


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
    """A copy of the model for inference, with its blocks in another precision.

    In int8 a model without a stem takes uint8 images (`has_uint8_input`), so the normalization is part of it.
    """
    if reason := explain_unsupported(model, precision):
        raise UsageError(f"{precision} is not possible: {reason}")
    if precision == "float32":
        return model
    assert isinstance(model, ViT)
    if next(model.parameters()).device.type == "cuda" and model.config.stem is None:
        return convert_all_to_bfloat16(model)
    replacements: dict[int, nn.Module] = {}  # deepcopy's memo: it takes these, so no weight is copied to be discarded
    for part in model.blocks.modules():
        if isinstance(part, Mlp) and precision == "int8":
            if isinstance(part.act, nn.GELU):
                replacements[id(part.act)] = InPlaceGELU()
            replacements[id(part.fc2)] = Int8Linear(part.fc2, after_gelu=True)
        elif isinstance(part, nn.Linear) and id(part) not in replacements:  # an Mlp comes before its layers
            replacements[id(part)] = Int8Linear(part) if precision == "int8" else BFloat16Linear(part)
    if precision == "int8" and model.config.stem is None:
        replacements[id(model.patch_embed)] = Int8PatchEmbed(model.patch_embed, preprocess)
    return copy.deepcopy(model, replacements).eval().requires_grad_(False)


class Float32Output(nn.Module):
    """A module whose output is float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x).float()


def convert_all_to_bfloat16(model: ViT) -> ViT:
    """A copy in bfloat16 up to the last norm; pooling and head stay float32, since they decide between close logits.

    The residual stream is bfloat16 too: a GPU would spend a sixth of its time on the other half of its bytes.
    """
    converted = copy.deepcopy(model).eval().requires_grad_(False)
    for name, part in converted.named_children():
        if name in ("patch_embed", "pos_drop", "norm_pre", "blocks", "norm"):
            part.bfloat16()
    for name, parameter in list(converted.named_parameters(recurse=False)):  # positions and prefix tokens
        setattr(converted, name, nn.Parameter(parameter.bfloat16(), requires_grad=False))
    converted.add_module("norm", Float32Output(converted.norm))
    return converted


def get_input_dtype(model: nn.Module) -> torch.dtype:
    """The type in which a model takes normalized images."""
    is_bfloat16 = isinstance(model, ViT) and isinstance(model.norm, Float32Output)
    return torch.bfloat16 if is_bfloat16 else torch.float32


def has_uint8_input(model: nn.Module) -> bool:
    """Whether a model takes uint8 images (B, C, S, S) instead of normalized ones."""
    return isinstance(model, ViT) and isinstance(model.patch_embed, Int8PatchEmbed)


@torch.inference_mode()
def measure_activation_ranges(model: ViT, images: Tensor) -> tuple[float, ...]:
    """Minimum and maximum of each block's activations on images (B, C, S, S), for runtimes with fixed scales.

    For each block: the first layer's input, queries and keys (turned by rotary positions), and the inputs of the other
    three layers.
    """
    ranges: list[float] = []
    grid = model.config.compute_grid((images.shape[2], images.shape[3]))
    rotary = model.compute_rotary(grid, images.device)

    def record_layer_input(_: nn.Module, inputs: tuple[Tensor]) -> None:
        ranges.extend(map(float, inputs[0].aminmax()))

    def record_queries_and_keys(_: nn.Module, __: object, output: Tensor) -> None:
        for values in rotate_packed(output, rotary, model.config).chunk(3, dim=-1)[:2]:
            ranges.extend(map(float, values.aminmax()))

    layers = [part for part in model.blocks.modules() if isinstance(part, nn.Linear)]
    attentions = [part for part in model.blocks.modules() if isinstance(part, Attention)]
    hooks = [layer.register_forward_pre_hook(record_layer_input) for layer in layers]
    hooks += [attention.qkv.register_forward_hook(record_queries_and_keys) for attention in attentions]
    try:
        model.encode(images)
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(ranges)


def explain_unsupported(model: Model, precision: Precision) -> str | None:
    """Why torch cannot compute the model in this precision on this machine; None if it can."""
    if precision == "float32":
        return None
    if precision == "openvino-int8":
        return "torch does not compute it; another runtime does"
    if not isinstance(model, ViT):
        return "lower precision is for matrix products, and a ResNet has convolutions"
    if precision == "int8" and next(model.parameters()).device.type != "cpu":
        return "it is for the CPU (--device cpu)"
    if precision == "int8" and not has_exact_int8_products():
        return "this CPU or this torch has no exact int8 products (VNNI)"
    return None


@functools.cache
def has_exact_int8_products() -> bool:
    """Whether int8 products are exact on this machine, tested with the largest possible values.

    Without VNNI oneDNN adds pairs of products in 16 bits, where the largest overflow without an error.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return False
    weight = torch.full((32, 256), _INT8_MAX, dtype=torch.int8)
    x = torch.full((16, 256), _ZERO_POINT + _INT8_MAX, dtype=torch.uint8)
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        products = _multiply_int8(x, _ZERO_POINT, packed, torch.ones(32))
    except RuntimeError:  # the operator is registered everywhere, its implementation is not
        return False
    return bool((products == 256 * _INT8_MAX**2).all())
