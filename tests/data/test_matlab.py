"""MATLAB files: read as SciPy reads them, and refused where damaged."""

import contextlib
import io

import numpy as np
import pytest
import scipy.io

from tests.data.public_files import (
    mat,
    noise,
)
from vitrail.data import matlab
from vitrail.errors import DataError


@pytest.mark.parametrize("compressed", [False, True])
def test_matlab_files_are_read_as_scipy_reads_them(compressed: bool) -> None:
    variables = {
        "bytes": noise(3, 4, 2),
        "wide": np.arange(6, dtype=np.uint16).reshape(1, 6),
        "real": np.linspace(-1, 1, 10).reshape(5, 2),
        "few": np.array([[7]], np.int8),  # short enough to stand in the tag itself
        "a_rather_long_name_of_a_variable": np.array([[2**40]], np.int64),
        "none": np.zeros((0, 3)),
        "text": "not a number",
        "complex": np.array([[1j]]),
        "structure": {"field": 1},
    }
    file = io.BytesIO()
    scipy.io.savemat(file, variables, do_compression=compressed)
    found = matlab.read_matrices(file.getvalue())
    expected = scipy.io.loadmat(io.BytesIO(file.getvalue()))
    assert set(found) == set(variables) - {"text", "complex", "structure"}
    for name, values in found.items():
        assert np.array_equal(values, expected[name])
        assert values.shape == expected[name].shape


def test_damaged_matlab_files_are_refused_whatever_the_damage() -> None:
    with pytest.raises(DataError, match="not a little-endian MATLAB file of version 5"):
        matlab.read_matrices(b"MATLAB 7.3 MAT-file" + bytes(200))
    one = mat(labels=np.arange(50, dtype=np.uint8)[None])
    for end in range(129, len(one)):
        with pytest.raises(DataError, match="damaged"):
            matlab.read_matrices(one[:end])
    random = np.random.default_rng(0)
    for _ in range(300):  # a wrong byte gives other numbers or a DataError, and nothing else
        broken = bytearray(mat(labels=np.arange(9)[None])) if random.integers(2) else bytearray(uncompressed())
        broken[random.integers(128, len(broken))] = random.integers(256)
        with contextlib.suppress(DataError):
            matlab.read_matrices(bytes(broken))


def test_a_matlab_variable_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matlab, "_MAX_VARIABLE_BYTES", 1000)
    with pytest.raises(DataError, match="larger than 1,000 bytes"):
        matlab.read_matrices(mat(zeros=np.zeros((1, 1000), np.uint8)))


def uncompressed() -> bytes:
    file = io.BytesIO()
    scipy.io.savemat(file, {"labels": np.arange(9)[None]})
    return file.getvalue()
