"""Image processor of one model: turns decoded images into tensors, and into the text that stands for them.

transformers' processors for Pillow and numpy make the tensors, and mlx-vlm's for LFM2-VL, so torch is not
needed. The tensors identify the image: two files with equal pixels are the same image. Any thread.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, cast

import numpy as np
import numpy.typing as npt
from PIL import Image
from transformers import AutoImageProcessor

from icehouse_server.domain.blocks import HostTensor
from icehouse_server.domain.chat import ImageDetail
from icehouse_server.domain.request import ImageInput, image_digest
from icehouse_server.errors import ModelError, Reason
from icehouse_server.vision.decoder import words_of
from icehouse_server.vision.sent_tensors import PIXELS, Integers, Pixels, SentTensors

_DTYPES: Final = {"float32": "F32", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}
_CONFIGS: Final = ("preprocessor_config.json", "processor_config.json")
_GRID_TYPES: Final = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
_VIEW_TYPES: Final = frozenset({"lfm2_vl", "lfm2-vl"})
_ROW_TYPES: Final = frozenset({"pixtral", "mistral3"})
_DEFAULT_TILE_TOKENS: Final = 169
"""`image_seq_len` of SmolVLM's processor if the model's folder does not say."""
_LOW_TOKENS: Final = 256
"""Most tokens of an image at low detail: about 450 x 450 pixels."""
_DEFAULT_WHOLE_TOKENS: Final = 256
"""`image_seq_length` of Gemma 3's processor, likewise."""
_EMPTY_TILE: Final = "has a tile of zeros, which the model's code treats as no tile"
"""The model drops such tiles, and fails if none is left or the prompt has tokens for more of them."""
_CHANNELS: Final = 3
_DEFAULT_PATCH_SIZE: Final = 14
_DEFAULT_IMAGE_SIZE: Final = 336
_DEFAULT_MERGE_SIZE: Final = 2
"""Defaults of Pixtral's tower and Mistral 3 if config.json does not say, as in mlx-vlm."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image for the model, and the text that replaces its mark in the prompt."""

    image: ImageInput
    text: str


class ImageProcessor:
    """Processor of one model. `inner` is transformers' processor; digests depend on `fingerprint` too.
    `token_count` is the number of tokens of each image or tile, if it is the same for all."""

    mark = "<image>"
    """What the chat template writes for an image; the image's tokens are spelled the same."""

    def __init__(self, inner: Any, fingerprint: bytes, *, token_count: int = 0) -> None:
        self._inner = inner
        self._fingerprint = fingerprint
        self._token_count = token_count

    def prepare(self, image: Image.Image, detail: ImageDetail = ImageDetail.AUTO) -> PreparedImage:
        """Return the tensors and the text of one image. Raises whatever the inner processor raises for an
        image that it cannot prepare."""
        raise NotImplementedError

    def take(self, sent: SentTensors) -> list[ImageInput]:
        """Return images that a gateway has prepared; equal tensors give the same image as from `prepare`.
        Raises InvalidRequest for tensors that do not fit the model or the prompt's tokens."""
        raise NotImplementedError

    def _input(
        self,
        feature_count: int,
        *,
        grid: tuple[int, int, int] | None = None,
        is_seen_whole: bool = False,
        **arrays: npt.NDArray[Any],
    ) -> ImageInput:
        """Return an image of these arrays, which have the names that the model's code gives them."""
        tensors = tuple(_host(name, array) for name, array in arrays.items())
        digest = image_digest(self._fingerprint, tensors)
        return ImageInput(digest, tensors, feature_count, grid, is_seen_whole)


