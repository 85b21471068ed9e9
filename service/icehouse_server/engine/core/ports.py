"""Ports of the engine: what it needs from a runner and from a listener."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from icehouse_server.domain.events import Event
from icehouse_server.domain.ids import NO_ADAPTER, AdapterName, RequestId, SequenceId
from icehouse_server.domain.model import EngineState, ModelInfo
from icehouse_server.domain.request import (
    DraftCounts,
    ImagePart,
    LogprobsWanted,
    Pooling,
    RopePositions,
    Speculation,
    TokenLogprobs,
    Vector,
)
from icehouse_server.domain.response_format import Constraint
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.memory_model import MemoryModel
from icehouse_server.engine.core.steps import Steps
from icehouse_server.errors import IcehouseError


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeRow:
    """What a sequence passes on, with its last input tokens, when it begins to decode: everything that the
    next token depends on besides KV."""

    sampling: SamplingParams
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...] = ()
    """Drawn before the sequence was parked: sampling, penalties and the constraint continue from there."""
    constraint: Constraint | None = None
    """A fresh one; it accepts `output_token_ids` when the row joins."""
    logprobs: LogprobsWanted | None = None
    """What to report for each drawn token; None for no log probabilities."""
    speculation: Speculation | None = None
    """As requested; with the first token, the runner reports whether it is possible."""


class Drawn(NamedTuple):
    """One token drawn for one sequence in a pass."""

    sequence_id: SequenceId
    token_id: int
    logprobs: TokenLogprobs | None = None
    """Only if the row asked for them."""
    is_complete: bool = False
    """Whether the row's constraint allows nothing after this token."""
    error: IcehouseError | None = None
    """Why the row cannot go on; its token must not be published."""
    drafts: DraftCounts | None = None
    """What speculation did in this step; set on the step's first token, for rows that asked for it."""
    fed_ahead_count: int = 0
    """How many tokens, from this one on, were already fed to the model, so that their KV exists. 1 if the
    device runs a pass ahead, and more inside a run of accepted guesses. Negative if tokens before this one
    must be fed again, because non-attention states were rolled back to before a wrong guess."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpan:
    """Layers [first, last) of a model's `count`, which a chunk goes through in one pass."""

    first: int
    last: int
    count: int
    within_s: float = math.inf
    """Another layer begins only if it is likely to end before the pass has lasted this long. The first always
    runs."""

    @property
    def is_last(self) -> bool:
        """Whether these include the model's last layer."""
        return self.last == self.count

    @property
    def share(self) -> float:
        """The fraction of all layers."""
        return (self.last - self.first) / self.count


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of one open sequence to run in a pass, after those in its caches."""

    sequence_id: SequenceId
    token_ids: Sequence[int]
    adapter: AdapterName = NO_ADAPTER
    """A forward pass only combines rows with the same adapter."""
    row: DecodeRow | None = None
    """Set with the prompt's last tokens: the first output token is drawn from them, and the sequence decodes
    in every later pass."""
    next_token_ids: Sequence[int] = ()
    """With `wanted`: the token after each one that has a next, to be looked up in its logits."""
    wanted: LogprobsWanted | None = None
    images: tuple[ImagePart, ...] = ()
    """Images that replace some of these tokens."""
    rope_positions: RopePositions | None = None
    """Of the whole sequence, if the model places images on a grid."""
    pooling: Pooling | None = None
    speculation: Speculation | None = None
    """What the sequence will ask for when it decodes: a draft model reads the prompt, too."""
    layers: LayerSpan | None = None
    """For a chunk that goes through only some layers in each pass: this pass's layers, which continue without
    a gap from those before. Its tokens are in the caches only after the last layer. Until then the sequence's
    next chunk may start over, and nothing is drawn or measured. None means all layers."""

    @property
    def is_read(self) -> bool:
        """Whether the chunk is measured or pooled: then `PassResult` has the outcome."""
        return self.pooling is not None or (self.wanted is not None and bool(self.next_token_ids))


@dataclasses.dataclass(frozen=True, slots=True)
class PassResult:
    """The outcome of a pass."""

    drawn: list[Drawn] = dataclasses.field(default_factory=list)
    """In order for each sequence: several tokens if it speculates, and none in some passes."""
    measured: Mapping[SequenceId, Sequence[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    """For chunks with `wanted`, in the order of a sequence's chunks: the log probabilities of
    `next_token_ids`."""
    pooled: Mapping[SequenceId, Vector] = dataclasses.field(default_factory=dict)
    """For chunks with `pooling`: the sum of the hidden states, the last token's, or the value asked for."""
    went_through: Mapping[SequenceId, LayerSpan] = dataclasses.field(default_factory=dict)
    """For chunks with `layers` that ran out of time before the last: those that they went through."""
    layers_began_s: float = 0.0
    """When in the pass a chunk with `layers` started, after everything else; 0 if there was none."""
    drafted_count: int = 0
    """Guesses fed in addition, which make the pass longer."""
    elapsed_s: float = 0.0
    """How long the device spent on the pass: from the end of the pass before, or from this one's dispatch if
    that was later, to its end, as the host saw them. If the device is faster than the host, it is the time
    between two passes. 0 if no pass was waited for, or if another model's work hid its end."""
    is_host_bound: bool = False
    """The device had finished before the host looked, so the time is the host's."""
    is_behind: bool = False
    """Tokens, measurements, pooled vectors, guesses and time belong to the pass before this one, because the
    device runs ahead. With nothing to feed, they belong to the last pass."""
    leaves_device_idle: bool = False
    """Nothing is in flight, on a device that usually runs a pass ahead."""


