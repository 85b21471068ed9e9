"""Vectors of images: made once while they are remembered, slice by slice, the least recently used let go."""

from __future__ import annotations

import collections
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.domain.blocks import HostTensor
from icehouse_server.domain.request import ImageInput, ImagePart, image_digest
from icehouse_server.engine.runner.vision.features import ImageFeatures
from icehouse_server.engine.runner.vision.mlx_vlm import TowerRun
from icehouse_server.engine.runner.vision.slices import TowerSlice
from icehouse_server.errors import InvalidRequest, Reason

from tests.fixtures.engine import FakeClock

IDS = (7, 7, 7)
BYTES = len(IDS) * 4
SLICE_COUNT = 3


class Clock(FakeClock):
    """A second passes each time that somebody looks."""

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


class Tower:
    """Tells the pixel's number for each token."""

    def begin(self, token_ids: Any, tensors: Any) -> TowerRun:
        arrays = [mx.array(0.0)]
        while len(arrays) < SLICE_COUNT:
            arrays.append(arrays[-1] + 1.0)
        pixel = float(tensors["pixel"].item()) + arrays[-1] - arrays[-1]
        slices = collections.deque(TowerSlice(array, "linear", 1.0) for array in arrays)
        return TowerRun(slices, mx.broadcast_to(pixel, (len(token_ids), 1)))


def image(number: int, ids: tuple[int, ...] = IDS) -> ImagePart:
    tensors = (HostTensor("pixel", "U8", (), memoryview(bytes([number]))),)
    whole = ImageInput(image_digest(b"", tensors), tensors, feature_count=len(ids))
    return ImagePart(0, 0, len(ids), whole, ids)


def features(limit_bytes: int) -> ImageFeatures:
    tower: Any = Tower()
    return ImageFeatures(tower, limit_bytes=limit_bytes, clock=Clock())


def encoded(cache: ImageFeatures, part: ImagePart) -> Any:
    vectors = cache.encode(part, budget_s=1000.0)
    assert vectors is not None
    return vectors.tolist()


def test_an_image_goes_through_the_tower_once() -> None:
    cache = features(2 * BYTES)
    for number in (1, 2, 1, 2):
        assert encoded(cache, image(number)) == [[float(number)]] * len(IDS)
    used = cache.use()
    assert (used.encoded_total, used.reused_total, used.size_bytes) == (2, 2, 2 * BYTES)
    assert used.encode_s > 0


def test_the_least_recently_used_goes_and_the_latest_stays_however_large() -> None:
    cache = features(2 * BYTES)
    for number in (1, 2, 1, 3, 1, 2):
        encoded(cache, image(number))
    assert cache.use().encoded_total == 4, "2 went when 3 came, since 1 was used later"
    small = features(1)
    for _ in range(2):
        encoded(small, image(1))
    assert (small.use().encoded_total, small.use().size_bytes) == (1, BYTES)


def test_the_same_image_with_other_text_in_its_span_is_another() -> None:
    cache = features(1 << 20)
    encoded(cache, image(1))
    encoded(cache, image(1, (7, 8, 7)))
    assert cache.use().encoded_total == 2


def test_a_step_builds_or_computes_a_slice_at_least_and_as_many_as_its_time_allows() -> None:
    cache = features(1 << 20)
    assert not cache.has_begun(image(1))
    for _ in range(SLICE_COUNT):
        assert cache.encode(image(1), budget_s=0.0) is None
        assert cache.has_begun(image(1))
    assert cache.encode(image(1), budget_s=0.0) is not None
    assert cache.encode(image(2), budget_s=3.0) is None
    assert cache.encode(image(2), budget_s=0.0) is not None, "two slices ran together in the time before"


def test_an_image_that_was_begun_is_given_up_for_another() -> None:
    cache = features(1 << 20)
    cache.encode(image(1), budget_s=0.0)
    cache.encode(image(2), budget_s=0.0)
    assert [cache.has_begun(image(n)) for n in (1, 2)] == [False, True]
    assert encoded(cache, image(1)) == [[1.0]] * len(IDS)


class FailingTower(Tower):
    """Fails as a model's code does: where a run is built, or where it is computed."""

    error: Exception = ValueError("[broadcast_shapes] (3,4) and (5,4)")

    def begin(self, token_ids: Any, tensors: Any) -> TowerRun:
        run = super().begin(token_ids, tensors)
        if float(tensors["pixel"].item()) == 1:
            raise self.error
        if float(tensors["pixel"].item()) == 2:
            return TowerRun(run.slices, mx.zeros((len(token_ids) + 1, 1)))
        return run


@pytest.mark.parametrize("number", [1, 2])
def test_an_image_on_which_the_tower_fails_is_refused_and_others_go_on(number: int) -> None:
    tower: Any = FailingTower()
    cache = ImageFeatures(tower, limit_bytes=1 << 20, clock=Clock())
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refused:
            encoded(cache, image(number))
        assert refused.value.reason is Reason.IMAGE_INVALID
        assert "broadcast" not in refused.value.message, "what a library says may tell of other requests"
        assert not cache.has_begun(image(number))
    assert encoded(cache, image(3)) == [[3.0]] * len(IDS)
    assert (cache.use().encoded_total, cache.use().size_bytes) == (1, BYTES)


def test_a_device_that_fails_is_no_fault_of_the_image() -> None:
    tower: Any = FailingTower()
    tower.error = RuntimeError("[metal::malloc] out of memory")
    with pytest.raises(RuntimeError, match="malloc"):
        encoded(ImageFeatures(tower, limit_bytes=1 << 20, clock=Clock()), image(1))
