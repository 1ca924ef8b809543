"""Google's .npz files against a NumPy reference of their semantics, and back."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import google_reference as reference
from tests import model_factory
from tests.conftest import peer
from tests.model_factory import VARIANTS
from vitrail import presets
from vitrail.config import BiTConfig, ConvConfig, ViTConfig
from vitrail.errors import ModelError, UsageError
from vitrail.weights import tensor_files, timm_tensors
from vitrail.weights.load import load, save

VITS: dict[str, Any] = {
    "ViT": lambda rng: reference.make_vit(rng),
    "ViT, pre-logits": lambda rng: reference.make_vit(rng, pre_logits=True),
    "ViT, average pooling": lambda rng: reference.make_vit(rng, gap=True),
    "big_vision, class token": lambda rng: reference.make_big_vision(rng, pool="tok"),
    "big_vision, average pooling": lambda rng: reference.make_big_vision(rng, pool="gap"),
    "big_vision, attention pooling": lambda rng: reference.make_big_vision(rng, pool="map"),
    "big_vision, sin-cos": lambda rng: reference.make_big_vision(rng, pool="gap", positions="sincos2d"),
    "big_vision, scanned": lambda rng: reference.make_big_vision(rng, pool="map", scanned=True),
}
HYBRIDS: dict[str, Any] = {
    "hybrid, two stages": lambda rng: reference.make_hybrid(rng),
    "hybrid, flat norms": lambda rng: reference.make_hybrid(rng, flat_norms=True, pre_logits=True),
    "hybrid, three stages": lambda rng: reference.make_hybrid(rng, blocks=(1, 2, 1)),
    "hybrid, a stem of 32 channels": lambda rng: reference.make_hybrid(rng, stem_channels=32),
    "hybrid, stem alone": lambda rng: reference.make_hybrid(rng, blocks=(), patch=8),
}
RESNETS: dict[str, Any] = {
    "BiT": lambda rng: reference.make_bit(rng),
    "BiT, two units and double width": lambda rng: reference.make_bit(rng, blocks=(2, 1), width_factor=2),
    "BiT, half the width": lambda rng: reference.make_bit(rng, blocks=(1, 1), width_factor=0.5),
}
ALL = VITS | HYBRIDS | RESNETS


def make_arrays(kind: str) -> dict[str, Any]:
    return dict(ALL[kind](np.random.default_rng(0)))


def write_npz(tmp_path: Path, params: dict[str, Any]) -> Path:
    path = tmp_path / "model.npz"
    np.savez(path, **params)
    return path


def make_images(config: ViTConfig | BiTConfig, scale: float = 1.0, side: int | None = None) -> Tensor:
    size = config.image_size if side is None else (side, side)
    return (torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(1)) * 2 - 1) * scale


def compute_reference_logits(params: dict[str, Any], images: Tensor) -> Tensor:
    forward = reference.bit if any(name.startswith("resnet/") for name in params) else reference.vit
    return torch.from_numpy(forward(params, images.permute(0, 2, 3, 1).double().numpy()))


@pytest.mark.parametrize("kind", VITS)
def test_logits_of_vits_are_googles(kind: str, tmp_path: Path) -> None:
    params = make_arrays(kind)
    if "sin-cos" in kind:
        params = dict(
            reference.make_big_vision(np.random.default_rng(0), image=224, patch=32, positions="sincos2d", pool="gap")
        )
    model = load(write_npz(tmp_path, params)).model
    images = make_images(model.config)
    with torch.no_grad():
        assert (model(images) - compute_reference_logits(params, images)).abs().max() <= 1e-5
        # and in float64, where nothing hides behind rounding
        bound = 1e-7 if "sin-cos" in kind else 1e-9  # sin-cos positions are kept in float32
        assert (model.double()(images.double()) - compute_reference_logits(params, images)).abs().max() <= bound


@pytest.mark.parametrize("kind", HYBRIDS | RESNETS)
@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-3], ids=["bright", "faint", "fainter"])
def test_logits_of_convolutions_are_googles_also_on_faint_images(kind: str, scale: float, tmp_path: Path) -> None:
    """On a faint image the epsilon of group norm decides: another one is off by 3e-4 and more."""
    params = make_arrays(kind)
    model = load(write_npz(tmp_path, params)).model
    images = make_images(model.config, scale, 64)
    with torch.no_grad():
        assert (model(images) - compute_reference_logits(params, images)).abs().max() <= 1e-4


@pytest.mark.parametrize("side", [63, 50])
def test_a_resnet_pads_odd_sizes_as_googles_does(side: int, tmp_path: Path) -> None:
    params = make_arrays("BiT")
    model = load(write_npz(tmp_path, params)).model
    images = make_images(model.config, side=side)
    with torch.no_grad():
        assert (model(images) - compute_reference_logits(params, images)).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ALL)
def test_what_we_write_google_computes_alike_and_reads_back_identically(kind: str, tmp_path: Path) -> None:
    loaded = load(write_npz(tmp_path, make_arrays(kind)))
    notes = save(loaded, tmp_path / "again.npz", "google")
    assert "an .npz has no place for preprocessing, labels" in notes[-1]
    written = dict(np.load(tmp_path / "again.npz", allow_pickle=False))
    again = load(tmp_path / "again.npz")
    assert again.model.config == loaded.model.config
    images = make_images(loaded.model.config, side=64 if "sin-cos" in kind or kind in RESNETS else None)
    with torch.no_grad():
        assert torch.equal(again.model(images), loaded.model(images))
        assert (loaded.model(images) - compute_reference_logits(written, images)).abs().max() <= 1e-4
    if kind != "big_vision, scanned":  # which is written block by block
        assert written.keys() == make_arrays(kind).keys()
        for name, array in make_arrays(kind).items():
            assert np.array_equal(written[name].reshape(array.shape), array), name
    save(loaded, tmp_path / "third.npz", "google")
    assert (tmp_path / "third.npz").read_bytes() == (tmp_path / "again.npz").read_bytes()


@pytest.mark.parametrize("prefix", ["opt/target/", "params/", "params/img/"])
def test_prefixes_of_training_code_are_taken_off_and_the_rest_is_said(prefix: str, tmp_path: Path) -> None:
    params = make_arrays("ViT")
    plain = load(write_npz(tmp_path, params))
    other = {"opt/step": np.zeros((), np.int32), "txt/a/kernel": np.zeros(2, np.int8), "txt/b": np.zeros(2, np.float32)}
    loaded = load(write_npz(tmp_path, {f"{prefix}{name}": array for name, array in params.items()} | other))
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name])
    assert loaded.origin.changes == (
        "opt: 1 arrays left out, no part of the image model",
        "txt: 2 arrays left out, no part of the image model",
    )


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("prefix", ["params/", ""])
def test_the_image_tower_of_a_siglip_is_read_and_its_texts_are_left_out(
    scanned: bool, prefix: str, tmp_path: Path
) -> None:
    params = dict(reference.make_big_vision(np.random.default_rng(0), pool="map", scanned=scanned, classes=32))
    tower = {f"{prefix}img/{name}": array for name, array in params.items() if not name.startswith("head/")}
    texts = {f"{prefix}txt/head/kernel": np.zeros((8, 8), np.float32), f"{prefix}t": np.zeros(1, np.float32)}
    loaded = load(write_npz(tmp_path, tower | texts))
    assert (loaded.model.config.pool, loaded.model.config.classes) == ("map", 0)
    assert loaded.origin.changes[-1] == "txt: 1 arrays left out, no part of the image model"
    pooled = params | {"head/kernel": np.eye(32, dtype=np.float32), "head/bias": np.zeros(32, np.float32)}
    images = make_images(loaded.model.config)
    with torch.no_grad():
        assert (loaded.model(images) - compute_reference_logits(pooled, images)).abs().max() <= 1e-5


def test_the_head_of_an_image_tower_beside_texts_is_a_projection(tmp_path: Path) -> None:
    """LiT's, for instance."""
    params = dict(reference.make_big_vision(np.random.default_rng(0), pool="tok", classes=24))
    arrays = {f"params/img/{name}": array for name, array in params.items()}
    loaded = load(write_npz(tmp_path, arrays | {"params/txt/head/kernel": np.zeros((8, 8), np.float32)}))
    assert (loaded.model.config.projection, loaded.model.config.classes) == (24, 0)
    images = make_images(loaded.model.config)
    with torch.no_grad():
        assert (loaded.model(images) - compute_reference_logits(params, images)).abs().max() <= 1e-5


