"""Pipeline of passes: each feeds every decoding sequence and some prompts (inference thread).

A device that computes on its own (Metal, CUDA) runs a pass ahead: the next pass is dispatched before the last
tokens are read, with those tokens as an array among its input. So the device computes while Python publishes.
On MLX's CPU build the dispatch itself waits, so running ahead would only delay every first token by a pass.

If a draw depends on the tokens before it (penalties, banned sequences, a constraint), a pass ahead is cut in
two: the forward is dispatched, the last tokens are read and masks made while it runs, and then the draw is
dispatched. Measured and pooled results of a prompt are read when its pass is collected.

A row that guesses is fed only once its tokens are known, so only in every second pass; other rows are fed in
each. Until its guesses are judged, its caches hold more than is known. Caches with windows or states cannot
be cut then, so a row that has any guesses only while all rows do, and such passes are waited for.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from icehouse_server.clock import Clock
from icehouse_server.domain.ids import AdapterName, SequenceId
from icehouse_server.domain.request import Pooling
from icehouse_server.engine.attention.build_hooks import EARLY_START, FIRST_WAIT
from icehouse_server.engine.core.device_clock import DeviceClock
from icehouse_server.engine.core.ports import Chunk, Drawn, LayerSpan, PassResult
from icehouse_server.engine.kv.pool import PassClock
from icehouse_server.engine.runner.decoding import DispatchedPass, Draw, OpenSequence
from icehouse_server.engine.runner.draft_model import DraftModel
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.row import Row, Share
from icehouse_server.engine.runner.rank import Rank
from icehouse_server.engine.runner.speculation import Guesses, guesses_of
from icehouse_server.engine.sampling.logprobs import measure


@dataclasses.dataclass(frozen=True, slots=True)
class _Fed:
    """What one sequence adds to a pass."""

    share: Share
    sequence: OpenSequence
    token_ids: Sequence[int]
    """The known ones; empty while the last one is in flight."""
    guesses: Guesses = ()
    was_asked: bool = False
    """Whether it was to guess, even if it found nothing to guess."""
    chunk: Chunk | None = None


_DONE = 0.02
"""Share of a pass's time: if waiting for it took less, the device had already finished."""
_LIKELY = 0.75
"""The next layer takes at least this share of the last one's time."""


