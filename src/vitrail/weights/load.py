"""Load any MODEL as a `Trained`, and save one in any format."""

import difflib
import os
from pathlib import Path

from vitrail import files, presets
from vitrail.errors import ModelError, UsageError
from vitrail.weights import builtin, formats, hub, native, tensor_files
from vitrail.weights.formats import WeightsFormat, check_destination
from vitrail.weights.tensor_files import ModelFiles
from vitrail.weights.trained import Trained, create_random, require_trained


def find_model_path(model: str | Path) -> Path | None:
    """The file or folder that MODEL means, or None where it is a name.

    A path wins over `builtin` or a preset's name only when it contains a separator or exists as a file. A run's folder
    means its best weights.
    """
    path = Path(model)
    is_name = isinstance(model, str) and path.name == model and len(model) <= 255
    is_known = model == builtin.NAME or presets.has_preset(str(model))
    if is_name and not path.is_file() and (is_known or not path.is_dir()):
        return None
    best = path / "weights" / "best.safetensors"
    return best if os.path.isfile(best) else path  # noqa: PTH113, which is False for a name too long for a path


def load(model: str | Path, adapter: str | Path | None = None) -> Trained:
    """Load a MODEL on the CPU, in eval mode.

    A file or folder of any known format, `builtin`, hf:ORG/NAME[@REVISION] or timm:NAME from the Hub, or a preset,
    which has random weights. `adapter` is a LoRA adapter, of PEFT or of a run, which is merged into it: a folder or
    hf:ORG/NAME.

        trained = vitrail.load("model.safetensors")
        print(trained.model.config, trained.preprocess, trained.labels)
    """
    trained = _load_model(model)
    if adapter is None:
        return trained
    from vitrail.weights.peft_adapters import merge_adapter

    return merge_adapter(trained, adapter)


def _load_model(model: str | Path) -> Trained:
    check_loadable(model)
    if isinstance(model, str) and hub.is_remote(model):
        hub_model = hub.download_model(model)
        return hub.add_hub_origin(read_model(hub_model.path), hub_model)
    path, name = find_model_path(model), str(model)
    remote = hub.suggest_name(name)
    if path is not None:
        if remote and not path.parent.exists():
            raise ModelError(f"{name} does not exist; if you meant the Hub's model, give {remote}")
        return read_model(path)
    if name == builtin.NAME:
        return builtin.load_builtin()
    if remote:
        raise UsageError(f"no file or folder is called {name!r}; if you meant the Hub's model, give {remote}")
    if not presets.has_preset(name):
        raise UsageError(f"no file or folder is called {name!r}{_suggest_model(name)}")
    return create_random(name)


def _suggest_model(name: str) -> str:
    """The end of an error for a name that means nothing: the nearest file, folder or name."""
    if hint := files.suggest_path(Path(name)):
        return hint
    if difflib.get_close_matches(name.lower(), [builtin.NAME]):
        return f"; did you mean {builtin.NAME}?"
    return f", and {presets.describe_unknown_preset(name)}"


def describe_license(model: str | Path, trained: Trained) -> str | None:
    """A note on the license of somebody else's model, from the Hub or another library's files, if it states one."""
    path, license_name = find_model_path(model), trained.origin.license
    is_own = path is not None and is_native_file(path) and not hub.is_remote(str(model))
    return None if is_own or not license_name else f"license: {trained.origin.name} states {license_name}"


def check_loadable(model: str | Path) -> None:
    """Refuse timm's own networks, which only `evaluate` runs, before anything is read."""
    if isinstance(model, str) and model.startswith("timm-model:"):
        name = model.removeprefix("timm-model:")
        raise UsageError(
            f"{model} is timm's own network, which vitrail measures (`vitrail evaluate {model} DATA`) but cannot train"
            f" or look into; timm:{name} reads its weights into vitrail's model, where that has the architecture"
        )


