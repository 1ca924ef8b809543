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
from vitrail.data import counter_rng
from vitrail.errors import VitrailError
from vitrail.model import masked
from vitrail.model.build import Model
from vitrail.model.masked import MaskedViT
from vitrail.model.vit import ViT
from vitrail.runtime import distributed
from vitrail.train import ema, fsdp, losses, optimizer, schedule

if TYPE_CHECKING:
    from vitrail.train.step_verification import StepVerification

LOSS_FUNCTIONS = {"softmax": losses.softmax_cross_entropy, "sigmoid": losses.sigmoid_cross_entropy}
TrainableModel = Model | MaskedViT


class DivergedError(VitrailError):
    """A loss or gradient that is no number: nothing was updated."""

    exit_code = 6


@dataclasses.dataclass
class TrainState:
    """What training changes."""

    model: TrainableModel
    network: nn.Module
    """What computes the model: itself, sharded or not, or its wrapper that adds up gradients over ranks."""
    optimizer: Optimizer
    ema: ema.ModelEMA | None
    cuda_graph_step: "CudaGraphStep | None" = None
    """Whether, and then how, steps are recorded and replayed."""
    logit_adjustment: Tensor | None = None
    """(L,): added to the logits in training alone, where classes shall count alike."""
    step: int = 0
    """The next step."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step showed."""

    loss: float
    """Of an image on average, over all ranks."""
    images: int
    """Of all ranks."""
    grad_norm: float
    """Of all gradients together, before clipping."""
    lr: float


def build_train_state(
    model: TrainableModel, recipe: Recipe, class_counts: Sequence[int] = (), *, cuda_graph: bool = False
) -> TrainState:
    """The state before the first step; a balanced recipe needs the training images of each class.

    With `recorded` the steps of a GPU are replayed (`Recording`); the loop then gives each as one part. From here on
    the process does without cuDNN's attention, torch's first choice on some GPUs: its backward pass gives NaN once
    logits pass about 100, where the loss and every other kernel's gradient are fine (H200, torch 2.11).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    average = ema.ModelEMA(model) if recipe.ema else None
    offsets = None
    if recipe.logit_adjustment:
        device = next(model.parameters()).device
        offsets = losses.compute_logit_adjustment(torch.tensor(class_counts, dtype=torch.float64), recipe.loss).to(
            device
        )
    built = optimizer.build_optimizer(model, recipe.optimizer, capturable=cuda_graph)
    return TrainState(model, _wrap_ddp(model), built, average, CudaGraphStep() if cuda_graph else None, offsets)


def _wrap_ddp(model: TrainableModel) -> nn.Module:
    """The model, or where each of several ranks has all of it torch's wrapper, which sends gradients as they come."""
    if not distributed.is_distributed() or fsdp.is_sharded(model):
        return model
    device = next(model.parameters()).device
    ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def train_step(
    state: TrainState,
    micro_batches: Iterable[tuple[Tensor, Tensor]],
    recipe: Recipe,
    *,
    step_images: int,
    steps: int,
    seed: int,
    rank: int = 0,
    schedule_position: float | None = None,
    verification: "StepVerification | None" = None,
) -> StepResult:
    """Compute the step's micro-batches, (images, targets) each, and move the weights by their gradient.

    Targets of a masked model are what is hidden, and there may be one image more (`loader.prepared`).
    `size` counts the step's images over all ranks: gradients are of the mean over them, however they are divided.
    `position`, from 0 to `steps`, is where the learning rate's schedule stands; the step's number unless given.
    With a `verification` some steps are computed twice, and refused where that gives two results.
    """
    state.model.train()
    if step_images != recipe.batch:
        state.cuda_graph_step = None  # the last step is short; what was recorded would hold its memory beside it
    due = verification is not None and verification.is_due(state)
    held = list(micro_batches) if due else micro_batches

    def compute() -> tuple[Tensor, Tensor, int]:
        if state.cuda_graph_step is None:
            return _compute_gradients(
                state, held, recipe, step_images, lambda part: _derive_dropout_seed(seed, state.step, rank, part)
            )
        ((pixels, targets),) = held
        torch.manual_seed(_derive_dropout_seed(seed, state.step, rank, 0))
        return *state.cuda_graph_step.replay_gradients(state, pixels, targets, recipe), len(targets)

    total, norm, images = verification.compute_twice(state, compute) if verification and due else compute()
    loss, images = _all_reduce_loss(total, images)
    found = StepResult(
        loss / max(images, 1), images, float(norm), _apply_schedule(state, recipe, steps, schedule_position)
    )
    if not (abs(found.loss) < float("inf") and found.grad_norm < float("inf")):
        raise DivergedError(
            f"step {state.step}: the loss is {found.loss} and the gradient's norm {found.grad_norm}; nothing was updated."
            f" Try a lower learning rate than {recipe.optimizer.lr}, or a longer warm-up"
        )
    if state.cuda_graph_step is not None:
        state.cuda_graph_step.replay_update(state)
    else:
        state.optimizer.step()
    state.step += 1
    if state.ema is not None:
        state.ema.update(ema.compute_warmup_decay(recipe.ema, state.step) if recipe.ema_warmup else recipe.ema)
    return found


