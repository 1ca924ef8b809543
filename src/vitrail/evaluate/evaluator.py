"""Evaluate a model on a split: any MODEL, and timm's own networks for comparison.

n images   L outputs
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import PreprocessConfig
from vitrail.data import loader
from vitrail.data.dataset import Split
from vitrail.data.loader import Batch
from vitrail.errors import DataError, UsageError
from vitrail.evaluate.metrics import EvalWrapper, relabel_batches
from vitrail.evaluate.predictions import Counts, Predictions, count_predictions, predict_batches
from vitrail.formatting import pluralize
from vitrail.weights import timm as timm_files
from vitrail.weights.load import load
from vitrail.weights.trained import Trained, require_preprocess

TIMM_PREFIX = "timm-model:"


@dataclasses.dataclass(frozen=True)
class EvaluatedModel:
    """A network with what its evaluation needs."""

    name: str
    network: nn.Module
    num_outputs: int
    preprocess: PreprocessConfig
    labels: tuple[str, ...] | None
    temperature: float = 1.0
    multi_label: bool = False
    """Whether each class has a probability of its own."""
    origin: str = ""
    """What its file says about its training."""


def load_evaluated_model(name: str) -> EvaluatedModel:
    """Load a MODEL; timm-model:NAME is timm's own network, which need not be one that vitrail has."""
    return _load_timm_network(name) if name.startswith(TIMM_PREFIX) else make_evaluated_model(load(name), name)


def make_evaluated_model(trained: Trained, name: str) -> EvaluatedModel:
    """Prepare a model for evaluation; it must have a head and preprocessing."""
    outputs = trained.model.config.classes
    if not outputs:
        raise UsageError(f"{name} has no head, so it makes no predictions: `vitrail probe` evaluates its features")
    return EvaluatedModel(
        name,
        trained.model,
        outputs,
        require_preprocess(trained, name=name),
        trained.labels,
        trained.temperature,
        trained.multi_label,
        "; ".join((trained.origin.name, *trained.origin.changes)),
    )


def _load_timm_network(name: str) -> EvaluatedModel:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # a torchvision that does not fit torch raises the latter
        raise UsageError(
            f"{name} is timm's own network, and timm cannot be imported: {error}. pip install timm"
        ) from None
    try:
        network = timm.create_model(name.removeprefix(TIMM_PREFIX), pretrained=True).eval()
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise UsageError(f"timm cannot create {name}: {' '.join(str(error).split())[:200]}") from None
    config: dict[str, Any] = dict(network.pretrained_cfg)
    preprocess, unsupported = timm_files.parse_preprocess_config(config)
    if preprocess is None:
        raise UsageError(f"timm preprocesses images of {name} in a way that vitrail lacks: {'; '.join(unsupported)}")
    outputs = int(network.num_classes)
    return EvaluatedModel(name, network, outputs, preprocess, timm_files.parse_labels({}, config, outputs))


@dataclasses.dataclass(frozen=True)
class SplitEvaluation:
    """The predictions of a model for the images of a split, and its speed."""

    counts: Counts
    predictions: Predictions
    images_per_second: float
    """Of reading, preprocessing and computing, on all ranks."""
    unreadable: Sequence[int] = ()
    """The indices of images that could not be read."""


def evaluate_split(
    model: EvaluatedModel,
    split: Split,
    outputs: Sequence[int],
    *,
    device: torch.device,
    batch: int,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    flip_tta: bool = False,
    allowed_outputs: Sequence[int] | None = None,
    skip_bad: bool = False,
    gather_rows: Callable[[Tensor], Tensor] = lambda rows: rows,
    report_progress: Callable[[int], None] = lambda _: None,
) -> SplitEvaluation:
    """Predict every image of a split; class k of the dataset is the model's output `outputs[k]`.

    The model may predict `allowed_outputs` only. With `skip_bad`, images that cannot be read are skipped. Each rank
    evaluates a share of the images, and `gather_rows` concatenates the ranks' rows.
    """
    network = EvalWrapper(model.network.to(device), flip_tta=flip_tta, outputs=allowed_outputs)
    num_outputs = model.num_outputs if allowed_outputs is None else len(allowed_outputs)
    columns = list(outputs) if allowed_outputs is None else [list(allowed_outputs).index(output) for output in outputs]
    batches = loader.iter_eval_batches(
        split,
        model.preprocess,
        batch_size=batch,
        num_classes=len(columns),
        rank=rank,
        world_size=world,
        workers=workers,
        skip_bad=skip_bad,
    )
    is_read = torch.zeros(len(split), dtype=torch.bool)
    start = time.perf_counter()
    batches = relabel_batches(_track_progress(batches, report_progress, is_read), columns, num_outputs)
    predictions = predict_batches(
        network,
        batches,
        model.preprocess,
        temperature=model.temperature,
        num_classes=num_outputs,
        multi_label=model.multi_label,
    )
    model.network.cpu()  # the next model may need the memory
    predictions = _gather_predictions(predictions, gather_rows, num_outputs if split.multi_label else 0)
    seconds = time.perf_counter() - start
    share = slice(len(split) * rank // world, len(split) * (rank + 1) // world)
    unreadable = (~gather_rows(is_read[share])).nonzero()[:, 0].tolist()
    if len(unreadable) == len(split):
        raise DataError(f"none of {pluralize(len(split), 'image')} can be read, such as {split.get_image_name(0)}")
    counts = count_predictions(predictions, num_outputs)
    return SplitEvaluation(counts, predictions, len(predictions.images) / seconds, unreadable)


def _gather_predictions(
    predictions: Predictions, gather_rows: Callable[[Tensor], Tensor], label_columns: int
) -> Predictions:
    """The predictions of all ranks; a rank without images gets label columns as wide as the others'."""
    if label_columns and not len(predictions.images):
        no_rows = torch.zeros(0, label_columns)
        predictions = predictions._replace(label_probabilities=no_rows, label_targets=no_rows.bool())
    return Predictions(*(gather_rows(column) for column in predictions if column.shape[1:] != (0,)))


def _track_progress(
    batches: Iterable[Batch], report_progress: Callable[[int], None], is_read: Tensor
) -> Iterator[Batch]:
    """The batches; reports how many images have passed, and marks them in `is_read`."""
    images = 0
    for batch in batches:
        yield batch
        is_read[batch.positions] = True
        images += len(batch.positions)
        report_progress(images)
