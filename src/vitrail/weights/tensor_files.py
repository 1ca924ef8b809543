"""Tensors and JSON on disk, read without trusting the file.

safetensors cannot hold code. A .pt or .pth file is a pickle: its calls are checked first. Then torch's restricted
unpickler alone reads it, mapped rather than copied. Sizes are checked against the file before memory is allocated.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import io
import json
import math
import pickle
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vitrail.errors import ModelError
from vitrail.weights.formats import TENSOR_SUFFIXES, TORCH_SUFFIXES, list_shards
from vitrail.weights.torch_pickle import PickleError, check_pickle

STATE_DICT_KEYS = ("model", "model_ema", "module", "state_dict", "encoder", "teacher")
"""Under which training scripts keep the map of names to tensors, the preferred first; it may be nested."""
SECTION = "section"  # the key of a .pth's metadata that names where its tensors were found
MAX_JSON_BYTES = 32 * 2**20  # 21,843 labels take 1 MiB
MAX_TENSORS = 100_000
ALIGNMENT = 64  # bytes: unaligned weights may give other last bits in products of small matrices
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
INDEX_BUFFERS = ("position_ids", "relative_position_index")  # integers that count, in files of CLIP and BEiT
NPZ_DTYPES = ("<f2", "<f4", "<f8", "|V2")
MAX_ARRAY_HEADER_BYTES = 2**16  # that of a plain array has about 128
MAX_INFLATION = 16  # weights hardly compress; a file that grows more than this is a bomb
_HASH_THREADS = 8

_READ_ERRORS = (  # what torch.load and NumPy raise for damaged bytes
    RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError, OSError, IndexError, AssertionError,
    OverflowError, SyntaxError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_SAFETENSORS_ERRORS = (
    safetensors.SafetensorError, ValueError, TypeError, KeyError, RuntimeError, AttributeError, OverflowError,
)  # fmt: skip


class TensorFile(NamedTuple):
    """The content of a weights file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    """The strings in a safetensors header; of a .pth, the key under which its tensors were found."""


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """The files of one model on disk; tensors are read when they are first needed."""

    path: Path
    """The file or folder that was given."""
    weights: Path
    """The file with the tensors, or the last of its shards."""
    config: dict[str, Any] | None = None
    """config.json, where `path` is a folder that has one."""

    @property
    def shards(self) -> list[Path]:
        """The files with the tensors, where `weights` is one of several."""
        return [self.weights.with_name(name) for name in list_shards(self.weights.name)]

    @functools.cached_property
    def content(self) -> TensorFile:
        if self.path == self.weights or len(self.shards) == 1:
            return read_tensors(self.weights)
        tensors: dict[str, Tensor] = {}
        for shard in self.shards:
            content = read_tensors(shard)
            if both := sorted(tensors.keys() & content.tensors.keys()):
                raise ModelError(f"{shard} is damaged: the tensor {both[0]!r:.80} is in another shard too")
            tensors |= content.tensors
        return TensorFile(tensors, {})

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.content.tensors


def read_tensors(path: Path) -> TensorFile:
    """Read the tensors of a weights file, and the strings in its header."""
    if not path.is_file():
        raise ModelError(f"{path} is not a file")
    if path.suffix not in TENSOR_SUFFIXES:
        raise ModelError(
            f"{path} has the suffix {path.suffix!r}; weights are {', '.join(TENSOR_SUFFIXES)} or .npz files, or folders"
        )
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    for name in [name for name in content.tensors if name.endswith(INDEX_BUFFERS)]:
        if not content.tensors[name].is_floating_point():
            del content.tensors[name]
    for name, tensor in content.tensors.items():
        _check_tensor(name, tensor, path)
    return content


def _check_tensor(name: str, tensor: Tensor, path: Path) -> None:
    """Refuse a tensor that is not plain, or that claims more numbers than the file holds."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise ModelError(f"{path}: tensor {name!r:.80} is sparse, quantized or empty; plain tensors are read")
    if tensor.dtype not in DTYPES:
        raise ModelError(f"{path}: tensor {name!r:.80} holds {tensor.dtype}, not floating-point numbers")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ModelError(f"{path}: tensor {name!r:.80} of shape {tuple(tensor.shape)} claims more than the file holds")


class ArrayHeader(NamedTuple):
    """Shape and type of an array in an .npz."""

    shape: tuple[int, ...]
    dtype: str
    """NumPy's name of the type; |V2 is bfloat16, which NumPy does not know."""


