"""Images a second in training and inference: vitrail beside timm, torchvision, transformers and a plain ViT.

    python bench/throughput.py [--models s16 b16 l16 h14] [--device cuda] [--rounds 7] [--json FILE]
    python bench/throughput.py --contenders timm vitrail --settings compiled    # less to compile

All contenders of a row are built in one process, get the same images on the device, the same batch size and bf16
autocast (float32 on a CPU), and take turns of a few steps; a row shows medians over the rounds. A training step is
forward, cross entropy, backward, clipping at 1 and fused AdamW; vitrail's is the trainer's own, schedule and the check
of its loss included. Inference of vitrail is the network alone, and what `vitrail predict` does with a batch of pixels.
Each contender tries its settings for a round, which is not counted, and goes on with the best. Turns are timed by CUDA
events, on a CPU by the clock. The fraction is that of a large matrix product measured in the same run; FLOPs are those
of all tokens in all blocks, also where the last block computes the class token alone. Memory is what a contender's
first steps add at their peak. On a CPU models and batches are tiny: that shows that the bench works, not who is fast.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peers import allow_torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import vitrail
from vitrail.config import OptimizerConfig, PreprocessConfig, Recipe, ScheduleConfig, ViTConfig
from vitrail.inference.precision import build_inference_functions
from vitrail.model.cost import count_multiply_adds
from vitrail.model.vit import ViT
from vitrail.presets import get_preset_config
from vitrail.training.step import build_train_state, train_step

CLASSES, LR, DECAY, CLIP = 1000, 1e-4, 0.05, 1.0
TRAIN_BATCHES = {"s16": 1024, "b16": 256, "l16": 256, "h14": 128}
INFERENCE_BATCHES = {"s16": 1024}
INFERENCE_BATCH = 512
TIMM = {
    "ti16": "tiny_patch16",
    "s16": "small_patch16",
    "b16": "base_patch16",
    "l16": "large_patch16",
    "h14": "huge_patch14",
}
TORCHVISION = {"b16": "vit_b_16", "l16": "vit_l_16", "h14": "vit_h_14"}
WARM_STEPS = 5  # compilation, and the steps before a CUDA graph is recorded
Step = Callable[[], object]


class Case(NamedTuple):
    """What all contenders of a row compute."""

    model: str
    kind: str
    """train or infer."""
    config: ViTConfig
    pixels: Tensor
    """uint8 (B, 3, S, S)."""
    inputs: Tensor
    """The same, normalized."""
    targets: Tensor

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.inputs.device

    def autocast(self) -> torch.autocast:
        """bf16 on a GPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


class Contender(NamedTuple):
    """A network under one of its settings."""

    name: str
    setting: str
    step: Step
    gigabytes: float | None


class Selection(NamedTuple):
    """The contenders and settings to measure; empty for all."""

    contenders: list[str]
    settings: list[str]

    def includes(self, name: str, setting: str) -> bool:
        """Whether to measure a contender, named up to its first comma, in a setting."""
        is_named = not self.contenders or name.split(",")[0] in self.contenders
        return is_named and (not self.settings or not setting or setting in self.settings)


# --- networks --------------------------------------------------------------------------------------------------------


class PlainBlock(nn.Module):
    """Attention and MLP as a textbook writes them."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class PlainViT(nn.Module):
    """The honest floor: what anyone would write in 40 lines."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch, width, (rows, columns) = config.patch, config.width, config.grid
        self.embed = nn.Linear(3 * self.patch**2, width)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, rows * columns + 1, width))
        blocks = (PlainBlock(width, config.heads, config.mlp) for _ in range(config.depth))
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, L)."""
        x = images.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)  # (B, 3, R, K, P, P)
        x = self.embed(x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2))  # (B, n, D)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class AllTokensViT(ViT):
    """vitrail's network, whose last block computes all tokens."""

    @property
    def num_head_tokens(self) -> int | None:
        """All of them."""
        return None


def build_peer(name: str, case: Case) -> nn.Module | None:
    """A peer's network of the case's shape, or None where it has none or is not installed."""
    if name == "plain":
        return PlainViT(case.config)
    if importlib.util.find_spec(name) is None:
        return None
    allow_torchvision()
    if name == "timm" and case.model in TIMM:
        import timm

        return timm.create_model(f"vit_{TIMM[case.model]}_224", num_classes=CLASSES, patch_size=case.config.patch)
    if name == "torchvision" and case.model in TORCHVISION:
        import torchvision

        return getattr(torchvision.models, TORCHVISION[case.model])(num_classes=CLASSES)
    if name == "transformers":
        from transformers import ViTConfig as TheirConfig
        from transformers import ViTForImageClassification

        sizes = {"hidden_size": case.config.width, "num_hidden_layers": case.config.depth}
        sizes |= {"num_attention_heads": case.config.heads, "intermediate_size": case.config.mlp}
        config = TheirConfig(**sizes, patch_size=case.config.patch, num_labels=CLASSES, attn_implementation="sdpa")
        return Logits(ViTForImageClassification(config))
    return None


