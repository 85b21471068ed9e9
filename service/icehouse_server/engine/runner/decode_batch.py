"""One lane of decoding: rows that share each forward pass (inference thread).

mlx-lm's batch caches do the padding, joining and leaving. The forward pass is ours instead of
its GenerationBatch, because every row here has its own random key and nobody needs a row of
log probabilities for the whole vocabulary per token.

A device that computes on its own (Metal, CUDA) is kept a step ahead: the next step is dispatched
before the tokens of the last one are read, so it computes while Python publishes. MLX's CPU build
makes the dispatch itself wait, so there a step ahead would only delay every first token by a step.

Where a row's draw depends on the tokens before it (penalties, banned sequences, a constraint), a
pipelined step is cut in two: the forward pass is dispatched, then the last tokens are read and the
masks made while it runs, then the draw is dispatched behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, cast

import mlx.core as mx

from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.request import Speculation, TokenLogprobs
from icehouse_server.engine.core.ports import Drawn
from icehouse_server.engine.kv_cache import batching, cache_classes
from icehouse_server.engine.sampling.logprobs import LogprobArrays, measure
from icehouse_server.engine.sampling.row import SamplingRow
from icehouse_server.engine.sampling.sampler import sample

_TUNE_EVERY_STEPS = 32


@dataclasses.dataclass(slots=True)
class JoiningRow:
    """A sequence whose KV holds everything but `last_token_id`, ready to decode with `model`."""

    sequence_id: SequenceId
    caches: list[cache_classes.Cache]
    last_token_id: int
    sampling: SamplingRow
    model: Any
    """The module tree of its adapter."""
    token_ids: tuple[int, ...] = ()
    """Prompt and output so far, for rows that speculate."""
    speculation: Speculation | None = None


@dataclasses.dataclass(slots=True)
class _Draw:
    """One token a row, perhaps not computed yet, and the log probabilities of rows that want them."""

    token_ids: mx.array
    measured: list[tuple[list[SequenceId], LogprobArrays]] = dataclasses.field(default_factory=list)

    def dispatch(self) -> None:
        mx.async_eval(self.token_ids, [arrays.arrays for _, arrays in self.measured])  # type: ignore[no-untyped-call]

    def with_rows(self, other: _Draw) -> _Draw:
        """Return this draw with the rows of another one appended."""
        return _Draw(mx.concatenate([self.token_ids, other.token_ids]), self.measured + other.measured)

    def logprobs(self) -> dict[SequenceId, TokenLogprobs]:
        return {
            sequence_id: entry
            for ids, arrays in self.measured
            for sequence_id, entry in zip(ids, arrays.read(), strict=True)
        }


class DecodeBatch:
    """Rows decoding together. A lone row keeps its own unpadded caches until a second one joins."""

    def __init__(self, model: Any, *, is_pipelined: bool, is_solitary: bool = False) -> None:
        self.model = model
        """Every row here is of this module tree: the model by itself, or with one adapter."""
        self._is_pipelined = is_pipelined
        self.is_solitary = is_solitary
        """Cache classes here do not batch, so no second row may ever join."""
        self._ids: list[SequenceId] = []
        self._rows: list[SamplingRow] = []
        self._caches: list[cache_classes.Cache] = []
        self._is_plain = False
        self._step_count = 0
        self._drawn: _Draw | None = None
        self._in_flight: _Draw | None = None
        self._undrawn: mx.array | None = None
        """Logits of a dispatched pass whose draw waits for the tokens in flight."""

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def sequence_ids(self) -> tuple[SequenceId, ...]:
        return tuple(self._ids)

    def join(self, joining: Sequence[JoiningRow]) -> None:
        """Add rows; their caches belong to the batch now.

        Pipelined, their first token is drawn by a pass of their own; else by the next step of all.
        """
        assert joining, "join needs at least one row"
        ids = [row.sequence_id for row in joining]
        assert not set(ids) & set(self._ids), f"joined twice: {ids}"
        rows = [row.sampling for row in joining]
        last = mx.array([row.last_token_id for row in joining])
        alone = not self._ids and len(joining) == 1
        caches = joining[0].caches if alone else batching.merge_caches([row.caches for row in joining])
        batching.tune_growth(caches)
        drawn = _Draw(last)
        if self._is_pipelined:
            drawn = self._draw(self._forward(last, caches), ids, rows)
        if not self._ids:
            self._caches, self._drawn, self._is_plain = caches, drawn, alone
        else:
            assert self._drawn is not None
            if self._is_plain:
                self._caches = batching.merge_caches([self._caches])
                self._is_plain = False
            self._caches = batching.extend_caches(self._caches, caches)
            self._drawn = self._drawn.with_rows(drawn)
        self._ids += ids
        self._rows += rows

    def dispatch(self) -> None:
        """Start the next step on the device, from the tokens drawn last."""
        assert self._drawn is not None and self._in_flight is None, "dispatch and collect take turns"
        self._step_count += 1
        if self._step_count % _TUNE_EVERY_STEPS == 0:
            batching.tune_growth(self._caches)
        logits = self._forward(self._drawn.token_ids, self._caches)
        if self._is_pipelined:
            self._in_flight = self._drawn
            if any(row.needs_tokens for row in self._rows):
                mx.async_eval(logits)  # type: ignore[no-untyped-call]
                self._undrawn = logits
                return
        self._drawn = self._draw(logits, self._ids, self._rows)

    def draw(self) -> None:
        """Dispatch the draw that `dispatch` left because it depends on the tokens in flight."""
        if self._undrawn is None:
            return
        assert self._in_flight is not None
        self._accept(self._in_flight.token_ids)
        self._drawn = self._draw(self._undrawn, self._ids, self._rows)
        self._undrawn = None

    def collect(self) -> list[Drawn]:
        """Wait for one token a row: those drawn before the last dispatch when pipelined, else the last."""
        drawn = self._in_flight if self._is_pipelined else self._drawn
        assert drawn is not None and self._undrawn is None, "collect follows dispatch and draw"
        if not self._is_pipelined:
            self._accept(drawn.token_ids)
        token_ids = cast("list[int]", drawn.token_ids.tolist())
        logprobs = drawn.logprobs()
        self._in_flight = None
        return [
            Drawn(
                sequence_id,
                token_id,
                logprobs.get(sequence_id),
                row.is_complete,
                row.error,
                row.drafts,
                fed_ahead_count=1 if self._is_pipelined else 0,
            )
            for sequence_id, token_id, row in zip(self._ids, token_ids, self._rows, strict=True)
        ]

    def locate(self, sequence_id: SequenceId) -> tuple[list[cache_classes.Cache], int]:
        """Return the caches that hold one row, and which row it is.

        Every token collected so far is in when pipelined; all but the last one otherwise.
        """
        return self._caches, self._ids.index(sequence_id)

    def leave(self, sequence_id: SequenceId) -> tuple[JoiningRow, Drawn | None]:
        """Take a row out, between steps, as one that goes on elsewhere.

        Pipelined, its next token is drawn already: it is the row's last one then, and returned to be told.
        """
        assert self._drawn is not None and self._in_flight is None, "a row leaves between steps"
        index = self._ids.index(sequence_id)
        caches = self._caches if self._is_plain else batching.extract_caches(self._caches, index)
        token_id = cast("list[int]", self._drawn.token_ids.tolist())[index]
        untold = None
        if self._is_pipelined:
            untold = Drawn(sequence_id, token_id, self._drawn.logprobs().get(sequence_id))
        row = JoiningRow(sequence_id, caches, token_id, self._rows[index], self.model)
        self.remove([sequence_id])
        return row, untold

    def remove(self, sequence_ids: Collection[SequenceId]) -> None:
        """Drop rows, between steps. Their memory goes when the device is done with it."""
        keep = [i for i, row_id in enumerate(self._ids) if row_id not in sequence_ids]
        if len(keep) == len(self._ids):
            return
        self._ids = [self._ids[i] for i in keep]
        self._rows = [self._rows[i] for i in keep]
        if not keep:
            self._caches, self._drawn, self._is_plain = [], None, False
            return
        assert self._drawn is not None
        for cache in self._caches:
            cache.filter(keep)
        self._drawn = dataclasses.replace(self._drawn, token_ids=self._drawn.token_ids[mx.array(keep)])

    def _forward(self, token_ids: mx.array, caches: list[cache_classes.Cache]) -> mx.array:
        logits: mx.array = self.model(token_ids[:, None], cache=caches)
        return logits[:, -1, :]

    def _draw(self, logits: mx.array, ids: list[SequenceId], rows: list[SamplingRow]) -> _Draw:
        """Dispatch the draw of one token a row, and what is to be told about it."""
        # Where nothing is kept ahead of Python, waiting a little earlier costs nothing.
        drawn = _Draw(sample(logits, rows, may_wait=not self._is_pipelined))
        told = [(i, row.logprobs) for i, row in enumerate(rows) if row.logprobs is not None]
        if told:
            where = mx.array([i for i, _ in told])
            arrays = measure(logits[where], drawn.token_ids[where], wanted=[wanted for _, wanted in told])
            drawn.measured.append(([ids[i] for i, _ in told], arrays))
        drawn.dispatch()
        return drawn

    def _accept(self, token_ids: mx.array) -> None:
        """Let the rows that depend on their tokens know them; waits for the device."""
        if any(row.needs_tokens for row in self._rows):
            for row, token_id in zip(self._rows, cast("list[int]", token_ids.tolist()), strict=True):
                row.accept(token_id)
