"""What the tests of Ray run, in a process of its own: Ray leaves threads behind, and other tests fork.

    python -m tests.api.ray_runs NAME FOLDER

FOLDER has images/ in Parquet files and model.safetensors.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import vitrail


class KillOnce:
    """A scorer that kills its process at the third batch of all, once: the file `marker` remembers it."""

    def __init__(self, model: str, folder: str) -> None:
        self.score, self.folder = vitrail.Scorer(model, top=2, column="pixels"), Path(folder)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        (self.folder / f"batch-{batch['number'][0]}-{os.getpid()}").touch()
        if len(list(self.folder.glob("batch-*"))) >= 3:
            with contextlib.suppress(FileExistsError):
                (self.folder / "marker").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return self.score(batch) | {"batch": np.full(len(batch["number"]), batch["number"][0])}


def kill_a_worker(ray: Any, folder: Path) -> None:
    """Decode in one process and score in two, of which one dies; the rows go to labels/."""
    model = str(folder / "model.safetensors")
    (folder / "calls").mkdir()
    pool, numpy = ray.data.ActorPoolStrategy, {"batch_size": 4, "batch_format": "numpy"}
    (
        ray.data.read_parquet(str(folder / "images"))
        .repartition(15)  # so that both processes have work
        .map_batches(vitrail.Decoder, fn_constructor_kwargs={"model": model}, compute=pool(size=1), **numpy)
        .map_batches(
            KillOnce,
            fn_constructor_kwargs={"model": model, "folder": str(folder / "calls")},
            compute=pool(size=2),
            **numpy,
        )
        .drop_columns(["pixels"])
        .write_parquet(str(folder / "labels"))
    )


def run_page(ray: Any, folder: Path) -> None:
    """Run the Python of the page, which is in page.py."""
    exec((folder / "page.py").read_text(encoding="utf-8"), {})


RUNS: dict[str, Callable[[Any, Path], None]] = {"kill_a_worker": kill_a_worker, "run_page": run_page}


def main(name: str, folder: Path) -> None:
    """Run one on a cluster on this machine alone, with room for three actors and for tasks that read."""
    import ray

    ray.init(num_cpus=5, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    RUNS[name](ray, folder)
    ray.shutdown()


if __name__ == "__main__":
    from tests.api import ray_runs  # so that workers find its classes by this name

    ray_runs.main(sys.argv[1], Path(sys.argv[2]))
