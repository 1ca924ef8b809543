"""preprocessor_config.json: what each family's processor states, and how near its pixels are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from tests import model_factory
from vitrail.config import PreprocessConfig
from vitrail.data.decode import decode
from vitrail.data.transforms import make_eval_input, normalize
from vitrail.weights.load import load, save
from vitrail.weights.transformers_preprocess import parse_processor

CONFIG = model_factory.build_vit(image_size=(32, 32)).config


def parse(**processor: Any) -> tuple[PreprocessConfig | None, list[str]]:
    return parse_processor({"image_mean": [0.5] * 3, "image_std": [0.5] * 3} | processor, CONFIG)


@pytest.mark.parametrize(
    ("kind", "resize", "size", "interpolation", "levels"),
    [
        ("CLIPImageProcessor", (40,), (32, 32), "bicubic", 2),
        ("SiglipImageProcessor", (32, 32), (32, 32), "bicubic", 2),
        ("BeitImageProcessor", (32, 32), (32, 32), "bicubic", 2),
        ("DINOv3ViTImageProcessor", (32, 32), (32, 32), "bilinear", 2),
    ],
)
def test_pixels_are_those_of_transformers_but_for_rounding(
    kind: str, resize: tuple[int, ...], size: tuple[int, int], interpolation: str, levels: int, tmp_path: Path
) -> None:
    sides = {"shortest_edge": resize[0]} if len(resize) == 1 else {"height": resize[0], "width": resize[1]}
    processor: Any = getattr(transformers, kind)(size=sides, crop_size={"height": size[0], "width": size[1]})
    processor.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "preprocessor_config.json").read_text())
    preprocess, sentences = parse_processor(stated, CONFIG)
    assert preprocess is not None
    assert (preprocess.resize, preprocess.size, preprocess.interpolation) == (resize, size, interpolation)
    assert any("8-bit" in sentence for sentence in sentences) == kind.startswith("DINOv3")
    coarse = np.random.default_rng(0).integers(0, 256, (12, 14, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((70, 60), Image.Resampling.BICUBIC)
    expected = processor(picture, return_tensors="pt")["pixel_values"][0]
    pixels = normalize(make_eval_input(decode(picture), preprocess), preprocess)
    assert (pixels - expected).abs().max() <= levels / 255 / min(preprocess.std)


def test_numbers_alone_are_the_short_side_for_clip_and_a_square_for_others() -> None:
    """Files from before version 4.25."""
    clip, _ = parse(feature_extractor_type="CLIPFeatureExtractor", size=224, crop_size=224, do_center_crop=True)
    beit, _ = parse(feature_extractor_type="BeitFeatureExtractor", size=224, crop_size=224, do_center_crop=False)
    assert clip is not None
    assert beit is not None
    assert (clip.resize, clip.size) == ((224,), (224, 224))
    assert (beit.resize, beit.size) == ((224, 224), (224, 224))


def test_nulls_are_as_good_as_absent() -> None:
    """What the fast processors of version 4 wrote."""
    preprocess, _ = parse(
        image_processor_type="DINOv3ViTImageProcessorFast", size={"height": 32, "width": 32}, crop_size=None,
        do_center_crop=None, resample=None, rescale_factor=None,
    )  # fmt: skip
    assert preprocess == PreprocessConfig(size=(32, 32), resize=(32, 32), interpolation="bilinear")


def test_naflex_is_squashed_and_that_is_said() -> None:
    preprocess, sentences = parse_processor(
        {"image_processor_type": "Siglip2ImageProcessor", "max_num_patches": 256, "patch_size": 16}, CONFIG
    )
    assert preprocess == PreprocessConfig(size=(32, 32), resize=(32, 32), interpolation="bilinear")
    assert "every image is resized to 32 x 32; transformers keeps its shape, in up to 256 patches" in sentences[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"do_normalize": False}, "do_normalize must be on"),
        ({"do_rescale": False}, "rescale_factor"),
        ({"rescale_factor": 1.0}, "rescale_factor is 1.0"),
        ({"resample": 5}, "5"),
        ({"size": {}}, "height"),
    ],
)
def test_what_is_not_stated_in_full_is_unknown_and_why(change: dict[str, Any], reason: str) -> None:
    preprocess, [sentence] = parse(**{"size": {"height": 32, "width": 32}} | change)
    assert preprocess is None
    assert reason in sentence


def test_version_5_states_it_beside_a_tokenizer_in_another_file(tmp_path: Path) -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    save(trained, tmp_path / "model", "transformers")
    old = tmp_path / "model" / "preprocessor_config.json"
    processor = {"image_processor": json.loads(old.read_text()), "processor_class": "CLIPProcessor"}
    (tmp_path / "model" / "processor_config.json").write_text(json.dumps(processor))
    old.unlink()
    assert load(tmp_path / "model").preprocess == trained.preprocess
