"""Images of one model: tensors, their digest, and the tokens that stand for them."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from icehouse_server.domain.chat import ImageDetail, ImageSource
from icehouse_server.domain.request import ImageInput
from icehouse_server.errors import InvalidRequest, ModelError, Reason

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")
pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

from icehouse_server.vision.decoder import ImageLimits  # noqa: E402
from icehouse_server.vision.image_reader import ImageReader, PromptImages, spans_of  # noqa: E402
from icehouse_server.vision.processor import ImageProcessor, open_processor  # noqa: E402

from tests.fixtures.models import pixtral  # noqa: E402
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


def all_read(reader: ImageReader, sources: Sequence[ImageSource]) -> PromptImages:
    opened = reader.open(sources)
    for _ in sources:
        opened.read_next()
    return opened


def test_images_that_no_request_is_given_memory_for_end_the_preparing(folder: Path) -> None:
    source = ImageSource(png(60, 40), "image/png", "parts[0]")
    size = tiles(folder).prepare(noise(60, 40)).image.size_bytes
    later = [dataclasses.replace(source, field=f"parts[{n}]") for n in (1, 2)]
    limits = ImageLimits(image_count=4, size_bytes=10_000, pixel_count=10_000, prepared_bytes=2 * size)
    reader = ImageReader(tiles(folder), limits, image_token_id=7)
    assert len(all_read(reader, [source, later[0]]).texts.texts) == 2
    with pytest.raises(InvalidRequest) as caught:
        all_read(reader, [source, *later])
    assert (caught.value.reason, caught.value.field) == (Reason.IMAGE_INVALID, "parts[2]")
    assert caught.value.metadata == {"size_bytes": str(3 * size), "limit_bytes": str(2 * size)}


def test_headers_of_all_images_are_read_before_one_is_decoded(folder: Path) -> None:
    limits = ImageLimits(image_count=2, size_bytes=10_000, pixel_count=10_000, prepared_bytes=1 << 20)
    reader = ImageReader(tiles(folder), limits, image_token_id=7)
    small, large = (ImageSource(png(*size), "image/png", "parts[0]") for size in ((6, 4), (60, 40)))
    assert reader.open([small, large]).pixel_bytes == (6 * 4 * 12, 60 * 40 * 12)
    for sources in ([small] * 3, [small, dataclasses.replace(large, data=b"", field="parts[1]")]):
        with pytest.raises(InvalidRequest, match=r"limit is 2|parts\[1\]"):
            reader.open(sources)


def test_marks_in_a_text_are_no_images(folder: Path) -> None:
    image = tiles(folder).prepare(noise(60, 40)).image
    ids = [7] * image.feature_count
    (span,) = spans_of([1, *ids, 2], [image], image_token_id=7)
    assert (span.start_token_index, span.end_token_index, span.image) == (1, 1 + len(ids), image)
    for wrong in ([7, *ids], ids[1:], []):
        with pytest.raises(InvalidRequest, match="image placeholders") as caught:
            spans_of(wrong, [image], image_token_id=7)
        assert caught.value.reason is Reason.CHAT_INVALID


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="image processor"):
        tiles(tmp_path)


def change(folder: Path, name: str, **facts: Any) -> None:
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))


def test_a_folder_that_cuts_images_into_crops_is_refused(tmp_path: Path) -> None:
    folder = tiny_vision_dir(tmp_path, "gemma3")
    assert open_processor(folder, "gemma3").prepare(noise(60, 40)).image.is_seen_whole
    change(folder, "preprocessor_config.json", do_pan_and_scan=True)
    with pytest.raises(ModelError, match=r"crops \(do_pan_and_scan\).*set it to false") as caught:
        open_processor(folder, "gemma3")
    assert caught.value.reason is Reason.MODEL_INVALID


def test_a_prompt_that_ends_in_an_image_that_is_seen_whole_is_refused(folder: Path) -> None:
    image = tiles(folder).prepare(noise(60, 40)).image
    whole = dataclasses.replace(image, feature_count=2, is_seen_whole=True)
    (span,) = spans_of([7, 7, 1], [whole], image_token_id=7)
    assert span.end_token_index == 2
    assert spans_of([1, 7, 7], [dataclasses.replace(whole, is_seen_whole=False)], image_token_id=7)
    with pytest.raises(InvalidRequest, match="ends with an image; for this model text must follow") as caught:
        spans_of([1, 7, 7], [whole], image_token_id=7)
    assert (caught.value.reason, caught.value.field) == (Reason.CHAT_INVALID, "prompt.chat")


@pytest.fixture(scope="module", params=["pixtral", "mistral3"])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_dir(tmp_path_factory.mktemp("models"), request.param)


@pytest.mark.parametrize("size", [(60, 40), (40, 60), (24, 24), (25, 24), (9, 31), (1, 1), (300, 13)])
def test_rows_are_those_of_mlx_vlm(rows: Path, size: tuple[int, int]) -> None:
    from mlx_vlm.models.pixtral.image_processing_pixtral import PixtralImageProcessor

    unit = 2 * pixtral.PATCH if rows.name == "mistral3" else pixtral.PATCH
    theirs: Any = PixtralImageProcessor.from_pretrained(rows)
    expected = theirs([[noise(*size)]], patch_size=unit)
    prepared = open_processor(rows, rows.name).prepare(noise(*size))
    sizes, pixels = prepared.image.tensors
    height, width = expected["image_sizes"][0]
    assert np.frombuffer(sizes.data, np.int64).tolist() == [height, width]
    assert (pixels.dtype, pixels.shape) == ("F32", (1, 3, height, width))
    made = np.frombuffer(pixels.data, np.float32).reshape(pixels.shape)
    assert np.allclose(made, expected["pixel_values"], atol=1e-6)
    lines = prepared.text.removesuffix("[IMG_END]").split("[IMG_BREAK]")
    assert lines == ["[IMG]" * (width // unit)] * (height // unit) and prepared.text.endswith("[IMG_END]")
    assert prepared.image.feature_count == prepared.text.count("[IMG]")


def test_a_folder_with_one_file_about_images_is_read_alike(rows: Path, tmp_path: Path) -> None:
    """As transformers 5 writes them, Ministral 3's among them."""
    folder = tiny_vision_dir(tmp_path, rows.name)
    inner = json.loads((folder / "preprocessor_config.json").read_text())
    inner |= {"image_processor_type": "PixtralImageProcessorFast", "patch_size": pixtral.PATCH}
    change(folder, "processor_config.json", image_processor=inner)
    (folder / "preprocessor_config.json").unlink()
    one, two = (open_processor(each, rows.name).prepare(noise(60, 40)) for each in (rows, folder))
    assert one.text == two.text
    assert [t.data == u.data for t, u in zip(one.image.tensors, two.image.tensors, strict=True)] == [True] * 2
    assert one.image.digest != two.image.digest, "nobody has said that these files mean the same"


