"""A follower on a real model repeats what rank 0's runner does: passes, cuts, copies, reads and restores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from icehouse.group.v1 import group_service_pb2 as group
from icehouse_server.clock import SystemClock
from icehouse_server.domain.blocks import HostBlock, RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.request import Speculation
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.ports import Chunk, DecodeRow
from icehouse_server.engine.prefix_cache.tiers.runner_port import PlacedBlock, RestoreInput
from icehouse_server.engine.runner.model_loader import ModelSource, load_tokenizer
from icehouse_server.engine.runner.runner import ModelRunner, RunnerSettings
from icehouse_server.errors import Unavailable
from icehouse_server.group.leader_runner import LeaderRunner
from icehouse_server.storage.api import BlocksLoaded, PlannedBlock

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.storage.blocks import make_chain
from tests.unit.group.ranks import Ranks, fingerprint_of

BLOCK = 16
LIMIT_BYTES = 1 << 30
PROMPT = tuple(range(20, 20 + 2 * BLOCK))
ONE, TWO = SequenceId(1), SequenceId(2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")
    return ModelSource(folder, folder.name)


class Two(Ranks):
    """Rank 0's runner and a follower's, each with the whole model, for there is no ring in one process."""

    def __init__(self, source: ModelSource) -> None:
        super().__init__()
        self.limit_bytes: int | None = None
        self.own_runner, self.their_runner = (runner_of(source) for _ in range(2))
        self.runner = LeaderRunner(
            self.own_runner, self.log, clock=self.clock, wait_for_all=lambda: self.limit_bytes
        )
        self.one.follower._runner = self.their_runner

    def load(self) -> None:
        self.limit_bytes = LIMIT_BYTES
        for _ in self.runner.load_steps(is_hurried=lambda: False):
            pass
        self.one.follower.load(memory_limit_bytes=LIMIT_BYTES)
        self.one.obey()

    def prefill(self, sequence_id: SequenceId, *, speculation: Speculation | None = None) -> None:
        """Run a prompt up to the token that its draws begin with."""
        row = DecodeRow(SamplingParams(), prompt_token_ids=PROMPT, speculation=speculation)
        self.runner.open(sequence_id)
        self.runner.run([Chunk(sequence_id, PROMPT[:-1])])
        self.runner.run([Chunk(sequence_id, PROMPT[-1:], row=row)])

    def decode(self, count: int) -> list[int]:
        """Return what the first sequence draws in so many passes."""
        return [drawn.token_id for _ in range(count) for drawn in self.runner.run([]).drawn]

    def agree(self) -> bool:
        self.one.obey()
        return self.own_runner.digest() == self.their_runner.digest()


def runner_of(source: ModelSource) -> ModelRunner:
    return ModelRunner(
        source=source,
        tokenizer=load_tokenizer(source),
        settings=RunnerSettings(block_token_count=BLOCK, is_pipelined=False, memory_limit_bytes=1 << 28),
        clock=SystemClock(),
    )


@pytest.fixture
def two(source: ModelSource) -> Iterator[Two]:
    ranks = Two(source)
    ranks.open()
    ranks.load()
    yield ranks
    ranks.runner.close()
    ranks.one.obey()


@pytest.mark.parametrize("speculation", [None, Speculation(4, 3)])
def test_passes_are_repeated(two: Two, speculation: Speculation | None) -> None:
    two.prefill(ONE, speculation=speculation)
    for _ in range(5):
        two.decode(1)
        assert two.agree()
    two.prefill(TWO)
    two.runner.release([ONE])
    two.decode(3)
    assert two.agree()
    two.runner.release([TWO])
    assert two.agree()


def test_another_state_is_noticed_before_the_next_pass(two: Two) -> None:
    two.prefill(ONE)
    two.one.obey()
    two.their_runner.release([ONE])
    two.decode(1)
    with pytest.raises(Unavailable, match="disagrees with rank 0 about pass"):
        two.one.obey()


def test_blocks_are_stored_read_and_restored_on_both(two: Two) -> None:
    two.prefill(ONE)
    expected = two.decode(4)
    blocks = two.runner.blocks
    headers = [block.header for block in make_chain(2)]
    for header in headers:
        start = header.start_token_index
        regions = blocks.cut(ONE, start=start, stop=start + BLOCK, kinds=[RegionKind.KV])
        copy = blocks.begin_to_host(list(regions.values()))
        two.leader.put(HostBlock(header, copy.take()))
    two.runner.release([ONE])
    two.settle()
    del regions, copy
    planned = [PlannedBlock(header, frozenset({RegionKind.KV})) for header in headers]
    place = blocks.begin_load(planned)
    assert place is not None
    ticket = two.leader.get_into(planned, place)
    assert ticket is not None
    assert ticket in two.settle() and isinstance(ticket.outcome, BlocksLoaded)
    placed = tuple(
        PlacedBlock(header.start_token_index, BLOCK, {RegionKind.KV: region})
        for header, region in zip(headers, blocks.end_load(place), strict=True)
    )
    del place, ticket
    blocks.begin_restore(TWO, RestoreInput(placed, len(PROMPT) - 1))
    while not blocks.continue_restore(TWO, budget_s=1.0):
        pass
    del placed
    row = DecodeRow(SamplingParams(), prompt_token_ids=PROMPT)
    two.runner.run([Chunk(TWO, PROMPT[-1:], row=row)])
    assert two.decode(4) == expected
    assert two.agree()
    two.log.add(group.Order(warm_up=group.WarmUp()))
    two.one.obey()
    assert not two.one.follower._kept, "something is kept that nobody has on rank 0"
    assert two.one.tier.kept[headers[0].hash].header.fingerprint == fingerprint_of(1)


def test_a_restore_that_is_forgotten_in_the_middle_is_begun_nowhere(two: Two) -> None:
    two.prefill(ONE)
    regions = two.runner.blocks.cut(ONE, start=0, stop=BLOCK, kinds=[RegionKind.KV])
    two.runner.blocks.begin_restore(TWO, RestoreInput((PlacedBlock(0, BLOCK, regions),), BLOCK))
    two.runner.release([TWO])
    del regions
    two.decode(1)
    assert two.agree()
    assert not two.one.follower._kept


def test_a_group_that_is_not_complete_ends_in_order(source: ModelSource) -> None:
    ranks = Two(source)
    next(ranks.runner.load_steps(is_hurried=lambda: False))
    ranks.runner.close()
    ranks.one.obey()
    assert ranks.one.follower.has_ended


def test_a_follower_without_a_tier_has_no_blocks(two: Two, tmp_path: Path) -> None:
    ranks = Ranks()
    ranks.one.follower.tier = None
    ranks.one.follower.open()
    ranks.own.open()
    ranks.one.deliver()
    assert [each.is_last for each in ranks.posted] == [True]  # type: ignore[union-attr]
