"""Tables on disk stay readable while another process writes the same one."""

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

from vitrail.data import sample_table
from vitrail.errors import DataError

COLUMNS = {"label": np.arange(5), **sample_table.encode_text_column("path", ["a", "b", "c", "d", "e"])}


def write_example(folder: Path) -> sample_table.SampleTable:
    return sample_table.write_table(folder, COLUMNS, {"classes": ["one"]})


def test_a_table_that_was_written_is_read_after_another_process_took_its_place(tmp_path: Path) -> None:
    table = write_example(tmp_path / "index")
    (tmp_path / "index").rename(tmp_path / "aside")  # as it is while another is put there
    assert table["label"].tolist() == [0, 1, 2, 3, 4]
    assert table.get_text("path", 3) == "d"


def test_a_worker_waits_for_the_instant_in_which_a_table_is_replaced(tmp_path: Path) -> None:
    pickled = pickle.dumps(write_example(tmp_path / "index"))
    (tmp_path / "index").rename(tmp_path / "aside")
    back = threading.Timer(0.1, (tmp_path / "aside").rename, [tmp_path / "index"])
    back.start()
    assert pickle.loads(pickled)["label"].tolist() == [0, 1, 2, 3, 4]
    back.join()


def test_a_table_that_is_gone_is_named(tmp_path: Path) -> None:
    pickled = pickle.dumps(write_example(tmp_path / "index"))
    (tmp_path / "index").rename(tmp_path / "aside")
    with pytest.raises(DataError, match=r"index can no longer be read .*run the command again"):
        pickle.loads(pickled)["label"]
