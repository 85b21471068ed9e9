"""Page region: the KV of a block where it lies, in pages of the pool, and its way to host memory.

In files and in host memory each layer has its keys and its values by themselves, [1, heads, tokens, size], as
the region of any other model (`kv_cache.regions`). Inference thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv.pool import Page, numbers_of
from icehouse_server.engine.kv.table import PageGroup
from icehouse_server.engine.kv_cache.regions import ArrayRegion


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
