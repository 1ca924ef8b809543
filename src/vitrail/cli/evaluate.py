"""`vitrail evaluate MODEL DATA`: how often a model is right, how sure one can be of that, and where it is wrong."""

import dataclasses
import json as codec
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from vitrail import remote
from vitrail.cli import output, runs
from vitrail.errors import DataError, UsageError
from vitrail.report import image_sheets

if TYPE_CHECKING:
    import torch

    from vitrail.data.dataset import Dataset, Split
    from vitrail.evaluate.evaluator import EvaluatedModel, SplitEvaluation
    from vitrail.evaluate.metrics import EvaluationMetrics
    from vitrail.runtime.distributed import ProcessGroup

SplitName = Literal["test", "val", "train", "all"]
_MAX_SHEET_IMAGES = 64


def main(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    against: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL...")] = (),
    split: SplitName | None = None,
    real: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    classes: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    tta: bool = False,
    abstain: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None,
    strict: bool = False,
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None,
    batch: Annotated[int, tyro.conf.arg(metavar="N")] = 64,
    device: str | None = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    json: bool = False,
) -> None:
    """Measure models on labelled images, and write what they said, image by image and class by class.

    Args:
        model: A file or folder of any known format, hf:ORG/NAME, timm:NAME, a preset, or timm-model:NAME.
        data: A folder, a .csv or .jsonl, shards, a set that was got, digits, or hf:ORG/NAME.
        against: Other models, side by side with the first and each compared with it, on the same images.
        split: What to measure on: test unless told otherwise, or val where there is no test. Without any splits, all
            images but those the model was trained on.
        real: A ReaL file: of each image all labels that are right.
        classes: A file with the only classes the model may answer with, one a line: for ImageNet-A, -R and the like.
        tta: Average the answers to an image and to its mirror image.
        abstain: Find the probability from which on this share of the answers is right, on val, and store it in MODEL.
        strict: Refuse unreadable images, rather than leave out up to a tenth of the images.
        out: Where tables and pictures go; runs/evaluate, runs/evaluate-2, ... unless told otherwise.
        batch: Images at once.
        device: cpu, cuda or mps; the best there is unless told otherwise.
        workers: Processes that prepare images; one for each core but one unless told otherwise.
        json: Print the result as JSON.
    """
    from vitrail.train.run_folder import choose_next_folder

    if batch < 1:
        raise UsageError(f"--batch is {batch}; it must be at least 1")
    if abstain is not None and not 0 < abstain < 1:
        raise UsageError(f"--abstain is {abstain}; it is the share of answers to be right, such as 0.95")
    with runs.join_processes(device) as (group, there):
        from vitrail.data import holdout
        from vitrail.data.sources import open_dataset
        from vitrail.evaluate.evaluator import load_evaluated_model
        from vitrail.runtime.workers import count_available_cores

        if out is not None and not _is_free_folder(out):
            raise UsageError(f"--out {out} must be a folder here that is new or empty")
        dataset = open_dataset(data)
        if abstain is not None:
            _check_threshold(model, dataset)
        at = EvalSettings(
            group,
            there,
            batch,
            max(0, count_available_cores() - 1) if workers is None else workers,
            tta,
            classes,
            strict,
        )
        whole = split is None and _has_no_splits(dataset)  # then none of them is held out
        notes = [note for note in dataset.notes if not (whole and note.startswith(holdout.NO_SPLITS_NOTE))]
        runs.print_dataset_notes(dataclasses.replace(dataset, notes=tuple(notes)))
        _check_labels(dataset, split)
        subjects = [load_evaluated_model(name) for name in dict.fromkeys((model, *against))]
        images = _select_images(dataset, split, subjects)
        prepared = [
            _match_classes(subject, dataset, images, at, real) for subject in subjects
        ]  # refused before any runs
        results = [_measure_model(dataset, images, at, each) for each in prepared]
        unreadable = _check_unreadable(images, results)
        found = _collect_facts(dataset, results, at) | ({"unreadable": unreadable} if unreadable else {})
        folder = choose_next_folder("evaluate") if out is None else Path(out)
        if group.is_rank0:
            _write_results(dataset, images, results, found, folder)
        if abstain is not None:
            found["threshold"] = _fit_threshold(model, dataset, dataclasses.replace(at, tta=False), abstain)
        if group.is_rank0:
            _print_result(found, folder, as_json=json)


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """Where and how models are asked."""

    group: "ProcessGroup"
    device: "torch.device"
    batch: int
    workers: int
    tta: bool
    classes: Path | None
    strict: bool


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """A model and what came of it."""

    evaluated_model: "EvaluatedModel"
    names: tuple[str, ...]
    """Of the outputs it could answer with."""
    evaluation: "SplitEvaluation"
    metrics: "EvaluationMetrics"


