"""A model as functions of views."""

import dataclasses
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests import making
from vitrail.errors import UsageError
from vitrail.inference import compute
from vitrail.model.quantized import has_exact_int8_products


def views(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 20])
def test_images_shared_among_threads_keep_their_order(threads: int, count: int) -> None:
    """Of each image a number comes out, by whatever thread; none gets more than it was told, or torch's own threads."""
    seen: list[tuple[str, int, int]] = []

    def function(some: Tensor) -> Tensor:
        seen.append((threading.current_thread().name, len(some), torch.get_num_threads()))
        return some.flatten(1).float().mean(dim=1, keepdim=True)

    pixels, before = views(count), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = compute._split_over_threads(function, 4)(pixels)
        assert torch.get_num_threads() == threads, "others keep what they had"
        later = ThreadPoolExecutor(1).submit(torch.get_num_threads).result()
        assert later == threads, "and so do threads that begin later"
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, pixels.flatten(1).float().mean(dim=1, keepdim=True))
    assert sum(size for _, size, _ in seen) == count
    if count >= max(threads, 2):
        assert max(size for _, size, _ in seen) <= min(4, -(-count // threads))
        assert {alone for _, _, alone in seen} == {1}
        assert all(name.startswith("compute") for name, _, _ in seen) == (threads > 1)


@pytest.mark.parametrize(
    ("count", "parts"), [(2, [1, 1]), (9, [5, 4]), (16, [8, 8]), (20, [5, 5, 5, 5]), (33, [6] * 5 + [3])]
)
def test_threads_get_parts_as_equal_as_can_be(count: int, parts: list[int]) -> None:
    found: list[int] = []

    def counted(some: Tensor) -> Tensor:
        found.append(len(some))
        return some

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compute._split_over_threads(counted, 8)(views(count))
    finally:
        torch.set_num_threads(before)
    assert sorted(found, reverse=True) == parts


def test_of_small_models_more_images_are_computed_at_a_time() -> None:
    from vitrail import presets

    assert [compute._choose_chunk_size(presets.get_preset_config(name)) for name in ("l16", "b16", "s16", "ti16")] == [
        8,
        8,
        8,
        8,
    ]
    assert compute._choose_chunk_size(making.bit().config) == 8
    assert compute._choose_chunk_size(making.vit().config) > 100


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_threads_that_compute_give_way_and_no_others() -> None:
    script = (
        "import os, torch; from vitrail import compute; torch.set_num_threads(3); compute.give_way();"
        "pool = compute._streams(3, os.getpid()); found = [];"
        "compute._each(pool, 3, lambda: found.append(os.nice(0))); print(os.nice(0), found)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == f"{os.nice(0)} {[min(19, os.nice(0) + 5)] * 3}"


def test_float32_is_the_model_itself() -> None:
    trained = making.trained(making.vit(), temperature=2.0)
    assert trained.preprocess is not None
    from vitrail.data.transforms import normalize

    with torch.inference_mode():
        images = normalize(views(5), trained.preprocess)
        logits, features = trained.model(images), trained.model.compute_features(images)
    found = compute.build_inference_functions(trained)
    torch.testing.assert_close(found.probabilities(views(5)), (logits / 2).softmax(dim=1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.features(views(5)), features, rtol=1e-5, atol=1e-5)
    several = compute.build_inference_functions(dataclasses.replace(trained, multi_label=True))
    torch.testing.assert_close(several.probabilities(views(5)), (logits / 2).sigmoid(), rtol=1e-5, atol=1e-6)


def test_what_is_possible_depends_on_the_model_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    vit, resnet = making.trained(making.vit()), making.trained(making.bit())
    assert compute.list_available_precisions(resnet) == ("float32",)
    assert "openvino-int8" not in compute.list_available_precisions(vit), "it has no ranges"
    assert compute.list_available_precisions(vit) == (
        ("float32", "bfloat16", "int8") if has_exact_int8_products() else ("float32", "bfloat16")
    )
    with pytest.raises(UsageError, match="a ResNet has convolutions"):
        compute.build_inference_functions(resnet, "int8")
    monkeypatch.setattr("vitrail.model.quantized.has_exact_int8_products", lambda: False)
    assert compute.list_available_precisions(vit) == ("float32", "bfloat16")


def test_openvino_is_named_with_its_extra_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = making.trained(making.vit(), ranges=(0.0, 1.0) * 18)
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'vitrail\[openvino\]'"):
        compute.build_inference_functions(trained, "openvino-int8")
