"""Model inputs by threads and by processes: the same pixels and errors, in order, however the images are divided."""

import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.data.image_files import write_image_folder
from vitrail import PreprocessConfig
from vitrail.data.decode import decode
from vitrail.data.image_paths import ImageRef, iter_image_refs
from vitrail.data.transforms import make_eval_input
from vitrail.inference import input_batches
from vitrail.inference.input_batches import InputLoader, LoadedBatch, iterate_input_batches
from vitrail.inference.prediction_rows import PredictionItem

LOADER = InputLoader(PreprocessConfig(size=(16, 16), resize=(20,)), 3)


@pytest.fixture
def items(tmp_path: Path) -> list[PredictionItem]:
    """Eighteen images, of which three cannot be read."""
    images = list(iter_image_refs([str(write_image_folder(tmp_path / "images", each=9))]))
    for number in (0, 7, 17):
        images[number] = ImageRef(f"bad {number}", f"bad {number}", error=f"image {number} is bad")
    return [PredictionItem(image) for image in images]


def split(items: Sequence[PredictionItem], *sizes: int) -> list[Sequence[PredictionItem]]:
    bounds = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return [items[start:stop] for start, stop in itertools.pairwise(bounds)]


def join(batches: Sequence[LoadedBatch]) -> list[tuple[list[str], torch.Tensor, dict[int, str]]]:
    return [([item.image.name for item in batch.items], torch.cat(batch.parts), batch.errors) for batch in batches]


@pytest.mark.parametrize("part_images", [1, 2, 3, 64])
def test_processes_load_what_threads_load(
    items: list[PredictionItem], part_images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches by threads, the others by processes, an empty one and one without a readable image among them."""
    monkeypatch.setattr(input_batches, "_PART_IMAGES", part_images)
    sizes = (3, 4, 4, 0, 6, 1)
    by_threads = join(list(iterate_input_batches(LOADER, split(items, *sizes), batch_size=6, threads=2)))
    by_processes = join(list(iterate_input_batches(LOADER, split(items, *sizes), batch_size=6, threads=1, processes=2)))
    assert [len(names) for names, _, _ in by_threads] == list(sizes)
    for (names, pixels, errors), (other_names, other_pixels, other_errors) in zip(
        by_threads, by_processes, strict=True
    ):
        assert (names, errors) == (other_names, other_errors)
        assert torch.equal(pixels, other_pixels)
    assert [errors for _, _, errors in by_threads if errors] == [
        {0: "image 0 is bad"}, {0: "image 7 is bad"}, {0: "image 17 is bad"},
    ]  # fmt: skip
    _, pixels, _ = by_processes[2]
    readable = [make_eval_input(decode(item.image.read(), 3), LOADER.preprocess) for item in items[8:11]]
    assert torch.equal(pixels, torch.stack(readable))


def test_few_images_start_no_process(items: list[PredictionItem]) -> None:
    for _ in iterate_input_batches(LOADER, split(items, 9, 9), batch_size=9, threads=2, processes=2):
        assert not multiprocessing.active_children()


def test_many_images_are_left_to_processes(items: list[PredictionItem]) -> None:
    sizes = (5, 5, 5, 3)
    by_threads = join(list(iterate_input_batches(LOADER, split(items, *sizes), batch_size=5, threads=2)))
    batches = iterate_input_batches(
        LOADER, split(items, *sizes), batch_size=5, threads=1, processes=2, total=len(items)
    )
    first = next(batches)
    assert multiprocessing.active_children()
    for expected, loaded in zip(by_threads, join([first, *batches]), strict=True):
        assert expected[0] == loaded[0]
        assert expected[2] == loaded[2]
        assert torch.equal(expected[1], loaded[1])


def test_ranks_take_as_many_batches_ahead_whatever_the_batches_hold(
    items: list[PredictionItem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or they would wait for each other in different places: to list images, and to gather rows."""

    monkeypatch.setattr(input_batches, "_PART_IMAGES", 1)

    def count_batches_taken(*sizes: int) -> list[int]:
        taken, batches = [0], split(items, *sizes)

        def take() -> Iterator[Sequence[PredictionItem]]:
            for batch in batches:
                taken[0] += 1
                yield batch

        loaded = iterate_input_batches(LOADER, take(), batch_size=3, threads=1, processes=2)
        return [taken[0] for _ in loaded]

    of_a_full_rank = count_batches_taken(3, 3, 3, 3, 3, 3)
    assert of_a_full_rank == count_batches_taken(3, 3, 3, 3, 1, 0)


def test_no_process_survives_a_consumer_that_stops(items: list[PredictionItem]) -> None:
    batches = iterate_input_batches(LOADER, split(items, *[1] * 18), batch_size=1, threads=1, processes=2)
    for _ in range(4):
        next(batches)
    assert multiprocessing.active_children()
    batches.close()
    assert not multiprocessing.active_children()
