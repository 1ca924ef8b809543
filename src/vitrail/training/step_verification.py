"""Steps that are computed twice, to detect a machine that computes wrongly (`--verify-every N`).

A broken processor, memory or link may silently change a number. Every N steps loss and gradients are computed
a second time from the same weights, images and random draws, and compared before anything is updated. On a CPU, and on
a GPU with deterministic algorithms, every bit must be the same. Other GPU kernels add in any order: there a tensor may
differ by `TOLERANCE` of the gradient's norm. Verification never changes the run's numbers.
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
from vitrail.errors import MismatchError
from vitrail.runtime import distributed
from vitrail.training.fsdp import to_local
from vitrail.weights import tensor_files

if TYPE_CHECKING:
    from vitrail.training.step import TrainState

TOLERANCE = 1e-2
"""The difference allowed to a GPU that adds in any order, as a share of the whole gradient's norm, or of the loss."""
MISMATCH_FILES = "mismatch-*.safetensors"

StepGradients = tuple[Tensor, Tensor, int]
"""The loss summed over this rank's images, the norm of all gradients, and the number of images."""


@dataclasses.dataclass
class StepVerification:
    """Which steps are computed twice, and where differing results are written."""

    every_steps: int
    folder: Path
    rank: int = 0
    has_computed_step: bool = False
    """Whether this process has computed a step before."""

    def is_due(self, state: "TrainState") -> bool:
        """Whether the next step is computed twice; must be called at each step.

        DDP regroups gradients after a process's first step and may then add in another order, so that step cannot be
        compared.
        """
        is_comparable = self.has_computed_step or not isinstance(state.network, DistributedDataParallel)
        self.has_computed_step = True
        return is_comparable and (state.step + 1) % self.every_steps == 0

    def compute_twice(self, state: "TrainState", compute: Callable[[], StepGradients]) -> StepGradients:
        """Call `compute`, which also sets the gradients, twice; return its result, or raise a MismatchError."""
        total, _, _ = compute()
        first = {name: tensor.clone() for name, tensor in _collect_results(state, total)}
        result = compute()
        second = dict(_collect_results(state, result[0]))
        limit = None if is_deterministic(total.device) else TOLERANCE
        different = find_differences(first, second, limit)
        counts = distributed.all_gather_rows(torch.tensor([len(different)]), total.device).tolist()
        if any(counts):
            details = self._write_mismatch(state.step + 1, first, second, different) if different else ""
            distributed.barrier()  # the first to exit would have torchrun kill those that still write
            ranks = [str(rank) for rank, number in enumerate(counts) if number]
            where = f" in {'process' if len(ranks) == 1 else 'processes'} {', '.join(ranks)}" if len(counts) > 1 else ""
            raise MismatchError(
                f"step {state.step + 1:,} was computed twice and gave two results{where}: the machine computes wrongly"
                f"{details}. Nothing was updated and the last checkpoint is unchanged: test the machine, and continue"
                " with --resume, better on another"
            )
        return result

    def _write_mismatch(
        self, step: int, first: dict[str, Tensor], second: dict[str, Tensor], different: dict[str, float]
    ) -> str:
        """Write both results of the tensors that differ, and of the loss in any case; return what to say of them."""
        names = ["loss", *(name for name in different if name != "loss")]
        tensors = {
            f"{which}/{name}": results[name]
            for which, results in (("first", first), ("second", second))
            for name in names
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
        worst = max(different, key=lambda name: different[name])
        return (
            f". The loss was {float(first['loss']):.9g} and {float(second['loss']):.9g}; {len(different)} of"
            f" {len(first)} tensors differ, {worst} by up to {different[worst]:.3g}. Both results are in {path}"
        )


def is_deterministic(device: torch.device) -> bool:
    """Whether two computations must be bit-identical."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def find_differences(
    first: dict[str, Tensor], second: dict[str, Tensor], limit: float | None = None
) -> dict[str, float]:
    """The largest difference of each tensor that differs: in any bit, or by more than `limit`.

    The limit is a share of the loss, and of the norm of all gradients together.
    """
    total_norm = float(torch.stack([tensor.norm() for name, tensor in first.items() if name != "loss"]).norm())
    differences = {}
    for name, one in first.items():
        other = second[name]
        if _has_same_bits(one, other):
            continue
        difference = (one - other).abs()
        allowed = -1.0 if limit is None else limit * (abs(float(one)) if name == "loss" else total_norm)
        is_finite, is_other_finite = bool(one.isfinite().all()), bool(other.isfinite().all())
        if limit is None or is_finite != is_other_finite or float(difference.norm()) > allowed:
            differences[name] = float(difference.max())
    return differences


def _collect_results(state: "TrainState", total: Tensor) -> list[tuple[str, Tensor]]:
    """What is compared, by name: the loss of this rank's images, and the gradients, or this rank's rows of them."""
    gradients = (
        (name, to_local(parameter.grad))
        for name, parameter in state.model.named_parameters()
        if parameter.grad is not None
    )
    return [("loss", total.detach()), *gradients]


def _has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are bit-identical; 0 and -0 differ, and a NaN equals itself."""
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
