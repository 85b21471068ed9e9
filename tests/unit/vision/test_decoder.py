"""Images as callers send them: decoded where they are small and whole, refused by their headers else."""

from __future__ import annotations

import dataclasses
import io
import random

import pytest
from icehouse_server.domain.chat import ImageSource
from icehouse_server.errors import InvalidRequest, Reason

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")

from icehouse_server.vision.decoder import ImageLimits, decode_image, decoding_bytes  # noqa: E402

from tests.fixtures.image_files import BROKEN, WHOLE, drawn_file, png  # noqa: E402

LIMITS = ImageLimits(image_count=4, size_bytes=100_000, pixel_count=10_000, prepared_bytes=1 << 20)
FIELD = "chat.messages[0].parts[1].image"


def encoded(image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decoded(data: bytes, media_type: str = ""):
    return decode_image(ImageSource(data, media_type, FIELD), LIMITS)


def refusal(data: bytes, media_type: str = "") -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decoded(data, media_type)
    error = caught.value
    assert (error.reason, error.field) == (Reason.IMAGE_INVALID, FIELD) and FIELD in error.message
    return error


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_each_format_with_its_media_type_and_without(kind: str) -> None:
    data = encoded(Image.new("RGB", (5, 3), (200, 10, 30)), kind)
    for media_type in ("", f"image/{kind.lower()}", f"IMAGE/{kind}"):
        image = decoded(data, media_type)
        assert (image.mode, image.size) == ("RGB", (5, 3))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "LA", "CMYK", "I;16"])
def test_every_kind_of_pixel_becomes_rgb(mode: str) -> None:
    data = encoded(Image.new(mode, (1, 1)), "JPEG" if mode == "CMYK" else "PNG")
    assert (decoded(data).mode, decoded(data).size) == ("RGB", (1, 1))


@pytest.mark.parametrize(("kind", "pixel_bytes"), [("PNG", 12), ("JPEG", 12), ("GIF", 12), ("WEBP", 24)])
def test_what_decoding_takes_is_known_by_the_header(kind: str, pixel_bytes: int) -> None:
    data = encoded(Image.new("RGB", (50, 30), (200, 10, 30)), kind)
    assert decoding_bytes(ImageSource(data, "", FIELD), LIMITS) == 50 * 30 * pixel_bytes


def test_an_image_that_no_request_is_given_memory_to_decode_is_refused() -> None:
    limits = dataclasses.replace(LIMITS, prepared_bytes=50 * 30 * 12 - 1)
    source = ImageSource(encoded(Image.new("RGB", (50, 30))), "", FIELD)
    with pytest.raises(InvalidRequest, match="scale it down") as caught:
        decoding_bytes(source, limits)
    assert (caught.value.reason, caught.value.field) == (Reason.IMAGE_INVALID, FIELD)
    assert decoding_bytes(source, dataclasses.replace(limits, prepared_bytes=50 * 30 * 12))


