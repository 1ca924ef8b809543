"""The convolutional networks of the paper: BiT ResNets, and the stems whose feature maps hybrids cut into patches.

    B batch   C channels   S image side   L classes

Both are bottleneck ResNets with standardized kernels and group norm (Kolesnikov et al. 2020), and differ in details:

    hybrid stem   convolution, norm, ReLU; ReLU after the sum; TensorFlow's SAME padding; standardized by std + 1e-5
    BiT           norm, ReLU, convolution; padding of half a kernel; standardized by sqrt(var + 1e-10)

Attribute names equal timm's.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import BiTConfig, ConvConfig
from vitrail.errors import UsageError


def check_images(images: Tensor, channels: int) -> None:
    """Refuse what is no batch of images (B, C, S, S)."""
    if images.ndim != 4 or images.shape[1] != channels:
        raise UsageError(f"images must have the shape (batch, {channels}, height, width), not {tuple(images.shape)}")


class StandardizedConv2d(nn.Conv2d):
    """A convolution whose kernels have zero mean and unit variance."""

    def __init__(
        self, config: ConvConfig, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, *, same: bool
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, bias=False)
        self.config, self.same = config, same

    def forward(self, x: Tensor) -> Tensor:
        half = self.kernel_size[0] // 2
        x = pad_same(x, self.kernel_size[0], self.stride[0]) if self.same else F.pad(x, (half, half, half, half))
        return F.conv2d(x, self.standardize_weight().to(x.dtype), stride=self.stride)

    def standardize_weight(self) -> Tensor:
        """(O, I, K, K) in float32: each output's kernel centered and scaled."""
        kernel = self.weight.float()
        centered = kernel - kernel.mean(dim=(1, 2, 3), keepdim=True)
        variance = centered.square().mean(dim=(1, 2, 3), keepdim=True)
        if self.config.standardization == "std + eps":
            return centered / (variance.sqrt() + self.config.standardization_eps)
        return centered / (variance + self.config.standardization_eps).sqrt()


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad to an output of ceil(S / stride), an odd pixel at the end: TensorFlow's SAME."""
    paddings = []
    for size in (x.shape[3], x.shape[2]):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        paddings += [total // 2, total - total // 2]
    return F.pad(x, paddings, value=value)


def build_group_norm(config: ConvConfig, channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=config.norm_eps)


class HybridStem(nn.Module):
    """The first convolution of a hybrid: (B, C, S, S) -> (B, 64 f, S/4, S/4)."""

    def __init__(self, config: ConvConfig, channels: int) -> None:
        super().__init__()
        self.conv = StandardizedConv2d(config, channels, config.width, 7, 2, same=True)
        self.norm = build_group_norm(config, config.width)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(images)))
        return F.max_pool2d(pad_same(x, 3, 2, value=-torch.inf), 3, 2)


class BiTStem(nn.Module):
    """The first convolution of a BiT ResNet: (B, C, S, S) -> (B, 64 f, S/4, S/4)."""

    def __init__(self, config: ConvConfig, channels: int) -> None:
        super().__init__()
        self.conv = StandardizedConv2d(config, channels, config.width, 7, 2, same=False)

    def forward(self, images: Tensor) -> Tensor:
        return F.max_pool2d(F.pad(self.conv(images), (1, 1, 1, 1)), 3, 2)  # zeros, which may be the maximum


def build_shortcut(config: ConvConfig, in_channels: int, out_channels: int, stride: int, *, same: bool) -> nn.Module:
    """A unit's shortcut, projected in the first unit of a stage; a hybrid's projection has a norm."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    parts: dict[str, nn.Module] = {"conv": StandardizedConv2d(config, in_channels, out_channels, 1, stride, same=same)}
    if same:
        parts["norm"] = build_group_norm(config, out_channels)
    return nn.Sequential(OrderedDict(parts))


class HybridUnit(nn.Module):
    """Post-activation bottleneck: ReLU after the sum."""

    def __init__(self, config: ConvConfig, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.downsample = build_shortcut(config, in_channels, outputs, stride, same=True)
        self.conv1 = StandardizedConv2d(config, in_channels, width, 1, same=True)
        self.norm1 = build_group_norm(config, width)
        self.conv2 = StandardizedConv2d(config, width, width, 3, stride, same=True)
        self.norm2 = build_group_norm(config, width)
        self.conv3 = StandardizedConv2d(config, width, outputs, 1, same=True)
        self.norm3 = build_group_norm(config, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.downsample(x))


class BiTUnit(nn.Module):
    """Pre-activation bottleneck: the projection reads the output of the first norm and ReLU."""

    def __init__(self, config: ConvConfig, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.downsample = build_shortcut(config, in_channels, outputs, stride, same=False)
        self.norm1 = build_group_norm(config, in_channels)
        self.conv1 = StandardizedConv2d(config, in_channels, width, 1, same=False)
        self.norm2 = build_group_norm(config, width)
        self.conv2 = StandardizedConv2d(config, width, width, 3, stride, same=False)
        self.norm3 = build_group_norm(config, width)
        self.conv3 = StandardizedConv2d(config, width, outputs, 1, same=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        shortcut = x if isinstance(self.downsample, nn.Identity) else self.downsample(active)
        y = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return shortcut + self.conv3(F.relu(self.norm3(y)))


def build_stages(config: ConvConfig, unit: type[HybridUnit] | type[BiTUnit]) -> nn.Sequential:
    """The stages after a stem; each but the first halves the map, and each doubles the width."""
    stages, in_channels = [], config.width
    for index, count in enumerate(config.units):
        width, units = config.width * 2**index, list[nn.Module]()
        for position in range(count):
            units.append(unit(config, in_channels, width, 2 if index and not position else 1))
            in_channels = 4 * width
        stages.append(nn.Sequential(OrderedDict(blocks=nn.Sequential(*units))))
    return nn.Sequential(*stages)


class Backbone(nn.Module):
    """A hybrid's stem: (B, C, S, S) -> (B, features, S / stride, S / stride)."""

    def __init__(self, config: ConvConfig, channels: int) -> None:
        super().__init__()
        self.stem = HybridStem(config, channels)
        self.stages = build_stages(config, HybridUnit)

    def forward(self, images: Tensor) -> Tensor:
        return self.stages(self.stem(images))


class PooledHead(nn.Module):
    """The linear head as BiT stores it: a 1 x 1 convolution."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(features, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x[:, :, None, None])[:, :, 0, 0]


class BiT(nn.Module):
    """A BiT ResNet. Its parameters are not initialized: `initialize_weights` or a file sets them."""

    def __init__(self, config: BiTConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = BiTStem(config.conv, config.channels)
        self.stages = build_stages(config.conv, BiTUnit)
        self.norm = build_group_norm(config.conv, config.num_features)
        self.head = PooledHead(config.num_features, config.classes) if config.classes else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, S, S) -> logits (B, L), or the features if the model has no head."""
        return self.head(self.compute_features(images))

    def compute_features(self, images: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, features): the features that the head reads."""
        return self.compute_feature_map(images).mean(dim=(2, 3))

    def compute_feature_map(self, images: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, features, S/32, S/32), after the last norm and ReLU."""
        check_images(images, self.config.channels)
        return F.relu(self.norm(self.stages(self.stem(images))))