class MemoryUse(NamedTuple):
    """Device memory in bytes."""

    active_bytes: int
    """Excluding this model's free pages, which its KV may fill."""
    peak_bytes: int
    spare_bytes: int = 0
    """Size of these free pages."""


class ImageUse(NamedTuple):
    """What a vision tower has done since the start, and its vectors in memory; all 0 without a tower."""

    encoded_total: int = 0
    reused_total: int = 0
    encode_s: float = 0.0
    size_bytes: int = 0
    limit_bytes: int = 0


class Pages(Protocol):
    """Memory of the page pools of a model that shares the device with others; it grows and shrinks. All 0 if
    KV is not in pages, or in a pool of a fixed size. Sizes in bytes."""

    def bound(self, room_bytes: Callable[[], int]) -> None:
        """Where growth is optional, grow only within what `room_bytes` returns."""

    @property
    def held_bytes(self) -> int:
        """Size of all pages."""

    @property
    def used_bytes(self) -> int:
        """Size of the pages in use."""

    @property
    def can_move(self) -> bool:
        """Whether no sequence has pages. Then the pages of blocks can be moved together."""

    def missing_bytes(self, kv_bytes: int) -> int:
        """Return how much must be allocated to hold this much more KV."""

    def copied_bytes(self, kv_bytes: int) -> int:
        """Return how much is held twice while growing for this much more KV; 0 if no growth is needed."""

    def reserve(self, kv_bytes: int) -> None:
        """Have free pages for this much more KV: growing once is better than doubling several times."""

    def give_back(self, size_bytes: int) -> int:
        """Give back the memory of free pages, this much if possible; return how much. Nothing while a
        sequence has pages, or if there is no room for a copy of the others."""


class LoadCalledOff(Exception):
    """The server is stopping, and loading still waits for something."""


class Runner(Protocol):
    """The model and its sequences. Called only on the inference thread."""

    @property
    def pages(self) -> Pages: ...

    def load_steps(self, *, is_hurried: Callable[[], bool]) -> Steps[ModelInfo]:
        """Load and warm the model. Yield between parts, and while `is_hurried` instead of waiting for a disk.
        Raises ModelError if the folder cannot be served, and LoadCalledOff if the server stops while it waits
        for something. `close` frees what was loaded by then."""

    def warm_up_more(self) -> bool:
        """While idle, compile something that a request may need; return False once all is compiled."""

    def open(self, sequence_id: SequenceId) -> None:
        """Make empty caches for a new sequence."""

    def run(
        self,
        chunks: Sequence[Chunk],
        *,
        before_wait: Callable[[], None] | None = None,
        reads_at_once: bool = False,
    ) -> PassResult:
        """Run one forward pass over every decoding row and these chunks, at most one per sequence.

        A device that runs ahead (Metal, CUDA) is given this pass, and the tokens of the pass before are
        returned. With nothing to feed, the tokens in flight are returned. `before_wait` is called once the
        pass is built, just before waiting for the device: waking other threads costs nothing there.
        `reads_at_once` returns the pass's own tokens on any device: if nothing else decodes, a first token
        should not wait until another pass is built and dispatched.
        """

    def layer_count(self) -> int:
        """Return the layer count if a chunk may go through some layers in each pass (see
        `LayerSpan.within_s`); 0 if it must go through all at once, as on a device that runs ahead. After
        `load`."""

    def encode(self, sequence_id: SequenceId, image: ImagePart, *, budget_s: float) -> bool:
        """Continue encoding a whole image for an open sequence, for about `budget_s` but at least one layer.
        Return True once its vectors are there; they stay with the sequence until it decodes.

        Raises InvalidRequest if the tower fails on the image; other sequences go on.
        """

    def encode_bytes(self, image: ImagePart) -> int:
        """Return how much more memory encoding an image needs; 0 once it has begun."""

    def image_use(self) -> ImageUse:
        """Read the vision tower's counters."""

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Forget sequences, whatever their phase. Unknown ids are ignored."""

    def memory_model(self) -> MemoryModel:
        """Return what sequences of this model take; after `load`."""

    def memory(self) -> MemoryUse:
        """Read the device's memory counters."""

    def close(self) -> None:
        """Drop every array, on this thread."""

    def end_thread(self) -> None:
        """Release what the device holds for this thread, which computes nothing from now on."""


class Decoder(Protocol):
    """The tokenizer as the inference thread needs it: from tokens back to text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""

    def decode_with_markers(self, token_ids: Sequence[int]) -> str:
        """Return the text, including the special tokens that mark a reply's parts."""


class Listener(Protocol):
    """Receives the engine's events. Called on the inference thread; must not block."""

    def publish(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        """Take the events of one step, in order."""

    def model_loaded(self, info: ModelInfo) -> None:
        """Take what was loaded; called once, just before READY."""

    def state_changed(self, state: EngineState, error: IcehouseError | None) -> None:
        """Take a new state; `error` is what callers get if it is FAILED."""
