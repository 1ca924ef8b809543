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
from vitrail.cli import output, prediction_rows, runs
from vitrail.cli.prediction_rows import PredictionRow, RowFormat, WrittenRows
from vitrail.config import Precision
from vitrail.errors import DataError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.data.image_paths import ImageRef
    from vitrail.inference.classifier import Classifier, ExportedClassifier
    from vitrail.runtime.distributed import ProcessGroup
    from vitrail.runtime.signals import StopRequest

    AnyClassifier = Classifier | ExportedClassifier

_MAX_COUNTED_LABELS = 5  # labels whose images are counted at the end
_MIN_SIDE, _MAX_SIDE = 224, 1024  # pixels: a picture with a shorter side is enlarged, one with a longer side reduced


def main(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATHS")],
    top: Annotated[int, tyro.conf.arg(metavar="N")] = 1,
    embed: bool = False,
    attention: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None,
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    row_format: Annotated[Literal["table", "csv", "jsonl"] | None, tyro.conf.arg(name="format")] = None,
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
    if json and row_format not in (None, "jsonl"):
        raise UsageError(f"--json is --format jsonl, and --format {row_format} was given too: leave one away")
    file, folder = (None if name is None else Path(name) for name in (out, attention))
    chosen = _choose_format(file, "jsonl" if json else row_format, embed=embed)
    with runs.join_processes(device) as (group, there), contextlib.ExitStack() as stack:
        from vitrail.export.exported_model import is_exported
        from vitrail.inference import compute
        from vitrail.inference.classifier import Classifier
        from vitrail.runtime.workers import count_available_cores
        from vitrail.weights.load import load

        compute.keep_freed_memory()
        forced = precision or ("float32" if embed else None)
        classifier: AnyClassifier
        if is_exported(model):
            classifier = _open_exported(model, batch, embed=embed, attention=folder, precision=precision)
        else:
            classifier = Classifier(load(model), device=there, batch_size=batch, precision=forced)
            if group.is_rank0 and classifier.precision != "float32":
                why = "as told" if precision else "which the model's file says is faster here and answers alike"
                output.print_note(f"computing in {classifier.precision}, {why}")
        threads = max(1, count_available_cores() if workers is None else workers)
        wanted = PredictOptions(paths, top, embed, folder, file, chosen, threads, fetch_urls)
        if isinstance(classifier, Classifier):
            _check_supported(classifier, wanted)
        if embed:
            stack.enter_context(_disable_tf32())
        done = _predict_all(classifier, wanted, group)
    if group.is_rank0 and done.failed:
        raise DataError(
            f"{done.failed:,} of {output.pluralize(done.images, 'image')} cannot be read; their rows say why"
        )


@dataclasses.dataclass(frozen=True)
class PredictOptions:
    """What is to be computed of which images, and where it goes."""

    paths: tuple[str, ...]
    top: int
    embed: bool
    attention: Path | None
    out: Path | None
    row_format: RowFormat
    threads: int
    fetch_urls: bool


class PredictItem(NamedTuple):
    """An image, and the file for the picture of where the model looked, if there is to be one."""

    image: "ImageRef"
    picture: Path | None

    @property
    def name(self) -> str:
        """What its row is called."""
        return self.image.name


def _open_exported(
    model: str, batch: int, *, embed: bool, attention: Path | None, precision: Precision | None
) -> "ExportedClassifier":
    """An exported file in its runtime, which gives labels alone."""
    from vitrail.export import exported_model
    from vitrail.inference.classifier import ExportedClassifier

    for option, value in (("--embed", embed), ("--attention", attention), ("--precision", precision)):
        if value:
            raise UsageError(f"{option} is of models, and {model} is an exported file: give the model it was made of")
    exported = exported_model.open_exported_model(Path(model))
    if not exported.labels:
        raise UsageError(f"{model} gives features and no labels, or its labels have no names: give the model itself")
    output.print_note(f"{model} is run on the CPU by {'ONNX Runtime' if model.endswith('.onnx') else 'OpenVINO'}")
    return ExportedClassifier(exported, batch_size=batch)


def _choose_format(out: Path | None, requested: Literal["table", "csv", "jsonl"] | None, *, embed: bool) -> RowFormat:
    """The format of the rows, if it can hold them."""
    ending = None if out is None else prediction_rows.FORMAT_BY_SUFFIX.get(out.suffix.lower())
    if out is not None and requested is None and ending is None:
        raise UsageError(f"--out {out} has no known ending: .csv, .jsonl, or with --embed .npy; or give --format")
    form: RowFormat = "npy" if ending == "npy" else requested or ending or _choose_stdout_format(embed=embed)
    if form == "npy" and (requested is not None or not embed):
        raise UsageError(f"--out {out} is a matrix of features: it takes --embed and no --format")
    if form == "table" and out is not None:
        raise UsageError(f"--out {out}: a table is for a terminal; files are CSV or JSON lines")
    if embed and form in ("csv", "table"):
        raise UsageError(f"--embed gives hundreds of numbers an image, too many for {form}: jsonl, or --out FILE.npy")
    return form


def _choose_stdout_format(*, embed: bool) -> RowFormat:
    """What is printed where nothing else was asked for."""
    return "jsonl" if embed else "table" if sys.stdout.isatty() else "csv"


def _check_supported(classifier: "Classifier", options: PredictOptions) -> None:
    """Refuse what the model does not have before anything is computed or written."""
    from vitrail.model.vit import ViT

    if not options.embed and not classifier.labels:
        raise UsageError("the model has no head, so it gives features and no labels: --embed")
    if options.attention is not None and not isinstance(classifier.model, ViT):
        kind = type(classifier.model).__name__
        raise UsageError(f"--attention is of ViTs and hybrids; a {kind} ResNet has no attention")


@contextlib.contextmanager
def _disable_tf32() -> Iterator[None]:
    """Features are float32 as a probe's are: TF32, which cuDNN would round convolutions to, has three digits."""
    import torch

    repeatable = torch.backends.cudnn.deterministic
    with torch.backends.cudnn.flags(enabled=True, deterministic=repeatable, allow_tf32=False):
        yield


# --- from names to rows ----------------------------------------------------------------------------------------------


def _predict_all(classifier: "AnyClassifier", options: PredictOptions, group: "ProcessGroup") -> WrittenRows:
    """How many images there were and how many failed, after all rows are written."""
    from vitrail.data.image_paths import can_count_images, describe_skipped, iter_image_refs
    from vitrail.runtime import distributed, signals, workers

    skipped = Counter[str]()
    items: Iterator[PredictItem] = _iterate_items(options, skipped) if group.is_rank0 else iter(())
    total = sum(1 for _ in iter_image_refs(options.paths)) if group.is_rank0 and can_count_images(options.paths) else 0
    done, again = distributed.run_on_rank0(lambda: _find_progress(classifier, options, items))
    items = itertools.chain(again, items)
    if done.images:
        them = "it" if done.images == 1 else "them"
        output.print_note(f"{options.out} has {output.pluralize(done.images, 'image')}; going on after {them}")
    with contextlib.ExitStack() as stack:
        asked = None if options.out is None else stack.enter_context(signals.catch_stop_signals())
        write = stack.enter_context(_open_writer(classifier, options, done)) if group.is_rank0 else None
        seen = options.out is None and sys.stdout.isatty()  # the rows themselves, which a bar would run into
        report = workers.ignore_progress if seen else stack.enter_context(output.show_progress("predicting"))
        first, labels = done.images, Counter[str]()
        for some, stop in _iterate_rounds(classifier, options, group, items, asked):
            done = WrittenRows(done.images + len(some), done.failed + sum(bool(row.error) for row in some))
            if write is not None:
                write(some)
            labels.update(row.labels[0][0] for row in some if row.labels)
            report(done.images, total)
            if stop:
                _raise_stopped(stop, done, options)
    if group.is_rank0:
        output.print_note(_summarize(done, done.images - first, labels, options) + describe_skipped(skipped))
    return done


def _summarize(done: WrittenRows, new: int, labels: "Counter[str]", options: PredictOptions) -> str:
    """How many images there were, what they were found to show, and where the rows are."""
    failed = f", {done.failed:,} of which cannot be read" if done.failed else ""
    parts = [f"{output.pluralize(done.images, 'image')}{failed}"]
    if new < done.images:
        parts.append(f"{new:,} of them in this run")
    if labels:
        others = (
            f", and {output.pluralize(len(labels) - _MAX_COUNTED_LABELS, 'other label')}"
            if len(labels) > _MAX_COUNTED_LABELS
            else ""
        )
        parts.append(
            ", ".join(
                f"{output.strip_control_characters(name)} {count:,}"
                for name, count in labels.most_common(_MAX_COUNTED_LABELS)
            )
            + others
        )
    return "; ".join([*parts, *([] if options.out is None else [str(options.out)])])


def _iterate_items(options: PredictOptions, skipped: "Counter[str]") -> Iterator[PredictItem]:
    """The images in their order. Names of pictures are remembered, since no two may be the same."""
    from vitrail.data.image_paths import iter_image_refs

    if options.attention is None:
        images = iter_image_refs(options.paths, fetch_urls=options.fetch_urls, skipped=skipped)
        yield from (PredictItem(image, None) for image in images)
        return
    from vitrail.figures.attention_images import make_file_name

    taken: set[str] = set()
    for image in iter_image_refs(options.paths, fetch_urls=options.fetch_urls, skipped=skipped):
        taken.add(name := make_file_name(image.name, taken))
        yield PredictItem(image, options.attention / f"{name}.png")


def _find_progress(
    classifier: "AnyClassifier", options: PredictOptions, items: Iterator[PredictItem]
) -> tuple[WrittenRows, list[PredictItem]]:
    """How far an earlier command came, and those of the items taken that are to be done again."""
    from vitrail import __version__

    if options.attention is not None and (options.out is None or not options.out.exists()):
        _check_empty(options.attention)
    if options.out is None:
        return WrittenRows(), []
    identity: dict[str, Any] = {
        "vitrail": __version__,
        **_identify_model(classifier),
        "format": options.row_format,
        "--top": options.top,
        "--embed": options.embed,
        "--batch": classifier.batch_size,
        "--attention": None if options.attention is None else str(options.attention),
    }
    ranks = min(options.top, len(classifier.labels))
    return prediction_rows.find_written_rows(
        options.out, options.row_format, identity, items, batch=classifier.batch_size, ranks=ranks
    )


def _identify_model(classifier: "AnyClassifier") -> dict[str, Any]:
    """What tells one model from another in a file of rows."""
    from vitrail.config import to_json
    from vitrail.files import compute_sha256
    from vitrail.inference.classifier import ExportedClassifier
    from vitrail.weights.tensor_digest import digest_tensors

    if isinstance(classifier, ExportedClassifier):
        path = classifier.path
        weights = path.with_suffix(".bin" if path.suffix == ".xml" else ".onnx.data")  # OpenVINO's, and large ones
        return {"model": " ".join(compute_sha256(file) for file in (path, weights) if file.is_file())}
    return {
        "model": {
            "weights": digest_tensors(classifier.model.state_dict()),
            "config": to_json(classifier.model.config),
            "preprocess": to_json(classifier.preprocess),
            "labels": classifier.labels,
            "temperature": classifier.temperature,
            "threshold": classifier.threshold,
            "several": classifier.multi_label,
        },
        "features": classifier.model.config.num_features,
        "--precision": classifier.precision,
    }


def _check_empty(folder: Path) -> None:
    """Refuse a folder in which pictures could take the place of somebody's images."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--attention {folder} must be a folder that is new or empty")


def _open_writer(
    classifier: "AnyClassifier", options: PredictOptions, place: WrittenRows
) -> contextlib.AbstractContextManager[Callable[[Sequence[PredictionRow]], None]]:
    from vitrail.inference.classifier import ExportedClassifier

    pictures = options.attention is not None
    if options.out is None:
        return prediction_rows.open_stdout_writer(options.row_format, classifier.labels, attention=pictures)
    features = 0 if isinstance(classifier, ExportedClassifier) else classifier.model.config.num_features
    return prediction_rows.open_file_writer(
        options.out, options.row_format, place, features=features, attention=pictures
    )


def _iterate_rounds(
    classifier: "AnyClassifier",
    options: PredictOptions,
    group: "ProcessGroup",
    items: Iterator[PredictItem],
    stop_request: "StopRequest | None",
) -> Iterator[tuple[list[PredictionRow], signal.Signals | None]]:
    """Rows of a batch for each process, in the images' order, and the signal by which one of them was asked to stop.

    Threads read the next batch while one is computed. The first process lists the images and tells the others, in
    rounds, so that none of them holds all the names.
    """
    from vitrail.runtime import distributed, workers

    exchange: Callable[[Any], list[Any]] = (
        distributed.make_all_gather() if group.world_size > 1 else lambda mine: [mine]
    )
    size = classifier.batch_size

    def iterate_own_items() -> Iterator[list[PredictItem]]:
        while some := distributed.run_on_rank0(lambda: list(itertools.islice(items, size * group.world_size))):
            yield some[group.rank * size : (group.rank + 1) * size]

    def make_input(item: PredictItem) -> "Tensor | DataError":
        try:
            return classifier.make_input(item.image.read(), name=item.name)
        except DataError as error:
            return error

    for seen in workers.prefetch_batches(make_input, iterate_own_items(), options.threads):
        told = exchange(
            (_predict_rows(classifier, options, seen), None if stop_request is None else stop_request.signal)
        )
        stop = next((each for _, each in told if each is not None), None)
        yield [row for some, _ in told for row in some], stop


def _predict_rows(
    classifier: "AnyClassifier", options: PredictOptions, seen: "Sequence[tuple[PredictItem, Tensor | DataError]]"
) -> list[PredictionRow]:
    """The rows of a batch, and its pictures drawn."""
    from vitrail.inference.classifier import Classifier

    readable = [(item, view) for item, view in seen if not isinstance(view, DataError)]
    views = [view for _, view in readable]
    said: Iterator[dict[str, Any]] = iter(())
    if views and options.embed:
        assert isinstance(classifier, Classifier), "an exported file is refused"
        said = iter({"features": values} for values in classifier.extract_features(views).numpy())
    elif views:
        said = iter({"labels": answer} for answer in classifier.predict(views, options.top))
    if views and options.attention is not None:
        assert isinstance(classifier, Classifier), "an exported file is refused"
        _draw_rollouts(classifier, [item for item, _ in readable], views, options)
    return [
        PredictionRow(item.name, error=str(view), attention=None if item.picture is None else "")
        if isinstance(view, DataError)
        else PredictionRow(item.name, attention=None if item.picture is None else str(item.picture), **next(said))
        for item, view in seen
    ]


def _draw_rollouts(
    classifier: "Classifier", items: Sequence[PredictItem], inputs: "Sequence[Tensor]", options: PredictOptions
) -> None:
    """Write where the model looked: each image, decoded once more, in grey under its attention rollout in colour."""
    import torch

    from vitrail.data.transforms import normalize
    from vitrail.figures import attention
    from vitrail.runtime import workers

    rollouts = attention.compute_rollout(classifier.model, normalize(torch.stack(list(inputs)), classifier.preprocess))
    each = [(item.image, item.picture, rollout) for item, rollout in zip(items, rollouts, strict=True) if item.picture]
    for _ in workers.prefetch_batches(lambda parts: _draw_overlay(classifier, *parts), [each], options.threads):
        pass


def _draw_overlay(classifier: "Classifier", image: "ImageRef", path: Path, rollout: Any) -> None:
    from PIL import Image

    from vitrail import files
    from vitrail.data.decode import decode
    from vitrail.figures import crops, image_grids

    whole = decode(image.read(), classifier.model.config.channels, name=image.name)
    height, width = whole.shape[1:]
    factor = min(math.ceil(max(1, _MIN_SIDE / min(height, width))), _MAX_SIDE / max(height, width))
    within = crops.compute_crop_box(height, width, classifier.preprocess).scale(factor)
    drawn = image_grids.overlay_attention(image_grids.resize_image(whole, factor), rollout, within)
    with files.write_atomically(path, overwrite=True) as fresh:
        Image.fromarray(drawn).save(fresh, "PNG")


def _raise_stopped(signal_received: signal.Signals, done: WrittenRows, options: PredictOptions) -> None:
    """End where the rows are whole: by Ctrl-C as interrupted, by other signals as stopped."""
    from vitrail.runtime.signals import StoppedError

    message = f"stopped by {signal_received.name} after {output.pluralize(done.images, 'image')}; the same command goes on with {options.out}"
    if signal_received == signal.SIGINT:
        output.print_note(message)
        raise KeyboardInterrupt
    raise StoppedError(message, signal_received)
