"""One training step: forward and backward passes over micro-batches, then one update of the weights.

Nothing here knows files, datasets or time. Dropout and stochastic depth draw from torch's generators, which are seeded
from (seed, step, rank, micro-batch) before each forward pass, so that no state is left over from earlier steps.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vitrail.config import Recipe
from vitrail.data import randomness
from vitrail.errors import DivergedError, UsageError
from vitrail.model import masked
from vitrail.model.masked import MaskedViT
from vitrail.model.vit import Model, ViT
from vitrail.runtime import distributed
from vitrail.training import fsdp, losses, optimizer, schedule
from vitrail.training.distillation import Distillation, StudentOutputs, build_network
from vitrail.training.optimizer import ModelEMA, compute_warmup_decay

if TYPE_CHECKING:
    from vitrail.training.step_verification import StepVerification

__all__ = ["StepResult", "TrainState", "build_train_state", "train_step"]
LOSS_FUNCTIONS = {"softmax": losses.softmax_cross_entropy, "sigmoid": losses.sigmoid_cross_entropy}
TrainableModel = Model | MaskedViT


@dataclasses.dataclass
class TrainState:
    """Everything that training changes."""

    model: TrainableModel
    network: nn.Module
    """The module to call: the model itself, sharded or not, or its DDP wrapper, which sums gradients over ranks."""
    optimizer: Optimizer
    ema: ModelEMA | None
    cuda_graph_step: "CudaGraphStep | None" = None
    """Records and replays steps, if they are."""
    loss_function: losses.LossFunction | None = None
    """Replaces the recipe's loss, its label smoothing included."""
    distillation: Distillation | None = None
    """The teacher, and the loss that it adds."""
    logit_adjustment: Tensor | None = None
    """(L,): added to the logits in training only, to give every class the same weight."""
    class_weights: Tensor | None = None
    """(L,): multiply the terms of true labels in the recipe's loss."""
    step: int = 0
    """The next step."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The numbers of one step."""

    loss: float
    """The mean over the images of all ranks."""
    images: int
    """Of all ranks."""
    grad_norm: float
    """The norm of all gradients, before clipping."""
    lr: float


