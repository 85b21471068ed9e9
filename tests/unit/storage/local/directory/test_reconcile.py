"""The table of repairs, row by row, on real directories; `check` says the same without touching."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.block_file import prepare_block, write_block
from icehouse_server.storage.local.directory.offline import OfflineStore, PurgeScope
from icehouse_server.storage.local.directory.reconcile import ReconcileFinding
from icehouse_server.storage.store_paths import StorePaths

from tests.fixtures.storage.blocks import FINGERPRINT, OTHER_FINGERPRINT, make_block, make_chain
from tests.fixtures.storage.ciphers import BOTH_WAYS
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread
from tests.unit.storage.local.test_crash import check_is_clean


class Place:
    """A directory with three committed blocks, closed, and ways to spoil it."""

    def __init__(self, directory) -> None:
        self.directory = directory
        self.chain = make_chain(3)
        self.paths = StorePaths(os.path.abspath(directory))
        with StorageThread(directory) as served:
            served.spill(*self.chain)

    def path(self, index: int) -> str:
        return self.paths.block(FINGERPRINT, self.chain[index].header.hash)

    def sql(self, statement: str, *values) -> None:
        connection = sqlite3.connect(self.paths.manifest)
        assert connection.execute(statement, values).rowcount == 1
        connection.commit()
        connection.close()

    def findings(self) -> list[ReconcileFinding]:
        store = OfflineStore(str(self.directory), files=Files(), clock=ManualClock())
        return [item.finding for item in store.check(progress=lambda _: None)[0]]

    def reopen(self):
        """Open and close again; return the report and the hashes that are usable."""
        with StorageThread(self.directory) as served:
            known = {record.hash for record in served.take_inventory()}
            report = served.stats().last_reconcile
        check_is_clean(self.directory)
        return report, [block.header.hash in known for block in self.chain]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "cache")


def test_nothing_to_do(place):
    assert place.findings() == []
    report, known = place.reopen()
    assert report.clean and report.repair_count == 0 and known == [True] * 3


def test_partial_is_deleted(place):
    with open(place.path(0) + ".partial", "wb") as file:
        file.write(b"half")
    assert place.findings() == [ReconcileFinding.PARTIAL]
    report, known = place.reopen()
    assert (report.partial_deleted_count, report.clean, known) == (1, False, [True] * 3)


def test_valid_file_without_row_is_adopted(place):
    place.sql("DELETE FROM blocks WHERE hash = ?", place.chain[1].header.hash)
    assert place.findings() == [ReconcileFinding.ADOPTABLE]
    report, known = place.reopen()
    assert (report.adopted_count, known) == (1, [True] * 3)


def test_invalid_file_without_row_is_quarantined(place):
    place.sql("DELETE FROM blocks WHERE hash = ?", place.chain[1].header.hash)
    os.truncate(place.path(1), 99)
    assert place.findings() == [ReconcileFinding.INVALID]
    report, known = place.reopen()
    assert (report.quarantined_count, known) == (1, [True, False, True])
    assert os.path.exists(place.paths.quarantined(place.chain[1].header.hash))


def test_row_without_file_is_deleted(place):
    os.unlink(place.path(2))
    assert place.findings() == [ReconcileFinding.MISSING]
    report, known = place.reopen()
    assert (report.row_deleted_count, known) == (1, [True, True, False])


def test_file_of_another_size_is_quarantined(place):
    os.truncate(place.path(0), 99)
    os.unlink(place.paths.clean_mark)
    assert place.findings() == [ReconcileFinding.DIFFERS]
    report, known = place.reopen()
    assert (report.quarantined_count, known) == (1, [False, True, True])


def test_swapped_files_are_quarantined(place):
    os.rename(place.path(0), place.path(0) + ".x")
    os.rename(place.path(1), place.path(0))
    os.rename(place.path(0) + ".x", place.path(1))
    assert place.findings() == [ReconcileFinding.DIFFERS] * 2
    report, known = place.reopen()
    assert (report.quarantined_count, known) == (2, [False, False, True])


@pytest.mark.parametrize(
    "column",
    ["token_count", "start_token_index", "kv_bytes", "file_bytes", "parent", "header_xxh3", "inode"],
)
def test_an_edited_row_is_seen_and_made_anew_from_its_file(place, column):
    value = {"parent": bytes(32), "header_xxh3": "00"}.get(column, 12)
    place.sql(f"UPDATE blocks SET {column} = ? WHERE hash = ?", value, place.chain[1].header.hash)
    assert place.findings() == [ReconcileFinding.EDITED_ROW]
    report, known = place.reopen()
    assert not report.clean
    assert (report.adopted_count, report.quarantined_count, known) == (1, 0, [True] * 3)
    assert place.findings() == []


def test_a_damaged_file_of_an_edited_row_is_quarantined(place):
    place.sql("UPDATE blocks SET token_count = 12 WHERE hash = ?", place.chain[1].header.hash)
    os.truncate(place.path(1), 99)
    assert place.findings() == [ReconcileFinding.DIFFERS]
    report, known = place.reopen()
    assert (report.quarantined_count, known) == (1, [True, False, True])
    assert place.findings() == []


def test_an_edited_row_of_contents_is_seen_by_verify(place):
    place.sql("UPDATE block_contents SET token_ids = ? WHERE hash = ?", b"1234", place.chain[1].header.hash)
    with StorageThread(place.directory) as served:
        served.storage.verify()
        verified = served.take()[-1]
    assert [failure.hash for failure in verified.damaged] == [place.chain[1].header.hash]


def another_version(monkeypatch) -> None:
    """Become a version that has another layout."""
    for module in ("block_format.header", "directory.reconcile", "directory.lock"):
        monkeypatch.setattr(f"icehouse_server.storage.local.{module}.LAYOUT_ABI", 3)


def test_other_abi_is_deleted_with_its_row(place, monkeypatch):
    another_version(monkeypatch)
    assert place.findings() == [ReconcileFinding.OTHER_ABI] * 3
    report, known = place.reopen()
    assert (report.other_layout_deleted_count, known) == (3, [False] * 3)
    assert os.listdir(place.paths.folder(FINGERPRINT)) == []


def test_other_abi_without_row_is_deleted(place, monkeypatch):
    os.unlink(place.paths.manifest)
    another_version(monkeypatch)
    report, _ = place.reopen()
    assert report.other_layout_deleted_count == 3 and report.quarantined_count == 0


def test_other_fingerprint_is_kept(place):
    with StorageThread(place.directory, fingerprint=OTHER_FINGERPRINT) as served:
        served.spill(make_block(seed=9, fingerprint=OTHER_FINGERPRINT))
    os.unlink(place.paths.clean_mark)
    assert place.findings() == []
    report, known = place.reopen()
    assert (report.row_count, report.file_count, known) == (4, 4, [True] * 3)


def test_strange_files_are_left_alone(place):
    strange = [
        f"{place.paths.folder(FINGERPRINT)}/notes.txt",
        f"{place.paths.blocks}/readme",
        f"{place.paths.folder(FINGERPRINT)}/{'0' * 64}.safetensors.bak",
    ]
    for path in strange:
        with open(path, "w") as file:
            file.write("mine")
    os.mkdir(f"{place.paths.blocks}/folder")
    assert place.findings() == [ReconcileFinding.UNKNOWN] * 4
    with StorageThread(place.directory) as served:
        assert served.stats().last_reconcile.unknown_file_count == 4
        assert served.stats().disk.used_bytes >= 12
    assert all(os.path.exists(path) for path in strange)


def spoil_an_index(path):
    """Leave a database that SQLite opens and reads, and finds damaged when it looks."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("DELETE FROM sqlite_master WHERE name = 'sqlite_autoindex_blocks_1'")
    connection.commit()
    connection.close()


