"""The folder of figures: whose it is, and what is left of earlier figures."""

from pathlib import Path

import pytest

from vitrail.errors import UsageError
from vitrail.visualization.figure_folder import RECORD_FILE, FigureFolder, claim_folder


def test_a_folder_of_others_is_not_claimed(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("")
    for out in (str(tmp_path), str(tmp_path / "mine.txt"), "s3://bucket/figures"):
        with pytest.raises(UsageError, match="must be a local folder"):
            claim_folder(out)


def test_earlier_figures_are_removed_and_files_of_others_stay(tmp_path: Path) -> None:
    folder = FigureFolder(tmp_path, ["model"])
    folder.clear()
    names = ("filters.png", "overview.png", "cka.npz", "rollout/0.png")
    for name in (*names, "mine.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert claim_folder(str(tmp_path)) == tmp_path
    folder.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["mine.txt", "rollout", RECORD_FILE])
