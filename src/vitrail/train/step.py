"""One step of training: forward and backward over micro-batches, then one move of the weights.

Nothing here knows files, data sets or time. Dropout and stochastic depth draw from torch's generators, which are seeded
from (seed, step, rank, micro-batch) before each forward pass, so that no state is left over from the steps before.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vitrail.config import Recipe
from vitrail.data import draws
from vitrail.errors import VitrailError
from vitrail.model import masked
from vitrail.model.build import Model
from vitrail.model.masked import MaskedViT
from vitrail.model.vit import ViT
from vitrail.train import distributed, ema, losses, optimizer, schedule, sharding

if TYPE_CHECKING:
    from vitrail.train.verification import Verification

LOSSES = {"softmax": losses.softmax_cross_entropy, "sigmoid": losses.sigmoid_cross_entropy}
Learner = Model | MaskedViT


class DivergedError(VitrailError):
    """A loss or gradient that is no number: nothing was updated."""

    exit_code = 6


@dataclasses.dataclass
class State:
    """What training changes."""

    model: Learner
    network: nn.Module
    """What computes the model: itself, sharded or not, or its wrapper that adds up gradients over ranks."""
    optimizer: Optimizer
    average: ema.Average | None
    recording: "Recording | None" = None
    """Whether, and then how, steps are recorded and replayed."""
    offsets: Tensor | None = None
    """(L,): added to the logits in training alone, where classes shall count alike."""
    step: int = 0
    """The next step."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a step showed."""

    loss: float
    """Of an image on average, over all ranks."""
    images: int
    """Of all ranks."""
    norm: float
    """Of all gradients together, before clipping."""
    lr: float


def begin(model: Learner, recipe: Recipe, counts: Sequence[int] = (), *, recorded: bool = False) -> State:
    """The state before the first step; a balanced recipe needs the training images of each class.

    With `recorded` the steps of a GPU are replayed (`Recording`); the loop then gives each as one part. From here on
    the process does without cuDNN's attention, torch's first choice on some GPUs: its backward pass gives NaN once
    logits pass about 100, where the loss and every other kernel's gradient are fine (H200, torch 2.11).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    average = ema.Average(model) if recipe.ema else None
    offsets = None
    if recipe.balanced:
        device = next(model.parameters()).device
        offsets = losses.offsets(torch.tensor(counts, dtype=torch.float64), recipe.loss).to(device)
    built = optimizer.build(model, recipe.optimiser, recorded=recorded)
    return State(model, _wrapped(model), built, average, Recording() if recorded else None, offsets)


def _wrapped(model: Learner) -> nn.Module:
    """The model, or where each of several ranks has all of it torch's wrapper, which sends gradients as they come."""
    if not distributed.together() or sharding.is_sharded(model):
        return model
    device = next(model.parameters()).device
    ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def advance(
    state: State,
    parts: Iterable[tuple[Tensor, Tensor]],
    recipe: Recipe,
    *,
    size: int,
    steps: int,
    seed: int,
    rank: int = 0,
    position: float | None = None,
    verification: "Verification | None" = None,
) -> Outcome:
    """Compute the step's micro-batches, (images, targets) each, and move the weights by their gradient.

    Targets of a masked model are what is hidden, and there may be one image more (`loader.prepared`).
    `size` counts the step's images over all ranks: gradients are of the mean over them, however they are divided.
    `position`, from 0 to `steps`, is where the learning rate's schedule stands; the step's number unless given.
    With a `verification` some steps are computed twice, and refused where that gives two results.
    """
    state.model.train()
    if size != recipe.batch:
        state.recording = None  # the last step is short; what was recorded would hold its memory beside it
    due = verification is not None and verification.is_due(state)
    held = list(parts) if due else parts

    def compute() -> tuple[Tensor, Tensor, int]:
        if state.recording is None:
            return _gradients(state, held, recipe, size, lambda part: _dropout_seed(seed, state.step, rank, part))
        ((pixels, targets),) = held
        torch.manual_seed(_dropout_seed(seed, state.step, rank, 0))
        return *state.recording.gradients(state, pixels, targets, recipe), len(targets)

    total, norm, images = verification.compute_twice(state, compute) if verification and due else compute()
    loss, images = _over_ranks(total, images)
    found = Outcome(loss / max(images, 1), images, float(norm), _set_lr(state, recipe, steps, position))
    if not (abs(found.loss) < float("inf") and found.norm < float("inf")):
        raise DivergedError(
            f"step {state.step}: the loss is {found.loss} and the gradient's norm {found.norm}; nothing was updated."
            f" Try a lower learning rate than {recipe.optimiser.lr}, or a longer warm-up"
        )
    if state.recording is not None:
        state.recording.update(state)
    else:
        state.optimizer.step()
    state.step += 1
    if state.average is not None:
        state.average.update(ema.warmed(recipe.ema, state.step) if recipe.ema_warmup else recipe.ema)
    return found


