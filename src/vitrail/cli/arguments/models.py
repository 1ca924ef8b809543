"""Arguments of the commands on model files: info, list, convert, push, serve."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from vitrail.cli.options import (
    Device,
    ImageSize,
    Model,
    Number,
    OptionalFile,
    OptionalNumber,
    Output,
    OutputOptions,
    Preprocess,
)
from vitrail.config import Precision, Resample

TargetFormat = Literal["vitrail", "google", "timm", "transformers", "torchvision", "onnx", "torch-export", "openvino"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfoArguments:
    """Show a model's architecture, cost, preprocessing, labels, origin and warnings."""

    model: Model
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListArguments:
    """Show the presets with their size and cost, and the formats that are read and written; or the recipes."""

    kind: Annotated[Literal["models", "recipes"], Positional] = "models"
    """models or recipes."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertArguments:
    """Write a model in another format, or adapted to another task. Every change is listed."""

    source: Annotated[str, Positional, arg(metavar="SRC")]
    """A file or folder of any known format, hf:ORG/NAME[@REVISION], timm:NAME, or a preset such as b16."""
    destination: Annotated[Path, Positional, arg(metavar="DST")]
    """The file or folder to write."""
    to: TargetFormat = "vitrail"
    """The format. timm and transformers write folders, timm also a bare .safetensors, torchvision a .pth, google an
    .npz. For other runtimes: onnx an .onnx, torch-export a .pt2, openvino an .xml and a .bin."""
    classes: OptionalNumber = None
    """Replace the head by a zero head with so many classes."""
    labels: Annotated[str | None, arg(metavar="NAMES")] = None
    """Class names: imagenet1k, or a text file with one per line."""
    image_size: ImageSize = None
    """New resolution, one side or height and width; positions are resampled."""
    patch: Annotated[int | None, arg(metavar="SIDE")] = None
    """New patch side; kernels are resized as in FlexiViT. A hybrid counts cells of its feature map."""
    channels: OptionalNumber = None
    """New number of input channels."""
    resample: Resample | None = None
    """How to resample positions. Omitted: as the origin of the weights does."""
    preprocess: Preprocess = None
    int8: bool = False
    """For onnx: store the weights in 8 bits, a third of the size; --measure shows what that changes."""
    measure: Annotated[str | None, arg(metavar="DATA")] = None
    """Images on which lower precisions are compared with float32 on this CPU: a folder, a .csv or .jsonl, shards,
    hf:ORG/NAME, ... A vitrail file then records the fastest one whose predictions agree."""
    overwrite: bool = False
    """Replace the destination if it exists."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PushArguments:
    """Upload a model to the Hugging Face Hub: the transformers folder, the native file and a model card."""

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
    """Serve models over HTTP until interrupted. Accepted requests are still answered, and the exit code is 0."""

    models: Annotated[tuple[str, ...], Positional, arg(metavar="MODEL")]
    """Files or folders of any known format, hf:ORG/NAME, timm:NAME, or presets; the page compares two."""
    host: Annotated[str, arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; other machines reach it only at 0.0.0.0 or an address of the network."""
    port: Number = 8000
    """Port to listen on; 0 takes any free one and prints it."""
    host_name: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="NAME")] = ()
    """A name of this server, as in a browser's address; may be repeated. Requests to another host are refused.
    Omitted: a server on loopback answers to the names of loopback alone."""
    batch: Number = 32
    """Images per batch, at most."""
    queue: Number = 64
    """Accepted images of a model that may wait for an answer; beyond that the response is 503."""
    deadline: Annotated[float, arg(metavar="SECONDS")] = 1.0
    """Seconds that an image may wait; where it would wait longer the response is 503, at once."""
    max_megabytes: Annotated[float, arg(metavar="N")] = 20.0
    """Larger requests are refused before they are read."""
    max_megapixels: Annotated[float, arg(metavar="N")] = 50.0
    """Larger images are refused before they are decoded."""
    api_key_file: OptionalFile = None
    """A file with the key that requests must carry; or the environment variable VITRAIL_API_KEY."""
    device: Device = None
    precision: Precision | None = None
    """Precision of the computation. Omitted: float32, or on a CPU what the model's file records as faster there with
    the same predictions."""
