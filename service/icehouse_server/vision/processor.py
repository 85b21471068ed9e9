"""Image processor of one model: decoded images to tensors and to the text that stands for them in a prompt.

The tensors are made by the model's own processor, as transformers has it for Pillow and numpy: torch is not
needed. What identifies an image is made of them: two files with equal pixels are one image. Any thread.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, Self, cast

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor

from icehouse_server.domain.blocks import HostTensor
from icehouse_server.domain.chat import ImageDetail
from icehouse_server.domain.request import ImageInput, ImageSpan, image_digest
from icehouse_server.errors import InvalidRequest, ModelError, Reason
from icehouse_server.vision.views import Views, ViewSettings, views_of

_DTYPES: Final = {"float32": "F32", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}
_CONFIGS: Final = ("preprocessor_config.json", "processor_config.json")
_GRID_TYPES: Final = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
_VIEW_TYPES: Final = frozenset({"lfm2_vl", "lfm2-vl"})
_ROW_TYPES: Final = frozenset({"pixtral", "mistral3"})
_DEFAULT_TILE_TOKENS: Final = 169
"""`image_seq_len` of SmolVLM's processor where the model's folder does not say."""
_LOW_TOKENS: Final = 256
"""Of an image at the low level, where a model takes more for a larger one: about 450 x 450 pixels."""
_DEFAULT_WHOLE_TOKENS: Final = 256
"""`image_seq_length` of Gemma 3's processor, likewise."""
_DEFAULT_PATCH_SIZE: Final = 14
_DEFAULT_IMAGE_SIZE: Final = 336
_DEFAULT_MERGE_SIZE: Final = 2
"""Of Pixtral's tower and Mistral 3 where config.json does not say, as mlx-vlm builds them."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image for the model, and the text that takes the place of its mark in the prompt."""

    image: ImageInput
    text: str


class ImageProcessor(Protocol):
    """A model's own."""

    mark: str
    """What the chat template writes where an image stands, and what its tokens are spelled."""

    def prepare(self, image: Image.Image, detail: ImageDetail = ImageDetail.AUTO) -> PreparedImage:
        """Return the tensors and the text of one image. Raises what its library does for one that it cannot
        take."""
        ...


def open_processor(path: Path, model_type: str) -> ImageProcessor:
    """Read the processor of a model's folder. Raises ModelError when there is none to read."""
    try:
        configs = [_read(path / name) for name in _CONFIGS]
        if model_type in _VIEW_TYPES:
            facts = [model_type, configs, importlib.metadata.version("pillow")]
            return ViewProcessor(ViewSettings.of(*configs), json.dumps(facts, sort_keys=True).encode())
        inner: Any = AutoImageProcessor.from_pretrained(path, backend="pil")  # type: ignore[no-untyped-call]
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ModelError(
            Reason.MODEL_INVALID, f"the image processor in {path} cannot be loaded: {_words(error)}"
        ) from error
    versions = [importlib.metadata.version(name) for name in ("transformers", "pillow")]
    facts = [model_type, type(inner).__name__, inner.to_dict(), configs, versions]
    fingerprint = json.dumps(facts, sort_keys=True, default=str).encode()
    if model_type in _GRID_TYPES:
        return GridProcessor(inner, fingerprint)
    if model_type == "gemma3":
        if getattr(inner, "do_pan_and_scan", False):
            raise ModelError(
                Reason.MODEL_INVALID,
                f"the image processor in {path} cuts images into crops (do_pan_and_scan), which is not "
                "served; set it to false in preprocessor_config.json",
            )
        token_count = int(configs[1].get("image_seq_length", _DEFAULT_WHOLE_TOKENS))
        return WholeProcessor(inner, fingerprint, token_count=token_count)
    if model_type in _ROW_TYPES:
        if not getattr(inner, "do_resize", True):
            raise ModelError(
                Reason.MODEL_INVALID,
                f"the image processor in {path} leaves images as large as they are (do_resize), which is not "
                "served; set it to true in preprocessor_config.json",
            )
        settings = RowSettings.of(_read(path / "config.json"), configs[1])
        return RowProcessor(inner, fingerprint + repr(settings).encode(), settings)
    tile_token_count = int(configs[1].get("image_seq_len", _DEFAULT_TILE_TOKENS))
    return TileProcessor(inner, fingerprint, tile_token_count=tile_token_count)


