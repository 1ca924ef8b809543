"""Adapt weights to another task: new classes, resolution, patch size or channels. Every change is recorded."""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import BiTConfig, ModelConfig, PreprocessConfig, Resample, ViTConfig, expand_image_size
from vitrail.errors import UsageError
from vitrail.formatting import pluralize
from vitrail.model.positions import Grid, resample_offsets, resample_positions
from vitrail.presets import spread_over_channels
from vitrail.weights.trained import Trained, assemble_model, require_trained

_FIRST_KERNEL_NAMES = ("stem.conv.weight", "patch_embed.backbone.stem.conv.weight", "patch_embed.proj.weight")


class Adaptation(NamedTuple):
    """A model between two steps of its adaptation."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    changes: tuple[str, ...]


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
    """
    tensors = {name: tensor.cpu().clone() for name, tensor in require_trained(trained).model.state_dict().items()}
    step = Adaptation(trained.model.config, tensors, ())
    if operator is not None:
        step = _change_resample(step, operator)
    if classes is not None:
        step = _replace_head(step, classes)
    if patch is not None or image_size is not None:
        size = step.config.image_size if image_size is None else expand_image_size(image_size)
        step = _change_grid(step, size, patch)
    if channels is not None:
        step = _change_channels(step, channels)
    preprocess, changes = _fit_preprocess(trained.preprocess, trained.model.config, step.config)
    if labels is None and classes is None:
        labels = trained.labels
    if labels != trained.labels:
        old, new = ("none" if names is None else f"{len(names)} names" for names in (trained.labels, labels))
        changes.append(f"labels: {old} -> {new}")
    if step.changes or changes:
        trained, lost = _reset_fitted_settings(trained)
        changes += lost
    return dataclasses.replace(
        trained,
        model=assemble_model(step.config, step.tensors),
        preprocess=preprocess,
        labels=labels,
        origin=dataclasses.replace(trained.origin, changes=(*trained.origin.changes, *step.changes, *changes)),
        multi_label=trained.multi_label and classes is None,
    )


def _reset_fitted_settings(trained: Trained) -> tuple[Trained, list[str]]:
    """Reset what was fitted to or measured on the old outputs; return sentences on what was reset."""
    changes = []
    if trained.temperature != 1:
        changes.append(f"temperature: {trained.temperature:g} -> 1")
    if trained.threshold:
        changes.append(f"threshold: {trained.threshold:g} -> none")
    reset = dataclasses.replace(
        trained, temperature=1.0, threshold=0.0, precision_measurements=(), activation_ranges=()
    )
    return reset, changes


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
    rows = torch.tensor([own.index(label) for label in labels])
    tensors = {
        name: tensor[rows] if name.startswith(("head.", "head_dist.")) else tensor
        for name, tensor in trained.model.state_dict().items()
    }
    change = "head: rows reordered, the same classes"
    origin = dataclasses.replace(trained.origin, changes=(*trained.origin.changes, change))
    model = assemble_model(trained.model.config, tensors)
    return dataclasses.replace(
        trained, model=model, labels=labels, origin=origin, precision_measurements=(), activation_ranges=()
    )


def _change_resample(adaptation: Adaptation, operator: Resample) -> Adaptation:
    if isinstance(adaptation.config, BiTConfig):
        raise UsageError("a ResNet has no positions to resample")
    if operator == adaptation.config.resample:
        return adaptation
    change = f"resample: {adaptation.config.resample} -> {operator}"
    return Adaptation(
        dataclasses.replace(adaptation.config, resample=operator), adaptation.tensors, (*adaptation.changes, change)
    )


def _replace_head(adaptation: Adaptation, classes: int) -> Adaptation:
    """Replace the head, and a hidden layer before it, with zeros (the paper's head for fine-tuning)."""
    config: ModelConfig
    kernel: tuple[int, ...] = ()
    if isinstance(adaptation.config, BiTConfig):
        config = dataclasses.replace(adaptation.config, classes=classes)
        heads, kernel = ["head.fc"], (1, 1)  # a 1 x 1 convolution
    else:
        distilled = adaptation.config.distillation_head and classes > 0
        config = dataclasses.replace(adaptation.config, classes=classes, hidden_head=False, distillation_head=distilled)
        heads = ["head", "head_dist"] if distilled else ["head"]
    tensors, changes = dict(adaptation.tensors), list(adaptation.changes)
    for name in adaptation.tensors:
        if name.startswith(("pre_logits.", "head.", "head_dist.")):
            changes.append(f"{name} {_format_shape(tensors.pop(name))}: removed")
    for head in heads if classes else ():
        tensors[f"{head}.weight"] = torch.zeros(classes, config.num_features, *kernel)
        tensors[f"{head}.bias"] = torch.zeros(classes)
        changes.append(f"{head}.weight {_format_shape(tensors[f'{head}.weight'])}, {head}.bias ({classes}): new, zeros")
    return Adaptation(config, tensors, tuple(changes))


