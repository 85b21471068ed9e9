"""TTFT of a conversation about one picture: cold, again from RAM, its next turn, and again after a restart.

Each round has its own picture and question. Icehouse and its peers are loaded and compute in turn; then all
are restarted, and every picture is asked about once more. Block files may still be in the page cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import prompt_pb2

from bench.cache_ttft import connected
from bench.grpc_clients import READ_WRITE, Client
from bench.mlx_vlm_process import MlxVlmProcess
from bench.mlx_vlm_server import MlxVlmServer, PeerReply, missing_modules
from bench.prompts import text_of_tokens
from bench.report import Spread, console, ratios
from bench.server_process import ServerProcess
from bench.vision_model import IMAGE_TOKEN_COUNT, picture

OUTPUT_TOKEN_COUNT = 8
TEXT_TOKEN_COUNT = 700
ICEHOUSE = "icehouse"
_ANSWER = "It is a boat, and somebody stands beside it."
_NEXT_QUESTION = "And what is behind it, on the left of the harbour?"


@dataclasses.dataclass(slots=True)
class Times:
    """One side's times for one conversation, in seconds; `*_tokens` are the reused tokens that it reports."""

    cold_s: float = 0.0
    again_s: float = 0.0
    next_turn_s: float = 0.0
    restarted_s: float = 0.0
    again_tokens: int = 0
    restarted_tokens: int = 0


@dataclasses.dataclass(slots=True)
class Talk:
    """One conversation, and each side's times for it."""

    question: str
    picture: bytes
    prompt_tokens: int = 0
    image_tokens: int = 0
    replies: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    """Icehouse's replies; all three must be equal."""
    times: dict[str, Times] = dataclasses.field(default_factory=dict)
    """By side."""

    @property
    def turns(self) -> tuple[str, ...]:
        """The conversation up to its second question."""
        return (self.question, _ANSWER, _NEXT_QUESTION)

    @property
    def replies_are_equal(self) -> bool:
        """Whether cold, RAM and SSD gave the same tokens."""
        return len(set(self.replies)) == 1


class Peer(Protocol):
    """Another server, or its replacement; runs for the length of its block, and may be entered again."""

    name: str

    def __enter__(self) -> Peer:
        """Start it."""
        ...

    def __exit__(self, *exception: Any) -> None:
        """End it."""
        ...

    def ask(self, picture: bytes, turns: Sequence[str], *, max_output_tokens: int) -> PeerReply:
        """Return the reply to turns of user and assistant, with a picture before the first."""
        ...


def peers_of(model_path: Path, scratch: Path, log_file: Path) -> list[Peer]:
    """Return mlx-vlm's server at its defaults and with its prefix cache on; if packages for it are missing,
    mlx-vlm's generation in a process, which caches nothing."""
    missing = missing_modules()
    if missing:
        console.print(
            f"mlx-vlm's server is not measured, only its generation in a process: {', '.join(missing)} "
            "not here; `make bench CASE=vision` installs them"
        )
        return [MlxVlmProcess(model_path=model_path, log_file=log_file)]
    return [
        MlxVlmServer(model_path=model_path, log_file=log_file),
        MlxVlmServer(model_path=model_path, log_file=log_file, cache_directory=scratch / "peer"),
    ]


async def measure_talks(model_path: Path, scratch: Path, log_file: Path, round_count: int) -> list[Talk]:
    """Return one entry a round, without the one that warms up all sides."""
    server = ServerProcess(model=str(model_path), cache_directory=scratch / "blocks", log_file=log_file)
    peers = peers_of(model_path, scratch, log_file)
    talks: list[Talk] = []
    with contextlib.ExitStack() as running:
        _start(running, server, peers)
        async with connected(server.address) as client:
            for seed in range(round_count + 1):
                question = await text_of_tokens(client, TEXT_TOKEN_COUNT, seed=seed)
                talks.append(Talk(question, picture(seed)))
                await _first_session(client, peers, talks[-1])
                console.print(f"picture {seed} of {round_count}: cold, again, and the next turn")
    with contextlib.ExitStack() as running:
        _start(running, server, peers)
        async with connected(server.address) as client:
            for talk in talks:
                await _second_session(client, peers, talk)
    console.print("all pictures again after the restart")
    return talks[1:]


