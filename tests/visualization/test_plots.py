"""What the figures show, read back from their pixels and from the texts that were drawn."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image, ImageColor

from vitrail.errors import DataError
from vitrail.visualization import plots

ANY_NAMES = [
    "a name that is much longer than any picture is wide " * 3,
    "$x_{$",
    "猫 кот قطة é",
    "\udc80\n\x07",
    "",
]


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


def pixels(path: Path) -> NDArray[np.int64]:
    with Image.open(path) as picture:
        return np.array(picture.convert("RGB"), dtype=np.int64)  # (H, W, 3)


def box(picture: NDArray[np.int64], colour: str, share: float = 1) -> tuple[int, int, int, int]:
    """Top, left, bottom, right of the area of a colour, mixed with white by its share; letters' edges do not count."""
    wanted = 255 + share * (np.array(ImageColor.getrgb(colour)) - 255)
    matches = (abs(picture - wanted) <= 1.5).all(axis=2)  # (H, W)
    rows, columns = (np.flatnonzero(matches.sum(axis=axis) > 15) for axis in (1, 0))
    return rows[0], columns[0], rows[-1], columns[-1]


def columns(top1: list[float]) -> dict[str, list[float]]:
    epochs = [float(number) for number in range(1, len(top1) + 1)]
    return {
        "epoch": epochs,
        "time": epochs,
        "train/loss": [2 / epoch for epoch in epochs],
        "metrics/accuracy_top1": top1,
        "metrics/accuracy_top5": [min(1, 2 * value) for value in top1],
        "val/loss": [3 / epoch for epoch in epochs],
        "lr/pg0": [1e-3 / epoch for epoch in epochs],
    }


def test_cells_lie_by_true_row_and_said_column_and_are_darker_for_more(tmp_path: Path) -> None:
    plots.plot_confusion_matrix([[4, 64], [16, 36]], ["cat", "dog"], tmp_path / "c.png")
    picture = pixels(tmp_path / "c.png")
    right = [box(picture, plots.BLUE, share) for share in (4 / 16, 12 / 16)]  # the roots of 4/64 and 36/64
    wrong = [box(picture, plots.ORANGE, share) for share in (1, 8 / 16)]
    for (top, left, bottom, end), row, column in zip([*right, *wrong], [0, 1, 0, 1], [0, 1, 1, 0], strict=True):
        assert abs(bottom - top - 99) <= 2
        assert abs(end - left - 99) <= 2
        assert abs(top - right[0][0] - 100 * row) <= 2
        assert abs(left - right[0][1] - 100 * column) <= 2


def test_normalised_rows_are_shares_and_a_class_without_images_is_blank(tmp_path: Path, drawn: list[Figure]) -> None:
    plots.plot_confusion_matrix(
        [[3, 1, 0], [0, 0, 0], [1, 999, 0]], ["a", "b", "c"], tmp_path / "c.png", normalize=True
    )
    texts = {text.get_position(): text.get_text() for text in drawn[0].axes[0].texts}
    assert texts == {(0, 0): "75", (1, 0): "25", (2, 0): "0", (0, 2): "<1", (1, 2): ">99", (2, 2): "0"}
    picture = pixels(tmp_path / "c.png")
    top, left, bottom, right = box(picture, plots.FAINT_GRAY)
    assert abs(bottom - top - 99) <= 2
    assert abs(right - left - 299) <= 4  # the frame
    assert box(picture, plots.BLUE, 0.75**0.5)[2] < top


@pytest.mark.parametrize(("classes", "numbers"), [(1, 1), (8, 64), (31, 0)])
def test_names_and_numbers_as_long_as_they_can_be_read(
    tmp_path: Path, drawn: list[Figure], classes: int, numbers: int
) -> None:
    names = [f"class {number}" for number in range(classes)]
    plots.plot_confusion_matrix(np.eye(classes, dtype=int), names, tmp_path / "c.png")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert len(axes.texts) == numbers


