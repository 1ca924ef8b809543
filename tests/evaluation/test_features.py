"""Features are what the head reads, in the dataset's order; they are cached until something they depend on changes."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import model_factory
from tests.data.image_files import encode_image, make_image, write_image_folder
from vitrail.config import PreprocessConfig
from vitrail.data import shards
from vitrail.data.dataset import Split
from vitrail.data.loader import Batch, iter_eval_batches
from vitrail.data.sources import open_dataset
from vitrail.data.transforms import normalize
from vitrail.errors import DataError, ModelError
from vitrail.evaluation import features
from vitrail.model.vit import Model
from vitrail.runtime import distributed

PREPROCESS = PreprocessConfig(size=(32, 32), resize=(36,))


def make_pixels(number: int) -> Tensor:
    return torch.randint(0, 256, (number, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def make_batches(pixels: Tensor, sizes: tuple[int, ...]) -> list[Batch]:
    positions = torch.arange(len(pixels))
    cuts = zip(pixels.split(list(sizes)), positions.split(list(sizes)), strict=True)
    return [Batch(images, torch.zeros(len(images), dtype=torch.int64), rows) for images, rows in cuts]


def open_train(name: Path | str) -> Split:
    return open_dataset(str(name)).splits["train"]


# --- what they are ---------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], Model]] = {
    "class token": model_factory.build_vit,
    "average": lambda: model_factory.build_vit(pool="norm-mean", class_token=False),
    "attention pooling": lambda: model_factory.build_vit(pool="map", class_token=False),
    "class token and average": lambda: model_factory.build_vit(pool="class-mean"),
    "hidden layer": lambda: model_factory.build_vit(hidden_head=True),
    "hybrid": lambda: model_factory.build_vit(stem=model_factory.STEM, patch=2),
    "BiT": model_factory.build_bit,
}


@pytest.mark.parametrize("name", MODELS)
def test_they_are_what_the_head_reads(name: str) -> None:
    model, pixels = MODELS[name](), make_pixels(5)
    values = features.extract_features(model, make_batches(pixels, (2, 3)), PREPROCESS, num_images=5)
    assert values.shape == (5, model.config.num_features)
    assert values.dtype == torch.float32
    with torch.no_grad():
        logits = model(normalize(pixels, PREPROCESS))
        torch.testing.assert_close(model.head(values), logits)


def test_batches_of_any_sizes_and_order_give_the_same_rows() -> None:
    model, pixels = model_factory.build_vit(), make_pixels(7)
    expected = features.extract_features(model, make_batches(pixels, (7,)), PREPROCESS, num_images=7)
    for sizes in ((1, 6), (3, 3, 1)):
        parts = make_batches(pixels, sizes)
        torch.testing.assert_close(
            features.extract_features(model, parts[::-1], PREPROCESS, num_images=7), expected, atol=1e-5, rtol=0
        )


def test_the_shares_of_ranks_are_summed_to_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split, model = open_train(write_image_folder(tmp_path, "train", "val", each=5)), model_factory.build_vit()

    def extract_share(rank: int, world: int) -> Tensor:
        batches = iter_eval_batches(split, PREPROCESS, batch_size=3, num_classes=2, rank=rank, world_size=world)
        return features.extract_features(model, batches, PREPROCESS, num_images=len(split))

    everything, others = extract_share(0, 1), extract_share(0, 3) + extract_share(2, 3)
    monkeypatch.setattr(distributed, "all_reduce_rows", lambda values, _: values + others)
    torch.testing.assert_close(extract_share(1, 3), everything, atol=1e-5, rtol=0)


def test_dropout_is_off_and_progress_is_reported() -> None:
    model = model_factory.build_vit()
    expected = features.extract_features(model, make_batches(make_pixels(4), (4,)), PREPROCESS, num_images=4)
    model.set_regularization(dropout=0.5).train()
    reports: list[tuple[int, int]] = []
    values = features.extract_features(
        model,
        make_batches(make_pixels(4), (3, 1)),
        PREPROCESS,
        num_images=4,
        progress=lambda *report: reports.append(report),
    )
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    assert reports == [(3, 4), (4, 4)]


def test_features_that_are_not_finite_are_refused() -> None:
    model = model_factory.build_vit()
    with torch.no_grad():
        model.get_parameter("norm.weight")[3] = torch.inf
    with pytest.raises(ModelError, match="features are not all finite"):
        features.extract_features(model, make_batches(make_pixels(2), (2,)), PREPROCESS, num_images=2)


def test_labels_are_one_for_each_image(tmp_path: Path) -> None:
    split = open_train(write_image_folder(tmp_path / "set", "train", "val", each=3))
    assert features.read_labels(split).tolist() == [0, 0, 0, 1, 1, 1]
    split.store.table.columns["label"] = split.store.table["label"].copy()
    split.store.table["label"][split.rows[4]] = -1
    with pytest.raises(DataError, match=r"1 image without a label, such as train/tulip/1\.jpg"):
        features.read_labels(split)


# --- the cache -------------------------------------------------------------------------------------------------------


def test_the_digest_of_a_model_is_of_all_but_its_head() -> None:
    first = features.digest_model(model_factory.build_vit())
    other_head = model_factory.build_vit()
    with torch.no_grad():
        other_head.get_parameter("head.weight").add_(1)
    assert features.digest_model(other_head) == first
    other_block = model_factory.build_vit()
    with torch.no_grad():
        other_block.get_parameter("blocks.1.mlp.fc1.bias")[0] += 1e-7
    digests = {
        features.digest_model(other_block),
        features.digest_model(model_factory.build_vit(gelu="erf")),
        features.digest_model(model_factory.build_bit()),
    }
    assert len(digests | {first}) == 4


def test_the_digest_of_a_folder_changes_with_an_image_its_name_and_its_neighbors(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path, "train", "val")
    first = features.digest_images(open_train(root))
    assert features.digest_images(open_train(root)) == first
    assert features.digest_images(open_dataset(str(root)).splits["val"]) != first
    image = root / "train" / "rose" / "0.jpg"
    image.write_bytes(encode_image(make_image(99), quality=30))
    changed = features.digest_images(open_train(root))
    image.rename(image.with_name("00.jpg"))
    renamed = features.digest_images(open_train(root))
    (root / "train" / "rose" / "1.jpg").unlink()
    assert len({first, changed, renamed, features.digest_images(open_train(root))}) == 4


def test_the_digest_of_shards_changes_with_their_file(tmp_path: Path) -> None:
    samples = [
        shards.Sample(name, f"{name}/{number}.jpg", encode_image(make_image(number)), (number % 2,))
        for name in ("train", "val")
        for number in range(4)
    ]
    shards.write_shards(tmp_path / "packed", samples, classes=["rose", "tulip"], origin={})
    first = features.digest_images(open_train(tmp_path / "packed"))
    assert features.digest_images(open_train(tmp_path / "packed")) == first
    shard = next((tmp_path / "packed").rglob("*train*.tar"))
    status = shard.stat()
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    assert features.digest_images(open_train(tmp_path / "packed")) != first


def test_the_digest_of_images_in_memory_changes_with_a_pixel() -> None:
    split = open_train("digits")
    first = features.digest_images(split)
    assert features.digest_images(open_train("digits")) == first
    split.store.sources[0].images[split.rows[7], 0, 0] += 1  # type: ignore[attr-defined]
    assert features.digest_images(split) != first


def test_each_preprocessing_has_a_cache_file_of_its_own() -> None:
    preprocesses = [
        PREPROCESS,
        dataclasses.replace(PREPROCESS, resize=(32,)),
        dataclasses.replace(PREPROCESS, mean=(0.4, 0.5, 0.5)),
    ]
    paths = {features.build_cache_path("model", "images", preprocess) for preprocess in preprocesses}
    paths |= {
        features.build_cache_path("other", "images", PREPROCESS),
        features.build_cache_path("model", "others", PREPROCESS),
    }
    assert len(paths) == 5


def test_cached_features_are_loaded_and_damaged_ones_are_not() -> None:
    path = features.build_cache_path("model", "images", PREPROCESS)
    assert features.load_cached_features(path) is None
    values = torch.randn(5, 3)
    features.cache_features(path, values)
    cached = features.load_cached_features(path)
    assert cached is not None
    assert torch.equal(cached, values)
    path.write_bytes(path.read_bytes()[:-4])
    assert features.load_cached_features(path) is None
    features.cache_features(path, values)
    cached = features.load_cached_features(path)
    assert cached is not None
    assert torch.equal(cached, values)


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = features.build_cache_path("model", "images", PREPROCESS)
    features.cache_features(path, torch.zeros(2, 2))
    assert features.load_cached_features(path) is None
