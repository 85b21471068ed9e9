"""Whom a cache directory is taken from: nobody who could swap its files, and nobody by way of a link."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from icehouse_server.errors import Reason, StartError
from icehouse_server.storage.directory.lock import take_lock
from icehouse_server.storage.files import SystemFiles
from icehouse_server.storage.paths import StorePaths

from tests.fixtures.storage.blocks import make_block
from tests.fixtures.storage.storage_thread import StorageThread


def lock(directory: Path) -> None:
    os.close(take_lock(SystemFiles(), StorePaths(str(directory))))


def plant_a_lock(directory: Path) -> None:
    (directory / "lock").unlink()
    (directory / "lock").symlink_to(directory.parent / "victim")


def link_the_blocks(directory: Path) -> None:
    (directory / "blocks").rename(directory.parent / "elsewhere")
    (directory / "blocks").symlink_to(directory.parent / "elsewhere")


def link_the_manifest(directory: Path) -> None:
    (directory / "manifest.sqlite3").unlink()
    (directory / "manifest.sqlite3").symlink_to(directory.parent / "victim")


SPOILED: list[Callable[[Path], None]] = [
    plant_a_lock,
    link_the_blocks,
    link_the_manifest,
    lambda directory: directory.chmod(0o777),
    lambda directory: (directory / "blocks").chmod(0o707),
    lambda directory: (directory / "manifest.sqlite3").chmod(0o666),
]


@pytest.mark.parametrize("spoil", SPOILED, ids=range(len(SPOILED)))
def test_a_directory_that_others_could_change_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    directory, victim = tmp_path / "cache", tmp_path / "victim"
    victim.write_text("precious")
    with StorageThread(directory):
        pass
    spoil(directory)
    with pytest.raises(StartError) as refused:
        lock(directory)
    assert refused.value.reason is Reason.STORE_UNUSABLE
    assert victim.read_text() == "precious"


def test_the_directory_itself_may_be_a_link_to_a_larger_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    lock(tmp_path / "cache")
    (tmp_path / "disk").chmod(0o777)
    with pytest.raises(StartError):
        lock(tmp_path / "cache")


def test_a_lock_that_was_removed_is_taken_again_before_anything_is_written(tmp_path: Path) -> None:
    """Tidiers of temporary folders do that; another server could come in beside this one."""
    block = make_block()
    with StorageThread(tmp_path) as served:
        served.spill(block)
        (tmp_path / "lock").unlink()
        with StorageThread(tmp_path) as other:
            other.settle()
            served.clock.advance(10)
            served.settle()
            assert served.stats().disk.writes_off_detail
            served.clock.advance(100)
            served.settle()
            assert "another process" in served.stats().disk.writes_off_detail
        served.clock.advance(100)
        served.settle()
        assert not served.stats().disk.writes_off_detail


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000], ids=lambda text: text[:8])
def test_a_mark_that_cannot_be_read_costs_a_walk(tmp_path: Path, text: str) -> None:
    block = make_block()
    with StorageThread(tmp_path) as served:
        served.spill(block)
    (tmp_path / "clean.json").write_text(text)
    with StorageThread(tmp_path) as served:
        assert len(served.take_inventory()) == 1 and not served.stats().last_reconcile.clean
