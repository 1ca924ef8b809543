"""The folder of a model's figures, and the record of what is in it."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitrail import files, remote
from vitrail.errors import UsageError
from vitrail.runtime.workers import Notify, ignore_note

RECORD_FILE = "figures.json"
IMAGE_FOLDERS = ("rollout", "relevance", "tokens", "heads")
_FIGURES = ("filters", "positions", "distance", "overview", "cka", "faithfulness", "pca", "images", "boxes")


def claim_folder(out: str) -> Path:
    """Return the folder, if no files of others are in it."""
    folder = Path(out)
    occupied = folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD_FILE).is_file()
    if remote.is_remote(out) or folder.is_file() or occupied:
        raise UsageError(f"--out {out} must be a local folder that is new, empty or written by this command")
    return folder


@dataclasses.dataclass
class FigureFolder:
    """The figures so far: files, their numbers, and the reasons for those that are missing."""

    folder: Path
    models: list[str]
    files: dict[str, str] = dataclasses.field(default_factory=dict)  # a description by file name
    numbers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # by figure and model
    skipped: list[dict[str, str]] = dataclasses.field(default_factory=list)
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)  # the reason by image
    notify: Notify = dataclasses.field(default=ignore_note, repr=False)

    def clear(self) -> None:
        """Remove earlier figures, and mark the folder as written by this command."""
        for name in _FIGURES:
            for suffix in ("png", "npz", "json"):
                (self.folder / f"{name}.{suffix}").unlink(missing_ok=True)
        for name in IMAGE_FOLDERS:
            for picture in (self.folder / name).glob("*.png"):
                picture.unlink()
        self.write_record(complete=False)

    def add_file(self, name: str, description: str) -> Path:
        """Note a file, and return its path to write to."""
        self.files[name] = description
        return self.folder / name

    def add_skipped(self, figure: str, reason: str) -> None:
        """Note why a figure is missing."""
        self.skipped.append({"figure": figure, "reason": reason})
        self.notify(f"no {figure}: {reason}")

    def add_unreadable(self, image: str, reason: str) -> None:
        """Note that an image cannot be read, once for all models."""
        if image not in self.unreadable:
            self.unreadable[image] = reason
            self.notify(reason)

    def write_arrays(self, name: str, by_model: Mapping[str, Mapping[str, Any]]) -> None:
        """Write arrays as one .npz; the keys of the second model begin with second_."""
        arrays: dict[str, Any] = {
            f"{'second_' * self.models.index(model)}{key}": np.asarray(value)
            for model, fields in by_model.items()
            for key, value in fields.items()
        }
        with files.write_atomically(self.add_file(name, "its numbers, as arrays"), overwrite=True) as fresh:
            np.savez_compressed(fresh, **arrays)

    def write_json(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write numbers as JSON."""
        with files.write_atomically(self.folder / name, overwrite=True) as fresh:
            fresh.write_text(json.dumps(facts, indent=1) + "\n")

    def write_record(self, *, complete: bool) -> dict[str, Any]:
        """Write all that is known to figures.json, and return it."""
        fields = ("models", "files", "numbers", "skipped", "unreadable")
        facts = {"complete": complete, "folder": str(self.folder)} | {name: getattr(self, name) for name in fields}
        self.write_json(RECORD_FILE, facts)
        return facts
