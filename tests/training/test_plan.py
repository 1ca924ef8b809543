"""`vitrail plan` against figures by hand and the paper's; its SLURM script runs against a SLURM of three lines."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vitrail import recipes
from vitrail.cli import main
from vitrail.errors import UsageError
from vitrail.training import plan

Capture = pytest.CaptureFixture[str]
PLAN = ("plan", "vit-h14-jft", "--nodes", "8", "--gpus", "4")


def plan_facts(*arguments: str, capsys: Capture) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def expect_refusal(*arguments: str, capsys: Capture) -> str:
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


def test_b16_on_jft_takes_what_the_paper_says(capsys: Capture) -> None:
    result = plan_facts("vit-b16-jft", capsys=capsys)
    assert result["parameters"] == 86_567_656 + 768 * 769  # the head's hidden layer
    assert result["flops_per_image"] / 1e9 == pytest.approx(105.4, abs=0.05)
    assert result["exaflops"] == pytest.approx(224, rel=0.02)
    assert result["paper"] == {"exaflops": 224, "core_days": None}
    assert result["images"] == 7 * 303_000_000
    assert result["steps"] == 517_823  # 2,121,000,000 / 4096, rounded up


@pytest.mark.parametrize("name", plan.PAPER_COSTS)
def test_every_system_of_the_paper_takes_its_exaflops(name: str, capsys: Capture) -> None:
    """4 % off for ResNets, whose stride is elsewhere (tests/model/test_cost.py)."""
    result = plan_facts(name, capsys=capsys)
    assert result["exaflops"] == pytest.approx(plan.PAPER_COSTS[name].exaflops, rel=0.05)


def test_a_masked_run_is_planned_with_its_heads_and_without_classes(capsys: Capture) -> None:
    """mpp costs its head's products on half of the patches; mae a fourth of the encoder, and a decoder for all."""
    plain = plan_facts("b16", "--classes", "1", capsys=capsys)
    mpp, mae = plan_facts("mpp-b16-jft", capsys=capsys), plan_facts("mae-b16-imagenet", capsys=capsys)
    assert mpp["steps"] == 1_000_000
    assert mpp["parameters"] == plain["parameters"] - 769 + 512 * 769 + 768  # another head, and the [mask]
    assert mpp["flops_per_image"] - plain["flops_per_image"] == 6 * (98 * 768 * 512 - 768)
    blocks = 12 * (50 * 12 * 768**2 + 2 * 50**2 * 768) + 8 * (197 * 12 * 512**2 + 2 * 197**2 * 512)
    ends = 196 * 768 * 768 + 50 * 768 * 512 + 147 * 512 * 768
    assert mae["flops_per_image"] == 6 * (blocks + ends)
    assert mae["memory"]["whole"]["activations"] < mpp["memory"]["whole"]["activations"]
    assert mpp["disk"]["weights"] == mae["disk"]["weights"] + 4 * 197 * 768 == plain["disk"]["weights"] - 4 * 769


def test_another_length_or_set_is_no_system_of_the_paper(capsys: Capture) -> None:
    assert plan_facts("vit-h14-jft", capsys=capsys)["paper"]["core_days"] == 2500
    assert plan_facts("vit-h14-jft", "--epochs", "7", capsys=capsys)["paper"] is None
    assert plan_facts("vit-h14-jft", "--data-images", "1000000", capsys=capsys)["paper"] is None


def test_hours_and_days_by_hand(capsys: Capture) -> None:
    """1000 steps of 64 images on 16 GPUs that reach 40 % of 989 TFLOP/s; recomputing adds a fourth forward pass."""
    options = ["b16", "--steps", "1000", "--batch", "64", "--nodes", "2", "--gpus", "8", "--efficiency", "0.4"]
    result = plan_facts(*options, capsys=capsys)
    seconds = 64_000 * result["flops_per_image"] / (16 * 0.4 * 989e12)
    assert (result["steps"], result["images"]) == (1000, 64_000)
    assert result["seconds"] == pytest.approx(seconds)
    assert result["gpu_days"] == pytest.approx(16 * seconds / 86_400)
    assert plan_facts(*options, "--recompute", capsys=capsys)["seconds"] == pytest.approx(seconds * 4 / 3)


