"""Studies of pre-training: their cells, the choice of learning rates, and comparisons seed by seed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tests import model_factory
from tests.data.image_files import write_image_folder
from tests.studies.test_paper_studies import build_study
from vitrail.data.sources import open_dataset
from vitrail.errors import CellsError
from vitrail.evaluation.statistics import paired_interval
from vitrail.studies import pretraining_study
from vitrail.studies.grid_cell import reset_positions, take_fraction_of_train


def result(stage: str, variant: str, **fields: Any) -> dict[str, Any]:
    return {"stage": stage, "variant": variant, "status": "done", "seed": 0, "cell": f"{stage}-{variant}"} | fields


def test_rates_are_tried_once_and_the_best_on_val_is_used_by_every_seed() -> None:
    study = build_study("head", runs=2)
    cells = pretraining_study.list_rate_cells(study)
    assert [(cell.result_fields["variant"], cell.recipe.optimizer.lr) for cell in cells[:3]] == [
        ("class token", 3e-4),
        ("class token", 1e-3),
        ("class token", 3e-3),
    ]
    tried = [
        result("rate", variant.name, lr=lr, correct=correct, loss=loss)
        for variant in study.variants
        for lr, correct, loss in ((3e-4, 5, 1.0), (1e-3, 7, 0.9), (3e-3, 7, 0.8))
    ]
    rates = pretraining_study.choose_rates(study, tried)
    assert set(rates.values()) == {3e-3}
    final = pretraining_study.list_pretraining_cells(study, rates)
    assert [cell.seed for cell in final] == [0, 0, 0, 1, 1, 1]
    assert {cell.recipe.optimizer.lr for cell in final} == {3e-3}
    assert all(
        cell.keep_weights and cell.few_shot == {"data": {"name": "cifar10", "share": 0.02}, "shots": 5}
        for cell in final
    )
    diverged = [dict(each, status="diverged") if each["variant"] == "class token" else each for each in tried]
    with pytest.raises(CellsError, match="class token diverged"):
        pretraining_study.choose_rates(study, diverged)


def test_each_pretrained_model_is_fine_tuned_in_each_way() -> None:
    study = build_study("resolution")
    trained = [result("pretrain", "ti8", cell=f"pretrain-ti8-seed-{seed}", seed=seed) for seed in range(3)]
    failed = result("pretrain", "ti8", status="failed")
    cells = pretraining_study.list_transfer_cells(study, Path("study"), [*trained, failed])
    assert len({cell.name for cell in cells}) == len(cells) == 9
    assert [cell.recipe.image_size for cell in cells] == [48] * 3 + [64] * 6
    assert [cell.reset_positions for cell in cells] == [False] * 6 + [True] * 3
    assert cells[4].model == "study/cells/pretrain-ti8-seed-1/run/weights/best.safetensors"
    assert {(cell.eval_split, cell.data["name"]) for cell in cells} == {("test", "cifar10")}


def test_variants_are_compared_with_the_baseline_seed_by_seed() -> None:
    study = build_study("positions")
    values = {"1-D": (0.50, 0.52, 0.54), "none": (0.40, 0.43, 0.44), "2-D": (0.501, 0.519, 0.541)}
    results = [
        result("pretrain", name, seed=seed, top1=top1, few_shot=top1 / 2, lr=1e-3)
        for name, accuracies in values.items()
        for seed, top1 in enumerate(accuracies)
    ]
    summary = pretraining_study.summarize_study(study, results)
    assert summary["variants"]["none"]["measures"]["5-shot"]["n"] == 3
    by_name = {(each["variant"], each["measure"]): each for each in summary["comparisons"]}
    assert by_name["none", "val"]["difference"] == pytest.approx(-0.29 / 3)
    assert (by_name["none", "val"]["verdict"], by_name["2-D", "val"]["verdict"]) == ("worse", "equal")
    low, high = by_name["none", "val"]["interval"]
    expected = stats.t.interval(0.95, 2, loc=-0.29 / 3, scale=stats.sem([-0.10, -0.09, -0.10]))
    assert (low, high) == pytest.approx(expected, rel=1e-6)


def test_each_models_variants_are_compared_with_its_own_baseline() -> None:
    study = build_study("positions", ("ti8", "s8"))
    results = [
        result("pretrain", variant.name, top1=0.5 if variant.model == "ti8" else 0.7, few_shot=0.1, lr=1e-3)
        for variant in study.variants
    ]
    comparisons = pretraining_study.summarize_study(study, results)["comparisons"]
    assert len(comparisons) == 2 * 7 * 2  # models, variants beside the baseline, measures
    assert {each["difference"] for each in comparisons} == {0.0}
    assert {(each["variant"][:3], each["baseline"]) for each in comparisons} == {
        ("ti8", "ti8: 1-D"),
        ("s8:", "s8: 1-D"),
    }


@pytest.mark.parametrize(
    ("interval", "equivalence", "verdict"),
    [
        (None, 0.01, "one seed"),
        ((-0.005, 0.009), 0.01, "equal"),
        ((-0.02, 0.005), 0.01, "undecided"),
        ((0.001, 0.002), None, "better"),
        ((-0.03, -0.02), 0.01, "worse"),
    ],
)
def test_a_difference_is_judged_by_its_interval(interval: Any, equivalence: float | None, verdict: str) -> None:
    assert pretraining_study.judge_difference(interval, equivalence) == verdict


def test_the_interval_of_one_difference_is_unknown() -> None:
    assert paired_interval([0.1]) is None


def test_a_fraction_of_train_is_drawn_class_by_class_and_is_part_of_a_larger_one(tmp_path: Path) -> None:
    dataset = open_dataset(write_image_folder(tmp_path / "set", "train", "val", each=10))
    tenth, third = take_fraction_of_train(dataset, 0.1), take_fraction_of_train(dataset, 0.34)
    rows = [set(np.asarray(each.splits["train"].rows).tolist()) for each in (tenth, third, dataset)]
    assert rows[0] < rows[1] < rows[2]
    classes = len(dataset.classes)
    assert third.splits["train"].count_per_class(classes).tolist() == [3] * classes
    assert tenth.splits["val"] is dataset.splits["val"]


def test_positions_are_drawn_anew_and_nothing_else_changes() -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    before = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    reset_positions(trained, seed=1)
    changed = [name for name, tensor in trained.model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed == ["pos_embed"]
    first = trained.model.pos_embed.clone()
    reset_positions(trained, seed=1)
    assert torch.equal(trained.model.pos_embed, first)
