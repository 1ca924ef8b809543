"""A configuration to its network."""

from vitrail.config import BiTConfig, ViTConfig
from vitrail.model.resnet import BiT
from vitrail.model.vit import ViT

Config = ViTConfig | BiTConfig
Model = ViT | BiT


def build(config: Config) -> Model:
    """The network of a configuration, its parameters not set."""
    return BiT(config) if isinstance(config, BiTConfig) else ViT(config)