class Pipeline:
    """Runs passes one after the other."""

    def __init__(
        self,
        *,
        is_pipelined: bool,
        clock: Clock,
        pass_clock: PassClock,
        device_clock: DeviceClock,
        rank: Rank | None = None,
    ) -> None:
        self._rank = rank
        self._is_pipelined = is_pipelined
        self._clock = clock
        self._pass_clock = pass_clock
        self._device_clock = device_clock
        self.forwards: dict[AdapterName, ForwardPass] = {}
        """One for each module tree: the model alone, and with each adapter."""
        self.draft_model: DraftModel | None = None
        self._decoding: dict[SequenceId, OpenSequence] = {}
        self._in_flight: DispatchedPass | None = None

    def run(
        self,
        parts: Sequence[tuple[OpenSequence, Chunk]],
        before_wait: Callable[[], None] | None = None,
        *,
        reads_at_once: bool = False,
    ) -> PassResult:
        """Run one pass over the decoding sequences and these chunks. If a chunk's sequence draws, it decodes
        in later passes. `reads_at_once`: wait for the pass, even on a device that could run ahead."""
        is_ahead = self._is_pipelined and not reads_at_once and not (self._is_only_guessing and not parts)
        before, self._in_flight = self._in_flight, None
        ended: list[DispatchedPass] = []
        drawn: list[Drawn] = []
        if before is not None and not (is_ahead and (self._decoding or parts)):
            drawn += self._collect(before)
            ended, before = [before], None
        if not (self._decoding or parts):
            return self._result(drawn, ended, is_behind=bool(ended))
        FIRST_WAIT.expect(None if is_ahead else before_wait)
        if self._is_pipelined and before is None:
            EARLY_START.begin(self._clock)
        try:
            current = self._built(parts, before, is_ahead=is_ahead)
        finally:
            early_time = EARLY_START.end()
        FIRST_WAIT.come()  # this dispatch waits if nothing ran ahead
        if self._is_pipelined:
            current.began_time = self._clock.monotonic() if early_time is None else early_time
        if before is not None and current.needs_tokens:
            current.dispatch()
            if before_wait is not None:
                before_wait()
            drawn += self._collect(before, behind=current)
            current.draw(may_wait=False)
        else:
            current.draw(may_wait=not is_ahead)
            self._through_layers_in_time(current)
            if before_wait is not None and is_ahead:
                before_wait()
            if before is not None:
                drawn += self._collect(before, behind=current)
        if is_ahead:
            self._in_flight = current
            return self._result(drawn, [] if before is None else [before], is_behind=True)
        drawn += self._collect(current)
        return self._result(drawn, [*ended, current], is_behind=False)

    @property
    def _is_only_guessing(self) -> bool:
        """Whether running ahead serves nobody: rows that guess wait for the outcome."""
        return bool(self._decoding) and all(s.is_guessing for s in self._decoding.values())

    def release(self, sequence: OpenSequence) -> None:
        """Forget a sequence, and drop its results in flight."""
        self._decoding.pop(sequence.sequence_id, None)
        if self._in_flight is not None:
            self._in_flight.forget(sequence.sequence_id)
        sequence.row.leave_group()
        # A pass in flight keeps the sequence until another one runs, which may be much later.
        sequence.row = Row([])

    def clear(self) -> None:
        self._decoding.clear()
        self._in_flight = None
        for forward in self.forwards.values():
            forward.close()
        self.forwards.clear()
        if self.draft_model is not None:
            self.draft_model.close()
        self.draft_model = None

    def _built(
        self, parts: Sequence[tuple[OpenSequence, Chunk]], before: DispatchedPass | None, *, is_ahead: bool
    ) -> DispatchedPass:
        """Build a pass, lazily. If it will be waited for, chunks that go through some layers are left until
        the rest of it is done."""
        number = self._pass_clock.dispatch()
        began_time = 0.0 if self._is_pipelined else self._clock.monotonic()
        rows = self._rows_for(before)
        guessing = [s for s in rows if s.is_guessing and (s.may_guess_ahead or not is_ahead)]
        speculating = [sequence.speculating for sequence in guessing if sequence.speculating is not None]
        guesses, arrays = guesses_of(speculating, self.draft_model)
        if self.draft_model is not None:
            reading = [(s.drafted, len(chunk.token_ids)) for s, chunk in parts if s.drafted is not None]
            arrays += self.draft_model.read(reading)
        guesses_by_id = {id(s): own for s, own in zip(guessing, guesses, strict=True)}
        fed = [_of_row(s, guesses_by_id.get(id(s)), before) for s in rows]
        fed += [_of_chunk(sequence, chunk) for sequence, chunk in parts if chunk.layers is None]
        # Rows with one token come first in a pass, so nothing needs to be reordered there.
        fed.sort(key=lambda each: each.share.token_count > 1 or not each.share.row.token_count)
        device_number = self._device_clock.begin()
        current = DispatchedPass([], None, arrays, began_time, number, device_number, self._rank)
        logits: list[mx.array] = []
        by_adapter = _by_adapter(fed)
        for adapter, own in by_adapter.items():
            first = sum(part.shape[0] for part in logits)
            own_logits = self._forward(adapter, own, current, before, first=first)
            if own_logits is not None:
                logits.append(own_logits)
            if self._rank is not None and len(by_adapter) > 1:
                # Computed together, their sums might be in another order on each rank.
                current.dispatch()
        if logits:
            current.logits = logits[0] if len(logits) == 1 else mx.concatenate(logits)
        for sequence, chunk in parts:
            if chunk.layers is not None and not fed:
                current.arrays += self._through_layers(sequence, chunk.token_ids, chunk.layers)
            elif chunk.layers is not None:
                current.layered.append((sequence, chunk))
            if chunk.row is not None:
                self._decoding[sequence.sequence_id] = sequence
        for sequence in rows if is_ahead else ():
            sequence.behind.clear()  # fed now, and the next token is known a pass later
        return current

    def _rows_for(self, before: DispatchedPass | None) -> list[OpenSequence]:
        """Return the sequences that decode in a pass that is built while another may be in flight: all except
        those that guess and still wait for their tokens from it."""
        rows: list[OpenSequence] = []
        for sequence in self._decoding.values():
            if before is not None and id(sequence) in before.indices and sequence.waits_to_guess:
                assert sequence.speculating is not None
                sequence.speculating.note_wait()
            else:
                rows.append(sequence)
        return rows

    def _through_layers_in_time(self, current: DispatchedPass) -> None:
        """Take chunks through layers after all else in the pass, until their time is over."""
        for sequence, chunk in current.layered:
            span = chunk.layers
            assert span is not None, "It goes through all layers with the others"
            current.wait()
            began, now = current.began_time, self._clock.monotonic()
            current.layers_began_s = now - began
            last = span.first
            while last < span.last:
                mx.eval(
                    self._through_layers(sequence, chunk.token_ids, LayerSpan(last, last + 1, span.count))
                )
                last += 1
                before, now = now, self._clock.monotonic()
                if now - began + _LIKELY * (now - before) > span.within_s:
                    break
            if last < span.last:
                current.went_through[chunk.sequence_id] = LayerSpan(span.first, last, span.count)

    def _through_layers(
        self, sequence: OpenSequence, token_ids: Sequence[int], layers: LayerSpan
    ) -> list[Any]:
        """Take a chunk through some layers, beside the rest of the pass; return what to evaluate."""
        forward = self.forwards[sequence.adapter]
        if not layers.first:
            sequence.layered = forward.begin_layers(sequence.row, token_ids)
        layered = sequence.layered
        assert layered is not None and layered.layer == layers.first, (layers, layered)
        arrays = forward.run_layers(layered, layers.last)
        if layers.is_last:
            sequence.layered = None
        return arrays

    def _forward(
        self,
        adapter: AdapterName,
        fed: Sequence[_Fed],
        current: DispatchedPass,
        before: DispatchedPass | None,
        *,
        first: int,
    ) -> mx.array | None:
        """Feed the sequences of one module tree, whose logits are the pass's from `first` on."""
        shares = [each.share for each in fed]
        output = self.forwards[adapter].run(_token_ids(fed, before), shares)
        current.arrays += output.arrays
        for each, (start, stop), span in zip(fed, output.logit_spans, output.hidden_spans, strict=True):
            chunk = each.chunk
            if chunk is None or chunk.row is not None:
                at = first + stop - 1 - len(each.guesses)
                current.draws.append(Draw(each.sequence, at, each.guesses, each.was_asked))
            if chunk is not None and chunk.wanted is not None and chunk.next_token_ids:
                assert output.logits is not None
                count = len(chunk.next_token_ids)
                following = mx.array(list(chunk.next_token_ids))
                logprobs = measure(
                    output.logits[start : start + count], following, wanted=[chunk.wanted] * count
                )
                current.measured[chunk.sequence_id] = logprobs
                current.arrays += logprobs.arrays
            if chunk is not None and chunk.pooling is not None:
                assert output.hidden is not None
                hidden = output.hidden[span[0] : span[1]].astype(mx.float32)
                current.pooled[chunk.sequence_id] = hidden.sum(axis=0)
                current.arrays.append(current.pooled[chunk.sequence_id])
        return output.logits

    def _collect(self, ended: DispatchedPass, *, behind: DispatchedPass | None = None) -> list[Drawn]:
        """Wait for a pass and take what was drawn in it, except for sequences released meanwhile. `behind` is
        the pass dispatched after it, with tokens drawn in it."""
        came_time = self._clock.monotonic()
        ended.wait()
        self._pass_clock.end(ended.number)
        now = self._clock.monotonic()
        ended.elapsed_s = self._device_clock.end(ended.device_number, began_time=ended.began_time, now=now)
        ended.is_host_bound = behind is not None and now - came_time < _DONE * ended.elapsed_s
        fed = set() if behind is None else {id(draw.sequence) for draw in behind.draws}
        return ended.read(
            is_current=lambda sequence: self._decoding.get(sequence.sequence_id) is sequence,
            is_fed=lambda sequence: id(sequence) in fed,
        )

    def _result(self, drawn: list[Drawn], ended: Sequence[DispatchedPass], *, is_behind: bool) -> PassResult:
        """Return the result of passes that were waited for; times are the last one's."""
        drawn = self._with_fed_ahead(drawn)
        if not ended:
            return PassResult(drawn, is_behind=is_behind)
        last = ended[-1]
        return PassResult(
            drawn,
            measured={name: arrays.read() for each in ended for name, arrays in each.measured.items()},
            pooled={name: np.array(pooled) for each in ended for name, pooled in each.pooled.items()},
            went_through=last.went_through,
            layers_began_s=last.layers_began_s,
            drafted_count=last.drafted_count,
            elapsed_s=last.elapsed_s,
            is_host_bound=last.is_host_bound,
            is_behind=is_behind,
            leaves_device_idle=self._is_pipelined and not is_behind,
        )

    def _with_fed_ahead(self, drawn: Sequence[Drawn]) -> list[Drawn]:
        """Note with each token how many, from it on, are in the caches: all except those in `behind`."""
        later: collections.Counter[SequenceId] = collections.Counter()
        noted: list[Drawn] = []
        for each in reversed(drawn):
            later[each.sequence_id] += 1
            behind_count = len(self._decoding[each.sequence_id].behind)
            noted.append(each._replace(fed_ahead_count=later[each.sequence_id] - behind_count))
        return noted[::-1]