LOST = {
    "missing": (os.unlink, "manifest_lost", "there was none"),
    "empty": (lambda path: os.truncate(path, 0), "manifest_lost", "it was empty"),
    "junk": (lambda path: Path(path).write_bytes(b"not a database" * 1000), "manifest_moved_aside", "not a"),
    "cut": (lambda path: os.truncate(path, 8192), "manifest_moved_aside", "malformed"),
    "spoilt": (spoil_an_index, "manifest_moved_aside", "never used"),
}


@pytest.mark.parametrize(("damage", "event", "detail"), LOST.values(), ids=list(LOST))
def test_a_lost_manifest_is_rebuilt_from_the_files_and_the_log_says_why(place, damage, event, detail, caplog):
    damage(place.paths.manifest)
    with caplog.at_level(logging.INFO):
        report, known = place.reopen()
    assert report.manifest_rebuilt and (report.adopted_count, known) == (3, [True] * 3)
    said = {record.message: vars(record) for record in caplog.records}
    assert detail in said[event]["detail"]
    assert (said["cache_opened"]["manifests_rebuilt"], said["cache_opened"]["adopted"]) == (1, 3)
    assert os.path.exists(place.paths.manifest_aside) == (event == "manifest_moved_aside")
    report, known = place.reopen()
    assert report.clean and known == [True] * 3


