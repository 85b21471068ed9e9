"""Sent tensors: images that a gateway has prepared, checked against prompt and model before use. Any thread.

Nothing else that the sender says about an image is trusted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from icehouse_server.domain.blocks import HostTensor
from icehouse_server.domain.request import SentImages
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.vision.decoder import ImageLimits

PIXELS: Final = "pixel_values"
LARGEST_VALUE: Final = 255.0
"""No processor makes a larger value, even without rescaling; far larger ones would overflow in the tower."""
_NUMPY: Final = {"F32": np.float32, "I64": np.int64, "U32": np.uint32, "U8": np.uint8}
_INTEGERS: Final = frozenset({"I64", "U32", "U8"})
_LONGEST_GAP: Final = 16
"""Most text tokens between two tokens of one image; every family writes fewer."""
_LARGEST_INTEGER: Final = 1 << 31

Pixels = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens of one image in a prompt, from its first image token to just after its last."""

    start: int
    stop: int
    runs: tuple[int, ...]
    """Lengths of the runs of image tokens, which text separates."""


def locate_images(token_ids: Sequence[int], sent: SentImages, *, image_token_id: int) -> list[ImageTokens]:
    """Return the images' tokens; raises InvalidRequest if the prompt's tokens do not agree."""
    if sent.token_id not in (None, image_token_id):
        raise _invalid(
            sent.token_field, f"is {sent.token_id}; the image token of this model is {image_token_id}"
        )
    positions = np.flatnonzero(np.asarray(token_ids) == image_token_id)
    images: list[ImageTokens] = []
    for index, span in enumerate(sent.places):
        first, last = np.searchsorted(positions, (span.start, span.stop))
        if first == last:
            field = f"{sent.places_field}[{index}]"
            raise _invalid(
                field, f"has no image token ({image_token_id}) from {span.start} to {span.stop - 1}"
            )
        inside = positions[first:last]
        gaps = np.diff(inside)
        if len(gaps) and gaps.max() > _LONGEST_GAP + 1:
            raise _invalid(
                f"{sent.places_field}[{index}]",
                f"has {gaps.max() - 1} tokens of text between two of the image; the limit is {_LONGEST_GAP}",
            )
        runs = np.diff(np.flatnonzero(gaps > 1), prepend=-1, append=len(inside) - 1)
        images.append(ImageTokens(int(inside[0]), int(inside[-1]) + 1, tuple(runs.tolist())))
    count = sum(sum(image.runs) for image in images)
    if count != len(positions):
        raise _invalid(
            sent.places_field,
            f"has {count} image tokens of the {len(positions)} in the prompt; each must belong to an image",
        )
    return images


