"""Stand-ins for what surrounds the engine: clock, runner, listener."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from icehouse_server.domain.events import Delta, Event, Failed, Finished
from icehouse_server.domain.ids import AdapterName, Fingerprint, RequestId, SequenceId
from icehouse_server.domain.model import EngineState, ModelInfo
from icehouse_server.domain.request import GenerationRequest, LogprobsWanted, Pooling, TokenLogprobs, Vector
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.decode_row import DecodeRow
from icehouse_server.engine.core.memory_model import MemoryModel, ModelShape
from icehouse_server.engine.core.ports import Drawn, MemoryUse
from icehouse_server.engine.prefix_cache.cache import PrefixCache
from icehouse_server.engine.prefix_cache.controller import CacheController
from icehouse_server.engine.prefix_cache.tiers.ports import CacheFacts
from icehouse_server.engine.prefix_cache.tiers.settings import PrefixSettings
from icehouse_server.errors import IcehouseError

EOS = 0
BOUND_S = 30.0
"""Longest any test waits for another thread before it fails."""


class FakeClock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def model_info(*, context_token_limit: int = 4096) -> ModelInfo:
    return ModelInfo(
        model_id="fake",
        architecture="fake",
        vocabulary_size=128,
        context_token_limit=context_token_limit,
        dtype="float32",
        quantization="none",
        parameter_count=1,
        weight_bytes=4,
        kv_bytes_per_token=0,
        cache_classes=("KVCache",),
        fingerprint_hex="",
        has_chat_template=False,
        eos_token_ids=(EOS,),
        device="fake",
    )


def memory_model() -> MemoryModel:
    """Ten bytes of KV a token, transients of two bytes per chunk token and layer width."""
    shape = ModelShape(
        hidden_size=0,
        layer_count=1,
        head_count=1,
        feed_forward_size=0,
        vocabulary_size=0,
        compute_bytes=1,
        keeps_scores=False,
    )
    return MemoryModel(shape, kv_bytes_per_token=10, fixed_bytes_per_sequence=0)


class FakeRunner:
    """Draws `(sum of everything so far) % 26 + 'a'`, so that each token depends on the whole past."""

    def __init__(self, *, context_token_limit: int = 4096) -> None:
        self.history: dict[SequenceId, list[int]] = {}
        self.decoding: list[SequenceId] = []
        self.chunks: list[tuple[SequenceId, int]] = []
        self.released: list[SequenceId] = []
        self.closed = False
        self.on_decode: Callable[[], None] = lambda: None
        self.on_prefill: Callable[[], None] = lambda: None
        self.active_bytes: Callable[[], int] = lambda: 1
        self.next_token: Callable[[list[int]], int] = lambda history: 97 + sum(history) % 26
        self._context_token_limit = context_token_limit

    def load(self) -> ModelInfo:
        return model_info(context_token_limit=self._context_token_limit)

    def open(self, sequence_id: SequenceId) -> None:
        self.history[sequence_id] = []

    def prefill(self, sequence_id: SequenceId, token_ids: Sequence[int], adapter: AdapterName) -> None:
        self.chunks.append((sequence_id, len(token_ids)))
        self.on_prefill()
        self.history[sequence_id] += token_ids

    def prefill_measured(
        self,
        sequence_id: SequenceId,
        token_ids: Sequence[int],
        adapter: AdapterName,
        *,
        next_token_ids: Sequence[int],
        wanted: LogprobsWanted,
    ) -> list[TokenLogprobs]:
        """The deeper in the sequence, the less likely."""
        self.prefill(sequence_id, token_ids, adapter)
        start = len(self.history[sequence_id]) - len(token_ids)
        assert len(next_token_ids) == len(token_ids)
        return [TokenLogprobs(token_id, -(start + i), 1) for i, token_id in enumerate(next_token_ids)]

    def prefill_pooled(
        self,
        sequence_id: SequenceId,
        token_ids: Sequence[int],
        adapter: AdapterName,
        *,
        pooling: Pooling,
    ) -> Vector:
        """Hidden states of one dimension: the tokens' own ids."""
        self.prefill(sequence_id, token_ids, adapter)
        return np.array([sum(token_ids) if pooling is Pooling.MEAN else token_ids[-1]], np.float32)

    def join(self, sequence_id: SequenceId, row: DecodeRow) -> None:
        self.history[sequence_id].append(row.last_token_id)
        self.decoding.append(sequence_id)

    def decode(self) -> list[Drawn]:
        self.on_decode()
        drawn = [Drawn(i, self.next_token(self.history[i]), fed_ahead_count=1) for i in self.decoding]
        for token in drawn:
            self.history[token.sequence_id].append(token.token_id)
        return drawn

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            self.history.pop(sequence_id, None)
            self.released.append(sequence_id)
            if sequence_id in self.decoding:
                self.decoding.remove(sequence_id)

    def memory_model(self) -> MemoryModel:
        return memory_model()

    def memory(self) -> MemoryUse:
        return MemoryUse(self.active_bytes(), 2, 3)

    def close(self) -> None:
        self.closed = True


