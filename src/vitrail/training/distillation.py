"""Knowledge distillation: a student learns from a teacher's predictions, or features, of the same inputs.

    B batch   L classes   D, E features of student and teacher

The teacher sees what the student sees, augmented and mixed, in its own resolution and normalization. It is frozen, in
eval mode, and in no checkpoint; a run's config.json has its digest. A teacher's outputs are a function of the image, so
micro-batches, ranks and a resume change no loss.
"""

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import DistillationConfig, ModelConfig, PreprocessConfig, Recipe, ViTConfig, to_json
from vitrail.errors import UsageError
from vitrail.formatting import pluralize
from vitrail.model.vit import Model, ViT
from vitrail.training.losses import softmax_cross_entropy
from vitrail.weights.tensor_files import digest_tensors
from vitrail.weights.trained import Trained, require_preprocess

if TYPE_CHECKING:
    from vitrail.training.training_run import TrainingRun

PROJECTION_NAME = "teacher_projection"
"""The linear map from the student's features to the teacher's, a module of the student while it is trained."""


class StudentOutputs(NamedTuple):
    """What a student computes in training; None where the kind of distillation does not need it."""

    logits: Tensor
    """Of the class head, (B, L); without a distillation token of all that predicts."""
    distillation_logits: Tensor | None
    """Of the distillation token's head, (B, L)."""
    features: Tensor | None
    """Mapped to the teacher's, (B, E)."""


class StudentNetwork(nn.Module):
    """A student that gives more than its logits in training, and that DDP can wrap; itself it stays an ordinary ViT."""

    def __init__(self, student: ViT, kind: str) -> None:
        super().__init__()
        self.student, self.kind = student, kind

    def forward(self, images: Tensor) -> StudentOutputs:
        """(B, C, S, S) -> everything that the losses need, by one pass."""
        student = self.student
        tokens = student.encode(images, student.num_head_tokens)
        features = student.pool(tokens)
        logits = student.head(features)
        distillation_logits = student.head_dist(tokens[:, 1]) if student.config.distillation_head else None
        if self.kind == "token":
            return StudentOutputs(logits, distillation_logits, None)
        logits = logits if distillation_logits is None else (logits + distillation_logits) / 2
        return StudentOutputs(logits, None, student.get_submodule(PROJECTION_NAME)(features))


def build_network(student: Model, config: DistillationConfig) -> nn.Module:
    """The module to call in training: the student, or where its logits are not enough a `StudentNetwork`."""
    if config.kind in ("soft", "hard"):
        return student
    assert isinstance(student, ViT), "another is refused before anything is computed"
    return StudentNetwork(student, config.kind)


class Distillation:
    """A teacher on a device, and the loss of its student."""

    def __init__(
        self, teacher: Trained, config: DistillationConfig, classes: tuple[str, ...], preprocess: PreprocessConfig
    ) -> None:
        self.config = config
        self.model = copy.deepcopy(teacher.model).eval().requires_grad_(False)
        self.conversion = InputConversion(preprocess, require_preprocess(teacher, name="the teacher"))
        columns = check_teacher(teacher, config, classes, preprocess)
        self.columns = None if columns is None else torch.tensor(columns)

    def to(self, device: torch.device) -> "Distillation":
        """Move the teacher and all it needs to the device, so that a step waits for nothing of the host's."""
        self.model.to(device)
        self.conversion.to(device)
        self.columns = None if self.columns is None else self.columns.to(device)
        return self

    def compile_blocks(self) -> None:
        """Compile the teacher's blocks, where it has any."""
        if isinstance(self.model, ViT):
            self.model.compile_blocks()

    @torch.no_grad()
    def compute_targets(self, images: Tensor) -> Tensor:
        """The teacher's logits of the student's classes (B, L), or its features (B, E), of the student's inputs."""
        images = self.conversion(images)
        if self.columns is None:
            features: Tensor = self.model.compute_features(images)
            return features.float()
        logits: Tensor = self.model(images)
        return logits.float()[:, self.columns]

    def compute_loss(
        self,
        outputs: Tensor | StudentOutputs,
        labels: Tensor,
        targets: Tensor,
        recipe: Recipe,
        class_weights: Tensor | None = None,
    ) -> Tensor:
        """The loss, summed over the images; an image without a label learns from the teacher alone.

        `class_weights` (L,) multiply the terms of true labels, and none of the teacher's.
        """
        config = self.config
        outputs = StudentOutputs(outputs, None, None) if isinstance(outputs, Tensor) else outputs
        loss = config.weight * _compute_teacher_loss(outputs, targets, config)
        if config.weight < 1:
            own = softmax_cross_entropy(outputs.logits, labels, recipe.label_smoothing, class_weights)
            loss = loss + (1 - config.weight) * own
        return loss


def _compute_teacher_loss(outputs: StudentOutputs, targets: Tensor, config: DistillationConfig) -> Tensor:
    if config.kind == "features":
        assert outputs.features is not None
        return (1 - F.cosine_similarity(outputs.features.float(), targets, dim=1)).sum()
    logits = outputs.logits if outputs.distillation_logits is None else outputs.distillation_logits
    if config.kind != "soft":
        return softmax_cross_entropy(logits, targets.argmax(dim=1))
    student, teacher = ((values.float() / config.temperature).log_softmax(dim=1) for values in (logits, targets))
    return config.temperature**2 * F.kl_div(student, teacher, reduction="sum", log_target=True)