def test_tpu_cores_count_what_the_paper_counts(capsys: Capture) -> None:
    """H/14: 4,262 exaFLOPs in 2,500 core-days are 19.7 TFLOP/s, or 32 % of a core's 61.5; L/16 reached 43 %."""
    result = plan_facts("vit-h14-jft", "--gpu", "tpuv3", "--efficiency", "0.32", capsys=capsys)
    assert result["gpu_days"] == pytest.approx(2500, rel=0.01)
    assert result["machine"]["peak"] == 123e12 / 2
    large = plan_facts("vit-l16-jft-14", "--gpu", "tpuv3", "--efficiency", "0.434", capsys=capsys)
    assert large["gpu_days"] == pytest.approx(680, rel=0.02)
    assert main(["plan", "vit-h14-jft", "--gpu", "tpuv3", "--gpus", "512"]) == 0
    out = capsys.readouterr().out
    assert "TPUv3-core-days (the paper: 2,500 TPUv3-core-days)" in out
    assert "a core of" in out
    assert "--sbatch is for GPUs" in expect_refusal("vit-h14-jft", "--gpu", "tpuv3", "--sbatch", capsys=capsys)


def test_the_assumed_speed_is_that_of_the_list_of_recipes(capsys: Capture) -> None:
    result = plan_facts("vit-l16-imagenet", capsys=capsys)
    main(["list", "recipes", "--json"])
    flops = json.loads(capsys.readouterr().out)["vit-l16-imagenet"]["cost_flops"]
    assert result["seconds"] == pytest.approx(flops / 300e12)


def test_memory_disk_and_traffic_by_hand(capsys: Capture) -> None:
    weights = 4 * 86_567_656
    options = ["b16", "--batch", "4096", "--gpus", "8", "--micro-batches", "4"]
    result = plan_facts(*options, capsys=capsys)
    whole, sharded = result["memory"]["whole"], result["memory"]["sharded"]
    assert result["micro_batch"] == 128  # 4096 / 8 / 4
    assert (whole["weights"], whole["gradients"], whole["optimizer"], whole["ema"]) == (
        weights,
        weights,
        2 * weights,
        0,
    )
    assert sharded["optimizer"] == 2 * weights // 8
    assert sharded["gradients"] == weights  # of parts, which are added up on each GPU and sent once
    assert plan_facts("b16", "--gpus", "8", capsys=capsys)["memory"]["sharded"]["gradients"] == weights // 8
    assert whole["activations"] == sharded["activations"] == 128 * 62_508_384
    assert whole["total"] == sum(value for part, value in whole.items() if part != "total")
    assert result["disk"] == {"checkpoint": 3 * weights, "weights": weights}
    assert result["traffic"] == 2 * weights * 7 // 8  # summed and handed round
    assert plan_facts("b16", "--gpus", "8", "--shard", capsys=capsys)["traffic"] == 2 * weights * 7 // 8
    assert plan_facts(*options, "--shard", capsys=capsys)["traffic"] == 5 * weights * 7 // 8  # gathered for every part
    assert plan_facts("b16", capsys=capsys)["traffic"] == 0


def test_an_average_and_the_optimiser_count(capsys: Capture) -> None:
    result = plan_facts("cifar10", capsys=capsys)
    weights = 4 * result["parameters"]
    assert recipes.RECIPES["cifar10"].optimizer.kind == "muon"
    assert (result["memory"]["whole"]["optimizer"], result["memory"]["whole"]["ema"]) == (weights, weights)
    assert result["disk"]["checkpoint"] == 3 * weights


def test_more_classes_are_a_larger_head(capsys: Capture) -> None:
    few, many = (plan_facts("b16", "--classes", classes, capsys=capsys) for classes in ("1000", "21843"))
    assert many["parameters"] - few["parameters"] == 20_843 * 769


