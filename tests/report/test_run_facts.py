"""A run's folder to facts: numbers by hand, runs that were interrupted, folders that are none."""

import json
from pathlib import Path

import pytest

from tests.report.run_folders import write_run_folder
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.predictions import MAX_CONFUSION_CLASSES
from vitrail.evaluation.statistics import wilson_interval
from vitrail.report.run_facts import gather_facts, get_image_name, get_short_name, strip_folders
from vitrail.training.run_results import RESULT_COLUMNS


def test_numbers_are_those_of_the_folder(tmp_path: Path) -> None:
    facts = gather_facts(write_run_folder(tmp_path / "run"))
    assert facts.result is not None
    assert (facts.name, facts.result.correct, facts.result.images, facts.result.top1) == ("run", 7, 10, 0.7)
    assert facts.result.interval == wilson_interval(7, 10)
    assert facts.macro_accuracy == pytest.approx((2 / 4 + 4 / 5 + 1) / 3)
    assert facts.epochs["train/loss"] == (1.5, 1.0)
    assert [(answer.image, answer.predicted) for answer in facts.list_mistakes()] == [
        ("test/2.jpg", "dog"), ("test/6.jpg", "cat"), ("test/3.jpg", "dog"),
    ]  # fmt: skip
    assert (facts.has_result, facts.is_single_label) == (True, True)


def test_the_baseline_is_the_class_that_training_saw_most_and_what_events_tell(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run")  # 25 dogs were trained on, and five of ten images are dogs
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"at": 1, "event": "baseline", "name": "nearest neighbour", "right": 6}) + "\n")
    first, second = gather_facts(folder).baselines
    assert ("dog" in first.name, first.correct) == (True, 5)
    assert second == ("nearest neighbour", 6)


MULTI = (("cat | dog", "cat", 0.9), ("dog", "dog", 0.8), ("dog | cat", "cat | dog", 0.7), ("dog", "", 0.6))


def test_a_multi_label_run_is_judged_by_exact_match_f1_and_average_precision(tmp_path: Path) -> None:
    facts = gather_facts(write_run_folder(tmp_path / "run", predictions=MULTI))
    assert (facts.is_single_label, facts.is_multi_label, facts.macro_accuracy) == (False, True, None)
    assert facts.multi_label_metrics is not None
    assert (facts.multi_label_metrics.micro_f1, facts.multi_label_metrics.mean_average_precision) == (0.61, 0.73)
    assert facts.result is not None
    assert facts.label_rows[0] == ("cat", 5, 4, 2, 0.44, 5, 0.625, None)
    [baseline] = facts.baselines
    assert baseline == ("always “cat | dog”, the most frequent combination of labels here", 2)  # in any order


def test_a_multi_label_run_that_was_judged_by_any_label_has_no_result(tmp_path: Path) -> None:
    facts = gather_facts(write_run_folder(tmp_path / "run", predictions=MULTI, has_metrics=False))
    assert (facts.result, facts.predictions, facts.multi_label_metrics) == (None, (), None)
    assert "--resume to measure again" in facts.missing[0]


@pytest.mark.parametrize("several", [False, True])
def test_whether_there_may_be_several_labels_is_what_the_run_says(tmp_path: Path, several: bool) -> None:
    """The files alone suggest otherwise: no per_class.csv for few classes, or too many classes for a confusion."""
    classes = [f"class {number}" for number in range(MAX_CONFUSION_CLASSES + 1 if several else 3)]
    predictions = [("class 0", "class 0", 0.9), ("class 1", "class 1", 0.8)]
    folder = write_run_folder(tmp_path / "run", predictions=predictions, classes=classes, several=several)
    (folder / "per_class.csv").unlink()
    facts = gather_facts(folder)
    assert (facts.is_single_label, facts.is_multi_label) == (not several, several)


def test_an_interrupted_run_says_how_far_it_came(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run", ended=False)
    with (folder / "events.jsonl").open("a") as file:
        file.write(
            json.dumps({"at": 9, "event": "stopped", "reason": "SIGTERM: stopped after /home/me/a; saved"}) + "\n"
        )
        file.write('{"at": 10, "eve')  # killed as it wrote
    facts = gather_facts(folder)
    assert (facts.result, facts.predictions, facts.baselines, facts.has_result) == (None, (), (), False)
    first, second = facts.missing
    assert "last recorded step is 10 of 20 (SIGTERM: stopped after a)" in first
    assert "--resume" in first
    assert "There are no weights" in second


def test_a_run_without_labels_has_a_result_of_its_own(tmp_path: Path) -> None:
    masked = {"kind": "mpp", "share": 0.5, "target": "mean-color"}
    folder = write_run_folder(
        tmp_path / "run", ended=False, recipe={"masked": masked, "model": "ti16"}, model=None, classes=[]
    )
    metrics = {"split": "val", "images": 6, "patches": 48, "loss": 4.5, "top1": 0.25, "top5": 0.5, "seconds": 3.0}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"at": 9, "event": "pretrained", **metrics}) + "\n")
    facts = gather_facts(folder)
    assert facts.pretraining is not None
    assert (facts.pretraining.loss, facts.pretraining.top1, facts.seconds) == (4.5, 0.25, 3.0)
    assert (facts.has_result, facts.result) == (True, None)
    assert not any("not ended" in sentence for sentence in facts.missing)


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run")
    (folder / "events.jsonl").write_text('{"at": 1\n{"at": 2, "event": "end"}\n')
    with pytest.raises(DataError, match=r"events.jsonl, line 1 is damaged"):
        gather_facts(folder)