def read_npz_headers(path: Path) -> dict[str, ArrayHeader]:
    """Read shape and type of each array of an .npz; only headers are unpacked, and impossible sizes are refused."""
    headers: dict[str, ArrayHeader] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_TENSORS or sum(entry.compress_size for entry in entries) > path.stat().st_size:
                raise ModelError(f"{path} is damaged: its {len(entries)} arrays claim more than the file holds")
            for entry in entries:
                name = entry.filename.removesuffix(".npy")
                if name in headers or name == entry.filename or entry.flag_bits & 1:
                    raise ModelError(f"{path} is damaged: {entry.filename!r:.80} is there twice, encrypted or no array")
                headers[name] = _read_npz_header(archive, entry, path)
    except _READ_ERRORS as error:
        raise ModelError(f"{path} is damaged: {summarize_error(error)}") from error
    return headers


def _read_npz_header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> ArrayHeader:
    """Read one array's header; refuse it if the archive states another size."""
    stored = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size
    if not stored and entry.compress_type != zipfile.ZIP_DEFLATED:
        raise ModelError(f"{path} is damaged: {entry.filename!r:.80} is compressed in a way that NumPy never writes")
    with archive.open(entry) as file:
        head = io.BytesIO(file.read(MAX_ARRAY_HEADER_BYTES))  # a header may claim 4 GiB, and would be unpacked whole
    version = np.lib.format.read_magic(head)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(head)
    start = head.tell()
    plain = all(type(side) is int and 0 <= side < 2**40 for side in shape) and dtype.names is None and not dtype.shape
    if not plain or math.prod(shape) * dtype.itemsize + start != entry.file_size:
        raise ModelError(f"{path} is damaged: {entry.filename!r:.80} does not have the size that its header claims")
    return ArrayHeader(shape, dtype.str)


def build_npz_meta_tensors(headers: dict[str, ArrayHeader], names: Collection[str], path: Path) -> dict[str, Tensor]:
    """The arrays called `names` as tensors without memory, to check names and shapes before anything is unpacked."""
    for name in names:
        if headers[name].dtype not in NPZ_DTYPES:
            raise ModelError(
                f"{path}: array {name!r:.80} holds {headers[name].dtype}; {', '.join(NPZ_DTYPES)} are read"
            )
    size = sum(math.prod(headers[name].shape) * int(headers[name].dtype[-1]) for name in names)
    if size > MAX_INFLATION * path.stat().st_size + 2**26:
        raise ModelError(f"{path} unpacks to {size} bytes, far more than weights can: it was not unpacked")
    return {name: torch.empty(headers[name].shape, device="meta") for name in names}