@pytest.mark.parametrize("data", [b"", b"GIF89a", png(401, 100), encoded(Image.new("RGB", (500, 500)))])
def test_what_is_not_decoded_takes_nothing(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decoding_bytes(ImageSource(data, "", FIELD), LIMITS)


def test_an_image_on_its_side_is_put_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decoded(encoded(Image.new("RGB", (5, 3)), "JPEG", exif=exif)).size == (3, 5)


@pytest.mark.parametrize("size", [(401, 100), (20_000, 20_000), (60_000, 60_000)])
def test_too_many_pixels_are_refused_before_one_is_decoded(size: tuple[int, int]) -> None:
    error = refusal(png(*size))
    assert int(error.metadata["pixel_limit"]) >= 40_000 and "scale it down" in error.message


def photo(size: tuple[int, int]):
    """Return a picture whose upper left quarter is red."""
    image = Image.new("RGB", size, (0, 0, 200))
    image.paste((200, 0, 0), (0, 0, size[0] // 2, size[1] // 2))
    return image


def is_red(image, x: float, y: float) -> bool:
    red, _, blue = image.getpixel((int(image.width * x), int(image.height * y)))
    return red > blue


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(("PNG", size) for size in [(101, 100), (200, 200), (2, 20_000)]),
        *(("GIF", size) for size in [(101, 100), (200, 200)]),
        ("WEBP", (200, 200)),
        *(("JPEG", size) for size in [(101, 100), (200, 200), (400, 400), (390, 300), (3, 50_000)]),
    ],
)
def test_a_photo_larger_than_what_is_kept_is_scaled_down(kind: str, size: tuple[int, int]) -> None:
    data = encoded(photo(size), kind)
    image = decoded(data)
    assert image.mode == "RGB" and 5_000 < image.width * image.height <= LIMITS.pixel_count
    if min(size) > 9:
        assert image.width / image.height == pytest.approx(size[0] / size[1], rel=0.03)
        assert is_red(image, 0.25, 0.25) and not is_red(image, 0.75, 0.25) and not is_red(image, 0.25, 0.75)
    assert decoded(data).tobytes() == image.tobytes()


def test_what_is_kept_whole_is_as_it_was_decoded() -> None:
    noise = Image.effect_noise((100, 100), 90).convert("RGB")
    assert decoded(encoded(noise)).tobytes() == noise.tobytes()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_large_photo_on_its_side_is_put_upright(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = decoded(encoded(photo((200, 150)), kind, exif=exif))
    assert image.height > image.width
    assert is_red(image, 0.75, 0.25) and not is_red(image, 0.25, 0.25) and not is_red(image, 0.75, 0.75)


def test_most_pixels_of_a_large_jpeg_are_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    new = Image.core.new
    monkeypatch.setattr(Image.core, "new", lambda mode, size: sizes.append(size) or new(mode, size))
    decoded(encoded(photo((400, 400)), "JPEG"))
    assert sizes and max(width * height for width, height in sizes) <= 4 * LIMITS.pixel_count


def test_a_jpeg_that_is_held_whole_while_it_is_decoded_is_an_image_like_another() -> None:
    """A progressive one's coefficients are held for all of it, however small it is wanted."""
    assert decoded(encoded(photo((200, 200)), "JPEG", progressive=True)).size == (100, 100)
    assert refusal(encoded(photo((201, 200)), "JPEG", progressive=True)).metadata["pixel_limit"] == "40000"
    assert refusal(encoded(photo((401, 400)), "JPEG")).metadata["pixel_limit"] == "160000"


def test_a_phones_photo_with_a_second_picture_behind_it_is_the_first() -> None:
    data = encoded(photo((50, 40)), "MPO", save_all=True, append_images=[Image.new("RGB", (9, 9))])
    with Image.open(io.BytesIO(data)) as seen:
        assert seen.format == "MPO" and seen.is_animated
    assert decoded(data).size == (50, 40)
    large = encoded(photo((300, 300)), "MPO", save_all=True, append_images=[photo((300, 300))])
    assert decoded(large).size == (100, 100)


def test_too_many_bytes_are_refused_unseen() -> None:
    assert refusal(b"x" * 100_001).metadata == {"size_bytes": "100001", "limit_bytes": "100000"}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_whole_is_decoded(name: str) -> None:
    file = WHOLE[name]
    assert decoded(file.data, file.media_type).mode == "RGB"


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_in_words_fit_for_callers(name: str) -> None:
    file = BROKEN[name]
    message = refusal(file.data, file.media_type).message
    assert len(message) < 300 and "0x" not in message and "object at" not in message


def test_what_the_server_has_read_is_refused_without_a_word_of_what_was_in_it() -> None:
    broken = {
        name: file for name, file in BROKEN.items() if ": " in refusal(file.data, file.media_type).message
    }
    assert broken
    for file in broken.values():
        source = ImageSource(file.data, file.media_type, FIELD, uri="file:///srv/pictures/a.png")
        with pytest.raises(InvalidRequest) as caught:
            decode_image(source, LIMITS)
        assert caught.value.message in (
            f"the image in {FIELD} cannot be decoded",
            f"the image in {FIELD} is not a PNG, JPEG, WebP or GIF",
        )


def test_a_truncated_image_is_refused() -> None:
    noise = Image.effect_noise((50, 50), 90).convert("RGB")
    for kind in ("PNG", "JPEG", "WEBP"):
        data = encoded(noise, kind)
        refusal(data[: len(data) // 2])


def test_a_gif_cut_anywhere_is_refused_or_its_first_frame() -> None:
    """Whether it is animated shows behind its first frame alone, where the file may end in anything."""
    frames = [Image.new("RGB", (4, 4), (i * 80, 0, 0)) for i in range(2)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    for stop in range(1, len(data)):
        try:
            assert decoded(data[:stop]).size == (4, 4)
        except InvalidRequest as error:
            assert error.reason is Reason.IMAGE_INVALID


def test_damaged_bytes_are_an_image_within_the_limits_or_refused() -> None:
    sizes = set()
    for seed in range(1500):
        file = drawn_file(random.Random(seed))
        try:
            image = decoded(file.data, file.media_type)
        except InvalidRequest as error:
            assert error.reason is Reason.IMAGE_INVALID and len(error.message) < 300
        else:
            assert image.mode == "RGB" and image.width * image.height <= LIMITS.pixel_count
            sizes.add(image.size)
    assert {(8, 6), (1, 1)} <= sizes


def test_a_long_media_type_is_not_repeated() -> None:
    assert len(refusal(b"hello", "x" * 100_000).message) < 300


@pytest.mark.parametrize(
    "label", ["image/jpg", "image/jpeg", "IMAGE/TIFF", "image/*", "text/plain; charset=utf-8", "png", "\0"]
)
def test_the_bytes_say_what_an_image_is_and_not_its_label(label: str) -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        assert decoded(encoded(Image.new("RGB", (5, 3)), kind), label).size == (5, 3)


def test_the_label_of_what_is_no_image_is_reported() -> None:
    assert "'image/heic'" in refusal(b"\0\0\0\x18ftypheic", "image/heic").message


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_refused(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), (i * 80, 0, 0)) for i in range(3)]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert "animated" in refusal(data).message
