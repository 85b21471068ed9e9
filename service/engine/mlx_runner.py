"""The model on the device: caches of open sequences, prefill, decode lanes (inference thread).

Sequences whose cache classes batch share lanes of at most `lane_row_limit` rows; each of the
others decodes in a lane of its own beside them.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Collection, Sequence
from typing import Any, cast

import mlx.core as mx

from service.clock import Clock
from service.domain.blocks import HostRegion, HostTensor, RegionKind
from service.domain.model import ModelInfo
from service.domain.request import SamplingParams
from service.engine import model_loader, upstream
from service.engine.decode_batch import DecodeBatch, JoiningRow
from service.engine.ids import SequenceId
from service.engine.memory_guard import MemoryModel
from service.engine.ports import Drawn, MemoryUse
from service.engine.prefix_ports import CacheFacts, RestoreInput
from service.engine.sampler import SamplingRow
from service.engine.tokenizer import Tokenizer
from service.errors import ConfigError, Reason
from service.kv.index import Region
from service.kv.layout import CacheLayout, CacheUnsupported
from service.kv.layout_regions import ArrayRegion, evaluate, from_host, to_host
from service.kv.layout_restore import Restoring
from service.kv.layout_source import KvBuffers, RestoreBlock, RestoreSource

_log = logging.getLogger("icehouse.engine")

_FREED_BYTES_KEPT = 1 << 30
"""Freed buffers that MLX keeps for the next arrays. Fresh pages made a restore of 134 MB take 62 ms
instead of 14 (2-core x86, mlx 0.32.4); without a bound a long prompt's buffers would stay for ever."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerSettings:
    """How sequences are run. `kv_bits` 0 keeps the model's own KV type."""

    lane_row_limit: int
    block_token_count: int = 256
    kv_bits: int = 0
    kv_group_size: int = 64
    is_pipelined: bool = True
    """Keep the device a step ahead of Python; of no use where dispatching waits (the CPU build)."""


