"""Any MODEL to a `Trained`, and back to any format: a preset name, a file or a folder."""

import os
from pathlib import Path
from typing import Literal, get_args

from vitrail import files, presets
from vitrail.errors import ModelError, UsageError
from vitrail.weights import (
    foreign_format,
    google,
    hub,
    model_license,
    native,
    tensor_files,
    timm,
    torchvision,
    transformers,
)
from vitrail.weights.trained import (
    Origin,
    Tensors,
    Trained,
    assemble_model,
    build_matching_model,
    create_random,
    require_trained,
)

WeightsFormat = Literal["vitrail", "google", "timm", "transformers", "torchvision"]
FOLDER_FILES = {*hub.WEIGHTS_FILES, "config.json", "preprocessor_config.json", "README.md"}


def find_model_path(model: str | Path) -> Path | None:
    """The file or folder that MODEL means, or None where it is a name.

    A path wins over a preset's name only when it contains a separator or exists as a file. A run's folder means its
    best weights.
    """
    path = Path(model)
    named = isinstance(model, str) and path.name == model and len(model) <= 255
    if named and not path.is_file() and (presets.has_preset(str(model)) or not path.is_dir()):
        return None
    best = path / "weights" / "best.safetensors"
    return best if os.path.isfile(best) else path  # noqa: PTH113, of a name too long for a path it says no


def load(model: str | Path) -> Trained:
    """The model of a MODEL, on the CPU, in eval mode.

    A file or folder of any known format, hf:ORG/NAME[@REVISION] or timm:NAME from the Hub, or a preset, which has
    random weights.
    """
    check_loadable(model)
    if isinstance(model, str) and hub.is_remote(model):
        fetched = hub.download_model(model)
        return hub.add_hub_origin(read_model(fetched.path), fetched)
    path, name = find_model_path(model), str(model)
    remote = hub.suggest_name(name)
    if path is not None:
        if remote and not path.parent.exists():
            raise ModelError(f"{name} does not exist; the Hub's model of that name is {remote}")
        return read_model(path)
    if remote:
        raise UsageError(f"no file or folder is called {name!r}; the Hub's model of that name is {remote}")
    if not presets.has_preset(name):
        raise UsageError(f"no file or folder is called {name!r}, and {presets.describe_unknown_preset(name)}")
    return create_random(name)


def check_loadable(model: str | Path) -> None:
    """Refuse timm's own networks, which only `evaluate` measures, before anything is read."""
    if isinstance(model, str) and model.startswith("timm-model:"):
        name = model.removeprefix("timm-model:")
        raise UsageError(
            f"{model} is timm's own network, which vitrail measures (`vitrail evaluate {model} DATA`) and cannot train"
            f" or take apart; timm:{name} reads its weights into vitrail's model, where that has the architecture"
        )


def is_preset(model: str) -> bool:
    """Whether MODEL names a preset, whose weights are random."""
    return not hub.is_remote(model) and find_model_path(model) is None and presets.has_preset(model)


def read_model(path: Path) -> Trained:
    """The model in a file or folder."""
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    try:
        return _read_folder(path) if path.is_dir() else _read_file(path)
    except UsageError as error:  # a setting in the file, not one of the user's
        raise ModelError(f"{path} is damaged: {error}") from error
    except ModelError as error:
        raise error if str(path) in str(error) else ModelError(f"{path}: {error}") from error


def is_native_file(path: Path) -> bool:
    """Whether a path is a file of vitrail's own format, which has room for everything that is known of a model."""
    return path.is_file() and path.suffix == ".safetensors" and native.can_read(tensor_files.read_tensors(path))


def _read_file(path: Path) -> Trained:
    if path.suffix == ".npz":
        return _read_npz(path)
    stored = tensor_files.read_tensors(path)
    if native.can_read(stored):
        return native.read(stored, path)
    if timm.can_read(stored.tensors):
        tensors = timm.rename_tensors(stored.tensors)
        return _build_trained("timm", path, path, tensors, timm.read_info(tensors, None, path))
    if torchvision.can_read(stored.tensors):
        tensors = torchvision.TENSOR_NAMES.rename_tensors(stored.tensors)
        return _build_trained("torchvision", path, path, tensors, torchvision.read_info(tensors, path))
    if transformers.can_read(stored.tensors):
        raise ModelError(f"{path} is a transformers file without its config.json; give the folder that holds both")
    names = ", ".join(sorted(stored.tensors)[:3]) or "no tensors"
    raise ModelError(f"{path} is no ViT of timm, transformers or torchvision; it holds {names}, ...")


def _read_npz(path: Path) -> Trained:
    """The model in Google's file: its headers first, and its arrays when every name and shape fits."""
    headers = tensor_files.read_npz_headers(path)
    names, left_out = google.select_image_model_arrays(headers)
    shapes = tensor_files.build_npz_meta_tensors(headers, names.values(), path)
    renamed = google.rename_arrays({name: shapes[full] for name, full in names.items()}, path)
    found = google.read_info(renamed, path)
    build_matching_model(found.config, renamed.tensors)
    arrays = tensor_files.read_npz(path, names.values())
    tensors = google.rename_arrays({name: arrays[full] for name, full in names.items()}, path).tensors
    return _build_trained("google", path, path, tensors, found, left_out)


