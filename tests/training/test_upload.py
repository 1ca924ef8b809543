"""A run's copy on a store: whole checkpoints only, never in the run's way, and enough to go on from elsewhere."""

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import s3_server
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.s3_server import S3
from vitrail import remote
from vitrail.cli import main
from vitrail.errors import DataError, ModelError, RemoteError, StoppedError, UsageError
from vitrail.report import result_files
from vitrail.training import checkpoint as states
from vitrail.training import run_folder, upload
from vitrail.training.upload import RunUploader
from vitrail.weights import tensor_files

_numbers = itertools.count()
TRAIN = ("train", "digits", "--data", "digits", "--workers", "0", "--device", "cpu", "--save-every", "0")
SHORT = (*TRAIN, "--epochs", "0.3")  # seven steps


@pytest.fixture
def url() -> str:
    """A place of its own, in this process's memory."""
    return f"memory://mirror{next(_numbers)}/run"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'vitrail[remote]'")
    with s3_server.run_server() as found:
        for name, value in found.environment().items():
            monkeypatch.setenv(name, value)
        yield found


CONFIG = json.dumps({"recipe": {}, "steps": 1, "preprocess": {}})


def begun(folder: Path) -> Path:
    """A run's folder before its first checkpoint."""
    (folder / "weights").mkdir(parents=True)
    (folder / "config.json").write_text(CONFIG)
    (folder / "results.csv").write_text("epoch\n")
    (folder / "events.jsonl").write_text("")
    return folder


def checkpoint(folder: Path, step: int) -> Path:
    """Write one, after a line of the tables and before another."""
    with (folder / "events.jsonl").open("a") as events:
        events.write(f'{{"step": {step}}}\n')
    (folder / "weights" / "best.safetensors").write_text(f"best of {step}")
    sizes = {name: (folder / name).stat().st_size for name in ("results.csv", "events.jsonl")}
    tensors = {"model": {"weight": torch.full((3, 5), float(step))}}
    path = states.write_checkpoint(folder / "checkpoints", states.Checkpoint(step, tensors, {"files": sizes}))
    with (folder / "events.jsonl").open("a") as events:
        events.write(f'{{"after": {step}}}\n')
    return path


def copied(folder: Path, url: str, *steps: int) -> None:
    """Write checkpoints and wait until each is there."""
    copy = RunUploader(folder, url, pytest.fail)
    for step in steps:
        copy.submit(checkpoint(folder, step))
        copy.wait()
    copy.close()


