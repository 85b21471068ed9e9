"""Rows of open and decoding sequences, and the pass that was dispatched for them (inference thread)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from icehouse_server.domain.ids import NO_ADAPTER, AdapterName, SequenceId
from icehouse_server.domain.request import Drafting, ImageKey, SpeculationLimit, TokenLogprobs
from icehouse_server.engine.core.ports import Chunk, DecodeRow, Drawn, LayerSpan
from icehouse_server.engine.core.refusals import logits_not_finite
from icehouse_server.engine.kv_cache.cache_classes import class_of, leaves
from icehouse_server.engine.runner.draft_model import DraftedRow, DraftModel
from icehouse_server.engine.runner.forward.row import Features, LayeredChunk, Row
from icehouse_server.engine.runner.rank import Rank
from icehouse_server.engine.runner.speculation import Guesses, SpeculatingRow, limit_of
from icehouse_server.engine.sampling.logprobs import LogprobArrays, measure
from icehouse_server.engine.sampling.sampler import are_finite, sample
from icehouse_server.engine.sampling.sampling_row import SamplingRow


@dataclasses.dataclass(slots=True)
class OpenSequence:
    """A sequence's caches, and its sampling state once it decodes."""

    sequence_id: SequenceId
    row: Row
    adapter: AdapterName = NO_ADAPTER
    features: tuple[Features, ...] = ()
    """What replaces tokens of its chunk in the pass being built."""
    vectors: dict[ImageKey, mx.array] = dataclasses.field(default_factory=dict)
    """Vectors of the images that its prompt has reached."""
    layered: LayeredChunk | None = None
    """Tokens of its prompt that have gone through some of the layers."""
    drafted: DraftedRow | None = None
    """Draft caches that read its prompt, too, and guess until the row gives them up."""
    sampling: SamplingRow | None = None
    """Set once it decodes."""
    speculating: SpeculatingRow | None = None
    """Set once it decodes, if it asked for speculation."""
    behind: list[int] = dataclasses.field(default_factory=list)
    """Known tokens that are not in the caches, the last drawn one at the end. Empty while the last one is in
    flight; several if states were rolled back to before a wrong guess."""

    def start_decoding(
        self, sampling: SamplingRow, asked: DecodeRow, *, can_take_back: bool, draft_model: DraftModel | None
    ) -> None:
        """Start to draw, from the pass that ends the prompt."""
        self.sampling = sampling
        speculation = asked.speculation
        if speculation is None:
            return
        limit = limit_of(speculation, sampling, can_take_back=can_take_back, draft_model=draft_model)
        token_ids = (*asked.prompt_token_ids, *asked.output_token_ids)
        if limit is not SpeculationLimit.NONE or speculation.drafting is not Drafting.DRAFT_MODEL:
            self.drafted = None
        elif self.drafted is None:
            assert draft_model is not None
            self.drafted = draft_model.open()
            self.drafted.behind += token_ids
        self.speculating = SpeculatingRow(speculation, token_ids, limit=limit, drafted=self.drafted)

    @property
    def is_guessing(self) -> bool:
        return self.speculating is not None and self.speculating.is_guessing

    @property
    def may_guess_ahead(self) -> bool:
        """Whether its caches can be cut while guesses are in flight."""
        return all(class_of(cache).is_cut_before_guesses for cache in leaves(self.row.raw_caches))

    @property
    def waits_to_guess(self) -> bool:
        """Whether it is fed only once its tokens are known. While it catches up, it does not guess yet."""
        is_late = self.drafted is not None and self.drafted.is_behind
        return self.is_guessing and not is_late and self.may_guess_ahead


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """Where in a pass a sequence draws: one token, and one more for each guess."""

    sequence: OpenSequence
    first: int
    """Index of the first one in the pass's logits."""
    guesses: Guesses = ()
    was_asked: bool = False
    """Whether it was to guess, even if it found nothing to guess."""

    @property
    def count(self) -> int:
        return 1 + len(self.guesses)

    @property
    def sampling(self) -> SamplingRow:
        assert self.sequence.sampling is not None, "Only a sequence that decodes draws"
        return self.sequence.sampling

    def result(
        self, token_ids: list[int], finite: list[bool], logprobs: list[TokenLogprobs | None], *, is_fed: bool
    ) -> list[Drawn]:
        """Take what was drawn in a finished pass: right guesses count, wrong ones leave the caches.

        There is one token, and one more for each guess. `finite` says whether the logits of each were finite.
        `is_fed`: the token was fed to the next pass before it was known. `fed_ahead_count` is not set yet. A
        sequence whose logits are not finite must end, and leave nothing behind.
        """
        sequence, sampling, guesses = self.sequence, self.sampling, self.guesses
        known = cast("list[int]", guesses.tolist()) if isinstance(guesses, mx.array) else list(guesses)
        accepted_count = 0
        while accepted_count < len(known) and token_ids[accepted_count] == known[accepted_count]:
            accepted_count += 1
        taken = token_ids[: accepted_count + 1]
        if not all(finite[: len(taken)]):
            error = logits_not_finite(sampling.drawn_count)
            return [Drawn(sequence.sequence_id, taken[0], error=error)]
        again_count = 0
        if known:
            again_count = sequence.row.take_back(len(known) - accepted_count)
            sampling.drawn_count += accepted_count
        if not is_fed:
            before = [*sequence.behind, *known[:accepted_count]]
            sequence.behind = [*before[len(before) - again_count :], taken[-1]]
        drafts = None
        if sequence.speculating is not None:
            drafts = sequence.speculating.take(
                taken, guess_count=len(known), accepted_count=accepted_count, was_asked=self.was_asked
            )
            if not sequence.is_guessing:
                sequence.drafted = None  # a row that gave a draft model up does not return to it
        if sampling.needs_tokens:
            sampling.accept(taken[0])
        own = (sampling.is_complete, sampling.error)
        return [
            Drawn(sequence.sequence_id, token_id, logprobs[index], *own, None if index else drafts)
            for index, token_id in enumerate(taken)
        ]


