"""A manifest that SQLite opens and this version cannot use is made anew; one that it can use is used."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import struct
from pathlib import Path

import pytest
from icehouse_server.errors import StorageError
from icehouse_server.pins import UNTIL_UNPINNED
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.offline import OfflineStore, PurgeScope

from tests.fixtures.storage.blocks import FINGERPRINT, RATES, make_block, make_chain
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread
from tests.unit.storage.local.test_crash import check_is_clean


def change(directory: Path, *statements: str) -> None:
    connection = sqlite3.connect(directory / "manifest.sqlite3")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


FOREIGN = {
    "a table is missing": ["DROP TABLE block_contents"],
    "the blocks are missing": ["DROP TABLE blocks"],
    "a column is missing": ["ALTER TABLE blocks DROP COLUMN pinned"],
    "a column is new": ["ALTER TABLE blocks ADD COLUMN colour TEXT"],
    "a column has another name": ["ALTER TABLE written_days RENAME COLUMN size_bytes TO written_bytes"],
    "the list of migrations is missing": ["DROP TABLE _sqlite_migrations"],
    "an index is missing": ["DROP INDEX idx_fingerprints_fingerprint"],
    "it is another program's": [
        "DROP TABLE block_contents",
        "DROP TABLE blocks",
        "CREATE TABLE blocks (hash TEXT, what TEXT)",
    ],
}


ENDLESS = "WITH RECURSIVE more(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM more) SELECT x FROM more"
COLUMNS = "size_bytes INTEGER NOT NULL"
TABLES = ("blocks", "block_contents", "fingerprints", "rates", "written_days")
PLANTED = {
    **{
        f"a trigger on {table}": [
            f"CREATE TRIGGER t BEFORE INSERT ON {table} BEGIN SELECT count(*) FROM ({ENDLESS}); END"
        ]
        for table in (*TABLES, "_sqlite_migrations")
    },
    "a trigger where the migrations are not yet done": [
        "DELETE FROM _sqlite_migrations",
        f"CREATE TRIGGER t AFTER INSERT ON _sqlite_migrations BEGIN SELECT count(*) FROM ({ENDLESS}); END",
    ],
    "a view in a table's place": [
        "DROP TABLE written_days",
        f"CREATE VIEW written_days (day, size_bytes) AS SELECT x, x FROM ({ENDLESS})",
    ],
    "a view in the place of the migrations": [
        "DROP TABLE _sqlite_migrations",
        f"CREATE VIEW _sqlite_migrations (id, migration_set, name, applied_at) AS "
        f"SELECT x, 'icehouse.manifest', 'create_tables', '' FROM ({ENDLESS})",
    ],
    "a view beside the tables": [f"CREATE VIEW more AS {ENDLESS}"],
    "a table that nobody knows": ["CREATE TABLE more (x)"],
    "an index that nobody knows": ["CREATE INDEX more ON blocks (depth)"],
    "an index of what is computed": [
        "DROP INDEX idx_fingerprints_fingerprint",
        "CREATE UNIQUE INDEX idx_fingerprints_fingerprint ON fingerprints (abs(created_time))",
    ],
    "an index of some rows": [
        "DROP INDEX idx_fingerprints_fingerprint",
        "CREATE UNIQUE INDEX idx_fingerprints_fingerprint ON fingerprints (fingerprint) WHERE id > 7",
    ],
    "a column that is computed": [
        "DROP TABLE written_days",
        f"CREATE TABLE written_days (day INTEGER PRIMARY KEY, {COLUMNS}, "
        "more INTEGER AS (length(hex(zeroblob(400000000))))) STRICT",
    ],
    "a check that is computed": [
        "DROP TABLE written_days",
        f"CREATE TABLE written_days (day INTEGER PRIMARY KEY, {COLUMNS} "
        "CHECK (length(hex(zeroblob(400000000))) > size_bytes)) STRICT",
    ],
    "a default that is computed": [
        "DROP TABLE written_days",
        f"CREATE TABLE written_days (day INTEGER PRIMARY KEY, {COLUMNS}, "
        "more INTEGER DEFAULT (length(hex(zeroblob(400000000))))) STRICT",
    ],
    "a virtual table": [
        "DROP TABLE written_days",
        "CREATE VIRTUAL TABLE written_days USING fts5(day, size_bytes)",
    ],
    "a huge name": ["INSERT INTO fingerprints VALUES (9, zeroblob(40000000), '{}', 0)"],
    "a huge text": ["UPDATE blocks SET header_xxh3 = hex(zeroblob(20000000))"],
}
"""What SQLite would run, read or make for hours, or what fills the memory, as it stands in the file."""

FOREIGN |= PLANTED


@pytest.mark.parametrize("statements", FOREIGN.values(), ids=list(FOREIGN))
def test_a_manifest_that_cannot_be_used_is_made_anew(tmp_path: Path, statements: list[str]) -> None:
    chain = make_chain(3)
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
    change(tmp_path, *statements)
    with StorageThread(tmp_path) as served:
        stats = served.stats()
        assert not stats.disk.writes_off_detail and stats.last_reconcile.manifest_rebuilt
        assert {record.hash for record in served.take_inventory()} == {b.header.hash for b in chain}
        served.spill(make_block(seed=99))
        assert len(served.take_inventory()) == 4
    assert (tmp_path / "manifest.damaged.sqlite3").exists()
    check_is_clean(tmp_path)


def test_the_manifest_of_the_first_schema_gets_what_is_new_and_keeps_what_it_has(tmp_path: Path) -> None:
    block = make_block()
    with StorageThread(tmp_path) as served:
        served.spill(block)
        served.storage.pin((block.header.hash,), UNTIL_UNPINNED)
        served.settle()
    change(tmp_path, "DROP TABLE rates", "DELETE FROM _sqlite_migrations WHERE name = 'create_rates'")
    for _ in range(2):
        with StorageThread(tmp_path) as served:
            (record,) = served.take_inventory()
            assert record.is_pinned and not served.stats().last_reconcile.manifest_rebuilt
            served.storage.keep_rates(RATES)
            served.settle()
    assert served.storage._store.rates == {FINGERPRINT: RATES}
    assert not (tmp_path / "manifest.damaged.sqlite3").exists()


@pytest.mark.parametrize("table", ["fingerprints", "rates", "written_days"])
def test_a_damaged_page_of_what_is_read_at_once_stops_no_start(tmp_path: Path, table: str) -> None:
    chain = make_chain(3)
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
        served.storage.keep_rates(RATES)
        served.settle()
    with contextlib.closing(sqlite3.connect(tmp_path / "manifest.sqlite3")) as connection:
        place = f"SELECT rootpage FROM sqlite_master WHERE name = '{table}'"
        (page,) = connection.execute(place).fetchone()
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    manifest = tmp_path / "manifest.sqlite3"
    before = manifest.stat()
    with manifest.open("r+b") as file:
        file.seek((page - 1) * page_bytes)
        file.write(b"\xff" * page_bytes)
    os.utime(manifest, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a medium that rots
    with StorageThread(tmp_path) as served:
        assert {record.hash for record in served.take_inventory()} == {b.header.hash for b in chain}
        assert served.storage._store.rates == {}


LATER = (
    "ALTER TABLE blocks ADD COLUMN colour TEXT",
    "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) "
    "VALUES ('icehouse.manifest', 'add_colour', '2031-01-01')",
)


def pinned(manifest: Path) -> set[bytes]:
    with contextlib.closing(sqlite3.connect(manifest)) as connection:
        return {row[0] for row in connection.execute("SELECT hash FROM blocks WHERE pinned = 1")}


def test_the_manifest_of_a_later_version_is_kept_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain, names = make_chain(3), {block.header.hash for block in make_chain(3)}
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
        served.storage.pin(tuple(names), UNTIL_UNPINNED)
        served.settle()
    change(tmp_path, *LATER)
    with StorageThread(tmp_path) as served:
        assert {record.hash for record in served.take_inventory()} == names
    (said,) = [vars(record) for record in caplog.records if record.message == "manifest_moved_aside"]
    assert "written by a later version of Icehouse, which knows the migration 'add_colour'" in said["detail"]
    manifest, later = tmp_path / "manifest.sqlite3", tmp_path / "manifest.later.sqlite3"
    assert said["path"] == str(later) and pinned(later) == names and pinned(manifest) == set()
    assert not (tmp_path / "manifest.damaged.sqlite3").exists()
    # As the page on upgrades says it, for the later version.
    later.replace(manifest)
    change(
        tmp_path,
        "ALTER TABLE blocks DROP COLUMN colour",
        "DELETE FROM _sqlite_migrations WHERE name = 'add_colour'",
    )
    with StorageThread(tmp_path) as served:
        assert {record.hash for record in served.take_inventory() if record.pin_end_time} == names
    check_is_clean(tmp_path)


def test_what_a_later_version_left_in_its_log_is_kept_with_its_manifest(tmp_path: Path) -> None:
    directory, copy = tmp_path / "cache", tmp_path / "copy"
    with StorageThread(directory) as served:
        served.spill(*make_chain(2))
    change(directory, *LATER)
    with contextlib.closing(sqlite3.connect(directory / "manifest.sqlite3")) as connection:
        connection.execute("UPDATE blocks SET pinned = 1")
        connection.commit()
        shutil.copytree(directory, copy)  # as a killed process leaves it
    assert (copy / "manifest.sqlite3-wal").stat().st_size
    with StorageThread(copy) as served:
        assert len(served.take_inventory()) == 2
    assert len(pinned(copy / "manifest.later.sqlite3")) == 2


def test_a_planted_list_of_migrations_does_not_make_a_later_version(tmp_path: Path) -> None:
    with StorageThread(tmp_path) as served:
        served.spill(make_block())
    change(
        tmp_path,
        "DROP TABLE _sqlite_migrations",
        f"CREATE VIEW _sqlite_migrations (id, migration_set, name, applied_at) AS "
        f"SELECT x, 'icehouse.manifest', 'later', '' FROM ({ENDLESS})",
    )
    with StorageThread(tmp_path) as served:
        assert len(served.take_inventory()) == 1
    assert (tmp_path / "manifest.damaged.sqlite3").exists()
    assert not (tmp_path / "manifest.later.sqlite3").exists()


@pytest.mark.parametrize("statements", PLANTED.values(), ids=list(PLANTED))
def test_a_planted_manifest_is_told_of_offline(tmp_path: Path, statements: list[str]) -> None:
    with StorageThread(tmp_path) as served:
        served.spill(make_block())
    change(tmp_path, *statements)
    with pytest.raises(StorageError, match="cannot be used"):
        OfflineStore(str(tmp_path), files=Files(), clock=ManualClock()).rows()


STRANGE = {
    f"{what} of {number}": [f"UPDATE blocks SET {column} = {number}"]
    for what, column in (
        ("hits", "hit_count"),
        ("pins", "pinned"),
        ("sizes", "file_bytes"),
        ("depths", "depth"),
        ("inodes", "inode"),
        ("fingerprints", "fingerprint_id"),
    )
    for number in (2**63 - 1, -(2**63), -1, 7)
} | {
    **{
        f"used at {time}": [f"UPDATE blocks SET last_used_time = {time}, created_time = {time}"]
        for time in ("9e999", "-9e999", "1e300", "-1")
    },
    **{
        f"written today {number}": [f"INSERT OR REPLACE INTO written_days VALUES ({day}, {number})"]
        for number in (2**63 - 1, -(2**63))
        for day in (11,)
    },
    "written on days without an end": [f"INSERT INTO written_days VALUES ({2**63 - 1}, {2**63 - 1})"],
    "names that are none": ["UPDATE fingerprints SET fingerprint = x'00', details = '[' "],
    "hashes that are none": ["UPDATE blocks SET hash = x'2e2e2f' WHERE rowid = 1"],
    "files elsewhere": ["UPDATE blocks SET file = '../../victim'"],
}


@pytest.mark.parametrize("statements", STRANGE.values(), ids=list(STRANGE))
def test_numbers_that_nobody_wrote_keep_nothing_from_working(tmp_path: Path, statements: list[str]) -> None:
    chain = make_chain(3)
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
    change(tmp_path, *statements)
    with StorageThread(tmp_path) as served:
        assert {record.hash for record in served.take_inventory()} == {b.header.hash for b in chain}
        served.storage.touch([block.header.hash for block in chain])
        served.spill(make_block(seed=99))
        served.clock.advance(100)
        served.settle()
        assert not served.stats().disk.writes_off_detail
        assert len(served.take_inventory()) == 4
        served.storage.delete(tuple(block.header.hash for block in chain))
        served.settle()
        assert len(served.take_inventory()) == 1
    check_is_clean(tmp_path)


def plant_a_journal(manifest: Path, victim: Path) -> None:
    """Put a rollback journal beside a manifest that says: when this is rolled back, remove the victim.

    SQLite's file format, sections 2 and 3: a header, one page, and the name of a super-journal.
    """
    pages = bytearray(manifest.read_bytes())
    pages[18:20] = b"\x01\x01"  # rollback journals instead of a write-ahead log
    manifest.write_bytes(pages)
    magic = bytes.fromhex("d9d505f920a163d7")
    header = (magic + struct.pack(">5I", 1, 0, len(pages) // 4096, 512, 4096)).ljust(512, b"\0")
    page = bytes(pages[:4096])
    checksum = sum(page[index] for index in range(4096 - 200, 0, -200))
    name = str(victim).encode()
    manifest.with_name(manifest.name + "-journal").write_bytes(
        header
        + struct.pack(">I", 1)
        + page
        + struct.pack(">I", checksum)
        + struct.pack(">I", 0x40000000 // 4096 + 1)
        + name
        + struct.pack(">2I", len(name), sum(name))
        + magic
    )


@pytest.mark.parametrize("act", ["serve", "purge", "look"])
def test_a_planted_journal_removes_nobodys_file(tmp_path: Path, act: str) -> None:
    directory, victim = tmp_path / "cache", tmp_path / "victim"
    victim.write_text("precious")
    with StorageThread(directory) as served:
        served.spill(make_block())
    plant_a_journal(directory / "manifest.sqlite3", victim)
    if act == "serve":
        with StorageThread(directory) as served:
            assert not served.stats().disk.writes_off_detail
    else:
        store = OfflineStore(str(directory), files=Files(), clock=ManualClock())
        with contextlib.suppress(StorageError):
            if act == "purge":
                store.purge(lambda _: True, scope=PurgeScope.CHOSEN, progress=lambda *_: None)
            else:
                store.rows()
    assert victim.read_text() == "precious"


def test_a_manifest_that_loses_a_table_at_run_time_is_made_anew(tmp_path: Path) -> None:
    chain = make_chain(3)
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
        change(tmp_path, "DROP TABLE block_contents")
        served.spill(make_block(seed=99))
        served.clock.advance(100)
        served.settle()
        served.spill(make_block(seed=99))
        assert not served.stats().disk.writes_off_detail
        assert len(served.take_inventory()) == 4
    check_is_clean(tmp_path)


QUOTED = (
    "PRAGMA writable_schema = ON",
    "UPDATE sqlite_master SET sql = 'CREATE TABLE written_days ' || CAST(x'80' AS TEXT) "
    "WHERE name = 'written_days'",
    "PRAGMA schema_version = 1000",
)
"""SQLite reads the tables' definitions anew, and quotes in its error what is wrong there: no UTF-8."""


