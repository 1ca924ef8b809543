"""`vitrail.zero_shot` against transformers' own pipeline, and the use of its result as an ordinary model."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

import vitrail
from tests import text_towers
from tests.api.conftest import FAST, make_trained
from tests.hub_server import run_server
from tests.text_towers import LABELS, TEMPLATES
from vitrail.errors import UsageError
from vitrail.model.quantized import has_exact_int8_products
from vitrail.runtime.workers import hide_progress
from vitrail.weights.text_vectors import compute_text_vectors

WRITERS: dict[str, Callable[[Path], Any]] = {"clip": text_towers.write_clip, "siglip": text_towers.write_siglip}
PHOTO = "photos/test/rose/0.png"


@pytest.fixture(scope="module", params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole CLIP or SigLIP of transformers."""
    path = tmp_path_factory.mktemp("models") / request.param
    WRITERS[request.param](path)
    return path


def is_siglip(folder: Path) -> bool:
    return folder.name == "siglip"


def make_photos() -> list[Image.Image]:
    """Photograph-like images, larger than the crop and not square."""
    random = np.random.default_rng(0)
    coarse = [Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8)) for _ in range(3)]
    sizes = [(120, 120), (90, 130), (150, 80)]
    return [image.resize(size, Image.Resampling.BICUBIC) for image, size in zip(coarse, sizes, strict=True)]


def test_probabilities_equal_those_of_transformers_pipeline(folder: Path) -> None:
    """From images to probabilities. Their processor with Pillow is the one that resizes as vitrail does."""
    kind = "siglip" if is_siglip(folder) else "clip"
    pipeline = transformers.pipeline(
        "zero-shot-image-classification",
        model=transformers.AutoModel.from_pretrained(folder),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        image_processor=text_towers.build_image_processor(kind),
        device="cpu",
    )
    trained = vitrail.zero_shot(folder, LABELS, templates=TEMPLATES[0])
    spreads = []
    for photo, ours in zip(make_photos(), vitrail.Classifier(trained, device="cpu")(make_photos()), strict=True):
        theirs = pipeline(photo, candidate_labels=list(LABELS), hypothesis_template=TEMPLATES[0])
        assert [label for label, _ in ours] == [row["label"] for row in theirs]
        assert [value for _, value in ours] == pytest.approx([row["score"] for row in theirs], abs=1e-4)
        spreads.append(ours[0][1] - ours[-1][1])
    assert max(spreads) > 0.01


def test_logits_equal_those_of_transformers(folder: Path) -> None:
    model: Any = transformers.AutoModel.from_pretrained(folder)
    padding = {"padding": "max_length", "max_length": 64} if is_siglip(folder) else {"padding": True}
    texts = [TEMPLATES[1].replace("{}", label) for label in LABELS]
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(texts, return_tensors="pt", **padding)
    trained = vitrail.zero_shot(folder, LABELS, templates=TEMPLATES[1])
    pixels = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(pixel_values=pixels, **tokens).logits_per_image
        logits = trained.model(pixels)
    assert (expected[:, 0] - expected[:, 2]).abs().max() > 0.1
    assert (logits - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("siglip", [False, True])
def test_logits_equal_those_of_open_clip(siglip: bool, tmp_path: Path) -> None:
    open_clip = pytest.importorskip("open_clip", reason="open_clip is not installed: pip install open_clip_torch")
    model = text_towers.write_open_clip(tmp_path / "model", siglip=siglip)
    texts = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'model'}")(
        [TEMPLATES[1].replace("{}", label) for label in LABELS]
    )
    trained = vitrail.zero_shot(tmp_path / "model", LABELS, templates=TEMPLATES[1])
    pixels = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, _ = model.get_logits(pixels, texts)
        logits = trained.model(pixels)
    assert (expected[:, 0] - expected[:, 2]).abs().max() > 0.1
    assert (logits - expected).abs().max() <= 1e-5
    assert trained.multi_label == siglip


def test_a_label_is_the_mean_direction_of_its_texts(folder: Path, tmp_path: Path) -> None:
    def get_head(templates: Any) -> Any:
        weight: Any = vitrail.zero_shot(folder, LABELS, templates=templates).model.head.weight
        return weight

    several = get_head(TEMPLATES)
    single = torch.stack([get_head(each) for each in TEMPLATES])
    scale = single.norm(dim=2).mean()
    expected = torch.nn.functional.normalize(single.mean(dim=0), dim=1) * scale
    assert (several - expected).abs().max() <= 1e-5
    (tmp_path / "templates.txt").write_text("\n".join(TEMPLATES) + "\n\n", encoding="utf-8")
    assert torch.equal(get_head("templates.txt"), several)


