"""The paper's experiments as values: their variants exist, differ as they say, and take equally many steps."""

import dataclasses

import pytest

from vitrail.recipes import get_recipe
from vitrail.studies.paper_studies import PAPER_STUDIES, describe_architecture
from vitrail.studies.pretraining_study import PretrainingStudy, StudyData, build_variant_recipe, plan_study
from vitrail.training.plan import build_config


def build_study(
    name: str, models: tuple[str, ...] = (), recipe: str = "tiny-imagenet-study", *, runs: int = 3
) -> PretrainingStudy:
    tiny = StudyData(name="tiny-imagenet", title="Tiny", images={"train": 100_000, "val": 10_000}, classes=200)
    cifar = StudyData(name="cifar10", title="CIFAR", images={"train": 50_000, "test": 10_000}, classes=10, share=0.02)
    return plan_study(
        name, models, get_recipe(recipe), tiny, cifar, transfer_epochs=10, runs=runs, seed=0, micro_batches=1
    )


@pytest.mark.parametrize("name", PAPER_STUDIES)
def test_every_variant_is_a_model_that_can_be_trained_and_no_two_are_the_same(name: str) -> None:
    study = build_study(name)
    assert len({variant.name for variant in study.variants}) == len(study.variants)
    recipes = [build_variant_recipe(study, variant) for variant in study.variants]
    configs = [build_config(recipe, study.data.classes) for recipe in recipes]
    keys = {
        (str(config), str(recipe.optimizer), str(recipe.augment), recipe.epochs)
        for config, recipe in zip(configs, recipes, strict=True)
    }
    repeated = 4 if name == "shape" else 0  # the model as it is stands in each of five curves
    assert len(keys) == len(study.variants) - repeated
    baselines = [variant.name for variant in study.variants if PAPER_STUDIES[name].is_baseline(variant)]
    assert baselines == ([PAPER_STUDIES[name].baseline] if PAPER_STUDIES[name].baseline else [])


@pytest.mark.parametrize("name", ["data-size", "size"])
def test_fewer_images_are_seen_more_often(name: str) -> None:
    study = build_study(name)
    fractions = {variant.fraction for variant in study.variants}
    assert fractions == {0.1, 0.3, 1.0}
    seen = {round(build_variant_recipe(study, each).epochs * each.fraction, 6) for each in study.variants}
    assert seen == {30.0}  # epochs over all images, and so equally many steps


def test_only_what_a_study_varies_differs() -> None:
    study = build_study("positions")
    base = study.recipe
    for variant in study.variants:
        recipe = build_variant_recipe(study, variant)
        changed = {name for name in recipe.settings if recipe.settings[name] != base.settings.get(name)}
        assert changed <= {"positions", "positions_at"}
        assert dataclasses.replace(recipe, settings=base.settings) == base


def test_models_of_the_readers_choice_are_varied_too() -> None:
    study = build_study("shape", ("b16", "l16"), "vit-b16-imagenet")
    by_name = {variant.name: build_config(build_variant_recipe(study, variant)) for variant in study.variants}
    assert by_name["l16: depth x 2"].depth == 48
    assert by_name["b16: patch x 2"].patch == 8
    assert by_name["b16: all x 0.5"].width == 384


def test_hybrids_read_small_images_in_as_many_patches_as_vits() -> None:
    study = build_study("data-size")
    by_model = {variant.model: build_config(build_variant_recipe(study, variant)) for variant in study.variants}
    assert by_model["r-ti16"].grid == by_model["ti8"].grid == (6, 6)
    full = build_study("data-size", ("r50-b16",), "vit-b16-imagenet")
    assert build_config(build_variant_recipe(full, full.variants[0])).patch == 1  # the paper's own


def test_a_resnet_has_none_of_the_settings_of_the_papers_vits() -> None:
    study = build_study("optimizer", ("bit-r50x1",), "vit-b16-i21k")
    assert study.recipe.settings == {"hidden_head": True}
    assert {str(build_variant_recipe(study, variant).settings) for variant in study.variants} == {"{}"}


def test_architectures_are_named() -> None:
    assert [describe_architecture(name) for name in ("b16", "r50-b16", "bit-r50x1")] == ["ViT", "hybrid", "ResNet"]
