"""The walk through equations 1 to 4 computes what the model computes, and its rows add up."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests import model_factory
from vitrail.data.transforms import normalize
from vitrail.errors import UsageError
from vitrail.inference.classifier import Classifier
from vitrail.report.forward_trace import SHOWN_VALUES, trace_forward
from vitrail.weights.trained import Trained

HEADED = {name: settings for name, settings in model_factory.VARIANTS.items() if settings.get("classes", 7)}


def pixels(trained: Trained, seed: int = 0) -> torch.Tensor:
    config = trained.model.config
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (config.channels, *config.image_size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("name", HEADED)
def test_the_walk_ends_with_the_models_own_answer(name: str) -> None:
    trained = model_factory.build_trained(model_factory.build_vit(**model_factory.VARIANTS[name]), temperature=1.7)
    image = pixels(trained)
    found = trace_forward(trained, image)
    assert trained.preprocess is not None
    with torch.no_grad():
        logits = trained.model(normalize(image[None], trained.preprocess))[0]
    best = logits.argsort(descending=True)[:5]
    assert [each.logit for each in found.top_classes] == pytest.approx(logits[best].tolist(), abs=1e-4)
    probabilities = (logits / 1.7).softmax(dim=0)[best]
    assert [each.probability for each in found.top_classes] == pytest.approx(probabilities.tolist(), abs=1e-4)
    assert trained.labels is not None
    assert [each.label for each in found.top_classes] == [trained.labels[place] for place in best.tolist()]


def test_probabilities_are_those_that_a_user_gets() -> None:
    trained = model_factory.build_trained(model_factory.build_vit(), temperature=0.4)
    image = pixels(trained)
    [answer] = Classifier(trained, device="cpu")([Image.fromarray(image.permute(1, 2, 0).numpy())])
    found = trace_forward(trained, image).top_classes
    assert [each.label for each in found] == [label for label, _ in answer]
    assert [each.probability for each in found] == pytest.approx([share for _, share in answer], abs=1e-5)


def test_several_labels_have_a_probability_each() -> None:
    trained = model_factory.build_trained(model_factory.build_vit(), multi_label=True)
    for each in trace_forward(trained, pixels(trained)).top_classes:
        assert each.probability == pytest.approx(1 / (1 + np.exp(-each.logit)), abs=1e-6)


def test_equation_1_starts_with_the_patchs_own_pixels_and_adds_up() -> None:
    trained = model_factory.build_trained(model_factory.build_vit())  # patches of 8, so 4 x 4 of them
    image = pixels(trained)
    found = trace_forward(trained, image)
    assert found.followed_patch == (2, 2)
    row = (image[0, 16, 16 : 16 + SHOWN_VALUES].double() / 255 - 0.4) / 0.3
    assert found.embedding.patch == pytest.approx(row.tolist(), abs=1e-5)
    embedding = found.embedding
    assert embedding.position is not None
    sums = np.add(embedding.embedded, embedding.position)
    assert embedding.token == pytest.approx(sums.tolist(), abs=1e-5)


def test_equations_2_and_3_add_up_to_the_first_block() -> None:
    trained = model_factory.build_trained(model_factory.build_vit(layer_scale=True))
    image = pixels(trained)
    passing = trace_forward(trained, image).first_block
    assert passing.after_attention == pytest.approx(np.add(passing.before, passing.attention).tolist(), abs=1e-5)
    assert passing.after == pytest.approx(np.add(passing.after_attention, passing.mlp).tolist(), abs=1e-5)
    assert trained.preprocess is not None
    with torch.no_grad():
        x, _, grid = trained.model.embed(normalize(image[None], trained.preprocess))
        block = trained.model.blocks[0](x, grid)[0, 1 + 2 * 4 + 2]
    assert passing.after == pytest.approx(block[:SHOWN_VALUES].tolist(), abs=1e-5)


@pytest.mark.parametrize("name", ["plain", "placed-registers", "norm-mean", "relative", "wide", "hybrid"])
def test_attention_is_of_the_first_and_the_last_layer_and_sums_to_one(name: str) -> None:
    trained = model_factory.build_trained(model_factory.build_vit(**model_factory.VARIANTS[name]))
    found = trace_forward(trained, pixels(trained))
    assert [each.layer for each in found.attention] == [1, 3]
    for each in found.attention:
        assert each.heads.shape == (4, *found.grid)
        assert each.heads.sum() / 4 + each.prefix_share == pytest.approx(1, abs=1e-5)
        assert each.weight == pytest.approx(each.heads[0][found.followed_patch], abs=1e-6)
    assert found.shapes["attention"] == (4, found.shapes["z"][0], found.shapes["z"][0])


def test_a_model_of_one_layer_and_one_patch_has_a_walk_too() -> None:
    trained = model_factory.build_trained(model_factory.build_vit(depth=1, image_size=(8, 8)))
    found = trace_forward(trained, pixels(trained))
    assert [each.layer for each in found.attention] == [1]
    assert (found.grid, found.followed_patch, len(found.top_classes)) == ((1, 1), (0, 0), 5)


def test_a_model_without_a_head_ends_with_what_would_be_read() -> None:
    trained = model_factory.build_trained(model_factory.build_vit(classes=0))
    found = trace_forward(trained, pixels(trained))
    assert (found.top_classes, "head" in found.shapes, len(found.y)) == ((), False, SHOWN_VALUES)


def test_a_resnet_is_refused_in_a_sentence() -> None:
    trained = model_factory.build_trained(model_factory.build_bit())
    with pytest.raises(UsageError, match="equations 1 to 4 are those of a Vision Transformer"):
        trace_forward(trained, pixels(trained))
