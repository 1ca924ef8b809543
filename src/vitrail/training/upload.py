"""Upload of a run to an object store: --out s3://bucket/runs/NAME.

The run works in a local folder. Every finished checkpoint is uploaded in the background, its manifest last, with the
run's tables as they were then and its best weights; two are kept remotely, as locally. The run continues whatever the
store does: a failed upload is tried again with the next checkpoint, and at the end everything is uploaded once more.
"""

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from vitrail import files, remote
from vitrail.errors import DataError, ModelError, RemoteError, StoppedError, UsageError
from vitrail.runtime import distributed
from vitrail.runtime.distributed import ProcessGroup
from vitrail.runtime.workers import Notify
from vitrail.training.checkpoint import (
    KEPT_CHECKPOINTS,
    MANIFEST_FILE,
    format_checkpoint_name,
    list_checkpoints,
    read_checkpoint,
)
from vitrail.training.training_run import is_run_config
from vitrail.weights.formats import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILES

CHECKPOINT_FOLDER = "checkpoints"
_ADAPTER_FILES = tuple(f"weights/adapter/{name}" for name in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILES[0]))
_RUN_FILES = {
    *("config.json", "results.csv", "events.jsonl", "run.log", "tracking.json"),
    *("weights/best.safetensors", "weights/last.safetensors"),
    *_ADAPTER_FILES,
}
_RUN_CONFIG_PATTERN = re.compile(r"(seed-\d+/|)config\.json")  # a run, or the runs of several seeds
_CHECKPOINT_FILE_PATTERN = re.compile(r"step-(\d{8,})/([\w-]+\.(?:safetensors|json))")  # of a checkpoint
_STAGING_FOLDER = ".copying"


# --- download --------------------------------------------------------------------------------------------------------


def check_url_free(url: str, *, overwrite: bool) -> None:
    """Refuse a URL in use, unless it holds a run that may be overwritten."""
    remote_files = remote.list_files(url)
    if remote_files and not overwrite:
        raise UsageError(
            f"{url} exists already; resume it (--resume), replace it (--overwrite) or choose another (--out)"
        )
    if remote_files and not _is_uploaded_run(url, remote_files):
        raise UsageError(f"{url} is no run to overwrite: choose another name with --out")


def _is_uploaded_run(url: str, remote_files: Collection[str]) -> bool:
    """Whether the files are those of a run, or of the runs of several seeds, by their config.json."""
    configs = [name for name in remote_files if _RUN_CONFIG_PATTERN.fullmatch(name)]
    seeds = {name.partition("/")[0] for name in configs if "/" in name}
    if not configs or (seeds and any(name.partition("/")[0] not in seeds for name in remote_files)):
        return False
    return all(is_run_config(remote.read(remote.join_url(url, name))) for name in configs)


def remove_upload(url: str) -> None:
    """Remove an uploaded run, if there is one."""
    if remote.list_files(url):
        remote.remove(url)


def download_runs(url: str, folder: Path, notify: Notify) -> None:
    """Download what a run needs to resume from its newest intact checkpoint, unless a local one is as new."""
    for name in remote.list_files(url):
        if match := _RUN_CONFIG_PATTERN.fullmatch(name):
            _download_run(remote.join_url(url, match[1]).rstrip("/"), folder / match[1], notify)


def _download_run(url: str, folder: Path, notify: Notify) -> None:
    remote_steps, local_step = _list_remote_checkpoints(url), _find_newest_local_step(folder)
    newer = [step for step, parts in remote_steps.items() if step > local_step and MANIFEST_FILE in parts]
    for step in newer:
        try:
            _download_checkpoint(url, folder, step, remote_steps[step])
        except ModelError as error:
            notify(f"warning: {error}")
        else:
            notify(f"{_make_checkpoint_url(url, step)} is downloaded to {folder}")
            return
    if newer and local_step < 0:
        raise ModelError(
            f"none of the {len(newer)} checkpoints in {url}/{CHECKPOINT_FOLDER} is intact; --overwrite starts over"
        )


def _download_checkpoint(url: str, folder: Path, step: int, parts: set[str]) -> None:
    """Download a checkpoint and, once it is verified, the run's other files; its folder appears last."""
    checkpoint_url = _make_checkpoint_url(url, step)
    with files.write_atomically(folder / CHECKPOINT_FOLDER / format_checkpoint_name(step), overwrite=True) as fresh:
        fresh.mkdir()
        for part in sorted(parts):
            remote.copy_from_remote(f"{checkpoint_url}/{part}", fresh / part)
        try:
            read_checkpoint(fresh)
        except ModelError as error:
            raise ModelError(str(error).replace(str(fresh), checkpoint_url)) from error
        for name in _RUN_FILES & remote.list_files(url).keys():
            with files.write_atomically(folder / name, overwrite=True) as written:
                remote.copy_from_remote(f"{url}/{name}", written)


def _find_newest_local_step(folder: Path) -> int:
    """The step of the newest intact local checkpoint, or -1."""
    for path in list_checkpoints(folder / CHECKPOINT_FOLDER):
        with contextlib.suppress(ModelError):
            return read_checkpoint(path).step
    return -1


def _list_remote_checkpoints(url: str) -> dict[int, set[str]]:
    """The steps of the uploaded checkpoints, the newest first, with the names of their files."""
    checkpoints: dict[int, set[str]] = {}
    for name in remote.list_files(remote.join_url(url, CHECKPOINT_FOLDER)):
        if match := _CHECKPOINT_FILE_PATTERN.fullmatch(name):
            checkpoints.setdefault(int(match[1]), set()).add(match[2])
    return dict(sorted(checkpoints.items(), reverse=True))


