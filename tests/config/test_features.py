"""Which features a model has, by name, and how many numbers they are."""

from typing import get_args

import pytest

from tests import model_factory
from vitrail.config import BiTConfig, Pool
from vitrail.config.features import (
    KIND_BY_POOL,
    FeatureKind,
    check_feature_kind,
    count_features,
    describe_features,
    list_feature_kinds,
)
from vitrail.errors import UsageError

BIT = model_factory.build_bit().config


def test_every_pooling_of_a_head_has_a_kind_of_features() -> None:
    assert set(KIND_BY_POOL) == set(get_args(Pool))
    assert set(KIND_BY_POOL.values()) < set(get_args(FeatureKind))


@pytest.mark.parametrize(
    ("variant", "kinds", "own"),
    [
        ("plain", ("class", "class-mean", "mean"), "class"),
        ("norm-mean", ("mean",), "mean"),
        ("mean-norm", ("class", "class-mean", "mean"), "mean"),
        ("map", ("mean", "map"), "map"),
        ("class-mean", ("class", "class-mean", "mean"), "class-mean"),
        ("hidden-head", ("class", "class-mean", "mean"), "class, hidden layer of the head"),
    ],
)
def test_a_model_has_the_features_of_its_tokens(variant: str, kinds: tuple[FeatureKind, ...], own: str) -> None:
    config = model_factory.build_config(**model_factory.VARIANTS[variant])
    assert list_feature_kinds(config) == kinds
    assert describe_features(config) == own
    assert [describe_features(config, kind) for kind in kinds] == list(kinds)
    assert count_features(config) == config.num_features
    assert [count_features(config, kind) for kind in kinds] == [64 if kind == "class-mean" else 32 for kind in kinds]


def test_a_resnet_has_the_mean_of_its_feature_map() -> None:
    assert isinstance(BIT, BiTConfig)
    assert (list_feature_kinds(BIT), describe_features(BIT)) == (("mean",), "mean")
    assert count_features(BIT, "mean") == count_features(BIT, "dense") == BIT.num_features


def test_features_that_a_model_lacks_are_refused_with_those_it_has() -> None:
    config = model_factory.build_config(pool="map", class_token=False)
    with pytest.raises(UsageError, match=r"class-mean: the model has no class token; it has mean, map, and default"):
        check_feature_kind(config, "class-mean")
    with pytest.raises(UsageError, match=r"no attention pooling; it has class, class-mean, mean, and default"):
        check_feature_kind(model_factory.build_config(), "map")
    check_feature_kind(config, "dense")
