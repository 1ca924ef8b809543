"""What page and card say alike: numbers as people write them, and the run in rows of a name and a text."""

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitrail.config import BiTConfig, ViTConfig
from vitrail.evaluate.predictions import MIN_TOP5_CLASSES
from vitrail.evaluate.statistics import Interval
from vitrail.formatting import pluralize
from vitrail.model import cost
from vitrail.report.run_facts import FinalMetrics, PretrainingMetrics, RunFacts
from vitrail.weights.trained import Trained

UNKNOWN = "unknown"
ROLLOUT_CAUTION = (
    "Rollout is not the reason for an answer: it follows attention alone, is the same for every class, and a bright"
    " patch need not have decided anything."
)
_MAX_NAMED_CLASSES = 12  # classes that are named in a sentence

FactRow = tuple[str, str]


def format_percent(value: float, digits: int = 1) -> str:
    """0.9777 -> 97.8 %, which does not break into two lines."""
    return f"{100 * value:.{digits}f}\N{NO-BREAK SPACE}%"


def format_signed(value: float) -> str:
    """-0.15 -> −0.150, with a minus as long as the plus."""
    return f"{value:+.3f}".replace("-", "−")


def format_interval(interval: Interval) -> str:
    """(0.944, 0.991) -> 94.4 to 99.1 %."""
    return f"{100 * interval[0]:.1f} to {format_percent(interval[1])}"


def format_shape(*sides: int) -> str:
    """(197, 192) -> 197 × 192."""
    return " × ".join(f"{side:,}" for side in sides)


def format_count(number: int, what: str) -> str:
    """(1, "step") -> 1 step."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """103.5 -> 0:01:44."""
    return str(datetime.timedelta(seconds=round(seconds)))


def join_names(names: tuple[str, ...]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMED_CLASSES:,} more" if len(names) > _MAX_NAMED_CLASSES else ""
    return ", ".join(names[:_MAX_NAMED_CLASSES]) + more


def make_title(facts: RunFacts) -> str:
    """What was trained on what."""
    how = ", pre-trained without labels" if facts.masked else "" if facts.config["model"] is None else ", fine-tuned"
    return f"{facts.model}{how} on {facts.data}"


def make_lead(facts: RunFacts, trained: Trained | None) -> str:
    """The run in a line."""
    config = facts.config
    parts = [format_count(config["images"]["train"], "training image")]
    if trained is not None:
        parts.insert(
            0,
            f"{_describe_architecture(trained.model.config)} of {cost.count_parameters(trained.model.config):,} parameters",
        )
    if not facts.masked:
        parts.insert(-1, pluralize(len(config["classes"]), "class"))
    if facts.seconds is not None:
        parts.append(f"trained in {format_duration(facts.seconds)} (h:mm:ss) on {config['device']}")
    return ", ".join(parts)


def list_cautions(facts: RunFacts) -> Iterator[str]:
    """What a reader must know before the number is believed, a sentence each."""
    result = facts.result
    if facts.is_measured_on_train:
        yield "These images were trained on (--everything), so the number says nothing about new ones."
    if facts.is_selected_on_test:
        yield (
            "These are validation images, on which the weights and the temperature were chosen too: the number flatters"
            " a little."
        )
    if result is not None and result.images < 100:
        yield f"Measured on {pluralize(result.images, 'image')}, which is few: the interval is wide for a reason."
    if facts.macro_accuracy is not None and result is not None and facts.macro_accuracy < result.top1 - 0.02:
        yield (
            f"Classes differ in size: of a class {format_percent(facts.macro_accuracy)} is right on average, less than of all images."
        )
    across = (facts.data_report or {}).get("duplicates", {}).get("across_splits", 0)
    if across:
        yield f"{pluralize(across, 'group')} of copies across the splits, so the result may look better than it is."


def list_result_rows(facts: RunFacts, result: FinalMetrics) -> Iterator[FactRow]:
    """Everything that was measured."""
    name = "right answers" if facts.multi_label_metrics is None else "exact match"
    yield name, f"{format_percent(result.top1)} ({format_interval(result.interval)}, Wilson's 95 % interval)"
    if facts.multi_label_metrics is not None:
        yield "F1 over all labels", format_percent(facts.multi_label_metrics.micro_f1)
        yield "F1 averaged over classes", format_percent(facts.multi_label_metrics.macro_f1)
        yield "mean average precision", format_percent(facts.multi_label_metrics.mean_average_precision)
    elif len(facts.config["classes"]) >= MIN_TOP5_CLASSES:
        yield "among the five likeliest", format_percent(result.top5)
    if facts.macro_accuracy is not None:
        yield "average over classes", format_percent(facts.macro_accuracy)
    for baseline in facts.baselines:
        yield f"baseline: {baseline.name}", format_percent(baseline.right / result.images)
    yield "loss", f"{result.loss:.3f}"
    yield "expected calibration error", format_percent(result.calibration_error)


def list_pretraining_rows(pretraining: PretrainingMetrics) -> Iterator[FactRow]:
    """What was measured without labels."""
    yield "loss of a hidden patch", f"{pretraining.loss:.4f}"
    if pretraining.top1 is not None:
        yield "colours told right", format_percent(pretraining.top1)


def list_model_rows(trained: Trained) -> Iterator[FactRow]:
    """What the model is."""
    config = trained.model.config
    yield "kind", _describe_architecture(config)
    if isinstance(config, ViTConfig):
        yield "layers, width, heads, MLP", f"{config.depth}, {config.width}, {config.heads}, {config.mlp}"
        where = f"{format_shape(config.stride, config.stride)} pixels, {config.grid[0] * config.grid[1]:,} an image"
        yield "patches", where
        yield "read in the end", _POOL_NAMES[config.pool]
        yield "positions", config.positions
    yield "parameters", f"{cost.count_parameters(config):,}"
    yield "multiply-adds an image", f"{cost.count_multiply_adds(config):,}"


_POOL_NAMES = {
    "class": "the class token",
    "norm-mean": "the mean of the patches",
    "mean-norm": "the mean of the patches",
    "map": "attention pooling of the patches",
    "class-mean": "class token and mean of the patches",
}


def _describe_architecture(config: ViTConfig | BiTConfig) -> str:
    if isinstance(config, BiTConfig):
        return "BiT ResNet"
    return "Vision Transformer" if config.stem is None else "hybrid: a ResNet's stem, then a Vision Transformer"


def list_data_rows(facts: RunFacts) -> Iterator[FactRow]:
    """What it was trained on."""
    config = facts.config
    yield "name", facts.data
    yield "images", ", ".join(f"{name} {number:,}" for name, number in config["images"].items())
    if config["classes"]:
        unused = ", of which nothing was learned" if facts.masked else ""
        yield "classes", f"{len(config['classes']):,}: {join_names(tuple(config['classes']))}{unused}"
    for note in config["notes"]:
        yield "note", facts.clean_text(note)
    if config["train_on_val"]:
        yield "trained on", "train and val together"


def list_preprocess_rows(config: Mapping[str, Any]) -> Iterator[FactRow]:
    """How an image becomes the model's input."""
    view = config["preprocess"]
    resize = view["resize"]
    to = format_shape(*resize) if len(resize) == 2 else f"short side {resize[0]}"
    yield "resized to", f"{to} pixels, {view['interpolation']}"
    yield "cropped to", f"{format_shape(*view['size'])} pixels, at the centre"
    yield "mean, std", f"{_format_numbers(view['mean'])}; {_format_numbers(view['std'])}"


