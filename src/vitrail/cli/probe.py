"""`vitrail probe MODEL DATA`: what a model's features are worth on a set of images, without training the model."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vitrail.cli import output, runs
from vitrail.errors import DataError, ModelError, UsageError
from vitrail.remote import RemoteError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vitrail.data.dataset import Dataset
    from vitrail.evaluate.probe import FittedProbe, ProbeScore, ProbeSplits
    from vitrail.runtime.distributed import ProcessGroup
    from vitrail.weights.trained import Trained

ProbeMethod = Literal["few-shot", "knn", "linear", "logistic"]


def main(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    methods: tuple[ProbeMethod, ...] = ("few-shot", "knn", "linear", "logistic"),
    shots: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N...")] = (),
    seeds: Annotated[int, tyro.conf.arg(metavar="N")] = 3,
    penalty: Annotated[float | Literal["auto"], tyro.conf.arg(name="lambda", metavar="NUMBER|auto")] = 1024.0,
    k: Annotated[int, tyro.conf.arg(metavar="N")] = 20,
    train_on_val: bool = False,
    save: Annotated[Path | None, tyro.conf.arg(metavar="OUT.safetensors")] = None,
    overwrite: bool = False,
    preprocess: Literal["imagenet", "inception", "torchvision"] | None = None,
    batch: Annotated[int, tyro.conf.arg(metavar="N")] = 64,
    device: str | None = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    json: bool = False,
) -> None:
    """Measure a model's features by simple classifiers that learn from them: the paper's few-shot, kNN and others.

    Args:
        model: A file or folder of any known format, hf:ORG/NAME, timm:NAME, or a preset, whose weights are random.
        data: A folder, a .csv or .jsonl, shards, a set that was got, digits, or hf:ORG/NAME.
        methods: Ridge regression from a few images a class, nearest neighbours, ridge regression, logistic regression.
        shots: Images a class for few-shot; 1, 5, 10 and 25 as far as every class has them, unless told otherwise.
        seeds: Draws of these images, for mean and standard deviation.
        penalty: Of the ridge regressions; auto chooses it, on images that are not measured.
        k: Neighbours that vote.
        everything: Learn from the validation images too, once settings are chosen.
        save: Write the model with the better of linear and logistic as its head, and its temperature fitted.
        overwrite: Replace a file of that name.
        preprocess: Mean, std and interpolation for weights that do not state them.
        batch: Images at once.
        device: cpu, cuda or mps; the best there is unless told otherwise.
        workers: Processes that prepare images; one for each core but one unless told otherwise.
        json: Print the result as JSON.
    """
    import torch

    from vitrail.data.sources import open_dataset
    from vitrail.evaluate import probe
    from vitrail.runtime.workers import count_available_cores
    from vitrail.train.dataset_checks import check_classes
    from vitrail.train.finetune import set_preprocess
    from vitrail.weights.load import check_loadable, load

    check_loadable(model)
    _check_options(methods, save, overwrite=overwrite, batch=batch, seeds=seeds, k=k, shots=min(shots, default=1))
    if penalty != "auto" and not penalty > 0:
        raise UsageError(f"--lambda is {penalty:g}; it must be above 0, or auto")
    with runs.join_processes(device) as (group, there):
        dataset = open_dataset(data)
        trained = set_preprocess(load(model), preprocess)
        runs.print_dataset_notes(dataset)
        check_classes(dataset)
        targets = _read_targets(dataset, train_on_val=train_on_val)
        shots = _choose_shots(shots, targets, dataset, train_on_val=train_on_val) if "few-shot" in methods else ()
        processes = max(0, count_available_cores() - 1) if workers is None else workers
        begun = time.monotonic()
        values, cached = _extract_features(trained, dataset, data, group, there, batch=batch, workers=processes)
        if not group.is_rank0:
            return
        facts = {"model": model, "cached": cached, "seconds": time.monotonic() - begun}
        solver = there if there.type == "cuda" else torch.device("cpu")  # Apple's GPUs have no float64
        images = {name: probe.Features(values[name].to(solver), targets[name].to(solver)) for name in values}
        of = probe.split_features(images, train_on_val=train_on_val)
        number = None if penalty == "auto" else penalty
        scores, fitted = _fit_classifiers(of, dataset.classes, methods, shots, seeds=seeds, penalty=number, k=k)
        facts |= _collect_facts(dataset, of, scores, train_on_val=train_on_val)
        facts["saved"] = (
            None if save is None else _save_with_head(trained, fitted, dataset, of, save, overwrite=overwrite)
        )
        if json:
            output.print_json(facts)
        else:
            _print_scores(facts)


# --- before anything is computed -------------------------------------------------------------------------------------


def _check_options(methods: tuple[ProbeMethod, ...], save: Path | None, *, overwrite: bool, **numbers: int) -> None:
    """Refuse what cannot be meant."""
    from vitrail.weights.load import check_destination

    for name, number in numbers.items():
        if number < 1:
            raise UsageError(f"--{name} is {number}; it must be at least 1")
    if not methods:
        raise UsageError("--methods names none: give few-shot, knn, linear or logistic")
    if save is not None:
        check_destination(save, "vitrail", overwrite=overwrite)
        if not {"linear", "logistic"} & set(methods):
            raise UsageError("--save writes a linear head: let --methods name linear or logistic")


def _read_targets(dataset: "Dataset", *, train_on_val: bool) -> dict[str, "Tensor"]:
    """The classes of the images of each split, if they can be learned."""
    from vitrail.evaluate import features

    if not dataset.classes:
        raise DataError(f"{dataset.name} has no labels to learn")
    there = ", ".join(dataset.splits)
    if "train" not in dataset.splits or len(dataset.splits) < 2:
        raise DataError(f"{dataset.name} has the splits {there}; a probe needs train, and test or val to measure on")
    if train_on_val and len(dataset.splits) < 3:
        raise UsageError(f"--everything learns from val and measures on test, and {dataset.name} has {there}")
    targets = {name: features.read_labels(split) for name, split in dataset.splits.items()}
    for name in dataset.classes:
        if not name.isascii() and name.encode(errors="replace").decode() != name:
            raise DataError(f"the class {name!r} has no valid name in UTF-8: rename its folder")
    return targets


def _choose_shots(
    requested: tuple[int, ...], targets: dict[str, "Tensor"], dataset: "Dataset", *, train_on_val: bool
) -> tuple[int, ...]:
    """Those that were asked for, or those of the paper that every class has the images for."""
    import torch

    from vitrail.evaluate import probe

    learned = torch.cat([targets["train"], targets["val"]]) if train_on_val else targets["train"]
    if requested:
        probe.check_shots(learned, dataset.classes, max(requested))
        return requested
    counts = learned.bincount()
    least = int(counts.argmin())
    kept = tuple(shots for shots in probe.DEFAULT_SHOTS if shots <= counts[least])
    if left := [f"{shots}-shot" for shots in probe.DEFAULT_SHOTS if shots not in kept]:
        output.print_note(
            f"note: without {', '.join(left)}: {dataset.classes[least]} has {counts[least]} training images"
        )
    return kept


# --- features --------------------------------------------------------------------------------------------------------


def _extract_features(
    trained: "Trained",
    dataset: "Dataset",
    data: str,
    group: "ProcessGroup",
    device: "torch.device",
    *,
    batch: int,
    workers: int,
) -> tuple[dict[str, "Tensor"], list[str]]:
    """The features of each split's images, all of them on the first rank, and which splits' were in the cache."""
    from vitrail.data.loader import iter_eval_batches
    from vitrail.evaluate import features
    from vitrail.runtime import distributed

    view = trained.preprocess
    if view is None:
        raise ModelError(
            "the weights do not say how images must be prepared: name it with --preprocess imagenet"
            " (or inception, torchvision)"
        )
    digest = features.digest_model(trained.model) if group.is_rank0 else ""
    network = trained.model.to(device)
    values: dict[str, Tensor] = {}
    cached: list[str] = []
    for name, split in dataset.splits.items():
        place = features.build_cache_path(digest, features.digest_images(split), view) if group.is_rank0 else Path()
        known = features.load_cached_features(place) if group.is_rank0 else None
        if known is not None:
            values[name] = known
            cached.append(name)
        if distributed.broadcast("" if known is None else "known"):
            continue
        batches = iter_eval_batches(
            split, view, batch_size=batch, num_classes=0, rank=group.rank, world_size=group.world_size, workers=workers
        )
        with output.show_progress(f"features of {name}") as progress:
            try:
                values[name] = features.extract_features(
                    network,
                    batches,
                    view,
                    num_images=len(split),
                    reduce_ranks=lambda rows: distributed.all_reduce_rows(rows, device),
                    progress=partial(_report_all_ranks, progress, group.world_size),
                )
            except RemoteError:
                raise
            except DataError as error:
                advice = f"`vitrail data check {data}` names every bad image, and how to leave them out"
                raise DataError(f"{error}. {advice}") from error
        if group.is_rank0:
            features.cache_features(place, values[name])
    if cached:
        output.print_note(f"features of {', '.join(cached)}: from the cache")
    return values, cached


def _report_all_ranks(progress: Callable[[int, int], None], world: int, done: int, total: int) -> None:
    """Show how far all ranks are by how far this one is with its share."""
    progress(min(done * world, total), total)


# --- classifiers -----------------------------------------------------------------------------------------------------


def _fit_classifiers(
    parts: "ProbeSplits",
    names: tuple[str, ...],
    methods: tuple[ProbeMethod, ...],
    shots: tuple[int, ...],
    *,
    seeds: int,
    penalty: float | None,
    k: int,
) -> tuple[list["ProbeScore"], list["FittedProbe"]]:
    """The scores of all that was asked for, and those classifiers that can be a model's head."""
    from vitrail.evaluate import probe

    scores: list[ProbeScore] = []
    fitted: list[FittedProbe] = []
    with output.show_progress("classifiers") as progress:
        for done, method in enumerate(methods):
            progress(done, len(methods))
            match method:
                case "few-shot":
                    scores += [
                        probe.score_few_shot(parts, names, number, seeds=seeds, penalty=penalty) for number in shots
                    ]
                case "knn":
                    scores.append(probe.score_knn(parts, len(names), k))
                case "linear":
                    fitted.append(probe.fit_linear(parts, len(names), penalty))
                case "logistic":
                    fitted.append(probe.fit_logistic(parts, len(names)))
    return [*scores, *(one.score for one in fitted)], fitted


