"""kill -9 at random moments, under load and in all that changes a directory: nothing lost, no wrong token.

ICEHOUSE_KILL_ROUNDS is how often the long test kills, ICEHOUSE_KILL_SEED its dice; with -s it tells what came
of it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from icehouse_server.storage.local.directory.reconcile import ReconcileFinding

from tests.fixtures.models import tiny_model_dir
from tests.system.cache.server import CacheServer
from tests.system.cache.test_reuse import prompt
from tests.system.crash import store_process
from tests.system.crash.crashing_server import ServerProcess
from tests.system.crash.generate_load import EventTrigger, Reference, Seen, ask, run_until_gone
from tests.system.crash.life import GARBAGE, MASTER_KEYS, CacheLife

_ROUNDS = int(os.environ.get("ICEHOUSE_KILL_ROUNDS", "200"))
_SEED = int(os.environ.get("ICEHOUSE_KILL_SEED", "2"))
_OPTIONS = (
    *("--block-token-count", "16", "--prefill-chunk-token-count", "16"),
    # Little RAM, so that blocks are spilled and loaded all the time, and little disk, so that they go.
    *("--ram-bytes", "256KiB", "--ssd-bytes", "6MiB", "--write-queue-bytes", "1MiB"),
    *("--spill-policy", "write_behind", "--min-prefix-token-count", "0", "--no-restore-or-recompute"),
)
_CALLER_COUNT = 4
_STEP_LIMIT = 60
"""A store process is killed after so many steps at most; the longest scenario has about as many."""


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


class Rounds:
    """Kills servers and store processes on a directory in the clear and on an encrypted one."""

    def __init__(self, model: Path, references: list[Reference], folder: Path, *, seed: int) -> None:
        self.total = Seen()
        self.counts: Counter[str] = Counter()
        self._model, self._references, self._folder = model, references, folder
        self._dice = random.Random(seed)
        self._clear = CacheLife(folder / "clear", folder / "clear.ledger", counts=self.counts)
        self._encrypted = CacheLife(
            folder / "encrypted", folder / "encrypted.ledger", folder / "key", counts=self.counts
        )

    def kill_server(self, *, room_bytes: int | None = None) -> None:
        """A server under load; with `room_bytes` its disk is full after so many bytes."""
        life = self._dice.choice((self._clear, self._encrypted))
        log = self._folder / "server.log"
        log.unlink(missing_ok=True)
        with ServerProcess(
            model=self._model,
            directory=life.directory,
            log=log,
            options=(*_OPTIONS, *life.options),
            break_it=life.hook(room_bytes=room_bytes),
        ) as server:
            server.wait_until_serving()
            trigger = EventTrigger(event_count=self._dice.randint(1, 250), action=server.kill)
            seen = run_until_gone(
                server.address, self._references, rng=self._dice, trigger=trigger, callers=_CALLER_COUNT
            )
        assert seen.cut_count >= 1
        if room_bytes is not None:
            self.counts["disks that were full"] += "No space left" in log.read_text()
        life.check()
        self.total.finished_count += seen.finished_count
        self.total.ssd_token_count += seen.ssd_token_count

    def kill_server_on_a_full_disk(self) -> None:
        """A server whose disk gets full; the next one has space again."""
        self.kill_server(room_bytes=self._dice.randint(0, 2_000_000))

    def kill_purge(self) -> None:
        """`icehouse cache purge --all` on what servers left."""
        life = self._dice.choice((self._clear, self._encrypted))
        self.counts["purges killed"] += store_process.is_killed(
            store_process.purge, life.directory, self._dice.randint(1, _STEP_LIMIT)
        )
        life.forget()
        if life.key_file is None or life.opening_keys():
            # Rows go behind their files, here only: the next start deletes them.
            life.check(allowed=GARBAGE | {ReconcileFinding.MISSING})

    def kill_key_change(self) -> None:
        """`icehouse key change` on what servers left: the old key opens the directory, or the new one."""
        life = self._encrypted
        before = life.opening_keys()
        if not before:
            return
        new = next(key for key in MASTER_KEYS if key not in before)
        self.counts["key changes killed"] += store_process.is_killed(
            store_process.change_key if new == store_process.NEW_KEY else store_process.change_key_back,
            life.directory,
            self._dice.randint(1, 8),
        )
        (key,) = life.opening_keys()
        life.set_key(key)
        life.check()

    def kill_replacement(self) -> None:
        """A block that is written again with a checkpoint."""
        directory = self._new_directory()
        if store_process.is_killed(store_process.replace, directory, self._dice.randint(1, 20)):
            self.counts["replacements killed"] += 1
            store_process.check_replaced(directory)

    def kill_on_a_full_disk(self) -> None:
        """Blocks that are written until there is no space, and on."""
        directory = self._new_directory()
        if store_process.is_killed(store_process.fill, directory, self._dice.randint(1, _STEP_LIMIT)):
            self.counts["full disks killed"] += 1
            store_process.check_filled(directory)

    def play(self, count: int) -> None:
        """Kill so often, most of the time a server; then let two live, and end in order."""
        kinds = (
            (self.kill_server, 9),
            (self.kill_server_on_a_full_disk, 2),
            (self.kill_purge, 2),
            (self.kill_key_change, 2),
            (self.kill_replacement, 3),
            (self.kill_on_a_full_disk, 3),
        )
        for _ in range(count):
            kill = self._dice.choices(*zip(*kinds, strict=True))[0]
            self.counts[kill.__name__] += 1
            kill()
        for life in (self._clear, self._encrypted):
            self._live_on(life)

    def _new_directory(self) -> Path:
        directory = self._folder / str(sum(self.counts.values()))
        store_process.prepare(directory)
        return directory

    def _live_on(self, life: CacheLife) -> None:
        """One last life: everything is still right, and an orderly end leaves nothing to repair."""
        with ServerProcess(
            model=self._model,
            directory=life.directory,
            log=self._folder / "last.log",
            options=(*_OPTIONS, *life.options),
            break_it=life.hook(),
        ) as server:
            server.wait_until_serving()
            for reference in self._references:
                assert ask(server.address, reference, self.total, on_event=lambda: None)
            server.terminate()
            assert server.wait() == 0
        life.check(allowed=frozenset())


def test_killed_three_times(model: Path, references: list[Reference], tmp_path: Path) -> None:
    rounds = Rounds(model, references, tmp_path, seed=1)
    for _ in range(3):
        rounds.kill_server()
    rounds.play(0)
    assert rounds.total.finished_count > 3 and rounds.total.ssd_token_count > 0


@pytest.mark.slow
@pytest.mark.timeout(max(3000, 15 * _ROUNDS))
def test_killed_so_often(model: Path, references: list[Reference], tmp_path: Path) -> None:
    rounds = Rounds(model, references, tmp_path, seed=_SEED)
    rounds.play(_ROUNDS)
    print(f"\n{_ROUNDS} rounds, seed {_SEED}: {rounds.total}, {dict(rounds.counts)}")
    assert rounds.total.finished_count > _ROUNDS and rounds.total.ssd_token_count > 0
