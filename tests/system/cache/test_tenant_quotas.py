"""Tenants: nothing of one is another's, and one that fills its share loses blocks of its own only."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.domain.cache_commands import Pin, PinReport, Unpin
from icehouse_server.domain.cache_stats import SpillDropCause, TenantShare
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.domain.ids import NO_ADAPTER, AdapterDigest, AdapterName, CacheScope, Tenant
from icehouse_server.engine.prefix_cache.tiers.prefix_settings import QuotaLimits
from icehouse_server.errors import Overloaded

from tests.system.cache.stepped_server import (
    BLOCK,
    BLOCK_BYTES,
    HYBRID,
    KV,
    STATE_ONLY,
    WINDOWS,
    SteppedServer,
    prompt,
)

A, B = Tenant("a"), Tenant("b")

FILE_BYTES = 2_000
"""More than a file of one block takes here."""

UNDER_WAY_BYTES = 66_000
"""What a block on its way to SSD counts for, until its file's real size is known."""


def share_of(served: SteppedServer, tenant: Tenant) -> TenantShare:
    """Return a tenant's row of the statistics."""
    [found] = [share for share in served.stats().tenants if share.tenant == tenant]
    return found


@pytest.mark.parametrize("facts", [KV, WINDOWS, HYBRID, STATE_ONLY])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_prompt_cached_by_one_tenant_saves_another_nothing(tmp_path: Path, facts, restarted: bool) -> None:
    tokens = prompt(6 * BLOCK + 1)
    with SteppedServer(tmp_path, facts=facts) as served:
        served.ask("a", tokens, tenant=A)
        if not restarted:
            own = served.ask("a again", tokens, tenant=A)
    if restarted:
        with SteppedServer(tmp_path, facts=facts) as served:
            own = served.ask("a again", tokens, tenant=A)
    assert own.cache.cached_token_count == 6 * BLOCK
    with SteppedServer(tmp_path, facts=facts) as served:
        served.ask("a", tokens, tenant=A)
        before = served.loop.counters.stats.prefilled_token_total
        other = served.ask("b", tokens, tenant=B)
        # All of it was computed, up to the last token, which always runs: its first token waits as if cold.
        assert served.loop.counters.stats.prefilled_token_total - before == len(tokens) - 1
        assert (other.cache.cached_token_count, other.cache.limit) == (0, ReuseLimit.NO_MATCH)


def test_a_prompt_that_one_tenant_computes_right_now_is_not_followed_by_another() -> None:
    tokens = prompt(6 * BLOCK + 1)
    with SteppedServer() as served:
        for name, tenant in (("a", A), ("b", B)):
            served.submit(name, tokens, tenant=tenant)
        served.step_until_idle()
        assert served.loop.counters.stats.prefilled_token_total == 2 * (len(tokens) - 1)
        alone = served.loop.counters.stats.prefilled_token_total
        # The same at once from one tenant: the second follows the first.
        for name in ("c", "d"):
            served.submit(name, prompt(6 * BLOCK + 1, salt=1), tenant=A)
        served.step_until_idle()
        assert served.loop.counters.stats.prefilled_token_total - alone < 2 * (len(tokens) - 1)


@pytest.mark.parametrize("facts", [KV, WINDOWS, HYBRID])
def test_a_tenant_that_fills_its_share_of_ram_pushes_out_its_own_only(facts) -> None:
    share_bytes = 8 * BLOCK_BYTES
    with SteppedServer(facts=facts, quotas=QuotaLimits(ram_bytes=share_bytes)) as served:
        served.ask("b", prompt(2 * BLOCK + 1), tenant=B)
        before = share_of(served, B)
        for salt in range(1, 12):
            served.ask("a", prompt(3 * BLOCK + 1, salt=salt), tenant=A)
            served.check()
            assert 0 < share_of(served, A).ram_bytes <= share_bytes
        assert share_of(served, B) == before
        assert served.ask("b", prompt(2 * BLOCK + 1), tenant=B).cache.cached_token_count == 2 * BLOCK
        # Its latest is still there, its first is not.
        assert served.ask("a", prompt(3 * BLOCK + 1, salt=11), tenant=A).cache.cached_token_count > 0
        assert served.ask("a", prompt(3 * BLOCK + 1, salt=1), tenant=A).cache.cached_token_count == 0