def _gradients(
    state: State, parts: Iterable[tuple[Tensor, Tensor]], recipe: Recipe, size: int, seed: Callable[[int], int] | None
) -> tuple[Tensor, Tensor, int]:
    """The loss summed over these images, the norm of all gradients, and how many images there were."""
    state.optimizer.zero_grad(set_to_none=True)
    total: Tensor | None = None
    images = 0
    for number, (pixels, targets), last in _counted(parts):
        if seed is not None:
            torch.manual_seed(seed(number))
        with _sent(state.network, now=last):
            if len(pixels):
                loss = _loss(state, pixels, targets, recipe, whole=size == recipe.batch)
                # torch's wrapper takes the mean over ranks, and what is wanted is the sum
                (loss * (distributed.world() / size)).backward()
                total = loss.detach() if total is None else total + loss.detach()
                images += len(targets)
            elif sharding.is_sharded(state.network) or (last and distributed.together()):
                # the others wait for this rank's gradients, which are nothing, and where it is sharded for its weights
                (_said(state, *nothing(pixels, targets), whole=False).sum() * 0).backward()
    norm = optimizer.clip(state.model.parameters(), recipe.optimiser.clip)
    return torch.zeros((), device=norm.device) if total is None else total, norm, images


def _counted(
    parts: Iterable[tuple[Tensor, Tensor]],
) -> Iterator[tuple[int, tuple[Tensor, Tensor], bool]]:
    """Each part with its number and whether it is the last."""
    parts = iter(parts)
    part = next(parts, None)
    for number in itertools.count():
        if part is None:
            return
        following = next(parts, None)
        yield number, part, following is None
        part = following


def _sent(network: nn.Module, *, now: bool) -> contextlib.AbstractContextManager[None]:
    """Where gradients go to the other ranks, or are kept to be sent with those of the step's last part."""
    if sharding.is_sharded(network):
        sharding.send_gradients(network, now=now)
    if now or not isinstance(network, DistributedDataParallel):
        return contextlib.nullcontext()
    return network.no_sync()


def _over_ranks(total: Tensor, images: int) -> tuple[float, int]:
    """The loss summed over all ranks' images, and how many there are."""
    if not distributed.together():
        return float(total), images
    loss, count = distributed.summed(torch.stack([total.double(), total.new_tensor(images).double()])).tolist()
    return loss, int(count)


class Recording:
    """A step as two CUDA graphs, gradients and update, between which the host may look at the loss.

    Kernels of a small model or batch are over before Python has launched the next; a replay launches all at once. The
    first steps are computed as they are, which leaves in place what must not be made while recording.
    """

    STEPS_BEFORE = 3

    def __init__(self) -> None:
        self.left = self.STEPS_BEFORE
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.inputs: tuple[Tensor, Tensor]
        self.outputs: tuple[Tensor, Tensor]

    def gradients(self, state: State, pixels: Tensor, targets: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
        """The loss summed over the images and the norm of all gradients, which are in place."""
        if self.left:
            total, norm, _ = _gradients(state, [(pixels, targets)], recipe, recipe.batch, None)
            return total, norm
        if not self.graphs:
            self.inputs = (pixels.clone(), targets.clone())
            state.optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads prepare batches
                total, norm, _ = _gradients(state, [self.inputs], recipe, recipe.batch, None)
            self.outputs = (total, norm)
            self.graphs.append(graph)
        else:
            for place, value in zip(self.inputs, (pixels, targets), strict=True):
                place.copy_(value)
        self.graphs[0].replay()
        return self.outputs

    def update(self, state: State) -> None:
        """Move the weights."""
        if self.left:
            self.left -= 1
            state.optimizer.step()
            return
        if len(self.graphs) == 1:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                state.optimizer.step()
            self.graphs.append(graph)
        self.graphs[1].replay()


def _dropout_seed(seed: int, step: int, rank: int, part: int) -> int:
    return draws.key(seed, f"dropout {step} {rank} {part}") >> 1


def precision(device: torch.device) -> torch.autocast:
    """The forward pass of training: in bf16 on a GPU, whose weights stay float32; in float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _loss(state: State, pixels: Tensor, targets: Tensor, recipe: Recipe, *, whole: bool) -> Tensor:
    """Summed over the images."""
    said = _said(state, pixels, targets, whole=whole)
    if isinstance(state.model, MaskedViT):
        return masked.losses(said, state.model.targets(pixels, targets)).sum()
    logits = said if state.offsets is None else said.float() + state.offsets
    return LOSSES[recipe.loss](logits, targets, recipe.label_smoothing)


def _said(state: State, pixels: Tensor, targets: Tensor, *, whole: bool) -> Tensor:
    """What the network says; compiled for whole steps, and a run's last, short one is not worth another time."""
    with contextlib.nullcontext() if whole else uncompiled(state.model), precision(pixels.device):
        return state.network(*inputs(state.model, pixels, targets))


def inputs(model: Learner, pixels: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """What the forward pass takes of a micro-batch: the images, and of a masked model also what is hidden of them."""
    return (pixels, targets) if isinstance(model, MaskedViT) else (pixels,)


def nothing(pixels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A black image in place of none, for a pass that others wait for."""
    return pixels.new_zeros(1, *pixels.shape[1:]), targets.new_zeros(1, *targets.shape[1:])


def uncompiled(model: Learner) -> contextlib.AbstractContextManager[object]:
    """Where a model that was compiled for training's batches computes others, as it is written."""
    compiled = isinstance(model, ViT | MaskedViT) and model.compiled
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def _set_lr(state: State, recipe: Recipe, steps: int, position: float | None) -> float:
    share = schedule.share(recipe.schedule, state.step if position is None else position, steps)
    optimizer.set_lr(state.optimizer, share)
    return share * recipe.optimiser.lr
