"""All figures of one model, or of two side by side, from the weights and from images."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vitrail import presets
from vitrail.config.model import expand_image_size
from vitrail.data import file_list, image_paths, public_datasets, webdataset
from vitrail.data.image_headers import IMAGE_SUFFIXES
from vitrail.data.memory import DIGITS_NAME, FACES_NAME
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.runtime import devices
from vitrail.runtime.workers import ShowProgress, hide_progress
from vitrail.visualization import attention, attention_images, cka, embeddings, paper_figures
from vitrail.visualization.attention import AttentionDistance
from vitrail.visualization.attention_images import AttentionResults, FigureImage
from vitrail.visualization.crops import Box, measure_box_attention, summarize_box_attention
from vitrail.visualization.embeddings import Filters, PositionSimilarity
from vitrail.visualization.faithfulness import join_faithfulness
from vitrail.visualization.feature_pca import ImageColors, compute_image_colors, write_feature_colors
from vitrail.visualization.figure_folder import IMAGE_FOLDERS, FigureFolder
from vitrail.weights import formats, hub
from vitrail.weights.adapt import adapt
from vitrail.weights.load import find_model_path, is_builtin
from vitrail.weights.trained import Trained, require_preprocess

PAPER_IMAGES = 128  # images that the paper's attention distance is averaged over
ResultT = TypeVar("ResultT")


class FigureModel(NamedTuple):
    """A model and its name in figures."""

    name: str
    trained: Trained


# --- models and images -----------------------------------------------------------------------------------------------


def split_models_and_images(model: str, others: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of a command line into one or two models, and images."""
    models = [model, *itertools.takewhile(_is_model, others)]
    if len(models) > 2:
        raise UsageError(f"{', '.join(models)} are {len(models)} models; give one, or two to compare")
    return models, list(others[len(models) - 1 :])


def _is_model(argument: str) -> bool:
    """Whether an argument after the first is a model: its name, a file of weights, or a folder without images."""
    if hub.is_remote(argument):
        return True
    path = find_model_path(argument)
    if path is None:
        return is_builtin(argument) or presets.has_preset(argument)
    suffixes = {file.suffix.lower() for file in (path.iterdir() if path.is_dir() else [path])}
    return not suffixes.isdisjoint(formats.FILE_SUFFIXES) and suffixes.isdisjoint(IMAGE_SUFFIXES)


def prepare_models(
    models: Sequence[FigureModel], image_size: tuple[int, ...] | None = None, device_name: str | None = None
) -> list[FigureModel]:
    """Move the models to the device, with short and distinct names."""
    device, prepared = devices.resolve_device(device_name), list[FigureModel]()
    for name, trained in models:
        if image_size is not None:
            trained = adapt(trained, image_size=expand_image_size(image_size))
        trained.model.to(device)
        title = _make_title(name)
        taken = any(model.name == title for model in prepared)
        prepared.append(FigureModel(f"{name} (2)" if taken else title, trained))
    return prepared


def _make_title(argument: str) -> str:
    """The name of a model in figures: the end of its path, or the run of whose weights it is."""
    *folders, name = argument.rstrip("/").split("/")
    stem = re.sub(r"\.(safetensors|npz|pth?|bin)$", "", name)
    return folders[-2] if len(folders) > 1 and folders[-1] == "weights" and stem == "best" else stem


def list_images(arguments: Sequence[str]) -> list[FigureImage]:
    """List the images of paths, globs and datasets, each name once, in the order given."""
    return list({image.name: image for image in _iterate_images(arguments)}.values())


def _iterate_images(arguments: Sequence[str]) -> Iterator[FigureImage]:
    for argument in arguments:
        names = (DIGITS_NAME, FACES_NAME, *public_datasets.PUBLIC_DATASETS)
        known = argument in names or webdataset.is_tar_pattern(argument)
        if known or Path(argument).suffix.lower() in file_list.LIST_SUFFIXES:
            splits = open_dataset(argument).splits
            split = next(splits[name] for name in ("test", "val", "train") if name in splits)
            for row in range(len(split)):
                yield FigureImage(split.get_image_name(row), partial(split.read_image, row))
        else:
            yield from (FigureImage(image.name, image.read) for image in image_paths.iter_image_refs([argument]))


