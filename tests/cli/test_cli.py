"""The command line: results on stdout, the rest on stderr, exit codes, and no torch before it is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitrail
from tests import making
from vitrail.cli import COMMANDS, main
from vitrail.weights.load import load, save

Capture = pytest.CaptureFixture[str]


def run(*arguments: str, capsys: Capture) -> tuple[int, str, str]:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["info", "--help"], ["convert", "--help"], ["ifno", "b16"], ["info"], [], ["data"], ["data", "chek"]],
)
def test_help_and_typos_are_answered_without_torch(arguments: list[str]) -> None:
    script = (
        "import sys; from vitrail.cli import main\n"
        f"try: code = main({arguments!r})\n"
        "except SystemExit as stop: code = stop.code\n"
        "heavy = {'torch', 'numpy', 'PIL', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == (0 if "--help" in arguments else 2), found.stderr
    assert "vitrail" in (found.stdout + found.stderr)


def test_a_typo_gets_the_nearest_verb_and_the_version_is_told(capsys: Capture) -> None:
    code, out, err = run("ifno", "b16", capsys=capsys)
    assert (code, out) == (2, "")
    assert "no command ifno; did you mean info?" in err
    assert "no command data chek; did you mean data check?" in run("data", "chek", "x", capsys=capsys)[2]
    assert "say what to do: data check, data get" in run("data", capsys=capsys)[2]
    assert "find bad files" in run("data", "--help", capsys=capsys)[1]
    code, out, _ = run("--version", capsys=capsys)
    assert (code, out) == (0, f"vitrail {vitrail.__version__}\n")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("finetune photos --modle x", "vitrail finetune: no option --modle; did you mean --model?"),
        ("finetune photos --zzzz=3", "vitrail finetune: no option --zzzz; vitrail finetune --help lists them"),
        (
            "finetune photos --recipe papr",
            "vitrail finetune: --recipe takes default, paper or bit, not 'papr'; did you mean paper?",
        ),
        (
            "train r --data d --track=tensorbord",
            "vitrail train: --track takes tensorboard, not 'tensorbord'; did you mean tensorboard?",
        ),
        (
            "probe m d --methods knn liner",
            "vitrail probe: --methods takes few-shot, knn, linear or logistic, not 'liner'; did you mean linear?",
        ),
        ("probe m d --lambda x", "vitrail probe: --lambda takes auto or a number, not 'x'"),
        ("finetune photos --epochs abc", "vitrail finetune: --epochs takes a number, not 'abc'"),
        ("finetune photos --batch 2.5", "vitrail finetune: --batch takes a whole number, not '2.5'"),
        ("finetune photos --model", "vitrail finetune: --model needs a value"),
        ("finetune photos more", "vitrail finetune: no place for more; vitrail finetune --help lists what it takes"),
        ("list recipe", "vitrail list: it takes models or recipes, not 'recipe'; did you mean recipes?"),
        ("info", "vitrail info: it needs MODEL: A file or folder"),
    ],
)
def test_a_mistyped_option_or_value_gets_a_line_and_the_nearest_name(command: str, line: str, capsys: Capture) -> None:
    code, out, err = run(*command.split(), capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


@pytest.mark.parametrize("utf8", ["0", "1"])
@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            "info",
            "vitrail info: it needs MODEL: A file or folder of any known format, hf:ORG/NAME[@REVISION], timm:NAME",
        ),
        ("info b16 more", "vitrail info: no place for more; vitrail info --help lists what it takes"),
    ],
)
def test_the_line_of_a_mistake_has_nothing_of_its_box(command: str, line: str, utf8: str) -> None:
    """The box is drawn with lines where the terminal has UTF-8, and with dashes elsewhere."""
    environment = {**os.environ, "PYTHONUTF8": utf8, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    arguments = [sys.executable, "-m", "vitrail", *command.split()]
    found = subprocess.run(arguments, capture_output=True, encoding="utf-8", env=environment)
    assert found.returncode == 2
    assert found.stderr.startswith(line)
    assert not set("╭╰│─") & set(found.stderr)
    assert "helptext" not in found.stderr


def test_behind_an_equals_sign_stands_the_only_value(capsys: Capture) -> None:
    code, _, err = run("probe", "--shots=5", "b16", "nowhere", capsys=capsys)
    assert (code, err.startswith("vitrail: nowhere does not exist")) == (3, True)


def test_what_follows_two_dashes_is_no_option(capsys: Capture) -> None:
    code, _, err = run("info", "--", "--b16", capsys=capsys)
    assert code != 0
    assert "no file or folder is called '--b16'" in err


def test_options_are_taken_with_dashes_underscores_and_equals(tmp_path: Path, capsys: Capture) -> None:
    for number, option in enumerate((("--image-size=32",), ("--image_size", "32"), ("--image-size", "32", "48"))):
        code, _, err = run("convert", "ti16", str(tmp_path / f"{number}.safetensors"), *option, capsys=capsys)
        assert code == 0, err


def test_every_verb_is_explained(capsys: Capture) -> None:
    _, out, _ = run("--help", capsys=capsys)
    for verb in COMMANDS:
        assert f"\n  {verb} " in out
        code, text, _ = run(*verb.split(), "--help", capsys=capsys)
        assert code == 0
        assert f"usage: vitrail {verb}" in text


def test_python_dash_m_is_the_command() -> None:
    found = subprocess.run([sys.executable, "-m", "vitrail", "--help"], capture_output=True, text=True)
    assert found.returncode == 0
    assert "convert" in found.stdout


def test_info_on_a_preset(capsys: Capture) -> None:
    code, out, _ = run("info", "b16", capsys=capsys)
    assert code == 0
    assert "86,567,656" in out
    assert "17.56 G" in out
    code, out, _ = run("info", "b16", "--json", capsys=capsys)
    found = json.loads(out)
    assert found["parameters"] == 86_567_656
    assert found["architecture"]["heads"] == 12
    assert found["warnings"] == ["a preset has random weights"]


def test_info_on_a_file_tells_all_it_knows(tmp_path: Path, capsys: Capture) -> None:
    path = str(tmp_path / "model.safetensors")
    save(making.trained(making.vit()), path)
    code, out, _ = run("info", path, capsys=capsys)
    assert code == 0
    assert "file " in out
    assert "kind 0; kind 1; kind 2; ..." in out
    assert "not stated by the source" in out
    code, out, _ = run("convert", path, str(tmp_path / "new.safetensors"), "--classes", "3", capsys=capsys)
    code, out, _ = run("info", str(tmp_path / "new.safetensors"), "--json", capsys=capsys)
    found = json.loads(out)
    assert any("head: all zeros" in text for text in found["warnings"])
    assert any("labels: unnamed" in text for text in found["warnings"])
    assert any(text == "head.weight (7, 32): removed" for text in found["origin"]["changes"])


def test_info_prints_what_was_assumed(tmp_path: Path, capsys: Capture) -> None:
    save(making.trained(making.vit(width=64, heads=1, gelu="erf")), tmp_path / "bare.safetensors", "timm")
    code, out, _ = run("info", str(tmp_path / "bare.safetensors"), capsys=capsys)
    assert code == 0
    assert "heads: 1, assumed from width 64 / 64" in out
    assert "preprocessing: unknown" in out


def test_list_names_every_preset(capsys: Capture) -> None:
    code, out, _ = run("list", capsys=capsys)
    assert code == 0
    assert "so400m14" in out
    assert "torchvision" in out
    code, out, _ = run("list", "--json", capsys=capsys)
    assert {model["name"] for model in json.loads(out)["models"]} >= {"ti16", "b16", "h14", "bigg14"}


def test_convert_lists_each_change_and_note(tmp_path: Path, capsys: Capture) -> None:
    source, target = str(tmp_path / "a.safetensors"), str(tmp_path / "b")
    save(making.trained(making.vit()), source)
    options = ["--to", "timm", "--classes", "3", "--image-size", "48", "--patch", "16", "--channels", "1"]
    code, out, err = run("convert", source, target, *options, capsys=capsys)
    assert code == 0
    for name in ("head.weight", "pos_embed", "patch_embed.proj.weight", "preprocess.size", "preprocess.mean"):
        assert name in out
    assert f"written  {target} (timm)" in out
    assert f"model: {source}" in err
    config = load(Path(target)).model.config
    assert (config.classes, config.image_size, config.patch, config.channels) == (3, (48, 48), 16, 1)


def test_convert_names_classes_and_preprocessing(tmp_path: Path, capsys: Capture) -> None:
    save(making.trained(making.vit(width=64, heads=1, gelu="erf")), tmp_path / "bare.safetensors", "timm")
    (tmp_path / "names.txt").write_text("\n".join("abcdefg"))
    options = ["--labels", str(tmp_path / "names.txt"), "--preprocess", "imagenet", "--json"]
    code, out, _ = run(
        "convert", str(tmp_path / "bare.safetensors"), str(tmp_path / "new.safetensors"), *options, capsys=capsys
    )
    assert code == 0
    assert json.loads(out)["changes"] == ["preprocess: imagenet, given by hand", "labels: none -> 7 names"]
    loaded = load(tmp_path / "new.safetensors")
    assert loaded.labels == tuple("abcdefg")
    assert loaded.preprocess is not None
    assert loaded.preprocess.mean == (0.485, 0.456, 0.406)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["info", "b17x"], 2, "there is no preset 'b17x'"),
        (["info", "./nothing"], 4, "nothing does not exist"),
        (["info", "{tmp}/text.safetensors"], 4, "damaged or no safetensors file"),
        (["convert", "ti16", "{tmp}/there.safetensors"], 2, "exists already"),
        (["convert", "ti16", "{tmp}/out", "--to", "torchvision"], 2, "call it"),
        (["convert", "ti16", "{tmp}/out.npz"], 2, "or say --to google"),
        (["convert", "ti16", "{tmp}/out"], 2, "or say --to timm or transformers"),
        (["convert", "d-timm", "{tmp}/out.safetensors"], 2, "vitrail: no file or folder is called 'd-timm'"),
        (["convert", "ti16", "{tmp}/out.pth", "--to", "torchvision"], 4, "gelu is 'tanh'"),
        (
            ["convert", "ti16", "{tmp}/out.safetensors", "--labels", "nowhere.txt"],
            2,
            "neither 'imagenet1k' nor a text file",
        ),
        (["convert", "ti16", "{tmp}/out.safetensors", "--image-size", "225"], 2, "the nearest is 224 x 224"),
        (
            ["convert", "ti16", "{tmp}/out.safetensors", "--image-size", "1", "2", "3"],
            2,
            "one side or height and width",
        ),
        (["convert", "ti16", "{tmp}/out.safetensors", "--classes", "-1"], 2, "classes is -1"),
        (["convert", "ti16", "{tmp}/out.safetensors", "--to", "jax"], 2, "jax"),
    ],
)
def test_mistakes_get_one_line_the_right_code_and_no_file(
    arguments: list[str], code: int, message: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "text.safetensors").write_text("hello, this is text and no model")
    (tmp_path / "there.safetensors").write_text("")
    before = sorted(tmp_path.iterdir())
    found, out, err = run(*(argument.format(tmp=tmp_path) for argument in arguments), capsys=capsys)
    assert found == code
    assert message in err.replace("\n", " ")
    assert out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_errors_of_the_file_system_get_one_line(tmp_path: Path, capsys: Capture) -> None:
    for target in ("/proc/nothing/x.safetensors", "/dev/null/x.safetensors"):
        code, _, err = run("convert", "ti16", target, capsys=capsys)
        assert code == 2
        assert err.count("\n") == 2  # the model that was taken, and the error
    code, _, err = run("info", "x" * 300, capsys=capsys)
    assert code in (2, 4)
    (tmp_path / "latin.txt").write_bytes(b"\xe4\n")
    code, _, err = run(
        "convert", "ti16", str(tmp_path / "o.safetensors"), "--labels", str(tmp_path / "latin.txt"), capsys=capsys
    )
    assert (code, "no UTF-8 text" in err) == (2, True)


def test_out_of_memory_is_exit_5(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.weights import adapt

    def hungry(*_: object) -> None:
        torch.empty(2**60)

    monkeypatch.setattr(adapt, "_change_grid", hungry)
    code, _, err = run("convert", "ti16", str(tmp_path / "o.safetensors"), "--patch", "8", capsys=capsys)
    assert (code, err.splitlines()[-1]) == (5, "vitrail: out of memory")


def test_control_characters_in_names_are_not_printed(tmp_path: Path, capsys: Capture) -> None:
    labels = ("\x1b[2Jgone", "two\nlines", *"cdefg")
    save(making.trained(making.vit(), labels=labels), tmp_path / "model.safetensors")
    code, out, _ = run("info", str(tmp_path / "model.safetensors"), capsys=capsys)
    assert code == 0
    assert "\x1b" not in out
    assert "two\N{REPLACEMENT CHARACTER}lines" in out


def test_a_full_disk_is_exit_5(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.weights import tensor_files

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files, "write_tensors", full)
    code, _, err = run("convert", "ti16", str(tmp_path / "out.safetensors"), capsys=capsys)
    assert code == 5
    assert "no space left on the disk" in err
    assert list(tmp_path.iterdir()) == []
