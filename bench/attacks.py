"""`make bench-attacks`: what one hostile tenant does to another one's short request.

A server with default settings and two tokens. One attack at a time runs in a process of its own for some
seconds, while the other tenant streams a short answer and checks health, over and over. Then the server is
told to stop with the attack still going on. Wanted: time to first token at most three times the idle one and
one pass, health within a second, an end within the grace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse.v1 import (
    cache_service_pb2,
    cache_service_pb2_grpc,
    inference_service_pb2_grpc,
    model_service_pb2,
    prompt_pb2,
    response_format_pb2,
)
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.rpc.access.caller import Role
from icehouse_server.rpc.access.tokens import line_of, new_token

from bench.random_model import RandomModel, make_random_model
from bench.report import OUT, show_table, spread_of, write_json
from bench.server_process import ServerProcess
from tests.fixtures.rpc.http2 import framed, peer_of

CONNECTION_COUNT, CALL_COUNT = 3, 400
_HEALTH = framed(health_pb2.HealthCheckRequest().SerializeToString())
_LIST = framed(model_service_pb2.ListModelsRequest().SerializeToString())
_BOMB = json.dumps({"type": "integer", "allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]})


class Hostile:
    """One tenant that means ill. Its methods are the attacks, and go on until cancelled."""

    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._token = token
        self._metadata = (("authorization", f"Bearer {token}"),)

    async def nothing(self) -> None:
        """Nobody attacks: what the others are measured against."""
        await asyncio.Event().wait()

    async def unread_health_checks(self) -> None:
        """Health checks, without credentials, whose message never comes."""
        await self._on_connections("/grpc.health.v1.Health/Check", b"", has_token=False)

    async def unread_requests(self) -> None:
        """Requests whose message never comes."""
        await self._on_connections("/icehouse.v1.InferenceService/Generate", b"")

    async def unread_answers(self) -> None:
        """Answers that nobody takes, on connections that allow none."""
        await self._on_connections("/icehouse.v1.ModelService/ListModels", _LIST, window_bytes=0)

    async def unread_health_watches(self) -> None:
        """Health watches, without credentials, on connections that take nothing."""
        await self._on_connections("/grpc.health.v1.Health/Watch", _HEALTH, window_bytes=0, has_token=False)

    async def idle_watches(self) -> None:
        """WatchStats that are told nothing for an hour."""
        watch = cache_service_pb2.WatchStatsRequest(interval={"seconds": 3600}).SerializeToString()
        await self._on_connections("/icehouse.v1.CacheService/WatchStats", framed(watch))

    async def giant_conversations(self) -> None:
        """Conversations of a million turns."""
        turns = [prompt_pb2.ChatMessage(role="user", content="a")] * 1_000_000
        chat = prompt_pb2.ChatPrompt(messages=turns)
        await self._asking(lambda stub: stub.Generate, messages.GenerateRequest(chat=chat), at_once=2)

    async def long_conversations(self) -> None:
        """Conversations of 8 MiB in a few turns."""
        turns = [prompt_pb2.ChatMessage(role="user", content="a b " * (1 << 19)) for _ in range(4)]
        chat = prompt_pb2.ChatPrompt(messages=turns)
        await self._asking(lambda stub: stub.Generate, messages.GenerateRequest(chat=chat), at_once=4)

    async def format_bombs(self) -> None:
        """Response formats that are short to write and long to compile, each another one."""
        forms = [response_format_pb2.ResponseFormat(json_schema=_BOMB + " " * index) for index in range(64)]
        requests = [messages.GenerateRequest(text="Hi", response_format=form) for form in forms]
        await self._asking(lambda stub: stub.Generate, *requests, at_once=16)

    async def order_floods(self) -> None:
        """Explain, as many as are let in."""
        request = cache_service_pb2.ExplainRequest(tokens=prompt_pb2.TokenPrompt(ids=[11] * 100))
        await self._asking(lambda stub: stub.Explain, request, at_once=300, service="cache")

    async def tokenize(self) -> None:
        """Tokenize of the longest text that it takes, and of 16 MiB."""
        texts = ("a " * (1 << 19), "a " * (8 << 20))
        requests = [messages.TokenizeRequest(text=text[:-64]) for text in texts]
        await self._asking(lambda stub: stub.Tokenize, *requests, at_once=4)

    async def many_streams(self) -> None:
        """A thousand requests at once."""
        request = messages.GenerateRequest(text="Hi", max_output_tokens=200)
        await self._asking(lambda stub: stub.Generate, request, at_once=1024)

    async def _on_connections(
        self, path: str, message: bytes, *, window_bytes: int | None = None, has_token: bool = True
    ) -> None:
        async with contextlib.AsyncExitStack() as opened:
            peers = []
            for _ in range(CONNECTION_COUNT):
                peer = await opened.enter_async_context(peer_of(self._address, window_bytes=window_bytes))
                peers.append(peer)
                for _ in range(CALL_COUNT):
                    stream = await peer.open_call(path, token=self._token if has_token else "")
                    if message:
                        await peer.send(stream, message, end=True)
            await asyncio.gather(*(peer.hung_up() for peer in peers))

    async def _asking(
        self, method: Callable[[Any], Any], *requests: Any, at_once: int, service: str = "inference"
    ) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            stub: Any = (
                cache_service_pb2_grpc.CacheServiceStub(channel)
                if service == "cache"
                else inference_service_pb2_grpc.InferenceServiceStub(channel)
            )

            async def ask(begin: int) -> None:
                index = begin
                while True:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await method(stub)(requests[index % len(requests)], metadata=self._metadata)
                    index += 1
                    await asyncio.sleep(0.01)

            await asyncio.gather(*(ask(index) for index in range(at_once)))


ATTACKS = tuple(name for name, value in vars(Hostile).items() if callable(value) and not name.startswith("_"))


def attack(name: str, address: str, token: str) -> None:
    """Be the hostile process."""
    attacking: Awaitable[None] = getattr(Hostile(address, token), name)()
    with contextlib.suppress(EOFError, ConnectionError):
        asyncio.run(attacking)  # type: ignore[arg-type]


async def suffer(address: str, token: str, *, seconds: float) -> tuple[list[float], list[float], int]:
    """Return times to first token, times of health checks, and how many calls of either failed."""
    ttfts: list[float] = []
    checks: list[float] = []
    failed = 0
    metadata = (("authorization", f"Bearer {token}"),)
    request = messages.GenerateRequest(text="Hello", max_output_tokens=2)
    async with grpc.aio.insecure_channel(address) as channel:
        inference: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            try:
                await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
                checks.append(time.monotonic() - began)
                began = time.monotonic()
                stream = inference.Stream(request, metadata=metadata, timeout=30)
                async for response in stream:
                    if response.WhichOneof("event") == "delta":
                        ttfts.append(time.monotonic() - began)
                        break
                stream.cancel()
            except grpc.aio.AioRpcError:
                failed += 1
            await asyncio.sleep(0.05)
    return ttfts, checks, failed


def measure(name: str, model: Path, folder: Path, *, seconds: float) -> dict[str, Any]:
    """Start a server, attack it, measure, and stop it under attack."""
    tokens = {"hostile": new_token(), "good": new_token()}
    file = folder / "tokens"
    lines = [line_of(tokens[n], tenant=n, role=Role.TENANT, expire_date=None) for n in tokens]
    file.write_text("".join(f"{line}\n" for line in lines))
    file.chmod(0o600)
    server = ServerProcess(
        model=str(model),
        cache_directory=folder / f"blocks-{name}",
        log_file=OUT / "attacks.log",
        flags=("--token-file", str(file)),
    )
    with contextlib.ExitStack() as held:
        with server:
            asyncio.run(suffer(server.address, tokens["good"], seconds=1.0))
            context = multiprocessing.get_context("spawn")
            hostile = context.Process(target=attack, args=(name, server.address, tokens["hostile"]))
            hostile.start()
            held.callback(hostile.kill)
            time.sleep(2.0)
            ttfts, checks, failed = asyncio.run(suffer(server.address, tokens["good"], seconds=seconds))
            began = time.monotonic()
        stop_s = time.monotonic() - began
    return {
        "attack": name,
        "ttft_median_s": spread_of(ttfts).median if ttfts else None,
        "ttft_max_s": max(ttfts, default=None),
        "health_max_s": max(checks, default=None),
        "answered": len(ttfts),
        "failed": failed,
        "stop_s": stop_s,
    }


def main() -> None:
    """Measure, print the table, write bench/out/attacks.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each attack is measured")
    parser.add_argument("--only", nargs="*", default=ATTACKS, choices=ATTACKS)
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as scratch:
        model = make_random_model(Path(scratch), which=RandomModel.SMALL)
        rows = [measure(name, model, Path(scratch), seconds=arguments.seconds) for name in arguments.only]
    columns = list(rows[0])
    shown = [[f"{row[c]:.3f}" if isinstance(row[c], float) else str(row[c]) for c in columns] for row in rows]
    show_table("one hostile tenant, default settings", columns, shown)
    write_json("attacks", {"rows": rows})


if __name__ == "__main__":
    main()
