"""`vitrail figures MODEL [MODEL] [IMAGES...]`: what a model has learned and where it looks, as pictures and arrays."""

import dataclasses
import itertools
import json as codec
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import tyro

from vitrail import files, remote
from vitrail.cli import output
from vitrail.config import expand_image_size
from vitrail.errors import DataError, UsageError
from vitrail.plurals import pluralize

if TYPE_CHECKING:
    from vitrail.figures.attention_images import AttentionResults, FigureImage, InputBatch
    from vitrail.figures.crops import Box
    from vitrail.weights.trained import Trained

PAPER_IMAGES = 128  # images that the paper's attention distance is averaged over
RECORD_FILE = "figures.json"
_IMAGE_FOLDERS = ("rollout", "relevance", "tokens", "heads")

T = TypeVar("T")


def main(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL] [IMAGES...]")] = (),
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None,
    boxes: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    image_size: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="HEIGHT [WIDTH]")] = None,
    pictures: Annotated[int, tyro.conf.arg(metavar="N")] = 64,
    faithfulness: bool = False,
    device: str | None = None,
    json: bool = False,
) -> None:
    """Draw the paper's figures of a model, or of two side by side; each is a PNG and an .npz with its numbers.

    From the weights: embedding filters, position similarity. With images: attention distance and entropy by head, CKA
    between layers, also of two models, and of each image the rollout, the relevance to the predicted class, the last
    attention by head, and its tokens as colours. What a model does not have is said in a sentence. An image that cannot
    be read is named, the others go on, and the exit code is then 3.

    Args:
        model: A file or folder of any known format, hf:ORG/NAME, timm:NAME, or a preset.
        images: Images, folders of images, globs, - for a list of paths on standard input, or a dataset such as digits,
            of which the test images are taken. The first may be a second model: a file of weights, a folder of weights
            without images, hf:ORG/NAME, timm:NAME or a preset; ./b16 is a folder of images.
        out: Where the figures go: a folder that is new, empty or from this command; runs/figures, runs/figures-2, ...
            unless told otherwise.
        boxes: Where objects are, to say how much of the rollout falls inside: lines of file name, class, x0 y0 x1 y1,
            as Tiny-ImageNet has them.
        image_size: Resolution in place of the model's, one side or height and width; positions are resampled.
        pictures: How many images are read and drawn, evenly spread over those given; --boxes reads the others too.
        faithfulness: Remove and insert patches by relevance, by rollout and at random, and draw what becomes of the
            class's probability; it takes 66 passes an image.
        device: cpu, cuda or mps; the best there is unless told otherwise.
        json: Print the result as JSON.
    """
    if pictures < 0:
        raise UsageError(f"--pictures is {pictures}; it must be 0 or more")
    from vitrail.figures.crops import read_boxes
    from vitrail.train.run_folder import choose_next_folder

    models, given = _split_models_and_images(model, images)
    if boxes is not None and not given:
        raise UsageError("--boxes says where objects are in images: give the images too")
    objects = {} if boxes is None else read_boxes(boxes)
    folder = choose_next_folder("figures") if out is None else _claim_folder(out)
    shown = list({image.name: image for image in _open_images(given)}.values())
    drawn = _spread_evenly(shown, pictures)
    if len(drawn) < len(shown):
        are = "is" if len(drawn) == 1 else "are"
        output.print_note(
            f"{len(drawn):,} of {pluralize(len(shown), 'image')} {are} drawn; --pictures {len(shown)} draws all"
        )
    names = {image.name for image in drawn}
    read = [*drawn, *(image for image in shown if objects and image.name not in names)]
    subjects = _load_models(models, image_size, device)
    made = FigureFolder(folder, [subject.name for subject in subjects])
    _clear_folder(made)
    _draw_filters(subjects, made)
    _draw_positions(subjects, made)
    if read:
        _draw_attention(subjects, read, objects, made, len(drawn), faithfulness=faithfulness)
    else:
        reason = "--pictures 0 reads none" if shown else f"vitrail figures {model} IMAGES..."
        made.add_skipped("attention", f"that takes images: {reason}")
    _finish_figures(made, len(read), as_json=json)


class FigureModel(NamedTuple):
    """A model, and what it is called in figures."""

    name: str
    trained: "Trained"