def _save_with_head(
    trained: "Trained",
    fitted: list["FittedProbe"],
    dataset: "Dataset",
    parts: "ProbeSplits",
    path: Path,
    *,
    overwrite: bool,
) -> dict[str, Any]:
    """Write the model with the best of the heads, and say which that is."""
    from vitrail.evaluate import probe
    from vitrail.weights.load import save

    best = max(fitted, key=lambda one: one.tuning_correct)
    name, number = best.score.setting
    learned = output.pluralize(best.score.train_images, "image")
    change = f"head: {best.score.method} probe of {dataset.name}, {name} {number:g}, {learned}"
    made = probe.replace_head(trained, best.head, dataset.classes, best.temperature, change)
    save(made, path, overwrite=overwrite)
    choice = len(parts.tuning_val.targets)
    return {
        "path": str(path),
        "method": best.score.method,
        "chosen": best.tuning_correct / choice if choice else None,
        "temperature": best.temperature,
    }


# --- words -----------------------------------------------------------------------------------------------------------


def _collect_facts(
    dataset: "Dataset", parts: "ProbeSplits", scores: list["ProbeScore"], *, train_on_val: bool
) -> dict[str, Any]:
    """What was found, for programs."""
    tested = "test" in dataset.splits
    return {
        "data": dataset.name,
        "classes": len(dataset.classes),
        "features": parts.train.values.shape[1],
        "split": "test" if tested else "val",
        "images": len(parts.test.targets),
        "chosen_on": "val" if tested and "val" in dataset.splits else "a fifth of train",
        "everything": train_on_val,
        "scores": [
            {
                "method": score.method,
                "shots": score.shots,
                "learned": score.train_images,
                score.setting[0]: score.setting[1],
                "top1": score.top1,
                "std": score.std,
                "interval": score.interval,
                "seeds": len(score.correct),
                "right": list(score.correct),
            }
            for score in scores
        ],
    }


