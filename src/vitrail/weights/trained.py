"""A model with everything that is needed to use it: preprocessing, labels, and where it came from."""

import dataclasses
import functools
import importlib.resources
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitrail import presets
from vitrail.config import ModelConfig, PreprocessConfig, ViTConfig
from vitrail.config.model import check_patches, expand_image_size
from vitrail.errors import ModelError, UsageError
from vitrail.formatting import pluralize
from vitrail.model.initialize import initialize_weights
from vitrail.model.vit import Model, ViT, build_model
from vitrail.weights.formats import WeightsFormat
from vitrail.weights.precision_measurements import PrecisionMeasurement
from vitrail.weights.tensor_files import ALIGNMENT

Tensors = Mapping[str, Tensor]
__all__ = ["Origin", "Trained"]

_SHOWN_LABELS = 3
TEMPERATURE_RANGE = (1e-3, 1e3)  # far beyond what is ever fitted; logits over less leave float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where weights came from. A fact that the source does not state is None; a guess is listed.

    `Trained.origin` is one.

        origin = vitrail.load("model.safetensors").origin
        print(origin.name, origin.license, origin.changes)
    """

    format: Literal[WeightsFormat, "random"]
    name: str
    sha256: str | None = None
    license: str | None = None
    assumptions: tuple[str, ...] = ()
    """What the source did not state and the reader had to choose, a sentence each."""
    changes: tuple[str, ...] = ()
    """What was changed in the weights since, a sentence each."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model, its preprocessing and the names of its classes; None where they are unknown.

    `vitrail.load` returns one, and whatever takes a model takes one.

        model = vitrail.create("ti16", image_size=32, num_classes=2)
        preprocess = vitrail.PreprocessConfig(size=(32, 32), resize=(36,))
        vitrail.save(vitrail.Trained(model, preprocess, ("cat", "dog")), "random.safetensors")
    """

    model: Model
    preprocess: PreprocessConfig | None = None
    labels: tuple[str, ...] | None = None
    origin: Origin = Origin(format="vitrail", name="in-memory model")
    temperature: float = 1.0
    """The divisor of logits before they become probabilities, fitted on validation images (Guo et al. 2017)."""
    multi_label: bool = False
    """Whether an image may have several labels; each class then has its own probability."""
    threshold: float = 0.0
    """The probability below which a prediction is "unsure", chosen on validation images; 0 for never."""
    label_thresholds: tuple[float, ...] = ()
    """The probability above which each label of a multi-label model is predicted, one a class, chosen on validation
    images; empty where none were chosen, and one half serves for all."""
    precision_measurements: tuple[PrecisionMeasurement, ...] = ()
    """What these weights lose and gain in lower precisions, measured on validation images."""
    activation_ranges: tuple[float, ...] = ()
    """Least and greatest input of each product on those images, six pairs a block, for runtimes with fixed scales."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, Model):
            raise UsageError(f"a Trained holds a model of vitrail, not {type(self.model).__name__}")
        if not TEMPERATURE_RANGE[0] <= self.temperature <= TEMPERATURE_RANGE[1]:
            raise UsageError(
                f"temperature is {self.temperature}; it must be from {TEMPERATURE_RANGE[0]} to {TEMPERATURE_RANGE[1]}"
            )
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold is {self.threshold}; it must be a probability")
        config = self.model.config
        if self.label_thresholds:
            self._check_label_thresholds()
        if self.activation_ranges:
            self._check_activation_ranges()
        if self.labels is not None and len(self.labels) != config.classes:
            raise UsageError(
                f"{pluralize(len(self.labels), 'label')} given for a head of {pluralize(config.classes, 'class')}"
            )
        if self.preprocess is not None and len(self.preprocess.mean) != config.channels:
            channels = pluralize(len(self.preprocess.mean), "channel")
            raise UsageError(f"the preprocessing has {channels} and the model {config.channels}")
        if self.preprocess is not None and isinstance(config, ViTConfig):
            check_patches(self.preprocess.size, config.stride, drop_remainder=config.drop_remainder)

    def __repr__(self) -> str:
        config, labels = self.model.config, self.labels
        shape = f" of width {config.width} and depth {config.depth}" if isinstance(config, ViTConfig) else ""
        size = " x ".join(map(str, config.image_size))
        head = pluralize(config.classes, "class") if config.classes else "no head"
        if labels:
            head += f": {', '.join(labels[:_SHOWN_LABELS])}{', ...' if len(labels) > _SHOWN_LABELS else ''}"
        return f"Trained({self.origin.name!r}, {type(self.model).__name__}{shape}, {size} pixels, {head})"

    def _check_label_thresholds(self) -> None:
        if not self.multi_label:
            raise UsageError("label_thresholds are of a multi-label model, and this one predicts one label an image")
        classes = self.model.config.classes
        if len(self.label_thresholds) != classes:
            raise UsageError(
                f"{pluralize(len(self.label_thresholds), 'label threshold')} given for a head of"
                f" {pluralize(classes, 'class')}"
            )
        if (wrong := next((value for value in self.label_thresholds if not 0 <= value <= 1), None)) is not None:
            raise UsageError(f"a label threshold is {wrong}; it must be a probability")

    def _check_activation_ranges(self) -> None:
        expected = 12 * self.model.config.depth if isinstance(self.model, ViT) else 0
        if len(self.activation_ranges) != expected:
            raise UsageError(f"{len(self.activation_ranges)} ends of ranges given for a model that has {expected}")
        for least, greatest in zip(self.activation_ranges[::2], self.activation_ranges[1::2], strict=True):
            if not -math.inf < least <= greatest < math.inf:
                raise UsageError(f"a range is from {least} to {greatest}; both must be finite, in rising order")


