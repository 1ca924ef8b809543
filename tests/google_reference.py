"""What Google's networks compute, in float64 NumPy: parameters named as in their .npz files, and the logits.

An oracle: written from the facts of the formats and the paper alone, sharing no code and no library with the package.

    B batch   S image side   P patch side   C channels   N tokens   D width   H heads   K = D/H   M mlp   L classes
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, NDArray[np.float32]]
A = TypeVar("A", bound=NDArray[Any])
Names = tuple[str, str, str]  # of a block's attention, second norm and MLP
Pads = tuple[int, int]  # before and after, on one axis

GOOGLE: Names = ("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
BIG_VISION: Names = ("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
GROUPS = 32
SMALL = 0.02  # std of class token and positions: small, so that the eps of the first LayerNorm shows


# Random parameters -----------------------------------------------------------------------------------------------


def make_vit(
    rng: np.random.Generator,
    *,
    image: int = 32,
    patch: int = 8,
    width: int = 32,
    depth: int = 2,
    mlp: int = 64,
    heads: int = 4,
    classes: int = 7,
    pre_logits: bool = False,
    gap: bool = False,
) -> Params:
    """The arrays of a google-research/vision_transformer file; with `gap`, no class token and no position for one."""
    tokens = (image // patch) ** 2
    params = _dense(rng, "embedding", (patch, patch, 3), (width,)) | _dense(rng, "head", (width,), (classes,))
    params |= _encoder(rng, width=width, depth=depth, mlp=mlp, heads=heads, names=GOOGLE)
    if not gap:
        tokens += 1
        params["cls"] = _normal(rng, (1, 1, width), SMALL)
    params["Transformer/posembed_input/pos_embedding"] = _normal(rng, (1, tokens, width), SMALL)
    if pre_logits:
        params |= _dense(rng, "pre_logits", (width,), (width,))
    return params


def make_big_vision(
    rng: np.random.Generator,
    *,
    image: int = 32,
    patch: int = 8,
    width: int = 32,
    depth: int = 2,
    mlp: int = 64,
    heads: int = 4,
    classes: int = 7,
    pool: Literal["tok", "gap", "map"] = "tok",
    positions: Literal["learn", "sincos2d"] = "learn",
    scanned: bool = False,
) -> Params:
    """The arrays of a big_vision file; with `scanned`, all blocks are one, with a leading layer axis."""
    params = _dense(rng, "embedding", (patch, patch, 3), (width,)) | _dense(rng, "head", (width,), (classes,))
    params |= _encoder(rng, width=width, depth=depth, mlp=mlp, heads=heads, names=BIG_VISION)
    if positions == "learn":
        params["pos_embedding"] = _normal(rng, (1, (image // patch) ** 2, width), SMALL)
    if pool == "tok":
        params["cls"] = _normal(rng, (1, 1, width), SMALL)
    if pool == "map":
        params["MAPHead_0/probe"] = _normal(rng, (1, 1, width), 1.0)
        params |= _attention(rng, "MAPHead_0/MultiHeadDotProductAttention_0", width, heads)
        params |= _norm(rng, "MAPHead_0/LayerNorm_0", (width,))
        params |= _mlp(rng, "MAPHead_0/MlpBlock_0", width, mlp)
    return _scan(params, depth) if scanned else params


def make_hybrid(
    rng: np.random.Generator,
    *,
    blocks: tuple[int, ...] = (2, 2),
    image: int = 64,
    patch: int = 1,
    width: int = 32,
    depth: int = 2,
    mlp: int = 64,
    heads: int = 4,
    classes: int = 7,
    pre_logits: bool = False,
    stem_channels: int = 64,
    flat_norms: bool = False,
) -> Params:
    """The arrays of a ViT on a ResNet of `blocks` units a stage; without blocks the patches are cut from the root."""

    def group_norm(name: str, channels: int) -> Params:
        return _norm(rng, name, (channels,) if flat_norms else (1, 1, 1, channels))

    side, channels = _half(_half(image)), stem_channels
    resnet = _standardised(rng, "conv_root", 7, 3, channels) | group_norm("gn_root", channels)
    for stage, units in enumerate(blocks):
        side = side if stage == 0 else _half(side)
        middle = stem_channels * 2**stage
        for unit in range(units):
            name = f"block{stage + 1}/unit{unit + 1}"
            if unit == 0:
                resnet |= _standardised(rng, f"{name}/conv_proj", 1, channels, 4 * middle)
                resnet |= group_norm(f"{name}/gn_proj", 4 * middle)
            resnet |= _standardised(rng, f"{name}/conv1", 1, channels, middle) | group_norm(f"{name}/gn1", middle)
            resnet |= _standardised(rng, f"{name}/conv2", 3, middle, middle) | group_norm(f"{name}/gn2", middle)
            channels = 4 * middle
            resnet |= _standardised(rng, f"{name}/conv3", 1, middle, channels) | group_norm(f"{name}/gn3", channels)
    params = make_vit(
        rng,
        image=side,
        patch=patch,
        width=width,
        depth=depth,
        mlp=mlp,
        heads=heads,
        classes=classes,
        pre_logits=pre_logits,
    )
    return resnet | params | _dense(rng, "embedding", (patch, patch, channels), (width,))


def make_bit(
    rng: np.random.Generator,
    *,
    blocks: tuple[int, ...] = (1, 1, 1, 1),
    width_factor: float = 1,
    classes: int = 7,
) -> Params:
    """The arrays of a BiT ResNet, names beginning with `resnet/`."""

    def unit_part(name: str, normed: int, side: int, outputs: int) -> Params:
        norm = _norm(rng, f"{name}/group_norm", (normed,), names=("gamma", "beta"))
        return norm | _standardised(rng, f"{name}/standardized_conv2d", side, normed, outputs)

    channels = int(64 * width_factor)
    params = _standardised(rng, "resnet/root_block/standardized_conv2d", 7, 3, channels)
    for stage, units in enumerate(blocks):
        middle = int(64 * width_factor) * 2**stage
        for unit in range(units):
            name = f"resnet/block{stage + 1}/unit{unit + 1:02d}"
            if unit == 0:
                params |= _standardised(rng, f"{name}/a/proj/standardized_conv2d", 1, channels, 4 * middle)
            params |= unit_part(f"{name}/a", channels, 1, middle)
            params |= unit_part(f"{name}/b", middle, 3, middle)
            params |= unit_part(f"{name}/c", middle, 1, 4 * middle)
            channels = 4 * middle
    params |= _norm(rng, "resnet/group_norm", (channels,), names=("gamma", "beta"))
    return params | _dense(rng, "resnet/head/conv2d", (1, 1, channels), (classes,))


def _encoder(rng: np.random.Generator, *, width: int, depth: int, mlp: int, heads: int, names: Names) -> Params:
    """Every `Transformer/` array but the positions."""
    attention, second_norm, mlp_block = names
    params = _norm(rng, "Transformer/encoder_norm", (width,))
    for layer in range(depth):
        block = f"Transformer/encoderblock_{layer}"
        params |= _norm(rng, f"{block}/LayerNorm_0", (width,)) | _attention(rng, f"{block}/{attention}", width, heads)
        params |= _norm(rng, f"{block}/{second_norm}", (width,)) | _mlp(rng, f"{block}/{mlp_block}", width, mlp)
    return params


def _attention(rng: np.random.Generator, name: str, width: int, heads: int) -> Params:
    """Query, key and value (D, H, K) and out (H, K, D)."""
    split = (heads, width // heads)
    params = _dense(rng, f"{name}/out", split, (width,))
    for part in ("query", "key", "value"):
        params |= _dense(rng, f"{name}/{part}", (width,), split)
    return params


def _mlp(rng: np.random.Generator, name: str, width: int, mlp: int) -> Params:
    """Dense_0 (D, M) and Dense_1 (M, D)."""
    return _dense(rng, f"{name}/Dense_0", (width,), (mlp,)) | _dense(rng, f"{name}/Dense_1", (mlp,), (width,))


def _dense(rng: np.random.Generator, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Params:
    """A kernel (*inputs, *outputs) that keeps the variance of what it is fed, and a bias (*outputs)."""
    kernel = _normal(rng, inputs + outputs, float(np.prod(inputs)) ** -0.5)
    return {f"{name}/kernel": kernel, f"{name}/bias": _normal(rng, outputs, 0.1)}


def _norm(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], names: tuple[str, str] = ("scale", "bias")
) -> Params:
    """A scale around 1 and a bias around 0."""
    scale, bias = names
    return {f"{name}/{scale}": 1 + _normal(rng, shape, 0.2), f"{name}/{bias}": _normal(rng, shape, 0.2)}


def _standardised(rng: np.random.Generator, name: str, side: int, inputs: int, outputs: int) -> Params:
    """A kernel (side, side, inputs, outputs) off zero mean, its channels' std from 1e-3 to 0.2.

    The spread is what makes the eps of the standardisation show: a norm follows, and undoes a scale common to all.
    """
    std = 0.2 * 0.005 ** rng.random(outputs)
    values = rng.normal(size=(side, side, inputs, outputs)) + rng.normal(size=outputs)
    return {f"{name}/kernel": (std * values).astype(np.float32)}


def _normal(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> NDArray[np.float32]:
    """Normal values around 0."""
    return rng.normal(scale=std, size=shape).astype(np.float32)


def _scan(params: Params, depth: int) -> Params:
    """The same arrays with `encoderblock_0`, `encoderblock_1`, ... stacked into one `encoderblock`."""
    layers = [_under(params, f"Transformer/encoderblock_{layer}/") for layer in range(depth)]
    rest = {name: array for name, array in params.items() if "/encoderblock_" not in name}
    return rest | {f"Transformer/encoderblock/{name}": np.stack([x[name] for x in layers]) for name in layers[0]}


def _half(side: int) -> int:
    """The side of a map after stride 2 and SAME padding."""
    return -(-side // 2)


# Forward passes --------------------------------------------------------------------------------------------------


def vit(params: Mapping[str, NDArray[Any]], images: NDArray[Any]) -> Array:
    """Logits (B, L) of images (B, S, S, 3) in [-1, 1]; what the arrays' names say is there decides the network."""
    p, x = _float64(params), images.astype(np.float64)
    if "conv_root/kernel" in p:
        x = hybrid_stem(p, x)  # (B, S/4 or less, .., C)
    kernel = p["embedding/kernel"]
    x = conv(x, kernel, stride=kernel.shape[0]) + p["embedding/bias"]  # (B, G, G, D)
    batch, rows, columns, width = x.shape
    x = x.reshape(batch, rows * columns, width)  # (B, N, D)

    early = p.get("Transformer/posembed_input/pos_embedding")  # of the class token too, where there is one
    if early is None:
        x = x + (p["pos_embedding"] if "pos_embedding" in p else sincos2d(rows, columns, width))
    if "cls" in p:
        x = np.concatenate([np.broadcast_to(p["cls"], (batch, 1, width)), x], axis=1)  # (B, 1 + N, D)
    if early is not None:
        x = x + early

    for block in _blocks(p):
        x = encoder_block(block, x)
    x = layer_norm(_under(p, "Transformer/encoder_norm/"), x)
    if "MAPHead_0/probe" in p:
        x = map_head(_under(p, "MAPHead_0/"), x)  # (B, D)
    elif "cls" in p:
        x = x[:, 0]
    else:
        x = x.mean(axis=1)
    if "pre_logits/kernel" in p:
        x = np.tanh(dense(_under(p, "pre_logits/"), x))
    return dense(_under(p, "head/"), x)


