"""A run's facts as one HTML file that needs no other: style, charts and pictures are inside, and no script."""

import datetime
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from vitrail.evaluate.calibration import count_bins
from vitrail.evaluate.predictions import MIN_TOP5_CLASSES
from vitrail.figures.plots import make_printable
from vitrail.formatting import pluralize
from vitrail.report import data_uris, fact_rows, svg_charts
from vitrail.report.findings import (
    ClassRow,
    ConfusedPair,
    find_weakest,
    list_classes,
    list_confusions,
    make_suggestions,
)
from vitrail.report.model_card import ModelCard
from vitrail.report.model_figures import ModelFigures, sample_evenly
from vitrail.report.run_facts import RunFacts
from vitrail.report.svg_charts import ChartLine
from vitrail.weights.trained import Trained

MAX_CONFUSED_PAIRS = 10
"""Rows of the table of what is confused most."""
MAX_CLASS_ROWS = 100
"""Rows of the table of classes, the worst first."""
_MAX_COLUMNS = 290  # as many as a chart has pixels for
_MAX_ONE_TABLE = 12  # classes: more stand in two tables
_MAX_NAMED_BARS = 30  # classes whose training images are bars with names
_MAX_CONFUSION_CLASSES = 40  # classes of a confusion where there are too many to show all
_DROPPED_FLAGS = ("--resume", "--overwrite", "--json")  # of the command, not of the run
_DROPPED_OPTIONS = ("--minutes", "--runs", "--seed", "--out")  # with a value; epochs and seed are known to the digit


def render_page(facts: RunFacts, trained: Trained | None, figures: ModelFigures | str, card: ModelCard | None) -> str:
    """The whole page; `inside` may be the sentence that says why nothing of the model is shown."""
    classes, confusions = list_classes(facts), list_confusions(facts)
    return _load_template().render(
        facts=facts,
        result=facts.result,
        title=fact_rows.make_title(facts),
        lead=fact_rows.make_lead(facts, trained),
        date=_format_date(facts.end_time),
        cautions=list(fact_rows.list_cautions(facts)),
        shares=_make_accuracy_bars(facts),
        pretrained=[] if facts.pretraining is None else list(fact_rows.list_pretraining_rows(facts.pretraining)),
        reconstruction=None
        if facts.reconstruction is None
        else data_uris.encode_image_file(facts.reconstruction, 1000),
        tables=_make_tables(facts, trained),
        curves=_draw_curves(facts),
        top5=len(facts.config["classes"]) >= MIN_TOP5_CLASSES,
        weakest=find_weakest(classes),
        confusions=confusions[:MAX_CONFUSED_PAIRS],
        missed=max(classes, key=lambda row: row.images - row.right, default=None),
        invented=max(classes, key=lambda row: row.predicted - row.right, default=None),
        steps=make_suggestions(facts, classes, confusions),
        confused=_draw_confusion(facts, confusions) if facts.is_single_label else None,
        class_tables=_split_class_table(classes),
        left_out=len(classes) - MAX_CLASS_ROWS,
        reliability=_draw_reliability(facts),
        sizes=_draw_class_sizes(facts),
        data_rows=list(_list_data_report(facts)),
        inside=figures,
        not_rollout=fact_rows.ROLLOUT_CAUTION,
        added=_draw_layer_additions(figures),
        rerun=make_rerun_command(facts),
        again=make_repeat_commands(facts),
        card=card,
    )


@lru_cache(maxsize=1)
def _load_template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": fact_rows.format_percent,
        "between": fact_rows.format_interval,
        "shape": lambda sides: fact_rows.format_shape(*sides),
        "signed": fact_rows.format_signed,
        "legible": make_printable,
        "kind": lambda block: type(block).__name__,
    }
    return environment.get_template("template.html")


