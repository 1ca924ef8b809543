"""Batches: the same samples, pixels and mixtures for any workers, ranks, micro-batches and point of resumption."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.data.pictures import encoded, folder, picture
from vitrail.config import AugmentConfig, MaskedConfig, PreprocessConfig
from vitrail.data import gpu_augment, loader
from vitrail.data.decode import decode
from vitrail.data.digits import open_digits
from vitrail.data.file_list import open_file_list
from vitrail.data.folder import open_folder
from vitrail.data.loader import (
    Batch,
    BatchPlan,
    TrainingData,
    iter_eval_batches,
    iter_masked_eval_batches,
    iter_train_batches,
    prepare_train_batch,
)
from vitrail.data.order import SampleOrder
from vitrail.data.pack import pack
from vitrail.data.shards import open_shards
from vitrail.data.transforms import make_eval_input
from vitrail.errors import DataError, UsageError

VIEW = PreprocessConfig(size=(8, 8), resize=(10,))
EVERYTHING = AugmentConfig(randaugment=(2, 10), jitter=0.3, erase=0.5, mixup=0.3, cutmix=1.0)


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("set"), "train", "val", each=9)


def training(root: Path, augment: AugmentConfig = EVERYTHING, **changes: object) -> TrainingData:
    split = open_folder(root).splits["train"]
    order = SampleOrder(seed=4, num_samples=len(split))
    fields = {"split": split, "order": order, "augment": augment, "preprocess": VIEW, "seed": 4, "classes": 2}
    return TrainingData(**(fields | changes))


def seen(task: TrainingData, plan: BatchPlan, start: int = 0, workers: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Per step what all of this rank's micro-batches hold, joined."""
    batches = iter_train_batches(task, plan, start_step=start, workers=workers)
    steps = []
    for step in range(start, plan.total_steps):
        parts = [prepare_train_batch(next(batches), task, plan, step) for _ in range(plan.micro_batches)]
        parts = [part for part in parts if len(part[0])]
        if parts:
            steps.append((torch.cat([image for image, _ in parts]), torch.cat([target for _, target in parts])))
        else:
            steps.append((torch.empty(0), torch.empty(0)))
    assert next(batches, None) is None
    return steps


def equal(one: list[tuple[Tensor, Tensor]], two: list[tuple[Tensor, Tensor]]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(one, two, strict=True)
    )


@given(st.data())
@settings(max_examples=2000, deadline=None)
def test_positions_of_ranks_and_micro_batches_tile_every_step(data: st.DataObject) -> None:
    """World sizes, micro-batches and resume points change nobody's position: 2,000 configurations."""
    batch, total = data.draw(st.integers(1, 64)), data.draw(st.integers(0, 150))
    world, micro = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4))
    plans = [
        BatchPlan(batch_size=batch, total_positions=total, rank=rank, world_size=world, micro_batches=micro)
        for rank in range(world)
    ]
    start = data.draw(st.integers(0, plans[0].total_steps))
    line = [
        position
        for step in range(start, plans[0].total_steps)
        for plan in plans
        for part in plan.list_micro_batches(step)
        for position in part
    ]
    assert line == list(range(start * batch, total))