@pytest.mark.parametrize("is_purged", [True, False])
def test_where_there_are_no_blocks_no_manifest_is_lost(tmp_path, is_purged, caplog):
    if is_purged:
        with StorageThread(tmp_path) as served:
            served.spill(make_block())
        store = OfflineStore(str(tmp_path), files=Files(), clock=ManualClock())
        store.purge(lambda _: True, scope=PurgeScope.EVERYTHING, progress=lambda *_: None)
        os.unlink(StorePaths(str(tmp_path)).manifest)
    with StorageThread(tmp_path) as served:
        assert not served.stats().last_reconcile.manifest_rebuilt
    assert caplog.records == []


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    damage=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=9)), min_size=1
    ),
    is_noticed=st.booleans(),
)
@example(damage=[(0.0625, b"\x80")], is_noticed=False).via("found: SQLite's complaint was no UTF-8")
@example(damage=[(0.59375, b"\0")], is_noticed=False).via("found: the checksum of a row")
@example(damage=[(0.4993603899384334, b"\0")], is_noticed=True).via("found: a fingerprint in its index")
@example(damage=[(0.4993603899384334, b"\0")], is_noticed=False).via("found: the same, trusted")
def test_whatever_becomes_of_the_manifest_no_block_is_lost(tmp_path_factory, damage, is_noticed):
    """Bytes of it changed where they lie, with the mark of a clean shutdown or without."""
    place = Place(tmp_path_factory.mktemp("damaged") / "cache")
    before = os.stat(place.paths.manifest)
    with open(place.paths.manifest, "r+b") as file:
        for share, data in damage:
            file.seek(int(share * before.st_size))
            file.write(data[: before.st_size - file.tell()])
    os.utime(place.paths.manifest, ns=(before.st_atime_ns, before.st_mtime_ns))
    if is_noticed:
        os.unlink(place.paths.clean_mark)
    with StorageThread(place.directory) as served:
        served.take_inventory()
    # What a start that trusted the mark took for granted, one that does not puts right.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(place.paths.clean_mark)
    _, known = place.reopen()
    assert known == [True] * 3


def test_a_changed_time_alone_is_only_restamped(place):
    os.utime(place.path(1), ns=(1, 1))
    os.unlink(place.paths.clean_mark)
    assert place.findings() == [ReconcileFinding.RESTAMPED]
    report, known = place.reopen()
    assert (report.restamped_count, report.repair_count, known) == (1, 0, [True] * 3)


def test_a_crash_means_a_full_walk(place):
    served = StorageThread(place.directory)
    served.storage.lock()
    served.storage.open()
    # The process dies: nothing is closed in order.
    served.storage._store.abandon()
    served.storage._store.unlock()
    report, known = place.reopen()
    assert not report.clean and report.repair_count == 0 and known == [True] * 3


def test_a_pipe_in_a_blocks_place_keeps_nobody_waiting(place):
    """To open one for reading is to wait for somebody who writes into it."""
    os.unlink(place.path(1))
    os.mkfifo(place.path(1))
    report, usable = place.reopen()
    assert report.quarantined_count == 1 and usable == [True, False, True]


@pytest.mark.parametrize("cipher", **BOTH_WAYS)
@pytest.mark.parametrize("number", [{"start": 1 << 63}, {"start": 1 << 70}, {"block_token_limit": 1 << 70}])
def test_a_file_with_a_number_that_no_row_can_hold_is_quarantined(place, cipher, number):
    lie = make_block(seed=9, token_ids=(1, 2, 3), cipher=cipher, **number)
    path, files = place.paths.block(FINGERPRINT, lie.header.hash), Files()
    descriptor = files.create(path)
    write_block(files, descriptor, prepare_block(lie, cipher=cipher))
    files.close(descriptor)
    report, usable = place.reopen()
    assert (report.quarantined_count, usable) == (1, [True] * 3)
    assert os.path.exists(place.paths.quarantined(lie.header.hash))
