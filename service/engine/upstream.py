"""Everything taken from mlx-lm's non-public corners, in one place, with a contract test.

mlx-lm >= 0.32, < 0.33. Each function here says what it relies on; `tests/engine/test_upstream.py`
fails when that moves.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.generate import _extend_cache, _merge_caches
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper, _infer_tool_parser
from mlx_lm.utils import (
    _tokenizer_defaults,
    load_adapters,
    load_model,
    load_tokenizer,
    maybe_set_recommended_wired_limit,
)
from transformers import AutoTokenizer

_BODIES = ("model", "transformer", "backbone")
_MIN_GROWTH = 32
_MAX_GROWTH = 256

Cache = Any
"""One layer's cache: KVCache, RotatingKVCache, ArraysCache, CacheList, ... or its batch form."""

CACHE_STEP_TOKEN_COUNT: int = KVCache.step
"""Tokens by which the caches of attention layers grow, whole layers being copied each time."""


def make_caches(model: Any) -> list[Cache]:
    """Return empty caches, one a layer, of the classes the model asks for."""
    return list(make_prompt_cache(model))


def quantize_caches(caches: Sequence[Cache], *, bits: int, group_size: int) -> list[Cache]:
    """Return fresh caches with every KVCache replaced by a quantized one, inside CacheLists too."""
    chosen: list[Cache] = []
    for cache in caches:
        if type(cache) is KVCache:
            chosen.append(QuantizedKVCache(group_size=group_size, bits=bits))
        elif type(cache) is CacheList:
            parts = quantize_caches(cache.caches, bits=bits, group_size=group_size)
            chosen.append(CacheList(*parts))  # type: ignore[no-untyped-call]
        else:
            chosen.append(cache)
    return chosen


def can_batch(caches: Sequence[Cache]) -> bool:
    """Tell whether these classes can join a batch and leave it (merge, extend, filter, extract).

    CacheList defines all four but delegates to its parts, so the parts are asked.
    """
    for cache in caches:
        parts = getattr(cache, "caches", None)
        if parts is not None:
            if not can_batch(parts):
                return False
        elif not hasattr(cache, "merge"):
            return False
    return True


def can_rewind(caches: Sequence[Cache]) -> bool:
    """Tell whether tokens that were fed together can be taken back out of these caches."""
    parts = [part for cache in caches for part in (cache.caches if type(cache) is CacheList else (cache,))]
    return bool(parts) and all(
        type(part) in (KVCache, QuantizedKVCache) or (type(part) is RotatingKVCache and part.keep == 0)
        for part in parts
    )


def rewind(caches: Sequence[Cache], count: int) -> None:
    """Take the last `count` tokens back, fewer than were fed in the last pass; `can_rewind` said so.

    Relies on `trim` moving only `offset`, and on a RotatingKVCache that was fed several tokens at once
    holding them in order, after a full window of those before: nothing was overwritten yet.
    """
    if not count:
        return
    for cache in caches:
        if type(cache) is CacheList:
            rewind(cache.caches, count)
        elif type(cache) is RotatingKVCache:
            keys, values = cache.keys_and_values()  # type: ignore[no-untyped-call]
            cache.keys, cache.values = keys[..., :-count, :], values[..., :-count, :]
            cache.offset -= count
            cache._idx -= count
        else:
            taken = cache.trim(count)
            assert taken == count, f"{type(cache).__name__} took back {taken} of {count} tokens"


class CacheMark(NamedTuple):
    """Where one cache stood: its arrays, which later updates leave alone, and its numbers."""

    cache: Cache
    arrays: tuple[Any, Any] | None
    offset: int
    place: int


def mark(caches: Sequence[Cache]) -> list[CacheMark]:
    """Remember where caches that `can_rewind` stand. Windows are kept as they are; KV is only cut back."""
    marks: list[CacheMark] = []
    for cache in caches:
        if type(cache) is CacheList:
            marks += mark(cache.caches)
        elif type(cache) is RotatingKVCache:
            # New array objects: an update writes into the ones that the cache has.
            window: Any = cache
            arrays = (window.keys[...], window.values[...])
            marks.append(CacheMark(cache, arrays, cache.offset, cache._idx))
        else:
            marks.append(CacheMark(cache, None, cache.offset, 0))
    return marks


def return_to(marks: Sequence[CacheMark]) -> None:
    """Undo every update since the marks were made."""
    for cache, arrays, offset, place in marks:
        if arrays is None:
            cache.trim(cache.offset - offset)
        else:
            cache.keys, cache.values = arrays
            cache.offset, cache._idx = offset, place


def merge_caches(sequences: Sequence[Sequence[Cache]]) -> list[Cache]:
    """Return batch caches, one a layer, with one row for each sequence's caches, left-padded."""
    return list(_merge_caches([list(s) for s in sequences]))  # type: ignore[no-untyped-call]


def extend_caches(batch: list[Cache], other: list[Cache]) -> list[Cache]:
    """Return `batch` with the rows of `other` appended; both are used up.

    Where the rows of `other` are longer, upstream pads all of `batch`, joins, and grows it again with the
    next token: 59 ms for 8 rows of 300 tokens where one copy takes 16 (6 layers, 2-core x86, mlx 0.32.4).
    """
    if not batch or not other:
        return batch or other
    return [_extended(mine, theirs) for mine, theirs in zip(batch, other, strict=True)]


