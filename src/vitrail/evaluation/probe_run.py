"""Probe a model on a dataset: extract or reuse its features, fit the classifiers, and save the best head."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.data.dataset import Dataset, Split
from vitrail.data.sources import advise_data_check
from vitrail.errors import DataError, RemoteError, UsageError
from vitrail.evaluation import features, label_probe, probe
from vitrail.evaluation.label_probe import FittedLabelProbe, LabelProbeScore
from vitrail.evaluation.linear_classifiers import Features
from vitrail.evaluation.probe import FittedProbe, ProbeScore, ProbeSplits
from vitrail.formatting import pluralize
from vitrail.runtime import distributed
from vitrail.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from vitrail.runtime.workers import Notify, ShowProgress, hide_progress, ignore_note
from vitrail.weights.formats import check_destination
from vitrail.weights.load import save
from vitrail.weights.trained import Trained, require_preprocess

AnyScore = ProbeScore | LabelProbeScore
AnyFitted = FittedProbe | FittedLabelProbe
ProbeMethod = Literal["few-shot", "knn", "linear", "logistic"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """What is fitted, and how it is computed."""

    methods: Sequence[ProbeMethod] = ("few-shot", "knn", "linear", "logistic")
    shots: tuple[int, ...] = ()
    """Images per class for few-shot; empty for the paper's, as far as every class has them."""
    seeds: int = 3
    penalty: float | None = 1024.0
    """Of the ridge regressions; None to choose it on images that are not measured."""
    k: int = 20
    train_on_val: bool = False
    segmentation: Path | None = None
    """A folder of masks, to classify patches instead of images."""
    save: Path | None = None
    """Where to write the model with the best linear head."""
    overwrite: bool = False
    batch: int = 64
    workers: int = 0
    group: ProcessGroup = SINGLE_PROCESS
    device: torch.device
    show_progress: ShowProgress = hide_progress
    notify: Notify = ignore_note

    def __post_init__(self) -> None:
        numbers = {"batch": self.batch, "seeds": self.seeds, "k": self.k, "shots": min(self.shots, default=1)}
        for name, number in numbers.items():
            if number < 1:
                raise UsageError(f"--{name} is {number}; it must be at least 1")
        if self.penalty is not None and not self.penalty > 0:
            raise UsageError(f"--lambda is {self.penalty:g}; it must be above 0, or auto")
        if not self.methods:
            raise UsageError("--methods is empty: give few-shot, knn, linear or logistic")
        if self.save is not None:
            check_destination(self.save, "vitrail", overwrite=self.overwrite)
            if not {"linear", "logistic"} & set(self.methods):
                raise UsageError("--save writes a linear head: add linear or logistic to --methods")
        if self.segmentation is not None:
            if self.save is not None:
                raise UsageError(
                    "--save writes a classifier of images, and --segmentation fits one of patches: omit one"
                )
            if not {"linear", "logistic"} & set(self.methods):
                raise UsageError("--segmentation fits a linear classifier: add linear or logistic to --methods")


def run_probe(trained: Trained, dataset: Dataset, data: str, settings: ProbeSettings) -> dict[str, Any] | None:
    """Probe the model; return the facts for JSON on rank 0, and None on the others.

    `data` is the name by which the dataset was opened, for advice in errors.
    """
    targets = _read_targets(dataset, train_on_val=settings.train_on_val)
    shots = _choose_shots(targets, dataset, settings) if "few-shot" in settings.methods else ()
    start = time.monotonic()
    values, cached = extract_dataset_features(trained, dataset, data, settings)
    if not settings.group.is_rank0:
        return None
    seconds = time.monotonic() - start
    solver_device = settings.device if settings.device.type == "cuda" else torch.device("cpu")  # mps has no float64
    by_split = {name: Features(values[name].to(solver_device), targets[name].to(solver_device)) for name in values}
    splits = probe.split_features(by_split, train_on_val=settings.train_on_val)
    scores, fitted = _fit_classifiers(splits, dataset.classes, shots, settings)
    return {
        "cached": cached,
        "seconds": seconds,
        **_collect_facts(dataset, splits, scores, train_on_val=settings.train_on_val),
        "saved": None if settings.save is None else _save_with_head(trained, fitted, dataset, splits, settings),
    }


# --- before anything is computed -------------------------------------------------------------------------------------


def _read_targets(dataset: Dataset, *, train_on_val: bool) -> dict[str, Tensor]:
    """The classes or multi-label targets of each split's images, if they can be learned."""
    if not dataset.classes:
        raise DataError(
            f"{dataset.name} has no labels to learn: sort the images into one folder per class, or list them with"
            " labels"
        )
    names = ", ".join(dataset.splits)
    if "train" not in dataset.splits or len(dataset.splits) < 2:
        raise DataError(f"{dataset.name} has the splits {names}; a probe needs train, and test or val to measure on")
    if train_on_val and len(dataset.splits) < 3:
        raise UsageError(f"--train-on-val trains on val and measures on test, and {dataset.name} has {names}")
    targets = {name: features.read_labels(split, len(dataset.classes)) for name, split in dataset.splits.items()}
    for name in dataset.classes:
        if not name.isascii() and name.encode(errors="replace").decode() != name:
            raise DataError(f"the class {name!r} has no valid name in UTF-8: rename its folder")
    return targets


