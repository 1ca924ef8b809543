"""Models from and to a Hub on loopback; huggingface_hub is the real one, in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import model_factory
from tests.conftest import peer
from tests.hub_server import Hub, run_server
from vitrail.cli import push as push_command
from vitrail.config import LoRAConfig
from vitrail.errors import UsageError
from vitrail.report import model_card
from vitrail.weights import hub
from vitrail.weights.formats import WeightsFormat
from vitrail.weights.load import read_model, save
from vitrail.weights.peft_export import build_adapter, write_adapter
from vitrail.weights.trained import Origin, Trained

DOWNLOAD = """
import json, sys
from vitrail.errors import VitrailError
from vitrail.weights import hub

for model in sys.argv[1:]:
    try:
        hub_model = hub.download_model(model)
        print(json.dumps([str(hub_model.path), hub_model.name, hub_model.license]))
    except VitrailError as error:
        print(json.dumps([error.exit_code, str(error)]))
assert "torch" not in sys.modules
"""
PUSH = """
import json, sys
from pathlib import Path
from vitrail.errors import VitrailError
from vitrail.weights import hub

for folder, target, private in json.loads(sys.argv[1]):
    try:
        print(json.dumps(hub.push(Path(folder), target, private=private)))
    except VitrailError as error:
        print(json.dumps([error.exit_code, str(error)]))