def open_processor(path: Path, model_type: str) -> ImageProcessor:
    """Read the processor of a model's folder. Raises ModelError if it cannot be loaded."""
    try:
        configs = [_read(path / name) for name in _CONFIGS]
        if model_type in _VIEW_TYPES:
            facts = [model_type, configs, importlib.metadata.version("pillow")]
            return ViewProcessor(_view_processor(*configs), json.dumps(facts, sort_keys=True).encode())
        inner: Any = AutoImageProcessor.from_pretrained(path, backend="pil")  # type: ignore[no-untyped-call]
    except Exception as error:  # its parsers may raise anything
        raise ModelError(
            Reason.MODEL_INVALID, f"the image processor in {path} cannot be loaded: {words_of(error)}"
        ) from error
    versions = [importlib.metadata.version(name) for name in ("transformers", "pillow")]
    facts = [model_type, type(inner).__name__, inner.to_dict(), configs, versions]
    fingerprint = json.dumps(facts, sort_keys=True, default=str).encode()
    if model_type in _GRID_TYPES:
        return GridProcessor(inner, fingerprint)
    if model_type == "gemma3":
        if getattr(inner, "do_pan_and_scan", False):
            raise _not_served(path, "cuts images into crops (do_pan_and_scan)", instead="false")
        token_count = int(configs[1].get("image_seq_length", _DEFAULT_WHOLE_TOKENS))
        return WholeProcessor(inner, fingerprint, token_count=token_count)
    if model_type in _ROW_TYPES:
        if not getattr(inner, "do_resize", True):
            raise _not_served(path, "leaves images as large as they are (do_resize)", instead="true")
        settings = RowSettings.of(_read(path / "config.json"), configs[1])
        return RowProcessor(inner, fingerprint + repr(settings).encode(), settings)
    token_count = int(configs[1].get("image_seq_len", _DEFAULT_TILE_TOKENS))
    return TileProcessor(inner, fingerprint, token_count=token_count)


class TileProcessor(ImageProcessor):
    """SmolVLM and Idefics3: an image is tiles with equally many tokens, then the whole image."""

    def prepare(self, image: Image.Image, detail: ImageDetail = ImageDetail.AUTO) -> PreparedImage:
        cut = {"do_image_splitting": False} if detail is ImageDetail.LOW else {}
        made = self._inner([[image]], return_row_col_info=True, **cut)
        rows, columns = made["rows"][0][0], made["cols"][0][0]
        # The mask comes as 8-byte integers, which take more memory than the pixels.
        mask = np.asarray(made["pixel_attention_mask"], dtype=bool)
        if _has_empty_tile(made[PIXELS]):
            raise ValueError(_EMPTY_TILE)
        return PreparedImage(self._image(mask, made[PIXELS]), self._text(rows, columns))

    def take(self, sent: SentTensors) -> list[ImageInput]:
        """Take [images, tiles, 3, side, side]; an image with fewer tiles than others has them first."""
        sent.expect(PIXELS, optional=("pixel_attention_mask",))
        side = int(self._inner.max_image_size["longest_edge"])
        shape = sent.shape(PIXELS, sent.count, None, _CHANNELS, side, side)
        counts = [len(sent.runs(index)) for index in range(sent.count)]
        for index, count in enumerate(counts):
            sent.check_runs(index, (self._token_count,) * count)
            sent.check_size(index, width=count * side, height=side)
        if max(counts) != shape[1]:
            sent.refuse(PIXELS, f"has {shape[1]} tiles; its tokens allow at most {max(counts)}")
        if sent.has("pixel_attention_mask"):
            shown = sent.flags("pixel_attention_mask", *shape[:2], side, side)
            if not all(shown[index, :count].all() for index, count in enumerate(counts)):
                sent.refuse("pixel_attention_mask", "hides part of a tile; this model's tiles must be whole")
        pixels = sent.pixels(*shape)
        if any(_has_empty_tile(pixels[index, :count]) for index, count in enumerate(counts)):
            sent.refuse(PIXELS, _EMPTY_TILE)
        mask = np.ones((1, max(counts), side, side), dtype=bool)
        return [
            self._image(mask[:, :count], pixels[index : index + 1, :count])
            for index, count in enumerate(counts)
        ]

    def _image(self, mask: npt.NDArray[np.bool_], pixels: Pixels) -> ImageInput:
        count = mask.shape[1] * self._token_count
        return self._input(count, pixel_attention_mask=mask, pixel_values=pixels)

    def _text(self, row_count: int, column_count: int) -> str:
        """As mlx-vlm and transformers write it: the tiles row by row, then the whole image."""
        border, tokens = "<fake_token_around_image>", self.mark * self._token_count
        text = ""
        for row in range(1, row_count + 1):
            tiles = [f"{border}<row_{row}_col_{n}>{tokens}" for n in range(1, column_count + 1)]
            text += "".join(tiles) + "\n"
        return f"{text}{chr(10) if text else ''}{border}<global-img>{tokens}{border}"


