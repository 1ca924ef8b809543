"""Uploads that were tampered with: each is answered or refused, none breaks the server or stays in its memory."""

import collections
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.data.test_mutations import encode_originals, mutate
from tests.serving import serving
from vitrail.serving import routes
from vitrail.serving.limits import RequestLimits

ALLOWED = {200, 400, 413, 415, 422}
TYPES = (
    "image/jpeg",
    "image/png",
    "application/octet-stream",
    "text/html",
    "image/",
    "",
    "multipart/form-data",
    "\xff",
)
PATHS = ("/v1/predict", "/v1/embed", "/v1/explain", "/v1/attention?layer=2", "/v1/predict?top=-1", "/v1/predict?top=x")
FORM = "multipart/form-data; boundary=edge"


def form(images: list[bytes]) -> bytes:
    head = (
        b'--edge\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
    )
    return b"".join(head + image + b"\r\n" for image in images) + b"--edge--\r\n"


def upload(generator: np.random.Generator, kinds: list[bytes]) -> tuple[str, bytes, str]:
    """A path, a body and a type: an image, or a form of some, harmed inside or as a whole, rightly or wrongly named."""
    images = [kinds[int(number)] for number in generator.integers(0, len(kinds), int(generator.integers(1, 4)))]
    path = PATHS[int(generator.integers(0, len(PATHS)))] if generator.random() < 0.3 else PATHS[0]
    match int(generator.integers(0, 6)):
        case 0:
            return path, form([mutate(image, generator) for image in images]), FORM
        case 1:
            return path, mutate(form(images), generator), FORM
        case 2:
            return path, mutate(images[0], generator), TYPES[int(generator.integers(0, len(TYPES)))]
        case 3:
            return path, mutate(form(images), generator), mutate(FORM.encode(), generator).decode("latin-1")
        case _:
            return path, mutate(images[0], generator), TYPES[0]


def resident() -> int:
    """Bytes of memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fuzzed(count: int, seed: int) -> tuple[collections.Counter[int], int]:
    """How often each status came, and how many bytes the process grew by after the first tenth."""
    served = serving.build_service(limits=RequestLimits(max_megabytes=0.05, max_megapixels=1))
    client = TestClient(routes.build_app(served), raise_server_exceptions=False)
    generator, kinds, statuses, before = np.random.default_rng(seed), encode_originals(), collections.Counter[int](), 0
    kinds.append(b"x" * 60_000)
    for number in range(count):
        path, body, kind = upload(generator, kinds)
        kind = "".join(character for character in kind if character.isprintable())  # a client cannot send others
        answer = client.post(path, content=body, headers={"content-type": kind.encode("latin-1")})
        statuses[answer.status_code] += 1
        assert answer.status_code in ALLOWED, (number, path, kind, body[:300], answer.text)
        assert answer.status_code == 200 or list(answer.json()) == ["error"]
        before = resident() if number == count // 10 else before
    grown = resident() - before
    assert all(each.queue.accepted_images == 0 for each in served.models.values())
    served.close()
    return statuses, grown


def test_fuzzed_uploads_are_answered_or_refused() -> None:
    statuses, _ = fuzzed(400, seed=1)
    assert set(statuses) == ALLOWED


@pytest.mark.soak
def test_ten_thousand_fuzzed_uploads_leave_the_server_as_it_was(soaked: Callable[[int, str, str, str], None]) -> None:
    statuses, grown = fuzzed(10_000, seed=2)
    found = ", ".join(f"{status}: {number:,}" for status, number in sorted(statuses.items()))
    soaked(12, "uploads cannot hurt the server", "10,000, never 500, under 50 MB", f"{found}; {grown / 1e6:+.1f} MB")
    assert grown < 50e6
