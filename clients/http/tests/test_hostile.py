"""Hostile requests: what is no request is refused in its protocol's shape, with the field at fault."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from icehouse_http.bounds.connection import BoundedConnection

from clients.http.tests.fronts import HttpFront, front_of
from tests.fixtures.patience import BOUND_S
from tests.unit.rpc.conftest import RunningServer

CHAT: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
RESPONSE = {"model": "tiny", "input": "Hi", "max_output_tokens": 2}
TEXT = {"model": "tiny", "prompt": "Hi"}
EMBED = {"model": "tiny", "input": "Hi"}
RERANK = {"model": "tiny", "query": "q", "documents": ["d"]}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": RESPONSE,
    "/v1/completions": TEXT,
    "/v1/embeddings": EMBED,
    "/v1/rerank": RERANK,
}
DEEP = b'{"a":' * 10_000
BODIES = {
    "empty": b"",
    "cut": b'{"model": "ti',
    "a list": b"[]",
    "a text": b'"Hi"',
    "no UTF-8": b'{"model": "\xff"}',
    "no number": b'{"temperature": NaN}',
    "a long number": b'{"temperature": ' + b"9" * 5_000 + b"}",
    "deep": DEEP,
    "nothing": b"null",
    "form": b"model=tiny&messages=Hi",
}


def error_of(answer: Any, path: str, *, status: int = 400) -> dict[str, Any]:
    """Return the error after a check of the shape that its protocol gives errors."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    if path.startswith("/v1/messages"):
        assert body["type"] == "error" and set(body) == {"type", "error"}
    else:
        assert set(body) == {"error"}
    error = body["error"]
    assert error["message"] and error["type"] == ("invalid_request_error" if status == 400 else error["type"])
    return dict(error)


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_no_json_object_is_refused(front: HttpFront, path: str) -> None:
    for body in BODIES.values():
        error_of(await front.http.post(path, content=body), path)


@pytest.mark.parametrize("path", PATHS)
async def test_half_of_a_surrogate_pair_is_refused_wherever_it_is(front: HttpFront, path: str) -> None:
    half = {"metadata": {"user_id": "\ud83d"}}
    escaped = json.dumps(PATHS[path] | half).encode()
    error_of(await front.http.post(path, content=escaped), path)
    as_it_is = json.dumps(PATHS[path] | half, ensure_ascii=False).encode(errors="surrogatepass")
    error_of(await front.http.post(path, content=as_it_is), path)
    whole = json.dumps(PATHS[path] | {"metadata": {"user_id": "\U0001f600", "path": "C:\\ud83d"}}).encode()
    answer = await front.http.post(path, content=whole)
    assert "JSON" not in answer.text, answer.text


