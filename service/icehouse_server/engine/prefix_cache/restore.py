"""Restore of one prompt, from plan to caches: what it is made from, and how often it was tried.

Inference thread only.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.blocks import Region, RegionKind
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.prefix_cache.planner import Plan
from icehouse_server.engine.prefix_cache.tiers.runner_port import (
    CacheFacts,
    CacheRunner,
    PlacedBlock,
    RestoreInput,
)
from icehouse_server.storage.api import KvPlace, Loaded


@dataclasses.dataclass(slots=True)
class Restore:
    """A restore under way. Times are `Clock.monotonic` readings."""

    sequence: Sequence
    began_time: float
    plan: Plan
    facts: CacheFacts
    spent_s: float = 0.0
    """What the inference thread worked on it; between, others have their turns."""
    attempt_count: int = 1
    has_failed: bool = False
    is_to_plan: bool = False
    """Its load has failed: the plan holds no more."""
    with_ssd: bool = True
    """False once the read queue was full, or memory short: what RAM has is taken."""
    place: KvPlace | None = None
    """Where kv on SSD is read to, if it is to be in pages."""
    loaded: Loaded | None = None
    read: dict[BlockHash, dict[RegionKind, Region]] = dataclasses.field(default_factory=dict)
    """What came from SSD, on the device."""
    is_begun: bool = False

    def find_place(self, runner: CacheRunner) -> bool:
        """Have pages for the kv that is on SSD, where it is to be in some; False where there are none."""
        wanted = [block for block in self.plan.to_load if RegionKind.KV in block.regions]
        if wanted and self.facts.shares_blocks:
            self.place = runner.begin_load(wanted)
            if self.place is None:
                return False
            self.sequence.loading_room_token_count = sum(block.header.token_count for block in wanted)
        return True

    def plan_again(self, plan: Plan) -> None:
        """Begin anew with another plan; what was read for the last one is let go of."""
        self.attempt_count += 1
        self.plan, self.loaded, self.is_begun, self.is_to_plan = plan, None, False, False
        self.read = {}
        self.leave_place()

    def leave_place(self) -> None:
        """Let go of the pages that were to be read into; readers that are still at it hold them."""
        self.place = None
        self.sequence.loading_room_token_count = 0

    def make_input(self, runner: CacheRunner) -> RestoreInput:
        """Put together what RAM holds and what was read from SSD."""
        if self.loaded is not None:
            self.read = self._on_device(self.loaded, runner)
        blocks = (
            PlacedBlock(
                block.start_token_index,
                block.token_count,
                {**block.regions, **self.read.get(node.hash, {})},
            )
            for block, node in zip(self.plan.placed, self.plan.nodes, strict=True)
        )
        return RestoreInput(tuple(blocks), self.plan.token_count)

    def _on_device(self, loaded: Loaded, runner: CacheRunner) -> dict[BlockHash, dict[RegionKind, Region]]:
        read = {
            block.header.hash: {region.kind: runner.from_host(region) for region in block.regions}
            for block in loaded.blocks
        }
        if self.place is not None:
            wanted = [b.header.hash for b in self.plan.to_load if RegionKind.KV in b.regions]
            for name, region in zip(wanted, runner.end_load(self.place), strict=True):
                read[name][RegionKind.KV] = region
            self.place = None
        return read
