"""How the attention kernels divide their work."""

import pytest

from vitrail.model.kernels.attention_config import (
    ForwardConfig,
    KeyConfig,
    choose_forward_config,
    choose_key_config,
    divide_tokens,
    list_forward_arguments,
    list_key_arguments,
)


@pytest.mark.parametrize("tokens", range(1, 321))
def test_pieces_cover_the_tokens_and_little_more(tokens: int) -> None:
    pieces = divide_tokens(tokens)
    first = 0
    for start, size in pieces:
        assert start == first
        assert size in {16, 32, 64, 128}
        first += size
    assert tokens <= first < tokens + 16


def test_the_pieces_of_common_inputs() -> None:
    assert [size for _, size in divide_tokens(197)] == [128, 64, 16]
    assert [size for _, size in divide_tokens(257)] == [128, 128, 16]


def test_the_last_tiles_are_as_small_as_the_tokens_let_them_be() -> None:
    keys = list_key_arguments(257, 16, 80, KeyConfig(32, 3, small_last=True))
    assert (keys["COLUMNS"], keys["TAIL"], keys["LAST_ROWS"]) == (32, 16, 16)
    keys = list_key_arguments(257, 16, 80, KeyConfig(64, 1))
    assert (keys["COLUMNS"], keys["TAIL"], keys["LAST_ROWS"]) == (64, 16, 0)
    assert list_key_arguments(64, 1, 64, KeyConfig(32, 3, small_last=True))["LAST_ROWS"] == 0


def test_heads_of_64_channels_have_a_config_of_their_own() -> None:
    assert choose_forward_config(64) != choose_forward_config(72) == choose_forward_config(88)
    assert choose_key_config(64) != choose_key_config(72) == choose_key_config(88)


@pytest.mark.parametrize(("size", "rest"), [(64, 0), (72, 16), (80, 16), (88, 32)])
def test_a_second_tile_has_the_channels_after_64(size: int, rest: int) -> None:
    assert list_forward_arguments(197, 12, size, ForwardConfig())["REST"] == rest
