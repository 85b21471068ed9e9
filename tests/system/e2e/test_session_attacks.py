"""Sessions of a hostile tenant, over gRPC and HTTP: bounded memory, and nobody else's blocks are moved."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import string
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from icehouse.v1 import cache_service_pb2, prompt_pb2
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_http.sampling import _SESSION_HEADERS
from icehouse_http.upstream import _AGENT_HEADERS, _PARENT_HEADERS
from icehouse_server.config import ServerConfig
from icehouse_server.engine.prefix_cache import sessions
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token

from clients.http.tests.fronts import HttpFront, front_of
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.whole_server import WholeServer, whole_server

_BLOCK = 16
_SESSION_LIMIT = 6
"""Instead of 4,096, so that few requests are as many sessions as millions are there."""
_PROMPT = list(range(10, 10 + 3 * _BLOCK + 1))
_NAMES = (*ServerConfig().session_keys, *ServerConfig().agent_keys, *ServerConfig().parent_keys)
_HEADERS = (*_SESSION_HEADERS, *_AGENT_HEADERS, *_PARENT_HEADERS)
_GOOD_NAME = "the-good-one"
_GOOD_BLOCK_COUNT = 4
"""Three, and the last tokens."""
_WRONG_NAMES = ("x" * 129, "x" * 800, "two words", "../../blocks", "a;b=c", "%00")
_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
_SETTINGS = {"block_token_count": _BLOCK, "min_prefix_token_count": 0, "restore_or_recompute": False}


@dataclasses.dataclass(frozen=True)
class House:
    """A server, its HTTP front, and the tokens of a good and a hostile tenant."""

    server: WholeServer
    front: HttpFront
    tokens: dict[str, str]

    def metadata(self, tenant: str, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
        return ("authorization", f"Bearer {self.tokens[tenant]}"), *more

    async def generate(self, tenant: str, *more: tuple[str, str], **fields: Any) -> messages.GenerateResponse:
        request = messages.GenerateRequest(max_output_tokens=1, **fields)
        return await self.server.inference.Generate(request, metadata=self.metadata(tenant, *more))

    async def end(self, tenant: str, name: str) -> int:
        """Return how many blocks the end of a session concerns."""
        request = cache_service_pb2.EndSessionRequest(session_id=name)
        answer = await self.server.cache.EndSession(request, metadata=self.metadata(tenant))
        return int(answer.block_count)

    async def known_count(self) -> int:
        """Return how many sessions the server remembers, of all tenants."""
        stats = await self.server.inference.CacheStats(
            messages.CacheStatsRequest(), metadata=self.metadata("operator")
        )
        return int(stats.cache.sessions.session_count)


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(sessions, "SESSION_LIMIT", _SESSION_LIMIT)
    roles = {"good": CallerRole.TENANT, "hostile": CallerRole.TENANT, "operator": CallerRole.OPERATOR}
    tokens = {name: new_token() for name in roles}
    file = tmp_path / "tokens"
    lines = [line_of(tokens[name], tenant=name, role=roles[name], expire_date=None) for name in roles]
    file.write_text("".join(f"{line}\n" for line in lines))
    file.chmod(0o600)
    settings = {f"cache__{name}": value for name, value in _SETTINGS.items()}
    model = tiny_model_dir(tmp_path / "models", "llama")
    async with (
        whole_server(model, tmp_path / "blocks", security__token_file=str(file), **settings) as server,
        front_of(server.served.rpc.address) as front,
    ):
        yield House(server, front, tokens)


@pytest.fixture
async def attacked(house: House) -> AsyncIterator[House]:
    """The good tenant has a session; behind the test few sessions are known, and its blocks are there."""
    prompt = {"tokens": prompt_pb2.TokenPrompt(ids=_PROMPT)}
    await house.generate("good", prompt=prompt, session_id=_GOOD_NAME)
    yield house
    assert await house.known_count() <= _SESSION_LIMIT
    again = await house.generate("good", prompt=prompt)
    assert again.usage.ram_tokens == 3 * _BLOCK


async def test_endless_names_in_all_metadata(attacked: House) -> None:
    prompt = {"text": "Hi"}
    for number, name in enumerate(itertools.islice(itertools.cycle(_NAMES), 4 * len(_NAMES))):
        await attacked.generate("hostile", (name, f"s{number}"), prompt=prompt)
    for wrong in _WRONG_NAMES:
        await attacked.generate("hostile", *((name, wrong) for name in _NAMES), prompt=prompt)
    assert await attacked.end("hostile", _GOOD_NAME) == 0
    assert await attacked.end("good", _GOOD_NAME) == _GOOD_BLOCK_COUNT, (
        "the tenant with the most is who forgets"
    )


async def test_endless_names_in_all_headers_and_fields(attacked: House) -> None:
    async def ask(headers: dict[str, str], **fields: Any) -> httpx2.Response:
        token = {"authorization": f"Bearer {attacked.tokens['hostile']}"}
        return await attacked.front.http.post(
            "/v1/chat/completions", json={**_CHAT, **fields}, headers={**token, **headers}
        )

    for number, header in enumerate(itertools.islice(itertools.cycle(_HEADERS), 3 * len(_HEADERS))):
        assert (await ask({header: f"s{number}"})).status_code == 200
        assert (await ask({}, prompt_cache_key=f"k{number}")).status_code == 200
    for wrong in _WRONG_NAMES:
        assert (await ask(dict.fromkeys(_HEADERS, wrong), prompt_cache_key=wrong)).status_code == 200
    assert await attacked.end("hostile", _GOOD_NAME) == 0
    assert await attacked.end("good", _GOOD_NAME) == _GOOD_BLOCK_COUNT, (
        "the tenant with the most is who forgets"
    )


async def test_another_tenants_session_over_each_way(attacked: House) -> None:
    """Its name finds, ends and moves nothing; a request that ends it ends the caller's own."""
    prompt = {"tokens": prompt_pb2.TokenPrompt(ids=_PROMPT)}
    for name in ServerConfig().session_keys:
        ended = await attacked.generate("hostile", (name, _GOOD_NAME), prompt=prompt, ends_session=True)
        assert ended.usage.ram_tokens in (0, 3 * _BLOCK), "its own blocks at most"
    first = await attacked.generate("hostile", prompt={"text": "another"}, session_id=_GOOD_NAME)
    assert first.usage.cached_tokens == 0
    for header in _SESSION_HEADERS:
        answer = await attacked.front.http.post(
            "/v1/chat/completions",
            json=_CHAT,
            headers={"authorization": f"Bearer {attacked.tokens['hostile']}", header: _GOOD_NAME},
        )
        assert answer.status_code == 200, answer.text
    assert await attacked.end("hostile", _GOOD_NAME) > 0, "its own"
    assert await attacked.end("good", _GOOD_NAME) == _GOOD_BLOCK_COUNT