def bit(params: Mapping[str, NDArray[Any]], images: NDArray[Any]) -> Array:
    """Logits (B, L) of images (B, S, S, 3) in [-1, 1]; names begin with `resnet/`."""
    p = _under(_float64(params), "resnet/")
    x = _bit_conv(_under(p, "root_block/"), images.astype(np.float64), stride=2, pads=(3, 3))
    x = max_pool(_pad(x, (1, 1), (1, 1), 0.0))  # no ReLU before it: the zeros of the padding can win
    for stage in range(1, 1 + _count(p, "block{}/unit01/")):
        for unit in range(1, 1 + _count(p, f"block{stage}/unit{{:02d}}/")):
            stride = 2 if unit == 1 and stage > 1 else 1
            x = bit_unit(_under(p, f"block{stage}/unit{unit:02d}/"), x, stride)
    x = _bit_norm(p, x).mean(axis=(1, 2))  # (B, C)
    return x @ p["head/conv2d/kernel"][0, 0] + p["head/conv2d/bias"]


def bit_unit(p: Mapping[str, Array], x: Array, stride: int) -> Array:
    """A pre-activation bottleneck: the projection reads what the first norm and ReLU give, the identity does not."""
    a, b, c = (_under(p, f"{part}/") for part in "abc")
    y = _bit_norm(a, x)
    shortcut = _bit_conv(_under(a, "proj/"), y, stride=stride) if "proj/standardized_conv2d/kernel" in a else x
    y = _bit_norm(b, _bit_conv(a, y))
    y = _bit_norm(c, _bit_conv(b, y, stride=stride, pads=(1, 1)))
    return shortcut + _bit_conv(c, y)