class Logits(nn.Module):
    """A transformers model that returns logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, L)."""
        return self.model(pixel_values=pixels).logits


def build_vitrail(case: Case, kind: type[ViT] = ViT) -> ViT:
    """vitrail's network with random weights."""
    model = kind(case.config)
    model.load_state_dict(vitrail.create(case.model, num_classes=CLASSES).state_dict())
    return model.to(case.device)


# --- steps -----------------------------------------------------------------------------------------------------------


def make_peer_step(case: Case, network: nn.Module, setting: str) -> Step:
    """A training step or a batch of inference, compiled or eager, as the peer's own scripts have it."""
    network.to(case.device)
    if "channels last" in setting:
        network.to(memory_format=torch.channels_last)
    inputs = case.inputs.contiguous(memory_format=torch.channels_last) if "channels last" in setting else case.inputs
    called: Any = torch.compile(network) if "compiled" in setting else network
    if case.kind == "infer":
        network.eval()

        def infer() -> object:
            with torch.inference_mode(), case.autocast():
                return called(inputs)

        return infer
    network.train()
    adamw = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=DECAY, fused=True)

    def train() -> object:
        with case.autocast():
            loss = F.cross_entropy(called(inputs).float(), case.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        adamw.step()
        adamw.zero_grad()
        return loss

    return train


def make_vitrail_step(case: Case, kind: type[ViT], setting: str) -> Step:
    """The trainer's step, or the network's forward pass."""
    model = build_vitrail(case, kind)
    if "compiled" in setting:
        model.compile_blocks()
    if case.kind == "infer":
        model.eval()

        def infer() -> object:
            with torch.inference_mode(), case.autocast():
                return model(case.inputs)

        return infer
    recipe = Recipe(
        model=case.model,
        source="bench/throughput.py",
        epochs=1,
        batch=len(case.inputs),
        optimizer=OptimizerConfig(kind="adam", lr=LR, weight_decay=DECAY, clip=CLIP),
        schedule=ScheduleConfig(warmup=0),
    )
    state = build_train_state(model, recipe, cuda_graph=case.device.type == "cuda")

    def train() -> object:
        batch = [(case.inputs, case.targets)]
        return train_step(state, batch, recipe, step_images=len(case.inputs), steps=10**6, seed=0)

    return train


def make_predict_step(case: Case, precision: str, *, compiled: bool = False) -> Step:
    """What `vitrail predict` computes of pixels on the device, in long runs compiled: probabilities."""
    preprocess = PreprocessConfig(size=case.config.image_size, resize=case.config.image_size)
    trained = vitrail.Trained(build_vitrail(case).eval(), preprocess)
    compute = build_inference_functions(
        trained,
        precision,  # type: ignore[arg-type]
        compiled_batch=len(case.pixels) if compiled else 0,
    ).probabilities
    return lambda: compute(case.pixels)


def iterate_builders(case: Case) -> Iterator[tuple[str, str, Callable[[], Step | None]]]:
    """Name, setting and builder of every contender."""
    settings = ("compiled", "compiled, channels last") if case.device.type == "cuda" else ("eager",)
    for name in ("plain", "timm", "torchvision", "transformers"):
        for setting in settings:

            def build(name: str = name, setting: str = setting) -> Step | None:
                network = build_peer(name, case)
                return None if network is None else make_peer_step(case, network, setting)

            yield name, setting, build
    for name, kind in (("vitrail", ViT), ("vitrail, all tokens", AllTokensViT)):
        yield name, settings[0], lambda kind=kind: make_vitrail_step(case, kind, settings[0])
    if case.kind == "infer":
        yield "predict, float32", "", lambda: make_predict_step(case, "float32")
        yield "predict, bfloat16", "", lambda: make_predict_step(case, "bfloat16")
        if case.device.type == "cuda":
            yield "predict, bfloat16, long", "compiled", lambda: make_predict_step(case, "bfloat16", compiled=True)


# --- measuring -------------------------------------------------------------------------------------------------------


def time_turn(step: Step, steps: int, device: torch.device) -> float:
    """Seconds of a step, the mean over a turn."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    for _ in range(steps):
        step()
    end_event.record()
    end_event.synchronize()
    return float(start_event.elapsed_time(end_event)) / 1000 / steps


def build_contender(
    name: str, setting: str, build: Callable[[], Step | None], device: torch.device
) -> Contender | None:
    """A contender whose first steps are done, with the memory they took."""
    is_cuda, before = device.type == "cuda", 0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    step = build()
    if step is None:
        return None
    time_turn(step, WARM_STEPS if is_cuda else 1, device)
    return Contender(name, setting, step, (torch.cuda.max_memory_allocated() - before) / 2**30 if is_cuda else None)


def choose_settings(case: Case, steps: int, selection: Selection) -> list[Contender]:
    """Each contender in its fastest setting; the others are freed."""
    chosen: dict[str, tuple[float, Contender]] = {}
    for name, setting, build in iterate_builders(case):
        if not selection.includes(name, setting):
            continue
        torch.manual_seed(0)
        contender = build_contender(name, setting, build, case.device)
        if contender is None:
            continue
        seconds = time_turn(contender.step, steps, case.device)
        if name not in chosen or seconds < chosen[name][0]:
            chosen[name] = (seconds, contender)
    return [contender for _, contender in chosen.values()]


def measure_matrix_product(device: torch.device) -> float:
    """FLOP/s of a large product, the best of ten: in bf16 on a GPU."""
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    one = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * side**3 / min(time_turn(lambda: one @ one, 10, device) for _ in range(10))


def measure_case(case: Case, rounds: int, steps: int, selection: Selection) -> list[dict[str, Any]]:
    """A row for each contender, and the ratios to timm and to the plain ViT, by rounds."""
    contenders = choose_settings(case, steps, selection)
    product = measure_matrix_product(case.device)
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        turned = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
        for contender in turned:
            seconds[contender.name].append(time_turn(contender.step, steps, case.device))
    flops = 2 * count_multiply_adds(case.config) * (3 if case.kind == "train" else 1)
    rows = []
    for contender in contenders:
        times = seconds[contender.name]
        rate = len(case.inputs) / statistics.median(times)
        row = {
            "model": case.model, "kind": case.kind, "batch": len(case.inputs), "contender": contender.name,
            "setting": contender.setting, "images_per_second": rate, "fraction": rate * flops / product,
            "gigabytes": contender.gigabytes,
        }  # fmt: skip
        for peer in ("timm", "plain"):
            if peer in seconds:
                pairs = zip(seconds[peer], times, strict=True)
                row[f"over_{peer}"] = statistics.median(theirs / ours for theirs, ours in pairs)
        rows.append(row)
    return rows


def make_case(model: str, kind: str, device: torch.device) -> Case:
    """Random images of a model's size and batch; tiny on a CPU."""
    is_cuda = device.type == "cuda"
    config = get_preset_config(model, classes=CLASSES)
    assert isinstance(config, ViTConfig)
    batch = (
        (TRAIN_BATCHES[model] if kind == "train" else INFERENCE_BATCHES.get(model, INFERENCE_BATCH)) if is_cuda else 2
    )
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (batch, 3, *config.image_size), dtype=torch.uint8, generator=generator)
    targets = torch.randint(0, CLASSES, (batch,), generator=generator)
    inputs = pixels.float() / 127.5 - 1
    return Case(model, kind, config, pixels.to(device), inputs.to(device), targets.to(device))


