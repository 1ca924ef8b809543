"""Measure models from Python: `vitrail.evaluate` and `vitrail.probe`."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail import remote
from vitrail.api import notebook
from vitrail.api.keyword_errors import name_keywords
from vitrail.api.models import AnyModel, choose_distinct_name, get_model_name, list_models, load_trained
from vitrail.api.progress import NoteCollector, Progress, choose_progress
from vitrail.config import Precision
from vitrail.data.dataset import Dataset, Split
from vitrail.data.sources import DataSource, open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.evaluation import abstention, dataset_evaluation
from vitrail.evaluation.calibration import count_bins
from vitrail.evaluation.dataset_evaluation import (
    EvaluatedModel,
    EvaluationSettings,
    ModelEvaluation,
    SplitName,
    load_evaluated_model,
    make_evaluated_model,
)
from vitrail.evaluation.label_metrics import list_threshold_scores
from vitrail.evaluation.probe_run import ProbeMethod, ProbeSettings, run_probe
from vitrail.evaluation.segmentation import run_segmentation_probe
from vitrail.evaluation.statistics import Interval
from vitrail.formatting import pluralize
from vitrail.report import svg_charts
from vitrail.report.result_files import make_evaluation_grid, write_evaluation
from vitrail.report.svg_charts import ChartLine
from vitrail.runtime import distributed
from vitrail.runtime.workers import Notify, count_loader_workers
from vitrail.training.dataset_checks import check_classes, list_dataset_notes
from vitrail.training.finetune import PreprocessName, set_preprocess
from vitrail.weights.load import check_loadable
from vitrail.weights.trained import Trained

_WEAKEST_CLASSES = 3  # named in a notebook
_SHOWN_MISTAKES = 8  # images in a notebook
_MISTAKES_WIDTH = 900  # pixels


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluation:
    """The measurement of a model, and of those it was compared with, on a dataset.

    `vitrail.evaluate` returns it.

        evaluation = vitrail.evaluate("model.safetensors", "photos")
        print(evaluation.accuracy, evaluation.interval, evaluation.per_class)
    """

    metrics: dict[str, Any]
    """All numbers: of each model, and the comparisons of the first with the others."""
    results: tuple[ModelEvaluation, ...]
    """The predictions of each model, image by image."""
    dataset: Dataset
    images: Split
    """The images that were measured."""
    folder: Path | None
    """Where tables and figures were written."""
    notes: tuple[str, ...] = ()

    @property
    def accuracy(self) -> float:
        """The top-1 accuracy of the first model; of multi-label images, how often all of their labels are correct."""
        return self.results[0].metrics.top1

    @property
    def is_multi_label(self) -> bool:
        """Whether the images may have several labels."""
        return self.results[0].evaluation.predictions.multi_label

    @property
    def interval(self) -> Interval:
        """The 95 % confidence interval of the accuracy."""
        return self.results[0].metrics.top1_interval

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the first model's outputs."""
        return self.results[0].names

    @property
    def per_class(self) -> dict[str, float]:
        """The accuracy of each class that has images, or average precision where images may have several labels.

        It is empty for very many classes of images with one label each.
        """
        if self.is_multi_label:
            rows = self.metrics["models"][0]["per_class"].items()
            return {name: row["average_precision"] for name, row in rows if row["images"]}
        if self.confusion is None:
            return {}
        images = self.confusion.sum(axis=1)
        right = self.confusion.diagonal()
        return {name: float(right[i] / images[i]) for i, name in enumerate(self.classes) if images[i]}

    @property
    def confusion(self) -> NDArray[np.int64] | None:
        """(L, L): how often each class (rows) was predicted as each class (columns)."""
        counts = self.results[0].evaluation.counts
        return counts.confusion.numpy() if counts.has_confusion else None

    def __repr__(self) -> str:
        return f"Evaluation({self.metrics['models'][0]['model']} on {self.metrics['data']}: {self._summarize()})"

    def _summarize(self) -> str:
        low, high = self.interval
        images = pluralize(self.results[0].metrics.images, "image")
        if self.is_multi_label:
            facts = self.metrics["models"][0]
            lower, upper = facts["mean_average_precision_interval"]
            text = f"mAP {facts['mean_average_precision']:.1%} of {images}, 95 % interval {lower:.1%} to {upper:.1%}"
            return f"{text}; F1 {facts['micro_f1']:.1%}, all labels right in {self.accuracy:.1%}"
        return f"{self.accuracy:.1%} of {images} correct, 95 % interval {low:.1%} to {high:.1%}"

    def _repr_html_(self) -> str:
        rows = {"result": self._summarize(), "model": self.metrics["models"][0]["model"], "data": self.metrics["data"]}
        for other, comparison in zip(self.metrics["models"][1:], self.metrics.get("comparisons", ()), strict=False):
            right = other.get("top1", other.get("exact_match"))
            rows[f"against {other['model']}"] = f"{right:.1%} correct, p = {comparison['p_value']:.2g}"
        imperfect = [(accuracy, name) for name, accuracy in self.per_class.items() if accuracy < 1]
        if imperfect:
            weakest = sorted(imperfect)[:_WEAKEST_CLASSES]
            measure = "average precision " if self.is_multi_label else ""
            rows["weakest classes"] = ", ".join(f"{name} ({measure}{score:.0%})" for score, name in weakest)
        if self.folder is not None:
            rows["folder"] = str(self.folder)
        parts = [notebook.render_table(rows)]
        if self.confusion is not None:
            parts.append(notebook.render_confusion(self.confusion, self.classes))
        if self.is_multi_label:
            parts.append(self._render_threshold_scores())
        parts.append(self._render_reliability())
        with contextlib.suppress(DataError):  # images that are gone by now
            parts += self._render_mistakes()
        return notebook.wrap_html(*parts, *notebook.render_notes(self.notes))

    def _render_threshold_scores(self) -> str:
        """F1 where one threshold served for all labels."""
        thresholds, *scores = zip(*list_threshold_scores(self.results[0].evaluation.predictions), strict=True)
        names = "all labels", "mean over classes"
        lines = [ChartLine(name, thresholds, values) for name, values in zip(names, scores, strict=True)]
        caption = "F1 by threshold, over all labels and averaged over classes"
        chart = svg_charts.draw_lines(lines, label=caption, x_label="threshold of all labels", percent=True)
        return notebook.render_figure(caption, chart)

    def _render_reliability(self) -> str:
        """How often predictions of each probability are correct."""
        binned = count_bins(*self.results[0].evaluation.predictions.calibration_pairs)
        caption = f"how often a probability is right, calibration error {self.results[0].metrics.calibration_error:.1%}"
        x_label = "predicted probability"
        chart = svg_charts.draw_reliability(binned.counts, binned.correct, label=caption, x_label=x_label)
        return notebook.render_figure(caption, chart)

    def _render_mistakes(self) -> list[str]:
        """The wrongly predicted images of greatest loss, if any."""
        predictions = self.results[0].evaluation.predictions
        order = predictions.losses.argsort(descending=True)
        wrong = order[~predictions.correct[order]][:_SHOWN_MISTAKES].tolist()
        if not wrong:
            return []
        picture, caption = make_evaluation_grid(self.dataset, self.images, self.results[0], wrong), "worst mistakes"
        return [notebook.render_figure(caption, notebook.render_picture(picture, _MISTAKES_WIDTH, alt=caption))]


