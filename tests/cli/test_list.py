"""`vitrail list` of presets and recipes."""

import json

from tests.cli.test_cli import Capture, run


def test_list_names_every_preset(capsys: Capture) -> None:
    code, out, _ = run("list", capsys=capsys)
    assert code == 0
    assert out.startswith("builtin: a pre-trained ViT-Ti/8 (64 pixels, 5.4M parameters), inside the package")
    assert "so400m14" in out
    assert "torchvision" in out
    code, out, _ = run("list", "--json", capsys=capsys)
    facts = json.loads(out)
    assert {model["name"] for model in facts["models"]} >= {"ti16", "b16", "h14", "bigg14"}
    assert facts["builtin"]["name"] == "builtin"
