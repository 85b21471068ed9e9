"""Batches of caches: sequences' caches merged into rows of one, extended, taken apart and tuned.

Only the decode batch needs this. Inference thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm.generate import _merge_caches

from icehouse_server.engine.kv_cache.cache_classes import Cache, batch_form_of, class_of, leaves


def can_batch(caches: Sequence[Cache]) -> bool:
    """Tell whether these classes can join a batch and leave it (merge, extend, filter, extract).

    CacheList defines all four but delegates to its parts, so the parts are asked.
    """
    return all(class_of(leaf).batch_form is not None for leaf in leaves(caches))


def merge_caches(sequences: Sequence[Sequence[Cache]]) -> list[Cache]:
    """Return batch caches, one a layer, with one row for each sequence's caches, left-padded."""
    return list(_merge_caches([list(s) for s in sequences]))  # type: ignore[no-untyped-call]


def extend_caches(batch: list[Cache], other: list[Cache]) -> list[Cache]:
    """Return `batch` with the rows of `other` appended; both are used up."""
    if not batch or not other:
        return batch or other
    for mine, theirs in zip(leaves(batch), leaves(other), strict=True):
        batch_form_of(mine).extend(mine, theirs)
    return batch


def extract_caches(batch: Sequence[Cache], row: int) -> list[Cache]:
    """Return one row of batch caches as caches of its own; the batch stays as it is."""
    return [cache.extract(row) for cache in batch]


def tune_growth(caches: Sequence[Cache]) -> None:
    """Let batch caches grow by about a quarter of their length, instead of 256 tokens a row.

    Every join and every leaving row copies what is allocated, used or not, so rows with short
    contexts would pay for eight times what they hold. Relies on `step`, which the batch classes
    read when they grow.
    """
    for leaf in leaves(caches):
        batch_form_of(leaf).tune_growth(leaf)
