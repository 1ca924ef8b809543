"""Attention from packed queries, keys and values, where our kernel is not used."""

import logging

import pytest
import torch

from tests.model.kernels.attention_reference import attend_exactly, draw_qkv
from vitrail.model.kernels import attention
from vitrail.model.kernels.attention import attend, find_obstacle


@pytest.mark.parametrize("tokens", [1, 5, 65])
def test_attention_is_that_of_float64(tokens: int) -> None:
    qkv = draw_qkv(2, tokens, 3, 64)
    torch.testing.assert_close(attend(qkv, 3), attend_exactly(qkv, 3)[0].float(), atol=1e-6, rtol=1e-5)


def test_a_slice_is_attended_to_as_its_copy() -> None:
    part = draw_qkv(2, 17, 2, 128)[..., : 3 * 128]
    assert torch.equal(attend(part, 2), attend(part.contiguous(), 2))


def test_float32_is_left_to_torch() -> None:
    assert find_obstacle(0, torch.float32) == "the precision is torch.float32"


def test_a_hopper_gpu_takes_common_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_obstacle", lambda *_: None)
    monkeypatch.setattr(attention, "_noted", set())
    assert [size for size in range(8, 129, 8) if attention.can_use_kernel(draw_qkv(1, 2, 3, size), 3)] == [
        64,
        72,
        80,
        88,
    ]
    assert [n for n in (1, 319, 320, 321) if attention.can_use_kernel(draw_qkv(1, n, 1, 64), 1)] == [1, 319, 320]


def test_a_reason_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_noted", set())
    with caplog.at_level(logging.INFO, "vitrail"):
        assert not any(attention.note_fallback("it is a test") for _ in range(3))
    assert [record.message for record in caplog.records] == ["attention by torch's kernels: it is a test"]
