"""What page and card say alike: numbers as people write them, and the run in rows of a name and a text."""

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitrail.config import BiTConfig, ViTConfig
from vitrail.evaluate.classify import TOP5_CLASSES
from vitrail.evaluate.intervals import Interval
from vitrail.model import count
from vitrail.plurals import plural
from vitrail.report.gather import Facts, Pretrained, Result
from vitrail.weights.trained import Trained

UNKNOWN = "unknown"
NOT_ROLLOUT = (
    "Rollout is not the reason for an answer: it follows attention alone, is the same for every class, and a bright"
    " patch need not have decided anything."
)
_SHOWN = 12  # classes that are named in a sentence

Row = tuple[str, str]


def percent(value: float, digits: int = 1) -> str:
    """0.9777 -> 97.8 %, which does not break into two lines."""
    return f"{100 * value:.{digits}f}\N{NO-BREAK SPACE}%"


def signed(value: float) -> str:
    """-0.15 -> −0.150, with a minus as long as the plus."""
    return f"{value:+.3f}".replace("-", "−")


def between(interval: Interval) -> str:
    """(0.944, 0.991) -> 94.4 to 99.1 %."""
    return f"{100 * interval[0]:.1f} to {percent(interval[1])}"


def shape(*sides: int) -> str:
    """(197, 192) -> 197 × 192."""
    return " × ".join(f"{side:,}" for side in sides)


def counted(number: int, what: str) -> str:
    """(1, "step") -> 1 step."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def span(seconds: float) -> str:
    """103.5 -> 0:01:44."""
    return str(datetime.timedelta(seconds=round(seconds)))


def listed(names: tuple[str, ...]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def title(facts: Facts) -> str:
    """What was trained on what."""
    how = ", pre-trained without labels" if facts.masked else "" if facts.config["model"] is None else ", fine-tuned"
    return f"{facts.model}{how} on {facts.data}"


def lead(facts: Facts, trained: Trained | None) -> str:
    """The run in a line."""
    config = facts.config
    parts = [counted(config["images"]["train"], "training image")]
    if trained is not None:
        parts.insert(0, f"{_kind(trained.model.config)} of {count.parameters(trained.model.config):,} parameters")
    if not facts.masked:
        parts.insert(-1, plural(len(config["classes"]), "class"))
    if facts.seconds is not None:
        parts.append(f"trained in {span(facts.seconds)} (h:mm:ss) on {config['device']}")
    return ", ".join(parts)


def cautions(facts: Facts) -> Iterator[str]:
    """What a reader must know before the number is believed, a sentence each."""
    result = facts.result
    if facts.measured_on_training:
        yield "These images were trained on (--everything), so the number says nothing about new ones."
    if facts.chosen_on_measured:
        yield (
            "These are validation images, on which the weights and the temperature were chosen too: the number flatters"
            " a little."
        )
    if result is not None and result.images < 100:
        yield f"Measured on {plural(result.images, 'image')}, which is few: the interval is wide for a reason."
    if facts.macro is not None and result is not None and facts.macro < result.top1 - 0.02:
        yield (
            f"Classes differ in size: of a class {percent(facts.macro)} is right on average, less than of all images."
        )
    across = (facts.data_report or {}).get("duplicates", {}).get("across_splits", 0)
    if across:
        yield f"{plural(across, 'group')} of copies across the splits, so the result may look better than it is."


def result_rows(facts: Facts, result: Result) -> Iterator[Row]:
    """Everything that was measured."""
    name = "right answers" if facts.labels is None else "exact match"
    yield name, f"{percent(result.top1)} ({between(result.interval)}, Wilson's 95 % interval)"
    if facts.labels is not None:
        yield "F1 over all labels", percent(facts.labels.micro_f1)
        yield "F1 averaged over classes", percent(facts.labels.macro_f1)
        yield "mean average precision", percent(facts.labels.mean_average_precision)
    elif len(facts.config["classes"]) >= TOP5_CLASSES:
        yield "among the five likeliest", percent(result.top5)
    if facts.macro is not None:
        yield "average over classes", percent(facts.macro)
    for baseline in facts.baselines:
        yield f"baseline: {baseline.name}", percent(baseline.right / result.images)
    yield "loss", f"{result.loss:.3f}"
    yield "expected calibration error", percent(result.calibration_error)


def pretrained_rows(found: Pretrained) -> Iterator[Row]:
    """What was measured without labels."""
    yield "loss of a hidden patch", f"{found.loss:.4f}"
    if found.top1 is not None:
        yield "colours told right", percent(found.top1)


def model_rows(trained: Trained) -> Iterator[Row]:
    """What the model is."""
    config = trained.model.config
    yield "kind", _kind(config)
    if isinstance(config, ViTConfig):
        yield "layers, width, heads, MLP", f"{config.depth}, {config.width}, {config.heads}, {config.mlp}"
        where = f"{shape(config.stride, config.stride)} pixels, {config.grid[0] * config.grid[1]:,} an image"
        yield "patches", where
        yield "read in the end", _POOLS[config.pool]
        yield "positions", config.positions
    yield "parameters", f"{count.parameters(config):,}"
    yield "multiply-adds an image", f"{count.multiply_adds(config):,}"


_POOLS = {
    "class": "the class token",
    "norm-mean": "the mean of the patches",
    "mean-norm": "the mean of the patches",
    "map": "attention pooling of the patches",
    "class-mean": "class token and mean of the patches",
}


def _kind(config: ViTConfig | BiTConfig) -> str:
    if isinstance(config, BiTConfig):
        return "BiT ResNet"
    return "Vision Transformer" if config.stem is None else "hybrid: a ResNet's stem, then a Vision Transformer"


def data_rows(facts: Facts) -> Iterator[Row]:
    """What it was trained on."""
    config = facts.config
    yield "name", facts.data
    yield "images", ", ".join(f"{name} {number:,}" for name, number in config["images"].items())
    if config["classes"]:
        unused = ", of which nothing was learned" if facts.masked else ""
        yield "classes", f"{len(config['classes']):,}: {listed(tuple(config['classes']))}{unused}"
    for note in config["notes"]:
        yield "note", facts.plain(note)
    if config["everything"]:
        yield "trained on", "train and val together"


def preprocess_rows(config: Mapping[str, Any]) -> Iterator[Row]:
    """How an image becomes the model's input."""
    view = config["preprocess"]
    resize = view["resize"]
    to = shape(*resize) if len(resize) == 2 else f"short side {resize[0]}"
    yield "resized to", f"{to} pixels, {view['interpolation']}"
    yield "cropped to", f"{shape(*view['size'])} pixels, at the centre"
    yield "mean, std", f"{_numbers(view['mean'])}; {_numbers(view['std'])}"