def build_train_state(
    model: TrainableModel,
    recipe: Recipe,
    class_counts: Sequence[int] = (),
    *,
    class_weights: Sequence[float] = (),
    loss_function: losses.LossFunction | None = None,
    distillation: Distillation | None = None,
    cuda_graph: bool = False,
) -> TrainState:
    """The state before the first step; logit adjustment needs the training images of each class.

    `class_weights`, one a class, multiply the terms of true labels. A `loss_function` replaces the recipe's loss; a
    `distillation` adds a teacher's.
    With `cuda_graph` the steps of a GPU are replayed (`CudaGraphStep`); each is then one micro-batch. From here on the
    process does not use cuDNN's attention, torch's first choice on some GPUs: its backward pass gives NaN once logits
    exceed about 100, where the loss and every other kernel's gradient are fine (H200, torch 2.11).

        from vitrail.training.step import build_train_state, train_step

        recipe, model = vitrail.load_recipe("digits"), vitrail.load("model.safetensors").model
        state = build_train_state(model, recipe)  # a TrainState
        batch = torch.zeros(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])
        result = train_step(state, [batch], recipe, step_images=4, steps=100, seed=0)  # a StepResult
        print(result.loss, result.lr, result.grad_norm)
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    average = ModelEMA(model) if recipe.ema else None
    offsets = None
    if recipe.logit_adjustment:
        offsets = losses.compute_logit_adjustment(torch.tensor(class_counts, dtype=torch.float64), recipe.loss)
        offsets = offsets.to(next(model.parameters()).device)
    weights = None
    if class_weights:
        weights = torch.tensor(class_weights, device=next(model.parameters()).device)
    built = optimizer.build_optimizer(model, recipe.optimizer, capturable=cuda_graph)
    graph_step = CudaGraphStep() if cuda_graph else None
    network: nn.Module = model
    if distillation is not None:
        assert not isinstance(model, MaskedViT), "a masked recipe has no distillation"
        network = build_network(model, distillation.config)
    wrapped = network if fsdp.is_sharded(model) else _wrap_ddp(network)
    return TrainState(model, wrapped, built, average, graph_step, loss_function, distillation, offsets, weights)


def _wrap_ddp(network: nn.Module) -> nn.Module:
    """The network, or with several ranks that each hold all of it, DDP, which sends gradients as they are computed."""
    if not distributed.is_distributed():
        return network
    device = next(network.parameters()).device
    ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(network, device_ids=ids, gradient_as_bucket_view=True)


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
    """Compute the step's micro-batches, (images, targets) each, and update the weights.

    The targets of a masked model are masks, and there may be one image more (`loader.prepare_train_batch`).
    `step_images` counts the images of all ranks: gradients are of the mean over them, however they are divided.
    `schedule_position`, from 0 to `steps`, is where the learning rate's schedule stands; by default the step's number.
    With a `verification` some steps are computed twice, and refused where the two results differ.
    """
    state.model.train()
    if step_images != recipe.batch:
        state.cuda_graph_step = None  # the last step is short, and the recorded graph would keep its memory beside it
    due = verification is not None and verification.is_due(state)
    batches = list(micro_batches) if due else micro_batches

    def compute() -> tuple[Tensor, Tensor, int]:
        if state.cuda_graph_step is None:
            return _compute_gradients(
                state, batches, recipe, step_images, lambda part: _derive_dropout_seed(seed, state.step, rank, part)
            )
        ((pixels, targets),) = batches
        torch.manual_seed(_derive_dropout_seed(seed, state.step, rank, 0))
        return *state.cuda_graph_step.replay_gradients(state, pixels, targets, recipe), len(targets)

    total, norm, images = verification.compute_twice(state, compute) if verification and due else compute()
    loss, images = _all_reduce_loss(total, images)
    position = state.step if schedule_position is None else schedule_position
    lr_scale = schedule.lr_scale(recipe.schedule, position, steps)
    optimizer.set_lr(state.optimizer, lr_scale)
    result = StepResult(loss / max(images, 1), images, float(norm), lr_scale * recipe.optimizer.lr)
    if not (abs(result.loss) < float("inf") and result.grad_norm < float("inf")):
        raise DivergedError(
            f"step {state.step}: the loss is {result.loss} and the gradient's norm {result.grad_norm}; nothing was"
            f" updated. Try a lower learning rate than {recipe.optimizer.lr}, or a longer warm-up"
        )
    if state.cuda_graph_step is not None:
        state.cuda_graph_step.replay_update(state)
    else:
        state.optimizer.step()
    state.step += 1
    if state.ema is not None:
        state.ema.update(compute_warmup_decay(recipe.ema, state.step) if recipe.ema_warmup else recipe.ema)
    return result


def _compute_gradients(
    state: TrainState,
    micro_batches: Iterable[tuple[Tensor, Tensor]],
    recipe: Recipe,
    step_images: int,
    seed: Callable[[int], int] | None,
) -> tuple[Tensor, Tensor, int]:
    """The loss summed over this rank's images, the norm of all gradients, and the number of images."""
    state.optimizer.zero_grad(set_to_none=True)
    total: Tensor | None = None
    images = 0
    for number, (pixels, targets), last in _enumerate_micro_batches(micro_batches):
        if seed is not None:
            torch.manual_seed(seed(number))
        with _defer_gradient_sync(state.network, sync=last):
            if len(pixels):
                loss = _compute_loss(state, pixels, targets, recipe, is_full_step=step_images == recipe.batch)
                # DDP takes the mean over ranks, and we need the sum
                (loss * (distributed.get_world_size() / step_images)).backward()
                total = loss.detach() if total is None else total + loss.detach()
                images += len(targets)
            elif fsdp.is_sharded(state.network) or (last and distributed.is_distributed()):
                # other ranks wait for this rank's gradients, which are zero, and if sharded for its weights
                blank = (tensor.new_zeros(1, *tensor.shape[1:]) for tensor in (pixels, targets))
                outputs = _forward(state, *blank, is_full_step=False)
                parts = outputs if isinstance(outputs, StudentOutputs) else (outputs,)
                (torch.stack([part.sum() for part in parts if part is not None]).sum() * 0).backward()
    norm = optimizer.clip_gradients(state.model.parameters(), recipe.optimizer.clip)
    return torch.zeros((), device=norm.device) if total is None else total, norm, images


def _enumerate_micro_batches(
    micro_batches: Iterable[tuple[Tensor, Tensor]],
) -> Iterator[tuple[int, tuple[Tensor, Tensor], bool]]:
    """Each micro-batch with its number and whether it is the last."""
    for number, (part, following) in enumerate(itertools.pairwise(itertools.chain(micro_batches, [None]))):
        assert part is not None
        yield number, part, following is None