def _compute_gradients(
    state: TrainState,
    micro_batches: Iterable[tuple[Tensor, Tensor]],
    recipe: Recipe,
    step_images: int,
    seed: Callable[[int], int] | None,
) -> tuple[Tensor, Tensor, int]:
    """The loss summed over these images, the norm of all gradients, and how many images there were."""
    state.optimizer.zero_grad(set_to_none=True)
    total: Tensor | None = None
    images = 0
    for number, (pixels, targets), last in _enumerate_micro_batches(micro_batches):
        if seed is not None:
            torch.manual_seed(seed(number))
        with _defer_gradient_sync(state.network, sync=last):
            if len(pixels):
                loss = _compute_loss(state, pixels, targets, recipe, is_full_step=step_images == recipe.batch)
                # torch's wrapper takes the mean over ranks, and what is wanted is the sum
                (loss * (distributed.get_world_size() / step_images)).backward()
                total = loss.detach() if total is None else total + loss.detach()
                images += len(targets)
            elif fsdp.is_sharded(state.network) or (last and distributed.is_distributed()):
                # the others wait for this rank's gradients, which are nothing, and where it is sharded for its weights
                (_forward(state, *make_blank_batch(pixels, targets), is_full_step=False).sum() * 0).backward()
    norm = optimizer.clip_gradients(state.model.parameters(), recipe.optimizer.clip)
    return torch.zeros((), device=norm.device) if total is None else total, norm, images


def _enumerate_micro_batches(
    micro_batches: Iterable[tuple[Tensor, Tensor]],
) -> Iterator[tuple[int, tuple[Tensor, Tensor], bool]]:
    """Each part with its number and whether it is the last."""
    micro_batches = iter(micro_batches)
    part = next(micro_batches, None)
    for number in itertools.count():
        if part is None:
            return
        following = next(micro_batches, None)
        yield number, part, following is None
        part = following


def _defer_gradient_sync(network: nn.Module, *, sync: bool) -> contextlib.AbstractContextManager[None]:
    """Where gradients go to the other ranks, or are kept to be sent with those of the step's last part."""
    if fsdp.is_sharded(network):
        fsdp.set_gradient_sync(network, sync=sync)
    if sync or not isinstance(network, DistributedDataParallel):
        return contextlib.nullcontext()
    return network.no_sync()


def _all_reduce_loss(total: Tensor, images: int) -> tuple[float, int]:
    """The loss summed over all ranks' images, and how many there are."""
    if not distributed.is_distributed():
        return float(total), images
    loss, count = distributed.all_reduce_sum(torch.stack([total.double(), total.new_tensor(images).double()])).tolist()
    return loss, int(count)


