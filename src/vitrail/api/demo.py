"""What a pre-trained model is good for, on data that installed packages bring: `vitrail demo`.

    FOLDER/  report.html  learning_curve.png  learning_curve_digits.png  learning_curve.csv  learning_curve_digits.csv
             photos.png  demo.json  finetune/

Photographs show what pre-training gives. Digits of 8 x 8 pixels show where it gives little: they resemble nothing that
the model has seen, and similar pixels mean the same digit.
"""

import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps

from vitrail import remote
from vitrail.api.models import AnyModel, load_trained
from vitrail.data.decode import decode
from vitrail.data.sample_photos import list_sample_photos
from vitrail.data.sources import open_dataset
from vitrail.data.transforms import normalize
from vitrail.errors import StoppedError, UsageError
from vitrail.files import write_atomically
from vitrail.formatting import pluralize
from vitrail.inference.classifier import Classifier
from vitrail.report.demo_page import DemoFacts, PhotoPrediction, render_demo_page
from vitrail.training.finetune import FinetuneOptions, finetune
from vitrail.training.learning_curve import (
    NEAREST_NEIGHBOR,
    CurveSettings,
    LearningCurve,
    compute_mean_interval,
    count_test_correct,
    load_curve_images,
    measure_learning_curve,
    take_images_per_class,
)
from vitrail.training.recipe_overrides import RecipeOverrides
from vitrail.training.run_execution import RunCallbacks, RunOptions
from vitrail.training.run_folder import choose_next_folder, lock_run_folder
from vitrail.visualization import Pixels, attention, image_grids
from vitrail.visualization.crops import compute_crop_box
from vitrail.weights import builtin
from vitrail.weights.trained import Trained, require_preprocess

MODEL = builtin.NAME
DATA, COUNTEREXAMPLE = "faces", "digits"
_PANEL_SIZE = 320, 240  # pixels of a photo in photos.png


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """How much of everything the demo does."""

    curve: CurveSettings = dataclasses.field(default_factory=CurveSettings)
    counterexample: CurveSettings = dataclasses.field(default_factory=lambda: CurveSettings(scratch_draws=0))
    counterexample_images: int = 60
    """Digits of each class, to learn from and to test on."""
    epochs: float = 20
    """Of the fine-tuning."""


