"""Models in lower precision."""

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import model_factory
from vitrail.config import PreprocessConfig
from vitrail.data.transforms import normalize
from vitrail.errors import UsageError
from vitrail.model import quantized
from vitrail.model.quantized import (
    BFloat16Linear,
    InPlaceGELU,
    Int8Linear,
    convert_all_to_bfloat16,
    convert_precision,
    describe_cpu,
    explain_unsupported,
    get_input_dtype,
    has_exact_int8_products,
    has_uint8_input,
)
from vitrail.model.vit import Model, ViT

needs_int8 = pytest.mark.skipif(
    not has_exact_int8_products(), reason="int8 needs a CPU with VNNI and a torch with oneDNN"
)


def build_layer(inputs: int, outputs: int, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(inputs, outputs, bias=bias)
    for parameter in linear.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return linear


def build_preprocess(model: Model) -> PreprocessConfig:
    size, channels = model.config.image_size, model.config.channels
    mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]
    return PreprocessConfig(size=size, resize=size, mean=mean, std=std)


def random_images(model: Model) -> Tensor:
    """Three uint8 images."""
    shape = (3, model.config.channels, *model.config.image_size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def by_hand(linear: nn.Linear, x: Tensor) -> Tensor:
    """The same build_layer in whole numbers, in float64 that holds them exactly."""
    weight, token = linear.weight.detach(), x.abs().amax(dim=-1, keepdim=True)
    scale = weight.abs().amax(dim=1) / 127
    rounded = (weight / scale[:, None]).round().double()
    inputs = (x * (127 / token)).round().double()
    assert rounded.abs().max() <= 127 >= inputs.abs().max()
    bias = 0.0 if linear.bias is None else linear.bias.detach().double()
    return (inputs @ rounded.mT) * scale.double() * (token.double() / 127) + bias


@needs_int8
@pytest.mark.parametrize("inputs", [8, 192, 770, 3072])
@pytest.mark.parametrize("bias", [True, False])
def test_int8_is_the_product_of_whole_numbers(inputs: int, bias: bool) -> None:
    linear = build_layer(inputs, 40, bias=bias)
    x = torch.randn(3, 17, inputs, generator=torch.Generator().manual_seed(1))
    expected = by_hand(linear, x)
    torch.testing.assert_close(Int8Linear(linear)(x).double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


@needs_int8
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_what_a_gelu_gave_has_all_steps_of_a_byte(size: float) -> None:
    """32 of them below 0, which is -0.17 at least, and 223 above, of a size that holds both ends."""
    linear = build_layer(192, 40)
    x = nn.functional.gelu(size * torch.randn(3, 17, 192, generator=torch.Generator().manual_seed(4)))
    weight, step = linear.weight.detach(), (x.amax(dim=-1, keepdim=True) / 223).clamp(min=0.17 / 32)
    scale = weight.abs().amax(dim=1) / 127
    inputs = (x / step).round().double()
    assert inputs.min() >= -32
    assert inputs.max() <= 223
    expected = inputs @ (weight / scale[:, None]).round().double().mT * scale.double() * step.double()
    expected += linear.bias.detach()
    outputs = Int8Linear(linear, after_gelu=True)(x.clone())
    torch.testing.assert_close(outputs.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


def test_a_gelu_is_written_over_its_input() -> None:
    x = torch.linspace(-30, 30, 600_001)
    expected = nn.functional.gelu(x)
    assert InPlaceGELU()(x).data_ptr() == x.data_ptr()
    assert torch.equal(x, expected)
    assert x.min() > -0.17


@needs_int8
def test_the_inputs_of_other_layers_stay_as_they_are() -> None:
    x = torch.randn(3, 5, 64)
    before = x.clone()
    Int8Linear(build_layer(64, 8))(x)
    assert torch.equal(x, before)


@needs_int8
def test_the_largest_sums_of_products_are_exact() -> None:
    """Where pairs of products were added in 16 bits, as without VNNI, these would be cut off."""
    linear = nn.Linear(4096, 32, bias=False)
    nn.init.constant_(linear.weight, 127.0)
    for value in (127.0, -127.0):
        assert Int8Linear(linear)(torch.full((5, 4096), value)).eq(4096 * 127 * value).all()


def test_a_cpu_without_exact_products_is_not_offered_int8() -> None:
    script = "from vitrail.model.quantized import has_exact_int8_products; print(has_exact_int8_products())"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}  # whose products are added in 16 bits
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@needs_int8
def test_every_token_and_every_output_has_a_scale_of_its_own() -> None:
    """A token a thousand times as large changes no other, and rows of weights that are tiny keep their digits."""
    linear = build_layer(64, 16)
    nn.init.zeros_(linear.bias)
    with torch.no_grad():
        linear.weight[3] *= 1e-6
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(2))
    small = Int8Linear(linear)(x)
    louder = x.clone()
    louder[:, 2] *= 1000
    outputs = Int8Linear(linear)(louder)
    torch.testing.assert_close(outputs[:, 2], 1000 * small[:, 2], rtol=1e-5, atol=0)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(outputs[:, others], small[:, others])
    assert (small[..., 3] / linear(x)[..., 3] - 1).abs().median() < 0.03


@needs_int8
def test_int8_is_off_by_no_more_than_its_steps_allow() -> None:
    """Half a step of each input times the weights, and half a step of each weight times the inputs, at most."""
    linear, x = build_layer(192, 64), torch.randn(50, 192, generator=torch.Generator().manual_seed(3))
    weight = linear.weight.detach()
    input_step, weight_step = x.abs().amax(dim=1) / 127, weight.abs().amax(dim=1) / 127
    bound = input_step[:, None] / 2 * weight.abs().sum(dim=1) + weight_step / 2 * x.abs().sum(dim=1)[:, None]
    bound = bound + 192 * input_step[:, None] * weight_step / 4
    error = (Int8Linear(linear)(x) - linear(x)).abs()
    assert (error <= bound).all()
    assert error.max() > 0.01 * bound.max(), "the bound says nothing"


@needs_int8
def test_no_tokens_give_no_outputs() -> None:
    assert Int8Linear(nn.Linear(8, 3))(torch.zeros(0, 5, 8)).shape == (0, 5, 3)


@needs_int8
def test_zeros_give_the_bias() -> None:
    linear = build_layer(32, 8)
    assert torch.equal(Int8Linear(linear)(torch.zeros(2, 3, 32)), linear.bias.detach().expand(2, 3, 8))
    nn.init.zeros_(linear.weight)
    assert torch.equal(Int8Linear(linear)(torch.ones(1, 32)), linear.bias.detach().expand(1, 8))


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("int8", marks=needs_int8)])
@pytest.mark.parametrize("variant", model_factory.VARIANTS)
def test_every_kind_of_vit_is_computed_nearly_alike_and_stays_as_it_was(variant: str, precision: str) -> None:
    model = model_factory.build_vit(**model_factory.VARIANTS[variant])
    uint8_images, before = random_images(model), copy.deepcopy(model.state_dict())
    images = normalize(uint8_images, build_preprocess(model))
    with torch.inference_mode():
        lower = convert_precision(model, precision, build_preprocess(model))
        assert has_uint8_input(lower) == (precision == "int8" and variant != "hybrid")
        inputs = uint8_images if has_uint8_input(lower) else images
        expected, outputs = model(images), lower(inputs)
        assert outputs.dtype == torch.float32
        assert not torch.equal(outputs, expected)
        assert (outputs - expected).norm() < 0.06 * expected.norm()
        torch.testing.assert_close(lower.compute_features(inputs), model.compute_features(images), rtol=0.3, atol=0.3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert next(model.parameters()).requires_grad


@pytest.mark.parametrize("variant", sorted(set(model_factory.VARIANTS) - {"hybrid"}))
def test_a_vit_for_a_gpu_is_bfloat16_up_to_its_head(variant: str) -> None:
    model = model_factory.build_vit(**model_factory.VARIANTS[variant])
    images = normalize(random_images(model), build_preprocess(model))
    converted, dtypes = convert_all_to_bfloat16(model), set[torch.dtype]()
    for block in converted.blocks:
        block.register_forward_hook(lambda _, inputs, output: dtypes.update((inputs[0].dtype, output.dtype)))
    converted.head.register_forward_hook(lambda _, inputs, output: dtypes.update((inputs[0].dtype, output.dtype)))
    with torch.inference_mode():
        expected, outputs = model(images), converted(images.to(get_input_dtype(converted)))
    assert dtypes == {torch.bfloat16, torch.float32}  # the stream, and the head
    assert {parameter.dtype for parameter in converted.blocks.parameters()} == {torch.bfloat16}
    assert outputs.dtype == torch.float32
    assert 0 < (outputs - expected).norm() < 0.06 * expected.norm()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("precision", "kind"), [("bfloat16", BFloat16Linear), ("int8", Int8Linear)])