def test_of_a_thousand_classes_those_confused_most_are_drawn_and_the_title_says_so(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    counts = np.diag(np.full(1000, 50))
    counts[700, 3], counts[3, 700], counts[500, 501], counts[999, 0] = 4, 5, 8, 1
    names = [f"class {number}" for number in range(1000)]
    plots.plot_confusion_matrix(counts, names, tmp_path / "c.png", normalize=True)
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()][:6] == [names[n] for n in (3, 700, 500, 501, 0, 999)]
    assert "the 30 most confused classes of 1,000" in axes.get_title(loc="left")
    assert "18 of 18 mistakes are here" in axes.get_title(loc="left")
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert len(texts) == 900
    assert texts[1, 0] == "9"  # 5 of 55


def test_partners_stand_together_and_no_pair_is_torn() -> None:
    counts = np.zeros((8, 8), dtype=int)
    counts[6, 1], counts[2, 3], counts[3, 7], counts[4, 5], counts[0, 6] = 9, 8, 7, 6, 5
    assert plots.select_most_confused(counts, 4) == [1, 6, 2, 3]
    assert plots.select_most_confused(counts, 6) == [1, 6, 0, 2, 3, 7]  # 4 and 5 had no room, 0 had: it is taken for 6
    assert plots.select_most_confused(counts, 8) == [1, 6, 0, 2, 3, 7, 4, 5]
    assert plots.select_most_confused(np.eye(5, dtype=int), 3) == [0, 1, 2]


def test_long_names_that_begin_alike_stay_different(tmp_path: Path, drawn: list[Figure]) -> None:
    names = ["the very same long beginning, one", "the very same long beginning, two", "a long name of its own, alone"]
    plots.plot_confusion_matrix(np.eye(3, dtype=int), names, tmp_path / "c.png")
    shown = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert shown == ["the very sam…inning, one", "the very sam…inning, two", "a long name of its own,…"]


@pytest.mark.parametrize("classes", [5, 35])
def test_no_name_breaks_a_picture_and_nothing_is_clipped(tmp_path: Path, classes: int) -> None:
    counts = np.full((classes, classes), 1_234_567)
    plots.plot_confusion_matrix(counts, (ANY_NAMES * 7)[:classes], tmp_path / "c.png")
    picture = pixels(tmp_path / "c.png")
    edge = np.concatenate([picture[:5].reshape(-1, 3), picture[-5:].reshape(-1, 3), picture[:, :5].reshape(-1, 3)])
    assert (edge == 255).all()
    assert (picture[:, -5:] == 255).all()
    assert max(picture.shape) < 1400


def test_the_first_best_epoch_is_marked_with_its_value(tmp_path: Path, drawn: list[Figure]) -> None:
    plots.plot_training_curves(columns([0.1, 0.5, float("nan"), 0.5, 0.4]), tmp_path / "results.png")
    accuracies = drawn[0].axes[1]
    assert accuracies.get_title(loc="right") == "best 50.00%, epoch 2"
    (mark,) = [line for line in accuracies.lines if line.get_color() == plots.ORANGE]
    assert (mark.get_xdata(), mark.get_ydata()) == ([2], [0.5])
    picture = pixels(tmp_path / "results.png")
    assert picture.shape[1] == 1200
    _, across = np.nonzero((picture == ImageColor.getrgb(plots.ORANGE)).all(axis=2))
    assert 400 < across.min() < across.max() < 800


def test_an_accuracy_between_two_gaps_is_a_dot(tmp_path: Path) -> None:
    """A line needs two neighbours; evaluated every second epoch only, a run would show nothing."""
    halves = [0.5 if epoch % 2 else float("nan") for epoch in range(60)]
    nothing = [float("nan")] * 60
    counts = []
    for top1 in (halves, nothing):
        values = columns(top1) | {"metrics/accuracy_top5": nothing, "val/loss": nothing, "lr/pg0": nothing}
        plots.plot_training_curves(values, tmp_path / "results.png")
        counts.append((pixels(tmp_path / "results.png") == ImageColor.getrgb(plots.BLUE)).all(axis=2).sum())
    assert counts[0] > counts[1] + 30 * 9


