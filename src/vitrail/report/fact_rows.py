"""Facts of a run as rows of a name and a text, shared by the HTML report and the model card."""

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitrail.config import BiTConfig, DistillationConfig, LoRAConfig, ViTConfig, from_json
from vitrail.evaluation.predictions import MIN_TOP5_CLASSES
from vitrail.evaluation.statistics import Interval
from vitrail.formatting import pluralize
from vitrail.model import cost
from vitrail.report.run_facts import FinalMetrics, PretrainingMetrics, RunFacts
from vitrail.weights.trained import Trained

UNKNOWN = "unknown"
ROLLOUT_CAUTION = (
    "Rollout does not explain a prediction: it follows attention alone and is the same for every class. A bright patch"
    " need not have affected the result."
)
_MAX_NAMED_CLASSES = 12  # in a sentence

FactRow = tuple[str, str]


def format_percent(value: float, digits: int = 1) -> str:
    """0.9777 -> 97.8 %, with a no-break space."""
    return f"{100 * value:.{digits}f}\N{NO-BREAK SPACE}%"


def format_signed(value: float) -> str:
    """-0.15 -> −0.150, with a minus sign as wide as the plus."""
    return f"{value:+.3f}".replace("-", "−")


def format_probability(probability: float) -> str:
    """Whole percents: 59 %, or <1 %."""
    return "<1\N{NO-BREAK SPACE}%" if probability < 0.005 else format_percent(probability, 0)


def format_interval(interval: Interval) -> str:
    """(0.944, 0.991) -> 94.4 to 99.1 %."""
    return f"{100 * interval[0]:.1f} to {format_percent(interval[1])}"


def format_shape(*sides: int) -> str:
    """(197, 192) -> 197 × 192."""
    return " × ".join(f"{side:,}" for side in sides)


def format_clock_time(seconds: float) -> str:
    """103.5 -> 0:01:44."""
    return str(datetime.timedelta(seconds=round(seconds)))


def make_title(facts: RunFacts) -> str:
    """The title of a run: its model and its dataset."""
    method = ", pre-trained without labels" if facts.masked else "" if facts.config["model"] is None else ", fine-tuned"
    return f"{facts.model}{method} on {facts.data}"


def make_lead(facts: RunFacts, trained: Trained | None) -> str:
    """The run in one line."""
    config = facts.config
    parts = []
    if trained is not None:
        model = trained.model.config
        parts.append(f"{_describe_architecture(model)} of {cost.count_parameters(model):,} parameters")
    parts += [] if facts.masked else [pluralize(len(config["classes"]), "class")]
    parts.append(pluralize(config["images"]["train"], "training image"))
    if facts.seconds is not None:
        parts.append(f"trained in {format_clock_time(facts.seconds)} (h:mm:ss) on {config['device']}")
    return ", ".join(parts)


def list_cautions(facts: RunFacts) -> Iterator[str]:
    """Reasons not to take the result at face value, one sentence each."""
    result = facts.result
    if facts.is_measured_on_train:
        yield "The model was trained on these images (--train-on-val), so the result says nothing about new ones."
    if facts.is_selected_on_test:
        yield (
            "These are the validation images, on which the weights and the temperature were chosen too: the result is"
            " slightly optimistic."
        )
    if result is not None and result.images < 100:
        yield f"Measured on only {pluralize(result.images, 'image')}, so the confidence interval is wide."
    if facts.macro_accuracy is not None and result is not None and facts.macro_accuracy < result.top1 - 0.02:
        macro = format_percent(facts.macro_accuracy)
        yield f"Classes differ in size: the accuracy averaged over classes is {macro}, lower than over all images."
    across = (facts.data_report or {}).get("duplicates", {}).get("across_splits", 0)
    if across:
        yield f"{pluralize(across, 'group')} of duplicates across splits: the result may be too optimistic."