def _change_grid(adaptation: Adaptation, size: tuple[int, int], patch: int | None) -> Adaptation:
    """Resize the patch kernels, then resample every table of positions to the new grid."""
    if isinstance(adaptation.config, BiTConfig):
        if patch is not None:
            raise UsageError("a ResNet has no patches")
        if size == adaptation.config.image_size:
            return adaptation
        change = f"image_size: {list(adaptation.config.image_size)} -> {list(size)}"
        return Adaptation(
            dataclasses.replace(adaptation.config, image_size=size), adaptation.tensors, (*adaptation.changes, change)
        )
    patch = adaptation.config.patch if patch is None else patch
    config = dataclasses.replace(adaptation.config, image_size=size, patch=patch)
    tensors, changes = dict(adaptation.tensors), list(adaptation.changes)
    if patch != adaptation.config.patch:
        name, old = "patch_embed.proj.weight", adaptation.config.patch
        tensors[name] = resize_patch_kernels(tensors[name], patch)
        changes.append(f"{name}: patches of {old} x {old} -> {patch} x {patch}, FlexiViT's pseudo-inverse resize")
    if config.grid != adaptation.config.grid:
        for name in tensors:
            if (table := _resample_table(name, tensors[name], adaptation.config, config.grid)) is not None:
                grids = " -> ".join(f"{rows} x {columns}" for rows, columns in (adaptation.config.grid, config.grid))
                changes.append(
                    f"{name} {_format_shape(tensors[name])} -> {_format_shape(table)}: grid {grids}, {config.resample}"
                )
                tensors[name] = table
    return Adaptation(config, tensors, tuple(changes))


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


def _change_channels(adaptation: Adaptation, channels: int) -> Adaptation:
    """Sum the kernels for one channel, as if a gray image filled all channels; for more, repeat them in turn."""
    old = adaptation.config.channels
    config = dataclasses.replace(adaptation.config, channels=channels)
    if channels == old:
        return adaptation
    name = next(name for name in _FIRST_KERNEL_NAMES if name in adaptation.tensors)
    kernels = adaptation.tensors[name]
    if channels == 1:
        kernels, how = kernels.sum(dim=1, keepdim=True), "summed"
    else:
        order = [channel % old for channel in range(channels)]
        kernels, how = kernels[:, order] * (old / channels), f"of {order} times {old}/{channels}"
    rescaled = "" if name == "patch_embed.proj.weight" else ", then standardized again"
    changes = (*adaptation.changes, f"{name}: {old} -> {channels} input channels, kernels {how}{rescaled}")
    return Adaptation(config, adaptation.tensors | {name: kernels}, changes)


def _fit_preprocess(
    preprocess: PreprocessConfig | None, before: ModelConfig, config: ModelConfig
) -> tuple[PreprocessConfig | None, list[str]]:
    """Fit the preprocessing to the new input and keep its crop fraction; return also what changed."""
    if preprocess is None:
        return None, []
    changed = preprocess
    if config.image_size != before.image_size:
        if len(changed.resize) == 1 and config.image_size[0] != config.image_size[1]:
            resize: tuple[int, ...] = config.image_size
        else:
            sides = zip(changed.resize, config.image_size, changed.size, strict=False)
            resize = tuple(side * new // old for side, new, old in sides)
        changed = dataclasses.replace(changed, size=config.image_size, resize=resize)
    if len(changed.mean) != config.channels:
        mean, std = (
            spread_over_channels(changed.mean, config.channels),
            spread_over_channels(changed.std, config.channels),
        )
        changed = dataclasses.replace(changed, mean=mean, std=std)
    fields = (field.name for field in dataclasses.fields(PreprocessConfig))
    pairs = [(name, getattr(preprocess, name), getattr(changed, name)) for name in fields]
    return changed, [f"preprocess.{name}: {list(old)} -> {list(new)}" for name, old, new in pairs if old != new]


def _format_shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
