"""Feature cache: vectors that a vision tower made of images, by the images' digests (inference thread).

A recently seen image skips the tower, whatever text is around it. The least recently used vectors are dropped
when their bytes exceed the limit; the latest stay whatever their size, since their prompt is being read.
"""

from __future__ import annotations

import collections
import logging

import mlx.core as mx

from icehouse_server.clock import Clock
from icehouse_server.domain.request import ImageKey, ImagePart
from icehouse_server.engine.core.ports import ImageUse
from icehouse_server.engine.kv_cache.regions import array_of
from icehouse_server.engine.runner.vision.mlx_vlm import TowerRun, VisionTower
from icehouse_server.engine.runner.vision.slices import TowerPace
from icehouse_server.errors import InvalidRequest, Reason

_log = logging.getLogger("icehouse.engine")


class ImageFeatures:
    """Asks the tower once for each image that it remembers; one image at a time."""

    def __init__(self, tower: VisionTower, *, limit_bytes: int, clock: Clock) -> None:
        self._tower = tower
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._vectors: collections.OrderedDict[ImageKey, mx.array] = collections.OrderedDict()
        self._encoding: tuple[ImageKey, TowerRun] | None = None
        """The image in the tower."""
        self._pace = TowerPace()
        self._size_bytes = self._encoded_total = self._reused_total = 0
        self._encode_s = 0.0

    def use(self) -> ImageUse:
        """Return what went through the tower, what was reused, and what is in memory."""
        return ImageUse(
            self._encoded_total, self._reused_total, self._encode_s, self._size_bytes, self._limit_bytes
        )

    def has_begun(self, image: ImagePart) -> bool:
        """Whether a whole image's vectors exist, or are being made."""
        return image.key in self._vectors or (self._encoding is not None and self._encoding[0] == image.key)

    def encode(self, image: ImagePart, *, budget_s: float) -> mx.array | None:
        """Continue encoding a whole image for about `budget_s`, but at least one slice of the tower. Return
        the vectors of its span, [tokens, width], once they exist. An unfinished other image is dropped.

        Raises InvalidRequest if the tower fails on the image, which is then forgotten.
        """
        vectors = self._vectors.pop(image.key, None)
        if vectors is not None:
            self._reused_total += 1
        else:
            began = self._clock.monotonic()
            try:
                vectors = self._encoded(image, began + budget_s)
            except (RuntimeError, MemoryError):
                raise  # raised by the device, and no request's fault
            except Exception as error:  # whatever the model's code makes of an image
                self._encoding = None
                _log.exception("image_failed", extra={"tokens": image.count})
                raise InvalidRequest(
                    Reason.IMAGE_INVALID,
                    f"the model's vision tower failed on an image of {image.count} tokens "
                    f"({type(error).__name__}); send another one",
                    metadata={"image_tokens": image.count},
                ) from error
            finally:
                self._encode_s += self._clock.monotonic() - began
            if vectors is None:
                return None
            self._encoded_total += 1
            self._size_bytes += vectors.nbytes
        self._vectors[image.key] = vectors
        while self._size_bytes > self._limit_bytes and len(self._vectors) > 1:
            self._size_bytes -= self._vectors.popitem(last=False)[1].nbytes
        return vectors

    def _encoded(self, image: ImagePart, end_time: float) -> mx.array | None:
        encoding = self._encoding
        is_new = encoding is None or encoding[0] != image.key
        if encoding is None or is_new:
            self._encoding = None  # release its arrays before those of another image are made
            tensors = {tensor.name: array_of(tensor) for tensor in image.image.tensors}
            encoding = self._encoding = image.key, self._tower.begin(image.span_token_ids, tensors)
        vectors = self._computed(encoding[1], end_time, has_gone_on=is_new)
        if vectors is None:
            return None
        self._encoding = None
        if vectors.shape[0] != image.count:
            raise ValueError(f"vectors are {vectors.shape}, of {image.count} tokens")
        return vectors

    def _computed(self, run: TowerRun, end_time: float, *, has_gone_on: bool) -> mx.array | None:
        """Continue a run; building it counts as a step, too."""
        while run.slices:
            began = self._clock.monotonic()
            taken = self._pace.take(run.slices, left_s=end_time - began, may_wait=has_gone_on)
            if not taken:
                return None
            mx.eval([piece.array for piece in taken])
            self._pace.note(taken, self._clock.monotonic() - began)
            has_gone_on = True
        mx.eval(run.vectors)
        return run.vectors
