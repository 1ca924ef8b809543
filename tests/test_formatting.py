"""Counts in messages."""

import ast
import itertools
import re
from pathlib import Path

import pytest

import vitrail
from vitrail.formatting import format_rate, pluralize

COUNTED = re.compile(r" (images|classes|files|labels|epochs|shards|groups|draws|channels|links)\b(?!/s)")
NEVER_ONE = {
    "api/conversion.py: MIN_IMAGES",
    "visualization/all_figures.py: PAPER_IMAGES",
    "api/figures.py: len(images)",  # "draws all"
    "visualization/cka.py: MIN_BATCH",
    "visualization/plots.py: drawn.max()",  # the end of a scale
    "studies/vtab_sources.py: len(order)",
    "studies/vtab_sources.py: len(parts[-1])",
    "cli/data.py: num_images",  # more than 200,000
    "data/imagenet.py: len(classes)",
    "evaluation/dataset_evaluation.py: images",  # "the only image" stands beside it
    "training/dataset_checks.py: images",  # more than 20,000
    "data/download.py: len(files)",
    "data/public_formats.py: split",
    "data/loader.py: _MAX_SKIPPED_IMAGES - 1",
    "data/public_datasets.py: expected",
    "data/public_datasets.py: public_dataset.classes",
    "data/public_datasets.py: sum(public.splits.values())",
    "model/masked.py: config.channels",
    "report/demo_page.py: shots[-1]",
    "weights/foreign_format.py: width",
}


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (0, "image", "0 images"),
        (1, "image", "1 image"),
        (1_000, "image", "1,000 images"),
        (1, "class", "1 class"),
        (2, "class", "2 classes"),
        (2, "micro-batch", "2 micro-batches"),
        (2, "masked patch", "2 masked patches"),
        (1.0, "epoch", "1 epoch"),
        (0.25, "epoch", "0.25 epochs"),
    ],
)
def test_one_is_singular(number: float, noun: str, words: str) -> None:
    assert pluralize(number, noun) == words


def test_no_message_counts_without_the_singular() -> None:
    """In an f-string no bare number stands before a plural, but for numbers that are never 1."""
    root = Path(vitrail.__file__).parent
    bare = []
    for path in sorted(root.rglob("*.py")):
        name = str(path.relative_to(root))
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else []
            for one, two in itertools.pairwise(parts):
                text = two.value if isinstance(two, ast.Constant) else ""
                if isinstance(one, ast.FormattedValue) and COUNTED.match(str(text)):
                    bare.append(f"{name}: {ast.unparse(one.value)}")
    assert set(bare) - NEVER_ONE == set()


def test_a_rate_below_ten_has_a_decimal() -> None:
    assert [format_rate(rate) for rate in (0.04, 0.36, 9.96, 10.4, 1234.5)] == [
        "0.0 images/s", "0.4 images/s", "10.0 images/s", "10 images/s", "1,234 images/s",
    ]  # fmt: skip