def test_rows_that_the_tower_has_no_places_for_are_refused(rows: Path, tmp_path: Path) -> None:
    folder = tiny_vision_dir(tmp_path, rows.name)
    side = pixtral.SIDE[rows.name]
    change(folder, "preprocessor_config.json", size={"longest_edge": 2 * side})
    processor = open_processor(folder, rows.name)
    assert processor.prepare(noise(side, 9)).image.feature_count
    with pytest.raises(
        ValueError, match=rf"scaled to {2 * side} x \d+ pixels; the tower takes {side} x {side}"
    ):
        processor.prepare(noise(2 * side, 9))


def test_an_image_that_is_scaled_to_nothing_is_refused_with_its_part(rows: Path) -> None:
    limits = ImageLimits(image_count=4, size_bytes=10_000, pixel_count=10_000, prepared_bytes=1 << 20)
    reader = ImageReader(open_processor(rows, rows.name), limits, image_token_id=7)
    with pytest.raises(InvalidRequest, match="900 x 1 pixels, cannot be prepared for this model") as caught:
        all_read(reader, [ImageSource(png(900, 1), "image/png", "parts[0]")])
    assert (caught.value.reason, caught.value.field) == (Reason.IMAGE_INVALID, "parts[0]")


def test_a_folder_that_does_not_scale_images_is_refused(tmp_path: Path) -> None:
    folder = tiny_vision_dir(tmp_path, "pixtral")
    change(folder, "preprocessor_config.json", do_resize=False)
    with pytest.raises(ModelError, match=r"\(do_resize\).*set it to true"):
        open_processor(folder, "pixtral")


def low(processor: ImageProcessor, image: Any) -> tuple[ImageInput, str]:
    prepared = processor.prepare(image, ImageDetail.LOW)
    assert prepared.text.count(processor.mark) in (prepared.image.feature_count, 1)
    assert prepared.image == processor.prepare(image, ImageDetail.LOW).image
    return prepared.image, prepared.text


def test_tiles_are_left_out_at_the_low_level(folder: Path) -> None:
    processor, image = tiles(folder), noise(60, 40)
    shown, text = low(processor, image)
    assert shown.feature_count == TILE_TOKEN_COUNT and "<row_" not in text and "<global-img>" in text
    whole = processor.prepare(image)
    assert whole.image.feature_count > TILE_TOKEN_COUNT and whole.image.digest != shown.digest
    assert processor.prepare(image, ImageDetail.HIGH) == processor.prepare(image, ImageDetail.AUTO) == whole


