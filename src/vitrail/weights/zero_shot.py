"""A head made of texts: an image tower of CLIP or SigLIP becomes an ordinary classifier of any labels."""

import dataclasses
import math
from collections.abc import Sequence

import torch

from vitrail.config import ViTConfig
from vitrail.errors import UsageError
from vitrail.formatting import pluralize
from vitrail.weights.text_vectors import TextVectors
from vitrail.weights.trained import Trained, assemble_model

MAX_SCALE = 1e4  # published models have 100 or so


def build_zero_shot_classifier(
    trained: Trained, texts: TextVectors, labels: Sequence[str], templates: Sequence[str] = ()
) -> Trained:
    """Give a model a head whose rows are the texts' vectors, over features of length 1.

    With a bias each label has a probability of its own (SigLIP), without one they share a softmax (CLIP).
    """
    config = trained.model.config
    if not isinstance(config, ViTConfig):
        raise UsageError("zero-shot classification is for the ViTs of CLIP and SigLIP, and this model is a ResNet")
    rows, width = texts.vectors.shape
    if rows != len(labels):
        raise UsageError(f"{texts.source} has {pluralize(rows, 'vector')} for {pluralize(len(labels), 'label')}")
    if width != config.num_features:
        raise UsageError(
            f"the texts have vectors of {width} numbers, and the images features of {config.num_features}:"
            " the texts belong to another model, or the image tower lacks its projection"
        )
    scale, bias = _check_scale(texts)
    state = trained.model.state_dict()
    tensors = {name: tensor.cpu() for name, tensor in state.items() if not name.startswith(("head.", "head_dist."))}
    changes = [f"{name} {tuple(state[name].shape)}: removed" for name in state if name not in tensors]
    tensors |= {"head.weight": scale * texts.vectors, "head.bias": torch.full((rows,), bias or 0.0)}
    quoted = ", ".join(repr(template) for template in templates)
    changes.append(
        f"head.weight ({rows}, {width}): vectors of texts, {texts.source}" + (f", templates {quoted}" if quoted else "")
    )
    changes.append(f"head: scale {scale:g}" + (", a softmax" if bias is None else f", bias {bias:g}, sigmoids"))
    config = dataclasses.replace(config, classes=rows, distillation_head=False, normalize_features=True)
    return dataclasses.replace(
        trained,
        model=assemble_model(config, tensors),
        labels=tuple(labels),
        origin=dataclasses.replace(trained.origin, changes=(*trained.origin.changes, *changes)),
        temperature=1.0,
        threshold=0.0,
        label_thresholds=(),
        multi_label=bias is not None,
        precision_measurements=(),
        activation_ranges=(),
    )


def _check_scale(texts: TextVectors) -> tuple[float, float | None]:
    """Scale and bias, refused where they are unknown or impossible."""
    if texts.scale is None:
        raise UsageError(
            "nothing states the factor of the logits: give --scale, exp(logit_scale) of the model, and for SigLIP"
            " --bias, its logit_bias. OpenAI's CLIP models have --scale 100"
        )
    if not 0 < texts.scale <= MAX_SCALE:
        raise UsageError(f"scale is {texts.scale:g}; it must be above 0 and at most {MAX_SCALE:g}")
    if texts.bias is not None and not math.isfinite(texts.bias):
        raise UsageError(f"bias is {texts.bias}; it must be a finite number")
    return texts.scale, texts.bias
