"""What the plates show, read from what was drawn and from their pixels."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from tests import model_factory
from tests.visualization.test_plots import ANY_NAMES
from vitrail.visualization import paper_figures
from vitrail.visualization.attention import AttentionDistance
from vitrail.visualization.embeddings import Filters, PositionSimilarity, compute_filters, compute_position_similarity
from vitrail.visualization.faithfulness import Faithfulness


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were written."""
    figures: list[Figure] = []
    write = Figure.savefig

    def kept(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        write(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    return figures


def far(layers: int, heads: int, seed: int = 0) -> AttentionDistance:
    generator = np.random.default_rng(seed)
    distance, entropy = (generator.random((layers, heads), dtype=np.float32) for _ in range(2))
    return AttentionDistance(100 * distance, 7 * entropy, 116.5, 7.6, 128)


def test_filters_stand_in_rows_of_seven_with_their_shares(tmp_path: Path, drawn: list[Figure]) -> None:
    tiles = np.full((9, 4, 4, 3), 0.5, dtype=np.float32)
    tiles[8] = [1, 0, 0]
    shares = np.linspace(0.18, 0.02, 9, dtype=np.float32)
    paper_figures.plot_filters({"": Filters(tiles, shares, "patch embedding")}, tmp_path / "f.png")
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.texts] == [f"{share:.1%}" for share in shares]
    assert axes.get_title(loc="left") == "9 principal components of the patch embedding, 90% of its variance"
    places = [image.get_extent() for image in axes.images]
    assert len({extent[0] for extent in places}) == 7
    assert places[7][0] == places[0][0]
    assert places[8][0] == places[1][0]
    with Image.open(tmp_path / "f.png") as picture:
        pixels = np.array(picture.convert("RGB")).astype(int)
        assert round(min(picture.info["dpi"])) == 200
    red = np.argwhere((pixels == [255, 0, 0]).all(axis=2))
    sides = np.ptp(red, axis=0) + 1
    assert len(red) == sides.prod()  # one tile, its pixels not smoothed
    assert abs(sides - 124).max() <= 2  # 0.62 inches of 200 dots


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_filters_of_any_channels_and_of_two_models_are_drawn(
    tmp_path: Path, channels: int, drawn: list[Figure]
) -> None:
    filters = {
        "a model": compute_filters(model_factory.build_vit(channels=channels), count=3),
        "a ResNet": compute_filters(model_factory.build_bit(channels=channels), count=3),
    }
    paper_figures.plot_filters(filters, tmp_path / "f.png")
    titles = [axes.get_title(loc="left").split("\n")[0] for axes in drawn[0].axes]
    assert titles == ["a model", "a ResNet"]


def test_position_maps_stand_in_the_places_of_their_patches(tmp_path: Path, drawn: list[Figure]) -> None:
    """Each map's lightest cell is its own patch; axes and bar are named as in the paper."""
    model = model_factory.build_vit(image_size=(24, 40))
    similarity = compute_position_similarity(model)
    paper_figures.plot_position_similarity({"": similarity}, tmp_path / "p.png", initial={"": similarity})
    maps, initial, bar, profile = drawn[0].axes
    assert (maps.get_xlabel(), maps.get_ylabel()) == ("input patch column", "input patch row")
    assert bar.get_ylabel() == "cosine similarity"
    assert initial.get_title(loc="left") == "at initialization"
    shades = np.ma.filled(maps.images[0].get_array().astype(float), np.nan)
    assert shades.shape == (3 * 4 - 1, 5 * 6 - 1)
    for row in range(3):
        for column in range(5):
            part = shades[4 * row : 4 * row + 3, 6 * column : 6 * column + 5]
            np.testing.assert_allclose(part, similarity.maps[row, column], atol=1e-6)
    assert np.isnan(shades[3]).all()
    assert [text.get_text() for text in maps.get_yticklabels()][:2] == ["1", "2"]
    np.testing.assert_allclose(profile.lines[0].get_ydata(), similarity.by_row)
    np.testing.assert_allclose(profile.lines[1].get_ydata(), similarity.by_column)


def test_of_a_large_grid_some_maps_are_drawn_and_numbered(tmp_path: Path, drawn: list[Figure]) -> None:
    side = 37
    similarity = PositionSimilarity(
        np.zeros((side,) * 4, dtype=np.float32), np.ones(side, np.float32), np.ones(side, np.float32)
    )
    paper_figures.plot_position_similarity({"": similarity}, tmp_path / "p.png")
    axes = drawn[0].axes[0]
    assert axes.images[0].get_array().shape[0] == 13 * 38 - 1  # every third
    numbers = [int(text.get_text()) for text in axes.get_xticklabels()]
    assert numbers[0] == 1
    assert set(np.diff(numbers)) == {6}
    with Image.open(tmp_path / "p.png") as picture:
        assert max(picture.size) < 2500


def test_a_dot_a_head_a_line_for_the_mean_and_what_even_attention_has(tmp_path: Path, drawn: list[Figure]) -> None:
    trained, before = far(12, 3), far(12, 3, seed=1)
    paper_figures.plot_attention_distance({"": trained}, tmp_path / "d.png", initial={"": before})
    for axes, values, initial, even in zip(
        drawn[0].axes, (trained.distance, trained.entropy), (before.distance, before.entropy), (116.5, 7.6), strict=True
    ):
        start, dots, mean, uniform = (np.asarray(line.get_ydata(), dtype=float) for line in axes.lines)
        np.testing.assert_allclose(start, initial.mean(axis=1))
        np.testing.assert_allclose(dots, values.ravel())
        assert list(axes.lines[1].get_xdata())[:4] == [1, 1, 1, 2]
        np.testing.assert_allclose(mean, values.mean(axis=1))
        assert set(uniform) == {even}
        assert axes.get_ylim()[1] > max(even, values.max())
    assert drawn[0].axes[0].get_title(loc="left") == "128 images"


def test_two_models_of_any_depth_stand_side_by_side_on_one_scale(tmp_path: Path, drawn: list[Figure]) -> None:
    paper_figures.plot_attention_distance({"small": far(12, 3), "large": far(24, 16)}, tmp_path / "d.png")
    axes = drawn[0].axes
    assert [each.get_title(loc="left") for each in axes[:2]] == ["small, 128 images", "large, 128 images"]
    assert axes[0].get_ylim() == axes[1].get_ylim()
    assert axes[2].get_ylim() == axes[3].get_ylim()
    assert len(axes[3].lines[0].get_ydata()) == 24 * 16


def test_a_single_patch_can_be_drawn(tmp_path: Path) -> None:
    alone = AttentionDistance(np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32), 0.0, 0.0, 1)
    paper_figures.plot_attention_distance({"": alone}, tmp_path / "d.png")
    paper_figures.plot_position_similarity(
        {"": compute_position_similarity(model_factory.build_vit(image_size=(8, 8)))}, tmp_path / "p.png"
    )


