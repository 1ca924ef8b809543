"""The model card: what a model is, what it was trained on and what it came to; "unknown" where that is not known.

A card is made of sections once, and written as Markdown with the Hub's front matter (README.md) or shown in the report.
What `vitrail push` uploads is a run's README.md, edited or not, in which one section is put anew: how the model is
loaded, now that it has an address.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vitrail.config import to_json
from vitrail.evaluate.classify import TOP5_CLASSES
from vitrail.figures.draw import legible
from vitrail.model import count
from vitrail.plurals import plural
from vitrail.report import words
from vitrail.report.gather import Facts, Result, without_folders
from vitrail.weights import card as licences
from vitrail.weights.trained import Trained

USE = "Use"


class Table(NamedTuple):
    """Rows, the first of them the head."""

    rows: tuple[tuple[str, ...], ...]


class Items(NamedTuple):
    """A list."""

    texts: tuple[str, ...]


class Code(NamedTuple):
    """What is typed."""

    language: str
    text: str


Block = str | Table | Items | Code


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a card under its heading."""

    title: str
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a model is to be had on the Hub."""

    repo: str
    """ORG/NAME."""
    refusal: str | None = None
    """Why there is no folder for transformers, where there is none."""
    notes: tuple[str, ...] = ()
    """What transformers' format could not take along."""


@dataclasses.dataclass(frozen=True)
class Card:
    """A model card."""

    title: str
    front: tuple[str, ...]
    """The lines of its YAML."""
    sections: tuple[Section, ...]

    def markdown(self) -> str:
        """README.md."""
        parts = ["\n".join(["---", *self.front, "---"]), f"# {_plain(self.title)}"]
        for section in self.sections:
            parts += [f"## {section.title}", *map(_markdown, section.blocks)]
        return "\n\n".join(parts) + "\n"


def card(trained: Trained, facts: Facts | None = None) -> Card:
    """The card of a model, and of the run that made it where that is known."""
    of_model = [
        Section(USE, tuple(_use_file(trained))),
        Section("What it is", (_what(trained),)),
        Section("Where it comes from", (_origin(trained, facts),)),
    ]
    if facts is None:
        stated = "Training data, accuracy, intended use and limits are unknown to this card."
        of_run = [Section("Not stated", (stated,))]
        title = without_folders(trained.origin.name)
    else:
        of_run = list(_run_sections(facts, trained))
        title = words.title(facts)
    first, *others = of_model
    return Card(title, tuple(_front(trained, facts)), (first, *of_run, *others))


def addressed(text: str, trained: Trained, address: Address) -> str:
    """A card in Markdown for the Hub: its section on use says how to load the model from there."""
    use = "\n\n".join([f"## {USE}", *map(_markdown, _use_address(trained, address))])
    library = "vitrail" if address.refusal is not None else "transformers"
    text = re.sub(r"^library_name: .*$", f"library_name: {library}", text, count=1, flags=re.MULTILINE)
    for (start, title), (end, _) in itertools.pairwise([*_headings(text), (len(text), "")]):
        if title == f"## {USE}":
            return f"{text[:start]}{use}\n\n{text[end:]}"
    return text


def _headings(text: str) -> Iterator[tuple[int, str]]:
    """Where each section of a card in Markdown begins, and its heading; what looks like one in code is none."""
    place, fence = 0, ""
    for line in text.splitlines(keepends=True):
        marks = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if fence:
            closed = marks is not None and marks[1].startswith(fence) and line.strip() == marks[1]
            fence = "" if closed else fence
        elif marks is not None:
            fence = marks[1]
        elif line.startswith("## "):
            yield place, line.rstrip()
        place += len(line)


# --- the Hub's front matter ------------------------------------------------------------------------------------------


def _front(trained: Trained, facts: Facts | None) -> Iterator[str]:
    """The YAML, in the Hub's terms; what is unknown is left out. Strings are quoted as JSON, which YAML includes."""
    task = "image-classification" if trained.model.config.classes else "image-feature-extraction"
    yield from licences.licence_lines(trained.origin.licence)
    yield from ("library_name: vitrail", f"pipeline_tag: {task}", "tags:", "- vitrail", "- pytorch")
    if facts is not None and facts.result is not None and not facts.measured_on_training:
        yield from ("metrics:", "- accuracy", "model-index:")
        yield from _index(facts, facts.result)