class Recorder:
    """Keeps every event by request and lets a test wait for an end, a state or a count of events."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}
        self.states: list[EngineState] = []
        self.error: IcehouseError | None = None
        self._changed = threading.Condition()

    def publish(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        with self._changed:
            for request_id, event in events:
                self.events.setdefault(request_id, []).append(event)
            self._changed.notify_all()

    def state_changed(self, state: EngineState, error: IcehouseError | None) -> None:
        with self._changed:
            self.states.append(state)
            self.error = error
            self._changed.notify_all()

    def wait_for_state(self, state: EngineState) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: state in self.states, BOUND_S), self.states

    def wait_for_end(self, request_id: str) -> Finished | Failed:
        with self._changed:
            assert self._changed.wait_for(lambda: self.end_of(request_id) is not None, BOUND_S), request_id
        end = self.end_of(request_id)
        assert end is not None
        return end

    def end_of(self, request_id: str) -> Finished | Failed | None:
        events = self.events.get(request_id, [])
        return events[-1] if events and isinstance(events[-1], Finished | Failed) else None

    def text_of(self, request_id: str) -> str:
        return "".join(e.text for e in self.events.get(request_id, []) if isinstance(e, Delta))

    def tokens_of(self, request_id: str) -> list[int]:
        return [t for e in self.events.get(request_id, []) if isinstance(e, Delta) for t in e.token_ids]


class NoRegions:
    """A CacheRunner for engines that keep no prefixes: nothing here is ever called."""

    def cut(self, *args, **kwargs):
        raise AssertionError("a prefix was cut")

    begin_restore = continue_restore = to_host = from_host = cut


def no_prefix(clock) -> CacheController:
    """A desk that reuses nothing."""
    runner = NoRegions()
    cache = PrefixCache(
        settings=PrefixSettings(
            fingerprint=Fingerprint(b"f" * 32),
            block_token_count=4,
            is_enabled=False,
            ram_limit_bytes=0,
            checkpoint_interval_tokens=64,
        ),
        facts=CacheFacts(),
        runner=runner,
        storage=None,
        clock=clock,
    )
    return CacheController(cache=cache, runner=runner, clock=clock, adopt_budget_s=1.0)


def request(
    request_id: str,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    max_output_tokens: int = 5,
    stop: tuple[str, ...] = (),
    deadline_time: float | None = None,
    priority: int = 0,
    sampling: SamplingParams | None = None,
    logprobs: LogprobsWanted | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(prompt),
        max_output_tokens=max_output_tokens,
        sampling=sampling or SamplingParams(),
        stop=stop,
        arrival_time=1000.0,
        deadline_time=deadline_time,
        priority=priority,
        logprobs=logprobs,
    )


def decode_ascii(token_ids: Sequence[int]) -> str:
    """One character a token."""
    return "".join(chr(t) for t in token_ids)
