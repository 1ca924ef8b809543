"""The model card: a model's architecture, training data and metrics, or "unknown" for what is not known.

A card is built of sections, which become Markdown with the Hub's front matter (README.md) or part of the HTML report.
`vitrail push` uploads a run's README.md, edited or not, and replaces one section: how to load the model from the Hub.
"""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from vitrail.config import to_json
from vitrail.evaluation.predictions import MIN_TOP5_CLASSES
from vitrail.formatting import pluralize
from vitrail.model import cost
from vitrail.report import fact_rows
from vitrail.report.run_facts import FinalMetrics, RunFacts, strip_folders
from vitrail.visualization.plots import make_printable
from vitrail.weights import hub
from vitrail.weights.trained import Trained

USE_TITLE = "Use"


class TableBlock(NamedTuple):
    """A table of names and texts, without a header."""

    rows: tuple[fact_rows.FactRow, ...]


class ListBlock(NamedTuple):
    """A bulleted list."""

    texts: tuple[str, ...]


class CodeBlock(NamedTuple):
    """A code block."""

    language: str
    text: str


CardBlock = str | TableBlock | ListBlock | CodeBlock


class CardSection(NamedTuple):
    """A section of a card under its heading."""

    title: str
    blocks: tuple[CardBlock, ...]


class HubAddress(NamedTuple):
    """A model's place on the Hub."""

    repo: str  # ORG/NAME
    refusal: str | None = None  # why there are no files for transformers; None if there are
    notes: tuple[str, ...] = ()  # what the format of transformers cannot store


class ModelCard(NamedTuple):
    """A model card: title, YAML front matter and sections."""

    title: str
    front_matter: tuple[str, ...]  # its lines
    sections: tuple[CardSection, ...]

    def to_markdown(self) -> str:
        """The text of README.md."""
        parts = ["\n".join(["---", *self.front_matter, "---"]), f"# {_escape_markdown(self.title)}"]
        for section in self.sections:
            parts += [f"## {section.title}", *map(_render_markdown, section.blocks)]
        return "\n\n".join(parts) + "\n"


def build_card(trained: Trained, facts: RunFacts | None = None) -> ModelCard:
    """Build the card of a model, and of the run that trained it if that is known."""
    if facts is None:
        sentence = "Training data, accuracy, intended use and limits are unknown."
        run_sections, title = [CardSection("Not stated", (sentence,))], strip_folders(trained.origin.name)
    else:
        run_sections, title = list(_make_run_sections(facts, trained)), fact_rows.make_title(facts)
    code = _write_loading_code(trained, "weights/best.safetensors")
    sections = (
        CardSection(USE_TITLE, (_describe_model(trained), "With vitrail, in the run's folder:", code)),
        *run_sections,
        CardSection("Architecture", (_tabulate_model(trained),)),
        CardSection("Origin", (_list_origin(trained, facts),)),
    )
    return ModelCard(title, tuple(_make_front_matter(trained, facts)), sections)


def set_hub_address(text: str, trained: Trained, address: HubAddress) -> str:
    """Replace a Markdown card's section on use by one that loads the model from the Hub."""
    use = "\n\n".join([f"## {USE_TITLE}", *map(_render_markdown, _describe_hub_use(trained, address))])
    library = "vitrail" if address.refusal is not None else "transformers"
    text = re.sub(r"^library_name: .*$", f"library_name: {library}", text, count=1, flags=re.MULTILINE)
    for (start, title), (end, _) in itertools.pairwise([*_find_headings(text), (len(text), "")]):
        if title == f"## {USE_TITLE}":
            return f"{text[:start]}{use}\n\n{text[end:]}"
    return text


def _find_headings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the offset and the heading of each section of a Markdown card, ignoring code blocks."""
    offset, fence = 0, ""
    for line in text.splitlines(keepends=True):
        marker = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if fence:
            closed = marker is not None and marker[1].startswith(fence) and line.strip() == marker[1]
            fence = "" if closed else fence
        elif marker is not None:
            fence = marker[1]
        elif line.startswith("## "):
            yield offset, line.rstrip()
        offset += len(line)


# --- the Hub's front matter ------------------------------------------------------------------------------------------


def _make_front_matter(trained: Trained, facts: RunFacts | None) -> Iterator[str]:
    """The YAML in the Hub's terms, without what is unknown. Strings are quoted as JSON, a subset of YAML."""
    task = "image-classification" if trained.model.config.classes else "image-feature-extraction"
    yield from hub.format_license_lines(trained.origin.license)
    yield from ("library_name: vitrail", f"pipeline_tag: {task}", "tags:", "- vitrail", "- pytorch")
    if facts is not None and facts.result is not None and not facts.is_measured_on_train:
        yield from ("metrics:", "- accuracy", "model-index:")
        yield from _make_model_index(facts, facts.result)


