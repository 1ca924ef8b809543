"""Near-duplicate images in one dataset or across two: resized, re-encoded, recolored, cropped or mirrored.

A fingerprint is a gray thumbnail, 32 x 32 whatever the shape of the image. The comparison has three steps, each a few
matrix products over many images at once:

1. Candidates. A hash of the whole image misses crops, so 100 windows of every thumbnail, and their mirror images, are
   compared with every other whole thumbnail. Each is described by 35 low cosine frequencies (as in Zauner's pHash,
   2010, but kept as real numbers), whitened by the 1/f law of natural images (Field 1987). The whole thumbnails are
   grouped in cells around k-means centers, and a window visits only its nearest few cells (inverted file: Sivic and
   Zisserman 2003, Jegou et al. 2011).
2. Alignment. The window is moved and scaled to the best fit, by Gauss-Newton steps on the pixels (Lucas and Kanade
   1981; gain and offset of the gray values are free, as in Evangelidis and Psarakis 2008), coarse to fine.
3. Verdict. Two images are duplicates if the fine detail of the aligned thumbnails correlates: what remains of each
   pixel after subtracting its 3 x 3 mean. Similar scenes share light and dark areas; only duplicates share the detail.
   Local contrast normalization (Jarrett et al. 2009) keeps two dark objects before a light wall from matching by
   their outlines alone.

Handwritten digits, drawings and blank pages look alike without being duplicates. Content is the fraction of a
thumbnail's pixels that differ from their surroundings. If it is below a quarter, or the image is smaller than its
thumbnail, an image matches only one with equal pixels. Below a half, its unnormalized detail must agree almost fully.

The libraries for this (imagehash, imagededup) hash the whole image, which misses crops, or use a neural network.
docs/experiments/duplicates.md has the measurements.

    B images   W windows   D = 35 frequencies   S = 32 thumbnail side   M side of an aligned window
"""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.decode import convert_to_pillow
from vitrail.data.randomness import IntArray
from vitrail.runtime.cpu_threads import use_one_thread

THUMBNAIL_SIDE = 32
FINGERPRINT_BYTES = THUMBNAIL_SIDE * THUMBNAIL_SIDE + 8
"""The thumbnail, then a digest of the pixels if there is too little content."""

MIN_CORRELATION = 0.8  # of the normalized detail, for two thumbnails to be duplicates
MIN_SPARSE_CORRELATION = 0.97  # of the plain detail, if one of the two is sparse; handwritten digits reach 0.963
_EMPTY_CONTENT, _SPARSE_CONTENT = 0.25, 0.5  # below: equal pixels needed, or MIN_SPARSE_CORRELATION

_TRIM_UNIT = 128  # a window is what it trims off each edge, in 128ths of the side: a quarter of a thumbnail's pixel
_TRIMS = (0, 10, 20, 30)  # of candidate windows, at most 30 in total along each axis: 59 to 100 % of the area
_TRIM_LIMIT = 56  # of an aligned window, from each edge
_FREQUENCIES = 6  # along each axis; their 36 products without the mean make D
_MIN_WHITENED_NORM = 4.0  # whitened contrast below this is not scaled up further: it is noise
_BLOCK_IMAGES = 512  # thumbnails that a thread processes at once, in about 75 MB
_CELL_SIZE = 200  # thumbnails in a cell, on average
_PROBES = 4  # cells a window visits
_MIN_CANDIDATE_COSINE = 0.86  # between the frequencies of a candidate pair
_MAX_CANDIDATES = 16  # per image: a thousand duplicates of one image make 16,000 pairs, not 500,000
_COARSE_SIDE, _FINE_SIDE = 12, 24  # sides M of the aligned windows
_DETAIL_NOISE = 2.0  # gray levels: weaker detail is not normalized
_MIN_COARSE_CORRELATION = 0.95  # of coarse windows, for the fine ones to be compared


