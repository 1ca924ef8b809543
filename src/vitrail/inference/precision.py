"""A model as functions of its inputs, in a precision.

B images   C channels   S image side   L classes   D features
"""

import contextlib
import copy
import importlib.util
import math
from collections.abc import Callable
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from vitrail.config import ModelConfig, Precision, PreprocessConfig, ViTConfig
from vitrail.config.features import AnyFeatureKind, check_feature_kind
from vitrail.data.transforms import normalize
from vitrail.errors import UsageError
from vitrail.model import features as model_features
from vitrail.model.cost import count_multiply_adds
from vitrail.model.quantized import convert_precision, explain_unsupported, get_input_dtype, has_uint8_input
from vitrail.model.vit import ViT
from vitrail.runtime.cpu_threads import get_thread_pool, split_over_threads
from vitrail.weights.trained import Trained, logits_to_probabilities

InferenceFunction = Callable[[Tensor], Tensor]
"""Inputs, uint8 (B, C, S, S), on the model's device -> a row for each, there too."""

_MIN_CHUNK_SIZE = 8  # images a core: fewer read the weights too often, more overflow the cache (measured, S and B)
_MIN_COMPILED_MULTIPLY_ADDS = 2 * 10**16  # of all images: an H200 takes 95 s, compiled 85 s, and compiling takes 9 s
_CACHE_BYTES = 3 * 2**20  # of a block's widest activations: small models may compute more images at a time


class InferenceFunctions(NamedTuple):
    """The outputs that a model can compute."""

    probabilities: InferenceFunction
    """(B, L); independent of each other for a multi-label model."""
    features: InferenceFunction
    """By default the head's input, float32 (B, D)."""


def build_inference_functions(
    trained: Trained,
    precision: Precision = "float32",
    *,
    compiled_batch: int = 0,
    features: AnyFeatureKind = "default",
    normalize_features: bool = False,
) -> InferenceFunctions:
    """Build a model's functions in a precision. OpenVINO computes probabilities only, so its features are float32.

    With `compiled_batch` the blocks are compiled for batches of that size; others are computed without.
    """
    if reason := _explain_unavailable(trained, precision):
        raise UsageError(f"{precision} is not available: {reason}. --precision float32 always is")
    preprocess = trained.preprocess
    assert preprocess is not None
    check_feature_kind(trained.model.config, features)
    model = convert_precision(trained.model, "float32" if precision == "openvino-int8" else precision, preprocess)

    if compiled_batch and isinstance(model, ViT):
        model = copy.deepcopy(model) if model is trained.model else model
        model.compile_blocks()

    def choose_stance(inputs: Tensor) -> contextlib.AbstractContextManager[object]:
        is_eager = compiled_batch and len(inputs) != compiled_batch  # another size is not worth compiling again
        return torch.compiler.set_stance("force_eager") if is_eager else contextlib.nullcontext()

    @torch.inference_mode()
    def compute_probabilities(inputs: Tensor) -> Tensor:
        with choose_stance(inputs):
            logits = model(prepare_inputs(model, inputs, preprocess)).float()
        return logits_to_probabilities(logits, temperature=trained.temperature, multi_label=trained.multi_label)

    @torch.inference_mode()
    def compute_features(inputs: Tensor) -> Tensor:
        with choose_stance(inputs):
            images = prepare_inputs(model, inputs, preprocess)
            values = model_features.compute_features(model, images, features, normalize=normalize_features)
        return values.float()

    probabilities: InferenceFunction = compute_probabilities
    if precision == "openvino-int8":
        from vitrail.export import openvino_int8  # which needs openvino, an optional package

        probabilities = openvino_int8.build_probability_function(trained, torch.get_num_threads())
    chunk_size = _choose_chunk_size(model.config)
    get_thread_pool()  # created here, where nothing computes yet
    functions = (split_over_threads(function, chunk_size) for function in (probabilities, compute_features))
    return InferenceFunctions(*functions)


def prepare_inputs(model: nn.Module, pixels: Tensor, preprocess: PreprocessConfig) -> Tensor:
    """uint8 (B, C, S, S) -> what a model in any precision takes."""
    return pixels if has_uint8_input(model) else normalize(pixels, preprocess).to(get_input_dtype(model))


def is_worth_compiling(config: ModelConfig, images: int) -> bool:
    """Whether so many images take a GPU longer than it takes to compile the model."""
    return isinstance(config, ViTConfig) and images * count_multiply_adds(config) >= _MIN_COMPILED_MULTIPLY_ADDS


def list_available_precisions(trained: Trained) -> tuple[Precision, ...]:
    """The precisions in which this machine can compute a model."""
    return tuple(precision for precision in get_args(Precision) if _explain_unavailable(trained, precision) is None)


def _explain_unavailable(trained: Trained, precision: Precision) -> str | None:
    """Why this machine cannot compute a model in a precision, or None."""
    if precision != "openvino-int8":
        return explain_unsupported(trained.model, precision)
    if not isinstance(trained.model, ViT) or not trained.model.config.classes:
        return "it is for ViTs and hybrids with a head"
    if next(trained.model.parameters()).device.type != "cpu":
        return "it is for the CPU (--device cpu)"
    if importlib.util.find_spec("openvino") is None:
        return "openvino is not installed: pip install 'vitrail[openvino]'"
    if not trained.activation_ranges:
        return "its scales were never measured: vitrail convert MODEL OUT.safetensors --measure DATA"
    return None


def _choose_chunk_size(config: ModelConfig) -> int:
    """How many images a core computes at a time."""
    if not isinstance(config, ViTConfig):
        return _MIN_CHUNK_SIZE
    tokens = config.num_prefix_tokens + math.prod(config.grid)
    return max(_MIN_CHUNK_SIZE, _CACHE_BYTES // (4 * tokens * config.mlp))
