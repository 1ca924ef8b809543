"""Findings and suggestions, as the first screen of the report shows them."""

import dataclasses
from pathlib import Path

from tests.report.run_folders import write_run_folder
from tests.report.test_html_report import parse_page
from vitrail.report.findings import list_label_confusions
from vitrail.report.run_facts import gather_facts


def test_the_first_screen_names_the_weakest_classes_the_commonest_confusion_and_what_to_do(tmp_path: Path) -> None:
    section = " ".join(parse_page(gather_facts(write_run_folder(tmp_path / "run"))).sections["result"].split())
    assert "Weakest classes cat 50 % (2 of 4), dog 80 % (4 of 5)" in section  # eel is right
    assert "Most confused pair cat predicted as dog , 2 of 4 times" in section
    steps = section.partition("What to do next")[2]
    assert "Train longer: the validation loss was still falling at the end. Try --epochs 4 instead of 2." in steps
    assert "Look at images of cat and dog: are the labels right, and can you tell them apart?" in steps
    assert steps.endswith("vitrail predict RUN IMAGES vitrail serve RUN")
    facts = gather_facts(tmp_path / "run")
    assert facts.result is not None
    perfect = dataclasses.replace(facts, result=dataclasses.replace(facts.result, correct=facts.result.images))
    steps = parse_page(perfect).sections["result"]
    assert f"Add test images: all {facts.result.images} are correct" in steps
    assert "Train longer" not in steps
    timed = dataclasses.replace(facts, command=("finetune", "x", "--minutes=5"))
    assert "falling at the end. Try more --minutes." in parse_page(timed).sections["result"]
    columns = {name: values[:1] for name, values in timed.epochs.items()} | {"epoch": (0.25,)}
    timed = dataclasses.replace(timed, epochs=columns)
    assert "Give it more --minutes: there was time for 0.25 epochs." in parse_page(timed).sections["result"]


def test_a_class_with_few_training_images_and_a_poor_result_lead_to_advice(tmp_path: Path) -> None:
    predictions = [*[("cat", "dog", 0.9)] * 3, *[("dog", "dog", 0.9)] * 5, *[("<b>eel</b>", "dog", 0.9)] * 2]
    section = " ".join(
        parse_page(gather_facts(write_run_folder(tmp_path / "run", predictions=predictions))).sections["result"].split()
    )
    assert "Do not use it yet: it is not clearly better than always “dog”" in section
    counts = {"cat": 2, "dog": 10, "<b>eel</b>": 10}
    facts = dataclasses.replace(gather_facts(tmp_path / "run"), train_counts=counts, baselines=())
    assert "Add training images of cat: it has 2, fewer than most classes." in " ".join(parse_page(facts).text.split())


def test_nothing_wrong_has_no_weakest_class(tmp_path: Path) -> None:
    predictions = [("cat", "cat", 1.0)] * 30
    section = " ".join(
        parse_page(gather_facts(write_run_folder(tmp_path / "run", predictions=predictions))).sections["result"].split()
    )
    assert "Weakest classes none: all predictions are correct" in section
    assert "Most confused pair none" in section


def test_labels_missed_where_others_were_added_are_counted_in_pairs(tmp_path: Path) -> None:
    predictions = (
        ("cat | dog", "cat | <b>eel</b>", 0.9), ("dog", "<b>eel</b>", 0.8), ("dog", "dog", 0.7), ("cat", "", 0.6),
        ("", "cat", 0.5), ("cat", "dog", 0.4),
    )  # fmt: skip
    facts = gather_facts(write_run_folder(tmp_path / "run", predictions=predictions))
    assert list_label_confusions(facts) == [("dog", "<b>eel</b>", 2, 3), ("cat", "dog", 1, 3)]
    section = " ".join(parse_page(facts).sections["confusion"].split())
    assert "its probability is above one half" in section
    assert "missed label extra label images share of the missed label's dog <b>eel</b> 2 67 % cat dog 1 33 %" in section
    assert list_label_confusions(gather_facts(write_run_folder(tmp_path / "single"))) == []
