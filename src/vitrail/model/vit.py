"""The Vision Transformer (Dosovitskiy et al., 2021): the whole forward pass, in this one file.

    B batch   C channels   S image side   P patch side   G = (rows, columns) of patches
    N tokens  D width      H heads        K = D/H        L classes   T leading tokens the head reads

Attribute names equal timm's, so its weights load without renaming; weights/ maps the other formats.
Dropout and stochastic depth draw from torch's default generators: the trainer seeds them before each step.

To observe the pass, register forward hooks on its modules; nothing else should repeat it:

    patch_embed              embedded patches (B, n, D)      blocks.i           a block's input and output (B, N, D)
    blocks.i.attn, .mlp      branches before LayerScale      blocks.i.ls1, ls2  what the residual stream adds
    blocks.i.attn.softmax    attention weights (B, H, T, N)  norm, head         encoder output, logits

`attn.softmax` runs where `attn.fused` is False; `attn_pool.softmax` always does. `encode` computes all tokens in every
block; `forward` computes in the last block only those that the head reads.
"""

from collections.abc import Callable, Iterator
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.config import BiTConfig, ModelConfig, ViTConfig
from vitrail.config.model import compute_grid
from vitrail.errors import UsageError
from vitrail.model.kernels.attention import attend
from vitrail.model.kernels.gelu import apply_linear_gelu
from vitrail.model.positions import (
    Grid,
    build_rotary,
    build_sincos_positions,
    compute_offset_logits,
    compute_relative_bias,
    count_biases,
    resample_positions,
    rotate,
    rotate_packed,
)
from vitrail.model.resnet import Backbone, BiT, check_images


class PatchEmbed(nn.Module):
    """Equation 1's E: a linear map of each flattened patch."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = None if config.stem is None else Backbone(config.stem, config.channels)
        channels = config.channels if config.stem is None else config.stem.out_channels
        self.proj = nn.Conv2d(channels, config.width, config.patch, config.patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(self.extract_patches(images))  # (B, N, D)

    def extract_patches(self, images: Tensor) -> Tensor:
        """(B, N, C P P): patches of the image, or of a hybrid's feature map."""
        images = crop_remainder(images, self.config)
        return patchify(images if self.backbone is None else self.backbone(images), self.proj.kernel_size[0])

    def project(self, patches: Tensor) -> Tensor:
        """(B, N, C P P) -> (B, N, D)."""
        # One matrix product: a convolution computes the same sums, but first copies its input to another memory layout.
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


def crop_remainder(images: Tensor, config: ViTConfig) -> Tensor:
    """(B, C, S, S) without the pixels at the bottom and right that fill no patch, where the model drops them."""
    rows, columns = config.compute_grid((images.shape[2], images.shape[3]))
    return images[:, :, : rows * config.stride, : columns * config.stride]


def patchify(images: Tensor, patch: int) -> Tensor:
    """(B, C, S, S) -> (B, N, C P P), patches in raster order, each flattened as the convolution's kernel is."""
    batch, channels, height, width = images.shape
    rows, columns = compute_grid((height, width), patch)
    patches = images.reshape(batch, channels, rows, patch, columns, patch)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * patch * patch)


