"""Model runner: caches of open sequences, prefill, decoding on the device (inference thread)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from icehouse_server.clock import Clock
from icehouse_server.domain.ids import NO_ADAPTER, AdapterName, SequenceId
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import LogprobsWanted, Pooling, TokenLogprobs, Vector
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.decode_row import DecodeRow
from icehouse_server.engine.core.memory_model import DraftFootprint, MemoryModel
from icehouse_server.engine.core.ports import Drawn, MemoryUse
from icehouse_server.engine.core.thread_guard import OneThread
from icehouse_server.engine.kv_cache import batching, cache_classes
from icehouse_server.engine.kv_cache.blocks import RunnerBlocks
from icehouse_server.engine.runner import mlx_lm, model_loader
from icehouse_server.engine.runner.decode_batch import JoiningRow
from icehouse_server.engine.runner.draft_model import DraftModel
from icehouse_server.engine.runner.lanes import Lanes
from icehouse_server.engine.runner.lora import attach
from icehouse_server.engine.sampling.logprobs import measure
from icehouse_server.engine.sampling.row import SamplingRow
from icehouse_server.errors import ConfigError, Reason
from icehouse_server.text.tokenizer import Tokenizer

_log = logging.getLogger("icehouse.engine")

_FREED_TOKENS = 8192
_MIN_FREED_BYTES = 128 << 20
_MAX_FREED_BYTES = 1 << 30
"""Freed buffers that MLX keeps for the next arrays: the KV of so many tokens, within bounds. Fresh pages made
a restore of 134 MB take 62 ms instead of 14 (2-core x86, mlx 0.32.4); without a bound a long prompt's
buffers would stay for ever, and a model with little KV needs little."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerSettings:
    """How sequences are run. `kv_bits` 0 keeps the model's own KV type."""

    lane_row_limit: int
    block_token_count: int = 256
    kv_bits: int = 0
    kv_group_size: int = 64
    is_pipelined: bool = True
    """Keep the device a step ahead of Python; of no use where dispatching waits (the CPU build)."""