def _index(facts: Facts, result: Result) -> Iterator[str]:
    hub = facts.data.removeprefix("hf:") if facts.data.startswith("hf:") else None
    yield f"- name: {_quoted(words.title(facts))}"
    yield "  results:"
    yield "  - task:"
    yield "      type: image-classification"
    yield "    dataset:"
    yield f"      name: {_quoted(facts.data)}"
    yield f"      type: {_quoted(hub or _slug(facts.data))}"
    yield f"      split: {result.split}"
    yield "    metrics:"
    for kind, name, value in _metrics(facts, result):
        yield f"    - type: {kind}"
        yield f"      name: {_quoted(name)}"
        yield f"      value: {value:.6g}"


def _metrics(facts: Facts, result: Result) -> Iterator[tuple[str, str, float]]:
    if facts.labels is not None:
        yield "accuracy", f"exact match of {plural(result.images, 'image')}", result.top1
        yield "f1", "F1 over all labels", facts.labels.micro_f1
        yield "mean_average_precision", "mean average precision", facts.labels.mean_average_precision
        yield "expected_calibration_error", "expected calibration error, 15 bins", result.calibration_error
        return
    yield "accuracy", f"top-1 accuracy of {plural(result.images, 'image')}", result.top1
    if len(facts.config["classes"]) >= TOP5_CLASSES:
        yield "accuracy", "top-5 accuracy", result.top5
    if facts.macro is not None:
        yield "recall", "recall averaged over classes", facts.macro
    yield "expected_calibration_error", "expected calibration error, 15 bins", result.calibration_error


def _quoted(text: str) -> str:
    return json.dumps(legible(text))


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "unnamed"


# --- sections --------------------------------------------------------------------------------------------------------


def _run_sections(facts: Facts, trained: Trained) -> Iterator[Section]:
    result, pretrained = facts.result, facts.pretrained
    if pretrained is not None:
        told = (
            f"On the {plural(pretrained.images, 'image')} of {pretrained.split}, {pretrained.patches:,} hidden patches:"
        )
        yield Section("Result", (told, _table(words.pretrained_rows(pretrained))))
    elif result is None:
        yield Section("Result", ("Unknown: the run has not ended.",))
    else:
        told = f"On the {plural(result.images, 'image')} of {result.split}:"
        yield Section("Result", (told, _table(words.result_rows(facts, result)), Items(tuple(words.cautions(facts)))))
        yield Section("Calibration", (_calibration(result),))
    yield Section("Intended use", ("Unknown: whoever publishes this model should say it here.",))
    licence = ("licence of the images", words.UNKNOWN)
    yield Section("Data", (_table([*words.data_rows(facts), licence, *_checks(facts)]),))
    yield Section("Preprocessing", (_table(words.preprocess_rows(facts.config)),))
    yield Section("Training", (_table(words.training_rows(facts)),))
    yield Section("Limits", (Items(tuple(_limits(facts, trained))),))


def _calibration(result: Result) -> str:
    fitted = (
        "No temperature was fitted; probabilities are as the network gives them."
        if result.temperature == 1.0
        else f"Logits are divided by {result.temperature:.3f}, fitted on validation images and stored in the file."
    )
    return f"{fitted} The expected calibration error (15 bins) is {words.percent(result.calibration_error)}."


def _checks(facts: Facts) -> Iterator[words.Row]:
    report = facts.data_report
    if report is None:
        yield "copies across splits", f"{words.UNKNOWN}: the images were not compared"
        return
    yield "copies across splits", plural(report["duplicates"]["across_splits"], "group")
    yield "unreadable images", f"{len(report['bad']):,}"