class SentTensors:
    """The tensors of a prompt's images. Every method raises InvalidRequest that names the tensor."""

    def __init__(self, sent: SentImages, images: Sequence[ImageTokens], limits: ImageLimits) -> None:
        self._tensors = {each.tensor.name: each for each in sent.tensors}
        self._places_field = sent.places_field
        self._images = images
        self._limits = limits

    @property
    def count(self) -> int:
        """How many images there are."""
        return len(self._images)

    def runs(self, index: int) -> tuple[int, ...]:
        """Return the lengths of the runs of an image's tokens."""
        return self._images[index].runs

    def expect(self, *names: str, optional: Sequence[str] = ()) -> None:
        """Refuse any tensor that is not named here, and the absence of one that is not optional."""
        for each in self._tensors.values():
            if each.tensor.name not in (*names, *optional):
                known = ", ".join((*names, *optional))
                raise _invalid(each.field, f"is not an image tensor of this model, which has {known}")
        for name in names:
            if name not in self._tensors:
                raise _invalid(
                    self._tensors[PIXELS].field, f"comes without {name}, which this model's images need"
                )

    def has(self, name: str) -> bool:
        """Whether an optional tensor was sent."""
        return name in self._tensors

    def shape(self, name: str, *shape: int | None) -> tuple[int, ...]:
        """Return a tensor's shape, which must match `shape`; None matches any size from 1."""
        own = self._tensors[name].tensor.shape
        fits = len(own) == len(shape) and all(
            size >= 1 and wanted in (None, size) for size, wanted in zip(own, shape, strict=True)
        )
        if not fits:
            wanted = " x ".join("any" if size is None else str(size) for size in shape)
            self.refuse(name, f"has the shape {list(own)}; this model's is {wanted}")
        return own

    def pixels(self, *shape: int | None) -> Pixels:
        """Return the pixels, which must have this shape and values that images can have."""
        self.shape(PIXELS, *shape)
        tensor = self._tensors[PIXELS].tensor
        if tensor.dtype != "F32":
            self.refuse(PIXELS, f"has the type {tensor.dtype}; this model takes F32 (float32)")
        pixels = _array(tensor)
        # If there is a NaN, both min and max are NaN, and no comparison holds.
        if not (pixels.min() >= -LARGEST_VALUE and pixels.max() <= LARGEST_VALUE):
            self.refuse(
                PIXELS,
                f"has a value that is not finite, or is beyond {LARGEST_VALUE:g}; no processor makes one",
            )
        return pixels

    def flags(self, name: str, *shape: int | None) -> npt.NDArray[np.bool_]:
        """Return a mask that is true where the tensor is not 0."""
        flags: npt.NDArray[np.bool_] = self._whole_numbers(name, *shape) != 0
        return flags

    def integers(self, name: str, *shape: int | None) -> Integers:
        """Return integers, which must be from 0 to 2**31 - 1."""
        numbers: Integers = self._whole_numbers(name, *shape).astype(np.int64)
        if numbers.min() < 0 or numbers.max() >= _LARGEST_INTEGER:
            self.refuse(name, f"has a number that is not from 0 to {_LARGEST_INTEGER - 1}")
        return numbers

    def _whole_numbers(self, name: str, *shape: int | None) -> npt.NDArray[Any]:
        self.shape(name, *shape)
        tensor = self._tensors[name].tensor
        if tensor.dtype not in _INTEGERS:
            self.refuse(name, f"has the type {tensor.dtype}; it must hold integers")
        return _array(tensor)

    def check_runs(self, index: int, runs: Sequence[int]) -> None:
        """Refuse an image whose tokens in the prompt are not those that its tensors make."""
        own = self.runs(index)
        if own != tuple(runs):
            raise _invalid(
                f"{self._places_field}[{index}]",
                f"has {_in_runs(own)}; an image of such tensors has {_in_runs(runs)}",
            )

    def check_size(self, index: int, *, width: int, height: int) -> None:
        """Refuse an image of too many pixels."""
        limit = self._limits.pixel_count
        if width * height > limit:
            self.refuse(
                PIXELS,
                f"has {width} x {height} pixels for image {index}; the limit is {limit}; scale it down",
            )

    def refuse(self, name: str, complaint: str) -> NoReturn:
        raise _invalid(self._tensors[name].field, complaint)


def check_bytes(sent: SentImages, limits: ImageLimits) -> None:
    """Refuse more images, or more bytes of them, than a request may have."""
    if len(sent.places) > limits.image_count:
        raise _invalid(sent.places_field, f"has {len(sent.places)} images; the limit is {limits.image_count}")
    size_bytes = sum(each.tensor.data.nbytes for each in sent.tensors)
    if size_bytes > limits.prepared_bytes:
        raise _invalid(
            sent.tensors[0].field,
            f"and what comes with it take {size_bytes} bytes; the limit for a request's images is "
            f"{limits.prepared_bytes}; send fewer or smaller ones",
        )


def _array(tensor: HostTensor) -> npt.NDArray[Any]:
    assert math.prod(tensor.shape) * np.dtype(_NUMPY[tensor.dtype]).itemsize == tensor.data.nbytes, (
        tensor.name
    )
    return np.frombuffer(tensor.data, _NUMPY[tensor.dtype]).reshape(tensor.shape)


def _in_runs(runs: Sequence[int]) -> str:
    if len(runs) == 1:
        return f"{runs[0]} image tokens"
    return f"{sum(runs)} image tokens in {len(runs)} runs"


def _invalid(field: str, complaint: str) -> InvalidRequest:
    return InvalidRequest(
        Reason.IMAGE_INVALID, f"{field} {complaint}", field=field, metadata={"field": field}
    )
