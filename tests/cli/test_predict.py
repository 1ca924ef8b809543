"""`vitrail predict` on made-up images: the rows, how an interrupted command continues, and the cost."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from torch import Tensor

from tests import model_factory, s3_server
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import encode_image, make_image, write_image_folder
from tests.test_locks import holder
from vitrail import Classifier, load, save
from vitrail.cli import main
from vitrail.config import PreprocessConfig
from vitrail.data import image_headers, image_paths
from vitrail.data.loader import iter_eval_batches
from vitrail.data.sources import open_dataset
from vitrail.data.transforms import normalize
from vitrail.evaluation import predictions
from vitrail.evaluation.dataset_evaluation import EvaluationSettings, evaluate_model, make_evaluated_model
from vitrail.export import graph
from vitrail.formatting import unquote_cell
from vitrail.inference import bulk_prediction
from vitrail.serving import routes
from vitrail.serving.server import make_service
from vitrail.visualization import attention, crops, image_grids
from vitrail.weights.adapt import adapt
from vitrail.weights.trained import Trained

Soaked = Callable[[int, str, str, str], None]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save(model_factory.build_trained(model_factory.build_vit()), path)
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    root = write_image_folder(tmp_path / "pictures", each=4)
    (root / "rose" / "broken.jpg").write_bytes(b"<html>")
    return root


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


# --- what is written -------------------------------------------------------------------------------------------------


def test_rows_are_the_classifiers_answers_in_order_and_a_bad_file_is_named_in_its_own(
    model: Path, pictures: Path, capsys: Capture
) -> None:
    code, out, error = vitrail("predict", str(model), str(pictures), "--top", "2", "--batch", "3", capsys=capsys)
    assert code == 3
    assert "1 of 9 images cannot be read" in error
    rows = list(csv.DictReader(io.StringIO(out)))
    paths = sorted(str(path) for path in pictures.rglob("*.*"))
    assert list(dict.fromkeys(row["image"] for row in rows)) == paths
    (bad,) = (row for row in rows if row["error"])
    assert bad["image"].endswith("broken.jpg")
    good = [path for path in paths if not path.endswith("broken.jpg")]
    expected = [pair for prediction in Classifier(load(model))(good, top=2) for pair in prediction]
    predicted = [(row["label"], float(row["probability"])) for row in rows if not row["error"]]
    for (label, probability), (name, value) in zip(predicted, expected, strict=True):
        assert label == name
        assert probability == pytest.approx(value, abs=1e-5)


@pytest.mark.slow
def test_two_processes_write_the_bytes_that_one_writes(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    """9 images in batches of 2 are no whole number of rounds for two processes."""
    command = ["predict", str(model), str(pictures), "--device", "cpu", "--batch", "2", "--attention"]
    code, _, _ = vitrail(*command, str(tmp_path / "overlays"), "--out", str(tmp_path / "one.jsonl"), capsys=capsys)
    assert code == 3
    (tmp_path / "overlays").rename(tmp_path / "alone")
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vitrail"]
    rest = [str(tmp_path / "overlays"), "--out", str(tmp_path / "two.jsonl")]
    done = subprocess.run([*starter, *command, *rest], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1  # torchrun has codes of its own
    assert "1 of 9 images cannot be read" in done.stderr
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    assert read_files(tmp_path / "alone") == read_files(tmp_path / "overlays")


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_list_on_standard_input_and_a_file_for_the_rows(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    selected = sorted(str(path) for path in (pictures / "tulip").iterdir())
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*selected, "", "nowhere.jpg", ""])))
    code, out, _ = vitrail("predict", str(model), "-", "--out", str(tmp_path / "rows.csv"), capsys=capsys)
    assert (code, out) == (3, "")
    rows = read_table(tmp_path / "rows.csv")
    assert [row["image"] for row in rows] == [*selected, "nowhere.jpg"]
    assert "nowhere.jpg" in rows[-1]["error"]


def test_rows_go_where_stdout_goes_while_a_bar_is_on_the_terminal(model: Path, pictures: Path, tmp_path: Path) -> None:
    """The progress bar is on stderr, here a terminal; rich would also take stdout for it."""
    terminal, stderr = pty.openpty()
    command = [sys.executable, "-m", "vitrail", "predict", str(model), str(pictures / "rose"), "--device", "cpu"]
    with (tmp_path / "rows.csv").open("wb") as rows:
        process = subprocess.Popen(command, stdout=rows, stderr=stderr, env=os.environ | {"TERM": "xterm"})
        os.close(stderr)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while part := os.read(terminal, 4096):
                shown += part
        assert process.wait() == 3  # one image is damaged
    os.close(terminal)
    assert b"predicting" in shown
    assert len(read_table(tmp_path / "rows.csv")) >= 2


def test_formats_say_the_same(model: Path, pictures: Path, capsys: Capture) -> None:
    command = ("predict", str(model), str(pictures / "rose"), str(pictures / "nothing"), "--top", "3")
    objects = [json.loads(line) for line in vitrail(*command, "--json", capsys=capsys)[1].splitlines()]
    assert objects == [
        json.loads(line) for line in vitrail(*command, "--format", "jsonl", capsys=capsys)[1].splitlines()
    ]
    rows = list(csv.DictReader(io.StringIO(vitrail(*command, capsys=capsys)[1])))
    lines = vitrail(*command, "--format", "table", capsys=capsys)[1].splitlines()
    labels = [(item["image"], *pair.values()) for item in objects for pair in item.get("predictions", ())]
    assert objects[0]["predictions"][0].keys() == {"label", "probability"}
    assert [(row["image"], row["label"]) for row in rows if row["rank"]] == [(name, label) for name, label, _ in labels]
    assert [line.split(maxsplit=3) for line in lines if line[0].isdigit()] == [
        [f"{probability:.4f}", *label.split(), name] for name, label, probability in labels
    ]
    errors = [item["error"] for item in objects if "error" in item]
    assert len(errors) == 2
    assert [row["error"] for row in rows if row["error"]] == errors
    assert [line.split(maxsplit=1)[1] for line in lines if not line[0].isdigit()] == errors


def test_a_shard_and_a_folder_give_the_same_answers(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    with tarfile.open(tmp_path / "s-0.tar", "w") as file:
        file.add(pictures, "pictures", filter=lambda member: member)
    (tmp_path / "list.csv").write_text("path\n" + "".join(f"{path}\n" for path in sorted(pictures.rglob("*.jpg"))))

    def predict(argument: str) -> dict[str, Any]:
        _, out, _ = vitrail("predict", str(model), argument, "--json", "--batch", "1", capsys=capsys)
        rows = [json.loads(line) for line in out.splitlines()]
        return {"/".join(row["image"].split("/")[-2:]): row.get("predictions") for row in rows}

    assert predict(str(tmp_path / "s-{0..0}.tar")) == predict(str(pictures)) == predict(str(tmp_path / "list.csv"))
    (tmp_path / "shards").mkdir()
    (tmp_path / "s-0.tar").rename(tmp_path / "shards" / "s-0.tar")
    assert predict(str(tmp_path / "shards")) == predict(str(pictures))


@pytest.mark.parametrize(("target_format", "runtime"), [("onnx", "ONNX Runtime"), ("openvino", "OpenVINO")])
def test_an_exported_file_answers_as_the_model_does(
    target_format: str, runtime: str, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    pytest.importorskip(
        "onnxscript" if target_format == "onnx" else "openvino", reason=f"the extra `{target_format}` is not installed"
    )
    pictures, path = (
        write_image_folder(tmp_path / "pictures", each=4),
        tmp_path / f"m{'.onnx' if target_format == 'onnx' else '.xml'}",
    )
    assert vitrail("convert", str(model), str(path), "--to", target_format, capsys=capsys)[0] == 0
    both = [
        vitrail("predict", str(item), str(pictures), "--json", "--batch", "3", capsys=capsys) for item in (model, path)
    ]
    assert f"{path} is run on the CPU by {runtime}" in both[1][2]
    expected, exported = ([json.loads(line) for line in out.splitlines()] for _, out, _ in both)
    assert len(exported) == 8
    for one, other in zip(expected, exported, strict=True):
        assert (one["image"], one["predictions"][0]["label"]) == (other["image"], other["predictions"][0]["label"])
        assert other["predictions"][0]["probability"] == pytest.approx(one["predictions"][0]["probability"], abs=1e-5)
    rows = tmp_path / "rows.csv"
    for _ in range(2):  # the second goes on after the first, and finds all done
        assert vitrail("predict", str(path), str(pictures), "--out", str(rows), capsys=capsys)[0] == 0
    assert len(read_table(rows)) == 8
    with path.with_suffix(".bin" if target_format == "openvino" else ".onnx.data").open("ab") as weights:
        weights.write(b"others")
    code, _, err = vitrail("predict", str(path), str(pictures), "--out", str(rows), capsys=capsys)
    assert (code, "was begun with another model" in err) == (2, True)
    code, _, err = vitrail("predict", str(path), str(pictures), "--embed", capsys=capsys)
    assert (code, "--embed is for models, and " in err) == (2, True)
    path.write_bytes(b"<html>")
    code, _, err = vitrail("predict", str(path), str(pictures), capsys=capsys)
    assert (code, err.count("\n"), "cannot be read" in err) == (4, 1, True)


def test_a_pt2_is_answered_with_what_runs_it(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "m.pt2").write_bytes(b"x")
    code, _, err = vitrail("predict", str(tmp_path / "m.pt2"), "photos", capsys=capsys)
    assert code == 2
    assert "m.pt2 is for torch.export.load (docs/exporting.md); give an .onnx, an .xml, or the model" in err


def test_a_packed_dataset_is_predicted_as_its_images(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_image_folder(tmp_path / "set", each=4)
    assert vitrail("data", "pack", "./set", "packed", capsys=capsys)[0] == 0
    predictions = [vitrail("predict", str(model), path, "--json", capsys=capsys) for path in ("set", "packed")]
    assert [code for code, _, _ in predictions] == [0, 0]
    expected, packed = ([json.loads(line)["predictions"] for line in out.splitlines()] for _, out, _ in predictions)
    assert len(packed) == 8
    assert sorted(map(str, packed)) == sorted(map(str, expected))


def test_photos_that_cannot_be_read_here_are_counted_in_the_last_line(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_headers, "get_readable_formats", lambda: image_headers.FORMATS[:6])
    monkeypatch.setattr(image_paths, "get_image_suffixes", lambda: image_headers.IMAGE_SUFFIXES)
    root = write_image_folder(tmp_path / "photos", each=2)
    for name in ("a.heic", "rose/B.HEIC", "rose/c.avif", "notes.txt"):
        (root / name).write_bytes(b"x")
    code, out, err = vitrail("predict", str(model), str(root), "--json", capsys=capsys)
    assert (code, len(out.splitlines())) == (0, 4)
    last = err.splitlines()[-1]
    assert last.startswith("4 images; ")
    skipped = "3 images skipped for lack of a decoder: .avif 1, .heic 2; pip install 'vitrail[heif]' reads .heic"
    assert last.endswith(f"; {skipped}")


def test_unsure_stands_before_the_labels(model: Path, pictures: Path, capsys: Capture) -> None:
    save(dataclasses.replace(load(model), threshold=0.999), model, overwrite=True)
    command = ("predict", str(model), str(pictures / "tulip" / "0.jpg"), "--top", "2")
    rows = list(csv.DictReader(io.StringIO(vitrail(*command, capsys=capsys)[1])))
    assert [(row["rank"], row["label"] == "unsure") for row in rows] == [("0", True), ("1", False), ("2", False)]
    assert rows[0]["probability"] == rows[1]["probability"]


def test_a_class_may_itself_be_called_unsure(model: Path, pictures: Path, capsys: Capture) -> None:
    save(dataclasses.replace(load(model), labels=("unsure", *"abcdef")), model, overwrite=True)
    command = ("predict", str(model), str(pictures / "tulip"), "--top", "7")
    rows = list(csv.DictReader(io.StringIO(vitrail(*command, capsys=capsys)[1])))
    assert [row["rank"] for row in rows] == [*"1234567"] * 4


def test_features_are_a_matrix_with_names_beside_it_or_lines(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    save(adapt(load(model), classes=0), tmp_path / "headless.safetensors")
    command = ("predict", str(tmp_path / "headless.safetensors"), str(pictures), "--embed", "--batch", "4")
    code, out, _ = vitrail(*command, "--out", str(tmp_path / "features.npy"), capsys=capsys)
    assert (code, out) == (3, "")
    matrix, rows = np.load(tmp_path / "features.npy"), read_table(tmp_path / "features.csv")
    assert (matrix.shape, matrix.dtype) == ((9, 32), np.float32)
    bad = [bool(row["error"]) for row in rows]
    assert [row["image"] for row in rows] == sorted(str(path) for path in pictures.rglob("*.jpg"))
    assert np.isnan(matrix).all(axis=1).tolist() == bad
    good = [row["image"] for row in rows if not row["error"]]
    expected = Classifier(load(model), device="cpu").extract_features(good)
    torch.testing.assert_close(torch.from_numpy(matrix[~np.array(bad)]), expected, atol=1e-5, rtol=1e-5)
    objects = [json.loads(line) for line in vitrail(*command, capsys=capsys)[1].splitlines()]
    for row, item, values in zip(rows, objects, matrix, strict=True):
        assert item["image"] == row["image"]
        assert row["error"] == item.get("error", "")
        assert row["error"] or np.array_equal(np.float32(item["features"]), values)


def test_a_file_of_features_says_which_it_holds_and_continues_with_no_others(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "features.npy"
    command = ("predict", str(model), str(pictures / "rose"), "--embed", "--out", str(out))
    code, _, error = vitrail(*command, "--features", "class-mean", "--normalize", capsys=capsys)
    assert (code, "features: class-mean, 64 per image, of length 1" in error) == (3, True)
    record = json.loads((tmp_path / "features.npy.json").read_text())
    assert (record["--features"], record["--normalize"]) == ("class-mean", True)
    matrix = np.load(out)
    assert matrix.shape[1] == 64
    np.testing.assert_allclose(np.linalg.norm(matrix[~np.isnan(matrix).any(axis=1)], axis=1), 1, rtol=1e-5)
    code, _, error = vitrail(*command, "--normalize", capsys=capsys)
    assert (code, "was begun with --features class-mean, not class" in error) == (2, True)
    out.unlink()
    out.with_suffix(".csv").unlink()
    assert vitrail(*command, capsys=capsys)[0] == 3
    assert json.loads((tmp_path / "features.npy.json").read_text())["--features"] == "class"
    assert vitrail(*command, "--features", "class", capsys=capsys)[0] == 3  # the same features by their own name


def test_overlays_show_the_rollout_one_picture_for_each_image(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    overlays, trained = tmp_path / "overlays", load(model)
    command = ("predict", str(model), str(pictures), "--attention", str(overlays))
    code, out, _ = vitrail(*command, capsys=capsys)
    assert code == 3
    rows = list(csv.DictReader(io.StringIO(out)))
    assert {path.name for path in overlays.iterdir()} == {f"{n}{end}.png" for n in range(4) for end in ("", "-2")}
    for row in rows:
        assert bool(row["attention"]) != bool(row["error"])
    row = rows[-1]
    pixels = Classifier(trained, device="cpu").make_input(row["image"])
    assert trained.preprocess is not None
    rollout = attention.compute_rollout(trained.model, normalize(pixels[None], trained.preprocess))[0]
    with Image.open(row["image"]) as image:
        whole = image_grids.resize_image(np.asarray(image).transpose(2, 0, 1), 12)  # 20 pixels become 240
    within = crops.compute_crop_box(20, 24, trained.preprocess).scale(12)
    with Image.open(row["attention"]) as drawn:
        assert np.array_equal(np.asarray(drawn), image_grids.overlay_attention(whole, rollout, within))
    code, _, error = vitrail(*command, capsys=capsys)
    assert (code, "--attention" in error, "must be a folder that is new or empty" in error) == (2, True, True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--top", "0"], "--top is 0"),
        (["--out", "rows.txt"], "--out rows.txt has no known suffix"),
        (["--out", "rows.npy"], "--out rows.npy holds features alone: it takes --embed"),
        (["--out", "x.csv", "--format", "table"], "a table is for a terminal"),
        (["--json", "--format", "csv"], "omit one"),
        (["--embed", "--format", "csv"], "too many for csv: jsonl, or --out FILE.npy"),
        (["--attention", "s3://bucket/x"], "--attention s3://bucket/x must be a local path"),
        (["--out", "x.parquet", "--json"], "is no text: it takes no --format"),
        (["--out", "x/"], "--out x/ holds features alone: it takes --embed"),
        (["--embed", "--float16"], "--float16 is for the features"),
        (["--embed", "--float16", "--out", "x.jsonl"], "--float16 is for the features"),
        (["--part", "0/3"], "it is K/N"),
        (["--part", "1/3", "--attention", "pictures"], "there is none for a --part"),
        (["--features", "mean"], "--features and --normalize choose what --embed writes: add --embed"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_model_is_read(
    options: list[str], reason: str, capsys: Capture
) -> None:
    code, out, error = vitrail("predict", "nowhere.safetensors", "a.jpg", *options, capsys=capsys)
    assert (code, out) == (2, "")
    assert reason in error


def test_what_a_model_does_not_have_is_said_in_a_sentence(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(adapt(load(model), classes=0), tmp_path / "headless.safetensors")
    save(model_factory.build_trained(model_factory.build_bit()), tmp_path / "resnet.safetensors")
    code, _, error = vitrail("predict", "headless.safetensors", "a.jpg", "--out", "a.csv", capsys=capsys)
    assert (code, error) == (2, "vitrail: the model has no head, so it gives features and no labels: --embed\n")
    code, _, error = vitrail("predict", "resnet.safetensors", "a.jpg", "--attention", "overlays", capsys=capsys)
    assert (code, "a BiT ResNet has no attention" in error) == (2, True)
    command = ("predict", "resnet.safetensors", "a.jpg", "--embed", "--features", "class", "--out", "a.npy")
    code, _, error = vitrail(*command, capsys=capsys)
    assert (code, "the model has no class token; it has mean" in error) == (2, True)
    assert {path.name for path in tmp_path.iterdir()} == {f"{n}.safetensors" for n in ("model", "headless", "resnet")}


# --- continuing ------------------------------------------------------------------------------------------------------


@pytest.fixture
def odd_names(tmp_path: Path) -> Path:
    """Pictures whose names try a table: commas, quotes, line ends, and bytes that are no text."""
    root = write_image_folder(tmp_path / "odd", classes=("",), each=8)
    for number, name in enumerate((b'a,"b".jpg', b"two\nlines.jpg", b"\r.jpg", b"\xff\xfe.jpg", "é ü.jpg".encode())):
        (root / os.fsdecode(name)).write_bytes(encode_image(make_image(number)))
    (root / "3.jpg").write_bytes(b"<html>")
    return root


@pytest.mark.parametrize(
    ("name", "options"),
    [("rows.csv", ["--top", "3"]), ("rows.jsonl", []), ("features.npy", ["--embed"])],
)
def test_cut_anywhere_a_file_is_completed_to_the_same_bytes(
    name: str, options: list[str], model: Path, odd_names: Path, tmp_path: Path, capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Every file that the command writes is cut at places that a kill or a full disk could leave it at."""
    monkeypatch.chdir(tmp_path)
    save(dataclasses.replace(load(model), threshold=0.35), model, overwrite=True)  # some answers are unsure
    command = ("predict", str(model), str(odd_names), *options, "--batch", "4", "--out", name, "--device", "cpu")
    assert vitrail(*command, capsys=capsys)[0] == 3
    parts = [path for path in (tmp_path / name, tmp_path / "features.csv") if path.exists()]
    whole = [path.read_bytes() for path in parts]
    assert vitrail(*command, capsys=capsys)[0] == 3  # a file that is whole stays so
    assert [path.read_bytes() for path in parts] == whole
    generator = random.Random(0)
    for _ in range(12):
        for path, content in zip(parts, whole, strict=True):
            path.write_bytes(content[: generator.randrange(len(content) + 1)])
        code, _, error = vitrail(*command, capsys=capsys)
        assert (code, "1 of 13 images cannot be read" in error) == (3, True)
        assert [path.read_bytes() for path in parts] == whole


