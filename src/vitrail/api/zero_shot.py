"""Classify images by texts: `vitrail.zero_shot`."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitrail.api.keyword_errors import name_keywords
from vitrail.api.models import AnyModel, get_model_name, load_trained
from vitrail.api.progress import show_progress
from vitrail.errors import UsageError
from vitrail.runtime.devices import resolve_device
from vitrail.runtime.workers import Notify, ShowProgress, ignore_note
from vitrail.weights import hub
from vitrail.weights.hub import HubModel
from vitrail.weights.load import find_model_files
from vitrail.weights.text_vectors import (
    PLACEHOLDER,
    TOKENIZER_FILES,
    TextVectors,
    compute_text_vectors,
    has_text_tower,
    read_scale,
    read_text_vectors,
)
from vitrail.weights.trained import Trained
from vitrail.weights.zero_shot import build_zero_shot_classifier

__all__ = ["zero_shot"]

DEFAULT_TEMPLATE = "a photo of a {}."


@name_keywords
def zero_shot(
    model: AnyModel,
    labels: str | Path | Sequence[str],
    *,
    templates: str | Path | Sequence[str] = DEFAULT_TEMPLATE,
    text: str | Path | None = None,
    text_vectors: str | Path | np.ndarray[Any, Any] | Tensor | None = None,
    scale: float | None = None,
    bias: float | None = None,
    device: str | None = None,
    progress: ShowProgress = show_progress,
    notify: Notify | None = None,
) -> Trained:
    """Make a classifier of any labels from the image tower of a CLIP or SigLIP: `vitrail zero-shot` from Python.

    The head is made of vectors of texts, so nothing is trained. The result is an ordinary model: it predicts, is saved,
    served and exported, and needs no text tower any more.

        tower = vitrail.load("model.safetensors")
        vectors = torch.randn(2, tower.model.config.num_features)  # one for each label, by a text tower
        classifier = vitrail.zero_shot(tower, ["cat", "dog"], text_vectors=vectors, scale=100)
        print(vitrail.Classifier(classifier)(["cat.jpg"]))

    Arguments:

    - `model`: A whole CLIP or SigLIP of transformers or open_clip, or its image tower alone.
    - `labels`: The labels, or a text file with one per line.
    - `templates`: Sentences with {} in place of the label, or a text file with one per line. A label's vector is the
      mean over them.
    - `text`: The folder or Hub name of the whole model whose text tower reads the labels; by default `model`.
    - `text_vectors`: Vectors of the labels instead: an array (L, E), or a .npy or .safetensors file.
    - `scale`: The factor of cosines, exp(logit_scale); by default the model's own.
    - `bias`: What is added to each logit, logit_bias; by default the model's own. With one, each label has a
      probability of its own (SigLIP), without, they sum to 1 (CLIP).
    - `device`: Where texts are computed: cpu, cuda or mps; the best device available by default.
    - `progress`: How progress is shown; a bar by default.
    - `notify`: Called with each note.
    """
    names = read_labels(labels)
    if text_vectors is not None and (text is not None or templates != DEFAULT_TEMPLATE):
        raise UsageError("--text-vectors are of finished texts: omit --text and --templates")
    sentences = () if text_vectors is not None else read_templates(templates)
    side = _find_text_side(model, text) if text_vectors is None else None
    (notify or ignore_note)(f"model: {get_model_name(model)}")
    trained = load_trained(model, notify or ignore_note)
    if side is not None:
        place = resolve_device(device)
        texts = compute_text_vectors(side.path, names, sentences, place, progress, name=side.name)
    else:
        assert text_vectors is not None
        texts = _read_vectors(text_vectors, model)
    texts = texts._replace(
        scale=texts.scale if scale is None else scale,
        bias=texts.bias if bias is None else bias,
    )
    return build_zero_shot_classifier(trained, texts, names, sentences)


def read_labels(labels: str | Path | Sequence[str]) -> tuple[str, ...]:
    """The labels: those given, or the lines of a text file; empty lines are skipped, and duplicates refused."""
    names = (
        _read_lines(labels, "labels") if isinstance(labels, str | Path) else tuple(label.strip() for label in labels)
    )
    if not names or not all(names):
        raise UsageError("there must be at least one label, and none may be empty")
    if duplicates := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"the label {duplicates[0]!r} is there {Counter(names)[duplicates[0]]} times; name each once")
    return names


def read_templates(templates: str | Path | Sequence[str]) -> tuple[str, ...]:
    """The sentences with {} in place of the label: those given, or the lines of a text file."""
    given = (str(templates),) if isinstance(templates, str | Path) else tuple(templates)
    if len(given) == 1 and PLACEHOLDER not in given[0]:
        given = _read_lines(given[0], f"templates without {PLACEHOLDER}, so")
    for template in given:
        if template.count(PLACEHOLDER) != 1:
            raise UsageError(f"the template {template!r} must have {PLACEHOLDER} once, in place of the label")
    if not given:
        raise UsageError(f"give at least one template, such as {DEFAULT_TEMPLATE!r}")
    return given


def _read_lines(path: str | Path, what: str) -> tuple[str, ...]:
    """The lines of a text file that are not empty, without spaces around them."""
    if not Path(path).is_file():
        raise UsageError(f"{what} {str(path)!r:.200} must be a text file with one per line, and there is none")
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    return tuple(line.strip() for line in lines if line.strip())


def _find_text_side(model: AnyModel, text: str | Path | None) -> HubModel:
    """The whole model whose text tower reads the labels; it is downloaded if it is named on the Hub."""
    name = get_model_name(model) if text is None else str(text)
    side = _find_folder(name) if text is not None or isinstance(model, str | Path) else None
    if side is None or not has_text_tower(side.path):
        raise UsageError(
            f"{name} has no text tower: name the folder or Hub name of the whole CLIP or SigLIP (--text MODEL), or give"
            " vectors of the labels (--text-vectors FILE)"
        )
    return side


def _find_folder(name: str) -> HubModel:
    """The folder of a whole model, and what it is called."""
    if hub.is_remote(name):
        return hub.download_model(name, beside=TOKENIZER_FILES)
    return HubModel(path=Path(name), name=Path(name).resolve().name, license=None)


def _read_vectors(source: str | Path | np.ndarray[Any, Any] | Tensor, model: AnyModel) -> TextVectors:
    """Vectors from a file or an array, with the scale of the model's own files where they state none."""
    texts = read_text_vectors(Path(source) if isinstance(source, str) else source)
    if texts.scale is not None or not isinstance(model, str | Path):
        return texts
    folder = _find_folder(str(model)).path
    if not has_text_tower(folder):
        return texts
    scale, bias = read_scale(find_model_files(folder).tensors, folder)
    return texts._replace(scale=scale, bias=bias)
