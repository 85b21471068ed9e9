"""A device that computes with token ids: KV is the tokens themselves, so a wrong prefix is a wrong text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import numpy as np
from icehouse_server.domain.blocks import HostRegion, HostTensor, RegionKind, pack_tokens, unpack_tokens
from icehouse_server.domain.ids import SequenceId
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts, RestoreInput
from icehouse_server.errors import Reason, StorageError
from icehouse_server.storage.api import PlannedBlock

from tests.fixtures.engine import FakeRunner
from tests.fixtures.storage.loading import BlockBuffers

TOKEN_BYTES = 4


@dataclasses.dataclass(frozen=True)
class TokenRegion:
    """One region of one block: the tokens it stands for, padded to a size."""

    kind: RegionKind
    tokens: tuple[int, ...]
    padding_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return TOKEN_BYTES * len(self.tokens) + self.padding_bytes


@dataclasses.dataclass(frozen=True)
class TokenCopy:
    """What is written of regions; there at once, unless the runner takes its time."""

    regions: tuple[HostRegion, ...]
    runner: TokenRunner

    @property
    def is_done(self) -> bool:
        return not self.runner.is_copying

    @property
    def is_apart(self) -> bool:
        return self.runner.copies_apart

    def take(self) -> tuple[HostRegion, ...]:
        return self.regions


class TokenRunner(FakeRunner):
    """Runner and CacheRunner. Its windows hold the last tokens, its checkpoints all tokens so far."""

    def __init__(self, facts: CacheFacts, *, checkpoint_padding_bytes: int = 0) -> None:
        super().__init__()
        self.facts = facts
        self.cut_count = 0
        self.restored: list[tuple[SequenceId, int]] = []
        self.slices_per_restore = 1
        self.refuse_restore: Callable[[RestoreInput], bool] = lambda restore: False
        self.is_copying = False
        """Whether what was begun to be copied to host memory is not there yet."""
        self.has_room: Callable[[], bool] = lambda: True
        """Whether there are pages to read into, where KV lies in pages."""
        self.asked_load_count = 0
        self.copies_apart = False
        """Whether it is then memory of its own."""
        self._checkpoint_padding_bytes = checkpoint_padding_bytes
        self._restoring: dict[SequenceId, tuple[RestoreInput, int]] = {}

    def cut(
        self, sequence_id: SequenceId, *, start: int, stop: int, kinds: Collection[RegionKind]
    ) -> dict[RegionKind, TokenRegion]:
        history = self.history[sequence_id]
        assert stop <= len(history), f"tokens up to {stop} of {len(history)}"
        self.cut_count += 1
        made: dict[RegionKind, TokenRegion] = {}
        for kind in kinds:
            low = start
            if kind is RegionKind.WINDOW:
                low = max(start, stop - self.facts.window_token_count)
            if kind is RegionKind.CHECKPOINT:
                assert stop == len(history), "a checkpoint is of now"
                made[kind] = TokenRegion(kind, tuple(history[:stop]), self._checkpoint_padding_bytes)
            else:
                made[kind] = TokenRegion(kind, tuple(history[low:stop]))
        return made

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        super().release(sequence_ids)
        for sequence_id in sequence_ids:
            self._restoring.pop(sequence_id, None)

    def begin_load(self, blocks: Sequence[PlannedBlock]) -> BlockBuffers | None:
        self.asked_load_count += 1
        return BlockBuffers(blocks) if self.has_room() else None

    def end_load(self, place: BlockBuffers) -> list[TokenRegion]:
        return [self.from_host(region) for region in place.regions()]

    def begin_restore(self, sequence_id: SequenceId, restore: RestoreInput) -> None:
        if self.refuse_restore(restore):
            raise StorageError(Reason.STORE_UNUSABLE, "the test refused this restore")
        self._restoring[sequence_id] = (restore, self.slices_per_restore)

    def continue_restore(self, sequence_id: SequenceId, *, budget_s: float) -> bool:
        restore, slices = self._restoring.pop(sequence_id)
        if slices > 1:
            self._restoring[sequence_id] = (restore, slices - 1)
            return False
        self.history[sequence_id] = self._rebuild(restore)
        self.restored.append((sequence_id, restore.token_count))
        return True

    def misfit(self, regions: Sequence[HostRegion], *, token_count: int) -> str:
        has_tokens = all(any(t.name == "tokens" for t in region.tensors) for region in regions)
        return "" if has_tokens else "it has no tokens"

    def begin_to_host(self, regions: Sequence[TokenRegion]) -> TokenCopy:
        return TokenCopy(tuple(_to_host(region) for region in regions), self)

    def from_host(self, region: HostRegion) -> TokenRegion:
        data = next(t.data for t in region.tensors if t.name == "tokens")
        padding = sum(t.data.nbytes for t in region.tensors if t.name == "z_padding")
        return TokenRegion(region.kind, unpack_tokens(bytes(data)), padding)

    def _rebuild(self, restore: RestoreInput) -> list[int]:
        """Return the tokens a cache made of this input holds; what the facts ask for must be there."""
        count = restore.token_count
        if self.facts.needs_checkpoint:
            checkpoint = restore.blocks[-1].regions[RegionKind.CHECKPOINT]
            assert isinstance(checkpoint, TokenRegion) and len(checkpoint.tokens) == count
            if not self.facts.has_kv:
                return list(checkpoint.tokens)
        history: list[int] = []
        for block in restore.blocks:
            region = block.regions.get(RegionKind.KV)
            if region is not None:
                assert block.start_token_index == len(history), "kv has a gap"
                assert isinstance(region, TokenRegion)
                history += region.tokens
        history = history[:count]
        assert len(history) == count, f"{len(history)} tokens of {count} were restored"
        if self.facts.window_token_count:
            held = self._window_tokens(restore)
            wanted = tuple(history[max(0, count - self.facts.window_token_count) :])
            assert held == wanted, f"the windows hold {held}, not {wanted}"
        return history

    def _window_tokens(self, restore: RestoreInput) -> tuple[int, ...]:
        held: list[int] = []
        begin = None
        for block in restore.blocks:
            region = block.regions.get(RegionKind.WINDOW)
            if region is not None:
                assert isinstance(region, TokenRegion)
                end = block.start_token_index + block.token_count
                held += region.tokens
                begin = end - len(held)
        low = max(0, restore.token_count - self.facts.window_token_count)
        if begin is None:
            return ()
        return tuple(held[low - begin : restore.token_count - begin])


def _to_host(region: TokenRegion) -> HostRegion:
    count = len(region.tokens)
    tensors = [HostTensor("tokens", "U32", (1, 1, count, 1), memoryview(pack_tokens(region.tokens)))]
    if region.padding_bytes:
        padding = np.zeros(region.padding_bytes, dtype=np.uint8)
        tensors.append(HostTensor("z_padding", "U8", (region.padding_bytes,), memoryview(padding)))
    return HostRegion(region.kind, tuple(tensors))
