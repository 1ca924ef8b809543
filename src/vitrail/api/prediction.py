"""Label images and extract features from Python: `vitrail.predict`, `vitrail.embed` and `vitrail.dense`."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.api.images import Images, ListedImage, check_found, is_stdin, list_images
from vitrail.api.keyword_errors import name_keywords
from vitrail.api.models import AnyModel, load_trained
from vitrail.api.options import document_options
from vitrail.api.prediction_files import PredictOptions, make_row_file
from vitrail.api.prediction_list import MAX_SHOWN_IMAGES, Prediction, PredictionList
from vitrail.api.progress import NoteCollector, Progress, choose_progress, show_progress
from vitrail.config import Precision
from vitrail.config.features import FeatureKind, count_features, describe_features
from vitrail.config.model import expand_image_size
from vitrail.data.image_parts import select_part
from vitrail.data.image_paths import ImageRef, can_count_images, describe_skipped, iter_image_refs
from vitrail.errors import DataError, UsageError
from vitrail.export import export
from vitrail.inference.bulk_prediction import (
    AnyClassifier,
    BulkResult,
    BulkSettings,
    check_supported,
    choose_top,
    predict_images,
)
from vitrail.inference.classifier import Classifier, ExportedClassifier
from vitrail.inference.precision import is_worth_compiling
from vitrail.inference.prediction_rows import (
    PredictionItem,
    PredictionRow,
    RowTarget,
    WriteRows,
    WrittenRows,
)
from vitrail.inference.row_files import RowFile
from vitrail.runtime import cpu_threads, distributed, workers
from vitrail.runtime.distributed import ProcessGroup
from vitrail.runtime.workers import Notify, ShowProgress
from vitrail.visualization.attention_images import draw_rollouts, iterate_picture_paths
from vitrail.weights.adapt import adapt

__all__ = ["PredictKeywords", "dense", "embed", "predict"]

_CPU_BATCH, _GPU_BATCH = 64, 256  # images


class PredictKeywords(TypedDict, total=False):
    """What `predict`, `embed` and `dense` take by keyword."""

    batch: int | None
    """Images per batch; 64 by default, or 256 on a GPU."""
    device: str | None
    """cpu, cuda or mps; the best device available by default."""
    precision: Precision | None
    """Of the computation; float32 by default, or the faster one that the model's file records for this processor."""
    workers: int | None
    """Threads that read images, and for a GPU processes; one per core by default."""


@document_options(PredictOptions)
@name_keywords
def predict(
    model: AnyModel,
    images: Images,
    *,
    top: int | None = None,
    out: str | Path | None = None,
    progress: Progress = True,
    notify: Notify | None = None,
    **options: Unpack[PredictKeywords],
) -> PredictionList:
    """Label images: `vitrail predict` from Python, with its defaults. An unreadable image is named in its row.

        vitrail.predict("model.safetensors", "photos")[0].label

    Arguments:

    - `model`: A name, a path, a `Run` or a `Trained`, or an exported .onnx or .xml.
    - `images`: Files, folders, globs, shards or lists, which must exist; Pillow images, arrays, tensors or bytes of
      files; or a torch Dataset, whose labels are left out.
    - `top`: Labels per image; by default 1, or all above the thresholds of a multi-label model that has them.
    - `out`: Also write the rows to this .csv, .jsonl or .parquet file, as the command does.
    - `progress`: Whether a bar is shown, or a function that shows progress.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    listed, predict_options = list_images(images), PredictOptions(top=top, out=out, **options)
    notes = NoteCollector(notify)
    rows = collect_rows(model, listed, predict_options, notes, progress)
    first_images = _iterate_refs([image for image in listed if not is_stdin(image)], predict_options, Counter())
    predictions = tuple(Prediction(row.image, row.labels, row.error) for row in rows)
    return PredictionList(predictions, tuple(notes), tuple(itertools.islice(first_images, MAX_SHOWN_IMAGES)))


@document_options(PredictOptions)
@name_keywords
def embed(
    model: AnyModel,
    images: Images,
    *,
    features: FeatureKind = "default",
    normalize: bool = False,
    out: str | Path | None = None,
    float16: bool = False,
    progress: Progress = True,
    notify: Notify | None = None,
    **options: Unpack[PredictKeywords],
) -> NDArray[np.float32]:
    """The features of images, (n, D): by default what the model's head reads.

    An unreadable image is an error.

        features = vitrail.embed("model.safetensors", ["cat.jpg", "dog.jpg"])
        means = vitrail.embed("model.safetensors", "photos", features="mean", normalize=True)

    Arguments:

    - `model`: A name, a path, a `Run` or a `Trained`.
    - `images`: As in `predict`.
    - `features`: "class" is the class token, "mean" the mean of the patch tokens, "class-mean" both in one row, "map"
      attention pooling, each where the model has it; "default" is what its head reads.
    - `normalize`: Scale each image's features to length 1.
    - `out`: Also write the features to this .npy, .parquet or .jsonl file or folder/, as the command does.
    - `float16`: Store them so in `out`; the result is float32.
    - `progress`: Whether a bar is shown, or a function that shows progress.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    embed_options = PredictOptions(
        embed=True, features=features, normalize=normalize, out=out, float16=float16, **options
    )
    return _collect_features(model, list_images(images), embed_options, NoteCollector(notify), progress)