def test_vectors_from_a_file_give_the_same_model(folder: Path) -> None:
    computed = vitrail.zero_shot(folder, LABELS, templates=TEMPLATES)
    texts = compute_text_vectors(folder, LABELS, TEMPLATES, torch.device("cpu"), hide_progress)
    np.save("texts.npy", texts.vectors.numpy())
    model: Any = transformers.AutoModel.from_pretrained(folder)
    scales = {name: getattr(model, name).detach() for name in ("logit_scale", "logit_bias") if hasattr(model, name)}
    save_file({"texts": texts.vectors} | scales, "texts.safetensors")
    tower = vitrail.load(folder)
    own_scale = {"scale": texts.scale, "bias": texts.bias}
    for trained in (
        vitrail.zero_shot(folder, LABELS, text_vectors="texts.npy"),  # with the scale of the model's own file
        vitrail.zero_shot(tower, LABELS, text_vectors="texts.safetensors"),  # with that of the vectors'
        vitrail.zero_shot(tower, LABELS, text_vectors=texts.vectors.numpy(), **own_scale),
    ):
        assert (trained.model.head.weight - computed.model.head.weight).abs().max() <= 1e-5
        assert torch.equal(trained.model.head.bias, computed.model.head.bias)
        assert trained.multi_label == computed.multi_label == is_siglip(folder)
    with pytest.raises(UsageError, match=r"nothing states the factor of the logits: give scale, exp\(logit_scale\)"):
        vitrail.zero_shot(tower, LABELS, text_vectors="texts.npy")


def test_the_tower_may_be_a_file_and_the_text_side_a_folder(folder: Path) -> None:
    vitrail.save(vitrail.load(folder), "tower.safetensors")
    with pytest.raises(
        UsageError, match=r"tower.safetensors has no text tower: .* \(text=MODEL\), .* \(text_vectors=FILE\)"
    ):
        vitrail.zero_shot("tower.safetensors", LABELS)
    trained = vitrail.zero_shot("tower.safetensors", LABELS, text=folder)
    vitrail.save(trained, "pets.safetensors")
    again = vitrail.zero_shot("pets.safetensors", ["tulip", "dog"], text=folder)
    assert (again.model.head.weight - trained.model.head.weight[2:]).abs().max() <= 1e-5


@pytest.mark.parametrize("folder", ["clip"], indirect=True)
def test_a_name_on_the_hub_downloads_both_towers_and_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    """In a process of its own, without torchvision, which the text side does not need."""
    script = """
import sys
sys.modules["torchvision"] = None
import vitrail
trained = vitrail.zero_shot("hf:org/clip", ["tulip", "dog"], device="cpu")
print(trained.origin.changes[-2])
vitrail.save(trained, "pets.safetensors")
"""
    with run_server() as server:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        commit = server.commit("org/clip", files | {"evil.py": b"print()", "flax_model.msgpack": b""})
        environment = server.environment(tmp_path / "home")
        ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert server.requested() == files.keys()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"vectors of texts, hf:org/clip@{commit} by transformers, templates" in ended.stdout
    expected = vitrail.zero_shot(folder, ["tulip", "dog"]).model.head.weight
    assert (vitrail.load("pets.safetensors").model.head.weight - expected).abs().max() <= 1e-5


def test_what_it_was_made_of_is_in_the_file(folder: Path) -> None:
    vitrail.save(vitrail.zero_shot(folder, LABELS, templates=TEMPLATES[:2]), "pets.safetensors")
    loaded = vitrail.load("pets.safetensors")
    assert loaded.labels == LABELS
    head, scale = loaded.origin.changes[-2:]
    assert f"{folder.name} by transformers, templates 'a photo of a {{}}.', 'art of the {{}}!'" in head
    assert scale == f"head: scale 12.1825, {'bias -1.5, sigmoids' if is_siglip(folder) else 'a softmax'}"


def test_scale_and_bias_may_be_given(folder: Path) -> None:
    trained = vitrail.zero_shot(folder, LABELS, scale=20, bias=-3)
    assert trained.multi_label
    assert trained.model.head.weight.norm(dim=1).tolist() == pytest.approx([20.0] * 4, rel=1e-5)
    assert trained.model.head.bias.tolist() == [-3.0] * 4


@pytest.fixture
def flowers(folder: Path) -> vitrail.Trained:
    """A classifier of the pictures in photos/."""
    return vitrail.zero_shot(folder, ["rose", "tulip"])


