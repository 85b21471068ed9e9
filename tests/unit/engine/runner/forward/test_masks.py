"""Masks of rows: of a cache alone, and where an image's tokens see all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.engine.runner.forward.masks import made_masks
from icehouse_server.engine.runner.forward.row import Features
from mlx_lm.models.cache import KVCache, RotatingKVCache

HELD, COUNT = 6, 8


def whole(seen_from: int, start: int, end: int) -> Features:
    return Features(start, mx.zeros((end - start, 2)), seen_from)


def fed(cache: Any, count: int) -> Any:
    """Return a cache that holds so many tokens."""
    if count:
        cache.update_and_fetch(*[mx.zeros((1, 1, count, 2))] * 2)
    return cache


def mask_of(cache: Any, wholes: Sequence[Features], window: int = 0) -> Any:
    """Return the second row's mask; the first is one of text, whose mask is the cache's own."""
    asked = {"return_array": False, "window_size": window or None}
    found = made_masks([KVCache(), cache], [3, COUNT], wholes=((), wholes), **asked)
    assert found is not None and (window or found.masks[0] == "causal")
    return np.array(found.masks[1])


def expected(first: int, wholes: Sequence[tuple[int, int]], *, window: int = 99) -> Any:
    """Return the mask of tokens behind those that are held, which begin at `first`; images by their places in
    the sequence."""
    asking, seen = np.arange(HELD, HELD + COUNT)[:, None], np.arange(first, HELD + COUNT)[None]
    found = (seen <= asking) & (asking - seen < window)
    for begin, end in wholes:
        found |= (begin <= asking) & (asking < end) & (begin <= seen) & (seen < end)
    return found


@pytest.mark.parametrize("window", [0, 7])
def test_an_image_in_a_chunk_sees_itself_and_what_is_before_it(window: int) -> None:
    cache = fed(RotatingKVCache(max_size=window) if window else KVCache(), HELD)
    mask = mask_of(cache, (whole(1, 1, 4), whole(5, 5, 8)), window)
    assert np.array_equal(
        mask, expected(0, [(HELD + 1, HELD + 4), (HELD + 5, HELD + 8)], window=window or 99)
    )


@pytest.mark.parametrize("window", [0, 7])
def test_the_rest_of_an_image_sees_what_was_restored_of_it(window: int) -> None:
    cache = fed(RotatingKVCache(max_size=window) if window else KVCache(), HELD)
    mask = mask_of(cache, (whole(-4, 0, 3),), window)
    assert np.array_equal(mask, expected(0, [(HELD - 4, HELD + 3)], window=window or 99))


def test_what_a_cache_holds_no_more_is_not_overlooked() -> None:
    with pytest.raises(AssertionError, match="begins 7 tokens back"):
        mask_of(fed(KVCache(), HELD), (whole(-7, 0, 3),))


def test_one_token_needs_no_mask() -> None:
    asked = {"return_array": False, "window_size": None}
    assert made_masks([fed(KVCache(), HELD)], [1], wholes=((whole(-5, 0, 1),),), **asked) is None