def _defer_gradient_sync(network: nn.Module, *, sync: bool) -> contextlib.AbstractContextManager[None]:
    """Send gradients to other ranks within the block, or keep them for the step's last micro-batch."""
    if fsdp.is_sharded(network):
        fsdp.set_gradient_sync(network, sync=sync)
    if sync or not isinstance(network, DistributedDataParallel):
        return contextlib.nullcontext()
    return network.no_sync()


def _all_reduce_loss(total: Tensor, images: int) -> tuple[float, int]:
    """The loss summed over the images of all ranks, and the number of images."""
    if not distributed.is_distributed():
        return float(total), images
    loss, count = distributed.all_reduce_sum(torch.stack([total.double(), total.new_tensor(images).double()])).tolist()
    return loss, int(count)


class CudaGraphStep:
    """A step as two CUDA graphs, gradients and update, between which the host can check the loss.

    The kernels of a small model or batch end before Python has launched the next; a replay launches all at once. The
    first steps run eagerly, to allocate what must not be allocated while recording.
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
        """Compute the gradients; return the loss summed over the images and the norm of all gradients."""
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
            for buffer, value in zip(self.inputs, (pixels, targets), strict=True):
                buffer.copy_(value)
        self.graphs[0].replay()
        return self.outputs

    def replay_update(self, state: TrainState) -> None:
        """Update the weights."""
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
    return randomness.derive_key(seed, f"dropout {step} {rank} {part}") >> 1


def make_autocast(device: torch.device) -> torch.autocast:
    """The precision of training's forward pass: bf16 on a GPU, whose weights stay float32; float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _compute_loss(state: TrainState, pixels: Tensor, targets: Tensor, recipe: Recipe, *, is_full_step: bool) -> Tensor:
    """The loss, summed over the images."""
    outputs = _forward(state, pixels, targets, is_full_step=is_full_step)
    if state.distillation is not None:
        with _make_forward_context(state.model, pixels.device, is_full_step=is_full_step):
            teacher_targets = state.distillation.compute_targets(pixels)
        return state.distillation.compute_loss(outputs, targets, teacher_targets, recipe, state.class_weights)
    if isinstance(state.model, MaskedViT):
        return masked.compute_masked_losses(outputs, state.model.compute_targets(pixels, targets)).sum()
    logits = outputs if state.logit_adjustment is None else outputs.float() + state.logit_adjustment
    if state.loss_function is not None:
        return _check_loss(state.loss_function(logits, targets))
    return LOSS_FUNCTIONS[recipe.loss](logits, targets, recipe.label_smoothing, state.class_weights)


def _check_loss(loss: Any) -> Tensor:
    """What a loss function of the user returned, refused unless it is a scalar tensor."""
    if isinstance(loss, Tensor) and loss.ndim == 0:
        if not loss.requires_grad:
            raise UsageError("the loss function returned a tensor without a gradient; compute it from the logits given")
        return loss
    kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise UsageError(f"the loss function returned {kind}; it must return the sum over the images, a tensor of shape ()")


def _forward(state: TrainState, pixels: Tensor, targets: Tensor, *, is_full_step: bool) -> Any:
    """The network's outputs."""
    with _make_forward_context(state.model, pixels.device, is_full_step=is_full_step):
        return state.network(*select_inputs(state.model, pixels, targets))


@contextlib.contextmanager
def _make_forward_context(model: TrainableModel, device: torch.device, *, is_full_step: bool) -> Iterator[None]:
    """Training's precision; compiled for full steps only, since the last, short one is not worth compiling again."""
    with contextlib.nullcontext() if is_full_step else disable_compile(model), make_autocast(device):
        yield


def select_inputs(model: TrainableModel, pixels: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """The inputs of the forward pass in a micro-batch: the images, and for a masked model their masks."""
    return (pixels, targets) if isinstance(model, MaskedViT) else (pixels,)


def disable_compile(model: TrainableModel) -> contextlib.AbstractContextManager[object]:
    """Within the block, a model compiled for training's batches runs eagerly on others."""
    compiled = isinstance(model, ViT | MaskedViT) and model.is_compiled
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


@contextlib.contextmanager
def use_averaged_weights(state: TrainState) -> Iterator[TrainableModel]:
    """The model; within the block it has the averaged weights, if the run keeps an average."""
    with contextlib.nullcontext() if state.ema is None else state.ema.apply_to_model():
        yield state.model
