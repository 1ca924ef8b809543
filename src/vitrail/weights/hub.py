"""Models on the Hugging Face Hub: `hf:ORG/NAME[@REVISION]` and `timm:NAME` to files here, and folders to the Hub.

huggingface_hub does the talking and keeps its own cache, so a model that another tool fetched is not fetched again.
Only the files a model consists of are asked for, by name. No torch here: fetching needs none.
"""

import contextlib
import dataclasses
import glob
import importlib
import importlib.util
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from vitrail.errors import ModelError, UsageError
from vitrail.weights import model_license

if TYPE_CHECKING:
    from vitrail.weights.trained import Trained

CONFIG_FILE = "config.json"
SIDE_FILES = (CONFIG_FILE, "preprocessor_config.json", "README.md")  # what goes with the weights, where it exists
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")  # the first that exists
NATIVE_FILE = "model-vitrail.safetensors"
SINGLE_FILE_SUFFIXES = (".safetensors", ".npz")  # a repository without config.json holds one such file
PUSHED_FILES = {
    CONFIG_FILE,
    "preprocessor_config.json",
    "model.safetensors",
    NATIVE_FILE,
}  # a push replaces all of these
_NAME_PART = r"[A-Za-z0-9_](?:[\w.-]*\w)?"


class HubModel(NamedTuple):
    """A model of the Hub on this machine."""

    path: Path
    """The snapshot folder with config.json and weights, or the one file of a repository that has no config.json."""
    name: str
    """hf:ORG/NAME@COMMIT, the commit in full."""
    license: str | None


def is_remote(model: str) -> bool:
    """Whether MODEL is a name on the Hub."""
    return model.startswith(("hf:", "timm:"))


def parse_model_name(model: str) -> tuple[str, str | None]:
    """ORG/NAME and the revision, where one is given; a name that the Hub cannot have is refused."""
    scheme, _, rest = model.partition(":")
    name, at, revision = rest.partition("@")
    repo = f"timm/{name}" if scheme == "timm" else name
    legal = re.fullmatch(f"{_NAME_PART}/{_NAME_PART}", repo, re.ASCII) and len(repo) <= 96
    if not legal or "--" in repo or ".." in repo or repo.endswith(".git"):
        raise UsageError(f"{model!r:.200} is no name on the Hub: write hf:ORG/NAME[@REVISION] or timm:NAME")
    if at and (not re.fullmatch(r"\w(?:[\w./-]{0,250}\w)?", revision, re.ASCII) or re.search(r"\.\.|//", revision)):
        raise UsageError(
            f"{model!r:.400} has the revision {revision!r:.200}, which none can be: give a branch, a tag or a commit"
        )
    return repo, revision or None


def download_model(model: str) -> HubModel:
    """The files of a model on the Hub, from the cache where the Hub cannot be reached."""
    repo, revision = parse_model_name(model)
    require_huggingface_hub()
    with _translate_hub_errors(repo, revision):
        folder = _download_snapshot(repo, revision)
    names = [entry.name for entry in folder.iterdir() if entry.is_file()]
    chosen = choose_model_files(names, f"hf:{repo}")
    path = folder if CONFIG_FILE in chosen else folder / chosen[-1]
    return HubModel(path=path, name=f"hf:{repo}@{folder.name}", license=model_license.read_license(folder))


def add_hub_origin(trained: "Trained", hub_model: HubModel) -> "Trained":
    """`trained`, read from `fetched`, with the pinned name and the licence in its origin.

    A native file keeps the origin it states, and the name is added to it.
    """
    origin = trained.origin
    unnamed = origin.name == hub_model.path.resolve().name  # the cache's own name for a file or folder
    name = hub_model.name if unnamed else f"{origin.name}, from {hub_model.name}"
    origin = dataclasses.replace(origin, name=name, license=origin.license or hub_model.license)
    return dataclasses.replace(trained, origin=origin)


