"""Memory of the figures of a large model: `make soak` runs it, which takes half an hour on two cores."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.image_files import encode_image, make_image

DRAWN = """
import resource, sys
from vitrail.cli import main
boxes = f"{sys.argv[1]}/boxes.txt"  # with them the images that are not drawn are read, too
options = ["--boxes", boxes, "--image-size", "384", "--num-images", "2", "--device", "cpu", "--json"]
assert not main(["figures", "l16", sys.argv[1], "--out", sys.argv[2], *options])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
"""


@pytest.mark.soak
def test_a_large_models_attention_over_128_images_fits_in_8_gigabytes(
    tmp_path: Path, soaked: Callable[[int, str, str, str], None]
) -> None:
    """ViT-L/16 at 384: all maps of one image are 511 MB, those of 128 images 65 GB."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "boxes.txt").write_text("0.jpg object 0 0 200 200\n")
    for number in range(128):
        (tmp_path / "images" / f"{number}.jpg").write_bytes(encode_image(make_image(number, (384, 400))))
    arguments = [sys.executable, "-c", DRAWN, str(tmp_path / "images"), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak = int(done.stderr.split()[-1])
    soaked(20, "figures of ViT-L/16 at 384 over 128 images", "under 8 GB", f"{peak / 1e9:.2f} GB")
    assert json.loads(done.stdout)["numbers"]["attention"]["l16"]["images"] == 128
    assert np.load(tmp_path / "out" / "images.npz")["rollouts"].shape == (128, 24, 24)
    assert peak < 8e9