def _read_folder(folder: Path) -> Trained:
    chosen = hub.choose_model_files([entry.name for entry in folder.iterdir() if entry.is_file()], str(folder))
    weights = folder / chosen[-1]
    if hub.CONFIG_FILE not in chosen:
        return _read_file(weights)
    settings = tensor_files.read_json(folder / hub.CONFIG_FILE)
    tensors = tensor_files.read_tensors(weights).tensors
    if "model_type" in settings:
        transformers.get_model_type(settings, folder)
        tensors, dropped = transformers.convert_tensors(tensors)
        processor = folder / "preprocessor_config.json"
        found = transformers.read_info(
            tensors, settings, tensor_files.read_json(processor) if processor.exists() else None, folder
        )
        return _build_trained("transformers", folder, weights, tensors, found, tuple(dropped))
    if "architecture" in settings:
        tensors = timm.rename_tensors(tensors)
        return _build_trained("timm", folder, weights, tensors, timm.read_info(tensors, settings, folder))
    raise ModelError(
        f"{folder / hub.CONFIG_FILE} is neither transformers' (no model_type) nor timm's (no architecture)"
    )


def _build_trained(
    format_name: Literal["google", "timm", "transformers", "torchvision"],
    path: Path,
    weights: Path,
    tensors: Tensors,
    info: foreign_format.ForeignModelInfo,
    changes: tuple[str, ...] = (),
) -> Trained:
    origin = Origin(
        format=format_name,
        name=path.resolve().name,
        sha256=files.compute_sha256(weights),
        license=info.license or model_license.read_license(path),
        assumptions=info.assumptions,
        changes=changes,
    )
    model = assemble_model(info.config, tensors)
    return Trained(model=model, preprocess=info.preprocess, labels=info.labels, origin=origin)


def save(
    trained: Trained,
    path: str | Path,
    format: WeightsFormat = "vitrail",
    *,
    overwrite: bool = False,  # noqa: A002
) -> list[str]:
    """Write `path` whole or not at all: a run killed here leaves the previous file as it was.

    Returns notes on what a foreign format could not take along. A model that it cannot hold is refused.
    """
    path = Path(path)
    check_destination(path, format, overwrite=overwrite)
    require_trained(trained)
    with files.write_atomically(path, overwrite=overwrite) as fresh:
        match format:
            case "vitrail":
                native.write(trained, fresh)
                return []
            case "google":
                notes = google.write(trained, fresh)
            case "timm":
                notes = timm.write(trained, fresh)
            case "transformers":
                notes = transformers.write(trained, fresh)
            case "torchvision":
                notes = torchvision.write(trained, fresh)
    if trained.multi_label:
        notes.append(f"several labels: {format} takes the classes as one question, and this model each as its own")
    if trained.temperature != 1:
        notes.append(
            f"temperature: {format} divides logits by 1 and not by {trained.temperature:g}, as this model does"
        )
    if trained.threshold:
        notes.append(
            f"threshold: {format} has no place for that of {trained.threshold:g}, below which this model is unsure"
        )
    return notes


def check_destination(path: Path, format: WeightsFormat, *, overwrite: bool = False) -> None:  # noqa: A002
    """Refuse a name that does not suit the format or is taken, and a folder that holds anything but a model."""
    if format not in get_args(WeightsFormat):
        raise UsageError(f"there is no format {format!r}; choose one of {', '.join(get_args(WeightsFormat))}")
    files.check_path_free(path, overwrite=overwrite)
    if format == "vitrail" and path.suffix != ".safetensors":
        other = {".npz": "google", ".pth": "torchvision", ".pt": "torchvision", "": "timm or transformers"}.get(
            path.suffix
        )
        meant = f", or say --to {other}" if other else ""
        raise UsageError(f"a vitrail model is one .safetensors file: call it {path.stem}.safetensors{meant}")
    if format == "google" and path.suffix != ".npz":
        raise UsageError(f"Google's models are .npz files; call it {path}.npz")
    if format in ("timm", "transformers") and path.suffix == ".npz":
        raise UsageError(f"{path} is the name of Google's kind of file; {format} writes a folder")
    if format == "torchvision" and path.suffix not in tensor_files.SUFFIXES:
        raise UsageError(f"a torchvision model is one file; call it {path}.pth or {path}.safetensors")
    if format == "transformers" and path.suffix in tensor_files.SUFFIXES:
        raise UsageError(f"transformers models are folders; {path} is the name of a file")
    if path.is_dir() and (others := sorted(entry.name for entry in path.iterdir() if entry.name not in FOLDER_FILES)):
        raise UsageError(
            f"{path} is a folder that holds {others[0]!r} and is no model to overwrite; choose another name"
        )
