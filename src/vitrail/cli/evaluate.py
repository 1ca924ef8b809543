"""`vitrail evaluate MODEL DATA`: how often a model is right, how sure one can be of that, and where it is wrong."""

import dataclasses
import json as codec
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from vitrail import remote
from vitrail.cli import runs, sheets, show
from vitrail.errors import DataError, UsageError

if TYPE_CHECKING:
    import torch

    from vitrail.data.dataset import Dataset, Split
    from vitrail.evaluate.measure import Measured
    from vitrail.evaluate.subject import Examined, Subject
    from vitrail.train.distributed import Group

Part = Literal["test", "val", "train", "all"]
_SHEET = 64


def main(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    against: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL...")] = (),
    split: Part | None = None,
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
    if batch < 1:
        raise UsageError(f"--batch is {batch}; it must be at least 1")
    if abstain is not None and not 0 < abstain < 1:
        raise UsageError(f"--abstain is {abstain}; it is the share of answers to be right, such as 0.95")
    with runs.process(device) as (group, there):
        from vitrail.data import holdout
        from vitrail.data.sources import open_data
        from vitrail.data.workers import available
        from vitrail.evaluate.subject import subject

        if out is not None and not _free(out):
            raise UsageError(f"--out {out} must be a folder here that is new or empty")
        dataset = open_data(data)
        if abstain is not None:
            _check_threshold(model, dataset)
        at = At(group, there, batch, max(0, available() - 1) if workers is None else workers, tta, classes, strict)
        whole = split is None and _has_no_splits(dataset)  # then none of them is held out
        notes = [note for note in dataset.notes if not (whole and note.startswith(holdout.NOTHING_GIVEN))]
        runs.tell_of(dataclasses.replace(dataset, notes=tuple(notes)))
        _check_labels(dataset, split)
        subjects = [subject(name) for name in dict.fromkeys((model, *against))]
        images = _part(dataset, split, subjects)
        prepared = [_prepare(subject, dataset, images, at, real) for subject in subjects]  # refused before any runs
        results = [_measured(dataset, images, at, each) for each in prepared]
        unreadable = _check_unreadable(images, results)
        found = _facts(dataset, results, at) | ({"unreadable": unreadable} if unreadable else {})
        folder = runs.next_folder("evaluate") if out is None else Path(out)
        if group.leads:
            _write(dataset, images, results, found, folder)
        if abstain is not None:
            found["threshold"] = _threshold(model, dataset, dataclasses.replace(at, mirrored=False), abstain)
        if group.leads:
            _tell(found, folder, as_json=json)


@dataclasses.dataclass(frozen=True)
class At:
    """Where and how models are asked."""

    group: "Group"
    device: "torch.device"
    batch: int
    workers: int
    mirrored: bool
    classes: Path | None
    strict: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """A model and what came of it."""

    subject: "Subject"
    names: tuple[str, ...]
    """Of the outputs it could answer with."""
    examined: "Examined"
    measured: "Measured"


def _free(out: str) -> bool:
    """Whether a folder here is new or empty."""
    folder = Path(out)
    return not remote.is_remote(out) and not folder.is_file() and not (folder.is_dir() and any(folder.iterdir()))


def _check_labels(dataset: "Dataset", wanted: Part | None) -> None:
    """Refuse data that cannot be measured by, before a model is loaded."""
    if not dataset.classes:
        raise DataError(f"{dataset.name} has no labels to measure by")
    if dataset.question:
        raise DataError(dataset.question)
    if wanted not in (None, "all", *dataset.splits):
        raise DataError(f"{dataset.name} has no {wanted}; it has {', '.join(dataset.splits)}")


def _part(dataset: "Dataset", wanted: Part | None, subjects: "Sequence[Subject]") -> "Split":
    """The images to measure on."""
    splits = dataset.splits
    if wanted is None and _has_no_splits(dataset):
        return _unseen(dataset, subjects)
    if wanted == "all":
        return _join(splits.values())
    name = wanted or ("test" if "test" in splits else "val" if "val" in splits else "train")
    held = " (held out of its images)" if name in dataset.made_up else ""
    show.note(f"measuring on {name}{held}: {show.plural(len(splits[name]), 'image')}")
    return splits[name]


def _has_no_splits(dataset: "Dataset") -> bool:
    return {"val", "test"} <= set(dataset.made_up)


def _unseen(dataset: "Dataset", subjects: "Sequence[Subject]") -> "Split":
    """All images of a dataset without splits, less those that a model was trained on or chosen by."""
    whole = _join(dataset.splits.values())
    trained = [subject for subject in subjects if _was_trained_on(subject, dataset)]
    learned = [subject.name for subject in trained]
    if not learned:
        show.note(f"measuring on {_all(len(whole))}: {dataset.name} has no splits")
        return whole
    if "test" not in dataset.splits:
        raise DataError(
            f"{learned[0]} was trained on {_all(len(whole))} of {dataset.name}: give others, or --split all"
        )
    for subject in trained:
        _check_same_holdout(subject, dataset)
    unseen = dataset.splits["test"]
    left_out = show.plural(len(whole) - len(unseen), "image")
    show.note(
        f"measuring on {show.plural(len(unseen), 'image')}: {left_out} that {learned[0]} was trained on or chosen by"
        f" {'is' if left_out.startswith('1 ') else 'are'} left out (--split all takes them)"
    )
    return unseen


def _check_same_holdout(subject: "Subject", dataset: "Dataset") -> None:
    """Refuse a run that held out another share than is held out here: a study of a large dataset trains on more."""
    from vitrail.weights.load import locate

    path = locate(subject.name)
    try:
        recorded = [] if path is None else codec.loads((path.parent.parent / "config.json").read_bytes())["notes"]
    except (OSError, ValueError, LookupError, TypeError):  # the file of a model alone
        return
    here, there = _holdout_sentence(dataset.notes), _holdout_sentence(recorded)
    if there and here != there:
        raise DataError(
            f"{subject.name} was trained on other splits of {dataset.name} ({there}), so some of its images would be"
            " measured as unseen: give others, or --split all"
        )


def _holdout_sentence(notes: Iterable[str]) -> str:
    """What share was held out, without where it is listed."""
    from vitrail.data.holdout import NOTHING_GIVEN

    return next((note.partition(" (")[0] for note in notes if note.startswith(NOTHING_GIVEN)), "")


def _join(splits: "Iterable[Split]") -> "Split":
    whole, *others = splits
    for other in others:
        whole = whole.joined(other)
    return whole


def _all(images: int) -> str:
    return "the only image" if images == 1 else f"all {images:,} images"


def _was_trained_on(subject: "Subject", dataset: "Dataset") -> bool:
    """Whether a model's file names the data, or its run's folder has their digest, as of a copy elsewhere."""
    from vitrail.data.digest import ChangedDataError, DataDigest, check_unchanged, digest_dataset
    from vitrail.weights.load import locate

    if f" on {dataset.name}, step " in subject.origin or f" probe of {dataset.name}," in subject.origin:
        return True
    path = locate(subject.name)
    states = [] if path is None else sorted(path.parent.parent.glob("checkpoints/*/state.json"))
    try:
        recorded = codec.loads(states[-1].read_text())["data"]
        check_unchanged(DataDigest(**recorded), digest_dataset(dataset), dataset.name)
    except (OSError, LookupError, TypeError, ValueError, ChangedDataError):
        return False
    return True


class Prepared(NamedTuple):
    """A model that fits the data."""

    subject: "Subject"
    places: Sequence[int]
    """Of the data's classes among its outputs."""
    among: Sequence[int] | None
    """The outputs it may answer with, where not all."""
    right: Any
    """Of each image all labels that are right, where they are given."""


def _prepare(subject: "Subject", dataset: "Dataset", images: "Split", at: At, real: Path | None) -> Prepared:
    """Fit the data's classes to the model's."""
    from vitrail.evaluate import match

    try:
        places = match.outputs_of(dataset.classes, subject.labels, subject.outputs)
    except DataError as error:
        raise DataError(f"{subject.name}: {error}") from error
    among = None if at.classes is None else match.subset(at.classes, subject.labels, subject.outputs)
    if among is not None and (left := set(places) - set(among)):
        name = dataset.classes[places.index(min(left))]
        raise DataError(f"{at.classes} leaves out {name!r}, which images of {dataset.name} show")
    sets = None if real is None else match.real_labels(real, images)
    if sets is not None and among is not None:
        raise UsageError("--real counts by all of ImageNet's classes: leave --classes away")
    return Prepared(subject, places, among, sets)


def _measured(dataset: "Dataset", images: "Split", at: At, prepared: Prepared) -> Result:
    from vitrail.evaluate.measure import measured

    subject, places, among, sets = prepared
    examined = _examined(subject, images, places, at, among)
    labels = subject.labels or dataset.classes
    names = labels if among is None else tuple(labels[place] for place in among)
    return Result(subject, names, examined, measured(examined.counts, examined.answers, sets))


def _check_unreadable(images: "Split", results: Sequence[Result]) -> list[str]:
    """The names of the images that were left out; refused where they are many."""
    from vitrail.data.dataset import BAD_SHARE

    names = [images.name(place) for place in sorted({place for each in results for place in each.examined.unreadable})]
    if not names:
        return []
    first = f"{show.plural(len(names), 'image')} of {len(images):,} cannot be read, such as {names[0]}"
    if len(names) > BAD_SHARE * len(images):
        raise DataError(f"{first}; more than {BAD_SHARE:.0%} are too many: `vitrail data check` says why")
    them = "it" if len(names) == 1 else "them"
    show.note(f"warning: {first}; left out, and listed in evaluate.json (--strict refuses {them})")
    return names


def _examined(
    subject: "Subject", images: "Split", places: Sequence[int], at: At, among: Sequence[int] | None
) -> "Examined":
    from vitrail.evaluate.subject import examined
    from vitrail.train import distributed

    with show.progress(f"asking {subject.name}") as report:
        return examined(
            subject,
            images,
            places,
            device=at.device,
            batch=at.batch,
            workers=at.workers,
            rank=at.group.rank,
            world=at.group.world,
            mirrored=at.mirrored,
            among=among,
            skip_bad=not at.strict,
            gathered=lambda rows: distributed.gathered(rows, at.device),
            seen=lambda count: report(count, -(-len(images) // at.group.world)),
        )


def _check_threshold(name: str, dataset: "Dataset") -> None:
    """Refuse a model or a set of which no threshold can be kept, before anything is computed."""
    from vitrail.weights.load import is_own, locate

    path = locate(name)
    if path is None or not is_own(path):
        raise UsageError(
            f"{name} has no place for a threshold; a file of vitrail's own has: vitrail convert {name} OUT.safetensors"
        )
    if "val" not in dataset.splits:
        raise DataError(f"{dataset.name} has no val, on which a threshold is chosen")
    if dataset.several:
        raise UsageError(f"--abstain is for images with one label each, and those of {dataset.name} may have several")


def _threshold(name: str, dataset: "Dataset", at: At, share: float) -> float:
    """The probability that keeps so many answers right on val, stored in the model's file."""
    from vitrail.evaluate import abstain, match
    from vitrail.evaluate.subject import measurable
    from vitrail.weights.load import load, save

    path, trained = Path(name), load(name)
    subject = measurable(trained, name)
    places = match.outputs_of(dataset.classes, subject.labels, subject.outputs)
    said = _examined(subject, dataset.splits["val"], places, at, None).answers
    found = abstain.threshold(said.probabilities[:, 0], said.right, share)
    if at.group.leads:
        save(dataclasses.replace(trained, threshold=found), path, overwrite=True)
        answered = float((said.probabilities[:, 0] >= found).double().mean())
        show.note(f"{path}: below a probability of {found:.4f} an answer is unsure; on val {answered:.1%} are sure")
    return found


def _facts(dataset: "Dataset", results: Sequence[Result], at: At) -> dict[str, Any]:
    from vitrail.evaluate.compare import compared

    models = [
        {"model": result.subject.name, "classes": len(result.names)}
        | result.measured.facts()
        | {"images_per_second": result.examined.images_per_second, "temperature": result.subject.temperature}
        for result in results
    ]
    first = results[0]
    pairs = [
        {"model": first.subject.name, "against": other.subject.name}
        | compared(first.examined.answers.right, other.examined.answers.right)._asdict()
        for other in results[1:]
    ]
    how = {"data": dataset.name, "mirrored": at.mirrored, "device": str(at.device), "ranks": at.group.world}
    return how | {"models": models, "compared": pairs}


def _write(dataset: "Dataset", images: "Split", results: Sequence[Result], found: dict[str, Any], folder: Path) -> None:
    """Tables and pictures: of one model in the folder itself, of several in a folder each."""
    from vitrail.evaluate import abstain
    from vitrail.figures import draw

    for number, result in enumerate(results):
        place = folder if len(results) == 1 else folder / f"model-{number}"
        place.mkdir(parents=True, exist_ok=True)
        _write_one(dataset, images, result, place)
    (folder / "evaluate.json").write_text(codec.dumps(found, indent=2) + "\n")
    curves = {}
    for result in results:
        said = result.examined.answers
        curve = abstain.curve(said.confidence, said.right)
        curves[result.subject.name] = (curve.coverage.numpy(), curve.accuracy.numpy())
    draw.risk_coverage(curves, folder / "risk_coverage.png")
    for number, other in enumerate(results[1:], 1):
        _differences(images, results[0], other, folder / f"differences-{number}.jpg")


def _write_one(dataset: "Dataset", images: "Split", result: Result, folder: Path) -> None:
    from vitrail.evaluate import tables
    from vitrail.evaluate.multi_label import measure_labels
    from vitrail.figures import draw

    counts, said = result.examined.counts, result.examined.answers
    tables.write_predictions(images, dataset.classes, result.names, said, folder / "predictions.csv")
    if counts.by_class:
        tables.write_classes(counts, result.names, folder / "per_class.csv")
        there = ((counts.confusion.sum(dim=0) + counts.confusion.sum(dim=1)) > 0).nonzero()[:, 0]
        confusion = counts.confusion[there][:, there].numpy()
        names = [result.names[place] for place in there.tolist()]
        draw.confusion(confusion, names, folder / "confusion_matrix.png")
        draw.confusion(confusion, names, folder / "confusion_matrix_normalized.png", normalised=True)
    if said.multi_label:
        tables.write_label_scores(measure_labels(said), result.names, folder / "per_class.csv")
    sure, true = (said.scores, said.truths) if said.multi_label else (said.confidence, said.right)
    error = result.measured.calibration_error
    draw.reliability(sure.flatten().numpy(), true.flatten().numpy(), folder / "reliability.png", error=error)
    worst = said.losses.argsort(descending=True)[:_SHEET].tolist()
    preprocess, path = result.subject.preprocess, folder / "top_losses.jpg"
    sheets.answered(images, dataset.classes, preprocess, said, worst, path, outputs=result.names)


def _differences(images: "Split", one: Result, other: Result, path: Path) -> None:
    """The images that one model knows and the other does not, with what each said."""
    from vitrail.figures import pictures

    first, second = one.examined.answers, other.examined.answers
    places = (first.right != second.right).nonzero()[:, 0].tolist()[:_SHEET]
    if not places:
        return
    captions = [" / ".join(_name(result, place) for result in (one, other)) for place in places]
    rows = [int(first.images[place]) for place in places]
    marks = [bool(first.right[place]) for place in places]
    pictures.grid(sheets.views(images, rows, one.subject.preprocess), captions, path, marks=marks)


def _name(result: Result, place: int) -> str:
    return ", ".join(result.names[index] for index in result.examined.answers.predicted(place)) or "no label"


_HEADS = {
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


def _tell(found: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    if as_json:
        show.as_json(found | {"folder": str(folder)})
        return
    from vitrail.evaluate.classify import TOP5_CLASSES

    models = found["models"]
    few = all(model["classes"] < TOP5_CLASSES for model in models)
    shown = [name for name in _HEADS if any(name in model for model in models) and not (few and name == "top5")]
    rows = [["model", "images", *(_HEADS[name] for name in shown), "images/s"]]
    for model in models:
        numbers = [_number(model, name) for name in shown]
        rows.append([model["model"], f"{model['images']:,}", *numbers, f"{model['images_per_second']:,.0f}"])
    if len(rows) == 2:
        show.table(list(zip(*rows, strict=True)))
    else:
        show.table(rows)
    for pair in found["compared"]:
        print(
            f"{pair['model']} alone is right on {show.plural(pair['first'], 'image')}, {pair['against']} alone on"
            f" {pair['second']:,}: between equals that happens with a chance of {pair['chance']:.2g} (McNemar)"
        )
    show.note(f"{_sentence(found['models'])}; tables and pictures: {folder}")


def _sentence(models: Sequence[dict[str, Any]]) -> str:
    """What came of it, in a line: of several models the best."""
    name, what = ("top1", "right") if "top1" in models[0] else ("exact_match", "with exactly their labels")
    best = max(models, key=lambda model: float(model[name]))
    low, high = best[f"{name}_interval"]
    right = f"{best[name]:.1%} of {show.plural(best['images'], 'image')} {what} ({100 * low:.1f} to {100 * high:.1f})"
    return right if len(models) == 1 else f"best of {len(models)} models: {best['model']}, {right}"


def _number(model: dict[str, Any], name: str) -> str:
    """A number and its interval, a loss as it is and all others as shares."""
    if name not in model:
        return "-"
    low, high = model.get(f"{name}_interval", (math.nan, math.nan))
    if name == "loss":
        return f"{model[name]:.3f} ({low:.3f} to {high:.3f})"
    return f"{model[name]:.2%} ({low:.1%} to {high:.1%})"