def test_a_lowered_model_holds_no_float32_of_what_was_lowered(precision: str, kind: type[nn.Module]) -> None:
    if precision == "int8" and not has_exact_int8_products():
        pytest.skip("int8 needs a CPU with VNNI and a torch with oneDNN")
    lower = convert_precision(model_factory.build_vit(), precision, build_preprocess(model_factory.build_vit()))
    inside = list(lower.blocks.modules())
    assert sum(isinstance(part, kind) for part in inside) == 4 * 3
    assert not any(isinstance(part, nn.Linear) for part in inside)
    tensors = [value for part in inside if isinstance(part, kind) for value in vars(part).values()]
    tensors += [value for part in inside for value in (*part._parameters.values(), *part._buffers.values())]
    assert not any(isinstance(each, Tensor) and each.dtype == torch.float32 and each.ndim > 1 for each in tensors)


@needs_int8
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pool": "map", "class_token": False, "positions": "sincos-2d"},
        {"positions": "relative", "image_size": (24, 40)},
        {"channels": 1},
    ],
)
def test_patches_of_bytes_are_embedded_as_by_rounded_weights(changes: dict[str, Any]) -> None:
    """Nothing else is rounded: pixels are bytes already."""
    model = model_factory.build_vit(**changes)
    preprocess, uint8_images = build_preprocess(model), random_images(model)
    lower = convert_precision(model, "int8", preprocess)
    assert isinstance(lower, ViT)
    mean, std = (torch.tensor(values).double().reshape(-1, 1, 1) for values in (preprocess.mean, preprocess.std))
    weight = model.patch_embed.proj.weight.detach().double() / std
    scale = weight.abs().amax((1, 2, 3), keepdim=True) / 127
    pixels = uint8_images.double() / 255 - mean
    by_hand = F.conv2d(pixels, (weight / scale).round() * scale, stride=model.config.patch)
    expected = by_hand.flatten(2).mT + model.patch_embed.proj.bias.detach()
    with torch.inference_mode():
        torch.testing.assert_close(lower.patch_embed(uint8_images).double(), expected, rtol=1e-5, atol=1e-5)
        assert lower(uint8_images[:0]).shape == (0, model.config.classes)


def test_the_two_forms_of_gelu_differ_by_less_than_a_two_thousandth() -> None:
    """Which is why int8 may take the faster."""
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    assert (nn.GELU()(x) - nn.GELU(approximate="tanh")(x)).abs().max() < 5e-4


def test_what_cannot_be_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="a ResNet has convolutions"):
        convert_precision(model_factory.build_bit(), "bfloat16", build_preprocess(model_factory.build_bit()))
    monkeypatch.setattr(quantized, "has_exact_int8_products", lambda: False)
    with pytest.raises(UsageError, match=r"no exact int8 products \(VNNI\)"):
        convert_precision(model_factory.build_vit(), "int8", build_preprocess(model_factory.build_vit()))
    assert explain_unsupported(model_factory.build_bit(), "float32") is None
    same = model_factory.build_vit()
    assert convert_precision(same, "float32", build_preprocess(same)) is same


def test_the_cpu_is_named_by_what_it_can_do() -> None:
    assert describe_cpu() == describe_cpu()
    assert set(describe_cpu()) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-")
    if "vnni" in describe_cpu() and torch.backends.mkldnn.is_available():
        assert has_exact_int8_products()
