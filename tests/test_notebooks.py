"""The notebooks of docs/notebooks: stored without outputs, and executed cell by cell on small data in a real kernel.

A kernel is what a notebook runs in, so progress bars, displayed results and the stop button are tested here too.
"""

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests import browser, model_factory
from vitrail.api import notebook
from vitrail.api.progress import NotebookBar
from vitrail.report.run_facts import gather_facts

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
MISSING = [name for name in ("nbclient", "nbformat", "ipykernel") if find_spec(name) is None]
needs_kernel = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install '.[dev]' installs what executes notebooks"
)
CELL_SECONDS = 300  # for a kernel's start, for one cell and for its outputs, on a busy machine
COLORS = {"green": (40, 160, 60), "red": (190, 40, 50), "yellow": (220, 190, 40)}
SHOWN = {  # what the outputs of a notebook must have
    "finetune-a-folder": (r"test images? correct", "predicted class", "'predictions': "),
    "look-inside-a-model": ("cosine similarity of position", "attention distance", "5-shot", "knn|kNN"),
    "the-paper-in-one-hour": (
        "masked patches on val", r"test images? correct", r"\(B, 1 \+ N, D\)", "the paper: 4,262", "attention distance",
        "against runs/train", "weakest classes", "14,219,146",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a kernel: photos, a model, this python as the kernel `vitrail-test`, and no network."""
    folder = tmp_path_factory.mktemp("notebooks")
    generator = np.random.default_rng(0)
    for name, color in COLORS.items():
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.clip(generator.normal(color, 60, (40, 48, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")
    vitrail.save(model_factory.build_trained(model_factory.build_vit()), folder / "model.safetensors")
    kernel = folder / "jupyter" / "kernels" / "vitrail-test"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": "Python of the tests", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    return os.environ | {
        "VITRAIL_NOTEBOOK_SMALL": "1",
        "VITRAIL_NOTEBOOK_PHOTOS": str(folder / "photos"),
        "VITRAIL_NOTEBOOK_MODEL": str(folder / "model.safetensors"),
        "XDG_DATA_HOME": str(folder / "data"),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_PATH": str(folder / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(vitrail.__file__).parents[1]),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "OMP_NUM_THREADS": "1",
    }


def make_client(cells: Any, folder: Path, environment: Mapping[str, str], patch: pytest.MonkeyPatch) -> Any:
    """A client whose kernel works in `folder`."""
    from nbclient import NotebookClient

    for name in ("JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        patch.setenv(name, environment[name])
    resources = {"metadata": {"path": str(folder)}}
    return NotebookClient(
        cells,
        kernel_name="vitrail-test",
        resources=resources,
        allow_errors=True,
        timeout=CELL_SECONDS,
        startup_timeout=CELL_SECONDS,
        iopub_timeout=CELL_SECONDS,  # by default outputs that come 4 s after the reply are left out
        raise_on_iopub_timeout=True,
    )


def iterate_texts(outputs: Sequence[Any]) -> Iterator[str]:
    """What outputs show: HTML where there is some, else text."""
    for output in outputs:
        if output.output_type == "stream":
            yield output.text
        elif output.output_type in ("display_data", "execute_result"):
            yield output.data.get("text/html") or output.data.get("text/plain", "")


def test_there_are_three_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == SHOWN.keys()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_has_no_outputs(path: Path) -> None:
    stored = json.loads(path.read_text(encoding="utf-8"))
    for cell in stored["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert stored["metadata"].keys() == {"kernelspec", "language_info"}
    assert "".join(stored["cells"][0]["source"]).startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_links_to_files_that_exist(path: Path) -> None:
    stored = json.loads(path.read_text(encoding="utf-8"))
    text = "\n".join("".join(cell["source"]) for cell in stored["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert links
    assert [link for link in links if not (path.parent / link).is_file()] == []


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_small_data(
    path: Path, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat

    cells = nbformat.read(path, as_version=4)
    nbformat.validate(cells)
    make_client(cells, tmp_path, environment, monkeypatch).execute(env=environment)
    outputs = [output for cell in cells.cells if cell.cell_type == "code" for output in cell.outputs]
    errors = ["\n".join(output.traceback) for output in outputs if output.output_type == "error"]
    assert not errors, errors[0]
    assert [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"] == []
    texts = list(iterate_texts(outputs))
    for pattern in SHOWN[path.stem]:
        assert re.search(pattern, "\n".join(texts)), pattern
    results = [text for text in texts if '<div class="vitrail">' in text]
    assert results
    assert not any("IPython.core.display" in text for text in texts)
    if path.stem != "look-inside-a-model":
        assert any("<svg" in text and "<img" in text for text in results), "a run displays its curves and predictions"
        assert any("predicted class" in text for text in results), "an evaluation displays its matrix"
        assert any(re.search("training: .*done in", text) for text in texts), "a bar ends as a line of text"
    assert not [text for text in texts if "<progress" in text], "no bar is left"


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("data", ["digits", "photos"])
def test_the_stop_button_leaves_a_run_that_resumes(
    data: str, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the middle, like any Ctrl-C: a checkpoint, an error that says how to go on, and the same bits."""
    import nbformat

    call = {
        "digits": "vitrail.train('digits', 'digits', out=out, epochs=2, batch=32, **options)",
        "photos": (
            "vitrail.finetune(os.environ['VITRAIL_NOTEBOOK_PHOTOS'], os.environ['VITRAIL_NOTEBOOK_MODEL'], out=out,"
            " epochs=12, batch=8, workers=1, **options)"
        ),
    }[data]
    sources = [
        "import os, time, vitrail\nfrom pathlib import Path\ndone, notes = [], []\n"
        "def on_step(end):\n    done.append(end.step)\n"
        "    if end.step == 20 and not Path('there').exists():\n"
        "        Path('there').touch()\n"
        "        while not any(note.startswith('SIGINT') for note in notes):\n            time.sleep(0.05)\n"
        "def run(out, **options):\n    options |= dict(on_step=on_step, notify=notes.append)\n"
        f"    return {call}",
        "run('stopped')",
        "done.clear(); vitrail.Run('stopped')",
        "resumed = run('stopped', resume=True); first = done[0]; resumed",
        "whole = run('whole')\n"
        "print(first, resumed.weights.read_bytes() == whole.weights.read_bytes(), resumed.accuracy == whole.accuracy)",
    ]
    cells = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = make_client(cells, tmp_path, environment, monkeypatch)

    async def interrupt() -> None:
        while not (tmp_path / "there").exists():
            await asyncio.sleep(0.05)
        await client.km.interrupt_kernel()

    async def execute() -> None:
        async with client.async_setup_kernel(env=environment):
            for index, cell in enumerate(cells.cells):
                button = asyncio.create_task(interrupt()) if index == 1 else None
                await client.async_execute_cell(cell, index)
                if button is not None:
                    button.cancel()  # where the cell failed before its step 20, it would wait forever

    asyncio.run(execute())
    bars_and_error, stopped, resumed, compared = (cell.outputs for cell in cells.cells[1:])
    error = bars_and_error[-1]
    assert (error.output_type, error.ename) == ("error", "StoppedError")
    assert "SIGINT: stopped after step" in error.evalue
    assert "the same call with resume=True" in "\n".join(error.traceback)
    assert any(re.search("training: .*stopped after", text) for text in iterate_texts(bars_and_error))
    assert "not ended" in next(iterate_texts(stopped))
    assert not [output for output in resumed if output.output_type == "error"], resumed[-1]
    (line,) = [text for text in iterate_texts(compared) if "True" in text or "False" in text]
    first, *same = line.split()
    assert int(first) > 20
    assert same == ["True", "True"]


def test_a_bar_is_html_in_a_notebook_and_text_in_a_console() -> None:
    bar = NotebookBar("reading <images>")
    bar.done, bar.total, bar.detail = 1_234, 2_000, "3 < 4"
    assert repr(bar) == "reading <images>: 1,234 of 2,000, 3 < 4"
    html = bar._repr_html_()
    assert '<progress value="1234" max="2000"' in html
    assert "reading &lt;images&gt;" in html
    assert "3 &lt; 4" in html
    bar.total, bar.detail = 0, ""
    assert repr(bar) == "reading <images>: 1,234"
    assert "value=" not in bar._repr_html_()
    bar.seconds, bar.total = 9.0, 2_000
    assert "<progress" not in bar._repr_html_()
    assert repr(bar).startswith("reading <images>: 1,234, done in 9.0 s")
    bar.is_stopped = True
    assert repr(bar).startswith("reading <images>: 1,234 of 2,000, stopped after 9.0 s")
    assert repr(NotebookBar("downloading", of_bytes=True, done=1_500_000)) == "downloading: 1.5 MB"


def test_results_are_readable_in_a_light_and_a_dark_notebook(tmp_path: Path) -> None:
    """Text has the notebook's color, nothing overflows, and nothing is loaded."""
    folder = ROOT / "tests" / "golden" / "run"
    counts = np.array([[8, 1, 0], [2, 5, 3], [0, 0, 9]])
    results = {
        "run": notebook.render_run(folder, gather_facts(folder), ["note: <a note>"]),
        "matrix": notebook.wrap_html(notebook.render_confusion(counts, ["ant", "bee", "wasp"])),
    }
    with browser.open_browser() as chromium:
        for name, html in results.items():
            for dark, width in ((False, 900), (True, 390)):
                color, paper = ("rgb(224, 224, 224)", "#111") if dark else ("rgb(33, 33, 33)", "#fff")
                style = f"<style>body {{ color: {color}; background: {paper}; }} td {{ text-align: right; }}</style>"
                path = tmp_path / f"{name}.html"
                path.write_text(f"<!doctype html><meta charset=utf-8>{style}{html}", encoding="utf-8")
                page = chromium.visit(path.as_uri(), width=width, dark=dark)
                assert page.problems == []
                assert page.requests == [path.as_uri()]
                assert page.overflow == []
                fills = page.evaluate(
                    "[...document.querySelectorAll('.vitrail svg text:not(.inverse)')]"
                    ".map(text => getComputedStyle(text).fill)"
                )
                assert set(fills) == {color}
        assert "note: &lt;a note&gt;" in results["run"]
        assert page.evaluate("document.querySelectorAll('.vitrail rect').length") == 6
