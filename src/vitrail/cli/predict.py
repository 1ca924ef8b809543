"""`vitrail predict MODEL PATHS...`: what images show, a row for each, in their order."""

import contextlib
import dataclasses
import itertools
import math
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from vitrail import remote
from vitrail.cli import rows, runs, show
from vitrail.cli.rows import Form, Place, Row
from vitrail.config import Precision
from vitrail.errors import DataError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.data.paths import Found
    from vitrail.predict import Classifier, ExportedClassifier
    from vitrail.train.distributed import Group
    from vitrail.train.signals import Requests

    AnyClassifier = Classifier | ExportedClassifier

_NAMED = 5  # labels whose images are counted at the end
_SMALL, _LARGE = 224, 1024  # pixels: a picture with a shorter side is enlarged, one with a longer side reduced


def main(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATHS")],
    top: Annotated[int, tyro.conf.arg(metavar="N")] = 1,
    embed: bool = False,
    attention: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None,
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    form: Annotated[Literal["table", "csv", "jsonl"] | None, tyro.conf.arg(name="format")] = None,
    batch: Annotated[int, tyro.conf.arg(metavar="N")] = 64,
    device: str | None = None,
    precision: Precision | None = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    fetch_urls: bool = False,
    json: bool = False,
) -> None:
    """Label images. One that cannot be read is named in its row, the others go on, and the exit code is then 3.

    With --out a command that was stopped goes on where it was when it is given again.

    Args:
        model: A file or folder of any known format, hf:ORG/NAME, timm:NAME, a preset, or an exported .onnx or .xml.
        paths: Images, folders of images or of shards, globs, tar shards (x-{000..127}.tar), lists (.csv, .jsonl), or -
            for a list of paths on standard input, one a line.
        top: Labels for each image.
        embed: Features in place of labels.
        attention: A folder for pictures of where the model looked, one for each image (attention rollout).
        out: A file for the rows; .csv, .jsonl, or with --embed .npy. Standard output unless told otherwise.
        form: Of the rows; unless told otherwise that of FILE's ending, a table on a terminal, and else CSV.
        batch: Images at once.
        device: cpu, cuda or mps; the best there is unless told otherwise.
        precision: In which to compute; unless told otherwise float32, or on a CPU what the model's file says is faster
            there and answers alike. Features are float32 unless told otherwise.
        workers: Threads that read images; one for each core unless told otherwise.
        fetch_urls: Read URLs on standard input too; otherwise only those given as PATHS.
        json: An object for each image, one a line: --format jsonl.
    """
    if top < 1 or batch < 1:
        raise UsageError(f"--top is {top} and --batch {batch}; both must be at least 1")
    if not paths:
        raise UsageError("say which images: files, folders, globs, shards, or - for a list on standard input")
    for name, path in (("--out", out), ("--attention", attention)):
        if path is not None and remote.is_remote(path):
            raise UsageError(f"{name} {path} must be here, not elsewhere")
    if json and form not in (None, "jsonl"):
        raise UsageError(f"--json is --format jsonl, and --format {form} was given too: leave one away")
    file, folder = (None if name is None else Path(name) for name in (out, attention))
    chosen = _form(file, "jsonl" if json else form, embed=embed)
    with runs.process(device) as (group, there), contextlib.ExitStack() as stack:
        from vitrail import compute
        from vitrail.data.workers import available
        from vitrail.export.read import is_exported
        from vitrail.predict import Classifier
        from vitrail.weights.load import load

        compute.keep_memory()
        forced = precision or ("float32" if embed else None)
        classifier: AnyClassifier
        if is_exported(model):
            classifier = _open_exported(model, batch, embed=embed, attention=folder, precision=precision)
        else:
            classifier = Classifier(load(model), device=there, batch_size=batch, precision=forced)
            if group.leads and classifier.precision != "float32":
                why = "as told" if precision else "which the model's file says is faster here and answers alike"
                show.note(f"computing in {classifier.precision}, {why}")
        threads = max(1, available() if workers is None else workers)
        wanted = Wanted(paths, top, embed, folder, file, chosen, threads, fetch_urls)
        if isinstance(classifier, Classifier):
            _check_able(classifier, wanted)
        if embed:
            stack.enter_context(_exact())
        done = _predicted(classifier, wanted, group)
    if group.leads and done.failed:
        raise DataError(f"{done.failed:,} of {show.plural(done.images, 'image')} cannot be read; their rows say why")


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is to be computed of which images, and where it goes."""

    paths: tuple[str, ...]
    top: int
    embed: bool
    attention: Path | None
    out: Path | None
    form: Form
    threads: int
    fetch_urls: bool


class Item(NamedTuple):
    """An image, and the file for the picture of where the model looked, if there is to be one."""

    image: "Found"
    picture: Path | None

    @property
    def name(self) -> str:
        """What its row is called."""
        return self.image.name


def _open_exported(
    model: str, batch: int, *, embed: bool, attention: Path | None, precision: Precision | None
) -> "ExportedClassifier":
    """An exported file in its runtime, which gives labels alone."""
    from vitrail.export import read
    from vitrail.predict import ExportedClassifier

    for option, value in (("--embed", embed), ("--attention", attention), ("--precision", precision)):
        if value:
            raise UsageError(f"{option} is of models, and {model} is an exported file: give the model it was made of")
    exported = read.read(Path(model))
    if not exported.labels:
        raise UsageError(f"{model} gives features and no labels, or its labels have no names: give the model itself")
    show.note(f"{model} is run on the CPU by {'ONNX Runtime' if model.endswith('.onnx') else 'OpenVINO'}")
    return ExportedClassifier(exported, batch_size=batch)


def _form(out: Path | None, given: Literal["table", "csv", "jsonl"] | None, *, embed: bool) -> Form:
    """The format of the rows, if it can hold them."""
    ending = None if out is None else rows.SUFFIXES.get(out.suffix.lower())
    if out is not None and given is None and ending is None:
        raise UsageError(f"--out {out} has no known ending: .csv, .jsonl, or with --embed .npy; or give --format")
    form: Form = "npy" if ending == "npy" else given or ending or _printed(embed=embed)
    if form == "npy" and (given is not None or not embed):
        raise UsageError(f"--out {out} is a matrix of features: it takes --embed and no --format")
    if form == "table" and out is not None:
        raise UsageError(f"--out {out}: a table is for a terminal; files are CSV or JSON lines")
    if embed and form in ("csv", "table"):
        raise UsageError(f"--embed gives hundreds of numbers an image, too many for {form}: jsonl, or --out FILE.npy")
    return form


def _printed(*, embed: bool) -> Form:
    """What is printed where nothing else was asked for."""
    return "jsonl" if embed else "table" if sys.stdout.isatty() else "csv"


def _check_able(classifier: "Classifier", wanted: Wanted) -> None:
    """Refuse what the model does not have before anything is computed or written."""
    from vitrail.model.vit import ViT

    if not wanted.embed and not classifier.labels:
        raise UsageError("the model has no head, so it gives features and no labels: --embed")
    if wanted.attention is not None and not isinstance(classifier.model, ViT):
        kind = type(classifier.model).__name__
        raise UsageError(f"--attention is of ViTs and hybrids; a {kind} ResNet has no attention")


@contextlib.contextmanager
def _exact() -> Iterator[None]:
    """Features are float32 as a probe's are: TF32, which cuDNN would round convolutions to, has three digits."""
    import torch

    repeatable = torch.backends.cudnn.deterministic
    with torch.backends.cudnn.flags(enabled=True, deterministic=repeatable, allow_tf32=False):
        yield


