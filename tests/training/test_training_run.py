"""What a run is: which images it learns from, when it is evaluated, what learns, and what is refused before it."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests import model_factory
from tests.data.image_files import write_image_folder
from vitrail.config import AugmentConfig, OptimizerConfig, Recipe, ScheduleConfig
from vitrail.data.dataset import Dataset
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.training import loop
from vitrail.training.loop import iterate_train_batches
from vitrail.training.step import TrainState, build_train_state
from vitrail.training.training_run import TrainingRun, adapt_to_dataset, make_run_config
from vitrail.weights.trained import Trained

CPU = torch.device("cpu")


def build_recipe(**changes: Any) -> Recipe:
    """A run of seconds: a ViT of 0.02 M parameters on 8 x 8 grey pixels."""
    fields: dict[str, Any] = {
        "model": "ti2",
        "settings": {"width": 32, "depth": 2, "mlp": 64, "heads": 2, "channels": 1},
        "image_size": 8,
        "batch": 64,
        "epochs": 1.0,
        "optimizer": OptimizerConfig(lr=3e-3, clip=1.0),
        "schedule": ScheduleConfig(warmup=2),
        "augment": AugmentConfig(crop="pad", flip=False),
        "source": "test",
    }
    return Recipe(**(fields | changes))


def build_finetune_recipe(**changes: Any) -> Recipe:
    """The same for a model that is given."""
    fields: dict[str, Any] = {
        "model": None,
        "settings": {},
        "image_size": None,
        "batch": 4,
        "schedule": ScheduleConfig(),
    }
    return build_recipe(**(fields | changes))


def build_digits_run(changes: dict[str, Any], **more: Any) -> TrainingRun:
    """The task of a recipe for digits."""
    fields: dict[str, Any] = {"recipe": build_recipe(**changes), "dataset": open_dataset("digits"), "device": CPU}
    return TrainingRun(**(fields | more))


def open_images(root: Path, **options: Any) -> Dataset:
    """A set of two classes, rose and tulip."""
    return open_dataset(str(write_image_folder(root / "set", "train", "val", "test", **({"each": 4} | options))))


def build_small_model(**changes: Any) -> Trained:
    """A small model to fine-tune."""
    return model_factory.build_trained(model_factory.build_vit(**changes))


def run_steps(task: TrainingRun, steps: int | None = None) -> tuple[dict[str, Tensor], TrainState, list[float]]:
    """The weights before, the state after all (or so many) steps, and the losses."""
    state, losses = build_train_state(task.build_model(), task.recipe, task.class_counts), []
    before = {name: value.detach().clone() for name, value in state.model.named_parameters()}
    plan = task.plan if steps is None else dataclasses.replace(task.plan, total_samples=steps * task.plan.batch_size)
    batches = iterate_train_batches(task)
    loop.train_steps(
        state, batches, task.training_data, plan, task.recipe, after_step=lambda m: losses.append(m.result.loss)
    )
    return before, state, losses


# --- what is trained on, and when it is evaluated --------------------------------------------------------------------


def test_everything_is_train_and_val_and_never_test(tmp_path: Path) -> None:
    dataset = open_images(tmp_path)
    task = TrainingRun(
        recipe=build_finetune_recipe(epochs=3),
        dataset=dataset,
        initial_model=adapt_to_dataset(build_small_model(), dataset, build_finetune_recipe()),
        device=CPU,
    )
    both = dataclasses.replace(task, train_on_val=True)
    names = {kind: {split.get_image_name(row) for row in range(len(split))} for kind, split in dataset.splits.items()}
    assert {task.train_split.get_image_name(row) for row in range(len(task.train_split))} == names["train"]
    assert {both.train_split.get_image_name(row) for row in range(len(both.train_split))} == names["train"] | names[
        "val"
    ]
    assert (task.class_counts, both.class_counts) == ([4, 4], [8, 8])
    assert (task.plan.total_steps, both.plan.total_steps) == (6, 12)
    assert both.training_data.order.num_samples == 16
    assert make_run_config(both)["train_on_val"] is True


@pytest.mark.parametrize(
    ("each", "epochs", "every"),
    [
        ((10, 3), 5, 1),  # evaluation costs a tenth of training: 3 / (3 * 0.1 * 10)
        ((10, 4), 5, 2),  # 4 / 3 of it, so every second epoch
        ((4, 4), 5, 4),  # 10 / 3
        ((2, 20), 5, 34),  # 100 / 3
        ((10, 1), 100, 1),
        ((10, 1), 101, 2),  # no more than 100 evaluations
        ((10, 1), 4000.5, 41),
        ((4, 4), 300, 4),
        ((4, 4), 500, 5),
    ],
)
def test_evaluations_are_rare_where_they_would_take_long(
    tmp_path: Path, each: tuple[int, int], epochs: float, every: int
) -> None:
    write_image_folder(tmp_path / "set", "train", each=each[0])
    write_image_folder(tmp_path / "set", "val", each=each[1], start=1000)
    dataset = open_dataset(str(tmp_path / "set"))
    task = TrainingRun(
        recipe=build_finetune_recipe(epochs=epochs),
        dataset=dataset,
        initial_model=adapt_to_dataset(build_small_model(), dataset, build_finetune_recipe()),
        device=CPU,
    )
    assert task.eval_every_epochs == every


def test_images_are_counted_by_class(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "set", "train", classes=("rose",), each=9)
    write_image_folder(tmp_path / "set", "train", classes=("tulip",), each=2, start=100)
    write_image_folder(tmp_path / "set", "val", each=1, start=200)
    dataset = open_dataset(str(tmp_path / "set"))
    task = TrainingRun(
        recipe=build_finetune_recipe(),
        dataset=dataset,
        initial_model=adapt_to_dataset(build_small_model(), dataset, build_finetune_recipe()),
        device=CPU,
    )
    assert (task.class_counts, task.imbalance) == ([9, 2], 4.5)


# --- what learns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "places"),
    [(0, {"head"}), (1, {"head", "norm", "blocks.2"}), (2, {"head", "norm", "blocks.2", "blocks.1"}), (None, None)],
)
def test_so_many_layers_below_the_head_move(tmp_path: Path, layers: int | None, places: set[str] | None) -> None:
    """Weights before and after three steps; the head is kept, so that gradients reach everything at once."""
    dataset = open_images(tmp_path)
    model = build_small_model(classes=2)
    model = dataclasses.replace(model, labels=dataset.classes)
    chosen = build_finetune_recipe(trainable_layers=layers, epochs=1.5)
    task = TrainingRun(
        recipe=chosen,
        dataset=dataset,
        initial_model=adapt_to_dataset(model, dataset, chosen, keep_head=True),
        device=CPU,
    )
    before, state, _ = run_steps(task)
    moved = {name for name, value in state.model.named_parameters() if not torch.equal(before[name], value)}
    expected = {
        name
        for name in before
        if places is None or ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) in places
    }
    assert moved == expected
    assert state.step == 3


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_a_balanced_run_begins_with_the_surprise_of_the_classes_sizes(tmp_path: Path, loss: Any) -> None:
    """A zero head says nothing, so the first loss is that of the offsets alone: by hand, 6 roses and 2 tulips."""
    write_image_folder(tmp_path / "set", "train", classes=("rose",), each=6)
    write_image_folder(tmp_path / "set", "train", classes=("tulip",), each=2, start=100)
    write_image_folder(tmp_path / "set", "val", each=1, start=200)
    dataset = open_dataset(str(tmp_path / "set"))
    chosen = build_finetune_recipe(logit_adjustment=True, loss=loss, batch=8)
    task = TrainingRun(
        recipe=chosen, dataset=dataset, initial_model=adapt_to_dataset(build_small_model(), dataset, chosen), device=CPU
    )
    _, _, losses = run_steps(task)
    rose, tulip = 6 / 8, 2 / 8
    by_hand = -(6 * math.log(rose) + 2 * math.log(tulip)) / 8  # of a softmax whose logits are log(share)
    if loss == "sigmoid":  # a yes or no of each class, whose shares are 3/4 and 1/4
        by_hand *= 2
    assert losses == [pytest.approx(by_hand, abs=1e-6)]
    _, _, plain = run_steps(dataclasses.replace(task, recipe=dataclasses.replace(chosen, logit_adjustment=False)))
    assert plain == [pytest.approx(math.log(2) * (1 if loss == "softmax" else 2), abs=1e-6)]


GOLDEN = {
    "adam": (
        *(2.30259, 2.30258, 2.29170, 2.30176, 2.27581, 2.32148, 2.30105, 2.27861, 2.22289, 2.26406),
        *(2.26808, 2.26554, 2.23312, 2.24548, 2.29199, 2.21767, 2.17828, 2.15387, 2.23406, 2.28125),
    ),
    "muon": (
        *(2.30259, 2.30258, 2.29170, 2.30787, 2.30793, 2.27055, 2.29073, 2.28978, 2.25694, 2.22883),
        *(2.25908, 2.25721, 2.22602, 2.24018, 2.25452, 2.18859, 2.15071, 2.15129, 2.21574, 2.25227),
    ),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_the_losses_are_those_that_were_written_down(kind: Any) -> None:
    """Twenty steps with mixup, smoothing, decay, clipping and warm-up: a change of any of them is larger than 1e-3."""
    changes = {
        "optimizer": OptimizerConfig(kind=kind, lr=1e-2, weight_decay=0.05, momentum=0.95, clip=1.0),
        "augment": AugmentConfig(crop="pad", flip=False, mixup=0.2),
        "label_smoothing": 0.1,
    }
    assert run_steps(build_digits_run(changes), steps=20)[2] == pytest.approx(GOLDEN[kind], abs=1e-3)


# --- a model made to fit ---------------------------------------------------------------------------------------------


def test_a_fitted_model_has_a_zero_head_and_the_classes_of_the_data(tmp_path: Path) -> None:
    dataset, model = open_images(tmp_path), build_small_model()
    fresh = adapt_to_dataset(model, dataset, build_finetune_recipe())
    assert fresh.labels == ("rose", "tulip")
    assert "head.weight (2, 32), head.bias (2): new, zeros" in fresh.origin.changes
    probed = adapt_to_dataset(model, dataset, build_finetune_recipe(head_init="probe"))
    assert "head.weight (2, 32), head.bias (2): new, from a probe of the features" in probed.origin.changes
    assert fresh.model.head.weight.shape == (2, 32)
    assert not fresh.model.head.weight.any()
    assert not fresh.model.head.bias.any()
    assert fresh.preprocess == model.preprocess
    assert fresh.temperature == 1
    old = model.model.state_dict()
    assert all(torch.equal(old[name], value) for name, value in fresh.model.state_dict().items() if "head" not in name)
    assert model.model.head.weight.shape == (7, 32)  # the caller's own stays


def test_a_fitted_model_takes_the_recipes_image_size(tmp_path: Path) -> None:
    """Positions are stretched corner to corner; of the preprocessing only sizes change, their ratio kept."""
    dataset, model = open_images(tmp_path), build_small_model()
    assert model.preprocess is not None
    view = dataclasses.replace(model.preprocess, resize=(40,), interpolation="bilinear")  # a crop of 4/5
    model = dataclasses.replace(model, preprocess=view)
    fresh = adapt_to_dataset(model, dataset, build_finetune_recipe(image_size=48))
    assert fresh.model.config.image_size == (48, 48)
    prefix, patches = model.model.pos_embed[:, :1], model.model.pos_embed[:, 1:]
    square = patches.reshape(1, 4, 4, 32).permute(0, 3, 1, 2)
    stretched = F.interpolate(square, (6, 6), mode="bilinear", align_corners=True).flatten(2).mT
    torch.testing.assert_close(fresh.model.pos_embed, torch.cat([prefix, stretched], dim=1))
    assert fresh.preprocess == dataclasses.replace(view, size=(48, 48), resize=(60,))


def test_a_recipe_may_say_how_large_the_short_side_is_before_the_crop(tmp_path: Path) -> None:
    fresh = adapt_to_dataset(
        build_small_model(), open_images(tmp_path), build_finetune_recipe(image_size=48, resize=7 / 6)
    )
    assert fresh.preprocess is not None
    assert (fresh.preprocess.size, fresh.preprocess.resize) == ((48, 48), (56,))


def test_a_kept_head_is_put_into_the_order_of_the_data(tmp_path: Path) -> None:
    dataset = open_images(tmp_path, classes=("aster", "rose", "tulip"))
    model = dataclasses.replace(build_small_model(classes=3), labels=("tulip", "aster", "rose"), temperature=2.0)
    fresh = adapt_to_dataset(model, dataset, build_finetune_recipe(), keep_head=True)
    assert fresh.labels == ("aster", "rose", "tulip")
    images = model_factory.draw_images(model.model.config)
    torch.testing.assert_close(fresh.model(images), model.model(images)[:, [1, 2, 0]], atol=1e-6, rtol=0)
    same = dataclasses.replace(model, labels=dataset.classes)
    assert torch.equal(
        adapt_to_dataset(same, dataset, build_finetune_recipe(), keep_head=True).model(images), model.model(images)
    )


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    dataset = open_images(tmp_path)
    with pytest.raises(UsageError, match="does not say how images must be prepared"):
        adapt_to_dataset(dataclasses.replace(build_small_model(), preprocess=None), dataset, build_finetune_recipe())
    with pytest.raises(
        UsageError, match="9 classes only in the model or only in the data, such as 'kind 0' in the model"
    ):
        adapt_to_dataset(build_small_model(), dataset, build_finetune_recipe(), keep_head=True)
    with pytest.raises(UsageError, match="have no names, so its head cannot be kept"):
        adapt_to_dataset(
            dataclasses.replace(build_small_model(), labels=None), dataset, build_finetune_recipe(), keep_head=True
        )
    with pytest.raises(UsageError, match=r"49 x 49 does not divide into patches of 8 x 8 pixels; the nearest is 48"):
        adapt_to_dataset(build_small_model(), dataset, build_finetune_recipe(image_size=49))


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_contradicts_itself_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    dataset = open_images(tmp_path)
    start = adapt_to_dataset(build_small_model(), dataset, build_finetune_recipe())
    with pytest.raises(UsageError, match="the model's classes are not those of the data"):
        TrainingRun(
            recipe=build_finetune_recipe(), dataset=dataset, initial_model=build_small_model(classes=2), device=CPU
        )
    one_of_both = "a recipe names a preset, or is for fine-tuning and is given a model: one of both"
    with pytest.raises(UsageError, match=one_of_both):
        TrainingRun(recipe=build_finetune_recipe(), dataset=dataset, device=CPU)
    with pytest.raises(UsageError, match=one_of_both):
        TrainingRun(recipe=build_recipe(schedule=ScheduleConfig()), dataset=dataset, initial_model=start, device=CPU)
    with pytest.raises(UsageError, match="a warm-up of 3 steps and a cooldown of 0 do not fit into 2 steps"):
        TrainingRun(
            recipe=build_finetune_recipe(schedule=ScheduleConfig(warmup=3)),
            dataset=dataset,
            initial_model=start,
            device=CPU,
        )
    bit = adapt_to_dataset(model_factory.build_trained(model_factory.build_bit()), dataset, build_finetune_recipe())
    task = TrainingRun(recipe=build_finetune_recipe(dropout=0.1), dataset=dataset, initial_model=bit, device=CPU)
    with pytest.raises(UsageError, match="a ResNet has neither dropout nor stochastic depth"):
        task.build_model()


def test_data_that_cannot_be_learned_from_is_refused(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", "train", "val", each=3)
    write_image_folder(root, "val", classes=("orchid",), each=1)
    with pytest.raises(DataError, match="1 class without a training image, such as orchid"):
        build_digits_run({}, dataset=open_dataset(str(root)))
    with pytest.raises(DataError, match="has the splits test; train and val are needed"):
        build_digits_run({}, dataset=open_dataset(str(write_image_folder(tmp_path / "only", "test", each=3))))
    listed = tmp_path / "set" / "several.csv"
    rows = [f"{top}/rose/{number}.jpg,a;b,{top}" for top in ("train", "val") for number in range(3)]
    listed.write_text("path,labels,split\n" + "\n".join(rows) + "\n")
    with pytest.raises(UsageError, match="several labels are learned with the loss sigmoid, and this recipe has soft"):
        build_digits_run({}, dataset=open_dataset(str(listed)))
    build_digits_run({"loss": "sigmoid", "epochs": 64}, dataset=open_dataset(str(listed)))
    listed.write_text("path,split\n" + "\n".join(row.replace("a;b,", "") for row in rows) + "\n")
    with pytest.raises(DataError, match="has no labels to learn"):
        build_digits_run({}, dataset=open_dataset(str(listed)))


def test_what_makes_no_run_is_refused_before_it() -> None:
    with pytest.raises(UsageError, match=r"0\.0001 epochs of 1,439 images: not one step"):
        build_digits_run({"epochs": 0.0001})
    with pytest.raises(UsageError, match="workers is -1"):
        build_digits_run({}, workers=-1)
    classes = ("caf\udce9", *open_dataset("digits").classes[1:])
    with pytest.raises(DataError, match="has no valid name in UTF-8"):
        build_digits_run({}, dataset=dataclasses.replace(open_dataset("digits"), classes=classes))
