"""Which features of an image a model can give, by name: its head's input, or another pooling of its tokens.

default      what the head reads: one of the others, with the hidden layer or projection behind it if there is one
class        the class token after the last norm
mean         the mean of the patch tokens, which are normalized before, or after where the model's own head does so
class-mean   class, then mean, in one row
map          attention pooling (MAP)
dense        the patch tokens themselves after the last norm, in rows and columns
"""

from typing import Literal

from vitrail.config.model import BiTConfig, ModelConfig, Pool
from vitrail.errors import UsageError

FeatureKind = Literal["default", "class", "mean", "class-mean", "map"]
AnyFeatureKind = FeatureKind | Literal["dense"]

KIND_BY_POOL: dict[Pool, FeatureKind] = {
    "class": "class",
    "norm-mean": "mean",
    "mean-norm": "mean",
    "map": "map",
    "class-mean": "class-mean",
}


def list_feature_kinds(config: ModelConfig) -> tuple[FeatureKind, ...]:
    """The kinds of pooled features that a model has, besides its default."""
    if isinstance(config, BiTConfig):
        return ("mean",)
    of_class_token: tuple[FeatureKind, ...] = ("class", "class-mean") if config.class_token else ()
    return (*of_class_token, "mean", *(("map",) if config.pool == "map" else ()))


def check_feature_kind(config: ModelConfig, kind: AnyFeatureKind) -> None:
    """Refuse features that the model does not have."""
    kinds = list_feature_kinds(config)
    if kind not in ("default", "dense", *kinds):
        missing = "attention pooling" if kind == "map" else "class token"
        present = f"{', '.join(kinds)}, and default ({describe_features(config)})"
        raise UsageError(f"--features {kind}: the model has no {missing}; it has {present}")


def describe_features(config: ModelConfig, kind: AnyFeatureKind = "default") -> str:
    """The kind of features, with the default resolved: what a file of features says that it holds."""
    if kind != "default":
        return kind
    if isinstance(config, BiTConfig):
        return "mean"
    parts = {
        "hidden layer of the head": config.hidden_head,
        "projected": config.projection > 0,
        "normalized": config.normalize_features,
    }
    return ", ".join([KIND_BY_POOL[config.pool], *(name for name, has_part in parts.items() if has_part)])


def count_features(config: ModelConfig, kind: AnyFeatureKind = "default") -> int:
    """The width of such features."""
    if kind == "default" or isinstance(config, BiTConfig):
        return config.num_features
    return config.width * (2 if kind == "class-mean" else 1)