@pytest.mark.parametrize(("stop_signal", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_leaves_whole_batches_and_the_rest_alone_is_computed_then(
    stop_signal: signal.Signals,
    code: int,
    model: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = write_image_folder(tmp_path / "set", each=10)
    command = ("predict", str(model), str(root), "--batch", "4", "--device", "cpu", "--out")
    assert vitrail(*command, str(tmp_path / "whole.csv"), capsys=capsys)[0] == 0
    start_prediction, sizes = Classifier.start_prediction, list[int]()

    def start_and_note(self: Classifier, parts: Sequence[Tensor], top: int) -> Any:
        sizes.append(sum(map(len, parts)))
        if len(sizes) == 2:
            os.kill(os.getpid(), stop_signal)
        return start_prediction(self, parts, top)

    monkeypatch.setattr(Classifier, "start_prediction", start_and_note)
    exit_code, _, error = vitrail(*command, str(tmp_path / "rows.csv"), capsys=capsys)
    assert (exit_code, f"stopped by {stop_signal.name} after 8 images" in error) == (code, True), error
    assert len(read_table(tmp_path / "rows.csv")) == 8
    code, _, error = vitrail(*command, str(tmp_path / "rows.csv"), capsys=capsys)
    assert (code, "has 8 images; continuing after them" in error) == (0, True)
    assert (tmp_path / "rows.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert sizes == [4, 4, 4, 4, 4]


def run_until_killed(batch: int, *arguments: str) -> int:
    """How a process that runs the command ends, when it is killed while it computes that batch."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(60)
    start_rows, batches = bulk_prediction.start_rows, [0]

    def die_at_batch(*arguments: Any) -> Any:
        batches[0] += 1
        if batches[0] == batch:
            os.kill(os.getpid(), signal.SIGKILL)
        return start_rows(*arguments)

    pytest.MonkeyPatch().setattr(bulk_prediction, "start_rows", die_at_batch)
    os._exit(main(arguments))


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.soak)])
def test_killed_again_and_again_it_writes_what_it_writes_undisturbed(
    kills: int, model: Path, tmp_path: Path, capsys: Capture, soaked: Soaked
) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as file:
        for number in range(2 * kills + 3):
            content = encode_image(make_image(number))
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    command = ["predict", str(model), str(tmp_path / "s.tar"), "--batch", "2", "--device", "cpu"]
    command += ["--attention", str(tmp_path / "overlays"), "--out"]
    assert vitrail(*command, str(tmp_path / "whole.jsonl"), capsys=capsys)[0] == 0
    (tmp_path / "overlays").rename(tmp_path / "undisturbed")
    for _ in range(kills):
        assert run_until_killed(2, *command, str(tmp_path / "rows.jsonl")) == -signal.SIGKILL
    assert vitrail(*command, str(tmp_path / "rows.jsonl"), capsys=capsys)[0] == 0
    assert (tmp_path / "rows.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert read_files(tmp_path / "overlays") == read_files(tmp_path / "undisturbed")
    soaked(14, "a killed prediction goes on to the same file", f"{kills} kills", f"{kills}")


def test_another_model_option_or_input_is_refused_and_the_file_stays(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "rows.csv"
    command = ["predict", str(model), str(pictures / "tulip"), "--out", str(out)]
    assert vitrail(*command, capsys=capsys)[0] == 0
    before = out.read_bytes()
    save(model_factory.build_trained(model_factory.build_vit(seed=1)), tmp_path / "other.safetensors")
    save(dataclasses.replace(load(model), temperature=2.0), tmp_path / "warmer.safetensors")
    rose = str(pictures / "rose")
    for changed, reason in (
        (["predict", str(tmp_path / "other.safetensors"), *command[2:]], "was begun with another model"),
        (["predict", str(tmp_path / "warmer.safetensors"), *command[2:]], "was begun with another model"),
        ([*command, "--top", "2"], "was begun with --top 1, not 2"),
        ([*command, "--batch", "2"], "was begun with --batch 64, not 2"),
        ([*command[:2], rose, *command[3:]], f"image 1 of {out} is {pictures}/tulip/0.jpg, and now it is {rose}/0.jpg"),
        ([*command[:2], f"{pictures}/tulip/0.jpg", *command[3:]], "and now there are fewer images"),
    ):
        code, _, error = vitrail(*changed, capsys=capsys)
        assert (code, reason in error) == (2, True), error
        assert out.read_bytes() == before
    (tmp_path / "rows.csv.json").write_text("[1, 2]")
    code, _, error = vitrail(*command, capsys=capsys)
    assert (code, "no rows.csv.json records its command" in error) == (2, True)
    assert out.read_bytes() == before


def test_a_file_that_another_process_writes_is_left_to_it(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "rows.csv"
    command = ("predict", str(model), str(pictures / "tulip"), "--batch", "2", "--out", str(out))
    assert vitrail(*command, capsys=capsys)[0] == 0
    before = out.read_bytes()
    with holder(tmp_path / ".rows.csv.lock", "with") as process:
        code, _, error = vitrail(*command, capsys=capsys)
        process.kill()
    assert (code, f"{out} is in use by process {process.pid} on " in error) == (2, True)
    assert out.read_bytes() == before
    assert vitrail(*command, capsys=capsys)[0] == 0
    assert out.read_bytes() == before


@pytest.mark.attack
@pytest.mark.parametrize("damaged", ["[1]", "null", "{}", '{"image": 3}', '"x"', "[" * 100_000])
def test_a_damaged_row_of_json_lines_is_written_again(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture, attacked: Callable[[str, str], None], damaged: str
) -> None:
    out = tmp_path / "rows.jsonl"
    command = ("predict", str(model), str(pictures), "--batch", "2", "--out", str(out))
    assert vitrail(*command, capsys=capsys)[0] == 3  # one picture is bad
    before = out.read_text()
    lines = before.splitlines(keepends=True)
    out.write_text("".join([*lines[:3], damaged + "\n", *lines[4:]]))
    code, _, error = vitrail(*command, capsys=capsys)
    assert (code, "has 2 images; continuing after them" in error) == (3, True), error
    assert out.read_text() == before
    attacked(f"--out x.jsonl with the row {damaged:.20}", "written again from there")


@pytest.mark.attack
@pytest.mark.parametrize("name", ["=1+1", "+x", "-x", "@x", "'=x", "''@", "\t=x"])
def test_a_spreadsheet_runs_no_cell(
    model: Path,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    attacked: Callable[[str, str], None],
    name: str,
) -> None:
    """Neither of names of images nor of classes; and the command still knows its own rows."""
    monkeypatch.chdir(tmp_path)
    labels = (name, *"abcdef")
    save(dataclasses.replace(load(model), labels=labels), model, overwrite=True)
    shutil.copy(next(pictures.rglob("*.*")), tmp_path / f"{name}.png")
    shutil.copy(next(pictures.rglob("*.*")), tmp_path / "plain.png")
    out = tmp_path / "rows.csv"
    command = ("predict", str(model), "--top", "7", "--batch", "1", "--out", str(out), "--")
    for names in ([f"{name}.png"], [f"{name}.png", "plain.png"]):
        code, _, error = vitrail(*command, *names, capsys=capsys)
        assert code == 0, error
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 14
    assert not [cell for row in rows for cell in row.values() if re.match(r"[=+\-@\t\r]", cell)]
    assert {unquote_cell(row["image"]) for row in rows} == {f"{name}.png", "plain.png"}
    assert {unquote_cell(row["label"]) for row in rows} == set(labels)
    attacked(f"an image and a class named {name!r} in CSV", "quoted: a spreadsheet shows it and runs nothing")


@pytest.mark.attack
def test_a_url_on_standard_input_is_fetched_only_when_told_so(
    model: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, attacked: Callable[[str, str], None]
) -> None:
    fetched: list[str] = []

    def read(url: str, *_: object) -> bytes:
        fetched.append(url)
        return next(pictures.rglob("*.*")).read_bytes()

    monkeypatch.setattr("vitrail.remote.read", read)
    for options, code in ((), 3), (("--fetch-urls",), 0):
        monkeypatch.setattr("sys.stdin", io.StringIO("s3://internal/secret.png\n"))
        ended, out, _ = vitrail("predict", str(model), "-", "--format", "csv", *options, capsys=capsys)
        assert ended == code
        assert ("is fetched only with --fetch-urls" in out) == bool(code)
        assert bool(fetched) == (not code)
    attacked("a URL on standard input", "its row says that --fetch-urls is needed; nothing is asked")


def test_images_that_came_after_the_last_are_appended(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "rows.csv"
    command = ("predict", str(model), str(pictures / "tulip"), "--batch", "2", "--out", str(out))
    assert vitrail(*command, capsys=capsys)[0] == 0
    before = out.read_bytes()
    (pictures / "tulip" / "9.jpg").write_bytes(encode_image(make_image(99)))
    assert vitrail(*command, capsys=capsys)[0] == 0
    assert out.read_bytes().startswith(before)
    assert len(read_table(out)) == 5


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_number_of_images(model: Path, tmp_path: Path, capsys: Capture) -> None:
    """What Python holds at most, for 100 images and for 1,500: were rows or names kept, it would be 350 kB more."""
    image = tmp_path / "a.png"
    make_image(0, (8, 8)).save(image)
    peaks = list[int]()
    for count in (100, 100, 1500, 1500):  # the first fills caches; on a slow machine a later one does, once
        (tmp_path / "list.csv").write_text("path\n" + "a.png\n" * count)
        command = (
            "predict",
            str(model),
            str(tmp_path / "list.csv"),
            "--batch",
            "8",
            "--workers",
            "1",
            "--device",
            "cpu",
        )
        tracemalloc.start()
        assert vitrail(*command, "--out", str(tmp_path / f"{len(peaks)}.csv"), capsys=capsys)[0] == 0
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert min(peaks[2:]) < peaks[1] + 100_000


@pytest.mark.soak
def test_memory_stays_the_same_over_20_000_images(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, soaked: Soaked
) -> None:
    content = encode_image(make_image(0, (8, 8)), "PNG")
    with tarfile.open(tmp_path / "s.tar", "w") as file:
        for number in range(20_000):
            member = tarfile.TarInfo(f"{number}.png")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    resident, predict = list[int](), Classifier.predict

    def predict_and_note(self: Classifier, images: Sequence[Any], top: int = 5) -> Any:
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        return predict(self, images, top)

    monkeypatch.setattr(Classifier, "predict", predict_and_note)
    command = ("predict", str(model), str(tmp_path / "s.tar"), "--device", "cpu", "--out", str(tmp_path / "rows.csv"))
    assert vitrail(*command, capsys=capsys)[0] == 0
    assert len(read_table(tmp_path / "rows.csv")) == 20_000
    grown = max(resident) - resident[len(resident) // 10]
    assert grown < 10 * 2**20
    soaked(14, "prediction in constant memory", "20,000 images, under 10 MB", f"{grown / 2**20:.1f} MB more")


# --- one preprocessing -----------------------------------------------------------------------------------------------


def odd_image(generator: np.random.Generator) -> tuple[str, bytes]:
    """The ending and content of a file as cameras, scanners and the web make them, of a size that may be odd too."""
    height, width = (int(side) for side in generator.integers(1, 90, 2))
    if generator.random() < 0.2:  # a line, or almost
        height, width = (int(generator.integers(1, 4)), int(generator.integers(100, 500)))[:: generator.choice([-1, 1])]
    noise = generator.integers(0, 256, (height, width, 4), dtype=np.uint8)
    colour, clear = Image.fromarray(noise[..., :3]), Image.fromarray(noise)
    wide = Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = int(generator.integers(1, 9))
    quality = int(generator.integers(20, 100))
    frames = [Image.fromarray(noise[..., :3] // part) for part in (2, 3)]
    kinds: list[Callable[[], tuple[str, bytes]]] = [
        lambda: (".jpg", encode_image(colour, "JPEG", exif=exif, quality=quality)),
        lambda: (".jpg", encode_image(colour, "JPEG", progressive=True, subsampling=int(generator.integers(3)))),
        lambda: (".jpeg", encode_image(colour.convert("L"), "JPEG", exif=exif)),
        lambda: (".JPG", encode_image(colour.convert("CMYK"), "JPEG", exif=exif)),
        lambda: (".png", encode_image(wide, "PNG")),
        lambda: (".tif", encode_image(wide, "TIFF")),
        lambda: (".png", encode_image(clear, "PNG", exif=exif)),
        lambda: (".png", encode_image(clear.convert("LA"), "PNG")),
        lambda: (".png", encode_image(colour.quantize(16), "PNG", transparency=int(generator.integers(16)))),
        lambda: (".gif", encode_image(colour.quantize(16), "GIF", transparency=3)),
        lambda: (".gif", encode_image(colour, "GIF", save_all=True, append_images=frames, duration=50)),
        lambda: (".webp", encode_image(clear, "WEBP", lossless=True)),
        lambda: (".webp", encode_image(colour, "WEBP", save_all=True, append_images=frames, exif=exif)),
        lambda: (".bmp", encode_image(colour.convert("1"), "BMP")),
        lambda: (".png", encode_image(colour.convert("1"), "PNG")),
        lambda: (".bmp", encode_image(colour.quantize(7), "BMP")),
        lambda: (".tiff", encode_image(colour.convert("CMYK"), "TIFF")),
    ]
    return kinds[generator.integers(len(kinds))]()


def record_normalized(monkeypatch: pytest.MonkeyPatch, where: str) -> list[Tensor]:
    """The pixels that come to be normalised there, image by image."""
    recorded_inputs = list[Tensor]()

    def record(pixels: Tensor, preprocess: PreprocessConfig) -> Tensor:
        recorded_inputs.extend(pixels)
        return normalize(pixels, preprocess)

    monkeypatch.setattr(where, record)
    return recorded_inputs


def collect_served_inputs(
    classifier: Classifier, paths: Sequence[Path], monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """The pixels that the service computes on when the files are sent to it one by one."""
    with monkeypatch.context() as patches:
        recorded_inputs = record_normalized(patches, "vitrail.inference.precision.normalize")
        service = make_service({"model": classifier}, deadline=60.0)
        client = TestClient(routes.build_app(service))
        for path in paths:
            headers = {"content-type": "application/octet-stream"}
            assert client.post("/v1/predict", content=path.read_bytes(), headers=headers).status_code == 200
        service.close()
    return recorded_inputs[1:]  # the first was blank, and warmed it up


def compute_documented_inputs(trained: Trained, paths: Sequence[Path]) -> list[Tensor]:
    """The pixels that docs/exporting.md tells those to feed an exported graph who have Pillow and no vitrail."""
    text = (Path(__file__).parents[2] / "docs" / "exporting.md").read_text()
    [code] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def pixels_of" in block]
    named: dict[str, Any] = {}
    exec(code, named)
    how = json.loads(graph.build_metadata(trained)["pixels"])
    return [torch.tensor(named["pixels_of"](path, how)) for path in paths]


@pytest.mark.parametrize("resize", [(32, 32), (37,)])
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.soak)])
def test_odd_images_have_the_same_pixels_in_training_evaluate_predict_serve_and_what_an_exported_graph_is_fed(
    count: int,
    resize: tuple[int, ...],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    soaked: Soaked,
) -> None:
    generator, root, model = np.random.default_rng(0), tmp_path / "set", tmp_path / "model.safetensors"
    (root / "kind 0").mkdir(parents=True)
    (root / "kind 1").mkdir()
    for number in range(count):
        suffix, content = odd_image(generator)
        (root / f"kind {number % 2}" / f"{number:04}{suffix}").write_bytes(content)
    preprocess = PreprocessConfig(size=(32, 32), resize=resize)
    trained = model_factory.build_trained(model_factory.build_vit(), preprocess=preprocess)
    save(trained, model)
    paths, classifier = sorted(root.rglob("*.*")), Classifier(trained, device="cpu")
    inputs = [classifier.make_input(path) for path in paths]
    assert len({crop.numpy().tobytes() for crop in inputs}) > 0.9 * count
    splits = open_dataset(str(root)).splits
    whole = splits["train"].merge(splits["val"]).merge(splits["test"])
    assert [whole.get_image_name(row) for row in range(count)] == [str(path.relative_to(root)) for path in paths]
    with monkeypatch.context() as patches:
        evaluated_inputs = record_normalized(patches, "vitrail.inference.precision.normalize")
        predictions.evaluate_batches(
            trained.model, iter_eval_batches(whole, preprocess, batch_size=16, num_classes=7), preprocess
        )
        settings = EvaluationSettings(device=torch.device("cpu"), batch=7, strict=True)
        evaluate_model(make_evaluated_model(trained, "model"), whole, range(7), settings)
    predicted = record_normalized(monkeypatch, "vitrail.inference.precision.normalize")
    command = ("predict", str(model), str(root), "--device", "cpu", "--batch", "5", "--workers", "2")
    assert vitrail(*command, capsys=capsys)[0] == 0
    for name, pixels in (
        ("training", evaluated_inputs[:count]),
        ("evaluate", evaluated_inputs[count:]),
        ("predict", predicted),
        ("serve", collect_served_inputs(classifier, paths, monkeypatch)),
        ("exported", compute_documented_inputs(trained, paths)),
    ):
        assert len(pixels) == count, name
        pairs = zip(paths, pixels, inputs, strict=True)
        different = [path for path, here, there in pairs if not torch.equal(here, there)]
        assert not different, (name, different)
    soaked(14, "one preprocessing: bit-equal pixels in five places", f"{count:,} odd images", f"{count:,}")


def test_it_ends_with_how_many_images_there_were_and_what_they_show(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "rows.csv"
    code, _, err = vitrail("predict", str(model), str(pictures), "--out", str(out), "--batch", "2", capsys=capsys)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    failed = sum(bool(row["error"]) for row in rows)
    counts = Counter(row["label"] for row in rows if not row["error"])
    named = ", ".join(f"{name} {number}" for name, number in counts.most_common(5))
    more = f", and {len(counts) - 5} other labels" if len(counts) > 6 else ""
    last = f"{len(rows)} images, {failed} of which cannot be read; {named}{more}; {out}"
    assert (code, err.splitlines()[-2]) == (3, last)
    code, _, err = vitrail("predict", str(model), str(next(pictures.rglob("*.jpg"))), capsys=capsys)
    assert err.splitlines()[-1].startswith("1 image; ")


# --- parts, Parquet and object stores --------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["rows.csv", "rows.parquet", "features.npy", "features/"])
def test_parts_are_merged_to_the_file_of_one_command(
    out: str, model: Path, pictures: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if out in ("rows.parquet", "features/"):
        pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    monkeypatch.chdir(tmp_path)
    embed = ["--embed", "--float16"] if out.startswith("features") else ["--top", "2"]
    command = ["predict", str(model), str(pictures), "--batch", "1", *embed, "--out"]
    assert vitrail(*command, f"whole/{out}", capsys=capsys)[0] == 3
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "3")
    monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", "1")
    codes = []
    for number in (1, 2, 3):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(number))
        part = "auto" if number == 2 else f"{number}/3"
        codes.append(vitrail(*command, out, "--part", part, capsys=capsys)[0])
    assert sorted(codes) == [0, 0, 3]
    code, _, err = vitrail("merge", out, capsys=capsys)
    assert (code, err) == (0, f"3 parts, 9 images, 1 of which cannot be read; {Path(out)}\n")
    if out == "features/":  # its partitions are those of the parts
        tables = [np.load(path) for path in sorted((tmp_path / "features" / "img_emb").iterdir())]
        (whole,) = (np.load(path) for path in (tmp_path / "whole" / "features" / "img_emb").iterdir())
        assert np.array_equal(np.concatenate(tables), whole, equal_nan=True)
    else:
        assert Path(out).read_bytes() == Path(f"whole/{out}").read_bytes()
    record = Path(f"{out.rstrip('/')}.json").read_bytes()
    assert record == Path(f"whole/{out.rstrip('/')}.json").read_bytes()
    assert vitrail(*command, out, capsys=capsys)[0] == 3  # nothing is left to do: it is a whole one
    assert Path(f"{out.rstrip('/')}.json").read_bytes() == record


def test_parquet_says_what_json_lines_say(model: Path, pictures: Path, tmp_path: Path, capsys: Capture) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")
    command = ["predict", str(model), str(pictures), "--batch", "4"]
    for options in (["--top", "3"], ["--embed", "--normalize"]):
        out = tmp_path / f"{options[0]}.parquet"
        _, lines, _ = vitrail(*command, *options, "--json", capsys=capsys)
        assert vitrail(*command, *options, "--out", str(out), capsys=capsys)[0] == 3
        rows = parquet.read_table(out).to_pylist()
        for row, line in zip(rows, map(json.loads, lines.splitlines()), strict=True):
            assert (row["image"], row["error"]) == (line["image"], line.get("error"))
            if row["error"]:
                assert set(row.values()) == {row["image"], row["error"], None}
            elif "features" in line:
                assert np.array_equal(np.float32(row["features"]), np.float32(line["features"]))
            else:
                pairs = [(each["label"], np.float32(each["probability"])) for each in line["predictions"]]
                assert list(zip(row["labels"], row["probabilities"], strict=True)) == pairs
        footer = json.loads(parquet.read_schema(out).metadata[b"vitrail"])
        record = json.loads(out.with_name(f"{out.name}.json").read_text())
        assert record.pop("finished") == {
            "images": 9, "failed": 1, "ranks": 3 if "--top" in options else 1, "features": 32 * ("--embed" in options)
        }  # fmt: skip
        assert footer == record
        assert footer["model"].keys() >= {"weights", "config", "preprocess"}


def test_rows_are_uploaded_once_all_are_written(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs", reason="the extra `remote` is not installed")
    monkeypatch.chdir(tmp_path)
    command = ["predict", str(model), str(pictures), "--embed", "--batch", "2", "--out"]
    with s3_server.run_server() as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as patches:
            batches = patch_to_stop(patches, 2)
            code, _, err = vitrail(*command, "s3://predicted/f.npy", capsys=capsys)
            assert code == 75, err
            assert len(batches) == 2
        assert store.objects == {}
        code, _, err = vitrail(*command, "s3://predicted/f.npy", capsys=capsys)
        assert (code, "s3://predicted/f.npy has 4 images; continuing after them" in err) == (3, True)
        assert err.splitlines()[-2].endswith("; s3://predicted/f.npy")
        files = {path.name: path.read_bytes() for path in (tmp_path / "runs").iterdir()}
        assert store.below("predicted/") == files
        assert sorted(files) == ["f.csv", "f.npy", "f.npy.json"]
        assert len(np.load(tmp_path / "runs" / "f.npy")) == 9
        shutil.rmtree(tmp_path / "runs")
        code, _, err = vitrail(*command, "s3://predicted/f.npy", capsys=capsys)
        assert (code, "s3://predicted/f.npy exists, and no runs/f.npy that continues it" in err) == (2, True)


def patch_to_stop(patches: pytest.MonkeyPatch, batch: int) -> list[int]:
    """Send SIGTERM to this process while that batch is computed."""
    batches: list[int] = []
    start_rows = bulk_prediction.start_rows

    def start(*arguments: Any) -> Any:
        batches.append(len(batches))
        if len(batches) == batch:
            os.kill(os.getpid(), signal.SIGTERM)
        return start_rows(*arguments)

    patches.setattr(bulk_prediction, "start_rows", start)
    return batches


def test_a_rank_predicts_a_part_of_its_own_where_it_is_told_so(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no other rank, and says what it has done."""
    monkeypatch.chdir(tmp_path)
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        _, _, err = vitrail("predict", str(model), str(pictures), "--out", "r.csv", "--part", "auto", capsys=capsys)
        assert f"r-0000{int(rank) + 1}-of-00002.csv" in err
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    code, merged, _ = vitrail("merge", "r.csv", "--json", capsys=capsys)
    assert (code, json.loads(merged)) == (0, {"written": "r.csv", "parts": 2, "images": 9, "failed": 1})
    assert [row["image"] for row in read_table(Path("r.csv"))] == sorted(map(str, pictures.rglob("*.jpg")))