class ModelRunner:
    """Implements the engine's Runner with mlx-lm. Refuses every thread but its own.

    `blocks` is the prefix cache's side of it.
    """

    def __init__(
        self,
        *,
        source: model_loader.ModelSource,
        tokenizer: Tokenizer,
        settings: RunnerSettings,
        clock: Clock,
        fingerprint_hex: str = "",
        draft_source: model_loader.ModelSource | None = None,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._settings = settings
        self._fingerprint_hex = fingerprint_hex
        self._draft_source = draft_source
        self._memory_model: MemoryModel | None = None
        self._thread = OneThread()
        self._models: dict[AdapterName, Any] = {}
        """A module tree for each adapter, and the model by itself; they share its arrays."""
        self._open: dict[SequenceId, list[cache_classes.Cache]] = {}
        self._end_token_ids: tuple[int, ...] = ()
        self._lanes = Lanes(row_limit=settings.lane_row_limit, is_pipelined=settings.is_pipelined)
        self.blocks = RunnerBlocks(
            self, block_token_count=settings.block_token_count, clock=clock, thread=self._thread
        )

    def load(self) -> ModelInfo:
        self._thread.claim()
        loaded = model_loader.load(self._source)
        self._models[NO_ADAPTER] = loaded.model
        adapted = [attach(adapter, loaded, self._source) for adapter in self._source.adapters]
        mlx_lm.wire_memory()
        self.blocks.read_layout()
        kv_bytes_per_token, fixed_bytes = self._warm_up(NO_ADAPTER)
        for adapter, model in zip(self._source.adapters, adapted, strict=True):
            self._models[adapter.name] = model.tree
            self._warm_up(adapter.name)
        freed_bytes = _FREED_TOKENS * kv_bytes_per_token
        mx.set_cache_limit(min(_MAX_FREED_BYTES, max(_MIN_FREED_BYTES, freed_bytes)))
        info = model_loader.describe(loaded, self._source, self._tokenizer, self._fingerprint_hex)
        self._memory_model = MemoryModel(
            model_loader.shape_of(loaded),
            kv_bytes_per_token,
            fixed_bytes,
            kv_step_token_count=cache_classes.step_token_count(self.fresh_caches()),
            lane_row_limit=self._settings.lane_row_limit if batching.can_batch(self.fresh_caches()) else 1,
            draft=self._load_draft(info),
        )
        self._end_token_ids = tuple(i for i in info.eos_token_ids if i < info.vocabulary_size)
        return dataclasses.replace(
            info,
            kv_bytes_per_token=kv_bytes_per_token,
            adapters=tuple(model.info for model in adapted),
            embedding_size=self._hidden_size(),
        )

    def _load_draft(self, info: ModelInfo) -> DraftFootprint:
        if self._draft_source is None:
            return DraftFootprint()
        draft = DraftModel.load(self._draft_source, info=info, tokenizer=self._tokenizer)
        self._lanes.draft_model = draft
        return draft.footprint

    def open(self, sequence_id: SequenceId) -> None:
        self._thread.check()
        assert sequence_id not in self._open, sequence_id
        self._open[sequence_id] = self.fresh_caches()

    def prefill(self, sequence_id: SequenceId, token_ids: Sequence[int], adapter: AdapterName) -> None:
        self._thread.check()
        caches = self._open[sequence_id]
        # The logits stay lazy and are never evaluated: only the caches matter here.
        self._models[adapter](mx.array(list(token_ids))[None], cache=caches)
        mx.eval(cache_classes.cache_states(caches))

    def prefill_measured(
        self,
        sequence_id: SequenceId,
        token_ids: Sequence[int],
        adapter: AdapterName,
        *,
        next_token_ids: Sequence[int],
        wanted: LogprobsWanted,
    ) -> Sequence[TokenLogprobs]:
        self._thread.check()
        caches = self._open[sequence_id]
        logits = self._models[adapter](mx.array(list(token_ids))[None], cache=caches)[0]
        next_ids = mx.array(list(next_token_ids))
        measured = measure(logits, next_ids, wanted=[wanted] * len(next_token_ids))
        mx.eval(cache_classes.cache_states(caches), measured.arrays)
        return measured.read()

    def prefill_pooled(
        self,
        sequence_id: SequenceId,
        token_ids: Sequence[int],
        adapter: AdapterName,
        *,
        pooling: Pooling,
    ) -> Vector:
        self._thread.check()
        caches = self._open[sequence_id]
        hidden = mlx_lm.hidden_states(self._models[adapter], mx.array(list(token_ids))[None], caches)[0]
        pooled = hidden[-1] if pooling is Pooling.LAST_TOKEN else hidden.astype(mx.float32).sum(axis=0)
        pooled = pooled.astype(mx.float32)
        mx.eval(cache_classes.cache_states(caches), pooled)
        return np.array(pooled)

    def join(self, sequence_id: SequenceId, row: DecodeRow) -> None:
        self._thread.check()
        caches = self._open.pop(sequence_id)
        sampling = SamplingRow(row, end_token_ids=self._end_token_ids)
        tokens = (*row.prompt_token_ids, *row.output_token_ids) if row.speculation is not None else ()
        model = self._models[row.adapter]
        self._lanes.join(
            JoiningRow(sequence_id, caches, row.last_token_id, sampling, model, tokens, row.speculation)
        )

    def decode(self) -> list[Drawn]:
        self._thread.check()
        return self._lanes.decode()

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._thread.check()
        for sequence_id in sequence_ids:
            self._open.pop(sequence_id, None)
        self.blocks.forget(sequence_ids)
        self._lanes.remove(sequence_ids)

    def memory_model(self) -> MemoryModel:
        assert self._memory_model is not None, "the model is not loaded yet"
        return self._memory_model

    def memory(self) -> MemoryUse:
        info = mx.device_info()
        limit = info.get("max_recommended_working_set_size") or info.get("memory_size") or 0
        return MemoryUse(mx.get_active_memory(), mx.get_peak_memory(), int(limit))

    def close(self) -> None:
        self._thread.check()
        self._open.clear()
        self.blocks.clear()
        self._lanes.clear()
        self._models.clear()
        mx.clear_cache()

    def locate(self, sequence_id: SequenceId) -> tuple[list[cache_classes.Cache], int]:
        """Return the caches that hold an open or decoding sequence, and its row in them."""
        if sequence_id in self._open:
            return self._open[sequence_id], 0
        return self._lanes.locate(sequence_id)

    def adopt(self, sequence_id: SequenceId, caches: list[cache_classes.Cache]) -> None:
        """Open a sequence with caches that were rebuilt."""
        self._open[sequence_id] = caches

    def fresh_caches(self) -> list[cache_classes.Cache]:
        """Make empty caches, one a layer, quantized if the settings say so."""
        caches = cache_classes.make_caches(self._models[NO_ADAPTER])
        if not self._settings.kv_bits:
            return caches
        return cache_classes.quantize_caches(
            caches, bits=self._settings.kv_bits, group_size=self._settings.kv_group_size
        )

    def _hidden_size(self) -> int:
        """Return the width of the hidden states, 0 where the model shows none."""
        sequence_id = SequenceId(-1)
        self.open(sequence_id)
        try:
            pooled = self.prefill_pooled(sequence_id, [0, 0], NO_ADAPTER, pooling=Pooling.MEAN)
        except Exception as error:  # whatever a body does that is not called as most are
            _log.info("embeddings_unavailable", extra={"detail": f"{type(error).__name__}: {error}"})
            return 0
        finally:
            self.release([sequence_id])
        return len(pooled)

    def _warm_up(self, adapter: AdapterName) -> tuple[int, int]:
        """Run one prefill and one decode, so that kernels are compiled before anyone waits for them.

        Returns the bytes of kv a token takes and the bytes a sequence takes whatever its length.
        Raises ConfigError when the KV cannot be quantized so.
        """
        sequence_id = SequenceId(-1)
        self.open(sequence_id)
        try:
            self.prefill(sequence_id, [0, 0], adapter)
        except ValueError as error:
            if not self._settings.kv_bits:
                raise
            raise ConfigError(
                Reason.CONFIG_INVALID,
                f"this model's KV cannot be quantized to {self._settings.kv_bits} bits in groups of "
                f"{self._settings.kv_group_size}: {error}; choose another kv_bits or kv_group_size",
            ) from error
        footprint = self.blocks.measure(self._open[sequence_id], token_count=2)
        self.join(sequence_id, DecodeRow(SamplingParams(), prompt_token_ids=(0,), adapter=adapter))
        self.decode()
        self.release([sequence_id])
        mx.reset_peak_memory()
        return footprint
