"""One prompt's way from plan to caches: what it is made from, and how often it was tried."""

from __future__ import annotations

import dataclasses

from service.domain.blocks import RegionKind
from service.domain.ids import BlockHash
from service.engine.prefix_plan import PrefixPlan
from service.engine.prefix_ports import CacheRunner, PlacedBlock, RestoreInput
from service.engine.sequence import Sequence
from service.kv.index import Region
from service.kv.loads import Loaded

_GROWTH_TOKEN_COUNT = 256
"""mlx-lm's caches grow by this many tokens; restored ones get room in the same unit."""


@dataclasses.dataclass(slots=True)
class Restore:
    """A restore under way. Times are `Clock.monotonic` readings."""

    sequence: Sequence
    began_time: float
    plan: PrefixPlan
    attempt_count: int = 1
    has_failed: bool = False
    loaded: Loaded | None = None
    read: dict[BlockHash, dict[RegionKind, Region]] = dataclasses.field(default_factory=dict)
    """Window and checkpoint regions that came from SSD and are on the device now."""
    is_begun: bool = False

    @property
    def capacity_token_count(self) -> int:
        """Room for the input and the first of the output, so that the next tokens copy nothing."""
        sequence = self.sequence
        left = sequence.output_token_limit - len(sequence.output_token_ids)
        room = len(sequence.input_token_ids) + min(left, _GROWTH_TOKEN_COUNT)
        return -(-room // _GROWTH_TOKEN_COUNT) * _GROWTH_TOKEN_COUNT

    def make_input(self, runner: CacheRunner) -> RestoreInput:
        """Put together what RAM holds and what was read from SSD."""
        plan = self.plan
        return RestoreInput(
            blocks=plan.placed if self.loaded is None else self._place(self.loaded, runner),
            loaded=self.loaded,
            origin_token_index=plan.origin_token_index,
            token_count=plan.token_count,
            capacity_token_count=self.capacity_token_count,
        )

    def _place(self, loaded: Loaded, runner: CacheRunner) -> tuple[PlacedBlock, ...]:
        """Put the window and checkpoint regions that were read onto the device, beside those in RAM."""
        self.read = {
            block.header.hash: {region.kind: runner.from_host(region) for region in block.regions}
            for block in loaded.blocks
        }
        return tuple(
            PlacedBlock(
                block.start_token_index,
                block.token_count,
                {**block.regions, **self.read.get(entry.hash, {})},
            )
            for block, entry in zip(self.plan.placed, self.plan.entries, strict=True)
        )
