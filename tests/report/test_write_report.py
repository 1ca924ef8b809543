"""Reports of a real run: every section is there, in one file, and a sentence replaces what is missing."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests import model_factory
from tests.cli.test_train import HERE
from tests.data.image_files import make_image, write_image_folder
from tests.report.page_parser import ParsedPage
from tests.report.run_folders import isolate_home
from vitrail.cli import main
from vitrail.data.sources import open_dataset
from vitrail.model.vit import Model
from vitrail.report.run_facts import gather_facts
from vitrail.report.write_report import NO_TIME_NOTE, write_report
from vitrail.weights.load import save

CPU = torch.device("cpu")
SECTIONS = {
    *(
        "result",
        "run",
        "curves",
        "confusion",
        "calibration",
        "mistakes",
        "data",
        "figures",
        "forward-trace",
        "rerun",
        "card",
    ),
}
MISSING = "The data was moved."


def parse_page(path: Path) -> ParsedPage:
    page = ParsedPage(path.read_text(encoding="utf-8"))
    assert page.errors == []
    return page


def test_the_page_has_every_part_and_needs_no_other_file(run: Path) -> None:
    path = run / "report.html"
    page = parse_page(path)
    assert set(page.sections) - {""} == SECTIONS
    assert len(set(page.ids)) == len(page.ids)
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert {address[1:] for address in page.addresses if address.startswith("#")} <= set(page.ids)
    assert not {"script", "iframe", "object", "embed", "form", "base"} & set(page.tags)
    assert not re.search(r"url\(|@import", path.read_text())
    assert path.stat().st_size < 1_000_000


def test_headings_go_down_one_step_at_a_time(run: Path) -> None:
    levels = [int(tag[1]) for tag in parse_page(run / "report.html").tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_the_walk_tells_the_answer_that_the_table_has(run: Path) -> None:
    facts = gather_facts(run)
    section = parse_page(run / "report.html").sections["forward-trace"]
    name = re.search(r"test/\w+/\d+\.jpg", section)
    assert name is not None
    [prediction] = [prediction for prediction in facts.predictions if prediction.image == name[0]]
    shown = f"{100 * prediction.probability:.2f}\N{NO-BREAK SPACE}%"
    assert shown in section


def test_the_card_is_written_and_says_the_same(run: Path) -> None:
    result = gather_facts(run).result
    assert result is not None
    card = (run / "README.md").read_text()
    assert f"| accuracy | {100 * result.top1:.1f} % " in card
    assert str(run.parent) not in card


def test_without_its_images_a_page_shows_all_that_needs_none(run: Path, tmp_path: Path) -> None:
    write_report(run, MISSING, CPU, tmp_path / "page.html")
    page = parse_page(tmp_path / "page.html")
    assert set(page.sections) - {""} == SECTIONS
    for name in ("mistakes", "forward-trace"):
        assert MISSING in page.sections[name]
    assert "principal components" in page.sections["figures"]
    assert MISSING in page.sections["figures"]
    kinds = re.findall(r"data:image/(\w+)", (tmp_path / "page.html").read_text())
    assert set(kinds) == {"png"}  # filters and positions, which are of weights


def test_a_run_out_of_time_has_a_page_without_figures_of_the_model(run: Path, tmp_path: Path) -> None:
    write_report(run, MISSING, CPU, tmp_path / "page.html", with_figures=False)
    page = parse_page(tmp_path / "page.html")
    assert any(NO_TIME_NOTE in part for part in page.sections.values())
    assert not re.findall(r"data:image/(\w+)", (tmp_path / "page.html").read_text())


def test_an_edited_card_is_left_alone(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "README.md").write_text("mine")
    write_report(copy, MISSING, CPU)
    assert (copy / "README.md").read_text() == "mine"
    (copy / "README.md").unlink()
    write_report(copy, MISSING, CPU)
    assert (copy / "README.md").read_text() == (run / "README.md").read_text()


def test_an_interrupted_run_has_a_page_and_no_card(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    events = [line for line in (copy / "events.jsonl").read_text().splitlines() if '"event": "end"' not in line]
    (copy / "events.jsonl").write_text("\n".join(events) + "\n")
    for name in ("README.md", "report.html", "predictions.csv", "per_class.csv"):
        (copy / name).unlink()
    with isolate_home(tmp_path):
        facts = write_report(copy, open_dataset(str(run.parent / "set")), CPU)
    assert facts.missing
    page = parse_page(copy / "report.html")
    assert "has not ended" in page.text
    assert "result" not in page.sections
    assert "val/" in page.sections["forward-trace"]  # without predictions, images of val are shown
    assert not (copy / "README.md").exists()


def rewrite_report(run: Path, root: Path, model: Model) -> ParsedPage:
    """The page of a copy of the run in which the weights are those of another model, with other predictions."""
    shutil.copytree(run, root / "run")
    save(
        model_factory.build_trained(model, labels=("rose", "tulip")),
        root / "run" / "weights" / "best.safetensors",
        overwrite=True,
    )
    with isolate_home(root):
        write_report(root / "run", open_dataset(str(run.parent / "set")), CPU)
    page = parse_page(root / "run" / "report.html")
    assert set(page.sections) - {""} == SECTIONS
    return page


def test_a_resnet_has_sentences_in_place_of_what_it_has_not(run: Path, tmp_path: Path) -> None:
    page = rewrite_report(run, tmp_path, model_factory.build_bit(classes=2))
    assert "has no attention" in page.sections["figures"]
    assert "no position embeddings" in page.sections["figures"]
    assert "first convolution" in page.sections["figures"]
    assert "has no tokens" in page.sections["forward-trace"]
    assert "attention rollout" not in page.sections["mistakes"]


@pytest.mark.parametrize(
    "name", [name for name, settings in model_factory.VARIANTS.items() if "classes" not in settings]
)
def test_every_kind_of_model_has_a_page(run: Path, tmp_path: Path, name: str) -> None:
    page = rewrite_report(run, tmp_path, model_factory.build_vit(classes=2, **model_factory.VARIANTS[name]))
    assert ("there is no position embedding" in page.sections["figures"].lower()) == (
        name in ("no-positions", "relative", "rotary-normalized", "bias-table", "bias-table-mean")
    )
    section = page.sections["forward-trace"]
    assert "4. The head predicts a class" in section
    assert ("A position embedding is added to each patch." in section) == (name in ("registers", "2d", "sincos"))
    assert ("the stem's features of the framed patch" in section) == (name == "hybrid")
    config = model_factory.build_config(**model_factory.VARIANTS[name])
    assert ("The model has no positions." in section) == (name == "no-positions")
    assert ("Attention turns queries and keys" in section) == (config.rotary is not None)
    assert ("plus a bias for each offset" in section) == (config.positions == "relative-bias")
    assert ("the SiLU of one, the gate" in section) == config.gated_mlp != ("with a GELU between them" in section)
    assert ("scaled to length 1" in section) == config.normalize_features
    assert ("of it stays with itself" in section) == (config.class_token and config.num_prefix_tokens == 1)


def test_a_patch_that_reads_beside_one_register_does_not_call_it_itself(run: Path, tmp_path: Path) -> None:
    model = model_factory.build_vit(classes=2, class_token=False, registers=1, pool="norm-mean")
    section = " ".join(rewrite_report(run, tmp_path, model).sections["forward-trace"].split())
    assert re.search(r"The attention of the framed patch in layer 1 \(\d+ % of it goes to the token before", section)
    assert "itself (" not in section


def test_images_listed_by_their_whole_paths_are_called_by_their_names(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    home = tmp_path / "some one (here)"
    shutil.copytree(run.parent / "set", home / "set")
    rows = [f'"{path}",{path.parts[-2]},{path.parts[-3]}\n' for path in (home / "set").glob("*/*/*.jpg")]
    (home / "list.csv").write_text("path,label,split\n" + "".join(sorted(rows)))
    predictions = (copy / "predictions.csv").read_text()
    (copy / "predictions.csv").write_text(re.sub(r"(test/[^,]*)", rf'"{home}/set/\1"', predictions))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"data": str(home / "list.csv")}))
    with isolate_home(tmp_path):
        write_report(copy, open_dataset(str(home / "list.csv")), CPU)
    page = parse_page(copy / "report.html")
    for name in ("mistakes", "figures", "forward-trace"):
        assert re.search(r"\d\.jpg", page.sections[name])
        assert "some one" not in page.sections[name]
    for path in (home / "set" / "test").glob("*/*.jpg"):
        path.write_bytes(b"no picture")
    with isolate_home(tmp_path):
        write_report(copy, open_dataset(str(home / "list.csv")), CPU)
    section = parse_page(copy / "report.html").sections["forward-trace"]
    assert re.search(r"The images cannot be shown: \d\.jpg", section)


def test_a_run_without_labels_has_a_page(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run"
    save(
        model_factory.build_trained(model_factory.build_vit(classes=0)),
        folder / "weights" / "best.safetensors",
        overwrite=True,
    )
    config = json.loads((folder / "config.json").read_text())
    config["recipe"] |= {"masked": {"kind": "mae", "share": 0.75, "target": "pixels"}, "model": "ti16"}
    (folder / "config.json").write_text(json.dumps(config | {"model": None}))
    metrics = {"split": "val", "images": 8, "patches": 96, "loss": 0.25, "top1": None, "top5": None, "seconds": 3.0}
    (folder / "events.jsonl").write_text(json.dumps({"at": 1, "event": "pretrained", **metrics}) + "\n")
    make_image(0, (300, 400)).save(folder / "reconstruction.jpg")
    (folder / "README.md").unlink()
    with isolate_home(tmp_path):
        write_report(folder, open_dataset(str(run.parent / "set")), CPU)
    page = parse_page(folder / "report.html")
    assert set(page.sections) - {""} == SECTIONS - {"confusion", "calibration", "mistakes"} | {"reconstruction"}
    assert "0.2500" in page.sections["result"]
    assert "4. The features" in page.sections["forward-trace"]
    assert "pre-trained without labels" in page.text
    assert "masked patches" in (folder / "README.md").read_text()


def test_several_labels_have_a_page(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "set", each=12)
    rows = [
        {"path": f"{name}/{number}.jpg", "labels": [name, "flower"] if number % 2 else [name]}
        for name in ("rose", "tulip")
        for number in range(12)
    ]
    (root / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "model.safetensors")
    with isolate_home(tmp_path / "home"):
        options = ["--model", str(tmp_path / "model.safetensors"), "--out", str(tmp_path / "run"), *HERE]
        assert main(["finetune", str(root / "list.jsonl"), *options, "--epochs", "2", "--batch", "4"]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["multi_label"] is True
    page = parse_page(tmp_path / "run" / "report.html")
    assert "several labels" in page.sections["confusion"]
    assert "have exactly their labels predicted (exact match). F1" in " ".join(page.sections["result"].split())
    table = (tmp_path / "run" / "per_class.csv").read_text().splitlines()
    assert table[0] == "class,train_images,images,correct,recall,precision,predicted,f1,average_precision,threshold"
    assert len(table) == 4
    assert "A sigmoid for each class" in page.sections["forward-trace"]