def test_a_tenant_has_one_share_for_all_its_adapters() -> None:
    share_bytes = 8 * BLOCK_BYTES
    adapters = {AdapterName("one"): AdapterDigest(b"1" * 32), AdapterName("two"): AdapterDigest(b"2" * 32)}
    with SteppedServer(quotas=QuotaLimits(ram_bytes=share_bytes), adapters=adapters) as served:
        served.ask("b", prompt(2 * BLOCK + 1), tenant=B)
        before = share_of(served, B)
        for salt in range(1, 8):
            for adapter in (NO_ADAPTER, *adapters):
                served.ask("a", prompt(3 * BLOCK + 1, salt=salt), tenant=A, adapter=adapter)
                served.check()
                assert 0 < share_of(served, A).ram_bytes <= share_bytes
        held = sum(entry.ram_bytes for entry in served.cache.tree.in_ram())
        assert held == share_of(served, A).ram_bytes + before.ram_bytes, "no root's bytes are left out"
        assert share_of(served, B) == before


def test_a_tenant_that_fills_its_share_of_the_ssd_loses_its_own_only(tmp_path: Path) -> None:
    limits = QuotaLimits(ssd_bytes=UNDER_WAY_BYTES + 8 * FILE_BYTES)
    with SteppedServer(tmp_path, ram_blocks=4, quotas=limits) as served:
        served.ask("b", prompt(2 * BLOCK + 1), tenant=B)
        over_time = []
        for salt in range(1, 40):
            served.ask("a", prompt(3 * BLOCK + 1, salt=salt), tenant=A)
            served.check()
            over_time.append(share_of(served, A).ssd_bytes)
        assert 8 * FILE_BYTES < max(over_time) <= limits.ssd_bytes and min(over_time[10:]) > 6 * FILE_BYTES
        held = share_of(served, B).ssd_bytes
    with SteppedServer(tmp_path, ram_blocks=4, quotas=limits) as served:
        assert served.ask("b", prompt(2 * BLOCK + 1), tenant=B).cache.ssd_token_count == 2 * BLOCK
        assert served.ask("a", prompt(3 * BLOCK + 1, salt=39), tenant=A).cache.ssd_token_count > 0
        assert served.ask("a", prompt(3 * BLOCK + 1, salt=1), tenant=A).cache.cached_token_count == 0
        # A name was never stored, and still the blocks found their owners.
        assert share_of(served, B).ssd_bytes >= held > 0
        served.check()


def test_a_share_full_of_pins_drops_what_would_go_to_ssd_and_counts_it(tmp_path: Path) -> None:
    limits = QuotaLimits(ssd_bytes=UNDER_WAY_BYTES + 3 * FILE_BYTES)
    with SteppedServer(tmp_path, spill_policy="write_behind", quotas=limits) as served:
        drops = 0
        for salt in range(1, 60):
            tokens = prompt(BLOCK + 1, salt=salt)
            served.ask("a", tokens, tenant=A)
            served.write_behind()
            served.order(Pin(tuple(tokens), CacheScope(A)))
            served.check()
            found = {drop.cause: drop.block_total for drop in served.stats().spill.drops}
            drops = found.get(SpillDropCause.TENANT_SHARE, 0)
        assert drops > 0
        assert share_of(served, A).ssd_bytes <= limits.ssd_bytes


def test_an_owner_that_could_not_be_told_shows_when_the_block_is_used(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, facts=STATE_ONLY) as served:
        served.ask("a", prompt(6 * BLOCK + 1), tenant=A)
    with SteppedServer(tmp_path, facts=STATE_ONLY) as served:
        assert {entry.owner for entry in served.cache.tree} == {None}
        served.ask("a", prompt(6 * BLOCK + 1), tenant=A)
        assert share_of(served, A).ssd_bytes > 0
        served.check()