@dataclasses.dataclass
class FigureFolder:
    """What there is so far: files, the numbers worth telling, and reasons for what is missing."""

    folder: Path
    models: list[str]
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    """By name what is in them."""
    numbers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """By figure and model."""
    skipped: list[dict[str, str]] = dataclasses.field(default_factory=list)
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)

    def add_file(self, name: str, content: str) -> Path:
        """Where to write a file."""
        self.files[name] = content
        return self.folder / name

    def add_skipped(self, figure: str, reason: str) -> None:
        """Note why a figure is not there."""
        self.skipped.append({"figure": figure, "reason": reason})
        output.print_note(f"no {figure}: {reason}")

    def add_unreadable(self, image: str, reason: str) -> None:
        """Note that an image cannot be read, once for all models."""
        if image not in self.unreadable:
            self.unreadable[image] = reason
            output.print_note(reason)

    def write_arrays(self, name: str, by_model: Mapping[str, Mapping[str, Any]]) -> None:
        """Write arrays as one file; those of the second model begin with second_."""
        import numpy as np

        found: dict[str, Any] = {
            f"{'second_' * self.models.index(model)}{key}": np.asarray(value)
            for model, fields in by_model.items()
            for key, value in fields.items()
        }
        with files.write_atomically(self.add_file(name, "its numbers, as arrays"), overwrite=True) as fresh:
            np.savez_compressed(fresh, **found)

    def write_json(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write numbers as text."""
        with files.write_atomically(self.folder / name, overwrite=True) as fresh:
            fresh.write_text(codec.dumps(facts, indent=1) + "\n")

    def collect_facts(self, *, complete: bool) -> dict[str, Any]:
        """All that is known."""
        return {"complete": complete} | dataclasses.asdict(self) | {"folder": str(self.folder)}


# --- what was given --------------------------------------------------------------------------------------------------


def _split_models_and_images(model: str, others: Sequence[str]) -> tuple[list[str], list[str]]:
    """The models and the images of a command line."""
    models = [model, *itertools.takewhile(_is_model, others)]
    if len(models) > 2:
        raise UsageError(f"{', '.join(models)} are {len(models)} models; one is drawn, or two side by side")
    return models, list(others[len(models) - 1 :])


def _is_model(argument: str) -> bool:
    """Whether an argument after the first is a model: a name of one, a file of weights, or a folder without images."""
    from vitrail import presets
    from vitrail.data.dataset import IMAGE_SUFFIXES
    from vitrail.weights import hub, tensor_files
    from vitrail.weights.load import find_model_path

    if hub.is_remote(argument):
        return True
    path = find_model_path(argument)
    if path is None:
        return presets.has_preset(argument)
    endings = {each.suffix.lower() for each in (path.iterdir() if path.is_dir() else [path])}
    return not endings.isdisjoint((*tensor_files.SUFFIXES, ".npz")) and endings.isdisjoint(IMAGE_SUFFIXES)


def _load_models(arguments: Sequence[str], image_size: tuple[int, ...] | None, device: str | None) -> list[FigureModel]:
    from vitrail.runtime import devices
    from vitrail.weights import hub
    from vitrail.weights.adapt import adapt
    from vitrail.weights.load import find_model_path, load

    there, subjects = devices.resolve_device(device), list[FigureModel]()
    for argument in arguments:
        trained = load(argument)
        if find_model_path(argument) is None and not hub.is_remote(argument):
            output.print_note(f"{argument} is a preset: its weights are random")
        if image_size is not None:
            trained = adapt(trained, image_size=expand_image_size(image_size))
        trained.model.to(there)
        name = _make_title(argument)
        taken = any(subject.name == name for subject in subjects)
        subjects.append(FigureModel(f"{argument} (2)" if taken else name, trained))
    return subjects


def _make_title(argument: str) -> str:
    """What a model is called in figures: the end of its name, or the run that it is the weights of."""
    *folders, name = argument.rstrip("/").split("/")
    stem = re.sub(r"\.(safetensors|npz|pth?|bin)$", "", name)
    return folders[-2] if len(folders) > 1 and folders[-1] == "weights" and stem == "best" else stem


def _open_images(arguments: Sequence[str]) -> "Iterator[FigureImage]":
    """The images that are meant, in the order they were given."""
    from vitrail.data import file_list, image_paths, public_datasets, webdataset
    from vitrail.data.sources import DIGITS_NAME, open_dataset
    from vitrail.figures.attention_images import FigureImage

    for argument in arguments:
        known = argument in (DIGITS_NAME, *public_datasets.PUBLIC_DATASETS) or webdataset.is_tar_pattern(argument)
        if known or Path(argument).suffix.lower() in file_list.LIST_SUFFIXES:
            splits = open_dataset(argument).splits
            split = next(splits[name] for name in ("test", "val", "train") if name in splits)
            yield from (
                FigureImage(split.get_image_name(row), partial(split.read_image, row)) for row in range(len(split))
            )
            continue
        yield from (FigureImage(image.name, image.read) for image in image_paths.iter_image_refs([argument]))


def _spread_evenly(images: "Sequence[FigureImage]", number: int) -> "list[FigureImage]":
    """At most so many of the images, evenly spread and in their order: a folder's classes come one after the other."""
    number = min(len(images), number)
    return [images[place * len(images) // number] for place in range(number)]


def _claim_folder(argument: str) -> Path:
    """The folder, if nobody else's files are in it."""
    out = Path(argument)
    others = out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / RECORD_FILE).is_file())
    if remote.is_remote(argument) or others:
        raise UsageError(f"--out {argument} must be a folder here that is new, empty or written by this command")
    return out


def _clear_folder(figure_folder: FigureFolder) -> None:
    """Remove the figures of another time, and mark the folder as one of this command."""
    for name in ("filters", "positions", "distance", "cka", "faithfulness", "images", "boxes"):
        for ending in ("png", "npz", "json"):
            (figure_folder.folder / f"{name}.{ending}").unlink(missing_ok=True)
    for name in _IMAGE_FOLDERS:
        for picture in (figure_folder.folder / name).glob("*.png"):
            picture.unlink()
    figure_folder.write_json(RECORD_FILE, figure_folder.collect_facts(complete=False))


# --- the figures -----------------------------------------------------------------------------------------------------


def _compute_each(
    figure: str, figure_models: Sequence[FigureModel], figure_folder: FigureFolder, compute: Callable[[FigureModel], T]
) -> dict[str, T]:
    """What comes out, by the models' names; of a model it cannot be had of, the reason is noted."""
    found = {}
    for subject in figure_models:
        try:
            found[subject.name] = compute(subject)
        except (UsageError, DataError) as error:
            figure_folder.add_skipped(figure, f"{subject.name}: {error}" if len(figure_models) > 1 else str(error))
    return found


def _draw_filters(figure_models: Sequence[FigureModel], figure_folder: FigureFolder) -> None:
    from vitrail.figures import embeddings, paper_figures

    found = _compute_each(
        "filters", figure_models, figure_folder, lambda subject: embeddings.compute_filters(subject.trained.model)
    )
    if not found:
        return
    shares = figure_folder.numbers["explained"] = {
        name: float(each.explained_variance_ratio.sum()) for name, each in found.items()
    }
    told = _format_by_model(shares, "{:.0%} of the variance")
    paper_figures.plot_filters(
        found, figure_folder.add_file("filters.png", f"principal components of the first filters, {told}")
    )
    figure_folder.write_arrays("filters.npz", {name: dataclasses.asdict(each) for name, each in found.items()})


def _draw_positions(figure_models: Sequence[FigureModel], figure_folder: FigureFolder) -> None:
    from vitrail.figures import embeddings, paper_figures

    found = _compute_each(
        "positions",
        figure_models,
        figure_folder,
        lambda subject: embeddings.compute_position_similarity(subject.trained.model),
    )
    if not found:
        return
    initial = {
        subject.name: embeddings.compute_position_similarity(embeddings.build_untrained(subject.trained.model))
        for subject in figure_models
        if subject.name in found
    }
    paper_figures.plot_position_similarity(
        found, figure_folder.add_file("positions.png", "cosine similarity of position embeddings"), initial=initial
    )
    figure_folder.write_arrays("positions.npz", _merge_initial(found, initial))


def _draw_attention(
    figure_models: Sequence[FigureModel],
    images: "Sequence[FigureImage]",
    objects: "Mapping[str, Box]",
    figure_folder: FigureFolder,
    max_drawn: int,
    *,
    faithfulness: bool,
) -> None:
    """Distances, CKA and curves, then pictures of each image, then boxes."""
    from vitrail.figures import attention_images

    drawn = images[:max_drawn]

    def compute_attention(subject: FigureModel) -> "AttentionResults":
        with output.show_progress(f"{subject.name} looks at images") as report:
            names = {image.name for image in drawn}
            batches = _iterate_inputs(subject, images, figure_folder)

            def report_progress(done: int) -> None:
                report(done, len(images))

            return attention_images.compute_attention_results(
                subject.trained, batches, names, report_progress, faithfulness=faithfulness
            )

    found = _compute_each("attention", figure_models, figure_folder, compute_attention)
    if not found:
        return
    _draw_distances([subject for subject in figure_models if subject.name in found], found, figure_folder)
    _draw_cka(found, figure_folder)
    for name, each in found.items():
        if drawn and not each.details.relevance:
            figure_folder.add_skipped(
                "relevance", f"{name} has no head: relevance, and how faithful it is, is that of a class"
            )
    _draw_faithfulness(found, figure_folder)
    _draw_images(drawn, found, figure_folder)
    if objects:
        _measure_boxes(found, objects, figure_folder)


def _iterate_inputs(
    figure_model: FigureModel, images: "Sequence[FigureImage]", figure_folder: FigureFolder
) -> "Iterator[InputBatch]":
    from vitrail.figures import attention_images

    preprocess = figure_model.trained.preprocess
    if preprocess is None:
        raise UsageError(
            "the weights do not say how images must be prepared. Name it once:"
            " vitrail convert MODEL OUT.safetensors --preprocess imagenet (or inception, torchvision)"
        )
    return attention_images.iterate_inputs(
        images, figure_model.trained.model.config.channels, preprocess, figure_folder.add_unreadable
    )


def _draw_distances(
    figure_models: Sequence[FigureModel],
    attention_by_model: "Mapping[str, AttentionResults]",
    figure_folder: FigureFolder,
) -> None:
    """Distance and entropy; networks before training see one batch, since they attend to any image alike."""
    from vitrail.figures import attention, embeddings, paper_figures

    found = {name: each.distance for name, each in attention_by_model.items()}
    initial = {}
    for subject in figure_models:
        network = embeddings.build_untrained(subject.trained.model)
        initial[subject.name] = attention.compute_attention_distance(
            network, [attention_by_model[subject.name].first_inputs]
        )
    for name, each in found.items():
        layers = {"distance": each.distance.mean(axis=1).tolist(), "entropy": each.entropy.mean(axis=1).tolist()}
        figure_folder.numbers.setdefault("attention", {})[name] = {"images": each.images} | layers
    ends = {name: (float(each.distance[0].mean()), float(each.distance[-1].mean())) for name, each in found.items()}
    told = _format_by_model(ends, "{0[0]:.0f} pixels in the first layer and {0[1]:.0f} in the last")
    path = figure_folder.add_file("distance.png", f"attention distance and entropy by head, on average {told}")
    paper_figures.plot_attention_distance(found, path, initial=initial)
    figure_folder.write_arrays("distance.npz", _merge_initial(found, initial))
    if (fewest := min(each.images for each in found.values())) < PAPER_IMAGES:
        output.print_note(f"attention distance is averaged over {fewest} of the paper's {PAPER_IMAGES} images")


def _draw_cka(attention_by_model: "Mapping[str, AttentionResults]", figure_folder: FigureFolder) -> None:
    """The similarity of layers within each model, and between two of them on the batches that both have seen."""
    from vitrail.figures import cka, paper_figures

    found, arrays = {}, dict[str, dict[str, Any]]()
    for one, other in itertools.combinations_with_replacement(attention_by_model, 2):
        here, there = attention_by_model[one].details.gram_matrices, attention_by_model[other].details.gram_matrices
        both = [names for names in here if names in there]
        try:
            layers = cka.compute_cka([here[names] for names in both], [there[names] for names in both])
        except DataError as error:
            figure_folder.add_skipped("cka", str(error))
            return
        found[one, other] = layers
        arrays.setdefault(one, {})["layers" if one == other else "layers_with_second"] = layers
    ends = {" and ".join(dict.fromkeys(pair)): layers[1, -1] for pair, layers in found.items()}
    figure_folder.numbers["cka"] = {name: float(value) for name, value in ends.items()}
    path = figure_folder.add_file(
        "cka.png", f"CKA of layers, of the first block and the last {_format_by_model(ends, '{:.2f}')}"
    )
    paper_figures.plot_cka(found, path)
    figure_folder.write_arrays("cka.npz", arrays)


def _draw_faithfulness(attention_by_model: "Mapping[str, AttentionResults]", figure_folder: FigureFolder) -> None:
    """What becomes of the classes' probabilities as patches go in several orders."""
    from vitrail.figures import paper_figures
    from vitrail.figures.faithfulness import join_faithfulness

    found = {
        name: {order: join_faithfulness(parts) for order, parts in each.details.faithfulness.items()}
        for name, each in attention_by_model.items()
        if each.details.faithfulness
    }
    if not found:
        return
    areas = figure_folder.numbers["faithfulness"] = {
        name: {order: {"deletion": each.deletion_area, "insertion": each.insertion_area} for order, each in by.items()}
        for name, by in found.items()
    }
    told = _format_by_model(areas, "by relevance {0[relevance][deletion]:.3f} and {0[relevance][insertion]:.3f}")
    paper_figures.plot_faithfulness(
        found, figure_folder.add_file("faithfulness.png", f"areas under deletion and insertion, {told}")
    )
    arrays = {
        name: {f"{order}_{key}": value for order, each in by.items() for key, value in dataclasses.asdict(each).items()}
        for name, by in found.items()
    }
    figure_folder.write_arrays("faithfulness.npz", arrays)


def _draw_images(
    images: "Sequence[FigureImage]", attention_by_model: "Mapping[str, AttentionResults]", figure_folder: FigureFolder
) -> None:
    """Pictures of each image that could be read, and what there is of all images as arrays."""
    from vitrail.figures import attention_images

    taken: set[str] = set()
    with output.show_progress("drawing") as report:
        for number, image in enumerate(images, 1):
            there = {name: each for name, each in attention_by_model.items() if image.name in each.details.heads}
            if there:
                taken.add(name := attention_images.make_file_name(image.name, taken))
                relevant = any(image.name in each.details.relevance for each in there.values())
                kinds = [kind for kind in _IMAGE_FOLDERS if relevant or kind != "relevance"]
                places = {kind: figure_folder.add_file(f"{kind}/{name}.png", image.name) for kind in kinds}
                attention_images.draw_attention_images(image, there, places)
            report(number, len(images))
    arrays = {}
    for name, each in attention_by_model.items():
        details = each.details
        arrays[name] = {"within": list(each.crops.values()), "rollouts": list(each.rollouts.values())}
        arrays[name] |= {field: list(getattr(details, field).values()) for field in ("heads", "tokens", "relevance")}
        answers = details.predictions.values()
        arrays[name] |= {"classes": [answer.class_index for answer in answers]}
        arrays[name] |= {"probabilities": [answer.probability for answer in answers]}
        arrays[name] |= {"images": list(each.rollouts), "drawn": list(details.heads)}
    figure_folder.write_arrays("images.npz", arrays)


def _measure_boxes(
    attention_by_model: "Mapping[str, AttentionResults]", objects: "Mapping[str, Box]", figure_folder: FigureFolder
) -> None:
    """How much of each rollout lies in the object's box, against the box's area and a bell in the middle."""
    from vitrail.figures.crops import measure_box_attention, summarize_box_attention

    rows, means = [], {}
    for model, each in attention_by_model.items():
        found = {
            image: measure_box_attention(rollout, objects[Path(image).name], each.crops[image])
            for image, rollout in each.rollouts.items()
            if Path(image).name in objects
        }
        if not any(share.area for share in found.values()):
            figure_folder.add_skipped("boxes", f"of what {model} sees of the images, nothing has a box")
            continue
        means[model] = summarize_box_attention(list(found.values()))
        rows += [{"model": model, "image": image} | dataclasses.asdict(share) for image, share in found.items()]
    if means:
        told = _format_by_model(
            means, "{0[energy]:.1%} of it in boxes of {0[area]:.1%}, of a bell in the middle {0[centre]:.1%}"
        )
        figure_folder.add_file("boxes.json", f"rollout and objects, {told}")
        figure_folder.write_json("boxes.json", {"means": means, "images": rows})
        figure_folder.numbers["boxes"] = means


# --- what comes out --------------------------------------------------------------------------------------------------


def _format_by_model(by_model: Mapping[str, Any], pattern: str) -> str:
    """The values in one line, with the models' names where there are two."""
    texts = {name: pattern.format(value) for name, value in by_model.items()}
    return "; ".join(f"{name}: {text}" if len(texts) > 1 else text for name, text in texts.items())


def _merge_initial(trained: Mapping[str, Any], initial: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By model the fields of both, those before training called initial_..."""
    before = {
        name: {f"initial_{key}": value for key, value in dataclasses.asdict(each).items()}
        for name, each in initial.items()
    }
    return {name: dataclasses.asdict(each) | before[name] for name, each in trained.items()}


def _finish_figures(figure_folder: FigureFolder, images: int, *, as_json: bool) -> None:
    facts = figure_folder.collect_facts(complete=True)
    figure_folder.write_json(RECORD_FILE, facts)
    if as_json:
        output.print_json(facts)
    else:
        rows = [
            (name, text) for name, text in figure_folder.files.items() if "/" not in name and not name.endswith(".npz")
        ]
        counts = {
            folder: sum(name.startswith(f"{folder}/") for name in figure_folder.files) for folder in _IMAGE_FOLDERS
        }
        rows += [(f"{folder}/", pluralize(number, "image")) for folder, number in counts.items() if number]
        output.print_table(rows)
    output.print_note(f"written: {figure_folder.folder}")
    if figure_folder.unreadable:
        raise DataError(
            f"{len(figure_folder.unreadable):,} of {pluralize(images, 'image')} cannot be read; {figure_folder.folder / RECORD_FILE} says why"
        )