def list_training_rows(facts: RunFacts) -> Iterator[FactRow]:
    """How it was trained."""
    config = facts.config
    recipe = config["recipe"]
    optimizer, schedule = recipe["optimizer"], recipe["schedule"]
    yield "recipe", recipe["source"]
    start = "random weights" if config["model"] is None else facts.clean_text(config["model"]["name"])
    yield "begun with", start
    steps, epochs = config["steps"], float(recipe["epochs"])
    if facts.replanned_steps:  # planned again as it went
        steps, epochs = facts.replanned_steps[-1][1], epochs * facts.replanned_steps[-1][1] / steps
    yield "steps", f"{steps:,} of {pluralize(recipe['batch'], 'image')}, {pluralize(epochs, 'epoch')}"
    yield "optimizer", f"{optimizer['kind']}, rate {optimizer['lr']:g}, weight decay {optimizer['weight_decay']:g}"
    yield "schedule", f"warm-up for {format_count(schedule['warmup'], 'step')}, then {schedule['decay']}"
    yield "augmentation", ", ".join(_list_augmentations(recipe["augment"]))
    yield "learned", _describe_objective(recipe)
    if others := list(_list_regularization(recipe)):
        yield "besides", ", ".join(others)
    yield "seed", str(config["seed"])
    processes = f", {config['world_size']} processes" if config["world_size"] > 1 else ""
    yield "machine", f"{config['device']}{processes}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in config["versions"].items())
    if facts.seconds is not None:
        yield "time (h:mm:ss)", format_duration(facts.seconds)


def _describe_objective(recipe: Mapping[str, Any]) -> str:
    if masked := recipe.get("masked"):
        return f"to tell {masked['target']} of the {masked['mask_ratio']:.0%} of patches that are hidden ({masked['kind']})"
    smoothed = f", smoothed by {recipe['label_smoothing']:g}" if recipe["label_smoothing"] else ""
    return f"labels, by {recipe['loss']}{smoothed}"


def _list_augmentations(augment: Mapping[str, Any]) -> Iterator[str]:
    area = f" of {augment['area'][0]:g} to {augment['area'][1]:g} of the area" if augment["crop"] == "inception" else ""
    yield f"{augment['crop']} crop{area}"
    if augment["flip"]:
        yield "flip"
    if augment["randaugment"]:
        yield "RandAugment({}, {})".format(*augment["randaugment"])
    yield from (f"{name} {augment[name]:g}" for name in ("jitter", "erase", "mixup", "cutmix") if augment[name])


def _list_regularization(recipe: Mapping[str, Any]) -> Iterator[str]:
    names = {"dropout": "dropout", "stochastic_depth": "stochastic depth", "ema": "average of weights"}
    yield from (f"{text} {recipe[name]:g}" for name, text in names.items() if recipe[name])
    if recipe["trainable_layers"] is not None:
        yield (
            "only the head learned"
            if not recipe["trainable_layers"]
            else f"only {recipe['trainable_layers']} layers below the head"
        )
    if recipe["logit_adjustment"]:
        yield "every class counts alike"


def _format_numbers(values: list[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values)


def drop_nonfinite(values: Sequence[float]) -> tuple[float, ...]:
    """Those that are numbers."""
    return tuple(value for value in values if math.isfinite(value))
