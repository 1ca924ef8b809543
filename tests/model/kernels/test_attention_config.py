"""How the attention kernels divide their work."""

import pytest

from vitrail.model.kernels.attention_config import (
    EACH_TILE,
    BackwardConfig,
    ForwardConfig,
    divide_tokens,
    list_backward_arguments,
    list_forward_arguments,
)


@pytest.mark.parametrize("tokens", range(1, 321))
def test_pieces_cover_the_tokens_and_little_more(tokens: int) -> None:
    pieces = divide_tokens(tokens, 128)
    first = 0
    for start, size in pieces:
        assert start == first
        assert size in {16, 32, 64, 128}
        first += size
    assert tokens <= first < tokens + 16


def test_the_pieces_of_common_inputs() -> None:
    assert [size for _, size in divide_tokens(197, 128)] == [128, 64, 16]
    assert [size for _, size in divide_tokens(257, 128)] == [128, 128, 16]


def test_arguments_name_each_program() -> None:
    assert list_forward_arguments(197, 12, 64, ForwardConfig(parts=EACH_TILE))["PARTS"] == 4
    keys = list_backward_arguments(257, 16, 80, BackwardConfig("keys", EACH_TILE, 64, 32, small_last=True))
    assert (keys["KIND"], keys["PARTS"], keys["LAST_ROWS"], keys["TAIL"], keys["REST"]) == ("keys", 5, 16, 16, 16)


@pytest.mark.parametrize(("size", "rest"), [(64, 0), (72, 16), (80, 16), (88, 32)])
def test_a_second_tile_has_the_channels_after_64(size: int, rest: int) -> None:
    assert list_forward_arguments(197, 12, size, ForwardConfig())["REST"] == rest
