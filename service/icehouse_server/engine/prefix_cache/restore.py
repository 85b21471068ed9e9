"""Restore of one prompt, from plan to caches: what it is made from, and how often it was tried.

Promotion: blocks that came from SSD on their way back into RAM, where the next request will look first.

Inference thread only. The sequence that was restored from them goes on at once; its caches are copied
out again in slices behind its decode steps, one sequence at a time, so that however many were restored
together a step is lengthened by one slice. Nothing is copied before its first token: its caller waits, unless
others wait for the same blocks, which are read once for all of them.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.blocks import Region, RegionKind
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.prefix_cache.cache import PrefixCache
from icehouse_server.engine.prefix_cache.planner import Plan
from icehouse_server.engine.prefix_cache.tiers.ports import (
    CacheFacts,
    CacheRunner,
    KvCutting,
    KvTarget,
    PlacedBlock,
    RestoreInput,
)
from icehouse_server.storage.api import KvPlace, Loaded, NewRows, PlannedBlock

_FIRST_OUTPUT_TOKEN_COUNT = 128
"""Output tokens that a sequence that is put back has room for at most."""


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
    loaded: Loaded | None = None
    target: KvTarget | None = None
    """Where the kv on SSD is to be read to, if it is a matter of kv."""
    is_target_made: bool = False
    read: dict[BlockHash, dict[RegionKind, Region]] = dataclasses.field(default_factory=dict)
    """Window and checkpoint regions that came from SSD and are on the device now."""
    is_begun: bool = False
    copy: BlockCopy | None = None
    """Set when the caches are rebuilt: its blocks are brought to RAM at once, for others wait for them."""

    @property
    def capacity_token_count(self) -> int:
        """Room for the input and the first of the output, so that the next tokens copy nothing."""
        output_count = min(self.sequence.output_token_limit, _FIRST_OUTPUT_TOKEN_COUNT)
        return len(self.sequence.input_token_ids) + output_count

    @property
    def target_origin_token_index(self) -> int:
        """Token of the target's row 0: what lies in RAM before is read where it is, if it can be."""
        return self.plan.origin_token_index if self.facts.lends(self.plan.token_count) else 0

    @property
    def target_row_count(self) -> int:
        return self.capacity_token_count - self.target_origin_token_index

    @property
    def awaits_target(self) -> bool:
        """Whether the arrays that the load is to fill are still being made."""
        return self.target is not None and not self.is_target_made

    def begin_target(self, runner: CacheRunner) -> None:
        """Have kv read straight into the arrays that will be the sequence's, where it can be."""
        if any(RegionKind.KV in block.regions for block in self.plan.to_load):
            self.target = runner.begin_target(capacity_token_count=self.target_row_count)

    def continue_target(self, runner: CacheRunner, *, budget_s: float) -> bool:
        """Make those arrays; True when all are there."""
        assert self.target is not None
        self.is_target_made = runner.continue_target(self.target, budget_s=budget_s)
        if self.is_target_made:
            self.sequence.loading_room_token_count = self.target_row_count
        return self.is_target_made

    def make_request(self) -> tuple[tuple[PlannedBlock, ...], KvPlace | NewRows]:
        """Return what RAM lacks, and where it is to be read to."""
        assert not self.awaits_target
        # Arrays on the device have rows for tokens in RAM too, if these are copied there; buffers of the
        # readers begin with what they read.
        origin = self.plan.origin_token_index if self.target is None else self.target_origin_token_index
        rows = NewRows(origin, self.capacity_token_count - origin)
        place = None if self.target is None else self.target.place(rows)
        return self.plan.to_load, rows if place is None else place

    def plan_again(self, plan: Plan) -> None:
        """Begin anew with another plan; what was read for the last one is let go of."""
        self.attempt_count += 1
        self.plan, self.loaded, self.is_begun, self.is_to_plan = plan, None, False, False
        self.target, self.is_target_made = None, False
        self.sequence.loading_room_token_count = 0

    def make_input(self, runner: CacheRunner) -> RestoreInput:
        """Put together what RAM holds and what was read from SSD."""
        plan = self.plan
        return RestoreInput(
            blocks=plan.placed if self.loaded is None else self._place(self.loaded, runner),
            loaded=self.loaded,
            origin_token_index=plan.origin_token_index,
            target=self.target,
            target_origin_token_index=self.target_origin_token_index,
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
                {**block.regions, **self.read.get(node.hash, {})},
            )
            for block, node in zip(self.plan.placed, self.plan.nodes, strict=True)
        )


@dataclasses.dataclass(slots=True)
class BlockCopy:
    """How far the copy of one block has come."""

    cutting: KvCutting | None = None


_SLICE_SHARE = 0.5
"""Of the time a step may spend on loaded blocks: a slice may end a layer late."""


class Promotions:
    """At most one block is under way; the blocks that wait are their sequences' own (`Sequence.unkept`)."""

    def __init__(self, cache: PrefixCache, runner: CacheRunner, *, budget_s: float) -> None:
        self._cache = cache
        self._runner = runner
        self._slice_s = _SLICE_SHARE * budget_s
        self._current: Sequence | None = None
        self._copy = BlockCopy()

    def step(self, sequence: Sequence) -> None:
        """After a token of this sequence: bring its next block nearer to RAM, if it is its turn."""
        if not self._is_due(sequence):
            # Whose turn it was gives it away only now, so that the next one begins in the next step.
            self._current = None if self._current is sequence else self._current
            return
        if self._current is None:
            self._current, self._copy = sequence, BlockCopy()
        if self._current is sequence:
            self.copy(sequence, self._copy, budget_s=self._slice_s)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended or was parked: what is copied of its block is let go of, for it may come back
        with others to copy."""
        if self._current is sequence:
            self._current, self._copy = None, BlockCopy()

    def _is_due(self, sequence: Sequence) -> bool:
        has_first_token = len(sequence.output_token_ids) > 1
        is_decoding = sequence.phase is Phase.DECODING
        return bool(sequence.unkept) and is_decoding and has_first_token and self._cache.may_write(sequence)

    def copy(self, sequence: Sequence, copy: BlockCopy, *, budget_s: float) -> BlockHash | None:
        """Copy a slice of the sequence's next block; return its name when nothing of it is left to do."""
        block = sequence.unkept[0]
        node = self._cache.tree.get(block.hash)
        if node is not None:
            start, stop = node.start_token_index, node.end_token_index
            regions = dict(block.regions)
            if self._cache.facts.has_kv and RegionKind.KV not in node.ram:
                if copy.cutting is None:
                    copy.cutting = self._runner.begin_cut(start=start, stop=stop)
                region = self._runner.continue_cut(sequence.sequence_id, copy.cutting, budget_s=budget_s)
                if region is None:
                    return None
                regions[RegionKind.KV] = region
            self._cache.promote(sequence, node, regions)
        sequence.unkept.pop(0)
        copy.cutting = None
        return block.hash
