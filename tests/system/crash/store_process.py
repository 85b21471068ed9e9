"""Store process: one that replaces, purges, changes its key or fills its disk, and is killed after a step.

What each of them must leave, whatever the step was, is told by the `check_` functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from icehouse_server.domain.blocks import HostBlock, RegionKind, pack_tokens
from icehouse_server.storage.api import BlocksLoaded
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.data_keys import find_key, open_key, rewrap
from icehouse_server.storage.local.directory.manifest import Manifest
from icehouse_server.storage.local.directory.offline import OfflineStore, PurgeScope
from icehouse_server.storage.local.directory.space import BALLAST_BYTES
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.forked import CONTEXT
from tests.fixtures.patience import BOUND_S
from tests.fixtures.storage.blocks import make_chain
from tests.fixtures.storage.loading import assert_holds, plan
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread
from tests.unit.storage.local.test_crash import check_is_clean

_STEPS = ("create", "write", "fsync", "close", "rename", "fsync_dir", "unlink")
OLD_KEY, NEW_KEY = bytes(32), bytes([1]) * 32
CHAIN = make_chain(3)
RICHER = make_chain(3, checkpoint=True)[2]


class DeadlyFiles:
    """The system's files, in a process that is killed after its n-th step. With `room_bytes` the disk is
    full after so many bytes."""

    def __init__(self, kill_after: int, room_bytes: int | None = None) -> None:
        self._left = kill_after
        self._room_bytes = room_bytes
        self._system = Files()

    def __getattr__(self, verb: str) -> Any:
        action = getattr(self._system, verb)

        def call(*args: Any, **kwargs: Any) -> Any:
            if verb == "write" and self._room_bytes is not None:
                wanted_bytes = sum(memoryview(part).nbytes for part in args[1])
                if wanted_bytes > self._room_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._room_bytes -= wanted_bytes
            if verb == "unlink" and self._room_bytes is not None and os.path.exists(args[0]):
                self._room_bytes += os.path.getsize(args[0])
            result = action(*args, **kwargs)
            if verb in _STEPS:
                self.step()
            return result

        return call

    def step(self) -> None:
        """Count a step; the manifest's are counted here too."""
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


Scenario = Callable[[Path, DeadlyFiles], None]


def die(scenario: Scenario, directory: Path, kill_after: int) -> None:
    """Be the process that is killed. Nothing of it comes back: no clean-up, no handler, no exit."""
    files = DeadlyFiles(kill_after, room_bytes=BALLAST_BYTES + 60_000 if scenario is fill else None)
    for name in ("insert", "delete"):
        action = getattr(Manifest, name)

        def counted(self: Manifest, *args: Any, action: Callable[..., Any] = action, **kwargs: Any) -> Any:
            result = action(self, *args, **kwargs)
            files.step()
            return result

        setattr(Manifest, name, counted)
    scenario(directory, files)


def replace(directory: Path, files: DeadlyFiles) -> None:
    """Write a block again that gained a checkpoint."""
    with StorageThread(directory, files=files) as served:
        served.spill(RICHER)


def purge(directory: Path, files: Any) -> None:
    """Remove everything."""
    store = OfflineStore(str(directory), files=files, clock=ManualClock())
    store.purge(lambda _: True, scope=PurgeScope.EVERYTHING, progress=lambda done, total: None)


def change_key(directory: Path, files: DeadlyFiles) -> None:
    """Have another master key open the data key."""
    rewrap(files, StorePaths(str(directory)), old_master_key=OLD_KEY, new_master_key=NEW_KEY)  # type: ignore


def change_key_back(directory: Path, files: DeadlyFiles) -> None:
    """Have the first master key open the data key again."""
    rewrap(files, StorePaths(str(directory)), old_master_key=NEW_KEY, new_master_key=OLD_KEY)  # type: ignore


