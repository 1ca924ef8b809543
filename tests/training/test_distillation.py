"""Distillation: losses by hand, a frozen teacher, a student that learns without labels, resumes and parts."""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests import model_factory
from tests.runtime.test_distributed import read_last_row, read_weights, start_ranks, wait_for_ranks
from tests.training.test_resume import build_run, digest_weights, run_training
from vitrail import load
from vitrail.config import DistillationConfig, OptimizerConfig, PreprocessConfig, ScheduleConfig
from vitrail.data.transforms import normalize
from vitrail.errors import StoppedError, UsageError
from vitrail.evaluation.predictions import Counts
from vitrail.model.cost import count_multiply_adds
from vitrail.runtime.distributed import ProcessGroup
from vitrail.training.distillation import (
    PROJECTION_NAME,
    Distillation,
    InputConversion,
    StudentOutputs,
    check_teacher,
)
from vitrail.training.losses import softmax_cross_entropy
from vitrail.training.step import _compute_gradients, _compute_loss
from vitrail.training.time_estimate import _compute_state_bytes, _count_teacher_flops
from vitrail.training.training_run import TrainingRun
from vitrail.weights.trained import Trained

LABELS = ("a", "b", "c")
SGD = OptimizerConfig(kind="sgd", lr=0.1, weight_decay=0.01, clip=1.0)  # whose steps are not of rounding alone


def build_teacher(**changes: Any) -> Trained:
    network = model_factory.build_vit(seed=1, depth=1, classes=3, **changes)
    return model_factory.build_trained(network, labels=("c", "a", "b"))


def build_distillation(**settings: Any) -> Distillation:
    teacher = build_teacher()
    assert teacher.preprocess is not None
    return Distillation(teacher, DistillationConfig(**settings), LABELS, teacher.preprocess)


def scramble(model: Any) -> Any:
    """A copy of the model with other weights."""
    return model_factory.fill_parameters(copy.deepcopy(model), 5)


def make_recipe(smoothing: float = 0.0) -> Any:
    return dataclasses.replace(build_run().recipe, label_smoothing=smoothing)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_the_soft_loss_is_hintons_by_hand() -> None:
    """Two classes' logits, T = 2: T^2 KL(teacher || student) and the label's cross-entropy, half each."""
    student, teacher, labels = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 4.0]]), torch.tensor([0])
    p = [1 / (1 + math.exp(2.0)), 1 / (1 + math.exp(-2.0))]  # of the teacher's 0 and 4, divided by 2
    q = [1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(1.0))]
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    expected = 0.5 * 4 * divergence + 0.5 * math.log(1 + math.exp(-2.0))
    distillation = build_distillation(kind="soft", temperature=2.0, weight=0.5)
    assert float(distillation.compute_loss(student, labels, teacher, make_recipe())) == pytest.approx(expected)
    unlabeled = distillation.compute_loss(student, torch.tensor([-1]), teacher, make_recipe())
    assert float(unlabeled) == pytest.approx(0.5 * 4 * divergence)


def test_each_head_of_a_token_learns_from_its_own_source() -> None:
    heads = [torch.tensor([[3.0, 0.0, 0.0]], requires_grad=True) for _ in range(2)]
    targets, labels = torch.tensor([[0.0, 5.0, 1.0]]), torch.tensor([2])
    loss = build_distillation(kind="token", weight=0.25).compute_loss(
        StudentOutputs(heads[0], heads[1], None), labels, targets, make_recipe()
    )
    expected = math.log(math.exp(3) + 2)
    assert float(loss.detach()) == pytest.approx(expected), "the class is 2 for one and 1 for the other"
    loss.backward()
    assert [int(head.grad.argmin()) for head in heads if head.grad is not None] == [2, 1]


