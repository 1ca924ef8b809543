"""`vitrail.Scorer` and `Decoder`: the numbers of `vitrail.predict`, whoever calls them; small in a pickle."""

import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitrail
from tests.api.conftest import make_trained
from vitrail.data.decode import decode
from vitrail.errors import UsageError

MODEL = "model.safetensors"


def list_files() -> list[Path]:
    return sorted(Path("photos").rglob("*.png"))


def read_batch(files: list[Path]) -> dict[str, Any]:
    cells = np.empty(len(files), dtype=object)
    cells[:] = [file.read_bytes() for file in files]
    return {"bytes": cells, "number": np.arange(len(files))}


def test_labels_and_features_are_those_of_predict_and_embed_to_the_bit() -> None:
    files = list_files()
    batch = read_batch(files)
    expected = vitrail.predict(MODEL, files, top=2, batch=8)
    scored = vitrail.Scorer(MODEL, top=2, batch=8)(batch)
    assert [list(zip(*row, strict=True)) for row in zip(scored["labels"], scored["probabilities"], strict=True)] == [
        prediction.labels for prediction in expected
    ]
    assert list(batch) == ["bytes", "number"]
    assert list(scored) == ["bytes", "number", "labels", "probabilities", "error"]
    assert set(scored["error"]) == {""}
    best = vitrail.Scorer(MODEL, batch=8, threads=3)(batch)
    assert list(best["label"]) == [prediction.label for prediction in expected]
    assert best["probability"].dtype == np.float32
    assert best["probability"].tolist() == [prediction.probability for prediction in expected]
    for options in ({}, {"features": "mean", "normalize": True}):
        features = vitrail.Scorer(MODEL, **({"features": True} | options), batch=8)(batch)["features"]
        assert np.array_equal(features, vitrail.embed(MODEL, files, batch=8, **options))


def test_cells_are_bytes_paths_arrays_structs_or_inputs() -> None:
    files = list_files()[:3]
    expected = vitrail.Scorer(MODEL)(read_batch(files))["probability"]
    inputs = vitrail.Classifier(vitrail.load(MODEL))
    cells: list[list[Any]] = [
        list(map(str, files)),
        [{"bytes": file.read_bytes(), "path": None} for file in files],
        [{"bytes": None, "path": str(file)} for file in files],
        [bytearray(file.read_bytes()) for file in files],
        [inputs.make_input(file).numpy() for file in files],
    ]
    for column in cells:
        scored = vitrail.Scorer(MODEL, column="image")({"image": column})
        assert np.array_equal(scored["probability"], expected)
    arrays = np.stack([decode(file).permute(1, 2, 0).numpy() for file in files])
    assert np.array_equal(vitrail.Scorer(MODEL, column="image")({"image": arrays})["probability"], expected)


def test_an_unreadable_image_has_an_error_and_the_others_their_labels() -> None:
    good = list_files()[0].read_bytes()
    cells = [good, b"no image", None, good[:100], 3, good]
    batch = {"bytes": cells, "path": [f"s3://b/{index}.png" for index in range(6)]}
    scored = vitrail.Scorer(MODEL)(batch)
    assert [error == "" for error in scored["error"]] == [True, False, False, False, False, True]
    assert scored["error"][1].startswith("s3://b/1.png")
    assert [label is None for label in scored["label"]] == [False, True, True, True, True, False]
    assert np.isnan(scored["probability"][1:5]).all()
    assert scored["probability"][0] == scored["probability"][5]
    features = vitrail.Scorer(MODEL, features=True)(batch)["features"]
    assert np.isnan(features[1:5]).all()
    assert np.array_equal(features[0], features[5])
    top = vitrail.Scorer(MODEL, top=2)({"bytes": [b"x"]})
    assert (top["labels"][0], top["probabilities"][0]) == (None, None)
    assert vitrail.Scorer(MODEL)({"bytes": []})["error"].shape == (0,)


