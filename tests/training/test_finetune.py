"""Fine-tuning through Python, as `vitrail finetune` does."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests import model_factory
from tests.data.image_files import write_image_folder
from tests.training.test_training_run import build_finetune_recipe, build_small_model, open_images
from vitrail.errors import UsageError
from vitrail.training.finetune import (
    FinetuneOptions,
    check_initial_model,
    compute_median_pixels,
    finetune,
    parse_decisions,
    set_preprocess,
    use_whole_images,
)
from vitrail.training.recipe_overrides import RecipeOverrides
from vitrail.training.run_execution import RunCallbacks, RunOptions
from vitrail.weights.load import load, save


def test_runs_of_several_seeds_return_their_facts(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "set", "train", "val", "test", each=4)
    save(build_small_model(), tmp_path / "model.safetensors")
    notes: list[str] = []
    options = FinetuneOptions(
        overrides=RecipeOverrides(epochs=2, batch=4),
        number_of_runs=2,
        run=RunOptions(out=str(tmp_path / "run"), device="cpu", workers=0, seed=5),
    )
    results = finetune(
        str(tmp_path / "set"), str(tmp_path / "model.safetensors"), options, RunCallbacks(notify=notes.append)
    )
    assert [(facts["seed"], facts["folder"]) for facts in results] == [
        (seed, str(tmp_path / "run" / f"seed-{seed}")) for seed in (5, 6)
    ]
    assert {facts["images"] for facts in results} == {8}
    assert [note for note in notes if note.startswith("seed")] == ["seed 5, the last is 6", "seed 6, the last is 6"]
    tuned = load(tmp_path / "run" / "seed-6" / "weights" / "best.safetensors")
    assert tuned.labels == ("rose", "tulip")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"number_of_runs": 0}, "--runs is 0; it must be at least 1"),
        ({"minutes": 0.0}, "--minutes is 0; it must be above 0"),
        ({"minutes": 1.0, "overrides": RecipeOverrides(epochs=3)}, "give --minutes, or --epochs"),
        ({"minutes": 1.0, "replan": "3:5"}, "give --minutes, or --epochs"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FinetuneOptions(**options)


def test_only_a_trained_model_is_started_from_unless_random_weights_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notes: list[str] = []
    with pytest.raises(UsageError, match="--from-scratch starts from the random weights of a preset: name one"):
        check_initial_model(None, FinetuneOptions(from_scratch=True), notes.append)
    with pytest.raises(UsageError, match="s16 is a preset, whose weights are random"):
        check_initial_model("s16", FinetuneOptions(), notes.append)
    with pytest.raises(UsageError, match=r"--from-scratch is for presets, and run/best\.safetensors is none"):
        check_initial_model("run/best.safetensors", FinetuneOptions(from_scratch=True), notes.append)
    assert not notes
    assert check_initial_model("s16", FinetuneOptions(from_scratch=True), notes.append) == "s16"
    assert notes == ["warning: s16 starts with random weights, which have learned nothing"]


def test_without_a_model_it_starts_from_the_built_in_one_and_says_so_once() -> None:
    notes: list[str] = []
    assert check_initial_model(None, FinetuneOptions(), notes.append) == "builtin"
    assert notes == [
        "starting from the built-in ViT-Ti/8 (64 pixels, 5.4M parameters). Larger models gain: from 10 photos of each"
        " class, a probe of DeiT-Tiny at 224 pixels gets 74.4 % of Flowers-102, of the built-in model 67.5 %. To start"
        " from one: --model timm:vit_small_patch16_224.augreg_in21k"
    ]
    assert check_initial_model("builtin", FinetuneOptions(), notes.append) == "builtin"
    assert len(notes) == 1


def test_decisions_are_read_from_text() -> None:
    assert parse_decisions(None) == ()
    assert parse_decisions("3:5,4:6") == ((3, 5), (4, 6))
    for text in ("x", "3", "3:2", "4:9,3:8", "2:3,5:9", "3:5,"):
        with pytest.raises(UsageError, match="--replan is"):
            parse_decisions(text)


def test_a_named_preprocessing_is_for_weights_without_one() -> None:
    model = model_factory.build_trained(model_factory.build_vit())
    assert set_preprocess(model, None) is model
    with pytest.raises(UsageError, match="--preprocess imagenet has"):
        set_preprocess(model, "imagenet")
    bare = dataclasses.replace(model, preprocess=None)
    preprocess = set_preprocess(bare, "inception").preprocess
    assert preprocess is not None
    assert (preprocess.size, preprocess.mean, preprocess.std) == ((32, 32), (0.5,) * 3, (0.5,) * 3)
    stated = set_preprocess(bare, "inception")
    assert set_preprocess(stated, "inception") is stated


def test_the_median_is_of_images_that_can_be_read(tmp_path: Path) -> None:
    dataset = open_images(tmp_path, each=2)  # two of each class: 20 x 24 pixels
    assert compute_median_pixels(dataset) == 480
    train = tmp_path / "set" / "train"
    for path in (train / "rose").iterdir():
        path.write_bytes(b"<html>")
    Image.new("RGB", (10, 10)).save(train / "tulip" / "0.jpg")
    assert compute_median_pixels(dataset) == (480 + 100) // 2


def test_whole_images_are_resized_to_the_input_and_crops_cut_from_larger_ones() -> None:
    model, training = use_whole_images(build_small_model(), build_finetune_recipe(resize=1.25))
    assert model.preprocess is not None
    assert (model.preprocess.size, model.preprocess.resize) == ((32, 32), (32, 32))
    assert (training.size, training.resize) == ((32, 32), (40, 40))
