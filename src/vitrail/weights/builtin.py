"""The pre-trained model inside the package, which is the MODEL called `builtin`; builtin.md is its card."""

import dataclasses
import importlib.resources
from importlib.resources.abc import Traversable

from vitrail import files
from vitrail.errors import ModelError
from vitrail.weights import native
from vitrail.weights.tensor_files import ModelFiles
from vitrail.weights.trained import Origin, Trained

NAME = "builtin"
SUMMARY = "ViT-Ti/8 (64 pixels, 5.4M parameters)"
LICENSE = "Apache-2.0 (trained on Tiny-ImageNet, whose images are for non-commercial research and education)"
FILE: Traversable = importlib.resources.files("vitrail.weights") / "builtin.safetensors"
SHA256 = "6b9a425618161ea1cf7a2682aaea42c290ddf796d3b3e5404cfe303f2a791fc0"
CARD: Traversable = importlib.resources.files("vitrail.weights") / "builtin.md"


def load_builtin() -> Trained:
    """Load the built-in model; a file other than that of this release is refused."""
    with importlib.resources.as_file(FILE) as path:
        if not path.is_file() or files.compute_sha256(path) != SHA256:
            raise ModelError(
                f"{path} is damaged or missing: reinstall vitrail (pip install --force-reinstall --no-deps vitrail)"
            )
        trained = native.read(ModelFiles(path, path))
    origin = Origin(format="vitrail", name=f"vitrail's built-in {SUMMARY.split()[0]}", sha256=SHA256, license=LICENSE)
    return dataclasses.replace(trained, origin=origin)