def fill(directory: Path, files: DeadlyFiles) -> None:
    """Write until the disk is full, evict, and write on."""
    with StorageThread(directory, files=files) as served:
        for block in make_chain(12, seed=7, row_width=64):
            served.spill(block)
            served.clock.advance(2)


def prepare(directory: Path) -> None:
    """Make a directory with a chain whose last block lacks its checkpoint, and a key."""
    with StorageThread(directory) as served:
        served.spill(*CHAIN[:2], poorer(RICHER))
    open_key(Files(), StorePaths(str(directory)), master_key=OLD_KEY)


def is_killed(scenario: Scenario, directory: Path, kill_after: int) -> bool:
    """Play a scenario in a process that is killed after so many steps; False when it ended before."""
    process = CONTEXT.Process(target=die, args=(scenario, directory, kill_after), daemon=True)
    process.start()
    process.join(BOUND_S)
    assert process.exitcode in (0, -signal.SIGKILL), f"exit code {process.exitcode} after step {kill_after}"
    return process.exitcode != 0


def poorer(block: HostBlock) -> HostBlock:
    """Return a block as it was before it got its checkpoint."""
    regions = tuple(region for region in block.regions if region.kind is not RegionKind.CHECKPOINT)
    return dataclasses.replace(block, regions=regions)


def _load(served: StorageThread, block: HostBlock) -> None:
    """Load a block and compare each byte with what was spilled."""
    served.take()
    served.storage.get_into(*plan([block]))
    found = next(o for o in served.take() if isinstance(o, BlocksLoaded))
    assert_holds(found, [block])


def check_replaced(directory: Path) -> int:
    """Every block is there and right, the last one as it was or as it became; return which: bytes of its
    checkpoint."""
    with StorageThread(directory) as served:
        records = {record.hash: record for record in served.take_inventory()}
        assert set(records) == {block.header.hash for block in CHAIN}, "a block is lost"
        stats = served.stats()
        assert stats.integrity.quarantined_block_total == stats.last_reconcile.quarantined_count == 0
        checkpoint_bytes = records[RICHER.header.hash].checkpoint_bytes
        _load(served, RICHER if checkpoint_bytes else poorer(RICHER))
    check_is_clean(directory)
    return checkpoint_bytes


def check_purged(directory: Path) -> None:
    """What was gone does not come back; what is there is right; a second purge leaves nothing readable."""
    secrets = [pack_tokens(block.header.token_ids) for block in CHAIN]
    left = {path.name for path in directory.rglob("*.safetensors")}
    with StorageThread(directory) as served:
        known = {record.hash for record in served.take_inventory()}
        assert {f"{block_hash.hex()}.safetensors" for block_hash in known} == left
        for block in (*CHAIN[:2], poorer(RICHER)):
            if block.header.hash in known:
                _load(served, block)
    check_is_clean(directory)
    purge(directory, Files())
    whole = b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())
    assert [secret for secret in secrets if secret in whole] == []


def check_key(directory: Path) -> bool:
    """One of the two keys opens the directory, and a second change works; return whether it is the old."""
    paths = StorePaths(str(directory))
    keys = [find_key(Files(), paths, master_key=key) for key in (OLD_KEY, NEW_KEY)]
    assert sum(key is not None for key in keys) == 1, "both keys open it, or none does"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(paths.data_keys + ".partial")
    rewrap(Files(), paths, old_master_key=OLD_KEY, new_master_key=NEW_KEY)
    assert find_key(Files(), paths, master_key=NEW_KEY) in keys
    return keys[0] is not None


def check_filled(directory: Path) -> None:
    """What is known is right, and with space again blocks are written again."""
    with StorageThread(directory) as served:
        known = {record.hash for record in served.take_inventory()}
        for block in (*CHAIN[:2], poorer(RICHER), *make_chain(12, seed=7, row_width=64)):
            if block.header.hash in known:
                _load(served, block)
        served.spill(*make_chain(2, seed=8))
        assert not served.stats().disk.writes_off_detail
        assert len(served.storage._store.index) == len(known) + 2
    check_is_clean(directory)