def read_npz(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Read the arrays called `names`. Call `build_npz_meta_tensors` first, which checks their sizes."""
    tensors: dict[str, Tensor] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in names:
                with archive.open(f"{name}.npy") as file:
                    array = np.lib.format.read_array(file, allow_pickle=False)
                void = array.dtype.str == "|V2"
                tensor = torch.from_numpy(np.ascontiguousarray(array.view(np.int16) if void else array))
                tensors[name] = (tensor.view(torch.bfloat16) if void else tensor).reshape(array.shape)
    except _READ_ERRORS as error:
        raise ModelError(f"{path} is damaged: {summarize_error(error)}") from error
    return tensors


def write_npz(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write arrays as an .npz, without the time that NumPy's writer stores: equal models have equal files."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(tensors):
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                array = tensors[name].detach().cpu().float().contiguous().numpy()
                np.lib.format.write_array(file, array, allow_pickle=False)


def read_safetensors_metadata(path: Path) -> dict[str, str]:
    """Read the strings in a safetensors header without touching the tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(MAX_JSON_BYTES, size - 8):
            raise ModelError(f"{path} is damaged or no safetensors file: its header claims {length} of {size} bytes")
        header = parse_json(file.read(length), path)
    if len(header) > MAX_TENSORS:
        raise ModelError(f"{path} names {len(header)} tensors; at most {MAX_TENSORS} are read")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{path} is damaged: its __metadata__ is not a map of strings")
    return metadata


def _read_safetensors(path: Path) -> TensorFile:
    metadata = read_safetensors_metadata(path)
    try:  # the library maps the file, and refuses offsets that overlap, leave a gap or pass the end
        return TensorFile(safetensors.torch.load_file(path), metadata)
    except _SAFETENSORS_ERRORS as error:
        raise ModelError(f"{path} is damaged: {summarize_error(error)}") from error


def _is_zip_file(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # Python 3.11 raises it for some damaged ends
        return False


def _read_torch(path: Path) -> TensorFile:
    if not _is_zip_file(path):
        raise ModelError(
            f"{path} is no zip archive: either it is damaged or it was saved before torch 1.6. Save it again with"
            " torch.save(state_dict, path), or as safetensors"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            _check_torch_archive(archive, path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, PickleError) as error:
        reason = summarize_error(error).rstrip(".")
        raise ModelError(
            f"{path} holds Python objects other than tensors and was not opened further: {reason}."
            " Ask its author for safetensors"
        ) from error
    except _READ_ERRORS as error:
        raise ModelError(f"{path} is damaged: {summarize_error(error)}") from error
    return _extract_state_dict(content, path)


def _check_torch_archive(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse an archive that torch did not write, or whose pickle calls more than it may."""
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ModelError(f"{path} holds compressed entries, which torch never writes; it was not opened further")
    if len({entry.filename for entry in entries}) != len(entries):
        raise ModelError(f"{path} holds two entries of one name, which torch never writes; it was not opened further")
    for entry in entries:
        if entry.filename.endswith(".pkl"):
            if entry.file_size > MAX_JSON_BYTES:
                raise ModelError(
                    f"{path} holds a pickle of {entry.file_size:,} bytes; at most {MAX_JSON_BYTES:,} are read"
                )
            check_pickle(archive.read(entry))


def _extract_state_dict(content: object, path: Path) -> TensorFile:
    """Find the map of names to tensors, at the top or under a key that training scripts use."""
    metadata: dict[str, str] = {}
    for _ in range(3):  # a map may hold itself
        sections = content if isinstance(content, dict) else {}
        if key := next((key for key in STATE_DICT_KEYS if isinstance(sections.get(key), dict)), None):
            content, metadata = sections[key], {SECTION: key}
    if not isinstance(content, dict) or not content:
        raise ModelError(f"{path} holds no state dict: expected a map of names to tensors")
    tensors: dict[str, Tensor] = {}
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ModelError(f"{path} holds no state dict: the entry {name!r:.60} is not a named tensor")
        if not name.endswith("relative_position_index"):  # integers that follow from the size of BEiT's tables
            tensors[name.removeprefix("module.")] = tensor.detach()
    return TensorFile(tensors, metadata)


def write_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write tensors as safetensors, or as a torch state dict where the suffix of `path` says so."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if path.suffix in TORCH_SUFFIXES:
        torch.save(plain, path)
    else:
        _write_safetensors(path, plain, {"format": "pt"} | header)


def _write_safetensors(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write the header's length, the header as JSON, then the tensors end to end.

    The library's own writer orders the header's strings differently in each run: equal models would have unequal files.
    """
    order = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT > 0, name))  # odd sizes shift no others
    entries: dict[str, Any] = {"__metadata__": header}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        entries[name] = {"dtype": DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(tensors[name].flatten().view(torch.uint8).numpy().data)


def digest_tensors(tensors: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> str:
    """The sha256 of all names and of each tensor's sha256: equal weights have equal digests.

    Several threads hash, since training waits for it. `gather` makes a sharded tensor whole; no more of them are whole
    at once than there are threads.
    """

    def hash_tensor(name: str, tensor: Tensor) -> bytes:
        values = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return name.encode() + hashlib.sha256(values.data).digest()

    digest, pending = hashlib.sha256(), collections.deque[concurrent.futures.Future[bytes]]()
    with concurrent.futures.ThreadPoolExecutor(_HASH_THREADS) as pool:
        for name in sorted(tensors):
            if len(pending) == _HASH_THREADS:
                digest.update(pending.popleft().result())
            pending.append(pool.submit(hash_tensor, name, gather(tensors[name].detach())))
        for future in pending:
            digest.update(future.result())
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    if not path.is_file():
        raise ModelError(f"{path} is missing")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    return parse_json(path.read_bytes(), path)


def parse_json(text: str | bytes, path: Path) -> dict[str, Any]:
    """Parse the object in `text`, which came from `path`."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is valid JSON and cannot be printed
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: not JSON ({summarize_error(error)})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is damaged: its JSON is not an object")
    return value


def get_section(settings: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Return the object under `key`, empty where there is none."""
    section = settings.get(key) or {}
    if not isinstance(section, dict):
        raise ModelError(f"{path} is damaged: {key!r} in its JSON is not an object")
    return section


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object, indented for people."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def summarize_error(error: Exception) -> str:
    """Return the first line of a library's error, cut to 200 characters."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
