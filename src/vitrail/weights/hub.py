"""Models on the Hugging Face Hub: download `hf:ORG/NAME[@REVISION]` and `timm:NAME`, and push folders.

huggingface_hub sends the requests and keeps its own cache, so a model that another tool downloaded is not downloaded
again. Only the files that make up a model are requested, by name. This module needs no torch, and
huggingface_hub, which is optional, is imported inside functions.
"""

import contextlib
import dataclasses
import glob
import importlib
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from vitrail.errors import ModelError, UsageError
from vitrail.weights import formats
from vitrail.weights.formats import CONFIG_FILE, NATIVE_FILE, choose_adapter_files, choose_model_files

if TYPE_CHECKING:
    from vitrail.weights.trained import Trained

PUSHED_FILES = {CONFIG_FILE, "preprocessor_config.json", "model.safetensors", NATIVE_FILE}  # a push replaces all
MAX_README_BYTES = 2**20
# Identifiers of the Hub's list that vision models use; any other is written as "other" with its own name beside.
HUB_LICENSES = {
    "agpl-3.0", "apache-2.0", "bsd", "bsd-2-clause", "bsd-3-clause", "cc", "cc-by-4.0", "cc-by-nc-4.0",
    "cc-by-nc-nd-4.0", "cc-by-nc-sa-4.0", "cc-by-sa-4.0", "cc0-1.0", "gpl-2.0", "gpl-3.0", "isc", "lgpl-3.0", "mit",
    "mpl-2.0", "openrail", "other", "unknown", "unlicense",
}  # fmt: skip
ChooseFiles = Callable[[Collection[str], str], list[str]]
DINOV3_SIZES = {  # in names of Meta's gated repositories -> of timm's copies, which are not gated
    "vits16": "small_patch16_dinov3_qkvb", "vits16plus": "small_plus_patch16_dinov3_qkvb",
    "vitb16": "base_patch16_dinov3_qkvb", "vitl16": "large_patch16_dinov3_qkvb",
    "vith16plus": "huge_plus_patch16_dinov3_qkvb", "vit7b16": "7b_patch16_dinov3",
}  # fmt: skip
_NAME_PART = r"[A-Za-z0-9_](?:[\w.-]*\w)?"


class HubModel(NamedTuple):
    """A downloaded model of the Hub."""

    path: Path
    """The snapshot folder with config.json and weights, or the one file of a repository that has no config.json."""
    name: str
    """hf:ORG/NAME@COMMIT, with the full commit."""
    license: str | None


def is_remote(model: str) -> bool:
    """Whether MODEL is a name on the Hub."""
    return model.startswith(("hf:", "timm:"))


def parse_model_name(model: str) -> tuple[str, str | None]:
    """Parse ORG/NAME and the revision, if any; refuse a name that the Hub cannot have."""
    scheme, _, rest = model.partition(":")
    name, at, revision = rest.partition("@")
    repo = f"timm/{name}" if scheme == "timm" else name
    legal = re.fullmatch(f"{_NAME_PART}/{_NAME_PART}", repo, re.ASCII) and len(repo) <= 96
    if not legal or "--" in repo or ".." in repo or repo.endswith(".git"):
        raise UsageError(f"{model!r:.200} cannot be a name on the Hub: write hf:ORG/NAME[@REVISION] or timm:NAME")
    if at and (not re.fullmatch(r"\w(?:[\w./-]{0,250}\w)?", revision, re.ASCII) or re.search(r"\.\.|//", revision)):
        raise UsageError(
            f"{model!r:.400} has the impossible revision {revision!r:.200}: give a branch, a tag or a commit"
        )
    return repo, revision or None


def download_model(model: str, *, beside: Collection[str] = ()) -> HubModel:
    """Download the files of a model, and those named `beside` it; without the Hub, take them from the cache."""
    repo, revision = parse_model_name(model)
    require_huggingface_hub()
    with _translate_hub_errors(repo, revision):
        folder = _download_snapshot(repo, revision, choose_model_files, beside)
    names = [entry.name for entry in folder.iterdir() if entry.is_file()]
    chosen = choose_model_files(names, f"hf:{repo}")
    path = folder if formats.find_config_file(chosen) else folder / chosen[-1]
    return HubModel(path=path, name=f"hf:{repo}@{folder.name}", license=read_license(folder))


