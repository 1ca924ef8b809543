"""The shape of the project itself: its public names, its layers, its size."""

import ast
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitrail
from vitrail.training import losses

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vitrail"
LONGEST_FUNCTION, LONGEST_FILE, LONGEST_USUAL_FUNCTION = 60, 450, 25  # lines
LONG_FILES: set[str] = set()  # tables of values
MIN_TESTED_LINES = 90  # a module with more has a test file of its name
TESTED_ELSEWHERE = {  # module -> where its tests are
    "api/notebook.py": "test_notebooks.py",
    "cli/arguments/data.py": "cli/test_parsing.py",
    "cli/arguments/evaluation.py": "cli/test_parsing.py",
    "cli/arguments/models.py": "cli/test_parsing.py",
    "cli/arguments/studies.py": "cli/test_parsing.py",
    "cli/arguments/training.py": "cli/test_parsing.py",
    "cli/options.py": "cli/test_parsing.py",
}
NOT_PARTICIPLES = {"embed", "feed", "seed", "speed"}
PARTICIPLES = {
    "begun", "bound", "broken", "built", "chosen", "cut", "done", "drawn", "found", "given", "gone", "held", "hidden",
    "kept", "known", "led", "left", "lost", "made", "meant", "met", "put", "said", "seen", "sent", "shown", "spread",
    "taken", "told", "written",
}  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse_modules() -> dict[str, ast.Module]:
    """The syntax tree of each module, by its path below the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def list_functions() -> Iterator[tuple[str, Function]]:
    """Every function with the path of its module."""
    for path, tree in parse_modules().items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, Function))


def count_lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_the_public_names_are_these() -> None:
    names = [
        "Classifier", "Conversion", "Decoder", "Evaluation", "FeatureIndex", "Figures", "Logger", "LossFunction",
        "Neighbor", "Prediction", "PredictionList", "PreprocessConfig", "ProbeResult", "Recipe", "Run", "Scorer",
        "SearchResult", "Server", "StepEnd", "Suspects", "Trained", "ValidationResult", "adapt", "attention_maps",
        "convert", "create", "dense", "distill", "embed", "errors", "evaluate", "figures", "finetune", "index", "load",
        "load_recipe", "predict", "probe", "save", "search", "serve", "suspects", "train", "zero_shot",
    ]  # fmt: skip
    assert vitrail.__all__ == names
    for name in sorted(set(names) - {"LossFunction", "errors"}):  # a type without a name, and a module
        assert getattr(vitrail, name).__name__ == name
    assert vitrail.LossFunction is losses.LossFunction
    assert vitrail.Preprocess is vitrail.PreprocessConfig  # the name of version 0.1.0
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vitrail.nothing


def test_importing_the_package_imports_no_torch() -> None:
    script = "import sys, vitrail, vitrail.config, vitrail.presets; vitrail.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_layers_hold() -> None:
    """`make lint` prints the contract; this keeps it with whoever runs only the tests."""
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        pytest.skip("import-linter is not installed beside this python: `make test` installs it")
    found = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_a_warning_raised_in_vitrail_is_an_error() -> None:
    with pytest.raises(UserWarning, match="planted"):
        warnings.warn_explicit("planted", UserWarning, "vit.py", 1, module="vitrail.model.vit")


def test_every_module_says_what_it_is() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        assert path.read_text(encoding="utf-8").startswith('"""'), path


def test_functions_and_files_fit_on_a_screen_or_two() -> None:
    lengths = {f"{path} {node.name}": count_lines(node) for path, node in list_functions()}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}
    assert sorted(lengths.values())[int(0.9 * len(lengths))] < LONGEST_USUAL_FUNCTION
    files = {str(path.relative_to(PACKAGE)): path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    assert {name for name, length in files.items() if length > LONGEST_FILE} == LONG_FILES


def test_a_function_is_a_verb_and_its_object() -> None:
    """No function is named by a bare participle: `open_image`, not `opened`. Properties are nouns, and may be."""
    for path, node in list_functions():
        if any(ast.unparse(each).endswith(("property", ".setter")) for each in node.decorator_list):
            continue
        name = node.name.strip("_")
        participle = name in PARTICIPLES or (re.fullmatch("[a-z]+ed", name) and name not in NOT_PARTICIPLES)
        assert not participle, f"{path}:{node.lineno} {node.name}"


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(
        node.name.lstrip("_")
        for tree in parse_modules().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_tests_mirror_the_source() -> None:
    """A module of weight has a test file of its name, so that its tests are found by guessing."""
    tests = {str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        if path.read_text().count("\n") > MIN_TESTED_LINES and path.name != "__init__.py":
            expected = TESTED_ELSEWHERE.get(str(module), str(module.with_name(f"test_{module.name}")))
            assert expected in tests, f"{module} has no {expected}"


def test_the_repository_stays_small() -> None:
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if found.returncode:
        pytest.skip("this is no git checkout")
    files = [ROOT / name for name in found.stdout.decode().split("\0") if name]
    assert sum(path.stat().st_size for path in files if path.is_file()) < 24 * 2**20
