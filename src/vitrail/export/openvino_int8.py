"""A model in OpenVINO, products of patches and blocks in int8: a scale for each output, and one for all inputs.

OpenVINO can find a scale for each token as it runs, but then it is no faster than torch. With ranges that are known
beforehand the operator before a product leaves its result in 8 bits. To translate a model takes ten seconds, so what
comes of it is kept in the user's cache.
"""

import contextlib
import dataclasses
import hashlib
import json
import queue
import shutil
from collections.abc import Callable
from pathlib import Path

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
from vitrail.weights.trained import Trained, assemble_model

_LEVELS = 256
_MAX_CACHED_GRAPHS = 8  # that the cache holds
_CACHE_VERSION = 4  # of what is kept: whoever changes the graph counts on

ActivationRange = tuple[float, float]


def build_probability_function(trained: Trained, threads: int) -> Callable[[Tensor], Tensor]:
    """Views, uint8 (B, C, S, S) -> (B, L), by the model's ranges; as many calls at once as threads, each by one."""
    settings: dict[str, str | int] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": threads,
        "ENABLE_CPU_PINNING": False,  # two processes would be tied to the same cores
    }
    compiled = _compile_graph(trained, settings)
    _ = openvino.Tensor(np.zeros(1)).data  # of two threads that are the first to ask for one, each waits for the other
    free: queue.SimpleQueue[openvino.InferRequest] = queue.SimpleQueue()
    for _ in range(threads):
        free.put(compiled.create_infer_request())

    def infer_probabilities(views: Tensor) -> Tensor:
        request = free.get()
        try:
            request.infer([views.numpy()])
            return torch.from_numpy(request.get_tensor("probabilities").data.copy())
        finally:
            free.put(request)

    return infer_probabilities


def _compile_graph(trained: Trained, settings: dict[str, str | int]) -> openvino.CompiledModel:
    """The graph ready to run, from the cache where it is there and whole."""
    core, folder = openvino.Core(), _get_cache_folder(trained)
    if (folder / "model.xml").exists():
        with contextlib.suppress(RuntimeError):  # it is damaged, and made anew
            return core.compile_model(folder / "model.xml", "CPU", settings)
    model = build_quantized_graph(trained)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, not the answers
        _cache_graph(model, folder)
    return core.compile_model(model, "CPU", settings)


def _get_cache_folder(trained: Trained) -> Path:
    """Where a graph is kept: by all that it is made of."""
    said = [_CACHE_VERSION, openvino.__version__, torch.__version__, str(trained.model.config), str(trained.preprocess)]
    key = hashlib.sha256(
        json.dumps([*said, trained.temperature, trained.multi_label, trained.activation_ranges]).encode()
    )
    for name, tensor in sorted(trained.model.state_dict().items()):
        key.update(name.encode())
        key.update(tensor.contiguous().numpy().data)
    return files.get_cache_home() / "openvino" / key.hexdigest()[:32]


def _cache_graph(model: openvino.Model, folder: Path) -> None:
    """Write a graph to the cache, and remove the oldest there."""
    files.make_folder(folder.parent)
    with files.write_atomically(folder, overwrite=True) as fresh:
        fresh.mkdir()
        openvino.save_model(model, fresh / "model.xml", compress_to_fp16=False)
    for old in sorted(folder.parent.iterdir(), key=lambda each: each.stat().st_mtime)[:-_MAX_CACHED_GRAPHS]:
        shutil.rmtree(old, ignore_errors=True)


def build_quantized_graph(trained: Trained) -> openvino.Model:
    """The graph of a model, its patches', layers' and queries' products with both sides rounded to 8 bits."""
    trained = fold_normalization(trained)
    model = build_openvino_model(trained)
    _decompose_attention(model, trained)
    for node, (least, greatest) in _find_matmuls(model, trained):
        step = max(greatest - least, 1e-30) / (_LEVELS - 1)
        zero = round(min(max(-least / step, 0), _LEVELS - 1))  # 0 is a level, so that it stays 0
        zero -= zero == _LEVELS // 2  # in the middle it would be signed bytes, whose products are slower
        _insert_fake_quantize(node.input(0), step, zero)
        weight = node.input_value(1).get_node().get_data()  # (O, D), or (D, O)
        along = 1 if node.get_attributes()["transpose_b"] else 0
        scale = np.maximum(np.abs(weight).max(axis=along, keepdims=True) / 127, np.finfo(np.float32).tiny)
        whole = operators.convert(operators.constant(np.rint(weight / scale).astype(np.int8)), "f32")
        node.input(1).replace_source_output(operators.multiply(whole, scale).output(0))
    return model