def require_trained(trained: Trained) -> Trained:
    """Return `trained`, or refuse a bare model, which states neither its preprocessing nor its classes."""
    if not isinstance(trained, Trained):
        kind = type(trained).__name__
        advice = "vitrail.Trained(model, preprocess, labels) makes one"
        raise UsageError(f"give a vitrail.Trained, not {kind}: {'run.trained is one' if kind == 'Run' else advice}")
    return trained


def require_preprocess(trained: Trained, *, name: str = "the model") -> PreprocessConfig:
    """Return how images are prepared for a model called `name`, or raise an error that says how to state it."""
    preprocess = require_trained(trained).preprocess
    if preprocess is None:
        raise UsageError(
            f"{name} does not say how images must be prepared. Name it once:"
            " vitrail convert MODEL OUT.safetensors --preprocess imagenet (or inception, torchvision)."
            " Commands that have --preprocess take it directly"
        )
    return preprocess


def is_label_predicted(probabilities: Tensor, label_thresholds: Sequence[float] = ()) -> Tensor:
    """(B, L) -> bool (B, L): whether each label's probability is above its threshold, or without any above one half."""
    return probabilities > (probabilities.new_tensor(label_thresholds) if label_thresholds else 0.5)


def logits_to_probabilities(logits: Tensor, temperature: float = 1.0, multi_label: bool = False) -> Tensor:
    """(B, L) -> (B, L): the softmax of logits over temperature, or of a multi-label model each one's sigmoid."""
    if temperature != 1:
        logits = logits / temperature
    return logits.sigmoid() if multi_label else logits.softmax(dim=-1)


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
    """Build a preset with random weights, ready to train.

    `settings` are fields of its config, such as registers=4.

        model = vitrail.create("s16", num_classes=10, image_size=32, patch=4)
        logits = model(torch.zeros(1, 3, 32, 32))
    """
    model = create_random(name, image_size=image_size, num_classes=num_classes, seed=seed, **settings).model
    if isinstance(model, ViT):
        model.set_regularization(dropout=dropout, stochastic_depth=stochastic_depth)
    elif dropout or stochastic_depth:
        raise UsageError(f"{name} is a ResNet, which has neither dropout nor stochastic depth")
    return model.train()


def create_random(
    name: str,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int = 1000,
    seed: int = 0,
    head_bias: float = 0.0,
    mimetic: bool = False,
    **settings: Any,
) -> Trained:
    """Build a preset with random weights and the paper's preprocessing, at 224 x 224 by default."""
    if "classes" in settings:
        raise UsageError("the number of classes is called num_classes here")
    if image_size is not None:
        settings["image_size"] = expand_image_size(image_size)
    config = presets.get_preset_config(name, classes=num_classes, **settings)
    with torch.device("meta"):  # torch's own initialization would be overwritten
        model = build_model(config)
    model = model.to_empty(device="cpu")
    initialize_weights(model, torch.Generator().manual_seed(seed), head_bias=head_bias, mimetic=mimetic).eval()
    preprocess = presets.build_preprocess_config("inception", config.image_size, config.channels)
    origin = Origin(format="random", name=f"{name}, seed {seed}")
    return Trained(model=model, preprocess=preprocess, labels=None, origin=origin)


def assemble_model(config: ModelConfig, tensors: Tensors) -> Model:
    """Build the model whose parameters are exactly `tensors`, in float32; another name, shape or a NaN is an error."""
    model = build_matching_model(config, tensors)
    state_dict = {name: _align_tensor(tensor.to(torch.float32).contiguous()) for name, tensor in tensors.items()}
    if broken := sorted(name for name, tensor in state_dict.items() if not torch.isfinite(tensor).all()):
        raise ModelError(f"NaN or infinity in the weights of {broken[0]!r}{_format_more(broken)}")
    model.load_state_dict(state_dict, assign=True)
    return model.requires_grad_(True).eval()


def _align_tensor(tensor: Tensor) -> Tensor:
    """Copy a tensor to an aligned address if it has none: a mapped file has tensors anywhere."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def build_matching_model(config: ModelConfig, tensors: Tensors) -> Model:
    """Build the network of a config without memory; refuse tensors of other names or shapes."""
    with torch.device("meta"):
        model = build_model(config)
    expected = model.state_dict()
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ModelError(f"the file lacks the tensor {missing[0]!r}{_format_more(missing)}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise ModelError(f"the file has a tensor this model has no place for: {unknown[0]!r}{_format_more(unknown)}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            shape = tuple(expected[name].shape)
            raise ModelError(f"tensor {name!r} has shape {tuple(tensor.shape)}, and this architecture needs {shape}")
    return model


def _format_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


class ImageNetClass(NamedTuple):
    """A class of ImageNet-1k."""

    wordnet_id: str
    name: str


@functools.cache
def load_imagenet1k_classes() -> tuple[ImageNetClass, ...]:
    """The 1,000 ImageNet classes in the order of every published head."""
    text = importlib.resources.files("vitrail.weights").joinpath("imagenet1k.tsv").read_text(encoding="utf-8")
    return tuple(ImageNetClass(*line.split("\t")) for line in text.splitlines())


def list_imagenet1k_labels() -> tuple[str, ...]:
    """The names of the 1,000 ImageNet classes."""
    return tuple(entry.name for entry in load_imagenet1k_classes())


def resolve_labels(option: str) -> tuple[str, ...]:
    """The labels that the option --labels names: `imagenet1k`, or the lines of a text file."""
    if option == "imagenet1k":
        return list_imagenet1k_labels()
    path = Path(option)
    if not path.is_file():
        raise UsageError(f"labels {str(path)!r} are neither 'imagenet1k' nor a text file with a name on each line")
    try:
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text with a name on each line") from None
