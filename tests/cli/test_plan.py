"""`vitrail plan`: what it prints, as text and as JSON (the numbers: tests/training/test_plan.py)."""

import subprocess
import sys

import pytest

from tests.training.test_plan import Capture, plan_facts
from vitrail.cli import main


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["b16", "--gpu", "h20"], ["vit-b61-jft"], ["vit-b16-jft", "--sbatch"], ["b16", "--kubernetes"]],
)
def test_help_typos_and_the_script_need_no_torch(arguments: list[str]) -> None:
    script = (
        "import sys; from vitrail.cli import main\n"
        f"try: main({['plan', *arguments]!r})\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


def test_the_advised_micro_batches_fit_and_fewer_do_not(capsys: Capture) -> None:
    main(["plan", "b16", "--gpu", "l40s"])
    assert "too much for a GPU of 48.0 GB: --micro-batches 7 fits." in capsys.readouterr().out
    for parts, fits in ((6, False), (7, True)):
        result = plan_facts("b16", "--gpu", "l40s", "--micro-batches", str(parts), capsys=capsys)
        assert (result["memory"]["whole"]["total"] <= 0.9 * 48e9) == fits
    main(["plan", "b16", "--gpu", "l40s", "--micro-batches", "7"])
    assert "586 images at once take" in capsys.readouterr().out
    main(["plan", "bigg14", "--gpu", "rtx4090"])
    assert "not even one fits a GPU of 24.0 GB" in capsys.readouterr().out


def test_the_text_fits_a_screen_and_names_its_assumption(capsys: Capture) -> None:
    main(["plan", "vit-h14-jft", "--nodes", "8", "--gpus", "8"])
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 24
    assert max(map(len, out.splitlines())) < 100
    for text in ("633,685,480", "30% of 989 TFLOP/s each (assumed)", "8 nodes of 8 x h200", "--shard"):
        assert text in out
    assert "4,258 exaFLOPs (the paper: 4,262)" in out
    assert "164 GPU-days (the paper: 2,500 TPUv3-core-days)" in out


def test_json_holds_the_script_too(capsys: Capture) -> None:
    result = plan_facts("vit-b16-jft", "--sbatch", capsys=capsys)
    assert result["sbatch"].startswith("#!/bin/bash\n")
    assert set(result) == {
        "name", "model", "machine", "parameters", "flops_per_image", "images", "epochs", "batch", "micro_batch",
        "steps", "exaflops", "paper", "seconds", "gpu_days", "memory", "disk", "traffic", "sbatch",
        "kubernetes",
    }  # fmt: skip
