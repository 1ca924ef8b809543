"""Where our kernels are used, and what the log says where they are not."""

import logging
import subprocess
import sys

import pytest
import torch

from vitrail.model.kernels import availability
from vitrail.model.kernels.availability import find_obstacle, note_fallback


def test_float32_is_left_to_torch() -> None:
    assert find_obstacle("triton_attention", 0, torch.float32) == "the precision is torch.float32"


def test_other_gpus_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    reason = "the GPU's compute capability is (8, 0), not (9, 0)"
    assert find_obstacle("triton_attention", 0, torch.bfloat16) == reason


def test_a_reason_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "_noted", set())
    with caplog.at_level(logging.INFO, "vitrail"):
        assert not any(note_fallback("a test", "it is one") for _ in range(3))
    assert [record.message for record in caplog.records] == ["a test by torch's kernels: it is one"]


def test_training_on_the_cpu_imports_no_kernel() -> None:
    """Builds of torch for CPUs have no triton."""
    script = """
import sys
sys.modules["triton"] = None
import torch, vitrail
model = vitrail.create("ti16", num_classes=2, image_size=32)
with torch.autocast("cpu", torch.bfloat16):
    model(torch.zeros(1, 3, 32, 32)).sum().backward()
sys.exit(any(name.startswith("vitrail.model.kernels.triton_") for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
