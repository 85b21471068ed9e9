"""Plain runs of tiny models on a fixed grid, and restores of what they left behind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from icehouse_server.domain.blocks import Region, RegionKind
from icehouse_server.engine.kv_cache.cache_layout import CacheLayout, CacheRebuild
from icehouse_server.engine.kv_cache.regions import ArrayRegion, from_host, to_host
from icehouse_server.engine.prefix_cache.tiers.runner_port import PlacedBlock
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.models import VOCABULARY_SIZE, build

BLOCK: Final = 16
"""Tokens of a block here; prefill chunks are two blocks."""
CHUNK: Final = 2 * BLOCK

MakeCaches = Callable[[], list[Any]]


@functools.cache
def model_of(architecture: str, dtype: str = "float32", **overrides: Any) -> Any:
    """Return the tiny model, built once a session; models are never changed."""
    return build(architecture, dtype=dtype, **overrides)


def prompt(token_count: int, *, seed: int = 0) -> list[int]:
    """Return a varied prompt without special tokens, the same in every process."""
    return [
        (index * index * 7 + index * 31 + 13 * seed) % (VOCABULARY_SIZE - 10) + 10
        for index in range(token_count)
    ]


def feed(model: Any, caches: Sequence[Any], tokens: Sequence[int]) -> mx.array:
    """Run tokens through the model and return the last position's logits, evaluated."""
    logits: mx.array = model(mx.array([list(tokens)]), cache=caches)[0, -1]
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def greedy(model: Any, caches: Sequence[Any], first: int, count: int) -> tuple[list[int], list[mx.array]]:
    """Decode token by token; return the tokens and every step's logits."""
    tokens, steps = [], []
    token = first
    for _ in range(count):
        logits = feed(model, caches, [token])
        token = int(np.asarray(mx.argmax(logits)))
        tokens.append(token)
        steps.append(logits)
    return tokens, steps


class Recording:
    """A prefill on the grid that cuts every region as it passes, as the engine does."""

    def __init__(self, model: Any, tokens: Sequence[int], *, make_caches: MakeCaches | None = None) -> None:
        self.model = model
        self.tokens = list(tokens)
        self.make_caches = make_caches or (lambda: make_prompt_cache(model))
        self.layout = CacheLayout.of(self.make_caches(), block_token_count=BLOCK)
        self.caches = self.make_caches()
        self.windows: dict[tuple[int, int], ArrayRegion] = {}
        self.checkpoints: dict[int, ArrayRegion] = {}
        for start in range(0, len(self.tokens), CHUNK):
            self._chunk(start, min(start + CHUNK, len(self.tokens)))

    def _chunk(self, start: int, stop: int) -> None:
        feed(self.model, self.caches, self.tokens[start:stop])
        for low in range(start, stop, BLOCK):
            high = min(low + BLOCK, stop)
            self.windows[low, high] = self.layout.cut_tokens(
                RegionKind.WINDOW, self.caches, start=low, stop=high
            )
        if self.layout.facts.needs_checkpoint:
            self.checkpoints[stop] = self.layout.cut_checkpoint(self.caches)

    def blocks(self, *, stop: int, through_host: bool = False) -> tuple[PlacedBlock, ...]:
        """Return all blocks up to the first that ends at or after `stop`."""
        cross: Callable[[ArrayRegion], ArrayRegion] = (
            (lambda region: from_host(to_host(region))) if through_host else (lambda region: region)
        )
        found = []
        for (low, high), window in sorted(self.windows.items()):
            if low >= stop:
                break
            checkpoint = self.checkpoints.get(high)
            found.append(
                block_of(
                    low,
                    high - low,
                    kv=cross(self.layout.cut_tokens(RegionKind.KV, self.caches, start=low, stop=high)),
                    window=cross(window),
                    checkpoint=None if checkpoint is None else cross(checkpoint),
                )
            )
        return tuple(found)

    def restore(self, token_count: int, *, through_host: bool = False) -> list[Any]:
        """Restore the first `token_count` tokens into fresh caches."""
        blocks = self.blocks(stop=token_count, through_host=through_host)
        return rebuilt(self.layout, blocks, self.make_caches(), token_count=token_count)


def rebuilt(
    layout: CacheLayout, blocks: Sequence[PlacedBlock], caches: list[Any], *, token_count: int
) -> list[Any]:
    """Fill these fresh caches with `token_count` tokens of blocks, and return them evaluated."""
    rebuild = CacheRebuild(layout.parts, caches, blocks, token_count=token_count)
    while not rebuild.is_done:
        mx.eval(rebuild.next_part())
    return rebuild.caches


def block_of(start: int, token_count: int, **regions: Region | None) -> PlacedBlock:
    """Return a block with these regions, by the names of their kinds."""
    held = {RegionKind(kind): region for kind, region in regions.items() if region is not None}
    return PlacedBlock(start, token_count, held)


def uninterrupted(model: Any, tokens: Sequence[int], *, make_caches: MakeCaches | None = None) -> list[Any]:
    """Return caches after a cold prefill on the same grid."""
    caches = (make_caches or (lambda: make_prompt_cache(model)))()
    for start in range(0, len(tokens), CHUNK):
        feed(model, caches, tokens[start : start + CHUNK])
    return caches


def same_bits(left: mx.array, right: mx.array) -> bool:
    """Tell whether two arrays have equal dtype, shape and bytes (NaN equals itself)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(mx.array_equal(left.view(mx.uint8), right.view(mx.uint8)).item())


def same_regions(left: ArrayRegion, right: ArrayRegion) -> bool:
    """Tell whether two regions hold the same names and bits."""
    return [name for name, _ in left.arrays] == [name for name, _ in right.arrays] and all(
        same_bits(a, b) for (_, a), (_, b) in zip(left.arrays, right.arrays, strict=True)
    )
