"""Training from random weights through Python, as `vitrail train` does."""

import json
from pathlib import Path

import pytest

from vitrail.errors import UsageError
from vitrail.training.losses import softmax_cross_entropy
from vitrail.training.pretrain import PretrainingOptions, choose_recipe, pretrain
from vitrail.training.recipe_overrides import RecipeOverrides
from vitrail.training.run_execution import RunCallbacks, RunOptions
from vitrail.weights.load import load

SMALL = ("width=16", "depth=1", "mlp=32", "heads=2")


def make_options(out: Path, **changes: object) -> RunOptions:
    return RunOptions(**{"out": str(out), "device": "cpu", "workers": 0, "seed": 3} | changes)


def test_a_recipe_is_changed_by_settings_overrides_and_target() -> None:
    options = PretrainingOptions(settings=SMALL, overrides=RecipeOverrides(batch=32, lr=0.5), target="pixels")
    with pytest.raises(UsageError, match="target"):
        choose_recipe("digits", options)  # which has labels to learn
    chosen = choose_recipe("mpp-cifar10", options)
    assert (chosen.batch, chosen.optimizer.lr, chosen.settings["width"]) == (32, 0.5, 16)
    assert chosen.masked is not None
    assert chosen.masked.target == "pixels"


def test_a_run_returns_its_facts_and_leaves_a_model(tmp_path: Path) -> None:
    notes: list[str] = []
    options = PretrainingOptions(
        settings=SMALL, overrides=RecipeOverrides(epochs=0.2), run=make_options(tmp_path / "run")
    )
    facts = pretrain("digits", "digits", options, RunCallbacks(notify=notes.append))
    assert facts is not None
    assert (facts["folder"], facts["split"], facts["images"], facts["seed"]) == (str(tmp_path / "run"), "test", 179, 3)
    assert load(tmp_path / "run" / "weights" / "best.safetensors").model.config.width == 16
    assert any(note.startswith("epoch 0.2001: loss") for note in notes)
    audit = json.loads((tmp_path / "run" / "data_report.json").read_text())
    assert audit["bad"] == []
    with pytest.raises(UsageError, match="exists already"):
        pretrain("digits", "digits", options)


def test_a_masked_run_returns_the_loss_of_its_patches(tmp_path: Path) -> None:
    options = PretrainingOptions(
        settings=(*SMALL, "image_size=8", "patch=2", "channels=1"),
        overrides=RecipeOverrides(epochs=0.2, batch=128),
        run=make_options(tmp_path / "run"),
    )
    facts = pretrain("mpp-cifar10", "digits", options)
    assert facts is not None
    assert (facts["split"], facts["images"]) == ("val", 179)
    assert facts["patches"] % 179 == 0
    assert facts["loss"] > 0


@pytest.mark.parametrize("recipe", ["mpp-cifar10", "mae-cifar10"])
def test_a_masked_recipe_refuses_a_loss_of_classes(recipe: str, tmp_path: Path) -> None:
    """It has no logits that the function could be given."""
    options = PretrainingOptions(run=make_options(tmp_path / "run", loss_function=softmax_cross_entropy))
    with pytest.raises(UsageError, match=rf"{recipe} predicts masked patches .*omit `loss`, or choose another target"):
        pretrain(recipe, "no such data", options)
    assert not (tmp_path / "run").exists()
