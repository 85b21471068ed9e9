"""Ports of the engine: what it needs of a runner and of a listener."""

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
    """What a sequence brings along when it begins to decode, with its last input tokens: everything the next
    token depends on but the KV."""

    sampling: SamplingParams
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...] = ()
    """Drawn before the sequence was parked: the draws, the penalties and the constraint go on from there."""
    constraint: Constraint | None = None
    """A fresh one; it accepts `output_token_ids` when the row joins."""
    logprobs: LogprobsWanted | None = None
    """What to report of each drawn token; None for no log probabilities."""
    speculation: Speculation | None = None
    """As requested; the runner reports with the first token whether it is possible."""


class Drawn(NamedTuple):
    """One token drawn for one sequence in a pass."""

    sequence_id: SequenceId
    token_id: int
    logprobs: TokenLogprobs | None = None
    """Where the row asked for them."""
    is_complete: bool = False
    """The row's constraint lets nothing follow this token."""
    error: IcehouseError | None = None
    """Why the row cannot go on; its token is not to be published."""
    drafts: DraftCounts | None = None
    """What speculation did in this step, with the step's first token, for rows that asked for it."""
    fed_ahead_count: int = 0
    """Tokens from this one on that were fed to the model already: their KV exists. 1 where the device runs
    a pass ahead; more inside a run of accepted guesses; below 0 where tokens before this one are to be fed
    once more, because states that are no attention went back to before a wrong guess."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpan:
    """Layers [first, last) of a model's `count`: those that a chunk goes through in one pass."""

    first: int
    last: int
    count: int
    within_s: float = math.inf
    """Another of them begins while it is likely to end before the pass has lasted for so long; the first one
    runs in any case."""

    @property
    def is_last(self) -> bool:
        """Whether the chunk is through with them."""
        return self.last == self.count

    @property
    def share(self) -> float:
        """Of all layers."""
        return (self.last - self.first) / self.count


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of one open sequence that run in a pass, on top of what its caches hold."""

    sequence_id: SequenceId
    token_ids: Sequence[int]
    adapter: AdapterName = NO_ADAPTER
    """Rows run in one forward pass with rows of the same adapter only."""
    row: DecodeRow | None = None
    """Set with the prompt's last tokens: the first output token is drawn from them, and the sequence decodes
    in every pass after this one."""
    next_token_ids: Sequence[int] = ()
    """With `wanted`: the token behind each one that has one, which its logits are read for."""
    wanted: LogprobsWanted | None = None
    images: tuple[ImagePart, ...] = ()
    """Tokens among them that images replace."""
    rope_positions: RopePositions | None = None
    """Of the whole sequence, where images are a grid to the model."""
    pooling: Pooling | None = None
    speculation: Speculation | None = None
    """What the sequence will ask for when it decodes: a draft model reads the prompt along."""
    layers: LayerSpan | None = None
    """Of a chunk that goes through some layers in each pass: those of this pass, from the first one on
    without a gap. Its tokens are in the caches behind the last layer, and until then the sequence's next
    chunk may begin anew; nothing is drawn or measured of it. None goes through all."""

    @property
    def is_read(self) -> bool:
        """Whether it is measured or pooled: `PassResult` has what came of it."""
        return self.pooling is not None or (self.wanted is not None and bool(self.next_token_ids))


@dataclasses.dataclass(frozen=True, slots=True)
class PassResult:
    """What came of a pass."""

    drawn: list[Drawn] = dataclasses.field(default_factory=list)
    """In order for each sequence; several for one that speculates, and none in some passes."""
    measured: Mapping[SequenceId, Sequence[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    """For chunks with `wanted`, in the order of a sequence's chunks: what the tokens say of
    `next_token_ids`."""
    pooled: Mapping[SequenceId, Vector] = dataclasses.field(default_factory=dict)
    """For chunks with `pooling`: the sum of the hidden states, or the last token's, or what is to be told."""
    went_through: Mapping[SequenceId, LayerSpan] = dataclasses.field(default_factory=dict)
    """For chunks with `layers` whose time was over before the last of these: those that they went through."""
    layers_began_s: float = 0.0
    """After how long a chunk with `layers` went on, behind all else in the pass; 0 where none did."""
    drafted_count: int = 0
    """Guesses that were fed besides, which makes the pass longer."""
    elapsed_s: float = 0.0
    """How long the device was at the pass: from the end of the pass before it, or from its dispatch where
    that was later, to its own end, each as the host saw it. Where the device is faster than the host, the
    time between two passes. 0 where no pass was waited for, or another model's work hid its end."""
    is_host_bound: bool = False
    """The device had done the pass before the host came to look: it took as long as the host did."""
    is_behind: bool = False
    """What was drawn, measured and pooled, the guesses and the time are of the pass before this one: the
    device runs ahead. With nothing to feed they are of the last one."""
    leaves_device_idle: bool = False
    """Nothing is in flight, on a device that usually runs a pass ahead."""


