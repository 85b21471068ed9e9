"""The real files: vectored calls of any length, locks, modes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage import files as files_module
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.lock import take_lock
from icehouse_server.storage.local.directory.space import SECONDS_PER_DAY, ExtraFiles, Space
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.storage.storage_thread import settings_for

FILES = Files()


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.binary(max_size=40), max_size=30), iov=st.integers(1, 5))
def test_vectored_calls_are_cut_and_continued(tmp_path_factory, parts, iov):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files_module, "_IOV_LIMIT", iov)
        path = str(tmp_path_factory.mktemp("files") / "f")
        descriptor = FILES.create(path)
        whole = b"".join(parts)
        FILES.write(descriptor, parts, offset=3)
        FILES.fsync(descriptor)
        FILES.close(descriptor)
        descriptor = FILES.open(path)
        buffers = [bytearray(len(part)) for part in parts]
        assert FILES.read_into(descriptor, [memoryview(b) for b in buffers], offset=3) == len(whole)
        assert b"".join(buffers) == whole
        longer = bytearray(len(whole) + 10)
        assert FILES.read_into(descriptor, [memoryview(longer)], offset=3) == len(whole)
        FILES.close(descriptor)


def test_create_is_exclusive_and_private(tmp_path):
    path = str(tmp_path / "a" / "f")
    FILES.make_dir(str(tmp_path / "a"))
    FILES.make_dir(str(tmp_path / "a"))
    FILES.close(FILES.create(path))
    with pytest.raises(FileExistsError):
        FILES.create(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "a").st_mode) == 0o700


def test_a_planted_link_is_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    os.symlink(tmp_path / "secret", tmp_path / "link")
    with pytest.raises(OSError) as caught:
        FILES.open(str(tmp_path / "link"))
    assert caught.value.errno == errno.ELOOP
    assert {info.name: info.is_directory for info in FILES.list(str(tmp_path))} == {
        "secret": False,
        "link": False,
    }


def test_a_lock_is_dropped_with_its_descriptor(tmp_path):
    paths = StorePaths(str(tmp_path))
    first = take_lock(FILES, paths)
    with pytest.raises(BlockingIOError):
        FILES.lock(paths.lock, owner="2")
    FILES.close(first)
    second = FILES.lock(paths.lock, owner="123456789")
    FILES.close(second)
    FILES.close(FILES.lock(paths.lock, owner="7"))
    assert (tmp_path / "lock").read_text() == "7"


def test_space_counts_everything():
    settings = settings_for("/none", limit_bytes=100, free_floor_bytes=10, daily_write_limit_bytes=50)
    extras = ExtraFiles(FILES, StorePaths("/none"))
    extras.quarantined, extras.leftovers = {BlockHash(bytes(32)): 6}, {"/none/a": 4}
    extras.aside, extras.unknown_bytes = {"/none/b": 1}, 2
    space = Space(settings, extras)
    space.manifest_bytes = 5
    assert space.shortage_bytes(20, block_bytes=62, free_bytes=1000) == 0
    assert space.shortage_bytes(20, block_bytes=63, free_bytes=1000) == 1
    assert space.shortage_bytes(20, block_bytes=0, free_bytes=25) == 5
    assert space.can_ever_fit(95) and not space.can_ever_fit(96)


def test_the_budget_turns_with_the_day():
    space = Space(settings_for("/none", daily_write_limit_bytes=50), ExtraFiles(FILES, StorePaths("/none")))
    assert space.budget_allows(50, now_time=5.0) and not space.budget_allows(51, now_time=5.0)
    space.note_written(40, now_time=5.0)
    assert not space.budget_allows(11, now_time=SECONDS_PER_DAY - 1)
    assert space.budget_allows(11, now_time=SECONDS_PER_DAY)


def test_a_listing_beside_a_writer_leaves_out_what_is_gone(tmp_path, monkeypatch):
    (tmp_path / "stays").write_text("a")
    (tmp_path / "goes").write_text("b")
    scandir = os.scandir

    @contextlib.contextmanager
    def slow(path):
        with scandir(path) as entries:
            found = list(entries)
            (tmp_path / "goes").unlink()
            yield found

    monkeypatch.setattr(os, "scandir", slow)
    assert [info.name for info in Files().list(str(tmp_path))] == ["stays"]


def test_parents_are_made_as_private_as_the_folder(tmp_path):
    Files().make_dir(str(tmp_path / "a" / "b" / "c"))
    folders = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 3


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EINVAL, errno.ENOTTY])
def test_a_volume_that_cannot_flush_the_drive_is_synced_all_the_same(tmp_path, monkeypatch, number):
    """What macOS answers on SMB, NFS and FUSE; only its call is played here."""
    asked = []

    def refuse(descriptor, command):
        asked.append(command)
        raise OSError(number, "")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    files = Files()
    descriptor = files.create(str(tmp_path / "file"))
    files.fsync(descriptor)
    files.fsync(descriptor)
    files.close(descriptor)
    assert asked == [51], "asked once, then no more"


def test_a_drive_that_fails_to_flush_is_told(tmp_path, monkeypatch):
    def refuse(descriptor, command):
        raise OSError(errno.EIO, "")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    files = Files()
    descriptor = files.create(str(tmp_path / "file"))
    with pytest.raises(OSError):
        files.fsync(descriptor)
    files.close(descriptor)


def test_many_files_of_a_guarded_folder_are_looked_at_by_way_of_one_opening(tmp_path, monkeypatch):
    files = Files()
    files.guard(str(tmp_path))
    folder = f"{tmp_path}/blocks"
    files.make_dir(folder)
    for name in "abc":
        files.close(files.create(f"{folder}/{name}"))
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *args, **how: opened.append(args) or real(*args, **how))
    found = files.stat_all(folder, ["a", "c", "gone"])
    assert len(opened) == 2, "the root and the folder in it"
    assert found == {name: files.stat(f"{folder}/{name}") for name in "ac"}
    assert files.stat_all(f"{tmp_path}/nowhere", ["a"]) == {}


def test_a_planted_folder_link_is_not_followed_by_a_look_at_many(tmp_path):
    files = Files()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_bytes(b"x")
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    files.guard(str(root))
    os.symlink(tmp_path / "elsewhere", root / "blocks")
    with pytest.raises(OSError):
        files.stat_all(f"{root}/blocks", ["a"])


@pytest.mark.parametrize("target", ["blocks/b", "other/b"])
def test_a_file_is_renamed_within_a_guarded_folder_and_into_another(tmp_path, target):
    files = Files()
    files.guard(str(tmp_path))
    for folder in ("blocks", "other"):
        files.make_dir(f"{tmp_path}/{folder}")
    files.close(files.create(f"{tmp_path}/blocks/a"))
    files.rename(f"{tmp_path}/blocks/a", f"{tmp_path}/{target}")
    assert not (tmp_path / "blocks/a").exists() and (tmp_path / target).exists()