def test_tenants_cannot_pin_all_of_a_tier_together() -> None:
    """Each may pin three quarters of it, and two of them all there is: then nobody's prompt had room."""
    with SteppedServer(ram_blocks=8) as served:
        for salt in range(1, 21):
            for tenant in (A, B):
                tokens = prompt(BLOCK + 1, salt=salt + 20 * (tenant is B))
                served.ask("a", tokens, tenant=tenant)
                answer = served.order(Pin(tuple(tokens), CacheScope(tenant)))
                served.check()
        assert isinstance(answer, Overloaded)
        limit_bytes = int(0.75 * served.cache.ram.limit_bytes)
        assert "of all tenants" in str(answer) and f"{limit_bytes} may be pinned" in str(answer)
        assert served.cache.tree.ram.pinned_by.total() <= limit_bytes
        third = prompt(BLOCK + 1, salt=90)
        served.ask("c", third, tenant=Tenant("c"))
        assert served.ask("c", third, tenant=Tenant("c")).cache.cached_token_count > 0


def test_pinned_blocks_on_ssd_lend_their_ram_to_requests_that_have_none(tmp_path: Path) -> None:
    """Else the pins of one tenant could keep the memory of all others, who may evict nothing for it."""
    with SteppedServer(tmp_path, spill_policy="write_behind") as served:
        pinned, free = prompt(4 * BLOCK + 1), prompt(3 * BLOCK + 1, salt=1)
        served.ask("a", pinned[: 3 * BLOCK + 1], tenant=A)
        served.ask("a", free, tenant=A)
        served.write_behind()
        served.holds_storage = True
        served.ask("a", pinned, tenant=A)
        answers = served.give(Pin(tuple(pinned), CacheScope(A)))
        served.step_until_idle()
        held_bytes = served.cache.tree.ram.pinned_by.total()
        ram_bytes = served.cache.tree.ram.used_bytes
        on_ssd = {entry.hash for entry in served.cache.tree.pinned_in_ram if entry.ssd}
        assert held_bytes > 0 and on_ssd
        # Others' blocks go first, and a pinned one that is not on SSD yet does not go at all.
        assert served.cache.ram.yield_bytes(1) > 0 and served.cache.tree.ram.pinned_by.total() == held_bytes
        served.cache.ram.yield_bytes(ram_bytes)
        left = set(served.cache.tree.in_ram())
        assert any(entry.is_pinned for entry in left)
        assert not any(entry.hash in on_ssd for entry in left)
        served.holds_storage = False
        served.step_until_idle()
        assert [type(answer) for answer in answers] == [PinReport]
        served.check()
        assert served.ask("a", pinned, tenant=A).cache.ssd_token_count > 0


def test_a_tenant_cannot_pin_all_of_a_tier() -> None:
    """Pins that fill it would leave no room for anybody, and nothing that can be evicted for them."""
    with SteppedServer(ram_blocks=8) as served:
        answers = []
        for salt in range(1, 41):
            tokens = prompt(BLOCK + 1, salt=salt)
            served.ask("a", tokens, tenant=A)
            answers.append(served.order(Pin(tuple(tokens), CacheScope(A))))
            served.check()
        refused = [answer for answer in answers if isinstance(answer, Overloaded)]
        assert isinstance(answers[0], PinReport) and refused
        assert "may be pinned" in str(refused[0])
        pinned = [entry for entry in served.cache.tree if entry.is_pinned]
        assert sum(entry.ram_bytes for entry in pinned) <= 0.75 * served.cache.ram.limit_bytes
        # Another tenant is served from both tiers beside it, and what is unpinned makes room.
        served.ask("b", prompt(BLOCK + 1, salt=99), tenant=B)
        assert served.ask("b", prompt(BLOCK + 1, salt=99), tenant=B).cache.cached_token_count > 0
        for salt in range(1, 41):
            served.order(Unpin(tuple(prompt(BLOCK + 1, salt=salt)), CacheScope(A)))
        last = prompt(BLOCK + 1, salt=40)
        served.ask("a", last, tenant=A)
        assert isinstance(served.order(Pin(tuple(last), CacheScope(A))), PinReport)
