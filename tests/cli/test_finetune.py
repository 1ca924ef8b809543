"""`vitrail finetune` as a user calls it: what it prints and leaves, and what it refuses before anything is trained."""

import csv
import dataclasses
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests import model_factory
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.cli.test_train import HERE, PICTURES
from tests.data.image_files import encode_image, make_image, write_image_folder
from tests.training.test_trainer import build_finetune_run
from vitrail.api.prediction import predict
from vitrail.cli import output
from vitrail.data.dataset import without_images
from vitrail.data.sources import open_dataset
from vitrail.files import compute_sha256
from vitrail.report.html_report import make_rerun_command
from vitrail.report.run_facts import gather_facts
from vitrail.training import dataset_checks
from vitrail.training.dataset_checks import check_images
from vitrail.training.finetune import _is_trained_on_all, plan_length
from vitrail.training.run_results import summarize_result
from vitrail.training.time_estimate import Deadline
from vitrail.weights.load import load, save

MODEL = "model.safetensors"
PRINTING: Any = {"notify": output.print_note, "show_progress": output.show_progress}
SHORT = ("--epochs", "4", "--batch", "4", *HERE)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a set of 24 pictures in two classes and a small model."""
    monkeypatch.chdir(tmp_path)
    write_image_folder(tmp_path / "set", "train", "val", "test", each=4)
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / MODEL)


def finetune(*options: str, capsys: Capture, data: str = "./set", model: str = MODEL) -> tuple[int, str, str]:
    return vitrail("finetune", data, "--model", model, *options, capsys=capsys)


def refused(*options: str, capsys: Capture, **where: str) -> tuple[int, str]:
    """The exit code and the one line of a command that trained nothing."""
    code, out, err = finetune(*options, *HERE, capsys=capsys, **where)
    assert out == ""
    assert not Path("runs").exists()
    return code, err.splitlines()[-1]


def weights(run: str) -> list[str]:
    return [compute_sha256(Path(run) / "weights" / f"{name}.safetensors") for name in ("best", "last")]


# --- what it does ----------------------------------------------------------------------------------------------------


def test_the_whole_command_leaves_weights_tables_and_pictures(tmp_path: Path, capsys: Capture) -> None:
    code, out, err = finetune(*SHORT, capsys=capsys)
    assert code == 0
    run = tmp_path / "runs" / "finetune"
    with (run / "predictions.csv").open(newline="") as file:
        right = [row["label"] == row["predicted"] for row in csv.DictReader(file)]
    share = f"{sum(right) / 8:.1%}"
    assert re.fullmatch(
        rf"{share} of 8 test images correct \(.*; weights: runs/finetune/weights/best\.safetensors; .*\n", out
    )
    assert "epoch 4: loss" in err
    for name in PICTURES:
        with Image.open(run / name) as shown:
            assert min(shown.size) > 10
    fine = load(run / "weights" / "best.safetensors")
    assert fine.labels == ("rose", "tulip")
    assert fine.origin.name == f"test, fine-tuned on {tmp_path / 'set'}, step 8 of 8"
    assert json.loads((run / "data_report.json").read_text())["decoded"] == 24


def test_the_facts_are_there_for_programs(tmp_path: Path, capsys: Capture) -> None:
    code, out, _ = finetune(*SHORT, "--out", "mine", "--seed", "5", "--json", capsys=capsys)
    assert code == 0
    found = json.loads(out)
    end = json.loads((tmp_path / "mine" / "events.jsonl").read_text().splitlines()[-1])
    for name in ("split", "images", "correct", "top1", "top5", "loss", "temperature", "calibration_error", "seconds"):
        assert found[name] == end[name], name
    assert (found["folder"], found["seed"], found["epochs"], found["trained_images"]) == ("mine", 5, 4, 32)


def test_several_runs_give_mean_and_deviation(tmp_path: Path, capsys: Capture) -> None:
    code, out, _ = finetune(*SHORT, "--runs", "2", "--seed", "1", capsys=capsys)
    assert code == 0
    ends = [
        json.loads((tmp_path / "runs" / "finetune" / f"seed-{seed}" / "events.jsonl").read_text().splitlines()[-1])
        for seed in (1, 2)
    ]
    top1 = [end["top1"] for end in ends]
    said = f"test: {statistics.mean(top1):.2%} ± {statistics.stdev(top1):.2%} (mean and standard deviation of 2 runs)"
    assert out.splitlines()[-1] == said
    assert len(out.splitlines()) == 3
    one, two = (weights(f"runs/finetune/seed-{seed}") for seed in (1, 2))
    assert one != two
    code, out, _ = finetune(*SHORT, "--seed", "2", "--json", capsys=capsys)  # each is the run of that seed alone
    assert weights(json.loads(out)["folder"]) == two


@pytest.mark.parametrize("options", [(), ("--batch", "4", "--warmup", "2")])
def test_the_report_of_a_timed_run_has_the_command_that_repeats_it(capsys: Capture, options: tuple[str, ...]) -> None:
    code, _, err = finetune("--minutes", "0.1", "--out", "timed", *options, *HERE, capsys=capsys)
    assert code == 0
    assert re.search(r"0.1 minutes: about \S+ epochs.*; corrected during the run", err)
    facts = gather_facts(Path("timed"))
    command = shlex.split(
        make_rerun_command(dataclasses.replace(facts, command=("finetune", "./set", "--minutes", "0.1"))) or ""
    )
    again = command[command.index("--epochs") :]
    code, _, _ = finetune(*again, "--out", "again", *options, *HERE, capsys=capsys)
    assert code == 0
    timed, repeated = (json.loads((Path(run) / "config.json").read_text()) for run in ("timed", "again"))
    assert timed["recipe"] == repeated["recipe"]
    assert repeated.get("decisions", []) == [list(each) for each in facts.replanned_steps]  # they depend on the machine
    assert weights("timed") == weights("again")


@pytest.mark.parametrize("replan", ["x", "3", "3:2", "4:9,3:8", "2:3,5:9", "3:5,"])
def test_decisions_that_no_run_can_have_made_are_refused(capsys: Capture, replan: str) -> None:
    code, line = refused("--epochs", "4", "--replan", replan, capsys=capsys)
    assert code == 2
    assert f"--replan is '{replan}'" in line


def test_a_limit_that_is_too_short_for_what_follows_training_is_warned_of(capsys: Capture) -> None:
    code, _, err = finetune("--minutes", "0.01", "--out", "timed", *HERE, capsys=capsys)
    assert code == 0
    assert "warning: 0.01 minutes are too short: a step takes about" in err
    assert len(events("timed", "epoch")) == 1


def events(run: str, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (Path(run) / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


@pytest.mark.parametrize(
    ("load", "options", "own", "policy"),
    [
        (0.1, ["--minutes", "1"], None, "PASSIVE"),
        (0.1, ["--minutes", "1"], "ACTIVE", "ACTIVE"),
        (0.1, [], None, None),
        (0.9, [], None, "PASSIVE"),
    ],
)
def test_threads_of_a_timed_run_or_beside_other_jobs_do_not_spin_while_they_wait(
    load: float, options: list[str], own: str | None, policy: str | None
) -> None:
    """What counts is the environment when torch is loaded; what the user set stays. `load` is of each core."""
    code = f"""
