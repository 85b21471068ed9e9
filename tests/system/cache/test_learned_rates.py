"""What a server has learned about speed survives its restart.

Disk and device take as long as a test says, on a clock that stands still otherwise.
"""

from __future__ import annotations

import contextlib
import platform
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from icehouse.v1 import inference_service_pb2 as pb
from icehouse.v1 import usage_pb2
from icehouse_server.device import find_device
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.domain.request import CacheUse
from icehouse_server.storage.files import Files

from tests.fixtures.engine import FakeClock
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.whole_server import whole_server
from tests.system.cache.stepped_server import BLOCK, SteppedServer, prompt

PROMPTS = [prompt(4 * BLOCK + 1, salt=salt) for salt in range(30)]
FAST, SLOW = 1e-4, 1.0
"""Seconds of a read, or of a pass."""


class TimedFiles(Files):
    """Each read moves the clock."""

    def __init__(self, clock: FakeClock, read_s: float) -> None:
        super().__init__()
        self._clock, self._read_s = clock, read_s

    def read_into(self, descriptor: int, parts: Sequence[memoryview], *, offset: int) -> int:
        self._clock.now += self._read_s
        return super().read_into(descriptor, parts, offset=offset)


class Place:
    """A directory with the blocks of all prompts, and servers that begin there one after the other."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with SteppedServer(directory) as served:
            for number, tokens in enumerate(PROMPTS):
                served.ask(f"{number}", tokens)

    @contextlib.contextmanager
    def run(self, *, read_s: float, pass_s: float, measured_on: str = "here") -> Iterator[SteppedServer]:
        """Start a server whose RAM holds no block, so that each prompt is read or computed."""
        clock = FakeClock()
        with SteppedServer(
            self._directory,
            clock=clock,
            files=TimedFiles(clock, read_s),
            ram_blocks=0,
            may_recompute=True,
            measured_on=measured_on,
        ) as served:
            served.runner.clock = clock
            served.runner.on_prefill = lambda: setattr(clock, "now", clock.now + pass_s)
            yield served


def is_read(served: SteppedServer, number: int) -> bool:
    """Ask for a prompt; return whether it came from SSD, and check that else it was computed by choice."""
    cache = served.ask(f"{number}", PROMPTS[number], cache_use=CacheUse.READ_ONLY).cache
    assert cache.ssd_token_count or cache.limit is ReuseLimit.RECOMPUTE_FASTER
    return bool(cache.ssd_token_count)


def learn(place: Place, *, read_s: float, pass_s: float, measured_on: str = "here") -> None:
    """Let a server read three prompts, compute another, and stop."""
    with place.run(read_s=read_s, pass_s=pass_s, measured_on=measured_on) as served:
        assert [is_read(served, number) for number in range(3)] == [True] * 3, "it knows nothing yet"
        served.ask("cold", PROMPTS[3], cache_use=CacheUse.OFF)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_first_prompt_after_a_restart_is_computed_where_the_last_run_found_that_faster(
    place: Place,
) -> None:
    learn(place, read_s=SLOW, pass_s=FAST)
    with place.run(read_s=SLOW, pass_s=FAST) as served:
        assert not is_read(served, 0)
        assert served.runner.asked_load_count == 0
        assert served.stats().promote.recompute_chosen_total == 1


def test_it_is_read_where_the_last_run_found_that_faster(place: Place) -> None:
    learn(place, read_s=SLOW, pass_s=FAST)
    with place.run(read_s=FAST, pass_s=SLOW) as served:
        chosen = [is_read(served, number) for number in range(30)]
        first = chosen.index(True)
        assert first < 30 and chosen[first + 3 :] == [True] * (27 - first), "it is found out, and believed"
    with place.run(read_s=FAST, pass_s=SLOW) as served:
        assert is_read(served, 0)


def test_what_another_device_had_learned_is_not_taken(place: Place) -> None:
    learn(place, read_s=SLOW, pass_s=FAST)
    with place.run(read_s=SLOW, pass_s=FAST, measured_on="another device") as served:
        assert is_read(served, 0)


def test_a_run_of_few_loads_leaves_what_was_learned_before(place: Place) -> None:
    learn(place, read_s=FAST, pass_s=SLOW)
    with place.run(read_s=SLOW, pass_s=SLOW) as served:
        assert is_read(served, 0), "the one slow load of this run"
    with place.run(read_s=FAST, pass_s=SLOW) as served:
        assert [is_read(served, number) for number in range(3)] == [True] * 3


def test_a_server_that_is_killed_had_written_what_it_learned(place: Place) -> None:
    with place.run(read_s=SLOW, pass_s=FAST) as served:
        served.ask("cold", PROMPTS[3], cache_use=CacheUse.OFF)
        assert [is_read(served, number) for number in range(3)] == [True] * 3
        served.clock.now += 10.0
        served.stats()
        served.storage._store.abandon()
        served.storage._store.unlock()
        served.is_storage_alive = False
    with place.run(read_s=SLOW, pass_s=FAST) as served:
        assert not is_read(served, 0)


async def ask(model: Path, directory: Path, *prompts: Sequence[int]) -> list[usage_pb2.CacheReport]:
    """Start a server as it is composed, ask it, and stop it."""
    found = []
    async with whole_server(model, directory, cache__block_token_count=16) as served:
        for tokens in prompts:
            asked = pb.GenerateRequest(max_output_tokens=1)
            asked.prompt.tokens.ids.extend(tokens)
            found.append((await served.inference.Generate(asked)).cache)
    return found


def change(directory: Path, statement: str) -> list[tuple[str, int]]:
    """Change what was learned; return where it was, and how much there is of it."""
    with contextlib.closing(sqlite3.connect(directory / "manifest.sqlite3")) as connection:
        found = connection.execute("SELECT measured_on, untried_count FROM rates").fetchall()
        connection.execute(statement)
        connection.commit()
    return found


async def test_a_server_goes_by_what_it_learned_on_this_machine(tmp_path: Path) -> None:
    model, directory = tiny_model_dir(tmp_path, "llama"), tmp_path / "blocks"
    prompts = [prompt(65, salt=salt) for salt in range(3)]
    await ask(model, directory, *prompts)
    *read, _ = await ask(model, directory, *prompts, prompt(65, salt=3))
    assert [cache.ssd_tokens for cache in read] == [64] * 3, "it knows nothing yet"
    ((measured_on, untried_count),) = change(directory, "UPDATE rates SET read_bytes_per_s = 1.0")
    assert platform.node() in measured_on and find_device().name in measured_on and untried_count == 0
    (computed,) = await ask(model, directory, prompts[0])
    assert computed.limit == usage_pb2.REUSE_LIMIT_RECOMPUTE_FASTER
    assert change(directory, "UPDATE rates SET measured_on = 'another machine'") == [(measured_on, 1)]
    (elsewhere,) = await ask(model, directory, prompts[0])
    assert elsewhere.ssd_tokens == 64
