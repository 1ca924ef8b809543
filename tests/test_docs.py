"""The documentation site: it builds without a warning, has no dead link, and asks nothing of the network."""

import dataclasses
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
import time
import typing
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import pytest
from tyro.conf import Positional

import vitrail
from tests import browser
from vitrail import cli
from vitrail.cli import parsing
from vitrail.errors import VitrailError

ROOT = Path(__file__).parents[1]
LOADING = {  # tag -> the attribute by which a page loads something
    "audio": "src", "embed": "src", "iframe": "src", "img": "src", "input": "src", "link": "href", "object": "data",
    "script": "src", "source": "src", "track": "src", "video": "src",
}  # fmt: skip


class Page(HTMLParser):
    """The ids of a page, its links, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.ids |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag in LOADING and LOADING[tag] in attributes:
            self.loads.append(attributes[LOADING[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    missing = [name for name in ("sphinx", "myst_parser", "furo") if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install '.[docs]' installs what builds the site")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-c", "docs"]
    ended = subprocess.run(
        [*command, "-d", str(folder / "doctrees"), ".", str(folder / "html")], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_markdown_file_is_a_page(site: Path) -> None:
    sources = [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")]
    assert len(sources) >= 30
    for source in (*sources, Path("CHANGELOG.md"), Path("SECURITY.md"), Path("CONTRIBUTING.md")):
        assert (site / source.with_suffix(".html")).is_file(), source


def test_every_notebook_is_a_page_and_a_download(site: Path, pages: dict[Path, Page]) -> None:
    sources = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
    assert sources
    for source in sources:
        page = site / source.relative_to(ROOT).with_suffix(".html")
        text = page.read_text(encoding="utf-8")
        assert "highlight-python" in text
        assert "&quot;cell_type&quot;" not in text
        [download] = [link for link in pages[page].links if link.endswith(source.name)]
        assert (page.parent / unquote(download)).read_bytes() == source.read_bytes()


def test_no_local_link_is_dead(site: Path, pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            exists = target.is_file() and target.is_relative_to(site.resolve())
            has_fragment = target not in pages or unquote(parts.fragment) in pages[target].ids | {""}
            if not exists or not has_fragment:
                dead.append((path.name, link))
    assert not dead


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    """Links may lead to other sites; resources may not come from them, nor may scripts and styles ask for any."""
    assert not [(path.name, url) for path, page in pages.items() for url in page.loads if re.match("(https?:)?//", url)]
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", text), path.name
    for path in site.rglob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(fetch|import|open)\(\s*['\"](https?:)?//", text), path.name


def test_the_search_index_has_pages_and_names(site: Path) -> None:
    """A script, which a browser reads from a disk too."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    assert {"docs/index", "docs/training", "docs/tutorials/first-finetune", "docs/zoo"} <= set(index["docnames"])
    assert {"rollout", "calibr"} <= index["terms"].keys()


def test_the_reference_has_every_public_name(site: Path, pages: dict[Path, Page]) -> None:
    ids = pages[site / "docs" / "api.html"].ids
    assert {f"vitrail.{name}" for name in vitrail.__all__} - {"vitrail.errors"} <= ids
    assert {"vitrail.config.ViTConfig", "vitrail.config.OptimizerConfig", "vitrail.errors.UsageError"} <= ids
    assert {"vitrail.training.step.train_step", "vitrail.api.serve.ServeKeywords.deadline"} <= ids


def test_the_reference_has_all_that_a_loop_of_ones_own_imports(pages: dict[Path, Page], site: Path) -> None:
    """docs/versions.md covers what the reference lists: so the documented loop, and the class of each callback."""
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    modules: dict[str, str] = {}
    used = {"vitrail.training.loop.StepEnd", "vitrail.training.run_results.ValidationResult"}
    for package, names in re.findall(r"^from (vitrail[\w.]*) import (.+)$", blocks, re.MULTILINE):
        for name in names.split(", "):
            if find_named(f"{package}.{name}".removeprefix("vitrail.").replace(".", "/")):
                modules[name] = f"{package}.{name}"
            else:
                used.add(f"{package}.{name}")
    used |= {f"{modules[name]}.{member}" for name, member in re.findall(r"\b(\w+)\.(\w+)\(", blocks) if name in modules}
    assert len(used) >= 12
    assert used <= pages[site / "docs" / "api.html"].ids


