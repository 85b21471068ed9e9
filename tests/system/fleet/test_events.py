"""A gateway that follows its workers' KV events: prompts go where their blocks are, whoever asked first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from tokenizers import Tokenizer

from bench.fleet.gateway import worker_url
from tests.system.fleet.conftest import BLOCK, LONG, Fleet, fleet_of, until

pytest.importorskip("smg_grpc_proto", reason="smg-grpc-proto comes with the extra fleet")

from tests.system.fleet import direct

pytestmark = pytest.mark.fleet

_GATEWAY_OPTIONS = (
    *("--policy", "cache_aware"),
    # Else a hit now and then is sent to the worker that has fewer blocks, to warm it.
    *("--worker-warmup-secs", "0", "--worker-warmup-divert-every", "0"),
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Shared by these tests, each of which leaves it whole."""
    with fleet_of(
        tmp_path_factory.mktemp("events"),
        worker_options=("--spill-policy", "write_behind", "--drain-grace-s", "120"),
        gateway_options=_GATEWAY_OPTIONS,
    ) as started:
        yield started


def prompts(topic: str, *, count: int = 3) -> list[str]:
    """Return prompts of several blocks that have none in common with others."""
    return [f"{number} {topic}: " + "and the quick brown fox jumped " * 4 for number in range(count)]


def token_ids(fleet: Fleet, text: str) -> list[int]:
    """Return a text's tokens as the gateway asks for them, which adds none to a text."""
    tokenizer = Tokenizer.from_file(str(fleet.model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def known_blocks(fleet: Fleet, port: int) -> int:
    """Return how many blocks of a worker the gateway knows."""
    return int(fleet.gateway.metric("smg_kv_index_blocks", worker_port=port))


def warm(fleet: Fleet, port: int, texts: Sequence[str], *, tenant: str = "") -> int:
    """Have a worker compute new prompts without the gateway; return how many blocks the gateway was told."""
    before = known_blocks(fleet, port)
    count = 0
    for text in texts:
        answer = direct.ask(port, token_ids(fleet, text), tenant=tenant)
        assert answer.cached_token_count < BLOCK
        count += answer.prompt_token_count // BLOCK
    # Those of an earlier request may come later than they were counted.
    until(lambda: known_blocks(fleet, port) >= before + count)
    return count


def forget(fleet: Fleet, port: int) -> None:
    """Have a worker and then the gateway forget its blocks."""
    direct.flush(port)
    until(lambda: known_blocks(fleet, port) == 0)


def decisions(fleet: Fleet, branch: str) -> float:
    """Return how many requests the gateway has sent somewhere for this reason."""
    return fleet.gateway.metric("smg_cache_aware_policy_branch_total", branch=branch)


def takers_of(fleet: Fleet, texts: Sequence[str]) -> dict[int, int]:
    """Ask for prompts through the gateway, each of which must be cached; return how many each worker took."""
    before = fleet.accepted()
    for text in texts:
        usage = fleet.complete(text).usage
        whole = (usage.prompt_tokens - 1) // BLOCK * BLOCK
        assert usage.prompt_tokens_details.cached_tokens >= whole > 0
    return {port: count - before[port] for port, count in fleet.accepted().items() if count != before[port]}


def test_a_prompt_goes_to_the_worker_that_computed_it_for_somebody_else(fleet: Fleet) -> None:
    for port in fleet.workers:
        texts = prompts(f"on {port}")
        warm(fleet, port, texts)
        by_events = decisions(fleet, "event_hit")
        assert takers_of(fleet, texts) == {port: len(texts)}
        assert decisions(fleet, "event_hit") == by_events + len(texts)
    # Its own memory of what it sent where.
    assert decisions(fleet, "tree_match") == 0
    assert fleet.gateway.metric("smg_kv_event_gaps_total") == 0


def test_a_worker_that_has_forgotten_is_no_longer_preferred(fleet: Fleet) -> None:
    first, second = fleet.workers
    texts = prompts("forgotten")
    warm(fleet, first, texts)
    assert takers_of(fleet, texts) == {first: len(texts)}
    forget(fleet, first)
    warm(fleet, second, texts)
    assert takers_of(fleet, texts) == {second: len(texts)}


def test_tenants_never_meet(fleet: Fleet) -> None:
    first, second = fleet.workers
    texts = prompts("secret")
    warm(fleet, first, texts, tenant="ads")
    for text in texts:
        assert direct.ask(first, token_ids(fleet, text), tenant="search").cached_token_count == 0
        own = direct.ask(first, token_ids(fleet, text), tenant="ads")
        assert own.cached_token_count == own.prompt_token_count - 1
    # A gateway names no tenant: its requests are the default one's. All that the first worker has of others
    # draws none of them there, though the second has only a part of their prompts.
    warm(fleet, second, [text[: len(text) // 2] for text in texts])
    before = fleet.accepted()
    for text in texts:
        usage = fleet.complete(text, max_tokens=1).usage
        assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens - BLOCK
    assert fleet.accepted() == {first: before[first], second: before[second] + len(texts)}


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_worker_that_comes_back_is_warm_and_preferred_again(fleet: Fleet, end: str) -> None:
    port, _ = fleet.workers
    forget(fleet, port)
    texts = prompts(f"before it was {end}")
    block_count = warm(fleet, port, texts)
    until(lambda: fleet.written_blocks(port) == block_count)
    resync_count = fleet.gateway.metric("smg_kv_event_resyncs_total")
    if end == "killed":
        fleet.workers[port].kill()
    else:
        fleet.workers[port].terminate()
        assert fleet.workers[port].wait() == 0
    until(lambda: worker_url(port) not in fleet.gateway.healthy_urls())
    assert fleet.complete("Meanwhile others are served").choices
    fleet.restart(port)
    until(lambda: fleet.gateway.metric("smg_kv_event_resyncs_total") > resync_count)
    until(lambda: known_blocks(fleet, port) == block_count)
    assert takers_of(fleet, texts) == {port: len(texts)}
    assert fleet.cache_stats(port).lookups.ssd_token_total >= block_count * BLOCK


def test_draining_a_worker_loses_nothing(fleet: Fleet) -> None:
    drained, other = fleet.workers
    stories, late = prompts("a long story", count=2), prompts("too late", count=8)
    warm(fleet, drained, [*stories, *late])
    streams = [
        fleet.complete(
            story,
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=LONG // 2,
            extra_body={"ignore_eos": True},
        )
        for story in stories
    ]
    for stream in streams:
        next(stream)
    assert fleet.stats(drained).decoding_count == len(stories)
    fleet.workers[drained].terminate()
    # Their blocks draw them to a worker that takes no more, until the gateway has noticed.
    assert all(fleet.complete(text, max_tokens=1).choices for text in late)
    until(lambda: worker_url(drained) not in fleet.gateway.healthy_urls())
    before = fleet.stats(other).accepted_total
    assert all(fleet.complete(text, max_tokens=1).choices for text in late)
    assert fleet.stats(other).accepted_total == before + len(late)
    for stream in streams:
        chunks = list(stream)
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
        assert chunks[-1].usage.completion_tokens == LONG // 2
    assert fleet.workers[drained].wait() == 0
    fleet.restart(drained)
