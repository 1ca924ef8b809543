"""The choice of a device: by name, or the best one."""

import pytest
import torch

from vitrail.errors import UsageError
from vitrail.runtime.devices import find_best_device, resolve_device


def test_a_name_gives_its_device_and_none_the_best() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device(torch.device("cpu")) == torch.device("cpu")
    assert resolve_device(None) == find_best_device()


def test_a_device_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no device 'banana'; try cpu, cuda or mps"):
        resolve_device("banana")
    with pytest.raises(UsageError, match="torch sees no cuda device here; try cpu"):
        resolve_device("cuda:0")
