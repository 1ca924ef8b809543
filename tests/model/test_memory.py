"""What training keeps in memory against what autograd saves, and against figures by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import making
from vitrail import presets
from vitrail.errors import UsageError
from vitrail.model import memory
from vitrail.model.build import Model
from vitrail.model.memory import Sizes

# On the CPU group norm and softmax take bf16 as it comes, and dropout's mask is a number of its input's kind.
ON_CPU = {"bf16": Sizes(product=2, norm=2, mask=2), "float32": Sizes(product=4, norm=4, mask=4)}
LARGER: dict[str, Any] = {"width": 96, "mlp": 160, "heads": 4, "image_size": (64, 64), "depth": 3}


def saved(model: Model, images: Tensor, *, bf16: bool) -> int:
    """Bytes of the storages that autograd saves, weights left out, pixels included."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # alive, so that no address is given twice

    def keep(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage

    def never(_: object) -> Tensor:
        raise AssertionError("there is no backward pass")

    model.train()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    with torch.autograd.graph.saved_tensors_hooks(keep, never), autocast:
        model(images)
    return sum(storage.nbytes() for storage in storages.values()) + images.nbytes


@pytest.mark.parametrize("precision", ON_CPU)
@pytest.mark.parametrize("change", making.VARIANTS.values(), ids=making.VARIANTS)
def test_a_vit_keeps_what_autograd_saves(change: dict[str, Any], precision: str) -> None:
    model = making.vit(**(LARGER | change))
    images = making.images(model.config, 3)
    found = memory.copies(model.config, ON_CPU[precision]) + 3 * memory.kept(model.config, sizes=ON_CPU[precision])
    assert found == pytest.approx(saved(model, images, bf16=precision == "bf16"), rel=0.02)


@pytest.mark.parametrize("precision", ON_CPU)
def test_a_resnet_keeps_what_autograd_saves(precision: str) -> None:
    model = making.bit(image_size=(64, 64))
    images = making.images(model.config, 8)
    found = memory.copies(model.config, ON_CPU[precision]) + 8 * memory.kept(model.config, sizes=ON_CPU[precision])
    assert found == pytest.approx(saved(model, images, bf16=precision == "bf16"), rel=0.02)
