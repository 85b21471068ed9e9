"""Feature cache: vectors that a vision tower made of images, by the images' digests (inference thread).

An image that was seen lately skips the tower, whatever text is around it. Least recently used ones go when
their bytes pass the limit; the latest stays however large it is, since its prompt is being read.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import mlx.core as mx

from icehouse_server.domain.ids import ImageDigest
from icehouse_server.domain.request import ImageInput
from icehouse_server.engine.kv_cache.regions import array_of
from icehouse_server.engine.runner.vision.mlx_vlm import VisionTower

_Key = tuple[ImageDigest, tuple[int, ...]]
"""An image and the tokens of its span: some of them are text, whose vectors are among those of the span."""


class ImageFeatures:
    """Asks the tower once for each image, as long as it remembers."""

    def __init__(self, tower: VisionTower, *, limit_bytes: int) -> None:
        self._tower = tower
        self._limit_bytes = limit_bytes
        self._kept: collections.OrderedDict[_Key, mx.array] = collections.OrderedDict()
        self.size_bytes = 0
        self.encoded_total = 0
        """Images that went through the tower."""

    def of(self, image: ImageInput, token_ids: Sequence[int]) -> mx.array:
        """Return the vectors of an image's span, [tokens, width], computed; `token_ids` are the span's."""
        key = image.digest, tuple(token_ids)
        vectors = self._kept.pop(key, None)
        if vectors is None:
            tensors = {tensor.name: array_of(tensor) for tensor in image.tensors}
            vectors = self._tower.encode(token_ids, tensors)
            mx.eval(vectors)
            self.encoded_total += 1
            self.size_bytes += vectors.nbytes
        assert vectors.shape[0] == len(token_ids), (vectors.shape, len(token_ids))
        self._kept[key] = vectors
        while self.size_bytes > self._limit_bytes and len(self._kept) > 1:
            self.size_bytes -= self._kept.popitem(last=False)[1].nbytes
        return vectors