class CudaGraphStep:
    """A step as two CUDA graphs, gradients and update, between which the host may look at the loss.

    Kernels of a small model or batch are over before Python has launched the next; a replay launches all at once. The
    first steps are computed as they are, which leaves in place what must not be made while recording.
    """

    EAGER_STEPS = 3

    def __init__(self) -> None:
        self.eager_steps_left = self.EAGER_STEPS
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.inputs: tuple[Tensor, Tensor]
        self.outputs: tuple[Tensor, Tensor]

    def replay_gradients(
        self, state: TrainState, pixels: Tensor, targets: Tensor, recipe: Recipe
    ) -> tuple[Tensor, Tensor]:
        """The loss summed over the images and the norm of all gradients, which are in place."""
        if self.eager_steps_left:
            total, norm, _ = _compute_gradients(state, [(pixels, targets)], recipe, recipe.batch, None)
            return total, norm
        if not self.graphs:
            self.inputs = (pixels.clone(), targets.clone())
            state.optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads prepare batches
                total, norm, _ = _compute_gradients(state, [self.inputs], recipe, recipe.batch, None)
            self.outputs = (total, norm)
            self.graphs.append(graph)
        else:
            for place, value in zip(self.inputs, (pixels, targets), strict=True):
                place.copy_(value)
        self.graphs[0].replay()
        return self.outputs

    def replay_update(self, state: TrainState) -> None:
        """Move the weights."""
        if self.eager_steps_left:
            self.eager_steps_left -= 1
            state.optimizer.step()
            return
        if len(self.graphs) == 1:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                state.optimizer.step()
            self.graphs.append(graph)
        self.graphs[1].replay()


def _derive_dropout_seed(seed: int, step: int, rank: int, part: int) -> int:
    return counter_rng.derive_key(seed, f"dropout {step} {rank} {part}") >> 1


def make_autocast(device: torch.device) -> torch.autocast:
    """The forward pass of training: in bf16 on a GPU, whose weights stay float32; in float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _compute_loss(state: TrainState, pixels: Tensor, targets: Tensor, recipe: Recipe, *, is_full_step: bool) -> Tensor:
    """Summed over the images."""
    said = _forward(state, pixels, targets, is_full_step=is_full_step)
    if isinstance(state.model, MaskedViT):
        return masked.compute_masked_losses(said, state.model.compute_targets(pixels, targets)).sum()
    logits = said if state.logit_adjustment is None else said.float() + state.logit_adjustment
    return LOSS_FUNCTIONS[recipe.loss](logits, targets, recipe.label_smoothing)


def _forward(state: TrainState, pixels: Tensor, targets: Tensor, *, is_full_step: bool) -> Tensor:
    """What the network says; compiled for whole steps, and a run's last, short one is not worth another time."""
    with contextlib.nullcontext() if is_full_step else disable_compile(state.model), make_autocast(pixels.device):
        return state.network(*select_inputs(state.model, pixels, targets))


def select_inputs(model: TrainableModel, pixels: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """What the forward pass takes of a micro-batch: the images, and of a masked model also what is hidden of them."""
    return (pixels, targets) if isinstance(model, MaskedViT) else (pixels,)


def make_blank_batch(pixels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A black image in place of none, for a pass that others wait for."""
    return pixels.new_zeros(1, *pixels.shape[1:]), targets.new_zeros(1, *targets.shape[1:])


def disable_compile(model: TrainableModel) -> contextlib.AbstractContextManager[object]:
    """Where a model that was compiled for training's batches computes others, as it is written."""
    compiled = isinstance(model, ViT | MaskedViT) and model.is_compiled
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


@contextlib.contextmanager
def use_averaged_weights(state: TrainState) -> Iterator[TrainableModel]:
    """The model; within the block it has the averaged weights, if the run keeps an average."""
    with contextlib.nullcontext() if state.ema is None else state.ema.apply_to_model():
        yield state.model


def _apply_schedule(state: TrainState, recipe: Recipe, steps: int, schedule_position: float | None) -> float:
    share = schedule.lr_scale(recipe.schedule, state.step if schedule_position is None else schedule_position, steps)
    optimizer.set_lr(state.optimizer, share)
    return share * recipe.optimizer.lr