def test_so400m_at_384_is_read_at_the_378_pixels_of_its_positions(tmp_path: Path) -> None:
    params = reference.make_big_vision(np.random.default_rng(0), pool="map", image=378, patch=14, width=8, heads=2)
    loaded = load(write_npz(tmp_path, dict(params)))
    assert loaded.model.config.image_size == (378, 378)
    assert any("weights of 384 x 384 pixels leave 6 unread" in sentence for sentence in loaded.origin.assumptions)


def test_bfloat16_arrays_arrive_as_void_and_are_read(tmp_path: Path) -> None:
    params = make_arrays("ViT")
    halves = {name: torch.from_numpy(array).bfloat16() for name, array in params.items()}
    void = {name: tensor.view(torch.int16).numpy().view("V2") for name, tensor in halves.items()}
    loaded = load(write_npz(tmp_path, void))
    exact = load(write_npz(tmp_path, {name: tensor.float().numpy() for name, tensor in halves.items()}))
    for name, tensor in exact.model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name]), name


def test_compressed_files_and_half_precision_are_read(tmp_path: Path) -> None:
    params = make_arrays("ViT")
    np.savez_compressed(tmp_path / "model.npz", **{name: array.astype(np.float16) for name, array in params.items()})
    loaded = load(tmp_path / "model.npz")
    assert torch.equal(loaded.model.head.bias, torch.from_numpy(params["head/bias"].astype(np.float16)).float())