@document_options(PredictOptions)
@name_keywords
def dense(
    model: AnyModel,
    images: Images,
    *,
    image_size: int | tuple[int, ...] | None = None,
    progress: Progress = True,
    notify: Notify | None = None,
    **options: Unpack[PredictKeywords],
) -> NDArray[np.float32]:
    """The features of each patch of images, (n, rows, columns, D): the patch tokens after the model's last norm.

    Of a ResNet they are its last feature map. Images are resized and cropped as in `predict`; an unreadable one is an
    error.

        features = vitrail.dense("model.safetensors", ["cat.jpg", "dog.jpg"], image_size=64)
        count, rows, columns, width = features.shape

    Arguments:

    - `model`: A name, a path, a `Run` or a `Trained`.
    - `images`: As in `predict`.
    - `image_size`: Resolution, one side or height and width; positions are resampled. The model's by default.
    - `progress`: Whether a bar is shown, or a function that shows progress.
    - `notify`: Called with each note; by default they go to the logger `vitrail`.
    """
    trained = load_trained(model)
    if image_size is not None:
        trained = adapt(trained, image_size=expand_image_size(image_size))
    dense_options = PredictOptions(embed=True, features="dense", **options)
    return _collect_features(trained, list_images(images), dense_options, NoteCollector(notify), progress)


def _collect_features(
    model: AnyModel, images: Sequence[ListedImage], options: PredictOptions, notify: Notify, progress: Progress
) -> NDArray[np.float32]:
    rows = collect_rows(model, images, options, notify, progress)
    features = []
    for row in rows:
        if row.features is None:
            raise DataError(row.error)
        features.append(row.features)
    if not features:
        raise DataError("there are no images to embed")
    return np.stack(features)


class _CollectedRows(NamedTuple):
    """Rows in memory, and in a file where there is one."""

    rows: list[PredictionRow]
    file: RowFile | None
    name: str = "the result"
    can_continue: bool = False

    def find_written(self, items: Iterator[PredictionItem]) -> tuple[WrittenRows, list[PredictionItem]]:  # noqa: ARG002
        """Nothing is written before, and a file that has rows is refused; a new one gets its record."""
        if self.file is not None and self.file.path.exists():
            raise UsageError(f"{self.file.path} exists: give another `out`, or remove it")
        return (WrittenRows(), []) if self.file is None else self.file.find_written(iter(()))

    @contextlib.contextmanager
    def open_writer(self, written: WrittenRows) -> Iterator[WriteRows]:
        """Open a function that keeps rows, and writes them."""
        with contextlib.ExitStack() as stack:
            write = None if self.file is None else stack.enter_context(self.file.open_writer(written))

            def keep(rows: Sequence[PredictionRow]) -> None:
                self.rows.extend(rows)
                if write is not None:
                    write(rows)

            yield keep


def collect_rows(
    model: AnyModel, images: Sequence[ListedImage], options: PredictOptions, notify: Notify, progress: Progress
) -> list[PredictionRow]:
    check_found(images)
    rows = list[PredictionRow]()

    def make_target(classifier: AnyClassifier, listing: str) -> RowTarget:
        return _CollectedRows(rows, None if options.out is None else make_row_file(classifier, options, model, listing))

    run_prediction(model, images, options, make_target, notify=notify, progress=choose_progress(progress))
    return rows


# --- what the command shares -----------------------------------------------------------------------------------------


def run_prediction(
    model: AnyModel,
    images: Sequence[ListedImage],
    options: PredictOptions,
    make_target: Callable[[AnyClassifier, str], RowTarget],
    *,
    notify: Notify,
    progress: ShowProgress = show_progress,
) -> tuple[BulkResult, str]:
    """Predict images and write a row for each to the target; also return a note on photos that no decoder reads."""
    with distributed.join_process_group(options.device) as (group, device):
        cpu_threads.keep_freed_memory()
        skipped = Counter[str]()
        refs, count, listing = _select_images(images if group.is_rank0 else [], options, skipped)
        total = distributed.all_reduce_max(count, device)
        classifier = open_classifier(model, options, device, group, notify, total=total)
        if isinstance(classifier, Classifier):
            check_supported(classifier, embed=options.embed, attention=options.attention is not None)
        threads = max(1, workers.count_available_cores() if options.workers is None else options.workers)
        items = _iterate_items(refs, options)
        settings = BulkSettings(
            top=choose_top(classifier, options.top),
            embed=options.embed,
            threads=threads,
            processes=workers.count_loader_workers(options.workers),
            group=group,
            draw_pictures=None if options.attention is None else _make_drawer(classifier, threads),
            notify=notify,
        )
        with progress("predicting") as report:
            if options.attention is not None and (options.out is None or not Path(options.out).exists()):
                _check_empty(Path(options.attention))
            target = distributed.run_on_rank0(lambda: make_target(classifier, listing))
            result = predict_images(classifier, items, target, settings, total=total, progress=report)
        return result, describe_skipped(skipped)


