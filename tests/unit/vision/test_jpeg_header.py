"""JPEG headers: which pictures a decoder can make smaller as it goes, and how odd ones are taken."""

from __future__ import annotations

import io

import pytest

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")

from icehouse_server.vision.decoder import is_read_in_one_scan  # noqa: E402

from tests.fixtures.image_files import CMYK_JPEG, JPEG, PNG  # noqa: E402

FRAME, SCAN = JPEG.index(b"\xff\xc0"), JPEG.index(b"\xff\xda")


def jpeg(mode: str = "RGB", **options) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (40, 30)).save(buffer, "JPEG", **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        *(
            JPEG,
            CMYK_JPEG,
            jpeg(),
            jpeg("L"),
            jpeg("CMYK"),
            jpeg(subsampling=0),
            jpeg(restart_marker_blocks=2),
        ),
        jpeg(comment=b"\xff\xda\xff\xc2"),
        JPEG[:FRAME] + b"\xff\xff" + JPEG[FRAME:],
    ],
)
def test_what_encoders_write_by_default_is_read_in_one_scan(data: bytes) -> None:
    assert is_read_in_one_scan(data)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff", b"\xff\xd8\xff", PNG, JPEG[:SCAN], JPEG[:FRAME], JPEG[:FRAME] + JPEG[SCAN:]),
        *(jpeg(progressive=True), jpeg("L", progressive=True)),
        JPEG[: SCAN + 4] + b"\x01" + JPEG[SCAN + 5 :],
        JPEG[: FRAME + 1] + b"\xc9" + JPEG[FRAME + 2 :],
    ],
)
def test_other_pictures_are_held_whole(data: bytes) -> None:
    assert not is_read_in_one_scan(data)


@pytest.mark.parametrize(
    "odd", [b"\xff\xd0", b"\xff\x01", b"\xff\x00", b"\0", b"\xff\xe0\0\0", b"\xff\xe0\0\1"]
)
def test_no_oddity_hides_the_true_frame(odd: bytes) -> None:
    """Decoders pass over each of these in their own way; a false frame may stand where they do not look."""
    assert not is_read_in_one_scan(JPEG[:FRAME] + odd + JPEG[FRAME:])
