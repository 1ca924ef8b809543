"""How accuracy grows with the number of training images, for the features of a pre-trained model and what to beat.

    n images   L classes   D features   S image side

Every draw takes a few images of each class to learn from. It is tested on all images that no draw of its seed learns
from, so all methods and all numbers of images of a seed are tested on the same ones.

built-in           ridge regression from the pre-trained model's features, which are computed once
from scratch       the same network, trained from random weights for a fixed number of steps
nearest neighbor   the class of the image with the most similar pixels
"""

import csv
import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.config import OptimizerConfig, PreprocessConfig, ScheduleConfig, ViTConfig
from vitrail.data.dataset import Dataset, Split
from vitrail.data.loader import iter_eval_batches, load_resident_images
from vitrail.data.transforms import normalize
from vitrail.errors import DataError
from vitrail.evaluation.linear_classifiers import Features, solve_ridge
from vitrail.evaluation.probe import ProbeScore, check_shots, sample_shots
from vitrail.evaluation.probe_run import ProbeSettings, extract_dataset_features
from vitrail.evaluation.statistics import Interval, paired_interval
from vitrail.files import write_atomically
from vitrail.model.initialize import initialize_weights
from vitrail.model.vit import ViT
from vitrail.runtime.workers import Notify, ShowProgress, hide_progress, ignore_note
from vitrail.training.optimizer import build_optimizer, clip_gradients, set_lr
from vitrail.training.schedule import lr_scale
from vitrail.visualization import plots
from vitrail.weights.trained import Trained, require_preprocess

PRETRAINED, FROM_SCRATCH, NEAREST_NEIGHBOR = "built-in", "from scratch", "nearest neighbor"
METHODS = PRETRAINED, FROM_SCRATCH, NEAREST_NEIGHBOR
CSV_COLUMNS = (
    "data", "method", "images_per_class", "draws", "test_images", "mean", "standard_deviation", "low", "high",
)  # fmt: skip
_COLORS = {PRETRAINED: plots.BLUE, FROM_SCRATCH: plots.ORANGE, NEAREST_NEIGHBOR: plots.GRAY}
_EVAL_BATCH = 64
_OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.05, clip=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurveSettings:
    """How often each point of a curve is measured, and how long the network from scratch is trained."""

    shots: tuple[int, ...] = (1, 5, 10, 30)
    """Training images of each class."""
    draws: int = 100
    """Draws of the training images for the features and the pixels."""
    penalty: float = 16.0
    """Of the ridge regression, on features of length 1 that are scaled alike."""
    scratch_draws: int = 3
    """Draws for the network from scratch; 0 to leave it out."""
    scratch_steps: int = 45
    """Each takes a batch of images at random, half of them mirrored."""
    scratch_batch: int = 8


@dataclasses.dataclass(frozen=True)
class CurveImages:
    """The images of a dataset, as each method takes them."""

    features: Tensor  # float32 (n, D), of length 1
    inputs: Tensor  # uint8 (n, C, S, S), at the model's resolution
    pixels: Tensor  # float32 (n, C * H * W), at the images' own size
    targets: Tensor  # int64 (n,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningCurve:
    """The accuracy of each method by the number of training images of each class."""

    data: str
    classes: tuple[str, ...]
    test_images: int
    """Images that each draw is tested on."""
    scores: Mapping[str, tuple[ProbeScore, ...]]
    """By method, in the order of the numbers of images."""

    def write_csv(self, path: Path) -> None:
        """Write a row for each method and number of images; low and high are the mean's 95 % interval."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(CSV_COLUMNS)
        for method, scores in self.scores.items():
            for score in scores:
                low, high = compute_mean_interval(score) or ("", "")
                spread = "" if score.std is None else score.std
                counts = (score.shots, len(score.correct), score.test_images)
                writer.writerow([self.data, method, *counts, score.top1, spread, low, high])
        with write_atomically(path, overwrite=True) as temporary:
            temporary.write_text(text.getvalue(), encoding="utf-8")

    def draw(self, path: Path, *, title: str) -> None:
        """Draw the curves, with bands of one standard deviation over the draws."""
        curves = {
            method: [(float(score.shots or 0), score.top1, score.std) for score in scores]
            for method, scores in self.scores.items()
        }
        x_name = "training images of each class"
        plots.plot_accuracy_curves(curves, path, title=title, x_name=x_name, name_each_x=True, colors=_COLORS)


def compute_mean_interval(score: ProbeScore) -> Interval | None:
    """The 95 % interval of the mean accuracy over the draws, by Student's t; None for a single draw."""
    interval = paired_interval([correct / score.test_images for correct in score.correct])
    return interval and (max(0.0, interval[0]), min(1.0, interval[1]))


