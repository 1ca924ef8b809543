"""Build the network of a configuration."""

from vitrail.config import BiTConfig, ModelConfig
from vitrail.model.resnet import BiT
from vitrail.model.vit import ViT

Model = ViT | BiT


def build_model(config: ModelConfig) -> Model:
    """The network of a configuration, its parameters uninitialized."""
    return BiT(config) if isinstance(config, BiTConfig) else ViT(config)