def _is_free_folder(out: str) -> bool:
    """Whether a folder here is new or empty."""
    folder = Path(out)
    return not remote.is_remote(out) and not folder.is_file() and not (folder.is_dir() and any(folder.iterdir()))


def _check_labels(dataset: "Dataset", split_name: SplitName | None) -> None:
    """Refuse data that cannot be measured by, before a model is loaded."""
    if not dataset.classes:
        raise DataError(f"{dataset.name} has no labels to measure by")
    if dataset.layout_warning:
        raise DataError(dataset.layout_warning)
    if split_name not in (None, "all", *dataset.splits):
        raise DataError(f"{dataset.name} has no {split_name}; it has {', '.join(dataset.splits)}")


def _select_images(
    dataset: "Dataset", split_name: SplitName | None, evaluated_models: "Sequence[EvaluatedModel]"
) -> "Split":
    """The images to measure on."""
    splits = dataset.splits
    if split_name is None and _has_no_splits(dataset):
        return _select_unseen_images(dataset, evaluated_models)
    if split_name == "all":
        return _join_splits(splits.values())
    name = split_name or ("test" if "test" in splits else "val" if "val" in splits else "train")
    held = " (held out of its images)" if name in dataset.generated_splits else ""
    output.print_note(f"measuring on {name}{held}: {output.pluralize(len(splits[name]), 'image')}")
    return splits[name]


def _has_no_splits(dataset: "Dataset") -> bool:
    return {"val", "test"} <= set(dataset.generated_splits)


def _select_unseen_images(dataset: "Dataset", evaluated_models: "Sequence[EvaluatedModel]") -> "Split":
    """All images of a dataset without splits, less those that a model was trained on or chosen by."""
    whole = _join_splits(dataset.splits.values())
    trained = [subject for subject in evaluated_models if _is_training_dataset(subject, dataset)]
    learned = [subject.name for subject in trained]
    if not learned:
        output.print_note(f"measuring on {_format_all_images(len(whole))}: {dataset.name} has no splits")
        return whole
    if "test" not in dataset.splits:
        raise DataError(
            f"{learned[0]} was trained on {_format_all_images(len(whole))} of {dataset.name}: give others, or --split all"
        )
    for subject in trained:
        _check_same_holdout(subject, dataset)
    unseen = dataset.splits["test"]
    left_out = output.pluralize(len(whole) - len(unseen), "image")
    output.print_note(
        f"measuring on {output.pluralize(len(unseen), 'image')}: {left_out} that {learned[0]} was trained on or chosen by"
        f" {'is' if left_out.startswith('1 ') else 'are'} left out (--split all takes them)"
    )
    return unseen


def _check_same_holdout(evaluated_model: "EvaluatedModel", dataset: "Dataset") -> None:
    """Refuse a run that held out another share than is held out here: a study of a large dataset trains on more."""
    from vitrail.weights.load import find_model_path

    path = find_model_path(evaluated_model.name)
    try:
        recorded = [] if path is None else codec.loads((path.parent.parent / "config.json").read_bytes())["notes"]
    except (OSError, ValueError, LookupError, TypeError):  # the file of a model alone
        return
    here, there = _find_holdout_note(dataset.notes), _find_holdout_note(recorded)
    if there and here != there:
        raise DataError(
            f"{evaluated_model.name} was trained on other splits of {dataset.name} ({there}), so some of its images would be"
            " measured as unseen: give others, or --split all"
        )


def _find_holdout_note(notes: Iterable[str]) -> str:
    """What share was held out, without where it is listed."""
    from vitrail.data.holdout import NO_SPLITS_NOTE

    return next((note.partition(" (")[0] for note in notes if note.startswith(NO_SPLITS_NOTE)), "")


def _join_splits(splits: "Iterable[Split]") -> "Split":
    whole, *others = splits
    for other in others:
        whole = whole.merge(other)
    return whole


def _format_all_images(images: int) -> str:
    return "the only image" if images == 1 else f"all {images:,} images"


