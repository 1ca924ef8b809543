"""Experiment trackers: where a run's numbers go besides its folder, if `--track` asks for it.

    tensorboard  event files in the run folder            (extra `track`)
    wandb        Weights & Biases, a server or offline    (extra `wandb`)
    mlflow       an MLflow server or database             (extra `mlflow`)

A package is imported only where it is asked for. The last two send numbers and config.json to the server they are
configured for, by their own environment variables. They do so in a thread (`BackgroundLogger`): a slow server does not
slow training, and one that fails does not end it. The id of the remote run is kept in tracking.json, so that a resumed
run continues it; of a step that is computed again, the remote run keeps the numbers it has.
"""

import importlib
import importlib.util
import json
import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, get_args

from vitrail import files
from vitrail.errors import RemoteError, UsageError
from vitrail.runtime.workers import Notify
from vitrail.training.run_results import FINAL_PREFIX, Logger

Tracker = Literal["tensorboard", "wandb", "mlflow"]
Track = Tracker | Logger | Sequence[Tracker | Logger] | None
"""Where the numbers of every step are logged besides the run folder."""
Rows = Sequence[tuple[int, Mapping[str, float]]]
"""Steps, and the numbers of each by name."""

TRACKING_FILE = "tracking.json"
_SEND_EVERY_SECONDS = 1.0
_CLOSE_SECONDS = 30.0  # a stopped run may be killed soon
_WANDB_DEFAULTS = {  # without what W&B would collect besides the numbers; its environment variables turn it on
    "console": "off", "disable_git": True, "program": "vitrail", "save_code": False, "x_disable_machine_info": True,
    "x_disable_meta": True, "x_disable_stats": True, "x_save_requirements": False,
    "silent": True, "finish_timeout": 0.8 * _CLOSE_SECONDS,
    "x_transaction_log_flush_interval": 1.0,  # seconds that a killed run loses of its file
}  # fmt: skip
_MLFLOW_NAMES = {"lr": "lr/step"}  # its file store writes a file for each name, and lr/pg0 needs a folder lr
_MAX_MLFLOW_METRICS, _MAX_MLFLOW_PARAMS, _MAX_MLFLOW_TEXT = 1000, 100, 500  # of one request, of a parameter


def list_trackers(track: Track) -> list[Tracker | Logger]:
    """The trackers and loggers one by one; what is neither is refused."""
    given = list(track) if isinstance(track, Sequence) and not isinstance(track, str) else [track]
    listed = [each for each in given if each is not None]
    for each in listed:
        is_logger = isinstance(each, Logger) and not isinstance(each, type)
        if not is_logger and each not in get_args(Tracker):
            names = ", ".join(get_args(Tracker))
            raise UsageError(f"--track is {each!r:.80}; it takes {names}, or objects with log_scalars and close")
    return listed


def open_loggers(track: Track, folder: Path, notify: Notify) -> list[Logger]:
    """The loggers of the run in a folder: those of trackers, opened, and the caller's own."""
    loggers: list[Logger] = []
    for each in list_trackers(track):
        loggers += open_tracker(each, folder, notify) if isinstance(each, str) else [each]
    return loggers


def open_tracker(tracker: Tracker | None, folder: Path, notify: Notify) -> list[Logger]:
    """The logger that `--track` names, if any, for the run in a folder.

    A new run is refused where the tracker cannot be reached. A resumed run goes on without it.
    """
    if tracker is None:
        return []
    if tracker == "tensorboard":
        return [TensorBoardLogger(folder / "tensorboard")]
    open_run: type[WandbRun | MLflowRun] = WandbRun if tracker == "wandb" else MLflowRun
    opened: list[RemoteRun] = []
    errors: list[BaseException] = []
    with ThreadPool(1) as pool:  # it returns whatever the package raises
        opening: AsyncResult[RemoteRun] = pool.apply_async(
            open_run, (folder,), callback=opened.append, error_callback=errors.append
        )
        opening.wait()
    if not errors:
        notify(f"tracked by {open_run.title}: {opened[0].address}")
        return [BackgroundLogger(opened[0], notify)]
    if isinstance(errors[0], UsageError):
        raise errors[0]
    message = f"{open_run.title} cannot be used: {_summarize_error(errors[0])}"
    if "id" not in _read_record(folder, tracker):
        raise RemoteError(message) from errors[0]
    notify(f"warning: {message}. The run continues without it")
    return []


def _summarize_error(error: BaseException) -> str:
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"