class TileProcessor:
    """Of SmolVLM and Idefics3: an image is cut into tiles, each so many tokens, and shown once more whole."""

    mark = "<image>"

    def __init__(self, inner: Any, fingerprint: bytes, *, tile_token_count: int) -> None:
        self._inner = inner
        self._fingerprint = fingerprint
        self._tile_token_count = tile_token_count

    def prepare(self, image: Image.Image, detail: ImageDetail = ImageDetail.AUTO) -> PreparedImage:
        cut = {"do_image_splitting": False} if detail is ImageDetail.LOW else {}
        made = self._inner([[image]], return_row_col_info=True, **cut)
        rows, columns = made["rows"][0][0], made["cols"][0][0]
        # The mask comes as integers of eight bytes, and is more than the pixels then.
        mask = np.asarray(made["pixel_attention_mask"], dtype=bool)
        tensors = (_host("pixel_attention_mask", mask), _host("pixel_values", made["pixel_values"]))
        digest = image_digest(self._fingerprint, tensors)
        found = ImageInput(digest, tensors, feature_count=mask.shape[1] * self._tile_token_count)
        return PreparedImage(found, self._text(rows, columns))

    def _text(self, row_count: int, column_count: int) -> str:
        """As mlx-vlm and transformers write it: the tiles row by row, then the whole."""
        border, tokens = "<fake_token_around_image>", self.mark * self._tile_token_count
        text = ""
        for row in range(1, row_count + 1):
            tiles = [f"{border}<row_{row}_col_{n}>{tokens}" for n in range(1, column_count + 1)]
            text += "".join(tiles) + "\n"
        return f"{text}{chr(10) if text else ''}{border}<global-img>{tokens}{border}"