@pytest.mark.parametrize("top1", [[0.3], [float("nan")], [float("inf"), 0.2], [0.0, 0.0], [0.5] * 300])
def test_runs_of_every_length_have_ticks_at_whole_epochs_and_all_values_inside(
    tmp_path: Path, drawn: list[Figure], top1: list[float]
) -> None:
    plots.plot_training_curves(columns(top1), tmp_path / "results.png")
    for axes in drawn[0].axes:
        assert all(tick == round(tick) for tick in axes.get_xticks())
        low, high = axes.get_ylim()
        shown = np.concatenate([np.atleast_1d(np.asarray(line.get_ydata(), dtype=float)) for line in axes.lines])
        assert low < high
        assert ((shown[np.isfinite(shown)] >= low) & (shown[np.isfinite(shown)] <= high)).all()


def test_a_run_without_an_epoch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"results\.png needs at least one epoch"):
        plots.plot_training_curves(columns([]), tmp_path / "results.png")
    assert not list(tmp_path.iterdir())


def test_reliability_bars_are_the_share_right_of_each_bin(tmp_path: Path, drawn: list[Figure]) -> None:
    counts, correct = [2, *[0] * 6, 1, *[0] * 6, 4], [1, *[0] * 13, 3]
    plots.plot_reliability(counts, correct, tmp_path / "r.png", calibration_error=0.1234)
    upper, lower = drawn[0].axes
    for axes, heights in ((upper, [0.5, *[0] * 13, 0.75]), (lower, [2, *[0] * 6, 1, *[0] * 6, 4])):
        (bars,) = axes.containers
        assert isinstance(bars, BarContainer)
        assert np.array_equal(bars.datavalues, heights)
    assert [text.get_text() for text in lower.texts] == ["2", *[""] * 6, "1", *[""] * 6, "4"]
    assert "12.3%" in upper.get_title(loc="left")
    top, _, bottom, _ = box(pixels(tmp_path / "r.png")[:, 300:], plots.BLUE)  # the right half: the last bin
    highest, _, lowest, _ = box(pixels(tmp_path / "r.png")[:, :200], plots.BLUE)  # the left: the first
    assert abs((bottom - top) / (lowest - highest) - 0.75 / 0.5) < 0.02


def test_equal_numbers_give_equal_bytes_whatever_the_users_style(tmp_path: Path) -> None:
    def written(name: str) -> list[bytes]:
        plots.plot_training_curves(columns([0.1, 0.4]), tmp_path / f"{name}1.png")
        plots.plot_confusion_matrix([[5, 1], [2, 7]], ["a", "b"], tmp_path / f"{name}2.png")
        plots.plot_reliability([3, 4], [1, 4], tmp_path / f"{name}3.png", calibration_error=0.1)
        return [(tmp_path / f"{name}{number}.png").read_bytes() for number in (1, 2, 3)]

    plain = written("plain")
    assert not any(word in data for data in plain for word in (b"Software", b"tIME"))  # no version, no date
    with matplotlib.rc_context({"figure.facecolor": "black", "font.size": 30, "savefig.bbox": "tight"}):
        before = dict(matplotlib.rcParams)
        assert written("styled") == plain
        assert dict(matplotlib.rcParams) == before


def test_a_failed_write_leaves_the_old_picture_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(figure: Figure, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    (tmp_path / "c.png").write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", full)
    for name in ("c.png", "new.png"):
        with pytest.raises(OSError, match="no space"):
            plots.plot_confusion_matrix([[1, 0], [0, 1]], ["a", "b"], tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["c.png"]
    assert (tmp_path / "c.png").read_bytes() == b"old"


def test_importing_costs_no_matplotlib_and_drawing_no_pyplot(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from vitrail.visualization import image_grids, plots;"
        "assert 'matplotlib' not in sys.modules; plots.plot_confusion_matrix([[1]], ['a'], Path(sys.argv[1]));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c.png")], check=True)