def test_a_decoder_makes_the_inputs_that_a_scorer_computes() -> None:
    files = list_files()[:5]
    batch = read_batch(files)
    batch["bytes"][2] = b"no image"
    decoded = vitrail.Decoder(MODEL, threads=2)(batch)
    assert list(decoded) == ["number", "pixels", "error"]
    assert decoded["pixels"].shape == (5, 3, 32, 32)
    assert decoded["pixels"].dtype == np.uint8
    classifier = vitrail.Classifier(vitrail.load(MODEL))
    assert np.array_equal(decoded["pixels"][0], classifier.make_input(files[0]).numpy())
    scored = vitrail.Scorer(MODEL, column="pixels")(decoded)
    direct = vitrail.Scorer(MODEL)(batch)
    assert list(scored["error"]) == list(direct["error"])
    assert np.array_equal(scored["probability"], direct["probability"], equal_nan=True)


def test_a_pandas_frame_gives_a_frame() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    files = list_files()[:4]
    batch = read_batch(files)
    frame = pandas.DataFrame({"bytes": list(batch["bytes"])}, index=[3, 5, 7, 9])
    scored = vitrail.Scorer(MODEL, top=2)(frame)
    assert list(scored.columns) == ["bytes", "labels", "probabilities", "error"]
    assert list(scored.index) == [3, 5, 7, 9]
    assert scored["labels"].tolist() == list(vitrail.Scorer(MODEL, top=2)(batch)["labels"])
    features = vitrail.Scorer(MODEL, features=True)(frame)["features"]
    assert np.array_equal(np.stack(list(features)), vitrail.embed(MODEL, files))
    assert list(vitrail.Decoder(MODEL)(frame).columns) == ["pixels", "error"]


def test_a_pickle_holds_the_arguments_alone_also_after_a_call() -> None:
    scorer, decoder = vitrail.Scorer(MODEL, top=5, column="bytes"), vitrail.Decoder(MODEL)
    before = pickle.dumps(scorer)
    batch = read_batch(list_files()[:2])
    scorer(batch)
    decoder(batch)
    assert pickle.dumps(scorer) == before
    assert len(before) < 1000
    assert len(pickle.dumps(decoder)) < 1000
    assert list(pickle.loads(before)(batch)["labels"]) == list(scorer(batch)["labels"])


def test_a_model_that_was_replaced_is_loaded_again() -> None:
    batch = read_batch(list_files()[:2])
    scorer = vitrail.Scorer(MODEL)
    assert set(scorer(batch)["label"]) <= {"rose", "tulip"}
    vitrail.save(make_trained(labels=("oak", "elm")), MODEL, overwrite=True)
    assert set(scorer(batch)["label"]) <= {"oak", "elm"}


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a worker loads its own model, so give a name or a path .* not a Trained"):
        vitrail.Scorer(vitrail.load(MODEL))
    with pytest.raises(UsageError, match=r"the batch has no column image; column= chooses one of bytes, number"):
        vitrail.Scorer(MODEL, column="image")(read_batch(list_files()[:1]))
    with pytest.raises(UsageError, match=r"not list: with Ray Data give batch_format=\"numpy\""):
        vitrail.Scorer(MODEL)([b"x"])
    with pytest.raises(UsageError, match="top is 0"):
        vitrail.Scorer(MODEL, top=0)
    with pytest.raises(UsageError, match="threads is 0"):
        vitrail.Decoder(MODEL, threads=0)
    with pytest.raises(UsageError, match="normalize choose"):
        vitrail.Scorer(MODEL, normalize=True)


def test_no_engine_is_imported() -> None:
    script = (
        f"import sys, vitrail; vitrail.Scorer('{MODEL}')({{'bytes': [b'x']}});"
        " sys.exit(any(name in sys.modules for name in ('ray', 'pyspark', 'pandas', 'pyarrow')))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_processes_of_multiprocessing_give_the_same_numbers() -> None:
    files = list_files()
    batches = [read_batch(files[start : start + 10]) for start in range(0, len(files), 10)]
    scorer = vitrail.Scorer(MODEL, batch=10)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        scored = list(pool.imap(scorer, batches))
    expected = vitrail.embed(MODEL, files, batch=10)
    assert len(expected) == sum(len(batch["label"]) for batch in scored)
    for batch, result in zip(batches, scored, strict=True):
        assert list(result["label"]) == list(scorer(batch)["label"])
