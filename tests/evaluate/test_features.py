"""Features are what the head reads, in the set's order; they are kept for as long as nothing they depend on changes."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import making
from tests.data.pictures import encoded, folder, picture
from vitrail.config import PreprocessConfig
from vitrail.data import shards
from vitrail.data.dataset import Split
from vitrail.data.loader import Batch, iter_eval_batches
from vitrail.data.sources import open_dataset
from vitrail.data.transforms import normalize
from vitrail.errors import DataError, ModelError
from vitrail.evaluate import features
from vitrail.model.build import Model

VIEW = PreprocessConfig(size=(32, 32), resize=(36,))


def pictures(number: int) -> Tensor:
    return torch.randint(0, 256, (number, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def batches(pixels: Tensor, sizes: tuple[int, ...]) -> list[Batch]:
    places = torch.arange(len(pixels))
    cuts = zip(pixels.split(list(sizes)), places.split(list(sizes)), strict=True)
    return [Batch(some, torch.zeros(len(some), dtype=torch.int64), rows) for some, rows in cuts]


def train(name: Path | str) -> Split:
    return open_dataset(str(name)).splits["train"]


# --- what they are ---------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], Model]] = {
    "class token": making.vit,
    "average": lambda: making.vit(pool="norm-mean", class_token=False),
    "attention pooling": lambda: making.vit(pool="map", class_token=False),
    "class token and average": lambda: making.vit(pool="class-mean"),
    "hidden layer": lambda: making.vit(hidden_head=True),
    "hybrid": lambda: making.vit(stem=making.STEM, patch=2),
    "BiT": making.bit,
}


@pytest.mark.parametrize("name", MODELS)
def test_they_are_what_the_head_reads(name: str) -> None:
    model, pixels = MODELS[name](), pictures(5)
    found = features.extract_features(model, batches(pixels, (2, 3)), VIEW, num_images=5)
    assert found.shape == (5, model.config.num_features)
    assert found.dtype == torch.float32
    with torch.no_grad():
        logits = model(normalize(pixels, VIEW))
        torch.testing.assert_close(model.head(found), logits)


def test_batches_of_any_sizes_and_order_give_the_same_rows() -> None:
    model, pixels = making.vit(), pictures(7)
    whole = features.extract_features(model, batches(pixels, (7,)), VIEW, num_images=7)
    for sizes in ((1, 6), (3, 3, 1)):
        parts = batches(pixels, sizes)
        torch.testing.assert_close(
            features.extract_features(model, parts[::-1], VIEW, num_images=7), whole, atol=1e-5, rtol=0
        )


def test_the_shares_of_ranks_are_summed_to_all_rows(tmp_path: Path) -> None:
    split, model = train(folder(tmp_path, "train", "val", each=5)), making.vit()

    def share(rank: int, world: int, others: Tensor | float = 0.0) -> Tensor:
        mine = iter_eval_batches(split, VIEW, batch_size=3, num_classes=2, rank=rank, world_size=world)
        return features.extract_features(
            model, mine, VIEW, num_images=len(split), reduce_ranks=lambda values: values + others
        )

    torch.testing.assert_close(share(1, 3, share(0, 3) + share(2, 3)), share(0, 1), atol=1e-5, rtol=0)


def test_dropout_is_off_and_progress_is_told() -> None:
    model = making.vit()
    expected = features.extract_features(model, batches(pictures(4), (4,)), VIEW, num_images=4)
    model.set_regularization(dropout=0.5).train()
    seen: list[tuple[int, int]] = []
    found = features.extract_features(
        model, batches(pictures(4), (3, 1)), VIEW, num_images=4, progress=lambda *told: seen.append(told)
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert seen == [(3, 4), (4, 4)]


def test_features_that_are_not_finite_are_refused() -> None:
    model = making.vit()
    with torch.no_grad():
        model.get_parameter("norm.weight")[3] = torch.inf
    with pytest.raises(ModelError, match="features are not all finite"):
        features.extract_features(model, batches(pictures(2), (2,)), VIEW, num_images=2)


def test_labels_are_one_for_each_image(tmp_path: Path) -> None:
    split = train(folder(tmp_path / "set", "train", "val", each=3))
    assert features.read_labels(split).tolist() == [0, 0, 0, 1, 1, 1]
    split.store.table.columns["label"] = split.store.table["label"].copy()
    split.store.table["label"][split.rows[4]] = -1
    with pytest.raises(DataError, match=r"1 image without a label, such as train/tulip/1\.jpg"):
        features.read_labels(split)


# --- the cache -------------------------------------------------------------------------------------------------------


def test_the_digest_of_a_model_is_of_all_but_its_head() -> None:
    first = features.digest_model(making.vit())
    other_head = making.vit()
    with torch.no_grad():
        other_head.get_parameter("head.weight").add_(1)
    assert features.digest_model(other_head) == first
    other = making.vit()
    with torch.no_grad():
        other.get_parameter("blocks.1.mlp.fc1.bias")[0] += 1e-7
    found = {
        features.digest_model(other),
        features.digest_model(making.vit(gelu="erf")),
        features.digest_model(making.bit()),
    }
    assert len(found | {first}) == 4


def test_the_digest_of_a_folder_changes_with_an_image_its_name_and_its_neighbours(tmp_path: Path) -> None:
    root = folder(tmp_path, "train", "val")
    first = features.digest_images(train(root))
    assert features.digest_images(train(root)) == first
    assert features.digest_images(open_dataset(str(root)).splits["val"]) != first
    image = root / "train" / "rose" / "0.jpg"
    image.write_bytes(encoded(picture(99), quality=30))
    changed = features.digest_images(train(root))
    image.rename(image.with_name("00.jpg"))
    renamed = features.digest_images(train(root))
    (root / "train" / "rose" / "1.jpg").unlink()
    assert len({first, changed, renamed, features.digest_images(train(root))}) == 4


def test_the_digest_of_shards_changes_with_their_file(tmp_path: Path) -> None:
    samples = [
        shards.Sample(name, f"{name}/{number}.jpg", encoded(picture(number)), (number % 2,))
        for name in ("train", "val")
        for number in range(4)
    ]
    shards.write_shards(tmp_path / "packed", samples, classes=["rose", "tulip"], origin={})
    first = features.digest_images(train(tmp_path / "packed"))
    assert features.digest_images(train(tmp_path / "packed")) == first
    shard = next((tmp_path / "packed").rglob("*train*.tar"))
    status = shard.stat()
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    assert features.digest_images(train(tmp_path / "packed")) != first


def test_the_digest_of_images_in_memory_changes_with_a_pixel() -> None:
    split = train("digits")
    first = features.digest_images(split)
    assert features.digest_images(train("digits")) == first
    split.store.pixels[split.rows[7], 0, 0] += 1  # type: ignore[attr-defined]
    assert features.digest_images(split) != first


def test_each_preprocessing_has_a_place_of_its_own() -> None:
    views = [VIEW, dataclasses.replace(VIEW, resize=(32,)), dataclasses.replace(VIEW, mean=(0.4, 0.5, 0.5))]
    places = {features.build_cache_path("model", "images", view) for view in views}
    places |= {features.build_cache_path("other", "images", VIEW), features.build_cache_path("model", "others", VIEW)}
    assert len(places) == 5


def test_what_is_kept_is_recalled_and_what_is_damaged_is_not() -> None:
    place = features.build_cache_path("model", "images", VIEW)
    assert features.load_cached_features(place) is None
    values = torch.randn(5, 3)
    features.cache_features(place, values)
    found = features.load_cached_features(place)
    assert found is not None
    assert torch.equal(found, values)
    place.write_bytes(place.read_bytes()[:-4])
    assert features.load_cached_features(place) is None
    features.cache_features(place, values)
    found = features.load_cached_features(place)
    assert found is not None
    assert torch.equal(found, values)


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    place = features.build_cache_path("model", "images", VIEW)
    features.cache_features(place, torch.zeros(2, 2))
    assert features.load_cached_features(place) is None