class MemoryUse(NamedTuple):
    """Device memory in bytes."""

    active_bytes: int
    """Without the free pages of the model that is asked, which its KV may fill."""
    peak_bytes: int
    spare_bytes: int = 0
    """Of these free pages."""


class ImageUse(NamedTuple):
    """What a vision tower did since the start, and the vectors in memory; all 0 without one."""

    encoded_total: int = 0
    reused_total: int = 0
    encode_s: float = 0.0
    size_bytes: int = 0
    limit_bytes: int = 0


class Pages(Protocol):
    """Memory of the pages of a model that shares the device with others: it grows and shrinks. All of it is 0
    where KV is not in pages, or in a pool of a fixed size. Sizes in bytes."""

    def bound(self, room_bytes: Callable[[], int]) -> None:
        """Grow only into what `room_bytes` returns, as far as that is a matter of choice."""

    @property
    def held_bytes(self) -> int:
        """All of it."""

    @property
    def used_bytes(self) -> int:
        """Of pages that somebody refers to."""

    @property
    def can_move(self) -> bool:
        """Whether no sequence has pages: those of blocks can be moved together then."""

    def missing_bytes(self, kv_bytes: int) -> int:
        """Return what there is too little of for so much more KV."""

    def copied_bytes(self, kv_bytes: int) -> int:
        """Return what there is twice while it grows for so much more KV; 0 where it need not."""

    def reserve(self, kv_bytes: int) -> None:
        """Have free pages for so much more KV: to grow once is better than at every doubling."""

    def give_back(self, size_bytes: int) -> int:
        """Give the memory of free pages back, so much if possible; return how much. Nothing while a sequence
        has pages, or without enough room for a copy of the others."""


class LoadCalledOff(Exception):
    """The server stops before what loading waits for was there."""


class Runner(Protocol):
    """The model and its sequences. Every call is made on the inference thread."""

    @property
    def pages(self) -> Pages: ...

    def load_steps(self, *, is_hurried: Callable[[], bool]) -> Steps[ModelInfo]:
        """Load and warm the model; yield between parts, and while it `is_hurried` rather than wait for a
        disk. Raises ModelError when the folder cannot be served; `close` frees what was made by then. Raises
        LoadCalledOff where the server stops while it waits for something."""

    def warm_up_more(self) -> bool:
        """Have some of what a request may ask for compiled, while nobody has one; False once all of it is."""

    def open(self, sequence_id: SequenceId) -> None:
        """Make empty caches for a new sequence."""

    def run(
        self,
        chunks: Sequence[Chunk],
        *,
        before_wait: Callable[[], None] | None = None,
        reads_at_once: bool = False,
    ) -> PassResult:
        """Run one forward pass over every decoding row and these chunks, one chunk a sequence.

        A device that runs ahead (Metal, CUDA) is given the pass and the tokens of the pass before are read
        and returned. With nothing to feed, what is in flight is returned. `before_wait` is called once the
        pass is built, just before the device is waited for: what wakes other threads costs nothing there.
        `reads_at_once`: return the pass's own tokens, wherever it runs; a first token that nobody decodes
        beside is not to wait until another pass is built and dispatched.
        """

    def layer_count(self) -> int:
        """Return through how many layers a chunk may go some in each pass, which `LayerSpan.within_s` ends; 0
        where it must go through all in one, as on a device that runs ahead; after `load`."""

    def encode(self, sequence_id: SequenceId, image: ImagePart, *, budget_s: float) -> bool:
        """Go on making the vectors of a whole image for an open sequence, for about so long, a layer at
        least; True once they are there. They stay with the sequence until it decodes.

        Raises InvalidRequest where the tower fails on the image; the others go on."""

    def encode_bytes(self, image: ImagePart) -> int:
        """Return what is needed more to make an image's vectors; 0 once that has begun."""

    def image_use(self) -> ImageUse:
        """Read the vision tower's counters."""

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Forget sequences, in whatever phase they are. Unknown ids are ignored."""

    def memory_model(self) -> MemoryModel:
        """Return what sequences of this model take; after `load`."""

    def memory(self) -> MemoryUse:
        """Read the device's memory counters."""

    def close(self) -> None:
        """Drop every array, on this thread."""

    def end_thread(self) -> None:
        """Release what the device holds for this thread, which computes nothing from now on."""


class Decoder(Protocol):
    """The tokenizer, as the inference thread needs it: from tokens back to text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""

    def decode_with_markers(self, token_ids: Sequence[int]) -> str:
        """Return the text with the special tokens that set off a reply's parts."""


class Listener(Protocol):
    """Who hears of the engine. Called on the inference thread; must not block."""

    def publish(self, events: Sequence[tuple[RequestId, Event]]) -> None:
        """Take the events of one step, in order."""

    def model_loaded(self, info: ModelInfo) -> None:
        """Hear what was loaded, once, just before READY."""

    def state_changed(self, state: EngineState, error: IcehouseError | None) -> None:
        """Hear of a new state; `error` is what callers get when it is FAILED."""
