"""Image decoder: encoded bytes to pixels, with Pillow, refused by the header before anything is decoded.

Pillow is of the optional extra `vision`. Any thread.
"""

from __future__ import annotations

import dataclasses
import io
from typing import Final

from PIL import Image, ImageOps, UnidentifiedImageError

from icehouse_server.domain.chat import ImageSource
from icehouse_server.errors import InvalidRequest, Reason

_MEDIA_TYPES: Final = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
}
_FORMATS: Final = tuple(_MEDIA_TYPES.values())
PIXEL_LIMIT: Final = 89_478_485
"""Pillow's own bound, beyond which it warns or refuses by itself."""
_PIXEL_BYTES: Final = 12
"""What a pixel takes while it is decoded and turned: Pillow's image of four bytes, upright, and as RGB."""
_WEBP_PIXEL_BYTES: Final = 24
"""Of WebP: libwebp's canvas, and what it hands over, come to that (both measured, Pillow 12, Linux)."""
_SHOWN_LENGTH: Final = 80
"""Of what callers say in words of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageLimits:
    """What one request's images may be, and one image."""

    image_count: int
    size_bytes: int
    """Encoded, of one image."""
    pixel_count: int
    """Width times height, of one image."""
    prepared_bytes: int
    """Of all images of a request, as the model takes them, and of one while it is decoded."""


def decode_image(source: ImageSource, limits: ImageLimits) -> Image.Image:
    """Return the image upright and in RGB; raises InvalidRequest, which names its part of the request.

    Format, size and animation are read from the header, so that what is too large is never decoded.
    """
    image = _opened(source, limits)
    try:
        # A GIF's second frame is looked for only now.
        if not getattr(image, "is_animated", False):
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # each of Pillow's decoders raises what it likes
        raise _invalid(source, f"cannot be decoded{_detail(source, error)}") from error
    raise _invalid(source, "is animated; send one frame of it")


def decoding_bytes(source: ImageSource, limits: ImageLimits) -> int:
    """Return the memory that decoding an image takes, by its header; raises InvalidRequest as decoding does,
    and for more than a request is ever given."""
    image = _opened(source, limits)
    width, height = image.size
    size_bytes = width * height * (_WEBP_PIXEL_BYTES if image.format == "WEBP" else _PIXEL_BYTES)
    if size_bytes > limits.prepared_bytes:
        raise _invalid(
            source,
            f"takes {size_bytes} bytes to decode, {width} x {height} pixels; a request's may take "
            f"{limits.prepared_bytes}; scale it down",
            size_bytes=size_bytes,
            limit_bytes=limits.prepared_bytes,
        )
    return size_bytes


def _opened(source: ImageSource, limits: ImageLimits) -> Image.Image:
    """Read the header of an image that is not too large."""
    size = len(source.data)
    if size > limits.size_bytes:
        raise _invalid(
            source,
            f"has {size} bytes; an image may have {limits.size_bytes}",
            size_bytes=size,
            limit_bytes=limits.size_bytes,
        )
    image = _of_format(source, limits)
    width, height = image.size
    if width * height > limits.pixel_count:
        raise _too_many_pixels(source, limits, f"{width} x {height}")
    return image


def _of_format(source: ImageSource, limits: ImageLimits) -> Image.Image:
    wanted = _MEDIA_TYPES.get(source.media_type.lower()) if source.media_type else None
    if source.media_type and wanted is None:
        known = ", ".join(_MEDIA_TYPES)
        raise _invalid(
            source, f"is said to be {source.media_type[:_SHOWN_LENGTH]!r}; an image may be {known}"
        )
    try:
        image = Image.open(io.BytesIO(source.data), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels(source, limits, f"more than {PIXEL_LIMIT}") from error
    except UnidentifiedImageError as error:  # its words name the object in this process's memory
        raise _invalid(source, "is no PNG, JPEG, WebP or GIF") from error
    except Exception as error:  # as above
        raise _invalid(source, f"is no PNG, JPEG, WebP or GIF{_detail(source, error)}") from error
    if wanted is not None and image.format != wanted:
        raise _invalid(source, f"is said to be {source.media_type!r}, and is {image.format}")
    return image


def _too_many_pixels(source: ImageSource, limits: ImageLimits, shown: str) -> InvalidRequest:
    return _invalid(
        source,
        f"has {shown} pixels; an image may have {limits.pixel_count}; scale it down",
        pixels=shown,
        pixel_limit=limits.pixel_count,
    )


def _invalid(source: ImageSource, complaint: str, **facts: object) -> InvalidRequest:
    message = f"the image in {source.field} {complaint}"
    return InvalidRequest(Reason.IMAGE_INVALID, message, field=source.field, metadata=facts)


def _detail(source: ImageSource, error: Exception) -> str:
    """Return the decoder's words, which may have bytes of the file in them: nothing for one that the caller
    only named."""
    if source.uri:
        return ""
    return f": {' '.join(str(error).split())[:160] or type(error).__name__}"
