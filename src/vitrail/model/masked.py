"""A ViT that learns from images alone: some patches are hidden, and what they show is told from the others.

    B images   C channels   S image side   P pixels from one patch to the next   n = rows x columns of patches
    M hidden patches of an image   V = n - M   D width   E width of the decoder   Q numbers told of a patch

Masked patch prediction (Dosovitskiy et al. 2021, B.1.2) replaces the embeddings of hidden patches and reads each one's
own output token. A masked autoencoder (He et al. 2022) gives the encoder the other patches alone, and a light decoder
the [mask] in their places. Which patches are hidden, and by what, is given with the images: (B, 2, n), as
`data.masking.drawn` has it. A hybrid's patch is the P x P pixels around which its stem looks.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from vitrail.config import MASK_TOKEN, MaskedConfig, PreprocessConfig, ViTConfig
from vitrail.errors import UsageError
from vitrail.model import cost
from vitrail.model.build import Model, ModelConfig
from vitrail.model.positions import build_sincos_positions
from vitrail.model.vit import Block, ViT, patchify
from vitrail.presets import build_preprocess_config

COLOR_LEVELS = 8  # of a channel, at 3 bits
COLOR_STEP = 256 // COLOR_LEVELS  # brightness from one level to the next
DOWNSIZED_SIDE = 4  # places along a side of a downsized patch
VARIANCE_EPS = 1e-6  # He et al. 2022


class MaskedViT(nn.Module):
    """A ViT and what it is taught with; its parameters are allocated, and `initialise_heads` sets those outside of it.

    Names of the ViT's parameters begin with `vit.`; without the others it is an ordinary model.
    """

    def __init__(self, vit: ViT, masked: MaskedConfig, preprocess: PreprocessConfig) -> None:
        super().__init__()
        self.vit = vit
        self.masked = masked
        self.num_masked = masked.count_masked(vit.config.grid[0] * vit.config.grid[1])
        self.decoder = MaskedDecoder(vit.config) if masked.kind == "mae" else None
        width = vit.config.width if self.decoder is None else self.decoder.config.width
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.head = nn.Linear(width, count_outputs_per_patch(vit.config, masked))
        self.mean, self.std = preprocess.mean, preprocess.std  # no buffers: ranks would send them in every step
        for name, parameter in vit.named_parameters():  # nothing here reads what pools: it waits for labels
            if name.startswith(("attn_pool.", "pre_logits.", "head.", "head_dist.")):
                parameter.requires_grad_(False)

    def forward(self, images: Tensor, masking: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, M, Q): what is told of each hidden patch. One image more is the partner of the last."""
        order, stands = masking.unbind(dim=1)  # each (B, n)
        hidden, visible = order.tensor_split([self.num_masked], dim=1)
        vit, grid, prefix = self.vit, self.vit.config.grid, self.vit.config.num_prefix_tokens
        patches = vit.patch_embed.extract_patches(images)  # (B, n, C P P), or one more
        if self.decoder is None:
            embeddings = corrupt_patches(patches, stands, vit.patch_embed.project, self.mask_token)
            x = vit.run_blocks(*vit.add_prefix_and_positions(embeddings, grid))[:, prefix:]
            return self.head(self.apply_final_norm(gather_rows(x, hidden)))
        x, positions, _ = vit.add_prefix_and_positions(vit.patch_embed.project(patches), grid)
        seen = torch.cat([x[:, :prefix], gather_rows(x[:, prefix:], visible)], dim=1)  # (B, prefix + V, D)
        encoded = self.apply_final_norm(vit.run_blocks(seen, positions, grid))
        return self.head(self.decoder(encoded, self.mask_token, hidden, visible))

    def apply_final_norm(self, x: Tensor) -> Tensor:
        """(B, N, D) behind the last norm, whichever of the two the pool gave the model."""
        return self.vit.fc_norm(self.vit.norm(x))

    def compute_targets(self, images: Tensor, masking: Tensor) -> Tensor:
        """What is to be told of each hidden patch: classes (B, M, 1) or (B, M, 16), int64, or pixels (B, M, Q)."""
        images, hidden, stride = (
            images[: len(masking)].float(),
            masking[:, 0, : self.num_masked],
            self.vit.config.stride,
        )
        match self.masked.target:
            case "mean-colour":
                return gather_rows(self.quantize_colors(images, stride).flatten(1)[..., None], hidden)
            case "4x4-colours":
                return gather_rows(
                    patchify(self.quantize_colors(images, stride // DOWNSIZED_SIDE)[:, None], DOWNSIZED_SIDE), hidden
                )
            case "pixels":
                return self.extract_patch_pixels(images, hidden)
            case "normalised-pixels":
                return standardize_patches(self.extract_patch_pixels(images, hidden))

    def extract_patch_pixels(self, images: Tensor, patch_indices: Tensor) -> Tensor:
        """(B, C, S, S) at (B, m) -> (B, m, C P P): pixels of patches as they were decoded, from 0 to 1."""
        patches = gather_rows(patchify(images, self.vit.config.stride), patch_indices).unflatten(
            -1, (len(self.mean), -1)
        )
        return (self.denormalize(patches).round_() / 255).flatten(2)

    def denormalize(self, values: Tensor) -> Tensor:
        """Normalised values (..., C, _) -> what they were decoded to, 0 to 255, but for float32's rounding."""
        mean, std = (
            _get_channel_constant(values.device, tuple(255 * value for value in kept)) for kept in (self.mean, self.std)
        )
        return torch.addcmul(mean, values, std)

    def quantize_colors(self, images: Tensor, side: int) -> Tensor:
        """(B, C, S, S) -> int64 (B, S/side, S/side): the mean of each square's bytes, its top 3 bits a channel.

        It is exact: a sum of few is rounded to the whole number it is, and of the larger sums nothing is lost then.
        """
        few = math.gcd(side, 4)
        means = F.avg_pool2d(images, few)  # (B, C, S/few, S/few)
        sums = (self.denormalize(means.flatten(2)) * few**2).round_().view_as(means)
        digits = (F.avg_pool2d(sums, side // few) / (COLOR_STEP * few**2)).floor().long()  # of 0 to 7
        total = digits[:, 0]
        for channel in range(1, digits.shape[1]):
            total = total * COLOR_LEVELS + digits[:, channel]
        return total

    def render_patches(self, predictions: Tensor, images: Tensor, masking: Tensor) -> Tensor:
        """(B, M, Q), or targets -> uint8 (B, M, C, p, p): hidden patches as pictures of p = 1, 4 or P pixels a side."""
        channels, stride = self.vit.config.channels, self.vit.config.stride
        if self.masked.target in ("pixels", "normalised-pixels"):
            if self.masked.target == "normalised-pixels":  # the mean and deviation were never to be told
                true = self.extract_patch_pixels(images[: len(predictions)].float(), masking[:, 0, : self.num_masked])
                predictions = predictions * (true.var(dim=-1, keepdim=True) + VARIANCE_EPS).sqrt() + true.mean(
                    dim=-1, keepdim=True
                )
            return (predictions * 255).round().clamp(0, 255).to(torch.uint8).unflatten(-1, (channels, stride, stride))
        side = 1 if self.masked.target == "mean-colour" else DOWNSIZED_SIDE
        if predictions.is_floating_point():
            predictions = predictions.unflatten(-1, (side * side, -1)).argmax(dim=-1)
        digits = [predictions // COLOR_LEVELS**place % COLOR_LEVELS for place in reversed(range(channels))]
        middle = torch.stack(digits, dim=2) * COLOR_STEP + COLOR_STEP // 2  # (B, M, C, p p)
        return middle.to(torch.uint8).unflatten(-1, (side, side))

    @property
    def is_compiled(self) -> bool:
        """Whether torch compiles the blocks."""
        return self.vit.is_compiled

    def compile_blocks(self) -> None:
        """Let torch compile the blocks of encoder and decoder, in place."""
        self.vit.compile_blocks()
        for block in self.decoder.blocks if self.decoder is not None else ():
            block.compile()


class MaskedDecoder(nn.Module):
    """From what the encoder made of the visible patches to what is read at the hidden ones."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = build_decoder_config(config)
        self.embed = nn.Linear(config.width, self.config.width)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(self.config.depth))
        self.norm = nn.LayerNorm(self.config.width, eps=self.config.norm_eps)

    def forward(self, encoded: Tensor, mask_token: Tensor, masked_indices: Tensor, visible_indices: Tensor) -> Tensor:
        """(B, prefix + V, D) -> (B, M, E)."""
        grid, width = self.config.grid, self.config.width
        first, seen = self.embed(encoded).tensor_split([encoded.shape[1] - visible_indices.shape[1]], dim=1)
        everywhere = mask_token.to(seen.dtype).expand(len(seen), grid[0] * grid[1], -1)
        patches = everywhere.scatter(1, visible_indices[..., None].expand_as(seen), seen)  # (B, n, E)
        positions = build_sincos_positions(grid, width, self.embed.weight.device, self.embed.weight.dtype)
        x = torch.cat([first, patches + positions], dim=1)
        for block in self.blocks:
            x = block(x, grid)
        return self.norm(gather_rows(x[:, first.shape[1] :], masked_indices))


# --- hiding ----------------------------------------------------------------------------------------------------------


def corrupt_patches(
    patches: Tensor, replacements: Tensor, project: Callable[[Tensor], Tensor], mask_token: Tensor
) -> Tensor:
    """(B, n, C P P), or one more -> (B, n, D): the embeddings of what stands in the patches' places, and the [mask].

    Some are of the next image; the last one's next is the one more, or else the first. An embedding is a function of
    its patch alone, so to exchange patches is to exchange embeddings, and costs no gradient: pixels have none.
    Written with `where`: gathering rows of [mask] would add up their gradient one by one.
    """
    images, count = replacements.shape
    first = count * torch.arange(len(patches), device=patches.device)  # of each image's patches, counted through
    own = first[:images, None] + torch.arange(count, device=patches.device)
    rows = torch.where(replacements >= 0, first.roll(-1)[:images, None] + replacements, own)
    embeddings = project(patches.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, (images, count)))
    return torch.where((replacements == MASK_TOKEN)[..., None], mask_token.to(embeddings.dtype), embeddings)


def gather_rows(rows: Tensor, indices: Tensor) -> Tensor:
    """(B, n, F) at (B, m) -> (B, m, F). Rows at once: `gather` fetches every number by an index of its own."""
    first = rows.shape[1] * torch.arange(len(rows), device=rows.device)
    return rows.flatten(0, 1).index_select(0, (first[:, None] + indices).flatten()).unflatten(0, indices.shape)


# --- what is told ----------------------------------------------------------------------------------------------------


def count_outputs_per_patch(config: ModelConfig, masked: MaskedConfig) -> int:
    """Q: how many numbers are told of a patch. A model that cannot be taught so is refused."""
    if not isinstance(config, ViTConfig):
        raise UsageError("patches are hidden of a ViT or a hybrid, and this recipe's model is a ResNet")
    masked.count_masked(config.grid[0] * config.grid[1])
    if masked.kind == "mae" and config.stem is not None:
        raise UsageError("mae leaves patches out, and a hybrid's stem sees across them: choose mpp, or a model without")
    if masked.kind == "mae" and (config.positions == "relative" or config.positions_at != "stem"):
        raise UsageError("mae leaves patches out, which needs positions that are added once, at the stem")
    if masked.target in ("pixels", "normalised-pixels"):
        return config.channels * config.stride**2
    if config.channels > 4:
        raise UsageError(f"{config.channels} channels at 3 bits are too many colours; choose the target pixels")
    if masked.target == "4x4-colours" and config.stride % DOWNSIZED_SIDE:
        raise UsageError(f"patches of {config.stride} pixels do not divide into 4 x 4 places; choose mean-colour")
    return COLOR_LEVELS**config.channels * (1 if masked.target == "mean-colour" else DOWNSIZED_SIDE**2)


def standardize_patches(patches: Tensor) -> Tensor:
    """(B, m, C P P), each patch less its mean and over its deviation."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + VARIANCE_EPS).sqrt()


def compute_masked_losses(predictions: Tensor, targets: Tensor) -> Tensor:
    """(B, M, Q) and targets -> (B,): the mean over an image's hidden patches, in float32.

    Of classes the cross-entropy in nats, of pixels the squared error.
    """
    predictions = predictions.float()
    if targets.is_floating_point():
        return (predictions - targets).square().mean(dim=(1, 2))
    logits = predictions.unflatten(-1, (targets.shape[-1], -1))
    each = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none")
    return each.unflatten(0, (len(predictions), -1)).mean(dim=1)


@functools.lru_cache(maxsize=64)
def _get_channel_constant(device: torch.device, values: tuple[float, ...]) -> Tensor:
    """(C, 1), kept: to send it anew would make the host wait for a GPU at every step."""
    with torch.inference_mode(False):  # whatever is current
        return torch.tensor(values, device=device)[:, None]


# --- around it -------------------------------------------------------------------------------------------------------


def get_encoder(model: "Model | MaskedViT") -> Model:
    """What is kept of a model that was taught: itself, or the ViT of a masked one."""
    return model.vit if isinstance(model, MaskedViT) else model


def build_decoder_config(config: ViTConfig) -> ViTConfig:
    """The decoder for an encoder: two thirds of its width and depth, at most 512 and 8, in heads of 32.

    That is He et al.'s for the sizes b, l and h. Positions are sin-cos, as theirs are.
    """
    width = max(32, min(512, config.width * 2 // 3 // 32 * 32))
    return ViTConfig(
        width=width,
        depth=max(1, min(8, config.depth * 2 // 3)),
        mlp=4 * width,
        heads=width // 32,
        patch=config.stride,
        image_size=config.image_size,
        channels=config.channels,
        classes=0,
        class_token=False,
        pool="norm-mean",
        positions="sincos-2d",
        gelu=config.gelu,
        norm_eps=config.norm_eps,
    )


@torch.no_grad()
def initialize_masked_heads(model: MaskedViT, generator: Generator) -> MaskedViT:
    """The same model with what is outside of its ViT drawn: kernels Xavier-uniform, [mask] normal, the head zero."""
    for module in model.decoder.modules() if model.decoder is not None else ():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            # query, key and value lie in one matrix, and each is drawn on its own
            for part in module.weight.chunk(3 if module.out_features == 3 * module.in_features else 1):
                nn.init.xavier_uniform_(part, generator=generator)
            nn.init.zeros_(module.bias)
    model.mask_token.normal_(0.0, 0.02, generator=generator)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model


def count_masked_parameters(config: ViTConfig, masked: MaskedConfig) -> int:
    """The exact number of parameters in training; nothing is allocated."""
    view = build_preprocess_config("inception", config.image_size, config.channels)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in MaskedViT(ViT(config), masked, view).parameters())


def count_masked_multiply_adds(config: ViTConfig, masked: MaskedConfig) -> int:
    """Multiply-adds of one image's forward pass, heads included; `count.multiply_adds` of what is trained with."""
    patches = config.grid[0] * config.grid[1]
    hidden = masked.count_masked(patches)
    if masked.kind == "mpp":
        bare = dataclasses.replace(config, classes=0, hidden_head=False, distillation_head=False, pool="norm-mean")
        return cost.count_multiply_adds(bare) + hidden * config.width * count_outputs_per_patch(config, masked)
    light, seen = build_decoder_config(config), config.num_prefix_tokens + patches - hidden
    embedding = patches * config.patch**2 * config.channels * config.width + seen * config.width * light.width
    blocks = (
        _count_block_multiply_adds(config, seen) * config.depth
        + _count_block_multiply_adds(light, config.num_prefix_tokens + patches) * light.depth
    )
    return embedding + blocks + hidden * light.width * count_outputs_per_patch(config, masked)


def count_masked_training_flops(config: ViTConfig, masked: MaskedConfig, images: int) -> int:
    """FLOPs of training on that many images, as `count.training_flops` counts them."""
    return 2 * 3 * count_masked_multiply_adds(config, masked) * images


def _count_block_multiply_adds(config: ViTConfig, tokens: int) -> int:
    return tokens * (4 * config.width**2 + 2 * config.width * config.mlp) + 2 * tokens**2 * config.width


def list_memory_equivalents(config: ViTConfig, masked: MaskedConfig) -> tuple[ViTConfig, ...]:
    """ViTs that together hold about as much in training as this does: one with the head, or encoder and decoder."""
    told = count_outputs_per_patch(config, masked)
    bare = dataclasses.replace(config, hidden_head=False, distillation_head=False, pool="norm-mean")
    if masked.kind == "mpp":
        return (dataclasses.replace(bare, classes=told),)
    patches = config.grid[0] * config.grid[1]
    strip = (
        (patches - masked.count_masked(patches)) * config.stride,
        config.stride,
    )  # an image of the visible patches alone
    return dataclasses.replace(bare, classes=0, image_size=strip), dataclasses.replace(
        build_decoder_config(config), classes=told
    )
