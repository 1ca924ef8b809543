"""Adapt weights to another task: new classes, resolution, patch size or channels. Every change is recorded."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import BiTConfig, ModelConfig, PreprocessConfig, Resample, ViTConfig
from vitrail.config.model import expand_image_size
from vitrail.errors import ModelError, UsageError
from vitrail.formatting import pluralize
from vitrail.model.positions import Grid, resample_biases, resample_offsets, resample_positions
from vitrail.presets import spread_over_channels
from vitrail.weights.trained import Origin, Trained, assemble_model, require_trained

ZERO_HEAD = "new, zeros"
"""How `Origin.changes` ends for a head that starts from zeros."""
_FIRST_KERNEL_NAMES = ("stem.conv.weight", "patch_embed.backbone.stem.conv.weight", "patch_embed.proj.weight")


def adapt(
    trained: Trained,
    *,
    classes: int | None = None,
    labels: tuple[str, ...] | None = None,
    image_size: int | tuple[int, int] | None = None,
    patch: int | None = None,
    channels: int | None = None,
    operator: Resample | None = None,
) -> Trained:
    """Adapt a network to another task; `origin.changes` lists what was replaced, resampled or removed.

    `classes` replaces the head, and a pre-training head's hidden layer, with a zero head. `labels` names the classes.
    `operator` resamples positions in another way than the weights' origin does.

        trained = vitrail.adapt(vitrail.load("model.safetensors"), classes=102, image_size=64)
        print(trained.origin.changes)
    """
    tensors = {name: tensor.cpu().clone() for name, tensor in require_trained(trained).model.state_dict().items()}
    config, changes = trained.model.config, list[str]()
    if operator is not None:
        config = _change_resample(config, changes, operator)
    if classes is not None:
        config = _replace_head(config, tensors, changes, classes)
    if patch is not None or image_size is not None:
        size = config.image_size if image_size is None else expand_image_size(image_size)
        config = _change_grid(config, tensors, changes, size, patch)
    if channels is not None:
        config = _change_channels(config, tensors, changes, channels)
    preprocess = _fit_preprocess(trained.preprocess, trained.model.config, config, changes)
    if labels is None and classes is None:
        labels = trained.labels
    if labels != trained.labels:
        old, new = ("none" if names is None else f"{len(names)} names" for names in (trained.labels, labels))
        changes.append(f"labels: {old} -> {new}")
    if changes:  # what was fitted to or measured on the old outputs no longer holds
        if trained.temperature != 1:
            changes.append(f"temperature: {trained.temperature:g} -> 1")
        if trained.threshold:
            changes.append(f"threshold: {trained.threshold:g} -> none")
        if trained.label_thresholds:
            changes.append("label thresholds: one a class -> none")
        trained = dataclasses.replace(
            trained,
            temperature=1.0,
            threshold=0.0,
            label_thresholds=(),
            precision_measurements=(),
            activation_ranges=(),
        )
    return dataclasses.replace(
        trained,
        model=assemble_model(config, tensors),
        preprocess=preprocess,
        labels=labels,
        origin=_add_changes(trained.origin, *changes),
        multi_label=trained.multi_label and classes is None,
    )


def round_to_float16(trained: Trained) -> Trained:
    """Round the weights to the nearest that 16 bits hold; they stay float32, and a file of them can have half the size.

    Weights beyond float16's range are refused.
    """
    tensors = {name: tensor.cpu().half() for name, tensor in trained.model.state_dict().items()}
    if large := next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None):
        raise ModelError(f"weights of {large!r} are beyond float16's range, 65,504: omit --float16")
    return dataclasses.replace(
        trained,
        model=assemble_model(trained.model.config, tensors),
        origin=_add_changes(trained.origin, "weights: rounded to float16"),
        precision_measurements=(),
        activation_ranges=(),
    )


def _add_changes(origin: Origin, *changes: str) -> Origin:
    return dataclasses.replace(origin, changes=(*origin.changes, *changes))


def reorder_head(trained: Trained, labels: tuple[str, ...]) -> Trained:
    """Put a model's outputs into the order of `labels`, which must be its own."""
    own = require_trained(trained).labels
    if own is None:
        raise UsageError("the model's classes have no names, so its head cannot be kept: omit --keep-head")
    if unknown := sorted(set(labels) ^ set(own)):
        where = "data" if unknown[0] in labels else "model"
        raise UsageError(
            f"the head cannot be kept: {pluralize(len(unknown), 'class')} only in the model or only in the data,"
            f" such as {unknown[0]!r} in the {where}. Omit --keep-head for a new head"
        )
    if own == labels:
        return trained
    if duplicate := next((label for label in own if own.count(label) > 1), None):
        raise UsageError(f"the head cannot be kept: several of its classes are called {duplicate!r}. Omit --keep-head")
    order = [own.index(label) for label in labels]
    rows, thresholds = torch.tensor(order), trained.label_thresholds
    tensors = {
        name: tensor[rows] if name.startswith(("head.", "head_dist.")) else tensor
        for name, tensor in trained.model.state_dict().items()
    }
    return dataclasses.replace(
        trained,
        model=assemble_model(trained.model.config, tensors),
        labels=labels,
        origin=_add_changes(trained.origin, "head: rows reordered, the same classes"),
        label_thresholds=tuple(thresholds[index] for index in order) if thresholds else (),
        precision_measurements=(),
        activation_ranges=(),
    )


