"""Run folders: written with chosen numbers, or by a real run that takes a second."""

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import model_factory
from tests.cli.test_train import HERE
from tests.data.image_files import write_image_folder
from vitrail.cli import main
from vitrail.evaluation.predictions import MAX_CONFUSION_CLASSES
from vitrail.weights.load import save

CONFIG: dict[str, Any] = {
    "recipe": {
        "model": None, "settings": {}, "batch": 4, "epochs": 2.0, "loss": "softmax", "label_smoothing": 0.1,
        "optimiser": {"kind": "adam", "lr": 0.0002, "weight_decay": 0.05},
        "schedule": {"decay": "cosine", "warmup": 1},
        "augment": {"crop": "inception", "area": [0.25, 1.0], "flip": True, "randaugment": [2, 10], "jitter": 0.0,
                    "erase": 0.0, "mixup": 0.8, "cutmix": 0.0},
        "dropout": 0.0, "stochastic_depth": 0.0, "ema": 0.0, "layers": None, "balanced": False, "source": "vitrail",
    },
    "model": {"name": "tiny"},
    "data": "/home/someone/secret/photos",
    "images": {"train": 40, "val": 6, "test": 10},
    "classes": ["cat", "dog", "<b>eel</b>"],
    "notes": ["no val given (6 images, listed in /home/someone/.local/share/vitrail/photos.csv)"],
    "preprocess": {"size": [32, 32], "resize": [36], "interpolation": "bicubic", "mean": [0.5], "std": [0.5]},
    "everything": False,
    "seed": 3, "steps": 20, "world": 1, "device": "cpu", "threads": 1, "jpeg_decoder": "Pillow",
    "versions": {"python": "3.11", "torch": "2.13"},
}  # fmt: skip
PREDICTIONS = (  # ten images: true class, predicted class, probability
    ("cat", "cat", 0.9), ("cat", "cat", 0.95), ("cat", "dog", 0.85), ("cat", "dog", 0.55),
    ("dog", "dog", 0.99), ("dog", "dog", 0.97), ("dog", "cat", 0.6), ("dog", "dog", 0.7), ("dog", "dog", 0.8),
    ("<b>eel</b>", "<b>eel</b>", 0.5),
)  # fmt: skip
MULTI_LABEL_METRICS = {
    "micro_f1": 0.61, "macro_f1": 0.52, "mean_average_precision": 0.73, "calibration_error": 0.04,
    "bins": [[2, 0.05, 0]] + [[0, 0.0, 0]] * 13 + [[4, 3.9, 3]],
}  # fmt: skip
COLUMNS = ("class", "train_images", "images", "correct", "recall", "precision", "predicted", "f1", "average_precision")
TRAIN_COUNTS = {"cat": 10, "dog": 25, "<b>eel</b>": 5}


def write_run_folder(
    folder: Path,
    *,
    predictions: Sequence[tuple[str, str, float]] = PREDICTIONS,
    ended: bool = True,
    has_metrics: bool = True,
    **changes: Any,
) -> Path:
    """Write a run's folder without weights; `changes` are those of config.json.

    Old multi-label runs lack the multi-label metrics.
    """
    folder.mkdir(parents=True)
    config = CONFIG | changes
    if any(" | " in label for label, *_ in predictions):
        config = {"several": True, **config}
    (folder / "config.json").write_text(json.dumps(config))
    names = (CONFIG | changes)["classes"]
    (folder / "results.csv").write_text(
        "epoch,time,train/loss,metrics/accuracy_top1,metrics/accuracy_top5,val/loss,lr/pg0\n"
        "1,5,1.5,0.5,1,1.2,0.0002\n2,10,1.0,0.75,1,0.9,0.0001\n"
    )
    events: list[dict[str, Any]] = [{"at": 0, "event": "checkpoint", "step": 10}]
    multi_label = config.get("several", False)
    if ended:
        right = sum(predicted == label for label, predicted, _ in predictions)
        metrics = {
            "images": len(predictions),
            "correct": right,
            "top1": right / len(predictions),
            "top5": 1.0,
            "loss": 0.7,
        }
        numbers = {"temperature": 1.5, "calibration_error": 0.12, "seconds": 10.4}
        events.append({"at": 86_400.0, "event": "end", "split": "test", **metrics, **numbers})
        rows = [
            (f"test/{index}.jpg", label, predicted, probability, 0.1, int(predicted == label))
            for index, (label, predicted, probability) in enumerate(predictions)
        ]
        _write_table(
            folder / "predictions.csv", ("image", "label", "predicted", "probability", "loss", "correct"), rows
        )
        if multi_label and has_metrics:
            events.append({"at": 86_400.0, "event": "multi_label", **MULTI_LABEL_METRICS})
            _write_table(
                folder / "per_class.csv", COLUMNS, [(name, 5, 4, 2, 0.5, 0.4, 5, 0.44, 0.625) for name in names]
            )
        elif not multi_label and len(names) <= MAX_CONFUSION_CLASSES:
            classes = [(name, TRAIN_COUNTS.get(name, 5), 0, 0, "", "") for name in names]
            _write_table(folder / "per_class.csv", COLUMNS[:6], classes)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def _write_table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


@contextlib.contextmanager
def isolate_home(home: Path) -> Iterator[None]:
    """Keep the user's own data and cache folders out of a test, and print nothing."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setenv("XDG_DATA_HOME", str(home / "data"))
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        yield


def finetune_run(root: Path) -> Path:
    """Fine-tune a small model on `root`/set, two classes of four images in each split, and return the run's folder."""
    write_image_folder(root / "set", "train", "val", "test", each=4)
    save(model_factory.build_trained(model_factory.build_vit()), root / "model.safetensors")
    options = ("--model", str(root / "model.safetensors"), "--out", str(root / "run"), *HERE)
    with isolate_home(root / "home"):
        assert main(["finetune", str(root / "set"), *options, "--epochs", "2", "--batch", "4"]) == 0
    return root / "run"
