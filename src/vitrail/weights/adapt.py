"""Weights made to fit another task: new classes, resolution, patch side or channels. Every change is written down."""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import BiTConfig, Preprocess, Resample, ViTConfig, sides
from vitrail.errors import UsageError
from vitrail.model.build import Config
from vitrail.model.positions import Grid, resample, resample_offsets
from vitrail.plurals import plural
from vitrail.presets import in_turn
from vitrail.weights.trained import Trained, assemble, require

_FIRST_KERNELS = ("stem.conv.weight", "patch_embed.backbone.stem.conv.weight", "patch_embed.proj.weight")


class Step(NamedTuple):
    config: Config
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
    """The same network for another task; `origin.changes` lists what was replaced, resampled or removed.

    `classes` puts a zero head in place of the old one, the pre-training head's hidden layer included. `labels` names
    the classes. `operator` resamples positions in another way than the weights' origin does.
    """
    copies = {name: tensor.cpu().clone() for name, tensor in require(trained).model.state_dict().items()}
    step = Step(trained.model.config, copies, ())
    if operator is not None:
        step = _new_operator(step, operator)
    if classes is not None:
        step = _new_head(step, classes)
    if patch is not None or image_size is not None:
        size = step.config.image_size if image_size is None else sides(image_size)
        step = _new_grid(step, size, patch)
    if channels is not None:
        step = _new_channels(step, channels)
    preprocess, changes = _fit_preprocess(trained.preprocess, trained.model.config, step.config)
    if labels is None and classes is None:
        labels = trained.labels
    if labels != trained.labels:
        old, new = ("none" if names is None else f"{len(names)} names" for names in (trained.labels, labels))
        changes.append(f"labels: {old} -> {new}")
    temperature, threshold, tried, ranges = trained.temperature, trained.threshold, trained.tried, trained.ranges
    if step.changes or changes:  # these were fitted to what the model said before
        if temperature != 1:
            changes.append(f"temperature: {temperature:g} -> 1")
        if threshold:
            changes.append(f"threshold: {threshold:g} -> none")
        temperature, threshold, tried, ranges = 1.0, 0.0, (), ()
    origin = dataclasses.replace(trained.origin, changes=(*trained.origin.changes, *step.changes, *changes))
    several = trained.several and classes is None
    model = assemble(step.config, step.tensors)
    return Trained(model, preprocess, labels, origin, temperature, several, threshold, tried, ranges)


def reordered(trained: Trained, labels: tuple[str, ...]) -> Trained:
    """The same model with its outputs in the order of `labels`, which must be its own."""
    own = require(trained).labels
    if own is None:
        raise UsageError("the model's classes have no names, so its head cannot be kept: leave --keep-head away")
    if unknown := sorted(set(labels) ^ set(own)):
        where = "data" if unknown[0] in labels else "model"
        raise UsageError(
            f"the head cannot be kept: {plural(len(unknown), 'class')} in one of model and data alone,"
            f" such as {unknown[0]!r} of the {where}. Leave --keep-head away for a new head"
        )
    if own == labels:
        return trained
    if twice := next((label for label in own if own.count(label) > 1), None):
        raise UsageError(
            f"the head cannot be kept: several of its classes are called {twice!r}. Leave --keep-head away"
        )
    rows = torch.tensor([own.index(label) for label in labels])
    tensors = {
        name: tensor[rows] if name.startswith(("head.", "head_dist.")) else tensor
        for name, tensor in trained.model.state_dict().items()
    }
    change = "head: rows put into another order of the same classes"
    origin = dataclasses.replace(trained.origin, changes=(*trained.origin.changes, change))
    model = assemble(trained.model.config, tensors)
    return dataclasses.replace(trained, model=model, labels=labels, origin=origin, tried=(), ranges=())


def _new_operator(step: Step, operator: Resample) -> Step:
    if isinstance(step.config, BiTConfig):
        raise UsageError("a ResNet has no positions to resample")
    if operator == step.config.resample:
        return step
    change = f"resample: {step.config.resample} -> {operator}"
    return Step(dataclasses.replace(step.config, resample=operator), step.tensors, (*step.changes, change))


def _new_head(step: Step, classes: int) -> Step:
    """A zero head (the paper's, for fine-tuning) in place of the old one, and of a hidden layer before it."""
    config: Config
    place: tuple[int, ...] = ()
    if isinstance(step.config, BiTConfig):
        config = dataclasses.replace(step.config, classes=classes)
        heads, place = ["head.fc"], (1, 1)  # a convolution of one place
    else:
        distilled = step.config.distillation_head and classes > 0
        config = dataclasses.replace(step.config, classes=classes, hidden_head=False, distillation_head=distilled)
        heads = ["head", "head_dist"] if distilled else ["head"]
    tensors, changes = dict(step.tensors), list(step.changes)
    for name in step.tensors:
        if name.startswith(("pre_logits.", "head.", "head_dist.")):
            changes.append(f"{name} {_shape(tensors.pop(name))}: removed")
    for head in heads if classes else ():
        tensors[f"{head}.weight"] = torch.zeros(classes, config.features, *place)
        tensors[f"{head}.bias"] = torch.zeros(classes)
        changes.append(f"{head}.weight {_shape(tensors[f'{head}.weight'])}, {head}.bias ({classes}): new, zeros")
    return Step(config, tensors, tuple(changes))


