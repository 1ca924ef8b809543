"""Which parameter moves by which rule and rate, steps by hand and against references, and states that come back."""

import copy
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.optim import Optimizer

from tests import model_factory
from tests.model_factory import VARIANTS
from vitrail.config import OptimizerConfig
from vitrail.errors import ModelError, UsageError
from vitrail.model.vit import Model, ViT
from vitrail.training import optimizer as optimizers
from vitrail.training.optimizer import (
    build_optimizer,
    clip_gradients,
    get_optimizer_state,
    load_optimizer_state,
    newton_schulz,
    orthogonalize,
    set_lr,
)

KINDS = ["adam", "sgd", "muon"]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
MODELS: dict[str, Model] = {name: model_factory.build_vit(**change) for name, change in VARIANTS.items()} | {
    "bit": model_factory.build_bit()
}

KERNELS: dict[str, int | None] = {  # what decays, and layers up to the head at depth 3; None: 3 less the block
    r"patch_embed\.proj\.weight": 4,
    r"patch_embed\.backbone\.(stem|stages\.\d\.blocks\.\d(\.downsample)?)\.conv\d?\.weight": 4,
    r"blocks\.(\d)\.(attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.weight": None,
    r"attn_pool\.(q|kv|proj|mlp\.fc1|mlp\.fc2)\.weight": 0,
    r"(projection|pre_logits\.fc|head|head_dist|head\.fc)\.weight": 0,
    # BiT: stages of one and two units
    r"stem\.conv\.weight": 4,
    r"stages\.0\.blocks\.0\.(conv\d|downsample\.conv)\.weight": 3,
    r"stages\.1\.blocks\.0\.(conv\d|downsample\.conv)\.weight": 2,
    r"stages\.1\.blocks\.1\.conv\d\.weight": 1,
}
OTHERS: dict[str, int | None] = {
    r"patch_embed\.proj\.bias": 4,
    r"patch_embed\.backbone\..*norm\d?\.(weight|bias)": 4,
    r"cls_token|dist_token|reg_token": 4,
    r"pos_embed|pos_embed_x|pos_embed_y": 4,
    r"blocks\.(\d)\.(attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.bias": None,
    r"norm_pre\.(weight|bias)": 4,
    r"blocks\.(\d)\.(norm[12]|attn\.norm|mlp\.norm)\.(weight|bias)": None,
    r"blocks\.(\d)\.ls[12]\.gamma": None,
    r"blocks\.(\d)\.attn\.(offsets|relative_position_bias_table)": None,
    r"(norm|fc_norm)\.(weight|bias)": 0,
    r"attn_pool\.(latent|norm\.weight|(q|kv|proj|norm|mlp\.fc1|mlp\.fc2)\.bias)": 0,
    r"(projection|pre_logits\.fc|head|head_dist|head\.fc)\.bias": 0,
    r"stages\.0\.blocks\.0\.norm\d\.(weight|bias)": 3,
    r"stages\.1\.blocks\.0\.norm\d\.(weight|bias)": 2,
    r"stages\.1\.blocks\.1\.norm\d\.(weight|bias)": 1,
}
MATRICES = r"blocks\.\d\.(attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.weight"


def expected(name: str) -> tuple[bool, int]:
    """Whether a parameter decays and how many layers it lies below the head, by the tables above."""
    found = [
        (table is KERNELS, 3 - int(match[1]) if level is None else level)
        for table in (KERNELS, OTHERS)
        for pattern, level in table.items()
        if (match := re.fullmatch(pattern, name))
    ]
    assert len(found) == 1, name
    return found[0]


