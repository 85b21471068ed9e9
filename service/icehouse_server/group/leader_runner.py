"""Leader runner: rank 0's runner, whose every call the followers repeat (inference thread)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

from icehouse.group.v1 import group_service_pb2 as group

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import HostRegion, Region, RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import ImagePart
from icehouse_server.engine.core.memory_model import MemoryModel
from icehouse_server.engine.core.ports import Chunk, ImageUse, MemoryUse, Pages, PassResult
from icehouse_server.engine.core.refusals import rank_lost
from icehouse_server.engine.core.steps import Steps
from icehouse_server.engine.kv.runner_blocks import RunnerBlocks
from icehouse_server.engine.prefix_cache.tiers.runner_port import (
    CacheFacts,
    HostCopy,
    RestoreInput,
)
from icehouse_server.engine.runner.decoding import OpenSequence
from icehouse_server.engine.runner.runner import ModelRunner
from icehouse_server.group.messages import chunk_message
from icehouse_server.group.order_log import (
    CopiedRegion,
    GroupRead,
    GroupTarget,
    KeptOnRanks,
    OrderLog,
    ReadRegion,
)
from icehouse_server.storage.api import KvTarget, PlannedBlock

_log = logging.getLogger("icehouse.engine")


class LeaderRunner:
    """Implements the engine's Runner; `blocks` is the prefix cache's side of it."""

    def __init__(
        self, own: ModelRunner, log: OrderLog, *, clock: Clock, wait_for_all: Callable[[], int | None]
    ) -> None:
        """`wait_for_all` waits briefly, and returns how much memory each rank may use once all are there and
        agree."""
        self._own = own
        self._log = log
        self._clock = clock
        self._wait_for_all = wait_for_all
        self.blocks = LeaderBlocks(own.blocks, log)
        self._pass_count = 0
        self._is_alone = True
        """Until all ranks are there."""
        self._announced_s = 0.0
        """Time spent on creating the orders of passes."""
        self._reads_at_once = False

    def load_steps(self, *, is_hurried: Callable[[], bool]) -> Steps[ModelInfo]:
        while (memory_limit_bytes := self._wait_for_all()) is None:
            yield None
        self._is_alone = False
        self._own.limit_memory(memory_limit_bytes)
        info = yield from self._own.load_steps(is_hurried=is_hurried)
        # The followers have run the passes of loading by themselves.
        self._own.before_pass = self._announce
        return info

    @property
    def pages(self) -> Pages:
        return self._own.pages

    def warm_up_more(self) -> bool:
        self._log.add(group.Order(warm_up=group.WarmUp()))
        self._own.before_pass = lambda parts: None
        try:
            return self._own.warm_up_more()
        finally:
            self._own.before_pass = self._announce

    def open(self, sequence_id: SequenceId) -> None:
        self._own.open(sequence_id)
        self._log.add(group.Order(open=group.Open(sequence_id=sequence_id)))

    def run(
        self,
        chunks: Sequence[Chunk],
        *,
        before_wait: Callable[[], None] | None = None,
        reads_at_once: bool = False,
    ) -> PassResult:
        self._reads_at_once = reads_at_once
        try:
            return self._own.run(chunks, before_wait=before_wait, reads_at_once=reads_at_once)
        except RuntimeError as error:  # MLX raises it when the connection to a rank breaks
            raise rank_lost(str(error)) from error

    def _announce(self, parts: Sequence[tuple[OpenSequence, Chunk]]) -> None:
        """Order the pass that is about to be built."""
        began = self._clock.monotonic()
        run = group.Run(
            number=self._pass_count,
            digest=self._own.digest(),
            chunks=[chunk_message(sequence, chunk) for sequence, chunk in parts],
            reads_at_once=self._reads_at_once,
        )
        self._pass_count += 1
        self._log.add(group.Order(run=run))
        self._announced_s += self._clock.monotonic() - began

    def layer_count(self) -> int:
        return self._own.layer_count()

    def encode(self, sequence_id: SequenceId, image: ImagePart, *, budget_s: float) -> bool:
        raise AssertionError("a group serves no images, and the edge refuses them")

    def encode_bytes(self, image: ImagePart) -> int:
        raise AssertionError("a group serves no images, and the edge refuses them")

    def image_use(self) -> ImageUse:
        return ImageUse()

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._own.release(sequence_ids)
        self.blocks.forget(sequence_ids)
        if sequence_ids:
            self._log.add(group.Order(release=group.Release(sequence_ids=sequence_ids)))

    def memory_model(self) -> MemoryModel:
        return self._own.memory_model()

    def memory(self) -> MemoryUse:
        return self._own.memory()

    def close(self) -> None:
        self.blocks.clear()
        self._log.add(group.Order(end=group.End()))
        if not self._is_alone:
            self._own.close()
        facts = {"passes": self._pass_count, "orders_s": round(self._announced_s, 4)}
        messages = {"messages": self._log.sent_count, "bytes": self._log.sent_bytes}
        _log.info("group_ended", extra={**facts, **messages})

    def end_thread(self) -> None:
        self._own.end_thread()


class KeptRegion(KeptOnRanks):
    """A region of rank 0, which the followers keep under the same number."""

    def __init__(self, log: OrderLog, kind: RegionKind, own: Region) -> None:
        super().__init__(log)
        self.kind = kind
        self.own = own

    @property
    def size_bytes(self) -> int:
        return self.own.size_bytes

    @property
    def message(self) -> group.Kept:
        return group.Kept(kind=self.kind, number=self.number)


class LeaderBlocks:
    """Implements the prefix cache's CacheRunner."""

    def __init__(self, own: RunnerBlocks, log: OrderLog) -> None:
        self._own = own
        self._log = log
        self._restoring: dict[SequenceId, tuple[RestoreInput, group.Restore]] = {}
        """Orders for restores that continue; their regions must exist until then."""

    @property
    def facts(self) -> CacheFacts:
        """What the model's cache classes allow."""
        return self._own.facts

    def cut(
        self, sequence_id: SequenceId, *, start: int, stop: int, kinds: Collection[RegionKind]
    ) -> dict[RegionKind, Region]:
        own = self._own.cut(sequence_id, start=start, stop=stop, kinds=kinds)
        kept = {kind: KeptRegion(self._log, kind, region) for kind, region in own.items()}
        messages = [region.message for region in kept.values()]
        cut = group.Cut(sequence_id=sequence_id, start=start, stop=stop, kept=messages)
        self._log.add(group.Order(cut=cut))
        return dict(kept)

    def begin_load(self, blocks: Sequence[PlannedBlock]) -> KvTarget | None:
        own = self._own.begin_load(blocks)
        return None if own is None else GroupTarget(own, GroupRead(self._log))

    def end_load(self, place: KvTarget) -> Sequence[Region]:
        assert isinstance(place, GroupTarget)
        regions = [KeptRegion(self._log, RegionKind.KV, region) for region in self._own.end_load(place.own)]
        end = group.EndLoad(load=place.read.number, numbers=[region.number for region in regions])
        self._log.add(group.Order(end_load=end))
        return regions

    def from_host(self, region: HostRegion) -> Region:
        assert isinstance(region, ReadRegion)
        kept = KeptRegion(self._log, region.kind, self._own.from_host(region))
        message = group.FromHost(load=region.read.number, hash=region.hash, kept=kept.message)
        self._log.add(group.Order(from_host=message))
        return kept

    def begin_restore(self, sequence_id: SequenceId, restore: RestoreInput) -> None:
        own = tuple(
            dataclasses.replace(block, regions={k: each.own for k, each in _kept(block.regions).items()})
            for block in restore.blocks
        )
        self._own.begin_restore(sequence_id, RestoreInput(own, restore.token_count))
        placed = [
            group.Placed(
                start_token_index=block.start_token_index,
                token_count=block.token_count,
                regions=[region.message for region in _kept(block.regions).values()],
            )
            for block in restore.blocks
        ]
        order = group.Restore(sequence_id=sequence_id, blocks=placed, token_count=restore.token_count)
        self._restoring[sequence_id] = restore, order

    def continue_restore(self, sequence_id: SequenceId, *, budget_s: float) -> bool:
        try:
            is_done = self._own.continue_restore(sequence_id, budget_s=budget_s)
        except Exception:
            self._restoring.pop(sequence_id, None)
            raise
        if is_done:
            _, order = self._restoring.pop(sequence_id)
            self._log.add(group.Order(restore=order))
        return is_done

    def forget(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Drop restores in progress; ids without one are ignored."""
        for sequence_id in sequence_ids:
            self._restoring.pop(sequence_id, None)

    def clear(self) -> None:
        """Drop every restore."""
        self._restoring.clear()

    def misfit(self, regions: Sequence[HostRegion], *, token_count: int) -> str:
        return "a group takes no blocks from a caller: each rank would need its own part"

    def begin_to_host(self, regions: Sequence[Region]) -> HostCopy:
        kept = cast("Sequence[KeptRegion]", regions)
        copy = GroupCopy(self._log, self._own.begin_to_host([region.own for region in kept]))
        message = group.ToHost(copy=copy.number, numbers=[region.number for region in kept])
        self._log.add(group.Order(to_host=message))
        return copy


class GroupCopy(KeptOnRanks):
    """Implements HostCopy: regions being copied to host memory, on every rank."""

    def __init__(self, log: OrderLog, own: HostCopy) -> None:
        super().__init__(log)
        self._own = own

    @property
    def is_done(self) -> bool:
        return self._own.is_done

    def take(self) -> tuple[HostRegion, ...]:
        return tuple(CopiedRegion(each.kind, each.tensors, self) for each in self._own.take())

    @property
    def is_apart(self) -> bool:
        return self._own.is_apart


def _kept(regions: Mapping[RegionKind, Region]) -> Mapping[RegionKind, KeptRegion]:
    return cast("Mapping[RegionKind, KeptRegion]", regions)
