"""Ports of the engine: what it needs of a runner and of a listener."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from icehouse_server.domain.events import Event
from icehouse_server.domain.ids import AdapterName, RequestId, SequenceId
from icehouse_server.domain.model import EngineState, ModelInfo
from icehouse_server.domain.request import DraftCounts, LogprobsWanted, Pooling, TokenLogprobs, Vector
from icehouse_server.engine.core.decode_row import DecodeRow
from icehouse_server.engine.core.memory_model import MemoryModel
from icehouse_server.errors import IcehouseError


class Drawn(NamedTuple):
    """One token drawn for one sequence in a decode step."""

    sequence_id: SequenceId
    token_id: int
    logprobs: TokenLogprobs | None = None
    """Told when the row asked."""
    is_complete: bool = False
    """The row's constraint lets nothing follow this token."""
    error: IcehouseError | None = None
    """Why the row cannot go on; its token is not to be told."""
    drafts: DraftCounts | None = None
    """What speculation did in this step, with the step's first token, for rows that asked for it."""
    fed_ahead_count: int = 0
    """Tokens from this one on that were fed to the model already: their KV exists. 1 where the device runs
    a step ahead; more inside a run of accepted guesses."""


class MemoryUse(NamedTuple):
    """Device memory in bytes; `limit_bytes` is 0 when the device names none."""

    active_bytes: int
    peak_bytes: int
    limit_bytes: int


class Runner(Protocol):
    """The model and its sequences. Every call is made on the inference thread."""

    def load(self) -> ModelInfo:
        """Load and warm the model. Raises ModelError when the folder cannot be served."""
        ...

    def open(self, sequence_id: SequenceId) -> None:
        """Make empty caches for a new sequence."""
        ...

    def prefill(self, sequence_id: SequenceId, token_ids: Sequence[int], adapter: AdapterName) -> None:
        """Run the next tokens of an open sequence through the model with its adapter, to completion."""
        ...

    def prefill_measured(
        self,
        sequence_id: SequenceId,
        token_ids: Sequence[int],
        adapter: AdapterName,
        *,
        next_token_ids: Sequence[int],
        wanted: LogprobsWanted,
    ) -> Sequence[TokenLogprobs]:
        """Run tokens like `prefill` and return what each says of the one that follows it, and of the others
        that are wanted."""
        ...

    def prefill_pooled(
        self,
        sequence_id: SequenceId,
        token_ids: Sequence[int],
        adapter: AdapterName,
        *,
        pooling: Pooling,
    ) -> Vector:
        """Run tokens like `prefill` and return the sum of their hidden states, or the last token's."""
        ...

    def join(self, sequence_id: SequenceId, row: DecodeRow) -> None:
        """Move a sequence, prefilled up to the row's last token, into decoding; its next token comes with
        the next decode."""
        ...

    def decode(self) -> list[Drawn]:
        """Run one decode step; one token for every decoding sequence, or more, in order, for one that
        speculates."""
        ...

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Forget sequences, in whatever phase they are. Unknown ids are ignored."""
        ...

    def memory_model(self) -> MemoryModel:
        """Return what sequences of this model take; after `load`."""
        ...

    def memory(self) -> MemoryUse:
        """Read the device's memory counters."""
        ...

    def close(self) -> None:
        """Drop every array, on this thread."""
        ...


class Decoder(Protocol):
    """The tokenizer, as the inference thread needs it: from tokens back to text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        ...

    def decode_with_markers(self, token_ids: Sequence[int]) -> str:
        """Return the text with the special tokens that set off a reply's parts."""
        ...


class Listener(Protocol):
    """Who hears of the engine. Called on the inference thread; must not block."""

    def publish(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        """Take the events of one step, in order."""
        ...

    def model_loaded(self, info: ModelInfo) -> None:
        """Hear what was loaded, once, just before READY."""
        ...

    def state_changed(self, state: EngineState, error: IcehouseError | None) -> None:
        """Hear of a new state; `error` is what callers are told when it is FAILED."""
        ...
