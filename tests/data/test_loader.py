"""Batches: the same samples, pixels and mixes for any workers, ranks, micro-batches and step of a resume."""

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

from tests.data.image_files import encode_image, make_image, write_image_folder
from vitrail.config import AugmentConfig, MaskedConfig, PreprocessConfig
from vitrail.data import batch_augment, loader
from vitrail.data.decode import decode
from vitrail.data.file_list import open_file_list
from vitrail.data.folder import open_folder
from vitrail.data.loader import (
    Batch,
    BatchPlan,
    TrainingData,
    iter_eval_batches,
    iter_train_batches,
    prepare_train_batch,
)
from vitrail.data.memory import open_digits
from vitrail.data.pack import pack
from vitrail.data.randomness import SampleOrder
from vitrail.data.shards import open_shards
from vitrail.data.transforms import make_eval_input
from vitrail.errors import DataError, UsageError

PREPROCESS = PreprocessConfig(size=(8, 8), resize=(10,))
ALL_AUGMENTATIONS = AugmentConfig(randaugment=(2, 10), jitter=0.3, erase=0.5, mixup=0.3, cutmix=1.0)


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("set"), "train", "val", each=9)


def build_training_data(root: Path, augment: AugmentConfig = ALL_AUGMENTATIONS, **changes: object) -> TrainingData:
    split = open_folder(root).splits["train"]
    order = SampleOrder(seed=4, num_samples=len(split))
    fields = {"split": split, "order": order, "augment": augment, "preprocess": PREPROCESS, "seed": 4, "num_classes": 2}
    return TrainingData(**(fields | changes))


def load_steps(
    training_data: TrainingData, plan: BatchPlan, start: int = 0, workers: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Return the images and targets of each step, concatenated over this rank's micro-batches."""
    batches = iter_train_batches(training_data, plan, start_step=start, workers=workers)
    steps = []
    for step in range(start, plan.total_steps):
        parts = [prepare_train_batch(next(batches), training_data, plan, step) for _ in range(plan.micro_batches)]
        parts = [part for part in parts if len(part[0])]
        if parts:
            steps.append((torch.cat([image for image, _ in parts]), torch.cat([target for _, target in parts])))
        else:
            steps.append((torch.empty(0), torch.empty(0)))
    assert next(batches, None) is None
    return steps


def steps_equal(one: list[tuple[Tensor, Tensor]], two: list[tuple[Tensor, Tensor]]) -> bool:
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
        BatchPlan(batch_size=batch, total_samples=total, rank=rank, world_size=world, micro_batches=micro)
        for rank in range(world)
    ]
    start = data.draw(st.integers(0, plans[0].total_steps))
    positions = [
        position
        for step in range(start, plans[0].total_steps)
        for plan in plans
        for part in plan.list_micro_batches(step)
        for position in part
    ]
    assert positions == list(range(start * batch, total))