@given(st.data())
@settings(max_examples=1000, deadline=None)
def test_mixing_partners_are_the_next_of_the_global_batch_whatever_the_ranks(data: st.DataObject) -> None:
    batch, total = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 200))
    world, micro = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    step = data.draw(st.integers(0, -(-total // batch) - 1))
    task = TrainingData.__new__(TrainingData)
    object.__setattr__(task, "augment", AugmentConfig(mixup=0.2))
    size = min(batch, total - step * batch)
    for rank in range(world):
        plan = BatchPlan(batch_size=batch, total_positions=total, rank=rank, world_size=world, micro_batches=micro)
        for part in plan.list_micro_batches(step):
            if part:
                loaded = task.get_positions(plan, step, part).tolist()
                assert loaded[:-1] == list(part)
                assert loaded[-1] == step * batch + (part[-1] + 1 - step * batch) % size


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("augment", [EVERYTHING, AugmentConfig()], ids=["everything", "plain"])
def test_world_size_and_micro_batches_change_no_pixel(
    flowers: Path, augment: AugmentConfig, world: int, micro: int
) -> None:
    task = training(flowers, augment)
    reference = seen(task, BatchPlan(batch_size=8, total_positions=45))
    plans = [
        BatchPlan(batch_size=8, total_positions=45, rank=rank, world_size=world, micro_batches=micro)
        for rank in range(world)
    ]
    shares = [seen(task, plan) for plan in plans]
    for step, (images, targets) in enumerate(reference):
        mine = [share[step] for share in shares if len(share[step][0])]
        assert torch.equal(torch.cat([image for image, _ in mine]), images)
        assert torch.equal(torch.cat([target for _, target in mine]), targets)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_change_no_pixel(flowers: Path, workers: int) -> None:
    task, plan = training(flowers), BatchPlan(batch_size=8, total_positions=45)
    assert equal(seen(task, plan), seen(task, plan, workers=workers))


@pytest.mark.parametrize("start", [1, 3, 5, 6])
def test_a_resumed_run_sees_what_it_would_have_seen(flowers: Path, start: int) -> None:
    task, plan = training(flowers), BatchPlan(batch_size=8, total_positions=45)
    assert equal(seen(task, plan)[start:], seen(task, plan, start=start, workers=start % 3))


def test_batches_run_across_epochs_and_only_the_last_is_short(flowers: Path) -> None:
    task, plan = training(flowers, AugmentConfig()), BatchPlan(batch_size=8, total_positions=36)
    batches = list(iter_train_batches(task, plan))
    assert [len(batch.targets) for batch in batches] == [8, 8, 8, 8, 4]
    assert torch.cat([batch.positions for batch in batches]).tolist() == list(range(36))
    samples = [task.order.get_sample_indices(batch.positions.numpy()) for batch in batches]
    twice = np.concatenate(samples)
    assert sorted(twice.tolist()) == sorted([*range(18), *range(18)])
    labels = [task.split.get_labels(int(sample))[0] for sample in twice]
    assert torch.cat([batch.targets for batch in batches]).tolist() == labels


def test_shards_are_read_window_by_window_with_the_folders_pixels(flowers: Path, tmp_path: Path) -> None:
    pack(open_folder(flowers), tmp_path / "out")
    split = open_shards(tmp_path / "out").splits["train"]
    order = SampleOrder(seed=4, num_samples=len(split), shard_sizes=split.count_per_shard(), shard_window=1)
    task = training(flowers, AugmentConfig(crop="squash", flip=False), split=split, order=order)
    [batch] = iter_train_batches(task, BatchPlan(batch_size=18, total_positions=18))
    plain = training(flowers, AugmentConfig(crop="squash", flip=False))
    [expected] = iter_train_batches(plain, BatchPlan(batch_size=18, total_positions=18))
    assert sorted(image.tolist() for image in batch.pixels) == sorted(image.tolist() for image in expected.pixels)


def test_spawned_workers_give_the_same(flowers: Path) -> None:
    """A process that starts afresh instead of as a copy; the default elsewhere, and in Python 3.14 here."""
    code = f"""
import multiprocessing, sys
from pathlib import Path
from tests.data.test_loader import EVERYTHING, seen, training
from vitrail.data.loader import Plan
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    task, plan = training(Path({str(flowers)!r})), Plan(batch=8, total=20)
    for images, targets in seen(task, plan, workers=2):
        print(images.double().sum().item(), targets.double().sum().item())
"""
    script = flowers.parent / f"spawn-{os.getpid()}.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    expected = seen(training(flowers), BatchPlan(batch_size=8, total_positions=20))
    lines = [f"{images.double().sum().item()} {targets.double().sum().item()}" for images, targets in expected]
    assert run.stdout.splitlines() == lines, run.stderr[-2000:]


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_image_once_as_the_classifier_does(flowers: Path, workers: int) -> None:
    split = open_folder(flowers).splits["val"]
    for world in (1, 3):
        found: list[Batch] = []
        for rank in range(world):
            share = iter_eval_batches(
                split, VIEW, batch_size=4, num_classes=2, rank=rank, world_size=world, workers=workers
            )
            found.extend(share)
        assert torch.cat([batch.positions for batch in found]).tolist() == list(range(18))
        pixels = torch.cat([batch.pixels for batch in found])
        for index in range(18):
            assert torch.equal(pixels[index], make_eval_input(decode(split.read_image(index)), VIEW))


MASKED = {
    "mpp": MaskedConfig(kind="mpp", mask_ratio=0.5, target="mean-color"),
    "mae": MaskedConfig(kind="mae", mask_ratio=0.75, target="pixels"),
}


@pytest.mark.parametrize("masked", MASKED.values(), ids=MASKED)
def test_every_part_of_a_masked_step_has_its_images_what_is_hidden_and_the_next_image(
    flowers: Path, masked: MaskedConfig
) -> None:
    """However a step is cut, each image stands beside the same one, its partner, and the same is hidden of it."""
    task = training(flowers, AugmentConfig(), masked=masked, patches=16)
    [(images, hiding)] = [
        prepare_train_batch(
            next(iter_train_batches(task, plan := BatchPlan(batch_size=18, total_positions=18))), task, plan, 0
        )
    ]
    assert hiding.shape == (18, 2, 16)
    partners = 1 if masked.kind == "mpp" else 0
    assert len(images) == 18 + partners
    whole = torch.cat([images[:18], images[:1]])  # the last one's partner is the first
    if partners:
        assert torch.equal(images, whole)
    for world, micro in ((1, 5), (3, 2)):
        first = 0
        for rank in range(world):
            plan = BatchPlan(batch_size=18, total_positions=18, rank=rank, world_size=world, micro_batches=micro)
            for batch in iter_train_batches(task, plan, workers=rank % 2):
                some, hidden = prepare_train_batch(batch, task, plan, 0)
                assert len(some) == len(hidden) + partners
                assert torch.equal(hidden, hiding[first : first + len(hidden)])
                assert torch.equal(some, whole[first : first + len(some)])
                first += len(hidden)
        assert first == 18


@pytest.mark.parametrize("masked", MASKED.values(), ids=MASKED)
def test_a_masked_set_on_the_device_gives_what_the_workers_give(masked: MaskedConfig) -> None:
    split = open_digits().splits["train"]
    order, view = (
        SampleOrder(seed=1, num_samples=len(split)),
        PreprocessConfig(size=(8, 8), resize=(8, 8), mean=(0.5,), std=(0.5,)),
    )
    fields: dict[str, Any] = {
        "augment": AugmentConfig(crop="pad", flip=False),
        "preprocess": view,
        "seed": 1,
        "classes": 10,
    }
    task = TrainingData(split=split, order=order, masked=masked, num_patches=16, **fields)
    plan = BatchPlan(batch_size=50, total_positions=170, micro_batches=3)
    found = loader.load_resident_images(split, channels=1, num_classes=10, device="cpu")
    assert found is not None
    there = list(loader.iter_resident_train_batches(task, plan, *found, start_step=1))
    for number, (one, two) in enumerate(zip(there, iter_train_batches(task, plan, start_step=1), strict=True)):
        for ours, theirs in zip(
            prepare_train_batch(one, task, plan, 1 + number // 3),
            prepare_train_batch(two, task, plan, 1 + number // 3),
            strict=True,
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("masked", MASKED.values(), ids=MASKED)
def test_masked_evaluation_hides_the_same_in_batches_and_ranks_of_any_size(flowers: Path, masked: MaskedConfig) -> None:
    split = open_folder(flowers).splits["val"]
    [whole] = iter_masked_eval_batches(split, VIEW, masked, 16, batch_size=100)
    [plain] = iter_eval_batches(split, VIEW, batch_size=100, num_classes=2)
    partners = 1 if masked.kind == "mpp" else 0
    around = torch.cat([plain.pixels, plain.pixels[:1]])
    assert torch.equal(whole.pixels, around[: 18 + partners])
    assert torch.equal(whole.positions, plain.positions)
    for world, batch in ((1, 5), (2, 4), (5, 2)):
        first = 0
        for rank in range(world):
            for part in iter_masked_eval_batches(
                split, VIEW, masked, 16, batch_size=batch, rank=rank, world_size=world
            ):
                count = len(part.targets)
                assert torch.equal(part.targets, whole.targets[first : first + count])
                assert torch.equal(part.pixels, around[first : first + count + partners])
                first += count
        assert first == 18


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_is_named_and_left_out_only_when_told_to(flowers: Path, tmp_path: Path, workers: int) -> None:
    root = folder(tmp_path, "train", "val", each=4)
    (root / "train" / "rose" / "2.jpg").write_bytes(b"<html>")
    (root / "val" / "rose" / "1.jpg").write_bytes(b"")
    plan = BatchPlan(batch_size=4, total_positions=16)
    with pytest.raises(DataError, match=r"^train/rose/2.jpg is no image"):
        list(iter_train_batches(training(root), plan, workers=workers))
    batches = list(iter_train_batches(training(root, AugmentConfig(), skip_bad=True), plan, workers=workers))
    assert {name for batch in batches for name in batch.skipped_images} == {"train/rose/2.jpg"}
    assert sum(len(batch.pixels) for batch in batches) == 16
    split = open_folder(root).splits["val"]
    with pytest.raises(DataError, match=r"^val/rose/1.jpg"):
        list(iter_eval_batches(split, VIEW, batch_size=3, num_classes=2, workers=workers))
    kept = list(iter_eval_batches(split, VIEW, batch_size=3, num_classes=2, workers=workers, skip_bad=True))
    assert torch.cat([batch.positions for batch in kept]).tolist() == [0, 2, 3, 4, 5, 6, 7]


def test_several_labels_become_shares(flowers: Path) -> None:
    path = flowers / "list.csv"
    path.write_text(
        "path,labels,split\ntrain/rose/0.jpg,a;c,train\ntrain/rose/1.jpg,,train\ntrain/rose/2.jpg,b,train\n"
    )
    split = open_file_list(path).splits["train"]
    [batch] = iter_eval_batches(split, VIEW, batch_size=9, num_classes=3)
    by_name = {split.get_image_name(index): batch.targets[index].tolist() for index in range(len(split))}
    known = {"train/rose/0.jpg": [1, 0, 1], "train/rose/1.jpg": [0, 0, 0], "train/rose/2.jpg": [0, 1, 0]}
    assert all(by_name[name] == known[name] for name in by_name)
    assert len(by_name) >= 2


def digits(augment: AugmentConfig, split: str = "train") -> tuple[TrainingData, tuple[Tensor, Tensor]]:
    """A task that resizes nothing, and its images on the device."""
    images = open_digits().splits[split]
    view = PreprocessConfig(size=(8, 8), resize=(8, 8), mean=(0.5,), std=(0.5,))
    order = SampleOrder(seed=1, num_samples=len(images))
    task = TrainingData(split=images, order=order, augment=augment, preprocess=view, seed=1, num_classes=10)
    found = loader.load_resident_images(images, channels=1, num_classes=10, device="cpu")
    assert found is not None
    return task, found


def same(one: Iterable[Batch], two: Iterable[Batch]) -> bool:
    pairs = list(zip(one, two, strict=True))
    return all(torch.equal(a, b) for batches in pairs for a, b in zip(*(batch[:3] for batch in batches), strict=True))


PLANS = {
    "whole": BatchPlan(batch_size=32, total_positions=96),
    "rank": BatchPlan(batch_size=32, total_positions=100, rank=1, world_size=2),
    "short": BatchPlan(batch_size=16, total_positions=101),
    "micro": BatchPlan(batch_size=16, total_positions=101, micro_batches=3),
    "micro-rank": BatchPlan(
        batch_size=8, total_positions=33, rank=0, world_size=2, micro_batches=2
    ),  # the last step has one image for four
    "epochs": BatchPlan(batch_size=500, total_positions=1700, micro_batches=2),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(
    "augment",
    [
        AugmentConfig(crop="pad"),
        AugmentConfig(crop="pad", mixup=0.2),
        AugmentConfig(crop="squash", randaugment=(2, 15), jitter=0.5, erase=0.5, cutmix=1.0),
    ],
    ids=["plain", "mixed", "everything"],
)
def test_a_set_on_the_device_gives_what_the_workers_give(
    monkeypatch: pytest.MonkeyPatch, augment: AugmentConfig, plan: BatchPlan
) -> None:
    """However many batches are made at once, and from whichever step on; without a resize, to the bit."""
    task, found = digits(augment)
    for start in (0, plan.total_steps // 2, plan.total_steps - 1, plan.total_steps):
        by_workers = list(iter_train_batches(task, plan, start_step=start))
        for room in (1, 5000, 2**26):
            monkeypatch.setattr(loader, "_AUGMENT_CHUNK_BYTES", room)
            assert same(by_workers, loader.iter_resident_train_batches(task, plan, *found, start_step=start)), (
                start,
                room,
            )


def test_as_many_batches_are_made_at_once_as_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of 8 x 8 bytes, 16 a step: two steps in 2048 to 3071 bytes, in halves that count together."""
    task, found = digits(AugmentConfig(crop="pad"))
    made, views = list[int](), gpu_augment.make_train_inputs

    def noted(pixels: Tensor, *rest: Any) -> Tensor:
        made.append(len(pixels))
        return views(pixels, *rest)

    monkeypatch.setattr(gpu_augment, "make_train_inputs", noted)
    for room, expected in ((1, [16, 16, 16, 16, 6]), (2047, [16, 16, 16, 16, 6]), (2048, [32, 32, 6]), (2**26, [70])):
        monkeypatch.setattr(loader, "_AUGMENT_CHUNK_BYTES", room)
        made.clear()
        batches = loader.iter_resident_train_batches(
            task, BatchPlan(batch_size=16, total_positions=70, micro_batches=2), *found
        )
        next(batches)
        assert made == expected[:1]  # the others not before they are wanted
        assert sum(1 for _ in batches) == 2 * 5 - 1
        assert made == expected


@pytest.mark.parametrize("jitter", [0.0, 0.5])
@pytest.mark.parametrize("crop", ["inception", "window", "pad", "squash"])
def test_a_short_last_step_may_leave_a_rank_nothing(crop: Any, jitter: float) -> None:
    task, found = digits(AugmentConfig(crop=crop, mixup=0.2, jitter=jitter, randaugment=(2, 10), erase=0.5), "val")
    plan = BatchPlan(batch_size=8, total_positions=9, rank=0, world_size=2)
    for start in (0, 1):  # beside others, and alone
        for batches in (
            iter_train_batches(task, plan, start_step=start),
            loader.iter_resident_train_batches(task, plan, *found, start_step=start),
        ):
            last = list(batches)[-1]
            images, shares = prepare_train_batch(last, task, plan, 1)
            assert images.shape == (0, 1, 8, 8)
            assert shares.shape == (0, 10)
            assert shares.dtype == torch.float32


def test_a_set_on_the_device_holds_every_image_and_target(flowers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_CHUNK_IMAGES", 4)  # four full chunks and a short one
    split = open_folder(flowers).splits["train"]
    for workers in (0, 2):
        found = loader.load_resident_images(split, channels=3, num_classes=2, device="cpu", workers=workers)
        assert found is not None
        pixels, targets = found
        assert torch.equal(pixels, torch.stack([decode(split.read_image(index)) for index in range(18)]))
        assert targets.tolist() == [split.get_labels(index)[0] for index in range(18)]


@pytest.mark.parametrize("odd", ["rose/0.jpg", "tulip/3.jpg"])
@pytest.mark.parametrize("size", [(30, 30), (24, 20)])
def test_images_of_different_sizes_do_not_live_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], odd: str
) -> None:
    """Wherever the odd one is, in the first chunk or in the last, and where it has as many pixels."""
    monkeypatch.setattr(loader, "_CHUNK_IMAGES", 2)
    root = folder(tmp_path, "train", "val", each=4)
    (root / "train" / odd).write_bytes(encoded(picture(0, size)))
    splits = open_folder(root).splits
    assert loader.load_resident_images(splits["train"], channels=3, num_classes=2, device="cpu") is None
    assert loader.load_resident_images(splits["val"], channels=3, num_classes=2, device="cpu") is not None


def test_large_images_or_too_many_do_not_live_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size, lives in (("limit", (128, 128), True), ("above", (128, 129), False)):
        place = tmp_path / name / "train" / "rose"
        place.mkdir(parents=True)
        for number in range(2):
            (place / f"{number}.jpg").write_bytes(encoded(picture(number, size)))
        split = open_folder(tmp_path / name).splits["train"]
        found = loader.load_resident_images(split, channels=3, num_classes=1, device="cpu")
        assert (found is not None) == lives, name
    split = open_folder(tmp_path / "limit").splits["train"]
    bytes_together = len(split) * 3 * 128 * 128
    for room, lives in ((bytes_together, True), (bytes_together - 1, False)):
        monkeypatch.setattr(loader, "_MAX_RESIDENT_BYTES", room)
        assert (loader.load_resident_images(split, channels=3, num_classes=1, device="cpu") is not None) == lives


def test_a_bad_image_of_a_set_for_the_device_is_named(tmp_path: Path) -> None:
    root = folder(tmp_path, "train", "val", each=3)
    (root / "train" / "rose" / "2.jpg").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"^train/rose/2.jpg is no image"):
        loader.load_resident_images(open_folder(root).splits["train"], channels=3, num_classes=2, device="cpu")


def test_a_plan_that_cannot_be_is_refused() -> None:
    for wrong in ({"batch": 0}, {"rank": 2, "world": 2}, {"micro_batches": 0}):
        with pytest.raises(UsageError, match="cannot be"):
            BatchPlan(**({"batch": 4, "total": 8} | wrong))
