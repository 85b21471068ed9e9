"""A cold tier that is no disk: the whole engine on another one behind the same port."""

from __future__ import annotations

import pytest
from icehouse_server.domain.cache_commands import Pin, Verify, VerifyReport
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.domain.ids import CacheScope, Tenant
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts
from icehouse_server.pins import NOT_PINNED
from icehouse_server.storage.api import StorageFailed

from tests.fixtures.engine import FakeClock
from tests.fixtures.known_blocks import removal_of
from tests.fixtures.storage.memory_tier import MemoryTier
from tests.system.cache.stepped_server import BLOCK, HYBRID, KV, WINDOWS, SteppedServer, prompt

SCOPE = CacheScope(Tenant(""))
TOKENS = prompt(4 * BLOCK + 1)


def served_by(*, facts: CacheFacts = KV, ram_blocks: float = 5) -> SteppedServer:
    clock = FakeClock()
    return SteppedServer(
        facts=facts, ram_blocks=ram_blocks, clock=clock, tier=lambda post: MemoryTier(clock=clock, post=post)
    )


def fill(served: SteppedServer) -> None:
    """Have the blocks of TOKENS in the tier alone."""
    served.ask("first", TOKENS, max_output_tokens=0)
    served.ask("other", prompt(5 * BLOCK + 1, salt=1), max_output_tokens=0)


@pytest.mark.parametrize("facts", [KV, WINDOWS], ids=["kv", "windows"])
def test_what_left_ram_is_read_again(facts: CacheFacts) -> None:
    with served_by(facts=facts, ram_blocks=9 if facts is WINDOWS else 5) as served:
        fill(served)
        answer = served.ask("again", TOKENS)
        assert answer.cache.ssd_token_count > 0
        assert answer.cache.cached_token_count == 4 * BLOCK
        served.check()


def test_checkpoints_are_read_again() -> None:
    with served_by(facts=HYBRID, ram_blocks=12) as served:
        fill(served)
        assert served.ask("again", TOKENS).cache.ssd_token_count > 0


def test_a_damaged_block_is_a_miss() -> None:
    with served_by() as served:
        fill(served)
        kept = [each for each in served.storage.kept.values() if each.start_token_index == BLOCK]
        for each in kept:
            served.storage.damage(each.hash)
        answer = served.ask("again", TOKENS)
        assert answer.cache.limit is ReuseLimit.LOAD_FAILED
        served.check()


def test_orders_reach_it_and_its_counters_come_back() -> None:
    with served_by() as served:
        fill(served)
        assert served.order(Pin(tuple(TOKENS), SCOPE)).block_count == 4
        assert sum(each.pin_end_time > NOT_PINNED for each in served.storage.kept.values()) > 0
        checked = served.order(Verify(None))
        assert isinstance(checked, VerifyReport)
        assert checked.verified_block_count == len(served.storage.kept) > 0
        stats = served.stats()
        assert stats.ssd is not None and stats.ssd.block_count == len(served.storage.kept)
        served.order(removal_of(served.cache))
        assert served.storage.kept == {}


def test_one_that_takes_no_blocks_or_dies_costs_no_answer() -> None:
    with served_by() as served:
        served.storage.takes_blocks = False
        fill(served)
        assert served.storage.kept == {}
        assert served.ask("again", TOKENS).cache.ssd_token_count == 0
        served.storage.takes_blocks = True
        served.mailbox.post(StorageFailed("pulled out"))
        served.is_storage_alive = False
        served.ask("without", TOKENS)
        drops = {drop.cause for drop in served.stats().spill.drops}
        assert SpillDropCause.NO_CREDIT not in drops


def test_one_that_hangs_is_not_waited_for() -> None:
    with served_by() as served:
        fill(served)
        served.storage.hangs = True
        served.submit("again", TOKENS)
        while not served.scheduler.loading_count:
            served.loop.step()
        served.clock.now += 60.0
        while served.recorder.end_of("again") is None:
            served.loop.step()
        assert served.answer("again").cache.limit is ReuseLimit.LOAD_FAILED
        served.storage.hangs = False
        served.step_until_idle()
        served.check()
