"""What the bench of pictures makes of what it hears: gaps beside them, a peer's stream, ratios by side."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from icehouse.v1 import prompt_pb2

from bench import mlx_vlm_server
from bench.mlx_vlm_server import missing_modules, reply_of
from bench.replies import Reply
from bench.vision_beside import Gaps, gap_name, gap_ratios, gaps_of
from bench.vision_ttft import ICEHOUSE, Talk, Times, picture_request, talk_ratios


def test_gaps_beside_pictures_are_those_from_the_first_one_sent_to_the_last_ones_token() -> None:
    # One token a second alone; two beside the pictures, which last from 10 to 17.
    times = [*map(float, range(1, 11)), 12.0, 14.0, 16.0, 18.0, *map(float, range(19, 30))]
    replies = [Reply(10.0, (13.0,), (1,)), Reply(13.5, (17.0,), (1,))]
    found = gaps_of([times, times], replies, alone=((1.0, 10.0), (18.0, 29.0)), picture_alone_s=1.5)
    assert (found.stream_count, found.beside_count) == (2, 8)
    assert (found.alone_p50_s, found.alone_p99_s) == (1.0, 1.0)
    assert (found.beside_p50_s, found.beside_p99_s) == (2.0, 2.0)
    assert (found.picture_s, found.picture_alone_s) == (3.25, 1.5)


def test_ratios_are_taken_round_by_round_and_apart_for_each_number_of_streams() -> None:
    def gaps(count: int, alone_s: float, beside_s: float) -> Gaps:
        return Gaps(count, alone_s, 2 * alone_s, alone_s, beside_s, 10, 1.0, 1.0)

    found = gap_ratios([gaps(1, 1.0, 2.0), gaps(4, 1.0, 3.0), gaps(1, 10.0, 40.0)])
    assert found[gap_name(1)].median == 3.0, "2 and 4, whatever the seconds were"
    assert found[gap_name(4)].median == 3.0 and found[gap_name(4)].count == 1
    assert found["4 streams: p99 beside pictures / p99 alone"].median == 1.5


def test_each_side_is_compared_with_its_own_cold_time_and_icehouse_with_each_peer() -> None:
    talk = Talk("what is it?", b"")
    talk.times = {ICEHOUSE: Times(2.0, 0.1, 0.2, 0.4), "other": Times(4.0, 1.0, 2.0, 4.0)}
    found = {name: spread.median for name, spread in talk_ratios([talk]).items()}
    assert found["icehouse: again / cold"] == 0.05 and found["other: after a restart / cold"] == 1.0
    assert found["cold: icehouse / other"] == 0.5 and found["next turn: icehouse / other"] == 0.1


def test_a_conversation_goes_on_behind_its_picture() -> None:
    request = picture_request(b"png", ("what?", "a boat", "where?"), max_output_tokens=3)
    first, *others = request.prompt.chat.messages
    assert [part.WhichOneof("part") for part in first.parts] == ["image", "text"]
    assert [(turn.role, turn.content) for turn in others] == [
        (prompt_pb2.ROLE_ASSISTANT, "a boat"),
        (prompt_pb2.ROLE_USER, "where?"),
    ]


def event(**content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def replied(*pieces: bytes) -> mlx_vlm_server.PeerReply:
    """Return what is made of a stream of these bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # With the body: closing a connection with bytes that nobody read resets it.
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        return await asyncio.to_thread(reply_of, server.sockets[0].getsockname()[1], "{}")


async def test_a_peers_first_token_is_that_of_its_stream() -> None:
    usage = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 992}}
    token = event(choices=[{"delta": {"content": "a"}}], usage=None)
    found = await replied(b": comment\n\n", token, event(choices=[], usage=usage), b"data: [DONE]\n\n")
    assert found.cached_tokens == 992 and found.ttft_s > 0


async def test_a_peer_that_fails_or_says_nothing_is_no_measurement() -> None:
    with pytest.raises(AssertionError, match="out of memory"):
        await replied(event(error="out of memory"))
    with pytest.raises(AssertionError, match="no token"):
        await replied(event(choices=[], usage=None))


def test_what_a_peers_server_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr(mlx_vlm_server, "PACKAGES_FOLDER", tmp_path / "nowhere")
    everything = missing_modules()
    (tmp_path / "fastapi.py").touch()
    monkeypatch.setattr(mlx_vlm_server, "PACKAGES_FOLDER", tmp_path)
    assert set(everything) - set(missing_modules()) == {"fastapi"}