import os, sys
os.getloadavg = lambda: ({load} * os.cpu_count(), 0, 0)
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            raise SystemExit
sys.meta_path.insert(0, Watch())
from vitrail.cli import main
main(["finetune", "nowhere", "--model", "model.safetensors", *sys.argv[1:]])
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if own is None else {"OMP_WAIT_POLICY": own}
    command = [sys.executable, "-c", code, *options]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert found.stdout == f"{policy}\n", found.stderr


def test_a_dry_run_trains_nothing(tmp_path: Path, capsys: Capture) -> None:
    code, out, _ = finetune(*SHORT, "--dry-run", capsys=capsys)
    assert code == 0
    assert re.search(r"^time +about \d+ s at [\d,.]+ images/s$", out, re.MULTILINE)
    assert re.search(r"^memory +needs about [\d.]+ [kM]B, [\d.,]+ GB available$", out, re.MULTILINE)
    assert "steps         8 with a batch of 4, 4 epochs" in out
    assert [path.name for path in (tmp_path / "runs").rglob("*.*")] == ["train_batch0.jpg"]
    code, out, _ = finetune(*SHORT, "--dry-run", "--json", capsys=capsys)
    found = json.loads(out)
    assert (found["steps"], found["recipe"]["epochs"], found["model"]["name"]) == (8, 4, "test")
    assert {"images_per_second", "seconds", "memory_bytes", "available_bytes"} <= found["estimate"].keys()
    assert found["picture"] == "runs/dry-run/train_batch0.jpg"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["dry-run"]