def is_builtin(model: str) -> bool:
    """Whether MODEL names the pre-trained model inside the package."""
    return model == builtin.NAME and find_model_path(model) is None


def is_preset(model: str) -> bool:
    """Whether MODEL names a preset, whose weights are random."""
    return not hub.is_remote(model) and find_model_path(model) is None and presets.has_preset(model)


def is_native_file(path: Path) -> bool:
    """Whether a path is a file of vitrail's own format, which holds everything that is known of a model."""
    return path.is_file() and native.recognize(ModelFiles(path, path))


def read_model(path: Path) -> Trained:
    """Read the model in a file or folder of any known format."""
    if not path.exists():
        raise ModelError(f"{path} does not exist{files.suggest_path(path)}")
    try:
        model_files = find_model_files(path)
        return formats.import_format(formats.recognize_format(model_files)).read(model_files)
    except UsageError as error:  # a setting in the file, not one of the user's
        raise ModelError(f"{path} is damaged: {error}") from error
    except ModelError as error:
        raise error if str(path) in str(error) else ModelError(f"{path}: {error}") from error


def find_model_files(path: Path) -> ModelFiles:
    """The files of the model in a file or folder."""
    if is_adapter(path if path.is_dir() else path.parent) and path.name not in formats.ALL_WEIGHTS_FILES:
        raise ModelError(_explain_adapter(path if path.is_dir() else path.parent))
    if not path.is_dir():
        return ModelFiles(path, path)
    chosen = formats.choose_model_files([entry.name for entry in path.iterdir() if entry.is_file()], str(path))
    weights = path / chosen[-1]
    config = formats.find_config_file(chosen)
    return ModelFiles(path, weights, tensor_files.read_json(path / config)) if config else ModelFiles(weights, weights)


def is_adapter(path: str | Path) -> bool:
    """Whether a path is the folder of a LoRA adapter."""
    return (Path(path) / formats.ADAPTER_CONFIG_FILE).is_file() and not (Path(path) / formats.CONFIG_FILE).is_file()


def _explain_adapter(folder: Path) -> str:
    base = tensor_files.read_json(folder / formats.ADAPTER_CONFIG_FILE).get("base_model_name_or_path")
    is_name = isinstance(base, str) and base.count("/") == 1 and not Path(base).exists()
    source = f"hf:{base}" if is_name else base if isinstance(base, str) and base else "BASE"
    return (
        f"{folder} is an adapter, which is no model without its base: vitrail convert {source} OUT.safetensors"
        f" --adapter {folder}"
    )


def save(
    trained: Trained,
    path: str | Path,
    format: WeightsFormat = "vitrail",  # noqa: A002
    *,
    overwrite: bool = False,
) -> list[str]:
    """Write `path` whole or not at all: a run killed here leaves the previous file as it was.

    Returns notes on what a foreign format cannot hold. A model that it cannot hold at all is refused.

        vitrail.save(vitrail.load("model.safetensors"), "copy.safetensors")
    """
    path = Path(path)
    check_destination(path, format, overwrite=overwrite)
    require_trained(trained)
    with files.write_atomically(path, overwrite=overwrite) as fresh:
        notes = formats.import_format(format).write(trained, fresh)
    return notes if format == "vitrail" else notes + _describe_lost_settings(trained, format)


def _describe_lost_settings(trained: Trained, format: WeightsFormat) -> list[str]:  # noqa: A002
    """Notes on the settings of a `Trained` that no foreign format holds."""
    notes = []
    if trained.multi_label:
        notes.append(f"multi-label: {format} readers apply a softmax over all classes, this model a sigmoid to each")
    if trained.temperature != 1:
        notes.append(f"temperature: {format} divides logits by 1, this model by {trained.temperature:g}")
    if trained.threshold:
        notes.append(f"threshold: {format} has none, and below {trained.threshold:g} this model is unsure")
    if trained.label_thresholds:
        notes.append(f"label thresholds: {format} has none, and this model has one for each class")
    return notes
