"""Steps that are computed twice, to notice a machine that computes wrong (`--verify-every N`).

A broken processor, memory or link may change a number and report nothing. Every N steps loss and gradients are computed
a second time from the same weights, images and random draws, and compared before anything is updated. On a CPU, and on
a GPU with deterministic algorithms, every bit must be the same. Other GPU kernels add in any order: there a tensor may
differ by `TOLERANCE` of the gradient's norm. Whatever the comparison finds, the run's numbers are those without it.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from vitrail import files
from vitrail.errors import VitrailError
from vitrail.runtime import distributed
from vitrail.train.fsdp import to_local
from vitrail.weights import tensor_files

if TYPE_CHECKING:
    from vitrail.train.step import TrainState

TOLERANCE = 1e-2
"""Of the whole gradient's norm, or of the loss: what a GPU that adds in any order may be apart."""
MISMATCH_FILES = "mismatch-*.safetensors"

StepGradients = tuple[Tensor, Tensor, int]
"""The loss summed over this rank's images, the norm of all gradients, and the number of images."""


class MismatchError(VitrailError):
    """A step that gave two results: nothing was updated."""

    exit_code = 7


@dataclasses.dataclass
class StepVerification:
    """Which steps are computed twice, and where both results of one go that differ."""

    every_steps: int
    folder: Path
    rank: int = 0
    has_computed_step: bool = False
    """Whether this process has computed a step."""

    def is_due(self, state: "TrainState") -> bool:
        """Whether the next step is computed twice; to be asked at each.

        torch's wrapper for several ranks divides gradients anew after a process's first step, and then may add in
        another order: that step is none to compare.
        """
        settled = self.has_computed_step or not isinstance(state.network, DistributedDataParallel)
        self.has_computed_step = True
        return settled and (state.step + 1) % self.every_steps == 0

    def compute_twice(self, state: "TrainState", compute: Callable[[], StepGradients]) -> StepGradients:
        """What `compute` gives, which also sets the gradients, if it gives the same again."""
        total, _, _ = compute()
        first = {name: tensor.clone() for name, tensor in _collect_results(state, total)}
        found = compute()
        second = dict(_collect_results(state, found[0]))
        limit = None if is_deterministic(total.device) else TOLERANCE
        different = find_differences(first, second, limit)
        counts = distributed.all_gather_rows(torch.tensor([len(different)]), total.device).tolist()
        if any(counts):
            written = self._write_mismatch(state.step + 1, first, second, different) if different else None
            distributed.barrier()  # the first to end would have torchrun end those that still write
            raise MismatchError(self._describe_mismatch(state.step + 1, first, second, different, written, counts))
        return found

    def _write_mismatch(
        self, step: int, first: dict[str, Tensor], second: dict[str, Tensor], different: dict[str, float]
    ) -> Path:
        """Keep both results of what differs, and of the loss in any case."""
        names = ["loss", *(name for name in different if name != "loss")]
        tensors = {
            f"{which}/{name}": each[name] for which, each in (("first", first), ("second", second)) for name in names
        }
        facts = {
            "step": step,
            "rank": self.rank,
            "losses": [float(first["loss"]), float(second["loss"])],
            "largest_differences": different,
            "tensors": len(first),
        }
        path = self.folder / f"mismatch-step-{step:08}-rank-{self.rank}.safetensors"
        with files.write_atomically(path, overwrite=True) as fresh:
            tensor_files.write_tensors(fresh, tensors, {name: json.dumps(value) for name, value in facts.items()})
        return path

    def _describe_mismatch(
        self,
        step: int,
        first: dict[str, Tensor],
        second: dict[str, Tensor],
        different: dict[str, float],
        written: Path | None,
        counts: list[int],
    ) -> str:
        ranks = [str(rank) for rank, number in enumerate(counts) if number]
        where = f" in {'process' if len(ranks) == 1 else 'processes'} {', '.join(ranks)}" if len(counts) > 1 else ""
        text = f"step {step:,} was computed twice and gave two results{where}: the machine computes wrong"
        if written is not None:
            worst = max(different, key=lambda name: different[name])
            losses = f"The loss was {float(first['loss']):.9g} and {float(second['loss']):.9g}"
            text += (
                f". {losses}; {len(different)} of {len(first)} tensors differ, {worst} by up to {different[worst]:.3g}"
            )
            text += f". Both results are in {written}"
        return text + (
            ". Nothing was updated and the last checkpoint is as it was: test the machine, and go on with --resume,"
            " better on another"
        )


def is_deterministic(device: torch.device) -> bool:
    """Whether two computations must agree in every bit."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def find_differences(
    first: dict[str, Tensor], second: dict[str, Tensor], limit: float | None = None
) -> dict[str, float]:
    """The largest difference of each tensor that is not the same in both: in every bit, or with a limit up to it.

    The limit is a share of the loss, and of the norm of all gradients together.
    """
    whole = float(torch.stack([tensor.norm() for name, tensor in first.items() if name != "loss"]).norm())
    found = {}
    for name, one in first.items():
        other = second[name]
        if _has_same_bits(one, other):
            continue
        apart = (one - other).abs()
        allowed = -1.0 if limit is None else limit * (abs(float(one)) if name == "loss" else whole)
        if limit is None or _is_finite(one) != _is_finite(other) or float(apart.norm()) > allowed:
            found[name] = float(apart.max())
    return found


def _collect_results(state: "TrainState", total: Tensor) -> list[tuple[str, Tensor]]:
    """What is compared, by name: the loss of this rank's images, and the gradients, or the rows of them that it has."""
    gradients = (
        (name, to_local(parameter.grad))
        for name, parameter in state.model.named_parameters()
        if parameter.grad is not None
    )
    return [("loss", total.detach()), *gradients]


def _has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same; 0 and -0 are not, and a NaN is itself."""
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
