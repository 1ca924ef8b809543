"""Models in OpenVINO with int8 products of patches and blocks: a scale for each output, and one for all inputs.

OpenVINO can find a scale for each token as it runs, but then it is no faster than torch. With ranges known beforehand
the operator before a product writes its result in 8 bits. Translating a model takes ten seconds, so the user's cache
keeps the result.
"""

import contextlib
import dataclasses
import hashlib
import json
import queue
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openvino
import torch
from openvino import opset13 as operators
from torch import Tensor

from vitrail import files
from vitrail.config import ViTConfig
from vitrail.export.openvino import build_openvino_model, can_split_qkv
from vitrail.model import quantized
from vitrail.model.vit import ViT
from vitrail.weights.tensor_files import digest_tensors
from vitrail.weights.trained import Trained, assemble_model

_LEVELS = 256
_MAX_CACHED_GRAPHS = 8
_CACHE_VERSION = 4  # whoever changes the graph raises it

ActivationRange = tuple[float, float]


class BlockRanges(NamedTuple):
    """Least and greatest values of what one block multiplies, in the order of `Trained.activation_ranges`."""

    qkv_input: ActivationRange
    queries: ActivationRange
    keys: ActivationRange
    proj_input: ActivationRange
    fc1_input: ActivationRange
    fc2_input: ActivationRange


def build_probability_function(trained: Trained, threads: int) -> Callable[[Tensor], Tensor]:
    """Build inputs, uint8 (B, C, S, S) -> probabilities (B, L); `threads` calls may run at once, one thread each."""
    settings: dict[str, str | int] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": threads,
        "ENABLE_CPU_PINNING": False,  # else two processes share the same cores
    }
    compiled = _compile_graph(trained, settings)
    _ = openvino.Tensor(np.zeros(1)).data  # two threads that first do this at once deadlock
    idle_requests: queue.SimpleQueue[openvino.InferRequest] = queue.SimpleQueue()
    for _ in range(threads):
        idle_requests.put(compiled.create_infer_request())

    def infer_probabilities(inputs: Tensor) -> Tensor:
        request = idle_requests.get()
        try:
            request.infer([inputs.numpy()])
            return torch.from_numpy(request.get_tensor("probabilities").data.copy())
        finally:
            idle_requests.put(request)

    return infer_probabilities


def _compile_graph(trained: Trained, settings: dict[str, str | int]) -> openvino.CompiledModel:
    """Compile the graph, from the cache where it is there and whole."""
    core, folder = openvino.Core(), _get_cache_folder(trained)
    if (folder / "model.xml").exists():
        with contextlib.suppress(RuntimeError):  # it is damaged: build it again
            return core.compile_model(folder / "model.xml", "CPU", settings)
    model = build_quantized_graph(trained)
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        _cache_graph(model, folder)
    return core.compile_model(model, "CPU", settings)


def _get_cache_folder(trained: Trained) -> Path:
    """The cache's folder of a graph, named by a digest of everything that it depends on."""
    versions = [_CACHE_VERSION, openvino.__version__, torch.__version__]
    settings = [str(trained.model.config), str(trained.preprocess), trained.temperature, trained.multi_label]
    key = json.dumps([*versions, *settings, trained.activation_ranges, digest_tensors(trained.model.state_dict())])
    return files.get_cache_home() / "openvino" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _cache_graph(model: openvino.Model, folder: Path) -> None:
    """Write a graph to the cache, and remove the oldest ones."""
    files.make_folder(folder.parent)
    with files.write_atomically(folder, overwrite=True) as fresh:
        fresh.mkdir()
        openvino.save_model(model, fresh / "model.xml", compress_to_fp16=False)
    newest_last = sorted(folder.parent.iterdir(), key=lambda entry: entry.stat().st_mtime)
    for old in newest_last[:-_MAX_CACHED_GRAPHS]:
        shutil.rmtree(old, ignore_errors=True)


def build_quantized_graph(trained: Trained) -> openvino.Model:
    """Build the graph of a model with both sides of its patch, layer and query products rounded to 8 bits."""
    trained = fold_normalization(trained)
    model = build_openvino_model(trained)
    _decompose_attention(model, trained)
    for node, (least, greatest) in _find_matmuls(model, trained):
        step = max(greatest - least, 1e-30) / (_LEVELS - 1)
        zero = round(min(max(-least / step, 0), _LEVELS - 1))  # one level is 0, so that 0 stays 0
        zero -= zero == _LEVELS // 2  # in the middle they would be signed bytes, whose products are slower
        _insert_fake_quantize(node.input(0), step, zero)
        weight = node.input_value(1).get_node().get_data()  # (O, D), or (D, O)
        axis = 1 if node.get_attributes()["transpose_b"] else 0
        scale = np.maximum(np.abs(weight).max(axis=axis, keepdims=True) / 127, np.finfo(np.float32).tiny)
        int8_weight = operators.convert(operators.constant(np.rint(weight / scale).astype(np.int8)), "f32")
        node.input(1).replace_source_output(operators.multiply(int8_weight, scale).output(0))
    return model


