"""The tasks of VTAB are the paper's."""

import pytest

from vitrail.errors import UsageError
from vitrail.studies import vtab_tasks
from vitrail.studies.vtab_tasks import TASKS


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
