"""What a MODEL is in Python: a name or path, a run, or a model with its preprocessing."""

from collections.abc import Container, Sequence
from pathlib import Path

from vitrail.api.run import Run
from vitrail.errors import UsageError
from vitrail.runtime.workers import Notify, ignore_note
from vitrail.weights.load import describe_license, find_model_path, load
from vitrail.weights.trained import Trained

AnyModel = str | Path | Run | Trained
"""Any MODEL of the commands, a `Run`, whose best weights count, or a `Trained`."""


def get_model_name(model: AnyModel) -> str:
    """The model's name in results: as it was given, a run's folder, or where a `Trained` came from."""
    if isinstance(model, Run):
        return str(model.folder)
    if isinstance(model, Trained):
        return model.origin.name
    if isinstance(model, str | Path):
        return str(model)
    raise UsageError(f"a model is a name, a path, a vitrail.Run or a vitrail.Trained, not {type(model).__name__}")


def locate_model(model: AnyModel) -> str | None:
    """Where a later command finds the model: an absolute path or a name; None for one in memory."""
    if isinstance(model, Trained):
        return None
    name = get_model_name(model)
    return str(Path(name).absolute()) if find_model_path(name) and Path(name).exists() else name


def list_models(models: AnyModel | Sequence[AnyModel]) -> list[AnyModel]:
    """One or several models as a list."""
    given = list(models) if isinstance(models, Sequence) and not isinstance(models, str) else [models]
    for model in given:
        get_model_name(model)  # refuses what is none
    return given


def choose_distinct_name(name: str, taken: Container[str]) -> str:
    """The name, or with a number where it is taken: models in memory may come from the same weights."""
    number = 2
    distinct = name
    while distinct in taken:
        distinct, number = f"{name} ({number})", number + 1
    return distinct


def load_trained(model: AnyModel, notify: Notify = ignore_note) -> Trained:
    """Load any MODEL; a note names the license of somebody else's."""
    get_model_name(model)  # refuses what is none
    if isinstance(model, Run):
        return model.trained
    if isinstance(model, Trained):
        return model
    trained = load(model)
    if (note := describe_license(model, trained)) is not None:
        notify(note)
    return trained