def print_row(row: dict[str, Any]) -> None:
    """A line of the table."""
    optional = (row["gigabytes"], row.get("over_timm"), row.get("over_plain"))
    shown = [f"{'':>8}" if value is None else f"{value:8.2f}" for value in optional]
    print(
        f"{row['model']:5} {row['kind']:6} {row['batch']:5} {row['contender']:20} {row['images_per_second']:10.1f}"
        f" {row['fraction']:9.1%} {shown[0]} {shown[1]} {shown[2]}  {row['setting']}",
        flush=True,
    )


def list_versions(device: torch.device) -> dict[str, str]:
    """Versions of everything that is measured, and the device."""
    versions = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    }
    for name in ("torch", "timm", "torchvision", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", help="by default s16 b16 l16 h14, on a CPU ti16")
    parser.add_argument("--kinds", nargs="+", default=["train", "infer"], choices=("train", "infer"))
    parser.add_argument(
        "--contenders", nargs="+", default=[], help="plain timm torchvision transformers vitrail predict"
    )
    parser.add_argument("--settings", nargs="+", default=[], help="such as compiled; all by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="in a turn; by default 10, on a CPU 1")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    is_cuda = device.type == "cuda"
    versions = list_versions(device)
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print("model kind   batch contender              images/s  fraction       GB   / timm  / plain  setting")
    rows = []
    for model in options.models or (list(TRAIN_BATCHES) if is_cuda else ["ti16"]):
        for kind in options.kinds:
            measured = measure_case(
                make_case(model, kind, device),
                options.rounds,
                options.steps or (10 if is_cuda else 1),
                Selection(options.contenders, options.settings),
            )
            for row in measured:
                print_row(row)
            rows += measured
            if is_cuda:
                torch.cuda.empty_cache()
    if options.json is not None:
        options.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