def _bit_conv(p: Mapping[str, Array], x: Array, *, stride: int = 1, pads: Pads = (0, 0)) -> Array:
    """The convolution by w / sqrt(var + 1e-10), zero-padded."""
    kernel = p["standardized_conv2d/kernel"]
    kernel = (kernel - kernel.mean(axis=(0, 1, 2))) / np.sqrt(kernel.var(axis=(0, 1, 2)) + 1e-10)
    return conv(_pad(x, pads, pads, 0.0), kernel, stride=stride)


def _bit_norm(p: Mapping[str, Array], x: Array) -> Array:
    """GroupNorm and ReLU."""
    return np.maximum(group_norm(x, p["group_norm/gamma"], p["group_norm/beta"], eps=1e-5), 0)


def hybrid_stem(p: Mapping[str, Array], x: Array) -> Array:
    """The feature map (B, S/4 or less, .., C) that a hybrid cuts its patches from."""
    x = np.maximum(_hybrid_norm(p, "gn_root", _hybrid_conv(p, "conv_root", x, stride=2)), 0)
    x = max_pool(_pad(x, _same(x.shape[1], 3, 2), _same(x.shape[2], 3, 2), -np.inf))
    for stage in range(1, 1 + _count(p, "block{}/unit1/")):
        for unit in range(1, 1 + _count(p, f"block{stage}/unit{{}}/")):
            stride = 2 if unit == 1 and stage > 1 else 1
            x = hybrid_unit(_under(p, f"block{stage}/unit{unit}/"), x, stride)
    return x