def there(url: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in remote.list_files(f"{url}/checkpoints"):
        found.setdefault(name.partition("/")[0], set()).add(name.partition("/")[2])
    return found


WHOLE = {"manifest.json", "model.safetensors", "state.json"}


# --- from here to there ----------------------------------------------------------------------------------------------


def test_the_newest_two_checkpoints_are_there_with_the_tables_of_that_moment(tmp_path: Path, url: str) -> None:
    folder = begun(tmp_path / "run")
    copied(folder, url, 1, 2, 3)
    assert there(url) == {"step-00000002": WHOLE, "step-00000003": WHOLE}
    for path in (folder / "checkpoints").rglob("*.*"):
        assert remote.read(f"{url}/{path.relative_to(folder)}") == path.read_bytes()
    lines = ['{"step": 1}', '{"after": 1}', '{"step": 2}', '{"after": 2}', '{"step": 3}']
    assert remote.read(f"{url}/events.jsonl").decode().splitlines() == lines
    assert remote.read(f"{url}/weights/best.safetensors") == b"best of 3"
    assert remote.read(f"{url}/config.json") == CONFIG.encode()
    assert not list(folder.glob(".*"))


def test_a_manifest_is_sent_last_and_removed_first(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    send, remove = remote.copy_to_remote, remote.remove

    def sending(path: Path, to: str) -> None:
        seen.append(("send", to))
        send(path, to)

    def removing(of: str) -> None:
        seen.append(("remove", of))
        remove(of)

    monkeypatch.setattr(remote, "copy_to_remote", sending)
    monkeypatch.setattr(remote, "remove", removing)
    copied(begun(tmp_path / "run"), url, 1, 2, 3)
    sent = [name for what, name in seen if what == "send"]
    assert len(sent) == 3 * 7
    assert [name.rpartition("/")[2] for name in sent[6::7]] == ["manifest.json"] * 3
    old = f"{url}/checkpoints/step-00000001"
    assert [name for what, name in seen if what == "remove"] == [f"{old}/manifest.json", old]


def test_checkpoints_that_come_faster_than_they_are_copied_are_left_out_but_for_the_newest(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one on its way is copied whole although it has long been removed here."""
    folder, go, send = begun(tmp_path / "run"), threading.Event(), remote.copy_to_remote
    sent: list[str] = []

    def slow(path: Path, to: str) -> None:
        assert go.wait(10)
        sent.append(to)
        send(path, to)

    monkeypatch.setattr(remote, "copy_to_remote", slow)
    copy = RunUploader(folder, url, pytest.fail)
    copy.submit(checkpoint(folder, 1))
    while copy._waiting is not None:  # until it is on its way
        time.sleep(0.001)
    for step in (2, 3, 4, 5):
        copy.submit(checkpoint(folder, step))
    assert [path.name for path in states.list_checkpoints(folder / "checkpoints")] == ["step-00000005", "step-00000004"]
    go.set()
    copy.close()
    assert there(url) == {"step-00000001": WHOLE, "step-00000005": WHOLE}
    first = next(name for name in sent if name.endswith("step-00000001/model.safetensors"))
    remote.copy_from_remote(first, tmp_path / "model.safetensors")
    assert torch.equal(
        tensor_files.read_tensors(tmp_path / "model.safetensors").tensors["weight"], torch.full((3, 5), 1.0)
    )


def test_a_run_that_went_on_from_before_replaces_what_came_later(tmp_path: Path, url: str) -> None:
    copied(begun(tmp_path / "one"), url, 1, 2, 5)
    copied(begun(tmp_path / "two"), url, 3)
    assert there(url) == {"step-00000002": WHOLE, "step-00000003": WHOLE}


def test_a_store_that_fails_is_told_of_and_tried_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said, send = begun(tmp_path / "run"), list[str](), remote.copy_to_remote
    failing = True

    def sent(path: Path, to: str) -> None:
        if failing and path.name == "manifest.json":
            raise RemoteError(f"{to} cannot be reached: gone")
        send(path, to)

    monkeypatch.setattr(remote, "copy_to_remote", sent)
    copy = RunUploader(folder, url, said.append)
    copy.submit(checkpoint(folder, 1))
    copy.wait()
    why = f"{url}/checkpoints/step-00000001/manifest.json cannot be reached: gone"
    assert said == [f"warning: step-00000001 is not uploaded; the run continues and tries again with the next: {why}"]
    with pytest.raises(
        RemoteError, match=f"the run is complete in {folder}, but its upload to {url} is not: .* --resume"
    ):
        copy.finish()
    failing = False
    copy.submit(checkpoint(folder, 2))
    copy.wait()
    assert there(url) == {"step-00000002": WHOLE}  # what half of the first was there is gone
    copy.finish()
    copy.close()
    assert there(url) == {"step-00000001": WHOLE, "step-00000002": WHOLE}
    shown = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert remote.list_files(url).keys() == shown


# --- from there to here ----------------------------------------------------------------------------------------------


def test_a_run_is_fetched_with_its_newest_checkpoint_and_no_other(tmp_path: Path, url: str) -> None:
    copied(begun(tmp_path / "run"), url, 1, 2)
    said: list[str] = []
    upload.download_runs(url, tmp_path / "other", said.append)
    found = {str(path.relative_to(tmp_path / "other")) for path in (tmp_path / "other").rglob("*") if path.is_file()}
    parts = {f"checkpoints/step-00000002/{name}" for name in WHOLE}
    assert found == parts | {"config.json", "results.csv", "events.jsonl", "weights/best.safetensors"}
    assert said == [f"{url}/checkpoints/step-00000002 is downloaded to {tmp_path / 'other'}"]
    snapshot = states.read_newest_checkpoint(tmp_path / "other" / "checkpoints", pytest.fail)
    assert snapshot is not None
    assert snapshot.tensors["model"]["weight"].tolist() == [[2.0] * 5] * 3
    assert (tmp_path / "other" / "events.jsonl").stat().st_size == snapshot.facts["files"]["events.jsonl"]


def test_the_runs_of_several_seeds_are_fetched_each_into_its_folder(tmp_path: Path, url: str) -> None:
    for seed in (0, 1):
        copied(begun(tmp_path / f"seed-{seed}"), f"{url}/seed-{seed}", seed + 1)
    upload.download_runs(url, tmp_path / "other", lambda _: None)
    found = [
        path.name
        for seed in (0, 1)
        for path in states.list_checkpoints(tmp_path / "other" / f"seed-{seed}" / "checkpoints")
    ]
    assert found == ["step-00000001", "step-00000002"]
    assert run_folder.make_upload_url(run_folder.resolve_local_folder(url) / "seed-1", url) == f"{url}/seed-1"


@pytest.mark.parametrize("part", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["damaged", "absent"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_fetched(
    tmp_path: Path, url: str, part: str, how: str
) -> None:
    copied(begun(tmp_path / "run"), url, 1, 2)
    far, said = f"{url}/checkpoints/step-00000002", list[str]()
    content = bytearray(remote.read(f"{far}/{part}"))
    remote.remove(f"{far}/{part}")
    if how == "damaged":
        content[len(content) // 2] ^= 1
        (tmp_path / "bad").write_bytes(content)
        remote.copy_to_remote(tmp_path / "bad", f"{far}/{part}")
    upload.download_runs(url, tmp_path / "other", said.append)
    assert [path.name for path in states.list_checkpoints(tmp_path / "other" / "checkpoints")] == ["step-00000001"]
    if (part, how) != ("manifest.json", "absent"):  # which is how one looks that was being copied
        assert said[0].startswith(f"warning: checkpoint {far} is") or far in said[0]
    assert said[-1] == f"{url}/checkpoints/step-00000001 is downloaded to {tmp_path / 'other'}"


def test_a_newer_checkpoint_here_is_kept_and_an_older_or_damaged_one_is_not_enough(tmp_path: Path, url: str) -> None:
    folder = begun(tmp_path / "run")
    copied(folder, url, 1, 2)
    (newest := checkpoint(folder, 3)).joinpath("state.json").stat()
    before = (folder / "events.jsonl").read_text()
    upload.download_runs(url, folder, pytest.fail)
    assert (folder / "events.jsonl").read_text() == before
    (newest / "state.json").write_text("damaged")
    (folder / "checkpoints" / "step-00000002" / "state.json").write_text("damaged")
    said: list[str] = []
    upload.download_runs(url, folder, said.append)
    assert said == [f"{url}/checkpoints/step-00000002 is downloaded to {folder}"]
    assert states.read_checkpoint(folder / "checkpoints" / "step-00000002").step == 2


def test_a_copy_without_a_whole_checkpoint_is_refused_and_one_without_any_is_no_obstacle(
    tmp_path: Path, url: str
) -> None:
    copied(begun(tmp_path / "run"), url, 1)
    (tmp_path / "bad").write_bytes(b"{}")
    remote.copy_to_remote(tmp_path / "bad", f"{url}/checkpoints/step-00000001/state.json")
    with pytest.raises(ModelError, match=f"none of the 1 checkpoints in {url}/checkpoints is intact"):
        upload.download_runs(url, tmp_path / "other", lambda _: None)
    remote.remove(f"{url}/checkpoints")
    upload.download_runs(url, tmp_path / "other", pytest.fail)
    upload.download_runs(f"{url}-nothing", tmp_path / "other", pytest.fail)
    assert not (tmp_path / "other" / "config.json").exists()


def test_a_url_that_is_taken_is_refused_and_only_a_run_may_be_overwritten(tmp_path: Path, url: str) -> None:
    upload.check_url_free(url, overwrite=False)
    (tmp_path / "thesis.txt").write_text("years of work")
    remote.copy_to_remote(tmp_path / "thesis.txt", f"{url}/thesis.txt")
    with pytest.raises(UsageError, match=f"{url} exists already; resume it"):
        upload.check_url_free(url, overwrite=False)
    with pytest.raises(UsageError, match=f"{url} is no run to overwrite"):
        upload.check_url_free(url, overwrite=True)
    (tmp_path / "config.json").write_text('{"architectures": ["ViT"]}')  # of a model, not of a run
    remote.copy_to_remote(tmp_path / "config.json", f"{url}/config.json")
    with pytest.raises(UsageError, match=f"{url} is no run to overwrite"):
        upload.check_url_free(url, overwrite=True)
    upload.remove_upload(url)
    copied(begun(tmp_path / "run"), url, 1)
    upload.check_url_free(url, overwrite=True)


def test_a_url_has_a_folder_of_its_own_below_runs() -> None:
    assert run_folder.resolve_local_folder("s3://bucket/one/b16/") == Path("runs/bucket/one/b16")
    assert run_folder.resolve_local_folder("s3://bucket/two/b16") == Path("runs/bucket/two/b16")
    for bad in ("s3://", "s3://bucket/../../etc"):
        with pytest.raises(UsageError, match="names no folder"):
            run_folder.resolve_local_folder(bad)


# --- the command -----------------------------------------------------------------------------------------------------


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return tensor_files.read_tensors(folder / "weights" / "last.safetensors").tensors


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take as long as such short runs, and are the business of others."""
    monkeypatch.setattr(
        result_files, "draw_run_images", lambda *given: (given[-1] / "results.png").write_bytes(b"drawn")
    )


def same(one: Path, two: Path) -> bool:
    return all(torch.equal(tensor, weights(two)[name]) for name, tensor in weights(one).items())


@pytest.mark.usefixtures("_undrawn")
def test_a_finished_run_is_there_whole_and_its_name_is_taken(
    tmp_path: Path, url: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = vitrail(*SHORT, "--out", f"{url}/", capsys=capsys)
    assert code == 0, err
    assert f"the run works in {run_folder.resolve_local_folder(url)} and is copied to {url}\n" in err
    assert f"; weights: {run_folder.resolve_local_folder(url)}/weights/best.safetensors;" in out
    folder = tmp_path / run_folder.resolve_local_folder(url)
    here = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert remote.list_files(url).keys() == here.keys()
    assert all(remote.read(f"{url}/{name}") == path.read_bytes() for name, path in here.items())
    monkeypatch.chdir(make(tmp_path / "elsewhere"))
    code, _, err = vitrail(*SHORT, "--out", url, capsys=capsys)
    assert (code, err.splitlines()[-1][: len(url) + 24]) == (2, f"vitrail: {url} exists already")
    code, _, err = vitrail(*SHORT, "--seed", "5", "--out", url, "--overwrite", capsys=capsys)
    assert code == 0, err
    assert json.loads(remote.read(f"{url}/config.json"))["seed"] == 5


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.usefixtures("_undrawn")
def test_a_run_that_is_stopped_ends_when_its_last_checkpoint_is_there(
    tmp_path: Path, url: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    give, send = RunUploader.submit, remote.copy_to_remote

    def given(copy: RunUploader, path: Path) -> None:
        give(copy, path)
        if path.name == "step-00000003":
            os.kill(os.getpid(), signal.SIGTERM)

    def slow(path: Path, to: str) -> None:
        time.sleep(0.01)
        send(path, to)

    monkeypatch.setattr(RunUploader, "submit", given)
    monkeypatch.setattr(remote, "copy_to_remote", slow)
    assert vitrail(*SHORT, "--out", url, capsys=capsys)[0] == StoppedError.exit_code
    newest = states.list_checkpoints(tmp_path / run_folder.resolve_local_folder(url) / "checkpoints")[0]
    assert there(url)[newest.name] == {path.name for path in newest.iterdir()}


@pytest.mark.usefixtures("_undrawn")
def test_a_run_killed_on_one_machine_goes_on_to_the_same_weights_on_another(
    tmp_path: Path, store: S3, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"s3://killed{os.getpid()}/runs/night"
    monkeypatch.chdir(make(tmp_path / "whole"))
    assert vitrail(*TRAIN, "--epochs", "0.6", capsys=capsys)[0] == 0
    monkeypatch.chdir(make(tmp_path / "one"))
    child = os.fork()
    if not child:
        os._exit(main([*TRAIN, "--epochs", "0.6", "--out", out]))
    end = time.monotonic() + 60
    while sum(line.startswith("PUT") and line.endswith("manifest.json") for line in list(store.requests)) < 3:
        assert time.monotonic() < end
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    monkeypatch.chdir(make(tmp_path / "two"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two" / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "two" / "data"))
    code, _, err = vitrail(*TRAIN, "--epochs", "0.6", "--out", out, "--resume", capsys=capsys)
    assert code == 0, err
    assert f"is downloaded to {run_folder.resolve_local_folder(out)}" in err
    assert "Its weights will be bit-identical to those of an uninterrupted run" in err
    assert same(tmp_path / "whole" / "runs" / "train", tmp_path / "two" / run_folder.resolve_local_folder(out))
    copy = store.below(f"{out[5:]}/weights/")["last.safetensors"]
    assert (
        copy == (tmp_path / "two" / run_folder.resolve_local_folder(out) / "weights" / "last.safetensors").read_bytes()
    )


@pytest.mark.usefixtures("_undrawn")
def test_a_store_that_goes_away_in_the_middle_costs_the_copy_and_not_the_run(
    tmp_path: Path, store: S3, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out, give = f"s3://away{os.getpid()}/run", RunUploader.submit

    def given(copy: RunUploader, path: Path) -> None:
        store.failing = 0 if path.name < "step-00000004" else 10**9
        give(copy, path)

    monkeypatch.setattr(RunUploader, "submit", given)
    code, _, err = vitrail(*SHORT, "--out", out, capsys=capsys)
    assert code == DataError.exit_code
    assert "is not uploaded; the run continues and tries again with the next" in err
    assert err.splitlines()[-1].startswith(
        f"vitrail: the run is complete in {run_folder.resolve_local_folder(out)}, but its upload to {out} is not: s3://"
    )
    store.failing = 0
    code, _, err = vitrail(*SHORT, "--out", out, "--resume", capsys=capsys)
    assert code == 0, err
    folder = tmp_path / run_folder.resolve_local_folder(out)
    assert store.below(f"{out[5:]}/") == {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
