"""The graph before it is written: it computes what the model does, of the pixels that every command makes."""

import dataclasses
import json

import pytest
import torch

from tests import model_factory
from vitrail.config import PreprocessConfig
from vitrail.errors import UsageError
from vitrail.export import export, graph
from vitrail.model.resnet import BiT
from vitrail.model.vit import Model
from vitrail.weights.trained import Trained

PREPROCESS = PreprocessConfig(
    size=(24, 40), resize=(48,), interpolation="area", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
)


def equals_vitrail(trained: Trained) -> bool:
    """Whether graph and model agree to the bit."""
    pixels = export.make_test_pixels(3, trained)
    with torch.inference_mode():
        here, there = graph.ExportGraph(trained)(pixels), export.compute_reference_outputs(trained, pixels)
    assert tuple(here) == tuple(there) == graph.get_output_names(trained)
    return all(torch.equal(here[name], there[name]) for name in there)


@pytest.mark.parametrize("variant", model_factory.VARIANTS)
def test_it_says_what_every_kind_of_model_says_to_the_bit(variant: str) -> None:
    assert equals_vitrail(
        model_factory.build_trained(model_factory.build_vit(**model_factory.VARIANTS[variant]), temperature=1.7)
    )


@pytest.mark.parametrize("size", [(32, 32), (37, 50), (33, 64)])
def test_it_says_what_a_resnet_says_whose_border_of_zeros_may_be_the_largest(size: tuple[int, int]) -> None:
    trained = model_factory.build_trained(model_factory.build_bit(image_size=size))
    assert isinstance(trained.model, BiT)
    assert equals_vitrail(trained)
    negative = torch.full((1, 3, *size), -1.0)
    with torch.inference_mode():
        expected = trained.model.stem(negative)
        assert torch.equal(graph.PaddingFreeBiTStem(trained.model.stem, size)(negative), expected)
    assert (expected[:, :, 0] >= 0).all()


def test_several_labels_have_a_probability_each() -> None:
    trained = model_factory.build_trained(model_factory.build_vit(), multi_label=True)
    assert equals_vitrail(trained)
    with torch.inference_mode():
        outputs = graph.ExportGraph(trained)(export.make_test_pixels(1, trained))
    assert torch.equal(outputs["probabilities"], outputs["logits"].sigmoid())


@pytest.mark.parametrize(
    "model",
    [
        model_factory.build_vit(),
        model_factory.build_vit(positions="relative"),
        model_factory.build_vit(positions="sincos-2d"),
        model_factory.build_vit(**model_factory.VARIANTS["rotary-index"] | {"image_size": (32, 32)}),
        model_factory.build_vit(positions="relative-bias"),
        model_factory.build_bit(),
    ],
)
def test_images_may_have_another_size_than_positions(model: Model) -> None:
    assert model.config.image_size != PREPROCESS.size
    trained = model_factory.build_trained(model, preprocess=PREPROCESS)
    pixels = export.make_test_pixels(2, trained)
    with torch.inference_mode():
        logits = graph.ExportGraph(trained)(pixels)["logits"]
    torch.testing.assert_close(logits, export.compute_reference_outputs(trained, pixels)["logits"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", ["rotary-normalized", "sincos"])
def test_a_trace_leaves_no_stand_ins_for_positions_behind(variant: str) -> None:
    """Torch's own export, too, of a grid that no model has met before."""
    model = model_factory.build_vit(**model_factory.VARIANTS[variant] | {"image_size": (56, 88)})
    images = model_factory.draw_images(model.config)
    program = torch.export.export(model, (images,))
    torch.testing.assert_close(program.module()(images), model(images))


def test_the_model_stays_as_it_was() -> None:
    trained = model_factory.build_trained(model_factory.build_vit(positions="sincos-2d"))
    trained.model.train()
    before = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    graph.export_program(trained)
    assert trained.model.training
    assert trained.model.config.positions == "sincos-2d"
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.model.state_dict().items())


def test_metadata_say_all_that_the_other_side_needs() -> None:
    labels = ("Käfer", 'a "b"', *"cdefg")
    trained = model_factory.build_trained(
        model_factory.build_vit(),
        preprocess=PREPROCESS,
        labels=labels,
        temperature=1.5,
        multi_label=True,
        threshold=0.25,
    )
    metadata = {name: json.loads(text) for name, text in graph.build_metadata(trained).items()}
    assert metadata["labels"] == list(labels)
    assert (metadata["temperature"], metadata["multi_label"], metadata["threshold"]) == (1.5, True, 0.25)
    assert metadata["pixels"] == {
        "channels": 3,
        "size": [24, 40],
        "resize": [48],
        "interpolation": "area",
        "crop_rounding": "nearest",
    }
    assert metadata["normalization"] == {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    assert metadata["origin"]["name"] == "test"


def test_a_model_that_does_not_say_how_images_are_prepared_is_refused() -> None:
    bare = dataclasses.replace(model_factory.build_trained(model_factory.build_vit()), preprocess=None)
    with pytest.raises(UsageError, match="--preprocess imagenet"):
        graph.export_program(bare)
