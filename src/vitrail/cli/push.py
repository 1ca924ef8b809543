"""`vitrail push RUN hf:ORG/NAME`: a model to the Hugging Face Hub, with a card that says only what is known."""

import json as jsonlib
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitrail.cli import show

if TYPE_CHECKING:
    from vitrail.weights.trained import Trained

# Identifiers of the Hub's list that vision models use; any other name is written as its "other", with the name beside.
LICENCES = {
    "agpl-3.0", "apache-2.0", "bsd", "bsd-2-clause", "bsd-3-clause", "cc", "cc-by-4.0", "cc-by-nc-4.0",
    "cc-by-nc-nd-4.0", "cc-by-nc-sa-4.0", "cc-by-sa-4.0", "cc0-1.0", "gpl-2.0", "gpl-3.0", "isc", "lgpl-3.0", "mit",
    "mpl-2.0", "openrail", "other", "unknown", "unlicense",
}  # fmt: skip


def main(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="hf:ORG/NAME")],
    private: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Upload a model to the Hugging Face Hub: the transformers folder, the native file and a model card.

    Args:
        run: A run folder, whose weights/best.safetensors is taken, or any MODEL.
        target: The repository, made if it is missing; its card and model files are replaced.
        private: Make a missing repository private, and refuse to push to a public one.
        dry_run: Say what would be uploaded and use no network.
        json: Print JSON.
    """
    from vitrail.weights import hub

    repo = hub.parse_target(target)
    if not dry_run:
        hub.require()
    from vitrail.weights.load import load

    source = model_of(run)
    show.note(f"model: {source}")
    trained = load(source)
    with tempfile.TemporaryDirectory(prefix="vitrail-push-") as workshop:
        folder = Path(workshop) / "model"
        notes = prepare(trained, folder, repo)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        commit = None if dry_run else hub.push(folder, target, private=private)
    if json:
        listed = [{"name": name, "bytes": size} for name, size in sizes.items()]
        show.as_json({"repository": target, "files": listed, "notes": notes, "dry_run": dry_run, "commit": commit})
        return
    show.table(
        [
            *(("note", text) for text in notes),
            *(("file", f"{name}, {show.count(size)} bytes") for name, size in sizes.items()),
            ("dry run", f"nothing was uploaded to {target}") if commit is None else ("uploaded", commit),
        ]
    )


def model_of(run: str) -> str | Path:
    """The best weights of a run folder; anything else is a MODEL as it is."""
    best = Path(run) / "weights" / "best.safetensors"
    return best if best.is_file() else run


def prepare(trained: "Trained", folder: Path, repo: str) -> list[str]:
    """Write what is to be uploaded, and return notes on what transformers' format could not take along."""
    from vitrail.errors import ModelError
    from vitrail.weights import hub
    from vitrail.weights.load import save

    refusal = None
    try:
        notes = save(trained, folder, "transformers")
    except ModelError as error:
        refusal = str(error)
        notes = [f"only the native file, no transformers folder: {refusal}"]
        folder.mkdir()
    save(trained, folder / hub.NATIVE)
    (folder / "README.md").write_text(card(trained, repo, notes=notes, refusal=refusal), encoding="utf-8")
    return notes


def card(trained: "Trained", repo: str, *, notes: Sequence[str] = (), refusal: str | None = None) -> str:
    """The model card: what the file states, and "unknown" where it does not.

    `refusal` says why there is no transformers folder, where there is none.
    """
    classes, labels = trained.model.config.classes, trained.labels
    named = "their names are unknown" if labels is None else "the files name them"
    does = f"It tells {classes} classes apart; {named}." if classes else "It has no classes: it ends with its features."
    sections = [
        _front_matter(trained, transformers=refusal is None),
        f"# {repo.partition('/')[2]}",
        f"An image model in PyTorch, uploaded by vitrail. {does}",
        f"## Use\n\n{_use(repo, classes=bool(classes), refusal=refusal)}",
        f"## What it is\n\n{_facts(trained)}",
        f"## Where it comes from\n\n{_origin(trained)}",
    ]
    if notes and refusal is None:
        sections.append(f"## What transformers' format could not take along\n\n{_list(notes)}")
    sections.append("## Not stated\n\nTraining data, accuracy, intended use and limits are unknown to this card.")
    return "\n\n".join(sections) + "\n"


def _front_matter(trained: "Trained", *, transformers: bool) -> str:
    """The card's YAML, in the Hub's terms; a licence that is unknown is left out."""
    licence = trained.origin.licence
    lines = []
    if licence is not None and licence.lower() in LICENCES:
        lines.append(f"license: {licence.lower()}")
    elif licence is not None:
        slug = re.sub(r"[^a-z0-9.]+", "-", licence.lower()).strip("-.") or "unnamed"
        lines += ["license: other", f"license_name: {jsonlib.dumps(slug[:96])}"]
    task = "image-classification" if trained.model.config.classes else "image-feature-extraction"
    lines += [
        f"library_name: {'transformers' if transformers else 'vitrail'}",
        f"pipeline_tag: {task}",
        "tags:",
        "- vitrail",
        "- pytorch",
    ]
    return "\n".join(["---", *lines, "---"])


def _use(repo: str, *, classes: bool, refusal: str | None) -> str:
    call = 'vitrail.Classifier(trained)(["image.jpg"])' if classes else "trained.model.features(images)  # (B, D)"
    vitrail = (
        "With vitrail and huggingface_hub:\n\n```python\nimport vitrail\n\n"
        f'trained = vitrail.load("hf:{repo}")  # model, preprocess, labels, origin\n{call}\n```'
    )
    if refusal is not None:
        return f"{vitrail}\n\nThere are no files for transformers: {_plain(refusal)}."
    task = "image-classification" if classes else "image-feature-extraction"
    return (
        f"{vitrail}\n\nWith transformers:\n\n```python\nfrom transformers import pipeline\n\n"
        f'pipeline("{task}", "{repo}")("image.jpg")\n```'
    )


def _facts(trained: "Trained") -> str:
    from vitrail.config import to_json
    from vitrail.model import count

    config = trained.model.config
    preprocess = {"preprocessing": "unknown"}
    if trained.preprocess is not None:
        preprocess = {f"preprocessing: {name}": value for name, value in to_json(trained.preprocess).items()}
    rows: dict[str, Any] = {
        "parameters": show.count(count.parameters(config)),
        "multiply-adds": f"{show.count(count.multiply_adds(config))} an image",
        **{f"architecture: {name}": value for name, value in to_json(config).items()},
        **preprocess,
        "labels": "unknown" if trained.labels is None else show.count(len(trained.labels)),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows.items())])


def _origin(trained: "Trained") -> str:
    origin = trained.origin
    lines = [
        f"format: {origin.format}",
        f"name: {origin.name}",
        f"sha256 of the original file: {origin.sha256 or 'unknown'}",
        f"licence: {origin.licence or 'unknown'}",
        *(f"assumed: {sentence}" for sentence in origin.assumptions),
        *(f"changed: {sentence}" for sentence in origin.changes),
    ]
    return _list(lines)


def _list(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {_plain(sentence)}" for sentence in sentences)


def _cell(value: Any) -> str:
    """A number, a word or a list of them, from a configuration that was checked when it was read."""
    text = value if isinstance(value, str) else jsonlib.dumps(value, ensure_ascii=False)
    return text.replace("|", "\\|")


def _plain(text: str) -> str:
    """Text that is no markup and stays on its line: names in model files are anyone's."""
    return re.sub(r"([<>\[\]`])", r"\\\1", show.printable(" ".join(text.split())))