def push(folder: Path, target: str, *, private: bool = False) -> str:
    """The web address of one commit to hf:ORG/NAME that holds the files of `folder`; a missing repository is made.

    Files of an earlier push that `folder` no longer has are removed, or they would be read as this model.
    """
    repo = parse_target(target)
    require_huggingface_hub()
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    files = sorted(path for path in folder.iterdir() if path.is_file())
    with _translate_hub_errors(repo, None, writing=True):
        api = HfApi()
        api.create_repo(repo, private=private or None, exist_ok=True)  # None: the organisation's own default
        found = api.model_info(repo)
        if private and not found.private:
            raise UsageError(
                f"{repo} exists and is public: make it private at {_get_page_url(repo)}/settings, or leave out --private"
            )
        stale = {entry.rfilename for entry in found.siblings or ()} & PUSHED_FILES - {path.name for path in files}
        commit = api.create_commit(
            repo,
            operations=[
                *(CommitOperationDelete(path_in_repo=name) for name in sorted(stale)),
                *(CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=path) for path in files),
            ],
            commit_message="Upload a model with vitrail",
        )
    return str(commit.commit_url)


def parse_target(target: str) -> str:
    """ORG/NAME of a repository to write to."""
    if not target.startswith("hf:") or "@" in target:
        raise UsageError(f"{target!r:.200} is no place to push to: write hf:ORG/NAME, without a revision")
    return parse_model_name(target)[0]


def require_huggingface_hub() -> ModuleType:
    """huggingface_hub, or the line that installs it."""
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError("hf: and timm: names need the extra hub: pip install huggingface_hub") from None
    return huggingface_hub


def _download_snapshot(repo: str, revision: str | None) -> Path:
    """The folder of the cache that holds the model's files at one commit, which is its name."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        found = HfApi().model_info(repo, revision=revision)
    except _get_hub_errors() as error:
        cached = _find_cached_snapshot(repo, revision) if _is_unreachable(error) else None
        if cached is None:
            raise
        return cached
    chosen = choose_model_files([entry.rfilename for entry in found.siblings or ()], f"hf:{repo}")
    # By branch and not by commit, so that the cache learns which commit the branch is at and knows it offline.
    return Path(snapshot_download(repo, revision=revision, allow_patterns=[glob.escape(name) for name in chosen]))


def _find_cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """The snapshot folder, if the cache has the whole model."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError, ModelError):
        folder = Path(
            snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=list(SIDE_FILES))
        )
        choose_model_files([entry.name for entry in folder.iterdir() if entry.is_file()], repo)
        return folder
    return None


def choose_model_files(names: Collection[str], repo: str) -> list[str]:
    """The files of a repository that make up its model, the weights last."""
    beside = [name for name in SIDE_FILES if name in names]
    if NATIVE_FILE in names:  # what we pushed: the native file loses nothing, transformers' folder beside it does
        return [name for name in beside if name == "README.md"] + [NATIVE_FILE]
    if CONFIG_FILE in names:
        weights = [name for name in WEIGHTS_FILES if name in names][:1]
        if not weights:
            raise ModelError(
                f"{repo} has a {CONFIG_FILE} but neither {' nor '.join(WEIGHTS_FILES)}, so no weights that are read"
            )
        return beside + weights
    single = sorted(
        name for name in names if name.endswith(SINGLE_FILE_SUFFIXES) and "/" not in name and "\\" not in name
    )
    if len(single) != 1:
        held = f"{len(single)} weights files ({', '.join(single[:3])})" if single else "no weights file"
        raise ModelError(
            f"{repo} has no {CONFIG_FILE} and {held}; one {' or '.join(SINGLE_FILE_SUFFIXES)} is read: give the file that is meant,"
            " fetched with `hf download` where it is on the Hub"
        )
    return [name for name in beside if name == "README.md"] + single


def _get_hub_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises when the Hub refuses or cannot be reached.

    A failed connection is an error of the HTTP library beneath, which changed with its releases: its base is named here
    by what huggingface_hub's own error inherits.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, LocalTokenNotFoundError

    beneath = [kind for kind in HfHubHTTPError.__mro__ if kind.__module__ != "builtins" and issubclass(kind, Exception)]
    return *beneath, ConnectionError, LocalEntryNotFoundError, LocalTokenNotFoundError