# Each step returns the new config, puts new tensors into `tensors` and appends to `changes`.


def _change_resample(config: ModelConfig, changes: list[str], operator: Resample) -> ModelConfig:
    if isinstance(config, BiTConfig):
        raise UsageError("a ResNet has no positions to resample")
    if operator != config.resample:
        changes.append(f"resample: {config.resample} -> {operator}")
    return dataclasses.replace(config, resample=operator)


def _replace_head(config: ModelConfig, tensors: dict[str, Tensor], changes: list[str], classes: int) -> ModelConfig:
    """Replace the head, and a hidden layer before it, with zeros (the paper's head for fine-tuning)."""
    kernel: tuple[int, ...] = ()
    if isinstance(config, BiTConfig):
        config = dataclasses.replace(config, classes=classes)
        heads, kernel = ["head.fc"], (1, 1)  # a 1 x 1 convolution
    else:
        distilled = config.distillation_head and classes > 0
        config = dataclasses.replace(config, classes=classes, distillation_head=distilled)
        config = dataclasses.replace(config, hidden_head=False, projection=0, normalize_features=False)
        heads = ["head", "head_dist"] if distilled else ["head"]
    for name in list(tensors):
        if name.startswith(("pre_logits.", "projection.", "head.", "head_dist.")):
            changes.append(f"{name} {tuple(tensors.pop(name).shape)}: removed")
    for head in heads if classes else ():
        shape = (classes, config.num_features, *kernel)
        tensors |= {f"{head}.weight": torch.zeros(shape), f"{head}.bias": torch.zeros(classes)}
        changes.append(f"{head}.weight {shape}, {head}.bias ({classes}): {ZERO_HEAD}")
    return config


def _change_grid(
    old: ModelConfig, tensors: dict[str, Tensor], changes: list[str], size: tuple[int, int], patch: int | None
) -> ModelConfig:
    """Resize the patch kernels, then resample every table of positions to the new grid."""
    if isinstance(old, BiTConfig):
        if patch is not None:
            raise UsageError("a ResNet has no patches")
        if size != old.image_size:
            changes.append(f"image_size: {list(old.image_size)} -> {list(size)}")
        return dataclasses.replace(old, image_size=size)
    patch = old.patch if patch is None else patch
    config = dataclasses.replace(old, image_size=size, patch=patch)
    if patch != old.patch:
        name, side = "patch_embed.proj.weight", old.patch
        tensors[name] = resize_patch_kernels(tensors[name], patch)
        changes.append(f"{name}: patches of {side} x {side} -> {patch} x {patch}, FlexiViT's pseudo-inverse resize")
    if config.grid != old.grid:
        grids = " -> ".join(f"{rows} x {columns}" for rows, columns in (old.grid, config.grid))
        for name, tensor in tensors.items():
            if (table := _resample_table(name, tensor, old, config.grid)) is not None:
                shapes = f"{tuple(tensor.shape)} -> {tuple(table.shape)}"
                changes.append(f"{name} {shapes}: grid {grids}, {config.resample}")
                tensors[name] = table
    return config


