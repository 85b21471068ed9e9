"""Rows that read their first tokens where the prefix cache keeps them have the tokens they have alone, in
whatever company, and nobody writes to what they read."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.engine.kv_cache.borrowing import BorrowingCache
from icehouse_server.engine.kv_cache.layout import CacheLayout
from icehouse_server.engine.kv_cache.regions import ArrayRegion
from icehouse_server.engine.kv_cache.restore import RestoreBlock, RestoreSource
from icehouse_server.engine.runner.forward import ForwardPass, Row, examine, plain_places
from icehouse_server.engine.runner.forward.cpu.attention import reads_segments
from mlx_lm.models.cache import make_prompt_cache

from tests.fixtures.models import ARCHITECTURES, build
from tests.unit.engine.runner.forward.company import Company, Guest, alone, prompt_of

BLOCK = 16
SHARED_COUNT = 2 * BLOCK
OWN_COUNTS = (1, 9, 70, 2, 30)
"""Longer than what attention reads in segments, and shorter."""
DRAW_COUNT = 10
TOLERANCE = 2e-3


class Lender:
    """Keeps the blocks of one beginning, and lends them to any number of rows."""

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self._make = lambda: make_prompt_cache(model)
        self._layout = CacheLayout.of(self._make(), block_token_count=BLOCK)
        caches, blocks = self._make(), []
        for start in range(0, len(tokens), BLOCK):
            stop = start + BLOCK
            mx.eval(model(mx.array([tokens[start:stop]]), cache=caches), [cache.state for cache in caches])
            blocks.append(
                RestoreBlock(
                    start,
                    BLOCK,
                    kv=self._layout.cut_kv(caches, start=start, stop=stop),
                    window=self._layout.cut_window(caches, start=start, stop=stop),
                    checkpoint=self._layout.cut_checkpoint(caches) if self._layout.needs_checkpoint else None,
                )
            )
        regions = [region for block in blocks for region in (block.kv, block.window)]
        mx.eval([region.buffers for region in regions if isinstance(region, ArrayRegion)])
        self._blocks = tuple(blocks)

    def row(self, places: list[int]) -> Row:
        restoring = self._layout.begin_restore(
            RestoreSource(self._blocks),
            token_count=SHARED_COUNT,
            capacity_token_count=SHARED_COUNT,
            make_caches=self._make,
            lent_places=places,
        )
        while restoring.step():
            pass
        return Row(restoring.caches, token_count=SHARED_COUNT)

    def bits(self) -> list[bytes]:
        """Return what is lent, as it is now."""
        regions = [block.kv for block in self._blocks if isinstance(block.kv, ArrayRegion)]
        return [bytes(np.asarray(array)) for region in regions for _, array in region.arrays]


def lending(architecture: str) -> tuple[Any, Any, list[int]]:
    model = build(architecture)
    facts = examine(model)
    return model, facts, plain_places(facts.caches, make_prompt_cache(model)) if facts.caches else []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("guesses", [False, True], ids=["plain", "guesses"])
def test_tokens_are_those_of_the_row_alone(architecture: str, guesses: bool) -> None:
    model, facts, places = lending(architecture)
    if not places:
        pytest.skip("no layer of it is plain attention: nothing is lent")
    shared = prompt_of(SHARED_COUNT, 77)
    lender = Lender(model, shared)
    before = lender.bits()
    guests = []
    for seed, own_count in enumerate(OWN_COUNTS):
        prompt = [*shared, *prompt_of(own_count, seed)]
        tokens, logits = alone(model, prompt, DRAW_COUNT)
        # One of them reads nothing of the others'.
        row = Row(make_prompt_cache(model)) if seed == 1 else lender.row(places)
        guests.append(Guest(prompt, tokens, logits, row, prompt if seed == 1 else prompt[SHARED_COUNT:]))
    lent_rows = [guest.row for guest in guests if guest.row.token_count]
    company = Company(ForwardPass(model, facts), seed=3, guesses=guesses)
    company.run(guests)
    assert [guest.drawn for guest in guests] == [guest.want for guest in guests]
    assert max(guest.farthest for guest in guests) < TOLERANCE
    assert company.widest >= 3, "The rows never met"
    caches = [row.raw_caches[place] for row in lent_rows for place in places]
    assert all(isinstance(cache, BorrowingCache) for cache in caches)
    if reads_segments(mx.float32) and architecture not in {"gpt_oss"}:
        assert all(cache.lent_token_count == SHARED_COUNT for cache in caches), "what was lent was copied"
    assert lender.bits() == before
