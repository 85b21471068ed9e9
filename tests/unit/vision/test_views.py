"""Views of images for LFM2-VL, against mlx-vlm's own processor: the same pixels, shapes and tiles."""

from __future__ import annotations

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")
pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

from icehouse_server.vision.views import ViewSettings, views_of  # noqa: E402

SAID = {
    "encoder_patch_size": 4,
    "downsample_factor": 2,
    "min_image_tokens": 2,
    "max_image_tokens": 6,
    "tile_size": 16,
    "resample": 2,
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.5, 0.4, 0.3],
}
SIZES = [
    (1, 1),
    (7, 5),
    (16, 16),
    (24, 16),
    (25, 30),
    (60, 40),
    (40, 60),
    (90, 20),
    (97, 101),
    (33, 4),
]


@pytest.mark.parametrize("size", SIZES)
def test_views_are_those_of_mlx_vlm(size: tuple[int, int]) -> None:
    from mlx_vlm.models.lfm2_vl.processing_lfm2_vl import Lfm2VlNumpyImageProcessor

    pixels = np.random.default_rng(size[0]).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    expected = Lfm2VlNumpyImageProcessor(**SAID)([image], return_tensors="np")
    views = views_of(image, ViewSettings.of(SAID, {}))
    assert (views.row_count, views.column_count) == (expected["image_rows"][0], expected["image_cols"][0])
    assert np.array_equal(views.patches, expected["pixel_values"])
    assert np.array_equal(views.mask, expected["pixel_attention_mask"] != 0)
    assert np.array_equal(views.shapes, expected["spatial_shapes"])


def test_the_second_file_counts_where_both_say_something() -> None:
    settings = ViewSettings.of({"tile_size": 16, "patch_size": 8}, {"image_processor": {"tile_size": 32}})
    assert (settings.tile_size, settings.patch_size, settings.token_size) == (32, 8, 16)


def test_what_is_too_narrow_is_refused() -> None:
    with pytest.raises(ValueError, match="40 patches"):
        views_of(Image.new("RGB", (200, 10)), ViewSettings.of(SAID, {}))