# --- from names to rows ----------------------------------------------------------------------------------------------


def _predicted(classifier: "AnyClassifier", wanted: Wanted, group: "Group") -> Place:
    """How many images there were and how many failed, after all rows are written."""
    from vitrail.data import workers
    from vitrail.data.paths import countable, describe_skipped, found
    from vitrail.train import distributed, signals

    skipped = Counter[str]()
    items: Iterator[Item] = _items(wanted, skipped) if group.leads else iter(())
    total = sum(1 for _ in found(wanted.paths)) if group.leads and countable(wanted.paths) else 0
    done, again = distributed.led(lambda: _begun(classifier, wanted, items))
    items = itertools.chain(again, items)
    if done.images:
        them = "it" if done.images == 1 else "them"
        show.note(f"{wanted.out} has {show.plural(done.images, 'image')}; going on after {them}")
    with contextlib.ExitStack() as stack:
        asked = None if wanted.out is None else stack.enter_context(signals.requests())
        write = stack.enter_context(_writing(classifier, wanted, done)) if group.leads else None
        seen = wanted.out is None and sys.stdout.isatty()  # the rows themselves, which a bar would run into
        report = workers.silent if seen else stack.enter_context(show.progress("predicting"))
        first, labels = done.images, Counter[str]()
        for some, stop in _rounds(classifier, wanted, group, items, asked):
            done = Place(done.images + len(some), done.failed + sum(bool(row.error) for row in some))
            if write is not None:
                write(some)
            labels.update(row.labels[0][0] for row in some if row.labels)
            report(done.images, total)
            if stop:
                _stop(stop, done, wanted)
    if group.leads:
        show.note(_summarize(done, done.images - first, labels, wanted) + describe_skipped(skipped))
    return done