def _new_grid(step: Step, size: tuple[int, int], patch: int | None) -> Step:
    """Patch kernels resized, then every table of positions resampled to the new grid."""
    if isinstance(step.config, BiTConfig):
        if patch is not None:
            raise UsageError("a ResNet has no patches")
        if size == step.config.image_size:
            return step
        change = f"image_size: {list(step.config.image_size)} -> {list(size)}"
        return Step(dataclasses.replace(step.config, image_size=size), step.tensors, (*step.changes, change))
    patch = step.config.patch if patch is None else patch
    config = dataclasses.replace(step.config, image_size=size, patch=patch)
    tensors, changes = dict(step.tensors), list(step.changes)
    if patch != step.config.patch:
        name, old = "patch_embed.proj.weight", step.config.patch
        tensors[name] = resize_patches(tensors[name], patch)
        changes.append(f"{name}: patches of {old} x {old} -> {patch} x {patch}, FlexiViT's pseudo-inverse resize")
    if config.grid != step.config.grid:
        for name in tensors:
            if (table := _resampled(name, tensors[name], step.config, config.grid)) is not None:
                grids = " -> ".join(f"{rows} x {columns}" for rows, columns in (step.config.grid, config.grid))
                changes.append(f"{name} {_shape(tensors[name])} -> {_shape(table)}: grid {grids}, {config.resample}")
                tensors[name] = table
    return Step(config, tensors, tuple(changes))


def _resampled(name: str, table: Tensor, old: ViTConfig, grid: Grid) -> Tensor | None:
    """The table of positions called `name` on another grid; None for any other tensor."""
    if name == "pos_embed":
        prefix, patches = table.tensor_split([old.positioned_prefix], dim=1)
        return torch.cat([prefix, resample(patches, old.grid, grid, old.resample)], dim=1)
    if name == "pos_embed_y":
        return resample(table, (old.grid[0], 1), (grid[0], 1), old.resample)
    if name == "pos_embed_x":
        return resample(table, (1, old.grid[1]), (1, grid[1]), old.resample)
    if name.endswith(".attn.offsets"):
        return resample_offsets(table, old.grid, grid, old.resample)
    return None


def resize_patches(kernels: Tensor, patch: int) -> Tensor:
    """(D, C, P, P) -> (D, C, P', P'): the kernels whose answer to a resized patch is closest to the old answer.

    FlexiViT (Beyer et al. 2023): with B the bilinear resize of a patch, <B x, w'> = <x, w> for all x where the patch
    grows, and the least-squares solution w' = pinv(B^T) w where it shrinks.
    """
    # The resize works on rows and columns alike, B = b x b, and so does its pseudo-inverse: a small one is enough.
    basis = torch.eye(kernels.shape[-1], dtype=torch.float64)[:, None]  # a line of P pixels, one of them lit
    b = F.interpolate(basis, patch, mode="linear", align_corners=False)[:, 0]  # (P, P'): b^T
    inverse = torch.linalg.pinv(b)  # (P', P)
    return (inverse @ kernels.double() @ inverse.mT).to(kernels.dtype)


def _new_channels(step: Step, channels: int) -> Step:
    """One channel sees the sum of the kernels, as a grey picture shown in all of them does; more share them in turn."""
    old = step.config.channels
    config = dataclasses.replace(step.config, channels=channels)
    if channels == old:
        return step
    name = next(name for name in _FIRST_KERNELS if name in step.tensors)
    kernels = step.tensors[name]
    if channels == 1:
        kernels, how = kernels.sum(dim=1, keepdim=True), "summed"
    else:
        order = [channel % old for channel in range(channels)]
        kernels, how = kernels[:, order] * (old / channels), f"of {order} times {old}/{channels}"
    rescaled = "" if name == "patch_embed.proj.weight" else ", then standardised anew"
    changes = (*step.changes, f"{name}: {old} -> {channels} input channels, kernels {how}{rescaled}")
    return Step(config, step.tensors | {name: kernels}, changes)


def _fit_preprocess(
    preprocess: Preprocess | None, before: Config, config: Config
) -> tuple[Preprocess | None, list[str]]:
    """The preprocessing for the new input, its crop fraction kept; untouched where the input is the old one."""
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
        mean, std = in_turn(changed.mean, config.channels), in_turn(changed.std, config.channels)
        changed = dataclasses.replace(changed, mean=mean, std=std)
    fields = (field.name for field in dataclasses.fields(Preprocess))
    pairs = [(name, getattr(preprocess, name), getattr(changed, name)) for name in fields]
    return changed, [f"preprocess.{name}: {list(old)} -> {list(new)}" for name, old, new in pairs if old != new]


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