def _insert_fake_quantize(node_input: openvino.Input, scale: float, zero_point: int) -> None:
    """Round what a node reads to 256 levels, of which one is 0."""
    ends = [np.float32(-zero_point * scale), np.float32((_LEVELS - 1 - zero_point) * scale)]
    levels = operators.fake_quantize(node_input.get_source_output(), *ends, *ends, _LEVELS)
    node_input.replace_source_output(levels.output(0))


def fold_normalization(trained: Trained) -> Trained:
    """Fold mean and std into the int8 patch weights, so that pixels from 0 to 1 are read; a hybrid stays as it is."""
    model, preprocess = trained.model, trained.preprocess
    assert isinstance(model, ViT)
    assert preprocess is not None
    if model.config.stem is not None:
        return trained
    int8_weight, scale, bias = quantized.quantize_patch_embed(model.patch_embed.proj, preprocess)
    folded = {"patch_embed.proj.weight": int8_weight * scale.reshape(-1, 1, 1, 1), "patch_embed.proj.bias": bias}
    channels = model.config.channels
    identity = dataclasses.replace(preprocess, mean=(0.0,) * channels, std=(1.0,) * channels)
    return dataclasses.replace(
        trained, model=assemble_model(model.config, model.state_dict() | folded), preprocess=identity
    )


def _decompose_attention(model: openvino.Model, trained: Trained) -> None:
    """Write attention as two products and a softmax, with queries and keys rounded to signed bytes.

    Products of two activations need signed bytes. OpenVINO fuses the parts again, and then does not move the keys. The
    rounding stands behind the layer before, which then writes 8 bits.
    """
    nodes = [node for node in model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    config = trained.model.config
    assert isinstance(config, ViTConfig)
    scale = (config.width // config.heads) ** -0.5  # which is in the queries' weights
    # Attention with relative positions has no such nodes.
    for node, block in zip(nodes, _group_ranges_by_block(trained), strict=bool(nodes)):
        for index, factor, ends in ((0, scale, block.queries), (1, 1.0, block.keys)):
            node_input = node.input(index)
            while (before := node_input.get_source_output().get_node()).get_type_name() in ("Reshape", "Transpose"):
                node_input = before.input(0)
            step = max(factor * max(map(abs, ends)), 1e-30) / (_LEVELS // 2 - 1)
            _insert_fake_quantize(node_input, step, _LEVELS // 2)
        weights = operators.softmax(operators.matmul(node.input_value(0), node.input_value(1), False, True), -1)
        values = operators.matmul(weights, node.input_value(2), False, False)
        for target in node.output(0).get_target_inputs():
            target.replace_source_output(values.output(0))


def _find_matmuls(model: openvino.Model, trained: Trained) -> list[tuple[openvino.Node, ActivationRange]]:
    """Find the products with weights, of image patches and of blocks, with the ranges of their inputs."""
    nodes = [
        node
        for node in model.get_ordered_ops()
        if node.get_type_name() == "MatMul"
        and node.input_value(1).get_node().get_type_name() == "Constant"
        and len(node.input_value(1).get_partial_shape()) == 2  # relative positions are constants too, but one a head
    ]
    assert isinstance(trained.model, ViT)
    ranges: list[ActivationRange | None] = [None if trained.model.config.stem else (0.0, 1.0)]
    blocks = list(trained.model.blocks)
    for block, block_ranges in zip(blocks, _group_ranges_by_block(trained), strict=True):
        is_last = block is blocks[-1] and trained.model.num_head_tokens is not None  # with a product for its queries
        ranges += [block_ranges.qkv_input] * (3 if can_split_qkv(block.attn) else 2 if is_last else 1)
        ranges += [block_ranges.proj_input, block_ranges.fc1_input, block_ranges.fc2_input]
    return [(node, ends) for node, ends in zip(nodes[: len(ranges)], ranges, strict=True) if ends is not None]


def _group_ranges_by_block(trained: Trained) -> list[BlockRanges]:
    """Group a model's activation ranges by block."""
    ranges = list(zip(trained.activation_ranges[::2], trained.activation_ranges[1::2], strict=True))
    return [BlockRanges(*ranges[start : start + 6]) for start in range(0, len(ranges), 6)]