def test_a_manifest_whose_damage_is_quoted_at_run_time_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = make_chain(3)
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
        change(tmp_path, *QUOTED)
        served.spill(make_block(seed=99))
        assert "the manifest answers SQLITE_CORRUPT" in served.stats().disk.writes_off_detail
        served.clock.advance(100)
        served.settle()
        served.spill(make_block(seed=99))
        assert not served.stats().disk.writes_off_detail
        assert len(served.take_inventory()) == 4
    assert r"\x80" in next(vars(r)["detail"] for r in caplog.records if r.message == "manifest_moved_aside")
    check_is_clean(tmp_path)


def test_a_manifest_whose_damage_is_quoted_is_told_of_offline(tmp_path: Path) -> None:
    with StorageThread(tmp_path) as served:
        served.spill(make_block())
    change(tmp_path, *QUOTED)
    with pytest.raises(StorageError, match=r"cannot be used: .*\\x80"):
        OfflineStore(str(tmp_path), files=Files(), clock=ManualClock()).rows()


def test_a_row_that_lost_a_value_is_made_anew_from_its_file(tmp_path: Path) -> None:
    """SQLite finds such a row in order, and no checksum is over what happens to a block."""
    chain = make_chain(2)
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
    change(tmp_path, "UPDATE blocks SET hit_count = NULL WHERE start_token_index > 0")
    with StorageThread(tmp_path) as served:
        found = {record.hash: record.hit_count for record in served.take_inventory()}
        assert found == {block.header.hash: 0 for block in chain}
        served.storage.touch([block.header.hash for block in chain])
        assert len(served.take_inventory()) == 2
    check_is_clean(tmp_path)
