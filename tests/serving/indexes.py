"""A folder of images, and the index of their features by one of the small served models."""

from pathlib import Path

import numpy as np

from tests import model_factory
from tests.inference.feature_rows import write_matrix
from tests.serving import serving
from vitrail.config.features import FeatureKind
from vitrail.inference.classifier import Classifier
from vitrail.inference.feature_files import list_feature_files
from vitrail.inference.feature_index import FeatureIndex, write_index

OUTSIDE = ("../secret.png", "/etc/hostname", "link.png", "\x00", "", "photos", "gone.png")


def write_images(root: Path, count: int = 12) -> list[str]:
    """Images below a root, an image outside of it and a link to that; the names of those inside."""
    (root / "photos").mkdir(parents=True)
    names = [f"photos/{number}.png" for number in range(count)]
    for number, name in enumerate(names):
        (root / name).write_bytes(serving.make_image_file(number))
    (root.parent / "secret.png").write_bytes(serving.make_image_file(99))
    (root / "link.png").symlink_to(root.parent / "secret.png")
    return names


def build_index(folder: Path, seed: int = 0, kind: FeatureKind = "default") -> FeatureIndex:
    """The index of the images below folder/images, and of names that no thumbnail may show, of a small served model."""
    names, trained = write_images(folder / "images"), model_factory.build_trained(model_factory.build_vit(seed))
    classifier = Classifier(trained, device="cpu", features=kind)
    features = classifier.extract_features([(folder / "images" / name).read_bytes() for name in names]).numpy()
    rows = np.concatenate([features, np.random.default_rng(0).normal(size=(len(OUTSIDE), features.shape[1]))])
    described = "class" if kind == "default" else kind
    path = write_matrix(
        folder / "features.npy",
        [*names, *OUTSIDE],
        rows.astype(np.float32),
        trained=trained,
        **{"--features": described},
    )
    return write_index(list_feature_files([path]), folder / "index", version="test", dtype="float32")
