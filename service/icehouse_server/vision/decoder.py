"""Image decoder: encoded bytes to pixels, with Pillow. Images that are too large are refused by their header.

The bytes show the format; the sender's media type does not count. A photo larger than a model can use is
scaled down: a JPEG while it is decoded, so that most of its pixels never exist, other formats afterwards.
Pillow comes with the optional extra `vision`. Any thread.
"""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Final

from PIL import Image, ImageOps, JpegImagePlugin, UnidentifiedImageError

from icehouse_server.domain.chat import ImageSource
from icehouse_server.errors import InvalidRequest, Reason

_OTHER_FORMATS: Final = ("PNG", "WEBP", "GIF")
PIXEL_LIMIT: Final = 89_478_485
"""Pillow's own limit for images that are decoded whole; beyond it Pillow warns or refuses."""
_DECODED_FACTOR: Final = 4
"""Most pixels that are decoded, as a multiple of those that are kept."""
_JPEG_FACTOR: Final = 16
"""Most pixels of a JPEG, as a multiple of those that are kept. The decoder halves its sides once or twice as
it goes, so the decoded pixels stay within the factor above."""
_DECODED_BYTES: Final = 8
"""Memory of a decoded pixel: four bytes in Pillow's image, and four more as RGB."""
_DECODED_WEBP_BYTES: Final = 20
"""The same for WebP: libwebp's canvas and its output take this much (measured, Pillow 12, Linux)."""
_KEPT_BYTES: Final = 4
"""Additional memory of a kept pixel while the image is scaled or turned upright."""
_SHOWN_LENGTH: Final = 80
"""Characters of a media type that a refusal quotes."""

JPEG_START: Final = b"\xff\xd8\xff"

_SEQUENTIAL: Final = frozenset({0xC0, 0xC1})
"""Frames of baseline and extended sequential pictures in Huffman codes."""
_SEGMENTS: Final = _SEQUENTIAL | {0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)}
"""Segments with a length that may come before the scan. Decoders skip others too, each in its own way."""
_SCAN: Final = 0xDA
_COUNT_OFFSET: Final = 9
"""From a frame's marker to the number of its components; in a scan that is at 4."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of one request's images."""

    image_count: int
    size_bytes: int
    """Encoded bytes of one image."""
    pixel_count: int
    """Pixels (width times height) that are kept of one image; a larger one is scaled down to this."""
    prepared_bytes: int
    """Bytes of all images of a request as the model takes them, and of one image while it is decoded."""


def decode_image(source: ImageSource, limits: ImageLimits) -> Image.Image:
    """Return the image upright, in RGB and within the limit; raises InvalidRequest, which names its part of
    the request.

    Format, size and animation are read from the header, so an image that is too large is never decoded.
    """
    image = _opened(source, limits)
    try:
        # Only this reads a GIF's second frame.
        if not getattr(image, "is_animated", False):
            return _decoded(image, limits)
    except Exception as error:  # Pillow's decoders may raise anything
        raise _invalid(source, f"cannot be decoded{_detail(source, error)}") from error
    raise _invalid(source, "is animated; send one frame of it")


def decoding_bytes(source: ImageSource, limits: ImageLimits) -> int:
    """Return the bytes that decoding an image takes, according to its header. Raises InvalidRequest as
    decoding does, and if that is more than a request may take."""
    image = _opened(source, limits)
    width, height = image.size
    target = scaled_size(image.size, limits)
    if is_read_in_one_scan(source.data):
        # Most pixels of a large JPEG never exist, but a progressive one holds all of them at any scale.
        image.draft(None, target)
    pixel_bytes = _DECODED_WEBP_BYTES if image.format == "WEBP" else _DECODED_BYTES
    size_bytes = pixel_bytes * math.prod(image.size) + _KEPT_BYTES * math.prod(target)
    if size_bytes > limits.prepared_bytes:
        raise _invalid(
            source,
            f"takes {size_bytes} bytes to decode, {width} x {height} pixels; the limit for a request is "
            f"{limits.prepared_bytes}; scale it down",
            size_bytes=size_bytes,
            limit_bytes=limits.prepared_bytes,
        )
    return size_bytes