def test_positions_before_the_class_token_equal_positions_added_to_it(tmp_path: Path) -> None:
    """big_vision's order is vision_transformer's with the first position folded into the class token, exactly."""
    params = make_arrays("ViT")
    google = load(write_npz(tmp_path, params)).model
    position = params.pop("Transformer/posembed_input/pos_embedding")
    folded = params | {"cls": params["cls"] + position[:, :1], "pos_embedding": position[:, 1:]}
    big_vision = load(write_npz(tmp_path, folded)).model
    assert (google.config.prefix_positions, big_vision.config.prefix_positions) == (True, False)
    images = make_images(google.config)
    with torch.no_grad():
        assert torch.equal(big_vision(images), google(images))


def test_what_the_file_does_not_say_is_listed(tmp_path: Path) -> None:
    loaded = load(write_npz(tmp_path, make_arrays("ViT") | {"head/kernel": np.zeros((32, 7), np.float32)}))
    assert loaded.origin.format == "google"
    assert loaded.model.config.gelu == "tanh"
    assert loaded.model.config.resample == "bilinear-corners"
    assert loaded.preprocess is not None
    assert loaded.preprocess.mean == (0.5, 0.5, 0.5)
    assert any("preprocessing: mean and std 0.5" in text for text in loaded.origin.assumptions)
    sincos = load(write_npz(tmp_path, make_arrays("big_vision, sin-cos")))
    assert any("positions: none are stored, so sin-cos" in text for text in sincos.origin.assumptions)


@pytest.mark.parametrize("name", ["r50-b16", "r26-s32", "r-ti16", "bit-r50x1", "ti16"])
def test_presets_have_the_shapes_of_googles_files(name: str, tmp_path: Path) -> None:
    """Other depths and widths are read off the file: a preset with few classes, written and read, is itself."""
    from vitrail.weights.trained import create_random

    before = create_random(name, num_classes=2)
    save(before, tmp_path / "model.npz", "google")
    assert load(tmp_path / "model.npz").model.config == before.model.config


HELD = ("plain", "hidden-head", "headless", "hidden-headless", "norm-mean", "map", "no-positions", "2d", "sincos",
        "hybrid", "grey")  # fmt: skip


@pytest.mark.parametrize("kind", sorted(VARIANTS))
def test_variants_are_held_exactly_or_refused(kind: str, tmp_path: Path) -> None:
    ours = model_factory.build_trained(model_factory.build_vit(**VARIANTS[kind]))
    if kind not in HELD:
        with pytest.raises(ModelError, match=r"the google format cannot hold this model|no square grid"):
            save(ours, tmp_path / "model.npz", "google")
        assert list(tmp_path.iterdir()) == []
        return
    save(ours, tmp_path / "model.npz", "google")
    images = model_factory.draw_images(ours.model.config)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "model.npz").model(images), ours.model(images))


