"""Duplicates planted among made-up features that all lean one way, as those of similar photos do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests import model_factory
from tests.data.image_files import write_image_folder
from vitrail.cli.arguments.data import CheckArguments
from vitrail.cli.signature import list_options
from vitrail.data.folder import open_folder
from vitrail.data.image_scan import DECODED, scan_dataset
from vitrail.errors import UsageError
from vitrail.evaluation import feature_duplicates
from vitrail.evaluation.feature_duplicates import (
    DEFAULT_THRESHOLD,
    extract_scan_features,
    find_feature_duplicates,
    measure_crowding,
    whiten_features,
)
from vitrail.inference.classifier import Classifier
from vitrail.inference.cosine_search import normalize_rows

COUNT, WIDTH, PLANTED = 600, 32, 40


def make_crowded_features(seed: int = 0) -> NDArray[np.float32]:
    """Features with a common direction, of which an edit changes the four that vary most.

    The last 40 rows are such duplicates of the first 40.
    """
    random = np.random.default_rng(seed)
    scale = np.array([6.0] * 4 + [1.0] * (WIDTH - 4))
    features = random.normal(size=(COUNT, WIDTH)) * scale + 25
    copies = features[:PLANTED] + random.normal(size=(PLANTED, WIDTH)) * 0.2
    copies[:, :4] = random.normal(size=(PLANTED, 4)) * 6 + 25
    return np.concatenate([features, copies]).astype(np.float32)


def test_planted_duplicates_are_found_where_a_plain_cosine_drowns_them() -> None:
    features = make_crowded_features()
    expected = {(row, COUNT + row) for row in range(PLANTED)}
    found = {tuple(pair) for pair in find_feature_duplicates(features).rows.tolist()}
    assert len(found & expected) >= 0.7 * PLANTED
    assert len(found - expected) <= 4
    cosines = np.triu(normalize_rows(features) @ normalize_rows(features).T, 1)
    best = np.argsort(-cosines, axis=None)[:PLANTED]
    plain = set(zip(*(numbers.tolist() for numbers in np.unravel_index(best, cosines.shape)), strict=True))
    assert len(plain & expected) < 0.5 * PLANTED


def test_whitened_components_vary_alike_and_are_those_of_a_plain_decomposition() -> None:
    features = make_crowded_features()
    rows = normalize_rows(features).astype(np.float64)
    centered = rows - rows.mean(axis=0)
    _, singular, components = np.linalg.svd(centered, full_matrices=False)
    variances = singular**2 / len(rows)
    floor = max(0.03, WIDTH / len(rows)) * variances.mean()
    expected = normalize_rows(centered @ components.T / np.sqrt(variances + floor))
    whitened = whiten_features(features)
    assert np.allclose(whitened @ whitened.T, expected @ expected.T, atol=1e-5)


def test_crowding_is_the_mean_of_the_second_to_sixth_neighbor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_duplicates, "_BLOCK", 7)
    rows = normalize_rows(np.random.default_rng(0).normal(size=(30, 8)))
    scores = np.sort(rows @ rows.T, axis=1)[:, ::-1]
    assert measure_crowding(rows) == pytest.approx(scores[:, 2:7].mean(axis=1), abs=1e-6)
    assert measure_crowding(rows[:2]).tolist() == [0, 0]
    assert measure_crowding(rows[:3]) == pytest.approx(np.sort(rows[:3] @ rows[:3].T, axis=1)[:, 0], abs=1e-6)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_few_or_equal_images_give_finite_scores(count: int) -> None:
    found = find_feature_duplicates(np.ones((count, 8), dtype=np.float32), 0.4)
    assert len(found.rows) == count * (count - 1) // 2
    assert np.isfinite(found.similarities).all()
    assert len(find_feature_duplicates(make_crowded_features()[:count], 0.9).rows) <= 1


def test_features_are_those_of_the_decoded_images_and_are_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_image_folder(tmp_path / "photos", "train", "test", each=3)
    (sorted(root.rglob("*.*"))[0]).write_bytes(b"no image")
    scan, trained = scan_dataset(open_folder(root)), model_factory.build_trained(model_factory.build_vit())
    assert (scan.image_facts["status"] != DECODED).sum() == 1
    calls: list[tuple[int, int]] = []
    found = extract_scan_features(trained, scan, progress=lambda *done: calls.append(done))
    assert found.images.tolist() == np.flatnonzero(scan.image_facts["status"] == DECODED).tolist()
    assert calls[-1] == (len(found.images), len(found.images))
    images = [Path(scan.get_image_name(image)) for image in found.images.tolist()]
    expected = Classifier(trained, device="cpu").extract_features([root / image for image in images])
    assert torch.allclose(torch.from_numpy(found.values), expected, atol=1e-5)
    monkeypatch.setattr("vitrail.evaluation.features.extract_split_features", None)
    assert np.array_equal(extract_scan_features(trained, scan).values, found.values)


def test_a_dataset_without_a_readable_image_has_no_features(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "photos", each=1)
    for path in root.rglob("*.*"):
        path.write_bytes(b"no image")
    with pytest.raises(UsageError, match="no image that could be decoded, so none has features"):
        extract_scan_features(model_factory.build_trained(model_factory.build_vit()), scan_dataset(open_folder(root)))


def test_the_command_states_the_default_that_was_measured() -> None:
    [threshold] = [option for option in list_options(CheckArguments) if option.name == "--threshold"]
    assert " ".join(threshold.help.split()).endswith(f"Default: {DEFAULT_THRESHOLD}.")
