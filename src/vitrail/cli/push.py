"""`vitrail push RUN hf:ORG/NAME`: upload a model to the Hugging Face Hub, with a card that states only known facts."""

import tempfile
from pathlib import Path

from vitrail.cli import output
from vitrail.cli.arguments.models import PushArguments
from vitrail.errors import DataError, ModelError
from vitrail.formatting import format_count
from vitrail.report import model_card
from vitrail.report.run_facts import gather_facts
from vitrail.training.run_folder import is_run_folder
from vitrail.weights import formats, hub
from vitrail.weights.load import find_model_path, load, save
from vitrail.weights.trained import Trained


def run(arguments: PushArguments) -> None:
    """Upload the files and list them."""
    target, dry_run = arguments.target, arguments.dry_run
    repo = hub.parse_target(target)
    if not dry_run:
        hub.require_huggingface_hub()
    path = find_model_path(arguments.run)
    output.print_note(f"model: {arguments.run if path is None else path}")
    trained = load(arguments.run)
    run_folder = None if path in (None, Path(arguments.run)) else Path(arguments.run)
    with tempfile.TemporaryDirectory(prefix="vitrail-push-") as temporary:
        folder = Path(temporary) / "model"
        notes = prepare_upload(trained, folder, repo, run_folder)
        sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
        commit = None if dry_run else hub.push(folder, target, private=arguments.private)
    if arguments.output.json:
        listed = [{"name": name, "bytes": size} for name, size in sizes.items()]
        output.print_json({"repository": target, "files": listed, "notes": notes, "dry_run": dry_run, "commit": commit})
        return
    output.print_table(
        [
            *(("note", note) for note in notes),
            *(("file", f"{name}, {format_count(size)} bytes") for name, size in sizes.items()),
            ("dry run", f"nothing was uploaded to {target}") if commit is None else ("uploaded", commit),
        ]
    )


def prepare_upload(trained: Trained, folder: Path, repo: str, run_folder: Path | None = None) -> list[str]:
    """Write the files to upload, and return notes on what the format of transformers cannot hold.

    The card of a run is its README.md, as it was written at the end of the run or edited since.
    """
    refusal = None
    try:
        notes = save(trained, folder, "transformers")
    except ModelError as error:
        refusal = str(error)
        notes = [f"only the native file, no transformers folder: {refusal}"]
        folder.mkdir()
    save(trained, folder / formats.NATIVE_FILE)
    address = model_card.HubAddress(repo, refusal, () if refusal else tuple(notes))
    text = _make_card(trained, run_folder)
    (folder / "README.md").write_text(model_card.set_hub_address(text, trained, address), encoding="utf-8")
    return notes


def _make_card(trained: Trained, run_folder: Path | None) -> str:
    if run_folder is not None and (run_folder / "README.md").is_file():
        return _read_card(run_folder / "README.md")
    facts = gather_facts(run_folder) if run_folder is not None and is_run_folder(run_folder) else None
    return model_card.build_card(trained, facts).to_markdown()


def _read_card(card: Path) -> str:
    try:
        return card.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{card} is no text in UTF-8 ({error}): save it as such, or remove it and push again, with a new card"
        ) from error
