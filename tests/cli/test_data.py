"""`vitrail data ...` as a user calls it: tables, JSON, exit codes, and nothing left behind."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests import model_factory
from tests.cli.test_cli import Capture, run
from tests.data.image_files import encode_image, make_image, write_image_folder
from vitrail.data import audit, image_scan, public_datasets, shards
from vitrail.data.sources import open_dataset
from vitrail.formatting import pluralize
from vitrail.weights.load import save


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def damage_files(root: Path) -> Path:
    """A set with one file of each crafted kind of harm, and some that only look harmful."""
    write_image_folder(root, "train", "val", "test", each=6)
    rose = root / "train" / "rose"
    whole = encode_image(make_image(0, (60, 60)))
    (rose / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (rose / "empty.jpg").write_bytes(b"")
    (rose / "page.jpg").write_bytes(b"<!doctype html><html>not found</html>")
    bomb = Image.new("1", (20_000, 20_000))
    (rose / "bomb.png").write_bytes(encode_image(bomb, "PNG"))
    fine = {
        "wide.png": encode_image(Image.new("I;16", (9, 9), 40_000), "PNG"),
        "print.jpg": encode_image(make_image(901).convert("CMYK")),
        "palette.png": encode_image(make_image(902).convert("RGBA").quantize(8), "PNG", transparency=0),
        "moving.gif": encode_image(make_image(903), "GIF", save_all=True, append_images=[make_image(904)]),
    }
    for name, content in fine.items():
        (rose / name).write_bytes(content)
    return root


def test_check_names_each_bad_file_with_its_reason_and_ends_with_3(tmp_path: Path, capsys: Capture) -> None:
    damage_files(tmp_path / "set")
    code, out, err = run("data", "check", "./set", capsys=capsys)
    assert code == 3
    reasons = {
        "cut.jpg": "truncated",
        "empty.jpg": "not an image of a known format",
        "page.jpg": "not an image of a known format",
        "bomb.png": "too many pixels: at most 89478485",
    }
    for name, reason in reasons.items():
        line = next(line for line in out.splitlines() if name in line)
        assert reason in line.replace(",", ""), line
    assert "4 bad images in ./set" in err
    assert "--leave-out data_report.json" in err
    report = json.loads((tmp_path / "data_report.json").read_text())
    assert {Path(row["name"]).name for row in report["bad"]} == set(reasons)
    assert report["decoded"] == 36 + 4
    assert run("data", "check", "./set", "--skip-bad", capsys=capsys)[0] == 0


def test_check_warns_of_a_single_class(tmp_path: Path, capsys: Capture) -> None:
    write_image_folder(tmp_path / "one", classes=("rose",), each=5)
    code, out, _ = run("data", "check", str(tmp_path / "one"), capsys=capsys)
    assert code == 0
    assert "one class: a classifier needs two or more, one subfolder each" in out
    write_image_folder(tmp_path / "two", "train", "val", each=5)
    code, out, _ = run("data", "check", str(tmp_path / "two"), capsys=capsys)
    assert "one class" not in out
    assert "2; images per class of train: 5\n" in out


def test_a_second_check_looks_only_at_what_has_changed(tmp_path: Path, capsys: Capture) -> None:
    damage_files(tmp_path / "set")
    first = json.loads(run("data", "check", "./set", "--skip-bad", "--json", capsys=capsys)[1])
    assert first["from_earlier_check"] == 0
    changed = tmp_path / "set" / "val" / "rose" / "0.jpg"
    changed.write_bytes(encode_image(make_image(5000), quality=60))
    second = json.loads(run("data", "check", "./set", "--skip-bad", "--json", capsys=capsys)[1])
    assert second["from_earlier_check"] == 39  # the bad ones are looked at again
    assert second["bad"] == first["bad"]
    assert second["color"] == first["color"]


def test_check_counts_classes_and_colours_by_hand(tmp_path: Path, capsys: Capture) -> None:
    for name, value in (("black", 0), ("white", 255)):
        place = tmp_path / "set" / "train" / name
        place.mkdir(parents=True)
        for number in range(3 if value else 1):
            (place / f"{number}.png").write_bytes(encode_image(Image.new("L", (4 + number, 5), value), "PNG"))
    (tmp_path / "set" / "val" / "black").mkdir(parents=True)
    (tmp_path / "set" / "val" / "black" / "0.png").write_bytes(encode_image(Image.new("RGB", (9, 9), (1, 2, 3)), "PNG"))
    report = json.loads(run("data", "check", "./set", "--json", capsys=capsys)[1])
    assert report["classes"] == [{"name": "black", "train": 1, "val": 1}, {"name": "white", "train": 3, "val": 0}]
    assert report["color"]["mean"] == [0.75] * 3
    assert report["color"]["std"] == [0.433] * 3
    assert report["color"]["gray"] == 4
    assert report["sizes"]["width"] == {"min": 4, "median": 5, "max": 9}
    assert report["formats"] == {"PNG": 5}


def photo(seed: int) -> Image.Image:
    """A picture with detail at every scale, as photos have."""
    import numpy as np

    generator = np.random.default_rng(seed)
    total = np.zeros((96, 128, 3))
    for octave in (3, 6, 12, 24, 48, 96):
        noise = generator.normal(size=(octave, octave, 3)) * 40 / octave**0.5
        low, high = noise.min(), noise.max()
        image = Image.fromarray(((noise - low) / (high - low) * 255).astype(np.uint8))
        total += np.asarray(image.resize((128, 96), Image.Resampling.BICUBIC)).astype(float) / 6
    return Image.fromarray(total.clip(0, 255).astype(np.uint8))


def test_copies_inside_and_across_splits_and_against_another_set_are_found(tmp_path: Path, capsys: Capture) -> None:
    seed = 0
    for split in ("train", "val", "test"):
        for name in ("rose", "tulip"):
            place = tmp_path / "set" / split / name
            place.mkdir(parents=True)
            for number in range(4):
                (place / f"{number}.png").write_bytes(encode_image(photo(seed), "PNG"))
                seed += 1
    root = tmp_path / "set"
    (root / "train" / "rose" / "twin.png").write_bytes((root / "train" / "rose" / "0.png").read_bytes())
    leaked = Image.open(root / "test" / "tulip" / "2.png").resize((80, 60)).convert("RGB")
    (root / "train" / "tulip" / "leak.jpg").write_bytes(encode_image(leaked, quality=85))
    other = tmp_path / "other" / "test" / "x"
    other.mkdir(parents=True)
    cropped = Image.open(root / "train" / "rose" / "3.png").crop((6, 4, 122, 92))
    (other / "a.jpg").write_bytes(encode_image(cropped, quality=90))
    (other / "b.jpg").write_bytes(encode_image(photo(999), quality=90))
    code, out, err = run("data", "check", "./set", "--against", "./other", capsys=capsys)
    assert code == 0
    last = "images, none bad, 1 group of duplicates across splits; report: data_report.json"
    assert err.splitlines()[-1].endswith(last)
    assert "1 group of identical files, 1 group of near-duplicates" in out
    assert "1 group of these across splits" in out
    report = json.loads((tmp_path / "data_report.json").read_text())
    exact, near = report["duplicates"]["groups"]
    assert [image["name"] for image in exact["images"]] == ["train/rose/0.png", "train/rose/twin.png"]
    assert {image["name"] for image in near["images"]} == {"train/tulip/leak.jpg", "test/tulip/2.png"}
    assert [(row["name"], row["matched_name"]) for row in report["against"]["matches"]] == [
        ("train/rose/3.png", "test/x/a.jpg")
    ]
    assert [row["name"] for row in report["leave_out"]] == ["train/rose/3.png", "train/tulip/leak.jpg"]
    assert run("data", "pack", "./set", "packed", "--leave-out", "data_report.json", capsys=capsys)[0] == 0
    assert len(open_dataset("./packed").splits["train"]) == 8


def test_every_copy_of_a_leak_is_left_out_and_nothing_of_what_it_leaks(tmp_path: Path, capsys: Capture) -> None:
    """A training image, its equal, and a test image that is the same encoded again."""
    for split in ("train", "test", "val"):
        (tmp_path / "set" / split / "a").mkdir(parents=True)
    root = tmp_path / "set"
    for number in range(3):
        (root / "train" / "a" / f"{number}.png").write_bytes(encode_image(photo(number), "PNG"))
        (root / "val" / "a" / f"{number}.png").write_bytes(encode_image(photo(number + 10), "PNG"))
    (root / "train" / "a" / "twin.png").write_bytes((root / "train" / "a" / "0.png").read_bytes())
    (root / "test" / "a" / "x.jpg").write_bytes(encode_image(photo(0), quality=80))
    report = json.loads(run("data", "check", "./set", "--json", capsys=capsys)[1])
    assert report["leave_out"] == [
        {"split": "train", "name": "train/a/0.png"},
        {"split": "train", "name": "train/a/twin.png"},
    ]
    [group] = report["duplicates"]["groups"]
    assert group["kind"] == "near"
    assert len(group["images"]) == 3


def test_the_same_path_in_two_splits_is_left_out_of_train_alone(tmp_path: Path, capsys: Capture) -> None:
    place = tmp_path / "set"
    place.mkdir()
    for number in range(4):
        (place / f"{number}.png").write_bytes(encode_image(photo(number), "PNG"))
    rows = [*((number, "train") for number in range(4)), (0, "val"), (1, "test")]
    lines = "\n".join(f"{number}.png,x,{split}" for number, split in rows)
    (place / "list.csv").write_text(f"path,label,split\n{lines}\n")
    assert run("data", "check", "set/list.csv", capsys=capsys)[0] == 0
    assert run("data", "pack", "set/list.csv", "out", "--leave-out", "data_report.json", capsys=capsys)[0] == 0
    images = {name: len(split) for name, split in open_dataset("./out").splits.items()}
    assert images == {"train": 2, "val": 1, "test": 1}


def test_all_of_a_set_without_splits_is_compared_with(tmp_path: Path, capsys: Capture) -> None:
    for number in range(8):
        for place in (tmp_path / "tests" / "a", tmp_path / "mine" / "train" / "a"):
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number}.png").write_bytes(encode_image(photo(number), "PNG"))
    text = run("data", "check", "./mine", "--against", "./tests", capsys=capsys)[1]
    assert re.search(r"8 images match one of its 8; compared 8 images", text)
    report = json.loads(run("data", "check", "./mine", "--against", "./tests", "--json", capsys=capsys)[1])
    assert report["against"]["compared"] == 8
    assert len(report["against"]["matches"]) == 8


def test_of_a_large_set_the_check_says_how_many_were_compared_and_all_compares_all(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (image_scan, audit):
        monkeypatch.setattr(module, "MAX_DECODED_IMAGES", 10)
    for split, count in (("train", 24), ("val", 2)):
        place = tmp_path / "mine" / split / "a"
        place.mkdir(parents=True)
        for number in range(count):
            (place / f"{number}.png").write_bytes(encode_image(photo(number + 100 * (split == "val")), "PNG"))
    for split, numbers in (("train", range(200, 230)), ("test", (1, 8, 15, 22, 300))):
        place = tmp_path / "other" / split / "a"
        place.mkdir(parents=True)
        for number in numbers:
            (place / f"{number}.jpg").write_bytes(encode_image(photo(number), "JPEG", quality=90))
    check = ("data", "check", "./mine", "--against", "./other")
    _, out, err = run(*check, capsys=capsys)
    assert "note: a random sample of 10 of 26 images (38.5%) is decoded and compared; --all takes all of them" in err
    assert re.search(r"about [\d.]+ hours on \d+ cores?, at [\d.]+ ms to decode an image here and 2 ms to", err)
    assert "of its 5; compared 10 of 26 images" in out
    assert re.search(r"warning +16 images were not compared with it", out)
    report = json.loads((tmp_path / "data_report.json").read_text())
    assert (report["duplicates"]["compared"], report["duplicates"]["total"]) == (10, 26)
    _, out, err = run(*check, "--all", capsys=capsys)
    assert "note: all 26 images are decoded and compared: about" in err
    assert "4 images match one of its 5; compared 26 images" in out  # and not of its 30 training images
    assert "were not compared" not in out
    report = json.loads((tmp_path / "data_report.json").read_text())
    matches = {row["name"] for row in report["against"]["matches"]}
    assert matches == {f"train/a/{number}.png" for number in (1, 8, 15, 22)}  # of every part of the comparison
    assert (report["decoded"], report["headers_only"]) == (26, 0)


def test_a_report_never_replaces_a_folder(tmp_path: Path, capsys: Capture) -> None:
    write_image_folder(tmp_path / "set", "train", "val", each=2)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "precious.txt").write_text("x")
    code, _, err = run("data", "check", "./set", "--out", "results", capsys=capsys)
    assert code == 2
    assert "is a folder" in err
    assert (tmp_path / "results" / "precious.txt").read_text() == "x"


def test_a_report_that_cannot_be_written_costs_the_result_nothing(tmp_path: Path, capsys: Capture) -> None:
    write_image_folder(tmp_path / "set", "train", "val", each=2)
    (tmp_path / "file").write_text("")
    code, out, err = run("data", "check", "./set", "--out", "file/report.json", capsys=capsys)
    assert code == 2
    assert "images      train 4, val 4" in out
    assert err.count("vitrail: ") == 1


def test_pack_says_what_it_wrote(tmp_path: Path, capsys: Capture) -> None:
    write_image_folder(tmp_path / "set", "train", "val", each=3)
    code, out, err = run("data", "pack", "./set", "out", capsys=capsys)
    assert code == 0
    assert "train 6, val 6" in out
    assert "out (2 shards" in out
    assert "exists already" in run("data", "pack", "./set", "out", capsys=capsys)[2]
    assert "data: " in err
    write_image_folder(tmp_path / "years", "2023", "2024", each=3)
    code, _, err = run("data", "pack", "./years", "shards", capsys=capsys)
    assert (code, "warning: " in err, "are these the classes?" in err) == (0, True, True)


def test_list_get_and_remove(tmp_path: Path, capsys: Capture) -> None:
    samples = [shards.Sample(split, "a.png", encode_image(make_image(0), "PNG"), (3,)) for split in ("train", "test")]
    shards.write_shards(
        public_datasets.get_dataset_folder("cifar10"), samples, classes=[str(n) for n in range(10)], origin={}
    )
    code, out, _ = run("data", "list", capsys=capsys)
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("cifar10 "))
    assert "60,000" in line
    assert "kB" in line
    rows = json.loads(run("data", "list", "--json", capsys=capsys)[1])["datasets"]
    assert {row["name"] for row in rows if row["stored_bytes"]} == {"cifar10"}
    assert run("data", "remove", "cifar10", capsys=capsys)[0] == 0
    assert not public_datasets.get_dataset_folder("cifar10").exists()
    assert run("data", "remove", "cifar10", capsys=capsys)[0] == 2
    code, _, err = run("data", "get", "cifar11", capsys=capsys)
    assert code == 2
    assert "cifar10" in err


@pytest.mark.parametrize("data", ["nowhere", "./nothing", "hf:x", "empty"])
def test_what_cannot_be_opened_is_one_line(tmp_path: Path, capsys: Capture, data: str) -> None:
    (tmp_path / "empty").mkdir()
    code, out, err = run("data", "check", data, capsys=capsys)
    assert code in (2, 3)
    assert out == ""
    assert err.count("\n") == 1


def test_a_terminal_shows_a_bar_and_a_pipe_none(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "set", "train", "val", each=3)
    command = [sys.executable, "-m", "vitrail", "data", "check", "./set"]
    piped = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert piped.returncode == 0, piped.stderr
    assert "\x1b" not in piped.stderr + piped.stdout
    master, slave = pty.openpty()
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, cwd=tmp_path)
    os.close(slave)
    terminal = io.BytesIO()
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:
            break
        if not part:
            break
        terminal.write(part)
    assert shown.wait(timeout=120) == 0
    assert b"reading images" in terminal.getvalue()


def test_pairs_by_features_are_listed_beside_the_fingerprints(tmp_path: Path, capsys: Capture) -> None:
    """Six images, each rotated in test; and one whose file is in both splits, which fingerprints find too."""
    for split, turns in (("train", 0), ("test", 2)):
        (tmp_path / "set" / split / "rose").mkdir(parents=True)
        for number in range(6):
            turned = make_image(number, (64, 48)).rotate(90 * turns * bool(number), expand=True)
            turned.save(tmp_path / "set" / split / "rose" / f"{number}.png")
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.safetensors")
    options = ("--embedding", "model.safetensors", "--threshold", "0.001", "--workers", "0")
    code, out, _ = run("data", "check", "./set", *options, capsys=capsys)
    report = json.loads((tmp_path / "data_report.json").read_text())
    embedding = report["embedding"]
    assert (code, embedding["model"], embedding["threshold"], embedding["compared"]) == (
        0, "model.safetensors", 0.001, 12
    )  # fmt: skip
    assert embedding["also_by_fingerprints"] == report["duplicates"]["across_splits"] == 1
    assert embedding["new_pairs"] == len(embedding["pairs"]) > 0
    scores = [pair["score"] for pair in embedding["pairs"]]
    assert scores == sorted(scores, reverse=True)
    across = [pair for pair in embedding["pairs"] if len({image["split"] for image in pair["images"]}) == 2]
    assert embedding["across_splits"] == len(across)
    assert f"by features  {pluralize(len(scores), 'more pair')} with a score of 0.001 or more, beside 1 of the" in out
    first = embedding["pairs"][0]
    names = " = ".join(f"{image['split']}: {image['name']}" for image in first["images"])
    assert f"{first['score']:.2f}: {names}" in out
    assert len(report["leave_out"]) == 1  # the equal file; pairs by features are for eyes
    assert "above 0 and at most 1" in run("data", "check", "./set", *options[:3], "2", capsys=capsys)[2]
    assert "add --embedding MODEL" in run("data", "check", "./set", "--threshold", "0.6", capsys=capsys)[2]
