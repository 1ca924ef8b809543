"""VTAB tasks are the paper's; their lists are read as they are, and stored datasets are drawn from."""

from pathlib import Path

import pytest

from tests.data.image_files import encode_image, list_names, make_image
from vitrail.data import public_datasets, shards
from vitrail.data.shards import Sample
from vitrail.errors import DataError, UsageError
from vitrail.studies import vtab_tasks
from vitrail.studies.vtab_tasks import TASKS


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_lists(root: Path, task: str, **counts: int) -> Path:
    """A task's folder as the benchmark is distributed; image n has class n modulo the number of classes."""
    task_folder = root / task
    (task_folder / "images").mkdir(parents=True)
    number = 0
    for split, name in vtab_tasks.LIST_FILES.items():
        lines = []
        for _ in range(counts.get(split, 4)):
            (task_folder / "images" / f"{number:03d}.png").write_bytes(
                encode_image(make_image(number, (20, 40)), "PNG")
            )
            lines.append(f"images/{number:03d}.png {number % TASKS[task].classes}\n")
            number += 1
        (task_folder / name).write_text("".join(lines))
    return root


def test_lists_are_read_as_they_are(tmp_path: Path) -> None:
    write_lists(tmp_path, "svhn", train=800, val=200, test=3)
    dataset = vtab_tasks.open_vtab_dataset("svhn", tmp_path, 0)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 800, "val": 200, "test": 3}
    assert (dataset.classes, dataset.notes) == (tuple("0123456789"), ())
    for first, split in ((0, "train"), (800, "val"), (1000, "test")):
        for index in (0, len(dataset.splits[split]) - 1):
            assert dataset.splits[split].get_image_name(index) == f"images/{first + index:03d}.png"
            assert dataset.splits[split].get_labels(index) == ((first + index) % 10,)
    joined = dataset.splits["train"].merge(dataset.splits["val"])
    assert len(joined) == 1000


@pytest.mark.parametrize("line", ["images/1.png 10", "images/1.png", "images/1.png -1", "images/1.png one"])
def test_a_line_that_is_no_path_and_label_is_named(line: str, tmp_path: Path) -> None:
    write_lists(tmp_path, "svhn")
    (tmp_path / "svhn" / "val200.txt").write_text(f"images/000.png 3\n{line}\n")
    with pytest.raises(DataError, match=r"val200.txt, line 2 is .*; it must be a path and 0 to 9"):
        vtab_tasks.open_vtab_dataset("svhn", tmp_path, 0)


def test_a_stored_dataset_is_drawn_from_by_seed() -> None:
    """800 and 200 of those there are, the same for a seed, and all of test."""
    samples = [
        Sample(split, f"{split}/{number:04d}.png", encode_image(make_image(number, (4, 4)), "PNG"), (number % 10,))
        for split, count in (("train", 900), ("val", 250), ("test", 30))
        for number in range(count)
    ]
    shards.write_shards(public_datasets.get_dataset_folder("svhn"), samples, classes=list("0123456789"), origin={})
    assert vtab_tasks.find_source_kind("svhn", Path("nowhere")) == "public"
    datasets = [vtab_tasks.open_vtab_dataset("svhn", Path("nowhere"), seed) for seed in (0, 0, 1)]
    assert {name: len(split) for name, split in datasets[0].splits.items()} == {"train": 800, "val": 200, "test": 30}
    assert list_names(datasets[0]) == list_names(datasets[1])
    assert set(list_names(datasets[0])["train"]) != set(list_names(datasets[2])["train"])
    assert list_names(datasets[0])["test"] == list_names(datasets[2])["test"]
    assert "seed 1" in datasets[2].notes[0]


def test_the_tasks_are_the_papers() -> None:
    groups = [sum(task.group == group for task in TASKS.values()) for group in vtab_tasks.TASK_GROUPS]
    assert groups == [7, 4, 8]
    augmentations: dict[tuple[bool, bool], set[str]] = {(task.random_crop, task.flip): set() for task in TASKS.values()}
    for name, task in TASKS.items():
        augmentations[task.random_crop, task.flip].add(name)
    assert augmentations[False, False] == {"dsprites_loc"}
    assert augmentations[True, False] == {"dsprites_ori", "smallnorb_azi"}
    assert augmentations[False, True] == {"clevr_count", "clevr_dist", "dmlab", "kitti"}
    assert len(augmentations[True, True]) == 12
    assert sum(task.classes for task in TASKS.values()) == 940
    with pytest.raises(UsageError, match="VTAB has no task 'mnist'"):
        vtab_tasks.get_task("mnist")