def _start(running: contextlib.ExitStack, server: ServerProcess, peers: Sequence[Peer]) -> None:
    running.enter_context(server)
    for peer in peers:
        running.enter_context(peer)


async def _first_session(client: Client, peers: Sequence[Peer], talk: Talk) -> None:
    own = talk.times[ICEHOUSE] = Times()
    own.cold_s, usage = await _ask(client, talk)
    talk.prompt_tokens, talk.image_tokens = usage.prompt_tokens, usage.image_tokens
    assert talk.image_tokens >= IMAGE_TOKEN_COUNT, talk.image_tokens
    own.again_s, usage = await _ask(client, talk)
    own.again_tokens = usage.ram_tokens
    own.next_turn_s, _ = await _ask(client, talk, goes_on=True)
    for peer in peers:
        found = talk.times[peer.name] = Times()
        found.cold_s = (await _ask_peer(peer, talk, talk.turns[:1])).ttft_s
        again = await _ask_peer(peer, talk, talk.turns[:1])
        found.again_s, found.again_tokens = again.ttft_s, again.cached_tokens
        found.next_turn_s = (await _ask_peer(peer, talk, talk.turns)).ttft_s


async def _second_session(client: Client, peers: Sequence[Peer], talk: Talk) -> None:
    own = talk.times[ICEHOUSE]
    own.restarted_s, usage = await _ask(client, talk)
    own.restarted_tokens = usage.ssd_tokens
    for peer in peers:
        reply = await _ask_peer(peer, talk, talk.turns[:1])
        found = talk.times[peer.name]
        found.restarted_s, found.restarted_tokens = reply.ttft_s, reply.cached_tokens


async def _ask_peer(peer: Peer, talk: Talk, turns: Sequence[str]) -> PeerReply:
    return await asyncio.to_thread(peer.ask, talk.picture, turns, max_output_tokens=OUTPUT_TOKEN_COUNT)


async def _ask(client: Client, talk: Talk, *, goes_on: bool = False) -> tuple[float, Any]:
    """Return the time to the first token, and the usage."""
    turns = talk.turns if goes_on else talk.turns[:1]
    request = picture_request(talk.picture, turns, max_output_tokens=OUTPUT_TOKEN_COUNT)
    reply, _, finished = await client.stream(request)
    if not goes_on:
        talk.replies.append(reply.token_ids)
    return reply.ttft_s, finished.usage


def picture_request(data: bytes, turns: Sequence[str], *, max_output_tokens: int) -> messages.GenerateRequest:
    """Return a greedy request for turns of user and assistant, with a picture before the first."""
    parts = [
        prompt_pb2.ContentPart(image=prompt_pb2.ImagePart(data=data)),
        prompt_pb2.ContentPart(text=turns[0]),
    ]
    chat = prompt_pb2.ChatPrompt(messages=[prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, parts=parts)])
    for number, turn in enumerate(turns[1:]):
        role = prompt_pb2.ROLE_USER if number % 2 else prompt_pb2.ROLE_ASSISTANT
        chat.messages.add(role=role, content=turn)
    return messages.GenerateRequest(
        prompt={"chat": chat}, max_output_tokens=max_output_tokens, cache=READ_WRITE
    )


def talk_ratios(talks: Sequence[Talk]) -> dict[str, Spread]:
    """Return ratios taken picture by picture, by what they compare: of each side to its own cold time, then
    of icehouse to each peer."""

    def of(side: str, name: str) -> list[float | None]:
        return [getattr(talk.times[side], name) for talk in talks]

    kinds = {"again": "again_s", "next turn": "next_turn_s", "after a restart": "restarted_s"}
    sides = list(talks[0].times)
    found = {
        f"{side}: {kind} / cold": ratios(of(side, name), of(side, "cold_s"))
        for side in sides
        for kind, name in kinds.items()
    }
    for peer in sides[1:]:
        for kind, name in {"cold": "cold_s", **kinds}.items():
            found[f"{kind}: icehouse / {peer}"] = ratios(of(ICEHOUSE, name), of(peer, name))
    return found