def spread_evenly(images: Sequence[FigureImage], number: int) -> list[FigureImage]:
    """Select so many images, evenly spread, in their order: the classes of a folder follow each other."""
    number = min(len(images), number)
    return [images[index * len(images) // number] for index in range(number)]


# --- from the weights ------------------------------------------------------------------------------------------------


class WeightResults(NamedTuple):
    """What figures show of the weights, by the models' names."""

    filters: Mapping[str, Filters]
    similarities: Mapping[str, PositionSimilarity]


def draw_weight_figures(models: Sequence[FigureModel], folder: FigureFolder) -> WeightResults:
    """Draw what needs no images: embedding filters and position similarity."""
    return WeightResults(_draw_filters(models, folder), _draw_positions(models, folder))


def _compute_by_model(
    figure: str, models: Sequence[FigureModel], folder: FigureFolder, compute: Callable[[FigureModel], ResultT]
) -> dict[str, ResultT]:
    """The results by the models' names; for a model that cannot have the figure, the reason is noted."""
    results = {}
    for model in models:
        try:
            results[model.name] = compute(model)
        except (UsageError, DataError) as error:
            folder.add_skipped(figure, f"{model.name}: {error}" if len(models) > 1 else str(error))
    return results


def _draw_filters(models: Sequence[FigureModel], folder: FigureFolder) -> Mapping[str, Filters]:
    filters = _compute_by_model(
        "filters", models, folder, lambda model: embeddings.compute_filters(model.trained.model)
    )
    if not filters:
        return {}
    explained = {name: float(result.explained_variance_ratio.sum()) for name, result in filters.items()}
    folder.numbers["explained"] = explained
    description = f"principal components of the first filters, {_format_by_model(explained, '{:.0%} of the variance')}"
    paper_figures.plot_filters(filters, folder.add_file("filters.png", description))
    folder.write_arrays("filters.npz", {name: dataclasses.asdict(result) for name, result in filters.items()})
    return filters


def _draw_positions(models: Sequence[FigureModel], folder: FigureFolder) -> Mapping[str, PositionSimilarity]:
    similarities = _compute_by_model(
        "positions", models, folder, lambda model: embeddings.compute_position_similarity(model.trained.model)
    )
    if not similarities:
        return {}
    initial = {
        model.name: embeddings.compute_position_similarity(embeddings.build_untrained(model.trained.model))
        for model in models
        if model.name in similarities
    }
    path = folder.add_file("positions.png", "cosine similarity of position embeddings")
    paper_figures.plot_position_similarity(similarities, path, initial=initial)
    folder.write_arrays("positions.npz", _merge_initial(similarities, initial))
    return similarities


# --- from images -----------------------------------------------------------------------------------------------------


def draw_image_figures(
    models: Sequence[FigureModel],
    images: Sequence[FigureImage],
    boxes: Mapping[str, Box],
    folder: FigureFolder,
    *,
    weights: WeightResults,
    num_drawn: int,
    faithfulness: bool = False,
    show_progress: ShowProgress = hide_progress,
) -> None:
    """Draw the features, distances, the overview, CKA and faithfulness, then pictures, then measure boxes."""
    drawn = images[:num_drawn]
    if drawn:
        _draw_feature_pca(models, drawn, folder, show_progress)

    def compute_attention(model: FigureModel) -> AttentionResults:
        channels, preprocess = model.trained.model.config.channels, require_preprocess(model.trained)
        inputs = attention_images.iterate_inputs(images, channels, preprocess, folder.add_unreadable)
        with show_progress(f"attention of {model.name}") as report:
            return attention_images.compute_attention_results(
                model.trained,
                inputs,
                {image.name for image in drawn},
                lambda done: report(done, len(images)),
                faithfulness=faithfulness,
            )

    results = _compute_by_model("attention", models, folder, compute_attention)
    if not results:
        return
    initial = _draw_distances([model for model in models if model.name in results], results, folder)
    _draw_overview(weights, {name: result.distance for name, result in results.items()}, initial, folder)
    _draw_cka(results, folder)
    for name, result in results.items():
        if drawn and not result.details.relevance:
            folder.add_skipped("relevance", f"{name} has no head: relevance and its faithfulness are those of a class")
    _draw_faithfulness(results, folder)
    _draw_images(drawn, results, folder, show_progress)
    if boxes:
        _measure_boxes(results, boxes, folder)


def _draw_feature_pca(
    models: Sequence[FigureModel], images: Sequence[FigureImage], folder: FigureFolder, show_progress: ShowProgress
) -> None:
    """Draw the dense features of the images as colors, beside the model inputs."""

    def compute_colors(model: FigureModel) -> ImageColors:
        with show_progress(f"features of {model.name}") as report:
            return compute_image_colors(model.trained, images, folder.add_unreadable, report)

    results = _compute_by_model("pca", models, folder, compute_colors)
    if not results:
        return
    explained = {name: float(result.explained_variance_ratio.sum()) for name, result in results.items()}
    folder.numbers["pca"] = explained
    shares = _format_by_model(explained, "{:.0%} of the variance")
    path = folder.add_file("pca.png", f"principal components of the patches' features, {shares}")
    write_feature_colors(results, path)
    arrays = {
        name: {
            "colors": list(result.colors.values()),
            "explained_variance_ratio": result.explained_variance_ratio,
            "images": list(result.colors),
        }
        for name, result in results.items()
    }
    folder.write_arrays("pca.npz", arrays)


def _draw_distances(
    models: Sequence[FigureModel], results: Mapping[str, AttentionResults], folder: FigureFolder
) -> dict[str, AttentionDistance]:
    """Draw distance and entropy, and return those of untrained networks.

    These get one batch, since they attend alike to any image.
    """
    distances = {name: result.distance for name, result in results.items()}
    initial = {}
    for model in models:
        network = embeddings.build_untrained(model.trained.model)
        initial[model.name] = attention.compute_attention_distance(network, [results[model.name].first_inputs])
    by_model = folder.numbers.setdefault("attention", {})
    for name, result in distances.items():
        by_model[name] = {
            "images": result.images,
            "distance": result.distance.mean(axis=1).tolist(),
            "entropy": result.entropy.mean(axis=1).tolist(),
        }
    ends = {name: (numbers["distance"][0], numbers["distance"][-1]) for name, numbers in by_model.items()}
    means = _format_by_model(ends, "{0[0]:.0f} pixels in the first layer and {0[1]:.0f} in the last")
    path = folder.add_file("distance.png", f"attention distance and entropy by head, on average {means}")
    paper_figures.plot_attention_distance(distances, path, initial=initial)
    folder.write_arrays("distance.npz", _merge_initial(distances, initial))
    if (fewest := min(result.images for result in distances.values())) < PAPER_IMAGES:
        folder.notify(f"attention distance is averaged over {fewest} of the paper's {PAPER_IMAGES} images")
    return initial


def _draw_overview(
    weights: WeightResults,
    distances: Mapping[str, AttentionDistance],
    initial: Mapping[str, AttentionDistance],
    folder: FigureFolder,
) -> None:
    """Draw the paper's figure 7 of the models that have all three of its panels."""
    panels = {
        name: (weights.filters[name], weights.similarities[name], distance)
        for name, distance in distances.items()
        if name in weights.filters and name in weights.similarities
    }
    if panels:
        path = folder.add_file("overview.png", "filters, positions and attention distance: the paper's figure 7")
        paper_figures.plot_overview(panels, path, initial=initial)


def _draw_cka(results: Mapping[str, AttentionResults], folder: FigureFolder) -> None:
    """Draw the similarity of layers within each model, and between two of them on the batches that both have read."""
    similarities, arrays = {}, dict[str, dict[str, Any]]()
    for one, other in itertools.combinations_with_replacement(results, 2):
        first, second = results[one].details.gram_matrices, results[other].details.gram_matrices
        common = [names for names in first if names in second]
        try:
            layers = cka.compute_cka([first[names] for names in common], [second[names] for names in common])
        except DataError as error:
            folder.add_skipped("cka", str(error))
            return
        similarities[one, other] = layers
        arrays.setdefault(one, {})["layers" if one == other else "layers_with_second"] = layers
    ends = {" and ".join(dict.fromkeys(pair)): layers[1, -1] for pair, layers in similarities.items()}
    folder.numbers["cka"] = {name: float(value) for name, value in ends.items()}
    description = f"CKA of layers, of the first block and the last {_format_by_model(ends, '{:.2f}')}"
    paper_figures.plot_cka(similarities, folder.add_file("cka.png", description))
    folder.write_arrays("cka.npz", arrays)


def _draw_faithfulness(results: Mapping[str, AttentionResults], folder: FigureFolder) -> None:
    """Draw the classes' probabilities as patches are deleted and inserted in several orders."""
    curves = {
        name: {order: join_faithfulness(parts) for order, parts in result.details.faithfulness.items()}
        for name, result in results.items()
        if result.details.faithfulness
    }
    if not curves:
        return
    areas = folder.numbers["faithfulness"] = {
        name: {
            order: {"deletion": curve.deletion_area, "insertion": curve.insertion_area}
            for order, curve in by_order.items()
        }
        for name, by_order in curves.items()
    }
    numbers = _format_by_model(areas, "by relevance {0[relevance][deletion]:.3f} and {0[relevance][insertion]:.3f}")
    path = folder.add_file("faithfulness.png", f"areas under deletion and insertion, {numbers}")
    paper_figures.plot_faithfulness(curves, path)
    arrays = {name: dict[str, Any]() for name in curves}
    for name, by_order in curves.items():
        for order, curve in by_order.items():
            arrays[name] |= _prefix_fields(f"{order}_", curve)
    folder.write_arrays("faithfulness.npz", arrays)


def _draw_images(
    images: Sequence[FigureImage],
    results: Mapping[str, AttentionResults],
    folder: FigureFolder,
    show_progress: ShowProgress,
) -> None:
    """Draw pictures of each readable image, and write the arrays of all images."""
    taken: set[str] = set()
    with show_progress("drawing") as report:
        for number, image in enumerate(images, 1):
            of_image = {name: result for name, result in results.items() if image.name in result.details.heads}
            if of_image:
                taken.add(name := attention_images.make_file_name(image.name, taken))
                relevance = any(image.name in result.details.relevance for result in of_image.values())
                kinds = [kind for kind in IMAGE_FOLDERS if relevance or kind != "relevance"]
                paths = {kind: folder.add_file(f"{kind}/{name}.png", image.name) for kind in kinds}
                attention_images.draw_attention_images(image, of_image, paths)
            report(number, len(images))
    folder.write_arrays("images.npz", {name: _collect_arrays(result) for name, result in results.items()})


def _collect_arrays(result: AttentionResults) -> dict[str, list[Any]]:
    """The arrays of images.npz; its keys are those of earlier versions."""
    details = result.details
    predictions = details.predictions.values()
    return {
        "within": list(result.crops.values()),
        "rollouts": list(result.rollouts.values()),
        "heads": list(details.heads.values()),
        "tokens": list(details.tokens.values()),
        "relevance": list(details.relevance.values()),
        "classes": [prediction.class_index for prediction in predictions],
        "probabilities": [prediction.probability for prediction in predictions],
        "images": list(result.rollouts),
        "drawn": list(details.heads),
    }


def _measure_boxes(results: Mapping[str, AttentionResults], boxes: Mapping[str, Box], folder: FigureFolder) -> None:
    """Measure how much of each rollout lies in the object's box, against the box's area and a center prior."""
    rows, means = [], {}
    for model, result in results.items():
        measurements = {
            image: measure_box_attention(rollout, boxes[Path(image).name], result.crops[image])
            for image, rollout in result.rollouts.items()
            if Path(image).name in boxes
        }
        if not any(measurement.area for measurement in measurements.values()):
            folder.add_skipped("boxes", f"no box lies in what {model} sees of the images")
            continue
        means[model] = summarize_box_attention(list(measurements.values()))
        rows += [
            {"model": model, "image": image} | dataclasses.asdict(measurement)
            for image, measurement in measurements.items()
        ]
    if means:
        numbers = _format_by_model(
            means, "{0[energy]:.1%} of it in boxes of {0[area]:.1%}, of a center prior {0[center]:.1%}"
        )
        folder.add_file("boxes.json", f"rollout and objects, {numbers}")
        folder.write_json("boxes.json", {"means": means, "images": rows})
        folder.numbers["boxes"] = means


# --- text and arrays -------------------------------------------------------------------------------------------------


def _format_by_model(values: Mapping[str, Any], pattern: str) -> str:
    """The values in one line, with the models' names where there are two."""
    texts = {name: pattern.format(value) for name, value in values.items()}
    return "; ".join(f"{name}: {text}" if len(texts) > 1 else text for name, text in texts.items())


def _merge_initial(trained: Mapping[str, Any], initial: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields of both by model; the keys of those before training begin with initial_."""
    return {
        name: dataclasses.asdict(result) | _prefix_fields("initial_", initial[name]) for name, result in trained.items()
    }


def _prefix_fields(prefix: str, result: Any) -> dict[str, Any]:
    return {f"{prefix}{key}": value for key, value in dataclasses.asdict(result).items()}
