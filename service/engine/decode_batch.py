"""One lane of decoding: rows that share each forward pass (inference thread).

mlx-lm's batch caches do the padding, joining and leaving. The forward pass is ours instead of
its GenerationBatch, because every row here has its own random key and nobody needs a row of
log probabilities for the whole vocabulary per token.

A device that computes on its own (Metal, CUDA) is kept a step ahead: the next step is dispatched
before the tokens of the last one are read, so it computes while Python publishes. MLX's CPU build
makes the dispatch itself wait, so there a step ahead would only delay every first token by a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, cast

import mlx.core as mx

from service.engine import upstream
from service.engine.ids import SequenceId
from service.engine.ports import Drawn
from service.engine.sampler import SamplingRow, sample

_TUNE_EVERY_STEPS = 32


@dataclasses.dataclass(slots=True)
class JoiningRow:
    """A sequence whose KV holds everything but `last_token_id`, ready to decode."""

    sequence_id: SequenceId
    caches: list[upstream.Cache]
    last_token_id: int
    sampling: SamplingRow


class DecodeBatch:
    """Rows decoding together. A lone row keeps its own unpadded caches until a second one joins."""

    def __init__(self, model: Any, *, is_pipelined: bool, is_solitary: bool = False) -> None:
        self._model = model
        self._is_pipelined = is_pipelined
        self.is_solitary = is_solitary
        """Cache classes here do not batch, so no second row may ever join."""
        self._ids: list[SequenceId] = []
        self._rows: list[SamplingRow] = []
        self._caches: list[upstream.Cache] = []
        self._is_plain = False
        self._step_count = 0
        self._drawn: mx.array | None = None
        self._in_flight: mx.array | None = None

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
        caches = joining[0].caches if alone else upstream.merge_caches([row.caches for row in joining])
        upstream.tune_growth(caches)
        drawn = last
        if self._is_pipelined:
            drawn = self._forward(last, caches, rows)
            mx.async_eval(drawn)  # type: ignore[no-untyped-call]
        if not self._ids:
            self._caches, self._drawn, self._is_plain = caches, drawn, alone
        else:
            assert self._drawn is not None
            if self._is_plain:
                self._caches = upstream.merge_caches([self._caches])
                self._is_plain = False
            self._caches = upstream.extend_caches(self._caches, caches)
            self._drawn = mx.concatenate([self._drawn, drawn])
        self._ids += ids
        self._rows += rows

    def dispatch(self) -> None:
        """Start the next step on the device, from the tokens drawn last."""
        assert self._drawn is not None and self._in_flight is None, "dispatch and collect take turns"
        self._step_count += 1
        if self._step_count % _TUNE_EVERY_STEPS == 0:
            upstream.tune_growth(self._caches)
        if self._is_pipelined:
            self._in_flight = self._drawn
        self._drawn = self._forward(self._drawn, self._caches, self._rows)
        mx.async_eval(self._drawn)  # type: ignore[no-untyped-call]

    def collect(self) -> list[Drawn]:
        """Wait for one token a row: those drawn before the last dispatch when pipelined, else the last."""
        drawn = self._in_flight if self._is_pipelined else self._drawn
        assert drawn is not None, "collect follows dispatch"
        token_ids = cast("list[int]", drawn.tolist())
        self._in_flight = None
        return [Drawn(i, t) for i, t in zip(self._ids, token_ids, strict=True)]

    def locate(self, sequence_id: SequenceId) -> tuple[list[upstream.Cache], int]:
        """Return the caches that hold one row, and which row it is.

        Every token collected so far is in when pipelined; all but the last one otherwise.
        """
        return self._caches, self._ids.index(sequence_id)

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
        self._drawn = self._drawn[mx.array(keep)]

    def _forward(
        self, token_ids: mx.array, caches: list[upstream.Cache], rows: list[SamplingRow]
    ) -> mx.array:
        logits = self._model(token_ids[:, None], cache=caches)
        return sample(logits[:, -1, :], rows)