def test_a_dry_run_leaves_out_images_that_cannot_be_read_as_the_run_would(tmp_path: Path, capsys: Capture) -> None:
    for image in (tmp_path / "set/train").glob("*/[0-2].jpg"):
        image.write_bytes(b"no image")
    assert finetune(*SHORT, "--dry-run", capsys=capsys)[0] == 0
    assert finetune(*SHORT, "--dry-run", "--strict", capsys=capsys)[0] == 3


def test_the_papers_recipe_is_the_papers(capsys: Capture) -> None:
    options = ("--recipe", "paper", "--image-size", "32", "--micro-batches", "64", "--dry-run", "--json")
    found = json.loads(finetune(*options, *HERE, capsys=capsys)[1])
    optimizer = found["recipe"]["optimizer"]
    assert (optimizer["kind"], optimizer["momentum"], optimizer["weight_decay"]) == ("sgd", 0.9, 0)
    assert (found["recipe"]["batch"], found["steps"]) == (512, 500)
    assert found["preprocess"]["resize"] == [37]  # 7/6 of the crop


def test_layers_balance_and_everything_are_taken_to_the_run(tmp_path: Path, capsys: Capture) -> None:
    options = ("--layers", "0", "--balanced", "--train-on-val", "--image-size", "48")
    assert finetune(*SHORT, *options, capsys=capsys)[0] == 0
    config = json.loads((tmp_path / "runs" / "finetune" / "config.json").read_text())
    assert (config["recipe"]["trainable_layers"], config["recipe"]["logit_adjustment"], config["train_on_val"]) == (
        0,
        True,
        True,
    )
    assert config["steps"] == 16  # 16 images, four epochs, four in a step
    fine = load(tmp_path / "runs" / "finetune" / "weights" / "best.safetensors")
    assert (fine.model.config.image_size, fine.temperature) == ((48, 48), 1)


def test_lora_leaves_merged_weights_and_an_adapter_for_its_base(tmp_path: Path, capsys: Capture) -> None:
    settings = ("--set", "lora.layers=all", "lora.alpha=8", "lora.dora=true")
    options = ("--lora", "2", *settings, "--image-size", "48")
    code, out, _ = finetune(*SHORT, *options, capsys=capsys)
    assert code == 0
    assert "adapter: runs/finetune/weights/adapter" in out
    run = tmp_path / "runs" / "finetune"
    recipe = json.loads((run / "config.json").read_text())["recipe"]["lora"]
    assert recipe == {"rank": 2, "alpha": 8.0, "layers": "all", "rank_stabilized": False, "dora": True}
    assert "only the head and DoRA of rank 2, alpha 8, in all trained" in (run / "README.md").read_text()
    command = ("convert", MODEL, "merged.safetensors", "--adapter", str(run / "weights" / "adapter"))
    code, out, _ = vitrail(*command, capsys=capsys)
    assert code == 0
    assert "adapter adapter: LoRA of rank 2 merged into" in out
    merged, best = load("merged.safetensors"), load(run)
    assert (merged.labels, merged.preprocess) == (best.labels, best.preprocess)
    tensors = merged.model.state_dict()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in best.model.state_dict().items())
    code, out, _ = finetune(*SHORT, *options, "--out", str(run), "--resume", capsys=capsys)
    assert code == 0


def test_lora_in_a_recipe_of_ones_own_takes_another_rank(tmp_path: Path, capsys: Capture) -> None:
    recipe = vitrail("recipe", "show", "default", capsys=capsys)[1]
    assert "# lora =" in recipe
    (tmp_path / "own.toml").write_text(recipe + '\n[lora]\nrank = 3\nlayers = "mlp"\n')
    options = ("--recipe", "own.toml", "--dry-run", "--json", *HERE)
    for more, rank in (((), 3), (("--lora", "5"), 5)):
        found = json.loads(finetune(*options, *more, capsys=capsys)[1])
        assert (found["recipe"]["lora"]["rank"], found["recipe"]["lora"]["layers"]) == (rank, "mlp")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lora", "0"), "the rank of LoRA is 0; it must be 1 or more"),
        (("--lora", "4", "--layers", "1"), "--layers the layers themselves: give one"),
        (("--lora", "4", "--set", "lora.layers=head"), "must be one of qkv, attention, mlp, all"),
        (("--lora", "4", "--from-scratch"), "random weights have learned nothing: omit it"),
        (("--set", "lora.alpha=4"), "`vitrail finetune --lora RANK` adds it"),
    ],
)
def test_lora_that_cannot_be_is_refused(options: tuple[str, ...], message: str, capsys: Capture) -> None:
    model = "ti16" if "--from-scratch" in options else MODEL
    code, last_line = refused(*options, capsys=capsys, model=model)
    assert code == 2
    assert message in last_line


