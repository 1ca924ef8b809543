"""Vectors of texts, in the space of a CLIP's or SigLIP's image features: from its text tower, or from a file.

transformers or open_clip tokenizes and computes the texts, so none of that is repeated here. Both are optional. Nothing
is downloaded for a model in a folder.

    L labels   T templates   E width of the space of images and texts
"""

import contextlib
import importlib
import math
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ModelError, UsageError
from vitrail.runtime.workers import ShowProgress
from vitrail.weights import formats, tensor_files
from vitrail.weights.load import find_model_files
from vitrail.weights.trained import Tensors

TEXT_TOWERS = {
    "clip": "CLIPTextModelWithProjection",
    "metaclip_2": "MetaClip2TextModelWithProjection",
    "siglip": "SiglipTextModel",
    "siglip2": "Siglip2TextModel",
}
"""model_type in config.json -> transformers' class of the text tower."""
VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
)
"""What a text tower needs beside the files of the model."""
PLACEHOLDER = "{}"
_BATCH_SIZE = 64
_LIBRARY_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, AssertionError)


class TextVectors(NamedTuple):
    """Texts as vectors, and how their similarity to an image becomes a logit."""

    vectors: Tensor
    """(L, E), of length 1."""
    source: str
    """What made them."""
    scale: float | None = None
    """The factor of cosines, exp(logit_scale); None where the source does not state it."""
    bias: float | None = None
    """What is added to the logits of a model with sigmoids; None for a model with a softmax."""


class TextTower(NamedTuple):
    """A text tower in memory, whichever library computes it."""

    library: str
    encode_texts: Callable[[list[str]], Tensor]
    """Texts -> (texts, E), of any length."""
    scale: float | None
    bias: float | None


# --- from a file or an array -----------------------------------------------------------------------------------------