def test_any_name_is_drawn_and_equal_numbers_give_equal_bytes(tmp_path: Path) -> None:
    few, similar = (
        compute_filters(model_factory.build_vit(), count=7),
        compute_position_similarity(model_factory.build_vit()),
    )
    for name in ANY_NAMES[:4]:
        paper_figures.plot_filters({name: few, "b": few}, tmp_path / "f.png")
    written = []
    for _ in range(2):
        paper_figures.plot_filters({name: few, "b": few}, tmp_path / "f.png")
        paper_figures.plot_position_similarity({name: similar}, tmp_path / "p.png")
        paper_figures.plot_attention_distance({name: far(2, 2)}, tmp_path / "d.png")
        written.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(tmp_path.iterdir())])
    assert len(written[0]) == 3
    assert written[0] == written[1]


def curves(images: int, start: float) -> Faithfulness:
    fractions = np.linspace(0, 1, 11, dtype=np.float32)
    falling = np.tile(start * (1 - fractions), (images, 1))
    return Faithfulness(fractions, falling, falling[:, ::-1])


def test_faithfulness_shows_each_order_with_its_area(tmp_path: Path, drawn: list[Figure]) -> None:
    orders = {"relevance": curves(3, 0.4), "rollout": curves(3, 0.6), "random": curves(3, 1)}
    paper_figures.plot_faithfulness({"one": orders, "other": orders}, tmp_path / "f.png")
    assert len(drawn[0].axes) == 4
    deletion, insertion = drawn[0].axes[:2]
    labels = [text.get_text() for text in deletion.get_legend().get_texts()]
    assert labels == ["relevance, area 0.200", "rollout, area 0.300", "random, area 0.500"]
    assert deletion.get_title(loc="left") == "Deletion, one, 3 images"
    np.testing.assert_allclose(deletion.lines[0].get_ydata(), np.linspace(0.4, 0, 11), atol=1e-6)
    np.testing.assert_allclose(insertion.lines[2].get_ydata(), np.linspace(0, 1, 11), atol=1e-6)


def test_cka_is_a_map_for_each_pair_of_models_from_the_embedding_up(tmp_path: Path, drawn: list[Figure]) -> None:
    within, between = np.eye(4, dtype=np.float32), np.full((4, 3), 0.5, dtype=np.float32)
    similarities = {("a", "a"): within, ("a", "b"): between, ("b", "b"): np.eye(3, dtype=np.float32)}
    paper_figures.plot_cka(similarities, tmp_path / "c.png")
    panels = drawn[0].axes[:3]
    assert [axes.get_title(loc="left") for axes in panels] == ["Within a", "Between both", "Within b"]
    assert [axes.images[0].get_array().shape for axes in panels] == [(4, 4), (4, 3), (3, 3)]
    assert (panels[1].get_ylabel(), panels[1].get_xlabel()) == ("layer of a", "layer of b")
    assert all(axes.images[0].get_clim() == (0, 1) for axes in panels)
    assert panels[0].get_ylim()[0] < panels[0].get_ylim()[1]  # layer 0 is at the bottom


def test_the_overview_has_a_row_of_three_panels_for_each_model(tmp_path: Path, drawn: list[Figure]) -> None:
    vit = model_factory.build_vit()
    filters, similarity = compute_filters(vit), compute_position_similarity(vit)
    panels = {"one": (filters, similarity, far(2, 3)), "other": (filters, similarity, far(2, 3, seed=1))}
    paper_figures.plot_overview(panels, tmp_path / "o.png", initial={"one": far(2, 3, seed=2)})
    rows = [drawn[0].axes[:3], drawn[0].axes[3:]]
    for (name, (_, _, distance)), (tiles, maps, heads) in zip(panels.items(), rows, strict=True):
        assert tiles.get_title(loc="left").startswith(f"{name}\n{len(filters.tiles)} principal components")
        assert maps.get_xlabel() == "input patch column"
        mean = next(line for line in heads.lines if line.get_label() == "mean of the heads")
        np.testing.assert_allclose(mean.get_ydata(), distance.distance.mean(axis=1))
    assert rows[0][0].get_position().y0 > rows[1][0].get_position().y1
