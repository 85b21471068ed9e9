"""Image parts of a turn: what bytes and data URIs are taken for, and where images of tools' results go."""

from __future__ import annotations

import base64
import dataclasses
import urllib.parse

import pytest
from icehouse.v1 import prompt_pb2, tool_pb2
from icehouse_server.domain.chat import ImageDetail, ImageSource
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.messages.conversations import conversation_of
from icehouse_server.text.prompt_normalizer import normalized

from tests.fixtures.image_files import PNG
from tests.fixtures.rpc.fake_engine import MODEL_INFO

SEEING = dataclasses.replace(MODEL_INFO, sees_images=True)
BODY = base64.b64encode(PNG).decode("ascii")
FIELD = "prompt.chat.messages[0].parts[0].image"


def source_of(**image: object) -> ImageSource:
    part = prompt_pb2.ContentPart(image=prompt_pb2.ImagePart(**image))  # type: ignore[arg-type]
    chat = prompt_pb2.ChatPrompt(messages=[prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, parts=[part])])
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
        ({"uri": f"DATA:IMAGE/PNG;BASE64,{BODY}"}, "IMAGE/PNG"),
        ({"uri": f"data:image/jpg;charset=utf-8;base64,{BODY}"}, "image/jpg"),
        ({"uri": f"data:image/png; base64,{BODY}"}, "image/png"),
        ({"uri": f"data:image/png;base64,{BODY}", "media_type": "image/jpeg"}, "image/jpeg"),
        ({"uri": f"data:image/png;base64, {BODY[:40]}\r\n{BODY[40:]}\n"}, "image/png"),
        ({"uri": f"data:image/png;base64,{BODY.rstrip('=')}"}, "image/png"),
        ({"uri": f"data:image/png;base64,{urllib.parse.quote(BODY, safe='')}"}, "image/png"),
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
        ({"uri": "data:image/png;base64,iVBOR"}, f"{FIELD}.uri"),
        ({"uri": "data:image/png;base64,"}, f"{FIELD}.uri"),
        ({"uri": f"data:image/png;base64,{BODY}!"}, f"{FIELD}.uri"),
        ({"uri": f"data:image/png;base64,%e9{BODY}"}, f"{FIELD}.uri"),
        ({"uri": f"data:base64,{BODY}"}, f"{FIELD}.uri"),
        ({"uri": f"data:image/png;base64,é{BODY}"}, f"{FIELD}.uri"),
        ({"data": PNG, "detail": 4}, f"{FIELD}.detail"),
        ({"uri": "https://example.org/a.png", "detail": -1}, f"{FIELD}.detail"),
    ],
)
def test_what_a_uri_says_must_be_so(image: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        source_of(**image)
    assert (caught.value.reason, caught.value.field) == (Reason.IMAGE_INVALID, field)
    assert len(caught.value.message) < 300


Turn = tuple[str, str, list[tuple[int, bytes]]]


def turns_of(*messages: dict[str, object]) -> list[Turn]:
    """Return role, text and images of what becomes of messages."""
    chat = prompt_pb2.ChatPrompt(
        messages=[
            prompt_pb2.ChatMessage(**{**each, "role": f"ROLE_{str(each['role']).upper()}"})  # type: ignore[arg-type]
            for each in messages
        ]
    )
    conversation = conversation_of(chat, tools=(), choice=None, info=SEEING)
    return [
        (turn.role, turn.content, [(each.position, each.source.data) for each in turn.images])
        for turn in conversation.messages
    ]


def result(text: str, *images: bytes) -> dict[str, object]:
    shown = [prompt_pb2.ContentPart(image=prompt_pb2.ImagePart(data=data)) for data in images]
    return {"role": "tool", "parts": [*([prompt_pb2.ContentPart(text=text)] if text else []), *shown]}


ASKED = {"role": "user", "content": "Look"}


@pytest.mark.parametrize("following", [[], [{"role": "assistant", "content": "I see"}], [ASKED]])
def test_a_picture_in_a_tools_result_is_shown_by_the_user(following: list[dict[str, object]]) -> None:
    said: list[Turn] = [(str(each["role"]), str(each["content"]), []) for each in following]
    assert turns_of(ASKED, result("taken", b"1", b"2"), *following) == [
        ("user", "Look", []),
        ("tool", "taken", []),
        ("user", "", [(0, b"1"), (0, b"2")]),
        *said,
    ]


def test_pictures_of_several_results_say_whose_they_are() -> None:
    assert turns_of(ASKED, result("a", b"1"), result("b"), result("", b"2", b"3"), result("d"), ASKED) == [
        ("user", "Look", []),
        *(("tool", text, []) for text in ("a", "b", "", "d")),
        ("user", "Tool result 1:\nTool result 3:", [(14, b"1"), (29, b"2"), (29, b"3")]),
        ("user", "Look", []),
    ]


def test_results_without_pictures_and_pictures_of_users_stay_where_they_are() -> None:
    shown = {"role": "user", "parts": result("", b"1")["parts"]}
    assert turns_of(shown, result("a"), shown) == [
        ("user", "", [(0, b"1")]),
        ("tool", "a", []),
        ("user", "", [(0, b"1")]),
    ]


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_the_other_roles_show_no_pictures(role: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        turns_of({**result("x", b"1"), "role": role})
    assert caught.value.field == "prompt.chat.messages[0].parts[1].image"


def test_who_was_sent_knows_its_place_whatever_comes_before_it_later() -> None:
    picture = prompt_pb2.ContentPart(image=prompt_pb2.ImagePart(data=PNG))
    chat = prompt_pb2.ChatPrompt(
        messages=[
            prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_SYSTEM, content="cc_version=1; cch=1a2b;"),
            prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_TOOL, parts=[picture]),
            prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, content="Hi"),
        ]
    )
    tools = [tool_pb2.Tool(name=name) for name in ("b", "c", "a")]
    conversation, _ = normalized(conversation_of(chat, tools=tools, choice=None, info=SEEING))
    # The system said nothing else, and the picture is shown in a turn of the user's.
    assert [(m.role, m.sent_index) for m in conversation.messages] == [("tool", 1), ("user", 1), ("user", 2)]
    assert [(tool.name, index) for index, tool in conversation.callable_tools] == [
        ("a", 2),
        ("b", 0),
        ("c", 1),
    ]
