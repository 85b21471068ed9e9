"""Image reader of one model: from what callers sent to what the model takes. Any thread."""

from __future__ import annotations

from collections.abc import Sequence

from icehouse_server.domain.chat import ImageSource, ImageTexts
from icehouse_server.domain.request import ImageSpan, SentImages
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.vision.decoder import ImageLimits, decode_image, decoding_bytes
from icehouse_server.vision.processor import ImageProcessor, PreparedImage, check_end, spans_of
from icehouse_server.vision.tensors import SentTensors, check_bytes, places_of


class ImageReader:
    """Decodes images and has the model's processor make of them what it needs."""

    def __init__(self, processor: ImageProcessor, limits: ImageLimits, *, image_token_id: int) -> None:
        self._processor = processor
        self._limits = limits
        self._image_token_id = image_token_id

    def open(self, sources: Sequence[ImageSource]) -> OpenImages:
        """Read the headers of a prompt's images; raises InvalidRequest, which names the one at fault."""
        limit = self._limits.image_count
        if len(sources) > limit:
            raise InvalidRequest(
                Reason.IMAGE_INVALID,
                f"the request has {len(sources)} images; at most {limit} may be",
                field=sources[limit].field,
                metadata={"image_count": len(sources), "image_count_limit": limit},
            )

        return OpenImages(sources, self._processor, self._limits, image_token_id=self._image_token_id)

    def place(self, token_ids: Sequence[int], sent: SentImages) -> tuple[ImageSpan, ...]:
        """Return images that somebody else has prepared, among the prompt's tokens; raises InvalidRequest,
        which names what is at fault."""
        check_bytes(sent, self._limits)
        places = places_of(token_ids, sent, image_token_id=self._image_token_id)
        images = self._processor.take(SentTensors(sent, places, self._limits))
        spans = tuple(
            ImageSpan(place.start, place.stop, image) for place, image in zip(places, images, strict=True)
        )
        check_end(spans, token_count=len(token_ids), reason=Reason.IMAGE_INVALID, field=sent.places_field)
        return spans


class OpenImages:
    """The images of one prompt, decoded and prepared one after the other."""

    def __init__(
        self,
        sources: Sequence[ImageSource],
        processor: ImageProcessor,
        limits: ImageLimits,
        *,
        image_token_id: int,
    ) -> None:
        self._sources = sources
        self._processor = processor
        self._limits = limits
        self._image_token_id = image_token_id
        self._prepared: list[PreparedImage] = []
        self._size_bytes = 0
        self.pixel_bytes = tuple(decoding_bytes(source, limits) for source in sources)
        """The memory that decoding takes, of each, by its header."""

    def read_next(self) -> int:
        """Decode and prepare the next one and return its bytes as the model takes them; raises
        InvalidRequest, which names it."""
        source = self._sources[len(self._prepared)]
        prepared = self._prepare(source)
        self._size_bytes += prepared.image.size_bytes
        self._check_size(source, self._size_bytes)
        self._prepared.append(prepared)
        return prepared.image.size_bytes

    @property
    def texts(self) -> ImageTexts:
        """What stands for each of them in the prompt."""
        return ImageTexts(self._processor.mark, tuple(each.text for each in self._prepared))

    def spans(self, token_ids: Sequence[int]) -> tuple[ImageSpan, ...]:
        """Return where they are in a prompt's tokens; raises InvalidRequest where texts have marks."""
        images = [each.image for each in self._prepared]
        return spans_of(token_ids, images, image_token_id=self._image_token_id)

    def _check_size(self, source: ImageSource, size_bytes: int) -> None:
        """Refuse images that take more memory than a request is ever given; the next is not even decoded."""
        limit = self._limits.prepared_bytes
        if size_bytes > limit:
            raise InvalidRequest(
                Reason.IMAGE_INVALID,
                f"the images up to {source.field} take {size_bytes} bytes as the model takes them, and those "
                f"of one request may take {limit}; send fewer or smaller ones",
                field=source.field,
                metadata={"size_bytes": size_bytes, "limit_bytes": limit},
            )

    def _prepare(self, source: ImageSource) -> PreparedImage:
        image = decode_image(source, self._limits)
        try:
            return self._processor.prepare(image, source.detail)
        except Exception as error:  # a processor raises what it likes for a shape that it cannot take
            width, height = image.size
            raise InvalidRequest(
                Reason.IMAGE_INVALID,
                f"the image in {source.field}, {width} x {height} pixels, cannot be prepared for this model: "
                f"{' '.join(str(error).split())[:160]}",
                field=source.field,
                metadata={"width": width, "height": height},
            ) from error