def test_what_cannot_be_meant_is_refused_with_what_can(capsys: Capture) -> None:
    assert "choose one of a100, h100, h200" in expect_refusal("b16", "--gpu", "h20", capsys=capsys)
    assert "did you mean vit-b16-jft" in expect_refusal("vit-b61-jft", capsys=capsys)
    assert "no recipe or preset 'b': " in expect_refusal("b", capsys=capsys)
    assert "give one of them" in expect_refusal("b16", "--steps", "3", "--epochs", "2", capsys=capsys)
    refused = expect_refusal("b16", "--predict", "9", "--kubernetes", capsys=capsys)
    assert "--kubernetes is for training, and --predict is given" in refused
    assert "--data-images is 0; it must be at least 1" in expect_refusal("b16", "--data-images", "0", capsys=capsys)
    assert "--nodes is 0" in expect_refusal("b16", "--nodes", "0", capsys=capsys)
    assert "--efficiency is 40.0" in expect_refusal("b16", "--efficiency", "40", capsys=capsys)
    assert "keeps its activations" in expect_refusal("bit-r50x1", "--recompute", capsys=capsys)
    assert "--sbatch is for a recipe" in expect_refusal("b16", "--sbatch", capsys=capsys)


# --- the script ------------------------------------------------------------------------------------------------------


def write_script(folder: Path, *options: str, command: Sequence[str] = PLAN, capsys: Capture) -> Path:
    assert main([*command, "--sbatch", *options]) == 0
    path = folder / "job.sbatch"
    path.write_text(capsys.readouterr().out)
    return path


def test_a_recipe_in_a_file_is_planned_as_the_one_it_was_copied_from(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    text = recipes.format_recipe(recipes.get_recipe("vit-b16-imagenet"), "my")
    path.write_text(text, encoding="utf-8")
    assert plan.choose_recipe(str(path)) == plan.choose_recipe("vit-b16-imagenet")
    path.write_text(text.replace('data = "imagenet"', 'data = "photos"'), encoding="utf-8")
    assert plan.choose_recipe(str(path), data_images=500)[1] == 500
    with pytest.raises(UsageError, match="give --data-images N"):
        plan.choose_recipe(str(path))
    path.write_text(recipes.format_recipe(recipes.build_finetune_recipe("default", 1000, 16), "my"), encoding="utf-8")
    with pytest.raises(UsageError, match="names no model"):
        plan.choose_recipe(str(path))


def test_the_script_is_bash_and_asks_for_a_task_a_gpu(tmp_path: Path, capsys: Capture) -> None:
    path = write_script(tmp_path, "--micro-batches", "2", "--recompute", "--shard", "--epochs", "3", capsys=capsys)
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    text = path.read_text()
    assert text.startswith("#!/bin/bash\n")
    header = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    wanted = ["--nodes=8", "--ntasks-per-node=4", "--gpus-per-node=4", "--requeue", "--signal=USR1@300"]
    assert set(wanted) <= set(header)
    command = "vitrail train vit-h14-jft --out runs/vit-h14-jft --resume --epochs 3.0 --micro-batches 2 --recompute"
    assert f"{command} --shard " in text


def run_script(path: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run it with an srun of one task, a scontrol that takes notes, and a vitrail that ends with the code."""
    folder = path.parent
    commands = {
        "srun": 'shift; SLURM_PROCID=5 SLURM_NTASKS=32 SLURM_LOCALID=1 exec "$@"',
        "scontrol": 'if [ "$1" = show ]; then printf "first\\nsecond\\n"; else echo "$@" > requeued; fi',
        "vitrail": f'printf "%s\\n" "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT" "$@" > ran; exit {code}',
    }
    for name, line in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "41234", "SLURM_JOB_NODELIST": "node[1-2]"}
    environment = os.environ | slurm | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(["bash", path, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def read_task(folder: Path) -> tuple[str, list[str]]:
    """The variables and the arguments of the task that ran."""
    place, *words = (folder / "ran").read_text().splitlines()
    return place, words


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (75, True), (6, False)])
def test_the_script_tells_each_task_its_place_and_requeues_a_stopped_run(
    code: int, requeued: bool, tmp_path: Path, capsys: Capture
) -> None:
    path = write_script(tmp_path, capsys=capsys)
    completed = run_script(path, "/data/a set", code=code)
    assert completed.returncode == code, completed.stderr
    place, words = read_task(tmp_path)
    assert place == "5 32 1 first 21234"
    assert words == ["train", "vit-h14-jft", "--out", "runs/vit-h14-jft", "--resume", "--data", "/data/a set"]
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 41234\n"
    without = run_script(path, code=code)
    assert without.returncode
    assert "name the data to train on" in without.stderr
