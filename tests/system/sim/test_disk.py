"""The simulated disk's power cut: it may undo unsynced changes, but nothing that a real disk keeps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.system.sim.disk import SimDisk


def _write(disk: SimDisk, path: Path, data: bytes, *, is_synced: bool) -> None:
    """Write a file under a partial name and rename it, as a commit does, but without syncing the folder."""
    partial = f"{path}.partial"
    descriptor = disk.create(partial)
    disk.write(descriptor, [data], offset=0)
    if is_synced:
        disk.fsync(descriptor)
    disk.close(descriptor)
    disk.rename(partial, str(path))


@pytest.fixture
def disk(tmp_path: Path) -> SimDisk:
    (tmp_path / "before/blocks").mkdir(parents=True)
    return SimDisk(tmp_path / "before")


def _files_after_a_power_cut(disk: SimDisk) -> dict[str, bytes]:
    copy = disk.root.with_name("after")
    disk.crash(copy)
    return {path.name: path.read_bytes() for path in (copy / "blocks").iterdir()}


def test_an_unsynced_rename_is_undone(disk: SimDisk) -> None:
    _write(disk, disk.root / "blocks/a", b"new", is_synced=True)
    assert _files_after_a_power_cut(disk) == {"a.partial": b"new"}


def test_an_undone_rename_brings_back_the_file_it_replaced(disk: SimDisk) -> None:
    """Story 1003298: a block was replaced by a richer one, its folder could not be synced, and power was
    lost. The simulated disk then lost the old block too, which no rename does, and blamed the store."""
    path = disk.root / "blocks/a"
    _write(disk, path, b"old", is_synced=True)
    disk.fsync_dir(str(path.parent))
    mtime_ns = path.stat().st_mtime_ns
    _write(disk, path, b"richer", is_synced=True)
    assert _files_after_a_power_cut(disk) == {"a": b"old", "a.partial": b"richer"}
    assert os.stat(disk.root.with_name("after") / "blocks/a").st_mtime_ns == mtime_ns


def test_a_replaced_file_that_was_never_synced_comes_back_torn(disk: SimDisk) -> None:
    path = disk.root / "blocks/a"
    _write(disk, path, b"unsynced", is_synced=False)
    disk.fsync_dir(str(path.parent))
    _write(disk, path, b"richer", is_synced=True)
    assert _files_after_a_power_cut(disk) == {"a": b"unsy", "a.partial": b"richer"}


def test_a_synced_rename_stays(disk: SimDisk) -> None:
    path = disk.root / "blocks/a"
    for data in (b"old", b"richer"):
        _write(disk, path, data, is_synced=True)
        disk.fsync_dir(str(path.parent))
    assert _files_after_a_power_cut(disk) == {"a": b"richer"}


def test_what_a_killed_process_did_not_sync_is_the_next_ones_to_lose(disk: SimDisk) -> None:
    _write(disk, disk.root / "blocks/a", b"new", is_synced=True)
    copy = disk.root.with_name("next")
    disk.kill(copy)
    assert (copy / "blocks/a").read_bytes() == b"new"
    assert _files_after_a_power_cut(disk.heir(copy)) == {"a.partial": b"new"}


def test_what_the_next_process_syncs_stays(disk: SimDisk) -> None:
    _write(disk, disk.root / "blocks/a", b"new", is_synced=True)
    heir = disk.heir(disk.root)
    heir.fsync_dir(str(disk.root / "blocks"))
    assert _files_after_a_power_cut(heir) == {"a": b"new"}