def hybrid_unit(p: Mapping[str, Array], x: Array, stride: int) -> Array:
    """A post-activation bottleneck: ReLU after the sum."""
    shortcut = x
    if "conv_proj/kernel" in p:
        shortcut = _hybrid_norm(p, "gn_proj", _hybrid_conv(p, "conv_proj", x, stride=stride))
    y = np.maximum(_hybrid_norm(p, "gn1", _hybrid_conv(p, "conv1", x)), 0)
    y = np.maximum(_hybrid_norm(p, "gn2", _hybrid_conv(p, "conv2", y, stride=stride)), 0)
    y = _hybrid_norm(p, "gn3", _hybrid_conv(p, "conv3", y))
    return np.maximum(shortcut + y, 0)


def _hybrid_conv(p: Mapping[str, Array], name: str, x: Array, *, stride: int = 1) -> Array:
    """The convolution by w / (std + 1e-5), SAME-padded."""
    kernel = p[f"{name}/kernel"]
    side = kernel.shape[0]
    kernel = (kernel - kernel.mean(axis=(0, 1, 2))) / (kernel.std(axis=(0, 1, 2)) + 1e-5)
    x = _pad(x, _same(x.shape[1], side, stride), _same(x.shape[2], side, stride), 0.0)
    return conv(x, kernel, stride=stride)


def _hybrid_norm(p: Mapping[str, Array], name: str, x: Array) -> Array:
    """GroupNorm, from a scale and bias (C,) or (1, 1, 1, C)."""
    return group_norm(x, p[f"{name}/scale"].reshape(-1), p[f"{name}/bias"].reshape(-1), eps=1e-6)


def encoder_block(p: Mapping[str, Array], x: Array) -> Array:
    """Equations 2 and 3 of the paper, (B, N, D)."""
    attention_name, second_norm, mlp_block = GOOGLE if "LayerNorm_2/scale" in p else BIG_VISION
    y = layer_norm(_under(p, "LayerNorm_0/"), x)
    x = x + attention(_under(p, f"{attention_name}/"), y, y)
    return x + mlp(_under(p, f"{mlp_block}/"), layer_norm(_under(p, f"{second_norm}/"), x))


def map_head(p: Mapping[str, Array], x: Array) -> Array:
    """What one learned query gathers from the tokens, (B, D); the MLP is residual, the attention is not."""
    probe = np.broadcast_to(p["probe"], (len(x), 1, x.shape[2]))
    y = attention(_under(p, "MultiHeadDotProductAttention_0/"), probe, x)[:, 0]
    return y + mlp(_under(p, "MlpBlock_0/"), layer_norm(_under(p, "LayerNorm_0/"), y))