class InputConversion(nn.Module):
    """Normalized images of one preprocessing -> of another: its size, mean and std.

    The resize is bicubic and antialiased, as two products with the weights of rows and columns: a third of the time of
    torch's own kernel on an H200.
    """

    source_mean: Tensor
    source_std: Tensor
    mean: Tensor
    std: Tensor
    rows: Tensor
    columns: Tensor

    def __init__(self, source: PreprocessConfig, target: PreprocessConfig) -> None:
        super().__init__()
        self.is_resized = source.size != target.size
        for name, values in (
            ("source_mean", source.mean),
            ("source_std", source.std),
            ("mean", target.mean),
            ("std", target.std),
        ):
            self.register_buffer(name, torch.tensor(values).reshape(-1, 1, 1))
        for name, side, target_side in zip(("rows", "columns"), source.size, target.size, strict=True):
            self.register_buffer(name, _compute_resize_weights(side, target_side))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, C, S', S')."""
        pixels = images * self.source_std + self.source_mean
        if self.is_resized:
            with torch.autocast(images.device.type, enabled=False):
                pixels = (self.rows @ pixels @ self.columns.mT).clamp(0, 1)
        return (pixels - self.mean) / self.std


def _compute_resize_weights(side: int, target_side: int) -> Tensor:
    """(S', S): the weight of each row in each target row."""
    identity = torch.eye(side)[None, None]
    return F.interpolate(identity, (target_side, side), mode="bicubic", antialias=True)[0, 0]


def check_run(run: "TrainingRun") -> None:
    """Refuse a run whose recipe has a distillation and that has no teacher, or the reverse, or that cannot learn so."""
    config, teacher = run.recipe.distillation, run.teacher
    if config is None or teacher is None:
        if config is not None or teacher is not None:
            raise UsageError(
                "a recipe with distillation needs a teacher, and no other takes one: `vitrail distill TEACHER`"
            )
        return
    if run.loss_function is not None:
        raise UsageError("a loss of your own does not know the teacher: omit `loss`")
    if run.class_weights and config.weight == 1:
        raise UsageError("--class-weights is for labels, and at distillation.weight=1 none is learned: omit it")
    check_student(run.config, config, shard=run.is_sharded)
    check_teacher(teacher, config, run.dataset.classes, run.preprocess)


def check_teacher(
    teacher: Trained, config: DistillationConfig, classes: tuple[str, ...], preprocess: PreprocessConfig
) -> list[int] | None:
    """The teacher's outputs for these classes, None for its features; refused if a student cannot learn from it."""
    own = require_preprocess(teacher, name="the teacher")
    channels, student_channels = len(own.mean), len(preprocess.mean)
    if channels != student_channels and student_channels != 1:
        raise UsageError(
            f"the teacher sees {pluralize(channels, 'channel')} and the student {student_channels}: choose a student"
            f" of {channels}, or of 1, whose gray the teacher sees in each of its own"
        )
    return None if config.kind == "features" else find_columns(teacher, classes)


def find_columns(teacher: Trained, classes: tuple[str, ...]) -> list[int]:
    """The teacher's outputs for these classes, by name; an error names a class that it does not know."""
    if teacher.labels is None or teacher.multi_label:
        raise UsageError(
            f"the teacher {teacher.origin.name} does not name its classes, or images have several: distill its features"
            " (--set distillation.kind=features)"
        )
    known = {name: index for index, name in enumerate(teacher.labels)}
    if unknown := [name for name in classes if name not in known]:
        raise UsageError(
            f"the teacher knows {pluralize(len(known), 'class')}, and not {unknown[0]!r} of the data: name the data's"
            " folders as the teacher's labels, or distill its features (--set distillation.kind=features)"
        )
    return [known[name] for name in classes]


def check_student(student: ModelConfig, config: DistillationConfig, *, shard: bool) -> None:
    """Refuse a student that cannot learn in this way."""
    if config.kind == "features" and not isinstance(student, ViTConfig):
        raise UsageError("features are distilled into ViTs and hybrids: --set distillation.kind=soft")
    if config.kind == "token" and not (isinstance(student, ViTConfig) and student.distillation_head):
        raise UsageError(
            "the student has no distillation token with a head: choose one of DeiT that has, or"
            " --set distillation.kind=hard"
        )
    if shard and config.kind in ("token", "features"):
        raise UsageError(f"distillation of the kind {config.kind} cannot be sharded: omit --shard")


def add_projection(student: Model, teacher: Model, generator: torch.Generator) -> None:
    """Give the student the linear map from its features to the teacher's."""
    projection = nn.Linear(student.config.num_features, teacher.config.num_features, bias=False)
    with torch.no_grad():
        projection.weight.normal_(0.0, student.config.num_features**-0.5, generator=generator)
    student.add_module(PROJECTION_NAME, projection)


def describe_teacher(teacher: Trained) -> dict[str, Any]:
    """What identifies a teacher in a run's config.json."""
    return {**to_json(teacher.origin), "weights": digest_tensors(teacher.model.state_dict())}