def test_it_predicts_evaluates_and_embeds(flowers: vitrail.Trained) -> None:
    (prediction,) = vitrail.predict(flowers, PHOTO, top=2)
    total = sum(probability for _, probability in prediction.labels)
    assert (total == pytest.approx(1)) != flowers.multi_label
    evaluation = vitrail.evaluate(flowers, "photos", **FAST)
    assert evaluation.confusion.sum() == 10
    features = vitrail.embed(flowers, [PHOTO])
    assert np.linalg.norm(features, axis=1) == pytest.approx([1.0])


@pytest.mark.parametrize("folder", ["siglip"], indirect=True)
def test_it_is_served(flowers: vitrail.Trained) -> None:
    vitrail.save(flowers, "flowers.safetensors")
    with vitrail.serve("flowers.safetensors", port=0, device="cpu") as server:
        request = urllib.request.Request(
            f"{server.url}/v1/predict", Path(PHOTO).read_bytes(), {"Content-Type": "image/png"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            answer = json.load(response)
    (expected,) = vitrail.predict(flowers, PHOTO, top=2)
    served = {row["label"]: row["probability"] for row in answer["results"][0]["predictions"]}
    assert served == pytest.approx(dict(expected.labels), abs=1e-5)


@pytest.mark.parametrize(
    ("folder", "path", "package"),
    [
        ("siglip", "flowers.onnx", "onnxscript"),
        ("clip", "flowers.pt2", "torch"),
        ("clip", "flowers.xml", "openvino"),
    ],
    indirect=["folder"],
)
def test_it_is_exported(flowers: vitrail.Trained, path: str, package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    assert vitrail.convert(flowers, path).record["difference"] < 1e-4
    if path.endswith(".onnx"):
        expected, exported = (vitrail.predict(model, PHOTO, top=2)[0] for model in (flowers, path))
        assert dict(exported.labels) == pytest.approx(dict(expected.labels), abs=1e-4)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_it_is_computed_in_lower_precision(flowers: vitrail.Trained, precision: Any) -> None:
    if precision == "int8" and not has_exact_int8_products():
        pytest.skip("this CPU has no exact int8 products")
    exact = vitrail.Classifier(flowers, device="cpu").predict_proba(make_photos())
    lower = vitrail.Classifier(flowers, device="cpu", precision=precision).predict_proba(make_photos())
    assert (lower - exact).abs().max() < 0.05
    assert not torch.equal(lower, exact)


@pytest.mark.parametrize("folder", ["clip"], indirect=True)
def test_it_is_fine_tuned_without_projection_and_texts(flowers: vitrail.Trained) -> None:
    run = vitrail.finetune("photos", flowers, out="runs/tuned", epochs=1, batch=4, **FAST)
    config = run.trained.model.config
    assert (config.projection, config.normalize_features, run.trained.multi_label) == (0, False, False)


def test_labels_are_lines_of_text(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes("\ufeffEgyptian mau\r\n\r\n  golden retriever \r\ntulip\r\ndog\r\n".encode())
    trained = vitrail.zero_shot(folder, "labels.txt", templates=TEMPLATES[0])
    assert trained.labels == LABELS
    assert torch.equal(
        trained.model.head.weight, vitrail.zero_shot(folder, LABELS, templates=TEMPLATES[0]).model.head.weight
    )


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (["cat", "dog", "cat"], {}, "the label 'cat' is there 2 times; name each once"),
        ([], {}, "there must be at least one label"),
        (["cat", " "], {}, "none may be empty"),
        ("nothing.txt", {}, "labels 'nothing.txt' must be a text file with one per line, and there is none"),
        ("latin.txt", {}, "latin.txt is not UTF-8 text"),
        (["cat"], {"templates": ["a photo of", "{}"]}, r"the template 'a photo of' must have \{\} once"),
        (["cat"], {"templates": "{} and {}"}, r"must have \{\} once"),
        (["cat"], {"templates": "a photo"}, r"templates without \{\}, so 'a photo' must be a text file"),
        (["cat"], {"templates": []}, "give at least one template, such as 'a photo of a {}.'"),
        (["cat"], {"text_vectors": "x.npy", "text": "clip"}, "text_vectors are of finished texts: omit text and temp"),
        (["cat"], {"text_vectors": "x.npy", "templates": "{}"}, "omit text and templates"),
        (["cat"], {"text_vectors": "x.npy", "scale": "big"}, "scale is 'big', of type str; it takes a number"),
        (["cat"], {}, "model.safetensors has no text tower"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_computed(
    labels: Any, options: dict[str, Any], message: str
) -> None:
    Path("latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match=message):
        vitrail.zero_shot("model.safetensors", labels, **options)


def test_a_model_in_memory_needs_a_text_side() -> None:
    with pytest.raises(UsageError, match="test has no text tower"):
        vitrail.zero_shot(make_trained(), ["cat"])