def _choose_shots(targets: dict[str, Tensor], dataset: Dataset, settings: ProbeSettings) -> tuple[int, ...]:
    """The requested numbers of images, or those of the paper for which every class has enough."""
    trained_on = torch.cat([targets["train"], targets["val"]]) if settings.train_on_val else targets["train"]
    if settings.shots:
        probe.check_shots(trained_on, dataset.classes, max(settings.shots))
        return settings.shots
    counts = probe.count_per_class(trained_on, len(dataset.classes))
    smallest = int(counts.argmin())
    possible = tuple(shots for shots in probe.DEFAULT_SHOTS if shots <= counts[smallest])
    if omitted := [f"{shots}-shot" for shots in probe.DEFAULT_SHOTS if shots not in possible]:
        settings.notify(
            f"note: skipped {', '.join(omitted)}: {dataset.classes[smallest]} has only {counts[smallest]} training"
            " images"
        )
    return possible


# --- features --------------------------------------------------------------------------------------------------------


def extract_dataset_features(
    trained: Trained, dataset: Dataset, data: str, settings: ProbeSettings
) -> tuple[dict[str, Tensor], list[str]]:
    """The features of each split's images, all of them on rank 0, and the splits whose features were cached."""
    preprocess, group = require_preprocess(trained), settings.group
    digest = features.digest_model(trained.model) if group.is_rank0 else ""
    trained.model.to(settings.device)
    values: dict[str, Tensor] = {}
    cached: list[str] = []
    for name, split in dataset.splits.items():
        path = stored = None
        if group.is_rank0:
            path = features.build_cache_path(digest, features.digest_images(split), preprocess)
            stored = features.load_cached_features(path)
        if stored is not None:
            values[name] = stored
            cached.append(name)
        if not distributed.broadcast("" if stored is None else "known"):
            values[name] = extract_split(trained, dataset.splits[name], name, data, settings)
            if path is not None:
                features.cache_features(path, values[name])
    if cached:
        settings.notify(f"features of {', '.join(cached)}: from the cache")
    return values, cached


def extract_split(
    trained: Trained,
    split: Split,
    name: str,
    data: str,
    settings: ProbeSettings,
    *,
    dense_grid: tuple[int, int] | None = None,
) -> Tensor:
    """The features of a split's images, or with a grid of patches their dense features."""
    group = settings.group
    with settings.show_progress(f"features of {name}") as progress:
        try:
            return features.extract_split_features(
                trained.model,
                split,
                require_preprocess(trained),
                group,
                dense_grid=dense_grid,
                batch=settings.batch,
                workers=settings.workers,
                progress=lambda done, total: progress(min(done * group.world_size, total), total),  # of all ranks
            )
        except RemoteError:
            raise
        except DataError as error:
            raise DataError(f"{error}.{advise_data_check(data)}") from error


# --- classifiers -----------------------------------------------------------------------------------------------------


def _fit_classifiers(
    splits: ProbeSplits, names: tuple[str, ...], shots: tuple[int, ...], settings: ProbeSettings
) -> tuple[list[AnyScore], list[AnyFitted]]:
    """The scores of all methods, and the classifiers that can be a model's head."""
    kind = label_probe if splits.train.multi_label else probe
    scores: list[AnyScore] = []
    fitted: list[AnyFitted] = []
    with settings.show_progress("classifiers") as progress:
        for done, method in enumerate(settings.methods):
            progress(done, len(settings.methods))
            match method:
                case "few-shot":
                    scores += [
                        kind.score_few_shot(splits, names, number, seeds=settings.seeds, penalty=settings.penalty)
                        for number in shots
                    ]
                case "knn":
                    scores.append(kind.score_knn(splits, len(names), settings.k))
                case "linear":
                    fitted.append(kind.fit_linear(splits, len(names), settings.penalty))
                case "logistic":
                    fitted.append(kind.fit_logistic(splits, len(names)))
    return [*scores, *(classifier.score for classifier in fitted)], fitted


def _save_with_head(
    trained: Trained, fitted: list[AnyFitted], dataset: Dataset, splits: ProbeSplits, settings: ProbeSettings
) -> dict[str, Any]:
    """Write the model with the best of the heads, and describe it."""
    assert settings.save is not None
    best = max(fitted, key=lambda classifier: classifier.tuning_score)
    name, number = best.score.setting
    images = pluralize(best.score.train_images, "image")
    change = f"head: {best.score.method} probe of {dataset.name}, {name} {number:g}, {images}"
    thresholds = best.label_thresholds if isinstance(best, FittedLabelProbe) else ()
    with_head = probe.replace_head(
        trained, best.head, dataset.classes, best.temperature, change, label_thresholds=thresholds
    )
    save(with_head, settings.save, overwrite=settings.overwrite)
    return {
        "path": str(settings.save),
        "method": best.score.method,
        "chosen": best.tuning_score if len(splits.tuning_val.targets) else None,
        "temperature": best.temperature,
        **({"label_thresholds": dict(zip(dataset.classes, thresholds, strict=True))} if thresholds else {}),
    }


def _collect_facts(
    dataset: Dataset, splits: ProbeSplits, scores: list[AnyScore], *, train_on_val: bool
) -> dict[str, Any]:
    has_test = "test" in dataset.splits
    return {
        "data": dataset.name,
        "classes": len(dataset.classes),
        "features": splits.train.values.shape[1],
        "split": "test" if has_test else "val",
        "images": len(splits.test.targets),
        "chosen_on": "val" if has_test and "val" in dataset.splits else "a fifth of train",
        "train_on_val": train_on_val,
        "scores": [
            {
                "method": score.method,
                "shots": score.shots,
                "learned": score.train_images,
                score.setting[0]: score.setting[1],
                **score.to_dict(),
            }
            for score in scores
        ],
    }
