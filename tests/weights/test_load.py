"""Which thing a MODEL means, and writing it whole or not at all."""

from pathlib import Path

import pytest
import torch

import vitrail
from tests import model_factory
from vitrail import Classifier
from vitrail.errors import UsageError
from vitrail.weights import native
from vitrail.weights.formats import WeightsFormat
from vitrail.weights.load import find_model_path, load, save


def test_a_path_wins_over_a_name_only_with_a_separator_or_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model_path("ti16") is None
    assert find_model_path("./ti16") == Path("ti16")
    assert find_model_path("models/ti16") == Path("models/ti16")
    assert find_model_path(tmp_path) == tmp_path
    Path("ti16").mkdir()
    assert find_model_path("ti16") is None
    Path("ti16").rmdir()
    save(model_factory.build_trained(model_factory.build_vit()), "model.safetensors")
    Path("model.safetensors").rename("ti16")
    assert find_model_path("ti16") == Path("ti16")


def test_a_runs_folder_means_its_best_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(model_factory.build_trained(model_factory.build_vit()), "run/weights/best.safetensors")
    Path("run/config.json").write_text("{}")
    assert (
        find_model_path("run")
        == find_model_path(tmp_path / "run").relative_to(tmp_path)
        == Path("run/weights/best.safetensors")
    )
    assert load("run").model.config == model_factory.build_vit().config
    assert find_model_path("a" * 300) == Path("a" * 300)


def test_a_preset_is_random_and_the_same_each_time() -> None:
    first, second = load("ti16"), load("ti16")
    assert first.origin.format == "random"
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))
    assert not first.model.training


def test_a_name_that_means_nothing_gets_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no file or folder is called 'so400m1x', and .* Did you mean so400m14\?"):
        load("so400m1x")
    with pytest.raises(UsageError, match=r"Did you mean b16\?"):
        load("B16")
    save(model_factory.build_trained(model_factory.build_vit()), "mine", "timm")
    assert find_model_path("mine") == Path("mine")  # a folder, where no preset has its name
    assert load("mine").labels is not None
    with pytest.raises(UsageError, match=r"no file or folder is called 'min'; did you mean mine\?"):
        load("min")


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save(model_factory.build_trained(model_factory.build_vit()), path)
    before = path.read_bytes()

    def half(trained: vitrail.Trained, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(native, "write", half)
    with pytest.raises(OSError, match="No space left"):
        save(model_factory.build_trained(model_factory.build_vit(1)), path, overwrite=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    for seed in (0, 1):
        save(
            model_factory.build_trained(model_factory.build_vit(seed, gelu="erf")),
            tmp_path / "model",
            "timm",
            overwrite=True,
        )
    assert torch.equal(load(tmp_path / "model").model.head.weight, model_factory.build_vit(1, gelu="erf").head.weight)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "real.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "real.safetensors")
    with pytest.raises(UsageError, match="is a link; pass the file or folder it points to"):
        save(model_factory.build_trained(model_factory.build_vit(1)), tmp_path / "link.safetensors", overwrite=True)


def test_a_model_made_and_trained_in_python_is_saved_in_one_line(tmp_path: Path) -> None:
    model = vitrail.create("ti16", image_size=32, num_classes=3)
    vitrail.save(vitrail.Trained(model, labels=("a", "b", "c")), tmp_path / "mine.safetensors")
    assert load(tmp_path / "mine.safetensors").origin.name == "in-memory model"
    for use in (
        lambda: save(model, tmp_path / "x.safetensors"),
        lambda: vitrail.adapt(model),
        lambda: Classifier(model),
    ):
        with pytest.raises(UsageError, match=r"give a vitrail\.Trained, not ViT: vitrail\.Trained\(model"):
            use()
    with pytest.raises(UsageError, match="a model of vitrail, not str"):
        vitrail.Trained("model.safetensors")
    with pytest.raises(UsageError, match="called num_classes"):
        vitrail.create("ti16", classes=3)


@pytest.mark.parametrize(
    ("format_name", "file"),
    [("google", "model.npz"), ("timm", "model"), ("transformers", "model"), ("torchvision", "model.pth")],
)
def test_other_formats_have_no_place_for_a_temperature_and_it_is_noted(
    format_name: WeightsFormat, file: str, tmp_path: Path
) -> None:
    change = {"width": 64, "heads": 1} if format_name == "torchvision" else {}  # it knows heads of 64 alone
    model = model_factory.build_vit(gelu="tanh" if format_name == "google" else "erf", **change)
    plain = save(model_factory.build_trained(model), tmp_path / file, format_name)
    hot = save(model_factory.build_trained(model, temperature=1.25), tmp_path / file, format_name, overwrite=True)
    assert hot == [*plain, f"temperature: {format_name} divides logits by 1, this model by 1.25"]
    assert load(tmp_path / file).temperature == 1.0


def test_the_public_functions_make_a_round_trip(tmp_path: Path) -> None:
    model = vitrail.create("ti16", image_size=64, num_classes=10)
    assert model.training
    assert model.config.image_size == (64, 64)
    special = vitrail.create("ti16", image_size=32, registers=4, channels=1, dropout=0.1, stochastic_depth=0.2)
    assert (special.config.registers, special.pos_drop.p) == (4, 0.1)
    assert special.blocks[11].drop_path == 0.2
    trained = vitrail.load("ti16")
    vitrail.save(trained, tmp_path / "copy.safetensors")
    assert vitrail.load(tmp_path / "copy.safetensors").origin == trained.origin