class GridProcessor(ImageProcessor):
    """Qwen2.5-VL and Qwen3-VL: an image is a grid of patches; a square of them becomes one token."""

    mark = "<|image_pad|>"

    def prepare(self, image: Image.Image, detail: ImageDetail = ImageDetail.AUTO) -> PreparedImage:
        made = self._inner([image], **self._size(detail))
        image_input = self._image(made["image_grid_thw"], made[PIXELS])
        return PreparedImage(image_input, self.mark * image_input.feature_count)

    def take(self, sent: SentTensors) -> list[ImageInput]:
        """Take [patches of all images, values], and each image's frames, rows and columns of patches."""
        sent.expect(PIXELS, "image_grid_thw", optional=("patches_per_image",))
        grids = sent.integers("image_grid_thw", sent.count, 3)
        side, patch = int(self._inner.merge_size), int(self._inner.patch_size)
        counts = [math.prod(grid) for grid in grids.tolist()]
        for index, (frames, rows, columns) in enumerate(grids.tolist()):
            if frames != 1 or not (rows and columns) or rows % side or columns % side:
                sent.refuse(
                    "image_grid_thw",
                    f"has {frames} x {rows} x {columns} for image {index}; an image is one frame of rows and "
                    f"columns that are multiples of {side}",
                )
            sent.check_size(index, width=columns * patch, height=rows * patch)
            sent.check_runs(index, (counts[index] // side**2,))
        name = "patches_per_image"
        if sent.has(name) and sent.integers(name, sent.count).tolist() != counts:
            sent.refuse(name, f"differs from image_grid_thw, which gives {counts}")
        width = _CHANNELS * int(self._inner.temporal_patch_size) * patch**2
        ends = np.cumsum(counts)
        pixels = np.split(sent.pixels(int(ends[-1]), width), ends[:-1])
        return [self._image(grids[index : index + 1], part) for index, part in enumerate(pixels)]

    def _image(self, grids: Integers, pixels: Pixels) -> ImageInput:
        frames, rows, columns = (int(n) for n in grids[0])
        side = int(self._inner.merge_size)
        grid = (frames, rows // side, columns // side)
        return self._input(math.prod(grid), grid=grid, image_grid_thw=grids, pixel_values=pixels)

    def _size(self, detail: ImageDetail) -> Mapping[str, Any]:
        """Return the size that replaces the processor's own: the fewest and most pixels of an image."""
        if detail is not ImageDetail.LOW:
            return {}
        size = self._inner.size
        side = int(self._inner.patch_size) * int(self._inner.merge_size)
        most = min(int(size["longest_edge"]), _LOW_TOKENS * side**2)
        return {"size": {"longest_edge": most, "shortest_edge": min(int(size["shortest_edge"]), most)}}


class WholeProcessor(ImageProcessor):
    """Gemma 3: every image is scaled to one size; each of its tokens attends to all of them."""

    mark = "<start_of_image>"

    def prepare(self, image: Image.Image, detail: ImageDetail = ImageDetail.AUTO) -> PreparedImage:
        """Return the same at every level of detail: there is only one size."""
        image_input = self._image(self._inner([image])[PIXELS])
        tokens = "<image_soft_token>" * self._token_count
        return PreparedImage(image_input, f"\n\n{self.mark}{tokens}<end_of_image>\n\n")

    def take(self, sent: SentTensors) -> list[ImageInput]:
        """Take [images, 3, height, width]."""
        sent.expect(PIXELS)
        height, width = (int(self._inner.size[side]) for side in ("height", "width"))
        sent.shape(PIXELS, sent.count, _CHANNELS, height, width)
        for index in range(sent.count):
            sent.check_runs(index, (self._token_count,))
        pixels = sent.pixels(sent.count, _CHANNELS, height, width)
        return [self._image(pixels[index : index + 1]) for index in range(sent.count)]

    def _image(self, pixels: Pixels) -> ImageInput:
        return self._input(self._token_count, is_seen_whole=True, pixel_values=pixels)


class ViewProcessor(ImageProcessor):
    """LFM2-VL: a large image is tiles and then the whole image, a small one only the whole image."""

    def prepare(self, image: Image.Image, detail: ImageDetail = ImageDetail.AUTO) -> PreparedImage:
        made = self._inner([image], return_tensors="np", do_image_splitting=detail is not ImageDetail.LOW)
        shapes, limit = made["spatial_shapes"], self._inner.max_num_patches
        # The processor would silently cut an image that is too narrow.
        if (patch_count := shapes.prod(axis=1).max()) > limit:
            raise ValueError(f"it is scaled to {patch_count} patches; the limit for a view is {limit}")
        tiles = [
            (row, column) for row in range(made["image_rows"][0]) for column in range(made["image_cols"][0])
        ]
        image_input = self._image(made["pixel_attention_mask"] != 0, made[PIXELS], shapes)
        return PreparedImage(image_input, self._text(tiles, self._counts(shapes)))

    def take(self, sent: SentTensors) -> list[ImageInput]:
        """Take [views of all images, patches, values], and each view's rows and columns of patches."""
        limit, size, side = (
            int(getattr(self._inner, name))
            for name in ("max_num_patches", "encoder_patch_size", "downsample_factor")
        )
        sent.expect(PIXELS, "spatial_shapes", optional=("pixel_attention_mask",))
        ends = np.cumsum([len(sent.runs(index)) for index in range(sent.count)])
        shapes = sent.integers("spatial_shapes", int(ends[-1]), 2).astype(np.int32)
        patch_counts = shapes.astype(np.int64).prod(axis=1)
        if not 0 < patch_counts.min() <= patch_counts.max() <= limit:
            sent.refuse("spatial_shapes", f"has a view whose patches are not 1 to {limit}")
        if (shapes % side).any():
            sent.refuse("spatial_shapes", f"has sides that are not multiples of {side}")
        parts = np.split(shapes, ends[:-1])
        for index, part in enumerate(parts):
            sent.check_runs(index, self._counts(part))
            length = int(part.astype(np.int64).prod(axis=1).sum()) * size
            sent.check_size(index, width=length, height=size)
        mask = np.arange(limit) < patch_counts[:, None]
        name = "pixel_attention_mask"
        if sent.has(name) and (sent.flags(name, *mask.shape) != mask).any():
            sent.refuse(name, "differs from spatial_shapes, which gives how many patches each view has")
        patches = sent.pixels(*mask.shape, _CHANNELS * size**2)
        split = zip(np.split(mask, ends[:-1]), np.split(patches, ends[:-1]), parts, strict=True)
        return [self._image(*each) for each in split]

    def _image(
        self, mask: npt.NDArray[np.bool_], patches: Pixels, shapes: npt.NDArray[np.int32]
    ) -> ImageInput:
        count = sum(self._counts(shapes))
        return self._input(count, pixel_attention_mask=mask, pixel_values=patches, spatial_shapes=shapes)

    def _counts(self, shapes: npt.NDArray[np.int32]) -> list[int]:
        """Return how many tokens each view has."""
        side = self._inner.downsample_factor
        return [-(-rows // side) * -(-columns // side) for rows, columns in shapes.tolist()]

    def _text(self, tiles: Sequence[tuple[int, int]], counts: Sequence[int]) -> str:
        """As mlx-vlm and transformers write it."""
        text = ""
        if len(tiles) > 1:
            for (row, column), count in zip(tiles, counts[:-1], strict=True):
                text += f"<|img_row_{row + 1}_col_{column + 1}|>{self.mark * count}"
            text += "<|img_thumbnail|>"
        return f"<|image_start|>{text}{self.mark * counts[-1]}<|image_end|>"


def _view_processor(preprocessor: Mapping[str, Any], processor: Mapping[str, Any]) -> Any:
    """Return mlx-vlm's processor from both files of a folder; where they differ, the second one counts.

    Transformers has it only for torch. The folder does not decide how images are cut: folders for MLX have
    other numbers than the models were trained with, and mlx-vlm ignores them.
    """
    from mlx_vlm.models.lfm2_vl import processing_lfm2_vl as mlx_vlm

    config = {**preprocessor.get("image_processor", preprocessor)}
    config |= processor.get("image_processor", processor)
    own = {name: value for name, value in config.items() if name not in mlx_vlm._OFFICIAL_SPLITTING_DEFAULTS}
    return mlx_vlm.Lfm2VlNumpyImageProcessor(**own)


@dataclasses.dataclass(frozen=True, slots=True)
class RowSettings:
    """What a folder says about images whose tokens come in rows."""

    patch_size: int
    """Side of a patch, in pixels."""
    merge_size: int
    """Side of a token, in patches."""
    image_size: int
    """Longest side for which the tower has positions, in pixels."""
    mark: str
    row_break: str
    """The text between two rows."""
    end: str

    @classmethod
    def of(cls, model: Mapping[str, Any], processor: Mapping[str, Any]) -> Self:
        """Read config.json, for the tower's sizes, and processor_config.json."""
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

    @property
    def token_size(self) -> int:
        """Side of a token, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def size_limit(self) -> int:
        """Longest side that the tower takes, in pixels."""
        return self.image_size // self.patch_size * self.patch_size


class RowProcessor(ImageProcessor):
    """Pixtral and Mistral 3: an image keeps its shape and becomes rows of tokens, with a text token after
    each row."""

    def __init__(self, inner: Any, fingerprint: bytes, settings: RowSettings) -> None:
        super().__init__(inner, fingerprint)
        self.mark = settings.mark
        self._settings = settings

    def prepare(self, image: Image.Image, detail: ImageDetail = ImageDetail.AUTO) -> PreparedImage:
        settings = self._settings
        unit = settings.token_size
        scale = self._low_size(image, unit) if detail is ImageDetail.LOW else {}
        made = self._inner([image], patch_size={"height": unit, "width": unit}, **scale)
        sizes = np.asarray(made["image_sizes"], dtype=np.int64)
        height, width = (int(side) for side in sizes[0])
        limit = settings.size_limit
        if max(width, height) > limit:
            raise ValueError(
                f"it is scaled to {width} x {height} pixels; the tower takes {limit} x {limit}: `size` in "
                "its preprocessor_config.json is too large"
            )
        row = self.mark * (width // unit)
        text = settings.row_break.join([row] * (height // unit)) + settings.end
        return PreparedImage(self._image(sizes, made[PIXELS]), text)

    def take(self, sent: SentTensors) -> list[ImageInput]:
        """Take [images, 3, height, width]; `image_sizes` says how much each image fills, all by default."""
        settings = self._settings
        sent.expect(PIXELS, optional=("image_sizes",))
        _, _, height, width = sent.shape(PIXELS, sent.count, _CHANNELS, None, None)
        sizes: Integers = np.array([[height, width]] * sent.count, dtype=np.int64)
        if sent.has("image_sizes"):
            sizes = sent.integers("image_sizes", sent.count, 2)
        unit = settings.token_size
        for index, (tall, wide) in enumerate(sizes.tolist()):
            limit = settings.size_limit
            within = 0 < tall <= min(height, limit) and 0 < wide <= min(width, limit)
            if not within or tall % unit or wide % unit:
                sent.refuse(
                    PIXELS,
                    f"has {tall} x {wide} pixels for image {index}; sides must be multiples of {unit} up to "
                    f"{settings.size_limit}, within the tensor's",
                )
            sent.check_size(index, width=wide, height=tall)
            sent.check_runs(index, (wide // unit,) * (tall // unit))
        pixels = sent.pixels(sent.count, _CHANNELS, height, width)
        return [
            self._image(sizes[index : index + 1], pixels[index : index + 1, :, :tall, :wide])
            for index, (tall, wide) in enumerate(sizes.tolist())
        ]

    def _image(self, sizes: Integers, pixels: Pixels) -> ImageInput:
        height, width = (int(side) // self._settings.token_size for side in sizes[0])
        return self._input(height * width, image_sizes=sizes, pixel_values=pixels)

    def _low_size(self, image: Image.Image, unit: int) -> Mapping[str, Any]:
        """Return the size that replaces the processor's own: the longest side, in pixels, with which the
        image has at most _LOW_TOKENS tokens of `unit` x `unit` pixels."""
        long, short = max(image.size), min(image.size)
        if -(-long // unit) * -(-short // unit) <= _LOW_TOKENS:
            return {}
        edge = math.isqrt(_LOW_TOKENS * long // short)
        while edge * -(-edge * short // long) > _LOW_TOKENS:
            edge -= 1
        own = dict(self._inner.size)
        limits = [int(own[name]) for name in ("longest_edge", "height", "width") if own.get(name)]
        return {"size": {"longest_edge": min(edge * unit, *limits)}}


def _has_empty_tile(tiles: Pixels) -> bool:
    """Whether a tile of [..., 3, side, side] is all zeros, or numbers that a device may flush to zero."""
    axes, least = (-3, -2, -1), np.finfo(np.float32).tiny
    return not ((tiles.max(axes) >= least) | (tiles.min(axes) <= -least)).all()


def _host(name: str, array: Any) -> HostTensor:
    whole = np.ascontiguousarray(array)
    data = memoryview(cast(Any, whole.reshape(-1).view(np.uint8)))
    return HostTensor(name, _DTYPES[whole.dtype.name], whole.shape, data)


def _not_served(path: Path, what: str, *, instead: str) -> ModelError:
    return ModelError(
        Reason.MODEL_INVALID,
        f"the image processor in {path} {what}, which is not served; set it to {instead} in "
        "preprocessor_config.json",
    )


def _read(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
