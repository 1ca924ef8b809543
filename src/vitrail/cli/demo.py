"""`vitrail demo`: train a Vision Transformer on handwritten digits, from random weights, on this machine."""

from pathlib import Path

from vitrail.cli import output, runs


def main(out: Path | None = None, resume: bool = False, json: bool = False) -> None:
    """Train a small ViT on 1,439 real digits of 8 x 8 pixels, and let it read 179 others. Takes two minutes.

    Args:
        out: The run's folder; runs/demo, runs/demo-2, ... by default.
        resume: Resume an interrupted demo.
        json: Print JSON.
    """
    from vitrail.train.demo import run_demo

    result = run_demo(None if out is None else str(out), resume=resume, callbacks=runs.make_callbacks())
    counts, nearest, folder = result.counts, result.nearest_neighbor, result.folder
    if json:
        output.print_json(
            {
                "folder": str(folder),
                "images": counts.images,
                "right": counts.correct,
                "nearest_neighbor": nearest,
            }
        )
        return
    output.print_table(
        [
            ("vision transformer", f"{counts.correct} of {counts.images} test digits right ({counts.top1:.1%})"),
            ("nearest neighbor", f"{nearest} of {counts.images} ({nearest / counts.images:.1%}), by pixels"),
            ("mistakes", "; ".join(result.list_mistakes()) or "none"),
            ("run", str(folder)),
            ("report", f"{folder}/report.html"),
        ]
    )
