"""The page of hand-made facts: what it says, that names are never markup, and how large it may get."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.report.page_parser import ParsedPage
from tests.report.run_folders import write_run_folder
from vitrail.report import fact_rows
from vitrail.report.html_report import make_repeat_commands, make_rerun_command, render_page
from vitrail.report.model_card import CardSection, ModelCard
from vitrail.report.run_facts import RunFacts, gather_facts

NOTHING = "No weights have been kept yet."


def parse_page(facts: RunFacts) -> ParsedPage:
    page = ParsedPage(render_page(facts, None, NOTHING, None))
    assert page.errors == []
    return page


def test_the_result_stands_beside_its_interval_and_its_baseline(tmp_path: Path) -> None:
    text = parse_page(gather_facts(write_run_folder(tmp_path / "run"))).sections["result"]
    section = " ".join(text.split())
    assert "70.0 %" in section.replace("70.0%", "70.0 %")
    assert "7 of 10 test images are classified correctly" in section
    assert "95 % confidence interval: 39.7 to 89.2 % (Wilson)" in section  # by hand, from Wilson's formula
    assert "always “dog”, the most frequent class in training 50.0 %" in section
    assert "Measured on only 10 images" in section


def test_the_pairs_confused_most_come_first_with_their_share(tmp_path: Path) -> None:
    section = " ".join(parse_page(gather_facts(write_run_folder(tmp_path / "run"))).sections["confusion"].split())
    assert "cat dog 2 50 % dog cat 1 20 %" in section
    assert re.search(r"cat 50 % 2 of 4 10 dog 80 % 4 of 5 25 <b>eel</b> 100 % 1 of 1 5", section)  # the weakest first


def test_names_are_words_and_never_markup(tmp_path: Path) -> None:
    data = "<img src=x onerror=alert(1)>"
    predictions = [("</section><script>", "</section><script>", 0.5)]
    facts = gather_facts(
        write_run_folder(tmp_path / "run", predictions=predictions, classes=["</section><script>"], data=data)
    )
    page = parse_page(facts)
    assert "script" not in page.tags
    assert data in page.text
    assert page.addresses == [address for address in page.addresses if address.startswith(("#", "data:"))]


def test_folders_of_the_machine_stand_only_where_the_run_is_to_be_made_again(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run")
    with (folder / "events.jsonl").open("a") as file:
        event = {"arguments": ["finetune", "photos", "--model", "/home/someone/m"], "folder": "/home/someone/secret"}
        file.write(json.dumps({"at": 1, "event": "command", **event}) + "\n")
    page = parse_page(gather_facts(folder))
    assert "/home/someone/secret" in page.sections["rerun"]
    assert "someone" not in "".join(text for name, text in page.sections.items() if name != "rerun")


def test_an_interrupted_run_shows_what_there_is(tmp_path: Path) -> None:
    page = parse_page(gather_facts(write_run_folder(tmp_path / "run", ended=False)))
    assert "The run has not ended" in page.text
    assert {"run", "curves", "data", "figures", "forward-trace", "rerun", "card"} == set(page.sections) - {""}


@pytest.mark.parametrize("classes", [9, 10])
def test_top_5_is_shown_from_10_classes_on(tmp_path: Path, classes: int) -> None:
    names = [f"class {number}" for number in range(classes)]
    facts = gather_facts(
        write_run_folder(tmp_path / "run", predictions=[(name, name, 0.5) for name in names], classes=names)
    )
    page = parse_page(facts)
    assert ("top-5 accuracy" in page.text, "top-5" in page.sections["curves"]) == (classes == 10, classes == 10)
    assert facts.result is not None
    assert ("top-5 accuracy" in str(list(fact_rows.list_result_rows(facts, facts.result)))) == (classes == 10)


def test_class_by_class_is_open_and_the_equations_are_folded(run: Path) -> None:
    text = (run / "report.html").read_text()
    page = ParsedPage(text)
    assert "class images" not in page.text
    before, after = text.split("Classes, weakest first")
    assert before.count("<details") == before.count("</details")
    equations = after.partition('<section id="forward-trace">')[2].partition("</section>")[0]
    assert equations.index("<details>") < equations.index("<math")


def test_where_rollout_is_shown_a_sentence_says_what_it_is_not(run: Path) -> None:
    page = ParsedPage((run / "report.html").read_text())
    section = [name for name in ("mistakes", "figures") if "rollout" in page.sections[name]]
    assert "figures" in section
    for name in section:
        assert "Rollout does not explain a prediction" in " ".join(page.sections[name].split())


def test_a_multi_label_run_is_shown_as_one(tmp_path: Path) -> None:
    predictions = [("cat | dog", "cat", 0.9), ("dog", "dog", 0.8), ("dog", "cat", 0.7)]
    page = parse_page(gather_facts(write_run_folder(tmp_path / "run", predictions=predictions)))
    result = " ".join(page.sections["result"].split())
    assert "1 of 3 test images have exactly their labels predicted (exact match). F1 61.0 %, mAP 73.0 %." in result
    assert "Weakest classes <b>eel</b> F1 44 %" in result
    assert "Most often missed" in result
    assert "top-5 accuracy" not in page.text
    assert "Most confused" not in page.text
    assert "cat 44 % 4 5 2 62 % 5" in " ".join(page.sections["confusion"].split())
    assert "Validation exact match" in page.sections["curves"]
    assert "label's probability" in page.sections["calibration"]


def test_thousands_of_classes_and_answers_stay_a_page(tmp_path: Path) -> None:
    classes = [f"a class with a rather long name, number {number}" for number in range(5000)]
    predictions = [(classes[n % 5000], classes[n % 5000 if n % 3 else (7 * n) % 5000], 0.5) for n in range(20_000)]
    facts = gather_facts(write_run_folder(tmp_path / "run", predictions=predictions, classes=classes))
    text = render_page(facts, None, NOTHING, None)
    assert len(text) < 300_000
    assert "the 40 most confused of 5,000 classes" in text
    assert not (tmp_path / "run" / "per_class.csv").exists()
    assert "The predictions of 4,900 more are in predictions.csv" in text


def test_of_many_classes_the_table_of_all_is_named(tmp_path: Path) -> None:
    classes = [f"class {number}" for number in range(150)]
    facts = gather_facts(
        write_run_folder(tmp_path / "run", predictions=[(name, name, 0.5) for name in classes], classes=classes)
    )
    assert "50 more are in per_class.csv." in parse_page(facts).sections["confusion"]


def test_bytes_that_are_no_text_do_not_keep_a_page_from_being_written(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run", ended=False, data="/data/a\udcff  b")
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"at": 9, "event": "stopped", "reason": "c\udcff.jpg is no image"}) + "\n")
    facts = gather_facts(folder)
    card = ModelCard("d\udcff", (), (CardSection("Use", ("e\udcff",)),))
    text = render_page(facts, None, "f\udcff cannot be shown", card).encode().decode()
    assert make_repeat_commands(gather_facts(write_run_folder(tmp_path / "whole", data="/data/a\udcff  b")))[
        0
    ].endswith("'/data/a?  b'")
    for name in ("c?.jpg is no image", "e?", "f? cannot be shown"):
        assert name in text


def test_one_class_is_a_page_too(tmp_path: Path) -> None:
    page = parse_page(
        gather_facts(write_run_folder(tmp_path / "run", predictions=[("cat", "cat", 1.0)], classes=["cat"]))
    )
    assert "1 class" in page.text
    assert "every prediction is correct" in page.sections["confusion"]


@pytest.mark.parametrize(
    ("arguments", "command"),
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
def test_the_command_given_again_makes_this_very_run(tmp_path: Path, arguments: list[str], command: str) -> None:
    folder = write_run_folder(tmp_path / "run")
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"at": 1, "event": "command", "arguments": arguments, "folder": "/x"}) + "\n")
    assert make_rerun_command(gather_facts(folder)) == command


def test_the_data_is_measured_again_by_its_own_name_where_it_was_measured(tmp_path: Path) -> None:
    data = "/data/my  'best' photos"
    measured, report = make_repeat_commands(gather_facts(write_run_folder(tmp_path / "run", data=data)))
    assert shlex.split(measured) == ["vitrail", "evaluate", "RUN/weights/best.safetensors", data]
    assert report == "vitrail report RUN"
    facts = gather_facts(write_run_folder(tmp_path / "half", data=data, ended=False))
    assert make_repeat_commands(facts) == ["vitrail report RUN"]
    assert "evaluate" not in parse_page(facts).sections["rerun"]


def test_a_command_that_nobody_wrote_down_is_unknown(tmp_path: Path) -> None:
    facts = gather_facts(write_run_folder(tmp_path / "run"))
    assert make_rerun_command(facts) is None
    assert "The command was not recorded" in parse_page(facts).sections["rerun"]