DIFFERENT_KEYWORDS = {
    "settings": "--set",
    "probe_shots": "--probe",
    "trainable_layers": "--layers",
    "penalty": "--lambda",
}
FOR_TERMINALS = {
    "dry_run", "number_of_runs", "json", "row_format", "embed", "features", "normalize", "float16", "attention",
    "fetch_urls", "part", "sbatch", "kubernetes", "nodes", "gpus",
}  # fmt: skip


def list_options(arguments: type[Any]) -> dict[str, str]:
    """The options of a command's arguments, by the names of their fields."""
    options: dict[str, str] = {}
    for name, hint in typing.get_type_hints(arguments, include_extras=True).items():
        kind, *marks = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(kind):
            options |= list_options(typing.cast(type[Any], kind))
        elif Positional not in marks:
            given = next((mark.name for mark in marks if getattr(mark, "name", None)), None)
            options[name] = "--" + (given or name).replace("_", "-")
    return options


@pytest.mark.parametrize(
    "verb",
    ["convert", "distill", "evaluate", "figures", "finetune", "index", "predict", "probe", "search", "serve", "train"],
)
def test_the_page_of_python_names_every_keyword_that_is_not_the_option(verb: str) -> None:
    module, _, group = cli.COMMANDS[verb].arguments.partition(".")
    options = list_options(getattr(importlib.import_module(f"vitrail.cli.arguments.{module}"), group))
    keywords = set(inspect.signature(getattr(vitrail, verb)).parameters)
    assert options.keys() - FOR_TERMINALS <= keywords
    table = (ROOT / "docs" / "python.md").read_text(encoding="utf-8").partition("`help(")[0]
    for name, option in options.items():
        if option != "--" + name.replace("_", "-"):
            assert f"`{option}" in table, option
            assert name in FOR_TERMINALS or DIFFERENT_KEYWORDS[name] == option
            assert name in FOR_TERMINALS or name in table
        elif name in FOR_TERMINALS - {"json"}:
            assert f"`{option}`" in table, option


def test_a_browser_opens_every_page_from_the_disk_and_finds_a_word(site: Path) -> None:
    """On a phone all pages, where a table or a line of code may be too wide; on a wide, dark screen a few."""
    paths = sorted(path for path in site.rglob("*.html") if path.name not in ("genindex.html", "search.html"))
    assert len(paths) >= 40
    wide = {"index", "api", "benchmarks", "zoo", "first-finetune"}
    with browser.open_browser() as chromium:
        for path in paths:
            for width, dark in ((390, False), *([(1400, True)] if path.stem in wide else [])):
                page = chromium.visit(path.as_uri(), width=width, dark=dark)
                assert page.problems == [], path.name
                assert all(url.startswith("file:") for url in page.requests), path.name
                assert page.overflow == [], (path.name, width)
        page = chromium.visit(f"{(site / 'search.html').as_uri()}?q=rollout")
        deadline = time.monotonic() + browser.PATIENCE
        while "docs/figures.html" not in str(page.evaluate("document.body.innerHTML")):
            assert time.monotonic() < deadline, "the search found nothing"
            time.sleep(0.1)
        assert all(url.startswith("file:") for url in page.requests)


def list_commands(path: Path) -> list[str]:
    """The `vitrail` commands in the indented blocks of a page, without comments."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.partition("  #")[0].partition(" > ")[0].strip() for line in text.splitlines() if line[:4] == "    "]
    in_tables = re.findall(r"^\|[^|]*\| `(vitrail [^`]+)` \| ", text, re.MULTILINE) if path.stem == "zoo" else []
    return [line for line in lines if re.match(r"(\w+=\S+ )?(torchrun .* -m )?vitrail ", line)] + in_tables


COMMAND_PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if list_commands(path)]


def check_command(command: str) -> None:
    """Fail unless vitrail's parser accepts a command."""
    words = shlex.split(command[command.index("vitrail ") :])[1:]
    verb = " ".join(words[:2]) if " ".join(words[:2]) in cli.COMMANDS else words[0]
    assert verb in cli.COMMANDS, command
    module, _, group = cli.COMMANDS[verb].arguments.partition(".")
    arguments = getattr(importlib.import_module(f"vitrail.cli.arguments.{module}"), group)
    try:
        parsing.parse_arguments(verb, arguments, words[len(verb.split()) :])
    except VitrailError as error:
        pytest.fail(f"{command}: {error}")