class DemoResult(NamedTuple):
    """What the demo measured, and where it is."""

    folder: Path
    curves: tuple[LearningCurve, LearningCurve]
    finetuned: dict[str, Any]
    """The facts of the fine-tuned model, as `finetune --json` prints them, and what others get right of its test."""
    photos: tuple[PhotoPrediction, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON has it."""
        curves = {
            curve.data: {
                method: [
                    {"images_per_class": score.shots, "test_images": score.test_images, **score.to_dict()}
                    | {"interval": compute_mean_interval(score)}
                    for score in scores
                ]
                for method, scores in curve.scores.items()
            }
            for curve in self.curves
        }
        photos = {photo.name: [list(label) for label in photo.labels] for photo in self.photos}
        facts = {"folder": str(self.folder), "report": str(self.folder / "report.html"), "seconds": self.seconds}
        return {**facts, "curves": curves, "finetuned": self.finetuned, "photos": photos}


def run_demo(
    out: str | None,
    *,
    model: AnyModel = MODEL,
    settings: DemoSettings = DemoSettings(),  # noqa: B008, frozen
    callbacks: RunCallbacks,
) -> DemoResult:
    """Measure the learning curves, fine-tune, classify photos, and write it all into a new folder."""
    start = time.monotonic()
    folder = _choose_folder(out)
    notify, show_progress = callbacks.notify, callbacks.show_progress
    with _explain_stop(folder, start), lock_run_folder(folder):
        trained = load_trained(model, notify)
        curves = []
        faces, digits = open_dataset(DATA), open_dataset(COUNTEREXAMPLE)
        digits = take_images_per_class(digits, settings.counterexample_images)
        for dataset, curve_settings in ((faces, settings.curve), (digits, settings.counterexample)):
            shots = ", ".join(map(str, curve_settings.shots))
            notify(f"learning curve of {dataset.name} by images of each class: {shots}")
            images = load_curve_images(trained, dataset, show_progress=show_progress, notify=notify)
            curve = measure_learning_curve(trained, dataset, images, curve_settings, show_progress=show_progress)
            suffix = "" if dataset.name == DATA else f"_{dataset.name}"
            curve.draw(folder / f"learning_curve{suffix}.png", title=_make_title(curve))
            curve.write_csv(folder / f"learning_curve{suffix}.csv")
            curves.append(curve)
            if dataset is faces:
                baselines = count_test_correct(faces, images, curve_settings)
        notify(f"fine-tuning on {pluralize(len(faces.splits['train']), 'image')} of {DATA}")
        finetuned = _finetune(trained, model, folder / "finetune", settings, callbacks, baselines)
        notify("classifying photos")
        photos = classify_photos(trained, folder / "photos.png")
        result = DemoResult(folder, (curves[0], curves[1]), finetuned, photos, time.monotonic() - start)
        with write_atomically(folder / "demo.json", overwrite=True) as temporary:
            temporary.write_text(json.dumps(result.to_dict(), indent=1) + "\n")
        facts = DemoFacts(
            model=trained, curves=result.curves, settings=settings.curve, data=faces,
            finetuned=finetuned, photos=photos, seconds=result.seconds,
        )  # fmt: skip
        with write_atomically(folder / "report.html", overwrite=True) as temporary:
            temporary.write_text(render_demo_page(facts), encoding="utf-8")
    return result


def _choose_folder(out: str | None) -> Path:
    if out is None:
        return choose_next_folder("demo")
    if remote.is_remote(out):
        raise UsageError(f"--out {out} is remote, and the demo writes a local folder")
    folder = Path(out)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"{folder} exists already: give a new folder to --out, or omit it")
    return folder


@contextlib.contextmanager
def _explain_stop(folder: Path, start: float) -> Iterator[None]:
    """Turn Ctrl-C, or a signal that fine-tuning has caught, into an error that says what to do."""
    try:
        yield
    except (KeyboardInterrupt, StoppedError) as error:
        kept = f"; {folder} has what was finished" if folder.exists() else ""
        message = f"stopped after {time.monotonic() - start:.0f} s{kept}. `vitrail demo` starts again in a new folder"
        number = signal.SIGTERM if isinstance(error, StoppedError) and not error.is_final else signal.SIGINT
        raise StoppedError(message, number) from None


def _make_title(curve: LearningCurve) -> str:
    kinds = {DATA: "Face or background", COUNTEREXAMPLE: "Handwritten digits"}
    return f"{kinds[curve.data]}: accuracy on {pluralize(curve.test_images, 'image')}"


def _finetune(
    trained: Trained,
    model: AnyModel,
    folder: Path,
    settings: DemoSettings,
    callbacks: RunCallbacks,
    baselines: Mapping[str, int],
) -> dict[str, Any]:
    """Fine-tune the model in a run folder of its own, whose report names the command that does this alone."""
    epochs = f"{settings.epochs:g}"
    words = ["finetune", DATA, "--model", str(model), "--epochs", epochs] if isinstance(model, str) else []
    options = FinetuneOptions(
        overrides=RecipeOverrides(epochs=settings.epochs),
        run=RunOptions(out=folder, device="cpu", workers=0),
    )
    callbacks = dataclasses.replace(callbacks, command=words)
    in_report = {"nearest neighbor by pixels": baselines[NEAREST_NEIGHBOR]}
    (facts,) = finetune(DATA, trained, options, callbacks, baselines=in_report)
    return facts | {"baselines": baselines}


def classify_photos(trained: Trained, path: Path) -> tuple[PhotoPrediction, ...]:
    """The five likeliest labels of each sample photo; draw the photos beside their attention rollouts at `path`."""
    photos = list_sample_photos()
    images = [photo.read() for photo in photos]
    classifier, preprocess = Classifier(trained), require_preprocess(trained)
    inputs = [classifier.make_input(image) for image in images]
    rollouts = attention.compute_rollout(trained.model, normalize(torch.stack(inputs), preprocess))
    predictions, panels, captions = [], [], []
    for photo, image, labels, rollout in zip(photos, images, classifier(inputs), rollouts, strict=True):
        image.thumbnail((480, 480))
        pixels = decode(image, 3, name=photo.name)
        crop = compute_crop_box(pixels.shape[1], pixels.shape[2], preprocess)
        pair = image_grids.to_rgb_array(pixels), image_grids.overlay_attention(pixels, rollout, crop)
        ranked = tuple((label, float(probability)) for label, probability in labels)
        predictions.append(PhotoPrediction(photo.name, photo.credit, ranked, *pair))
        panels += [_crop_panel(panel) for panel in pair]
        captions += [photo.name, f"{ranked[0][1]:.0%} {ranked[0][0].partition(',')[0]}"]
    image_grids.write_panels(panels, captions, path, columns=4)
    return tuple(predictions)


def _crop_panel(pixels: Pixels) -> Pixels:
    return np.asarray(ImageOps.fit(Image.fromarray(pixels), _PANEL_SIZE, centering=(0.5, 0.3)))
