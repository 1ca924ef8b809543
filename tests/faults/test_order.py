"""The order of samples is one line, whoever reads it: any number of processes and workers, from any step on."""

import itertools
from pathlib import Path

import pytest
import torch

from tests.data.test_loader import build_training_data, load_steps
from tests.data.test_loader import flowers as flowers  # a fixture
from tests.faults.test_saves import Soaked
from vitrail.data.loader import BatchPlan

WORLDS, WORKERS, STARTS = (1, 2, 4), (0, 1, 2, 4), (0, 2, 5)


@pytest.mark.soak
def test_any_machine_goes_on_where_any_other_stopped(flowers: Path, soaked: Soaked) -> None:
    """Pixels and targets of each step, mixed and augmented, are those of one process without workers."""
    training_data = build_training_data(flowers)
    reference = load_steps(training_data, BatchPlan(batch_size=8, total_samples=45))
    for world, workers, start in itertools.product(WORLDS, WORKERS, STARTS):
        plans = [BatchPlan(batch_size=8, total_samples=45, rank=rank, world_size=world) for rank in range(world)]
        shares = [load_steps(training_data, plan, start=start, workers=workers) for plan in plans]
        for step, (images, targets) in enumerate(reference[start:]):
            parts = [share[step] for share in shares if len(share[step][0])]
            assert torch.equal(torch.cat([image for image, _ in parts]), images)
            assert torch.equal(torch.cat([target for _, target in parts]), targets)
    machines = f"{len(WORLDS) * len(WORKERS)} machines, {len(STARTS)} starts: equal pixels"
    soaked(6, "sample order does not depend on the machine", "workers 0/1/2/4, worlds 1/2/4, resumed", machines)
