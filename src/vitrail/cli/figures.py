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
from vitrail.cli import runs, show
from vitrail.config import sides
from vitrail.errors import DataError, UsageError
from vitrail.plurals import plural

if TYPE_CHECKING:
    from vitrail.figures.boxes import Box
    from vitrail.figures.looks import Looked, Shown, Views
    from vitrail.weights.trained import Trained

PAPER = 128  # images that the paper's attention distance is averaged over
RECORD = "figures.json"
_FOLDERS = ("rollout", "relevance", "tokens", "heads")

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
    from vitrail.figures.boxes import read_boxes

    models, given = _told_apart(model, images)
    if boxes is not None and not given:
        raise UsageError("--boxes says where objects are in images: give the images too")
    objects = {} if boxes is None else read_boxes(boxes)
    folder = runs.next_folder("figures") if out is None else _claimed(out)
    shown = list({image.name: image for image in _images(given)}.values())
    drawn = _spread(shown, pictures)
    if len(drawn) < len(shown):
        are = "is" if len(drawn) == 1 else "are"
        show.note(f"{len(drawn):,} of {plural(len(shown), 'image')} {are} drawn; --pictures {len(shown)} draws all")
    names = {image.name for image in drawn}
    read = [*drawn, *(image for image in shown if objects and image.name not in names)]
    subjects = _subjects(models, image_size, device)
    made = Made(folder, [subject.name for subject in subjects])
    _clear(made)
    _filters(subjects, made)
    _positions(subjects, made)
    if read:
        _attention(subjects, read, objects, made, len(drawn), faithfulness=faithfulness)
    else:
        reason = "--pictures 0 reads none" if shown else f"vitrail figures {model} IMAGES..."
        made.skip("attention", f"that takes images: {reason}")
    _end(made, len(read), as_json=json)


class Subject(NamedTuple):
    """A model, and what it is called in figures."""

    name: str
    trained: "Trained"