def download_adapter(adapter: str) -> Path:
    """Download the files of an adapter, hf:ORG/NAME[@REVISION]; return their folder, which is named by the commit."""
    repo, revision = parse_model_name(adapter)
    require_huggingface_hub()
    with _translate_hub_errors(repo, revision):
        return _download_snapshot(repo, revision, choose_adapter_files)


def add_hub_origin(trained: "Trained", hub_model: HubModel) -> "Trained":
    """Add the pinned name and the license of `hub_model` to the origin of the model read from it.

    A native file keeps the origin it states, and the name is appended.
    """
    origin = trained.origin
    is_cache_name = origin.name == hub_model.path.resolve().name  # the cache's own name for a file or folder
    name = hub_model.name if is_cache_name else f"{origin.name}, from {hub_model.name}"
    origin = dataclasses.replace(origin, name=name, license=origin.license or hub_model.license)
    return dataclasses.replace(trained, origin=origin)


def push(folder: Path, target: str, *, private: bool = False) -> str:
    """Commit the files of `folder` to hf:ORG/NAME and return the commit's URL; create a missing repository.

    Files of an earlier push that `folder` no longer has are removed: they would be read as this model.
    """
    repo = parse_target(target)
    require_huggingface_hub()
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    files = sorted(path for path in folder.iterdir() if path.is_file())
    with _translate_hub_errors(repo, None, writing=True):
        api = HfApi()
        api.create_repo(repo, private=private or None, exist_ok=True)  # None: the organization's own default
        info = api.model_info(repo)
        if private and not info.private:
            page = _get_page_url(repo)
            raise UsageError(f"{repo} exists and is public: make it private at {page}/settings, or omit --private")
        stale = {entry.rfilename for entry in info.siblings or ()} & PUSHED_FILES - {path.name for path in files}
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
    """Parse ORG/NAME of a repository to push to."""
    if not target.startswith("hf:") or "@" in target:
        raise UsageError(f"{target!r:.200} cannot be pushed to: write hf:ORG/NAME, without a revision")
    return parse_model_name(target)[0]


def require_huggingface_hub() -> ModuleType:
    """Import huggingface_hub, or say how to install it."""
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError("hf: and timm: names need the extra hub: pip install huggingface_hub") from None
    return huggingface_hub


def _download_snapshot(
    repo: str, revision: str | None, choose_files: ChooseFiles, beside: Collection[str] = ()
) -> Path:
    """Download a model's or an adapter's files and those of `beside` that exist; return the cache's folder of that
    commit, which is named by it."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi().model_info(repo, revision=revision)
    except _get_hub_errors() as error:
        cached = _find_cached_snapshot(repo, revision, choose_files) if _is_unreachable(error) else None
        if cached is None:
            raise
        return cached
    names = [entry.rfilename for entry in info.siblings or ()]
    chosen = [*choose_files(names, f"hf:{repo}"), *(name for name in beside if name in names)]
    # By branch and not by commit: the cache then records the branch's commit and knows it offline.
    return Path(snapshot_download(repo, revision=revision, allow_patterns=[glob.escape(name) for name in chosen]))


def _find_cached_snapshot(repo: str, revision: str | None, choose_files: ChooseFiles) -> Path | None:
    """Return the snapshot folder if the cache has the whole model or adapter."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError, ModelError):
        is_adapter = choose_files is choose_adapter_files
        names = [formats.ADAPTER_CONFIG_FILE] if is_adapter else list(formats.SIDE_FILES)
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=names))
        choose_files([entry.name for entry in folder.iterdir() if entry.is_file()], repo)
        return folder
    return None


def _get_hub_errors() -> tuple[type[Exception], ...]:
    """The errors that huggingface_hub raises when the Hub refuses or cannot be reached.

    A failed connection raises an error of its HTTP library, which has changed with releases. The bases of
    huggingface_hub's own error name it.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, LocalTokenNotFoundError

    beneath = [kind for kind in HfHubHTTPError.__mro__ if kind.__module__ != "builtins" and issubclass(kind, Exception)]
    return *beneath, ConnectionError, LocalEntryNotFoundError, LocalTokenNotFoundError


def _get_http_status(error: Exception) -> int | None:
    """The HTTP status of the Hub's response, if any."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_unreachable(error: Exception) -> bool:
    status = _get_http_status(error)
    return status is None or status == 429 or status >= 500


