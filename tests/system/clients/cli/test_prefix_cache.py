"""`icehouse explain`, `warm`, `pin`, `unpin`, `evict`: what is asked of the server, and what is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from icehouse.v1 import cache_service_pb2, usage_pb2
from icehouse_client.cli.console import UsageError
from icehouse_client.cli.prefix_cache import LIMITS, explanation, parts_bar
from icehouse_server.domain.cache_commands import (
    EndSession,
    EvictReport,
    Explain,
    Explanation,
    ListKnown,
    Pin,
    PinReport,
    SessionEndReport,
    Unpin,
)
from icehouse_server.domain.events import CacheReport, ReuseLimit
from icehouse_server.domain.ids import CacheScope, Tenant

from tests.fixtures.terminal import invoke, written
from tests.unit.rpc.conftest import RunningServer, running

FOUND = Explanation(
    CacheReport(ram_token_count=4, ssd_token_count=2, restore_s=0.1, limit=ReuseLimit.DIVERGED), (), 0.25, 1.5
)


async def test_explain_shows_where_the_prompt_comes_from(served: RunningServer) -> None:
    served.engine.order_answer = FOUND
    told = await invoke("explain", "12345678", "--address", served.server.address, "--tenant", "blue")
    facts = json.loads(
        (await invoke("explain", "-", "--json", "--address", served.server.address, input="Hi")).stdout
    )
    assert told.exit_code == 0, told.output
    assert "8 tokens: █ 4 from RAM   ▓ 2 from SSD   ░ 2 to compute" in told.stdout
    assert "first token in about 250 ms, without the cache 1.50 s" in told.stdout
    assert "why not more: no cached prompt continues like this one" in told.stdout
    assert facts["cache"]["ram_tokens"] == 4 and facts["cache"]["limit"] == "REUSE_LIMIT_DIVERGED"
    assert served.engine.orders == [
        Explain(tuple(b"12345678"), CacheScope(Tenant("blue"))),
        Explain(tuple(b"Hi"), CacheScope()),
    ]


async def test_a_prompt_is_text_a_turn_a_conversation_or_tokens(
    served: RunningServer, tmp_path: Path
) -> None:
    served.engine.order_answer = FOUND
    file = tmp_path / "talk.json"
    file.write_text('[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]')
    for given in (
        ["Hi", "--chat"],
        ["Hi", "--system", "x"],
        ["--messages", str(file)],
        ["--tokens", "1, 2 3"],
        ["a", "--suffix", "b"],
    ):
        result = await invoke("explain", *given, "--address", served.server.address)
        assert result.exit_code == 0, result.output
    asked = [order.prompt_token_ids for order in served.engine.orders if isinstance(order, Explain)]
    assert asked == [
        tuple(b"user:Hi;"),
        tuple(b"system:x;user:Hi;"),
        tuple(b"system:a;user:b;"),
        (1, 2, 3),
        (256, *b"a", 257, *b"b", 258),
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "give one of TEXT"),
        (["Hi", "--tokens", "1"], "give one of TEXT"),
        (["--tokens", "1,x"], "are not token ids"),
    ],
)
async def test_no_prompt_and_two_are_wrong_usage(given: list[str], words: str) -> None:
    result = await invoke("explain", *given, "--address", "127.0.0.1:1")
    assert result.exit_code == 2 and words in result.output


async def test_a_file_without_a_message_is_no_prompt(tmp_path: Path) -> None:
    file = written(tmp_path, "none.json", b"[]")
    result = await invoke("explain", "--messages", file, "--address", "127.0.0.1:1")
    assert isinstance(result.exception, UsageError) and "it has no messages" in str(result.exception)


async def test_orders_reach_the_cache(served: RunningServer) -> None:
    address = ("--address", served.server.address)
    served.engine.order_answer = PinReport(1, 256, 4096)
    pinned, unpinned = await invoke("pin", "Hi", *address), await invoke("unpin", "Hi", *address)
    await invoke("pin", "Hi", "--ttl", "2h", *address)
    mistaken = await invoke("pin", "Hi", "--ttl", "soon", *address)
    served.engine.order_answer = EvictReport(4, 4096, 2, 2048)
    evicted = await invoke("evict", "Hi", *address)
    refused = await invoke("evict", "--all", *address, input="n\n")
    everything = await invoke("evict", "--all", "--yes", "--json", *address)
    both = await invoke("evict", "Hi", "--all", *address)
    unasked = await invoke("evict", "--all", *address)
    assert pinned.stdout == "pinned: 1 blocks with 256 tokens, 4 KiB\n"
    assert unpinned.stdout.startswith("unpinned: 1 blocks")
    assert evicted.stdout == "removed: 4 blocks from RAM (4 KiB), 2 from SSD (2 KiB)\n"
    assert refused.exit_code == 1 and "Remove everything" in refused.stderr
    assert json.loads(everything.stdout)["ram_block_count"] == "4"
    assert both.exit_code == 2
    assert unasked.exit_code == 2 and "pass --yes" in unasked.stderr and "Aborted" not in unasked.stderr
    hi, scope = tuple(b"Hi"), CacheScope()
    pins = [Pin(hi, scope), Unpin(hi, scope), Pin(hi, scope, ttl_s=7200.0)]
    assert served.engine.orders[:4] == [*pins, ListKnown(hi, scope)]
    assert mistaken.exit_code == 2 and "30s, 5m, 1h or 7d" in mistaken.output
    assert ListKnown(None) in served.engine.orders


async def test_a_session_is_ended(served: RunningServer) -> None:
    served.engine.order_answer = SessionEndReport(block_count=1_200, ram_bytes=3 << 20)
    address = ("--address", served.server.address)
    ended = await invoke("end-session", "talk-1", "--tenant", "blue", *address)
    assert served.engine.orders == [EndSession("talk-1", Tenant("blue"))]
    assert ended.stdout == "evicted first from now on: 1,200 blocks, 3 MiB in RAM, 0 bytes on SSD\n"


async def test_warm_runs_the_prompt_without_output(served: RunningServer) -> None:
    told = await invoke("warm", "Hi", "--address", served.server.address)
    facts = await invoke("warm", "Hi", "--json", "--address", served.server.address)
    assert told.exit_code == 0, told.output
    assert told.stdout == "2 prompt tokens, 3 cached (2 from RAM, 1 from SSD) · 4.50 s in all · warm\n"
    assert told.stderr == "", "a bar that nobody sees leaves no line"
    assert json.loads(facts.stdout)["usage"]["ram_tokens"] == 2
    assert [request.max_output_tokens for request in served.engine.submitted] == [0, 0]


async def test_a_server_without_a_cache_says_so() -> None:
    async with running() as served:
        result = await invoke("pin", "Hi", "--address", served.server.address)
    assert (result.exit_code, result.stderr) == (1, "icehouse: FAILED_PRECONDITION: no cache here\n")


def test_a_bar_is_as_long_as_it_may_be_and_shows_what_is_little() -> None:
    assert parts_bar([("█", 999), ("▓", 1), ("░", 0)], width=10).plain == "█████████▓"
    thirds = parts_bar([("█", 1), ("▓", 1), ("░", 1)], width=10).plain
    assert len(thirds) == 10 and set(thirds) == {"█", "▓", "░"}
    assert parts_bar([("█", 0)], width=10).plain == ""


def test_every_limit_of_reuse_has_its_words() -> None:
    names = {value.name.removeprefix("REUSE_LIMIT_") for value in usage_pb2.ReuseLimit.DESCRIPTOR.values}
    assert names == {*LIMITS, "UNSPECIFIED"}


def test_where_prompts_part_is_told_without_what_a_terminal_obeys() -> None:
    found = cache_service_pb2.ExplainResponse(prompt_tokens=4)
    found.cache.divergence.token_index = 3
    found.cache.divergence.prompt_token.text = "a\x1b[2J"
    found.cache.divergence.cached_token.text = "b"
    text = explanation(found, width=80).plain
    assert "at token 3: 'a?[2J' here, 'b' there" in text and "no prediction yet" in text