def _format_date(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    day = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{day.day} {day:%B %Y}"


class AccuracyBar(NamedTuple):
    """A bar of the comparison."""

    name: str
    value: float
    is_model: bool


def _make_accuracy_bars(facts: RunFacts) -> list[AccuracyBar]:
    result = facts.result
    if result is None:
        return []
    others = [AccuracyBar(baseline.name, baseline.right / result.images, False) for baseline in facts.baselines]
    return [AccuracyBar("this model", result.top1, True), *others]


def _make_tables(facts: RunFacts, trained: Trained | None) -> dict[str, list[fact_rows.FactRow]]:
    return {
        "Model": [] if trained is None else list(fact_rows.list_model_rows(trained)),
        "Data": list(fact_rows.list_data_rows(facts)),
        "Training": list(fact_rows.list_training_rows(facts)),
        "Preprocessing": list(fact_rows.list_preprocess_rows(facts.config)),
    }


# --- curves and answers ----------------------------------------------------------------------------------------------


def _draw_curves(facts: RunFacts) -> list[tuple[str, Sequence[tuple[str, str]], Markup]]:
    """Title, key and chart of loss, accuracy and learning rate over the epochs."""
    found = facts.epochs
    if not found:
        return []
    epochs = found["epoch"]

    def make_lines(*names: tuple[str, str]) -> list[ChartLine]:
        return [ChartLine(name, epochs, found[column]) for name, column in names]

    losses = make_lines(("validation", "val/loss"), ("training", "train/loss"))
    right = make_lines(("top-1", "metrics/accuracy_top1"), ("top-5", "metrics/accuracy_top5"))
    five = len(facts.config["classes"]) >= MIN_TOP5_CLASSES and not facts.is_multi_label
    right = right if five or facts.masked else right[:1]
    rate = make_lines(("learning rate", "lr/pg0"))
    if not fact_rows.drop_nonfinite(right[0].y):  # pixels were to be told: there is nothing to be right or wrong about
        right = []
    told = "Validation exact match" if facts.is_multi_label else "Validation accuracy"
    told = f"{told} of colours" if facts.masked else told
    drawn = [
        ("Loss", losses, svg_charts.draw_lines(losses, label=_describe_lines("loss", losses), x_label="epoch")),
        (told, right, svg_charts.draw_lines(right, label=_describe_lines(told, right), x_label="epoch", percent=True)),
        ("Learning rate", rate, svg_charts.draw_lines(rate, label="learning rate over the epochs", x_label="epoch")),
    ]
    return [(name, _make_legend(of), chart) for name, of, chart in drawn if of]


def _make_legend(lines: Sequence[ChartLine]) -> list[tuple[str, str]]:
    return [(kind, line.name) for kind, line in zip("abc", lines, strict=False)] if len(lines) > 1 else []


def _describe_lines(what: str, lines: Sequence[ChartLine]) -> str:
    """What a chart shows, for those who do not see it."""
    told = [
        f"{line.name} from {values[0]:.3g} to {values[-1]:.3g}"
        for line in lines
        if (values := fact_rows.drop_nonfinite(line.y))
    ]
    return f"{what} over the epochs: {', '.join(told) or 'nothing yet'}"


class ConfusionChart(NamedTuple):
    """What is taken for what."""

    chart: Markup
    num_classes: int
    """Classes in it."""


def _draw_confusion(facts: RunFacts, confusions: Sequence[ConfusedPair]) -> ConfusionChart:
    taken = Counter((answer.label, answer.predicted) for answer in facts.predictions)
    images = Counter(answer.label for answer in facts.predictions)
    names = _choose_confused_classes(facts.config["classes"], [(each.label, each.predicted) for each in confusions])
    counts = np.array([[taken[true, said] for said in names] for true in names], dtype=np.int64)
    right = f"{counts.trace():,} of {counts.sum():,} answers on the diagonal"
    label = f"confusion matrix of {pluralize(len(names), 'class')}, {right}"
    return ConfusionChart(
        svg_charts.draw_confusion_matrix(counts, names, [images[name] for name in names], label=label), len(names)
    )


def _choose_confused_classes(classes: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """All classes, or where they are too many those of the pairs confused most, partners beside each other."""
    if len(classes) <= svg_charts.MAX_NAMED_CLASSES:
        return list(classes)
    chosen = dict.fromkeys(name for pair in pairs for name in pair)
    chosen |= dict.fromkeys(classes[:_MAX_CONFUSION_CLASSES])  # where hardly anything is confused
    return list(chosen)[:_MAX_CONFUSION_CLASSES]


def _split_class_table(classes: Sequence[ClassRow]) -> list[Sequence[ClassRow]]:
    """The weakest classes, in two tables beside each other where they are many."""
    shown = classes[:MAX_CLASS_ROWS]
    half = len(shown) if len(shown) <= _MAX_ONE_TABLE else -(-len(shown) // 2)
    return [part for part in (shown[:half], shown[half:]) if part]


def _draw_reliability(facts: RunFacts) -> Markup | None:
    if facts.result is None:
        return None
    label = f"reliability diagram, expected calibration error {facts.result.calibration_error:.1%}"
    if facts.multi_label_metrics is not None:
        answers, _, right = zip(*facts.multi_label_metrics.bins, strict=True)
        return svg_charts.draw_reliability(answers, right, label=label, x_label="probability of a label")
    sure, hits = [answer.probability for answer in facts.predictions], [answer.right for answer in facts.predictions]
    binned = count_bins(sure, hits)
    return svg_charts.draw_reliability(binned.counts, binned.correct, label=label, x_label="probability of the answer")


# --- data ------------------------------------------------------------------------------------------------------------


def _count_train_images(facts: RunFacts) -> Mapping[str, int]:
    """Training images of each class, by whichever file counts them."""
    if facts.train_counts or facts.data_report is None:
        return facts.train_counts
    return {row["name"]: row.get("train", 0) for row in facts.data_report["classes"]}


def _draw_class_sizes(facts: RunFacts) -> Markup | None:
    rows = sorted(_count_train_images(facts).items(), key=lambda row: -row[1])
    if not rows:
        return None
    names, sizes = zip(*rows, strict=True)
    label = f"training images of {pluralize(len(sizes), 'class')}, from {sizes[0]:,} down to {sizes[-1]:,}"
    if len(sizes) <= _MAX_NAMED_BARS:
        return svg_charts.draw_named_bars(names, sizes, label=label)
    across = f"{pluralize(len(sizes), 'class')}, from {svg_charts.shorten_name(names[0], 14)} to {svg_charts.shorten_name(names[-1], 14)}"
    return svg_charts.draw_columns(sample_evenly(sizes, _MAX_COLUMNS), label=label, x_label=across)


def _list_data_report(facts: RunFacts) -> Iterator[fact_rows.FactRow]:
    """The data report in lines."""
    report = facts.data_report
    if report is None:
        return
    headers = f"; of {report['headers_only']:,} more only the header" if report["headers_only"] else ""
    yield "decoded", f"{pluralize(report['decoded'], 'image')}{headers}"
    yield "unreadable", f"{len(report['bad']):,}"
    yield "formats", ", ".join(f"{name} {number:,}" for name, number in report["formats"].items()) or "none"
    for side, found in report["sizes"].items():
        yield side, f"{found['min']:,} to {found['max']:,} pixels, median {found['median']:,}"
    colour = report["color"]
    if colour["mean"]:
        mean, std = (" ".join(f"{value:.3f}" for value in colour[name]) for name in ("mean", "std"))
        yield "colour", f"mean {mean}, std {std} (of {colour['split']}); grey: {pluralize(colour['gray'], 'image')}"
    copies = report["duplicates"]
    yield (
        "copies",
        f"{pluralize(copies['exact'], 'group')} of equal files, {pluralize(copies['near'], 'group')} of lookalikes",
    )
    yield "copies across splits", pluralize(copies["across_splits"], "group")
    yield "copies with different labels", pluralize(copies["different_labels"], "group")


# --- the walk, and the run again -------------------------------------------------------------------------------------


def _draw_layer_additions(figures: ModelFigures | str) -> Markup | None:
    if isinstance(figures, str) or isinstance(figures.trace, str):
        return None
    way = figures.trace.trace
    return svg_charts.draw_paired_columns(
        way.attention_ratio, way.mlp_ratio, label="what each layer adds to a token", x_label="layer"
    )


def make_rerun_command(facts: RunFacts) -> str | None:
    """The command that makes this run again, with the epochs and the seed that it had; None where it is unknown."""
    if facts.command is None:
        return None
    kept, given = [], iter(facts.command)
    timed = seeded = False
    for word in given:
        name, equals, _ = word.partition("=")
        if name in _DROPPED_OPTIONS:
            timed, seeded = timed or name == "--minutes", seeded or name in ("--runs", "--seed")
            if not equals:
                next(given, None)
        elif word not in _DROPPED_FLAGS:
            kept.append(word)
    if timed:
        kept += ["--epochs", f"{facts.config['recipe']['epochs']:.15g}"]
        side = facts.config["recipe"].get("image_size")
        kept += ["--image-size", str(side)] * (side is not None and "--image-size" not in kept)
        kept += ["--replan", ",".join(f"{step}:{steps}" for step, steps in facts.replanned_steps)] * bool(
            facts.replanned_steps
        )
    kept += ["--seed", str(facts.config["seed"])] * seeded
    world = facts.config["world_size"]
    command = "vitrail" if world == 1 else f"torchrun --nproc-per-node {world} -m vitrail"
    return f"{command} {_join_command(kept)}"


def make_repeat_commands(facts: RunFacts) -> list[str]:
    """The commands that measure the run's weights again, if they were measured, and that write the page again."""
    measure = ["vitrail", "evaluate", "RUN/weights/best.safetensors", str(facts.config["data"])]
    report = ["vitrail", "report", "RUN"]
    return [_join_command(report)] if facts.result is None else [_join_command(measure), _join_command(report)]


def _join_command(command: Sequence[str]) -> str:
    """A command as a shell takes it, with a question mark for bytes that are no text."""
    return shlex.join(command).encode(errors="replace").decode()