def test_features_are_compared_by_their_direction() -> None:
    outputs = StudentOutputs(torch.zeros(2, 3), None, torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    targets = torch.tensor([[5.0, 0.0], [1.0, 0.0]])
    loss = build_distillation(kind="features", weight=0.5).compute_loss(
        outputs, torch.tensor([-1, -1]), targets, make_recipe()
    )
    assert float(loss) == pytest.approx(0.5), "0 for the first, half of 1 for the second"


def test_class_weights_multiply_the_labels_part_alone() -> None:
    """Two classes' equal logits, teacher and student agree: only the label's log 2 is left, half of it."""
    student, labels, weights = torch.zeros(1, 2), torch.tensor([1]), torch.tensor([1.0, 3.0])
    distillation = build_distillation(kind="soft", weight=0.5)
    loss = distillation.compute_loss(student, labels, student, make_recipe(), weights)
    assert float(loss) == pytest.approx(0.5 * 3 * math.log(2))


@pytest.mark.parametrize("kind", ["token", "features"])
def test_a_head_that_would_learn_nothing_is_refused(kind: Any) -> None:
    with pytest.raises(UsageError, match="never trains the head that learns the labels"):
        DistillationConfig(kind=kind, weight=1.0)


# --- the teacher ------------------------------------------------------------------------------------------------------


def test_the_teacher_sees_its_own_normalization_and_size_and_answers_in_the_students_order() -> None:
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    teacher = build_teacher()
    assert teacher.preprocess is not None
    source = PreprocessConfig(size=(32, 32), resize=(32, 32), mean=(0.1, 0.5, 0.9), std=(0.2, 0.3, 0.4))
    distillation = Distillation(teacher, DistillationConfig(), LABELS, source)
    expected = teacher.model(normalize(pixels, teacher.preprocess))[:, [1, 2, 0]]
    torch.testing.assert_close(distillation.compute_targets(normalize(pixels, source)), expected, rtol=1e-4, atol=1e-5)
    larger = dataclasses.replace(teacher.preprocess, size=(64, 48), resize=(64, 48))
    assert InputConversion(source, larger)(normalize(pixels, source)).shape == (3, 3, 64, 48)
    plain = normalize(torch.full((1, 3, 32, 32), 100, dtype=torch.uint8), source)
    torch.testing.assert_close(
        InputConversion(source, larger)(plain)[:, :, 0, 0],
        normalize(torch.full((1, 3, 1, 1), 100, dtype=torch.uint8), larger)[:, :, 0, 0],
    )


@pytest.mark.parametrize("size", [(224, 224), (24, 40)])
def test_inputs_are_resized_as_torch_resizes_them(size: tuple[int, int]) -> None:
    source = PreprocessConfig(size=(48, 64), resize=(48, 64), mean=(0.1, 0.5, 0.9), std=(0.2, 0.3, 0.4))
    target = dataclasses.replace(source, size=size, resize=size)
    pixels = torch.rand(2, 3, 48, 64, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (source.mean, source.std))
    resized = F.interpolate(pixels, size, mode="bicubic", antialias=True).clamp(0, 1)
    torch.testing.assert_close(
        InputConversion(source, target)((pixels - mean) / std), (resized - mean) / std, rtol=1e-4, atol=1e-5
    )


def test_a_teacher_without_the_datas_classes_is_refused() -> None:
    teacher = build_teacher()
    assert teacher.preprocess is not None
    with pytest.raises(UsageError, match=r"knows 3 classes, and not 'rose' of the data"):
        Distillation(teacher, DistillationConfig(), ("a", "rose"), teacher.preprocess)


def test_a_teacher_of_colors_sees_gray_in_each_channel_and_the_reverse_is_refused() -> None:
    teacher = build_teacher()
    assert teacher.preprocess is not None
    gray = PreprocessConfig(size=(32, 32), resize=(32, 32), mean=(0.5,), std=(0.25,))
    pixels = torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = normalize(pixels.expand(-1, 3, -1, -1), teacher.preprocess)
    torch.testing.assert_close(InputConversion(gray, teacher.preprocess)(normalize(pixels, gray)), expected)
    gray_teacher = dataclasses.replace(build_teacher(channels=1), preprocess=gray)
    with pytest.raises(UsageError, match="the teacher sees 1 channel and the student 3"):
        check_teacher(gray_teacher, DistillationConfig(), LABELS, teacher.preprocess)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A small model trained on the digits for two epochs."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    named = build_run()
    augment = dataclasses.replace(named.recipe.augment, mixup=0.0, cutmix=0.0, randaugment=None)
    recipe = dataclasses.replace(named.recipe, augment=augment, dropout=0.0, stochastic_depth=0.0, epochs=4, ema=0.0)
    run_training(build_run(recipe=recipe), folder)
    return load(folder)


def build_student_run(teacher: Trained, kind: str = "soft", **changes: Any) -> TrainingRun:
    """With dropout, mixup and an average of weights."""
    recipe = dataclasses.replace(
        build_run().recipe, distillation=DistillationConfig(kind=kind, weight=changes.pop("weight", 0.5)), epochs=1
    )
    if kind == "token":
        tokens = {"distillation_token": True, "distillation_head": True}
        recipe = dataclasses.replace(recipe, settings=recipe.settings | tokens)
    return build_run(**{"recipe": recipe, "teacher": teacher} | changes)


@pytest.mark.parametrize("kind", ["soft", "token", "features"])
def test_a_stopped_student_resumes_to_the_same_bits_and_the_teacher_stays_as_it_is(
    kind: str, teacher: Trained, tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in teacher.model.state_dict().items()}
    run_training(build_student_run(teacher, kind), tmp_path / "whole")

    def stop(step_end: Any) -> None:
        if step_end.step == 5:
            raise StoppedError("stopped by hand")

    with pytest.raises(StoppedError):
        run_training(build_student_run(teacher, kind), tmp_path / "stopped", stop)
    run_training(build_student_run(teacher, kind), tmp_path / "stopped", resume=True)
    assert digest_weights(tmp_path / "stopped") == digest_weights(tmp_path / "whole")
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.model.state_dict().items())
    names = load(tmp_path / "whole").model.state_dict().keys()
    assert not any(PROJECTION_NAME in name for name in names), "it is not kept"
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["teacher"]["weights"]
    other = dataclasses.replace(teacher, model=scramble(teacher.model))
    with pytest.raises(UsageError, match="teacher"):
        run_training(build_student_run(other, kind), tmp_path / "whole", resume=True)


