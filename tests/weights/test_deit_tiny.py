"""A real ImageNet-trained ViT, if the development data is there."""

import tarfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vitrail import Classifier, Trained
from vitrail.weights.formats import WeightsFormat
from vitrail.weights.load import load, save
from vitrail.weights.trained import load_imagenet1k_classes


@pytest.fixture(scope="module")
def photographs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("imagenet")
    with tarfile.open(data / "imagenet_samples.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return sorted(folder.rglob("*.jpg"))


@pytest.mark.slow
def test_top_1_is_the_stated(deit_tiny: Path, photographs: list[Path]) -> None:
    """77.2 % of 500 images by an independent reference; within 0.4 points of it."""
    trained = load(deit_tiny)
    classify, classes = Classifier(trained, device="cpu"), [entry.wordnet_id for entry in load_imagenet1k_classes()]
    right = 0
    for start in range(0, len(photographs), 50):
        batch = photographs[start : start + 50]
        best = classify.predict_proba(batch).argmax(dim=1).tolist()
        right += sum(classes[index] == path.parent.name for index, path in zip(best, batch, strict=True))
    assert len(photographs) == 500
    assert right / 500 == pytest.approx(0.772, abs=0.004)


def compute_logits(trained: Trained) -> Tensor:
    with torch.inference_mode():
        return trained.model(torch.randn(4, 3, 224, 224, generator=torch.Generator().manual_seed(0)))


def test_logits_are_identical_through_every_format_and_back(deit_tiny: Path, tmp_path: Path) -> None:
    trained = load(deit_tiny)
    expected = compute_logits(trained)
    steps: list[tuple[WeightsFormat, str]] = [
        ("vitrail", "1.safetensors"),
        ("timm", "2"),
        ("timm", "3.safetensors"),
        ("transformers", "4"),
        ("torchvision", "5.pth"),
        ("torchvision", "6.safetensors"),
        ("vitrail", "7.safetensors"),
    ]
    for format_name, name in steps:
        save(trained, tmp_path / name, format_name)
        trained = load(tmp_path / name)
        assert torch.equal(compute_logits(trained), expected), (format_name, name)


def test_the_folder_and_the_bare_file_agree_and_say_what_they_know(deit_tiny: Path) -> None:
    folder, bare = load(deit_tiny), load(deit_tiny / "model.safetensors")
    assert folder.model.config == bare.model.config
    assert torch.equal(compute_logits(folder), compute_logits(bare))
    assert folder.labels is not None
    assert folder.labels[0] == "tench, Tinca tinca"
    assert folder.preprocess is not None
    assert (folder.preprocess.resize, folder.preprocess.size) == ((256,), (224, 224))
    assert bare.labels is None
    assert bare.preprocess is None
    assert any(text.startswith("heads: 3") for text in bare.origin.assumptions)
    assert any(text.startswith("preprocessing: unknown") for text in bare.origin.assumptions)


def test_transformers_computes_the_same_from_what_we_write(deit_tiny: Path, tmp_path: Path) -> None:
    from transformers import ViTForImageClassification

    trained = load(deit_tiny)
    save(trained, tmp_path / "model", "transformers")
    model = ViTForImageClassification.from_pretrained(tmp_path / "model").eval()
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert (model(images).logits - trained.model(images)).abs().max() <= 1e-5
