"""Masks of the rows of a pass: each row's own cache answers what the model's body asked for all rows.

A model makes its mask from one layer's cache and passes it to every layer of that kind. So the masks of all
rows are made when the body asks, before any cache is updated, and go through the model as one object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask

from icehouse_server.engine.runner.forward.row import Features

Mask = Any
"""None, "causal", or an array: what `scaled_dot_product_attention` takes."""


class RowMasks:
    """One mask for each row, instead of one for all."""

    __slots__ = ("masks",)

    def __init__(self, masks: Sequence[Mask]) -> None:
        self.masks = masks


def made_masks(
    caches: Sequence[Any], counts: Sequence[int], *, wholes: Sequence[Sequence[Features]] = (), **options: Any
) -> RowMasks | None:
    """Return the rows' answers to `make_mask(count, **options)`; None if no row needs a mask."""
    masks = [_mask(cache, count, options) for cache, count in zip(caches, counts, strict=True)]
    for number, row in enumerate(wholes):
        if row and counts[number] > 1:
            mask = _mask(caches[number], counts[number], {**options, "return_array": True})
            masks[number] = _widened(mask, counts[number], row)
    return RowMasks(masks) if any(mask is not None for mask in masks) else None


def _widened(mask: mx.array, count: int, wholes: Sequence[Features]) -> mx.array:
    """Let tokens also see their whole image in a mask, [tokens, keys], whose last keys are these tokens'."""
    first = mask.shape[-1] - count
    for whole in wholes:
        assert whole.seen_from is not None, "Only images that are seen whole widen a mask"
        begin = first + whole.seen_from
        assert begin >= 0, f"the image begins {-whole.seen_from} tokens back, the cache holds {first}"
        mask[..., whole.start : whole.end, begin : first + whole.end] = True
    return mask


def _mask(cache: Any, count: int, options: dict[str, Any]) -> Mask:
    make = getattr(cache, "make_mask", None)
    return make(count, **options) if make is not None else _plain_mask(cache, count, **options)


def default_masks(caches: Sequence[Any], counts: Sequence[int], *, as_array: bool) -> list[Mask]:
    """Return masks of rows for which the model, which sees only one token at a time, made none."""
    return [
        _plain_mask(cache, count, return_array=as_array and count > 1)
        if hasattr(cache, "update_and_fetch")
        else None
        for cache, count in zip(caches, counts, strict=True)
    ]


def _plain_mask(cache: Any, count: int, **options: Any) -> Mask:
    return create_attention_mask(mx.zeros((1, count, 1)), cache, **options)


def chunked_masks(caches: Sequence[Any], counts: Sequence[int]) -> list[Mask]:
    """Return masks for chunked caches: a token sees earlier tokens in its own chunk of the context."""
    return [_chunked_mask(cache, count) for cache, count in zip(caches, counts, strict=True)]


def _chunked_mask(cache: Any, count: int) -> Mask:
    size, first, begin = cache.chunk_size, cache.start_position, cache.offset
    end = begin + count
    if first // size == (end - 1) // size:
        return "causal" if count > 1 else None
    seen = mx.arange(first, end)
    asking = mx.arange(begin, end)[:, None]
    return (seen // size == asking // size) & (seen <= asking)
