"""The HTML report of a run: one self-contained file with styles, charts and images, and no scripts."""

import datetime
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from markupsafe import Markup

from vitrail.evaluation.calibration import count_bins
from vitrail.evaluation.predictions import MIN_TOP5_CLASSES
from vitrail.formatting import pluralize
from vitrail.report import fact_rows, findings, svg_charts
from vitrail.report.model_card import ModelCard
from vitrail.report.model_figures import ModelFigures, encode_image_file, sample_evenly
from vitrail.report.page_templates import load_template
from vitrail.report.run_facts import ClassRow, RunFacts
from vitrail.report.svg_charts import ChartLine
from vitrail.visualization.plots import shorten_name
from vitrail.weights.trained import Trained

MAX_CONFUSED_PAIRS = 10  # the most rows of the table of confused pairs
MAX_CLASS_ROWS = 100  # the most rows of the table of classes, the weakest first
_MAX_COLUMNS = 290  # as many as a chart has pixels for
_MAX_ONE_TABLE = 12  # more classes are split into two tables
_MAX_NAMED_BARS = 30  # the most classes whose training images are bars with names
_MAX_CONFUSION_CLASSES = 40  # of a confusion matrix that cannot show all classes
_DROPPED_FLAGS = ("--resume", "--overwrite", "--json")  # they change the command, not the run
_DROPPED_OPTIONS = ("--minutes", "--runs", "--seed", "--out")  # with a value; epochs and seed are known exactly


def render_page(facts: RunFacts, trained: Trained | None, figures: ModelFigures | str, card: ModelCard | None) -> str:
    """Render the whole page; `figures` may be a sentence that says why there are none."""
    classes, confusions = findings.list_classes(facts), findings.list_confusions(facts)
    shown_classes = _choose_shown_classes(facts.config["classes"], confusions)
    return load_template("template.html").render(
        facts=facts,
        result=facts.result,
        title=fact_rows.make_title(facts),
        lead=fact_rows.make_lead(facts, trained),
        date=_format_date(facts.end_time),
        cautions=list(fact_rows.list_cautions(facts)),
        pretraining_rows=[] if facts.pretraining is None else list(fact_rows.list_pretraining_rows(facts.pretraining)),
        reconstruction=facts.reconstruction and encode_image_file(facts.reconstruction, 1000),
        tables={
            "Model": [] if trained is None else list(fact_rows.list_model_rows(trained)),
            "Data": list(fact_rows.list_data_rows(facts)),
            "Training": list(fact_rows.list_training_rows(facts)),
            "Preprocessing": list(fact_rows.list_preprocess_rows(facts.config)),
        },
        curves=_draw_curves(facts),
        has_top5=len(facts.config["classes"]) >= MIN_TOP5_CLASSES,
        weakest=findings.find_weakest(classes),
        confusions=confusions[:MAX_CONFUSED_PAIRS],
        label_confusions=findings.list_label_confusions(facts)[:MAX_CONFUSED_PAIRS],
        has_thresholds=any(row.threshold is not None for row in facts.label_rows),
        most_missed=max(classes, key=lambda row: row.images - row.correct, default=None),
        most_added=max(classes, key=lambda row: row.predicted - row.correct, default=None),
        suggestions=findings.make_suggestions(facts, classes, confusions),
        num_shown_classes=len(shown_classes),
        confusion_matrix=_draw_confusion(facts, shown_classes) if facts.is_single_label else None,
        class_tables=_split_class_table(classes, is_wide=facts.is_multi_label),
        num_omitted_classes=len(classes) - MAX_CLASS_ROWS,
        reliability=_draw_reliability(facts),
        class_sizes=_draw_class_sizes(facts),
        data_rows=list(_list_data_report(facts)),
        figures=figures,
        rollout_caution=fact_rows.ROLLOUT_CAUTION,
        layer_additions=_draw_layer_additions(figures),
        rerun_command=make_rerun_command(facts),
        repeat_commands=make_repeat_commands(facts),
        card=card,
    )


