"""`vitrail evaluate` on made-up pictures, by one process and by two."""

import csv
import itertools
import json
import shutil
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import model_factory
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import make_image, write_image_folder
from vitrail import Classifier, load, save
from vitrail.data.loader import iter_eval_batches
from vitrail.data.sources import open_dataset
from vitrail.evaluation.predictions import count_predictions, predict_batches
from vitrail.weights.trained import load_imagenet1k_classes

CLASSES = ("rose", "tulip", "daisy")


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    return write_image_folder(tmp_path / "flowers", "train", "val", "test", classes=CLASSES, each=5)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    built = model_factory.build_trained(model_factory.build_vit(classes=4), labels=("tulip", "moss", "rose", "daisy"))
    path = tmp_path / "model.safetensors"
    save(built, path)
    return path


def evaluate(*arguments: object, capsys: Capture) -> dict[str, Any]:
    code, out, error = vitrail("evaluate", *map(str, arguments), "--workers", "0", "--json", capsys=capsys)
    assert code == 0, error
    facts: dict[str, Any] = json.loads(out)
    return facts


def test_numbers_and_files_are_those_of_the_models_answers(
    flowers: Path, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    facts = evaluate(model, flowers, "--out", out, "--batch", 4, capsys=capsys)["models"][0]
    trained, split = load(model), open_dataset(str(flowers)).splits["test"]
    assert trained.preprocess is not None
    predictions = Classifier(trained)([split.read_image(row) for row in range(len(split))], top=1)
    names = open_dataset(str(flowers)).classes
    right = [prediction[0][0] == names[split.get_labels(row)[0]] for row, prediction in enumerate(predictions)]
    assert (facts["images"], facts["correct"]) == (15, sum(right))
    with (out / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["predicted"] for row in rows] == [prediction[0][0] for prediction in predictions]
    assert [row["correct"] for row in rows] == [str(int(hit)) for hit in right]
    for name in ("per_class.csv", "confusion_matrix.png", "reliability.png", "risk_coverage.png", "top_losses.jpg"):
        assert (out / name).stat().st_size > 0


def test_several_labels_are_judged_by_exact_match_f1_and_average_precision(
    flowers: Path, tmp_path: Path, capsys: Capture
) -> None:
    names = (*CLASSES, "plant")
    save(
        model_factory.build_trained(model_factory.build_vit(classes=4), labels=names, multi_label=True),
        tmp_path / "labels.safetensors",
    )
    rows = [f"test/{name}/{number}.jpg,{name};plant,test" for name in CLASSES for number in range(5)]
    (flowers / "list.csv").write_text("\n".join(["path,labels,split", *rows]) + "\n")
    command = (tmp_path / "labels.safetensors", flowers / "list.csv", "--split", "test", "--out")
    facts = evaluate(*command, tmp_path / "out", capsys=capsys)["models"][0]
    with (tmp_path / "out" / "predictions.csv").open(newline="") as file:
        exact = [set(row["label"].split(" | ")) == set(row["predicted"].split(" | ")) for row in csv.DictReader(file)]
    assert facts["exact_match"] == sum(exact) / 15
    assert not {"top1", "top5"} & set(facts)
    assert {"micro_f1", "macro_f1", "mean_average_precision"} <= set(facts)
    assert "average_precision" in (tmp_path / "out" / "per_class.csv").read_text().splitlines()[0]
    code, out, _ = vitrail("evaluate", *map(str, command), str(tmp_path / "table"), "--workers", "0", capsys=capsys)
    assert code == 0
    assert all(word in out for word in ("exact match", "F1 per class", "mAP"))
    assert "top-" not in out


def test_a_bad_image_is_left_out_named_and_listed_and_many_are_refused(
    flowers: Path, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    bad = flowers / "test" / "rose" / "1.jpg"
    bad.write_bytes(b"<html>")
    command = ("evaluate", str(model), str(flowers), "--workers", "0", "--against", str(model))
    code, _, err = vitrail(*command, "--strict", "--out", str(tmp_path / "strict"), capsys=capsys)
    assert (code, "test/rose/1.jpg is not an image" in err) == (3, True)
    code, _, err = vitrail(*command, "--out", str(tmp_path / "out"), capsys=capsys)
    assert code == 0, err
    assert "warning: 1 image of 15 cannot be read, such as test/rose/1.jpg; left out, and listed in evaluate" in err
    facts = json.loads((tmp_path / "out" / "evaluate.json").read_text())
    assert (facts["unreadable"], facts["models"][0]["images"]) == (["test/rose/1.jpg"], 14)
    (flowers / "test" / "rose" / "2.jpg").write_bytes(b"<html>")
    code, _, err = vitrail(*command, "--out", str(tmp_path / "many"), capsys=capsys)
    assert (code, "2 images of 15 cannot be read" in err, "more than 10% are too many" in err) == (3, True, True)


def test_top_5_is_not_told_below_10_classes(flowers: Path, model: Path, capsys: Capture, tmp_path: Path) -> None:
    command = ("evaluate", str(model), str(flowers), "--workers", "0", "--out", str(tmp_path / "out"))
    _, out, _ = vitrail(*command, capsys=capsys)
    assert ("top-1" in out, "top-5" in out) == (True, False)


def are_alike(one: Any, two: Any) -> bool:
    """Equal, but for the last digits of numbers: a CPU may sum in another order where a batch is shorter."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(are_alike(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(are_alike, one, two))
    return bool(one == (pytest.approx(two, rel=1e-5, abs=2e-6) if isinstance(two, float) else two))


def test_two_processes_say_what_one_says(flowers: Path, model: Path, tmp_path: Path) -> None:
    """15 images are no multiple of 2, and the last batch is short."""
    results = []
    for name, starter in (
        ("one", [sys.executable, "-m"]),
        ("two", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]),
    ):
        command = [*starter, "vitrail", "evaluate", str(model), str(flowers), "--device", "cpu", "--workers", "0"]
        command += ["--batch", "4", "--json", "--out", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
        results[-1]["models"][0].pop("images_per_second")
    assert [result.pop("world_size") for result in results] == [1, 2]
    for result in results:
        result.pop("folder")
    assert are_alike(*results)
    tables = [list(csv.DictReader((tmp_path / name / "predictions.csv").open())) for name in ("one", "two")]
    numbers = ("probability", "loss")
    assert are_alike(*([row | {name: float(row[name]) for name in numbers} for row in table] for table in tables))


def test_models_stand_side_by_side_and_are_compared_image_by_image(
    flowers: Path, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = tmp_path / "other.safetensors"
    save(model_factory.build_trained(model_factory.build_vit(seed=5, classes=3), labels=CLASSES), other)
    facts = evaluate(model, flowers, "--against", other, "--out", tmp_path / "out", capsys=capsys)
    pair = facts["comparisons"][0]
    rights = [model["correct"] for model in facts["models"]]
    assert pair["both"] + pair["only_first"] == rights[0]
    assert pair["both"] + pair["only_second"] == rights[1]
    assert pair["both"] + pair["only_first"] + pair["only_second"] + pair["neither"] == 15
    assert (tmp_path / "out" / "differences-1.jpg").exists() == bool(pair["only_first"] + pair["only_second"])
    assert (tmp_path / "out" / "model-1" / "predictions.csv").exists()


def test_a_subset_is_all_the_model_may_answer_with(flowers: Path, model: Path, tmp_path: Path, capsys: Capture) -> None:
    subset = tmp_path / "subset.txt"
    subset.write_text("rose\ndaisy\ntulip\n")
    evaluate(model, flowers, "--classes", subset, "--out", tmp_path / "out", capsys=capsys)
    with (tmp_path / "out" / "predictions.csv").open(newline="") as file:
        assert "moss" not in {row["predicted"] for row in csv.DictReader(file)}
    subset.write_text("rose\n")
    code, _, error = vitrail("evaluate", str(model), str(flowers), "--classes", str(subset), capsys=capsys)
    assert code == 3
    assert "leaves out" in error


def test_abstaining_stores_the_threshold_that_keeps_the_accuracy_on_val(
    model: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Of 20 images the 12 surest answers are right, the others wrong: 95 % need the probability of the twelfth."""
    images = [make_image(seed) for seed in range(20)]
    ranked = [prediction[0] for prediction in Classifier(load(model))(images, top=1)]
    labels = load(model).labels
    assert labels is not None
    order = sorted(range(20), key=lambda place: -ranked[place][1])
    for rank, place in enumerate(order):
        predicted = labels.index(ranked[place][0])
        to = tmp_path / "data" / "val" / labels[predicted if rank < 12 else (predicted + 1) % 4]
        to.mkdir(parents=True, exist_ok=True)
        images[place].save(to / f"{place:02}.png")
    facts = evaluate(model, tmp_path / "data", "--abstain", 0.95, "--out", tmp_path / "out", capsys=capsys)
    assert facts["threshold"] == pytest.approx(ranked[order[11]][1], rel=1e-5)
    stored = load(model)
    assert stored.threshold == facts["threshold"]
    thresholded = Classifier(stored)(images)
    assert [place for place in order if thresholded[place][0][0] != "unsure"] == order[:12]
    assert thresholded[order[-1]][1] == pytest.approx(ranked[order[-1]])


def test_the_threshold_of_a_run_folder_is_stored_in_its_best_weights(
    flowers: Path, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    best = tmp_path / "run" / "weights" / "best.safetensors"
    best.parent.mkdir(parents=True)
    shutil.copy(model, best)
    facts = evaluate(tmp_path / "run", flowers, "--abstain", 0.01, "--out", tmp_path / "out", capsys=capsys)
    assert load(best).threshold == load(tmp_path / "run").threshold == facts["threshold"]
    assert facts["threshold"] > load(model).threshold == 0
    assert [path.name for path in best.parent.iterdir()] == ["best.safetensors"]


def test_a_folder_without_splits_is_measured_whole_but_for_what_the_model_was_trained_on(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = write_image_folder(tmp_path / "own", classes=CLASSES, each=10)
    code, out, error = vitrail("evaluate", str(model), str(own), "--workers", "0", "--json", capsys=capsys)
    assert (code, json.loads(out)["models"][0]["images"]) == (0, 30), error
    assert f"measuring on all 30 images: {own} has no splits" in error
    assert "held out" not in error
    assert len(evaluate(model, own, "--split", "test", capsys=capsys)["models"]) == 1
    run = ("finetune", "own", "--model", str(model), "--epochs", "1", "--workers", "0", "--device", "cpu")
    assert vitrail(*run, capsys=capsys)[0] == 0
    (tmp_path / "moved.safetensors").write_bytes((tmp_path / "runs/finetune/weights/best.safetensors").read_bytes())
    shutil.copytree(own, tmp_path / "copy")
    others = write_image_folder(tmp_path / "others", classes=CLASSES, each=10, start=900)
    for name, data, images in (
        ("runs/finetune", own, 3),
        ("moved.safetensors", own, 3),
        ("runs/finetune", tmp_path / "copy", 3),
        ("runs/finetune", others, 30),
    ):
        code, out, error = vitrail("evaluate", name, str(data), "--workers", "0", "--json", capsys=capsys)
        assert (code, json.loads(out)["models"][0]["images"]) == (0, images), error
        left_out = f"measuring on 3 images: 27 images that {name} was trained on or selected with are left out"
        assert (left_out in error) == (images == 3)


def test_a_run_that_held_out_another_share_is_not_measured_on_images_it_was_trained_on(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `study sweep` does with a large dataset."""
    monkeypatch.chdir(tmp_path)
    own = write_image_folder(tmp_path / "own", classes=CLASSES, each=10)
    run = ("finetune", str(own), "--model", str(model), "--epochs", "1", "--workers", "0", "--device", "cpu")
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.training.run_execution.open_dataset", partial(open_dataset, holdout_fraction=0.2))
        assert vitrail(*run, capsys=capsys)[0] == 0
    shutil.rmtree(tmp_path / "runs/finetune/checkpoints")  # as a study does
    code, _, error = vitrail("evaluate", "runs/finetune", str(own), "--workers", "0", capsys=capsys)
    assert code == 3
    assert f"runs/finetune was trained on other splits of {own} (no val and test given: 20% of each class" in error
    assert evaluate("runs/finetune", own, "--split", "all", capsys=capsys)["models"][0]["images"] == 30


def test_it_ends_with_what_came_of_it_and_where_it_is(
    flowers: Path, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    _, _, error = vitrail("evaluate", str(model), str(flowers), "--workers", "0", "--out", str(out), capsys=capsys)
    facts = json.loads((out / "evaluate.json").read_text())["models"][0]
    last = error.splitlines()[-1]
    assert last.startswith(f"{facts['top1']:.1%} of 15 images correct (")
    assert last.endswith(f"; tables and figures: {out}")
    save(load(model), tmp_path / "other.safetensors")
    twice = ("evaluate", str(model), str(flowers), "--workers", "0", "--against", str(tmp_path / "other.safetensors"))
    error = vitrail(*twice, "--out", str(tmp_path / "two"), capsys=capsys)[2]
    assert error.splitlines()[-1].startswith(f"best of 2 models: {model}, ")


def test_another_model_is_checked_before_the_first_runs(
    flowers: Path, model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.evaluation.dataset_evaluation.evaluate_model", lambda *_: pytest.fail("a model ran"))
    other = tmp_path / "other.safetensors"
    save(model_factory.build_trained(model_factory.build_vit(classes=2), labels=("oak", "elm")), other)
    for against, code, message in (
        (other, 3, "other.safetensors: the model has no class"),
        (tmp_path / "nowhere.safetensors", 4, "nowhere.safetensors"),
    ):
        exit_code, _, error = vitrail("evaluate", str(model), str(flowers), "--against", str(against), capsys=capsys)
        assert (exit_code, message in error) == (code, True), error


def test_folders_that_may_be_no_classes_are_asked_about(model: Path, tmp_path: Path, capsys: Capture) -> None:
    write_image_folder(tmp_path / "years", "2023", "2024", classes=CLASSES, each=1)
    code, _, error = vitrail("evaluate", str(model), str(tmp_path / "years"), capsys=capsys)
    assert (code, "holds the folders 2023, 2024, each of which holds daisy, rose, tulip" in error) == (3, True)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--split", "train", "--batch", "0"), 2, "--batch is 0"),
        (("--abstain", "95"), 2, "--abstain is 95"),
        (("--real", "nowhere.json"), 3, "cannot be read as JSON"),
    ],
)
def test_mistakes_get_one_line(
    flowers: Path, model: Path, capsys: Capture, options: tuple[str, ...], code: int, message: str
) -> None:
    exit_code, _, error = vitrail("evaluate", str(model), str(flowers), *options, capsys=capsys)
    assert (exit_code, error.count("\n") - error.count("measuring on")) == (code, 1)
    assert message in error


@pytest.mark.parametrize("out", ["s3://bucket/evaluated", "taken", "model.safetensors"])
def test_what_is_elsewhere_or_taken_is_not_written_to(
    out: str, flowers: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("")
    code, _, error = vitrail("evaluate", str(model), str(flowers), "--out", out, capsys=capsys)
    assert (code, f"--out {out} must be a local folder that is new or empty" in error) == (2, True)


def test_an_unknown_label_is_refused(model: Path, tmp_path: Path, capsys: Capture) -> None:
    other = write_image_folder(tmp_path / "others", "test", classes=("rose", "whale"))
    code, _, error = vitrail("evaluate", str(model), str(other), capsys=capsys)
    assert code == 3
    assert "no class 'whale'" in error


def test_timms_own_network_says_what_ours_says(deit_tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed: make peers", exc_type=ImportError)
    assert timm is not None
    data = write_image_folder(tmp_path / "images", "test", classes=("n01440764", "n01443537"), each=3)
    name = f"timm-model:local-dir:{deit_tiny}"
    facts = evaluate(deit_tiny, data, "--against", name, "--out", tmp_path / "out", capsys=capsys)
    ours, theirs = facts["models"]
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-4)


def test_a_real_vit_knows_real_images_by_the_wordnet_ids_of_their_folders(
    data: Path, deit_tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
    with tarfile.open(data / "imagenet_samples.tar.xz") as archive:
        for member in itertools.islice((member for member in archive if member.isfile()), 40):
            file = archive.extractfile(member)
            assert file is not None
            to = tmp_path / "images" / Path(member.name).parent.name / Path(member.name).name
            to.parent.mkdir(parents=True)
            to.write_bytes(file.read())
    facts = evaluate(deit_tiny, tmp_path / "images", "--split", "all", "--out", tmp_path / "out", capsys=capsys)
    names = {entry.wordnet_id: entry.name for entry in load_imagenet1k_classes()}
    paths = sorted((tmp_path / "images").rglob("*.jpg"))
    predictions = Classifier(load(deit_tiny))(paths, top=1)
    right = sum(
        prediction[0][0] == names[path.parent.name] for path, prediction in zip(paths, predictions, strict=True)
    )
    assert (facts["models"][0]["correct"], facts["models"][0]["images"]) == (right, 40)
    assert right > 25


def test_what_is_asked_adds_up_to_the_counts(flowers: Path, model: Path) -> None:
    trained, split = load(model), open_dataset(str(flowers)).splits["test"]
    assert trained.preprocess is not None
    batches = [list(iter_eval_batches(split, trained.preprocess, batch_size=size, num_classes=4)) for size in (15, 4)]
    whole, parts = (
        predict_batches(trained.model, batch_list, trained.preprocess, temperature=2.0, num_classes=4)
        for batch_list in batches
    )
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)
    assert count_predictions(parts, 4).images == 15
