"""`vitrail list` of presets and recipes."""

import json

from tests.cli.test_cli import Capture, run


def test_list_names_every_preset(capsys: Capture) -> None:
    code, out, _ = run("list", capsys=capsys)
    assert code == 0
    assert "so400m14" in out
    assert "torchvision" in out
    code, out, _ = run("list", "--json", capsys=capsys)
    assert {model["name"] for model in json.loads(out)["models"]} >= {"ti16", "b16", "h14", "bigg14"}
