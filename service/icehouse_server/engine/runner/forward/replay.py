"""Replays of decode passes: the graph of a pass is traced once and then rebuilt without Python.

Building a pass of 64 rows takes the host as long as MLX takes to give it to a GPU (7.9 of 14.9 ms, H100, 36
layers). Decode passes with equally many rows are one graph over different numbers: tokens, positions, and
where the KV is. `mx.compile` keeps that graph; the work in Python (views, counts, the choice of a launch) is
done once. Only if all KV is in pages whose backend takes their places as an array. Inference thread only.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import mlx.core as mx

from icehouse_server.engine.attention.build_hooks import EARLY_START
from icehouse_server.engine.attention.port import ReplayedAttention, TokenPlaces
from icehouse_server.engine.kv.page_table import PageGroup
from icehouse_server.engine.runner.forward.row import Share
from icehouse_server.engine.runner.forward.row_spans import RowSpans

_log = logging.getLogger("icehouse.engine")

_TRACE_LIMIT: Final = 128
"""Graphs that are kept. One of 36 layers has about 1,300 nodes and holds no numbers."""
TRACED_WHEN_SEEN: Final = 2
"""A kind of pass is traced when seen this often: tracing costs two builds, and many never recur."""
_SEEN_LIMIT: Final = 1024
_TOLERANCE: Final = 0.02
"""Relative to the largest logit, since fused operations round less often."""
_PROOF_COUNT: Final = 2
"""How many passes are both replayed and built, to see that they give the same."""

Build = Callable[[mx.array, RowSpans, Sequence[TokenPlaces]], mx.array]
"""Builds a decode pass of tokens, [rows], and returns its logits, [rows, vocabulary]."""
_Traced = Callable[..., list[mx.array]]


class PassReplays:
    """Traces of one module tree's decode passes. The first ones are also built, which proves them here."""

    def __init__(self, groups: Sequence[PageGroup], build: Build) -> None:
        """All of the model's KV is in these groups."""
        self._groups = groups
        self._attentions = [g.attention for g in groups if isinstance(g.attention, ReplayedAttention)]
        self._build = build
        self._seen: collections.Counter[Hashable] = collections.Counter()
        self._traced: collections.OrderedDict[Hashable, _Traced] = collections.OrderedDict()
        self._pools: list[mx.array] = []
        """The pools' arrays that the traces hold."""
        self._tracing: tuple[RowSpans, Sequence[TokenPlaces]] | None = None
        self._proofs_left = _PROOF_COUNT
        for group in groups:
            group.pool.before_replaced.append(self.close)
        self.is_usable = bool(groups) and len(self._attentions) == len(groups)
        self.replay_count = 0

    @property
    def is_proved(self) -> bool:
        """Whether replayed passes were compared with built ones, and are in use."""
        return self.is_usable and not self._proofs_left

    def takes(self, shares: Sequence[Share]) -> bool:
        """Whether a pass of these shares may be replayed: each row feeds one token and draws the next."""
        return self.is_usable and all(
            share.token_count == share.logit_count == 1
            and not (share.hidden_count or share.features or share.may_be_taken_back)
            and share.row.token_count
            and share.row.rope_positions is None
            for share in shares
        )

    def run(self, token_ids: mx.array, spans: RowSpans, places: Sequence[TokenPlaces]) -> mx.array:
        """Return the logits of a pass, [rows, vocabulary], replayed if its graph is known."""
        launches = tuple(
            attention.launch_of(own, group.window)
            for attention, group, own in zip(self._attentions, self._groups, places, strict=True)
        )
        traced = self._find((spans.token_count, token_ids.dtype, launches))
        if traced is None:
            return self._build(token_ids, spans, places)
        pools = [group.pool for group in self._groups]
        before = [pool.order for pool in pools]
        arrays = [attention.array_of(own) for attention, own in zip(self._attentions, places, strict=True)]
        self._tracing = spans, places
        try:
            logits, *orders = traced(token_ids, spans.positions, *arrays, *before)
            for pool, order in zip(pools, orders, strict=True):
                pool.order = order
            if self._proofs_left:
                self._prove(logits, token_ids, spans, places)
        except Exception as error:  # whatever a model does with numbers that do not exist yet
            for pool, order in zip(pools, before, strict=True):
                pool.order = order
            self._give_up(f"{type(error).__name__}: {error}")
            return self._build(token_ids, spans, places)
        finally:
            self._tracing = None
        self.replay_count += 1
        return logits

    def close(self) -> None:
        """Drop all graphs, and the arrays that they hold."""
        self._traced.clear()
        self._pools = []

    def _find(self, key: Hashable) -> _Traced | None:
        """Return the graph of such passes; None if it is not worth tracing yet."""
        arrays = [group.pool.array for group in self._groups]
        if not all(a is b for a, b in zip(arrays, self._pools, strict=False)) or not self._pools:
            self._traced.clear()  # a pool that grew has another array
            self._pools = arrays
        if (known := self._traced.get(key)) is not None:
            self._traced.move_to_end(key)
            return known
        if len(self._seen) >= _SEEN_LIMIT and key not in self._seen:
            self._seen.clear()
        self._seen[key] += 1
        if self._seen[key] < TRACED_WHEN_SEEN:
            return None
        made: _Traced = mx.compile(self._trace)
        self._traced[key] = made
        if len(self._traced) > _TRACE_LIMIT:
            self._traced.popitem(last=False)
        return made

    def _trace(self, token_ids: mx.array, positions: mx.array, *arrays: mx.array) -> list[mx.array]:
        """Build a pass on arrays that stand for any pass's: called by MLX, once per graph."""
        assert self._tracing is not None, "A graph is traced only for the pass that needs it"
        spans, places = self._tracing
        count = len(self._groups)
        own = [
            attention.placed(one, array)
            for attention, one, array in zip(self._attentions, places, arrays[:count], strict=True)
        ]
        pools = [group.pool for group in self._groups]
        for pool, order in zip(pools, arrays[count:], strict=True):
            pool.order = order
        EARLY_START.end()  # a trace cannot be computed
        stand_ins = dataclasses.replace(spans, positions=positions, shared={}, is_traced=True)
        logits = self._build(token_ids, stand_ins, own)
        return [logits, *(pool.order for pool in pools)]

    def _prove(
        self, logits: mx.array, token_ids: mx.array, spans: RowSpans, places: Sequence[TokenPlaces]
    ) -> None:
        """Build the pass, too, and compare; both write the same to the pages. Raises ValueError if the logits
        differ."""
        built = self._build(token_ids, spans, places)
        highest, apart = (_largest(array) for array in (built, built - logits))
        if not apart <= _TOLERANCE * highest:
            raise ValueError(f"logits are off by {apart:.3g} of {highest:.3g}")
        self._proofs_left -= 1

    def _give_up(self, why: str) -> None:
        self.is_usable = False
        self._traced.clear()
        _log.warning("replay_unused", extra={"detail": why})


def _largest(array: mx.array) -> float:
    return float(mx.abs(array).max().item())  # type: ignore[arg-type]