def measure_learning_curve(
    trained: Trained,
    dataset: Dataset,
    images: CurveImages,
    settings: CurveSettings,
    *,
    show_progress: ShowProgress = hide_progress,
) -> LearningCurve:
    """Measure the curve of all methods on all images of a dataset, on the CPU; its splits do not matter."""
    check_shots(images.targets, dataset.classes, max(settings.shots) + 1)
    scores = {PRETRAINED: score_features(images, dataset.classes, settings)}
    if settings.scratch_draws:
        with show_progress(f"{dataset.name}: from scratch") as progress:
            scores[FROM_SCRATCH] = score_from_scratch(trained, images, dataset.classes, settings, progress)
    scores[NEAREST_NEIGHBOR] = score_nearest_neighbor(images, dataset.classes, settings)
    return LearningCurve(
        data=dataset.name,
        classes=tuple(dataset.classes),
        test_images=len(images.targets) - max(settings.shots) * len(dataset.classes),
        scores=scores,
    )


def count_test_correct(dataset: Dataset, images: CurveImages, settings: CurveSettings) -> dict[str, int]:
    """The test images that each method but training classifies correctly, when it learns from the train split."""
    ends = np.cumsum([len(split) for split in dataset.splits.values()]).tolist()
    rows = {
        name: torch.arange(end - len(split), end)
        for (name, split), end in zip(dataset.splits.items(), ends, strict=True)
    }
    draw = _Draw(0, rows["train"], rows["test"])
    return {
        PRETRAINED: _count_probe_correct(images, len(dataset.classes), settings.penalty, draw),
        NEAREST_NEIGHBOR: _count_nearest_correct(images, draw),
    }


def take_images_per_class(dataset: Dataset, count: int) -> Dataset:
    """The dataset with `count` images of each class, always the same, all in one split."""
    ((name, split),) = _merge_splits(dataset).items()
    targets = torch.tensor([split.get_labels(row)[0] for row in range(len(split))])
    rows = sample_shots(targets, dataset.classes, count, seed=0).sort().values
    return dataclasses.replace(dataset, splits={name: Split(split.store, _get_rows(split)[rows].numpy())})


def load_curve_images(
    trained: Trained, dataset: Dataset, *, show_progress: ShowProgress = hide_progress, notify: Notify = ignore_note
) -> CurveImages:
    """Read a small dataset's images, all of one size, and compute their features or take them from the cache."""
    preprocess = require_preprocess(trained)
    whole = dataclasses.replace(dataset, splits=_merge_splits(dataset))
    (split,) = whole.splits.values()
    resident = load_resident_images(
        split, channels=len(preprocess.mean), num_classes=len(dataset.classes), device="cpu"
    )
    if resident is None:
        raise DataError(f"{dataset.name} is not a small dataset of images of one size, which a learning curve is for")
    pixels, targets = resident
    probe_settings = ProbeSettings(device=torch.device("cpu"), show_progress=show_progress, notify=notify)
    features, _ = extract_dataset_features(trained, whole, dataset.name, probe_settings)
    batches = iter_eval_batches(split, preprocess, batch_size=_EVAL_BATCH, num_classes=len(dataset.classes))
    return CurveImages(
        features=F.normalize(next(iter(features.values())), dim=1),
        inputs=torch.cat([batch.pixels for batch in batches]),
        pixels=pixels.flatten(1).float(),
        targets=targets,
    )


def _merge_splits(dataset: Dataset) -> dict[str, Split]:
    """All images of a dataset as one split."""
    splits = list(dataset.splits.values())
    rows = torch.cat([_get_rows(split) for split in splits])
    return {"all": Split(splits[0].store, rows.numpy())}


def _get_rows(split: Split) -> Tensor:
    return torch.as_tensor(list(split.rows))


# --- the methods -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Draw:
    """The images of one draw."""

    seed: int
    train: Tensor
    test: Tensor


def _iterate_draws(targets: Tensor, classes: Sequence[str], shots: int, draws: int, max_shots: int) -> Iterator[_Draw]:
    """Yield the draws of `shots` images a class; more shots of a seed include those of fewer."""
    for seed in range(draws):
        is_test = torch.ones(len(targets), dtype=torch.bool)
        is_test[sample_shots(targets, classes, max_shots, seed)] = False
        yield _Draw(seed, sample_shots(targets, classes, shots, seed), is_test.nonzero()[:, 0])