class GridProcessor:
    """Of Qwen2.5-VL and Qwen3-VL: an image is a grid of patches, so many of which side by side become one
    token."""

    mark = "<|image_pad|>"

    def __init__(self, inner: Any, fingerprint: bytes) -> None:
        self._inner = inner
        self._fingerprint = fingerprint

    def prepare(self, image: Image.Image, detail: ImageDetail = ImageDetail.AUTO) -> PreparedImage:
        made = self._inner([image], **self._size(detail))
        tensors = tuple(_host(name, made[name]) for name in ("image_grid_thw", "pixel_values"))
        frames, rows, columns = (int(n) for n in made["image_grid_thw"][0])
        side = int(self._inner.merge_size)
        grid = (frames, rows // side, columns // side)
        count = math.prod(grid)
        digest = image_digest(self._fingerprint, tensors)
        return PreparedImage(ImageInput(digest, tensors, count, grid), self.mark * count)

    def _size(self, detail: ImageDetail) -> Mapping[str, Any]:
        """Return what of the processor's own size is replaced; pixels in all, as it names them."""
        if detail is not ImageDetail.LOW:
            return {}
        size = self._inner.size
        side = int(self._inner.patch_size) * int(self._inner.merge_size)
        most = min(int(size["longest_edge"]), _LOW_TOKENS * side**2)
        return {"size": {"longest_edge": most, "shortest_edge": min(int(size["shortest_edge"]), most)}}


class WholeProcessor:
    """Of Gemma 3: every image is scaled to one size and is so many tokens, each of which sees all of it."""

    mark = "<start_of_image>"

    def __init__(self, inner: Any, fingerprint: bytes, *, token_count: int) -> None:
        self._inner = inner
        self._fingerprint = fingerprint
        self._token_count = token_count

    def prepare(self, image: Image.Image, detail: ImageDetail = ImageDetail.AUTO) -> PreparedImage:
        """Return the same at every level: there is one size."""
        tensors = (_host("pixel_values", self._inner([image])["pixel_values"]),)
        digest = image_digest(self._fingerprint, tensors)
        found = ImageInput(digest, tensors, self._token_count, is_seen_whole=True)
        tokens = "<image_soft_token>" * self._token_count
        return PreparedImage(found, f"\n\n{self.mark}{tokens}<end_of_image>\n\n")


class ViewProcessor:
    """Of LFM2-VL: a large image is tiles and all of it once more, a small one is that alone."""

    mark = "<image>"

    def __init__(self, settings: ViewSettings, fingerprint: bytes) -> None:
        self._settings = settings
        self._fingerprint = fingerprint

    def prepare(self, image: Image.Image, detail: ImageDetail = ImageDetail.AUTO) -> PreparedImage:
        views = views_of(image, self._settings, is_cut=detail is not ImageDetail.LOW)
        tensors = (
            _host("pixel_attention_mask", views.mask),
            _host("pixel_values", views.patches),
            _host("spatial_shapes", views.shapes),
        )
        counts = [
            self._settings.tokens_of(rows=rows, columns=columns) for rows, columns in views.shapes.tolist()
        ]
        digest = image_digest(self._fingerprint, tensors)
        return PreparedImage(ImageInput(digest, tensors, sum(counts)), self._text(views, counts))

    def _text(self, views: Views, counts: Sequence[int]) -> str:
        """As mlx-vlm and transformers write it."""
        places = [(row, column) for row in range(views.row_count) for column in range(views.column_count)]
        text = ""
        if len(places) > 1:
            for (row, column), count in zip(places, counts[:-1], strict=True):
                text += f"<|img_row_{row + 1}_col_{column + 1}|>{self.mark * count}"
            text += "<|img_thumbnail|>"
        return f"<|image_start|>{text}{self.mark * counts[-1]}<|image_end|>"


@dataclasses.dataclass(frozen=True, slots=True)
class RowSettings:
    """What a folder says of images whose tokens stand in rows."""

    patch_size: int
    """Pixels of a patch's side."""
    merge_size: int
    """Patches of a token's side."""
    image_size: int
    """Pixels of the largest image's side whose patches' places the tower knows."""
    mark: str
    row_break: str
    """Between two rows."""
    end: str

    @classmethod
    def of(cls, model: Mapping[str, Any], processor: Mapping[str, Any]) -> Self:
        """Read config.json, whose sizes are the tower's, and processor_config.json."""
        tower = model.get("vision_config") or {}
        merges = model.get("model_type") == "mistral3"
        return cls(
            patch_size=int(tower.get("patch_size", _DEFAULT_PATCH_SIZE)),
            merge_size=int(model.get("spatial_merge_size", _DEFAULT_MERGE_SIZE)) if merges else 1,
            image_size=int(tower.get("image_size", _DEFAULT_IMAGE_SIZE)),
            mark=str(processor.get("image_token", "[IMG]")),
            row_break=str(processor.get("image_break_token", "[IMG_BREAK]")),
            end=str(processor.get("image_end_token", "[IMG_END]")),
        )


class RowProcessor:
    """Of Pixtral and Mistral 3: an image keeps its shape and is rows of tokens, as many as it has room for,
    with a token of text behind each row."""

    def __init__(self, inner: Any, fingerprint: bytes, settings: RowSettings) -> None:
        self.mark = settings.mark
        self._inner = inner
        self._fingerprint = fingerprint
        self._settings = settings

    def prepare(self, image: Image.Image, detail: ImageDetail = ImageDetail.AUTO) -> PreparedImage:
        settings = self._settings
        unit = settings.patch_size * settings.merge_size
        scale = self._low_size(image, unit) if detail is ImageDetail.LOW else {}
        made = self._inner([image], patch_size={"height": unit, "width": unit}, **scale)
        sizes = np.asarray(made["image_sizes"], dtype=np.int64)
        height, width = (int(side) for side in sizes[0])
        limit = settings.image_size // settings.patch_size * settings.patch_size
        if max(width, height) > limit:
            raise ValueError(
                f"it is scaled to {width} x {height} pixels; the tower takes {limit} x {limit}: `size` in "
                "its preprocessor_config.json is too large"
            )
        rows, columns = height // unit, width // unit
        tensors = (_host("image_sizes", sizes), _host("pixel_values", made["pixel_values"]))
        digest = image_digest(self._fingerprint, tensors)
        row = self.mark * columns
        text = settings.row_break.join([row] * rows) + settings.end
        return PreparedImage(ImageInput(digest, tensors, rows * columns), text)

    def _low_size(self, image: Image.Image, unit: int) -> Mapping[str, Any]:
        """Return what of the processor's own size is replaced: the longest side, in pixels, with which the
        image is few enough tokens of `unit` pixels each way, in the shape that it has."""
        long, short = max(image.size), min(image.size)
        if -(-long // unit) * -(-short // unit) <= _LOW_TOKENS:
            return {}
        edge = math.isqrt(_LOW_TOKENS * long // short)
        while edge * -(-edge * short // long) > _LOW_TOKENS:
            edge -= 1
        own = dict(self._inner.size)
        limits = [int(own[name]) for name in ("longest_edge", "height", "width") if own.get(name)]
        return {"size": {"longest_edge": min(edge * unit, *limits)}}


def spans_of(
    token_ids: Sequence[int], images: Sequence[ImageInput], *, image_token_id: int
) -> tuple[ImageSpan, ...]:
    """Return where images stand in a prompt, each from its first token that the tower makes to its last.

    Raises InvalidRequest when the prompt has more or fewer such tokens: somebody wrote them as text; and when
    it ends inside what must be run in one pass, since a prompt's last token is run by itself.
    """
    places = np.flatnonzero(np.asarray(token_ids) == image_token_id)
    wanted = sum(image.feature_count for image in images)
    if len(places) != wanted:
        raise InvalidRequest(
            Reason.CHAT_INVALID,
            f"the prompt has {len(places)} image tokens and its images have {wanted}; texts must not contain "
            "the model's own marks of images",
            field="chat",
            metadata={"image_tokens": len(places), "expected_image_tokens": wanted},
        )
    spans, first = [], 0
    for image in images:
        last = first + image.feature_count
        spans.append(ImageSpan(int(places[first]), int(places[last - 1]) + 1, image))
        first = last
    if spans and spans[-1].image.is_seen_whole and spans[-1].end_token_index == len(token_ids):
        raise InvalidRequest(
            Reason.CHAT_INVALID,
            "the prompt ends with an image; for this model text must follow it, as its own template writes",
            field="chat",
        )
    return tuple(spans)


def _host(name: str, array: Any) -> HostTensor:
    whole = np.ascontiguousarray(array)
    data = memoryview(cast(Any, whole.reshape(-1).view(np.uint8)))
    return HostTensor(name, _DTYPES[whole.dtype.name], whole.shape, data)


def _read(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
