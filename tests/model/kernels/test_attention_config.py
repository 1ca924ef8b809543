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
    queries, keys = list_backward_arguments(257, 16, 80, BackwardConfig("split", EACH_TILE, 64, 32, small_last=True))
    assert (queries["KIND"], keys["KIND"]) == ("queries", "keys")
    assert (queries["PARTS"], queries["LAST_ROWS"], queries["TAIL"], queries["REST"]) == (5, 16, 16, 16)