def attention(p: Mapping[str, Array], reader: Array, x: Array) -> Array:
    """What `reader` (B, R, D) gathers from the tokens `x`, (B, R, D)."""
    q = np.einsum("brD,Dhk->bhrk", reader, p["query/kernel"]) + p["query/bias"][:, None]
    k = np.einsum("bnD,Dhk->bhnk", x, p["key/kernel"]) + p["key/bias"][:, None]
    v = np.einsum("bnD,Dhk->bhnk", x, p["value/kernel"]) + p["value/bias"][:, None]
    scores = np.einsum("bhrk,bhnk->bhrn", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhrn,bhnk,hkD->brD", weights, v, p["out/kernel"], optimize=True) + p["out/bias"]


def mlp(p: Mapping[str, Array], x: Array) -> Array:
    """Two layers with the tanh approximation of GELU between them."""
    x = dense(_under(p, "Dense_0/"), x)
    x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return dense(_under(p, "Dense_1/"), x)


def dense(p: Mapping[str, Array], x: Array) -> Array:
    """An affine map of the last axis."""
    return x @ p["kernel"] + p["bias"]


def layer_norm(p: Mapping[str, Array], x: Array) -> Array:
    """LayerNorm over the last axis, eps 1e-6."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def group_norm(x: Array, scale: Array, bias: Array, *, eps: float) -> Array:
    """GroupNorm of (B, H, W, C) over 32 groups of neighbouring channels."""
    grouped = x.reshape(*x.shape[:3], GROUPS, -1)
    mean, var = grouped.mean(axis=(1, 2, 4), keepdims=True), grouped.var(axis=(1, 2, 4), keepdims=True)
    return ((grouped - mean) / np.sqrt(var + eps)).reshape(x.shape) * scale + bias


def conv(x: Array, kernel: Array, *, stride: int) -> Array:
    """The convolution of (B, H, W, C) by (h, w, C, O), without padding."""
    windows = sliding_window_view(x, kernel.shape[:2], axis=(1, 2))[:, ::stride, ::stride]  # (B, H', W', C, h, w)
    return np.tensordot(windows, kernel, axes=([4, 5, 3], [0, 1, 2]))


def max_pool(x: Array) -> Array:
    """The maximum over 3x3 windows 2 apart, without padding."""
    return sliding_window_view(x, (3, 3), axis=(1, 2))[:, ::2, ::2].max(axis=(4, 5))


def sincos2d(rows: int, columns: int, width: int) -> Array:
    """Fixed positions (1, rows * columns, D): a quarter each of sin x, cos x, sin y, cos y (MoCo v3)."""
    y, x = np.mgrid[:rows, :columns].reshape(2, -1, 1)
    omega = 10000.0 ** -(np.arange(width // 4) / (width // 4 - 1))
    return np.concatenate([np.sin(x * omega), np.cos(x * omega), np.sin(y * omega), np.cos(y * omega)], axis=1)[None]


def _same(size: int, window: int, stride: int) -> Pads:
    """TensorFlow's SAME padding of one axis: the odd one goes after."""
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2


def _pad(x: Array, rows: Pads, columns: Pads, value: float) -> Array:
    """The map with a frame of `value`."""
    return np.pad(x, ((0, 0), rows, columns, (0, 0)), constant_values=value)


def _blocks(p: Mapping[str, Array]) -> list[dict[str, Array]]:
    """The encoder's blocks in order, from either layout."""
    scanned = _under(p, "Transformer/encoderblock/")
    if scanned:
        depth = len(scanned["LayerNorm_0/scale"])
        return [{name: array[layer] for name, array in scanned.items()} for layer in range(depth)]
    prefix = "Transformer/encoderblock_{}/"
    return [_under(p, prefix.format(layer)) for layer in range(_count(p, prefix, first=0))]


def _count(p: Mapping[str, Array], prefix: str, first: int = 1) -> int:
    """How many consecutive numbers, from `first`, give a prefix that some name has."""
    found = 0
    while any(name.startswith(prefix.format(first + found)) for name in p):
        found += 1
    return found


def _under(params: Mapping[str, A], prefix: str) -> dict[str, A]:
    """The arrays whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): array for name, array in params.items() if name.startswith(prefix)}


def _float64(params: Mapping[str, NDArray[Any]]) -> dict[str, Array]:
    """The same arrays in float64."""
    return {name: array.astype(np.float64) for name, array in params.items()}