def _get_pipeline_task(trained: Trained) -> str:
    return "image-classification" if trained.model.config.classes else "image-feature-extraction"


def _make_model_index(facts: RunFacts, result: FinalMetrics) -> Iterator[str]:
    hub = facts.data.removeprefix("hf:") if facts.data.startswith("hf:") else None
    slug = re.sub(r"[^\w.-]+", "-", facts.data).strip("-") or "unnamed"
    yield f"- name: {_quote_yaml(fact_rows.make_title(facts))}"
    yield from ("  results:", "  - task:", "      type: image-classification")
    yield from ("    dataset:", f"      name: {_quote_yaml(facts.data)}", f"      type: {_quote_yaml(hub or slug)}")
    yield from (f"      split: {result.split}", "    metrics:")
    for kind, name, value in _list_metrics(facts, result):
        yield from (f"    - type: {kind}", f"      name: {_quote_yaml(name)}", f"      value: {value:.6g}")


def _list_metrics(facts: RunFacts, result: FinalMetrics) -> Iterator[tuple[str, str, float]]:
    if facts.multi_label_metrics is not None:
        yield "accuracy", f"exact match of {pluralize(result.images, 'image')}", result.top1
        yield "f1", "F1 over all labels", facts.multi_label_metrics.micro_f1
        yield "mean_average_precision", "mean average precision", facts.multi_label_metrics.mean_average_precision
    else:
        yield "accuracy", f"top-1 accuracy of {pluralize(result.images, 'image')}", result.top1
        if len(facts.config["classes"]) >= MIN_TOP5_CLASSES:
            yield "accuracy", "top-5 accuracy", result.top5
    if facts.macro_accuracy is not None:  # never of multi-label predictions
        yield "recall", "recall averaged over classes", facts.macro_accuracy
    yield "expected_calibration_error", "expected calibration error, 15 bins", result.calibration_error


def _quote_yaml(text: str) -> str:
    return json.dumps(make_printable(text))


# --- sections --------------------------------------------------------------------------------------------------------


def _make_run_sections(facts: RunFacts, trained: Trained) -> Iterator[CardSection]:
    result, pretraining = facts.result, facts.pretraining
    if pretraining is not None:
        images = pluralize(pretraining.images, "image")
        sentence = f"On the {images} of {pretraining.split}, {pretraining.patches:,} masked patches:"
        yield CardSection("Result", (sentence, TableBlock(tuple(fact_rows.list_pretraining_rows(pretraining)))))
    elif result is None:
        yield CardSection("Result", ("Unknown: the run has not ended.",))
    else:
        sentence = f"On the {pluralize(result.images, 'image')} of {result.split}:"
        table = TableBlock(tuple(fact_rows.list_result_rows(facts, result)))
        yield CardSection("Result", (sentence, table, ListBlock(tuple(fact_rows.list_cautions(facts)))))
        yield CardSection("Calibration", (_describe_calibration(result),))
    yield CardSection("Intended use", ("Unknown: state it here before you publish this model.",))
    data_license = ("license of the images", fact_rows.UNKNOWN)
    data_rows = [*fact_rows.list_data_rows(facts), data_license, *_list_data_checks(facts)]
    yield CardSection("Data", (TableBlock(tuple(data_rows)),))
    yield CardSection("Preprocessing", (TableBlock(tuple(fact_rows.list_preprocess_rows(facts.config))),))
    yield CardSection("Training", (TableBlock(tuple(fact_rows.list_training_rows(facts))),))
    yield CardSection("Limits", (ListBlock(tuple(_list_limits(facts, trained))),))


def _describe_calibration(result: FinalMetrics) -> str:
    temperature = (
        "No temperature was fitted; probabilities are the network's own."
        if result.temperature == 1.0
        else f"Logits are divided by {result.temperature:.3f}, fitted on validation images and stored in the file."
    )
    error = fact_rows.format_percent(result.calibration_error)
    return f"{temperature} The expected calibration error (15 bins) is {error}."


def _list_data_checks(facts: RunFacts) -> Iterator[fact_rows.FactRow]:
    report = facts.data_report
    if report is None:
        yield "duplicates across splits", f"{fact_rows.UNKNOWN}: the images were not compared"
        return
    yield "duplicates across splits", pluralize(report["duplicates"]["across_splits"], "group")
    yield "unreadable images", f"{len(report['bad']):,}"