def by_name(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """The group of each parameter."""
    pairs = [(name, group) for group in optimizer.param_groups for name in group["param_names"]]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_parameter_is_in_one_group_with_its_decay_and_rate(model: Model, kind: Any) -> None:
    if kind == "muon" and not isinstance(model, ViT):
        return  # refused, below
    optimizer = build_optimizer(model, OptimizerConfig(kind=kind, lr=0.5, weight_decay=0.25, layer_decay=0.5))
    groups = by_name(optimizer)
    assert groups.keys() == dict(model.named_parameters()).keys()
    for name, group in groups.items():
        decayed, level = expected(name)
        assert group["decoupled" if kind == "sgd" else "weight_decay"] == (0.25 if decayed else 0.0), name
        assert group["lr"] == group["top"] == 0.5 * 0.5**level, name
        assert group["fused"], name
        gated = isinstance(model, ViT) and model.config.gated_mlp
        maps = {"attn.qkv": 3, "mlp.fc1.": 2 if gated else 1}.get(name[9:17], 1)
        assert group["matrices"] == (maps if kind == "muon" and re.fullmatch(MATRICES, name) else 0), name
        assert model.get_parameter(name) is group["params"][group["param_names"].index(name)]


def test_without_layer_decay_there_are_as_few_groups_as_rules() -> None:
    for kind, count in (("adam", 2), ("sgd", 2), ("muon", 4)):
        assert len(build_optimizer(model_factory.build_vit(), OptimizerConfig(kind=kind, lr=1.0)).param_groups) == count


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_are_left_out(kind: Any) -> None:
    model = model_factory.build_vit().requires_grad_(False)
    with pytest.raises(UsageError, match="every parameter is frozen"):
        build_optimizer(model, OptimizerConfig(kind=kind, lr=1.0))
    model.blocks[1].mlp.requires_grad_(True)
    trained = by_name(build_optimizer(model, OptimizerConfig(kind=kind, lr=1.0)))
    assert trained.keys() == {f"blocks.1.mlp.{part}" for part in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")}


def test_muon_without_a_matrix_to_move_is_refused() -> None:
    model = model_factory.build_vit()
    model.blocks.requires_grad_(False)
    for without in (model_factory.build_bit(), model):
        with pytest.raises(UsageError, match="choose adam"):
            build_optimizer(without, OptimizerConfig(kind="muon", lr=1.0))


def test_a_learning_rate_for_adam_is_that_of_what_muon_leaves() -> None:
    groups = by_name(build_optimizer(model_factory.build_vit(), OptimizerConfig(kind="muon", lr=0.5, adam_lr=0.125)))
    assert groups["blocks.0.mlp.fc1.weight"]["top"] == 0.5
    assert groups["head.weight"]["top"] == groups["blocks.0.mlp.fc1.bias"]["top"] == 0.125
    for wrong in ({"kind": "adam", "adam_lr": 0.1}, {"kind": "muon", "adam_lr": 0.0}):
        with pytest.raises(UsageError, match="adam_lr"):
            OptimizerConfig(lr=0.1, **wrong)


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["plain", "hidden-head", "distilled", "map", "headless", "bit"])
def test_the_head_has_its_own_learning_rate_and_nothing_else_changes(name: str, kind: Any, layer_decay: float) -> None:
    """The hidden layer before it and what pools tokens are not part of it."""
    if kind == "muon" and name == "bit":
        return  # refused, above
    model = MODELS[name]
    chosen = OptimizerConfig(kind=kind, lr=0.5, weight_decay=0.25, layer_decay=layer_decay)
    plain = by_name(build_optimizer(model, chosen))
    groups = by_name(build_optimizer(model, dataclasses.replace(chosen, head_lr=3.0)))
    assert groups.keys() == plain.keys()
    heads = [each for each in groups if re.fullmatch(r"(head|head_dist|head\.fc)\.(weight|bias)", each)]
    assert len(heads) == {"distilled": 4, "headless": 0}.get(name, 2)
    for each, group in groups.items():
        assert group["lr"] == group["top"] == (3.0 if each in heads else plain[each]["top"]), each
        same = group.keys() - {"params", "param_names", "lr", "top", "initial_lr"}
        assert all(group[key] == plain[each][key] for key in same), each
    if kind == "muon":
        both = by_name(build_optimizer(model, dataclasses.replace(chosen, head_lr=3.0, adam_lr=0.125)))
        assert all(both[each]["top"] == 3.0 for each in heads)
        assert both["blocks.2.norm1.bias"]["top"] == 0.125 * layer_decay


def test_a_learning_rate_of_the_head_that_is_none_is_refused() -> None:
    for wrong in (0.0, -1.0, math.inf):
        with pytest.raises(UsageError, match="head_lr is"):
            OptimizerConfig(lr=0.1, head_lr=wrong)


def test_the_schedule_scales_the_heads_learning_rate_too() -> None:
    optimizer = build_optimizer(model_factory.build_vit(), OptimizerConfig(lr=0.5, head_lr=3.0))
    set_lr(optimizer, 0.25)
    assert {name: group["lr"] for name, group in by_name(optimizer).items() if name.startswith("head")} == {
        "head.weight": 0.75, "head.bias": 0.75,
    }  # fmt: skip
    assert by_name(optimizer)["cls_token"]["lr"] == 0.125


def two(device: str, kind: Any, **changes: Any) -> tuple[Tensor, Tensor, Optimizer]:
    """A matrix of ones, a bias of ones, and an optimizer of these two alone, at learning rate 0.5 and decay 0.25."""
    model = model_factory.build_vit().requires_grad_(False).to(device)
    kernel, bias = (model.get_parameter(f"blocks.0.attn.proj.{name}") for name in ("weight", "bias"))
    for parameter in (kernel, bias):
        torch.nn.init.ones_(parameter).requires_grad_(True)
    return kernel, bias, build_optimizer(model, OptimizerConfig(kind=kind, lr=0.5, weight_decay=0.25, **changes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_gradients_shrinks_kernels_by_lr_times_decay_and_nothing_else(kind: Any, device: str) -> None:
    kernel, bias, optimizer = two(device, kind)
    for share, left in ((1.0, 1 - 0.125), (0.5, (1 - 0.125) * (1 - 0.0625)), (0.0, (1 - 0.125) * (1 - 0.0625))):
        kernel.grad, bias.grad = torch.zeros_like(kernel), torch.zeros_like(bias)
        set_lr(optimizer, share)
        optimizer.step()
        torch.testing.assert_close(kernel.detach(), torch.full_like(kernel, left), rtol=1e-6, atol=0)
        assert torch.equal(bias, torch.ones_like(bias))
    kernel.grad = bias.grad = None
    set_lr(optimizer, 1.0)
    optimizer.step()  # whoever has no gradient at all stays
    torch.testing.assert_close(kernel.detach(), torch.full_like(kernel, left), rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_sgd_by_hand(device: str) -> None:
    """Momentum 0.5: a velocity of 2, then 0.5 * 2 + 2 = 3; the decay does not enter it."""
    kernel, bias, optimizer = two(device, "sgd", momentum=0.5)
    for kernel_now, bias_now in ((0.875 - 1.0, 1 - 1.0), ((0.875 - 1.0) * 0.875 - 1.5, 0.0 - 1.5)):
        kernel.grad, bias.grad = torch.full_like(kernel, 2.0), torch.full_like(bias, 2.0)
        optimizer.step()
        assert torch.equal(kernel, torch.full_like(kernel, kernel_now))
        assert torch.equal(bias, torch.full_like(bias, bias_now))


@pytest.mark.parametrize("device", DEVICES)
def test_adam_by_hand(device: str) -> None:
    """Under a constant gradient each step of Adam is the learning rate, but for eps: 1e-8 in 1e-3 here."""
    kernel, bias, optimizer = two(device, "adam")
    for kernel_now, bias_now in ((0.875 - 0.5, 0.5), (0.375 * 0.875 - 0.5, 0.0)):
        kernel.grad, bias.grad = torch.full_like(kernel, 2.0), torch.full_like(bias, 1e-3)
        optimizer.step()
        torch.testing.assert_close(kernel.detach(), torch.full_like(kernel, kernel_now), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(bias.detach(), torch.full_like(bias, bias_now), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_muon_by_hand(device: str) -> None:
    """A multiple of an orthogonal matrix becomes that matrix, times what the polynomial makes of 1 / sqrt(32)."""
    kernel, bias, optimizer = two(device, "muon")
    turned = torch.eye(32).roll(5, dims=0).to(device)
    kernel.grad, bias.grad = 7.0 * turned, torch.full_like(bias, 3.0)
    optimizer.step()
    moved = 0.5 * 0.2 * math.sqrt(32) * polynomial(torch.tensor(32**-0.5)).item()
    precision = 1e-5 if device == "cpu" else 0.02
    torch.testing.assert_close(kernel.detach(), 0.875 - moved * turned, rtol=precision, atol=precision)
    torch.testing.assert_close(bias.detach(), torch.full_like(bias, 0.5), rtol=1e-4, atol=1e-5)


def polynomial(values: Tensor) -> Tensor:
    """What five iterations make of singular values."""
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


def straightforward(matrix: Tensor) -> Tensor:
    """One matrix by its singular values, in float64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ torch.diag(polynomial(s / s.norm())) @ vh


def matrices(device: str, *shapes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


SHAPES = ((8, 8), (16, 4), (4, 16), (8, 8), (1, 5), (5, 1), (16, 4))


@pytest.mark.parametrize("device", DEVICES)
def test_newton_schulz_is_its_polynomial_of_the_singular_values(device: str) -> None:
    precision = 1e-5 if device == "cpu" else 0.03  # bf16 there
    given = matrices(device, *SHAPES)
    for matrix, found in zip(given, orthogonalize(given), strict=True):
        assert found.dtype is (torch.float32 if device == "cpu" else torch.bfloat16)
        torch.testing.assert_close(found.double(), straightforward(matrix), atol=precision, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_singular_values_come_to_lie_in_the_known_band(device: str) -> None:
    """From 0.3 % of the norm up to nearly all of it: 0.68 to 1.21."""
    u, v = (torch.linalg.qr(matrix)[0] for matrix in matrices("cpu", (48, 48), (96, 48)))
    slack = 1e-4 if device == "cpu" else 0.03
    for values in (torch.logspace(0, -2, 48), torch.logspace(2, 1, 48), torch.ones(48)):
        assert (values / values.norm()).min() > 0.003
        found = torch.linalg.svdvals(newton_schulz((u * values @ v.mT)[None].to(device))[0].double())
        assert 0.68 - slack < found.min() < found.max() < 1.21 + slack


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_gives_what_each_gives_alone(device: str) -> None:
    given = matrices(device, *SHAPES)
    precision = 1e-6 if device == "cpu" else 0.02
    for matrix, found in zip(given, orthogonalize(given), strict=True):
        torch.testing.assert_close(found, orthogonalize([matrix])[0], atol=precision, rtol=0)


def test_a_gradient_of_zero_moves_nothing() -> None:
    assert not orthogonalize([torch.zeros(4, 8)])[0].any()


def learning(model: Model, count: int, optimizer: Optimizer, start: int = 0) -> list[dict[str, Tensor]]:
    """`count` steps with gradients that the step's number decides, which are given back; the learning rate falls."""
    seen = []
    for step in range(start, start + count):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        set_lr(optimizer, 1 - step / 10)
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
    return seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_muon_is_the_textbooks_matrix_by_matrix(device: str, layer_decay: float) -> None:
    """In float64: an average of gradients, the polynomial of its singular values, and q, k and v each by itself."""
    model = model_factory.build_vit().to(device)
    chosen = OptimizerConfig(kind="muon", lr=0.01, weight_decay=0.1, momentum=0.95, layer_decay=layer_decay)
    start = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    gradients = learning(model, 3, build_optimizer(model, chosen))
    for name in filter(re.compile(MATRICES).fullmatch, start):
        weight, average = start[name], torch.zeros_like(start[name])
        top = 0.01 * layer_decay ** expected(name)[1]
        for step in range(3):
            gradient, lr = gradients[step][name].double(), top * (1 - step / 10)
            average = 0.95 * average + 0.05 * gradient
            direction = 0.95 * average + 0.05 * gradient
            parts = direction.chunk(3) if "qkv" in name else (direction,)
            moved = torch.cat([straightforward(part) * 0.2 * max(part.shape) ** 0.5 for part in parts])
            weight = weight * (1 - lr * 0.1) - lr * moved
        precision = 1e-5 if device == "cpu" else 2e-3
        torch.testing.assert_close(model.get_parameter(name).detach().double(), weight, atol=precision, rtol=0)


def test_muon_is_torchs_own_but_for_what_that_rounds() -> None:
    """torch's computes in bf16 everywhere, which moves a step by some percent of its size."""
    ours, theirs = model_factory.build_vit(), model_factory.build_vit()
    names = [
        name for name in filter(re.compile(MATRICES).fullmatch, dict(ours.named_parameters())) if "qkv" not in name
    ]
    reference = torch.optim.Muon(
        [theirs.get_parameter(name) for name in names],
        lr=0.01, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    before = {name: theirs.get_parameter(name).detach().clone() for name in names}
    gradients = learning(
        ours, 1, build_optimizer(ours, OptimizerConfig(kind="muon", lr=0.01, weight_decay=0.1, momentum=0.95))
    )
    for name in names:
        theirs.get_parameter(name).grad = gradients[0][name]
    reference.step()
    for name in names:
        step = theirs.get_parameter(name) - before[name]
        difference = ours.get_parameter(name) - theirs.get_parameter(name)
        assert difference.norm() < 0.02 * step.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_muon_leaves_and_the_other_two_are_torchs_own(kind: Any, device: str) -> None:
    """Without decay SGD is torch's, with it AdamW is: three steps of all parameters but Muon's matrices."""
    model, other = model_factory.build_vit().to(device), model_factory.build_vit().to(device)
    decay = 0.0 if kind == "sgd" else 0.1
    gradients = learning(model, 3, build_optimizer(model, OptimizerConfig(kind=kind, lr=0.01, weight_decay=decay)))
    names = [name for name, _ in model.named_parameters() if kind != "muon" or not re.fullmatch(MATRICES, name)]
    groups = [
        {"params": [other.get_parameter(n) for n in names if expected(n)[0]], "weight_decay": decay},
        {"params": [other.get_parameter(n) for n in names if not expected(n)[0]], "weight_decay": 0.0},
    ]
    reference = torch.optim.SGD(groups, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(groups)
    for step in range(3):
        for name in names:
            other.get_parameter(name).grad = gradients[step][name]
        for group in reference.param_groups:
            group["lr"] = 0.01 * (1 - step / 10)
        reference.step()
    for name in names:
        torch.testing.assert_close(model.get_parameter(name), other.get_parameter(name), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_a_file_and_three_more_are_six_steps_to_the_bit(kind: Any, device: str, tmp_path: Path) -> None:
    chosen = OptimizerConfig(kind=kind, lr=0.01, weight_decay=0.1, layer_decay=0.7)
    whole = model_factory.build_vit().to(device)
    learning(whole, 6, build_optimizer(whole, chosen))
    model = model_factory.build_vit().to(device)
    optimizer = build_optimizer(model, chosen)
    learning(model, 3, optimizer)
    safetensors.torch.save_file(get_optimizer_state(optimizer), tmp_path / "state.safetensors")
    fresh = model_factory.build_vit().to(device)
    fresh.load_state_dict(model.state_dict())
    again = build_optimizer(fresh, chosen)
    load_optimizer_state(again, safetensors.torch.load_file(tmp_path / "state.safetensors"))
    learning(fresh, 3, again, start=3)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, fresh.get_parameter(name)), name


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_loaded_is_a_copy_and_torchs_own_state_dict_serves_too(kind: Any) -> None:
    chosen = OptimizerConfig(kind=kind, lr=0.01, weight_decay=0.1)
    model, second, third = model_factory.build_vit(), model_factory.build_vit(), model_factory.build_vit()
    optimizer = build_optimizer(model, chosen)
    learning(model, 2, optimizer)
    for fresh in (second, third):
        fresh.load_state_dict(model.state_dict())
    by_name, by_number = build_optimizer(second, chosen), build_optimizer(third, chosen)
    load_optimizer_state(by_name, get_optimizer_state(optimizer))
    by_number.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    learning(second, 1, by_name, start=2)
    learning(third, 1, by_number, start=2)
    learning(model, 1, optimizer, start=2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)), name
        assert torch.equal(parameter, third.get_parameter(name)), name


def test_a_state_that_does_not_fit_the_model_is_refused() -> None:
    model = model_factory.build_vit()
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.01))
    load_optimizer_state(optimizer, {})  # of a run that has not stepped yet
    learning(model, 1, optimizer)
    stored = get_optimizer_state(optimizer)
    with pytest.raises(ModelError, match="lacks 'cls_token'"):
        load_optimizer_state(
            optimizer, {key: value for key, value in stored.items() if not key.startswith("cls_token")}
        )
    with pytest.raises(ModelError, match=r"holds 'blocks\.9\.norm1\.bias/step'"):
        load_optimizer_state(optimizer, stored | {"blocks.9.norm1.bias/step": torch.tensor(1.0)})


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_changes_no_bit(kind: Any) -> None:
    """torch's fused kernels share a group among threads; the gradients are given, since products may differ."""
    results = []
    for threads in (1, 2):
        model = model_factory.build_vit(width=128, mlp=515, heads=4)
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        optimizer = build_optimizer(model, OptimizerConfig(kind=kind, lr=0.01, weight_decay=0.1))
        torch.set_num_threads(threads)
        try:
            optimizer.step()
        finally:
            torch.set_num_threads(1)
        results.append([p.detach() for n, p in model.named_parameters() if not re.fullmatch(MATRICES, n)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_clipping_by_hand(device: str) -> None:
    first, second, idle = (torch.nn.Parameter(torch.zeros(2, device=device)) for _ in range(3))
    first.grad, second.grad = torch.tensor([3.0, 0.0], device=device), torch.tensor([0.0, -4.0], device=device)
    parameters = [first, second, idle]
    assert clip_gradients(parameters, None).item() == 5.0
    assert clip_gradients(parameters, 10.0).item() == 5.0
    assert second.grad.tolist() == [0.0, -4.0]
    assert clip_gradients(iter(parameters), 2.5).item() == 5.0
    assert first.grad.tolist() == pytest.approx([1.5, 0.0], abs=1e-6)
    assert second.grad.tolist() == pytest.approx([0.0, -2.0], abs=1e-6)
    assert idle.grad is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_shows_in_the_norm(value: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, value])
    assert not clip_gradients([parameter], 1.0).isfinite()


def test_muon_needs_two_batches_for_a_whole_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Square maps in one; the two of each MLP, one upright and one lying, in the other."""
    model, batches = model_factory.build_vit(), list[tuple[int, ...]]()

    def noted(batch: Tensor) -> Tensor:
        batches.append(tuple(batch.shape))
        return newton_schulz(batch)

    monkeypatch.setattr(optimizers, "newton_schulz", noted)
    learning(model, 1, build_optimizer(model, OptimizerConfig(kind="muon", lr=0.01)))
    assert batches == [(12, 32, 32), (6, 32, 64)]
