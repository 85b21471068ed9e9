"""Places of a pass's tokens in the pages of their rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from icehouse_server.engine.attention.port import Ints, TokenPlaces
from icehouse_server.engine.kv.table import PageRun


def places_of(runs: Sequence[PageRun], begins: Sequence[int], counts: Sequence[int]) -> TokenPlaces:
    """Return where the tokens lie that a pass brings: `counts` of each row, from position `begins` on."""
    pool = runs[0].group.pool
    numbers = [
        run.numbers[: pool.pages_for(begin + count)]
        for run, begin, count in zip(runs, begins, counts, strict=True)
    ]
    starts = np.array(list(itertools.accumulate(map(len, numbers[:-1]), initial=0)), np.int32)
    pages = np.array(list(itertools.chain.from_iterable(numbers)), np.int32)
    rows = np.repeat(np.arange(len(runs), dtype=np.int32), counts)
    if len(rows) == len(runs):
        positions: Ints = np.array(begins, np.int32)
    else:
        spans = [np.arange(b, b + count, dtype=np.int32) for b, count in zip(begins, counts, strict=True)]
        positions = np.concatenate(spans)
    return TokenPlaces(pages, starts, rows, positions)


def places_of_one(run: PageRun, *, start: int, stop: int) -> TokenPlaces:
    """Return where tokens [start, stop) of one row lie."""
    return places_of([run], [start], [stop - start])
