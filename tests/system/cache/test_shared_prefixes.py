"""A prefix shared by name: others start from it, and nothing of theirs becomes anybody else's."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.domain.cache_commands import Explain
from icehouse_server.domain.cache_stats import TenantShare
from icehouse_server.domain.ids import CacheScope, Tenant
from icehouse_server.domain.request import CacheUse

from tests.fixtures.known_blocks import removal_of
from tests.system.cache.stepped_server import BLOCK, HYBRID, KV, STATE_ONLY, WINDOWS, SteppedServer, prompt
from tests.system.cache.test_tenant_quotas import A, B, share_of

HANDBOOK = Tenant("handbook")

SHARED = prompt(4 * BLOCK)
ALL = [KV, WINDOWS, HYBRID, STATE_ONLY]


def warm(served: SteppedServer) -> None:
    # A prompt's last token is left to whoever runs it.
    served.ask("warm", [*SHARED, 1], max_output_tokens=0, tenant=HANDBOOK)


def question(salt: int) -> list[int]:
    return [*SHARED, *prompt(3 * BLOCK + 1, salt=salt)]


@pytest.mark.parametrize("facts", ALL)
@pytest.mark.parametrize("restarted", [False, True])
def test_others_start_from_it_and_keep_the_rest_to_themselves(tmp_path: Path, facts, restarted: bool) -> None:
    with SteppedServer(tmp_path, facts=facts) as served:
        warm(served)
        if not restarted:
            check_use(served)
    if restarted:
        with SteppedServer(tmp_path, facts=facts) as served:
            check_use(served)


def check_use(served: SteppedServer) -> None:
    reused = served.ask("a", question(1), tenant=A, shared_tenant=HANDBOOK).cache.cached_token_count
    assert reused == 4 * BLOCK
    again = served.ask("a again", question(1), tenant=A, shared_tenant=HANDBOOK).cache.cached_token_count
    assert again == 7 * BLOCK
    other = served.ask("b", question(1), tenant=B, shared_tenant=HANDBOOK).cache.cached_token_count
    assert other == reused, "what A asked was A's own"
    assert served.ask("c", question(1), tenant=Tenant("c")).cache.cached_token_count == 0
    served.check()


@pytest.mark.parametrize("facts", ALL)
def test_nobody_writes_to_it_but_its_own_tenant(facts) -> None:
    with SteppedServer(facts=facts) as served:
        warm(served)
        before = share_of(served, HANDBOOK)
        for salt in range(1, 4):
            served.ask(f"a{salt}", question(salt), tenant=A, shared_tenant=HANDBOOK)
        assert share_of(served, HANDBOOK) == before
        assert share_of(served, A).ram_bytes > 0
        served.check()


@pytest.mark.parametrize("facts", ALL)
def test_its_blocks_count_for_nobody_else_after_a_restart(tmp_path: Path, facts) -> None:
    with SteppedServer(tmp_path, facts=facts) as served:
        warm(served)
    with SteppedServer(tmp_path, facts=facts) as served:
        how = {"tenant": A, "shared_tenant": HANDBOOK, "cache_use": CacheUse.READ_ONLY}
        assert served.ask("a", [*SHARED, 1], **how).cache.cached_token_count == 4 * BLOCK
        assert share_of(served, A) == TenantShare(A, ram_bytes=0, ssd_bytes=0)
        served.check()


@pytest.mark.parametrize("facts", ALL)
def test_without_it_the_same_text_is_computed_again_and_then_found(facts) -> None:
    with SteppedServer(facts=facts) as served:
        warm(served)
        served.ask("a", question(1), tenant=A, shared_tenant=HANDBOOK)
        served.order(removal_of(served.cache, (*SHARED, 1), CacheScope(HANDBOOK)))
        served.check()
        served.ask("a alone", question(1), tenant=A, shared_tenant=HANDBOOK)
        assert served.ask("a at last", question(1), tenant=A).cache.cached_token_count == 7 * BLOCK
        served.check()


def test_what_follows_it_is_not_written_to_ssd_early(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as served:
        warm(served)
        served.ask("a", question(1), tenant=A, shared_tenant=HANDBOOK)
        assert served.stats().spill.accepted_block_total == 0


def test_a_match_ends_inside_one_of_its_blocks(tmp_path: Path) -> None:
    fork = [*SHARED[: 3 * BLOCK + 2], *prompt(BLOCK, salt=9)]
    with SteppedServer(tmp_path) as served:
        warm(served)
        how = {"tenant": A, "shared_tenant": HANDBOOK}
        assert served.ask("a", fork, **how).cache.cached_token_count == 3 * BLOCK + 2
    with SteppedServer(tmp_path) as served:
        how = {"tenant": B, "shared_tenant": HANDBOOK}
        assert served.ask("b", fork, **how).cache.cached_token_count == 3 * BLOCK + 2


def test_explain_tells_of_it_and_a_tenant_evicts_its_own_only() -> None:
    with SteppedServer() as served:
        warm(served)
        asked = tuple(question(1))
        assert served.order(Explain(asked, CacheScope(A))).cache.cached_token_count == 0
        assert (
            served.order(Explain(asked, CacheScope(A), CacheScope(HANDBOOK))).cache.cached_token_count
            == 4 * BLOCK
        )
        served.order(removal_of(served.cache, asked, CacheScope(A)))
        assert (
            served.order(Explain(asked, CacheScope(A), CacheScope(HANDBOOK))).cache.cached_token_count
            == 4 * BLOCK
        )