def _insert_fake_quantize(node_input: openvino.Input, scale: float, zero_point: int) -> None:
    """Let a node read levels, of which one is 0."""
    ends = [np.float32(-zero_point * scale), np.float32((_LEVELS - 1 - zero_point) * scale)]
    levels = operators.fake_quantize(node_input.get_source_output(), *ends, *ends, _LEVELS)
    node_input.replace_source_output(levels.output(0))


def fold_normalization(trained: Trained) -> Trained:
    """The same model for pixels from 0 to 1, if it cuts images into patches: its first weights are those for bytes."""
    model, preprocess = trained.model, trained.preprocess
    assert isinstance(model, ViT)
    assert preprocess is not None
    if model.config.stem is not None:
        return trained
    whole, scale, bias = quantized.quantize_patch_embed(model.patch_embed.proj, preprocess)
    first = {"weight": whole * scale.reshape(-1, 1, 1, 1), "bias": bias}
    weights = model.state_dict() | {f"patch_embed.proj.{name}": tensor for name, tensor in first.items()}
    channels = model.config.channels
    plain = dataclasses.replace(preprocess, mean=(0.0,) * channels, std=(1.0,) * channels)
    return dataclasses.replace(trained, model=assemble_model(model.config, weights), preprocess=plain)


def _decompose_attention(model: openvino.Model, trained: Trained) -> None:
    """Attention as two products and a softmax, queries and keys rounded to signed bytes, as two unknowns have to be.

    OpenVINO puts it together again, and then leaves keys as they lie. It rounds in the layer before if told to there.
    """
    nodes = [node for node in model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    config = trained.model.config
    assert isinstance(config, ViTConfig)
    scale = (config.width // config.heads) ** -0.5  # which is in the queries' weights
    for node, (_, queries, keys, *_) in zip(
        nodes, _group_ranges_by_block(trained), strict=bool(nodes)
    ):  # relative ones have none
        for number, factor, ends in ((0, scale, queries), (1, 1.0, keys)):
            place = node.input(number)
            while (before := place.get_source_output().get_node()).get_type_name() in ("Reshape", "Transpose"):
                place = before.input(0)
            _insert_fake_quantize(place, max(factor * max(map(abs, ends)), 1e-30) / (_LEVELS // 2 - 1), _LEVELS // 2)
        weights = operators.softmax(operators.matmul(node.input_value(0), node.input_value(1), False, True), -1)
        found = operators.matmul(weights, node.input_value(2), False, False)
        for target in node.output(0).get_target_inputs():
            target.replace_source_output(found.output(0))


def _find_matmuls(model: openvino.Model, trained: Trained) -> list[tuple[openvino.Node, ActivationRange]]:
    """The products with weights, of patches that are cut from images and of blocks, with the ranges of their inputs."""
    nodes = [node for node in model.get_ordered_ops() if node.get_type_name() == "MatMul"]
    nodes = [node for node in nodes if _is_weight_matrix(node.input_value(1))]
    assert isinstance(trained.model, ViT)
    ranges: list[ActivationRange | None] = [None if trained.model.config.stem else (0.0, 1.0)]
    blocks = list(trained.model.blocks)
    for block, (inputs, _, _, *others) in zip(blocks, _group_ranges_by_block(trained), strict=True):
        last = block is blocks[-1] and trained.model.num_head_tokens is not None
        ranges += [inputs] * (3 if can_split_qkv(block.attn) else 2 if last else 1)  # which then has one for queries
        ranges += others
    pairs = zip(nodes[: len(ranges)], ranges, strict=True)
    return [(node, ends) for node, ends in pairs if ends is not None]


def _group_ranges_by_block(trained: Trained) -> list[list[ActivationRange]]:
    """Six ranges of each block."""
    ends = list(zip(trained.activation_ranges[::2], trained.activation_ranges[1::2], strict=True))
    return [ends[place : place + 6] for place in range(0, len(ends), 6)]


def _is_weight_matrix(value: openvino.Output) -> bool:
    """Whether it is a layer's weights: relative positions are constants too, but one for each head."""
    return value.get_node().get_type_name() == "Constant" and len(value.get_partial_shape()) == 2
