"""The data report: its keys, and reports that earlier versions wrote."""

import json
from pathlib import Path

from tests.data.image_files import write_image_folder
from vitrail.data.audit import REPORT_VERSION, audit_dataset, read_excluded_images, upgrade_report
from vitrail.data.folder import open_folder
from vitrail.data.image_scan import scan_dataset

OLD_REPORT = {
    "version": 1,
    "data": "/photos",
    "images": {"train": 4},
    "classes": [{"name": "of", "train": 4}],
    "question": "are these the classes?",
    "several_labels": False,
    "sizes": {side: {"least": 1, "median": 2, "most": 3} for side in ("width", "height")},
    "formats": {"JPEG": 4},
    "colour": {"of": "train", "images": 4, "mean": [0.5] * 3, "std": [0.1] * 3, "grey": 1},
    "duplicates": {"compared": 4, "of": 4, "exact": 0, "near": 0, "groups": []},
    "against": {
        "data": "/test",
        "compared": 2,
        "of": 2,
        "searched": 4,
        "searched_of": 4,
        "found": [{"kind": "exact", "split": "train", "name": "of/1.jpg", "shows": "a.jpg"}],
    },
    "leave_out": [{"split": "train", "name": "of/1.jpg"}],
}


def test_an_old_report_gets_the_current_keys() -> None:
    report = upgrade_report(OLD_REPORT)
    assert report["layout_warning"] == "are these the classes?"
    assert report["multi_label"] is False
    assert report["sizes"]["height"] == {"min": 1, "median": 2, "max": 3}
    assert (report["color"]["split"], report["color"]["gray"]) == ("train", 1)
    assert report["duplicates"]["total"] == 4
    assert (report["against"]["total"], report["against"]["searched_total"]) == (2, 4)
    assert report["against"]["matches"][0]["matched_name"] == "a.jpg"
    assert report["classes"] == OLD_REPORT["classes"]


def test_a_current_report_has_the_upgraded_keys_and_is_not_changed(tmp_path: Path) -> None:
    scan = scan_dataset(open_folder(write_image_folder(tmp_path, "train", "val", each=2)))
    report = audit_dataset(scan, scan)
    assert report["version"] == REPORT_VERSION
    assert upgrade_report(report) == report
    upgraded = upgrade_report(OLD_REPORT)
    assert upgraded.keys() <= report.keys()
    for section in ("color", "duplicates", "against"):
        assert upgraded[section].keys() <= report[section].keys()


def test_the_images_to_leave_out_are_read_from_an_old_report(tmp_path: Path) -> None:
    dataset = open_folder(write_image_folder(tmp_path / "set", "train", "val", each=2))
    path = tmp_path / "data_report.json"
    path.write_text(json.dumps(OLD_REPORT | {"data": dataset.name}))
    assert read_excluded_images(path, dataset) == {("train", "of/1.jpg")}
