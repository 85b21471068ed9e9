"""Vectors of images: made once while they are remembered, the least recently used ones let go."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from icehouse_server.domain.blocks import HostTensor
from icehouse_server.domain.request import ImageInput, image_digest
from icehouse_server.engine.runner.vision.features import ImageFeatures

IDS = (7, 7, 7)
BYTES = len(IDS) * 4


class Tower:
    """Tells the pixel's number for each token."""

    def encode(self, token_ids: Any, tensors: Any) -> mx.array:
        return mx.full((len(token_ids), 1), float(tensors["pixel"].item()))


def image(number: int) -> ImageInput:
    tensors = (HostTensor("pixel", "U8", (), memoryview(bytes([number]))),)
    return ImageInput(image_digest(b"", tensors), tensors, feature_count=len(IDS))


def features(limit_bytes: int) -> ImageFeatures:
    tower: Any = Tower()
    return ImageFeatures(tower, limit_bytes=limit_bytes)


def test_an_image_goes_through_the_tower_once() -> None:
    cache = features(2 * BYTES)
    for number in (1, 2, 1, 2):
        assert cache.of(image(number), IDS).tolist() == [[float(number)]] * len(IDS)
    assert (cache.encoded_total, cache.size_bytes) == (2, 2 * BYTES)


def test_the_least_recently_used_goes_and_the_latest_stays_however_large() -> None:
    cache = features(2 * BYTES)
    for number in (1, 2, 1, 3, 1, 2):
        cache.of(image(number), IDS)
    assert cache.encoded_total == 4, "2 went when 3 came, since 1 was used later"
    small = features(1)
    assert [small.of(image(1), IDS).shape for _ in range(2)] == [(3, 1)] * 2
    assert (small.encoded_total, small.size_bytes) == (1, BYTES)


def test_the_same_image_with_other_text_in_its_span_is_another() -> None:
    cache = features(1 << 20)
    cache.of(image(1), IDS)
    cache.of(image(1), (7, 8, 7))
    assert cache.encoded_total == 2
