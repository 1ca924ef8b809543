"""The batches that a run reads, and what happens to images that cannot be read."""

from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from tests.train.test_training_run import learning
from vitrail.data.loader import Batch
from vitrail.errors import DataError
from vitrail.runtime.distributed import ProcessGroup
from vitrail.train import run_batches
from vitrail.train.run_batches import UnreadableImages, iterate_split_batches, iterate_train_batches


def test_training_starts_at_any_step_with_the_same_batches() -> None:
    run = learning({})
    whole = list(iterate_train_batches(run))
    assert sum(len(batch.targets) for batch in whole) == 1439
    later = list(iterate_train_batches(run, 20))
    assert len(later) == len(whole) - 20
    for one, other in zip(whole[20:], later, strict=True):
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.targets, other.targets)


def test_ranks_share_the_images_of_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_batches, "_EVAL_BATCH_SIZE", 50)
    run = learning({})
    alone = torch.cat([batch.positions for batch in iterate_split_batches(run, "val")])
    assert alone.tolist() == list(range(179))
    parts = [
        torch.cat([batch.positions for batch in iterate_split_batches(run, "val", ProcessGroup(rank, 2))])
        for rank in (0, 1)
    ]
    assert sorted(torch.cat(parts).tolist()) == alone.tolist()


def make_batches(*skipped: tuple[str, ...]) -> Generator[Batch, None, None]:
    for names in skipped:
        yield Batch(torch.zeros(1, 1, 8, 8), torch.zeros(1), torch.zeros(1), names)


def test_images_left_out_are_listed_once_also_after_an_interruption(tmp_path: Path) -> None:
    unreadable = UnreadableImages(tmp_path, 100)
    assert len(list(unreadable.watch(make_batches(("a.jpg",), (), ("b.jpg", "a.jpg"))))) == 3
    resumed = UnreadableImages(tmp_path, 100)
    resumed.load()
    list(resumed.watch(make_batches(("b.jpg", "two\nlines.jpg"))))
    assert (tmp_path / run_batches.UNREADABLE_FILE).read_text() == "a.jpg\nb.jpg\ntwo\\nlines.jpg\n"
    assert list(resumed.names) == ["a.jpg", "b.jpg", "two\\nlines.jpg"]


def test_too_many_that_cannot_be_read_end_the_run_and_close_the_batches(tmp_path: Path) -> None:
    batches = make_batches(("1.jpg",), ("2.jpg",), ("3.jpg",), ())
    watched = UnreadableImages(tmp_path / "elsewhere", 20).watch(batches)
    with pytest.raises(DataError, match=r"3 images of 20 cannot be read, such as 1\.jpg: more than 10% are too many"):
        list(watched)
    assert next(batches, None) is None  # one was left
    assert not (tmp_path / "elsewhere").exists()
