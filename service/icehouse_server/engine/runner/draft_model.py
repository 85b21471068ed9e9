"""Draft model: draft tokens from a small model of the same vocabulary (inference thread).

Speculative decoding (Leviathan 2022; Chen 2023) with the draft model's likeliest tokens. A sequence's draft
caches are behind it at first: they catch up by one bounded chunk a step, beside its plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from icehouse_server.domain.model import ModelInfo
from icehouse_server.engine.core.memory_model import DraftFootprint
from icehouse_server.engine.kv_cache import cache_classes, rewind
from icehouse_server.engine.runner import model_loader
from icehouse_server.errors import ModelError, Reason
from icehouse_server.text.tokenizer import Tokenizer

_CHUNK_TOKEN_COUNT = 128
"""Tokens that a step may add to the draft caches; while more are missing nothing is guessed."""


class DraftModel:
    """The loaded draft model, which guesses for every sequence that asks."""

    def __init__(self, model: Any, *, vocabulary_size: int, footprint: DraftFootprint) -> None:
        self._model = model
        self._vocabulary_size = vocabulary_size
        self.footprint = footprint

    @classmethod
    def load(cls, source: model_loader.ModelSource, *, info: ModelInfo, tokenizer: Tokenizer) -> DraftModel:
        """Load what guesses for the model of `info`.

        Raises ModelError when the folder cannot be served, spells other tokens, or has caches from which
        guesses cannot be taken back.
        """
        own = model_loader.load_tokenizer(source)
        if own.vocabulary_json() != tokenizer.vocabulary_json() or not _spells_alike(own, tokenizer):
            raise ModelError(
                Reason.MODEL_INVALID,
                f"the draft model {source.model_id} has another vocabulary than {info.model_id}, so its "
                "guesses mean nothing there; choose a smaller model of the same family",
            )
        loaded = model_loader.load(source)
        caches = cache_classes.make_caches(loaded.model)
        if not rewind.can_rewind(caches):
            kinds = ", ".join(dict.fromkeys(type(cache).__name__ for cache in caches))
            raise ModelError(
                Reason.MODEL_INVALID,
                f"the draft model {source.model_id} has caches that cannot take guesses back ({kinds}); "
                "choose one with attention layers only",
            )
        facts = model_loader.describe(loaded, source, own, "")
        # One token more shows what a token takes; windows are counted as they grow.
        step = cache_classes.step_token_count(caches)
        sizes = []
        for token_count in (1, step + 1):
            caches = cache_classes.make_caches(loaded.model)
            loaded.model(mx.zeros((1, token_count), dtype=mx.int32), cache=caches)
            mx.eval(cache_classes.cache_states(caches))
            sizes.append(sum(int(cache.nbytes) for cache in caches))
        footprint = DraftFootprint(
            weight_bytes=facts.weight_bytes,
            kv_bytes_per_token=max(1, (sizes[1] - sizes[0]) // step),
        )
        known = min(facts.vocabulary_size, info.vocabulary_size)
        return cls(loaded.model, vocabulary_size=known, footprint=footprint)

    def open(self, token_ids: Sequence[int]) -> ModelDrafter:
        """Return a drafter for a sequence that has these tokens, prompt and output."""
        return ModelDrafter(self._model, token_ids, vocabulary_size=self._vocabulary_size)


class ModelDrafter:
    """One sequence's draft caches. They hold every token but those that are `behind`."""

    def __init__(self, model: Any, token_ids: Sequence[int], *, vocabulary_size: int) -> None:
        self._model = model
        self._vocabulary_size = vocabulary_size
        self._behind = list(token_ids)
        self._caches = cache_classes.make_caches(model)

    def propose(self, count: int) -> mx.array:
        """Return `count` guesses, not evaluated: (count,) int32; none while the caches catch up."""
        if len(self._behind) > _CHUNK_TOKEN_COUNT:
            chunk, self._behind = self._behind[:_CHUNK_TOKEN_COUNT], self._behind[_CHUNK_TOKEN_COUNT:]
            self._model(mx.array(chunk)[None], cache=self._caches)
            mx.async_eval(cache_classes.cache_states(self._caches))  # type: ignore[no-untyped-call]
            return mx.array([], dtype=mx.int32)
        guesses: list[mx.array] = []
        fed = mx.array(self._behind)[None]
        self._behind = []
        kept: list[cache_classes.Undo] = []
        for _ in range(count):
            logits = self._model(fed, cache=self._caches)[:, -1, : self._vocabulary_size]
            kept = kept or rewind.mark(self._caches)
            fed = mx.argmax(logits, axis=-1, keepdims=True).astype(mx.int32)
            guesses.append(fed[0])
        # Guesses were fed one by one, which windows cannot take back: return to before the first of them.
        rewind.return_to(kept)
        return mx.concatenate(guesses)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add what was generated."""
        self._behind.extend(token_ids)


def _spells_alike(one: Tokenizer, other: Tokenizer) -> bool:
    """Compare the ends of a slow tokenizer's vocabulary, which has no table to compare."""
    count = other.vocabulary_size
    return one.vocabulary_size == count and all(
        one.piece(token_id) == other.piece(token_id) for token_id in (*range(min(64, count)), count - 1)
    )