def test_deit_tiny_with_its_erf_gelu_is_refused(deit_tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gelu is 'erf', and would be read as 'tanh'"):
        save(load(deit_tiny), tmp_path / "model.npz", "google")
    with pytest.raises(UsageError, match=r"call it .*model\.npz"):
        save(load(deit_tiny), tmp_path / "model", "google")


class Explosive:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code ran')",)


def test_hostile_npz_files_are_refused_before_anything_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(path: Path, names: object) -> dict[str, Tensor]:
        raise AssertionError("an array was unpacked")

    path = tmp_path / "model.npz"
    with monkeypatch.context() as patched:
        patched.setattr(tensor_files, "read_npz", never)
        np.savez(path, **{"head/kernel": np.array([Explosive()], dtype=object)})
        assert_refused(path, r"holds \|O|does not have the size")
        np.savez(path, **make_arrays("ViT") | {"evil": np.zeros(3, np.float32)})
        assert_refused(path, r"model\.npz has an array this model has no place for: 'evil'")
        np.savez(path, **make_arrays("ViT") | {"head/bias": np.zeros(7, np.int32)})
        assert_refused(path, "holds <i4")
        np.savez(path, **{name: array.astype(">f4") for name, array in make_arrays("ViT").items()})
        assert_refused(path, "holds >f4")
        np.savez(path, **make_arrays("ViT") | {"head/bias": np.zeros(7, [("a", "i1"), ("b", "i1")])})
        assert_refused(path, "does not have the size|holds")
        bomb = make_arrays("ViT") | {"head/bias": np.zeros(50_000_000, np.float32)}
        np.savez_compressed(path, **bomb)
        assert path.stat().st_size < 1_000_000
        assert_refused(path, "unpacks to 200.* bytes, far more than weights can")
        np.savez(path, **make_arrays("ViT") | {"head/bias": np.zeros(50, np.float32)})
        assert_refused(path, r"'head\.bias' has shape \(50,\)")
        for name in make_arrays("ViT"):
            for shape in ((), (1,), (2, 3), (1, 0, 32), (3, 3, 3, 3), (2, 2, 2, 2, 2)):
                np.savez(path, **make_arrays("ViT") | {name: np.zeros(shape, np.float32)})
                assert_refused(path)
        path.write_bytes(b"PK\x05\x06" + b"\0" * 18)
        assert_refused(path)
        path.write_bytes(b"no zip")
        assert_refused(path, "damaged")


def test_an_array_whose_header_lies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    np.savez(path, **make_arrays("ViT"))
    header = (
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }".ljust(127)
        + b"\n"
    )
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("huge.npy", header + b"1234")
    assert_refused(path, "does not have the size that its header claims")


