"""Any MODEL to a `Trained`, and back to any format: a preset name, a file or a folder."""

import os
from pathlib import Path
from typing import Literal, get_args

from vitrail import files, presets
from vitrail.errors import ModelError, UsageError
from vitrail.weights import card, foreign, google, hub, native, storage, timm, torchvision, transformers
from vitrail.weights.trained import Origin, Tensors, Trained, assemble, fit, random, require

Format = Literal["vitrail", "google", "timm", "transformers", "torchvision"]
FOLDER = {*hub.WEIGHTS, "config.json", "preprocessor_config.json", "README.md"}


def locate(model: str | Path) -> Path | None:
    """The file or folder that MODEL means, or None where it is a name.

    A path wins over a preset's name only when it contains a separator or exists as a file. A run's folder means its
    best weights.
    """
    path = Path(model)
    named = isinstance(model, str) and path.name == model and len(model) <= 255
    if named and not path.is_file() and (presets.exists(str(model)) or not path.is_dir()):
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
        fetched = hub.fetch(model)
        return hub.credit(read(fetched.path), fetched)
    path, name = locate(model), str(model)
    remote = hub.suggest_name(name)
    if path is not None:
        if remote and not path.parent.exists():
            raise ModelError(f"{name} does not exist; the Hub's model of that name is {remote}")
        return read(path)
    if remote:
        raise UsageError(f"no file or folder is called {name!r}; the Hub's model of that name is {remote}")
    if not presets.exists(name):
        raise UsageError(f"no file or folder is called {name!r}, and {presets.unknown(name)}")
    return random(name)


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
    return not hub.is_remote(model) and locate(model) is None and presets.exists(model)


def read(path: Path) -> Trained:
    """The model in a file or folder."""
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    try:
        return _read_folder(path) if path.is_dir() else _read_file(path)
    except UsageError as error:  # a setting in the file, not one of the user's
        raise ModelError(f"{path} is damaged: {error}") from error
    except ModelError as error:
        raise error if str(path) in str(error) else ModelError(f"{path}: {error}") from error


def is_own(path: Path) -> bool:
    """Whether a path is a file of vitrail's own format, which has room for everything that is known of a model."""
    return path.is_file() and path.suffix == ".safetensors" and native.recognises(storage.read(path))


def _read_file(path: Path) -> Trained:
    if path.suffix == ".npz":
        return _read_npz(path)
    stored = storage.read(path)
    if native.recognises(stored):
        return native.read(stored, path)
    if timm.recognises(stored.tensors):
        tensors = timm.rename(stored.tensors)
        return _trained("timm", path, path, tensors, timm.read(tensors, None, path))
    if torchvision.recognises(stored.tensors):
        tensors = torchvision.NAMES.rename(stored.tensors)
        return _trained("torchvision", path, path, tensors, torchvision.read(tensors, path))
    if transformers.recognises(stored.tensors):
        raise ModelError(f"{path} is a transformers file without its config.json; give the folder that holds both")
    names = ", ".join(sorted(stored.tensors)[:3]) or "no tensors"
    raise ModelError(f"{path} is no ViT of timm, transformers or torchvision; it holds {names}, ...")


def _read_npz(path: Path) -> Trained:
    """The model in Google's file: its headers first, and its arrays when every name and shape fits."""
    headers = storage.npz_headers(path)
    names, left_out = google.image_model(headers)
    shapes = storage.npz_shapes(headers, names.values(), path)
    renamed = google.rename({name: shapes[full] for name, full in names.items()}, path)
    found = google.architecture(renamed, path)
    fit(found.config, renamed.tensors)
    arrays = storage.read_npz(path, names.values())
    tensors = google.rename({name: arrays[full] for name, full in names.items()}, path).tensors
    return _trained("google", path, path, tensors, found, left_out)


def _read_folder(folder: Path) -> Trained:
    chosen = hub.choose([entry.name for entry in folder.iterdir() if entry.is_file()], str(folder))
    weights = folder / chosen[-1]
    if hub.CONFIG not in chosen:
        return _read_file(weights)
    settings = storage.read_json(folder / hub.CONFIG)
    tensors = storage.read(weights).tensors
    if "model_type" in settings:
        transformers.model_type(settings, folder)
        tensors, dropped = transformers.rename(tensors)
        processor = folder / "preprocessor_config.json"
        found = transformers.read(
            tensors, settings, storage.read_json(processor) if processor.exists() else None, folder
        )
        return _trained("transformers", folder, weights, tensors, found, tuple(dropped))
    if "architecture" in settings:
        tensors = timm.rename(tensors)
        return _trained("timm", folder, weights, tensors, timm.read(tensors, settings, folder))
    raise ModelError(f"{folder / hub.CONFIG} is neither transformers' (no model_type) nor timm's (no architecture)")


def _trained(
    format_name: Literal["google", "timm", "transformers", "torchvision"],
    path: Path,
    weights: Path,
    tensors: Tensors,
    found: foreign.Read,
    changes: tuple[str, ...] = (),
) -> Trained:
    origin = Origin(
        format=format_name,
        name=path.resolve().name,
        sha256=files.sha256(weights),
        licence=found.licence or card.licence(path),
        assumptions=found.assumptions,
        changes=changes,
    )
    model = assemble(found.config, tensors)
    return Trained(model=model, preprocess=found.preprocess, labels=found.labels, origin=origin)


def save(trained: Trained, path: str | Path, format: Format = "vitrail", *, overwrite: bool = False) -> list[str]:  # noqa: A002
    """Write `path` whole or not at all: a run killed here leaves the previous file as it was.

    Returns notes on what a foreign format could not take along. A model that it cannot hold is refused.
    """
    path = Path(path)
    check_destination(path, format, overwrite=overwrite)
    require(trained)
    with files.replacing(path, overwrite=overwrite) as fresh:
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
    if trained.several:
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


def check_destination(path: Path, format: Format, *, overwrite: bool = False) -> None:  # noqa: A002
    """Refuse a name that does not suit the format or is taken, and a folder that holds anything but a model."""
    if format not in get_args(Format):
        raise UsageError(f"there is no format {format!r}; choose one of {', '.join(get_args(Format))}")
    files.check_free(path, overwrite=overwrite)
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
    if format == "torchvision" and path.suffix not in storage.SUFFIXES:
        raise UsageError(f"a torchvision model is one file; call it {path}.pth or {path}.safetensors")
    if format == "transformers" and path.suffix in storage.SUFFIXES:
        raise UsageError(f"transformers models are folders; {path} is the name of a file")
    if path.is_dir() and (others := sorted(entry.name for entry in path.iterdir() if entry.name not in FOLDER)):
        raise UsageError(
            f"{path} is a folder that holds {others[0]!r} and is no model to overwrite; choose another name"
        )
