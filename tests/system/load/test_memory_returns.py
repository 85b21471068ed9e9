"""128 requests of mixed lengths, many of them cancelled: memory ends where it began."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from icehouse_server.domain.cache_commands import EvictBlocks, KnownBlocks, ListKnown
from icehouse_server.domain.events import Failed
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.request import Speculation
from icehouse_server.domain.sampling import SamplingParams

from tests.fixtures.models import tiny_model_dir
from tests.system.cache.server import BLOCK, CacheServer
from tests.system.cache.test_reuse import prompt

_REQUEST_COUNT = 128
_QUICK, _SLOW = ("llama", True), pytest.mark.slow
"""Ten seconds; the others are left to `make test-slow`."""
_TOGETHER = 32
"""Requests that are sent before the first of them are waited for."""
_SLACK_BYTES = 512 << 10
"""What a pass that nobody waited for may still hold; the requests' KV is a hundred times that together."""


def _wave(served: CacheServer, seed: int) -> tuple[int, int]:
    """Send all requests, cancel some where chance says; return how many finished and how many failed."""
    chance = random.Random(seed)
    ended: list[bool] = []
    for first in range(0, _REQUEST_COUNT, _TOGETHER):
        names = [f"{seed}.{number}" for number in range(first, first + _TOGETHER)]
        leaving: list[str] = []
        for name in names:
            if chance.random() < 0.4:
                leaving.append(name)
                if chance.random() < 0.5:
                    watch = chance.choice(
                        [served.recorder.on_first_progress, served.recorder.on_last_progress]
                    )
                    watch(name, _cancels(served, name))
                    leaving.pop()
            served.submit(
                name,
                prompt(chance.choice([3, 20, 90, 400]) + chance.randrange(30), salt=chance.randrange(6)),
                max_output_tokens=chance.choice([1, 5, 40, 90]),
                sampling=SamplingParams(temperature=chance.choice([0.0, 0.8]), seed=first, top_p=0.95),
                speculation=Speculation(4, ngram_token_limit=2) if chance.random() < 0.25 else None,
            )
        for name in leaving:
            served.engine.cancel(RequestId(name))
        ended += [isinstance(served.recorder.wait_for_end(name), Failed) for name in names]
    return ended.count(False), ended.count(True)


def _cancels(served: CacheServer, name: str) -> Callable[[], None]:
    return lambda: served.engine.cancel(RequestId(name))


def _active_bytes(served: CacheServer) -> int:
    """Return what MLX holds once both tiers are empty and nothing runs."""
    known = served.order(ListKnown(None))
    assert isinstance(known, KnownBlocks)
    served.order(EvictBlocks(known.block_hashes))
    gc.collect()
    engine, cache = served.stats()
    assert (engine.decoding_count, engine.prefilling_count, engine.waiting_count) == (0, 0, 0)
    assert cache.ram.size_bytes == 0
    return engine.active_memory_bytes


@pytest.mark.parametrize(
    ("architecture", "is_pipelined"),
    [
        pytest.param(
            architecture, is_pipelined, marks=[] if (architecture, is_pipelined) == _QUICK else _SLOW
        )
        for architecture in ("llama", "gemma3_text", "lfm2")
        for is_pipelined in (False, True)
    ],
)
def test_memory_ends_where_it_began(tmp_path: Path, architecture: str, is_pipelined: bool) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    with CacheServer(folder, tmp_path / "blocks", is_pipelined=is_pipelined, chunk=4 * BLOCK) as served:
        served.ask("first", prompt(3 * BLOCK), max_output_tokens=3)
        began_bytes = _active_bytes(served)
        for seed in (1, 2):
            finished_count, failed_count = _wave(served, seed)
            assert finished_count >= 40 and failed_count >= 20, (finished_count, failed_count)
            assert _active_bytes(served) - began_bytes <= _SLACK_BYTES, seed