def list_result_rows(facts: RunFacts, result: FinalMetrics) -> Iterator[FactRow]:
    """All metrics of a run with labels."""
    name = "accuracy" if facts.multi_label_metrics is None else "exact match"
    yield name, f"{format_percent(result.top1)} ({format_interval(result.interval)}, Wilson's 95 % interval)"
    if facts.multi_label_metrics is not None:
        yield "F1 over all labels", format_percent(facts.multi_label_metrics.micro_f1)
        yield "F1 averaged over classes", format_percent(facts.multi_label_metrics.macro_f1)
        yield "mean average precision", format_percent(facts.multi_label_metrics.mean_average_precision)
        if facts.multi_label_metrics.precision is not None and facts.multi_label_metrics.recall is not None:
            yield (
                "precision, the share of predicted labels that are true",
                format_percent(facts.multi_label_metrics.precision),
            )
            yield (
                "recall, the share of true labels that are predicted",
                format_percent(facts.multi_label_metrics.recall),
            )
    elif len(facts.config["classes"]) >= MIN_TOP5_CLASSES:
        yield "top-5 accuracy", format_percent(result.top5)
    if facts.macro_accuracy is not None:
        yield "accuracy averaged over classes", format_percent(facts.macro_accuracy)
    for baseline in facts.baselines:
        yield f"baseline: {baseline.name}", format_percent(baseline.correct / result.images)
    yield "loss", f"{result.loss:.3f}"
    yield "expected calibration error", format_percent(result.calibration_error)


def list_pretraining_rows(pretraining: PretrainingMetrics) -> Iterator[FactRow]:
    """All metrics of a run without labels."""
    yield "loss per masked patch", f"{pretraining.loss:.4f}"
    if pretraining.top1 is not None:
        yield "color accuracy", format_percent(pretraining.top1)


def list_model_rows(trained: Trained) -> Iterator[FactRow]:
    """The architecture and its size."""
    config = trained.model.config
    yield "architecture", _describe_architecture(config)
    if isinstance(config, ViTConfig):
        yield "layers, width, heads, MLP", f"{config.depth}, {config.width}, {config.heads}, {config.mlp}"
        pixels = format_shape(config.stride, config.stride)
        yield "patches", f"{pixels} pixels, {config.grid[0] * config.grid[1]:,} per image"
        yield "pooling", _POOL_NAMES[config.pool]
        rotary = ["rotary"] if config.rotary else []
        yield (
            "positions",
            " and ".join(rotary if config.positions == "none" and rotary else [config.positions, *rotary]),
        )
    yield "parameters", f"{cost.count_parameters(config):,}"
    yield "multiply-adds per image", f"{cost.count_multiply_adds(config):,}"


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
    return "Vision Transformer" if config.stem is None else "hybrid: a ResNet stem, then a Vision Transformer"


def list_data_rows(facts: RunFacts) -> Iterator[FactRow]:
    """The dataset of a run."""
    config = facts.config
    yield "name", facts.data
    yield "images", ", ".join(f"{name} {number:,}" for name, number in config["images"].items())
    if config["classes"]:
        count, named = len(config["classes"]), ", ".join(config["classes"][:_MAX_NAMED_CLASSES])
        more = f" and {count - _MAX_NAMED_CLASSES:,} more" if count > _MAX_NAMED_CLASSES else ""
        unused = " (not used: the run learned without labels)" if facts.masked else ""
        yield "classes", f"{count:,}: {named}{more}{unused}"
    for note in config["notes"]:
        yield "note", facts.clean_text(note)
    if config["train_on_val"]:
        yield "trained on", "train and val"


def list_preprocess_rows(config: Mapping[str, Any]) -> Iterator[FactRow]:
    """How an image becomes the model's input."""
    preprocess = config["preprocess"]
    resize = preprocess["resize"]
    size = format_shape(*resize) if len(resize) == 2 else f"short side {resize[0]}"
    yield "resized to", f"{size} pixels, {preprocess['interpolation']}"
    yield "cropped to", f"{format_shape(*preprocess['size'])} pixels, at the center"
    yield "mean, std", "; ".join(" ".join(f"{value:.4g}" for value in preprocess[name]) for name in ("mean", "std"))


