"""A configuration to its network."""

from vitrail.config import BiTConfig, ViTConfig
from vitrail.model.resnet import BiT
from vitrail.model.vit import ViT

ModelConfig = ViTConfig | BiTConfig
Model = ViT | BiT


def build_model(config: ModelConfig) -> Model:
    """The network of a configuration, its parameters not set."""
    return BiT(config) if isinstance(config, BiTConfig) else ViT(config)
