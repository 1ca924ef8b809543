"""Parts of a list of images: together they are the whole, in its order, and shards of others stay closed."""

import io
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from tests.data.image_files import encode_image, make_image, write_image_folder
from vitrail.data import image_paths, webdataset
from vitrail.data.image_parts import Part, find_part_names, name_part, parse_part, select_part
from vitrail.errors import UsageError


def write_shards(folder: Path, counts: list[int]) -> list[str]:
    folder.mkdir(exist_ok=True)
    content = encode_image(make_image(0))
    for shard, count in enumerate(counts):
        with tarfile.open(folder / f"s-{shard}.tar", "w") as file:
            for number in range(count):
                member = tarfile.TarInfo(f"{number}.jpg")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    return [str(folder / f"s-{shard}.tar") for shard in range(len(counts))]


def select_names(arguments: list[str], number: int, of: int) -> list[str]:
    return [image.name for image in select_part(arguments, Part(number, of)).images]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_parts_one_after_the_other_are_the_whole(count: int, tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", [3, 1, 4])
    arguments = [str(write_image_folder(tmp_path / "photos", each=5)), str(tmp_path / "shards"), "nowhere.jpg", *shards]
    whole = [image.name for image in image_paths.iter_image_refs(arguments)]
    assert len(whole) == 27
    parts = [select_names(arguments, number, count) for number in range(1, count + 1)]
    assert [name for part in parts for name in part] == whole
    listings = {select_part(arguments, Part(number, count)).listing for number in range(1, count + 1)}
    assert len(listings) == 1
    assert select_part(arguments[:-1], Part(1, count)).listing not in listings


def test_files_are_divided_evenly_and_counted() -> None:
    names = [f"{number}.jpg" for number in range(11)]
    parts = [select_part(names, Part(number, 4)) for number in (1, 2, 3, 4)]
    assert [part.total for part in parts] == [2, 3, 3, 3]
    assert [len(list(part.images)) for part in parts] == [2, 3, 3, 3]


def test_shards_of_other_parts_stay_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = write_shards(tmp_path / "shards", [2, 3, 2, 3])
    opened = Counter[str]()
    iter_files = webdataset.iter_files

    def count_opened(path: str | Path) -> object:
        opened[str(path)] += 1
        return iter_files(path)

    monkeypatch.setattr(webdataset, "iter_files", count_opened)
    part = select_part(shards, Part(2, 2))
    assert (part.total, len(list(part.images))) == (0, 5)
    assert opened == Counter(shards[2:])
    assert len(select_names(shards, 2, 5)) == 2  # fewer shards than parts: images are divided


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{number}.jpg\n" for number in range(10))))
    assert select_names(["first.jpg", "-"], 2, 2) == [f"{number}.jpg" for number in range(4, 10)]


def test_parts_have_names_that_sort_in_their_order() -> None:
    part = Part(3, 128)
    names = {
        "rows.parquet": "rows-00003-of-00128.parquet",
        "a/rows.tar.csv": "a/rows.tar-00003-of-00128.csv",
        "features/": "features-00003-of-00128/",
        "s3://bucket/rows.npy": "s3://bucket/rows-00003-of-00128.npy",
    }
    assert {out: name_part(out, part) for out in names} == names
    listed = ["rows-00003-of-00128.parquet", "rows-00003-of-00128.csv", "rows.parquet", "more-00003-of-00128.parquet"]
    assert find_part_names("rows.parquet", listed) == {part: listed[0]}
    assert find_part_names("features/", ["features-00003-of-00128"]) == {part: "features-00003-of-00128"}


def test_a_part_is_a_number_of_a_count_or_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_part("3/128") == Part(3, 128)
    for text in ("0/4", "5/4", "3", "1/0", "a/b", "-1/4", "1/2/3"):
        with pytest.raises(UsageError, match="it is K/N, such as 3/128"):
            parse_part(text)
    for name in ("SLURM_ARRAY_TASK_ID", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert parse_part("auto") == Part(1, 1)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with pytest.raises(UsageError, match="SLURM_ARRAY_TASK_COUNT"):
        parse_part("auto")
    for name, value in (("COUNT", "8"), ("MIN", "1"), ("STEP", "1")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert parse_part("auto") == Part(3, 8)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")  # four tasks in each job
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert parse_part("auto") == Part(10, 32)
    monkeypatch.setenv("WORLD_SIZE", "2")  # torchrun's number is the same thing again
    monkeypatch.setenv("RANK", "1")
    assert parse_part("auto") == Part(6, 16)
