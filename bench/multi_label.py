"""Thresholds of labels, measured on photos with several flowers: one half, one tuned threshold, or one a class.

    python bench/multi_label.py MODEL FLOWERS102 --work FOLDER [--seeds 3] [--finetune EPOCHS] [--image-size 224]

FLOWERS102 has train/CLASS and test/CLASS. Each image is a 2 x 2 grid of its photos, cropped to squares; its labels are
the classes in it. One to four classes are drawn for a grid, with weights 1 / rank ** 0.7 over 40 classes, so that some
have few images. A photo is used in one split alone: three in four of train/CLASS in train, the rest in val, test/CLASS
in test. The seed decides the order of classes, their photos and the grids. FOLDER/seed-N/list.csv lists the result.

Of each seed a linear and a logistic probe of the model's features predict test; with --finetune all layers are trained
for so many epochs more, from the head of the logistic one. The thresholds are chosen on val: one for all labels, one a
class, and one a class with all labels' counts beside its own, scaled to several numbers of images.
"""

import argparse
import csv
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import vitrail
from vitrail.data.dataset import Dataset
from vitrail.data.sources import open_dataset
from vitrail.evaluation import features, label_metrics
from vitrail.evaluation.dataset_evaluation import EvaluationSettings, evaluate_model, make_evaluated_model
from vitrail.evaluation.label_thresholds import choose_common_threshold, choose_label_thresholds
from vitrail.evaluation.probe_run import ProbeMethod
from vitrail.weights.trained import logits_to_probabilities

CLASSES, TILE, QUALITY = 40, 112, 92
GRIDS = {"train": 600, "val": 200, "test": 400}
TAIL = 0.7  # the exponent of the classes' frequencies
COMMON_IMAGES = (0, 10, 20, 40, 80)


def make_grids(flowers: Path, folder: Path, seed: int) -> Path:
    """Write the grids and their list, or return the list that is there."""
    path = folder / "list.csv"
    if path.exists():
        return path
    rng = np.random.default_rng(seed)
    names = rng.permutation(sorted(each.name for each in (flowers / "train").iterdir()))[:CLASSES].tolist()
    weights = np.arange(1, CLASSES + 1) ** -TAIL
    photos = list_photos(flowers, names, rng)
    rows = [("path", "labels", "split")]
    for split, count in GRIDS.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            classes = rng.choice(CLASSES, rng.integers(1, 5), replace=False, p=weights / weights.sum()).tolist()
            tiles = rng.permutation(classes + rng.choice(classes, 4 - len(classes)).tolist()).tolist()
            grid = Image.new("RGB", (2 * TILE, 2 * TILE))
            for position, label in enumerate(tiles):
                grid.paste(crop_square(rng.choice(photos[split][label])), locate_tile(position))
            grid.save(folder / split / f"{number:04}.jpg", quality=QUALITY)
            rows.append((f"{split}/{number:04}.jpg", ";".join(names[label] for label in sorted(classes)), split))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def list_photos(flowers: Path, names: Sequence[str], rng: np.random.Generator) -> dict[str, list[list[Path]]]:
    """The photos of each class, by split."""
    photos: dict[str, list[list[Path]]] = {name: [] for name in GRIDS}
    for name in names:
        own = rng.permutation(sorted((flowers / "train" / name).iterdir())).tolist()
        held_out = len(own) // 4
        photos["train"].append(own[held_out:])
        photos["val"].append(own[:held_out])
        photos["test"].append(sorted((flowers / "test" / name).iterdir()))
    return photos


def crop_square(path: Path) -> Image.Image:
    """The middle of a photo as a tile."""
    with Image.open(path) as image:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        return image.convert("RGB").resize((TILE, TILE), Image.Resampling.BICUBIC, (left, top, left + side, top + side))


def locate_tile(position: int) -> tuple[int, int]:
    """The upper left corner of a tile."""
    row, column = divmod(position, 2)
    return TILE * column, TILE * row


Labels = tuple[NDArray[np.float32], NDArray[np.bool_]]
"""Probabilities and which labels are true, (n, L) each."""


def predict(trained: vitrail.Trained, dataset: Dataset, split: str) -> Labels:
    """The labels' probabilities of a split."""
    settings = EvaluationSettings(device=torch.device("cpu"))
    model = make_evaluated_model(trained, "model")
    predictions = evaluate_model(model, dataset.splits[split], range(CLASSES), settings).predictions
    return predictions.label_probabilities.numpy(), predictions.label_targets.numpy()