SAMPLING: dict[str, list[Any]] = {
    "temperature": ["hot", [], True, "1", 10**400],
    "top_p": ["x", {}],
    "top_k": [1.5, "3", -2],
    "min_p": ["x"],
    "stream": ["yes", 1],
    "model": [1, [], {}],
}
OPENAI: dict[str, list[Any]] = {
    **SAMPLING,
    "seed": ["x", 1.5, 1 << 70],
    "presence_penalty": ["x"],
    "frequency_penalty": [[]],
    "repetition_penalty": [{}],
    "logit_bias": [[1], "x", {"x": 1}, {"-1": 1}, {"1": "x"}, {str(1 << 40): 1}],
    "stop": [1, [1], {}, ["a", None]],
    "n": [0, -1, "2", 1.5, 1 << 40],
    "max_tokens": [0, -5, "10", 1.5, []],
    "stream_options": [1, [], {"include_usage": "yes"}],
}
TOOLS: list[Any] = [1, {}, [1], ["x"], [{"type": "function", "function": 1}], [{"type": "search"}]]
CHOICES: list[Any] = ["maybe", 1, [], {}, {"type": "function"}, {"type": "x", "name": "a"}]
FORMS: list[Any] = ["json", 1, {"type": "xml"}, {"type": "json_schema"}]
TURNS: list[Any] = [
    None,
    [],
    1,
    "Hi",
    [1],
    [{}],
    [{"role": "robot", "content": "Hi"}],
    [{"role": 1, "content": "Hi"}],
    [{"role": "user", "content": 1}],
    [{"role": "user", "content": [1]}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}],
    [{"role": "user", "content": [{"type": "video"}]}],
]
WRONG: dict[str, dict[str, list[Any]]] = {
    "/v1/chat/completions": {
        **OPENAI,
        "messages": [
            *TURNS,
            [{"role": "user"}],
            [{"role": "system", "content": None}],
            [{"role": "user", "content": [{"type": "image_url"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 1}}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "detail": "?"}}]}],
            [{"role": "assistant", "content": "", "tool_calls": [1]}],
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            [{"role": "tool", "content": "", "tool_call_id": 1}],
            [{"role": "user", "content": "Hi", "name": 1}],
        ],
        "tools": [*TOOLS, [{"type": "function", "function": {"name": "a", "parameters": []}}]],
        "functions": [1, [{"name": "a"}]],
        "tool_choice": CHOICES,
        "parallel_tool_calls": ["no"],
        "response_format": [*FORMS, {"type": "json_schema", "json_schema": {}}],
        "max_completion_tokens": [0, "1"],
        "reasoning_effort": [1, "huge"],
        "prompt_cache_key": [1],
        "chat_template_kwargs": [1, []],
    },
    "/v1/messages": {
        **SAMPLING,
        "messages": [
            *TURNS,
            [{"role": "user"}],
            [{"role": "assistant", "content": None}],
            [{"role": "user", "content": [{"type": "tool_result"}]}],
            [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "%"}}]}],
            [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}],
            [{"role": "assistant", "content": [{"type": "tool_use", "name": "a", "input": "x"}]}],
            [{"role": "assistant", "content": [{"type": "image"}]}],
        ],
        "system": [1, [{"type": "image", "source": {"type": "url", "url": "x"}}], [1]],
        "max_tokens": [None, -1, "10", [], False],
        "stop_sequences": [1, [1]],
        "tools": [1, [1], [{}], [{"name": "a", "input_schema": 1}], [{"type": "bash_20250124", "name": "a"}]],
        "tool_choice": ["auto", 1, {}, {"type": "tool"}, {"type": "some"}],
        "thinking": ["on", {}, {"type": "enabled", "budget_tokens": 0}],
        "metadata": [1, {"user_id": 1}],
        "output_config": [1, {"format": {"type": "xml"}}, {"effort": 1}, {"effort": "huge"}],
    },
    "/v1/responses": {
        **SAMPLING,
        "input": [
            None,
            1,
            [],
            [1],
            [{"role": "robot", "content": "x"}],
            [{"role": "user"}],
            [{"type": "item_reference"}],
            [{"type": "item_reference", "id": "x"}],
            [{"type": "function_call", "name": "a"}],
            [{"type": "function_call_output", "output": "x"}],
            [{"type": "reasoning", "encrypted_content": "icehouse:%"}],
            [{"role": "user", "content": [{"type": "input_image"}]}],
        ],
        "instructions": [1],
        "tools": [1, [1], [{"type": "function"}]],
        "tool_choice": CHOICES,
        "max_output_tokens": [0, "1"],
        "reasoning": ["high", {"effort": 1}, {"effort": "huge"}],
        "text": [1, {"format": {"type": "json_schema"}}],
        "previous_response_id": [1, "resp_none"],
        "include": [1, [1]],
        "store": ["no"],
        "metadata": ["x"],
        "conversation": ["conv_1", {"id": "conv_1"}],
        "prompt": [{"id": "pmpt_1"}],
    },
    "/v1/completions": {**OPENAI, "prompt": [None, 1, [], ["a", "b"], [1.5], [-1], [True]], "suffix": [1]},
    "/v1/embeddings": {
        "input": [None, 1, [], [[]], [1.5], ["a", 1], [[1], "a"], [-1]],
        "encoding_format": ["hex", 1],
        "dimensions": [0, "4"],
    },
    "/v1/rerank": {
        "query": [None, 1, ""],
        "documents": [None, [], 1, [1], [{"text": 1}]],
        "top_n": [0, "1"],
        "return_documents": ["yes"],
    },
}


