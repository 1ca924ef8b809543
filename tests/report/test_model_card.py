"""The model card: read by the Hub's own library, true to the run, and silent on nothing."""

import dataclasses
import html
from pathlib import Path

import pytest

from tests import model_factory
from tests.report.run_folders import TRAIN_COUNTS, write_run_folder
from vitrail.cli import push
from vitrail.errors import DataError
from vitrail.report.model_card import HubAddress, build_card, set_hub_address
from vitrail.report.run_facts import gather_facts
from vitrail.weights.trained import Origin, Trained

hub = pytest.importorskip("huggingface_hub")


def trained(**changes: object) -> Trained:
    return model_factory.build_trained(
        model_factory.build_vit(classes=3), **({"labels": tuple(TRAIN_COUNTS)} | changes)
    )


def test_the_hubs_library_reads_the_measured_numbers_from_it(tmp_path: Path) -> None:
    text = build_card(trained(), gather_facts(write_run_folder(tmp_path / "run"))).to_markdown()
    data = hub.ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.license) == ("vitrail", "image-classification", None)
    assert data.tags == ["vitrail", "pytorch"]
    found = {(each.metric_type, each.dataset_name, each.dataset_split): each.metric_value for each in data.eval_results}
    assert found["accuracy", "photos", "test"] == 0.7
    assert found["recall", "photos", "test"] == pytest.approx((2 / 4 + 4 / 5 + 1) / 3, abs=1e-5)


def test_it_says_what_is_known_and_unknown_where_nothing_is(tmp_path: Path) -> None:
    text = build_card(trained(), gather_facts(write_run_folder(tmp_path / "run"))).to_markdown()
    lines = text.splitlines()
    for line in (
        "| accuracy | 70.0 % (39.7 to 89.2 %, Wilson's 95 % interval) |",
        "| baseline: always “dog”, the most frequent class in training | 50.0 % |",
        "Unknown: state it here before you publish this model.",
        "| license of the images | unknown |",
        "| duplicates across splits | unknown: the images were not compared |",
        "- license: unknown",
        "- Its accuracy on images other than those of photos is unknown.",
        "| resized to | short side 36 pixels, bicubic |",
        "| classes | 3: cat, dog, \\<b\\>eel\\</b\\> |",
        'trained = vitrail.load("weights/best.safetensors")  # model, preprocess, labels, origin',
    ):
        assert line in lines, line
    assert "Logits are divided by 1.500" in text
    assert "someone" not in text  # no folder of the machine


def test_a_number_of_images_that_were_trained_on_is_no_metric(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run", everything=True)
    events = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(events.replace('"split": "test"', '"split": "val"'))
    text = build_card(trained(), gather_facts(folder)).to_markdown()
    assert "model-index" not in text
    assert "trained on these images" in text


def test_a_licence_that_the_weights_came_with_is_stated(tmp_path: Path) -> None:
    licensed = trained(origin=Origin(format="vitrail", name="x", license="MIT"))
    text = build_card(licensed, gather_facts(write_run_folder(tmp_path / "run"))).to_markdown()
    assert hub.ModelCard(text).data.license == "mit"
    assert "- license: MIT" in text


def test_names_of_classes_and_sets_stay_words(tmp_path: Path) -> None:
    name = "x | y\n---\n## Use\n<script>"
    facts = gather_facts(write_run_folder(tmp_path / "run", data=name, classes=[name, "dog", "cat"]))
    text = build_card(trained(), facts).to_markdown()
    assert hub.ModelCard(text).data.eval_results[0].dataset_name == "x | y --- ## Use <script>"
    assert text.count("\n## Use\n") == 1
    assert text.count("\n---\n") == 1
    assert "<script>" not in text.partition("\n---\n")[2]


def test_a_name_in_the_card_renders_as_itself(tmp_path: Path) -> None:
    name = r"\<img src=x onerror=alert(1)> \|*a*_b_ __c__ d_e ~~f~~ `g` [h](i) \\"
    facts = gather_facts(write_run_folder(tmp_path / "run", classes=[name, "dog", "cat"]))
    text = build_card(trained(), facts).to_markdown().partition("\n---\n")[2]
    renderer = pytest.importorskip("markdown_it").MarkdownIt(
        "gfm-like", {"linkify": False}
    )  # a reader of the Hub's kind
    rendered = renderer.render(text)
    assert "<img" not in rendered
    assert f"<td>3: {html.escape(name)}, dog, cat</td>" in rendered


def test_a_run_without_a_head_or_a_result_has_a_card_too(tmp_path: Path) -> None:
    facts = gather_facts(write_run_folder(tmp_path / "run", ended=False))
    text = build_card(model_factory.build_trained(model_factory.build_vit(classes=0)), facts).to_markdown()
    assert "Unknown: the run has not ended." in text
    assert "pipeline_tag: image-feature-extraction" in text


def test_a_card_that_was_edited_is_what_is_pushed_with_the_address_put_in(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run")
    model = trained()
    text = build_card(model, gather_facts(folder)).to_markdown()
    edited = text.replace("Unknown: state it here before you publish this model.", "To tell cats from dogs.")
    (folder / "README.md").write_text(edited, encoding="utf-8")
    push.prepare_upload(model, tmp_path / "model", "org/mine", folder)
    pushed = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "To tell cats from dogs." in pushed
    assert 'vitrail.load("hf:org/mine")' in pushed
    assert "weights/best.safetensors" not in pushed
    assert 'pipeline("image-classification", "org/mine")' in pushed
    assert hub.ModelCard(pushed).data.library_name == "transformers"
    before, after = (each.partition("## Result")[2] for each in (edited, pushed))
    assert before == after  # the rest is as it was


def test_what_looks_like_a_heading_in_code_is_none(tmp_path: Path) -> None:
    text = "# Mine\n\n~~~\n## Use\n~~~\n\n## Use\n\n````sh\n## setup\n```\n## more\n````\n\n## Result\n\nGood.\n"
    model = trained()
    before, _, after = set_hub_address(text, model, HubAddress("org/mine")).partition("\n## Use\n\nAn image classifier")
    assert before == "# Mine\n\n~~~\n## Use\n~~~\n"
    assert 'vitrail.load("hf:org/mine")' in after
    assert "setup" not in after
    assert after.endswith("```\n\n## Result\n\nGood.\n")


def test_a_card_in_another_encoding_is_refused_in_a_line(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "run")
    (folder / "README.md").write_bytes("# Cats and dogs of Köln\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"README\.md is no text in UTF-8 .*: save it as such, or remove it"):
        push.prepare_upload(trained(), tmp_path / "model", "org/mine", folder)


def test_a_card_whose_section_was_removed_stays_without(tmp_path: Path) -> None:
    text = "# Mine\n\nNothing else.\n"
    assert set_hub_address(text, trained(), HubAddress("org/mine")) == text


def test_what_transformers_cannot_take_is_said(tmp_path: Path) -> None:
    model = trained()
    text = build_card(model).to_markdown()
    refused = set_hub_address(text, model, HubAddress("org/mine", refusal="it has registers"))
    assert "There are no files for transformers: it has registers." in refused
    assert "library_name: vitrail" in refused
    noted = set_hub_address(text, model, HubAddress("org/mine", notes=("the temperature",)))
    assert "Not stored in the format of transformers:\n\n- the temperature\n" in noted


def test_a_threshold_and_a_fitted_temperature_are_told(tmp_path: Path) -> None:
    sure = dataclasses.replace(trained(), threshold=0.75)
    assert (
        "Below a probability of 0.750"
        in build_card(sure, gather_facts(write_run_folder(tmp_path / "run"))).to_markdown()
    )