def test_a_grid_is_at_most_256_tokens_at_the_low_level(tmp_path: Path) -> None:
    folder = tiny_vision_dir(tmp_path, "qwen2_5_vl")
    config = folder / "preprocessor_config.json"
    facts = json.loads(config.read_text())
    side = facts["patch_size"] * facts["merge_size"]
    facts["max_pixels"] = 1024 * side**2
    facts["size"] = {"shortest_edge": 4 * side**2, "longest_edge": 1024 * side**2}
    config.write_text(json.dumps(facts))
    processor, large = open_processor(folder, "qwen2_5_vl"), noise(40 * side, 20 * side)
    assert processor.prepare(large).image.feature_count == 800
    shown, _ = low(processor, large)
    assert 128 < shown.feature_count <= 256
    # A small one is as it was, and so it is the same image.
    small = noise(6 * side, 4 * side)
    assert low(processor, small)[0].digest == processor.prepare(small).image.digest


def scaling(rows: Path, tmp_path: Path, size: Mapping[str, int]) -> ImageProcessor:
    """Return the processor of rows that scales to this size, with a tower that takes it."""
    folder = tiny_vision_dir(tmp_path, rows.name)
    change(folder, "preprocessor_config.json", size=size)
    tower = json.loads((folder / "config.json").read_text())["vision_config"]
    change(folder, "config.json", vision_config={**tower, "image_size": max(size.values())})
    return open_processor(folder, rows.name)


@pytest.mark.parametrize("size", [(400, 400), (400, 90), (90, 300), (1000, 9), (700, 699)])
def test_rows_are_at_most_256_tokens_in_their_shape_at_the_low_level(
    rows: Path, tmp_path: Path, size: tuple[int, int]
) -> None:
    processor = scaling(rows, tmp_path, {"longest_edge": 1000})
    whole = processor.prepare(noise(*size)).image
    shown, text = low(processor, noise(*size))
    lines = text.removesuffix("[IMG_END]").split("[IMG_BREAK]")
    columns = lines[0].count("[IMG]")
    assert lines == ["[IMG]" * columns] * len(lines) and shown.feature_count == columns * len(lines)
    assert min(whole.feature_count, 120) <= shown.feature_count <= 256
    # Within the part of a token that the sides are filled up by.
    assert abs(columns - len(lines) * size[0] / size[1]) <= max(size) / min(size)


@pytest.mark.parametrize("longest", [{"longest_edge": 64}, {"height": 64, "width": 64}])
def test_rows_are_never_larger_at_the_low_level(
    rows: Path, tmp_path: Path, longest: Mapping[str, int]
) -> None:
    processor = scaling(rows, tmp_path, longest)
    for size in ((900, 900), (61, 40), (8, 5)):
        shown, _ = low(processor, noise(*size))
        assert shown.digest == processor.prepare(noise(*size)).image.digest


def test_views_are_one_at_the_low_level(tmp_path: Path) -> None:
    processor = open_processor(tiny_vision_dir(tmp_path, "lfm2_vl"), "lfm2_vl")
    image = noise(400, 300)
    shown, text = low(processor, image)
    whole = processor.prepare(image)
    assert "<|img_thumbnail|>" in whole.text and "<|img_thumbnail|>" not in text
    assert shown.feature_count < whole.image.feature_count


def test_one_size_is_the_same_at_every_level(tmp_path: Path) -> None:
    processor = open_processor(tiny_vision_dir(tmp_path, "gemma3"), "gemma3")
    image = noise(60, 40)
    assert low(processor, image)[0] == processor.prepare(image).image


def test_an_image_too_narrow_for_a_view_is_refused_rather_than_cut(tmp_path: Path) -> None:
    processor = open_processor(tiny_vision_dir(tmp_path, "lfm2_vl"), "lfm2_vl")
    with pytest.raises(ValueError, match="patches; the limit for a view is"):
        processor.prepare(noise(4000, 10))


def test_the_second_file_counts_where_both_speak_of_views(tmp_path: Path) -> None:
    folder = tiny_vision_dir(tmp_path, "lfm2_vl")
    before, _ = low(open_processor(folder, "lfm2_vl"), noise(400, 300))
    fewer = {"image_processor": {"min_image_tokens": 1, "max_image_tokens": 1}}
    (folder / "processor_config.json").write_text(json.dumps(fewer))
    after, _ = low(open_processor(folder, "lfm2_vl"), noise(400, 300))
    assert after.feature_count == 1 < before.feature_count
