"""Run an experiment of `paper_studies`: pre-train every variant, transfer it, and compare variants seed by seed.

    rates      where variants have learning rates to choose from: one run at each, and the best on val
    pretrain   a run of each variant with each seed; val, and 5-shot ridge regression on the transfer dataset
    transfer   each of these models fine-tuned on the transfer dataset

A run on a part of the training images takes as many steps as on all of them. The weights of the best epoch on val are
measured and fine-tuned.
"""

import dataclasses
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail import presets, recipes
from vitrail.config import BiTConfig, Recipe
from vitrail.config.model import expand_image_size
from vitrail.data.dataset import Dataset
from vitrail.errors import CellsError, DivergedError, UsageError
from vitrail.evaluation.statistics import paired_interval
from vitrail.model import cost
from vitrail.studies.grid import CELLS_FOLDER, Cell, CellResult, check_positive, compute_mean_and_std
from vitrail.studies.paper_studies import PAPER_STUDIES, Transfer, Variant
from vitrail.training.plan import TPU_NAME, PlannedMachine, build_config, plan_run
from vitrail.training.recipe_overrides import scale_warmup

VAL_SHARE = 0.1  # of train that becomes val if the dataset has none
FEW_SHOTS = 5  # images per class of the ridge regression
_SMALL_IMAGE, _SMALL_STRIDE = 96, 8  # pixels of a side, and from one patch to the next
_UNSAFE_CHARACTERS = re.compile(r"[^\w.+-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyData:
    """A dataset of a study."""

    name: str
    """The name it was opened by."""
    title: str
    """Its own name."""
    images: dict[str, int]
    """Of each split."""
    classes: int
    share: float = VAL_SHARE
    """The share of train that becomes val if the dataset has none."""
    val_is_test: bool = False
    """Whether its val is the test split, and part of train is val."""

    @property
    def cell_data(self) -> dict[str, Any]:
        """The dataset of a cell."""
        return {"name": self.name, "share": self.share} | ({"val_is_test": True} if self.val_is_test else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingStudy:
    """An experiment on one dataset: everything that decides its results."""

    study: str
    """Its name in PAPER_STUDIES."""
    data: StudyData
    transfer_data: StudyData
    recipe: Recipe
    """Of the variants, before their settings."""
    variants: tuple[Variant, ...]
    few_shot: bool
    transfers: tuple[Transfer, ...]
    transfer_epochs: float
    runs: int
    seed: int
    micro_batches: int

    def __post_init__(self) -> None:
        check_positive(runs=self.runs, micro_batches=self.micro_batches)
        if self.transfer_epochs <= 0:
            raise UsageError(f"--transfer-epochs is {self.transfer_epochs:g}; it must be above 0")


def describe_data(name: str, dataset: Dataset, share: float = VAL_SHARE, *, val_is_test: bool = False) -> StudyData:
    """The dataset of that name, for a study."""
    images = {part: len(split) for part, split in dataset.splits.items()}
    return StudyData(
        name=name,
        title=dataset.name,
        images=images,
        classes=len(dataset.classes),
        share=share,
        val_is_test=val_is_test,
    )


def plan_study(
    name: str,
    models: tuple[str, ...],
    recipe: Recipe,
    data: StudyData,
    transfer_data: StudyData,
    *,
    transfer_epochs: float,
    runs: int,
    seed: int,
    micro_batches: int,
) -> PretrainingStudy:
    """The experiment of that name; `models` replace its own, if any are given."""
    if recipe.masked is not None:
        raise UsageError("a recipe without labels has no accuracy to compare: choose a supervised one")
    paper_study = PAPER_STUDIES[name]
    planned = PretrainingStudy(
        study=name,
        data=data,
        transfer_data=transfer_data,
        recipe=recipe,
        variants=paper_study.build_variants(models or paper_study.models),
        few_shot=paper_study.few_shot,
        transfers=paper_study.transfers,
        transfer_epochs=transfer_epochs,
        runs=runs,
        seed=seed,
        micro_batches=micro_batches,
    )
    for variant in planned.variants:
        build_config(build_variant_recipe(planned, variant))  # refuses a wrong setting before anything runs
    return planned


def build_variant_recipe(study: PretrainingStudy, variant: Variant, lr: float | None = None) -> Recipe:
    """The recipe of a variant, at a learning rate of its own if one is given."""
    recipe = recipes.override_settings(
        _choose_model(study.recipe, variant.model), variant.settings, recipes.ABLATION_RESERVED
    )
    recipe = _shrink_hybrid_patch(recipe)
    if variant.length != 1:
        recipe = scale_warmup(recipe, variant.length)
    optimizer = recipe.optimizer if lr is None else dataclasses.replace(recipe.optimizer, lr=lr)
    return dataclasses.replace(recipe, epochs=recipe.epochs * variant.length / variant.fraction, optimizer=optimizer)


def _choose_model(recipe: Recipe, model: str) -> Recipe:
    """The recipe for another preset; a ResNet has no dropout and none of a ViT's settings, such as the hidden head."""
    config = presets.get_preset_config(model)
    fields = {field.name for field in dataclasses.fields(config)}
    settings = {name: value for name, value in recipe.settings.items() if name in fields}
    recipe = dataclasses.replace(recipe, model=model, settings=settings)
    return dataclasses.replace(recipe, dropout=0.0, stochastic_depth=0.0) if isinstance(config, BiTConfig) else recipe


def _shrink_hybrid_patch(recipe: Recipe) -> Recipe:
    """The recipe; of a hybrid on small images with smaller patches than its preset's, which would be too few."""
    assert recipe.model is not None
    config = presets.get_preset_config(recipe.model)
    if isinstance(config, BiTConfig) or config.stem is None:
        return recipe
    if max(expand_image_size(recipe.image_size or 224)) > _SMALL_IMAGE or config.stride <= _SMALL_STRIDE:
        return recipe
    patch = max(1, _SMALL_STRIDE // config.stem.stride)
    return dataclasses.replace(recipe, settings={**recipe.settings, "patch": patch})


# --- cells -----------------------------------------------------------------------------------------------------------


def list_rate_cells(study: PretrainingStudy) -> list[Cell]:
    """A run of each variant at each of its learning rates, with the first seed."""
    return [
        _make_pretraining_cell(study, variant, "rate", study.seed, lr)
        for variant in study.variants
        for lr in variant.rates
    ]


def list_pretraining_cells(study: PretrainingStudy, rates: Mapping[str, float]) -> list[Cell]:
    """A run of each variant with each seed, at its chosen learning rate."""
    return [
        _make_pretraining_cell(study, variant, "pretrain", seed, rates.get(variant.name))
        for seed in range(study.seed, study.seed + study.runs)
        for variant in study.variants
    ]


def _make_pretraining_cell(study: PretrainingStudy, variant: Variant, stage: str, seed: int, lr: float | None) -> Cell:
    recipe = build_variant_recipe(study, variant, lr)
    is_final = stage == "pretrain"
    suffix = f"seed-{seed}" if is_final else f"rate-{lr:g}"
    return Cell(
        name=f"{stage}-{_make_file_name(variant.name)}-{suffix}",
        result_fields={"stage": stage, "variant": variant.name, "lr": recipe.optimizer.lr, "seed": seed},
        model=str(recipe.model),
        data=study.data.cell_data | ({"fraction": variant.fraction} if variant.fraction < 1 else {}),
        recipe=recipe,
        seed=seed,
        eval_split="val",
        micro_batches=study.micro_batches,
        keep_weights=is_final,
        few_shot={"data": study.transfer_data.cell_data, "shots": FEW_SHOTS} if is_final and study.few_shot else None,
    )


def list_transfer_cells(study: PretrainingStudy, folder: Path, results: Iterable[CellResult]) -> list[Cell]:
    """Fine-tuning of each pre-trained model in each of the study's ways."""
    variants = {variant.name: variant for variant in study.variants}
    trained = [result for result in results if result["stage"] == "pretrain" and result["status"] == "done"]
    return [
        _make_transfer_cell(study, transfer, variants[result["variant"]], folder, result)
        for transfer in study.transfers
        for result in trained
    ]


def _make_transfer_cell(
    study: PretrainingStudy, transfer: Transfer, variant: Variant, folder: Path, result: CellResult
) -> Cell:
    config = build_config(build_variant_recipe(study, variant))
    stride = 1 if isinstance(config, BiTConfig) else config.stride
    side = max(1, round(config.image_size[0] * transfer.image_size_factor / stride)) * stride
    recipe = recipes.build_finetune_recipe(
        "default", study.transfer_data.images["train"], stride, epochs=study.transfer_epochs
    )
    name, seed = _make_file_name(variant.name), result["seed"]
    return Cell(
        name=f"transfer-{_make_file_name(transfer.name)}-{name}-seed-{seed}",
        result_fields={"stage": "transfer", "transfer": transfer.name, "variant": variant.name, "seed": seed},
        model=str(folder / CELLS_FOLDER / result["cell"] / "run" / "weights" / "best.safetensors"),
        data=study.transfer_data.cell_data,
        recipe=dataclasses.replace(recipe, image_size=side),
        reset_positions=transfer.reset_positions,
        seed=seed,
        eval_split="test",
        micro_batches=study.micro_batches,
    )


def _make_file_name(name: str) -> str:
    return _UNSAFE_CHARACTERS.sub("-", name.replace("%", "pct")).strip("-")[:60]


def choose_rates(study: PretrainingStudy, results: Sequence[CellResult]) -> dict[str, float]:
    """The learning rate of each variant that has several: the most correct images on val, then the lowest loss."""
    rates: dict[str, float] = {}
    for variant in study.variants:
        done = [
            result
            for result in results
            if (result["stage"], result["variant"], result["status"]) == ("rate", variant.name, "done")
        ]
        if done:
            rates[variant.name] = float(max(done, key=lambda result: (result["correct"], -result["loss"]))["lr"])
        elif variant.rates:
            message = f"{variant.name} diverged at every learning rate"
            raise CellsError(message, DivergedError.exit_code)
    return rates


# --- results ---------------------------------------------------------------------------------------------------------


def summarize_study(study: PretrainingStudy, results: Sequence[CellResult]) -> dict[str, Any]:
    """Each variant's cost and accuracies over the seeds, and its differences from the baseline."""
    paper_study = PAPER_STUDIES[study.study]
    by_seed = {variant.name: _collect_accuracies(results, variant.name) for variant in study.variants}
    rates = {result["variant"]: result["lr"] for result in results if result["stage"] == "pretrain"}
    variants = {
        variant.name: {
            "curve": variant.curve,
            **describe_cost(study, variant),
            "lr": rates.get(variant.name),
            "measures": {
                measure: compute_mean_and_std(list(values.values()))
                for measure, values in by_seed[variant.name].items()
            },
        }
        for variant in study.variants
    }
    return {
        "study": study.study,
        "question": paper_study.question,
        "paper": paper_study.paper,
        "expectation": paper_study.expectation,
        "dataset": study.data.title,
        "images": study.data.images,
        "transfer_data": study.transfer_data.title if study.few_shot or study.transfers else None,
        "x_name": paper_study.x_name,
        "variants": variants,
        "comparisons": _compare_with_baselines(study, by_seed),
    }


def _collect_accuracies(results: Iterable[CellResult], variant: str) -> dict[str, dict[int, float]]:
    """The accuracies of a variant by what was measured, each by seed."""
    accuracies: dict[str, dict[int, float]] = {}
    for result in results:
        if result["variant"] != variant or result["status"] != "done" or result["stage"] == "rate":
            continue
        name = result["transfer"] if result["stage"] == "transfer" else "val"
        accuracies.setdefault(name, {})[result["seed"]] = result["top1"]
        if "few_shot" in result:
            accuracies.setdefault(f"{FEW_SHOTS}-shot", {})[result["seed"]] = result["few_shot"]
    return accuracies


def describe_cost(study: PretrainingStudy, variant: Variant, gpu: str = "h200") -> dict[str, Any]:
    """What a run of pre-training takes, and the variant's place on the plot's axis."""
    recipe = build_variant_recipe(study, variant)
    images = round(study.data.images["train"] * variant.fraction)
    facts = plan_run(recipe, images, PlannedMachine(gpu=gpu), classes=study.data.classes)
    tpu_facts = plan_run(recipe, images, PlannedMachine(gpu=TPU_NAME), classes=study.data.classes)
    multiply_adds = cost.count_multiply_adds(build_config(recipe, study.data.classes))
    places = {"training images": images, "exaFLOPs": facts["exaflops"], "GFLOPs of an image": 2 * multiply_adds / 1e9}
    return {
        "parameters": facts["parameters"],
        "training_images": images,
        "steps": facts["steps"],
        "exaflops": facts["exaflops"],
        "gpu_days": facts["gpu_days"],
        "tpuv3_core_days": tpu_facts["gpu_days"],
        "x": places.get(PAPER_STUDIES[study.study].x_name),
    }


def _compare_with_baselines(
    study: PretrainingStudy, by_seed: Mapping[str, Mapping[str, Mapping[int, float]]]
) -> list[dict[str, Any]]:
    """The difference of each variant from its model's baseline in each measure, over the seeds that both have."""
    paper_study = PAPER_STUDIES[study.study]
    baselines = {each.model: each.name for each in study.variants if paper_study.is_baseline(each)}
    comparisons = []
    for variant in study.variants:
        baseline = baselines.get(variant.model, variant.name)
        for measure, values in by_seed[variant.name].items() if variant.name != baseline else ():
            reference = by_seed[baseline].get(measure, {})
            if differences := [values[seed] - reference[seed] for seed in values if seed in reference]:
                interval = paired_interval(differences)
                comparisons.append(
                    {
                        "variant": variant.name,
                        "baseline": baseline,
                        "measure": measure,
                        "difference": statistics.mean(differences),
                        "interval": interval,
                        "verdict": judge_difference(interval, paper_study.equivalence),
                    }
                )
    return comparisons


def judge_difference(interval: tuple[float, float] | None, equivalence: float | None) -> str:
    """What the 95 % interval of a difference says: better, worse, equal within the bound, or nothing."""
    if interval is None:
        return "one seed"
    low, high = interval
    if equivalence is not None and -equivalence < low and high < equivalence:
        return "equal"
    return "better" if low > 0 else "worse" if high < 0 else "undecided"
