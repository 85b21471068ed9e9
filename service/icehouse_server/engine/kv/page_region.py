"""Page region: the KV of a block where it lies, in pages of the pool, and its ways to host memory and back.

In files and in host memory each layer has its keys and its values by themselves, [1, heads, tokens, size], as
the region of any other model (`kv_cache.regions`). Inference thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import mlx.core as mx

from icehouse_server.domain.blocks import HostRegion, HostTensor, RegionKind
from icehouse_server.engine.kv.pool import Page, numbers_of
from icehouse_server.engine.kv.table import PageGroup
from icehouse_server.engine.kv_cache.regions import ArrayRegion, array_of


@dataclasses.dataclass(frozen=True, slots=True)
class PageRegion:
    """Tokens of one block: they begin where the first page does, and may end inside the last one."""

    pages: tuple[Page, ...]
    token_count: int
    size_bytes: int
    """Of the pages."""
    kind: RegionKind = RegionKind.KV


def page_region(group: PageGroup, pages: Sequence[Page], *, token_count: int) -> PageRegion:
    """Return a region of these pages."""
    return PageRegion(tuple(pages), token_count, len(pages) * group.pool.shape.page_bytes)


def copied_out(group: PageGroup, region: PageRegion, names: Sequence[str]) -> ArrayRegion:
    """Return the region's arrays, lazily, by the names of the layers' keys and values in turn."""
    pool, shape = group.pool, group.pool.shape
    content = group.attention.read_pages(pool, numbers_of(region.pages))
    # [pages, layers, 2, heads, page tokens, size] -> [layers * 2, heads, tokens, size]
    by_layer = content.transpose(1, 2, 3, 0, 4, 5).reshape(
        shape.layer_count * 2, shape.kv_head_count, -1, shape.head_size
    )
    by_layer = by_layer[:, :, : region.token_count]
    arrays = [(name, by_layer[number : number + 1]) for number, name in enumerate(names)]
    return ArrayRegion.of(RegionKind.KV, arrays)


def put_in(group: PageGroup, region: HostRegion) -> PageRegion:
    """Copy a block's KV from host memory into pages, bit for bit, lazily.

    Raises ValueError when its tensors are not those of this pool.
    """
    pool, shape = group.pool, group.pool.shape
    _check(shape.layer_count, region.tensors)
    arrays = [array_of(tensor) for tensor in region.tensors]
    token_count = arrays[0].shape[2]
    like = (1, shape.kv_head_count, token_count, shape.head_size)
    if any(array.shape != like or array.dtype != shape.dtype for array in arrays):
        raise ValueError(f"A block's keys and values are not all {list(like)} of {shape.dtype}")
    pages = pool.take(pool.pages_for(token_count))
    room = len(pages) * shape.page_token_count - token_count
    whole = mx.pad(mx.concatenate(arrays), [(0, 0), (0, 0), (0, room), (0, 0)])
    content = whole.reshape(
        shape.layer_count, 2, shape.kv_head_count, len(pages), shape.page_token_count, shape.head_size
    ).transpose(3, 0, 1, 2, 4, 5)
    group.attention.fill_pages(pool, mx.contiguous(content), numbers_of(pages))
    return page_region(group, pages, token_count=token_count)


def _check(layer_count: int, tensors: Sequence[HostTensor]) -> None:
    if len(tensors) != 2 * layer_count or len(tensors[0].shape) != 4:
        raise ValueError(f"A block has {len(tensors)} tensors of kv, this model {2 * layer_count}")