class Attention(nn.Module):
    """Multi-head self-attention, fused; `compute_weights` gives the attention weights beside it."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.qkv_bias)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps) if config.attention_norm else nn.Identity()
        self.proj = nn.Linear(config.width, config.width)
        self.proj_drop = nn.Dropout(0.0)
        self.softmax = nn.Softmax(dim=-1)
        self.fused = True  # by a kernel that never materializes the weights; a hook on `softmax` needs False
        if config.positions == "relative":  # one embedding for each raster offset between two patches
            self.offsets = nn.Parameter(torch.empty(2 * config.grid[0] * config.grid[1] - 1, config.width))
        elif config.positions == "relative-bias":
            self.relative_position_bias_table = nn.Parameter(torch.empty(count_biases(config.grid), config.heads))

    def forward(self, x: Tensor, grid: Grid, queries: int | None = None, rotary: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D), or only the first `queries` tokens."""
        if self.fused and queries is None and not self.config.has_attention_bias:
            out = attend(rotate_packed(self.qkv(x), rotary, self.config), self.config.heads)
        else:  # a single query gains nothing from fused kernels, and cuDNN's backward gives NaN for it
            q, k, v = self.project_qkv(x, queries, rotary)
            out = (self.softmax(self.compute_logits(q, k, grid)) @ v).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(self.norm(out)))

    def compute_weights(self, x: Tensor, grid: Grid, rotary: Tensor | None = None) -> Tensor:
        """The attention weights (B, H, N, N), which the fused kernel above never materializes."""
        q, k, _ = self.project_qkv(x, rotary=rotary)
        return self.softmax(self.compute_logits(q, k, grid))

    def project_qkv(
        self, x: Tensor, queries: int | None = None, rotary: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, queries or N, K), keys and values (B, H, N, K); queries and keys are rotated."""
        if queries is None or not isinstance(self.qkv, nn.Linear):  # a quantized layer cannot be split
            q, k, v = self.qkv(x).unflatten(-1, (3, self.config.heads, -1)).permute(2, 0, 3, 1, 4)
            q = q[:, :, :queries]
        else:
            width, bias = self.config.width, self.qkv.bias
            q = F.linear(x[:, :queries], self.qkv.weight[:width], None if bias is None else bias[:width])
            kv = F.linear(x, self.qkv.weight[width:], None if bias is None else bias[width:])
            k, v = kv.unflatten(-1, (2, self.config.heads, -1)).permute(2, 0, 3, 1, 4)
            q = q.unflatten(-1, (self.config.heads, -1)).transpose(1, 2)
        return rotate(q, rotary, self.config), rotate(k, rotary, self.config), v

    def compute_logits(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """(B, H, N, N) before the softmax, relative positions included."""
        logits = q @ k.mT
        if self.config.positions == "relative" and q.shape[-2] == k.shape[-2]:
            logits = logits + compute_offset_logits(q, self.offsets, grid, self.config)
        logits = logits * q.shape[-1] ** -0.5
        if self.config.positions == "relative-bias":
            bias = compute_relative_bias(self.relative_position_bias_table, grid, self.config)
            logits = logits + bias[:, : q.shape[-2]].to(logits.dtype)
        return logits


class QuickGELU(nn.Module):
    """GELU as OpenAI's CLIP approximates it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: ViTConfig, hidden: int = 0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, hidden or config.mlp)
        gelu = nn.GELU(approximate="tanh" if config.gelu == "tanh" else "none")
        self.act = QuickGELU() if config.gelu == "quick" else gelu
        self.drop = nn.Dropout(0.0)
        self.fc2 = nn.Linear(hidden or config.mlp, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(apply_linear_gelu(x, self.fc1, self.act))))


