"""Whom a cache directory is taken from: nobody who could swap its files, and nobody by way of a link."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from icehouse_server.errors import Reason, StartError
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.lock import take_lock
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.storage.blocks import make_block
from tests.fixtures.storage.storage_thread import StorageThread


def lock(directory: Path) -> None:
    os.close(take_lock(Files(), StorePaths(str(directory))))


def plant_a_lock(directory: Path) -> None:
    (directory / "lock").unlink()
    (directory / "lock").symlink_to(directory.parent / "victim")


def link_the_blocks(directory: Path) -> None:
    (directory / "blocks").rename(directory.parent / "elsewhere")
    (directory / "blocks").symlink_to(directory.parent / "elsewhere")


def link_the_manifest(directory: Path) -> None:
    (directory / "manifest.sqlite3").unlink()
    (directory / "manifest.sqlite3").symlink_to(directory.parent / "victim")


def only_folder(directory: Path) -> Path:
    """Return the one folder of blocks."""
    (folder,) = (directory / "blocks").iterdir()
    return folder


def link_a_folder_of_blocks(directory: Path) -> None:
    folder = only_folder(directory)
    folder.rename(directory.parent / "elsewhere")
    folder.symlink_to(directory.parent / "elsewhere")


WRITTEN_IN_PLACE = (
    "lock",
    "manifest.sqlite3",
    "manifest.sqlite3-wal",
    "manifest.sqlite3-shm",
    "manifest.sqlite3-journal",
)
OTHER_FILES = (
    "clean.json",
    "keys.json",
    "keys.json.partial",
    "digests.json",
    "ballast",
    "manifest.damaged.sqlite3",
    "manifest.later.sqlite3",
)


def plant(name: str, make: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    """Return what puts something of the victim's, or a trap, where a file of ours is or would be."""

    def spoil(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name, directory.parent / "victim")

    return spoil


SPOILED: dict[str, Callable[[Path], None]] = {
    "lock is a link": plant_a_lock,
    "blocks is a link": link_the_blocks,
    "manifest is a link": link_the_manifest,
    "a folder of blocks is a link": link_a_folder_of_blocks,
    "root is open": lambda directory: directory.chmod(0o777),
    "blocks is open": lambda directory: (directory / "blocks").chmod(0o707),
    "a folder of blocks is open": lambda directory: only_folder(directory).chmod(0o777),
    "manifest is open": lambda directory: (directory / "manifest.sqlite3").chmod(0o666),
    **{f"{name} is a link": plant(name, Path.symlink_to) for name in (*WRITTEN_IN_PLACE, *OTHER_FILES)},
    **{f"{name} is a hard link": plant(name, Path.hardlink_to) for name in (*WRITTEN_IN_PLACE, *OTHER_FILES)},
    **{
        f"{name} is a pipe": plant(name, lambda path, _: os.mkfifo(path))
        for name in (*WRITTEN_IN_PLACE, *OTHER_FILES)
    },
    **{f"{name} is a folder": plant(name, lambda path, _: path.mkdir()) for name in WRITTEN_IN_PLACE},
    "quarantine is a file": lambda directory: (
        (directory / "quarantine").rmdir(),
        (directory / "quarantine").touch(),
    )[1],
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=list(SPOILED))
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


PARTS = ("", "blocks", "blocks/*", "quarantine", "lock", "manifest.sqlite3", "clean.json", "ballast")


@pytest.mark.parametrize("part", PARTS)
def test_what_belongs_to_somebody_else_is_refused(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "cache"
    with StorageThread(directory) as served:
        served.spill(make_block())
    (path,) = directory.glob(part) if "*" in part else [directory / part]
    if os.geteuid() == 0:
        os.chown(path, 4242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(StartError, match="belongs to user"):
        lock(directory)


def test_a_lock_that_leads_elsewhere_is_refused_by_the_opening_itself(tmp_path: Path) -> None:
    """However late it comes: between the look at the directory and the lock."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "lock").hardlink_to(tmp_path / "victim")
    with pytest.raises(PermissionError):
        Files().lock(str(tmp_path / "lock"), owner="1")
    assert (tmp_path / "victim").read_text() == "precious"


def swap_for_link(folder: Path, target: Path) -> None:
    """Put a link to the target where a folder was, and have the target look as the folder did."""
    target.mkdir(mode=0o700)
    for path in sorted(folder.rglob("*")):
        copy = target / path.relative_to(folder)
        copy.mkdir() if path.is_dir() else copy.write_text("precious")
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(target)


def contents(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("part", ["blocks", "blocks/*", "quarantine"])
def test_a_folder_that_becomes_a_link_while_the_server_runs_is_never_entered(
    tmp_path: Path, part: str
) -> None:
    directory, victims = tmp_path / "cache", tmp_path / "victims"
    first, second, third = (make_block(seed=seed) for seed in (1, 2, 3))
    with StorageThread(directory) as served:
        served.spill(first)
        Path(served.path(first)).write_bytes(b"damaged")
        (folder,) = directory.glob(part)
        swap_for_link(folder, victims)
        if part == "quarantine":
            (victims / Path(served.path(first)).name).write_text("precious")
        before = contents(victims)
        # A check of every file, one of which goes into quarantine, a write, and an eviction.
        served.storage.verify()
        served.settle()
        served.spill(second)
        served.storage.delete((first.header.hash,))
        served.settle()
        for _ in range(5):
            served.clock.advance(100)
            served.settle()
        assert contents(victims) == before
        assert served.stats().disk.writes_off_detail
        folder.unlink()
        folder.with_name("moved").rename(folder)
        served.clock.advance(100)
        served.settle()
        served.spill(third)
        assert not served.stats().disk.writes_off_detail
        assert Path(served.path(third)).exists()


def test_a_block_file_of_somebody_else_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checksum proves that it is whole, not who wrote it."""
    block = make_block()
    with StorageThread(tmp_path) as served:
        served.spill(block)
        Path(served.path(block)).chmod(0o666)
    with pytest.raises(PermissionError):
        served.files.open(served.path(block))


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
