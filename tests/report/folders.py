"""Run folders: written by hand, number by number, and made by a real run in a second."""

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import making
from tests.cli.test_train import HERE
from tests.data.pictures import folder as pictures
from vitrail.cli import main
from vitrail.evaluate.predictions import MAX_CONFUSION_CLASSES
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
ANSWERS = (  # of ten images: the truth, what was said, how surely
    ("cat", "cat", 0.9), ("cat", "cat", 0.95), ("cat", "dog", 0.85), ("cat", "dog", 0.55),
    ("dog", "dog", 0.99), ("dog", "dog", 0.97), ("dog", "cat", 0.6), ("dog", "dog", 0.7), ("dog", "dog", 0.8),
    ("<b>eel</b>", "<b>eel</b>", 0.5),
)  # fmt: skip
LABELS = {
    "micro_f1": 0.61, "macro_f1": 0.52, "mean_average_precision": 0.73, "calibration_error": 0.04,
    "bins": [[2, 0.05, 0]] + [[0, 0.0, 0]] * 13 + [[4, 3.9, 3]],
}  # fmt: skip
HEADS = ("class", "train_images", "images", "right", "recall", "precision", "predicted", "f1", "average_precision")
TRAINED = {"cat": 10, "dog": 25, "<b>eel</b>": 5}


def written(
    folder: Path,
    *,
    answers: Sequence[tuple[str, str, float]] = ANSWERS,
    ended: bool = True,
    judged: bool = True,
    **changes: Any,
) -> Path:
    """A run's folder without weights; `changes` are of config.json. An old multi-label one is not `judged` as such."""
    folder.mkdir(parents=True)
    config = CONFIG | changes
    if any(" | " in label for label, *_ in answers):
        config = {"several": True, **config}
    (folder / "config.json").write_text(json.dumps(config))
    names = (CONFIG | changes)["classes"]
    (folder / "results.csv").write_text(
        "epoch,time,train/loss,metrics/accuracy_top1,metrics/accuracy_top5,val/loss,lr/pg0\n"
        "1,5,1.5,0.5,1,1.2,0.0002\n2,10,1.0,0.75,1,0.9,0.0001\n"
    )
    events: list[dict[str, Any]] = [{"at": 0, "event": "checkpoint", "step": 10}]
    several = config.get("several", False)
    if ended:
        right = sum(said == label for label, said, _ in answers)
        found = {"images": len(answers), "right": right, "top1": right / len(answers), "top5": 1.0, "loss": 0.7}
        numbers = {"temperature": 1.5, "calibration_error": 0.12, "seconds": 10.4}
        events.append({"at": 86_400.0, "event": "end", "split": "test", **found, **numbers})
        rows = [
            (f"test/{place}.jpg", label, said, sure, 0.1, int(said == label))
            for place, (label, said, sure) in enumerate(answers)
        ]
        _table(folder / "predictions.csv", ("image", "label", "predicted", "probability", "loss", "right"), rows)
        if several and judged:
            events.append({"at": 86_400.0, "event": "multi_label", **LABELS})
            _table(folder / "per_class.csv", HEADS, [(name, 5, 4, 2, 0.5, 0.4, 5, 0.44, 0.625) for name in names])
        elif not several and len(names) <= MAX_CONFUSION_CLASSES:
            classes = [(name, TRAINED.get(name, 5), 0, 0, "", "") for name in names]
            _table(folder / "per_class.csv", HEADS[:6], classes)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def _table(path: Path, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([heads, *rows])


@contextlib.contextmanager
def alone(home: Path) -> Iterator[None]:
    """Nothing of the user's own is read or written, and nothing is printed."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setenv("XDG_DATA_HOME", str(home / "data"))
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        yield


def tuned(root: Path) -> Path:
    """The folder of a real run: a small model on `root`/set, two classes of four pictures in each split."""
    pictures(root / "set", "train", "val", "test", each=4)
    save(making.trained(making.vit()), root / "model.safetensors")
    given = ("--model", str(root / "model.safetensors"), "--out", str(root / "run"), *HERE)
    with alone(root / "home"):
        assert main(["finetune", str(root / "set"), *given, "--epochs", "2", "--batch", "4"]) == 0
    return root / "run"
