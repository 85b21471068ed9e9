"""Images of one model: tensors, their digest, and the tokens that stand for them."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from icehouse_server.domain.chat import ImageSource
from icehouse_server.errors import InvalidRequest, ModelError, Reason

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")
pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

from icehouse_server.vision.decoder import ImageLimits  # noqa: E402
from icehouse_server.vision.processor import ImageProcessor, open_processor, spans_of  # noqa: E402
from icehouse_server.vision.reader import ImageReader  # noqa: E402

from tests.fixtures.models.vision import TILE, TILE_TOKEN_COUNT, tiny_vision_dir  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_dir(tmp_path_factory.mktemp("models"))


def tiles(folder: Path) -> ImageProcessor:
    return open_processor(folder, "smolvlm")


def noise(width: int, height: int, seed: int = 0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    noise(width, height).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("size", "tile_count"), [((1, 1), 5), ((3 * TILE, TILE), 3), ((TILE, 900), 3), ((60, 40), 5)]
)
def test_each_tile_has_its_tokens_in_the_text(folder: Path, size: tuple[int, int], tile_count: int) -> None:
    prepared = tiles(folder).prepare(noise(*size))
    count = prepared.image.feature_count
    assert prepared.text.count("<image>") == count == tile_count * TILE_TOKEN_COUNT
    mask, pixels = prepared.image.tensors
    assert (pixels.dtype, mask.dtype) == ("F32", "BOOL")
    assert pixels.shape == (1, tile_count, 3, TILE, TILE)
    assert prepared.image.size_bytes == pixels.data.nbytes + mask.data.nbytes


def test_a_digest_is_of_the_pixels_and_of_what_makes_them(folder: Path, tmp_path: Path) -> None:
    image, other = noise(60, 40), noise(60, 40)
    digests = {tiles(folder).prepare(each).image.digest for each in (image, other)}
    assert len(digests) == 1
    other.putpixel((59, 39), (1, 2, 3))
    digests.add(tiles(folder).prepare(other).image.digest)
    again = tiny_vision_dir(tmp_path)
    config = again / "preprocessor_config.json"
    config.write_text(config.read_text().replace('"do_convert_rgb": true', '"resample": 2'))
    digests.add(tiles(again).prepare(image).image.digest)
    assert len(digests) == 3


def test_images_that_no_request_is_given_memory_for_end_the_preparing(folder: Path) -> None:
    source = ImageSource(png(60, 40), "image/png", "parts[0]")
    size = tiles(folder).prepare(noise(60, 40)).image.size_bytes
    later = [dataclasses.replace(source, field=f"parts[{n}]") for n in (1, 2)]
    broken = dataclasses.replace(source, data=b"", field="parts[3]")
    limits = ImageLimits(image_count=4, size_bytes=10_000, pixel_count=10_000, prepared_bytes=2 * size)
    reader = ImageReader(tiles(folder), limits, image_token_id=7)
    assert len(reader.read([source, later[0]]).texts.texts) == 2
    with pytest.raises(InvalidRequest) as caught:
        reader.read([source, *later, broken])
    assert (caught.value.reason, caught.value.field) == (Reason.IMAGE_INVALID, "parts[2]")
    assert caught.value.metadata == {"size_bytes": str(3 * size), "limit_bytes": str(2 * size)}


def test_marks_in_a_text_are_no_images(folder: Path) -> None:
    image = tiles(folder).prepare(noise(60, 40)).image
    ids = [7] * image.feature_count
    (span,) = spans_of([1, *ids, 2], [image], image_token_id=7)
    assert (span.start_token_index, span.end_token_index, span.image) == (1, 1 + len(ids), image)
    for wrong in ([7, *ids], ids[1:], []):
        with pytest.raises(InvalidRequest, match="marks of images") as caught:
            spans_of(wrong, [image], image_token_id=7)
        assert caught.value.reason is Reason.CHAT_INVALID


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="image processor"):
        tiles(tmp_path)
