"""Vectors of texts equal those of transformers' and open_clip's own models; files of vectors are checked."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests import text_towers
from tests.text_towers import LABELS, TEMPLATES
from vitrail.errors import ModelError, UsageError
from vitrail.runtime.workers import hide_progress
from vitrail.weights import text_vectors
from vitrail.weights.text_vectors import TextVectors, canonicalize_text, compute_text_vectors, read_text_vectors

CPU = torch.device("cpu")


def compute(folder: Path, labels: Sequence[str] = LABELS, templates: Sequence[str] = TEMPLATES) -> TextVectors:
    return compute_text_vectors(folder, labels, templates, CPU, hide_progress)


def average(vectors: Tensor) -> Tensor:
    """(L T, E) -> the mean direction of each label (L, E)."""
    return F.normalize(F.normalize(vectors, dim=1).unflatten(0, (len(LABELS), len(TEMPLATES))).mean(dim=1), dim=1)


TEXTS = [template.replace("{}", label) for label in LABELS for template in TEMPLATES]


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (text_towers.write_clip, {"padding": True}),
        (text_towers.write_metaclip2, {"padding": True}),
        (text_towers.write_siglip, {"padding": "max_length", "max_length": 64}),
        (text_towers.write_siglip2, {"padding": "max_length", "max_length": 64}),
        (text_towers.write_sentencepiece_siglip, {"padding": "max_length", "max_length": 64}),
    ],
)
def test_vectors_equal_those_of_transformers(
    write: Callable[[Path], Any], options: dict[str, Any], tmp_path: Path
) -> None:
    if write is text_towers.write_sentencepiece_siglip:
        pytest.importorskip("sentencepiece", reason="the extra `zero-shot` is not installed")
    model = write(tmp_path)
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path)(TEXTS, return_tensors="pt", **options)
    with torch.inference_mode():
        expected = average(model.get_text_features(**tokens).pooler_output)
    computed = compute(tmp_path)
    assert (expected[0] - expected[1]).abs().max() > 0.02
    assert (computed.vectors - expected).abs().max() <= 1e-6
    assert computed.scale == pytest.approx(model.logit_scale.exp().item())
    assert computed.bias == (-1.5 if "siglip" in model.config.model_type else None)
    assert computed.source == f"{tmp_path.name} by transformers"


@pytest.mark.parametrize("siglip", [False, True])
def test_vectors_equal_those_of_open_clip(siglip: bool, tmp_path: Path) -> None:
    open_clip = pytest.importorskip("open_clip", reason="open_clip is not installed: pip install open_clip_torch")
    model = text_towers.write_open_clip(tmp_path, siglip=siglip)
    with torch.inference_mode():
        expected = average(model.encode_text(open_clip.get_tokenizer(f"local-dir:{tmp_path}")(TEXTS)))
    computed = compute(tmp_path)
    assert (computed.vectors - expected).abs().max() <= 1e-6
    assert (computed.bias, computed.source) == (-1.5 if siglip else None, f"{tmp_path.name} by open_clip")


def test_more_texts_than_a_batch_give_the_same_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_towers.write_clip(tmp_path)
    whole = compute(tmp_path).vectors
    monkeypatch.setattr(text_vectors, "_BATCH_SIZE", 5)
    assert (compute(tmp_path).vectors - whole).abs().max() <= 1e-6


def test_siglip_gets_texts_as_it_was_trained_on_them(tmp_path: Path) -> None:
    assert (
        canonicalize_text("  A photo of the Golden_Retriever,\n (small)! ") == "a photo of the golden retriever small"
    )
    text_towers.write_siglip(tmp_path)
    canonical, other = (
        compute(tmp_path, [label], ["a photo of the {}"]) for label in ("golden retriever", "Golden_Retriever?")
    )
    assert torch.equal(canonical.vectors, other.vectors)


def test_half_precision_weights_are_computed_in_float32(tmp_path: Path) -> None:
    text_towers.write_clip(tmp_path)
    path = tmp_path / "model.safetensors"
    halves = {name: tensor.half() for name, tensor in load_file(path).items()}
    save_file(halves, path, {"format": "pt"})
    rounded = compute(tmp_path).vectors
    save_file({name: tensor.float() for name, tensor in halves.items()}, path, {"format": "pt"})
    assert (compute(tmp_path).vectors - rounded).abs().max() <= 1e-6


def test_a_projection_wider_than_the_towers_own_default_is_read(tmp_path: Path) -> None:
    """Published folders state it beside the towers, and leave another number in the text tower's settings."""
    text_towers.write_clip(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["text_config"]["projection_dim"] = 512
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert compute(tmp_path).vectors.shape == (len(LABELS), 24)


def test_a_text_that_is_too_long_is_named(tmp_path: Path) -> None:
    text_towers.write_clip(tmp_path)
    with pytest.raises(UsageError, match=r"'a photo of cat cat .* tokens; this model reads 20: shorten it"):
        compute(tmp_path, ["cat " * 20], ["a photo of {}"])


def test_folders_without_a_whole_text_side_are_refused(tmp_path: Path) -> None:
    text_towers.write_clip(tmp_path)
    assert text_vectors.has_text_tower(tmp_path)
    assert not text_vectors.has_text_tower(tmp_path / "config.json")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {name: tensor for name, tensor in tensors.items() if "text_projection" not in name}, path, {"format": "pt"}
    )
    with pytest.raises(ModelError, match=r"no weights for 'text_projection.weight'"):
        compute(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer: it holds none of tokenizer.json, vocab.json"):
        compute(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "blip"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(
        ModelError, match="has the model_type 'blip'; text towers of clip, metaclip_2, siglip, siglip2 are read"
    ):
        compute(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    text_towers.write_clip(tmp_path / "clip")
    text_towers.write_siglip(tmp_path / "siglip")
    for path in (tmp_path / "clip").glob("tokenizer*"):
        path.replace(tmp_path / "siglip" / path.name)
    with pytest.raises(ModelError, match="has more tokens than its text tower: 24"):
        compute(tmp_path / "siglip")


def test_a_damaged_tokenizer_is_one_line(tmp_path: Path) -> None:
    text_towers.write_clip(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises(ModelError, match=f"the text tower of {re.escape(str(tmp_path))} cannot be read: ") as caught:
        compute(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("library", "named"), [("transformers", "'vitrail[zero-shot]'"), ("open_clip", "open_clip_torch")]
)
def test_a_missing_library_is_named(library: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_towers.write_clip(tmp_path)
    if library == "open_clip":
        (tmp_path / "config.json").unlink()
        (tmp_path / "open_clip_config.json").write_text("{}")
        (tmp_path / "model.safetensors").rename(tmp_path / "open_clip_model.safetensors")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=f"needs {library}: pip install {re.escape(named)}. Or .* --text-vectors FILE"):
        compute(tmp_path)


def test_vectors_come_from_arrays_and_files_in_any_float_type(tmp_path: Path) -> None:
    vectors = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    expected = F.normalize(vectors, dim=1)
    np.save(tmp_path / "texts.npy", vectors.double().numpy() * 7)
    scales = {"logit_scale": torch.tensor([4.0]), "logit_bias": torch.tensor(-10.0)}
    save_file({"texts": vectors.half()} | scales, tmp_path / "texts.safetensors")
    for source in (vectors, vectors.numpy(), tmp_path / "texts.npy"):
        texts = read_text_vectors(source)
        assert (texts.vectors - expected).abs().max() <= 1e-6
        assert (texts.scale, texts.bias) == (None, None)
    texts = read_text_vectors(tmp_path / "texts.safetensors")
    assert (texts.vectors - expected).abs().max() <= 1e-3
    assert texts.scale == pytest.approx(54.59815)
    assert texts.bias == -10


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3)), "a row with NaN, infinity or nothing but zeros"),
        (np.full((2, 3), np.nan), "a row with NaN, infinity or nothing but zeros"),
        (np.ones(3), r"torch.float64 of shape \(3,\); vectors of texts are"),
        (np.ones((2, 3), int), "torch.int64 of shape"),
    ],
)
def test_arrays_that_are_no_vectors_are_refused(array: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_text_vectors(array)


def test_files_that_are_no_vectors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a .npy or .safetensors file, not"):
        read_text_vectors(tmp_path / "texts.csv")
    with pytest.raises(ModelError, match=r"cannot be read: .*No such file"):
        read_text_vectors(tmp_path / "texts.npy")
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ModelError, match=r"cannot be read: .*pickle"):
        read_text_vectors(tmp_path / "objects.npy")
    save_file({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match="has 2 tensors of two dimensions"):
        read_text_vectors(tmp_path / "two.safetensors")
    save_file({"a": torch.ones(2, 3), "logit_scale": torch.ones(2)}, tmp_path / "scales.safetensors")
    with pytest.raises(ModelError, match=r"logit_scale has the shape \(2,\); it is one number"):
        read_text_vectors(tmp_path / "scales.safetensors")
