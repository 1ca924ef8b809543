"""Rows and cautions that the report and the model card share."""

import json
from pathlib import Path

from tests.report.run_folders import CONFIG, write_run_folder
from tests.report.test_html_report import parse_page
from vitrail.report.run_facts import gather_facts


def test_what_was_trained_on_and_what_chose_the_weights_is_said(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run", everything=True)
    events = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(events.replace('"split": "test"', '"split": "val"'))
    assert (
        "The model was trained on these images (--train-on-val)" in parse_page(gather_facts(folder)).sections["result"]
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert "on which the weights and the temperature were chosen" in parse_page(gather_facts(folder)).sections["result"]
