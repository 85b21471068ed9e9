"""Two servers before one object store: what one computed the other one reuses, and never a wrong token."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.request import CacheUse
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import QuotaLimits
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts
from icehouse_server.storage.files import Files

from tests.fixtures.engine import FakeClock
from tests.fixtures.known_blocks import removal_of
from tests.fixtures.storage.object_store import SHARED, MemoryStore
from tests.fixtures.storage.sole_tier import SoleTier
from tests.fixtures.storage.storage_thread import settings_for
from tests.system.cache.stepped_server import (
    BLOCK,
    FINGERPRINT,
    HYBRID,
    KV,
    STATE_ONLY,
    WINDOWS,
    SteppedServer,
    prompt,
)

TOKENS = prompt(4 * BLOCK + 2)
LONGER = [*TOKENS, *prompt(2 * BLOCK, salt=3)]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def serve(directory: Path, store: MemoryStore, *, facts: CacheFacts = KV, **how) -> SteppedServer:
    clock = FakeClock()
    settings = settings_for(directory)

    def tier(post) -> SoleTier:
        return SoleTier(
            settings,
            files=Files(),
            clock=clock,
            post=post,
            fingerprint=FINGERPRINT,
            store=store,
            shared=SHARED,
            is_inline=True,
        )

    return SteppedServer(facts=facts, clock=clock, tier=tier, **how)


def compute(
    directory: Path, store: MemoryStore, tokens=TOKENS, *, facts: CacheFacts = KV, **how
) -> list[int]:
    """Have a server of its own compute a prompt and end; return its reply."""
    with serve(directory, store, facts=facts) as first:
        return first.ask("first", tokens, **how).tokens


@pytest.mark.parametrize("facts", [KV, WINDOWS, HYBRID, STATE_ONLY], ids=["kv", "windows", "hybrid", "state"])
def test_a_second_server_reuses_what_the_first_computed(tmp_path, store, facts) -> None:
    compute(tmp_path / "a", store, facts=facts)
    with SteppedServer(facts=facts) as alone:
        expected = alone.ask("cold", LONGER).tokens
    with serve(tmp_path / "b", store, facts=facts) as second:
        answer = second.ask("again", LONGER)
        assert answer.cache.ssd_token_count == 4 * BLOCK
        assert answer.tokens == expected
        second.check()
        assert second.ask("warm", LONGER).cache.ram_token_count > 0


def test_what_is_here_already_is_not_asked_for(tmp_path, store) -> None:
    compute(tmp_path / "a", store, LONGER)
    with serve(tmp_path / "b", store) as second:
        second.ask("first", TOKENS)
        asked_count = store.request_count
        assert second.ask("again", TOKENS).cache.cached_token_count >= 4 * BLOCK
        assert store.request_count == asked_count, "all its full blocks are here"
        second.cache.rates.prefill_tokens_per_s = 0.0
        assert second.ask("longer", LONGER).cache.cached_token_count == 6 * BLOCK


def test_a_store_that_hangs_costs_a_miss(tmp_path, store) -> None:
    expected = compute(tmp_path / "a", store)
    store.hangs = True
    with serve(tmp_path / "b", store) as second:
        for number in range(3):
            second.cache.rates.prefill_tokens_per_s = 0.0
            answer = second.ask(f"{number}", prompt(4 * BLOCK + 2, salt=number))
            assert answer.cache.cached_token_count == 0
        asked_count = store.request_count
        assert second.ask("mine", TOKENS).tokens == expected
        assert store.request_count == asked_count, "nobody waits for it any more"
        store.hangs = False


def test_an_object_of_another_block_is_computed_instead(tmp_path, store) -> None:
    expected = compute(tmp_path / "a", store)
    names = sorted(store.objects)
    store.objects = dict(zip(names, [store.objects[name] for name in (*names[1:], names[0])], strict=True))
    with serve(tmp_path / "b", store) as second:
        answer = second.ask("again", TOKENS)
        assert (answer.tokens, answer.cache.cached_token_count) == (expected, 0)
    with serve(tmp_path / "c", store) as third:
        assert third.ask("again", TOKENS).cache.cached_token_count > 0, "the second one has put that right"


def test_a_request_that_may_write_nothing_brings_nothing(tmp_path, store) -> None:
    compute(tmp_path / "a", store)
    asked_count = store.request_count
    with serve(tmp_path / "b", store) as second:
        for use in (CacheUse.READ_ONLY, CacheUse.OFF):
            assert second.ask(str(use), TOKENS, cache_use=use).cache.cached_token_count == 0
    assert store.request_count == asked_count


def test_a_tenant_finds_no_other_tenant_s_blocks(tmp_path, store) -> None:
    compute(tmp_path / "a", store, tenant=Tenant("a"))
    with serve(tmp_path / "b", store) as second:
        assert second.ask("theirs", TOKENS, tenant=Tenant("b")).cache.cached_token_count == 0
        second.cache.rates.prefill_tokens_per_s = 0.0
        assert second.ask("own", TOKENS, tenant=Tenant("a")).cache.cached_token_count == 4 * BLOCK


def test_what_is_fetched_keeps_to_the_tenant_s_share(tmp_path, store) -> None:
    compute(tmp_path / "a", store)
    size_bytes = sum(map(len, store.objects.values()))
    with serve(tmp_path / "b", store, quotas=QuotaLimits(0, size_bytes // 2)) as second:
        assert second.ask("again", TOKENS).cache.cached_token_count == 0


def test_a_slow_store_is_left_where_computing_is_faster_and_is_tried_again(tmp_path, store) -> None:
    prompts = [prompt(4 * BLOCK + 2, salt=salt) for salt in range(3)]
    for number, tokens in enumerate(prompts):
        compute(tmp_path / f"a{number}", store, tokens)
    with serve(tmp_path / "b", store, may_recompute=True) as second:
        rates = second.cache.rates
        fetcher = second.storage._fetcher
        fetcher._fetch_count, fetcher._rate.value = 3, 10.0
        rates.prefill_tokens_per_s = 0.1
        assert second.ask("computed", prompts[0]).cache.cached_token_count == 0
        assert rates.unfetched_count == 1, "it was asked for, and found slow"
        fetcher._rate.value = 1e9
        rates.prefill_tokens_per_s = 0.1
        assert second.ask("fetched", prompts[1]).cache.ssd_token_count == 4 * BLOCK
        assert rates.unfetched_count == 0


def test_evicted_by_order_it_is_gone_for_all(tmp_path, store) -> None:
    with serve(tmp_path / "a", store, spill_policy="write_behind") as first:
        first.ask("first", TOKENS)
        first.write_behind()
        assert store.objects
        first.order(removal_of(first.cache))
    assert not store.objects