def scaled_size(size: tuple[int, int], limits: ImageLimits) -> tuple[int, int]:
    """Return the width and height after scaling down; unchanged if the image is small enough."""
    width, height = size
    if width * height <= limits.pixel_count:
        return size
    scale = math.sqrt(limits.pixel_count / (width * height))
    narrow = max(1, int(min(size) * scale))
    wide = min(max(size), limits.pixel_count // narrow, max(1, round(max(size) * scale)))
    return (wide, narrow) if width >= height else (narrow, wide)


def _decoded(image: Image.Image, limits: ImageLimits) -> Image.Image:
    target = scaled_size(image.size, limits)
    if target != image.size:
        # The mode stays; only a JPEG can be decoded at a smaller size.
        image.draft(None, target)
    image.load()
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    del image
    if rgb.size != target:
        rgb = rgb.resize(target, Image.Resampling.BICUBIC, reducing_gap=3.0)
    return ImageOps.exif_transpose(rgb)


def _opened(source: ImageSource, limits: ImageLimits) -> Image.Image:
    """Read the header of an image; refuse one that would take too much memory to decode."""
    size = len(source.data)
    if size > limits.size_bytes:
        raise _invalid(
            source,
            f"has {size} bytes; the limit for an image is {limits.size_bytes}",
            size_bytes=size,
            limit_bytes=limits.size_bytes,
        )
    image = _with_header(source)
    limit = min(_DECODED_FACTOR * limits.pixel_count, PIXEL_LIMIT)
    if isinstance(image, JpegImagePlugin.JpegImageFile) and is_read_in_one_scan(source.data):
        limit = _JPEG_FACTOR * limits.pixel_count
    width, height = image.size
    if width * height > limit:
        raise _too_many_pixels(source, f"{width} x {height}", width * height, limit=limit)
    return image


def _with_header(source: ImageSource) -> Image.Image:
    file = io.BytesIO(source.data)
    try:
        if source.data.startswith(JPEG_START):
            # Not Image.open: it takes a phone's photo with a second picture in it for an animation, and its
            # limit is for images that are decoded whole.
            return JpegImagePlugin.JpegImageFile(file)
        return Image.open(file, formats=_OTHER_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels(source, f"more than {PIXEL_LIMIT}", limit=PIXEL_LIMIT) from error
    except Exception as error:  # as above
        # The sender's media type may explain what the image really is.
        hint = f" (it is called {source.media_type[:_SHOWN_LENGTH]!r})" if source.media_type else ""
        raise _invalid(source, f"is not a PNG, JPEG, WebP or GIF{hint}{_detail(source, error)}") from error


def _too_many_pixels(
    source: ImageSource, shown: str, count: int | None = None, *, limit: int
) -> InvalidRequest:
    return _invalid(
        source,
        f"has {shown} pixels; the limit for its kind is {limit}; scale it down",
        pixels=count,
        pixel_limit=limit,
    )


def _invalid(source: ImageSource, complaint: str, **facts: object) -> InvalidRequest:
    message = f"the image in {source.field} {complaint}"
    return InvalidRequest(Reason.IMAGE_INVALID, message, field=source.field, metadata=facts)


def _detail(source: ImageSource, error: Exception) -> str:
    """Return the decoder's message. It may quote the file, so it is omitted for an image from a URI."""
    if source.uri or isinstance(error, UnidentifiedImageError):  # its message names an object in memory
        return ""
    return f": {words_of(error)}"


def words_of(error: Exception) -> str:
    """Return the message of a foreign error, on one line and shortened."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def is_read_in_one_scan(data: bytes) -> bool:
    """Return whether the first scan of a JPEG has all of a sequential picture; also False for an odd header.

    If so, a decoder can drop pixels as it goes. For a progressive file, or one whose colours come one after
    the other, it holds coefficients of the whole picture (ITU-T T.81, B.2) at any scale: a small file may
    claim gigabytes that way.
    """
    at, component_count = 2, None
    while at + _COUNT_OFFSET < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # one of several before a marker
            at += 1
            continue
        if marker == _SCAN:
            return component_count == data[at + 4]
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if marker not in _SEGMENTS or length < 2:
            return False
        if marker in _SEQUENTIAL:
            component_count = data[at + _COUNT_OFFSET]
        at += 2 + length
    return False
