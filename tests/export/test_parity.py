"""How far a file may be from vitrail."""

import pytest
import torch

from tests import model_factory
from vitrail.errors import ModelError
from vitrail.export import export
from vitrail.export.graph import GraphRunner


def test_not_a_number_is_no_agreement() -> None:
    trained = model_factory.build_trained(model_factory.build_vit(depth=1))

    def broken(pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = export.compute_reference_outputs(trained, pixels)
        return outputs | {"logits": outputs["logits"].where(outputs["logits"] < outputs["logits"].max(), torch.nan)}

    with pytest.raises(ModelError, match="differs from vitrail's own float32 by nan"):
        export.check_parity(broken, trained)


def test_rounding_that_float32_has_itself_is_allowed_and_no_more() -> None:
    """Two huge weights of opposite sign leave few digits of what is between them; to a ViT that is no excuse."""
    trained = model_factory.build_trained(model_factory.build_bit())
    with torch.no_grad():
        trained.model.head.fc.weight[:, 0], trained.model.head.fc.weight[:, 1] = 3e4, -3e4
        trained.model.norm.weight[:2], trained.model.norm.bias[:2] = 1e-6, 1.0

    def shifted(by: float) -> GraphRunner:
        return lambda pixels: {
            name: values + by for name, values in export.compute_reference_outputs(trained, pixels).items()
        }

    assert export.check_parity(shifted(0.0), trained) == (0.0, export.MAX_DIFFERENCE)
    result = export.check_parity(shifted(1e-4), trained)
    assert export.MAX_DIFFERENCE < result.difference <= result.allowed < 1e-1
    with pytest.raises(ModelError, match="is allowed"):
        export.check_parity(shifted(0.5), trained)
    trained = model_factory.build_trained(model_factory.build_vit(depth=1))
    with pytest.raises(ModelError, match=r"by 1\.0e-04, and 1\.0e-05 is allowed"):
        export.check_parity(shifted(1e-4), trained)