def _summarize(done: Place, new: int, labels: "Counter[str]", wanted: Wanted) -> str:
    """How many images there were, what they were found to show, and where the rows are."""
    failed = f", {done.failed:,} of which cannot be read" if done.failed else ""
    parts = [f"{show.plural(done.images, 'image')}{failed}"]
    if new < done.images:
        parts.append(f"{new:,} of them in this run")
    if labels:
        others = f", and {show.plural(len(labels) - _NAMED, 'other label')}" if len(labels) > _NAMED else ""
        parts.append(
            ", ".join(f"{show.printable(name)} {count:,}" for name, count in labels.most_common(_NAMED)) + others
        )
    return "; ".join([*parts, *([] if wanted.out is None else [str(wanted.out)])])


def _items(wanted: Wanted, skipped: "Counter[str]") -> Iterator[Item]:
    """The images in their order. Names of pictures are remembered, since no two may be the same."""
    from vitrail.data.paths import found

    if wanted.attention is None:
        images = found(wanted.paths, fetch_urls=wanted.fetch_urls, skipped=skipped)
        yield from (Item(image, None) for image in images)
        return
    from vitrail.figures.looks import file_name

    taken: set[str] = set()
    for image in found(wanted.paths, fetch_urls=wanted.fetch_urls, skipped=skipped):
        taken.add(name := file_name(image.name, taken))
        yield Item(image, wanted.attention / f"{name}.png")


def _begun(classifier: "AnyClassifier", wanted: Wanted, items: Iterator[Item]) -> tuple[Place, list[Item]]:
    """How far an earlier command came, and those of the items taken that are to be done again."""
    from vitrail import __version__

    if wanted.attention is not None and (wanted.out is None or not wanted.out.exists()):
        _check_empty(wanted.attention)
    if wanted.out is None:
        return Place(), []
    identity: dict[str, Any] = {
        "vitrail": __version__,
        **_identify(classifier),
        "format": wanted.form,
        "--top": wanted.top,
        "--embed": wanted.embed,
        "--batch": classifier.batch_size,
        "--attention": None if wanted.attention is None else str(wanted.attention),
    }
    ranks = min(wanted.top, len(classifier.labels))
    return rows.begun(wanted.out, wanted.form, identity, items, batch=classifier.batch_size, ranks=ranks)


def _identify(classifier: "AnyClassifier") -> dict[str, Any]:
    """What tells one model from another in a file of rows."""
    from vitrail.config import to_json
    from vitrail.files import sha256
    from vitrail.predict import ExportedClassifier
    from vitrail.train.state import digest

    if isinstance(classifier, ExportedClassifier):
        path = classifier.path
        weights = path.with_suffix(".bin" if path.suffix == ".xml" else ".onnx.data")  # OpenVINO's, and large ones
        return {"model": " ".join(sha256(file) for file in (path, weights) if file.is_file())}
    return {
        "model": {
            "weights": digest(classifier.model.state_dict()),
            "config": to_json(classifier.model.config),
            "preprocess": to_json(classifier.preprocess),
            "labels": classifier.labels,
            "temperature": classifier.temperature,
            "threshold": classifier.threshold,
            "several": classifier.several,
        },
        "features": classifier.model.config.features,
        "--precision": classifier.precision,
    }


