"""Arguments of the commands on models and recipes: info, list, recipe show, convert, zero-shot, push, serve."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from vitrail.cli.options import (
    COMPUTE,
    Device,
    Group,
    ImageSize,
    Model,
    Number,
    OptionalDecimal,
    OptionalFile,
    OptionalFolder,
    OptionalNumber,
    Output,
    OutputOptions,
    Preprocess,
    PretrainedModel,
)
from vitrail.config import Precision, Resample

TargetFormat = Literal[
    "vitrail", "google", "timm", "transformers", "torchvision", "original", "onnx", "torch-export", "openvino",
    "peft", "peft-v4", "peft-timm",
]  # fmt: skip
_ADAPTATION, _PRECISION = Group("adapt the model"), Group("lower precision")
_TEXTS = Group("texts")
_ACCESS, _LIMITS = Group("access"), Group("limits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfoArguments:
    """Show a model's architecture, size, cost, preprocessing, labels and origin."""

    model: Model
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListArguments:
    """List the model presets and the weight formats, or the recipes."""

    kind: Annotated[Literal["models", "recipes"], Positional, arg(metavar="models|recipes")] = "models"
    """What to list."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowRecipeArguments:
    """Print a recipe as a TOML file, to edit and train with."""

    recipe: Annotated[str, Positional, arg(metavar="RECIPE")]
    """A recipe that `vitrail list recipes` shows; default, paper or bit for fine-tuning; or a .toml or .json file."""
    images: Number = 1000
    """Number of training images, by which the recipes for fine-tuning choose their length."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertArguments:
    """Convert a model to another format, or adapt it to another task.

    Every change is listed.
    """

    source: Annotated[str, Positional, arg(metavar="SRC")]
    """A file or folder of any known format, builtin, hf:ORG/NAME[@REVISION], timm:NAME, or a preset such as b16."""
    destination: Annotated[Path, Positional, arg(metavar="DST")]
    """The file or folder to write."""
    to: Annotated[TargetFormat | None, arg(metavar="FORMAT")] = None
    """Output format, by default vitrail, or the runtime of DST's suffix. timm and transformers write folders, timm also
    a bare .safetensors, torchvision a .pth, google an .npz. For other runtimes: onnx writes an .onnx, torch-export a
    .pt2, openvino an .xml and a .bin. Where SRC is an adapter, peft, peft-v4 and peft-timm write it with the names of
    transformers from 5.9 on, of those before, and of timm."""
    adapter: OptionalFolder = None
    """Merge a LoRA adapter into the model: a folder of PEFT, hf:ORG/NAME, or the weights/adapter of a run."""
    classes: Annotated[OptionalNumber, _ADAPTATION] = None
    """Replace the head with a zero-initialized one of N classes."""
    labels: Annotated[str | None, _ADAPTATION, arg(metavar="NAMES")] = None
    """Class names: imagenet1k, or a text file with one per line."""
    image_size: Annotated[ImageSize, _ADAPTATION] = None
    """New resolution, one side or height and width; positions are resampled."""
    patch: Annotated[int | None, _ADAPTATION, arg(metavar="SIDE")] = None
    """New patch side; kernels are resized as in FlexiViT. A hybrid counts cells of its feature map."""
    channels: Annotated[OptionalNumber, _ADAPTATION] = None
    """New number of input channels."""
    resample: Annotated[Resample | None, _ADAPTATION, arg(metavar="METHOD")] = None
    """How to resample positions. Default: as the source of the weights does."""
    preprocess: Annotated[Preprocess, _ADAPTATION] = None
    int8: Annotated[bool, _PRECISION] = False
    """For onnx: store the weights in 8 bits, a third of the size; --measure shows how the predictions change."""
    float16: Annotated[bool, _PRECISION] = False
    """For vitrail: store the weights in 16 bits, rounded to nearest, half the size; they are float32 again when loaded.
    For onnx: matrix products in float16, half the size, for GPUs. Refused where predictions on the images of --measure
    change."""
    measure: Annotated[str | None, _PRECISION, arg(metavar="DATA")] = None
    """Images on which to compare lower precisions with float32 on this CPU: a folder, a .csv or .jsonl, shards,
    hf:ORG/NAME, ... A vitrail file then records the fastest one whose predictions agree."""
    overwrite: bool = False
    """Replace the destination if it exists."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShotArguments:
    """Make a classifier of any labels from the image tower of a CLIP or SigLIP.

    Vectors of the labels become its head, so nothing is trained. The result is an ordinary model, which needs no text
    tower any more.
    """

    model: PretrainedModel
    labels: Annotated[Path, Positional, arg(metavar="LABELS")]
    """A text file with one label per line."""
    out: OptionalFile = None
    """The file to write. Default: the name of LABELS with .safetensors, in the current folder."""
    overwrite: bool = False
    """Replace the file if it exists."""
    templates: Annotated[tuple[str, ...], _TEXTS, arg(metavar="TEXT...")] = ()
    """Sentences with {} in place of the label, or a text file with one per line; a label's vector is the mean over
    them. Default: 'a photo of a {}.'"""
    text: Annotated[str | None, _TEXTS, arg(metavar="MODEL")] = None
    """The whole CLIP or SigLIP whose text tower reads the labels: a folder of transformers (extra `zero-shot`) or
    open_clip, or hf:ORG/NAME. Default: MODEL."""
    text_vectors: Annotated[OptionalFile, _TEXTS] = None
    """Vectors of the labels instead, in their order: a .npy or .safetensors file."""
    scale: Annotated[OptionalDecimal, _TEXTS] = None
    """The factor of cosines, exp(logit_scale). Default: the model's own."""
    bias: Annotated[OptionalDecimal, _TEXTS] = None
    """What is added to each logit; with it each label has a probability of its own, as SigLIP has. Default: the model's
    own."""
    device: Annotated[Device, COMPUTE] = None
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PushArguments:
    """Upload a model to the Hugging Face Hub.

    Uploads the transformers folder, the native file and a model card.
    """

    run: Annotated[str, Positional, arg(metavar="RUN")]
    """A run folder, of which weights/best.safetensors and README.md are uploaded, or any MODEL."""
    target: Annotated[str, Positional, arg(metavar="hf:ORG/NAME")]
    """The repository, created if it is missing; its card and model files are replaced."""
    private: bool = False
    """Create a missing repository as private, and refuse to push to a public one."""
    dry_run: bool = False
    """Show what would be uploaded, without the network."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """Serve models over HTTP, with a web page to try them.

    The server runs until interrupted. Requests accepted by then are still answered, and the exit code is 0.
    """

    models: Annotated[tuple[str, ...], Positional, arg(metavar="MODEL")]
    """Files or folders of any known format, builtin, hf:ORG/NAME, timm:NAME, or presets; the page compares two."""
    host: Annotated[str, arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; other machines reach it only at 0.0.0.0 or an address of the network."""
    port: Number = 8000
    """Port to listen on; 0 takes any free one and prints it."""
    host_name: Annotated[tuple[str, ...], UseAppendAction, _ACCESS, arg(metavar="NAME")] = ()
    """A name by which browsers reach this server; may be repeated. Requests to another host are refused. Default: a
    server on loopback accepts only the names of loopback."""
    batch: Annotated[Number, _LIMITS] = 32
    """Largest batch of images."""
    queue: Annotated[Number, _LIMITS] = 64
    """How many images may wait for each model; beyond that the response is 503."""
    deadline: Annotated[float, _LIMITS, arg(metavar="SECONDS")] = 1.0
    """How long an image may wait; if it would wait longer, the response is 503 at once."""
    max_megabytes: Annotated[float, _LIMITS, arg(metavar="N")] = 20.0
    """Larger requests are refused before they are read."""
    max_megapixels: Annotated[float, _LIMITS, arg(metavar="N")] = 50.0
    """Larger images are refused before they are decoded."""
    index: Annotated[Path | None, arg(metavar="INDEX")] = None
    """An index of a served model's features, which `vitrail index` wrote: the page then shows similar images."""
    image_root: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """The folder below which the images of the index lie, to show thumbnails; the names in the index are paths below
    it. Other files are never read."""
    api_key_file: Annotated[OptionalFile, _ACCESS] = None
    """A file with the key that requests must carry. Default: the environment variable VITRAIL_API_KEY, if set."""
    device: Annotated[Device, COMPUTE] = None
    precision: Annotated[Precision | None, COMPUTE] = None
    """Precision of the computation. Default: float32, or on a CPU the faster precision that the model's file records as
    giving the same predictions."""
