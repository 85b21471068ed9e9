"""Image reader of one model: turns callers' images into the model's inputs. Any thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from icehouse_server.domain.chat import ImageSource, ImageTexts
from icehouse_server.domain.request import ImageInput, ImageSpan, SentImages
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.vision.decoder import ImageLimits, decode_image, decoding_bytes, words_of
from icehouse_server.vision.processor import ImageProcessor, PreparedImage
from icehouse_server.vision.sent_tensors import SentTensors, check_bytes, locate_images


@dataclasses.dataclass(frozen=True, slots=True)
class ImageReader:
    """Decodes images and prepares them with the model's processor."""

    processor: ImageProcessor
    limits: ImageLimits
    image_token_id: int

    def open(self, sources: Sequence[ImageSource]) -> PromptImages:
        """Read the headers of a prompt's images; raises InvalidRequest, which names the faulty one."""
        limit = self.limits.image_count
        if len(sources) > limit:
            raise InvalidRequest(
                Reason.IMAGE_INVALID,
                f"the request has {len(sources)} images; the limit is {limit}",
                field=sources[limit].field,
                metadata={"image_count": len(sources), "image_count_limit": limit},
            )
        return PromptImages(self, sources)

    def place(self, token_ids: Sequence[int], sent: SentImages) -> tuple[ImageSpan, ...]:
        """Return the spans of images that a gateway has prepared; raises InvalidRequest."""
        check_bytes(sent, self.limits)
        located = locate_images(token_ids, sent, image_token_id=self.image_token_id)
        images = self.processor.take(SentTensors(sent, located, self.limits))
        spans = tuple(
            ImageSpan(tokens.start, tokens.stop, image) for tokens, image in zip(located, images, strict=True)
        )
        _check_end(spans, token_count=len(token_ids), reason=Reason.IMAGE_INVALID, field=sent.places_field)
        return spans


class PromptImages:
    """The images of one prompt, decoded and prepared one after the other."""

    def __init__(self, reader: ImageReader, sources: Sequence[ImageSource]) -> None:
        self._reader = reader
        self._sources = sources
        self._prepared: list[PreparedImage] = []
        self._size_bytes = 0
        self.pixel_bytes = tuple(decoding_bytes(source, reader.limits) for source in sources)
        """Bytes of memory that decoding each image will take, according to its header."""

    def read_next(self) -> int:
        """Decode and prepare the next image and return the bytes of its tensors; raises InvalidRequest, which
        names the image."""
        source = self._sources[len(self._prepared)]
        prepared = self._prepare(source)
        self._size_bytes += prepared.image.size_bytes
        limit = self._reader.limits.prepared_bytes
        if self._size_bytes > limit:
            raise InvalidRequest(
                Reason.IMAGE_INVALID,
                f"the images up to {source.field} take {self._size_bytes} bytes as model input, and "
                f"those of one request may take {limit}; send fewer or smaller ones",
                field=source.field,
                metadata={"size_bytes": self._size_bytes, "limit_bytes": limit},
            )
        self._prepared.append(prepared)
        return prepared.image.size_bytes

    @property
    def texts(self) -> ImageTexts:
        """The texts that stand for the images in the prompt."""
        return ImageTexts(
            self._reader.processor.mark,
            tuple(each.text for each in self._prepared),
            tuple(each.image.digest for each in self._prepared),
        )

    def spans(self, token_ids: Sequence[int]) -> tuple[ImageSpan, ...]:
        """Return where the images are in a prompt's tokens; raises InvalidRequest if texts contain marks."""
        images = [each.image for each in self._prepared]
        return spans_of(token_ids, images, image_token_id=self._reader.image_token_id)

    def _prepare(self, source: ImageSource) -> PreparedImage:
        image = decode_image(source, self._reader.limits)
        try:
            return self._reader.processor.prepare(image, source.detail)
        except Exception as error:  # a processor may raise anything for a shape that it cannot take
            width, height = image.size
            raise InvalidRequest(
                Reason.IMAGE_INVALID,
                f"the image in {source.field}, {width} x {height} pixels, cannot be prepared for this model: "
                f"{words_of(error)}",
                field=source.field,
                metadata={"width": width, "height": height},
            ) from error


def spans_of(
    token_ids: Sequence[int], images: Sequence[ImageInput], *, image_token_id: int
) -> tuple[ImageSpan, ...]:
    """Return where images are in a prompt, each from its first image token to its last.

    Raises InvalidRequest if the prompt has more or fewer such tokens, since then somebody wrote them as text,
    or if `_check_end` does.
    """
    positions = np.flatnonzero(np.asarray(token_ids) == image_token_id)
    wanted = sum(image.feature_count for image in images)
    if len(positions) != wanted:
        raise InvalidRequest(
            Reason.CHAT_INVALID,
            f"the prompt has {len(positions)} image tokens, but its images need {wanted}; texts must not "
            "contain the model's image placeholders",
            field="prompt.chat",
            metadata={"image_tokens": len(positions), "expected_image_tokens": wanted},
        )
    spans, first = [], 0
    for image in images:
        last = first + image.feature_count
        spans.append(ImageSpan(int(positions[first]), int(positions[last - 1]) + 1, image))
        first = last
    _check_end(spans, token_count=len(token_ids), reason=Reason.CHAT_INVALID, field="prompt.chat")
    return tuple(spans)


def _check_end(spans: Sequence[ImageSpan], *, token_count: int, reason: Reason, field: str) -> None:
    """Refuse a prompt that ends in an image that must run in one pass: a prompt's last token runs alone."""
    if spans and spans[-1].image.is_seen_whole and spans[-1].end_token_index == token_count:
        raise InvalidRequest(
            reason,
            "the prompt ends with an image; for this model text must follow it, as in its chat template",
            field=field,
        )
