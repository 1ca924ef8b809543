"""Atomic writes, regular files, digests and the folders of vitrail's own data."""

import hashlib
import os
from pathlib import Path

import pytest

from vitrail import files
from vitrail.errors import DataError, UsageError


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    with files.write_atomically(path) as fresh:
        fresh.write_text("one")
        assert not path.exists()
    assert path.read_text() == "one"

    def write_and_fail() -> None:
        with files.write_atomically(path, overwrite=True) as fresh:
            fresh.write_text("half")
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        write_and_fail()
    assert path.read_text() == "one"
    assert list(path.parent.iterdir()) == [path]  # nothing temporary is left


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for name in ("old", "new"):
        with files.write_atomically(path, overwrite=True) as fresh:
            fresh.mkdir()
            (fresh / name).write_text(name)
    assert [each.name for each in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]
    with (
        pytest.raises(UsageError, match="is a folder and cannot be replaced by a file"),
        files.write_atomically(path, overwrite=True) as fresh,
    ):
        fresh.write_text("file")
    assert [each.name for each in path.iterdir()] == ["new"]


def test_what_exists_is_replaced_only_on_request_and_a_link_never(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(UsageError, match="exists already"):
        files.check_path_free(tmp_path / "file", overwrite=False)
    files.check_path_free(tmp_path / "file", overwrite=True)
    files.check_path_free(tmp_path / "free", overwrite=False)
    with pytest.raises(UsageError, match="is a link"):
        files.check_path_free(tmp_path / "link", overwrite=True)


def test_a_pipe_and_a_folder_are_refused_and_opening_them_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(DataError, match="rose is a folder, pipe"), files.open_regular_file(path, name="rose"):
            pass
    (tmp_path / "file").write_bytes(b"bytes")
    with files.open_regular_file(tmp_path / "file") as file:
        assert file.read() == b"bytes"


@pytest.mark.parametrize("size", [0, 1, 2**24 + 3])
def test_a_digest_is_that_of_all_bytes(size: int, tmp_path: Path) -> None:
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    (tmp_path / "file").write_bytes(content)
    assert files.compute_sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_own_data_goes_where_the_specification_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", "/elsewhere")
    assert files.get_data_home() == Path("/elsewhere/vitrail")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.get_data_home() == tmp_path / ".local" / "share" / "vitrail"
    assert files.get_cache_home() == tmp_path / ".cache" / "vitrail"


def test_a_mistyped_path_is_answered_with_the_nearest_beside_it(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    assert files.suggest_path(tmp_path / "photoss") == f"; did you mean {tmp_path / 'photos'}?"
    assert files.suggest_path(tmp_path / "else") == ""
    assert files.suggest_path(tmp_path / "nowhere" / "photos") == ""