def _format_date(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    day = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{day.day} {day:%B %Y}"


# --- curves and predictions ------------------------------------------------------------------------------------------


def _draw_curves(facts: RunFacts) -> list[tuple[str, Sequence[ChartLine], Markup]]:
    """Title, lines and chart of loss, accuracy and learning rate over the epochs."""
    columns = facts.epochs
    if not columns:
        return []

    def make_lines(*names: tuple[str, str]) -> list[ChartLine]:
        return [ChartLine(name, columns["epoch"], columns[column]) for name, column in names]

    losses = make_lines(("validation", "val/loss"), ("training", "train/loss"))
    accuracies = make_lines(("top-1", "metrics/accuracy_top1"), ("top-5", "metrics/accuracy_top5"))
    has_top5 = len(facts.config["classes"]) >= MIN_TOP5_CLASSES and not facts.is_multi_label
    accuracies = accuracies if has_top5 or facts.masked else accuracies[:1]
    if not fact_rows.drop_nonfinite(accuracies[0].y):  # predicted pixels have no accuracy
        accuracies = []
    metric = "Validation exact match" if facts.is_multi_label else "Validation accuracy"
    metric = f"{metric} of colors" if facts.masked else metric
    charts = [
        ("Loss", losses, False),
        (metric, accuracies, True),
        ("Learning rate", make_lines(("learning rate", "lr/pg0")), False),
    ]
    return [
        (name, lines, svg_charts.draw_lines(lines, label=label, x_label="epoch", percent=percent))
        for name, lines, percent in charts
        if lines and (label := _describe_lines(name, lines))
    ]


def _describe_lines(quantity: str, lines: Sequence[ChartLine]) -> str:
    """Describe a chart for screen readers."""
    ranges = [
        f"{line.name} from {values[0]:.3g} to {values[-1]:.3g}"
        for line in lines
        if (values := fact_rows.drop_nonfinite(line.y))
    ]
    return f"{quantity} over the epochs: {', '.join(ranges) or 'nothing yet'}"


def _draw_confusion(facts: RunFacts, names: Sequence[str]) -> Markup:
    pairs = Counter((prediction.label, prediction.predicted) for prediction in facts.predictions)
    images = [facts.image_counts[name] for name in names]
    counts = np.array([[pairs[label, predicted] for predicted in names] for label in names], dtype=np.int64)
    diagonal = f"{counts.trace():,} of {counts.sum():,} predictions on the diagonal"
    label = f"confusion matrix of {pluralize(len(names), 'class')}, {diagonal}"
    return svg_charts.draw_confusion_matrix(counts, names, images, label=label)


def _choose_shown_classes(classes: Sequence[str], confusions: Sequence[findings.ConfusedPair]) -> list[str]:
    """All classes, or if they are too many those of the most confused pairs, partners side by side."""
    if len(classes) <= svg_charts.MAX_NAMED_CLASSES:
        return list(classes)
    chosen = dict.fromkeys(name for pair in confusions for name in (pair.label, pair.predicted))
    chosen |= dict.fromkeys(classes[:_MAX_CONFUSION_CLASSES])  # when few classes are confused
    return list(chosen)[:_MAX_CONFUSION_CLASSES]


def _split_class_table(classes: Sequence[ClassRow], *, is_wide: bool) -> list[Sequence[ClassRow]]:
    """The weakest classes, split into two tables side by side if they are many and the tables not wide."""
    rows = classes[:MAX_CLASS_ROWS]
    half = len(rows) if is_wide or len(rows) <= _MAX_ONE_TABLE else -(-len(rows) // 2)
    return [table for table in (rows[:half], rows[half:]) if table]


def _draw_reliability(facts: RunFacts) -> Markup | None:
    if facts.result is None:
        return None
    label = f"reliability diagram, expected calibration error {facts.result.calibration_error:.1%}"
    if facts.multi_label_metrics is not None:
        counts, _, correct = zip(*facts.multi_label_metrics.bins, strict=True)
        return svg_charts.draw_reliability(counts, correct, label=label, x_label="probability of a label")
    probabilities, correct = zip(*((record.probability, record.correct) for record in facts.predictions), strict=True)
    binned = count_bins(probabilities, correct)
    return svg_charts.draw_reliability(binned.counts, binned.correct, label=label, x_label="predicted probability")


# --- data ------------------------------------------------------------------------------------------------------------


def _draw_class_sizes(facts: RunFacts) -> Markup | None:
    checked = () if facts.data_report is None else facts.data_report["classes"]
    train_images = facts.train_counts or {row["name"]: row.get("train", 0) for row in checked}
    if not train_images:
        return None
    names, sizes = zip(*sorted(train_images.items(), key=lambda row: -row[1]), strict=True)
    label = f"training images of {pluralize(len(sizes), 'class')}, from {sizes[0]:,} down to {sizes[-1]:,}"
    if len(sizes) <= _MAX_NAMED_BARS:
        return svg_charts.draw_named_bars(names, sizes, label=label)
    first, last = shorten_name(names[0], 14), shorten_name(names[-1], 14)
    x_label = f"{pluralize(len(sizes), 'class')}, from {first} to {last}"
    return svg_charts.draw_columns(sample_evenly(sizes, _MAX_COLUMNS), label=label, x_label=x_label)


def _list_data_report(facts: RunFacts) -> Iterator[fact_rows.FactRow]:
    """The report of `vitrail data check`, row by row."""
    report = facts.data_report
    if report is None:
        return
    headers = f"; {report['headers_only']:,} more by their headers only" if report["headers_only"] else ""
    yield "decoded", f"{pluralize(report['decoded'], 'image')}{headers}"
    yield "unreadable", f"{len(report['bad']):,}"
    yield "formats", ", ".join(f"{name} {count:,}" for name, count in report["formats"].items()) or "none"
    for side, pixels in report["sizes"].items():
        yield side, f"{pixels['min']:,} to {pixels['max']:,} pixels, median {pixels['median']:,}"
    color = report["color"]
    if color["mean"]:
        mean, std = (" ".join(f"{value:.3f}" for value in color[name]) for name in ("mean", "std"))
        yield "color", f"mean {mean}, std {std} (of {color['split']}); gray: {pluralize(color['gray'], 'image')}"
    duplicates = report["duplicates"]
    exact, near = pluralize(duplicates["exact"], "group"), pluralize(duplicates["near"], "group")
    yield "duplicates", f"{exact} of equal files, {near} of near-duplicates"
    yield "duplicates across splits", pluralize(duplicates["across_splits"], "group")
    yield "duplicates with different labels", pluralize(duplicates["different_labels"], "group")


# --- the forward trace, and commands that repeat the run -------------------------------------------------------------


def _draw_layer_additions(figures: ModelFigures | str) -> Markup | None:
    if isinstance(figures, str) or isinstance(figures.trace, str):
        return None
    trace = figures.trace.trace
    return svg_charts.draw_paired_columns(
        trace.attention_ratio, trace.mlp_ratio, label="what attention and MLP add in each layer", x_label="layer"
    )


def make_rerun_command(facts: RunFacts) -> str | None:
    """The command that repeats this run with the same epochs and seed; None if it was not recorded."""
    if facts.command is None:
        return None
    words, recorded = [], iter(facts.command)
    timed = seeded = False
    for word in recorded:
        name, equals, _ = word.partition("=")
        if name in _DROPPED_OPTIONS:
            timed, seeded = timed or name == "--minutes", seeded or name in ("--runs", "--seed")
            if not equals:
                next(recorded, None)
        elif word not in _DROPPED_FLAGS:
            words.append(word)
    if timed:
        words += ["--epochs", f"{facts.config['recipe']['epochs']:.15g}"]
        image_size = facts.config["recipe"].get("image_size")
        if image_size is not None and "--image-size" not in words:
            words += ["--image-size", str(image_size)]
        if facts.replanned_steps:
            words += ["--replan", ",".join(f"{step}:{steps}" for step, steps in facts.replanned_steps)]
    words += ["--seed", str(facts.config["seed"])] * seeded
    world_size = facts.config["world_size"]
    command = "vitrail" if world_size == 1 else f"torchrun --nproc-per-node {world_size} -m vitrail"
    return f"{command} {_join_command(words)}"


def make_repeat_commands(facts: RunFacts) -> list[str]:
    """The commands that evaluate the run's weights again, if they were evaluated, and that write the report again."""
    evaluate = ["vitrail", "evaluate", "RUN/weights/best.safetensors", str(facts.config["data"])]
    return [*([] if facts.result is None else [_join_command(evaluate)]), "vitrail report RUN"]


def _join_command(command: Sequence[str]) -> str:
    """Quote a command for a shell, with a question mark for bytes that are not text."""
    return shlex.join(command).encode(errors="replace").decode()