def _extended(mine: Cache, theirs: Cache) -> Cache:
    if type(mine) is CacheList:
        pairs = zip(mine.caches, theirs.caches, strict=True)
        return CacheList(*(_extended(a, b) for a, b in pairs))  # type: ignore[no-untyped-call]
    is_plain = type(mine) is BatchKVCache
    if not is_plain or mine.keys is None or theirs._idx <= mine._idx:
        return _extend_cache([mine], [theirs])[0]  # type: ignore[no-untyped-call]
    mine.keys = _stacked(mine.keys[..., : mine._idx, :], theirs.keys[..., : theirs._idx, :])
    mine.values = _stacked(mine.values[..., : mine._idx, :], theirs.values[..., : theirs._idx, :])
    added = theirs._idx - mine._idx
    mine.left_padding = mx.concatenate([mine.left_padding + added, theirs.left_padding])
    mine.offset = mx.concatenate([mine.offset, theirs.offset])
    mine._idx = theirs._idx
    return mine


def _stacked(short: mx.array, long: mx.array) -> mx.array:
    """Return the rows of both, the short ones left-padded, with room for the tokens to come."""
    rows, heads, short_count, size = short.shape
    count = long.shape[2]
    whole = mx.zeros((rows + long.shape[0], heads, count + growth_of(count), size), long.dtype)
    whole[:rows, :, count - short_count : count] = short
    whole[rows:, :, :count] = long
    return whole


def extract_caches(batch: Sequence[Cache], row: int) -> list[Cache]:
    """Return one row of batch caches as caches of its own; the batch stays as it is."""
    return [cache.extract(row) for cache in batch]


def growth_of(token_count: int) -> int:
    """Return by how many tokens a row of this length grows: about a quarter, within bounds."""
    return min(_MAX_GROWTH, max(_MIN_GROWTH, token_count // 4 // _MIN_GROWTH * _MIN_GROWTH))


def tune_growth(caches: Sequence[Cache]) -> None:
    """Let batch caches grow by about a quarter of their length, instead of 256 tokens a row.

    Every join and every leaving row copies what is allocated, used or not, so rows with short
    contexts would pay for eight times what they hold. Relies on `step`, which the batch classes
    read when they grow.
    """
    for cache in caches:
        if type(cache) is CacheList:
            tune_growth(cache.caches)
        elif type(cache) in (BatchKVCache, BatchRotatingKVCache):
            cache.step = growth_of(int(cache._idx))


def cache_states(caches: Sequence[Cache]) -> list[Any]:
    """Return the arrays that hold the caches' contents, for one eval."""
    return [cache.state for cache in caches]


def hidden_states(model: Any, token_ids: mx.array, caches: Sequence[Cache]) -> mx.array:
    """Return what the model's head would read, [rows, tokens, width], filling the caches.

    mlx-lm's models are a body that is called with tokens and caches, and a head behind it. The body's
    attribute is one of a few; a model made of several (text and vision) has its own inside. Raises
    LookupError or TypeError where a model is not built so.
    """
    whole = getattr(model, "language_model", model)
    body = next((found for name in _BODIES if (found := getattr(whole, name, None)) is not None), None)
    if body is None:
        raise LookupError(f"{type(whole).__name__} has no {', '.join(_BODIES)}")
    hidden = body(token_ids, list(caches))
    if not isinstance(hidden, mx.array) or hidden.ndim != 3:
        raise TypeError(f"{type(body).__name__} gives no hidden states")
    return hidden


def read_model(path: Path, *, lazy: bool, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """Load weights and config of an MLX model folder. Raises what mlx-lm raises."""
    model, config = load_model(path, lazy=lazy, trust_remote_code=trust_remote_code)
    return model, dict(config)


def read_adapter(model: Any, path: str) -> Any:
    """Apply a LoRA adapter folder to a loaded model."""
    return load_adapters(model, path)


def adapter_tensor_names(path: Path) -> set[str]:
    """Return the names of an adapter's tensors, which `read_adapter` lets be fewer than its layers need."""
    return set(cast("dict[str, mx.array]", mx.load(str(path / "adapters.safetensors"))))


def read_tokenizer(path: Path, *, eos_token_ids: Any, trust_remote_code: bool) -> Any:
    """Load mlx-lm's TokenizerWrapper from a model folder.

    mlx-lm's own loader also makes a streaming detokenizer out of the whole vocabulary. It is not used
    here, and was a third of the CPU time for a vocabulary of 262,144 tokens (2.9 s against 1.9 s on an
    x86 core, mlx-lm 0.32.2). That loader is called only where the chat template is a Python module of
    mlx-lm.
    """
    # Said in either case: where nothing is said, transformers asks on the terminal, and a yes runs the code.
    extra: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    inner = AutoTokenizer.from_pretrained(path, **extra)
    if inner.init_kwargs.get("chat_template_type") or _tokenizer_defaults(path):
        return load_tokenizer(path, extra, eos_token_ids=eos_token_ids)  # type: ignore[no-untyped-call]
    ids = [eos_token_ids] if isinstance(eos_token_ids, int) else eos_token_ids
    name = inner.init_kwargs.get("tool_parser_type") or _infer_tool_parser(inner)  # type: ignore[no-untyped-call]
    if name is None:
        return TokenizerWrapper(inner, eos_token_ids=ids)
    inner.init_kwargs["tool_parser_type"] = name
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return TokenizerWrapper(
        inner,
        eos_token_ids=ids,
        tool_call_start=parser.tool_call_start,
        tool_call_end=parser.tool_call_end,
        tool_parser=parser.parse_tool_call,
    )


def wire_memory() -> None:
    """Let Metal keep the model's pages resident; does nothing on other devices."""
    maybe_set_recommended_wired_limit()