def _import_package(module: str, title: str, extra: str) -> ModuleType:
    try:
        package = importlib.import_module(module)
    except ImportError:
        package = None
    if (
        package is None or getattr(package, "__file__", None) is None
    ):  # a folder of that name, such as W&B's own ./wandb
        raise UsageError(f"{title} is not installed: pip install 'vitrail[{extra}]'")
    return package


# --- the run's own files ----------------------------------------------------------------------------------------------


def _read_record(folder: Path, tracker: Tracker) -> dict[str, Any]:
    """What tracking.json says of a tracker; nothing where the run has not used it."""
    path = folder / TRACKING_FILE
    try:
        return dict(json.loads(path.read_text())[tracker]) if path.exists() else {}
    except KeyError:
        return {}
    except (ValueError, TypeError):
        raise UsageError(f"{path} is damaged; without it the run is tracked as a new one") from None


def _write_record(folder: Path, tracker: Tracker, **facts: Any) -> None:
    path = folder / TRACKING_FILE
    records = json.loads(path.read_text()) if path.exists() else {}
    with files.write_atomically(path, overwrite=True) as fresh:
        fresh.write_text(json.dumps(records | {tracker: facts}, indent=1) + "\n")


def _name_run(folder: Path) -> str:
    """The folder's name; for one of several seeds, with the name of the folder they are in."""
    folder = folder.resolve()
    return f"{folder.parent.name}/{folder.name}" if folder.name.startswith("seed-") else folder.name


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as one level: {"a": {"b": 1}} is {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _has_final_metrics(rows: Rows) -> bool:
    return any(name.startswith(FINAL_PREFIX) for _, values in rows for name in values)


# --- TensorBoard ------------------------------------------------------------------------------------------------------


class TensorBoardLogger:
    """A logger that writes TensorBoard's event files."""

    def __init__(self, folder: Path) -> None:
        tensorboard = _import_package("torch.utils.tensorboard", "TensorBoard", "track")
        self.writer = tensorboard.SummaryWriter(str(folder))

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers by name, after so many steps."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


# --- trackers with a server -------------------------------------------------------------------------------------------


class RemoteRun(Protocol):
    """A run in a tracker; its methods may block and raise, and are called from one thread."""

    title: str
    address: str

    def log_rows(self, rows: Rows) -> None:
        """Log the numbers of several steps."""
        ...

    def finish(self) -> None:
        """Say that the run has ended; as failed, unless its final metrics were logged."""
        ...


class BackgroundLogger:
    """A logger that sends to a remote run from a thread, about once a second.

    The first failure is a warning. Numbers that could not be sent are missing there; later ones are tried again.
    """

    def __init__(self, remote_run: RemoteRun, notify: Notify) -> None:
        self.remote_run, self.notify = remote_run, notify
        self._pool = ThreadPool(1)  # its thread does not keep the process alive
        self._waiting: list[tuple[int, Mapping[str, float]]] = []
        self._sending: AsyncResult[None] | None = None
        self._next_send = 0.0
        self._errors: list[BaseException] = []
        self._has_warned = False

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers by name, after so many steps; return at once."""
        self._waiting.append((step, dict(values)))
        if (self._sending is None or self._sending.ready()) and time.monotonic() >= self._next_send:
            self._send()

    def close(self) -> None:
        """Send what is left, as far as that takes seconds and not minutes."""
        self._send()
        finishing = self._pool.apply_async(self.remote_run.finish, error_callback=self._errors.append)
        finishing.wait(_CLOSE_SECONDS)
        if not finishing.ready():
            self._errors.append(TimeoutError(f"no answer for {_CLOSE_SECONDS:.0f} s"))
        self._warn_once()
        self._pool.terminate()

    def _send(self) -> None:
        self._warn_once()
        rows, self._waiting = self._waiting, []
        self._next_send = time.monotonic() + _SEND_EVERY_SECONDS
        self._sending = self._pool.apply_async(self.remote_run.log_rows, (rows,), error_callback=self._errors.append)

    def _warn_once(self) -> None:
        if self._errors and not self._has_warned:
            self.notify(
                f"warning: {self.remote_run.title} fails: {_summarize_error(self._errors[0])}. The run continues;"
                " numbers that cannot be sent are missing there"
            )
            self._has_warned = True


class WandbRun:
    """A run in Weights & Biases; in offline mode, a file in the run folder."""

    title = "Weights & Biases"

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to its makers, read at import
        wandb = _import_package("wandb", self.title, "wandb")
        self.folder, record = folder, _read_record(folder, "wandb")
        is_new = "id" not in record
        own = {name: f"WANDB_{name.upper()}" for name in _WANDB_DEFAULTS}
        settings = {name: value for name, value in _WANDB_DEFAULTS.items() if own[name] not in os.environ}
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "vitrail"),
            name=_name_run(folder),
            dir=os.environ.get("WANDB_DIR", str(folder)),
            id=record.get("id"),
            config=_read_config(folder) if is_new else None,
            resume=None if is_new else "allow",
            reinit="create_new",  # a caller may have a run of its own
            settings=wandb.Settings(**settings),
        )
        offline_folder = f"{self.run.settings.sync_dir} (offline; `wandb sync` uploads it)"
        self.address = offline_folder if self.run.offline else str(self.run.url)
        self.first_step = max(self.run.starting_step, record.get("step", -1) + 1)
        self.has_final_metrics = False
        _write_record(folder, "wandb", **(record | {"id": self.run.id}))

    def log_rows(self, rows: Rows) -> None:
        """Log the numbers of several steps; those that W&B has, from before the run was resumed, only as the latest."""
        if self.run.offline and rows:  # online W&B knows its last step itself
            last_step = max(self.first_step - 1, rows[-1][0])
            _write_record(self.folder, "wandb", id=self.run.id, step=last_step)
        for step, values in rows:
            if step >= self.first_step:
                self.run.log(dict(values), step=step)
            else:
                self.run.summary.update(dict(values))
        self.has_final_metrics |= _has_final_metrics(rows)

    def finish(self) -> None:
        """Upload what is left and end the run."""
        self.run.finish(exit_code=0 if self.has_final_metrics else 1)


class MLflowRun:
    """A run of an MLflow server or database."""

    title = "MLflow"

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # to its makers, read at import
        mlflow = _import_package("mlflow", self.title, "mlflow")
        self.entities = importlib.import_module("mlflow.entities")
        if not mlflow.is_tracking_uri_set() and importlib.util.find_spec("sqlalchemy") is None:
            raise UsageError(
                "MLFLOW_TRACKING_URI is not set: give the address of an MLflow server, such as http://localhost:5000,"
                " or install MLflow's local database: pip install mlflow"
            )
        self.client = mlflow.MlflowClient()
        self.run_id = self._continue_run(folder) or self._create_run(folder)
        self.address = f"{mlflow.get_tracking_uri()}, run {self.run_id}"
        self.has_final_metrics = False

    def _continue_run(self, folder: Path) -> str | None:
        """The id of the run in tracking.json, which is running again; None for a new run."""
        self.last_steps: dict[str, int] = {}
        run_id = _read_record(folder, "mlflow").get("id")
        if run_id is not None:
            self.client.update_run(run_id, status="RUNNING")
            metrics = self.client.get_run(run_id).data.to_proto().metrics  # the latest of each name
            self.last_steps = {metric.key: metric.step for metric in metrics}
        return run_id

    def _create_run(self, folder: Path) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "vitrail")
        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if experiment_id is None:
            experiment = self.client.get_experiment_by_name(name)
            experiment_id = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
        run_id = self.client.create_run(experiment_id, run_name=_name_run(folder)).info.run_id
        _write_record(folder, "mlflow", id=run_id)
        params = [
            self.entities.Param(name, (value if isinstance(value, str) else json.dumps(value))[:_MAX_MLFLOW_TEXT])
            for name, value in _flatten(_read_config(folder)).items()
        ]
        for start in range(0, len(params), _MAX_MLFLOW_PARAMS):
            self.client.log_batch(run_id, params=params[start : start + _MAX_MLFLOW_PARAMS])
        return run_id

    def log_rows(self, rows: Rows) -> None:
        """Log the numbers of several steps, without those that MLflow has from before the run was resumed."""
        now = round(time.time() * 1000)
        metrics = []
        for step, values in rows:
            for name, value in values.items():
                key = _MLFLOW_NAMES.get(name, name)
                if step > self.last_steps.get(key, -1):
                    metrics.append(self.entities.Metric(key, value, now, step))
        for start in range(0, len(metrics), _MAX_MLFLOW_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + _MAX_MLFLOW_METRICS])
        self.has_final_metrics |= _has_final_metrics(rows)

    def finish(self) -> None:
        """End the run."""
        self.client.set_terminated(self.run_id, "FINISHED" if self.has_final_metrics else "FAILED")
