"""The page of hand-made facts: what it says, that names are never markup, and how large it may get."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.report.folders import CONFIG, written
from tests.report.reading import Reading
from vitrail.report.card import Card, Section
from vitrail.report.gather import Facts, gather
from vitrail.report.page import again, page, rerun

NOTHING = "No weights have been kept yet."


def read(facts: Facts) -> Reading:
    found = Reading(page(facts, None, NOTHING, None))
    assert found.wrong == []
    return found


def test_the_result_stands_beside_its_interval_and_its_baseline(tmp_path: Path) -> None:
    text = read(gather(written(tmp_path / "run"))).parts["result"]
    shown = " ".join(text.split())
    assert "70.0 %" in shown.replace("70.0%", "70.0 %")
    assert "7 of 10 test images right" in shown
    assert "39.7 to 89.2 % (95 % interval, Wilson)" in shown  # by hand, from Wilson's formula
    assert "always “dog”: no class is commoner in training 50.0 %" in shown
    assert "10 images are few" in shown


def test_the_pairs_confused_most_come_first_with_their_share(tmp_path: Path) -> None:
    shown = " ".join(read(gather(written(tmp_path / "run"))).parts["confusion"].split())
    assert "cat dog 2 50 % dog cat 1 20 %" in shown
    assert re.search(r"cat 10 4 2 50.0 % dog 25 5 4 80.0 % <b>eel</b> 5 1 1 100.0 %", shown)  # the worst class first


def test_names_are_words_and_never_markup(tmp_path: Path) -> None:
    data = "<img src=x onerror=alert(1)>"
    answers = [("</section><script>", "</section><script>", 0.5)]
    facts = gather(written(tmp_path / "run", answers=answers, classes=["</section><script>"], data=data))
    found = read(facts)
    assert "script" not in found.tags
    assert data in found.text
    assert found.addresses == [address for address in found.addresses if address.startswith(("#", "data:"))]


def test_folders_of_the_machine_stand_only_where_the_run_is_to_be_made_again(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    with (folder / "events.jsonl").open("a") as file:
        given = {"arguments": ["finetune", "photos", "--model", "/home/someone/m"], "folder": "/home/someone/secret"}
        file.write(json.dumps({"at": 1, "event": "command", **given}) + "\n")
    found = read(gather(folder))
    assert "/home/someone/secret" in found.parts["again"]
    assert "someone" not in "".join(text for name, text in found.parts.items() if name != "again")


def test_an_interrupted_run_shows_what_there_is(tmp_path: Path) -> None:
    found = read(gather(written(tmp_path / "run", ended=False)))
    assert "The run has not ended" in found.text
    assert {"run", "curves", "data", "inside", "walk", "again", "card"} == set(found.parts) - {""}


def test_several_labels_have_no_confusion_and_say_why(tmp_path: Path) -> None:
    answers = [("cat | dog", "cat", 0.9), ("dog", "dog", 0.8), ("dog", "cat", 0.7)]
    found = read(gather(written(tmp_path / "run", answers=answers)))
    assert "several labels" in found.parts["confusion"]


def test_what_was_trained_on_and_what_chose_the_weights_is_said(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", everything=True)
    events = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(events.replace('"split": "test"', '"split": "val"'))
    assert "were trained on (--everything)" in read(gather(folder)).parts["result"]
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert "on which the weights and the temperature were chosen" in read(gather(folder)).parts["result"]


def test_thousands_of_classes_and_answers_stay_a_page(tmp_path: Path) -> None:
    classes = [f"a class with a rather long name, number {number}" for number in range(5000)]
    answers = [(classes[n % 5000], classes[n % 5000 if n % 3 else (7 * n) % 5000], 0.5) for n in range(20_000)]
    facts = gather(written(tmp_path / "run", answers=answers, classes=classes))
    text = page(facts, None, NOTHING, None)
    assert len(text) < 300_000
    assert "Of 5,000 classes the 20 in the pairs confused most" in text
    assert not (tmp_path / "run" / "per_class.csv").exists()
    assert "The answers to 4,900 more are in predictions.csv" in text


def test_of_many_classes_the_table_of_all_is_named(tmp_path: Path) -> None:
    classes = [f"class {number}" for number in range(150)]
    facts = gather(written(tmp_path / "run", answers=[(name, name, 0.5) for name in classes], classes=classes))
    assert "50 more are in per_class.csv." in read(facts).parts["confusion"]


def test_bytes_that_are_no_text_do_not_keep_a_page_from_being_written(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", ended=False, data="/data/a\udcff  b")
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"at": 9, "event": "stopped", "reason": "c\udcff.jpg is no image"}) + "\n")
    facts = gather(folder)
    described = Card("d\udcff", (), (Section("Use", ("e\udcff",)),))
    text = page(facts, None, "f\udcff cannot be shown", described).encode().decode()
    assert again(gather(written(tmp_path / "whole", data="/data/a\udcff  b")))[0].endswith("'/data/a?  b'")
    for name in ("c?.jpg is no image", "e?", "f? cannot be shown"):
        assert name in text


def test_one_class_is_a_page_too(tmp_path: Path) -> None:
    found = read(gather(written(tmp_path / "run", answers=[("cat", "cat", 1.0)], classes=["cat"])))
    assert "one class" in found.text
    assert "every answer is right" in found.parts["confusion"]


@pytest.mark.parametrize(
    ("given", "again"),
    [
        (["train", "digits", "--data", "digits"], "vitrail train digits --data digits"),
        (["finetune", "my photos", "--model", "m", "--resume"], "vitrail finetune 'my photos' --model m"),
        (["finetune", "x", "--minutes", "5", "--out", "y"], "vitrail finetune x --epochs 2"),
        (["finetune", "x", "--minutes=5", "--overwrite"], "vitrail finetune x --epochs 2"),
        (["finetune", "x", "--runs", "3", "--seed", "1"], "vitrail finetune x --seed 3"),
        (["finetune", "x", "--json"], "vitrail finetune x"),
        (["demo"], "vitrail demo"),
    ],
)
def test_the_command_given_again_makes_this_very_run(tmp_path: Path, given: list[str], again: str) -> None:
    folder = written(tmp_path / "run")
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"at": 1, "event": "command", "arguments": given, "folder": "/x"}) + "\n")
    assert rerun(gather(folder)) == again


def test_the_data_is_measured_again_by_its_own_name_where_it_was_measured(tmp_path: Path) -> None:
    data = "/data/my  'best' photos"
    measured, report = again(gather(written(tmp_path / "run", data=data)))
    assert shlex.split(measured) == ["vitrail", "evaluate", "RUN/weights/best.safetensors", data]
    assert report == "vitrail report RUN"
    facts = gather(written(tmp_path / "half", data=data, ended=False))
    assert again(facts) == ["vitrail report RUN"]
    assert "evaluate" not in read(facts).parts["again"]


def test_a_command_that_nobody_wrote_down_is_unknown(tmp_path: Path) -> None:
    facts = gather(written(tmp_path / "run"))
    assert rerun(facts) is None
    assert "The command was not recorded" in read(facts).parts["again"]