def _get_http_status(error: Exception) -> int | None:
    """The Hub's HTTP status, where it answered."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_unreachable(error: Exception) -> bool:
    status = _get_http_status(error)
    return status is None or status == 429 or status >= 500


@contextlib.contextmanager
def _translate_hub_errors(repo: str, revision: str | None, *, writing: bool = False) -> Iterator[None]:
    """A block whose failures at the Hub become one line that says what to do."""
    try:
        with _hide_progress_bars():
            yield
    except _get_hub_errors() as error:
        raise UsageError(_explain_failure(error, repo, revision, writing=writing)) from error


@contextlib.contextmanager
def _hide_progress_bars() -> Iterator[None]:
    """A block in which huggingface_hub draws its progress bars on a terminal only."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _explain_failure(error: Exception, repo: str, revision: str | None, *, writing: bool) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalTokenNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}: {_get_page_url(repo)}/commits lists them"
    if isinstance(error, GatedRepoError):
        return f"{repo} is gated: ask for access at {_get_page_url(repo)}, then `hf auth login`"
    if (writing and _get_http_status(error) in (401, 403)) or isinstance(error, LocalTokenNotFoundError):
        return f"the Hub does not let you write to {repo}: `hf auth login` with a token that may"
    if isinstance(error, RepositoryNotFoundError) or _get_http_status(error) in (401, 403, 404):
        return f"the Hub has no model {repo}, or it is private: check {_get_page_url(repo)}; `hf auth login` if it is yours"
    reason = _summarize_error(error)
    if writing or not _is_unreachable(error):
        return f"the Hub did not take the request for {repo} ({reason}): try again later"
    wanted = repo if revision is None else f"{repo} at {revision}"
    return (
        f"the Hub cannot be reached ({reason}), and its cache {_get_cache_folder()} does not hold {wanted}: connect and try again,"
        f" or on another machine `pip install huggingface_hub` and `hf download {repo} --local-dir FOLDER`, then give"
        " that folder"
    )


def _summarize_error(error: Exception) -> str:
    """A few words on one line."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    status = _get_http_status(error)
    if status is not None:
        return f"it answered {status}"
    return f"{type(error).__name__}: {' '.join(str(error).split()):.120}"


def _get_page_url(repo: str) -> str:
    """The repository's web address."""
    return f"{_import_hub_constants().ENDPOINT}/{repo}"


def _get_cache_folder() -> str:
    """Where the Hub's own tools keep what they fetched."""
    return str(_import_hub_constants().HF_HUB_CACHE)


def _import_hub_constants() -> ModuleType:
    require_huggingface_hub()
    return importlib.import_module("huggingface_hub.constants")  # which nothing else may have imported yet


def list_cached() -> list[str]:
    """The models whose weights lie in the Hub's cache, as MODEL names them; none where huggingface_hub is missing."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return []
    names = []
    for folder in sorted(Path(_get_cache_folder()).glob("models--*--*")):
        _, owner, name = folder.name.split("--", 2)
        if any(path.suffix in (".safetensors", ".npz", ".bin") for path in folder.glob("snapshots/*/*")):
            names.append(f"timm:{name}" if owner == "timm" else f"hf:{owner}/{name}")
    return names


def suggest_name(model: str) -> str:
    """How a bare name of timm's or of the Hub is written here; nothing where it is neither."""
    if re.fullmatch(
        r"(?:vit|deit|deit3|beit|beitv2|eva|eva02|mobile|resnetv2|flexivit)\w*_\w+(?:\.\w+)?", model, re.ASCII
    ):
        return f"timm:{model}"
    legal = re.fullmatch(f"{_NAME_PART}/{_NAME_PART}", model, re.ASCII) and not model.endswith(
        (".safetensors", ".npz", ".pth")
    )
    return f"hf:{model}" if legal else ""