def read_text_vectors(source: Path | np.ndarray[Any, Any] | Tensor) -> TextVectors:
    """Read a vector of each label from a .npy or .safetensors file, which may hold logit_scale and logit_bias too."""
    if isinstance(source, np.ndarray | Tensor):
        return TextVectors(normalize_vectors(torch.as_tensor(source), "the array"), "an array")
    if source.suffix == ".safetensors":
        tensors = tensor_files.read_tensors(source).tensors
        tables = [tensor for tensor in tensors.values() if tensor.ndim == 2]
        if len(tables) != 1:
            raise ModelError(
                f"{source} has {len(tables)} tensors of two dimensions; one with a row for each label is read"
            )
        return TextVectors(normalize_vectors(tables[0], str(source)), source.name, *read_scale(tensors, source))
    if source.suffix != ".npy":
        raise UsageError(f"vectors of texts are a .npy or .safetensors file, not {str(source)!r}")
    try:
        array = np.load(source, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ModelError(f"{source} cannot be read: {error}") from error
    return TextVectors(normalize_vectors(torch.as_tensor(array), str(source)), source.name)


def normalize_vectors(vectors: Tensor, source: str) -> Tensor:
    """(L, E) of any float type -> float32 of length 1; refuse what has no direction."""
    if vectors.ndim != 2 or not vectors.is_floating_point():
        kind = f"{vectors.dtype} of shape {tuple(vectors.shape)}"
        raise UsageError(f"{source} holds {kind}; vectors of texts are floating-point numbers (labels, width)")
    vectors = vectors.detach().cpu().float()
    if not torch.isfinite(vectors).all() or not vectors.norm(dim=1).all():
        raise UsageError(f"{source} has a row with NaN, infinity or nothing but zeros")
    return F.normalize(vectors, dim=1)


def read_scale(tensors: Mapping[str, Tensor], path: Path) -> tuple[float | None, float | None]:
    """Scale and bias of a CLIP's or SigLIP's logits; None for what the file does not have."""
    numbers = list[float | None]()
    for name in ("logit_scale", "logit_bias"):
        tensor = tensors.get(name)
        if tensor is not None and tensor.numel() != 1:
            raise ModelError(f"{path}: {name} has the shape {tuple(tensor.shape)}; it is one number")
        numbers.append(None if tensor is None else float(tensor))
    scale, bias = numbers
    return None if scale is None else math.exp(min(scale, 80)), bias


# --- from a text tower -----------------------------------------------------------------------------------------------


def has_text_tower(folder: Path) -> bool:
    """Whether a folder holds a whole CLIP or SigLIP of transformers or open_clip."""
    if not folder.is_dir():
        return False
    if (folder / formats.OPEN_CLIP_CONFIG_FILE).is_file():
        return True
    path = folder / formats.CONFIG_FILE
    return path.is_file() and "text_config" in tensor_files.read_json(path)


def compute_text_vectors(
    folder: Path,
    labels: Sequence[str],
    templates: Sequence[str],
    device: torch.device,
    progress: ShowProgress,
    *,
    name: str | None = None,
) -> TextVectors:
    """The mean of each label's vectors over the templates, by the text tower in a folder; `source` calls it `name`."""
    texts = [template.replace(PLACEHOLDER, label) for label in labels for template in templates]
    with _silence_transformers():
        with _translate_library_errors(folder):
            tower = _load_text_tower(folder, device)
        parts = list[Tensor]()
        with torch.inference_mode(), progress("texts") as report:
            for start in range(0, len(texts), _BATCH_SIZE):
                parts.append(tower.encode_texts(texts[start : start + _BATCH_SIZE]).float().cpu())
                report(min(start + _BATCH_SIZE, len(texts)), len(texts))
    vectors = normalize_vectors(torch.cat(parts), str(folder))
    means = vectors.unflatten(0, (len(labels), len(templates))).mean(dim=1)
    source = f"{name or folder.resolve().name} by {tower.library}"
    return TextVectors(normalize_vectors(means, str(folder)), source, tower.scale, tower.bias)


def _load_text_tower(folder: Path, device: torch.device) -> TextTower:
    tensors = find_model_files(folder).tensors  # refuses hostile pickles before another library opens them
    config_path = folder / formats.CONFIG_FILE
    settings = tensor_files.read_json(config_path) if config_path.is_file() else {}
    if "text_config" in settings:
        return _load_transformers_tower(folder, settings.get("model_type"), tensors, device)
    return _load_open_clip_tower(folder, device)


def _load_transformers_tower(folder: Path, kind: Any, tensors: Tensors, device: torch.device) -> TextTower:
    if kind not in TEXT_TOWERS:
        raise ModelError(f"{folder} has the model_type {kind!r:.80}; text towers of {', '.join(TEXT_TOWERS)} are read")
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        raise ModelError(f"{folder} has no tokenizer: it holds none of {', '.join(VOCABULARY_FILES)}")
    transformers = _import_library("transformers", "'vitrail[zero-shot]'")
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    text_config, limit = config.text_config, config.text_config.max_position_embeddings
    is_siglip = str(kind).startswith("siglip")
    if not is_siglip:
        text_config.projection_dim = config.projection_dim  # the tower's own may be a default that the model ignores
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    tower, info = getattr(transformers, TEXT_TOWERS[kind]).from_pretrained(
        folder, config=text_config, local_files_only=True, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{folder} has no weights for {missing[0]!r} and {len(missing) - 1} more of its text tower")
    tower = tower.to(device).float().eval()

    def encode_texts(texts: list[str]) -> Tensor:
        if is_siglip:
            texts = [canonicalize_text(text) for text in texts]
        for text, tokens in zip(texts, tokenizer(texts)["input_ids"], strict=True):
            if len(tokens) > limit:
                raise UsageError(
                    f"the text {text!r:.200} has {len(tokens)} tokens; this model reads {limit}: shorten it"
                )
        padding = "max_length" if is_siglip else True  # SigLIP reads the last position, padding or not
        batch = tokenizer(texts, padding=padding, max_length=limit, truncation=True, return_tensors="pt")["input_ids"]
        if int(batch.max()) >= text_config.vocab_size:
            raise ModelError(f"the tokenizer of {folder} has more tokens than its text tower: {text_config.vocab_size}")
        outputs = tower(input_ids=batch.to(device))  # no mask: CLIP's is causal, SigLIP has none
        return outputs.pooler_output if is_siglip else outputs.text_embeds

    return TextTower("transformers", encode_texts, *read_scale(tensors, folder))


def canonicalize_text(text: str) -> str:
    """A text as SigLIP was trained on: lower case, no punctuation, single spaces."""
    text = text.replace("_", " ").translate(str.maketrans("", "", string.punctuation))
    return " ".join(text.lower().split())


def _load_open_clip_tower(folder: Path, device: torch.device) -> TextTower:
    open_clip = _import_library("open_clip", "open_clip_torch")
    tower = open_clip.create_model(f"local-dir:{folder}", device=device, require_pretrained=True).eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    scales = {name: value.detach() for name, value in tower.named_parameters() if name in ("logit_scale", "logit_bias")}

    def encode_texts(texts: list[str]) -> Tensor:
        vectors: Tensor = tower.encode_text(tokenizer(texts).to(device))
        return vectors

    return TextTower("open_clip", encode_texts, *read_scale(scales, folder))


def _import_library(name: str, requirement: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(
            f"the text tower needs {name}: pip install {requirement}."
            " Or give vectors of the labels: --text-vectors FILE"
        ) from None


@contextlib.contextmanager
def _translate_library_errors(folder: Path) -> Iterator[None]:
    """Turn what transformers or open_clip raises inside the block into one line."""
    try:
        yield
    except ImportError as error:
        cause = _find_root_cause(error)
        if isinstance(cause, ImportError):  # such as sentencepiece
            raise UsageError(
                f"{folder} needs a package: {_shorten(cause)}. pip install 'vitrail[zero-shot]'"
            ) from error
        raise UsageError(f"the text tower's library cannot be imported: {_shorten(cause)}") from error
    except UsageError:
        raise
    except _LIBRARY_ERRORS as error:
        raise ModelError(f"the text tower of {folder} cannot be read: {_shorten(error)}") from error


def _find_root_cause(error: BaseException) -> BaseException:
    """The error behind transformers' own, which does not say why a module cannot be imported."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _shorten(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


@contextlib.contextmanager
def _silence_transformers() -> Iterator[None]:
    """No warnings about the image tower, which is not read here, and no bar but ours."""
    try:
        from transformers.utils import logging
    except ImportError:
        yield
        return
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
