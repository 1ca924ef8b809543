"""What can be measured: any MODEL, and timm's own networks beside it.

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
from vitrail.evaluate import predictions as classify
from vitrail.evaluate.metrics import EvalWrapper, relabel_batches
from vitrail.evaluate.predictions import Counts, Predictions, predict_batches
from vitrail.plurals import pluralize
from vitrail.weights import timm as timm_files
from vitrail.weights.load import load
from vitrail.weights.trained import Trained, require_preprocess

TIMM_PREFIX = "timm-model:"


@dataclasses.dataclass(frozen=True)
class EvaluatedModel:
    """A network and what is needed to measure it."""

    name: str
    network: nn.Module
    num_outputs: int
    preprocess: PreprocessConfig
    labels: tuple[str, ...] | None
    temperature: float = 1.0
    multi_label: bool = False
    """Whether each class has a probability of its own."""
    origin: str = ""
    """What its file says of how it was trained."""


def load_evaluated_model(name: str) -> EvaluatedModel:
    """The model of a MODEL, or for timm-model:NAME timm's own network, which need not be one that vitrail has."""
    return _load_timm_network(name) if name.startswith(TIMM_PREFIX) else make_evaluated_model(load(name), name)


def make_evaluated_model(trained: Trained, name: str) -> EvaluatedModel:
    """A model as a subject, if it has a head and knows how its images are prepared."""
    outputs = trained.model.config.classes
    if not outputs:
        raise UsageError(f"{name} has no head, so it gives no answers: `vitrail probe` measures its features")
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
        raise UsageError(f"timm cannot make {name}: {' '.join(str(error).split())[:200]}") from None
    stated: dict[str, Any] = dict(network.pretrained_cfg)
    preprocess, unclear = timm_files.parse_preprocess_config(stated)
    if preprocess is None:
        raise UsageError(f"timm says of {name} how images are prepared in a way vitrail has not: {'; '.join(unclear)}")
    outputs = int(network.num_classes)
    return EvaluatedModel(name, network, outputs, preprocess, timm_files.parse_labels({}, stated, outputs))


@dataclasses.dataclass(frozen=True)
class SplitEvaluation:
    """What a subject said of the images of a split."""

    counts: Counts
    predictions: Predictions
    images_per_second: float
    """Of reading, preparing and computing, on all ranks."""
    unreadable: Sequence[int] = ()
    """The split's images that were left out."""


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
    """Ask the subject about every image; `outputs` says which of its outputs each class of the data is.

    `among` are the only outputs it may answer with. With `skip_bad` images that cannot be read are left out. Ranks ask
    about a share each, and `gathered` puts rows together.
    """
    network = EvalWrapper(model.network.to(device), flip_tta=flip_tta, outputs=allowed_outputs)
    total = model.num_outputs if allowed_outputs is None else len(allowed_outputs)
    places = list(outputs) if allowed_outputs is None else [list(allowed_outputs).index(place) for place in outputs]
    batches = loader.iter_eval_batches(
        split,
        model.preprocess,
        batch_size=batch,
        num_classes=len(places),
        rank=rank,
        world_size=world,
        workers=workers,
        skip_bad=skip_bad,
    )
    read = torch.zeros(len(split), dtype=torch.bool)
    begun = time.perf_counter()
    batches = relabel_batches(_track_progress(batches, report_progress, read), places, total)
    mine = predict_batches(
        network,
        batches,
        model.preprocess,
        temperature=model.temperature,
        num_classes=total,
        multi_label=model.multi_label,
    )
    model.network.cpu()  # the next may need the room
    if split.multi_label and not len(mine.images):  # as wide as the other ranks' columns
        mine = mine._replace(
            label_probabilities=torch.zeros(0, total), label_targets=torch.zeros(0, total, dtype=torch.bool)
        )
    said = Predictions(*(gather_rows(column) for column in mine if column.shape[1:] != (0,)))
    seconds = time.perf_counter() - begun
    share = slice(len(split) * rank // world, len(split) * (rank + 1) // world)
    unreadable = (~gather_rows(read[share])).nonzero()[:, 0].tolist()
    if len(unreadable) == len(split):
        raise DataError(f"none of {pluralize(len(split), 'image')} can be read, such as {split.get_image_name(0)}")
    return SplitEvaluation(classify.count_predictions(said, total), said, len(said.images) / seconds, unreadable)


def _track_progress(batches: Iterable[Batch], report_progress: Callable[[int], None], read: Tensor) -> Iterator[Batch]:
    """The batches; `seen` is told how many images there were, and `read` is marked with which."""
    images = 0
    for batch in batches:
        yield batch
        read[batch.positions] = True
        images += len(batch.positions)
        report_progress(images)
