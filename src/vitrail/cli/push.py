"""`vitrail push RUN hf:ORG/NAME`: a model to the Hugging Face Hub, with a card that says only what is known."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitrail.cli import output
from vitrail.errors import DataError, ModelError

if TYPE_CHECKING:
    from vitrail.weights.trained import Trained


def main(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="hf:ORG/NAME")],
    private: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Upload a model to the Hugging Face Hub: the transformers folder, the native file and a model card.

    Args:
        run: A run folder, whose weights/best.safetensors and README.md are taken, or any MODEL.
        target: The repository, made if it is missing; its card and model files are replaced.
        private: Make a missing repository private, and refuse to push to a public one.
        dry_run: Say what would be uploaded and use no network.
        json: Print JSON.
    """
    from vitrail.weights import hub

    repo = hub.parse_target(target)
    if not dry_run:
        hub.require_huggingface_hub()
    from vitrail.weights.load import find_model_path, load

    place = find_model_path(run)
    output.print_note(f"model: {run if place is None else place}")
    trained = load(run)
    with tempfile.TemporaryDirectory(prefix="vitrail-push-") as workshop:
        folder = Path(workshop) / "model"
        notes = prepare_upload(trained, folder, repo, None if place in (None, Path(run)) else Path(run))
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        commit = None if dry_run else hub.push(folder, target, private=private)
    if json:
        listed = [{"name": name, "bytes": size} for name, size in sizes.items()]
        output.print_json({"repository": target, "files": listed, "notes": notes, "dry_run": dry_run, "commit": commit})
        return
    output.print_table(
        [
            *(("note", text) for text in notes),
            *(("file", f"{name}, {output.format_count(size)} bytes") for name, size in sizes.items()),
            ("dry run", f"nothing was uploaded to {target}") if commit is None else ("uploaded", commit),
        ]
    )


def prepare_upload(trained: "Trained", folder: Path, repo: str, run: Path | None = None) -> list[str]:
    """Write what is to be uploaded, and return notes on what transformers' format could not take along.

    Of a run the card is its README.md, as it was written at its end or edited since.
    """
    from vitrail.report import model_card
    from vitrail.report.run_facts import gather_facts
    from vitrail.train.run_folder import is_run_folder
    from vitrail.weights import hub
    from vitrail.weights.load import save

    refusal = None
    try:
        notes = save(trained, folder, "transformers")
    except ModelError as error:
        refusal = str(error)
        notes = [f"only the native file, no transformers folder: {refusal}"]
        folder.mkdir()
    save(trained, folder / hub.NATIVE_FILE)
    address = model_card.HubAddress(repo, refusal, () if refusal else tuple(notes))
    written = None if run is None else run / "README.md"
    if written is not None and written.is_file():
        text = _read_card(written)
    else:
        facts = gather_facts(run) if run is not None and is_run_folder(run) else None
        text = model_card.build_card(trained, facts).to_markdown()
    (folder / "README.md").write_text(model_card.set_hub_address(text, trained, address), encoding="utf-8")
    return notes


def _read_card(card: Path) -> str:
    try:
        return card.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{card} is no text in UTF-8 ({error}): save it as such, or remove it and push again, with a card made anew"
        ) from error
