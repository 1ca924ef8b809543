"""The findings of the paper, one line each: its number, what was measured here, and whether the two agree."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Verdict = Literal["agrees", "agrees in part", "disagrees", "not run yet", "cannot be tested here"]


class Finding(NamedTuple):
    """A claim of the paper and what is known of it here."""

    claim: str
    paper: str
    here: str
    """The number measured here, with model, data and n; or why there is none."""
    verdict: Verdict
    command: str
    """What repeats it; WORDS in capitals are the reader's own."""


_NO_WEIGHTS = "the images of JFT and the weights trained on them were never published"

FINDINGS: Sequence[Finding] = (
    Finding(
        "ViT-B, L and H have these sizes (table 1)",
        "86, 307 and 632 million parameters",
        "86.6, 304.3 and 632.0 million with a head of 1,000 classes",
        "agrees in part",  # ViT-L: the paper counts 307
        "vitrail info l16",
    ),
    Finding(
        "pre-training ViT-H/14 takes this much compute (table 6)",
        "4,262 exaFLOPs",
        "4,258 exaFLOPs, counted from the shapes",
        "agrees",
        "vitrail plan vit-h14-jft",
    ),
    Finding(
        "a ViT pre-trained on JFT-300M is ahead of all earlier networks (table 2)",
        "88.55 ± 0.04 % on ImageNet, 99.50 ± 0.06 % on CIFAR-10 (ViT-H/14)",
        f"{_NO_WEIGHTS}; DeiT-Tiny, by the paper's fine-tuning: 96.57 ± 0.04 % on CIFAR-10 (n = 3)",
        "cannot be tested here",
        "vitrail study sweep cifar10 --model deit_tiny_patch16_224.in1k --image-size 224 --steps 500",
    ),
    Finding(
        "it costs less than they did (table 2)",
        "2,500 TPUv3-core-days (ViT-H/14), 9,900 (BiT-L)",
        "2,642 at an assumed 30 % of the peak (ViT-H/14); nothing was trained",
        "cannot be tested here",
        "vitrail plan vit-h14-jft --gpu tpuv3",
    ),
    Finding(
        "ViTs need more images than ResNets (figures 3 and 4)",
        "BiT leads on ImageNet and on 9 million images of JFT, ViT from 90 million on",
        "",
        "not run yet",
        "vitrail study data-size --data tiny-imagenet --transfer-data cifar10",
    ),
    Finding(
        "on little data a larger ViT is no better (figure 3)",
        "ViT-L is behind ViT-B on ImageNet",
        "",
        "not run yet",
        "vitrail study size --data tiny-imagenet",
    ),
    Finding(
        "ViTs need 2 to 4 times less compute; hybrids lead at small budgets (figure 5)",
        "for the same mean accuracy over five datasets",
        "",
        "not run yet",
        "vitrail study compute --data tiny-imagenet --transfer-data cifar10",
    ),
    Finding(
        "a ViT transfers to 19 tasks from 1,000 images each (figure 2, VTAB)",
        "77.63 ± 0.23 % (ViT-H/14, JFT)",
        "the images of the benchmark are not here",
        "cannot be tested here",
        "vitrail study vtab MODEL --data-root VTAB",
    ),
    Finding(
        "masked patch prediction helps, and less than labels do (section 4.6)",
        "+2 points on ImageNet over random weights, 4 below supervised pre-training (ViT-B/16)",
        "37.5 ± 0.2 % of 100 classes of Tiny-ImageNet from a tenth of their labels; 29.0 ± 0.0 % from random weights,"
        " 47.0 ± 0.6 % after labels of other classes (14 million parameters, n = 3)",
        "agrees",
        "python bench/pretraining.py tiny-imagenet --recipe tiny-imagenet --work FOLDER",
    ),
    Finding(
        "the mean color is target enough (appendix B.1.2)",
        "4 x 4 colors are as good, pixels slightly worse",
        "37.5 % (n = 3), 38.4 % with 4 x 4 colors, 36.2 % with pixels (n = 1)",
        "agrees",
        "python bench/pretraining.py tiny-imagenet --recipe tiny-imagenet --work FOLDER --arms mpp-pixels",
    ),
    Finding(
        "Adam pre-trains ResNets at least as well as SGD (table 7)",
        "77.54 against 78.24 % (R50 on ImageNet), 97.67 against 97.46 % (CIFAR-10)",
        "",
        "not run yet",
        "vitrail study optimizer --data tiny-imagenet",
    ),
    Finding(
        "depth gains most, width least, smaller patches cost no parameters (figure 8)",
        "curves",
        "",
        "not run yet",
        "vitrail study shape --data tiny-imagenet",
    ),
    Finding(
        "pooling equals the class token at its own learning rate (figure 9)",
        "curves",
        "",
        "not run yet",
        "vitrail study head --data tiny-imagenet",
    ),
    Finding(
        "positions matter, their kind does not (table 8)",
        "0.614 without, 0.640 to 0.643 with (ViT-B/16, 5-shot ImageNet)",
        "",
        "not run yet",
        "vitrail study positions --data tiny-imagenet --runs 3",
    ),
    Finding(
        "fine-tuning at a higher resolution helps, with positions resampled in 2-D (section 3.2)",
        "384 pixels after 224",
        "",
        "not run yet",
        "vitrail study resolution --data tiny-imagenet",
    ),
    Finding(
        "filters of the patch embedding look like a basis of fine structure (figure 7, left)",
        "a picture (ViT-L/32)",
        "colors and edges (DeiT-Tiny), docs/figures.md",
        "agrees",
        "vitrail figures MODEL",
    ),
    Finding(
        "position embeddings learn rows and columns (figure 7, center)",
        "a picture (ViT-L/32)",
        "rows and columns are similar (DeiT-Tiny), docs/figures.md",
        "agrees",
        "vitrail figures MODEL",
    ),
    Finding(
        "attention distance grows with depth; some heads are global from the first layer (figure 7, right)",
        "a picture (ViT-L/16)",
        "56 pixels on average in the first four layers, 111 in the last four, of 224 (DeiT-Tiny, 128 images);"
        " it falls first",
        "agrees in part",
        "vitrail figures MODEL PHOTOS --num-images 128",
    ),
    Finding(
        "the class token attends to what matters for the class (figure 6)",
        "pictures of attention rollout (ViT-L/16)",
        "59.9 % of the rollout lies in the object's box, whose share of the area is 59.4 % (DeiT-Tiny, 991 images of"
        " Tiny-ImageNet): more than chance, and of no use for finding the object",
        "agrees in part",
        "vitrail figures MODEL TINY_IMAGENET/val --boxes val_annotations.txt",
    ),
    Finding(
        "axial attention is more accurate for its compute, and slower (figure 13)",
        "curves",
        "axial attention is not implemented",
        "cannot be tested here",
        "",
    ),
)


def iterate_rows() -> Iterator[tuple[str, str, str, str, str]]:
    """The table: claim, the paper's number, ours, whether they agree, and the command."""
    yield "the paper's finding", "its number", "measured here", "verdict", "command"
    for finding in FINDINGS:
        yield finding.claim, finding.paper, finding.here or "-", finding.verdict, finding.command or "-"


def render_findings() -> str:
    """The table in Markdown."""
    header, *rows = iterate_rows()
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for *cells, command in rows:
        lines.append(f"| {' | '.join(cells)} | {command if command == '-' else f'`{command}`'} |")
    return "\n".join(lines) + "\n"