def _print_scores(facts: dict[str, Any]) -> None:
    """What was found, for people."""
    chosen = f"settings chosen on {facts['chosen_on']}{', then learned from too' if facts['everything'] else ''}"
    print(
        f"{facts['split']}: {output.pluralize(facts['images'], 'image')}, {output.pluralize(facts['classes'], 'class')}; {chosen}"
    )
    rows = [("method", "learned from", "setting", "right", "")]
    for score in facts["scores"]:
        method = f"{score['shots']}-shot" if score["shots"] else score["method"]
        setting = next(f"{name} {score[name]:.4g}" for name in ("lambda", "k", "L2") if name in score)
        if score["std"] is None:
            low, high = score["interval"]
            doubt = f"95 %: {low:.1%} to {high:.1%}"
        else:
            doubt = f"± {score['std']:.1%}, {output.pluralize(score['seeds'], 'draw')}"
        rows.append((method, output.pluralize(score["learned"], "image"), setting, f"{score['top1']:.1%}", doubt))
    output.print_table(rows, right=(1, 3))
    best = max(facts["scores"], key=lambda score: float(score["top1"]))
    method = f"{best['shots']}-shot" if best["shots"] else best["method"]
    kept = "" if facts["saved"] else "; --save FILE keeps a linear head with the model"
    output.print_note(
        f"best: {method}, {best['top1']:.1%} of {output.pluralize(facts['images'], facts['split'] + ' image')} right{kept}"
    )
    if saved := facts["saved"]:
        why = "" if saved["chosen"] is None else f", {saved['chosen']:.1%} right of {facts['chosen_on']}"
        print(f"{saved['path']}: {saved['method']}{why}, temperature {saved['temperature']:.3f}")