async def test_another_tenants_session_as_parent_and_circles_of_parents(attacked: House) -> None:
    """Each is a session of the caller's own, and neither its end nor what began it reaches the good one's."""
    prompt = {"tokens": prompt_pb2.TokenPrompt(ids=_PROMPT)}
    ring = [f"s{number}" for number in range(2 * _SESSION_LIMIT)]
    for name, parent in itertools.chain(
        [("child", _GOOD_NAME), (_GOOD_NAME, "child")], zip(ring, [*ring[1:], ring[0]], strict=True)
    ):
        answer = await attacked.generate("hostile", prompt=prompt, session_id=name, parent_session_id=parent)
        assert answer.usage.ram_tokens in (0, 3 * _BLOCK), "its own blocks at most"
        await attacked.generate("hostile", ("x-parent-session-id", parent), prompt=prompt, session_id=name)
        await attacked.end("hostile", parent)
    assert await attacked.end("good", _GOOD_NAME) == _GOOD_BLOCK_COUNT


async def test_names_larger_than_a_head_are_refused_and_others_served(attacked: House) -> None:
    long = (string.ascii_letters * 20_000)[: 1 << 20]
    for name in ServerConfig().session_keys[:2]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await attacked.generate("hostile", (name, long), prompt={"text": "Hi"})
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    reader, writer = await asyncio.open_connection("127.0.0.1", attacked.front.http.base_url.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nsession-id: " + long.encode())
    assert (await reader.readline()).split()[1] in (b"400", b"431")
    writer.close()
    assert await attacked.end("good", _GOOD_NAME) == _GOOD_BLOCK_COUNT