def test_a_table_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run")
    rows = (folder / "predictions.csv").read_text().splitlines()
    (folder / "predictions.csv").write_text("\n".join([*rows[:3], rows[3][:12]]))
    with pytest.raises(DataError, match=r"predictions.csv, line 4 is damaged"):
        gather_facts(folder)
    (folder / "predictions.csv").unlink()
    facts = gather_facts(folder)
    assert (facts.predictions, facts.has_result) == ((), True)
    assert "There is no predictions.csv" in facts.missing[0]


def test_the_last_row_of_a_run_that_was_killed_as_it_wrote_is_left_out(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run")
    with (folder / "results.csv").open("a") as file:
        file.write("3,15,0.")
    assert gather_facts(folder).epochs["train/loss"] == (1.5, 1.0)


END = {"at": 1, "event": "end", "images": 3}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "results.csv",
            "epoch,time\n1,5\n",
            r"column train/loss of .*results\.csv is damaged .*: repair it, or remove",
        ),
        (
            "results.csv",
            f"{','.join(RESULT_COLUMNS)}\n1,5,x,,,,\n",
            r"train/loss of .*results\.csv is damaged \(could not conv",
        ),
        ("results.csv", f"{','.join(RESULT_COLUMNS)}\n1,5\n", r"train/loss of .*results\.csv is damaged"),
        ("per_class.csv", "class,train_images\ncat,many\n", r"per_class\.csv is damaged .*--resume to measure again"),
        ("per_class.csv", "train_images\n5\n", r"per_class\.csv is damaged \('class'\)"),
        (
            "data_report.json",
            "{}",
            r"data_report\.json is damaged .*write it again with `vitrail data check DATA --out .*`",
        ),
        ("data_report.json", "[1]", r"data_report\.json is damaged"),
        ("events.jsonl", json.dumps(END) + "\n", r"the event 'end' in .*events\.jsonl is damaged \('split'\)"),
        ("events.jsonl", '{"at": 1}\n', r"events\.jsonl, line 1 is damaged \('event'\): repair or remove"),
        ("events.jsonl", "7\n", r"events\.jsonl, line 1 is damaged"),
    ],
)
def test_a_small_file_that_is_damaged_is_named_with_what_to_do(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    folder = write_run_folder(tmp_path / "run")
    (folder / name).write_text(text)
    with pytest.raises(DataError, match=message):
        gather_facts(folder)


def test_a_folder_that_is_no_run_is_refused_and_seeds_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a run: it has no config\.json"):
        gather_facts(tmp_path)
    for seed in (4, 5):
        write_run_folder(tmp_path / "runs" / f"seed-{seed}")
    with pytest.raises(UsageError, match=r"several seeds; give one: vitrail report .*runs/seed-4"):
        gather_facts(tmp_path / "runs")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("/data/photos", "photos"), ("digits", "digits"), ("hf:org/set", "hf:org/set"), ("photos.csv", "photos.csv"),
        ("s3://bucket/photos", "s3://bucket/photos"), ("/data/jft/{000..127}.tar", "jft/{000..127}.tar"), ("/", "/"),
        ("/data/a: b/photos", "photos"), ("timm:vit", "timm:vit"), ("file:///home/me/photos", "photos"),
        (r"C:\Users\me\photos", "photos"), ("photos: mine", "photos: mine"),
    ],
)  # fmt: skip
def test_a_set_is_called_by_its_last_name(name: str, short: str) -> None:
    assert get_short_name(name) == short


@pytest.mark.parametrize(
    ("sentence", "plain"),
    [
        ("listed in /home/me/.local/share/x.csv)", "listed in x.csv)"),
        ("tiny, fine-tuned on /data/my-set/photos, step 3 of 4", "tiny, fine-tuned on photos, step 3 of 4"),
        ("hf:org/name@abc and s3://bucket/a/b", "hf:org/name@abc and s3://bucket/a/b"),
        ("train/cat/1.jpg of 3/4", "train/cat/1.jpg of 3/4"),
        ("~/photos/x.png", "x.png"),
        ("in /data/a,b(c)/x.csv, and file:///home/me/y.csv", "in x.csv, and y.csv"),
        (r"in C:\Users\me\x.csv and \\server\share\y.csv", "in x.csv and y.csv"),
        ("/home/some one/my set/x.jpg: truncated in a/b", "x.jpg: truncated in a/b"),
        ("cannot open '/home/some one/x.jpg'", "cannot open 'x.jpg'"),
        ("and/or 3/4 of a:b", "and/or 3/4 of a:b"),
    ],
)
def test_folders_of_a_machine_are_left_out_of_sentences(sentence: str, plain: str) -> None:
    assert strip_folders(sentence) == plain


@pytest.mark.parametrize(
    ("image", "short"),
    [
        ("test/a cat/1.jpg", "test/a cat/1.jpg"), ("/home/some one/cats, dogs/1.jpg", "1.jpg"),
        ("s3://bucket/a/1.jpg", "s3://bucket/a/1.jpg"), ("file:///home/me/1.jpg", "1.jpg"),
    ],
)  # fmt: skip
def test_an_image_is_called_by_its_place_in_the_set(image: str, short: str) -> None:
    assert get_image_name(image) == short


def test_the_sets_own_folder_is_left_out_even_with_spaces(tmp_path: Path) -> None:
    facts = gather_facts(write_run_folder(tmp_path / "run", data="/home/some one/my photos"))
    assert (
        facts.clean_text("tiny, fine-tuned on /home/some one/my photos, step 3")
        == "tiny, fine-tuned on my photos, step 3"
    )