def test_a_head_that_knows_the_classes_is_kept_in_any_order(tmp_path: Path, capsys: Capture) -> None:
    known = model_factory.build_trained(model_factory.build_vit(classes=2), labels=("tulip", "rose"))
    save(known, tmp_path / "known.safetensors")
    options = ("--keep-head", "--lr", "1e-12", *SHORT)
    code, _, _ = finetune(*options, capsys=capsys, model="known.safetensors")
    assert code == 0
    fine = load(tmp_path / "runs" / "finetune" / "weights" / "last.safetensors")
    assert fine.labels == ("rose", "tulip")
    assert fine.model.head.weight.tolist() == [pytest.approx(known.model.head.weight[row].tolist()) for row in (1, 0)]


def test_tensorboard_is_written_into_the_runs_folder(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("tensorboard")
    assert finetune(*SHORT, "--track", "tensorboard", capsys=capsys)[0] == 0
    assert list((tmp_path / "runs" / "finetune" / "tensorboard").glob("events.*"))


# --- what it refuses and warns of ------------------------------------------------------------------------------------


def test_preprocessing_must_be_known_and_may_not_be_contradicted(tmp_path: Path, capsys: Capture) -> None:
    code, line = refused("--preprocess", "imagenet", capsys=capsys)
    assert code == 2
    assert "were trained with mean (0.4, 0.4, 0.4)" in line
    assert "omit it" in line
    bare = dataclasses.replace(model_factory.build_trained(model_factory.build_vit()), preprocess=None)
    save(bare, tmp_path / "bare.safetensors")
    code, line = refused(capsys=capsys, model="bare.safetensors")
    assert code == 2
    assert "does not say how images must be prepared" in line
    options = ("--preprocess", "imagenet", "--dry-run", "--json", *SHORT)
    found = json.loads(finetune(*options, capsys=capsys, model="bare.safetensors")[1])
    assert found["preprocess"]["mean"] == [0.485, 0.456, 0.406]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--image-size", "30"), "30 x 30 does not divide into patches of 8 x 8 pixels; the nearest is 32 x 32"),
        (("--keep-head",), "9 classes only in the model or only in the data, such as 'kind 0' in the model"),
        (("--minutes", "5", "--epochs", "3"), "give --minutes, or --epochs"),
        (("--minutes", "0"), "must be above 0"),
        (("--runs", "0"), "--runs is 0; it must be at least 1"),
        (("--layers", "-1"), "layers is -1; it must be 0 (the head alone) or more"),
        (("--epochs", "0"), "epochs is 0; it must be above 0"),
        (("--warmup", "9", "--epochs", "4", "--batch", "4"), "do not fit into 8 steps; shorten them (--warmup)"),
        (("--out", "set"), "set exists already"),
        (("--resume", "--overwrite"), "give one of them"),
        (("--overwrite", "--out", "set"), "set is no run to overwrite"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(capsys: Capture, options: tuple[str, ...], message: str) -> None:
    code, line = refused(*options, capsys=capsys)
    assert code == 2
    assert message in line
    assert len(list(Path("set").rglob("*.jpg"))) == 24


def test_an_empty_class_folder_is_left_out_named_and_listed(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "set" / "train" / "orchid").mkdir()
    code, line = refused("--strict", capsys=capsys)
    assert code == 3
    assert line.endswith("without an image, such as orchid: remove them, or omit --strict")
    code, _, err = finetune(*SHORT, capsys=capsys)
    assert code == 0, err
    assert "warning: 1 class folder without an image left out: orchid\n" in err
    run = tmp_path / "runs" / "finetune"
    assert json.loads((run / "data_report.json").read_text())["empty_classes"] == ["orchid"]
    assert load(str(run)).labels == ("rose", "tulip")


def test_a_class_with_validation_images_alone_is_refused(tmp_path: Path, capsys: Capture) -> None:
    write_image_folder(tmp_path / "set", "val", classes=("orchid",), each=1)
    code, line = refused(capsys=capsys)
    assert code == 3
    assert "set without a training image, such as orchid: add some, or remove the class" in line
    write_image_folder(tmp_path / "set", "train", classes=("orchid",), each=1)
    (tmp_path / "set" / "train" / "orchid" / "0.jpg").write_bytes(b"<html>")  # and when it is left out
    assert refused(capsys=capsys)[1] == line


def test_a_single_class_is_refused_with_what_may_have_been_meant(tmp_path: Path, capsys: Capture) -> None:
    write_image_folder(tmp_path / "one", classes=("rose",), each=5)
    code, line = refused(capsys=capsys, data="./one")
    assert code == 3
    assert "one has one class, rose, and a classifier needs two or more: one subfolder each." in line
    (tmp_path / "one" / "tulip").mkdir()  # left out, so one class is left
    assert refused(capsys=capsys, data="./one")[1] == line
    write_image_folder(tmp_path / "two" / "images", each=5)
    line = refused(capsys=capsys, data="./two")[1]
    assert "images holds the folders rose, tulip: did you mean" in line
    assert line.endswith("two/images?")


def test_one_label_that_some_images_have_is_a_question_and_one_that_all_have_is_none(
    tmp_path: Path, capsys: Capture
) -> None:
    names = [f"{path.relative_to(tmp_path / 'set')}" for path in sorted((tmp_path / "set").rglob("*.jpg"))]
    rows = [f"{name},{'rose' if 'rose' in name else ''},{name.split('/')[0]}" for name in names]
    (tmp_path / "set" / "some.csv").write_text("\n".join(["path,labels,split", *rows]))
    code, out, err = finetune(*SHORT, capsys=capsys, data="set/some.csv")
    assert code == 0, err
    assert "of 8 test images have exactly their labels" in out  # those without one are judged too
    with Path("runs/finetune/predictions.csv").open(newline="") as file:
        assert [row["label"] for row in csv.DictReader(file)] == ["rose"] * 4 + [""] * 4
    rows = [f"{name},rose" for name in names]
    (tmp_path / "set" / "all.csv").write_text("\n".join(["path,labels", *rows]))
    code, _, err = finetune(*SHORT, capsys=capsys, data="set/all.csv")
    assert code == 3
    assert "all.csv has the label rose: add images without it" in err


def test_few_bad_images_are_left_out_named_and_listed(tmp_path: Path, capsys: Capture) -> None:
    """One of 24; the run is the one that it would be without it."""
    bad = tmp_path / "set" / "train" / "rose" / "1.jpg"
    before = bad.read_bytes()
    bad.write_bytes(before[: len(before) // 2])
    code, line = refused("--strict", capsys=capsys)
    assert code == 3
    assert "1 image of 24 cannot be read, such as train/rose/1.jpg: " in line
    assert "--strict accepts none" in line
    code, _, err = finetune(*SHORT, capsys=capsys)
    assert code == 0, err
    assert "warning: 1 image of 24 cannot be read, such as train/rose/1.jpg: " in err
    listed = json.loads((tmp_path / "runs" / "finetune" / "data_report.json").read_text())
    assert [each["name"] for each in listed["bad"]] == ["train/rose/1.jpg"]
    assert json.loads((tmp_path / "runs" / "finetune" / "config.json").read_text())["images"]["train"] == 7
    bad.unlink()
    assert finetune(*SHORT, "--out", "runs/without", capsys=capsys)[0] == 0
    first, second = (load(f"runs/{name}") for name in ("finetune", "without"))
    assert all(map(torch.equal, first.model.state_dict().values(), second.model.state_dict().values()))


def test_many_bad_images_are_refused_before_anything_is_trained(tmp_path: Path, capsys: Capture) -> None:
    for number in range(3):
        (tmp_path / "set" / "train" / "rose" / f"{number}.jpg").write_bytes(b"<html>")
    code, line = refused(capsys=capsys)
    assert code == 3
    assert "3 images of 24 cannot be read, such as" in line
    assert "more than 10% are too many. `vitrail data check ./set` names every bad image" in line


def test_bad_images_that_nobody_looked_for_are_left_out_as_the_run_goes(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in each split, of more images than are looked at beforehand."""
    monkeypatch.setattr(dataset_checks, "_MAX_SCANNED_IMAGES", 10)
    write_image_folder(tmp_path / "set", "train", "val", "test", each=6)
    bad = [f"{split}/rose/1.jpg" for split in ("train", "val", "test")]
    for name in bad:
        (tmp_path / "set" / name).write_bytes(b"<html>")
    assert finetune(*SHORT, "--strict", "--out", "strict", capsys=capsys)[0] == 3
    code, _, err = finetune(*SHORT, capsys=capsys)
    assert code == 0, err
    assert re.search(r"warning: 3 images cannot be read, such as \S+/rose/1\.jpg; left out during the run, and", err)
    run = tmp_path / "runs" / "finetune"
    assert sorted((run / "unreadable.txt").read_text().splitlines()) == sorted(bad)
    with (run / "predictions.csv").open(newline="") as file:
        names = [row["image"] for row in csv.DictReader(file)]
    assert (len(names), bad[2] in names) == (11, False)


@pytest.mark.parametrize("strict", [False, True])
def test_images_that_there_was_no_time_to_look_at_are_unchecked(capsys: Capture, strict: bool) -> None:
    found, report = check_images(open_dataset("./set"), "./set", strict=strict, seconds=0, **PRINTING)
    assert (found.skip_bad, report) == (not strict, None)
    assert "there was time to check 0 of 24 images" in capsys.readouterr().err
    found, report = check_images(open_dataset("./set"), "./set", strict=strict, **PRINTING)
    assert (found.skip_bad, report is None) == (False, False)


def test_many_bad_images_that_nobody_looked_for_stop_the_run(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_checks, "_MAX_SCANNED_IMAGES", 10)
    for number in range(3):
        (tmp_path / "set" / "train" / "rose" / f"{number}.jpg").write_bytes(b"<html>")
    code, _, err = finetune(*SHORT, capsys=capsys)
    line = err.splitlines()[-1]
    assert code == 3
    assert re.search(r"3 images of 24 cannot be read, such as train/rose/\d\.jpg: more than 10% are too many", line)
    assert "vitrail data check ./set" in line


def test_copies_across_splits_are_warned_of(tmp_path: Path, capsys: Capture) -> None:
    twin = encode_image(make_image(4711, (60, 60)))
    for split in ("train", "test"):
        (tmp_path / "set" / split / "rose" / "twin.jpg").write_bytes(twin)
    code, _, err = finetune(*SHORT, capsys=capsys)
    assert code == 0
    assert "warning: 1 group of duplicates across splits" in err


def test_strong_imbalance_is_warned_of_and_can_be_answered(tmp_path: Path, capsys: Capture) -> None:
    write_image_folder(tmp_path / "set", "train", classes=("rose",), each=40, start=500)
    code, _, err = finetune("--epochs", "1", "--batch", "16", *HERE, capsys=capsys)
    assert code == 0
    warning = "warning: rose has 40 training images and tulip 4, so look at the average over classes"
    assert f"{warning} beside the accuracy; --balanced gives every class the same weight\n" in err
    code, _, err = finetune("--epochs", "1", "--batch", "16", "--balanced", *HERE, capsys=capsys)
    assert code == 0
    assert f"{warning} beside the accuracy\n" in err


def test_several_labels_change_the_loss_and_are_said(tmp_path: Path, capsys: Capture) -> None:
    rows = [
        f"{split}/{kind}/{number}.jpg,{kind};plant,{split}"
        for split in ("train", "val", "test")
        for kind in ("rose", "tulip")
        for number in range(4)
    ]
    (tmp_path / "set" / "list.csv").write_text("\n".join(["path,labels,split", *rows]) + "\n")
    code, out, err = finetune(*SHORT, "--json", capsys=capsys, data="set/list.csv")
    assert code == 0
    assert "note: images may have several labels, so each class is predicted by itself (loss sigmoid)" in err
    found: dict[str, Any] = json.loads(out)
    assert found["macro"] is None
    run = tmp_path / "runs" / "finetune"
    with (run / "predictions.csv").open(newline="") as file:
        rows_of_images = list(csv.DictReader(file))
    exact = [set(row["label"].split(" | ")) == set(row["predicted"].split(" | ")) for row in rows_of_images]
    assert found["correct"] == sum(exact)
    assert [row["correct"] for row in rows_of_images] == [str(int(each)) for each in exact]
    assert set(found["multi_label_metrics"]) == {
        "micro_f1",
        "macro_f1",
        "mean_average_precision",
        "micro_average_precision",
        "precision",
        "recall",
        "classes_without_images",
        "calibration_error",
        "bins",
    }
    assert found["calibration_error"] == found["multi_label_metrics"]["calibration_error"]
    best = load(str(run))
    assert best.label_thresholds == tuple(found["label_thresholds"].values())
    assert list(found["label_thresholds"]) == list(best.labels or ())
    with (run / "per_class.csv").open(newline="") as file:
        stored = [float(row["threshold"]) for row in csv.DictReader(file)]
    assert stored == pytest.approx(best.label_thresholds, abs=1e-6)
    names = [str(tmp_path / "set" / row["image"]) for row in rows_of_images]
    for row, prediction in zip(rows_of_images, predict(str(run), names, progress=False), strict=True):
        assert {label for label, _ in prediction.labels} == set(filter(None, row["predicted"].split(" | ")))
    assert "F1" in summarize_result(found)
    assert "images have exactly their labels (" in summarize_result(found)
    assert json.loads((run / "config.json").read_text())["recipe"]["loss"] == "sigmoid"
    assert {path.name for path in run.iterdir()} & PICTURES == PICTURES - {
        "confusion_matrix.png",
        "confusion_matrix_normalized.png",
    }


def test_a_learning_rate_that_diverges_ends_with_6(capsys: Capture) -> None:
    code, out, err = finetune("--lr", "1e30", "--epochs", "30", "--batch", "4", *HERE, capsys=capsys)
    assert (code, out) == (6, "")
    assert "nothing was updated. Try a lower learning rate than 1e+30" in err


def test_random_weights_are_taken_only_when_told_so(capsys: Capture) -> None:
    code, err = refused(model="s16", capsys=capsys)
    assert code == 2
    assert "s16 is a preset, whose weights are random and have learned nothing" in err
    assert "--from-scratch" in err
    code, err = refused("--from-scratch", capsys=capsys)
    assert (code, "--from-scratch is for presets, and model.safetensors is none" in err) == (2, True)
    code, _, err = finetune("--from-scratch", "--dry-run", "--image-size", "32", *SHORT, model="ti16", capsys=capsys)
    assert code == 0
    assert "warning: ti16 starts with random weights, which have learned nothing" in err


def test_without_a_model_the_built_in_one_is_fine_tuned(capsys: Capture) -> None:
    code, out, err = vitrail("finetune", "./set", "--layers", "0", "--epochs", "1", *HERE, capsys=capsys)
    assert code == 0, err
    assert err.count("starting from the built-in ViT-Ti/8 (64 pixels, 5.4M parameters). Larger models gain") == 1
    assert "license: vitrail's built-in ViT-Ti/8 states Apache-2.0 (trained on Tiny-ImageNet" in err
    assert load("runs/finetune").model.config.image_size == (64, 64)
    assert "correct" in out
    code, _, err = vitrail("finetune", "./set", "--from-scratch", *HERE, capsys=capsys)
    assert (code, "name one, such as --model s16" in err) == (2, True)


def test_a_run_of_another_model_is_not_resumed_without_naming_it(capsys: Capture) -> None:
    assert finetune(*SHORT, "--out", "run", capsys=capsys)[0] == 0
    code, _, err = vitrail("finetune", "./set", *SHORT, "--out", "run", "--resume", capsys=capsys)
    assert (code, "run was started with another" in err) == (2, True)


@pytest.mark.parametrize(
    ("name", "code", "written"),
    [
        ("vit_small_patch16_224.augreg_in21k", 2, "timm:vit_small_patch16_224.augreg_in21k"),
        ("google/vit-base-patch16-224", 4, "hf:google/vit-base-patch16-224"),
    ],
)
def test_a_bare_name_is_answered_with_how_it_is_written(name: str, code: int, written: str, capsys: Capture) -> None:
    found, err = refused(model=name, capsys=capsys)
    assert (found, err.endswith(f"if you meant the Hub's model, give {written}")) == (code, True)


def test_a_path_that_is_mistyped_is_no_name_of_the_hub(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "models").mkdir()
    code, err = refused(model="models/mine", capsys=capsys)
    assert (code, "hf:" in err) == (4, False)


def test_a_short_limit_takes_smaller_images_and_a_long_one_the_models_own(tmp_path: Path, capsys: Capture) -> None:
    task = build_finetune_run(tmp_path)
    sizes: dict[str, Any] = {
        "batch_size": 8,
        "train_images": 800,
        "val_images": 4,
        "test_images": 0,
        "eval_every_epochs": 1,
    }
    for image_seconds, expected in ((1.0, 24), (1e-4, 32)):
        deadline = Deadline(budget_seconds=60, max_steps=20_000, seconds_per_image=image_seconds, **sizes)
        epochs, side = plan_length(task, deadline, can_choose_size=True, warmup=0, notify=output.print_note)
        assert side == expected
        assert (f"images of {expected} pixels, the model's are 32" in capsys.readouterr().err) == (expected < 32)
        assert epochs * 800 % 8 == pytest.approx(0)
        assert plan_length(task, deadline, can_choose_size=False, warmup=0, notify=output.print_note)[1] is None


def test_a_short_run_starts_its_head_from_a_probe_and_is_resumed_without_another(capsys: Capture) -> None:
    short = ("--epochs", "2", "--batch", "4", "--out", "run", *HERE)
    code, _, _ = finetune(*short, "--save-every", "0", capsys=capsys)
    assert code == 0
    assert json.loads(Path("run/config.json").read_text())["recipe"]["head_init"] == "probe"
    before = weights("run")
    code, _, err = finetune(*short, "--resume", capsys=capsys)
    assert code == 0
    assert "features for the head" not in err
    assert weights("run") == before
    code, _, _ = finetune(*short[:4], "--keep-head", "--out", "kept", *HERE, capsys=capsys, model="run")
    assert code == 0
    assert json.loads(Path("kept/config.json").read_text())["recipe"]["head_init"] is None


@pytest.mark.parametrize(("side", "crop", "room"), [(40, 128, 160), (100, 480, 512)])
def test_bits_rule_resizes_whole_images_by_their_area(
    tmp_path: Path, capsys: Capture, side: int, crop: int, room: int
) -> None:
    for split in ("train", "val"):
        for number in range(3):
            place = tmp_path / "photos" / split / "ab"[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number}.jpg").write_bytes(encode_image(make_image(number, (side, side + 10))))
    save(model_factory.build_trained(model_factory.build_bit()), tmp_path / "bit.safetensors")
    options = ("--recipe", "bit", "--batch", "2", "--dry-run", "--json", *HERE)
    code, out, err = finetune(*options, data="./photos", model="bit.safetensors", capsys=capsys)
    assert code == 0, err
    found = json.loads(out)
    assert (found["preprocess"]["size"], found["preprocess"]["resize"]) == ([crop, crop], [crop, crop])
    assert (found["train_preprocess"]["size"], found["train_preprocess"]["resize"]) == ([crop, crop], [room, room])
    assert found["recipe"]["schedule"]["milestones"] == [0.4, 0.6, 0.8]
    assert found["recipe"]["optimizer"]["lr"] == 0.003


def test_a_seed_that_was_not_begun_starts_from_a_probe_though_one_is_resumed(tmp_path: Path, capsys: Capture) -> None:
    short = ("--epochs", "2", "--batch", "4", *HERE)
    code, _, _ = finetune(*short, "--runs", "2", "--out", "both", capsys=capsys)
    assert code == 0
    shutil.rmtree(tmp_path / "both" / "seed-1")
    code, _, _ = finetune(*short, "--runs", "2", "--out", "both", "--resume", capsys=capsys)
    assert code == 0
    code, _, _ = finetune(*short, "--seed", "1", "--out", "alone", capsys=capsys)
    assert code == 0
    assert weights("both/seed-1") == weights("alone")


def test_a_run_begun_without_a_look_at_its_images_is_resumed_with_all_of_them(tmp_path: Path, capsys: Capture) -> None:
    code, _, _ = finetune(*SHORT, "--out", "run", capsys=capsys)
    assert code == 0
    dataset = open_dataset(str(tmp_path / "set"))
    assert _is_trained_on_all(tmp_path / "run", dataset)
    assert not _is_trained_on_all(
        tmp_path / "run", without_images(dataset, {("train", dataset.splits["train"].get_image_name(0))})
    )
    assert not _is_trained_on_all(tmp_path / "none", dataset)


def test_a_model_that_is_not_there_is_said_before_the_images_are_looked_at(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vitrail.training.finetune.check_images", lambda *_, **__: pytest.fail("the images were looked at")
    )
    code, line = refused(capsys=capsys, model="vit_tiny.safetensors")
    assert code != 0
    assert "vit_tiny.safetensors" in line
