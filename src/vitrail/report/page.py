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

from vitrail.evaluate.classify import TOP5_CLASSES
from vitrail.figures.draw import legible
from vitrail.plurals import plural
from vitrail.report import charts, embedded, words
from vitrail.report.card import Card
from vitrail.report.charts import Curve
from vitrail.report.findings import ClassRow, Confusion, find_weakest, list_classes, list_confusions, suggest_steps
from vitrail.report.gather import Facts
from vitrail.report.inside import Inside, spread
from vitrail.weights.trained import Trained

PAIRS = 10
"""Rows of the table of what is confused most."""
CLASSES = 100
"""Rows of the table of classes, the worst first."""
_COLUMNS = 290  # as many as a chart has pixels for
_ONE_TABLE = 12  # classes: more stand in two tables
_NAMED_BARS = 30  # classes whose training images are bars with names
_FEWER = 40  # classes of a confusion where there are too many to show all
_ONCE = ("--resume", "--overwrite", "--json")  # of the command, not of the run
_OTHERWISE = ("--minutes", "--runs", "--seed", "--out")  # with a value; epochs and seed are known to the digit


def page(facts: Facts, trained: Trained | None, inside: Inside | str, card: Card | None) -> str:
    """The whole page; `inside` may be the sentence that says why nothing of the model is shown."""
    classes, confusions = list_classes(facts), list_confusions(facts)
    return _template().render(
        facts=facts,
        result=facts.result,
        title=words.title(facts),
        lead=words.lead(facts, trained),
        date=_date(facts.ended),
        cautions=list(words.cautions(facts)),
        shares=_shares(facts),
        pretrained=[] if facts.pretrained is None else list(words.pretrained_rows(facts.pretrained)),
        reconstruction=None if facts.reconstruction is None else embedded.file(facts.reconstruction, 1000),
        tables=_tables(facts, trained),
        curves=_curves(facts),
        top5=len(facts.config["classes"]) >= TOP5_CLASSES,
        weakest=find_weakest(classes),
        confusions=confusions[:PAIRS],
        missed=max(classes, key=lambda row: row.images - row.right, default=None),
        invented=max(classes, key=lambda row: row.predicted - row.right, default=None),
        steps=suggest_steps(facts, classes, confusions),
        confused=_confused(facts, confusions) if facts.one_label else None,
        class_tables=_class_tables(classes),
        left_out=len(classes) - CLASSES,
        reliability=_reliability(facts),
        sizes=_sizes(facts),
        data_rows=list(_data_rows(facts)),
        inside=inside,
        not_rollout=words.NOT_ROLLOUT,
        added=_added(inside),
        rerun=rerun(facts),
        again=again(facts),
        card=card,
    )


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": words.percent,
        "between": words.between,
        "shape": lambda sides: words.shape(*sides),
        "signed": words.signed,
        "legible": legible,
        "kind": lambda block: type(block).__name__,
    }
    return environment.get_template("template.html")


