"""Pipeline of passes: each feeds every decoding sequence and some prompts, and is read or run ahead of.

A device that computes on its own (Metal, CUDA) is kept a pass ahead: the next one is dispatched, with the
tokens drawn last as an array among its input, before those tokens are read. So it computes while Python
publishes. MLX's CPU build makes the dispatch itself wait, so there a pass ahead would only delay every first
token by a pass.

Where a draw depends on the tokens before it (penalties, banned sequences, a constraint), a pass ahead is cut
in two: the forward is dispatched, the last tokens are read and masks made while it runs, then the draw is
dispatched behind it. A pass with guesses, or with prompts that are measured or pooled, is waited for.

Inference thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from icehouse_server.clock import Clock
from icehouse_server.domain.ids import NO_ADAPTER, AdapterName, SequenceId
from icehouse_server.domain.request import Pooling
from icehouse_server.engine.core.ports import Chunk, Drawn, LayerSpan, PassResult
from icehouse_server.engine.runner.decoding import DispatchedPass, Draw, OpenSequence, settle
from icehouse_server.engine.runner.draft_model import DraftModel
from icehouse_server.engine.runner.forward import Attention, ForwardPass, Row, Share
from icehouse_server.engine.runner.forward.cpu.attention import FIRST_WAIT
from icehouse_server.engine.runner.pass_clock import PassClock
from icehouse_server.engine.runner.slab_choice import SlabChoice
from icehouse_server.engine.runner.speculation import Guesses, guesses_of
from icehouse_server.engine.sampling.logprobs import measure


@dataclasses.dataclass(frozen=True, slots=True)
class _Fed:
    """What one sequence brings to a pass."""

    share: Share
    sequence: OpenSequence
    token_ids: Sequence[int]
    """Those that are known; empty where the last one is in flight."""
    guesses: Guesses = ()
    chunk: Chunk | None = None


_LIKELY = 0.75
"""Of the time that a layer took: the next one takes that at least."""


class Pipeline:
    """Runs passes one behind the other."""

    def __init__(
        self, *, is_pipelined: bool, attention: Attention, clock: Clock, pass_clock: PassClock
    ) -> None:
        self._is_pipelined = is_pipelined
        self._attention = attention
        self._slab_choice = SlabChoice()
        self.is_paged = False
        """Whether KV lies in pages, which all rows share."""
        self.slab_token_limit = 0
        """Longest row that may share a buffer where attention is chosen by time."""
        self._clock = clock
        self._pass_clock = pass_clock
        self.forwards: dict[AdapterName, ForwardPass] = {}
        """One for each module tree: the model by itself, and with each adapter."""
        self.draft_model: DraftModel | None = None
        self._decoding: dict[SequenceId, OpenSequence] = {}
        self._in_flight: DispatchedPass | None = None
        self._last_end_time = 0.0

    def run(
        self, parts: Sequence[tuple[OpenSequence, Chunk]], before_wait: Callable[[], None] | None = None
    ) -> PassResult:
        """Run one pass over the decoding sequences and these chunks. A chunk's sequence that draws decodes in
        every pass after this one."""
        guessing = [sequence for sequence in self._decoding.values() if sequence.is_guessing]
        waits = bool(guessing) or any(_is_read(chunk) for _, chunk in parts)
        is_ahead = self._is_pipelined and not waits
        before, self._in_flight = self._in_flight, None
        told: list[Drawn] = []
        if before is not None and not (is_ahead and (self._decoding or parts)):
            told += self._collect(before, is_fed=False)
            if not (self._decoding or parts):
                return self._result(told, before, is_behind=True)
            before = None
            guessing = [sequence for sequence in self._decoding.values() if sequence.is_guessing]
        if not (self._decoding or parts):
            return PassResult()
        FIRST_WAIT.expect(None if is_ahead else before_wait)
        current = self._built(parts, guessing, before, is_ahead=is_ahead)
        if is_ahead:
            for sequence in self._decoding.values():
                sequence.behind.clear()  # fed now, and the next token is known a pass later
        FIRST_WAIT.come()  # this dispatch waits, where nothing ran ahead
        if before is not None and current.needs_tokens:
            current.dispatch()
            if before_wait is not None:
                before_wait()
            told += self._collect(before, is_fed=True)
            current.draw(may_wait=False)
        else:
            current.draw(may_wait=not is_ahead)
            self._through_layers_in_time(current)
            if before_wait is not None and is_ahead:
                before_wait()
            if before is not None:
                told += self._collect(before, is_fed=True)
        if is_ahead:
            self._in_flight = current
            return self._result(told, before, is_behind=True)
        told += self._collect(current, is_fed=False)
        return self._result(told, current, is_behind=False)

    def seat_all(self) -> None:
        """Let those that decode share buffers, whatever it costs, if they ever may and are enough for it."""
        rows = {s.row: 1 for s in self._decoding.values() if s.row.seated_caches is None}
        if self.slab_token_limit:
            self.forwards[NO_ADAPTER].seat_together(rows, token_limit=self.slab_token_limit)

    def forget_times(self) -> None:
        """Choose how rows attend as if none had been timed."""
        self._slab_choice = SlabChoice()

    def release(self, sequence: OpenSequence) -> None:
        """Forget a sequence; what is in flight of it is not told."""
        self._decoding.pop(sequence.sequence_id, None)
        self.forwards[sequence.adapter].forget(sequence.row)
        # A pass in flight knows the sequence until another one is run, which may be much later.
        sequence.row = Row([])

    def clear(self) -> None:
        """Drop everything."""
        self._decoding.clear()
        self._in_flight = None
        self.forwards.clear()
        self.draft_model = None

    def _built(
        self,
        parts: Sequence[tuple[OpenSequence, Chunk]],
        guessing: Sequence[OpenSequence],
        before: DispatchedPass | None,
        *,
        is_ahead: bool,
    ) -> DispatchedPass:
        """Build a pass, lazily. Where it will be waited for, what goes through some layers is left until the
        rest of it is done."""
        began_time, number = self._clock.monotonic(), self._pass_clock.dispatch()
        has_moved = self._seat(parts)
        speculating = [sequence.speculating for sequence in guessing if sequence.speculating is not None]
        guesses, arrays = guesses_of(speculating, self.draft_model)
        if self.draft_model is not None:
            reading = [(s.drafted, len(chunk.token_ids)) for s, chunk in parts if s.drafted is not None]
            arrays += self.draft_model.read(reading)
        guesses_by_id = {id(s): found for s, found in zip(guessing, guesses, strict=True)}
        fed = [_of_row(s, guesses_by_id.get(id(s), ()), before) for s in self._decoding.values()]
        fed += [_of_chunk(sequence, chunk) for sequence, chunk in parts if chunk.layers is None]
        # Rows of one token lie first in a pass, so that nothing is put in another order there.
        fed.sort(key=lambda each: each.share.token_count > 1 or not each.share.row.token_count)
        current = DispatchedPass([], None, arrays, began_time, number)
        if not (parts or guessing or has_moved):
            current.lengths = _lengths(self._decoding.values())
            current.seated_count = sum(s.row.seated_caches is not None for s in self._decoding.values())
        logits: list[mx.array] = []
        for adapter, own in _by_adapter(fed).items():
            first = sum(part.shape[0] for part in logits)
            found = self._forward(adapter, own, current, before, first=first)
            if found is not None:
                logits.append(found)
        if logits:
            current.logits = logits[0] if len(logits) == 1 else mx.concatenate(logits)
        for sequence, chunk in parts:
            if chunk.layers is not None and not fed:
                current.arrays += self._through_layers(sequence, chunk.token_ids, chunk.layers)
            elif chunk.layers is not None:
                current.layered.append((sequence, chunk))
            if chunk.row is not None:
                self._decoding[sequence.sequence_id] = sequence
        return current

    def _through_layers_in_time(self, current: DispatchedPass) -> None:
        """Take chunks through layers behind all else in the pass, until their time is over."""
        for sequence, chunk in current.layered:
            asked = chunk.layers
            assert asked is not None, "It goes through all layers with the others"
            current.wait()
            began, now = current.began_time, self._clock.monotonic()
            current.layers_began_s = now - began
            last = asked.first
            while last < asked.last:
                mx.eval(
                    self._through_layers(sequence, chunk.token_ids, LayerSpan(last, last + 1, asked.count))
                )
                last += 1
                before, now = now, self._clock.monotonic()
                if now - began + _LIKELY * (now - before) > asked.within_s:
                    break
            if last < asked.last:
                current.went_through[chunk.sequence_id] = LayerSpan(asked.first, last, asked.count)

    def _through_layers(
        self, sequence: OpenSequence, token_ids: Sequence[int], layers: LayerSpan
    ) -> list[Any]:
        """Take a chunk through some layers, beside what else is in the pass; return what to evaluate."""
        forward = self.forwards[sequence.adapter]
        if not layers.first:
            sequence.layered = forward.begin_layers(sequence.row, token_ids)
        layered = sequence.layered
        assert layered is not None and layered.layer == layers.first, (layers, layered)
        arrays = forward.run_layers(layered, layers.last)
        if layers.is_last:
            sequence.layered = None
        return arrays

    def _seat(self, parts: Sequence[tuple[OpenSequence, Chunk]]) -> bool:
        """Let sequences that decode, or will after this pass, keep their KV in buffers for several.

        Where that is wanted or costs less; True when some of them moved.
        """
        if self.is_paged or self._attention in (Attention.ROWS, Attention.PAGES):
            return False
        brought = {sequence.row: 1 for sequence in self._decoding.values()}
        # A prompt that is not cut needs no caches of its own at all.
        whole = [(s, chunk) for s, chunk in parts if chunk.row is not None and not s.row.token_count]
        brought |= {sequence.row: len(chunk.token_ids) for sequence, chunk in whole}
        if self._attention is Attention.AUTO:
            lengths = [row.token_count + count - 1 for row, count in brought.items()]
            if not self._slab_choice.prefers_slab(lengths):
                return False
        rows: dict[AdapterName, dict[Row, int]] = {}
        for sequence in (*self._decoding.values(), *(s for s, _ in whole)):
            if sequence.row.seated_caches is None and self.forwards[sequence.adapter].facts.takes_slab:
                rows.setdefault(sequence.adapter, {})[sequence.row] = brought[sequence.row]
        coming: dict[AdapterName, list[Row]] = {}
        for sequence, chunk in parts:
            if chunk.row is None and chunk.length.input_token_count:
                coming.setdefault(sequence.adapter, []).append(sequence.row)
        has_moved = False
        for adapter, found in rows.items():
            forward = self.forwards[adapter]
            if self._attention is Attention.SLAB:
                for row in found:
                    if row.token_count:
                        forward.seat(row)
            else:
                has_moved |= forward.seat_together(
                    found, coming=coming.get(adapter, ()), token_limit=self.slab_token_limit
                )
        return has_moved

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
                place = stop - 1 - len(each.guesses)
                current.draws.append(Draw(each.sequence, first + place, each.guesses))
            if chunk is not None and chunk.wanted is not None and chunk.next_token_ids:
                assert output.logits is not None
                count = len(chunk.next_token_ids)
                asked = mx.array(list(chunk.next_token_ids))
                told = measure(output.logits[start : start + count], asked, wanted=[chunk.wanted] * count)
                current.measured[chunk.sequence_id] = told
                current.arrays += told.arrays
            if chunk is not None and chunk.pooling is not None:
                assert output.hidden is not None
                hidden = output.hidden[span[0] : span[1]].astype(mx.float32)
                current.pooled[chunk.sequence_id] = hidden.sum(axis=0)
                current.arrays.append(current.pooled[chunk.sequence_id])
        return output.logits

    def _collect(self, ended: DispatchedPass, *, is_fed: bool) -> list[Drawn]:
        """Wait for a pass and take what was drawn in it; what was released meanwhile is not told."""
        ended.wait()
        self._pass_clock.end(ended.number)
        now = self._clock.monotonic()
        ended.elapsed_s = now - max(ended.began_time, self._last_end_time)
        self._last_end_time = now
        if ended.lengths and ended.seated_count in (0, len(ended.lengths)):
            self._slab_choice.note(ended.lengths, ended.elapsed_s, in_slab=bool(ended.seated_count))
        told: list[Drawn] = []
        for found in ended.read():
            sequence = found.draw.sequence
            if self._decoding.get(sequence.sequence_id) is sequence:
                told += settle(found, is_fed=is_fed)
        return told

    def _result(self, told: list[Drawn], ended: DispatchedPass | None, *, is_behind: bool) -> PassResult:
        drawn = _with_fed_ahead(told, lambda sequence_id: len(self._decoding[sequence_id].behind))
        if ended is None:
            return PassResult(drawn, is_behind=is_behind)
        return PassResult(
            drawn,
            measured={sequence_id: arrays.read() for sequence_id, arrays in ended.measured.items()},
            pooled=ended.pooled_vectors(),
            went_through=ended.went_through,
            layers_began_s=ended.layers_began_s,
            drafted_count=ended.drafted_count,
            elapsed_s=ended.elapsed_s,
            is_behind=is_behind,
        )


def _lengths(decoding: Iterable[OpenSequence]) -> list[int]:
    return [sequence.row.token_count for sequence in decoding]


def _is_read(chunk: Chunk) -> bool:
    """Whether a chunk is run for more than its KV and its draw."""
    return chunk.wanted is not None or chunk.pooling is not None


def _of_row(sequence: OpenSequence, guesses: Guesses, before: DispatchedPass | None) -> _Fed:
    in_flight = before is not None and id(sequence) in before.places
    token_ids = () if in_flight else tuple(sequence.behind)
    count = 1 + len(guesses)
    share = Share(
        sequence.row,
        max(1, len(token_ids)) + len(guesses),
        logit_count=count,
        may_be_taken_back=count > 1,
    )
    return _Fed(share, sequence, token_ids, guesses)


def _of_chunk(sequence: OpenSequence, chunk: Chunk) -> _Fed:
    count = len(chunk.token_ids)
    sequence.layered = None  # what is on its way begins anew or not at all
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
    found: dict[AdapterName, list[_Fed]] = {}
    for each in fed:
        found.setdefault(each.sequence.adapter, []).append(each)
    return found


def _token_ids(fed: Sequence[_Fed], before: DispatchedPass | None) -> mx.array:
    """Return the tokens of a pass: those in flight from the device, the others from here."""
    pieces: list[Any] = []
    places: list[int] = []
    known: list[int] = []

    def end_places() -> None:
        if places:
            assert before is not None and before.token_ids is not None
            is_all = places == list(range(before.token_ids.shape[0]))
            pieces.append(before.token_ids if is_all else before.token_ids[mx.array(places)])
            places.clear()

    def end_known() -> None:
        if known:
            pieces.append(mx.array(known, dtype=mx.uint32))
            known.clear()

    for each in fed:
        if not each.token_ids:
            assert before is not None
            end_known()
            places.append(before.places[id(each.sequence)])
            continue
        end_places()
        known += each.token_ids
        if isinstance(each.guesses, mx.array):
            end_known()
            pieces.append(each.guesses.astype(mx.uint32))
        else:
            known += each.guesses
    end_places()
    end_known()
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)


def _with_fed_ahead(told: Sequence[Drawn], behind_count: Callable[[SequenceId], int]) -> list[Drawn]:
    """Say of each token how many from it on are in the caches: all that are told but those left behind."""
    later: dict[SequenceId, int] = {}
    found: list[Drawn] = []
    for drawn in reversed(told):
        count = later[drawn.sequence_id] = later.get(drawn.sequence_id, 0) + 1
        found.append(drawn._replace(fed_ahead_count=count - behind_count(drawn.sequence_id)))
    found.reverse()
    return found
