"""Draft model: guesses tokens with a small model of the same vocabulary (inference thread).

Speculative decoding (Leviathan 2022; Chen 2023) with the draft model's likeliest tokens. A sequence's draft
caches read its prompt along with the model's own. Tokens that they missed, because these were reused from the
prefix cache, are read one bounded chunk per pass, beside plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from icehouse_server.domain.model import ModelInfo
from icehouse_server.engine.core.memory_model import DraftFootprint
from icehouse_server.engine.core.steps import Steps
from icehouse_server.engine.kv_cache.cache_classes import (
    Undo,
    class_of,
    leaves,
    make_caches,
    mark,
    step_token_count,
)
from icehouse_server.engine.runner import model_loader
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.probe import examine_steps
from icehouse_server.engine.runner.forward.row import Row, Share
from icehouse_server.engine.runner.forward.splits import PassFacts
from icehouse_server.errors import model_invalid
from icehouse_server.text.tokenizer import Tokenizer

_CHUNK_TOKEN_COUNT = 128
"""Tokens that a pass may add to draft caches that catch up; their sequences guess nothing meanwhile."""


class DraftedRow:
    """One sequence's draft caches. They hold every token except those `behind`."""

    __slots__ = ("behind", "row")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.behind: list[int] = []

    @property
    def is_behind(self) -> bool:
        """Whether more is missing than the next pass can read while guessing."""
        return len(self.behind) > _CHUNK_TOKEN_COUNT


class DraftModel:
    """The loaded draft model, which guesses for all sequences in the same passes."""

    def __init__(
        self, model: Any, *, facts: PassFacts, vocabulary_size: int, footprint: DraftFootprint
    ) -> None:
        self._model = model
        self._forward = ForwardPass(model, facts)
        self._vocabulary_size = vocabulary_size
        self.footprint = footprint

    @classmethod
    def load_steps(
        cls,
        source: model_loader.ModelSource,
        *,
        info: ModelInfo,
        tokenizer: Tokenizer,
        is_hurried: Callable[[], bool],
    ) -> Steps[DraftModel]:
        """Load a draft model for the model of `info`; yields as `model_loader.load_steps`.

        Raises ModelError if the folder cannot be served, its vocabulary differs, or guesses cannot be taken
        back out of its caches.
        """
        own = model_loader.load_tokenizer(source)
        if own.vocabulary_json() != tokenizer.vocabulary_json() or not _spells_alike(own, tokenizer):
            raise model_invalid(
                f"the draft model {source.model_id} has a different vocabulary from {info.model_id}, so its "
                "guesses would mean nothing; choose a smaller model of the same family"
            )
        yield None
        loaded = yield from model_loader.load_steps(source, is_hurried=is_hurried)
        caches = make_caches(loaded.model)
        found = list(leaves(caches))
        if not found or not all(class_of(leaf).can_rewind(leaf) for leaf in found):
            kinds = ", ".join(dict.fromkeys(type(cache).__name__ for cache in caches))
            raise model_invalid(
                f"the draft model {source.model_id} has caches that cannot take guesses back ({kinds}); "
                "choose one with attention layers only"
            )
        facts = model_loader.describe(loaded, source, own, "")
        # Adding tokens shows how much each takes; windows count as they grow.
        step = step_token_count(caches)
        sizes = []
        for token_count in (1, step + 1):
            caches = make_caches(loaded.model)
            loaded.model(mx.zeros((1, token_count), dtype=mx.int32), cache=caches)
            mx.eval([cache.state for cache in caches])
            sizes.append(sum(int(cache.nbytes) for cache in caches))
            yield None
        footprint = DraftFootprint(
            weight_bytes=facts.weight_bytes, kv_bytes_per_token=max(1, (sizes[1] - sizes[0]) // step)
        )
        known = min(facts.vocabulary_size, info.vocabulary_size)
        passes = yield from examine_steps(loaded.model)
        return cls(loaded.model, facts=passes, vocabulary_size=known, footprint=footprint)

    def close(self) -> None:
        self._forward.close()

    def open(self) -> DraftedRow:
        """Make empty draft caches for a sequence, which will grow as long as its own."""
        return DraftedRow(Row(make_caches(self._model)))

    def read(self, parts: Sequence[tuple[DraftedRow, int]]) -> list[Any]:
        """Feed each row up to this many of the tokens that it is behind. Return the arrays to evaluate."""
        fed: list[int] = []
        shares: list[Share] = []
        for drafted, count in parts:
            tokens = drafted.behind[:count]
            if tokens:
                fed += tokens
                shares.append(Share(drafted.row, len(tokens)))
                del drafted.behind[:count]
        return self._forward.run(mx.array(fed, dtype=mx.uint32), shares).arrays if shares else []

    def propose(self, rows: Sequence[DraftedRow], *, count: int) -> tuple[mx.array | None, list[Any]]:
        """Guess the next tokens of sequences that are not behind, and let the others catch up.

        Returns [rows that are not behind, count], lazily, and what else must be evaluated.
        """
        late = [drafted for drafted in rows if drafted.is_behind]
        ready = [drafted for drafted in rows if not drafted.is_behind]
        arrays = self.read([(drafted, _CHUNK_TOKEN_COUNT) for drafted in late])
        return (self._guesses(ready, count) if ready and count else None), arrays

    def _guesses(self, rows: Sequence[DraftedRow], count: int) -> mx.array:
        fed = mx.array([token for drafted in rows for token in drafted.behind], dtype=mx.uint32)
        shares = [Share(drafted.row, len(drafted.behind), logit_count=1) for drafted in rows]
        undos: list[Undo] = []
        guesses: list[mx.array] = []
        for _ in range(count):
            output = self._forward.run(fed, shares)
            assert output.logits is not None
            if not undos:
                undos = [undo for drafted in rows for undo in mark(drafted.row.raw_caches)]
                shares = [Share(drafted.row, 1, logit_count=1) for drafted in rows]
            fed = mx.argmax(output.logits[:, : self._vocabulary_size], axis=-1)
            guesses.append(fed)
        # Windows cannot take back guesses that were fed one by one, so return to before the first guess.
        for undo in undos:
            undo()
        for drafted in rows:
            drafted.row.token_count -= count - 1
            drafted.behind.clear()
        return mx.stack(guesses, axis=1)


def _spells_alike(one: Tokenizer, other: Tokenizer) -> bool:
    """Compare the ends of a slow tokenizer's vocabulary, since it has no table to compare."""
    count = other.vocabulary_size
    return one.vocabulary_size == count and all(
        one.piece(token_id) == other.piece(token_id) for token_id in (*range(min(64, count)), count - 1)
    )
