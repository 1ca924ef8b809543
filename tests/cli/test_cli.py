"""The command line: results on stdout, the rest on stderr, exit codes, and no torch before it is needed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitrail
from vitrail.cli import COMMAND_GROUPS, COMMANDS, main

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
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert completed.returncode == (0 if "--help" in arguments else 2), completed.stderr
    assert "vitrail" in (completed.stdout + completed.stderr)


def test_a_typo_gets_the_nearest_verb_and_the_version_is_told(capsys: Capture) -> None:
    code, out, err = run("ifno", "b16", capsys=capsys)
    assert (code, out) == (2, "")
    assert "no command ifno; did you mean info?" in err
    assert "no command eval; did you mean evaluate?" in run("eval", capsys=capsys)[2]
    assert "no command precision; `vitrail --help` lists all" in run("precision", capsys=capsys)[2]
    assert "no command data chek; did you mean data check?" in run("data", "chek", "x", capsys=capsys)[2]
    assert "name a command: data list, data get" in run("data", capsys=capsys)[2]
    assert "find bad files, duplicates" in run("data", "--help", capsys=capsys)[1]
    code, out, _ = run("--version", capsys=capsys)
    assert (code, out) == (0, f"vitrail {vitrail.__version__}\n")


def test_the_overview_has_every_command_by_group_and_examples(capsys: Capture) -> None:
    _, out, _ = run("--help", capsys=capsys)
    assert all(f"\n  {verb} " in out for verb in COMMANDS)
    titles = [f"\n{title}:\n" for title in (*COMMAND_GROUPS, "examples")]
    assert sorted(titles, key=out.index) == titles
    assert "\n  vitrail demo\n" in out
    assert max(map(len, out.splitlines())) <= 80


def test_without_a_command_the_first_ones_are_named(capsys: Capture) -> None:
    code, out, err = run(capsys=capsys)
    assert (code, out) == (2, "")
    assert "name a command, such as demo, finetune, predict, serve, report. `vitrail --help` lists all" in err


def test_python_dash_m_is_the_command() -> None:
    completed = subprocess.run([sys.executable, "-m", "vitrail", "--help"], capture_output=True, text=True)
    assert completed.returncode == 0
    assert "convert" in completed.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["info", "b17x"], 2, "there is no preset 'b17x'"),
        (["info", "./nothing"], 4, "nothing does not exist"),
        (["info", "{tmp}/text.safetensors"], 4, "damaged or no safetensors file"),
        (["convert", "ti16", "{tmp}/there.safetensors"], 2, "exists already"),
        (["convert", "ti16", "{tmp}/out", "--to", "torchvision"], 2, "call it"),
        (["convert", "ti16", "{tmp}/out.npz"], 2, "or say --to google"),
        (["convert", "ti16", "{tmp}/out"], 2, "or say --to transformers or --to timm"),
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
    exit_code, out, err = run(*(argument.format(tmp=tmp_path) for argument in arguments), capsys=capsys)
    assert exit_code == code
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
    assert (code, "is not UTF-8 text" in err) == (2, True)


def test_out_of_memory_is_exit_5(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.weights import adapt

    def exhaust_memory(*_: object) -> None:
        torch.empty(2**60)

    monkeypatch.setattr(adapt, "_change_grid", exhaust_memory)
    code, _, err = run("convert", "ti16", str(tmp_path / "o.safetensors"), "--patch", "8", capsys=capsys)
    assert (code, err.splitlines()[-1]) == (5, "vitrail: out of memory")


def test_a_full_disk_is_exit_5(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.weights import tensor_files

    def fill_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files, "write_tensors", fill_disk)
    code, _, err = run("convert", "ti16", str(tmp_path / "out.safetensors"), capsys=capsys)
    assert code == 5
    assert "no space left on the disk" in err
    assert list(tmp_path.iterdir()) == []
