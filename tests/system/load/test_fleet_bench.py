"""What the fleet's bench makes of what it hears: streams in any pieces, texts of a length, verdicts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from bench.fleet import tour
from bench.fleet.chat import Answer, ChatFailed, chat
from bench.fleet.overhead import Pair
from bench.fleet.report import Findings, simulation_line, verdicts_of
from bench.fleet.restore import StoreFacts
from bench.fleet.sessions import Session, Shape, Turn
from bench.fleet.tour import Conversation, chosen, complaints, open_conversations
from bench.fleet.tour import Turn as TourTurn
from bench.fleet.workload import AWARE, ONE, Played, Texts, fitting


@contextlib.asynccontextmanager
async def answering(head: str, *pieces: bytes) -> AsyncIterator[str]:
    """Answer every request with these bytes, piece by piece, and then end the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {head}\r\n\r\n".encode())
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


EVENTS = (
    event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    + event(choices=[{"delta": {"content": "Par"}}])
    + event(choices=[{"delta": {"content": "is."}}])
    + event(
        choices=[],
        usage={"prompt_tokens": 30, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 29}},
    )
    + b"data: [DONE]\n\n"
)
CHUNKED = "200 OK\r\nTransfer-Encoding: chunked"


async def asked(url: str) -> Answer:
    return await chat(url, model="m", messages=[{"role": "user", "content": "Where?"}], max_output_tokens=2)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_stream_is_read_however_it_is_cut(size: int) -> None:
    pieces = [chunk(EVENTS[at : at + size]) for at in range(0, len(EVENTS), size)]
    async with answering(CHUNKED, *pieces, chunk(b"")) as url:
        answer = await asked(url)
    assert (answer.text, answer.prompt_token_count, answer.cached_token_count) == ("Paris.", 30, 29)
    assert answer.output_token_count == 2 and answer.ttft_s > 0


async def test_a_body_without_chunks_is_read_to_its_end() -> None:
    async with answering("200 OK", EVENTS) as url:
        assert (await asked(url)).text == "Paris."


@pytest.mark.parametrize(
    ("head", "body", "complaint"),
    [
        ("503 Service Unavailable", b"no workers", "HTTP 503: no workers"),
        (CHUNKED, chunk(EVENTS[:50]), "without its usage"),
        (CHUNKED, b"ff\r\ndata", "broke off"),
        (CHUNKED, chunk(event(error={"message": "worker lost"})), "worker lost"),
    ],
)
async def test_what_is_no_answer_fails(head: str, body: bytes, complaint: str) -> None:
    async with answering(head, body) as url:
        with pytest.raises(ChatFailed, match=complaint):
            await asked(url)


def test_texts_have_their_length_and_share_no_beginning() -> None:
    texts = Texts(characters_per_token=4.0)
    found = [texts.text(count, key=key) for key in range(4) for count in (1, 50, 500)]
    assert [len(text) for text in found] == [4, 200, 2000] * 4
    assert len({text[0] for text in found}) == 4
    assert texts.text(500, key=3) == found[-1]


def test_turns_that_a_context_has_no_room_for_are_left_out() -> None:
    shape = Shape(agent_token_count=100)
    session = Session(0, tuple(Turn(50, 20, 0.0) for _ in range(10)))
    (cut,) = fitting([session], shape, context_token_limit=400)
    assert len(cut.turns) == 3


def played(arrangement: str, *, cached: int, failures: tuple[str, ...] = ()) -> Played:
    return Played(
        arrangement=arrangement,
        request_count=10,
        failures=failures,
        prompt_token_count=1000,
        cached_token_count=cached,
        ttft_p50_s=0.1,
        ttft_p95_s=0.2,
        duration_s=1.0,
        accepted={"A": 10},
        prefill_tokens_per_s=500.0,
        output_tokens_per_s=60.0,
    )


def test_verdicts_are_ratios_of_the_same_round() -> None:
    rounds = [(950, 940), (900, 855)]
    found = Findings(
        shape=Shape(),
        sizes={},
        played=[
            played(name, cached=cached)
            for one, aware in rounds
            for name, cached in ((ONE.name, one), (AWARE.name, aware))
        ],
        pairs=[Pair(0.020, 0.012), Pair(0.021, 0.011)],
        store=StoreFacts(20_000.0, 46_080),
    )
    kept, added = verdicts_of(found)
    assert kept.spread.maximum == pytest.approx(940 / 950) and kept.spread.minimum == pytest.approx(0.95)
    assert added.spread.median == pytest.approx(9.0) and kept.is_met and added.is_met
    assert "--prefill 500 --decode 60 --restore 20000 --kv-kib 45 --gateway-ms 9.0" in simulation_line(found)


def test_a_round_with_broken_sessions_proves_nothing() -> None:
    found = Findings(
        shape=Shape(),
        sizes={},
        played=[played(ONE.name, cached=900), played(AWARE.name, cached=950, failures=("session 3: lost",))],
        pairs=[Pair(0.020, 0.012)],
        store=StoreFacts(20_000.0, 46_080),
    )
    kept, _ = verdicts_of(found)
    assert not kept.is_met and kept.spread.count == 0


def conversation(number: int, *turns: tuple[str, int, int]) -> Conversation:
    """Return one whose turns were answered by this worker, with so many tokens from RAM and SSD."""
    made = Conversation(number, "page", ("a", "b", "c"))
    answer = Answer("text", prompt_token_count=100, cached_token_count=0, output_token_count=8, ttft_s=0.1)
    made.turns += [TourTurn(worker, answer, ram, ssd) for worker, ram, ssd in turns]
    return made


def test_of_three_conversations_two_have_a_worker_in_common() -> None:
    made = [conversation(1, ("B", 0, 0)), conversation(2, ("A", 0, 0)), conversation(3, ("B", 0, 0))]
    victim, going_on, returning = chosen(made)
    assert (victim, going_on.number, returning.number) == ("B", 1, 3)


@pytest.mark.parametrize(
    ("going_on", "returning", "complaint"),
    [
        (("B", 0, 0), ("A", 0, 90), None),
        (("A", 90, 0), ("A", 0, 90), "did not go on without worker A"),
        (("B", 0, 0), ("B", 0, 0), "did not come back to worker A"),
        (("B", 0, 0), ("A", 0, 0), "without what it had on SSD"),
    ],
)
def test_the_tour_says_what_went_wrong(
    going_on: tuple[str, int, int], returning: tuple[str, int, int], complaint: str | None
) -> None:
    before = (("A", 0, 0), ("A", 90, 0))
    first, second = conversation(1, *before, going_on), conversation(2, *before, returning)
    wrong = complaints([first, second], victim="A", going_on=first, returning=second)
    assert (not wrong) if complaint is None else (len(wrong) == 1 and complaint in wrong[0])


def test_without_the_gateway_the_tour_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tour, "missing_packages", lambda: ["smg"])
    monkeypatch.setattr("sys.argv", ["tour"])
    with pytest.raises(SystemExit, match="1"):
        tour.main()
    assert "make fleet needs smg" in (said := capsys.readouterr().err) and "pip install -e '.[dev]'" in said


def test_a_conversation_is_asked_with_all_that_was_said() -> None:
    first, *others = open_conversations()
    assert len(others) == 2 and len({each.page[:20] for each in (first, *others)}) == 3
    assert [message["role"] for message in first.ask()] == ["system", "user"]