@pytest.mark.parametrize("path", WRONG)
async def test_a_wrong_type_is_refused_by_the_name_of_its_field(
    front: HttpFront, served: RunningServer, path: str
) -> None:
    for field, values in WRONG[path].items():
        for value in values:
            answer = await front.http.post(path, json=PATHS[path] | {field: value})
            assert answer.status_code == 400, (field, value)
            error = error_of(answer, path)
            assert (error["param"] or "").startswith(field), (field, value, error)
    assert served.engine.submitted == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
async def test_unknown_fields_and_nulls_are_ignored(front: HttpFront, path: str) -> None:
    nulls = dict.fromkeys(WRONG[path].keys() - {"messages", "input", "prompt"})
    body = {**nulls, **PATHS[path], "no_such_field": {"a": [1]}, "user": "u", "service_tier": "auto"}
    answer = await front.http.post(path, json=body)
    assert answer.status_code == 200, answer.text


async def test_a_tool_may_have_as_long_a_name_as_at_anthropic(front: HttpFront) -> None:
    """Agents put the names of plugin, server and tool together."""
    for length, status in ((128, 200), (129, 400)):
        tools = [{"name": "n" * length, "input_schema": {"type": "object"}}]
        answer = await front.http.post("/v1/messages", json=CHAT | {"tools": tools})
        assert answer.status_code == status, answer.text


async def test_half_of_a_character_is_refused(front: HttpFront) -> None:
    for path in PATHS:
        body = json.dumps(PATHS[path]).replace("Hi", "\\ud800").replace('"q"', '"\\ud800"')
        error_of(await front.http.post(path, content=body.encode()), path)


async def test_a_large_body_is_refused_however_it_comes(served: RunningServer) -> None:
    async def pieces():
        for _ in range(20):
            yield b" " * 100

    async with front_of(served.server.address, max_body_bytes=1_000) as front:
        for path in ("/v1/chat/completions", "/v1/messages"):
            for content in (b" " * 1_001, pieces()):
                answer = await front.http.post(path, content=content)
                error = error_of(answer, path, status=413)
                assert error["code"] == "body_too_large"
        assert (await front.http.post("/v1/chat/completions", json=CHAT)).status_code == 200


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def answer_to(url: str, sent: bytes) -> bytes:
    """Return all that comes back for some bytes, until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
    writer.write(sent)
    try:
        async with asyncio.timeout(BOUND_S):
            return await reader.read()
    finally:
        writer.close()


async def test_a_body_that_does_not_come_is_not_waited_for(served: RunningServer) -> None:
    head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 9\r\n\r\n{"
    async with front_of(served.server.address, body_timeout_s=0.05) as front:
        answer = await answer_to(front.url, head)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"body_late"' in answer


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\n"], ids=["nothing", "half"])
async def test_headers_that_do_not_come_are_not_waited_for(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(BoundedConnection, "header_timeout_s", 0.05)
    assert await answer_to(front.url, sent) == b""


async def test_a_later_request_of_a_connection_has_the_same_time(
    front: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedConnection, "header_timeout_s", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(front.url))
    async with asyncio.timeout(BOUND_S):
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"GET /health HT")
        assert await reader.read() == b""
    writer.close()


async def test_other_paths_and_methods(front: HttpFront) -> None:
    error_of(await front.http.get("/v1/none"), "/v1/none", status=404)
    for ask in (front.http.get("/v1/chat/completions"), front.http.post("/api/generate")):
        message = (await ask).json()["error"]["message"]
        assert "GET /v1/models, " in message and "POST /v1/chat/completions, " in message
    error_of(await front.http.get("/v1/messages"), "/v1/messages", status=405)
    error_of(await front.http.get("/v1/models/none"), "/v1/models", status=404)


async def test_pages_of_other_sites_may_not_call(served: RunningServer) -> None:
    evil, friend = {"origin": "http://evil.example"}, {"origin": "http://friend.example"}
    async with front_of(served.server.address) as front:
        for headers in (evil, friend):
            answer = await front.http.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert error_of(answer, "", status=403)["code"] == "origin_not_allowed"
            assert "access-control-allow-origin" not in answer.headers
    async with front_of(served.server.address, allow_origins=(friend["origin"],)) as front:
        answer = await front.http.post("/v1/chat/completions", json=CHAT, headers=friend)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == friend["origin"]
        answer = await front.http.post("/v1/chat/completions", json=CHAT, headers=evil)
        assert answer.status_code == 403
    assert len(served.engine.submitted) == 1


async def test_a_preflight_is_answered_as_a_browser_reads_it(served: RunningServer) -> None:
    """By Fetch: a status of 200 to 299, the page's origin, and all headers that it wants to send."""
    friend = "http://friend.example"
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
        "access-control-request-private-network": "true",
    }
    async with front_of(served.server.address, allow_origins=(friend,)) as front:
        for path in PATHS:
            told = await front.http.options(path, headers=asked | {"origin": friend})
            assert (told.status_code, told.content) == (204, b""), told.text
            assert told.headers["access-control-allow-origin"] == friend
            assert "POST" in told.headers["access-control-allow-methods"]
            names = told.headers["access-control-allow-headers"].split(",")
            assert set(names) >= set(asked["access-control-request-headers"].split(","))
            assert told.headers["access-control-allow-private-network"] == "true"
            refused = await front.http.options(path, headers=asked | {"origin": "http://evil.example"})
            assert (refused.status_code, refused.content) == (403, b"")
            assert "access-control-allow-origin" not in refused.headers
            assert "content-type" not in refused.headers
        answer = await front.http.post("/v1/responses", json=RESPONSE, headers={"origin": friend})
        assert "retry-after" in answer.headers["access-control-expose-headers"]
    async with front_of(served.server.address) as front:
        told = await front.http.options("/v1/messages", headers=asked | {"origin": friend})
        error_of(told, "/v1/messages", status=405)
        assert "access-control-allow-origin" not in told.headers


