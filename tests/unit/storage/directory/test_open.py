"""A manifest that SQLite opens and this version cannot use is made anew; one that it can use is used."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from icehouse_server.errors import StorageError
from icehouse_server.storage.directory.offline import OfflineStore
from icehouse_server.storage.files import SystemFiles

from tests.fixtures.storage.blocks import make_block, make_chain
from tests.fixtures.storage.storage_thread import ManualClock, StorageThread
from tests.unit.storage.worker.test_crash import check_is_clean


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
    "a column has another name": ["ALTER TABLE written_days RENAME COLUMN size_bytes TO written_bytes"],
    "the list of migrations is missing": ["DROP TABLE _sqlite_migrations"],
    "it is another program's": [
        "DROP TABLE block_contents",
        "DROP TABLE blocks",
        "CREATE TABLE blocks (hash TEXT, what TEXT)",
    ],
}


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


def test_a_column_that_a_later_version_added_is_left_alone(tmp_path: Path) -> None:
    chain = make_chain(3)
    with StorageThread(tmp_path) as served:
        served.spill(*chain)
        served.storage.pin([chain[0].header.hash])
        served.settle()
    change(
        tmp_path,
        "ALTER TABLE blocks ADD COLUMN colour TEXT",
        "ALTER TABLE block_contents ADD COLUMN shape TEXT NOT NULL DEFAULT 'round'",
        "UPDATE blocks SET colour = 'blue'",
    )
    with StorageThread(tmp_path) as served:
        assert not served.stats().last_reconcile.manifest_rebuilt
        assert [record.pinned for record in served.take_inventory()].count(True) == 1
        served.spill(make_block(seed=99))
        assert len(served.take_inventory()) == 4
    connection = sqlite3.connect(tmp_path / "manifest.sqlite3")
    assert connection.execute("SELECT count(*) FROM blocks WHERE colour = 'blue'").fetchone() == (3,)
    connection.close()


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
        OfflineStore(str(tmp_path), files=SystemFiles(), clock=ManualClock()).rows()


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