def _check_empty(folder: Path) -> None:
    """Refuse a folder in which pictures could take the place of somebody's images."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--attention {folder} must be a folder that is new or empty")


def _writing(
    classifier: "AnyClassifier", wanted: Wanted, place: Place
) -> contextlib.AbstractContextManager[Callable[[Sequence[Row]], None]]:
    from vitrail.predict import ExportedClassifier

    pictures = wanted.attention is not None
    if wanted.out is None:
        return rows.to_stdout(wanted.form, classifier.labels, attention=pictures)
    features = 0 if isinstance(classifier, ExportedClassifier) else classifier.model.config.features
    return rows.to_files(wanted.out, wanted.form, place, features=features, attention=pictures)


def _rounds(
    classifier: "AnyClassifier", wanted: Wanted, group: "Group", items: Iterator[Item], asked: "Requests | None"
) -> Iterator[tuple[list[Row], signal.Signals | None]]:
    """Rows of a batch for each process, in the images' order, and the signal by which one of them was asked to stop.

    Threads read the next batch while one is computed. The first process lists the images and tells the others, in
    rounds, so that none of them holds all the names.
    """
    from vitrail.data import workers
    from vitrail.train import distributed

    exchange: Callable[[Any], list[Any]] = distributed.exchange() if group.world > 1 else lambda mine: [mine]
    size = classifier.batch_size

    def mine() -> Iterator[list[Item]]:
        while some := distributed.led(lambda: list(itertools.islice(items, size * group.world))):
            yield some[group.rank * size : (group.rank + 1) * size]

    def view(item: Item) -> "Tensor | DataError":
        try:
            return classifier.view(item.image.read(), name=item.name)
        except DataError as error:
            return error

    for seen in workers.ahead(view, mine(), wanted.threads):
        told = exchange((_rows(classifier, wanted, seen), None if asked is None else asked.signal))
        stop = next((each for _, each in told if each is not None), None)
        yield [row for some, _ in told for row in some], stop


def _rows(classifier: "AnyClassifier", wanted: Wanted, seen: "Sequence[tuple[Item, Tensor | DataError]]") -> list[Row]:
    """The rows of a batch, and its pictures drawn."""
    from vitrail.predict import Classifier

    readable = [(item, view) for item, view in seen if not isinstance(view, DataError)]
    views = [view for _, view in readable]
    said: Iterator[dict[str, Any]] = iter(())
    if views and wanted.embed:
        assert isinstance(classifier, Classifier), "an exported file is refused"
        said = iter({"features": values} for values in classifier.features(views).numpy())
    elif views:
        said = iter({"labels": answer} for answer in classifier.answers(views, wanted.top))
    if views and wanted.attention is not None:
        assert isinstance(classifier, Classifier), "an exported file is refused"
        _draw(classifier, [item for item, _ in readable], views, wanted)
    return [
        Row(item.name, error=str(view), attention=None if item.picture is None else "")
        if isinstance(view, DataError)
        else Row(item.name, attention=None if item.picture is None else str(item.picture), **next(said))
        for item, view in seen
    ]


def _draw(classifier: "Classifier", items: Sequence[Item], views: "Sequence[Tensor]", wanted: Wanted) -> None:
    """Write where the model looked: each image, decoded once more, in grey under its attention rollout in colour."""
    import torch

    from vitrail.data import workers
    from vitrail.data.transforms import normalise
    from vitrail.figures import attention

    rollouts = attention.rollout(classifier.model, normalise(torch.stack(list(views)), classifier.preprocess))
    each = [(item.image, item.picture, rollout) for item, rollout in zip(items, rollouts, strict=True) if item.picture]
    for _ in workers.ahead(lambda parts: _overlay(classifier, *parts), [each], wanted.threads):
        pass


def _overlay(classifier: "Classifier", image: "Found", path: Path, rollout: Any) -> None:
    from PIL import Image

    from vitrail import files
    from vitrail.data.decode import decode
    from vitrail.figures import boxes, pictures

    whole = decode(image.read(), classifier.model.config.channels, name=image.name)
    height, width = whole.shape[1:]
    factor = min(math.ceil(max(1, _SMALL / min(height, width))), _LARGE / max(height, width))
    within = boxes.seen(height, width, classifier.preprocess).scaled(factor)
    drawn = pictures.overlaid(pictures.scaled(whole, factor), rollout, within)
    with files.replacing(path, overwrite=True) as fresh:
        Image.fromarray(drawn).save(fresh, "PNG")


def _stop(asked: signal.Signals, done: Place, wanted: Wanted) -> None:
    """End where the rows are whole: by Ctrl-C as interrupted, by other signals as stopped."""
    from vitrail.train.signals import StoppedError

    message = (
        f"stopped by {asked.name} after {show.plural(done.images, 'image')}; the same command goes on with {wanted.out}"
    )
    if asked == signal.SIGINT:
        show.note(message)
        raise KeyboardInterrupt
    raise StoppedError(message, asked)