class MlxRunner:
    """Implements the engine's Runner and CacheRunner with mlx-lm. Refuses every thread but its own."""

    def __init__(
        self,
        *,
        source: model_loader.ModelSource,
        tokenizer: Tokenizer,
        settings: RunnerSettings,
        clock: Clock,
        fingerprint_hex: str = "",
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._settings = settings
        self._clock = clock
        self._fingerprint_hex = fingerprint_hex
        self._layout: CacheLayout | None = None
        self._memory_model: MemoryModel | None = None
        self._facts = CacheFacts(unsupported_detail="no model is loaded")
        self._restoring: dict[SequenceId, Restoring] = {}
        self._owner: int | None = None
        self._model: Any = None
        self._open: dict[SequenceId, list[upstream.Cache]] = {}
        self._joining: list[JoiningRow] = []
        self._lanes: list[DecodeBatch] = []

    @property
    def is_pipelined(self) -> bool:
        return self._settings.is_pipelined

    def load(self) -> ModelInfo:
        self._owner = threading.get_ident()
        loaded = model_loader.load(self._source)
        self._model = loaded.model
        upstream.wire_memory()
        mx.set_cache_limit(_FREED_BYTES_KEPT)
        self._read_layout()
        kv_bytes_per_token, fixed_bytes = self._warm_up()
        self._memory_model = MemoryModel(
            model_loader.shape_of(loaded),
            kv_bytes_per_token,
            fixed_bytes,
            kv_step_token_count=upstream.CACHE_STEP_TOKEN_COUNT,
        )
        info = model_loader.describe(loaded, self._source, self._tokenizer, self._fingerprint_hex)
        return dataclasses.replace(info, kv_bytes_per_token=kv_bytes_per_token)

    def cache_facts(self) -> CacheFacts:
        """Return what the model's cache classes allow; after `load`."""
        return self._facts

    def open(self, sequence_id: SequenceId) -> None:
        self._check_thread()
        assert sequence_id not in self._open, sequence_id
        self._open[sequence_id] = self._fresh_caches()

    def prefill(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        self._check_thread()
        caches = self._open[sequence_id]
        # The logits stay lazy and are never evaluated: only the caches matter here.
        self._model(mx.array(list(token_ids))[None], cache=caches)
        mx.eval(upstream.cache_states(caches))

    def join(
        self, sequence_id: SequenceId, *, last_token_id: int, sampling: SamplingParams, drawn_count: int
    ) -> None:
        self._check_thread()
        caches = self._open.pop(sequence_id)
        row = SamplingRow(sampling, drawn_count)
        self._joining.append(JoiningRow(sequence_id, caches, last_token_id, row))

    def decode(self) -> list[Drawn]:
        self._check_thread()
        self._seat()
        for lane in self._lanes:
            lane.dispatch()
        return [drawn for lane in self._lanes for drawn in lane.collect()]

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._check_thread()
        gone = set(sequence_ids)
        for sequence_id in gone:
            self._open.pop(sequence_id, None)
            self._restoring.pop(sequence_id, None)
        self._joining = [row for row in self._joining if row.sequence_id not in gone]
        for lane in self._lanes:
            lane.remove(gone)
        self._lanes = [lane for lane in self._lanes if len(lane)]

    def memory_model(self) -> MemoryModel:
        assert self._memory_model is not None, "the model is not loaded yet"
        return self._memory_model

    def memory(self) -> MemoryUse:
        info = mx.device_info()
        limit = info.get("max_recommended_working_set_size") or info.get("memory_size") or 0
        return MemoryUse(mx.get_active_memory(), mx.get_peak_memory(), int(limit))

    def close(self) -> None:
        self._check_thread()
        self._open.clear()
        self._restoring.clear()
        self._joining.clear()
        self._lanes.clear()
        self._model = None
        mx.clear_cache()

    def cut(
        self, sequence_id: SequenceId, *, start: int, stop: int, kinds: Collection[RegionKind]
    ) -> dict[RegionKind, Region]:
        self._check_thread()
        assert self._layout is not None
        caches, row = self._locate(sequence_id)
        cuts = {
            RegionKind.KV: lambda layout: layout.cut_kv(caches, start=start, stop=stop, row=row),
            RegionKind.WINDOW: lambda layout: layout.cut_window(caches, start=start, stop=stop, row=row),
            RegionKind.CHECKPOINT: lambda layout: layout.cut_checkpoint(caches, row=row),
        }
        regions = {kind: cuts[kind](self._layout) for kind in kinds}
        evaluate(regions.values())
        return dict(regions)

    def begin_restore(self, sequence_id: SequenceId, restore: RestoreInput) -> None:
        self._check_thread()
        assert self._layout is not None
        self._restoring[sequence_id] = self._layout.begin_restore(
            _source_of(restore),
            token_count=restore.token_count,
            capacity_token_count=restore.capacity_token_count,
            make_caches=self._fresh_caches,
        )

    def continue_restore(self, sequence_id: SequenceId, *, budget_s: float) -> bool:
        self._check_thread()
        restoring = self._restoring[sequence_id]
        end_time = self._clock.monotonic() + budget_s
        while restoring.step():
            if self._clock.monotonic() >= end_time:
                return False
        del self._restoring[sequence_id]
        self._open[sequence_id] = restoring.caches
        return True

    def to_host(self, regions: Sequence[Region]) -> tuple[HostRegion, ...]:
        self._check_thread()
        return tuple(to_host(cast("ArrayRegion", region)) for region in regions)

    def from_host(self, region: HostRegion) -> Region:
        self._check_thread()
        return from_host(region)

    def _locate(self, sequence_id: SequenceId) -> tuple[list[upstream.Cache], int]:
        if sequence_id in self._open:
            return self._open[sequence_id], 0
        lane = next(lane for lane in self._lanes if sequence_id in lane.sequence_ids)
        return lane.locate(sequence_id)

    def _fresh_caches(self) -> list[upstream.Cache]:
        caches = upstream.make_caches(self._model)
        if not self._settings.kv_bits:
            return caches
        return upstream.quantize_caches(
            caches, bits=self._settings.kv_bits, group_size=self._settings.kv_group_size
        )

    def _read_layout(self) -> None:
        try:
            self._layout = CacheLayout.of(
                self._fresh_caches(), block_token_count=self._settings.block_token_count
            )
        except CacheUnsupported as error:
            self._facts = CacheFacts(unsupported_detail=error.message)
            _log.warning("prefix_reuse_unsupported", extra={"detail": error.message})
            return
        kinds = {part.kind for part in self._layout.parts}
        self._facts = CacheFacts(
            has_kv=RegionKind.KV in kinds,
            cuttable_inside=self._layout.cuttable_inside,
            needs_checkpoint=self._layout.needs_checkpoint,
            window_token_count=self._layout.window_token_count,
            shortest_window_token_count=min(
                (part.window_token_count for part in self._layout.parts if part.kind is RegionKind.WINDOW),
                default=0,
            ),
        )

    def _seat(self) -> None:
        """Put the joining rows into lanes: full lanes stay as they are, new lanes open as needed."""
        shared = [row for row in self._joining if upstream.can_batch(row.caches)]
        alone = [row for row in self._joining if not upstream.can_batch(row.caches)]
        self._joining = []
        for lane in self._lanes:
            room = self._settings.lane_row_limit - len(lane)
            if shared and room > 0 and not lane.is_solitary:
                lane.join(shared[:room])
                shared = shared[room:]
        for start in range(0, len(shared), self._settings.lane_row_limit):
            lane = DecodeBatch(self._model, is_pipelined=self.is_pipelined)
            lane.join(shared[start : start + self._settings.lane_row_limit])
            self._lanes.append(lane)
        for row in alone:
            lane = DecodeBatch(self._model, is_pipelined=self.is_pipelined, is_solitary=True)
            lane.join([row])
            self._lanes.append(lane)

    def _warm_up(self) -> tuple[int, int]:
        """Run one prefill and one decode, so that kernels are compiled before anyone waits for them.

        Returns the bytes of kv a token takes and the bytes a sequence takes whatever its length.
        Raises ConfigError when the KV cannot be quantized so.
        """
        sequence_id = SequenceId(-1)
        self.open(sequence_id)
        try:
            self.prefill(sequence_id, [0, 0])
        except ValueError as error:
            if not self._settings.kv_bits:
                raise
            raise ConfigError(
                Reason.CONFIG_INVALID,
                f"this model's KV cannot be quantized to {self._settings.kv_bits} bits in groups of "
                f"{self._settings.kv_group_size}: {error}; choose another kv_bits or kv_group_size",
            ) from error
        footprint = self._measure(self._open[sequence_id], token_count=2)
        self.join(sequence_id, last_token_id=0, sampling=SamplingParams(), drawn_count=0)
        self.decode()
        self.release([sequence_id])
        mx.reset_peak_memory()
        return footprint

    def _measure(self, caches: list[upstream.Cache], *, token_count: int) -> tuple[int, int]:
        """Return what sequences take, from caches that hold `token_count` tokens."""
        layout = self._layout
        if layout is None:
            return sum(cache.nbytes for cache in caches) // token_count, 0
        window = layout.cut_window(caches, start=0, stop=token_count).size_bytes // token_count
        fixed = window * layout.window_token_count + layout.cut_checkpoint(caches).size_bytes
        return layout.kv_bytes_per_token(caches), fixed

    def _check_thread(self) -> None:
        caller = threading.get_ident()
        assert caller == self._owner, f"thread {caller} touched the runner of thread {self._owner}"


def _source_of(restore: RestoreInput) -> RestoreSource:
    blocks = tuple(
        RestoreBlock(
            start_token_index=block.start_token_index,
            token_count=block.token_count,
            kv=cast("ArrayRegion | None", block.regions.get(RegionKind.KV)),
            window=cast("ArrayRegion | None", block.regions.get(RegionKind.WINDOW)),
            checkpoint=cast("ArrayRegion | None", block.regions.get(RegionKind.CHECKPOINT)),
        )
        for block in restore.blocks
    )
    if restore.loaded is None or not restore.loaded.tensors:
        return RestoreSource(blocks)
    tensors = tuple(HostTensor(t.name, t.dtype, t.shape, t.data) for t in restore.loaded.tensors)
    return RestoreSource(
        blocks, KvBuffers(restore.origin_token_index, restore.loaded.end_token_index, tensors)
    )