@pytest.mark.parametrize("path", COMMAND_PAGES, ids=lambda path: path.stem)
def test_the_commands_of_a_page_parse(path: Path) -> None:
    for command in list_commands(path):
        check_command(command)


def check_evidence(code: str) -> bool:
    """Whether a code span is a test, a command or a script of bench/; fail if it cannot be run as it stands."""
    if code.startswith("vitrail "):
        check_command(code)
        return True
    if test := re.fullmatch(r"(?:\w+=\w+ pytest )?(tests/[\w/.]+)", code):
        assert (ROOT / test[1]).exists(), code
        return True
    if script := re.match(r"python (?:-m )?(bench[/.]\w+)", code):
        source = (ROOT / script[1].replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        assert [option for option in re.findall(r"--[\w-]+", code) if option not in source] == [], code
        required = re.findall(r'add_argument\("(--[\w-]+)"[^)]*required=True', source)
        assert [option for option in required if option not in code] == [], code
        return True
    if target := re.fullmatch(r"make (\w+)", code):
        assert f"\n{target[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8"), code
    return False


def list_cells(name: str, header: str) -> list[str]:
    """The cells below a header in all tables of a page."""
    cells: list[str] = []
    column = None
    for line in (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines():
        row = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if header in row:
            column = row.index(header)
        elif row and column is not None:
            cells.append(row[column])
        elif not line.startswith("|"):
            column = None
    return cells


def test_every_claim_has_a_test_or_a_whole_command() -> None:
    cells = list_cells("evidence.md", "test or command")
    assert len(cells) >= 40
    for cell in cells:
        assert sum(check_evidence(code) for code in re.findall(r"`([^`]+)`", cell)) >= 1, cell


def test_the_commands_of_the_benchmarks_are_whole() -> None:
    cells = list_cells("benchmarks.md", "command")
    assert sum(check_evidence(code) for cell in cells for code in re.findall(r"`([^`]+)`", cell)) >= 20


def test_every_bench_has_its_place_among_the_benchmarks() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    scripts = {path.stem for path in (ROOT / "bench").glob("*.py")}
    scripts -= {"peers", "record"}  # one is imported by others, and one compares two versions of vitrail
    assert [name for name in sorted(scripts) if not re.search(rf"bench[/.]{name}\b", text)] == []


def find_named(name: str) -> bool:
    """Whether a path of the repository or of the package exists: a file, a folder, a module, or a name in a module."""
    for root in (ROOT, ROOT / "src" / "vitrail"):
        path = root / name
        module = path.with_suffix(".py")
        if path.exists() or (path.suffix == "" and module.is_file()):
            return True
        if path.suffix and module.is_file():  # data/sources.open_dataset
            return path.suffix[1:] in module.read_text(encoding="utf-8")
    return False


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md", "docs/evidence.md"])
def test_the_paths_that_a_page_names_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    code = [*re.findall(r"`([^`\n]+)`", text), *(line for line in text.splitlines() if line.startswith("    "))]
    paths = {path for part in code for path in re.findall(r"(?<![\w./:-])[a-z_]+(?:/\w+)+(?:\.\w+)?/?", part)}
    assert len(paths) >= 10
    assert sorted(path for path in paths if not path.startswith("build/") and not find_named(path)) == []


def test_the_tree_names_modules_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = text[text.index("## The tree") : text.index("## The direction of imports")]
    package, count = "", 0
    for line in re.sub(r"\([^)]*\)", "", tree).splitlines():
        if found := re.match(r" {6}(?:\w+\.py +)?(\w+)/", line):
            package = found[1]
        names = re.findall(r"(\w+)\s*(?=·)|(?<=·)\s*(\w+)", line)
        for module in {first or second for first, second in names}:
            assert find_named(f"{package}/{module}"), (package, module)
            count += 1
    assert count >= 60
