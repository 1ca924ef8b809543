"""Every command and the Python of the README, run in order in one folder; what it prints is what it says.

Those that name nothing remote, which are all but a few that run elsewhere, open no socket.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import vitrail
from tests.data.pictures import folder
from tests.network import run_watched
from vitrail.config import PreprocessConfig

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def run(arguments: Sequence[str], folder: Path) -> str:
    """What Python prints, if it ends well and looked for no other machine."""
    ended = run_watched(arguments, folder)
    assert ended.code == 0, (arguments, ended.err)
    assert not ended.contacts, (arguments, ended.contacts)
    assert not ended.strangers, (arguments, ended.strangers)
    return ended.out


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_readmes_commands_print_what_it_says_and_its_python_runs(tmp_path: Path) -> None:
    for block in blocks("console"):
        for command, expected in re.findall(r"^\$ vitrail (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            assert run(["-m", "vitrail", *shlex.split(command)], tmp_path) == expected, command
    for block in blocks("python"):
        run(["-c", block], tmp_path)


def test_the_readme_has_commands_to_test() -> None:
    assert sum(block.count("$ vitrail") for block in blocks("console")) >= 5
    assert len(blocks("python")) == 1


ELSEWHERE = {  # what needs a network runs in these, against one on loopback where there is one
    "vitrail data get cifar10": "data/test_public_formats.py::test_cifar10_is_the_same_from_its_binary_archive",
    "vitrail data check photos --against cifar10": "cli/test_data.py::test_copies_inside_and_across_splits",
    "vitrail info timm:vit_tiny_patch16_224.augreg_in21k": "weights/test_hub.py::test_folders_and_single_files_come",
    "vitrail convert hf:google/vit-base-patch16-224 b16.safetensors": "weights/test_hub.py::test_a_pushed_run",
    "vitrail push b16.safetensors hf:ORG/NAME --dry-run": "weights/test_hub.py::test_a_dry_run_needs_neither",
    "vitrail evaluate b16.safetensors /data/imagenet-val --against timm-model:tf_efficientnet_l2.ns_jft_in1k"
    " --real real.json": "cli/test_evaluate.py::test_timms_own_network_says_what_ours_says",
    "vitrail serve runs/finetune": "cli/test_serve.py::test_it_serves_until_a_signal_and_opens_one_socket",
    "vitrail study vtab b16.safetensors --data-root /data/vtab-1k": "studies/test_vtab.py::test_the_command_runs",
}
SMALLER = {  # the same commands, in seconds
    "timm:vit_small_patch16_224.augreg_in21k": "b16.safetensors",
    "--minutes 10": "--minutes 0.02 --batch 4",
    "--recipe paper --runs 3": "--recipe paper --runs 2 --image-size 32 --batch 4 --epochs 1 --warmup 1",
    "study sweep photos --model b16.safetensors": "study sweep photos --model b16.safetensors --rates 0.01 --steps 2"
    " --batch 4 --image-size 32 --runs 2",
    "train digits --data digits": "train digits --data digits --epochs 0.2 --warmup 1",
    "train mpp-cifar10 --data photos": "train mpp-cifar10 --data photos --epochs 0.5 --batch 4 --warmup 1",
    "--data /data/imagenet --dry-run": "--data photos --dry-run --batch 4 --warmup 1",
}


# torchrun itself runs in train/test_distributed.py.


def indented() -> list[str]:
    """The commands outside of the blocks above, without their comments."""
    return [line.partition("#")[0].strip() for line in re.findall(r"^    (vitrail .*)$", README, re.MULTILINE)]


def test_the_readmes_other_commands_run(tmp_path: Path) -> None:
    model = vitrail.create("ti16", image_size=32, num_classes=3, depth=1, width=32, heads=1, mlp=64)
    view = PreprocessConfig(size=(32, 32), resize=(36,))
    vitrail.save(vitrail.Trained(model, view), tmp_path / "b16.safetensors")
    folder(tmp_path / "photos", "train", "val", "test", each=4)
    ran = 0
    for command in indented():
        if command in ELSEWHERE:
            file, _, test = ELSEWHERE[command].partition("::")
            assert f"def {test}" in (Path(__file__).parent / file).read_text(encoding="utf-8")
            continue
        for full, small in SMALLER.items():
            command = command.replace(full, small)
        run(["-m", *shlex.split(command)], tmp_path)
        ran += 1
    assert ran >= 5