@name_keywords
def evaluate(
    model: AnyModel,
    data: DataSource,
    *,
    against: AnyModel | Sequence[AnyModel] = (),
    split: SplitName | None = None,
    real: str | Path | None = None,
    classes: str | Path | None = None,
    tta: bool = False,
    abstain: float | None = None,
    strict: bool = False,
    out: str | Path | None = None,
    batch: int = 64,
    device: str | None = None,
    precision: Precision = "float32",
    workers: int | None = None,
    progress: Progress = True,
    notify: Notify | None = None,
) -> Evaluation:
    """Measure models on labeled images: `vitrail evaluate` from Python, with its defaults.

        vitrail.evaluate("model.safetensors", "photos").accuracy

    Arguments:

    - `model`: A name, a path, a `Run` or a `Trained`.
    - `data`: A folder or any other DATA of the commands, or data in memory, as in `finetune`.
    - `against`: Another model or a list of them, measured on the same images and compared with the first.
    - `split`: "test", "val", "train" or "all"; by default test, or val where there is no test.
    - `real`: A ReaL file: all correct labels of each image.
    - `classes`: A file with the only classes the model may predict, one per line: for ImageNet-A, -R and the like.
    - `tta`: Average the predictions of an image and of its mirror image (test-time augmentation).
    - `abstain`: Find the probability above which this share of predictions is correct on val; the model stores it.
    - `strict`: Refuse unreadable images; by default up to a tenth of the images may be unreadable and are left out.
    - `out`: A new or empty folder for tables and figures; none by default.
    - `batch`: Images per batch.
    - `device`: cpu, cuda or mps; the best device available by default.
    - `precision`: float32, bfloat16 or int8: of the computation that is measured, whatever `predict` chooses.
    - `workers`: Processes that decode images; one per core, less one, by default.
    - `progress`: Whether a bar is shown, or a function that shows progress.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    notes = NoteCollector(notify)
    models = list_models([model, *list_models(against)])
    _check_numbers(model, batch, abstain)
    folder = _check_folder(out)
    with distributed.join_process_group(device) as (group, chosen_device):
        settings = EvaluationSettings(
            group=group, device=chosen_device, precision=precision, batch=batch, workers=count_loader_workers(workers),
            tta=tta, class_subset=None if classes is None else Path(classes), real=None if real is None else Path(real),
            strict=strict, show_progress=choose_progress(progress), notify=notes,
        )  # fmt: skip
        return _measure(models, data, split, abstain, folder, settings)


def _measure(
    models: Sequence[AnyModel],
    data: DataSource,
    split: SplitName | None,
    abstain: float | None,
    folder: Path | None,
    settings: EvaluationSettings,
) -> Evaluation:
    """Measure models on the images of a split, and write the tables."""
    notes, name = settings.notify, get_model_name(models[0])
    dataset = open_dataset(data)
    if abstain is not None:
        abstention.check_threshold_target(name, dataset)
    _notify_of_dataset(dataset, split, notes)
    dataset_evaluation.check_evaluable(dataset, split)
    evaluated = _load_models(models, notes)
    images = dataset_evaluation.select_images(dataset, split, evaluated, notes)
    results = dataset_evaluation.evaluate_models(evaluated, dataset, images, settings)
    unreadable = dataset_evaluation.list_unreadable(images, results, notes)
    facts = dataset_evaluation.collect_facts(dataset, results, settings)
    facts |= {"unreadable": unreadable} if unreadable else {}
    if folder is not None and settings.group.is_rank0:
        write_evaluation(dataset, images, results, facts, folder)
    if abstain is not None:
        facts["threshold"] = abstention.fit_threshold(name, dataset, settings, abstain)
    kept = tuple(notes) if isinstance(notes, NoteCollector) else ()
    return Evaluation(facts, tuple(results), dataset, images, folder, kept)


def _check_numbers(model: AnyModel, batch: int, abstain: float | None) -> None:
    if batch < 1:
        raise UsageError(f"--batch is {batch}; it must be at least 1")
    if abstain is not None and not 0 < abstain < 1:
        raise UsageError(f"--abstain is {abstain}; it is the share of correct predictions, such as 0.95")
    if abstain is not None and isinstance(model, Trained):
        raise UsageError("abstain stores a threshold in the model's file: give the file or the run, not a Trained")


def _check_folder(out: str | Path | None) -> Path | None:
    if out is None:
        return None
    folder = Path(out)
    if remote.is_remote(str(out)) or folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"--out {out} must be a local folder that is new or empty")
    return folder


def _load_models(models: Sequence[AnyModel], notify: Notify) -> list[EvaluatedModel]:
    """Load the models, each name or path once; models in memory of one name are numbered."""
    loaded: dict[str, EvaluatedModel] = {}
    for model in models:
        name = get_model_name(model)
        if isinstance(model, Trained):
            name = choose_distinct_name(name, loaded)
        if name not in loaded:
            is_timm_network = isinstance(model, str) and model.startswith(dataset_evaluation.TIMM_PREFIX)
            trained = None if is_timm_network else load_trained(model, notify)
            loaded[name] = load_evaluated_model(name) if trained is None else make_evaluated_model(trained, name)
    return list(loaded.values())


def _notify_of_dataset(dataset: Dataset, split: SplitName | None, notify: Notify) -> None:
    """Pass the notes on, except that images were held out where all of them are measured."""
    if split is None and dataset_evaluation.is_unsplit(dataset):
        notes = [note for note in dataset.notes if note != dataset.holdout_note]
        dataset = dataclasses.replace(dataset, notes=tuple(notes))
    for note in list_dataset_notes(dataset):
        notify(note)


@dataclasses.dataclass(frozen=True, repr=False)
class ProbeResult:
    """The accuracy of simple classifiers on a model's features; mAP of multi-label images, and of patches mean IoU.

    `vitrail.probe` returns it.

        result = vitrail.probe("model.safetensors", "photos", methods=["knn"])
        print(result.scores["kNN"])
    """

    metrics: dict[str, Any]
    """All numbers, with a row in `scores` for each classifier."""
    notes: tuple[str, ...] = ()

    @property
    def scores(self) -> dict[str, float]:
        """The accuracy, mAP or mean IoU of each classifier: "1-shot", "5-shot", ..., "kNN", "linear", "logistic"."""
        return {
            f"{score['shots']}-shot" if score["shots"] else str(score["method"]): float(score[self._measure])
            for score in self.metrics["scores"]
        }

    @property
    def _measure(self) -> str:
        """The key of the score by which classifiers are compared."""
        names = "miou", "mean_average_precision", "top1"
        return next(name for name in names if name in self.metrics["scores"][0])

    def __repr__(self) -> str:
        images = pluralize(self.metrics["images"], f"{self.metrics['split']} image")
        scores = ", ".join(f"{name} {accuracy:.1%}" for name, accuracy in self.scores.items())
        measure = {"miou": "mean IoU on", "mean_average_precision": "mAP on", "top1": "of"}[self._measure]
        return f"ProbeResult({scores} {measure} {images})"

    def _repr_html_(self) -> str:
        rows = {name: f"{accuracy:.1%}" for name, accuracy in self.scores.items()}
        images = {"images": f"{self.metrics['images']:,} of {self.metrics['split']}"}
        table = notebook.render_table(rows | images)
        return notebook.wrap_html(table, self._render_few_shot(), *notebook.render_notes(self.notes))

    def _render_few_shot(self) -> str:
        """The few-shot accuracy by images per class, where there are several."""
        name = self._measure
        points = sorted((score["shots"], float(score[name])) for score in self.metrics["scores"] if score["shots"])
        if len(points) < 2:
            return ""
        caption, (shots, accuracies) = f"few-shot {'accuracy' if name == 'top1' else 'mAP'}", zip(*points, strict=True)
        line = ChartLine(caption, shots, accuracies)
        chart = svg_charts.draw_lines([line], label=caption, x_label="images per class", percent=True)
        return notebook.render_figure(caption, chart)


@name_keywords
def probe(
    model: AnyModel,
    data: DataSource,
    *,
    methods: ProbeMethod | Sequence[ProbeMethod] = ("few-shot", "knn", "linear", "logistic"),
    shots: int | Sequence[int] = (),
    seeds: int = 3,
    penalty: float | Literal["auto"] = 1024.0,
    k: int = 20,
    train_on_val: bool = False,
    segmentation: str | Path | None = None,
    save: str | Path | None = None,
    overwrite: bool = False,
    preprocess: PreprocessName | None = None,
    batch: int = 64,
    device: str | None = None,
    workers: int | None = None,
    progress: Progress = True,
    notify: Notify | None = None,
) -> ProbeResult:
    """Measure a model's features by simple classifiers: `vitrail probe` from Python, with its defaults.

        vitrail.probe("model.safetensors", "photos", methods=["few-shot"], shots=[5]).scores

    Arguments:

    - `model`: A name, a path, a `Run` or a `Trained`.
    - `data`: A folder or any other DATA of the commands, or data in memory, as in `finetune`.
    - `methods`: One or several of "few-shot", "knn", "linear" and "logistic".
    - `shots`: Images per class for few-shot, one or several; by default 1, 5, 10, 25, where every class has as many.
    - `seeds`: Random draws of the few-shot images, for the mean and standard deviation.
    - `penalty`: L2 penalty of the ridge regressions; "auto" chooses it on held-out images.
    - `k`: Number of neighbors of knn.
    - `train_on_val`: Train on the validation images too, after the settings are chosen.
    - `segmentation`: A folder of PNG masks with the images' names. Linear and logistic then classify patches, by dense
      features, and the scores are mean IoU.
    - `save`: Write the model with the better of linear and logistic as its head to this file.
    - `overwrite`: Replace the file of that name.
    - `preprocess`: Mean, std and interpolation for weights that do not state them.
    - `batch`: Images per batch.
    - `device`: cpu, cuda or mps; the best device available by default.
    - `workers`: Processes that decode images; one per core, less one, by default.
    - `progress`: Whether a bar is shown, or a function that shows progress.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    get_model_name(model)  # refuses what is none
    if isinstance(model, str):
        check_loadable(model)
    with distributed.join_process_group(device) as (group, chosen_device):
        settings = ProbeSettings(
            methods=[methods] if isinstance(methods, str) else methods,
            shots=(shots,) if isinstance(shots, int) else tuple(shots), seeds=seeds, k=k,
            penalty=None if penalty == "auto" else penalty, train_on_val=train_on_val,
            segmentation=None if segmentation is None else Path(segmentation),
            save=None if save is None else Path(save), overwrite=overwrite, batch=batch,
            workers=count_loader_workers(workers), group=group, device=chosen_device,
            show_progress=choose_progress(progress), notify=NoteCollector(notify),
        )  # fmt: skip
        return _probe(model, data, preprocess, settings)


def _probe(
    model: AnyModel, data: DataSource, preprocess: PreprocessName | None, settings: ProbeSettings
) -> ProbeResult:
    """Fit the classifiers of a dataset; only rank 0 computes their scores, and all return them."""
    dataset = open_dataset(data)
    trained = set_preprocess(load_trained(model, settings.notify), preprocess)
    for note in list_dataset_notes(dataset):
        settings.notify(note)
    name = data if isinstance(data, str) else dataset.name
    if settings.segmentation is None:
        check_classes(dataset)
        own_facts = run_probe(trained, dataset, name, settings)
    else:
        own_facts = run_segmentation_probe(trained, dataset, name, settings)
    facts = distributed.run_on_rank0(lambda: own_facts)
    assert facts is not None
    kept = tuple(settings.notify) if isinstance(settings.notify, NoteCollector) else ()
    return ProbeResult({"model": get_model_name(model)} | facts, kept)
