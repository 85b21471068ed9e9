"""Image parts of a turn: what bytes and data URIs are taken for, and which lies of a data URI are refused."""

from __future__ import annotations

import base64
import dataclasses

import pytest
from icehouse.v1 import prompt_pb2
from icehouse_server.domain.chat import ImageDetail, ImageSource
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.messages.chat import conversation_of

from tests.fixtures.image_files import PNG
from tests.fixtures.rpc.fake_engine import MODEL_INFO

SEEING = dataclasses.replace(MODEL_INFO, sees_images=True)
BODY = base64.b64encode(PNG).decode("ascii")
FIELD = "chat.messages[0].parts[0].image"


def source_of(**image: object) -> ImageSource:
    part = prompt_pb2.ContentPart(image=prompt_pb2.ImagePart(**image))  # type: ignore[arg-type]
    chat = prompt_pb2.ChatPrompt(messages=[prompt_pb2.ChatMessage(role="user", parts=[part])])
    (source,) = conversation_of(chat, tools=(), choice=None, info=SEEING).images
    return source


@pytest.mark.parametrize(
    ("image", "media_type"),
    [
        ({"data": PNG}, ""),
        ({"data": PNG, "media_type": "image/png"}, "image/png"),
        ({"uri": f"data:image/png;base64,{BODY}"}, "image/png"),
        ({"uri": f"data:;base64,{BODY}"}, ""),
        ({"uri": f"data:;base64,{BODY}", "media_type": "image/png"}, "image/png"),
        ({"uri": f"data:image/png;name=a;base64,{BODY}", "media_type": "IMAGE/PNG"}, "IMAGE/PNG"),
    ],
)
def test_bytes_and_data_uris_are_the_same(image: dict[str, object], media_type: str) -> None:
    assert source_of(**image) == ImageSource(PNG, media_type, FIELD)


@pytest.mark.parametrize(
    "uri", ["https://example.org/a.png", "file:///etc/passwd", f"image/png;base64,{BODY}"]
)
def test_another_uri_is_left_to_who_knows_what_may_be_read(uri: str) -> None:
    assert source_of(uri=uri, media_type="image/png") == ImageSource(b"", "image/png", FIELD, uri)


@pytest.mark.parametrize(
    ("detail", "expected"),
    [
        (prompt_pb2.IMAGE_DETAIL_UNSPECIFIED, ImageDetail.AUTO),
        (prompt_pb2.IMAGE_DETAIL_AUTO, ImageDetail.AUTO),
        (prompt_pb2.IMAGE_DETAIL_LOW, ImageDetail.LOW),
        (prompt_pb2.IMAGE_DETAIL_HIGH, ImageDetail.HIGH),
    ],
)
@pytest.mark.parametrize(
    "image",
    [{"data": PNG}, {"uri": f"data:;base64,{BODY}"}, {"uri": "file:///a"}],
    ids=["data", "data URI", "URI"],
)
def test_every_source_has_its_detail(
    image: dict[str, object], detail: prompt_pb2.ImageDetail, expected: ImageDetail
) -> None:
    assert source_of(**image, detail=detail).detail is expected


@pytest.mark.parametrize(
    ("image", "field"),
    [
        ({}, FIELD),
        ({"data": b"", "media_type": "image/png"}, FIELD),
        ({"uri": ""}, f"{FIELD}.uri"),
        ({"uri": "data:image/png;base64"}, f"{FIELD}.uri"),
        ({"uri": f"data:image/png,{BODY}"}, f"{FIELD}.uri"),
        ({"uri": f"data:image/png;base64,{BODY[:-1]}"}, f"{FIELD}.uri"),
        ({"uri": f"data:image/png;base64, {BODY}"}, f"{FIELD}.uri"),
        ({"uri": f"data:image/png;base64,é{BODY}"}, f"{FIELD}.uri"),
        ({"uri": f"data:image/png;base64,{BODY}", "media_type": "image/jpeg"}, f"{FIELD}.media_type"),
        ({"data": PNG, "detail": 4}, f"{FIELD}.detail"),
        ({"uri": "https://example.org/a.png", "detail": -1}, f"{FIELD}.detail"),
    ],
)
def test_what_a_uri_says_must_be_so(image: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        source_of(**image)
    assert (caught.value.reason, caught.value.field) == (Reason.IMAGE_INVALID, field)
    assert len(caught.value.message) < 300