def _list_limits(facts: RunFacts, trained: Trained) -> Iterator[str]:
    classes = trained.model.config.classes
    if classes and not trained.multi_label:
        yield f"It predicts one of its {pluralize(classes, 'class')} for every image, even if none of them is present."
    yield f"Its accuracy on images other than those of {facts.data} is unknown."
    yield "Bias against groups of people or things was not measured."
    if trained.threshold:
        yield f"Below a probability of {trained.threshold:.3f} it abstains."
    if thresholds := trained.label_thresholds:
        yield (
            "It predicts every label whose probability is above the label's own threshold, which is from"
            f" {min(thresholds):.2f} to {max(thresholds):.2f}."
        )


def _tabulate_model(trained: Trained) -> TableBlock:
    config = trained.model.config
    rows = [
        ("parameters", f"{cost.count_parameters(config):,}"),
        ("multiply-adds", f"{cost.count_multiply_adds(config):,} per image"),
    ]
    rows += [(f"architecture: {name}", _format_value(value)) for name, value in to_json(config).items()]
    if trained.preprocess is None:
        rows.append(("preprocessing", fact_rows.UNKNOWN))
    else:
        values = to_json(trained.preprocess)
        rows += [(f"preprocessing: {name}", _format_value(value)) for name, value in values.items()]
    labels = fact_rows.UNKNOWN if trained.labels is None else f"{len(trained.labels):,}"
    return TableBlock((*rows, ("labels", labels)))


def _list_origin(trained: Trained, facts: RunFacts | None) -> ListBlock:
    origin = trained.origin
    clean_text = strip_folders if facts is None else facts.clean_text
    lines = (
        f"format: {origin.format}",
        f"name: {origin.name}",
        f"sha256 of the original file: {origin.sha256 or fact_rows.UNKNOWN}",
        f"license: {origin.license or fact_rows.UNKNOWN}",
        *(f"assumed: {sentence}" for sentence in origin.assumptions),
        *(f"changed: {sentence}" for sentence in origin.changes),
    )
    return ListBlock(tuple(map(clean_text, lines)))


def _describe_hub_use(trained: Trained, address: HubAddress) -> Iterator[CardBlock]:
    yield _describe_model(trained)
    yield "With vitrail and huggingface_hub:"
    yield _write_loading_code(trained, f"hf:{address.repo}")
    if address.refusal is not None:
        yield f"There are no files for transformers: {address.refusal}."
        return
    yield "With transformers:"
    task = _get_pipeline_task(trained)
    yield CodeBlock("python", f'from transformers import pipeline\n\npipeline("{task}", "{address.repo}")("image.jpg")')
    if address.notes:
        yield "Not stored in the format of transformers:"
        yield ListBlock(address.notes)


def _describe_model(trained: Trained) -> str:
    classes = trained.model.config.classes
    if not classes:
        return "An image model in PyTorch, made with vitrail. It has no classes: its outputs are features."
    names = "their names are unknown" if trained.labels is None else "the files name them"
    return f"An image classifier in PyTorch, made with vitrail, for {pluralize(classes, 'class')}; {names}."


def _write_loading_code(trained: Trained, name: str) -> CodeBlock:
    call = 'vitrail.Classifier(trained)(["image.jpg"])'
    if not trained.model.config.classes:
        call = "trained.model.compute_features(images)  # (B, D)"
    load = f'trained = vitrail.load("{name}")  # model, preprocess, labels, origin'
    return CodeBlock("python", f"import vitrail\n\n{load}\n{call}")


# --- Markdown --------------------------------------------------------------------------------------------------------


def _format_value(value: Any) -> str:
    """Format a number, a string or a list of them."""
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _render_markdown(block: CardBlock) -> str:
    match block:
        case str():
            return _escape_markdown(block)
        case ListBlock(texts):
            return "\n".join(f"- {_escape_markdown(text)}" for text in texts)
        case CodeBlock(language, text):
            return f"```{language}\n{text}\n```"
        case TableBlock(rows):
            lines = (f"| {_escape_markdown(name)} | {_escape_markdown(text)} |" for name, text in rows)
            return "\n".join(["| | |", "|---|---|", *lines])
    raise AssertionError


def _escape_markdown(text: str) -> str:
    """Escape text so that it is not markup and stays on its line: anybody may choose the names in files."""
    line = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in make_printable(text))
    return re.sub(r"([\\`*{}\[\]<>|~]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", line)  # the _ of image_size is not markup
