"""Inference on a GPU: the predictions of the CPU, whoever loads the images and however the model is computed."""

import csv
from pathlib import Path

import pytest
import torch

import vitrail
from tests import model_factory
from tests.data.image_files import write_image_folder
from vitrail.inference.precision import build_inference_functions
from vitrail.runtime.devices import finish_one_late, start_copy_to_cpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here: `make cuda`")


def read_rows(path: Path) -> list[tuple[str, str, float]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(row["image"], row["label"], float(row["probability"] or "nan")) for row in rows]


def test_cuda_predicts_a_folder_as_the_cpu_does(tmp_path: Path) -> None:
    """By processes after the first batches; an image that cannot be read is among them."""
    root = write_image_folder(tmp_path / "images", each=12)
    next(path for path in root.rglob("*") if path.is_file()).write_bytes(b"no image")
    model = model_factory.build_trained(model_factory.build_vit())
    for device in ("cpu", "cuda"):
        vitrail.predict(
            model, root, device=device, precision="float32", batch=4, workers=3, out=tmp_path / f"{device}.csv"
        )
    on_cpu, on_gpu = read_rows(tmp_path / "cpu.csv"), read_rows(tmp_path / "cuda.csv")
    assert [row[:2] for row in on_cpu] == [row[:2] for row in on_gpu]
    assert [row[2] for row in on_gpu] == pytest.approx([row[2] for row in on_cpu], abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("variant", sorted(model_factory.VARIANTS))
def test_cuda_bfloat16_is_close_to_float32(variant: str) -> None:
    trained = model_factory.build_trained(model_factory.build_vit(**model_factory.VARIANTS[variant]).cuda())
    pixels = torch.randint(
        0, 256, (6, trained.model.config.channels, *trained.model.config.image_size), dtype=torch.uint8
    )
    exact, lower = (build_inference_functions(trained, name) for name in ("float32", "bfloat16"))
    torch.testing.assert_close(
        lower.probabilities(pixels.cuda()), exact.probabilities(pixels.cuda()), atol=0.05, rtol=0
    )
    assert lower.features(pixels.cuda()).dtype == torch.float32


def test_cuda_compiled_batches_equal_others_nearly() -> None:
    """A short batch is computed without compiling again."""
    trained = model_factory.build_trained(model_factory.build_vit().cuda())
    pixels = torch.randint(0, 256, (8, 3, *trained.model.config.image_size), dtype=torch.uint8, device="cuda")
    compiled = build_inference_functions(trained, "bfloat16", compiled_batch=8).probabilities
    plain = build_inference_functions(trained, "bfloat16").probabilities
    torch.testing.assert_close(compiled(pixels), plain(pixels), atol=0.02, rtol=0)
    torch.testing.assert_close(compiled(pixels[:3]), plain(pixels[:3]), atol=0, rtol=0)


def test_cuda_copies_are_those_of_their_own_batch() -> None:
    """A batch is read after the next one was started."""
    values = (torch.full((1000, 1000), float(number), device="cuda") for number in range(5))
    copies = [copy for (copy,) in finish_one_late(start_copy_to_cpu(value) for value in values)]
    assert [copy.unique().tolist() for copy in copies] == [[0.0], [1.0], [2.0], [3.0], [4.0]]