def _of_row(sequence: OpenSequence, guesses: Guesses | None, before: DispatchedPass | None) -> _Fed:
    """Feed a decoding sequence; `guesses` is None if it was not to guess."""
    in_flight = before is not None and id(sequence) in before.indices
    token_ids = () if in_flight else tuple(sequence.behind)
    fed = () if guesses is None else guesses
    fed_count, count = max(1, len(token_ids)) + len(fed), 1 + len(fed)
    share = Share(sequence.row, fed_count, logit_count=count, may_be_taken_back=count > 1)
    return _Fed(share, sequence, token_ids, fed, was_asked=guesses is not None)


def _of_chunk(sequence: OpenSequence, chunk: Chunk) -> _Fed:
    count = len(chunk.token_ids)
    sequence.layered = None  # a chunk in progress starts over or not at all
    is_measured = chunk.wanted is not None and bool(chunk.next_token_ids)
    hidden_count = {None: 0, Pooling.LAST_TOKEN: 1}.get(chunk.pooling, count)
    share = Share(
        sequence.row,
        count,
        logit_count=count if is_measured else int(chunk.row is not None),
        hidden_count=hidden_count,
        features=sequence.features,
    )
    return _Fed(share, sequence, chunk.token_ids, chunk=chunk)


def _by_adapter(fed: Iterable[_Fed]) -> Mapping[AdapterName, list[_Fed]]:
    groups: dict[AdapterName, list[_Fed]] = {}
    for each in fed:
        groups.setdefault(each.sequence.adapter, []).append(each)
    return groups


def _token_ids(fed: Sequence[_Fed], before: DispatchedPass | None) -> mx.array:
    """Return the tokens of a pass: those in flight from the device, the others from here."""
    pieces: list[Any] = []
    for in_flight, some in itertools.groupby(fed, lambda each: not each.token_ids):
        if in_flight:
            assert before is not None and before.token_ids is not None
            indices = [before.indices[id(each.sequence)] for each in some]
            is_all = indices == list(range(before.token_ids.shape[0]))
            pieces.append(before.token_ids if is_all else before.token_ids[mx.array(indices)])
            continue
        known: list[int] = []
        for each in some:
            known += each.token_ids
            if isinstance(each.guesses, mx.array):
                pieces += [mx.array(known, dtype=mx.uint32), each.guesses.astype(mx.uint32)]
                known = []
            else:
                known += each.guesses
        if known:
            pieces.append(mx.array(known, dtype=mx.uint32))
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
