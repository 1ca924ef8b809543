"""A model with all that is needed to use it: preprocessing, labels, and where it came from."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail import presets
from vitrail.config import Preprocess, ViTConfig, check_patches, sides
from vitrail.errors import ModelError, UsageError
from vitrail.model.build import Config, Model, build
from vitrail.model.initialise import initialise
from vitrail.model.vit import ViT
from vitrail.plurals import plural
from vitrail.weights.precision import Tried
from vitrail.weights.storage import ALIGNMENT

Tensors = Mapping[str, Tensor]
TEMPERATURES = (1e-3, 1e3)  # far beyond what is ever fitted: logits over less are no longer float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where weights came from. A fact the source does not state is None, a guess is listed."""

    format: Literal["vitrail", "random", "google", "timm", "transformers", "torchvision"]
    name: str
    sha256: str | None = None
    licence: str | None = None
    assumptions: tuple[str, ...] = ()
    """What the source did not say and the reader had to choose, a sentence each."""
    changes: tuple[str, ...] = ()
    """What was done to the weights since, a sentence each."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model, how its images are prepared, and what its outputs are called; None where that is unknown."""

    model: Model
    preprocess: Preprocess | None = None
    labels: tuple[str, ...] | None = None
    origin: Origin = Origin(format="vitrail", name="made in Python")
    temperature: float = 1.0
    """What logits are divided by before they become probabilities, fitted on validation images (Guo et al. 2017)."""
    several: bool = False
    """Whether an image may have several labels: each class then has a probability of its own."""
    threshold: float = 0.0
    """The probability below which an answer is "unsure", chosen on validation images; 0 for never."""
    tried: tuple[Tried, ...] = ()
    """What these very weights lose and gain in fewer bits, measured on validation images."""
    ranges: tuple[float, ...] = ()
    """Least and greatest of what the blocks multiply there, six pairs a block, for runtimes with fixed scales."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, Model):
            raise UsageError(f"a Trained holds a model of vitrail, not {type(self.model).__name__}")
        if not TEMPERATURES[0] <= self.temperature <= TEMPERATURES[1]:
            raise UsageError(
                f"temperature is {self.temperature}; it must be from {TEMPERATURES[0]} to {TEMPERATURES[1]}"
            )
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold is {self.threshold}; it must be a probability")
        config = self.model.config
        if self.ranges:
            self._check_ranges()
        if self.labels is not None and len(self.labels) != config.classes:
            raise UsageError(
                f"{plural(len(self.labels), 'label')} given for a head of {plural(config.classes, 'class')}"
            )
        if self.preprocess is not None and len(self.preprocess.mean) != config.channels:
            raise UsageError(
                f"the preprocessing has {plural(len(self.preprocess.mean), 'channel')} and the model {config.channels}"
            )
        if self.preprocess is not None and isinstance(config, ViTConfig):
            check_patches(self.preprocess.size, config.stride)

    def _check_ranges(self) -> None:
        wanted = 12 * self.model.config.depth if isinstance(self.model, ViT) else 0
        if len(self.ranges) != wanted:
            raise UsageError(f"{len(self.ranges)} ends of ranges were given for a model that has {wanted}")
        for least, greatest in zip(self.ranges[::2], self.ranges[1::2], strict=True):
            if not -math.inf < least <= greatest < math.inf:
                raise UsageError(f"a range is from {least} to {greatest}; both must be numbers, the second not below")


def require(trained: Trained) -> Trained:
    """`trained`, if it is one: a bare model says neither how its images are prepared nor what its classes are."""
    if not isinstance(trained, Trained):
        kind = type(trained).__name__
        raise UsageError(f"give a vitrail.Trained, not {kind}: vitrail.Trained(model, preprocess, labels) makes one")
    return trained


def create(
    name: str,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int = 1000,
    seed: int = 0,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    **settings: Any,
) -> Model:
    """A preset with random weights, ready to train; `settings` are fields of its configuration, such as registers=4."""
    model = random(name, image_size=image_size, num_classes=num_classes, seed=seed, **settings).model
    if isinstance(model, ViT):
        model.regularise(dropout=dropout, stochastic_depth=stochastic_depth)
    elif dropout or stochastic_depth:
        raise UsageError(f"{name} is a ResNet, which has neither dropout nor stochastic depth")
    return model.train()


def random(
    name: str,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int = 1000,
    seed: int = 0,
    head_bias: float = 0.0,
    mimetic: bool = False,
    **settings: Any,
) -> Trained:
    """A preset with random weights and the paper's preprocessing, at 224 x 224 unless told otherwise."""
    if "classes" in settings:
        raise UsageError("the number of classes is called num_classes here")
    if image_size is not None:
        settings["image_size"] = sides(image_size)
    config = presets.config(name, classes=num_classes, **settings)
    with torch.device("meta"):  # torch's own initialisation would be thrown away
        model = build(config)
    model = model.to_empty(device="cpu")
    initialise(model, torch.Generator().manual_seed(seed), head_bias=head_bias, mimetic=mimetic).eval()
    preprocess = presets.preprocess("inception", config.image_size, config.channels)
    origin = Origin(format="random", name=f"{name}, seed {seed}")
    return Trained(model=model, preprocess=preprocess, labels=None, origin=origin)


def assemble(config: Config, tensors: Tensors) -> Model:
    """The model whose parameters are exactly `tensors`, in float32; any other name, shape or a NaN is an error."""
    model = fit(config, tensors)
    single = {name: _aligned(tensor.to(torch.float32).contiguous()) for name, tensor in tensors.items()}
    if broken := sorted(name for name, tensor in single.items() if not torch.isfinite(tensor).all()):
        raise ModelError(f"NaN or infinity in the weights of {broken[0]!r}{_more(broken)}")
    model.load_state_dict(single, assign=True)
    return model.requires_grad_(True).eval()


def _aligned(tensor: Tensor) -> Tensor:
    """The same values where vectors can be read whole: a file that is mapped has them anywhere."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def fit(config: Config, tensors: Tensors) -> Model:
    """The network of a configuration, without memory, if its parameters have just these names and shapes."""
    with torch.device("meta"):
        model = build(config)
    expected = model.state_dict()
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ModelError(f"the file lacks the tensor {missing[0]!r}{_more(missing)}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise ModelError(f"the file has a tensor this model has no place for: {unknown[0]!r}{_more(unknown)}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            wanted = tuple(expected[name].shape)
            raise ModelError(f"tensor {name!r} has shape {tuple(tensor.shape)}, and this architecture needs {wanted}")
    return model


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