async def test_names_that_others_may_point_here_are_refused(served: RunningServer) -> None:
    async with front_of(served.server.address, names=("gpu-1.internal",)) as front:
        port = port_of(front.url)
        others = ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil", "[")
        for name in others:
            for path in ("/health", "/metrics", "/v1/models"):
                refused = await front.http.get(path, headers={"host": name, "x-api-key": "any"})
                assert error_of(refused, path, status=421)["code"] == "name_not_known"
            for path, body in PATHS.items():
                error_of(await front.http.post(path, json=body, headers={"host": name}), path, status=421)
        own = ("localhost", f"LOCALHOST:{port}", "127.0.0.1", "[::1]", f"192.0.2.1:{port}", "GPU-1.internal.")
        for name in own:
            answer = await front.http.get("/v1/models", headers={"host": name})
            assert answer.status_code == 200, (name, answer.text)
        assert b"HTTP/1.1 200 " in await answer_to(front.url, b"GET /health HTTP/1.0\r\n\r\n")
    async with front_of(served.server.address, names=("*",)) as front:
        assert (await front.http.get("/v1/models", headers={"host": "any.example"})).status_code == 200
    assert served.engine.submitted == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("status", "rest"),
    [
        (400, "Host: a\r\nHost: b\r\n\r\n"),
        (400, "no header\r\n\r\n"),
        (431, f"X-Long: {'a' * 200_000}"),
        (501, "Host: localhost\r\nTransfer-Encoding: gzip\r\n\r\n"),
        (400, "Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n"),
    ],
)
async def test_what_is_no_http_is_refused_in_the_form_of_its_protocol(
    front: HttpFront, path: str, status: int, rest: str
) -> None:
    answer = await answer_to(front.url, f"POST {path} HTTP/1.1\r\n{rest}".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"\r\nconnection: close" in head.lower()
    error = json.loads(body)
    assert error["error"]["code"] == "invalid_http"
    assert (error.get("type") == "error") == (path == "/v1/messages")
