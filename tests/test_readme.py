"""Every command and the Python of the README and of two tutorials; of other pages what prints its output or is quick.

Each page runs in order in one folder, and prints what it says. A command that names nothing remote opens no socket.
"""

import dataclasses
import importlib
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

import vitrail
from tests import text_towers
from tests.conftest import require_peer
from tests.data.image_files import make_image, write_image_folder
from tests.inference.feature_rows import make_features, write_parquet
from tests.network import run_watched
from vitrail import cli, recipes
from vitrail.config import PreprocessConfig

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FIRST_FINETUNE = ROOT / "docs" / "tutorials" / "first-finetune.md"
TRAINING_PAGE = ROOT / "docs" / "training.md"
PYTHON_PAGE = ROOT / "docs" / "python.md"
ZERO_SHOT_PAGE = ROOT / "docs" / "zero-shot.md"
OWN_RECIPE = ROOT / "docs" / "tutorials" / "own-recipe.md"
LONGEST_README = 110


def run(arguments: Sequence[str], folder: Path) -> str:
    """What Python prints, if it ends well and looked for no other machine."""
    ended = run_watched(arguments, folder)
    assert ended.code == 0, (arguments, ended.err)
    assert not ended.contacts, (arguments, ended.contacts)
    assert not ended.strangers, (arguments, ended.strangers)
    return ended.out