"""
COMMAND = "import sys; from vitrail import cli; cli.COMMANDS.setdefault('push', ''); sys.exit(cli.main(sys.argv[1:]))"
WITHOUT_HUB = "import sys; sys.modules['huggingface_hub'] = None\n"
CARD = b"---\nlicense: apache-2.0\n---\n# A model\n"
OTHERS = {"evil.py": b"print()", "optimizer.pt": b"pickle", "huge.bin": b"0" * 1000, "onnx/model.safetensors": b"no"}


@pytest.fixture
def server() -> Iterator[Hub]:
    with run_server() as running:
        yield running


def run_python(server: Hub, home: Path, script: str, *arguments: str, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=server.environment(home, **environment),
        capture_output=True,
        text=True,
    )


def download(server: Hub, home: Path, *models: str, **environment: str) -> list[Any]:
    """What `hub.download_model` returned for each: path, name, license; or exit code and message."""
    process = run_python(server, home, DOWNLOAD, *models, **environment)
    assert (process.returncode, process.stderr) == (0, "")  # only results: no progress bars without a terminal
    return [json.loads(line) for line in process.stdout.splitlines()]


def push(server: Hub, home: Path, *calls: tuple[Path, str, bool], **environment: str) -> list[Any]:
    """What `hub.push` gave for each: the address; or exit code and message."""
    plain = json.dumps([(str(folder), target, private) for folder, target, private in calls])
    process = run_python(server, home, PUSH, plain, HF_TOKEN="hf_test", **environment)
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def write_folder(trained: Trained, folder: Path, to: WeightsFormat) -> dict[str, bytes]:
    save(trained, folder, to)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_logits(trained: Trained, other: Trained) -> None:
    images = model_factory.draw_images(trained.model.config)
    with torch.no_grad():
        assert torch.equal(trained.model(images), other.model(images))


def test_folders_and_single_files_come_with_their_commit_and_only_their_own_files(server: Hub, tmp_path: Path) -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    timm = write_folder(trained, tmp_path / "timm", "timm") | {"README.md": CARD}
    first = server.commit("timm/tiny.test", {**timm, "pytorch_model.bin": b"older", **OTHERS})
    hugging = write_folder(trained, tmp_path / "hugging", "transformers")
    second = server.commit("org/tiny", {**hugging, **OTHERS})
    save(trained, tmp_path / "any name [1].safetensors")
    native = (tmp_path / "any name [1].safetensors").read_bytes()
    third = server.commit("org/native", {"any name [1].safetensors": native, "README.md": CARD, **OTHERS})
    fourth = server.commit("org/google", {"ViT-B_16.npz": b"arrays", **OTHERS})

    downloads = download(server, tmp_path, "timm:tiny.test", "hf:org/tiny", "hf:org/native", "hf:org/google")
    names = [f"hf:timm/tiny.test@{first}", f"hf:org/tiny@{second}", f"hf:org/native@{third}", f"hf:org/google@{fourth}"]
    assert [name for _, name, _ in downloads] == names
    assert [license_name for *_, license_name in downloads] == ["apache-2.0", None, "apache-2.0", None]
    folder, other, file, arrays = (Path(path) for path, *_ in downloads)
    assert (tmp_path / "hub") in folder.parents  # where the Hub's own tools cache
    assert arrays.read_bytes() == b"arrays"
    for path in (folder, other, file):
        assert_same_logits(trained, read_model(path))
    wanted = {"config.json", "preprocessor_config.json", "README.md", "model.safetensors", "ViT-B_16.npz"}
    assert server.requested() == wanted | {"any%20name%20%5B1%5D.safetensors"}

    for hub_model in (hub.HubModel(folder, names[0], "apache-2.0"), hub.HubModel(other, names[1], None)):
        origin = hub.add_hub_origin(read_model(hub_model.path), hub_model).origin
        assert (origin.name, origin.license) == (hub_model.name, hub_model.license)
        assert len(origin.sha256 or "") == 64
    credited = hub.add_hub_origin(read_model(file), hub.HubModel(file, names[2], "mit"))
    assert (credited.origin.name, credited.origin.license) == (f"test, from {names[2]}", "mit")


MERGE = """
import sys, vitrail
print(vitrail.load(sys.argv[1], adapter=sys.argv[2]).origin.changes[-1])
"""


def test_an_adapter_comes_with_its_commit_and_is_no_model(tmp_path: Path) -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    save(trained, tmp_path / "base.safetensors")
    tensors = {"blocks.1.attn.qkv.lora_A": torch.ones(2, 32), "blocks.1.attn.qkv.lora_B": torch.ones(96, 2)}
    adapter = build_adapter(tensors, LoRAConfig(rank=2), trained, trained.origin)
    write_adapter(adapter, tmp_path / "adapter")
    files = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}
    arguments = (str(tmp_path / "base.safetensors"), "hf:org/adapter")
    with run_server() as server:
        commit = server.commit("org/adapter", {**files, "README.md": CARD, **OTHERS})
        process = run_python(server, tmp_path, MERGE, *arguments)
        change = f"adapter hf:org/adapter@{commit}: LoRA of rank 2 merged into 3 layers\n"
        assert (process.stdout, process.stderr) == (change, "")
        assert server.requested() == set(files)
        [[code, message]] = download(server, tmp_path, "hf:org/adapter")
        assert code == 4
        assert "vitrail convert BASE OUT.safetensors --adapter hf:org/adapter" in message
    process = run_python(server, tmp_path, MERGE, *arguments)
    assert (process.stdout, process.stderr) == (change, "")  # from the cache


def test_torch_weights_are_taken_where_there_are_no_others(server: Hub, tmp_path: Path) -> None:
    server.commit("org/old", {"config.json": b"{}", "pytorch_model.bin": b"weights", **OTHERS})
    [[folder, *_]] = download(server, tmp_path, "hf:org/old")
    assert sorted(path.name for path in Path(folder).iterdir()) == ["config.json", "pytorch_model.bin"]
    assert server.requested() == {"config.json", "pytorch_model.bin"}


def test_a_revision_is_pinned_and_the_cache_serves_without_network(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"first"}
    with run_server() as server:
        first = server.commit("org/moving", files)
        server.commit("org/moving", files | {"model.safetensors": b"side"}, branch="refs/pr/1")
        assert download(server, tmp_path, "hf:org/moving")[0][1] == f"hf:org/moving@{first}"
        second = server.commit("org/moving", files | {"model.safetensors": b"second"})
        downloads = download(server, tmp_path, "hf:org/moving", f"hf:org/moving@{first}", "hf:org/moving@refs/pr/1")
        assert [name for _, name, _ in downloads][:2] == [f"hf:org/moving@{second}", f"hf:org/moving@{first}"]
        assert [Path(path, "model.safetensors").read_bytes() for path, *_ in downloads] == [
            b"second",
            b"first",
            b"side",
        ]
        assert download(server, tmp_path, "hf:org/moving", HF_HUB_OFFLINE="1") == downloads[:1]
        server.broken = True
        assert download(server, tmp_path, "hf:org/moving") == downloads[:1]
    assert download(server, tmp_path, "hf:org/moving", f"hf:org/moving@{first}") == downloads[:2]
    for environment, reason in (({}, "cannot be reached (Connect"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")):
        [[code, message]] = download(server, tmp_path, "hf:org/absent@v2", **environment)
        assert code == 2
        assert "\n" not in message
        for part in (reason, str(tmp_path / "hub"), "org/absent at v2", "hf download org/absent --local-dir"):
            assert part in message


def test_half_a_model_in_the_cache_is_none(server: Hub, tmp_path: Path) -> None:
    server.commit("org/model", {"config.json": b"{}", "model.safetensors": b"weights"})
    [[folder, *_]] = download(server, tmp_path, "hf:org/model")
    Path(folder, "model.safetensors").unlink()
    [[code, message]] = download(server, tmp_path, "hf:org/model", HF_HUB_OFFLINE="1")
    assert (code, "does not hold org/model" in message) == (2, True)


def test_what_is_not_there_or_not_allowed_gets_one_line_and_the_next_step(server: Hub, tmp_path: Path) -> None:
    server.commit("org/model", {"config.json": b"{}", "model.safetensors": b""})
    server.commit("org/gated", {"config.json": b"{}", "model.safetensors": b""})
    dinov3 = "facebook/dinov3-vitb16-pretrain-lvd1689m"
    server.commit(dinov3, {"config.json": b"{}", "model.safetensors": b""})
    server.gated |= {"org/gated", dinov3}
    server.commit("org/shards", {"config.json": b"{}", "model-00001-of-00002.safetensors": b""})
    server.commit("org/many", {"a.safetensors": b"", "b.npz": b"", "folder/c.npz": b""})
    server.commit("org/none", {"evil.py": b""})
    expected = {
        "hf:org/nothing": (2, "has no model org/nothing, or it is private", "`hf auth login`"),
        "hf:org/model@v9": (2, "org/model has no revision 'v9'", "org/model/commits"),
        "hf:org/gated": (2, "org/gated is gated: accept its terms at http://", "/org/gated, then `hf auth login`"),
        f"hf:{dinov3}": (2, f"{dinov3} is gated", "or give timm:vit_base_patch16_dinov3_qkvb.lvd1689m, timm's"),
        "hf:org/shards": (4, "hf:org/shards has a config.json", "neither model.safetensors nor pytorch_model.bin"),
        "hf:org/many": (4, "2 weights files (a.safetensors, b.npz)", "downloaded with `hf download`"),
        "hf:org/none": (4, "no weights file", "downloaded with `hf download`"),
    }
    for (code, message), wanted in zip(download(server, tmp_path, *expected), expected.values(), strict=True):
        assert code == wanted[0]
        assert wanted[1] in message
        assert wanted[2] in message
        assert "\n" not in message
    assert not any(name.endswith((".py", ".npz")) for name in server.requested())


NAMES = [
    "hf:", "hf:foo", "hf:a/b/c", "hf:/b", "hf:a/", "hf:../x", "hf:a/..", "hf:a/b..c", "hf:a/.b", "hf:a/b.git",
    "hf:a b/c", "hf:a/b\n", "hf:a/b?x=1", "hf:ä/b", f"hf:a/{'b' * 100}", "timm:", "timm:a/b", "timm:..",
]  # fmt: skip
REVISIONS = ["hf:a/b@", "hf:a/b@../x", "hf:a/b@x/../../y", "hf:a/b@/x", "hf:a/b@x@y", "hf:a/b@x y", "hf:a/b@-x"]


def test_timm_has_the_copies_that_are_named_for_gated_repositories() -> None:
    published = peer("timm").list_pretrained()
    for size in hub.DINOV3_SIZES:
        copy = hub.find_ungated_copy(f"facebook/dinov3-{size}-pretrain-lvd1689m")
        assert copy is not None
        assert copy.removeprefix("timm:") in published
    assert hub.find_ungated_copy("facebook/dinov3-convnext-tiny-pretrain-lvd1689m") is None


def test_bad_names_are_refused_before_any_request(server: Hub, tmp_path: Path) -> None:
    for code, message in download(server, tmp_path, *NAMES, *REVISIONS):
        assert code == 2
        assert "\n" not in message
        assert "hf:ORG/NAME" in message or "a branch, a tag or a commit" in message
    targets = ["ti16", "timm:x", "hf:a/b@main", "hf:a", "hf:../x"]
    for code, message in push(server, tmp_path, *((tmp_path, target, False) for target in targets)):
        assert (code, "hf:ORG/NAME" in message) == (2, True)
    assert server.requests == []


def test_remote_names_are_told_from_paths() -> None:
    assert hub.is_remote("hf:a/b")
    assert hub.is_remote("timm:vit")
    assert not any(hub.is_remote(name) for name in ("b16", "./hf:a", "a/timm:b", "model.safetensors"))
    assert hub.parse_model_name("timm:vit_tiny_patch16_224.augreg_in21k") == (
        "timm/vit_tiny_patch16_224.augreg_in21k",
        None,
    )
    assert hub.parse_model_name("hf:a-b/c_d.e@refs/pr/1") == ("a-b/c_d.e", "refs/pr/1")


def test_without_the_extra_the_pip_line_is_named(server: Hub, tmp_path: Path) -> None:
    process = run_python(server, tmp_path, WITHOUT_HUB + DOWNLOAD, "hf:org/model")
    assert json.loads(process.stdout) == [2, "hf: and timm: names need the extra hub: pip install huggingface_hub"]
    process = run_python(server, tmp_path, WITHOUT_HUB + COMMAND, "push", "ti16", "hf:org/model")
    assert process.returncode == 2
    assert "pip install huggingface_hub" in process.stderr
    assert process.stderr.count("\n") == 1


def test_a_pushed_run_comes_back_the_same(server: Hub, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = model_factory.build_trained(model_factory.build_vit())
    save(trained, run / "weights" / "best.safetensors")
    process = run_python(
        server, tmp_path, COMMAND, "push", str(run), "hf:org/mine", "--private", "--json", HF_TOKEN="hf_test"
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == f"model: {run / 'weights' / 'best.safetensors'}\n"
    output = json.loads(process.stdout)
    names = ["README.md", "config.json", "model-vitrail.safetensors", "model.safetensors", "preprocessor_config.json"]
    stored = server.files("org/mine")
    assert output["files"] == [{"name": name, "bytes": len(stored[name])} for name in names]
    assert output["commit"] == f"{server.endpoint}/org/mine/commit/{server.branches['org/mine']['main']}"
    assert server.private == {"org/mine"}
    assert stored["model-vitrail.safetensors"] == (run / "weights" / "best.safetensors").read_bytes()
    [[folder, *_]] = download(server, tmp_path, "hf:org/mine", HF_TOKEN="hf_test")
    assert_same_logits(trained, read_model(Path(folder)))
    assert read_model(Path(folder)).labels == trained.labels

    # A model that transformers cannot hold takes its place: none of the earlier files may be read as this one.
    other = model_factory.build_trained(model_factory.build_vit(seed=3, registers=4, prefix_positions=False))
    [note] = push_command.prepare_upload(other, tmp_path / "other", "org/mine")
    assert "only the native file" in note
    [address] = push(server, tmp_path, (tmp_path / "other", "hf:org/mine", True))
    assert address.startswith(f"{server.endpoint}/org/mine/commit/")
    assert sorted(server.files("org/mine")) == [".gitattributes", "README.md", "model-vitrail.safetensors"]
    [[file, *_]] = download(server, tmp_path, "hf:org/mine", HF_TOKEN="hf_test")
    assert_same_logits(other, read_model(Path(file)))


def test_a_push_that_may_not_be_gets_one_line_and_changes_nothing(server: Hub, tmp_path: Path) -> None:
    server.commit("org/public", {"config.json": b"{}"})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").write_text("---\n---\n")
    [[code, message]] = push(server, tmp_path, (folder, "hf:org/public", True))
    assert (code, "is public" in message) == (2, True)
    server.read_only = True
    [[code, message]] = push(server, tmp_path, (folder, "hf:org/public", False))
    assert (code, "`hf auth login`" in message) == (2, True)
    [[code, message]] = push(server, tmp_path, (folder, "hf:org/public", False), HF_HUB_OFFLINE="1")
    assert (code, "HF_HUB_OFFLINE is set" in message) == (2, True)
    assert server.files("org/public") == {"config.json": b"{}"}


def test_a_dry_run_needs_neither_the_network_nor_the_extra(server: Hub, tmp_path: Path) -> None:
    save(
        model_factory.build_trained(model_factory.build_vit(pool="map", class_token=False)),
        tmp_path / "model.safetensors",
    )
    path = str(tmp_path / "model.safetensors")
    process = run_python(server, tmp_path, WITHOUT_HUB + COMMAND, "push", path, "hf:org/mine", "--dry-run")
    assert process.returncode == 0, process.stderr
    note, card, file, end = process.stdout.splitlines()
    assert note.startswith("note     only the native file, no transformers folder: the transformers format cannot hold")
    assert card.startswith("file     README.md, ")
    assert file == f"file     model-vitrail.safetensors, {Path(path).stat().st_size:,} bytes"
    assert end == "dry run  nothing was uploaded to hf:org/mine"
    assert server.requests == []


def test_a_card_says_what_is_known_and_unknown_where_it_is_not() -> None:
    model = model_factory.build_vit()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = model_factory.build_trained(model, preprocess=None, labels=None)
    text = model_card.set_hub_address(
        model_card.build_card(trained).to_markdown(), trained, model_card.HubAddress("org/mine")
    )
    front, _, body = text.removeprefix("---\n").partition("\n---\n")
    assert front.splitlines() == [
        "library_name: transformers", "pipeline_tag: image-classification", "tags:", "- vitrail", "- pytorch",
    ]  # fmt: skip
    for line in (
        f"| parameters | {parameters:,} |", "| architecture: width | 32 |", "| architecture: image_size | 32, 32 |",
        "| preprocessing | unknown |", "| labels | unknown |", "- sha256 of the original file: unknown",
        "- license: unknown", "- name: test",
        'trained = vitrail.load("hf:org/mine")  # model, preprocess, labels, origin',
        'pipeline("image-classification", "org/mine")("image.jpg")',
    ):  # fmt: skip
        assert line in body.splitlines()


@pytest.mark.parametrize(
    ("front", "license_name"),
    [
        ("license: mit", "mit"),
        ("licence: 'mit'\nlicense_name: unread", "mit"),
        ("license: other\nlicense_name: dinov3-license", "dinov3-license"),
        ("license: other", "other"),
        ("tags: [a]", None),
    ],
)
def test_the_license_is_read_by_its_own_name_where_the_hub_has_none(
    front: str, license_name: str | None, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\nlicense: forged\n")
    assert hub.read_license(tmp_path) == license_name


def test_a_card_cannot_be_forged_by_names_in_a_file() -> None:
    origin = Origin(
        format="timm",
        name="x\n---\nlicense: mit\n<script>",
        sha256="ab" * 32,
        license="My: Own\nLicence",
        assumptions=("heads: 3, assumed",),
        changes=("head: removed",),
    )
    trained = model_factory.build_trained(model_factory.build_vit(classes=0), origin=origin)
    address = model_card.HubAddress("org/mine", refusal="it cannot `hold`")
    text = model_card.set_hub_address(model_card.build_card(trained).to_markdown(), trained, address)
    front, _, body = text.removeprefix("---\n").partition("\n---\n")
    assert front.splitlines()[:4] == [
        "license: other", 'license_name: "my-own-licence"', "library_name: vitrail",
        "pipeline_tag: image-feature-extraction",
    ]  # fmt: skip
    assert "\n---\n" not in body
    for part in (
        "\\<script\\>",
        "- assumed: heads: 3, assumed",
        "- changed: head: removed",
        "ab" * 32,
        "cannot \\`hold",
    ):
        assert part in body
    known = model_factory.build_trained(
        model_factory.build_vit(), origin=Origin(format="timm", name="x", license="Apache-2.0")
    )
    assert model_card.build_card(known).to_markdown().startswith("---\nlicense: apache-2.0\n")


def test_a_target_is_a_repository_and_no_revision() -> None:
    assert hub.parse_target("hf:org/name") == "org/name"
    with pytest.raises(UsageError, match="without a revision"):
        hub.parse_target("hf:org/name@main")
