"""Views of an image for LFM2-VL: one of a small image; tiles of a large one, and then all of it.

As `transformers` does it (`image_processing_lfm2_vl.py`), which has it for torch alone, and mlx-vlm
(`Lfm2VlNumpyImageProcessor`), whose pixels these are bit for bit. Pure functions of Pillow and numpy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from PIL import Image

_LEAST_TILES: Final = 2
_MOST_TILES: Final = 10
"""Folders for MLX have other numbers, but mlx-vlm ignores them: the models were trained with these."""


@dataclasses.dataclass(frozen=True, slots=True)
class ViewSettings:
    """A folder's settings of its images; sizes in pixels."""

    patch_size: int
    patches_per_token: int
    """Side by side, each way."""
    least_tokens: int
    most_tokens: int
    """Of a view of the whole."""
    tile_size: int
    tolerance: float
    """An image of up to so many times the pixels of the largest view is one view."""
    resample: Image.Resampling
    mean: tuple[float, ...]
    std: tuple[float, ...]
    factor: float

    @classmethod
    def of(cls, preprocessor: Mapping[str, Any], processor: Mapping[str, Any]) -> Self:
        """Read both files of a folder; the second one counts where they differ."""
        config = {**preprocessor.get("image_processor", preprocessor)}
        config |= processor.get("image_processor", processor)
        return cls(
            patch_size=int(config.get("encoder_patch_size", config.get("patch_size", 16))),
            patches_per_token=int(config.get("downsample_factor", 2)),
            least_tokens=int(config.get("min_image_tokens", 64)),
            most_tokens=int(config.get("max_image_tokens", 256)),
            tile_size=int(config.get("tile_size", 512)),
            tolerance=float(config.get("max_pixels_tolerance", 2.0)),
            resample=Image.Resampling(int(config.get("resample") or Image.Resampling.BICUBIC)),
            mean=tuple(config.get("image_mean", (0.5, 0.5, 0.5))),
            std=tuple(config.get("image_std", (0.5, 0.5, 0.5))),
            factor=float(config.get("rescale_factor", 1 / 255)),
        )

    @property
    def token_size(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.patches_per_token

    @property
    def most_patches(self) -> int:
        """Of a view; each is filled up to so many."""
        return max(self.most_tokens * self.patches_per_token**2, (self.tile_size // self.patch_size) ** 2)

    def tokens_of(self, *, rows: int, columns: int) -> int:
        """Return how many tokens a view of so many patches is."""
        side = self.patches_per_token
        return -(-rows // side) * -(-columns // side)


@dataclasses.dataclass(frozen=True, slots=True)
class Views:
    """One image, ready for the tower: its tiles row by row, then all of it."""

    row_count: int
    """Of tiles; 1 by 1 is one view of the whole."""
    column_count: int
    patches: npt.NDArray[np.float32]
    """[views, patches, values]"""
    mask: npt.NDArray[np.bool_]
    """[views, patches]: False where a view is filled up."""
    shapes: npt.NDArray[np.int32]
    """[views, 2]: rows and columns of each one's patches."""


def views_of(image: Image.Image, settings: ViewSettings, *, is_cut: bool = True) -> Views:
    """Scale and cut an image in RGB; without `is_cut` there is one view of it, however large it is.

    Raises ValueError for one so narrow that it has too many patches.
    """
    whole = image.resize(_whole_size(image, settings), settings.resample)
    columns, rows = _tiling(image, settings) if is_cut else (1, 1)
    views = [whole]
    if columns * rows > 1:
        tile = settings.tile_size
        scaled = image.resize((columns * tile, rows * tile), settings.resample)
        corners = [(column * tile, row * tile) for row in range(rows) for column in range(columns)]
        views = [*(scaled.crop((x, y, x + tile, y + tile)) for x, y in corners), whole]
    packed = [_patches(view, settings) for view in views]
    counts = np.array([len(each) for each in packed])
    if counts.max() > settings.most_patches:
        raise ValueError(
            f"it is scaled to {counts.max()} patches; a view has {settings.most_patches} at most"
        )
    filled = np.zeros((len(views), settings.most_patches, packed[0].shape[1]), np.float32)
    for into, each in zip(filled, packed, strict=True):
        into[: len(each)] = each
    size = settings.patch_size
    shapes = np.array([(view.height // size, view.width // size) for view in views], np.int32)
    return Views(rows, columns, filled, np.arange(settings.most_patches) < counts[:, None], shapes)


def _patches(view: Image.Image, settings: ViewSettings) -> npt.NDArray[np.float32]:
    """Return [patches, values], row by row."""
    mean, std = (np.array(each, dtype=np.float32) for each in (settings.mean, settings.std))
    pixels: npt.NDArray[np.float32] = np.array(view, dtype=np.float32)
    pixels *= settings.factor
    pixels -= mean
    pixels /= std
    size = settings.patch_size
    rows, columns = view.height // size, view.width // size
    cut = pixels[: rows * size, : columns * size].reshape(rows, size, columns, size, -1)
    return cut.transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)


def _whole_size(image: Image.Image, settings: ViewSettings) -> tuple[int, int]:
    """Return width and height of the view of all: whole tokens, of about the image's shape."""
    unit = settings.token_size
    sides = image.size
    area = math.prod(sides)
    rounded = [max(unit, round(side / unit) * unit) for side in sides]
    most, least = settings.most_tokens * unit**2, settings.least_tokens * unit**2
    if math.prod(rounded) > most:
        scale = math.sqrt(area / most)
        rounded = [max(unit, math.floor(side / scale / unit) * unit) for side in sides]
    elif math.prod(rounded) < least:
        scale = math.sqrt(least / area)
        rounded = [math.ceil(side * scale / unit) * unit for side in sides]
    return rounded[0], rounded[1]


def _tiling(image: Image.Image, settings: ViewSettings) -> tuple[int, int]:
    """Return columns and rows of tiles."""
    unit = settings.token_size
    rounded = [max(settings.patch_size, round(side / unit) * unit) for side in image.size]
    if math.prod(rounded) <= settings.most_tokens * unit**2 * settings.tolerance:
        return 1, 1
    shape = image.width / image.height
    grids = {
        (columns, rows)
        for columns in range(1, _MOST_TILES + 1)
        for rows in range(1, _MOST_TILES + 1)
        if _LEAST_TILES <= columns * rows <= _MOST_TILES
    }
    best, nearest = (1, 1), math.inf
    for grid in sorted(sorted(grids), key=math.prod):
        distance = abs(shape - grid[0] / grid[1])
        has_pixels = math.prod(image.size) > 0.5 * settings.tile_size**2 * math.prod(grid)
        if distance < nearest or (distance == nearest and has_pixels):
            best, nearest = grid, distance
    return best
