"""`vitrail probe` as a user calls it: its table, its cache, the model it writes, many processes, what it refuses."""

import contextlib
import dataclasses
import json
import os
import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests import model_factory
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.cli.test_train import HERE
from tests.data.image_files import encode_image, make_image, write_image_folder
from tests.evaluation.test_segmentation import write_squares
from tests.runtime.test_distributed import find_free_port, wait_for_ranks
from vitrail.api import evaluation
from vitrail.cli import main
from vitrail.data.loader import iter_eval_batches
from vitrail.data.sources import open_dataset
from vitrail.evaluation.predictions import evaluate_batches
from vitrail.evaluation.statistics import wilson_interval
from vitrail.files import get_cache_home
from vitrail.inference.classifier import Classifier
from vitrail.weights import tensor_files
from vitrail.weights.load import load, save

MODEL = "model.safetensors"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a set of 36 pictures in two classes and a small model."""
    monkeypatch.chdir(tmp_path)
    write_image_folder(tmp_path / "set", "train", "val", "test", each=6)
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / MODEL)


def probe(*options: str, capsys: Capture, model: str = MODEL, data: str = "./set") -> tuple[int, str, str]:
    return vitrail("probe", model, data, *HERE, *options, capsys=capsys)


def probe_facts(*options: str, capsys: Capture, **where: str) -> dict[str, Any]:
    code, out, err = probe(*options, "--json", capsys=capsys, **where)
    assert code == 0, err
    facts: dict[str, Any] = json.loads(out)
    return facts


def expect_refusal(*options: str, capsys: Capture, **where: str) -> tuple[int, str]:
    code, out, err = probe(*options, capsys=capsys, **where)
    assert out == ""
    return code, err.splitlines()[-1]


# --- what it says ----------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_method(capsys: Capture) -> None:
    code, out, err = probe(capsys=capsys)
    assert code == 0
    assert "note: skipped 10-shot, 25-shot: rose has only 6 training images" in err
    assert re.fullmatch(
        r"best: .*, \d+\.\d% of 12 test images correct; --save FILE writes the model with a linear head",
        err.splitlines()[-1],
    )
    lines = out.splitlines()
    assert lines[0] == "test: 12 images, 2 classes; settings chosen on val"
    assert [line.split()[0] for line in lines[1:]] == ["method", "1-shot", "5-shot", "kNN", "linear", "logistic"]
    assert re.fullmatch(r"5-shot +10 images +lambda 1024 +\d+\.\d% +± \d+\.\d%, 3 draws", lines[3])
    assert re.fullmatch(r"kNN +12 images +k 12 +\d+\.\d% +95%: \d+\.\d% to \d+\.\d%", lines[4])
    result = probe_facts(capsys=capsys)
    assert (result["split"], result["images"], result["features"], result["chosen_on"]) == ("test", 12, 32, "val")
    for score, line in zip(result["scores"], lines[2:], strict=True):
        assert f"{score['top1']:.1%}" in line
        assert score["top1"] == pytest.approx(sum(score["correct"]) / len(score["correct"]) / 12)
        if score["seeds"] == 1:
            assert score["interval"] == list(wilson_interval(score["correct"][0], 12))
    assert [score["seeds"] for score in result["scores"]] == [3, 3, 1, 1, 1]


def test_options_choose_what_is_tried(capsys: Capture) -> None:
    options = ("--methods", "few-shot", "knn", "--shots", "2", "--seeds", "2", "--lambda", "auto", "--k", "3")
    shots, neighbours = probe_facts(*options, capsys=capsys)["scores"]
    assert (shots["shots"], shots["seeds"], shots["learned"]) == (2, 2, 4)
    assert shots["lambda"] in [2.0**power for power in range(-10, 21, 2)]
    assert (neighbours["method"], neighbours["k"]) == ("kNN", 3)
    (linear,) = probe_facts("--methods", "linear", "--everything", capsys=capsys)["scores"]
    assert linear["learned"] == 24


def test_without_a_test_split_val_is_measured_and_does_not_choose(tmp_path: Path, capsys: Capture) -> None:
    write_image_folder(tmp_path / "two", "train", "val", each=6)
    code, out, _ = probe(capsys=capsys, data="./two")
    assert code == 0
    assert out.startswith("val: 12 images, 2 classes; settings chosen on a fifth of train\n")


# --- the cache -------------------------------------------------------------------------------------------------------


def test_features_are_computed_once_for_the_same_weights_images_and_preprocessing(
    tmp_path: Path, capsys: Capture
) -> None:
    first = probe_facts(capsys=capsys)
    assert first["cached"] == []
    again = probe_facts(capsys=capsys)
    assert again["cached"] == ["train", "val", "test"]
    assert again["scores"] == first["scores"]
    assert "features of train, val, test: from the cache" in probe(capsys=capsys)[2]
    (tmp_path / "set" / "val" / "rose" / "0.jpg").write_bytes(encode_image(make_image(77), quality=40))
    assert probe_facts(capsys=capsys)["cached"] == ["train", "test"]
    save(model_factory.build_trained(model_factory.build_vit(seed=1)), tmp_path / "other.safetensors")
    assert probe_facts(capsys=capsys, model="other.safetensors")["cached"] == []
    same = load(MODEL)
    assert same.preprocess is not None
    wider = dataclasses.replace(same.preprocess, resize=(40,))
    save(dataclasses.replace(same, preprocess=wider), tmp_path / "view.safetensors")
    assert probe_facts(capsys=capsys, model="view.safetensors")["cached"] == []
    assert probe_facts(capsys=capsys)["cached"] == ["train", "val", "test"]


# --- the model it writes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["linear", "logistic"])
@pytest.mark.parametrize("hidden", [False, True])
def test_the_saved_model_answers_as_the_probe_did(tmp_path: Path, capsys: Capture, method: str, hidden: bool) -> None:
    save(model_factory.build_trained(model_factory.build_vit(hidden_head=hidden)), tmp_path / MODEL, overwrite=True)
    result = probe_facts("--methods", method, "--save", "made.safetensors", capsys=capsys)
    built = load("made.safetensors")
    assert built.preprocess is not None
    split = open_dataset("./set").splits["test"]
    counts = evaluate_batches(
        built.model, iter_eval_batches(split, built.preprocess, batch_size=5, num_classes=2), built.preprocess
    )
    assert [counts.correct] == result["scores"][0]["correct"]
    assert built.labels == ("rose", "tulip")
    assert built.temperature == result["saved"]["temperature"]
    assert built.origin.changes[-1].startswith(f"head: {method} probe of {tmp_path / 'set'}, ")
    prediction = Classifier(built, device="cpu")([tmp_path / "set" / "test" / "rose" / "0.jpg"])[0]
    assert {label for label, _ in prediction} == {"rose", "tulip"}
    assert sum(share for _, share in prediction) == pytest.approx(1)


def test_the_better_of_the_heads_by_val_is_saved(capsys: Capture) -> None:
    code, out, _ = probe("--save", "made.safetensors", capsys=capsys)
    assert code == 0
    predictions = re.fullmatch(
        r"made\.safetensors: (\w+), (.*)% of val correct, temperature [\d.]+", out.splitlines()[-1]
    )
    assert predictions is not None
    item = [
        probe_facts("--methods", method, "--save", f"{method}.safetensors", capsys=capsys)["saved"]["chosen"]
        for method in ("linear", "logistic")
    ]
    assert f"{max(item):.1%}" == f"{predictions[2]}%"
    assert item[("linear", "logistic").index(predictions[1])] == max(item)
    assert expect_refusal("--save", "made.safetensors", capsys=capsys)[0] == 2
    assert probe("--save", "made.safetensors", "--overwrite", capsys=capsys)[0] == 0


# --- segmentation ----------------------------------------------------------------------------------------------------


def test_a_segmentation_has_the_iou_of_each_class_as_the_function_does(tmp_path: Path, capsys: Capture) -> None:
    root = write_squares(tmp_path / "squares", {"train": 8, "val": 2, "test": 2})
    (root / "masks" / "classes.txt").write_text("gray\nred\nblue\n")
    options = ("--segmentation", str(root / "masks"), "--methods", "logistic")
    code, out, err = probe(*options, capsys=capsys, data=str(root / "images"))
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "test: 2 images, 3 classes; settings chosen on val"
    titles = ["IoU", "gray", "red", "blue", "mean IoU", "95 %", "pixels correct", "trained on", "setting"]
    assert [line.rsplit("  ", 1)[0].strip() for line in lines[1:]] == titles
    facts = probe_facts(*options, capsys=capsys, data=str(root / "images"))
    (score,) = facts["scores"]
    assert lines[5].endswith(f"{score['miou']:.1%}")
    assert err.splitlines()[-1] == f"best: logistic, mean IoU {score['miou']:.1%} on 2 test images"
    keywords = {"segmentation": root / "masks", "methods": "logistic", "workers": 0, "device": "cpu"}
    result = evaluation.probe(MODEL, str(root / "images"), **keywords)
    assert result.metrics["scores"] == [score | {"interval": tuple(score["interval"])}]
    assert result.scores == {"logistic": score["miou"]}
    assert repr(result) == f"ProbeResult(logistic {score['miou']:.1%} mean IoU on 2 test images)"
    assert f"{score['miou']:.1%}" in result._repr_html_()


# --- several processes -----------------------------------------------------------------------------------------------


def test_two_processes_say_what_one_says(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "set" / "test" / "tulip" / "5.jpg").unlink()  # shares of 5 and 6
    one = probe_facts(capsys=capsys)
    kept = get_cache_home() / "features"
    kept.rename(tmp_path / "kept by one")
    arguments = ("probe", MODEL, "./set", *HERE, "--json", "--save", "two.safetensors")
    port = find_free_port()
    codes = wait_for_ranks([_run_in_fork(rank, port, arguments) for rank in range(2)])
    assert codes == [0, 0], [Path(f"told by {rank}").read_text() for rank in range(2)]
    two = json.loads(Path("said by 0").read_text())
    assert Path("said by 1").read_text() == ""
    assert two["cached"] == []
    assert two["scores"] == one["scores"]
    assert Path("two.safetensors").exists()
    for path in (tmp_path / "kept by one").iterdir():
        features = [tensor_files.read_tensors(folder / path.name).tensors["features"] for folder in (path.parent, kept)]
        torch.testing.assert_close(*features, atol=1e-5, rtol=0)


def test_two_processes_segment_as_one_does(tmp_path: Path, capsys: Capture) -> None:
    root = write_squares(tmp_path / "squares", {"train": 5, "val": 2, "test": 3})
    options = ("--segmentation", str(root / "masks"), "--methods", "linear")
    (score,) = probe_facts(*options, capsys=capsys, data=str(root / "images"))["scores"]
    arguments = ("probe", MODEL, str(root / "images"), *HERE, "--json", *options)
    port = find_free_port()
    codes = wait_for_ranks([_run_in_fork(rank, port, arguments) for rank in range(2)])
    assert codes == [0, 0], [Path(f"told by {rank}").read_text() for rank in range(2)]
    assert json.loads(Path("said by 0").read_text())["scores"] == [score]
    assert Path("said by 1").read_text() == ""


def _run_in_fork(rank: int, port: int, arguments: tuple[str, ...]) -> int:
    """A process that runs the command as torchrun would start it, and writes what it says to files."""
    if child := os.fork():
        return child
    code = 1
    try:
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        with (
            Path(f"said by {rank}").open("w") as out,
            contextlib.redirect_stdout(out),
            Path(f"told by {rank}").open("w") as err,
            contextlib.redirect_stderr(err),
        ):
            code = main(arguments)
    except BaseException:
        Path(f"told by {rank}").write_text(traceback.format_exc())
        raise
    finally:
        os._exit(code)


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_more_shots_than_images_name_the_class_and_its_count(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "set" / "train" / "tulip" / "3.jpg").unlink()
    code, line = expect_refusal("--shots", "2", "6", capsys=capsys)
    assert code == 3
    assert "6-shot takes 6 training images of each class, and tulip has 5" in line


def test_a_class_without_training_images_and_a_single_class_are_refused(tmp_path: Path, capsys: Capture) -> None:
    write_image_folder(tmp_path / "set", "test", classes=("daisy",), each=1)
    code, line = expect_refusal(capsys=capsys)
    assert (code, "set without a training image, such as daisy" in line) == (3, True)
    write_image_folder(tmp_path / "one", "train", "test", classes=("daisy",), each=2)
    code, line = expect_refusal(capsys=capsys, data="./one")
    assert (code, "has one class, daisy, and a classifier needs two" in line) == (3, True)


def test_images_without_labels_are_refused(tmp_path: Path, capsys: Capture) -> None:
    for split in ("train", "val"):
        (tmp_path / "bare" / split).mkdir(parents=True)
        (tmp_path / "bare" / split / "0.jpg").write_bytes(encode_image(make_image(0)))
    code, line = expect_refusal(capsys=capsys, data="./bare")
    assert (code, "has no labels to learn" in line) == (3, True)


def test_multi_label_images_get_a_threshold_for_each_label(tmp_path: Path, capsys: Capture) -> None:
    rows = [
        f"set/{split}/{kind}/{number}.jpg,{kind};plant,{split}"
        for split in ("train", "val", "test")
        for kind in ("rose", "tulip")
        for number in range(3)
    ]
    (tmp_path / "list.csv").write_text("\n".join(["path,labels,split", *rows]) + "\n")
    command = ("probe", "model.safetensors", "list.csv", "--workers", "0", "--k", "3", "--overwrite")
    code, out, err = vitrail(*command, "--save", "probed.safetensors", "--json", capsys=capsys)
    assert code == 0, err
    facts = json.loads(out)
    assert [score["method"] for score in facts["scores"]] == ["few-shot", "kNN", "linear", "logistic"]
    assert all({"mean_average_precision", "micro_f1", "macro_f1", "exact_match"} <= set(row) for row in facts["scores"])
    probed = load("probed.safetensors")
    assert (probed.multi_label, probed.labels) == (True, ("plant", "rose", "tulip"))
    assert probed.label_thresholds == tuple(facts["saved"]["label_thresholds"].values())
    (best,) = [score for score in facts["scores"] if score["method"] == facts["saved"]["method"]]
    code, out, err = vitrail(
        "evaluate", "probed.safetensors", "list.csv", "--workers", "0", "--out", "out", "--json", capsys=capsys
    )
    assert code == 0, err
    (measured,) = json.loads(out)["models"]
    for name in ("mean_average_precision", "micro_f1", "macro_f1", "exact_match"):
        assert measured[name] == pytest.approx(best[name], abs=1e-6)
    code, out, err = vitrail(*command, "--save", "probed.safetensors", capsys=capsys)
    assert (code, "mAP" in out, "a threshold for each label" in out) == (0, True, True)


def test_a_bad_image_is_named_with_what_to_do(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "set" / "test" / "rose" / "2.jpg").write_bytes(b"nothing")
    code, line = expect_refusal(capsys=capsys)
    assert code == 3
    assert "test/rose/2.jpg" in line
    assert "`vitrail data check ./set` names every bad image" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--lambda", "0"), "--lambda is 0; it must be above 0"),
        (("--k", "0"), "--k is 0; it must be at least 1"),
        (("--seeds", "0"), "--seeds is 0; it must be at least 1"),
        (("--shots", "0"), "--shots is 0; it must be at least 1"),
        (("--methods", "knn", "--save", "x.safetensors"), "--save writes a linear head"),
        (("--save", "x.npz"), "call it x.safetensors"),
        (("--segmentation", "masks", "--methods", "knn"), "--segmentation fits a linear classifier: add linear or"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(capsys: Capture, options: tuple[str, ...], words: str) -> None:
    code, line = expect_refusal(*options, capsys=capsys)
    assert code == 2
    assert words in line


def test_weights_that_do_not_state_their_preprocessing_need_it_named(tmp_path: Path, capsys: Capture) -> None:
    save(model_factory.build_trained(model_factory.build_vit(), preprocess=None), tmp_path / "bare.safetensors")
    code, line = expect_refusal(capsys=capsys, model="bare.safetensors")
    assert (code, "--preprocess imagenet" in line) == (2, True)
    assert probe("--preprocess", "imagenet", capsys=capsys, model="bare.safetensors")[0] == 0


# --- a real model ----------------------------------------------------------------------------------------------------


def test_features_of_a_real_model_tell_two_photographs_by_small_pieces_of_them(
    tmp_path: Path, deit_tiny: Path, capsys: Capture
) -> None:
    from sklearn.datasets import load_sample_images

    generator = np.random.default_rng(0)
    for name, photo in zip(("temple", "flower"), load_sample_images().images, strict=True):
        for split, count in (("train", 4), ("val", 2), ("test", 4)):
            place = tmp_path / "pieces" / split / name
            place.mkdir(parents=True)
            for number in range(count):
                top, left = generator.integers(0, (photo.shape[0] - 160, photo.shape[1] - 160))
                Image.fromarray(photo[top : top + 160, left : left + 160]).save(place / f"{number}.png")
    result = probe_facts("--shots", "4", capsys=capsys, model=str(deit_tiny), data="./pieces")
    assert result["features"] == 192
    assert all(score["top1"] == 1 for score in result["scores"])