def test_only_the_student_gets_gradients_and_parts_of_a_batch_give_the_same_loss(teacher: Trained) -> None:
    run = build_student_run(teacher, "token")
    state = run.build_state()
    size = run.preprocess.size
    images = torch.randn(8, len(run.preprocess.mean), *size, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(8) % 10
    state.model.eval()
    whole, norm, _ = _compute_gradients(state, [(images, targets)], run.recipe, 8, None)
    parts = [(images[:3], targets[:3]), (images[3:], targets[3:])]
    split, split_norm, _ = _compute_gradients(state, parts, run.recipe, 8, None)
    torch.testing.assert_close(split, whole)
    torch.testing.assert_close(split_norm, norm, rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is not None for parameter in state.model.parameters())
    assert state.distillation is not None
    assert all(parameter.grad is None for parameter in state.distillation.model.parameters())
    assert not state.distillation.model.training
    assert not {id(p) for p in state.distillation.model.parameters()} & {
        id(p) for group in state.optimizer.param_groups for p in group["params"]
    }


def test_a_step_weighs_the_labels_of_a_students_classes(teacher: Trained) -> None:
    """Weights of 3 add twice the labels' part of the loss, and nothing of the teacher's."""
    plain = build_student_run(teacher, "soft", weight=0.25)
    images = torch.randn(8, 1, *plain.preprocess.size, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(8) % 10
    losses = []
    for run in (plain, dataclasses.replace(plain, class_weights=(3.0,) * 10)):
        state = run.build_state()
        state.model.eval()
        losses.append(float(_compute_loss(state, images, targets, run.recipe, is_full_step=True).detach()))
    own = softmax_cross_entropy(state.model(images), targets, plain.recipe.label_smoothing)
    assert losses[1] - losses[0] == pytest.approx(0.75 * 2 * float(own.detach()), rel=1e-4)


def test_a_student_learns_the_digits_from_its_teacher_alone(teacher: Trained, tmp_path: Path) -> None:
    """At weight 1 no label enters the loss."""
    run = build_student_run(teacher, "soft", weight=1.0)
    augment = dataclasses.replace(run.recipe.augment, mixup=0.0, cutmix=0.0, randaugment=None)
    recipe = dataclasses.replace(run.recipe, augment=augment, epochs=4, dropout=0.0, stochastic_depth=0.0, ema=0.0)
    result = run_training(dataclasses.replace(run, recipe=recipe), tmp_path / "student")
    assert isinstance(result.counts, Counts)
    assert result.counts.top1 > 0.4, "chance is 0.1"


def test_a_recipe_and_its_teacher_belong_together(teacher: Trained) -> None:
    with pytest.raises(UsageError, match="a recipe with distillation needs a teacher"):
        build_run(teacher=teacher)
    with pytest.raises(UsageError, match="no distillation token"):
        build_run(
            recipe=dataclasses.replace(build_run().recipe, distillation=DistillationConfig(kind="token")),
            teacher=teacher,
        )


def build_short_run(teacher: Trained, kind: str, **changes: Any) -> TrainingRun:
    """Steps of 101 digits and a last one of 1, mixed, with an average of weights; what differs by rank is off."""
    run = build_student_run(teacher, kind)
    recipe = dataclasses.replace(run.recipe, batch=101, epochs=405 / 1439, dropout=0.0, stochastic_depth=0.0)
    recipe = dataclasses.replace(recipe, optimizer=SGD, schedule=ScheduleConfig(warmup=2))
    return dataclasses.replace(run, **{"recipe": recipe} | changes)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("soft", {"micro_batches": 3}),
        ("token", {"micro_batches": 3}),
        ("features", {"micro_batches": 3}),
        ("hard", {"shard": True}),
    ],
)
def test_two_ranks_compute_what_one_does(kind: str, changes: dict[str, Any], teacher: Trained, tmp_path: Path) -> None:
    """In the last step one rank has no image."""
    run_training(build_short_run(teacher, kind), tmp_path / "one")

    def work(group: ProcessGroup) -> None:
        run_training(build_short_run(teacher, kind, group=group, **changes), tmp_path / "two")

    assert wait_for_ranks(start_ranks(2, work)) == [0, 0]
    assert read_last_row(tmp_path / "two") == pytest.approx(read_last_row(tmp_path / "one"), rel=1e-5)
    torch.testing.assert_close(read_weights(tmp_path / "two"), read_weights(tmp_path / "one"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["token", "features"])
def test_a_student_with_more_outputs_is_not_sharded(kind: str, teacher: Trained) -> None:
    with pytest.raises(UsageError, match="cannot be sharded"):
        build_short_run(teacher, kind, group=ProcessGroup(world_size=2), shard=True)


# --- time, memory and GPUs --------------------------------------------------------------------------------------------


def test_an_estimate_counts_the_teachers_weights(teacher: Trained) -> None:
    run = build_student_run(teacher)
    alone = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, distillation=None), teacher=None)
    states = [each.build_state() for each in (run, alone)]
    difference = _compute_state_bytes(states[0], run.recipe) - _compute_state_bytes(states[1], run.recipe)
    assert difference == 4 * sum(parameter.numel() for parameter in teacher.model.parameters())
    assert _count_teacher_flops(run) == count_multiply_adds(teacher.model.config) * 2 * run.plan.total_samples
    assert _count_teacher_flops(alone) == 0