def _resample_table(name: str, table: Tensor, old: ViTConfig, grid: Grid) -> Tensor | None:
    """Resample the table of positions called `name` to another grid; None for any other tensor."""
    if name == "pos_embed":
        prefix, patches = table.tensor_split([old.num_positioned_prefix_tokens], dim=1)
        return torch.cat([prefix, resample_positions(patches, old.grid, grid, old.resample)], dim=1)
    if name == "pos_embed_y":
        return resample_positions(table, (old.grid[0], 1), (grid[0], 1), old.resample)
    if name == "pos_embed_x":
        return resample_positions(table, (1, old.grid[1]), (1, grid[1]), old.resample)
    if name.endswith(".attn.offsets"):
        return resample_offsets(table, old.grid, grid, old.resample)
    if name.endswith(".attn.relative_position_bias_table"):
        return resample_biases(table, old.grid, grid, old.resample)
    return None


def resize_patch_kernels(kernels: Tensor, patch: int) -> Tensor:
    """(D, C, P, P) -> (D, C, P', P'): the kernels whose output on a resized patch is closest to the old output.

    FlexiViT (Beyer et al. 2023): with B the bilinear resize of a patch, <B x, w'> = <x, w> for all x where the patch
    grows, and the least-squares solution w' = pinv(B^T) w where it shrinks.
    """
    # The resize is separable, B = b x b, and so is its pseudo-inverse: that of the small b is enough.
    basis = torch.eye(kernels.shape[-1], dtype=torch.float64)[:, None]  # a line of P pixels, one of them 1
    b = F.interpolate(basis, patch, mode="linear", align_corners=False)[:, 0]  # (P, P'): b^T
    inverse = torch.linalg.pinv(b)  # (P', P)
    return (inverse @ kernels.double() @ inverse.mT).to(kernels.dtype)


def _change_channels(config: ModelConfig, tensors: dict[str, Tensor], changes: list[str], channels: int) -> ModelConfig:
    """Sum the kernels for one channel, as if a gray image filled all channels; for more, repeat them in turn."""
    old, config = config.channels, dataclasses.replace(config, channels=channels)
    if channels == old:
        return config
    name = next(name for name in _FIRST_KERNEL_NAMES if name in tensors)
    if channels == 1:
        tensors[name], how = tensors[name].sum(dim=1, keepdim=True), "summed"
    else:
        order = [channel % old for channel in range(channels)]
        tensors[name], how = tensors[name][:, order] * (old / channels), f"of {order} times {old}/{channels}"
    rescaled = "" if name == "patch_embed.proj.weight" else ", then standardized again"
    changes.append(f"{name}: {old} -> {channels} input channels, kernels {how}{rescaled}")
    return config


def _fit_preprocess(
    preprocess: PreprocessConfig | None, before: ModelConfig, config: ModelConfig, changes: list[str]
) -> PreprocessConfig | None:
    """Fit the preprocessing to the new input and keep its crop fraction."""
    if preprocess is None:
        return None
    fitted = preprocess
    if config.image_size != before.image_size:
        if len(fitted.resize) == 1 and config.image_size[0] != config.image_size[1]:
            resize: tuple[int, ...] = config.image_size
        else:
            sides = zip(fitted.resize, config.image_size, fitted.size, strict=False)
            resize = tuple(side * new // old for side, new, old in sides)
        fitted = dataclasses.replace(fitted, size=config.image_size, resize=resize)
    if len(fitted.mean) != config.channels:
        mean, std = (spread_over_channels(values, config.channels) for values in (fitted.mean, fitted.std))
        fitted = dataclasses.replace(fitted, mean=mean, std=std)
    for field in dataclasses.fields(PreprocessConfig):
        old, new = getattr(preprocess, field.name), getattr(fitted, field.name)
        if old != new:
            changes.append(f"preprocess.{field.name}: {list(old)} -> {list(new)}")
    return fitted
