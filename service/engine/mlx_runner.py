"""The model on the device: caches of open sequences, prefill, decode lanes (inference thread).

Sequences whose cache classes batch share lanes of at most `lane_row_limit` rows; each of the
others decodes in a lane of its own beside them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from service.domain.model import ModelInfo
from service.domain.request import SamplingParams
from service.engine import model_loader, upstream
from service.engine.decode_batch import DecodeBatch, JoiningRow
from service.engine.ids import SequenceId
from service.engine.ports import Drawn, MemoryUse
from service.engine.sampler import SamplingRow
from service.engine.tokenizer import Tokenizer


class MlxRunner:
    """Implements the engine's Runner with mlx-lm. Remembers its thread and refuses every other."""

    def __init__(
        self, *, source: model_loader.ModelSource, tokenizer: Tokenizer, lane_row_limit: int
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._lane_row_limit = lane_row_limit
        self._owner: int | None = None
        self._model: Any = None
        self._open: dict[SequenceId, list[upstream.Cache]] = {}
        self._joining: list[JoiningRow] = []
        self._lanes: list[DecodeBatch] = []

    def load(self) -> ModelInfo:
        self._owner = threading.get_ident()
        loaded = model_loader.load(self._source)
        self._model = loaded.model
        upstream.wire_memory()
        self._warm_up()
        return model_loader.describe(loaded, self._source, self._tokenizer, fingerprint_hex="")

    def open(self, sequence_id: SequenceId) -> None:
        self._check_thread()
        assert sequence_id not in self._open, sequence_id
        self._open[sequence_id] = upstream.make_caches(self._model)

    def prefill(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        self._check_thread()
        caches = self._open[sequence_id]
        # The logits stay lazy and are never evaluated: only the caches matter here.
        self._model(mx.array(list(token_ids))[None], cache=caches)
        mx.eval(upstream.cache_states(caches))

    def join(self, sequence_id: SequenceId, *, last_token_id: int, sampling: SamplingParams) -> None:
        self._check_thread()
        caches = self._open.pop(sequence_id)
        self._joining.append(JoiningRow(sequence_id, caches, last_token_id, SamplingRow(sampling)))

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
        self._joining = [row for row in self._joining if row.sequence_id not in gone]
        for lane in self._lanes:
            lane.remove(gone)
        self._lanes = [lane for lane in self._lanes if len(lane)]
        if not self._lanes and not self._open:
            mx.clear_cache()

    def memory(self) -> MemoryUse:
        info = mx.device_info()
        limit = info.get("max_recommended_working_set_size") or info.get("memory_size") or 0
        return MemoryUse(mx.get_active_memory(), mx.get_peak_memory(), int(limit))

    def close(self) -> None:
        self._check_thread()
        self._open.clear()
        self._joining.clear()
        self._lanes.clear()
        self._model = None
        mx.clear_cache()

    def _seat(self) -> None:
        """Put the joining rows into lanes: full lanes stay as they are, new lanes open as needed."""
        shared = [row for row in self._joining if upstream.can_batch(row.caches)]
        alone = [row for row in self._joining if not upstream.can_batch(row.caches)]
        self._joining = []
        for lane in self._lanes:
            room = self._lane_row_limit - len(lane)
            if shared and room > 0 and not lane.is_solitary:
                lane.join(shared[:room])
                shared = shared[room:]
        for start in range(0, len(shared), self._lane_row_limit):
            lane = DecodeBatch(self._model)
            lane.join(shared[start : start + self._lane_row_limit])
            self._lanes.append(lane)
        for row in alone:
            lane = DecodeBatch(self._model, is_solitary=True)
            lane.join([row])
            self._lanes.append(lane)

    def _warm_up(self) -> None:
        """Run one prefill and one decode, so that kernels are compiled before anyone waits for them."""
        sequence_id = SequenceId(-1)
        self.open(sequence_id)
        self.prefill(sequence_id, [0, 0])
        self.join(sequence_id, last_token_id=0, sampling=SamplingParams())
        self.decode()
        self.release([sequence_id])
        mx.reset_peak_memory()

    def _check_thread(self) -> None:
        caller = threading.get_ident()
        assert caller == self._owner, f"thread {caller} touched the runner of thread {self._owner}"