def _is_training_dataset(evaluated_model: "EvaluatedModel", dataset: "Dataset") -> bool:
    """Whether a model's file names the data, or its run's folder has their digest, as of a copy elsewhere."""
    from vitrail.data.dataset_digest import ChangedDataError, DataDigest, check_unchanged, digest_dataset
    from vitrail.weights.load import find_model_path

    if f" on {dataset.name}, step " in evaluated_model.origin or f" probe of {dataset.name}," in evaluated_model.origin:
        return True
    path = find_model_path(evaluated_model.name)
    states = [] if path is None else sorted(path.parent.parent.glob("checkpoints/*/state.json"))
    try:
        recorded = codec.loads(states[-1].read_text())["data"]
        check_unchanged(DataDigest(**recorded), digest_dataset(dataset), dataset.name)
    except (OSError, LookupError, TypeError, ValueError, ChangedDataError):
        return False
    return True


class MatchedModel(NamedTuple):
    """A model that fits the data."""

    evaluated_model: "EvaluatedModel"
    output_indices: Sequence[int]
    """Of the data's classes among its outputs."""
    allowed_outputs: Sequence[int] | None
    """The outputs it may answer with, where not all."""
    real_labels: Any
    """Of each image all labels that are right, where they are given."""


def _match_classes(
    evaluated_model: "EvaluatedModel", dataset: "Dataset", images: "Split", settings: EvalSettings, real: Path | None
) -> MatchedModel:
    """Fit the data's classes to the model's."""
    from vitrail.evaluate import label_matching

    try:
        places = label_matching.match_outputs(dataset.classes, evaluated_model.labels, evaluated_model.num_outputs)
    except DataError as error:
        raise DataError(f"{evaluated_model.name}: {error}") from error
    among = (
        None
        if settings.classes is None
        else label_matching.read_class_subset(settings.classes, evaluated_model.labels, evaluated_model.num_outputs)
    )
    if among is not None and (left := set(places) - set(among)):
        name = dataset.classes[places.index(min(left))]
        raise DataError(f"{settings.classes} leaves out {name!r}, which images of {dataset.name} show")
    sets = None if real is None else label_matching.read_real_labels(real, images)
    if sets is not None and among is not None:
        raise UsageError("--real counts by all of ImageNet's classes: leave --classes away")
    return MatchedModel(evaluated_model, places, among, sets)


def _measure_model(dataset: "Dataset", images: "Split", settings: EvalSettings, matched: MatchedModel) -> ModelResult:
    from vitrail.evaluate.metrics import compute_metrics

    subject, places, among, sets = matched
    examined = _evaluate_model(subject, images, places, settings, among)
    labels = subject.labels or dataset.classes
    names = labels if among is None else tuple(labels[place] for place in among)
    return ModelResult(subject, names, examined, compute_metrics(examined.counts, examined.predictions, sets))


def _check_unreadable(images: "Split", results: Sequence[ModelResult]) -> list[str]:
    """The names of the images that were left out; refused where they are many."""
    from vitrail.data.dataset import BAD_SHARE

    names = [
        images.get_image_name(place)
        for place in sorted({place for each in results for place in each.evaluation.unreadable})
    ]
    if not names:
        return []
    first = f"{output.pluralize(len(names), 'image')} of {len(images):,} cannot be read, such as {names[0]}"
    if len(names) > BAD_SHARE * len(images):
        raise DataError(f"{first}; more than {BAD_SHARE:.0%} are too many: `vitrail data check` says why")
    them = "it" if len(names) == 1 else "them"
    output.print_note(f"warning: {first}; left out, and listed in evaluate.json (--strict refuses {them})")
    return names