def test_what_is_no_part_of_the_model_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.npz"
    inside = {f"params/{name}": array for name, array in make_arrays("ViT").items()}
    np.savez_compressed(path, **inside, bomb=np.zeros(50_000_000, np.float32))
    unpacked: list[str] = []
    read = np.lib.format.read_array

    def watched(file: Any, **options: Any) -> Any:
        unpacked.append(file.name)
        return read(file, **options)

    monkeypatch.setattr(np.lib.format, "read_array", watched)
    assert load(path).model.config.depth == 2
    assert sorted(unpacked) == sorted(f"{name}.npy" for name in inside)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 9223372036854775808), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 0), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': " + "[" * 9000 + "}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
        "not a dictionary",
        "",
    ],
)
def test_headers_that_are_none_are_refused(header: str, tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    np.savez(path, **make_arrays("ViT"))
    text = header.encode().ljust(118) + b"\n"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("huge.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    assert_refused(path, "damaged")


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_packings_and_doubled_names_are_refused(packing: int, tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    np.savez(path, **make_arrays("ViT"))
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", packing) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    assert_refused(path, "compressed in a way that NumPy never writes")
    np.savez(path, **make_arrays("ViT"))
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("head/bias.npy", contents["head/bias.npy"])
    assert_refused(path, "there twice")


def test_long_numbers_in_names_are_only_names(tmp_path: Path) -> None:
    for name in (f"block{'1' * 5000}/unit1/conv1/kernel", f"Transformer/encoderblock_{'9' * 5000}/LayerNorm_0/scale"):
        assert_refused(
            write_npz(tmp_path, make_arrays("ViT") | {name: np.zeros(3, np.float32)}), "no place for|damaged"
        )


def test_blocks_of_different_heads_and_a_class_token_beside_map_are_refused(tmp_path: Path) -> None:
    params = make_arrays("ViT")
    block = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1"
    other = {f"{block}/query/kernel": params[f"{block}/query/kernel"].reshape(32, 8, 4)}
    assert_refused(write_npz(tmp_path, params | other), "blocks of 4, 8 heads")
    both = make_arrays("big_vision, attention pooling") | {"cls": np.zeros((1, 1, 32), np.float32)}
    assert_refused(write_npz(tmp_path, both), "both a class token and attention pooling")
    with pytest.raises(ModelError, match="both a class token and attention pooling"):
        save(
            model_factory.build_trained(model_factory.build_vit(pool="map", prefix_positions=False)),
            tmp_path / "b.npz",
            "google",
        )


@pytest.mark.parametrize("change", [{"prefix_positions": False}, {"positions": "sincos-2d"}])
def test_a_hybrid_is_written_under_vision_transformers_names(change: dict[str, Any], tmp_path: Path) -> None:
    ours = model_factory.build_trained(model_factory.build_vit(stem=model_factory.STEM, patch=2, **change))
    notes = save(ours, tmp_path / "model.npz", "google")
    assert "stored as one learned table" in notes[0]
    assert "Transformer/posembed_input/pos_embedding" in np.load(tmp_path / "model.npz").files
    images = model_factory.draw_images(ours.model.config)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "model.npz").model(images), ours.model(images), atol=1e-6, rtol=1e-6)
    with pytest.raises(ModelError, match="no hybrid with attention pooling"):
        save(
            model_factory.build_trained(
                model_factory.build_vit(stem=model_factory.STEM, patch=2, pool="map", class_token=False)
            ),
            tmp_path / "b.npz",
            "google",
        )


def test_flipped_or_cut_npz_files_are_refused_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    np.savez_compressed(path, **dict(reference.make_vit(np.random.default_rng(0), width=32, depth=1, mlp=8)))
    content, generator = path.read_bytes(), np.random.default_rng(0)
    for i in range(300):
        broken = bytearray(content)
        if i % 4 == 0:
            del broken[generator.integers(len(broken)) :]
        else:
            broken[generator.integers(len(broken))] ^= 1 << int(generator.integers(8))
        path.write_bytes(broken)
        try:
            load(path)
        except ModelError as error:
            if "\n" in str(error):
                pytest.fail(f"more than one line: {error}")


def assert_refused(path: Path, message: str | None = None) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_info_reads_an_npz(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vitrail.cli import main

    path = write_npz(tmp_path, make_arrays("hybrid, two stages") | {"head/kernel": np.zeros((32, 7), np.float32)})
    assert main(["info", str(path), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["architecture"]["stem"]["units"] == [2, 2]
    assert any("head: all zeros" in text for text in info["warnings"])
    assert main(["info", str(path)]) == 0
    assert "2+2 units" in capsys.readouterr().out


def test_a_resnet_of_another_depth_and_width_loads(tmp_path: Path) -> None:
    config = load(write_npz(tmp_path, make_arrays("BiT, two units and double width"))).model.config
    assert isinstance(config, BiTConfig)
    assert config.conv == ConvConfig(units=(2, 1), width_factor=2, **presets.BIT_NUMERICS)


TIMM: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "ViT": (reference.make_vit, "vit_base_patch16_224", {"img_size": 32, "patch_size": 8}),
    "attention pooling": (
        lambda rng: reference.make_big_vision(rng, pool="map"),
        "vit_base_patch16_siglip_224",
        {"img_size": 32, "patch_size": 8},
    ),
    "average pooling": (
        lambda rng: reference.make_big_vision(rng, pool="gap"),
        "vit_base_patch16_224",
        {"img_size": 32, "patch_size": 8, "class_token": False, "global_pool": "avg", "fc_norm": False},
    ),
    "hybrid": (
        lambda rng: reference.make_hybrid(rng, blocks=(2, 2, 2, 2)),
        "vit_small_r26_s32_224",
        {"img_size": 64},
    ),
    "stem alone": (
        lambda rng: reference.make_hybrid(rng, blocks=(), patch=8),
        "vit_tiny_r_s16_p8_224",
        {"img_size": 64},
    ),
    "BiT": (lambda rng: reference.make_bit(rng, blocks=(3, 4, 6, 3)), "resnetv2_50x1_bit", {}),
}


@pytest.mark.parametrize("kind", TIMM)
def test_timms_own_reader_puts_every_array_where_ours_does(kind: str, tmp_path: Path) -> None:
    """A second opinion on names and layouts; timm computes with other numerics, so its logits are no oracle here."""
    timm_library = peer("timm")
    make, name, change = TIMM[kind]
    sizes = {} if kind == "BiT" else {"embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 2}
    theirs = timm_library.create_model(name, num_classes=7, **sizes | change)
    path = write_npz(tmp_path, make(np.random.default_rng(0)))
    theirs.load_pretrained(str(path))
    expected = timm_tensors.rename_tensors(theirs.state_dict())
    ours = load(path).model.state_dict()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[key], expected[key]) for key in ours)