def find_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def iterate_printing_commands(page: Path) -> Iterator[tuple[str, str]]:
    """The commands of a page's console blocks, each with what it prints."""
    for block in find_blocks(page, "console"):
        yield from re.findall(r"^\$ vitrail (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)


PRINTING = [path for path in (README, *sorted((ROOT / "docs").rglob("*.md"))) if find_blocks(path, "console")]


@pytest.mark.parametrize("page", PRINTING, ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_it_says(page: Path, tmp_path: Path) -> None:
    for command, expected in iterate_printing_commands(page):
        assert run(["-m", "vitrail", *shlex.split(command)], tmp_path) == expected, command
    if page != README:  # its Python comes below
        for block in find_blocks(page, "python"):
            run(["-c", block], tmp_path)


def test_pages_have_commands_to_test() -> None:
    counts = {page.stem: len(list(iterate_printing_commands(page))) for page in PRINTING}
    assert counts.keys() >= {"README", "checkpoints", "data", "scaling"}
    assert sum(counts.values()) >= 10
    for page in PRINTING:  # none is skipped by its form
        assert counts[page.stem] == sum(
            block.count("\n$ ") + block.startswith("$ ") for block in find_blocks(page, "console")
        )


def test_the_readme_is_short() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST_README
    assert [line for line in lines if len(line) > 120] == []


def has_json(arguments: type[Any]) -> bool:
    """Whether a command's arguments, or a group among them, have `--json`."""
    groups = [arguments, *typing.get_type_hints(arguments).values()]
    return any(field.name == "json" for group in groups if is_dataclass(group) for field in dataclasses.fields(group))


def test_every_command_but_serve_has_json() -> None:
    assert "and all but `serve` have `--json`" in README.read_text(encoding="utf-8")
    without = []
    for verb, command in cli.COMMANDS.items():
        module, _, name = command.arguments.partition(".")
        if not has_json(getattr(importlib.import_module(f"vitrail.cli.arguments.{module}"), name)):
            without.append(verb)
    assert without == ["serve"]


def test_the_readmes_links_lead_somewhere() -> None:
    """The site has no README, so its own test of links does not see these."""
    links = re.findall(r"\]\(([^)]+)\)", re.sub(r"\s+", " ", README.read_text(encoding="utf-8")))
    assert len(links) >= 20
    for link in links:
        path, _, fragment = link.partition("#")
        text = (ROOT / path).read_bytes()
        headings = re.findall(r"^#+ (.*)$", text.decode("utf-8"), re.MULTILINE) if fragment else []
        assert not fragment or fragment in [heading.lower().replace(" ", "-") for heading in headings], link


ELSEWHERE = {  # what needs a network runs in these, against one on loopback where there is one
    "vitrail serve runs/finetune": "cli/test_serve.py::test_it_serves_until_a_signal_and_opens_one_socket",
}
SMALLER = {  # the same commands, in seconds, with a model and data that are here
    "timm:vit_small_patch16_224.augreg_in21k": "MODEL",
    "--minutes 10": "--minutes 0.02 --batch 4",
    "minutes=10": "minutes=0.02, batch=4",
    "study sweep DATA --model MODEL": "study sweep DATA --model MODEL --rates 0.01 --steps 2 --batch 4 --image-size 32"
    " --runs 2",
    "train vit-b16-imagenet --data DATA": "train digits --data DATA --dry-run",
    "--epochs 90 --batch 1024": "--epochs 1 --batch 4",
    "recipe show vit-b16-imagenet": "recipe show digits",
    "recipe show plain-s16-imagenet": "recipe show digits",
    "train my.toml --data DATA": "train my.toml --data DATA --epochs 0.5 --batch 4 --warmup 1",
    "study ablate my.toml --data DATA": "study ablate my.toml --data DATA --epochs 0.5 --batch 4 --runs 1",
    'vitrail.train("my.toml", data="photos")': 'vitrail.train("my.toml", data="photos", epochs=0.5, batch=4)',
    "MODEL": "b16.safetensors",
    "OTHER": "other.safetensors",
    "DATA": "photos",
}


def shorten(text: str) -> str:
    for full, small in SMALLER.items():
        text = text.replace(full, small)
    return text


def list_indented_commands(page: Path) -> list[str]:
    """The commands outside of the blocks above, without their comments. (torchrun: runtime/test_distributed.py.)"""
    lines = re.findall(r"^    (vitrail .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [line.partition("  #")[0].strip() for line in lines]


RUNNING = (README, FIRST_FINETUNE, OWN_RECIPE)
QUICK = {  # of pages whose other commands take longer or need what is not here: those that take seconds
    "training.md": (
        "vitrail list recipes",
        "vitrail train digits --data digits",
        "vitrail recipe show digits > my.toml",
        "vitrail train my.toml --data digits --set optimizer.lr=1e-3 augment.mixup=0.2",
    ),
    "tutorials/serve-a-model.md": ("vitrail convert runs/finetune quick.safetensors --measure photos",),
    "measuring.md": (
        "vitrail evaluate MODEL DATA",
        "vitrail probe MODEL DATA --train-on-val",
        "vitrail probe MODEL DATA --save probed.safetensors",
    ),
    "predicting.md": (
        "vitrail predict MODEL 'photos/**/*.jpg' --top 5 --json",
        "vitrail predict MODEL photos/ --embed --out features.npy",
        "vitrail predict MODEL photos/ --attention attention/",
    ),
}


def list_watched_commands() -> list[str]:
    """Every command that runs here, under a watch for the network."""
    printing = [f"vitrail {command}" for page in PRINTING for command, _ in iterate_printing_commands(page)]
    quick = [command for commands in QUICK.values() for command in commands]
    return printing + quick + [command for page in RUNNING for command in list_indented_commands(page)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with what a reader has: a model and another, photos, and new ones."""
    view = PreprocessConfig(size=(32, 32), resize=(36,))
    for name, depth in (("b16", 1), ("other", 2)):
        model = vitrail.create("ti16", image_size=32, num_classes=2, depth=depth, width=32, heads=1, mlp=64)
        trained = vitrail.Trained(model, view, labels=("rose", "tulip"))
        vitrail.save(trained, tmp_path / f"{name}.safetensors")
    write_image_folder(tmp_path / "photos", "train", "val", "test", each=4)
    write_image_folder(tmp_path / "new-photos", each=2, start=100)
    return tmp_path


def run_command(command: str, place: Path) -> None:
    """Run a command in a folder, with what it prints into the file it names."""
    shown, _, target = command.partition(" > ")
    printed = run(["-m", *shlex.split(shown)], place)
    if target:
        (place / target).write_text(printed, encoding="utf-8")


@pytest.mark.parametrize("page", QUICK)
def test_the_quick_commands_of_a_guide_run(page: str, place: Path) -> None:
    listed = list_indented_commands(ROOT / "docs" / page)
    for command in QUICK[page]:
        assert command in listed
        command = shorten(command.replace("runs/finetune", "MODEL"))
        short = " --epochs 0.1 --warmup 1 --out runs/quick --overwrite" if " --data digits" in command else ""
        run_command(command + short, place)


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.stem)
def test_the_other_commands_and_the_python_of_a_page_run(page: Path, place: Path) -> None:
    commands = list_indented_commands(page)
    assert len(commands) >= 4
    for command in commands:
        if command in ELSEWHERE:
            file, _, test = ELSEWHERE[command].partition("::")
            assert f"def {test}" in (ROOT / "tests" / file).read_text(encoding="utf-8")
            continue
        run_command(shorten(command), place)
    python = "\n".join(find_blocks(page, "python"))
    assert python
    run(["-c", shorten(python)], place)
    if page == OWN_RECIPE:
        assert recipes.load_recipe(place / "my.toml") == recipes.get_recipe("digits")


@pytest.mark.parametrize("page", ["figures.md", "large-collections.md", "multi-label.md", "predicting.md"])
def test_the_python_of_a_guide_runs(page: str, place: Path) -> None:
    """With the files that every page names: a model, cat.jpg and dog.jpg."""
    for number, name in enumerate(("cat.jpg", "dog.jpg")):
        make_image(number).save(place / name)
    blocks = find_blocks(ROOT / "docs" / page, "python")
    if page == "large-collections.md":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[parquet]'")
        del blocks[1:]  # those of engines are run by tests/api/test_engines.py
    python = "\n".join(blocks)
    run(["-c", python.replace("model.safetensors", "b16.safetensors")], place)


def test_the_python_of_zero_shot_classifies(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a small random CLIP under the name of the page's."""
    monkeypatch.chdir(place)
    text_towers.write_clip(place / "clip-vit-base-patch32")
    make_image(0).save(place / "cat.jpg")
    [block] = find_blocks(ZERO_SHOT_PAGE, "python")
    exec(block, {})
    printed = capsys.readouterr().out
    assert "an Egyptian mau" in printed or "a golden retriever" in printed
    assert vitrail.load(place / "pets.safetensors").labels == ("an Egyptian mau", "a golden retriever")


def test_the_logger_of_the_guide_to_training_gets_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    [block] = find_blocks(TRAINING_PAGE, "python")
    assert block.count("epochs=5,") == 1
    printed = run(["-c", block.replace("epochs=5,", "epochs=0.1,")], tmp_path)
    assert re.fullmatch(r"lowest validation loss: 2\.\d+\n", printed)
    assert list(tmp_path.glob("runs/train/tensorboard/*"))


def test_the_python_of_the_tutorial_on_serving_serves(place: Path) -> None:
    """It listens on loopback, which the watch for the network would report: so it is not watched."""
    [block] = find_blocks(ROOT / "docs" / "tutorials" / "serve-a-model.md", "python")
    script = block.replace("runs/finetune", "b16.safetensors")
    ended = subprocess.run([sys.executable, "-c", script], cwd=place, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+\n", ended.stdout)


def test_the_python_of_the_page_on_search_finds_images(place: Path) -> None:
    make_image(0).save(place / "cat.jpg")
    write_image_folder(place / "photos", each=3)
    python = find_blocks(ROOT / "docs" / "search.md", "python")[0].replace("model.safetensors", "b16.safetensors")
    assert len(run(["-c", python], place).splitlines()) == 3


def test_the_python_of_the_page_on_distillation_trains_a_student(place: Path) -> None:
    [block] = find_blocks(ROOT / "docs" / "distillation.md", "python")
    smaller = {
        "runs/finetune": "b16.safetensors",
        "ti16": "other.safetensors",
        "settings=settings": "settings=settings, epochs=1, batch=4, workers=0",
    }
    for full, small in smaller.items():
        assert block.count(full) == 1, full
        block = block.replace(full, small)
    run(["-c", block], place)
    assert (place / "runs" / "distill" / "weights" / "best.safetensors").exists()


@pytest.mark.parametrize(("name", "number"), [("faiss", 2), ("usearch", 3), ("lance", 4)])
def test_other_search_engines_read_the_parquet_of_features(name: str, number: int, tmp_path: Path) -> None:
    """Each finds what the index finds: the example on its page asks for the neighbors of the first row."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[parquet]'")
    require_peer(name)
    names, features = [f"{number}.jpg" for number in range(60)], make_features(0, 60)
    write_parquet(tmp_path / "features.parquet", names, features, ["", "truncated"] + [""] * 58)
    vitrail.index(tmp_path / "features.parquet", tmp_path / "index", dtype="float32", progress=False)
    [expected] = vitrail.search(tmp_path / "index", "0.jpg", by_name=True, top=5, device="cpu", progress=False)
    blocks = find_blocks(ROOT / "docs" / "search.md", "python")
    ended = subprocess.run(
        [sys.executable, "-c", blocks[1] + blocks[number]], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{[neighbor.image for neighbor in expected.neighbors]}\n"


def strip_blocks(page: Path) -> str:
    """A page without its blocks that state a language."""
    return re.sub(r"^```\w+\n.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def list_tested_python() -> set[Path]:
    # the first by tests/export/test_docs.py
    names = (
        "distillation",
        "exporting",
        "figures",
        "large-collections",
        "multi-label",
        "predicting",
        "search",
        "tutorials/serve-a-model",
    )
    guides = {ROOT / "docs" / f"{name}.md" for name in names}
    return guides | {*PRINTING, *RUNNING, PYTHON_PAGE, TRAINING_PAGE, ZERO_SHOT_PAGE}


def test_all_python_of_the_docs_is_run_by_a_test() -> None:
    pages = [README, *sorted((ROOT / "docs").rglob("*.md"))]
    assert {page for page in pages if find_blocks(page, "python")} <= list_tested_python()
    for page in pages:  # and none hides in a block without a language
        assert not re.search(r"^    (?:import|from|class|def) \w", strip_blocks(page), re.MULTILINE), page


SMALLER_PYTHON = {  # the same Python, in seconds
    '"timm:vit_small_patch16_224.augreg_in21k", minutes=10': '"model.safetensors", epochs=1, batch=4',
    "recipe, epochs=5,": "recipe, epochs=0.1,",
    "    epochs=2,\n": "    epochs=0.1,\n",
    "32, total_samples=10 *": "32, total_samples=4 *",
    "recipe.batch, total_samples=10 *": "recipe.batch, total_samples=3 *",
}


def test_the_python_of_its_page_runs_as_one_script(tmp_path: Path) -> None:
    model = vitrail.create("ti16", image_size=32, num_classes=2, depth=1, width=32, heads=1, mlp=64)
    view = PreprocessConfig(size=(32, 32), resize=(36,))
    vitrail.save(vitrail.Trained(model, view, ("rose", "tulip")), tmp_path / "model.safetensors")
    write_image_folder(tmp_path / "photos", "train", "val", "test", each=4)
    for number, name in enumerate(("cat.jpg", "dog.jpg")):
        make_image(number).save(tmp_path / name)
    blocks = find_blocks(PYTHON_PAGE, "python")
    assert len(blocks) >= 5
    script = "".join(blocks)
    for full, small in SMALLER_PYTHON.items():
        assert script.count(full) == 1, full
        script = script.replace(full, small)
    printed = run(["-c", script], tmp_path)
    (accuracy,) = re.findall(r"Evaluation\(in-memory model on digits: ([\d.]+)% of 179 images correct", printed)
    assert float(accuracy) > 20  # chance is 10
