"""kill -9 at random moments under load: no lying row, no wrong token, warm again after a restart."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from icehouse_server.clock import SystemClock
from icehouse_server.storage.directory.offline import OfflineStore
from icehouse_server.storage.directory.reconcile import Finding
from icehouse_server.storage.files import SystemFiles

from tests.fixtures.models import tiny_model_dir
from tests.system.cache.server import CacheServer
from tests.system.cache.test_reuse import prompt
from tests.system.crash.load import EventTrigger, Reference, Seen, ask, run_until_gone
from tests.system.crash.server_process import ServerProcess

_GARBAGE = frozenset({Finding.PARTIAL, Finding.ADOPTABLE})
"""What a crash may leave: a file that was not committed, or one whose row was deleted first."""
_OPTIONS = (
    *("--block-token-count", "16", "--prefill-chunk-token-count", "16"),
    # Little RAM, so that blocks are spilled and loaded all the time, and little disk, so that they go.
    *("--ram-bytes", "256KiB", "--ssd-bytes", "6MiB", "--write-queue-bytes", "1MiB"),
    *("--spill-policy", "write_behind", "--min-prefix-token-count", "0", "--no-restore-or-recompute"),
)
_CALLER_COUNT = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def references(model: Path) -> list[Reference]:
    """Prompts that share beginnings, and what the model says to each without a cache."""
    stems = [prompt(64, salt=salt) for salt in range(3)]
    prompts = [[*stem, *prompt(8 + 16 * n, salt=10 * n + 5)] for stem in stems for n in range(4)]
    with CacheServer(model, None, is_enabled=False) as served:
        return [
            Reference(tuple(tokens), tuple(served.ask(str(i), tokens, max_output_tokens=12).tokens))
            for i, tokens in enumerate(prompts)
        ]


def offline(directory: Path) -> OfflineStore:
    return OfflineStore(str(directory), files=SystemFiles(), clock=SystemClock())


def assert_nothing_lies(directory: Path) -> None:
    """Prove that every row has its file, whole and with the right checksums."""
    store = offline(directory)
    found, _ = store.check(progress=lambda count: None)
    assert [item for item in found if item.finding not in _GARBAGE] == []
    records = store.rows().records
    if records:
        assert [verdict for verdict in store.verify(records) if verdict.damage] == []


def run_rounds(model: Path, references: list[Reference], tmp_path: Path, *, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    directory = tmp_path / "blocks"
    total = Seen()
    for number in range(rounds):
        with ServerProcess(
            model=model, directory=directory, log=tmp_path / f"{number}.log", options=_OPTIONS
        ) as server:
            server.wait_until_serving()
            trigger = EventTrigger(event_count=rng.randint(1, 250), action=server.kill)
            seen = run_until_gone(server.address, references, rng=rng, trigger=trigger, callers=_CALLER_COUNT)
        assert seen.cut_count >= 1
        assert_nothing_lies(directory)
        total.finished_count += seen.finished_count
        total.ssd_token_count += seen.ssd_token_count
    assert total.finished_count > rounds and total.ssd_token_count > 0
    # One last life: everything is still right, and an orderly end leaves nothing to repair.
    with ServerProcess(
        model=model, directory=directory, log=tmp_path / "last.log", options=_OPTIONS
    ) as server:
        server.wait_until_serving()
        for reference in references:
            assert ask(server.address, reference, total, on_event=lambda: None)
        server.terminate()
        assert server.wait() == 0
    found, _ = offline(directory).check(progress=lambda count: None)
    assert found == []


def test_killed_ten_times(model: Path, references: list[Reference], tmp_path: Path) -> None:
    run_rounds(model, references, tmp_path, rounds=10, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_two_hundred_times(model: Path, references: list[Reference], tmp_path: Path) -> None:
    run_rounds(model, references, tmp_path, rounds=200, seed=2)