def _limits(facts: Facts, trained: Trained) -> Iterator[str]:
    classes = trained.model.config.classes
    if classes and not trained.several:
        yield f"It answers every image with one of its {plural(classes, 'class')}, also one that shows none of them."
    yield f"How it does on images other than those of {facts.data} is unknown."
    yield "Whether it treats groups of people or things unequally is unknown; nothing of the kind was measured."
    if trained.threshold:
        yield f"Below a probability of {trained.threshold:.3f} it says that it is unsure."


def _what(trained: Trained) -> Table:
    config = trained.model.config
    preprocess = {"preprocessing": words.UNKNOWN}
    if trained.preprocess is not None:
        preprocess = {f"preprocessing: {name}": _value(value) for name, value in to_json(trained.preprocess).items()}
    rows = {
        "parameters": f"{count.parameters(config):,}",
        "multiply-adds": f"{count.multiply_adds(config):,} an image",
        **{f"architecture: {name}": _value(value) for name, value in to_json(config).items()},
        **preprocess,
        "labels": words.UNKNOWN if trained.labels is None else f"{len(trained.labels):,}",
    }
    return _table(rows.items())


def _origin(trained: Trained, facts: Facts | None) -> Items:
    origin = trained.origin
    plain = without_folders if facts is None else facts.plain
    lines = (
        f"format: {origin.format}",
        f"name: {origin.name}",
        f"sha256 of the original file: {origin.sha256 or words.UNKNOWN}",
        f"licence: {origin.licence or words.UNKNOWN}",
        *(f"assumed: {sentence}" for sentence in origin.assumptions),
        *(f"changed: {sentence}" for sentence in origin.changes),
    )
    return Items(tuple(map(plain, lines)))


def _use_file(trained: Trained) -> Iterator[Block]:
    yield _does(trained)
    yield "With vitrail, in the run's folder:"
    yield Code("python", _loading(trained, "weights/best.safetensors"))


def _use_address(trained: Trained, address: Address) -> Iterator[Block]:
    classes = bool(trained.model.config.classes)
    yield _does(trained)
    yield "With vitrail and huggingface_hub:"
    yield Code("python", _loading(trained, f"hf:{address.repo}"))
    if address.refusal is not None:
        yield f"There are no files for transformers: {address.refusal}."
        return
    yield "With transformers:"
    task = "image-classification" if classes else "image-feature-extraction"
    yield Code("python", f'from transformers import pipeline\n\npipeline("{task}", "{address.repo}")("image.jpg")')
    if address.notes:
        yield "What transformers' format could not take along:"
        yield Items(address.notes)


def _does(trained: Trained) -> str:
    classes = trained.model.config.classes
    named = "their names are unknown" if trained.labels is None else "the files name them"
    does = (
        f"It tells {plural(classes, 'class')} apart; {named}."
        if classes
        else "It has no classes: it ends with its features."
    )
    return f"An image model in PyTorch, made with vitrail. {does}"


def _loading(trained: Trained, name: str) -> str:
    classes = trained.model.config.classes
    call = 'vitrail.Classifier(trained)(["image.jpg"])' if classes else "trained.model.features(images)  # (B, D)"
    return f'import vitrail\n\ntrained = vitrail.load("{name}")  # model, preprocess, labels, origin\n{call}'


# --- Markdown --------------------------------------------------------------------------------------------------------


def _table(rows: Any) -> Table:
    return Table((("", ""), *((str(name), str(text)) for name, text in rows)))


def _value(value: Any) -> str:
    """A number, a word or several of them, from a configuration that was checked when it was read."""
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _markdown(block: Block) -> str:
    match block:
        case str():
            return _plain(block)
        case Items(texts):
            return "\n".join(f"- {_plain(text)}" for text in texts)
        case Code(language, text):
            return f"```{language}\n{text}\n```"
        case Table((head, *rows)):
            return "\n".join([_line(head), "|---" * len(head) + "|", *map(_line, rows)])
    raise AssertionError


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_plain, cells))} |" if any(cells) else "| " * len(cells) + "|"


def _plain(text: str) -> str:
    """Text that is no markup and stays on its line: names in files are anyone's."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in legible(text))
    return re.sub(r"([\\`*{}\[\]<>|~]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", shown)  # image_size is no markup