class GatedMlp(nn.Module):
    """SwiGLU (Shazeer 2020): SiLU of a linear layer, the gate, times a second one, before the last."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, 2 * config.mlp)  # the gate's rows first
        self.act = nn.SiLU()
        self.drop = nn.Dropout(0.0)
        self.norm = nn.LayerNorm(config.mlp, eps=config.norm_eps) if config.mlp_norm else nn.Identity()
        self.fc2 = nn.Linear(config.mlp, config.width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.drop(self.fc2(self.norm(self.drop(self.act(gate) * value))))


class LayerScale(nn.Module):
    """A learned factor for each channel of a residual branch (Touvron et al. 2021b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """Equations 2 and 3: attention and MLP, each after a LayerNorm and added to the residual stream."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.drop_path = 0.0
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ls1 = LayerScale(config.width) if config.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = GatedMlp(config) if config.gated_mlp else Mlp(config)
        self.ls2 = LayerScale(config.width) if config.layer_scale else nn.Identity()

    def forward(self, x: Tensor, grid: Grid, queries: int | None = None, rotary: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D), or only the first `queries` tokens, which attend to all N."""
        rate = self.drop_path if self.training else 0.0
        x = add_residual(x, lambda kept: self.ls1(self.attn(self.norm1(kept), grid, queries, rotary)), rate, queries)
        return add_residual(x, lambda kept: self.ls2(self.mlp(self.norm2(kept))), rate)


def add_residual(x: Tensor, branch: Callable[[Tensor], Tensor], rate: float, queries: int | None = None) -> Tensor:
    """x + branch(x), where each sample's branch is skipped, uncomputed, with probability `rate`."""
    trunk = x if queries is None else x[:, :queries]
    if rate == 0.0:
        return trunk + branch(x)
    # floor(expected + uniform) survivors: every sample survives with probability 1 - rate at any batch size, and
    # a batch has one of two sizes, so a compiled block is compiled twice at most.
    survivors = int(len(x) * (1.0 - rate) + torch.rand(()).item())
    kept = torch.randperm(len(x), device=x.device)[:survivors]
    return trunk.index_add(0, kept, (branch(x[kept]) / (1.0 - rate)).to(trunk.dtype))


class AttentionPool(nn.Module):
    """MAP (Zhai et al. 2022): one learned query attends to all patches, then a residual MLP."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.pool_heads or config.heads
        self.latent = nn.Parameter(torch.empty(1, 1, config.width))
        self.q = nn.Linear(config.width, config.width)
        self.kv = nn.Linear(config.width, 2 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.softmax = nn.Softmax(dim=-1)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config, config.pool_mlp)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (1, H, 1, K)
        k, v = self.kv(x).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, N, K)
        out = self.softmax(q @ k.mT * q.shape[-1] ** -0.5) @ v  # (B, H, 1, K)
        pooled = self.proj(out.transpose(1, 2).flatten(2))[:, 0]  # (B, D)
        return pooled + self.mlp(self.norm(pooled))


class HiddenHead(nn.Module):
    """The pre-training head's hidden layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


class ViT(nn.Module):
    """A Vision Transformer. Its parameters are not initialized: `initialize_weights` or a file sets them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patch_embed = PatchEmbed(config)
        for name, count in self.list_prefix_tokens():
            setattr(self, name, nn.Parameter(torch.empty(1, count, width)))
        tables = config.depth if config.positions_at == "every-layer" else 1
        rows, columns = config.grid
        if config.positions == "learned-1d":
            tokens = config.num_positioned_prefix_tokens + rows * columns
            self.pos_embed = nn.Parameter(torch.empty(tables, tokens, width))
        elif config.positions == "learned-2d":
            self.pos_embed_y = nn.Parameter(torch.empty(tables, rows, width // 2))
            self.pos_embed_x = nn.Parameter(torch.empty(tables, columns, width // 2))
        self.pos_drop = nn.Dropout(0.0)
        self.recompute = False  # each block in the backward pass, instead of keeping its activations
        self.is_compiled = False
        self.norm_pre = nn.LayerNorm(width, eps=config.norm_eps) if config.norm_pre else nn.Identity()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.norm = norm if config.pool != "mean-norm" else nn.Identity()
        self.fc_norm = norm if config.pool == "mean-norm" else nn.Identity()
        if config.pool == "map":
            self.attn_pool = AttentionPool(config)
        self.pre_logits = HiddenHead(width) if config.hidden_head else nn.Identity()
        self.projection = nn.Linear(width, config.projection) if config.projection else nn.Identity()
        self.head = nn.Linear(config.num_features, config.classes) if config.classes else nn.Identity()
        if config.distillation_head:
            self.head_dist = nn.Linear(width, config.classes)

    def set_regularization(self, *, dropout: float = 0.0, stochastic_depth: float = 0.0) -> "ViT":
        """Set dropout where the paper has it, and stochastic depth, whose rate grows linearly with depth."""
        for name, rate in (("dropout", dropout), ("stochastic_depth", stochastic_depth)):
            if not 0.0 <= rate < 1.0:
                raise UsageError(f"{name} is {rate}; it must be at least 0 and below 1")
        self.pos_drop.p = dropout
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            block.attn.proj_drop.p = block.mlp.drop.p = dropout
            block.drop_path = stochastic_depth * i / max(self.config.depth - 1, 1)
        return self

    def compile_blocks(self) -> None:
        """Compile the blocks with torch, in place: equal blocks share one compilation, and copies are not compiled."""
        self.is_compiled = True
        for block in self.blocks:
            assert isinstance(block, Block)
            for part in (block.attn, block.mlp) if block.drop_path else (block,):
                part.compile()

    def list_prefix_tokens(self) -> list[tuple[str, int]]:
        """Name and count of the learned tokens before the patches, in order."""
        config = self.config
        counts = (config.class_token, config.distillation_token, config.registers)
        names = ("cls_token", "dist_token", "reg_token")
        return [(name, int(count)) for name, count in zip(names, counts, strict=True) if count]

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, S, S) -> logits (B, L), or the features if the model has no head."""
        tokens = self.encode(images, self.num_head_tokens)
        logits = self.head(self.pool(tokens))
        return (logits + self.head_dist(tokens[:, 1])) / 2 if self.config.distillation_head else logits

    def compute_features(self, images: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, D): the features that the head reads."""
        return self.pool(self.encode(images, self.num_head_tokens))

    @property
    def num_head_tokens(self) -> int | None:
        """How many leading tokens the last block computes for the head; None for all of them.

        Relative positions need all tokens: their offsets are between patches, so a last block without patch queries
        would leave its own without a gradient, and that stops distributed training.
        """
        if self.config.pool != "class" or self.config.positions == "relative":
            return None
        return 1 + self.config.distillation_token

    def encode(self, images: Tensor, queries: int | None = None) -> Tensor:
        """(B, C, S, S) -> (B, N, D): the encoder's output, prefix tokens first.

        With `queries` the last block computes only so many leading tokens: (B, T, D).
        """
        return self.norm(self.run_blocks(*self.embed(images), queries))

    def run_blocks(
        self, x: Tensor, positions: Iterator[Tensor | None], grid: Grid, queries: int | None = None
    ) -> Tensor:
        """Equations 2 and 3 in every layer: (B, N, D) -> (B, N, D), or (B, T, D), before the last norm."""
        for hidden in self.iterate_hidden_states(x, positions, grid, queries):
            x = hidden
        return x

    def iterate_hidden_states(
        self, x: Tensor, positions: Iterator[Tensor | None], grid: Grid, queries: int | None = None
    ) -> Iterator[Tensor]:
        """Yield the input of each block before computing it, and at last the output: one (B, N, D) at a time."""
        last, rotary = len(self.blocks) - 1, self.compute_rotary(grid, x.device)
        for i, (block, position) in enumerate(zip(self.blocks, positions, strict=False)):
            x = x if position is None else x + position
            yield x
            block_queries = queries if i == last else None
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, grid, block_queries, rotary, use_reentrant=False)
            else:
                x = block(x, grid, block_queries, rotary)
        yield x

    def embed(self, images: Tensor) -> tuple[Tensor, Iterator[Tensor | None], Grid]:
        """Equation 1: the tokens (B, N, D), the positions that each block adds to its input (endless), and the grid."""
        check_images(images, self.config.channels)
        grid = self.config.compute_grid((images.shape[2], images.shape[3]))
        return self.add_prefix_and_positions(self.patch_embed(images), grid)

    def add_prefix_and_positions(self, patches: Tensor, grid: Grid) -> tuple[Tensor, Iterator[Tensor | None], Grid]:
        """Equation 1 after the embedding: prepend the prefix tokens, add the positions or leave them to the blocks."""
        prefix = [getattr(self, name).expand(patches.shape[0], -1, -1) for name, _ in self.list_prefix_tokens()]
        x = torch.cat([*prefix, patches], dim=1).to(next(self.parameters()).dtype)  # (B, N, D), under autocast too
        positions = self.compute_positions(grid)
        added: Iterator[Tensor | None] = repeat(None)
        if positions is not None and self.config.positions_at == "stem":
            x = x + positions
        elif positions is not None:
            added = iter(positions) if len(positions) > 1 else repeat(positions[0])
        return self.norm_pre(self.pos_drop(x)), added, grid

    def compute_rotary(self, grid: Grid, device: torch.device) -> Tensor | None:
        """The cosines and sines (2, N, K) that turn queries and keys; None without rotary positions."""
        if self.config.rotary is None:
            return None
        head_width = self.config.width // self.config.heads
        return build_rotary(self.config.rotary, grid, self.config.num_prefix_tokens, head_width, device)

    def compute_positions(self, grid: Grid) -> Tensor | None:
        """(1, N, D), or (layers, N, D) where each layer has its own; zeros for prefix tokens without a position."""
        config = self.config
        if config.positions == "learned-1d":
            prefix, patches = self.pos_embed.tensor_split([config.num_positioned_prefix_tokens], dim=1)
            table = torch.cat([prefix, resample_positions(patches, config.grid, grid, config.resample)], dim=1)
        elif config.positions == "learned-2d":
            y = resample_positions(self.pos_embed_y, (config.grid[0], 1), (grid[0], 1), config.resample)
            x = resample_positions(self.pos_embed_x, (1, config.grid[1]), (1, grid[1]), config.resample)
            y, x = y[:, :, None].expand(-1, -1, grid[1], -1), x[:, None].expand(-1, grid[0], -1, -1)
            table = torch.cat([x, y], dim=-1).flatten(1, 2)  # (tables, n, D)
        elif config.positions == "sincos-2d":
            parameter = next(self.parameters())
            table = build_sincos_positions(grid, config.width, parameter.device, parameter.dtype)[None]
        else:
            return None
        return F.pad(table, (0, 0, config.num_prefix_tokens - config.num_positioned_prefix_tokens, 0))

    def pool(self, tokens: Tensor) -> Tensor:
        """(B, N, D) -> (B, D): equation 4, or another pooling of the encoder's output."""
        patches = tokens[:, self.config.num_prefix_tokens :]
        match self.config.pool:
            case "class":
                pooled = tokens[:, 0]
            case "norm-mean" | "mean-norm":
                pooled = self.fc_norm(patches.mean(dim=1))
            case "map":
                pooled = self.attn_pool(tokens if self.config.pool_prefix else patches)
            case "class-mean":
                pooled = torch.cat([tokens[:, 0], patches.mean(dim=1)], dim=-1)
        pooled = self.pre_logits(self.projection(pooled))
        return F.normalize(pooled, dim=-1) if self.config.normalize_features else pooled


Model = ViT | BiT


def build_model(config: ModelConfig) -> Model:
    """The network of a configuration, its parameters uninitialized."""
    return BiT(config) if isinstance(config, BiTConfig) else ViT(config)


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor) -> Iterator[Tensor]:
    """Yield the attention weights of each layer, (B, H, N, N); only one layer's exist at a time.

    The images are model inputs, (B, C, S, S).

        model = vitrail.create("ti16", image_size=32, depth=2)
        *_, last = vitrail.attention_maps(model, torch.zeros(1, 3, 32, 32))
    """
    if not isinstance(model, ViT):
        raise UsageError(f"a {type(model).__name__} has no attention; give a ViT or a hybrid")
    x, positions, grid = model.embed(images)
    rotary = model.compute_rotary(grid, x.device)
    for hidden, block in zip(model.iterate_hidden_states(x, positions, grid), model.blocks, strict=False):
        assert isinstance(block, Block)
        yield block.attn.compute_weights(block.norm1(hidden), grid, rotary)
