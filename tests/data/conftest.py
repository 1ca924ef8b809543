"""Fixtures for tests of public datasets."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.data.public_files import Get
from tests.data.test_download import described
from vitrail.data import public_datasets, shards
from vitrail.data.dataset import Dataset
from vitrail.data.public_datasets import PUBLIC_DATASETS


@pytest.fixture
def get_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Get:
    """Gets a set from files like those of one of its mirrors, but small."""

    def get(name: str, files: Mapping[str, bytes], mirror: int = 0, **changes: Any) -> Dataset:
        real = PUBLIC_DATASETS[name]
        assert [file.name for file in real.mirrors[mirror].files] == list(files)
        small = real.mirrors[mirror]._replace(files=tuple(described(key, content) for key, content in files.items()))
        monkeypatch.setitem(PUBLIC_DATASETS, name, dataclasses.replace(real, mirrors=(small,), **changes))
        folder = tmp_path / "mine"
        folder.mkdir(exist_ok=True)
        for key, content in files.items():
            (folder / key).write_bytes(content)
        path = public_datasets.download_dataset(name, [folder / key for key in reversed(list(files))])
        assert all((folder / key).read_bytes() == content for key, content in files.items())
        return shards.open_shards(path)

    return get