@given(st.data())
@settings(max_examples=1000, deadline=None)
def test_mixing_partners_are_the_next_of_the_global_batch_whatever_the_ranks(data: st.DataObject) -> None:
    batch, total = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 200))
    world, micro = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    step = data.draw(st.integers(0, -(-total // batch) - 1))
    training_data = TrainingData.__new__(TrainingData)
    object.__setattr__(training_data, "augment", AugmentConfig(mixup=0.2))
    size = min(batch, total - step * batch)
    for rank in range(world):
        plan = BatchPlan(batch_size=batch, total_samples=total, rank=rank, world_size=world, micro_batches=micro)
        loaded = training_data.iter_positions(plan, step)
        for part, positions in zip(plan.list_micro_batches(step), map(np.ndarray.tolist, loaded), strict=False):
            if part:
                assert positions[:-1] == list(part)
                assert positions[-1] == step * batch + (part[-1] + 1 - step * batch) % size


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("augment", [ALL_AUGMENTATIONS, AugmentConfig()], ids=["everything", "plain"])
def test_world_size_and_micro_batches_change_no_pixel(
    flowers: Path, augment: AugmentConfig, world: int, micro: int
) -> None:
    training_data = build_training_data(flowers, augment)
    reference = load_steps(training_data, BatchPlan(batch_size=8, total_samples=45))
    plans = [
        BatchPlan(batch_size=8, total_samples=45, rank=rank, world_size=world, micro_batches=micro)
        for rank in range(world)
    ]
    shares = [load_steps(training_data, plan) for plan in plans]
    for step, (images, targets) in enumerate(reference):
        parts = [share[step] for share in shares if len(share[step][0])]
        assert torch.equal(torch.cat([image for image, _ in parts]), images)
        assert torch.equal(torch.cat([target for _, target in parts]), targets)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_change_no_pixel(flowers: Path, workers: int) -> None:
    training_data, plan = build_training_data(flowers), BatchPlan(batch_size=8, total_samples=45)
    assert steps_equal(load_steps(training_data, plan), load_steps(training_data, plan, workers=workers))


@pytest.mark.parametrize("start", [1, 3, 5, 6])
def test_a_resumed_run_gets_the_same_batches(flowers: Path, start: int) -> None:
    training_data, plan = build_training_data(flowers), BatchPlan(batch_size=8, total_samples=45)
    assert steps_equal(
        load_steps(training_data, plan)[start:], load_steps(training_data, plan, start=start, workers=start % 3)
    )


def test_batches_run_across_epochs_and_only_the_last_is_short(flowers: Path) -> None:
    training_data, plan = build_training_data(flowers, AugmentConfig()), BatchPlan(batch_size=8, total_samples=36)
    batches = list(iter_train_batches(training_data, plan))
    assert [len(batch.targets) for batch in batches] == [8, 8, 8, 8, 4]
    assert torch.cat([batch.positions for batch in batches]).tolist() == list(range(36))
    samples = [training_data.order.get_sample_indices(batch.positions.numpy()) for batch in batches]
    twice = np.concatenate(samples)
    assert sorted(twice.tolist()) == sorted([*range(18), *range(18)])
    labels = [training_data.split.get_labels(int(sample))[0] for sample in twice]
    assert torch.cat([batch.targets for batch in batches]).tolist() == labels


def test_shards_are_read_window_by_window_with_the_folders_pixels(flowers: Path, tmp_path: Path) -> None:
    pack(open_folder(flowers), tmp_path / "out")
    split = open_shards(tmp_path / "out").splits["train"]
    order = SampleOrder(seed=4, num_samples=len(split), shard_sizes=split.count_per_shard(), shard_window=1)
    training_data = build_training_data(flowers, AugmentConfig(crop="squash", flip=False), split=split, order=order)
    [batch] = iter_train_batches(training_data, BatchPlan(batch_size=18, total_samples=18))
    plain = build_training_data(flowers, AugmentConfig(crop="squash", flip=False))
    [expected] = iter_train_batches(plain, BatchPlan(batch_size=18, total_samples=18))
    assert sorted(image.tolist() for image in batch.pixels) == sorted(image.tolist() for image in expected.pixels)


def test_spawned_workers_give_the_same(flowers: Path) -> None:
    """A process that starts afresh instead of as a copy; the default elsewhere, and in Python 3.14 here."""
    code = f"""
import multiprocessing, sys
from pathlib import Path
from tests.data.test_loader import ALL_AUGMENTATIONS, load_steps, build_training_data
from vitrail.data.loader import BatchPlan
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    training_data, plan = build_training_data(Path({str(flowers)!r})), BatchPlan(batch_size=8, total_samples=20)
    for images, targets in load_steps(training_data, plan, workers=2):
        print(images.double().sum().item(), targets.double().sum().item())
"""
    script = flowers.parent / f"spawn-{os.getpid()}.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    expected = load_steps(build_training_data(flowers), BatchPlan(batch_size=8, total_samples=20))
    lines = [f"{images.double().sum().item()} {targets.double().sum().item()}" for images, targets in expected]
    assert run.stdout.splitlines() == lines, run.stderr[-2000:]


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_image_once_as_the_classifier_does(flowers: Path, workers: int) -> None:
    split = open_folder(flowers).splits["val"]
    for world in (1, 3):
        batches: list[Batch] = []
        for rank in range(world):
            batches.extend(
                iter_eval_batches(
                    split, PREPROCESS, batch_size=4, num_classes=2, rank=rank, world_size=world, workers=workers
                )
            )
        assert torch.cat([batch.positions for batch in batches]).tolist() == list(range(18))
        pixels = torch.cat([batch.pixels for batch in batches])
        for index in range(18):
            assert torch.equal(pixels[index], make_eval_input(decode(split.read_image(index)), PREPROCESS))


MASKED = {
    "mpp": MaskedConfig(kind="mpp", mask_ratio=0.5, target="mean-color"),
    "mae": MaskedConfig(kind="mae", mask_ratio=0.75, target="pixels"),
}


@pytest.mark.parametrize("masked", MASKED.values(), ids=MASKED)
def test_every_micro_batch_of_a_masked_step_has_its_images_masks_and_the_next_image(
    flowers: Path, masked: MaskedConfig
) -> None:
    """However a step is split, each image stands beside the same partner and has the same masked patches."""
    training_data = build_training_data(flowers, AugmentConfig(), masked=masked, num_patches=16)
    plan = BatchPlan(batch_size=18, total_samples=18)
    images, masks = prepare_train_batch(next(iter_train_batches(training_data, plan)), training_data, plan, 0)
    assert masks.shape == (18, 2, 16)
    partners = 1 if masked.kind == "mpp" else 0
    assert len(images) == 18 + partners
    whole = torch.cat([images[:18], images[:1]])  # the last one's partner is the first
    if partners:
        assert torch.equal(images, whole)
    for world, micro in ((1, 5), (3, 2)):
        first = 0
        for rank in range(world):
            plan = BatchPlan(batch_size=18, total_samples=18, rank=rank, world_size=world, micro_batches=micro)
            for batch in iter_train_batches(training_data, plan, workers=rank % 2):
                part_images, part_masks = prepare_train_batch(batch, training_data, plan, 0)
                assert len(part_images) == len(part_masks) + partners
                assert torch.equal(part_masks, masks[first : first + len(part_masks)])
                assert torch.equal(part_images, whole[first : first + len(part_images)])
                first += len(part_masks)
        assert first == 18


@pytest.mark.parametrize("masked", MASKED.values(), ids=MASKED)
def test_masked_batches_from_the_device_equal_those_of_the_workers(masked: MaskedConfig) -> None:
    split = open_digits().splits["train"]
    training_data = TrainingData(
        split=split,
        order=SampleOrder(seed=1, num_samples=len(split)),
        augment=AugmentConfig(crop="pad", flip=False),
        preprocess=PreprocessConfig(size=(8, 8), resize=(8, 8), mean=(0.5,), std=(0.5,)),
        seed=1,
        num_classes=10,
        masked=masked,
        num_patches=16,
    )
    plan = BatchPlan(batch_size=50, total_samples=170, micro_batches=3)
    resident = loader.load_resident_images(split, channels=1, num_classes=10, device="cpu")
    assert resident is not None
    from_device = loader.iter_resident_train_batches(training_data, plan, *resident, start_step=1)
    from_workers = iter_train_batches(training_data, plan, start_step=1)
    for number, batches in enumerate(zip(from_device, from_workers, strict=True)):
        device_batch, worker_batch = (
            prepare_train_batch(batch, training_data, plan, 1 + number // 3) for batch in batches
        )
        assert torch.equal(device_batch[0], worker_batch[0])
        assert torch.equal(device_batch[1], worker_batch[1])


@pytest.mark.parametrize("masked", MASKED.values(), ids=MASKED)
def test_masked_evaluation_masks_the_same_patches_in_batches_and_ranks_of_any_size(
    flowers: Path, masked: MaskedConfig
) -> None:
    split = open_folder(flowers).splits["val"]
    options: dict[str, Any] = {"num_classes": 2, "masked": masked, "num_patches": 16}
    [whole] = iter_eval_batches(split, PREPROCESS, batch_size=100, **options)
    [plain] = iter_eval_batches(split, PREPROCESS, batch_size=100, num_classes=2)
    partners = 1 if masked.kind == "mpp" else 0
    around = torch.cat([plain.pixels, plain.pixels[:1]])
    assert torch.equal(whole.pixels, around[: 18 + partners])
    assert torch.equal(whole.positions, plain.positions)
    for world, batch in ((1, 5), (2, 4), (5, 2)):
        first = 0
        for rank in range(world):
            for part in iter_eval_batches(split, PREPROCESS, batch_size=batch, rank=rank, world_size=world, **options):
                count = len(part.targets)
                assert torch.equal(part.targets, whole.targets[first : first + count])
                assert torch.equal(part.pixels, around[first : first + count + partners])
                first += count
        assert first == 18


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_is_an_error_or_skipped_by_name(flowers: Path, tmp_path: Path, workers: int) -> None:
    root = write_image_folder(tmp_path, "train", "val", each=4)
    (root / "train" / "rose" / "2.jpg").write_bytes(b"<html>")
    (root / "val" / "rose" / "1.jpg").write_bytes(b"")
    plan = BatchPlan(batch_size=4, total_samples=16)
    with pytest.raises(DataError, match=r"^train/rose/2.jpg is not an image"):
        list(iter_train_batches(build_training_data(root), plan, workers=workers))
    batches = list(iter_train_batches(build_training_data(root, AugmentConfig(), skip_bad=True), plan, workers=workers))
    assert {name for batch in batches for name in batch.skipped_images} == {"train/rose/2.jpg"}
    assert sum(len(batch.pixels) for batch in batches) == 16
    split = open_folder(root).splits["val"]
    with pytest.raises(DataError, match=r"^val/rose/1.jpg"):
        list(iter_eval_batches(split, PREPROCESS, batch_size=3, num_classes=2, workers=workers))
    kept = list(iter_eval_batches(split, PREPROCESS, batch_size=3, num_classes=2, workers=workers, skip_bad=True))
    assert torch.cat([batch.positions for batch in kept]).tolist() == [0, 2, 3, 4, 5, 6, 7]
    assert [batch.skipped_images for batch in kept] == [("val/rose/1.jpg",), (), ()]
    masks: dict[str, Any] = {"masked": MASKED["mae"], "num_patches": 16}
    [whole] = iter_eval_batches(split, PREPROCESS, batch_size=8, num_classes=2, workers=workers, skip_bad=True, **masks)
    assert torch.equal(whole.pixels[1], whole.pixels[2])  # the next readable image
    assert whole.skipped_images == ("val/rose/1.jpg",)


def test_several_labels_become_multi_hot_targets(flowers: Path) -> None:
    path = flowers / "list.csv"
    path.write_text(
        "path,labels,split\ntrain/rose/0.jpg,a;c,train\ntrain/rose/1.jpg,,train\ntrain/rose/2.jpg,b,train\n"
    )
    split = open_file_list(path).splits["train"]
    [batch] = iter_eval_batches(split, PREPROCESS, batch_size=9, num_classes=3)
    by_name = {split.get_image_name(index): batch.targets[index].tolist() for index in range(len(split))}
    expected = {"train/rose/0.jpg": [1, 0, 1], "train/rose/1.jpg": [0, 0, 0], "train/rose/2.jpg": [0, 1, 0]}
    assert all(by_name[name] == expected[name] for name in by_name)
    assert len(by_name) >= 2


def load_digits(augment: AugmentConfig, split: str = "train") -> tuple[TrainingData, tuple[Tensor, Tensor]]:
    """Return build_training_data data that resize nothing, and their images on the device."""
    images = open_digits().splits[split]
    preprocess = PreprocessConfig(size=(8, 8), resize=(8, 8), mean=(0.5,), std=(0.5,))
    order = SampleOrder(seed=1, num_samples=len(images))
    training_data = TrainingData(
        split=images, order=order, augment=augment, preprocess=preprocess, seed=1, num_classes=10
    )
    resident = loader.load_resident_images(images, channels=1, num_classes=10, device="cpu")
    assert resident is not None
    return training_data, resident


def batches_equal(one: Iterable[Batch], two: Iterable[Batch]) -> bool:
    pairs = list(zip(one, two, strict=True))
    return all(torch.equal(a, b) for batches in pairs for a, b in zip(*(batch[:3] for batch in batches), strict=True))


PLANS = {
    "whole": BatchPlan(batch_size=32, total_samples=96),
    "rank": BatchPlan(batch_size=32, total_samples=100, rank=1, world_size=2),
    "short": BatchPlan(batch_size=16, total_samples=101),
    "micro": BatchPlan(batch_size=16, total_samples=101, micro_batches=3),
    "micro-rank": BatchPlan(
        batch_size=8, total_samples=33, rank=0, world_size=2, micro_batches=2
    ),  # the last step has one image for four
    "epochs": BatchPlan(batch_size=500, total_samples=1700, micro_batches=2),
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
def test_batches_from_the_device_equal_those_of_the_workers(
    monkeypatch: pytest.MonkeyPatch, augment: AugmentConfig, plan: BatchPlan
) -> None:
    """However many batches are made at once, and from any step on; without a resize, to the bit."""
    training_data, resident = load_digits(augment)
    for start in (0, plan.total_steps // 2, plan.total_steps - 1, plan.total_steps):
        by_workers = list(iter_train_batches(training_data, plan, start_step=start))
        for chunk_bytes in (1, 5000, 2**26):
            monkeypatch.setattr(loader, "_AUGMENT_CHUNK_BYTES", chunk_bytes)
            on_device = loader.iter_resident_train_batches(training_data, plan, *resident, start_step=start)
            assert batches_equal(by_workers, on_device), (start, chunk_bytes)


def test_as_many_batches_are_augmented_at_once_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crops of 8 x 8 bytes, 16 a step: two steps in 2048 to 3071 bytes, in halves that count together."""
    training_data, resident = load_digits(AugmentConfig(crop="pad"))
    chunk_sizes, original = list[int](), batch_augment.make_train_inputs

    def record_chunk(pixels: Tensor, *rest: Any) -> Tensor:
        chunk_sizes.append(len(pixels))
        return original(pixels, *rest)

    monkeypatch.setattr(batch_augment, "make_train_inputs", record_chunk)
    for chunk_bytes, expected in (
        (1, [16, 16, 16, 16, 6]),
        (2047, [16, 16, 16, 16, 6]),
        (2048, [32, 32, 6]),
        (2**26, [70]),
    ):
        monkeypatch.setattr(loader, "_AUGMENT_CHUNK_BYTES", chunk_bytes)
        chunk_sizes.clear()
        plan = BatchPlan(batch_size=16, total_samples=70, micro_batches=2)
        batches = loader.iter_resident_train_batches(training_data, plan, *resident)
        next(batches)
        assert chunk_sizes == expected[:1]  # the others not before they are needed
        assert sum(1 for _ in batches) == 2 * 5 - 1
        assert chunk_sizes == expected


@pytest.mark.parametrize("jitter", [0.0, 0.5])
@pytest.mark.parametrize("crop", ["inception", "window", "pad", "squash"])
def test_a_short_last_step_may_leave_a_rank_nothing(crop: Any, jitter: float) -> None:
    training_data, resident = load_digits(
        AugmentConfig(crop=crop, mixup=0.2, jitter=jitter, randaugment=(2, 10), erase=0.5), "val"
    )
    plan = BatchPlan(batch_size=8, total_samples=9, rank=0, world_size=2)
    for start in (0, 1):  # beside others, and alone
        for batches in (
            iter_train_batches(training_data, plan, start_step=start),
            loader.iter_resident_train_batches(training_data, plan, *resident, start_step=start),
        ):
            last = list(batches)[-1]
            images, targets = prepare_train_batch(last, training_data, plan, 1)
            assert images.shape == (0, 1, 8, 8)
            assert targets.shape == (0, 10)
            assert targets.dtype == torch.float32


def test_the_device_holds_every_image_and_target(flowers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_CHUNK_IMAGES", 4)  # four full chunks and a short one
    split = open_folder(flowers).splits["train"]
    for workers in (0, 2):
        resident = loader.load_resident_images(split, channels=3, num_classes=2, device="cpu", workers=workers)
        assert resident is not None
        pixels, targets = resident
        assert torch.equal(pixels, torch.stack([decode(split.read_image(index)) for index in range(18)]))
        assert targets.tolist() == [split.get_labels(index)[0] for index in range(18)]


@pytest.mark.parametrize("odd", ["rose/0.jpg", "tulip/3.jpg"])
@pytest.mark.parametrize("size", [(30, 30), (24, 20)])
def test_images_of_different_sizes_are_not_held_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], odd: str
) -> None:
    """Wherever the odd one is, in the first chunk or in the last, and where it has as many pixels."""
    monkeypatch.setattr(loader, "_CHUNK_IMAGES", 2)
    root = write_image_folder(tmp_path, "train", "val", each=4)
    (root / "train" / odd).write_bytes(encode_image(make_image(0, size)))
    splits = open_folder(root).splits
    assert loader.load_resident_images(splits["train"], channels=3, num_classes=2, device="cpu") is None
    assert loader.load_resident_images(splits["val"], channels=3, num_classes=2, device="cpu") is not None


def test_large_images_or_too_many_are_not_held_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size, is_resident in (("limit", (128, 128), True), ("above", (128, 129), False)):
        place = tmp_path / name / "train" / "rose"
        place.mkdir(parents=True)
        for number in range(2):
            (place / f"{number}.jpg").write_bytes(encode_image(make_image(number, size)))
        split = open_folder(tmp_path / name).splits["train"]
        resident = loader.load_resident_images(split, channels=3, num_classes=1, device="cpu")
        assert (resident is not None) == is_resident, name
    split = open_folder(tmp_path / "limit").splits["train"]
    total_bytes = len(split) * 3 * 128 * 128
    for limit, is_resident in ((total_bytes, True), (total_bytes - 1, False)):
        monkeypatch.setattr(loader, "_MAX_RESIDENT_BYTES", limit)
        resident = loader.load_resident_images(split, channels=3, num_classes=1, device="cpu")
        assert (resident is not None) == is_resident


def test_a_bad_image_among_resident_images_is_named(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path, "train", "val", each=3)
    (root / "train" / "rose" / "2.jpg").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"^train/rose/2.jpg is not an image"):
        loader.load_resident_images(open_folder(root).splits["train"], channels=3, num_classes=2, device="cpu")


def test_an_impossible_plan_is_refused() -> None:
    for invalid in ({"batch_size": 0}, {"rank": 2, "world_size": 2}, {"micro_batches": 0}):
        with pytest.raises(UsageError, match="is impossible"):
            BatchPlan(**({"batch_size": 4, "total_samples": 8} | invalid))
