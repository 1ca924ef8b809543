"""Find likely label errors from Python: `vitrail.suspects`."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Literal

from vitrail import remote
from vitrail.api import notebook
from vitrail.api.keyword_errors import name_keywords
from vitrail.api.models import AnyModel, get_model_name, load_trained
from vitrail.api.progress import NoteCollector, Progress, choose_progress
from vitrail.data.sources import DataSource, get_data_name, open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.evaluation import label_errors
from vitrail.evaluation.label_errors import DEFAULT_FOLDS, LabelErrors, Suspect, SuspectSplit
from vitrail.evaluation.probe_run import ProbeSettings
from vitrail.formatting import pluralize
from vitrail.report.result_files import load_inputs
from vitrail.report.suspects_page import CSV_FILE, PAGE_FILE, describe_result, write_suspects
from vitrail.runtime.devices import resolve_device
from vitrail.runtime.workers import Notify, count_loader_workers
from vitrail.training.finetune import PreprocessName, set_preprocess
from vitrail.visualization import image_grids
from vitrail.weights.trained import Trained, require_preprocess

_SHOWN_SUSPECTS = 16  # images in a notebook
_GRID_WIDTH = 900  # pixels


@dataclasses.dataclass(frozen=True, repr=False)
class Suspects:
    """The likely label errors of a dataset, the least probable label first.

    `vitrail.suspects` returns it.

        suspects = vitrail.suspects("photos", "model.safetensors", folds=2)
        for suspect in suspects.rows:
            print(suspect.image, suspect.label, suspect.likely_label)
        print(suspects)
    """

    metrics: dict[str, Any]
    """All numbers: images and suspects of each split, and how often each class is suspected to be another."""
    rows: tuple[Suspect, ...]
    """The suspects, with their labels and probabilities."""
    errors: LabelErrors
    """The probabilities and features of all images."""
    trained: Trained
    """The model whose features were used."""
    folder: Path | None
    """Where suspects.csv and suspects.html were written."""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        images = pluralize(len(self.errors.features.targets), "label")
        return f"Suspects({len(self.rows):,} of {images} of {self.metrics['data']} look wrong)"

    def _repr_html_(self) -> str:
        rows = {"result": describe_result(self.errors), "data": self.metrics["data"], "model": self.metrics["model"]}
        if pairs := self.metrics["pairs"][:5]:
            rows["pairs"] = ", ".join(f"{pair['label']} → {pair['likely_label']} {pair['suspects']}" for pair in pairs)
        if self.folder is not None:
            rows |= {"page": str(self.folder / PAGE_FILE), "table": str(self.folder / CSV_FILE)}
        parts = [notebook.render_table(rows)]
        with contextlib.suppress(DataError):  # images that are gone by now
            parts += self._render_images()
        return notebook.wrap_html(*parts, *notebook.render_notes(self.notes))

    def _render_images(self) -> list[str]:
        """The first suspects as pictures, if any."""
        shown = self.rows[:_SHOWN_SUSPECTS]
        if not shown:
            return []
        preprocess, splits = require_preprocess(self.trained), self.errors.dataset.splits
        inputs = [load_inputs(splits[suspect.split], [suspect.position], preprocess)[0] for suspect in shown]
        captions = [f"{suspect.label}: {suspect.likely_label}?" for suspect in shown]
        picture, caption = image_grids.make_image_grid(inputs, captions), "least probable labels"
        return [notebook.render_figure(caption, notebook.render_picture(picture, _GRID_WIDTH, alt=caption))]


@name_keywords
def suspects(
    data: DataSource,
    model: AnyModel,
    *,
    split: SuspectSplit = "all",
    folds: int = DEFAULT_FOLDS,
    action: Literal["relabel", "drop"] | None = None,
    out: str | Path | None = None,
    preprocess: PreprocessName | None = None,
    batch: int = 64,
    device: str | None = None,
    workers: int | None = None,
    progress: Progress = True,
    notify: Notify | None = None,
) -> Suspects:
    """Rank the likely label errors of a dataset: `vitrail data suspects` from Python, with its defaults.

    The label of each image is judged by a linear classifier of the model's features that was not trained on it
    (cross-validation and confident learning).

        vitrail.suspects("photos", "model.safetensors", out="suspects").rows

    Arguments:

    - `data`: A folder or any other DATA of the commands, or data in memory, as in `finetune`.
    - `model`: A name, a path, a `Run` or a `Trained`; best one that was not trained on these labels.
    - `split`: "train", "val", "test" or "all": the images to search, whose labels the classifiers learn too.
    - `folds`: Parts of the cross-validation.
    - `action`: "relabel" or "drop" decides for all training images in suspects.csv; by default you decide.
    - `out`: A new or empty folder for suspects.csv and suspects.html; none by default.
    - `preprocess`: Mean, std and interpolation for weights that do not state them.
    - `batch`: Images per batch.
    - `device`: cpu, cuda or mps; the best device available by default.
    - `workers`: Processes that decode images; one per core, less one, by default.
    - `progress`: Whether a bar is shown, or a function that shows progress.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    name, notes = get_model_name(model), NoteCollector(notify)
    folder = None if out is None else _check_folder(out)
    dataset = open_dataset(data)
    trained = set_preprocess(load_trained(model, notes), preprocess)
    settings = ProbeSettings(
        batch=batch, workers=count_loader_workers(workers), device=resolve_device(device),
        show_progress=choose_progress(progress), notify=notes,
    )  # fmt: skip
    errors = label_errors.find_label_errors(trained, dataset, get_data_name(data), settings, split=split, folds=folds)
    if errors.unjudged:
        notes(
            f"note: {pluralize(errors.unjudged, 'label')} not judged: their classes have a single image, or only"
            " duplicates of one"
        )
    if folder is not None:
        write_suspects(errors, folder, action=action, model=name)
    facts = {"model": name} | label_errors.collect_facts(errors)
    return Suspects(facts, tuple(errors.list_suspects()), errors, trained, folder, tuple(notes))


def _check_folder(out: str | Path) -> Path:
    """The folder to write; one with files may hold somebody's decisions."""
    folder = Path(out)
    if remote.is_remote(str(out)) or folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"--out {out} must be a local folder that is new or empty")
    return folder
