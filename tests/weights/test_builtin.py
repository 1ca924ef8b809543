"""The pre-trained model inside the package: its file, what it computes, and its card."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import vitrail
from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as run_command
from tests.data.image_files import make_image, write_image_folder
from tests.network import run_watched
from vitrail.config import ViTConfig
from vitrail.errors import ModelError, UsageError
from vitrail.files import compute_sha256
from vitrail.model import cost
from vitrail.weights import builtin
from vitrail.weights.formats import WeightsFormat
from vitrail.weights.load import describe_license, find_model_path, load, save
from vitrail.weights.trained import Trained


@pytest.fixture(scope="module")
def trained() -> Trained:
    return load("builtin")


def compute_logits(trained: Trained) -> Tensor:
    with torch.inference_mode():
        return trained.model(torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)))


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_is_the_recorded_one_and_small() -> None:
    path = Path(str(builtin.FILE))
    assert compute_sha256(path) == builtin.SHA256
    assert path.stat().st_size < 12e6


def test_weights_are_stored_in_16_bits_and_loaded_as_float32(trained: Trained) -> None:
    loaded = trained.model.state_dict()
    with safe_open(str(builtin.FILE), "pt") as file:
        assert set(file.keys()) == loaded.keys()
        for name in file.keys():  # noqa: SIM118, it is no mapping
            assert file.get_tensor(name).dtype == torch.float16, name
            assert loaded[name].dtype == torch.float32, name
            assert torch.equal(loaded[name], file.get_tensor(name).float()), name


@pytest.mark.parametrize("damage", ["missing", "cut", "one bit"])
def test_a_damaged_file_is_refused_with_how_to_mend_it(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    content, path = bytearray(builtin.FILE.read_bytes()), tmp_path / "builtin.safetensors"
    if damage == "one bit":
        content[-1] ^= 1
    if damage != "missing":
        path.write_bytes(content[:-8] if damage == "cut" else content)
    monkeypatch.setattr(builtin, "FILE", path)
    with pytest.raises(ModelError, match="is damaged or missing: reinstall vitrail"):
        load("builtin")
    code, _, err = run_command("info", "builtin", capsys=capsys)
    assert (code, "pip install --force-reinstall --no-deps vitrail" in err) == (4, True)


# --- the model --------------------------------------------------------------------------------------------------------


def test_it_is_what_its_summary_says(trained: Trained) -> None:
    config = trained.model.config
    assert isinstance(config, ViTConfig)
    assert (config.width, config.depth, config.heads, config.mlp, config.patch) == (192, 12, 3, 768, 8)
    assert (config.image_size, config.channels) == ((64, 64), 3)
    without_head = cost.count_parameters(dataclasses.replace(config, classes=0))
    assert f"ViT-Ti/8 (64 pixels, {without_head / 1e6:.1f}M parameters)" == builtin.SUMMARY
    assert not trained.model.training


def test_it_names_its_classes_and_its_preprocessing(trained: Trained) -> None:
    assert trained.labels is not None
    assert len(trained.labels) == trained.model.config.classes >= 200
    assert not [label for label in trained.labels if re.fullmatch(r"n\d{8}", label)]
    assert trained.preprocess is not None
    assert trained.preprocess.size == (64, 64)


def test_the_class_token_comes_first(trained: Trained) -> None:
    config = trained.model.config
    assert (config.class_token, config.registers, config.pool) == (True, 0, "class")
    with torch.inference_mode():
        tokens = trained.model.encode(torch.zeros(1, 3, 64, 64))
        assert tokens.shape == (1, 1 + 64, 192)
        features = trained.model.compute_features(torch.zeros(1, 3, 64, 64))
    torch.testing.assert_close(features, tokens[:, 0])


def test_logits_are_identical_through_other_libraries_formats_and_back(trained: Trained, tmp_path: Path) -> None:
    expected, copy = compute_logits(trained), trained
    steps: list[tuple[WeightsFormat, str]] = [("timm", "1"), ("transformers", "2"), ("vitrail", "3.safetensors")]
    for format_name, name in steps:
        save(copy, tmp_path / name, format_name)
        copy = load(tmp_path / name)
        assert torch.equal(compute_logits(copy), expected), format_name
        assert copy.labels == trained.labels


def test_transformers_computes_the_same(trained: Trained, tmp_path: Path) -> None:
    from transformers import ViTForImageClassification

    save(trained, tmp_path / "model", "transformers")
    model = ViTForImageClassification.from_pretrained(tmp_path / "model").eval()
    pixels = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(model(pixels).logits, compute_logits(trained), atol=1e-4, rtol=1e-4)


# --- its name ---------------------------------------------------------------------------------------------------------


def test_a_path_wins_over_the_name_only_with_a_separator_or_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("builtin").mkdir()
    assert find_model_path("builtin") is None
    assert find_model_path("./builtin") == Path("builtin")
    Path("builtin").rmdir()
    Path("builtin").touch()
    assert find_model_path("builtin") == Path("builtin")


def test_a_typo_is_answered_with_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for typo in ("bulitin", "built-in", "Builtin"):
        with pytest.raises(UsageError, match=rf"no file or folder is called '{typo}'; did you mean builtin\?"):
            load(typo)


def test_it_is_a_model_of_python_and_of_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("builtin").mkdir()  # a folder of that name is not meant
    make_image(0).save("cat.png")
    make_image(1).save("dog.png")
    features = vitrail.embed("builtin", ["cat.png", "dog.png"], out="features.npy", progress=False, workers=0)
    assert features is not None
    assert features.shape == (2, 192)
    index = vitrail.index("features.npy", "photos.index")
    assert vitrail.search(index, ["cat.png"], progress=False) is not None  # by the model that the index records
    commands: list[tuple[str, ...]] = [
        ("predict", "builtin", "cat.png"),
        ("figures", "builtin", "builtin", "cat.png"),
        ("plan", "builtin", "--predict", "1000"),
        ("convert", "builtin", "copy.safetensors"),
        ("push", "builtin", "hf:ORG/NAME", "--dry-run"),
    ]
    for command in commands:
        code, out, err = run_command(*command, capsys=capsys)
        assert (code, bool(out)) == (0, True), (command, err)


def test_nothing_is_downloaded(tmp_path: Path) -> None:
    make_image(0).save(tmp_path / "cat.png")
    ended = run_watched(["-m", "vitrail", "predict", "builtin", "cat.png"], tmp_path)
    assert ended.code == 0, ended.err
    assert not ended.contacts


# --- its terms --------------------------------------------------------------------------------------------------------


def test_it_states_its_license_and_the_terms_of_its_data(trained: Trained, capsys: Capture) -> None:
    assert trained.origin.license == builtin.LICENSE
    assert trained.origin.sha256 == builtin.SHA256
    assert describe_license("builtin", trained) == f"license: vitrail's built-in ViT-Ti/8 states {builtin.LICENSE}"
    code, out, _ = run_command("info", "builtin", capsys=capsys)
    assert code == 0
    assert "builtin, inside the package" in out
    assert builtin.LICENSE in out
    assert str(builtin.CARD) in out


def test_the_card_states_data_terms_teacher_accuracy_and_limits() -> None:
    card = builtin.CARD.read_text(encoding="utf-8")
    headings = [line.removeprefix("## ") for line in card.splitlines() if line.startswith("## ")]
    assert headings == ["Use", "Data and its terms", "Teacher", "Training", "Accuracy", "Limits"]
    for words in ("Tiny-ImageNet", "non-commercial research and educational use", "Apache-2.0", "DeiT-Tiny"):
        assert words in card


def test_a_model_made_from_it_carries_its_license(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_image_folder(tmp_path / "photos", "train", "val", "test", each=4)
    options: dict[str, Any] = {"epochs": 1, "batch": 8, "workers": 0, "device": "cpu", "progress": False}
    run = vitrail.finetune("photos", trainable_layers=0, **options)
    assert run.trained.origin.name.startswith("vitrail's built-in ViT-Ti/8, fine-tuned on ")
    assert run.trained.origin.license == builtin.LICENSE
    assert run.trained.model.config.image_size == (64, 64)
    assert builtin.LICENSE in (run.folder / "README.md").read_text(encoding="utf-8")
    student = vitrail.distill("builtin", "photos", "builtin", settings={"distillation.kind": "features"}, **options)
    assert student.trained.origin.license == builtin.LICENSE