def predict_from_features(trained: vitrail.Trained, dataset: Dataset, split: str) -> Labels:
    """The same of a probed model, from the features that the probe has cached."""
    images, preprocess = dataset.splits[split], trained.preprocess
    assert preprocess is not None
    digests = features.digest_model(trained.model), features.digest_images(images)
    values = features.load_cached_features(features.build_cache_path(*digests, preprocess))
    assert values is not None, "the probe has just written them"
    head = trained.model.get_submodule("head")
    probabilities = logits_to_probabilities(head(values).detach(), trained.temperature, multi_label=True)
    return probabilities.numpy(), features.read_labels(images, CLASSES).numpy()


def compare_thresholds(val: Labels, test: Labels) -> dict[str, dict[str, float]]:
    """The scores on test of each way to choose thresholds on val."""
    (probabilities, truths), (scores, labels) = val, test
    thresholds: dict[str, float | tuple[float, ...]] = {
        "one half": 0.5,
        "one tuned": choose_common_threshold(probabilities, truths),
    }
    for count in COMMON_IMAGES:
        name = f"one a class, {count} common"
        thresholds[name] = choose_label_thresholds(probabilities, truths, common_images=count)
    return {name: score(scores, labels, values) for name, values in thresholds.items()}


def score(
    scores: NDArray[np.float32], labels: NDArray[np.bool_], thresholds: float | tuple[float, ...]
) -> dict[str, float]:
    predicted = scores > np.asarray(thresholds, dtype=np.float32)
    return {
        "mAP": label_metrics.mean_average_precision(scores.astype(np.float64), labels),
        "micro F1": label_metrics.micro_f1(predicted, labels),
        "macro F1": label_metrics.macro_f1(predicted, labels),
        "precision": label_metrics.compute_precision(predicted, labels),
        "recall": label_metrics.compute_recall(predicted, labels),
        "exact match": float((predicted == labels).all(axis=1).mean()),
    }


def measure_seed(options: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    """The scores of one seed's grids; its models are kept in the folder."""
    folder = Path(options.work) / f"seed-{seed}"
    data = str(make_grids(Path(options.flowers), folder, seed))
    dataset, rows = open_dataset(data), dict[str, dict[str, float]]()
    counts = features.read_labels(dataset.splits["val"], CLASSES).sum(dim=0)
    print(f"seed {seed}: val images of a class from {int(counts.min())} to {int(counts.max())}", flush=True)
    methods: list[ProbeMethod] = ["linear", "logistic"]
    for method in methods:
        kept = folder / f"{method}.safetensors"
        vitrail.probe(options.model, data, methods=method, workers=0, save=kept, overwrite=True)
        trained = vitrail.load(str(kept))
        val, test = (predict_from_features(trained, dataset, split) for split in ("val", "test"))
        rows |= {f"{method}, {name}": scores for name, scores in compare_thresholds(val, test).items()}
    if options.finetune:
        best = finetune(options, seed, data, folder)
        val, test = (predict(best, dataset, split) for split in ("val", "test"))
        rows |= {f"fine-tuned, {name}": scores for name, scores in compare_thresholds(val, test).items()}
    return rows


def finetune(options: argparse.Namespace, seed: int, data: str, folder: Path) -> vitrail.Trained:
    """Train all layers further, from the head of the logistic probe."""
    run = vitrail.finetune(
        data,
        str(folder / "logistic.safetensors"),
        epochs=options.finetune,
        image_size=options.image_size,
        seed=seed,
        keep_head=True,
        workers=0,
        out=folder / "finetune",
        overwrite=True,
    )
    return run.trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("flowers", metavar="FLOWERS102")
    parser.add_argument("--work", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--finetune", type=float, default=0, metavar="EPOCHS")
    parser.add_argument("--image-size", type=int, help="of fine-tuning")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure_seed(options, seed) for seed in range(options.seeds)]
    for name in results[0]:
        cells = []
        for metric in results[0][name]:
            values = [result[name][metric] for result in results]
            deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{metric} {100 * statistics.mean(values):.1f}{deviation}")
        print(f"{name:34} {', '.join(cells)}")


if __name__ == "__main__":
    main()