def score_features(images: CurveImages, classes: Sequence[str], settings: CurveSettings) -> tuple[ProbeScore, ...]:
    """Ridge regression from the features of each draw."""
    setting = "lambda", settings.penalty
    return tuple(
        _make_score(
            PRETRAINED,
            shots,
            draws,
            [_count_probe_correct(images, len(classes), settings.penalty, draw) for draw in draws],
            setting,
        )
        for shots, draws in _list_draws(images, classes, settings, settings.draws)
    )


def _count_probe_correct(images: CurveImages, num_classes: int, penalty: float, draw: _Draw) -> int:
    all_features = Features(images.features, images.targets)
    (head,) = solve_ridge(all_features.select(draw.train), num_classes, [penalty], per_feature=False)
    return head.count_correct(all_features.select(draw.test))


def score_nearest_neighbor(
    images: CurveImages, classes: Sequence[str], settings: CurveSettings
) -> tuple[ProbeScore, ...]:
    """The class of the training image with the least Euclidean distance of pixels."""
    return tuple(
        _make_score(NEAREST_NEIGHBOR, shots, draws, [_count_nearest_correct(images, draw) for draw in draws], ("k", 1))
        for shots, draws in _list_draws(images, classes, settings, settings.draws)
    )


def _count_nearest_correct(images: CurveImages, draw: _Draw) -> int:
    nearest = torch.cdist(images.pixels[draw.test], images.pixels[draw.train]).argmin(dim=1)
    return int((images.targets[draw.train][nearest] == images.targets[draw.test]).sum())


def score_from_scratch(
    trained: Trained,
    images: CurveImages,
    classes: Sequence[str],
    settings: CurveSettings,
    progress: Callable[..., None],
) -> tuple[ProbeScore, ...]:
    """The accuracy of the model's network, trained from random weights on each draw."""
    by_shots = _list_draws(images, classes, settings, settings.scratch_draws)
    preprocess, done = require_preprocess(trained), 0
    scores = []
    for shots, draws in by_shots:
        correct = []
        for draw in draws:
            model = train_from_scratch(trained, images, draw.train, len(classes), settings, seed=draw.seed)
            correct.append(_count_correct(model, images, draw.test, preprocess))
            done += 1
            progress(done, len(by_shots) * settings.scratch_draws)
        scores.append(_make_score(FROM_SCRATCH, shots, draws, correct, ("steps", settings.scratch_steps)))
    return tuple(scores)


def train_from_scratch(
    trained: Trained, images: CurveImages, rows: Tensor, num_classes: int, settings: CurveSettings, *, seed: int
) -> ViT:
    """Train a model's network from random weights on the images of these rows."""
    config = dataclasses.replace(trained.model.config, classes=num_classes)
    assert isinstance(config, ViTConfig), "the built-in model is a ViT"
    generator = torch.Generator().manual_seed(seed)
    model = initialize_weights(ViT(config), generator).train()
    preprocess, optimizer = require_preprocess(trained), build_optimizer(model, _OPTIMIZER)
    schedule = ScheduleConfig(warmup=settings.scratch_steps // 10)
    for step in range(settings.scratch_steps):
        batch = rows[torch.randperm(len(rows), generator=generator)[: settings.scratch_batch]]
        inputs = normalize(images.inputs[batch], preprocess)
        mirrored = torch.rand(len(batch), generator=generator) < 0.5
        inputs = torch.where(mirrored[:, None, None, None], inputs.flip(3), inputs)
        set_lr(optimizer, lr_scale(schedule, step, settings.scratch_steps))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), images.targets[batch]).backward()
        clip_gradients(model.parameters(), _OPTIMIZER.clip)
        optimizer.step()
    return model.eval()


@torch.inference_mode()
def _count_correct(model: ViT, images: CurveImages, rows: Tensor, preprocess: PreprocessConfig) -> int:
    return sum(
        int((model(normalize(images.inputs[part], preprocess)).argmax(dim=1) == images.targets[part]).sum())
        for part in rows.split(_EVAL_BATCH)
    )


def _list_draws(
    images: CurveImages, classes: Sequence[str], settings: CurveSettings, draws: int
) -> list[tuple[int, list[_Draw]]]:
    """The draws of each number of images."""
    return [
        (shots, list(_iterate_draws(images.targets, classes, shots, draws, max(settings.shots))))
        for shots in settings.shots
    ]


def _make_score(
    method: str, shots: int, draws: Sequence[_Draw], correct: Sequence[int], setting: tuple[str, float]
) -> ProbeScore:
    return ProbeScore(
        method=method,
        shots=shots,
        train_images=len(draws[0].train),
        correct=tuple(correct),
        test_images=len(draws[0].test),
        setting=setting,
    )
