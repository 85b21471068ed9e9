"""The drive of several models, a minute of it (`make test-slow`), and what the bench makes of its times.

DRIVE_S shortens or lengthens it, in seconds.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from bench.models.beside import GapTimes, beside_verdicts
from bench.models.drive import CALLER_COUNT, Tally, drive
from bench.models.one import Rates, one_verdicts
from bench.models.served import logged_times
from bench.models.swap import SwapTimes, swap_verdicts

_DURATION_S = float(os.environ.get("DRIVE_S", "60"))


def test_a_swap_may_take_a_part_of_cold_prefill_beside_reading_the_weights() -> None:
    good = SwapTimes("a", read_s=2.0, absent_s=3.0, cold_s=10.0)
    bad = SwapTimes("b", read_s=2.0, absent_s=5.0, cold_s=10.0)
    assert [v.is_met for v in (*swap_verdicts([good]), *swap_verdicts([bad]))] == [True, False]


def test_gaps_are_judged_by_the_round_that_they_are_of() -> None:
    fast = [GapTimes(count, (0.1,) * 9, (0.19,) * 9, 3) for count in (1, 8)]
    slow = [GapTimes(count, (0.1,) * 9, (0.21,) * 9, 3) for count in (1, 8)]
    assert [v.is_met for v in beside_verdicts(fast)] == [True, True]
    assert [v.is_met for v in beside_verdicts(slow)] == [False, False]


def test_a_pool_of_one_is_judged_by_the_rate_beside_it() -> None:
    one = Rates(1, plain=100.0, pool=99.0, plain_per_cpu_s=50.0, pool_per_cpu_s=48.0)
    many = Rates(16, plain=500.0, pool=480.0, plain_per_cpu_s=250.0, pool_per_cpu_s=249.0)
    assert [v.is_met for v in one_verdicts([one, many])] == [True, False, False, True]


def test_times_are_read_from_where_the_log_had_got_to(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = '{"time": "2026-01-02T03:04:05.500Z", "message": "model_loaded"}\n'
    log.write_text("no JSON\n" + line, encoding="utf-8")
    assert logged_times(log, start=len("no JSON\n")) == {"model_loaded": 1767323045.5}


def test_what_callers_met_can_be_written_down() -> None:
    tally = Tally(limit_bytes=10)
    for kind in ("streamed", "left", "streamed"):
        tally.note(kind)
    assert json.loads(json.dumps(dataclasses.asdict(tally)))["ended"] == {"streamed": 2, "left": 1}
    assert tally.is_good
    tally.active_bytes = 11
    assert not tally.is_good


@pytest.mark.slow
@pytest.mark.timeout(_DURATION_S + 900)
async def test_every_reply_among_models_that_give_way_is_what_it_is_alone(tmp_path: Path) -> None:
    tally = await drive(tmp_path, tmp_path / "log", duration_s=_DURATION_S, seed=3)
    assert tally.is_good, (tally.wrong[:5], tally.active_bytes, tally.limit_bytes)
    assert tally.ended["streamed"] > CALLER_COUNT
