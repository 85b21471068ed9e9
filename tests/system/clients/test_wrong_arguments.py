"""Wrong arguments of the Python client: refused before any call, by the name of what is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from icehouse_client import AsyncClient, Client, Image, Infill, Message, Security, Tool, formats

TURN = [Message("user", "Hi")]


@pytest.mark.parametrize(
    ("call", "prompt", "options", "error", "wanted"),
    [
        ("generate", b"Hi", {}, TypeError, "not bytes"),
        ("generate", None, {}, TypeError, "not NoneType"),
        ("chat", "Hi", {}, TypeError, "a chat is a list of Message or dicts"),
        (
            "chat",
            [{"role": "user", "text": "Hi"}],
            {},
            ValueError,
            "messages[0] has 'text', which is not known",
        ),
        ("chat", [], {}, ValueError, "has no messages"),
        ("generate", "Hi", {"stop": "ab"}, TypeError, "stop is a list of texts, not one text"),
        ("generate", "Hi", {"bad_words": "ab"}, TypeError, "bad_words is a list of texts"),
        ("generate", "Hi", {"cache_use": "never"}, ValueError, "cache_use is 'never'; it must be one of"),
        (
            "generate",
            "Hi",
            {"response_format": {"type": "json_object"}},
            TypeError,
            "formats` makes, not dict",
        ),
        ("chat", TURN, {"tools": ["f"]}, TypeError, "tools hold Tool, not str"),
        ("chat", TURN, {"tools": [Tool("f")], "tool_choice": "f"}, ValueError, "'auto', 'none', 'required'"),
        ("chat", [Message("user", "Hi", images=("a.png",))], {}, TypeError, "hold Image, not str"),  # type: ignore[arg-type]
        (
            "chat",
            [Message("user", "Hi", images=(Image(b"GIF8", detail="most"),))],  # type: ignore[arg-type]
            {},
            ValueError,
            "detail is 'most'; it must be one of 'auto', 'low', 'high'",
        ),
        ("embed", ["Hi"], {"pooling": "max"}, ValueError, "pooling is 'max'"),
    ],
)
async def test_what_is_wrong_is_named(
    call: str, prompt: Any, options: Mapping[str, Any], error: type[Exception], wanted: str
) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(error, match=re.escape(wanted)):
        getattr(client, call)(prompt, **options)
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(error, match=re.escape(wanted)):
            await getattr(client, call)(prompt, **options)


BAD = "ab\ud83d"


@pytest.mark.parametrize(
    ("call", "arguments", "options", "place"),
    [
        ("generate", [BAD], {}, "prompt"),
        ("stream", [BAD], {}, "prompt"),
        ("chat", [[Message("user", "Hi"), Message("user", BAD)]], {}, "messages[1].content"),
        ("chat", [[{"role": "user", "content": BAD}]], {}, "messages[0].content"),
        (
            "chat",
            [[{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": BAD}]}]],
            {},
            "messages[0].content[1].text",
        ),
        (
            "chat",
            [[Message("user", f"x{BAD}", images=(Image(b"GIF8", position=1),))]],
            {},
            "messages[0].content",
        ),
        ("generate", [Infill("x", BAD)], {}, "prompt.suffix"),
        ("generate", ["Hi"], {"stop": ["x", BAD]}, "stop[1]"),
        ("generate", ["Hi"], {"bad_words": [BAD]}, "bad_words[0]"),
        ("generate", ["Hi"], {"request_id": BAD}, "request_id"),
        ("generate", ["Hi"], {"tenant": BAD}, "tenant"),
        ("chat", [TURN], {"tools": [Tool("f", description=BAD)]}, "tools[0].description"),
        ("chat", [TURN], {"template_arguments": {"a": {"b": BAD}}}, "template_arguments.a.b"),
        ("chat", [TURN], {"template_arguments": {BAD: 1}}, "a key of template_arguments"),
        ("tokenize", [BAD], {}, "prompt"),
        ("embed", [["x", BAD]], {}, "inputs[1]"),
        ("rerank", ["x", ["y", BAD]], {}, "documents[1]"),
        ("rerank", ["x", ["y"]], {"instruction": BAD}, "instruction"),
    ],
)
async def test_half_of_a_surrogate_pair_is_named(
    call: str, arguments: Sequence[Any], options: Mapping[str, Any], place: str
) -> None:
    wanted = re.escape(place) + r" has half of a surrogate pair, '\\ud83d', at index \d"
    with Client("127.0.0.1:1") as client, pytest.raises(ValueError, match=f"^{wanted}"):
        getattr(client, call)(*arguments, **options)
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=f"^{wanted}"):
            await getattr(client, call)(*arguments, **options)


def test_half_of_a_surrogate_pair_is_named_by_the_cache_and_formats_too() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ValueError, match=r"^prompt has half .* at index 2:"):
        client.cache.warm(BAD)
    with pytest.raises(ValueError, match=r"^texts\[1\] has half"):
        formats.choice("a", BAD)


@pytest.mark.parametrize("given", ["certificate_pem", "key_pem"])
def test_half_of_a_certificate_is_refused_where_grpc_would_end_the_process(given: str) -> None:
    with pytest.raises(ValueError, match="go together"):
        Security(**{given: b"half"})  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["", " "])
async def test_an_address_is_not_empty(address: str) -> None:
    for face in (Client, AsyncClient):
        with pytest.raises(ValueError, match="must be host:port, such as localhost:50051"):
            face(address)