@contextlib.contextmanager
def _translate_hub_errors(repo: str, revision: str | None, *, writing: bool = False) -> Iterator[None]:
    """Turn failures at the Hub inside the block into one line that says what to do."""
    try:
        with _hide_progress_bars():
            yield
    except _get_hub_errors() as error:
        raise UsageError(_explain_failure(error, repo, revision, writing=writing)) from error


@contextlib.contextmanager
def _hide_progress_bars() -> Iterator[None]:
    """Hide huggingface_hub's progress bars inside the block, except on a terminal."""
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
    """Say what went wrong and what to do next."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page, status = _get_page_url(repo), _get_http_status(error)
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}: {page}/commits lists them"
    if isinstance(error, GatedRepoError):
        copy = find_ungated_copy(repo)
        instead = f"; or give {copy}, timm's copy, which is not gated and pools the mean of the patches" if copy else ""
        return f"{repo} is gated: accept its terms at {page}, then `hf auth login`{instead}"
    if (writing and status in (401, 403)) or isinstance(error, LocalTokenNotFoundError):
        return f"the Hub does not let you write to {repo}: `hf auth login` with a token that may"
    if isinstance(error, RepositoryNotFoundError) or status in (401, 403, 404):
        return f"the Hub has no model {repo}, or it is private: check {page}; `hf auth login` if it is yours"
    reason = f"{type(error).__name__}: {' '.join(str(error).split()):.120}"
    if status is not None:
        reason = f"it answered {status}"
    if isinstance(error, OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set"
    if writing or not _is_unreachable(error):
        return f"the Hub refused the request for {repo} ({reason}): try again later"
    pinned = repo if revision is None else f"{repo} at {revision}"
    cache = _import_hub_constants().HF_HUB_CACHE
    return (
        f"the Hub cannot be reached ({reason}), and its cache {cache} does not hold {pinned}: connect and"
        f" try again, or on another machine `pip install huggingface_hub` and `hf download {repo} --local-dir FOLDER`,"
        " then give that folder"
    )


def find_ungated_copy(repo: str) -> str | None:
    """Find the MODEL name of timm's copy of a gated repository; None where none is known."""
    match = re.fullmatch(r"facebook/dinov3-(\w+)-pretrain-(lvd1689m|sat493m)", repo)
    size = DINOV3_SIZES.get(match[1]) if match else None
    return f"timm:vit_{size}.{match[2]}" if match and size else None


def _get_page_url(repo: str) -> str:
    return f"{_import_hub_constants().ENDPOINT}/{repo}"


def _import_hub_constants() -> ModuleType:
    require_huggingface_hub()
    return importlib.import_module("huggingface_hub.constants")  # which nothing else may have imported yet


def suggest_name(model: str) -> str:
    """Suggest the MODEL for a bare name of timm or of the Hub; empty where it is neither."""
    if re.fullmatch(
        r"(?:vit|deit|deit3|beit|beitv2|eva|eva02|mobile|resnetv2|flexivit)\w*_\w+(?:\.\w+)?", model, re.ASCII
    ):
        return f"timm:{model}"
    legal = re.fullmatch(f"{_NAME_PART}/{_NAME_PART}", model, re.ASCII) and not model.endswith(formats.FILE_SUFFIXES)
    return f"hf:{model}" if legal else ""


def read_license(folder: Path) -> str | None:
    """Read the license in the front matter of README.md, if there is one."""
    path = folder / "README.md"
    if not path.is_file() or path.stat().st_size > MAX_README_BYTES:
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    lines = re.findall(r"^(licen[sc]e|license_name):[ \t]*(\S.*?)[ \t]*$", front[1], re.MULTILINE) if front else []
    stated = {key: value.strip("'\"") for key, value in lines}
    name = stated.get("license", stated.get("licence"))
    return stated.get("license_name", name) if name == "other" else name


def format_front_matter(license_name: str) -> str:
    """Format a card that states the license and nothing else."""
    return f"---\nlicense: {' '.join(license_name.split())}\n---\n"


def format_license_lines(license_name: str | None) -> list[str]:
    """Format the lines of a card's front matter that state the license; none where it is unknown."""
    if license_name is None:
        return []
    if license_name.lower() in HUB_LICENSES:
        return [f"license: {license_name.lower()}"]
    slug = re.sub(r"[^a-z0-9.]+", "-", license_name.lower()).strip("-.") or "unnamed"
    return ["license: other", f"license_name: {json.dumps(slug[:96])}"]
