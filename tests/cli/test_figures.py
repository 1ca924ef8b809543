"""`vitrail figures` on small models and made-up pictures: the files, the numbers in them, and what is said."""

import dataclasses
import hashlib
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests import model_factory
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import encode_image, make_image, write_image_folder
from vitrail import PreprocessConfig, load, save
from vitrail.data.decode import decode
from vitrail.data.sources import open_dataset
from vitrail.data.transforms import make_eval_input, normalize
from vitrail.model.features import compute_dense_features
from vitrail.visualization import attention_images, paper_figures
from vitrail.visualization.attention import (
    compute_attention_distance,
    compute_class_attention,
    compute_rollout,
    compute_token_colors,
)
from vitrail.visualization.cka import compute_cka, compute_gram_matrices
from vitrail.visualization.embeddings import build_untrained, compute_filters, compute_position_similarity
from vitrail.visualization.faithfulness import measure_faithfulness
from vitrail.visualization.feature_pca import compute_feature_colors
from vitrail.visualization.relevance import compute_relevance

CROPPED = PreprocessConfig(size=(32, 32), resize=(40,), mean=(0.4,) * 3, std=(0.3,) * 3)


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write plots as empty files, in tests of everything else: drawing one takes a second."""
    for name in ("filters", "position_similarity", "attention_distance", "cka", "faithfulness"):
        monkeypatch.setattr(paper_figures, f"plot_{name}", lambda _, path, **__: path.write_bytes(b""))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save(model_factory.build_trained(model_factory.build_vit(), preprocess=CROPPED), path)
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_image_folder(tmp_path / "pictures", each=2)


def list_files(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())


def load_inputs(paths: list[Path]) -> torch.Tensor:
    return normalize(torch.stack([make_eval_input(decode(path), CROPPED) for path in paths]), CROPPED)


def test_every_figure_is_a_png_and_the_arrays_are_the_functions(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    code, text, error = vitrail("figures", str(model), str(pictures), "--out", str(out), capsys=capsys)
    assert code == 0, error
    names = ["0", "1", "0-2", "1-2"]  # rose/0.jpg, rose/1.jpg, tulip/0.jpg, tulip/1.jpg
    pictures_of_images = [
        f"{kind}/{name}.png" for kind in ("heads", "relevance", "rollout", "tokens") for name in names
    ]
    figures = [f"{name}.{end}" for name in ("cka", "distance", "filters", "pca", "positions") for end in ("npz", "png")]
    assert list_files(out) == sorted([*pictures_of_images, *figures, "figures.json", "images.npz", "overview.png"])
    for line in ("filters.png", "positions.png", "distance.png", "pca.png", "rollout/       4 images"):
        assert line in text
    assert "averaged over 4 of the paper's 128 images" in error
    drawn = [name for name in (*figures, "overview.png") if name.endswith(".png")]
    for name in (*pictures_of_images, *drawn):
        with Image.open(out / name) as shown:
            assert shown.format == "PNG"
            assert min(shown.info["dpi"]) > 199

    network, paths = load(model).model, sorted(pictures.rglob("*.jpg"))
    images = load_inputs(paths)
    stored = {
        name: dict(np.load(out / f"{name}.npz")) for name in ("filters", "positions", "distance", "images", "pca")
    }
    assert np.array_equal(stored["filters"]["tiles"], compute_filters(network).tiles)
    assert np.array_equal(stored["positions"]["maps"], compute_position_similarity(network).maps)
    assert np.array_equal(
        stored["positions"]["initial_maps"], compute_position_similarity(build_untrained(network)).maps
    )
    np.testing.assert_allclose(
        stored["distance"]["distance"], compute_attention_distance(network, [images]).distance, rtol=1e-5
    )
    with torch.no_grad():
        colors = compute_feature_colors(compute_dense_features(network, images).numpy())
    np.testing.assert_allclose(stored["pca"]["colors"], colors.colors, atol=1e-4)
    assert list(stored["pca"]["images"]) == list(map(str, paths))
    before = compute_attention_distance(build_untrained(network), [images])
    np.testing.assert_allclose(stored["distance"]["initial_entropy"], before.entropy, rtol=1e-5)
    assert list(stored["images"]["images"]) == list(map(str, paths))
    np.testing.assert_allclose(stored["images"]["rollouts"], compute_rollout(network, images), rtol=1e-5)
    np.testing.assert_allclose(stored["images"]["heads"], compute_class_attention(network, images), rtol=1e-5)
    np.testing.assert_allclose(stored["images"]["tokens"], compute_token_colors(network, images), atol=1e-4)
    relevant = compute_relevance(network, images)
    np.testing.assert_allclose(stored["images"]["relevance"], relevant.maps, rtol=1e-4, atol=1e-7)
    assert stored["images"]["classes"].tolist() == relevant.classes.tolist()
    probabilities = torch.softmax(network(images), dim=1).amax(dim=1).detach()
    np.testing.assert_allclose(stored["images"]["probabilities"], probabilities, rtol=1e-5)
    products = compute_gram_matrices(network, images)
    np.testing.assert_allclose(np.load(out / "cka.npz")["layers"], compute_cka([products], [products]), atol=1e-4)
    # 20 x 24 pixels, resized to 40 x 48, of which the middle 32 x 32 are seen
    assert np.array_equal(stored["images"]["within"], [[4, 2, 20, 18]] * 4)


def test_the_same_command_writes_the_same_bytes_and_nothing_old_stays(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    written: list[dict[str, str]] = []
    for image in (pictures / "tulip" / "1.jpg", pictures / "rose" / "0.jpg", pictures / "rose" / "0.jpg"):
        assert vitrail("figures", str(model), str(image), "--out", str(out), capsys=capsys)[0] == 0
        written.append({name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in list_files(out)})
    assert written[1] == written[2]
    assert "rollout/1.png" in written[0]
    assert "rollout/1.png" not in written[1]


@pytest.mark.usefixtures("without_plots")
def test_without_images_there_are_the_weights_and_a_word_about_the_rest(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text, error = vitrail("figures", str(model), "--json", capsys=capsys)
    assert code == 0
    assert "no attention: that takes images: vitrail figures" in error
    facts = json.loads(text)
    assert facts["folder"] == "runs/figures"
    assert list(facts["files"]) == ["filters.png", "filters.npz", "positions.png", "positions.npz"]
    assert facts["skipped"][0]["figure"] == "attention"
    assert facts == json.loads(Path("runs/figures/figures.json").read_text())
    assert vitrail("figures", str(model), capsys=capsys)[0] == 0
    assert (tmp_path / "runs" / "figures-2" / "filters.png").exists()


def test_two_models_stand_side_by_side_and_one_without_attention_is_named(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    """A ViT beside a hybrid of more heads, then beside a ResNet, of which filters are all there is.

    The second model may be a folder of weights; a folder of images with weights beside them is images.
    """
    other, resnet, out = tmp_path / "other" / "model.safetensors", tmp_path / "resnet.safetensors", tmp_path / "out"
    save(model_factory.build_trained(model_factory.build_vit(**model_factory.VARIANTS["hybrid"], heads=8)), other)
    shutil.copy(other, pictures / "rose")
    (pictures / "rose" / "1.jpg").unlink()
    save(model_factory.build_trained(model_factory.build_bit()), resnet)
    image = str(pictures / "rose")
    code, _, error = vitrail("figures", str(model), str(other.parent), image, "--out", str(out), capsys=capsys)
    assert code == 0, error
    stored = dict(np.load(out / "filters.npz"))
    assert np.array_equal(stored["tiles"], compute_filters(load(model).model).tiles)
    assert np.array_equal(stored["second_tiles"], compute_filters(load(other).model).tiles)
    arrays = np.load(out / "images.npz")
    assert arrays["heads"].shape == (1, 4, 4, 4)
    assert arrays["second_heads"].shape == (1, 8, 4, 4)
    with Image.open(out / "rollout" / "0.png") as wide:
        assert wide.width > 3 * 288  # 24 pixels enlarged twelve times, three times side by side
    code, _, error = vitrail("figures", str(resnet), str(model), image, "--out", str(out), capsys=capsys)
    assert code == 0
    assert "no attention: resnet: a BiT ResNet has no attention" in error
    assert "no positions: resnet: a BiT ResNet has no position" in error
    assert np.load(out / "images.npz")["second_heads"].shape == (1, 4, 4, 4)
    code, _, error = vitrail("figures", str(resnet), image, "--out", str(out), capsys=capsys)
    assert code == 0
    assert list_files(out) == ["figures.json", "filters.npz", "filters.png", "pca.npz", "pca.png"]


@pytest.mark.usefixtures("without_plots")
def test_faithfulness_compares_relevance_with_rollout_and_a_random_order(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Beside a model of which an image may have several labels, each with a probability of its own."""
    other, out = tmp_path / "other.safetensors", tmp_path / "out"
    save(
        dataclasses.replace(
            model_factory.build_trained(model_factory.build_vit(seed=1), preprocess=CROPPED),
            multi_label=True,
            temperature=2,
        ),
        other,
    )
    command = [str(model), str(other), str(pictures), "--out", str(out), "--json", "--faithfulness"]
    code, text, error = vitrail("figures", *command, capsys=capsys)
    assert code == 0, error
    areas, stored = json.loads(text)["numbers"]["faithfulness"], np.load(out / "faithfulness.npz")
    assert list(areas) == ["model", "other"]
    assert list(areas["other"]) == ["relevance", "rollout", "random"]
    shown = np.load(out / "images.npz")
    images = load_inputs(sorted(pictures.rglob("*.jpg")))

    def predict(pixels: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(load(other).model(pixels) / 2)

    for order, maps in (("relevance", shown["second_relevance"]), ("rollout", shown["second_rollouts"])):
        expected = measure_faithfulness(predict, images, maps, shown["second_classes"])
        np.testing.assert_allclose(stored[f"second_{order}_deletion"], expected.deletion, atol=1e-5)
        assert areas["other"][order]["insertion"] == pytest.approx(expected.insertion_area, abs=1e-5)
    assert not np.array_equal(stored["random_deletion"], stored["rollout_deletion"])
    between = np.load(out / "cka.npz")["layers_with_second"]
    products = [compute_gram_matrices(load(path).model, images) for path in (model, other)]
    np.testing.assert_allclose(between, compute_cka([products[0]], [products[1]]), atol=1e-4)


@pytest.mark.usefixtures("without_plots")
def test_a_model_without_a_head_and_too_few_images_are_a_sentence_each(
    pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    path, out = tmp_path / "bare.safetensors", tmp_path / "out"
    save(model_factory.build_trained(model_factory.build_vit(classes=0), preprocess=CROPPED), path)
    command = [str(path), str(pictures / "rose"), "--out", str(out), "--faithfulness"]
    code, text, error = vitrail("figures", *command, capsys=capsys)
    assert code == 0, error
    assert "no relevance: bare has no head: relevance and its faithfulness are those of a class" in error
    assert "no cka: CKA compares layers on 4 images or more" in error
    assert "rollout/" in text
    assert "relevance/" not in text
    assert not (out / "relevance").exists()


@pytest.mark.usefixtures("without_plots")
def test_a_bad_image_is_named_the_others_are_drawn_and_the_exit_code_says_so(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    (pictures / "rose" / "broken.jpg").write_bytes(b"<html>")
    (tmp_path / "empty").mkdir()
    others = [str(tmp_path / name) for name in ("nowhere.jpg", "empty", "*.gif")]
    command = [str(pictures), *others, "--out", str(tmp_path / "out")]
    code, _, error = vitrail("figures", str(model), *command, capsys=capsys)
    assert code == 3
    assert "broken.jpg is not an image of a known format" in error
    assert "nowhere.jpg does not exist" in error
    assert "empty holds no image" in error
    assert "no file matches" in error
    assert "4 of 8 images cannot be read" in error
    assert len(np.load(tmp_path / "out" / "images.npz")["rollouts"]) == 4
    alone = [str(pictures / "rose" / "broken.jpg"), "--out", str(tmp_path / "out")]
    code, _, error = vitrail("figures", str(model), *alone, capsys=capsys)
    assert code == 3
    assert "no attention: attention is measured on images, but there are none" in error
    assert (tmp_path / "out" / "filters.png").exists()


@pytest.mark.usefixtures("without_plots")
def test_weights_that_do_not_say_how_images_are_prepared_still_show_themselves(
    pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "bare.safetensors"
    save(model_factory.build_trained(model_factory.build_vit(), preprocess=None), path)
    code, _, error = vitrail("figures", str(path), str(pictures), "--out", str(tmp_path / "out"), capsys=capsys)
    assert code == 0
    assert "no attention: the model does not say how images must be prepared" in error
    assert (tmp_path / "out" / "positions.png").exists()


@pytest.mark.usefixtures("without_plots")
def test_boxes_say_how_much_of_the_rollout_is_on_the_object(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    """0.jpg's box is all that is seen, 1.jpg's the left half of it; 2.jpg's is cut off by the crop."""
    (pictures / "rose" / "2.jpg").write_bytes(encode_image(make_image(9)))
    boxes = tmp_path / "boxes.txt"
    boxes.write_text("0.jpg\trose\t0\t0\t23\t19\n1.jpg\trose\t0\t0\t11\t19\n2.jpg\trose\t22\t0\t23\t19\n")
    out = tmp_path / "out"
    command = [str(pictures / "rose"), "--boxes", str(boxes), "--out", str(out), "--json"]
    code, text, error = vitrail("figures", str(model), *command, capsys=capsys)
    assert code == 0, error
    facts = json.loads((out / "boxes.json").read_text())
    whole, half, cut = facts["images"]
    assert (whole["energy"], whole["area"]) == (pytest.approx(1), pytest.approx(1))
    maps = np.load(out / "images.npz")["rollouts"]
    assert half["area"] == pytest.approx(0.5)
    assert half["energy"] == pytest.approx(float(maps[1, :, :2].sum()), rel=1e-5)
    assert cut["area"] == 0
    means = facts["means"]["model"]
    assert (means["images"], means["cut_off"]) == (2, 1)
    assert means["energy"] == pytest.approx((1 + half["energy"]) / 2)
    assert json.loads(text)["numbers"]["boxes"] == facts["means"]
    boxes.write_text("other.jpg\trose\t0\t0\t23\t19\n")
    code, _, error = vitrail("figures", str(model), *command, capsys=capsys)
    assert "no boxes: no box lies in what model sees of the images" in error
    assert not (out / "boxes.json").exists()
    code, _, error = vitrail("figures", str(model), "--boxes", str(boxes), capsys=capsys)
    assert (code, "give the images too" in error) == (2, True)


@pytest.mark.usefixtures("without_plots")
def test_another_resolution_resamples_positions_and_sees_more_patches(
    model: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    command = [str(model), str(pictures / "rose"), "--image-size", "48", "64", "--out", str(out)]
    code, _, error = vitrail("figures", *command, capsys=capsys)
    assert code == 0, error
    assert np.load(out / "images.npz")["rollouts"].shape == (2, 6, 8)
    maps = compute_position_similarity(load(model).model, (48, 64)).maps
    np.testing.assert_allclose(np.load(out / "positions.npz")["maps"], maps, atol=1e-5)


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize(
    ("arguments", "number"),
    [(["*/0.jpg"], 2), (["-"], 3), (["digits"], 179), (["list.csv"], 1), (["rose/0.jpg"] * 2, 1)],
)
def test_images_are_named_in_every_way(
    arguments: list[str], number: int, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(model_factory.build_trained(model_factory.build_vit(depth=1)), tmp_path / "m.safetensors")
    write_image_folder(tmp_path, each=2)
    (tmp_path / "list.csv").write_text("path,label\nrose/1.jpg,rose\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("rose/0.jpg\nrose/1.jpg\ntulip/1.jpg\n"))
    code, text, error = vitrail("figures", "m.safetensors", *arguments, "--num-images", "1", "--json", capsys=capsys)
    assert code == 0, error
    facts: dict[str, Any] = json.loads(text)
    assert facts["numbers"]["attention"]["m"]["images"] == 1
    assert sum(name.startswith("rollout/") for name in facts["files"]) == 1
    assert (f"1 of {number} images is drawn; --num-images {number} draws all" in error) == (number > 1)


@pytest.mark.usefixtures("without_plots")
def test_of_a_dataset_only_the_images_that_are_drawn_are_decoded(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 images five, from all folders: for features, for attention and to be drawn on. --boxes reads all."""
    paths = sorted(write_image_folder(tmp_path / "dataset", each=20).rglob("*.jpg"))
    decoded: list[str] = []

    def count(source: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        decoded.append(str(source))
        return decode(source, *arguments, **options)

    monkeypatch.setattr(attention_images, "decode", count)
    command = [str(tmp_path / "dataset"), "--out", str(tmp_path / "out"), "--num-images"]
    assert vitrail("figures", str(model), *command, "5", capsys=capsys)[0] == 0
    assert decoded == [str(paths[place]) for place in (0, 8, 16, 24, 32)] * 3
    assert list(np.load(tmp_path / "out" / "images.npz")["images"]) == decoded[:5]
    decoded.clear()
    code, _, error = vitrail("figures", str(model), *command, "0", capsys=capsys)
    assert (code, decoded, "no attention: that takes images: --num-images 0 reads none" in error) == (0, [], True)
    (tmp_path / "boxes.txt").write_text("0.jpg\trose\t0\t0\t23\t19\n")
    boxes = ["--boxes", str(tmp_path / "boxes.txt")]
    assert vitrail("figures", str(model), *command, "5", *boxes, capsys=capsys)[0] == 0
    assert (len(decoded), len(set(decoded))) == (50, 40)
    assert len(np.load(tmp_path / "out" / "images.npz")["heads"]) == 5


@pytest.mark.usefixtures("without_plots")
def test_of_a_named_dataset_images_from_all_of_its_test_split_are_drawn(tmp_path: Path, capsys: Capture) -> None:
    save(model_factory.build_trained(model_factory.build_vit(depth=1)), tmp_path / "m.safetensors")
    command = ["digits", "--out", str(tmp_path / "out"), "--num-images", "3"]
    code, _, error = vitrail("figures", str(tmp_path / "m.safetensors"), *command, capsys=capsys)
    assert code == 0, error
    names = np.load(tmp_path / "out" / "images.npz")["images"]
    split = open_dataset("digits").splits["test"]
    assert list(names) == [split.get_image_name(place * 179 // 3) for place in range(3)]


@pytest.mark.usefixtures("without_plots")
def test_an_image_thin_as_a_thread_takes_no_more_room_than_another(
    model: Path, tmp_path: Path, capsys: Capture
) -> None:
    Image.new("RGB", (1, 599)).save(tmp_path / "thread.png")
    code, _, error = vitrail(
        "figures", str(model), str(tmp_path / "thread.png"), "--out", str(tmp_path / "out"), capsys=capsys
    )
    assert code == 0, error
    with Image.open(tmp_path / "out" / "rollout" / "thread.png") as drawn:
        assert max(drawn.size) < 3000


@pytest.mark.parametrize("kind", ["other", "file"])
def test_a_folder_of_others_is_not_written_to(kind: str, model: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "filters.png").write_text("mine")
    code, _, error = vitrail("figures", str(model), "--out", str(out), capsys=capsys)
    assert code == 2
    assert "must be a local folder that is new, empty or written by this command" in error
    assert (out if kind == "file" else out / "filters.png").read_text() == "mine"
    code, _, error = vitrail("figures", str(model), "--out", "s3://bucket/figures", capsys=capsys)
    assert (code, "--out s3://bucket/figures must be a local folder" in error) == (2, True)


def test_mistakes_are_answered_before_anything_is_computed(model: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "boxes.txt").write_text("no box")
    for command, code, sentence in (
        ([str(model)] * 3, 2, "are 3 models"),
        ([str(model), "--num-images", "-1"], 2, "--num-images is -1"),
        ([str(model), "image.jpg", "--boxes", str(tmp_path / "boxes.txt")], 3, "line 1"),
        ([str(tmp_path / "none.safetensors")], 4, "does not exist"),
        ([str(model), "--image-size", "30"], 2, "does not divide into patches"),
    ):
        exit_code, _, error = vitrail("figures", *command, "--out", str(tmp_path / "out"), capsys=capsys)
        assert (exit_code, sentence in error) == (code, True), error
        assert not (tmp_path / "out").exists()
