"""The prompts of the live replay; `tests/system/load/test_agents_bench.py` sends some to a server."""

from __future__ import annotations

import dataclasses

from bench.agents.live import Prompts
from bench.agents.trace import StreamIndex
from tests.fixtures.agent_traces import request


def test_equal_blocks_are_equal_tokens_and_others_are_others() -> None:
    index = StreamIndex()
    first, longer, branch = (
        request(index, ids, session=0, time_s=0.0) for ids in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 9])
    )
    a, b, c = (Prompts(16).tokens_of(each) for each in (first, longer, branch))
    assert (len(a), len(b), len(c)) == (48, 64, 48)
    assert b[:48] == a and c[:32] == a[:32] and c[32:] != a[32:]
    assert a[:16] != a[16:32]
    assert Prompts(16).tokens_of(first) == a
    empty = dataclasses.replace(first, prompt=())
    assert len(Prompts(16).tokens_of(empty)) == 1
