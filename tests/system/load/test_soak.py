"""256 streams for ten minutes: memory and open files stay flat (`make test-slow`).

SOAK_S shortens or lengthens it, in seconds. The server refuses variables of the ICEHOUSE_ family that it
does not know, so this is none of them.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from bench.soak import SERVER_FLAGS, Sample, soak, trend_of
from tests.fixtures.models import tiny_model_dir
from tests.system.crash.crashing_server import ServerProcess

_STREAM_COUNT = 256
_DURATION_S = float(os.environ.get("SOAK_S", "600"))


def samples(*, rss_bytes: list[int], descriptor_counts: list[int]) -> list[Sample]:
    pairs = zip(rss_bytes, descriptor_counts, strict=True)
    return [Sample(float(i), rss, count, i) for i, (rss, count) in enumerate(pairs)]


def test_growth_is_told_from_warming_up() -> None:
    steady = samples(rss_bytes=[10, 50, 70, 90, 101, 99, 100, 102], descriptor_counts=[9] * 8)
    leaking = samples(rss_bytes=[10, 50, 100, 110, 120, 130, 140, 150], descriptor_counts=[9] * 8)
    crowded = samples(rss_bytes=[10, 50, 70, 90, 101, 99, 100, 150], descriptor_counts=[9] * 8)
    holding = samples(rss_bytes=[100] * 8, descriptor_counts=[9, 9, 9, 9, 20, 30, 40, 50])
    assert trend_of(steady).is_flat
    assert trend_of(crowded).is_flat, "what requests hold for a while is no leak"
    assert not trend_of(leaking).is_flat
    assert not trend_of(holding).is_flat


@pytest.mark.slow
@pytest.mark.timeout(_DURATION_S + 300)
def test_memory_and_open_files_stay_flat(tmp_path: Path) -> None:
    options = tuple(word for flag in SERVER_FLAGS for word in flag)
    log = tmp_path / "log"
    model = tiny_model_dir(tmp_path, "llama")
    with ServerProcess(model=model, directory=tmp_path / "blocks", log=log, options=options) as server:
        server.wait_until_serving()
        found = asyncio.run(
            soak(server.address, server.pid, stream_count=_STREAM_COUNT, duration_s=_DURATION_S)
        )
        trend = trend_of(found)
        server.terminate()
        assert server.wait() == 0
    assert trend.finished_count > _STREAM_COUNT
    assert trend.is_flat, (trend, [sample.rss_bytes >> 20 for sample in found[::6]])