def list_training_rows(facts: RunFacts) -> Iterator[FactRow]:
    """The training recipe, machine and versions."""
    config = facts.config
    recipe = config["recipe"]
    optimizer, schedule = recipe["optimizer"], recipe["schedule"]
    yield "recipe", recipe["source"]
    yield "initial weights", "random" if config["model"] is None else facts.clean_text(config["model"]["name"])
    if (teacher := config.get("teacher")) is not None:
        method = from_json(DistillationConfig, recipe["distillation"]).summary
        yield "teacher", f"{facts.clean_text(teacher['name'])}; {method}"
    steps, epochs = config["steps"], float(recipe["epochs"])
    if facts.replanned_steps:  # a time limit changed the plan during the run
        steps, epochs = facts.replanned_steps[-1][1], epochs * facts.replanned_steps[-1][1] / steps
    yield "steps", f"{steps:,} of {pluralize(recipe['batch'], 'image')}, {pluralize(epochs, 'epoch')}"
    rates = f"learning rate {optimizer['lr']:g}, weight decay {optimizer['weight_decay']:g}"
    yield "optimizer", f"{optimizer['kind']}, {rates}"
    yield "schedule", f"warm-up for {pluralize(schedule['warmup'], 'step')}, then {schedule['decay']}"
    yield "augmentation", ", ".join(_list_augmentations(recipe["augment"]))
    yield "objective", _describe_objective(recipe)
    if weights := config.get("class_weights"):
        yield "class weights", f"{min(weights.values()):g} to {max(weights.values()):g}"
    if regularization := list(_list_regularization(recipe)):
        yield "regularization", ", ".join(regularization)
    yield "seed", str(config["seed"])
    processes = f", {config['world_size']} processes" if config["world_size"] > 1 else ""
    yield "machine", f"{config['device']}{processes}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in config["versions"].items())
    if facts.seconds is not None:
        yield "time (h:mm:ss)", format_clock_time(facts.seconds)


def _describe_objective(recipe: Mapping[str, Any]) -> str:
    if masked := recipe.get("masked"):
        return f"predict {masked['target']} of masked patches, {masked['mask_ratio']:.0%} of all ({masked['kind']})"
    smoothing = f", label smoothing {recipe['label_smoothing']:g}" if recipe["label_smoothing"] else ""
    return f"{recipe['loss']} cross-entropy of the labels{smoothing}"


def _list_augmentations(augment: Mapping[str, Any]) -> Iterator[str]:
    area = f" ({augment['area'][0]:g} to {augment['area'][1]:g} of the area)" if augment["crop"] == "inception" else ""
    yield f"{augment['crop']} crop{area}"
    if augment["flip"]:
        yield "flip"
    if augment["randaugment"]:
        yield "RandAugment({}, {})".format(*augment["randaugment"])
    yield from (f"{name} {augment[name]:g}" for name in ("jitter", "erase", "mixup", "cutmix") if augment[name])


def _list_regularization(recipe: Mapping[str, Any]) -> Iterator[str]:
    names = {"dropout": "dropout", "stochastic_depth": "stochastic depth", "ema": "weight averaging (EMA)"}
    yield from (f"{text} {recipe[name]:g}" for name, text in names.items() if recipe[name])
    if (layers := recipe["trainable_layers"]) is not None:
        yield f"only the head and {layers} layers below it trained" if layers else "only the head trained"
    if lora := recipe.get("lora"):
        yield f"only the head and {from_json(LoRAConfig, lora).summary} trained"
    if recipe["logit_adjustment"]:
        yield "logit adjustment for class sizes"


def drop_nonfinite(values: Sequence[float]) -> tuple[float, ...]:
    """The finite values."""
    return tuple(value for value in values if math.isfinite(value))
