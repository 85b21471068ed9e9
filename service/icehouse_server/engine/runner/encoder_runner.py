"""Encoder runner: loads an encoder and makes vectors or scores of whole prompts (inference thread).

To the engine it is a runner like any other: requests queue, expire and are counted as for other models. But a
prompt runs in one pass (`SchedulerLimits.runs_whole`), nothing of it is kept, and nothing is drawn.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from icehouse_server.clock import Clock
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import ImagePart, Pooling
from icehouse_server.engine.core.device_clock import DeviceClock
from icehouse_server.engine.core.memory_model import MemoryModel
from icehouse_server.engine.core.ports import Chunk, Drawn, ImageUse, MemoryUse, PassResult
from icehouse_server.engine.core.refusals import vector_not_finite
from icehouse_server.engine.core.steps import Steps
from icehouse_server.engine.core.thread_guard import OneThread
from icehouse_server.engine.kv.pool_memory import PoolMemory
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts
from icehouse_server.engine.runner import mlx_lm, model_loader
from icehouse_server.engine.runner.encoders.encoder import Encoder
from icehouse_server.engine.runner.encoders.packed import QUERY_SLICE
from icehouse_server.engine.runner.freed_buffers import FreedBuffers
from icehouse_server.engine.runner.runner import RunnerSettings
from icehouse_server.errors import model_invalid
from icehouse_server.text.tokenizer import Tokenizer

_log = logging.getLogger("icehouse.engine")

_SCORE_COPIES = 2
"""Attention scores of a slice of queries, and their softmax."""


class NoBlocks:
    """What the prefix cache sees of an encoder. It uses nothing else, once it knows that nothing is kept."""

    facts = CacheFacts(unsupported_detail="an encoder keeps nothing of a text")


class EncoderRunner:
    """Implements the engine's Runner. Refuses every thread but its own."""

    def __init__(
        self,
        *,
        source: model_loader.ModelSource,
        tokenizer: Tokenizer,
        settings: RunnerSettings,
        clock: Clock,
        device_clock: DeviceClock | None = None,
    ) -> None:
        """`device_clock` is shared by all models of the process, if there are others."""
        self._source = source
        self._tokenizer = tokenizer
        self._settings = settings
        self._clock = clock
        self._device_clock = device_clock or DeviceClock()
        self._thread = OneThread()
        self.pages = PoolMemory()
        self._freed = FreedBuffers()
        self._model: Encoder | None = None
        self._memory_model: MemoryModel | None = None
        self.blocks: Any = NoBlocks()

    def load_steps(self, *, is_hurried: Callable[[], bool]) -> Steps[ModelInfo]:
        self._thread.claim()
        if self._source.adapters or self._source.adapter_path:
            raise model_invalid(
                f"the model in {self._source.path} is an encoder, which cannot use LoRA adapters; "
                "serve it without them"
            )
        loaded = yield from model_loader.load_steps(self._source, is_hurried=is_hurried)
        self._model = loaded.model
        _log.info("weights_read", extra={"path": self._source.path})
        if self._settings.is_memory_wired:
            mlx_lm.wire_memory()
        info = model_loader.describe(loaded, self._source, self._tokenizer, fingerprint_hex="")
        shape = dataclasses.replace(model_loader.shape_of(loaded), keeps_scores=False)
        self._memory_model = MemoryModel(
            shape,
            kv_bytes_per_token=0,
            fixed_bytes_per_sequence=0,
            room_step_token_count=1,
            attended_bytes_per_token=_SCORE_COPIES * QUERY_SLICE * shape.head_count * shape.compute_bytes,
        )
        # To compile what it needs before anyone waits for it.
        yield None
        self._vectors([(0,), (0, 0)])
        mx.reset_peak_memory()
        self._freed.bound(0, memory_limit_bytes=self._settings.memory_limit_bytes)
        size = 0 if self._loaded.has_head else self._loaded.vector_size
        return dataclasses.replace(info, embedding_size=size)

    def warm_up_more(self) -> bool:
        return False

    def open(self, sequence_id: SequenceId) -> None:
        self._thread.check()

    def run(
        self,
        chunks: Sequence[Chunk],
        *,
        before_wait: Callable[[], None] | None = None,
        reads_at_once: bool = False,
    ) -> PassResult:
        self._thread.check()
        if not chunks:
            return PassResult()
        began = self._clock.monotonic()
        assert all(chunk.pooling is Pooling.OWN for chunk in chunks), "the edge lets in nothing else"
        ordered = sorted(chunks, key=lambda chunk: len(chunk.token_ids))
        if before_wait is not None:
            before_wait()
        vectors = self._vectors([chunk.token_ids for chunk in ordered])
        self._freed.trim()
        pooled, failed = {}, []
        for chunk, vector in zip(ordered, vectors, strict=True):
            if np.isfinite(vector).all():
                pooled[chunk.sequence_id] = vector
            else:
                failed.append(Drawn(chunk.sequence_id, 0, error=vector_not_finite()))
        return PassResult(drawn=failed, pooled=pooled, elapsed_s=self._clock.monotonic() - began)

    def _vectors(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return [texts, size] in float32, on the host; `texts` must be sorted by length."""
        numbers = self._loaded(texts)
        mx.eval(numbers)
        self._device_clock.note_other(self._clock.monotonic())
        return np.array(numbers)

    def layer_count(self) -> int:
        return 0

    def encode(self, sequence_id: SequenceId, image: ImagePart, *, budget_s: float) -> bool:
        raise AssertionError("an encoder sees no images, and the edge refuses them")

    def encode_bytes(self, image: ImagePart) -> int:
        raise AssertionError("an encoder sees no images, and the edge refuses them")

    def image_use(self) -> ImageUse:
        return ImageUse()

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._thread.check()

    def memory_model(self) -> MemoryModel:
        assert self._memory_model is not None, "the model is not loaded yet"
        return self._memory_model

    def memory(self) -> MemoryUse:
        return MemoryUse(mx.get_active_memory(), mx.get_peak_memory())

    def close(self) -> None:
        self._thread.check()
        self._model = None
        mx.clear_cache()

    def end_thread(self) -> None:
        # What is left to the thread's own destructors may abort the process on CUDA (mlx issue 4506).
        mx.clear_streams()

    @property
    def _loaded(self) -> Encoder:
        assert self._model is not None, "the model is not loaded yet"
        return self._model
