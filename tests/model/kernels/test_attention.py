"""Attention from packed queries, keys and values, where our kernel is not used."""

import pytest
import torch

from tests.model.kernels.attention_reference import attend_exactly, draw_qkv
from vitrail.model.kernels import attention
from vitrail.model.kernels.attention import attend


@pytest.mark.parametrize("tokens", [1, 5, 65])
def test_attention_is_that_of_float64(tokens: int) -> None:
    qkv = draw_qkv(2, tokens, 3, 64)
    torch.testing.assert_close(attend(qkv, 3), attend_exactly(qkv, 3)[0].float(), atol=1e-6, rtol=1e-5)


def test_a_slice_is_attended_to_as_its_copy() -> None:
    part = draw_qkv(2, 17, 2, 128)[..., : 3 * 128]
    assert torch.equal(attend(part, 2), attend(part.contiguous(), 2))


def test_a_hopper_gpu_takes_common_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_obstacle", lambda *_: None)
    sizes = [size for size in range(8, 129, 8) if attention.can_use_kernel(draw_qkv(1, 2, 3, size), 3)]
    assert sizes == [64, 72, 80, 88]
    assert [n for n in (1, 319, 320, 321) if attention.can_use_kernel(draw_qkv(1, n, 1, 64), 1)] == [1, 319, 320]