@dataclasses.dataclass(slots=True)
class DispatchedPass:
    """A forward pass on its way through the device, with what it was asked for."""

    draws: list[Draw]
    logits: mx.array | None
    arrays: list[Any]
    """What must be evaluated to finish the pass."""
    began_time: float
    """When the device was given the pass, or began on it if it computes while a pass is built."""
    number: int
    """The pass clock's number."""
    device_number: int
    """The device clock's number, which counts the passes of all models."""
    rank: Rank | None = None
    """Set in a group, where every rank draws the same tokens."""
    measured: dict[SequenceId, LogprobArrays] = dataclasses.field(default_factory=dict)
    pooled: dict[SequenceId, mx.array] = dataclasses.field(default_factory=dict)
    layered: list[tuple[OpenSequence, Chunk]] = dataclasses.field(default_factory=list)
    """Chunks that go through some layers once all else is done."""
    went_through: dict[SequenceId, LayerSpan] = dataclasses.field(default_factory=dict)
    """Layers that chunks went through before their time was over."""
    layers_began_s: float = 0.0
    """When in the pass they began."""
    token_ids: mx.array | None = None
    """One for each drawn position; set by `draw`."""
    indices: dict[int, int] = dataclasses.field(default_factory=dict)
    """Index of each sequence's first token in `token_ids`, by the identity of the sequence."""
    elapsed_s: float = 0.0
    """Set by waiting: from the end of the pass before, of any model, or from `began_time` if that was later,
    to this pass's own end, as seen by the host; 0 if the end was not seen. If the device is faster than the
    host, it had finished earlier, and this is the host's time between two passes, which is what a pass costs
    in that case."""
    is_host_bound: bool = False
    """Whether the device had finished before the host looked."""
    _finite: mx.array | None = None
    """Whether the logits of each drawn token are finite."""
    _deviation: mx.array | None = None
    """From what the other ranks computed, if this pass is compared."""
    _logprobs: tuple[list[int], LogprobArrays] | None = None
    """Log probabilities of some drawn tokens, with their indices in `token_ids`."""

    @property
    def drafted_count(self) -> int:
        return sum(len(draw.guesses) for draw in self.draws)

    @property
    def needs_tokens(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return any(draw.sampling.needs_tokens for draw in self.draws)

    def forget(self, sequence_id: SequenceId) -> None:
        """Drop the results of a released sequence; by then its id may belong to another one."""
        self.measured.pop(sequence_id, None)
        self.pooled.pop(sequence_id, None)

    def dispatch(self) -> None:
        """Let the device compute what was built so far."""
        mx.async_eval(self.arrays)  # type: ignore[no-untyped-call]

    def _drop_arrays(self) -> None:
        """Keep only the dispatched arrays that show when the pass is done.

        If a view of a cache is held while the next pass writes, that write copies the whole cache.
        """
        self.logits = None
        results = [array for array in (self.token_ids, self._finite, self._deviation) if array is not None]
        logprobs = [*self.measured.values(), *([] if self._logprobs is None else [self._logprobs[1]])]
        results += [array for each in logprobs for array in each.arrays]
        results += self.pooled.values()
        if not results:
            leaves = cast("list[tuple[str, Any]]", tree_flatten(self.arrays))
            last = next(leaf for _, leaf in reversed(leaves) if isinstance(leaf, mx.array))
            results = [mx.contiguous(last[(slice(-1, None),) * last.ndim])]
            mx.async_eval(results)  # type: ignore[no-untyped-call]
        self.arrays = results

    def draw(self, *, may_wait: bool) -> None:
        """Draw every position of the pass at once, and dispatch the draws."""
        if self.draws:
            rows: list[SamplingRow] = []
            where: list[int] = []
            for draw in self.draws:
                self.indices[id(draw.sequence)] = len(where)
                where += range(draw.first, draw.first + draw.count)
                rows += [draw.sampling, *(draw.sampling.ahead(i) for i in range(1, draw.count))]
            assert self.logits is not None
            is_all = where == list(range(self.logits.shape[0]))
            logits = self.logits if is_all else self.logits[mx.array(where)]
            self.token_ids = sample(logits, rows, may_wait=may_wait).astype(mx.uint32)
            if self.rank is not None:
                self.token_ids = self.rank.share(self.token_ids)
                if self.rank.is_checked(self.number):
                    self._deviation = self.rank.deviation(logits)
                    self.arrays.append(self._deviation)
            self._finite = are_finite(logits, self.token_ids, rows)
            self.arrays += [self.token_ids, self._finite]
            wanted = {index: row.logprobs for index, row in enumerate(rows) if row.logprobs is not None}
            if wanted:
                at = mx.array(list(wanted))
                measured = measure(logits[at], self.token_ids[at], wanted=list(wanted.values()))
                self._logprobs = list(wanted), measured
                self.arrays += measured.arrays
        self.dispatch()
        self._drop_arrays()

    def wait(self) -> None:
        """Return when the device is done with the pass."""
        mx.eval(self.arrays)

    def read(
        self, *, is_current: Callable[[OpenSequence], bool], is_fed: Callable[[OpenSequence], bool]
    ) -> list[Drawn]:
        """Return what was drawn for sequences that are still current. `is_fed` tells whether a sequence's
        token was fed to the next pass before it was known."""
        if self.token_ids is None:
            return []
        assert self._finite is not None
        if self._deviation is not None and self.rank is not None:
            self.rank.check(self._deviation)
        ids = cast("list[int]", self.token_ids.tolist())
        finite = cast("list[bool]", self._finite.tolist())
        logprobs: list[TokenLogprobs | None] = [None] * len(ids)
        if self._logprobs is not None:
            for index, entry in zip(self._logprobs[0], self._logprobs[1].read(), strict=True):
                logprobs[index] = entry
        drawn: list[Drawn] = []
        start = 0
        for draw in self.draws:
            own, start = slice(start, start + draw.count), start + draw.count
            if is_current(draw.sequence):
                drawn += draw.result(ids[own], finite[own], logprobs[own], is_fed=is_fed(draw.sequence))
        return drawn


def digest_of(sequences: Mapping[SequenceId, OpenSequence]) -> int:
    """Return a 64-bit digest of the tokens of these sequences."""
    states = [(key, each.row.token_count, each.behind) for key, each in sequences.items()]
    return int.from_bytes(hashlib.blake2b(repr(states).encode(), digest_size=8).digest())


def features_of(chunk: Chunk, vectors: Mapping[ImageKey, mx.array]) -> tuple[Features, ...]:
    """Return the vectors that replace the chunk's image tokens."""
    return tuple(
        Features(
            part.start,
            vectors[part.key][part.place : part.place + part.count],
            part.start - part.place if part.image.is_seen_whole else None,
        )
        for part in chunk.images
    )
