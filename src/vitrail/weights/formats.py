"""The table of weights formats: how each is named on disk, recognized, read and written.

To add a format, write its module and add its name and row here. The module has the functions of `FormatModule`. It is
imported when it is first needed, so the table itself needs no torch.
"""

import dataclasses
import importlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast, get_args

from vitrail import files
from vitrail.errors import ModelError, UsageError

if TYPE_CHECKING:
    from vitrail.weights.tensor_files import ModelFiles
    from vitrail.weights.trained import Trained

WeightsFormat = Literal["vitrail", "google", "timm", "transformers", "open_clip", "torchvision", "original"]
TORCH_SUFFIXES = (".pt", ".pth", ".bin")  # pickles
TENSOR_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILES = ("adapter_model.safetensors", "adapter_model.bin")  # of PEFT: the first that exists
OPEN_CLIP_CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILES = {  # of a folder, by the config beside them: the first pair that exists is read
    CONFIG_FILE: ("model.safetensors", "pytorch_model.bin"),
    OPEN_CLIP_CONFIG_FILE: ("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
}
ALL_WEIGHTS_FILES = tuple(name for names in WEIGHTS_FILES.values() for name in names)
SHARD_NAME = re.compile(r"model-\d{5}-of-(00\d{3})\.safetensors")  # a part of a large model.safetensors
NATIVE_FILE = "model-vitrail.safetensors"  # what `vitrail push` uploads beside a folder that transformers reads


class FormatModule(Protocol):
    """What the module of a format provides."""

    def recognize(self, model_files: "ModelFiles") -> bool:
        """Whether a file without a config.json is of this format."""

    def read(self, model_files: "ModelFiles") -> "Trained":
        """Read the model, or raise a ModelError that says what is wrong."""

    def write(self, trained: "Trained", path: Path) -> list[str]:
        """Write the model to `path`; return notes on what the format cannot hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How one format is kept on disk."""

    module: str
    """The module that recognizes, reads and writes it."""
    suffixes: tuple[str, ...] = ()
    """The suffixes of its single files, the usual one first."""
    config_key: str | None = None
    """The key by which its config is recognized; None for a format without folders."""
    side_files: tuple[str, ...] = ()
    """What its folders hold beside the weights."""
    is_written: bool = True


FORMATS: dict[WeightsFormat, Format] = {  # in the order in which they are tried
    "vitrail": Format(module="vitrail.weights.native", suffixes=(".safetensors",)),
    "google": Format(module="vitrail.weights.google", suffixes=(".npz",)),
    "transformers": Format(
        module="vitrail.weights.transformers",
        config_key="model_type",
        side_files=(CONFIG_FILE, "preprocessor_config.json", "processor_config.json", "README.md"),
    ),
    "original": Format(module="vitrail.weights.original", suffixes=(".pth", ".safetensors", ".pt", ".bin")),
    "timm": Format(
        module="vitrail.weights.timm",
        suffixes=TENSOR_SUFFIXES,
        config_key="architecture",
        side_files=(CONFIG_FILE, "README.md"),
    ),
    "open_clip": Format(
        module="vitrail.weights.open_clip",
        config_key="model_cfg",
        side_files=(OPEN_CLIP_CONFIG_FILE, "README.md"),
        is_written=False,
    ),
    "torchvision": Format(module="vitrail.weights.torchvision", suffixes=(".pth", ".safetensors", ".pt", ".bin")),
}
FILE_SUFFIXES = tuple(dict.fromkeys(suffix for row in FORMATS.values() for suffix in row.suffixes))
WRITTEN_FORMATS = tuple(name for name, row in FORMATS.items() if row.is_written)
SIDE_FILES = tuple(dict.fromkeys(name for row in FORMATS.values() for name in row.side_files))
CODELESS_SUFFIXES = tuple(suffix for suffix in FILE_SUFFIXES if suffix not in TORCH_SUFFIXES)


def import_format(name: WeightsFormat) -> FormatModule:
    """Import the module of a format."""
    return cast(FormatModule, importlib.import_module(FORMATS[name].module))


def recognize_format(model_files: "ModelFiles") -> WeightsFormat:
    """Find the format of a model's files: by config.json where there is one, otherwise by the tensors' names."""
    for name, row in FORMATS.items():
        if model_files.config is None:
            recognized = import_format(name).recognize(model_files)
        else:
            recognized = row.config_key in model_files.config
        if recognized:
            return name
    if model_files.config is not None:
        keys = [f"{row.config_key} ({name})" for name, row in FORMATS.items() if row.config_key]
        raise ModelError(f"{model_files.path / CONFIG_FILE} is of no known format: it has neither {' nor '.join(keys)}")
    tensors = ", ".join(sorted(model_files.tensors)[:3]) or "no tensors"
    raise ModelError(f"{model_files.path} is of no known format ({', '.join(FORMATS)}); it holds {tensors}, ...")


def choose_model_files(names: Collection[str], where: str) -> list[str]:
    """Choose the files of a folder or repository that make up its model, the weights last."""
    beside = [name for name in SIDE_FILES if name in names]
    card = [name for name in beside if name == "README.md"]
    if NATIVE_FILE in names:  # it loses nothing, and the folder that was pushed with it does
        return [*card, NATIVE_FILE]
    configs = [name for name in WEIGHTS_FILES if name in names]
    for config in configs:
        if weights := next(([name] for name in WEIGHTS_FILES[config] if name in names), _find_shards(names, config)):
            return [name for name in beside if name == config or name not in WEIGHTS_FILES] + weights
    if configs:
        expected = " nor ".join(WEIGHTS_FILES[configs[0]])
        raise ModelError(f"{where} has a {configs[0]} but no weights: neither {expected}")
    if ADAPTER_CONFIG_FILE in names:
        raise ModelError(
            f"{where} is an adapter, which is no model without its base: vitrail convert BASE OUT.safetensors --adapter"
            f" {where}"
        )
    single = sorted(name for name in names if name.endswith(CODELESS_SUFFIXES) and "/" not in name and "\\" not in name)
    if len(single) != 1:
        weights_files = f"{len(single)} weights files ({', '.join(single[:3])})" if single else "no weights file"
        raise ModelError(
            f"{where} has no {CONFIG_FILE} and {weights_files}, where one {' or '.join(CODELESS_SUFFIXES)} is read:"
            " give the file itself, downloaded with `hf download` where it is on the Hub"
        )
    return card + single


def _find_shards(names: Collection[str], config: str) -> list[str]:
    """Find a whole set of shards beside a config.json; empty where there is none."""
    first = next((name for name in sorted(names) if SHARD_NAME.fullmatch(name)), "")
    shards = list_shards(first) if config == CONFIG_FILE and first else []
    return shards if all(name in names for name in shards) else []


def list_shards(name: str) -> list[str]:
    """List the names of all shards beside the one called `name`; any other file is alone."""
    match = SHARD_NAME.fullmatch(name)
    return [f"model-{i:05}-of-{match[1]}.safetensors" for i in range(1, int(match[1]) + 1)] if match else [name]


def find_config_file(names: Collection[str]) -> str | None:
    """Find the config among the chosen files of a model; None for a single file, which has none."""
    return next((name for name in WEIGHTS_FILES if name in names), None)


def choose_adapter_files(names: Collection[str], where: str) -> list[str]:
    """Choose the files of a folder or repository that make up its adapter, the weights last."""
    weights = [name for name in ADAPTER_WEIGHTS_FILES if name in names][:1]
    if ADAPTER_CONFIG_FILE not in names or not weights:
        needed = f"{ADAPTER_CONFIG_FILE} and {' or '.join(ADAPTER_WEIGHTS_FILES)}"
        raise ModelError(f"{where} is no adapter: PEFT's save_pretrained writes {needed}")
    return [ADAPTER_CONFIG_FILE, *weights]


def check_adapter_destination(path: Path, *, overwrite: bool = False) -> None:
    """Refuse a name that is taken or is a file's, and a folder that holds anything but an adapter."""
    files.check_path_free(path, overwrite=overwrite)
    if path.suffix in FILE_SUFFIXES:
        raise UsageError(f"an adapter is a folder: call it {path.with_suffix('')}")
    _check_folder_content(path, {ADAPTER_CONFIG_FILE, *ADAPTER_WEIGHTS_FILES, "README.md"}, "adapter")


def check_destination(path: Path, format: WeightsFormat, *, overwrite: bool = False) -> None:  # noqa: A002
    """Refuse a name that does not fit the format or is taken, and a folder that holds anything but a model."""
    if format not in FORMATS:
        raise UsageError(f"there is no format {format!r}; choose one of {', '.join(get_args(WeightsFormat))}")
    files.check_path_free(path, overwrite=overwrite)
    if not _fits_name(path, format):
        row = FORMATS[format]
        kinds = ["a folder"] if row.side_files else []
        kinds += [f"one {' or '.join(row.suffixes)} file"] if row.suffixes else []
        better = path.with_suffix("" if row.side_files else row.suffixes[0])
        others = [f"--to {name}" for name in WRITTEN_FORMATS if _fits_name(path, name)]
        alternative = f", or say {' or '.join(others)}" if others else ""
        raise UsageError(f"a {format} model is {' or '.join(kinds)}: call it {better}{alternative}")
    _check_folder_content(path, {*SIDE_FILES, *ALL_WEIGHTS_FILES}, "model")


def _check_folder_content(path: Path, expected: Collection[str], kind: str) -> None:
    """Refuse to overwrite a folder that holds other files than those of a model or adapter."""
    if path.is_dir() and (others := sorted(entry.name for entry in path.iterdir() if entry.name not in expected)):
        raise UsageError(
            f"{path} is a folder that holds {others[0]!r} and is no {kind} to overwrite; choose another name"
        )


def _fits_name(path: Path, format: WeightsFormat) -> bool:  # noqa: A002
    """Whether a format writes a file or folder of this name; a folder must not be named like a file of weights."""
    row = FORMATS[format]
    return path.suffix in row.suffixes or (bool(row.side_files) and path.suffix not in FILE_SUFFIXES)