def _select_images(
    images: Sequence[ListedImage], options: PredictOptions, skipped: "Counter[str]"
) -> tuple[Iterator[ImageRef], int, str]:
    """The images, their number where it is known, and for a part the digest of the list that was divided."""
    if options.part is None:
        return _iterate_refs(images, options, skipped), _count_images(images), ""
    names = [str(image) for image in images if isinstance(image, str | Path)]
    selected = select_part(names, options.part, fetch_urls=options.fetch_urls, skipped=skipped)
    return selected.images, selected.total, selected.listing


def _make_drawer(
    classifier: AnyClassifier, threads: int
) -> Callable[[Sequence[PredictionItem], Sequence[Tensor]], None]:
    def draw_pictures(batch: Sequence[PredictionItem], inputs: Sequence[Tensor]) -> None:
        assert isinstance(classifier, Classifier), "an exported file is refused"
        pictures = [(item.image, item.picture) for item in batch if item.picture is not None]
        draw_rollouts(classifier, pictures, inputs, threads)

    return draw_pictures


def _iterate_items(refs: Iterator[ImageRef], options: PredictOptions) -> Iterator[PredictionItem]:
    if options.attention is None:
        return (PredictionItem(image) for image in refs)
    return (PredictionItem(image, path) for image, path in iterate_picture_paths(refs, Path(options.attention)))


def _iterate_refs(
    images: Sequence[ListedImage], options: PredictOptions, skipped: "Counter[str]"
) -> Iterator[ImageRef]:
    for number, image in enumerate(images):
        if isinstance(image, str | Path):
            yield from iter_image_refs([str(image)], fetch_urls=options.fetch_urls, skipped=skipped)
        else:
            yield ImageRef(f"image {number}", "", content=image() if callable(image) else image)


def _count_images(images: Sequence[ListedImage]) -> int:
    """The number of images, for the progress; 0 where counting would read or download them."""
    paths = [str(image) for image in images if isinstance(image, str | Path)]
    in_memory = len(images) - len(paths)
    return in_memory + sum(1 for _ in iter_image_refs(paths)) if can_count_images(paths) else 0


def open_classifier(
    model: AnyModel,
    options: PredictOptions,
    device: torch.device,
    group: ProcessGroup,
    notify: Notify,
    *,
    total: int,
) -> AnyClassifier:
    if isinstance(model, str | Path) and export.is_exported(str(model)):
        return _open_exported(str(model), options, notify)
    precision = options.precision or ("float32" if options.embed else None)
    batch = options.batch or (_GPU_BATCH if device.type == "cuda" else _CPU_BATCH)
    trained = load_trained(model, notify)
    classifier = Classifier(
        trained,
        device=device,
        batch_size=batch,
        precision=precision,
        compile_batches=device.type == "cuda" and is_worth_compiling(trained.model.config, total),
        features=options.features,
        normalize=options.normalize,
    )
    if group.is_rank0 and options.embed:
        config = trained.model.config
        length = ", of length 1" if options.normalize else ""
        width, unit = count_features(config, options.features), "patch" if options.features == "dense" else "image"
        notify(f"features: {describe_features(config, options.features)}, {width:,} per {unit}{length}")
    if group.is_rank0 and classifier.precision != "float32":
        recorded = "which the model's file records as faster here with the same predictions"
        why = "as requested" if options.precision else recorded
        notify(f"computing in {classifier.precision}, {why}")
    return classifier


def _open_exported(model: str, options: PredictOptions, notify: Notify) -> ExportedClassifier:
    """Open an exported file in its runtime, which gives labels alone."""
    attention = None if options.attention is None else str(Path(options.attention))
    refused = {"--embed": options.embed, "--attention": attention, "--precision": options.precision}
    for option, value in refused.items():
        if value:
            raise UsageError(f"{option} is for models, and {model} is an exported file: give the model it was made of")
    exported = export.open_exported_model(Path(model))
    if not exported.labels:
        raise UsageError(f"{model} gives features and no labels, or its labels have no names: give the model itself")
    notify(f"{model} is run on the CPU by {'ONNX Runtime' if model.endswith('.onnx') else 'OpenVINO'}")
    return ExportedClassifier(exported, batch_size=options.batch or _CPU_BATCH)


def _check_empty(folder: Path) -> None:
    """Refuse a folder in which pictures could replace somebody's images."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--attention {folder} must be a folder that is new or empty")
