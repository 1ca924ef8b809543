"""The features of images: what the head reads, another pooling of the tokens, or the patch tokens themselves.

    B images   C channels   S image side   D features   R, K rows and columns of patches

`vitrail.config.features` says what each kind is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config.features import AnyFeatureKind, check_feature_kind
from vitrail.model.vit import Model, ViT


def compute_features(
    model: Model, images: Tensor, kind: AnyFeatureKind = "default", *, normalize: bool = False
) -> Tensor:
    """(B, C, S, S) -> (B, D), or (B, R, K, D) for dense features; `normalize` scales each vector to length 1."""
    check_feature_kind(model.config, kind)
    if kind == "dense":
        features = compute_dense_features(model, images)
    elif kind == "default" or not isinstance(model, ViT):
        features = model.compute_features(images)
    else:
        features = _pool_tokens(model, images, kind)
    return F.normalize(features.float(), dim=-1) if normalize else features


def compute_dense_features(model: Model, images: Tensor) -> Tensor:
    """(B, C, S, S) -> (B, R, K, D): the patch tokens after the last norm; of a ResNet the last feature map.

    Where the last norm comes after the mean of the patches (mean-norm), it is applied to each patch token instead.
    """
    if not isinstance(model, ViT):
        return model.compute_feature_map(images).permute(0, 2, 3, 1)
    grid = model.config.compute_grid((images.shape[2], images.shape[3]))
    tokens = model.encode(images)[:, model.config.num_prefix_tokens :]
    return model.fc_norm(tokens).unflatten(1, grid)  # fc_norm is the identity but for mean-norm


def _pool_tokens(model: ViT, images: Tensor, kind: AnyFeatureKind) -> Tensor:
    """(B, C, S, S) -> (B, D): one pooling of the encoder's output, without the hidden layer of a head."""
    tokens = model.encode(images, model.num_head_tokens if kind == "class" else None)
    if kind == "class":
        return model.fc_norm(tokens[:, 0])
    patches = tokens[:, model.config.num_prefix_tokens :]
    if kind == "map":
        return model.attn_pool(tokens if model.config.pool_prefix else patches)
    mean = model.fc_norm(patches.mean(dim=1))
    return mean if kind == "mean" else torch.cat([model.fc_norm(tokens[:, 0]), mean], dim=-1)
