"""What can be measured: any MODEL, and timm's own networks beside it.

n images   L outputs
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import Preprocess
from vitrail.data import loader
from vitrail.data.dataset import Split
from vitrail.data.loader import Batch
from vitrail.errors import DataError, UsageError
from vitrail.evaluate import classify
from vitrail.evaluate.classify import Answers, Counts, asked
from vitrail.evaluate.measure import Seen, relabelled
from vitrail.plurals import plural
from vitrail.weights import timm as timm_files
from vitrail.weights.load import load
from vitrail.weights.trained import Trained

TIMM = "timm-model:"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A network and what is needed to measure it."""

    name: str
    network: nn.Module
    outputs: int
    preprocess: Preprocess
    labels: tuple[str, ...] | None
    temperature: float = 1.0
    several: bool = False
    """Whether each class has a probability of its own."""
    origin: str = ""
    """What its file says of how it was trained."""


def subject(name: str) -> Subject:
    """The model of a MODEL, or for timm-model:NAME timm's own network, which need not be one that vitrail has."""
    return _timm_network(name) if name.startswith(TIMM) else measurable(load(name), name)


def measurable(trained: Trained, name: str) -> Subject:
    """A model as a subject, if it has a head and knows how its images are prepared."""
    outputs = trained.model.config.classes
    if not outputs:
        raise UsageError(f"{name} has no head, so it gives no answers: `vitrail probe` measures its features")
    if trained.preprocess is None:
        raise UsageError(
            f"{name} does not say how images must be prepared. Name it once:"
            " vitrail convert MODEL OUT.safetensors --preprocess imagenet (or inception, torchvision)"
        )
    return Subject(
        name,
        trained.model,
        outputs,
        trained.preprocess,
        trained.labels,
        trained.temperature,
        trained.several,
        "; ".join((trained.origin.name, *trained.origin.changes)),
    )


def _timm_network(name: str) -> Subject:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # a torchvision that does not fit torch raises the latter
        raise UsageError(
            f"{name} is timm's own network, and timm cannot be imported: {error}. pip install timm"
        ) from None
    try:
        network = timm.create_model(name.removeprefix(TIMM), pretrained=True).eval()
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise UsageError(f"timm cannot make {name}: {' '.join(str(error).split())[:200]}") from None
    stated: dict[str, Any] = dict(network.pretrained_cfg)
    preprocess, unclear = timm_files.preprocessing(stated)
    if preprocess is None:
        raise UsageError(f"timm says of {name} how images are prepared in a way vitrail has not: {'; '.join(unclear)}")
    outputs = int(network.num_classes)
    return Subject(name, network, outputs, preprocess, timm_files.labels_of({}, stated, outputs))


@dataclasses.dataclass(frozen=True)
class Examined:
    """What a subject said of the images of a split."""

    counts: Counts
    answers: Answers
    images_per_second: float
    """Of reading, preparing and computing, on all ranks."""
    unreadable: Sequence[int] = ()
    """The split's images that were left out."""


def examined(
    subject: Subject,
    split: Split,
    outputs: Sequence[int],
    *,
    device: torch.device,
    batch: int,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    mirrored: bool = False,
    among: Sequence[int] | None = None,
    skip_bad: bool = False,
    gathered: Callable[[Tensor], Tensor] = lambda rows: rows,
    seen: Callable[[int], None] = lambda _: None,
) -> Examined:
    """Ask the subject about every image; `outputs` says which of its outputs each class of the data is.

    `among` are the only outputs it may answer with. With `skip_bad` images that cannot be read are left out. Ranks ask
    about a share each, and `gathered` puts rows together.
    """
    network = Seen(subject.network.to(device), mirrored=mirrored, outputs=among)
    total = subject.outputs if among is None else len(among)
    places = list(outputs) if among is None else [list(among).index(place) for place in outputs]
    batches = loader.evaluation_batches(
        split,
        subject.preprocess,
        batch=batch,
        classes=len(places),
        rank=rank,
        world=world,
        workers=workers,
        skip_bad=skip_bad,
    )
    read = torch.zeros(len(split), dtype=torch.bool)
    begun = time.perf_counter()
    batches = relabelled(_told(batches, seen, read), places, total)
    mine = asked(
        network,
        batches,
        subject.preprocess,
        temperature=subject.temperature,
        classes=total,
        several=subject.several,
    )
    subject.network.cpu()  # the next may need the room
    if split.several and not len(mine.images):  # as wide as the other ranks' columns
        mine = mine._replace(scores=torch.zeros(0, total), truths=torch.zeros(0, total, dtype=torch.bool))
    said = Answers(*(gathered(column) for column in mine if column.shape[1:] != (0,)))
    seconds = time.perf_counter() - begun
    share = slice(len(split) * rank // world, len(split) * (rank + 1) // world)
    unreadable = (~gathered(read[share])).nonzero()[:, 0].tolist()
    if len(unreadable) == len(split):
        raise DataError(f"none of {plural(len(split), 'image')} can be read, such as {split.name(0)}")
    return Examined(classify.total(said, total), said, len(said.images) / seconds, unreadable)


def _told(batches: Iterable[Batch], seen: Callable[[int], None], read: Tensor) -> Iterator[Batch]:
    """The batches; `seen` is told how many images there were, and `read` is marked with which."""
    images = 0
    for batch in batches:
        yield batch
        read[batch.positions] = True
        images += len(batch.positions)
        seen(images)
