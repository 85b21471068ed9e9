"""One prompt's way from plan to caches: what it is made from, and how often it was tried."""

from __future__ import annotations

import dataclasses

from service.domain.blocks import RegionKind
from service.domain.ids import BlockHash
from service.engine.prefix_plan import PrefixPlan
from service.engine.prefix_ports import CacheRunner, KvTarget, PlacedBlock, RestoreInput
from service.engine.sequence import Sequence
from service.kv.entry import Region
from service.kv.loads import Loaded, LoadId, LoadRequest

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
    is_to_plan: bool = False
    """Its load has failed: the plan holds no more."""
    with_ssd: bool = True
    """False once the read queue was full: what RAM has is taken."""
    loaded: Loaded | None = None
    target: KvTarget | None = None
    """Where the kv on SSD is to be read to, if it is a matter of kv."""
    is_target_made: bool = False
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

    @property
    def awaits_target(self) -> bool:
        """Whether the arrays that the load is to fill are still being made."""
        return self.target is not None and not self.is_target_made

    def begin_target(self, runner: CacheRunner) -> None:
        """Have kv read straight into the arrays that will be the sequence's, where it can be."""
        if any(RegionKind.KV in block.regions for block in self.plan.to_load):
            self.target = runner.begin_target(capacity_token_count=self.capacity_token_count)

    def make_request(self, load_id: LoadId, *, beside_decode: bool) -> LoadRequest:
        """Ask for what RAM lacks."""
        assert not self.awaits_target
        blocks, capacity = self.plan.to_load, self.capacity_token_count
        # Arrays on the device have a row for every token; buffers of the readers begin with what they read.
        origin = 0 if self.target is not None else self.plan.origin_token_index
        targets = () if self.target is None else self.target.views()
        return LoadRequest(load_id, blocks, origin, capacity - origin, beside_decode, targets)

    def plan_again(self, plan: PrefixPlan) -> None:
        """Begin anew with another plan; what was read for the last one is let go of."""
        self.attempt_count += 1
        self.plan, self.loaded, self.is_begun, self.is_to_plan = plan, None, False, False
        self.target, self.is_target_made = None, False

    def make_input(self, runner: CacheRunner) -> RestoreInput:
        """Put together what RAM holds and what was read from SSD."""
        plan = self.plan
        return RestoreInput(
            blocks=plan.placed if self.loaded is None else self._place(self.loaded, runner),
            loaded=self.loaded,
            origin_token_index=plan.origin_token_index,
            target=self.target,
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