def _evaluate_model(
    evaluated_model: "EvaluatedModel",
    images: "Split",
    output_indices: Sequence[int],
    settings: EvalSettings,
    allowed_outputs: Sequence[int] | None,
) -> "SplitEvaluation":
    from vitrail.evaluate.evaluator import evaluate_split
    from vitrail.runtime import distributed

    with output.show_progress(f"asking {evaluated_model.name}") as report:
        return evaluate_split(
            evaluated_model,
            images,
            output_indices,
            device=settings.device,
            batch=settings.batch,
            workers=settings.workers,
            rank=settings.group.rank,
            world=settings.group.world_size,
            flip_tta=settings.tta,
            allowed_outputs=allowed_outputs,
            skip_bad=not settings.strict,
            gather_rows=lambda rows: distributed.all_gather_rows(rows, settings.device),
            report_progress=lambda count: report(count, -(-len(images) // settings.group.world_size)),
        )


def _check_threshold(name: str, dataset: "Dataset") -> None:
    """Refuse a model or a set of which no threshold can be kept, before anything is computed."""
    from vitrail.weights.load import find_model_path, is_native_file

    path = find_model_path(name)
    if path is None or not is_native_file(path):
        raise UsageError(
            f"{name} has no place for a threshold; a file of vitrail's own has: vitrail convert {name} OUT.safetensors"
        )
    if "val" not in dataset.splits:
        raise DataError(f"{dataset.name} has no val, on which a threshold is chosen")
    if dataset.multi_label:
        raise UsageError(f"--abstain is for images with one label each, and those of {dataset.name} may have several")


def _fit_threshold(name: str, dataset: "Dataset", settings: EvalSettings, share: float) -> float:
    """The probability that keeps so many answers right on val, stored in the model's file."""
    from vitrail.evaluate import abstention, label_matching
    from vitrail.evaluate.evaluator import make_evaluated_model
    from vitrail.weights.load import load, save

    path, trained = Path(name), load(name)
    subject = make_evaluated_model(trained, name)
    places = label_matching.match_outputs(dataset.classes, subject.labels, subject.num_outputs)
    said = _evaluate_model(subject, dataset.splits["val"], places, settings, None).predictions
    found = abstention.find_threshold(said.probabilities[:, 0], said.correct, share)
    if settings.group.is_rank0:
        save(dataclasses.replace(trained, threshold=found), path, overwrite=True)
        answered = float((said.probabilities[:, 0] >= found).double().mean())
        output.print_note(
            f"{path}: below a probability of {found:.4f} an answer is unsure; on val {answered:.1%} are sure"
        )
    return found


def _collect_facts(dataset: "Dataset", results: Sequence[ModelResult], settings: EvalSettings) -> dict[str, Any]:
    from vitrail.evaluate.compare import compare_models

    models = [
        {"model": result.evaluated_model.name, "classes": len(result.names)}
        | result.metrics.to_dict()
        | {"images_per_second": result.evaluation.images_per_second, "temperature": result.evaluated_model.temperature}
        for result in results
    ]
    first = results[0]
    pairs = [
        {"model": first.evaluated_model.name, "against": other.evaluated_model.name}
        | compare_models(first.evaluation.predictions.correct, other.evaluation.predictions.correct)._asdict()
        for other in results[1:]
    ]
    how = {
        "data": dataset.name,
        "mirrored": settings.tta,
        "device": str(settings.device),
        "ranks": settings.group.world_size,
    }
    return how | {"models": models, "compared": pairs}


def _write_results(
    dataset: "Dataset", images: "Split", results: Sequence[ModelResult], facts: dict[str, Any], folder: Path
) -> None:
    """Tables and pictures: of one model in the folder itself, of several in a folder each."""
    from vitrail.evaluate import abstention
    from vitrail.figures import plots

    for number, result in enumerate(results):
        place = folder if len(results) == 1 else folder / f"model-{number}"
        place.mkdir(parents=True, exist_ok=True)
        _write_model_result(dataset, images, result, place)
    (folder / "evaluate.json").write_text(codec.dumps(facts, indent=2) + "\n")
    curves = {}
    for result in results:
        said = result.evaluation.predictions
        curve = abstention.compute_risk_coverage(said.confidence, said.correct)
        curves[result.evaluated_model.name] = (curve.coverage.numpy(), curve.accuracy.numpy())
    plots.plot_risk_coverage(curves, folder / "risk_coverage.png")
    for number, other in enumerate(results[1:], 1):
        _draw_differences(images, results[0], other, folder / f"differences-{number}.jpg")


def _write_model_result(dataset: "Dataset", images: "Split", result: ModelResult, folder: Path) -> None:
    from vitrail.evaluate import prediction_tables
    from vitrail.evaluate.multi_label import measure_labels
    from vitrail.figures import plots

    counts, said = result.evaluation.counts, result.evaluation.predictions
    prediction_tables.write_predictions(images, dataset.classes, result.names, said, folder / "predictions.csv")
    if counts.has_confusion:
        prediction_tables.write_class_table(counts, result.names, folder / "per_class.csv")
        there = ((counts.confusion.sum(dim=0) + counts.confusion.sum(dim=1)) > 0).nonzero()[:, 0]
        confusion = counts.confusion[there][:, there].numpy()
        names = [result.names[place] for place in there.tolist()]
        plots.plot_confusion_matrix(confusion, names, folder / "confusion_matrix.png")
        plots.plot_confusion_matrix(confusion, names, folder / "confusion_matrix_normalized.png", normalize=True)
    if said.multi_label:
        prediction_tables.write_label_scores(measure_labels(said), result.names, folder / "per_class.csv")
    sure, true = (said.label_probabilities, said.label_targets) if said.multi_label else (said.confidence, said.correct)
    error = result.metrics.calibration_error
    plots.plot_reliability(
        sure.flatten().numpy(), true.flatten().numpy(), folder / "reliability.png", calibration_error=error
    )
    worst = said.losses.argsort(descending=True)[:_MAX_SHEET_IMAGES].tolist()
    preprocess, path = result.evaluated_model.preprocess, folder / "top_losses.jpg"
    image_sheets.draw_prediction_sheet(
        images, dataset.classes, preprocess, said, worst, path, output_names=result.names
    )


def _draw_differences(images: "Split", one: ModelResult, other: ModelResult, path: Path) -> None:
    """The images that one model knows and the other does not, with what each said."""
    from vitrail.figures import image_grids

    first, second = one.evaluation.predictions, other.evaluation.predictions
    places = (first.correct != second.correct).nonzero()[:, 0].tolist()[:_MAX_SHEET_IMAGES]
    if not places:
        return
    captions = [" / ".join(_format_prediction(result, place) for result in (one, other)) for place in places]
    rows = [int(first.images[place]) for place in places]
    marks = [bool(first.correct[place]) for place in places]
    image_grids.write_image_grid(
        image_sheets.load_inputs(images, rows, one.evaluated_model.preprocess), captions, path, correct=marks
    )


def _format_prediction(result: ModelResult, position: int) -> str:
    return (
        ", ".join(result.names[index] for index in result.evaluation.predictions.get_predicted_classes(position))
        or "no label"
    )


_COLUMN_TITLES = {
    "top1": "top-1",
    "top5": "top-5",
    "exact_match": "exact match",
    "micro_f1": "F1",
    "macro_f1": "F1 per class",
    "mean_average_precision": "mAP",
    "real": "ReaL",
    "macro": "per class",
    "loss": "loss",
    "calibration_error": "calibration",
}


def _print_result(facts: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    if as_json:
        output.print_json(facts | {"folder": str(folder)})
        return
    from vitrail.evaluate.predictions import MIN_TOP5_CLASSES

    models = facts["models"]
    few = all(model["classes"] < MIN_TOP5_CLASSES for model in models)
    shown = [name for name in _COLUMN_TITLES if any(name in model for model in models) and not (few and name == "top5")]
    rows = [["model", "images", *(_COLUMN_TITLES[name] for name in shown), "images/s"]]
    for model in models:
        numbers = [_format_metric(model, name) for name in shown]
        rows.append([model["model"], f"{model['images']:,}", *numbers, f"{model['images_per_second']:,.0f}"])
    if len(rows) == 2:
        output.print_table(list(zip(*rows, strict=True)))
    else:
        output.print_table(rows)
    for pair in facts["compared"]:
        print(
            f"{pair['model']} alone is right on {output.pluralize(pair['first'], 'image')}, {pair['against']} alone on"
            f" {pair['second']:,}: between equals that happens with a chance of {pair['chance']:.2g} (McNemar)"
        )
    output.print_note(f"{_summarize_best(facts['models'])}; tables and pictures: {folder}")


def _summarize_best(models: Sequence[dict[str, Any]]) -> str:
    """What came of it, in a line: of several models the best."""
    name, what = ("top1", "right") if "top1" in models[0] else ("exact_match", "with exactly their labels")
    best = max(models, key=lambda model: float(model[name]))
    low, high = best[f"{name}_interval"]
    right = (
        f"{best[name]:.1%} of {output.pluralize(best['images'], 'image')} {what} ({100 * low:.1f} to {100 * high:.1f})"
    )
    return right if len(models) == 1 else f"best of {len(models)} models: {best['model']}, {right}"


def _format_metric(model: dict[str, Any], name: str) -> str:
    """A number and its interval, a loss as it is and all others as shares."""
    if name not in model:
        return "-"
    low, high = model.get(f"{name}_interval", (math.nan, math.nan))
    if name == "loss":
        return f"{model[name]:.3f} ({low:.3f} to {high:.3f})"
    return f"{model[name]:.2%} ({low:.1%} to {high:.1%})"