def _make_checkpoint_url(url: str, step: int) -> str:
    return f"{url}/{CHECKPOINT_FOLDER}/{format_checkpoint_name(step)}"


# --- upload ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def upload_checkpoints(
    folder: Path, url: str | None, group: ProcessGroup, *, replace: bool, notify: Notify
) -> Iterator[Callable[[Path], None]]:
    """A function to call with each finished checkpoint, which rank 0 uploads; at the end the whole folder is uploaded.

    Without a URL it does nothing. With `replace` an earlier upload is removed first.
    """
    if url is None:
        yield lambda _: None
        return
    try:
        if not group.is_rank0:
            yield lambda _: None
            return
        if replace:
            remove_upload(url)
        with contextlib.closing(RunUploader(folder, url, notify)) as uploader:
            yield uploader.submit
            uploader.finish()
    except StoppedError:
        distributed.barrier()  # the first to exit would have torchrun kill the one that still uploads
        raise


class RunUploader:
    """Keeps the upload of a run up to date."""

    def __init__(self, folder: Path, url: str, notify: Notify) -> None:
        self.folder, self.url, self.notify = folder, url, notify
        shutil.rmtree(folder / _STAGING_FOLDER, ignore_errors=True)  # of a process that was killed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self._uploading: Future[None] | None = None
        self._uploaded: set[Path] = set()

    def submit(self, checkpoint: Path) -> None:
        """Upload a finished checkpoint, after the one before; of several that wait, only the newest."""
        staged = _stage_checkpoint(self.folder, checkpoint)
        with self._lock:
            superseded, self._waiting = self._waiting, staged
        if superseded is not None:
            shutil.rmtree(superseded)
        self._uploading = self._thread.submit(self._upload_waiting)

    def wait(self) -> None:
        """Return when every submitted checkpoint is uploaded, or has failed."""
        if self._uploading is not None:
            self._uploading.result()

    def finish(self) -> None:
        """Upload the whole folder, or raise an error that says what is where."""
        self.wait()
        try:
            for path in _list_files_manifest_last(self.folder):
                if path.parent not in self._uploaded:
                    remote.copy_to_remote(path, f"{self.url}/{path.relative_to(self.folder).as_posix()}")
            _prune_remote_checkpoints(self.url)
        except DataError as error:
            raise RemoteError(
                f"the run is complete in {self.folder}, but its upload to {self.url} is not: {error}."
                " The same command with --resume uploads it"
            ) from error

    def close(self) -> None:
        """End the thread once everything is uploaded: a stopped run may be resumed on another machine."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=True)
            shutil.rmtree(self.folder / _STAGING_FOLDER, ignore_errors=True)

    def _upload_waiting(self) -> None:
        with self._lock:
            staged, self._waiting = self._waiting, None
        if staged is None:
            return  # a newer one was uploaded instead
        try:
            _upload_checkpoint(staged, self.url)
            self._uploaded.add(self.folder / CHECKPOINT_FOLDER / staged.name)
        except DataError as error:
            self.notify(
                f"warning: {staged.name} is not uploaded; the run continues and tries again with the next: {error}"
            )
        finally:
            shutil.rmtree(staged)


def _stage_checkpoint(folder: Path, checkpoint: Path) -> Path:
    """Make a folder of links to everything to upload, so that later writes do not change it.

    The tables grow, so it holds copies of them, cut to the sizes in the checkpoint.
    """
    stage = folder / _STAGING_FOLDER / checkpoint.name
    shutil.rmtree(stage, ignore_errors=True)  # of a process that was killed
    state = json.loads((checkpoint / "state.json").read_text())
    run_files = ("config.json", "tracking.json", "weights/best.safetensors", *_ADAPTER_FILES)
    for path in (*checkpoint.iterdir(), *(folder / name for name in run_files)):
        if path.exists():
            _link_or_copy(path, stage / path.relative_to(folder))
    for name, size in state["files"].items():
        with (folder / name).open("rb") as table:
            (stage / name).write_bytes(table.read(size))
    return stage


def _link_or_copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except OSError:  # a file system without links
        shutil.copyfile(path, target)


def _upload_checkpoint(staged: Path, url: str) -> None:
    """Upload a checkpoint, its manifest last: without it there is no checkpoint. Then prune older ones."""
    step = int(staged.name.removeprefix("step-"))
    for later in [old for old in _list_remote_checkpoints(url) if old >= step]:  # of a run resumed from before them
        _remove_remote_checkpoint(url, later)
    for path in _list_files_manifest_last(staged):
        remote.copy_to_remote(path, f"{url}/{path.relative_to(staged).as_posix()}")
    _prune_remote_checkpoints(url)


def _list_files_manifest_last(folder: Path) -> Iterator[Path]:
    """All files below a folder except hidden ones, manifests last."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    shown = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    yield from sorted(shown, key=lambda path: (path.name == MANIFEST_FILE, path))


def _prune_remote_checkpoints(url: str) -> None:
    """Remove all uploaded checkpoints but the newest two complete ones."""
    checkpoints = _list_remote_checkpoints(url)
    kept = [step for step, parts in checkpoints.items() if MANIFEST_FILE in parts][:KEPT_CHECKPOINTS]
    for step in checkpoints.keys() - set(kept):
        _remove_remote_checkpoint(url, step)


def _remove_remote_checkpoint(url: str, step: int) -> None:
    checkpoint_url = _make_checkpoint_url(url, step)
    if remote.is_file(f"{checkpoint_url}/{MANIFEST_FILE}"):  # first: without it the folder is no checkpoint
        remote.remove(f"{checkpoint_url}/{MANIFEST_FILE}")
    remote.remove(checkpoint_url)
