"""Pre-training a ViT without labels: some patches are masked, and the model predicts them from the others.

    B images   C channels   S image side   P pixels from one patch to the next   n = rows x columns of patches
    M masked patches of an image   V = n - M visible   D width   E width of the decoder   Q outputs for a patch

Masked patch prediction (Dosovitskiy et al. 2021, B.1.2) replaces the embeddings of masked patches and predicts each one
from its own output token. A masked autoencoder (He et al. 2022) encodes only the visible patches; a light decoder reads
them with the [mask] in the other places. The masking comes with the images as (B, 2, n): the order of patches, masked
ones first, and what replaces each (`batch_augment.draw_masked_patches`). A hybrid's patch is the P x P pixels at the
center of what its stem reads.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from vitrail.config import MaskedConfig, ModelConfig, PreprocessConfig, ViTConfig
from vitrail.config.training import MASK_TOKEN
from vitrail.errors import UsageError
from vitrail.model.positions import build_sincos_positions
from vitrail.model.vit import Block, Model, ViT, crop_remainder, patchify

COLOR_LEVELS = 8  # of a channel, at 3 bits
COLOR_STEP = 256 // COLOR_LEVELS  # byte values from one level to the next
DOWNSIZED_SIDE = 4  # cells along a side of a downsized patch
VARIANCE_EPS = 1e-6  # He et al. 2022


class MaskedViT(nn.Module):
    """A ViT with the parts that only masked pre-training uses; `initialize_masked_heads` initializes those.

    Names of the ViT's parameters begin with `vit.`; on its own it is an ordinary model.
    """

    def __init__(self, vit: ViT, masked: MaskedConfig, preprocess: PreprocessConfig) -> None:
        super().__init__()
        self.vit = vit
        self.masked = masked
        self.num_masked = masked.count_masked(math.prod(vit.config.grid))
        self.decoder = MaskedDecoder(vit.config) if masked.kind == "mae" else None
        width = vit.config.width if self.decoder is None else self.decoder.config.width
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.head = nn.Linear(width, count_outputs_per_patch(vit.config, masked))
        self.mean, self.std = preprocess.mean, preprocess.std  # no buffers: ranks would broadcast them in every step
        for name, parameter in vit.named_parameters():  # pooling and head are not trained without labels
            if name.startswith(("attn_pool.", "projection.", "pre_logits.", "head.", "head_dist.")):
                parameter.requires_grad_(False)

    def forward(self, images: Tensor, masking: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, M, Q): predictions of the masked patches. One extra image is the partner of the last."""
        order, replacements = masking.unbind(dim=1)  # each (B, n)
        masked_indices, visible_indices = order.tensor_split([self.num_masked], dim=1)
        vit, grid, prefix = self.vit, self.vit.config.grid, self.vit.config.num_prefix_tokens
        patches = vit.patch_embed.extract_patches(images)  # (B, n, C P P), or one image more
        if self.decoder is None:
            embeddings = corrupt_patches(patches, replacements, vit.patch_embed.project, self.mask_token)
            x = vit.run_blocks(*vit.add_prefix_and_positions(embeddings, grid))[:, prefix:]
            return self.head(self.apply_final_norm(gather_rows(x, masked_indices)))
        x, positions, _ = vit.add_prefix_and_positions(vit.patch_embed.project(patches), grid)
        tokens = torch.cat([x[:, :prefix], gather_rows(x[:, prefix:], visible_indices)], dim=1)  # (B, prefix + V, D)
        encoded = self.apply_final_norm(vit.run_blocks(tokens, positions, grid))
        return self.head(self.decoder(encoded, self.mask_token, masked_indices, visible_indices))

    def apply_final_norm(self, x: Tensor) -> Tensor:
        """(B, N, D) after the last norm, which is one of two modules depending on the pooling."""
        return self.vit.fc_norm(self.vit.norm(x))

    def compute_targets(self, images: Tensor, masking: Tensor) -> Tensor:
        """Prediction targets of the masked patches: int64 classes (B, M, 1) or (B, M, 16), or pixels (B, M, Q)."""
        images, masked_indices = images[: len(masking)].float(), masking[:, 0, : self.num_masked]
        images = crop_remainder(images, self.vit.config)
        stride = self.vit.config.stride
        match self.masked.target:
            case "mean-color":
                return gather_rows(self.quantize_colors(images, stride).flatten(1)[..., None], masked_indices)
            case "4x4-colors":
                cells = self.quantize_colors(images, stride // DOWNSIZED_SIDE)[:, None]
                return gather_rows(patchify(cells, DOWNSIZED_SIDE), masked_indices)
            case "pixels":
                return self.extract_patch_pixels(images, masked_indices)
            case "normalized-pixels":
                pixels = self.extract_patch_pixels(images, masked_indices)
                variance, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
                return (pixels - mean) / (variance + VARIANCE_EPS).sqrt()

    def extract_patch_pixels(self, images: Tensor, patch_indices: Tensor) -> Tensor:
        """(B, C, S, S) at (B, m) -> (B, m, C P P): the decoded pixels of patches, from 0 to 1."""
        patches = gather_rows(patchify(crop_remainder(images, self.vit.config), self.vit.config.stride), patch_indices)
        return (self.denormalize(patches.unflatten(-1, (len(self.mean), -1))).round_() / 255).flatten(2)

    def denormalize(self, values: Tensor) -> Tensor:
        """Normalized values (..., C, _) -> the decoded values from 0 to 255, within float32's rounding."""
        mean = _get_channel_constant(values.device, tuple(255 * value for value in self.mean))
        std = _get_channel_constant(values.device, tuple(255 * value for value in self.std))
        return torch.addcmul(mean, values, std)

    def quantize_colors(self, images: Tensor, side: int) -> Tensor:
        """(B, C, S, S) -> int64 (B, S/side, S/side): the mean color of each square, at its top 3 bits a channel.

        It is exact: sums over small squares are rounded to the integers they are, and sums of those lose nothing.
        """
        small = math.gcd(side, 4)
        means = F.avg_pool2d(images, small)  # (B, C, S/small, S/small)
        sums = (self.denormalize(means.flatten(2)) * small**2).round_().view_as(means)
        digits = (F.avg_pool2d(sums, side // small) / (COLOR_STEP * small**2)).floor().long()  # from 0 to 7
        return functools.reduce(lambda total, digit: total * COLOR_LEVELS + digit, digits.unbind(dim=1))

    def render_patches(self, predictions: Tensor, images: Tensor, masking: Tensor) -> Tensor:
        """Predictions (B, M, Q) or targets -> uint8 (B, M, C, p, p): masked patches as images of side p = 1, 4 or P."""
        channels, stride = self.vit.config.channels, self.vit.config.stride
        if self.masked.target in ("pixels", "normalized-pixels"):
            if self.masked.target == "normalized-pixels":  # the mean and deviation are not predicted
                pixels = self.extract_patch_pixels(images[: len(predictions)].float(), masking[:, 0, : self.num_masked])
                mean, variance = pixels.mean(dim=-1, keepdim=True), pixels.var(dim=-1, keepdim=True)
                predictions = predictions * (variance + VARIANCE_EPS).sqrt() + mean
            return (predictions * 255).round().clamp(0, 255).to(torch.uint8).unflatten(-1, (channels, stride, stride))
        side = 1 if self.masked.target == "mean-color" else DOWNSIZED_SIDE
        if predictions.is_floating_point():
            predictions = predictions.unflatten(-1, (side * side, -1)).argmax(dim=-1)
        digits = [predictions // COLOR_LEVELS**place % COLOR_LEVELS for place in reversed(range(channels))]
        colors = torch.stack(digits, dim=2) * COLOR_STEP + COLOR_STEP // 2  # (B, M, C, p p), mid-level
        return colors.to(torch.uint8).unflatten(-1, (side, side))

    @property
    def is_compiled(self) -> bool:
        """Whether torch compiles the blocks."""
        return self.vit.is_compiled

    def compile_blocks(self) -> None:
        """Compile the blocks of encoder and decoder with torch, in place."""
        self.vit.compile_blocks()
        for block in self.decoder.blocks if self.decoder is not None else ():
            block.compile()


class MaskedDecoder(nn.Module):
    """The light decoder of a masked autoencoder: encoded visible patches -> features of the masked ones."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = build_decoder_config(config)
        self.embed = nn.Linear(config.width, self.config.width)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(self.config.depth))
        self.norm = nn.LayerNorm(self.config.width, eps=self.config.norm_eps)

    def forward(self, encoded: Tensor, mask_token: Tensor, masked_indices: Tensor, visible_indices: Tensor) -> Tensor:
        """(B, prefix + V, D) -> (B, M, E)."""
        grid, width = self.config.grid, self.config.width
        prefix, visible = self.embed(encoded).tensor_split([encoded.shape[1] - visible_indices.shape[1]], dim=1)
        mask_tokens = mask_token.to(visible.dtype).expand(len(visible), grid[0] * grid[1], -1)
        patches = mask_tokens.scatter(1, visible_indices[..., None].expand_as(visible), visible)  # (B, n, E)
        positions = build_sincos_positions(grid, width, self.embed.weight.device, self.embed.weight.dtype)
        x = torch.cat([prefix, patches + positions], dim=1)
        for block in self.blocks:
            x = block(x, grid)
        return self.norm(gather_rows(x[:, prefix.shape[1] :], masked_indices))


# --- masking ---------------------------------------------------------------------------------------------------------


def corrupt_patches(
    patches: Tensor, replacements: Tensor, project: Callable[[Tensor], Tensor], mask_token: Tensor
) -> Tensor:
    """(B, n, C P P), or one image more -> (B, n, D): embeddings of the patches with replacements and [mask] tokens.

    A replacement is a patch of the next image; the last image's next is the extra one, or else the first. Patches are
    exchanged before they are embedded, since pixels need no gradient and gathering them costs none.
    Written with `where`: gathering rows of [mask] would sum their gradient one by one.
    """
    images, count = replacements.shape
    first_rows = count * torch.arange(len(patches), device=patches.device)  # of each image, in the flattened batch
    own_rows = first_rows[:images, None] + torch.arange(count, device=patches.device)
    rows = torch.where(replacements >= 0, first_rows.roll(-1)[:images, None] + replacements, own_rows)
    embeddings = project(patches.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, (images, count)))
    return torch.where((replacements == MASK_TOKEN)[..., None], mask_token.to(embeddings.dtype), embeddings)


def gather_rows(rows: Tensor, indices: Tensor) -> Tensor:
    """(B, n, F) at (B, m) -> (B, m, F), whole rows at a time: `gather` would index every number."""
    first_rows = rows.shape[1] * torch.arange(len(rows), device=rows.device)
    return rows.flatten(0, 1).index_select(0, (first_rows[:, None] + indices).flatten()).unflatten(0, indices.shape)


# --- prediction targets ----------------------------------------------------------------------------------------------


def count_outputs_per_patch(config: ModelConfig, masked: MaskedConfig) -> int:
    """Q: how many outputs predict a patch. A model that cannot be trained so is refused."""
    if not isinstance(config, ViTConfig):
        raise UsageError("masked pre-training needs a ViT or a hybrid, and this recipe's model is a ResNet")
    masked.count_masked(math.prod(config.grid))
    if masked.kind == "mae" and config.stem is not None:
        advice = "choose mpp, or a model without a stem"
        raise UsageError(f"mae omits patches, and a hybrid's stem reads across them: {advice}")
    relative = config.has_attention_bias or config.rotary is not None
    if masked.kind == "mae" and (relative or config.positions_at != "stem"):
        rule = "positions must be added once, at the stem, and be neither rotary nor relative"
        raise UsageError(f"mae omits patches, so {rule}: choose mpp, or another model")
    if masked.target in ("pixels", "normalized-pixels"):
        return config.channels * config.stride**2
    if config.channels > 4:
        raise UsageError(f"{config.channels} channels at 3 bits are too many colors; choose the target pixels")
    if masked.target == "4x4-colors" and config.stride % DOWNSIZED_SIDE:
        raise UsageError(f"patches of {config.stride} pixels do not divide into 4 x 4 cells; choose mean-color")
    return COLOR_LEVELS**config.channels * (1 if masked.target == "mean-color" else DOWNSIZED_SIDE**2)


def compute_masked_losses(predictions: Tensor, targets: Tensor) -> Tensor:
    """(B, M, Q) and targets -> (B,): the mean over an image's masked patches, in float32.

    Cross-entropy in nats for classes, squared error for pixels.
    """
    predictions = predictions.float()
    if targets.is_floating_point():
        return (predictions - targets).square().mean(dim=(1, 2))
    logits = predictions.unflatten(-1, (targets.shape[-1], -1))
    losses = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none")
    return losses.unflatten(0, (len(predictions), -1)).mean(dim=1)


@functools.lru_cache(maxsize=64)
def _get_channel_constant(device: torch.device, values: tuple[float, ...]) -> Tensor:
    """(C, 1), cached: copying it in every step would make the host wait for the GPU."""
    with torch.inference_mode(False):  # whatever mode is current
        return torch.tensor(values, device=device)[:, None]


# --- parts around the ViT ----------------------------------------------------------------------------------------


def get_encoder(model: "Model | MaskedViT") -> Model:
    """The model to save: itself, or the ViT of a masked one."""
    return model.vit if isinstance(model, MaskedViT) else model


def build_decoder_config(config: ViTConfig) -> ViTConfig:
    """The decoder for an encoder: two thirds of its width and depth, at most 512 and 8, with heads of width 32.

    For the sizes b, l and h it is He et al.'s. Positions are sin-cos, as theirs are.
    """
    width = max(32, min(512, config.width * 2 // 3 // 32 * 32))
    return ViTConfig(
        width=width,
        depth=max(1, min(8, config.depth * 2 // 3)),
        mlp=4 * width,
        heads=width // 32,
        patch=config.stride,
        image_size=config.image_size,
        drop_remainder=config.drop_remainder,
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
    """Initialize what is outside the ViT, in place: kernels Xavier-uniform, [mask] normal, the head zero."""
    for module in model.decoder.modules() if model.decoder is not None else ():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            # query, key and value share one matrix, and each is drawn on its own
            for part in module.weight.chunk(3 if module.out_features == 3 * module.in_features else 1):
                nn.init.xavier_uniform_(part, generator=generator)
            nn.init.zeros_(module.bias)
    model.mask_token.normal_(0.0, 0.02, generator=generator)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model