class DuplicatePairs(NamedTuple):
    """K pairs of duplicates."""

    indices: IntArray  # (K, 2), sorted
    scores: NDArray[np.float32]  # (K,): the correlation of their detail; 1 for equal fingerprints


def compute_fingerprint(image: Tensor) -> NDArray[np.uint8]:
    """uint8 (C, H, W) -> uint8 (1032,)."""
    pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())  # (H, W, C)
    gray = convert_to_pillow(pixels).convert("L")
    # A triangle filter: with a box filter, the detail of a crop and its source correlate by 0.89, not 0.97 (64 x 64).
    thumbnail = np.array(gray.resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BILINEAR))
    digest = bytes(8)
    content = _compute_content(torch.from_numpy(thumbnail)[None]).item()
    if min(pixels.shape[:2]) < THUMBNAIL_SIDE or content < _EMPTY_CONTENT:
        digest = hashlib.blake2b(repr(pixels.shape).encode() + pixels.tobytes(), digest_size=8).digest()
    return np.concatenate([thumbnail.ravel(), np.frombuffer(digest, np.uint8)])


def find_duplicate_pairs(first: NDArray[np.uint8], second: NDArray[np.uint8] | None = None) -> DuplicatePairs:
    """The pairs (i, j) of duplicates, from fingerprints (n, 1032) that may be memory-mapped.

    With one dataset i < j; with two, i is of the first and j of the second. Of many duplicates of one image not every
    pair is listed, but enough to link each to the others, or to one in the other dataset. The time grows a little
    faster than n. It uses as many threads as torch has, up to eight.
    """
    keys, leaders = _find_leaders(first)
    thumbnails = _Thumbnails.from_fingerprints(first, leaders)
    if second is None:
        followers = np.flatnonzero(leaders != np.arange(len(first)))
        equal = np.stack([leaders[followers], followers], axis=1)
        near = _match_windows(thumbnails, thumbnails)
        return _merge_pairs(equal, np.sort(near.indices, axis=1), near.scores)
    second_keys, second_leaders = _find_leaders(second)
    equal = np.stack(np.intersect1d(keys, second_keys, return_indices=True)[1:], axis=1)
    second_thumbnails = _Thumbnails.from_fingerprints(second, second_leaders)
    forward, backward = _match_windows(thumbnails, second_thumbnails), _match_windows(second_thumbnails, thumbnails)
    indices = np.concatenate([forward.indices, backward.indices[:, ::-1]])
    pairs = _merge_pairs(equal, indices, np.concatenate([forward.scores, backward.scores]))
    return _add_equal_images(pairs, leaders, second_leaders)


def _find_leaders(fingerprints: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], IntArray]:
    """A 64-bit key of each fingerprint, and the first position with the same key; both (n,)."""
    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in fingerprints)
    keys = np.frombuffer(digests, np.uint64)
    _, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return keys, firsts[inverse].astype(np.int64)


def _merge_pairs(equal: IntArray, near: IntArray, near_scores: NDArray[np.float32]) -> DuplicatePairs:
    """Merge the pairs of equal and of near fingerprints; each pair occurs once."""
    indices = np.concatenate([equal, near])
    scores = np.concatenate([np.ones(len(equal), np.float32), near_scores])
    order = np.argsort(-scores, kind="stable")
    indices, firsts = np.unique(indices[order], axis=0, return_index=True)  # the first of equal pairs: the best score
    return DuplicatePairs(indices, scores[order[firsts]])