def training_rows(facts: Facts) -> Iterator[Row]:
    """How it was trained."""
    config = facts.config
    recipe = config["recipe"]
    optimiser, schedule = recipe["optimiser"], recipe["schedule"]
    yield "recipe", recipe["source"]
    start = "random weights" if config["model"] is None else facts.plain(config["model"]["name"])
    yield "begun with", start
    steps, epochs = config["steps"], float(recipe["epochs"])
    if facts.decisions:  # planned again as it went
        steps, epochs = facts.decisions[-1][1], epochs * facts.decisions[-1][1] / steps
    yield "steps", f"{steps:,} of {plural(recipe['batch'], 'image')}, {plural(epochs, 'epoch')}"
    yield "optimiser", f"{optimiser['kind']}, rate {optimiser['lr']:g}, weight decay {optimiser['weight_decay']:g}"
    yield "schedule", f"warm-up for {counted(schedule['warmup'], 'step')}, then {schedule['decay']}"
    yield "augmentation", ", ".join(_augmentation(recipe["augment"]))
    yield "learned", _learned(recipe)
    if others := list(_others(recipe)):
        yield "besides", ", ".join(others)
    yield "seed", str(config["seed"])
    processes = f", {config['world']} processes" if config["world"] > 1 else ""
    yield "machine", f"{config['device']}{processes}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in config["versions"].items())
    if facts.seconds is not None:
        yield "time (h:mm:ss)", span(facts.seconds)


def _learned(recipe: Mapping[str, Any]) -> str:
    if masked := recipe.get("masked"):
        return f"to tell {masked['target']} of the {masked['share']:.0%} of patches that are hidden ({masked['kind']})"
    smoothed = f", smoothed by {recipe['label_smoothing']:g}" if recipe["label_smoothing"] else ""
    return f"labels, by {recipe['loss']}{smoothed}"


def _augmentation(augment: Mapping[str, Any]) -> Iterator[str]:
    area = f" of {augment['area'][0]:g} to {augment['area'][1]:g} of the area" if augment["crop"] == "inception" else ""
    yield f"{augment['crop']} crop{area}"
    if augment["flip"]:
        yield "flip"
    if augment["randaugment"]:
        yield "RandAugment({}, {})".format(*augment["randaugment"])
    yield from (f"{name} {augment[name]:g}" for name in ("jitter", "erase", "mixup", "cutmix") if augment[name])


def _others(recipe: Mapping[str, Any]) -> Iterator[str]:
    names = {"dropout": "dropout", "stochastic_depth": "stochastic depth", "ema": "average of weights"}
    yield from (f"{text} {recipe[name]:g}" for name, text in names.items() if recipe[name])
    if recipe["layers"] is not None:
        yield "only the head learned" if not recipe["layers"] else f"only {recipe['layers']} layers below the head"
    if recipe["balanced"]:
        yield "every class counts alike"


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values)


def finite(values: Sequence[float]) -> tuple[float, ...]:
    """Those that are numbers."""
    return tuple(value for value in values if math.isfinite(value))
