"""Forward pass over a flat list of tokens of several rows: weights are read once for all of them.

Every token is a batch row of length one, so the model is called with [tokens, 1] and one position per token.
`model_seam` keeps the rows apart where caches are used, in the way that `probe` found to work for the model.
A pass is built lazily: nothing is computed until its arrays are evaluated. Inference thread only.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import mlx.core as mx

from icehouse_server.domain.model import PassSplit
from icehouse_server.engine.attention.cpu.rope import PASS_ANGLES
from icehouse_server.engine.attention.port import TokenPlaces
from icehouse_server.engine.kv.page_table import places_of
from icehouse_server.engine.kv.paged_cache import Paging
from icehouse_server.engine.kv_cache.cache_classes import Cache, leaves
from icehouse_server.engine.runner.forward.layer_view import (
    HANDED,
    FlatLayer,
    PagedLayer,
    SplitLayer,
    View,
    check_used,
    leaf_views,
    view_of,
    was_used,
)
from icehouse_server.engine.runner.forward.model_seam import (
    Embedding,
    LayerWindow,
    Trunk,
    open_doors,
    patch_attention,
    picked,
    share_angles,
)
from icehouse_server.engine.runner.forward.replay import PassReplays
from icehouse_server.engine.runner.forward.row import Features, LayeredChunk, Row, Share, StateGroup
from icehouse_server.engine.runner.forward.row_spans import RowSpans
from icehouse_server.engine.runner.forward.splits import CacheSplit, PassFacts

Built = TypeVar("Built")


@dataclasses.dataclass(frozen=True, slots=True)
class PassOutput:
    """What one pass returns, not computed yet."""

    logits: mx.array | None
    """[sum of logit counts, vocabulary]; None if no share wanted any. `logit_spans` says which are whose."""
    logit_spans: tuple[tuple[int, int], ...]
    """For each share as given: the start and stop of its logits."""
    hidden: mx.array | None
    """[sum of hidden counts, width], likewise."""
    hidden_spans: tuple[tuple[int, int], ...]
    arrays: list[Any]
    """What must be evaluated to finish the pass: outputs, and caches that no output depends on."""


class ForwardPass:
    """Runs passes of one module tree: a model alone, or with one LoRA adapter."""

    def __init__(self, model: Any, facts: PassFacts, paging: Paging | None = None) -> None:
        """`facts` come from `probe.examine_steps` of this model, or of one with the same architecture."""
        self._model = model
        self.facts = facts
        self._group = StateGroup((), ())
        self._leaf_splits: list[CacheSplit] | None = None
        self._trunk: Trunk | None = None
        self.page(paging or Paging(()))
        self._embedding: Embedding | None = None
        """Known from the first pass that has an image."""
        patch_attention(model)
        share_angles()
        if any(split.needs_door for split in facts.caches):
            open_doors(model)
        if facts.hidden_size:
            self._trunk = Trunk(model)
        self._window = LayerWindow(model) if facts.layer_count else None

    def close(self) -> None:
        """Drop the weights and graphs by emptying each module. Hooks in the modules refer back to this
        object, so all would stay until a garbage collection, or for ever if objects are frozen."""
        self.replays.close()
        for module in list(self._model.modules()):
            module.clear()

    def page(self, paging: Paging) -> None:
        """From now on, put the KV of new rows into these pages, if it can be in pages."""
        self.paging = paging
        is_all_paged = self.facts.modes == (PassSplit.ATTENTION,) and len(self.facts.caches) == sum(
            len(group.layers) for group in paging.groups
        )
        self.replays = PassReplays(paging.groups if is_all_paged else (), self._decode)

    def run(self, token_ids: mx.array, shares: Sequence[Share]) -> PassOutput:
        """Feed every share's tokens, which are in `token_ids` share after share.

        Rows' caches are updated; tokens may be arrays that are not computed yet. Raises NotSplittable if the
        model does something that it did not do when examined; the rows' caches are then lost.
        """
        assert shares, "A pass needs a row"
        assert all(share.token_count >= 1 for share in shares), "A share needs a token"
        for share in shares:
            share.row.make_room(share.token_count)
        self._mark_guesses(shares)
        if not self.facts.caches:
            return self._run_alone(token_ids, shares)
        if self._leaf_splits is None:
            self._leaf_splits = _leaf_splits(self.facts.caches, shares[0].row.raw_caches)
        spans = RowSpans.of(shares)
        places = self._places(spans)
        if self.replays.takes(shares):
            return self._decoded(token_ids, spans, places)
        self._regroup(spans)
        views = self._views(spans, (row.raw_caches for row in spans.rows), places)
        by_leaf = leaf_views(views) if self._group.stacked else []
        for index, stacked in self._group.stacked.items():
            layer = by_leaf[index]
            assert isinstance(layer, SplitLayer)
            layer.stacked = stacked
        logit_indices = spans.last_indices([share.logit_count for share in spans.shares])
        # A head that nobody asks for is never computed, but must be given something.
        is_all = len(logit_indices) == spans.token_count
        head_indices = None if is_all else mx.array(logit_indices or [0])
        features = [
            Features(start + each.start, each.vectors)
            for share, start in zip(spans.shares, spans.starts, strict=True)
            for each in share.features
        ]
        laid_ids = spans.arranged(token_ids, shares)[:, None]
        logits, hidden = self._built(
            spans, views, lambda: self._call(laid_ids, views, head_indices, features)
        )
        for share in shares:
            share.row.token_count += share.token_count
        return self._output(spans, logits[:, 0] if logit_indices else None, hidden)

    def _decoded(self, token_ids: mx.array, spans: RowSpans, places: Sequence[TokenPlaces]) -> PassOutput:
        """Feed one token of each row and return the logits."""
        logits = self.replays.run(token_ids, spans, places)
        for row in spans.rows:
            row.token_count += 1
        return self._output(spans, logits, None)

    def _decode(self, token_ids: mx.array, spans: RowSpans, places: Sequence[TokenPlaces]) -> mx.array:
        """Build what such a pass computes: logits, [rows, vocabulary]."""
        views = self._views(spans, (row.raw_caches for row in spans.rows), places)
        logits, _ = self._built(spans, views, lambda: self._call(token_ids[:, None], views, None))
        return logits[:, 0]

    def begin_layers(self, row: Row, token_ids: Sequence[int]) -> LayeredChunk:
        """Return a chunk that goes through a few layers in each pass, by `run_layers`.

        Only if `facts.layer_count`. The row must not be fed until the chunk has ended or is dropped.
        """
        row.leave_group()
        row.make_room(len(token_ids))
        return LayeredChunk(row, token_ids)

    def run_layers(self, chunk: LayeredChunk, last: int) -> list[Any]:
        """Take a chunk through the layers before `last`; return what must be evaluated to finish that.

        After the last layer its tokens are in the row's caches. It makes no logits.
        """
        window = self._window
        assert window is not None, "This model's layers run together"
        spans = RowSpans.of([Share(chunk.row, len(chunk.token_ids))])
        views = self._views(spans, [chunk.caches], self._places(spans))
        token_ids = mx.array(list(chunk.token_ids))[:, None]

        def call() -> object:
            return self._call(token_ids, views, mx.array([0]))

        chunk.hidden = self._built(
            spans, views, lambda: window.run(call, first=chunk.layer, last=last, hidden=chunk.hidden)
        )
        arrays: list[Any] = [chunk.hidden]
        for index, (view, split) in enumerate(zip(views, self.facts.caches, strict=True)):
            if not was_used(view):
                continue
            chunk.written.add(index)
            if split.leaf_modes() != (PassSplit.ATTENTION,):
                arrays += [leaf.state for leaf in leaves([chunk.forks[index]]) if not leaf.empty()]
        chunk.layer = last
        if last == window.count:
            chunk.end()
        return arrays

    def _call(
        self,
        token_ids: mx.array,
        caches: Sequence[Any],
        indices: mx.array | None,
        features: Sequence[Features] = (),
    ) -> tuple[mx.array, mx.array | None]:
        """Return the logits of some tokens, and the hidden states of all, if the model shows them.

        `token_ids` are [tokens, 1] or [1, tokens], and so are the first two axes of the results.
        """
        if features and self._embedding is None:
            self._embedding = Embedding(self._model)
        trunk, embedding = self._trunk, self._embedding
        try:
            if embedding is not None:
                embedding.features = features
            if trunk is not None:
                trunk.is_on, trunk.indices = True, indices
            logits = self._model(token_ids, cache=list(caches))
            hidden = None if trunk is None else trunk.hidden
        finally:
            if embedding is not None:
                embedding.features = ()
            if trunk is not None:
                trunk.is_on, trunk.indices, trunk.hidden = False, None, None
        return logits if trunk is not None or indices is None else picked(logits, indices), hidden

    def _places(self, spans: RowSpans) -> list[TokenPlaces]:
        """Return where the pass's tokens are in the pages of each group."""
        begins = [row.token_count for row in spans.rows]
        return [
            places_of([row.table.runs[number] for row in spans.rows], begins, spans.counts)
            for number in range(len(self.paging.groups))
        ]

    def _views(
        self, spans: RowSpans, caches: Iterable[Sequence[Cache]], places: Sequence[TokenPlaces]
    ) -> list[View]:
        """Return a view of each layer; `caches` are the rows' in the order of the spans."""
        columns = zip(*caches, strict=True)
        views = [
            view_of(column, spans, split) for column, split in zip(columns, self.facts.caches, strict=True)
        ]
        for group, own in zip(self.paging.groups, places, strict=True):
            for index, layer in group.layers.items():
                flat = views[index]
                assert isinstance(flat, FlatLayer)
                flat.paged = PagedLayer(group, own, layer)
        return views

    def _built(self, spans: RowSpans, views: Sequence[View], call: Callable[[], Built]) -> Built:
        """Return the result of a call in which these views stand for the layers' caches. All layers share the
        pass's angles."""
        PASS_ANGLES.begin(spans.positions)
        try:
            built = call()
            check_used(views)
            return built
        finally:
            HANDED.clear()
            PASS_ANGLES.end()

    def _regroup(self, spans: RowSpans) -> None:
        """Stack the states of the decoding rows, unless they are already stacked."""
        indices = [i for i, split in enumerate(self._leaf_splits or ()) if split.is_stacked]
        singles = spans.rows[: spans.single_count]
        if indices and not self._group.is_of(singles):
            self._group.dissolve()
            self._group = StateGroup(singles, indices) if len(singles) > 1 else StateGroup((), ())

    def _mark_guesses(self, shares: Sequence[Share]) -> None:
        for share in shares:
            row = share.row
            row.forget_mark()
            if not share.may_be_taken_back:
                continue
            if share.token_count > 1:
                row.leave_group()
            row.mark(share.token_count)

    def _output(self, spans: RowSpans, logits: mx.array | None, hidden: mx.array | None) -> PassOutput:
        logit_counts = [share.logit_count for share in spans.shares]
        hidden_counts = [share.hidden_count for share in spans.shares]
        hidden_indices = spans.last_indices(hidden_counts)
        own_hidden = None
        if hidden_indices:
            assert hidden is not None, "This model shows no hidden states"
            own_hidden = hidden[mx.array(hidden_indices)][:, 0]
        outputs = [array for array in (logits, own_hidden) if array is not None]
        arrays = [*outputs, *self._unseen_arrays(spans, sees_all=bool(outputs)), *self._group.arrays]
        return PassOutput(
            logits,
            _as_given(_spans(logit_counts), spans),
            own_hidden,
            _as_given(_spans(hidden_counts), spans),
            arrays,
        )

    def _unseen_arrays(self, spans: RowSpans, *, sees_all: bool) -> list[Any]:
        """Return the caches' arrays that the outputs do not depend on.

        Outputs depend on every layer's attention of every row, since the rows are joined after it.
        """
        if sees_all and self.facts.modes == (PassSplit.ATTENTION,):
            return []
        unseen: list[Any] = []
        for row in spans.rows:
            is_stacked = row.group is self._group
            for cache, split in zip(leaves(row.raw_caches), self._leaf_splits or (), strict=True):
                if (sees_all and split.mode is PassSplit.ATTENTION) or (is_stacked and split.is_stacked):
                    continue
                if not cache.empty():
                    unseen.append(cache.state)
        return unseen

    def _run_alone(self, token_ids: mx.array, shares: Sequence[Share]) -> PassOutput:
        """Call the model for each row separately."""
        logits: list[mx.array] = []
        hidden: list[mx.array] = []
        arrays: list[Any] = []
        start = 0
        for share in shares:
            stop = start + share.token_count
            caches = share.row.raw_caches
            indices = mx.arange(share.token_count - max(1, share.logit_count), share.token_count)
            own, shown = self._call(token_ids[start:stop][None], caches, indices, share.features)
            start = stop
            if share.logit_count:
                logits.append(own[0])
            if share.hidden_count:
                assert shown is not None, "This model shows no hidden states"
                hidden.append(shown[0, -share.hidden_count :])
            arrays += [cache.state for cache in leaves(caches) if not cache.empty()]
            share.row.token_count += share.token_count
        joined = [mx.concatenate(parts) if parts else None for parts in (logits, hidden)]
        logit_spans = _spans([share.logit_count for share in shares])
        hidden_spans = _spans([share.hidden_count for share in shares])
        arrays = [*(array for array in joined if array is not None), *arrays]
        return PassOutput(joined[0], logit_spans, joined[1], hidden_spans, arrays)


def _spans(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    stops = list(itertools.accumulate(counts))
    return tuple((stop - count, stop) for stop, count in zip(stops, counts, strict=True))


def _as_given(laid: tuple[tuple[int, int], ...], spans: RowSpans) -> tuple[tuple[int, int], ...]:
    """Return spans in the order of the shares as they were given, instead of the pass's order."""
    return (
        laid
        if spans.order is None
        else tuple(each for _, each in sorted(zip(spans.order, laid, strict=True)))
    )


def _leaf_splits(splits: Sequence[CacheSplit], caches: Sequence[Any]) -> list[CacheSplit]:
    by_leaf: list[CacheSplit] = []
    for split, cache in zip(splits, caches, strict=True):
        if split.parts:
            by_leaf += _leaf_splits(split.parts, cache.caches)
        else:
            by_leaf += [split] * sum(1 for _ in leaves([cache]))
    return by_leaf