@dataclasses.dataclass
class Made:
    """What there is so far: files, the numbers worth telling, and reasons for what is missing."""

    folder: Path
    models: list[str]
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    """By name what is in them."""
    numbers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """By figure and model."""
    skipped: list[dict[str, str]] = dataclasses.field(default_factory=list)
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)

    def file(self, name: str, content: str) -> Path:
        """Where to write a file."""
        self.files[name] = content
        return self.folder / name

    def skip(self, figure: str, reason: str) -> None:
        """Note why a figure is not there."""
        self.skipped.append({"figure": figure, "reason": reason})
        show.note(f"no {figure}: {reason}")

    def refuse(self, image: str, reason: str) -> None:
        """Note that an image cannot be read, once for all models."""
        if image not in self.unreadable:
            self.unreadable[image] = reason
            show.note(reason)

    def arrays(self, name: str, by_model: Mapping[str, Mapping[str, Any]]) -> None:
        """Write arrays as one file; those of the second model begin with second_."""
        import numpy as np

        found: dict[str, Any] = {
            f"{'second_' * self.models.index(model)}{key}": np.asarray(value)
            for model, fields in by_model.items()
            for key, value in fields.items()
        }
        with files.replacing(self.file(name, "its numbers, as arrays"), overwrite=True) as fresh:
            np.savez_compressed(fresh, **found)

    def json(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write numbers as text."""
        with files.replacing(self.folder / name, overwrite=True) as fresh:
            fresh.write_text(codec.dumps(facts, indent=1) + "\n")

    def facts(self, *, complete: bool) -> dict[str, Any]:
        """All that is known."""
        return {"complete": complete} | dataclasses.asdict(self) | {"folder": str(self.folder)}


# --- what was given --------------------------------------------------------------------------------------------------


def _told_apart(model: str, others: Sequence[str]) -> tuple[list[str], list[str]]:
    """The models and the images of a command line."""
    models = [model, *itertools.takewhile(_is_model, others)]
    if len(models) > 2:
        raise UsageError(f"{', '.join(models)} are {len(models)} models; one is drawn, or two side by side")
    return models, list(others[len(models) - 1 :])


def _is_model(argument: str) -> bool:
    """Whether an argument after the first is a model: a name of one, a file of weights, or a folder without images."""
    from vitrail import presets
    from vitrail.data.dataset import SUFFIXES
    from vitrail.weights import hub, storage
    from vitrail.weights.load import locate

    if hub.is_remote(argument):
        return True
    path = locate(argument)
    if path is None:
        return presets.exists(argument)
    endings = {each.suffix.lower() for each in (path.iterdir() if path.is_dir() else [path])}
    return not endings.isdisjoint((*storage.SUFFIXES, ".npz")) and endings.isdisjoint(SUFFIXES)


def _subjects(models: Sequence[str], image_size: tuple[int, ...] | None, device: str | None) -> list[Subject]:
    from vitrail.model import device as devices
    from vitrail.weights import hub
    from vitrail.weights.adapt import adapt
    from vitrail.weights.load import load, locate

    there, subjects = devices.named(device), list[Subject]()
    for argument in models:
        trained = load(argument)
        if locate(argument) is None and not hub.is_remote(argument):
            show.note(f"{argument} is a preset: its weights are random")
        if image_size is not None:
            trained = adapt(trained, image_size=sides(image_size))
        trained.model.to(there)
        name = _title(argument)
        taken = any(subject.name == name for subject in subjects)
        subjects.append(Subject(f"{argument} (2)" if taken else name, trained))
    return subjects


def _title(argument: str) -> str:
    """What a model is called in figures: the end of its name, or the run that it is the weights of."""
    *folders, name = argument.rstrip("/").split("/")
    stem = re.sub(r"\.(safetensors|npz|pth?|bin)$", "", name)
    return folders[-2] if len(folders) > 1 and folders[-1] == "weights" and stem == "best" else stem


def _images(given: Sequence[str]) -> "Iterator[Shown]":
    """The images that are meant, in the order they were given."""
    from vitrail.data import lists, paths, public, tars
    from vitrail.data.sources import DIGITS, open_data
    from vitrail.figures.looks import Shown

    for argument in given:
        known = argument in (DIGITS, *public.SETS) or tars.is_pattern(argument)
        if known or Path(argument).suffix.lower() in lists.SUFFIXES:
            splits = open_data(argument).splits
            split = next(splits[name] for name in ("test", "val", "train") if name in splits)
            yield from (Shown(split.name(row), partial(split.read, row)) for row in range(len(split)))
            continue
        yield from (Shown(image.name, image.read) for image in paths.found([argument]))


def _spread(images: "Sequence[Shown]", number: int) -> "list[Shown]":
    """At most so many of the images, evenly spread and in their order: a folder's classes come one after the other."""
    number = min(len(images), number)
    return [images[place * len(images) // number] for place in range(number)]


def _claimed(given: str) -> Path:
    """The folder, if nobody else's files are in it."""
    out = Path(given)
    others = out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / RECORD).is_file())
    if remote.is_remote(given) or others:
        raise UsageError(f"--out {given} must be a folder here that is new, empty or written by this command")
    return out


def _clear(made: Made) -> None:
    """Remove the figures of another time, and mark the folder as one of this command."""
    for name in ("filters", "positions", "distance", "cka", "faithfulness", "images", "boxes"):
        for ending in ("png", "npz", "json"):
            (made.folder / f"{name}.{ending}").unlink(missing_ok=True)
    for name in _FOLDERS:
        for picture in (made.folder / name).glob("*.png"):
            picture.unlink()
    made.json(RECORD, made.facts(complete=False))


# --- the figures -----------------------------------------------------------------------------------------------------


def _each(figure: str, subjects: Sequence[Subject], made: Made, compute: Callable[[Subject], T]) -> dict[str, T]:
    """What comes out, by the models' names; of a model it cannot be had of, the reason is noted."""
    found = {}
    for subject in subjects:
        try:
            found[subject.name] = compute(subject)
        except (UsageError, DataError) as error:
            made.skip(figure, f"{subject.name}: {error}" if len(subjects) > 1 else str(error))
    return found


def _filters(subjects: Sequence[Subject], made: Made) -> None:
    from vitrail.figures import embeddings, plates

    found = _each("filters", subjects, made, lambda subject: embeddings.filters(subject.trained.model))
    if not found:
        return
    shares = made.numbers["explained"] = {name: float(each.explained.sum()) for name, each in found.items()}
    told = _told(shares, "{:.0%} of the variance")
    plates.filters(found, made.file("filters.png", f"principal components of the first filters, {told}"))
    made.arrays("filters.npz", {name: dataclasses.asdict(each) for name, each in found.items()})


def _positions(subjects: Sequence[Subject], made: Made) -> None:
    from vitrail.figures import embeddings, plates

    found = _each("positions", subjects, made, lambda subject: embeddings.position_similarity(subject.trained.model))
    if not found:
        return
    initial = {
        subject.name: embeddings.position_similarity(embeddings.untrained(subject.trained.model))
        for subject in subjects
        if subject.name in found
    }
    plates.positions(found, made.file("positions.png", "cosine similarity of position embeddings"), initial=initial)
    made.arrays("positions.npz", _beside(found, initial))


def _attention(
    subjects: Sequence[Subject],
    images: "Sequence[Shown]",
    objects: "Mapping[str, Box]",
    made: Made,
    pictures: int,
    *,
    faithfulness: bool,
) -> None:
    """Distances, CKA and curves, then pictures of each image, then boxes."""
    from vitrail.figures import looks

    drawn = images[:pictures]

    def looked(subject: Subject) -> "Looked":
        with show.progress(f"{subject.name} looks at images") as report:
            names = {image.name for image in drawn}
            batches = _views(subject, images, made)

            def tell(done: int) -> None:
                report(done, len(images))

            return looks.look(subject.trained, batches, names, tell, faithfulness=faithfulness)

    found = _each("attention", subjects, made, looked)
    if not found:
        return
    _distances([subject for subject in subjects if subject.name in found], found, made)
    _cka(found, made)
    for name, each in found.items():
        if drawn and not each.details.relevance:
            made.skip("relevance", f"{name} has no head: relevance, and how faithful it is, is that of a class")
    _faithfulness(found, made)
    _pictures(drawn, found, made)
    if objects:
        _boxes(found, objects, made)


def _views(subject: Subject, images: "Sequence[Shown]", made: Made) -> "Iterator[Views]":
    from vitrail.figures import looks

    preprocess = subject.trained.preprocess
    if preprocess is None:
        raise UsageError(
            "the weights do not say how images must be prepared. Name it once:"
            " vitrail convert MODEL OUT.safetensors --preprocess imagenet (or inception, torchvision)"
        )
    return looks.views(images, subject.trained.model.config.channels, preprocess, made.refuse)


def _distances(subjects: Sequence[Subject], looked: "Mapping[str, Looked]", made: Made) -> None:
    """Distance and entropy; networks before training see one batch, since they attend to any image alike."""
    from vitrail.figures import attention, embeddings, plates

    found = {name: each.distance for name, each in looked.items()}
    initial = {}
    for subject in subjects:
        network = embeddings.untrained(subject.trained.model)
        initial[subject.name] = attention.attention_distance(network, [looked[subject.name].first])
    for name, each in found.items():
        layers = {"distance": each.distance.mean(axis=1).tolist(), "entropy": each.entropy.mean(axis=1).tolist()}
        made.numbers.setdefault("attention", {})[name] = {"images": each.images} | layers
    ends = {name: (float(each.distance[0].mean()), float(each.distance[-1].mean())) for name, each in found.items()}
    told = _told(ends, "{0[0]:.0f} pixels in the first layer and {0[1]:.0f} in the last")
    path = made.file("distance.png", f"attention distance and entropy by head, on average {told}")
    plates.distance(found, path, initial=initial)
    made.arrays("distance.npz", _beside(found, initial))
    if (fewest := min(each.images for each in found.values())) < PAPER:
        show.note(f"attention distance is averaged over {fewest} of the paper's {PAPER} images")


def _cka(looked: "Mapping[str, Looked]", made: Made) -> None:
    """The similarity of layers within each model, and between two of them on the batches that both have seen."""
    from vitrail.figures import cka, plates

    found, arrays = {}, dict[str, dict[str, Any]]()
    for one, other in itertools.combinations_with_replacement(looked, 2):
        here, there = looked[one].details.products, looked[other].details.products
        both = [names for names in here if names in there]
        try:
            layers = cka.compute_cka([here[names] for names in both], [there[names] for names in both])
        except DataError as error:
            made.skip("cka", str(error))
            return
        found[one, other] = layers
        arrays.setdefault(one, {})["layers" if one == other else "layers_with_second"] = layers
    ends = {" and ".join(dict.fromkeys(pair)): layers[1, -1] for pair, layers in found.items()}
    made.numbers["cka"] = {name: float(value) for name, value in ends.items()}
    path = made.file("cka.png", f"CKA of layers, of the first block and the last {_told(ends, '{:.2f}')}")
    plates.cka(found, path)
    made.arrays("cka.npz", arrays)


def _faithfulness(looked: "Mapping[str, Looked]", made: Made) -> None:
    """What becomes of the classes' probabilities as patches go in several orders."""
    from vitrail.figures import plates
    from vitrail.figures.faithfulness import join

    found = {
        name: {order: join(parts) for order, parts in each.details.curves.items()}
        for name, each in looked.items()
        if each.details.curves
    }
    if not found:
        return
    areas = made.numbers["faithfulness"] = {
        name: {order: {"deletion": each.deletion_area, "insertion": each.insertion_area} for order, each in by.items()}
        for name, by in found.items()
    }
    told = _told(areas, "by relevance {0[relevance][deletion]:.3f} and {0[relevance][insertion]:.3f}")
    plates.faithfulness(found, made.file("faithfulness.png", f"areas under deletion and insertion, {told}"))
    arrays = {
        name: {f"{order}_{key}": value for order, each in by.items() for key, value in dataclasses.asdict(each).items()}
        for name, by in found.items()
    }
    made.arrays("faithfulness.npz", arrays)


def _pictures(images: "Sequence[Shown]", looked: "Mapping[str, Looked]", made: Made) -> None:
    """Pictures of each image that could be read, and what there is of all images as arrays."""
    from vitrail.figures import looks

    taken: set[str] = set()
    with show.progress("drawing") as report:
        for number, image in enumerate(images, 1):
            there = {name: each for name, each in looked.items() if image.name in each.details.heads}
            if there:
                taken.add(name := looks.file_name(image.name, taken))
                relevant = any(image.name in each.details.relevance for each in there.values())
                kinds = [kind for kind in _FOLDERS if relevant or kind != "relevance"]
                places = {kind: made.file(f"{kind}/{name}.png", image.name) for kind in kinds}
                looks.draw(image, there, places)
            report(number, len(images))
    arrays = {}
    for name, each in looked.items():
        details = each.details
        arrays[name] = {field: list(getattr(each, field).values()) for field in ("within", "rollouts")}
        arrays[name] |= {field: list(getattr(details, field).values()) for field in ("heads", "tokens", "relevance")}
        answers = details.answers.values()
        arrays[name] |= {"classes": [answer.number for answer in answers]}
        arrays[name] |= {"probabilities": [answer.probability for answer in answers]}
        arrays[name] |= {"images": list(each.rollouts), "drawn": list(details.heads)}
    made.arrays("images.npz", arrays)


def _boxes(looked: "Mapping[str, Looked]", objects: "Mapping[str, Box]", made: Made) -> None:
    """How much of each rollout lies in the object's box, against the box's area and a bell in the middle."""
    from vitrail.figures.boxes import energy_in_box, summary

    rows, means = [], {}
    for model, each in looked.items():
        found = {
            image: energy_in_box(rollout, objects[Path(image).name], each.within[image])
            for image, rollout in each.rollouts.items()
            if Path(image).name in objects
        }
        if not any(share.area for share in found.values()):
            made.skip("boxes", f"of what {model} sees of the images, nothing has a box")
            continue
        means[model] = summary(list(found.values()))
        rows += [{"model": model, "image": image} | dataclasses.asdict(share) for image, share in found.items()]
    if means:
        told = _told(means, "{0[energy]:.1%} of it in boxes of {0[area]:.1%}, of a bell in the middle {0[centre]:.1%}")
        made.file("boxes.json", f"rollout and objects, {told}")
        made.json("boxes.json", {"means": means, "images": rows})
        made.numbers["boxes"] = means


# --- what comes out --------------------------------------------------------------------------------------------------


def _told(by_model: Mapping[str, Any], pattern: str) -> str:
    """The values in one line, with the models' names where there are two."""
    texts = {name: pattern.format(value) for name, value in by_model.items()}
    return "; ".join(f"{name}: {text}" if len(texts) > 1 else text for name, text in texts.items())


def _beside(found: Mapping[str, Any], initial: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By model the fields of both, those before training called initial_..."""
    before = {
        name: {f"initial_{key}": value for key, value in dataclasses.asdict(each).items()}
        for name, each in initial.items()
    }
    return {name: dataclasses.asdict(each) | before[name] for name, each in found.items()}


def _end(made: Made, images: int, *, as_json: bool) -> None:
    facts = made.facts(complete=True)
    made.json(RECORD, facts)
    if as_json:
        show.as_json(facts)
    else:
        rows = [(name, text) for name, text in made.files.items() if "/" not in name and not name.endswith(".npz")]
        counts = {folder: sum(name.startswith(f"{folder}/") for name in made.files) for folder in _FOLDERS}
        rows += [(f"{folder}/", plural(number, "image")) for folder, number in counts.items() if number]
        show.table(rows)
    show.note(f"written: {made.folder}")
    if made.unreadable:
        raise DataError(
            f"{len(made.unreadable):,} of {plural(images, 'image')} cannot be read; {made.folder / RECORD} says why"
        )