def _date(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    day = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{day.day} {day:%B %Y}"


class Share(NamedTuple):
    """A bar of the comparison."""

    name: str
    value: float
    own: bool


def _shares(facts: Facts) -> list[Share]:
    result = facts.result
    if result is None:
        return []
    others = [Share(baseline.name, baseline.right / result.images, False) for baseline in facts.baselines]
    return [Share("this model", result.top1, True), *others]


def _tables(facts: Facts, trained: Trained | None) -> dict[str, list[words.Row]]:
    return {
        "Model": [] if trained is None else list(words.model_rows(trained)),
        "Data": list(words.data_rows(facts)),
        "Training": list(words.training_rows(facts)),
        "Preprocessing": list(words.preprocess_rows(facts.config)),
    }


# --- curves and answers ----------------------------------------------------------------------------------------------


def _curves(facts: Facts) -> list[tuple[str, Sequence[tuple[str, str]], Markup]]:
    """Title, key and chart of loss, accuracy and learning rate over the epochs."""
    found = facts.epochs
    if not found:
        return []
    epochs = found["epoch"]

    def lines(*names: tuple[str, str]) -> list[Curve]:
        return [Curve(name, epochs, found[column]) for name, column in names]

    losses = lines(("validation", "val/loss"), ("training", "train/loss"))
    right = lines(("top-1", "metrics/accuracy_top1"), ("top-5", "metrics/accuracy_top5"))
    five = len(facts.config["classes"]) >= TOP5_CLASSES and not facts.multi_label
    right = right if five or facts.masked else right[:1]
    rate = lines(("learning rate", "lr/pg0"))
    if not words.finite(right[0].y):  # pixels were to be told: there is nothing to be right or wrong about
        right = []
    told = "Validation exact match" if facts.multi_label else "Validation accuracy"
    told = f"{told} of colours" if facts.masked else told
    drawn = [
        ("Loss", losses, charts.curves(losses, label=_ends("loss", losses), across="epoch")),
        (told, right, charts.curves(right, label=_ends(told, right), across="epoch", percent=True)),
        ("Learning rate", rate, charts.curves(rate, label="learning rate over the epochs", across="epoch")),
    ]
    return [(name, _key(of), chart) for name, of, chart in drawn if of]


def _key(lines: Sequence[Curve]) -> list[tuple[str, str]]:
    return [(kind, line.name) for kind, line in zip("abc", lines, strict=False)] if len(lines) > 1 else []


def _ends(what: str, lines: Sequence[Curve]) -> str:
    """What a chart shows, for those who do not see it."""
    told = [
        f"{line.name} from {values[0]:.3g} to {values[-1]:.3g}" for line in lines if (values := words.finite(line.y))
    ]
    return f"{what} over the epochs: {', '.join(told) or 'nothing yet'}"


class Confused(NamedTuple):
    """What is taken for what."""

    chart: Markup
    of: int
    """Classes in it."""


def _confused(facts: Facts, confusions: Sequence[Confusion]) -> Confused:
    taken = Counter((answer.label, answer.said) for answer in facts.answers)
    images = Counter(answer.label for answer in facts.answers)
    names = _confused_classes(facts.config["classes"], [(each.label, each.predicted) for each in confusions])
    counts = np.array([[taken[true, said] for said in names] for true in names], dtype=np.int64)
    right = f"{counts.trace():,} of {counts.sum():,} answers on the diagonal"
    label = f"confusion matrix of {plural(len(names), 'class')}, {right}"
    return Confused(charts.confusion(counts, names, [images[name] for name in names], label=label), len(names))


def _confused_classes(classes: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """All classes, or where they are too many those of the pairs confused most, partners beside each other."""
    if len(classes) <= charts.NAMED:
        return list(classes)
    chosen = dict.fromkeys(name for pair in pairs for name in pair)
    chosen |= dict.fromkeys(classes[:_FEWER])  # where hardly anything is confused
    return list(chosen)[:_FEWER]


def _class_tables(classes: Sequence[ClassRow]) -> list[Sequence[ClassRow]]:
    """The weakest classes, in two tables beside each other where they are many."""
    shown = classes[:CLASSES]
    half = len(shown) if len(shown) <= _ONE_TABLE else -(-len(shown) // 2)
    return [part for part in (shown[:half], shown[half:]) if part]


def _reliability(facts: Facts) -> Markup | None:
    if facts.result is None:
        return None
    label = f"reliability diagram, expected calibration error {facts.result.calibration_error:.1%}"
    if facts.labels is not None:
        answers, _, right = zip(*facts.labels.bins, strict=True)
        return charts.reliability(answers, right, label=label, across="probability of a label")
    sure, hits = [answer.probability for answer in facts.answers], [answer.right for answer in facts.answers]
    return charts.reliability(*charts.bin_answers(sure, hits), label=label, across="probability of the answer")


# --- data ------------------------------------------------------------------------------------------------------------


def _class_sizes(facts: Facts) -> Mapping[str, int]:
    """Training images of each class, by whichever file counts them."""
    if facts.trained_images or facts.data_report is None:
        return facts.trained_images
    return {row["name"]: row.get("train", 0) for row in facts.data_report["classes"]}


def _sizes(facts: Facts) -> Markup | None:
    rows = sorted(_class_sizes(facts).items(), key=lambda row: -row[1])
    if not rows:
        return None
    names, sizes = zip(*rows, strict=True)
    label = f"training images of {plural(len(sizes), 'class')}, from {sizes[0]:,} down to {sizes[-1]:,}"
    if len(sizes) <= _NAMED_BARS:
        return charts.bars(names, sizes, label=label)
    across = f"{plural(len(sizes), 'class')}, from {charts.cut(names[0], 14)} to {charts.cut(names[-1], 14)}"
    return charts.columns(spread(sizes, _COLUMNS), label=label, across=across)


def _data_rows(facts: Facts) -> Iterator[words.Row]:
    """The data report in lines."""
    report = facts.data_report
    if report is None:
        return
    headers = f"; of {report['headers_only']:,} more only the header" if report["headers_only"] else ""
    yield "decoded", f"{plural(report['decoded'], 'image')}{headers}"
    yield "unreadable", f"{len(report['bad']):,}"
    yield "formats", ", ".join(f"{name} {number:,}" for name, number in report["formats"].items()) or "none"
    for side, found in report["sizes"].items():
        yield side, f"{found['least']:,} to {found['most']:,} pixels, median {found['median']:,}"
    colour = report["colour"]
    if colour["mean"]:
        mean, std = (" ".join(f"{value:.3f}" for value in colour[name]) for name in ("mean", "std"))
        yield "colour", f"mean {mean}, std {std} (of {colour['of']}); grey: {plural(colour['grey'], 'image')}"
    copies = report["duplicates"]
    yield (
        "copies",
        f"{plural(copies['exact'], 'group')} of equal files, {plural(copies['near'], 'group')} of lookalikes",
    )
    yield "copies across splits", plural(copies["across_splits"], "group")
    yield "copies with different labels", plural(copies["different_labels"], "group")


# --- the walk, and the run again -------------------------------------------------------------------------------------


def _added(inside: Inside | str) -> Markup | None:
    if isinstance(inside, str) or isinstance(inside.walk, str):
        return None
    way = inside.walk.walk
    return charts.pairs(way.attention_added, way.mlp_added, label="what each layer adds to a token", across="layer")


def rerun(facts: Facts) -> str | None:
    """The command that makes this run again, with the epochs and the seed that it had; None where it is unknown."""
    if facts.command is None:
        return None
    kept, given = [], iter(facts.command)
    timed = seeded = False
    for word in given:
        name, equals, _ = word.partition("=")
        if name in _OTHERWISE:
            timed, seeded = timed or name == "--minutes", seeded or name in ("--runs", "--seed")
            if not equals:
                next(given, None)
        elif word not in _ONCE:
            kept.append(word)
    if timed:
        kept += ["--epochs", f"{facts.config['recipe']['epochs']:.15g}"]
        side = facts.config["recipe"].get("image_size")
        kept += ["--image-size", str(side)] * (side is not None and "--image-size" not in kept)
        kept += ["--replan", ",".join(f"{step}:{steps}" for step, steps in facts.decisions)] * bool(facts.decisions)
    kept += ["--seed", str(facts.config["seed"])] * seeded
    world = facts.config["world"]
    command = "vitrail" if world == 1 else f"torchrun --nproc-per-node {world} -m vitrail"
    return f"{command} {_typed(kept)}"


def again(facts: Facts) -> list[str]:
    """The commands that measure the run's weights again, if they were measured, and that write the page again."""
    measure = ["vitrail", "evaluate", "RUN/weights/best.safetensors", str(facts.config["data"])]
    report = ["vitrail", "report", "RUN"]
    return [_typed(report)] if facts.result is None else [_typed(measure), _typed(report)]


def _typed(command: Sequence[str]) -> str:
    """A command as a shell takes it, with a question mark for bytes that are no text."""
    return shlex.join(command).encode(errors="replace").decode()
