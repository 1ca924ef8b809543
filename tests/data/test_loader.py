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
from vitrail.config import Augment, Masked, Preprocess
from vitrail.data import batched, loader
from vitrail.data.decode import decode
from vitrail.data.digits import open_digits
from vitrail.data.folder import open_folder
from vitrail.data.lists import open_list
from vitrail.data.loader import Batch, Plan, Training, evaluation_batches, masked_batches, prepared, training_batches
from vitrail.data.order import Order
from vitrail.data.pack import pack
from vitrail.data.shards import open_set
from vitrail.data.transforms import evaluation_view
from vitrail.errors import DataError, UsageError

VIEW = Preprocess(size=(8, 8), resize=(10,))
EVERYTHING = Augment(randaugment=(2, 10), jitter=0.3, erase=0.5, mixup=0.3, cutmix=1.0)


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("set"), "train", "val", each=9)


def training(root: Path, augment: Augment = EVERYTHING, **changes: object) -> Training:
    split = open_folder(root).splits["train"]
    order = Order(seed=4, count=len(split))
    fields = {"split": split, "order": order, "augment": augment, "preprocess": VIEW, "seed": 4, "classes": 2}
    return Training(**(fields | changes))


def seen(task: Training, plan: Plan, start: int = 0, workers: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Per step what all of this rank's micro-batches hold, joined."""
    batches = training_batches(task, plan, start=start, workers=workers)
    steps = []
    for step in range(start, plan.steps):
        parts = [prepared(next(batches), task, plan, step) for _ in range(plan.micro_batches)]
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
    plans = [Plan(batch=batch, total=total, rank=rank, world=world, micro_batches=micro) for rank in range(world)]
    start = data.draw(st.integers(0, plans[0].steps))
    line = [
        position
        for step in range(start, plans[0].steps)
        for plan in plans
        for part in plan.parts(step)
        for position in part
    ]
    assert line == list(range(start * batch, total))


@given(st.data())
@settings(max_examples=1000, deadline=None)
def test_mixing_partners_are_the_next_of_the_global_batch_whatever_the_ranks(data: st.DataObject) -> None:
    batch, total = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 200))
    world, micro = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    step = data.draw(st.integers(0, -(-total // batch) - 1))
    task = Training.__new__(Training)
    object.__setattr__(task, "augment", Augment(mixup=0.2))
    size = min(batch, total - step * batch)
    for rank in range(world):
        plan = Plan(batch=batch, total=total, rank=rank, world=world, micro_batches=micro)
        for part in plan.parts(step):
            if part:
                loaded = task.positions(plan, step, part).tolist()
                assert loaded[:-1] == list(part)
                assert loaded[-1] == step * batch + (part[-1] + 1 - step * batch) % size


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("augment", [EVERYTHING, Augment()], ids=["everything", "plain"])
def test_world_size_and_micro_batches_change_no_pixel(flowers: Path, augment: Augment, world: int, micro: int) -> None:
    task = training(flowers, augment)
    reference = seen(task, Plan(batch=8, total=45))
    plans = [Plan(batch=8, total=45, rank=rank, world=world, micro_batches=micro) for rank in range(world)]
    shares = [seen(task, plan) for plan in plans]
    for step, (images, targets) in enumerate(reference):
        mine = [share[step] for share in shares if len(share[step][0])]
        assert torch.equal(torch.cat([image for image, _ in mine]), images)
        assert torch.equal(torch.cat([target for _, target in mine]), targets)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_change_no_pixel(flowers: Path, workers: int) -> None:
    task, plan = training(flowers), Plan(batch=8, total=45)
    assert equal(seen(task, plan), seen(task, plan, workers=workers))


@pytest.mark.parametrize("start", [1, 3, 5, 6])
def test_a_resumed_run_sees_what_it_would_have_seen(flowers: Path, start: int) -> None:
    task, plan = training(flowers), Plan(batch=8, total=45)
    assert equal(seen(task, plan)[start:], seen(task, plan, start=start, workers=start % 3))


def test_batches_run_across_epochs_and_only_the_last_is_short(flowers: Path) -> None:
    task, plan = training(flowers, Augment()), Plan(batch=8, total=36)
    batches = list(training_batches(task, plan))
    assert [len(batch.targets) for batch in batches] == [8, 8, 8, 8, 4]
    assert torch.cat([batch.positions for batch in batches]).tolist() == list(range(36))
    samples = [task.order.samples(batch.positions.numpy()) for batch in batches]
    twice = np.concatenate(samples)
    assert sorted(twice.tolist()) == sorted([*range(18), *range(18)])
    labels = [task.split.labels(int(sample))[0] for sample in twice]
    assert torch.cat([batch.targets for batch in batches]).tolist() == labels


def test_shards_are_read_window_by_window_with_the_folders_pixels(flowers: Path, tmp_path: Path) -> None:
    pack(open_folder(flowers), tmp_path / "out")
    split = open_set(tmp_path / "out").splits["train"]
    order = Order(seed=4, count=len(split), shards=split.shards(), window=1)
    task = training(flowers, Augment(crop="squash", flip=False), split=split, order=order)
    [batch] = training_batches(task, Plan(batch=18, total=18))
    plain = training(flowers, Augment(crop="squash", flip=False))
    [expected] = training_batches(plain, Plan(batch=18, total=18))
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
    expected = seen(training(flowers), Plan(batch=8, total=20))
    lines = [f"{images.double().sum().item()} {targets.double().sum().item()}" for images, targets in expected]
    assert run.stdout.splitlines() == lines, run.stderr[-2000:]


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_image_once_as_the_classifier_does(flowers: Path, workers: int) -> None:
    split = open_folder(flowers).splits["val"]
    for world in (1, 3):
        found: list[Batch] = []
        for rank in range(world):
            share = evaluation_batches(split, VIEW, batch=4, classes=2, rank=rank, world=world, workers=workers)
            found.extend(share)
        assert torch.cat([batch.positions for batch in found]).tolist() == list(range(18))
        pixels = torch.cat([batch.pixels for batch in found])
        for index in range(18):
            assert torch.equal(pixels[index], evaluation_view(decode(split.read(index)), VIEW))


MASKED = {
    "mpp": Masked(kind="mpp", share=0.5, target="mean-colour"),
    "mae": Masked(kind="mae", share=0.75, target="pixels"),
}


@pytest.mark.parametrize("masked", MASKED.values(), ids=MASKED)
def test_every_part_of_a_masked_step_has_its_images_what_is_hidden_and_the_next_image(
    flowers: Path, masked: Masked
) -> None:
    """However a step is cut, each image stands beside the same one, its partner, and the same is hidden of it."""
    task = training(flowers, Augment(), masked=masked, patches=16)
    [(images, hiding)] = [prepared(next(training_batches(task, plan := Plan(batch=18, total=18))), task, plan, 0)]
    assert hiding.shape == (18, 2, 16)
    partners = 1 if masked.kind == "mpp" else 0
    assert len(images) == 18 + partners
    whole = torch.cat([images[:18], images[:1]])  # the last one's partner is the first
    if partners:
        assert torch.equal(images, whole)
    for world, micro in ((1, 5), (3, 2)):
        first = 0
        for rank in range(world):
            plan = Plan(batch=18, total=18, rank=rank, world=world, micro_batches=micro)
            for batch in training_batches(task, plan, workers=rank % 2):
                some, hidden = prepared(batch, task, plan, 0)
                assert len(some) == len(hidden) + partners
                assert torch.equal(hidden, hiding[first : first + len(hidden)])
                assert torch.equal(some, whole[first : first + len(some)])
                first += len(hidden)
        assert first == 18


@pytest.mark.parametrize("masked", MASKED.values(), ids=MASKED)
def test_a_masked_set_on_the_device_gives_what_the_workers_give(masked: Masked) -> None:
    split = open_digits().splits["train"]
    order, view = Order(seed=1, count=len(split)), Preprocess(size=(8, 8), resize=(8, 8), mean=(0.5,), std=(0.5,))
    fields: dict[str, Any] = {"augment": Augment(crop="pad", flip=False), "preprocess": view, "seed": 1, "classes": 10}
    task = Training(split=split, order=order, masked=masked, patches=16, **fields)
    plan = Plan(batch=50, total=170, micro_batches=3)
    found = loader.resident(split, channels=1, classes=10, device="cpu")
    assert found is not None
    there = list(loader.resident_batches(task, plan, *found, start=1))
    for number, (one, two) in enumerate(zip(there, training_batches(task, plan, start=1), strict=True)):
        for ours, theirs in zip(
            prepared(one, task, plan, 1 + number // 3), prepared(two, task, plan, 1 + number // 3), strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("masked", MASKED.values(), ids=MASKED)
def test_masked_evaluation_hides_the_same_in_batches_and_ranks_of_any_size(flowers: Path, masked: Masked) -> None:
    split = open_folder(flowers).splits["val"]
    [whole] = masked_batches(split, VIEW, masked, 16, batch=100)
    [plain] = evaluation_batches(split, VIEW, batch=100, classes=2)
    partners = 1 if masked.kind == "mpp" else 0
    around = torch.cat([plain.pixels, plain.pixels[:1]])
    assert torch.equal(whole.pixels, around[: 18 + partners])
    assert torch.equal(whole.positions, plain.positions)
    for world, batch in ((1, 5), (2, 4), (5, 2)):
        first = 0
        for rank in range(world):
            for part in masked_batches(split, VIEW, masked, 16, batch=batch, rank=rank, world=world):
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
    plan = Plan(batch=4, total=16)
    with pytest.raises(DataError, match=r"^train/rose/2.jpg is no image"):
        list(training_batches(training(root), plan, workers=workers))
    batches = list(training_batches(training(root, Augment(), skip_bad=True), plan, workers=workers))
    assert {name for batch in batches for name in batch.left_out} == {"train/rose/2.jpg"}
    assert sum(len(batch.pixels) for batch in batches) == 16
    split = open_folder(root).splits["val"]
    with pytest.raises(DataError, match=r"^val/rose/1.jpg"):
        list(evaluation_batches(split, VIEW, batch=3, classes=2, workers=workers))
    kept = list(evaluation_batches(split, VIEW, batch=3, classes=2, workers=workers, skip_bad=True))
    assert torch.cat([batch.positions for batch in kept]).tolist() == [0, 2, 3, 4, 5, 6, 7]


def test_several_labels_become_shares(flowers: Path) -> None:
    path = flowers / "list.csv"
    path.write_text(
        "path,labels,split\ntrain/rose/0.jpg,a;c,train\ntrain/rose/1.jpg,,train\ntrain/rose/2.jpg,b,train\n"
    )
    split = open_list(path).splits["train"]
    [batch] = evaluation_batches(split, VIEW, batch=9, classes=3)
    by_name = {split.name(index): batch.targets[index].tolist() for index in range(len(split))}
    known = {"train/rose/0.jpg": [1, 0, 1], "train/rose/1.jpg": [0, 0, 0], "train/rose/2.jpg": [0, 1, 0]}
    assert all(by_name[name] == known[name] for name in by_name)
    assert len(by_name) >= 2


def digits(augment: Augment, split: str = "train") -> tuple[Training, tuple[Tensor, Tensor]]:
    """A task that resizes nothing, and its images on the device."""
    images = open_digits().splits[split]
    view = Preprocess(size=(8, 8), resize=(8, 8), mean=(0.5,), std=(0.5,))
    order = Order(seed=1, count=len(images))
    task = Training(split=images, order=order, augment=augment, preprocess=view, seed=1, classes=10)
    found = loader.resident(images, channels=1, classes=10, device="cpu")
    assert found is not None
    return task, found


def same(one: Iterable[Batch], two: Iterable[Batch]) -> bool:
    pairs = list(zip(one, two, strict=True))
    return all(torch.equal(a, b) for batches in pairs for a, b in zip(*(batch[:3] for batch in batches), strict=True))


PLANS = {
    "whole": Plan(batch=32, total=96),
    "rank": Plan(batch=32, total=100, rank=1, world=2),
    "short": Plan(batch=16, total=101),
    "micro": Plan(batch=16, total=101, micro_batches=3),
    "micro-rank": Plan(batch=8, total=33, rank=0, world=2, micro_batches=2),  # the last step has one image for four
    "epochs": Plan(batch=500, total=1700, micro_batches=2),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(
    "augment",
    [
        Augment(crop="pad"),
        Augment(crop="pad", mixup=0.2),
        Augment(crop="squash", randaugment=(2, 15), jitter=0.5, erase=0.5, cutmix=1.0),
    ],
    ids=["plain", "mixed", "everything"],
)
def test_a_set_on_the_device_gives_what_the_workers_give(
    monkeypatch: pytest.MonkeyPatch, augment: Augment, plan: Plan
) -> None:
    """However many batches are made at once, and from whichever step on; without a resize, to the bit."""
    task, found = digits(augment)
    for start in (0, plan.steps // 2, plan.steps - 1, plan.steps):
        by_workers = list(training_batches(task, plan, start=start))
        for room in (1, 5000, 2**26):
            monkeypatch.setattr(loader, "_VIEW_BYTES", room)
            assert same(by_workers, loader.resident_batches(task, plan, *found, start=start)), (start, room)


def test_as_many_batches_are_made_at_once_as_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of 8 x 8 bytes, 16 a step: two steps in 2048 to 3071 bytes, in halves that count together."""
    task, found = digits(Augment(crop="pad"))
    made, views = list[int](), batched.training_views

    def noted(pixels: Tensor, *rest: Any) -> Tensor:
        made.append(len(pixels))
        return views(pixels, *rest)

    monkeypatch.setattr(batched, "training_views", noted)
    for room, expected in ((1, [16, 16, 16, 16, 6]), (2047, [16, 16, 16, 16, 6]), (2048, [32, 32, 6]), (2**26, [70])):
        monkeypatch.setattr(loader, "_VIEW_BYTES", room)
        made.clear()
        batches = loader.resident_batches(task, Plan(batch=16, total=70, micro_batches=2), *found)
        next(batches)
        assert made == expected[:1]  # the others not before they are wanted
        assert sum(1 for _ in batches) == 2 * 5 - 1
        assert made == expected


@pytest.mark.parametrize("jitter", [0.0, 0.5])
@pytest.mark.parametrize("crop", ["inception", "window", "pad", "squash"])
def test_a_short_last_step_may_leave_a_rank_nothing(crop: Any, jitter: float) -> None:
    task, found = digits(Augment(crop=crop, mixup=0.2, jitter=jitter, randaugment=(2, 10), erase=0.5), "val")
    plan = Plan(batch=8, total=9, rank=0, world=2)
    for start in (0, 1):  # beside others, and alone
        for batches in (
            training_batches(task, plan, start=start),
            loader.resident_batches(task, plan, *found, start=start),
        ):
            last = list(batches)[-1]
            images, shares = prepared(last, task, plan, 1)
            assert images.shape == (0, 1, 8, 8)
            assert shares.shape == (0, 10)
            assert shares.dtype == torch.float32


def test_a_set_on_the_device_holds_every_image_and_target(flowers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_CHUNK", 4)  # four full chunks and a short one
    split = open_folder(flowers).splits["train"]
    for workers in (0, 2):
        found = loader.resident(split, channels=3, classes=2, device="cpu", workers=workers)
        assert found is not None
        pixels, targets = found
        assert torch.equal(pixels, torch.stack([decode(split.read(index)) for index in range(18)]))
        assert targets.tolist() == [split.labels(index)[0] for index in range(18)]


@pytest.mark.parametrize("odd", ["rose/0.jpg", "tulip/3.jpg"])
@pytest.mark.parametrize("size", [(30, 30), (24, 20)])
def test_images_of_different_sizes_do_not_live_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], odd: str
) -> None:
    """Wherever the odd one is, in the first chunk or in the last, and where it has as many pixels."""
    monkeypatch.setattr(loader, "_CHUNK", 2)
    root = folder(tmp_path, "train", "val", each=4)
    (root / "train" / odd).write_bytes(encoded(picture(0, size)))
    splits = open_folder(root).splits
    assert loader.resident(splits["train"], channels=3, classes=2, device="cpu") is None
    assert loader.resident(splits["val"], channels=3, classes=2, device="cpu") is not None


def test_large_images_or_too_many_do_not_live_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size, lives in (("limit", (128, 128), True), ("above", (128, 129), False)):
        place = tmp_path / name / "train" / "rose"
        place.mkdir(parents=True)
        for number in range(2):
            (place / f"{number}.jpg").write_bytes(encoded(picture(number, size)))
        split = open_folder(tmp_path / name).splits["train"]
        found = loader.resident(split, channels=3, classes=1, device="cpu")
        assert (found is not None) == lives, name
    split = open_folder(tmp_path / "limit").splits["train"]
    bytes_together = len(split) * 3 * 128 * 128
    for room, lives in ((bytes_together, True), (bytes_together - 1, False)):
        monkeypatch.setattr(loader, "_RESIDENT_BYTES", room)
        assert (loader.resident(split, channels=3, classes=1, device="cpu") is not None) == lives


def test_a_bad_image_of_a_set_for_the_device_is_named(tmp_path: Path) -> None:
    root = folder(tmp_path, "train", "val", each=3)
    (root / "train" / "rose" / "2.jpg").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"^train/rose/2.jpg is no image"):
        loader.resident(open_folder(root).splits["train"], channels=3, classes=2, device="cpu")


def test_a_plan_that_cannot_be_is_refused() -> None:
    for wrong in ({"batch": 0}, {"rank": 2, "world": 2}, {"micro_batches": 0}):
        with pytest.raises(UsageError, match="cannot be"):
            Plan(**({"batch": 4, "total": 8} | wrong))