def _add_equal_images(
    leader_pairs: DuplicatePairs, first_leaders: IntArray, second_leaders: IntArray
) -> DuplicatePairs:
    """The pairs of leaders, and each duplicate of a leader with the pair's other leader: a sum, not a product."""
    indices, scores = [], []
    for column, leaders in enumerate((first_leaders, second_leaders)):
        order = np.argsort(leaders, kind="stable")
        low = np.searchsorted(leaders[order], leader_pairs.indices[:, column], "left")
        counts = np.searchsorted(leaders[order], leader_pairs.indices[:, column], "right") - low
        rows = np.repeat(np.arange(len(leader_pairs.indices)), counts)
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        spread = leader_pairs.indices[rows]
        spread[:, column] = order[low[rows] + nth]
        indices.append(spread)
        scores.append(leader_pairs.scores[rows])
    return _merge_pairs(np.empty((0, 2), np.int64), np.concatenate(indices), np.concatenate(scores))


class _Thumbnails(NamedTuple):
    """The distinct thumbnails of a dataset with enough content to be compared."""

    pixels: Tensor  # uint8 (n, S, S)
    sparse: Tensor  # bool (n,)
    positions: IntArray  # (n,): their positions in the dataset

    @classmethod
    def from_fingerprints(cls, fingerprints: NDArray[np.uint8], leaders: IntArray) -> "_Thumbnails":
        pixel_count = THUMBNAIL_SIDE * THUMBNAIL_SIDE
        has_content = ~fingerprints[:, pixel_count:].any(axis=1)
        positions = np.flatnonzero(has_content & (leaders == np.arange(len(leaders))))
        pixels = torch.from_numpy(fingerprints[positions, :pixel_count]).view(-1, THUMBNAIL_SIDE, THUMBNAIL_SIDE)
        sparse = torch.cat([_compute_content(block) < _SPARSE_CONTENT for block in pixels.split(4096)])
        return cls(pixels, sparse, positions)


def _match_windows(wholes: _Thumbnails, parts: _Thumbnails) -> DuplicatePairs:
    """The pairs (i, j) of unequal fingerprints in which part j is the whole i or a window of it."""
    if not (len(wholes.positions) and len(parts.positions)):
        return DuplicatePairs(np.empty((0, 2), np.int64), np.empty(0, np.float32))
    index = _build_cell_index(parts.pixels)

    def match_block(start: int) -> DuplicatePairs:
        block = wholes.pixels[start : start + _BLOCK_IMAGES]
        whole, part, window = _find_candidates(block, index, start if wholes is parts else None)
        whole = whole + start
        sparse = wholes.sparse[whole] | parts.sparse[part]
        scores = _score_pairs(wholes.pixels[whole], parts.pixels[part], window, sparse)
        kept = (scores >= torch.where(sparse, MIN_SPARSE_CORRELATION, MIN_CORRELATION)).numpy()
        indices = np.stack([wholes.positions[whole.numpy()[kept]], parts.positions[part.numpy()[kept]]], axis=1)
        return DuplicatePairs(indices, scores.numpy()[kept])

    with use_one_thread() as threads, ThreadPoolExecutor(min(threads, 8)) as pool:
        # one thread a block: the products are small, and two threads take twice as long as one
        blocks = list(pool.map(match_block, range(0, len(wholes.positions), _BLOCK_IMAGES)))
    return DuplicatePairs(*(np.concatenate(part) for part in zip(*blocks, strict=True)))


class _CellIndex(NamedTuple):
    """Whole thumbnails, grouped in cells of similar ones."""

    centers: Tensor  # (cells, D)
    members: Tensor  # (n, D), cell by cell
    thumbnail_of_member: Tensor  # (n,): which thumbnail a member is
    member_of_thumbnail: Tensor  # (n,): which member a thumbnail is
    starts: list[int]  # the first member of each cell, and n


