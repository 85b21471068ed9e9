"""Picture of the pages on images: the file is what the script draws, and a PNG to others too."""

from __future__ import annotations

import io

import pytest

from docs import picture


def test_the_file_has_the_pixels_that_the_script_draws() -> None:
    assert picture.rows_of(picture.PATH.read_bytes()) == picture.rows()


def test_others_read_it_as_what_it_is() -> None:
    pillow = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")
    with pillow.open(io.BytesIO(picture.png())) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        assert image.tobytes() == b"".join(picture.rows())