def _build_cell_index(thumbnails: Tensor) -> _CellIndex:
    members = torch.cat([_compute_frequencies(block, _list_windows()[:1])[:, 0] for block in thumbnails.split(4096)])
    centers = _fit_centers(members, max(1, len(members) // _CELL_SIZE))
    cells = torch.cat([(block @ centers.T).argmax(dim=1) for block in members.split(8192)])
    order = cells.argsort(stable=True)
    starts = torch.searchsorted(cells[order], torch.arange(len(centers) + 1)).tolist()
    return _CellIndex(centers, members[order], order, order.argsort(), starts)


def _fit_centers(members: Tensor, count: int) -> Tensor:
    """(count, D): six rounds of k-means by cosine on a sample; the cells need to be useful, not optimal."""
    sample = members[torch.randperm(len(members), generator=torch.Generator().manual_seed(0))[: 64 * count]]
    centers = sample[:count]
    for _ in range(6):
        nearest = torch.cat([(block @ centers.T).argmax(dim=1) for block in sample.split(8192)])
        sums = torch.zeros_like(centers).index_add_(0, nearest, sample)
        lengths = sums.norm(dim=1, keepdim=True)
        centers = torch.where(lengths > 0, sums / lengths.clamp(min=1e-6), centers)
    return centers


def _find_candidates(thumbnails: Tensor, index: _CellIndex, start: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The candidates: which thumbnail matches which whole one of the index by which of its windows; each (K,).

    start: the position of these thumbnails in the index if it holds them too, as none may match itself.
    """
    windows = _compute_frequencies(thumbnails, _list_windows())  # (B, W, D)
    windows = torch.cat([windows, windows * _build_mirror_signs()], dim=1)  # (B, 2 W, D)
    images = torch.arange(len(thumbnails)).repeat_interleave(windows.shape[1])
    cosines, partners = _search_nearest(windows.flatten(0, 1), index, None if start is None else images + start)
    rows, probes = (cosines > _MIN_CANDIDATE_COSINE).nonzero(as_tuple=True)
    image, partner, cosine = (v.numpy() for v in (images[rows], partners[rows, probes], cosines[rows, probes]))
    order = np.lexsort((-cosine, partner, image))
    image, partner, cosine, row = image[order], partner[order], cosine[order], rows.numpy()[order]
    pairs = image * len(index.thumbnail_of_member) + partner
    best = np.flatnonzero(np.diff(pairs, prepend=-1))  # the best window of each pair
    best = best[np.lexsort((-cosine[best], image[best]))]
    best = best[np.arange(len(best)) - np.searchsorted(image[best], image[best]) < _MAX_CANDIDATES]
    whole, part, window = (torch.from_numpy(v[best]) for v in (image, partner, row % windows.shape[1]))
    return whole, part, window


def _search_nearest(windows: Tensor, index: _CellIndex, own_thumbnails: Tensor | None) -> tuple[Tensor, Tensor]:
    """The nearest thumbnail in each visited cell: cosines and positions, both (windows, probes)."""
    probes = min(_PROBES, len(index.centers))
    cells = torch.cat([(block @ index.centers.T).topk(probes).indices for block in windows.split(8192)]).flatten()
    visits = cells.argsort(stable=True)  # grouped by cell, which makes each cell one matrix product
    bounds = torch.searchsorted(cells[visits], torch.arange(len(index.centers) + 1)).tolist()
    cosines = torch.full((len(cells),), -1.0)
    nearest = torch.zeros(len(cells), dtype=torch.long)
    for cell in range(len(index.centers)):
        low, high = index.starts[cell : cell + 2]
        for visit in visits[bounds[cell] : bounds[cell + 1]].split(2**24 // (high - low + 1) + 1):  # 64 MB of products
            if low == high or not len(visit):
                continue
            rows = visit // probes
            products = windows[rows] @ index.members[low:high].T
            if own_thumbnails is not None:
                column = index.member_of_thumbnail[own_thumbnails[rows]] - low
                inside = ((column >= 0) & (column < high - low)).nonzero().flatten()
                products[inside, column[inside]] = -1
            cosines[visit], column = products.max(dim=1)
            nearest[visit] = column + low
    return cosines.view(-1, probes), index.thumbnail_of_member[nearest].view(-1, probes)


def _compute_frequencies(thumbnails: Tensor, windows: Tensor) -> Tensor:
    """uint8 (B, S, S) and (W, 4) trims -> (B, W, D), of norm 1 unless the contrast of the window is low."""
    spans, span_index = windows.reshape(-1, 2).unique(dim=0, return_inverse=True)  # ten spans make the hundred windows
    cosines = _build_cosine_transforms()[spans[:, 0], spans[:, 1]].flatten(0, 1)  # (spans 6, S)
    products = cosines @ thumbnails.float() @ cosines.T
    products = products.view(-1, len(spans), _FREQUENCIES, len(spans), _FREQUENCIES)
    vertical, horizontal = span_index.view(-1, 2).T
    whole = products[:, vertical, :, horizontal].transpose(0, 1)  # (B, W, 6, 6)
    steps = torch.arange(_FREQUENCIES, dtype=torch.float32)
    whitened = (whole * torch.hypot(steps[:, None], steps)).flatten(2)[..., 1:]
    return whitened / whitened.norm(dim=2, keepdim=True).clamp(min=_MIN_WHITENED_NORM)


@lru_cache
def _build_cosine_transforms() -> Tensor:
    """(58, 58, 6, S): entry [a, b] is the cosine transform of what remains after trimming a and b."""
    steps = torch.arange(_FREQUENCIES)[:, None]
    scale = torch.where(steps == 0, math.sqrt(1 / 16), math.sqrt(2 / 16))
    return scale * torch.cos(math.pi / 16 * steps * (torch.arange(16) + 0.5)) @ _build_resamplers(16)


@lru_cache
def _build_mirror_signs() -> Tensor:
    """(D,): mirroring changes the sign of the odd horizontal frequencies."""
    return (1.0 - 2.0 * (torch.arange(_FREQUENCIES) % 2)).repeat(_FREQUENCIES)[1:]


@lru_cache
def _list_windows() -> Tensor:
    """(W, 4): what each window trims off top, bottom, left and right; the first one is the whole thumbnail."""
    spans = [(low, high) for low in _TRIMS for high in _TRIMS if low + high <= _TRIMS[-1]]
    return torch.tensor([(*vertical, *horizontal) for vertical in spans for horizontal in spans])


@lru_cache
def _build_resamplers(count: int) -> Tensor:
    """(58, 58, count, S): entry [a, b] averages S pixels over `count` equal parts of what trimming a and b leaves."""
    trims = torch.arange(_TRIM_LIMIT + 2) / _TRIM_UNIT  # one beyond the limit, for the slope there
    low, high = trims[:, None, None], 1 - trims[None, :, None]
    edges = THUMBNAIL_SIDE * (low + (high - low) * torch.linspace(0, 1, count + 1))
    pixels = torch.arange(THUMBNAIL_SIDE)
    overlap = torch.minimum(edges[..., 1:, None], pixels + 1) - torch.maximum(edges[..., :-1, None], pixels)
    overlap = overlap.clamp(min=0)
    return overlap / overlap.sum(dim=-1, keepdim=True)


def _score_pairs(wholes: Tensor, parts: Tensor, windows: Tensor, sparse: Tensor) -> Tensor:
    """uint8 (B, S, S) twice, (B,) windows -> (B,): the correlation of the detail, -1 if no alignment fits.

    sparse: (B,), the pairs whose plain detail is compared instead of the normalized one.
    """
    scores = torch.full((len(windows),), -1.0)
    for rows in torch.arange(len(windows)).split(1024):
        mirrored = (windows[rows] >= len(_list_windows()))[:, None, None]
        whole, part = wholes[rows].float(), torch.where(mirrored, parts[rows].flip(2), parts[rows]).float()
        trims = _list_windows()[windows[rows] % len(_list_windows())]
        trims, aligned, targets = _align_windows(whole, part, trims, _COARSE_SIDE)
        fit = _compute_correlation(aligned, targets) >= _MIN_COARSE_CORRELATION
        if fit.any():
            _, aligned, targets = _align_windows(whole[fit], part[fit], trims[fit], _FINE_SIDE)
            detail, target_detail = _compute_detail(aligned), _compute_detail(targets)
            plain = _compute_correlation(detail, target_detail)
            normalized = _compute_correlation(_normalize_contrast(detail), _normalize_contrast(target_detail))
            scores[rows[fit]] = torch.where(sparse[rows[fit]], plain, normalized)
    return scores


def _align_windows(whole: Tensor, part: Tensor, trims: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """The trims (B, 4) near the given ones by which the whole best matches the part, and both windows (B, M, M)."""
    table = _build_resamplers(side)
    target = table[0, 0] @ part @ table[0, 0].T
    windows, window_trims = [], []
    for _ in range(3):
        top, bottom, left, right = trims.T
        rows, columns = table[top, bottom], table[left, right].mT
        across, down = whole @ columns, rows @ whole
        windows.append(rows @ across)
        window_trims.append(trims)
        slopes = torch.stack(
            [
                (table[top + 1, bottom] - rows) @ across,
                (table[top, bottom + 1] - rows) @ across,
                down @ (table[left + 1, right].mT - columns),
                down @ (table[left, right + 1].mT - columns),
            ],
            dim=1,
        )
        step = _solve_gauss_newton_step(windows[-1], target, slopes).clamp(-8, 8).round().long()
        trims = (trims + step).clamp(0, _TRIM_LIMIT)
    top, bottom, left, right = trims.T
    windows.append(table[top, bottom] @ whole @ table[left, right].mT)
    window_trims.append(trims)
    best = torch.stack([_compute_correlation(window, target) for window in windows]).argmax(dim=0)
    chosen = best, torch.arange(len(best))
    return torch.stack(window_trims)[chosen], torch.stack(windows)[chosen], target


def _solve_gauss_newton_step(window: Tensor, target: Tensor, slopes: Tensor) -> Tensor:
    """(B, 4): the change of trims after which window = gain * target + offset in least squares, to first order."""
    unknowns = torch.cat([slopes, -target[:, None]], dim=1).flatten(2)  # (B, 5, M M): four trims and the gain
    unknowns = unknowns - unknowns.mean(dim=2, keepdim=True)  # the offset is free
    normal = unknowns @ unknowns.mT
    damped = normal + torch.diag_embed(normal.diagonal(dim1=1, dim2=2) * 1e-3 + 1e-3)
    return -torch.linalg.solve(damped, unknowns @ window.flatten(1)[..., None])[:, :4, 0]


def _compute_correlation(first: Tensor, second: Tensor) -> Tensor:
    """(B, M, M) twice -> (B,)."""
    first, second = (x.flatten(1) - x.mean(dim=(1, 2))[:, None] for x in (first, second))
    return F.cosine_similarity(first, second, dim=1)


def _compute_detail(images: Tensor) -> Tensor:
    """(B, M, M) -> (B, M, M): each pixel minus the mean of the 3 x 3 around it."""
    return images - _compute_local_mean(images, 3)


def _normalize_contrast(detail: Tensor) -> Tensor:
    """(B, M, M) -> (B, M, M): each pixel over the root mean square of the 5 x 5 around it."""
    return detail / (_compute_local_mean(detail.square(), 5).sqrt() + _DETAIL_NOISE)


def _compute_local_mean(images: Tensor, side: int) -> Tensor:
    """(B, M, M) -> (B, M, M): the mean of the square around each pixel."""
    padded = F.pad(images[:, None], [side // 2] * 4, mode="replicate")  # a channel, or torch refuses B = 0
    return F.avg_pool2d(padded, side, stride=1)[:, 0]


def _compute_content(thumbnails: Tensor) -> Tensor:
    """uint8 (B, S, S) -> (B,): the fraction of pixels that differ from their surroundings by over one gray level."""
    return (_compute_detail(thumbnails.float()).abs() > 1).float().mean(dim=(1, 2))
